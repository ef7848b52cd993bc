"""The stream of one generation: iterate it, or wait for its end; leave it, and its slot is free."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from types import TracebackType
from typing import Protocol, TypeAlias

from drafthouse._errors import Cancelled, DrafthouseError, InternalError, map_grpc_errors
from drafthouse._events import Chunk, Collected, Result, chunk_from
from drafthouse._retry import Attempts, is_handed_back
from drafthouse._transport import NotCopied, has_begun
from drafthouse.v1 import generation_pb2

__all__ = ["AsyncGenerationStream", "GenerationStream", "cancelled_count"]

_Response: TypeAlias = generation_pb2.GenerateResponse
_Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]] | None"


def cancelled_count() -> int:
    """Returns how often the running task was asked to end.

    It may have been before: Python 3.11 and 3.12 leave that so behind a `TaskGroup` that failed.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class _Call(Protocol):
    """What is needed of a call of `grpc`."""

    def __next__(self) -> _Response: ...
    def cancel(self) -> bool: ...
    def initial_metadata(self) -> _Metadata: ...


class _AsyncCall(Protocol):
    """What is needed of a call of `grpc.aio`."""

    async def read(self) -> object: ...  # a response, or grpc.aio.EOF
    def cancel(self) -> bool: ...
    async def initial_metadata(self) -> _Metadata: ...


class _Loop:
    """One loop over a stream. Lives exactly as long as the loop, whose end thus ends the stream."""

    is_refused = False
    """Whether another loop reads the stream, which the end of this one does not end."""


