"""Rates that several servers share, or one keeps to itself: the generic cell rate algorithm.

`RedisCounters` counts in one Redis for all replicas, by its clock. Where it does not answer, each
replica counts for itself, with its part of the rate: so many replicas as there were last share it.
`SharedRates` is what admission asks: it keeps promises to those who were refused, and lets nobody
wait for what is only settled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from drafthouse_server.errors import ConfigError, QuotaExceeded, StoreError
from drafthouse_server.tenancy.limits import (
    END_USER,
    KINDS,
    REQUESTS,
    EndUserNames,
    Rate,
    Standing,
    rate_exceeded,
    rate_of,
)
from drafthouse_server.tenancy.tenants import Tenant

__all__ = [
    "MemoryCounters",
    "RateCounters",
    "RedisCounters",
    "SharedRates",
    "open_redis",
    "redis_counters",
]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.25
"""Seconds that Redis has to answer a call, which waits for it."""
_BEAT_S = 1.0
"""Seconds between two signs of life of a replica."""
_BEATEN_S = 5.0
"""Seconds after which a replica without one counts no more."""
_ROUNDING_S = 1e-6
_N_CONNECTIONS_MAX = 32
_N_BOOKINGS_MAX = 256
"""Promises of one rate that are kept; those who are refused beyond are promised nothing."""
_GRACE_S, _GRACE_SHARE = 1.0, 0.25
"""A promise is kept so many seconds after its time, or so much of the wait that was promised."""
_EARLY_S = 0.005
"""A promise may be taken so many seconds early: clocks and timers are not exact."""
_N_SWEEP = 4096
_PREFIX = "drafthouse"
_TAKE_OR_NOT, _FORCE, _BOOK = range(3)
_Key: TypeAlias = tuple[str, str]  # tenant, and what is counted

# Times are seconds of Redis's own clock; what is stored is when all that was taken is paid off, and
# when that was written, lest tenants wait for hours by which the clock is set back. Where there is
# too little: 0 just notes the debt, 1 and 2 take all the same. Answers the wait, 0 for 1, and debt.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local cost, per_s, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local paid, written = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) ?(%S*)$')
local back = math.max(0, (tonumber(written or '') or now) - now)
local paid_at = math.max((tonumber(paid or '') or 0) - back, now)
local wait = paid_at + cost / per_s - now - math.max(burst, cost) / per_s
if wait <= 1e-6 or ARGV[4] == '1' then wait = 0 end
if ARGV[4] == '0' and wait > 0 then cost = 0 end
paid_at = paid_at + cost / per_s
if paid_at > now then
  local ms = string.format('%d', math.ceil((paid_at - now) * 1000) + 1000)
  redis.call('SET', KEYS[1], string.format('%.6f %.6f', paid_at, now), 'PX', ms)
else
  redis.call('DEL', KEYS[1])
end
return string.format('%.6f %.6f', wait, math.max(0, paid_at - now))
"""
_BEAT = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + tonumber(ARGV[2]), '+inf')
redis.call('EXPIRE', KEYS[1], 3600)
return redis.call('ZCARD', KEYS[1])
"""


class RateCounters(Protocol):
    """Counts what tenants use of their rates."""

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        books: bool = False,
    ) -> float:
        """Takes units of a rate, if they are there.

        Args:
            tenant: Name of the tenant.
            dimension: What is counted, such as "requests".
            cost: Units. More than the burst is taken as soon as the whole burst is there.
            now: Monotonic time in seconds.
            rate: Of this tenant and dimension.
            books: Whether they are taken all the same where they are not there, to be used when
                they are.

        Returns:
            0 where they are there; otherwise the seconds after which they are, and nothing was
            taken, unless they were to be booked.
        """
        ...

    def reset_s(self, tenant: str, dimension: str, now: float) -> float:
        """Returns the seconds after which all of a burst is there again, as last heard."""
        ...

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Charges units that were used beyond those taken; gives back a negative number of them."""
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


@dataclass(slots=True)
class _Booking:
    """Units that were taken for somebody who was refused, and is to come back for them."""

    origin: str
    """Whose they are."""
    cost: float
    """Units."""
    rate: Rate
    """Of what."""
    due_at: float
    """When they are there."""
    ends_at: float
    """Until when they are kept."""


