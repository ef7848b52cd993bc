"""Usage in the store: each stream's record is there once, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.rpc.test_rpc_store import client_of
from tests.support.databases import Daemon, postgresql
from tests.support.limits import n_of_month
from tests.support.shell import Shell

import drafthouse
from drafthouse.v1 import usage_pb2, usage_pb2_grpc
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import usage as service
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy import key_ring, store
from drafthouse_server.tenancy.store import StoreUsage
from drafthouse_server.tenancy.tenants import Tenant
from drafthouse_server.usage import shipping
from drafthouse_server.usage.record import UsageQuery, UsageRecord
from drafthouse_server.usage.stores import STORE_NAME

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.05)
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 20.0)  # a slow database is not away
    monkeypatch.setattr(store, "_CLOSE_S", 0.5)
    monkeypatch.setattr(store, "_CONNECT_S", 1)
    monkeypatch.setattr(shipping, "_RETRY_S", 0.1)
    monkeypatch.setattr(store, "_PAUSE_S", 0.5)


@contextmanager
def impatient() -> Iterator[None]:
    """Has a database that does not answer count as away soon, for the time of a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_ring, "_TIMEOUT_S", 0.5)
        patch.setattr(store, "_USAGE_S", 1.0)
        yield


@pytest.fixture(scope="module")
def database() -> Iterator[tuple[Daemon, str]]:
    with postgresql() as found:
        yield found


def stored(url: str) -> Sequence[UsageRecord]:
    with closing(StoreUsage.open(url)) as usage:
        return usage.find(UsageQuery())


async def listed(server: Server, key: str) -> list[int]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        metadata = (("authorization", f"Bearer {key}"),)
        page = await stub.ListUsage(usage_pb2.ListUsageRequest(), metadata=metadata)
        return [record.usage.output_tokens for record in page.records]


def n_month(server: Server, tenant: str) -> int:
    admission = server.loop.admission
    return n_of_month(admission._limits, Tenant(tenant), admission._month())


async def test_with_a_store_usage_is_there_and_budgets_go_on_after_a_restart(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    settings: dict[str, Any] = shell.settings | {"usage_journal": str(tmp_path / "usage")}
    server = await start_server(**settings)
    key, other = shell.add_key(), shell.add_key("bob")
    shell.run("tenants", "set", "acme", "tokens_per_month=30")
    for who, counts in ((key, (3, 5)), (other, (7,))):
        async with client_of(server, who) as client:
            for n_tokens in counts:
                await client.generate("x", max_output_tokens=n_tokens).result()
    assert await listed(server, key) == [3, 5]
    assert (n_month(server, "acme"), n_month(server, "bob")) == (2 + 3 + 2 + 5, 2 + 7)
    await server.close()
    assert not (tmp_path / "usage" / STORE_NAME).exists()
    assert [record.n_output for record in stored(shell.url)] == [3, 5, 7]

    server = await start_server(**settings)
    assert (n_month(server, "acme"), n_month(server, "bob")) == (12, 9)
    async with client_of(server, key) as client:
        with pytest.raises(drafthouse.TenantQuotaExceeded):
            await client.generate("x", max_output_tokens=17).result()
        await client.generate("x", max_output_tokens=16).result()
    assert await listed(server, key) == [3, 5, 16]


@pytest.mark.parametrize("last", [[1.0, "\ud800"], [1.0, "x" * 26], [float("nan"), "0" * 26]])
async def test_a_page_token_of_the_clients_own_making_stops_no_other_list(
    start_server: ServerFactory, tmp_path: Path, last: list[object]
) -> None:
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    settings: dict[str, Any] = shell.settings | {"usage_journal": str(tmp_path / "usage")}
    server = await start_server(**settings)
    key, other = shell.add_key(), shell.add_key("bob")
    async with client_of(server, other) as client:
        await client.generate("x", max_output_tokens=3).result()
    # How a token is made is no secret.
    digest = service._digest(usage_pb2.ListUsageRequest(), "acme")
    token = base64.urlsafe_b64encode(json.dumps([digest, *last]).encode()).decode()
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListUsage(
                usage_pb2.ListUsageRequest(page_token=token),
                metadata=(("authorization", f"Bearer {key}"),),
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("page_token: ")
    assert await listed(server, other) == [3]


async def test_without_a_store_budgets_go_on_after_a_restart_too(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    for n_before in (0, 6):
        server = await start_server(usage_journal=str(tmp_path))
        assert n_month(server, "default") == n_before
        async with client_of(server, None) as client:
            await client.generate("x", max_output_tokens=4).result()
        await server.close()
    assert (tmp_path / STORE_NAME).exists()


@pytest.fixture
def shell_and_daemon(
    database: tuple[Daemon, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Shell, Daemon]:
    daemon, url = database
    # One pepper for all stores of this database.
    return Shell(url, tmp_path_factory.getbasetemp() / "pepper of usage"), daemon


@pytest.mark.parametrize("how", ["held", "stopped"])
async def test_a_database_that_goes_away_under_load_costs_no_record(
    start_server: ServerFactory,
    shell_and_daemon: tuple[Shell, Daemon],
    tmp_path: Path,
    eventually: Eventually,
    how: str,
) -> None:
    shell, daemon = shell_and_daemon
    server = await start_server(
        FakeEngine(step_s=0.001), usage_journal=str(tmp_path), **shell.settings
    )
    key = shell.add_key(how)
    counts: list[int] = []
    is_over = asyncio.Event()

    async def ask(client: drafthouse.AsyncClient) -> None:
        while not is_over.is_set():
            result = await client.generate("x", max_output_tokens=len(counts) % 7 + 1).result()
            counts.append(result.usage.output_tokens)

    usage = server.backends.usage
    assert usage is not None
    async with client_of(server, key) as client:
        loads = [asyncio.create_task(ask(client)) for _ in range(4)]
        await eventually(lambda: len(counts) > 20)
        try:
            with impatient():
                (daemon.hold if how == "held" else daemon.stop)()
                await eventually(lambda: usage.is_away)
                n_before = len(counts)
                await eventually(lambda: len(counts) > n_before + 20)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await listed(server, key)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            (daemon.release if how == "held" else daemon.start)()
        await eventually(lambda: not usage.is_away)
        n_before = len(counts)
        await eventually(lambda: len(counts) > n_before + 20)
        is_over.set()
        await asyncio.gather(*loads)
    await server.close()
    found = [record.n_output for record in stored(shell.url) if record.tenant == how]
    assert sorted(found) == sorted(counts)


async def test_a_server_ends_while_its_database_is_held_and_the_next_one_brings_its_records(
    start_server: ServerFactory, shell_and_daemon: tuple[Shell, Daemon], tmp_path: Path
) -> None:
    shell, daemon = shell_and_daemon
    settings = shell.settings | {"usage_journal": str(tmp_path)}
    server = await start_server(**settings)
    key = shell.add_key("dora")
    async with client_of(server, key) as client:
        await client.generate("x", max_output_tokens=3).result()
        daemon.hold()
        try:
            with impatient():
                await client.generate("x", max_output_tokens=5).result()
                await server.close()
        finally:
            daemon.release()
    server = await start_server(**settings)
    assert n_month(server, "dora") == 2 + 3 + 2 + 5
    assert await listed(server, key) == [3, 5]
