"""Streams that are preempted and resumed on the demo models: the same tokens as alone."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import pytest
from tests.support.demo import Referee, exact_engine, prompts
from tests.support.demo import config as demo_config
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import FinishEvent, Request, Sequence, SequenceState
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.fairness import Fairness

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_STREAMS = 8
N_OUTPUT = 140
N_CTX = 512
LENGTHS = (12, 70, 25, 40, 90, 16, 33, 55)  # with the outputs three times what there is
N_AFTER = 8
"""Tokens after its return in which a sampled stream is compared with its reference.

A pool of cells rounds as the neighbours' cells lie, and computing again rounds as wide batches do,
so now and then a draw falls to the other side of a border, preempted or not. A sampler in a wrong
state chooses something else at once, in every stream. Where nothing rounds otherwise, every token
must be the same: the tests further down.
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
        target,
        request.param,
        kv_unified=True,
        parallel=N_STREAMS,
        ctx_size=N_CTX,
        max_model_len=400,
    )
    engine = LlamaEngine.load(settings)
    yield engine
    engine.close()


def options(seed: int | None) -> SamplingOptions:
    """Past end tokens: whatever is chosen, all outputs are as long as they may be."""
    if seed is None:
        return SamplingOptions(temperature=0, ignore_eos=True)
    return SamplingOptions(seed=seed, ignore_eos=True)


def step(engine: LlamaEngine, scheduler: Scheduler) -> list[Sequence]:
    """Runs one step and returns the sequences that it preempted. Nothing depends on time."""
    before = {s.seq_id: s for s in scheduler.sequences() if s.state is SequenceState.RUNNING}
    plan = scheduler.plan(0.0)
    scheduler.commit(engine.step(plan), 0.0)
    return [before[seq_id] for seq_id in plan.swap_outs]


def submit(
    engine: LlamaEngine,
    scheduler: Scheduler,
    prompt: abc.Sequence[int],
    i: int,
    *,
    is_sampled: bool,
    n_output: int = N_OUTPUT,
) -> Sequence:
    sampling = options(i if is_sampled else None)
    sampler = engine.make_sampler(sampling)
    sequence = Sequence(Request(f"r{i}", prompt, sampling=sampling, n_output_max=n_output), sampler)
    scheduler.submit(sequence)
    return sequence


def alone(
    engine: LlamaEngine,
    prompt: abc.Sequence[int],
    i: int,
    *,
    is_sampled: bool,
    n_output: int = N_OUTPUT,
) -> list[int]:
    scheduler = Scheduler(engine.limits, FixedDraft(3), cost=UnknownCost())
    sequence = submit(engine, scheduler, prompt, i, is_sampled=is_sampled, n_output=n_output)
    while not scheduler.is_idle:
        step(engine, scheduler)
    return sequence.output


class Crowd:
    """All prompts at once, and what became of them."""

    def __init__(self, engine: LlamaEngine, is_sampled: bool, n_bytes_max: int) -> None:
        scheduler = Scheduler(
            engine.limits, FixedDraft(3), cost=UnknownCost(), n_preempted_bytes_max=n_bytes_max
        )
        self.sequences = [
            submit(engine, scheduler, prompt, i, is_sampled=is_sampled)
            for i, prompt in enumerate(prompts(LENGTHS))
        ]
        self.swap_outs: list[tuple[Sequence, int]] = []
        """Who was preempted, and after how many output tokens."""
        for _ in range(3000):
            if scheduler.is_idle:
                break
            self.swap_outs += [
                (sequence, sequence.n_output) for sequence in step(engine, scheduler)
            ]
        self.counts = scheduler.counts

    def check(self, engine: LlamaEngine) -> None:
        """Everybody has come to a good end, and nothing is left."""
        assert all(isinstance(s.terminal, FinishEvent) for s in self.sequences)
        assert len(self.swap_outs) == self.counts.n_preempted == self.counts.n_resumed > 0
        assert (self.counts.n_preempted_now, self.counts.n_preempted_bytes) == (0, 0)
        assert engine.n_cells_used == 0


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_preempted_streams_get_the_tokens_that_they_get_alone(
    engine: LlamaEngine, referee: Referee, *, is_sampled: bool
) -> None:
    saved, recomputed = (Crowd(engine, is_sampled, n_bytes_max) for n_bytes_max in (1 << 28, 0))
    # Outputs of full length need three times the cells: a preempted one had computed something.
    assert saved.counts.n_recomputed == 0 < recomputed.counts.n_recomputed
    expected = [alone(engine, p, i, is_sampled=is_sampled) for i, p in enumerate(prompts(LENGTHS))]
    for crowd in (saved, recomputed):
        crowd.check(engine)
        assert all(s.n_output == N_OUTPUT for s in crowd.sequences)
        if is_sampled:
            check_sampled(crowd, expected)
        else:
            for tokens, s in zip(expected, crowd.sequences, strict=True):
                referee.compare(s.request.prompt, tokens, s.output)


@pytest.fixture(scope="module", params=["none", "mtp"])
def exact(request: pytest.FixtureRequest, target: str) -> Iterator[LlamaEngine]:
    """An engine of two slots whose arithmetic depends on nothing but a sequence's own tokens."""
    engine = exact_engine(target, request.param, n_seq_max=2, n_ctx_seq=400, n_draft_max=3)
    yield engine
    engine.close()


URGENT_AT = (6, 7, 16, 25, 26, 27)
"""Steps after which a sequence of higher priority comes: one, or enough for two slots."""
N_INTERRUPTED = 70


