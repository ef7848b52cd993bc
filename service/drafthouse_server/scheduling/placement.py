"""Gives waiting sequences their slots, with as much of their tokens as is computed somewhere.

Prompts that come together often begin alike: with the same instructions, or examples. Then one of
them computes that, and the others wait for it, each with its slot (as SGLang and vLLM do).
"""

from __future__ import annotations

from hashlib import blake2b

from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.checkpoints import Checkpoints
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.preemption import Preemption
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    Match,
    PrefixCache,
    Tier,
    tenant_of,
)
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.scheduling.slots import LastSlot, Lead, SlotTable
from drafthouse_server.scheduling.waiting import WaitingQueue
from drafthouse_server.step import Snapshot, Start, StepResult
from drafthouse_server.tenancy.fairness import Budget, VirtualCounters

__all__ = ["Placement", "tag_of"]


def tag_of(tenant: str) -> int:
    """Returns the tag of a tenant's sequences in the engine: a digest of the name, never 0.

    The engine goes on from no tokens of another tag, whatever it is told to.
    """
    digest = blake2b(tenant.encode(), digest_size=8, person=b"tag").digest()
    return int.from_bytes(digest) or 1


_MOVED_SHARE = 0.25
"""Share of the time that a tenant's snapshots and copies may take beside others' streams: what was
reused costs it no service, and all wait for it."""

_N_LED_MIN = 64
"""Tokens that a sequence waits for at least, while another one computes them."""

