"""How many steps the engine runs without the host: bounds, and what the scheduler makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.test_scheduler import LIMITS, Bench

from drafthouse_server.drafting.cost import StepCost
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.scheduling.pacing import N_STEPS_MAX, RUN_S, RunLength
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    FinishEvent,
    Request,
    Sequence,
    TokensEvent,
)
from drafthouse_server.step import EngineLimits, SequenceStatus, StepPlan

STEP_S = 0.001


def make(n_output_max: int = 100, stop_token_ids: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(
        Request("r", [1], stop_token_ids=stop_token_ids), None, n_output_max=n_output_max
    )


@given(
    left=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    step_s=st.floats(1e-6, 1.0),
    n_free=st.integers(1, 50),
    gap_s=st.sampled_from([0.0, 0.002, 0.05]),
)
def test_a_run_is_bounded_by_whoever_ends_first_and_by_its_time(
    left: list[int], step_s: float, n_free: int, gap_s: float
) -> None:
    n = RunLength(gap_s).n_steps([make(n) for n in left], step_s, n_free)
    assert 1 <= n <= min(*left, n_free, N_STEPS_MAX)
    assert n == 1 or n * step_s <= min(RUN_S, gap_s or RUN_S)


def test_steps_of_ordinary_models_are_never_run_in_a_row() -> None:
    assert RunLength().n_steps([make()], 0.02, 100) == 1
    assert RunLength().n_steps([make()], RUN_S / 4, 100) == 4
    assert RunLength().n_steps([make()], 0.0, 100) == 1, "nothing is known yet"


def test_stop_tokens_are_the_hosts_business() -> None:
    members = [make(), make(stop_token_ids=frozenset({7}))]
    assert RunLength().n_steps(members, STEP_S, 100) == 1


def bench(limits: EngineLimits = LIMITS, n_draft: int = 0, **scheduler: object) -> Bench:
    return Bench(limits, n_draft, {"cost": StepCost()} | scheduler)


def step(bench: Bench) -> StepPlan:
    """Runs a step, or a run of them; each takes a millisecond."""
    scheduler = bench.scheduler
    bench.events += scheduler.reap(bench.now)
    plan = scheduler.plan(bench.now)
    result = bench.engine.step(plan)
    bench.now += STEP_S * result.n_steps
    bench.events += scheduler.commit(result, bench.now)
    return plan


def tokens(bench: Bench, sequence: Sequence) -> list[int]:
    return [
        token
        for owner, event in bench.events
        if owner is sequence and isinstance(event, TokensEvent)
        for token in event.tokens
    ]


def test_quick_steps_are_run_in_a_row_and_yield_the_same() -> None:
    alone, run = Bench(), bench()
    outputs = []
    for each in (alone, run):
        sequences = [each.add(name, n_output_max=n) for name, n in (("a", 40), ("b", 31))]
        while not each.scheduler.is_idle:
            each.step() if each is alone else step(each)
        outputs.append([tokens(each, sequence) for sequence in sequences])
        assert [len(output) for output in outputs[-1]] == [40, 31]
        ends = each.ends().values()
        assert all(isinstance(end, FinishEvent) for end in ends)
        # A run counts as its steps.
        assert [sequence.tally.n_steps for sequence in sequences] == [40, 31]
        assert each.scheduler.counts.n_planned == 39 + 30
    assert outputs[0] == outputs[1]


def n_steps_planned(bench: Bench) -> list[int]:
    return [step(bench).n_steps for _ in range(5)]


def test_prompts_drafts_and_stop_tokens_make_the_host_decide() -> None:
    plain = bench()
    plain.add("a", n_output_max=80)
    assert max(n_steps_planned(plain)) == int(RUN_S / STEP_S)
    plain.add("b", n_prompt=60, n_output_max=20)
    assert n_steps_planned(plain)[:4] == [1] * 4, "a prompt is computed"
    drafting = bench(n_draft=2)
    drafting.add("a", n_output_max=80)
    assert n_steps_planned(drafting) == [1] * 5
    stopping = bench()
    stopping.add("a", n_output_max=80, stop_token_ids=frozenset({7}))
    assert n_steps_planned(stopping) == [1] * 5
    quoting = bench(ngrams=NgramDrafter(3, 100))
    quoting.add("a", n_output_max=80)
    assert n_steps_planned(quoting) == [1] * 5


def test_a_small_gap_target_makes_short_runs() -> None:
    pressed = bench(gap_s=0.003)
    pressed.add("a", n_output_max=80)
    assert max(n_steps_planned(pressed)) == 3


def test_shared_cells_bound_a_run() -> None:
    limits = EngineLimits("mtp", 2, 64, 64, 16, 16, 4, 20)
    shared = bench(limits)
    for name in "ab":
        shared.add(name, n_prompt=8, n_output_max=50)
    while not shared.scheduler.is_idle:
        step(shared)
        assert shared.engine.n_cells_used <= limits.n_ctx
    assert [len(tokens(shared, sequence)) for sequence in dict(shared.events)] == [50, 50]


@pytest.mark.parametrize("status", [SequenceStatus.DECODE_FAILED, SequenceStatus.SAMPLING_FAILED])
def test_what_a_run_yielded_before_it_failed_is_delivered(status: SequenceStatus) -> None:
    broken = bench()
    sequence = broken.add("a", n_output_max=80)
    step(broken)
    before = len(tokens(broken, sequence))
    plan = broken.scheduler.plan(broken.now)
    result = broken.engine.step(plan)
    entry = result.entries[0]
    entry.status, entry.n_past = status, 0  # as the engine tells a failure after the first step
    broken.events += broken.scheduler.commit(result, broken.now)
    assert len(tokens(broken, sequence)) == before + len(entry.tokens)
    assert isinstance(broken.ends()["a"], ErrorEvent)
    assert broken.scheduler.is_idle or step(broken).frees
