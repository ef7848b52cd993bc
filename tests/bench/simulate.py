"""The scheduler at scale, in virtual time: thousands of requests a second, no model.

    python -m tests.bench.simulate [--rate 10000] [--seconds 5]

Everything is seeded; time is what the machine of `crowd` says that steps take.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.bench.crowd import Machine

from drafthouse_server.fake import FakeEngine
from drafthouse_server.scheduler import Scheduler
from drafthouse_server.sequence import Sequence, TokensEvent
from drafthouse_server.speculation import AdaptiveDraft
from drafthouse_server.step import EngineLimits, SamplingOptions, StepPlan
from drafthouse_server.step_cost import Splitting, StepCost, shape_of

__all__ = ["Simulation", "Summary"]

_GREEDY = SamplingOptions(temperature=0, ignore_eos=True)

_FAST = Machine(
    draft_pass_s=2e-5,
    draft_token_s=2e-7,
    ubatch_s=1e-4,
    token_s=1e-7,
    wide_token_s=1e-7,
    process_token_s=1e-8,
    sample_s=1e-8,
)
"""A machine of the future: some hundred thousand steps' tokens a second."""


@dataclass(slots=True)
class Summary:
    """What came of a simulation."""

    n_submitted: int = 0
    """Requests."""
    n_ended: int = 0
    """Of these, ended."""
    n_steps: int = 0
    """Steps."""
    n_tokens: int = 0
    """Tokens generated."""
    waits_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Virtual seconds from submission to the first token, by tenant."""
    plan_s: float = 0.0
    """Real seconds of the scheduler: reap, plan and commit."""
    elapsed_s: float = 0.0
    """Virtual seconds."""


class Simulation:
    """One scheduler, a fake engine, and virtual time.

    Args:
        n_seq_max: Slots.
        machine: What steps take.
        seed: Of prompts and lengths.
    """

    def __init__(self, n_seq_max: int, machine: Machine = _FAST, seed: int = 1) -> None:
        self.limits = EngineLimits(
            "mtp", n_seq_max, n_seq_max * 512, 512, 2048, 512, 4, n_seq_max * 5
        )
        self.engine = FakeEngine(self.limits, acceptance=(2, 0, 3, 1, 4))
        self.cost = StepCost()
        self.policy = AdaptiveDraft(4, self.cost, machine.splitting)
        self.scheduler = Scheduler(
            self.limits, self.policy, cost=self.cost, splitting=Splitting.STREAMS
        )
        self.now = 0.0
        self.summary = Summary()
        self._machine = machine
        self._random = random.Random(seed)
        self._submitted_at: dict[str, float] = {}

    def submit(self, tenant: str, n_prompt: int = 8, n_output: int = 8) -> None:
        """Lets one more request wait."""
        name = f"{tenant}-{self.summary.n_submitted}"
        prompt = [self._random.randrange(32, 127) for _ in range(n_prompt)]
        sampler = self.engine.make_sampler(_GREEDY)
        sequence = Sequence(name, prompt, sampler, tenant=tenant, n_output_max=n_output)
        self.scheduler.submit(sequence)
        self._submitted_at[name] = self.now
        self.summary.n_submitted += 1

    def step(self) -> StepPlan:
        """Runs one step and lets its time pass."""
        started = time.perf_counter()
        self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        planned = time.perf_counter()
        result = self.engine.step(plan)
        shape = shape_of(plan.entries, result.entries, self._machine.splitting, 512)
        timings = self._machine.timings(shape)
        self.now += timings.total_s
        resumed = time.perf_counter()
        events = self.scheduler.commit(dataclasses.replace(result, timings=timings), self.now)
        self.summary.plan_s += planned - started + time.perf_counter() - resumed
        self.summary.n_steps += 1
        for sequence, event in events:
            if isinstance(event, TokensEvent):
                self.summary.n_tokens += len(event.tokens)
                submitted_at = self._submitted_at.pop(sequence.request_id, None)
                if submitted_at is not None:
                    self.summary.waits_s[sequence.tenant].append(self.now - submitted_at)
            elif sequence.terminal is event:
                self.summary.n_ended += 1
        return plan

    def run(self, rate: float, seconds: float, tenants: tuple[str, ...]) -> Summary:
        """Submits requests evenly for some virtual time, and runs until all have ended.

        Args:
            rate: Requests a second.
            seconds: How long they come.
            tenants: In turns.
        """
        n_wanted = int(rate * seconds)
        while self.summary.n_ended < n_wanted:
            n_due = min(n_wanted, int(self.now * rate) + 1)
            for i in range(self.summary.n_submitted, n_due):
                self.submit(tenants[i % len(tenants)])
            if self.scheduler.is_idle:
                self.now = (self.summary.n_submitted + 1) / rate
                continue
            self.step()
        self.summary.elapsed_s = self.now
        return self.summary


def main() -> None:
    """Prints a simulation's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    found = Simulation(64).run(arguments.rate, arguments.seconds, ("a", "b", "c", "d"))
    served = Counter({tenant: len(waits) for tenant, waits in found.waits_s.items()})
    longest = max(max(waits) for waits in found.waits_s.values())
    print(f"{found.n_ended} requests in {found.elapsed_s:.3f} virtual s, {found.n_steps} steps")
    print(f"{found.n_tokens} tokens; served {dict(served)}; longest wait {longest:.4f} s")
    print(f"scheduler: {found.plan_s / found.n_steps * 1e6:.0f} us a step")


if __name__ == "__main__":
    main()
