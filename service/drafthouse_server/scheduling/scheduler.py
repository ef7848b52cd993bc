"""Which sequence gets which part of the next step. Pure: the same calls give the same plans.

There is no prefill phase and no decode phase. A sequence has `n_computed` tokens in the cache and
`n_target` tokens known; `plan` hands out the difference, as far as the step's budget goes:

1. Every sequence that generates gets its last token; nothing can take that away, but for a step
   now and then that is a newcomer's alone (`Newcomers`), and a costly grammar (`MaskTurns`).
2. Prompts get a floor, so that drafts cannot stall them.
3. Drafts get what they ask for; when that is too much, the largest K shrink first.
4. Prompts get what is left, as far as the running streams' gap between tokens allows, the tenants
   in turn (`prefill`).

Slots share KV cells, or have their own (`cells`). Of the tenants that wait, the one that was served
least gets the next slot (`tenancy.fairness`). Sequences are preempted and resumed later, with not a
token changed (`preemption`): those that are least important where shared cells run out, and those
whose slot a tenant that was served less waits for, or a higher priority of their own tenant. Slots
whose sequences have ended are retained until they or their cells are needed (`slots`): prompts of
the same tenant go on from them (`prefix_cache`).
"""

from __future__ import annotations

from dataclasses import replace

from drafthouse_server.drafting.cost import CostModel, Splitting
from drafthouse_server.drafting.estimators import (
    Estimators,
    NoNgrams,
    with_checked_timings,
)
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy
from drafthouse_server.errors import (
    DrafthouseError,
    EngineError,
    GrammarTooCostly,
    NoTokenAllowed,
)
from drafthouse_server.scheduling.cells import CellLedger, check_context
from drafthouse_server.scheduling.checkpoints import Checkpoints
from drafthouse_server.scheduling.pacing import MaskTurns, RunLength
from drafthouse_server.scheduling.placement import Placement
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.preemption import Preemption, SnapshotCost, SwapSpace
from drafthouse_server.scheduling.prefill import Newcomers, Prefill
from drafthouse_server.scheduling.prefix_cache import NoPrefixes, PrefixCache
from drafthouse_server.scheduling.sequence import (
    Event,
    FinishReason,
    ProgressEvent,
    Sequence,
)
from drafthouse_server.scheduling.slots import SlotTable
from drafthouse_server.scheduling.waiting import End, Ends, WaitingQueue, rank
from drafthouse_server.step import (
    EngineLimits,
    ResultEntry,
    SchedulerCounts,
    SequenceStatus,
    StepPlan,
    StepResult,
)
from drafthouse_server.tenancy.fairness import Fairness, VirtualCounters

__all__ = ["N_NO_ROOM_MAX", "Scheduler"]

N_NO_ROOM_MAX = 16
"""Steps in a row without a free cell after which a sequence is given up.

Only one that has the cache to itself, or cells of its own; otherwise others are preempted.
"""

