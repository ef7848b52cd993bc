"""Ends a stream whose client takes no word of its end.

grpc.aio keeps a call until its client has closed it: a handler that ends without a status, because
its client reads nothing, leaves the stream open for ever. The task that keeps it is the parent of
the handler's task; cancelled, it lets go of the call, and the stream is reset. (The calls that came
last are let go when others come.)
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

__all__ = ["StreamResets"]

_HANDLER = "_handle_exceptions"
"""Name of the coroutine in which grpc.aio runs a handler."""

_Task: TypeAlias = asyncio.Task[Any]


class StreamResets:
    """Knows the parent of each handler's task. `install` it before the server starts."""

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[_Task, _Task] = weakref.WeakKeyDictionary()
        self._make: Callable[..., Any] = asyncio.Task

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the parents of tasks that are made from now on."""
        before = loop.get_task_factory()
        if before is not None:
            self._make = lambda coroutine, loop, **more: before(loop, coroutine, **more)
        loop.set_task_factory(self._make_task)  # type: ignore[arg-type]  # typed as of 3.13

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any],
        **more: Any,  # noqa: ANN401  # as `asyncio.Task` takes it
    ) -> _Task:
        task: _Task = self._make(coroutine, loop=loop, **more)
        if getattr(coroutine, "__name__", "") == _HANDLER:
            parent = asyncio.current_task(loop)
            if parent is not None:
                self._parents[task] = parent
        return task

    def reset(self, task: _Task) -> None:
        """Ends the stream of a handler's task that has ended."""
        parent = self._parents.get(task)
        if parent is not None:
            parent.cancel()
