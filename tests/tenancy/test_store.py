"""The store: schema, changes, groups that share a commit, and what a store that fails says."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import secrets
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from tests.support.admin import audit_trail
from tests.support.databases import postgresql

from drafthouse_server.config import Config
from drafthouse_server.doctor.store import store_problems
from drafthouse_server.errors import ConfigError, StoreError, StoreRefusal
from drafthouse_server.tenancy import migrations, records
from drafthouse_server.tenancy.key_ring import tenant_of_record
from drafthouse_server.tenancy.records import Change, KeyRecord
from drafthouse_server.tenancy.store import Store, StoreThread, StoreUsage, read_pepper_of
from drafthouse_server.tenancy.tenants import Tenant

NOW = Change("test", 1_000)


def key(key_id: str, tenant: str = "acme", **fields: object) -> KeyRecord:
    values: dict[str, object] = {
        "id": key_id, "tenant": tenant, "label": "", "digest": key_id.encode() * 4,
        "created_at": 1_000, "expires_at": None, "revoked_at": None, "last_used_at": None,
    }  # fmt: skip
    return KeyRecord(**values | fields)  # type: ignore[arg-type]  # fields by name


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with postgresql() as (_, url):
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    server: str = request.getfixturevalue("server_url")
    engine = sqlalchemy.create_engine(server.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:  # another test's store
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    engine.dispose()
    return server


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store.open(url)
    yield store
    store.close()


def test_an_empty_store_gets_the_newest_schema_which_is_that_of_the_code(store: Store) -> None:
    with store.reading() as connection:
        assert migrations.revision_of(connection) == migrations.NEWEST == migrations.revisions()[-1]
        options = {"version_table": migrations._VERSION_TABLE}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, records.METADATA) == []


def test_a_schema_that_is_made_is_one_line_of_the_log(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):  # the second time there is nothing to tell
        Store.open(url).close()
    assert caplog.messages == [f"the store's schema is {migrations.NEWEST} now, was empty"]


@pytest.mark.parametrize("revision", migrations.revisions())
def test_a_store_of_every_revision_is_brought_to_the_newest_with_what_it_holds(
    url: str, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = migrations.upgrade
    monkeypatch.setattr(migrations, "upgrade", lambda connection: upgrade(connection, revision))
    old = Store.open(url)
    with old.writing() as connection:
        assert migrations.revision_of(connection) == revision
        records.add_key(connection, key("k1"), NOW)
        name = "max_streams" if revision >= "0003" else "n_active_max"
        records.set_limits(connection, "acme", {name: 3, "weight": 2.0}, NOW)
    old.close()
    monkeypatch.undo()
    for _ in range(2):  # the second time there is nothing to do
        new = Store.open(url)
        with new.writing() as connection:
            assert migrations.revision_of(connection) == migrations.NEWEST
            assert records.list_keys(connection) == [key("k1")]
            (acme,) = records.list_tenants(connection)
            assert dict(acme.limits) == {"max_streams": 3, "weight": 2.0}
            records.add_usage(connection, [usage("r1")])
        new.close()


def test_a_store_of_a_newer_release_is_refused_and_left_as_it_is(url: str) -> None:
    store = Store.open(url)
    table = migrations._VERSION_TABLE
    with store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE {table} SET version_num = '9999'")  # noqa: S608  # the name is ours
    store.close()
    with pytest.raises(StoreError, match=r"schema 9999, which a newer release .* has made"):
        Store.open(url)


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = migrations.upgrade

    def fail(connection: sqlalchemy.Connection) -> None:
        upgrade(connection)
        raise StoreError("the power fails")

    monkeypatch.setattr(migrations, "upgrade", fail)
    with pytest.raises(StoreError, match="the power fails"):
        Store.open(url)
    monkeypatch.undo()
    store = Store.open(url)
    with store.reading() as connection:
        assert records.list_tenants(connection) == []
    store.close()


def test_several_may_open_an_empty_store_at_once(url: str) -> None:
    problems = list[BaseException]()

    def open_it() -> None:
        try:
            Store.open(url).close()
        except StoreError as error:
            problems.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def wait_until_one_waits(store: Store, work: Future[Any]) -> None:
    """Waits until a transaction waits for another one's lock, or the work is done without."""
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    give_up_at = time.monotonic() + 60
    while not work.done() and time.monotonic() < give_up_at:
        with store.reading() as connection:
            if connection.exec_driver_sql(waiting).scalar():
                return
        time.sleep(0.01)


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("mine", ["first", "second"])
def test_of_several_first_starts_on_an_empty_store_one_names_the_pepper(
    store: Store, mine: str
) -> None:
    """The second one failed, with what the database says of a row that is there twice."""
    with ThreadPoolExecutor(1) as second:

        def remember() -> str:
            with store.writing() as connection:
                return records.remember_pepper(connection, mine)

        with store.writing() as connection:
            assert records.remember_pepper(connection, "first") == "first"
            other = second.submit(remember)
            wait_until_one_waits(store, other)
        assert other.result(100) == "first"
    with store.reading() as connection:
        assert records.version(connection).pepper_id == "first"


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_of_several_first_changes_of_an_empty_store_none_fails(store: Store) -> None:
    with ThreadPoolExecutor(1) as second:

        def add_bob() -> None:
            with store.writing() as connection:
                records.add_tenant(connection, "bob", {}, NOW)

        with store.writing() as connection:
            records.add_tenant(connection, "acme", {}, NOW)
            other = second.submit(add_bob)
            wait_until_one_waits(store, other)
        other.result(100)
    with store.reading() as connection:
        assert [tenant.name for tenant in records.list_tenants(connection)] == ["acme", "bob"]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_no_statement_is_prepared_on_a_connection(store: Store) -> None:
    """A pool in transaction mode gave the next transaction a connection with another's."""
    for _ in range(10):  # the driver prepares what comes for the sixth time
        with store.reading() as connection:
            records.version(connection)
    with store.reading() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements")
        assert not prepared.all()


