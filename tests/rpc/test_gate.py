"""What a client may hold before and after its request: nothing without a key, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.rpc.test_wire import METHODS, SERVICES, fields_of, filled
from tests.support.http2 import connect, field

import drafthouse
from drafthouse import _errors
from drafthouse.v1 import generation_pb2
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import QuotaExceeded, ServerOverloaded, StartupError
from drafthouse_server.operations.calls import Call, FrontMemory, OpenCalls
from drafthouse_server.operations.descriptors import DescriptorBudget, raise_descriptor_limit
from drafthouse_server.rpc import gate, services
from drafthouse_server.rpc.listening import open_calls
from drafthouse_server.rpc.requests import to_generation
from drafthouse_server.rpc.wire import Scan, shapes_of
from drafthouse_server.serving.requests import GenerationRequest, field_bounds
from drafthouse_server.step import EngineLimits
from drafthouse_server.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Eventually, GatedEngine, ServerFactory

    from drafthouse_server.rpc.server import Server

GENERATE = "/drafthouse.v1.GenerationService/Generate"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PROMPT = generation_pb2.Prompt(text="x")
REQUEST = generation_pb2.GenerateRequest(prompt=PROMPT, max_output_tokens=4)


async def fails(server: Server, method: str, data: bytes, key: str = "") -> tuple[str, str]:
    """Returns code and reason of a call that must fail."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    async with grpc.aio.insecure_channel(server.target) as channel:
        call: Any = channel.unary_stream(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(data, metadata=metadata):
                pass
    error = _errors._from_rpc_error(caught.value)
    return caught.value.code().name, error.reason


async def test_without_a_key_no_byte_of_a_message_is_read(start_server: ServerFactory) -> None:
    server = await start_server(api_keys=("acme:secret",))
    big = field(2, field(3, b"\x0a\x00" * 1_500_000))
    for key in ("", "wrong"):
        found = await fails(server, GENERATE, big, key)
        assert found == ("UNAUTHENTICATED", "INVALID_API_KEY")
    assert (server.receive.n_bytes, server.receive.n_elements) == (0, 0)
    code, reason = await fails(server, GENERATE, big, "secret")
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert server.receive.n_bytes == len(big)
    assert server.receive.n_elements < 2000


async def test_an_empty_call_and_one_that_is_no_message_are_told_so(server: Server) -> None:
    for data in (b"\xff\xff\xff", field(2, field(1, b"\xff\xfe"))):
        assert await fails(server, GENERATE, data) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    async with grpc.aio.insecure_channel(server.target) as channel:
        call: Any = channel.stream_stream(GENERATE)()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", [GENERATE, CHECK, WATCH, REFLECTION])
async def test_a_stream_without_a_message_ends(
    start_server: ServerFactory, eventually: Eventually, method: str
) -> None:
    server = await start_server(first_message_timeout_s=0.05)
    async with connect(server.target) as client:
        streams = {client.open(method, None) for _ in range(20)}
        await eventually(lambda: client.ended == streams)
    await eventually(lambda: len(server.gate.calls) == 0)
    assert server.gate.calls.n_stuck == 20
    assert server.loop.admission.n_active == 0


async def test_a_stream_without_a_message_is_told_why(start_server: ServerFactory) -> None:
    server = await start_server(first_message_timeout_s=0.05)
    async with grpc.aio.insecure_channel(server.target) as channel:
        call: Any = channel.stream_stream(GENERATE)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = _errors._from_rpc_error(caught.value)
    assert isinstance(error, drafthouse.SlowSender)
    assert error.metadata == {"timeoutSeconds": "0.05"}


async def test_no_client_waits_for_a_status_that_is_never_sent(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """grpc.aio sends none where a handler is cancelled by another than its client."""

    async def give_up(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(services.GenerationService, "Generate", give_up)
    server = await start_server()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        # gRPC keeps the calls that came last until others come.
        streams = [client.generate("x").result() for _ in range(8)]
        answers = [asyncio.ensure_future(stream) for stream in streams]
        ended, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert all(isinstance(end.exception(), drafthouse.DrafthouseError) for end in ended)
    await asyncio.gather(*answers, return_exceptions=True)


async def test_a_reader_that_reads_nothing_loses_its_stream_and_all_is_given_back(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(slow_reader_timeout_s=0.1)
    request = generation_pb2.GenerateRequest(prompt=PROMPT, max_output_tokens=500)
    async with (
        connect(server.target, window=0) as rude,
        drafthouse.AsyncClient(server.target, retry=None) as polite,
    ):
        streams = {rude.open(GENERATE, request.SerializeToString()) for _ in range(12)}
        await eventually(lambda: server.gate.calls.n_stuck == 12)
        await eventually(lambda: len(server.gate.calls) == 0)
        for _ in range(4):  # gRPC keeps the calls that came last until others come
            await polite.tokenize("x")
        await eventually(lambda: rude.ended == streams)
    await eventually(lambda: server.loop.admission.n_active == 0)


CANARY = "canary-7f3a"
TELLING: list[dict[str, Any]] = [
    {},
    {"temperature": -1.0},
    {"grammar": CANARY},
    {"stop": [CANARY]},
    {"stop": [CANARY * 100]},
    {"model": CANARY},
]


async def test_no_text_of_a_client_is_in_the_log_at_any_level(
    start_server: ServerFactory, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine()
    server = await start_server(engine, api_keys=("acme:secret-of-acme",))
    async with drafthouse.AsyncClient(
        server.target, api_key="secret-of-acme", retry=None
    ) as client:
        for prompt in (CANARY, CANARY * 9000, [drafthouse.ChatMessage("user", CANARY)]):
            for options in TELLING:
                with contextlib.suppress(drafthouse.DrafthouseError):
                    await client.generate(prompt, max_output_tokens=2, **options)
        engine.inject(RuntimeError("device lost"))
        with pytest.raises(drafthouse.EngineFailure):
            await client.generate(CANARY, max_output_tokens=2)
    async with drafthouse.AsyncClient(server.target, api_key=CANARY, retry=None) as stranger:
        with pytest.raises(drafthouse.InvalidApiKey):
            await stranger.tokenize(CANARY)
    await eventually(lambda: caplog.text.count("call method=") == 20)
    assert CANARY not in caplog.text
    assert "secret-of-acme" not in caplog.text


async def test_while_a_request_waits_and_runs_its_message_is_not_kept(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[generation_pb2.GenerateRequest] = []

    def noting(request: generation_pb2.GenerateRequest) -> GenerationRequest:
        received.append(request)
        return to_generation(request)

    monkeypatch.setattr(services, "to_generation", noting)
    server = await start_server(gated_engine)
    gated_engine.hold()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        streams = [client.generate("x" * 9, max_output_tokens=3) for _ in range(6)]
        await eventually(lambda: len(server.loop._outboxes) == 6)
        # One is the list's, one the question's.
        counts = [sys.getrefcount(received[i]) for i in range(6)]
        gated_engine.release()
        assert counts == [2] * 6
        for stream in streams:
            await stream


async def test_a_reader_of_reflection_that_reads_nothing_loses_its_stream_too(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(first_message_timeout_s=0.1)
    async with (
        connect(server.target, window=0) as rude,
        drafthouse.AsyncClient(server.target, retry=None) as polite,
    ):
        streams = {rude.open(REFLECTION, field(7, b"")) for _ in range(5)}
        await eventually(lambda: server.gate.calls.n_stuck == 5)
        await eventually(lambda: len(server.gate.calls) == 0)
        for _ in range(4):
            gc.collect()  # reflection's generators refer to themselves
            await polite.tokenize("x")
        # gRPC keeps the calls that came last until others come.
        await eventually(lambda: len(rude.ended) >= len(streams) - 1)


async def test_a_tenants_open_calls_are_bounded_and_the_others_go_on(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, tenant_max_calls=2, api_keys=("a:ka", "b:kb"))
    request = REQUEST.SerializeToString()
    gated_engine.hold()
    async with connect(server.target) as client:
        for _ in range(2):
            client.open(GENERATE, request, "ka")
        await eventually(lambda: server.gate.calls.n_of("a") == 2)
        found = await fails(server, GENERATE, request, "ka")
        assert found == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA_EXCEEDED")
        async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
            stream = other.generate("x", max_output_tokens=3)
            await eventually(lambda: server.gate.calls.n_of("b") == 1)
            gated_engine.release()
            assert len((await stream).token_ids) == 3
    await eventually(lambda: server.gate.calls.n_of("a") == 0)


async def test_all_open_calls_are_bounded_and_health_is_answered_all_the_same(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, max_calls=1)
    gated_engine.hold()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        stream = client.generate("x", max_output_tokens=3)
        await eventually(lambda: gated_engine.is_stuck)
        with pytest.raises(drafthouse.ServerOverloaded) as caught:
            await client.tokenize("x")
        assert caught.value.retry_after == 1.0
        assert await client.health()
        gated_engine.release()
        await stream
        await eventually(lambda: len(server.gate.calls) == 0)
        assert await client.tokenize("a") == [97]


async def test_when_few_descriptors_are_left_calls_are_told_to_come_again(server: Server) -> None:
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        server.gate.descriptors = DescriptorBudget(10, n_open=lambda: 95, n_limit=lambda: 100)
        with pytest.raises(drafthouse.ServerOverloaded) as caught:
            await client.tokenize("x")
        assert caught.value.retry_after == 1.0
        server.gate.descriptors = DescriptorBudget(10, n_open=lambda: 90, n_limit=lambda: 100)
        assert await client.tokenize("a") == [97]


def test_connections_leave_twice_the_reserve() -> None:
    budget = DescriptorBudget(10, n_open=lambda: 30, n_limit=lambda: 100)
    assert budget.n_connections() == 50
    assert DescriptorBudget(60, n_open=lambda: 30, n_limit=lambda: 100).n_connections() == 1
    # All of them leave calls alone; as many files as the reserve may be open besides.
    assert not DescriptorBudget(10, n_open=lambda: 30 + 50 + 10, n_limit=lambda: 100).check()
    assert DescriptorBudget(10, n_open=lambda: 30 + 50 + 11, n_limit=lambda: 100).check()


async def test_a_server_that_could_take_no_call_does_not_start(
    start_server: ServerFactory,
) -> None:
    with pytest.raises(StartupError, match="no call could be taken; raise the limit"):
        await start_server(FakeEngine(), reserved_descriptors=1 << 20)


def test_descriptors_are_counted_now_and_then() -> None:
    now, n_counts = [0.0], [0]

    def n_open() -> int:
        n_counts[0] += 1
        now[0] += 0.01  # counting takes so long
        return 50

    budget = DescriptorBudget(10, clock=lambda: now[0], n_open=n_open, n_limit=lambda: 55)
    for _ in range(1000):
        assert budget.check()
    assert n_counts == [1]
    now[0] += 1.1
    assert budget.check()
    assert n_counts == [2]


def test_the_process_may_open_what_it_may_let_itself_open() -> None:
    limit = raise_descriptor_limit()
    assert raise_descriptor_limit() == limit
    with contextlib.ExitStack() as held:
        budget = DescriptorBudget(0)
        assert not budget.check()
        before = budget.n_open
        for _ in range(20):
            held.enter_context(open("/dev/null"))
        again = DescriptorBudget(0)
        again.check()
        assert again.n_open >= before + 20


def call(tenant: str = "a") -> Call:
    return Call(GENERATE, "id", 0.0, tenant=Tenant(tenant))


def test_open_calls_are_counted_per_tenant_until_they_leave() -> None:
    calls = OpenCalls(4, 2, 1, retry_after_s=3.0)
    open_ones = [call(), call(), call("b")]
    for one in open_ones:
        calls.enter(one)
        calls.claim(one)
    third = call()
    calls.enter(third)
    with pytest.raises(QuotaExceeded) as caught:
        calls.claim(third)
    assert (caught.value.limit, caught.value.retry_after_s) == (2, 3.0)
    unknown = [call("") for _ in range(4)]
    for one in unknown:
        calls.enter(one)
    with pytest.raises(ServerOverloaded):
        calls.enter(call("c"))
    probe = call()
    calls.enter(probe, is_keyless=True)
    with pytest.raises(ServerOverloaded):
        calls.enter(call(), is_keyless=True)
    for one in (*open_ones, *unknown, third, probe, third):
        calls.leave(one)
    assert (len(calls), calls.n_of("a"), calls.n_of("b")) == (0, 0, 0)
    assert calls.n_refused["SERVER_OVERLOADED"] == 2
    assert calls.n_refused["TENANT_QUOTA_EXCEEDED"] == 1


def test_tenants_with_all_calls_that_they_may_open_lock_nobody_out() -> None:
    calls = OpenCalls(8, 5, 0, retry_after_s=3.0)

    def n_taken(tenant: str, n: int) -> int:
        n_before = calls.n_of(tenant)
        for _ in range(n):
            one = call(tenant)
            try:
                calls.enter(one)
                calls.claim(one)
            except (ServerOverloaded, QuotaExceeded):
                calls.leave(one)
        return calls.n_of(tenant) - n_before

    assert (n_taken("a", 9), n_taken("b", 9)) == (5, 4), "all but one, and its share"
    assert n_taken("c", 9) == 3, "a third of the places"
    assert (n_taken("a", 1), n_taken("b", 1)) == (0, 0)
    assert [n_taken(name, 2) for name in "defg"] == [2, 2, 0, 0], "twice the places in all"
    assert len(calls) == 16


def test_a_call_is_overdue_once_until_it_is_due_again() -> None:
    calls = OpenCalls(4, 4, 1, 1.0)
    one, other = call(), call()
    one.reader_s = 5.0
    for each in (one, other):
        calls.enter(each)
    one.await_reader(10.0)
    assert calls.overdue(14.9) == []
    assert calls.overdue(15.0) == [one]
    assert (one.is_stuck, other.is_stuck) == (True, False)
    assert calls.overdue(1e9) == []
    one.due = 20.0
    assert calls.overdue(21.0) == [one]
    assert calls.n_stuck == 1
    other.await_reader(30.0)
    other.go_on()
    assert calls.overdue(1e9) == []


def test_bounds_of_calls_follow_slots_and_queues_unless_set() -> None:
    calls = open_calls(Config(parallel=4, queue_size=10, tenant_queue_size=5))
    assert (calls._n_max, calls._n_tenant_max) == (4 + 10 + 256, 4 + 5 + 128)
    calls = open_calls(Config(max_calls=7, tenant_max_calls=3))
    assert (calls._n_max, calls._n_tenant_max) == (7, 3)


LIMITS = EngineLimits("mtp", 4, 4 * 4096, 4096, 512, 512, 4, 32)
FULL = [
    (method, path)
    for method, descriptor in METHODS.items()
    for path, _ in fields_of(descriptor)
    if path in field_bounds(1, 1) and method.startswith("/drafthouse.")
]

_N_TIMES = 20
"""Processor time of a request with every bound reached, in those of a request of one element."""


@pytest.mark.parametrize(("method", "path"), FULL, ids=lambda part: part.split("/")[-1])
async def test_a_request_at_its_bounds_costs_the_loop_a_bounded_multiple(
    start_server: ServerFactory,
    method: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    bounds = field_bounds(LIMITS.n_ctx_seq, 1024)
    monkeypatch.setattr("tests.rpc.test_wire.BOUNDS", bounds)
    server = await start_server(FakeEngine(LIMITS), usage_journal=str(tmp_path))
    full: Any = filled(METHODS[method], path)
    one: Any = METHODS[method]._concrete_class()
    for request in (full, one):
        if "prompt" in request.DESCRIPTOR.fields_by_name and not request.HasField("prompt"):
            request.prompt.text = "x"
        if "max_output_tokens" in request.DESCRIPTOR.fields_by_name:
            request.max_output_tokens = 1
    async with grpc.aio.insecure_channel(server.target) as channel:
        ask: Any = channel.unary_stream(method)
        await cost(ask, one.SerializeToString())
        small = min([await cost(ask, one.SerializeToString()) for _ in range(9)])
        large, n_large = math.inf, 0
        # Some more on a busy machine, until one was not disturbed.
        while n_large < 5 or (n_large < 100 and large > _N_TIMES * small):
            large = min(large, await cost(ask, full.SerializeToString()))
            n_large += 1
    assert large <= _N_TIMES * small
    n_max = shapes_of(SERVICES, bounds)[method].n_bytes_max
    assert server.receive.n_bytes <= (10 + n_large) * n_max
    assert server.receive.n_elements <= n_large * 3 * (1024 + 2) + 100


async def cost(ask: Any, data: bytes) -> float:
    """Returns the processor time of the loop's thread, client and server, for one call."""
    started = time.thread_time()
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in ask(data):
            pass
    await asyncio.sleep(0)
    return time.thread_time() - started


async def test_what_open_calls_hold_is_bounded_by_tenant_and_given_back(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(
        gated_engine, front_mib=16, outbox_kib=6000, api_keys=("a:ka", "b:kb")
    )
    request, memory = REQUEST.SerializeToString(), server.gate.calls.memory
    gated_engine.hold()
    async with connect(server.target) as client:
        for i in range(2):  # 16 MiB hold two outboxes and no third
            client.open(GENERATE, request, "ka")
            await eventually(lambda n=i: memory.n_bytes > (n + 1) * (6000 << 10))  # type: ignore[misc]  # a default has no type
        found = await fails(server, GENERATE, request, "ka")
        assert found == ("UNAVAILABLE", "SERVER_OVERLOADED")
        held = memory.n_bytes
        async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
            assert await other.tokenize("ab") == [97, 98], "it holds less than its share"
            stream = other.generate("x", max_output_tokens=3)
            await eventually(lambda: memory.n_bytes > held)
            gated_engine.release()
            assert len((await stream).token_ids) == 3
    await eventually(lambda: memory.n_bytes == 0)


async def test_a_tenant_that_sends_too_much_is_refused_unread_and_others_go_on(
    start_server: ServerFactory,
) -> None:
    server = await start_server(tenant_read_mib_per_s=1, api_keys=("a:ka", "b:kb"))
    now = 0.0
    server.receive._clock = lambda: now
    tokenize = "/drafthouse.v1.GenerationService/Tokenize"
    data = generation_pb2.TokenizeRequest(text="x" * (3 << 19)).SerializeToString()
    assert (await fails(server, tokenize, data, "ka"))[0] == "INVALID_ARGUMENT"
    assert server.receive.n_bytes == len(data)
    refused = await fails(server, tokenize, data, "ka")
    assert refused == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA_EXCEEDED")
    assert server.receive.n_bytes == len(data)
    assert server.gate.calls.n_refused["TENANT_QUOTA_EXCEEDED"] == 1
    async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
        assert await other.tokenize("ab") == [97, 98]
    async with drafthouse.AsyncClient(server.target, api_key="ka", retry=None) as again:
        with pytest.raises(drafthouse.TenantQuotaExceeded) as error:
            await again.tokenize("ab")
        assert error.value.retry_after == pytest.approx(0.5, abs=0.01)
        now += 0.51
        assert await again.tokenize("ab") == [97, 98]


async def test_elements_that_are_looked_at_count_as_bytes_that_are_read(
    start_server: ServerFactory,
) -> None:
    server = await start_server(tenant_read_mib_per_s=1, api_keys=("a:ka", "b:kb"))
    server.receive._clock = lambda: 0.0
    count = "/drafthouse.v1.GenerationService/CountTokens"
    request = generation_pb2.CountTokensRequest()
    for _ in range(2000):
        request.prompt.chat.messages.add(role="user")
    data = request.SerializeToString()
    assert len(data) < 1 << 15, "as bytes it is nothing"
    assert (await fails(server, count, data, "ka"))[0] == "INVALID_ARGUMENT"
    assert await fails(server, count, data, "ka") == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA_EXCEEDED")
    async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
        for _ in range(20):
            assert await other.tokenize("ab") == [97, 98]


async def test_who_is_above_its_rate_of_reading_is_not_refused_at_once(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would come back at once, and each call takes the others' time."""
    monkeypatch.setattr(gate, "REFUSAL_S", 3600.0)
    server = await start_server(tenant_read_mib_per_s=1, api_keys=("a:ka", "b:kb"))
    server.receive._clock = lambda: 0.0
    tokenize = "/drafthouse.v1.GenerationService/Tokenize"
    data = generation_pb2.TokenizeRequest(text="x" * (3 << 19)).SerializeToString()
    assert (await fails(server, tokenize, data, "ka"))[0] == "INVALID_ARGUMENT"
    waits = asyncio.ensure_future(fails(server, tokenize, data, "ka"))
    await eventually(lambda: len(server.gate.calls) == 1)
    async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
        assert await other.tokenize("ab") == [97, 98]
    assert not waits.done()
    waits.cancel()
    await eventually(lambda: len(server.gate.calls) == 0)


async def test_who_is_above_its_rate_of_reading_is_not_told_that_it_sends_slowly(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is late because it is not read: where a message had less time than refusals."""
    monkeypatch.setattr(gate, "REFUSAL_S", 3600.0)
    server = await start_server(tenant_read_mib_per_s=1, api_keys=("a:ka",))
    monkeypatch.setattr(server.gate, "_sweep_s", 0.001)
    server.receive._clock = lambda: 0.0
    tokenize = "/drafthouse.v1.GenerationService/Tokenize"
    data = generation_pb2.TokenizeRequest(text="x" * (3 << 19)).SerializeToString()
    assert (await fails(server, tokenize, data, "ka"))[0] == "INVALID_ARGUMENT"
    await eventually(lambda: len(server.gate.calls) == 0)  # its client has the status before
    waits = asyncio.ensure_future(fails(server, tokenize, data, "ka"))
    await eventually(lambda: server.gate.calls.n_refused["TENANT_QUOTA_EXCEEDED"] == 1)
    looks: list[float] = []
    overdue = server.gate.calls.overdue

    def look(now: float) -> list[Call]:
        looks.append(now)
        return overdue(now + 3600.0)

    monkeypatch.setattr(server.gate.calls, "overdue", look)
    await eventually(lambda: len(looks) > 2)
    assert server.gate.calls.n_stuck == 0
    assert not waits.done()
    waits.cancel()
    await eventually(lambda: len(server.gate.calls) == 0)


async def test_long_messages_that_come_together_are_not_parsed_in_one_go(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    """What waits is held meanwhile, counts as memory, and leaves nothing when its client does."""
    server = await start_server(api_keys=("a:ka", "b:kb"))
    receive, memory = server.receive, server.gate.calls.memory
    tokenize = "/drafthouse.v1.GenerationService/Tokenize"
    data = generation_pb2.TokenizeRequest(text="x" * (3 << 19)).SerializeToString()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(receive.parsing.turn(Tenant("c"), 1))
        calls = [asyncio.ensure_future(fails(server, tokenize, data, "ka")) for _ in range(3)]
        await eventually(lambda: len(receive.parsing) == 3)
        assert memory.n_bytes >= 3 * len(data)
        assert receive.n_elements == 0
        async with drafthouse.AsyncClient(server.target, api_key="kb", retry=None) as other:
            assert await other.tokenize("ab") == [97, 98]
        calls[0].cancel()
        await eventually(lambda: len(receive.parsing) == 2)
    for call in calls[1:]:
        assert await call == ("INVALID_ARGUMENT", "INVALID_FIELD")
    await eventually(lambda: memory.n_bytes == 0)
    await eventually(lambda: not len(server.gate.calls))


def test_what_takes_no_memory_is_not_refused_because_others_hold_too_much() -> None:
    """A request without a grammar holds nothing more once its text is read."""
    memory = FrontMemory(100, 0, retry_after_s=1.0)
    mine, other = (
        Call("m", name, 0.0, tenant=Tenant(name)) for name in ("much", "below its share")
    )
    memory.hold(mine, 90)
    memory.hold(other, 40)
    memory.hold(mine, 0)
    with pytest.raises(ServerOverloaded):
        memory.hold(mine, 1)
    assert memory.n_bytes == 130


async def test_samplers_and_tokens_of_texts_count_and_are_given_back(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, front_mib=16, outbox_kib=16)
    memory = server.gate.calls.memory
    gated_engine.hold()
    costs: list[int] = []
    options: list[dict[str, Any]] = [
        {},
        {"penalty_last_tokens": 1000},
        {"dry": drafthouse.Dry(last_tokens=1000)},
        {"grammar": 'root ::= "abc"{1000}'},
    ]
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        streams = []
        for option in options:
            before, n_there = memory.n_bytes, len(server.loop._outboxes)
            stream = client.generate("x", max_output_tokens=2, **option)
            streams.append(asyncio.ensure_future(stream.result()))
            await eventually(lambda n=n_there: len(server.loop._outboxes) > n)  # type: ignore[misc]  # a default has no type
            costs.append(memory.n_bytes - before)
        prompt = "y" * 1000  # a token each
        before, n_there = memory.n_bytes, len(server.loop._outboxes)
        streams.append(asyncio.ensure_future(client.generate(prompt, max_output_tokens=2).result()))
        await eventually(lambda: len(server.loop._outboxes) > n_there)
        tokens = memory.n_bytes - before
        plain, penalties, dry, grammar = costs
        assert tokens - plain > 48_000
        assert penalties - plain > 3500
        assert dry - plain > 15000
        assert grammar - plain > 24000
        gated_engine.release()
        await asyncio.gather(*streams)
    await eventually(lambda: memory.n_bytes == 0)


def test_lists_cost_by_their_elements_and_a_request_alone_is_let_in() -> None:
    memory = FrontMemory(1 << 20, 1 << 10, retry_after_s=1.0)
    ids = generation_pb2.GenerateRequest()
    ids.prompt.tokens.ids.extend(range(100_000))
    data = ids.SerializeToString()
    scan = Scan(shapes_of(SERVICES, field_bounds(1 << 20, 8))[GENERATE])
    scan.check(data)
    assert scan.n_listed == 100_000
    assert scan.n_elements < 10
    cost = memory.cost(len(data), scan.n_listed, is_stream=True)
    assert cost > 100_000 * (4 + 28 + 2 * 8) + (1 << 10)
    calls = [Call("m", f"r{i}", 0.0, tenant=Tenant(name)) for i, name in enumerate("aab")]
    memory.hold(calls[0], cost)
    for call in calls[1:]:
        with pytest.raises(ServerOverloaded):
            memory.hold(call, cost)
    memory.release(calls[1])
    memory.release(calls[0])
    memory.release(calls[0])
    assert memory.n_bytes == 0
    memory.hold(calls[2], cost)
