"""AdminService over loopback: what operators are told, what they change, what routers watch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from google.protobuf.duration_pb2 import Duration
from tests.support.admin import admin, audit_trail, reason_of
from tests.support.certificates import Authority, Pair
from tests.support.http2 import connect
from tests.support.served import served

import drafthouse
from drafthouse import _transport
from drafthouse.v1 import admin_pb2
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ConfigError, StoreError
from drafthouse_server.operations.audit import AuditTrail
from drafthouse_server.operations.calls import Call
from drafthouse_server.operations.rates import Counters, RecentRates
from drafthouse_server.rpc import listening
from drafthouse_server.rpc.admin import _KEYS, _N_STORE_CALLS
from drafthouse_server.rpc.interceptors import Act, Administer, Observe
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import StepPlan, StepResult
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.store import Store
from drafthouse_server.tenancy.tenants import LIMITS, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

WATCH = "/drafthouse.v1.AdminService/WatchLoad"
SERVING, DRAINING = admin_pb2.SERVER_STATE_SERVING, admin_pb2.SERVER_STATE_DRAINING
KEYS = ("acme:" + "a" * 20, "beta:" + "b" * 20)


def client_of(server: Server, key: str | None = None) -> drafthouse.AsyncClient:
    return drafthouse.AsyncClient(server.target, api_key=key, retry=None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


async def lines_told(eventually: Eventually, path: Path, n: int) -> list[dict[str, Any]]:
    """Waits for `n` lines: a refusal is with its client before its line is in the trail."""
    await eventually(lambda: len(lines(path)) >= n)
    return lines(path)


async def test_status_tells_version_model_load_and_rates(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(admin_port=free_port)
    async with client_of(server) as client, admin(free_port) as stub:
        await client.generate("hello", temperature=0, max_output_tokens=20)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
    limits = server.loop.engine.limits
    assert status.model == server.loop.engine.card.name
    assert status.version
    assert status.uptime.ToNanoseconds() > 0
    assert status.load.state == SERVING
    assert (status.slots, status.load.free_slots) == (limits.n_seq_max, limits.n_seq_max)
    assert (status.kv_cells, status.load.free_kv_cells) == (limits.n_ctx, limits.n_ctx)
    assert status.tokens_per_second > 0
    assert 0 < status.acceptance_rate <= 1
    assert status.draft_tokens_per_step > 0
    assert status.prefix_cache.lookup_tokens > 0
    assert status.store == admin_pb2.STORE_STATE_NONE
    assert not status.usage_journal_failing


async def test_status_reads_nothing_that_is_counted_by_tenant(
    start_server: ServerFactory, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of thousands of tenants that holds up the event loop, and rates are noted each second."""
    server = await start_server(admin_port=free_port)
    reads: list[object] = []
    tenants = server.loop.metrics.tenants

    def count() -> dict[str, object]:
        reads.append(tenants)
        return {}

    monkeypatch.setattr(tenants, "counts", count)
    async with client_of(server) as client, admin(free_port) as stub:
        await client.generate("hello", temperature=0, max_output_tokens=20)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
    assert status.tokens_per_second > 0
    assert not reads
    server.statistics()
    assert len(reads) == 1


async def test_load_counts_what_runs_waits_and_is_not_computed(
    start_server: ServerFactory, free_port: int, eventually: Eventually
) -> None:
    limits = dataclasses.replace(FakeEngine().limits, n_seq_max=2)
    server = await start_server(FakeEngine(limits, step_s=0.05), admin_port=free_port)
    async with client_of(server) as client, admin(free_port) as stub:
        tasks = [
            asyncio.ensure_future(client.generate("x" * 40, max_output_tokens=400).result())
            for _ in range(4)
        ]
        await eventually(lambda: server.loop.admission.n_running == 2)
        await eventually(lambda: server.loop.admission.n_waiting == 2)
        load = (await stub.GetStatus(admin_pb2.GetStatusRequest())).load
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (load.running_requests, load.waiting_requests, load.free_slots) == (2, 2, 0)
    assert load.prefill_backlog_tokens >= 2 * 40
    assert load.free_kv_cells <= limits.n_ctx - 40


