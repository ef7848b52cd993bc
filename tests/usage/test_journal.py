"""The journal: what streams take is there after any end, once, and on its way to the store."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.usage_store import MemoryUsageStore

from drafthouse_server.errors import StartupError
from drafthouse_server.usage import journal as journal_module
from drafthouse_server.usage import shipping
from drafthouse_server.usage.folder import JournalFolder
from drafthouse_server.usage.frames import FILE_MAGIC, N_FRAME_BYTES_MAX, Entry, Mark, encode
from drafthouse_server.usage.journal import Journal
from drafthouse_server.usage.record import (
    LOST,
    UsageQuery,
    UsageRecord,
    UsageStoreFailed,
    make_record_id,
)
from drafthouse_server.usage.stores import list_all

WAIT_S = 100.0


def id_of(number: int) -> str:
    return make_record_id(number, bytes(10))


def start(number: int) -> UsageRecord:
    return UsageRecord(id_of(number), "t", "k", "", "m", f"r{number}", float(number), 5)


def mark(number: int, n_output: int) -> Mark:
    return Mark(id_of(number), number + 0.5, n_output, 2, 9, 6)


def end(number: int, n_output: int = 0) -> UsageRecord:
    return UsageRecord(
        *(id_of(number), "t", "k", "", "m", f"r{number}", float(number), 5),
        ended_at=number + 1.0,
        outcome="stop",
        n_output=n_output,
    )


class Told:
    """What a journal has told of one entry; calls come on its thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.calls: list[bool] = []

    def __call__(self, is_written: bool) -> None:
        self.calls.append(is_written)
        self._event.set()

    def wait(self) -> bool:
        assert self._event.wait(WAIT_S), "nothing was told"
        return self.calls[0]


