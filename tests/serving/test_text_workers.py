"""Texts wait for workers in turn, and a worker that is lost costs one request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest

from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.protocol import TextWorkerLost
from drafthouse_server.engine.text_jobs import TextAnswer, TextJob
from drafthouse_server.errors import (
    Draining,
    EngineError,
    EngineUnhealthy,
    FieldViolation,
    InvalidRequest,
    StartupError,
)
from drafthouse_server.serving.metrics import Metrics
from drafthouse_server.serving.text_workers import TextWorkers, cpu_limit_s
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from tests.conftest import Eventually

A, B, C = (Tenant(name) for name in "abc")


class HandWorker:
    """A worker whose answers a test gives."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.job: TextJob | None = None
        self.answer: asyncio.Future[TextAnswer] | None = None
        self.ended = asyncio.Event()
        self.cpu_s = 0.0

    @property
    def not_dropped(self) -> str:
        return ""

    @property
    def chat_problem(self) -> str:
        return ""

    async def start(self) -> None:
        self.shop.n_starts += 1
        await self.shop.may_start.wait()
        if self.shop.n_failures:
            self.shop.n_failures -= 1
            raise StartupError("no memory")

    def ask(self, job: TextJob, cpu_s: float) -> asyncio.Future[TextAnswer]:
        assert not self.ended.is_set()
        assert self.answer is None or self.answer.done()
        self.job, self.cpu_s = job, cpu_s
        self.answer = asyncio.get_running_loop().create_future()
        self.shop.order.append(job.text or "")
        return self.answer

    def finish(self, cpu_s: float = 0.0) -> None:
        assert self.answer is not None
        assert self.job is not None
        self.answer.set_result(TextAnswer([len(self.job.text or "")], cpu_s=cpu_s))

    def die(self, cause: str = TextWorkerLost.CRASHED) -> None:
        self.ended.set()
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(TextWorkerLost(cause))

    def kill(self, *, is_late: bool = False) -> None:
        self.die(TextWorkerLost.LATE if is_late else TextWorkerLost.ENDED)

    async def wait(self) -> None:
        await self.ended.wait()

    async def end(self) -> None:
        self.kill()


class Shop:
    """Makes workers and remembers what they were asked for."""

    def __init__(self) -> None:
        self.workers: list[HandWorker] = []
        self.order: list[str] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_end = asyncio.Event()
        self.killed: set[HandWorker] = set()
        self.n_starts = 0
        self.n_failures = self.n_unmade = 0

    def make(self, kind: type[HandWorker] = HandWorker) -> HandWorker:
        if self.n_unmade:
            self.n_unmade -= 1
            raise StartupError("no memory")
        self.workers.append(kind(self))
        return self.workers[-1]

    def busy(self) -> list[HandWorker]:
        return [w for w in self.workers if w.answer is not None and not w.answer.done()]


class Pool:
    """A pool of workers by hand."""

    def __init__(self, n: int) -> None:
        self.shop = Shop()
        self.metrics = Metrics()
        self.charges: list[tuple[str, float]] = []
        self.health: list[bool] = []
        self.texts = TextWorkers(
            self.shop.make,
            n,
            metrics=self.metrics,
            charge=lambda *charge: self.charges.append(charge),
            on_health=lambda: self.health.append(self.texts.is_healthy),
        )
        self.runs: list[asyncio.Task[TextAnswer]] = []

    async def run(self, tenant: Tenant, text: str) -> asyncio.Task[TextAnswer]:
        """Asks for a job, and returns when it waits or runs."""
        task = asyncio.create_task(self.texts.run(TextJob(text=text), tenant))
        self.runs.append(task)
        await settle()
        return task

    async def finish_all(self) -> list[str]:
        """Lets all jobs finish, the first busy worker first; returns the order of all starts."""
        while busy := self.shop.busy():
            busy[0].finish()
            await settle()
        return self.shop.order


