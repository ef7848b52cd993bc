"""Whatever clients and engine do, in whatever order: the scheduler's promises hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import CostModel, StepCost
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import EngineError
from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    TokensEvent,
)
from drafthouse_server.step import (
    EngineLimits,
    SamplingOptions,
    SequenceStatus,
    StepPlan,
    StepResult,
    StepTimings,
)
from drafthouse_server.tenancy.fairness import Fairness

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


@dataclass(frozen=True)
class Setup:
    """What a world is made of."""

    n_seq_max: int = 3
    """Slots."""
    n_ctx: int = 144
    """KV cells of all slots; fewer than they could need are shared."""
    n_ctx_seq: int = 48
    """Most tokens of one sequence."""
    is_recurrent: bool = False
    """Whether the engine behaves like one with a recurrent target."""
    n_preempted_bytes_max: int = 1 << 20
    """Host memory of preempted sequences."""
    n_host_bytes_max: int | None = None
    """Host memory of prefixes; None is no reuse at all."""
    is_paced: bool = False
    """Whether prompts are cut by time."""
    n_window: int = 0
    """Tokens that the engine's sliding windows look back; 0: it has none."""
    n_window_cells: int = 0
    """Cells of a slot in layers with a window; 0: as many as in others."""
    n_pool_max: int | None = None
    """Tokens to draft from of each tenant's past, n-gram lookup first; None is no lookup."""
    is_adaptive: bool = False
    """Whether K is chosen by measured tokens per second, as by default; else it is 3."""
    step_s: float = 0.01
    """What a step takes besides its tokens: short ones are run in a row."""
    acceptance: tuple[int, ...] = ACCEPTANCE
    """Accepted tokens of drafts, over and over: where none is, drafters are turned off."""
    fairness: Fairness = dataclasses.field(default_factory=Fairness)
    """How tenants share the slots."""
    mask_s: float = 0.0
    """What the grammar of every other request takes for a token; its stream may sit steps out."""

    @property
    def limits(self) -> EngineLimits:
        return dataclasses.replace(
            LIMITS,
            n_seq_max=self.n_seq_max,
            n_outputs_max=3 * self.n_seq_max,
            n_ctx=self.n_ctx,
            n_ctx_seq=self.n_ctx_seq,
            n_window=self.n_window,
            n_window_cells=self.n_window_cells,
        )


HASTY = Fairness(quantum=6.0, aging_s=3.0, preempt_interval_s=2.0)
"""Slots change hands every few steps."""

QUICK = Setup(
    n_ctx=270,
    n_ctx_seq=90,
    is_paced=True,
    is_adaptive=True,
    n_host_bytes_max=4000,
    step_s=0.0005,
    acceptance=(0,),
)
"""As served by default, on a machine that is quick and with drafts that are never right."""

WIDE = Setup(n_seq_max=8, n_ctx=8 * 48, n_host_bytes_max=4000)
"""Many slots: whose sequences have ended, while others wait for one another."""

SETUPS = (
    Setup(),
    WIDE,
    dataclasses.replace(WIDE, is_paced=True, fairness=HASTY),
    Setup(n_ctx=100),
    Setup(n_ctx=130, n_ctx_seq=100),
    Setup(n_ctx=90, n_ctx_seq=80, n_preempted_bytes_max=0),
    Setup(n_ctx=110, n_ctx_seq=100, n_preempted_bytes_max=900, is_recurrent=True, is_paced=True),
    Setup(n_host_bytes_max=0),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, is_paced=True),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, is_recurrent=True),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, n_window=7),
    Setup(n_host_bytes_max=4000, n_window=20, is_paced=True),
    Setup(n_host_bytes_max=4000, n_window=7, n_window_cells=24),
    Setup(n_host_bytes_max=4000, n_window=4, n_window_cells=20, is_paced=True, is_adaptive=True),
    Setup(n_ctx=100, n_ctx_seq=90, n_pool_max=500),
    Setup(n_ctx=130, n_ctx_seq=100, n_host_bytes_max=0, is_paced=True, n_pool_max=100),
    Setup(is_paced=True, is_adaptive=True),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, is_paced=True, is_adaptive=True),
    Setup(n_ctx=130, n_ctx_seq=100, is_paced=True, n_pool_max=100, is_adaptive=True),
    Setup(fairness=HASTY),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, is_recurrent=True, fairness=HASTY),
    Setup(n_ctx=110, n_ctx_seq=100, n_preempted_bytes_max=900, is_paced=True, fairness=HASTY),
    QUICK,
    dataclasses.replace(QUICK, n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000),
    Setup(n_ctx=100, n_ctx_seq=90, n_host_bytes_max=4000, mask_s=0.1, fairness=HASTY),
    dataclasses.replace(WIDE, is_paced=True, mask_s=0.05, fairness=HASTY),
)


