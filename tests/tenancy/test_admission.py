"""Who may enter, and the place that a ticket holds until it is given back, once."""

from __future__ import annotations

import contextlib
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.errors import DrafthouseError, Draining, QueueFull, QuotaExceeded
from drafthouse_server.tenancy.admission import Admission, Load, Ticket
from drafthouse_server.tenancy.tenants import Tenant

ACME = Tenant("acme", n_waiting_max=4, n_active_max=6)


def filled(n_acme: int, n_running: int = 0, n_others: int = 0) -> Admission:
    """An admission with requests of acme, some of which run, and of others, which wait."""
    admission = Admission(n_waiting_max=10, retry_after_s=2.5)
    for i in range(n_acme):
        admission.admit(Tenant("acme")).move(has_slot=i < n_running)
    for _ in range(n_others):
        admission.admit(Tenant("bob"))
    return admission


@pytest.mark.parametrize(
    ("admission", "expected"),
    [
        (filled(0), None),
        (filled(5, 2, 6), None),
        (filled(0, 0, 10), None),  # whoever fills the queue, acme has its share
        (filled(4), QuotaExceeded),
        (filled(6, 6), QuotaExceeded),
        (filled(4, 0, 6), QuotaExceeded),  # the tenant's own limit is told first
    ],
)
def test_limits_are_checked_in_order(
    admission: Admission, expected: type[DrafthouseError] | None
) -> None:
    if expected is None:
        admission.admit(ACME).give_back()
        expected = Draining
    else:
        with pytest.raises(expected) as refused:
            admission.admit(ACME)
        assert isinstance(refused.value, QueueFull | QuotaExceeded)
        assert refused.value.retry_after_s == 2.5
    admission.drain()
    with pytest.raises(Draining) as caught:
        admission.admit(ACME)
    assert caught.value.retry_after_s == 2.5


def test_a_tenant_without_limits_is_bound_by_the_queue_alone() -> None:
    admission = Admission(n_waiting_max=1000, retry_after_s=1.0)
    for _ in range(1000):
        admission.admit(Tenant("acme"))
    with pytest.raises(QueueFull) as caught:
        admission.admit(Tenant("acme"))
    assert caught.value.n_waiting == 1024  # rounded up


def test_two_tenants_cannot_lock_out_a_third() -> None:
    admission = Admission(n_waiting_max=256, retry_after_s=1.0)
    flooded = [Tenant(name, n_waiting_max=128) for name in "ab"]
    for tenant in flooded:
        for _ in range(128):
            admission.admit(tenant)
    with pytest.raises(QuotaExceeded):
        admission.admit(flooded[0])
    for _ in range(256 // 3):
        admission.admit(Tenant("c"))
    with pytest.raises(QueueFull):
        admission.admit(Tenant("c"))
    admission.admit(Tenant("d"))


def test_a_share_is_that_of_the_weight_as_it_is_now() -> None:
    admission = Admission(n_waiting_max=100, retry_after_s=1.0)
    first = [admission.admit(Tenant("a", weight=3.0)) for _ in range(75)]
    for _ in range(25):
        admission.admit(Tenant("b"))
    with pytest.raises(QueueFull):
        admission.admit(Tenant("b"))
    with pytest.raises(QueueFull):
        admission.admit(Tenant("a"))  # an operator has set its weight to that of b
    for _ in range(25):
        admission.admit(Tenant("b"))
    with pytest.raises(QueueFull):
        admission.admit(Tenant("b"))
    for ticket in first:
        ticket.give_back()
    assert admission._all_weights == 1.0


def test_a_place_is_promised_by_how_fast_they_are_given_back_and_once() -> None:
    now = 0.0
    admission = Admission(4, retry_after_s=5.0, clock=lambda: now)
    held = [admission.admit(Tenant("a")) for _ in range(4)]

    def wait_s() -> float:
        with pytest.raises(QueueFull) as caught:
            admission.admit(Tenant("a"))
        return caught.value.retry_after_s

    assert wait_s() == 5.0, "nothing is known yet"
    for _ in range(20):
        now += 0.2
        held.pop(0).move(has_slot=True)
        held.append(admission.admit(Tenant("a")))
    now += 10
    waits = [wait_s() for _ in range(3)]
    assert waits == pytest.approx([0.3, 0.6, 0.9]), "half as much again as it takes on average"


QUEUE_SIZE = 12
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5}


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["admit", "admit", "admit", "start", "preempt", "give back"]),
            st.sampled_from(["a", "a", "a", "b", "b", "c", "d"]),
            st.integers(0, 60),
        ),
        max_size=250,
    )
)
def test_below_its_share_no_tenant_is_refused_because_of_others(
    actions: list[tuple[str, str, int]],
) -> None:
    admission = Admission(QUEUE_SIZE, 1.0, n_bytes_max=300)
    held: dict[str, list[Ticket]] = {name: [] for name in WEIGHTS}
    for action, name, n_bytes in actions:
        mine = held[name]
        if action == "admit":
            waiting = [ticket for ticket in mine if not ticket.has_slot]
            here = {other for other, tickets in held.items() if tickets} | {name}
            share = WEIGHTS[name] / sum(WEIGHTS[other] for other in here)
            has_place = len(waiting) < max(1, math.floor(QUEUE_SIZE * share))
            n_bytes_mine = sum(ticket.n_bytes for ticket in waiting) + n_bytes
            is_below = has_place and (not waiting or n_bytes_mine <= 300 * share)
            try:
                mine.append(admission.admit(Tenant(name, WEIGHTS[name]), n_bytes))
            except QueueFull:
                assert not is_below
        elif mine and action in ("start", "preempt"):
            mine[n_bytes % len(mine)].move(has_slot=action == "start")
        elif mine:
            mine.pop(n_bytes % len(mine)).give_back()
    admission.drain()
    with pytest.raises(Draining):
        admission.admit(Tenant("a"))


