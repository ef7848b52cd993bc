"""The engine thread: takes what it is told, and runs steps while there is something to do.

Between two steps the engine idles, so this is the one place where Python's time costs tokens. Hence
all of it happens on one thread, without a hop: take messages, reap, plan, step, commit. What a step
has yielded is handed over right before the next one: the other side works on it while that one runs
without the GIL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import DrafthouseError, Unauthenticated
from drafthouse_server.scheduling.prefix_cache import CacheEvent
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Event, FinishReason, Sequence, SequenceState
from drafthouse_server.step import SchedulerCounts, StepPlan, StepResult

__all__ = ["EngineThread", "LoadReport", "StepReport"]

_log = logging.getLogger(__name__)

_PAUSE_S = 0.1


@dataclass(slots=True)
class StepReport:
    """What has happened since the report before."""

    events: list[tuple[Sequence, Event]] = field(default_factory=list)
    """New tokens and ends, in order."""
    moves: list[tuple[Sequence, bool]] = field(default_factory=list)
    """Sequences that got a slot (True) or lost it without an end (False), in order."""
    result: StepResult | None = None
    """The step's result; None when there was no step, or it was lost."""
    is_lost: bool = False
    """Whether a step was lost."""
    cache_events: list[CacheEvent] = field(default_factory=list)
    """Which prefixes came and went, if anybody wants to know."""
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)
    """How slots and cells were shared, as of this report."""
    host_s: float = 0.0
    """Seconds during which the engine waited for reaping, planning, committing and handing over."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the scheduler has to do, and whom it has served, as of a moment between two steps."""

    n_cells_running: int = 0
    """KV cells that running sequences hold."""
    n_backlog: int = 0
    """Tokens of prompts that are not computed."""
    service: Mapping[str, float] = field(default_factory=dict)
    """Counter of service by tenant, of those that were asked about."""


