"""Clients without our SDK, which retry by the service config beside the protos."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from tests.sdk.test_sdk_drain import N_CALLERS, N_TOKENS, drained_under_load, n_done, target_of
from tests.sdk.test_sdk_drain import servers as servers  # noqa: PLC0414  # a fixture
from tests.support.javascript import javascript

from drafthouse.v1 import generation_pb2, model_pb2, usage_pb2
from drafthouse.v1.generation_pb2_grpc import GenerationServiceStub
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import Draining, EngineUnhealthy, QuotaExceeded, SlowReader
from drafthouse_server.rpc.interceptors import pushback

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

    from drafthouse_server.errors import DrafthouseError
    from drafthouse_server.rpc.server import Server

PROTOS = Path(__file__).resolve().parents[2] / "protos"
CONFIG = PROTOS / "drafthouse/v1/drafthouse_grpc_service_config.json"
SCRIPT = Path(__file__).with_name("javascript_retries.js")
PUSHBACK = "grpc-retry-pushback-ms"


@asynccontextmanager
async def channel_of(target: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.service_config", CONFIG.read_text())]
    async with grpc.aio.insecure_channel(target, options) as channel:
        yield channel


def request(n_tokens: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="x"),
        max_output_tokens=n_tokens,
        stop=generation_pb2.StopOptions(ignore_end_token=True),
    )


async def generated(channel: grpc.aio.Channel, n_tokens: int) -> int:
    """Returns how many tokens a stream had."""
    n = 0
    async for response in GenerationServiceStub(channel).Generate(request(n_tokens)):
        n += len(response.chunk.token_ids)
    return n


def test_every_service_of_clients_is_tried_again() -> None:
    """Lists of usage were not, though the server told when to come back."""
    [method] = json.loads(CONFIG.read_text())["methodConfig"]
    services = {
        file.package + "." + service
        for file in (generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, usage_pb2.DESCRIPTOR)
        for service in file.services_by_name
    }
    assert {name["service"] for name in method["name"]} == services


async def test_a_drain_loses_no_call(
    servers: tuple[Server, Server], eventually: Eventually
) -> None:
    is_over = asyncio.Event()

    async def generate(channel: grpc.aio.Channel) -> int:
        n_calls = 0
        while not is_over.is_set():
            assert await generated(channel, N_TOKENS) == N_TOKENS
            n_calls += 1
        return n_calls

    async def count(channel: grpc.aio.Channel) -> int:
        while not is_over.is_set():
            await GenerationServiceStub(channel).Tokenize(generation_pb2.TokenizeRequest(text="ab"))
        return 0

    async with channel_of(target_of(servers)) as channel:
        works: list[Awaitable[int]] = [generate(channel) for _ in range(N_CALLERS)]
        works += [count(channel) for _ in range(4)]
        callers = [asyncio.ensure_future(work) for work in works]
        n_calls = await drained_under_load(servers, callers, is_over.set, eventually)
    assert n_calls == sum(map(n_done, servers)), "each was served once"


async def test_a_drain_loses_no_call_of_a_client_in_javascript(
    servers: tuple[Server, Server], eventually: Eventually
) -> None:
    command, environment = await asyncio.to_thread(javascript)
    process = await asyncio.create_subprocess_exec(
        *command,
        *(str(SCRIPT), target_of(servers), str(PROTOS), str(CONFIG), str(N_CALLERS), str(N_TOKENS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    stdin = process.stdin
    try:
        told = asyncio.ensure_future(process.communicate())
        n_calls = await drained_under_load(
            servers, [asyncio.ensure_future(_n_calls(told))], stdin.close, eventually
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert n_calls == sum(map(n_done, servers)), "each was served once"


async def _n_calls(told: asyncio.Future[tuple[bytes, bytes]]) -> int:
    found = json.loads((await told)[0])
    assert found["faults"] == []
    return int(found["n_calls"])


async def test_who_is_refused_comes_back_when_the_server_says(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, queue_size=1)
    gated_engine.hold()
    statistics = server.loop.statistics
    async with channel_of(server.target) as channel:
        first = asyncio.ensure_future(generated(channel, 2))
        await eventually(lambda: statistics().n_running == 1)
        second = asyncio.ensure_future(generated(channel, 2))
        await eventually(lambda: statistics().n_waiting == 1)
        third = asyncio.ensure_future(generated(channel, 2))
        await eventually(lambda: "QUEUE_FULL" in statistics().n_requests)
        gated_engine.release()
        assert [await call for call in (first, second, third)] == [2, 2, 2]


async def test_a_generation_that_has_begun_is_not_tried_again(
    start_server: ServerFactory,
) -> None:
    server = await start_server(FakeEngine(step_s=0.02), drain_timeout_s=0.1)
    async with channel_of(server.target) as channel:
        stream = GenerationServiceStub(channel).Generate(request(1000))
        responses = aiter(stream)
        await anext(responses)
        await server.shutdown()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (PUSHBACK, "-1") in tuple(caught.value.trailing_metadata() or ())


def begun() -> Draining:
    error = Draining(1.0)
    error.has_begun = True
    return error


def quota(retry_after_s: float | None) -> QuotaExceeded:
    return QuotaExceeded("t", "requests a minute", 1, retry_after_s)


BILLED = (("drafthouse-usage-bin", b""),)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(begun(), (), id="begun"),
        pytest.param(begun(), BILLED, id="begun-and-billed"),
        pytest.param(EngineUnhealthy(1.0), BILLED, id="billed"),
        pytest.param(quota(121.0), (), id="longer-than-anybody-waits"),
        pytest.param(quota(None), (), id="waiting-does-not-help"),
        pytest.param(SlowReader(1.0), (), id="the-client's-own-doing"),
    ],
)
def test_what_another_attempt_does_not_help_is_not_tried_again(
    error: DrafthouseError, told: tuple[tuple[str, bytes], ...]
) -> None:
    assert pushback(error, told) == ((PUSHBACK, "-1"),)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(Draining(2.0), BILLED, id="handed-back"),
        pytest.param(EngineUnhealthy(2.0), (), id="not-now"),
        pytest.param(quota(2.0), (), id="rate"),
    ],
)
def test_who_may_try_again_is_told_when(
    error: DrafthouseError, told: tuple[tuple[str, bytes], ...]
) -> None:
    ((key, value),) = pushback(error, told)
    assert key == PUSHBACK
    assert 2000 <= int(value) <= 2500