@pytest.fixture(autouse=True)
def _short_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait for one another that begin with a block alike."""
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)


class World:
    """One scheduler with its engine, and all that came out of them."""

    def __init__(self, setup: Setup = SETUPS[0]) -> None:
        self.setup = setup
        self.limits = limits = setup.limits
        self.engine = FakeEngine(
            limits,
            acceptance=setup.acceptance,
            eog_period=EOG_PERIOD,
            is_recurrent=setup.is_recurrent,
        )
        prefixes = None
        if setup.n_host_bytes_max is not None:
            prefixes = PrefixCache(
                can_cut=not setup.is_recurrent,
                windows=Windows(setup.n_window, setup.n_window_cells),
                n_host_bytes_max=setup.n_host_bytes_max,
            )
        ngrams = None
        if setup.n_pool_max is not None:
            ngrams = NgramDrafter(2, setup.n_pool_max, can_lengthen=setup.is_paced)
        cost: CostModel = StepCost() if setup.is_paced else UnknownCost()
        policy: DraftPolicy = FixedDraft(3)
        if setup.is_adaptive:
            policy = AdaptiveDraft(limits.n_draft_max)
        self.scheduler = Scheduler(
            limits,
            policy,
            ngrams=ngrams,
            cost=cost,
            n_preempted_bytes_max=setup.n_preempted_bytes_max,
            prefixes=prefixes,
            n_checkpoint_min=1,
            fairness=setup.fairness,
        )
        self.sequences: list[Sequence] = []
        self.events: dict[str, list[Event]] = {}
        self._unfed: set[int] = set()
        self.has_refusals = False
        """Whether the engine was asked to refuse starts."""

    def submit(
        self,
        prompt: list[int],
        n_output_max: int | None,
        options: SamplingOptions = GREEDY,
        **more: object,
    ) -> None:
        if self.setup.mask_s and len(self.sequences) % 2:
            options = dataclasses.replace(options, grammar="root ::= [a-z]+")
        sequence = Sequence(
            Request(
                f"r{len(self.sequences)}",
                prompt,
                sampling=options,
                n_output_max=n_output_max,
                **more,  # type: ignore[arg-type]  # drawn with the right types
            ),
            self.engine.make_sampler(options),
        )
        self.scheduler.submit(sequence)
        self.sequences.append(sequence)
        self.events[sequence.request.request_id] = []

    def step(self, now: float) -> StepPlan:
        self._take(self.scheduler.reap(now))
        running = [s for s in self.live if s.state is SequenceState.RUNNING]
        generating = {s.seq_id for s in running if s.n_output and s.n_pending == 1}
        plan = self.scheduler.plan(now)
        check_budget(plan, self.limits)
        # The engine thread sleeps where there is nothing to do, until another request comes.
        assert not (plan.is_empty and self.live), "somebody waits for ever"
        # No stream that goes on waits for anything, unless it loses its slot, or the step is that
        # of a tenant that has no such stream.
        outputs = {entry.seq_id for entry in plan.entries if entry.is_output}
        waiting = generating - set(plan.swap_outs) - outputs
        waiting -= {s.seq_id for s in running if s.request.sampling.grammar}
        if waiting:
            in_step = [self.scheduler.running(entry.seq_id) for entry in plan.entries]
            going_on = {self.scheduler.running(seq_id).request.tenant for seq_id in waiting}
            assert self.setup.mask_s or waiting == generating - set(plan.swap_outs)
            assert in_step, "nobody's step"
            assert not any(s.request.tenant in going_on for s in in_step)
        try:
            result = self.engine.step(plan)
        except EngineError:
            raise  # a wrong plan
        except RuntimeError as error:
            self._take(self.scheduler.abandon(plan, error))
        else:
            assert self.has_refusals or not result.n_kept, "a start that cannot keep what it should"
            n_running = self.scheduler.n_running
            timings = self._timings(plan, result, self._ask_grammars(result))
            took_s = timings.total_s
            result = dataclasses.replace(result, timings=timings)
            events = self.scheduler.commit(result, now + took_s)
            self._check_innocent(events, n_running)
            self._take(events)
        return plan

    def _ask_grammars(self, result: StepResult) -> float:
        """Tells what grammars took; returns it in seconds."""
        n_asked = 0
        for entry in result.entries:
            if self.scheduler.running(entry.seq_id).request.sampling.grammar and entry.tokens:
                entry.n_mask_work = (1 << 20) * len(entry.tokens)
                n_asked += len(entry.tokens)
        return n_asked * self.setup.mask_s

    def _timings(self, plan: StepPlan, result: StepResult, sample_s: float) -> StepTimings:
        """A step's time: something fixed, something per token, and to draft and feed drafters."""
        self._unfed.difference_update(plan.drafts_on, plan.frees, plan.swap_outs)
        self._unfed.update(plan.drafts_off)
        unit_s = self.setup.step_s
        decode_s = unit_s * (result.n_steps + 0.1 * result.n_batch_tokens)
        is_fed = any(entry.seq_id not in self._unfed for entry in plan.entries)
        process_s = 0.5 * unit_s * result.n_steps if is_fed else 0.0
        draft_s = unit_s * max([entry.n_draft for entry in plan.entries], default=0)
        total_s = draft_s + decode_s + process_s + sample_s
        return StepTimings(draft_s, decode_s, process_s, sample_s, total_s)

    def _check_innocent(self, events: Iterable[tuple[Sequence, Event]], n_running: int) -> None:
        """Cells that run out end nobody who could have been given another's."""
        for _, event in events:
            if isinstance(event, ErrorEvent) and isinstance(event.error, EngineError):
                is_shared = self.limits.n_ctx < self.limits.n_seq_max * self.limits.n_ctx_seq
                assert event.error.status != "NO_ROOM" or not is_shared or n_running == 1

    def _take(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            self.events[sequence.request.request_id].append(event)

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.state is not SequenceState.FINISHED]


