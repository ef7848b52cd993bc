"""A fused step: what is planned is done, and what came of it is judged."""

from __future__ import annotations

import random

import numpy as np
from tests.proofs.engine_at_random.ledger import Ledger, Saved, Told, Wrong, agreed
from tests.proofs.engine_at_random.plan import Plan, Row

from drafthouse_engine import (
    DRAFT_DTYPE,
    PLAN_DTYPE,
    EngineError,
    Fault,
    Moved,
    ResultFlag,
    Status,
    StepResult,
)

__all__ = ["carry_out"]

N_SAVED_MAX = 12


def carry_out(chance: random.Random, ledger: Ledger, plan: Plan) -> None:
    """Runs a plan, and judges what came of it.

    Raises:
        Wrong: the engine refuses it, or does something else.
    """
    engine = ledger.engine
    ledger.say(str(plan))
    if plan.fault:
        engine.inject_fault(plan.fault, 1)
    if chance.random() < 0.02:
        engine.interrupt()
    rows, drafts = np.array(plan.rows, PLAN_DTYPE), np.array(plan.drafts, DRAFT_DTYPE)
    try:
        result = engine.step(rows, plan.tokens, drafts, plan.n_steps, plan.moves)
    except EngineError as error:
        raise Wrong(f"a legal plan is refused: {type(error).__name__}: {error}") from error
    if plan.fault:
        engine.inject_fault(Fault.NONE, 0)
    ledger.counts["steps"] += 1
    ledger.counts["runs"] += plan.n_steps > 1
    assert result.moved is not None
    _settle_ends(chance, ledger, plan, result.moved)
    lacking = _settle_starts(ledger, plan, result.moved)
    for row, entry in zip(plan.rows, result.entries, strict=True):
        if row[0] in lacking:
            agreed("tokens of an entry without its prefix", int(entry["n_tokens"]), 0)
        else:
            _settle_entry(ledger, plan.fault, row, entry, result)


def _settle_ends(chance: random.Random, ledger: Ledger, plan: Plan, moved: Moved) -> None:
    """Takes snapshots and samplers."""
    for slot in plan.saves:
        if slot not in moved.snapshots:
            agreed("a snapshot without a sampler is not written", slot in plan.swap_outs, True)
            ledger.counts["unsaved"] += 1
        elif ledger.held(slot).tokens:
            ledger.saved.append(Saved(ledger.held(slot), moved.snapshots[slot]))
            ledger.counts["saves"] += 1
    while len(ledger.saved) > N_SAVED_MAX:
        ledger.saved.pop(chance.randrange(len(ledger.saved)))
    for slot in plan.swap_outs:
        request = ledger.live[slot]
        ledger.leave(request)
        request.sampler = moved.samplers[slot]
        request.snapshot = moved.snapshots.get(slot) if request.n_past else None
        ledger.waiting.append(request)
        ledger.counts["swaps"] += 1
        ledger.counts["swaps by hand"] += bool(request.output) and not request.has_stepped
        if request.snapshot is not None and chance.random() < 0.3:
            ledger.waiting.append(request.copy())  # it goes on by the snapshot's sampler
    for slot in plan.frees:
        ledger.retained.pop(slot, None)
        if slot in ledger.live:
            ledger.leave(ledger.live[slot])


def _settle_starts(ledger: Ledger, plan: Plan, moved: Moved) -> set[int]:
    """Takes what starts have kept; returns the slots that lack what they should have."""
    lacking = set()
    for start, request, n_kept in zip(plan.starts, plan.started, moved.n_kept, strict=True):
        agreed("kept tokens", n_kept in {0, start.n_kept}, True)
        ledger.place(request, start.seq_id)
        ledger.counts[_name_of(start.source, start.snapshot)] += n_kept > 0
        ledger.counts["resumed"] += start.is_resumed
        if n_kept < start.n_kept:
            lacking.add(start.seq_id)
            ledger.counts["lacking"] += 1
            if start.sampler is None:
                ledger.clear(request)
                continue
        request.n_past = n_kept
        request.sampler = request.snapshot = None
    return lacking


def _name_of(source: int | None, snapshot: object) -> str:
    """Returns what starts with such a source are counted as."""
    if snapshot is not None:
        return "kept of a snapshot"
    return "kept in place" if source is None else "kept of another slot"


def _settle_entry(
    ledger: Ledger, fault: Fault, row: Row, entry: np.void, result: StepResult
) -> None:
    """Judges what became of an entry."""
    slot, n_past, _, n_tokens, _, is_output = row
    request, status = ledger.live[slot], int(entry["status"])
    first, n_chosen = int(entry["token_offset"]), int(entry["n_tokens"])
    tokens = result.tokens[first : first + n_chosen].tolist()
    is_alike = ledger.judge(request, tokens, Told.of(result, first, n_chosen))
    if status == Status.NO_ROOM:
        ledger.counts["no room"] += 1
        agreed("n_past without room", int(entry["n_past"]), n_past)
        agreed("room is lacking", ledger.limits.kv_unified or bool(fault), True)
    elif status and fault:
        ledger.counts["faults"] += 1
        ledger.clear(request)
    elif status:  # in a run behind what it chose before
        ledger.fail(request, status, is_alike=is_alike)
    elif not is_alike:
        ledger.drop(request)
    else:
        _count_drafts(ledger, entry)
        agreed("an output has a token", bool(n_chosen), bool(is_output))
        request.n_past = int(entry["n_past"])
        request.has_stepped = request.has_stepped or bool(n_chosen)
        n_expected = len(request.tokens) - 1 if is_output else n_past + n_tokens
        agreed("n_past after a step", request.n_past, n_expected)


def _count_drafts(ledger: Ledger, entry: np.void) -> None:
    is_external = bool(int(entry["flags"]) & ResultFlag.EXTERNAL)
    kind = "given" if is_external else "drafted"
    ledger.counts[kind] += int(entry["n_drafted"])
    ledger.counts[f"{kind} and accepted"] += int(entry["n_accepted"])