class SharedRates:
    """Takes units of the rates that several servers share, for one of them.

    Who is refused has the units booked: at the time that it was told, and for a while after, it
    gets them without asking again. So nearly every retry at that time succeeds, if it comes to the
    same server.

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
        self._bookings: dict[_Key, list[_Booking]] = {}
        self._n_sweep = _N_SWEEP
        self._end_users: dict[str, EndUserNames] = {}
        self._surpluses: dict[_Key, tuple[float, Rate]] = {}
        self._has_surplus = asyncio.Event()
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
            origin: Where the request comes from: a promise is kept for whom it was made to.
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
        self._expire(key, now)
        bookings = self._bookings.get(key, [])
        booking = next((b for b in bookings if b.origin == origin and b.due_at <= now), None)
        if booking is not None:
            bookings.remove(booking)
            suffices = cost <= booking.cost
            self._add_surplus(key, rate, (cost if suffices else 0.0) - booking.cost)
            if suffices:
                return
        books = len(bookings) < _N_BOOKINGS_MAX
        asking = asyncio.ensure_future(self.counters.take(*key, cost, now, rate, books=books))
        try:
            wait_s = await asyncio.shield(asking)
        except asyncio.CancelledError:
            give_up = functools.partial(self._give_up, key=key, rate=rate, cost=cost, books=books)
            asking.add_done_callback(give_up)
            raise
        if wait_s:
            if books:
                due_at = self._clock() + wait_s
                ends_at = due_at + max(_GRACE_S, _GRACE_SHARE * wait_s)
                self._book(key, _Booking(origin, cost, rate, due_at - _EARLY_S, ends_at))
            raise rate_exceeded(tenant, metric, wait_s)

    def _dimension(self, tenant: str, metric: str, end_user: str, now: float) -> str:
        """Returns what is counted, by its name."""
        if not end_user:
            return metric
        names = self._end_users.setdefault(tenant, EndUserNames())
        reset_s = self.counters.reset_s
        name = names.name(end_user, now, lambda it: not reset_s(tenant, f"{metric}:{it}", now))
        return f"{metric}:{name}"

    def _give_up(
        self, asked: asyncio.Future[float], key: _Key, rate: Rate, cost: float, *, books: bool
    ) -> None:
        """Gives back what was taken for a call that has left meanwhile."""
        if not asked.cancelled() and asked.exception() is None and (books or not asked.result()):
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

    def _book(self, key: _Key, booking: _Booking) -> None:
        self._bookings.setdefault(key, []).append(booking)
        if len(self._bookings) > self._n_sweep:
            for other in list(self._bookings):
                self._expire(other, self._clock())
            self._n_sweep = max(_N_SWEEP, 2 * len(self._bookings))

    def _expire(self, key: _Key, now: float) -> None:
        """Gives back what nobody came for."""
        bookings = self._bookings.get(key, [])
        for booking in [booking for booking in bookings if booking.ends_at < now]:
            bookings.remove(booking)
            self._add_surplus(key, booking.rate, -booking.cost)
        if not bookings:
            self._bookings.pop(key, None)

    async def _settle_all(self) -> None:
        while True:
            await self._has_surplus.wait()
            self._has_surplus.clear()
            await self._settle_some()

    async def _settle_some(self) -> None:
        surpluses, self._surpluses = self._surpluses, {}
        for (tenant, metric), (surplus, rate) in surpluses.items():
            await self.counters.settle(tenant, metric, surplus, self._clock(), rate)

    async def close(self) -> None:
        """Settles what is left, and ends."""
        self._settling.cancel()
        await asyncio.wait({self._settling})
        await self._settle_some()
        await self.counters.close()


class MemoryCounters:
    """Counts for one server alone."""

    def __init__(self) -> None:
        self._paid_at: dict[_Key, float] = {}
        self._n_sweep = _N_SWEEP

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        books: bool = False,
    ) -> float:
        """Takes units of a rate. See `RateCounters.take`."""
        return self.take_now(tenant, dimension, cost, now, rate, books=books)

    def take_now(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        books: bool = False,
    ) -> float:
        """As `take`, without a hop."""
        paid_at = max(self._paid_at.get((tenant, dimension), now), now)
        wait_s = paid_at + cost / rate.per_s - now - max(rate.burst, cost) / rate.per_s
        is_there = wait_s <= _ROUNDING_S
        if is_there or books:
            self._pay(tenant, dimension, paid_at + cost / rate.per_s, now)
        return 0.0 if is_there else wait_s

    def reset_s(self, tenant: str, dimension: str, now: float) -> float:
        """Returns the seconds after which all of a burst is there again."""
        return max(0.0, self._paid_at.get((tenant, dimension), now) - now)

    def note(self, tenant: str, dimension: str, reset_s: float, now: float) -> None:
        """Takes note of what is known from elsewhere."""
        self._pay(tenant, dimension, now + reset_s, now)

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Charges or gives back units. See `RateCounters.settle`."""
        self.settle_now(tenant, dimension, surplus, now, rate)

    def settle_now(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """As `settle`, without a hop."""
        paid_at = max(self._paid_at.get((tenant, dimension), now), now)
        self._pay(tenant, dimension, paid_at + surplus / rate.per_s, now)

    def _pay(self, tenant: str, dimension: str, paid_at: float, now: float) -> None:
        self._paid_at[tenant, dimension] = paid_at
        if len(self._paid_at) > self._n_sweep:
            self._paid_at = {key: at for key, at in self._paid_at.items() if at > now}
            self._n_sweep = max(_N_SWEEP, 2 * len(self._paid_at))

    async def close(self) -> None:
        """Does nothing: it holds nothing."""


class RedisCounters:
    """Counts for all servers that share a Redis. Used on one event loop.

    Args:
        client: Of redis.asyncio; `redis_counters` makes the right one.
        failures: The exceptions by which it says that Redis does not answer.
        refusals: Those of them by which Redis itself says that the URL's user or password is wrong.
        clock: Monotonic time in seconds, for rates that are counted here meanwhile.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401  # its package may be missing
        failures: tuple[type[Exception], ...],
        refusals: tuple[type[Exception], ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._refusals = refusals
        self._failures: tuple[type[Exception], ...] = (*failures, OSError, TimeoutError)
        self._clock = clock
        self._take = client.register_script(_TAKE)
        self._beat = client.register_script(_BEAT)
        self._id = secrets.token_hex(8)
        self._local = MemoryCounters()
        self._heard = MemoryCounters()
        self._n_returns = 0
        self._beating: asyncio.Task[None] | None = None
        self.n_replicas = 1
        """Servers that share the rates, as Redis has said last."""
        self.is_away = False
        """Whether Redis did not answer when it was asked last."""
        self.answered_at = clock()
        """When it has answered last, by the clock."""

    async def open(self) -> None:
        """Counts this server among the replicas from now on, or as soon as Redis answers.

        Raises:
            StoreError: Redis refuses the user or the password of its URL.
        """
        await self.ping()
        await self._sign()
        self._beating = asyncio.create_task(self._keep_signing())

    async def ping(self) -> bool:
        """Returns whether Redis answers now; changes nothing there.

        Raises:
            StoreError: Redis refuses the user or the password of its URL.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.ping()
        except self._refusals as error:
            await self._client.aclose()
            raise StoreError(
                "the Redis of the rate counters refuses this server"
                f" ({type(error).__name__}); check user and password in its URL"
            ) from None
        except self._failures:
            return False
        return True

    async def close(self) -> None:
        """Counts this server among the replicas no more."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
            if not self.is_away:
                await self._ask(self._client.zrem(f"{_PREFIX}:replicas", self._id))
        await self._ask(self._client.aclose())  # which may fail, where the other end is held

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        books: bool = False,
    ) -> float:
        """Takes units of a rate. See `RateCounters.take`."""
        way = _BOOK if books else _TAKE_OR_NOT
        wait_s = await self._count(tenant, dimension, cost, rate, way)
        if wait_s is not None:
            return wait_s
        return self._local.take_now(tenant, dimension, cost, now, self._part(rate), books=books)

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
    ) -> None:
        """Charges or gives back units. See `RateCounters.settle`."""
        if await self._count(tenant, dimension, surplus, rate, _FORCE) is None:
            self._local.settle_now(tenant, dimension, surplus, now, self._part(rate))

    def reset_s(self, tenant: str, dimension: str, now: float) -> float:
        """Returns the seconds after which all of a burst is there again, as last heard."""
        known = self._local if self.is_away else self._heard
        return known.reset_s(tenant, dimension, now)

    def _part(self, rate: Rate) -> Rate:
        return Rate(rate.per_s / self.n_replicas, rate.burst / self.n_replicas)

    async def _count(
        self, tenant: str, dimension: str, cost: float, rate: Rate, way: int
    ) -> float | None:
        """Returns the wait that Redis tells; None while it does not answer."""
        if self.is_away:  # only `_keep_signing` waits for it then
            return None
        keys = [f"{_PREFIX}:rate:{tenant}:{dimension}"]
        asked = self._take(keys=keys, args=[cost, rate.per_s, rate.burst, way])
        answer = await self._ask(asked)
        if answer is None:
            return None
        wait_s, ahead_s = map(float, answer.split())
        self._heard.note(tenant, dimension, ahead_s, self._clock())
        return wait_s

    async def _keep_signing(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await self._sign()

    async def _sign(self) -> bool:
        """Gives a sign of life, and learns how many do; returns whether Redis has answered."""
        if self.is_away:  # connections of before may look as if they were whole
            await self._ask(self._client.connection_pool.disconnect(inuse_connections=False))
        n_replicas = await self._ask(
            self._beat(keys=[f"{_PREFIX}:replicas"], args=[self._id, _BEATEN_S])
        )
        if n_replicas is None:
            return False
        self.n_replicas = max(1, int(n_replicas))
        if self.is_away:
            self.is_away = False
            self._n_returns += 1
            _log.info("the Redis of the rate counters answers again")
        return True

    async def _ask(self, question: Awaitable[Any]) -> Any:  # noqa: ANN401  # of the client
        """Returns Redis's answer; None where there is none in time."""
        n_returns = self._n_returns
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await question
        except self._failures as error:
            # What was asked before it came back says nothing of it now.
            if not self.is_away and n_returns == self._n_returns:
                self.is_away = True
                _log.warning(
                    "the Redis of the rate counters does not answer (%s): this server counts for"
                    " itself, with 1/%d of each rate",
                    type(error).__name__,
                    self.n_replicas,
                )
            return None
        self.answered_at = self.answered_at if answer is None else self._clock()
        return answer


def redis_counters(url: str) -> RedisCounters:
    """Returns counters over the Redis of a URL, which was not asked yet.

    Args:
        url: redis://USER:PASSWORD@HOST:PORT/NUMBER, or rediss:// with TLS.

    Raises:
        ConfigError: the URL is wrong, or the client's package is not installed.
    """
    try:
        import redis.asyncio as client  # noqa: PLC0415  # only who shares rates has it
        from redis import exceptions  # noqa: PLC0415  # an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415  # an extra
        from redis.backoff import NoBackoff  # noqa: PLC0415  # an extra
    except ImportError:
        problem = "the client of Redis is missing; install 'drafthouse-server[redis]'"
        raise ConfigError("rate_counters_url", "(hidden)", problem=problem) from None
    try:
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_N_CONNECTIONS_MAX,
            timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        problem = "rate_counters_url is no URL of a Redis; expected redis://HOST:PORT/NUMBER"
        raise ConfigError("rate_counters_url", "(hidden)", problem=problem) from None
    refusals = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    return RedisCounters(client.Redis.from_pool(pool), (exceptions.RedisError,), refusals)


async def open_redis(url: str) -> RedisCounters:
    """Returns counters over the Redis of a URL. While it is away they count for this server alone.

    Args:
        url: See `redis_counters`.

    Raises:
        ConfigError: the URL is wrong, or the client's package is not installed.
        StoreError: Redis refuses the user or the password of the URL.
    """
    counters = redis_counters(url)
    await counters.open()
    return counters