class AwayStore(MemoryUsageStore):
    """A store that a test may take away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.n_added = 0

    def add(self, records: Sequence[UsageRecord]) -> None:
        if self.is_away:
            raise UsageStoreFailed("away")
        self.n_added += len(records)
        super().add(records)


def open_journal(path: Path, store: MemoryUsageStore | None = None, **options: Any) -> Journal:
    return Journal.open(path, store or MemoryUsageStore(), post=lambda call: call(), **options)


def write_all(journal: Journal, entries: Sequence[Entry]) -> None:
    """Has entries written, one group each."""
    for entry in entries:
        told = Told()
        journal.write(entry, told)
        assert told.wait()


def read(path: Path) -> dict[str, tuple[str, int]]:
    """Returns outcome and tokens of every record in the files."""
    found = list_all(path, UsageQuery())
    return {record.request_id: (record.outcome, record.n_output) for record in found}


def kill(path: Path, content: bytes) -> None:
    """Leaves what a process leaves that is killed when it has written this."""
    path.mkdir(exist_ok=True)
    JournalFolder(path).file(1).write_bytes(FILE_MAGIC + content)


def joined(*entries: Entry) -> bytes:
    return b"".join(encode(entry) for entry in entries)


def counted(store: MemoryUsageStore) -> dict[str, tuple[str, int]]:
    records = store.find(UsageQuery())
    return {record.request_id: (record.outcome, record.n_output) for record in records}


def test_ends_go_to_the_store_and_nothing_is_left(tmp_path: Path) -> None:
    store = MemoryUsageStore()
    journal = open_journal(tmp_path, store)
    write_all(journal, [start(1), mark(1, 32), end(1, 40), start(2), end(2, 7)])
    assert journal.counts.n_records == 2
    journal.close()
    assert counted(store) == {"r1": ("stop", 40), "r2": ("stop", 7)}
    assert not journal.is_failing


def test_an_end_is_told_when_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        calls.append("sync")
        real(fd)

    def done(is_written: bool) -> None:
        calls.append("told")
        told(is_written)

    monkeypatch.setattr(os, "fdatasync", sync)
    journal = open_journal(tmp_path)
    told = Told()
    journal.write(start(1))
    journal.write(end(1), done)
    assert told.wait()
    journal.close()
    assert "sync" in calls[: calls.index("told")]


@pytest.mark.parametrize("n_marks", [0, 1, 3])
def test_a_stream_without_an_end_is_lost_and_billed_its_last_mark(
    tmp_path: Path, n_marks: int, caplog: pytest.LogCaptureFixture
) -> None:
    entries: list[Entry] = [start(1), end(1, 40), start(2)]
    entries += [mark(2, 32 * (i + 1)) for i in range(n_marks)]
    kill(tmp_path, b"".join(map(encode, entries)))
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 40), "r2": (LOST, 32 * n_marks)}
    assert "1 streams were cut off" in caplog.text
    lost = store.find(UsageQuery())[-1 if n_marks else 0]
    if n_marks:
        assert (lost.ended_at, lost.n_reused, lost.n_drafted, lost.n_accepted) == (2.5, 2, 9, 6)


def test_tokens_of_streams_that_a_crash_has_cut_off_are_added_up(tmp_path: Path) -> None:
    kill(tmp_path, joined(start(7), mark(7, 32), start(8), end(8, 40), start(3), end(3, 40)))
    journal = open_journal(tmp_path, MemoryUsageStore())
    assert journal.sum_tokens(7.0) == {"t": 5 + 32 + 5 + 40}
    journal.close()


def test_replay_is_idempotent(tmp_path: Path) -> None:
    kill(tmp_path, joined(start(1), mark(1, 32), start(2), end(2, 5), start(1)))
    store = AwayStore()
    store.is_away = True  # so that every start finds all files
    for _ in range(3):
        open_journal(tmp_path, store).close()
        assert read(tmp_path) == {"r1": (LOST, 32), "r2": ("stop", 5)}
    store.is_away = False
    for _ in range(3):
        open_journal(tmp_path, store).close()
        assert counted(store) == {"r1": (LOST, 32), "r2": ("stop", 5)}
    assert store.n_added == 2


def test_a_start_that_is_repeated_after_its_end_changes_nothing(tmp_path: Path) -> None:
    """As a crash leaves it that comes while an entry which may not be on the disk is repeated."""
    kill(tmp_path, joined(start(1), end(1, 40), start(1)))
    store = AwayStore()
    store.is_away = True
    open_journal(tmp_path, store).close()
    assert read(tmp_path) == {"r1": ("stop", 40)}
    store.is_away = False
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 40)}


def test_a_tail_torn_at_every_byte_is_cut_off_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = joined(start(1), mark(1, 32))
    last = encode(end(1, 40))
    for n_kept in range(len(last) + 1):
        path = tmp_path / str(n_kept)
        caplog.clear()
        kill(path, whole + last[:n_kept])
        store = MemoryUsageStore()
        open_journal(path, store).close()
        is_whole = n_kept == len(last)
        assert counted(store) == {"r1": ("stop", 40) if is_whole else (LOST, 32)}
        assert (f"{n_kept} torn bytes" in caplog.text) == (0 < n_kept < len(last))


def test_damage_in_the_middle_costs_no_other_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [encode(end(number, number)) for number in range(1, 5)]
    parts[1] = bytes(len(parts[1]))
    kill(tmp_path, b"".join(parts))
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {f"r{n}": ("stop", n) for n in (1, 3, 4)}
    assert f"{len(parts[1])} bytes at" in caplog.text


def test_files_are_rotated_and_removed_when_the_store_has_them(tmp_path: Path) -> None:
    store = AwayStore()
    store.is_away = True
    journal = open_journal(tmp_path, store, n_file_bytes=2000)
    write_all(journal, [start(0), mark(0, 32)])
    for number in range(1, 40):
        write_all(journal, [start(number), end(number, number)])
    assert len(JournalFolder(tmp_path).numbers()) >= 3
    store.is_away = False
    write_all(journal, [start(40)])
    journal.close()
    assert len(JournalFolder(tmp_path).numbers()) == 1
    # The stream that has gone on through all files is in the last one.
    again = open_journal(tmp_path, store)
    again.close()
    found = counted(store)
    assert found.pop("r0") == (LOST, 32)
    assert found.pop("r40") == (LOST, 0)
    assert found == {f"r{number}": ("stop", number) for number in range(1, 40)}


def test_more_than_one_delivery_holds_goes_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "_N_BYTES", 1000)
    monkeypatch.setattr(shipping, "N_FRAME_BYTES_MAX", 900)
    entries: list[Entry] = [entry for n in range(300) for entry in (start(n), end(n, n))]
    kill(tmp_path, b"".join(map(encode, entries)))
    store = AwayStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {f"r{number}": ("stop", number) for number in range(300)}
    assert store.n_added == 300


@pytest.mark.parametrize("n_cut", [1, 11, 60])
def test_a_record_behind_long_damage_that_a_delivery_cuts_goes_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cut: int
) -> None:
    n_before = len(FILE_MAGIC) + N_FRAME_BYTES_MAX
    monkeypatch.setattr(shipping, "_N_BYTES", n_before + n_cut)
    kill(tmp_path, bytes(N_FRAME_BYTES_MAX) + joined(end(1, 3), end(2, 4)))
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 3), "r2": ("stop", 4)}
    assert not list(tmp_path.glob("usage-*.journal"))


def test_a_start_after_a_long_absence_of_the_store_keeps_no_records_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept all of them, which are gigabytes after a week."""
    monkeypatch.setattr(shipping, "_N_BYTES", 10_000)
    n_files, n_streams = 20, 500
    folder = JournalFolder(tmp_path)
    for number in range(1, n_files + 1):
        ids = range(number * n_streams, (number + 1) * n_streams)
        content = b"".join(joined(start(n), mark(n, 9), end(n, 9)) for n in ids)
        folder.file(number).write_bytes(FILE_MAGIC + content)
    store = AwayStore()
    store.is_away = True
    tracemalloc.start()
    try:
        journal = open_journal(tmp_path, store)
        _, n_peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_peak_bytes < 5 * folder.size(1), "a file is read at once, and no more"
    store.is_away = False
    journal.close()
    assert store.n_added == n_files * n_streams


