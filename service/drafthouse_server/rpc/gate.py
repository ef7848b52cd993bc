"""Between a call and its handler: what it may hold, whose it is, and only then its message.

grpc.aio receives the message of a call and makes objects of it before a handler runs. Our methods
are therefore registered as if clients sent streams: the handler begins with the headers, and the
message is read here, once its key is known, within a time, and as bytes, whose bounds are checked
before protobuf makes objects of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from drafthouse_server.errors import (
    ContextTooLong,
    FieldViolation,
    InvalidRequest,
    QuotaExceeded,
    ServerOverloaded,
    SlowReader,
    SlowSender,
)
from drafthouse_server.operations.calls import Call, OpenCalls
from drafthouse_server.operations.descriptors import DescriptorBudget
from drafthouse_server.operations.parsing import ParsingTurns
from drafthouse_server.rpc.interceptors import (
    Answer,
    Behaviour,
    Context,
    Continuation,
    Handler,
    Wrapping,
    current_call,
    is_ours,
    wrapped,
)
from drafthouse_server.rpc.wire import Scan, Shape, TooMany
from drafthouse_server.serving.metrics import FrontCounts
from drafthouse_server.serving.requests import PROMPT_TOKENS

__all__ = ["REFUSAL_S", "Gate", "Receive", "StreamResets", "count_front"]

_SWEEP_S = 0.5
_ABORT_S = 1.0
"""How long a client that reads nothing may take to take the word that its call has ended."""

REFUSAL_S = 0.2
"""After so long a call is refused whose tenant is above its rate of reading."""

_N_ELEMENTS_FREE = 64
"""Elements of a message that count as nothing beside its bytes."""

_N_BYTES_OF_ELEMENT = 1024
"""Bytes that take as long to read as an element takes to look at, about: two microseconds."""

_N_BYTES_AT_ONCE = 1024
"""Bytes of a message that does not wait for its turn: it takes half a millisecond at most."""

_HANDLER = "_handle_exceptions"
"""Name of the coroutine in which grpc.aio runs a handler."""

_Task: TypeAlias = asyncio.Task[Any]


class StreamResets:
    """Ends streams whose clients hear nothing of their end. `install` it before the server starts.

    grpc.aio keeps a call until its client has closed it: a handler that ends without a status,
    because its client reads nothing or it was cancelled, leaves the stream open for ever. The task
    that keeps it is the parent of the handler's task; cancelled, it lets go of the call, and the
    stream is reset. (The calls that came last are turned off when others come.)
    """

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[_Task, _Task] = weakref.WeakKeyDictionary()
        self._make: Callable[..., Any] = asyncio.Task

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notes the parents of tasks that are made from now on."""
        before = loop.get_task_factory()
        if before is not None:
            self._make = lambda coroutine, loop, **more: before(loop, coroutine, **more)
        factory: Any = self._make_task  # how one is typed differs between versions of Python
        loop.set_task_factory(factory)

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


