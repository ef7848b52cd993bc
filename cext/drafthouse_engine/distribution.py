"""The distribution that a token is drawn from, and drawing from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from drafthouse_engine.errors import InvalidArgument, Unsupported
from drafthouse_engine.options import SamplingParams

__all__ = ["Probabilities", "check_sampling", "sample_token", "token_distribution"]

Probabilities: TypeAlias = npt.NDArray[np.float64]

KNOWN: Final = {"seed", "temperature", "top_k", "top_p", "min_p", "ignore_eos"}
"""Fields of `SamplingParams` that `token_distribution` follows."""
WITHOUT_EFFECT: Final = {
    "penalty_last_n",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_breakers",
    "xtc_threshold",
}
"""Fields that do nothing while the sampler they belong to is off."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raises `Unsupported` for settings that `token_distribution` does not follow."""
    plain = SamplingParams()
    others = [
        field.name
        for field in dataclasses.fields(SamplingParams)
        if field.name not in KNOWN | WITHOUT_EFFECT
        and getattr(sampling, field.name) != getattr(plain, field.name)
    ]
    if others:
        raise Unsupported(f"this method samples without {', '.join(others)}")


def token_distribution(
    logits: npt.NDArray[np.floating[Any]],
    sampling: SamplingParams,
    forbidden: Sequence[int] = (),
) -> Probabilities:
    """Returns the probabilities that a token is drawn with.

    Filters in llama.cpp's order: top-k, top-p, min-p, then the temperature. Temperature 0 gives
    the greatest logit, the first of several, the probability 1.

    Args:
        logits: one row, or several.
        sampling: temperature, top_k, top_p, min_p; other fields are not read.
        forbidden: tokens of probability 0, such as those that end a generation.

    Shape:
        [..., n_vocab] float64, each row summing to 1.
    """
    scores = np.array(logits, np.float64)
    if len(forbidden) > 0:
        scores[..., list(forbidden)] = -np.inf
    if scores.ndim > 1:
        return np.stack([_distribution(row, sampling) for row in scores])
    return _distribution(scores, sampling)


def _distribution(scores: Probabilities, sampling: SamplingParams) -> Probabilities:
    if sampling.temperature == 0:
        found = np.zeros_like(scores)
        found[scores.argmax()] = 1.0
        return found
    order = np.argsort(-scores, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    order = order[: _n_top_p(scores[order], sampling.top_p)]
    best = scores[order]
    if sampling.min_p > 0:
        order = order[best >= best[0] + np.log(sampling.min_p)]
    found = np.zeros_like(scores)
    found[order] = _softmax(scores[order] / sampling.temperature)
    return found


def _n_top_p(best: Probabilities, top_p: float) -> int:
    if top_p >= 1.0:
        return len(best)
    return int(np.searchsorted(np.cumsum(_softmax(best)), top_p)) + 1


def _softmax(scores: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(scores - scores.max())
    shares: Probabilities = weights / weights.sum()
    return shares


def sample_token(probabilities: npt.NDArray[np.floating[Any]], rng: np.random.Generator) -> int:
    """Draws a token. One of probability 0 is never drawn.

    Args:
        probabilities: [n_vocab], none negative; they need not sum to 1.
        rng: where chance comes from.

    Raises:
        InvalidArgument: all are 0, or one is negative or not a number.
    """
    weights = np.asarray(probabilities, np.float64)
    ends = np.cumsum(weights)
    if not (ends[-1] > 0.0 and weights.min() >= 0.0):
        raise InvalidArgument("the probabilities are all 0, negative, or not numbers")
    # The interval of a token of probability 0 is empty; rounding may only lead past the last one.
    token = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))
