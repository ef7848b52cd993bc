"""`drafthouse status`, `limits` and `drain` against a server of this process."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.certificates import Authority
from tests.support.served import served

import drafthouse
from drafthouse_server.cli import admin
from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import admin as rpc_admin
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.store import Store

if TYPE_CHECKING:
    from tests.conftest import ServerFactory


async def run(*words: str) -> tuple[int, str, str]:
    """Runs a command; returns its exit code and what it wrote to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    code = await asyncio.to_thread(main, words, Terminal(out, err))
    return code, out.getvalue(), err.getvalue()


async def test_status_is_a_table_for_people_and_json_for_programs(
    start_server: ServerFactory, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(admin_port=free_port)
    code, out, _ = await run("status", "--server", f"127.0.0.1:{free_port}")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("state")] == ["serving"]
    monkeypatch.setenv("DRAFTHOUSE_ADMIN_PORT", str(free_port))  # where the settings say
    code, out, _ = await run("status", "--json")
    status = json.loads(out)
    assert (code, status["load"]["state"]) == (0, "serving")
    assert status["slots"] == server.loop.engine.limits.n_seq_max
    assert status["uptime"] > 0
    server.loop.admission.drain()
    code, out, _ = await run("status", "--json")
    assert (code, json.loads(out)["load"]["state"]) == (3, "draining")


async def test_a_journal_that_cannot_be_written_is_in_the_exit_code(
    start_server: ServerFactory, free_port: int, tmp_path: Path
) -> None:
    """Every stream was refused, and the exit code said that requests are taken."""
    server = await start_server(admin_port=free_port, usage_journal=str(tmp_path / "usage"))
    place = ("--server", f"localhost:{free_port}")
    assert (await run("status", *place))[0] == 0
    journal = server.loop.metrics.usage
    journal.is_failing = True
    code, out, _ = await run("status", *place)
    assert (code, "the journal cannot be written" in out) == (3, True)
    assert (await run("status", "--json", *place))[0] == 3
    journal.is_failing = False
    assert (await run("status", *place))[0] == 0


async def test_tenants_are_shown_with_their_load(
    start_server: ServerFactory, free_port: int
) -> None:
    server = await start_server(admin_port=free_port)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.generate("hello", max_output_tokens=7)
    target = f"localhost:{free_port}"
    _, out, _ = await run("status", "--tenants", "--server", target)
    assert out.splitlines()[2].split()[0] == "default"
    _, out, _ = await run("status", "--tenants", "--json", "--server", target)
    (tenant,) = json.loads(out)
    assert (tenant["tenant"], tenant["output_tokens"]) == ("default", 7)


