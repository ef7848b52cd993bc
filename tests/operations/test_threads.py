"""Threads that the system does not let a server start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from drafthouse_server.operations.threads import N_GRPC, require_threads


def n_threads() -> int:
    return len([*Path("/proc/self/task").iterdir()])


def test_threads_that_can_be_started_are_ended_again() -> None:
    before = n_threads()
    require_threads(N_GRPC)
    assert n_threads() == before


def test_threads_that_cannot_be_started_are_told_with_the_limits_to_raise() -> None:
    """Without a word gRPC ended the process, after the model had been loaded."""
    found = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ROOM],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    told, n_after = found.stdout.splitlines()
    assert told.startswith("the server needs 500 more threads, and the system lets it start ")
    assert "TasksMax" in told
    assert n_after == "1"


_WITHOUT_ROOM = """
import os, resource
from drafthouse_server.errors import StartupError
from drafthouse_server.operations.threads import require_threads
n_bytes = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (n_bytes + (200 << 20), resource.RLIM_INFINITY))
try:
    require_threads(500)
except StartupError as error:
    print(error)
print(len(os.listdir("/proc/self/task")))
"""