class HeldStore(MemoryUsageStore):
    """A store that takes records when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.may_add = threading.Event(), threading.Event()

    def add(self, records: Sequence[UsageRecord]) -> None:
        self.is_held.set()
        assert self.may_add.wait(WAIT_S)
        super().add(records)


def test_a_list_waits_for_no_store_that_is_far_behind_and_is_never_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until the store had all that had come in a week."""
    kill(tmp_path, joined(start(1), end(1, 3), start(2), end(2, 9)))
    monkeypatch.setattr(shipping, "_CATCH_UP_S", WAIT_S)
    store = HeldStore()
    journal = open_journal(tmp_path, store)
    assert store.is_held.wait(WAIT_S)
    with monkeypatch.context() as impatient:
        impatient.setattr(shipping, "_CATCH_UP_S", 0.0)
        with pytest.raises(UsageStoreFailed, match=r"usage-00000001\.journal"):
            journal.shipper.find(UsageQuery())
    store.may_add.set()
    assert [record.n_output for record in journal.shipper.find(UsageQuery())] == [3, 9]
    journal.close()


def test_a_store_that_goes_away_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = AwayStore()
    journal = open_journal(tmp_path, store)
    store.is_away = True
    write_all(journal, [start(1), end(1, 3)])
    with pytest.raises(UsageStoreFailed):
        journal.shipper.find(UsageQuery())
    assert journal.counts.n_store_failures > 0
    assert "usage waits in the journal" in caplog.text
    with monkeypatch.context() as late:
        late.setattr(journal.shipper, "_give_up_at", 0.0)  # as at an end that has no more time
        with pytest.raises(UsageStoreFailed):
            journal.shipper.find(UsageQuery())
    assert "has all records again" not in caplog.text
    store.is_away = False
    write_all(journal, [start(2), end(2, 4)])
    assert [record.n_output for record in journal.shipper.find(UsageQuery())] == [3, 4]
    assert "has all records again" in caplog.text
    journal.close()


