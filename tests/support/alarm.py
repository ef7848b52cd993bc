"""The alarm of pytest-timeout rings while a phase of a test runs, and never between two.

A phase that it rings in has failed, and is told as such. Between phases pytest writes the report,
and an exception that comes there ends the session: under xdist the worker's, and with
`assert not crashitem` everybody's.
"""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest

_LEFT = pytest.StashKey[float]()
"""Seconds that a test had left when its last phase ended; 0: it has no such alarm."""


def _with_alarm(item: pytest.Item) -> Generator[None, object, object]:
    # What is left is of no use when pytest-timeout has taken its handler back, as it does when a
    # phase has failed: the signal would end the process.
    left = item.stash.get(_LEFT, 0.0)
    if left and callable(signal.getsignal(signal.SIGALRM)):
        signal.setitimer(signal.ITIMER_REAL, left)
    try:
        return (yield)
    finally:
        item.stash[_LEFT], _ = signal.setitimer(signal.ITIMER_REAL, 0.0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Stops the alarm when the phase has ended."""
    return (yield from _with_alarm(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Has the alarm go on while the phase runs."""
    return (yield from _with_alarm(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Has the alarm go on while the phase runs."""
    return (yield from _with_alarm(item))
