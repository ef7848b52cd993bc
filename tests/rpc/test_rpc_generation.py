"""GenerationService and ModelService over a real connection, with an engine that is a hash."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.conftest import GatedEngine
from tests.support.logged import logged
from tests.support.unknown_cost import UnknownCost

import drafthouse
from drafthouse import _transport
from drafthouse.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.operations.calls import Call
from drafthouse_server.rpc.server import Server
from drafthouse_server.rpc.services import GenerationService, ServiceContext
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.text_workers import TextWorkers
from drafthouse_server.step import (
    PlanEntry,
    SamplingOptions,
    SequenceStatus,
    Start,
    StepPlan,
    StepResult,
)
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry
from drafthouse_server.usage.record import UsageQuery
from drafthouse_server.usage.stores import list_all

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


def expected_tokens(prompt: list[int], n: int) -> list[int]:
    """Returns what the engine says greedily when it is driven by hand, alone and without drafts."""
    engine = FakeEngine(dataclasses.replace(FakeEngine().limits, n_batch=1024))
    starts = [Start(0, engine.make_sampler(SamplingOptions(temperature=0.0)))]
    tokens: list[int] = []
    n_past, pending = 0, prompt
    for _ in range(n):
        plan = StepPlan([PlanEntry(0, n_past, pending, 0, True)], starts=starts)
        entry = engine.step(plan).entries[0]
        tokens += entry.tokens
        n_past, pending, starts = entry.n_past, tokens[-1:], []
    return tokens


async def test_generate_streams_the_models_tokens(client: drafthouse.AsyncClient) -> None:
    chunks = [
        chunk async for chunk in client.generate("hello", temperature=0, max_output_tokens=30)
    ]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == expected_tokens([256, *b"hello"], 30)
    assert "".join(chunk.text for chunk in chunks) == bytes(tokens).decode()


async def test_speculation_yields_several_tokens_per_message_and_the_same_ones(
    client: drafthouse.AsyncClient,
) -> None:
    drafted = [c async for c in client.generate("x", temperature=0, max_output_tokens=40)]
    plain = [
        c
        async for c in client.generate("x", temperature=0, max_output_tokens=40, speculation="off")
    ]
    assert [t for c in drafted for t in c.token_ids] == [t for c in plain for t in c.token_ids]
    assert max(len(chunk.token_ids) for chunk in drafted) > 1
    assert len(drafted) < 40


async def test_result_counts_tokens_time_and_speculation(client: drafthouse.AsyncClient) -> None:
    result = await client.generate("hello", temperature=0, max_output_tokens=40)
    assert result.usage == drafthouse.Usage(prompt_tokens=6, output_tokens=40)
    assert result.finish_reason is drafthouse.FinishReason.LENGTH
    timings = result.timings
    assert 0 <= timings.queue_s <= timings.first_token_s
    assert timings.first_token_s == pytest.approx(timings.queue_s + timings.prefill_s)
    assert timings.decode_s > 0
    speculation = result.speculation
    assert speculation.mode is drafthouse.SpeculationMode.MTP
    assert 0 < speculation.n_accepted < speculation.n_drafted
    assert sum(speculation.n_accepted_by_position) == speculation.n_accepted
    assert 0 < speculation.n_drafts <= speculation.n_steps < 40


async def test_speculation_off_drafts_nothing(client: drafthouse.AsyncClient) -> None:
    for options in ({"speculation": "off"}, {"max_draft_tokens": 0}):
        result = await client.generate("x", max_output_tokens=5, **options)
        assert result.speculation.mode is drafthouse.SpeculationMode.OFF
        assert result.speculation.n_drafted == 0
        assert result.speculation.n_steps == 5


async def test_request_fixes_the_draft_length(client: drafthouse.AsyncClient) -> None:
    result = await client.generate("x", max_output_tokens=30, max_draft_tokens=1)
    assert len(result.speculation.n_accepted_by_position) == 1


async def test_end_token_stops_and_has_no_text(start_server: ServerFactory) -> None:
    server = await start_server(FakeEngine(eog_period=5))
    async with drafthouse.AsyncClient(server.target) as client:
        result = await client.generate("x", temperature=0)
        going_on = await client.generate(
            "x", temperature=0, ignore_end_token=True, max_output_tokens=50
        )
    assert result.finish_reason is drafthouse.FinishReason.STOP
    assert result.token_ids[-1] == 257
    assert result.text == bytes(result.token_ids[:-1]).decode()
    assert result.usage.output_tokens == len(result.token_ids)
    assert 257 not in going_on.token_ids
    assert len(going_on.token_ids) == 50


async def test_no_limit_runs_to_the_end_of_the_context(client: drafthouse.AsyncClient) -> None:
    result = await client.generate([65] * 1000)
    assert result.finish_reason is drafthouse.FinishReason.LENGTH
    assert result.usage == drafthouse.Usage(1000, 24)


async def test_stop_text_ends_the_text_before_it(client: drafthouse.AsyncClient) -> None:
    whole = (await client.generate("x", temperature=0, max_output_tokens=60)).text
    stop = whole[20:23]
    n = whole.index(stop)
    stream = client.generate("x", temperature=0, max_output_tokens=60, stop=[stop, "\0never"])
    text = "".join([chunk.text async for chunk in stream])
    result = await stream
    assert text == result.text == whole[:n]
    assert result.stop_sequence == stop
    assert result.finish_reason is drafthouse.FinishReason.STOP
    assert len(result.token_ids) == result.usage.output_tokens == n + len(stop)


async def test_stop_text_frees_the_slot(
    client: drafthouse.AsyncClient, server: Server, eventually: Eventually
) -> None:
    whole = (await client.generate("x", temperature=0, max_output_tokens=20)).text
    await client.generate("x", temperature=0, stop=whole[10:12])
    await eventually(lambda: server.loop.statistics().n_running == 0)
    assert server.loop.statistics().n_requests["stop"] == 1


async def test_held_back_text_comes_when_no_stop_follows(client: drafthouse.AsyncClient) -> None:
    whole = (await client.generate("x", temperature=0, max_output_tokens=20)).text
    result = await client.generate(
        "x", temperature=0, max_output_tokens=20, stop=whole[-2:] + "never"
    )
    assert result.text == whole
    assert result.stop_sequence == ""


class HeldEngine(GatedEngine):
    """Yields a token a step; the step after so many of them waits until it is released.

    Args:
        n_tokens: So many.
        rendered: Bytes of tokens that are to be others than the model's.
    """

    def __init__(self, n_tokens: int, rendered: Mapping[int, bytes] | None = None) -> None:
        super().__init__()
        self.n_left = n_tokens
        self._rendered = rendered or {}

    def step(self, plan: StepPlan) -> StepResult:
        self.interrupt()  # no run of steps
        result = super().step(plan)
        if self.n_left > 0:
            self.n_left -= sum(len(entry.tokens) for entry in result.entries)
            if not self.n_left:
                self.hold()
        return result

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        return self._rendered.get(token) or super().token_bytes(token, special=special)


WHOLE = expected_tokens([256, *b"x"], 10)
N_STOP = next(n for n in range(5, 10) if WHOLE[n - 1] not in WHOLE[: n - 1])
STOP = chr(WHOLE[N_STOP - 1])
"""The last of so many tokens, and of none before."""


def greedy(*stops: str) -> generation_pb2.GenerateRequest:
    """Asks for what `WHOLE` is the start of."""
    return generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="x"),
        max_output_tokens=100,
        sampling=generation_pb2.SamplingOptions(temperature=0),
        speculation=generation_pb2.SpeculationOptions(max_draft_tokens=0),
        stop=generation_pb2.StopOptions(sequences=stops),
    )


@dataclasses.dataclass
class Read:
    """What a client has read of one stream."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    result: generation_pb2.GenerationResult | None = None
    status: str = ""
    usage: generation_pb2.Usage | None = None


