"""Streams whose grammars take long beside other tenants': who sits out, and what it costs whom."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from tests.scheduling.test_scheduler import LIMITS, Bench

from drafthouse_server.scheduling.pacing import N_MASK_FREE, STEP_FREE_S
from drafthouse_server.scheduling.sequence import FinishReason, Sequence
from drafthouse_server.step import EngineLimits, SamplingOptions, StepPlan, StepTimings

MANY = dataclasses.replace(
    LIMITS, n_seq_max=8, n_ctx=6400, n_ctx_seq=800, n_batch=64, n_ubatch=64, n_outputs_max=64
)
GRAMMAR = SamplingOptions(temperature=0.0, grammar="root ::= [a-z]+")
STEP_S, MASK_S = 0.002, 0.1


class Masked(Bench):
    """Steps that take longer for each token that a grammar decides."""

    def __init__(
        self,
        n_mask_work: int = 10_000_000,
        mask_s: float = MASK_S,
        limits: EngineLimits = MANY,
    ) -> None:
        super().__init__(limits)
        self.n_mask_work, self.mask_s = n_mask_work, mask_s
        self.masks_s = self.others_s = 0.0
        self.n_tokens = Counter[str]()
        self.costly = list[list[str]]()
        """Requests with a grammar that had their part, by step."""

    def n_costly(self) -> int:
        """Makes a step; returns how many with a grammar had their part in it."""
        self.step()
        return len(self.costly[-1])

    def step(self) -> StepPlan:
        self.events += self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        result = self.engine.step(plan)
        sample_s = 0.0
        self.costly.append([])
        for entry in result.entries:
            request = self.scheduler.running(entry.seq_id).request
            self.n_tokens[request.request_id] += len(entry.tokens)
            if request.sampling.grammar and entry.tokens:
                self.costly[-1].append(request.request_id)
                entry.n_mask_work = self.n_mask_work
                sample_s += self.mask_s
        timings = StepTimings(0.0, STEP_S, 0.0, sample_s, STEP_S + sample_s)
        self.masks_s += sample_s
        self.others_s += STEP_S
        self.now += timings.total_s
        self.events += self.scheduler.commit(dataclasses.replace(result, timings=timings), self.now)
        return plan


def crowd(
    n_mask_work: int = 10_000_000, mask_s: float = MASK_S, limits: EngineLimits = MANY
) -> tuple[Masked, list[Sequence], Sequence]:
    """Returns a world in which one tenant's grammars are known to be costly, beside a stream."""
    world = Masked(n_mask_work, mask_s, limits)
    streams = [
        world.add(f"g{i}", n_output_max=700, tenant="costly", sampling=GRAMMAR) for i in range(4)
    ]
    other = world.add("x", n_output_max=700, tenant="other")
    for _ in range(3):
        world.step()
    return world, streams, other


def test_masks_take_a_quarter_of_the_time_and_one_stream_a_step() -> None:
    world, streams, other = crowd()
    # All of them were in the first step, before anything was known.
    n_first = len(world.costly[0])
    assert n_first == len(streams)
    n_costly, n_steps = list[int](), 2000
    for _ in range(n_steps):
        if other.terminal is not None:
            other = world.add("x", n_output_max=700, tenant="other")
        n_costly.append(world.n_costly())
    assert max(n_costly) == 1
    assert world.n_tokens["x"] >= n_steps, "who has no grammar is in every step"
    all_s = world.masks_s + world.others_s
    assert all_s / 5 <= world.masks_s <= all_s / 4 + (n_first + 1) * MASK_S
    counts = [world.n_tokens[stream.request.request_id] for stream in streams]
    assert max(counts) - min(counts) <= 1, "in turn"


def test_a_tenant_alone_is_held_up_by_nothing() -> None:
    world = Masked()
    for i in range(4):
        world.add(f"g{i}", n_output_max=700, tenant="costly", sampling=GRAMMAR)
    assert all(world.n_costly() == 4 for _ in range(20))


def test_who_comes_back_waits_for_a_short_step() -> None:
    world, streams, other = crowd(mask_s=STEP_FREE_S / 2.5)
    world.scheduler.mark(other, FinishReason.CANCELLED)
    n_costly = [world.n_costly() for _ in range(400)]
    assert n_costly[:100] == [2] * 100, "as many as fit"
    assert n_costly[-1] == len(streams), "nobody has come for a while"
    world, streams, other = crowd()
    world.scheduler.mark(other, FinishReason.CANCELLED)
    assert world.n_costly() == 1, "one in any case"
    for stream in streams:
        world.scheduler.mark(stream, FinishReason.CANCELLED)
    for i in range(4):
        world.add(f"n{i}", n_output_max=1, tenant="costly", sampling=GRAMMAR)
    assert [world.n_costly() for _ in range(4)] == [1] * 4, "new ones are thought to be as the last"


@pytest.mark.parametrize("n_ctx", [MANY.n_ctx, MANY.n_ctx - 1], ids=["own cells", "shared cells"])
def test_prompts_of_others_come_without_masks_where_they_find_cells(n_ctx: int) -> None:
    world, _, other = crowd(limits=dataclasses.replace(MANY, n_ctx=n_ctx))
    world.scheduler.mark(other, FinishReason.CANCELLED)
    world.step()
    world.add("y", n_prompt=200, n_output_max=2, tenant="other")
    n_costly = [world.n_costly() for _ in range(3)]
    assert n_costly == [0 if n_ctx == MANY.n_ctx else 1] * 3
    assert all(len(plan.entries[-1].tokens) > 1 for plan in world.plans[-3:])


def test_cheap_grammars_sit_nothing_out() -> None:
    world, streams, _ = crowd(N_MASK_FREE)
    assert all(world.n_costly() == len(streams) for _ in range(20))


def test_new_streams_of_a_tenant_with_costly_grammars_come_one_by_one() -> None:
    world, streams, _ = crowd()
    for stream in streams:
        world.scheduler.mark(stream, FinishReason.CANCELLED)
    for i in range(4):
        world.add(f"n{i}", n_output_max=1, tenant="costly", sampling=GRAMMAR)
    assert max(world.n_costly() for _ in range(650)) == 1
    assert world.n_tokens["n0"] == 1


def test_who_sits_out_does_not_fall_behind_and_takes_no_slot_for_it() -> None:
    world, _, _ = crowd()
    counters = world.scheduler.counters
    before = counters.of("costly") - counters.of("other")
    for _ in range(500):
        world.step()
    assert counters.of("costly") - counters.of("other") >= before - 1e-6
    assert world.scheduler.counts.n_preempted == 0
