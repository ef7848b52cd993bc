"""From the journal to the store: reads what is synced, hands it over, removes what is done."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence

from drafthouse_server.usage.folder import JournalFolder
from drafthouse_server.usage.frames import N_FRAME_BYTES_MAX, Gap, decode
from drafthouse_server.usage.record import (
    UsageCounts,
    UsageQuery,
    UsageRecord,
    UsageStore,
    UsageStoreFailed,
)

__all__ = ["Place", "Shipper"]

_log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
"""Seconds from one delivery to the next. Lists of this server ask for one more at once."""

_RETRY_S = 2.0
"""Seconds to the next attempt at a store that has failed."""

_CATCH_UP_S = 10.0
"""Seconds for which a list waits until the store has what the journal had when it was asked for."""

_N_BYTES = 1 << 20
"""Bytes of the journal that are read for a delivery."""

Place = tuple[int, int]
"""Number of a file, and a byte of it."""


class Shipper:
    """Brings ends of streams to the store, each at least once: the store takes each once.

    It keeps no records in memory, so that a store may be away for as long as the disk allows.

    Args:
        folder: Of the journal.
        store: Gets the records.
        counts: Where it counts.
        allowed: Place in the journal up to which it may read; files before it are whole.
    """

    def __init__(
        self, folder: JournalFolder, store: UsageStore, counts: UsageCounts, allowed: Place
    ) -> None:
        self._folder = folder
        self._store = store
        self._counts = counts
        self._allowed = allowed
        numbers = folder.numbers()
        self._place: Place = (numbers[0], 0) if numbers else allowed
        self._lock = threading.Lock()  # of those who deliver
        self._wake = threading.Event()
        self._is_closing = threading.Event()
        self._has_failed = False
        self._give_up_at = math.inf
        self._thread = threading.Thread(target=self._live, name="usage-store", daemon=True)

    def start(self) -> None:
        """Starts its thread."""
        self._wake.set()
        self._thread.start()

    def allow(self, place: Place, *, has_ends: bool) -> None:
        """Lets it read up to a place. Thread: the journal's."""
        self._allowed = place
        if has_ends:
            self._wake.set()

    def close(self, timeout_s: float = math.inf) -> None:
        """Brings what there is to the store, if that takes it, and ends. Thread: one that waits.

        Args:
            timeout_s: Seconds after which it does not wait any more; what the store does not have
                by then is brought after the next start.
        """
        self._give_up_at = time.monotonic() + timeout_s
        self._is_closing.set()
        self._wake.set()
        # What it does now it does to its end, as far as there is time.
        last = threading.Thread(target=self._end, name="usage-store-end", daemon=True)
        last.start()
        last.join(None if timeout_s == math.inf else timeout_s)
        if last.is_alive() or self._place < self._allowed:
            _log.error(
                "usage waits in the journal, from %s on, for a start of this server: its store has"
                " not taken it in time",
                self._folder.file(self._place[0]),
            )

    def _end(self) -> None:
        self._thread.join()
        self._try()
        with contextlib.suppress(UsageStoreFailed):
            self._store.close()

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records, those of streams that have just ended too. Thread: one that may wait.

        Raises:
            UsageStoreFailed: the store cannot tell, or does not have all of them yet, as after a
                long absence.
        """
        allowed = self._allowed
        self._try(time.monotonic() + _CATCH_UP_S)
        if self._place < allowed:
            path = self._folder.file(self._place[0])
            raise UsageStoreFailed(f"the store has not taken the journal from {path} on yet")
        return self._store.find(query)

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of streams that began since a time, by tenant.

        Those that have just ended count. Thread: one that may wait.

        Args:
            since: Earliest start, seconds since 1970.

        Raises:
            UsageStoreFailed: the store cannot tell.
        """
        self._try()
        return self._store.sum_tokens(since)

    def _live(self) -> None:
        while not self._is_closing.is_set():
            self._wake.wait()
            self._wake.clear()
            self._try()
            pause_s = _INTERVAL_S
            if self._has_failed:
                pause_s = _RETRY_S
                self._wake.set()
            self._is_closing.wait(pause_s)

    def _try(self, give_up_at: float = math.inf) -> None:
        """Brings all that is allowed to the store, or notes that it could not.

        Args:
            give_up_at: From when on, seconds of the monotonic clock, it begins no more.
        """
        wait_s = min(max(0.0, give_up_at - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=wait_s):
            return
        try:
            while time.monotonic() < min(give_up_at, self._give_up_at) and self._deliver():
                pass
        except (UsageStoreFailed, OSError) as error:
            self._counts.n_store_failures += 1
            if not self._has_failed:
                _log.error("usage waits in the journal, its store fails: %s", error)
            self._has_failed = True
        else:
            if self._has_failed and self._place >= self._allowed:  # and not given up
                _log.warning("the store of usage has all records again")
                self._has_failed = False
        finally:
            self._lock.release()

    def _deliver(self) -> bool:
        """Brings some records to the store; returns whether there are more."""
        allowed = self._allowed
        number, start = self._place
        if (number, start) >= allowed:
            return False
        path = self._folder.file(number)
        if not path.exists():
            _log.error("usage journal %s is gone: what the store had not taken of it is lost", path)
        is_whole = number < allowed[0]
        limit = self._folder.size(number) if is_whole else allowed[1]
        records, place = self._read(number, start, min(limit, start + _N_BYTES))
        if records:
            self._store.add(records)
        self._place = (number, place)
        if is_whole and place >= limit:
            path.unlink(missing_ok=True)
            later = (other for other in self._folder.numbers() if other > number)
            self._place = (next(later, number + 1), 0)
        return True

    def _read(self, number: int, start: int, end: int) -> tuple[list[UsageRecord], int]:
        """Returns the ends in a part of a file, and where to go on."""
        records: list[UsageRecord] = []
        for part in self._folder.read(number, start, end):
            if isinstance(part, Gap):
                # The part's end may have cut a frame, which the next part has whole.
                cut_at = max(part.start, end - N_FRAME_BYTES_MAX)
                if part.is_tail and cut_at > start:
                    return records, cut_at
            elif part.is_end:
                with contextlib.suppress(ValueError):  # told at the start of the server
                    entry = decode(part.body)
                    assert isinstance(entry, UsageRecord)
                    records.append(entry)
        return records, end
