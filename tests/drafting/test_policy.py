"""K per sequence: as asked for, or for the most tokens per second; never more than is of use."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.crowd import Machine, best_fixed, limits_of, make_crowd, run

from drafthouse_server.drafting.acceptance import Track
from drafthouse_server.drafting.cost import Splitting, StepCost
from drafthouse_server.drafting.policy import AdaptiveDraft, DraftPolicy, FixedDraft, fit, level
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import EngineLimits, ResultEntry, SequenceStatus, StepResult

LIMITS = EngineLimits("mtp", 4, 400, 100, 64, 64, 5, 24)


def make(
    n_draft: int | None = None,
    n_output_max: int = 50,
    n_computed: int = 10,
    seq_id: int = 0,
    tenant: str = "default",
) -> Sequence:
    sequence = Sequence(
        "r",
        [1] * n_computed,
        object(),
        n_draft=n_draft,
        n_output_max=n_output_max,
        tenant=tenant,
        seq_id=seq_id,
    )
    sequence.tokens.append(7)
    sequence.n_computed = n_computed
    return sequence


def choose(policy: DraftPolicy, sequence: Sequence, limits: EngineLimits = LIMITS) -> int:
    return policy.choose_all([sequence], limits, 100, 0)[0]


def adaptive(n_draft_max: int = 4, *, can_let_go: bool = True) -> tuple[AdaptiveDraft, StepCost]:
    cost = StepCost()
    return AdaptiveDraft(n_draft_max, cost, can_let_go=can_let_go), cost


# As asked for.


@pytest.mark.parametrize(("n_draft", "chosen"), [(None, 3), (0, 0), (1, 1), (5, 5), (64, 5)])
def test_the_request_decides_or_else_the_default(n_draft: int | None, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_draft)) == chosen


@pytest.mark.parametrize(("n_left", "chosen"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_no_more_than_the_output_can_use(n_left: int, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_output_max=1 + n_left)) == chosen


@pytest.mark.parametrize(("n_computed", "chosen"), [(95, 3), (97, 2), (98, 1), (99, 0), (100, 0)])
def test_no_more_than_the_context_holds(n_computed: int, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_computed=n_computed)) == chosen


def test_none_when_the_draft_is_cold_or_cells_are_short() -> None:
    cold, short = make(), make()
    cold.is_draft_cold = True
    short.n_no_room = 1
    for policy in (FixedDraft(3), adaptive(5)[0]):
        assert choose(policy, cold) == 0
        assert choose(policy, short) == 0


def test_none_when_the_engine_does_not_speculate() -> None:
    limits = EngineLimits("none", 4, 400, 100, 64, 64, 0, 4)
    assert choose(FixedDraft(3), make(n_draft=5), limits) == 0
    assert choose(adaptive(0)[0], make(), limits) == 0
    assert adaptive()[0].choose_all([], LIMITS, 10, 0) == []


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 60))
def test_levelling_cuts_the_largest_and_uses_what_there_is(wishes: list[int], n_left: int) -> None:
    granted = level(wishes, n_left)
    assert all(map(int.__le__, granted, wishes))
    assert (
        sum(granted) == min(sum(wishes), n_left)
        or max(granted) <= min(g for g, w in zip(granted, wishes, strict=True) if g < w) + 1
    )


# Adapted.


@pytest.mark.parametrize("n_draft", [0, 1, 3, 64])
def test_a_request_that_asks_gets_what_it_asks_for(n_draft: int) -> None:
    policy, _ = adaptive(5)
    asking, other = make(n_draft), make(seq_id=1)
    for _ in range(40):
        assert policy.choose_all([asking, other], LIMITS, 100, 0)[0] == min(n_draft, 5)


sequences = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 9)),
        st.integers(1, 12),
        st.integers(80, 99),
        st.booleans(),
        st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=8,
)


@given(sequences, st.integers(0, 20), st.integers(0, 1000), st.sampled_from(list(Splitting)))
@settings(max_examples=100, deadline=None)
def test_limits_hold_whatever_was_learnt(
    drawn: list[tuple[int | None, int, int, bool, str]],
    n_room: int,
    seed: int,
    splitting: Splitting,
) -> None:
    draw = random.Random(seed)
    cost = StepCost()
    policy = AdaptiveDraft(5, cost, splitting)
    crowd = []
    for seq_id, (n_draft, n_left, n_computed, is_cold, tenant) in enumerate(drawn):
        crowd.append(make(n_draft, 1 + n_left, n_computed, seq_id, tenant))
        crowd[-1].is_draft_cold = is_cold
    for _ in range(30):
        n_drafts = policy.choose_all(crowd, LIMITS, n_room, draw.choice([0, 16]))
        assert sum(n_drafts) <= n_room
        for sequence, n_draft in zip(crowd, n_drafts, strict=True):
            n_asked = 5 if sequence.n_draft is None else sequence.n_draft
            assert 0 <= n_draft <= fit(n_asked, sequence, LIMITS)
        policy.observe(
            StepResult(
                [
                    ResultEntry(
                        sequence.seq_id,
                        SequenceStatus.OK,
                        sequence.n_computed,
                        [1],
                        n_drafted=n_draft,
                        n_accepted=draw.randint(0, n_draft),
                    )
                    for sequence, n_draft in zip(crowd, n_drafts, strict=True)
                ]
            )
        )


MACHINES = {
    "memory-bound": Machine(),
    "dear drafter": Machine(process_token_s=0.0002),
    "compute-bound": Machine(ubatch_s=0.001, n_wide=2, token_s=0.0005, wide_token_s=0.001),
    "accelerator": Machine(n_wide=128, token_s=0.00002, wide_token_s=0.0001, draft_pass_s=0.0005),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("n", [1, 2, 5, 8, 16, 33, 64])
def test_as_fast_as_the_best_fixed_k_at_every_concurrency_and_acceptance(
    machine: Machine, n: int
) -> None:
    n_steps = 1000 if n <= 2 else 4000 // n if n <= 8 else 250
    for acceptance in (0.3, 0.7, 0.95):
        policy, cost = adaptive()
        noise = random.Random(n)
        crowd = make_crowd([acceptance] * n)
        run(policy, cost, machine, crowd, 600 if n <= 8 else 330, noise=noise)
        rate, _ = run(policy, cost, machine, crowd, n_steps, noise=noise)
        best, n_draft = best_fixed(machine, [acceptance] * n)
        assert rate >= 0.98 * best, (acceptance, n_draft, rate / best)


@pytest.mark.parametrize("splitting", list(Splitting))
@pytest.mark.parametrize("n", [1, 4, 8, 24])
def test_as_fast_as_the_best_fixed_k_where_drafts_come_seldom(n: int, splitting: Splitting) -> None:
    """As n-grams' do: whoever has one then costs a physical batch beside the others."""
    machine = Machine(draft_pass_s=0, draft_token_s=0, process_token_s=0, splitting=splitting)
    for coming in (0.15, 0.5, 0.9):
        rates = []
        cost = StepCost()
        policies: list[DraftPolicy] = [AdaptiveDraft(4, cost, splitting)]
        for policy in policies + [FixedDraft(k) for k in range(5)]:
            crowd, noise = make_crowd([0.75] * n), random.Random(n)
            for member in crowd:
                member.coming = coming
            run(policy, cost, machine, crowd, 600 if n <= 8 else 330, noise=noise)
            rates.append(run(policy, cost, machine, crowd, 1500 if n <= 2 else 400, noise=noise)[0])
        assert rates[0] >= 0.97 * max(rates[1:]), (coming, rates)


