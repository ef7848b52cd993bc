"""`drafthouse keys` and `drafthouse tenants`: what they print, and where."""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from subprocess import run

import pytest

from drafthouse_server.cli.keys import as_time
from drafthouse_server.cli.main import main
from drafthouse_server.cli.settings import load
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy.key_ring import tenant_of_record
from drafthouse_server.tenancy.keys import id_of_key
from drafthouse_server.tenancy.records import TenantRecord
from drafthouse_server.tenancy.tenants import LIMITS, Tenant, make_tenant


class Shell:
    """Runs commands on a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'store.db'}"
        self.err = ""

    def run(self, *words: str, code: int = 0) -> str:
        out, err = io.StringIO(), io.StringIO()
        found = main([*words, "--store", self.url], Terminal(out, err))
        self.err = err.getvalue()
        assert found == code, self.err
        return out.getvalue()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("DRAFTHOUSE_STORE", "DRAFTHOUSE_KEY_PEPPER_FILE", "DRAFTHOUSE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Shell(tmp_path)


def test_a_new_key_stands_alone_on_stdout_and_nowhere_else(shell: Shell) -> None:
    key = shell.run("keys", "add", "--tenant", "acme", "--label", "ci", "--expires", "90d")
    assert key.endswith("\n")
    key = key.strip()
    assert id_of_key(key) is not None
    secret = key.split("_")[2]
    assert secret not in shell.err
    assert "tenant acme is new" in shell.err
    shell.run("keys", "add", "--tenant", "acme")
    assert "is new" not in shell.err
    shown = shell.run("keys", "list") + shell.run("keys", "list", "--json")
    assert id_of_key(key) in shown  # type: ignore[operator]  # it has one
    assert secret not in shown
    for path in shell.folder.iterdir():
        assert secret.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0, path


def test_keys_are_listed_for_people_and_for_programs(shell: Shell) -> None:
    for tenant, label in (("acme", "one"), ("acme", ""), ("bob", "two")):
        shell.run("keys", "add", "--tenant", tenant, "--label", label, "--expires", "12h")
    found = json.loads(shell.run("keys", "list", "--json"))
    assert {(key["tenant"], key["label"], key["works"]) for key in found} == {
        ("acme", "one", True), ("acme", "", True), ("bob", "two", True)
    }  # fmt: skip
    assert all(key["expires_at"] - key["created_at"] == 12 * 3600 for key in found)
    assert not any("digest" in key for key in found)
    assert len(json.loads(shell.run("keys", "list", "--json", "--tenant", "bob"))) == 1
    lines = shell.run("keys", "list", "--tenant", "acme").splitlines()
    assert lines[0].split() == [
        "id", "tenant", "label", "state", "made", "expires", "last", "used"
    ]  # fmt: skip
    assert len(lines) == 4
    assert "there is no tenant 'eve'" in (
        shell.run("keys", "list", "--tenant", "eve", code=1) + shell.err
    )


def test_a_key_is_revoked_and_replaced(shell: Shell) -> None:
    first = id_of_key(shell.run("keys", "add", "--tenant", "acme", "--label", "ci").strip()) or ""
    second = shell.run("keys", "rotate", first, "--overlap", "24h").strip()
    assert "works until" in shell.err
    third = shell.run("keys", "rotate", id_of_key(second) or "").strip()
    assert "is revoked" in shell.err
    states = {key["id"]: key for key in json.loads(shell.run("keys", "list", "--json"))}
    assert states[first]["works"]
    assert not states[id_of_key(second)]["works"]
    assert states[id_of_key(third)]["label"] == "ci"
    shell.run("keys", "revoke", first)
    shell.run("keys", "revoke", first, code=1)
    assert "is revoked already" in shell.err
    shell.run("keys", "revoke", "nobody", code=1)

    assert "there is no key 'nobody'" in shell.err
    shell.run("keys", "rotate", first, code=1)
    assert len(json.loads(shell.run("keys", "list", "--json"))) == 3, "no key in its place"


def test_a_key_in_place_of_another_lives_as_long_unless_it_is_said(shell: Shell) -> None:
    """Keys of 90 days were replaced by some that never expired."""
    first = shell.run("keys", "add", "--tenant", "acme", "--expires", "90d").strip()
    place = Path(shell.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute(
            "UPDATE keys SET created_at = created_at - 864000, expires_at = expires_at - 864000"
        )
    key, lives = first, list[int | None]()
    for words in ((), ("--expires", "30d"), (), ("--expires", "never"), ()):
        key = shell.run("keys", "rotate", id_of_key(key) or "", *words).strip()
        found = {each["id"]: each for each in json.loads(shell.run("keys", "list", "--json"))}
        new = found[id_of_key(key)]
        lives.append(new["expires_at"] and new["expires_at"] - new["created_at"])
    assert lives == [90 * 86400, 30 * 86400, 30 * 86400, None, None]


def test_an_overlap_does_not_outlast_the_key(shell: Shell) -> None:
    key = shell.run("keys", "add", "--tenant", "acme", "--expires", "1h").strip()
    (listed,) = json.loads(shell.run("keys", "list", "--json"))
    shell.run("keys", "rotate", key, "--overlap", "90d")
    assert f"works until {as_time(listed['expires_at'])}" in shell.err


def test_limits_are_taken_by_the_names_of_admin_service_too(shell: Shell) -> None:
    shell.run("tenants", "add", "acme", "requests_per_second=2", "max_draft_tokens=3")
    (found,) = json.loads(shell.run("tenants", "list", "--json"))
    assert found["limits"] == {"requests_per_s": 2.0, "draft_max": 3}


class _Full(io.StringIO):
    """A result that is written to a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_key_that_cannot_be_shown_is_not_made_and_replaces_none(shell: Shell) -> None:
    first = id_of_key(shell.run("keys", "add", "--tenant", "acme").strip()) or ""
    for words in (("add", "--tenant", "bob"), ("rotate", first)):
        err = io.StringIO()
        found = main(["keys", *words, "--store", shell.url], Terminal(_Full(), err))
        assert found == 1
        assert "the output cannot be written" in err.getvalue()
        assert "revoked" not in err.getvalue().replace("until it is revoked", "")
    (key,) = json.loads(shell.run("keys", "list", "--json"))
    assert (key["id"], key["works"], key["revoked_at"]) == (first, True, None)