async def settle() -> None:
    """Lets everybody go on who can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def open_pool() -> AsyncIterator[Callable[[int], Pool]]:
    pools: list[Pool] = []

    def make(n: int) -> Pool:
        pools.append(Pool(n))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.texts.close()
        await asyncio.gather(*pool.runs, return_exceptions=True)


async def test_a_flood_of_one_tenant_waits_for_another_that_comes_later(
    open_pool: Callable[[int], Pool],
) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    for i in range(6):
        await pool.run(A, f"a{i}")
    await pool.run(B, "b0")
    await pool.run(C, "c0")
    assert pool.metrics.n_text_waiting == 7
    assert await pool.finish_all() == ["a0", "b0", "c0", "a1", "a2", "a3", "a4", "a5"]
    assert [len(run.result().tokens or ()) for run in pool.runs] == [1] * 8


async def test_turns_are_by_bytes_and_weight(open_pool: Callable[[int], Pool]) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    heavy = dataclasses.replace(B, weight=10.0)
    await pool.run(C, "first")
    for i in range(3):
        await pool.run(A, f"a{i}" + "x" * 5000)
    for i in range(3):
        await pool.run(heavy, f"b{i}" + "x" * 5000)
    order = [text[:2] for text in await pool.finish_all()]
    assert order == ["fi", "a0", "b0", "b1", "b2", "a1", "a2"]


async def test_a_tenant_leaves_one_worker_to_others(open_pool: Callable[[int], Pool]) -> None:
    pool = open_pool(3)
    await pool.texts.open()
    for i in range(5):
        await pool.run(A, f"a{i}")
    assert pool.shop.order == ["a0", "a1"]
    await pool.run(B, "b0")
    assert pool.shop.order == ["a0", "a1", "b0"]
    assert await pool.finish_all() == ["a0", "a1", "b0", "a2", "a3", "a4"]


async def test_what_a_job_has_taken_is_charged(open_pool: Callable[[int], Pool]) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    await pool.run(A, "a0")
    await pool.run(A, "a1")
    for i in range(3):
        await pool.run(B, f"b{i}" + "x" * 10_000)
    pool.shop.busy()[0].finish(cpu_s=0.2)  # as much as 200 KB are allowed, for two bytes
    await settle()
    assert await pool.finish_all() == ["a0", *(f"b{i}" + "x" * 10_000 for i in range(3)), "a1"]
    assert pool.charges[0] == ("a", 0.2)
    assert len(pool.charges) == 5
    assert pool.metrics.text_s == pytest.approx(0.2)


async def test_a_job_that_is_cancelled_leaves_the_line(open_pool: Callable[[int], Pool]) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    await pool.run(A, "a0")
    gone = await pool.run(A, "a1")
    await pool.run(A, "a2")
    gone.cancel()
    await settle()
    assert gone.cancelled()
    assert pool.metrics.n_text_waiting == 1
    assert await pool.finish_all() == ["a0", "a2"]


async def test_a_running_job_that_is_cancelled_holds_its_worker_until_it_is_done(
    open_pool: Callable[[int], Pool],
) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    gone = await pool.run(A, "a0")
    await pool.run(B, "b0")
    gone.cancel()
    await settle()
    assert gone.cancelled()
    assert pool.shop.order == ["a0"]
    assert await pool.finish_all() == ["a0", "b0"]
    assert [charge[0] for charge in pool.charges] == ["a", "b"], "it was charged all the same"
    assert len(pool.texts._idle) == 1


async def test_a_turn_that_comes_as_the_client_leaves_is_given_back(
    open_pool: Callable[[int], Pool],
) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    await pool.run(A, "a0")
    gone = await pool.run(A, "a1")
    answer = pool.shop.busy()[0].answer
    assert answer is not None
    answer.add_done_callback(lambda _: gone.cancel())  # after the pool's own: it has its turn
    pool.shop.busy()[0].finish()
    await settle()
    assert gone.cancelled()
    assert pool.shop.order == ["a0"]
    assert len(pool.texts._idle) == 1
    await pool.run(A, "a2")
    assert await pool.finish_all() == ["a0", "a2"]


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (TextWorkerLost.LATE, "could not be read within 0.25 s of processor time"),
        (TextWorkerLost.CRASHED, "could not be read: it ended the process that read it"),
    ],
)
async def test_a_lost_worker_costs_one_request_and_the_spare_one_takes_its_place(
    open_pool: Callable[[int], Pool], cause: str, told: str
) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    await settle()
    assert pool.shop.n_starts == 2
    lost = await pool.run(A, "a0")
    await pool.run(B, "b0")
    await pool.run(A, "a1")
    pool.shop.may_start.clear()
    pool.shop.busy()[0].die(cause)
    await settle()
    with pytest.raises(InvalidRequest) as caught:
        await lost
    assert caught.value.violations == (FieldViolation("text", told),)
    assert pool.shop.order == ["a0", "b0"], "the spare worker"
    pool.shop.busy()[0].finish()
    await settle()
    assert pool.shop.order == ["a0", "b0"], "who has ended a worker waits for another"
    pool.shop.may_start.set()
    await settle()
    assert await pool.finish_all() == ["a0", "b0", "a1"]
    assert len(pool.texts.workers) == 2
    assert pool.metrics.n_text_workers_lost == {cause: 1}
    assert pool.charges[0][1] > 0.25


async def _lose_to_something_else(pool: Pool) -> None:
    """Ends the worker that is busy; another starts once that is known, as processes do."""
    pool.shop.may_start.clear()
    pool.shop.busy()[0].die(TextWorkerLost.ENDED)
    await settle()
    pool.shop.may_start.set()
    await settle()


async def test_a_job_whose_worker_something_else_has_ended_is_done_by_another(
    open_pool: Callable[[int], Pool],
) -> None:
    """Before, whoever asked after the system had ended a worker was told ENGINE_FAILURE."""
    pool = open_pool(2)
    await pool.texts.open()
    again = await pool.run(A, "a0")
    await _lose_to_something_else(pool)
    assert await pool.finish_all() == ["a0", "a0"]
    assert (await again).tokens == [2]
    assert pool.metrics.n_text_workers_lost == {TextWorkerLost.ENDED: 1}


async def test_a_job_that_loses_two_workers_to_something_else_is_our_fault(
    open_pool: Callable[[int], Pool],
) -> None:
    pool = open_pool(2)
    await pool.texts.open()
    lost = await pool.run(A, "a0")
    for _ in range(2):
        await _lose_to_something_else(pool)
    with pytest.raises(EngineError, match="TEXT_WORKER_ENDED"):
        await lost


async def test_an_idle_worker_that_ends_costs_nothing_and_is_told(
    open_pool: Callable[[int], Pool], caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool(2)
    await pool.texts.open()
    await settle()
    for worker in pool.shop.workers[:3]:
        worker.die()
    await settle()
    assert len(pool.texts.workers) == 3
    assert not set(pool.texts.workers) & set(pool.shop.workers[:3])
    assert caplog.text.count("that had nothing to do has ended") == 3
    await pool.run(A, "a0")
    assert await pool.finish_all() == ["a0"]


async def test_a_job_without_an_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse_server.serving.text_workers._PATIENCE", 0.0)
    shop = Shop()
    texts = TextWorkers(shop.make, 1, patience_s=0.01)
    await texts.open()
    with pytest.raises(InvalidRequest, match="could not be read within"):
        await texts.run(TextJob(text="x"), A)
    assert shop.workers[0].ended.is_set()
    await texts.close()


@pytest.mark.parametrize("what", ["n_failures", "n_unmade"])
async def test_workers_that_cannot_be_started_are_tried_again(
    what: str,
    open_pool: Callable[[int], Pool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Eventually,
) -> None:
    monkeypatch.setattr("drafthouse_server.serving.text_workers._RETRY_MIN_S", 0.0)
    pool = open_pool(1)
    await pool.texts.open()
    await settle()
    setattr(pool.shop, what, 3)
    for worker in pool.shop.workers:
        worker.die()
    await pool.run(A, "a0")
    await eventually(lambda: pool.shop.order == ["a0"])
    assert "no memory; trying again" in caplog.text


async def test_jobs_are_refused_while_no_worker_is_left_and_none_can_be_started(
    open_pool: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, they waited for their deadlines, and health said that all was well."""
    monkeypatch.setattr("drafthouse_server.serving.text_workers._RETRY_MIN_S", 0.0)
    pool = open_pool(1)
    await pool.texts.open()
    await settle()
    pool.shop.may_start.clear()
    pool.shop.n_failures = 10
    for worker in list(pool.texts.workers):
        worker.kill()
    waiting = await pool.run(A, "a0")
    assert not waiting.done(), "another worker may come"
    pool.shop.may_start.set()
    with pytest.raises(EngineUnhealthy, match="text workers cannot be started"):
        await waiting
    with pytest.raises(EngineUnhealthy):
        await pool.texts.run(TextJob(text="x"), B)
    assert pool.health == [False]
    assert pool.metrics.n_text_waiting == 0
    pool.shop.n_failures = 0
    while not pool.texts.is_healthy:
        await settle()
    assert pool.health == [False, True]
    again = await pool.run(A, "a1")
    assert await pool.finish_all() == ["a1"]
    assert (await again).tokens == [2]