async def test_tenants_are_listed_with_their_load_counter_and_limits(
    start_server: ServerFactory, free_port: int
) -> None:
    tenants = {"acme": {"weight": 2.0, "max_streams": 7, "models": ["fake"]}}
    registry = TenantRegistry.from_config(Config(api_keys=KEYS, tenants=tenants))
    server = await start_server(admin_port=free_port, tenants=registry)
    async with (
        client_of(server, "a" * 20) as acme,
        client_of(server, "b" * 20) as beta,
        admin(free_port) as stub,
    ):
        result = await acme.generate("hello", max_output_tokens=12)
        await beta.count_tokens("hello")
        listed = (await stub.ListTenants(admin_pb2.ListTenantsRequest())).tenants
    found = {tenant.tenant: tenant for tenant in listed}
    assert list(found) == ["acme", "beta"]
    assert found["acme"].output_tokens == result.usage.output_tokens == 12
    assert found["acme"].prompt_tokens == result.usage.prompt_tokens
    assert found["acme"].virtual_counter > 0
    assert found["beta"].output_tokens == 0
    limits = found["acme"].limits
    assert (limits.weight, limits.max_streams, list(limits.models)) == (2.0, 7, ["fake"])
    assert not limits.HasField("requests_per_second")
    assert not found["beta"].limits.HasField("max_streams")


async def test_no_limit_of_the_settings_is_missing_in_the_protos() -> None:
    assert {limit.key for limit in LIMITS} == set(_KEYS.values())
    assert list(_KEYS) == [field.name for field in admin_pb2.TenantLimits.DESCRIPTOR.fields]


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = Store.open(url)
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {"weight": 2.0}, records.Change("a test", 1))
    store.close()
    return url


async def test_limits_are_read_set_and_reset_in_the_store(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    path = tmp_path / "audit"
    await start_server(admin_port=free_port, store=store_url, audit_file=str(path))
    async with admin(free_port) as stub:
        found = await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
        assert found.limits == admin_pb2.TenantLimits(weight=2.0)
        limits = admin_pb2.TenantLimits(max_streams=5, models=["b", "a"], max_draft_tokens=0)
        request = admin_pb2.SetLimitsRequest(tenant="acme", limits=limits, reset_fields=["weight"])
        changed = await stub.SetLimits(request)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="nobody"))
    assert changed.limits == admin_pb2.TenantLimits(
        max_streams=5, models=["a", "b"], max_draft_tokens=0
    )
    assert status.store == admin_pb2.STORE_STATE_UP
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert reason_of(caught.value) == "TENANT_NOT_FOUND"
    store = Store.open(store_url)
    with store.reading() as connection:
        (tenant,) = records.list_tenants(connection)
        trail = audit_trail(connection, 1)
    store.close()
    assert tenant.limits == {"max_streams": 5, "models": ["b", "a"], "draft_max": 0}
    assert trail[0]["actor"] == f"admin:uid:{os.getuid()}"
    told = await lines_told(eventually, path, 2)
    acts = [(line["actor"], line["action"], line["target"], line["outcome"]) for line in told]
    me = f"uid:{os.getuid()}"
    assert acts == [
        (me, "SetLimits", "tenant:acme", "ok"),
        (me, "GetLimits", "tenant:nobody", "TENANT_NOT_FOUND"),
    ]
    assert told[0]["detail"]["limits"]["weight"] is None


