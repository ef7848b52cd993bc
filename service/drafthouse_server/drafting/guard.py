"""The guard of the estimators: one that fails is reset, a fixed rule answers, and streams go on.

What a step costs, which drafts are accepted, what repeats, how much of a prompt fits beside running
streams: all of it is guessed from measurements. A wrong guess costs time and must never cost a
stream. So the scheduler asks and tells every estimator through a `Guard`, which knows nothing of
what they estimate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from drafthouse_server.step import StepTimings

__all__ = ["Guard", "checked", "is_duration"]

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_DURATION_MAX_S = 86400.0
"""A step that takes a day was not measured: a clock has jumped."""


def is_duration(seconds: float) -> bool:
    """Returns whether a step may have taken so long: finite, not negative, less than a day."""
    return 0.0 <= seconds < _DURATION_MAX_S


def checked(timings: StepTimings) -> StepTimings:
    """Returns the times of a step if all of them are durations; else zeros: not measured."""
    parts = (
        timings.draft_s,
        timings.decode_s,
        timings.process_s,
        timings.sample_s,
        timings.moves_s,
    )
    is_measured = is_duration(timings.total_s) and all(map(is_duration, parts))
    return timings if is_measured else StepTimings()


class Guard:
    """Asks estimators; one that raises is reset and a fixed rule answers in its place.

    The first failure of each is logged as an error, with its trace; further ones are only counted.

    Args:
        resets: By estimator, a call that makes it forget all that it has learnt.
    """

    def __init__(self, resets: Mapping[str, Callable[[], None]]) -> None:
        self._resets = dict(resets)
        self._logged: set[str] = set()
        self.n_resets = 0
        """Times that an estimator failed and was reset."""

    def add(self, estimator: str, reset: Callable[[], None]) -> None:
        """Takes one more estimator, with the call that makes it forget."""
        self._resets[estimator] = reset

    def ask(
        self, estimator: str, question: Callable[[], _Answer], otherwise: Callable[[], _Answer]
    ) -> _Answer:
        """Returns an estimator's answer, or that of a fixed rule if it fails.

        Args:
            estimator: Its name, a key of `resets`.
            question: Asks it; raises where the answer cannot be used.
            otherwise: The fixed rule. It must not fail.
        """
        try:
            return question()
        except Exception as error:
            self._reset(estimator, error)
        return otherwise()

    def tell(self, estimator: str, news: Callable[[], None]) -> None:
        """Lets an estimator learn; what it learns is lost if it fails."""
        self.ask(estimator, news, _do_nothing)

    def _reset(self, estimator: str, error: Exception) -> None:
        self.n_resets += 1
        if estimator not in self._logged:
            self._logged.add(estimator)
            _log.error(
                "the estimator %r failed and starts over; streams go on, further failures are"
                " counted in drafthouse_estimator_resets_total",
                estimator,
                exc_info=error,
            )
        self._resets[estimator]()


def _do_nothing() -> None:
    pass
