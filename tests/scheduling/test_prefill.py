"""How many prompt tokens a step carries, and whose."""

from __future__ import annotations

import dataclasses

import pytest
from tests.scheduling.test_newcomers import World
from tests.scheduling.test_scheduler import LIMITS, Bench
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.scheduling.pacing import (
    GAP_FACTOR,
    N_ALONE,
    N_PAST_LONG,
    N_PIECE,
    N_ROWS_ALONE,
    STEP_FREE_S,
    ChunkSizer,
)
from drafthouse_server.scheduling.prefill import N_QUANTUM, PrefillShares
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.scheduling.waiting import rank


def make(order: int, tenant: str, priority: int = 0, *, n_prompt: int = 1) -> Sequence:
    request = Request(f"{tenant}{order}", [1] * n_prompt, tenant=tenant, priority=priority)
    return Sequence(request, None, rank=rank(request, order))


def shares(
    turns: PrefillShares,
    wanted: list[tuple[Sequence, int]],
    n_tokens: int,
    n_quantum: int = N_QUANTUM,
) -> dict[str, int]:
    granted = turns.share(wanted, n_tokens, n_quantum)
    for sequence, n in granted:
        turns.charge(sequence, n)
    return {s.request.request_id: n for s, n in granted}


def test_inside_a_tenant_rank_decides() -> None:
    wanted = [(make(0, "a"), 50), (make(1, "a", priority=1), 30), (make(2, "a"), 50)]
    assert shares(PrefillShares(), wanted, 100) == {"a1": 30, "a0": 50, "a2": 20}


def test_a_short_prompt_is_not_behind_another_tenants_long_one() -> None:
    wanted = [(make(0, "a"), 4000), (make(1, "b"), 20)]
    assert shares(PrefillShares(), wanted, 200) == {"a0": 180, "b1": 20}
    assert shares(PrefillShares(), wanted[::-1], N_ALONE, N_ALONE) == {"b1": 20, "a0": 44}
    assert shares(PrefillShares(), wanted, N_ALONE, N_ALONE) == {"b1": 20, "a0": 44}


def test_in_every_other_step_short_prompts_go_before_a_long_one_of_their_tenant() -> None:
    turns = PrefillShares()
    wanted = [(make(i, "a", n_prompt=n), n) for i, n in enumerate([4000, 60, 50, N_ALONE + 1])]
    found = [shares(turns, wanted, 100) for _ in range(4)]
    assert found == [{"a1": 60, "a2": 40}, {"a0": 100}] * 2
    both = [*wanted, (make(9, "b", n_prompt=4000), 4000)]
    assert [set(shares(PrefillShares(), both, 200))] == [{"a1", "a2", "b9"}]


@pytest.mark.parametrize("n_before", [0, 1])
def test_short_prompts_go_first_in_every_other_turn_of_their_own_tenant(n_before: int) -> None:
    """Where tenants have steps in turn, every other step might always be the other tenant's."""
    turns = PrefillShares()
    longs = [(make(i, name, n_prompt=4000), 4000) for i, name in enumerate("ab")]
    for _ in range(n_before):
        shares(turns, longs, N_ALONE, N_ALONE)
    both = [*longs, *((make(i, name, n_prompt=60), 60) for i, name in enumerate("ab", 2))]
    found = [shares(turns, both, N_ALONE, N_ALONE) for _ in range(4)]
    assert sum("a2" in step for step in found) >= 1
    assert sum("b3" in step for step in found) >= 1


def test_but_not_before_one_of_higher_priority_nor_before_short_ones() -> None:
    wanted = [(make(0, "a", 1, n_prompt=4000), 4000), (make(1, "a", n_prompt=5), 5)]
    assert shares(PrefillShares(), wanted, 100) == {"a0": 100}
    wanted = [(make(0, "a", n_prompt=60), 60), (make(1, "a", n_prompt=5), 5)]
    assert shares(PrefillShares(), wanted, 60) == {"a0": 60}


def test_tenants_get_equal_parts_and_nothing_is_left_over() -> None:
    wanted = [(make(0, "a"), 4000), (make(1, "b"), 4000), (make(2, "c"), 10)]
    found = shares(PrefillShares(), wanted, 300)
    assert sum(found.values()) == 300
    assert found["c2"] == 10
    assert abs(found["a0"] - found["b1"]) <= 60


