"""A stream has one reader: another one is told so, and the first goes on."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

N_TOKENS = 30


@pytest.fixture
async def steady_server(start_server: ServerFactory) -> Server:
    """A server whose generations take about half a second."""
    return await start_server(FakeEngine(step_s=0.02))


class Reader(threading.Thread):
    """Reads a stream in a thread of its own.

    Args:
        stream: to read.
    """

    def __init__(self, stream: drafthouse.GenerationStream) -> None:
        super().__init__()
        self._stream = stream
        self.has_begun = threading.Event()
        self.text = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for chunk in self._stream:
                self.text += chunk.text
                self.has_begun.set()
        except BaseException as error:
            self.error = error
            self.has_begun.set()


async def test_a_second_thread_is_refused_and_the_first_reads_on(steady_server: Server) -> None:
    """Both reads failed, by an internal error of gRPC or without a result."""

    def use() -> None:
        with drafthouse.Client(steady_server.target) as client:
            stream = client.generate("x", temperature=0, max_output_tokens=N_TOKENS)
            reader = Reader(stream)
            reader.start()
            reader.has_begun.wait()
            for read in (stream.result, stream.text, lambda: next(iter(stream))):
                with pytest.raises(RuntimeError, match="read by another thread"):
                    read()
            reader.join()
            assert reader.error is None
            # Once its loop has ended, everybody is told.
            assert stream.text() == reader.text
            assert stream.result().usage.output_tokens == N_TOKENS

    await asyncio.to_thread(use)


async def test_a_second_task_is_refused_and_the_first_reads_on(steady_server: Server) -> None:
    async def read(stream: drafthouse.AsyncGenerationStream) -> str:
        text = ""
        async for chunk in stream:
            text += chunk.text
        return text

    async with drafthouse.AsyncClient(steady_server.target) as client:
        stream = client.generate("x", temperature=0, max_output_tokens=N_TOKENS)
        text, refused = await asyncio.gather(read(stream), stream.result(), return_exceptions=True)
        assert isinstance(refused, RuntimeError)
        assert "read by another task" in str(refused)
        assert await stream.text() == text
        stream = client.generate("x", temperature=0, max_output_tokens=N_TOKENS)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0.2)
        for late in (stream.result(), stream.text(), anext(aiter(stream))):
            with pytest.raises(RuntimeError, match="read by another task"):
                await late
        assert await reading == text
        assert (await stream).usage.output_tokens == N_TOKENS


async def test_threads_may_share_a_loop_but_not_a_read(steady_server: Server) -> None:
    def use() -> None:
        with drafthouse.Client(steady_server.target) as client:
            chunks = iter(client.generate("x", max_output_tokens=N_TOKENS))
            found: list[drafthouse.Chunk] = []
            refused: list[RuntimeError] = []

            def take() -> None:
                while True:
                    try:
                        chunk = next(chunks, None)
                    except RuntimeError as error:
                        refused.append(error)
                        time.sleep(0.001)
                    else:
                        if chunk is None:
                            return
                        found.append(chunk)

            readers = [threading.Thread(target=take) for _ in range(2)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            assert refused
            assert sum(len(chunk.token_ids) for chunk in found) == N_TOKENS

    await asyncio.to_thread(use)


async def test_a_loop_goes_on_in_another_thread(steady_server: Server) -> None:
    """As where a server of asyncio asks for each chunk by `asyncio.to_thread`."""
    with drafthouse.Client(steady_server.target) as client:
        stream = client.generate("x", max_output_tokens=N_TOKENS)
        chunks: Iterator[drafthouse.Chunk] = iter(stream)
        n_tokens = 0
        while chunk := await asyncio.to_thread(next, chunks, None):
            n_tokens += len(chunk.token_ids)
        assert n_tokens == N_TOKENS
        assert (await asyncio.to_thread(stream.result)).usage.output_tokens == N_TOKENS


async def test_who_has_begun_may_take_the_rest_at_once(steady_server: Server) -> None:
    def use() -> None:
        with drafthouse.Client(steady_server.target) as client:
            stream = client.generate("x", max_output_tokens=N_TOKENS)
            chunks = iter(stream)
            next(chunks)
            assert stream.result().usage.output_tokens == N_TOKENS
            assert list(chunks) == []

    await asyncio.to_thread(use)
    async with drafthouse.AsyncClient(steady_server.target) as client:
        stream = client.generate("x", max_output_tokens=N_TOKENS)
        chunks = aiter(stream)
        await anext(chunks)
        assert (await stream.result()).usage.output_tokens == N_TOKENS
        assert [chunk async for chunk in chunks] == []
        # Another task, too, while nobody waits for a chunk.
        stream = client.generate("x", max_output_tokens=N_TOKENS)
        chunks = aiter(stream)
        await anext(chunks)
        assert (await asyncio.wait_for(stream.result(), 60)).usage.output_tokens == N_TOKENS


async def test_a_loop_that_was_left_is_no_reader(steady_server: Server) -> None:
    async with drafthouse.AsyncClient(steady_server.target) as client:
        stream = client.generate("x", max_output_tokens=N_TOKENS)

        async def leave() -> None:
            async for _ in stream:
                break
            await asyncio.sleep(60)

        leaving = asyncio.create_task(leave())
        await asyncio.sleep(0.2)
        gc.collect()
        with pytest.raises(drafthouse.Cancelled):
            await stream.result()
        leaving.cancel()