class Gate(Wrapping):
    """Counts calls, and ends those that make no progress.

    Args:
        calls: Which are open.
        descriptors: How many descriptors are left.
        retry_after_s: Advice to those who are refused, seconds.
        first_message_s: How long the message of a call may take to come.
        slow_reader_s: How long a client may take to take a message.
        resets: Ends the streams of clients that take no word of their end.
    """

    def __init__(
        self,
        calls: OpenCalls,
        descriptors: DescriptorBudget,
        *,
        retry_after_s: float,
        first_message_s: float,
        slow_reader_s: float,
        resets: StreamResets,
    ) -> None:
        self.calls = calls
        """Which are open."""
        self.descriptors = descriptors
        """How many descriptors are left."""
        self._retry_after_s = retry_after_s
        self._first_message_s = first_message_s
        self._slow_reader_s = slow_reader_s
        self._resets = resets
        self._sweep_s = min(_SWEEP_S, first_message_s / 4, slow_reader_s / 4)
        self._tasks: dict[Call, asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def _wrap(self, inner: Behaviour, request: object, context: Context) -> Answer:
        call = current_call()
        if self.descriptors.check():
            error = ServerOverloaded("file descriptors are open", self._retry_after_s)
            self.calls.note_refused(error)
            raise error
        self.calls.enter(call, is_keyless=not is_ours(call.method))
        self._follow(call)
        try:
            call.due = time.monotonic() + self._first_message_s
            call.reader_s = self._slow_reader_s
            return await inner(request, context)
        except asyncio.CancelledError:
            if not call.is_stuck:
                raise
            self._tasks[call].uncancel()
            if call.is_received:
                raise SlowReader(self._slow_reader_s) from None
            raise SlowSender(self._first_message_s) from None
        finally:
            # The last message and the status are sent after this, in the same task.
            call.is_over = True
            call.due = time.monotonic() + (_ABORT_S if call.is_stuck else self._slow_reader_s)

    def _follow(self, call: Call) -> None:
        """Knows the call until all of it has been sent, or its client has left."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._tasks[call] = task
        task.add_done_callback(functools.partial(self._forget, call))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)

    def _forget(self, call: Call, task: asyncio.Task[Any]) -> None:
        self.calls.leave(call)
        del self._tasks[call]
        if call.is_lost:  # whose client has left, gRPC itself lets go of in this turn of the loop
            task.get_loop().call_soon(self._resets.reset, task)

    def _sweep(self) -> None:
        for call in self.calls.overdue(time.monotonic()):
            self._tasks[call].cancel()
        self._timer = None
        if self._tasks:
            self._timer = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)


class Receive(grpc.aio.ServerInterceptor):
    """Reads the message of a call whose key is known. The innermost one.

    Args:
        shapes: What the request of each method may hold, by the method's full name.
        calls: Which are open; calls are counted as their tenant's here.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        calls: OpenCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shapes = shapes
        self._calls = calls
        self._clock = clock
        self.parsing = ParsingTurns()
        """Which long message is parsed next."""
        self.n_bytes = 0
        """Bytes of the messages that were read."""
        self.n_elements = 0
        """Elements of them that were looked at before they were parsed."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Replaces the handler of a call by one that reads the message itself."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.request_streaming:  # reflection's
            return wrapped(handler, _drive, handler.request_deserializer)
        shape = self._shapes[handler_call_details.method]
        parse: Any = handler.request_deserializer
        is_stream = handler.response_streaming

        async def receive(call: Call, context: Context) -> Any:  # noqa: ANN401  # a message
            data = await self._read(call, context)
            if len(data) <= _N_BYTES_AT_ONCE:
                return self._parse(shape, parse, call, data, is_stream=is_stream)
            if is_ours(call.method):
                self._calls.hold(call, self._calls.memory.cost(len(data), 0, is_stream=False))
            async with self.parsing.turn(call.tenant, len(data)):
                self._calls.memory.release(call)  # what it holds as parsed is held instead
                return self._parse(shape, parse, call, data, is_stream=is_stream)

        async def wrap(inner: Behaviour, _: object, context: Context) -> Answer:
            call = current_call()
            if is_ours(call.method):
                self._calls.claim(call)
            # Nothing here may keep the message while the handler runs.
            return await inner(await receive(call, context), context)

        return wrapped(handler, wrap)

    async def _read(self, call: Call, context: Context) -> bytes:
        """Returns the message of a call as bytes.

        Raises:
            InvalidRequest: there is none (INVALID_FIELD).
            QuotaExceeded: its tenant has sent too much of late (TENANT_QUOTA_EXCEEDED); unread.
        """
        is_counted = is_ours(call.method)
        if is_counted:
            await self._check_intake(call)
        data: Any = await context.read()
        call.go_on()
        call.is_received = True
        if not isinstance(data, bytes):
            raise InvalidRequest([FieldViolation("request", "is missing")])
        self.n_bytes += len(data)
        if is_counted:
            self._calls.intake.add(call.tenant.name, len(data), self._clock())
        return data

    async def _check_intake(self, call: Call) -> None:
        """Refuses a call whose tenant has sent too much of late, unread and not at once.

        Every call costs the event loop time, refused or not: who comes back at once waits here.

        Raises:
            QuotaExceeded: its tenant has (TENANT_QUOTA_EXCEEDED).
        """
        try:
            self._calls.check_intake(call, self._clock())
        except QuotaExceeded:
            call.go_on()  # its message is late because it is not read
            await asyncio.sleep(REFUSAL_S)
            raise

    def _parse(
        self,
        shape: Shape,
        parse: Callable[[bytes], Any],
        call: Call,
        data: bytes,
        *,
        is_stream: bool,
    ) -> Any:  # noqa: ANN401  # a message of the method's own type
        """Returns the message of a call, for which memory is held until its end.

        Raises:
            InvalidRequest: it breaks a bound, or is none (INVALID_FIELD).
            ContextTooLong: it has more token ids than the context (CONTEXT_TOO_LONG).
            ServerOverloaded: open calls hold too much memory (SERVER_OVERLOADED).
        """
        scan = Scan(shape)
        try:
            scan.check(data)
            if is_ours(call.method):
                memory = self._calls.memory
                n_bytes = memory.cost(len(data), scan.n_listed, is_stream=is_stream)
                self._calls.hold(call, n_bytes)
            return parse(data)
        except TooMany as error:
            if error.path == PROMPT_TOKENS:
                raise ContextTooLong(error.n, 1, error.n_max) from None
            raise
        except DecodeError:
            problem = "is no message of this method's type, or a text in it is no UTF-8"
            raise InvalidRequest([FieldViolation("request", problem)]) from None
        finally:
            self.n_elements += scan.n_elements
            if is_ours(call.method) and scan.n_elements > _N_ELEMENTS_FREE:
                n_bytes = (scan.n_elements - _N_ELEMENTS_FREE) * _N_BYTES_OF_ELEMENT
                self._calls.intake.add(call.tenant.name, n_bytes, self._clock())


async def _drive(inner: Behaviour, request: object, context: Context) -> None:
    """Writes what a handler of another library yields."""
    making: Any = inner(request, context)
    async with contextlib.aclosing(making) as answers:
        async for answer in answers:
            # The whole call has the time of a first message; it waits for its reader now.
            current_call().is_received = True
            await context.write(answer)


def count_front(gate: Gate, receive: Receive, n_watchers: int) -> FrontCounts:
    """Returns what was counted of calls.

    Args:
        gate: What counts them.
        receive: What reads their messages.
        n_watchers: Calls of Health.Watch now.
    """
    calls = gate.calls
    return FrontCounts(
        n_calls=len(calls),
        n_refused=dict(calls.n_refused),
        n_stuck=calls.n_stuck,
        n_watchers=n_watchers,
        n_descriptors=gate.descriptors.n_open,
        n_bytes=receive.n_bytes,
        n_held_bytes=calls.memory.n_bytes,
    )
