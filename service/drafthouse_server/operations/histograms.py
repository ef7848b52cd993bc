"""Values counted in buckets, and such counts by tenant, of a bounded number of tenants."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "DRAFT_BOUNDS",
    "FIRST_TOKEN_BOUNDS_S",
    "N_TENANTS_MAX",
    "OTHER",
    "TOKEN_BOUNDS_S",
    "Distribution",
    "Histogram",
    "TenantCounts",
    "TenantHistograms",
    "Tenants",
]

OTHER = "other"
"""Name under which the tenants beyond the bound are counted together."""

N_TENANTS_MAX = 20
"""Tenants that are counted each, unless told otherwise."""

FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Upper bounds of the buckets of the time to first token and in the queue, seconds."""

TOKEN_BOUNDS_S = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets of times between tokens and of steps, seconds."""

DRAFT_BOUNDS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Upper bounds of the buckets of drafts, tokens."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values counted in buckets: seconds where nothing else is said. Counts only grow."""

    bounds_s: tuple[float, ...] = ()
    """Upper bounds of the buckets, rising; a bound belongs to its own bucket."""
    counts: tuple[int, ...] = (0,)
    """Values in each bucket; the last bucket holds those above all bounds."""
    sum_s: float = 0.0
    """Sum of all values."""

    @property
    def n(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """Counts values in buckets.

    Args:
        bounds_s: Upper bounds of the buckets, rising: seconds where nothing else is said.

    Thread:
        Event loop only.
    """

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Counts a value, once or several times."""
        self._counts[bisect_left(self._bounds_s, value)] += n
        self._sum_s += n * value

    def distribution(self) -> Distribution:
        """Returns the counts as they are now."""
        return Distribution(self._bounds_s, tuple(self._counts), self._sum_s)


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """What was counted of one tenant, or of several together."""

    first_token: Distribution = Distribution(FIRST_TOKEN_BOUNDS_S)
    """Times from the receipt of a request to its first message with a token."""
    output_token: Distribution = Distribution(TOKEN_BOUNDS_S)
    """Times per output token of streams that ended."""
    message_gap: Distribution = Distribution(TOKEN_BOUNDS_S)
    """Gaps between two messages with tokens of one stream."""
    queue: Distribution = Distribution(FIRST_TOKEN_BOUNDS_S)
    """Times from the receipt of a request to its first slot."""
    n_draft: Distribution = Distribution(DRAFT_BOUNDS)
    """Draft tokens (K) of a stream's verified drafts in the mean, by stream; tokens."""
    n_accepted: Distribution = Distribution(DRAFT_BOUNDS)
    """Accepted tokens of each verified draft; tokens."""


@dataclass(slots=True)
class TenantHistograms:
    """Counts one tenant, or several together. `TenantCounts` says what each is."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    """Times to first token."""
    output_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    """Times per output token."""
    message_gap: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    """Gaps between messages."""
    queue: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    """Times in the queue."""
    n_draft: Histogram = field(default_factory=lambda: Histogram(DRAFT_BOUNDS))
    """Draft tokens."""
    n_accepted: Histogram = field(default_factory=lambda: Histogram(DRAFT_BOUNDS))
    """Accepted tokens."""

    def note_drafts(self, n_drafts: int, n_drafted: int, by_accepted: Sequence[int]) -> None:
        """Counts the drafts of a stream that has ended.

        Args:
            n_drafts: Drafts verified.
            n_drafted: Their tokens.
            by_accepted: Drafts by how many of their tokens were accepted.
        """
        if n_drafts:
            self.n_draft.observe(n_drafted / n_drafts)
            for n_accepted, n in enumerate(by_accepted):
                if n:
                    self.n_accepted.observe(n_accepted, n)

    def counts(self) -> TenantCounts:
        """Returns the counts as they are now."""
        return TenantCounts(
            self.first_token.distribution(),
            self.output_token.distribution(),
            self.message_gap.distribution(),
            self.queue.distribution(),
            self.n_draft.distribution(),
            self.n_accepted.distribution(),
        )


class Tenants:
    """Counts by tenant: the first ones each, all others together, so that series are bounded.

    Args:
        n_max: Tenants that are counted each.

    Thread:
        Event loop only.
    """

    def __init__(self, n_max: int = N_TENANTS_MAX) -> None:
        self.n_max = n_max
        """Tenants that are counted each. To be set before the first is counted."""
        self._by_name: dict[str, TenantHistograms] = {}

    def of(self, tenant: str) -> TenantHistograms:
        """Returns what counts a tenant."""
        found = self._by_name.get(tenant)
        if found is None:
            n_named = len(self._by_name) - (OTHER in self._by_name)
            name = tenant if n_named < self.n_max else OTHER
            found = self._by_name.setdefault(name, TenantHistograms())
        return found

    def counts(self) -> Mapping[str, TenantCounts]:
        """Returns the counts as they are now, by tenant."""
        return {name: found.counts() for name, found in self._by_name.items()}
