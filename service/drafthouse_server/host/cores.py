"""The cores that other processes leave to this one."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CoreTimes", "FreeCores", "n_threads_beside", "read_core_times"]

_INTERVAL_S = 0.25
"""Seconds between two readings: some twenty of the kernel's ticks of 10 ms."""

_MOSTLY = 0.7
"""Share of an interval in which threads computed, for it to tell who takes cores from them: what
they leave idle, processes take that give way at once when they come back."""

_SHARE = 0.45
"""Of a core: whoever takes more than that may want all of it, and have to share it with a thread.
"""

_WAIT_S = 1.0
"""Seconds until one more thread is tried."""

_WAIT_MAX_S = 64.0
"""The same after many tries in vain, each of which takes twice as long to come as the one before.
"""

_BUSY = (0, 1, 2, 5, 6)
"""Columns of /proc/stat in which a core computes for somebody: user, nice, system, irq, softirq.
Others are idle, or stolen by a hypervisor, or counted in these already."""


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """What has been computed on some cores, in seconds of one core, since some time."""

    at_s: float
    """Monotonic time of the reading."""
    all_s: float
    """By anybody."""
    own_s: float
    """By this process, with all its threads."""
    cores: frozenset[int]
    """Their numbers."""


def read_core_times(
    cores: Collection[int], clock: Callable[[], float], root: Path = Path("/")
) -> CoreTimes | None:
    """Returns what was computed on some cores until now; None: the kernel does not tell.

    Args:
        cores: Their numbers.
        clock: Monotonic time in seconds.
        root: Where /proc lies; another folder in tests.
    """
    try:
        lines = (root / "proc/stat").read_text("ascii").splitlines()
        n_ticks = 0
        for line in lines:
            name, *columns = line.split()
            if name[:3] == "cpu" and name[3:] and int(name[3:]) in cores:
                n_ticks += sum(int(columns[i]) for i in _BUSY)
        n_ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return CoreTimes(clock(), n_ticks / n_ticks_per_s, time.process_time(), frozenset(cores))


def n_threads_beside(n_left: float, n_most: int) -> int:
    """Returns how many threads find a core each.

    One that shares a core with another process holds up all others at every layer: two threads on
    two cores, one of which is taken, compute a quarter to a half of what one thread does. That
    process gets half of the core then. With less than that, the second thread still pays.

    Args:
        n_left: Cores' worth of time that others leave.
        n_most: Threads where nothing else runs, >= 1.

    Returns:
        In [1, n_most].
    """
    return max(1, min(n_most, math.floor(n_left + _SHARE)))


class FreeCores:
    """Follows how many threads find a core each, beside what else runs on them.

    A thread is given up at once for a process that takes a core, and taken again as soon as there
    is room. A process that gives way to threads, being nice or of little weight, takes whatever
    they leave; so one more is tried now and then, and stays where it finds its core. The cores
    themselves may become fewer, as when a container's are changed: threads would share them then.

    Args:
        n_most: Threads where nothing else runs, >= 1.
        read: Reads what was computed on the cores that the process may use now, hardware threads
            all of them.
        clock: Monotonic time in seconds.

    Thread:
        One at a time.
    """

    def __init__(
        self,
        n_most: int,
        read: Callable[[], CoreTimes | None],
        clock: Callable[[], float],
    ) -> None:
        self.n_threads = n_most
        """Threads that find a core each, >= 1."""
        self._n_most = n_most
        self._read = read
        self._clock = clock
        self._last: CoreTimes | None = None
        self._last_steps_s = 0.0
        self._next_s = -math.inf
        self._is_trial = False
        self._wait_s = _WAIT_S
        self._try_s = math.inf

    def look(self, steps_s: float) -> bool:
        """Reads what was computed, unless that was just done; returns whether `n_threads` changed.

        To be called before every step.

        Args:
            steps_s: Seconds that steps have taken so far, all of them together.
        """
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + _INTERVAL_S
        last, times = self._last, self._read()
        in_steps_s = steps_s - self._last_steps_s
        self._last, self._last_steps_s = times, steps_s
        if last is None or times is None or times.cores != last.cores:
            return False
        elapsed = times.at_s - last.at_s
        if elapsed <= 0 or in_steps_s < _MOSTLY * elapsed:
            return False
        n_others = (times.all_s - last.all_s - (times.own_s - last.own_s)) / elapsed
        return self._follow(n_threads_beside(len(times.cores) - n_others, self._n_most), now)

    def _follow(self, n_found: int, now: float) -> bool:
        before = self.n_threads
        if n_found < before:
            self._wait_s = min(_WAIT_MAX_S, 2 * self._wait_s) if self._is_trial else _WAIT_S
            self._try_s = now + self._wait_s
        elif self._is_trial:  # it found its core: the next one may, too
            self._wait_s, self._try_s = _WAIT_S, now
        self._is_trial = n_found <= before < self._n_most and now >= self._try_s
        self.n_threads = before + 1 if self._is_trial else n_found
        return self.n_threads != before
