"""Who gets which part of the next step. Pure: the same calls give the same plans.

There is no prefill phase and no decode phase. A sequence has `n_computed` tokens in the cache and
`n_target` tokens known; `plan` hands out the difference, as far as the step's budget goes:

1. Every sequence that generates gets its last token; nothing can take that away.
2. Prompts get a floor, so that drafts cannot stall them.
3. Drafts get what they ask for; when that is too much, the largest K shrink first.
4. Prompts get what is left, in the order of arrival.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush

from drafthouse_server.errors import ContextTooLong, DrafthouseError, EngineError
from drafthouse_server.sequence import Event, FinishReason, Sequence, SequenceState
from drafthouse_server.speculation import DraftPolicy
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SequenceStatus,
    Start,
    StepPlan,
    StepResult,
)

__all__ = ["N_NO_ROOM_MAX", "Scheduler"]

N_NO_ROOM_MAX = 16
"""Steps in a row without a free cell after which a sequence is given up."""

_PREFILL_FLOOR_SHARE = 4
"""Of the step's budget, one part in so many is kept from drafts while prompts wait."""

_End = FinishReason | DrafthouseError


class Scheduler:
    """Continuous batching over the engine's slots; first come, first served inside a priority.

    Order of calls, once per step: `reap`, `plan`, the engine's step, then `commit`, or `abandon` if
    the step was lost. `submit` and `mark` may come at any time in between.

    Args:
        limits: What the engine can carry; its budget holds every slot's next token.
        policy: Chooses K.
    """

    def __init__(self, limits: EngineLimits, policy: DraftPolicy) -> None:
        if limits.n_batch < limits.n_seq_max or limits.n_outputs_max < limits.n_seq_max:
            raise ValueError(
                f"n_batch {limits.n_batch} and n_outputs_max {limits.n_outputs_max}"
                f" must be at least n_seq_max {limits.n_seq_max}"
            )
        self._limits = limits
        self._policy = policy
        self._waiting: list[Sequence] = []
        self._running: dict[int, Sequence] = {}  # by slot, in the order of arrival
        # The lowest first: llama.cpp computes sequences whose ids follow one another together.
        self._free_slots = list(range(limits.n_seq_max))
        self._frees: list[int] = []  # given back, not yet told to the engine
        self._starts: list[Start] = []
        self._marks: dict[Sequence, _End] = {}
        self._n_reserved = 0
        self._n_submitted = 0
        self._next_deadline = math.inf

    @property
    def n_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def n_reserved(self) -> int:
        """KV cells set aside, <= limits.n_ctx."""
        return self._n_reserved

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs and the engine knows of every slot given back."""
        return not (self._waiting or self._running or self._frees)

    def sequences(self) -> list[Sequence]:
        """Returns the sequences that have not ended.

        Running ones first, then waiting ones in their order.
        """
        return [*self._running.values(), *self._waiting]

    def check(self, n_prompt: int, n_output_max: int | None) -> int:
        """Checks that a request fits the context, and returns the most tokens it may generate.

        Args:
            n_prompt: Tokens of the prompt, >= 1.
            n_output_max: Tokens asked for, >= 1; None: until the context is full.

        Raises:
            ContextTooLong: it does not fit (CONTEXT_TOO_LONG).
        """
        n_context = min(self._limits.n_ctx_seq, self._limits.n_ctx)
        n_room = n_context - n_prompt
        if n_room < (1 if n_output_max is None else n_output_max):
            raise ContextTooLong(n_prompt, n_output_max or 1, n_context)
        return n_room if n_output_max is None else n_output_max

    def submit(self, sequence: Sequence) -> None:
        """Lets a sequence wait for a slot.

        Raises:
            ContextTooLong: it does not fit the context (CONTEXT_TOO_LONG); it is not submitted.
        """
        assert sequence.order < 0, f"{sequence.request_id} was submitted twice"
        assert sequence.n_prompt > 0, f"{sequence.request_id} has no prompt"
        sequence.n_output_max = self.check(sequence.n_prompt, sequence.n_output_max)
        sequence.order = self._n_submitted
        self._n_submitted += 1
        insort(self._waiting, sequence, key=_rank)
        self._next_deadline = min(self._next_deadline, sequence.deadline)

    def mark(self, sequence: Sequence, end: FinishReason | DrafthouseError) -> None:
        """Asks for a sequence's end.

        The next `reap` carries it out. Too late is harmless; the first mark counts.
        """
        if sequence.state is not SequenceState.FINISHED:
            self._marks.setdefault(sequence, end)

    def reap(self, now: float) -> list[tuple[Sequence, Event]]:
        """Ends the marked sequences and those whose deadline has passed.

        Args:
            now: Monotonic time in seconds.

        Returns:
            Their terminal events.
        """
        if now >= self._next_deadline:
            self._mark_expired(now)
        if not self._marks:
            return []
        marks, self._marks = self._marks, {}
        return [
            (sequence, self._end(sequence, end))
            for sequence, end in marks.items()
            if sequence.state is not SequenceState.FINISHED
        ]

    def _mark_expired(self, now: float) -> None:
        self._next_deadline = math.inf
        for sequence in self.sequences():
            if sequence.deadline <= now:
                self._marks.setdefault(sequence, FinishReason.DEADLINE)
            else:
                self._next_deadline = min(self._next_deadline, sequence.deadline)

    def plan(self, now: float) -> StepPlan:
        """Returns the next step: slots given back and taken, and each sequence's part.

        Args:
            now: Monotonic time in seconds.
        """
        self._fill_slots(now)
        decodes, prefills = self._split_running()
        drafts = self._share_drafts(decodes, prefills)
        entries = [
            PlanEntry(sequence.seq_id, sequence.n_computed, sequence.tokens[-1:], n_draft, True)
            for sequence, n_draft in zip(decodes, drafts, strict=True)
        ]
        if prefills:
            n_left = self._limits.n_batch - len(entries) - sum(drafts)
            entries += _share_prefill(prefills, n_left)
        plan = StepPlan(entries=entries, starts=self._starts, frees=self._frees)
        self._starts, self._frees = [], []
        return plan

    def _fill_slots(self, now: float) -> None:
        """Gives free slots to those who wait, as far as cells can be set aside.

        Nobody overtakes.
        """
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            n_cells = self._n_cells(sequence)
            if self._n_reserved + n_cells > self._limits.n_ctx:
                return
            del self._waiting[0]
            self._n_reserved += n_cells
            sequence.n_reserved = n_cells
            sequence.seq_id = heappop(self._free_slots)
            sequence.slot_at = now
            self._running[sequence.seq_id] = sequence
            self._starts.append(Start(sequence.seq_id, sequence.sampler))

    def _n_cells(self, sequence: Sequence) -> int:
        """Returns the cells to set aside.

        All that it can ever hold, and what the draft tries out beyond.
        """
        assert sequence.n_output_max is not None, "set at submission"
        n_tokens = sequence.n_prompt + sequence.n_output_max + self._limits.n_draft_max
        return min(n_tokens, self._limits.n_ctx_seq, self._limits.n_ctx)

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that generate and those with a prompt to compute."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running.values():
            # Generation means: all but the last token computed, and that one is an output.
            n_target = len(sequence.tokens)
            generates = n_target > sequence.n_prompt and sequence.n_computed == n_target - 1
            (decodes if generates else prefills).append(sequence)
        return decodes, prefills

    def _share_drafts(self, decodes: list[Sequence], prefills: list[Sequence]) -> list[int]:
        """Returns K for each sequence that generates."""
        limits = self._limits
        n_used = len(decodes) + len(prefills)
        n_left = min(limits.n_batch, limits.n_outputs_max) - n_used
        n_floor = 0
        if prefills:
            n_pending = sum(sequence.n_pending for sequence in prefills)
            n_floor = min(n_pending, limits.n_batch // _PREFILL_FLOOR_SHARE)
            n_left = min(n_left, limits.n_batch - len(decodes) - n_floor)
        return self._policy.choose_all(decodes, limits, max(0, n_left), n_floor)

    def commit(self, result: StepResult, now: float) -> list[tuple[Sequence, Event]]:
        """Takes the engine's answer to the last plan.

        Args:
            result: One entry per plan entry.
            now: Monotonic time in seconds.

        Returns:
            New tokens and ends, in the plan's order.
        """
        events: list[tuple[Sequence, Event]] = []
        running = self._running
        for entry in result.entries:
            sequence = running[entry.seq_id]
            if entry.status is SequenceStatus.OK:
                self._advance(sequence, entry, now, events)
            elif entry.status is not SequenceStatus.NO_ROOM:
                events.append((sequence, self._fail(sequence, entry.status.value)))
            else:
                self._retry(sequence, events)
        self._policy.observe(result)
        return events

    def _advance(
        self,
        sequence: Sequence,
        entry: ResultEntry,
        now: float,
        events: list[tuple[Sequence, Event]],
    ) -> None:
        """Moves a sequence on by one successful step."""
        sequence.n_computed = entry.n_past
        sequence.n_no_room = 0
        if entry.is_draft_cold:
            sequence.is_draft_cold = True
        if not entry.tokens:
            return
        event, reason = sequence.extend(entry, now)
        events.append((sequence, event))
        if reason is not None:
            events.append((sequence, self._end(sequence, reason)))
        elif sequence.n_computed != len(sequence.tokens) - 1:
            events.append((sequence, self._fail(sequence, "BAD_RESULT")))

    def _retry(self, sequence: Sequence, events: list[tuple[Sequence, Event]]) -> None:
        """Lets a sequence that found no cell try again, without a draft and not for ever."""
        sequence.n_no_room += 1
        if sequence.n_no_room >= N_NO_ROOM_MAX:
            events.append((sequence, self._fail(sequence, SequenceStatus.NO_ROOM.value)))

    def abandon(self, plan: StepPlan, error: Exception) -> list[tuple[Sequence, Event]]:
        """Ends the sequences of a step that the engine lost, and gives their slots back.

        Args:
            plan: The lost plan. What it should have given back is given back again: harmless if it
                was.
            error: Why it was lost.

        Returns:
            Terminal events.
        """
        status = error.status if isinstance(error, EngineError) else "EXCEPTION"
        seq_ids = dict.fromkeys([entry.seq_id for entry in plan.entries])
        seq_ids |= dict.fromkeys([start.seq_id for start in plan.starts])
        self._frees += [seq_id for seq_id in plan.frees if seq_id not in seq_ids]
        lost = [self._running[seq_id] for seq_id in seq_ids]
        return [(sequence, self._fail(sequence, status)) for sequence in lost]

    def _fail(self, sequence: Sequence, status: str) -> Event:
        return self._end(sequence, EngineError(status, sequence.request_id))

    def _end(self, sequence: Sequence, end: _End) -> Event:
        """Gives back what a sequence holds, and returns its terminal event."""
        if sequence.seq_id < 0:
            self._waiting.remove(sequence)
        else:
            del self._running[sequence.seq_id]
            self._frees.append(sequence.seq_id)
            heappush(self._free_slots, sequence.seq_id)
            self._n_reserved -= sequence.n_reserved
            sequence.n_reserved = 0
        if isinstance(end, FinishReason):
            return sequence.finish(end)
        return sequence.fail(end)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return -sequence.priority, sequence.order


def _share_prefill(prefills: list[Sequence], n_left: int) -> Iterator[PlanEntry]:
    """Yields pieces of prompts until the budget is used up, the first arrival first."""
    for sequence in prefills:
        if n_left <= 0:
            return
        start = sequence.n_computed
        n_tokens = min(sequence.n_pending, n_left)
        n_left -= n_tokens
        piece = sequence.tokens[start : start + n_tokens]
        is_output = n_tokens == sequence.n_pending
        yield PlanEntry(sequence.seq_id, start, piece, 0, is_output)
