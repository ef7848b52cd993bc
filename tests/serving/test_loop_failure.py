"""A loop that fails: every stream is told, health says so, and the process ends with code 70."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.support.served import served

import drafthouse
from drafthouse_server.cli.serve import FAILED, LISTENS_AT, LOST
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ServerFailed
from drafthouse_server.rpc.server import Server
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Event, Sequence
from drafthouse_server.step import StepResult

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
N_STREAMS = 10

# `drafthouse serve` with an engine without a model and a bug of ours in the scheduler.
BROKEN = textwrap.dedent(
    """
    import sys
    from drafthouse_server.cli import main, serve
    from drafthouse_server.engine.llama import LlamaEngine
    from drafthouse_server.engine.fake import FakeEngine
    from drafthouse_server.scheduling.scheduler import Scheduler

    commit = Scheduler.commit

    def broken(self, result, now):
        events = commit(self, result, now)
        if len(self.sequences()) == N_STREAMS:
            raise RuntimeError("a bug of ours")
        return events

    Scheduler.commit = broken
    serve.LlamaEngine.load = lambda *_: FakeEngine(step_s=0.05)
    sys.exit(main.main(["serve", "--port", "0", "--draft-policy", "fixed"]))
    """.replace("N_STREAMS", str(N_STREAMS))
)

# The same with a device that never answers.
HUNG = textwrap.dedent(
    """
    import sys
    import threading
    from drafthouse_server.cli import main, serve
    from drafthouse_server.engine.fake import FakeEngine

    class Hung(FakeEngine):
        def step(self, plan):
            threading.Event().wait()

    serve.LlamaEngine.load = lambda *_: Hung()
    bounds = ["--step-timeout-s", "0.1", "--unhealthy-exit-s", "0.1"]
    sys.exit(main.main(["serve", "--port", "0", "--draft-policy", "fixed", *bounds]))
    """
)


async def target_of(process: asyncio.subprocess.Process) -> str:
    """Returns where a process that was just started listens."""
    assert process.stdout is not None
    while True:
        line = (await asyncio.wait_for(process.stdout.readline(), 100)).decode()
        assert line, (await process.communicate())[1].decode()
        if line.startswith(LISTENS_AT):
            return line.removeprefix(LISTENS_AT).strip()


async def watch(target: str, told: list[int]) -> None:
    """Notes what health says until the server is gone."""
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in call(health_pb2.HealthCheckRequest()):
                told += [response.status]


async def test_a_served_process_tells_every_stream_and_ends_with_its_code(
    eventually: Eventually,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BROKEN),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        target = await target_of(process)
        told: list[int] = []
        watching = asyncio.create_task(watch(target, told))
        await eventually(lambda: bool(told))
        async with drafthouse.AsyncClient(target, retry=None) as client:
            streams = [
                client.generate("x", max_output_tokens=900, ignore_end_token=True).result()
                for _ in range(N_STREAMS)
            ]
            ends = await asyncio.gather(*streams, return_exceptions=True)
        assert [type(end) for end in ends] == [drafthouse.EngineFailure] * N_STREAMS
        for end in ends:
            assert isinstance(end, drafthouse.EngineFailure)
            assert end.metadata["status"] == "LOOP_FAILED"
        _, err = await asyncio.wait_for(process.communicate(), 100)
        assert process.returncode == FAILED == 70
        await watching
        assert told == [SERVING, NOT_SERVING]
    finally:
        if process.returncode is None:
            process.kill()
    log = err.decode()
    assert "a bug of ours" in log, "the trace"
    assert log.splitlines()[-1].startswith("drafthouse: the step loop failed"), "what to do"


async def test_a_served_process_whose_step_never_ends_tells_its_streams_and_ends() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HUNG),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with drafthouse.AsyncClient(await target_of(process), retry=None) as client:
            with pytest.raises(drafthouse.EngineFailure) as caught:
                await client.generate("x")
            assert caught.value.metadata["status"] == "STEP_TIMEOUT"
        _, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == LOST == 71
    assert "\ndrafthouse: the engine has not worked for 0.1 seconds" in err.decode(), "why"


class BrokenScheduler(Scheduler):
    """A bug of ours that shows at the first commit."""

    def commit(self, result: StepResult, now: float) -> list[tuple[Sequence, Event]]:
        raise RuntimeError("a bug of ours")


async def test_a_call_that_comes_after_the_failure_is_told_why(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse_server.serving.compose.Scheduler", BrokenScheduler)
    server = await start_server(FakeEngine())  # not `serve`: it stays as it is
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        with pytest.raises(drafthouse.EngineFailure):
            await client.generate("x")
        await eventually(lambda: server.loop._health.has_failed)
        for call in (client.generate("y").result(), client.tokenize("y"), client.get_model()):
            with pytest.raises(drafthouse.ServerDraining, match="its step loop has failed"):
                await call
        assert not await client.health()


class UncloseableEngine(FakeEngine):
    """Is so broken that it cannot even be closed."""

    def close(self) -> None:
        raise OSError("the device is gone")


async def test_an_engine_that_cannot_be_closed_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drafthouse_server.serving.compose.Scheduler", BrokenScheduler)
    server = Server(Config(port=0), UncloseableEngine)
    serving = await served(server)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        with pytest.raises(drafthouse.EngineFailure):
            await client.generate("x")
    with pytest.raises(ServerFailed) as caught:
        await serving
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_the_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    from drafthouse_server.cli.main import main

    with pytest.raises(SystemExit):
        main(("serve", "--help"))
    assert str(FAILED) in capsys.readouterr().out
