"""A server whose keys are in a store: revoked, replaced and lost while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tests.support.databases import Daemon, postgresql
from tests.support.shell import Shell

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import services
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy import key_ring
from drafthouse_server.tenancy.keys import id_of_key, make_key

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.05)
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 20.0)  # a slow store is not away


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")


@pytest.fixture(scope="module")
def database() -> Iterator[tuple[Daemon, str]]:
    with postgresql() as found:
        yield found


@pytest.fixture
async def server(start_server: ServerFactory, shell: Shell) -> Server:
    return await start_server(FakeEngine(step_s=0.002), **shell.settings)


def client_of(server: Server, key: str | None) -> drafthouse.AsyncClient:
    return drafthouse.AsyncClient(server.target, api_key=key, retry=None)


async def n_tokens(server: Server, key: str | None) -> int:
    async with client_of(server, key) as client:
        result = await client.generate("x", max_output_tokens=2)
        return result.usage.output_tokens


async def test_a_key_of_the_command_line_opens_a_running_server(
    server: Server, shell: Shell
) -> None:
    assert await n_tokens(server, shell.add_key()) == 2
    for key in (None, "garbage", make_key().text):
        with pytest.raises(drafthouse.InvalidApiKey):
            await n_tokens(server, key)


async def test_the_log_names_the_key_by_its_id_alone(
    server: Server, shell: Shell, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    caplog.set_level("DEBUG")
    key = shell.add_key()
    assert await n_tokens(server, key) == 2
    shell.revoke(key)
    await eventually(lambda: "was revoked" in caplog.text)
    with pytest.raises(drafthouse.InvalidApiKey):
        await n_tokens(server, key)
    assert key.split("_")[2] not in caplog.text
    assert id_of_key(key) is not None
    assert f"key {id_of_key(key)} of tenant acme was revoked" in caplog.text


@pytest.mark.parametrize("revoked_streams", ["end", "finish"])
@pytest.mark.parametrize("how", ["revoke", "delete"])
async def test_revocation_under_streams(
    start_server: ServerFactory,
    shell: Shell,
    eventually: Eventually,
    revoked_streams: str,
    how: str,
) -> None:
    engine = FakeEngine(step_s=0.002)
    server = await start_server(engine, revoked_streams=revoked_streams, **shell.settings)
    key, other = shell.add_key(), shell.add_key("bob")
    async with client_of(server, key) as client, client_of(server, other) as bob:
        streams = [c.generate("x", max_output_tokens=400) for c in (client, client, bob)]
        readers = [aiter(stream) for stream in streams]
        for reader in readers:
            await anext(reader)
        if how == "revoke":
            await asyncio.to_thread(shell.revoke, key)
        else:
            await asyncio.to_thread(shell.run, "tenants", "delete", "acme")
        is_ended = how == "delete" or revoked_streams == "end"
        why = "was revoked" if how == "revoke" else "the tenant was deleted"
        for reader in readers[:2]:
            if is_ended:
                with pytest.raises(drafthouse.InvalidApiKey, match=why):
                    [chunk async for chunk in reader]
            else:
                [chunk async for chunk in reader]
        [chunk async for chunk in readers[2]]
        assert (await streams[2].result()).usage.output_tokens == 400
        if not is_ended:
            assert (await streams[0].result()).usage.output_tokens == 400
        with pytest.raises(drafthouse.InvalidApiKey):
            await client.generate("x", max_output_tokens=1)
    await eventually(lambda: server.loop.statistics().n_running == 0)


class Interrupted:
    """A call's context that has something done once, while it is sending."""

    def __init__(self, inner: Any, moment: str, act: Callable[[], None]) -> None:
        self._inner = inner
        self._moment = moment
        self._act = act

    def __getattr__(self, name: str) -> Any:
        if name == self._moment:
            self._moment = ""
            asyncio.get_running_loop().call_soon(self._act)
        return getattr(self._inner, name)


