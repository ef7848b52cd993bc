"""Servers that share one Redis: a tenant has one rate, and streams go on without Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.databases import Daemon, redis_server

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import QuotaExceeded, StartupError
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy import counters, redis_counters
from drafthouse_server.tenancy.admission import Admission
from drafthouse_server.tenancy.counters import MemoryCounters, SharedRates
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


@pytest.fixture(scope="module")
def database() -> Iterator[tuple[Daemon, str]]:
    with redis_server() as found:
        yield found


@pytest.fixture
def redis(database: tuple[Daemon, str]) -> Iterator[tuple[Daemon, str]]:
    yield database
    database[0].revive()


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_counters, "_BEAT_S", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine Redis may take longer than calls can wait, and each counts alone."""
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 20.0)


def limits_of(name: str, **limits: Any) -> dict[str, Any]:
    return {"tenants": TenantRegistry({name: Tenant(name, **limits)})}


def client_of(server: Server, key: str) -> drafthouse.AsyncClient:
    return drafthouse.AsyncClient(server.target, api_key=key, retry=None)


async def is_let_in(client: drafthouse.AsyncClient, n_tokens: int = 1) -> bool:
    try:
        await client.generate("x", max_output_tokens=n_tokens).result()
    except drafthouse.TenantQuotaExceeded:
        return False
    return True


@pytest.mark.usefixtures("patient")
async def test_two_servers_share_the_rates_of_a_tenant(
    start_server: ServerFactory, redis: tuple[Daemon, str]
) -> None:
    tenants = TenantRegistry(
        {
            "acme": Tenant("acme", requests_per_s=0.01),
            "bob": Tenant("bob", input_tokens_per_min=100, output_tokens_per_min=10),
        }
    )
    servers = [await start_server(rate_counters_url=redis[1], tenants=tenants) for _ in range(2)]
    first, second = (client_of(server, "acme") for server in servers)
    async with first, second:
        assert await is_let_in(first)
        with pytest.raises(drafthouse.TenantQuotaExceeded) as caught:
            await second.generate("x", max_output_tokens=1).result()
        assert caught.value.retry_after is not None
        assert 90 < caught.value.retry_after <= 100
        # It is told by the one that counts a text, too.
        with pytest.raises(drafthouse.TenantQuotaExceeded):
            await second.count_tokens("x")
    first, second = (client_of(server, "bob") for server in servers)
    async with first, second:
        assert await is_let_in(first, 6)
        assert not await is_let_in(second, 6), "4 are left"
        assert not await is_let_in(first, 6)
    for server in servers:
        assert server.loop.admission.n_active == 0


@pytest.mark.usefixtures("patient")
async def test_two_servers_share_the_rates_of_end_users(
    start_server: ServerFactory, redis: tuple[Daemon, str]
) -> None:
    settings = limits_of("hugo", end_user_requests_per_s=0.01)
    servers = [await start_server(rate_counters_url=redis[1], **settings) for _ in range(2)]
    first, second = (client_of(server, "hugo") for server in servers)
    async with first, second:
        await first.generate("x", max_output_tokens=1, end_user="ann@example.org").result()
        with pytest.raises(drafthouse.TenantQuotaExceeded, match="of an end user") as caught:
            await second.generate("x", max_output_tokens=1, end_user="ann@example.org").result()
        assert caught.value.retry_after is not None
        assert 90 < caught.value.retry_after <= 100
        await second.generate("x", max_output_tokens=1, end_user="bob").result()
        assert await is_let_in(second), "for nobody in particular"
    for server in servers:
        assert server.loop.admission.n_active == 0
        assert isinstance(server.backends.rates, SharedRates)
    kept = await keys_of(redis[1])
    assert len([key for key in kept if ":hugo:end_user_requests_per_s:" in key]) == 2
    assert not [key for key in kept if "ann" in key], "Redis is told no names"


async def keys_of(url: str) -> list[str]:
    """Returns the names of all that Redis keeps."""
    found = redis_counters.redis_counters(url)
    names = [name.decode() for name in await found._client.keys("*")]
    await found.close()
    return names