def test_the_last_use_of_a_key_does_not_go_back(store: Store) -> None:
    with store.writing() as connection:
        records.add_key(connection, key("k1"), NOW)
        found = []
        for used_at in (7, 9, 8):
            records.note_uses(connection, {"k1": used_at})
            found.append(records.find_keys(connection, ["k1"])[0].last_used_at)
    assert found == [7, 9, 9]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_servers_that_note_uses_of_the_same_keys_do_not_wait_for_each_other_for_ever(
    store: Store,
) -> None:
    """Each held a row that the other wanted, until PostgreSQL ended one of the transactions."""
    with store.writing() as connection:
        for key_id in ("k1", "k2"):
            records.add_key(connection, key(key_id), NOW)
    with ThreadPoolExecutor(1) as second:

        def note() -> None:
            with store.writing() as connection:
                records.note_uses(connection, {"k2": 8, "k1": 8})

        with store.writing() as connection:
            records.note_uses(connection, {"k1": 7})
            other = second.submit(note)
            wait_until_one_waits(store, other)
            records.note_uses(connection, {"k2": 7})
        other.result(100)
    with store.reading() as connection:
        assert [k.last_used_at for k in records.find_keys(connection, ["k1", "k2"])] == [8, 8]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "no URL of a database"),
        ("mysql://host/x", "a URL of 'mysql'; expected SQLite or PostgreSQL"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
    ],
)
def test_a_url_that_is_none_is_told_without_showing_it(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Store.open(url)


def test_no_error_shows_a_password() -> None:
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql://me:hunter2@127.0.0.1:1/x")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql://me@127.0.0.1:1/x?password=hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as wrong:
        Store.open("oracle://me:hunter2@127.0.0.1:1/x")
    assert "hunter2" not in str(wrong.value)


@pytest.mark.parametrize("url", ["postgresql://me:hun@ter2@h/x", "postgresql://me:hun@ter2/2@h/x"])
def test_a_password_with_an_at_sign_is_told_and_not_taken_for_a_host(url: str) -> None:
    """The error, and the log, showed what follows the sign: it was taken for the host's name."""
    with pytest.raises(ConfigError, match="%40") as caught:
        Store.open(url)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_that_cannot_hold_every_text_is_refused(server_url: str, encoding: str) -> None:
    """One ended the start with a traceback; in the other a user's name held up all usage."""
    name = f"of_{encoding.lower()}"
    engine = sqlalchemy.create_engine(
        server_url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.exec_driver_sql(
            f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LOCALE 'C'"
        )
    engine.dispose()
    url = server_url.replace("/postgres", f"/{name}")
    with pytest.raises(StoreError, match=f"has the encoding {encoding}"):
        Store.open(url)
    [problem] = store_problems(Config(store=url))
    assert f"has the encoding {encoding}" in problem.sentence


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: records.set_limits(c, "acme", {"weight": 3.0}, NOW), ""),
        (lambda c: records.add_tenant(c, "new", {}, NOW), "there is a tenant 'new' already"),
        (lambda c: records.add_key(c, key(secrets.token_hex(6), "new"), NOW), ""),
        (lambda c: records.revoke_key(c, "k1", NOW.at + 60, NOW), "key 'k1' is revoked already"),
        (lambda c: records.delete_tenant(c, "acme", NOW), "there is no tenant 'acme'"),
    ],
)
def test_of_two_who_change_the_same_the_second_sees_what_the_first_has_done(
    store: Store, change: Callable[[sqlalchemy.Connection], object], told: str
) -> None:
    """It was told of a "duplicate key value", or replaced a key that was replaced already."""
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {"weight": 2.0}, NOW)
        records.add_key(connection, key("k1"), NOW)

    def do() -> str:
        try:
            with store.writing() as connection:
                change(connection)
        except (StoreError, StoreRefusal) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(1) as second:
        with store.writing() as connection:
            change(connection)
            other = second.submit(do)
            wait_until_one_waits(store, other)
        assert other.result(100).partition(";")[0] == told


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(StoreError, match="file is not a database"):
        Store.open(f"sqlite:///{path}")
    with pytest.raises(StoreError, match=r"cannot open the store .*: No such file"):
        Store.open(f"sqlite:///{tmp_path / 'missing' / 'store.db'}")


