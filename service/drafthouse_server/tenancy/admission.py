"""Whether another request may enter, and the place that it holds until it ends.

Asked once, before any work on its text. The answer is a ticket, which holds the place while the
request is prepared, waits and runs, and is given back exactly once. What it has reserved of its
tenant's rates is settled apart: when it is known what was sent.

Every tenant has its share of the queue, by weight among the tenants that have requests here: below
it nobody is refused because of others. What a tenant leaves of its share, others may use, as long
as the queue is not full; when it is, those above their share are refused. So two tenants that fill
the queue cannot lock out a third, and at most two queues' worth of requests waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from drafthouse_server.errors import Draining, EngineUnhealthy, QueueFull, QuotaExceeded
from drafthouse_server.tenancy.counters import SharedRates
from drafthouse_server.tenancy.limits import (
    INPUT,
    OUTPUT,
    Limits,
    Month,
    Reserved,
    Standing,
)
from drafthouse_server.tenancy.tenants import Tenant
from drafthouse_server.usage.record import UsageStoreFailed

__all__ = ["Admission", "Load", "Ticket", "Turnstile", "month_start", "this_month"]

N_BYTES_MAX = 256 << 20
"""Bytes of requests that may be prepared or wait, over all tenants."""

_WEIGHT = 1 / 8
"""Weight of the last interval in the average time between two places given back."""

_MARGIN = 1.5
"""Places are promised for so many times the average interval: intervals are not alike."""

_INTERVAL_S_MAX = 10.0
"""A longer time without a place given back tells of a lull, not of how long places are held."""

_WAIT_S_MIN, _WAIT_S_MAX = 0.01, 60.0
"""Bounds of what those who are refused are told to wait, in seconds."""


_RETRY_S = 30.0
"""Seconds after which a store that did not tell what was used of a month is asked again."""

_UsedSince: TypeAlias = Callable[[float], Awaitable[Mapping[str, int]]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the server is with a tenant's requests."""

    n_waiting: int
    """Those without a slot."""
    n_active: int
    """Those that are prepared, wait or run."""


@dataclass(slots=True)
class _Places:
    """What one tenant's requests hold."""

    weight: float
    """The tenant's share relative to others'."""
    turnstile: Turnstile
    """When its places are given back."""
    n_waiting: int = 0
    """Requests without a slot."""
    n_active: int = 0
    """Requests that are prepared, wait or run."""
    n_bytes: int = 0
    """Bytes of the requests without a slot."""
    end_users: Counter[str] = field(default_factory=Counter)
    """Requests that are prepared, wait or run, by end user."""


class Ticket:
    """A request's place. Made by `Admission.admit`; whoever has it last gives it back."""

    __slots__ = (
        "_admission",
        "_n_shared",
        "_owner",
        "_reserved",
        "end_user",
        "has_slot",
        "is_held",
        "n_bytes",
        "origin",
        "tenant",
    )

    def __init__(
        self, admission: Admission, tenant: Tenant, n_bytes: int, end_user: str, origin: str
    ) -> None:
        self._admission = admission
        self._owner = tenant
        self._reserved: Reserved | None = None
        self._n_shared = 0  # of the rates that servers share, in order: input, output
        self.tenant = tenant.name
        """Name of the tenant."""
        self.end_user = end_user
        """For whom the tenant asks; empty where it does not say."""
        self.origin = origin
        """Where the request comes from, as well as can be told."""
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

    def reserve(self, n_prompt: int, n_output_max: int) -> None:
        """Takes the request's tokens out of what this server counts of its tenant's use.

        Args:
            n_prompt: Tokens of the prompt.
            n_output_max: Most tokens of the output.

        Raises:
            QuotaExceeded: there are too few left (TENANT_QUOTA_EXCEEDED).
        """
        assert self._reserved is None, "a ticket has reserved twice"
        self._reserved = self._admission.reserve(self._owner, n_prompt, n_output_max, self.origin)

    async def book(self, n_prompt: int, n_output_max: int) -> None:
        """Takes the request's tokens out of what its tenant may use. Once, before it is submitted.

        Args:
            n_prompt: Tokens of the prompt.
            n_output_max: Most tokens of the output.

        Raises:
            QuotaExceeded: there are too few left (TENANT_QUOTA_EXCEEDED).

        Cancellation:
            What was taken is given back, as far as it is known, by `settle`.
        """
        await self._admission.meet_month()
        self.reserve(n_prompt, n_output_max)
        rates = self._admission.rates
        if rates is not None and self._reserved is not None:
            for metric, cost in (
                (INPUT, self._reserved.n_prompt),
                (OUTPUT, self._reserved.n_output),
            ):
                await rates.take(self._owner, metric, cost, self.origin)
                self._n_shared += 1

    def standings(self) -> list[Standing]:
        """Returns how far its tenant's rates are used."""
        return self._admission.standings(self._owner)

    def settle(self, n_prompt: int, n_output: int) -> None:
        """Corrects what was reserved, once it is known what is billed.

        Before or after the place is given back; of no effect a second time, and where nothing was
        reserved.

        Args:
            n_prompt: Tokens of the prompt that count; 0 where it was never begun.
            n_output: Tokens of the output that were sent.
        """
        if self._reserved is None:
            return
        reserved, self._reserved = self._reserved, None
        self._admission.settle(self._owner, reserved, n_prompt, n_output)
        rates = self._admission.rates
        surpluses = (INPUT, n_prompt - reserved.n_prompt), (OUTPUT, n_output - reserved.n_output)
        if rates is not None:
            for metric, surplus in surpluses[: self._n_shared]:
                rates.settle(self._owner, metric, surplus)

    def give_back(self) -> None:
        """Frees the place. Once only."""
        assert self.is_held, "a ticket was given back twice"
        self.is_held = False
        self._admission.take_back(self)