def test_only_those_whose_drafts_come_are_asked_for_them_where_that_pays() -> None:
    """One stream quotes, the others seldom: theirs would cut the decode into more pieces."""
    machine = Machine(draft_pass_s=0, draft_token_s=0, process_token_s=0)
    rates = []
    adapting, cost = adaptive(8)
    policies: list[DraftPolicy] = [adapting]
    for policy in policies + [FixedDraft(k) for k in range(9)]:
        crowd = make_crowd([0.95, 0.75, 0.75, 0.75])
        for member in crowd[1:]:
            member.coming = 0.5
        run(policy, cost, machine, crowd, 400, n_draft_max=8)
        rates.append(run(policy, cost, machine, crowd, 600, n_draft_max=8)[0])
    assert rates[0] >= 1.02 * max(rates[1:]), rates


def test_much_faster_than_any_one_k_over_a_load_that_changes() -> None:
    """Day and night: few streams and many, easy text and hard. No K is right for all of it."""
    policy, cost = adaptive()
    machine = Machine()
    phases = [(1, 0.9), (24, 0.6), (2, 0.5), (32, 0.4), (4, 0.95), (16, 0.5)]
    n_emitted, total_s = 0.0, 0.0
    fixed_s = [0.0] * 5
    for turn in range(2):
        for n, acceptance in phases:
            crowd = make_crowd([acceptance] * n, seed=turn)
            rate, _ = run(policy, cost, machine, crowd, 1 << 20, n_tokens=6000)
            n_emitted += 6000
            total_s += 6000 / rate
            for n_draft in range(5):
                fixed_rate = best_fixed(machine, [acceptance] * n, only=n_draft)[0]
                fixed_s[n_draft] += 6000 / fixed_rate
    assert n_emitted / total_s >= 1.05 * n_emitted / min(fixed_s)


def test_sequences_that_differ_get_drafts_that_differ_where_that_pays() -> None:
    machine = Machine(splitting=Splitting.NONE)
    cost = StepCost()
    policy = AdaptiveDraft(4, cost, Splitting.NONE)
    acceptances = [0.95, 0.95, 0.3, 0.3]
    crowd = make_crowd(acceptances)
    run(policy, cost, machine, crowd, 400)
    rate, _ = run(policy, cost, machine, crowd, 500)
    assert rate >= 1.05 * best_fixed(machine, acceptances)[0]


