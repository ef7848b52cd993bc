"""What a step does before it computes: checked whole, then done in one order, with its samplers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.hand import (
    DENSE,
    GREEDY,
    HYBRID,
    MODELS,
    emitted,
    engine,
    moved,
    params,
    plan,
    sampler,
)

from drafthouse_engine import (
    PLAN_DTYPE,
    BadPlan,
    BadSeqId,
    Engine,
    EngineError,
    InvalidArgument,
    Model,
    Moved,
    Moves,
    Placement,
    Sampler,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    Start,
    Status,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TOKENS = list(range(300, 312))
N = len(TOKENS)
NOTHING = np.empty(0, PLAN_DTYPE)


def prefill(target: Engine, start: Start, tokens: Sequence[int] = TOKENS) -> list[int]:
    """Starts a sequence and computes its tokens in the same step; returns what it emitted."""
    n = start.n_kept
    rows = plan((start.seq_id, n, 0, len(tokens) - n, 0, 1))
    result = target.step(rows, tokens[n:], moves=Moves(starts=[start]))
    assert result.entries[0]["status"] == Status.OK
    return emitted(result, 0)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_one_step_saves_preempts_frees_starts_and_computes(name: str) -> None:
    with engine("mtp", name) as target:
        chosen = prefill(target, Start(0, sampler(GREEDY, name)))
        prefill(target, Start(1, sampler(GREEDY, name)), TOKENS[:5])
        starts = [
            Start(0, sampler(GREEDY, name)),
            Start(1, sampler(GREEDY, name)),
        ]
        moves = Moves([0], [0], [1], starts, drafts_off=[1], drafts_on=[1])
        rows = plan((0, 0, 0, N, 0, 1), (1, 0, 0, N, 0, 1))
        result = target.step(rows, TOKENS, moves=moves)
        assert emitted(result, 0) == emitted(result, 1) == chosen
        made = result.moved
        assert made is not None
        assert list(made.n_kept) == [0, 0]
        # What was saved and preempted goes on where it was: with its last token, elsewhere.
        resumed = Start(2, made.samplers[0], N, snapshot=made.snapshots[0], is_resumed=True)
        result = target.step(plan((2, N, 0, 1, 0, 1)), chosen, moves=Moves(starts=[resumed]))
        again = target.step(plan((0, N, 0, 1, 0, 1)), chosen)
        assert emitted(result, 0) == emitted(again, 0)


def test_rows_of_numbers_carry_moves_too() -> None:
    with engine() as target:
        entries = [0, 0, 0, N, 0, 1]
        moves = Moves(starts=[Start(0, sampler())])
        result = target.step_rows(entries, TOKENS, [], moves=moves)
        assert result.moved == Moved({}, {}, [0])
        assert target.step_rows([0, N, 0, 1, 0, 1], result.tokens, []).moved is None


def test_a_refused_plan_leaves_everything_and_its_samplers() -> None:
    with engine() as target:
        prefill(target, Start(0, sampler()))
        fresh, second = sampler(), sampler()
        preempted = moved(target, saves=[0], swap_outs=[0]).samplers[0]
        prefill(target, Start(1, sampler()))
        starts = [Start(0, preempted, is_resumed=True), Start(2, fresh)]
        right = Moves(saves=[1], swap_outs=[1], frees=[2], starts=starts)
        last = Start(1, second)
        wrong: dict[str, tuple[Moves, Any, type[Exception]]] = {
            "an entry": (right, plan((2, 1, 0, 1, 0, 1)), BadPlan),
            "of a preempted one": (right, plan((1, N, 0, 1, 0, 1)), SeqIdle),
            "a start": (
                dataclasses.replace(right, starts=[*starts, last._replace(n_kept=1)]),
                NOTHING,
                BadPlan,
            ),
            "a number": (dataclasses.replace(right, drafts_on=[1]), NOTHING, SeqIdle),
            "no slot": (dataclasses.replace(right, drafts_off=[3]), NOTHING, BadSeqId),
            "too many": (dataclasses.replace(right, frees=[2] * 4), NOTHING, BadPlan),
        }
        for name, (moves, entries, error) in wrong.items():
            with pytest.raises(error):
                target.step(entries, [5], moves=moves)
            assert target.n_cells_used == N, name
            assert [s.is_used for s in (preempted, fresh, second)] == [False] * 3, name
        made = moved(target, saves=[1], swap_outs=[1], frees=[2], starts=starts)
        assert preempted.is_used
        assert fresh.is_used
        assert made.samplers.keys() == made.snapshots.keys() == {1}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Start(0, None), BadPlan),
        (Start(0, "a sampler"), InvalidArgument),  # type: ignore[arg-type]  # wrong on purpose
        (Start(2**40, None), InvalidArgument),
        (Start(0, None, tag=-1), InvalidArgument),
        (Start(0, None, tag=2**64), InvalidArgument),
        (Start(0, None, n_kept=1.5), TypeError),  # type: ignore[arg-type]  # wrong on purpose
        (Start(0, None, 1, snapshot="text"), TypeError),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
def test_what_is_no_start_is_refused(wrong: Start, error: type[Exception]) -> None:
    with engine() as target:
        good = sampler()
        for starts in ([wrong], [Start(1, good), wrong]):
            with pytest.raises(error):
                moved(target, starts=starts)
            assert not good.is_used
        moved(target, starts=[Start(1, good)])  # no call is in flight


def test_a_sampler_is_handed_over_once() -> None:
    with engine() as target:
        used, closed, other, twice = sampler(), sampler(), sampler(GREEDY, HYBRID), sampler()
        moved(target, starts=[Start(0, used)])
        closed.close()
        for wrong in (used, closed, other):
            with pytest.raises(InvalidArgument):
                moved(target, starts=[Start(1, wrong)])
        with pytest.raises(InvalidArgument):
            moved(target, starts=[Start(1, twice), Start(2, twice)])
        assert not twice.is_used
        assert not other.is_used


@pytest.mark.parametrize(
    "begin",
    [
        lambda target, preempted: target.seq_begin(0, preempted),
        lambda target, preempted: target.fork(1, {0: preempted}, 3),
    ],
    ids=["seq_begin", "fork"],
)
def test_a_preempted_sampler_begins_no_other_sequence(
    begin: Callable[[Engine, Sampler], None],
) -> None:
    """It would go on in the midst of its grammar, of its penalties, and of another's tokens."""
    given = SamplingParams(temperature=0.0, grammar='root ::= "abc" [0-9]+')
    with engine() as target:
        prefill(target, Start(0, sampler(given)))
        preempted = moved(target, swap_outs=[0]).samplers[0]
        prefill(target, Start(1, sampler()))
        with pytest.raises(BadPlan, match="preempted"):
            begin(target, preempted)
        assert target.seq_n_past(0) == 0


