"""The audit trail: a line for every administrative act, and never a secret."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.certificates import Authority, replace

from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError
from drafthouse_server.operations.audit import AuditTrail, note_renewal
from drafthouse_server.operations.peers import uid_of_peer
from drafthouse_server.rpc import tls
from drafthouse_server.rpc.tls import Certificates
from drafthouse_server.tenancy.keys import id_of_key

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

ME = f"uid:{os.getuid()}"
NOON = 1763899200.25  # 2025-11-23T12:00:00.25Z


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_line_has_who_what_when_of_what_and_the_outcome(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    trail = AuditTrail(str(path), lambda: NOON)
    trail.note(ME, "SetLimits", "tenant:acme", detail={"limits": {"weight": 2.0}})
    trail.note("signal:SIGTERM", "Drain", "server")
    first, second = lines(path)
    assert first == {
        "time": "2025-11-23T12:00:00.250Z",
        "actor": ME,
        "action": "SetLimits",
        "target": "tenant:acme",
        "outcome": "ok",
        "detail": {"limits": {"weight": 2.0}},
    }
    assert "detail" not in second
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_was_renamed_gets_no_more_lines(tmp_path: Path) -> None:
    path, old = tmp_path / "audit", tmp_path / "audit.1"
    trail = AuditTrail(str(path))
    trail.note(ME, "GetStatus", "server")
    path.rename(old)
    trail.note(ME, "Drain", "server")
    assert [found["action"] for found in lines(old)] == ["GetStatus"]
    assert [found["action"] for found in lines(path)] == ["Drain"]


def test_without_a_file_the_log_has_the_lines_at_any_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        AuditTrail().note(ME, "Drain", "server")
    finally:
        root.setLevel(before)
    (record,) = [record for record in caplog.records if "audit" in record.name]
    assert json.loads(record.getMessage())["action"] == "Drain"


def test_a_line_that_cannot_be_written_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trail = AuditTrail(str(tmp_path / "none" / "audit"))
    trail.note(ME, "Drain", "server")
    assert '"action": "Drain"' in caplog.text
    assert "cannot be written" in trail.check()
    assert trail.check().endswith("or change its owner"), "it says what to do"


@pytest.mark.parametrize("n_bytes", [0, 7])
def test_a_line_that_a_full_disk_cuts_is_in_the_log_and_cuts_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    n_bytes: int,
) -> None:
    path = tmp_path / "audit"
    trail = AuditTrail(str(path))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:n_bytes]))
    trail.note(ME, "SetLimits", "tenant:acme")
    monkeypatch.undo()
    assert '"action": "SetLimits"' in caplog.text
    trail.note(ME, "Drain", "server")
    assert json.loads(path.read_text("utf-8").splitlines()[-1])["action"] == "Drain"


def test_a_pipe_that_nobody_reads_is_no_trail_and_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    os.mkfifo(path)
    assert "cannot be written" in AuditTrail(str(path)).check()


def test_a_line_that_no_thread_is_left_for_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who tells of a signal ends the server next: it must not fail."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    AuditTrail(str(tmp_path / "audit")).note_aside("signal:SIGTERM", "Drain", "server")
    assert '"action": "Drain"' in caplog.text


async def test_a_server_does_not_start_without_its_trail(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"audit_file .* cannot be written"):
        await start_server(audit_file=str(tmp_path / "none" / "audit"))


def n_lines(path: Path) -> int:
    """Returns the lines of a trail; none where there is no file yet."""
    return path.read_text("utf-8").count("\n") if path.exists() else 0


async def test_signals_and_new_certificates_are_noted(
    start_server: ServerFactory, eventually: Eventually, tmp_path: Path
) -> None:
    authority, path = Authority(), tmp_path / "audit"
    certificate, key = authority.issue().write(tmp_path)
    # Without certificates of its own: its watch may find the new ones first, and notes them, too.
    server = await start_server(audit_file=str(path))
    reading = Certificates(Config(ssl_cert_file=certificate, ssl_key_file=key))
    reading.on_renewal = functools.partial(note_renewal, server._audit)
    authority.issue().write(tmp_path)
    reading.look()
    await eventually(lambda: n_lines(path) == 1)
    replace(Path(certificate), b"none")
    reading.look()
    await eventually(lambda: n_lines(path) == 2)
    server._on_signal(signal.SIGTERM)
    await eventually(lambda: n_lines(path) == 3)
    good, bad, drain = lines(path)
    assert good["action"] == bad["action"] == "ReloadCertificates"
    assert good["actor"] == "server"
    assert (good["outcome"], bad["outcome"]) == ("ok", "refused")
    assert good["detail"] == {"sha256": reading.fingerprint}
    assert good["target"] == f"certificate:{certificate}"
    assert (drain["actor"], drain["action"]) == ("signal:SIGTERM", "Drain")


def digest_of(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


async def test_other_authorities_are_noted_before_anybody_connects(
    start_server: ServerFactory,
    eventually: Eventually,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose administrators they are: nothing told of that."""
    monkeypatch.setattr(tls, "_LOOK_S", 0.02)
    own, path = Authority(), tmp_path / "audit"
    certificate, key = own.issue().write(tmp_path)
    authorities = {name: Authority().write(tmp_path, name) for name in ("tenants", "operators")}
    await start_server(
        admin_port=free_port,
        audit_file=str(path),
        ssl_cert_file=certificate,
        ssl_key_file=key,
        ssl_client_ca_file=authorities["tenants"],
        admin_client_ca_file=authorities["operators"],
    )
    for i, name in enumerate(authorities, 1):
        replace(Path(authorities[name]), Authority().pem)
        await eventually(lambda n=i: n_lines(path) == n)  # type: ignore[misc]  # its default
    replace(Path(certificate), b"none")
    await eventually(lambda: n_lines(path) == 3)
    await asyncio.sleep(0.1)
    told = [(line["target"], line["outcome"], line.get("detail", {})) for line in lines(path)]
    digests = [digest_of(it) for it in authorities.values()]
    assert told == [
        (f"certificate:{authorities['tenants']}", "ok", {"sha256": digests[0]}),
        (f"certificate:{authorities['operators']}", "ok", {"sha256": digests[1]}),
        (f"certificate:{certificate}", "refused", {}),
    ]


