"""The usage journal: what accepted streams take, written down before their clients are told.

One thread writes. What comes while it writes forms the next group, so that many streams share a
write, and the ends of many an fsync. `docs/internals/usage.md` says in which order a stream, its
marks and the transport go, and what a crash at any moment leaves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from drafthouse_server.errors import StartupError
from drafthouse_server.usage.folder import JournalFolder, Left
from drafthouse_server.usage.frames import FILE_MAGIC, Entry, Mark, encode
from drafthouse_server.usage.record import UsageCounts, UsageRecord, UsageStore
from drafthouse_server.usage.shipping import Shipper

__all__ = ["Journal"]

_log = logging.getLogger(__name__)

_WRITE_INTERVAL_S = 0.004
"""Seconds from one write to the next, in which entries come together."""

_SYNC_INTERVAL_S = 0.005
"""Seconds from one fsync to the next, in which ends of streams come together."""

_LAZY_SYNC_S = 0.1
"""Seconds after which starts and marks are synced where no end has done it."""

_RETRY_S = 0.25
"""Seconds between two attempts at a journal that cannot be written."""

_STUCK_S = 5.0
"""Seconds after which a disk that does not answer counts as one that cannot be written."""

_DISK_CLOSE_S, _STORE_CLOSE_S = 6.0, 2.0
"""Seconds that disk and store have to take what is left when the server ends. What the disk leaves
of its own the store has besides."""

_N_TOLD_MAX = 100
"""Lost records that the log has one by one."""

_N_FILE_BYTES = 16 << 20
"""Size at which the next file is begun."""

_Done = Callable[[bool], None]


@dataclass(slots=True)
class _Item:
    """An entry on its way."""

    entry: Entry
    """Entry to be written."""
    done: _Done | None
    """Whom to tell what became of it; None: nobody, or told already."""

    @property
    def is_end(self) -> bool:
        """Whether it tells how a stream ended."""
        return isinstance(self.entry, UsageRecord) and bool(self.entry.outcome)


class Journal:
    """Writes entries to files and has their ends brought to the store.

    No entry is lost while the process lives: what cannot be written waits, and is tried again.

    Args:
        folder: Where the files are; locked.
        store: Gets the ends.
        post: Has a call made on the event loop's thread; any thread may use it.
        counts: Where it counts.
        n_file_bytes: Size at which the next file is begun.
        left: The streams that a crash has cut off. What is known of them is in older files alone,
            so these are kept until the next one begins with it.

    Thread:
        `write` on any, `close` on one that may wait.
    """

    def __init__(
        self,
        folder: JournalFolder,
        store: UsageStore,
        *,
        post: Callable[[Callable[[], None]], object],
        counts: UsageCounts | None = None,
        n_file_bytes: int = _N_FILE_BYTES,
        left: Left | None = None,
    ) -> None:
        self.counts = counts or UsageCounts()
        """How it does."""
        self._folder = folder
        self._post = post
        self._n_file_bytes = n_file_bytes
        self._queue: SimpleQueue[list[_Item] | None] = SimpleQueue()  # None: close
        self._file: _File | None = None
        numbers = folder.numbers()
        self._number = numbers[-1] if numbers else 0
        left = left or Left()
        self._open = {
            record_id: [encode(it) for it in (start, left.marks.get(record_id)) if it is not None]
            for record_id, start in left.starts.items()
        }
        self._backlog: list[_Item] = []
        self._unsynced: list[_Item] = []
        self._is_urgent = False  # whether an end is among them
        self._written_at = self._synced_at = self._unsynced_since = -math.inf
        self._busy_since = math.inf
        self._is_closing = False
        self._is_dead = False
        self._thread = threading.Thread(target=self._live, name="usage-journal", daemon=True)
        old = (self._number, folder.size(self._number)) if self._open else (self._number + 1, 0)
        self.shipper = Shipper(folder, store, self.counts, old)
        """Brings ends to the store."""
        self.n_lost = 0
        """Streams that a crash had cut off before it was opened; they are its first records."""

    @classmethod
    def open(
        cls,
        path: Path,
        store: UsageStore,
        *,
        post: Callable[[Callable[[], None]], object],
        counts: UsageCounts | None = None,
        n_file_bytes: int = _N_FILE_BYTES,
    ) -> Journal:
        """Opens the journal of a folder; streams that a crash has cut off end as lost.

        Raises:
            StartupError: the folder cannot be used, or another server uses it.
        """
        folder = JournalFolder(path)
        folder.lock()
        with contextlib.ExitStack() as undo:
            undo.callback(folder.unlock)
            try:
                folder.repair()
                left = folder.left()
                journal = cls(
                    folder, store, post=post, counts=counts, n_file_bytes=n_file_bytes, left=left
                )
            except OSError as error:
                raise StartupError(
                    f"cannot read the usage journal {str(error.filename or path)!r}:"
                    f" {(error.strerror or str(error)).lower()}; see to it, or choose another"
                    " usage_journal"
                ) from error
            undo.pop_all()
        lost = left.lost()
        if lost:
            _log.warning("usage journal: %d streams were cut off by the server's end", len(lost))
        for record in lost:
            journal.write(record)
        journal.n_lost = len(lost)
        journal.start()
        return journal

    def start(self) -> None:
        """Starts its threads."""
        self._thread.start()
        self.shipper.start()

    @property
    def is_failing(self) -> bool:
        """Whether it cannot be written now."""
        return self.counts.is_failing

    @property
    def has_failed(self) -> bool:
        """Whether it cannot be written any more, whatever its disk does: its thread has failed."""
        return self._is_dead and not self._is_closing

    def watch(self) -> bool:
        """Takes note of a disk that has not answered for long; returns whether writing fails.

        Such a disk stops no stream for longer than one that is full does. Thread: any.
        """
        if not self.counts.is_failing and time.monotonic() - self._busy_since > _STUCK_S:
            self.counts.is_failing = True
            self.counts.n_journal_failures += 1
            _log.error(
                "USAGE IS NOT WRITTEN: the disk of the journal in %s has not answered for %.0f s;"
                " what is known waits in memory",
                self._folder.path,
                _STUCK_S,
            )
            self._put([])  # it may have answered meanwhile, and a journal without entries sleeps
        return self.counts.is_failing

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of prompts and outputs of streams that began since a time, by tenant.

        Those that a crash has cut off count, if they can be written. Thread: one that may wait.

        Args:
            since: Earliest start, seconds since 1970.

        Raises:
            UsageStoreFailed: the store cannot tell.
        """
        give_up_at = time.monotonic() + _STUCK_S
        while self.counts.n_records < self.n_lost and not self.is_failing:
            if time.monotonic() > give_up_at:
                break
            time.sleep(_WRITE_INTERVAL_S)
        return self.shipper.sum_tokens(since)

    def write(self, entry: Entry, done: _Done | None = None) -> None:
        """Has an entry written. It does not wait.

        Args:
            entry: What is told.
            done: Called once on the event loop's thread, when it is written (an end: and synced),
                with True; or with False when the journal cannot be written now. The entry then
                waits, and nothing more is told.
        """
        self._put([_Item(entry, done)])

    def write_marks(self, marks: Sequence[Mark], done: _Done) -> None:
        """Has marks of several streams written together. It does not wait.

        Args:
            marks: What is told, one at least.
            done: Called once, when all of them are written or cannot be; see `write`.
        """
        *others, last = marks
        self._put([*(_Item(mark, None) for mark in others), _Item(last, done)])

    def _put(self, items: list[_Item]) -> None:
        self._queue.put(items)
        if self._is_dead:
            self._release(items)

    def close(self, disk_s: float = _DISK_CLOSE_S, store_s: float = _STORE_CLOSE_S) -> None:
        """Writes what there is, brings it to the store, and ends. Harmless when done twice.

        What is not done by then is told in the log: the records that a disk has not taken, the file
        from which on the store has not.

        Args:
            disk_s: Seconds after which it does not wait for the disk any more.
            store_s: Seconds that the store has besides those that the disk has not needed.
        """
        if self._is_closing:
            return
        self._is_closing = True
        give_up_at = time.monotonic() + disk_s + store_s
        self._queue.put(None)
        self._thread.join(disk_s)
        if self._thread.is_alive():
            _log.critical(
                "the disk of the usage journal has not answered for %g s: %s may not be whole",
                disk_s,
                self._folder.file(self._number),
            )
            groups = [*self._drained()]
            for group in groups:  # its thread finds them there, should the disk answer yet
                self._queue.put(group)
            _tell_lost([*self._unsynced, *self._backlog, *_joined(groups)])
        # Also then, and in some time: what is synced can be read where nothing can be written, and
        # the disk may never answer again. The lock goes with the process, lest another one writes
        # to a file that the hung thread may still write to.
        self.shipper.close(max(store_s, give_up_at - time.monotonic()))
        if not self._thread.is_alive():
            self._folder.unlock()

    def _live(self) -> None:
        """Writes until it is closed. Thread: its own."""
        try:
            while self._turn():
                self._busy_since = math.inf
        finally:
            # Also if this thread fails, which is our bug: streams must not wait for it.
            self._is_dead = True
            self.counts.is_failing |= not self._is_closing
            self._close_file()
            left = [*self._unsynced, *self._backlog, *_joined(self._drained())]
            if left:
                _log.critical("%d entries of the usage journal are lost", len(left))
                _tell_lost(left)
            self._release(left)

    def _turn(self) -> bool:
        """Writes and syncs what there is; returns whether there may be more."""
        is_last = self._collect()
        self._busy_since = time.monotonic()
        if self._file is not None and self._file.n_bytes >= self._n_file_bytes:
            self._leave_file()
        if self._backlog:
            self._write()
        if is_last or time.monotonic() >= self._sync_due():
            self._sync()  # also where the disk is full: what was written before needs no room
        self._note_success()  # a look at a disk that was slow may have come after it answered
        return not is_last

    def _collect(self) -> bool:
        """Waits for entries, or for what is due; returns whether they were the last."""
        now = time.monotonic()
        timeout = None
        if self._backlog or self.counts.is_failing:
            timeout = _RETRY_S
        elif self._unsynced:
            timeout = max(0.0, self._sync_due() - now)
        try:
            first = self._queue.get(timeout=timeout)
        except Empty:
            return False
        wait_s = self._written_at + _WRITE_INTERVAL_S - time.monotonic()
        if first is not None and wait_s > 0:
            time.sleep(wait_s)
        groups = [first, *self._drained()]
        self._backlog += _joined(groups)
        return None in groups

    def _drained(self) -> Iterable[list[_Item] | None]:
        while not self._queue.empty():
            yield self._queue.get()

    def _sync_due(self) -> float:
        """Returns when the next sync is due."""
        if self._is_urgent:
            return self._synced_at + _SYNC_INTERVAL_S
        return self._unsynced_since + _LAZY_SYNC_S

    def _write(self) -> None:
        """Writes the backlog, which stays where it cannot."""
        self._written_at = time.monotonic()
        items = self._backlog
        bodies = [encode(item.entry) for item in items]
        try:
            if self._file is None:
                self._file = self._next_file()
            self._file.append(b"".join(bodies))
        except OSError as error:
            self._fail(error)
            if self._file is not None and (self._file.is_torn or error.errno == errno.EFBIG):
                self._leave_file()
            return
        if not self._unsynced:
            self._unsynced_since = self._written_at
        self._backlog = []
        self._unsynced += items
        self._is_urgent |= any(item.is_end for item in items)
        for item, body in zip(items, bodies, strict=True):
            self._note_open(item, body)
        self._tell([item for item in items if not item.is_end], is_written=True)

    def _note_open(self, item: _Item, body: bytes) -> None:
        """Notes what the next file must begin with: streams that have not ended."""
        record_id = item.entry.record_id
        if isinstance(item.entry, Mark):
            if record_id in self._open:
                self._open[record_id][1:] = [body]
        elif item.is_end:
            self._open.pop(record_id, None)
        else:
            self._open[record_id] = [body]

    def _leave_file(self) -> None:
        """Ends the file, on the disk; the next entry begins another."""
        self._sync()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_file(self) -> _File:
        """Begins the next file, with all that is known of the streams that have not ended.

        So no file is needed any more once its ends are in the store.

        Raises:
            OSError: it could not.
        """
        head = b"".join([FILE_MAGIC, *(body for bodies in self._open.values() for body in bodies)])
        path = self._folder.file(self._number + 1)
        file = _File.create(path, head)
        try:
            self._folder.sync()
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._number += 1
        return file

    def _sync(self) -> None:
        """Waits until the disk has what was written, and tells those who wait for it."""
        if self._file is None or not self._unsynced:
            return
        try:
            self._file.sync()
        except OSError as error:
            # What the kernel could not write it may have dropped: it is written again, elsewhere.
            self._backlog = [*self._unsynced, *self._backlog]
            self._unsynced = []
            self._close_file()
            self._fail(error)
            return
        items, self._unsynced = self._unsynced, []
        self._is_urgent = False
        self._synced_at = time.monotonic()
        ends = [item for item in items if item.is_end]
        self.shipper.allow((self._number, self._file.n_bytes), has_ends=bool(ends))
        self.counts.n_records += len(ends)  # then: who waits for them sums what is allowed
        self._note_success()
        self._tell(ends, is_written=True)

    def _note_success(self) -> None:
        """Takes note that the journal can be written, if nothing waits for it."""
        if self._backlog or self._unsynced:
            return
        self.counts.n_pending = 0
        if self.counts.is_failing:
            self.counts.is_failing = False
            _log.warning("the usage journal can be written again")

    def _fail(self, error: OSError) -> None:
        """Takes note that nothing can be written now. Whoever waits is told; the entries stay."""
        if not self.counts.is_failing:
            _log.error(
                "USAGE IS NOT WRITTEN: the journal in %s fails (%s); what is known waits in memory"
                " and is tried again",
                self._folder.path,
                error.strerror or error,
            )
        self.counts.is_failing = True
        self.counts.n_journal_failures += 1
        self._release(self._backlog)
        self._backlog = _without_old_marks(self._backlog)
        self.counts.n_pending = len(self._backlog)

    def _release(self, items: list[_Item]) -> None:
        self._tell(items, is_written=False)

    def _tell(self, items: list[_Item], *, is_written: bool) -> None:
        waiting = [item.done for item in items if item.done is not None]
        if not waiting:
            return
        for item in items:
            item.done = None
        # The event loop may be over, at the end of the process: then nobody waits either.
        with contextlib.suppress(RuntimeError):
            self._post(functools.partial(_call_all, waiting, is_written))


