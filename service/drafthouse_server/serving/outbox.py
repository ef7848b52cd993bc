"""Where a sequence's events wait for their reader, and when the readers are woken."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Callable

from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    ProgressEvent,
    TokensEvent,
)

__all__ = ["Outbox", "WakeLimiter"]

_MESSAGE_S = 2e-4
"""Seconds that the event loop is given for a message: 5,000 messages a second.

One takes it half of that on a small machine, most of it inside grpc.
"""

_N_UNPACED = 4
"""Streams up to which tokens go out as soon as `_INTERVAL_S` allows."""

_N_UNMERGED = 128
"""Events that may wait one by one; more of them become one, of 4 bytes a token."""

_TOKEN_BYTES, _LOGPROB_BYTES = 4, 8

_INTERVAL_S = 0.004
"""A reader is woken no more often. Nobody can tell, and a quick model's tokens share messages."""


class Outbox:
    """One sequence's events, in order, until its one reader takes them.

    It never makes the loop wait: a reader who is slow, or gone, holds no slot. What waits for it is
    bounded: beyond, the sequence is to be ended.

    Args:
        n_bytes_max: Bytes of the tokens that may wait, log-probabilities included.
    """

    def __init__(self, n_bytes_max: int = 1 << 18) -> None:
        self._events: list[Event] = []
        self._n_bytes_max = n_bytes_max
        self._waiter: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[None] | None = None
        self._has_begun = False
        self._is_ready = False
        self._is_over = False
        self.is_held = False
        """Whether it is in the queue of those to be woken."""
        self.is_new = True
        """Whether its reader was never woken."""
        self.woken_at = -math.inf
        """When the wake limiter woke its reader last."""

    def put(self, event: Event) -> bool:
        """Adds an event. The reader sees it once it is woken.

        Returns:
            Whether what waits for the reader is still within its bound.
        """
        events = self._events
        events.append(event)
        # Nearly always the reader has taken what was there: no reason to count it.
        return len(events) < _N_UNMERGED or self._merge()

    def _merge(self) -> bool:
        """Makes neighbours of a kind one event; returns whether they are within the bound."""
        merged: list[Event] = []
        n_bytes = 0
        for event in self._events:
            last = merged[-1] if merged else None
            if isinstance(event, TokensEvent) and isinstance(last, TokensEvent):
                _append(last, event)
            elif isinstance(event, ProgressEvent) and isinstance(last, ProgressEvent):
                merged[-1] = event
            elif isinstance(event, TokensEvent):
                # Of our own, and compact: a list takes several times as many bytes.
                merged.append(TokensEvent(array("i", event.tokens), array("d", event.logprobs)))
            else:
                merged.append(event)
        for event in merged:
            if isinstance(event, TokensEvent):
                n_bytes += _TOKEN_BYTES * len(event.tokens) + _LOGPROB_BYTES * len(event.logprobs)
        self._events = merged
        return n_bytes <= self._n_bytes_max

    def begin(self) -> None:
        """Lets the reader know that the sequence has a slot."""
        self._has_begun = True
        begun = self._begun
        if begun is not None and not begun.done():
            begun.set_result(None)

    async def begun(self) -> None:
        """Waits until the sequence has a slot, or something is there to be taken.

        Cancellation:
            It has no effect.
        """
        if not self._has_begun:
            self._begun = asyncio.get_running_loop().create_future()
            try:
                await self._begun
            finally:
                self._begun = None

    def wake(self) -> None:
        """Lets the reader take what is there."""
        if not self._events:
            return  # taken already, together with what came before
        if self.is_new:
            self.begin()
        self.is_new = False
        self._is_ready = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def receive(self) -> list[Event]:
        """Waits until it is woken and returns all that is there; nothing after a terminal event.

        Cancellation:
            Atomic: events are either returned or still there.
        """
        if self._is_over:
            return []
        if not self._is_ready:
            # asyncio.Event does the same for many readers, in twice the time.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_ready = False
        events, self._events = self._events, []
        self._is_over = isinstance(events[-1], FinishEvent | ErrorEvent)
        return events


def _append(last: TokensEvent, event: TokensEvent) -> None:
    assert isinstance(last.tokens, array), "made by `Outbox._merge`"
    assert isinstance(last.logprobs, array), "made by `Outbox._merge`"
    last.tokens.extend(event.tokens)
    last.logprobs.extend(event.logprobs)


class WakeLimiter:
    """Decides when readers are woken: at most so many a second, the longest held first.

    A message costs the event loop about as much as the engine needs for a token of a small model.
    Were every reader woken after every step, many streams would keep the loop busy all the time:
    it would take the interpreter, and on a small machine the core, from the engine thread. So
    tokens wait for those of the next step, for `_MESSAGE_S` times the number of readers at most,
    and each reader for `_INTERVAL_S`. Steps of ordinary models are longer, and never held.

    Args:
        clock: Monotonic time in seconds.
        outbox_bytes: Bytes of tokens that may wait for one reader.
    """

    def __init__(self, clock: Callable[[], float], outbox_bytes: int = 1 << 18) -> None:
        self._clock = clock
        self.outbox_bytes = outbox_bytes
        """Bytes of tokens that may wait for one reader."""
        self._held: deque[Outbox] = deque()
        self._n_allowed = 0.0
        self._counted_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> Outbox:
        """Returns the outbox of another reader."""
        return Outbox(self.outbox_bytes)

    def hold(self, outbox: Outbox) -> None:
        """Has a reader woken in its turn."""
        if not outbox.is_held:
            outbox.is_held = True
            self._held.append(outbox)

    def wake(self, n_readers: int) -> None:
        """Wakes those whose turn it is, and sets a timer for the others.

        Args:
            n_readers: All who may be held; so many at most are woken at once.
        """
        held = self._held
        now = self._clock()
        n_allowed = self._n_allowed + (now - self._counted_at) / _MESSAGE_S
        n_allowed = min(n_allowed, max(n_readers, _N_UNPACED))
        self._counted_at = now
        if n_readers <= _N_UNPACED:
            n_allowed = max(n_allowed, len(held))
        latest = now - _INTERVAL_S
        while held and n_allowed >= 1.0 and held[0].woken_at <= latest:
            n_allowed -= 1.0
            outbox = held.popleft()
            outbox.is_held = False
            outbox.woken_at = now
            outbox.wake()
        self._n_allowed = n_allowed
        if held and self._timer is None:
            # The next step will come before, as a rule; not if it computes a long prompt.
            loop = asyncio.get_running_loop()
            wait_s = max(len(held) * _MESSAGE_S, held[0].woken_at - latest)
            self._timer = loop.call_later(wait_s, self._on_timer, n_readers)

    def _on_timer(self, n_readers: int) -> None:
        self._timer = None
        if self._held:
            self.wake(n_readers)