@pytest.mark.parametrize("moment", ["send_initial_metadata", "write"])
async def test_a_stream_that_is_revoked_while_it_sends_is_told_so(
    start_server: ServerFactory, shell: Shell, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    key = shell.add_key()
    generate: Any = services.GenerationService.Generate
    servers: list[Server] = []

    async def interrupted(self: Any, request: Any, context: Any) -> None:
        ring = servers[0].backends.key_ring
        assert ring is not None
        act = functools.partial(ring._forget, id_of_key(key) or "")
        await generate(self, request, Interrupted(context, moment, act))

    monkeypatch.setattr(services.GenerationService, "Generate", interrupted)
    servers.append(await start_server(FakeEngine(step_s=0.002), **shell.settings))
    async with client_of(servers[0], key) as client:
        with pytest.raises(drafthouse.InvalidApiKey, match="was revoked"):
            await client.generate("x", max_output_tokens=400)
    assert servers[0].loop.statistics().n_requests == {"INVALID_API_KEY": 1}


async def test_limits_of_the_store_hold_and_change_without_a_restart(
    server: Server, shell: Shell, eventually: Eventually
) -> None:
    key = shell.add_key()
    shell.run("tenants", "set", "acme", "max_output_tokens=1")
    with pytest.raises(drafthouse.TenantQuotaExceeded):
        await n_tokens(server, key)
    shell.run("tenants", "set", "acme", "max_output_tokens=2")
    ring = server.backends.key_ring
    assert ring is not None
    await eventually(lambda: ring._known[id_of_key(key) or ""].identity.tenant.n_output_max == 2)
    assert await n_tokens(server, key) == 2


async def test_rotation_with_an_overlap_breaks_no_client(server: Server, shell: Shell) -> None:
    old = shell.add_key()
    new = shell.run("keys", "rotate", id_of_key(old) or "", "--overlap", "1h")
    for key in (old, new):
        assert await n_tokens(server, key) == 2


async def test_too_many_wrong_keys(start_server: ServerFactory, shell: Shell) -> None:
    server = await start_server(bad_keys_per_minute=3, **shell.settings)
    key, late = shell.add_key(), shell.add_key()
    assert await n_tokens(server, key) == 2
    for _ in range(3):
        with pytest.raises(drafthouse.InvalidApiKey):
            await n_tokens(server, make_key().text)
    for wrong in (late, make_key().text, "garbage"):
        with pytest.raises(drafthouse.TooManyBadKeys) as caught:
            await n_tokens(server, wrong)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 60
        assert caught.value.metadata == {"limit": "3"}
    assert await n_tokens(server, key) == 2


def refused(server: Server) -> dict[str, int]:
    """Returns how many calls were refused, by reason."""
    return {reason: n for reason, n in server.statistics().front.n_refused.items() if n}


async def test_calls_without_a_known_key_are_counted(start_server: ServerFactory) -> None:
    server = await start_server(bad_keys_per_minute=2, api_keys=("acme:right",))
    assert set(server.statistics().front.n_refused.values()) == {0}, "all are there from the start"
    with pytest.raises(drafthouse.InvalidApiKey):
        await n_tokens(server, None)
    for _ in range(2):
        with pytest.raises(drafthouse.InvalidApiKey):
            await n_tokens(server, "wrong")
    with pytest.raises(drafthouse.TooManyBadKeys):
        await n_tokens(server, "wrong")
    assert await n_tokens(server, "right") == 2
    assert refused(server) == {"INVALID_API_KEY": 3, "TOO_MANY_BAD_KEYS": 1}


async def test_too_many_wrong_keys_of_the_settings(start_server: ServerFactory) -> None:
    server = await start_server(bad_keys_per_minute=3, api_keys=("acme:right",))
    for _ in range(3):
        with pytest.raises(drafthouse.InvalidApiKey):
            await n_tokens(server, "wrong")
    with pytest.raises(drafthouse.TooManyBadKeys):
        await n_tokens(server, "wrong")
    assert await n_tokens(server, "right") == 2


async def unavailable(server: Server, key: str) -> None:
    with pytest.raises(drafthouse.StoreUnavailable) as caught:
        await n_tokens(server, key)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after == 1.0


async def test_a_file_that_is_replaced_by_its_backup(
    server: Server, shell: Shell, tmp_path: Path, eventually: Eventually
) -> None:
    path = tmp_path / "store.db"
    key = shell.add_key()
    shell.run("keys", "list")
    assert await n_tokens(server, key) == 2
    ring = server.backends.key_ring
    assert ring is not None
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite3.connect(tmp_path / "backup.db")) as target,
    ):
        source.backup(target)
    path.rename(tmp_path / "away.db")
    await eventually(lambda: ring.is_away)
    assert await n_tokens(server, key) == 2
    await unavailable(server, make_key().text)
    assert refused(server) == {"STORE_UNAVAILABLE": 1}
    for end in ("wal", "shm"):  # as docs/keys.md says
        (tmp_path / f"store.db-{end}").unlink(missing_ok=True)
    (tmp_path / "backup.db").rename(path)
    await eventually(lambda: not ring.is_away)
    assert await n_tokens(server, key) == 2
    assert await n_tokens(server, shell.add_key("bob")) == 2
    with pytest.raises(drafthouse.InvalidApiKey):
        await n_tokens(server, make_key().text)


