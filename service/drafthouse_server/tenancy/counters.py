"""Rates that several servers share, or one keeps to itself: the generic cell rate algorithm.

`RedisCounters` counts in one Redis for all replicas, by its clock. Where it does not answer, each
replica counts for itself, with its part of the rate: so many replicas as there were last share it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from drafthouse_server.errors import ConfigError, StoreError

__all__ = ["MemoryCounters", "RateCounters", "RedisCounters", "SharedRate", "open_redis"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.25
"""Seconds that Redis has to answer a call, which waits for it."""
_BEAT_S = 1.0
"""Seconds between two signs of life of a replica."""
_BEATEN_S = 5.0
"""Seconds after which a replica without one counts no more."""
_ROUNDING_S = 1e-6
_N_SWEEP = 4096
_PREFIX = "drafthouse"

# Times are seconds of Redis's own clock; what is stored is when all that was taken is paid off.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local cost, per_s, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local paid_at = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now)
local wait = paid_at + cost / per_s - now - math.max(burst, cost) / per_s
if ARGV[4] == '0' and wait > 1e-6 then return string.format('%.6f', wait) end
paid_at = paid_at + cost / per_s
if paid_at > now then
  local ms = math.ceil((paid_at - now) * 1000) + 1000
  redis.call('SET', KEYS[1], string.format('%.6f', paid_at), 'PX', string.format('%d', ms))
else
  redis.call('DEL', KEYS[1])
end
return '0'
"""
_BEAT = """
local clock = redis.call('TIME')
local now = tonumber(clock[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('EXPIRE', KEYS[1], 3600)
return redis.call('ZCARD', KEYS[1])
"""


class SharedRate(Protocol):
    """So many units a second in the long run, and so many at once."""

    @property
    def per_s(self) -> float:
        """Units a second, > 0."""
        ...

    @property
    def burst(self) -> float:
        """Units that may be used at once after a pause."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """A replica's part of a rate."""

    per_s: float
    burst: float


class RateCounters(Protocol):
    """Counts what tenants use of their rates."""

    async def take(
        self, tenant: str, dimension: str, cost: float, now: float, rate: SharedRate
    ) -> float:
        """Takes units of a rate, if they are there.

        Args:
            tenant: Name of the tenant.
            dimension: What is counted, such as "requests".
            cost: Units. More than the burst is taken as soon as the whole burst is there.
            now: Monotonic time in seconds.
            rate: Of this tenant and dimension.

        Returns:
            0 where they were taken; otherwise the seconds after which they would be there, and
            nothing was taken.
        """
        ...

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: SharedRate
    ) -> None:
        """Charges units that were used beyond those taken; gives back a negative number of them."""
        ...

    async def close(self) -> None:
        """Gives back what it holds."""
        ...


