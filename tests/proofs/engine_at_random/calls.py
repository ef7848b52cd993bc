"""Calls beside steps: save and load, fork, rollback, plans that must be refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.proofs.engine_at_random.ledger import Ledger, Wrong, agreed
from tests.proofs.engine_at_random.request import Request

from drafthouse_engine import (
    PLAN_DTYPE,
    EngineError,
    Moves,
    NoRoom,
    Sampler,
    SamplingParams,
    Start,
    Unsupported,
)

__all__ = ["fork", "refuse", "roll_back", "save_and_load"]


def save_and_load(chance: random.Random, ledger: Ledger) -> None:
    """Saves a sequence, and loads it: into another slot, or twice."""
    if not ledger.live:
        return
    slot = chance.choice(list(ledger.live))
    request = ledger.live[slot]
    try:
        snapshot = ledger.engine.save(slot)
    except Unsupported:
        ledger.counts["cannot be saved"] += 1
        return
    free = ledger.free_slots()
    if free and chance.random() < 0.3:
        request = request.copy()
    else:
        ledger.drop(request)
        free.append(slot)
    to = chance.choice(free)
    ledger.say(f"save {slot}, load into {to}")
    if not ledger.has_room(request.n_past):
        return
    try:
        ledger.engine.load(to, snapshot)
    except NoRoom as error:
        if not ledger.limits.kv_unified:
            raise Wrong(f"no room in cells of its own: {error}") from error
        return
    ledger.place(request, to)
    ledger.counts["loads"] += 1


def fork(
    chance: random.Random, ledger: Ledger, new_request: Callable[[list[int], int], Request]
) -> None:
    """Begins idle slots with a part of a sequence's prompt.

    Args:
        chance: What is drawn by.
        ledger: What the engine holds.
        new_request: Draws a request by its prompt and tag.
    """
    sources = [it for it in ledger.live.values() if min(it.n_past, len(it.prompt)) >= 2]
    slots = ledger.free_slots()[: chance.choice((1, 2))]
    if not slots or not sources:
        return
    source = chance.choice(sources)
    n_past = chance.randrange(1, min(source.n_past, len(source.prompt)))
    if not ledger.has_room(n_past * len(slots)):
        return
    rest = chance.choices(source.prompt, k=chance.randrange(1, 6))
    prompt = (source.prompt[:n_past] + rest)[: ledger.limits.n_ctx_seq]
    forks = {slot: new_request(prompt, source.tag) for slot in slots}
    target = ledger.engine.target
    samplers = {slot: Sampler(target, request.sampling) for slot, request in forks.items()}
    assert source.slot is not None
    ledger.say(f"fork {source.slot} to {slots}, {n_past} tokens")
    try:
        ledger.engine.fork(source.slot, samplers, n_past)
    except Unsupported:
        ledger.counts["cannot be forked"] += 1
        return
    for slot, request in forks.items():
        request.n_past = n_past
        ledger.place(request, slot)
    ledger.counts["forks"] += 1


def roll_back(chance: random.Random, ledger: Ledger) -> None:
    """Cuts a prompt; only where its sampler takes no harm from tokens that it hears twice."""
    requests = [it for it in ledger.live.values() if it.sampling.temperature == 0 and not it.output]
    if not requests:
        return
    request = chance.choice(requests)
    assert request.slot is not None
    n_past = chance.randrange(request.n_past + 1)
    ledger.say(f"rollback {request.slot} to {n_past}")
    try:
        ledger.engine.rollback(request.slot, n_past)
    except Unsupported:
        ledger.counts["cannot be rolled back"] += 1
        return
    request.n_past = n_past
    ledger.counts["rollbacks"] += 1


def refuse(chance: random.Random, ledger: Ledger) -> None:
    """Has a plan refused, which changes nothing.

    Raises:
        Wrong: it is not, or something has changed.
    """
    limits = ledger.limits
    slot = chance.randrange(limits.n_seq_max)
    used = [*ledger.live, *ledger.retained]
    n_past = len(ledger.held(slot).tokens) if slot in used else 0
    sampler = Sampler(ledger.engine.target, SamplingParams())
    plans: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
        "a wrong n_past": ([(slot, n_past + 1, 0, 1, 0, 0)], {}),
        "too long a draft": ([(slot, n_past, 0, 1, limits.n_draft_max + 1, 1)], {}),
        "a slot twice": ([(slot, n_past, 0, 1, 0, 0)] * 2, {}),
        "tokens beyond the plan's": ([(slot, n_past, 3, 1, 0, 0)], {}),
        "too many tokens": ([(slot, n_past, 0, 2**31 - 1, 0, 0)], {}),
        "more kept than held": ([], {"starts": [Start(slot, sampler, limits.n_ctx_seq + 1)]}),
        "a source that is itself": ([], {"starts": [Start(slot, sampler, 1, source=slot)]}),
        "a start twice": ([], {"starts": [Start(slot, sampler)] * 2}),
        "an output that is none": (
            [(slot, 0, 0, 1, 0, 2)],
            {"starts": [Start(slot, sampler)], "frees": used},
        ),
    }
    what = chance.choice(list(plans))
    rows, moves = plans[what]
    ledger.say(f"a plan with {what}: {rows}")
    try:
        ledger.engine.step(np.array(rows, PLAN_DTYPE), [1, 2, 3], moves=Moves(**moves))
    except EngineError:
        ledger.check()
        agreed("a refused sampler is used", sampler.is_used, False)
        ledger.counts["refused plans"] += 1
    else:
        raise Wrong(f"a plan with {what} is not refused")
