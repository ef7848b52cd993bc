"""The step loop on a real event loop, with the fake engine."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.config import Config
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import (
    ContextTooLong,
    Draining,
    EngineError,
    EngineUnhealthy,
    ModelLoadError,
    QueueFull,
    SlowReader,
)
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    TokensEvent,
)
from drafthouse_server.serving import loop as loop_module
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.serving.engine_thread import LoadReport
from drafthouse_server.serving.loop import N_FAILURES_UNHEALTHY, StepLoop
from drafthouse_server.serving.outbox import Outbox
from drafthouse_server.step import (
    EngineLimits,
    ResultEntry,
    SamplingOptions,
    Start,
    StepPlan,
    StepResult,
)
from drafthouse_server.tenancy.tenants import Tenant

LIMITS = EngineLimits("mtp", 2, 2048, 1000, 32, 32, 4, 10)
GREEDY = SamplingOptions(temperature=0)


class ManualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(
    engine: FakeEngine | None = None, *, n_draft: int = 0, **options: object
) -> AsyncIterator[StepLoop]:
    engine = engine or FakeEngine(LIMITS)
    scheduler = Scheduler(engine.limits, FixedDraft(n_draft), cost=UnknownCost())
    loop = StepLoop(engine, scheduler, **options)  # type: ignore[arg-type]  # passed on
    loop.start()
    try:
        yield loop
    finally:
        await loop.close()


def make(loop: StepLoop, text: str = "hello", n_output_max: int = 10, **more: object) -> Sequence:
    sampler = loop.engine.make_sampler(GREEDY)
    prompt = list(text.encode())
    return Sequence(Request(text, prompt, n_output_max=n_output_max, **more), sampler)  # type: ignore[arg-type]  # checked by what is called


async def collect(outbox: Outbox) -> tuple[list[int], Event]:
    """Returns all tokens and the terminal event."""
    events: list[Event] = []
    while more := await outbox.receive():
        events += more
    tokens = [token for e in events[:-1] if isinstance(e, TokensEvent) for token in e.tokens]
    assert len(events) - 1 == sum(isinstance(e, TokensEvent) for e in events)
    return tokens, events[-1]


class HeldEngine(FakeEngine):
    """An engine whose steps wait until they are let."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self.may_step = threading.Event()
        self.is_held = False

    def step(self, plan: StepPlan) -> StepResult:
        self.is_held = True
        assert self.may_step.wait(60.0), "the test never let it"
        return super().step(plan)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # there is no event for a count
        await asyncio.sleep(0.001)


def reason_of(event: Event) -> FinishReason:
    assert isinstance(event, FinishEvent)
    return event.reason


def error_of(event: Event) -> Exception:
    assert isinstance(event, ErrorEvent)
    return event.error


async def test_a_crowd_gets_what_each_would_get_alone() -> None:
    texts = [f"prompt {i} " * (i + 1) for i in range(12)]
    alone = []
    for text in texts:
        async with running() as loop:
            alone.append(await collect(loop.submit(make(loop, text, 20))))
    engine = FakeEngine(LIMITS)
    async with running(engine, n_draft=4) as loop:
        outboxes = [loop.submit(make(loop, text, 20)) for text in texts]
        crowd = await asyncio.gather(*(collect(outbox) for outbox in outboxes))
        await until(lambda: engine.n_cells_used == 0)
    assert [tokens for tokens, _ in crowd] == [tokens for tokens, _ in alone]
    assert {reason_of(event) for _, event in crowd} == {FinishReason.LENGTH}


async def test_an_idle_loop_sleeps_until_it_is_needed() -> None:
    engine = FakeEngine(LIMITS)
    async with running(engine) as loop:
        await collect(loop.submit(make(loop)))
        await until(lambda: engine.n_cells_used == 0)
        n_steps = engine.n_steps
        await asyncio.sleep(0.05)
        assert engine.n_steps == n_steps
        tokens, _ = await collect(loop.submit(make(loop)))
        assert len(tokens) == 10


