"""Rates in memory and in Redis: never more than the rate, and a wait that suffices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.databases import Daemon, redis_server

from drafthouse_server.errors import ConfigError, StoreError
from drafthouse_server.tenancy import counters
from drafthouse_server.tenancy.counters import MemoryCounters, RedisCounters, open_redis
from drafthouse_server.tenancy.limits import Rate


@pytest.fixture(scope="module")
def redis() -> Iterator[tuple[Daemon, str]]:
    with redis_server() as found:
        yield found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine Redis may take longer than calls can wait, and each counts alone."""
    monkeypatch.setattr(counters, "_TIMEOUT_S", 20.0)


@pytest.fixture
async def shared(redis: tuple[Daemon, str]) -> AsyncIterator[RedisCounters]:
    daemon, url = redis
    found = await open_redis(url)
    await found._client.flushdb()
    assert await found._sign()
    yield found
    daemon.revive()
    await found.close()


@given(
    rate=st.builds(Rate, st.floats(0.1, 1000), st.floats(1, 100)),
    asked=st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 100)), max_size=100),
)
def test_no_more_is_taken_than_the_rate_allows_and_the_wait_suffices(
    rate: Rate, asked: list[tuple[float, float]]
) -> None:
    local, now, taken = MemoryCounters(), 0.0, list[tuple[float, float]]()
    for gap, cost in asked:
        now += gap
        wait_s = local.take_now("acme", "x", cost, now, rate)
        if wait_s:
            now += wait_s
            assert not local.take_now("acme", "x", cost, now + 1e-5, rate)
            now += 1e-5
        taken.append((now, cost))
    largest = max((cost for _, cost in asked), default=0.0)
    for i, (start, _) in enumerate(taken):
        for end, _ in taken[i:]:
            used = sum(cost for at, cost in taken if start <= at <= end)
            bound = (end - start) * rate.per_s + max(rate.burst, largest)
            assert used <= bound * (1 + 1e-6) + 1e-3 * rate.per_s


def test_tenants_and_dimensions_are_counted_apart_and_forgotten() -> None:
    local, rate = MemoryCounters(), Rate(1, 2)
    for tenant in ("a", "b"):
        for dimension in ("requests", "tokens"):
            assert local.take_now(tenant, dimension, 2, 0.0, rate) == 0
            assert local.take_now(tenant, dimension, 1, 0.0, rate) == pytest.approx(1)
    local.settle_now("a", "requests", -1, 0.0, rate)
    assert local.take_now("a", "requests", 1, 0.0, rate) == 0
    local.settle_now("a", "requests", 3, 0.0, rate)
    assert local.take_now("a", "requests", 1, 0.0, rate) == pytest.approx(4)
    for i in range(10_000):
        local.take_now(str(i), "x", 1, 10.0 * i, rate)
    assert len(local._paid_at) <= counters._N_SWEEP + 1


@pytest.mark.usefixtures("patient")
async def test_replicas_share_a_rate(shared: RedisCounters, redis: tuple[Daemon, str]) -> None:
    other = await open_redis(redis[1])
    try:
        rate = Rate(per_s=0.001, burst=10)
        waits = await asyncio.gather(
            *(c.take("acme", "requests", 1, 0.0, rate) for c in (shared, other) for _ in range(10))
        )
        assert sum(wait == 0 for wait in waits) == 10
        assert all(900 < wait <= 1000 for wait in waits if wait)
        assert await other.take("bob", "requests", 1, 0.0, rate) == 0
        assert await other.take("acme", "tokens", 1, 0.0, rate) == 0
        await shared.settle("acme", "requests", -3, 0.0, rate)
        more = [await other.take("acme", "requests", 1, 0.0, rate) for _ in range(4)]
        assert [wait == 0 for wait in more] == [True, True, True, False]
        assert await shared.take("carl", "tokens", 1000, 0.0, rate) == 0, "once, and then waits"
        assert await shared.take("carl", "tokens", 1, 0.0, rate) > 900_000
    finally:
        await other.close()


@pytest.mark.usefixtures("patient")
async def test_what_is_paid_off_is_forgotten(shared: RedisCounters) -> None:
    assert await shared.take("acme", "requests", 1, 0.0, Rate(1000, 10)) == 0
    (key,) = await shared._client.keys("drafthouse:rate:*")
    assert 0 < await shared._client.pttl(key) <= 1100
    await shared.settle("acme", "requests", -5, 0.0, Rate(1000, 10))
    assert await shared._client.keys("drafthouse:rate:*") == []


