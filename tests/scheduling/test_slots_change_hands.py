"""Slots that are taken away, for other tenants and for priorities: how often, at what cost."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from tests.scheduling.test_scheduler import LIMITS, Bench
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.cost import StepCost
from drafthouse_server.scheduling.sequence import (
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    SequenceState,
)
from drafthouse_server.step import EngineLimits, SamplingOptions, StepTimings
from drafthouse_server.tenancy.fairness import Fairness

TWO = dataclasses.replace(LIMITS, n_seq_max=2, n_ctx=400, n_ctx_seq=200)


def bench(limits: EngineLimits = TWO, *, cost: StepCost | None = None, **fairness: Any) -> Bench:
    return Bench(
        limits, scheduler={"fairness": Fairness(**fairness), "cost": cost or UnknownCost()}
    )


def test_a_tenant_below_its_share_takes_the_youngest_stream_of_the_one_above() -> None:
    world = bench()
    old, young = (world.add(name, n_output_max=60, tenant="flood") for name in "ab")
    world.step()
    polite = world.add("p", n_output_max=4, tenant="polite")
    plan = world.step()
    assert list(plan.swap_outs) == [1]
    assert (old.state, young.state) == (SequenceState.RUNNING, SequenceState.PREEMPTED)
    assert polite.clock.first_token_at == world.now
    world.run()
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())
    assert (old.n_output, young.n_output, polite.n_output) == (60, 60, 4)
    assert (old.swap.n_preemptions, young.swap.n_preemptions, polite.swap.n_preemptions) == (
        0,
        1,
        0,
    )


def test_who_has_its_share_keeps_it() -> None:
    world = bench()
    world.add("a", n_output_max=60, tenant="one")
    world.add("b", n_output_max=60, tenant="two")
    for i in range(4):
        world.add(f"c{i}", n_output_max=20, tenant="one")
        world.add(f"d{i}", n_output_max=20, tenant="two")
    world.run(400)
    assert world.scheduler.counts.n_preempted == 0


def test_a_sequence_loses_its_slot_once_in_an_interval_at_most() -> None:
    world = bench(dataclasses.replace(TWO, n_seq_max=1), preempt_interval_s=30.0)
    low = world.add("a", n_output_max=90, tenant="one", priority=-1)
    preempted_at = []
    for i in range(100):
        if i % 5 == 3:
            world.add(f"h{i}", n_output_max=1, tenant="one", priority=1)
        if world.step().swap_outs:
            preempted_at.append(world.now)
    assert low.swap.n_preemptions == len(preempted_at) >= 2
    assert min(b - a for a, b in itertools.pairwise(preempted_at)) >= 30.0
    world.run()
    assert low.n_output == 90


def test_without_a_budget_of_saves_nobody_takes_a_slot() -> None:
    world = bench(save_bytes_per_s=0.0)
    for name in "ab":
        world.add(name, n_output_max=60, tenant="flood")
    world.step()
    world.add("p", n_output_max=4, tenant="polite")
    world.run()
    assert world.scheduler.counts.n_preempted == 0


def test_own_priorities_are_charged_for_what_they_push_out() -> None:
    world = bench(dataclasses.replace(TWO, n_seq_max=1), preempt_interval_s=0.0)
    world.add("a", n_prompt=40, n_output_max=50, tenant="one", priority=-1)
    counters = world.scheduler.counters
    for _ in range(6):
        world.step()
    world.add("h", n_output_max=1, tenant="one", priority=1)
    before, n_computed = counters.of("one"), world.scheduler.running(0).n_computed
    plan = world.step()
    assert plan.swap_outs
    prompt, output = 3, 1
    assert counters.of("one") - before == n_computed + prompt + 2 * output


def test_own_priorities_hold_up_no_other_tenants_stream_by_long_saves() -> None:
    """A stream that draws is saved whatever it costs, but not in a step of others'."""
    for has_other in (True, False):
        cost = StepCost()
        world = bench(TWO, cost=cost)
        sampling = SamplingOptions(temperature=0.8, seed=1)
        sampler = world.engine.make_sampler(sampling)
        low = Sequence(
            Request("low", [1] * 60, tenant="one", sampling=sampling, n_output_max=90, priority=-1),
            sampler,
        )
        world.scheduler.submit(low)
        world.add("b", n_output_max=90, tenant="two" if has_other else "one")
        # Of snapshots it is known that they take long.
        world.scheduler._preemption.swap._snapshots.observe(1, 1 << 22)
        for _ in range(12):
            world.now += 1e-3
            plan = world.scheduler.plan(world.now)
            world.engine.interrupt()  # no runs of steps
            result = world.engine.step(plan)
            result = dataclasses.replace(result, timings=StepTimings(total_s=1e-3))
            world.scheduler.commit(result, world.now + 1e-3)
        world.add("high", n_output_max=1, tenant="one", priority=1)
        assert bool(world.scheduler.plan(world.now + 1e-3).swap_outs) is not has_other


