"""Sequences that wait: for a slot, the least served tenant's first; and for their end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from drafthouse_server.errors import DeadlineTooShort, DrafthouseError
from drafthouse_server.scheduling.sequence import (
    FinishReason,
    Request,
    Sequence,
    SequenceState,
)
from drafthouse_server.tenancy.fairness import VirtualCounters

__all__ = ["End", "Ends", "WaitingQueue", "rank"]

End = FinishReason | DrafthouseError
"""How a sequence ends."""

_N_DEADLINES_MIN = 64
"""Deadlines of ended sequences that may be held before they are swept."""

_N_REMOVED_MIN = 64
"""Removed entries that a line may hold before it is swept."""


def rank(request: Request, order: int, aging_s: float = 0.0) -> tuple[float, int]:
    """Returns a sequence's place inside its tenant: the least goes first.

    Args:
        request: What was asked for.
        order: Place in the order of arrival.
        aging_s: Seconds of waiting that are worth a point of priority; 0: priorities do not age.
    """
    if not aging_s:
        return -request.priority, order
    return request.received_at - request.priority * aging_s, order


@dataclass(slots=True)
class _Line:
    """One tenant's sequences."""

    heap: list[tuple[tuple[float, int], Sequence]] = field(default_factory=list)
    """By rank; some may have been removed."""
    n_live: int = 0
    """Entries that were not removed."""


def _anybody(_: str) -> bool:
    return True


class WaitingQueue:
    """Says which sequence goes next. No operation takes longer because more sequences wait.

    The tenant that was served least goes first; inside a tenant the first in rank, preempted or
    not.

    Args:
        counters: Say which tenant was served least; told which tenants wait.
    """

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._lines: dict[str, _Line] = {}
        self._removed: set[Sequence] = set()
        self._n_live = 0
        self._n_preempted = 0

    def __len__(self) -> int:
        return self._n_live

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all, by rank over all tenants."""
        entries = [entry for line in self._lines.values() for entry in line.heap]
        return (s for _, s in sorted(entries, key=_entry_rank) if s not in self._removed)

    @property
    def n_preempted_now(self) -> int:
        """Sequences that had a slot already."""
        return self._n_preempted

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence, new or preempted."""
        request = sequence.request
        tenant, weight = request.tenant, request.weight
        if sequence.swap.is_preempted:  # what the share is by now the last one to come knows
            weight = self._counters.weight(tenant)
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line()
            self._counters.join(tenant, weight)
        else:
            self._counters.set_weight(tenant, weight)
        heappush(line.heap, (sequence.rank, sequence))
        line.n_live += 1
        self._n_live += 1
        self._n_preempted += sequence.swap.is_preempted

    def peek(self, may: Callable[[str], bool] = _anybody) -> Sequence | None:
        """Returns the sequence that goes next; None if none waits, or none may go.

        Args:
            may: Returns whether a tenant may have a slot now; the others keep their places.
        """
        if not self._n_live:
            return None
        tenant = self._counters.first()
        if not may(tenant):
            allowed = [other for other in self._lines if may(other)]
            if not allowed:
                return None
            tenant = min(allowed, key=self._counters.of)
        heap = self._lines[tenant].heap
        while heap[0][1] in self._removed:
            self._removed.remove(heappop(heap)[1])
        return heap[0][1]

    def pop(self, sequence: Sequence) -> None:
        """Takes out a sequence that `peek` has just returned."""
        heap = self._lines[sequence.request.tenant].heap
        assert heap[0][1] is sequence, "it is not the first of its tenant"
        heappop(heap)
        self._forget(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits here, and will not come back."""
        self._removed.add(sequence)
        self._forget(sequence)
        line = self._lines.get(sequence.request.tenant)
        if line is not None and len(line.heap) > 2 * line.n_live + _N_REMOVED_MIN:
            self._sweep(line)

    def _forget(self, sequence: Sequence) -> None:
        """Counts a sequence no more."""
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.n_live -= 1
        self._n_live -= 1
        self._n_preempted -= sequence.swap.is_preempted
        if not line.n_live:
            self._sweep(line)
            del self._lines[tenant]
            self._counters.leave(tenant)

    def _sweep(self, line: _Line) -> None:
        """Drops the removed entries, in time that is proportional to their number."""
        gone = [entry for entry in line.heap if entry[1] in self._removed]
        line.heap = [entry for entry in line.heap if entry[1] not in self._removed]
        heapify(line.heap)
        self._removed.difference_update(sequence for _, sequence in gone)


def _entry_rank(entry: tuple[tuple[float, int], Sequence]) -> tuple[float, int]:
    return entry[0]


class Ends:
    """Ends that are due: those that were asked for, and deadlines.

    A sequence ends before its deadline where its first token can come only after it.

    Args:
        least_s: Returns the seconds that a sequence without a slot needs for its first token at
            the least; with False without a look at what is computed already, which takes time.
    """

    def __init__(self, least_s: Callable[[Sequence, bool], float]) -> None:
        self._least_s = least_s
        self._marks: dict[Sequence, End] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []  # the time to look at each

    def expect(self, sequence: Sequence, n_live: int) -> None:
        """Notes a sequence's deadline; `n_live` sequences have not ended."""
        deadline = sequence.request.deadline
        if deadline == math.inf:
            return
        if len(self._deadlines) > 2 * n_live + _N_DEADLINES_MIN:
            self._deadlines = [entry for entry in self._deadlines if entry[2].terminal is None]
            heapify(self._deadlines)
        at = deadline - self._least_s(sequence, False)
        heappush(self._deadlines, (at, sequence.order, sequence))

    def mark(self, sequence: Sequence, end: End) -> None:
        """Asks for a sequence's end. Too late is harmless; the first mark counts."""
        if sequence.state is not SequenceState.FINISHED:
            self._marks.setdefault(sequence, end)

    def end_tenant(self, tenant: str, sequences: Iterable[Sequence], error: End) -> None:
        """Asks for the end of a tenant's sequences, in place of any that was asked for before."""
        for sequence in sequences:
            if sequence.request.tenant == tenant:
                self._marks[sequence] = error

    def take(self, now: float) -> Iterator[tuple[Sequence, End]]:
        """Yields the sequences that are to end now, and how."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self._look_at(heappop(self._deadlines)[2], now)
        marks, self._marks = self._marks, {}
        for sequence, end in marks.items():
            if sequence.state is not SequenceState.FINISHED:
                yield sequence, end

    def _look_at(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence that cannot meet its deadline, or notes when to look at it again."""
        deadline = sequence.request.deadline
        left_s = deadline - now
        if left_s <= 0:
            self.mark(sequence, FinishReason.DEADLINE)
            return
        needed_s = 0.0
        if sequence.state is SequenceState.WAITING:
            needed_s = self._least_s(sequence, True)  # anew: more is known by now
            # Not `needed_s >= left_s`: what rounds to now would be looked at for ever.
            if deadline - needed_s <= now:
                self.mark(sequence, DeadlineTooShort(left_s, needed_s))
                return
        heappush(self._deadlines, (deadline - needed_s, sequence.order, sequence))