def test_where_little_is_left_tenants_take_turns_and_nobody_is_forgotten() -> None:
    turns = PrefillShares()
    wanted = [(make(i, f"t{i}"), 10_000) for i in range(10)]
    total = dict.fromkeys([s.request.request_id for s, _ in wanted], 0)
    for _ in range(50):
        found = shares(turns, wanted, N_QUANTUM + 8)
        assert sum(found.values()) == N_QUANTUM + 8
        for name, n in found.items():
            total[name] += n
    assert max(total.values()) < 1.5 * min(total.values())


@pytest.mark.parametrize("n_tokens", [0, -3])
def test_without_tokens_nobody_gets_any(n_tokens: int) -> None:
    wanted = [(make(0, "a"), 5), (make(1, "b"), 5)]
    assert shares(PrefillShares(), wanted, n_tokens) == {}
    assert shares(PrefillShares(), wanted[:1], n_tokens) == {}


def test_the_gap_is_twice_the_unloaded_99th_percentile() -> None:
    pacer = ChunkSizer()
    for i in range(1000):  # one step in fifty takes twice as long as predicted
        pacer.observe(0.01, 0.02 if i % 50 == 0 else 0.01, has_prefill=False)
    assert pacer.target_s(0.01) == pytest.approx(GAP_FACTOR * 0.02)
    assert pacer.target_s(0.03) == pytest.approx(GAP_FACTOR * 0.06)


def test_steps_with_prompts_that_are_late_make_the_pieces_smaller() -> None:
    pacer = ChunkSizer(gap_s=0.05)
    before = pacer.step_s(0.01)
    for _ in range(100):
        pacer.observe(0.03, 0.045, has_prefill=True)
    assert pacer.target_s(0.01) == 0.05
    assert pacer.step_s(0.01) == pytest.approx(0.05 / 1.5)
    assert pacer.step_s(0.01) < before


@pytest.mark.parametrize("n_steps", [16, 60, 256])
def test_one_late_step_of_few_is_no_99th_percentile(n_steps: int) -> None:
    pacer = ChunkSizer()
    for i in range(n_steps):
        pacer.observe(0.05, 0.5 if i == 3 else 0.05, has_prefill=False)
    assert pacer.target_s(0.05) == pytest.approx(GAP_FACTOR * 0.05)


def test_old_steps_are_forgotten() -> None:
    pacer = ChunkSizer()
    for _ in range(50):
        pacer.observe(0.01, 0.04, has_prefill=False)
    for _ in range(300):
        pacer.observe(0.01, 0.01, has_prefill=False)
    assert pacer.target_s(0.02) == pytest.approx(0.04)
    assert pacer.target_s(0.01) == STEP_FREE_S, "nobody notices less"


def test_pieces_of_long_prompts_are_not_smaller_than_pays() -> None:
    pacer = ChunkSizer()
    assert pacer.align(3, 999, N_PAST_LONG - 1, 1) == 3, "there attention is cheap"
    for n_tokens in (0, 1, N_PIECE, N_PIECE + 1):
        assert pacer.align(n_tokens, 999, N_PAST_LONG, 1) == 1 + N_PIECE
    assert pacer.align(130, 999, N_PAST_LONG, 1) == 130
    assert pacer.align(5, 999, 1000, 5) == 5 + N_PIECE
    assert pacer.align(200, 70, 1000, 1) == 70
    assert pacer.align(20, N_PIECE, 1000, 1) == 1 + N_ROWS_ALONE, "the end makes no piece"
    assert pacer.align(2, 5, 1000, 1) == 5
    assert ChunkSizer(0.05).align(4, 999, 1000, 1) == 4, "a target that was set is held"


