"""Ids of records, and the stores that keep records: in memory and in a file, one contract."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.databases import postgresql
from tests.support.usage_store import MemoryUsageStore

from drafthouse_server.tenancy.store import StoreUsage
from drafthouse_server.usage.record import (
    UsageQuery,
    UsageRecord,
    UsageStore,
    UsageStoreFailed,
    cursor_of,
    make_record_id,
)
from drafthouse_server.usage.stores import SqliteUsageStore


def make(number: int, **values: object) -> UsageRecord:
    record = UsageRecord(
        record_id=make_record_id(number, bytes(10)),
        tenant="a",
        key_id="k1",
        end_user="",
        model="m",
        request_id=f"r{number}",
        started_at=float(number),
        n_prompt=number,
        ended_at=float(number),
        outcome="stop",
        n_output=10 * number,
        n_drafted=7,
        n_accepted=3,
        queue_s=0.5,
    )
    return dataclasses.replace(record, **values)  # type: ignore[arg-type]  # a test's own values


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgresql() as (_, url):
        yield url


def opened(kind: str, request: pytest.FixtureRequest, folder: Path) -> UsageStore:
    if kind == "memory":
        return MemoryUsageStore()
    if kind == "a file of its own":
        return SqliteUsageStore(folder / "usage.sqlite3")
    if kind == "sqlite":
        return StoreUsage.open(f"sqlite:///{folder / 'store.db'}")
    made = StoreUsage.open(request.getfixturevalue("database"))
    with made._store.writing() as connection:  # another test's records
        connection.exec_driver_sql("DELETE FROM usage")
    return made


@pytest.fixture(params=["memory", "a file of its own", "sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UsageStore]:
    made = opened(request.param, request, tmp_path)
    yield made
    made.close()


def test_ids_are_ulids_that_sort_by_time() -> None:
    # From the examples of the specification.
    assert (
        make_record_id(0x01563E3AB5D3, bytes.fromhex("D6764C61EFB99302BD5B"))[:10] == "01ARZ3NDEK"
    )
    ids = [make_record_id(ms, random.Random(ms).randbytes(10)) for ms in (0, 1, 2**32, 2**48 - 1)]
    assert ids == sorted(ids)
    assert all(re.fullmatch(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", found) for found in ids)


def test_a_record_is_kept_as_it_is(store: UsageStore) -> None:
    record = make(3, started_at=1763845200.123456, end_user="\N{SNOWMAN}", preempted_s=1 / 3)
    store.add([record])
    assert store.find(UsageQuery()) == [record]
    assert record.n_rejected == 4


def test_the_same_record_twice_counts_once(store: UsageStore) -> None:
    store.add([make(1), make(2)])
    store.add([make(2), make(3), make(3)])
    assert [record.n_prompt for record in store.find(UsageQuery())] == [1, 2, 3]


def test_conditions_must_all_hold(store: UsageStore) -> None:
    store.add([make(1), make(2, tenant="b"), make(3, key_id="k2"), make(4, model="n"), make(5)])

    def found(**conditions: object) -> list[int]:
        query = UsageQuery(**conditions)  # type: ignore[arg-type]  # a test's own values
        return [record.n_prompt for record in store.find(query)]

    assert found() == [1, 2, 3, 4, 5]
    assert found(tenant="a") == [1, 3, 4, 5]
    assert found(tenant="a", key_id="k1", model="m") == [1, 5]
    assert found(since=2.0, until=5.0) == [2, 3, 4]
    assert found(tenant="' OR 1=1 --") == []


def test_tokens_are_added_up_by_tenant_from_a_time_on(store: UsageStore) -> None:
    assert dict(store.sum_tokens(0.0)) == {}
    records = [make(number, tenant="ab"[number % 2]) for number in range(1, 7)]
    # It began before the time and ended after it.
    store.add([*records, make(7, started_at=2.0, ended_at=9.0, n_output=1 << 40)])
    # One left the queue before its prompt was begun, as limits count it; another was lost later.
    store.add([make(8, tenant="a", n_output=0, queue_s=0.0), make(9, tenant="c", queue_s=0.0)])
    assert store.sum_tokens(3.0) == {"b": 11 * (3 + 5), "a": 11 * (4 + 6), "c": 11 * 9}


def test_what_no_database_takes_is_kept_as_far_as_it_does(store: UsageStore) -> None:
    """It must not hold up the records behind it."""
    store.add([make(1, end_user="a\0b", model="m" * 300), make(2)])
    found = store.find(UsageQuery())
    assert [record.n_output for record in found] == [10, 20]
    assert found[0].end_user[0] + found[0].end_user[2] == "ab"
    assert not store.find(UsageQuery(key_id="k\0"))


def test_pages_have_every_record_once_whatever_comes_in_between(store: UsageStore) -> None:
    chance = random.Random(1)
    records = [make(i, ended_at=float(chance.randrange(10))) for i in range(100)]
    store.add(records)
    found: list[UsageRecord] = []
    after = None
    while True:
        page = store.find(UsageQuery(after=after, n_max=7))
        found += page
        if len(page) < 7:
            break
        after = cursor_of(page[-1])
        store.add([make(1000 + len(found), ended_at=20.0)])
    assert found[:100] == sorted(records, key=cursor_of)
    assert {record.ended_at for record in found[100:]} == {20.0}


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It was for all to read, in a folder that is: who asked, for whom, and how much."""
    path = tmp_path / "usage.sqlite3"
    before = os.umask(0o022)
    try:
        store = SqliteUsageStore(path)
        store.add([make(1)])
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
        store.close()
    finally:
        os.umask(before)


def test_a_file_survives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite3"
    first = SqliteUsageStore(path)
    first.add([make(1)])
    first.close()
    with contextlib.closing(SqliteUsageStore(path, is_read_only=True)) as second:
        assert second.find(UsageQuery()) == [make(1)]


def test_a_file_that_cannot_be_used_fails_and_works_when_it_can(tmp_path: Path) -> None:
    store = SqliteUsageStore(tmp_path / "later" / "usage.sqlite3")
    with pytest.raises(UsageStoreFailed, match="unable to open"):
        store.add([make(1)])
    (tmp_path / "later").mkdir()
    store.add([make(1)])
    assert len(store.find(UsageQuery())) == 1
    store.close()


def test_a_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Else records would go to a file that nobody can open, and from the journal."""
    path = tmp_path / "usage.sqlite3"
    store = SqliteUsageStore(path)
    store.add([make(1)])
    for each in tmp_path.iterdir():
        each.unlink()
    store.add([make(2)])
    with contextlib.closing(SqliteUsageStore(path)) as other:
        assert list(other.find(UsageQuery())) == [make(2)]
    store.close()


def test_a_damaged_file_fails(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite3"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(UsageStoreFailed, match="not a database"):
        SqliteUsageStore(path).find(UsageQuery())
