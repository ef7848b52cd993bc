"""How many tokens to draft for whom: what a policy is, and the fixed one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drafthouse_server.step import EngineLimits, SamplingOptions, StepResult

__all__ = ["Asked", "DraftPolicy", "Draftable", "FixedDraft", "fit", "level"]


class Asked(Protocol):
    """What drafting may know of a request."""

    @property
    def n_draft(self) -> int | None:
        """K asked for; None leaves it to the policy."""
        ...

    @property
    def sampling(self) -> SamplingOptions:
        """How tokens are chosen."""
        ...

    @property
    def owner(self) -> str:
        """Whose later sequences may draft from it: the tenant's, or an end user's."""
        ...


class Draftable(Protocol):
    """What a policy may know of a sequence."""

    is_draft_cold: bool
    """Whether the draft state was lost."""

    @property
    def seq_id(self) -> int:
        """Slot."""
        ...

    @property
    def request(self) -> Asked:
        """What was asked for."""
        ...

    @property
    def n_computed(self) -> int:
        """Tokens in the KV cache."""
        ...

    @property
    def n_output_left(self) -> int:
        """Tokens that may still be generated."""
        ...

    @property
    def n_no_room(self) -> int:
        """Steps in a row that found no cell."""
        ...


class DraftPolicy(Protocol):
    """Chooses K and learns from what became of it. Pure: no clock, no randomness."""

    epoch: int
    """Number of changes of the answers of `wants`."""

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether a sequence's drafter shall be fed; if not, it gets no draft."""
        ...

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, draft_budget: int
    ) -> list[int]:
        """Returns K of the next step for each sequence, [0, limits.n_draft_max].

        Args:
            sequences: Those that are about to generate: only their last tokens are not computed.
            limits: What the engine can carry.
            draft_budget: Most draft tokens of all together, >= 0.
        """
        ...

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns how the drafts of a step did; they are those that were chosen last.

        Args:
            result: The step's; without entries that say nothing of the drafter.
            streams_s: Seconds of the step without what its prompts took, the host's part included;
                0 is not known.
        """
        ...

    def reset(self) -> None:
        """Forgets all that was learnt."""
        ...


class FixedDraft:
    """K as the request asks, or else the server's default.

    Args:
        n_draft_default: K for requests that do not ask, >= 0.
    """

    epoch = 0

    def __init__(self, n_draft_default: int) -> None:
        self._n_draft_default = n_draft_default

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether it is one that gets drafts."""
        n_draft = sequence.request.n_draft
        return (self._n_draft_default if n_draft is None else n_draft) > 0

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, draft_budget: int
    ) -> list[int]:
        """Returns K for each sequence; where they are too many, the largest shrink first."""
        requested = [self._choose(sequence, limits) for sequence in sequences]
        return requested if sum(requested) <= draft_budget else level(requested, draft_budget)

    def _choose(self, sequence: Draftable, limits: EngineLimits) -> int:
        n_draft = sequence.request.n_draft
        if n_draft is None:
            n_draft = self._n_draft_default
        return fit(n_draft, sequence, limits) if n_draft > 0 else 0

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns nothing: K is fixed."""

    def reset(self) -> None:
        """Forgets nothing: nothing was learnt."""


def fit(n_draft: int, sequence: Draftable, limits: EngineLimits) -> int:
    """Returns the largest K up to `n_draft` that is of use to a sequence.

    A step yields up to K + 1 tokens, so more than the remaining output less one would be thrown
    away. It takes K + 1 cells, which must fit the sequence's context. A sequence whose draft state
    is lost, or which found no room, gets none.
    """
    if sequence.is_draft_cold or sequence.n_no_room:
        return 0
    n_cells_left = limits.n_ctx_seq - sequence.n_computed - 1
    return max(0, min(n_draft, limits.n_draft_max, sequence.n_output_left - 1, n_cells_left))


def level(requested: list[int], n_left: int) -> list[int]:
    """Cuts the largest K down to a common level, so that their sum is at most `n_left`."""
    granted = [0] * len(requested)
    in_order = sorted(range(len(requested)), key=requested.__getitem__)
    for n_done, i in enumerate(in_order):
        granted[i] = min(requested[i], n_left // (len(requested) - n_done))
        n_left -= granted[i]
    return granted
