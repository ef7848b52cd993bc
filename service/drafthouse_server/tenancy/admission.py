"""Whether another request may enter, and the place that it holds until it ends.

Asked once, before any work on its text. The answer is a ticket, which holds the place while the
request is prepared, waits and runs, and is given back exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from drafthouse_server.errors import Draining, QueueFull, QuotaExceeded
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["Admission", "Load", "Ticket"]

N_BYTES_MAX = 256 << 20
"""Bytes of requests that may be prepared or wait, over all tenants."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is with a tenant's requests and with all."""

    n_waiting: int
    """Requests without a slot, over all tenants."""
    n_waiting_tenant: int
    """Of these, the tenant's."""
    n_active_tenant: int
    """Requests of the tenant that are prepared, wait or run."""
    n_bytes: int
    """Bytes of the requests without a slot."""


class Ticket:
    """A request's place. Made by `Admission.admit`; whoever has it last gives it back."""

    __slots__ = ("_admission", "has_slot", "is_held", "n_bytes", "tenant")

    def __init__(self, admission: Admission, tenant: str, n_bytes: int) -> None:
        self._admission = admission
        self.tenant = tenant
        """Name of the tenant."""
        self.n_bytes = n_bytes
        """Size of the request."""
        self.has_slot = False
        """Whether the request runs."""
        self.is_held = True
        """Whether it was not given back yet."""

    def move(self, *, has_slot: bool) -> None:
        """Notes that the request got a slot, or lost it and waits again."""
        if self.is_held and has_slot != self.has_slot:
            self._admission.move(self, has_slot=has_slot)
            self.has_slot = has_slot

    def give_back(self) -> None:
        """Frees the place. Once only."""
        assert self.is_held, "a ticket was given back twice"
        self.is_held = False
        self._admission.take_back(self)


class Admission:
    """Decides whether a request may enter. A refused request costs no work on its text.

    Args:
        n_waiting_max: Requests without a slot, over all tenants.
        retry_after_s: Advice to those who are refused, seconds.
        n_bytes_max: Bytes of the requests without a slot, over all tenants.
    """

    def __init__(
        self, n_waiting_max: int, retry_after_s: float, n_bytes_max: int = N_BYTES_MAX
    ) -> None:
        self._n_waiting_max = n_waiting_max
        self._retry_after_s = retry_after_s
        self._n_bytes_max = n_bytes_max
        self._n_waiting: Counter[str] = Counter()
        self._n_active: Counter[str] = Counter()
        self._n_bytes = 0
        self._is_failed = False
        self.n_waiting = 0
        """Requests without a slot."""
        self.n_active = 0
        """Requests that are prepared, wait or run."""
        self.is_draining = False
        """Whether nobody enters any more."""
        self.on_empty: Callable[[], None] | None = None
        """Called when the last one has left."""

    @property
    def n_running(self) -> int:
        """Requests with a slot."""
        return self.n_active - self.n_waiting

    def load(self, tenant: str) -> Load:
        """Returns how busy the server is."""
        n_waiting, n_active = self._n_waiting[tenant], self._n_active[tenant]
        return Load(self.n_waiting, n_waiting, n_active, self._n_bytes)

    def drain(self, *, is_failed: bool = False) -> None:
        """Lets nobody enter any more.

        Args:
            is_failed: Because the server cannot go on, and not because it is to end.
        """
        self.is_draining = True
        self._is_failed |= is_failed

    def check_open(self) -> None:
        """Checks that the server takes calls.

        Raises:
            Draining: it is shutting down (SERVER_DRAINING).
        """
        if self.is_draining:
            raise Draining(self._retry_after_s, is_failed=self._is_failed)

    def admit(self, tenant: Tenant, n_bytes: int = 0) -> Ticket:
        """Lets one request of a tenant in.

        Args:
            tenant: Who asks.
            n_bytes: Size of the request.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
            QuotaExceeded: a limit of the tenant is reached (TENANT_QUOTA_EXCEEDED).
            QueueFull: too many wait, or what they sent is too much together (QUEUE_FULL).
        """
        self.check_open()
        name = tenant.name
        self._check_quota(name, "requests at once", self._n_active[name], tenant.n_active_max)
        self._check_quota(name, "waiting requests", self._n_waiting[name], tenant.n_waiting_max)
        # One alone is let in whatever its size, which the message bound limits.
        is_too_much = self.n_waiting > 0 and self._n_bytes + n_bytes > self._n_bytes_max
        if self.n_waiting >= self._n_waiting_max or is_too_much:
            raise QueueFull(self.n_waiting, self._retry_after_s)
        ticket = Ticket(self, name, n_bytes)
        self.n_active += 1
        self._n_active[name] += 1
        self._count_waiting(ticket, 1)
        return ticket

    def _check_quota(self, tenant: str, quota: str, n_used: int, limit: int | None) -> None:
        if limit is not None and n_used >= limit:
            raise QuotaExceeded(tenant, quota, limit, self._retry_after_s)

    def move(self, ticket: Ticket, *, has_slot: bool) -> None:
        """Counts a request that got a slot, or lost it. See `Ticket.move`."""
        self._count_waiting(ticket, -1 if has_slot else 1)

    def take_back(self, ticket: Ticket) -> None:
        """Counts a request no more. See `Ticket.give_back`."""
        if not ticket.has_slot:
            self._count_waiting(ticket, -1)
        self.n_active -= 1
        _add(self._n_active, ticket.tenant, -1)
        if not self.n_active and self.on_empty is not None:
            self.on_empty()

    def _count_waiting(self, ticket: Ticket, n: int) -> None:
        self.n_waiting += n
        self._n_bytes += n * ticket.n_bytes
        _add(self._n_waiting, ticket.tenant, n)


def _add(counts: Counter[str], tenant: str, n: int) -> None:
    """Adds to a count; what is zero is forgotten, or tenants of the past would add up."""
    counts[tenant] += n
    if not counts[tenant]:
        del counts[tenant]
