"""`drafthouse usage`: sums and records of a journal's folder, without a server."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import pytest

from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.tenancy.store import StoreUsage
from drafthouse_server.usage.folder import JournalFolder
from drafthouse_server.usage.frames import FILE_MAGIC, encode
from drafthouse_server.usage.record import UsageRecord, make_record_id
from drafthouse_server.usage.stores import STORE_NAME, SqliteUsageStore

NOON = 1763899200.0  # 2025-11-23T12:00:00Z


def make(number: int, tenant: str, n_output: int) -> UsageRecord:
    return UsageRecord(
        *(make_record_id(number, bytes(10)), tenant, "", "", "m", f"r{number}"),
        *(NOON + number, 5, NOON + number + 1, "stop"),
        n_output=n_output,
        n_drafted=3,
        n_accepted=1,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two records in the store, one of them and two more still in the journal, one of them open."""
    records = [make(1, "acme", 10), make(2, "beta", 20), make(3, "acme", 30)]
    store = SqliteUsageStore(tmp_path / STORE_NAME)
    store.add(records[:2])
    store.close()
    still_open = dataclasses.replace(make(4, "acme", 0), outcome="")
    frames = [encode(record) for record in (*records[1:], still_open)]
    JournalFolder(tmp_path).file(1).write_bytes(FILE_MAGIC + b"".join(frames))
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(["usage", *words], Terminal(out, err)), out.getvalue(), err.getvalue()


def test_sums_are_by_tenant(folder: Path) -> None:
    code, out, _ = run("--usage-journal", str(folder), "--json")
    assert code == 0
    acme, beta = map(json.loads, out.splitlines())
    assert (acme["tenant"], acme["n_streams"], acme["n_output"]) == ("acme", 2, 40)
    assert (beta["tenant"], beta["n_streams"], beta["n_rejected"]) == ("beta", 1, 2)


def test_records_are_listed_once(folder: Path) -> None:
    code, out, _ = run("--usage-journal", str(folder), "--records", "--json")
    assert code == 0
    assert [json.loads(line)["n_output"] for line in out.splitlines()] == [10, 20, 30]


def test_conditions_choose(folder: Path) -> None:
    place = ("--usage-journal", str(folder), "--records", "--json")
    for words, n in (
        (["--tenant", "acme"], 2),
        (["--model", "other"], 0),
        (["--since", "2025-11-23T12:00:03"], 2),
        (["--until", "2025-11-23T13:00:03+01:00"], 1),
        (["--since", "2025-11-23"], 3),
    ):
        _, out, _ = run(*place, *words)
        assert len(out.splitlines()) == n, words


@pytest.mark.parametrize("words", [[], ["--records"]])
def test_tables_are_for_people(folder: Path, words: list[str]) -> None:
    code, out, _ = run("--usage-journal", str(folder), *words)
    assert code == 0
    lines = out.splitlines()
    assert "tenant" in lines[0]
    assert "output" in lines[0]
    assert any("acme" in line for line in lines[2:])


def test_the_folder_is_that_of_the_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHOUSE_USAGE_JOURNAL", str(folder))
    assert run()[0] == 0


def test_records_of_a_store_are_listed_with_a_journal_and_without(folder: Path) -> None:
    url = f"sqlite:///{folder / 'store.db'}"
    with contextlib.closing(StoreUsage.open(url)) as store:
        store.add([make(3, "acme", 30), make(5, "carl", 50)])
    for words, found in (
        (["--store", url], [30, 50]),
        (["--store", url, "--usage-journal", str(folder)], [10, 20, 30, 50]),
        (["--store", url, "--tenant", "carl"], [50]),
    ):
        _, out, _ = run("--records", "--json", *words)
        assert [json.loads(line)["n_output"] for line in out.splitlines()] == found
    code, _, err = run("--store", f"sqlite:///{folder / 'no' / 'store.db'}")
    assert (code, "usage cannot be read: cannot open the store" in err) == (1, True)
    code, _, err = run("--store", "mysql://x/y")
    assert (code, "expected SQLite or PostgreSQL" in err) == (2, True)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    code, _, err = run()
    assert (code, "--usage-journal" in err) == (2, True)
    code, _, err = run("--usage-journal", str(tmp_path / "none"))
    assert (code, "there is no folder" in err) == (1, True)
    code, out, err = run("--usage-journal", str(tmp_path))
    assert (code, out, err) == (0, "", "no usage\n")
    (tmp_path / STORE_NAME).write_bytes(b"no database" * 200)
    code, _, err = run("--usage-journal", str(tmp_path))
    assert (code, "usage cannot be read" in err) == (1, True)
