"""The server's life: it starts, tells its health, lists its services, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.support.http2 import connect
from tests.support.served import served

import drafthouse
from drafthouse.v1 import generation_pb2
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.protocol import TextWorker
from drafthouse_server.errors import ConfigError, EngineLost, StartupError
from drafthouse_server.rpc import server as rpc_server
from drafthouse_server.rpc.listening import channel_options, has_reflection
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

WATCH = "/grpc.health.v1.Health/Watch"
PROMPT = generation_pb2.Prompt(text="x")
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
    async with asyncio.timeout(100):
        # Polled, as probes do.
        while {await check(server, name) for name in ("", *SERVICES)} != {status}:  # noqa: ASYNC110  # health can only be asked
            await asyncio.sleep(0.01)


async def list_services(server: Server) -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(server.target) as channel:
        # A stream of one message, but sent with the call: where the server refuses a call before
        # its stream's first message is written, grpc.aio says INTERNAL in place of the true code.
        method = channel.unary_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        async for response in method(request):
            return [service.name for service in response.list_services_response.service]
    raise AssertionError("no answer")


async def test_reflection_lists_the_services(server: Server) -> None:
    assert set(await list_services(server)) == {
        *SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip


async def test_drain_finishes_what_runs_and_refuses_what_comes(
    start_server: ServerFactory,
    gated_engine: GatedEngine,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.server._LINGER_S", 600.0)  # however slow we are
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
        server.stop()
        server.stop()  # not to wait for calls that are on their way
        await shutdown
        assert result.usage.output_tokens == 50
        assert gated_engine.is_closed
        with pytest.raises(drafthouse.Unavailable):
            await client.tokenize("y")


async def test_a_drain_says_goaway_first_and_streams_go_on(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine)
    request = generation_pb2.GenerateRequest(prompt=PROMPT, max_output_tokens=5)
    generate = "/drafthouse.v1.GenerationService/Generate"
    async with connect(server.target) as idle, connect(server.target) as busy:
        gated_engine.hold()
        stream = busy.open(generate, request.SerializeToString())
        await eventually(lambda: gated_engine.is_stuck)
        shutdown = asyncio.create_task(server.shutdown())
        await eventually(lambda: idle.has_goaway and busy.has_goaway)
        assert stream not in busy.ended
        async with drafthouse.AsyncClient(server.target, retry=None) as late:
            with pytest.raises(drafthouse.Unavailable):  # the port is closed
                await late.tokenize("x")
        gated_engine.release()
        await eventually(lambda: stream in busy.ended)
        await shutdown
    assert server.loop.statistics().n_requests == {"length": 1}


async def test_a_drain_hands_back_those_that_wait(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, retry_after_s=3.0)
    n_slots = server.loop.engine.limits.n_seq_max
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        gated_engine.hold()
        streams = [
            asyncio.ensure_future(client.generate("x", max_output_tokens=5).result())
            for _ in range(n_slots + 3)
        ]
        await eventually(lambda: len(server.loop._outboxes) == n_slots + 3)
        gated_engine.release()
        gated_engine.hold()
        await eventually(lambda: server.loop.statistics().n_running == n_slots)
        shutdown = asyncio.create_task(server.shutdown())
        await eventually(lambda: server.loop.is_draining)
        gated_engine.release()
        ends = await asyncio.gather(*streams, return_exceptions=True)
        await shutdown
    refused = [end for end in ends if isinstance(end, drafthouse.ServerDraining)]
    assert len(refused) == 3
    assert {error.retry_after for error in refused} == {3.0}
    assert sum(isinstance(end, drafthouse.Result) for end in ends) == n_slots


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.server._FLUSH_S", 0.1)
    # Times of which none is waited for.
    server = await start_server(drain_timeout_s=600, slow_reader_timeout_s=600)
    request = generation_pb2.GenerateRequest(prompt=PROMPT, max_output_tokens=200)
    generate = "/drafthouse.v1.GenerationService/Generate"
    async with connect(server.target, window=0) as rude:
        for method, message in ((generate, request.SerializeToString()), (WATCH, b"")):
            for _ in range(4):
                rude.open(method, message)
        await eventually(lambda: server.loop.statistics().n_generated == 4 * 200)
        await eventually(lambda: server.loop.admission.n_active == 0)
        async with asyncio.timeout(100):
            await server.shutdown()


async def test_an_engine_that_stays_broken_ends_the_server_with_a_code_of_its_own() -> None:
    engine = FakeEngine()
    engine.inject(RuntimeError("device lost"), n_steps=1000)
    config = Config(port=0, unhealthy_exit_s=0.05, draft_policy="fixed")
    server = Server(config, lambda: engine)
    serving = await served(server)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        with pytest.raises(drafthouse.EngineFailure):
            await client.generate("x", max_output_tokens=1)
        # It ends by itself, and tells who comes meanwhile, or gRPC does, which cancels a call that
        # comes with the GOAWAY (docs/security.md): a client of ours would try that one again.
        ends = (drafthouse.EngineFailure, drafthouse.Unavailable, drafthouse.Cancelled)
        while not serving.done():
            with pytest.raises(ends):
                await client.generate("x", max_output_tokens=1)
        with pytest.raises(EngineLost, match="start it again"):
            await serving
    assert engine.is_closed


class _Wordless(FakeEngine):
    """An engine whose text workers may not start any more."""

    may_start = True

    def make_text_worker(self) -> TextWorker:
        if not self.may_start:
            raise StartupError("no memory")
        return super().make_text_worker()


def _lose_text_workers(server: Server, engine: _Wordless) -> None:
    engine.may_start = False
    for worker in server.texts.workers:
        worker.kill()


async def test_a_server_without_text_workers_takes_no_texts_and_says_so(
    start_server: ServerFactory,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    """Before, it was SERVING, and every text waited for its deadline."""
    monkeypatch.setattr("drafthouse_server.serving.text_workers._RETRY_MIN_S", 0.01)
    engine = _Wordless()
    server = await start_server(engine, admin_port=free_port)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.generate("x", max_output_tokens=1)
        _lose_text_workers(server, engine)
        await eventually(lambda: bool(server.broken))
        assert await check(server) == NOT_SERVING
        with drafthouse.AdminClient(f"127.0.0.1:{free_port}") as admin:
            assert (await asyncio.to_thread(admin.status)).load.state == "unhealthy"
        with pytest.raises(drafthouse.EngineUnhealthy, match="text workers cannot be started"):
            await client.generate("x", max_output_tokens=1)
        assert (await client.generate([1, 2], max_output_tokens=1)).usage.output_tokens == 1
        engine.may_start = True
        await eventually(lambda: not server.broken)
        assert await check(server) == SERVING
        await client.generate("x", max_output_tokens=1)


async def test_text_workers_that_never_start_again_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drafthouse_server.serving.text_workers._RETRY_MIN_S", 0.01)
    engine = _Wordless()
    server = Server(Config(port=0, unhealthy_exit_s=0.05, draft_policy="fixed"), lambda: engine)
    with pytest.raises(EngineLost, match=r"no text worker could be started for 0\.05 s"):
        await server.serve(lambda _: _lose_text_workers(server, engine))
    assert engine.is_closed


async def test_a_step_that_never_ends_does_not_keep_the_server_from_ending(
    gated_engine: GatedEngine, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.server._STEP_S", 0.05)
    config = Config(port=0, drain_timeout_s=600, draft_policy="fixed")
    server = Server(config, lambda: gated_engine)
    serving = await served(server)
    gated_engine.hold()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        stream = asyncio.ensure_future(client.generate("x").result())
        await eventually(lambda: gated_engine.is_stuck)
        server.stop()
        server.stop()
        with pytest.raises(EngineLost, match="a step of the engine does not end"):
            await serving
        with pytest.raises(drafthouse.EngineFailure):
            await stream
    gated_engine.release()  # so that this process can end
    server.loop._thread.stop()


async def test_reflection_is_there_on_loopback_or_where_it_is_asked_for() -> None:
    assert has_reflection(Config())
    assert not has_reflection(Config(host="0.0.0.0", insecure_no_auth=True, insecure_no_tls=True))  # noqa: S104  # nobody listens
    assert not has_reflection(Config(reflection="off"))
    config = Config(host="0.0.0.0", insecure_no_auth=True, insecure_no_tls=True, reflection="on")  # noqa: S104  # nobody listens
    assert has_reflection(config)


async def test_without_reflection_nobody_is_told_of_the_services(
    start_server: ServerFactory,
) -> None:
    server = await start_server(reflection="off")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await list_services(server)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bounds_of_connections_reach_grpc() -> None:
    config = Config(
        max_message_bytes=5000,
        max_concurrent_streams=7,
        max_connection_idle_s=2.0,
        max_connection_age_s=3.0,
        max_connection_age_grace_s=4.0,
        max_metadata_bytes=2048,
    )
    options = dict(channel_options(config, 10, 70))
    assert options["grpc.max_allowed_incoming_connections"] == 70
    assert options["grpc.max_receive_message_length"] == 5000
    assert options["grpc.max_concurrent_streams"] == 7
    assert options["grpc.max_connection_idle_ms"] == 2000
    assert options["grpc.max_connection_age_ms"] == 3000
    assert options["grpc.max_connection_age_grace_ms"] == 4000
    assert options["grpc.max_metadata_size"] == 2048
    automatic = dict(channel_options(Config(parallel=4, tenant_queue_size=9), 1 << 23, 70))
    assert automatic["grpc.max_receive_message_length"] == 1 << 23
    assert automatic["grpc.max_concurrent_streams"] == 9  # more would not find room in the queue
    wide = dict(channel_options(Config(parallel=16, tenant_queue_size=9), 1 << 23, 70))
    assert wide["grpc.max_concurrent_streams"] == 16


async def test_a_connection_too_many_is_closed_and_places_are_given_back(
    start_server: ServerFactory,
) -> None:
    server = await start_server(max_connections=2)
    host, _, port = server.target.rpartition(":")

    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[bool]:
        """A connection; the server greets one that it keeps."""
        reader, writer = await asyncio.open_connection(host, int(port))
        greeting = b""
        with contextlib.suppress(ConnectionError):
            greeting = await reader.read(1)
        try:
            yield bool(greeting)
        finally:
            writer.close()

    async def is_kept() -> bool:
        async with connected() as kept:
            return kept

    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        assert await client.tokenize("a") == [97]
        async with connected() as second:
            assert second
            for _ in range(3):
                assert not await is_kept()
            assert await client.tokenize("a") == [97]
        async with asyncio.timeout(30):
            while not await is_kept():  # noqa: ASYNC110  # the place can only be asked for
                await asyncio.sleep(0.01)


_OF_FEW_DESCRIPTORS = """
    import asyncio, resource
    from drafthouse_server.config import Config
    from drafthouse_server.engine.fake import FakeEngine
    from drafthouse_server.rpc.server import Server

    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    server = Server(Config(port=0), FakeEngine)
    asyncio.run(server.serve(lambda server: print(server.target, flush=True)))