async def test_why_a_store_takes_no_change_is_told_and_in_the_log(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one that can be read alone, such as a replica, nobody was told: the key ring is served."""
    await start_server(admin_port=free_port, store=store_url)

    def fail(*_: object) -> None:
        raise StoreError("cannot execute DELETE in a read-only transaction")

    monkeypatch.setattr(records, "set_limits", fail)
    request = admin_pb2.SetLimitsRequest(
        tenant="acme", limits=admin_pb2.TenantLimits(max_streams=5)
    )
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetLimits(request)
    assert reason_of(caught.value) == "STORE_UNAVAILABLE"
    assert caught.value.details() == "cannot execute DELETE in a read-only transaction"
    assert "in a read-only transaction" in caplog.text


async def test_the_audit_trail_tells_of_changes_and_failures_and_not_of_reading(
    start_server: ServerFactory, free_port: int, tmp_path: Path, eventually: Eventually
) -> None:
    path = tmp_path / "audit"
    server = await start_server(admin_port=free_port, audit_file=str(path))
    async with admin(free_port) as stub:
        for _ in range(5):  # as `drafthouse status --watch` does
            await stub.GetStatus(admin_pb2.GetStatusRequest())
            await stub.ListTenants(admin_pb2.ListTenantsRequest())
        assert path.read_text("utf-8") == ""
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
        await lines_told(eventually, path, 1)
        watch = stub.WatchLoad(admin_pb2.WatchLoadRequest())
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=-1)))
        await lines_told(eventually, path, 3)
        await stub.Drain(admin_pb2.DrainRequest())
    assert server._stop.is_set()
    assert [(line["action"], line["outcome"]) for line in lines(path)] == [
        ("GetLimits", "refused"),  # there is no store
        ("WatchLoad", "ok"),
        ("Drain", "INVALID_FIELD"),
        ("Drain", "ok"),
    ]


async def test_the_trail_tells_of_a_watcher_what_became_of_its_request_and_of_whom(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    """Each was "ok" and of the server, whatever it asked for. Watchers leave places to others."""
    monkeypatch.setattr("drafthouse_server.rpc.admin._N_WATCHERS_MAX", 1)
    path = tmp_path / "audit"
    await start_server(admin_port=free_port, audit_file=str(path))
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=Duration(seconds=-5))).read()
        await lines_told(eventually, path, 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.WatchCache(admin_pb2.WatchCacheRequest(tenant="x" * 65)).read()
        await lines_told(eventually, path, 2)
        watch = stub.WatchCache(admin_pb2.WatchCacheRequest(tenant="acme"))
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchLoad(admin_pb2.WatchLoadRequest()).read()
        assert reason_of(caught.value) == "SERVER_OVERLOADED"
        await stub.GetStatus(admin_pb2.GetStatusRequest())
        watch.cancel()
    told = await lines_told(eventually, path, 4)
    assert [(line["action"], line["target"], line["outcome"]) for line in told] == [
        ("WatchLoad", "server", "INVALID_FIELD"),
        ("WatchCache", "server", "INVALID_FIELD"),
        ("WatchCache", "tenant:acme", "ok"),
        ("WatchLoad", "server", "SERVER_OVERLOADED"),
    ]


async def test_too_many_calls_of_administrators_are_no_tenants_doing(
    start_server: ServerFactory, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.listening._N_ADMIN_CALLS", 1)
    await start_server(admin_port=free_port)
    async with admin(free_port) as stub:
        watch = stub.WatchLoad(admin_pb2.WatchLoadRequest())
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(admin_pb2.GetStatusRequest())
        watch.cancel()
    assert reason_of(caught.value) == "SERVER_OVERLOADED"


async def test_a_change_whose_caller_has_left_is_in_the_trail_as_done(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    path = Path(store_url.removeprefix("sqlite:///")).with_name("audit")
    begun, may_set = threading.Event(), threading.Event()
    set_limits = records.set_limits

    def set_later(*changed: Any) -> None:
        begun.set()
        assert may_set.wait(100)
        set_limits(*changed)

    monkeypatch.setattr(records, "set_limits", set_later)
    server = await start_server(admin_port=free_port, store=store_url, audit_file=str(path))
    async with admin(free_port) as stub:
        limits = admin_pb2.TenantLimits(max_streams=5)
        call = stub.SetLimits(admin_pb2.SetLimitsRequest(tenant="acme", limits=limits))
        reading = asyncio.ensure_future(call.initial_metadata())  # a call begins when it is read
        await eventually(begun.is_set)
        call.cancel()
        await asyncio.wait({reading})
        may_set.set()
        await eventually(lambda: path.exists() and bool(lines(path)))
        found = await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
    await server.close()
    assert found.limits.max_streams == 5
    [line] = [line for line in lines(path) if line["action"] == "SetLimits"]
    assert (line["outcome"], line["detail"]["is_done"]) == ("cancelled", True)


async def test_a_store_that_hangs_takes_no_thread_of_others(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    has_begun, may_set = threading.Event(), threading.Event()
    set_limits = records.set_limits

    def set_later(*changed: Any) -> None:
        has_begun.set()
        assert may_set.wait(100)
        set_limits(*changed)

    monkeypatch.setattr(records, "set_limits", set_later)
    await start_server(admin_port=free_port, store=store_url)
    shared = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(shared)
    async with admin(free_port) as stub:
        limits = admin_pb2.TenantLimits(max_streams=5)
        request = admin_pb2.SetLimitsRequest(tenant="acme", limits=limits)
        changes = [asyncio.ensure_future(stub.SetLimits(request)) for _ in range(3)]
        try:
            await eventually(has_begun.is_set)
            async with asyncio.timeout(60):
                await asyncio.to_thread(int)
        finally:
            may_set.set()
        changed = await asyncio.gather(*changes)
    assert [it.limits.max_streams for it in changed] == [5, 5, 5]


async def test_a_change_that_waits_for_a_thread_is_not_made_when_its_client_has_left(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    """It could undo, when the store answers again, what was asked for since."""
    opened, may_open = list[str](), threading.Event()
    ended, log_end = list[str](), Observe._log
    n_asked, submit = [0], ThreadPoolExecutor.submit
    open_now = Store.open

    def note_end(observe: Observe, call: Call, outcome: str) -> None:
        log_end(observe, call, outcome)
        ended.append(f"{call.method.rpartition('/')[2]} {outcome}")

    def open_later(url: str, **how: Any) -> Store:
        opened.append(url)
        assert may_open.wait(100)
        return open_now(url, **how)

    def count(threads: ThreadPoolExecutor, *work: Any, **how: Any) -> Future[Any]:
        n_asked[0] += threads._thread_name_prefix == "admin-store"
        return submit(threads, *work, **how)

    await start_server(admin_port=free_port, store=store_url)
    monkeypatch.setattr(Store, "open", open_later)
    monkeypatch.setattr(Observe, "_log", note_end)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", count)
    async with admin(free_port) as stub:
        reading = admin_pb2.GetLimitsRequest(tenant="acme")
        busy = [asyncio.ensure_future(stub.GetLimits(reading)) for _ in range(_N_STORE_CALLS)]
        await eventually(lambda: len(opened) == _N_STORE_CALLS)
        limits = admin_pb2.TenantLimits(max_streams=5)
        change = admin_pb2.SetLimitsRequest(tenant="acme", limits=limits)
        leaves = stub.SetLimits(change)
        await eventually(lambda: n_asked[0] == _N_STORE_CALLS + 1)
        leaves.cancel()
        await eventually(lambda: "SetLimits CANCELLED" in ended)
        may_open.set()
        found = await asyncio.gather(*busy)
    assert len(opened) == _N_STORE_CALLS
    assert not any(it.limits.HasField("max_streams") for it in found)


async def test_a_trail_whose_disk_hangs_takes_no_thread_of_others(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    """A few changes, each waiting for its line, and no operator was told anything any more."""
    has_begun, may_write = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        has_begun.set()
        assert may_write.wait(100)

    server = await start_server(admin_port=free_port, audit_file=str(tmp_path / "audit"))
    monkeypatch.setattr(server._audit, "note", hang)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with admin(free_port) as stub:
        hangs = asyncio.ensure_future(stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme")))
        try:
            await eventually(has_begun.is_set)
            status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
            assert status.load.state == SERVING
        finally:
            may_write.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await hangs


def trail_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("audit")}


async def test_no_thread_of_the_trail_outlives_the_server(
    start_server: ServerFactory, free_port: int, tmp_path: Path, eventually: Eventually
) -> None:
    """It kept the process for five seconds, which then blamed the disk."""
    before, path = trail_threads(), tmp_path / "audit"
    server = await start_server(admin_port=free_port, audit_file=str(path))
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
    await eventually(lambda: bool(trail_threads() - before))
    await server.close()
    await eventually(lambda: not trail_threads() - before)
    assert len(lines(path)) == 1


async def test_the_end_of_a_server_does_not_wait_for_the_disk_of_its_trail(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    before, path = trail_threads(), tmp_path / "audit"
    has_begun, may_write = threading.Event(), threading.Event()
    server = await start_server(admin_port=free_port, audit_file=str(path))
    note = server._audit.note

    def hang(*told: Any) -> None:
        has_begun.set()
        assert may_write.wait(100)
        note(*told)

    monkeypatch.setattr(server._audit, "note", hang)
    async with admin(free_port) as stub:
        asked = asyncio.ensure_future(stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme")))
        try:
            await eventually(has_begun.is_set)
            async with asyncio.timeout(60):
                await server.close()
        finally:
            may_write.set()
        await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: not trail_threads() - before)
    assert len(lines(path)) == 1, "it was written when the disk answered"


async def test_a_call_that_ends_after_the_trail_is_closed_has_its_line(
    tmp_path: Path, eventually: Eventually
) -> None:
    path = tmp_path / "audit"
    administer = Administer(AuditTrail(str(path)), lambda: 1)
    administer.close()
    await administer._note("Drain", Act("uid:1"), "cancelled")
    await eventually(lambda: path.exists() and len(lines(path)) == 1)


async def test_a_fault_of_ours_is_in_the_trail_as_failed(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    def fail(_: float | None) -> None:
        raise RuntimeError("a bug of ours")

    path = tmp_path / "audit"
    server = await start_server(admin_port=free_port, audit_file=str(path))
    monkeypatch.setattr(server, "drain", fail)
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Drain(admin_pb2.DrainRequest())
    [line] = await lines_told(eventually, path, 1)
    assert (line["action"], line["outcome"]) == ("Drain", "failed")


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        ({"tenant": "acme"}, {"limits"}),
        ({"tenant": "", "reset_fields": ["weight"]}, {"tenant"}),
        (
            {"tenant": "acme", "limits": {"weight": 0.0, "max_streams": 0}},
            {"limits.weight", "limits.max_streams"},
        ),
        ({"tenant": "acme", "limits": {"max_priority": 101}}, {"limits.max_priority"}),
        ({"tenant": "acme", "reset_fields": ["colour"]}, {"reset_fields"}),
        (
            {"tenant": "acme", "limits": {"weight": 1.0}, "reset_fields": ["weight"]},
            {"reset_fields"},
        ),
        ({"tenant": "acme", "limits": {"models": ["a", ""]}}, {"limits.models[1]"}),
    ],
)
async def test_limits_that_break_a_rule_change_nothing(
    start_server: ServerFactory,
    store_url: str,
    free_port: int,
    request_: dict[str, Any],
    fields: set[str],
) -> None:
    await start_server(admin_port=free_port, store=store_url)
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SetLimits(admin_pb2.SetLimitsRequest(**request_))
        found = await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
    assert reason_of(caught.value) == "INVALID_FIELD"
    assert all(field in (caught.value.details() or "") for field in fields)
    assert found.limits == admin_pb2.TenantLimits(weight=2.0)


async def test_a_limit_may_be_reset_twice_in_one_call(
    start_server: ServerFactory, store_url: str, free_port: int
) -> None:
    """It was refused, as one that is set and reset."""
    await start_server(admin_port=free_port, store=store_url)
    request = admin_pb2.SetLimitsRequest(tenant="acme", reset_fields=["weight", "weight"])
    async with admin(free_port) as stub:
        changed = await stub.SetLimits(request)
    assert changed.limits == admin_pb2.TenantLimits()


async def test_a_time_just_outside_its_rule_is_told_so_that_it_shows(
    start_server: ServerFactory, free_port: int
) -> None:
    await start_server(admin_port=free_port)
    request = admin_pb2.WatchLoadRequest(interval=Duration(nanos=9_999_999))
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchLoad(request).read()
    told = "interval: must be in [0.01, 60] seconds, is 0.009999999"
    assert caught.value.details() == told


async def test_without_a_store_limits_are_unimplemented(
    start_server: ServerFactory, free_port: int
) -> None:
    await start_server(admin_port=free_port)
    async with admin(free_port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLimits(admin_pb2.GetLimitsRequest(tenant="acme"))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "no store" in (caught.value.details() or "")


async def test_drain_lets_running_streams_finish_and_refuses_new_ones(
    gated_engine: GatedEngine, free_port: int
) -> None:
    config = Config(port=0, admin_port=free_port, drain_timeout_s=0.0, draft_policy="fixed")
    server = Server(config, lambda: gated_engine)
    serving = await served(server)
    async with client_of(server) as client, admin(free_port) as stub:
        stream = client.generate("hello", max_output_tokens=100)
        chunks = aiter(stream)
        await anext(chunks)
        gated_engine.hold()
        watch = stub.WatchLoad(admin_pb2.WatchLoadRequest())
        assert (await watch.read()).load.state == SERVING
        # A minute, in place of the settings' zero, which would end the stream.
        answer = await stub.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=60)))
        assert (answer.load.state, answer.load.running_requests) == (DRAINING, 1)
        assert (await watch.read()).load.state == DRAINING
        assert server.loop.is_draining
        gated_engine.release()
        n_tokens = sum([len(chunk.token_ids) async for chunk in chunks])
        assert 0 < n_tokens < 100
        assert (await stream.result()).usage.output_tokens == 100
    await serving


async def test_the_first_signal_leaves_a_drain_its_time_and_the_second_ends_it(
    gated_engine: GatedEngine,
    free_port: int,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where an operator drains a server, and what supervises it then sends SIGTERM."""
    config = Config(port=0, admin_port=free_port, draft_policy="fixed")
    server = Server(config, lambda: gated_engine)
    serving = await served(server)
    step, steps = gated_engine.step, iter(range(120))

    def step_some(plan: StepPlan) -> StepResult:
        """One stream has its 100 tokens by then, and the other one not its 900."""
        if next(steps, None) is None:
            gated_engine.hold()
        return step(plan)

    gated_engine.hold()
    async with client_of(server) as client, admin(free_port) as stub:
        short, long = (
            asyncio.ensure_future(client.generate("hello", max_output_tokens=n).result())
            for n in (100, 900)
        )
        await eventually(lambda: len(server.loop._outboxes) == 2)
        await stub.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=600)))
        monkeypatch.setattr(gated_engine, "step", step_some)
        signal.raise_signal(signal.SIGTERM)
        gated_engine.release()
        assert (await short).usage.output_tokens == 100
        signal.raise_signal(signal.SIGTERM)
        await eventually(server._force.is_set)
        monkeypatch.undo()
        gated_engine.release()
        with pytest.raises(drafthouse.DrafthouseError):
            await long
    await serving