class FullDisk:
    """Lets writes and syncs fail, after some bytes, as long as a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_bytes_left: int | None = None
        self.is_sync_failing = False
        self._write, self._sync = os.write, os.fdatasync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fdatasync", self.sync)

    def write(self, fd: int, content: Any) -> int:
        if self.n_bytes_left is None:
            return self._write(fd, content)
        if not self.n_bytes_left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        n_bytes = self._write(fd, bytes(content)[: self.n_bytes_left])
        self.n_bytes_left -= n_bytes
        return n_bytes

    def sync(self, fd: int) -> None:
        if self.is_sync_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)


@pytest.mark.parametrize("n_bytes_left", [0, 1, 100, 150])
def test_what_a_full_disk_does_not_take_waits_and_is_written_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    n_bytes_left: int,
) -> None:
    caplog.set_level(logging.WARNING)
    store = MemoryUsageStore()
    disk = FullDisk(monkeypatch)
    journal = open_journal(tmp_path, store)
    write_all(journal, [start(1)])
    disk.n_bytes_left = n_bytes_left
    last = Told()
    for entry in (mark(1, 32), mark(1, 64), start(2), end(2, 9)):
        journal.write(entry)
    journal.write(end(1, 70), last)
    assert last.wait() is False
    assert journal.is_failing
    assert "USAGE IS NOT WRITTEN" in caplog.text
    assert journal.counts.n_pending >= 1
    disk.n_bytes_left = None
    write_all_after_failure(journal, start(3))
    write_all(journal, [end(3, 1)])
    assert journal.counts.n_pending == 0
    assert last.calls == [False]
    journal.close()
    assert counted(store) == {"r1": ("stop", 70), "r2": ("stop", 9), "r3": ("stop", 1)}
    assert "can be written again" in caplog.text


@pytest.mark.parametrize("n_bytes_left", [0, 1, 12, 100, 200, 300, 400, 500])
def test_what_a_crash_cut_off_survives_a_start_that_cannot_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_bytes_left: int
) -> None:
    """The old files were removed at once, with all that was known of these streams."""
    kill(tmp_path, joined(start(1), end(1, 40), start(2), mark(2, 32), start(3)))
    store = MemoryUsageStore()
    with monkeypatch.context() as patch:
        disk = FullDisk(patch)
        disk.n_bytes_left = n_bytes_left
        open_journal(tmp_path, store).close()
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 40), "r2": (LOST, 32), "r3": (LOST, 0)}


def test_an_end_of_a_lost_stream_is_a_time_that_can_be_asked_for(tmp_path: Path) -> None:
    """Times on the wire have microseconds: a list that goes on from this one missed it."""
    kill(tmp_path, joined(start(1), Mark(id_of(1), 1.2345678, 7, 0, 0, 0)))
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    (lost,) = store.find(UsageQuery())
    assert lost.ended_at == 1.234568


def write_all_after_failure(journal: Journal, entry: Entry) -> None:
    """Has an entry written by a journal that may fail once more before it notices."""
    told = Told()
    journal.write(entry, told)
    told.wait()


def test_what_a_failed_sync_may_have_dropped_is_written_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryUsageStore()
    disk = FullDisk(monkeypatch)
    journal = open_journal(tmp_path, store)
    write_all(journal, [start(1), start(2), end(2, 9)])
    disk.is_sync_failing = True
    told = Told()
    journal.write(end(1, 70), told)
    assert told.wait() is False
    first = JournalFolder(tmp_path).numbers()
    disk.is_sync_failing = False
    write_all_after_failure(journal, start(3))
    write_all(journal, [end(3, 1)])
    assert JournalFolder(tmp_path).numbers()[-1] > first[-1]
    journal.close()
    assert counted(store) == {"r1": ("stop", 70), "r2": ("stop", 9), "r3": ("stop", 1)}


class Unsynced:
    """A journal with an end that is written and not synced yet."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryUsageStore()
        self.disk = FullDisk(monkeypatch)
        self.told = Told()
        self.journal = open_journal(path, self.store)
        write_all(self.journal, [start(1), start(2), end(1, 3)])
        monkeypatch.setattr(journal_module, "_SYNC_INTERVAL_S", 1e6)
        self.journal.write(end(2, 9), self.told)
        write_all(self.journal, [start(3)])
        assert not self.told.calls


