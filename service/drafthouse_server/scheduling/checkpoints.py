"""Prefixes on their way to host memory: of slots that are given up, and of prompts on their way.

What can be cut anywhere needs no copy while it is in a slot. A recurrent state, or a cache with a
sliding window, is good only as a whole: of these a checkpoint is taken near the end of a prompt,
for the next turn of its conversation, and where a prompt parts from another one that is kept: after
what many conversations begin with (Pan et al., arXiv:2411.19379).
"""

from __future__ import annotations

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.drafting.estimators import Estimators
from drafthouse_server.scheduling.plan_builder import PlanBuilder
from drafthouse_server.scheduling.preemption import SnapshotCost
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    Match,
    Prefix,
    PrefixCache,
    tenant_of,
)
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.scheduling.slots import Lead, SlotTable
from drafthouse_server.step import Snapshot, StepResult

__all__ = ["Checkpoints", "HitRates"]

_STALL_SHARE = 1 / 50
"""Running streams wait for a snapshot no longer than a step of theirs takes, or so much of the time
that it saves: they would be slower for all of that time if its tokens were computed again."""

_STALL_SHARE_SHORT = 1 / 4
"""Up to two of their steps they wait for what saves this much: they would wait for as long, again
and again, beside pieces of the prompt that is computed again."""

_STALL_STEPS = 0.5
"""After so much of a step's time with snapshots, who waits gets a slot in the next step."""

_N_PRIOR = 8
"""Snapshots of a tenant, every second of them of use, that count until more is known."""

_KEPT = 1 - 1 / 256
"""Of what was counted, so much still counts after one more prompt."""

_N_BEFORE_END = BLOCK_SIZE
"""A checkpoint is taken so many tokens before the end of a prompt.

Not at the very end: the last tokens are the template's generation prompt (such as the mark of a
thought), which is rendered differently once the answer is part of the history.
"""


