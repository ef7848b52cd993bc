"""The calls that are open: how many, whose, and which of them makes no progress."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drafthouse_server.errors import (
    DrafthouseError,
    QuotaExceeded,
    ServerOverloaded,
    StoreUnavailable,
    TooManyBadKeys,
    Unauthenticated,
)
from drafthouse_server.operations.intake import Intake
from drafthouse_server.tenancy.fairness import SharedBytes
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["Call", "FrontMemory", "OpenCalls"]

_N_BYTES_OF_BYTE = 4
"""Bytes of memory for one of a message: as it came, parsed, as Python has it, and as a job."""

_N_BYTES_OF_ELEMENT = 64
"""Bytes of memory for an element of a list, such as a token id: 4 as parsed, 28 as a number, and a
place of 8 in each of two or three lists."""

_UNKNOWN = Tenant("")

_EXCESS = 2
"""Times as many calls as there are places may be open, of tenants below their share and of callers
that are not known yet."""

_N_TENANTS_MAX = 1000
"""Tenants that are remembered after their calls have ended."""


@dataclass(slots=True, eq=False)
class Call:
    """One call while it is served."""

    method: str
    """Full name, such as "/drafthouse.v1.GenerationService/Generate"."""
    request_id: str
    """Made by the server; no two calls have the same."""
    received_at: float
    """Monotonic time of its receipt, in seconds."""
    client_request_id: str = ""
    """Request id that the client asked for; others may ask for the same. Empty: none."""
    tenant: Tenant = _UNKNOWN
    """Who calls; of no consequence before authentication."""
    key_id: str = ""
    """By which of its keys; empty where none is asked for."""
    reason: str = ""
    """Why it failed, an `ErrorReason` without its prefix; empty while it has not."""
    due: float = math.inf
    """Monotonic time at which it is ended for lack of progress: while its message is awaited, or a
    message to its client is; infinite while the server works for it."""
    reader_s: float = math.inf
    """How long its client may take to take a message, seconds."""
    is_received: bool = False
    """Whether its message is there."""
    is_stuck: bool = False
    """Whether it is ended for lack of progress."""

    is_disowned: bool = False
    """Whether it is ended because its key was revoked, or its tenant deleted."""

    is_over: bool = False
    """Whether its handler has ended: what is left is to send its last words."""
    is_lost: bool = False
    """Whether its client takes nothing, not even these, or there are none: the stream is reset."""

    def await_reader(self, now: float) -> None:
        """Notes that a message is written, which its client must take in time."""
        self.due = now + self.reader_s

    def disown(self) -> None:
        """Notes that it is ended because its key was revoked, or its tenant deleted."""
        self.is_disowned = True

    def go_on(self) -> None:
        """Notes that its client has taken a message, or sent one: the server's turn."""
        self.due = math.inf