_N_LOOKED_UP = 1 << 16
"""Tokens of prompts that begin in one step after they have waited: each is looked up once more."""

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
        counters.n_due = slots.n_due
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
        if not self._release(plan):
            return

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

    def _release(self, plan: PlanBuilder) -> bool:
        """Lets those begin that waited with a slot for tokens that are computed now.

        Where the one that was to compute them has lost its slot, the first of those that waited
        does it. One whose cells others have taken meanwhile gives its slot back.

        Returns:
            Whether all found their cells: else nobody else may get some.
        """
        slots, n_looked_up, is_room = self._slots, 0, True
        for seq_id in list(slots.leads):
            if seq_id not in slots.leads:
                continue
            other, _, n_computed = slots.leads[seq_id]
            is_running = slots.running.get(other.seq_id) is other
            is_early = is_running and (
                other.n_computed < n_computed or plan.starts_in(other.seq_id)
            )
            tenant = slots.running[seq_id].request.tenant
            if is_early or not self._may_move(tenant, plan.planned_at):
                continue
            if self._checkpoints.hold_up(plan) or n_looked_up > _N_LOOKED_UP:
                break
            first = seq_id if is_running else self._succeed(other)
            sequence, lead = slots.running[first], slots.leads[first]
            if not self._ledger.has_room(sequence.n_target, slots.running):
                self._preemption.preempt(sequence, plan)
                is_room = False
                continue
            del slots.running[first]
            n_looked_up += sequence.n_prompt
            # It is charged anew, for what it has to compute after all.
            self._counters.charge_prompt(tenant, -lead.n_rest(sequence))
            slots.empty(first)
            self._start(plan, sequence)
        return is_room

    def _succeed(self, gone: Sequence) -> int:
        """Has those that waited for one that is gone wait for the first of them.

        What each of them had in common with it any two of them have in common: nothing is compared
        anew, or each one that leaves would hold up the step for all that wait.

        Returns:
            The slot of the first one.
        """
        running, leads = self._slots.running, self._slots.leads
        waiting = [seq_id for seq_id, lead in leads.items() if lead.sequence is gone]
        first = min(waiting, key=lambda seq_id: running[seq_id].rank)
        for seq_id in waiting:
            n_alike = min(leads[first].n_usable, leads[seq_id].n_usable)
            lead = self._checkpoints.lead(running[first], n_alike) if seq_id != first else None
            if lead is not None:
                n_more = leads[seq_id].n_usable - lead.n_usable
                self._counters.charge_prompt(running[seq_id].request.tenant, n_more)
                leads[seq_id] = lead
        return first

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
        n_found = 0
        if is_found and self._prefixes.is_on:
            match = self._prefixes.find(sequence.request.owner, sequence.tokens, sequence.blocks)
            computed = [min(n, other.n_computed) for other, n in self._slots.alike(sequence)]
            n_found = max([match.n_tokens if match else 0, *computed])
        return self._preemption.recompute_s(sequence.n_pending - n_found) / _SPEED_UP

    def _start(self, plan: PlanBuilder, sequence: Sequence) -> None:
        """Gives a sequence its slot; the engine hears of it once there is nothing to wait for."""
        snapshot, match, lead = self._preemption.swap.take(sequence), None, None
        sequence.n_cut_min = 0
        if snapshot is not None:
            sequence.n_cut_min = self._prefixes.windows.n_cut_min_of_snapshot(sequence.n_computed)
        else:
            match, lead = self._find_prefix(plan, sequence)
        is_dear = self._checkpoints.is_copy_dear(match, sequence.n_output_max)
        seq_id, match = self._slots.place(None if lead else match, is_copy_dear=is_dear)
        has_lost = self._take(plan, seq_id, match, sequence.request.tenant)
        sequence.seq_id = seq_id
        self._slots.running[seq_id] = sequence
        self._last_slot.note_start(sequence.request.tenant, plan.planned_at)
        if lead is None:
            self._begin(plan, sequence, match, snapshot)
        else:
            self._slots.leads[seq_id] = lead
            plan.led.add(seq_id)
            self._counters.charge_prompt(sequence.request.tenant, lead.n_rest(sequence))
            if has_lost:
                # Slots are freed before others start: not one that another start copies from.
                is_source = plan.copies_from(seq_id)
                (self._slots.given_back if is_source else plan.frees).append(seq_id)

    def _take(self, plan: PlanBuilder, seq_id: int, match: Match | None, tenant: str) -> bool:
        """Takes a slot for a tenant.

        What is saved of another's is on nobody's account: neither can help it, and it takes less
        time than its owner was charged for.

        Returns:
            Whether it held what is no match, and is saved now, or lost.
        """
        lost = self._slots.take(seq_id, match)
        if lost is not None:
            moved_s = plan.moved_s
            self._checkpoints.store(plan, seq_id, lost)
            if tenant_of(lost.tenant) == tenant:
                self._moves.spend(tenant, plan.moved_s - moved_s, plan.planned_at)
        return lost is not None

    def _begin(
        self, plan: PlanBuilder, sequence: Sequence, match: Match | None, snapshot: Snapshot | None
    ) -> None:
        """Has the engine begin a sequence in its slot.

        Args:
            plan: Begins it.
            sequence: Has the slot.
            match: The prefix to go on from.
            snapshot: All that the sequence held when it was preempted.
        """
        tenant, now, seq_id = sequence.request.tenant, plan.planned_at, sequence.seq_id
        source, moved_s = None, 0.0
        if match is not None:
            prefix = match.prefix
            sequence.n_computed = match.n_tokens
            sequence.n_cut_min = prefix.n_cut_min
            snapshot = prefix.snapshot or None
            if prefix.tier is not Tier.HOST and prefix.seq_id != seq_id:
                source = prefix.seq_id
                moved_s = self._checkpoints.copy(plan, match.n_tokens)
        if snapshot is not None:
            moved_s = self._checkpoints.read(plan, snapshot)
        if moved_s and not sequence.swap.is_preempted:  # else another's request is the reason
            self._moves.spend(tenant, moved_s, now)
        plan.starts.append(
            Start(
                seq_id,
                sequence.sampler,
                n_kept=sequence.n_computed,
                source=source,
                snapshot=snapshot,
                is_resumed=sequence.swap.is_preempted,
                tag=tag_of(tenant),
            )
        )
        if sequence.swap.is_preempted:
            self._preemption.note_resumed(sequence, now)
            return
        self._prefixes.count(sequence.n_prompt, match)
        is_hit = match is not None and match.prefix.tier is Tier.HOST
        self._checkpoints.hit_rates.count(tenant, is_hit=is_hit)
        sequence.clock.slot_at = now
        sequence.n_reused = sequence.n_computed
        self._counters.charge_prompt(tenant, sequence.n_pending)
        if match is not None:
            plan.hits.append(sequence)

    def _find_prefix(
        self, plan: PlanBuilder, sequence: Sequence
    ) -> tuple[Match | None, Lead | None]:
        """Returns the prefix that a sequence could go on from, and what it should wait for instead.

        What it drafted on is gone.
        """
        sequence.is_draft_cold = False
        if not self._prefixes.is_on:
            return None, None
        owner, tenant = sequence.request.owner, sequence.request.tenant
        self._prefixes.set_weight(tenant, self._counters.weight(tenant))
        alike = self._slots.alike(sequence)
        self._checkpoints.note_branch(sequence, alike)
        match = self._prefixes.find(owner, sequence.tokens, sequence.blocks)
        begun = [it for it in alike if not plan.starts_in(it[0].seq_id)]
        if self._note_ahead(begun, match.n_tokens if match else 0):
            match = self._prefixes.find(owner, sequence.tokens, sequence.blocks)
        if sequence.swap.is_preempted:
            return match, None
        return match, self._find_lead(sequence, alike, match.n_tokens if match else 0)

    def _note_ahead(self, alike: list[tuple[Sequence, int]], n_found: int) -> bool:
        """Notes what is computed of the prompt that is most alike, if that is more than was found.

        Of prompts under way nothing is noted else: what is worth it would change in each step.
        """
        if not self._prefixes.can_copy_running:
            return False
        ahead = max(alike, key=lambda it: min(it[1], it[0].n_computed), default=None)
        if ahead is None or min(ahead[1], ahead[0].n_computed) < n_found + BLOCK_SIZE:
            return False
        self._slots.note(ahead[0])
        return True

    def _find_lead(
        self, sequence: Sequence, alike: list[tuple[Sequence, int]], n_found: int
    ) -> Lead | None:
        """Returns what a sequence should wait for; None: nothing is worth it.

        One that goes first computes it: whoever waits would get none of the steps before.

        Args:
            sequence: Gets a slot.
            alike: Those that run, and how many tokens both begin with.
            n_found: Tokens that it could go on from now.
        """
        best = None
        for other, n_alike in alike:
            is_ahead = other.rank < sequence.rank and not other.is_generating
            lead = self._checkpoints.lead(other, n_alike) if is_ahead else None
            is_due = lead is not None and lead.n_computed > other.n_computed
            if lead and is_due and (best is None or lead.n_usable > best.n_usable):
                best = lead
        if best is None or not self._is_worth_waiting(best.n_usable, n_found):
            return None
        return best

    def _is_worth_waiting(self, n_usable: int, n_found: int) -> bool:
        """Returns whether to compute what is missing takes longer than a step takes anyway."""
        n_least = max(_N_LED_MIN, self._slots.n_copied_min)
        n_missing = n_usable - n_found
        return n_missing >= n_least and self._preemption.is_longer_than_a_step(n_missing)

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
