"""The fake engine is strict and deterministic: else the tests that stand on it show nothing."""

from __future__ import annotations

import dataclasses

import pytest

from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import EngineError, InvalidRequest
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    Snapshot,
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


def generate(engine: FakeEngine, n_draft: int, options: SamplingOptions = GREEDY) -> list[int]:
    """Returns the first 20 tokens of a generation."""
    entry = run(engine, begin(engine, options=options))
    tokens = list(entry.tokens)
    while len(tokens) < 20:
        plan = StepPlan([PlanEntry(0, entry.n_past, tokens[-1:], n_draft, True)])
        entry = run(engine, plan)
        tokens += entry.tokens
    return tokens[:20]


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


def test_a_slot_is_reusable_with_and_without_being_freed() -> None:
    engine = FakeEngine(LIMITS)
    first = run(engine, begin(engine))
    assert run(engine, begin(engine)) == first
    assert run(engine, dataclasses.replace(begin(engine), frees=[0])) == first
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
        (SamplingOptions(temperature=float("nan")), "temperature"),
        (SamplingOptions(temperature=-1), "temperature"),
        (SamplingOptions(grammar="nonsense"), "grammar"),
    ],
)
def test_wrong_options_are_refused(options: SamplingOptions, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        FakeEngine().make_sampler(options)
    assert [violation.field for violation in caught.value.violations] == [path]


def test_text_goes_to_tokens_and_back() -> None:
    engine = FakeEngine()
    text = "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n"
    tokens = engine.tokenize(text, add_special=True, parse_special=True)
    assert tokens == engine.tokenize_chat([("user", "héllo")])
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


def go_on(
    engine: FakeEngine, entry: ResultEntry, n_tokens: int, *, n_draft: int = 2
) -> tuple[list[int], ResultEntry]:
    """Returns the tokens of an entry and of those that follow, and the last entry."""
    tokens = list(entry.tokens)
    while len(tokens) < n_tokens:
        plan = [PlanEntry(entry.seq_id, entry.n_past, tokens[-1:], n_draft, True)]
        entry = run(engine, StepPlan(plan))
        tokens += entry.tokens
    return tokens, entry


SAMPLED = SamplingOptions(temperature=1, seed=3)
OTHER_PROMPT = [*PROMPT, *b" world"]
N_CACHED = 9
"""Tokens that `finished` leaves in its slot."""


def cold(prompt: list[int], options: SamplingOptions = SAMPLED) -> list[int]:
    """Returns twelve tokens that a sequence generates in an engine of its own."""
    engine = FakeEngine(LIMITS)
    start = Start(0, engine.make_sampler(options))
    entry = run(engine, StepPlan([PlanEntry(0, 0, prompt, 0, True)], [start]))
    return go_on(engine, entry, 12)[0][:12]


def finished(engine: FakeEngine, seq_id: int = 0) -> list[int]:
    """Leaves a sequence in a slot and returns its tokens in the cache."""
    sampler = engine.make_sampler(GREEDY)
    plan = StepPlan([PlanEntry(seq_id, 0, PROMPT, 0, True)], [Start(seq_id, sampler)])
    tokens, entry = go_on(engine, run(engine, plan), 5, n_draft=0)
    assert entry.n_past == N_CACHED
    return [*PROMPT, *tokens][:N_CACHED]


def reuse(
    engine: FakeEngine,
    prompt: list[int],
    n_kept: int,
    *,
    seq_id: int = 0,
    source: int | None = None,
    snapshot: Snapshot | None = None,
) -> StepPlan:
    """Returns a plan whose start keeps tokens and whose entry computes the rest of a prompt."""
    start = Start(seq_id, engine.make_sampler(SAMPLED), n_kept, source, snapshot)
    return StepPlan([PlanEntry(seq_id, n_kept, prompt[n_kept:], 0, True)], [start])


def test_a_finished_sequence_is_cut_and_goes_on_as_another() -> None:
    engine = FakeEngine(LIMITS)
    finished(engine)
    entry = run(engine, reuse(engine, OTHER_PROMPT, len(PROMPT)))
    assert entry.n_past == len(OTHER_PROMPT) == engine.n_cells_used
    assert go_on(engine, entry, 12)[0][:12] == cold(OTHER_PROMPT)


def test_a_slot_goes_on_from_all_that_it_holds() -> None:
    engine = FakeEngine(LIMITS, is_recurrent=True)
    prompt = [*finished(engine), *b"more"]
    result = engine.step(reuse(engine, prompt, N_CACHED))
    assert not result.n_kept
    assert go_on(engine, result.entries[0], 12)[0][:12] == cold(prompt)


def test_a_copy_leaves_its_source_as_it_was() -> None:
    engine = FakeEngine(LIMITS)
    source = run(engine, StepPlan(begin(engine, 0, SAMPLED).entries, begin(engine).starts))
    plan = reuse(engine, OTHER_PROMPT, 4, seq_id=1, source=0)
    entries = [*plan.entries, PlanEntry(0, source.n_past, source.tokens[-1:], 2, True)]
    copy, running = engine.step(dataclasses.replace(plan, entries=entries)).entries
    assert go_on(engine, copy, 12)[0][:12] == cold(OTHER_PROMPT)
    expected = cold(PROMPT, GREEDY)
    assert [*source.tokens, *go_on(engine, running, 11)[0]][:12] == expected


def test_a_snapshot_serves_any_engine_and_any_slot() -> None:
    engine, other = FakeEngine(LIMITS), FakeEngine(LIMITS)
    prompt = [*finished(engine), *b"x"]
    result = engine.step(StepPlan(saves=[0], frees=[0]))
    assert engine.n_cells_used == 0
    for n_kept in (N_CACHED, 5):
        plan = reuse(other, prompt, n_kept, seq_id=1, snapshot=result.snapshots[0])
        assert go_on(other, run(other, plan), 12)[0][:12] == cold(prompt)


def test_a_snapshot_with_its_own_sampler_goes_on_in_the_middle() -> None:
    engine = FakeEngine(LIMITS)
    first = run(engine, begin(engine, options=SAMPLED))
    snapshot = engine.step(StepPlan(saves=[0], swap_outs=[0])).snapshots[0]
    engine.close()
    other = FakeEngine(LIMITS)
    start = Start(1, None, first.n_past, snapshot=snapshot, is_resumed=True)
    plan = StepPlan([PlanEntry(1, first.n_past, first.tokens[-1:], 3, True)], [start])
    tokens = [*first.tokens, *go_on(other, run(other, plan), 11)[0]]
    assert tokens[:12] == cold(PROMPT)


@pytest.mark.parametrize("pieces", [[16], [3, 1, 12], [9, 1], [10]])
def test_a_preempted_sequence_is_computed_again_and_goes_on(pieces: list[int]) -> None:
    engine = FakeEngine(LIMITS)
    tokens, entry = go_on(engine, run(engine, begin(engine, options=SAMPLED)), 5, n_draft=0)
    known = [*PROMPT, *tokens]
    result = engine.step(StepPlan(swap_outs=[0]))
    assert engine.n_cells_used == 0
    starts = [Start(1, result.samplers[0], is_resumed=True)]
    n_past = 0
    for n_tokens in pieces:
        piece = known[n_past : n_past + n_tokens]
        is_last = n_past + len(piece) == len(known)
        entry = run(engine, StepPlan([PlanEntry(1, n_past, piece, 0, is_last)], starts))
        starts, n_past = [], entry.n_past
        if is_last:
            break
    assert [*tokens, *go_on(engine, entry, 7)[0]][:12] == cold(PROMPT)


def test_a_prompt_may_be_preempted_and_resumed_from_a_copy() -> None:
    engine = FakeEngine(LIMITS)
    finished(engine, 1)
    sampler = engine.make_sampler(SAMPLED)
    engine.step(StepPlan([PlanEntry(0, 0, OTHER_PROMPT[:3], 0, False)], [Start(0, sampler)]))
    preempted = engine.step(StepPlan(swap_outs=[0])).samplers[0]
    start = Start(0, preempted, 5, source=1, is_resumed=True)
    entry = run(engine, StepPlan([PlanEntry(0, 5, OTHER_PROMPT[5:], 0, True)], [start]))
    assert go_on(engine, entry, 12)[0][:12] == cold(OTHER_PROMPT)


def test_another_prompt_s_tokens_show_in_what_is_generated() -> None:
    engine = FakeEngine(LIMITS)
    finished(engine)
    prompt = [*b"HELLO world"]
    entry = run(engine, reuse(engine, prompt, len(PROMPT)))
    assert go_on(engine, entry, 12)[0][:12] != cold(prompt)


def refused(engine: FakeEngine, plan: StepPlan) -> None:
    """Asserts that a start keeps nothing, and that the sequence can be computed from there."""
    seq_id, n_planned = plan.starts[0].seq_id, plan.starts[0].n_kept
    result = engine.step(plan)
    assert result.n_kept == {seq_id: 0}
    assert result.n_batch_tokens == 0
    assert result.entries == [ResultEntry(seq_id, SequenceStatus.OK, 0)]
    assert n_planned > engine.n_past(seq_id) == 0
    again = run(engine, StepPlan([PlanEntry(seq_id, 0, OTHER_PROMPT, 0, True)]))
    assert go_on(engine, again, 12)[0][:12] == cold(OTHER_PROMPT)


def test_recurrent_engines_neither_cut_nor_copy() -> None:
    engine = FakeEngine(LIMITS, is_recurrent=True)
    assert engine.card.is_recurrent
    finished(engine)
    snapshot = engine.step(StepPlan(saves=[0])).snapshots[0]
    refused(engine, reuse(engine, OTHER_PROMPT, 4, seq_id=1, source=0))
    refused(engine, reuse(engine, OTHER_PROMPT, 4, seq_id=1, snapshot=snapshot))
    refused(engine, reuse(engine, OTHER_PROMPT, 4))


@pytest.mark.parametrize("snapshot", [b"", b"nonsense", b"fake snapshot 1 00000000[]"])
def test_damaged_snapshots_keep_nothing(snapshot: bytes) -> None:
    engine = FakeEngine(LIMITS)
    refused(engine, reuse(engine, OTHER_PROMPT, 4, snapshot=snapshot))
    start = Start(1, None, 4, snapshot=snapshot, is_resumed=True)
    result = engine.step(StepPlan([PlanEntry(1, 4, [1], 0, True)], [start]))
    assert result.n_kept == {1: 0}
    assert [entry.status.value for entry in result.entries] == ["DECODE_FAILED"]
    with pytest.raises(EngineError, match="SEQ_IDLE"):
        engine.step(StepPlan(saves=[1]))


def test_starts_and_saves_fail_as_often_as_asked() -> None:
    engine = FakeEngine(LIMITS)
    finished(engine)
    engine.refuse(n_starts=1, n_saves=1)
    assert engine.step(StepPlan(saves=[0])).snapshots == {}
    assert engine.step(StepPlan(saves=[0])).snapshots.keys() == {0}
    refused(engine, reuse(engine, OTHER_PROMPT, 4, seq_id=1, source=0))
    assert not engine.step(reuse(engine, OTHER_PROMPT, 4, seq_id=1, source=0)).n_kept


WRONG_STARTS = {
    "more than it holds": (Start(0, "new", N_CACHED + 1), "BAD_PLAN"),
    "more than the source holds": (Start(1, "new", N_CACHED + 1, source=0), "BAD_PLAN"),
    "from an empty slot": (Start(1, "new", 1), "BAD_PLAN"),
    "from an idle source": (Start(0, "new", 1, source=1), "SEQ_IDLE"),
    "from no slot": (Start(0, "new", 1, source=2), "BAD_SEQ_ID"),
    "from itself": (Start(0, "new", 1, source=0), "BAD_PLAN"),
    "two ways": (Start(1, "new", 1, source=0, snapshot=b""), "BAD_PLAN"),
    "a source for nothing": (Start(1, "new", 0, source=0), "BAD_PLAN"),
    "below nothing": (Start(0, "new", -1), "BAD_PLAN"),
    "no slot": (Start(2, "new"), "BAD_SEQ_ID"),
    "no sampler": (Start(0, None), "BAD_PLAN"),
    "no sampler and not resumed": (Start(0, None, 1, snapshot=b""), "BAD_PLAN"),
    "not a sampler": (Start(0, "foreign"), "INVALID_ARGUMENT"),
    "another's sampler": (Start(1, "owned"), "INVALID_ARGUMENT"),
    "a preempted sampler as new": (Start(1, "preempted"), "BAD_PLAN"),
    "all that is known": (Start(0, "preempted", 6, is_resumed=True), "BAD_PLAN"),
}


@pytest.mark.parametrize("name", WRONG_STARTS)
def test_wrong_starts_change_nothing(name: str) -> None:
    engine = FakeEngine(LIMITS)
    run(engine, begin(engine))
    preempted = engine.step(StepPlan(swap_outs=[0])).samplers[0]
    finished(engine)
    owned = engine.make_sampler(GREEDY)
    engine.step(StepPlan(starts=[Start(1, owned)]))
    engine.step(StepPlan(frees=[1]))
    samplers = {"new": engine.make_sampler(GREEDY), "preempted": preempted, "owned": owned}
    start, status = WRONG_STARTS[name]
    sampler = samplers.get(str(start.sampler), start.sampler)
    with pytest.raises(EngineError) as caught:
        engine.step(StepPlan(starts=[dataclasses.replace(start, sampler=sampler)]))
    assert caught.value.status == status
    assert engine.n_cells_used == engine.n_past(0) == N_CACHED
    assert not engine.step(reuse(engine, OTHER_PROMPT, 5)).n_kept


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(saves=[1]),
        StepPlan(swap_outs=[1]),
        StepPlan(saves=[0], swap_outs=[0, 0]),
        StepPlan(swap_outs=[-1]),
        StepPlan(saves=[2]),
        StepPlan(frees=[2]),
    ],
)
def test_idle_slots_are_neither_saved_nor_preempted(plan: StepPlan) -> None:
    engine = FakeEngine(LIMITS)
    finished(engine)
    with pytest.raises(EngineError, match=r"SEQ_IDLE|BAD_SEQ_ID"):
        engine.step(plan)
    assert engine.n_past(0) == N_CACHED


