"""What routers read: which blocks of prompts the prefix cache holds, as it changes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from drafthouse_server.scheduling.prefix_cache import CacheEvent, CacheReset

__all__ = ["CacheFeed", "CacheFeeds"]


class CacheFeed:
    """Cache events in order, until their one reader takes them. Bounded; nobody waits for it.

    It begins with a `CacheReset` and all that is held. A reader that falls too far behind loses
    what it has not read, and gets the same again: a reset, and all that is held by then. So a
    reader that does as it is told is never wrong about what was stored, only late.

    Use: `async with loop.feeds.open() as feed: async for event in feed: ...`.

    Args:
        restate: Called when all that is held is to be told again; it must not wait.
        n_events_max: Most events that wait for the reader, those of a reset not counted.

    Thread:
        Event loop only.
    """

    def __init__(self, restate: Callable[[], object], n_events_max: int = 4096) -> None:
        self._restate = restate
        self._n_events_max = n_events_max
        self._n_room = n_events_max
        self._events: deque[CacheEvent] = deque()
        self._is_waiting_for_reset = True
        self._has_lost = False
        self._is_closed = False
        self._has_news = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether nobody reads it any more."""
        return self._is_closed

    def put(self, events: Sequence[CacheEvent]) -> None:
        """Adds events; what would be too many is lost, and all of the queue with it."""
        for event in events:
            if isinstance(event, CacheReset):
                self._events.clear()  # void
                self._n_room = len(events) + self._n_events_max
                self._is_waiting_for_reset = self._has_lost = False
            elif self._is_waiting_for_reset:
                continue
            self._events.append(event)
        if len(self._events) > self._n_room:
            self._events.clear()
            self._is_waiting_for_reset = self._has_lost = True
        if self._events or self._has_lost:
            self._has_news.set()

    async def receive(self) -> CacheEvent | None:
        """Waits for the next event and returns it; None once the feed is closed.

        Cancellation:
            Atomic: the event is either returned or still there.
        """
        while not self._events:
            if self._is_closed:
                return None
            if self._has_lost:
                # Not before somebody reads again: to tell it all to nobody would be for nothing.
                self._has_lost = False
                self._restate()
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()

    def __aiter__(self) -> AsyncIterator[CacheEvent]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[CacheEvent]:
        while (event := await self.receive()) is not None:
            yield event

    def close(self) -> None:
        """Ends the feed; its reader is told by the end of the events. Harmless when done twice."""
        if not self._is_closed:
            self._is_closed = True
            self._events.clear()
            self._has_news.set()
            self._restate()  # where nobody else listens, nothing is told any more

    async def __aenter__(self) -> CacheFeed:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CacheFeeds:
    """The feeds that are read, all of the same cache.

    Args:
        tell: Has all that is cached told, or ends it when `is_told` is False; it must not wait.

    Thread:
        Event loop only.
    """

    def __init__(self, tell: Callable[[bool], object]) -> None:
        self._tell = tell
        self._feeds: list[CacheFeed] = []

    def open(self, n_events_max: int = 4096) -> CacheFeed:
        """Returns a feed of what the prefix cache holds: first all of it, then what changes.

        For routers, which send a prompt to where its prefix is computed. Whoever reads it slowly,
        or not at all, holds up nobody; close it when it is no longer read.

        Args:
            n_events_max: Most events that wait for the reader.
        """
        feed = CacheFeed(self._restate, n_events_max)
        self._feeds.append(feed)
        self._restate()
        return feed

    def _restate(self) -> None:
        """Has all that is cached told, as long as anybody listens."""
        self._feeds = [feed for feed in self._feeds if not feed.is_closed]
        self._tell(bool(self._feeds))

    def put(self, events: Sequence[CacheEvent]) -> None:
        """Adds events to every feed."""
        for feed in self._feeds:
            feed.put(events)

    def close(self) -> None:
        """Ends every feed."""
        for feed in tuple(self._feeds):
            feed.close()
