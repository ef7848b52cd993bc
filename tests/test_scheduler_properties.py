"""Whatever clients and engine do, in whatever order: the scheduler's promises hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafthouse_server.fake import FakeEngine
from drafthouse_server.scheduler import Scheduler
from drafthouse_server.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Sequence,
    SequenceState,
    TokensEvent,
)
from drafthouse_server.speculation import FixedDraft
from drafthouse_server.step import EngineLimits, SamplingOptions, SequenceStatus, StepPlan

LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=3,
    n_ctx=100,
    n_ctx_seq=48,
    n_batch=12,
    n_ubatch=12,
    n_draft_max=4,
    n_outputs_max=9,
)
GREEDY = SamplingOptions(temperature=0)
ACCEPTANCE = (2, 0, 4, 1)
EOG_PERIOD = 23


class World:
    """One scheduler with its engine, and all that came out of them."""

    def __init__(self) -> None:
        self.engine = FakeEngine(LIMITS, acceptance=ACCEPTANCE, eog_period=EOG_PERIOD)
        self.scheduler = Scheduler(LIMITS, FixedDraft(3))
        self.sequences: list[Sequence] = []
        self.events: dict[str, list[Event]] = {}

    def submit(self, prompt: list[int], n_output_max: int | None, **more: object) -> None:
        sequence = Sequence(
            f"r{len(self.sequences)}",
            prompt,
            self.engine.make_sampler(GREEDY),
            n_output_max=n_output_max,
            **more,  # type: ignore[arg-type]  # drawn with the right types
        )
        self.scheduler.submit(sequence)
        self.sequences.append(sequence)
        self.events[sequence.request_id] = []

    def step(self, now: float) -> StepPlan:
        self._take(self.scheduler.reap(now))
        plan = self.scheduler.plan(now)
        check_budget(plan)
        try:
            result = self.engine.step(plan)
        except RuntimeError as error:
            self._take(self.scheduler.abandon(plan, error))
        else:
            self._take(self.scheduler.commit(result, now))
        return plan

    def _take(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            self.events[sequence.request_id].append(event)

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]


def check_budget(plan: StepPlan) -> None:
    """A plan stays inside the limits, and gives every slot to one sequence."""
    assert sum(len(e.tokens) + e.n_draft for e in plan.entries) <= LIMITS.n_batch
    assert sum(1 + e.n_draft for e in plan.entries if e.is_output) <= LIMITS.n_outputs_max
    for seq_ids in (
        [e.seq_id for e in plan.entries],
        [start.seq_id for start in plan.starts],
        list(plan.frees),
    ):
        assert len(set(seq_ids)) == len(seq_ids)


def plan_shape(plan: StepPlan) -> tuple[object, ...]:
    """Everything of a plan that two runs can share: samplers are objects of their own."""
    return list(plan.entries), [start.seq_id for start in plan.starts], list(plan.frees)


def greedy(prompt: list[int], n_tokens: int) -> list[int]:
    """What a prompt gives alone, without speculation and without a scheduler's budget."""
    world = World()
    world.submit(list(prompt), n_tokens, n_draft=0)
    for now in range(100):
        world.step(float(now))
        if not world.live:
            break
    return world.sequences[0].output


