"""A pytest plugin: what runs on a GPU, by workers that share the machine's cores.

For `scripts/gpu_tables.sh tests`. An engine takes all cores that its process may use, so workers
side by side would wait for each other; each gets cores of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["share_of"]


def share_of(cores: Sequence[int], i: int, n: int) -> set[int]:
    """Returns the cores of one worker; no two workers share one while there are enough.

    Args:
        cores: All of them, at least one.
        i: The worker, from 0.
        n: How many workers there are.
    """
    return set(cores[i::n]) or {cores[i % len(cores)]}


def pytest_configure() -> None:
    """Takes this worker's share of the cores."""
    name = os.environ.get("PYTEST_XDIST_WORKER")  # as gw3
    if name:
        n = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, share_of(cores, int(name.removeprefix("gw")), n))
