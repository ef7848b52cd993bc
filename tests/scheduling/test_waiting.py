"""Who waits, and whose turn it is."""

from __future__ import annotations

import math
import sys
from types import FrameType

from drafthouse_server.errors import DeadlineTooShort
from drafthouse_server.scheduling.sequence import FinishReason, Request, Sequence
from drafthouse_server.scheduling.waiting import Ends, WaitingQueue, rank
from drafthouse_server.tenancy.fairness import VirtualCounters


def make(
    order: int,
    tenant: str = "a",
    priority: int = 0,
    *,
    weight: float = 1.0,
    is_preempted: bool = False,
) -> Sequence:
    request = Request(f"{tenant}{order}", [1], tenant=tenant, priority=priority, weight=weight)
    sequence = Sequence(request, None, rank=rank(request, order))
    sequence.swap.is_preempted = is_preempted
    return sequence


def pop(queue: WaitingQueue) -> Sequence:
    sequence = queue.peek()
    assert sequence is not None
    queue.pop(sequence)
    return sequence


def drain(queue: WaitingQueue) -> list[str]:
    """Takes all out, each of which counts alike."""
    names = []
    while len(queue):
        sequence = pop(queue)
        queue._counters.charge(sequence.request.tenant, 1)
        names.append(sequence.request.request_id)
    return names