class EngineThread:
    """Owns the scheduler and uses the engine; both belong to the thread that calls `run`.

    Args:
        engine: Made on that thread.
        scheduler: No other thread touches it.
        hand_over: Called on that thread with every report; it must not wait.
        clock: Monotonic time in seconds.

    Thread:
        `run` on the engine thread; `post` and what posts for you (`submit`, `mark`, `stop`) on any.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        hand_over: Callable[[StepReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._hand_over = hand_over
        self._clock = clock
        # A message is a call that this thread makes between two steps.
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[object, ...]]] = SimpleQueue()
        self._slots: dict[int, Sequence] = {}
        self._report = StepReport()
        self._n_failures = 0
        self._is_stopping = False
        self.step_began_at: float | None = None
        """Monotonic time at which the step under way began, with its plan; None: there is none.

        For any thread.
        """

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Has a call made on the engine thread, after the step in flight. It must not raise."""
        self._inbox.put((function, arguments))
        self._engine.interrupt()

    def submit(self, sequence: Sequence) -> None:
        """Lets a sequence wait for a slot. It must fit the context."""
        self.post(self._scheduler.submit, sequence)

    def mark(self, sequence: Sequence, end: FinishReason | DrafthouseError) -> None:
        """Asks for a sequence's end. Its slot is free after the step in flight."""
        self.post(self._scheduler.mark, sequence, end)

    def refuse(self, sequence: Sequence, error: DrafthouseError) -> None:
        """Asks for the end of a sequence, unless it has or had a slot by then."""
        self.post(self._refuse, sequence, error)

    def _refuse(self, sequence: Sequence, error: DrafthouseError) -> None:
        if sequence.state is SequenceState.WAITING:
            self._scheduler.mark(sequence, error)

    def charge(self, tenant: str, amount: float) -> None:
        """Counts units of service for a tenant, before the next plan; no step is interrupted."""
        self._inbox.put((self._scheduler.charge, (tenant, amount)))

    def forget_tenant(self, tenant: str) -> None:
        """Forgets a tenant that was deleted, and ends its sequences, after the step in flight."""
        error = Unauthenticated("the tenant was deleted")
        self.post(self._scheduler.forget_tenant, tenant, error)

    def ask_load(self, tenants: Collection[str]) -> Future[LoadReport]:
        """Asks for the load, which is told between two steps; no step is interrupted.

        Args:
            tenants: Those whose counters of service are to be told.
        """
        report: Future[LoadReport] = Future()
        self._inbox.put((self._tell_load, (tuple(tenants), report)))
        return report

    def _tell_load(self, tenants: tuple[str, ...], report: Future[LoadReport]) -> None:
        if report.set_running_or_notify_cancel():
            counters, sequences = self._scheduler.counters, self._scheduler.sequences()
            found = LoadReport(
                sum(sequence.n_computed for sequence in sequences if sequence.seq_id >= 0),
                sum(max(0, sequence.n_prompt - sequence.n_computed) for sequence in sequences),
                {tenant: counters.of(tenant) for tenant in tenants},
            )
            report.set_result(found)

    def tell_cache(self, *, is_told: bool) -> None:
        """Has reports tell what is cached, from all that is there now; or ends it."""
        self.post(self._tell_cache, is_told)

    def _tell_cache(self, is_told: bool) -> None:
        self._scheduler.prefixes.tell(is_told=is_told)

    def stop(self) -> None:
        """Makes `run` return after the step in flight."""
        self.post(self._set_stopping)

    def _set_stopping(self) -> None:
        self._is_stopping = True

    def run(self) -> None:
        """Runs steps until `stop`; sleeps while there is nothing to do. Thread: engine thread."""
        inbox = self._inbox
        started = time.perf_counter()
        while True:
            self.step_began_at = time.monotonic()
            while not inbox.empty():
                function, arguments = inbox.get()
                function(*arguments)
            if self._is_stopping:
                self._flush()
                self.step_began_at = None
                return
            plan = self._prepare()
            if plan.is_empty:
                self._flush()
                self.step_began_at = None
                function, arguments = inbox.get()
                started = time.perf_counter()
                function(*arguments)
            else:
                # Not earlier: who is woken by it needs the GIL, which is given away only now.
                self._flush()
                self._report.host_s += time.perf_counter() - started
                started = self._step(plan)

    def _prepare(self) -> StepPlan:
        """Returns the next plan, after what has ended was given back."""
        now = self._clock()
        ends = self._scheduler.reap(now)
        if ends:
            self._report.events += ends
        plan = self._scheduler.plan(now)
        if plan.starts or plan.frees or plan.swap_outs:
            self._note_moves(plan)
        return plan

    def _note_moves(self, plan: StepPlan) -> None:
        """Notes which sequences get a slot by this plan, and which leave one to wait again."""
        moves, slots = self._report.moves, self._slots
        for seq_id in (*plan.swap_outs, *plan.frees):
            sequence = slots.pop(seq_id, None)
            if sequence is not None and sequence.terminal is None:
                moves.append((sequence, False))
        for start in plan.starts:
            sequence = slots[start.seq_id] = self._scheduler.running(start.seq_id)
            moves.append((sequence, True))

    def _step(self, plan: StepPlan) -> float:
        """Runs one plan and returns when it ended.

        A failure of the engine ends the sequences of this step and nothing else.
        """
        try:
            result = self._engine.step(plan)
        except Exception as error:
            _log.exception("a step of %d sequences was lost", len(plan.entries))
            self.step_began_at = None
            self._abandon(plan, error)
            return time.perf_counter()
        ended = time.perf_counter()
        self._n_failures = 0
        self._report.result = result
        self._report.events = self._scheduler.commit(result, self._clock())
        return ended

    def _abandon(self, plan: StepPlan, error: Exception) -> None:
        self._report.events = self._scheduler.abandon(plan, error)
        self._report.is_lost = True
        self._n_failures += 1
        self._flush()
        # A dead engine fails at once: without a pause this thread would do nothing else.
        self._pause(_PAUSE_S * min(self._n_failures - 1, 10))

    def _pause(self, seconds: float) -> None:
        """Waits, and goes on taking messages; one that stops the thread ends the wait."""
        end = time.monotonic() + seconds
        while not self._is_stopping and (left := end - time.monotonic()) > 0:
            try:
                function, arguments = self._inbox.get(timeout=left)
            except Empty:
                return
            function(*arguments)

    def _flush(self) -> None:
        """Hands over what has happened, if anything has."""
        report = self._report
        if self._scheduler.prefixes.has_events:
            report.cache_events = self._scheduler.prefixes.take_events()
        has_news = report.events or report.moves or report.cache_events
        if has_news or report.result is not None or report.is_lost:
            self._report = StepReport()
            report.counts = self._scheduler.counts
            self._hand_over(report)
