"""The fake engine is strict and deterministic: else the tests that stand on it show nothing."""

from __future__ import annotations

import dataclasses

import pytest

from drafthouse_server.errors import EngineError, InvalidRequest
from drafthouse_server.fake import FakeEngine
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    Start,
    StepPlan,
)

GREEDY = SamplingOptions(temperature=0)
LIMITS = EngineLimits("mtp", 2, 60, 40, 16, 16, 4, 6)
PROMPT = list(b"hello")


def begin(engine: FakeEngine, seq_id: int = 0, options: SamplingOptions = GREEDY) -> StepPlan:
    return StepPlan(
        entries=[PlanEntry(seq_id, 0, PROMPT, 0, True)],
        starts=[Start(seq_id, engine.make_sampler(options))],
    )


def run(engine: FakeEngine, plan: StepPlan) -> ResultEntry:
    return engine.step(plan).entries[0]


def generate(
    engine: FakeEngine, n_draft: int, n_tokens: int = 20, options: SamplingOptions = GREEDY
) -> list[int]:
    """Returns the first tokens of a generation."""
    entry = run(engine, begin(engine, options=options))
    tokens = list(entry.tokens)
    while len(tokens) < n_tokens:
        plan = StepPlan([PlanEntry(0, entry.n_past, tokens[-1:], n_draft, True)])
        entry = run(engine, plan)
        tokens += entry.tokens
    return tokens[:n_tokens]


@pytest.mark.parametrize("n_draft", [1, 2, 4])
def test_drafts_change_the_speed_and_not_the_output(n_draft: int) -> None:
    plain, drafted = FakeEngine(LIMITS), FakeEngine(LIMITS)
    assert generate(drafted, n_draft) == generate(plain, 0)
    assert drafted.n_steps < plain.n_steps


def test_the_output_depends_on_every_token_before() -> None:
    engine = FakeEngine(LIMITS)
    tokens = run(engine, begin(engine)).tokens
    other = PlanEntry(1, 0, [PROMPT[0] + 1, *PROMPT[1:]], 0, True)
    starts = [Start(1, engine.make_sampler(GREEDY))]
    assert run(engine, StepPlan([other], starts)).tokens != tokens


