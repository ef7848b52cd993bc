"""How the engine thread wakes the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

__all__ = ["Bell"]

_ONE = (1).to_bytes(8, sys.byteorder)

# Other ways to call C give the GIL away for the time of the call.
_write_with_gil = ctypes.PyDLL(None).write


class Bell:
    """Wakes the event loop from the engine thread, which keeps the GIL meanwhile.

    `call_soon_threadsafe` lets go of it in order to write to a socket. The event loop then takes
    it, and the engine has to wait until it comes back: a fifth of a small model's step.

    Args:
        on_ring: Called on the event loop; it must `answer`.
    """

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self._fd = -1

    def open(self) -> None:
        """Starts listening, on the running event loop."""
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._on_ring)

    def ring(self) -> None:
        """Wakes the event loop. Thread: any."""
        _write_with_gil(self._fd, _ONE, len(_ONE))

    def answer(self) -> None:
        """Ends the ringing."""
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Stops listening. Nobody may ring any more. Harmless when done twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
