"""Rates in memory: never more than the rate, and a wait that suffices."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.errors import QuotaExceeded
from drafthouse_server.tenancy import counters
from drafthouse_server.tenancy.counters import MemoryCounters, SharedRates
from drafthouse_server.tenancy.limits import REQUESTS, Rate
from drafthouse_server.tenancy.tenants import Tenant


@given(
    rate=st.builds(Rate, st.floats(0.1, 1000), st.floats(1, 100)),
    asked=st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 100)), max_size=100),
)
def test_no_more_is_taken_than_the_rate_allows_and_the_wait_suffices(
    rate: Rate, asked: list[tuple[float, float]]
) -> None:
    local, now, taken = MemoryCounters(), 0.0, list[tuple[float, float]]()
    for gap, cost in asked:
        now += gap
        wait_s = local.take_now("acme", "x", cost, now, rate)
        if wait_s:
            now += wait_s
            assert not local.take_now("acme", "x", cost, now + 1e-5, rate)
            now += 1e-5
        taken.append((now, cost))
    largest = max((cost for _, cost in asked), default=0.0)
    for i, (start, _) in enumerate(taken):
        for end, _ in taken[i:]:
            used = sum(cost for at, cost in taken if start <= at <= end)
            bound = (end - start) * rate.per_s + max(rate.burst, largest)
            assert used <= bound * (1 + 1e-6) + 1e-3 * rate.per_s


def test_tenants_and_dimensions_are_counted_apart_and_forgotten() -> None:
    local, rate = MemoryCounters(), Rate(1, 2)
    for tenant in ("a", "b"):
        for dimension in ("requests", "tokens"):
            assert local.take_now(tenant, dimension, 2, 0.0, rate) == 0
            assert local.take_now(tenant, dimension, 1, 0.0, rate) == pytest.approx(1)
    local.settle_now("a", "requests", -1, 0.0, rate)
    assert local.take_now("a", "requests", 1, 0.0, rate) == 0
    local.settle_now("a", "requests", 3, 0.0, rate)
    assert local.take_now("a", "requests", 1, 0.0, rate) == pytest.approx(4)
    for i in range(10_000):
        local.take_now(str(i), "x", 1, 10.0 * i, rate)
    assert len(local._paid_at) <= counters._N_SWEEP + 1


def test_a_debt_is_paid_off_sooner_at_a_raised_rate_and_no_later_at_a_lowered_one() -> None:
    """It went on at the rate at which it was made, for as many minutes as were left of it."""
    low, high = Rate(1, 60), Rate(10, 600)
    local = MemoryCounters()
    assert local.take_now("a", "x", 6000, 0.0, low) == 0
    wait_s = local.take_now("a", "x", 100, 0.0, high)
    assert wait_s == pytest.approx(550.0)
    assert local.take_now("a", "x", 100, wait_s + 1e-5, high) == 0
    assert local.reset_s("a", "x", wait_s) == pytest.approx(60.0, abs=1e-3)
    local.settle_now("a", "x", -100, wait_s, low)  # of who was let in before
    assert local.reset_s("a", "x", wait_s) == pytest.approx(50.0, abs=1e-3)
    assert local.take_now("b", "x", 600, 0.0, high) == 0
    assert local.take_now("b", "x", 1, 0.0, low) == pytest.approx(1.0)


@pytest.mark.parametrize("per_s", [1, 3])
@pytest.mark.parametrize("n_servers", [2, 4])
async def test_who_waits_as_told_is_let_in_by_whichever_server_and_the_bound(
    n_servers: int, per_s: int
) -> None:
    """At 3/s on four servers half of the retries were refused: a row's credit was of its part."""
    chance, now, tenant = random.Random(7), [0.0], Tenant("acme", requests_per_s=per_s)
    store, taken = MemoryCounters(), list[float]()
    store.n_replicas = n_servers
    servers = [SharedRates(store, clock=lambda: now[0]) for _ in range(n_servers)]
    due = [(chance.random(), i, False) for i in range(20)]
    heapq.heapify(due)
    n_retries = n_let_in = 0
    while due[0][0] < 200:
        now[0], i, is_retry = heapq.heappop(due)
        wait_s = 0.0
        try:
            await servers[i % n_servers].take(tenant, REQUESTS, 1, f"c{i}")
            taken.append(now[0])
        except QuotaExceeded as error:
            wait_s = error.retry_after_s or 0.0
        n_retries += is_retry
        n_let_in += is_retry and not wait_s
        pause_s = wait_s + 0.1 * chance.random() if wait_s else chance.expovariate(0.5)
        heapq.heappush(due, (now[0] + pause_s, i, wait_s > 0))
    for server in servers:
        await server.close()
    assert len(taken) >= 0.98 * 200 * per_s
    assert n_let_in >= 0.98 * n_retries
    for i, start in enumerate(taken):
        for n, end in enumerate(taken[i:], 1):
            assert n <= per_s + per_s * (end - start + 1) + n_servers
