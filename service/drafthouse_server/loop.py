"""The step loop: takes requests, runs steps on the engine thread, hands out what they yield."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from drafthouse_server.config import Config
from drafthouse_server.engine import Engine
from drafthouse_server.errors import DrafthouseError, Draining, EngineError, QueueFull
from drafthouse_server.metrics import Metrics, Statistics
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
from drafthouse_server.speculation import DraftPolicy, FixedDraft
from drafthouse_server.step import StepPlan, StepResult
from drafthouse_server.tenants import Load

__all__ = ["N_FAILURES_UNHEALTHY", "Outbox", "StepLoop"]

_log = logging.getLogger(__name__)

N_FAILURES_UNHEALTHY = 3
"""Lost steps in a row after which the server is no longer healthy."""

_PAUSE_S = 0.1


class Outbox:
    """One sequence's events, in order, until its reader takes them.

    It never makes the loop wait: a reader who is slow, or gone, holds no slot. The sequence's
    output limit bounds it.
    Use: `async for event in outbox`, or `receive` for all that is ready.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._is_ready = asyncio.Event()
        self._is_over = False

    def put(self, event: Event) -> None:
        """Adds an event and wakes the reader."""
        self._events.append(event)
        self._is_ready.set()

    async def receive(self) -> list[Event]:
        """Waits until something is there and returns all of it; nothing after a terminal event.

        Cancellation:
            Atomic: events are either returned or still there.
        """
        if self._is_over:
            return []
        await self._is_ready.wait()
        self._is_ready.clear()
        events = list(self._events)
        self._events.clear()
        self._is_over = not isinstance(events[-1], TokensEvent)
        return events

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yields the events, the terminal one last."""
        while events := await self.receive():
            for event in events:
                yield event


class StepLoop:
    """Runs steps while there is something to do, and sleeps otherwise.

    Args:
        engine: Used by the loop's thread from now on.
        policy: Chooses K.
        n_waiting_max: Requests that may wait for a slot.
        retry_after_s: Advice to those who are refused, seconds.
        clock: Monotonic time in seconds.
        on_health: Called with False when steps keep failing, and with True when they succeed again.
        executor: The engine thread; one of its own when not given.

    Thread:
        Event loop only; `Engine.step` and `Engine.close` alone run on the engine thread.
    """

    def __init__(
        self,
        engine: Engine,
        policy: DraftPolicy,
        *,
        n_waiting_max: int = 256,
        retry_after_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        on_health: Callable[[bool], None] | None = None,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        self._engine = engine
        self._scheduler = Scheduler(engine.limits, policy)
        self._n_waiting_max = n_waiting_max
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._on_health = on_health
        self._executor = executor or _engine_thread()
        self._metrics = Metrics()
        self._inbox: deque[Sequence] = deque()
        self._outboxes: dict[Sequence, Outbox] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._is_stopping = False
        self._n_failures = 0
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        make_engine: Callable[[], Engine],
        config: Config,
        *,
        on_health: Callable[[bool], None] | None = None,
    ) -> StepLoop:
        """Makes the engine on its own thread and starts a loop over it.

        Raises:
            ModelLoadError: a model cannot be loaded.
        """
        executor = _engine_thread()
        try:
            engine = await asyncio.get_running_loop().run_in_executor(executor, make_engine)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        loop = cls(
            engine,
            FixedDraft(config.n_draft_default),
            n_waiting_max=config.n_waiting_max,
            retry_after_s=config.retry_after_s,
            on_health=on_health,
            executor=executor,
        )
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
        """Whether the last steps were not all lost."""
        return self._n_failures < N_FAILURES_UNHEALTHY

    @property
    def is_draining(self) -> bool:
        """Whether no more requests are taken."""
        return self._is_draining

    def start(self) -> None:
        """Starts the loop's task."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="step-loop")
        self._task.add_done_callback(self._on_end)

    def check(self, n_prompt: int, n_output_max: int | None) -> int:
        """Checks that a request fits the context, and returns the most tokens it may generate.

        Raises:
            ContextTooLong: it does not fit (CONTEXT_TOO_LONG).
        """
        return self._scheduler.check(n_prompt, n_output_max)

    def load(self, tenant: str) -> Load:
        """Returns how busy the loop is, for `Admission.admit`."""
        mine = [sequence for sequence in self._outboxes if sequence.tenant == tenant]
        waiting = [sequence for sequence in mine if sequence.state is SequenceState.WAITING]
        return Load(self._n_waiting(), len(waiting), len(mine), self._is_draining)

    def _n_waiting(self) -> int:
        return len(self._inbox) + self._scheduler.n_waiting

    def submit(self, sequence: Sequence) -> Outbox:
        """Takes a sequence. Atomic: either it will have its terminal event, or an error is raised.

        Raises:
            Draining: the loop takes no more (SERVER_DRAINING).
            QueueFull: too many wait already (QUEUE_FULL).
            ContextTooLong: it does not fit the context (CONTEXT_TOO_LONG).
        """
        if self._is_draining:
            raise Draining(self._retry_after_s)
        n_waiting = self._n_waiting()
        if n_waiting >= self._n_waiting_max:
            raise QueueFull(n_waiting, self._retry_after_s)
        self._scheduler.check(sequence.n_prompt, sequence.n_output_max)
        outbox = self._outboxes[sequence] = Outbox()
        self._inbox.append(sequence)
        self._idle.clear()
        self._wake.set()
        return outbox

    def cancel(self, sequence: Sequence) -> None:
        """Asks for the end of a sequence whose client has left.

        Its slot is free after the step in flight.
        """
        self._mark(sequence, FinishReason.CANCELLED)

    def finish(self, sequence: Sequence) -> None:
        """Asks for the good end of a sequence, because its text is complete.

        Its slot is free after the step in flight.
        """
        self._mark(sequence, FinishReason.STOP)

    def _mark(self, sequence: Sequence, end: FinishReason | DrafthouseError) -> None:
        self._scheduler.mark(sequence, end)
        self._wake.set()

    def statistics(self) -> Statistics:
        """Returns what was counted so far."""
        self._metrics.n_running = self._scheduler.n_running
        self._metrics.n_waiting = self._n_waiting()
        return self._metrics.statistics()

    async def drain(self, timeout_s: float) -> int:
        """Takes no more requests, lets those here finish, and ends what is left after a time.

        Args:
            timeout_s: Seconds that they may go on.

        Returns:
            How many were ended early, with `Draining`.
        """
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = list(self._outboxes)
        for sequence in left:
            self._mark(sequence, Draining(self._retry_after_s))
        if left and self._task is not None and not self._task.done():
            await self._idle.wait()
        return len(left)

    async def close(self) -> None:
        """Ends everything, stops the loop and closes the engine. Harmless when done twice."""
        if self._is_stopping:
            return
        await self.drain(0.0)
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])  # its error, if any, was logged
        await asyncio.get_running_loop().run_in_executor(self._executor, self._engine.close)
        self._executor.shutdown()

    async def _run(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            plan = self._prepare()
            if plan.is_empty:
                await self._wake.wait()
            else:
                await self._step(plan)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Ends whoever is left when the loop itself has failed or was cancelled.

        Nobody waits for ever.
        """
        self._is_draining = True
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.critical("the step loop failed", exc_info=error)
            self._n_failures = N_FAILURES_UNHEALTHY
            if self._on_health is not None:
                self._on_health(False)
        for sequence in list(self._outboxes):
            if sequence.terminal is None:
                event = sequence.fail(EngineError("LOOP_FAILED", sequence.request_id))
                self._deliver([(sequence, event)])

    def _prepare(self) -> StepPlan:
        """Returns the next plan, after the inbox was taken in and what has ended was given back."""
        started = time.perf_counter()
        while self._inbox:
            self._scheduler.submit(self._inbox.popleft())
        now = self._clock()
        self._deliver(self._scheduler.reap(now))
        plan = self._scheduler.plan(now)
        self._metrics.host_s += time.perf_counter() - started
        return plan

    async def _step(self, plan: StepPlan) -> None:
        """Runs one plan.

        A failure of the engine ends the sequences of this step and nothing else.
        """
        step = asyncio.get_running_loop().run_in_executor(self._executor, self._engine.step, plan)
        try:
            result = await step
        except Exception as error:
            _log.exception("a step of %d sequences was lost", len(plan.entries))
            self._deliver(self._scheduler.abandon(plan, error))
            self._count_failure()
            # A dead engine fails at once: without a pause the loop would do nothing else.
            await asyncio.sleep(_PAUSE_S * min(self._n_failures - 1, 10))
        else:
            self._take(result)

    def _take(self, result: StepResult) -> None:
        started = time.perf_counter()
        self._deliver(self._scheduler.commit(result, self._clock()))
        self._metrics.count_step(result)
        self._metrics.host_s += time.perf_counter() - started
        if self._n_failures:
            was_healthy, self._n_failures = self.is_healthy, 0
            self._report_health(was_healthy)

    def _count_failure(self) -> None:
        was_healthy = self.is_healthy
        self._n_failures += 1
        self._metrics.n_steps_failed += 1
        self._report_health(was_healthy)

    def _report_health(self, was_healthy: bool) -> None:
        if self._on_health is not None and self.is_healthy != was_healthy:
            self._on_health(self.is_healthy)

    def _deliver(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        """Puts events into the outboxes; a terminal one is the last."""
        for sequence, event in events:
            self._outboxes[sequence].put(event)
            if not isinstance(event, TokensEvent):
                del self._outboxes[sequence]
                self._count_end(sequence, event)
        if not self._outboxes:
            self._idle.set()

    def _count_end(self, sequence: Sequence, event: FinishEvent | ErrorEvent) -> None:
        if isinstance(event, ErrorEvent):
            outcome = event.error.reason
            if isinstance(event.error, EngineError):
                _log.error("request %s: %s", sequence.request_id, event.error)
        else:
            outcome = event.reason.name.lower()
        self._metrics.count_request(outcome, sequence.n_prompt, sequence.n_output)


def _engine_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
