"""The log: nobody waits for whoever reads it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from queue import Full

import pytest

from drafthouse_server.operations import logs
from drafthouse_server.operations.logs import LineQueue, logging_to

_log = logging.getLogger("tests.logs")


@contextlib.contextmanager
def _logging(descriptor: int, n_lines_max: int = 10_000) -> Iterator[LineQueue]:
    with LineQueue(descriptor, n_lines_max) as lines, _logging_to(lines):
        yield lines


@contextlib.contextmanager
def _logging_to(lines: LineQueue) -> Iterator[None]:
    stream = io.TextIOWrapper(lines, "utf-8", write_through=True)
    with logging_to(stream, "info"):
        yield


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_lines_come_in_order_with_their_trace(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with _logging(writer):
        _log.debug("too fine")
        _log.info("one %d", 1)
        try:
            raise ValueError("wrong")
        except ValueError:
            _log.exception("two")
    text = os.read(reader, 65536).decode()
    assert " INFO tests.logs: one 1\n" in text
    assert " ERROR tests.logs: two\nTraceback" in text
    assert "ValueError: wrong\n" in text
    assert "too fine" not in text


def test_what_was_logged_is_written_at_the_end(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with _logging(writer):
        for i in range(100):
            _log.info("line %d", i)
    assert os.read(reader, 65536).decode().endswith(" line 99\n")


def test_nobody_waits_long_for_what_nobody_reads(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_CLOSE_S", 0.05)
    reader, writer = pipe
    with _logging(writer) as lines:
        _log.info("x" * (1 << 20))
    assert lines._thread.is_alive()
    while not os.read(reader, 1 << 16).endswith(b"\n"):
        pass
    lines._thread.join()


def test_a_pipe_that_nobody_reads_stops_nothing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_CLOSE_S", 0.05)
    reader, writer = pipe
    with _logging(writer, 100) as queue:
        for _ in range(20_000):
            _log.info("x" * 100)  # 2 MB: no pipe holds that
        assert queue.n_dropped > 10_000
    # Its thread goes on, and ends: it must not write to what has the pipe's number next.
    os.set_blocking(reader, False)
    while queue._thread.is_alive():
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 65536)
        with contextlib.suppress(Full):
            queue._lines.put_nowait(None)
        queue._thread.join(0.001)


def test_a_pipe_that_does_not_block_gets_every_line_whole(pipe: tuple[int, int]) -> None:
    """Such as one that a parent process reads as it likes: full is not gone."""
    reader, writer = pipe
    os.set_blocking(writer, False)
    text = b""
    with LineQueue(writer) as queue, _logging_to(queue):
        for i in range(2000):
            _log.info("%05d %s", i, "x" * 100)  # 280 KB: no pipe holds that
        while not text.endswith(b"01999 " + b"x" * 100 + b"\n"):
            text += os.read(reader, 65536)
    assert [line.split()[-2] for line in text.splitlines()] == [b"%05d" % i for i in range(2000)]


def test_what_was_dropped_is_told(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    queue = LineQueue(writer, n_lines_max=2)
    with _logging_to(queue):
        for i in range(5):
            _log.warning("line %d", i)
        assert queue.n_dropped == 3
        with queue:
            pass
    text = os.read(reader, 65536).decode()
    assert "line 0" in text
    assert "3 lines of the log were dropped" in text
