"""SQLite's write-ahead log, turned on also while others open the same file."""

from __future__ import annotations

import sqlite3
import time

__all__ = ["write_ahead"]

_PAUSE_S = 0.01


def write_ahead(connection: sqlite3.Connection, wait_s: float) -> None:
    """Turns on the write-ahead log of a connection's file, and has every commit be durable.

    Only who turns it on first needs the file for itself, and while another one writes SQLite says
    at once that it is locked, whatever the connection's time to wait.

    Args:
        connection: In no transaction.
        wait_s: How long to try again, in seconds.

    Raises:
        sqlite3.Error: The file cannot be used, or others held it for all that time.
    """
    give_up_at = time.monotonic() + wait_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() >= give_up_at:
                raise
        time.sleep(_PAUSE_S)
    connection.execute("PRAGMA synchronous = FULL")
