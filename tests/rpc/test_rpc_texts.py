"""Calls that work on texts are admitted, bounded and given up as Generate is."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import drafthouse
from drafthouse.v1 import generation_pb2, generation_pb2_grpc
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

MODELS = Path(__file__).resolve().parents[2] / "models"


class HeldTexts(FakeEngine):
    """Reads no text before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = threading.Event()
        self.texts: list[str] = []
        self.readers: set[str] = set()

    def note(self, text: str) -> None:
        self.texts.append(text)
        self.readers.add(threading.current_thread().name)
        assert self.may_read.wait(100)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.note(text)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    def tokenize_chat(
        self, messages: Sequence[tuple[str, str]], chat_template_kwargs: str = ""
    ) -> list[int]:
        self.note(messages[0][1])
        return super().tokenize_chat(messages, chat_template_kwargs)

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        self.note(str(token))
        return super().token_bytes(token, special=special)

    def make_sampler(self, options: SamplingOptions) -> object:
        if options.grammar:
            self.note(options.grammar)
        return super().make_sampler(options)


async def test_text_work_is_charged_to_its_tenant(start_server: ServerFactory) -> None:
    """Of who is served next the scheduler's tests tell, of what is charged the workers'."""
    tenants = TenantRegistry({"k": Tenant("acme")})
    server = await start_server(tenants=tenants, text_service_weight=500.0)
    charge = server.texts._charge
    assert charge is not None
    charge("acme", 0.25)
    async with drafthouse.AsyncClient(server.target, api_key="k") as client:
        await client.generate("x", max_output_tokens=1)
    scheduler = server.loop._thread._scheduler
    assert scheduler.counters.of("acme") == 125.0 + 2 + 2, "and 2 tokens in, one out"


def calls(client: drafthouse.AsyncClient, **options: Any) -> list[Any]:
    """Returns a call of each kind that works on a text."""
    return [
        client.generate("x", max_output_tokens=1, **options).result(),
        client.generate([65], max_output_tokens=1, grammar="root", **options).result(),
        client.count_tokens("x", **options),
        client.count_tokens([{"role": "user", "content": "x"}], **options),
        client.tokenize("x", **options),
        client.detokenize([97], **options),
    ]


async def test_every_call_on_a_text_holds_a_place_until_it_ends(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    engine = HeldTexts()
    server = await start_server(engine)
    admission = server.loop.admission
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        tasks = [asyncio.ensure_future(call) for call in calls(client)]
        await eventually(lambda: admission.n_active == len(tasks))
        assert admission._n_bytes > 0
        engine.may_read.set()
        await asyncio.gather(*tasks)
    await eventually(lambda: admission.n_active == 0)
    assert admission._n_bytes == 0


async def test_every_call_on_a_text_is_refused_beyond_the_tenants_limit_before_it_is_read(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    engine = HeldTexts()
    tenants = TenantRegistry({"k": Tenant("acme", n_active_max=1), "l": Tenant("other")})
    server = await start_server(engine, tenants=tenants)
    async with (
        drafthouse.AsyncClient(server.target, api_key="k", retry=None) as client,
        drafthouse.AsyncClient(server.target, api_key="l", retry=None) as other,
    ):
        first = asyncio.ensure_future(client.tokenize("first"))
        await eventually(lambda: engine.texts == ["first"])
        for call in calls(client):
            with pytest.raises(drafthouse.TenantQuotaExceeded):
                await call
        assert engine.texts == ["first"]
        engine.may_read.set()
        assert await first == list(b"first")
        assert await other.tokenize("x") == [120]
        assert await client.tokenize("x") == [120], "its place was given back, once"


async def test_a_call_whose_time_is_over_leaves_the_line(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    engine = HeldTexts()
    server = await start_server(engine)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        running = asyncio.ensure_future(client.tokenize("running"))
        await eventually(lambda: engine.texts == ["running"])
        for call in calls(client, timeout=0.2):
            with pytest.raises(drafthouse.DeadlineExceeded):
                await call
        await eventually(lambda: server.loop.admission.n_active == 1)
        assert server.loop.statistics().n_text_waiting == 0
        engine.may_read.set()
        await running
        assert engine.texts == ["running"]


async def test_a_drain_waits_for_texts(start_server: ServerFactory, eventually: Eventually) -> None:
    engine = HeldTexts()
    server = await start_server(engine, drain_timeout_s=600)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        waiting = asyncio.ensure_future(client.tokenize("x"))
        await eventually(lambda: engine.texts == ["x"])
        shutdown = asyncio.create_task(server.shutdown())
        await eventually(lambda: server.loop.is_draining)
        assert not shutdown.done()
        engine.may_read.set()
        assert await waiting == [120]
        await shutdown


async def test_no_text_is_read_on_the_event_loop(start_server: ServerFactory) -> None:
    engine = HeldTexts()
    engine.may_read.set()
    server = await start_server(engine)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await asyncio.gather(*calls(client))
    readers = {name for name in engine.readers if name.startswith(("text-worker", "sampler"))}
    # What is generated is spelled on the event loop: that is no client's.
    assert engine.readers - readers <= {"MainThread"}
    assert readers


async def refusal(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


async def test_texts_and_ids_are_bounded_by_the_context(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        most = 32 * 1024
        fits = await stub.Tokenize(generation_pb2.TokenizeRequest(text="x" * most))
        assert len(fits.token_ids) == most
        long = generation_pb2.TokenizeRequest(text="x" * (most + 1))
        assert "text: must have at most 32768 bytes" in await refusal(stub.Tokenize(long))
        spelled = await stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[97] * 1024))
        assert spelled.text == "a" * 1024
        many = generation_pb2.DetokenizeRequest(token_ids=[97] * 1025)
        assert "token_ids: must have at most 1024 entries" in await refusal(stub.Detokenize(many))


@pytest.mark.model
async def test_a_server_lives_on_without_its_workers(eventually: Eventually) -> None:
    from drafthouse_server.engine.llama import LlamaEngine
    from drafthouse_server.engine.text_process import TextProcess

    config = Config(model=str(MODELS / "tiny-mimo2-f16.gguf"), port=0, parallel=2, threads=1)
    server = Server(config, lambda: LlamaEngine.load(config))
    await server.startup()
    try:
        assert len(server.texts._idle) == config.text_workers, "they are ready before it serves"
        async with drafthouse.AsyncClient(server.target, retry=None) as client:
            await eventually(lambda: len(server.texts.workers) == 3)
            for _ in range(2):
                old = set(server.texts.workers)
                for worker in old:
                    assert isinstance(worker, TextProcess)
                    os.kill(worker.pid, signal.SIGKILL)
                await eventually(lambda old=old: len(set(server.texts.workers) - old) == 3)  # type: ignore[misc]  # a default has no type
                result = await client.generate(
                    [{"role": "user", "content": "hi"}], max_output_tokens=2, grammar='root ::= "x"'
                )
                assert result.text == "x"
            for worker in server.texts.workers[:2]:
                assert isinstance(worker, TextProcess)
                os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(drafthouse.DeadlineExceeded):
                await client.tokenize("x", timeout=0.3)
            await eventually(lambda: server.loop.admission.n_active == 0)
    finally:
        await server.close()
    assert server.texts.workers == ()
