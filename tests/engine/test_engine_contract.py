"""What every engine must do, shown on the fake one and on the real one with the demo models."""

from __future__ import annotations

import dataclasses
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
from tests.support import built
from tests.support.block_draft import block_draft
from tests.support.gguf_copy import copied
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.config import Config
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import ConfigError, EngineError, InvalidRequest, ModelLoadError
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import (
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    SequenceState,
)
from drafthouse_server.serving.requests import KNOBS, Knob
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    Start,
    StepPlan,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
GREEDY = SamplingOptions(temperature=0, logprobs=True)

TIE_TOLERANCE = 0.02
"""Nats. Batches of other widths round differently; tokens nearer than this may change places."""

TEXTS = (
    "def parse(",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "    try:\n        return int(value)\n    except ValueError:\n",
    "# Returns the sum of all even numbers in the list.\n" * 6,
    "x",
)

ENGINES = {
    "dense-none": ("tiny-mimo2-f16.gguf", "none", ""),
    "dense-mtp": ("tiny-mimo2-f16.gguf", "mtp", ""),
    "dense-eagle3": ("tiny-mimo2-f16.gguf", "eagle3", "tiny-mimo2-eagle3-f16.gguf"),
    "dense-simple": ("tiny-mimo2-f16.gguf", "simple", "tiny-draft-f16.gguf"),
    "hybrid-mtp": ("tiny-qwen35-f16.gguf", "mtp", ""),
    "hybrid-eagle3": ("tiny-qwen35-f16.gguf", "eagle3", "tiny-qwen35-eagle3-f16.gguf"),
    "hybrid-simple": ("tiny-qwen35-f16.gguf", "simple", "tiny-draft-f16.gguf"),
}

SMALLEST_FLOAT = struct.unpack("f", (1).to_bytes(4, sys.byteorder))[0]
"""Above zero, in single precision."""

needs_extension = built.needs_extension()


