"""Threads that the system does not let a server start."""

from __future__ import annotations

import subprocess
import sys

from drafthouse_server.operations.threads import N_GRPC, require_threads


def test_threads_that_can_be_started_are_ended_again() -> None:
    require_threads(N_GRPC)
    assert run(_UNTIL_ALONE) == ["alone"]


def test_threads_that_cannot_be_started_are_told_with_the_limits_to_raise() -> None:
    """Without a word gRPC ended the process, after the model had been loaded."""
    (told,) = run(_WITHOUT_ROOM)
    assert told.startswith("the server needs 500 more threads, and the system lets it start ")
    assert "TasksMax" in told


def run(program: str) -> list[str]:
    """Returns the lines of a program of its own: here other tests have threads, too."""
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    return found.stdout.splitlines()


_UNTIL_ALONE = """
import os
from drafthouse_server.operations.threads import N_GRPC, require_threads
require_threads(N_GRPC)
while len(os.listdir("/proc/self/task")) > 1:  # the kernel forgets them a moment later
    pass
print("alone")
"""

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
"""
