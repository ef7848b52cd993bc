"""Rates that several servers share, or one keeps to itself: the generic cell rate algorithm.

`SharedRates` is what admission asks: it tells those who are refused when to come back, and lets
nobody wait for what is only settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol, TypeAlias

from drafthouse_server.errors import QuotaExceeded
from drafthouse_server.tenancy.limits import (
    END_USER,
    KINDS,
    REQUESTS,
    Asked,
    Rate,
    Row,
    Standing,
    debt_s,
    rate_exceeded,
    rate_of,
)
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["EndUserNames", "MemoryCounters", "RateCounters", "SharedRates", "Turns"]

_ROUNDING_S = 1e-6
_N_SWEEP = 4096
_N_END_USERS_MAX = 4096
_SWEEP_S = 1.0
_Key: TypeAlias = tuple[str, str]  # tenant, and what is counted


class Turns:
    """Lets a few of each name do something at once; the others wait, in order.

    Args:
        n_max: So many.
    """

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._n_here: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}  # of names of which somebody is here

    @contextlib.asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        """Returns the block that a few of a name run at once."""
        turns = self._turns.setdefault(name, asyncio.Semaphore(self._n_max))
        self._n_here[name] += 1
        try:
            async with turns:
                yield
        finally:
            self._n_here[name] -= 1
            if not self._n_here[name]:
                del self._n_here[name], self._turns[name]


class RateCounters(Protocol):
    """Counts what tenants use of their rates."""

    n_replicas: int
    """Servers that share the rates."""

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        kept: float = 0.0,
    ) -> float:
        """Takes units of a rate, if they are there.

        Args:
            tenant: Name of the tenant.
            dimension: What is counted, such as "requests".
            cost: Units. More than the burst is taken as soon as the whole burst is there.
            now: Monotonic time in seconds.
            rate: Of this tenant and dimension.
            kept: Units that must be left; negative: so many may be missing.

        Returns:
            0 where they were taken; otherwise the seconds after which so many are there.
        """
        ...

    def reset_s(self, tenant: str, dimension: str, now: float) -> float:
        """Returns the seconds after which all of a burst is there again, as last heard."""
        ...

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Charges units that were used beyond those taken; gives back a negative number of them.

        Where the rate was raised meanwhile, they count at the higher one.
        """
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


