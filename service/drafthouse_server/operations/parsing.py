"""Which long message is parsed next, and what the event loop does in between."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from drafthouse_server.tenancy.fairness import Turns
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["ParsingTurns"]

_REST = 3.0
"""Times as long as a message took that the event loop is left to others before the next one."""


class ParsingTurns:
    """Long messages are parsed one at a time, the tenants in turn, with rests between them.

    Parsing holds up the event loop, for ten milliseconds where a message breaks its bounds late. A
    dozen that came together would hold up whoever else is served for a tenth of a second, at each
    of the ten passes of the loop that a request takes.

    Args:
        clock: Monotonic time in seconds.

    Thread:
        Event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._is_taken = False

    def __len__(self) -> int:
        return len(self._turns)

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Tenant, n_bytes: int) -> AsyncIterator[None]:
        """Waits until a message is next; it is the only one within the block.

        Args:
            tenant: Whose it is.
            n_bytes: Of it, >= 1.

        Cancellation:
            One that waits leaves its line.
        """
        if self._is_taken:
            await self._wait(tenant, n_bytes)
        self._is_taken = True
        began_at = self._clock()
        try:
            yield
        finally:
            rest_s = _REST * (self._clock() - began_at)
            asyncio.get_running_loop().call_later(rest_s, self._call_next)

    async def _wait(self, tenant: Tenant, n_bytes: int) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put(tenant.name, waiter, n_bytes, tenant.weight)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._call_next()  # it was this one's turn
            else:
                self._turns.remove(tenant.name, waiter)
            raise

    def _call_next(self) -> None:
        while (place := self._turns.take()) is not None:
            if not place[1].done():
                place[1].set_result(None)
                return
        self._is_taken = False
        self._turns.rest()
