"""A crowd of prompts that begin alike, drawn at random, on an engine whose arithmetic is exact.

Slots are copied, cut, moved to host memory and back, preempted and waited with, in whatever order,
and no token may differ from that of alone, drawn ones neither.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.cost import CostModel, StepCost
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling import sequence as scheduled
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import FinishEvent, FinishReason, Request
from drafthouse_server.step import SamplingOptions, StepPlan
from drafthouse_server.tenancy.fairness import Fairness

__all__ = ["N_BATCH", "N_SLOTS", "check_crowd"]

N_SLOTS, N_BATCH = 6, 96
N_ROUNDS = 30
HASTY = Fairness(quantum=20.0, aging_s=3.0, preempt_interval_s=0.05, save_bytes_per_s=1e12)
GREEDY = SamplingOptions(temperature=0, ignore_eos=True)
KNOBS: dict[str, tuple[object, ...]] = {
    "temperature": (1e-5, 0.8, 10.0),
    "top_k": (0, 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-6, 0.5),
    "top_n_sigma": (0.5, 3.0),
    "penalty_last_n": (0, -1),
    "penalty_repeat": (0.5, 1.5),
    "penalty_frequency": (-0.5, 2.0),
    "dry_multiplier": (0.8, 100.0),
    "dry_base": (1.0, 10.0),
    "dry_allowed_length": (0, 1),
    "dry_breakers": (("e", "\n"),),
    "xtc_probability": (0.5, 1.0),
    "xtc_threshold": (0.0, 0.5),
    "logprobs": (True,),
}
"""What is drawn of how tokens are chosen: mostly the ends of what is allowed."""


class Crowd:
    """A scheduler over an engine, in a time of its own."""

    def __init__(self, engine: LlamaEngine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._now = 0.0
        self.scheduler = scheduler
        self.sequences: list[scheduled.Sequence] = []

    def submit(self, prompt: list[int], n_output: int, options: SamplingOptions, who: str) -> None:
        request = Request(
            f"r{len(self.sequences)}", prompt, sampling=options, n_output_max=n_output, tenant=who
        )
        sequence = scheduled.Sequence(request, self._engine.make_sampler(options))
        self.sequences.append(sequence)
        self.scheduler.submit(sequence)

    def step(self) -> None:
        self._now += 0.02
        self.scheduler.reap(self._now)
        result = self._engine.step(self.scheduler.plan(self._now))
        self.scheduler.commit(result, self._now + 0.01)

    def finish(self) -> None:
        for _ in range(5000):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("somebody is never served")


def drawn_crowd(engine: LlamaEngine, chance: random.Random) -> Crowd:
    limits, costs = engine.limits, list[CostModel]([UnknownCost(), StepCost()])
    scheduler = Scheduler(
        limits,
        FixedDraft(3),
        cost=chance.choice(costs),
        prefixes=PrefixCache(
            can_cut=not engine.card.is_recurrent,
            windows=Windows(limits.n_window, limits.n_window_cells),
            n_host_bytes_max=chance.choice([0, 1 << 20, 1 << 26]),
        ),
        n_preempted_bytes_max=chance.choice([0, 1 << 28]),
        fairness=chance.choice([HASTY, Fairness()]),
        n_checkpoint_min=16,
    )
    return Crowd(engine, scheduler)


def drawn_prompt(
    chance: random.Random, heads: Sequence[Sequence[int]], before: list[scheduled.Sequence]
) -> list[int]:
    """A text that others begin with, too, or what was said in one before; and something new."""
    rest = chance.choices(heads[0], k=chance.randrange(1, 25))
    if before and chance.random() < 0.3:
        return [*chance.choice(before).tokens, *rest]
    head = chance.choice(heads)
    return [*head[: chance.randrange(16, len(head))], *rest]


def drawn_options(chance: random.Random) -> SamplingOptions:
    """Every sampler now and then, each with a state that goes with its sequence."""
    options: dict[str, Any] = {"temperature": 0.8, "seed": chance.randrange(9), "ignore_eos": True}
    for name, values in KNOBS.items():
        if chance.random() < 0.2:
            options[name] = chance.choice(values)
    return SamplingOptions(**options)


def alone(engine: LlamaEngine, request: Request) -> list[int]:
    crowd = Crowd(engine, Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost()))
    assert request.n_output_max is not None
    crowd.submit(list(request.prompt), request.n_output_max, request.sampling, "alone")
    crowd.finish()
    return crowd.sequences[0].output


def check_crowd(engine: LlamaEngine, seed: int, heads: Sequence[Sequence[int]]) -> None:
    """Draws a crowd, and sees that everybody gets the tokens of alone, and that nothing is left.

    Args:
        engine: Exact, with `N_SLOTS` slots.
        seed: Of all that is drawn.
        heads: What prompts begin with, tokens.
    """
    chance = random.Random(seed)
    crowd, n_tokens_max = drawn_crowd(engine, chance), engine.limits.n_ctx_seq
    for _ in range(N_ROUNDS):
        for _ in range(chance.choice([0, 0, 1, 2, 4])):
            prompt = drawn_prompt(chance, heads, crowd.sequences)
            n_output = chance.randrange(1, 30)
            if len(prompt) + n_output <= n_tokens_max:
                options = chance.choice([GREEDY, drawn_options(chance)])
                crowd.submit(prompt, n_output, options, chance.choice("aab"))
        if crowd.sequences and chance.random() < 0.2:
            crowd.scheduler.mark(chance.choice(crowd.sequences), FinishReason.CANCELLED)
        crowd.step()
    crowd.finish()
    engine.step(StepPlan(entries=[], starts=[], frees=list(range(N_SLOTS))))
    assert engine.n_cells_used == 0
    for sequence in crowd.sequences:
        expected = alone(engine, sequence.request)
        assert isinstance(sequence.terminal, FinishEvent)
        is_whole = sequence.terminal.reason is FinishReason.LENGTH
        assert sequence.output == (expected if is_whole else expected[: sequence.n_output])
    counts = crowd.scheduler.counts
    assert counts.n_reused + counts.n_preempted > 0
