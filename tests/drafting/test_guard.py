"""Estimators that fail, that answer nonsense, or that are fed it: no stream loses a token.

The tests know the estimators by the calls that the scheduler makes, and nothing of how they
estimate: they outlive a replacement.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import StepCost, StepShape
from drafthouse_server.drafting.guard import Guard, checked, is_duration
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import Unauthenticated
from drafthouse_server.scheduling.cells import OutputLengths
from drafthouse_server.scheduling.checkpoints import HitRates
from drafthouse_server.scheduling.pacing import ChunkSizer, RunLength
from drafthouse_server.scheduling.preemption import SnapshotCost
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Event, FinishEvent, Request, Sequence
from drafthouse_server.step import EngineLimits, PlanEntry, SamplingOptions, StepTimings

LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=3,
    n_ctx=300,  # fewer than three could need: some are preempted
    n_ctx_seq=150,
    n_batch=24,
    n_ubatch=24,
    n_draft_max=4,
    n_outputs_max=15,
)
GREEDY = SamplingOptions(temperature=0)
PROMPTS = [[65 + i] * (3 + 19 * i) for i in range(6)]
N_OUTPUT = 40

NAN, INF = math.nan, math.inf


class World:
    """A scheduler with all its estimators over the fake engine."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self.policy: DraftPolicy = AdaptiveDraft(LIMITS.n_draft_max)
        self.ngrams: NgramDrafter | None = NgramDrafter(2, 500, can_lengthen=True)
        self.engine = FakeEngine(LIMITS)
        self.n_steps = 0

    def without_drafts(self) -> None:
        """Steps are run in a row where there is no draft, and none may come."""
        self.ngrams, self.policy = None, FixedDraft(0)

    def start(self) -> None:
        self.scheduler = Scheduler(
            LIMITS,
            self.policy,
            cost=self.cost,
            prefixes=PrefixCache(can_cut=True, n_host_bytes_max=5000),
            ngrams=self.ngrams,
            n_draft_fixed=2,
        )
        self.sequences = []
        for i, prompt in enumerate(PROMPTS):
            sampler = self.engine.make_sampler(GREEDY)
            sequence = Sequence(
                Request(f"r{i}", list(prompt), tenant="ab"[i % 2], n_output_max=N_OUTPUT), sampler
            )
            self.scheduler.submit(sequence)
            self.sequences.append(sequence)

    def run(
        self,
        timings: Callable[[], StepTimings],
        clock: Callable[[], float],
    ) -> list[Event | None]:
        """Runs until all have ended, and returns how they did."""
        for _ in range(1500):
            if self.scheduler.is_idle:
                break
            self.scheduler.forget_tenant("nobody", Unauthenticated())
            self.scheduler.reap(clock())
            plan = self.scheduler.plan(clock())
            result = self.engine.step(plan)  # it checks the plan
            result = dataclasses.replace(result, timings=timings())
            self.scheduler.commit(result, clock())
            self.n_steps += 1
        return [sequence.terminal for sequence in self.sequences]

    def check(self, ends: list[Event | None]) -> None:
        """Every stream has come to its end, with the tokens that it gets alone."""
        assert all(isinstance(end, FinishEvent) for end in ends), ends
        assert [sequence.output for sequence in self.sequences] == expected()
        assert self.engine.n_cells_used == self.scheduler.n_cells_held


def ticking() -> Callable[[], float]:
    ticks = iter(range(10**9))
    return lambda: next(ticks) * 0.003


def usual() -> StepTimings:
    return StepTimings(0.0005, 0.001, 0.0002, 0.0001, 0.002)


_expected: list[list[int]] = []


def expected() -> list[list[int]]:
    """Returns what each prompt gives alone, without any draft."""
    if not _expected:
        for prompt in PROMPTS:
            engine = FakeEngine(LIMITS)
            scheduler = Scheduler(LIMITS, FixedDraft(0), cost=UnknownCost())
            sequence = Sequence(
                Request("alone", list(prompt), n_output_max=N_OUTPUT, n_draft=0),
                engine.make_sampler(GREEDY),
            )
            scheduler.submit(sequence)
            while not scheduler.is_idle:
                scheduler.reap(0.0)
                scheduler.commit(engine.step(scheduler.plan(0.0)), 0.0)
            _expected.append(sequence.output)
    return _expected


CALLS: list[tuple[type, str]] = [
    (StepCost, "predict"),
    (StepCost, "observe"),
    (StepCost, "fit_prefill"),
    (StepCost, "recompute_s"),
    (AdaptiveDraft, "wants"),
    (AdaptiveDraft, "choose_all"),
    (AdaptiveDraft, "observe"),
    (NgramDrafter, "fill"),
    (NgramDrafter, "observe"),
    (NgramDrafter, "forget"),
    (NgramDrafter, "forget_tenant"),
    (ChunkSizer, "step_s"),
    (ChunkSizer, "align"),
    (ChunkSizer, "observe"),
    (RunLength, "n_steps"),
]
"""Every call that the scheduler, or the policy on its behalf, makes to an estimator."""


def call_ids() -> list[str]:
    return [f"{kind.__name__}.{name}" for kind, name in CALLS]