async def read(call: Any, found: Read, n_tokens: int = 1000) -> Read:
    """Reads a stream until it has so many tokens, or to its end."""
    while len(found.token_ids) < n_tokens:
        try:
            message = await call.read()
        except grpc.aio.AioRpcError:
            message = grpc.aio.EOF
        if message is grpc.aio.EOF:
            trailers = dict(tuple(await call.trailing_metadata()))
            found.status = (await call.code()).name
            found.usage = generation_pb2.Usage.FromString(trailers["drafthouse-usage-bin"])
            break
        found.text += message.chunk.text
        found.token_ids += message.chunk.token_ids
        if message.HasField("result"):
            found.result = message.result
    return found


def finished(found: Read) -> generation_pb2.GenerationResult:
    """Returns the result of a stream that `STOP` has ended, like that of any such stream."""
    assert found.status == "OK"
    assert found.text + STOP == bytes(WHOLE[:N_STOP]).decode()
    assert found.token_ids == WHOLE[:N_STOP]
    assert found.result is not None
    assert found.result.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert found.result.stop_sequence == STOP
    assert found.result.usage == found.usage
    assert found.result.usage.output_tokens == N_STOP
    return found.result


def let_end(server: Server) -> None:
    """Ends the thread of a loop that was abandoned, so that this process can end."""
    if server.loop.is_abandoned:
        server.loop._thread.stop()


