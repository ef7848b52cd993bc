"""How many steps the engine runs in a row before the host is asked again. Pure.

Between two steps the engine waits for the host: a tenth of a millisecond or two, and more where the
interpreter has to be waited for. Beside a small model's step that is much. So where nothing is to
be decided (no prompt, no draft, nobody comes or goes) the engine goes on by itself for a while;
whoever comes then interrupts it. Steps of ordinary models are as long as a run may be, and are
never run in a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

__all__ = ["N_STEPS_MAX", "RUN_S", "RunPacer", "Runnable"]

RUN_S = 0.010
"""How long a run may take: nobody reads a hundred messages a second."""

N_STEPS_MAX = 16
"""Most steps of a run: a machine that has become slow is noticed after so many."""


class Runnable(Protocol):
    """What a run must know of a sequence."""

    @property
    def n_output_left(self) -> int:
        """Tokens that may still be generated, >= 1."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end it besides the model's own."""
        ...


class RunPacer:
    """Decides how long runs are.

    Args:
        gap_s: Target of the gap between tokens, seconds; 0 is none.
    """

    def __init__(self, gap_s: float = 0.0) -> None:
        self._run_s = min(RUN_S, gap_s or RUN_S)

    def n_steps(self, sequences: Iterable[Runnable], step_s: float, n_steps_free: int) -> int:
        """Returns the steps of the next run, >= 1.

        Args:
            sequences: All that the step has; each generates, none with a draft.
            step_s: What one of their steps takes, seconds; 0 is not known.
            n_steps_free: Steps for which cells are free.
        """
        if not 0 < 2 * step_s <= self._run_s:
            return 1
        # Multiplied first: a step that takes next to no time would make the quotient infinite.
        is_long = N_STEPS_MAX * step_s <= self._run_s
        n_steps = min(n_steps_free, N_STEPS_MAX if is_long else int(self._run_s / step_s))
        for sequence in sequences:
            if sequence.stop_token_ids:
                return 1  # the engine does not know them
            n_steps = min(n_steps, sequence.n_output_left)
        return max(1, n_steps)
