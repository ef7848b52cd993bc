"""Gives waiting sequences their slots, with as much of their tokens as is computed somewhere."""

from __future__ import annotations

from hashlib import blake2b

from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.checkpoints import Checkpoints
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.preemption import Preemption
from drafthouse_server.scheduling.prefix_cache import Match, PrefixCache, Tier, tenant_of
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.scheduling.slots import LastSlot, SlotTable
from drafthouse_server.scheduling.waiting import WaitingQueue
from drafthouse_server.step import Start, StepResult
from drafthouse_server.tenancy.fairness import Budget, VirtualCounters

__all__ = ["Placement", "tag_of"]


def tag_of(tenant: str) -> int:
    """Returns the tag of a tenant's sequences in the engine: a digest of the name, never 0.

    The engine goes on from no tokens of another tag, whatever it is told to.
    """
    digest = blake2b(tenant.encode(), digest_size=8, person=b"tag").digest()
    return int.from_bytes(digest) or 1


_MOVED_SHARE = 0.25
"""Share of the time that a tenant's snapshots may take, written and read, beside others' streams:
what was reused costs it no service, and all wait for it."""

_SPEED_UP = 2.0
"""A prompt is computed so much faster than predicted at most, where a deadline depends on it."""


class Placement:
    """Decides which sequence gets a slot, which slot, and what it begins with.

    Args:
        waiting: Sequences without a slot.
        slots: Sequences with a slot.
        ledger: How many cells there are.
        prefixes: Finds what is computed already.
        checkpoints: Write to host memory what a slot has to give up, and know what that costs.
        preemption: Takes a slot away for a sequence that goes first.
        counters: Count what tenants are given.
    """

    def __init__(
        self,
        *,
        waiting: WaitingQueue,
        slots: SlotTable,
        ledger: CellLedger,
        prefixes: PrefixCache,
        checkpoints: Checkpoints,
        preemption: Preemption,
        counters: VirtualCounters,
    ) -> None:
        self._counters = counters
        self._waiting = waiting
        self._slots = slots
        self._ledger = ledger
        self._prefixes = prefixes
        self._checkpoints = checkpoints
        self._preemption = preemption
        self._last_slot = LastSlot(counters, slots.n_slots)
        self._moves = Budget(_MOVED_SHARE)

    def admit(self, plan: PlanBuilder) -> None:
        """Gives slots to waiting sequences, as far as they are likely to find cells.

        No sequence overtakes another; but one for whose tenant nothing may be saved or read now
        holds up no other tenant. Snapshots of many would hold up running streams for long, so they
        are spread over steps.
        """

        def may(tenant: str) -> bool:
            may_save = self._slots.has_room or self._preemption.may_save(tenant, plan.planned_at)
            return may_save and self._may_move(tenant, plan.planned_at)

        has_cells, running = self._ledger.has_cells, self._slots.running
        while (sequence := self._waiting.peek(may)) is not None:
            while not (
                (has_slot := self._has_slot(sequence, plan)) and has_cells(sequence, running)
            ):
                victim = self._preemption.victim_for(sequence, plan, has_slot=has_slot)
                if victim is None:
                    return
                self._preemption.make_way(victim, sequence, plan)
            self._waiting.pop(sequence)
            self._ledger.reserve(sequence, self._ledger.need(sequence))
            self._start(plan, sequence)
            if self._checkpoints.hold_up(plan):
                return

    def _may_move(self, tenant: str, now: float) -> bool:
        """Returns whether snapshots of a tenant may hold up the streams of others."""
        return self._moves.is_free(tenant, now) or not any(
            sequence.is_generating and sequence.request.tenant != tenant
            for sequence in self._slots.running.values()
        )

    def _has_slot(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        """Returns whether there is a slot for a sequence, without taking it from another."""
        slots, tenant = self._slots, sequence.request.tenant
        is_last = slots.n_slots - len(slots.running) == 1
        is_kept = is_last and self._last_slot.is_kept_from(tenant, slots.held(), plan.planned_at)
        return slots.has_room and not is_kept

    def least_s(self, sequence: Sequence, is_found: bool) -> float:
        """Returns the seconds that a sequence needs for its first token, rather too few.

        Alone, at twice the speed measured so far; 0 while nothing was.

        Args:
            sequence: It has no slot.
            is_found: Whether what is computed already counts: it is looked for.
        """
        n_tokens = sequence.n_pending
        if is_found:
            match = self._prefixes.find(sequence.request.owner, sequence.tokens)
            n_tokens -= match.n_tokens if match else 0
        return self._preemption.recompute_s(n_tokens) / _SPEED_UP

    def _start(self, plan: PlanBuilder, sequence: Sequence) -> None:
        """Gives a sequence its slot."""
        tenant, now = sequence.request.tenant, plan.planned_at
        snapshot, source = self._preemption.swap.take(sequence), None
        match = self._find_prefix(sequence) if snapshot is None else None
        sequence.n_cut_min = 0
        if snapshot is not None:
            sequence.n_cut_min = self._prefixes.n_cut_min_of_snapshot(sequence.n_computed)
        seq_id, match = self._slots.place(match)
        lost = self._slots.take(seq_id, match)
        if lost is not None:
            moved_s = plan.moved_s
            self._checkpoints.store(plan, seq_id, lost)
            self._moves.spend(tenant_of(lost.tenant), plan.moved_s - moved_s, now)
        if match is not None:
            prefix = match.prefix
            sequence.n_computed = match.n_tokens
            sequence.n_cut_min = prefix.n_cut_min
            snapshot = prefix.snapshot or None
            source = prefix.seq_id if prefix.tier is not Tier.HOST else None
        if snapshot is not None:
            read_s = self._checkpoints.read(plan, snapshot)
            if not sequence.swap.is_preempted:  # else another's request is the reason
                self._moves.spend(tenant, read_s, now)
        sequence.seq_id = seq_id
        self._last_slot.note_start(tenant, now)
        self._slots.running[seq_id] = sequence
        plan.starts.append(
            Start(
                seq_id,
                sequence.sampler,
                n_kept=sequence.n_computed,
                source=source if source != seq_id else None,
                snapshot=snapshot,
                is_resumed=sequence.swap.is_preempted,
                tag=tag_of(tenant),
            )
        )
        if sequence.swap.is_preempted:
            self._preemption.note_resumed(sequence, now)
        else:
            sequence.clock.slot_at = now
            sequence.n_reused = sequence.n_computed
            self._counters.charge_prompt(tenant, sequence.n_pending)
            if match is not None:
                plan.hits.append(sequence)

    def _find_prefix(self, sequence: Sequence) -> Match | None:
        """Returns the prefix that a sequence could go on from; what it drafted on is gone."""
        sequence.is_draft_cold = False
        request = sequence.request
        self._prefixes.set_weight(request.tenant, self._counters.weight(request.tenant))
        match = self._prefixes.find(request.owner, sequence.tokens)
        self._checkpoints.note_branch(sequence)
        if not sequence.swap.is_preempted:
            self._prefixes.count(sequence.n_prompt, match)
            is_hit = match is not None and match.prefix.tier is Tier.HOST
            self._checkpoints.hit_rates.count(request.tenant, is_hit=is_hit)
        return match

    def evict(self, plan: PlanBuilder) -> None:
        """Gives up retained slots until the step finds its cells."""
        slots = self._slots
        n_wanted = sum([len(entry.tokens) + entry.n_draft for entry in plan.entries])
        n_free = self._ledger.n_cells - slots.n_cells_held
        while slots.retained and n_free < n_wanted * plan.n_steps:
            seq_id, n_cells, prefix = slots.evict_next()
            self._checkpoints.store(plan, seq_id, prefix)
            plan.frees.append(seq_id)
            n_free += n_cells

    def forget_tenant(self, tenant: str) -> None:
        """Gives up what is kept of a tenant's ended sequences, in slots and in host memory."""
        self._slots.forget_tenant(tenant)
        self._prefixes.forget_tenant(tenant)
        self._checkpoints.hit_rates.forget(tenant)
        self._counters.forget(tenant)

    def note_end(self, sequence: Sequence, now: float) -> None:
        """Notes that a sequence has given its slot back."""
        self._last_slot.note_end(sequence.request.tenant, now)

    def take(self, plan: PlanBuilder, result: StepResult) -> None:
        """Notes which of the plan's starts kept less than they were to, and counts the others."""
        self._checkpoints.observe_time(plan, result)
        for seq_id, n_kept in result.n_kept.items():
            sequence = self._slots.running[seq_id]
            if sequence.tally.n_steps or sequence.swap.n_preemptions:
                self._preemption.swap.n_recomputed += sequence.n_computed - n_kept
            else:
                self._counters.charge_prompt(sequence.request.tenant, sequence.n_reused - n_kept)
                sequence.n_reused = n_kept
            # The plan may have had no entry for it: no budget was left.
            sequence.n_computed = n_kept
            sequence.n_cut_min = 0
        for sequence in plan.hits:
            if sequence.n_reused:
                self._prefixes.count_hit(sequence.n_reused)
