"""How fast the server has been of late: differences of counters, over the last ten seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["SPAN_S", "Counters", "RecentRates"]

SPAN_S = 10.0
"""Span that rates are of, seconds."""

_STEP_S = 0.5
"""Least time between two counts that are kept, seconds."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts at one time; they only grow."""

    at: float
    """Monotonic time in seconds."""
    n_generated: int = 0
    """Tokens that steps have yielded."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    n_planned: int = 0
    """Times that a sequence that generates had its part in a step."""
    n_draft_planned: int = 0
    """Draft tokens chosen for them (K), over all."""


class RecentRates:
    """Rates of the last ten seconds, of counters that are noted now and then.

    Args:
        start: The counters at first.
    """

    def __init__(self, start: Counters) -> None:
        self._noted = deque([start])
        self._last = start

    def note(self, counters: Counters) -> None:
        """Takes the counters of now."""
        if len(self._noted) > 1 and counters.at - self._noted[-2].at < _STEP_S:
            self._noted.pop()  # however often they are noted, few are kept
        self._noted.append(counters)
        self._last = counters
        # The oldest one is the last that is as old as the span.
        while len(self._noted) > 2 and counters.at - self._noted[1].at >= SPAN_S:
            self._noted.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        span_s = self._last.at - self._noted[0].at
        return (self._last.n_generated - self._noted[0].n_generated) / span_s if span_s else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the draft tokens; 0 without any."""
        n_drafted = self._last.n_drafted - self._noted[0].n_drafted
        n_accepted = self._last.n_accepted - self._noted[0].n_accepted
        return n_accepted / n_drafted if n_drafted else 0.0

    @property
    def mean_n_draft(self) -> float:
        """Draft tokens chosen (K) per sequence and step; 0 without any."""
        n_planned = self._last.n_planned - self._noted[0].n_planned
        n_draft = self._last.n_draft_planned - self._noted[0].n_draft_planned
        return n_draft / n_planned if n_planned else 0.0
