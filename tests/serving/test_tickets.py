"""Admission tickets: each is given back exactly once, whatever ends a call and when.

The calls are the real handler's, over a real step loop whose engine thread the test drives by hand:
so that every order of what handlers, the event loop and the engine thread do can be had again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.unknown_cost import UnknownCost

from drafthouse.v1 import generation_pb2
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.text_jobs import TextAnswer, TextJob
from drafthouse_server.errors import DrafthouseError, FieldViolation, InvalidRequest
from drafthouse_server.operations.calls import Call
from drafthouse_server.rpc.services import GenerationService, ServiceContext
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.serving import engine_thread
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.step import EngineLimits, StepPlan
from drafthouse_server.tenancy.admission import Ticket
from drafthouse_server.tenancy.counters import MemoryCounters, SharedRates
from drafthouse_server.tenancy.limits import Rate
from drafthouse_server.tenancy.tenants import Tenant

LIMITS = EngineLimits("mtp", 2, 2048, 1000, 32, 32, 4, 10)
ACME = Tenant("acme")
BOUNDED = Tenant("bounded", requests_per_s=2.0, output_tokens_per_min=12)


class Fault(Exception):
    """A bug of ours, in what prepares a request."""


class Aborted(Exception):
    """As the real context raises it."""


class Texts:
    """Text workers that answer when the test says so, as the kind of the call wants it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, asyncio.Future[TextAnswer]]] = []

    async def run(self, job: TextJob, _: Tenant) -> TextAnswer:
        assert job.text is not None
        answer: asyncio.Future[TextAnswer] = asyncio.get_running_loop().create_future()
        self.asked.append((job.text, answer))
        return await answer

    def answer(self, number: int) -> None:
        """Answers one of those who wait, if anybody does."""
        self.asked = [(text, answer) for text, answer in self.asked if not answer.done()]
        if not self.asked:
            return
        kind, answer = self.asked[number % len(self.asked)]
        if kind == "wrong":
            answer.set_exception(InvalidRequest([FieldViolation("prompt", "is none")]))
        elif kind == "faulty":
            answer.set_exception(Fault())
        else:
            answer.set_result(TextAnswer(tokens=[7] * (2000 if kind == "long" else 40)))


