"""The standard health service, whose watchers cannot hold up each other nor the server's end.

grpc_health's own servicer for asyncio writes to a watcher while it holds the lock that every change
needs: one that does not read silences all others. Here a change notes the new status and wakes the
watchers; each then writes the last one in a task of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer

from drafthouse_server.errors import ServerOverloaded
from drafthouse_server.operations.calls import Call

__all__ = ["OVERALL", "HealthService"]

OVERALL = ""
"""Name of the server as a whole."""

_Status: TypeAlias = Any
"""An enum value; the stubs have no name for its type."""
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(HealthServicer):
    """Tells whether the server serves.

    Args:
        names: The services, and `OVERALL`.
        current_call: Returns the call that the calling task serves.
        n_watchers_max: Watchers at once.
        retry_after_s: Advice to watchers who are refused, seconds.

    Thread:
        Event loop only.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        current_call: Callable[[], Call],
        n_watchers_max: int,
        retry_after_s: float,
    ) -> None:
        self._names = frozenset(names)
        self._current_call = current_call
        self._n_watchers_max = n_watchers_max
        self._retry_after_s = retry_after_s
        self._is_serving = False
        self._is_open = True
        self._is_over = False
        self._changes: set[asyncio.Event] = set()

    @property
    def n_watchers(self) -> int:
        """Watchers now."""
        return len(self._changes)

    def set(self, *, is_serving: bool) -> None:
        """Changes the status of all services; of no effect after `end`."""
        if not self._is_over:
            self._is_serving = is_serving
            self._wake()

    def note_open(self, is_open: bool) -> None:
        """Notes whether streams are taken: where they are not, nothing is SERVING."""
        self._is_open = is_open
        self._wake()

    def _wake(self) -> None:
        for change in self._changes:
            change.set()

    def end(self) -> None:
        """Says NOT_SERVING from now on, for good. Watchers are told, and their streams end."""
        self.set(is_serving=False)
        self._is_over = True

    def _status(self, name: str) -> _Status:
        if name not in self._names:
            return _UNKNOWN
        return _SERVING if self._is_serving and self._is_open else _NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Returns the status of a service; NOT_FOUND where there is none of that name."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of that name")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # a coroutine that writes, see interceptors.wrapped
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """Writes the status of a service, and again whenever it has changed; the last one counts.

        Raises:
            ServerOverloaded: there are too many watchers (SERVER_OVERLOADED).
        """
        if len(self._changes) >= self._n_watchers_max:
            raise ServerOverloaded("health watchers are there", self._retry_after_s)
        call, change = self._current_call(), asyncio.Event()
        self._changes.add(change)
        try:
            await self._watch(request.service, call, change, context)
        finally:
            self._changes.discard(change)

    async def _watch(self, name: str, call: Call, change: asyncio.Event, context: _Context) -> None:
        told: _Status | None = None
        while True:
            change.clear()
            is_last, status = self._is_over, self._status(name)
            if status != told:
                told = status
                call.await_reader(time.monotonic())
                await context.write(health_pb2.HealthCheckResponse(status=status))
                call.go_on()
            if is_last:
                return
            await change.wait()
