"""Rates that all servers of one Redis share, counted by its clock.

Where it does not answer, each replica counts for itself, with its part of the rate: so many
replicas as there were last share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from drafthouse_server.errors import ConfigError, StoreError
from drafthouse_server.tenancy.counters import MemoryCounters
from drafthouse_server.tenancy.limits import Rate

__all__ = ["RedisCounters", "open_redis", "redis_counters"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 0.25
"""Seconds that Redis has to answer a call, which waits for it."""
_BEAT_S = 1.0
"""Seconds between two signs of life of a replica."""
_BEATEN_S = 5.0
"""Seconds after which a replica without one counts no more."""
_FAILURES: tuple[type[Exception], ...] = (
    *(OSError, TimeoutError),
    *(AttributeError, TypeError, ValueError, OverflowError),
)
"""Raised of what cannot be reached, and of what is no answer of our scripts."""
_LONGEST_S = 1e11
"""More seconds than any rate makes a tenant wait, and no more than a `RetryInfo` can say."""
_N_CONNECTIONS_MAX = 32
_PREFIX = "drafthouse"
_TAKE_OR_NOT, _FORCE = range(2)

# Times are seconds of Redis's own clock; what is stored is when all that was taken is paid off, and
# when that was written, lest tenants wait for hours by which the clock is set back; and the rate,
# which may be raised meanwhile, see `debt_s`. Where there is too little: 0 just notes the debt, 1
# takes all the same. Answers the wait, 0 for 1, and debt.
_TAKE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local cost, per_s, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local stored = redis.call('GET', KEYS[1]) or ''
local paid, written, was = string.match(stored, '^(%S+) ?([^/]*)/?(%S*)$')
local was_per_s = tonumber(was or '') or per_s
local back = math.max(0, (tonumber(written or '') or now) - now)
local debt = math.max(0, (tonumber(paid or '') or 0) - back - now)
if ARGV[4] == '1' then
  per_s = math.max(per_s, was_per_s)
else
  debt = debt * math.min(1, was_per_s / per_s)
end
local wait = debt + (cost + tonumber(ARGV[5]) - math.max(burst, cost)) / per_s
if wait <= 1e-6 or ARGV[4] == '1' then wait = 0 end
if ARGV[4] == '0' and wait > 0 then cost = 0 end
debt = debt + cost / per_s
if debt > 0 then
  local ms = string.format('%d', math.ceil(debt * 1000) + 1000)
  local text = string.format('%.6f %.6f/%.17g', now + debt, now, per_s)
  redis.call('SET', KEYS[1], text, 'PX', ms)
else
  redis.call('DEL', KEYS[1])
end
return string.format('%.6f %.6f', wait, math.max(0, debt))
"""
_BEAT = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + tonumber(ARGV[2]), '+inf')
redis.call('EXPIRE', KEYS[1], 3600)
return redis.call('ZCARD', KEYS[1])
"""


_Answer = TypeVar("_Answer")


def _seconds(answer: Any) -> tuple[float, float]:  # noqa: ANN401  # of the client
    """Returns the wait and the debt that the script tells.

    Raises:
        ValueError: they are none.
    """
    wait_s, debt_s = map(float, answer.split())
    if not (0 <= wait_s <= _LONGEST_S and 0 <= debt_s <= _LONGEST_S):
        raise ValueError(answer)
    return wait_s, debt_s


def _reason(error: BaseException | None) -> str:
    """Returns why Redis was not reached, in the system's words, as of TLS.

    An answer of Redis itself is not shown: one to an unknown command repeats its arguments, of
    which a password may be one.
    """
    name = type(error).__name__
    while error is not None:
        if isinstance(error, OSError) and (words := str(error).strip()):
            return f"{name}: {words.splitlines()[0]}"
        error = error.__cause__ or error.__context__
    return name


def _nothing(_: object) -> None:
    """Returns nothing, of whatever is no answer to a question."""


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
        self._failures = (*failures, *_FAILURES)
        self._clock = clock
        self._take = client.register_script(_TAKE)
        self._beat = client.register_script(_BEAT)
        self._id = secrets.token_hex(8)
        self._local = MemoryCounters()
        self._heard = MemoryCounters()
        self._n_returns = 0
        self._is_closing = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self.n_replicas = 1
        """Servers that share the rates, as Redis has said last."""
        self.is_away = False
        """Whether Redis did not answer when it was asked last."""
        self.reason = ""
        """Why it did not answer, when it last did not."""
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
        """Returns whether Redis answers now, and does what is asked; changes nothing there.

        Raises:
            StoreError: Redis refuses the user or the password of its URL, or its user a script.
        """
        # Nothing of nobody's rate: one who may ping may be forbidden to count.
        asked = self._take(keys=[f"{_PREFIX}:rate::"], args=[0, 1, 1, _TAKE_OR_NOT, 0])
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await asked
        except self._refusals as error:
            await self._client.aclose()
            raise StoreError(
                "the Redis of the rate counters refuses this server"
                f" ({type(error).__name__}); check user and password in its URL, and its ACL"
            ) from None
        except self._failures as error:
            self.reason = _reason(error)
            return False
        return True

    async def close(self) -> None:
        """Counts this server among the replicas no more."""
        if self._beating is not None:
            # The client's `asyncio.wait_for` may lose a cancellation under Python 3.11.
            self._is_closing.set()
            await asyncio.wait({self._beating})
            if not self.is_away:
                await self._ask(self._client.zrem(f"{_PREFIX}:replicas", self._id), int)
        # Which may fail, where the other end is held.
        await self._ask(self._client.aclose(), _nothing)

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
        wait_s = await self._count(tenant, dimension, cost, rate, _TAKE_OR_NOT, kept=kept)
        if wait_s is not None:
            return wait_s
        now = max(now, self._clock())  # Redis was waited for, and others have been served since
        return self._local.take_now(
            tenant, dimension, cost, now, self._part(rate), kept=kept / self.n_replicas
        )

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
        self, tenant: str, dimension: str, cost: float, rate: Rate, way: int, *, kept: float = 0.0
    ) -> float | None:
        """Returns the wait that Redis tells; None while it does not answer."""
        if self.is_away:  # only `_keep_signing` waits for it then
            return None
        keys = [f"{_PREFIX}:rate:{tenant}:{dimension}"]
        asked = self._take(keys=keys, args=[cost, rate.per_s, rate.burst, way, kept])
        answer = await self._ask(asked, _seconds)
        if answer is None:
            return None
        wait_s, ahead_s = answer
        self._heard.note(tenant, dimension, ahead_s, self._clock())
        return wait_s

    async def _keep_signing(self) -> None:
        while not self._is_closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._is_closing.wait()
                    return
            await self._sign()

    async def _sign(self) -> bool:
        """Gives a sign of life, and learns how many do; returns whether Redis has answered."""
        if self.is_away:  # connections of before may look as if they were whole
            closing = self._client.connection_pool.disconnect(inuse_connections=False)
            await self._ask(closing, _nothing)
        n_replicas = await self._ask(
            self._beat(keys=[f"{_PREFIX}:replicas"], args=[self._id, _BEATEN_S]), int
        )
        if n_replicas is None:
            return False
        self.n_replicas = max(1, n_replicas)
        if self.is_away:
            self.is_away = False
            self._n_returns += 1
            _log.info("the Redis of the rate counters answers again")
        return True

    async def _ask(
        self, question: Awaitable[Any], read: Callable[[Any], _Answer]
    ) -> _Answer | None:
        """Returns Redis's answer; None where there is none in time.

        Args:
            question: Of the client.
            read: Returns what the answer says; what is none, such as a proxy's, counts as silence.
        """
        n_returns = self._n_returns
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = read(await question)
        except self._failures as error:
            self.reason = _reason(error)
            # What was asked before it came back says nothing of it now.
            if not self.is_away and n_returns == self._n_returns:
                self.is_away = True
                _log.warning(
                    "the Redis of the rate counters does not answer (%s): this server counts for"
                    " itself, with 1/%d of each rate",
                    self.reason,
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
        parts = urlsplit(url)
        if parts.scheme != "unix":
            int(parts.path.strip("/") or 0)  # the client takes what is no number for 0
        # Only there is looked at what stands behind a "?".
        pool.make_connection()  # type: ignore[no-untyped-call]  # of redis
    except (TypeError, ValueError, exceptions.RedisError):
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
