"""The step loop as the event loop sees it: takes requests, and hands out what steps yield.

The loop itself runs on the engine thread (`engine_thread`); this side sends it messages and gets
one report a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from drafthouse_server.config import Config
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import DrafthouseError, Draining, EngineError, SlowReader
from drafthouse_server.scheduling.cells import check_context
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Sequence,
    TokensEvent,
)
from drafthouse_server.serving.bell import Bell
from drafthouse_server.serving.cache_feed import CacheFeeds
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.serving.engine_thread import EngineThread, LoadReport, StepReport
from drafthouse_server.serving.metrics import Metrics, Statistics
from drafthouse_server.serving.outbox import Outbox, WakeLimiter
from drafthouse_server.tenancy.admission import Admission, Ticket
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["N_FAILURES_UNHEALTHY", "StepLoop"]

_log = logging.getLogger(__name__)

_ANSWER_S = 1.0

N_FAILURES_UNHEALTHY = 3
"""Lost steps in a row after which the server is no longer healthy."""


class _Health:
    """How the loop does: whether steps are lost, one hangs, or the loop itself has failed.

    Args:
        admission: Is told, so that it refuses what would be lost.
        tell: Called with False when steps keep failing, and with True when they succeed again.
        step_timeout_s: How long a step may take, seconds; 0 is for ever.
    """

    def __init__(
        self, admission: Admission, tell: Callable[[bool], None], step_timeout_s: float
    ) -> None:
        self._admission = admission
        self._tell = tell
        self._step_timeout_s = step_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._n_failures = 0
        self.is_hung = False
        """Whether the step in flight takes longer than it may."""
        self.is_abandoned = False
        """Whether what the engine thread reports is of no use any more."""
        self.has_failed = False
        """Whether the loop itself has failed."""

    @property
    def is_healthy(self) -> bool:
        """Whether the last steps were not all lost, and none hangs."""
        is_working = self._n_failures < N_FAILURES_UNHEALTHY and not self.is_hung
        return is_working and not self.has_failed

    def note_step(self, *, is_lost: bool) -> None:
        """Notes how a step ended."""
        self._n_failures = self._n_failures + 1 if is_lost else 0
        self._report()

    def note_failure(self) -> None:
        """Notes that the loop itself has failed."""
        self.has_failed = True
        self._report()

    def watch(self, step_began_at: Callable[[], float | None]) -> None:
        """Looks now and then whether the step in flight takes too long, until `unwatch`."""
        if self._step_timeout_s:
            began_at = step_began_at()
            took_s = 0.0 if began_at is None else time.monotonic() - began_at
            self.is_hung = took_s > self._step_timeout_s
            self._report()
            wait_s = self._step_timeout_s / 4
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self.watch, step_began_at)

    def unwatch(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _report(self) -> None:
        is_healthy = self.is_healthy
        if is_healthy != self._admission.is_healthy:
            self._admission.is_healthy = is_healthy
            self._tell(is_healthy)


class StepLoop:
    """Starts the engine thread, feeds it, and delivers what it reports.

    Args:
        engine: Used by the engine thread from now on.
        scheduler: Decides which sequence gets what; the engine thread's from now on.
        n_waiting_max: Requests that may wait for a slot.
        retry_after_s: Advice to those who are refused, seconds.
        clock: Monotonic time in seconds; called on the engine thread.
        on_health: Called with False when steps keep failing, and with True when they succeed again.
        on_failure: Called when the loop itself has failed and every stream was told: it runs no
            more steps.
        executor: The engine thread; one of its own when not given.
        outbox_bytes: Bytes of tokens that may wait for the reader of one sequence.
        step_timeout_s: Seconds after which a step that has not ended counts as lost; 0: never.

    Thread:
        Event loop only. The scheduler and `Engine.step` and `Engine.close` belong to the engine
        thread; all that crosses is a message in one direction and a report in the other.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        n_waiting_max: int = 256,
        retry_after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_health: Callable[[bool], None] = lambda _: None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
        executor: ThreadPoolExecutor | None = None,
        outbox_bytes: int = 1 << 18,
        step_timeout_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self.admission = Admission(n_waiting_max, retry_after_s)
        """Decides who may enter, and counts those who did."""
        self._retry_after_s = retry_after_s
        self._health = _Health(self.admission, on_health, step_timeout_s)
        self._on_failure = on_failure
        self._executor = executor or _engine_executor()
        self._thread = EngineThread(engine, scheduler, self._post, clock)
        self._metrics = Metrics(model=engine.card.name)
        self._outboxes: dict[Sequence, Outbox] = {}
        self._tickets: dict[Sequence, Ticket] = {}
        self._limiter = WakeLimiter(time.perf_counter, outbox_bytes)
        self.feeds = CacheFeeds(lambda is_told: self._thread.tell_cache(is_told=is_told))
        """Feeds of what the prefix cache holds."""
        self._reports: deque[StepReport] = deque()
        self._is_posted = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()  # those who were let in; of use to several drains at once
        self.admission.on_empty = self._left.set
        self._is_ending = False  # whether no sequence is taken, with a ticket or without
        self._is_stopping = False
        self._bell = Bell(self._take_reports)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        make_engine: Callable[[], Engine],
        config: Config,
        *,
        on_health: Callable[[bool], None] = lambda _: None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> StepLoop:
        """Makes the engine on its own thread and starts a loop over it.

        Raises:
            ModelLoadError: a model cannot be loaded.
        """
        executor = _engine_executor()
        with contextlib.ExitStack() as undo:
            undo.callback(executor.shutdown, wait=False)
            engine = await asyncio.get_running_loop().run_in_executor(executor, make_engine)
            undo.pop_all()
        loop = cls(
            engine,
            make_scheduler(engine, config),
            n_waiting_max=config.queue_size,
            retry_after_s=config.retry_after_s,
            on_health=on_health,
            on_failure=on_failure,
            executor=executor,
            outbox_bytes=config.outbox_kib << 10,
            step_timeout_s=config.step_timeout_s,
        )
        loop.metrics.tenants.n_max = config.max_metrics_tenants
        loop.start()
        return loop

    @property
    def engine(self) -> Engine:
        """The engine; its thread rules apply."""
        return self._engine

    @property
    def metrics(self) -> Metrics:
        """What is counted; handlers add what they refuse."""
        return self._metrics

    @property
    def is_healthy(self) -> bool:
        """Whether the last steps were not all lost, and none hangs."""
        return self._health.is_healthy

    @property
    def is_hung(self) -> bool:
        """Whether a step takes longer than it may: its thread may never come back."""
        return self._health.is_hung

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` was called: there is nothing that could be closed."""
        return self._health.is_abandoned

    @property
    def is_draining(self) -> bool:
        """Whether no more requests are taken."""
        return self.admission.is_draining

    def start(self) -> None:
        """Starts the engine thread."""
        assert self._task is None, "started twice"
        self._bell.open()
        self._task = asyncio.create_task(self._run(), name="step-loop")
        self._task.add_done_callback(self._on_end)
        self._health.watch(lambda: self._thread.step_began_at)

    def check(self, n_prompt: int, n_output_max: int | None) -> int:
        """Checks that a request fits the context, and returns the most tokens it may generate.

        Raises:
            ContextTooLong: it does not fit (CONTEXT_TOO_LONG).
        """
        return check_context(self._engine.limits, n_prompt, n_output_max)

    def submit(self, sequence: Sequence, ticket: Ticket | None = None) -> Outbox:
        """Takes a sequence. Atomic: either it will have its terminal event, or an error is raised.

        Args:
            sequence: It must fit the context: `check` knows.
            ticket: Its place, which is the loop's from now on; asked for when not given.

        Raises:
            Draining: the loop runs no more steps; or it takes no more, and none was given or no
                slot is free (SERVER_DRAINING).
            QueueFull: none was given, and too many wait already (QUEUE_FULL).
            ContextTooLong: it does not fit the context (CONTEXT_TOO_LONG).
        """
        self.check(sequence.n_prompt, sequence.request.n_output_max)
        # A drain may have begun while the ticket's holder was prepared: its place is handed back.
        is_late = self.is_draining and len(self._outboxes) >= self._engine.limits.n_seq_max
        if self._is_ending or is_late:
            raise Draining(self._retry_after_s, is_failed=self._health.has_failed)
        tenant = Tenant(sequence.request.tenant, sequence.request.weight)
        self._tickets[sequence] = ticket or self.admission.admit(tenant)
        outbox = self._outboxes[sequence] = self._limiter.open()
        self._idle.clear()
        self._thread.submit(sequence)
        return outbox

    def cancel(self, sequence: Sequence) -> None:
        """Asks for the end of a sequence whose client has left.

        Its slot is free after the step in flight.
        """
        self._mark(sequence, FinishReason.CANCELLED)

    def finish(self, sequence: Sequence) -> None:
        """Asks for the normal completion of a sequence: a stop text matched.

        Its slot is free after the step in flight.
        """
        self._mark(sequence, FinishReason.STOP)

    def _mark(self, sequence: Sequence, end: FinishReason | DrafthouseError) -> None:
        # Most handlers cancel what has ended long ago: no reason to wake the thread.
        if sequence in self._outboxes:
            self._thread.mark(sequence, end)

    def charge(self, tenant: str, amount: float) -> None:
        """Counts units of service for a tenant that were given beside the steps.

        Args:
            tenant: Name of the tenant.
            amount: In the units of `service_weights`, by the time that it took.
        """
        self._thread.charge(tenant, amount)

    def forget_tenant(self, tenant: str) -> None:
        """Ends the streams of a tenant that was deleted, and forgets what is kept of it."""
        self._thread.forget_tenant(tenant)

    def statistics(self, *, has_tenants: bool = True) -> Statistics:
        """Returns what was counted so far.

        Args:
            has_tenants: As of `Metrics.statistics`.
        """
        self._metrics.n_running = self.admission.n_running
        self._metrics.n_waiting = self.admission.n_waiting
        return self._metrics.statistics(has_tenants=has_tenants)

    async def load(self, tenants: Collection[str] = ()) -> LoadReport | None:
        """Returns the load between two steps; None where none is told within a second.

        Args:
            tenants: Those whose counters of service are to be told.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.wrap_future(self._thread.ask_load(tenants))
        except TimeoutError:
            return None

    async def drain(self, timeout_s: float) -> int:
        """Takes no more requests, lets those that run finish, and ends what is left after a time.

        Those for whom no slot is free are told at once: another server may have one.

        Args:
            timeout_s: Seconds that they may go on.

        Returns:
            How many were ended early, with `Draining`.
        """
        if not self.is_draining:
            self.admission.drain()
            self._hand_back()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_left()
        self._is_ending = True
        left = list(self._outboxes)
        for sequence in left:
            self._mark(sequence, Draining(self._retry_after_s))
        if left and self._task is not None and not self._task.done():
            await self._idle.wait()
        return len(left)

    def _hand_back(self) -> None:
        """Ends those who wait and have no slot to come: nothing of them was written yet."""
        waiting = [
            sequence
            for sequence, outbox in self._outboxes.items()
            if outbox.is_new and not self._tickets[sequence].has_slot
        ]
        n_free = self._engine.limits.n_seq_max - (len(self._outboxes) - len(waiting))
        for sequence in waiting[max(0, n_free) :]:
            # It may have got a slot meanwhile: the engine thread knows.
            self._thread.refuse(sequence, Draining(self._retry_after_s))

    async def _all_left(self) -> None:
        """Waits until those who were let in have left: those who are prepared, too."""
        while self.admission.n_active:
            self._left.clear()
            await self._left.wait()

    def abandon(self) -> int:
        """Ends every stream while a step hangs, whose thread may never come back.

        No report is taken any more: this process is to end.

        Returns:
            How many were ended.
        """
        self._is_ending = self._is_stopping = self._health.is_abandoned = True
        self.admission.drain(is_failed=True)
        self._bell.close()
        left = list(self._outboxes)
        self._deliver((s, ErrorEvent(EngineError("STEP_TIMEOUT"))) for s in left)
        return len(left)

    async def close(self) -> None:
        """Ends everything, stops the loop and closes the engine. Harmless when done twice."""
        if self._is_stopping:
            return
        await self.drain(0.0)
        self._is_stopping = True
        self._health.unwatch()
        self._thread.stop()
        if self._task is not None:
            await asyncio.wait([self._task])  # its error, if any, was logged
        self.feeds.close()
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.close)
        self._executor.shutdown()

    async def _run(self) -> None:
        """Lives as long as the engine thread's loop; cancelled, it ends that one, if it can."""
        end = asyncio.get_running_loop().run_in_executor(self._executor, self._thread.run)
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError:
            self._thread.stop()
            if not self.is_abandoned:  # whoever waits for its step may wait for ever
                await end
            raise

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Ends all sequences that are left when the loop itself has failed or was cancelled.

        No client waits for ever.
        """
        self._is_ending = True
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("the step loop failed", exc_info=error)
            self._health.note_failure()
        self.admission.drain(is_failed=self._health.has_failed)
        self._take_reports()
        self._bell.close()
        for sequence in list(self._outboxes):
            lost = EngineError("LOOP_FAILED")
            end = sequence.terminal or sequence.fail(lost)
            # A completion that was not reported lacks its last tokens, which were not, either.
            self._deliver([(sequence, ErrorEvent(lost) if isinstance(end, FinishEvent) else end)])
        if error is not None:
            self._on_failure(error)

    def _post(self, report: StepReport) -> None:
        """Passes a report on to the event loop. Thread: engine thread only."""
        self._reports.append(report)
        # One wake-up is enough for all reports that are not taken yet.
        if not self._is_posted:
            self._is_posted = True
            self._bell.ring()

    def _take_reports(self) -> None:
        self._bell.answer()
        self._is_posted = False  # first: a report that comes from now on wakes us again
        if self._health.is_abandoned:
            return
        started = time.perf_counter()
        while self._reports:
            self._take(self._reports.popleft())
        self._limiter.wake(len(self._outboxes))
        self._metrics.fan_out_s += time.perf_counter() - started

    def _take(self, report: StepReport) -> None:
        for sequence, has_slot in report.moves:
            ticket = self._tickets.get(sequence)
            if ticket is not None:
                ticket.move(has_slot=has_slot)
                if has_slot:
                    self._outboxes[sequence].begin()
        self._deliver(report.events)
        if report.cache_events:
            self.feeds.put(report.cache_events)
        self._metrics.host_s += report.host_s
        self._metrics.scheduler = report.counts
        if report.is_lost:
            self._metrics.n_steps_failed += 1
        elif report.result is not None:
            self._metrics.count_step(report.result)
        if report.is_lost or report.result is not None:
            self._health.note_step(is_lost=report.is_lost)

    def _deliver(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        """Puts events into the outboxes; a terminal one is the last.

        First tokens and ends go out at once.
        """
        outboxes, hold = self._outboxes, self._limiter.hold
        for sequence, event in events:
            outbox = outboxes[sequence]
            if not outbox.put(event):
                self._thread.mark(sequence, SlowReader(self._limiter.outbox_bytes, "bytes"))
            # Nearly all are tokens, and so the question that is asked first is the cheapest.
            if type(event) is TokensEvent:
                if outbox.is_new:
                    outbox.wake()
                elif not outbox.is_held:
                    hold(outbox)
            elif isinstance(event, FinishEvent | ErrorEvent):
                outbox.wake()
                del outboxes[sequence]
                self._tickets.pop(sequence).give_back()
                self._count_end(sequence, event)
            else:
                hold(outbox)
        if not outboxes:
            self._idle.set()

    def _count_end(self, sequence: Sequence, event: FinishEvent | ErrorEvent) -> None:
        """Counts what the engine did for a sequence; how its stream ended its account counts."""
        if isinstance(event, ErrorEvent) and isinstance(event.error, EngineError):
            _log.error("request %s: %s", sequence.request.request_id, event.error)
        own, tally = self._metrics.tenants.of(sequence.request.tenant), sequence.tally
        if not math.isnan(sequence.clock.slot_at):
            own.queue.observe(sequence.timings.queue_s)
        own.note_drafts(tally.n_drafts, tally.n_drafted, tally.n_drafts_by_accepted)


def _engine_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
