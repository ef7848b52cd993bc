"""An engine without a model.

Deterministic, scriptable, and strict about its plans. For tests, here and at users'.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafthouse_server.errors import EngineError, FieldViolation, InvalidRequest
from drafthouse_server.step import (
    EngineLimits,
    ModelCard,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
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


@dataclass(frozen=True, slots=True)
class FakeSampler:
    """Chooses the next token: greedy by the history alone, else by history and seed."""

    options: SamplingOptions
    """What it was made from."""

    def choose(self, digest: int, eog_period: int) -> int:
        """Returns the token after a history.

        Args:
            digest: Hash of the history.
            eog_period: One token in so many ends the generation; 0 is never.
        """
        if self.options.temperature > 0:
            digest = _extend_hash(digest, (self.options.seed or 0) + 1000)
        digest = _mix(digest)
        if eog_period and digest % eog_period == 0 and not self.options.ignore_eos:
            return _EOS
        return _PRINTABLE[(digest >> 8) % len(_PRINTABLE)]


@dataclass(slots=True)
class _Slot:
    """What the engine knows of one sequence."""

    sampler: FakeSampler
    """Chooses its tokens."""
    digest: int = _HASH_START
    """Hash of the tokens in the cache."""
    n_past: int = 0
    """Tokens in the cache."""
    last_emitted: int | None = None
    """The token that the next generating entry must carry."""
    n_drafts: int = 0
    """Place in the acceptance pattern."""


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
    before it, so a sequence that was given another's tokens, or its own twice, generates something
    else. How many drafted tokens are accepted is scripted and changes nothing but the speed, as it
    must be. Every plan is checked as `spec.h` says.

    Args:
        limits: Capacities; a small machine's by default.
        acceptance: Accepted tokens of a sequence's first, second, … draft; starts over at the end.
        eog_period: One token in so many ends a generation; 0 is never.
        step_s: Seconds that a step takes.
        card: What clients are told of the model.
    """

    def __init__(
        self,
        limits: EngineLimits = _LIMITS,
        *,
        acceptance: Sequence[int] = (2, 0, 3, 1),
        eog_period: int = 0,
        step_s: float = 0.0,
        card: ModelCard = _CARD,
    ) -> None:
        self._limits = limits
        self._card = card
        self._acceptance = tuple(acceptance)
        self._eog_period = eog_period
        self._step_s = step_s
        self._slots: dict[int, _Slot] = {}
        self._faults: list[_Fault] = []
        self._is_closed = False
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
        self._check_plan(plan)
        for seq_id in plan.frees:
            self._slots.pop(seq_id, None)
        for start in plan.starts:
            assert isinstance(start.sampler, FakeSampler), "checked with the plan"
            self._slots[start.seq_id] = _Slot(start.sampler)
        entries = [self._run(entry) for entry in plan.entries]
        self.n_cells_max = max(self.n_cells_max, self.n_cells_used)
        return StepResult(
            entries=entries,
            n_batch_tokens=sum(len(entry.tokens) + entry.n_draft for entry in plan.entries),
            timings=StepTimings(total_s=time.perf_counter() - started),
        )

    def _raise_fault(self) -> None:
        for fault in self._faults:
            if isinstance(fault.status, Exception):
                self._spend(fault)
                raise fault.status

    def _spend(self, fault: _Fault) -> None:
        fault.n_steps -= 1
        if fault.n_steps == 0:
            self._faults.remove(fault)

    def _check_plan(self, plan: StepPlan) -> None:
        """Raises EngineError where `spec.h` returns BAD_PLAN and the like."""
        idle = (set(range(self._limits.n_seq_max)) - self._slots.keys()) | set(plan.frees)
        for start in plan.starts:
            _require(isinstance(start.sampler, FakeSampler), "INVALID_ARGUMENT", "foreign sampler")
            _require(start.seq_id in idle, "SEQ_BUSY", f"slot {start.seq_id}")
            idle.remove(start.seq_id)
        started = {start.seq_id for start in plan.starts}
        kept = self._slots.keys() - set(plan.frees)
        budget = _Budget(n_cells=sum(self._slots[seq_id].n_past for seq_id in kept))
        for entry in plan.entries:
            _require(0 <= entry.seq_id < self._limits.n_seq_max, "BAD_SEQ_ID", f"{entry.seq_id}")
            _require(entry.seq_id not in idle, "SEQ_IDLE", f"slot {entry.seq_id}")
            fresh = entry.seq_id in started
            self._check_entry(entry, None if fresh else self._slots[entry.seq_id])
            self._check_budget(entry, budget)

    def _check_entry(self, entry: PlanEntry, slot: _Slot | None) -> None:
        n_past = slot.n_past if slot else 0
        last_emitted = slot.last_emitted if slot else None
        _require(entry.n_past == n_past, "BAD_PLAN", f"n_past {entry.n_past}, is {n_past}")
        _require(len(entry.tokens) > 0, "BAD_PLAN", "no tokens")
        _require(all(0 <= t < _N_VOCAB for t in entry.tokens), "INVALID_ARGUMENT", "token id")
        _require(0 <= entry.n_draft <= self._limits.n_draft_max, "BAD_PLAN", "n_draft")
        n_after = n_past + len(entry.tokens) + entry.n_draft
        _require(n_after <= self._limits.n_ctx_seq, "BAD_PLAN", f"{n_after} tokens in one slot")
        if last_emitted is not None:
            _require(list(entry.tokens) == [last_emitted], "BAD_PLAN", "not the last token")
            _require(entry.is_output, "BAD_PLAN", "a generation without output")
        elif entry.n_draft:
            raise EngineError("BAD_PLAN", detail="a draft before the first token")

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

    def _run(self, entry: PlanEntry) -> ResultEntry:
        """Runs one sequence's part."""
        slot = self._slots[entry.seq_id]
        status = self._find_fault(entry.seq_id)
        if status is SequenceStatus.NO_ROOM:
            return ResultEntry(entry.seq_id, status, slot.n_past)
        if status is not SequenceStatus.OK:
            del self._slots[entry.seq_id]
            return ResultEntry(entry.seq_id, status, 0)
        for token in entry.tokens:
            slot.digest = _extend_hash(slot.digest, token)
        slot.n_past += len(entry.tokens)
        if not entry.is_output:
            return ResultEntry(entry.seq_id, status, slot.n_past)
        return self._generate(entry, slot)

    def _generate(self, entry: PlanEntry, slot: _Slot) -> ResultEntry:
        """Emits the accepted part of the draft and one token more; an end token is the last one."""
        tokens: list[int] = []
        for _ in range(self._count_accepted(entry, slot) + 1):
            if tokens:
                slot.digest = _extend_hash(slot.digest, tokens[-1])
                slot.n_past += 1
            tokens.append(slot.sampler.choose(slot.digest, self._eog_period))
            if tokens[-1] == _EOS:
                break
        slot.last_emitted = tokens[-1]
        return ResultEntry(
            seq_id=entry.seq_id,
            status=SequenceStatus.OK,
            n_past=slot.n_past,
            tokens=tokens,
            logprobs=self._logprobs(slot, tokens),
            n_drafted=entry.n_draft,
            n_accepted=len(tokens) - 1,
            is_eog=tokens[-1] == _EOS,
        )

    def _count_accepted(self, entry: PlanEntry, slot: _Slot) -> int:
        """Returns how many draft tokens the target accepts."""
        if not entry.n_draft:
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
            raise _invalid("sampling.temperature", f"{options.temperature} is not in [0, 10]")
        if options.grammar and "root" not in options.grammar:
            raise _invalid("sampling.grammar", 'cannot be parsed: no rule "root"')
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


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])


def _split_specials(text: str) -> list[int]:
    """Returns the tokens of a text in which names of control tokens stand for them."""
    for token, name in _SPECIALS.items():
        before, found, after = text.partition(name)
        if found:
            return list(itertools.chain(_split_specials(before), [token], _split_specials(after)))
    return list(text.encode())