class EndUserNames:
    """Names by which the rates of one tenant's end users are counted where servers share them.

    A name tells nothing of the end user, who may be a person. Those that are too many share one.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._swept_at = -math.inf

    def name(self, end_user: str, now: float, is_idle: Callable[[str], bool]) -> str:
        """Returns the name of an end user.

        Args:
            end_user: As the tenant names it.
            now: Monotonic time in seconds.
            is_idle: Returns whether all that was taken by a name is paid off.
        """
        name = hashlib.blake2b(end_user.encode(), digest_size=16).hexdigest()
        if name in self._known:
            return name
        if len(self._known) >= _N_END_USERS_MAX and now >= self._swept_at + _SWEEP_S:
            self._swept_at = now
            self._known = {known for known in self._known if not is_idle(known)}
        if len(self._known) >= _N_END_USERS_MAX:
            return "others"
        self._known.add(name)
        return name


class SharedRates:
    """Takes units of the rates that several servers share, for one of them.

    Each server spreads the times at which those come back whom it refused, see `Row`, as if the
    others had refused as many.

    Args:
        counters: Where they are counted.
        clock: Monotonic time in seconds.

    Thread:
        Event loop only.
    """

    def __init__(self, counters: RateCounters, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = counters
        """Where they are counted."""
        self._clock = clock
        self._rows: dict[_Key, Row] = {}
        self._n_sweep = _N_SWEEP
        self._end_users: dict[str, EndUserNames] = {}
        self._surpluses: dict[_Key, tuple[float, Rate]] = {}
        self._has_surplus = asyncio.Event()
        self._is_closing = False
        self._settling = asyncio.create_task(self._settle_all())

    async def enter(self, tenant: Tenant, end_user: str, origin: str) -> None:
        """Takes one request of a tenant, and of the end user for whom it asks.

        Args:
            tenant: Who asks.
            end_user: For whom; empty where the tenant does not say.
            origin: Where the request comes from.

        Raises:
            QuotaExceeded: there were too many lately (TENANT_QUOTA_EXCEEDED).

        Cancellation:
            Atomic: nothing is taken.
        """
        await self.take(tenant, REQUESTS, 1, origin)
        if not end_user:
            return
        try:
            await self.take(tenant, END_USER, 1, origin, end_user)
        except (QuotaExceeded, asyncio.CancelledError):
            self.settle(tenant, REQUESTS, -1)
            raise

    async def take(
        self, tenant: Tenant, metric: str, cost: float, origin: str, end_user: str = ""
    ) -> None:
        """Takes units of a rate, if it is limited.

        Args:
            tenant: Who asks.
            metric: The rate.
            cost: Units.
            origin: Where the request comes from, such as a connection.
            end_user: Whose rate it is, where it is an end user's.

        Raises:
            QuotaExceeded: they are not there now (TENANT_QUOTA_EXCEEDED).

        Cancellation:
            Atomic: nothing is taken.
        """
        rate = rate_of(tenant, metric)
        if rate is None or not cost:
            return
        now = self._clock()
        key = (tenant.name, self._dimension(tenant.name, metric, end_user, now))
        row = self._row(key, now)
        asked = Asked(origin, cost, self._part(rate), now)
        place = row.find(asked)
        kept = row.kept(place, asked)
        if kept < 0:  # whom the others let in on credit stands before it, too
            kept *= self.counters.n_replicas
        asking = asyncio.ensure_future(self.counters.take(*key, cost, now, rate, kept=kept))
        try:
            wait_s = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(
                functools.partial(self._give_up, key=key, rate=rate, cost=cost)
            )
            raise
        if not wait_s:
            row.let_in(place, asked)
            return
        wait_s = row.refuse(place, asked._replace(now=self._clock()), wait_s - kept / rate.per_s)
        raise rate_exceeded(tenant, metric, wait_s)

    def _part(self, rate: Rate) -> Rate:
        """Returns the part of a rate that those have whom this server refuses."""
        n = self.counters.n_replicas
        return Rate(rate.per_s / n, rate.burst / n)

    def _row(self, key: _Key, now: float) -> Row:
        """Returns those who were refused for a rate."""
        row = self._rows.get(key)
        if row is None:
            self._sweep(now)
            row = self._rows[key] = Row()
        row.expire(now)
        return row

    def _sweep(self, now: float) -> None:
        """Forgets rows in which nobody is."""
        if len(self._rows) > self._n_sweep:
            self._rows = {key: row for key, row in self._rows.items() if not row.is_empty(now)}
            self._n_sweep = max(_N_SWEEP, 2 * len(self._rows))

    def _dimension(self, tenant: str, metric: str, end_user: str, now: float) -> str:
        """Returns what is counted, by its name."""
        if not end_user:
            return metric
        names = self._end_users.setdefault(tenant, EndUserNames())
        reset_s = self.counters.reset_s
        name = names.name(end_user, now, lambda it: not reset_s(tenant, f"{metric}:{it}", now))
        return f"{metric}:{name}"

    def _give_up(self, asked: asyncio.Future[float], key: _Key, rate: Rate, cost: float) -> None:
        """Gives back what was taken for a call that has left meanwhile."""
        if not asked.cancelled() and asked.exception() is None and not asked.result():
            self._add_surplus(key, rate, -cost)

    def settle(self, tenant: Tenant, metric: str, surplus: float) -> None:
        """Charges units that were used beyond those taken, soon; gives back a negative number."""
        rate = rate_of(tenant, metric)
        if rate is not None:
            self._add_surplus((tenant.name, metric), rate, surplus)

    def _add_surplus(self, key: _Key, rate: Rate, surplus: float) -> None:
        if surplus:
            before, _ = self._surpluses.get(key, (0.0, rate))
            self._surpluses[key] = before + surplus, rate
            self._has_surplus.set()

    def standings(self, tenant: Tenant) -> Iterator[Standing]:
        """Yields how far the rates of a tenant are used, those that are limited, as last heard."""
        for metric, kind in KINDS.items():
            rate = rate_of(tenant, metric)
            if rate is not None:
                reset_s = self.counters.reset_s(tenant.name, metric, self._clock())
                n_left = max(0.0, rate.burst - reset_s * rate.per_s)
                yield Standing(kind, int(rate.burst), int(n_left), reset_s)

    async def _settle_all(self) -> None:
        while not self._is_closing:
            await self._has_surplus.wait()
            self._has_surplus.clear()
            await self._settle_some()

    async def _settle_some(self) -> None:
        surpluses, self._surpluses = self._surpluses, {}
        for (tenant, metric), (surplus, rate) in surpluses.items():
            await self.counters.settle(tenant, metric, surplus, self._clock(), rate)

    async def close(self) -> None:
        """Settles what is left, and ends."""
        self._is_closing = True
        self._has_surplus.set()
        await asyncio.wait({self._settling})
        await self._settle_some()  # what was used while the last was settled
        await self.counters.close()


class MemoryCounters:
    """Counts for one server alone."""

    n_replicas = 1
    """Servers that share the rates."""

    def __init__(self) -> None:
        # When all that was taken is paid off, and the rate that was asked with last.
        self._paid_at: dict[_Key, tuple[float, float]] = {}
        self._n_sweep = _N_SWEEP

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        kept: float = 0.0,
    ) -> float:
        """Takes units of a rate. See `RateCounters.take`."""
        return self.take_now(tenant, dimension, cost, now, rate, kept=kept)

    def take_now(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        kept: float = 0.0,
    ) -> float:
        """Does what `take` does, on the calling thread."""
        _, was_per_s = self._paid_at.get((tenant, dimension), (now, rate.per_s))
        owed_s = debt_s(self.reset_s(tenant, dimension, now), was_per_s, rate.per_s)
        wait_s = owed_s + (cost + kept - max(rate.burst, cost)) / rate.per_s
        is_there = wait_s <= _ROUNDING_S
        if is_there:
            owed_s += cost / rate.per_s
        self._owe(tenant, dimension, owed_s, rate.per_s, now)
        return 0.0 if is_there else wait_s

    def reset_s(self, tenant: str, dimension: str, now: float) -> float:
        """Returns the seconds after which all of a burst is there again."""
        paid_at, _ = self._paid_at.get((tenant, dimension), (now, 0.0))
        return max(0.0, paid_at - now)

    def note(self, tenant: str, dimension: str, reset_s: float, now: float) -> None:
        """Takes note of what is known from elsewhere."""
        self._owe(tenant, dimension, reset_s, 0.0, now)

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Charges or gives back units. See `RateCounters.settle`."""
        self.settle_now(tenant, dimension, surplus, now, rate)

    def settle_now(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Does what `settle` does, on the calling thread."""
        _, was_per_s = self._paid_at.get((tenant, dimension), (now, 0.0))
        per_s = max(rate.per_s, was_per_s)
        owed_s = self.reset_s(tenant, dimension, now) + surplus / per_s
        self._owe(tenant, dimension, owed_s, per_s, now)

    def _owe(self, tenant: str, dimension: str, owed_s: float, per_s: float, now: float) -> None:
        self._paid_at[tenant, dimension] = now + owed_s, per_s
        if len(self._paid_at) > self._n_sweep:
            self._paid_at = {key: it for key, it in self._paid_at.items() if it[0] > now}
            self._n_sweep = max(_N_SWEEP, 2 * len(self._paid_at))

    async def close(self) -> None:
        """Does nothing: it holds nothing."""