def test_a_key_works_no_longer_than_until_it_expires(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    key = shell.run("keys", "add", "--tenant", "acme", "--expires", "1h").strip()
    shell.run("keys", "rotate", id_of_key(key) or "", "--overlap", "30d")
    until = f"works until {as_time(1_800_003_600)}"
    assert f"key {id_of_key(key)} {until}\n" in shell.err
    assert until in shell.run("keys", "list")


def test_a_whole_key_in_place_of_its_id_is_taken_and_never_shown(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """What failed, such as a key that was pasted, stood in the audit trail with its secret."""
    key = shell.run("keys", "add", "--tenant", "acme").strip()
    with pytest.raises(SystemExit):
        shell.run("keys", "revoke", key[:-1])
    told = capsys.readouterr().err
    assert "between dh_ and the second _" in told
    assert key[16:40] not in told
    shell.run("keys", "revoke", key)
    assert "is revoked" in shell.err
    assert key[16:40] not in shell.err


def test_a_key_that_outlives_the_calendar_is_shown_and_listed(shell: Shell) -> None:
    """Else it would be in the store, unseen, and no key could be listed any more."""
    key = shell.run("keys", "add", "--tenant", "acme", "--expires", "999999w")
    assert id_of_key(key.strip()) is not None
    assert "9999-12-31 23:59" in shell.run("keys", "list")


def test_tenants_are_added_limited_listed_and_deleted(shell: Shell) -> None:
    shell.run("tenants", "add", "acme", "weight=2.5", "models=small,big")
    shell.run("tenants", "set", "acme", "max_streams=3", "weight=none")
    shell.run("keys", "add", "--tenant", "acme")
    found = json.loads(shell.run("tenants", "list", "--json"))
    assert [(t["name"], t["keys"], t["limits"]) for t in found] == [
        ("acme", 1, {"models": ["big", "small"], "max_streams": 3})
    ]
    assert "max_streams=3, models=big,small" in shell.run("tenants", "list")
    shell.run("tenants", "add", "acme", code=1)
    assert "there is a tenant 'acme' already" in shell.err
    shell.run("tenants", "delete", "acme")
    assert "with 1 keys" in shell.err
    assert json.loads(shell.run("keys", "list", "--json")) == []
    shell.run("tenants", "delete", "acme", code=1)
    shell.run("tenants", "set", "acme", code=1)


def test_every_limit_of_the_settings_can_be_set_and_makes_the_same_tenant(shell: Shell) -> None:
    values = {int: "7", float: "2.5", list: "one,two"}
    texts = [f"{limit.key}={values[limit.kind]}" for limit in LIMITS]
    shell.run("tenants", "add", "acme", *texts)
    (found,) = json.loads(shell.run("tenants", "list", "--json"))
    assert found["limits"].keys() == {limit.key for limit in LIMITS}
    record = TenantRecord("acme", 0, found["limits"])
    tenant = tenant_of_record(record, n_waiting_max=128)
    assert tenant == make_tenant("acme", found["limits"], n_waiting_max=128)
    plain = Tenant("acme")
    assert all(
        getattr(tenant, limit.attribute) != getattr(plain, limit.attribute) for limit in LIMITS
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["keys", "add", "--tenant", "a b"], "'a b' is no name of a tenant"),
        (["keys", "add", "--tenant", "x\n"], "is no name of a tenant"),
        (["keys", "add", "--tenant", "x", "--expires", "soon"], "'soon' is no time"),
        (["keys", "add", "--tenant", "x", "--expires", "0d"], "the key would never work"),
        (["tenants", "add", "x", "wings=2"], "'wings' is no limit"),
        (["tenants", "set", "x", "weight=0"], "'weight' is 0.0; expected a value in [0.001, 1000]"),
        (["tenants", "set", "x", "weight=nan"], "'weight' is nan"),
        (["tenants", "set", "x", "max_streams=-1"], "'max_streams' is -1; expected a value in [1,"),
        (["tenants", "set", "x", "max_streams=1.5"], "'max_streams' is '1.5'; expected a value"),
        (["tenants", "set", "x", "models="], "'models' is []; expected a list of names"),
    ],
)
def test_what_is_wrong_is_said(
    shell: Shell, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        shell.run(*words)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_the_store_is_found_where_the_server_finds_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def add(*words: str) -> tuple[int, str]:
        err = io.StringIO()
        return main(["keys", "add", "--tenant", "x", *words], Terminal(io.StringIO(), err)), (
            err.getvalue()
        )

    code, problem = add()
    assert code == 2
    assert "no store is set" in problem
    monkeypatch.setenv("DRAFTHOUSE_STORE", shell.url)
    assert add()[0] == 0
    monkeypatch.delenv("DRAFTHOUSE_STORE")
    settings = tmp_path / "drafthouse.toml"
    pepper = tmp_path / "elsewhere" / "pepper"
    pepper.parent.mkdir()
    settings.write_text(f'store = "{shell.url}2"\nkey_pepper_file = "{pepper}"\nparallel = 4\n')
    assert add("--config", str(settings))[0] == 0
    assert pepper.exists()
    assert len(json.loads(shell.run("keys", "list", "--json"))) == 1


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_store_is_an_error_and_not_a_server_without_keys(text: str) -> None:
    with pytest.raises(ConfigError, match="flag --store"):
        load(environment={}, flags={"store": text})


def test_a_wrong_flag_of_a_part_is_told_like_any_other(shell: Shell) -> None:
    shell.run("keys", "list", "--tennant", "x", code=2)
    assert "unknown flag '--tennant'; did you mean '--tenant'?" in shell.err


def test_other_commands_do_not_wait_for_the_database_library() -> None:
    program = (
        "import sys; from drafthouse_server.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'sqlalchemy', 'alembic'} & set(sys.modules)"
    )
    done = run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "make, list, replace and revoke API keys" in done.stdout