class HitRates:
    """Predicts how often a tenant's snapshots in host memory are of use; by tenant.

    What one tenant never comes back to is nothing that others should lose. What was long ago counts
    less and less: otherwise a tenant whose snapshots were of no use would get no more, ever.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # hits and snapshots

    def count(self, tenant: str, *, is_hit: bool) -> None:
        """Counts a prompt, and whether it could go on from a snapshot."""
        n_hits, n_stored = self._counts.get(tenant, (0.0, 0.0))
        self._counts[tenant] = n_hits * _KEPT + is_hit, n_stored * _KEPT

    def count_stored(self, tenant: str) -> None:
        """Counts a snapshot that is kept."""
        n_hits, n_stored = self._counts.get(tenant, (0.0, 0.0))
        self._counts[tenant] = n_hits, n_stored + 1

    def of(self, tenant: str) -> float:
        """Returns the hits per snapshot to expect, (0, 1]."""
        n_hits, n_stored = self._counts.get(tenant, (0.0, 0.0))
        return min(1.0, (n_hits + _N_PRIOR / 2) / (n_stored + _N_PRIOR))

    def forget(self, tenant: str) -> None:
        """Forgets a tenant."""
        self._counts.pop(tenant, None)


class Checkpoints:
    """Decides what is written to host memory, and when, and what that and reading it costs.

    Args:
        prefixes: Keeps what was written.
        slots: Which sequence runs where.
        estimators: Predict what computing tokens again takes.
        snapshots: Predicts what writing them takes.
        n_least: Tokens of a prompt that a checkpoint must save over what was computed before.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        slots: SlotTable,
        estimators: Estimators,
        snapshots: SnapshotCost,
        n_least: int,
    ) -> None:
        self._prefixes = prefixes
        self._slots = slots
        self._estimators = estimators
        self._snapshots = snapshots
        self._n_least = max(n_least, BLOCK_SIZE)  # less cannot be found
        self.hit_rates = HitRates()
        """How often snapshots are of use."""
        self._due: list[Sequence] = []  # computed up to where a checkpoint is to be taken

    @property
    def _are_taken(self) -> bool:
        """Whether there are any: what cannot be cut is good only as a whole."""
        return self._prefixes.has_host and not self._prefixes.can_cut_host

    def n_before(self, plan: PlanBuilder, sequence: Sequence) -> int:
        """Returns how many tokens to compute before a checkpoint, or, without one, in all."""
        n_before, tenant = sequence.n_reused, sequence.request.tenant
        for position in self._positions(sequence) if self._are_taken else ():
            n_left = position - sequence.n_computed
            if n_left > 0 and self._is_cheap(plan.stored, tenant, position, n_before):
                return n_left
            n_before = position
        return sequence.n_pending

    def note_branch(self, sequence: Sequence, alike: list[tuple[Sequence, int]]) -> None:
        """Notes how much of a prompt another one begins with that is kept, or runs.

        One that has not come so far takes the checkpoint itself.

        Args:
            sequence: Has the prompt.
            alike: Those that run, and how many tokens both begin with.
        """
        sequence.blocks.n_branch = 0
        if not self._are_taken:
            return
        sequence.blocks.n_branch = self._prefixes.n_known(sequence.blocks, sequence.n_target)
        for other, n_alike in alike:
            sequence.blocks.n_branch = max(sequence.blocks.n_branch, n_alike)
            if other.blocks.n_branch <= other.n_computed < n_alike:
                other.blocks.n_branch = n_alike

    def lead(self, other: Sequence, n_alike: int) -> Lead | None:
        """Returns what one has to wait for that begins as another one that runs; None: no use.

        Args:
            other: Has not computed all that both begin with.
            n_alike: Tokens that both begin with.
        """
        if self._prefixes.can_copy_running:
            return Lead(other, n_alike, n_alike) if n_alike >= other.n_cut_min else None
        n_usable = min(n_alike, other.n_prompt - _N_BEFORE_END)
        is_taken = self._are_taken and n_usable - other.n_reused >= self._n_least
        # The checkpoint is written when its first token after it is computed.
        return Lead(other, n_usable, n_usable + 1) if is_taken else None

    def _positions(self, sequence: Sequence) -> list[int]:
        """Returns how much of a prompt its checkpoints hold, none that would save too little."""
        positions, n_before = list[int](), sequence.n_reused
        n_most = sequence.n_prompt - _N_BEFORE_END
        for position in (min(sequence.blocks.n_branch, n_most), n_most):
            if position - n_before >= self._n_least:
                positions.append(position)
                n_before = position
        return positions

    def note(self, sequence: Sequence) -> None:
        """Notes that more of a prompt is computed."""
        if self._are_taken and sequence.n_computed in self._positions(sequence):
            self._due.append(sequence)

    def save(self, plan: PlanBuilder) -> None:
        """Has the checkpoints that are due written."""
        if not self._due:
            return
        due, self._due = self._due, []
        for sequence in due:
            n_tokens = sequence.n_computed
            is_running = self._slots.running.get(sequence.seq_id) is sequence
            if not is_running or n_tokens not in self._positions(sequence):
                continue  # it has ended, or was preempted
            owner, tokens = sequence.request.owner, sequence.tokens[:n_tokens]
            prefix = self._prefixes.make(sequence.seq_id, owner, tokens, sequence.blocks)
            self.store(plan, sequence.seq_id, prefix, sequence.n_reused)

    def store(self, plan: PlanBuilder, seq_id: int, prefix: Prefix, n_reused: int = 0) -> None:
        """Has what a slot holds written to host memory, if that is worth it.

        Args:
            plan: Saves it.
            seq_id: The slot.
            prefix: What it holds.
            n_reused: Of its tokens, those that another prefix holds, as far as that is known.
        """
        n_tokens, n_bytes = len(prefix.tokens), self._snapshots.n_bytes(len(prefix.tokens))
        is_twice = any(
            other.tenant == prefix.tenant and other.tokens == prefix.tokens
            for other in plan.stored.values()
        )
        if is_twice or not self._prefixes.is_worth_storing(prefix, n_bytes):
            return
        n_reused = max(n_reused, self._prefixes.n_hosted(prefix))
        if self._is_cheap(plan.stored, tenant_of(prefix.tenant), n_tokens, n_reused):
            plan.saves.append(seq_id)
            plan.stored[seq_id] = prefix
            plan.moved_s += self._snapshots.write_s(n_tokens)

    def read(self, plan: PlanBuilder, snapshot: Snapshot) -> float:
        """Notes that a plan reads a snapshot; returns the seconds that it takes."""
        read_s = self._snapshots.read_s(snapshot)
        plan.moved_s += read_s
        return read_s

    def copy(self, plan: PlanBuilder, n_tokens: int) -> float:
        """Notes that a plan copies tokens from slot to slot; returns the seconds that it takes."""
        copy_s = self._snapshots.copy_s(n_tokens)
        plan.moved_s += copy_s
        plan.n_copied += n_tokens
        return copy_s

    def is_copy_dear(self, match: Match | None, n_output_max: int) -> bool:
        """Returns whether copying a prefix takes longer than a gap between slots costs.

        A gap is one more physical batch in each step, for as long as the sequence runs.
        """
        if match is None or not self._estimators.cost.n_observed:
            return False
        predict = self._estimators.predict
        gap_s = predict(StepShape(n_ubatches=2)) - predict(StepShape())
        return self._snapshots.copy_s(match.n_tokens) > gap_s * n_output_max

    def hold_up(self, plan: PlanBuilder) -> bool:
        """Returns whether running streams wait long enough for what a plan moves already."""
        is_long = plan.moved_s > _STALL_STEPS * self._estimators.stall_s
        return is_long and self._slots.is_anybody_generating()

    def observe_time(self, plan: PlanBuilder, result: StepResult) -> None:
        """Learns from a step that started sequences how long writing, reading and copying takes."""
        n_written = sum(map(len, result.snapshots.values()))
        n_read = sum([len(start.snapshot) for start in plan.starts if start.snapshot])
        seconds = result.timings.moves_s
        self._snapshots.observe_time(n_written, n_read, seconds, n_copied=plan.n_copied)

    def _is_cheap(
        self, stored: dict[int, Prefix], tenant: str, n_tokens: int, n_reused: int
    ) -> bool:
        """Returns whether a snapshot of a prefix promises to save more time than it costs.

        What is written must not hold up running streams for longer than `_stall_s`.

        Args:
            stored: What the same plan writes besides.
            tenant: Whose it is.
            n_tokens: Tokens that it would hold.
            n_reused: Of these, tokens that another prefix holds.
        """
        snapshots, estimators = self._snapshots, self._estimators
        recompute_s = estimators.recompute_s(n_tokens - n_reused)
        if self._slots.is_anybody_generating():
            written = [n_tokens, *(len(prefix.tokens) for prefix in stored.values())]
            if sum(map(snapshots.write_s, written)) > self._stall_s(recompute_s or 0.0):
                return False
        if recompute_s is None:
            return True
        return snapshots.total_s(n_tokens) < self.hit_rates.of(tenant) * recompute_s

    def _stall_s(self, saved_s: float) -> float:
        """Returns how long running streams may wait for what saves so much, seconds."""
        step_s = self._estimators.stall_s
        short_s = min(2 * step_s, _STALL_SHARE_SHORT * saved_s)
        return max(step_s, short_s, _STALL_SHARE * saved_s)

    def take(self, plan: PlanBuilder, result: StepResult) -> None:
        """Keeps what the engine has written."""
        for seq_id, prefix in plan.stored.items():
            snapshot = result.snapshots.get(seq_id)
            if snapshot is not None:
                self._snapshots.observe(len(prefix.tokens), len(snapshot))
                if self._prefixes.store(prefix.tenant, prefix.tokens, snapshot):
                    self.hit_rates.count_stored(tenant_of(prefix.tenant))
