"""A client that leaves, at whatever moment, gives its slot back; so does a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import grpc
import pytest

import drafthouse
from drafthouse.v1 import generation_pb2, generation_pb2_grpc
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import responses
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

    from drafthouse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

LONG = generation_pb2.Prompt(tokens=generation_pb2.TokenIds(ids=[65] * 900))  # fifteen steps
SHORT = generation_pb2.Prompt(text="x")


def start(
    stub: GenerationServiceAsyncStub, prompt: generation_pb2.Prompt
) -> grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]:
    return stub.Generate(generation_pb2.GenerateRequest(prompt=prompt))


async def assert_all_free(server: Server, engine: FakeEngine, eventually: Eventually) -> None:
    """No cell is in use but those that the prefix cache says it holds."""
    statistics = server.loop.statistics
    await eventually(lambda: statistics().n_running == 0)
    await eventually(lambda: engine.n_cells_used == statistics().scheduler.n_retained_cells)
    assert server.loop.statistics().n_waiting == 0


@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
async def test_cancel_frees_the_slot_within_one_step(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    phase: str,
) -> None:
    caplog.set_level(logging.INFO)
    server = await start_server(gated_engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        prompt = SHORT
        if phase == "prefilling":
            prompt = LONG
            gated_engine.hold()
        call = start(stub, prompt)
        if phase == "decoding":
            await call.read()
            gated_engine.hold()
        await eventually(lambda: gated_engine.is_stuck)
        n_plans = len(gated_engine.plans)
        call.cancel()
        await eventually(lambda: "code=CANCELLED" in caplog.text)  # it has crossed the wire
        gated_engine.release()
        await assert_all_free(server, gated_engine, eventually)
    # The step after the one in flight, if there is one, gives the slot back and does nothing else.
    # A long prompt's tokens stay in the slot, and the engine has nothing to do.
    assert [plan.entries for plan in gated_engine.plans[n_plans:]] == [[]] * (phase == "decoding")
    assert server.loop.statistics().n_requests == {"cancelled": 1}


async def test_cancel_while_waiting_leaves_the_queue(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = await start_server(gated_engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        running = [start(stub, SHORT) for _ in range(4)]
        for call in running:
            await call.read()
        gated_engine.hold()
        waiting = start(stub, SHORT)
        await eventually(lambda: server.loop.statistics().n_waiting == 1)
        waiting.cancel()
        await eventually(lambda: "code=CANCELLED" in caplog.text)  # it has crossed the wire
        gated_engine.release()
        await eventually(lambda: server.loop.statistics().n_waiting == 0)
        assert server.loop.statistics().n_requests == {"cancelled": 1}
        for call in running:
            call.cancel()
        await assert_all_free(server, gated_engine, eventually)


async def test_a_third_leaves_and_nobody_else_notices(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    engine = FakeEngine()
    server = await start_server(engine)
    async with drafthouse.AsyncClient(server.target) as client:
        alone = [
            await client.generate([65 + i] * 20, temperature=0, max_output_tokens=60)
            for i in range(10)
        ]

        async def stay(i: int) -> tuple[int, ...]:
            stream = client.generate([65 + i] * 20, temperature=0, max_output_tokens=60)
            return (await stream).token_ids

        async def leave(i: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002 * i):
                    await client.generate([90] * 20, temperature=0)

        crowd = [asyncio.create_task(stay(i)) for i in range(10)]
        leavers = [asyncio.create_task(leave(i)) for i in range(5)]
        outputs = await asyncio.gather(*crowd)
        await asyncio.gather(*leavers)
    assert outputs == [result.token_ids for result in alone]
    await assert_all_free(server, engine, eventually)


@pytest.mark.parametrize("is_held", [True, False], ids=["waiting-for-a-step", "decoding"])
async def test_deadline_ends_the_call_and_frees_the_slot(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    is_held: bool,
) -> None:
    server = await start_server(gated_engine)
    if is_held:
        gated_engine.hold()
    async with drafthouse.AsyncClient(server.target) as client:
        with pytest.raises(drafthouse.DeadlineExceeded):
            await client.generate("x", timeout=0.1)
        gated_engine.release()
        await assert_all_free(server, gated_engine, eventually)


async def test_the_sequence_itself_carries_the_deadline(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    """The slot does not wait for gRPC to notice."""
    server = await start_server(gated_engine)
    async with drafthouse.AsyncClient(server.target) as client:
        gated_engine.hold()
        async with client.generate("x", timeout=500.0):
            await eventually(lambda: gated_engine.is_stuck)
            [sequence] = server.loop._thread._scheduler.sequences()
            now = time.monotonic()
            deadline = sequence.request.deadline
            gated_engine.release()
    assert now < deadline <= now + 505.0  # gRPC rounds timeouts up


async def test_who_leaves_before_its_headers_are_sent_is_no_failure_of_the_engine(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    def fail(_: object) -> None:
        raise grpc.aio.InternalError("as grpc.aio says that there is nobody to send to")

    monkeypatch.setattr(responses, "rate_limit_headers", fail)
    tenant = Tenant("a", output_tokens_per_min=900)
    tenants = TenantRegistry({"k": tenant})
    server = await start_server(tenants=tenants)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(prompt=SHORT, max_output_tokens=900)
        call = stub.Generate(request, metadata=(("authorization", "Bearer k"),))
        await eventually(lambda: server.loop.statistics().n_requests == {"cancelled": 1})
        call.cancel()
        await eventually(lambda: server.loop.admission.n_active == 0)
    [standing] = server.loop.admission.standings(tenant)
    assert standing.n_left == 900, "what was reserved is there again"


async def test_closing_the_channel_frees_the_slot(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    engine = FakeEngine(step_s=0.001)
    server = await start_server(engine)
    channel = grpc.aio.insecure_channel(server.target)
    call = start(generation_pb2_grpc.GenerationServiceStub(channel), SHORT)
    await call.read()
    await channel.close()
    await assert_all_free(server, engine, eventually)