@pytest.mark.usefixtures("patient")
async def test_what_was_reserved_and_not_sent_is_given_back_to_all(
    start_server: ServerFactory, redis: tuple[Daemon, str]
) -> None:
    settings = limits_of("carl", output_tokens_per_min=100)
    servers = [await start_server(rate_counters_url=redis[1], **settings) for _ in range(2)]
    first, second = (client_of(server, "carl") for server in servers)
    async with first, second:
        whole = await first.generate("x", temperature=0, max_output_tokens=60).result()
        stop = [whole.text[3:5]]
        stopped = await first.generate("x", temperature=0, max_output_tokens=40, stop=stop).result()
        n_left = 100 - 60 - stopped.usage.output_tokens
        assert n_left > 0
        rates = servers[0].backends.rates
        assert rates is not None
        await rates._settle_some()
        assert not await is_let_in(second, n_left + 10)
        assert servers[1].loop.admission.n_active == 0


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is held is away after this; one that is slow is not."""
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("how", ["held", "stopped"])
async def test_redis_goes_away_and_comes_back_under_load(
    start_server: ServerFactory,
    redis: tuple[Daemon, str],
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    daemon, url = redis
    settings = limits_of("dora", requests_per_s=100_000.0, output_tokens_per_min=100_000_000)
    server = await start_server(FakeEngine(step_s=0.002), rate_counters_url=url, **settings)
    rates = server.backends.rates
    assert rates is not None
    shared = rates.counters
    assert isinstance(shared, redis_counters.RedisCounters)
    n_done, is_over = 0, asyncio.Event()

    async def ask(client: drafthouse.AsyncClient) -> None:
        nonlocal n_done
        while not is_over.is_set():
            await client.generate("x", max_output_tokens=3).result()
            n_done += 1

    async with client_of(server, "dora") as client:
        stream = client.generate("x", max_output_tokens=1000, ignore_end_token=True)
        chunks = aiter(stream)
        await anext(chunks)
        loads = [asyncio.create_task(ask(client)) for _ in range(4)]
        await eventually(lambda: n_done > 20)
        caplog.clear()
        caplog.set_level("INFO")
        (daemon.hold if how == "held" else daemon.stop)()
        await eventually(lambda: shared.is_away)
        for _ in range(2):  # it goes on without, and with it again
            n_before = n_done
            await eventually(lambda: n_done > n_before + 20)  # noqa: B023  # it is waited for here
            if shared.is_away:
                daemon.revive()
                await eventually(lambda: not shared.is_away)
        is_over.set()
        await asyncio.gather(*loads)
        [chunk async for chunk in chunks]
        assert (await stream.result()).usage.output_tokens == 1000
    told = [record.getMessage() for record in caplog.records if "rate counters" in record.message]
    assert len(told) >= 2
    for i, line in enumerate(told):  # a line each time, however many calls there were
        assert ("answers again" if i % 2 else "does not answer") in line
    assert server.loop.admission.n_active == 0


@pytest.mark.usefixtures("patient")
async def test_a_server_starts_while_its_redis_is_away_and_shares_rates_when_it_is_there(
    start_server: ServerFactory,
    redis: tuple[Daemon, str],
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon, url = redis
    daemon.stop()
    tenants = TenantRegistry({name: Tenant(name, requests_per_s=0.01) for name in ("erin", "finn")})
    servers = [await start_server(rate_counters_url=url, tenants=tenants) for _ in range(2)]
    told = [record for record in caplog.records if "rate counters" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"] * 2, "a line for each server"
    for server in servers:
        assert not server.backends.states()["rate_counters"].is_up
        async with client_of(server, "erin") as client:
            assert await is_let_in(client)
            assert not await is_let_in(client), "this server's own limit"
    daemon.revive()
    await eventually(lambda: all(s.backends.states()["rate_counters"].is_up for s in servers))
    first, second = (client_of(server, "finn") for server in servers)
    async with first, second:
        assert await is_let_in(first)
        assert not await is_let_in(second), "one rate for both"
    for server in servers:
        assert server.loop.admission.n_active == 0


@pytest.mark.usefixtures("patient")
async def test_a_redis_that_refuses_the_password_keeps_the_server_from_starting(
    start_server: ServerFactory,
) -> None:
    with redis_server("a-right-one") as (daemon, right):
        await start_server(rate_counters_url=right)
        wrong = f"redis://:hunter2@127.0.0.1:{daemon.port}/0"
        with pytest.raises(StartupError, match="refuses this server") as caught:
            await start_server(rate_counters_url=wrong)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(Config(rate_counters_url=wrong))


class SlowCounters(MemoryCounters):
    """Counters that answer when a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def take(self, *asked: Any, **options: Any) -> float:
        found = await super().take(*asked, **options)
        await self.may_answer.wait()
        return found


