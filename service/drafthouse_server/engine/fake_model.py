"""The model of the fake engine: a hash of the whole history, and what a slot holds of it.

And the rules of a plan, as `step.py` and `spec.h` state them, checked before anything is changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafthouse_server.errors import EngineError
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    SamplingOptions,
    Snapshot,
    Start,
    StepPlan,
)

__all__ = [
    "BOS",
    "EOS",
    "IM_END",
    "N_VOCAB",
    "SPECIALS",
    "CheckedPlan",
    "FakeSampler",
    "PlanCheck",
    "Slot",
    "extend_hash",
    "read_snapshot",
    "split_specials",
    "write_snapshot",
]

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIALS = {BOS: "<|bos|>", EOS: "<|eos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
N_VOCAB = 256 + len(SPECIALS)
_PRINTABLE = range(32, 127)
_HASH_START = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_SNAPSHOT_MAGIC = b"fake snapshot 2 "


def extend_hash(digest: int, token: int) -> int:
    """Returns the hash of a history that is longer by one token (FNV-1a, 64 bit)."""
    return ((digest ^ (token + 1)) * _HASH_PRIME) & _MASK


def _mix(digest: int) -> int:
    """Spreads a hash over all bits (the end of splitmix64)."""
    digest = ((digest ^ (digest >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    digest = ((digest ^ (digest >> 27)) * 0x94D049BB133111EB) & _MASK
    return digest ^ (digest >> 31)


@dataclass(slots=True)
class FakeSampler:
    """Chooses the next token: greedy by the history alone, else by history, seed and turn.

    It keeps its own record of the sequence, as real samplers do for penalties and grammars. One
    that is fed a token twice, or not at all, chooses other tokens than it should.
    """

    options: SamplingOptions
    """Options that it was made from."""
    seen: list[int] = field(default_factory=list)
    """Tokens that it was fed or has chosen: all that are known of its sequence."""
    digest: int = _HASH_START
    """Hash of `seen`."""
    n_chosen: int = 0
    """How many of `seen` it chose; at a temperature above 0 each choice draws once."""
    is_owned: bool = False
    """Whether an engine has taken it."""
    tag: int = 0
    """Whose sequence it is of; 0 until an engine has taken it."""

    def see(self, token: int) -> None:
        """Adds a token to the record."""
        self.seen.append(token)
        self.digest = extend_hash(self.digest, token)

    def choose(self, digest: int, eog_period: int) -> int:
        """Returns the token after a history and adds it to the record.

        Args:
            digest: Hash of the history in the cache.
            eog_period: One token in so many ends the generation; 0 is never.
        """
        if digest != self.digest:
            digest = extend_hash(digest, self.digest)
        if self.options.temperature > 0:
            digest = extend_hash(digest, (self.options.seed or 0) + 1000)
            digest = extend_hash(digest, self.n_chosen)
        digest = _mix(digest)
        is_end = eog_period and digest % eog_period == 0 and not self.options.ignore_eos
        token = EOS if is_end else _PRINTABLE[(digest >> 8) % len(_PRINTABLE)]
        self.see(token)
        self.n_chosen += 1
        return token

    def copy(self, *, is_owned: bool) -> FakeSampler:
        """Returns a sampler in the same state, with a record of its own."""
        return dataclasses.replace(self, seen=[*self.seen], is_owned=is_owned)


@dataclass(slots=True)
class Slot:
    """What the engine knows of one sequence."""

    sampler: FakeSampler
    """Chooses its tokens."""
    tokens: list[int] = field(default_factory=list)
    """Tokens in the cache."""
    digest: int = _HASH_START
    """Hash of `tokens`."""
    n_drafts: int = 0
    """Place in the acceptance pattern."""
    is_cold: bool = False
    """Whether its draft state was lost or turned off."""
    is_warming_up: bool = False
    """Whether it is fed to the drafter again, and drafts after its next step."""
    n_cut_min: int = 0
    """Fewest of its tokens that can be kept, but 0: what came before has left the window."""
    has_sampler: bool = True
    """Whether `sampler` is its own; false of a snapshot for prefix reuse."""

    @property
    def tag(self) -> int:
        """Whose sequence it is."""
        return self.sampler.tag

    @property
    def n_past(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    def compute(self, tokens: Sequence[int]) -> None:
        """Puts tokens into the cache; the sampler is fed those that it does not know yet."""
        for token in tokens:
            if len(self.tokens) >= len(self.sampler.seen):
                self.sampler.see(token)
            self.tokens.append(token)
            self.digest = extend_hash(self.digest, token)


def write_snapshot(slot: Slot, *, has_sampler: bool) -> bytes:
    """Returns a slot as bytes, with its sampler or without: what `read_snapshot` reads."""
    sampler = slot.sampler if has_sampler else FakeSampler(SamplingOptions(), tag=slot.tag)
    options = dataclasses.asdict(sampler.options)
    state = [slot.tokens, sampler.seen, sampler.n_chosen, options, sampler.tag, has_sampler]
    text = json.dumps(state).encode()
    return _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text) + text


def read_snapshot(snapshot: Snapshot) -> Slot | None:
    """Returns the slot that was saved; None for bytes that are not ours, or damaged."""
    head, text = snapshot[: len(_SNAPSHOT_MAGIC) + 8], snapshot[len(_SNAPSHOT_MAGIC) + 8 :]
    if head != _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text):
        return None
    tokens, seen, n_chosen, options, tag, has_sampler = json.loads(bytes(text))
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    sampler = FakeSampler(SamplingOptions(**options), n_chosen=n_chosen, tag=tag)
    for token in seen:
        sampler.see(token)
    slot = Slot(sampler, has_sampler=has_sampler)
    slot.compute(tokens)
    return slot


def split_specials(text: str) -> list[int]:
    """Returns the tokens of a text in which names of control tokens stand for them."""
    for token, name in SPECIALS.items():
        before, found, after = text.partition(name)
        if found:
            return list(itertools.chain(split_specials(before), [token], split_specials(after)))
    return list(text.encode())


@dataclass(slots=True)
class CheckedPlan:
    """What a plan makes of the slots, before it is known to be right."""

    slots: dict[int, Slot]
    """Slots in use. No slot in here is changed, only replaced."""
    n_start_refusals: int
    """How many more starts are to keep nothing."""
    n_planned: dict[int, int] = field(default_factory=dict)
    """`n_kept` of the starts so far, by slot."""
    refused: set[int] = field(default_factory=set)
    """Slots whose start kept nothing of what it should."""
    samplers_taken: list[FakeSampler] = field(default_factory=list)
    """Samplers of the starts so far."""
    samplers: dict[int, FakeSampler] = field(default_factory=dict)
    """Samplers of preempted sequences, by slot."""
    snapshots: dict[int, bytes] = field(default_factory=dict)
    """Snapshots that were saved, by slot."""

    def n_held(self, seq_id: int) -> int:
        """Returns the tokens in a slot, if all starts so far keep what they should."""
        slot = self.slots.get(seq_id)
        n_past = slot.n_past if slot else 0
        return max(n_past, self.n_planned.get(seq_id, 0))


@dataclass(slots=True)
class _Budget:
    """What a plan uses up."""

    n_cells: int
    """KV cells of the slots that go on, and of the entries."""
    n_tokens: int = 0
    """Tokens of the batch."""
    n_outputs: int = 0
    """Sampled positions."""
    seq_ids: set[int] = field(default_factory=set)
    """Slots with an entry."""


class PlanCheck:
    """Checks plans.

    Args:
        limits: Capacities.
        is_recurrent: Whether slots cannot be cut nor copied.
    """

    def __init__(self, limits: EngineLimits, *, is_recurrent: bool) -> None:
        self._limits = limits
        self._is_recurrent = is_recurrent

    def check(self, plan: StepPlan, slots: dict[int, Slot], n_start_refusals: int) -> CheckedPlan:
        """Returns what a plan makes of the slots.

        Args:
            plan: The plan.
            slots: Slots in use; they stay as they are.
            n_start_refusals: How many starts are to keep nothing of what they should.

        Raises:
            EngineError: the plan is wrong (ENGINE_FAILURE).
        """
        draft = CheckedPlan(dict(slots), n_start_refusals)
        self._give_back(plan, draft)
        self._take_into_use(plan, draft)
        for seq_id in (*plan.drafts_off, *plan.drafts_on):
            if seq_id not in draft.n_planned:
                _check_in_use(seq_id, draft, self._limits)
        self._check_entries(plan, draft)
        return draft

    def _give_back(self, plan: StepPlan, draft: CheckedPlan) -> None:
        """Saves, swap_outs and frees."""
        for seq_id in plan.saves:
            _check_in_use(seq_id, draft, self._limits)
            has_sampler = seq_id in plan.swap_outs
            draft.snapshots[seq_id] = write_snapshot(draft.slots[seq_id], has_sampler=has_sampler)
        for seq_id in plan.swap_outs:
            _check_in_use(seq_id, draft, self._limits)
            draft.samplers[seq_id] = draft.slots.pop(seq_id).sampler
        for seq_id in plan.frees:
            _check_seq_id(seq_id, self._limits)
            draft.slots.pop(seq_id, None)

    def _take_into_use(self, plan: StepPlan, draft: CheckedPlan) -> None:
        """Starts slots, in the plan's order."""
        for start in plan.starts:
            _check_seq_id(start.seq_id, self._limits)
            _require(start.seq_id not in draft.n_planned, "BAD_PLAN", "a slot started twice")
            self._check_start(start, draft)
            draft.n_planned[start.seq_id] = start.n_kept
            held = self._held(start, draft)
            is_kept = held is not None and self._can_keep(start, held, draft)
            if start.n_kept and not is_kept:
                draft.refused.add(start.seq_id)
            draft.slots.pop(start.seq_id, None)
            sampler = start.sampler or (held.sampler if held is not None and is_kept else None)
            if sampler is None:
                continue
            assert isinstance(sampler, FakeSampler), "checked before"
            slot = Slot(sampler.copy(is_owned=True))
            slot.sampler.tag = start.tag
            if held is not None and is_kept:
                slot.compute(held.tokens[: start.n_kept])
                slot.n_cut_min = held.n_cut_min
            draft.slots[start.seq_id] = slot

    def _check_start(self, start: Start, draft: CheckedPlan) -> None:
        sampler = start.sampler
        if sampler is None:
            _require(start.snapshot is not None and start.is_resumed, "BAD_PLAN", "no sampler")
        else:
            _require(isinstance(sampler, FakeSampler), "INVALID_ARGUMENT", "foreign sampler")
        if isinstance(sampler, FakeSampler):
            is_used = sampler.is_owned or any(sampler is other for other in draft.samplers_taken)
            _require(not is_used, "INVALID_ARGUMENT", "a sampler that an engine owns")
            _require(
                start.is_resumed or not sampler.seen,
                "BAD_PLAN",
                "a preempted sampler needs is_resumed",
            )
            is_own = not sampler.seen or sampler.tag == start.tag
            _require(is_own, "BAD_PLAN", "a sampler of another tag")
            n_known = len(sampler.seen) if sampler.n_chosen else self._limits.n_ctx_seq
            _require(start.n_kept < n_known, "BAD_PLAN", f"n_kept {start.n_kept}, known {n_known}")
            draft.samplers_taken.append(sampler)
        self._check_kept(start, draft)

    def _check_kept(self, start: Start, draft: CheckedPlan) -> None:
        n_ways = (start.source is not None) + (start.snapshot is not None)
        _require(0 <= start.n_kept < self._limits.n_ctx_seq, "BAD_PLAN", f"n_kept {start.n_kept}")
        _require(n_ways <= 1, "BAD_PLAN", "a source and a snapshot")
        _require(
            start.n_kept > 0 or n_ways == 0,
            "BAD_PLAN",
            "n_kept is 0, but a source or a snapshot is given",
        )
        if start.source is not None:
            _require(start.source != start.seq_id, "BAD_PLAN", "a slot as its own source")
            _check_in_use(start.source, draft, self._limits)
        if start.n_kept and start.snapshot is None:
            slot_id = start.seq_id if start.source is None else start.source
            n_held = draft.n_held(slot_id)
            _require(start.n_kept <= n_held, "BAD_PLAN", f"n_kept {start.n_kept}, held {n_held}")
            held = draft.slots.get(slot_id)
            _require(held is None or held.tag == start.tag, "BAD_PLAN", "tokens of another tag")

    def _held(self, start: Start, draft: CheckedPlan) -> Slot | None:
        """Returns what a start goes on from: a slot, or what a snapshot says of one."""
        if not start.n_kept:
            return None
        if start.snapshot is None:
            return draft.slots.get(start.seq_id if start.source is None else start.source)
        saved = read_snapshot(start.snapshot)
        is_own = saved is None or saved.tag == start.tag
        _require(is_own, "BAD_PLAN", "a snapshot of another tag")
        if saved is not None and 0 < self._limits.n_window < saved.n_past:
            saved.n_cut_min = saved.n_past - 1
        return saved

    def _can_keep(self, start: Start, held: Slot, draft: CheckedPlan) -> bool:
        """Returns whether a start keeps its tokens; one of the refusals asked for is used up."""
        is_cut = held.n_past > start.n_kept
        n_cut_min = held.n_cut_min
        if 0 < self._limits.n_window_cells < held.n_past and start.snapshot is None:
            n_lost = held.n_past - self._limits.n_window_cells
            n_cut_min = max(n_cut_min, n_lost + self._limits.n_window)
        if held.n_past < start.n_kept or (is_cut and start.n_kept < n_cut_min):
            return False
        if start.sampler is None and not held.has_sampler:
            return False
        if self._is_recurrent and (is_cut or start.source is not None):
            return False
        is_refused = draft.n_start_refusals > 0
        draft.n_start_refusals -= is_refused
        return not is_refused

    def _check_entries(self, plan: StepPlan, draft: CheckedPlan) -> None:
        """Raises EngineError where `spec.h` returns BAD_PLAN and the like.

        What a start was to keep counts, whether it can keep it or not.
        """
        in_use = draft.slots.keys() | draft.n_planned.keys()
        budget = _Budget(n_cells=sum(draft.n_held(seq_id) for seq_id in in_use))
        _require(budget.n_cells <= self._limits.n_ctx, "BAD_PLAN", "n_ctx, after the starts")
        for entry in plan.entries:
            is_steady = entry.is_output and not entry.n_draft
            _require(plan.n_steps <= 1 or is_steady, "BAD_PLAN", "in a run, a draft or a piece")
            _check_seq_id(entry.seq_id, self._limits)
            _require(entry.seq_id in in_use, "SEQ_IDLE", f"slot {entry.seq_id}")
            n_past = draft.n_held(entry.seq_id)
            _require(entry.n_past == n_past, "BAD_PLAN", f"n_past {entry.n_past}, is {n_past}")
            self._check_entry(entry)
            slot = draft.slots.get(entry.seq_id)
            if slot is not None:
                _check_known(entry, slot.sampler)
            self._check_budget(entry, budget)

    def _check_entry(self, entry: PlanEntry) -> None:
        n_draft = entry.n_draft
        _require(len(entry.tokens) > 0, "BAD_PLAN", "no tokens")
        _require(all(0 <= t < N_VOCAB for t in entry.tokens), "INVALID_ARGUMENT", "token id")
        _require(0 <= n_draft <= self._limits.n_draft_max, "BAD_PLAN", "n_draft")
        n_cells = entry.n_past + len(entry.tokens) + n_draft
        _require(n_cells <= self._limits.n_ctx_seq, "BAD_PLAN", f"{n_cells} tokens in one slot")
        _require(len(entry.external) <= n_draft, "BAD_PLAN", "more given than n_draft")
        _require(
            all(0 <= t < N_VOCAB for t in entry.external), "INVALID_ARGUMENT", "given token id"
        )

    def _check_budget(self, entry: PlanEntry, budget: _Budget) -> None:
        _require(entry.seq_id not in budget.seq_ids, "BAD_PLAN", "a sequence twice")
        budget.seq_ids.add(entry.seq_id)
        budget.n_tokens += len(entry.tokens) + entry.n_draft
        budget.n_cells += len(entry.tokens) + entry.n_draft
        budget.n_outputs += 1 + entry.n_draft if entry.is_output else 0
        _require(budget.n_tokens <= self._limits.n_batch, "BAD_PLAN", "n_batch")
        _require(budget.n_outputs <= self._limits.n_outputs_max, "BAD_PLAN", "n_outputs_max")
        _require(budget.n_cells <= self._limits.n_ctx, "BAD_PLAN", "n_ctx")


