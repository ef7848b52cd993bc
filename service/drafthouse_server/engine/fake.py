"""An engine without a model.

Deterministic, scriptable, and strict about its plans. For tests, here and at users'.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import EngineError, FieldViolation, InvalidRequest
from drafthouse_server.step import (
    EngineLimits,
    ModelCard,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    Start,
    StepPlan,
    StepResult,
    StepTimings,
)

__all__ = ["FakeEngine", "FakeSampler"]

_BOS, _EOS, _IM_START, _IM_END = 256, 257, 258, 259
_SPECIALS = {_BOS: "<|bos|>", _EOS: "<|eos|>", _IM_START: "<|im_start|>", _IM_END: "<|im_end|>"}
_N_VOCAB = 256 + len(_SPECIALS)
_PRINTABLE = range(32, 127)
_HASH_START = 0xCBF29CE484222325
_HASH_PRIME = 0x100000001B3
_MASK = (1 << 64) - 1
_SNAPSHOT_MAGIC = b"fake snapshot 1 "

_LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=4,
    n_ctx=4096,
    n_ctx_seq=1024,
    n_batch=64,
    n_ubatch=64,
    n_draft_max=4,
    n_outputs_max=20,
)
_CARD = ModelCard(
    name="fake",
    architecture="fake",
    description="a hash in place of a model",
    n_params=0,
    size_bytes=0,
    n_vocab=_N_VOCAB,
    n_ctx_train=1024,
    is_recurrent=False,
    has_chat_template=True,
    token_eos=_EOS,
)


def _extend_hash(digest: int, token: int) -> int:
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
    """What it was made from."""
    seen: list[int] = field(default_factory=list)
    """Tokens that it was fed or has chosen: all that are known of its sequence."""
    digest: int = _HASH_START
    """Hash of `seen`."""
    n_chosen: int = 0
    """How many of `seen` it chose; at a temperature above 0 each choice draws once."""
    is_owned: bool = False
    """Whether an engine has taken it."""

    def see(self, token: int) -> None:
        """Adds a token to the record."""
        self.seen.append(token)
        self.digest = _extend_hash(self.digest, token)

    def choose(self, digest: int, eog_period: int) -> int:
        """Returns the token after a history and adds it to the record.

        Args:
            digest: Hash of the history in the cache.
            eog_period: One token in so many ends the generation; 0 is never.
        """
        if digest != self.digest:
            digest = _extend_hash(digest, self.digest)
        if self.options.temperature > 0:
            digest = _extend_hash(digest, (self.options.seed or 0) + 1000)
            digest = _extend_hash(digest, self.n_chosen)
        digest = _mix(digest)
        is_end = eog_period and digest % eog_period == 0 and not self.options.ignore_eos
        token = _EOS if is_end else _PRINTABLE[(digest >> 8) % len(_PRINTABLE)]
        self.see(token)
        self.n_chosen += 1
        return token

    def copy(self, *, is_owned: bool) -> FakeSampler:
        """Returns a sampler in the same state, with a record of its own."""
        return dataclasses.replace(self, seen=[*self.seen], is_owned=is_owned)


@dataclass(slots=True)
class _Slot:
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
    is_awaited: bool = False
    """Whether its draft state was let go."""
    n_cut_min: int = 0
    """Fewest of its tokens that can be kept, but 0: what came before has left the window."""

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
            self.digest = _extend_hash(self.digest, token)


@dataclass(slots=True)
class _Fault:
    """A failure to come."""

    status: SequenceStatus | Exception
    """What happens."""
    seq_id: int | None
    """To which slot; None is all of the step."""
    n_steps: int
    """How many more times."""


@dataclass(slots=True)
class _Draft:
    """What a plan makes of the slots, before it is known to be right."""

    slots: dict[int, _Slot]
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
    """What was parked."""
    snapshots: dict[int, bytes] = field(default_factory=dict)
    """What was saved."""

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


class FakeEngine:
    """Implements `Engine` with a hash of the whole history as language model.

    Token t < 256 is byte t; four control tokens follow. The next token depends on every token
    before it, both in the cache and fed to the sampler, so a sequence that was given another's
    tokens, or its own twice, generates something else. How many drafted tokens are accepted is
    scripted and changes nothing but the speed, as it must be. Every plan is checked as `step.py`
    and `spec.h` say.

    Args:
        limits: Capacities; a small machine's by default.
        acceptance: Accepted tokens of a sequence's first, second, … draft; starts over at the end.
        eog_period: One token in so many ends a generation; 0 is never.
        step_s: Seconds that a step takes.
        card: What clients are told of the model.
        is_recurrent: Whether it behaves like a recurrent target, which cannot be cut nor copied: a
            start keeps all that a slot or a snapshot holds, or nothing.
    """

    def __init__(
        self,
        limits: EngineLimits = _LIMITS,
        *,
        acceptance: Sequence[int] = (2, 0, 3, 1),
        eog_period: int = 0,
        step_s: float = 0.0,
        card: ModelCard = _CARD,
        is_recurrent: bool = False,
    ) -> None:
        self._limits = limits
        self._card = dataclasses.replace(card, is_recurrent=is_recurrent or card.is_recurrent)
        self._acceptance = tuple(acceptance)
        self._eog_period = eog_period
        self._step_s = step_s
        self._slots: dict[int, _Slot] = {}
        self._faults: list[_Fault] = []
        self._n_start_refusals = 0
        self._n_save_refusals = 0
        self._is_closed = False
        self._is_interrupted = False
        self.n_steps = 0
        """Steps asked for, failed ones too."""
        self.n_cells_max = 0
        """Most KV cells that were ever in use."""

    @property
    def limits(self) -> EngineLimits:
        """Returns the capacities that a plan must respect."""
        return self._limits

    @property
    def card(self) -> ModelCard:
        """Returns what a client may know of the model."""
        return self._card

    @property
    def threads(self) -> Threads:
        """Returns how many threads it computes with."""
        return Threads(1, 1, reason="a fake engine")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def n_cells_used(self) -> int:
        """KV cells in use, over all slots."""
        return sum(slot.n_past for slot in self._slots.values())

    def n_past(self, seq_id: int) -> int:
        """Returns the tokens of a slot in the cache; 0 when it is idle."""
        slot = self._slots.get(seq_id)
        return slot.n_past if slot else 0

    def inject(
        self, fault: SequenceStatus | Exception, *, seq_id: int | None = None, n_steps: int = 1
    ) -> None:
        """Makes the next steps fail.

        Args:
            fault: A status for the entry, or an exception that the whole step raises.
            seq_id: Slot whose entry fails; None is every entry.
            n_steps: How many steps that it applies to.
        """
        self._faults.append(_Fault(fault, seq_id, n_steps))

    def refuse(self, *, n_starts: int = 0, n_saves: int = 0) -> None:
        """Makes the next starts that would keep tokens keep none, and the next saves fail.

        Args:
            n_starts: How many starts; those that keep nothing anyway do not count.
            n_saves: How many saves.
        """
        self._n_start_refusals += n_starts
        self._n_save_refusals += n_saves

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `Engine.step`.

        Raises:
            EngineError: the plan is wrong; nothing has changed (ENGINE_FAILURE).
        """
        if self._is_closed:
            raise EngineError("CLOSED")
        self.n_steps += 1
        started = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        self._raise_fault()
        draft = _Draft(dict(self._slots), self._n_start_refusals)
        self._give_back(plan, draft)
        self._take_into_use(plan, draft)
        self._check_entries(plan, draft)
        self._commit(plan, draft)
        for seq_id in plan.let_go:
            self._slots[seq_id].is_cold, self._slots[seq_id].is_awaited = True, False
        for seq_id in plan.take_up:
            self._slots[seq_id].is_awaited = self._slots[seq_id].is_cold
        entries = [self._run(entry, draft) for entry in plan.entries]
        n_steps = 1
        while n_steps < plan.n_steps and self._may_go_on(entries):
            self._go_on(entries)
            n_steps += 1
        self._is_interrupted = False
        self.n_cells_max = max(self.n_cells_max, self.n_cells_used)
        computed = [entry for entry in plan.entries if entry.seq_id not in draft.refused]
        return StepResult(
            entries=entries,
            n_batch_tokens=sum(len(entry.tokens) + entry.n_draft for entry in computed)
            + (n_steps - 1) * len(computed),
            n_kept=dict.fromkeys(draft.refused, 0),
            snapshots=draft.snapshots,
            samplers=draft.samplers,
            timings=StepTimings(total_s=time.perf_counter() - started),
            n_steps=n_steps,
        )

    def interrupt(self) -> None:
        """Ends the run of steps in flight, or else the next one. See `Engine.interrupt`."""
        self._is_interrupted = True

    def _may_go_on(self, entries: list[ResultEntry]) -> bool:
        """Returns whether a run has another step; a fault waits for a step of its own."""
        n_cells = self.n_cells_used + len(entries)
        if self._is_interrupted or self._faults or n_cells > self._limits.n_ctx:
            return False
        return all(
            entry.tokens and not entry.is_eog and entry.n_past < self._limits.n_ctx_seq
            for entry in entries
        )

    def _go_on(self, entries: list[ResultEntry]) -> None:
        """Runs another step of a run."""
        self.n_steps += 1
        if self._step_s:
            time.sleep(self._step_s)
        for entry in entries:
            slot = self._slots[entry.seq_id]
            slot.compute(entry.tokens[-1:])
            tokens = [*entry.tokens, slot.sampler.choose(slot.digest, self._eog_period)]
            entry.tokens, entry.logprobs = tokens, self._logprobs(slot, tokens)
            entry.n_past, entry.is_eog = slot.n_past, tokens[-1] == _EOS

    def _raise_fault(self) -> None:
        for fault in self._faults:
            if isinstance(fault.status, Exception):
                self._spend(fault)
                raise fault.status

    def _spend(self, fault: _Fault) -> None:
        fault.n_steps -= 1
        if fault.n_steps == 0:
            self._faults.remove(fault)

    def _give_back(self, plan: StepPlan, draft: _Draft) -> None:
        """Saves, parks and frees."""
        for seq_id in plan.saves:
            _check_in_use(seq_id, draft, self._limits)
            draft.snapshots[seq_id] = _write_snapshot(draft.slots[seq_id])
        for seq_id in plan.parks:
            _check_in_use(seq_id, draft, self._limits)
            draft.samplers[seq_id] = draft.slots.pop(seq_id).sampler
        for seq_id in plan.frees:
            _check_seq_id(seq_id, self._limits)
            draft.slots.pop(seq_id, None)

    def _take_into_use(self, plan: StepPlan, draft: _Draft) -> None:
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
            slot = _Slot(sampler.copy(is_owned=True))
            if held is not None and is_kept:
                slot.compute(held.tokens[: start.n_kept])
                slot.n_cut_min = held.n_cut_min
            draft.slots[start.seq_id] = slot

    def _check_start(self, start: Start, draft: _Draft) -> None:
        sampler = start.sampler
        if sampler is None:
            _require(start.snapshot is not None and start.is_resumed, "BAD_PLAN", "no sampler")
        else:
            _require(isinstance(sampler, FakeSampler), "INVALID_ARGUMENT", "foreign sampler")
        if isinstance(sampler, FakeSampler):
            is_used = sampler.is_owned or any(sampler is other for other in draft.samplers_taken)
            _require(not is_used, "INVALID_ARGUMENT", "a sampler that an engine owns")
            _require(start.is_resumed or not sampler.seen, "BAD_PLAN", "a sampler of another time")
            n_known = len(sampler.seen) if sampler.n_chosen else self._limits.n_ctx_seq
            _require(start.n_kept < n_known, "BAD_PLAN", f"n_kept {start.n_kept}, known {n_known}")
            draft.samplers_taken.append(sampler)
        self._check_kept(start, draft)

    def _check_kept(self, start: Start, draft: _Draft) -> None:
        n_ways = (start.source is not None) + (start.snapshot is not None)
        _require(0 <= start.n_kept < self._limits.n_ctx_seq, "BAD_PLAN", f"n_kept {start.n_kept}")
        _require(n_ways <= 1, "BAD_PLAN", "a source and a snapshot")
        _require(start.n_kept > 0 or n_ways == 0, "BAD_PLAN", "nothing to keep of what is given")
        if start.source is not None:
            _require(start.source != start.seq_id, "BAD_PLAN", "a slot as its own source")
            _check_in_use(start.source, draft, self._limits)
        if start.n_kept and start.snapshot is None:
            slot_id = start.seq_id if start.source is None else start.source
            n_held = draft.n_held(slot_id)
            _require(start.n_kept <= n_held, "BAD_PLAN", f"n_kept {start.n_kept}, held {n_held}")

    def _held(self, start: Start, draft: _Draft) -> _Slot | None:
        """Returns what a start goes on from: a slot, or what a snapshot says of one."""
        if not start.n_kept:
            return None
        if start.snapshot is None:
            return draft.slots.get(start.seq_id if start.source is None else start.source)
        saved = _read_snapshot(start.snapshot)
        if saved is not None and 0 < self._limits.n_window < saved.n_past:
            saved.n_cut_min = saved.n_past - 1
        return saved

    def _can_keep(self, start: Start, held: _Slot, draft: _Draft) -> bool:
        """Returns whether a start keeps its tokens; one of the refusals asked for is used up."""
        is_cut = held.n_past > start.n_kept
        if held.n_past < start.n_kept or (is_cut and start.n_kept < held.n_cut_min):
            return False
        if self._card.is_recurrent and (is_cut or start.source is not None):
            return False
        is_refused = draft.n_start_refusals > 0
        draft.n_start_refusals -= is_refused
        return not is_refused

    def _check_entries(self, plan: StepPlan, draft: _Draft) -> None:
        """Raises EngineError where `spec.h` returns BAD_PLAN and the like."""
        budget = _Budget(n_cells=sum(slot.n_past for slot in draft.slots.values()))
        _require(budget.n_cells <= self._limits.n_ctx, "BAD_PLAN", "n_ctx, after the starts")
        for entry in plan.entries:
            is_steady = entry.is_output and not entry.n_draft
            _require(plan.n_steps <= 1 or is_steady, "BAD_PLAN", "in a run, a draft or a piece")
            _check_seq_id(entry.seq_id, self._limits)
            slot = draft.slots.get(entry.seq_id)
            if entry.seq_id in draft.refused:
                n_planned = draft.n_planned[entry.seq_id]
                _require(entry.n_past == n_planned, "BAD_PLAN", f"n_past, kept {n_planned}")
                continue
            if slot is None:
                raise EngineError("SEQ_IDLE", detail=f"slot {entry.seq_id}")
            self._check_entry(entry, slot)
            self._check_budget(entry, budget)

    def _check_entry(self, entry: PlanEntry, slot: _Slot) -> None:
        n_past, tokens, sampler = slot.n_past, list(entry.tokens), slot.sampler
        _require(entry.n_past == n_past, "BAD_PLAN", f"n_past {entry.n_past}, is {n_past}")
        _require(len(tokens) > 0, "BAD_PLAN", "no tokens")
        _require(all(0 <= t < _N_VOCAB for t in tokens), "INVALID_ARGUMENT", "token id")
        _require(0 <= entry.n_draft <= self._limits.n_draft_max, "BAD_PLAN", "n_draft")
        n_after = n_past + len(tokens)
        n_cells = n_after + entry.n_draft
        _require(n_cells <= self._limits.n_ctx_seq, "BAD_PLAN", f"{n_cells} tokens in one slot")
        known = sampler.seen[n_past:n_after]
        _require(
            tokens[: len(known)] == known, "BAD_PLAN", "not the tokens that were chosen or fed"
        )
        if sampler.n_chosen:
            _require(n_after <= len(sampler.seen), "BAD_PLAN", "tokens after the last one chosen")
            is_last = n_after == len(sampler.seen)
            _require(entry.is_output == is_last, "BAD_PLAN", "is_output: at the last token chosen")
        _require(len(entry.given) <= entry.n_draft, "BAD_PLAN", "more given than n_draft")
        _require(all(0 <= t < _N_VOCAB for t in entry.given), "INVALID_ARGUMENT", "given token id")
        is_going_on = sampler.n_chosen > 0 and len(tokens) == 1 and entry.is_output
        _require(is_going_on or not entry.n_draft, "BAD_PLAN", "a draft after more than a token")

    def _commit(self, plan: StepPlan, draft: _Draft) -> None:
        """Makes a checked plan's slots the engine's. Up to here, nothing has changed."""
        for sampler in draft.samplers_taken:
            sampler.is_owned = True
        draft.samplers = {
            seq_id: sampler.copy(is_owned=False) for seq_id, sampler in draft.samplers.items()
        }
        for seq_id in plan.saves[: self._n_save_refusals]:
            del draft.snapshots[seq_id]
        self._n_save_refusals = max(0, self._n_save_refusals - len(plan.saves))
        self._n_start_refusals = draft.n_start_refusals
        self._slots = draft.slots

    def _check_budget(self, entry: PlanEntry, budget: _Budget) -> None:
        _require(entry.seq_id not in budget.seq_ids, "BAD_PLAN", "a sequence twice")
        budget.seq_ids.add(entry.seq_id)
        budget.n_tokens += len(entry.tokens) + entry.n_draft
        budget.n_cells += len(entry.tokens) + entry.n_draft
        budget.n_outputs += 1 + entry.n_draft if entry.is_output else 0
        _require(budget.n_tokens <= self._limits.n_batch, "BAD_PLAN", "n_batch")
        _require(budget.n_outputs <= self._limits.n_outputs_max, "BAD_PLAN", "n_outputs_max")
        _require(budget.n_cells <= self._limits.n_ctx, "BAD_PLAN", "n_ctx")

    def _find_fault(self, seq_id: int) -> SequenceStatus:
        for fault in self._faults:
            if isinstance(fault.status, SequenceStatus) and fault.seq_id in (None, seq_id):
                self._spend(fault)
                return fault.status
        return SequenceStatus.OK

    def _run(self, entry: PlanEntry, draft: _Draft) -> ResultEntry:
        """Runs one sequence's part."""
        if entry.seq_id in draft.refused:
            has_begun = entry.seq_id in self._slots
            status = SequenceStatus.OK if has_begun else SequenceStatus.DECODE_FAILED
            return ResultEntry(entry.seq_id, status, 0)
        slot = self._slots[entry.seq_id]
        status = self._find_fault(entry.seq_id)
        if status is SequenceStatus.NO_ROOM:
            return ResultEntry(entry.seq_id, status, slot.n_past)
        if status is not SequenceStatus.OK:
            del self._slots[entry.seq_id]
            return ResultEntry(entry.seq_id, status, 0)
        slot.compute(entry.tokens)
        if entry.is_output:
            done = self._generate(entry, slot)
        else:
            done = ResultEntry(entry.seq_id, status, slot.n_past)
        slot.is_cold, slot.is_awaited = slot.is_cold and not slot.is_awaited, False
        done.is_draft_cold = slot.is_cold
        return done

    def _generate(self, entry: PlanEntry, slot: _Slot) -> ResultEntry:
        """Emits the accepted part of the draft and one token more; an end token is the last one."""
        tokens: list[int] = []
        given = list(itertools.takewhile(lambda token: not self.is_eog(token), entry.given))
        n_most = len(given) if given else self._count_accepted(entry, slot)
        for place in range(n_most + 1):
            slot.compute(tokens[-1:])
            tokens.append(slot.sampler.choose(slot.digest, self._eog_period))
            is_rejected = bool(given) and tokens[-1:] != given[place : place + 1]
            if tokens[-1] == _EOS or is_rejected:
                break
        n_drafted = 0 if slot.is_cold else entry.n_draft
        return ResultEntry(
            seq_id=entry.seq_id,
            status=SequenceStatus.OK,
            n_past=slot.n_past,
            tokens=tokens,
            logprobs=self._logprobs(slot, tokens),
            n_drafted=len(given) or n_drafted,
            n_accepted=len(tokens) - 1,
            is_eog=tokens[-1] == _EOS,
            is_given=bool(given),
        )

    def _count_accepted(self, entry: PlanEntry, slot: _Slot) -> int:
        """Returns how many draft tokens the target accepts."""
        if not entry.n_draft or slot.is_cold:
            return 0
        n_accepted = self._acceptance[slot.n_drafts % len(self._acceptance)]
        slot.n_drafts += 1
        return min(n_accepted, entry.n_draft)

    def _logprobs(self, slot: _Slot, tokens: list[int]) -> list[float]:
        """Returns a log-probability per token.

        Minus its id in thousandths, so that a test can tell them apart.
        """
        return [-token / 1000 for token in tokens] if slot.sampler.options.logprobs else []

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler; a grammar must have a rule "root".

        Raises:
            InvalidRequest: an option is out of its range, or the grammar has no root
                (INVALID_FIELD).
        """
        if not (math.isfinite(options.temperature) and options.temperature >= 0):
            raise _invalid("temperature", f"{options.temperature} is not in [0, 10]")
        if options.grammar and "root" not in options.grammar:
            raise _invalid("grammar", 'cannot be parsed: no rule "root"')
        return FakeSampler(options)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns one token per byte of the text."""
        tokens = [_BOS] if add_special else []
        return tokens + (_split_specials(text) if parse_special else list(text.encode()))

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the byte of a token; the name of a control token, if asked for."""
        if token < 256:
            return bytes([token])
        return _SPECIALS[token].encode() if special else b""

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        return token in (_EOS, _IM_END)

    def format_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Returns the messages as ChatML."""
        turns = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages]
        return "".join(turns) + "<|im_start|>assistant\n"

    def close(self) -> None:
        """Forgets everything. Harmless when done twice."""
        self._slots.clear()
        self._is_closed = True


