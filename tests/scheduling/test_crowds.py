"""Crowds of prompts that begin alike, of two tenants, on schedulers of every kind, drawn at random.

The rules of `test_scheduler_properties` seldom come to many slots, of which some have ended, some
compute and some wait for these; here that is the rule.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.scheduling.test_scheduler_properties import GREEDY, HASTY, Setup, World
from tests.support.clocked import numbers

from drafthouse_server.errors import Draining, Unauthenticated
from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE
from drafthouse_server.scheduling.sequence import ErrorEvent, FinishReason
from drafthouse_server.tenancy.fairness import Fairness

N_STEPS = 60


def drawn_setup(chance: random.Random) -> Setup:
    n_seq_max = chance.choice([3, 4, 6, 8])
    is_recurrent, is_shared = chance.random() < 0.25, chance.random() < 0.4
    setup = Setup(
        n_seq_max=n_seq_max,
        n_ctx=max(96, n_seq_max * (chance.randrange(30, 90) if is_shared else 96)),
        n_ctx_seq=96,
        n_host_bytes_max=chance.choice([0, 1000, 4000, 1 << 20]),
        n_preempted_bytes_max=chance.choice([0, 900, 1 << 20]),
        n_pool_max=chance.choice([None, None, 300]),
        is_paced=chance.random() < 0.5,
        is_adaptive=chance.random() < 0.5,
        is_recurrent=is_recurrent,
        fairness=chance.choice([HASTY, Fairness(quantum=40.0), Fairness()]),
    )
    if is_recurrent or chance.random() < 0.5:
        return setup
    n_window = chance.choice([4, 7, 20])
    return replace(setup, n_window=n_window, n_window_cells=chance.choice([0, n_window + 20]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(80))
def test_everybody_is_served_and_nothing_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)
    chance = random.Random(seed)
    world, now = World(drawn_setup(chance)), 0.0
    world.has_refusals = True  # what a window has lost no start can keep
    heads = [numbers(60, 3 + i) for i in range(3)]
    for _ in range(N_STEPS):
        for _ in range(chance.randrange(4)):
            head = chance.choice(heads)[: chance.randrange(16, 60)]
            world.submit(
                [*head, chance.randrange(256), chance.randrange(256)],
                chance.randrange(1, 20),
                tenant=chance.choice("aab"),
                priority=chance.choice([0, 0, 0, 1, -1]),
            )
        if world.live and chance.random() < 0.3:
            world.scheduler.mark(chance.choice(world.live), FinishReason.CANCELLED)
        now += 1.0
        world.step(now)
    for _ in range(60 * (1 + len(world.live))):
        if world.scheduler.is_idle:
            break
        now += 1.0
        world.step(now)
    assert world.scheduler.is_idle
    assert world.scheduler._ledger.n_reserved == 0
    assert world.engine.n_cells_used == world.scheduler.n_cells_held
    assert not [s for s in world.sequences if isinstance(s.terminal, ErrorEvent)]


def submit_drawn(world: World, chance: random.Random, heads: list[list[int]], now: float) -> None:
    """A prompt of any length, the context's too, with any limit, deadline and place in the row."""
    before = chance.choice(world.sequences).tokens if world.sequences else []
    head = chance.choice([before, *heads])
    prompt = [*head[: chance.randrange(1, 95)], chance.randrange(256)]
    n_left = world.limits.n_ctx_seq - len(prompt)
    world.submit(
        prompt,
        chance.choice([1, chance.randrange(1, n_left + 1), n_left, None]),
        GREEDY,
        tenant=chance.choice("aabc"),
        end_user=chance.choice(["", "", "u"]),
        priority=chance.choice([0, 0, 0, 1, -100]),
        received_at=now,
        deadline=now + chance.choice([0.0, 1e-3, 2.0, *[float("inf")] * 5]),
        has_progress=chance.random() < 0.3,
        n_draft=chance.choice([None, 0, 1, 9]),
        stop_token_ids=frozenset(range(0, 256, chance.choice([9, 999]))),
    )


def disturb(world: World, chance: random.Random) -> None:
    """Something comes between: a client leaves, a tenant is deleted, a step is lost."""
    scheduler, engine = world.scheduler, world.engine
    if world.sequences:
        scheduler.mark(chance.choice(world.sequences), chance.choice([*FinishReason]))
    kind = chance.randrange(5)
    if kind == 0:
        for sequence in world.live[:2]:
            scheduler.mark(sequence, Draining(1.0))
    elif kind == 1:
        scheduler.forget_tenant(chance.choice("abc"), Unauthenticated("the tenant was deleted"))
    elif kind == 2:
        scheduler.charge(chance.choice("abc"), 10.0 ** chance.randrange(6))
    elif kind == 3:
        engine.refuse(n_starts=chance.randrange(3), n_saves=chance.randrange(3))
    else:
        engine.inject(RuntimeError("boom"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_between_nobody_waits_for_ever(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`World.step` asserts that there is something to do as long as somebody waits."""
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)
    chance = random.Random(f"between {seed}")
    setup = drawn_setup(chance)
    if chance.random() < 0.3:
        setup = replace(setup, n_seq_max=1, n_ctx=96)
    world, now = World(setup), 0.0
    world.has_refusals = True
    heads = [numbers(94, 3 + i) for i in range(3)]
    n_steps_max = 10_000
    while n_steps_max and not (world.scheduler.is_idle and len(world.sequences) >= N_STEPS):
        n_steps_max -= 1
        if len(world.sequences) < N_STEPS:
            for _ in range(chance.choice([0, 1, 3])):
                submit_drawn(world, chance, heads, now)
            if chance.random() < 0.2:
                disturb(world, chance)
        now += chance.choice([0.0, 1e-3, 1.0, 1.0, *[1e6] * (chance.random() < 0.02)])
        world.step(now)
    assert n_steps_max, "somebody is never served"
    assert all(s.terminal is not None for s in world.sequences)
    for tenant in "abc":
        world.scheduler.forget_tenant(tenant, Unauthenticated("the tenant was deleted"))
    world.step(now)
    counts = world.scheduler.counts
    assert world.engine.n_cells_used == world.scheduler._ledger.n_reserved == 0
    assert counts.n_preempted_bytes == counts.n_prefix_bytes == counts.n_estimator_resets == 0