async def test_a_second_drain_shortens_the_time(gated_engine: GatedEngine, free_port: int) -> None:
    config = Config(port=0, admin_port=free_port, drain_timeout_s=600.0, draft_policy="fixed")
    server = Server(config, lambda: gated_engine)
    serving = await served(server)
    async with client_of(server) as client, admin(free_port) as stub:
        stream = client.generate("hello", max_output_tokens=900)
        chunks = aiter(stream)
        await anext(chunks)
        gated_engine.hold()
        await stub.Drain(admin_pb2.DrainRequest())
        await stub.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=0)))
        gated_engine.release()
        with pytest.raises(drafthouse.ServerDraining):
            async for _ in chunks:
                pass
    await serving


async def test_durations_out_of_range_are_refused(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(admin_port=free_port)
    async with admin(free_port) as stub:
        for seconds in (-1, 100_000):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Drain(admin_pb2.DrainRequest(timeout=Duration(seconds=seconds)))
            assert reason_of(caught.value) == "INVALID_FIELD"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=Duration(nanos=1))).read()
        assert reason_of(caught.value) == "INVALID_FIELD"
    assert not server.loop.is_draining


async def test_a_slow_watcher_gets_the_newest_load_and_holds_up_nobody(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(
        FakeEngine(step_s=0.01), admin_port=free_port, slow_reader_timeout_s=1.0
    )
    request = admin_pb2.WatchLoadRequest(interval=Duration(nanos=10_000_000)).SerializeToString()
    async with client_of(server) as client, admin(free_port) as stub:
        async with connect(f"127.0.0.1:{free_port}", window=0) as rude:
            rude.open(WATCH, request)
            polite = stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=Duration(nanos=10**7)))
            assert (await polite.read()).load.running_requests == 0
            running = asyncio.ensure_future(client.generate("x", max_output_tokens=900).result())
            while not (await polite.read()).load.running_requests:
                pass
            running.cancel()
            while (await polite.read()).load.running_requests:
                pass
        assert (await client.generate("x", max_output_tokens=3)).usage.output_tokens == 3