class Forty(UnknownCost):
    """A cost model by which forty tokens of prompts fit beside any step."""

    n_observed = 1

    def predict(self, shape: StepShape) -> float:
        """Returns a hundredth of a second."""
        return 0.01

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns 40, or what there is."""
        return min(40, n_most)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_tenant_whose_pieces_are_small_goes_on_beside_a_heavier_one(weight: float) -> None:
    """A piece that grew to what attention computes together, and did not fit, was charged."""
    limits = dataclasses.replace(
        LIMITS, n_ctx=20_000, n_ctx_seq=5000, n_batch=512, n_ubatch=512, n_outputs_max=64
    )
    bench = Bench(limits, 0, {"cost": Forty()})
    bench.add("s", n_prompt=2, n_output_max=4000, tenant="stream")
    for _ in range(3):
        bench.step()
    heavy = bench.add("h", n_prompt=4000, tenant="heavy", weight=weight)
    light = bench.add("l", n_prompt=4000, tenant="light")
    while min(heavy.n_computed, light.n_computed) <= N_PAST_LONG:
        bench.step()
        assert len(bench.plans) < 400
    before = heavy.n_computed, light.n_computed
    for _ in range(40):
        bench.step()
    gained = heavy.n_computed - before[0], light.n_computed - before[1]
    assert sum(gained) > 600
    assert 0.5 * weight < gained[0] / gained[1] < 2 * weight


LONG = dataclasses.replace(
    LIMITS, n_seq_max=8, n_ctx=32_000, n_ctx_seq=4000, n_batch=512, n_ubatch=512, n_outputs_max=64
)


def lengths_alone(base_s: float, token_s: float) -> list[int]:
    """Returns the lengths of a prompt's pieces, alone, on a machine whose steps take so long."""
    world = World(LONG, base_s=base_s, token_s=token_s)
    world.add("w", n_prompt=3, n_output_max=10)
    world.run()
    world.add("p", n_prompt=2000, n_output_max=1)
    n_before = len(world.plans)
    world.run()
    return [len(e.tokens) for plan in world.plans[n_before:] for e in plan.entries]


def test_where_tokens_take_long_a_prompt_alone_is_cut_for_who_may_come() -> None:
    found = lengths_alone(0.02, 0.006)
    assert set(found[:-1]) == {N_ALONE}
    assert found[-1] == N_ALONE + 2000 % N_ALONE, "what was left made no piece of its own"


def test_where_a_step_takes_long_anyway_it_is_not_cut() -> None:
    found = lengths_alone(0.05, 0.0005)
    assert set(found[2:-1]) == {512}, "as soon as that is known"


def test_nor_where_nobody_would_notice() -> None:
    found = lengths_alone(1e-4, 1e-4)
    assert all(300 <= n <= 400 for n in found[2:-1]), "as many as STEP_FREE_S has room for"


def test_the_first_prompt_of_a_server_is_cut_before_it_generates() -> None:
    world = World(LONG, base_s=0.02, token_s=0.006)
    world.add("p", n_prompt=3900, n_output_max=1)
    world.run()
    found = [len(e.tokens) for plan in world.plans for e in plan.entries]
    assert found[:2] == [512, N_ALONE]
    assert found[10] <= 2 * N_ALONE


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
@pytest.mark.parametrize("tenant", ["long", "other"])
def test_a_short_prompt_waits_for_two_short_steps_behind_a_long_one(
    tenant: str, gap_s: float
) -> None:
    """Another tenant's gets a step of its own, whatever the gap: nobody generates."""
    world = World(LONG, base_s=0.02, token_s=0.006, gap_s=gap_s)
    world.add("w", n_prompt=3, n_output_max=10, tenant="long")
    world.run()
    world.add("p", n_prompt=2000, n_output_max=1, tenant="long")
    for _ in range(3):
        world.step()
    came_at = world.now
    short = world.add("q", n_prompt=8, n_output_max=1, tenant=tenant)
    while not short.n_output:
        world.step()
    own = 0.02 + 8 * 0.006
    shared = 0.02 + N_ALONE * 0.006
    assert world.now - came_at == pytest.approx(own if tenant == "other" else shared)


def test_two_tenants_long_prompts_go_on_in_turn() -> None:
    """In pieces that are no smaller than pays, and alike."""
    world = World(LONG, base_s=0.02, token_s=0.006)
    world.add("w", n_prompt=3, n_output_max=10)
    world.run()
    both = [world.add(name, n_prompt=1500, n_output_max=1, tenant=name) for name in "ab"]
    n_before = len(world.plans)
    for _ in range(20):
        world.step()
    lengths = [len(e.tokens) for plan in world.plans[n_before:] for e in plan.entries]
    assert set(lengths) == {N_ALONE}
    assert both[0].n_computed == both[1].n_computed == 10 * N_ALONE


def test_a_flood_of_short_prompts_takes_half_of_a_long_ones_time() -> None:
    world = World(LONG, base_s=0.02, token_s=0.006)
    world.add("w", n_prompt=3, n_output_max=10)
    world.run()
    long = world.add("p", n_prompt=2000, n_output_max=1)
    for i in range(62):
        world.add(f"q{i}", n_prompt=60, n_output_max=1)
        world.step()
    assert long.n_computed >= 30 * N_ALONE * 0.9