async def test_cancel_frees_the_slot_after_the_step_in_flight() -> None:
    engine = FakeEngine(LIMITS, step_s=0.002)
    async with running(engine) as loop:
        sequence = make(loop, n_output_max=900)
        outbox = loop.submit(sequence)
        await outbox.receive()
        loop.cancel(sequence)
        n_steps = engine.n_steps
        _, event = await collect(outbox)
        assert reason_of(event) is FinishReason.CANCELLED
        await until(lambda: engine.n_cells_used == 0)
        assert engine.n_steps <= n_steps + 2  # the one in flight, and the one that frees
        assert loop.statistics().n_running == 0


async def test_what_is_cancelled_before_its_first_step_never_runs() -> None:
    engine = FakeEngine(LIMITS)
    async with running(engine) as loop:
        sequence = make(loop)
        outbox = loop.submit(sequence)
        loop.cancel(sequence)
        tokens, event = await collect(outbox)
        assert (tokens, reason_of(event)) == ([], FinishReason.CANCELLED)
        assert engine.n_steps == 0


async def test_finish_ends_a_stream_well() -> None:
    async with running() as loop:
        sequence = make(loop, n_output_max=900)
        outbox = loop.submit(sequence)
        await outbox.receive()
        loop.finish(sequence)
        _, event = await collect(outbox)
        assert reason_of(event) is FinishReason.STOP
        loop.finish(sequence)  # too late is harmless
        assert loop.admission.n_active == 0


async def test_deadlines_are_kept() -> None:
    clock = ManualClock()
    async with running(FakeEngine(LIMITS, step_s=0.001), clock=clock) as loop:
        late = loop.submit(make(loop, "late", 900, deadline=105.0))
        other = loop.submit(make(loop, "other", 900, deadline=1000.0))
        await late.receive()
        clock.now = 105.0
        _, event = await collect(late)
        assert reason_of(event) is FinishReason.DEADLINE
        _, event = await collect(other)
        assert reason_of(event) is FinishReason.LENGTH


async def test_a_reader_who_does_not_read_holds_no_slot() -> None:
    engine = FakeEngine(EngineLimits("mtp", 1, 2048, 1000, 32, 32, 4, 10))
    async with running(engine) as loop:
        slow = loop.submit(make(loop, "slow", 200))
        quick = await collect(loop.submit(make(loop, "quick", 5)))
        assert len(quick[0]) == 5
        tokens, event = await collect(slow)
        assert (len(tokens), reason_of(event)) == (200, FinishReason.LENGTH)


async def test_receive_returns_all_that_is_ready_and_nothing_after_the_end() -> None:
    async with running() as loop:
        outbox = loop.submit(make(loop))
        await until(lambda: loop.admission.n_active == 0)
        assert len(await outbox.receive()) == 11
        assert await outbox.receive() == []


async def test_a_full_queue_refuses() -> None:
    async with running(n_waiting_max=2, retry_after_s=3.0) as loop:
        outboxes = [loop.submit(make(loop, str(i))) for i in range(2)]
        with pytest.raises(QueueFull) as caught:
            loop.submit(make(loop, "too many"))
        assert (caught.value.n_waiting, caught.value.retry_after_s) == (2, 3.0)
        assert [len((await collect(outbox))[0]) for outbox in outboxes] == [10, 10]


async def test_what_does_not_fit_is_refused_at_once() -> None:
    async with running() as loop:
        with pytest.raises(ContextTooLong):
            loop.submit(make(loop, "x" * 995, 10))
        assert loop.admission.load("default").n_active == 0
        assert loop.check(990, None) == 10


async def test_load_counts_per_tenant() -> None:
    async with running(FakeEngine(LIMITS, step_s=0.001)) as loop:
        for i in range(4):
            loop.submit(make(loop, str(i), 900, tenant="acme" if i else "bob"))
        await until(lambda: loop.statistics().n_running == 2)
        acme, bob = loop.admission.load("acme"), loop.admission.load("bob")
        assert (loop.admission.n_waiting, acme.n_waiting, acme.n_active) == (2, 2, 3)
        assert (bob.n_waiting, bob.n_active) == (0, 1)
        assert not loop.is_draining