def test_a_file_of_sqlite_is_durable_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "st%o?r#e.db"  # characters that mean something in a URI
    store = Store.open(f"sqlite:///{str(path).replace('%', '%25').replace('?', '%3F')}")
    with store.writing() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()
    assert store.path is not None
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_tenants_and_their_limits_come_back_as_they_were_set(store: Store) -> None:
    with store.writing() as connection:
        records.add_tenant(connection, "bob", {"weight": 2.5, "models": ["a", "b"]}, NOW)
        records.add_tenant(connection, "acme", {}, NOW)
        with pytest.raises(StoreRefusal, match="there is a tenant 'bob' already"):
            records.add_tenant(connection, "bob", {}, NOW)
        records.set_limits(connection, "bob", {"weight": None, "max_streams": 3}, NOW)
        with pytest.raises(StoreRefusal, match="there is no tenant 'eve'"):
            records.set_limits(connection, "eve", {}, NOW)
        records.add_key(connection, key("k1", "bob"), NOW)
        acme, bob = records.list_tenants(connection)
        assert (acme.name, dict(acme.limits), acme.n_keys) == ("acme", {}, 0)
        assert dict(bob.limits) == {"models": ["a", "b"], "max_streams": 3}
        assert bob.n_keys == 1
        assert [tenant.name for tenant in records.list_tenants(connection, ["bob", "x"])] == ["bob"]


@pytest.mark.parametrize("text", ["two", "[" * 100_000, "1" * 5_000, "1e999", "NaN"])
def test_a_limit_that_somebody_has_written_wrong_does_not_count_and_hides_no_other(
    store: Store, text: str
) -> None:
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {"weight": 2.0, "max_streams": 3}, NOW)
        records.add_tenant(connection, "bob", {"max_streams": 4}, NOW)
        wrong = sqlalchemy.update(records.limits).where(records.limits.c.name == "weight")
        connection.execute(wrong.values(value=text))
        acme, bob = records.list_tenants(connection)
    assert tenant_of_record(acme, n_waiting_max=9) == Tenant(
        "acme", n_waiting_max=9, n_active_max=3
    )
    assert dict(bob.limits) == {"max_streams": 4}


