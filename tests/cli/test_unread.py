"""A server whose lines nobody reads: it starts, serves and ends as any other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest
from tests.support.ports import free_port

import drafthouse

WAIT_S = 100.0

SERVING = textwrap.dedent(
    """
    import sys
    from drafthouse_server.cli import main, serve
    from drafthouse_server.engine.fake import FakeEngine

    def load(config, progress):
        progress("a.gguf", 0.5)
        return FakeEngine()

    serve.LlamaEngine.load = load
    sys.exit(main.main(["serve", "--insecure-no-auth", *sys.argv[1:]]))
    """
)
LOADING = textwrap.dedent(
    """
    import os
    import sys
    import threading
    from drafthouse_server.cli import main, serve

    def load(config, progress):
        os.write(int(sys.argv[1]), b"loading")
        progress("a.gguf", 0.5)
        threading.Event().wait()

    serve.LlamaEngine.load = load
    sys.exit(main.main(["serve", "--port", "0"]))
    """
)


@pytest.fixture
def full() -> Iterator[int]:
    """A pipe that takes nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (1 << 16, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * size)
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def _tokenize(client: drafthouse.Client) -> list[int]:
    """Returns what a server answers that may not listen yet."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        try:
            return client.tokenize("a")
        except drafthouse.Unavailable:
            assert time.monotonic() < give_up_at
            time.sleep(0.1)


@pytest.mark.parametrize("unread", [("stderr",), ("stdout",), ("stdout", "stderr")], ids="+".join)
def test_a_server_serves_and_ends_whose_lines_nobody_reads(
    unread: tuple[str, ...], full: int
) -> None:
    """One whose stderr was full before its first line never listened, nor ended by SIGTERM."""
    port = free_port()
    out, err = (full if name in unread else subprocess.DEVNULL for name in ("stdout", "stderr"))
    command = [sys.executable, "-c", SERVING, "--port", str(port)]
    with subprocess.Popen(command, stdout=out, stderr=err) as process:
        try:
            with drafthouse.Client(f"127.0.0.1:{port}", retry=None) as client:
                assert _tokenize(client) == [97]
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_sigterm_ends_a_server_that_loads_and_whose_lines_nobody_reads(full: int) -> None:
    reader, writer = os.pipe()
    command = [sys.executable, "-c", LOADING, str(writer)]
    with subprocess.Popen(command, stdout=full, stderr=full, pass_fds=[writer]) as process:
        try:
            os.close(writer)
            assert os.read(reader, 7) == b"loading"
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            os.close(reader)
            process.kill()


def test_a_wrong_setting_ends_a_server_whose_lines_nobody_reads(full: int) -> None:
    command = [sys.executable, "-c", SERVING, "--port", "x"]
    with subprocess.Popen(command, stdout=full, stderr=full) as process:
        try:
            assert process.wait(WAIT_S) == 2
        finally:
            process.kill()