def by_hand(target: Engine, seq_id: int, tokens: Sequence[int], n: int) -> list[int]:
    """Computes tokens of a sequence one call at a time; returns n tokens that follow."""
    chosen: list[int] = []
    while len(chosen) < n:
        given = tokens if not chosen else chosen[-1:]
        n_past, k = target.seq_n_past(seq_id), len(given)
        outputs = [i == k - 1 for i in range(k)]
        target.decode(given, range(n_past, n_past + k), [seq_id] * k, outputs)
        chosen.append(target.sample(seq_id, k - 1))
    return chosen


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_was_chosen_by_hand_is_heard_once(is_kept: bool) -> None:
    """The last token too, which is not computed yet when its sequence is preempted."""
    penalised = SamplingParams(
        temperature=1.0, seed=3, top_k=0, top_p=1.0, min_p=0.0, penalty_repeat=1.5,
        penalty_frequency=1.0, ignore_eos=True,
    )  # fmt: skip
    with (
        Model(MODELS / DENSE, placement=Placement(devices=())) as model,
        Engine(model, None, params(exact=True)) as target,
    ):
        target.seq_begin(0, Sampler(model, penalised))
        whole = by_hand(target, 0, TOKENS, 24)
        target.seq_end(0)
        target.seq_begin(0, Sampler(model, penalised))
        half = by_hand(target, 0, TOKENS, 6)
        n = target.seq_n_past(0) if is_kept else 0
        made = moved(target, saves=[0], swap_outs=[0])
        snapshot = made.snapshots[0] if is_kept else None
        start = Start(1, made.samplers[0], n, snapshot=snapshot, is_resumed=True)
        moved(target, starts=[start])
        assert half + by_hand(target, 1, [*TOKENS, *half][n:], 18) == whole


