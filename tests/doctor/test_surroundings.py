"""`drafthouse doctor` on what a server needs around it: certificates, store, Redis, RPC servers."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.test_doctor import DENSE, error_of, told
from tests.support.built import needs_extension
from tests.support.certificates import Authority
from tests.support.databases import redis_server
from tests.support.ports import free_port
from tests.support.rpc_server import rpc_server

from drafthouse_server.config import Config
from drafthouse_server.doctor.model import _device_problems, _overfull
from drafthouse_server.doctor.surroundings import CHECKS
from drafthouse_server.host.fit import Size
from drafthouse_server.host.needs import DeviceUse, Needs
from drafthouse_server.tenancy import migrations, redis_counters
from drafthouse_server.tenancy.store import Store

pytestmark = needs_extension()

ROOT = Path(__file__).resolve().parents[2]


def warning_of(*words: str, check: str) -> str:
    """Returns the one warning of a check; a server would start all the same."""
    found = told(*words)
    assert found["ok"]
    (problem,) = [it for it in found["problems"] if it["check"] == check]
    assert problem["severity"] == "warning"
    sentence: str = problem["problem"]
    return sentence


def test_settings_of_a_tenant_with_which_no_server_starts(tmp_path: Path) -> None:
    path = tmp_path / "drafthouse.toml"
    path.write_text("[tenants.acme]\nweight = 2.0\n", "utf-8")
    sentence = error_of(DENSE, "--config", str(path), check="tenants")
    assert "tenant 'acme' has settings, and without api_keys every client is" in sentence


def test_a_certificate_that_expires(tmp_path: Path) -> None:
    authority, now = Authority(), datetime.datetime.now(datetime.UTC)

    def flags(left: datetime.timedelta) -> tuple[str, ...]:
        certificate, key = authority.issue(not_after=now + left).write(tmp_path)
        return DENSE, "--ssl-cert-file", certificate, "--ssl-key-file", key

    hour, day = datetime.timedelta(hours=1), datetime.timedelta(days=1)
    found = told(*flags(31 * day))
    assert not [it for it in found["problems"] if it["check"] == "tls"]
    assert "tls" in found["passed"]
    sentence = warning_of(*flags(29 * day + hour), check="tls")
    assert f"{tmp_path}/server.crt expires on " in sentence
    assert ", in 29 days; replace certificate and key before" in sentence
    sentence = error_of(*flags(-hour), check="tls")
    assert f"{tmp_path}/server.crt expired on " in sentence


def test_a_certificate_that_is_not_valid_yet(tmp_path: Path) -> None:
    """Nothing was told of it, and no client could connect: as of a clock that was set back."""
    now, hour = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1)
    pair = Authority().issue(not_before=now + hour, not_after=now + 2000 * hour)
    certificate, key = pair.write(tmp_path)
    sentence = error_of(
        DENSE, f"--ssl-cert-file={certificate}", f"--ssl-key-file={key}", check="tls"
    )
    assert "server.crt is not valid before 20" in sentence
    assert ", or set the clock: here it is 20" in sentence


def test_administrators_authorities_that_cannot_be_used(tmp_path: Path) -> None:
    authority, path = Authority(), tmp_path / "admins.pem"
    certificate, key = authority.issue().write(tmp_path)
    flags = (
        DENSE, "--ssl-cert-file", certificate, "--ssl-key-file", key,
        "--admin-port", str(free_port()), "--admin-client-ca-file", str(path),
    )  # fmt: skip
    assert "admin_client_ca_file" in error_of(*flags, check="admin")
    path.write_text("no certificate")
    sentence = error_of(*flags, check="admin")
    assert "admin_client_ca_file" in sentence
    assert "ssl_client_ca_file" not in sentence
    path.write_bytes(authority.pem)
    assert "admin" in told(*flags)["passed"]


def test_a_store_of_an_older_release(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    flag = f"--store=sqlite:///{path}"
    Store.open(f"sqlite:///{path}").close()
    assert not [it for it in told(DENSE, flag)["problems"] if it["check"] == "store"]
    oldest = migrations.revisions()[0]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE drafthouse_schema SET version_num = ?", (oldest,))
    before = path.read_bytes()
    sentence = warning_of(DENSE, flag, check="store")
    assert f"the store's schema is {oldest}" in sentence
    assert "back the store up before" in sentence
    assert path.read_bytes() == before


def test_redis_is_asked_and_nothing_is_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_counters, "_TIMEOUT_S", 20.0)
    with redis_server("a-right-one") as (daemon, url):
        found = told(DENSE, f"--rate-counters-url={url}")
        assert "rate_counters" in found["passed"]
        refused = f"redis://:hunter2@127.0.0.1:{daemon.port}/0"
        sentence = error_of(DENSE, f"--rate-counters-url={refused}", check="rate_counters")
        assert "check user and password" in sentence
        assert "hunter2" not in sentence
        daemon.stop()
        sentence = warning_of(DENSE, f"--rate-counters-url={url}", check="rate_counters")
        assert "does not answer" in sentence
        assert "Connect call failed" in sentence
    sentence = error_of(DENSE, "--rate-counters-url=http://me:hunter2@host", check="rate_counters")
    assert "is no URL of a Redis" in sentence


def test_the_audit_trail_is_not_made_and_must_be_writable(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    assert "audit" in told(DENSE, f"--audit-file={path}")["passed"]
    assert not path.exists()
    missing = tmp_path / "none" / "audit"
    sentence = error_of(DENSE, f"--audit-file={missing}", check="audit")
    assert sentence.startswith(f"audit_file {missing} cannot be written")
    assert f"make the folder {missing.parent}" in sentence
    sentence = error_of(DENSE, f"--audit-file={tmp_path}", check="audit")
    assert sentence.endswith("it is a folder; give the path of a file")


def test_an_audit_trail_and_a_journal_on_a_disk_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    flags = types.SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    (problem,) = CHECKS["audit"](Config(audit_file=str(tmp_path / "audit")))
    told_of = f"{tmp_path} lies on a disk that is mounted read-only; give another path"
    assert problem.sentence.endswith(told_of)
    (problem,) = CHECKS["journal"](Config(usage_journal=str(tmp_path / "usage")))
    told_of = f"{tmp_path} lies on a disk that is mounted read-only; choose another usage_journal"
    assert problem.sentence.endswith(told_of)


@pytest.mark.usefixtures("ordinary_user")
def test_an_audit_trail_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.touch(mode=0o400)
    assert "cannot be written" in error_of(DENSE, f"--audit-file={path}", check="audit")


def test_an_rpc_server_that_does_not_answer() -> None:
    port = free_port()
    sentence = error_of(DENSE, "--rpc", f"127.0.0.1:{port}", check="rpc")
    assert f"the RPC server 127.0.0.1:{port} cannot be reached" in sentence
    assert sentence.endswith("start it, or take it out of rpc")


def examined(rpc: str) -> subprocess.CompletedProcess[str]:
    """Runs `doctor` with RPC servers in a process of its own, which has them until it ends."""
    command = [sys.executable, "-m", "drafthouse_server", "doctor", DENSE, "--json"]
    return subprocess.run(
        [*command, "--port", "0", "--rpc", rpc],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


@pytest.mark.model
def test_an_rpc_server_that_is_given_twice(tmp_path: Path) -> None:
    with rpc_server(tmp_path) as server:
        other_name = server.endpoint.replace("127.0.0.1", "localhost")
        run = examined(f"{other_name},{server.endpoint}")
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert "RPC0" in found["devices"]
    assert "RPC1" not in found["devices"]
    (problem,) = found["problems"]
    assert f"the RPC server {server.endpoint} does not answer" in problem["problem"]


@pytest.mark.model
def test_the_memory_of_rpc_servers_counts(tmp_path: Path) -> None:
    found, without = {}, told(DENSE)
    with rpc_server(tmp_path) as server:
        run = examined(server.endpoint)
        found = json.loads(run.stdout)
    assert (run.returncode, found["ok"]) == (0, True), run.stdout
    assert "rpc" in found["passed"]
    assert found["devices"]["RPC0"] > 0
    needs: dict[str, Any] = found["needs"]
    assert needs["RPC0_weights_bytes"] > 0
    assert needs["host_weights_bytes"] < without["needs"]["host_weights_bytes"]
    assert needs["host_total_bytes"] < without["needs"]["host_total_bytes"]


def test_a_device_without_room_is_told() -> None:
    on_device = DeviceUse(weights_bytes=1000, cells_bytes=100)
    needs = Needs(Size(8, 1024), "none", 1, DeviceUse(), (("RPC0", on_device),), 1, 0)
    assert [*_overfull(needs, {"RPC0": 1100})] == []
    assert [*_overfull(needs, {"RPC0": 1099})] == [("RPC0", 1100)]
    (problem,) = _device_problems(needs, {"RPC0": 10})
    assert "device RPC0 has 10 B free, and what would lie there takes 1.1 kB" in problem.sentence
    assert problem.severity == "warning"


@pytest.mark.parametrize("check", ["audit", "journal"])
def test_a_path_that_nobody_can_look_at_is_not_taken_for_one_that_is_made(
    monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """From Python 3.14 on pathlib says no where it said why not, and all was well."""
    for name, asked in (("exists", os.path.exists), ("is_dir", os.path.isdir)):
        monkeypatch.setattr(Path, name, lambda self, asked=asked: asked(self))
    with pytest.raises(OSError, match="name too long"):
        list(CHECKS[check](Config(audit_file="a" * 300, usage_journal="a" * 300)))