async def test_a_watch_without_news_outlives_its_client_s_pings(
    start_server: ServerFactory,
    free_port: int,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default two in five minutes without a message are allowed: such a watch ended."""
    by_sdk = dict(_transport.CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]
    assert by_sdk > 1000 * listening._MIN_PING_INTERVAL_S
    monkeypatch.setattr(listening, "_MIN_PING_INTERVAL_S", 0)  # theirs come at once
    await start_server(admin_port=free_port)
    async with connect(f"127.0.0.1:{free_port}") as client:
        stream = client.open(WATCH, b"")
        await eventually(lambda: client.n_messages == 1)  # the only one: a message allows pings
        client.ping(20)
        await eventually(lambda: client.n_pongs == 20 or client.has_goaway)
        assert not client.has_goaway
        assert stream not in client.ended


async def test_a_router_knows_which_server_has_a_prompt(
    start_server: ServerFactory, free_port: int
) -> None:
    limits = dataclasses.replace(FakeEngine().limits, n_seq_max=2)
    server = await start_server(FakeEngine(limits), admin_port=free_port, api_keys=KEYS)
    prompt = "a prompt of some length that fills several blocks, told as salted hashes"
    async with (
        client_of(server, "a" * 20) as acme,
        client_of(server, "b" * 20) as beta,
        admin(free_port) as stub,
    ):
        watch = stub.WatchCache(admin_pb2.WatchCacheRequest(tenant="acme"))
        assert (await watch.read()).reset.block_tokens == 16
        await beta.generate(prompt, max_output_tokens=2)
        await acme.generate(prompt, max_output_tokens=2, end_user="ann")
        known: set[int] = set()
        salt = b""
        ids = await acme.tokenize(prompt, add_special=True)
        while not known:
            found = await watch.read()
            if found.HasField("stored"):
                assert (found.stored.tenant, found.stored.end_user) == ("acme", "ann")
                known |= set(found.stored.hashes)
                salt = found.stored.salt
    hashes = drafthouse.prefix_hashes(ids, salt, "acme", end_user="ann")
    assert len(hashes) == len(ids) // 16 > 2
    assert set(hashes) <= known
    # Who knows the prompt but not the salt, or another tenant's salt, finds nothing.
    for other in (b"", bytes(16)):
        assert not known & set(drafthouse.prefix_hashes(ids, other, "acme", end_user="ann"))
    assert not known & set(drafthouse.prefix_hashes(ids, salt, "beta"))


async def test_beyond_loopback_there_must_be_certificates_of_administrators(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="admin_client_ca_file"):
        Config(admin_port=1, admin_host="0.0.0.0")  # noqa: S104  # nobody listens there
    with pytest.raises(ConfigError, match="ssl_cert_file"):
        Config(admin_port=1, admin_client_ca_file="ca")
    with pytest.raises(ConfigError, match="every tenant"):
        Config(
            admin_port=1,
            admin_client_ca_file="ca",
            ssl_client_ca_file="ca",
            ssl_cert_file="c",
            ssl_key_file="k",
        )
    assert not Config(admin_host="127.0.0.1").has_admin
    assert Config(admin_host=f"unix:{tmp_path}/admin").has_admin


async def test_mutual_tls_lets_administrators_in_and_tenants_out(
    start_server: ServerFactory, free_port: int, tmp_path: Path
) -> None:
    path, own, tenants, administrators = tmp_path / "audit", Authority(), Authority(), Authority()
    certificate, key = own.issue().write(tmp_path)
    await start_server(
        admin_port=free_port,
        audit_file=str(path),
        ssl_cert_file=certificate,
        ssl_key_file=key,
        ssl_client_ca_file=tenants.write(tmp_path, "tenants"),
        admin_client_ca_file=administrators.write(tmp_path, "administrators"),
    )
    name = x509.UniformResourceIdentifier("spiffe://example.org/operator/ann")

    def shown(pair: Pair) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(own.pem, pair.key, pair.certificate)

    async with admin(free_port, shown(administrators.issue(name))) as stub:
        assert (await stub.GetStatus(admin_pb2.GetStatusRequest())).load.state == SERVING
        await stub.Drain(admin_pb2.DrainRequest())
    for credentials in (shown(tenants.issue(name)), grpc.ssl_channel_credentials(own.pem), None):
        async with admin(free_port, credentials) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(admin_pb2.GetStatusRequest())
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    (line,) = lines(path)
    assert line["actor"] == "san:spiffe://example.org/operator/ann"


async def test_admin_is_not_on_the_port_of_clients(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(admin_port=free_port)
    async with admin(server.port) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(admin_pb2.GetStatusRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_rates_are_of_the_last_ten_seconds() -> None:
    rates = RecentRates(Counters(0.0))
    assert (rates.tokens_per_s, rates.acceptance_rate, rates.mean_n_draft) == (0, 0, 0)
    for second in range(1, 31):
        per_s = 100 if second > 20 else 1
        done = 20 + 100 * (second - 20) if second > 20 else per_s * second
        rates.note(Counters(float(second), done, 2 * done, done, done, 3 * done))
    assert rates.tokens_per_s == 100.0
    assert (rates.acceptance_rate, rates.mean_n_draft) == (0.5, 3.0)
    for i in range(1000):  # asked often
        rates.note(Counters(30 + i / 1e4, 1020, 2040, 1020, 1020, 3060))
    assert len(rates._noted) < 16