def test_what_waits_is_bounded_in_bytes_and_one_alone_is_let_in() -> None:
    admission = Admission(10, 1.0, n_bytes_max=100)
    large = admission.admit(ACME, 150)
    with pytest.raises(QueueFull):
        admission.admit(ACME, 1)
    large.move(has_slot=True)  # it waits no more
    small = admission.admit(ACME, 60)
    admission.admit(ACME, 40)
    with pytest.raises(QueueFull):
        admission.admit(ACME, 1)
    small.give_back()
    admission.admit(ACME, 60)


def test_the_last_to_leave_is_told() -> None:
    admission, told = Admission(10, 1.0), list[int]()
    first, second = admission.admit(ACME), admission.admit(ACME)
    admission.on_empty = lambda: told.append(admission.n_active)
    first.give_back()
    assert not told
    second.give_back()
    assert told == [0]


TENANTS = (Tenant("a"), Tenant("b", n_waiting_max=3), Tenant("c", n_active_max=4))
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "start", "preempt", "give back", "again"]),
        st.integers(0, 30),
        st.integers(0, 60),
    ),
    max_size=200,
)


@given(actions=ACTIONS)
def test_what_is_counted_is_what_is_held(actions: list[tuple[str, int, int]]) -> None:
    admission, held, ended = Admission(8, 1.0, n_bytes_max=200), list[Ticket](), list[Ticket]()
    for action, choice, n_bytes in actions:
        if action == "admit":
            with contextlib.suppress(QueueFull, QuotaExceeded):
                held.append(admission.admit(TENANTS[choice % 3], n_bytes))
        elif action == "again" and ended:
            ticket = ended[choice % len(ended)]
            ticket.move(has_slot=bool(n_bytes % 2))  # what comes too late changes nothing
            with pytest.raises(AssertionError, match="twice"):
                ticket.give_back()
        elif held and action in ("start", "preempt"):
            held[choice % len(held)].move(has_slot=action == "start")
        elif held and action == "give back":
            ended.append(held.pop(choice % len(held)))
            ended[-1].give_back()
        check(admission, held)
    for ticket in held:
        ticket.give_back()
    check(admission, [])
    assert not admission._tenants
    assert not admission._all_weights


def check(admission: Admission, held: list[Ticket]) -> None:
    waiting = [ticket for ticket in held if not ticket.has_slot]
    n_active = Counter(ticket.tenant for ticket in held)
    n_waiting = Counter(ticket.tenant for ticket in waiting)
    assert (admission.n_active, admission.n_waiting) == (len(held), len(waiting))
    assert admission._n_bytes == sum(ticket.n_bytes for ticket in waiting)
    assert admission.n_running == len(held) - len(waiting)
    for tenant in "abc":
        assert admission.load(tenant) == Load(n_waiting[tenant], n_active[tenant])
    assert n_active["c"] <= 4