def test_what_was_written_before_the_disk_was_full_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client waited for its result for as long as the disk was full."""
    caplog.set_level(logging.WARNING)
    found = Unsynced(tmp_path, monkeypatch)
    journal, disk = found.journal, found.disk
    disk.n_bytes_left = 0
    refused = Told()
    journal.write(end(3, 4), refused)
    assert refused.wait() is False
    monkeypatch.setattr(journal_module, "_SYNC_INTERVAL_S", 0.0)
    assert found.told.wait() is True
    assert journal.watch(), "there is still something that cannot be written"
    assert journal.counts.n_pending == 1
    assert "can be written again" not in caplog.text
    disk.n_bytes_left = None
    journal.close()
    assert counted(found.store) == {"r1": ("stop", 3), "r2": ("stop", 9), "r3": ("stop", 4)}
    assert not journal.is_failing
    assert journal.counts.n_pending == 0


def test_what_was_written_before_the_disk_was_full_is_not_told_as_lost_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = Unsynced(tmp_path, monkeypatch)
    found.disk.n_bytes_left = 0
    found.journal.write(end(3, 4))
    found.journal.close()
    assert found.told.wait() is True
    assert counted(found.store) == {"r1": ("stop", 3), "r2": ("stop", 9)}
    assert f"lost usage record {id_of(3)}" in caplog.text
    assert f"lost usage record {id_of(2)}" not in caplog.text


def spoil(disk: FullDisk, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Lets the next write fail such that its file must not be used any more."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    if how == "it may not grow":
        monkeypatch.setattr(os, "write", refuse)
    else:
        disk.n_bytes_left = 10
        monkeypatch.setattr(os, "ftruncate", refuse)


@pytest.mark.parametrize("how", ["it may not grow", "it is torn"])
def test_a_file_that_must_not_be_used_any_more_is_synced_before_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What was written to it was told when another file was synced."""
    found = Unsynced(tmp_path, monkeypatch)
    with monkeypatch.context() as while_full:
        spoil(found.disk, while_full, how)
        found.journal.write(end(3, 4))
        assert found.told.wait() is True, "its file is on the disk, and there is no other"
        assert found.journal.is_failing
    found.disk.n_bytes_left = None
    found.journal.close()
    assert counted(found.store) == {"r1": ("stop", 3), "r2": ("stop", 9), "r3": ("stop", 4)}


def test_what_a_file_that_cannot_be_synced_had_is_written_again_when_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Unsynced(tmp_path, monkeypatch)
    found.disk.is_sync_failing = True
    with monkeypatch.context() as while_full:
        spoil(found.disk, while_full, "it is torn")
        found.journal.write(end(3, 4))
        assert found.told.wait() is False
    JournalFolder(tmp_path).file(1).unlink()  # the disk has dropped it
    found.disk.is_sync_failing, found.disk.n_bytes_left = False, None
    found.journal.close()
    assert {"r2", "r3"} <= counted(found.store).keys()


