"""A tenant is deleted while it runs: over loopback, nothing of it is held afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.admin import admin
from tests.support.shell import Shell

import drafthouse
from drafthouse.v1 import admin_pb2
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server
from drafthouse_server.scheduling.prefix_cache import BlocksStored, CacheReset
from drafthouse_server.step import EngineLimits
from drafthouse_server.tenancy import key_ring

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=2,
    n_ctx=2 * 512,
    n_ctx_seq=512,
    n_batch=64,
    n_ubatch=64,
    n_draft_max=4,
    n_outputs_max=15,
)


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.02)


async def held_by(server: Server) -> set[str]:
    """Returns whose blocks the prefix cache holds, by slot and in host memory."""
    owners: set[str] = set()
    async with server.loop.feeds.open() as feed:
        n_resets = 0
        async for event in feed:
            n_resets += isinstance(event, CacheReset)
            if isinstance(event, BlocksStored):
                owners.add(event.tenant.partition("\0")[0])
            if n_resets and not feed._events:
                return owners
    return owners


def client_of(server: Server, key: str) -> drafthouse.AsyncClient:
    return drafthouse.AsyncClient(server.target, api_key=key, retry=None)


@pytest.mark.parametrize("revoked_streams", ["end", "finish"])
async def test_a_deleted_tenant_holds_nothing_and_its_streams_end(
    start_server: ServerFactory, tmp_path: Path, eventually: Eventually, revoked_streams: str
) -> None:
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    engine = FakeEngine(LIMITS, step_s=0.002)
    server = await start_server(
        engine, revoked_streams=revoked_streams, prompt_lookup=True, **shell.settings
    )
    keys = {name: shell.add_key(name) for name in ("acme", "bob")}
    async with client_of(server, keys["acme"]) as acme, client_of(server, keys["bob"]) as bob:
        for client in (acme, bob, acme, bob):  # the second ones' slots: the first go to host memory
            await client.generate("some words that are long enough " * 4, max_output_tokens=8)
        await eventually(lambda: server.loop.statistics().n_running == 0)
        assert await held_by(server) == {"acme", "bob"}
        streams = [c.generate("something else", max_output_tokens=450) for c in (acme, bob)]
        readers = [aiter(stream) for stream in streams]
        for reader in readers:
            await anext(reader)
        waiting = acme.generate("one that waits", max_output_tokens=4)
        await eventually(lambda: server.loop.admission.n_waiting == 1)

        shell.run("tenants", "delete", "acme")

        for stream in (readers[0], aiter(waiting)):
            with pytest.raises(drafthouse.InvalidApiKey, match="the tenant was deleted"):
                [chunk async for chunk in stream]
        with pytest.raises(drafthouse.InvalidApiKey):
            await acme.generate("x", max_output_tokens=1)
        [chunk async for chunk in readers[1]]
        assert (await streams[1].result()).usage.output_tokens == 450
    await eventually(lambda: server.loop.statistics().n_running == 0)
    await eventually(lambda: server.loop.statistics().n_waiting == 0)
    assert await held_by(server) == {"bob"}
    assert server.loop.statistics().n_requests == {"length": 5, "INVALID_API_KEY": 2}
    counts = server.loop.statistics().scheduler
    assert engine.n_cells_used == counts.n_retained_cells
    key = shell.add_key()
    async with client_of(server, key) as anew:
        result = await anew.generate("some words that are long enough " * 4, max_output_tokens=1)
    assert result.usage.reused_prompt_tokens == 0


async def test_limits_that_are_changed_are_listed_before_the_next_call(
    start_server: ServerFactory, tmp_path: Path, eventually: Eventually, free_port: int
) -> None:
    """They were those of the tenant's last call, also when it was deleted since."""
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    server = await start_server(FakeEngine(LIMITS), admin_port=free_port, **shell.settings)
    key = shell.add_key()
    async with client_of(server, key) as client, admin(free_port) as stub:
        await client.generate("x", max_output_tokens=1)
        (found,) = (await stub.ListTenants(admin_pb2.ListTenantsRequest())).tenants
        assert not found.limits.HasField("max_streams")
        shell.run("tenants", "set", "acme", "max_streams=2")
        await eventually(lambda: server.gate.calls.tenants["acme"].n_active_max == 2)
        (found,) = (await stub.ListTenants(admin_pb2.ListTenantsRequest())).tenants
        assert found.limits.max_streams == 2
        shell.run("tenants", "delete", "acme")
        await eventually(lambda: not server.gate.calls.tenants)
        assert not (await stub.ListTenants(admin_pb2.ListTenantsRequest())).tenants


async def test_one_that_is_deleted_and_made_again_at_once_is_another(
    start_server: ServerFactory, tmp_path: Path, eventually: Eventually, caplog: Any
) -> None:
    caplog.set_level("INFO")
    shell = Shell(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "pepper")
    server = await start_server(FakeEngine(LIMITS), **shell.settings)
    text = "some words that are long enough " * 4
    key = shell.add_key()
    async with client_of(server, key) as acme:
        await acme.generate(text, max_output_tokens=4)
        assert (await acme.generate(text, max_output_tokens=4)).usage.reused_prompt_tokens
    shell.run("tenants", "delete", "acme")
    again = shell.add_key()
    await eventually(lambda: "tenant acme was deleted" in caplog.text)
    async with client_of(server, again) as acme:
        result = await acme.generate(text, max_output_tokens=4)
    assert result.usage.reused_prompt_tokens == 0
