"""Short prompts of tenants that have nothing running: who gets a step alone, and for how long."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from tests.scheduling.test_scheduler import LIMITS, Bench
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.cost import CostModel, StepCost, StepShape
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.sequence import FinishEvent
from drafthouse_server.step import EngineLimits, StepPlan, StepTimings
from drafthouse_server.tenancy.fairness import Fairness

MANY = dataclasses.replace(
    LIMITS, n_seq_max=8, n_ctx=6400, n_ctx_seq=800, n_batch=64, n_ubatch=64, n_outputs_max=64
)
STEP_S, TOKEN_S = 0.002, 0.001
CREDIT_S, TIME_SHARE = 0.1, 0.05


class World(Bench):
    """Steps that take something, and something for each token."""

    def __init__(
        self,
        limits: EngineLimits = MANY,
        *,
        cost: CostModel | None = None,
        is_recurrent: bool = False,
        base_s: float = STEP_S,
        token_s: float = TOKEN_S,
        **scheduler: Any,
    ) -> None:
        options = {"cost": cost or StepCost()} | scheduler
        self._base_s, self._token_s = base_s, token_s
        super().__init__(limits, 2, options, is_recurrent=is_recurrent)
        self.took_s: list[float] = []

    def step(self) -> StepPlan:
        self.events += self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        result = self.engine.step(plan)
        n_tokens = sum(len(entry.tokens) + entry.n_draft for entry in plan.entries)
        took_s = self._base_s + self._token_s * n_tokens * plan.n_steps
        timings = StepTimings(0.0, took_s, 0.0, 0.0, took_s)
        self.now += took_s
        self.took_s.append(took_s)
        self.events += self.scheduler.commit(dataclasses.replace(result, timings=timings), self.now)
        return plan


class CheapPrompts(UnknownCost):
    """Says that a step takes little for each token, as where prompts are computed in one pass."""

    n_observed = 1

    def predict(self, shape: StepShape) -> float:
        return TOKEN_S / 10 * shape.n_tokens

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        return TOKEN_S / 10 * n_tokens


class SlowPieces(CheapPrompts):
    """Says that beside running streams there is no time for prompts: they get the least pieces."""

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        return 0


def flooded(n: int = 6, **world: Any) -> World:
    """Returns a world that knows short steps, in which a tenant has so many streams that go on."""
    flood = World(**world)
    flood.add("w", n_prompt=3, n_output_max=10, tenant="first")
    flood.run()
    for i in range(n):
        flood.add(f"f{i}", n_output_max=700, tenant="flood")
    for _ in range(20):
        flood.step()
    return flood


def slots(plan: StepPlan) -> list[int]:
    return [entry.seq_id for entry in plan.entries]


def test_a_newcomer_s_prompt_is_computed_before_the_streams_go_on() -> None:
    world = flooded()
    polite = world.add("p", n_prompt=5, n_output_max=3, tenant="polite")
    assert slots(world.step()) == [6]
    assert polite.n_output == 1
    assert slots(world.step()) == list(range(7))


def test_one_that_has_to_take_a_slot_gets_its_step_too() -> None:
    world = flooded(8)
    polite = world.add("p", n_prompt=5, n_output_max=1, tenant="polite")
    plan = world.step()
    assert len(plan.swap_outs) == 1
    assert slots(plan) == list(plan.swap_outs)
    assert polite.n_output == 1


def test_a_tenant_whose_streams_go_on_gets_no_step_of_its_own() -> None:
    world = flooded()
    world.add("p", n_prompt=5, tenant="flood")
    assert slots(world.step()) == list(range(7))


def test_nor_does_a_prompt_that_would_take_longer_than_half_a_step() -> None:
    world = flooded()
    world.add("p", n_prompt=40, tenant="polite")
    assert len(slots(world.step())) == 7


def test_nor_one_beside_streams_that_it_would_hold_up_for_long() -> None:
    world = flooded(1)
    world.add("p", n_prompt=5, tenant="polite")
    assert len(slots(world.step())) == 2


def test_nor_a_tenant_that_was_served_more() -> None:
    world = flooded(fairness=Fairness(quantum=10.0))
    world.add("q", n_prompt=1, n_output_max=1, tenant="polite")
    assert slots(world.step()) == [6]
    world.step()
    world.scheduler.counters.charge("polite", 10_000.0)
    world.add("p", n_prompt=5, tenant="polite")
    assert len(slots(world.step())) == 7


def test_nor_anybody_while_nothing_is_known_of_steps() -> None:
    world = flooded(cost=UnknownCost())
    world.add("p", n_prompt=5, tenant="polite")
    assert len(slots(world.step())) == 7


def test_nor_one_that_finds_room_for_a_part_of_its_prompt_alone() -> None:
    world = flooded()
    polite = world.add("p", n_prompt=5, tenant="polite")
    streams = [s for s in world.scheduler.sequences() if s.request.tenant == "flood"]
    choose = world.scheduler._newcomers.choose
    assert choose(streams, [polite], 4) == []
    assert choose(streams, [polite], 5) == [polite]


def test_nor_one_that_a_gap_target_leaves_no_time_for() -> None:
    world = flooded(gap_s=0.022)
    world.add("p", n_prompt=5, tenant="polite")
    assert len(slots(world.step())) == 7


def test_the_shortest_prompts_get_it_where_others_are_too_long() -> None:
    world = flooded()
    world.add("p", n_prompt=40, tenant="wordy")
    world.add("q", n_prompt=3, tenant="polite")
    (seq_id,) = slots(world.step())
    assert world.scheduler._slots.running[seq_id].request.tenant == "polite"


def test_there_are_never_two_such_steps_in_a_row() -> None:
    world = flooded()
    n_before = len(world.plans)
    for i in range(60):
        world.add(f"p{i}", n_prompt=2, n_output_max=1, tenant=f"polite{i}")
        world.step()
    alone = [min(slots(plan)) >= 6 for plan in world.plans[n_before:]]
    assert sum(alone) > 5
    assert not any(first and then for first, then in itertools.pairwise(alone))


def test_a_machine_that_stood_still_in_such_a_step_does_not_end_them() -> None:
    world = flooded(base_s=STEP_S, token_s=10 * TOKEN_S)
    world.add("p", n_prompt=2, n_output_max=1, tenant="polite")
    world._base_s = 3600.0
    assert slots(world.step()) == [6]
    world._base_s = STEP_S
    resumed_at = world.now
    while world.now < resumed_at + 25:
        world.step()
    world.add("q", n_prompt=2, n_output_max=1, tenant="polite")
    assert slots(world.step()) == [6]


def test_a_prompt_of_a_recurrent_target_is_computed_to_its_end_in_that_step() -> None:
    """Not up to a checkpoint alone, for a next turn: it would give no token before two steps."""
    world = flooded(
        limits=dataclasses.replace(MANY, n_batch=128, n_ubatch=128),
        cost=CheapPrompts(),
        prefixes=PrefixCache(can_cut=False, n_host_bytes_max=1 << 20),
        is_recurrent=True,
    )
    polite = world.add("p", n_prompt=5 * BLOCK_SIZE, n_output_max=3, tenant="polite")
    assert slots(world.step()) == [6]
    assert polite.n_output == 1


@pytest.mark.parametrize("n_cells", [60, 75, 90, 120])
def test_in_a_shared_pool_that_is_full_somebody_goes_on(n_cells: int) -> None:
    """A step without entries would be the last one: the engine's thread waits for news then."""
    limits = dataclasses.replace(MANY, n_ctx=n_cells, n_ctx_seq=n_cells, n_seq_max=6)
    world = World(limits)
    world.add("w", n_prompt=3, n_output_max=10, tenant="first")
    world.run()
    for i in range(4):
        world.add(f"f{i}", n_prompt=2, n_output_max=n_cells // 2, tenant="flood")
    for i in range(400):
        if i % 9 == 5:
            world.add(f"p{i}", n_prompt=3 + i % 13, n_output_max=2, tenant=f"polite{i % 3}")
        plan = world.step()
        assert plan.entries or not world.scheduler.sequences(), i
    world.run(3000)
    assert not world.scheduler.sequences()


@pytest.mark.parametrize("n_prompt", [66, 69, 72])
def test_the_rest_of_a_prompt_takes_no_last_cells_that_are_too_few_for_it(n_prompt: int) -> None:
    """A stream outgrows what was expected of it while another tenant's prompt comes piece by piece.

    The rest of the prompt is short in the end, but longer than what is left of the pool. A step of
    its own would take that all the same, and each step after it would be the prompt's and empty.
    """
    limits = dataclasses.replace(MANY, n_ctx=110, n_ctx_seq=110, n_seq_max=2)
    world = World(limits, cost=SlowPieces())
    for tenant in ("flood", "polite"):  # so that little is reserved for those that follow
        world.add("w", n_prompt=1, n_output_max=1, tenant=tenant)
    world.run()
    stream = world.add("f", n_prompt=2, n_output_max=100, tenant="flood")
    for _ in range(5):
        world.step()
    polite = world.add("p", n_prompt=n_prompt, n_output_max=2, tenant="polite")
    for _ in range(300):
        if world.scheduler.is_idle:
            break
        plan = world.step()
        assert plan.entries or not world.scheduler.sequences(), "all streams wait for ever"
    assert (stream.n_output, polite.n_output) == (100, 2)
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())


@pytest.mark.parametrize("n_tenants", [1, 5])
def test_newcomers_steps_take_a_twentieth_of_the_time(n_tenants: int) -> None:
    world = flooded()
    began, n_before = world.now, len(world.plans)
    for i in range(600):
        tenant = f"polite{i % n_tenants}"
        world.add(f"p{i}", n_prompt=2, n_output_max=1, tenant=tenant)
        world.step()
    taken = zip(world.plans[n_before:], world.took_s[n_before:], strict=True)
    alone_s = [took_s for plan, took_s in taken if slots(plan) and min(slots(plan)) >= 6]
    assert len(alone_s) > 20
    longest_s = max(alone_s)
    assert sum(alone_s) <= CREDIT_S + TIME_SHARE * (world.now - began) + longest_s
    world.run(3000)
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())