class SchedulerMachine(RuleBasedStateMachine):
    """Drives two worlds with the same calls: what they do must be the same, and right."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds = (World(), World())
        self.world = self.worlds[0]
        self.now = 0.0
        self.n_faults = 0

    @rule(
        prompt=st.lists(st.integers(0, 255), min_size=1, max_size=40),
        n_output_max=st.one_of(st.none(), st.integers(1, 8)),
        n_draft=st.one_of(st.none(), st.integers(0, 9)),
        priority=st.integers(-2, 2),
        lifetime=st.one_of(st.just(float("inf")), st.floats(0, 30)),
        stop_token_ids=st.frozensets(st.integers(32, 126), max_size=5),
    )
    def submit(
        self,
        *,
        prompt: list[int],
        n_output_max: int | None,
        n_draft: int | None,
        priority: int,
        lifetime: float,
        stop_token_ids: frozenset[int],
    ) -> None:
        for world in self.worlds:
            world.submit(
                prompt,
                n_output_max,
                n_draft=n_draft,
                priority=priority,
                deadline=self.now + lifetime,
                stop_token_ids=stop_token_ids,
            )

    @rule(n_steps=st.integers(1, 4))
    def step(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.now += 1.0
            first, second = (world.step(self.now) for world in self.worlds)
            assert plan_shape(first) == plan_shape(second)

    @precondition(lambda self: self.world.sequences)
    @rule(choice=st.integers(0, 1000), reason=st.sampled_from(list(FinishReason)))
    def mark(self, choice: int, reason: FinishReason) -> None:
        for world in self.worlds:
            sequence = world.sequences[choice % len(world.sequences)]
            world.scheduler.mark(sequence, reason)

    @rule(seconds=st.floats(1, 40))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        status=st.sampled_from([s for s in SequenceStatus if s is not SequenceStatus.OK]),
        seq_id=st.one_of(st.none(), st.integers(0, 2)),
        n_steps=st.integers(1, 20),
    )
    def break_a_sequence(self, status: SequenceStatus, seq_id: int | None, n_steps: int) -> None:
        self.n_faults += 1
        for world in self.worlds:
            world.engine.inject(status, seq_id=seq_id, n_steps=n_steps)

    @rule()
    def break_a_step(self) -> None:
        self.n_faults += 1
        for world in self.worlds:
            world.engine.inject(RuntimeError("boom"))

    @invariant()
    def slots_and_cells_add_up(self) -> None:
        running = [s for s in self.world.live if s.state is SequenceState.RUNNING]
        assert len({s.seq_id for s in running}) == len(running) == self.world.scheduler.n_running
        assert all(0 <= s.seq_id < LIMITS.n_seq_max for s in running)
        assert sum(s.n_reserved for s in running) == self.world.scheduler.n_reserved
        assert self.world.scheduler.n_reserved <= LIMITS.n_ctx
        assert all(len(s.tokens) <= s.n_reserved for s in running)

    @invariant()
    def cells_are_counted_as_the_engine_counts_them(self) -> None:
        for sequence in self.world.live:
            if sequence.state is SequenceState.RUNNING:
                assert sequence.n_computed == self.world.engine.n_past(sequence.seq_id)

    @invariant()
    def events_end_once_and_carry_the_whole_output(self) -> None:
        for sequence in self.world.sequences:
            events = self.world.events[sequence.request_id]
            terminal = [e for e in events if isinstance(e, FinishEvent | ErrorEvent)]
            is_over = sequence.state is SequenceState.FINISHED
            assert terminal == ([sequence.terminal] if is_over else [])
            assert not terminal or events[-1] is terminal[0]
            tokens = [t for e in events if isinstance(e, TokensEvent) for t in e.tokens]
            assert tokens == sequence.output

    def teardown(self) -> None:
        """Everybody is served in bounded time, gets what it would get alone, and leaves nothing."""
        n_steps_max = 60 * (1 + len(self.world.live)) + 40 * self.n_faults
        for _ in range(n_steps_max):
            if self.world.scheduler.is_idle:
                break
            self.step(1)
        assert self.world.live == []
        self.events_end_once_and_carry_the_whole_output()
        assert self.world.scheduler.is_idle
        assert self.world.scheduler.n_reserved == 0
        assert self.world.engine.n_cells_used == 0
        assert [w.output for w in self.worlds[0].sequences] == [
            w.output for w in self.worlds[1].sequences
        ]
        for sequence in self.world.sequences:
            alone = greedy(list(sequence.prompt), LIMITS.n_ctx_seq - sequence.n_prompt)
            assert sequence.output == alone[: sequence.n_output]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = pytest.mark.timeout(120)(TestScheduler)