async def test_a_drain_lets_those_with_a_slot_finish_and_hands_back_the_others_at_once() -> None:
    engine = HeldEngine(LIMITS)
    async with running(engine, retry_after_s=7.0) as loop:
        outboxes = [loop.submit(make(loop, str(i), 50)) for i in range(5)]
        draining = asyncio.create_task(loop.drain(20.0))
        await until(lambda: loop.is_draining)
        with pytest.raises(Draining):
            loop.submit(make(loop))
        engine.may_step.set()
        ends = [await collect(outbox) for outbox in outboxes]
        n_slots = loop.engine.limits.n_seq_max
        assert [len(tokens) for tokens, _ in ends] == [50] * n_slots + [0] * (5 - n_slots)
        for _, event in ends[n_slots:]:
            error = error_of(event)
            assert isinstance(error, Draining)
            assert error.retry_after_s == 7.0
        assert await draining == 0


class SteppedEngine(FakeEngine):
    """An engine that makes one step for each that is let."""

    def __init__(self, limits: EngineLimits) -> None:
        super().__init__(limits)
        self.may_step = threading.Semaphore(0)
        self.n_begun = 0

    def step(self, plan: StepPlan) -> StepResult:
        self.n_begun += 1
        assert self.may_step.acquire(timeout=60.0), "the test never let it"
        return super().step(plan)


async def test_a_drain_does_not_hand_back_what_has_just_got_a_slot() -> None:
    """The event loop learns of slots behind the engine thread, which may be a step ahead."""
    engine = SteppedEngine(LIMITS)
    async with running(engine) as loop:
        outboxes = [loop.submit(make(loop, "first", 50))]
        await until(lambda: engine.n_begun == 1 and loop.admission.n_running == 1)
        # The last ones are the first to get a slot; there are two.
        outboxes += [loop.submit(make(loop, str(i), 50, priority=10 * i)) for i in range(5)]
        engine.may_step.release()
        while engine.n_begun < 2:  # without a chance for reports to be taken
            time.sleep(0.001)  # noqa: ASYNC251  # see above
        draining = asyncio.ensure_future(loop.drain(600.0))
        await until(lambda: loop.is_draining)
        engine.may_step.release(10_000)
        ends = [await collect(outbox) for outbox in outboxes]
        assert [len(tokens) for tokens, _ in ends] == [50, 50, 0, 0, 50, 50]
        assert all(isinstance(error_of(end), Draining) for _, end in ends[2:4])
        assert await draining == 0


async def test_a_loop_that_fails_ends_nothing_well_that_lacks_its_last_tokens() -> None:
    engine = SteppedEngine(LIMITS)
    async with running(engine) as loop:
        outbox = loop.submit(make(loop, n_output_max=2))
        engine.may_step.release()
        await until(lambda: engine.n_begun == 2)

        def fail() -> None:
            raise RuntimeError("a bug of ours")

        loop._thread.post(fail)  # after the second step, whose token is the last one
        engine.may_step.release()
        tokens, end = await collect(outbox)
        error = error_of(end)
        assert len(tokens) == 1
        assert isinstance(error, EngineError)
        assert error.status == "LOOP_FAILED"
        assert loop.admission.n_active == 0


async def test_while_a_drain_lasts_what_is_prepared_is_handed_back_where_no_slot_is_free() -> None:
    async with running(FakeEngine(LIMITS, step_s=0.002)) as loop:
        for i in range(LIMITS.n_seq_max):
            loop.submit(make(loop, str(i), 900))
        ticket = loop.admission.admit(Tenant("acme"))
        draining = asyncio.create_task(loop.drain(600.0))
        await until(lambda: loop.is_draining)
        with pytest.raises(Draining):
            loop.submit(make(loop, tenant="acme"), ticket)
        ticket.give_back()
        assert await loop.drain(0.0) == LIMITS.n_seq_max
        assert await draining == 0


async def test_while_steps_are_lost_one_request_at_a_time_tries_whether_they_work_again() -> None:
    engine = FakeEngine(LIMITS)
    async with running(engine, retry_after_s=2.0) as loop:
        engine.inject(RuntimeError("device lost"), n_steps=1000)
        for i in range(3):
            await collect(loop.submit(make(loop, str(i))))
        await until(lambda: not loop.is_healthy)
        engine._faults.clear()
        outbox = loop.submit(make(loop, "the one that tries"))
        with pytest.raises(EngineUnhealthy) as caught:
            loop.submit(make(loop, "another"))
        assert caught.value.retry_after_s == 2.0
        assert reason_of((await collect(outbox))[1]) is FinishReason.LENGTH
        assert loop.is_healthy
        await collect(loop.submit(make(loop, "all again")))