def check_budget(plan: StepPlan, limits: EngineLimits) -> None:
    """A plan stays inside the limits, and gives every slot to one sequence."""
    assert sum(len(e.tokens) + e.n_draft for e in plan.entries) <= limits.n_batch
    assert sum(1 + e.n_draft for e in plan.entries if e.is_output) <= limits.n_outputs_max
    for seq_ids in (
        [e.seq_id for e in plan.entries],
        [start.seq_id for start in plan.starts],
        [*plan.frees, *plan.swap_outs],
        list(plan.saves),
    ):
        assert len(set(seq_ids)) == len(seq_ids)


def plan_shape(plan: StepPlan) -> tuple[object, ...]:
    """Everything of a plan that two runs can share: samplers are objects of their own."""
    starts = [dataclasses.replace(start, sampler=None) for start in plan.starts]
    moves = list(plan.frees), list(plan.swap_outs), list(plan.saves)
    return list(plan.entries), starts, moves, plan.drafts_off, plan.drafts_on, plan.n_steps


def alone(sequence: Sequence, n_tokens: int) -> list[int]:
    """What a prompt gives alone, without speculation and without a scheduler's budget."""
    world = World(Setup(n_ctx=300, n_ctx_seq=100))
    world.submit(list(sequence.request.prompt), n_tokens, sequence.request.sampling, n_draft=0)
    for now in range(120):
        world.step(float(now))
        if not world.live:
            break
    return world.sequences[0].output


@pytest.mark.parametrize("setup", SETUPS[-4:-2], ids=["own cells", "shared cells"])
def test_the_quick_setups_reach_runs_of_steps_and_turned_drafters(setup: Setup) -> None:
    world, turned = World(setup), [0, 0]
    n_in_a_row = 0
    for now in range(2000):
        while len(world.live) < 3:
            world.submit([now % 256, 7], 40)
        plan = world.step(float(now))
        started = {start.seq_id for start in plan.starts}
        turned[0] += bool(set(plan.drafts_off) - started)
        turned[1] += bool(set(plan.drafts_on) - started)
        n_in_a_row = max(n_in_a_row, plan.n_steps)
    assert min(turned) > 0, "running sequences' drafters were turned off and on"
    assert n_in_a_row > 1


