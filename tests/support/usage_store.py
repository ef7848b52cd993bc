"""A store of usage records without a file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from drafthouse_server.usage.record import UsageQuery, UsageRecord, cursor_of

__all__ = ["MemoryUsageStore"]


class MemoryUsageStore:
    """Keeps records as long as the process lives."""

    def __init__(self) -> None:
        self._records: dict[str, UsageRecord] = {}
        self._lock = threading.Lock()

    def add(self, records: Sequence[UsageRecord]) -> None:
        """Keeps records; those that it has already change nothing."""
        with self._lock:
            for record in records:
                self._records.setdefault(record.record_id, record)

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records by their end, and where that is the same, by their id."""
        with self._lock:
            found = [record for record in self._records.values() if query.matches(record)]
        return sorted(found, key=cursor_of)[: query.n_max]

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of streams that began since a time. See `UsageStore.sum_tokens`."""
        with self._lock:
            found = [record for record in self._records.values() if record.started_at >= since]
        sums: Counter[str] = Counter()
        for record in found:
            sums[record.tenant] += record.n_limited
        return sums

    def close(self) -> None:
        """Does nothing."""