async def test_a_step_that_does_not_end_is_unhealthy_and_every_stream_can_be_told() -> None:
    told: list[bool] = []
    engine = HeldEngine(LIMITS)
    async with running(engine, on_health=told.append, step_timeout_s=0.25) as loop:
        outbox = loop.submit(make(loop))
        await until(lambda: loop.is_hung)
        assert told == [False]
        with pytest.raises(EngineUnhealthy):
            loop.submit(make(loop))
        engine.may_step.set()
        await until(lambda: loop.is_healthy)
        assert told == [False, True]
        assert reason_of((await collect(outbox))[1]) is FinishReason.LENGTH


async def test_a_plan_that_does_not_end_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the scheduler's stops every stream as one of the engine's does."""
    may_plan = threading.Event()
    plan = Scheduler.plan

    def held(self: Scheduler, now: float) -> StepPlan:
        assert self.is_idle or may_plan.wait(60.0), "the test never let it"
        return plan(self, now)

    monkeypatch.setattr(Scheduler, "plan", held)
    async with running(FakeEngine(LIMITS), step_timeout_s=0.25) as loop:
        await asyncio.sleep(0.5)
        assert loop.is_healthy, "there is nothing to do"
        outbox = loop.submit(make(loop))
        await until(lambda: loop.is_hung)
        may_plan.set()
        await until(lambda: loop.is_healthy)
        assert reason_of((await collect(outbox))[1]) is FinishReason.LENGTH


async def test_the_load_is_told_between_two_steps_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "_ANSWER_S", 0.2)
    engine = HeldEngine(LIMITS)
    async with running(engine) as loop:
        assert await loop.load() == LoadReport()
        outbox = loop.submit(make(loop, tenant="acme"))
        await until(lambda: engine.is_held)
        assert await loop.load(["acme"]) is None, "a step does not end"
        engine.may_step.set()
        await collect(outbox)
        told = await loop.load(["acme", "nobody"])
        assert told is not None
        assert (told.n_cells_running, told.n_backlog) == (0, 0), "all have ended"
        assert told.service.keys() == {"acme", "nobody"}
        assert told.service["acme"] > 0


async def test_streams_of_a_step_that_never_ends_are_told() -> None:
    engine = HeldEngine(LIMITS)
    async with running(engine, step_timeout_s=0.25) as loop:
        outbox = loop.submit(make(loop, "a"))
        await until(lambda: loop.is_hung)
        loop.abandon()
        error = error_of((await collect(outbox))[1])
        assert isinstance(error, EngineError)
        assert error.status == "STEP_TIMEOUT"
        assert loop.admission.n_active == 0
        engine.may_step.set()  # so that this process can end
        loop._is_stopping = False


async def test_a_reader_that_reads_nothing_ends_its_own_sequence_and_no_other() -> None:
    async with running(FakeEngine(LIMITS), outbox_bytes=1024) as loop:
        unread = loop.submit(make(loop, "a", 900))
        tokens, event = await collect(loop.submit(make(loop, "b", 900)))
        assert (len(tokens), reason_of(event)) == (900, FinishReason.LENGTH)
        await until(lambda: loop.admission.n_active == 0)
        assert len(unread._events) <= 130
        tokens, event = await collect(unread)
        assert isinstance(error_of(event), SlowReader)
        assert 1024 / 4 < len(tokens) < 900


async def test_a_drain_ends_what_takes_too_long() -> None:
    engine = FakeEngine(LIMITS, step_s=0.002)
    async with running(engine, retry_after_s=7.0) as loop:
        outboxes = [loop.submit(make(loop, str(i), 900)) for i in range(5)]
        assert await loop.drain(0.02) >= LIMITS.n_seq_max
        for outbox in outboxes:
            _, event = await collect(outbox)
            error = error_of(event)
            assert isinstance(error, Draining)
            assert error.retry_after_s == 7.0
        assert loop.admission.n_active == 0


async def test_a_drain_waits_for_what_is_prepared_and_lets_it_run() -> None:
    async with running() as loop:
        ticket = loop.admission.admit(Tenant("acme"))
        draining = asyncio.create_task(loop.drain(600.0))
        await until(lambda: loop.is_draining)
        tokens, event = await collect(loop.submit(make(loop, tenant="acme"), ticket))
        assert (len(tokens), reason_of(event)) == (10, FinishReason.LENGTH)
        assert await draining == 0


async def test_what_is_prepared_for_longer_than_a_drain_lasts_is_refused() -> None:
    async with running() as loop:
        ticket = loop.admission.admit(Tenant("acme"))
        assert await loop.drain(0.0) == 0
        with pytest.raises(Draining):
            loop.submit(make(loop, tenant="acme"), ticket)
        assert ticket.is_held  # whoever has prepared it gives it back


async def test_a_drain_ends_when_another_one_has_ended_all() -> None:
    async with running(FakeEngine(LIMITS, step_s=0.002)) as loop:
        outbox = loop.submit(make(loop, n_output_max=900))
        patient = asyncio.create_task(loop.drain(600.0))
        await until(lambda: loop.is_draining)
        assert await loop.drain(0.0) == 1
        assert isinstance(error_of((await collect(outbox))[1]), Draining)
        async with asyncio.timeout(100.0):
            assert await patient == 0


async def test_a_lost_step_ends_its_sequences_and_the_loop_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine(EngineLimits("mtp", 1, 2048, 1000, 32, 32, 4, 10))
    async with running(engine) as loop:
        engine.inject(RuntimeError("boom"))
        first, second = loop.submit(make(loop, "a")), loop.submit(make(loop, "b"))
        error = error_of((await collect(first))[1])
        assert isinstance(error, EngineError)
        assert error.status == "EXCEPTION"
        tokens, event = await collect(second)
        assert (len(tokens), reason_of(event)) == (10, FinishReason.LENGTH)
        assert loop.statistics().n_steps_failed == 1
        assert "boom" in caplog.text
        await until(lambda: engine.n_cells_used == 0)


async def test_health_goes_when_steps_keep_failing_and_comes_back() -> None:
    engine = FakeEngine(LIMITS)
    health: list[bool] = []
    async with running(engine, on_health=health.append) as loop:
        # The step that gives the slots back fails as well, until the faults are used up.
        engine.inject(RuntimeError("boom"), n_steps=N_FAILURES_UNHEALTHY)
        error_of((await collect(loop.submit(make(loop))))[1])
        assert health == []
        await until(lambda: health == [False, True])
        assert loop.is_healthy
        assert loop.statistics().n_steps_failed == N_FAILURES_UNHEALTHY
        tokens, _ = await collect(loop.submit(make(loop, "again")))
        assert len(tokens) == 10


class BrokenScheduler(Scheduler):
    """A bug of ours."""

    def plan(self, now: float) -> StepPlan:
        raise ZeroDivisionError


async def test_nobody_waits_for_ever_when_the_loop_itself_fails() -> None:
    health: list[bool] = []
    scheduler = BrokenScheduler(LIMITS, FixedDraft(0), cost=UnknownCost())
    loop = StepLoop(FakeEngine(LIMITS), scheduler, on_health=health.append)
    loop.start()
    outboxes = [loop.submit(make(loop, str(i))) for i in range(4)]
    for outbox in outboxes:
        error = error_of((await collect(outbox))[1])
        assert isinstance(error, EngineError)
        assert error.status == "LOOP_FAILED"
    assert health == [False]
    assert not loop.is_healthy
    with pytest.raises(Draining):
        loop.submit(make(loop))
    await loop.close()


class ThreadedEngine(FakeEngine):
    """Notes which threads use it."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.users = {threading.get_ident()}

    def step(self, plan: StepPlan) -> StepResult:
        self.users.add(threading.get_ident())
        return super().step(plan)

    def close(self) -> None:
        self.users.add(threading.get_ident())
        super().close()


