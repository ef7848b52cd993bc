"""The server's lines: written by threads of their own, so that a reader who is stuck stops nothing.

A line is put into a bounded queue; when that is full, lines are dropped and counted. Lines of the
log hold no text of a client: ids, names, counts and reasons only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["LineQueue", "logging_to"]

_N_LINES_MAX = 10_000
_CLOSE_S = 2.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LineQueue(io.RawIOBase):
    """Takes lines at once, and writes them to a descriptor for the time of a block.

    Args:
        descriptor: Where to.
        n_lines_max: Lines that may wait to be written.
    """

    def __init__(self, descriptor: int, n_lines_max: int = _N_LINES_MAX) -> None:
        super().__init__()
        self.name = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(n_lines_max)
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self.n_dropped = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def writable(self) -> bool:
        """Returns that it can be written to."""
        return True

    def isatty(self) -> bool:
        """Returns whether it ends at a screen."""
        return os.isatty(self.name)

    def write(self, line: ReadableBuffer, /) -> int:
        """Puts a line into the queue, or counts it as dropped; returns its bytes."""
        data = bytes(line)
        try:
            self._lines.put_nowait(data)
        except queue.Full:
            self.n_dropped += 1
        return len(data)

    def close(self) -> None:
        """Takes no more, and waits a moment for what is not written yet. Harmless when done twice.

        A stuck reader keeps the process for two seconds, and no longer.
        """
        if not self.closed and self._thread.is_alive():
            give_up_at = time.monotonic() + _CLOSE_S
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(max(0.0, give_up_at - time.monotonic()))
        super().close()

    def _write_all(self) -> None:
        n_told = 0
        while (line := self._lines.get()) is not None:
            self._write(line)
            if (n_dropped := self.n_dropped) > n_told:
                n_new, n_told = n_dropped - n_told, n_dropped
                self._write(b"%d lines of the log were dropped: nobody reads it\n" % n_new)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            while data:
                try:
                    data = data[os.write(self.name, data) :]
                except BlockingIOError:  # it was made not to block, and is full
                    self._await_room()

    def _await_room(self) -> None:
        """Waits until the descriptor takes something, or has nobody at its other end."""
        poll = select.poll()
        poll.register(self.name, select.POLLOUT)
        poll.poll()


@contextlib.contextmanager
def logging_to(stream: TextIO, level: str) -> Iterator[None]:
    """Writes the log to a stream for the time of a block.

    Args:
        stream: One that takes lines at once: its writer is whoever logs.
        level: Minimum severity that is logged, such as "info".
    """
    root, handler = logging.getLogger(), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT))
    before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