class Client:
    """What a handler knows of its client, who reads what it is sent."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self._remaining_s

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        """Takes them."""

    async def send_initial_metadata(self, metadata: object) -> None:
        await asyncio.sleep(0)

    async def write(self, message: object) -> None:
        await asyncio.sleep(0)

    async def abort(self, code: object, details: str) -> None:
        raise Aborted(details)


class SlowCounters(MemoryCounters):
    """Rates that are shared, and asked for on a way on which calls may be cancelled."""

    async def take(
        self,
        tenant: str,
        dimension: str,
        cost: float,
        now: float,
        rate: Rate,
        *,
        kept: float = 0.0,
    ) -> float:
        await asyncio.sleep(0)
        return self.take_now(tenant, dimension, cost, now, rate, kept=kept)


class NoThread(ThreadPoolExecutor):
    """Where the engine thread would be: its loop is not run, and all else is at once."""

    def __init__(self) -> None:
        super().__init__(1)
        self.running: Future[None] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.running is None:
            self.running = future
        else:
            future.set_result(fn(*args, **kwargs))
        return future


class Bench:
    """A step loop, its calls, and every ticket that was given out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.engine, self.texts, self.executor = FakeEngine(LIMITS), Texts(), NoThread()
        scheduler = Scheduler(self.engine.limits, FixedDraft(2), cost=UnknownCost())
        self.loop = StepLoop(
            self.engine,
            scheduler,
            n_waiting_max=5,
            clock=lambda: self.now,
            executor=self.executor,
        )
        self.rates = SharedRates(SlowCounters(), clock=lambda: self.now)
        self.admission = self.loop.admission
        self.admission.share(self.rates)
        self.calls: dict[asyncio.Task[None], Call] = {}
        self.others: list[asyncio.Task[object]] = []
        self.tickets: list[Ticket] = []
        self.n_back: Counter[Ticket] = Counter()
        self.complaints: list[dict[str, Any]] = []
        self.plan: StepPlan | None = None
        texts: Any = self.texts
        self.service = GenerationService(
            ServiceContext(
                self.loop,
                texts,
                n_draft_default=2,
                current_call=lambda: self.calls[self.task()],
                clock=lambda: self.now,
            )
        )
        admit, take_back = self.admission.admit, self.admission.take_back

        def note_admission(*args: Any, **kwargs: Any) -> Ticket:
            self.tickets.append(admit(*args, **kwargs))
            return self.tickets[-1]

        def note_return(ticket: Ticket) -> None:
            self.n_back[ticket] += 1
            take_back(ticket)

        patch.setattr(self.admission, "admit", note_admission)
        patch.setattr(self.admission, "take_back", note_return)
        patch.setattr(engine_thread, "_PAUSE_S", 0.0)
        running = asyncio.get_running_loop()
        running.set_exception_handler(lambda _, context: self.complaints.append(context))
        self.loop.start()

    @staticmethod
    def task() -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        return task

    def call(self, kind: str) -> None:
        """Begins a call."""
        prompt = generation_pb2.Prompt(text=kind)
        request = generation_pb2.GenerateRequest(prompt=prompt, max_output_tokens=6)
        client: Any = Client(5.0 if kind == "hurried" else None)
        tenant = BOUNDED if kind == "bounded" else ACME
        task = asyncio.create_task(self.service.Generate(request, client))
        self.calls[task] = Call("", f"r{len(self.calls)}", self.now, tenant=tenant)

    def cancel(self, number: int) -> None:
        """Has the client of a call leave, if there is any."""
        live = [task for task in self.calls if not task.done()]
        if live:
            live[number % len(live)].cancel()

    def turn(self) -> None:
        """Does what the engine thread does until its next step, or that step."""
        thread, running = self.loop._thread, self.executor.running
        assert running is not None
        if running.done():
            return
        if self.plan is not None:
            plan, self.plan = self.plan, None
            thread._step(plan)
            return
        while not thread._inbox.empty():
            function, arguments = thread._inbox.get()
            function(*arguments)
        if thread._is_stopping:
            thread._flush()
            running.set_result(None)
            return
        plan = thread._prepare()
        thread._flush()
        self.plan = None if plan.is_empty else plan

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Begins what somebody else than a client asks for."""
        self.others.append(asyncio.create_task(work))

    def fail(self) -> None:
        """Has the engine thread end with a fault."""
        running = self.executor.running
        assert running is not None
        if not running.done():
            running.set_exception(Fault())

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds

    def act(self, action: str, number: int) -> None:
        """Does one thing, and lets the event loop do none."""
        actions: dict[str, Callable[[], object]] = {
            "call": lambda: self.call(KINDS[number % len(KINDS)]),
            "answer": lambda: self.texts.answer(number),
            "cancel": lambda: self.cancel(number),
            "turn": self.turn,
            "lose a step": lambda: self.engine.inject(RuntimeError("the device is gone")),
            "wait": lambda: self.wait(number),
            "delete the tenant": lambda: self.loop.forget_tenant("acme"),
            "drain": lambda: self.begin(self.loop.drain(600.0)),
            "end": lambda: self.begin(self.loop.drain(0.0)),
            "close": lambda: self.begin(self.loop.close()),
            "hang": self.loop.abandon,
            "fail": self.fail,
            "nothing": lambda: None,
        }
        actions[action]()

    def check(self) -> None:
        """Checks that what is counted is what is held, and that who has a slot holds a place."""
        held = [ticket for ticket in self.tickets if ticket.is_held]
        n_waiting = sum(not ticket.has_slot for ticket in held)
        assert (self.admission.n_active, self.admission.n_waiting) == (len(held), n_waiting)
        if not (self.loop.is_abandoned or self.loop._health.has_failed):
            running = self.loop._thread._slots.values()
            live = [sequence for sequence in running if sequence.terminal is None]
            assert all(self.loop._tickets[sequence].is_held for sequence in live)

    async def finish(self) -> None:
        """Lets everything end, and the loop at last."""
        for _ in range(2_000):
            if all(task.done() for task in (*self.calls, *self.others)):
                break
            self.texts.answer(0)
            self.turn()
            await spin(3)
            self.check()
        assert all(task.done() for task in (*self.calls, *self.others)), "something waits for ever"
        closing = asyncio.create_task(self.loop.close())
        while not closing.done():
            self.turn()
            await spin(3)


async def spin(n: int) -> None:
    """Lets the event loop do what is due, so many times."""
    for _ in range(n):
        await asyncio.sleep(0)


KINDS = ("good", "good", "bounded", "bounded", "hurried", "wrong", "faulty", "long")
Actions = list[tuple[str, int, int]]
NAMES = ("call", "call", "answer", "answer", "cancel", "turn", "turn", "turn", "lose a step")
ACTIONS = st.tuples(
    st.sampled_from((*NAMES, "wait", "delete the tenant")), st.integers(0, 7), st.integers(0, 3)
)


async def serve(before: Actions, end: str, after: Actions) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(patch)
        await spin(1)  # until its thread would run
        try:
            for action, number, n_spins in (*before, (end, 0, 0), *after):
                bench.act(action, number)
                await spin(n_spins)
                bench.check()
            await bench.finish()
        finally:
            bench.fail()  # whoever waits for its thread
            await bench.rates.close()
    results = await asyncio.gather(*bench.calls, return_exceptions=True)
    expected = DrafthouseError | asyncio.CancelledError | Fault | Aborted | None
    assert [result for result in results if not isinstance(result, expected)] == []
    assert bench.complaints == []
    assert bench.n_back == Counter(bench.tickets), "each of them once"
    assert (bench.admission.n_active, bench.admission.n_waiting) == (0, 0)
    assert bench.admission._n_bytes == 0
    assert all(ticket._reserved is None for ticket in bench.tickets), "what they reserved, too"


@settings(max_examples=200)
@given(
    before=st.lists(ACTIONS, min_size=30, max_size=120),
    end=st.sampled_from(("nothing", "drain", "end", "close", "hang", "fail")),
    after=st.lists(ACTIONS, max_size=40),
)
def test_a_ticket_is_given_back_once_whatever_ends_its_call(
    before: Actions, end: str, after: Actions
) -> None:
    asyncio.run(serve(before, end, after))
