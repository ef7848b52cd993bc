"""What a process may compute on."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Cores"]


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that a process may use, as `find_cores` finds them.

    A quota of 1.5 cores is 1 thread: a second one would stop both for a part of each period.
    """

    n_cores: int
    """Threads that `n_threads` 0 means: n_physical, at most quota, rounded down; at least 1."""
    n_physical: int
    """Cores behind n_logical; of a processor with cores of two kinds, the quick ones."""
    n_logical: int
    """Hardware threads in the affinity mask."""
    quota: float = 0.0
    """Cores' worth of time that the process's cgroups grant; 0 is no limit."""

    @property
    def n_spare(self) -> float:
        """Cores' worth of time beyond n_cores: second hardware threads, the rest of a quota."""
        return min(self.n_logical, self.quota or math.inf) - self.n_cores
