"""Sequences that have to give their slot back, and resume later with not a token changed.

Which ones have to; what is kept of them, and where; what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.drafting.estimators import Estimators
from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.scheduling.slots import SlotTable
from drafthouse_server.scheduling.waiting import WaitingQueue
from drafthouse_server.step import SchedulerCounts, Snapshot, StepResult
from drafthouse_server.tenancy.fairness import Budget, Fairness, VirtualCounters

__all__ = ["Preemption", "SnapshotCost", "SwapSpace"]

_BYTES_PER_S = 1e9
"""Speed at which a snapshot is written, and read again: one core that copies and checks bytes.

Until some were timed.
"""

_BYTES_PER_S_BOUNDS = 1e7, 1e11
_TIMED_BYTES = 4 << 20
"""What moves fewer bytes says little of the speed."""
_TIME_SHARE = 0.25
"""Weight of the newest time in their mean."""

_RISE_MAX = 4.0
"""A machine that stands still for a moment says nothing: no time counts as more than so many times
what was predicted."""

_FIXED_S = 1e-3
"""Time of a snapshot besides its bytes, written and read."""

_COPIED_TOKENS = 256
"""Copying fewer from slot to slot says little of the speed."""


class SnapshotCost:
    """Predicts size and time of a snapshot from those that were written, and of copies of slots."""

    def __init__(self) -> None:
        # Tokens and bytes of the shortest and the longest one: states and tokens each take theirs.
        self._shortest = self._longest = 0, 0
        # Written and read: what is written goes to fresh memory, which takes several times as long.
        self._s_per_byte = [1 / _BYTES_PER_S, 1 / _BYTES_PER_S]
        self._copied_s: float | None = None  # per token
        self._first_copied_s: float | None = None  # of the first step, which alone is not believed

    def observe_time(
        self, n_written: int, n_read: int, seconds: float, *, n_copied: int = 0
    ) -> None:
        """Learns from a step how long snapshots and copies take.

        Args:
            n_written: Bytes of the snapshots that were written.
            n_read: Bytes of those that were read.
            seconds: Time of all that was moved.
            n_copied: Tokens that were copied from slot to slot.
        """
        if n_written + n_read == 0:
            self._observe_copy(n_copied, seconds)
            return
        seconds -= self.copy_s(n_copied)
        if n_written + n_read < _TIMED_BYTES or not seconds > 0:  # nor where it is no number
            return
        low, high = _BYTES_PER_S_BOUNDS
        predicted = [n * s for n, s in zip((n_written, n_read), self._s_per_byte, strict=True)]
        ratio = min(seconds / sum(predicted), _RISE_MAX)
        for i, before in enumerate(self._s_per_byte):
            # Who is most of it is most of the reason.
            weight = _TIME_SHARE * predicted[i] / sum(predicted)
            s_per_byte = min(max(ratio * before, 1 / high), 1 / low)
            self._s_per_byte[i] += weight * (s_per_byte - before)

    def copy_s(self, n_tokens: int) -> float:
        """Returns the seconds that copies from slot to slot take; 0 until two were seen."""
        return n_tokens * (self._copied_s or 0.0)

    def _observe_copy(self, n_tokens: int, seconds: float) -> None:
        """Learns from a step that took so long for copies alone."""
        if n_tokens < _COPIED_TOKENS or not 0 < seconds < math.inf:
            return
        token_s, before = seconds / n_tokens, self._copied_s
        if self._first_copied_s is None:
            self._first_copied_s = token_s
        elif before is None:
            self._copied_s = min(self._first_copied_s, token_s)
        else:
            self._copied_s = before + _TIME_SHARE * (min(token_s, _RISE_MAX * before) - before)

    def observe(self, n_tokens: int, n_bytes: int) -> None:
        """Learns from a snapshot of so many tokens, at least one."""
        seen = n_tokens, n_bytes
        self._longest = max(self._longest, seen)
        self._shortest = seen if not self._shortest[0] else min(self._shortest, seen)

    def n_bytes(self, n_tokens: int) -> float:
        """Returns the size of a snapshot; 0 until one was seen, rather too much until two were."""
        (n_short, n_least), (n_long, n_most) = self._shortest, self._longest
        if n_long == n_short:
            return n_most * max(1.0, n_tokens / n_short) if n_short else 0.0
        n_per_token = max(0.0, (n_most - n_least) / (n_long - n_short))
        return max(0.0, n_least + n_per_token * (n_tokens - n_short))

    def write_s(self, n_tokens: int) -> float:
        """Returns the seconds that writing it takes; nothing else goes on meanwhile."""
        return self.n_bytes(n_tokens) * self._s_per_byte[0] + _FIXED_S / 2

    def read_s(self, snapshot: Snapshot) -> float:
        """Returns the seconds that reading a snapshot takes; nothing else goes on meanwhile."""
        return len(snapshot) * self._s_per_byte[1] + _FIXED_S / 2

    def total_s(self, n_tokens: int) -> float:
        """Returns the seconds of writing it and reading it again."""
        return self.n_bytes(n_tokens) * sum(self._s_per_byte) + _FIXED_S


class SwapSpace:
    """Decides how sequences are preempted, and bounds the host memory that they take.

    A snapshot brings a sequence back bit by bit. Without one its tokens are computed again, in a
    batch of another width, which rounds differently: where two tokens tie, another may win.

    Args:
        n_bytes_max: Most bytes of snapshots; 0 is none.
        snapshots: Predicts what one costs; shared with what else writes snapshots.
    """

    def __init__(self, n_bytes_max: int, snapshots: SnapshotCost | None = None) -> None:
        self._n_bytes_max = n_bytes_max
        self._n_bytes = 0
        self._snapshots = snapshots or SnapshotCost()
        self.n_preempted = 0
        """Times that a sequence was preempted."""
        self.n_resumed = 0
        """Times that a sequence came back."""
        self.n_recomputed = 0
        """Tokens that had to be computed again for it."""

    def count(self, counts: SchedulerCounts) -> None:
        """Puts in what is counted here."""
        counts.n_preempted_bytes = self._n_bytes
        counts.n_preempted = self.n_preempted
        counts.n_resumed = self.n_resumed
        counts.n_recomputed = self.n_recomputed

    def is_worth_saving(
        self, n_computed: int, recompute_s: float | None, *, is_drawn: bool = False
    ) -> bool:
        """Returns whether to write a snapshot of a sequence that is about to be preempted.

        One that draws tokens at random is saved while there is room, whatever that costs: each of
        its draws falls near a border of two tokens now and then, and other roundings would move it
        across. A greedy one parts only where two tokens tie.

        Args:
            n_computed: Tokens that the snapshot would hold.
            recompute_s: Predicted seconds of computing them again; None if that is unknown.
            is_drawn: Whether the sequence has drawn tokens at random.
        """
        if not n_computed or not self._n_bytes_max:
            return False
        if self._n_bytes + self._snapshots.n_bytes(n_computed) > self._n_bytes_max:
            return False
        return is_drawn or recompute_s is None or self._snapshots.total_s(n_computed) < recompute_s

    def n_bytes_of(self, n_tokens: int) -> float:
        """Returns the predicted size of a snapshot of so many tokens; 0 until one was seen."""
        return self._snapshots.n_bytes(n_tokens)

    def write_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds that writing a snapshot of so many tokens takes."""
        return self._snapshots.write_s(n_tokens)

    def put(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        """Keeps a preempted sequence's snapshot, if there is one and room for it.

        Without one, nothing of it is computed any more.
        """
        if snapshot is not None:
            self._snapshots.observe(sequence.n_computed, len(snapshot))
            if self._n_bytes + len(snapshot) > self._n_bytes_max:
                snapshot = None
        if snapshot is None:
            self.n_recomputed += sequence.n_computed
            sequence.n_computed = 0
        else:
            self._n_bytes += len(snapshot)
        sequence.swap.snapshot = snapshot

    def take(self, sequence: Sequence) -> Snapshot | None:
        """Returns a sequence's snapshot, which is held no more."""
        swap = sequence.swap
        snapshot, swap.snapshot = swap.snapshot, None
        if snapshot is not None:
            self._n_bytes -= len(snapshot)
        return snapshot


class Preemption:
    """Takes slots away, and lets those that have lost theirs wait for others.

    From the tenants that were served most, for one that waits and was served less; from a tenant's
    least important sequences, for a more important one of its own; where shared cells run out,
    from the tenant that holds most of them.

    Args:
        slots: Which sequence runs where.
        ledger: How many cells there are.
        waiting: Takes those that have lost their slot.
        estimators: Predict what computing tokens again takes.
        swap: Keeps their snapshots.
        counters: Say which tenant was served most.
        fairness: How often a sequence may lose its slot, and what saving them may take.
    """

    def __init__(
        self,
        *,
        slots: SlotTable,
        ledger: CellLedger,
        waiting: WaitingQueue,
        estimators: Estimators,
        swap: SwapSpace,
        counters: VirtualCounters,
        fairness: Fairness,
    ) -> None:
        self._slots = slots
        self._ledger = ledger
        self._waiting = waiting
        self._estimators = estimators
        self._counters = counters
        self._interval_s = fairness.preempt_interval_s
        self._budget = Budget(fairness.save_bytes_per_s)
        self.swap = swap
        """Their snapshots, and counts."""

    def make_room(self, plan: PlanBuilder) -> None:
        """Preempts until each sequence that generates finds a cell for its next token.

        Where nothing generates, until one prompt can go on. Counts anew what all that still run
        are likely to need.
        """
        running, n_cells = self._slots.running, self._ledger.n_cells
        n_used = self._slots.n_cells_running()
        while len(running) > 1:
            n_wanted = sum([sequence.is_generating for sequence in running.values()]) or 1
            if n_used + n_wanted <= n_cells:
                break
            victim = self._choose_victim()
            n_used -= victim.n_computed
            self.preempt(victim, plan)
        if self._waiting:  # else it is not asked how much is left
            for sequence in running.values():
                self._ledger.reserve(sequence, self._ledger.need(sequence))

    def _choose_victim(self) -> Sequence:
        """Returns the last in rank of the tenant that holds most cells for its weight.

        Priority is a tenant's own business: it must not push out others.
        """
        held: dict[str, float] = {}
        for sequence in self._slots.running.values():
            tenant = sequence.request.tenant
            n_cells = sequence.n_computed / self._counters.weight(tenant)
            held[tenant] = held.get(tenant, 0.0) + n_cells
        tenant = max(held, key=held.__getitem__)
        running = self._slots.running.values()
        return max((s for s in running if s.request.tenant == tenant), key=_rank)

    def may_save(self, tenant: str, now: float) -> bool:
        """Returns whether a snapshot may be written so that a tenant gets a slot."""
        return self._budget.is_free(tenant, now)

    def victim_for(
        self, sequence: Sequence, plan: PlanBuilder, *, has_slot: bool
    ) -> Sequence | None:
        """Returns the one that has to leave its slot to the next sequence; None: none has to.

        One of the same tenant that is less important, where that is enough, or the youngest of a
        tenant that was served more. Not one that another start of this plan needs in its place, or
        that has got its slot by this plan: two tenants would take it from each other for ever. Nor
        one that has lost its slot shortly before; and none while snapshots have taken too much time
        already.

        Args:
            sequence: Goes next.
            plan: The plan under construction.
            has_slot: Whether there is a slot for it, and cells are what it lacks.
        """
        tenant, held = sequence.request.tenant, self._slots.held()
        if not self.may_save(tenant, plan.planned_at):
            return None
        if tenant in held and not has_slot:
            running = self._slots.running
            priority = sequence.request.priority
            less = (s for s in running.values() if s.request.priority < priority)
            enough = (s for s in less if self._ledger.has_cells(sequence, running, s))
            victim = self._last_of(tenant, enough, plan)
            if victim is not None and victim.rank > sequence.rank and self._is_quick(victim, held):
                return victim
        for other in self._counters.over_served(tenant, held, self._slots.n_slots):
            victim = self._last_of(other, self._slots.running.values(), plan)
            if victim is not None:
                return victim
        return None

    def _last_of(
        self, tenant: str, candidates: Iterable[Sequence], plan: PlanBuilder
    ) -> Sequence | None:
        """Returns the last in rank of a tenant's sequences that may lose their slots now."""
        needed, now = plan.needed, plan.planned_at
        mine = (
            sequence
            for sequence in candidates
            if sequence.request.tenant == tenant
            and sequence.seq_id not in needed
            and self._is_due(sequence, now)
        )
        return max(mine, key=_rank, default=None)

    def _is_due(self, sequence: Sequence, now: float) -> bool:
        """Returns whether a sequence may lose its slot, because it has not for some time."""
        swap = sequence.swap
        return not swap.n_preemptions or now - swap.preempted_at >= self._interval_s

    def _is_quick(self, victim: Sequence, held: dict[str, int]) -> bool:
        """Returns whether other tenants' streams hardly feel that a sequence is preempted."""
        if len(held) == 1 or not self._is_saved(victim):
            return True
        return self.swap.write_s(victim.n_computed) <= self._estimators.stall_s

    def _is_saved(self, sequence: Sequence) -> bool:
        """Returns whether a snapshot is worth writing if a sequence is preempted now."""
        n_computed = sequence.n_computed
        recompute_s = self._estimators.recompute_s(n_computed)
        is_drawn = sequence.request.sampling.temperature > 0 and sequence.tally.n_steps > 0
        return self.swap.is_worth_saving(n_computed, recompute_s, is_drawn=is_drawn)

    def recompute_s(self, n_tokens: int) -> float:
        """Returns the predicted seconds of computing so many tokens; 0 while nothing is known."""
        return self._estimators.recompute_s(n_tokens) or 0.0

    def is_longer_than_a_step(self, n_tokens: int) -> bool:
        """Returns whether so many tokens take longer than a step takes anyway, or is unknown."""
        recompute_s = self._estimators.recompute_s(n_tokens)
        return recompute_s is None or recompute_s >= self._estimators.predict(StepShape())

    def make_way(self, victim: Sequence, sequence: Sequence, plan: PlanBuilder) -> None:
        """Takes a victim's slot away for a sequence, whose tenant has to answer for what it costs.

        What is saved, or computed again, for a tenant's own priorities, it is charged for.
        """
        self._budget.spend(
            sequence.request.tenant, self.swap.n_bytes_of(victim.n_computed), plan.planned_at
        )
        if victim.request.tenant == sequence.request.tenant:
            self._counters.charge_prompt(victim.request.tenant, victim.n_computed)
        self.preempt(victim, plan)

    def preempt(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """Takes a sequence's slot away; once that is carried out, `take` lets it wait."""
        seq_id = sequence.seq_id
        lead = self._slots.leads.get(seq_id)
        if not lead and self._is_saved(sequence):
            plan.saves.append(seq_id)
            plan.moved_s += self.swap.write_s(sequence.n_computed)
        del self._slots.running[seq_id]
        self._ledger.release(sequence)
        self._slots.empty(seq_id)
        sequence.seq_id = -1
        if lead:  # the engine knows nothing of it
            self._counters.charge_prompt(sequence.request.tenant, -lead.n_rest(sequence))
            self._waiting.push(sequence)
            return
        plan.swap_outs.append(seq_id)
        plan.preempted[seq_id] = sequence
        sequence.swap.begin(plan.planned_at)
        sequence.n_no_room = 0
        self.swap.n_preempted += 1

    def take(self, plan: PlanBuilder, result: StepResult) -> list[Sequence]:
        """Lets the sequences that the plan has preempted wait for a slot.

        Returns:
            Those of which nothing is left to go on from.
        """
        lost = []
        for seq_id, sequence in plan.preempted.items():
            sequence.sampler = result.samplers.get(seq_id)
            self.swap.put(sequence, result.snapshots.get(seq_id))
            self._waiting.push(sequence)
            if sequence.sampler is None and sequence.swap.snapshot is None:
                lost.append(sequence)
        plan.preempted = {}
        return lost

    def note_resumed(self, sequence: Sequence, now: float) -> None:
        """Notes that a sequence has a slot again."""
        sequence.swap.end(now)
        self.swap.n_resumed += 1


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank
