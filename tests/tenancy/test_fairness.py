"""Counters of service: who is charged what, who goes first, who has to make room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import ResultEntry, SequenceStatus
from drafthouse_server.tenancy.fairness import Budget, ServiceWeights, VirtualCounters


def stream(tenant: str) -> Sequence:
    return Sequence(Request("r", [1], tenant=tenant), None)


def waiting(*tenants: str, **weights: float) -> VirtualCounters:
    counters = VirtualCounters(quantum=100.0)
    for tenant in tenants:
        counters.join(tenant, weights.get(tenant, 1.0))
    return counters


def test_prompts_outputs_and_rejected_drafts_are_charged_over_the_tenants_weight() -> None:
    counters = VirtualCounters(ServiceWeights(prompt=1.0, output=2.0, rejected=0.5))
    counters.join("a", 1.0)
    counters.join("b", 4.0)
    counters.charge_prompt("a", 10)
    counters.charge_prompt("b", 10)
    ok = SequenceStatus.OK
    entries = [
        ResultEntry(0, ok, 14, [1, 2, 3], n_drafted=6, n_accepted=2),
        ResultEntry(1, ok, 11, [1]),
        ResultEntry(2, ok, 11, [1]),
        ResultEntry(3, ok, 8),  # a piece of a prompt
    ]
    running = {0: stream("a"), 1: stream("a"), 2: stream("b"), 3: stream("b")}
    counters.charge_step(entries, running)
    assert counters.of("a") == 10 + 3 * 2 + 4 * 0.5 + 2
    assert counters.of("b") == (10 + 2) / 4
    assert counters.first() == "b"


def test_the_work_of_a_grammar_is_charged_failed_or_not() -> None:
    counters = VirtualCounters(ServiceWeights(masks=3.0))
    counters.join("a", 2.0)
    running = {0: stream("a"), 1: stream("b")}
    entries = [
        ResultEntry(0, SequenceStatus.OK, 5, n_mask_work=4_000_000),
        ResultEntry(1, SequenceStatus.GRAMMAR_TOO_COSTLY, 5, n_mask_work=500_000),
    ]
    counters.charge_step(entries, running)
    assert counters.of("a") == pytest.approx(6.0)
    assert counters.of("b") == pytest.approx(1.5)


def test_work_beside_the_steps_puts_a_tenant_back_by_a_quantum_at_most() -> None:
    counters = VirtualCounters(quantum=100.0)
    counters.charge_aside("a", 60)
    assert counters.of("a") == 60
    counters.charge_aside("a", 1000)
    assert counters.of("a") == 100, "nobody waits, and nobody was harmed"
    for tenant in ("a", "b"):
        counters.join(tenant, 2.0)
    counters.charge("a", 400)
    counters.charge("b", 1000)
    assert (counters.of("a"), counters.of("b")) == (300, 600)
    counters.charge_aside("b", 10)
    assert counters.of("b") == 600, "it is further behind than that already"
    counters.charge_aside("a", 80)
    assert counters.of("a") == 340
    counters.leave("a")
    counters.charge_aside("a", 5000)
    assert counters.of("a") == 650, "a quantum behind the one that waits, at its weight"


def test_who_was_away_starts_at_the_least_of_those_that_wait() -> None:
    counters = waiting("a", "b")
    counters.charge("a", 50)
    counters.charge("b", 80)
    counters.join("late", 1.0)
    assert counters.of("late") == 50
    counters.charge("late", 500)
    counters.leave("late")
    counters.join("late", 1.0)
    assert counters.of("late") == 550, "what was taken beyond one's share is remembered"


def test_where_nobody_waits_one_starts_at_the_last_that_did() -> None:
    counters = waiting("a")
    counters.charge("a", 70)
    counters.leave("a")
    counters.charge("a", 30)  # it runs
    counters.join("b", 1.0)
    assert counters.of("b") == 100, "an hour alone is no debt"


@pytest.mark.parametrize(("n_due", "start"), [(0, 900.0), (100, 800.0), (800, 644.0)])
def test_prompts_that_are_counted_and_not_computed_put_nobody_back(
    n_due: int, start: float
) -> None:
    """By a quantum at most: what is saved up is no more than that."""
    counters = VirtualCounters(ServiceWeights(prompt=2.0), quantum=256.0)
    counters.n_due = lambda tenant: n_due // 2 if tenant == "long" else 0
    counters.join("long", 1.0)
    counters.charge("long", 900.0)
    counters.join("short", 1.0)
    assert counters.of("short") == start
    counters.leave("short")
    counters.charge("short", 1000.0)
    counters.join("short", 1.0)
    assert counters.of("short") == start + 1000.0, "it has got that"


def test_a_newcomer_goes_before_one_with_as_much_that_was_served_while_it_waited() -> None:
    counters = waiting("flood")
    counters.charge("flood", 40)
    counters.join("polite", 1.0)
    assert counters.of("polite") == counters.of("flood")
    assert counters.first() == "polite"
    counters.join("third", 1.0)
    counters.leave("polite")
    assert counters.first() == "flood", "it was given nothing since one went before it"
    counters.charge("flood", 1)
    assert counters.first() == "third"


def test_newcomers_without_end_do_not_keep_one_back_that_gets_nothing() -> None:
    counters = waiting("old")
    counters.charge("old", 40)
    for i in range(50):
        counters.join(f"new {i}", 1.0)
        if counters.first() == "old":
            break
        counters.leave(f"new {i}")
    assert i == 1, "the second one that comes with as much goes behind"


def test_equal_ones_take_turns() -> None:
    counters, served = waiting("a", "b", "c"), []
    for _ in range(6):
        served.append(counters.first())
        counters.charge(served[-1], 1)
    assert served == ["a", "b", "c", "a", "b", "c"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "charge"]),
            st.sampled_from("abcdef"),
            st.integers(-50, 50),
        ),
        max_size=300,
    )
)
def test_the_first_is_always_the_least_of_those_that_wait(
    actions: list[tuple[str, str, int]],
) -> None:
    counters, here = VirtualCounters(), set[str]()
    floor = 0.0
    for action, tenant, amount in actions:
        if action == "charge":
            counters.charge(tenant, amount)
            if amount < 0:  # it gives back what it has not got
                floor = min(floor, counters.of(tenant))
        elif action == "join" and tenant not in here:
            here.add(tenant)
            counters.join(tenant, 1.0 + amount % 3)
        elif action == "leave" and tenant in here:
            here.remove(tenant)
            counters.leave(tenant)
        if here:
            least = min(counters.of(other) for other in here)
            assert counters.of(counters.first()) == least
            assert least >= floor, "nobody begins below where the others are"
            floor = least
    assert len(counters._heap) <= 2 * len(here) + 65


def test_tenants_of_the_past_take_no_memory_without_end() -> None:
    counters = waiting("always")
    for i in range(10_000):
        counters.charge("always", 1)
        counters.join(f"t{i}", 1.0)
        counters.leave(f"t{i}")
    assert len(counters._counters) < 5000
    assert len(counters._weights) < 5000
    assert len(counters._heap) < 200


def test_a_tenant_that_runs_keeps_its_weight_when_those_of_the_past_are_forgotten() -> None:
    counters = waiting("always", "heavy", heavy=4.0)
    counters.leave("heavy")
    for i in range(3000):
        counters.charge("always", 1)
        counters.join(f"t{i}", 1.0)
        counters.leave(f"t{i}")
    before = counters.of("heavy")
    counters.charge("heavy", 40)
    assert counters.of("heavy") == before + 10


@pytest.mark.parametrize(
    ("held", "behind", "expected"),
    [
        ({"a": 4}, 0, ["a"]),  # b has none of its two
        ({"a": 3, "b": 1}, 0, ["a"]),
        ({"a": 2, "b": 2}, 99, []),  # equal parts
        ({"a": 2, "b": 2}, 100, ["a"]),  # a quantum behind
        ({"a": 4}, -1, []),  # b was served more
        ({"b": 4}, 500, []),
        ({}, 0, []),
    ],
)
def test_a_slot_is_taken_by_share_at_once_and_by_the_quantum_otherwise(
    held: dict[str, int], behind: int, expected: list[str]
) -> None:
    counters = waiting("a", "b")
    counters.charge("a", 1000)
    counters.charge("b", 1000 - behind)
    assert counters.over_served("b", held, 4) == expected


@pytest.mark.parametrize("scale", [0.001, 1.0, 1000.0])
def test_weights_are_relative_to_one_another(scale: float) -> None:
    """The quantum is service of the tenant that waits: no weights make it longer, or shorter."""
    counters = waiting("a", "b", a=scale, b=3 * scale)
    counters.charge("a", 1000)
    counters.charge("b", 3000 - 99)
    held = {"a": 1, "b": 3}
    assert counters.over_served("b", held, 4) == []
    assert counters.light({"a"}, {"b"}) == {"a"}
    counters.charge("a", 0.4)
    assert counters.over_served("b", held, 4) == ["a"]
    assert counters.light({"a"}, {"b"}) == set()
    counters.charge_aside("b", 1e9)
    counters.charge("a", 33)
    assert counters.over_served("a", held, 4) == []
    counters.charge("b", 399)
    assert counters.over_served("a", held, 4) == []
    counters.charge("b", 1)
    assert counters.over_served("a", held, 4) == ["b"]


def test_shares_of_slots_are_by_weight() -> None:
    counters = waiting("a", "b", b=3.0)
    assert counters.over_served("b", {"a": 2, "b": 2}, 4) == ["a"], "three of four are b's"
    assert counters.over_served("a", {"b": 3, "a": 1}, 4) == []
    assert counters.over_served("a", {"b": 4}, 4) == ["b"]


def test_a_weight_that_changes_while_its_tenant_waits_counts_from_then_on() -> None:
    counters = waiting("a", "b")
    counters.charge("b", 40)
    counters.set_weight("b", 4.0)
    assert counters.of("b") == 40, "what was given before"
    counters.charge("b", 40)
    assert counters.of("b") == 50
    assert counters.over_served("a", {"b": 4}, 5) == [], "four of five are b's"
    assert counters.over_served("a", {"b": 5}, 5) == ["b"]
    counters.leave("b")
    counters.leave("a")
    assert counters._waiting_weight == 0.0


def test_the_most_served_gives_first() -> None:
    counters = waiting("a", "b", "c")
    counters.charge("a", 200)
    counters.charge("b", 300)
    assert counters.over_served("c", {"a": 4, "b": 4}, 8) == ["b", "a"]


def test_a_slot_more_would_be_taken_back_by_one_that_is_away_and_below_its_share() -> None:
    counters = waiting("flood")
    counters.charge("flood", 1000)
    counters.charge("polite", 1012)
    assert counters.would_take_back("polite", "flood", {"flood": 3}, 4)
    assert counters.would_take_back("polite", "flood", {"flood": 2}, 4), "two of four are its share"
    assert not counters.would_take_back("polite", "flood", {"flood": 1}, 4)
    assert not counters.would_take_back("polite", "flood", {"polite": 2, "flood": 2}, 4)
    counters.charge("polite", 1)
    assert not counters.would_take_back("polite", "flood", {"flood": 3}, 4), "too far ahead"


def test_whose_slot_it_would_be_is_by_weight() -> None:
    counters = waiting("flood", flood=3.0)
    counters.charge("flood", 1000)
    assert not counters.would_take_back("polite", "flood", {"flood": 2}, 4), "three are its share"
    assert counters.would_take_back("polite", "flood", {"flood": 3}, 4)


def test_what_is_saved_for_a_tenant_is_bounded_over_time() -> None:
    budget = Budget(1000.0)
    assert budget.is_free("a", 0.0)
    budget.spend("a", 5000, 0.0)
    assert not budget.is_free("a", 4.8)
    assert budget.is_free("b", 0.0), "each tenant's own"
    assert budget.is_free("a", 4.9), "a tenth of a second ahead"
    budget.spend("a", 1000, 4.9)
    assert not budget.is_free("a", 5.5)
    assert not Budget(0.0).is_free("a", 9.9)
