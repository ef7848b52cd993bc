"""The scheduler at scale, in virtual time: thousands of requests a second, no model.

    python -m tests.support.simulate [--seconds 1] [--prefix-cache]     10,000 requests a second
    python -m tests.support.simulate --host            what a step costs Python, by sequences

The first prints a table for each of three loads. *idle*: four tenants of unlike rates and lengths,
each below its share. *flood*: the same, but one of them sends ten times as much, 10,000 requests a
second in all, more than the machine can do. *two floods*: two do, so that both always wait.

Everything is seeded; time is what the machine of `crowd` says that steps take, so the first table
is the same on every computer. The queue is the server's, with its limits: what it refuses is gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain

from tests.support.crowd import Machine

from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import Splitting, StepCost, shape_of
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import QueueFull, QuotaExceeded
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Request, Sequence, TokensEvent
from drafthouse_server.step import EngineLimits, SamplingOptions, StepPlan, StepResult
from drafthouse_server.tenancy.admission import Admission, Ticket
from drafthouse_server.tenancy.fairness import Fairness
from drafthouse_server.tenancy.tenants import Tenant

__all__ = [
    "FLOODED",
    "IDLE",
    "N_WAITING_TENANT_MAX",
    "TWO_FLOODS",
    "Simulation",
    "Stream",
    "Summary",
    "quantile",
]

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


N_WAITING_TENANT_MAX = 128
"""Requests of one tenant that may wait: the server's default."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One tenant's requests; they come at random (Poisson), unless they are regular."""

    tenant: str
    """Name."""
    rate: float
    """Requests a second."""
    n_prompt: int = 16
    """Tokens of each prompt."""
    n_output: int = 32
    """Tokens to generate, on average: from half of it to half as many more."""
    weight: float = 1.0
    """The tenant's share relative to others'."""
    is_regular: bool = False
    """Whether they come at equal distances."""


IDLE = (
    Stream("a", 300),
    Stream("b", 500, n_prompt=64),
    Stream("c", 800, n_output=16),
    Stream("d", 840),
)
"""Each below its share, which is a turn for every turn of the others."""
FLOODED = (*IDLE[:3], Stream("d", 8400))
"""One sends ten times as much: 10,000 requests a second in all."""
TWO_FLOODS = (
    Stream("a", 300),
    Stream("c", 700, n_output=16),
    Stream("d", 4500),
    Stream("e", 4500),
)
"""Two tenants that always wait, 10,000 requests a second in all."""


def quantile(values: Values[float], share: float) -> float:
    """Returns the value below which such a share of all is; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class Summary:
    """What came of a simulation."""

    n_submitted: int = 0
    """Requests."""
    n_ended: int = 0
    """Of these, ended."""
    n_refused: Counter[str] = field(default_factory=Counter)
    """Requests that found no place in the queue, by tenant."""
    service: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Units of service given, by tenant: computed prompts, outputs and rejected drafts."""
    n_preempted: Counter[str] = field(default_factory=Counter)
    """Times that a sequence lost its slot, by tenant."""
    n_tokens_by_tenant: Counter[str] = field(default_factory=Counter)
    """Tokens generated, by tenant."""
    n_steps: int = 0
    """Steps."""
    n_tokens: int = 0
    """Tokens generated."""
    waits_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Virtual seconds from submission to the first token, by tenant."""
    waits_steps: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Steps that have ended between submission and first token, that one included, by tenant."""
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
        has_prefix_cache: Whether ended sequences keep their slots for a while. Prompts here have
            nothing in common, so this shows what the cache costs, and nothing of its use.
        fairness: How tenants share the slots.
    """

    def __init__(
        self,
        n_seq_max: int,
        machine: Machine = _FAST,
        seed: int = 1,
        *,
        has_prefix_cache: bool = False,
        fairness: Fairness | None = None,
    ) -> None:
        self.limits = EngineLimits(
            "mtp", n_seq_max, n_seq_max * 512, 512, 2048, 512, 4, n_seq_max * 5
        )
        self.weights = (fairness or Fairness()).weights
        self.engine = FakeEngine(self.limits, acceptance=(2, 0, 3, 1, 4))
        self.cost = StepCost()
        self.policy = AdaptiveDraft(4)
        self.scheduler = Scheduler(
            self.limits,
            self.policy,
            cost=self.cost,
            splitting=Splitting.EQUAL,
            prefixes=PrefixCache(can_cut=True) if has_prefix_cache else None,
            fairness=fairness,
        )
        self.now = 0.0
        self.admission = Admission(256, 1.0, clock=lambda: self.now)
        self.summary = Summary()
        self._machine = machine
        self._random = random.Random(seed)
        self._submitted_at: dict[str, tuple[float, int]] = {}  # time, and steps until then
        self._tickets: dict[str, Ticket] = {}
        self._slots: dict[int, Sequence] = {}

    def ask(
        self,
        tenant: str,
        n_prompt: int = 8,
        n_output: int = 8,
        at: float | None = None,
        weight: float = 1.0,
    ) -> bool:
        """Submits a request as a client does. Returns whether it was let in."""
        asking = Tenant(tenant, weight, n_waiting_max=N_WAITING_TENANT_MAX)
        try:
            ticket = self.admission.admit(asking)
        except (QueueFull, QuotaExceeded):
            self.summary.n_refused[tenant] += 1
            return False
        name = self.submit(tenant, n_prompt, n_output, at, weight)
        self._tickets[name] = ticket
        return True

    def submit(
        self,
        tenant: str,
        n_prompt: int = 8,
        n_output: int = 8,
        at: float | None = None,
        weight: float = 1.0,
    ) -> str:
        """Lets one more request wait; it came at some time during the last step, or now.

        Returns:
            Its name.
        """
        name = f"{tenant}-{self.summary.n_submitted}"
        prompt = [self._random.randrange(32, 127) for _ in range(n_prompt)]
        sampler = self.engine.make_sampler(_GREEDY)
        sequence = Sequence(
            Request(
                name,
                prompt,
                tenant=tenant,
                weight=weight,
                n_output_max=n_output,
                received_at=self.now if at is None else at,
            ),
            sampler,
        )
        self.scheduler.submit(sequence)
        self._submitted_at[name] = sequence.request.received_at, self.summary.n_steps
        self.summary.n_submitted += 1
        return name

    def step(self) -> StepPlan:
        """Runs one step and lets its time pass."""
        started = time.perf_counter()
        self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        planned = time.perf_counter()
        self._note_moves(plan)
        self.engine.interrupt()  # somebody always comes
        result = self.engine.step(plan)
        shape = shape_of(plan.entries, result.entries, self._machine.splitting, 512)
        timings = self._machine.timings(shape, [entry.n_draft for entry in plan.entries])
        self.now += timings.total_s
        resumed = time.perf_counter()
        events = self.scheduler.commit(dataclasses.replace(result, timings=timings), self.now)
        self.summary.plan_s += planned - started + time.perf_counter() - resumed
        self.summary.n_steps += 1
        self._count_service(plan, result)
        for sequence, event in events:
            if isinstance(event, TokensEvent):
                self.summary.n_tokens += len(event.tokens)
                self.summary.n_tokens_by_tenant[sequence.request.tenant] += len(event.tokens)
                submitted = self._submitted_at.pop(sequence.request.request_id, None)
                if submitted is not None:
                    at, n_steps = submitted
                    self.summary.waits_s[sequence.request.tenant].append(self.now - at)
                    n_steps = self.summary.n_steps - n_steps
                    self.summary.waits_steps[sequence.request.tenant].append(n_steps)
            elif sequence.terminal is event:
                self.summary.n_ended += 1
                ticket = self._tickets.pop(sequence.request.request_id, None)
                if ticket is not None:
                    ticket.give_back()
        return plan

    def _note_moves(self, plan: StepPlan) -> None:
        """Notes who got a slot and who lost one, as the server's loop does."""
        for seq_id in plan.swap_outs:
            sequence = self._slots[seq_id]
            self.summary.n_preempted[sequence.request.tenant] += 1
            self._move(sequence, has_slot=False)
        for start in plan.starts:
            sequence = self._slots[start.seq_id] = self.scheduler.running(start.seq_id)
            self._move(sequence, has_slot=True)

    def _move(self, sequence: Sequence, *, has_slot: bool) -> None:
        ticket = self._tickets.get(sequence.request.request_id)
        if ticket is not None:
            ticket.move(has_slot=has_slot)

    def _count_service(self, plan: StepPlan, result: StepResult) -> None:
        """Counts what was really computed, of prompts once."""
        weights, service = self.weights, self.summary.service
        for part, entry in zip(plan.entries, result.entries, strict=True):
            sequence = self._slots[entry.seq_id]
            amount = len(entry.tokens) * weights.output
            amount += (entry.n_drafted - entry.n_accepted) * weights.rejected
            if part.n_past < sequence.n_prompt and not sequence.swap.n_preemptions:
                amount += len(part.tokens) * weights.prompt
            service[sequence.request.tenant] += amount

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

    def run_streams(self, streams: Values[Stream], seconds: float) -> Summary:
        """Submits several tenants' requests for some virtual time.

        Requests that are still without a token then count with the time that they have waited.
        """
        weights = {stream.tenant: stream.weight for stream in streams}
        arrivals = merge(*(self._arrivals(stream, seconds) for stream in streams))
        end = (seconds, "", 0, 0)
        for at, tenant, n_prompt, n_output in chain(arrivals, [end]):
            while self.now < at and not self.scheduler.is_idle:
                self.step()
            self.now = max(self.now, at)
            if not tenant:
                break
            self.ask(tenant, n_prompt, n_output, at, weights[tenant])
        for name, (submitted_at, _) in self._submitted_at.items():
            self.summary.waits_s[name.partition("-")[0]].append(self.now - submitted_at)
        self.summary.elapsed_s = self.now
        return self.summary

    def _arrivals(self, stream: Stream, seconds: float) -> list[tuple[float, str, int, int]]:
        """Returns when a tenant's requests come, and what they ask."""
        chance = random.Random(stream.tenant)

        def pause_s() -> float:
            return 1 / stream.rate if stream.is_regular else chance.expovariate(stream.rate)

        found, at = [], pause_s()
        while at < seconds:
            n_output = chance.randint(stream.n_output // 2, stream.n_output * 3 // 2)
            found.append((at, stream.tenant, stream.n_prompt, n_output))
            at += pause_s()
        return found


def _print_streams(
    name: str, streams: Values[Stream], seconds: float, *, has_prefix_cache: bool
) -> None:
    simulation = Simulation(64, has_prefix_cache=has_prefix_cache)
    found = simulation.run_streams(streams, seconds)
    rate = sum(stream.rate for stream in streams)
    print(
        f"\n{name}: {rate:.0f} requests a second for {seconds:g} virtual s;"
        f" {found.n_steps} steps, {found.n_tokens / found.elapsed_s:.0f} tokens/s;"
        f" scheduler {found.plan_s / found.n_steps * 1e6:.0f} us a step here"
    )
    names = ("requests/s", "prompt", "output", "served/s", "tokens/s", "refused")
    print("tenant" + "".join(f"{name:>11}" for name in names) + "   TTFT ms: p50     p95     max")
    for stream in streams:
        waits = found.waits_s[stream.tenant]
        times = [quantile(waits, share) * 1e3 for share in (0.5, 0.95, 1.0)]
        print(
            f"{stream.tenant:6}{stream.rate:11.0f}{stream.n_prompt:11}{stream.n_output:11}"
            f"{len(waits) / found.elapsed_s:11.0f}"
            f"{found.n_tokens_by_tenant[stream.tenant] / found.elapsed_s:11.0f}"
            f"{found.n_refused[stream.tenant]:11}      "
            f"{times[0]:10.2f}{times[1]:8.2f}{times[2]:8.2f}"
        )


def _print_host() -> None:
    """Prints what a step costs Python, by running and waiting sequences."""
    print("us a step of reap, plan and commit (the best of 20 rounds)")
    print("running " + "".join(f"{f'{n} waiting':>14}" for n in _WAITING))
    for n_running in (1, 8, 16, 32, 64):
        row = [_host_us(n_running, n_waiting) for n_waiting in _WAITING]
        print(f"{n_running:7} " + "".join(f"{value:14.0f}" for value in row), flush=True)


_WAITING = (0, 100, 1000, 10_000)


def _host_us(n_running: int, n_waiting: int) -> float:
    simulation = Simulation(n_running)
    for i in range(n_running + n_waiting):
        simulation.submit(f"t{i % 4}", n_output=480)
    times = []
    for _ in range(20):
        before = simulation.summary.plan_s
        for _ in range(6):
            simulation.step()
        times.append((simulation.summary.plan_s - before) / 6 * 1e6)
    return min(times)


def main() -> None:
    """Prints the simulations' figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of virtual time")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--host", action="store_true")
    arguments = parser.parse_args()
    if arguments.host:
        _print_host()
        return
    for name, streams in (("idle", IDLE), ("flood", FLOODED), ("two floods", TWO_FLOODS)):
        _print_streams(name, streams, arguments.seconds, has_prefix_cache=arguments.prefix_cache)


if __name__ == "__main__":
    main()