def opened(path: Path) -> list[str]:
    """Returns the files of a folder, and the folder itself, that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of this list
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in found if name.startswith(str(path)))


def test_a_file_that_cannot_be_closed_costs_no_record_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []
    real = os.close

    def close(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)  # as Linux does, whatever it tells
        if name.startswith(str(tmp_path)) and name.endswith(".journal"):
            failed.append(Path(name).name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", close)
    store = MemoryUsageStore()
    journal = open_journal(tmp_path, store, n_file_bytes=300)
    for number in range(5):
        write_all(journal, [start(number), end(number, number)])
    assert not journal.is_failing
    journal.close()
    assert counted(store) == {f"r{number}": ("stop", number) for number in range(5)}
    assert len(failed) == len(set(failed)) > 2, "each is closed, and once"
    assert opened(tmp_path) == []


def test_a_folder_that_cannot_be_synced_fails_and_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.001)
    attempts = threading.Semaphore(0)

    def refuse(_: int) -> None:
        attempts.release()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = MemoryUsageStore()
    for is_mended in (False, True):
        journal = open_journal(tmp_path, store)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", refuse)
            told = Told()
            journal.write(end(1, 3), told)
            assert told.wait() is False
            assert journal.is_failing
            for _ in range(10):
                assert attempts.acquire(timeout=WAIT_S)
            if not is_mended:
                journal.close()
        journal.close()
        assert opened(tmp_path) == []
        assert counted(store) == ({"r1": ("stop", 3)} if is_mended else {})
    assert JournalFolder(tmp_path).numbers() == [1], "none is left of an attempt"


def test_a_journal_that_never_can_be_written_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    journal = open_journal(tmp_path)
    disk.n_bytes_left = 0
    told = Told()
    journal.write(start(1), told)
    assert told.wait() is False
    journal.close()
    assert "1 entries of the usage journal are lost" in caplog.text


def test_a_disk_that_does_not_answer_is_one_that_fails_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "_STUCK_S", 0.0)
    real, is_stuck, may_go_on = os.fdatasync, threading.Event(), threading.Event()
    journal = open_journal(tmp_path)
    write_all(journal, [start(1)])

    def sync(fd: int) -> None:
        is_stuck.set()
        assert may_go_on.wait(WAIT_S)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    told = Told()
    journal.write(end(1, 3), told)
    assert is_stuck.wait(WAIT_S)
    assert journal.watch()
    assert "has not answered" in caplog.text
    may_go_on.set()
    assert told.wait()
    assert not journal.is_failing
    journal.close()


def test_a_look_at_a_disk_that_has_just_answered_leaves_no_journal_failing_for_ever(
    tmp_path: Path,
) -> None:
    """While it fails, streams are refused: no entry of theirs would ever show that it works."""
    journal = open_journal(tmp_path)
    write_all(journal, [start(1), end(1)])
    journal._busy_since = -math.inf  # read before the last turn ended, judged after
    assert journal.watch()
    give_up_at = time.monotonic() + WAIT_S
    while journal.is_failing:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
    journal.close()


def test_the_end_waits_for_no_disk_and_says_what_it_has_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for as long as the disk did, so that the server never ended."""
    journal = open_journal(tmp_path)
    write_all(journal, [start(1)])
    may_sync, is_stuck = threading.Event(), threading.Event()
    real = os.fdatasync

    def stuck(fd: int) -> None:
        is_stuck.set()
        assert may_sync.wait(WAIT_S)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", stuck)
    journal.write(end(1, 4))
    assert is_stuck.wait(WAIT_S)
    journal.write(end(2, 7))
    with caplog.at_level(logging.CRITICAL):
        journal.close(disk_s=0.05)
    assert "usage-00000001.journal may not be whole" in caplog.text
    assert f"lost usage record {id_of(1)}: tenant=t key=k request_id=r1 outcome=stop" in caplog.text
    assert "output_tokens=4" in caplog.text
    assert f"lost usage record {id_of(2)}" in caplog.text, "its end came while the disk hung"
    with pytest.raises(StartupError, match="another server writes"):
        open_journal(tmp_path)
    may_sync.set()
    journal._thread.join(WAIT_S)
    assert read(tmp_path) == {"r1": ("stop", 4), "r2": ("stop", 7)}
    journal._folder.unlock()