ENDS: dict[str, Callable[[Server, HeldEngine], object]] = {
    "step-lost": lambda _, engine: engine.inject(RuntimeError("boom")),
    "decode-failed": lambda _, engine: engine.inject(SequenceStatus.DECODE_FAILED),
    "no-token-allowed": lambda _, engine: engine.inject(SequenceStatus.NO_TOKEN_ALLOWED),
    "step-hung": lambda server, _: server.loop.abandon(),
    "tenant-deleted": lambda server, _: server.loop.forget_tenant("default"),
}
"""What may become of a sequence while a step is in flight."""


@pytest.mark.parametrize("has_journal", [False, True])
@pytest.mark.parametrize("end", ENDS)
async def test_who_has_its_stop_text_is_finished_whatever_comes_after(
    start_server: ServerFactory, tmp_path: Path, end: str, has_journal: bool
) -> None:
    """The step after it has begun when the event loop sees the stop text."""
    engine = HeldEngine(N_STOP)
    server = await start_server(engine, usage_journal=str(tmp_path) if has_journal else "")
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(greedy(STOP))
        found = await read(call, Read(), N_STOP)
        ENDS[end](server, engine)
        engine.release()
        await read(call, found)
    let_end(server)
    result = finished(found)
    assert result.usage.prompt_tokens == 2
    assert result.speculation.step_count >= N_STOP
    assert result.timings.decode_seconds > 0
    assert server.loop.statistics().n_output_tokens == N_STOP
    if has_journal:
        [record] = list_all(tmp_path, UsageQuery())
        assert (record.outcome, record.n_output) == ("stop", N_STOP)
        assert record.decode_s == result.timings.decode_seconds