def single(number: float) -> float:
    """The nearest number in single precision."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


class CountingEngine(Engine, Protocol):
    """An engine that tells how many KV cells are in use."""

    @property
    def n_cells_used(self) -> int: ...


def config(model: str, draft_type: str, draft_model: str, threads: int = 1) -> Config:
    return Config(
        model=str(MODELS / model),
        draft_type=draft_type,
        model_draft=str(MODELS / draft_model) if draft_model else "",
        parallel=4,
        max_model_len=512,
        batch_size=96,
        ubatch_size=96,
        threads=threads,
    )


def make_engine(name: str) -> CountingEngine:
    if name == "fake":
        limits = EngineLimits("mtp", 4, 2048, 512, 96, 96, 4, 20)
        return FakeEngine(limits, eog_period=97)
    return LlamaEngine.load(config(*ENGINES[name]))


@pytest.fixture(
    scope="module", params=["fake", *(pytest.param(n, marks=needs_extension) for n in ENGINES)]
)
def engine(request: pytest.FixtureRequest) -> Iterator[CountingEngine]:
    engine = make_engine(request.param)
    yield engine
    engine.close()


def test_a_draft_state_that_is_turned_off_costs_nothing_and_changes_nothing(
    engine: CountingEngine,
) -> None:
    prompt = engine.tokenize("Once upon a time", add_special=True, parse_special=False)
    outputs = []
    for has_drafts_off in (False, True):
        start = Start(0, engine.make_sampler(GREEDY))
        drafts_off = [0] if has_drafts_off else []
        plan = StepPlan([PlanEntry(0, 0, prompt, 0, True)], [start], drafts_off=drafts_off)
        entry = engine.step(plan).entries[0]
        output = list(entry.tokens)
        for _ in range(6):
            n_draft = min(2, engine.limits.n_draft_max)
            plan = StepPlan([PlanEntry(0, entry.n_past, output[-1:], n_draft, True)])
            result = engine.step(plan)
            entry = result.entries[0]
            output += entry.tokens
            if has_drafts_off:
                assert entry.is_draft_cold
                assert entry.n_drafted == 0
        engine.step(StepPlan(frees=[0]))
        outputs.append(output)
    assert outputs[0][:7] == outputs[1]


def test_drafts_are_turned_off_and_turned_on_again_beside_others_and_change_nothing(
    engine: CountingEngine,
) -> None:
    """One is turned off, then all, then both are turned on again, in any order: same tokens."""
    n_most = min(2, engine.limits.n_draft_max)
    if not n_most:
        pytest.skip("an engine without drafts has nothing to turn off")
    texts = ["Once upon a time", "def parse(self"]
    prompts = [engine.tokenize(t, add_special=True, parse_special=False) for t in texts]
    # Step: slots that are turned off, and turned on.
    moves: dict[int, tuple[list[int], list[int]]] = {
        2: ([0], []),
        5: ([1], []),
        8: ([], [0]),
        11: ([], [0, 1]),
        14: ([0, 1], []),
        15: ([], [1]),
        18: ([], [0]),
    }
    outputs = []
    for has_moves in (False, True):
        starts = [Start(i, engine.make_sampler(GREEDY)) for i in range(2)]
        entries = [PlanEntry(i, 0, prompt, 0, True) for i, prompt in enumerate(prompts)]
        result = engine.step(StepPlan(entries, starts))
        streams = [list(entry.tokens) for entry in result.entries]
        is_cold = [False, False]
        n_drafted_late = 0
        for i in range(30):
            drafts_off, drafts_on = moves.get(i, ([], [])) if has_moves else ([], [])
            entries = [
                PlanEntry(entry.seq_id, entry.n_past, streams[entry.seq_id][-1:], n_most, True)
                for entry in result.entries
            ]
            before = list(is_cold)
            result = engine.step(StepPlan(entries, drafts_off=drafts_off, drafts_on=drafts_on))
            for seq_id in drafts_off:
                before[seq_id] = is_cold[seq_id] = True
            for seq_id in drafts_on:
                is_cold[seq_id] = False
            for entry in result.entries:
                assert entry.is_draft_cold == is_cold[entry.seq_id], (i, entry)
                assert not (before[entry.seq_id] and entry.n_drafted), "it was not fed"
                n_drafted_late += entry.n_drafted if i > 20 else 0
                streams[entry.seq_id] += entry.tokens
        assert n_drafted_late > 0, "drafts go on"
        engine.step(StepPlan(frees=[0, 1]))
        outputs.append([stream[:30] for stream in streams])
    assert outputs[0] == outputs[1]


def test_a_run_is_its_steps_and_an_interrupt_ends_it(engine: CountingEngine) -> None:
    texts = ["Once upon a time", "def parse(self"]
    prompts = [engine.tokenize(t, add_special=True, parse_special=False) for t in texts]
    outputs = []
    for n_steps in (1, 4):
        starts = [Start(i, engine.make_sampler(GREEDY)) for i in range(2)]
        entries = [PlanEntry(i, 0, prompt, 0, True) for i, prompt in enumerate(prompts)]
        result = engine.step(StepPlan(entries, starts))
        streams = [list(entry.tokens) for entry in result.entries]
        n_run = 0
        while n_run < 12:
            entries = [
                PlanEntry(entry.seq_id, entry.n_past, streams[entry.seq_id][-1:], 0, True)
                for entry in result.entries
            ]
            is_interrupted = n_run == 4
            if is_interrupted:
                engine.interrupt()
            result = engine.step(StepPlan(entries, n_steps=n_steps))
            assert result.n_steps == (1 if is_interrupted else n_steps)
            assert result.n_batch_tokens == 2 * result.n_steps
            n_run += result.n_steps
            for entry in result.entries:
                assert len(entry.tokens) == result.n_steps
                streams[entry.seq_id] += entry.tokens
        n_draft = min(1, engine.limits.n_draft_max)
        if n_draft:
            entries = [
                PlanEntry(entry.seq_id, entry.n_past, streams[entry.seq_id][-1:], n_draft, True)
                for entry in result.entries
            ]
            with pytest.raises(EngineError, match="BAD_PLAN"):
                engine.step(StepPlan(entries, n_steps=2))
        engine.step(StepPlan(frees=[0, 1]))
        outputs.append([stream[:13] for stream in streams])
    assert outputs[0] == outputs[1]


def test_given_drafts_change_nothing_but_the_number_of_steps(engine: CountingEngine) -> None:
    """Right ones, wrong ones and empty ones, after the drafter has drafted for the slot."""
    n_most = engine.limits.n_draft_max
    if not n_most:
        pytest.skip("it has room for no draft")
    prompt = engine.tokenize("Once upon a time", add_special=True, parse_special=False)
    end = engine.card.token_eos
    expected: list[int] = []
    outcomes = []
    for n_right in (None, n_most, 1, 0):
        plan = StepPlan([PlanEntry(0, 0, prompt, 0, True)], [Start(0, engine.make_sampler(GREEDY))])
        entry = engine.step(plan).entries[0]
        output = list(entry.tokens)
        while len(output) < 12:
            given: list[int] = []
            if n_right is not None:
                given = expected[len(output) : len(output) + n_right]
                given += [(expected[len(output) + n_right] + 1) % 255][: n_most - n_right]
            plan = StepPlan([PlanEntry(0, entry.n_past, output[-1:], n_most, True, given)])
            entry = engine.step(plan).entries[0]
            output += entry.tokens
            if given:
                assert entry.is_external
                outcomes.append((n_right, entry.n_drafted, entry.n_accepted))
        if n_right is None:
            assert not entry.is_external
            expected = output + [1] * n_most
            plan = StepPlan([PlanEntry(0, entry.n_past, output[-1:], n_most, True, [end])])
            assert not engine.step(plan).entries[0].is_external
        assert_tokens(engine, prompt, output[:12], expected[:12])
        engine.step(StepPlan(frees=[0]))
    assert (n_most, n_most, n_most) in outcomes
    assert (1, 2, 1) in outcomes
    assert (0, 1, 0) in outcomes


def make(
    engine: Engine, text: str, n_output_max: int = 40, options: SamplingOptions = GREEDY
) -> Sequence:
    prompt = engine.tokenize(text, add_special=True, parse_special=False)
    return Sequence(Request(text, prompt, n_output_max=n_output_max), engine.make_sampler(options))


def run(
    engine: CountingEngine,
    sequences: list[Sequence],
    n_draft: int,
    cancel: dict[int, Sequence] | None = None,
    ngrams: NgramDrafter | None = None,
) -> dict[Sequence, list[float]]:
    """Runs all to their ends and returns their log-probabilities; cancels some before a step."""
    scheduler = Scheduler(engine.limits, FixedDraft(n_draft), cost=UnknownCost(), ngrams=ngrams)
    logprobs: dict[Sequence, list[float]] = {sequence: [] for sequence in sequences}
    for sequence in sequences:
        scheduler.submit(sequence)
    for n_step in range(1000):
        if cancel and n_step in cancel:
            scheduler.mark(cancel[n_step], FinishReason.CANCELLED)
        scheduler.reap(0.0)
        plan = scheduler.plan(0.0)
        if plan.is_empty:
            break
        result = engine.step(plan)
        slots = {entry.seq_id: entry for entry in result.entries if entry.tokens}
        for sequence in scheduler.sequences():
            if sequence.seq_id in slots:
                logprobs[sequence] += slots[sequence.seq_id].logprobs
        scheduler.commit(result, 0.0)
    assert all(sequence.state is SequenceState.FINISHED for sequence in sequences)
    assert engine.n_cells_used == 0
    return {s: values[: s.n_output] for s, values in logprobs.items()}


def assert_same_or_tied(engine: CountingEngine, one: Sequence, other: Sequence) -> None:
    """Asserts that two greedy outputs are equal, up to where two tokens demonstrably tie."""
    assert_tokens(engine, list(one.request.prompt), one.output, other.output)


def assert_tokens(
    engine: CountingEngine, prompt: list[int], found: list[int], expected: list[int]
) -> None:
    """Asserts that two greedy outputs of a prompt are equal, up to where two tokens tie."""
    pairs = zip(found, expected, strict=False)
    n_same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if n_same is None:
        assert len(found) == len(expected)
        return
    assert not isinstance(engine, FakeEngine), "the fake engine does not round"
    tokens = (found[n_same], expected[n_same])
    values = [logprob_of(engine, [*prompt, *found[:n_same]], token) for token in tokens]
    assert abs(values[0] - values[1]) < TIE_TOLERANCE, f"{tokens} at {n_same}: {values}"


def logprob_of(engine: CountingEngine, prompt: list[int], token: int) -> float:
    """Returns the log-probability of a token after a prompt, by forcing the engine to choose it."""
    options = dataclasses.replace(GREEDY, logit_bias=((token, 1000.0),))
    sequence = Sequence(Request("forced", prompt, n_output_max=1), engine.make_sampler(options))
    logprobs = run(engine, [sequence], 0)[sequence]
    assert sequence.output == [token]
    return logprobs[0]


def alone(engine: CountingEngine) -> list[Sequence]:
    """Returns every text's output without speculation and without company."""
    sequences = [make(engine, text) for text in TEXTS]
    for sequence in sequences:
        run(engine, [sequence], 0)
    return sequences


