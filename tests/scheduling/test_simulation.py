"""The scheduler at scale, in virtual time: nobody starves, and waiting costs nothing."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from tests.support.simulate import (
    FLOODED,
    IDLE,
    N_WAITING_TENANT_MAX,
    TWO_FLOODS,
    Simulation,
    quantile,
)


def n_calls_of_a_step(n_running: int, n_waiting: int) -> float:
    """Counts Python calls of reap, plan and commit, which do not depend on how busy we are."""
    simulation = Simulation(n_running)
    for _ in range(n_running + n_waiting):
        simulation.submit("a", n_output=200)
    for _ in range(30):
        simulation.step()
    n_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    scheduler, n_steps = simulation.scheduler, 16
    for _ in range(n_steps):
        sys.setprofile(count)
        scheduler.reap(simulation.now)
        plan = scheduler.plan(simulation.now)
        sys.setprofile(None)
        simulation.engine.interrupt()  # a step is what is counted, not a run
        result = simulation.engine.step(plan)
        simulation.now += 0.001
        sys.setprofile(count)
        scheduler.commit(result, simulation.now)
        sys.setprofile(None)
    return n_calls / n_steps


def test_a_thousand_waiting_requests_cost_the_running_ones_nothing() -> None:
    assert n_calls_of_a_step(64, 1000) <= 1.2 * n_calls_of_a_step(64, 10)


def test_the_work_of_a_step_grows_at_most_linearly_with_the_running_sequences() -> None:
    small, large = n_calls_of_a_step(8, 100), n_calls_of_a_step(64, 100)
    assert large <= 8 * 1.3 * small


def test_a_sequence_costs_a_step_few_calls() -> None:
    # 31 of Python and C together, the search for K included; each takes some 0.1 us.
    assert n_calls_of_a_step(32, 100) <= 32 * 32


@pytest.mark.timeout(600)
def test_nobody_starves_at_ten_thousand_requests_a_second() -> None:
    found = Simulation(64).run(10_000, 0.15, ("a", "b", "c"))
    assert found.n_ended == found.n_submitted == 1500
    assert set(found.waits_s) == {"a", "b", "c"}
    counts = [len(waits) for waits in found.waits_s.values()]
    assert max(counts) - min(counts) <= 1
    longest = {tenant: max(waits) for tenant, waits in found.waits_s.items()}
    assert max(longest.values()) <= 0.1
    assert max(longest.values()) <= 2 * min(longest.values())


def test_a_flood_of_one_tenant_is_felt_by_itself_alone() -> None:
    idle = Simulation(64).run_streams(IDLE, 0.4)
    flooded = Simulation(64).run_streams(FLOODED, 0.4)
    assert not idle.n_refused
    assert set(flooded.n_refused) == {"d"}
    for tenant in "abc":
        assert len(flooded.waits_s[tenant]) == len(idle.waits_s[tenant]) > 50
        before, during = (quantile(found.waits_s[tenant], 0.95) for found in (idle, flooded))
        assert during <= 2 * before
        assert max(flooded.waits_s[tenant]) <= 3 * max(idle.waits_s[tenant])
    # The machine is full all the time, and the flood gets all that the others leave.
    assert flooded.n_tokens > 1.5 * idle.n_tokens
    n_tenants, longest = len(FLOODED), max(flooded.waits_s["d"])
    assert longest <= N_WAITING_TENANT_MAX * n_tenants / (flooded.n_ended / flooded.elapsed_s)


def test_two_floods_get_equal_parts() -> None:
    found = Simulation(64).run_streams(TWO_FLOODS, 0.25)
    assert set(found.n_refused) == {"d", "e"}
    assert found.n_tokens_by_tenant["d"] == pytest.approx(found.n_tokens_by_tenant["e"], rel=0.1)
    for tenant in "ac":  # below their share: hardly any wait
        longest_below, waits = max(found.waits_s[tenant]), found.waits_s["d"]
        assert longest_below < 0.2 * quantile(waits, 0.95)


def test_the_same_load_gives_the_same_steps() -> None:
    first, second = (Simulation(8, seed=3).run(2000, 0.02, ("a", "b")) for _ in range(2))
    assert first.n_steps == second.n_steps
    assert first.elapsed_s == second.elapsed_s