def test_a_tenant_goes_with_its_keys_and_limits_and_leaves_its_usage(store: Store) -> None:
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {"weight": 2.0}, NOW)
        for name in ("k1", "k2"):
            records.add_key(connection, key(name), NOW)
        records.add_usage(connection, [usage("r1")])
        assert records.delete_tenant(connection, "acme", NOW) == 2
        assert records.find_keys(connection, ["k1", "k2"]) == []
        assert connection.scalar(sqlalchemy.select(records.usage.c.tenant)) == "acme"
        records.add_tenant(connection, "acme", {}, NOW)
        assert dict(records.list_tenants(connection)[0].limits) == {}
        with pytest.raises(StoreRefusal, match="there is no tenant 'eve'"):
            records.delete_tenant(connection, "eve", NOW)


def test_a_key_is_revoked_once_and_every_change_makes_a_new_version(store: Store) -> None:
    versions = list[str]()
    with store.writing() as connection:

        def note() -> None:
            versions.append(records.version(connection).version)

        note()
        assert records.add_key(connection, key("k1"), NOW)
        note()
        assert not records.add_key(connection, key("k2"), NOW)
        note()
        records.note_uses(connection, {"k1": 7, "k2": 8, "gone": 9})
        assert records.version(connection).version == versions[-1], "nobody waits for that"
        records.revoke_key(connection, "k1", 2_000, NOW)
        note()
        assert records.revoke_key(connection, "k1", 1_500, NOW).revoked_at == 2_000
        with pytest.raises(StoreRefusal, match="is revoked already"):
            records.revoke_key(connection, "k1", 1_500, NOW)
        with pytest.raises(StoreRefusal, match="there is no key 'k9'"):
            records.revoke_key(connection, "k9", 1_500, NOW)
        found = {found.id: found for found in records.find_keys(connection, ["k1", "k2", "k9"])}
        assert found["k1"] == key("k1", revoked_at=1_500, last_used_at=7)
        assert found["k1"].works_until() == 1_500
        assert found["k2"].works_until() == float("inf")
        assert [k.id for k in records.recently_used(connection, 7, 10)] == ["k2", "k1"]
        assert [k.id for k in records.recently_used(connection, 8, 10)] == ["k2"]
        trail = audit_trail(connection, 10)
    assert len(set(versions)) == len(versions)
    actions = [row["action"] for row in trail]
    assert actions == ["keys.revoke", "keys.revoke", "keys.add", "keys.add", "tenants.add"]
    assert {row["actor"] for row in trail} == {"test"}


def test_many_keys_are_found_at_once(store: Store) -> None:
    with store.writing() as connection:
        for i in range(1_203):
            records.add_key(connection, key(f"k{i}"), NOW)
        found = records.find_keys(connection, [f"k{i}" for i in range(2_000)])
    assert len(found) == 1_203


def usage(record_id: str, n_output: int = 3) -> dict[str, object]:
    counts = dict.fromkeys(("n_prompt", "n_reused", "n_drafted", "n_accepted"), 1 << 40)
    seconds = dict.fromkeys(
        ("queue_s", "prefill_s", "decode_s", "preempted_s", "started_at", "ended_at"), 1.7e9 + 1e-6
    )
    texts = dict.fromkeys(("key_id", "end_user", "model", "request_id", "outcome"), "x")
    row: dict[str, object] = {"record_id": record_id, "tenant": "acme", "n_output": n_output}
    return row | counts | seconds | texts


