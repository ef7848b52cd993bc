"""The store of usage records of a server without a database: an SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drafthouse_server.usage.folder import JournalFolder
from drafthouse_server.usage.record import (
    UsageCursor,
    UsageQuery,
    UsageRecord,
    UsageStoreFailed,
    cursor_of,
)
from drafthouse_server.usage.write_ahead import write_ahead

__all__ = ["STORE_NAME", "SqliteUsageStore", "list_all"]

STORE_NAME = "usage.sqlite3"
"""Name of the store's file in the folder of a journal."""

_BUSY_S = 5.0
"""Seconds for which another process may hold the file."""

_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL"}
_FIELDS = dataclasses.fields(UsageRecord)
_values_of = operator.attrgetter(
    *(field.name for field in _FIELDS)
)  # astuple takes 50 times longer
_NAMES = ", ".join(field.name for field in _FIELDS)
_COLUMNS = ", ".join(f"{field.name} {_TYPES[str(field.type)]} NOT NULL" for field in _FIELDS)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS usage ({_COLUMNS}, PRIMARY KEY (record_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_of_tenant ON usage (tenant, ended_at, record_id);
CREATE INDEX IF NOT EXISTS usage_by_end ON usage (ended_at, record_id);
"""
_INSERT = f"INSERT OR IGNORE INTO usage ({_NAMES}) VALUES ({', '.join('?' * len(_FIELDS))})"  # noqa: S608  # names of ours
# No stream ends before it begins: by its end, which has an index, it is found.
_SUM = (
    "SELECT tenant,"
    " sum(n_output + CASE WHEN queue_s > 0 OR n_output > 0 THEN n_prompt ELSE 0 END) FROM usage"
    " WHERE ended_at >= ? AND started_at >= ? GROUP BY tenant"
)


class SqliteUsageStore:
    """Keeps records in an SQLite file.

    Args:
        path: The file; it is made where it does not exist, unless it is only read.
        is_read_only: Whether nothing is added.

    Thread:
        Any, several at once.
    """

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        self._path = path
        self._is_read_only = is_read_only
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def add(self, records: Sequence[UsageRecord]) -> None:
        """Keeps records, all or none of them; those that it has already change nothing.

        Raises:
            UsageStoreFailed: It kept none.
        """
        rows = [_values_of(record) for record in records]
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_INSERT, rows)
            connection.execute("COMMIT")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Gives the connection for the time of a block; one that fails is given up.

        Raises:
            UsageStoreFailed: it failed. A transaction that it had begun has not happened.
        """
        with self._lock:
            try:
                if self._connection is not None and not self._path.exists():
                    self._connection.close()  # else it would add to a file that nobody can open
                    self._connection = None
                if self._connection is None:
                    self._connection = self._connect()
                yield self._connection
            except (sqlite3.Error, OSError) as error:
                if self._connection is not None:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.close()
                    self._connection = None
                raise UsageStoreFailed(f"{self._path}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if not self._is_read_only:
            # SQLite would make it for all to read. One that is there must not be opened by us:
            # closing it would take SQLite's locks from this process (POSIX).
            with contextlib.suppress(OSError):  # SQLite says what is wrong with it
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode={'ro' if self._is_read_only else 'rw'}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            if not self._is_read_only:
                write_ahead(connection, _BUSY_S)
                connection.executescript(_SCHEMA)
            undo.pop_all()
        return connection

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records by their end, and where that is the same, by their id.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        text, values = _select(query)
        with self._connected() as connection:
            return [UsageRecord(*row) for row in connection.execute(text, values)]

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of streams that began since a time. See `UsageStore.sum_tokens`.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        with self._connected() as connection:
            return dict(connection.execute(_SUM, [since, since]))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _select(query: UsageQuery) -> tuple[str, list[object]]:
    """Returns the text and the values of a query."""
    asked: list[tuple[str, object]] = [
        ("tenant = ?", query.tenant),
        ("key_id = ?", query.key_id),
        ("model = ?", query.model),
        ("ended_at >= ?", query.since),
        ("ended_at < ?", query.until),
    ]
    conditions = [text for text, value in asked if value is not None]
    values = [value for _, value in asked if value is not None]
    if isinstance(query.after, UsageCursor):
        conditions.append("(ended_at, record_id) > (?, ?)")
        values += [query.after.ended_at, query.after.record_id]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    n_max = -1 if query.n_max is None else query.n_max
    text = f"SELECT {_NAMES} FROM usage{where} ORDER BY ended_at, record_id LIMIT ?"  # noqa: S608  # texts of ours
    return text, [*values, n_max]


def list_all(folder: Path, query: UsageQuery) -> Sequence[UsageRecord]:
    """Returns the records of a journal's folder, with a server that writes there or without.

    Raises:
        UsageStoreFailed: what is there cannot be read.
    """
    ends: dict[str, UsageRecord] = {}
    try:
        for entry in JournalFolder(folder).entries():
            if isinstance(entry, UsageRecord) and entry.outcome:
                ends.setdefault(entry.record_id, entry)
    except OSError as error:
        raise UsageStoreFailed(f"{folder}: {error.strerror or error}") from error
    found = {record_id: record for record_id, record in ends.items() if query.matches(record)}
    path = folder / STORE_NAME
    if path.exists():
        # After the journal: what moved from there to here in between is in both.
        store = SqliteUsageStore(path, is_read_only=True)
        with contextlib.closing(store):
            found.update((record.record_id, record) for record in store.find(query))
    return sorted(found.values(), key=cursor_of)[: query.n_max]