_N_NO_ROOM_PREEMPT = 2
"""Steps in a row without a free cell after which one is preempted: drafts are dropped first."""

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends of sequences that said all that they were to say."""

_Events = list[tuple[Sequence, Event]]


class Scheduler:
    """Continuous batching over the engine's slots.

    The tenant that was served least first; inside a tenant by priority and arrival.

    Order of calls, once per step: `reap`, `plan`, the engine's step, then `commit`, or `abandon` if
    the step was lost. `submit` and `mark` may come at any time in between.

    Args:
        limits: What the engine can carry; its budget holds every slot's next token.
        policy: Chooses K.
        cost: Predicts what a step takes and learns from each; while it knows nothing, prompts are
            not cut by time.
        splitting: How the engine's decode is cut, for `cost`.
        gap_s: Target of the gap between tokens while prompts are computed, seconds; 0 is twice the
            unloaded 99th percentile.
        n_preempted_bytes_max: Most bytes of preempted sequences in host memory; 0 is none.
        prefixes: Finds prefixes to go on from; without it ended sequences' slots are given back at
            once.
        ngrams: Proposes drafts before the engine's drafter is asked.
        n_checkpoint_min: Tokens of a prompt that a checkpoint must save over what was computed
            before; of recurrent targets only.
        n_draft_fixed: K of the fixed policy, which answers where `policy` fails.
        fairness: How tenants share the slots.
    """

    def __init__(
        self,
        limits: EngineLimits,
        policy: DraftPolicy,
        *,
        cost: CostModel,
        splitting: Splitting = Splitting.EQUAL,
        gap_s: float = 0.0,
        n_preempted_bytes_max: int = 1 << 30,
        prefixes: PrefixCache | None = None,
        ngrams: NgramDrafter | None = None,
        n_checkpoint_min: int = 64,
        n_draft_fixed: int = 0,
        fairness: Fairness | None = None,
    ) -> None:
        if min(limits.n_batch, limits.n_outputs_max) < limits.n_seq_max:
            raise ValueError(f"n_batch and n_outputs_max must be at least n_seq_max: {limits}")
        snapshots = SnapshotCost()
        self._limits = limits
        self._prefixes = prefixes or NoPrefixes()
        self._ledger = CellLedger(limits)
        self._slots = SlotTable(limits, self._prefixes, is_shared=self._ledger.is_shared)
        fairness = fairness or Fairness()
        self._aging_s = fairness.aging_s
        self.counters = VirtualCounters(fairness.weights, fairness.quantum)
        """How much service each tenant has got."""
        self._waiting = WaitingQueue(self.counters)
        self._estimators = Estimators(
            limits,
            policy=policy,
            cost=cost,
            ngrams=ngrams or NoNgrams(),
            splitting=splitting,
            n_draft_fixed=n_draft_fixed,
            sequences=self.sequences,
        )
        self._checkpoints = Checkpoints(
            self._prefixes, self._slots, self._estimators, snapshots, n_checkpoint_min
        )
        swap = SwapSpace(n_preempted_bytes_max, snapshots)
        self._preemption = Preemption(
            slots=self._slots,
            ledger=self._ledger,
            waiting=self._waiting,
            estimators=self._estimators,
            swap=swap,
            counters=self.counters,
            fairness=fairness,
        )
        self._placement = Placement(
            waiting=self._waiting,
            slots=self._slots,
            ledger=self._ledger,
            prefixes=self._prefixes,
            checkpoints=self._checkpoints,
            preemption=self._preemption,
            counters=self.counters,
        )
        self._prefill = Prefill(limits, self._estimators, self._checkpoints, gap_s)
        self._newcomers = Newcomers(limits, self._estimators, self.counters, gap_s)
        self._runs, self._masks = RunLength(gap_s), MaskTurns(self.counters, self._ledger)
        self._in_flight = PlanBuilder(0.0, [])  # from `plan` to `commit` or `abandon`
        self._ends = Ends(self._placement.least_s)
        self._now = 0.0
        self._n_submitted = 0
        self._planned = SchedulerCounts()  # what plans had

    # --- what there is

    @property
    def policy(self) -> DraftPolicy:
        """Chooses K."""
        return self._estimators.policy

    @property
    def n_waiting(self) -> int:
        """Sequences without a slot, preempted ones included."""
        return len(self._waiting) + len(self._in_flight.preempted)

    @property
    def n_running(self) -> int:
        """Sequences with a slot."""
        return len(self._slots.running)

    @property
    def n_cells_held(self) -> int:
        """KV cells in use: the running sequences' and the retained slots', <= limits.n_ctx."""
        return self._slots.n_cells_held

    @property
    def counts(self) -> SchedulerCounts:
        """How slots and cells were shared."""
        counts = replace(
            self._planned,
            n_preempted_now=self._waiting.n_preempted_now + len(self._in_flight.preempted),
            n_retained=len(self._slots.retained),
            n_retained_cells=self._slots.n_retained_cells,
            n_estimator_resets=self._estimators.guard.n_resets,
        )
        self._preemption.swap.count(counts)
        self._prefixes.tell_counts(counts)
        return counts

    @property
    def prefixes(self) -> PrefixCache:
        """Finds prefixes to go on from, and tells which came and went."""
        return self._prefixes

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs and the engine knows of every slot given back."""
        slots = self._slots
        return not (self.n_waiting or slots.running or slots.given_back)

    def running(self, seq_id: int) -> Sequence:
        """Returns the sequence that owns a slot."""
        return self._slots.running[seq_id]

    def sequences(self) -> list[Sequence]:
        """Returns the sequences that have not ended.

        Running ones first, then those about to be preempted, then waiting ones in their order.
        """
        preempted = self._in_flight.preempted.values()
        return [*self._slots.running.values(), *preempted, *self._waiting]

    # --- sequences that come and go

    def submit(self, sequence: Sequence) -> None:
        """Lets a sequence wait for a slot.

        Raises:
            ContextTooLong: it does not fit the context (CONTEXT_TOO_LONG); it is not submitted.
        """
        assert sequence.order < 0, f"{sequence.request.request_id} was submitted twice"
        assert sequence.n_prompt > 0, f"{sequence.request.request_id} has no prompt"
        request, n_prompt = sequence.request, sequence.n_prompt
        sequence.n_output_max = check_context(self._limits, n_prompt, request.n_output_max)
        sequence.rank = rank(request, self._n_submitted, self._aging_s)
        self._n_submitted += 1
        self._waiting.push(sequence)
        self._ends.expect(sequence, self.n_waiting + self.n_running)

    def mark(self, sequence: Sequence, end: FinishReason | DrafthouseError) -> None:
        """Asks for a sequence's end.

        The next `reap` carries it out. Too late is harmless; the first mark counts.
        """
        self._ends.mark(sequence, end)

    def charge(self, tenant: str, amount: float) -> None:
        """Counts units of service that a tenant was given elsewhere, such as work on its texts."""
        self.counters.charge_aside(tenant, amount)

    def forget_tenant(self, tenant: str, error: DrafthouseError) -> None:
        """Forgets a tenant, and ends its sequences with an error. Between two steps only."""
        self._ends.end_tenant(tenant, self.sequences(), error)
        self._placement.forget_tenant(tenant)
        self._estimators.forget_tenant(tenant)
        self._ledger.lengths.forget(tenant)

    def reap(self, now: float) -> _Events:
        """Ends the marked sequences and those whose deadline has passed.

        Args:
            now: Monotonic time in seconds.

        Returns:
            Their terminal events.
        """
        self._now = now
        return [(sequence, self._end(sequence, end)) for sequence, end in self._ends.take(now)]

    # --- the next step

    def plan(self, now: float) -> StepPlan:
        """Returns the next step: preempts, admits, saves checkpoints, drafts, shares the rest.

        Args:
            now: Monotonic time in seconds.
        """
        self._now, estimators = now, self._estimators
        plan = self._in_flight = PlanBuilder(now, self._slots.take_given_back())
        if self._ledger.is_shared:
            self._preemption.make_room(plan)
        self._placement.admit(plan)
        self._checkpoints.save(plan)
        decodes, prefills = self._masks.choose(*self._slots.split())
        n_cells_free = self._ledger.n_free(self._slots.running) - len(decodes)
        if newcomers := self._newcomers.choose(decodes, prefills, n_cells_free):
            decodes, prefills, plan.is_newcomers = [], newcomers, True
        draft_budget = self._prefill.draft_budget(len(decodes), prefills, n_cells_free)
        n_draft = self._draft(plan, decodes, draft_budget)
        is_single = plan.has_moves or estimators.ngrams.is_on or self._masks.is_costly
        if prefills:
            prompt_budget = min(self._limits.n_batch - len(decodes), n_cells_free) - n_draft
            self._prefill.add_pieces(plan, prefills, prompt_budget)
        elif decodes and not (n_draft or is_single):
            n_steps_max = 1 + n_cells_free // len(decodes)
            plan.n_steps = self._runs.ask(
                estimators.guard, decodes, estimators.stall_s, n_steps_max
            )
        if self._slots.retained and self._ledger.is_shared:
            self._placement.evict(plan)
        plan.drafts_off, plan.drafts_on = estimators.turn(self._slots.begun(), plan.starts)
        return plan.freeze()

    def _draft(self, plan: PlanBuilder, decodes: list[Sequence], draft_budget: int) -> int:
        """Gives the plan the entries of those that generate; returns their draft tokens."""
        estimators = self._estimators
        drafts = estimators.choose(decodes, draft_budget)
        plan.entries = estimators.propose(decodes, drafts, draft_budget)
        plan.n_decodes = len(decodes)
        n_draft = sum([entry.n_draft for entry in plan.entries])
        self._planned.n_planned += plan.n_decodes
        self._planned.n_draft_planned += n_draft
        return n_draft

    # --- what became of it

    def commit(self, result: StepResult, now: float) -> _Events:
        """Takes the engine's answer to the last plan.

        Args:
            result: One entry per plan entry.
            now: Monotonic time in seconds.

        Returns:
            New tokens, progress and ends, in the plan's order.
        """
        self._now = now
        plan, events = self._in_flight, list[tuple[Sequence, Event]]()
        result = with_checked_timings(result)
        self._newcomers.observe(result.timings.total_s)
        self._learn(plan, result, now)
        if plan.starts:
            self._placement.take(plan, result)
        self.counters.charge_step(result.entries, self._slots.running)
        self._masks.observe(result, self._slots.running)
        self._advance_all(result, events)
        self._estimators.teach_policy(result)
        for sequence in self._preemption.take(plan, result) if plan.preempted else ():
            events.append((sequence, self._fail(sequence, "SWAP_OUT_FAILED")))
        if plan.stored:
            self._checkpoints.take(plan, result)
        return events

    def _learn(self, plan: PlanBuilder, result: StepResult, now: float) -> None:
        """Lets the estimators learn what the step took, and which n-grams were right."""
        estimators, n_decodes = self._estimators, plan.n_decodes
        self._planned.n_planned += (result.n_steps - 1) * n_decodes
        if plan.entries:
            predicted_s, step_s = estimators.learn(
                result,
                now - plan.planned_at,
                plan.entries,
                n_decodes,
                has_moves=plan.has_moves,
            )
            has_prefill = len(plan.entries) > n_decodes
            self._prefill.observe(predicted_s, step_s, has_prefill=has_prefill)
        else:
            estimators.streams_s = 0.0
        estimators.teach_ngrams(result, self._slots.running)

    def _advance_all(self, result: StepResult, events: _Events) -> None:
        running = self._slots.running
        ok, no_room = SequenceStatus.OK, SequenceStatus.NO_ROOM
        for entry in result.entries:
            sequence, status = running[entry.seq_id], entry.status
            if status is ok:
                self._advance(sequence, entry, events)
            elif status is not no_room:
                self._lose(sequence, entry, events)
            else:
                self._retry(sequence, events)

    def _advance(self, sequence: Sequence, entry: ResultEntry, events: _Events) -> None:
        """Moves a sequence on by one successful step."""
        sequence.n_computed = entry.n_past
        sequence.n_no_room = 0
        sequence.is_draft_cold = entry.is_draft_cold
        if sequence.tally.n_steps == 0:
            self._note_prefill(sequence, events)
        if not entry.tokens:
            return
        event, reason = sequence.extend(entry, self._now)
        events.append((sequence, event))
        if reason is not None:
            events.append((sequence, self._end(sequence, reason)))
        elif sequence.n_computed != len(sequence.tokens) - 1:
            events.append((sequence, self._fail(sequence, "BAD_RESULT")))

    def _lose(self, sequence: Sequence, entry: ResultEntry, events: _Events) -> None:
        """Ends a sequence whose step failed, after what the steps before it in a run yielded."""
        if entry.tokens:
            events.append((sequence, sequence.extend(entry, self._now)[0]))
        events.append((sequence, self._fail(sequence, entry.status.value)))

    def _note_prefill(self, sequence: Sequence, events: _Events) -> None:
        """Notes how far the prompt is, and tells requests that asked for progress."""
        n_computed, n_prompt = sequence.n_computed, sequence.n_prompt
        if n_computed == n_prompt and self._prefixes.can_copy_running:
            self._slots.note(sequence)
        self._checkpoints.note(sequence)
        if sequence.request.has_progress and n_computed > sequence.n_progress:
            sequence.n_progress = n_computed
            events.append((sequence, ProgressEvent(n_computed, n_prompt)))

    def _retry(self, sequence: Sequence, events: _Events) -> None:
        """Lets a sequence that found no cell try again.

        Without a draft at first, then with one preempted; only one that is alone is given up.
        """
        sequence.n_no_room += 1
        is_alone = self.n_running == 1 and not self._slots.retained
        if self._ledger.is_shared and not is_alone:
            if sequence.n_no_room >= _N_NO_ROOM_PREEMPT:
                self._ledger.shrink(self.n_cells_held)
                sequence.n_no_room = _N_NO_ROOM_PREEMPT
        elif sequence.n_no_room >= N_NO_ROOM_MAX:
            events.append((sequence, self._fail(sequence, SequenceStatus.NO_ROOM.value)))

    def abandon(self, plan: StepPlan, error: Exception) -> _Events:
        """Ends the sequences of a step that the engine lost, and gives their slots back.

        Args:
            plan: The lost plan. What it should have given back is given back again: harmless if it
                was.
            error: Why it was lost.

        Returns:
            Terminal events.
        """
        status = error.status if isinstance(error, EngineError) else "EXCEPTION"
        slots = self._slots
        seq_ids = dict.fromkeys([entry.seq_id for entry in plan.entries])
        seq_ids |= dict.fromkeys([start.seq_id for start in plan.starts])
        given_back = [seq_id for seq_id in (*plan.frees, *plan.swap_outs) if seq_id not in seq_ids]
        # What the engine still holds of ended sequences is not known.
        given_back += slots.forget_retained()
        slots.given_back += given_back
        lost = [slots.running[seq_id] for seq_id in seq_ids]
        preempted = list(self._in_flight.preempted.values())
        self._in_flight = PlanBuilder(0.0, [])
        for sequence in preempted:
            self._waiting.push(sequence)  # where `_end` finds it
        return [(sequence, self._fail(sequence, status)) for sequence in (*lost, *preempted)]

    def _fail(self, sequence: Sequence, status: str) -> Event:
        return self._end(sequence, _error_of(status))

    def _end(self, sequence: Sequence, end: End) -> Event:
        """Gives back what a sequence holds, and returns its terminal event."""
        seq_id, slots = sequence.seq_id, self._slots
        if seq_id >= 0:
            del slots.running[seq_id]
            self._ledger.release(sequence)
            self._ledger.restore()
            self._placement.note_end(sequence, self._now)
            if not (isinstance(end, FinishReason) and slots.retain(sequence)):
                slots.given_back.append(seq_id)
                slots.empty(seq_id)
        else:
            self._waiting.remove(sequence)
            self._preemption.swap.take(sequence)
            if sequence.swap.is_preempted:
                sequence.swap.end(self._now)
        self._estimators.forget(sequence, is_finished=end in _FINISHED)
        if isinstance(end, FinishReason):
            if sequence.tally.n_steps:
                self._ledger.lengths.observe(sequence)
            return sequence.finish(end)
        return sequence.fail(end)


def _error_of(status: str) -> DrafthouseError:
    """Returns what a sequence ends with that the engine could not go on with."""
    if status == SequenceStatus.GRAMMAR_TOO_COSTLY.value:
        return GrammarTooCostly()
    if status == SequenceStatus.NO_TOKEN_ALLOWED.value:
        return NoTokenAllowed()
    return EngineError(status)
