"""What the command line writes: text, tables, one-sentence errors, a bar while something loads."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from drafthouse_server.operations.logs import LineQueue, logging_to

__all__ = ["LoadLines", "LoadProgress", "OutputFailed", "Terminal", "format_table"]

_KEPT = "\n\t"
_REORDERING = (
    *(0x61C, 0x200E, 0x200F, 0x2028, 0x2029),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
"""What shows the text around it in another order, or on another line."""
# A model's output must not be able to move the cursor or rename the window.
_HARMLESS = {
    code: "�" for code in (*range(32), *range(127, 160), *_REORDERING) if chr(code) not in _KEPT
}
_IN_A_CELL = _HARMLESS | dict.fromkeys(map(ord, _KEPT), "�")
_JOIN_S = 1.0
"""How long the end waits for a line that nobody takes."""

_CLEAR = "\x1b[2J\x1b[H"


class OutputFailed(Exception):
    """The result of a command cannot be written, as where a disk is full."""


class LoadProgress(Protocol):
    """Takes note of what is loaded. May be called on any thread."""

    def __call__(self, path: str, share: float) -> None:
        """Notes how much of a file is loaded, [0, 1]."""
        ...


class Terminal:
    """Where a command writes: results to `out`, everything about them to `err`.

    Args:
        out: For results.
        err: For figures, progress and errors, so that a pipe carries the result alone.
        source: For what a user types.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, source: TextIO | None = None
    ) -> None:
        self._out = out or _writable(sys.stdout)
        self._err = err or _writable(sys.stderr)
        self._source = source or _readable(sys.stdin)
        self._queues = contextlib.ExitStack()

    @property
    def is_interactive(self) -> bool:
        """Whether a person types and reads."""
        return self._source.isatty() and self._out.isatty()

    def write(self, text: str) -> None:
        """Writes a piece of a model's output at once.

        A screen gets no control characters.
        """
        self._put(text.translate(_HARMLESS) if self._out.isatty() else text)

    def line(self, text: str = "") -> None:
        """Writes a line of a result. A screen gets no control characters."""
        self.write(text + "\n")

    def clear(self) -> None:
        """Empties the screen."""
        self._put(_CLEAR)

    def _put(self, text: str) -> None:
        """Writes to `out`.

        Raises:
            OutputFailed: it cannot be written.
            BrokenPipeError: whoever reads it has left.
        """
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(f"the output cannot be written: {error.strerror}") from error

    def note(self, text: str) -> None:
        """Writes a line that is not part of the result, without control characters."""
        self._err.write(text.translate(_HARMLESS) + "\n")
        self._err.flush()

    def warn(self, text: str) -> None:
        """Writes what the user should change, though the command goes on."""
        self.note(f"drafthouse: warning: {text}")

    def error(self, text: str) -> None:
        """Writes why the command failed."""
        self.note(f"drafthouse: {text}")

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Has lines wait in queues for the time of a block: who does not read them stops nothing.

        What cannot be written is lost then, without an error.
        """
        before = self._out, self._err
        self._out, self._err = _queued(before, self._queues)
        self._queues.callback(self._write_to, *before)
        with self._queues:
            yield

    def end_queues(self) -> None:
        """Waits a moment for lines that wait in queues, and has none wait any more."""
        self._queues.close()

    def logging(self, level: str) -> AbstractContextManager[None]:
        """Writes the log, too, for the time of a block, from a severity such as "info" on."""
        return logging_to(self._err, level)

    def _write_to(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err

    def ask(self, prompt: str) -> str:
        """Returns the next line that the user types.

        Raises:
            EOFError: there is no more.
        """
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, PLC0415  # gives `input` a history, where it exists
            return input(prompt)
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def read_all(self) -> str:
        """Returns everything that is piped in.

        Raises:
            UnicodeDecodeError: it is no text.
        """
        return self._source.read()

    @contextmanager
    def loading(self) -> Iterator[LoadProgress]:
        """Shows, for the time of a block, how far files are loaded.

        A bar for each on a screen, elsewhere a line for each, and one a minute while it lasts.
        """
        if not self._err.isatty():
            with LoadLines(self) as lines:
                yield lines
            return
        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=Console(file=self._err), transient=True) as progress:
            yield _BarProgress(progress)


def _writable(stream: TextIO | None) -> TextIO:
    """Returns a stream that takes every text: characters that it does not have are escaped.

    Args:
        stream: None where the shell has closed it: what is written goes nowhere.
    """
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def _queued(streams: Sequence[TextIO], ends: contextlib.ExitStack) -> Iterator[TextIO]:
    """Yields for each stream one that takes lines at once; the same file has one queue.

    Args:
        streams: Where to; one without a descriptor is given back.
        ends: Ends the queues.
    """
    queues: dict[tuple[int, int], LineQueue] = {}
    for stream in streams:
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            yield stream
            continue
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file not in queues:
            queues[file] = ends.enter_context(LineQueue(descriptor))
        yield io.TextIOWrapper(
            queues[file],
            encoding=stream.encoding,
            errors="backslashreplace",
            write_through=True,
        )


def _readable(stream: TextIO | None) -> TextIO:
    """Returns a stream to read from; one that the shell has closed has nothing."""
    return io.StringIO() if stream is None else stream


class LoadLines:
    """One line per file, and one a minute: whoever reads a log must see what is waited for.

    Args:
        terminal: Where the lines go.
        period_s: Seconds between two lines of the time that has passed.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        terminal: Terminal,
        period_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._period_s = period_s
        self._clock = clock
        self._seen: set[str] = set()
        self._at = ("", 0.0)
        self._began_at = self._moved_at = clock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="still-loading", daemon=True)

    def __call__(self, path: str, share: float) -> None:
        """Notes how much of a file is loaded, [0, 1]. Thread: any."""
        if self._at != (path, share):
            self._at, self._moved_at = (path, share), self._clock()
        if path not in self._seen:
            self._seen.add(path)
            self._terminal.note(f"loading {path}")

    def tell(self) -> None:
        """Writes how far it is, after what time, and whether that was so at the last line, too."""
        now, (path, share) = self._clock(), self._at
        what = f"{share:.0%} of {path} is loaded" if path else "looking at files and devices"
        n_still_s = now - self._moved_at
        still = f", the same for {n_still_s:.0f} s" if n_still_s >= self._period_s else ""
        self._terminal.note(f"starting for {now - self._began_at:.0f} s: {what}{still}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._is_over.wait(self._period_s):
            self.tell()


class _BarProgress:
    """One bar per file."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, tuple[TaskID, int]] = {}

    def __call__(self, path: str, share: float) -> None:
        if path not in self._bars:
            n_bytes = Path(path).stat().st_size
            task = self._progress.add_task(Path(path).name, total=n_bytes)
            self._bars[path] = task, n_bytes
        task, n_bytes = self._bars[path]
        self._progress.update(task, completed=int(share * n_bytes))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; columns of numbers stand at the right.

    Args:
        header: Titles of the columns.
        rows: As many cells each.
    """
    rows = [[cell.translate(_IN_A_CELL) for cell in row] for row in rows]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    is_right = [all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return [line(header), line(["─" * width for width in widths]), *map(line, rows)]


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in {"", "–", "-"}
