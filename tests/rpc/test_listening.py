"""How calls are taken up: many in one turn of the event loop, whoever sent them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.support.http2 import Connection, connect

import drafthouse
from drafthouse_server.rpc import interceptors, listening
from drafthouse_server.rpc.listening import Acceptor

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

GET_MODEL = "/drafthouse.v1.ModelService/GetModel"
N_SHORTEST_KEEPALIVE_S = 10
"""The libraries for Go and Java raise a shorter interval between a client's pings to this."""
N_CALLS = 12
N_QUEUED = 8
N_WAITING = 200
N_TURNS = 6
"""Turns of the loop between the first and the last of them; one by one, each takes some."""


class RequestCallError(Exception):
    """As grpc's core raises it when it stops."""


class Core:
    """Stands for grpc.aio's own server."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[str]] = []
        self.n_running = 1
        self.served: list[str] = []
        self.module = SimpleNamespace()  # stands for cygrpc

    def is_running(self) -> bool:
        return self.n_running > 0

    async def _request_registered_call(self, method: bytes) -> str:
        future = asyncio.get_running_loop().create_future()
        self.asked.append(future)
        found: str = await future
        return f"{method.decode()} {found}"

    def come(self, names: list[str]) -> None:
        """Lets calls come, all at once."""
        waiting = [future for future in self.asked if not future.done()]
        for future, name in zip(waiting, names, strict=False):
            future.set_result(name)

    @property
    def n_asked(self) -> int:
        return sum(not future.done() for future in self.asked)


class Added:
    """Stands for a server of grpc.aio, to which services are added."""

    def __init__(self, core: object) -> None:
        self._server = core
        self.added: list[object] = []

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        self.added.append(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        self.added.append(service)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()

    async def _handle_rpc(  # noqa: PLR0917  # as grpc's own
        method_name: str,
        method_resolver: object,
        interceptors: object,
        rpc_state: str,
        loop: object,
        concurrency_exceeded: object,
    ) -> None:
        core.served.append(rpc_state)

    async def _schedule_rpc_coro(
        rpc_coro: Coroutine[Any, Any, None], rpc_state: str, loop: object, method_name: str
    ) -> None:
        await rpc_coro

    core.module = SimpleNamespace(
        _MethodResolver=lambda generic, registered: None,
        _RequestCallError=RequestCallError,
        _handle_rpc=_handle_rpc,
        _schedule_rpc_coro=_schedule_rpc_coro,
    )
    monkeypatch.setattr(listening, "cygrpc", core.module)
    return core


def acceptor_of(core: object) -> Acceptor:
    server: Any = Added(core)
    acceptor = Acceptor(server, ())
    acceptor.add_generic_rpc_handlers([])
    acceptor.add_registered_method_handlers("s", {"M": grpc.unary_unary_rpc_method_handler(print)})
    assert server.added == [(), "s"]
    return acceptor


async def turns(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_many_calls_of_a_method_are_asked_for_at_once_and_each_is_served(core: Core) -> None:
    assert acceptor_of(core).open()
    await turns(2)
    n_asked = core.n_asked
    assert n_asked >= N_CALLS
    core.come([str(i) for i in range(n_asked)])
    await turns(3)
    assert sorted(core.served) == sorted(f"/s/M {i}" for i in range(n_asked))
    assert core.n_asked == n_asked, "as many are asked for again"


async def test_what_fails_while_the_server_runs_is_asked_for_again_and_its_end_ends_all(
    core: Core,
) -> None:
    before = asyncio.all_tasks()
    assert acceptor_of(core).open()
    await turns(2)
    n_asked = core.n_asked
    core.asked[0].set_exception(RequestCallError())
    await turns(3)
    assert core.n_asked == n_asked
    core.n_running = 0
    for future in core.asked:
        if not future.done():
            future.set_exception(RequestCallError())
    await turns(3)
    assert asyncio.all_tasks() == before
    assert not core.served


@pytest.mark.parametrize("lacks", ["_handle_rpc", "_MethodResolver", "core"])
async def test_a_version_of_grpc_with_other_names_takes_calls_up_itself(
    core: Core, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks != "core":
        delattr(core.module, lacks)
    assert not acceptor_of(object() if lacks == "core" else core).open()
    await turns(2)
    assert not core.asked
    assert "takes up one call at a time" in caplog.text


async def test_a_burst_of_calls_is_taken_up_within_a_few_turns_of_the_loop(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the version of gRPC that is installed: before, each took turns of its own."""
    if tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 84):  # a newer one never passes by
        pytest.skip(f"gRPC {grpc.__version__} has other names: it takes up one call at a time")
    server = await start_server()
    loop: Any = asyncio.get_running_loop()
    run_once, make_id = loop._run_once, interceptors._new_id
    n_turns, taken = 0, list[int]()

    def counted() -> None:
        nonlocal n_turns
        n_turns += 1
        run_once()

    def noted() -> str:
        taken.append(n_turns)
        return make_id()

    monkeypatch.setattr(loop, "_run_once", counted)
    monkeypatch.setattr(interceptors, "_new_id", noted)
    for block_s in (0.1, 0.4, 1.6, 6.4):  # as long as it takes gRPC's own threads to read them all
        taken.clear()
        with contextlib.closing(Connection(server.target)) as connection:
            for _ in range(N_CALLS):
                connection.open(GET_MODEL, b"")
            time.sleep(block_s)  # noqa: ASYNC251  # nobody takes them up meanwhile
            await eventually(lambda: len(taken) == N_CALLS)
        if taken[-1] - taken[0] <= N_TURNS:
            break
    assert taken[-1] - taken[0] <= N_TURNS


async def test_a_client_without_a_call_may_ping_as_often_as_one_with(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default one in two hours is allowed: the third after it ended the connection."""
    monkeypatch.setattr(listening, "_MIN_PING_INTERVAL_S", 0)  # these come at once
    server = await start_server()
    async with connect(f"127.0.0.1:{server.port}") as client:
        client.ping(20)
        await eventually(lambda: client.n_pongs == 20 or client.has_goaway)
        assert not client.has_goaway


def test_pings_of_gos_and_javas_shortest_interval_may_come_late() -> None:
    """One that was late makes the next one seem early; after three such a call would end."""
    assert 2 * listening._MIN_PING_INTERVAL_S <= N_SHORTEST_KEEPALIVE_S


async def test_a_client_with_many_calls_at_once_waits_and_none_is_refused(
    start_server: ServerFactory,
) -> None:
    """Over one connection, with nothing but defaults beside small queues.

    Before, gRPC's core refused calls (REFUSED_STREAM) while those that were over were not freed
    yet, and the tenant's queue was full with one connection's calls.
    """
    server = await start_server(tenant_queue_size=N_QUEUED)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        calls = [client.generate("x", max_output_tokens=2).result() for _ in range(N_WAITING)]
        results = await asyncio.gather(*calls)
    assert [result.usage.output_tokens for result in results] == [2] * N_WAITING


async def test_calls_that_were_taken_back_leave_room_for_the_next_one(
    start_server: ServerFactory,
) -> None:
    server = await start_server(max_concurrent_streams=2)
    with contextlib.closing(Connection(server.target)) as connection:
        assert await asyncio.to_thread(connection.ping)  # the server's settings have come
        with connection.gathered():  # nothing is freed in between
            for _ in range(N_CALLS):
                connection.reset(connection.open(GET_MODEL, b""))
            kept = connection.open(GET_MODEL, None)  # which is not answered
        assert await asyncio.to_thread(connection.ping)
        assert kept not in connection.ended
