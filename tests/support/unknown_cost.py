"""A cost model for tests that are not about time."""

from __future__ import annotations

import math

from drafthouse_server.drafting.cost import StepShape
from drafthouse_server.step import StepTimings

__all__ = ["UnknownCost"]


class UnknownCost:
    """A cost model that never learns: prompts are not cut by time."""

    n_observed = 0

    def reset(self) -> None:
        """Forgets nothing."""

    def predict(self, shape: StepShape) -> float:
        """Returns infinity: unknown."""
        return math.inf

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns nothing."""

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns all."""
        return n_most

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        """Returns infinity: unknown."""
        return math.inf
