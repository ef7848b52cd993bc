"""Health: no watcher holds up another, nor the server's end."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.admin import admin
from tests.support.http2 import connect

import drafthouse
from drafthouse.v1 import admin_pb2
from drafthouse_server.usage import journal

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

    from drafthouse_server.rpc.server import Server

WATCH = "/grpc.health.v1.Health/Watch"
Response = health_pb2.HealthCheckResponse


def watch(channel: grpc.aio.Channel, service: str = "") -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=service))


async def test_a_watcher_hears_every_lasting_change(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        watcher = watch(channel)
        assert (await watcher.read()).status == Response.SERVING
        for is_serving in (False, True, False):
            server._health.set(is_serving=is_serving)
            status = (await watcher.read()).status
            assert status == (Response.SERVING if is_serving else Response.NOT_SERVING)
        unknown = watch(channel, "no.such.Service")
        assert (await unknown.read()).status == Response.SERVICE_UNKNOWN


async def test_one_that_reads_nothing_and_one_that_has_left_silence_nobody(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafthouse_server.rpc.server._FLUSH_S", 0.1)
    # Times of which none is waited for.
    server = await start_server(drain_timeout_s=600, slow_reader_timeout_s=600)
    async with (
        connect(server.target, window=0) as rude,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        for _ in range(5):
            rude.open(WATCH, b"")
        left = watch(channel)
        await left.read()
        await eventually(lambda: server._health.n_watchers == 6)
        left.cancel()
        await eventually(lambda: server._health.n_watchers == 5)
        polite = watch(channel)
        assert (await polite.read()).status == Response.SERVING
        shutdown = asyncio.create_task(server.shutdown())
        assert (await polite.read()).status == Response.NOT_SERVING
        async with asyncio.timeout(100):  # a guard: with the library's servicer it never ends
            await shutdown


async def test_watchers_are_bounded_and_checks_are_answered_all_the_same(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(max_health_watchers=3)
    async with grpc.aio.insecure_channel(server.target) as channel:
        watchers = [watch(channel) for _ in range(3)]
        for watcher in watchers:
            await watcher.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(channel).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Response.SERVING
        watchers[0].cancel()
        await eventually(lambda: server._health.n_watchers == 2)
        assert (await watch(channel).read()).status == Response.SERVING


async def test_a_watcher_that_reads_nothing_loses_its_stream(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(slow_reader_timeout_s=0.05)
    async with connect(server.target, window=0) as rude:
        stream = rude.open(WATCH, b"")
        await eventually(lambda: server._health.n_watchers == 1)
        await eventually(lambda: server._health.n_watchers == 0)
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(4):  # gRPC keeps the calls that came last until others come
                await stub.Check(health_pb2.HealthCheckRequest())
        await eventually(lambda: stream in rude.ended)


async def test_health_may_be_closed(start_server: ServerFactory) -> None:
    server = await start_server(api_keys=("a:k",), open_health=False)
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer k"),)
        found = await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)
        assert found.status == Response.SERVING


@pytest.mark.parametrize("on_full", ["refuse", "unbilled"])
async def test_a_full_usage_journal_that_refuses_streams_is_not_serving_until_it_has_room(
    start_server: ServerFactory,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_full: str,
) -> None:
    server = await start_server(
        admin_port=free_port, usage_journal=str(tmp_path), usage_on_full=on_full
    )
    interval = Duration(nanos=10**7)
    async with (
        grpc.aio.insecure_channel(server.target) as channel,
        drafthouse.AsyncClient(server.target, retry=None) as client,
        admin(free_port) as stub,
    ):
        watcher, loads = (
            watch(channel),
            stub.WatchLoad(admin_pb2.WatchLoadRequest(interval=interval)),
        )
        assert (await watcher.read()).status == Response.SERVING

        async def until(state: Any) -> None:
            while (await loads.read()).load.state != state:
                pass

        await until(admin_pb2.SERVER_STATE_SERVING)

        def fail(self: Any, content: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as disk:
            disk.setattr(journal._File, "append", fail)
            await client.generate("x", max_output_tokens=3)  # is let in, and finds the disk full
            if on_full == "unbilled":
                await client.generate("x", max_output_tokens=3)
                assert await client.health()
                return
            await until(admin_pb2.SERVER_STATE_USAGE_UNAVAILABLE)
            assert (await watcher.read()).status == Response.NOT_SERVING
            assert not await client.health()
            server._on_health()  # what the engine's steps say makes no difference
            assert not await client.health()
            with pytest.raises(drafthouse.UsageUnavailable):
                await client.generate("x", max_output_tokens=3)
        await until(admin_pb2.SERVER_STATE_SERVING)
        assert (await watcher.read()).status == Response.SERVING
        await client.generate("x", max_output_tokens=3)


async def test_what_ended_stays_ended(server: Server) -> None:
    server._health.end()
    server._health.set(is_serving=True)
    async with grpc.aio.insecure_channel(server.target) as channel:
        late = watch(channel)
        assert (await late.read()).status == Response.NOT_SERVING
        assert await late.read() is grpc.aio.EOF