@pytest.mark.parametrize("every", [1, 3, 20])
@pytest.mark.parametrize(("kind", "name"), CALLS, ids=call_ids())
def test_an_estimator_that_raises_is_reset_and_every_stream_gets_every_token(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type,
    name: str,
    every: int,
) -> None:
    n_calls = n_raised = 0
    inner = getattr(kind, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal n_calls, n_raised
        n_calls += 1
        if n_calls % every == 0:
            n_raised += 1
            raise ZeroDivisionError("float division by zero")
        return inner(*arguments, **options)

    monkeypatch.setattr(kind, name, broken)
    world = World()
    if kind is RunLength:
        world.without_drafts()
    world.start()
    world.check(world.run(usual, ticking()))
    n_resets = world.scheduler.counts.n_estimator_resets
    assert n_resets <= n_raised
    if n_raised:
        assert n_resets >= 1
    told = [r for r in caplog.records if r.name.endswith("guard") and r.levelno == logging.ERROR]
    assert len(told) <= 3, "once an estimator, not once a step"
    assert bool(told) == bool(n_resets)
    if every == 1:
        assert n_raised, "the test is to no purpose"
        assert all("ZeroDivisionError" in (record.exc_text or "") for record in told)


NONSENSE: list[tuple[type, str, Any]] = [
    (StepCost, "predict", NAN),
    (StepCost, "predict", INF),
    (StepCost, "predict", -1.0),
    (StepCost, "predict", 0.0),
    (StepCost, "fit_prefill", -7),
    (StepCost, "fit_prefill", 10**9),
    (StepCost, "recompute_s", NAN),
    (StepCost, "recompute_s", -INF),
    (AdaptiveDraft, "choose_all", []),
    (AdaptiveDraft, "choose_all", [1]),
    (AdaptiveDraft, "choose_all", [-1, -1, -1]),
    (AdaptiveDraft, "choose_all", [99, 99, 99]),
    (AdaptiveDraft, "choose_all", None),
    (NgramDrafter, "fill", []),
    (NgramDrafter, "fill", None),
    (ChunkSizer, "step_s", NAN),
    (ChunkSizer, "step_s", -INF),
    (ChunkSizer, "step_s", INF),
    (ChunkSizer, "align", -3),
    (ChunkSizer, "align", 10**9),
    (RunLength, "n_steps", 0),
    (RunLength, "n_steps", 10**9),
]


@pytest.mark.parametrize(
    ("kind", "name", "answer"),
    NONSENSE,
    ids=[f"{kind.__name__}.{name}={answer}" for kind, name, answer in NONSENSE],
)
def test_an_answer_that_makes_no_sense_costs_no_token(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, answer: Any
) -> None:
    n_asked = 0

    def answer_it(*_: Any, **__: Any) -> Any:
        nonlocal n_asked
        n_asked += 1
        return answer

    monkeypatch.setattr(kind, name, answer_it)
    world = World()
    if kind is RunLength:
        world.without_drafts()
    world.start()
    world.check(world.run(usual, ticking()))
    assert n_asked, "the test is to no purpose"
    if name != "process_s":  # only the policy asks that, and what the policy answers is checked
        assert world.scheduler.counts.n_estimator_resets, "nonsense is noticed"


def spoil(entry: PlanEntry, how: str) -> PlanEntry:
    """Returns an entry with which the engine would refuse the plan of all."""
    n_draft = entry.n_draft
    spoilt: dict[str, dict[str, Any]] = {
        "another slot": {"seq_id": (entry.seq_id + 1) % LIMITS.n_seq_max},
        "another place": {"n_past": entry.n_past + 1},
        "other tokens": {"tokens": [1, 2]},
        "no output": {"is_output": False},
        "a longer draft": {"given": [65] * (n_draft + 1)},
        "a draft of no tokens": {"given": [-5] * n_draft},
        "a draft of texts": {"given": ["a"] * n_draft},
    }
    return dataclasses.replace(entry, **spoilt[how])


@pytest.mark.parametrize(
    "how",
    [
        *("another slot", "another place", "other tokens", "no output"),
        *("a longer draft", "a draft of no tokens", "a draft of texts"),
    ],
)
def test_proposals_that_would_spoil_the_plan_are_not_used(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def fill(_: Any, sequences: Any, entries: list[PlanEntry], *__: Any) -> list[PlanEntry]:
        return [spoil(entry, how) for entry in entries]

    monkeypatch.setattr(NgramDrafter, "fill", fill)
    world = World()
    world.start()
    world.check(world.run(usual, ticking()))
    assert world.scheduler.counts.n_estimator_resets, "nonsense is noticed"


seconds = st.one_of(
    st.sampled_from([0.0, -0.0, 5e-324, 1e-200, 1e-9, 1e-3, 1.0, 1e6, 1e300, -1.0, NAN, INF, -INF]),
    st.floats(0, 0.01),
)
all_timings = st.builds(StepTimings, seconds, seconds, seconds, seconds, seconds)
jumps = st.one_of(
    st.just(0.0), st.floats(0, 0.01), st.sampled_from([-1e9, -3600.0, -1e-3, 1e-9, 3600.0, 1e9])
)


def cycle(values: list[Any]) -> Iterator[Any]:
    while True:
        yield from values


@given(
    times=st.lists(all_timings, min_size=1, max_size=8),
    steps=st.lists(jumps, min_size=1, max_size=8),
    has_ngrams=st.booleans(),
)
@example(
    times=[StepTimings(process_s=0.0078125, total_s=5e-324)],
    steps=[0.0],
    has_ngrams=False,
)
@settings(max_examples=100, deadline=None)
def test_no_time_that_an_engine_or_a_clock_may_tell_stops_a_stream(
    times: list[StepTimings], steps: list[float], *, has_ngrams: bool
) -> None:
    """Times that are zero, negative, endless or none at all; clocks that stand still or jump."""
    now, leaps, told = 0.0, cycle(steps), cycle(times)

    def clock() -> float:
        nonlocal now
        now += float(next(leaps))
        return now

    world = World()
    if not has_ngrams:
        world.ngrams = None
    world.start()
    world.check(world.run(lambda: next(told), clock))
    assert world.scheduler.counts.n_estimator_resets == 0, "bad times do not reach an estimator"


@given(
    st.lists(st.tuples(all_timings, st.integers(1, 64), st.integers(0, 5)), max_size=40),
)
@settings(max_examples=200, deadline=None)
def test_the_cost_of_a_step_is_a_positive_number_whatever_checked_times_it_has_learnt(
    steps: list[tuple[StepTimings, int, int]],
) -> None:
    cost = StepCost()
    for timings, n, k in steps:
        shape = StepShape(n * (1 + k), n * (1 + k), 1, 100.0 * n)
        cost.observe(shape, checked(timings), checked(timings).total_s)
        assert 0 < cost.predict(shape) < INF
        assert cost.fit_prefill(shape, 0.04, 100, 512) in range(513)
        assert 0 <= cost.recompute_s(1000, 512) < INF


durations = seconds.filter(is_duration)


@given(st.lists(st.tuples(seconds, durations, st.booleans()), max_size=60), durations, seconds)
@example([], 0.0, 5e-324)
def test_pacing_answers_with_usable_numbers_whatever_it_has_learnt(
    steps: list[tuple[float, float, bool]], decode_s: float, stall_s: float
) -> None:
    pacer = ChunkSizer()
    for predicted_s, step_s, has_prefill in steps:
        pacer.observe(predicted_s, step_s, has_prefill=has_prefill)
    assert 0 < pacer.step_s(decode_s) < INF
    assert 0 <= pacer.align(24, 100, 600, 3) <= 100
    assert RunLength().n_steps([], stall_s, 100) in range(1, 101)


counts = st.integers(0, 1 << 40)


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), counts), max_size=20),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 500)), max_size=60),
    st.tuples(counts, counts),
    st.integers(0, 1 << 20),
)
def test_what_is_counted_and_not_measured_needs_no_guard(
    snapshots: list[tuple[int, int]],
    lengths: list[tuple[str, int]],
    hosted: tuple[int, int],
    n_tokens: int,
) -> None:
    """Sizes of snapshots, lengths of outputs and hits: no clock comes in, so no nonsense either."""
    cost, learnt = SnapshotCost(), OutputLengths()
    for n, n_bytes in snapshots:
        cost.observe(n, n_bytes)
    assert 0 < cost.write_s(n_tokens) < cost.total_s(n_tokens) < INF
    for tenant, n_output in lengths:
        ended = Sequence(Request("r", [1], tenant=tenant), None, n_output_max=1 << 21)
        ended.tokens += [0] * n_output
        learnt.observe(ended)
        assert ended.n_output < learnt.likely(ended) <= 1 << 21
    rates = HitRates()
    for _ in range(hosted[0] % 1000):
        rates.count("a", is_hit=True)
    for _ in range(hosted[1] % 1000):
        rates.count_stored("a")
    assert 0 < rates.of("a") <= 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF, -1e-9, 86400.0, 1e300])
def test_a_duration_is_finite_and_less_than_a_day(bad: float) -> None:
    assert not is_duration(bad)
    assert is_duration(0.0)
    for field in dataclasses.fields(StepTimings):
        assert checked(dataclasses.replace(usual(), **{field.name: bad})) == StepTimings()
    assert checked(usual()) == usual()


def test_a_guard_resets_what_has_failed_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    reset: list[str] = []
    guard = Guard({"a": lambda: reset.append("a"), "b": lambda: reset.append("b")})

    def fail() -> str:
        raise OverflowError

    assert guard.ask("a", lambda: "answer", lambda: "fixed") == "answer"
    assert reset == []
    assert [guard.ask("a", fail, lambda: "fixed") for _ in range(3)] == ["fixed"] * 3
    assert reset == ["a"] * 3
    assert len(caplog.records) == 1
    guard.ask("b", fail, lambda: "fixed")
    assert (reset[3:], guard.n_resets, len(caplog.records)) == (["b"], 4, 2)


def test_what_ends_the_process_passes_the_guard() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard({"a": stop}).ask("a", stop, lambda: None)