def interrupted(
    engine: LlamaEngine, n_bytes_max: int, *, is_sampled: bool
) -> tuple[Scheduler, list[Sequence]]:
    """Runs a long stream for each slot, which all lose it again and again to what is urgent."""
    pool = prompts(LENGTHS)
    # Time stands still here: nothing that it would bring may be waited for.
    fairness = Fairness(preempt_interval_s=0.0, save_bytes_per_s=1e15)
    scheduler = Scheduler(
        engine.limits,
        FixedDraft(3),
        cost=UnknownCost(),
        n_preempted_bytes_max=n_bytes_max,
        fairness=fairness,
    )
    streams = [
        submit(engine, scheduler, pool[i], i, is_sampled=is_sampled, n_output=N_INTERRUPTED)
        for i in range(engine.limits.n_seq_max)
    ]
    for n in range(1000):
        if scheduler.is_idle:
            break
        if n in URGENT_AT:
            sampler = engine.make_sampler(options(n))
            urgent = Sequence(
                Request(f"urgent {n}", pool[-1], sampling=options(n), n_output_max=5, priority=1),
                sampler,
            )
            scheduler.submit(urgent)
        step(engine, scheduler)
    assert scheduler.counts.n_preempted >= 2
    assert (scheduler.counts.n_recomputed == 0) is (n_bytes_max > 0)
    assert all(stream.swap.n_preemptions for stream in streams)
    is_speculative = engine.limits.draft_type != "none"
    assert all((stream.tally.n_drafted > 0) is is_speculative for stream in streams)
    return scheduler, streams


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_not_a_token_changes_where_the_arithmetic_is_exact(
    exact: LlamaEngine, *, is_sampled: bool
) -> None:
    """Saved or computed again: the same random state, the same drafts, the same tokens."""
    pool = prompts(LENGTHS)
    expected = [
        alone(exact, pool[i], i, is_sampled=is_sampled, n_output=N_INTERRUPTED) for i in range(2)
    ]
    for n_bytes_max in (1 << 28, 0):
        _, streams = interrupted(exact, n_bytes_max, is_sampled=is_sampled)
        assert [stream.output for stream in streams] == expected


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_a_snapshot_changes_not_a_token_with_any_kernels(
    target: str, draft_type: str, *, is_sampled: bool
) -> None:
    """With one slot every batch has the same width as alone."""
    engine = LlamaEngine.load(demo_config(target, draft_type, parallel=1, max_model_len=400))
    expected = alone(engine, prompts(LENGTHS)[0], 0, is_sampled=is_sampled, n_output=N_INTERRUPTED)
    _, streams = interrupted(engine, 1 << 28, is_sampled=is_sampled)
    engine.close()
    assert streams[0].output == expected


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_cells_that_run_out_end_no_stream(target: str, draft_type: str, referee: Referee) -> None:
    """As a server does it, with three tenants, priorities, conversations and a tiny pool."""
    settings = demo_config(
        target,
        draft_type,
        kv_unified=True,
        parallel=N_STREAMS,
        ctx_size=256,
        max_model_len=250,
        preempted_mib=1,
        prefix_cache_mib=1,
    )
    engine = LlamaEngine.load(settings)
    scheduler = make_scheduler(engine, settings)
    sequences, greedy = [], options(None)
    for i, prompt in enumerate(prompts(LENGTHS * 2)):
        sequence = Sequence(
            Request(
                f"r{i}",
                prompt,
                tenant=f"tenant {i % 3}",
                priority=i % 2,
                sampling=greedy,
                n_output_max=90,
            ),
            engine.make_sampler(greedy),
        )
        scheduler.submit(sequence)
        sequences.append(sequence)
    for n in range(4000):
        if scheduler.is_idle:
            break
        if n == 60:  # the next turn of what has ended by then, while others run
            ended = [s for s in sequences if s.terminal is not None and len(s.tokens) < 200]
            for sequence in ended[:2]:
                again = [*sequence.tokens, *sequence.request.prompt[:20]]
                sampler = engine.make_sampler(greedy)
                follow_up = Sequence(
                    Request(
                        f"{sequence.request.request_id}+",
                        again,
                        tenant=sequence.request.tenant,
                        sampling=greedy,
                        n_output_max=20,
                    ),
                    sampler,
                )
                scheduler.submit(follow_up)
                sequences.append(follow_up)
        step(engine, scheduler)
    counts = scheduler.counts
    assert scheduler.is_idle
    assert all(isinstance(s.terminal, FinishEvent) for s in sequences)
    assert counts.n_preempted == counts.n_resumed > 0
    assert (counts.n_preempted_now, counts.n_preempted_bytes) == (0, 0)
    assert engine.n_cells_used == counts.n_retained_cells <= 256
    engine.close()
    reference = LlamaEngine.load(demo_config(target, "none", parallel=1, max_model_len=400))
    for i, s in enumerate(sequences[: 2 * N_STREAMS : 3]):
        expected = alone(reference, s.request.prompt, i, is_sampled=False, n_output=90)
        referee.compare(s.request.prompt, expected, s.output)
    reference.close()


def check_sampled(crowd: Crowd, expected: abc.Sequence[list[int]]) -> None:
    """Of the streams that were as they should be when they were preempted, most go on so."""
    n_checked = n_parted = 0
    for sequence, n_before in crowd.swap_outs:
        tokens = expected[crowd.sequences.index(sequence)]
        if sequence.output[:n_before] == tokens[:n_before]:
            n_checked += 1
            n_after = min(n_before + N_AFTER, len(tokens))
            n_parted += sequence.output[:n_after] != tokens[:n_after]
    assert n_parted <= max(1, n_checked // 2), (n_parted, n_checked)
