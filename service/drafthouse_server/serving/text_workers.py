"""Work on clients' texts: a few workers, for which the tenants' requests wait in turn.

What clients send as text is read by workers alone (`engine.text_worker`): tokenised, formatted,
compiled. Here is decided whose text is next and when a worker is given up, and a new one is started
in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from drafthouse_server.engine.protocol import TextWorker, TextWorkerLost
from drafthouse_server.engine.text_jobs import TextAnswer, TextJob
from drafthouse_server.errors import (
    DrafthouseError,
    Draining,
    EngineError,
    EngineUnhealthy,
    FieldViolation,
    InvalidRequest,
    StartupError,
)
from drafthouse_server.serving.metrics import Metrics
from drafthouse_server.tenancy.fairness import Turns
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["Charge", "TextWorkers", "cpu_limit_s"]

_log = logging.getLogger(__name__)

Charge = Callable[[str, float], None]
"""Called with tenant and processor seconds of each job that was done, or cut off."""

_Argument = TypeVar("_Argument")
_Made = TypeVar("_Made")

_JOB_S = 0.25
"""Processor time that every job may take, seconds; templates take milliseconds."""
_SAMPLER_S = 0.5
"""Processor time that a grammar or DRY breakers may take besides, seconds."""
_MIB_S = 1.0
"""Processor time that a MiB may take besides, seconds; it takes about a quarter of that."""
_START_S = 0.5
"""What starting a process costs, about; a tenant is charged for those that it ends."""

_PATIENCE_S = 10.0
"""A job that has had no answer after so long, and `_PATIENCE` times its processor time, is cut off:
its worker was stopped, or gets no processor at all."""
_PATIENCE = 20.0

_N_COST_BYTES = 256
"""What a job costs beside its bytes."""
_MIB = 1 << 20

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 5.0

_N_FAILED_STARTS = 4
"""Starts of a worker that have failed in a row, in 0.7 s or more, from which on a pool that has
no worker left refuses jobs."""

_END_S = 10.0
"""Seconds that the end of workers is waited for that were killed."""


def cpu_limit_s(job: TextJob) -> float:
    """Returns the processor time that a job may take, seconds."""
    sampler_s = _SAMPLER_S if job.sampling is not None else 0.0
    return _JOB_S + sampler_s + _MIB_S * job.n_bytes / _MIB


class TextWorkers:
    """Workers on texts, and the jobs that wait for them, a line for each tenant.

    A tenant holds all workers but one, at most, so that another finds one soon. A job that ends its
    worker fails alone; its tenant waits until another worker has been started in its place, which
    it is charged for, while the others go on with one that was waiting for that. Where no worker is
    left and none can be started, jobs are refused until one is there again.

    Args:
        make_worker: Makes a worker that has not started; may raise StartupError.
        n: Workers, >= 1; one more is kept ready.
        metrics: Where is counted what they do; nowhere when not given.
        retry_after_s: Advice to those who are refused because the server ends, seconds.
        charge: Is told what each tenant has cost.
        patience_s: Seconds without an answer, beside 20 times the job's processor time, after which
            a worker is given up.
        on_health: Called when no worker is left and none can be started, and when one is there
            again.

    Thread:
        Event loop only.
    """

    def __init__(
        self,
        make_worker: Callable[[], TextWorker],
        n: int = 2,
        *,
        metrics: Metrics | None = None,
        retry_after_s: float = 1.0,
        charge: Charge = lambda *_: None,
        patience_s: float = _PATIENCE_S,
        on_health: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_worker = make_worker
        self._n = n
        self._metrics = metrics or Metrics()
        self._retry_after_s = retry_after_s
        self._charge = charge
        self._patience_s = patience_s
        self._turns: Turns[asyncio.Future[TextWorker]] = Turns()
        self._at_work: set[TextWorker] = set()
        """Workers that are given jobs, busy or not."""
        self._idle: list[TextWorker] = []
        self._spares: list[TextWorker] = []
        self._n_busy: Counter[str] = Counter()
        self._debts: deque[str] = deque()
        """Tenants whose job has ended a worker, until another has been started."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._makers = ThreadPoolExecutor(max_workers=n, thread_name_prefix="sampler")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_closed = False
        self._n_failed_starts = 0  # in a row, of a worker
        self._on_health = on_health
        self.is_healthy = True
        """Whether there is a worker, or one is likely to come."""

    @property
    def workers(self) -> tuple[TextWorker, ...]:
        """All workers that live, the spare one last."""
        return (*self._at_work, *self._spares)

    async def open(self) -> None:
        """Starts the workers, and returns when all but the spare one are ready.

        Raises:
            StartupError: a worker cannot be started.
        """
        workers = [self._make_worker() for _ in range(self._n)]
        starts = [asyncio.ensure_future(worker.start()) for worker in workers]
        async with contextlib.AsyncExitStack() as undo:
            for worker in workers:
                undo.push_async_callback(worker.end)
            undo.push_async_callback(asyncio.wait, starts)  # the first of these
            await asyncio.gather(*starts)
            undo.pop_all()
        for worker in workers:
            self._enter(worker)
        if workers[0].not_dropped:
            _log.warning(
                "text workers keep rights that they do not need: %s", workers[0].not_dropped
            )
        if workers[0].chat_problem:
            _log.warning("a chat of one user's message is refused: %s", workers[0].chat_problem)
        self._begin(self._add_another())

    async def close(self) -> None:
        """Ends all workers; jobs that wait or run are refused. Harmless when done twice."""
        self._is_closed = True
        self._refuse_all(Draining(self._retry_after_s))
        for task in self._tasks:
            task.cancel()
        ends = {asyncio.ensure_future(worker.end()) for worker in self.workers} | self._tasks
        if ends:
            _, late = await asyncio.wait(ends, timeout=_END_S)
            if late:  # a process that waits for a disk ends when that answers
                _log.error("a text worker was killed and has not ended within %g s", _END_S)
        self._at_work.clear()
        self._spares.clear()
        self._makers.shutdown(wait=False, cancel_futures=True)

    def _refuse_all(self, error: DrafthouseError) -> None:
        """Refuses the jobs that wait."""
        while (place := self._turns.take()) is not None:
            if not place[1].done():
                place[1].set_exception(error)
        self._metrics.n_text_waiting = 0

    def _note_health(self) -> None:
        """Notes whether there is a worker; tells who wants to know, and those who wait."""
        is_healthy = bool(self._at_work) or self._n_failed_starts < _N_FAILED_STARTS
        if is_healthy != self.is_healthy and not self._is_closed:
            self.is_healthy = is_healthy
            if not is_healthy:
                self._refuse_all(self._unhealthy())
            self._on_health()

    def _unhealthy(self) -> EngineUnhealthy:
        return EngineUnhealthy(self._retry_after_s, "the server's text workers cannot be started")

    async def run(self, job: TextJob, tenant: Tenant) -> TextAnswer:
        """Has a job done, when it is the tenant's turn.

        Cancellation:
            A job that waits leaves its line; one that runs goes on, and nobody hears of it.

        Raises:
            InvalidRequest: the job cannot be done, or took more than it may; fields have the
                engine's names (INVALID_FIELD).
            EngineUnhealthy: no worker is left, and none can be started (ENGINE_UNHEALTHY).
            EngineError: something else has ended its worker, twice (ENGINE_FAILURE).
            Draining: the server ends (SERVER_DRAINING).
        """
        if self._is_closed:
            raise Draining(self._retry_after_s)
        try:
            answer = await self._answer(job, tenant)
        except TextWorkerLost as error:
            raise self._failure(error, job) from error
        if answer.problems:
            raise InvalidRequest(answer.problems)
        return answer

    async def _answer(self, job: TextJob, tenant: Tenant) -> TextAnswer:
        """Has a job done, by a second worker where something else has ended the first.

        Raises:
            TextWorkerLost: the job has ended its worker, or something else has ended both.
        """
        cost = job.n_bytes + _N_COST_BYTES
        for is_last in (False, True):
            worker = await self._wait(tenant, cost)
            try:
                return await asyncio.shield(self._ask(worker, job, tenant.name, cost))
            except TextWorkerLost as error:
                if is_last or self._is_closed or error.cause != TextWorkerLost.ENDED:
                    raise
        raise AssertionError("the last worker has answered, or was lost")

    async def make(
        self, function: Callable[[_Argument], _Made], argument: _Argument, tenant: Tenant
    ) -> _Made:
        """Calls a function on a thread: again, what a worker has done within its bounds.

        Args:
            function: May be called on any thread.
            argument: Its argument, which a worker has seen.
            tenant: Whose it is; of a tenant, one call runs at a time.
        """
        lock = self._locks.setdefault(tenant.name, asyncio.Lock())
        async with lock:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._makers, function, argument)

    async def _wait(self, tenant: Tenant, cost: int) -> TextWorker:
        """Waits for the tenant's turn, and returns a worker that is its own for one job."""
        if not self.is_healthy:
            raise self._unhealthy()
        waiter: asyncio.Future[TextWorker] = asyncio.get_running_loop().create_future()
        self._turns.put(tenant.name, waiter, cost, tenant.weight)
        self._hand_out()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result(), tenant.name)
            else:
                self._turns.remove(tenant.name, waiter)
                self._metrics.n_text_waiting = len(self._turns)
            raise

    def _hand_out(self) -> None:
        """Gives idle workers to those whose turn it is."""
        while self._idle and (place := self._turns.take(self._may)) is not None:
            tenant, waiter = place
            if not waiter.done():
                self._n_busy[tenant] += 1
                waiter.set_result(self._idle.pop())
        self._metrics.n_text_waiting = len(self._turns)

    def _may(self, tenant: str) -> bool:
        is_free = self._n_busy[tenant] < max(1, self._n - 1)
        return is_free and tenant not in self._debts

    def _ask(
        self, worker: TextWorker, job: TextJob, tenant: str, cost: int
    ) -> asyncio.Future[TextAnswer]:
        """Gives a worker its job; the worker is free again when it has answered, or lost."""
        cpu_s = cpu_limit_s(job)
        try:
            answering = worker.ask(job, cpu_s)
        except ValueError:
            self._give_back(worker, tenant)
            raise
        guard = asyncio.get_running_loop().call_later(
            self._patience_s + _PATIENCE * cpu_s, functools.partial(worker.kill, is_late=True)
        )

        def on_answer(answered: asyncio.Future[TextAnswer]) -> None:
            guard.cancel()
            error = None if answered.cancelled() else answered.exception()
            is_lost = error is not None or answered.result().is_last
            spent_s = cpu_s + _START_S if error is not None else answered.result().cpu_s
            self._count(tenant, spent_s, error)
            self._turns.charge(tenant, max(0.0, spent_s * _MIB / _MIB_S - cost))
            if is_lost:
                self._debts.append(tenant)
                self._drop(worker)
            self._give_back(worker, tenant)

        answering.add_done_callback(on_answer)
        return answering

    def _count(self, tenant: str, spent_s: float, error: BaseException | None) -> None:
        self._metrics.text_s += spent_s
        if isinstance(error, TextWorkerLost):
            self._metrics.n_text_workers_lost[error.cause] += 1
            _log.warning("tenant %s: %s", tenant, error)
        self._charge(tenant, spent_s)

    def _give_back(self, worker: TextWorker, tenant: str) -> None:
        """Takes back a worker that a tenant had."""
        self._n_busy[tenant] -= 1
        if not self._n_busy[tenant]:
            del self._n_busy[tenant]
        if worker in self._at_work:
            self._idle.append(worker)
        self._hand_out()
        if not self._n_busy:
            self._turns.rest()

    def _failure(self, error: TextWorkerLost, job: TextJob) -> DrafthouseError:
        """Returns what a client is told whose job has ended its worker."""
        if self._is_closed:
            return Draining(self._retry_after_s)
        if error.cause == TextWorkerLost.LATE:
            problem = f"could not be read within {cpu_limit_s(job):.2f} s of processor time"
        elif error.cause == TextWorkerLost.CRASHED:
            problem = "could not be read: it ended the process that read it"
        else:
            return EngineError("TEXT_WORKER_ENDED")
        return InvalidRequest([FieldViolation(job.path, problem)])

    def _enter(self, worker: TextWorker) -> None:
        """Gives a worker its place: among those that work, or as the spare one."""
        self._n_failed_starts = 0
        if len(self._at_work) < self._n:
            self._at_work.add(worker)
            self._idle.append(worker)
        else:
            self._spares.append(worker)
        self._note_health()
        self._begin(self._watch(worker))
        self._hand_out()

    async def _watch(self, worker: TextWorker) -> None:
        """Waits for the end of a worker, and starts another."""
        try:
            await worker.wait()
            if worker in self._idle or worker in self._spares:
                _log.warning("a text worker that had nothing to do has ended; starting another")
            self._drop(worker)
        finally:
            await worker.end()  # as the pool closes, too: one that was dropped is in no list then
        await self._add_another()

    def _drop(self, worker: TextWorker) -> None:
        """Takes a worker's place away; the spare one gets it."""
        worker.kill()
        if worker in self._spares:
            self._spares.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if worker in self._at_work:
            self._at_work.remove(worker)
            if self._spares:
                spare = self._spares.pop()
                self._at_work.add(spare)
                self._idle.append(spare)
                self._hand_out()
        self._note_health()

    async def _add_another(self) -> None:
        worker = await self._start_another()
        if self._debts:
            self._debts.popleft()
        self._enter(worker)

    async def _start_another(self) -> TextWorker:
        """Starts a worker, however often that has to be tried."""
        delay_s, n_failed = _RETRY_MIN_S, 0
        while True:
            try:
                worker = self._make_worker()
                await worker.start()
            except StartupError as error:
                n_failed += 1
                self._n_failed_starts = max(self._n_failed_starts, n_failed)
                self._note_health()
                _log.error("%s; trying again in %g s", error, delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(_RETRY_MAX_S, 2 * delay_s)
            else:
                return worker

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
