"""A scheduler in virtual time.

A step takes 10 ms for each physical batch and 1 ms a token, a snapshot 30 ms either way, a copy
from slot to slot what a test says.
"""

from __future__ import annotations

import dataclasses

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import EngineLimits, SamplingOptions, StepPlan, StepTimings
from drafthouse_server.tenancy.fairness import Fairness

STEP_S, TOKEN_S, MOVE_S = 0.01, 0.001, 0.03
LIMITS = EngineLimits(
    draft_type="none",
    n_seq_max=3,
    n_ctx=3 * 4096,
    n_ctx_seq=4096,
    n_batch=512,
    n_ubatch=512,
    n_draft_max=0,
    n_outputs_max=3,
)


class LinearCost:
    """Knows what steps take."""

    n_observed = 1

    def reset(self) -> None:
        """Forgets nothing."""

    def predict(self, shape: StepShape) -> float:
        return STEP_S * shape.n_ubatches + TOKEN_S * shape.n_tokens

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns nothing."""

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        return n_most

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        return TOKEN_S * n_tokens


class Clocked:
    """A scheduler whose steps and snapshots take their time."""

    def __init__(
        self,
        limits: EngineLimits = LIMITS,
        *,
        is_recurrent: bool = False,
        fairness: Fairness | None = None,
        copied_s: float = 0.0,
    ) -> None:
        self.copied_s = copied_s
        self.engine = FakeEngine(limits, is_recurrent=is_recurrent)
        self.prefixes = PrefixCache(can_cut=not is_recurrent, n_host_bytes_max=1 << 30)
        self.scheduler = Scheduler(
            limits, FixedDraft(0), cost=LinearCost(), prefixes=self.prefixes, fairness=fairness
        )
        self.now = self.moved_s = 0.0
        self.n_computed = 0
        self.plans: list[StepPlan] = []

    def add(
        self,
        prompt: list[int],
        n_output: int = 2,
        tenant: str = "a",
        *,
        priority: int = 0,
        end_user: str = "",
    ) -> Sequence:
        sampler = self.engine.make_sampler(SamplingOptions(temperature=0, ignore_eos=True))
        name = f"{tenant}-{len(self.plans)}-{len(prompt)}"
        request = Request(
            name,
            prompt,
            tenant=tenant,
            n_output_max=n_output,
            priority=priority,
            end_user=end_user,
        )
        sequence = Sequence(request, sampler)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> StepPlan:
        self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        result = self.engine.step(plan)
        self.n_computed += sum(len(entry.tokens) for entry in plan.entries)
        n_moved = len(plan.saves) + n_read(plan)
        timings = StepTimings(
            total_s=STEP_S + TOKEN_S * result.n_batch_tokens,
            moves_s=MOVE_S * n_moved + self.copied_s * n_copied(plan),
        )
        self.now += timings.total_s + timings.moves_s
        self.moved_s += timings.moves_s
        self.scheduler.commit(dataclasses.replace(result, timings=timings), self.now)
        return plan

    def finish(self, sequence: Sequence) -> Sequence:
        for _ in range(2000):
            if sequence.terminal is not None:
                return sequence
            self.step()
        raise AssertionError("the sequence does not end")

    def turn(self, prompt: list[int], tenant: str = "a") -> list[int]:
        """Returns prompt and answer."""
        sequence = self.finish(self.add(prompt, tenant=tenant))
        return [*prompt, *sequence.output]

    def fill(self, tenant: str = "z") -> list[int]:
        """Takes all slots that are free or retained for short prompts; returns what is saved."""
        n_before = len(self.plans)
        n_free = LIMITS.n_seq_max - self.scheduler.n_running
        fillers = [self.add([200 + i] * 20, 2, tenant) for i in range(n_free)]
        for filler in fillers:
            self.finish(filler)
        return [seq_id for plan in self.plans[n_before:] for seq_id in plan.saves]


def n_read(plan: StepPlan) -> int:
    return sum(start.snapshot is not None for start in plan.starts)


def n_copied(plan: StepPlan) -> int:
    return sum(start.n_kept for start in plan.starts if start.source is not None)


def numbers(n: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 251 for i in range(n)]