def test_seeds_and_nothing_else_change_sampled_output() -> None:
    options = [SamplingOptions(temperature=1, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (generate(FakeEngine(LIMITS), 0, options=option) for option in options)
    assert first == again
    assert first != other


def test_prompts_in_pieces_are_the_same_prompts() -> None:
    whole, pieces = FakeEngine(LIMITS), FakeEngine(LIMITS)
    sampler = pieces.make_sampler(GREEDY)
    first = run(pieces, StepPlan([PlanEntry(0, 0, PROMPT[:2], 0, False)], [Start(0, sampler)]))
    assert (first.tokens, first.n_past) == ((), 2)
    second = run(pieces, StepPlan([PlanEntry(0, 2, PROMPT[2:], 0, True)]))
    assert second.tokens == run(whole, begin(whole)).tokens


def test_end_tokens_end_a_draft() -> None:
    engine = FakeEngine(LIMITS, acceptance=(4,), eog_period=3)
    entry = run(engine, begin(engine))
    while not entry.is_eog:
        entry = run(engine, StepPlan([PlanEntry(0, entry.n_past, entry.tokens[-1:], 4, True)]))
    assert engine.is_eog(entry.tokens[-1])
    assert not any(engine.is_eog(token) for token in entry.tokens[:-1])
    options = dataclasses.replace(GREEDY, ignore_eos=True)
    endless = generate(FakeEngine(LIMITS, eog_period=1), 0, options=options)
    assert not any(engine.is_eog(token) for token in endless)


LAST = 1000
"""Stands for the last emitted token in the table below."""


@pytest.mark.parametrize(
    ("entries", "status"),
    [
        ([PlanEntry(0, 4, [LAST], 0, True)], "BAD_PLAN"),
        ([PlanEntry(0, 6, [LAST], 0, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [], 0, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [3], 0, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [LAST, 3], 0, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [LAST], 0, False)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [LAST], 5, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [LAST], -1, True)], "BAD_PLAN"),
        ([PlanEntry(0, 5, [260], 0, True)], "INVALID_ARGUMENT"),
        ([PlanEntry(2, 0, [1], 0, True)], "BAD_SEQ_ID"),
        ([PlanEntry(-1, 0, [1], 0, True)], "BAD_SEQ_ID"),
        ([PlanEntry(1, 0, [1], 0, True)], "SEQ_IDLE"),
        ([PlanEntry(0, 5, [LAST], 0, True)] * 2, "BAD_PLAN"),
    ],
)
def test_wrong_plans_change_nothing(entries: list[PlanEntry], status: str) -> None:
    engine = FakeEngine(LIMITS)
    last = run(engine, begin(engine)).tokens[-1]
    wrong = [
        dataclasses.replace(e, tokens=[last if t == LAST else t for t in e.tokens]) for e in entries
    ]
    with pytest.raises(EngineError) as caught:
        engine.step(StepPlan(wrong))
    assert caught.value.status == status
    assert engine.n_cells_used == engine.n_past(0) == 5
    assert run(engine, StepPlan([PlanEntry(0, 5, [last], 4, True)])).tokens


@pytest.mark.parametrize(
    ("entries", "limits"),
    [
        ([(0, 17, 0, False)], LIMITS),  # n_batch
        ([(0, 9, 0, False), (1, 8, 0, False)], LIMITS),  # n_batch, together
        ([(0, 1, 1, True)], LIMITS),  # a draft before the first token
        ([(0, 9, 0, False)], dataclasses.replace(LIMITS, n_ctx_seq=8)),
        ([(0, 5, 0, False), (1, 4, 0, False)], dataclasses.replace(LIMITS, n_ctx=8)),
        ([(0, 1, 0, True), (1, 1, 0, True)], dataclasses.replace(LIMITS, n_outputs_max=1)),
    ],
)
def test_capacities_are_checked(
    entries: list[tuple[int, int, int, bool]], limits: EngineLimits
) -> None:
    engine = FakeEngine(limits)
    plan = StepPlan(
        [PlanEntry(seq_id, 0, [1] * n, k, is_output) for seq_id, n, k, is_output in entries],
        [Start(seq_id, engine.make_sampler(GREEDY)) for seq_id, *_ in entries],
    )
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(plan)
    assert engine.n_cells_used == 0


def test_a_slot_is_reusable_in_the_plan_that_frees_it() -> None:
    engine = FakeEngine(LIMITS)
    first = run(engine, begin(engine))
    with pytest.raises(EngineError, match="SEQ_BUSY"):
        engine.step(begin(engine))
    again = run(engine, dataclasses.replace(begin(engine), frees=[0]))
    assert again == first
    engine.step(StepPlan(frees=[0, 1]))
    assert engine.n_cells_used == 0
    assert engine.n_cells_max == 5


def test_cells_given_back_count_as_free_in_the_same_plan() -> None:
    engine = FakeEngine(dataclasses.replace(LIMITS, n_ctx=8))
    engine.step(begin(engine))
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(begin(engine, 1))
    assert engine.step(dataclasses.replace(begin(engine, 1), frees=[0])).entries[0].tokens


def test_faults_hit_the_sequence_that_they_are_meant_for() -> None:
    engine = FakeEngine(LIMITS)
    first = run(engine, begin(engine))
    engine.step(begin(engine, 1))
    engine.inject(SequenceStatus.NO_ROOM, seq_id=0)
    engine.inject(SequenceStatus.DECODE_FAILED, seq_id=1)
    plan = StepPlan([PlanEntry(i, 5, first.tokens[-1:], 0, True) for i in (0, 1)])
    entries = engine.step(plan).entries
    assert [entry.status.value for entry in entries] == ["NO_ROOM", "DECODE_FAILED"]
    assert (engine.n_past(0), engine.n_past(1)) == (5, 0)
    assert run(engine, StepPlan(plan.entries[:1])).status is SequenceStatus.OK


def test_an_injected_exception_is_raised_as_often_as_asked() -> None:
    engine = FakeEngine(LIMITS)
    engine.inject(RuntimeError("boom"), n_steps=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            engine.step(begin(engine))
    assert run(engine, begin(engine)).tokens


def test_logprobs_come_when_asked_for() -> None:
    engine = FakeEngine(LIMITS)
    entry = run(engine, begin(engine, options=dataclasses.replace(GREEDY, logprobs=True)))
    assert list(entry.logprobs) == [-entry.tokens[0] / 1000]
    assert not run(engine, begin(engine, 1)).logprobs


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (SamplingOptions(temperature=float("nan")), "sampling.temperature"),
        (SamplingOptions(temperature=-1), "sampling.temperature"),
        (SamplingOptions(grammar="nonsense"), "sampling.grammar"),
    ],
)
def test_wrong_options_are_refused(options: SamplingOptions, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FakeEngine().make_sampler(options)
    assert [violation.field for violation in caught.value.violations] == [path]


def test_text_goes_to_tokens_and_back() -> None:
    engine = FakeEngine()
    text = engine.format_chat([("user", "héllo")])
    assert text == "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n"
    tokens = engine.tokenize(text, add_special=True, parse_special=True)
    assert tokens[:2] == [256, 258]
    with_special = b"".join(engine.token_bytes(token, special=True) for token in tokens)
    assert with_special.decode() == "<|bos|>" + text
    plain = b"".join(engine.token_bytes(token, special=False) for token in tokens)
    assert plain.decode() == "user\nhéllo\nassistant\n"
    assert engine.tokenize("<|eos|>", add_special=False, parse_special=False) == list(b"<|eos|>")


def test_a_closed_engine_refuses_steps() -> None:
    engine = FakeEngine()
    engine.close()
    engine.close()
    assert engine.is_closed
    with pytest.raises(EngineError, match="CLOSED"):
        engine.step(StepPlan(frees=[0]))
