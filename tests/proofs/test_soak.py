"""Calls that end while they are refused, finished or written to: no error in the log, one outcome.

`python -m tests.proofs.soak --seconds 3600` is the same for as long as wanted.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.proofs.soak import Soak
from tests.proofs.soak_starts import Starts

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import Unauthenticated
from drafthouse_server.rpc.responses import StreamWriter
from drafthouse_server.rpc.services import GenerationService
from drafthouse_server.tenancy.tenants import Identity, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


def load_demo() -> Engine:
    return LlamaEngine.load(Config(port=0, parallel=4, threads=1))


@pytest.mark.parametrize(
    "make", [FakeEngine, pytest.param(load_demo, marks=pytest.mark.model)], ids=["fake", "demo"]
)
async def test_clients_that_leave_and_deadlines_that_pass_are_no_errors(
    make: Callable[[], Engine],
) -> None:
    soak = Soak(make)
    await soak.run(3.0)
    assert soak.errors == []
    assert soak.n_left == 0
    assert soak.outcomes["left"]
    assert soak.outcomes["DEADLINE_EXCEEDED"]
    # A call whose client leaves before its message is read asks for nothing, and is none of them.
    assert 0 < sum(soak.counted.values()) <= soak.n_calls, "every request once"
    known = {"length", "stop", "cancelled", "deadline", "INVALID_FIELD", "DEADLINE_TOO_SHORT"}
    assert set(soak.counted) <= known, "ENGINE_FAILURE is a fault of ours"


@pytest.mark.model
@pytest.mark.timeout(120)
async def test_no_start_loses_a_stream() -> None:
    starts = Starts()
    for i in range(3):
        await starts.start(i, is_process=i == 0)
    assert (starts.failures, starts.n_passed) == ([], 3)


@pytest.mark.usefixtures("server")
async def test_an_answer_that_nobody_waits_for_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a unary handler returns is sent by gRPC: too late, once in 30,000 calls of a soak."""
    gone = importlib.import_module("grpc._cython.cygrpc").ExecuteBatchError("gone")
    log = logging.getLogger("grpc._cython.cygrpc")
    for error in (gone, RuntimeError("a fault")):
        log.error("raised in core by servicer method", exc_info=error)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a fault"]


def test_what_ends_after_its_loop_is_no_error_of_the_next(
    caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    """A call with a deadline that nobody waits for, and a loop that runs when it passes."""

    def ask(channel: Any, seconds: float) -> Any:
        return channel.unary_unary("/a/b")(b"", timeout=seconds, wait_for_ready=True)

    async def begin(seconds: float) -> Any:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{free_port}")
        call = ask(channel, seconds)
        reading = asyncio.ensure_future(call.initial_metadata())  # a call begins when it is read
        await asyncio.sleep(0.1)
        return channel, call, reading

    async def wait(seconds: float) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel, seconds)

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(begin(0.3))
    loop.close()
    asyncio.run(wait(1.0))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []
    del kept


class Slow(TenantRegistry):
    """Takes so long for a key that nobody waits for the answer: the event loop stands still."""

    is_reached = False

    def identify(self, api_key: str | None, address: str) -> Identity:
        self.is_reached = True
        time.sleep(0.3)
        return super().identify(api_key, address)


class SlowRefusal(Slow):
    """Refuses everybody then."""

    def identify(self, api_key: str | None, address: str) -> Identity:
        super().identify(api_key, address)
        raise Unauthenticated


async def call_until(
    target: str, is_reached: Callable[[], bool], call: Callable[[drafthouse.Client], object]
) -> int:
    """Calls with too little time, again and again until one call is there in time to be late.

    Returns:
        How many calls that took.
    """

    def ask() -> int:
        n_calls = 0
        with drafthouse.Client(target, retry=None) as client:
            while not is_reached():
                n_calls += 1
                with pytest.raises(drafthouse.DeadlineExceeded):
                    call(client)
        return n_calls

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("kind", [SlowRefusal, Slow])
@pytest.mark.parametrize("name", ["generate", "get_model", "list_models"])
async def test_a_call_whose_deadline_passes_before_it_is_answered(
    start_server: ServerFactory,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    kind: type[Slow],
    name: str,
) -> None:
    caplog.set_level(logging.INFO)
    tenants = kind({})
    server = await start_server(tenants=tenants)

    def call(client: drafthouse.Client) -> None:
        if name == "generate":
            client.generate("x", timeout=0.1).result()
        else:
            getattr(client, name)(timeout=0.1)

    n_calls = await call_until(server.target, lambda: tenants.is_reached, call)
    await eventually(lambda: "call method=" in caplog.text)
    await asyncio.sleep(0.05)
    told = [record.getMessage() for record in caplog.records if "call method=" in record.message]
    assert 1 <= len(told) <= n_calls
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    counted = server.loop.statistics().n_requests
    assert sum(counted.values()) <= len(told)
    assert "ENGINE_FAILURE" not in counted


async def test_a_call_whose_deadline_passes_while_it_is_told_so(
    start_server: ServerFactory,
    eventually: Eventually,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequence ends by its deadline, and before that can be said the call has ended too."""
    finish = StreamWriter.finish
    n_late = 0

    async def late(*arguments: Any) -> None:
        nonlocal n_late
        n_late += 1
        time.sleep(0.4)  # noqa: ASYNC251  # the event loop learns nothing meanwhile
        await finish(*arguments)

    monkeypatch.setattr(StreamWriter, "finish", late)
    monkeypatch.setattr(GenerationService, "_deadline", lambda *_: time.monotonic())
    server = await start_server(FakeEngine(step_s=0.005))
    n_calls = await call_until(
        server.target, lambda: n_late > 0, lambda client: client.generate("x", timeout=0.3).result()
    )
    await eventually(lambda: "deadline" in server.loop.statistics().n_requests)
    await asyncio.sleep(0.1)
    counted = server.loop.statistics().n_requests
    assert set(counted) <= {"deadline", "cancelled"}
    assert n_late <= sum(counted.values()) <= n_calls
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_leaves_before_its_prompt_is_tokenised_is_counted_once(
    start_server: ServerFactory, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    class SlowTokenizer(FakeEngine):
        n_texts = 0

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            self.n_texts += 1
            time.sleep(0.3)
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    engine = SlowTokenizer()
    server = await start_server(engine)
    await call_until(
        server.target,
        lambda: engine.n_texts > 0,
        lambda client: client.generate("x", timeout=0.1).result(),
    )
    await eventually(lambda: sum(server.loop.statistics().n_requests.values()) >= engine.n_texts)
    counted = server.loop.statistics().n_requests
    assert sum(counted.values()) == engine.n_texts
    assert set(counted) <= {"deadline", "cancelled"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("is_drained", [True, False])
async def test_a_server_that_ends_among_its_streams_logs_no_error(
    start_server: ServerFactory, caplog: pytest.LogCaptureFixture, is_drained: bool
) -> None:
    for _ in range(5):
        server = await start_server(FakeEngine(step_s=0.001), drain_timeout_s=0.05)
        async with drafthouse.AsyncClient(server.target, retry=None) as client:
            streams = [
                asyncio.create_task(client.generate("x" * i, max_output_tokens=900).result())
                for i in range(1, 30)
            ]
            await asyncio.sleep(0.1)
            await (server.shutdown() if is_drained else server.close())
            ends = await asyncio.gather(*streams, return_exceptions=True)
        kinds = (drafthouse.Unavailable, drafthouse.Cancelled, drafthouse.Result)
        assert all(isinstance(end, kinds) for end in ends), ends
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
