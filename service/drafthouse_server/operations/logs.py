"""The server's log: written by a thread of its own, so that a reader who is stuck stops nothing.

A line is put into a bounded queue; when that is full, lines are dropped and counted. Lines hold no
text of a client: ids, names, counts and reasons only.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import sys
import threading
from types import TracebackType
from typing import Self

__all__ = ["LogQueue"]

_N_LINES_MAX = 10_000
_CLOSE_S = 2.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Put(logging.handlers.QueueHandler):
    """Puts lines into the queue, and counts those for which there is no room."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self._lines = lines
        self.n_dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Puts a line into the queue, or counts it as dropped."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.n_dropped += 1


class LogQueue:
    """Writes the log to a descriptor for the time of a block.

    Args:
        level: Minimum severity that is logged, such as "info".
        descriptor: Where to; stderr when not given.
        n_lines_max: Lines that may wait to be written.
    """

    def __init__(
        self, level: str, descriptor: int | None = None, n_lines_max: int = _N_LINES_MAX
    ) -> None:
        self._level = level.upper()
        # Not Python's own stream: its lock would be held by a thread that is stuck.
        self._descriptor = sys.stderr.fileno() if descriptor is None else descriptor
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(n_lines_max)
        self._put = _Put(self._lines)
        self._put.setFormatter(logging.Formatter(_FORMAT))
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._level_before = logging.WARNING

    @property
    def n_dropped(self) -> int:
        """Lines for which there was no room."""
        return self._put.n_dropped

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._level_before = root.level
        root.setLevel(self._level)
        root.addHandler(self._put)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def flush(self) -> None:
        """Waits a moment for what is not written yet: what is printed then stands behind it."""
        changed = self._lines.all_tasks_done
        with changed:
            changed.wait_for(lambda: not self._lines.unfinished_tasks, _CLOSE_S)

    def close(self) -> None:
        """Logs no more, and waits a moment for what is not written yet. Harmless when done twice.

        A stuck reader keeps the process for two seconds, and no longer.
        """
        root = logging.getLogger()
        if self._put in root.handlers:
            root.removeHandler(self._put)
            root.setLevel(self._level_before)
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        n_told = 0
        while (record := self._lines.get()) is not None:
            self._write(record.getMessage())
            self._lines.task_done()
            if (n_dropped := self._put.n_dropped) > n_told:
                self._write(f"{n_dropped - n_told} lines of the log were dropped: nobody reads it")
                n_told = n_dropped

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # nobody reads it any more
            while data:
                data = data[os.write(self._descriptor, data) :]
