"""How many tokens to draft for whom."""

from __future__ import annotations

from typing import Protocol

from drafthouse_server.step import EngineLimits

__all__ = ["DraftPolicy", "Draftable", "FixedDraft", "fit"]


class Draftable(Protocol):
    """What a policy may know of a sequence."""

    @property
    def n_draft(self) -> int | None:
        """K asked for; None is the server's default."""
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

    @property
    def is_draft_cold(self) -> bool:
        """Whether the draft state was lost."""
        ...


class DraftPolicy(Protocol):
    """Chooses K per sequence and learns from what became of it. Pure: no clock, no randomness."""

    def choose(self, sequence: Draftable, limits: EngineLimits) -> int:
        """Returns K for the sequence's next step, [0, limits.n_draft_max].

        Args:
            sequence: One that is about to generate: only its last token is not computed.
            limits: What the engine can carry.
        """
        ...

    def observe(self, sequence: Draftable, n_drafted: int, n_accepted: int) -> None:
        """Learns how a step's draft did.

        Args:
            sequence: The sequence.
            n_drafted: Draft tokens verified; 0 in a step without a draft.
            n_accepted: Of these, accepted.
        """
        ...


class FixedDraft:
    """K as the request asks, or else the server's default.

    Args:
        n_draft_default: K for requests that do not ask, >= 0.
    """

    def __init__(self, n_draft_default: int) -> None:
        self._n_draft_default = n_draft_default

    def choose(self, sequence: Draftable, limits: EngineLimits) -> int:
        """Returns K for the sequence's next step."""
        n_draft = sequence.n_draft
        if n_draft is None:
            n_draft = self._n_draft_default
        return fit(n_draft, sequence, limits) if n_draft > 0 else 0

    def observe(self, sequence: Draftable, n_drafted: int, n_accepted: int) -> None:
        """Learns nothing: K is fixed."""


def fit(n_draft: int, sequence: Draftable, limits: EngineLimits) -> int:
    """Returns the largest K up to `n_draft` that is of use to a sequence.

    A step yields up to K + 1 tokens, so more than the remaining output less one would be thrown
    away. It takes K + 1 cells, which must fit the sequence's context. A sequence whose draft state
    is lost, or which found no room, gets none.
    """
    if sequence.is_draft_cold or sequence.n_no_room:
        return 0
    n_fit = min(
        n_draft,
        limits.n_draft_max,
        sequence.n_output_left - 1,
        limits.n_ctx_seq - sequence.n_computed - 1,
    )
    return n_fit if n_fit > 0 else 0
