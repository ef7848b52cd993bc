"""Crowds of prompts that begin alike, on the real engine: everybody's tokens are those of alone.

Slots are copied, cut, moved to host memory and back, preempted and waited with, in whatever order;
the arithmetic is exact, so that no token may differ, drawn ones neither.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.support.built import needs_extension
from tests.support.demo import exact_engine, prompts
from tests.support.unknown_cost import UnknownCost
from tests.support.windows import windowed

from drafthouse_engine import DraftType
from drafthouse_server.drafting.cost import CostModel, StepCost
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import FinishEvent, FinishReason, Request, Sequence
from drafthouse_server.step import SamplingOptions, StepPlan
from drafthouse_server.tenancy.fairness import Fairness

pytestmark = [*needs_extension(), pytest.mark.timeout(300)]

N_SLOTS, N_CTX_SEQ = 6, 400
HASTY = Fairness(quantum=20.0, aging_s=3.0, preempt_interval_s=0.05, save_bytes_per_s=1e12)
GREEDY = SamplingOptions(temperature=0, ignore_eos=True)
KINDS: tuple[tuple[str, DraftType], ...] = (
    ("dense", "none"),
    ("dense", "mtp"),
    ("hybrid", "none"),
    ("windowed", "mtp"),
)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    target, draft_type = request.param
    path = windowed(64) if target == "windowed" else None
    made = exact_engine(
        "dense" if path else target,
        draft_type,
        path,
        n_seq_max=N_SLOTS,
        n_ctx_seq=N_CTX_SEQ,
        n_batch=96,
        n_ubatch=96,
    )
    yield made
    made.close()


class Crowd:
    """A scheduler over an engine, in a time of its own."""

    def __init__(self, engine: LlamaEngine, scheduler: Scheduler) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._now = 0.0
        self.sequences: list[Sequence] = []

    def submit(self, prompt: list[int], n_output: int, options: SamplingOptions, who: str) -> None:
        request = Request(
            f"r{len(self.sequences)}", prompt, sampling=options, n_output_max=n_output, tenant=who
        )
        sequence = Sequence(request, self._engine.make_sampler(options))
        self.sequences.append(sequence)
        self._scheduler.submit(sequence)

    def step(self) -> None:
        self._now += 0.02
        self._scheduler.reap(self._now)
        result = self._engine.step(self._scheduler.plan(self._now))
        self._scheduler.commit(result, self._now + 0.01)

    def finish(self) -> None:
        for _ in range(5000):
            if self._scheduler.is_idle:
                return
            self.step()
        raise AssertionError("somebody is never served")


def drawn_crowd(engine: LlamaEngine, chance: random.Random) -> tuple[Crowd, Scheduler]:
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
    return Crowd(engine, scheduler), scheduler


def drawn_prompt(chance: random.Random, before: list[Sequence]) -> list[int]:
    """A text that others begin with, too, or what was said in one before; and something new."""
    rest = chance.choices(range(40, 400), k=chance.randrange(1, 25))
    if before and chance.random() < 0.3:
        return [*chance.choice(before).tokens, *rest]
    return [*prompts((900,) * 3)[chance.randrange(3)][: chance.randrange(16, 250)], *rest]


def alone(engine: LlamaEngine, request: Request) -> list[int]:
    crowd = Crowd(engine, Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost()))
    assert request.n_output_max is not None
    crowd.submit(list(request.prompt), request.n_output_max, request.sampling, "alone")
    crowd.finish()
    return crowd.sequences[0].output


@pytest.mark.parametrize("seed", [1, 2])
def test_everybody_gets_the_tokens_of_alone(
    engine: LlamaEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)
    chance = random.Random(seed)
    crowd, scheduler = drawn_crowd(engine, chance)
    for _ in range(30):
        for _ in range(chance.choice([0, 0, 1, 2, 4])):
            prompt, n_output = drawn_prompt(chance, crowd.sequences), chance.randrange(1, 30)
            drawn = SamplingOptions(temperature=0.8, seed=chance.randrange(9), ignore_eos=True)
            if len(prompt) + n_output < N_CTX_SEQ:
                options = chance.choice([GREEDY, GREEDY, drawn])
                crowd.submit(prompt, n_output, options, chance.choice("aab"))
        if crowd.sequences and chance.random() < 0.2:
            scheduler.mark(chance.choice(crowd.sequences), FinishReason.CANCELLED)
        crowd.step()
    crowd.finish()
    assert scheduler.counts.n_reused + scheduler.counts.n_preempted > 0
    engine.step(StepPlan(entries=[], starts=[], frees=list(range(N_SLOTS))))
    assert engine.n_cells_used == 0
    for sequence in crowd.sequences:
        expected = alone(engine, sequence.request)
        assert isinstance(sequence.terminal, FinishEvent)
        is_whole = sequence.terminal.reason is FinishReason.LENGTH
        assert sequence.output == (expected if is_whole else expected[: sequence.n_output])
