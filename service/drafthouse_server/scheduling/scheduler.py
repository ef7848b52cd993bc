"""Who gets which part of the next step. Pure: the same calls give the same plans.

There is no prefill phase and no decode phase. A sequence has `n_computed` tokens in the cache and
`n_target` tokens known; `plan` hands out the difference, as far as the step's budget goes:

1. Every sequence that generates gets its last token; nothing can take that away.
2. Prompts get a floor, so that drafts cannot stall them.
3. Drafts get what they ask for; when that is too much, the largest K shrink first.
4. Prompts get what is left, as far as the running streams' gap between tokens allows, the tenants
   in turn (`prefill`).

Slots share KV cells, or have their own (`cells`). Where shared cells run out, the sequences that
are least important are parked and resumed later, with not a token changed (`parking`); so is one
whose slot a sequence of higher priority of the same tenant waits for. Slots whose sequences have
ended are retained until they or their cells are needed: prompts of the same tenant go on from them
(`prefix_cache`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush

from drafthouse_server.drafting.cost import (
    CostModel,
    Splitting,
    StepShape,
    count_ubatches,
    shape_of,
)
from drafthouse_server.drafting.guard import Guard, checked, is_duration
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.errors import ContextTooLong, DrafthouseError, EngineError
from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.counts import SchedulerCounts
from drafthouse_server.scheduling.preemption import ParkingLot, SnapshotCost
from drafthouse_server.scheduling.prefill import PrefillPacer, PrefillTurns
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    CacheEvent,
    Match,
    Prefix,
    PrefixCache,
    Tier,
)
from drafthouse_server.scheduling.run_pacer import RunPacer
from drafthouse_server.scheduling.sequence import (
    Event,
    FinishReason,
    ProgressEvent,
    Sequence,
    SequenceState,
)
from drafthouse_server.scheduling.waiting import WaitingQueue, rank
from drafthouse_server.step import (
    EngineLimits,
    PlanEntry,
    ResultEntry,
    SequenceStatus,
    Start,
    StepPlan,
    StepResult,
    StepTimings,
)

__all__ = ["N_NO_ROOM_MAX", "Scheduler"]

N_NO_ROOM_MAX = 16
"""Steps in a row without a free cell after which a sequence is given up.

Only one that has the cache to itself, or cells of its own; otherwise others are parked.
"""

_N_NO_ROOM_PARK = 2
"""Steps in a row without a free cell after which somebody is parked: drafts are dropped first."""

_PREFILL_FLOOR_SHARE = 4
"""Of the step's budget, one part in so many is kept from drafts while prompts wait."""

_PREFILL_MIN_SHARE = 32
"""Of the step's budget, one part in so many goes to prompts however long the step is already."""

_N_BEFORE_END = BLOCK_SIZE
"""A checkpoint of a recurrent state is taken so many tokens before the end of a prompt.

Not at the end: there stands what the chat template puts before an answer, which it may put
otherwise, or not at all, once the answer is there (the mark of a thought, for one).
"""

_COPY_SHARE = 64
"""Of a slot's cells one part in so many must be of use for a copy between caches to pay.

It copies all of them; to compute a token takes hundreds of times as long as to copy a cell.
"""

