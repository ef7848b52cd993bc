"""Usage as clients see it: in trailers on every outcome, in lists, and one number everywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.support.http2 import connect
from tests.support.served import served

import drafthouse
from drafthouse.v1 import generation_pb2, generation_pb2_grpc, usage_pb2, usage_pb2_grpc
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ServerFailed
from drafthouse_server.rpc import services
from drafthouse_server.rpc import usage as usage_service
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import SequenceStatus, StepPlan, StepResult
from drafthouse_server.tenancy.key_ring import HeldCall
from drafthouse_server.tenancy.tenants import Identity, Tenant, TenantRegistry
from drafthouse_server.usage import shipping
from drafthouse_server.usage.record import UsageQuery, UsageRecord
from drafthouse_server.usage.stores import STORE_NAME, list_all

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

USAGE_KEY = "drafthouse-usage-bin"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no disk that hangs."""
    monkeypatch.setattr(usage_service, "_LIST_S", 100.0)
    monkeypatch.setattr(shipping, "_CATCH_UP_S", 100.0)


def records_of(folder: Path) -> Sequence[UsageRecord]:
    return list_all(folder, UsageQuery())


def break_journal(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the thread of a server's journal fail, and waits for its end."""
    accounting = server._accounting
    assert accounting is not None
    journal = accounting.journal
    assert journal is not None

    def fail() -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(journal, "_turn", fail)
    journal._put([])  # the turn that it is in ends
    journal._thread.join(100)
    assert not journal._thread.is_alive()


def request(text: str = "x", **fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(text=text), **fields)


def usage_in(trailers: Any) -> generation_pb2.Usage | None:
    for key, value in trailers or ():
        if key == USAGE_KEY:
            return generation_pb2.Usage.FromString(value)
    return None


async def test_result_trailers_record_and_metric_are_one_number(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    """Where a stop text is met, the engine has generated more than is sent and billed."""
    server = await start_server(usage_journal=str(tmp_path))
    async with drafthouse.AsyncClient(server.target) as client:
        whole = await client.generate("x", temperature=0, max_output_tokens=60)
        stop = whole.text[9:11]
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stopped = request(max_output_tokens=60)
        stopped.sampling.temperature = 0
        stopped.stop.sequences.append(stop)
        call = stub.Generate(stopped)
        messages = [message async for message in call]
        in_trailers = usage_in(await call.trailing_metadata())
    await server.close()
    n_read = sum(len(message.chunk.token_ids) for message in messages)
    result = messages[-1].result
    assert result.stop_sequence == stop
    assert in_trailers == result.usage
    assert result.usage.output_tokens == n_read < 60
    first, second = records_of(tmp_path)
    assert (first.n_output, first.outcome) == (60, "length")
    assert (second.n_output, second.outcome) == (n_read, "stop")
    assert (second.n_prompt, second.tenant, second.model) == (2, "default", "fake")
    assert second.request_id == result.request_id
    assert second.n_drafted == result.speculation.drafted_tokens
    assert second.n_accepted == result.speculation.accepted_tokens
    assert second.queue_s == result.timings.queue_seconds
    assert second.started_at <= second.ended_at
    assert server.loop.statistics().n_output_tokens == 60 + n_read


async def test_a_record_is_written_before_the_result_is_read(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path))
    async with drafthouse.AsyncClient(server.target) as client:
        for n_records in range(1, 6):
            result = await client.generate("x", max_output_tokens=40)
            assert len(records_of(tmp_path)) == n_records
            assert records_of(tmp_path)[-1].n_output == len(result.token_ids)


async def test_an_engine_failure_tells_usage(start_server: ServerFactory, tmp_path: Path) -> None:
    engine = FakeEngine()
    server = await start_server(engine, usage_journal=str(tmp_path))
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        engine.inject(SequenceStatus.DECODE_FAILED)
        with pytest.raises(drafthouse.EngineFailure) as caught:
            await client.generate([65] * 9, max_output_tokens=40)
    assert caught.value.usage == drafthouse.Usage(9, 0)
    [record] = records_of(tmp_path)
    assert (record.outcome, record.n_prompt, record.n_output) == ("ENGINE_FAILURE", 9, 0)


class FailsWhenStopped(FakeEngine):
    """Loses the step that is in flight when a stop text is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stopped = threading.Event()
        self.n_steps_until_lost = -1

    def step(self, plan: StepPlan) -> StepResult:
        self.n_steps_until_lost -= 1
        if self.n_steps_until_lost == 0:
            assert self.is_stopped.wait(100)
            self.inject(SequenceStatus.DECODE_FAILED)
        return super().step(plan)


async def test_a_stopped_stream_whose_next_step_fails_is_counted_as_its_client_was_told(
    start_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FailsWhenStopped()
    server = await start_server(engine, usage_journal=str(tmp_path), draft_default=0)
    finish = server.loop.finish

    def note(sequence: Any) -> None:
        finish(sequence)
        engine.is_stopped.set()

    monkeypatch.setattr(server.loop, "finish", note)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        whole = await client.generate("xyz", temperature=0, max_output_tokens=40)
        engine.n_steps_until_lost = 2  # the first one yields the stop text
        found = await client.generate("xyz", temperature=0, stop=[whole.text[:1]])
    assert found.finish_reason == "stop"
    assert server.loop.statistics().n_steps_failed == 0, "its sequence failed, the step did not"
    assert [record.outcome for record in records_of(tmp_path)] == ["length", "stop"]
    assert server.loop.statistics().n_requests == {"length": 1, "stop": 1}


async def test_a_passed_deadline_tells_usage(
    start_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server's last moment comes long before the client's own timer.
    last = services.GenerationService._last_moment
    monkeypatch.setattr(
        services.GenerationService, "_last_moment", lambda self, c: last(self, c) - 99.7
    )
    server = await start_server(FakeEngine(step_s=0.005), usage_journal=str(tmp_path))
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        n_read = 0

        async def read() -> None:
            nonlocal n_read
            async for chunk in client.generate("x", timeout=100):
                n_read += len(chunk.token_ids)

        with pytest.raises(drafthouse.DeadlineExceeded) as caught:
            await read()
    assert caught.value.usage == drafthouse.Usage(2, n_read)
    await server.close()
    [record] = records_of(tmp_path)
    assert (record.outcome, record.n_output) == ("deadline", n_read)
    assert caught.value.request_id == record.request_id, "by which its client finds the record"


async def test_a_stream_ends_a_little_before_its_deadline() -> None:
    class Context:
        def __init__(self, remaining_s: float | None) -> None:
            self._remaining_s = remaining_s

        def time_remaining(self) -> float | None:
            return self._remaining_s

    class Served:
        def clock(self) -> float:
            return 1000.0

    served: Any = Served()
    service = services.GenerationService(served)
    for remaining_s, margin_s in ((0.1, 0.005), (0.5, 0.025), (60.0, 0.025), (0.0, 0.0)):
        context: Any = Context(remaining_s)
        assert service._last_moment(context) == pytest.approx(1000 + remaining_s - margin_s)
    endless: Any = Context(None)
    assert service._last_moment(endless) == float("inf")


async def test_a_cancelled_stream_has_one_record(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually, tmp_path: Path
) -> None:
    server = await start_server(gated_engine, usage_journal=str(tmp_path))
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(request())
        await call.read()
        gated_engine.hold()
        await eventually(lambda: gated_engine.is_stuck)
        call.cancel()
        await eventually(lambda: len(records_of(tmp_path)) == 1)
        gated_engine.release()
    await server.close()
    [record] = records_of(tmp_path)
    assert record.outcome == "cancelled"
    assert record.n_output >= 1


async def test_a_record_names_the_end_user_and_a_revoked_keys_stream_tells_usage(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    """The record tells what its client is told, not that the client has left."""
    tenants = RevokingTenants()
    server = await start_server(
        FakeEngine(step_s=0.005), usage_journal=str(tmp_path), tenants=tenants
    )
    async with drafthouse.AsyncClient(server.target, api_key="k", retry=None) as client:
        n_read = n_chunks = 0

        async def read() -> None:
            nonlocal n_read, n_chunks
            async for chunk in client.generate("x", end_user="eve"):
                n_read += len(chunk.token_ids)
                n_chunks += 1
                if n_chunks == 2:  # the transport has taken the first for sure
                    tenants.revoke()

        with pytest.raises(drafthouse.InvalidApiKey) as caught:
            await read()
    await server.close()
    [record] = records_of(tmp_path)
    assert (record.tenant, record.key_id, record.end_user) == ("a", "key1", "eve")
    assert record.outcome == "INVALID_API_KEY"
    assert server.loop.statistics().n_requests == {"INVALID_API_KEY": 1}
    assert caught.value.usage == drafthouse.Usage(2, record.n_output)
    # A message whose write was cancelled may have left.
    assert 0 < record.n_output <= n_read <= record.n_output + 24


async def test_a_reader_that_reads_nothing_has_one_record_that_says_so(
    start_server: ServerFactory, eventually: Eventually, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path), slow_reader_timeout_s=0.1)
    asked = request("x" * 9, max_output_tokens=400).SerializeToString()
    async with connect(server.target, window=0) as client:
        for _ in range(3):
            client.open("/drafthouse.v1.GenerationService/Generate", asked)
        await eventually(lambda: server.gate.calls.n_stuck == 3)
        await eventually(lambda: server.loop.admission.n_active == 0)
    await server.close()
    records = records_of(tmp_path)
    assert [record.outcome for record in records] == ["SLOW_READER"] * 3


async def test_a_refused_request_has_no_record(start_server: ServerFactory, tmp_path: Path) -> None:
    server = await start_server(usage_journal=str(tmp_path))
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        with pytest.raises(drafthouse.ContextTooLong) as caught:
            await client.generate([65] * 900, max_output_tokens=900)
        assert caught.value.usage is None
    await server.close()
    assert not records_of(tmp_path)


async def test_long_messages_are_split_and_their_text_is_whole(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    plain = await start_server()
    recording = await start_server(usage_journal=str(tmp_path))
    found = []
    for server in (plain, recording):
        async with drafthouse.AsyncClient(server.target) as client:
            chunks = [
                chunk
                async for chunk in client.generate(
                    "abc", temperature=0, max_output_tokens=700, log_probabilities=True
                )
            ]
        found.append(chunks)
    assert max(len(chunk.token_ids) for chunk in found[1]) <= 24

    def parts(chunks: list[drafthouse.Chunk]) -> tuple[str, list[int], list[float]]:
        return (
            "".join(chunk.text for chunk in chunks),
            [token for chunk in chunks for token in chunk.token_ids],
            [value for chunk in chunks for value in chunk.log_probabilities],
        )

    assert parts(found[0]) == parts(found[1])


async def test_a_journal_that_fails_refuses_new_streams(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path))
    accounting = server._accounting
    assert accounting is not None
    assert accounting.journal is not None
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        accounting.journal.counts.is_failing = True
        with pytest.raises(drafthouse.UsageUnavailable) as caught:
            await client.generate("x", max_output_tokens=3)
        assert caught.value.retry_after == 1.0
        assert server.loop.admission.n_active == 0
        accounting.journal.counts.is_failing = False
        assert (await client.generate("x", max_output_tokens=3)).usage.output_tokens == 3
    assert server.loop.statistics().n_requests == {"USAGE_UNAVAILABLE": 1, "length": 1}


async def test_a_journal_that_fails_lets_streams_in_unbilled_where_that_is_set(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path), usage_on_full="unbilled")
    accounting = server._accounting
    assert accounting is not None
    assert accounting.journal is not None
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        accounting.journal.counts.is_failing = True
        assert (await client.generate("x", max_output_tokens=3)).usage.output_tokens == 3
    assert server.loop.statistics().usage.n_unbilled == 1
    await server.close()
    assert not records_of(tmp_path)


async def test_a_journal_whose_thread_has_failed_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """It could take no stream any more: a supervisor starts it again."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    config = Config(port=0, usage_journal=str(tmp_path), draft_policy="fixed")
    server = Server(config, FakeEngine)
    serving = await served(server)
    break_journal(server, monkeypatch)
    await eventually(serving.done)
    with pytest.raises(ServerFailed, match=r"the usage journal failed .* start it again"):
        await serving


async def test_a_journal_whose_thread_has_failed_ends_no_server_that_goes_on_unbilled(
    start_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    server = await start_server(usage_journal=str(tmp_path), usage_on_full="unbilled")
    accounting = server._accounting
    assert accounting is not None
    break_journal(server, monkeypatch)
    assert accounting.journal is not None
    accounting._watch(accounting.journal)
    assert not server._stop.is_set()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        assert (await client.generate("x", max_output_tokens=3)).usage.output_tokens == 3


class RevokingTenants(TenantRegistry):
    """Has one key, which a test revokes while a call with it runs."""

    def __init__(self) -> None:
        super().__init__({"k": Tenant("a")})
        self._calls: set[HeldCall] = set()

    def revoke(self) -> None:
        [call] = self._calls
        call.end("the API key was revoked")

    def identify(self, api_key: str | None, address: str = "") -> Identity:
        return dataclasses.replace(super().identify(api_key, address), key_id="key1")

    def hold(
        self, identity: Identity, on_end: Callable[[], object] = lambda: None
    ) -> AbstractContextManager[None]:
        return HeldCall(self._calls, on_end)


KEYS = {"key-a": Tenant("a"), "key-b": Tenant("b")}


async def list_pages(stub: Any, key: str, **fields: Any) -> tuple[list[usage_pb2.UsageRecord], int]:
    found: list[usage_pb2.UsageRecord] = []
    token, n_pages = "", 0
    while n_pages == 0 or token:
        page = await stub.ListUsage(
            usage_pb2.ListUsageRequest(page_token=token, **fields),
            metadata=(("authorization", f"Bearer {key}"),),
        )
        found += page.records
        token = page.next_page_token
        n_pages += 1
    return found, n_pages


async def test_a_tenant_lists_its_own_records_in_pages(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(KEYS))
    for key, n in (("key-a", 7), ("key-b", 2)):
        async with drafthouse.AsyncClient(server.target, api_key=key) as client:
            for i in range(n):
                await client.generate("xy", max_output_tokens=i + 1)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        found, n_pages = await list_pages(stub, "key-a", page_size=3)
        assert [record.usage.output_tokens for record in found] == list(range(1, 8))
        assert (n_pages, {record.tenant for record in found}) == (3, {"a"})
        assert len({record.record_id for record in found}) == 7
        assert len((await list_pages(stub, "key-b"))[0]) == 2
        some, _ = await list_pages(stub, "key-a", start_time=found[2].end_time, page_size=1)
        assert [record.record_id for record in some] == [r.record_id for r in found[2:]]
        some, _ = await list_pages(stub, "key-a", end_time=found[2].end_time)
        assert [record.record_id for record in some] == [r.record_id for r in found[:2]]
        assert not (await list_pages(stub, "key-a", model="another"))[0]
        assert not (await list_pages(stub, "key-a", key_id="another"))[0]


class HeldLists:
    """Holds up a tenant's lists, as a disk does that hangs, until a test lets them go on."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch, tenant: str = "a") -> None:
        assert server._accounting is not None
        journal = server._accounting.journal
        assert journal is not None
        self._find = journal.shipper.find
        self._tenant = tenant
        self.n_held = 0
        self.may_go_on = threading.Event()
        monkeypatch.setattr(journal.shipper, "find", self.find)

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        if query.tenant == self._tenant:
            self.n_held += 1
            assert self.may_go_on.wait(100)
        return self._find(query)


async def test_a_list_is_admitted_as_any_call(
    start_server: ServerFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    keys = {"key-a": Tenant("a", requests_per_s=0.001), "key-b": Tenant("b", n_active_max=1)}
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(keys))
    lists = HeldLists(server, monkeypatch, "b")
    asked = usage_pb2.ListUsageRequest()
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        bob = (("authorization", "Bearer key-b"),)
        first = stub.ListUsage(asked, metadata=bob)
        await eventually(lambda: server.loop.admission.n_active == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListUsage(asked, metadata=bob)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        lists.may_go_on.set()
        assert not (await first).records
        assert not (await list_pages(stub, "key-a"))[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_pages(stub, "key-a")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.loop.admission.n_active == 0


async def test_lists_that_take_long_hold_up_no_other_tenant_and_no_other_work(
    start_server: ServerFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(KEYS))
    lists = HeldLists(server, monkeypatch)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        many = [asyncio.ensure_future(list_pages(stub, "key-a")) for _ in range(40)]
        await eventually(lambda: server.loop.admission.n_active == 40)
        await asyncio.wait_for(asyncio.to_thread(int), 100)  # audit trail, metrics, certificates
        assert not (await list_pages(stub, "key-b"))[0]
        lists.may_go_on.set()
        assert await asyncio.gather(*many) == [([], 1)] * 40


async def test_lists_that_were_given_up_hold_up_one_reader_and_no_other_tenant(
    start_server: ServerFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    """Each took another reader, until none was left, and then waited for one for ever."""
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(KEYS))
    lists = HeldLists(server, monkeypatch)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        for _ in range(4):
            call = asyncio.ensure_future(list_pages(stub, "key-a"))
            await eventually(lambda: lists.n_held > 0 and server.loop.admission.n_active == 1)
            call.cancel()
            await eventually(lambda: server.loop.admission.n_active == 0)
        assert not (await list_pages(stub, "key-b"))[0]
        assert lists.n_held == 1
        lists.may_go_on.set()
        assert not (await list_pages(stub, "key-a"))[0]


async def test_a_list_that_takes_too_long_is_refused_and_another_begins_when_it_has_ended(
    start_server: ServerFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(KEYS))
    lists = HeldLists(server, monkeypatch)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        with monkeypatch.context() as impatient:
            impatient.setattr(usage_service, "_LIST_S", 0.2)
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await list_pages(stub, "key-a")
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert lists.n_held <= 1
        lists.may_go_on.set()
        assert not (await list_pages(stub, "key-a"))[0]
        await eventually(lambda: server.loop.admission.n_active == 0)


async def test_what_a_list_cannot_be_asked_for_is_told_by_its_field(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path), tenants=TenantRegistry(KEYS))
    async with drafthouse.AsyncClient(server.target, api_key="key-a") as client:
        for _ in range(3):
            await client.generate("x", max_output_tokens=1)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        metadata = (("authorization", "Bearer key-a"),)
        asked = usage_pb2.ListUsageRequest(page_size=1)
        token = (await stub.ListUsage(asked, metadata=metadata)).next_page_token
        assert token
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"page_size": -1}, "key-a", "page_size"),
            ({"page_size": 1001}, "key-a", "page_size"),
            ({"page_token": "nonsense"}, "key-a", "page_token"),
            ({"page_token": "A" * 10_000}, "key-a", "page_token"),
            ({"page_token": token, "model": "another"}, "key-a", "page_token"),
            ({"page_token": token}, "key-b", "page_token"),
            ({"model": "m" * 300}, "key-a", "model"),
        ]
        for fields, key, field in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListUsage(
                    usage_pb2.ListUsageRequest(**fields),
                    metadata=(("authorization", f"Bearer {key}"),),
                )
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: ")


async def test_a_store_that_fails_is_told_and_streams_go_on(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    server = await start_server(usage_journal=str(tmp_path))
    assert server._accounting is not None
    assert server._accounting.journal is not None
    server._accounting.journal.shipper._store.close()  # it is opened anew when it is asked
    (tmp_path / STORE_NAME).write_bytes(b"no database at all" * 100)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListUsage(usage_pb2.ListUsageRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "usage cannot be listed now"
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        assert (await client.generate("x", max_output_tokens=3)).usage.output_tokens == 3
    await server.close()
    assert server.loop.statistics().usage.n_store_failures > 0
    (tmp_path / STORE_NAME).unlink()
    assert [record.n_output for record in records_of(tmp_path)] == [3]


async def test_a_server_without_a_journal_has_no_list(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = usage_pb2_grpc.UsageServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListUsage(usage_pb2.ListUsageRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
