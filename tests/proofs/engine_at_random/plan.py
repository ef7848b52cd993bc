"""A plan of a step drawn at random: moves, then entries. Every one is legal."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.proofs.engine_at_random.ledger import Held, Ledger
from tests.proofs.engine_at_random.request import Request, Snapshot

from drafthouse_engine import Fault, Moves, Sampler, Start

__all__ = ["Plan", "drawn_plan"]

Row = tuple[int, int, int, int, int, int]

N_WAITING_MAX = 80
_FAULTS = tuple(fault for fault in Fault if fault is not Fault.NONE)


@dataclass
class Plan:
    """A step, and whose the parts of it are."""

    saves: list[int] = field(default_factory=list)
    swap_outs: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    """Whose sequences start."""
    drafts_off: list[int] = field(default_factory=list)
    drafts_on: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """Entries: slot, n_past, token_offset, n_tokens, n_draft, is_output."""
    tokens: list[int] = field(default_factory=list)
    drafts: list[tuple[int, int, int]] = field(default_factory=list)
    """External ones: slot, token_offset, n_tokens."""
    n_steps: int = 1
    fault: Fault = Fault.NONE

    @property
    def moves(self) -> Moves:
        """What is done before the entries."""
        return Moves(
            self.saves,
            self.swap_outs,
            self.frees,
            self.starts,
            self.drafts_off,
            self.drafts_on,
        )

    def __str__(self) -> str:
        starts = [
            (it.seq_id, it.n_kept, it.source, it.snapshot is not None, it.is_resumed)
            for it in self.starts
        ]
        moves = (
            f"saves {self.saves} swap_outs {self.swap_outs} frees {self.frees} starts {starts} "
            f"drafts_off {self.drafts_off} drafts_on {self.drafts_on}"
        )
        entries = f"rows {self.rows} drafts {self.drafts} n_steps {self.n_steps}"
        return f"step {self.fault.name}: {moves} {entries}"


def drawn_plan(
    chance: random.Random, ledger: Ledger, new_request: Callable[[], Request], skipped: float
) -> Plan:
    """Draws a plan.

    Args:
        chance: What it is drawn by.
        ledger: What the engine holds; requests that start are taken out of those that wait.
        new_request: Draws a request.
        skipped: Share of the sequences that have no entry, [0, 1]; 1: a plan of moves alone.
    """
    drawn = _Drawn(chance, ledger)
    drawn.draw_ends()
    drawn.draw_starts(new_request)
    drawn.draw_drafting()
    drawn.draw_entries(skipped)
    if chance.random() < 0.015:
        drawn.plan.fault = chance.choice(_FAULTS)
    return drawn.plan


class _Drawn:
    """A plan as far as it is drawn, and what its moves so far will have made of the slots."""

    def __init__(self, chance: random.Random, ledger: Ledger) -> None:
        self.plan = Plan()
        self._chance = chance
        self._ledger = ledger
        self._limits = ledger.limits
        self._live = dict(ledger.live)
        self._held = {slot: ledger.held(slot) for slot in (*ledger.live, *ledger.retained)}

    def _falls(self, share: float) -> bool:
        return self._chance.random() < share

    def draw_ends(self) -> None:
        """Draws who is saved, preempted, freed."""
        plan, ledger = self.plan, self._ledger
        plan.saves = [slot for slot in self._held if self._falls(0.06)]
        for slot in ledger.live:
            share = self._chance.random()
            if share < 0.05:
                plan.swap_outs.append(slot)
                if slot not in plan.saves and self._falls(0.6):
                    plan.saves.append(slot)
            elif share < 0.065:
                plan.frees.append(slot)
        plan.frees += [slot for slot in ledger.retained if self._falls(0.05)]
        if self._falls(0.05):
            plan.frees += ledger.free_slots()[:2]
        for slot in (*plan.swap_outs, *plan.frees):
            self._live.pop(slot, None)
            self._held.pop(slot, None)

    def draw_starts(self, new_request: Callable[[], Request]) -> None:
        """Draws who starts where, and from what."""
        waiting = self._ledger.waiting
        slots = [slot for slot in range(self._limits.n_seq_max) if slot not in self._live]
        if self._falls(0.5):
            self._chance.shuffle(slots)
        for slot in slots[: self._chance.choice((0, 0, 1, 1, 2, 5))]:
            if waiting and self._falls(0.7):
                self._start(waiting.pop(self._chance.randrange(len(waiting))), slot)
            elif len(self._live) + len(waiting) < N_WAITING_MAX:
                self._start(new_request(), slot)

    def _start(self, request: Request, slot: int) -> None:
        n_kept, source, snapshot = self._drawn_source(request, slot)
        if not self._has_room(slot, n_kept):
            n_kept, source, snapshot = 0, None, None
        needs_own = request.sampler is None and request.snapshot is not None
        if needs_own and (snapshot is not request.snapshot or not n_kept):
            n_kept, source, snapshot = request.n_past, None, request.snapshot
            if not self._has_room(slot, n_kept):
                self._ledger.waiting.append(request)
                return
        is_resumed = request.sampler is not None or needs_own
        if not needs_own and request.sampler is None:
            request.sampler = Sampler(self._ledger.engine.target, request.sampling)
        start = Start(slot, request.sampler, n_kept, source, snapshot, is_resumed, request.tag)
        self.plan.starts.append(start)
        self.plan.started.append(request)
        self._live[slot] = request
        self._held[slot] = Held(request.tokens[:n_kept], request.tag)

    def _has_room(self, slot: int, n_kept: int) -> bool:
        others = sum(len(held.tokens) for it, held in self._held.items() if it != slot)
        return not self._limits.kv_unified or others + n_kept <= self._limits.n_ctx

    def _drawn_source(self, request: Request, slot: int) -> tuple[int, int | None, Snapshot | None]:
        """Draws what of a request's tokens is kept, and from where."""
        share = self._chance.random()
        if request.snapshot is not None and share < 0.75:
            n_part = self._chance.randrange(1, request.n_past + 1)
            return self._chance.choice((request.n_past, n_part)), None, request.snapshot
        if share < 0.4 and slot in self._held:
            return self._drawn_part(request, self._held[slot]), None, None
        if share < 0.7:
            common = [(self._common(request, held), it) for it, held in self._held.items()]
            if common := [(n, it) for n, it in common if n and it != slot]:
                n, it = self._chance.choice(common)
                return self._part(n), it, None
        elif share < 0.95 and self._ledger.saved:
            saved = self._chance.choice(self._ledger.saved)
            if n := self._drawn_part(request, saved.held):
                return n, None, saved.snapshot
        return 0, None, None

    def _drawn_part(self, request: Request, held: Held) -> int:
        n = self._common(request, held)
        return self._part(n) if n else 0

    def _part(self, n: int) -> int:
        return self._chance.choice((n, self._chance.randrange(1, n + 1)))

    @staticmethod
    def _common(request: Request, held: Held) -> int:
        """Returns how many tokens a request begins with that are held; its last one is computed."""
        if held.tag != request.tag:
            return 0
        known = request.tokens[:-1]
        pairs = enumerate(zip(known, held.tokens, strict=False))
        n_least = min(len(known), len(held.tokens))
        return next((i for i, (a, b) in pairs if a != b), n_least)

    def draw_drafting(self) -> None:
        """Draws whose drafter is turned off, and on."""
        self.plan.drafts_off = [slot for slot in self._live if self._falls(0.03)]
        self.plan.drafts_on = [slot for slot in self._live if self._falls(0.06)]

    def draw_entries(self, skipped: float) -> None:
        """Draws who computes what: all within the step's bounds, or a run of steps."""
        slots = sorted(self._live)
        if self._falls(0.4):
            self._chance.shuffle(slots)
        is_run = self._falls(0.15)
        room = _Room(self._limits.n_batch, self._limits.n_outputs_max)
        if self._limits.kv_unified:
            n_held = sum(len(held.tokens) for held in self._held.values())
            room.n_tokens = min(room.n_tokens, self._limits.n_ctx - n_held)
        for slot in slots:
            if not self._falls(skipped):
                self._draw_entry(slot, room, is_run=is_run)
        if is_run:
            self.plan.n_steps = self._chance.choice((2, 5, 64))
        if self._falls(0.5):
            self._chance.shuffle(self.plan.rows)

    def _draw_entry(self, slot: int, room: _Room, *, is_run: bool) -> None:
        request, plan = self._live[slot], self.plan
        n_past = len(self._held[slot].tokens)
        rest = request.tokens[n_past:]
        n = min(self._chance.choice((len(rest), self._drawn_piece(rest))), room.n_tokens)
        is_output = n == len(rest)
        if n < 1 or (is_output and not room.n_outputs) or (is_run and not is_output):
            return
        n_draft = 0
        if is_output and n == 1 and request.has_stepped and not is_run:
            n_most = self._limits.n_draft_max
            n_draft = self._chance.choice((n_most, self._chance.randrange(n_most + 1)))
            n_ctx_left = self._limits.n_ctx_seq - n_past - 1
            n_draft = max(0, min(n_draft, room.n_tokens - 1, room.n_outputs - 1, n_ctx_left))
        plan.rows.append((slot, n_past, len(plan.tokens), n, n_draft, int(is_output)))
        plan.tokens += rest[:n]
        room.n_tokens -= n + n_draft
        room.n_outputs -= (1 + n_draft) * is_output
        if n_draft and self._falls(0.35):
            self._draw_external(slot, request, n_draft)

    def _drawn_piece(self, rest: Sequence[int]) -> int:
        return self._chance.choice((1, self._chance.randrange(1, len(rest) + 1)))

    def _draw_external(self, slot: int, request: Request, n_most: int) -> None:
        """Draws an external draft: what comes alone, one token of it changed or not."""
        n = self._chance.randrange(1, n_most + 1)
        first = len(request.output)
        draft = (request.answer.tokens[first : first + n] + [5] * n)[:n]
        if self._falls(0.5):
            draft[self._chance.randrange(n)] = self._chance.randrange(self._limits.n_vocab)
        self.plan.drafts.append((slot, len(self.plan.tokens), n))
        self.plan.tokens += draft


@dataclass
class _Room:
    """What of a step's bounds is left."""

    n_tokens: int
    n_outputs: int