def _check_known(entry: PlanEntry, sampler: FakeSampler) -> None:
    """Checks an entry's tokens against those that its sampler knows."""
    tokens, n_after = list(entry.tokens), entry.n_past + len(entry.tokens)
    known = sampler.seen[entry.n_past : n_after]
    _require(tokens[: len(known)] == known, "BAD_PLAN", "not the tokens that were chosen or fed")
    if sampler.n_chosen:
        _require(n_after <= len(sampler.seen), "BAD_PLAN", "tokens after the last one chosen")
        is_last = n_after == len(sampler.seen)
        _require(entry.is_output == is_last, "BAD_PLAN", "is_output: at the last token chosen")
    is_going_on = sampler.n_chosen > 0 and len(tokens) == 1 and entry.is_output
    _require(is_going_on or not entry.n_draft, "BAD_PLAN", "a draft after more than a token")


def _require(condition: bool, status: str, detail: str) -> None:
    if not condition:
        error = EngineError(status)
        error.add_note(detail)
        raise error


def _check_seq_id(seq_id: int, limits: EngineLimits) -> None:
    _require(0 <= seq_id < limits.n_seq_max, "BAD_SEQ_ID", f"{seq_id}")


def _check_in_use(seq_id: int, draft: CheckedPlan, limits: EngineLimits) -> None:
    _check_seq_id(seq_id, limits)
    _require(seq_id in draft.slots, "SEQ_IDLE", f"slot {seq_id}")