class _File:
    """A file that only grows. What an attempt has torn is cut off before the next one.

    Args:
        path: Where it is.
        fd: Opened to append.
        n_bytes: Its size.
    """

    def __init__(self, path: Path, fd: int, n_bytes: int) -> None:
        self._path = path
        self._fd = fd
        self.n_bytes = n_bytes
        """Bytes of the file's whole entries."""
        self.is_torn = False
        """Whether more than these may be there, so that it must not be used."""

    @classmethod
    def create(cls, path: Path, head: bytes) -> _File:
        """Makes a file that begins with some bytes and is on the disk.

        Raises:
            OSError: it could not; there is no such file then.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = cls(path, os.open(path, flags, 0o600), 0)
        try:
            file.append(head)
            file.sync()
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return file

    def append(self, content: bytes) -> None:
        """Adds bytes, all or none.

        Raises:
            OSError: it could not.
        """
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            try:
                os.ftruncate(self._fd, self.n_bytes)
            except OSError:
                self.is_torn = True
            raise
        self.n_bytes += len(content)

    def sync(self) -> None:
        """Waits until the disk has all of it, where it can be found again.

        Raises:
            OSError: it never will.
        """
        os.fdatasync(self._fd)
        os.stat(self._path)  # whoever has removed it has removed what it had

    def close(self) -> None:
        """Closes it. Harmless when done twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # it is closed all the same, and was synced before
                os.close(fd)