def this_month() -> Month:
    """Returns the month of the calendar, in UTC."""
    now = datetime.datetime.now(datetime.UTC)
    first = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    after = (first + datetime.timedelta(days=32)).replace(day=1)
    return Month(f"{now:%Y-%m}", (after - now).total_seconds())


def month_start(month: Month) -> float:
    """Returns when a month begins, seconds since 1970."""
    return datetime.datetime.strptime(f"{month.name} +0000", "%Y-%m %z").timestamp()


def _elapsed_s(month: Month) -> float:
    """Returns the seconds that have passed of a month."""
    first = datetime.datetime.strptime(month.name, "%Y-%m")
    after = (first + datetime.timedelta(days=32)).replace(day=1)
    return (after - first).total_seconds() - month.left_s


class _Months:
    """Has budgets go on from what was used of a month while this server did not count.

    That is before it began, and also where the clock was wrong then: no server has counted what the
    month, to which the clock jumps, had before.

    Args:
        limits: Where the budgets are.
        clock: Monotonic time in seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._began_at = clock()
        self._known: set[str] = set()
        self._asking: asyncio.Task[None] | None = None
        self._retry_at = -math.inf
        self.used_since: _UsedSince | None = None
        """Returns the tokens of streams that began since a time, by tenant."""

    async def restore(self, month: Month) -> None:
        """Asks what was used of a month, and counts it."""
        if self.used_since is not None:
            used = await self.used_since(month_start(month))
            for tenant, n_tokens in used.items():
                self._limits.restore(tenant, n_tokens, month)
        self._known.add(month.name)

    async def meet(self, month: Month) -> None:
        """Restores a month that is new here, unless this server has counted from its start."""
        if month.name in self._known:
            return
        now = self._clock()
        if self.used_since is None or _elapsed_s(month) <= now - self._began_at:
            self._known.add(month.name)
            return
        if self._asking is None and now >= self._retry_at:
            self._asking = asyncio.create_task(self._try(month))
        if self._asking is not None:
            await asyncio.shield(self._asking)

    async def _try(self, month: Month) -> None:
        try:
            await self.restore(month)
        except UsageStoreFailed as error:
            self._retry_at = self._clock() + _RETRY_S
            _log.warning(
                "the clock has jumped, and what tenants have used of %s is unknown: %s; their"
                " budgets do not count it until the store answers",
                month.name,
                error,
            )
        finally:
            self._asking = None


class Turnstile:
    """Guesses when there will be a place, from how often one was given back; time is an argument.

    Those who are told in a row are told times in a row: each waits for a place of its own.

    Args:
        default_s: Seconds to wait for a place while none was given back yet.
    """

    def __init__(self, default_s: float) -> None:
        self._default_s = default_s
        self._interval_s = 0.0
        self._left_at = math.nan
        self._told_at = -math.inf

    def leave(self, now: float) -> None:
        """Notes that a place was given back."""
        if not math.isnan(self._left_at):
            span = min(max(now - self._left_at, 0.0), _INTERVAL_S_MAX)
            weight = _WEIGHT if self._interval_s else 1.0
            self._interval_s += weight * (span - self._interval_s)
        self._left_at = now

    def wait_s(self, now: float) -> float:
        """Returns the seconds after which a place is likely to be free for who asks."""
        interval_s = _MARGIN * self._interval_s if self._interval_s else self._default_s
        self._told_at = min(max(self._told_at, now) + interval_s, now + _WAIT_S_MAX)
        return max(self._told_at - now, _WAIT_S_MIN)


class Admission:
    """Decides whether a request may enter. A refused request costs no work on its text.

    Args:
        n_waiting_max: Requests without a slot, over all tenants; beyond it come only those of
            tenants below their share.
        retry_after_s: Advice to those who are refused, seconds, until it is known how long places
            are held.
        n_bytes_max: Bytes of the requests without a slot, over all tenants; shared in the same way.
        clock: Monotonic time in seconds.
        month: Returns the month of the calendar.
    """

    def __init__(
        self,
        n_waiting_max: int,
        retry_after_s: float,
        n_bytes_max: int = N_BYTES_MAX,
        clock: Callable[[], float] = time.monotonic,
        month: Callable[[], Month] = this_month,
    ) -> None:
        self._n_waiting_max = n_waiting_max
        self._retry_after_s = retry_after_s
        self._n_bytes_max = n_bytes_max
        self._clock = clock
        self._month = month
        self._limits = Limits()
        self._months = _Months(self._limits, clock)
        self._tenants: dict[str, _Places] = {}  # those with requests here
        self._all_weights = 0.0
        self._n_bytes = 0
        self._is_failed = False
        self._queue = Turnstile(retry_after_s)
        self.n_waiting = 0
        """Requests without a slot."""
        self.n_active = 0
        """Requests that are prepared, wait or run."""
        self.is_draining = False
        """Whether nobody enters any more."""
        self.is_healthy = True
        """Whether the engine works. While it does not, one request at a time tries whether it does
        again."""
        self.rates: SharedRates | None = None
        """Counts the rates that this server shares with others; see `share`."""
        self.on_empty: Callable[[], None] | None = None
        """Called when the last one has left."""

    @property
    def n_running(self) -> int:
        """Requests with a slot."""
        return self.n_active - self.n_waiting

    def load(self, tenant: str) -> Load:
        """Returns how busy the server is with a tenant's requests."""
        places = self._tenants.get(tenant, _Places(1.0, self._queue))
        return Load(places.n_waiting, places.n_active)

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

    def admit(
        self, tenant: Tenant, n_bytes: int = 0, *, end_user: str = "", origin: str = ""
    ) -> Ticket:
        """Lets one request of a tenant in.

        Args:
            tenant: Who asks.
            n_bytes: Size of the request.
            end_user: For whom the tenant asks; empty where it does not say.
            origin: Where the request comes from, such as a connection: who is refused for its rate
                is promised a place there.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
            EngineUnhealthy: the engine keeps failing, and another tries already (ENGINE_UNHEALTHY).
            QuotaExceeded: a limit of the tenant is reached (TENANT_QUOTA_EXCEEDED).
            QueueFull: too many wait, or what they sent is too much together (QUEUE_FULL).
        """
        self.check_open()
        if not self.is_healthy and self.n_active:
            raise EngineUnhealthy(self._retry_after_s)
        places = self._tenants.get(tenant.name)
        if places is None:
            places = _Places(tenant.weight, Turnstile(self._retry_after_s))
        elif places.weight != tenant.weight:  # it was changed while requests of it are here
            self._all_weights += tenant.weight - places.weight
            places.weight = tenant.weight
        self._check_quotas(tenant, places, end_user)
        if not (self._has_room(n_bytes) or self._is_below_share(tenant.name, places, n_bytes)):
            raise QueueFull(self.n_waiting, self._queue.wait_s(self._clock()))
        self._limits.enter(tenant, end_user, self._clock(), origin)
        if not places.n_active:
            self._tenants[tenant.name] = places
            self._all_weights += places.weight
        ticket = Ticket(self, tenant, n_bytes, end_user, origin)
        self.n_active += 1
        places.n_active += 1
        if end_user:
            places.end_users[end_user] += 1
        self._count_waiting(ticket, 1)
        return ticket

    def share(self, rates: SharedRates) -> None:
        """Has the rates of tenants and end users counted with other servers from now on."""
        self.rates = rates
        self._limits.has_rates = False

    async def enter(
        self, tenant: Tenant, n_bytes: int = 0, *, end_user: str = "", origin: str = ""
    ) -> Ticket:
        """Lets one request of a tenant in, as `admit` does, within the rates that servers share.

        Args:
            tenant: Who asks.
            n_bytes: Size of the request.
            end_user: For whom the tenant asks; empty where it does not say.
            origin: Where the request comes from.

        Raises:
            Draining, EngineUnhealthy, QuotaExceeded, QueueFull: See `admit`.

        Cancellation:
            Atomic: it is let in, or not.
        """
        ticket = self.admit(tenant, n_bytes, end_user=end_user, origin=origin)
        if self.rates is None:
            return ticket
        with contextlib.ExitStack() as undo:
            undo.callback(ticket.give_back)  # whatever fails
            await self.rates.enter(tenant, end_user, origin)
            undo.pop_all()
        return ticket

    def _has_room(self, n_bytes: int) -> bool:
        """Returns whether the queue has room for anybody."""
        # One alone is let in whatever its size, which the message bound limits.
        is_too_much = self.n_waiting > 0 and self._n_bytes + n_bytes > self._n_bytes_max
        return self.n_waiting < self._n_waiting_max and not is_too_much

    def _is_below_share(self, tenant: str, places: _Places, n_bytes: int) -> bool:
        """Returns whether one more request is within what a tenant has to itself."""
        weights = self._all_weights
        if tenant not in self._tenants:
            weights += places.weight
        share = min(1.0, places.weight / weights)
        n_places = max(1, int(self._n_waiting_max * share))
        # One alone again: of a tenant that has nothing else here.
        is_small = not places.n_waiting or places.n_bytes + n_bytes <= self._n_bytes_max * share
        return places.n_waiting < n_places and is_small

    def _check_quotas(self, tenant: Tenant, places: _Places, end_user: str) -> None:
        """Checks how many requests of a tenant, and of an end user, are here."""
        n_of_end_user = places.end_users.get(end_user, 0)
        for n_used, limit, quota, metric in (
            (places.n_active, tenant.n_active_max, "requests at once", "max_streams"),
            (places.n_waiting, tenant.n_waiting_max, "waiting requests", "queue_size"),
            (
                n_of_end_user,
                tenant.end_user_active_max,
                "requests at once of an end user",
                "end_user_max_streams",
            ),
        ):
            if limit is not None and n_used >= limit:
                wait_s = places.turnstile.wait_s(self._clock())
                raise QuotaExceeded(tenant.name, quota, limit, wait_s, metric)

    def reserve(self, tenant: Tenant, n_prompt: int, n_output_max: int, origin: str) -> Reserved:
        """Takes a request's tokens out of what its tenant may use. See `Ticket.reserve`."""
        now = self._clock()
        return self._limits.reserve(
            tenant, n_prompt, n_output_max, now, self._month(), origin=origin
        )

    def settle(self, tenant: Tenant, reserved: Reserved, n_prompt: int, n_output: int) -> None:
        """Corrects what was reserved. See `Ticket.settle`."""
        self._limits.settle(tenant, reserved, n_prompt, n_output, self._clock())

    async def restore(self, used_since: _UsedSince) -> None:
        """Has the budgets of this month go on from what was used of them before.

        Args:
            used_since: Returns the tokens of streams that began since a time, by tenant.
        """
        self._months.used_since = used_since
        await self._months.restore(self._month())

    async def meet_month(self) -> None:
        """Has them go on so in a month, too, to which the clock has jumped since."""
        await self._months.meet(self._month())

    def standings(self, tenant: Tenant) -> list[Standing]:
        """Returns how far a tenant's rates are used."""
        found = list(self._limits.standings(tenant, self._clock()))
        return found if self.rates is None else [*found, *self.rates.standings(tenant)]

    def move(self, ticket: Ticket, *, has_slot: bool) -> None:
        """Counts a request that got a slot, or lost it. See `Ticket.move`."""
        self._count_waiting(ticket, -1 if has_slot else 1)

    def take_back(self, ticket: Ticket) -> None:
        """Counts a request no more. See `Ticket.give_back`."""
        places, now = self._tenants[ticket.tenant], self._clock()
        if not ticket.has_slot:
            self._count_waiting(ticket, -1)
        self.n_active -= 1
        places.n_active -= 1
        places.turnstile.leave(now)
        if ticket.end_user:
            _add(places.end_users, ticket.end_user, -1)
        if not places.n_active:
            # Tenants of the past would add up.
            del self._tenants[ticket.tenant]
            self._all_weights -= places.weight
            if not self._tenants:
                self._all_weights = 0.0
        if not self.n_active and self.on_empty is not None:
            self.on_empty()

    def _count_waiting(self, ticket: Ticket, n: int) -> None:
        self.n_waiting += n
        self._n_bytes += n * ticket.n_bytes
        places = self._tenants[ticket.tenant]
        places.n_waiting += n
        places.n_bytes += n * ticket.n_bytes
        if n < 0:
            self._queue.leave(self._clock())


def _add(counts: Counter[str], name: str, n: int) -> None:
    """Adds to a count; what is zero is forgotten, or end users of the past would add up."""
    counts[name] += n
    if not counts[name]:
        del counts[name]