class Shared:
    """An admission whose rates are counted elsewhere, at a time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.counters = SlowCounters()
        self.rates = SharedRates(self.counters, lambda: self.now)
        self.admission = Admission(64, 1.0, clock=lambda: self.now)
        self.admission.share(self.rates)

    async def wait_of(self, tenant: Tenant, origin: str, end_user: str = "") -> float | None:
        """Returns what the one who comes is told to wait; 0: it is let in."""
        try:
            (await self.admission.enter(tenant, end_user=end_user, origin=origin)).give_back()
        except QuotaExceeded as error:
            return error.retry_after_s
        return 0.0


async def test_who_comes_back_when_told_to_is_let_in() -> None:
    shared, tenant = Shared(), Tenant("acme", requests_per_s=1.0)
    assert await shared.wait_of(tenant, "first") == 0
    waits = {f"c{i}": await shared.wait_of(tenant, f"c{i}") for i in range(20)}
    assert sorted(waits.values(), key=float) == [pytest.approx(i + 1.0) for i in range(20)]  # type: ignore[arg-type]  # approx has no type
    start = shared.now
    for origin, wait_s in waits.items():
        assert wait_s is not None
        shared.now = start + wait_s - 0.01
        assert await shared.wait_of(tenant, f"other {origin}") != 0, "others wait for it"
        shared.now = start + wait_s
        assert await shared.wait_of(tenant, origin) == 0
    await shared.rates.close()


async def test_who_waits_as_told_is_let_in_on_a_new_connection() -> None:
    shared, tenant = Shared(), Tenant("acme", requests_per_s=1.0)
    n_in = n_asked = 0
    while shared.now < 160.0:
        wait_s = await shared.wait_of(tenant, f"c{n_asked}")
        assert wait_s is not None
        n_in, n_asked = n_in + (wait_s == 0), n_asked + 1
        shared.now += wait_s + 0.01 if wait_s else 0.02
    assert n_in >= 54
    assert n_asked <= 2 * n_in + 1
    for _ in range(60):  # who ignores what it is told
        await shared.wait_of(tenant, "rude")
        shared.now += 0.3
    shared.now += 3.0
    assert await shared.wait_of(tenant, "another") == 0
    await shared.rates.close()


async def test_an_end_user_who_is_refused_costs_its_tenant_nothing() -> None:
    shared = Shared()
    tenant = Tenant("acme", requests_per_s=2.0, end_user_requests_per_s=1.0)
    assert await shared.wait_of(tenant, "c1", "ann") == 0
    assert await shared.wait_of(tenant, "c1", "ann") == pytest.approx(1.0)
    await shared.rates._settle_some()
    assert await shared.wait_of(tenant, "c2", "bob") == 0, "the tenant's second of two"
    assert await shared.wait_of(tenant, "c3", "carl") == pytest.approx(0.5), "the tenant's own"
    shared.now += 1.0
    assert await shared.wait_of(tenant, "c1", "ann") == 0, "as was promised"
    assert shared.admission.n_active == 0
    await shared.rates.close()


async def test_end_users_that_are_too_many_share_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_N_END_USERS_MAX", 3)
    monkeypatch.setattr(counters, "_N_SWEEP", 2)
    shared, tenant = Shared(), Tenant("acme", end_user_requests_per_s=1.0)
    waits = [await shared.wait_of(tenant, "c", f"user {i}") for i in range(5)]
    assert waits == [0, 0, 0, 0, pytest.approx(1.0)]
    shared.now += 100.0
    waits = [await shared.wait_of(tenant, "c", f"another {i}") for i in range(3)]
    assert waits == [0, 0, 0], "those of before are forgotten"
    for i in range(20):  # places for which nobody comes
        await shared.wait_of(dataclasses.replace(tenant, name=f"t{i}"), "c", "ann")
        await shared.wait_of(dataclasses.replace(tenant, name=f"t{i}"), "c", "ann")
        shared.now += 100.0
    assert len(shared.rates._rows) <= 20


async def test_who_is_refused_for_its_tenants_rate_costs_its_end_user_nothing() -> None:
    tenant = Tenant("acme", requests_per_s=1.0, end_user_requests_per_s=0.1)
    shared = Shared()

    async def wait_of(end_user: str) -> float | None:
        try:
            await shared.admission.enter(tenant, end_user=end_user, origin=end_user)
        except QuotaExceeded as error:
            return error.retry_after_s
        return 0.0

    assert await wait_of("ann") == 0
    waits = [await wait_of(name) for name in ("bob", "eve")]
    assert waits == [pytest.approx(1.0), pytest.approx(2.0)]
    for name, wait_s in zip(("bob", "eve"), (1.0, 1.0), strict=True):
        shared.now += wait_s
        assert await wait_of(name) == 0, "as it was told"
    shared.now += 1.0
    assert await wait_of("eve") == pytest.approx(9.0), "the end user's own rate"
    await shared.rates.close()


async def test_a_promise_that_nobody_comes_for_is_given_back() -> None:
    shared, tenant = Shared(), Tenant("acme", input_tokens_per_min=60, output_tokens_per_min=6000)
    ticket = await shared.admission.enter(tenant)
    await ticket.book(60, 10)
    late = await shared.admission.enter(tenant)
    with pytest.raises(QuotaExceeded) as caught:
        await late.book(60, 10)
    assert caught.value.retry_after_s == pytest.approx(60.0)
    late.settle(0, 0)
    shared.now += 60.0 + 15.0 + 1.0
    another = await shared.admission.enter(tenant, origin="another")
    await another.book(10, 10)
    await shared.rates._settle_some()
    assert {s.kind: s.n_left for s in another.standings()}["input-tokens"] == 50
    await shared.rates.close()


async def test_tokens_are_settled_with_what_was_sent() -> None:
    shared, tenant = Shared(), Tenant("acme", input_tokens_per_min=100, output_tokens_per_min=100)
    ticket = await shared.admission.enter(tenant)
    await ticket.book(10, 80)
    assert {s.kind: s.n_left for s in ticket.standings()} == {
        "input-tokens": 90, "output-tokens": 20,
    }  # fmt: skip
    ticket.settle(10, 30)
    ticket.give_back()
    await shared.rates._settle_some()
    assert {s.kind: s.n_left for s in ticket.standings()} == {
        "input-tokens": 90, "output-tokens": 70,
    }  # fmt: skip
    await shared.rates.close()


async def test_a_call_that_leaves_while_it_is_counted_takes_nothing() -> None:
    shared, tenant = Shared(), Tenant("acme", requests_per_s=2.0)
    shared.counters.may_answer.clear()
    tasks = [asyncio.create_task(shared.admission.enter(tenant)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert shared.admission.n_active == 0
    shared.counters.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    await shared.rates._settle_some()
    assert shared.counters.reset_s("acme", "requests_per_s", shared.now) == pytest.approx(0.0)
    await shared.rates.close()


async def test_counting_holds_up_no_other_call() -> None:
    """While Redis does not answer one, another that has no rates comes in."""
    shared = Shared()
    shared.counters.may_answer.clear()
    slow = asyncio.create_task(shared.admission.enter(Tenant("acme", requests_per_s=1.0)))
    await asyncio.sleep(0)
    (await asyncio.wait_for(shared.admission.enter(Tenant("bob")), 100)).give_back()
    assert not slow.done()
    shared.counters.may_answer.set()
    (await slow).give_back()
    await shared.rates.close()
