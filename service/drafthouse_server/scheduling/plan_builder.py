"""The plan under construction, and what its commit has to know of it."""

from __future__ import annotations

from drafthouse_server.scheduling.prefix_cache import Prefix
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import PlanEntry, Start, StepPlan

__all__ = ["PlanBuilder"]


class PlanBuilder:
    """One step's plan: made part by part, frozen, and kept until the step is committed or lost.

    Args:
        planned_at: Monotonic time in seconds.
        frees: Slots given back.
    """

    # No dataclass: one is made per step, and each default factory is a call.
    def __init__(self, planned_at: float, frees: list[int]) -> None:
        self.planned_at = planned_at
        """Monotonic time in seconds."""
        self.frees = frees
        """Slots given back."""
        self.swap_outs: list[int] = []
        """Slots taken away."""
        self.saves: list[int] = []
        """Slots of which a snapshot is written."""
        self.moved_s = 0.0
        """Predicted seconds of the snapshots that are written and read, and of the copies."""
        self.n_copied = 0
        """Tokens that are copied from slot to slot."""
        self.starts: list[Start] = []
        """Slots taken."""
        self.led: set[int] = set()
        """Slots taken by sequences that wait with them: the engine hears nothing of them."""
        self.entries: list[PlanEntry] = []
        """Entries of sequences that generate, then of those that compute prompts."""
        self.n_decodes = 0
        """How many of the entries generate."""
        self.is_newcomers = False
        """Whether running streams sit the step out for newcomers' prompts."""
        self.n_steps = 1
        """Steps that the engine runs in a row."""
        self.drafts_off: list[int] = []
        """Slots whose drafter is fed no more."""
        self.drafts_on: list[int] = []
        """Slots whose drafter is fed again."""
        self.preempted: dict[int, Sequence] = {}
        """Sequences by the slot that is taken away from them, until they wait again."""
        self.stored: dict[int, Prefix] = {}
        """Prefixes for host memory, by the slot that is saved."""
        self.hits: list[Sequence] = []
        """Sequences that start with a prefix that was found for them."""

    @property
    def has_moves(self) -> bool:
        """Whether slots are taken, taken away or saved."""
        return bool(self.starts or self.swap_outs or self.saves)

    @property
    def needed(self) -> set[int | None]:
        """Slots that this plan has given to somebody, or copies from: nobody else gets them."""
        return {it for start in self.starts for it in (start.seq_id, start.source)} | self.led

    def starts_in(self, seq_id: int) -> bool:
        """Returns whether a slot is taken: what it holds then is not there yet."""
        return any(start.seq_id == seq_id for start in self.starts)

    def copies_from(self, seq_id: int) -> bool:
        """Returns whether another slot begins with what a slot holds."""
        return any(start.source == seq_id for start in self.starts)

    def freeze(self) -> StepPlan:
        """Returns the plan for the engine."""
        return StepPlan(
            self.entries,
            self.starts,
            self.frees,
            self.swap_outs,
            self.saves,
            self.drafts_off,
            self.drafts_on,
            self.n_steps,
        )