async def test_a_stop_text_is_complete_in_the_last_step_before_a_drain_ends_it(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    """The error comes together with the token that completes the stop text."""
    engine = HeldEngine(N_STOP - 1)
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(greedy(STOP))
        found = await read(call, Read(), N_STOP - 1)
        drain = asyncio.create_task(server.loop.drain(0.0))
        await eventually(lambda: server.loop._is_ending)
        engine.release()
        await read(call, found)
        await drain
    finished(found)


async def test_a_deadline_that_passes_in_the_step_after_a_stop_text_comes_too_late(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HeldEngine(N_STOP)
    defaults = ServiceContext.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(
        defaults,
        "clock",
        lambda: time.monotonic() + (0.0 if engine.n_left else 1000.0),
    )
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        found = await read(stub.Generate(greedy(STOP), timeout=100), Read())
        assert server.loop.statistics().n_running == 1, "the step is in flight"
        engine.release()
    finished(found)


@pytest.mark.parametrize("end", ENDS)
async def test_text_that_was_held_back_comes_before_an_error(
    start_server: ServerFactory, end: str
) -> None:
    engine = HeldEngine(N_STOP)
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(greedy(STOP + "\0never"))
        found = await read(call, Read(), N_STOP)
        assert found.text + STOP == bytes(WHOLE[:N_STOP]).decode(), "it is held back"
        ENDS[end](server, engine)
        engine.release()
        await read(call, found)
    let_end(server)
    assert found.status in ("INTERNAL", "INVALID_ARGUMENT", "UNAUTHENTICATED")
    assert found.text == bytes(found.token_ids).decode()
    assert found.usage is not None
    assert found.usage.output_tokens == len(found.token_ids) >= N_STOP


@pytest.mark.parametrize("stops", [(), ("\ufffd",)])
async def test_a_character_that_an_error_cuts_off_is_replaced_and_stops_nothing(
    start_server: ServerFactory, stops: tuple[str, ...]
) -> None:
    engine = HeldEngine(N_STOP, {WHOLE[N_STOP - 1]: "€".encode()[:2]})
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(greedy(*stops))
        found = await read(call, Read(), N_STOP)
        engine.inject(SequenceStatus.DECODE_FAILED)
        engine.release()
        await read(call, found)
    assert found.status == "INTERNAL"
    assert found.text == bytes(WHOLE[: N_STOP - 1]).decode() + "\ufffd"


async def test_stop_token_ends_the_text_before_it(client: drafthouse.AsyncClient) -> None:
    whole = await client.generate("x", temperature=0, max_output_tokens=60)
    stop = whole.token_ids[25]
    n = whole.token_ids.index(stop)
    result = await client.generate("x", temperature=0, max_output_tokens=60, stop_token_ids=[stop])
    assert result.token_ids == whole.token_ids[: n + 1]
    assert result.text == whole.text[:n]
    assert result.finish_reason is drafthouse.FinishReason.STOP


async def test_progress_is_told_before_the_first_chunk_if_asked_for(
    start_server: ServerFactory,
) -> None:
    server = await start_server(FakeEngine(step_s=0.02))
    prompt = [ord("x")] * 400  # several steps of 64 tokens
    async with drafthouse.AsyncClient(server.target) as client:
        stream = client.generate(prompt, temperature=0, max_output_tokens=5, progress=True)
        chunks = [chunk async for chunk in stream]
        result = await stream.result()
        plain = [c async for c in client.generate(prompt, temperature=0, max_output_tokens=5)]
    told = [chunk.progress for chunk in chunks if chunk.progress is not None]
    n_computed = [progress.computed_tokens for progress in told]
    assert n_computed == sorted(set(n_computed))
    assert len(told) >= 2
    assert told[-1] == drafthouse.PromptProgress(computed_tokens=400, prompt_tokens=400)
    assert [chunk.progress is None for chunk in chunks].index(True) == len(told)
    assert not any(chunk.token_ids for chunk in chunks[: len(told)])
    assert all(chunk.progress is None for chunk in plain)
    assert result.token_ids == tuple(t for chunk in plain for t in chunk.token_ids)
    with drafthouse.Client(server.target) as blocking:
        chunks_of = blocking.generate(prompt, max_output_tokens=1, progress=True)
        first = await asyncio.to_thread(lambda: next(iter(chunks_of)).progress)
    assert first is not None
    assert 0 < first.computed_tokens <= first.prompt_tokens == 400


async def test_log_probabilities_belong_to_their_tokens(client: drafthouse.AsyncClient) -> None:
    stream = client.generate("x", max_output_tokens=30, log_probabilities=True)
    async for chunk in stream:
        assert len(chunk.log_probabilities) == len(chunk.token_ids)
        for token, value in zip(chunk.token_ids, chunk.log_probabilities, strict=True):
            assert value == pytest.approx(-token / 1000, rel=1e-5)
    assert (await client.generate("x", max_output_tokens=3)).log_probabilities == ()


async def test_seed_repeats_a_sampled_output(client: drafthouse.AsyncClient) -> None:
    one, same, other = [
        (await client.generate("x", temperature=1, seed=seed, max_output_tokens=20)).token_ids
        for seed in (7, 7, 8)
    ]
    assert one == same != other


async def test_chat_goes_through_the_models_template(client: drafthouse.AsyncClient) -> None:
    messages: list[drafthouse.ChatMessage | Mapping[str, str]] = [
        drafthouse.ChatMessage("user", "hi"),
        {"role": "assistant", "content": "yo"},
    ]
    count = await client.count_tokens(messages)
    text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in ("user\nhi", "assistant\nyo"))
    text += "<|im_start|>assistant\n"
    tokens = await client.tokenize(text, add_special=True, parse_special=True)
    assert count.prompt_tokens == len(tokens)
    result = await client.generate(messages, temperature=0, max_output_tokens=10)
    assert list(result.token_ids) == expected_tokens(tokens, 10)


async def test_control_tokens_written_in_text_are_text(client: drafthouse.AsyncClient) -> None:
    count = await client.count_tokens("<|im_end|>")
    assert count == drafthouse.TokenCount(1 + len("<|im_end|>"), 1024)


async def test_tokenize_and_detokenize(client: drafthouse.AsyncClient) -> None:
    assert await client.tokenize("ab") == [97, 98]
    assert await client.tokenize("ab", add_special=True) == [256, 97, 98]
    assert await client.tokenize("<|eos|>", parse_special=True) == [257]
    assert await client.tokenize("") == []
    assert await client.detokenize([97, 257, 98]) == "ab"
    assert await client.detokenize([97, 257], keep_special=True) == "a<|eos|>"
    assert await client.detokenize([0xC3, 97]) == "�a"


async def test_models_are_described(client: drafthouse.AsyncClient) -> None:
    model = await client.get_model()
    assert model == await client.get_model("fake")
    assert await client.list_models() == [model]
    assert (model.name, model.context_tokens, model.slot_count) == ("fake", 1024, 4)
    assert model.speculation_mode is drafthouse.SpeculationMode.MTP
    assert (model.max_draft_tokens, model.default_draft_tokens) == (4, 3)
    assert (model.vocabulary_size, model.end_token_id) == (260, 257)


async def test_models_that_a_tenant_may_not_use_are_not_listed(start_server: ServerFactory) -> None:
    tenants = TenantRegistry({"k": Tenant("acme", models=frozenset({"other"}))})
    server = await start_server(tenants=tenants)
    async with drafthouse.AsyncClient(server.target, api_key="k") as client:
        assert await client.list_models() == []


async def test_list_of_models_has_pages(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        page = await stub.ListModels(model_pb2.ListModelsRequest(page_size=1))
        assert [model.name for model in page.models] == ["fake"]
        assert page.next_page_token == ""


async def test_many_streams_share_the_slots(client: drafthouse.AsyncClient) -> None:
    prompts = [[65 + i] * (3 + 7 * i) for i in range(16)]
    results = await asyncio.gather(
        *(client.generate(prompt, temperature=0, max_output_tokens=25) for prompt in prompts)
    )
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == expected_tokens(prompt, 25)


async def test_request_ids_are_the_servers_and_differ_whatever_the_client_asks_for(
    client: drafthouse.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> None:
    caplog.set_level(logging.INFO, "drafthouse_server.rpc.interceptors")
    # The third is one of another client: the SDK refuses it.
    monkeypatch.setattr(_transport, "_REQUEST_ID", re.compile(".*"))
    asked = ("job-7.a_b", "job-7.a_b", "a b" * 40)
    ids = [
        (await client.generate("x", max_output_tokens=1, request_id=mine)).request_id
        for mine in asked
    ]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"req_[0-9a-v]{26}", found) for found in ids)
    await eventually(lambda: len(logged(caplog)) >= 3)
    lines = logged(caplog)
    for line, found, told in zip(lines, ids, ("job-7.a_b", "job-7.a_b", "-"), strict=True):
        assert f" request_id={found} client_request_id={told} " in line


async def test_last_message_is_the_result_and_the_only_one(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            prompt=generation_pb2.Prompt(text="x"), max_output_tokens=9
        )
        kinds = [message.WhichOneof("event") async for message in stub.Generate(request)]
    assert set(kinds[:-1]) == {"chunk"}
    assert kinds[-1] == "result"


class SlowContext:
    """A reader who takes one message and then nothing until it is told to."""

    def __init__(self) -> None:
        self.messages: list[generation_pb2.GenerateResponse] = []
        self.may_read = asyncio.Event()

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        self.trailers = metadata

    async def send_initial_metadata(self, metadata: object) -> None:
        self.headers = metadata

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        self.messages.append(message)
        await self.may_read.wait()


async def test_slow_reader_holds_no_slot_and_gets_the_rest_in_one_message(
    eventually: Eventually,
) -> None:
    engine = FakeEngine(step_s=0.001)
    loop = StepLoop(engine, Scheduler(engine.limits, FixedDraft(3), cost=UnknownCost()))
    loop.start()
    texts = TextWorkers(engine.make_text_worker)
    await texts.open()
    shared = ServiceContext(
        loop,
        texts,
        n_draft_default=3,
        current_call=lambda: Call("", "id", 0.0, tenant=Tenant("t")),
    )
    context: Any = SlowContext()
    request = generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="x"), max_output_tokens=200
    )
    handler = asyncio.create_task(GenerationService(shared).Generate(request, context))
    await eventually(lambda: bool(context.messages) and loop.admission.n_active == 0)
    assert loop.statistics().n_running == 0
    assert len(context.messages) == 1
    context.may_read.set()
    await handler
    assert loop.statistics().n_requests == {"length": 1}
    await texts.close()
    await loop.close()
    first, second, result = context.messages
    assert len(first.chunk.token_ids) + len(second.chunk.token_ids) == 200
    assert result.result.usage.output_tokens == 200


