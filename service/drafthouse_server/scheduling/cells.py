"""How many KV cells sequences are likely to need, how many there are, and what windows keep.

With cells of its own for each slot (`kv_unified` off) there is always room. Where slots share one
pool, reserving all that every sequence could ever hold would leave most of it unused: few generate
as much as they may. So a sequence counts with what others of its tenant came to, and when too many
come to more, the scheduler preempts some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from drafthouse_server.errors import ContextTooLong
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import EngineLimits

__all__ = ["CellLedger", "OutputLengths", "Windows", "check_context"]

_N_MEMORY = 32
"""Sequences over which a length is averaged."""

_PRIOR_SHARE = 4
"""Expected share of the allowed output while nothing was observed: one part in this many."""

_PRIOR_MIN = 64
"""Fewest tokens of output that are expected while nothing was observed."""

_GROWTH_SHARE = 4
"""When a sequence outgrows its estimate, the estimate is raised by one part in this many."""

_GROWTH_MIN = 16
"""Fewest tokens by which an estimate that was outgrown is raised."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A target's sliding windows, and to what sequences can be cut for them."""

    n_tokens: int = 0
    """Tokens that they look back; 0: it has none. A snapshot has no more of such layers."""
    n_cells: int = 0
    """Cells of a slot in such layers, where these are fewer than in others: they hold its last
    tokens alone. 0: they hold all."""

    def n_cut_min_of_snapshot(self, n_tokens: int) -> int:
        """Returns the fewest tokens that can be kept of a snapshot of so many, but 0."""
        return n_tokens - 1 if 0 < self.n_tokens < n_tokens else 0

    def n_cut_min_of_slot(self, n_cut_min: int, n_tokens: int) -> int:
        """Returns the fewest tokens that can be kept of a slot with so many now, but 0.

        Args:
            n_cut_min: The same when its sequence began.
            n_tokens: What it holds.
        """
        n_lost = n_tokens - self.n_cells if self.n_cells else 0
        return max(n_cut_min, n_lost + self.n_tokens) if n_lost > 0 else n_cut_min


@dataclass(slots=True)
class _Average:
    """Moving average and mean deviation."""

    n: int = 0
    """Observations."""
    mean: float = 0.0
    """Mean of the observations; recent ones weigh most."""
    deviation: float = 0.0
    """Mean distance from the mean."""

    def observe(self, value: float) -> None:
        """Takes one more observation."""
        self.n += 1
        weight = 1 / min(self.n, _N_MEMORY)
        distance = value - self.mean
        self.mean += weight * distance
        if self.n > 1:
            self.deviation += weight * (abs(distance) - self.deviation)


def check_context(limits: EngineLimits, n_prompt: int, n_output_max: int | None) -> int:
    """Checks that a request fits the context, and returns the most tokens it may generate.

    Args:
        limits: What the engine can carry.
        n_prompt: Tokens of the prompt, >= 1.
        n_output_max: Tokens asked for, >= 1; None: until the context is full.

    Raises:
        ContextTooLong: it does not fit (CONTEXT_TOO_LONG).
    """
    n_context = min(limits.n_ctx_seq, limits.n_ctx)
    n_left = n_context - n_prompt
    if n_left < (1 if n_output_max is None else n_output_max):
        raise ContextTooLong(n_prompt, n_output_max or 1, n_context)
    return n_left if n_output_max is None else n_output_max


class OutputLengths:
    """Learns how many tokens sequences generate, by tenant."""

    def __init__(self) -> None:
        self._all = _Average()
        self._by_tenant: dict[str, _Average] = {}

    def observe(self, sequence: Sequence) -> None:
        """Learns from a sequence that has ended."""
        self._all.observe(sequence.n_output)
        self._by_tenant.setdefault(sequence.request.tenant, _Average()).observe(sequence.n_output)

    def forget(self, tenant: str) -> None:
        """Forgets what a tenant's sequences came to. Harmless where nothing is known."""
        self._by_tenant.pop(tenant, None)

    def likely(self, sequence: Sequence) -> int:
        """Returns the tokens that a sequence is likely to generate in all, <= n_output_max.

        Always more than it has generated.
        """
        n_max = sequence.n_output_max
        average = self._by_tenant.get(sequence.request.tenant, self._all)
        if average.n:
            expected = math.ceil(average.mean + average.deviation)
        else:
            expected = max(n_max // _PRIOR_SHARE, _PRIOR_MIN)
        n_output = sequence.n_output
        if expected <= n_output:
            expected = n_output + max(n_output // _GROWTH_SHARE, _GROWTH_MIN)
        return min(max(expected, 1), n_max)


class CellLedger:
    """Knows how many cells there are, and tells how many a sequence is likely to need.

    Args:
        limits: What the engine can carry.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._n_cells = limits.n_ctx
        self.lengths = OutputLengths()
        """What sequences came to."""
        self.is_shared = limits.n_ctx < limits.n_seq_max * limits.n_ctx_seq
        """Whether the slots together could need more cells than there are."""

        self.n_reserved = 0
        """Cells that the running sequences are likely to need."""

    @property
    def n_cells(self) -> int:
        """Cells that can be counted on, <= limits.n_ctx."""
        return self._n_cells

    def n_free(self, running: Mapping[int, Sequence]) -> int:
        """Returns the cells that a step may fill; those of retained slots are given up for it."""
        if not self.is_shared:
            return self._limits.n_ctx  # every slot has its own
        # One that is alone may try for all: nothing else could be given up for it.
        n_cells = self._n_cells if len(running) > 1 else self._limits.n_ctx
        return n_cells - sum([sequence.n_computed for sequence in running.values()])

    def has_room(self, n_tokens: int, running: Mapping[int, Sequence]) -> bool:
        """Returns whether so many cells are there now, beside those of everybody's next token."""
        if not self.is_shared:
            return True
        n_next = sum([sequence.is_generating for sequence in running.values()])
        return self.n_free(running) - n_next >= n_tokens

    def has_cells(
        self, sequence: Sequence, running: Mapping[int, Sequence], victim: Sequence | None = None
    ) -> bool:
        """Returns whether a sequence is likely to find its cells.

        Args:
            sequence: It has no slot.
            running: Sequences by slot.
            victim: The one of these in whose place it would be.
        """
        if not self.is_shared or len(running) == (victim is not None):
            return True
        n_reserved = self.n_reserved - (victim.n_reserved if victim else 0)
        return n_reserved + self.need(sequence) <= self._n_cells

    def reserve(self, sequence: Sequence, n_cells: int) -> None:
        """Counts the cells that a sequence is likely to need, in place of what it had reserved."""
        self.n_reserved += n_cells - sequence.n_reserved
        sequence.n_reserved = n_cells

    def release(self, sequence: Sequence) -> None:
        """Counts a sequence's cells no more."""
        self.reserve(sequence, 0)

    def need(self, sequence: Sequence) -> int:
        """Returns the cells that a sequence is likely to need, those for trying out drafts too."""
        n_tokens = sequence.n_prompt + self.lengths.likely(sequence) + self._limits.n_draft_max
        return min(n_tokens, self._limits.n_ctx_seq, self._limits.n_ctx)

    def shrink(self, n_used: int) -> None:
        """Notes that the engine found no free cell although only so many should be in use."""
        self._n_cells = max(1, min(self._n_cells, n_used))

    def restore(self) -> None:
        """Notes that a sequence has ended: what was short may be there again."""
        self._n_cells = self._limits.n_ctx