def test_prefixes_are_used_where_no_cost_is_known() -> None:
    world = World(WIDE)
    for i in range(3):
        world.submit([*range(100, 120), i, 7], 3, tenant="a")
    for now in range(6):
        world.step(float(now))
    assert world.scheduler.counts.n_prefix_hits > 0
    assert world.scheduler.counts.n_estimator_resets == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Drives two worlds with the same calls: what they do must be the same, and right."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: tuple[World, World]
        self.world: World
        self.now = 0.0
        self.n_faults = 0

    @initialize(setup=st.sampled_from(SETUPS))
    def begin(self, setup: Setup) -> None:
        self.worlds = (World(setup), World(setup))
        self.world = self.worlds[0]

    @rule(
        # Often a prompt that begins like others.
        prompt=st.one_of(
            st.lists(st.integers(0, 255), min_size=1, max_size=40),
            st.integers(16, 40).map(lambda n: list(range(n))),
        ),
        tenant=st.sampled_from(["a", "a", "b"]),
        seed=st.one_of(st.none(), st.integers(0, 5)),
        n_output_max=st.one_of(st.none(), st.integers(1, 8), st.integers(20, 40)),
        n_draft=st.one_of(st.none(), st.integers(0, 9)),
        priority=st.integers(-2, 2),
        lifetime=st.one_of(st.just(float("inf")), st.floats(0, 30)),
        stop_token_ids=st.frozensets(st.integers(32, 126), max_size=5),
    )
    def submit(
        self,
        *,
        prompt: list[int],
        tenant: str,
        seed: int | None,
        n_output_max: int | None,
        n_draft: int | None,
        priority: int,
        lifetime: float,
        stop_token_ids: frozenset[int],
    ) -> None:
        if n_output_max is not None:
            n_output_max = min(n_output_max, self.world.limits.n_ctx_seq - len(prompt))
        options = GREEDY if seed is None else SamplingOptions(temperature=1.0, seed=seed)
        for world in self.worlds:
            world.submit(
                prompt,
                n_output_max,
                options,
                tenant=tenant,
                weight=2.0 if tenant == "b" else 1.0,
                received_at=self.now,
                n_draft=n_draft,
                priority=priority,
                deadline=self.now + lifetime,
                stop_token_ids=stop_token_ids,
            )

    @precondition(lambda self: self.world.sequences)
    @rule(choice=st.integers(0, 1000), more=st.lists(st.integers(0, 255), min_size=1, max_size=4))
    def follow_up(self, choice: int, more: list[int]) -> None:
        """The next turn of a conversation: all that was said before, and something new."""
        before = self.world.sequences[choice % len(self.world.sequences)]
        prompt = [*before.tokens, *more]
        if len(prompt) < self.world.limits.n_ctx_seq:
            for world in self.worlds:
                world.submit(prompt, 1, tenant=before.request.tenant)

    @rule(
        n=st.integers(2, 5),
        n_shared=st.integers(16, 30),
        tenant=st.sampled_from(["a", "b"]),
        priorities=st.lists(st.integers(-1, 1), min_size=5, max_size=5),
    )
    def come_together(self, n: int, n_shared: int, tenant: str, priorities: list[int]) -> None:
        """Prompts that begin alike."""
        for i in range(n):
            for world in self.worlds:
                prompt = [*range(100, 100 + n_shared), i, 7]
                world.submit(prompt, 3, tenant=tenant, received_at=self.now, priority=priorities[i])

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

    @rule(n_starts=st.integers(0, 2), n_saves=st.integers(0, 2))
    def refuse(self, n_starts: int, n_saves: int) -> None:
        for world in self.worlds:
            world.engine.refuse(n_starts=n_starts, n_saves=n_saves)
            world.has_refusals = True

    @invariant()
    def slots_and_cells_add_up(self) -> None:
        running = [s for s in self.world.live if s.state is SequenceState.RUNNING]
        assert len({s.seq_id for s in running}) == len(running) == self.world.scheduler.n_running
        assert all(0 <= s.seq_id < self.world.limits.n_seq_max for s in running)
        assert sum(s.n_reserved for s in running) == self.world.scheduler._ledger.n_reserved
        assert self.world.scheduler.n_cells_held <= self.world.limits.n_ctx
        assert self.world.engine.n_cells_max <= self.world.limits.n_ctx
        preempted = [s for s in self.world.live if s.state is SequenceState.PREEMPTED]
        counts = self.world.scheduler.counts
        assert counts.n_estimator_resets == 0
        assert counts.n_preempted_now == len(preempted)
        assert counts.n_preempted_bytes == sum(len(s.swap.snapshot or b"") for s in preempted)
        assert counts.n_preempted_bytes <= self.world.setup.n_preempted_bytes_max
        assert counts.n_prefix_bytes <= (self.world.setup.n_host_bytes_max or 0)
        assert counts.n_prefix_hits <= counts.n_prefix_lookups
        assert counts.n_reused <= counts.n_prefix_tokens
        assert all(s.n_computed == 0 for s in preempted if s.swap.snapshot is None)

    @invariant()
    def cells_are_counted_as_the_engine_counts_them(self) -> None:
        for sequence in self.world.live:
            if sequence.state is SequenceState.RUNNING:
                is_begun = sequence.seq_id not in self.world.scheduler._slots.leads
                n_past = self.world.engine.n_past(sequence.seq_id) if is_begun else 0
                assert sequence.n_computed == n_past

    @invariant()
    def events_end_once_and_carry_the_whole_output(self) -> None:
        for sequence in self.world.sequences:
            events = self.world.events[sequence.request.request_id]
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
        assert self.world.scheduler._ledger.n_reserved == 0
        counts = self.world.scheduler.counts
        assert (counts.n_preempted_now, counts.n_preempted_bytes) == (0, 0)
        assert self.world.engine.n_cells_used == self.world.scheduler.n_cells_held
        assert counts.n_retained or self.world.engine.n_cells_used == 0
        assert [w.output for w in self.worlds[0].sequences] == [
            w.output for w in self.worlds[1].sequences
        ]
        for sequence in self.world.sequences:
            if sequence.n_output:
                assert sequence.output == alone(sequence, sequence.n_output)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestScheduler = pytest.mark.timeout(600)(TestScheduler)