async def test_neither_a_signal_nor_who_connects_waits_for_the_disk_of_the_trail(
    start_server: ServerFactory, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hung stopped all streams at SIGTERM, and all handshakes at a renewal."""
    server = await start_server()
    may_write, written = threading.Event(), list[bool]()
    monkeypatch.setattr(server._audit, "note", lambda *_: written.append(may_write.wait(100)))
    server._on_signal(signal.SIGTERM)
    note_renewal(server._audit, "server.pem", "ab12")
    assert not written
    may_write.set()
    await eventually(lambda: written == [True, True])


def test_keys_and_tenants_are_noted_and_no_secret_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit"
    monkeypatch.setenv("DRAFTHOUSE_AUDIT_FILE", str(path))
    monkeypatch.setenv("DRAFTHOUSE_STORE", f"sqlite:///{tmp_path / 'store.db'}")
    keys = []

    def run(*words: str, code: int = 0) -> str:
        out, err = io.StringIO(), io.StringIO()
        assert main(words, Terminal(out, err)) == code, err.getvalue()
        return out.getvalue().strip()

    run("tenants", "add", "acme", "weight=2")
    keys.append(run("keys", "add", "--tenant", "acme"))
    first = id_of_key(keys[0])
    assert first is not None
    keys.append(run("keys", "rotate", first))
    run("keys", "list")
    run("tenants", "list")
    run("keys", "revoke", "none", code=1)
    run("tenants", "set", "acme", "weight=3")
    run("tenants", "delete", "acme")
    found = lines(path)
    assert [(line["action"], line["target"], line["outcome"]) for line in found] == [
        ("tenants.add", "tenant:acme", "ok"),
        ("keys.add", "tenant:acme", "ok"),
        ("keys.rotate", f"key:{first}", "ok"),
        ("keys.revoke", "key:none", "failed"),
        ("tenants.set", "tenant:acme", "ok"),
        ("tenants.delete", "tenant:acme", "ok"),
    ]
    assert {line["actor"] for line in found} == {ME}
    assert found[1]["detail"] == {"new_key": first}
    assert found[2]["detail"] == {"new_key": id_of_key(keys[1])}
    assert found[4]["detail"] == {"limits": {"weight": 3.0}}
    text = path.read_text("utf-8")
    assert not [key for key in keys if key in text or key.split("_")[2] in text]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_system_tells_whose_a_connection_over_loopback_is(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no such address")
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection((host, port)) as client:
            own = client.getsockname()[1]
            shown = f"ipv6:%5B::1%5D:{own}" if ":" in host else f"ipv4:{host}:{own}"
            assert uid_of_peer(shown, port) == os.getuid()
            assert uid_of_peer(shown, port + 1) is None
    assert uid_of_peer("unix:", port) is None
    assert uid_of_peer("ipv4:nonsense:1", port) is None
