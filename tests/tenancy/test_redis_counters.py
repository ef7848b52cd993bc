"""Rates in Redis: its replicas share them, and each has its part while Redis is away."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.support.certificates import Authority
from tests.support.databases import Daemon, need, redis_server
from tests.support.logged import logged

from drafthouse_server.errors import ConfigError, QuotaExceeded, StoreError
from drafthouse_server.tenancy import redis_counters
from drafthouse_server.tenancy.admission import Admission
from drafthouse_server.tenancy.counters import SharedRates
from drafthouse_server.tenancy.limits import Rate
from drafthouse_server.tenancy.redis_counters import RedisCounters, open_redis
from drafthouse_server.tenancy.tenants import Tenant


@pytest.fixture(scope="module")
def redis() -> Iterator[tuple[Daemon, str]]:
    with redis_server() as found:
        yield found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine Redis may take longer than calls can wait, and each counts alone."""
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 20.0)


@pytest.fixture
async def shared(redis: tuple[Daemon, str]) -> AsyncIterator[RedisCounters]:
    daemon, url = redis
    found = await open_redis(url)
    await found._client.flushdb()
    assert await found._sign()
    yield found
    daemon.revive()
    await found.close()


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
    rate = Rate(0.001, 10)
    assert await shared.take("acme", "requests", 1, 0.0, rate) == 0
    (key,) = await shared._client.keys("drafthouse:rate:*")
    assert 900_000 < await shared._client.pttl(key) <= 1_001_001
    await shared.settle("acme", "requests", -5, 0.0, rate)
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


@pytest.mark.usefixtures("patient")
async def test_a_debt_is_paid_off_sooner_at_a_raised_rate_and_no_later_at_a_lowered_one(
    shared: RedisCounters, redis: tuple[Daemon, str]
) -> None:
    """It went on at the rate at which it was made, for as many minutes as were left of it."""
    low, high = Rate(0.001, 60), Rate(0.01, 600)
    other = await open_redis(redis[1])
    try:
        assert await shared.take("acme", "tokens", 6000, 0.0, low) == 0
        for counters in (shared, other):
            wait_s = await counters.take("acme", "tokens", 100, 0.0, high)
            assert wait_s == pytest.approx(550_000, abs=100)
        await other.settle("acme", "tokens", -5500, 0.0, low)  # of who was let in before
        assert await shared.take("acme", "tokens", 50, 0.0, high) == 0
        assert await shared.take("acme", "tokens", 60, 0.0, high) == pytest.approx(1000, abs=100)
        assert await shared.take("bob", "tokens", 600, 0.0, high) == 0
        assert await other.take("bob", "tokens", 1, 0.0, low) == pytest.approx(1000, abs=100)
    finally:
        await other.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["held", "stopped"])
async def test_without_redis_each_replica_has_its_part_of_the_rate(
    shared: RedisCounters,
    redis: tuple[Daemon, str],
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon, url = redis
    other = await open_redis(url)
    assert await shared._sign()
    assert (shared.n_replicas, other.n_replicas) == (2, 2)
    rate = Rate(per_s=0.001, burst=10)
    try:
        (daemon.hold if how == "held" else daemon.stop)()
        monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 0.25)
        for replica in (shared, other):
            waits = [await replica.take("acme", "requests", 1, 5.0, rate) for _ in range(10)]
            assert [wait == 0 for wait in waits] == [True] * 5 + [False] * 5
            assert replica.is_away
        await shared.settle("acme", "requests", -1, 5.0, rate)
        assert await shared.take("acme", "requests", 1, 5.0, rate) == 0
        assert sum("does not answer" in record.getMessage() for record in caplog.records) == 2
    finally:
        daemon.revive()
        monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 20.0)
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
    (line,) = logged(caplog)
    assert "does not answer" in line
    assert "hunter2" not in caplog.text


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