def _joined(groups: Iterable[list[_Item] | None]) -> list[_Item]:
    """Returns the entries of groups, in their order."""
    return [item for group in groups if group is not None for item in group]


def _without_old_marks(items: list[_Item]) -> list[_Item]:
    """Returns entries without the marks that a later one makes needless."""
    kept: list[_Item] = []
    seen: set[str] = set()
    for item in reversed(items):
        record_id = item.entry.record_id
        if isinstance(item.entry, Mark):
            if record_id in seen:
                continue
            seen.add(record_id)
        elif item.is_end:
            seen.add(record_id)
        kept.append(item)
    kept.reverse()
    return kept


def _tell_lost(items: Iterable[_Item | None]) -> None:
    """Logs what streams are to be billed whose records are nowhere else."""
    ends = [item.entry for item in items if item is not None and item.is_end]
    for record in ends[:_N_TOLD_MAX]:
        assert isinstance(record, UsageRecord)
        _log.critical(
            "lost usage record %s: tenant=%s key=%s request_id=%s outcome=%s prompt_tokens=%d"
            " output_tokens=%d",
            record.record_id,
            record.tenant,
            record.key_id or "-",
            record.request_id,
            record.outcome,
            record.n_prompt,
            record.n_output,
        )
    if len(ends) > _N_TOLD_MAX:
        _log.critical("and %d lost usage records more", len(ends) - _N_TOLD_MAX)


def _call_all(waiting: list[_Done], is_written: bool) -> None:
    for done in waiting:
        done(is_written)
