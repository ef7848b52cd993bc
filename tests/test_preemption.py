"""Streams that are parked and resumed on the demo models: the same tokens as alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.demo import Referee, prompts
from tests.demo import config as demo_config

from drafthouse_server.engine import LlamaEngine
from drafthouse_server.scheduler import Scheduler
from drafthouse_server.sequence import FinishEvent, SequenceState
from drafthouse_server.sequence import Sequence as TokenSequence
from drafthouse_server.speculation import FixedDraft
from drafthouse_server.step import SamplingOptions

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

N_STREAMS = 8
N_OUTPUT = 140
N_CTX = 512
LENGTHS = (12, 70, 25, 40, 90, 16, 33, 55)  # with the outputs three times what there is
N_TIES_MAX = 2
"""Of the greedy streams, those that may part from their references where two tokens tie."""
N_AFTER = 8
"""Tokens after its return that a sampled stream must share with its reference.

A pool of cells rounds as the neighbours' cells lie, so now and then a draw falls to the other side
of a border, parked or not. A sampler in a wrong state chooses something else at once.
"""


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def referee(target: str) -> Iterator[Referee]:
    found = Referee(target)
    yield found
    found.close()


@pytest.fixture(scope="module", params=["none", "mtp"])
def engine(request: pytest.FixtureRequest, target: str) -> Iterator[LlamaEngine]:
    """An engine whose eight slots share cells for fewer than four of the streams."""
    settings = demo_config(
        target, request.param, is_kv_unified=True, n_seq_max=N_STREAMS, n_ctx=N_CTX, n_ctx_seq=400
    )
    engine = LlamaEngine.load(settings)
    yield engine
    engine.close()


def options(seed: int | None) -> SamplingOptions:
    return SamplingOptions(temperature=0) if seed is None else SamplingOptions(seed=seed)


def step(engine: LlamaEngine, scheduler: Scheduler) -> list[TokenSequence]:
    """Runs one step and returns the sequences that it parked. Nothing depends on time."""
    before = {s.seq_id: s for s in scheduler.sequences() if s.state is SequenceState.RUNNING}
    plan = scheduler.plan(0.0)
    scheduler.commit(engine.step(plan), 0.0)
    return [before[seq_id] for seq_id in plan.parks]


def submit(
    engine: LlamaEngine, scheduler: Scheduler, prompt: Sequence[int], i: int, is_sampled: bool
) -> TokenSequence:
    sampling = SamplingOptions(seed=i) if is_sampled else SamplingOptions(temperature=0)
    sampler = engine.make_sampler(sampling)
    sequence = TokenSequence(f"r{i}", prompt, sampler, sampling=sampling, n_output_max=N_OUTPUT)
    scheduler.submit(sequence)
    return sequence


def alone(engine: LlamaEngine, prompt: Sequence[int], i: int, is_sampled: bool) -> list[int]:
    scheduler = Scheduler(engine.limits, FixedDraft(3))
    sequence = submit(engine, scheduler, prompt, i, is_sampled)
    while not scheduler.is_idle:
        step(engine, scheduler)
    return sequence.output


class Crowd:
    """All prompts at once, and what became of them."""

    def __init__(self, engine: LlamaEngine, is_sampled: bool, n_bytes_max: int) -> None:
        scheduler = Scheduler(engine.limits, FixedDraft(3), n_parked_bytes_max=n_bytes_max)
        self.sequences = [
            submit(engine, scheduler, prompt, i, is_sampled)
            for i, prompt in enumerate(prompts(LENGTHS))
        ]
        self.parks: list[tuple[TokenSequence, int]] = []
        """Who was parked, and after how many output tokens."""
        for _ in range(3000):
            if scheduler.is_idle:
                break
            self.parks += [(sequence, sequence.n_output) for sequence in step(engine, scheduler)]
        self.counts = scheduler.counts

    def check(self, engine: LlamaEngine) -> None:
        """Everybody has come to a good end, and nothing is left."""
        assert all(isinstance(s.terminal, FinishEvent) for s in self.sequences)
        assert len(self.parks) == self.counts.n_preempted == self.counts.n_resumed > 0
        assert (self.counts.n_parked, self.counts.n_parked_bytes) == (0, 0)
        assert engine.n_cells_used == 0


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_parked_streams_get_the_tokens_that_they_get_alone(
    engine: LlamaEngine, referee: Referee, *, is_sampled: bool
) -> None:
    saved, recomputed = (Crowd(engine, is_sampled, n_bytes_max) for n_bytes_max in (1 << 28, 0))
    assert saved.counts.n_recomputed == 0 < recomputed.counts.n_recomputed
    expected = [alone(engine, p, i, is_sampled) for i, p in enumerate(prompts(LENGTHS))]
    for crowd in (saved, recomputed):
        crowd.check(engine)
        if is_sampled:
            n_checked = check_sampled(crowd, expected)
            # Verification by rejection compares a draw with a ratio: roundings show earlier.
            assert n_checked or engine.limits.draft_type != "none"
        else:
            pairs = zip(expected, crowd.sequences, strict=True)
            ties = [referee.compare(s.prompt, tokens, s.output) for tokens, s in pairs]
            assert sum(tie is not None for tie in ties) <= N_TIES_MAX


def check_sampled(crowd: Crowd, expected: Sequence[list[int]]) -> int:
    """The streams that were as they should be when they were parked, are so afterwards.

    Returns:
        How many those were.
    """
    n_checked = 0
    for sequence, n_before in crowd.parks:
        tokens = expected[crowd.sequences.index(sequence)]
        if sequence.output[:n_before] == tokens[:n_before]:
            n_checked += 1
            n_after = min(n_before + N_AFTER, len(tokens))
            assert sequence.output[:n_after] == tokens[:n_after]
    return n_checked