@pytest.mark.usefixtures("patient")
async def test_a_clock_of_redis_that_was_set_back_makes_nobody_wait_for_hours(
    shared: RedisCounters,
) -> None:
    """All tenants waited until the clock was again where it had been, and dead replicas counted."""
    rate = Rate(10.0, 10.0)
    assert await shared.take("clock", "requests", 10, 0.0, rate) == 0
    seconds, _ = await shared._client.time()
    later = seconds + 7200
    value = f"{later + 1:.6f} {later:.6f}"
    await shared._client.set("drafthouse:rate:clock:requests", value)
    assert await shared.take("clock", "requests", 10, 0.0, rate) == pytest.approx(1.0)
    await asyncio.sleep(0.05)
    assert await shared.take("clock", "requests", 10, 0.0, rate) < 0.96, "who is refused waits less"
    await shared._client.zadd("drafthouse:replicas", {"dead": later})
    assert await shared._sign()
    assert shared.n_replicas == 1


@pytest.mark.parametrize("how", ["held", "stopped"])
async def test_without_redis_each_replica_has_its_part_of_the_rate(
    shared: RedisCounters, redis: tuple[Daemon, str], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, url = redis
    other = await open_redis(url)
    assert await shared._sign()
    assert (shared.n_replicas, other.n_replicas) == (2, 2)
    rate = Rate(per_s=0.001, burst=10)
    try:
        (daemon.hold if how == "held" else daemon.stop)()
        for replica in (shared, other):
            waits = [await replica.take("acme", "requests", 1, 5.0, rate) for _ in range(10)]
            assert [wait == 0 for wait in waits] == [True] * 5 + [False] * 5
            assert replica.is_away
        await shared.settle("acme", "requests", -1, 5.0, rate)
        assert await shared.take("acme", "requests", 1, 5.0, rate) == 0
        assert sum("does not answer" in record.getMessage() for record in caplog.records) == 2
    finally:
        daemon.revive()
        for replica in (shared, other):
            assert await replica._sign()
        await other.close()
    assert not shared.is_away
    assert await shared.take("dora", "requests", 10, 6.0, rate) == 0
    assert await shared._sign()
    assert shared.n_replicas == 1


async def test_a_redis_that_is_not_there_is_told_and_each_counts_for_itself(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    away = await open_redis(f"redis://:hunter2@127.0.0.1:{free_port}/0")
    rate = Rate(per_s=0.001, burst=10)
    waits = [await away.take("acme", "requests", 5, 5.0, rate) for _ in range(3)]
    assert [wait == 0 for wait in waits] == [True, True, False], "all of the rate: nobody is known"
    assert away.is_away
    assert not await away.ping()
    await away.close()
    (record,) = caplog.records
    assert "does not answer" in record.getMessage()
    assert "hunter2" not in caplog.text


@pytest.mark.usefixtures("patient")
async def test_a_redis_that_refuses_the_password_is_told_at_once() -> None:
    with redis_server("a-right-one") as (daemon, right):
        await (await open_redis(right)).close()
        for place in (":hunter2@127.0.0.1", "127.0.0.1"):  # a wrong one, and none
            with pytest.raises(StoreError, match="check user and password") as told:
                await open_redis(f"redis://{place}:{daemon.port}/0")
            assert "hunter2" not in str(told.value)


async def test_a_url_that_is_none_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="rate_counters_url is no URL of a Redis") as caught:
        await open_redis("http://me:hunter2@host")
    assert "hunter2" not in str(caught.value)


class Failed(Exception):
    """As the client of Redis says that it does not answer."""


class HeldTls:
    """A client of Redis whose other end, while it is held, does not close a connection either."""

    def __init__(self) -> None:
        self.connection_pool = self
        self.is_held = False

    def register_script(self, _: str) -> Callable[..., Awaitable[int]]:
        return self.answer

    async def answer(self, *_: object, **__: object) -> int:
        if self.is_held:
            raise Failed
        return 1

    ping = zrem = answer

    async def disconnect(self, inuse_connections: bool) -> None:
        raise Failed

    async def aclose(self) -> None:
        raise Failed


async def test_a_connection_that_cannot_be_closed_keeps_nobody_from_coming_back() -> None:
    client = HeldTls()
    shared = RedisCounters(client, (Failed,))
    await shared.open()
    client.is_held = True
    seen = [(await shared._sign(), shared.is_away) for _ in range(2)]
    assert seen == [(False, True)] * 2
    client.is_held = False
    assert (await shared._sign(), shared.is_away) == (True, False)
    await shared.close()