async def test_one_thread_makes_uses_and_closes_the_engine() -> None:
    loop = await StepLoop.open(ThreadedEngine, Config(draft_policy="fixed", draft_default=2))
    engine = loop.engine
    assert isinstance(engine, ThreadedEngine)
    _, event = await collect(loop.submit(make(loop, n_output_max=50)))
    assert isinstance(event, FinishEvent)
    assert event.speculation.n_drafts > 0
    await loop.close()
    await loop.close()
    assert engine.is_closed
    assert len(engine.users) == 1
    assert threading.get_ident() not in engine.users


class LongRuns(FakeEngine):
    """Notes how long runs were planned, and became; held ones go on when they are interrupted."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.runs: list[tuple[int, int]] = []
        self.is_held = False
        self._came = threading.Event()

    def interrupt(self) -> None:
        super().interrupt()
        self._came.set()

    def _may_go_on(self, entries: list[ResultEntry]) -> bool:
        if self.is_held:
            self._came.wait()
            self._came.clear()
        return super()._may_go_on(entries)

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        self.runs.append((plan.n_steps, result.n_steps))
        return result


async def test_whoever_comes_or_goes_ends_a_run_of_steps() -> None:
    engine = LongRuns()
    config = Config(draft_policy="fixed", draft_default=0)
    scheduler = make_scheduler(engine, config)
    # Each step takes a millisecond, whatever it takes.
    loop = StepLoop(engine, scheduler, clock=lambda: engine.n_steps * 0.001)
    loop.start()
    await collect(loop.submit(make(loop, n_output_max=90)))
    assert any(run > 1 for _, run in engine.runs)
    assert all(run == planned for planned, run in engine.runs), "nobody came"
    engine.is_held = True
    first = make(loop, n_output_max=90)
    outbox = loop.submit(first)
    await outbox.receive()
    for i in range(8):
        await collect(loop.submit(make(loop, f"other {i}", n_output_max=1)))
    loop.cancel(first)
    _, event = await collect(outbox)
    assert reason_of(event) is FinishReason.CANCELLED
    assert sum(run < planned for planned, run in engine.runs) >= 8, engine.runs
    await loop.close()


async def test_an_engine_that_cannot_be_made_tells_why() -> None:
    def fail() -> FakeEngine:
        raise ModelLoadError("m.gguf", "the file is cut short", "download it again")

    n_threads = threading.active_count()
    with pytest.raises(ModelLoadError, match="cut short"):
        await StepLoop.open(fail, Config())
    await until(lambda: threading.active_count() <= n_threads)


async def test_close_ends_what_is_left() -> None:
    engine = FakeEngine(LIMITS, step_s=0.001)
    loop = StepLoop(engine, Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost()))
    loop.start()
    outbox = loop.submit(make(loop, n_output_max=900))
    await outbox.receive()
    await loop.close()
    _, event = await collect(outbox)
    assert isinstance(error_of(event), Draining)
    assert engine.is_closed


async def test_a_reader_who_is_cancelled_loses_nothing() -> None:
    async with running(FakeEngine(LIMITS, step_s=0.005)) as loop:
        outbox = loop.submit(make(loop, n_output_max=10))
        n_events = 0
        is_over = False
        while not is_over:
            try:
                async with asyncio.timeout(0.003):
                    events = await outbox.receive()
            except TimeoutError:
                continue
            n_events += len(events)
            is_over = not isinstance(events[-1], TokensEvent)
        assert n_events == 11


async def test_a_loop_that_is_cancelled_ends_everybody_and_its_thread() -> None:
    engine = FakeEngine(LIMITS, step_s=0.001)
    n_threads = threading.active_count()
    loop = StepLoop(engine, Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost()))
    loop.start()
    outbox = loop.submit(make(loop, n_output_max=900))
    await outbox.receive()
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "step-loop"]
    task.cancel()  # as asyncio.run does at its end
    error = error_of((await collect(outbox))[1])
    assert isinstance(error, EngineError)
    assert error.status == "LOOP_FAILED"
    n_steps = engine.n_steps
    await asyncio.sleep(0.02)
    assert engine.n_steps == n_steps
    await loop.close()
    assert engine.is_closed
    await until(lambda: threading.active_count() <= n_threads)


class LateBrokenScheduler(Scheduler):
    """A bug of ours that shows at the end of a commit, when sequences have ended."""

    def commit(self, result: StepResult, now: float) -> list[tuple[Sequence, Event]]:
        super().commit(result, now)
        raise ZeroDivisionError


async def test_who_ended_in_the_commit_that_failed_is_told() -> None:
    scheduler = LateBrokenScheduler(LIMITS, FixedDraft(0), cost=UnknownCost())
    loop = StepLoop(FakeEngine(LIMITS), scheduler)
    short, long = make(loop, "short", 1), make(loop, "long", 100)
    loop.start()
    outboxes = [loop.submit(short), loop.submit(long)]  # one step computes both
    for outbox in outboxes:
        tokens, end = await collect(outbox)
        assert not tokens, "what was committed was not reported"
        assert isinstance(end, ErrorEvent), "so that neither has ended well"
    await loop.close()


async def test_a_dead_engine_does_not_delay_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafthouse_server.serving.engine_thread._PAUSE_S", 3600.0)
    engine = FakeEngine(LIMITS)
    loop = StepLoop(engine, Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost()))
    loop.start()
    engine.inject(RuntimeError("boom"), n_steps=1000)
    await collect(loop.submit(make(loop)))
    await until(lambda: loop.statistics().n_steps_failed == 2)  # it pauses before the third attempt
    await loop.close()
    assert engine.is_closed


async def test_a_sequence_that_loses_its_slot_is_counted_as_waiting() -> None:
    """Preemption: the slot is given back, the sequence goes on later."""
    async with running(FakeEngine(LIMITS, step_s=0.002)) as loop:
        sequence = make(loop, n_output_max=900)
        outbox = loop.submit(sequence)
        await outbox.receive()
        await until(lambda: loop.statistics().n_running == 1)
        thread = loop._thread
        preempt, resume = StepPlan(swap_outs=[0]), StepPlan(starts=[Start(0, sequence.sampler)])
        thread.post(thread._note_moves, preempt)
        await until(lambda: loop.admission.load("default").n_waiting == 1)
        assert loop.statistics().n_running == 0
        assert loop.admission.load("default").n_active == 1
        thread.post(thread._note_moves, resume)
        await until(lambda: loop.admission.load("default").n_waiting == 0)
        assert loop.statistics().n_running == 1


async def test_nothing_is_lost_when_a_third_of_2000_requests_leaves() -> None:
    chance = random.Random(1)
    engine = FakeEngine(LIMITS, eog_period=40)
    ends: Counter[str] = Counter()

    async with running(engine, n_draft=2, n_waiting_max=64) as loop:
        gate = asyncio.Semaphore(40)

        async def request(number: int) -> None:
            async with gate:
                sequence = make(loop, f"request {number}", chance.randrange(1, 40))
                outbox = loop.submit(sequence)
                if number % 3 == 0:
                    # Half of them at once: how many are still here later depends on our speed.
                    await asyncio.sleep(chance.choice((0.0, chance.random() * 0.01)))
                    chance.choice((loop.cancel, loop.finish))(sequence)
                tokens, event = await collect(outbox)
                assert isinstance(event, FinishEvent)
                assert sequence.n_output == len(tokens)
                ends[event.reason.name] += 1

        await asyncio.gather(*(request(number) for number in range(2000)))
        await until(lambda: engine.n_cells_used == 0)
        statistics, load = loop.statistics(), loop.admission.load("default")
        assert (statistics.n_running, statistics.n_waiting, load.n_active) == (0, 0, 0)
        assert sum(ends.values()) == 2000
        assert ends["CANCELLED"] > 0
        assert not loop._outboxes
        assert loop._thread._scheduler.is_idle
        assert loop._thread._scheduler._ledger.n_reserved == 0


async def test_statistics_add_up() -> None:
    async with running(n_draft=3) as loop:
        sequence = make(loop, n_output_max=30)
        _, event = await collect(loop.submit(sequence))
        assert isinstance(event, FinishEvent)
        statistics = loop.statistics()
        assert statistics.n_accepted == event.speculation.n_accepted > 0
        assert statistics.n_drafted == event.speculation.n_drafted
        assert statistics.n_steps >= event.speculation.n_steps
        assert statistics.host_s > 0
        assert statistics.fan_out_s > 0


async def test_work_beside_the_steps_is_charged_to_its_tenant() -> None:
    async with running() as loop:
        scheduler = loop._thread._scheduler
        loop.charge("acme", 300.0)
        outbox = loop.submit(make(loop))
        await collect(outbox)
        assert scheduler.counters.of("acme") == 300.0