class _Progress(NotCopied):
    """How far a generation has come, and who reads it; no I/O."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._collected = Collected()
        self._has_answer = False
        self._has_left = False
        self._end = "the stream was left before its end"
        self._result: Result | None = None
        self._admitting = threading.RLock()  # a handler of a signal may read, too
        self._is_reading = False
        self._reader: Callable[[], _Loop | None] = lambda: None

    def _begin_read(self, loop: _Loop) -> bool:
        """Returns whether there is something to read, which `loop` shall do now.

        Args:
            loop: that reads.

        Raises:
            Cancelled: the stream was left before its end.
            RuntimeError: another thread or task waits for what comes next.
        """
        with self._admitting:
            if self._result is not None:
                return False
            self._refuse_left()
            loop.is_refused = self._is_reading and self._reader() is not loop
            if self._is_reading:
                kind = "thread" if isinstance(self, GenerationStream) else "task"
                raise RuntimeError(
                    f"the stream is read by another {kind}, and has one reader at a time; wait for"
                    " that one and ask for the `result` then, or have it pass on what it reads"
                )
            self._reader = weakref.ref(loop)
            self._is_reading = True
            return True

    def _refuse_left(self) -> None:
        """Refuses to go on with a stream that was left, perhaps while it waited, or has failed.

        Raises:
            Cancelled: the stream was left before its end.
        """
        if self._has_left:
            raise Cancelled(self._end)

    def _note_end(self, error: BaseException) -> None:
        """Notes why there is nothing more to read, for who reads on; the text alone: no cycle."""
        if isinstance(error, DrafthouseError) and not self._has_left:
            self._end = f"the stream has failed before: {error}"

    def _delay_s(self, error: DrafthouseError, metadata: _Metadata) -> float:
        """Returns the wait before the next attempt; raises the error when there is none.

        Args:
            error: by which the call ended.
            metadata: with which it began; nothing where it did not.
        """
        if self._has_answer or self._has_left:
            raise error  # what was already handed out cannot be taken back
        is_billed = error.usage is not None or has_begun(metadata)
        if is_billed and not is_handed_back(error):
            raise error  # another one would be billed as well
        return self._attempts.delay_s(error)

    def _take(self, message: _Response | None) -> Chunk | None:
        """Notes a message; None is the end of the stream. Returns its chunk, None at the result."""
        if message is None:
            raise InternalError("the stream ended without a result")
        if not self._has_answer:
            self._has_answer = True
            self._attempts.succeed()
        if message.WhichOneof("event") == "result":
            self._result = self._collected.finish(message.result)
            return None
        chunk = chunk_from(message)
        self._collected.add(chunk)
        return chunk


class GenerationStream(_Progress):
    """Chunks of a generation that runs on the server.

    A `for` loop over the stream yields every `Chunk`; `text` and `result` wait for the end. Leaving
    the loop early, by `break` or by an exception, ends the generation and frees its slot; so do
    `close`, the end of a `with` block, and garbage collection.

    A stream has one reader at a time: while a thread waits for a chunk, others that read are
    refused. A loop itself (`iter`) may go on in another thread.

    Args:
        start: starts the call with this many seconds to go.
        attempts: of this call.
    """

    def __init__(self, start: Callable[[float | None], _Call], attempts: Attempts) -> None:
        super().__init__(attempts)
        self._start = start
        self._left = threading.Event()
        self._call = start(attempts.remaining_s())

    def __iter__(self) -> Iterator[Chunk]:
        """Returns the chunks that are left.

        Raises:
            DrafthouseError: the generation failed, at the chunk where it did.
            RuntimeError: another thread reads the stream.
        """
        return _Iteration(self)

    def text(self) -> str:
        """Waits for the end and returns the whole text.

        Raises:
            DrafthouseError: the generation failed, or was left before its end.
            RuntimeError: another thread reads the stream.
        """
        return self.result().text

    def result(self) -> Result:
        """Waits for the end and returns the finished generation.

        Raises:
            DrafthouseError: the generation failed, or was left before its end.
            RuntimeError: another thread reads the stream.
        """
        for _ in self:
            pass
        assert self._result is not None, "an iteration that ends has met the result"
        return self._result

    def close(self) -> None:
        """Ends the generation if it still runs. Harmless when done twice."""
        self._has_left = True
        self._left.set()
        if self._result is None:
            self._call.cancel()

    def __enter__(self) -> GenerationStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # the call itself may have failed to start
            self.close()

    def _read(self, loop: _Loop) -> Chunk | None:
        """Waits for the next chunk of a loop; None when the generation has ended."""
        if not self._begin_read(loop):
            return None
        try:
            return self._take(self._next())
        except BaseException as error:  # also Ctrl-C: nobody will read on
            self._note_end(error)
            self.close()
            raise
        finally:
            self._is_reading = False

    def _next(self) -> _Response | None:
        while True:
            try:
                with map_grpc_errors():
                    return next(self._call, None)
            except DrafthouseError as error:
                delay_s = self._delay_s(error, self._call.initial_metadata())
            self._left.wait(delay_s)
            self._refuse_left()
            self._call = self._start(self._attempts.remaining_s())
            self._refuse_left()  # `close` of another thread may have met the call before


class _Iteration(_Loop):
    """A `for` loop over a stream."""

    def __init__(self, stream: GenerationStream) -> None:
        self._stream = stream

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Chunk:
        chunk = self._stream._read(self)
        if chunk is None:
            raise StopIteration
        return chunk

    def __del__(self) -> None:
        if not self.is_refused:
            self._stream.close()


class AsyncGenerationStream(_Progress):
    """Chunks of a generation that runs on the server, for asyncio.

    An `async for` loop over the stream yields every `Chunk`; `text` and `result` wait for the end,
    and awaiting the stream itself is awaiting its `result`. Leaving the loop early, by `break`, by
    an exception or because its task is cancelled, ends the generation and frees its slot; so do
    `aclose`, the end of an `async with` block, and garbage collection.

    A stream has one reader at a time: while a task waits for a chunk, others that read are refused.
    A loop itself (`aiter`) may go on in another task.

    Args:
        start: starts the call with this many seconds to go.
        attempts: of this call.
    """

    def __init__(self, start: Callable[[float | None], _AsyncCall], attempts: Attempts) -> None:
        super().__init__(attempts)
        self._start = start
        self._left = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._call = start(attempts.remaining_s())

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Returns the chunks that are left.

        Raises:
            DrafthouseError: the generation failed, at the chunk where it did.
            RuntimeError: another task reads the stream.
        """
        return _AsyncIteration(self)

    def __await__(self) -> Generator[object, None, Result]:
        return self.result().__await__()

    async def text(self) -> str:
        """Waits for the end and returns the whole text.

        Raises:
            DrafthouseError: the generation failed, or was left before its end.
            RuntimeError: another task reads the stream.
        """
        return (await self.result()).text

    async def result(self) -> Result:
        """Waits for the end and returns the finished generation.

        Raises:
            DrafthouseError: the generation failed, or was left before its end.
            RuntimeError: another task reads the stream.

        Cancellation:
            ends the generation.
        """
        async for _ in self:
            pass
        assert self._result is not None, "an iteration that ends has met the result"
        return self._result

    async def aclose(self) -> None:
        """Ends the generation if it still runs. Harmless when done twice."""
        self._leave()

    async def __aenter__(self) -> AsyncGenerationStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # the call itself may have failed to start
            self._abandon()

    async def _read(self, loop: _Loop) -> Chunk | None:
        """Waits for the next chunk of a loop; None when the generation has ended."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the stream belongs to another event loop; read it there alone")
        if not self._begin_read(loop):
            return None
        n_cancelled = cancelled_count()
        try:
            return self._take(await self._next())
        except asyncio.CancelledError as error:
            if cancelled_count() > n_cancelled or not self._has_left:
                self._leave()
                raise
            # Not this task was cancelled but the call: by another task, or by closing the client.
            raise Cancelled("the stream was left before its end") from error
        except BaseException as error:
            self._note_end(error)
            self._leave()
            raise
        finally:
            self._is_reading = False

    def _abandon(self) -> None:
        """Ends the generation if it still runs, from any thread, as garbage collection may."""
        if self._result is None and not self._has_left and not self._loop.is_closed():
            self._has_left = True
            self._loop.call_soon_threadsafe(self._call.cancel)

    def _leave(self) -> None:
        self._has_left = True
        self._left.set()
        if self._result is None:
            self._call.cancel()

    async def _next(self) -> _Response | None:
        while True:
            try:
                with map_grpc_errors():
                    message = await self._call.read()
                return message if isinstance(message, generation_pb2.GenerateResponse) else None
            except DrafthouseError as error:
                delay_s = self._delay_s(error, await self._call.initial_metadata())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._left.wait()
            self._refuse_left()
            self._call = self._start(self._attempts.remaining_s())


class _AsyncIteration(_Loop):
    """An `async for` loop over a stream."""

    def __init__(self, stream: AsyncGenerationStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _AsyncIteration:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._stream._read(self)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __del__(self) -> None:
        if not self.is_refused:
            self._stream._abandon()