async def test_status_is_shown_again_and_again(
    start_server: ServerFactory, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_server(admin_port=free_port)
    asleep: list[float] = []

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        if len(asleep) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("drafthouse_server.cli.admin.time.sleep", sleep)
    words = ("status", "--json", "--watch", "0.5", "--server", f"localhost:{free_port}")
    code, out, _ = await run(*words)
    assert (code, len(out.splitlines()), asleep) == (130, 3, [0.5] * 3)


async def test_limits_are_shown_set_and_reset(
    start_server: ServerFactory, free_port: int, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = Store.open(url)
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {"weight": 2.0}, records.Change("a test", 1))
    store.close()
    await start_server(admin_port=free_port, store=url)
    place = ("--server", f"localhost:{free_port}")
    words = ("max_streams=5", "models=b,a", "weight=none", "requests_per_s=0.5")
    code, out, err = await run("limits", "acme", *words, "--json", *place)
    assert code == 0, err
    limits = {"max_streams": 5, "models": ["a", "b"], "requests_per_s": 0.5}
    assert json.loads(out) == {"acme": limits}
    _, out, _ = await run("limits", "acme", *place)
    assert out.splitlines()[2] == "acme    requests_per_s=0.5 max_streams=5 models=a,b"
    _, out, _ = await run("limits", "acme", "requests_per_second=2", "--json", *place)
    assert json.loads(out) == {"acme": limits | {"requests_per_s": 2.0}}
    words = ("max_draft_tokens=2", "draft_max=none", "weight=2", "max_streams=none")
    _, out, _ = await run("limits", "acme", *words, *place)  # of two, the last counts
    assert out.splitlines()[2] == "acme    weight=2 requests_per_s=2 models=a,b"
    code, _, err = await run("limits", "acme", "weight=-1", *place)
    assert (code, "limits.weight" in err) == (1, True)
    code, _, err = await run("limits", "nobody", *place)
    assert (code, "no tenant 'nobody'" in err) == (1, True)
    code, out, _ = await run("limits", *place)  # in force: nobody has called yet
    assert (code, len(out.splitlines())) == (0, 2)


def test_every_limit_of_the_settings_has_its_field_of_the_protos() -> None:
    assert {field: key for key, field in admin.FIELDS_OF_LIMITS.items()} == rpc_admin._KEYS
    for field, key in rpc_admin._KEYS.items():
        assert admin.limit_key(field) == admin.limit_key(key) == key
    assert admin.limit_key("colour") == "colour"


@pytest.mark.parametrize("word", ["colour=red", "weight=heavy", "max_streams=1.5"])
def test_a_limit_that_is_none_is_refused_at_once(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["limits", "acme", word], Terminal())
    assert caught.value.code == 2
    assert word.partition("=")[0] in capsys.readouterr().err


async def test_drain_waits_for_the_end_of_the_server(free_port: int) -> None:
    server = Server(
        Config(port=0, admin_port=free_port, draft_policy="fixed"), lambda: FakeEngine(step_s=0.01)
    )
    serving = await served(server)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        stream = client.generate("hello", max_output_tokens=60)
        chunks = aiter(stream)
        await anext(chunks)
        place = ("--server", f"localhost:{free_port}")
        draining = asyncio.create_task(run("drain", "--wait", "--timeout", "600", *place))
        assert [chunk async for chunk in chunks]
        assert (await stream.result()).usage.output_tokens == 60
        code, _, err = await draining
    assert code == 0
    assert err.splitlines()[0] == "the server drains: 1 requests run, 0 wait"
    assert err.splitlines()[-1] == "the server has ended"
    await serving


async def test_what_is_wrong_is_one_sentence(free_port: int, tmp_path: Path) -> None:
    place = ("--server", f"127.0.0.1:{free_port}")
    for words in (("status",), ("limits",), ("drain",)):
        code, out, err = await run(*words, *place)
        assert (code, out) == (1, "")
        assert err.startswith(f"drafthouse: no AdminService at 127.0.0.1:{free_port}; start the")
        assert len(err.splitlines()) == 1
    code, _, err = await run("status", "--server", "192.0.2.1:1")
    assert (code, "TLS" in err) == (2, True)
    code, _, err = await run("status", "--ca-file", str(tmp_path / "none"), *place)
    assert (code, "cannot read" in err) == (2, True)
    with socket.socket() as other:  # which is no server
        other.bind(("127.0.0.1", 0))
        code, _, err = await run("status", "--server", f"127.0.0.1:{other.getsockname()[1]}")
        assert (code, "no AdminService" in err) == (1, True)


async def test_an_administrators_certificate_is_shown(
    start_server: ServerFactory, free_port: int, tmp_path: Path
) -> None:
    own, administrators = Authority(), Authority()
    certificate, key = own.issue().write(tmp_path)
    await start_server(
        admin_port=free_port,
        ssl_cert_file=certificate,
        ssl_key_file=key,
        admin_client_ca_file=administrators.write(tmp_path, "administrators"),
    )
    shown, own_key = administrators.issue().write(tmp_path, "ann")
    files = ("--ca-file", own.write(tmp_path), "--cert-file", shown, "--key-file", own_key)
    code, out, err = await run("status", "--json", "--server", f"localhost:{free_port}", *files)
    assert code == 0, err
    assert json.loads(out)["load"]["state"] == "serving"
    other = own.issue().write(tmp_path, "other")  # of an authority that signs no administrators
    files = (*files[:2], "--cert-file", other[0], "--key-file", other[1])
    code, _, err = await run("status", "--server", f"localhost:{free_port}", *files)
    assert (code, "takes the certificate of --cert-file" in err) == (1, True)
    assert "give --ca-file" not in err, "it was given"
