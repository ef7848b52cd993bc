"""What a client learns of a stream that has begun, so that it is not billed for two."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse.v1 import generation_pb2
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

RETRY = drafthouse.RetryPolicy(initial_delay_s=0.001)


def outcomes(server: Server) -> list[str]:
    """Returns the list to which the outcome of each accepted stream is added."""
    found: list[str] = []
    assert server._accounting is not None
    server._accounting.on_end.append(lambda record: found.append(record.outcome))
    return found


async def test_a_stream_begins_with_its_request_id(client: drafthouse.AsyncClient) -> None:
    request = generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="abc"), max_output_tokens=2
    )
    call = client._generation.Generate(request)
    headers = dict(tuple(await call.initial_metadata()))
    messages = [message async for message in call]
    assert headers["drafthouse-request-id"] == messages[-1].result.request_id
    refused = client._generation.Generate(generation_pb2.GenerateRequest())
    assert "drafthouse-request-id" not in dict(tuple(await refused.initial_metadata()))


async def test_a_connection_that_breaks_after_the_beginning_makes_no_second_record(
    gated_engine: GatedEngine, start_server: ServerFactory, eventually: Eventually
) -> None:
    """The SDK called again, and the tenant had two records for one call."""
    server = await start_server(gated_engine)
    found = outcomes(server)
    way = await asyncio.start_server(lambda r, w: relay(r, w, server.port), "127.0.0.1", 0)
    port = way.sockets[0].getsockname()[1]
    gated_engine.hold()
    async with drafthouse.AsyncClient(f"127.0.0.1:{port}", retry=RETRY) as client:
        stream = client.generate("abc", max_output_tokens=4)
        reading = asyncio.create_task(stream.text())
        await asyncio.wait_for(stream._call.initial_metadata(), 100)
        for writer in list(OPEN):
            writer.transport.abort()
        with pytest.raises(drafthouse.Unavailable):
            await asyncio.wait_for(reading, 100)
    gated_engine.release()
    await eventually(lambda: bool(found))
    assert found == ["cancelled"]
    way.close()


OPEN: set[asyncio.StreamWriter] = set()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Connects a client with the server, until a test cuts it."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
        except OSError:
            pass
        target.transport.abort()

    back, forth = await asyncio.open_connection("127.0.0.1", port)
    OPEN.update((writer, forth))
    try:
        await asyncio.gather(pump(reader, forth), pump(back, writer))
    finally:
        OPEN.difference_update((writer, forth))


async def test_a_drain_says_of_each_stream_whether_it_had_begun(
    gated_engine: GatedEngine, start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, parallel=1, drain_timeout_s=0.0)
    gated_engine.hold()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        running = asyncio.create_task(client.generate("abc", max_output_tokens=9).text())
        await eventually(lambda: gated_engine.is_stuck)
        waiting = asyncio.create_task(client.generate("abc", max_output_tokens=9).text())
        await eventually(lambda: len(server.loop._outboxes) == 2)
        ending = asyncio.create_task(server.shutdown())
        await eventually(lambda: server.loop.is_draining)
        gated_engine.release()
        for task, has_begun in ((running, "true"), (waiting, None)):
            with pytest.raises(drafthouse.ServerDraining) as caught:
                await asyncio.wait_for(task, 100)
            assert caught.value.metadata.get("hasBegun") == has_begun
            assert caught.value.usage is not None
        await ending


async def test_a_stream_that_waits_has_not_begun(
    gated_engine: GatedEngine, start_server: ServerFactory, eventually: Eventually
) -> None:
    """A proxy may carry it to another server: no header of it has been sent."""
    server = await start_server(gated_engine, parallel=1)
    gated_engine.hold()
    request = generation_pb2.GenerateRequest(
        prompt=generation_pb2.Prompt(text="abc"), max_output_tokens=2
    )
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        running = client._generation.Generate(request)
        first = asyncio.ensure_future(running.initial_metadata())
        await eventually(lambda: gated_engine.is_stuck)
        # Who comes now finds no plan to be part of.
        waiting = client._generation.Generate(request)
        second = asyncio.ensure_future(waiting.initial_metadata())
        await eventually(lambda: server.loop.admission.n_waiting == 1)
        await eventually(first.done)
        assert not second.done()
        gated_engine.release()
        for headers in await asyncio.gather(first, second):
            assert str(headers["drafthouse-request-id"]).startswith("req_")
