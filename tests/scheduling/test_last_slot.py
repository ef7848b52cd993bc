"""The last free slot: for whom it is kept, from whom, and for how long."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.scheduling.test_scheduler import LIMITS, Bench

from drafthouse_server.scheduling.sequence import FinishEvent, Sequence, SequenceState
from drafthouse_server.scheduling.slots import LastSlot
from drafthouse_server.step import StepPlan
from drafthouse_server.tenancy.fairness import Fairness, VirtualCounters

STEP_S = 0.01
EVERY = 6  # steps from one request of the polite tenant to the next
FOUR = dataclasses.replace(LIMITS, n_ctx=16384, n_ctx_seq=4096)


class World(Bench):
    """Steps of ten milliseconds, four slots, and a flood of more long streams than that."""

    def __init__(self, n_flood: int = 8, n_slots: int = 4, **flood: Any) -> None:
        limits = dataclasses.replace(FOUR, n_seq_max=n_slots)
        super().__init__(limits, scheduler={"fairness": Fairness()})
        self.flood = [
            self.add(f"f{i}", n_output_max=4000, tenant="flood", **flood) for i in range(n_flood)
        ]
        self.n_swap_outs = 0

    def step(self) -> StepPlan:
        self.now += STEP_S - 1
        plan = super().step()
        self.n_swap_outs += len(plan.swap_outs)
        return plan

    def run_beside(self, n_steps: int, *tenants: str, n_output: int = 1) -> None:
        """Runs so many steps, in which tenants ask for some tokens again and again."""
        for i in range(n_steps):
            if i % EVERY == 0:
                for tenant in tenants:
                    self.add(tenant, n_output_max=n_output, tenant=tenant)
            self.step()

    def running(self, tenant: str = "flood") -> int:
        """Returns how many streams of a tenant have slots."""
        running = (s for s in self.scheduler.sequences() if s.state is SequenceState.RUNNING)
        return sum(sequence.request.tenant == tenant for sequence in running)


def last_slot(n_slots: int = 4, *tenants: str) -> LastSlot:
    """Returns the last of some slots, for which these tenants wait; "p" was back at once."""
    counters = VirtualCounters(quantum=100.0)
    for tenant in tenants or ("flood",):
        counters.join(tenant, 1.0)
    last = LastSlot(counters, n_slots)
    last.note_start("p", 0.8)
    last.note_end("p", 0.8)
    last.note_start("p", 0.9)
    last.note_end("p", 1.0)
    return last


def test_it_is_kept_for_one_that_is_back_at_once_and_for_a_while() -> None:
    last = last_slot()
    assert last.is_kept_from("flood", {"flood": 3}, 1.0)
    assert last.is_kept_from("flood", {"flood": 3}, 1.19)
    assert not last.is_kept_from("flood", {"flood": 3}, 1.21)
    last.note_start("p", 1.3)
    last.note_end("p", 1.4)
    assert not last.is_kept_from("flood", {"flood": 3}, 1.4), "it was away for longer"
    last.note_start("p", 1.5)
    last.note_end("p", 1.5)
    assert last.is_kept_from("flood", {"flood": 3}, 1.6)


def test_it_is_kept_from_nobody_below_its_share_and_while_nobody_else_waits() -> None:
    assert not last_slot().is_kept_from("flood", {"flood": 1}, 1.1), "two of four are its share"
    assert not last_slot().is_kept_from("flood", {"p": 2, "flood": 1}, 1.1)
    assert not last_slot().is_kept_from("flood", {"other": 3}, 1.1), "nothing of it runs"
    assert not last_slot(1).is_kept_from("flood", {}, 1.1)
    assert not last_slot().is_kept_from("p", {"flood": 3}, 1.1)
    assert not last_slot(4, "flood", "other").is_kept_from("flood", {"flood": 3}, 1.1)


def test_it_is_kept_for_a_second_at_most() -> None:
    last = last_slot()
    for i in range(10):
        assert last.is_kept_from("flood", {"flood": 3}, 1 + i / 10), i
        last.note_end("p", 1 + i / 10)
    assert not last.is_kept_from("flood", {"flood": 3}, 2.0)
    last.note_start("flood", 2.0)
    last.note_end("p", 2.1)
    assert last.is_kept_from("flood", {"flood": 3}, 2.1)


def test_tenants_of_the_past_take_no_memory_without_end() -> None:
    last = last_slot()
    for i in range(1000):
        for _ in range(2):
            last.note_start(f"tenant {i}", i / 100)
            last.note_end(f"tenant {i}", i / 100)
    assert len(last._ended) < 50
    assert last._back <= last._ended.keys()


def test_one_that_asks_again_and_again_costs_a_stream_its_slot_once_a_second() -> None:
    world = World()
    world.run_beside(300, "p")
    assert 2 <= world.n_swap_outs <= 5, "the first two requests, and after each second"
    for _ in range(25):
        world.step()
    assert world.running() == 4, "who asks no more holds no slot"


def test_without_it_each_request_takes_a_slot_from_a_stream() -> None:
    world = World()
    world.step()
    for i in range(10):
        world.add("p", n_output_max=1, tenant="p")
        for _ in range(30):
            world.step()
        assert world.n_swap_outs == i + 1, "it was away for longer"


def test_all_streams_go_on_beside_it() -> None:
    world = World(4)
    world.run_beside(110, "p")
    before = [sequence.n_output for sequence in world.flood]
    world.run_beside(240, "p")
    assert all(after.n_output > n for after, n in zip(world.flood, before, strict=True))


def test_a_second_free_slot_is_anybodys() -> None:
    world = World()
    world.run_beside(60, "p", "q", n_output=3)
    assert (world.running(), world.running("p"), world.running("q")) == (3, 0, 0)
    world.run_beside(2, "p", "q", n_output=3)
    assert (world.running(), world.running("p"), world.running("q")) == (2, 1, 1)


def test_who_waits_beside_others_is_served_in_the_order_of_the_counters() -> None:
    world = World()
    served = {"flood": 0, "other": 0}
    for i in range(600):
        if i % EVERY == 0:
            world.add("p", n_output_max=1, tenant="p")
        while sum(s.request.tenant == "other" for s in world.scheduler.sequences()) < 8:
            world.add("other", n_prompt=16, n_output_max=1, tenant="other")
        world.step()
        for sequence, event in world.events:
            if isinstance(event, FinishEvent) and sequence.request.tenant == "other":
                served["other"] += sequence.n_prompt + 2 * sequence.n_output
        world.events.clear()
    served["flood"] = sum(s.n_prompt + 2 * s.n_output for s in world.flood if s.n_output)
    assert served["flood"] > 2000
    assert abs(served["flood"] - served["other"]) <= 512 + 2 * 8 * FOUR.n_seq_max


def test_a_tenants_own_priorities_hold_while_it_is_kept() -> None:
    world = World(priority=-1)
    world.run_beside(30, "p")
    assert world.running() == 3
    urgent: Sequence = world.add("u", n_output_max=3, tenant="flood", priority=10)
    world.step()
    world.step()
    assert urgent.state is not SequenceState.WAITING
