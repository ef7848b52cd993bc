"""The write-ahead log of an SQLite file that others hold while it is opened first."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafthouse_server.tenancy.store import Store
from drafthouse_server.usage.stores import SqliteUsageStore
from drafthouse_server.usage.write_ahead import write_ahead


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    path.touch(0o600)
    return path


def connect(path: Path) -> contextlib.closing[sqlite3.Connection]:
    connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    return contextlib.closing(connection)


def open_store(path: Path) -> None:
    Store.open(f"sqlite:///{path}").close()


def open_usage(path: Path) -> None:
    store = SqliteUsageStore(path)
    store.add([])
    store.close()


@pytest.mark.parametrize("open_it", [open_store, open_usage])
@pytest.mark.parametrize("held", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_file_that_another_one_writes_first_is_waited_for(
    path: Path, open_it: Callable[[Path], None], held: str
) -> None:
    """Of several that opened a new store at once some failed: database is locked."""
    with ThreadPoolExecutor(1) as thread, connect(path) as other:
        other.execute(f"BEGIN {held}")
        opened = thread.submit(open_it, path)
        with pytest.raises(TimeoutError):  # another one writes: it cannot be done, and waits
            opened.result(0.3)
        other.execute("COMMIT")
        opened.result(60)
    with connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_file_that_is_held_for_longer_is_told(path: Path) -> None:
    with connect(path) as other, connect(path) as mine:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            write_ahead(mine, 0.05)
        other.execute("COMMIT")
        write_ahead(mine, 0.05)
        assert mine.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert mine.execute("PRAGMA synchronous").fetchone() == (2,)


def test_what_is_no_lock_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"no database" * 1000)
    with connect(path) as mine, pytest.raises(sqlite3.DatabaseError, match="not a database"):
        write_ahead(mine, 3600.0)
