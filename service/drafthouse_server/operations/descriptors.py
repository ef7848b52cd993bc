"""How many more file descriptors this process may open.

A connection takes one. gRPC is told at the start how many leave enough for the rest. When few are
left all the same, calls are refused, so that what is open can go on: a text worker or a file needs
one too.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable

from drafthouse_server.errors import StartupError

__all__ = ["DescriptorBudget", "raise_descriptor_limit"]

_OPEN = "/proc/self/fd"
_SHARE = 0.01
"""Share of the time that counting descriptors may take."""
_INTERVAL_S = 0.25
_N_WANTED = 1 << 16


def raise_descriptor_limit() -> int:
    """Lets this process open as many descriptors as it may let itself; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _N_WANTED if hard == resource.RLIM_INFINITY else min(hard, _N_WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return soft


def _n_open() -> int:
    try:
        return len(os.listdir(_OPEN))
    except FileNotFoundError:  # not on Linux: nothing is known, nobody is refused
        return 0
    except OSError:  # there is none left to look with
        return _n_limit()


def _n_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


class DescriptorBudget:
    """Knows whether few descriptors are left.

    Args:
        n_reserve: So many are kept free.
        clock: Monotonic time in seconds.
        n_open: Returns how many are open.
        n_limit: Returns how many may be.
    """

    def __init__(
        self,
        n_reserve: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        n_open: Callable[[], int] = _n_open,
        n_limit: Callable[[], int] = _n_limit,
    ) -> None:
        self._n_reserve = n_reserve
        self._clock = clock
        self._read_open = n_open
        self._read_limit = n_limit
        self._counted_again_at = -math.inf
        self.n_open = 0
        """Open descriptors, when they were counted last."""
        self.is_short = False
        """Whether fewer were left then than the reserve."""

    def n_connections(self) -> int:
        """Returns how many connections may come to what is open now; one at least.

        Twice the reserve is left: when all have come, as many files as the reserve can be opened
        before calls are refused.
        """
        return max(1, self._read_limit() - self._read_open() - 2 * self._n_reserve)

    def require(self) -> None:
        """Sees that calls can be taken, as long as nobody has come.

        Raises:
            StartupError: fewer are left than the reserve.
        """
        if self.check():
            n_limit, n_reserve = self._read_limit(), self._n_reserve
            raise StartupError(
                f"this process may open {n_limit} files and connections and has {self.n_open}, and"
                f" reserved_descriptors keeps {n_reserve} free, so that no call could be taken;"
                " raise the limit (`ulimit -n`, LimitNOFILE) or lower reserved_descriptors"
            )

    def check(self) -> bool:
        """Returns whether few are left. They are counted now and then, at a hundredth of a core."""
        now = self._clock()
        if now >= self._counted_again_at:
            self.n_open = self._read_open()
            self.is_short = self._read_limit() - self.n_open < self._n_reserve
            took = self._clock() - now
            self._counted_again_at = now + max(_INTERVAL_S, took / _SHARE)
        return self.is_short