class FrontMemory:
    """Memory that open calls hold, shared by the tenants' weights.

    Where it is full, a tenant below its share goes on all the same: at most twice as much is held.
    A request alone is let in whatever its size, which the bounds of its method limit.

    Args:
        n_bytes_max: Bytes of all.
        outbox_bytes: Of these, what one stream takes for what waits for its reader.
        retry_after_s: Advice to those who are refused, seconds.
    """

    def __init__(self, n_bytes_max: int, outbox_bytes: int, retry_after_s: float) -> None:
        self._n_bytes_max = n_bytes_max
        self._outbox_bytes = outbox_bytes
        self._retry_after_s = retry_after_s
        self._shares = SharedBytes()
        self._held: dict[Call, int] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes that are held."""
        return self._shares.total

    def cost(self, n_bytes: int, n_elements: int, *, is_stream: bool) -> int:
        """Returns the bytes that a call holds, rather too many.

        Args:
            n_bytes: Of its message.
            n_elements: Elements of all lists in it, such as token ids.
            is_stream: Whether what is generated may wait for its reader.
        """
        n_outbox = self._outbox_bytes if is_stream else 0
        return _N_BYTES_OF_BYTE * n_bytes + _N_BYTES_OF_ELEMENT * n_elements + n_outbox

    def hold(self, call: Call, n_bytes: int) -> None:
        """Takes memory for a call, until `release`.

        Raises:
            ServerOverloaded: there is too little left (SERVER_OVERLOADED).
        """
        if not n_bytes:
            return  # what takes nothing is not refused because others hold much
        tenant, shares = call.tenant.name, self._shares
        shares.set_weight(tenant, call.tenant.weight)
        if shares.total and shares.total + n_bytes > self._n_bytes_max:
            share = self._n_bytes_max * shares.share(tenant)
            if shares.of(tenant) + n_bytes > share:
                raise ServerOverloaded("bytes of requests are held", self._retry_after_s)
        self._held[call] = self._held.get(call, 0) + n_bytes
        shares.add(tenant, n_bytes)

    def release(self, call: Call) -> None:
        """Gives back what a call holds. Harmless for one that holds nothing."""
        n_bytes = self._held.pop(call, 0)
        if n_bytes:
            self._shares.add(call.tenant.name, -n_bytes)


_REFUSED = tuple(
    error.reason
    for error in (
        ServerOverloaded, QuotaExceeded, Unauthenticated, TooManyBadKeys, StoreUnavailable
    )
)  # fmt: skip
"""Reasons for which calls are counted as refused."""


class OpenCalls:
    """Counts calls from their first byte to the last that their client takes.

    Sequences leave slots and queue when they have ended; what they have yielded stays as long as a
    client does not read it. So calls are counted besides.

    Where all places are taken, a tenant below its share by weight goes on all the same, as with
    `FrontMemory`: else two tenants with all the calls that each may open would lock others out.

    Args:
        n_max: Calls that need a key, over all tenants.
        n_tenant_max: Of these, one tenant's.
        n_keyless_max: Calls that need none.
        retry_after_s: Advice to those who are refused, seconds.
        memory: What they hold.
        intake: What is read of them.
    """

    def __init__(
        self,
        n_max: int,
        n_tenant_max: int,
        n_keyless_max: int,
        retry_after_s: float,
        memory: FrontMemory | None = None,
        *,
        intake: Intake | None = None,
    ) -> None:
        self.memory = memory or FrontMemory(1 << 62, 0, retry_after_s)
        """What they hold."""
        self.intake = intake or Intake(math.inf)
        """What is read of them."""
        self._n_max = n_max
        self._n_tenant_max = n_tenant_max
        self._n_keyless_max = n_keyless_max
        self._retry_after_s = retry_after_s
        self._open: dict[Call, bool] = {}
        self._claimed: dict[Call, str] = {}
        self._shares = SharedBytes()  # in which a call is one
        self._n_keyless = 0
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self.n_refused: Counter[str] = Counter(dict.fromkeys(_REFUSED, 0))
        """Calls that were one too many, or without a key that is known, by the error's reason."""
        self.n_stuck = 0
        """Calls that were ended for lack of progress."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """Who has called of late, by name, as of their last call or since; 1,000 at most."""
        return self._tenants

    def renew(self, tenants: Iterable[Tenant]) -> None:
        """Takes note of what those are now that have called of late."""
        for tenant in tenants:
            if tenant.name in self._tenants:
                self._tenants[tenant.name] = tenant

    def forget(self, tenant: str) -> None:
        """Forgets that a tenant, which was deleted, has called."""
        self._tenants.pop(tenant, None)

    def n_of(self, tenant: str) -> int:
        """Returns how many calls of a tenant are open."""
        return self._shares.of(tenant)

    def note_refused(self, error: DrafthouseError) -> None:
        """Counts a call that is refused for what it takes, or for its key."""
        self.n_refused[error.reason] += 1

    def _noted(self, error: DrafthouseError) -> DrafthouseError:
        self.note_refused(error)
        return error

    def enter(self, call: Call, *, is_keyless: bool = False) -> None:
        """Counts a call whose caller is not known yet.

        Raises:
            ServerOverloaded: too many are open (SERVER_OVERLOADED).
        """
        n_keyed, n_max = len(self._open) - self._n_keyless, _EXCESS * self._n_max
        if self._n_keyless >= self._n_keyless_max if is_keyless else n_keyed >= n_max:
            raise self._noted(ServerOverloaded("calls are open", self._retry_after_s))
        self._open[call] = is_keyless
        self._n_keyless += is_keyless

    def check_intake(self, call: Call, now: float) -> None:
        """Refuses the call of a tenant that has sent too much of late, before it is read.

        Raises:
            QuotaExceeded: it has (TENANT_QUOTA_EXCEEDED).
        """
        try:
            self.intake.check(call.tenant.name, now)
        except QuotaExceeded as error:
            self.note_refused(error)
            raise

    def claim(self, call: Call) -> None:
        """Counts a call as its tenant's.

        Raises:
            QuotaExceeded: too many of the tenant's are open (TENANT_QUOTA_EXCEEDED).
            ServerOverloaded: all places are taken, and the tenant has its share of them
                (SERVER_OVERLOADED).
        """
        tenant, shares = call.tenant.name, self._shares
        n_open = shares.of(tenant)
        if n_open >= self._n_tenant_max:
            limit = self._n_tenant_max
            raise self._noted(QuotaExceeded(tenant, "open calls", limit, self._retry_after_s))
        shares.set_weight(tenant, call.tenant.weight)
        if shares.total >= self._n_max and n_open >= max(1, self._n_max * shares.share(tenant)):
            raise self._noted(ServerOverloaded("calls are open", self._retry_after_s))
        self._claimed[call] = tenant
        shares.add(tenant, 1)
        self._tenants[tenant] = call.tenant
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _N_TENANTS_MAX:
            self._tenants.popitem(last=False)

    def hold(self, call: Call, n_bytes: int) -> None:
        """Takes memory for a call, until it leaves.

        Raises:
            ServerOverloaded: there is too little left (SERVER_OVERLOADED).
        """
        try:
            self.memory.hold(call, n_bytes)
        except ServerOverloaded as error:
            self.note_refused(error)
            raise

    def leave(self, call: Call) -> None:
        """Counts a call no more. Harmless for one that was refused."""
        self.memory.release(call)
        self._n_keyless -= self._open.pop(call, False)
        tenant = self._claimed.pop(call, None)
        if tenant is not None:
            self._shares.add(tenant, -1)

    def overdue(self, now: float) -> list[Call]:
        """Returns the calls that make no progress, each once until it is due again."""
        stuck = [call for call in self._open if call.due <= now]
        for call in stuck:
            call.due = math.inf
            self.n_stuck += not call.is_stuck
            call.is_stuck = True
            # Behind a message that is not taken, gRPC takes no status.
            call.is_lost = call.is_over or call.is_received
        return stuck