def _require(condition: bool, status: str, detail: str) -> None:
    if not condition:
        raise EngineError(status, detail=detail)


def _check_seq_id(seq_id: int, limits: EngineLimits) -> None:
    _require(0 <= seq_id < limits.n_seq_max, "BAD_SEQ_ID", f"{seq_id}")


def _check_in_use(seq_id: int, draft: _Draft, limits: EngineLimits) -> None:
    _check_seq_id(seq_id, limits)
    _require(seq_id in draft.slots, "SEQ_IDLE", f"slot {seq_id}")


def _write_snapshot(slot: _Slot) -> bytes:
    """Returns a slot as bytes: what `_read_snapshot` reads, in any process."""
    sampler = slot.sampler
    state = [slot.tokens, sampler.seen, sampler.n_chosen, dataclasses.asdict(sampler.options)]
    text = json.dumps(state).encode()
    return _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text) + text


def _read_snapshot(snapshot: bytes) -> _Slot | None:
    """Returns the slot that was saved; None for bytes that are not ours, or damaged."""
    head, text = snapshot[: len(_SNAPSHOT_MAGIC) + 8], snapshot[len(_SNAPSHOT_MAGIC) + 8 :]
    if head != _SNAPSHOT_MAGIC + b"%08x" % zlib.crc32(text):
        return None
    tokens, seen, n_chosen, options = json.loads(text)
    for name, value in options.items():
        if isinstance(value, list):
            options[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    sampler = FakeSampler(SamplingOptions(**options), n_chosen=n_chosen)
    for token in seen:
        sampler.see(token)
    slot = _Slot(sampler)
    slot.compute(tokens)
    return slot


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])


def _split_specials(text: str) -> list[int]:
    """Returns the tokens of a text in which names of control tokens stand for them."""
    for token, name in _SPECIALS.items():
        before, found, after = text.partition(name)
        if found:
            return list(itertools.chain(_split_specials(before), [token], _split_specials(after)))
    return list(text.encode())