@pytest.mark.parametrize(
    ("tokens", "is_output"),
    [
        (PROMPT, False),
        ([*PROMPT, 1], True),
        ([*PROMPT[:3], 1], False),
        (PROMPT, True),
    ],
)
def test_resumed_sequences_compute_what_they_were(tokens: list[int], is_output: bool) -> None:
    engine = FakeEngine(LIMITS)
    run(engine, begin(engine))
    preempted = engine.step(StepPlan(swap_outs=[0])).samplers[0]
    plan = StepPlan([PlanEntry(0, 0, tokens, 0, is_output)], [Start(0, preempted, is_resumed=True)])
    if tokens == PROMPT and not is_output:
        assert run(engine, plan).n_past == len(PROMPT)
        return
    with pytest.raises(EngineError, match="BAD_PLAN"):
        engine.step(plan)


def test_one_plan_saves_preempts_and_starts_a_slot() -> None:
    engine = FakeEngine(LIMITS)
    first = run(engine, begin(engine, options=SAMPLED))
    start = Start(0, engine.make_sampler(GREEDY))
    entry = PlanEntry(0, 0, OTHER_PROMPT, 0, True)
    result = engine.step(StepPlan([entry], [start], saves=[0], swap_outs=[0]))
    assert go_on(engine, result.entries[0], 12)[0][:12] == cold(OTHER_PROMPT, GREEDY)
    back = Start(1, result.samplers[0], first.n_past, snapshot=result.snapshots[0], is_resumed=True)
    plan = StepPlan([PlanEntry(1, first.n_past, first.tokens[-1:], 2, True)], [back])
    assert [*first.tokens, *go_on(engine, run(engine, plan), 11)[0]][:12] == cold(PROMPT)
