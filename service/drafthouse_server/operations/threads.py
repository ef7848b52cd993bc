"""Whether the system still lets this process start the threads that a server takes.

gRPC and OpenMP end the process where it does not, gRPC without a word.
"""

from __future__ import annotations

import ctypes
import os

from drafthouse_server.errors import StartupError

__all__ = ["N_GRPC", "N_SERVER", "require_threads"]

N_GRPC = 8 + min(16, max(4, os.cpu_count() or 1))
"""Threads that gRPC takes: some of its own, a pool by cores, and room for that to grow."""

N_SERVER = N_GRPC + 8
"""Threads and processes that a server takes, those of OpenMP aside."""

_SIZE = ctypes.sizeof(ctypes.c_ulong)


def require_threads(n: int) -> None:
    """Checks that so many threads can be started: starts them, and ends them again.

    Raises:
        StartupError: they cannot.
    """
    libc = ctypes.CDLL(None)
    may_end = ctypes.create_string_buffer(64)  # a sem_t
    libc.sem_init(may_end, 0, 0)
    threads = (ctypes.c_ulong * n)()
    n_started = 0
    # Not Python's: each would leave the process an arena of malloc's, 64 MiB of addresses.
    for i in range(n):
        if libc.pthread_create(ctypes.byref(threads, i * _SIZE), None, libc.sem_wait, may_end):
            break
        n_started += 1
    for _ in range(n_started):
        libc.sem_post(may_end)
    for thread in threads[:n_started]:
        libc.pthread_join(ctypes.c_ulong(thread), None)
    libc.sem_destroy(may_end)
    if n_started < n:
        raise StartupError(
            f"the server needs {n} more threads, and the system lets it start {n_started}; raise"
            " the limit of its user (ulimit -u), its unit (TasksMax) or its container"
            " (--pids-limit), and that of its address space, where there is one (ulimit -v)"
        )