def shook_hands_in_vain() -> Exception:
    """Returns what the client of Redis raises where TLS does not come about."""
    try:
        try:
            raise ssl.SSLError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
        except OSError as error:
            raise Failed(f"the client's own words, hunter2: {error}") from error
    except Failed as error:
        return error


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (shook_hands_in_vain(), "certificate verify failed"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (TimeoutError(), "(TimeoutError)"),
        (Failed("unknown command 'HELLO', with args: 'AUTH' 'hunter2'"), "(Failed)"),
    ],
)
async def test_why_redis_does_not_answer_is_told_and_no_words_of_its_own(
    raised: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a certificate that is refused the log said "ConnectionError", and doctor "start it"."""

    class Raising(HeldTls):
        async def answer(self, *_: object, **__: object) -> int:
            raise raised

    counters = RedisCounters(Raising(), (Failed,))
    assert not await counters.ping()
    assert told in f"({counters.reason})"
    assert not await counters._sign()
    (line,) = logged(caplog)
    assert told in line
    assert "hunter2" not in counters.reason + line


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("name", ["localhost", "elsewhere.example"])
async def test_a_certificate_of_another_name_is_not_the_redis_of_the_url(
    tmp_path: Path, free_port: int, name: str
) -> None:
    """Clients of Redis before 6 took any name: any authority's customer could be the Redis."""
    authority = Authority()
    certificate, key = authority.issue(x509.DNSName(name)).write(tmp_path)
    program = need(shutil.which("redis-server"), "redis-server")
    daemon = Daemon(
        [program, "--port", "0", "--tls-port", str(free_port), "--bind", "127.0.0.1",
         "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no",
         "--dir", str(tmp_path), "--save", ""], free_port,
    )  # fmt: skip
    daemon.start()
    ca_file = authority.write(tmp_path)
    counters = redis_counters.redis_counters(
        f"rediss://localhost:{free_port}/0?ssl_ca_certs={ca_file}"
    )
    try:
        assert await counters.ping() == (name == "localhost")
        assert ("certificate verify failed" in counters.reason) == (name != "localhost")
    finally:
        await counters.close()
        daemon.stop()


@pytest.mark.usefixtures("patient")
async def test_a_redis_that_refuses_the_password_is_told_at_once() -> None:
    with redis_server("a-right-one") as (daemon, right):
        await (await open_redis(right)).close()
        for place in (":hunter2@127.0.0.1", "127.0.0.1"):  # a wrong one, and none
            with pytest.raises(StoreError, match="check user and password") as told:
                await open_redis(f"redis://{place}:{daemon.port}/0")
            assert "hunter2" not in str(told.value)


@pytest.mark.usefixtures("patient")
async def test_a_redis_user_who_may_ping_and_not_count_is_told_at_once() -> None:
    """The server started, and gave each tenant the whole of its rates beside the others."""
    with redis_server() as (daemon, right):
        client = await open_redis(right)
        user = ("SETUSER", "ann", "on", ">secret", "~drafthouse:*", "+ping", "+get", "+set")
        await client._client.execute_command("ACL", *user)
        await client.close()
        with pytest.raises(StoreError, match="NoPermissionError"):
            await open_redis(f"redis://ann:secret@127.0.0.1:{daemon.port}/0")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@host",
        "redis://me:hunter2@127.0.0.1:1/0?tls=true",
        "redis://me:hunter2@127.0.0.1:1/0?protocol=9",
        "redis://me:hunter2@127.0.0.1:1/rates",
    ],
)
async def test_a_url_that_is_none_is_told_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="rate_counters_url is no URL of a Redis") as caught:
        await open_redis(url)
    assert "hunter2" not in str(caught.value)