POOL = dataclasses.replace(LIMITS, n_seq_max=4, n_ctx=240, n_ctx_seq=100)
"""Slots that share their cells."""


def test_an_own_stream_that_frees_too_few_cells_hides_no_claim_on_another_tenant() -> None:
    world = bench(POOL)
    flood = [world.add(name, n_output_max=60, tenant="flood") for name in "abc"]
    small = world.add("s", n_output_max=10, tenant="one", priority=-1)
    world.step()
    high = world.add("h", n_prompt=20, n_output_max=40, tenant="one")
    world.step()
    assert [stream.swap.n_preemptions for stream in flood] == [0, 0, 1]
    assert (small.state, high.state) == (SequenceState.RUNNING, SequenceState.RUNNING)
    world.run(400)
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())


def test_of_own_streams_the_last_one_leaves_that_frees_enough_cells() -> None:
    world = bench(dataclasses.replace(POOL, n_seq_max=2, n_ctx=100))
    large = world.add("l", n_output_max=60, priority=-1)
    small = world.add("s", n_output_max=10, priority=-1)
    world.step()
    high = world.add("h", n_prompt=20, n_output_max=40)
    world.step()
    assert (large.state, small.state) == (SequenceState.PREEMPTED, SequenceState.RUNNING)
    assert high.state is SequenceState.RUNNING
    world.run(400)
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())


def crowded() -> tuple[Bench, Sequence, Sequence]:
    """Returns a flood on eight slots, and the next of two tenants that have a claim on some.

    The first one's tenant may have nothing saved for minutes: it was given a slot just now.
    """
    world = bench(dataclasses.replace(LIMITS, n_seq_max=8, n_ctx=800), save_bytes_per_s=1.0)
    world.scheduler._preemption.swap._snapshots.observe(1, 100)
    for i in range(8):
        world.add(f"f{i}", n_output_max=90, tenant="flood")
    for _ in range(4):
        world.step()
    world.add("a", n_output_max=90, tenant="busy")
    world.step()
    busy = world.add("b", n_output_max=4, tenant="busy")
    world.scheduler.counters.charge("flood", 100.0)
    world.scheduler.counters.charge("other", 50.0)
    other = world.add("o", n_output_max=4, tenant="other")
    assert world.scheduler._waiting.peek() is busy
    return world, busy, other


def test_a_tenant_whose_budget_of_saves_is_spent_holds_up_no_other_tenant() -> None:
    world, busy, other = crowded()
    assert len(world.step().swap_outs) == 1
    assert (busy.state, other.state) == (SequenceState.WAITING, SequenceState.RUNNING)
    world.run(400)
    assert all(isinstance(end, FinishEvent) for end in world.ends().values())


def test_a_slot_that_is_given_back_goes_to_the_next_all_the_same() -> None:
    world, busy, other = crowded()
    stream = next(s for s in world.scheduler.sequences() if s.request.tenant == "flood")
    world.scheduler.mark(stream, FinishReason.CANCELLED)
    world.step()
    assert (busy.state, other.state) == (SequenceState.RUNNING, SequenceState.RUNNING)


def test_the_slot_of_an_own_stream_goes_to_the_one_that_it_was_taken_for() -> None:
    """Whatever the tenant is charged for it: it would else have one slot fewer than before."""
    world = bench()
    low = world.add("l", n_prompt=30, n_output_max=60, tenant="one", priority=-1)
    world.add("o", n_output_max=60, tenant="other")
    for _ in range(6):
        world.step()
    next_other = world.add("p", n_output_max=60, tenant="other")
    high = world.add("h", n_output_max=4, tenant="one")
    counters = world.scheduler.counters
    ahead = counters.of("one") - counters.of("other")
    counters.charge("other", ahead + 1)
    world.step()
    assert low.state is SequenceState.PREEMPTED
    assert (high.state, next_other.state) == (SequenceState.RUNNING, SequenceState.WAITING)


def test_cells_are_taken_from_the_tenant_that_holds_most_for_the_weight_it_has_by_now() -> None:
    """Streams that began before an operator changed the weight count with the new one."""
    world = bench(dataclasses.replace(POOL, n_ctx=100))
    for tenant in ("one", "two"):  # so that little is reserved for those that follow
        world.add("w", n_prompt=1, n_output_max=1, tenant=tenant)
    world.run()
    first = world.add("a", n_prompt=40, n_output_max=30, tenant="one", weight=1.0)
    other = world.add("b", n_prompt=30, n_output_max=30, tenant="two")
    world.add("c", n_prompt=1, n_output_max=1, tenant="one", weight=4.0)
    world.run(400)
    assert (first.swap.n_preemptions, other.swap.n_preemptions > 0) == (0, True)
