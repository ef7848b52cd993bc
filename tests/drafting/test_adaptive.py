"""K for all sequences of a step: about as fast as the best fixed K, within every limit."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.crowd import Machine, Member, best_fixed, limits_of, make_crowd, run

from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import Splitting, StepCost
from drafthouse_server.drafting.policy import DraftPolicy, fit
from drafthouse_server.scheduling.sequence import Request
from drafthouse_server.step import ResultEntry, SequenceStatus, StepResult, StepTimings

NAN, INF = math.nan, math.inf


def adaptive() -> tuple[AdaptiveDraft, StepCost]:
    return AdaptiveDraft(4), StepCost()


def verified(policy: DraftPolicy, crowd: list[Member], n_drafts: list[int]) -> list[ResultEntry]:
    entries = []
    for member, n_draft in zip(crowd, n_drafts, strict=True):
        n_accepted, _ = member.verify(n_draft)
        tokens = [1] * (1 + n_accepted)
        entry = ResultEntry(
            member.seq_id, SequenceStatus.OK, 100, tokens, n_drafted=n_draft, n_accepted=n_accepted
        )
        entries.append(entry)
        member.is_draft_cold = not policy.wants(member)
    return entries


MACHINES = {
    "memory-bound": Machine(),
    "dear drafter": Machine(process_token_s=0.0002),
    "compute-bound": Machine(ubatch_s=0.001, n_wide=2, token_s=0.0005, wide_token_s=0.001),
    "accelerator": Machine(n_wide=128, token_s=0.00002, wide_token_s=0.0001, draft_pass_s=0.0005),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_about_as_fast_as_the_best_fixed_k_and_few_changes_of_mind(machine: Machine) -> None:
    ratios = []
    for n in (1, 8, 33):
        for acceptance in (0.3, 0.7, 0.95):
            policy, cost = adaptive()
            crowd, noise = make_crowd([acceptance] * n), random.Random(n)
            run(policy, cost, machine, crowd, 500 if n <= 8 else 250, noise=noise)
            n_before = policy.n_changes
            n_steps = 1000 if n == 1 else 300
            rate, _ = run(policy, cost, machine, crowd, n_steps, noise=noise)
            ratios.append(rate / best_fixed(machine, [acceptance] * n)[0])
            assert policy.n_changes - n_before <= 20
    assert sorted(ratios)[len(ratios) // 2] >= 0.98, ratios
    assert min(ratios) >= 0.9, ratios


@pytest.mark.parametrize("n", [1, 4, 32])
def test_where_drafts_never_pay_they_are_turned_off_and_probes_cost_a_hundredth(n: int) -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004, draft_pass_s=0.004)
    crowd, noise = make_crowd([0.2] * n), random.Random(n)
    run(policy, cost, machine, crowd, 400, noise=noise)
    rate, _ = run(policy, cost, machine, crowd, 3000, noise=noise)
    assert rate >= 0.99 * best_fixed(machine, [0.2] * n, only=0)[0]


@pytest.mark.parametrize("acceptance", [0.0, 0.05])
def test_probes_that_never_pay_are_no_hundredth_of_a_lone_streams_gaps(acceptance: float) -> None:
    """Each is longer by half: the 99th percentile of the gaps would be theirs."""
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004, draft_pass_s=0.005)
    crowd, noise = make_crowd([acceptance]), random.Random(1)
    run(policy, cost, machine, crowd, 1000, noise=noise)
    _, depths = run(policy, cost, machine, crowd, 8000, noise=noise)
    assert 10 < sum(depth > 0 for depth in depths) < 60


@pytest.mark.parametrize("n", [1, 8])
def test_drafts_that_begin_to_pay_are_turned_on_again_within_two_thousand_steps(n: int) -> None:
    policy, cost = adaptive()
    machine = Machine(n_wide=256, process_token_s=0.0004)
    crowd = make_crowd([0.05] * n)
    _, before = run(policy, cost, machine, crowd, 800)
    assert not policy.is_enabled
    assert sorted(before[-100:])[50] == 0
    for member in crowd:
        member.acceptance = lambda _: 0.95
    _, after = run(policy, cost, machine, crowd, 2400)
    assert sorted(after[2000:])[200] >= 2


def test_a_drafter_that_stops_to_pay_is_turned_off() -> None:
    policy, cost = adaptive()
    machine = Machine(draft_pass_s=0.003, process_token_s=0.0004)
    crowd = make_crowd([0.95])
    _, before = run(policy, cost, machine, crowd, 800)
    assert sorted(before[-100:])[50] > 0
    crowd[0].acceptance = lambda _: 0.05
    _, after = run(policy, cost, machine, crowd, 1500)
    assert sorted(after[1000:])[250] == 0
    assert not policy.is_enabled


def test_a_drafter_is_taken_back_when_the_crowd_leaves() -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004)
    run(policy, cost, machine, make_crowd([0.8] * 24), 600)
    assert not policy.is_enabled
    crowd = make_crowd([0.8])
    crowd[0].is_draft_cold, crowd[0].n_fed = True, 0
    _, depths = run(policy, cost, machine, crowd, 600)
    assert sorted(depths[-100:])[50] > 0


def test_a_drafter_that_costs_nothing_to_feed_is_never_turned_off() -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0, draft_pass_s=0.004)
    _, depths = run(policy, cost, machine, make_crowd([0.1] * 4), 800)
    assert sorted(depths[-200:])[100] == 0
    assert policy.is_enabled


@pytest.mark.parametrize("n_prompt", [16, 128])
def test_prompts_in_every_step_keep_no_drafter_that_does_not_pay(n_prompt: int) -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004)
    run(policy, cost, machine, make_crowd([0.4] * 24), 300, n_prompt=n_prompt)
    assert not policy.is_enabled
    policy, cost = adaptive()
    _, depths = run(policy, cost, Machine(), make_crowd([0.9] * 2), 300, n_prompt=n_prompt)
    assert policy.is_enabled
    assert sorted(depths[-100:])[50] > 0


@pytest.mark.parametrize("n_asked", [0, 2, 64])
def test_who_asks_for_a_k_gets_it_and_the_others_are_chosen_for(n_asked: int) -> None:
    policy, cost = adaptive()
    crowd = make_crowd([0.9, 0.9, 0.9])
    crowd[0].request = Request("r", [1], n_draft=n_asked)
    limits = limits_of(3, 4)
    for _ in range(40):
        assert policy.choose_all(crowd, limits, 12)[0] == min(n_asked, 4)
        assert policy.wants(crowd[0]) == (n_asked > 0)
    policy, cost = adaptive()
    _, depths = run(policy, cost, Machine(n_wide=64), crowd, 600)
    assert sorted(depths[-100:])[50] >= 2


members = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 9)), st.integers(1, 12), st.booleans(), st.floats(0, 1)
    ),
    min_size=1,
    max_size=9,
)
odd_seconds = st.one_of(
    st.sampled_from([0.0, -0.0, 5e-324, 1e-200, 1e-9, 86399.0, 86400.0, 1e300, -1.0, NAN, INF]),
    st.floats(0, 0.1),
)
steps = st.lists(
    st.tuples(members, odd_seconds, odd_seconds, odd_seconds, st.integers(0, 40)),
    min_size=1,
    max_size=60,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_limits_hold_and_nothing_fails_whatever_crowds_and_times_it_is_told(
    drawn: list[tuple[list[tuple[int | None, int, bool, float]], float, float, float, int]],
) -> None:
    """The same calls give the same answers: both policies are told the same."""
    policy, twin = AdaptiveDraft(5), AdaptiveDraft(5)
    limits = limits_of(9, 5)
    for parts, total_s, process_s, streams_s, n_room in drawn * 4:
        crowd = []
        for seq_id, (n_draft, n_left, is_cold, acceptance) in enumerate(parts):
            crowd.append(make_crowd([acceptance])[0])
            crowd[-1].seq_id, crowd[-1].n_output_left = seq_id, n_left
            crowd[-1].request = Request("r", [1], n_draft=n_draft)
            crowd[-1].is_draft_cold = is_cold or not policy.wants(crowd[-1])
        n_drafts = policy.choose_all(crowd, limits, n_room)
        assert twin.choose_all(crowd, limits, n_room) == n_drafts
        assert sum(n_drafts) <= n_room
        for member, n in zip(crowd, n_drafts, strict=True):
            n_asked = member.request.n_draft
            assert 0 <= n <= fit(5 if n_asked is None else n_asked, member, limits)
        timings = StepTimings(process_s=process_s, total_s=total_s)
        result = StepResult(verified(policy, crowd, n_drafts), timings=timings)
        policy.observe(result, streams_s)
        twin.observe(result, streams_s)
        assert twin.is_enabled == policy.is_enabled
    assert policy.choose_all([], limits, 9) == []


@given(
    st.lists(st.tuples(st.floats(1e-4, 0.5), st.floats(0, 1)), min_size=5, max_size=40),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_no_times_and_no_luck_make_it_change_its_mind_twice_a_second(
    drawn: list[tuple[float, float]], n: int
) -> None:
    policy, limits, crowd = AdaptiveDraft(4), limits_of(n, 4), make_crowd([0.5] * n)
    now_s, changed_s = 0.0, -1.0
    for seconds, acceptance in drawn * 20:
        n_before = policy.n_changes
        for member in crowd:
            member.acceptance = lambda _, p=acceptance: p  # type: ignore[misc]  # a default
        n_drafts = policy.choose_all(crowd, limits, 4 * n)
        if policy.n_changes != n_before:
            assert policy.n_changes == n_before + 1
            assert now_s - changed_s >= 1.0 - 1e-6
            changed_s = now_s
        entries = verified(policy, crowd, n_drafts)
        policy.observe(StepResult(entries, timings=StepTimings(total_s=seconds)), seconds)
        now_s += seconds


def test_a_clock_that_stands_still_leaves_it_where_it_was() -> None:
    policy, limits, crowd = AdaptiveDraft(4), limits_of(4, 4), make_crowd([0.5] * 4)
    for _ in range(300):
        n_drafts = policy.choose_all(crowd, limits, 16)
        policy.observe(StepResult(verified(policy, crowd, n_drafts)), 0.0)
    assert policy.n_changes == 0
    assert policy.is_enabled


def test_what_is_forgotten_is_learnt_again_and_the_scheduler_is_told() -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004)
    crowd = make_crowd([0.3] * 24)
    told = []
    for _ in range(2):
        run(policy, cost, machine, crowd, 300)
        told.append((policy.is_enabled, policy.epoch))
        policy.reset()
        told.append((policy.is_enabled, policy.epoch))
    assert [is_enabled for is_enabled, _ in told] == [False, True, False, True]
    assert told[0][1] < told[1][1] < told[2][1] < told[3][1]


@pytest.mark.parametrize("n_drafts", [8, 40])
def test_what_was_seen_replaces_the_prior(n_drafts: int) -> None:
    policy, limits, crowd = AdaptiveDraft(1), limits_of(1, 1), make_crowd([0.5])
    n_right = n_drafts // 4
    seen = [0] * (n_drafts - n_right) + [1] * n_right
    while seen:
        k = policy.choose_all(crowd, limits, 1)[0]
        n_accepted = seen.pop() if k else 0
        tokens = [1] * (1 + n_accepted)
        entry = ResultEntry(0, SequenceStatus.OK, 100, tokens, n_drafted=k, n_accepted=n_accepted)
        # A step with a draft costs nothing more: it stays.
        policy.observe(StepResult([entry], timings=StepTimings(total_s=0.01)), 0.01)
    assert policy._gain(1) == pytest.approx(0.25)


@pytest.mark.parametrize("n_probes", range(1, 7))
def test_a_change_that_was_wrong_is_taken_back_before_dear_probes(n_probes: int) -> None:
    """A probe of K = 1 is lucky; K = 2 is so dear that after its probe none comes for minutes."""
    policy, limits, crowd = AdaptiveDraft(2), limits_of(32, 2), make_crowd([0.6] * 32)
    seconds = {-1: 0.1, 0: 0.1, 1: 0.185, 2: 0.5}
    now_s = 0.0

    def step() -> int:
        """Runs one step, and returns the K that is kept beside probes."""
        nonlocal now_s
        n_drafts = policy.choose_all(crowd, limits, 64)
        step_s = seconds[max(n_drafts)]
        policy.observe(
            StepResult(verified(policy, crowd, n_drafts), timings=StepTimings(total_s=step_s)),
            step_s,
        )
        now_s += step_s
        return policy._k

    bucket = policy._buckets[5]
    while step() or bucket.n_probes < 2 + n_probes:
        pass
    seconds[1] = 0.12
    while step() == 0:
        pass
    seconds[1], changed_s = 0.185, now_s
    while step() == 1:
        assert now_s < changed_s + 10.0
    assert policy._k == 0


def test_a_crowd_of_unlike_acceptance_gets_the_best_k_for_all_of_it() -> None:
    machine, acceptances = Machine(splitting=Splitting.NONE), [0.95, 0.95, 0.3, 0.3]
    policy, cost = adaptive()
    crowd = make_crowd(acceptances)
    run(policy, cost, machine, crowd, 400)
    rate, _ = run(policy, cost, machine, crowd, 500)
    assert rate >= 0.97 * best_fixed(machine, acceptances)[0]


@pytest.mark.parametrize("n", [1, 8, 32])
def test_a_new_server_does_not_try_longer_drafts_than_can_win(n: int) -> None:
    """Two drafts take as long as one at least: where one loses by far, none tries two."""
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004, draft_pass_s=0.004)
    _, depths = run(policy, cost, machine, make_crowd([0.05] * n), 200)
    assert max(depths) == 1
    assert sum(depths) <= 24


def test_what_probes_lose_is_a_share_of_all_widths_together() -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004, draft_pass_s=0.004)
    crowd, total_s, best_s = make_crowd([0.05] * 32), 0.0, 0.0
    for _ in range(20):
        for n in (1, 2, 4, 8, 16, 32):
            rate, _ = run(policy, cost, machine, crowd[:n], 40)
            best_s += 40 * n / best_fixed(machine, [0.05] * n, only=0)[0]
            total_s += 40 * n / rate
    assert best_s / total_s >= 0.97


@pytest.mark.parametrize("period", [3, 5])
def test_a_crowd_that_comes_and_goes_keeps_no_probe_from_its_end(period: int) -> None:
    """As with short runs: of four streams, one is often still at its prompt."""
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004, draft_pass_s=0.004)
    crowd = make_crowd([0.1] * 3)

    def steps(n_steps: int) -> tuple[int, int]:
        """Returns in how many of them drafters were fed, and in how many they drafted."""
        n_fed = n_drafted = 0
        for i in range(n_steps):
            _, depths = run(policy, cost, machine, crowd[:2] if i % period == 0 else crowd, 1)
            n_fed += policy.is_enabled
            n_drafted += depths[0] > 0
        return n_fed, n_drafted

    steps(200)
    assert steps(1000)[0] < 100, "drafts that are never right were tried, and given up"
    for member in crowd:
        member.acceptance = lambda _: 0.95
    assert any(steps(200)[1] > 150 for _ in range(40)), "drafts that are right are taken up"
