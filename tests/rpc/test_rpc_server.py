"""The server's life: it starts, tells its health, lists its services, drains, and ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ConfigError
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

SERVICES = ["drafthouse.v1.GenerationService", "drafthouse.v1.ModelService"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(server: Server, service: str = "") -> int:
    async with grpc.aio.insecure_channel(server.target) as channel:
        method = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        response = await method(health_pb2.HealthCheckRequest(service=service))
        return response.status


async def test_health_of_the_whole_and_of_each_service(server: Server) -> None:
    for service in ("", *SERVICES):
        assert await check(server, service) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(server, "no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_unix_socket_is_served(start_server: ServerFactory, tmp_path: Path) -> None:
    server = await start_server(host=f"unix:{tmp_path}/d.sock")
    assert server.target == f"unix:{tmp_path}/d.sock"
    assert await check(server) == SERVING


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_with_and_without_brackets(start_server: ServerFactory, host: str) -> None:
    server = await start_server(host=host)
    assert server.target == f"[::1]:{server.port}"
    assert await check(server) == SERVING


async def test_health_and_reflection_need_no_key(start_server: ServerFactory) -> None:
    server = await start_server(api_keys=("acme:secret",))
    assert await check(server) == SERVING
    assert "drafthouse.v1.ModelService" in await list_services(server)


async def test_unhealthy_engine_is_not_serving_until_it_works_again(
    start_server: ServerFactory,
) -> None:
    engine = FakeEngine()
    server = await start_server(engine)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        engine.inject(RuntimeError("device lost"), n_steps=1000)
        for _ in range(3):
            with pytest.raises(drafthouse.EngineFailure):
                await client.generate("x", max_output_tokens=1)
        await wait_for(server, NOT_SERVING)
        assert not await client.health()
        engine._faults.clear()
        await client.generate("x", max_output_tokens=1)
        await wait_for(server, SERVING)
        assert await client.health()


async def wait_for(server: Server, status: int) -> None:
    async with asyncio.timeout(25):
        # Polled, as probes do.
        while {await check(server, name) for name in ("", *SERVICES)} != {status}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def list_services(server: Server) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(server.target) as channel:
        method = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        async for response in method(iter([request])):
            return [service.name for service in response.list_services_response.service]
    raise AssertionError("no answer")


async def test_reflection_lists_the_services(server: Server) -> None:
    assert set(await list_services(server)) == {
        *SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip


async def test_drain_finishes_what_runs_and_refuses_what_comes(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, retry_after_s=3.0)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        gated_engine.hold()
        stream = client.generate("x", max_output_tokens=50)
        await eventually(lambda: gated_engine.is_stuck)
        shutdown = asyncio.create_task(server.shutdown())
        await eventually(lambda: server.loop.is_draining)
        assert not await client.health()
        for refused in (
            client.generate("y").result(),
            client.generate("y", model="of the server to come").result(),
            client.tokenize("y"),
            client.get_model("of the server to come"),
        ):
            with pytest.raises(drafthouse.ServerDraining) as caught:
                await refused
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert caught.value.retry_after == 3.0
        gated_engine.release()
        result = await stream
        await shutdown
        assert result.usage.output_tokens == 50
        assert gated_engine.is_closed
        with pytest.raises(drafthouse.Unavailable):
            await client.tokenize("y")


async def test_drain_is_bounded(start_server: ServerFactory) -> None:
    engine = FakeEngine(step_s=0.02)
    server = await start_server(engine, drain_timeout_s=0.1)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        chunks = aiter(client.generate("x"))  # would take many seconds
        await anext(chunks)
        await server.shutdown()
        with pytest.raises(drafthouse.ServerDraining):
            async for _ in chunks:
                pass
    assert engine.is_closed


async def test_calls_that_are_on_their_way_when_nothing_runs_any_more_are_told_to_come_again(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.server._LINGER_S", 600.0)  # however slow we are
    server = await start_server()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.health()
        calls = [asyncio.create_task(client.generate("x").result()) for _ in range(100)]
        shutdown = asyncio.create_task(server.shutdown())
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} <= {drafthouse.ServerDraining, drafthouse.Result}
        server.stop()
        server.stop()  # a second one does not wait
        await shutdown


async def test_second_stop_does_not_wait(start_server: ServerFactory) -> None:
    server = await start_server(FakeEngine(step_s=0.02), drain_timeout_s=600)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        chunks = aiter(client.generate("x"))
        await anext(chunks)
        server.stop()
        shutdown = asyncio.create_task(server.shutdown())
        await asyncio.sleep(0.05)
        assert not shutdown.done()
        server.stop()
        await shutdown
        with pytest.raises(drafthouse.DrafthouseError):
            async for _ in chunks:
                pass


async def test_close_is_harmless_when_done_twice(server: Server) -> None:
    await server.shutdown()
    await server.close()
    await server.close()


async def test_a_port_in_use_is_one_clear_sentence() -> None:
    engine = FakeEngine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"setting 'port' is {port}; expected a port"):
            await Server(Config(port=port), lambda: engine).startup()
    assert engine.is_closed


async def test_a_request_beyond_the_limit_is_refused(start_server: ServerFactory) -> None:
    server = await start_server(max_message_bytes=2000)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        with pytest.raises(drafthouse.ResourceExhausted):
            await client.tokenize("x" * 3000)
        assert await client.tokenize("x" * 1000) == [120] * 1000


PROGRAM = """
    import asyncio
    from drafthouse_server.config import Config
    from drafthouse_server.engine.fake import FakeEngine
    from drafthouse_server.rpc.server import Server

    server = Server(Config(port=0), lambda: FakeEngine(step_s=0.005))
    asyncio.run(server.serve(lambda server: print(server.target, flush=True)))
    print("the end", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_process_exits_with_0(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            with drafthouse.Client(process.stdout.readline().strip()) as client:
                stream = client.generate("x", max_output_tokens=100)
                chunks = iter(stream)
                next(chunks)
                process.send_signal(number)
                assert stream.result().usage.output_tokens == 100
            assert process.wait(10) == 0
            assert process.stdout.read() == "the end\n"
        finally:
            process.kill()