class MemoryCounters:
    """Counts for one server alone."""

    def __init__(self) -> None:
        self._paid_at: dict[tuple[str, str], float] = {}
        self._n_sweep = _N_SWEEP

    async def take(
        self, tenant: str, dimension: str, cost: float, now: float, rate: SharedRate
    ) -> float:
        """Takes units of a rate. See `RateCounters.take`."""
        return self.take_now(tenant, dimension, cost, now, rate)

    def take_now(
        self, tenant: str, dimension: str, cost: float, now: float, rate: SharedRate
    ) -> float:
        """As `take`, without a hop."""
        paid_at = max(self._paid_at.get((tenant, dimension), now), now)
        wait_s = paid_at + cost / rate.per_s - now - max(rate.burst, cost) / rate.per_s
        if wait_s > _ROUNDING_S:
            return wait_s
        self._pay(tenant, dimension, paid_at + cost / rate.per_s, now)
        return 0.0

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: SharedRate
    ) -> None:
        """Charges or gives back units. See `RateCounters.settle`."""
        self.settle_now(tenant, dimension, surplus, now, rate)

    def settle_now(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: SharedRate
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
        client: Of redis.asyncio; `open_redis` makes the right one.
        failures: The exceptions by which it says that Redis does not answer.
        clock: Monotonic time in seconds, for rates that are counted here meanwhile.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401  # its package may be missing
        failures: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._failures: tuple[type[Exception], ...] = (*failures, OSError, TimeoutError)
        self._clock = clock
        self._take = client.register_script(_TAKE)
        self._beat = client.register_script(_BEAT)
        self._id = secrets.token_hex(8)
        self._local = MemoryCounters()
        self._beating: asyncio.Task[None] | None = None
        self.n_replicas = 1
        """Servers that share the rates, as Redis has said last."""
        self.is_away = False
        """Whether Redis did not answer when it was asked last."""

    async def open(self) -> None:
        """Counts this server among the replicas from now on.

        Raises:
            StoreError: Redis does not answer.
        """
        if not await self._sign():
            raise StoreError("the Redis of the rate counters does not answer; check its URL")
        self._beating = asyncio.create_task(self._keep_signing())

    async def close(self) -> None:
        """Counts this server among the replicas no more."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
        if not self.is_away:
            await self._ask(self._client.zrem(f"{_PREFIX}:replicas", self._id))
        await self._client.aclose()

    async def take(
        self, tenant: str, dimension: str, cost: float, now: float, rate: SharedRate
    ) -> float:
        """Takes units of a rate. See `RateCounters.take`."""
        wait = await self._count(tenant, dimension, cost, rate, is_forced=False)
        if wait is not None:
            return float(wait)
        return self._local.take_now(tenant, dimension, cost, now, self._part(rate))

    async def settle(
        self, tenant: str, dimension: str, surplus: float, now: float, rate: SharedRate
    ) -> None:
        """Charges or gives back units. See `RateCounters.settle`."""
        if await self._count(tenant, dimension, surplus, rate, is_forced=True) is None:
            self._local.settle_now(tenant, dimension, surplus, now, self._part(rate))

    def _part(self, rate: SharedRate) -> _Part:
        return _Part(rate.per_s / self.n_replicas, rate.burst / self.n_replicas)

    async def _count(
        self, tenant: str, dimension: str, cost: float, rate: SharedRate, *, is_forced: bool
    ) -> Any:  # noqa: ANN401  # of the client: bytes, or None while Redis is away
        if self.is_away:  # only `_keep_signing` waits for it then
            return None
        keys = [f"{_PREFIX}:rate:{tenant}:{dimension}"]
        return await self._ask(
            self._take(keys=keys, args=[cost, rate.per_s, rate.burst, int(is_forced)])
        )

    async def _keep_signing(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await self._sign()

    async def _sign(self) -> bool:
        """Gives a sign of life, and learns how many do; returns whether Redis has answered."""
        n_replicas = await self._ask(
            self._beat(keys=[f"{_PREFIX}:replicas"], args=[self._id, _BEATEN_S])
        )
        if n_replicas is None:
            return False
        self.n_replicas = max(1, int(n_replicas))
        if self.is_away:
            self.is_away = False
            _log.info("the Redis of the rate counters answers again")
        return True

    async def _ask(self, question: Awaitable[Any]) -> Any:  # noqa: ANN401  # of the client
        """Returns Redis's answer; None where there is none in time."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await question
        except self._failures as error:
            if not self.is_away:
                self.is_away = True
                _log.warning(
                    "the Redis of the rate counters does not answer (%s): this server counts for"
                    " itself, with 1/%d of each rate",
                    type(error).__name__,
                    self.n_replicas,
                )
            return None


async def open_redis(url: str) -> RedisCounters:
    """Returns counters over the Redis of a URL, which has answered.

    Args:
        url: redis://USER:PASSWORD@HOST:PORT/NUMBER, or rediss:// with TLS.

    Raises:
        ConfigError: the URL is wrong, or the client's package is not installed.
        StoreError: Redis does not answer.
    """
    try:
        import redis.asyncio as client  # noqa: PLC0415  # only who shares rates has it
        from redis.asyncio.retry import Retry  # noqa: PLC0415  # an extra
        from redis.backoff import NoBackoff  # noqa: PLC0415  # an extra
        from redis.exceptions import RedisError  # noqa: PLC0415  # an extra
    except ImportError:
        problem = "the client of Redis is missing; install 'drafthouse-server[redis]'"
        raise ConfigError("redis_url", "(hidden)", problem=problem) from None
    try:
        connected = client.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        problem = "redis_url is no URL of a Redis; expected redis://HOST:PORT/NUMBER"
        raise ConfigError("redis_url", "(hidden)", problem=problem) from None
    counters = RedisCounters(connected, (RedisError,))
    try:
        await counters.open()
    except StoreError:
        await connected.aclose()
        raise
    return counters