def test_the_store_gets_what_is_synced_when_the_disk_hangs_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk took all the time that there was; what it had might never be read again."""
    store = AwayStore()
    store.is_away = True
    journal = open_journal(tmp_path, store)
    write_all(journal, [start(1), end(1, 4)])
    may_sync, is_stuck = threading.Event(), threading.Event()

    def stuck(_: int) -> None:
        is_stuck.set()
        assert may_sync.wait(WAIT_S)

    monkeypatch.setattr(os, "fdatasync", stuck)
    journal.write(end(2, 7))
    assert is_stuck.wait(WAIT_S)
    store.is_away = False
    journal.close(disk_s=0.0, store_s=WAIT_S)
    assert counted(store) == {"r1": ("stop", 4)}
    may_sync.set()
    journal._thread.join(WAIT_S)
    journal._folder.unlock()


def test_the_end_waits_for_no_store_and_says_from_where_on_it_has_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = HeldStore()
    journal = open_journal(tmp_path, held)
    write_all(journal, [start(1), end(1, 4)])
    assert held.is_held.wait(WAIT_S)
    journal._queue.put(None)
    journal._thread.join(WAIT_S)  # the disk has answered
    journal.close(disk_s=0.0, store_s=0.0)
    assert "usage waits in the journal, from " in caplog.text
    assert "usage-00000001.journal on" in caplog.text
    held.may_add.set()
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 4)}, "the next start brings it"


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(StartupError, match="another server writes"):
        open_journal(tmp_path)
    journal.close()
    open_journal(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="choose another usage_journal"):
        open_journal(tmp_path / "file" / "journal")


def test_a_file_that_cannot_be_read_is_told_and_the_folder_is_free_again(tmp_path: Path) -> None:
    """As after a start as another user; root reads any file, but no folder."""
    path = JournalFolder(tmp_path).file(1)
    path.mkdir()
    with pytest.raises(StartupError, match=f"cannot read the usage journal.*{path.name}"):
        open_journal(tmp_path)
    path.rmdir()
    open_journal(tmp_path).close()


def test_files_that_are_not_its_own_are_left_alone(tmp_path: Path) -> None:
    names = ("usage-1.journal", "usage-\u0663.journal", "usage-00000001.journal.bak")
    for name in names:
        (tmp_path / name).write_bytes(FILE_MAGIC)
    journal = open_journal(tmp_path)
    write_all(journal, [start(1), end(1)])
    journal.close()
    assert [(tmp_path / name).read_bytes() for name in names] == [FILE_MAGIC] * 3


def test_numbers_between_two_files_are_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody has kept a copy that is named by its date."""
    kill(tmp_path, joined(start(1), end(1, 3)))
    other = JournalFolder(tmp_path).file(20261129)
    other.write_bytes(FILE_MAGIC + joined(start(2), end(2, 4)))
    asked: list[int] = []
    size = JournalFolder.size

    def note(self: JournalFolder, number: int) -> int:
        asked.append(number)
        return size(self, number)

    monkeypatch.setattr(JournalFolder, "size", note)
    store = MemoryUsageStore()
    open_journal(tmp_path, store).close()
    assert counted(store) == {"r1": ("stop", 3), "r2": ("stop", 4)}
    assert set(asked) <= {1, 20261129}
    assert not other.exists()


@pytest.mark.parametrize("is_folder_gone", [False, True])
def test_a_file_that_was_removed_while_it_is_written_is_one_that_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_folder_gone: bool
) -> None:
    folder = tmp_path / "journal"
    store = AwayStore()
    store.is_away = True
    journal = open_journal(folder, store)
    write_all(journal, [start(1), start(2), end(2, 2)])
    for path in folder.iterdir():
        path.unlink()
    if is_folder_gone:
        folder.rmdir()
    told = Told()
    journal.write(end(1, 3), told)
    assert told.wait() is False
    assert "USAGE IS NOT WRITTEN" in caplog.text
    folder.mkdir(exist_ok=True)
    write_all(journal, [start(3)])
    again = Told()
    journal.write(end(3, 4), again)
    assert again.wait()
    assert not journal.is_failing
    store.is_away = False
    journal.close()
    assert counted(store) == {"r1": ("stop", 3), "r3": ("stop", 4)}, "r2 went with its file"
    assert "usage-00000001.journal is gone" in caplog.text


def test_files_of_a_newer_version_are_left_alone(tmp_path: Path) -> None:
    kill(tmp_path, b"")
    path = JournalFolder(tmp_path).file(1)
    content = FILE_MAGIC.replace(b"1", b"2") + b"what only a newer version reads"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="another version"):
        open_journal(tmp_path)
    assert path.read_bytes() == content


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal")
    write_all(journal, [start(1), end(1)])
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "journal").glob("usage-*.journal")}
    assert modes == {0}
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
    journal.close()


def test_a_thread_that_dies_lets_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Entry) -> bytes:
        raise RuntimeError("a bug")

    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    journal = open_journal(tmp_path)
    monkeypatch.setattr(journal_module, "encode", fail)
    told: list[Told] = [Told(), Told()]
    for entry, one in zip((start(1), end(1)), told, strict=True):
        journal.write(entry, one)
        assert one.wait() is False
    assert journal.is_failing
    assert caught
    journal.close()


def test_an_event_loop_that_is_over_is_no_fault(tmp_path: Path) -> None:
    def post(_: Callable[[], None]) -> None:
        raise RuntimeError("Event loop is closed")

    journal = Journal.open(tmp_path, MemoryUsageStore(), post=post)
    journal.write(start(1), Told())
    journal.write(end(1, 3), Told())
    journal.close()
    assert journal.counts.n_records == 1