_N_DEADLINES_MIN = 64
"""Deadlines of ended sequences that may be held before they are swept."""

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends of sequences that said all that they were to say."""

_End = FinishReason | DrafthouseError


class Scheduler:
    """Continuous batching over the engine's slots.

    The tenants in turn; inside a tenant higher priority first, then first come, first served.

    Order of calls, once per step: `reap`, `plan`, the engine's step, then `commit`, or `abandon` if
    the step was lost. `submit` and `mark` may come at any time in between.

    Args:
        limits: What the engine can carry; its budget holds every slot's next token.
        policy: Chooses K.
        cost: Predicts what a step takes and learns from each; None: prompts are not cut by time.
        splitting: How the engine's decode is cut, for `cost`.
        gap_s: Target of the gap between tokens while prompts are computed, seconds; 0 is twice the
            unloaded 99th percentile.
        n_parked_bytes_max: Most bytes of parked sequences in host memory; 0 is none.
        prefixes: Finds prefixes to go on from; None: ended sequences' slots are given back at once.
        ngrams: Proposes drafts before the engine's drafter is asked; None: nobody does.
        n_checkpoint_min: Tokens of a prompt that a checkpoint must save over what was computed
            before; of recurrent targets only.
        n_draft_fixed: K of the fixed policy, which answers where `policy` fails.
    """

    def __init__(
        self,
        limits: EngineLimits,
        policy: DraftPolicy,
        *,
        cost: CostModel | None = None,
        splitting: Splitting = Splitting.STREAMS,
        gap_s: float = 0.0,
        n_parked_bytes_max: int = 1 << 30,
        prefixes: PrefixCache | None = None,
        ngrams: NgramDrafter | None = None,
        n_checkpoint_min: int = 64,
        n_draft_fixed: int = 0,
    ) -> None:
        if limits.n_batch < limits.n_seq_max or limits.n_outputs_max < limits.n_seq_max:
            raise ValueError(
                f"n_batch {limits.n_batch} and n_outputs_max {limits.n_outputs_max}"
                f" must be at least n_seq_max {limits.n_seq_max}"
            )
        self._limits = limits
        self._policy = policy
        self._fixed = FixedDraft(n_draft_fixed)
        self._cost = cost
        self._guard = Guard(
            {
                "cost": self._reset_cost,
                "n-grams": self._reset_ngrams,
                "pacing": self._reset_pacing,
                "policy": self._reset_policy,
            }
        )
        self._splitting = splitting
        self._pacer = PrefillPacer(gap_s)
        self._runs = RunPacer(gap_s)
        self._turns = PrefillTurns()
        self._ledger = CellLedger(limits)
        self._snapshots = SnapshotCost()
        self._lot = ParkingLot(n_parked_bytes_max, self._snapshots)
        self._prefixes = prefixes
        self._ngrams = ngrams
        self._n_checkpoint_min = n_checkpoint_min
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # by slot
        self._parking: dict[int, Sequence] = {}  # by the slot that the plan in flight takes away
        self._retained: dict[int, int] = {}  # cells by slot, of sequences that have ended
        self._n_retained_cells = 0
        self._borders: list[Sequence] = []  # computed up to where a checkpoint is to be taken
        self._hits: list[Sequence] = []  # started by the plan in flight with a prefix
        self._storing: dict[int, Prefix] = {}  # by the slot that the plan in flight saves
        # The lowest first: llama.cpp computes sequences whose ids follow one another together.
        self._free_slots = list(range(limits.n_seq_max))
        self._saves: list[int] = []
        self._parks: list[int] = []
        self._frees: list[int] = []  # given back, not yet told to the engine
        self._starts: list[Start] = []
        self._entries: list[PlanEntry] = []  # of the plan in flight
        self._marks: dict[Sequence, _End] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._n_reserved = self._n_submitted = 0
        # Turns of the policy that were carried out; decodes of the plan in flight.
        self._n_turns = self._n_decodes = 0
        self._is_fed = True  # whether anybody's drafter is, in the plan in flight
        # Entries of all plans that generate, once a step, and their draft tokens.
        self._n_planned = self._n_draft_planned = 0
        # Whether it starts, saves or parks, and whether its drafts are the policy's choice.
        self._has_moves = self._has_choice = False
        self._stall_s = math.inf  # a step of running streams: a snapshot may hold them up as long
        # Times, and what the last step took without its prompts; 0 is not known.
        self._now = self._planned_at = self._streams_s = 0.0

    @property
    def policy(self) -> DraftPolicy:
        """Chooses K."""
        return self._policy

    @property
    def n_waiting(self) -> int:
        """Sequences without a slot, parked ones included."""
        return len(self._waiting) + len(self._parking)

    @property
    def n_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    @property
    def n_reserved(self) -> int:
        """KV cells that the running sequences are likely to need."""
        return self._n_reserved

    @property
    def n_cells_held(self) -> int:
        """KV cells in use: the running sequences' and the retained slots', <= limits.n_ctx."""
        return self._n_cells_running() + self._n_retained_cells

    @property
    def counts(self) -> SchedulerCounts:
        """How slots and cells were shared."""
        lot, found = self._lot, self._prefixes.counts if self._prefixes else None
        return SchedulerCounts(
            n_parked=self._waiting.n_parked + len(self._parking),
            n_parked_bytes=lot.n_bytes,
            n_preempted=lot.n_preempted,
            n_resumed=lot.n_resumed,
            n_recomputed=lot.n_recomputed,
            n_prefix_lookups=found.n_lookups if found else 0,
            n_prefix_hits=found.n_hits if found else 0,
            n_prefix_tokens=found.n_prompt_tokens if found else 0,
            n_reused=found.n_reused if found else 0,
            n_prefix_evicted=found.n_evicted if found else 0,
            n_prefix_bytes=self._prefixes.n_host_bytes if self._prefixes else 0,
            n_retained=len(self._retained),
            n_planned=self._n_planned,
            n_draft_planned=self._n_draft_planned,
            n_retained_cells=self._n_retained_cells,
            n_estimator_resets=self._guard.n_resets,
        )

    def tell_cache(self, *, is_told: bool) -> None:
        """Has `take_cache_events` tell what is cached, from all that is there now; or ends it."""
        if self._prefixes is not None:
            self._prefixes.tell(is_told=is_told)

    def take_cache_events(self) -> list[CacheEvent]:
        """Returns which prefixes came and went since the last call, in order.

        Always empty unless `tell_cache` has asked for it.
        """
        prefixes = self._prefixes
        return prefixes.take_events() if prefixes is not None and prefixes.has_events else []

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs and the engine knows of every slot given back."""
        return not (self._waiting or self._running or self._frees or self._parking)

    def running(self, seq_id: int) -> Sequence:
        """Returns the sequence that owns a slot."""
        return self._running[seq_id]

    def sequences(self) -> list[Sequence]:
        """Returns the sequences that have not ended.

        Running ones first, then those about to be parked, then waiting ones in their order.
        """
        return [*self._running.values(), *self._parking.values(), *self._waiting]

    def check(self, n_prompt: int, n_output_max: int | None) -> int:
        """Checks that a request fits the context, and returns the most tokens it may generate.

        Args:
            n_prompt: Tokens of the prompt, >= 1.
            n_output_max: Tokens asked for, >= 1; None: until the context is full.

        Raises:
            ContextTooLong: it does not fit (CONTEXT_TOO_LONG).

        Thread:
            Any.
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
        self._waiting.push(sequence)
        if sequence.deadline < math.inf:
            self._add_deadline(sequence)

    def _add_deadline(self, sequence: Sequence) -> None:
        n_live = self.n_waiting + self.n_running
        if len(self._deadlines) > 2 * n_live + _N_DEADLINES_MIN:
            self._deadlines = [entry for entry in self._deadlines if entry[2].terminal is None]
            heapify(self._deadlines)
        heappush(self._deadlines, (sequence.deadline, sequence.order, sequence))

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
        self._now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            self.mark(heappop(self._deadlines)[2], FinishReason.DEADLINE)
        if not self._marks:
            return []
        marks, self._marks = self._marks, {}
        return [
            (sequence, self._end(sequence, end))
            for sequence, end in marks.items()
            if sequence.state is not SequenceState.FINISHED
        ]

    def plan(self, now: float) -> StepPlan:
        """Returns the next step: slots given back and taken, and each sequence's part.

        Args:
            now: Monotonic time in seconds.
        """
        self._now = self._planned_at = now
        if self._ledger.is_shared:
            self._make_room()
        self._fill_slots()
        if self._borders:
            self._save_borders()
        decodes, prefills = self._split_running()
        n_free = self._n_cells_free() - len(decodes)
        n_room, n_floor = self._draft_room(decodes, prefills, n_free)
        drafts = self._choose_drafts(decodes, n_room, n_floor)
        self._is_fed = self._is_any_wanted()
        entries = _decode_entries(decodes, drafts)
        if self._ngrams is not None and decodes:
            entries = self._quote(self._ngrams, decodes, drafts, n_room)
        n_draft = sum([entry.n_draft for entry in entries])
        self._n_planned += len(entries)
        self._n_draft_planned += n_draft
        if prefills:
            n_most = min(self._limits.n_batch - len(entries), n_free) - n_draft
            n_left, n_lead = n_most, None
            if entries and n_most > 0 and self._cost is not None and self._cost.n_observed:
                n_left = self._pace(entries, prefills, n_most)
                # Where slots have cells of their own, what all have is computed together: a piece's
                # first tokens with the last tokens and drafts of the others.
                is_split = self._splitting is Splitting.STREAMS
                n_lead = min([1 + entry.n_verified for entry in entries]) if is_split else 0
            entries += self._share_prefill(prefills, n_left, n_most, n_lead)
        self._entries, self._n_decodes = entries, len(decodes)
        self._has_moves = bool(self._starts or self._parks or self._saves)
        is_steady = bool(decodes) and not (prefills or n_draft or self._has_moves)
        n_steps = 1
        if is_steady and self._ngrams is None:
            n_steps = self._n_steps_run(decodes, 1 + n_free // len(decodes))
        if self._retained and self._ledger.is_shared:
            n_cells = sum(len(entry.tokens) + entry.n_draft for entry in entries)
            self._evict_for(n_cells * n_steps)
        let_go, take_up = self._turn_drafters()
        plan = StepPlan(
            entries, self._starts, self._frees, self._parks, self._saves, let_go, take_up, n_steps
        )
        self._starts, self._frees, self._parks, self._saves = [], [], [], []
        return plan

    def _turn_drafters(self) -> tuple[list[int], list[int]]:
        """Returns the slots whose drafter is fed no more, and those for which it is fed again."""
        policy, running = self._policy, self._running
        turned = [running[start.seq_id] for start in self._starts]  # whatever they come from
        if policy.n_turns != self._n_turns:
            self._n_turns = policy.n_turns
            turned = list(running.values())
        let_go: list[int] = []
        take_up: list[int] = []
        for sequence, is_wanted in zip(turned, self._wanted(turned), strict=True):
            (take_up if is_wanted else let_go).append(sequence.seq_id)
            if not is_wanted:
                sequence.is_draft_cold = True
        return let_go, take_up

    def _choose_drafts(self, decodes: list[Sequence], n_room: int, n_prefill: int) -> list[int]:
        """Returns K for each sequence that generates."""
        policy, limits = self._policy, self._limits

        def choose() -> list[int]:
            self._has_choice = True
            drafts = policy.choose_all(decodes, limits, n_room, n_prefill)
            self._check_drafts(decodes, drafts, n_room)
            return drafts

        return self._guard.ask(
            "policy", choose, lambda: self._fixed.choose_all(decodes, limits, n_room, n_prefill)
        )

    def _check_drafts(self, decodes: list[Sequence], drafts: list[int], n_room: int) -> None:
        """Raises ValueError where the engine could not carry drafts of these lengths."""
        limits = self._limits
        is_possible = len(drafts) == len(decodes) and sum(drafts) <= n_room
        if is_possible and any(drafts):
            n_most, n_ctx_seq = limits.n_draft_max, limits.n_ctx_seq
            for sequence, n in zip(decodes, drafts, strict=True):
                is_possible &= 0 <= n <= n_most and sequence.n_computed + n < n_ctx_seq
        if not is_possible:
            raise ValueError(f"drafts {drafts} for {len(decodes)} sequences, room for {n_room}")

    def _wanted(self, sequences: Collection[Sequence]) -> list[bool]:
        """Returns for each sequence whether its drafter is fed."""
        return self._guard.ask(
            "policy",
            lambda: list(map(self._policy.wants, sequences)),
            lambda: list(map(self._fixed.wants, sequences)),
        )

    def _is_any_wanted(self) -> bool:
        running = self._running.values()
        return self._guard.ask(
            "policy",
            lambda: any(map(self._policy.wants, running)),
            lambda: any(map(self._fixed.wants, running)),
        )

    def _n_steps_run(self, decodes: list[Sequence], n_steps_free: int) -> int:
        """Returns how many steps the engine may run in a row."""

        def count() -> int:
            n_steps = self._runs.n_steps(decodes, self._stall_s, n_steps_free)
            if not 1 <= n_steps <= n_steps_free:
                raise ValueError(f"a run of {n_steps} steps, cells for {n_steps_free}")
            return n_steps

        return self._guard.ask("pacing", count, lambda: 1)

    def _predict(self, shape: StepShape) -> float:
        """Returns the seconds that a step is predicted to take, > 0; infinity if nobody knows."""
        cost = self._cost
        assert cost is not None, "asked by the caller"

        def predict() -> float:
            seconds = cost.predict(shape)
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step was predicted to take {seconds} s")
            return seconds

        return self._guard.ask("cost", predict, lambda: math.inf)

    def _reset_cost(self) -> None:
        if self._cost is not None:
            self._cost.reset()

    def _reset_policy(self) -> None:
        """Resets the policy and the cost model that it asks: which of the two was wrong is open."""
        self._has_choice = False
        self._policy.reset()
        self._reset_cost()
        for sequence in self.sequences():
            sequence.draft_memory = None

    def _reset_ngrams(self) -> None:
        if self._ngrams is not None:
            self._ngrams.reset()
        for sequence in self.sequences():
            sequence.ngram_memory = None

    def _reset_pacing(self) -> None:
        self._pacer.reset()

    def _n_cells_running(self) -> int:
        return sum([sequence.n_computed for sequence in self._running.values()])

    def _n_cells_free(self) -> int:
        """Returns the cells that the step may fill; those of retained slots are given up for it."""
        if not self._ledger.is_shared:
            return self._limits.n_ctx  # every slot has its own
        # Who is alone may try for all: nothing else could be given up for it.
        n_cells = self._ledger.n_cells if len(self._running) > 1 else self._limits.n_ctx
        return n_cells - self._n_cells_running()

    def _make_room(self) -> None:
        """Parks sequences until each that generates finds a cell for its next token.

        Where nothing generates, until one prompt can go on.
        """
        running, n_cells = self._running, self._ledger.n_cells
        n_used = self._n_cells_running()
        while len(running) > 1:
            n_wanted = sum(map(_is_generating, running.values())) or 1
            if n_used + n_wanted <= n_cells:
                break
            victim = self._choose_victim()
            n_used -= victim.n_computed
            self._park(victim)
        if not self._waiting:
            return  # nobody asks how much is left
        self._n_reserved = 0
        for sequence in running.values():
            sequence.n_reserved = self._ledger.need(sequence)
            self._n_reserved += sequence.n_reserved

    def _choose_victim(self) -> Sequence:
        """Returns the youngest of the least important of the tenant that holds most cells.

        Priority is a tenant's own business: it must not push out others.
        """
        held: dict[str, int] = {}
        for sequence in self._running.values():
            held[sequence.tenant] = held.get(sequence.tenant, 0) + sequence.n_computed
        tenant = max(held, key=held.__getitem__)
        return max((s for s in self._running.values() if s.tenant == tenant), key=rank)

    def _park(self, sequence: Sequence) -> None:
        """Takes a sequence's slot away; `commit` lets it wait for another."""
        seq_id, n_computed = sequence.seq_id, sequence.n_computed
        recompute_s = self._recompute_s(n_computed)
        is_drawn = sequence.sampling.temperature > 0 and sequence.n_steps > 0
        if self._lot.is_worth_saving(n_computed, recompute_s, is_drawn=is_drawn):
            self._saves.append(seq_id)
        self._parks.append(seq_id)
        self._parking[seq_id] = sequence
        self._release(sequence)
        self._empty_slot(seq_id)
        sequence.seq_id = -1
        sequence.is_parked = True
        sequence.parked_at = self._now
        sequence.n_parks += 1
        sequence.n_no_room = 0
        self._lot.n_preempted += 1

    def _recompute_s(self, n_tokens: int) -> float | None:
        """Returns the seconds of computing so many tokens; None if that is unknown."""
        if self._cost is None or not self._cost.n_observed:
            return None
        cost, n_batch = self._cost, self._limits.n_batch

        def recompute() -> float | None:
            seconds = cost.recompute_s(n_tokens, n_batch)
            if not is_duration(seconds):
                raise ValueError(f"{n_tokens} tokens were predicted to take {seconds} s")
            return seconds

        return self._guard.ask("cost", recompute, lambda: None)

    def _fill_slots(self) -> None:
        """Gives free slots to those who wait, as far as they are likely to find cells.

        Nobody overtakes.
        """
        ledger = self._ledger
        while (sequence := self._waiting.peek()) is not None:
            victim = None
            if not (self._free_slots or self._retained):
                victim = self._victim_for(sequence)
                if victim is None:
                    return
            n_cells = ledger.need(sequence)
            n_reserved = self._n_reserved - (victim.n_reserved if victim else 0)
            is_alone = len(self._running) == (victim is not None)
            if ledger.is_shared and not is_alone and n_reserved + n_cells > ledger.n_cells:
                return
            if victim is not None:
                self._park(victim)
            self._waiting.pop()
            self._n_reserved += n_cells
            sequence.n_reserved = n_cells
            self._start(sequence)

    def _victim_for(self, sequence: Sequence) -> Sequence | None:
        """Returns who has to leave its slot to a sequence: one of the same tenant, less important.

        Not one that another start of this plan needs in its place.
        """
        needed = {start.source for start in self._starts} | {s.seq_id for s in self._starts}
        candidates = (
            other
            for other in self._running.values()
            if other.priority < sequence.priority
            and other.tenant == sequence.tenant
            and other.seq_id not in needed
        )
        return max(candidates, key=rank, default=None)

    def _start(self, sequence: Sequence) -> None:
        """Gives a sequence its slot, with as much of its tokens as is computed somewhere."""
        snapshot, match, source = self._lot.take(sequence), None, None
        sequence.n_cut_min = 0
        if snapshot is None:
            sequence.is_draft_cold = False
            match = self._find_prefix(sequence)
        elif self._prefixes is not None:
            sequence.n_cut_min = self._prefixes.n_cut_min_of_snapshot(sequence.n_computed)
        seq_id, match = self._place(match)
        self._take_slot(seq_id, match)
        if match is not None:
            prefix = match.prefix
            sequence.n_computed = match.n_tokens
            sequence.n_cut_min = prefix.n_cut_min
            snapshot = prefix.snapshot or None
            source = prefix.seq_id if prefix.tier is not Tier.HOST else None
        sequence.seq_id = seq_id
        self._running[seq_id] = sequence
        start = Start(
            seq_id,
            sequence.sampler,
            n_kept=sequence.n_computed,
            source=source if source != seq_id else None,
            snapshot=snapshot,
            is_resumed=sequence.is_parked,
        )
        self._starts.append(start)
        if sequence.is_parked:
            sequence.is_parked = False
            sequence.parked_s += self._now - sequence.parked_at
            self._lot.n_resumed += 1
        else:
            sequence.slot_at = self._now
            sequence.n_reused = sequence.n_computed
            if match is not None:
                self._hits.append(sequence)

    def _find_prefix(self, sequence: Sequence) -> Match | None:
        """Returns the prefix that a sequence could go on from."""
        if self._prefixes is None:
            return None
        match = self._prefixes.find(sequence.tenant, sequence.tokens)
        if not sequence.is_parked:
            self._prefixes.count(sequence.n_prompt, match)
        return match

    def _place(self, match: Match | None) -> tuple[int, Match | None]:
        """Returns the slot to take, and the prefix to go on from there.

        Sequences whose ids follow one another are computed together; each gap between them costs
        another physical batch in every step, which reads all weights again. So a prefix is used
        where it is only if that is as good a place as any; otherwise it is copied.
        """
        best = self._choose_slot()
        if match is None or match.prefix.tier is Tier.HOST:
            return best, match
        assert self._prefixes is not None, "it has found the prefix"
        held = match.prefix.seq_id
        if match.prefix.tier is Tier.RETAINED:
            can_move = self._prefixes.can_cut and not self._ledger.is_shared
            if not can_move or self._n_neighbours(held) >= self._n_neighbours(best):
                return held, match
        if not self._ledger.is_shared and match.n_tokens * _COPY_SHARE < self._limits.n_ctx_seq:
            return best, None
        return best, match

    def _n_neighbours(self, seq_id: int) -> int:
        """Returns how many of the slots next to one are running."""
        running = self._running
        return (seq_id - 1 in running) + (seq_id + 1 in running)

    def _choose_slot(self) -> int:
        """Returns the slot to take if any will do; it is free, or retained.

        Of several as good the lowest free one, or the one that was not used for longest.
        """
        if self._free_slots:
            if not self._retained:
                return self._free_slots[0]  # as the running ones are the lowest, too
            return max(sorted(self._free_slots), key=self._n_neighbours)
        return self._choose_retained()

    def _choose_retained(self) -> int:
        """Returns the retained slot to give up: beside running ones, not used for longest."""
        assert self._prefixes is not None, "it has noted what is retained"
        oldest_first = (prefix.seq_id for prefix in self._prefixes.retained())
        if self._ledger.is_shared:
            return next(oldest_first)
        return max(oldest_first, key=self._n_neighbours)

    def _take_slot(self, seq_id: int, match: Match | None) -> None:
        """Takes a free slot, or a retained one, whose tokens are lost unless they are the match."""
        if seq_id not in self._retained:
            self._free_slots.remove(seq_id)
            heapify(self._free_slots)
        elif match is not None and match.prefix.seq_id == seq_id:
            assert self._prefixes is not None, "it has found the prefix"
            self._prefixes.drop(seq_id)
            self._n_retained_cells -= self._retained.pop(seq_id)
        else:
            self._evict(seq_id)

    def _evict(self, seq_id: int) -> int:
        """Gives up a retained slot, whose tokens may move to host memory; returns its cells."""
        assert self._prefixes is not None, "it has noted what is retained"
        prefix = self._prefixes.evict(seq_id)
        if self._is_worth_storing(prefix):
            self._saves.append(seq_id)
            self._storing[seq_id] = prefix
        n_cells = self._retained.pop(seq_id)
        self._n_retained_cells -= n_cells
        return n_cells

    def _is_worth_storing(self, prefix: Prefix, n_reused: int = 0) -> bool:
        """Returns whether to write a prefix to host memory.

        What is written must not hold up running streams for longer than a step of theirs takes.
        """
        assert self._prefixes is not None, "it has made the prefix"
        n_tokens = len(prefix.tokens)
        n_bytes = self._snapshots.n_bytes(n_tokens)
        is_cheap = self._is_snapshot_cheap(n_tokens, n_reused)
        return is_cheap and self._prefixes.is_worth_storing(prefix, n_bytes)

    def _is_snapshot_cheap(self, n_tokens: int, n_reused: int = 0) -> bool:
        """Returns whether a snapshot of a prefix promises to save more time than it costs.

        Args:
            n_tokens: Tokens that it would hold.
            n_reused: Of these, tokens that another prefix holds.
        """
        assert self._prefixes is not None, "asked for a prefix"
        snapshots = self._snapshots
        n_storing = sum(len(prefix.tokens) for prefix in self._storing.values())
        is_anybody_held_up = any(map(_is_generating, self._running.values()))
        if is_anybody_held_up and snapshots.write_s(n_storing + n_tokens) > self._stall_s:
            return False
        recompute_s = self._recompute_s(n_tokens - n_reused)
        if recompute_s is None:
            return True
        return snapshots.total_s(n_tokens) < self._prefixes.host_hit_rate * recompute_s

    def _save_borders(self) -> None:
        """Takes checkpoints of prompts, for the next turns of their conversations."""
        assert self._prefixes is not None, "there are no borders without"
        borders, self._borders = self._borders, []
        for sequence in borders:
            n_tokens = sequence.n_computed
            is_running = self._running.get(sequence.seq_id) is sequence
            if not is_running or n_tokens != self._border(sequence):
                continue  # it has ended, or was parked
            prefix = self._prefixes.make(
                sequence.seq_id, sequence.tenant, sequence.tokens[:n_tokens]
            )
            if self._is_worth_storing(prefix, sequence.n_reused):
                self._saves.append(sequence.seq_id)
                self._storing[sequence.seq_id] = prefix

    def _evict_for(self, n_wanted: int) -> None:
        """Gives up retained slots until the step finds its cells."""
        n_free = self._ledger.n_cells - self.n_cells_held
        while self._retained and n_free < n_wanted:
            seq_id = self._choose_retained()
            n_free += self._evict(seq_id)
            self._frees.append(seq_id)
            heappush(self._free_slots, seq_id)

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that generate and those with tokens to compute first."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running.values():
            # As in `_is_generating`; written out, because this runs once per sequence and step.
            n_target = len(sequence.tokens)
            if sequence.n_computed == n_target - 1 and n_target > sequence.n_prompt:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
        return decodes, prefills

    def _draft_room(
        self, decodes: list[Sequence], prefills: list[Sequence], n_free: int
    ) -> tuple[int, int]:
        """Returns the most draft tokens of all together, and the prompt tokens beside them."""
        limits = self._limits
        n_used = len(decodes) + len(prefills)
        n_left = min(min(limits.n_batch, limits.n_outputs_max) - n_used, n_free)
        n_floor = 0
        if prefills:
            n_pending = sum(sequence.n_pending for sequence in prefills)
            n_floor = min(n_pending, limits.n_batch // _PREFILL_FLOOR_SHARE)
            n_left = min(n_left, limits.n_batch - len(decodes) - n_floor)
        return max(0, n_left), n_floor

    def _quote(
        self, ngrams: NgramDrafter, decodes: list[Sequence], drafts: list[int], n_room: int
    ) -> list[PlanEntry]:
        """Returns the entries with drafts out of what was said before, where they pay."""
        seconds = None
        if self._cost is not None and self._cost.n_observed:
            seconds = self._predict_decode

        def quote() -> list[PlanEntry]:
            entries = _decode_entries(decodes, drafts)
            entries = ngrams.fill(decodes, entries, self._limits, n_room, seconds)
            self._check_drafts(decodes, [entry.n_draft for entry in entries], n_room)
            _check_given(decodes, entries)
            return entries

        return self._guard.ask("n-grams", quote, lambda: _decode_entries(decodes, drafts))

    def _predict_decode(self, entries: list[PlanEntry]) -> float:
        return self._predict(self._decode_shape(entries))

    def _pace(self, entries: list[PlanEntry], prefills: list[Sequence], n_left: int) -> int:
        """Returns how many prompt tokens fit beside running streams, so that their gap holds."""
        cost = self._cost
        assert cost is not None, "asked by the caller"
        shape = self._decode_shape(entries)
        decode_s = self._predict(shape)
        n_past = max(sequence.n_computed for sequence in prefills)

        def step_s() -> float:
            seconds = self._pacer.step_s(decode_s)
            if not 0 < seconds < math.inf:
                raise ValueError(f"a step may take {seconds} s")
            return seconds

        def fit() -> int:
            n_tokens = cost.fit_prefill(shape, seconds, n_past, n_left)
            if not 0 <= n_tokens <= n_left:
                raise ValueError(f"{n_tokens} tokens fit into a step, of {n_left}")
            return n_tokens

        n_tokens = 0
        if decode_s < math.inf:
            seconds = self._guard.ask("pacing", step_s, lambda: 0.0)
            n_tokens = self._guard.ask("cost", fit, lambda: 0)
        n_least = max(1, self._limits.n_batch // _PREFILL_MIN_SHARE)
        return min(n_left, max(n_tokens, n_least))

    def _decode_shape(self, entries: list[PlanEntry]) -> StepShape:
        """Returns the shape of a step that has these last tokens and drafts, and no more."""
        parts = sorted([(entry.seq_id, 1 + entry.n_verified) for entry in entries])
        lengths = [length for _, length in parts]
        n_tokens = sum(lengths)
        drafts = [entry.n_draft for entry in entries if not entry.given]
        return StepShape(
            n_decodes=len(entries),
            n_depth=max(drafts, default=0),
            n_draft=sum(drafts),
            n_tokens=n_tokens,
            n_outputs=n_tokens,
            n_ubatches=count_ubatches(
                [seq_id for seq_id, _ in parts], lengths, self._splitting, self._limits.n_ubatch
            ),
            n_pairs=sum([(1 + entry.n_verified) * entry.n_past for entry in entries]),
            is_fed=self._is_fed,
        )

    def _share_prefill(
        self, prefills: list[Sequence], n_left: int, n_most: int, n_lead: int | None
    ) -> Iterator[PlanEntry]:
        """Yields pieces of prompts until the budget is used up.

        Args:
            prefills: Those with tokens to compute.
            n_left: Tokens to share.
            n_most: Tokens that the step has room for: a piece may need more.
            n_lead: Tokens of a piece that are computed with running streams'; None: nothing runs,
                or nothing is known of what a piece takes.
        """
        wanted = {sequence: self._n_prefill(sequence) for sequence in prefills}
        n_given = 0
        for sequence, n_share in self._turns.share(wanted.items(), n_left):
            n_tokens = n_share
            if n_lead is not None:
                n_wanted, n_past = wanted[sequence], sequence.n_computed
                n_tokens = self._align(n_share, n_wanted, n_past, n_lead)
                n_tokens = min(n_tokens, n_wanted, n_most - n_given)
                if n_tokens <= 0 or (n_given and n_given + n_tokens > n_left):
                    continue  # its piece waits for a step of its own
            n_given += n_tokens
            start = sequence.n_computed
            piece = sequence.tokens[start : start + n_tokens]
            # A resumed sequence knows what comes after its last token but one.
            is_output = n_tokens == sequence.n_pending
            yield PlanEntry(sequence.seq_id, start, piece, 0, is_output)

    def _align(self, n_tokens: int, n_wanted: int, n_past: int, n_lead: int) -> int:
        """Returns the tokens of a piece that attention computes together."""

        def align() -> int:
            n_aligned = self._pacer.align(n_tokens, n_wanted, n_past, n_lead)
            if not 0 <= n_aligned <= n_wanted:
                raise ValueError(f"a piece of {n_aligned} tokens, of {n_wanted}")
            return n_aligned

        return self._guard.ask("pacing", align, lambda: n_tokens)

    def _n_prefill(self, sequence: Sequence) -> int:
        """Returns the tokens to compute next before a sequence generates.

        The prompt, up to where a checkpoint is to be taken; or, where the sequence was parked, all
        but the last token: that one goes on as if nothing had happened, with a draft.
        """
        n_pending = sequence.n_pending
        if sequence.n_steps:
            return n_pending - 1
        border = self._border(sequence)
        if border <= sequence.n_computed or not self._has_borders:
            return n_pending
        is_cheap = self._is_snapshot_cheap(border, sequence.n_reused)
        return border - sequence.n_computed if is_cheap else n_pending

    def _border(self, sequence: Sequence) -> int:
        """Returns how much of a prompt a checkpoint holds; 0 where it would save too little."""
        n_tokens = sequence.n_prompt - _N_BEFORE_END
        n_least = max(self._n_checkpoint_min, BLOCK_SIZE)  # less cannot be found
        return n_tokens if n_tokens - sequence.n_reused >= n_least else 0

    @property
    def _has_borders(self) -> bool:
        """Whether checkpoints of prompts are taken: what cannot be cut is good only as a whole."""
        prefixes = self._prefixes
        return prefixes is not None and prefixes.has_host and not prefixes.can_cut_host

    def commit(self, result: StepResult, now: float) -> list[tuple[Sequence, Event]]:
        """Takes the engine's answer to the last plan.

        Args:
            result: One entry per plan entry.
            now: Monotonic time in seconds.

        Returns:
            New tokens, progress and ends, in the plan's order.
        """
        self._now = now
        events: list[tuple[Sequence, Event]] = []
        running = self._running
        result = _with_checked_timings(result)
        self._streams_s = 0.0
        if self._cost is not None and self._entries:
            self._learn(result, now - self._planned_at)
        self._n_planned += (result.n_steps - 1) * self._n_decodes
        if result.n_kept:
            self._take_refusals(result)
        if self._hits:
            self._count_hits()
        self._teach_ngrams(result)
        ok, no_room = SequenceStatus.OK, SequenceStatus.NO_ROOM
        for entry in result.entries:
            sequence, status = running[entry.seq_id], entry.status
            if status is ok:
                self._advance(sequence, entry, events)
            elif status is not no_room:
                self._lose(sequence, entry, events)
            else:
                self._retry(sequence, events)
        self._teach_policy(result)
        if self._parking:
            self._take_parked(result, events)
        if self._storing:
            self._store(result)
        return events

    def _learn(self, result: StepResult, step_s: float) -> None:
        """Compares what the step took with what it should have taken."""
        statuses = [entry.status for entry in result.entries]
        if result.n_kept or statuses.count(SequenceStatus.OK) < len(statuses):
            return
        if not is_duration(step_s):
            step_s = 0.0  # the clock has jumped
        timings = result.timings
        if len(self._entries) == self._n_decodes and not self._has_moves:
            self._streams_s = step_s
        if result.n_steps > 1:
            step_s, timings = step_s / result.n_steps, _of_one_step(result)
        self._guard.tell("cost", lambda: self._learn_cost(result, timings, step_s))
        if self._n_decodes and not self._has_moves and step_s > 0:
            self._stall_s = step_s

    def _learn_cost(self, result: StepResult, timings: StepTimings, step_s: float) -> None:
        cost, entries, n_ubatch = self._cost, self._entries, self._limits.n_ubatch
        assert cost is not None, "asked by the caller"
        shape = shape_of(entries, result.entries, self._splitting, n_ubatch, is_fed=self._is_fed)
        if cost.n_observed and self._n_decodes and not self._has_moves and step_s > 0:
            has_prefill = len(entries) > self._n_decodes
            predicted_s = self._predict(shape)
            if predicted_s < math.inf:
                self._guard.tell(
                    "pacing",
                    lambda: self._pacer.observe(predicted_s, step_s, has_prefill=has_prefill),
                )
                if has_prefill:
                    decode_s = self._predict(self._decode_shape(entries[: self._n_decodes]))
                    self._streams_s = step_s * min(1.0, decode_s / predicted_s)
        cost.observe(shape, timings, 0.0 if self._has_moves else step_s)

    def _teach_policy(self, result: StepResult) -> None:
        """Lets the policy learn what became of the drafts that it has chosen."""
        if self._has_choice:
            drafted = _as_drafted(result) if self._ngrams is not None else result
            self._guard.tell("policy", lambda: self._policy.observe(drafted, self._streams_s))

    def _teach_ngrams(self, result: StepResult) -> None:
        """Lets the n-grams learn what became of their proposals."""
        ngrams, running, ok = self._ngrams, self._running, SequenceStatus.OK
        if ngrams is None:
            return

        def teach() -> None:
            for entry in result.entries:
                if entry.status is ok and entry.tokens:
                    ngrams.observe(running[entry.seq_id], entry)

        self._guard.tell("n-grams", teach)

    def _count_hits(self) -> None:
        """Counts the starts that have kept the prefix that was found for them."""
        assert self._prefixes is not None, "it has found the prefixes"
        hits, self._hits = self._hits, []
        for sequence in hits:
            if sequence.n_reused:
                self._prefixes.count_hit(sequence.n_reused)

    def _take_refusals(self, result: StepResult) -> None:
        """Notes which starts kept less than they were to."""
        for seq_id, n_kept in result.n_kept.items():
            sequence = self._running[seq_id]
            if sequence.n_steps or sequence.n_parks:
                self._lot.n_recomputed += sequence.n_computed - n_kept
            else:
                sequence.n_reused = n_kept
            # The plan may have had no entry for it: no budget was left.
            sequence.n_computed = n_kept
            sequence.n_cut_min = 0

    def _advance(
        self, sequence: Sequence, entry: ResultEntry, events: list[tuple[Sequence, Event]]
    ) -> None:
        """Moves a sequence on by one successful step."""
        sequence.n_computed = entry.n_past
        sequence.n_no_room = 0
        sequence.is_draft_cold = entry.is_draft_cold
        if sequence.n_steps == 0:
            self._note_prefill(sequence, events)
        if not entry.tokens:
            return
        event, reason = sequence.extend(entry, self._now)
        events.append((sequence, event))
        if reason is not None:
            events.append((sequence, self._end(sequence, reason)))
        elif sequence.n_computed != len(sequence.tokens) - 1:
            events.append((sequence, self._fail(sequence, "BAD_RESULT")))

    def _lose(
        self, sequence: Sequence, entry: ResultEntry, events: list[tuple[Sequence, Event]]
    ) -> None:
        """Ends a sequence whose step failed, after what the steps before it in a run yielded."""
        if entry.tokens:
            events.append((sequence, sequence.extend(entry, self._now)[0]))
        events.append((sequence, self._fail(sequence, entry.status.value)))

    def _note_prefill(self, sequence: Sequence, events: list[tuple[Sequence, Event]]) -> None:
        """Tells how far the prompt is, to those who want to know."""
        n_computed, n_prompt = sequence.n_computed, sequence.n_prompt
        if n_computed == n_prompt and self._prefixes is not None and self._prefixes.can_cut:
            self._prefixes.hold(
                sequence.seq_id,
                sequence.tenant,
                sequence.tokens,
                is_running=True,
                n_cut_min=sequence.n_cut_min,
            )
        if self._has_borders and n_computed == self._border(sequence):
            self._borders.append(sequence)
        if sequence.has_progress and n_computed > sequence.n_progress:
            sequence.n_progress = n_computed
            events.append((sequence, ProgressEvent(n_computed, n_prompt)))

    def _retry(self, sequence: Sequence, events: list[tuple[Sequence, Event]]) -> None:
        """Lets a sequence that found no cell try again.

        Without a draft at first, then with somebody parked; only one that is alone is given up.
        """
        sequence.n_no_room += 1
        is_alone = len(self._running) == 1 and not self._retained
        if self._ledger.is_shared and not is_alone:
            if sequence.n_no_room >= _N_NO_ROOM_PARK:
                self._ledger.shrink(self.n_cells_held)
                sequence.n_no_room = _N_NO_ROOM_PARK
        elif sequence.n_no_room >= N_NO_ROOM_MAX:
            events.append((sequence, self._fail(sequence, SequenceStatus.NO_ROOM.value)))

    def _take_parked(self, result: StepResult, events: list[tuple[Sequence, Event]]) -> None:
        """Lets the sequences that the plan has parked wait for a slot."""
        parking, self._parking = self._parking, {}
        for seq_id, sequence in parking.items():
            sequence.sampler = result.samplers.get(seq_id)
            self._lot.put(sequence, result.snapshots.get(seq_id))
            self._waiting.push(sequence)
            if sequence.sampler is None and sequence.snapshot is None:
                events.append((sequence, self._fail(sequence, "PARK_FAILED")))

    def _store(self, result: StepResult) -> None:
        """Moves prefixes that had to leave their slots to host memory."""
        assert self._prefixes is not None, "it has given them up"
        storing, self._storing = self._storing, {}
        for seq_id, prefix in storing.items():
            snapshot = result.snapshots.get(seq_id)
            if snapshot is not None:
                self._snapshots.observe(len(prefix.tokens), len(snapshot))
                self._prefixes.store(prefix.tenant, prefix.tokens, snapshot)

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
        given_back = [seq_id for seq_id in (*plan.frees, *plan.parks) if seq_id not in seq_ids]
        # What the engine still holds of ended sequences, nobody can tell.
        given_back += self._forget_retained()
        self._frees += given_back
        lost = [self._running[seq_id] for seq_id in seq_ids]
        parking, self._parking = self._parking, {}
        self._storing.clear()
        self._hits.clear()
        for sequence in parking.values():
            self._waiting.push(sequence)  # where `_end` finds it
        return [(sequence, self._fail(sequence, status)) for sequence in (*lost, *parking.values())]

    def _forget_retained(self) -> list[int]:
        """Gives up all retained slots, and returns them."""
        seq_ids = list(self._retained)
        for seq_id in seq_ids:
            assert self._prefixes is not None, "it has noted what is retained"
            self._prefixes.drop(seq_id)
            heappush(self._free_slots, seq_id)
        self._retained.clear()
        self._n_retained_cells = 0
        return seq_ids

    def _fail(self, sequence: Sequence, status: str) -> Event:
        return self._end(sequence, EngineError(status, sequence.request_id))

    def _end(self, sequence: Sequence, end: _End) -> Event:
        """Gives back what a sequence holds, and returns its terminal event."""
        seq_id = sequence.seq_id
        if seq_id >= 0:
            self._release(sequence)
            self._ledger.restore()
            if not (isinstance(end, FinishReason) and self._retain(sequence)):
                self._frees.append(seq_id)
                self._empty_slot(seq_id)
        else:
            self._waiting.remove(sequence)
            self._lot.take(sequence)
            if sequence.is_parked:
                sequence.parked_s += self._now - sequence.parked_at
        if (ngrams := self._ngrams) is not None:
            is_finished = end in _FINISHED
            self._guard.tell("n-grams", lambda: ngrams.forget(sequence, is_finished=is_finished))
        if isinstance(end, FinishReason):
            if sequence.n_steps:
                self._ledger.lengths.observe(sequence)
            return sequence.finish(end)
        return sequence.fail(end)

    def _release(self, sequence: Sequence) -> None:
        """Counts a sequence as running no more."""
        del self._running[sequence.seq_id]
        self._n_reserved -= sequence.n_reserved
        sequence.n_reserved = 0

    def _empty_slot(self, seq_id: int) -> None:
        """Notes that a slot is free."""
        heappush(self._free_slots, seq_id)
        if self._prefixes is not None:
            self._prefixes.drop(seq_id)

    def _retain(self, sequence: Sequence) -> bool:
        """Keeps an ended sequence's tokens in its slot, if they are worth it.

        Returns:
            Whether it does; then the slot is not free.
        """
        n_computed = sequence.n_computed
        # Dropped tokens after a stop are in the cells too, and nobody knows them any more.
        if self._prefixes is None or not BLOCK_SIZE <= n_computed <= len(sequence.tokens):
            return False
        tokens = sequence.tokens[:n_computed]
        self._prefixes.hold(
            sequence.seq_id,
            sequence.tenant,
            tokens,
            is_running=False,
            n_cut_min=sequence.n_cut_min,
        )
        self._retained[sequence.seq_id] = n_computed
        self._n_retained_cells += n_computed
        return True


def _decode_entries(decodes: list[Sequence], drafts: list[int]) -> list[PlanEntry]:
    """Returns the entries of sequences that generate, with drafts of these lengths."""
    return [
        PlanEntry(sequence.seq_id, sequence.n_computed, sequence.tokens[-1:], n_draft, True)
        for sequence, n_draft in zip(decodes, drafts, strict=True)
    ]


def _check_given(decodes: list[Sequence], entries: list[PlanEntry]) -> None:
    """Raises ValueError where entries are not these sequences', or give drafts that are none.

    The engine refuses the plan of all for one such entry.
    """
    for sequence, entry in zip(decodes, entries, strict=True):
        given = entry.given
        is_own = (
            entry.seq_id == sequence.seq_id
            and entry.n_past == sequence.n_computed
            and entry.tokens == sequence.tokens[-1:]
            and entry.is_output
        )
        if not is_own or len(given) > entry.n_draft or (given and min(given) < 0):
            raise ValueError(f"{entry} for {sequence.request_id}")


def _with_checked_timings(result: StepResult) -> StepResult:
    timings = checked(result.timings)
    return result if timings is result.timings else dataclasses.replace(result, timings=timings)


def _as_drafted(result: StepResult) -> StepResult:
    """Returns a result without the drafts that were given: they say nothing of the drafter."""
    drafted = [entry for entry in result.entries if not entry.is_given]
    return StepResult(drafted, timings=result.timings)


def _of_one_step(result: StepResult) -> StepTimings:
    """Returns the mean times of a run's steps."""
    n, timings = result.n_steps, result.timings
    return StepTimings(
        timings.draft_s / n,
        timings.decode_s / n,
        timings.process_s / n,
        timings.sample_s / n,
        timings.total_s / n,
    )


def _is_generating(sequence: Sequence) -> bool:
    """Returns whether all but the last token are computed, and that one is an output."""
    n_target = len(sequence.tokens)
    return sequence.n_computed == n_target - 1 and n_target > sequence.n_prompt