def test_a_preempted_sampler_keeps_its_parameters() -> None:
    given = SamplingParams(temperature=0.5, seed=7, logprobs=True)
    with engine() as target:
        prefill(target, Start(0, sampler(given)))
        preempted = moved(target, swap_outs=[0]).samplers[0]
        assert preempted.params == given
        assert isinstance(preempted, Sampler)
        prefill(target, Start(0, sampler(given)))
        snapshot = moved(target, saves=[0], swap_outs=[0]).snapshots[0]
        moved(target, starts=[Start(1, None, N, snapshot=snapshot, is_resumed=True)])
        assert moved(target, swap_outs=[1]).samplers[1].params is None


def test_a_sequence_may_be_saved_twice() -> None:
    with engine() as target:
        prefill(target, Start(0, sampler()))
        whole = moved(target, saves=[0, 0]).snapshots
        assert whole == {0: target.save(0, with_sampler=False)}


def test_only_the_snapshot_of_a_preempted_sequence_has_its_sampler() -> None:
    with engine() as target:
        chosen = prefill(target, Start(0, sampler(), tag=TAG))[0]
        prefill(target, Start(1, sampler(), tag=TAG))
        whole, bare = target.save(0), target.save(1, with_sampler=False)
        made = moved(target, saves=[0, 1], swap_outs=[0], frees=[1])
        assert made.snapshots == {0: whole, 1: bare}
        own = Start(2, None, N, snapshot=bare, is_resumed=True, tag=TAG)
        starts = [own, Start(0, None, N, snapshot=whole, is_resumed=True, tag=TAG)]
        rows = plan((2, N, 0, 1, 0, 1), (0, N, 1, 1, 0, 1))
        result = target.step(rows, [chosen, chosen], moves=Moves(starts=starts))
        assert list(result.entries["status"]) == [Status.DECODE_FAILED, Status.OK]
        assert result.moved is not None
        assert list(result.moved.n_kept) == [0, N]
        assert target.n_cells_used == N + 1
        with pytest.raises(SeqIdle):
            target.save(2)
        for sampler_or_none, is_resumed in ((None, True), (sampler(), False)):
            foreign = Start(1, sampler_or_none, N, snapshot=bare, is_resumed=is_resumed, tag=6)
            with pytest.raises(BadPlan, match="tag"):
                moved(target, starts=[foreign])


TAG = 2**63 + 5


@pytest.mark.parametrize("tag", [0, 6])
def test_forks_and_loads_keep_the_tag(tag: int) -> None:
    with engine() as target:
        prefill(target, Start(0, sampler(), tag=TAG))
        target.fork(0, {1: sampler()})
        snapshot = target.save(0)
        target.load(2, snapshot)
        for seq_id in (0, 1, 2):
            n = target.seq_n_past(seq_id)
            with pytest.raises(BadPlan, match="tag"):
                moved(target, starts=[Start(seq_id, sampler(), n, tag=tag)])
            assert list(moved(target, starts=[Start(seq_id, sampler(), n, tag=TAG)]).n_kept) == [n]


def test_a_damaged_snapshot_is_damage_and_not_another_s() -> None:
    """Whatever bit of it: a plan is not refused for it."""
    with engine() as target:
        prefill(target, Start(0, sampler(), tag=TAG))
        snapshot = target.save(0)
        for place in (*range(0, 160, 7), len(snapshot) - 1):
            damaged = bytearray(snapshot)
            damaged[place] ^= 1
            start = Start(1, sampler(), N, snapshot=damaged, tag=TAG)
            assert list(moved(target, starts=[start]).n_kept) == [0]


def test_a_step_that_is_refused_says_why() -> None:
    with engine() as target:
        with pytest.raises(EngineError, match="started twice"):
            moved(target, starts=[Start(0, sampler()), Start(0, sampler())])
        with pytest.raises(SeqIdle, match="sequence 1 has not begun"):
            moved(target, saves=[1])


def test_a_refused_sampler_leaves_the_parameters_of_the_one_in_use() -> None:
    """A preempted sampler told the parameters of another, which the sequence never had."""
    own, other = SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=2.0, seed=2)
    with engine() as target:
        target.seq_begin(0, sampler(own))
        with pytest.raises(SeqBusy):
            target.seq_begin(0, sampler(other))
        assert moved(target, swap_outs=[0]).samplers[0].params == own