def test_lengths_stay_equal_where_others_would_cost_physical_batches_of_their_own() -> None:
    policy, cost = adaptive()
    crowd = make_crowd([0.95, 0.5, 0.95, 0.5])
    run(policy, cost, Machine(ubatch_s=0.02), crowd, 400)
    limits = limits_of(4, 4)
    n_unequal = sum(len(set(policy.choose_all(crowd, limits, 16, 0))) > 1 for _ in range(200))
    assert n_unequal <= 2


def test_higher_acceptance_never_gets_less() -> None:
    depths = []
    for acceptance in (0.1, 0.3, 0.5, 0.7, 0.9, 0.98):
        policy, cost = adaptive(8)
        _, chosen = run(policy, cost, Machine(), make_crowd([acceptance] * 3), 800, n_draft_max=8)
        depths.append(sorted(chosen[-400:])[200])
    assert depths == sorted(depths)
    assert depths[0] == 0 < depths[-1]


@pytest.mark.parametrize("n", [1, 8, 32])
def test_recovery_is_noticed(n: int) -> None:
    policy, cost = adaptive(can_let_go=False)
    machine = Machine(n_wide=256)
    crowd = make_crowd([0.05] * n)
    _, before = run(policy, cost, machine, crowd, 1500 if n == 1 else 400)
    assert sorted(before[-200:])[100] == 0
    for member in crowd:
        member.acceptance = lambda _: 0.95
    _, after = run(policy, cost, machine, crowd, 3000 if n == 1 else 1500)
    assert sorted(after[-200:])[100] >= 2


def test_a_stationary_load_changes_k_rarely() -> None:
    for acceptance in (0.3, 0.5, 0.7, 0.9):
        policy, cost = adaptive()
        crowd, noise = make_crowd([acceptance] * 8), random.Random(1)
        run(policy, cost, Machine(), crowd, 300, noise=noise)
        n_before = policy.n_changes
        run(policy, cost, Machine(), crowd, 1000, noise=noise)
        assert policy.n_changes - n_before <= 20


def test_a_drafter_that_does_not_pay_is_let_go_and_taken_back_when_it_does() -> None:
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004)
    run(policy, cost, machine, make_crowd([0.8] * 24), 600)
    assert not policy.is_warm
    # The crowd leaves; for one sequence a draft is cheap.
    crowd = make_crowd([0.8])
    crowd[0].is_draft_cold, crowd[0].n_fed = True, 0
    _, depths = run(policy, cost, machine, crowd, 400)
    assert sorted(depths[-100:])[50] > 0


@pytest.mark.parametrize("n_prompt", [16, 128])
def test_prompts_in_every_step_keep_no_drafter_that_does_not_pay(n_prompt: int) -> None:
    """As many streams have it: somebody's prompt is always being computed."""
    policy, cost = adaptive()
    machine = Machine(process_token_s=0.0004)
    run(policy, cost, machine, make_crowd([0.4] * 24), 300, n_prompt=n_prompt)
    assert not policy.is_warm
    # Where drafts pay, prompts do not turn them off.
    policy, cost = adaptive()
    _, depths = run(policy, cost, Machine(), make_crowd([0.9] * 2), 300, n_prompt=n_prompt)
    assert policy.is_warm
    assert sorted(depths[-100:])[50] > 0


def test_a_tenant_is_known_when_its_next_sequence_comes() -> None:
    policy, cost = adaptive()
    machine = Machine(splitting=Splitting.NONE)
    crowd = make_crowd([0.95, 0.95, 0.2, 0.2])
    for member in crowd[2:]:
        member.tenant = "other"
    run(policy, cost, machine, crowd, 300)
    for member in crowd:
        member.draft_memory = None
    policy.choose_all(crowd, limits_of(4, 4), 16, 0)
    tracks = [member.draft_memory for member in crowd]
    grades = [track.grade for track in tracks if isinstance(track, Track)]
    assert len(grades) == len(crowd)
    assert max(grades[:2]) < min(grades[2:])


def test_prompts_beside_are_not_held_against_drafts() -> None:
    policy, cost = adaptive()
    crowd = make_crowd([0.9] * 2)
    run(policy, cost, Machine(), crowd, 300)
    limits = limits_of(2, 4)
    alone = max(policy.choose_all(crowd, limits, 8, 0) for _ in range(9))
    beside = max(policy.choose_all(crowd, limits, 8, 256) for _ in range(9))
    assert max(alone) - max(beside) <= 1


def test_the_work_of_a_choice_grows_with_the_sequences_alone() -> None:
    """Counted in predictions, not in time: a choice looks at a handful of candidates."""
    counts = {}
    for n in (8, 64):
        cost = StepCost()
        policy = AdaptiveDraft(4, cost)
        crowd = make_crowd([0.9, 0.4] * (n // 2))
        run(policy, cost, Machine(), crowd, 150)
        limits = limits_of(n, 4)
        with mock.patch.object(cost, "predict", wraps=cost.predict) as predict:
            for _ in range(80):
                policy.choose_all(crowd, limits, 4 * n, 0)
        counts[n] = predict.call_count / 80
    assert max(counts.values()) <= 8