def fill(*sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(VirtualCounters())
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_tenants_take_turns_and_a_flood_delays_its_own_tenant_only() -> None:
    queue = fill(*(make(i) for i in range(4)), make(4, "b"), make(5, "c"), make(6, "b"))
    assert drain(queue) == ["a0", "b4", "c5", "a1", "b6", "a2", "a3"]


def test_a_weight_that_changes_counts_for_a_tenant_that_always_waits() -> None:
    """An operator changes weights while there is a crowd, and no queue is ever empty then."""
    queue = fill(*(make(i) for i in range(6)), *(make(i, "b") for i in range(6, 18)))
    assert pop(queue).request.tenant == "a"
    queue._counters.charge("a", 1)
    late = make(18, "b", weight=4.0)
    queue.push(late)
    queue.push(make(19, "b", is_preempted=True))  # it knows no better than when it came
    names = [name[0] for name in drain(queue)]
    assert names[:10].count("b") == 8, "four of five"


def test_a_preempted_one_brings_no_former_weight_back() -> None:
    queue = fill(make(0))
    preempted = pop(queue)
    late = make(1, weight=4.0)
    queue.push(late)
    assert pop(queue) is late
    preempted.swap.is_preempted = True
    queue.push(preempted)
    assert queue._counters.weight("a") == 4.0


def test_priority_counts_inside_a_tenant_only() -> None:
    queue = fill(make(0), make(1, priority=5), make(2, "b"), make(3, "b", priority=9))
    assert drain(queue) == ["a1", "b3", "a0", "b2"]


def test_what_has_begun_goes_before_what_came_later_in_its_tenant_alone() -> None:
    queue = fill(make(0), make(3, "c"), make(1, "b"), make(2, "c", is_preempted=True))
    assert queue.n_preempted_now == 1
    assert drain(queue) == ["a0", "c2", "b1", "c3"]
    assert queue.n_preempted_now == 0


def test_a_higher_priority_of_its_tenant_goes_before_a_preempted_one() -> None:
    queue = fill(make(0, is_preempted=True), make(1, priority=1), make(2, "b"))
    assert drain(queue) == ["a1", "b2", "a0"]


def test_waiting_is_worth_priority() -> None:
    def ranked(priority: int, received_at: float, order: int) -> tuple[float, int]:
        request = Request("r", [1], priority=priority, received_at=received_at)
        return rank(request, order, aging_s=10.0)

    assert ranked(1, 9.0, 1) < ranked(0, 0.0, 0), "a point is worth ten seconds"
    assert ranked(0, 0.0, 0) < ranked(1, 11.0, 1)
    assert ranked(-100, 0.0, 0) < ranked(100, 2001.0, 1), "whoever waits is served at last"
    assert ranked(3, 5.0, 0) < ranked(3, 5.0, 1)


def test_removed_ones_never_show_up_and_come_no_more() -> None:
    sequences = [make(i, "ab"[i % 2]) for i in range(6)]
    queue = fill(*sequences)
    for i in (0, 1, 4):
        queue.remove(sequences[i])
    assert [s.request.request_id for s in queue] == ["a2", "b3", "b5"]
    assert drain(queue) == ["a2", "b3", "b5"]
    assert queue.peek() is None


def test_of_the_tenants_that_may_have_a_slot_the_least_served_goes_first() -> None:
    queue = fill(make(0), make(1, "b"), make(2, "c"), make(3, "c"))
    queue._counters.charge("b", 1)
    seen = []
    for _ in range(2):
        sequence = queue.peek(lambda tenant: tenant != "a")
        assert sequence is not None
        queue.pop(sequence)
        queue._counters.charge(sequence.request.tenant, 2)
        seen.append(sequence.request.request_id)
    assert seen == ["c2", "b1"]
    assert queue.peek(lambda _: False) is None
    assert drain(queue) == ["a0", "c3"]


def test_cancelled_ones_do_not_pile_up_behind_a_head_that_stays() -> None:
    queue = fill(make(0))
    for i in range(1, 5000):
        sequence = make(i)
        queue.push(sequence)
        queue.remove(sequence)
    assert len(queue) == 1
    assert len(queue._lines["a"].heap) < 200
    assert len(queue._removed) < 200


def test_who_cannot_meet_its_deadline_ends_at_once_and_nobody_else() -> None:
    needed_s = {"late": 5.0, "in time": 1.0, "found": 8.0, "running": 9.0}
    found = {"found"}

    def least_s(sequence: Sequence, is_found: bool) -> float:
        name = sequence.request.request_id
        return 0.0 if is_found and name in found else needed_s[name]

    ends, sequences = Ends(least_s), {}
    for order, name in enumerate(needed_s):
        request = Request(name, [1], deadline=4.0)
        sequence = sequences[name] = Sequence(request, None, rank=rank(request, order))
        ends.expect(sequence, order)
    sequences["running"].seq_id = 0
    ended = list(ends.take(0.0))
    assert [s.request.request_id for s, _ in ended] == ["late"]
    error = ended[0][1]
    assert isinstance(error, DeadlineTooShort)
    assert error.metadata() == {"leftMs": "4000", "neededMs": "5000"}
    for sequence, end in ended:
        assert isinstance(end, DeadlineTooShort)
        sequence.fail(end)
    assert not list(ends.take(2.9))
    assert [s.request.request_id for s, _ in ends.take(3.0)] == ["in time"], (
        "it has waited too long"
    )
    sequences["in time"].fail(error)
    ended = list(ends.take(4.0))
    assert {s.request.request_id for s, _ in ended} == {"found", "running"}
    assert all(end is FinishReason.DEADLINE for _, end in ended)


def test_a_time_that_rounds_to_now_is_not_looked_at_for_ever() -> None:
    now, n_looks = 1e7, 0
    needed_s = math.nextafter(1.0, 0.0)  # of 1 s that is left; a double has 2e-9 s at 115 days

    def least_s(sequence: Sequence, is_found: bool) -> float:
        nonlocal n_looks
        n_looks += is_found
        assert n_looks < 10, sequence
        return needed_s

    ends = Ends(least_s)
    sequence = Sequence(Request("a", [1], deadline=now + 1.0), None, rank=(0.0, 1))
    ends.expect(sequence, 1)
    ((ended, end),) = ends.take(now)
    assert ended is sequence
    assert isinstance(end, DeadlineTooShort)


def test_a_thousand_waiting_cost_a_step_nothing() -> None:
    few, many = fill(make(0)), fill(*(make(i, f"t{i % 100}") for i in range(10_000)))

    def n_calls(queue: WaitingQueue) -> int:
        """Counts calls of Python and C, which do not depend on how busy we are."""
        n = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal n
            n += event in ("call", "c_call")

        sys.setprofile(count)
        for _ in range(100):
            queue.peek()
        sys.setprofile(None)
        return n

    n_calls(many)  # the first one may put things in order
    assert n_calls(many) <= 2 * n_calls(few)