"""


async def test_connections_leave_descriptors_to_those_that_are_there() -> None:
    """Before, a flood of them made the server refuse everybody's calls."""
    command = [sys.executable, "-c", textwrap.dedent(_OF_FEW_DESCRIPTORS)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    target = (await process.stdout.readline()).decode().strip()
    host, _, port = target.rpartition(":")
    flood = list[asyncio.StreamWriter]()
    try:
        async with drafthouse.AsyncClient(target, retry=None) as client:
            assert await client.tokenize("a") == [97]
            n_kept = 0
            for _ in range(400):
                reader, writer = await asyncio.open_connection(host, int(port))
                flood.append(writer)
                with contextlib.suppress(ConnectionError):
                    n_kept += bool(await reader.read(1))
            assert 100 < n_kept < 300 - 2 * 64
            assert await client.tokenize("a") == [97]
    finally:
        for writer in flood:
            writer.close()
        process.terminate()
        assert await process.wait() == 0


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


async def test_a_part_that_does_not_end_keeps_none_of_the_others(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    server = await start_server(engine)
    texts = server._texts
    assert texts is not None
    closing = asyncio.ensure_future(texts.close())

    async def hang() -> None:
        await asyncio.Event().wait()

    async def release(what: str, ending: Coroutine[object, object, None]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rpc_server, "_RELEASE_S", 0.05 if what == "the text workers" else 100.0)
            await whole(what, ending)

    whole = rpc_server._release
    monkeypatch.setattr(rpc_server, "_release", release)
    monkeypatch.setattr(texts, "close", hang)
    await server.close()
    await closing
    assert engine.is_closed
    assert "the text workers did not end within 0.05 s" in caplog.text


async def test_a_part_that_fails_to_end_keeps_none_of_the_others(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    server = await start_server(engine)
    ended = list[str]()
    close = server.backends.close

    async def fail() -> None:
        raise TimeoutError("a fault of ours")

    async def note() -> None:
        await close()
        ended.append("backends")

    with monkeypatch.context() as patch:
        patch.setattr(server._side, "aclose", fail)
        patch.setattr(server.loop, "close", fail)
        patch.setattr(server.backends, "close", note)
        await server.close()
    assert ended == ["backends"]
    assert caplog.text.count("failed to end") == 2
    await server.loop.close()
    await server._side.aclose()
    assert engine.is_closed


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
            assert process.wait(100) == 0
            assert process.stdout.read() == "the end\n"
        finally:
            process.kill()