@pytest.mark.parametrize("n_draft", [0, 1, 4])
def test_greedy_output_is_the_same_alone_in_a_crowd_and_with_drafts(
    engine: CountingEngine, n_draft: int
) -> None:
    crowd = [make(engine, text) for text in TEXTS * 2]
    run(engine, crowd, n_draft)
    for sequence, reference in zip(crowd, alone(engine) * 2, strict=True):
        assert_same_or_tied(engine, sequence, reference)
    if n_draft and engine.limits.n_draft_max:
        assert sum(sequence.tally.n_accepted for sequence in crowd) > 0


QUOTING = (
    TEXTS[2] * 3 + "\n\n# The same again, renamed:\n" + TEXTS[2].replace("Stack", "Pile")[:60],
    "a, b, c, d = 1, 2, 3, 4\n" * 8,
    TEXTS[4] + TEXTS[1],
)
"""Prompts whose continuations repeat them, as edits of code do."""


def test_ngram_drafts_before_the_drafter_change_nothing_and_are_accepted(
    engine: CountingEngine,
) -> None:
    if not engine.limits.n_draft_max:
        pytest.skip("it has room for no draft")
    texts = (*QUOTING, *TEXTS[:3])
    references = [make(engine, text, 60) for text in texts]
    run(engine, references, 0)
    ngrams = NgramDrafter(3, 2000)
    counts = []
    for _ in range(2):  # the second time with what the first has said
        crowd = [make(engine, text, 60) for text in texts]
        with mock.patch.object(ngrams, "observe", wraps=ngrams.observe) as observe:
            run(engine, crowd, 4, ngrams=ngrams)
        for sequence, reference in zip(crowd, references, strict=True):
            assert_same_or_tied(engine, sequence, reference)
        given = [
            entry for _, entry in (c.args for c in observe.call_args_list) if entry.is_external
        ]
        counts.append((sum(e.n_drafted for e in given), sum(e.n_accepted for e in given)))
    # Nothing that the fake engine says repeats itself; what models say does.
    assert counts[0][1] > 20 or isinstance(engine, FakeEngine)
    assert counts[1][1] > 40
    assert counts[1][1] > counts[1][0] / 2


def test_those_who_leave_change_nothing_for_those_who_stay(engine: CountingEngine) -> None:
    crowd = [make(engine, text) for text in TEXTS * 2]
    leaving = {2 + i: sequence for i, sequence in enumerate(crowd[::3])}
    run(engine, crowd, 3, cancel=leaving)
    references = alone(engine) * 2
    for i, (sequence, reference) in enumerate(zip(crowd, references, strict=True)):
        end = sequence.terminal
        assert isinstance(end, FinishEvent)
        if end.reason is not FinishReason.CANCELLED:
            assert_same_or_tied(engine, sequence, reference)
        else:
            assert i % 3 == 0


def test_the_output_is_reported_token_by_token(engine: CountingEngine) -> None:
    sequence = make(engine, TEXTS[1], 30)
    logprobs = run(engine, [sequence], 4)[sequence]
    assert len(logprobs) == sequence.n_output <= 30
    assert all(math.isfinite(value) and value <= 0 for value in logprobs)
    silent = make(engine, TEXTS[1], 30, dataclasses.replace(GREEDY, logprobs=False))
    assert run(engine, [silent], 4)[silent] == []
    assert_same_or_tied(engine, silent, sequence)


def test_the_same_seed_gives_the_same_output(engine: CountingEngine) -> None:
    options = SamplingOptions(temperature=1.0, seed=7)
    sequences = [make(engine, TEXTS[0], 30, options) for _ in range(2)]
    for sequence in sequences:
        run(engine, [sequence], 0)
    assert sequences[0].output == sequences[1].output
    other = make(engine, TEXTS[0], 30, dataclasses.replace(options, seed=8))
    run(engine, [other], 0)
    assert other.output != sequences[0].output


def test_the_end_token_is_never_chosen_when_it_is_ignored(engine: CountingEngine) -> None:
    options = dataclasses.replace(GREEDY, ignore_eos=True)
    sequence = make(engine, TEXTS[3], 150, options)
    run(engine, [sequence], 3)
    assert sequence.n_output == 150
    assert not any(engine.is_eog(token) for token in sequence.output)


def test_a_slot_can_be_filled_to_its_last_cell(engine: CountingEngine) -> None:
    options = dataclasses.replace(GREEDY, ignore_eos=True)
    prompt = make(engine, TEXTS[4] * 20).request.prompt[:480]
    sequence = Sequence(Request("full", prompt), engine.make_sampler(options))
    run(engine, [sequence], 4)
    assert len(sequence.tokens) == engine.limits.n_ctx_seq


