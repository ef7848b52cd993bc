"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerCounts"]


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """How slots and cells were shared. Counts only grow; what says "now" is as of now."""

    n_parked: int = 0
    """Sequences that were parked and have not come back by now."""
    n_parked_bytes: int = 0
    """Bytes of their snapshots in host memory now."""
    n_preempted: int = 0
    """Times that a sequence was parked."""
    n_resumed: int = 0
    """Times that a parked sequence came back."""
    n_recomputed: int = 0
    """Tokens that had to be computed again for it."""
    n_prefix_lookups: int = 0
    """Prompts that got a slot while prefixes were reused."""
    n_prefix_hits: int = 0
    """Of these, those that went on from a prefix."""
    n_prefix_tokens: int = 0
    """Prompt tokens of all of them."""
    n_reused: int = 0
    """Of these, tokens that were not computed again."""
    n_prefix_evicted: int = 0
    """Prefixes that had to leave a slot or host memory."""
    n_prefix_bytes: int = 0
    """Bytes of prefixes in host memory now."""
    n_retained: int = 0
    """Slots that hold an ended sequence's tokens now."""
    n_retained_cells: int = 0
    """KV cells of these slots."""
    n_planned: int = 0
    """Times that a sequence that generates had its part in a step."""
    n_draft_planned: int = 0
    """Draft tokens chosen for them (K), over all."""
    n_estimator_resets: int = 0
    """Times that an estimator failed and started over; streams go on."""

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompts that went on from a prefix; 0 without any."""
        return self.n_prefix_hits / self.n_prefix_lookups if self.n_prefix_lookups else 0.0

    @property
    def reuse_rate(self) -> float:
        """Share of the prompt tokens that were not computed again; 0 without any."""
        return self.n_reused / self.n_prefix_tokens if self.n_prefix_tokens else 0.0
