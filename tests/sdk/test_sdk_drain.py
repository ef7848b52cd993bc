"""A client with two servers, one of which drains under load: who calls sees nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

N_CALLERS = 24
N_TOKENS = 12
DRAIN_S = 60.0
"""More than running streams take on any machine: none is cut."""


@pytest.fixture
async def servers(start_server: ServerFactory) -> tuple[Server, Server]:
    first, second = [
        await start_server(FakeEngine(step_s=0.002), drain_timeout_s=DRAIN_S) for _ in range(2)
    ]
    return first, second


def target_of(servers: tuple[Server, Server]) -> str:
    return "ipv4:" + ",".join(server.target for server in servers)


def by_use(servers: tuple[Server, Server]) -> tuple[Server, Server]:
    """Returns the server that a client is connected with, and the other one.

    gRPC asks the first address first, and the next one as well where that takes a quarter of a
    second.
    """
    used, other = sorted(servers, key=lambda server: server.receive.n_bytes, reverse=True)
    return used, other


def n_done(server: Server) -> int:
    """Returns how many requests a server has served to their end."""
    return server.loop.metrics._n_requests["length"]


async def drained_under_load(
    servers: tuple[Server, Server],
    callers: Sequence[asyncio.Future[int]],
    stop: Callable[[], None],
    eventually: Eventually,
) -> int:
    """Drains the server in use while callers call; returns how many calls they have made."""
    try:
        await eventually(lambda: max(map(n_done, servers)) > N_CALLERS)
        first, second = by_use(servers)
        assert n_done(second) == 0, "one of them is used"
        await first.shutdown()
        n_before = n_done(second)
        await eventually(
            lambda: n_done(second) > n_before + 2 * N_CALLERS or any(it.done() for it in callers)
        )
    finally:
        stop()
    return sum(await asyncio.gather(*callers))


async def test_callers_of_a_client_see_nothing_of_a_drain(
    servers: tuple[Server, Server], eventually: Eventually
) -> None:
    is_over = asyncio.Event()

    async def generate(client: drafthouse.AsyncClient) -> int:
        n_calls = 0
        while not is_over.is_set():
            result = await client.generate("x", max_output_tokens=N_TOKENS, ignore_end_token=True)
            assert len(result.token_ids) == N_TOKENS
            n_calls += 1
        return n_calls

    async def count(client: drafthouse.AsyncClient) -> int:
        while not is_over.is_set():
            assert await client.tokenize("ab") == [97, 98]
        return 0

    async with drafthouse.AsyncClient(target_of(servers)) as client:
        works: list[Awaitable[int]] = [generate(client) for _ in range(N_CALLERS)]
        works += [count(client) for _ in range(4)]
        callers = [asyncio.ensure_future(work) for work in works]
        n_calls = await drained_under_load(servers, callers, is_over.set, eventually)
    assert n_calls == sum(map(n_done, servers)), "each was served once"


async def test_nor_do_callers_of_the_blocking_client(
    servers: tuple[Server, Server], eventually: Eventually
) -> None:
    is_over = threading.Event()

    def generate(client: drafthouse.Client) -> int:
        n_calls = 0
        while not is_over.is_set():
            stream = client.generate("x", max_output_tokens=N_TOKENS, ignore_end_token=True)
            assert len(stream.result().token_ids) == N_TOKENS
            n_calls += 1
        return n_calls

    loop = asyncio.get_running_loop()
    with (
        ThreadPoolExecutor(N_CALLERS) as threads,
        drafthouse.Client(target_of(servers)) as client,
    ):
        callers = [loop.run_in_executor(threads, generate, client) for _ in range(N_CALLERS)]
        n_calls = await drained_under_load(servers, callers, is_over.set, eventually)
    assert n_calls == sum(map(n_done, servers))


async def test_a_client_without_calls_finds_the_other_server(
    servers: tuple[Server, Server],
) -> None:
    async with drafthouse.AsyncClient(target_of(servers), retry=None) as client:
        await client.generate("x", max_output_tokens=2, ignore_end_token=True)
        first, second = by_use(servers)
        await first.shutdown()
        for _ in range(3):
            await client.generate("x", max_output_tokens=2, ignore_end_token=True)
    assert (n_done(first), n_done(second)) == (1, 3)


async def test_a_stream_that_has_begun_ends_where_it_runs(servers: tuple[Server, Server]) -> None:
    async with drafthouse.AsyncClient(target_of(servers)) as client:
        stream = client.generate("x", max_output_tokens=200, ignore_end_token=True)
        chunks = aiter(stream)
        await anext(chunks)
        first, second = by_use(servers)
        ending = asyncio.create_task(first.shutdown())
        assert sum([len(chunk.token_ids) async for chunk in chunks]) > 0
        assert len((await stream.result()).token_ids) == 200
        await ending
    assert (n_done(first), n_done(second)) == (1, 0)
