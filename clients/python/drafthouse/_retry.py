"""When a failed call is tried again."""

from __future__ import annotations

import numbers
import random
import threading
import time
from dataclasses import dataclass

from drafthouse._errors import (
    Cancelled,
    DrafthouseError,
    ResourceExhausted,
    ServerDraining,
    Unavailable,
)
from drafthouse._transport import wrong_type

__all__ = [
    "Attempts",
    "RetryBudget",
    "RetryPolicy",
    "checked_retry",
    "checked_timeout",
    "is_handed_back",
]

_RULES = (
    ("max_attempts", numbers.Integral, "an integer >= 1", 1),
    ("initial_delay_s", numbers.Real, "a number of seconds, >= 0", 0),
    ("max_delay_s", numbers.Real, "a number of seconds, >= 0", 0),
    ("budget", numbers.Integral, "an integer >= 0", 0),
    ("max_retry_after_s", numbers.Real, "a number of seconds, >= 0", 0),
)
"""Fields of a policy: name, type, the rule in words, smallest value."""

_LONGEST_S = 1e8
"""A longer timeout is none, a longer wait as long as this."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast failed calls are tried again.

    Only calls that have not answered anything yet are tried again: on `Unavailable`, on
    `ResourceExhausted` when the server says after what time, and where a stopping server's
    transport cancels a call that nobody has looked at. A generation that a server has begun, or
    recorded, is not. The one exception is `ServerDraining`, by which a server hands back one that
    it has not begun.
    """

    max_attempts: int = 4
    """Attempts of one call, the first included."""
    initial_delay_s: float = 0.1
    """Longest wait before the second attempt; doubles with every further one."""
    max_delay_s: float = 5.0
    """Longest wait of our own choice; the server may ask for more."""
    budget: int = 10
    """Of all calls: a failure takes one, a success gives a tenth back, up to this; nothing is tried
    again while less than half is left."""
    max_retry_after_s: float = 120.0
    """Longest wait that a server may ask for; an error that asks for more is raised at once."""

    def __post_init__(self) -> None:
        for name, kind, rule, least in _RULES:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise wrong_type(name, rule, value)
            if not float(value) >= least:  # so that what is not a number is refused, too
                raise ValueError(f"{name} must be {rule}, is {value}")

    def backoff_s(self, n_failed: int) -> float:
        """Returns the wait after so many failed attempts, before jitter; seconds."""
        n_doubled = min(n_failed - 1, 64)  # a power of two may be too great for a float
        return min(self.max_delay_s, self.initial_delay_s * 2.0**n_doubled)


def checked_retry(policy: RetryPolicy | None) -> RetryPolicy | None:
    """Returns a policy of retries.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(policy, RetryPolicy | None):
        raise wrong_type("retry", "a drafthouse.RetryPolicy or None", policy)
    return policy


def checked_timeout(timeout: float | None) -> float | None:
    """Returns a timeout in seconds; None is no limit.

    Raises:
        TypeError: it is of the wrong type.
        ValueError: it is not a number.
    """
    if timeout is None:
        return None
    if not _is_number(timeout):
        raise wrong_type("timeout", "a number of seconds, or None", timeout)
    if timeout != timeout:  # noqa: PLR0124  math.isnan takes no integer of any size
        raise ValueError("timeout is not a number; give seconds, or None for no limit")
    # More than gRPC can tell the server it takes for a time that has passed. A float32 of numpy, to
    # which a time of the clock is added, would be rounded by seconds.
    return None if timeout > _LONGEST_S else float(max(timeout, -1))


class RetryBudget:
    """Keeps a client from multiplying the load on a server that fails.

    Every retryable failure takes one token, every success gives a tenth back; below half there are
    no retries. A server that drains does not fail: what it refuses takes none, nor what comes as it
    stops, or who has many calls under way could move few of them to another server.

    Source:
        gRPC proposal A6, "Throttling Retry Attempts and Hedged RPCs".
    """

    def __init__(self, n_tokens: int) -> None:
        self._n_max = float(n_tokens)
        self._n_tokens = float(n_tokens)
        self._lock = threading.RLock()  # a handler of a signal may call, too

    def succeed(self) -> None:
        """Gives a tenth of a token back."""
        with self._lock:
            self._n_tokens = min(self._n_max, self._n_tokens + 0.1)

    def fail(self) -> bool:
        """Takes a token; returns whether a retry is allowed."""
        with self._lock:
            self._n_tokens = max(0.0, self._n_tokens - 1.0)
            return self._n_max > 0 and self._n_tokens >= self._n_max / 2


class Attempts:
    """The attempts of one call.

    Args:
        policy: when to try again; None is never.
        budget: of the client.
        timeout: of the whole call, all attempts and waits together, in seconds; None, infinity,
            and whatever is longer than three years is no limit.

    Raises:
        TypeError: the timeout is of the wrong type.
        ValueError: it is not a number.
    """

    def __init__(
        self, policy: RetryPolicy | None, budget: RetryBudget, timeout: float | None
    ) -> None:
        self._policy = policy
        self._budget = budget
        seconds = checked_timeout(timeout)
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._n_failed = 0

    def remaining_s(self) -> float | None:
        """Returns the seconds left; None is no limit."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def succeed(self) -> None:
        """Notes that the server has answered."""
        self._budget.succeed()

    def delay_s(self, error: DrafthouseError) -> float:
        """Returns how long to wait before the next attempt.

        Raises:
            DrafthouseError: the error itself, when there shall be no further attempt.
        """
        self._n_failed += 1
        if self._policy is None or not _is_retryable(error):
            raise error
        is_free = isinstance(error, ServerDraining) or _is_unseen(error)
        if not (is_free or self._budget.fail()):
            raise error
        if self._n_failed >= self._policy.max_attempts:
            raise error
        if (error.retry_after or 0.0) > self._policy.max_retry_after_s:
            raise error
        delay = self._delay_s(self._policy, error)
        remaining = self.remaining_s()
        if remaining is not None and delay >= remaining:
            raise error
        return delay

    def _delay_s(self, policy: RetryPolicy, error: DrafthouseError) -> float:
        """Returns the wait: what the server asks for, and a random share of the backoff on top."""
        jitter = random.random() * policy.backoff_s(self._n_failed)  # noqa: S311  not a secret
        # A thread can wait for no longer than some centuries.
        return min((error.retry_after or 0.0) + jitter, _LONGEST_S)


def _is_number(value: object) -> bool:
    """Returns whether a value is a number; numpy's are, too."""
    return isinstance(value, numbers.Real)


def is_handed_back(error: DrafthouseError) -> bool:
    """Returns whether a server gives up a generation that it had accepted, and has not begun."""
    return isinstance(error, ServerDraining) and error.metadata.get("hasBegun") != "true"


def _is_unseen(error: DrafthouseError) -> bool:
    """Returns whether a server's transport, which ends, says so of a call that nobody looked at.

    A caller who cancels, and a server that does, say more.
    """
    return isinstance(error, Cancelled) and error.message == "CANCELLED"


def _is_retryable(error: DrafthouseError) -> bool:
    if isinstance(error, Unavailable) or _is_unseen(error):
        return True
    return isinstance(error, ResourceExhausted) and error.retry_after is not None