def test_wrong_plans_are_refused_and_change_nothing(engine: CountingEngine) -> None:
    plan = StepPlan([PlanEntry(0, 0, [1, 2], 0, True)], [Start(0, engine.make_sampler(GREEDY))])
    entry = engine.step(plan).entries[0]
    last = list(entry.tokens[-1:])
    n_past = entry.n_past
    wrong = [
        PlanEntry(0, n_past + 1, last, 0, True),
        PlanEntry(0, n_past, [], 0, True),
        PlanEntry(0, n_past, last * 2, 0, True),
        PlanEntry(0, n_past, [engine.card.n_vocab], 0, True),
        PlanEntry(0, n_past, last, engine.limits.n_draft_max + 1, True),
        PlanEntry(0, n_past, last, 0, True, [1]),
        PlanEntry(0, n_past, last, min(1, engine.limits.n_draft_max), True, [1, 2]),
        PlanEntry(0, n_past, last, min(1, engine.limits.n_draft_max), True, [-1]),
        PlanEntry(1, 0, [1], 0, True),
        PlanEntry(4, 0, [1], 0, True),
        PlanEntry(-1, 0, [1], 0, True),
    ]
    for bad in wrong:
        with pytest.raises(EngineError):
            engine.step(StepPlan([bad]))
        assert engine.n_cells_used == n_past
    assert engine.step(StepPlan([PlanEntry(0, n_past, last, 0, True)])).entries[0].tokens
    engine.step(StepPlan(frees=[0, 1]))
    assert engine.n_cells_used == 0


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (SamplingOptions(temperature=float("nan")), "temperature"),
        (SamplingOptions(temperature=-0.5), "temperature"),
        (SamplingOptions(grammar='start ::= "a" |'), "grammar"),
    ],
)
def test_wrong_options_name_their_field(
    engine: CountingEngine, options: SamplingOptions, path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.make_sampler(options)
    assert [violation.field for violation in caught.value.violations] == [path]


@pytest.mark.parametrize("knob", KNOBS, ids=[knob.name for knob in KNOBS])
def test_what_a_request_may_ask_for_the_engine_takes(engine: CountingEngine, knob: Knob) -> None:
    """Requests carry single precision: the nearest number to a bound may lie beyond it."""
    rule = knob.rule
    is_whole = "int" in SamplingOptions.__annotations__[knob.name]
    high = rule.high if math.isfinite(rule.high) else 2**31 - 1 if is_whole else 3e38
    ends = [SMALLEST_FLOAT if rule.is_open else rule.low, high]
    taken = [number for number in map(int if is_whole else single, ends) if number in rule]
    assert taken
    for number in taken:
        options: dict[str, Any] = {knob.name: number}
        engine.make_sampler(SamplingOptions(**options))


def test_text_goes_to_tokens_and_back(engine: CountingEngine) -> None:
    text = "def grüße(名前):  # 😀\n\treturn 名前\n"
    tokens = engine.tokenize(text, add_special=False, parse_special=False)
    assert all(0 <= token < engine.card.n_vocab for token in tokens)
    assert b"".join(engine.token_bytes(t, special=False) for t in tokens).decode() == text
    assert engine.tokenize("", add_special=False, parse_special=False) == []


def test_the_end_token_is_an_end_and_shows_only_when_asked(engine: CountingEngine) -> None:
    end = engine.card.token_eos
    assert engine.is_eog(end)
    assert engine.token_bytes(end, special=False) == b""
    assert engine.token_bytes(end, special=True)
    assert not engine.is_eog(engine.tokenize("a", add_special=False, parse_special=False)[0])


@dataclasses.dataclass
class Stream:
    """One sequence, driven through plans by hand."""

    engine: CountingEngine
    seq_id: int
    prompt: list[int]
    output: list[int] = dataclasses.field(default_factory=list)
    n_past: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def plan(self, start: Start | None = None, n_draft: int = 0, n_tokens: int = 96) -> StepPlan:
        """Returns the plan of the next step: what is not computed yet, or the last token."""
        known = [*self.prompt, *self.output]
        n_past = start.n_kept if start else self.n_past
        tokens = known[n_past : n_past + n_tokens]
        is_last = n_past + len(tokens) == len(known)
        k = min(n_draft, self.engine.limits.n_draft_max) if self.output and len(tokens) == 1 else 0
        entry = PlanEntry(self.seq_id, n_past, tokens, k if is_last else 0, is_last)
        return StepPlan([entry], [start] if start else [])

    def commit(self, entry: ResultEntry) -> None:
        assert entry.status is SequenceStatus.OK
        assert entry.seq_id == self.seq_id
        self.n_past = entry.n_past
        self.output += entry.tokens
        self.n_drafted += entry.n_drafted
        self.n_accepted += entry.n_accepted

    def run(self, n_output: int, start: Start | None = None, n_draft: int = 0) -> list[int]:
        """Runs until so many tokens are there, and returns them."""
        while len(self.output) < n_output:
            self.commit(self.engine.step(self.plan(start, n_draft)).entries[0])
            start = None
        return self.output[:n_output]


N_STREAM = 14
"""Tokens that the tests below generate."""

OPEN_ENDED = dataclasses.replace(GREEDY, ignore_eos=True, logprobs=False)
DRAWN = SamplingOptions(temperature=0.9, seed=11, ignore_eos=True, penalty_repeat=1.2)


def ids(engine: Engine, text: str) -> list[int]:
    return engine.tokenize(text, add_special=True, parse_special=False)


def begin(engine: CountingEngine, seq_id: int, prompt: list[int], n_output: int = 5) -> Stream:
    """Returns a sequence in a slot that has begun to generate."""
    stream = Stream(engine, seq_id, prompt)
    stream.run(n_output, Start(seq_id, engine.make_sampler(OPEN_ENDED)))
    return stream


def clear(engine: CountingEngine) -> None:
    engine.step(StepPlan(frees=range(engine.limits.n_seq_max)))
    assert engine.n_cells_used == 0


def cold(engine: CountingEngine, prompt: list[int], options: SamplingOptions) -> list[int]:
    """Returns what a prompt gives in an empty slot without drafts."""
    stream = Stream(engine, 3, prompt)
    stream.run(N_STREAM, Start(3, engine.make_sampler(options)))
    engine.step(StepPlan(frees=[3]))
    return stream.output[:N_STREAM]


SHARED = TEXTS[1] + TEXTS[2]
NEXT = "    def pop(self):\n        return "


@pytest.mark.parametrize("options", [OPEN_ENDED, DRAWN])
@pytest.mark.parametrize("way", ["in place", "copy", "snapshot"])
def test_what_was_computed_for_another_serves_as_a_beginning(
    engine: CountingEngine, way: str, options: SamplingOptions
) -> None:
    prompt = ids(engine, SHARED + NEXT)
    n_kept = len(prompt) - 8
    expected = cold(engine, prompt, options)
    old = begin(engine, 0, prompt[: n_kept + 3])
    sampler = engine.make_sampler(options)
    if way == "in place":
        stream, start = Stream(engine, 0, prompt), Start(0, sampler, n_kept)
    elif way == "copy":
        stream, start = Stream(engine, 2, prompt), Start(2, sampler, n_kept, source=0)
    else:
        snapshot = engine.step(StepPlan(saves=[0], frees=[0])).snapshots[0]
        stream, start = Stream(engine, 1, prompt), Start(1, sampler, n_kept, snapshot=snapshot)
    plan = stream.plan(start)
    result = engine.step(plan)
    stream.commit(result.entries[0])
    if engine.card.is_recurrent:
        assert result.n_kept == {stream.seq_id: 0}
        assert stream.n_past == 0
    else:
        assert not result.n_kept
        assert stream.n_past == len(prompt)
    found = stream.run(N_STREAM, n_draft=3)
    after = old.run(N_STREAM) if way == "copy" else []
    clear(engine)
    if after:  # the source has not noticed
        assert_tokens(engine, old.prompt, after, cold(engine, old.prompt, OPEN_ENDED))
    if options is OPEN_ENDED or isinstance(engine, FakeEngine):  # drafts change what is drawn
        assert_tokens(engine, prompt, found, expected)


@pytest.mark.parametrize("way", ["in place", "snapshot"])
def test_all_that_a_slot_holds_serves_every_target(engine: CountingEngine, way: str) -> None:
    old = begin(engine, 0, ids(engine, SHARED), 6)
    known = [*old.prompt, *old.output]
    prompt = [*known, *ids(engine, NEXT)]
    if way == "in place":
        stream = Stream(engine, 0, prompt)
        start = Start(0, engine.make_sampler(OPEN_ENDED), old.n_past)
    else:
        stream = Stream(engine, 2, prompt)
        snapshot = engine.step(StepPlan(saves=[0])).snapshots[0]
        sampler = engine.make_sampler(OPEN_ENDED)
        start = Start(2, sampler, old.n_past, snapshot=snapshot)
    result = engine.step(stream.plan(start))
    assert not result.n_kept
    assert result.n_batch_tokens == len(prompt) - old.n_past
    stream.commit(result.entries[0])
    found = stream.run(N_STREAM, n_draft=3)
    clear(engine)
    assert_tokens(engine, prompt, found, cold(engine, prompt, OPEN_ENDED))


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("n_piece", [9, 96])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(
    engine: CountingEngine, n_piece: int, is_saved: bool
) -> None:
    prompt = ids(engine, SHARED)
    expected = cold(engine, prompt, OPEN_ENDED)
    stream = begin(engine, 0, prompt)
    result = engine.step(StepPlan(swap_outs=[0], saves=[0] if is_saved else []))
    assert engine.n_cells_used == 0
    begin(engine, 0, ids(engine, TEXTS[5]))  # another in its slot
    n_kept = stream.n_past if is_saved else 0
    snapshot = result.snapshots.get(0)
    stream.seq_id = 1
    start: Start | None = Start(1, result.samplers[0], n_kept, snapshot=snapshot, is_resumed=True)
    n_before = len(stream.output)
    while len(stream.output) == n_before:
        stream.commit(engine.step(stream.plan(start, 3, n_piece)).entries[0])
        start = None
    found = stream.run(N_STREAM, n_draft=3)
    clear(engine)
    assert_tokens(engine, prompt, found, expected)


def test_a_snapshot_s_own_sampler_goes_on(engine: CountingEngine) -> None:
    prompt = ids(engine, SHARED)
    expected = cold(engine, prompt, GREEDY)
    stream = Stream(engine, 0, prompt)
    stream.run(5, Start(0, engine.make_sampler(GREEDY)))
    snapshot = engine.step(StepPlan(saves=[0], swap_outs=[0])).snapshots[0]
    stream.seq_id = 2
    start = Start(2, None, stream.n_past, snapshot=snapshot, is_resumed=True)
    result = engine.step(stream.plan(start, 3))
    assert len(result.entries[0].logprobs) == len(result.entries[0].tokens)
    stream.commit(result.entries[0])
    found = stream.run(N_STREAM, n_draft=3)
    clear(engine)
    assert_tokens(engine, prompt, found, expected)


def test_a_snapshot_for_prefix_reuse_has_no_sampler(engine: CountingEngine) -> None:
    """What is kept for others tells nothing of what its request asked for, and makes nothing."""
    prompt = ids(engine, SHARED)
    stream = Stream(engine, 0, prompt)
    stream.run(5, Start(0, engine.make_sampler(GREEDY)))
    snapshot = engine.step(StepPlan(saves=[0], frees=[0])).snapshots[0]
    lost = Start(2, None, stream.n_past, snapshot=snapshot, is_resumed=True)
    entry = PlanEntry(2, stream.n_past, [stream.output[-1]], 0, True)
    result = engine.step(StepPlan([entry], [lost]))
    assert result.entries[0].status is SequenceStatus.DECODE_FAILED
    assert engine.n_cells_used == 0
    clear(engine)


@pytest.mark.parametrize("snapshot", [b"", b"nonsense" * 100])
def test_foreign_bytes_keep_nothing_and_hurt_nobody(
    engine: CountingEngine, snapshot: bytes
) -> None:
    prompt = ids(engine, SHARED)
    innocent = begin(engine, 0, prompt)
    stream = Stream(engine, 1, prompt)
    start = Start(1, engine.make_sampler(OPEN_ENDED), 4, snapshot=snapshot)
    plan = stream.plan(start, n_tokens=64)
    result = engine.step(StepPlan([*innocent.plan().entries, *plan.entries], plan.starts))
    innocent.commit(result.entries[0])
    assert result.n_kept == {1: 0}
    refused = result.entries[1]
    assert dataclasses.replace(refused, tokens=()) == ResultEntry(1, SequenceStatus.OK, 0)
    assert not refused.tokens
    stream.commit(result.entries[1])
    assert stream.run(N_STREAM) == innocent.run(N_STREAM)
    lost = Start(2, None, 4, snapshot=snapshot, is_resumed=True)
    result = engine.step(StepPlan([PlanEntry(2, 4, [1], 0, True)], [lost]))
    assert result.entries[0].status is SequenceStatus.DECODE_FAILED
    with pytest.raises(EngineError, match="SEQ_IDLE"):
        engine.step(StepPlan(saves=[2]))
    clear(engine)


WRONG_STARTS = {
    "more than it holds": (Start(0, "new", 100), "BAD_PLAN"),
    "more than the source holds": (Start(1, "new", 100, source=0), "BAD_PLAN"),
    "from an empty slot": (Start(1, "new", 1), "BAD_PLAN"),
    "from an idle source": (Start(0, "new", 1, source=1), "SEQ_IDLE"),
    "from no slot": (Start(0, "new", 1, source=4), "BAD_SEQ_ID"),
    "from itself": (Start(0, "new", 1, source=0), "BAD_PLAN"),
    "two ways": (Start(1, "new", 1, source=0, snapshot=b""), "BAD_PLAN"),
    "a source for nothing": (Start(1, "new", 0, source=0), "BAD_PLAN"),
    "below nothing": (Start(0, "new", -1), "BAD_PLAN"),
    "a whole context": (Start(0, "new", 512), "BAD_PLAN"),
    "no slot": (Start(4, "new"), "BAD_SEQ_ID"),
    "no sampler": (Start(0, None), "BAD_PLAN"),
    "no sampler and not resumed": (Start(0, None, 1, snapshot=b""), "BAD_PLAN"),
    "not a sampler": (Start(0, "foreign"), "INVALID_ARGUMENT"),
    "an owned sampler": (Start(1, "owned"), "INVALID_ARGUMENT"),
    "a preempted sampler as new": (Start(1, "preempted"), "BAD_PLAN"),
    "all that is known": (Start(0, "preempted", 5, is_resumed=True), "BAD_PLAN"),
}


def test_wrong_starts_change_nothing(engine: CountingEngine) -> None:
    prompt = ids(engine, SHARED)[:4]
    begin(engine, 2, prompt, 1)
    samplers = {"preempted": engine.step(StepPlan(swap_outs=[2])).samplers[2]}
    samplers |= {"owned": engine.make_sampler(GREEDY), "new": engine.make_sampler(GREEDY)}
    engine.step(StepPlan(starts=[Start(2, samplers["owned"])]))
    stream = begin(engine, 0, prompt)
    for name, (start, status) in WRONG_STARTS.items():
        sampler = samplers.get(str(start.sampler), start.sampler)
        with pytest.raises(EngineError) as caught:
            engine.step(StepPlan(starts=[dataclasses.replace(start, sampler=sampler)], frees=[2]))
        assert caught.value.status == status, name
        assert engine.n_cells_used == stream.n_past, name
    for plan in (
        StepPlan(saves=[1]),
        StepPlan(swap_outs=[1]),
        StepPlan(swap_outs=[2, 2], saves=[0]),
    ):
        with pytest.raises(EngineError, match="SEQ_IDLE"):
            engine.step(plan)
    twice = [Start(1, samplers["new"]), Start(1, engine.make_sampler(GREEDY))]
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(StepPlan(starts=twice))
    shared = [Start(1, samplers["new"]), Start(3, samplers["new"])]
    with pytest.raises(EngineError, match="INVALID_ARGUMENT"):
        engine.step(StepPlan(starts=shared))
    for plan in (
        StepPlan(drafts_off=[1]),
        StepPlan(drafts_on=[1]),
        StepPlan(frees=[0], drafts_off=[0]),
    ):
        with pytest.raises(EngineError, match="SEQ_IDLE"):
            engine.step(plan)
    assert stream.run(N_STREAM) == cold(engine, prompt, OPEN_ENDED)
    clear(engine)


def test_a_plan_that_is_wrong_at_its_end_is_not_begun(engine: CountingEngine) -> None:
    """Its saves, swap_outs, frees and starts are right; one of its entries is not."""
    prompt = ids(engine, SHARED)[:30]
    streams = [begin(engine, seq_id, prompt) for seq_id in (0, 1)]
    lost = begin(engine, 2, prompt[:20])
    snapshot = engine.step(StepPlan(saves=[0])).snapshots[0]
    n_cells = engine.n_cells_used
    right = StepPlan(
        saves=[0],
        swap_outs=[1],
        frees=[2],
        starts=[
            Start(2, engine.make_sampler(GREEDY), streams[0].n_past, snapshot=snapshot),
            Start(3, engine.make_sampler(GREEDY)),
        ],
        drafts_off=[0],
        drafts_on=[2],
    )
    last = streams[0].plan().entries[0]
    kept = PlanEntry(2, streams[0].n_past, streams[0].output[-1:], 0, True)
    vocab = engine.card.n_vocab
    wrong = {
        "tokens that it had not": dataclasses.replace(last, tokens=[last.tokens[0] + 1]),
        "no token": PlanEntry(3, 0, [vocab], 0, True),
        "a start that keeps more": dataclasses.replace(kept, n_past=kept.n_past - 1),
        "preempted": streams[1].plan().entries[0],
        "too many": PlanEntry(3, 0, [1] * (engine.limits.n_batch + 1), 0, True),
    }
    for name, entry in wrong.items():
        others = [other for other in (last, kept) if other.seq_id != entry.seq_id]
        with pytest.raises(EngineError):
            engine.step(dataclasses.replace(right, entries=[*others, entry]))
        assert engine.n_cells_used == n_cells, name
    for stream in (*streams, lost):
        stream.run(len(stream.output) + 1)
    # The samplers of the refused plans are as good as new.
    right = dataclasses.replace(
        right, swap_outs=[], frees=[], saves=[], drafts_off=[], drafts_on=[]
    )
    result = engine.step(
        dataclasses.replace(right, entries=[kept, PlanEntry(3, 0, prompt, 0, True)])
    )
    assert all(entry.tokens for entry in result.entries)
    assert not result.n_kept
    clear(engine)


def test_a_copy_of_what_was_not_kept_begins_empty(engine: CountingEngine) -> None:
    prompt = ids(engine, SHARED)[:30]
    starts = [
        Start(1, engine.make_sampler(OPEN_ENDED), 6, snapshot=b"nonsense" * 100),
        Start(2, engine.make_sampler(OPEN_ENDED), 4, source=1),
    ]
    streams = [Stream(engine, start.seq_id, prompt) for start in starts]
    plans = [stream.plan(start) for stream, start in zip(streams, starts, strict=True)]
    entries = [entry for plan in plans for entry in plan.entries]
    result = engine.step(StepPlan(entries, starts))
    assert result.n_kept == {1: 0, 2: 0}
    for stream, entry in zip(streams, result.entries, strict=True):
        stream.commit(entry)
    assert streams[0].run(5) == streams[1].run(5)
    clear(engine)


OWN, FOREIGN = 2**64 - 1, 17
"""Tags: whose a sequence is."""


def test_nothing_of_another_s_sequence_is_gone_on_from(engine: CountingEngine) -> None:
    """Neither in its slot nor by a copy, a snapshot or a preempted sampler."""
    prompt = ids(engine, SHARED)[:30]
    stream = Stream(engine, 0, prompt)
    stream.run(5, Start(0, engine.make_sampler(OPEN_ENDED), tag=OWN))
    known = [*prompt, *stream.output]
    preempted = Stream(engine, 1, prompt)
    preempted.run(5, Start(1, engine.make_sampler(OPEN_ENDED), tag=OWN))
    assert (preempted.output, preempted.n_past) == (stream.output, stream.n_past)
    result = engine.step(StepPlan(saves=[0, 1], swap_outs=[1]))
    snapshot, sampler, n = result.snapshots[0], result.samplers[1], stream.n_past
    whole = result.snapshots[1]  # of one that is preempted, so with its sampler
    new = engine.make_sampler(OPEN_ENDED)
    ways = {
        "in place": Start(0, new, n),
        "a copy": Start(2, new, n, source=0),
        "a snapshot": Start(2, new, n, snapshot=snapshot),
        "a snapshot's sampler": Start(2, None, n, snapshot=whole, is_resumed=True),
        "a snapshot without one": Start(2, None, n, snapshot=snapshot, is_resumed=True),
        "a preempted sampler": Start(2, sampler, is_resumed=True),
    }
    for name, start in ways.items():
        for tag in (FOREIGN, 0):
            foreign = dataclasses.replace(start, tag=tag)
            entry = PlanEntry(start.seq_id, start.n_kept, known[start.n_kept :], 0, True)
            with pytest.raises(EngineError) as caught:
                engine.step(StepPlan([entry], [foreign]))
            assert caught.value.status == "BAD_PLAN", name
            assert engine.n_cells_used == n, name
    # A start that keeps nothing may take any slot; its own go on.
    empty = Start(1, engine.make_sampler(GREEDY), tag=FOREIGN)
    engine.step(StepPlan([PlanEntry(1, 0, prompt[:5], 0, False)], [empty]))
    copy = Start(2, new, n, source=1, tag=FOREIGN)
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(StepPlan(starts=[copy]))
    resumed = dataclasses.replace(ways["a snapshot's sampler"], tag=OWN)
    back = dataclasses.replace(ways["a preempted sampler"], seq_id=3, tag=OWN)
    result = engine.step(StepPlan(starts=[resumed, back]))
    assert not result.n_kept
    # What came out of a snapshot is still its owner's.
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(StepPlan(starts=[Start(0, new, 1, source=2, tag=FOREIGN)]))
    stream.seq_id = 2
    assert_tokens(engine, prompt, stream.run(N_STREAM), cold_in(engine, 1, prompt))
    clear(engine)


def cold_in(engine: CountingEngine, seq_id: int, prompt: list[int]) -> list[int]:
    """Returns what a prompt gives in a slot that is taken from whoever had it."""
    stream = Stream(engine, seq_id, prompt)
    return stream.run(N_STREAM, Start(seq_id, engine.make_sampler(OPEN_ENDED)))


def test_resumed_sequences_are_computed_as_they_were(engine: CountingEngine) -> None:
    stream = begin(engine, 0, ids(engine, SHARED[:60]))
    sampler = engine.step(StepPlan(swap_outs=[0])).samplers[0]
    engine.step(StepPlan(starts=[Start(0, sampler, is_resumed=True)]))
    known = [*stream.prompt, *stream.output]
    n = len(known)
    wrong = [
        PlanEntry(0, 0, [known[0] + 1, *known[1:3]], 0, False),
        PlanEntry(0, 0, known[:3], 0, True),
        PlanEntry(0, 0, known, 0, False),
        PlanEntry(0, 0, [*known, 1], 0, True),
        PlanEntry(0, 0, known[:1], 1, True),
    ]
    for entry in wrong:
        with pytest.raises(EngineError, match="BAD_PLAN"):
            engine.step(StepPlan([entry]))
    engine.step(StepPlan([PlanEntry(0, 0, known[: n - 1], 0, False)]))
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(StepPlan([PlanEntry(0, n - 1, [known[-1] + 1], 0, True)]))
    result = engine.step(StepPlan([PlanEntry(0, n - 1, known[-1:], 0, True)]))
    assert len(result.entries[0].tokens) == 1
    clear(engine)


class TestLoading:
    """A model that cannot be served is explained in one sentence. The process lives."""

    pytestmark = needs_extension

    def fails(self, model: Path, draft_type: str = "none", draft_model: Path | None = None) -> str:
        wrong = Config(
            model=str(model),
            draft_type=draft_type,
            model_draft=str(draft_model or ""),
            parallel=2,
            max_model_len=128,
        )
        with pytest.raises(ModelLoadError) as caught:
            LlamaEngine.load(wrong).close()
        assert str(caught.value.path) in str(caught.value)
        assert caught.value.advice != "see the log"
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_advice_is_of_use(self, tmp_path: Path) -> None:
        """Not "set draft_type to none" where it is none; and the file at fault is named."""
        diffusion = copied(
            MODELS / "tiny-draft-f16.gguf",
            tmp_path / "dream.gguf",
            arch="dream",
            change=lambda name, tensor: None if "_q_norm" in name or "_k_norm" in name else tensor,
        )
        assert "draft_type" not in self.fails(diffusion)
        told = self.fails(MODELS / "tiny-mimo2-f16.gguf", "simple", diffusion)
        assert "dream.gguf" in told
        assert "set draft_type to none" in told
        told = self.fails(diffusion, "simple", MODELS / "tiny-draft-f16.gguf")
        assert told.startswith(f"cannot load '{diffusion}'")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        assert "check the path" in self.fails(tmp_path / "nowhere.gguf")

    def test_a_text_file(self, tmp_path: Path) -> None:
        file = tmp_path / "letter.gguf"
        file.write_text("Dear model, please answer.\n" * 100)
        assert "GGUF" in self.fails(file)

    @pytest.mark.parametrize("n_bytes", [0, 3, 100, 100_000, 5_000_000])
    def test_a_truncated_file(self, tmp_path: Path, n_bytes: int) -> None:
        file = tmp_path / "cut.gguf"
        file.write_bytes((MODELS / "tiny-mimo2-f16.gguf").read_bytes()[:n_bytes])
        assert "GGUF" in self.fails(file)

    @pytest.mark.parametrize(
        ("model", "draft_model", "found"),
        [
            ("tiny-mimo2-f16", "", "mtp"),
            ("tiny-draft-f16", "", "none"),  # without heads it is served all the same
            ("tiny-mimo2-f16", "tiny-mimo2-eagle3-f16", "eagle3"),
            ("tiny-mimo2-f16", "tiny-draft-f16", "simple"),
            ("tiny-mimo2-f16", "dflash", "dflash"),
            ("tiny-mimo2-f16", "dspark", "dspark"),
        ],
    )
    def test_the_draft_type_that_fits_is_found(
        self, tmp_path: Path, model: str, draft_model: str, found: str
    ) -> None:
        files = {name: str(MODELS / f"{name}.gguf") for name in (model, draft_model)} | {"": ""}
        if draft_model in ("dflash", "dspark"):
            files[draft_model] = str(tmp_path / "draft.gguf")
            block_draft(tmp_path / "draft.gguf", markov_rank=8 if draft_model == "dspark" else 0)
        engine = LlamaEngine.load(
            Config(
                model=files[model], model_draft=files[draft_model], parallel=2, max_model_len=128
            )
        )
        assert engine.limits.draft_type == found
        assert (engine.limits.n_draft_max > 0) == (found != "none")
        engine.close()

    def test_other_errors_are_explained_where_the_draft_type_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import drafthouse_engine

        def fail(*_: object) -> None:
            raise drafthouse_engine.OutOfMemory("no room for the contexts")

        monkeypatch.setattr(drafthouse_engine, "Engine", fail)
        assert "lower parallel" in self.fails(MODELS / "tiny-mimo2-f16.gguf", "auto")

    def test_what_needs_a_drafter_is_refused_where_none_is_found(self) -> None:
        wrong = Config(model=str(MODELS / "tiny-draft-f16.gguf"), prompt_lookup=True)
        with pytest.raises(ConfigError, match="prompt_lookup needs a drafter"):
            LlamaEngine.load(wrong).close()

    def test_mtp_without_heads(self) -> None:
        assert "MTP" in self.fails(MODELS / "tiny-draft-f16.gguf", "mtp")

    def test_an_eagle3_draft_of_another_target(self) -> None:
        message = self.fails(
            MODELS / "tiny-mimo2-f16.gguf", "eagle3", MODELS / "tiny-qwen35-eagle3-f16.gguf"
        )
        assert "draft" in message

    def test_an_ordinary_model_as_eagle3_draft(self) -> None:
        message = self.fails(
            MODELS / "tiny-mimo2-f16.gguf", "eagle3", MODELS / "tiny-draft-f16.gguf"
        )
        assert "EAGLE-3" in message

    def test_progress_reaches_the_end(self) -> None:
        seen: list[tuple[str, float]] = []
        fine = config("tiny-mimo2-f16.gguf", "eagle3", "tiny-mimo2-eagle3-f16.gguf")
        LlamaEngine.load(fine, lambda path, share: seen.append((path, share))).close()
        assert {path for path, _ in seen} == {fine.model, fine.model_draft}
        for path in (fine.model, fine.model_draft):
            shares = [share for name, share in seen if name == path]
            assert shares == sorted(shares)
            assert shares[-1] == 1.0