async def test_waiting_requests_run_when_slots_are_free(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine)
    async with drafthouse.AsyncClient(server.target) as client:
        gated_engine.hold()
        streams = [client.generate("x", max_output_tokens=3) for _ in range(6)]
        await eventually(lambda: server.loop.statistics().n_waiting >= 2)
        gated_engine.release()
        results = [await stream for stream in streams]
    assert all(result.usage.output_tokens == 3 for result in results)


async def test_a_tenants_earlier_answers_are_drafts_for_it_and_for_nobody_else(
    start_server: ServerFactory,
) -> None:
    server = await start_server(
        FakeEngine(acceptance=[0]),
        prompt_lookup=True,
        prompt_lookup_pool=1000,
        api_keys=("acme:one", "globex:two"),
    )

    async def ask(key: str) -> tuple[list[int], int]:
        """Returns the tokens, and how many of them were accepted drafts."""
        async with drafthouse.AsyncClient(server.target, api_key=key, retry=None) as client:
            result = await client.generate("hello", temperature=0, max_output_tokens=60)
        assert result.speculation is not None
        return list(result.token_ids), result.speculation.n_accepted

    tokens, n_accepted = await ask("one")
    assert n_accepted == 0
    assert await ask("two") == (tokens, 0)
    again, n_accepted = await ask("one")
    assert again == tokens
    assert n_accepted > 20
    statistics = server.loop.statistics()
    assert statistics.by_source["ngram"].n_accepted == n_accepted == statistics.n_accepted
    assert statistics.by_source["drafter"].n_drafts > 0
    assert 0 < statistics.mean_n_draft <= 3