class Outage:
    """A server over PostgreSQL, a stream that runs, and a key that it has not seen."""

    def __init__(self, server: Server, daemon: Daemon, shell: Shell) -> None:
        self.server = server
        self.daemon = daemon
        self.shell = shell
        self.key, self.unseen = shell.add_key(), shell.add_key()


@pytest.fixture
async def outage(
    start_server: ServerFactory,
    database: tuple[Daemon, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Outage]:
    daemon, url = database
    pepper = tmp_path_factory.getbasetemp() / "pepper"  # one for all stores of this database
    shell = Shell(url, pepper)
    server = await start_server(FakeEngine(step_s=0.002), **shell.settings)
    yield Outage(server, daemon, shell)
    daemon.revive()


@pytest.mark.parametrize("how", ["held", "stopped"])
async def test_a_database_that_goes_away_and_comes_back(
    outage: Outage, eventually: Eventually, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, daemon = outage.server, outage.daemon
    ring = server.backends.key_ring
    assert ring is not None
    async with client_of(server, outage.key) as client:
        stream = client.generate("x", max_output_tokens=1000)
        chunks = aiter(stream)
        await anext(chunks)
        monkeypatch.setattr(key_ring, "_TIMEOUT_S", 1.0)
        (daemon.hold if how == "held" else daemon.stop)()
        await unavailable(server, outage.unseen)
        assert ring.is_away
        for _ in range(3):
            assert await n_tokens(server, outage.key) == 2
            await unavailable(server, outage.unseen)
            await unavailable(server, make_key().text)
        [chunk async for chunk in chunks]
        assert (await stream.result()).usage.output_tokens == 1000
    (daemon.release if how == "held" else daemon.start)()
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 20.0)
    await eventually(lambda: not ring.is_away)
    assert await n_tokens(server, outage.unseen) == 2
    with pytest.raises(drafthouse.InvalidApiKey):
        await n_tokens(server, make_key().text)
    outage.shell.revoke(outage.key)
    await eventually(lambda: (id_of_key(outage.key) or "") not in ring._known)
    with pytest.raises(drafthouse.InvalidApiKey):
        await n_tokens(server, outage.key)


async def test_a_server_ends_while_its_database_is_held(
    outage: Outage, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = outage.server.backends.key_ring
    assert ring is not None
    assert await n_tokens(outage.server, outage.key) == 2
    monkeypatch.setattr(key_ring, "_TIMEOUT_S", 1.0)
    outage.daemon.hold()
    try:
        await eventually(lambda: ring.is_away)
        await outage.server.shutdown()
    finally:
        outage.daemon.release()


async def test_a_server_without_its_store_does_not_start(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    from drafthouse_server.errors import StartupError

    engine = FakeEngine()
    with pytest.raises(StartupError, match=r"cannot open the store .*: No such file"):
        await start_server(engine, store=f"sqlite:///{tmp_path / 'no' / 'store.db'}")
    with pytest.raises(StartupError, match=r"cannot be used: .*onnection"):
        await start_server(engine, store="postgresql://me:hunter2@127.0.0.1:1/x")


async def test_a_server_beyond_loopback_may_have_a_store_instead_of_keys(shell: Shell) -> None:
    from drafthouse_server.config import Config

    assert not Config(host="0.0.0.0", insecure_no_tls=True, **shell.settings).is_open  # noqa: S104  # nobody listens
    assert "sqlite" not in repr(Config(**shell.settings))
    assert os.environ.get("DRAFTHOUSE_STORE") is None