async def test_a_pool_that_has_a_worker_left_is_healthy_without_a_spare_one(
    open_pool: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("drafthouse_server.serving.text_workers._RETRY_MIN_S", 0.0)
    pool = open_pool(1)
    await pool.texts.open()
    await settle()
    pool.shop.n_failures = 1000
    pool.shop.workers[0].die()  # the spare one takes its place
    await eventually(lambda: pool.shop.n_failures < 990)
    assert pool.texts.is_healthy
    pool.texts.workers[0].kill()
    await eventually(lambda: pool.health == [False])
    pool.shop.n_failures = 0
    await eventually(lambda: pool.health == [False, True])


async def test_a_pool_that_cannot_start_says_so_and_leaves_nothing() -> None:
    shop = Shop()
    shop.n_failures = 1
    texts = TextWorkers(shop.make, 3)
    with pytest.raises(StartupError, match="no memory"):
        await texts.open()
    assert all(worker.ended.is_set() for worker in shop.workers)
    await texts.close()


async def test_a_pool_that_closes_refuses_all_who_wait(open_pool: Callable[[int], Pool]) -> None:
    pool = open_pool(1)
    await pool.texts.open()
    runs = [await pool.run(A, f"a{i}") for i in range(3)]
    await pool.texts.close()
    await pool.texts.close()
    for run in runs:
        with pytest.raises(Draining):
            await run
    with pytest.raises(Draining):
        await pool.texts.run(TextJob(text="x"), A)
    assert all(worker.ended.is_set() for worker in pool.shop.workers)
    assert pool.texts.workers == ()


class Lingering(HandWorker):
    """A worker that takes a while to end, or never does."""

    def kill(self, *, is_late: bool = False) -> None:
        self.shop.killed.add(self)

    async def end(self) -> None:
        self.kill()
        await self.shop.may_end.wait()
        self.die(TextWorkerLost.ENDED)


async def test_a_pool_that_closes_waits_for_a_worker_that_it_has_dropped() -> None:
    """Nobody did: its process was a zombie, and its channel open, until they were collected."""
    shop = Shop()
    texts = TextWorkers(lambda: shop.make(Lingering), 1)
    await texts.open()
    run = asyncio.create_task(texts.run(TextJob(text="x"), A))
    await settle()
    [dropped] = shop.busy()
    assert dropped.answer is not None
    dropped.answer.set_result(TextAnswer([], is_last=True))
    await run
    assert shop.killed == {dropped}
    assert dropped not in texts.workers
    closing = asyncio.create_task(texts.close())
    await settle()
    assert not closing.done()
    shop.may_end.set()
    await closing
    assert all(worker.ended.is_set() for worker in shop.workers)


async def test_a_worker_that_does_not_end_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that waits for a disk that hangs cannot be killed."""
    monkeypatch.setattr("drafthouse_server.serving.text_workers._END_S", 0.01)
    shop = Shop()
    texts = TextWorkers(lambda: shop.make(Lingering), 1)
    await texts.open()
    await texts.close()
    assert shop.killed == set(shop.workers)
    assert "has not ended within 0.01 s" in caplog.text


async def test_of_a_tenant_one_sampler_is_made_at_a_time() -> None:
    texts = TextWorkers(Shop().make, 2)
    may_go_on, running, most = threading.Event(), {"a": 0, "b": 0}, {"a": 0, "b": 0}

    def make(tenant: str) -> str:
        running[tenant] += 1
        most[tenant] = max(most[tenant], running[tenant])
        if tenant == "a":
            assert may_go_on.wait(60)
        running[tenant] -= 1
        return tenant

    of_a = [asyncio.create_task(texts.make(make, "a", A)) for _ in range(4)]
    assert await texts.make(make, "b", B) == "b", "another's does not wait for them"
    may_go_on.set()
    assert await asyncio.gather(*of_a) == ["a"] * 4
    assert most == {"a": 1, "b": 1}
    await texts.close()


def test_a_job_may_take_what_its_size_says() -> None:
    assert cpu_limit_s(TextJob(text="x" * (1 << 20))) == 1.25
    assert cpu_limit_s(TextJob(messages=[("user", "x" * (1 << 19))])) == pytest.approx(
        0.75, abs=0.01
    )
    assert cpu_limit_s(TextJob(sampling=SamplingOptions(grammar="root ::= x"))) > 0.5


async def test_an_error_that_is_none_of_ours_goes_through_and_the_worker_is_replaced() -> None:
    class Broken(FakeEngine):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise ZeroDivisionError(text)

    texts = TextWorkers(Broken().make_text_worker, 1)
    await texts.open()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await texts.run(TextJob(text="x"), A)
    assert (await texts.run(TextJob(tokens=[97]), A)).text == "a"
    await texts.close()