async def test_who_has_waited_for_redis_in_vain_finds_what_is_there_now() -> None:
    """Others were served since it asked: what they took is not ahead of its own, older time."""
    client, now = HeldTls(), 100.0
    shared = RedisCounters(client, (Failed,), clock=lambda: now)
    client.is_held, rate = True, Rate(per_s=10, burst=10)
    asked_at = now
    now += 1.5
    assert await shared.take("acme", "requests", 1, now, rate) == 0
    assert await shared.take("acme", "requests", 1, asked_at, rate) == 0
    assert shared.is_away
    assert shared._local.reset_s("acme", "requests", now) == pytest.approx(0.2)


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


class Strange(HeldTls):
    """Something that speaks as Redis does, and has other things to say, such as a proxy."""

    said: object = 1

    async def answer(self, *_: object, **__: object) -> Any:
        return self.said

    async def disconnect(self, inuse_connections: bool) -> None:
        """Does so at once."""

    async def aclose(self) -> None:
        """Does so at once."""


@pytest.mark.parametrize(
    "said", [b"OK", 7, None, b"1", b"nan nan", b"inf 0", b"-1 0", b"1e300 0", [1, 2]]
)
async def test_what_is_no_answer_counts_as_none(said: object) -> None:
    """It was a fault of ours that held a place in the queue for ever."""
    client = Strange()
    shared = RedisCounters(client, (Failed,))
    await shared._sign()
    admission = Admission(10, 1.0)
    admission.share(SharedRates(shared))
    client.said = said
    acme = Tenant("acme", requests_per_s=1.0)
    (await admission.enter(acme)).give_back()
    assert shared.is_away or said is None
    with pytest.raises(QuotaExceeded):
        await admission.enter(acme)
    assert admission.n_active == 0
    client.said = 3
    assert (await shared._sign(), shared.n_replicas) == (True, 3)
    client.said = "many"
    assert not await shared._sign()
    assert admission.rates is not None
    await admission.rates.close()


async def test_a_place_is_given_back_whatever_fails_on_the_way() -> None:
    class Failing(SharedRates):
        async def enter(self, tenant: Tenant, end_user: str, origin: str) -> None:
            raise RuntimeError("a fault of ours")

    admission, client = Admission(10, 1.0), Strange()
    rates = Failing(RedisCounters(client, (Failed,)))
    admission.share(rates)
    with pytest.raises(RuntimeError, match="of ours"):
        await admission.enter(Tenant("acme"))
    assert (admission.n_active, admission.n_waiting) == (0, 0)
    await rates.close()


class Uncancellable(HeldTls):
    """A client that goes on when it is cancelled.

    So does redis-py under Python 3.11, whose `asyncio.wait_for` loses a cancellation that comes
    when what it waits for is just done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def answer(self, *_: object, **__: object) -> Any:
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
        return 1 if self.is_beat else "0 0"

    is_beat = True

    async def disconnect(self, inuse_connections: bool) -> None:
        """Does so at once."""

    async def aclose(self) -> None:
        """Does so at once."""


async def test_a_sign_of_life_that_loses_its_cancellation_keeps_no_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_counters, "_BEAT_S", 0.001)
    client = Uncancellable()
    shared = RedisCounters(client, (Failed,))
    await shared.open()
    client.asked.clear()
    async with asyncio.timeout(100):
        await client.asked.wait()
        await shared.close()


async def test_what_is_settled_as_a_server_ends_is_settled_once_and_wholly() -> None:
    client = Uncancellable()
    client.is_beat = False
    settled = list[str]()

    class Noted(RedisCounters):
        async def settle(
            self, tenant: str, dimension: str, surplus: float, now: float, rate: Rate
        ) -> None:
            await super().settle(tenant, dimension, surplus, now, rate)
            settled.append(tenant)

    rates = SharedRates(Noted(client, (Failed,)))
    for name in ("acme", "bob", "carl"):
        rates.settle(Tenant(name, requests_per_s=1.0), "requests_per_s", 2.0)
    async with asyncio.timeout(100):
        await client.asked.wait()
        await rates.close()
    assert settled == ["acme", "bob", "carl"]
