"""The acceptance rule of speculative sampling, as published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drafthouse_engine.distribution import Probabilities, sample_token
from drafthouse_engine.errors import InvalidArgument

__all__ = ["adjusted_distribution", "modified_rejection_step", "speculative_sample"]


def adjusted_distribution(
    target: npt.NDArray[np.floating[Any]], draft: npt.NDArray[np.floating[Any]]
) -> Probabilities:
    """Returns what a rejected token is drawn from anew: max(0, p − q), normalised.

    Args:
        target: p, probabilities of the target.
        draft: q, probabilities that the draft token was drawn from.

    Shape:
        [n_vocab] float64. Where p equals q, so that nothing is ever rejected, it is p.

    Raises:
        InvalidArgument: the two have different shapes.

    Source:
        Leviathan et al., arXiv:2211.17192, Alg. 1.
    """
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    if p.shape != q.shape or p.ndim != 1:
        raise InvalidArgument(f"the distributions have shapes {p.shape} and {q.shape}")
    rest = np.maximum(p - q, 0.0)
    total = float(rest.sum())
    found: npt.NDArray[np.float64] = rest / total if total > 0.0 else p / p.sum()
    return found


def modified_rejection_step(
    target: npt.NDArray[np.floating[Any]],
    draft: npt.NDArray[np.floating[Any]],
    token: int,
    rng: np.random.Generator,
) -> tuple[bool, int]:
    """Accepts a draft token with probability min(1, p / q), or draws another in its place.

    What is returned is distributed as the target, whatever the draft's distribution is.

    Args:
        target: p, probabilities of the target, [n_vocab].
        draft: q, probabilities that the token was drawn from, [n_vocab].
        token: the draft token, [0, n_vocab).
        rng: where chance comes from.

    Returns:
        Whether the draft token was accepted, and the token that stands at its place.

    Raises:
        InvalidArgument: the shapes differ, or the draft could not have drawn the token.

    Source:
        Leviathan et al., arXiv:2211.17192, Alg. 1.
    """
    if not 0 <= token < len(draft) or not draft[token] > 0.0:
        raise InvalidArgument(f"token {token} has no probability in the draft's distribution")
    rest = adjusted_distribution(target, draft)
    if rng.random() * draft[token] < target[token]:
        return True, token
    return False, sample_token(rest, rng)


def speculative_sample(
    targets: Sequence[npt.NDArray[np.floating[Any]]],
    drafts: Sequence[npt.NDArray[np.floating[Any]]],
    tokens: Sequence[int],
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Verifies a draft of several tokens.

    Args:
        targets: the target's probabilities after 0, 1, … draft tokens, [n_tokens + 1, n_vocab].
        drafts: the probabilities that each token was drawn from, [n_tokens, n_vocab].
        tokens: the draft.
        rng: where chance comes from.

    Returns:
        How many tokens were accepted, [0, n_tokens], and the token after them: that which replaces
        the first rejected one, or the target's own after the whole draft.

    Raises:
        InvalidArgument: the lengths or shapes do not fit.

    Source:
        Leviathan et al., arXiv:2211.17192, Alg. 1.
    """
    if len(targets) != len(tokens) + 1 or len(drafts) != len(tokens):
        raise InvalidArgument(
            f"{len(tokens)} tokens need {len(tokens) + 1} target distributions and {len(tokens)} "
            f"of the draft, not {len(targets)} and {len(drafts)}"
        )
    for i, token in enumerate(tokens):
        is_accepted, chosen = modified_rejection_step(targets[i], drafts[i], token, rng)
        if not is_accepted:
            return i, chosen
    return len(tokens), sample_token(targets[-1], rng)