def test_usage_is_written_once_by_record(store: Store) -> None:
    with store.writing() as connection:
        records.add_usage(connection, [])
        records.add_usage(connection, [usage("r1"), usage("r2")])
        records.add_usage(connection, [usage("r2", 99), usage("r3")])
        rows = connection.execute(
            sqlalchemy.select(records.usage).order_by(records.usage.c.record_id)
        ).all()
    assert [dict(row._mapping) for row in rows] == [usage("r1"), usage("r2"), usage("r3")]


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_month_of_usage_may_take_longer_to_sum_up_than_other_questions(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a month with tens of millions of streams it took more than 10 s: no server started."""
    with store.reading() as connection:
        records.sum_usage(connection, 0.0)
        assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "5min"
    waited: list[float | None] = []
    result = Future.result

    def note(self: Future[Any], timeout: float | None = None) -> Any:
        waited.append(timeout)
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", note)
    usage = StoreUsage(store)
    for _ in range(2):  # the second one where the clock has jumped, and calls wait
        assert usage.sum_tokens(0.0) == {}
    usage.close()
    assert waited == [300, 10]


def test_usage_is_found_in_pages(store: Store) -> None:
    rows = [
        usage(f"r{i:02}")
        | {"ended_at": float(i // 3), "tenant": "ab"[i % 2], "key_id": f"k{i % 4}"}
        for i in range(20)
    ]
    with store.writing() as connection:
        records.add_usage(connection, rows[::-1])
        assert records.find_usage(connection) == rows
        assert records.find_usage(connection, tenant="a") == rows[::2]
        assert records.find_usage(connection, tenant="b", key_id="k1") == rows[1::4]
        assert records.find_usage(connection, model="y") == []
        assert records.find_usage(connection, since=2.0, until=4.0) == rows[6:12]
        found, after = list[object](), None
        while page := records.find_usage(connection, after=after, n_max=7):
            found += page
            last = page[-1]
            after = float(str(last["ended_at"])), str(last["record_id"])
        assert found == rows


def test_what_waits_together_shares_a_commit_and_fails_alone(store: Store) -> None:
    started, may_go, n_commits = threading.Event(), threading.Event(), 0
    writer = StoreThread(store, is_writing=True)

    def count(_: object) -> None:
        nonlocal n_commits
        n_commits += 1

    def wait(_: object) -> None:
        started.set()
        may_go.wait(60)

    first = writer.submit(wait)
    assert started.wait(60)
    sqlalchemy.event.listen(store._engine, "commit", count)
    adds = [
        writer.submit(lambda c, i=i: records.add_key(c, key(f"k{i}"), NOW))  # type: ignore[misc]  # a default has no type
        for i in range(50)
    ]
    may_go.set()
    first.result(60)
    for add in adds:
        add.result(60)
    assert n_commits <= 2, "one of the first, one of the group"

    started.clear()
    may_go.clear()
    first = writer.submit(wait)
    assert started.wait(60)
    good = writer.submit(lambda c: records.add_key(c, key("good"), NOW))
    refused = writer.submit(lambda c: records.revoke_key(c, "missing", 1, NOW))
    double = writer.submit(lambda c: records.add_key(c, key("k1"), NOW))
    last = writer.submit(lambda c: records.add_key(c, key("last"), NOW))
    may_go.set()
    good.result(60)
    last.result(60)
    assert isinstance(refused.exception(60), StoreRefusal)
    assert isinstance(double.exception(60), StoreError)
    writer.close(60)
    with store.reading() as connection:
        assert len(records.list_keys(connection)) == 52
    late = writer.submit(records.list_keys)
    assert isinstance(late.exception(60), StoreError), "the thread has ended"


def test_what_no_database_can_be_asked_fails_alone(store: Store) -> None:
    """Half of a surrogate pair is in no UTF-8; drivers raise what SQLAlchemy does not know."""
    reader = StoreThread(store, is_writing=False)
    error = reader.submit(lambda c: records.find_keys(c, ["\ud800"])).exception(60)
    assert isinstance(error, StoreError)
    assert not error.is_away, "the store is there"
    assert reader.submit(lambda c: records.find_keys(c, ["k1"])).result(60) == []
    reader.close(60)


def test_a_fault_of_ours_fails_alone_and_ends_no_thread_of_the_store(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: sqlalchemy.Connection) -> None:
        raise TypeError("a bug of ours")

    for is_writing in (False, True):
        thread = StoreThread(store, is_writing=is_writing)
        jobs = [thread.submit(work) for work in (fail, records.list_keys, fail)]
        for job in (jobs[0], jobs[2]):
            error = job.exception(60)
            assert isinstance(error, StoreError)
            assert not error.is_away, "the store is there"
        assert jobs[1].result(60) == []
        assert thread.submit(records.list_keys).result(60) == []
        thread.close(60)
    told = [record for record in caplog.records if "has failed" in record.message]
    assert len(told) == 4, "each of the four once, with its trace"
    assert all("a bug of ours" in str(record.exc_info) for record in told)


@pytest.mark.parametrize("kind", ["deleted", "replaced"])
def test_a_file_that_goes_is_told_and_one_in_its_place_is_read(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "store.db", tmp_path / "other.db"
    for place, name in ((path, "acme"), (other, "bob")):
        filled = Store.open(f"sqlite:///{place}")
        with filled.writing() as connection:
            records.add_tenant(connection, name, {}, NOW)
        filled.close()
    store = Store.open(f"sqlite:///{path}")
    with store.reading() as connection:
        assert [tenant.name for tenant in records.list_tenants(connection)] == ["acme"]
    path.unlink()
    if kind == "deleted":
        with pytest.raises(StoreError, match="No such file"), store.reading():
            pass
        assert not path.exists(), "an empty one in its place would refuse every key"
    shutil.copy(other, path)
    with store.reading() as connection:
        assert [tenant.name for tenant in records.list_tenants(connection)] == ["bob"]
    store.close()


def test_a_copy_that_is_put_back_is_not_mixed_with_what_it_was_to_undo(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    store = Store.open(f"sqlite:///{path}")
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {}, NOW)
    with contextlib.closing(sqlite3.connect(path)) as source:
        with contextlib.closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        with store.writing() as connection:
            records.add_tenant(connection, "bob", {}, NOW)
        assert (tmp_path / "store.db-wal").stat().st_size
        copy.replace(path)
        told = ""
        try:
            with store.reading() as connection:
                found = records.list_tenants(connection)
        except StoreError as error:
            told = str(error)
            for end in ("wal", "shm"):
                (tmp_path / f"store.db-{end}").unlink()
            with store.reading() as connection:
                found = records.list_tenants(connection)
    assert not told or "store.db-wal of the one before" in told
    assert [tenant.name for tenant in found] == ["acme"]
    store.close()


def test_a_store_on_a_disk_that_is_read_only_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `serve` it was "Permission denied", by `doctor` "check its owner and mode"."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    Store.open(url).close()
    flags = types.SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    with pytest.raises(StoreError, match="Read-only file system; check path"):
        Store.open(url)
    (problem, *_) = store_problems(Config(store=url))
    assert problem.sentence.endswith("cannot be read and written; its disk is mounted read-only")


def test_a_store_that_is_opened_again_loses_no_lock(tmp_path: Path) -> None:
    """The end of another process deleted the log in use: what was written to it was lost."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    program = """
        import sys
        from drafthouse_server.tenancy import records
        from drafthouse_server.tenancy.store import Store

        store = Store.open(sys.argv[1])
        with store.writing() as connection:
            records.add_tenant(connection, sys.argv[2], {}, records.Change("test", 1))
        store.close()
    """

    def add_elsewhere(name: str) -> None:
        command = [sys.executable, "-c", textwrap.dedent(program), url, name]
        subprocess.run(command, check=True, timeout=100)

    store = Store.open(url)
    with store.writing() as connection:
        records.add_tenant(connection, "a", {}, NOW)
    Store.open(url).close()
    add_elsewhere("b")
    with store.writing() as connection:
        records.add_tenant(connection, "c", {}, NOW)
    add_elsewhere("d")
    with store.reading() as connection:
        assert [tenant.name for tenant in records.list_tenants(connection)] == list("abcd")
    store.close()


def test_who_opens_a_replaced_store_first_keeps_no_other_from_it(tmp_path: Path) -> None:
    """The log of the new file is another one, though it lies where the old one lay."""
    path, copy = tmp_path / "store.db", tmp_path / "copy.db"
    stores = [Store.open(f"sqlite:///{path}") for _ in range(2)]
    with stores[0].writing() as connection:
        records.add_tenant(connection, "acme", {}, NOW)
    with stores[1].reading() as connection:
        assert len(records.list_tenants(connection)) == 1
    filled = Store.open(f"sqlite:///{copy}")
    filled.close()
    for end in ("-wal", "-shm"):
        Path(f"{path}{end}").unlink()
    copy.replace(path)
    with stores[0].writing() as connection:
        records.add_tenant(connection, "bob", {}, NOW)
    assert Path(f"{path}-wal").stat().st_size
    with stores[1].reading() as connection:
        assert [tenant.name for tenant in records.list_tenants(connection)] == ["bob"]
    for store in stores:
        store.close()


@pytest.mark.parametrize("given", ["", "?options=-csearch_path%3Dours"])
def test_options_of_the_url_of_a_server_are_kept(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were left out where ours, of the driver's arguments, stood beside them."""
    asked = list[dict[str, str]]()

    def note(_: object, *, connect_args: dict[str, str], **how: object) -> None:
        asked.append(connect_args)
        raise ImportError

    monkeypatch.setattr("drafthouse_server.tenancy.store.sqlalchemy.create_engine", note)
    monkeypatch.setenv("PGOPTIONS", "-c search_path=theirs")
    with pytest.raises(ConfigError, match="driver is missing"):
        Store.open(f"postgresql://127.0.0.1:1/x{given}")
    wanted = "-csearch_path=ours " if given else "-c search_path=theirs "
    assert asked[0]["options"].startswith(wanted + "-c statement_timeout=")


def test_a_disk_that_is_full_is_told_and_changes_nothing(tmp_path: Path) -> None:
    """In a process of its own: the limit on files holds for all of them."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = Store.open(url)
    with store.writing() as connection:
        records.add_tenant(connection, "acme", {}, NOW)
    program = f"""
        import resource, signal
        from drafthouse_server.errors import StoreError
        from drafthouse_server.tenancy import records
        from drafthouse_server.tenancy.records import Change
        from drafthouse_server.tenancy.store import Store

        store = Store.open({url!r})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        change = Change("test", 1)
        n = 0
        try:
            for n in range(10_000):
                with store.writing() as connection:
                    records.add_tenant(connection, f"t{{n}}", {{"models": ["x" * 1000]}}, change)
        except StoreError as error:
            print(error)
        with store.reading() as connection:
            assert len(records.list_tenants(connection)) == n + 1, n
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        with store.writing() as connection:
            records.add_tenant(connection, "after", {{}}, change)
        print("goes on")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert re.search(r"cannot be used: .*(is|may be) full", run.stdout), run
    assert run.stdout.endswith("goes on\n"), run
    with store.reading() as connection:
        assert records.list_tenants(connection, ["after"])
    store.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_the_store_knows_its_pepper(tmp_path: Path) -> None:
    config = Config(store=f"sqlite:///{tmp_path / 'store.db'}")
    store = Store.open(config.store)
    pepper = read_pepper_of(config, store)
    path = tmp_path / "store.db.pepper"
    assert path.exists()
    assert read_pepper_of(config, store) == pepper
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pepper_of(config, store)
    assert not path.exists(), "with another one no key would work"
    (tmp_path / "other").write_text("00" * 32)
    (tmp_path / "other").chmod(0o600)
    other = Config(store=config.store, key_pepper_file=str(tmp_path / "other"))
    with pytest.raises(StoreError, match="made with another pepper"):
        read_pepper_of(other, store)
    moved = Config(store=config.store, key_pepper_file=str(tmp_path / "elsewhere"))
    assert read_pepper_of(moved, store) == pepper
    store.close()


def test_a_store_on_a_server_needs_a_place_for_its_pepper(server_url: str) -> None:
    store = Store.open(server_url)
    with pytest.raises(ConfigError, match="key_pepper_file is not set"):
        read_pepper_of(Config(store=server_url), store)
    store.close()
