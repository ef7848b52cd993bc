"""Tenants take turns by what they have cost, whatever they ask for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.tenancy.fairness import Turns


def take_all(turns: Turns[str]) -> list[str]:
    """Returns all jobs in the order in which they are served."""
    order = []
    while (place := turns.take()) is not None:
        order.append(place[1])
    return order


def test_one_tenants_jobs_are_served_as_they_came() -> None:
    turns: Turns[str] = Turns()
    for i, cost in enumerate((5, 1, 9)):
        turns.put("a", f"a{i}", cost)
    assert len(turns) == 3
    assert take_all(turns) == ["a0", "a1", "a2"]
    assert len(turns) == 0


def test_a_flood_waits_for_who_comes_after_it() -> None:
    turns: Turns[str] = Turns()
    for i in range(4):
        turns.put("flood", f"f{i}", 1000)
    assert turns.take() == ("flood", "f0")
    turns.put("light", "l0", 10)
    turns.put("light", "l1", 10)
    assert take_all(turns) == ["l0", "l1", "f1", "f2", "f3"]


def test_equal_jobs_of_weights_1_and_3_are_served_1_to_3() -> None:
    turns: Turns[str] = Turns()
    for _ in range(400):
        turns.put("one", "one", 100, weight=1.0)
        turns.put("three", "three", 100, weight=3.0)
    first = Counter(take_all(turns)[:400])
    assert abs(first["three"] - 300) <= 1


def test_who_was_away_has_saved_nothing_up() -> None:
    turns: Turns[str] = Turns()
    for _ in range(50):
        turns.put("busy", "busy", 100)
        turns.take()
    for _ in range(4):
        turns.put("new", "new", 100)
        turns.put("busy", "busy", 100)
    assert Counter(take_all(turns)[:4]) == {"new": 2, "busy": 2}


def test_a_charge_makes_a_tenant_wait() -> None:
    turns: Turns[str] = Turns()
    for _ in range(4):
        turns.put("a", "a", 10)
        turns.put("b", "b", 10)
    assert turns.take() == ("a", "a")
    turns.charge("a", 25)  # it took longer than its size let expect
    assert take_all(turns)[:4] == ["b", "b", "b", "b"]


def test_who_may_not_be_served_keeps_the_place() -> None:
    turns: Turns[str] = Turns()
    turns.put("a", "a0", 10)
    turns.put("b", "b0", 10)
    turns.put("b", "b1", 10)
    assert turns.take(lambda tenant: tenant != "a") == ("b", "b0")
    assert turns.take(lambda tenant: tenant == "c") is None
    assert turns.take() == ("a", "a0")
    assert turns.take() == ("b", "b1")


def test_a_job_that_is_not_wanted_leaves_and_costs_nothing() -> None:
    turns: Turns[str] = Turns()
    turns.put("a", "a0", 1000)
    turns.put("b", "b0", 10)
    assert turns.remove("a", "a0")
    assert not turns.remove("a", "a0")
    assert not turns.remove("nobody", "x")
    turns.put("a", "a1", 10)
    assert take_all(turns) == ["a1", "b0"]


def test_after_a_rest_nobody_owes_anything_and_nobody_is_remembered() -> None:
    turns: Turns[str] = Turns()
    for i in range(100):
        turns.put(f"tenant {i}", "x", 10)
    turns.rest()
    assert len(take_all(turns)) == 100, "not while somebody waits"
    turns.charge("tenant 7", 1000)
    turns.rest()
    assert not turns._lines
    turns.put("tenant 7", "first", 10)
    turns.put("tenant 8", "second", 10)
    assert take_all(turns) == ["first", "second"]


JOBS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.booleans()), min_size=1, max_size=200
)


@given(JOBS, st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 3))
def test_tenants_that_wait_differ_by_two_of_their_jobs_at_most(
    jobs: list[tuple[str, int, bool]], weights: tuple[float, float, float]
) -> None:
    weight = dict(zip("abc", weights, strict=True))
    turns: Turns[tuple[str, int]] = Turns()
    n_waiting: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for tenant, cost, _ in jobs:
        turns.put(tenant, (tenant, cost), cost, weight[tenant])
        n_waiting[tenant] += 1
        largest[tenant] = max(largest[tenant], cost)
    served: Counter[str] = Counter()
    pairs = {(x, y) for x in n_waiting for y in n_waiting if x < y}
    while (place := turns.take()) is not None:
        tenant, (_, cost) = place
        served[tenant] += cost
        n_waiting[tenant] -= 1
        pairs = {(x, y) for x, y in pairs if n_waiting[x] and n_waiting[y]}
        for x, y in pairs:
            apart = abs(served[x] / weight[x] - served[y] / weight[y])
            assert apart <= largest[x] / weight[x] + largest[y] / weight[y] + 1e-9


@given(JOBS)
def test_every_job_is_served_once_and_none_of_those_that_left(
    jobs: list[tuple[str, int, bool]],
) -> None:
    turns: Turns[int] = Turns()
    wanted = set()
    for i, (tenant, cost, _) in enumerate(jobs):
        turns.put(tenant, i, cost)
    for i, (tenant, _, is_wanted) in enumerate(jobs):
        if is_wanted:
            wanted.add(i)
        else:
            assert turns.remove(tenant, i)
    order = []
    while (place := turns.take()) is not None:
        order.append(place[1])
    assert sorted(order) == sorted(wanted)
    for tenant in "abc":
        own = [i for i in order if jobs[i][0] == tenant]
        assert own == sorted(own)
