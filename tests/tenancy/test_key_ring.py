"""Whom a key is of: from memory, from the store, and while the store is away. Time stands still."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from tests.support.logged import logged

from drafthouse_server.cli.keys import as_time
from drafthouse_server.config import Config
from drafthouse_server.errors import (
    DrafthouseError,
    StoreError,
    StoreRefusal,
    StoreUnavailable,
    TooManyBadKeys,
    Unauthenticated,
)
from drafthouse_server.tenancy import key_ring, keys, records
from drafthouse_server.tenancy.backends import Backends
from drafthouse_server.tenancy.identity import BadKeys, RingRules, UnknownTenant, source_of
from drafthouse_server.tenancy.key_ring import KeyRing, tenant_of_record
from drafthouse_server.tenancy.keys import ApiKey, digest_of, make_key, pepper_id
from drafthouse_server.tenancy.records import Change, KeyRecord, TenantRecord
from drafthouse_server.tenancy.store import Store, StoreThread, read_pepper_of
from drafthouse_server.tenancy.tenants import Identity, Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually

PEPPER = bytes(range(32))
WALL = 1_000_000
HOUR = 3600.0


class Bench:
    """A store in a file, and rings over it whose time a test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store.open(f"sqlite:///{path}")
        self.now = 5_000.0
        self.rings: list[KeyRing] = []
        with self.store.writing() as connection:
            records.remember_pepper(connection, pepper_id(PEPPER))

    def add_key(self, tenant: str = "acme", **fields: Any) -> ApiKey:
        key = make_key()
        values: dict[str, Any] = {
            "id": key.id, "tenant": tenant, "label": "", "digest": digest_of(key.text, PEPPER),
            "created_at": WALL, "expires_at": None, "revoked_at": None, "last_used_at": None,
        }  # fmt: skip
        with self.store.writing() as connection:
            records.add_key(connection, KeyRecord(**values | fields), Change("test", WALL))
        return key

    def revoke(self, key: ApiKey, at: int = 0) -> None:
        with self.store.writing() as connection:
            records.revoke_key(connection, key.id, at, Change("test", WALL))

    def limit(self, tenant: str, **values: object) -> None:
        with self.store.writing() as connection:
            records.set_limits(connection, tenant, values, Change("test", WALL))

    async def ring(
        self, n_bad_keys: int = 5, fixed: TenantRegistry | None = None, **rules: Any
    ) -> KeyRing:
        def make_tenant(record: TenantRecord) -> Tenant:
            return tenant_of_record(record, n_waiting_max=9)

        ring = KeyRing(
            Store.open(f"sqlite:///{self.path}"),
            PEPPER,
            make_tenant,
            RingRules(**{"grace_s": 100.0} | rules),
            bad_keys=BadKeys(n_bad_keys),
            fixed=fixed or TenantRegistry({}),
            clock=lambda: self.now,
            wall_clock=lambda: WALL + self.now - 5_000.0,
        )
        await ring.open()
        assert ring._watching is not None
        ring._watching.cancel()  # a test asks by itself, when it wants
        self.rings.append(ring)
        return ring

    def lose(self) -> None:
        self.path.rename(self.path.with_suffix(".away"))

    def find(self) -> None:
        self.path.with_suffix(".away").rename(self.path)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "store.db")
    yield bench
    for ring in bench.rings:
        await ring.close()
    bench.store.close()


async def identify(ring: KeyRing, key: ApiKey | str | None, address: str = "here") -> Identity:
    text = key.text if isinstance(key, ApiKey) else key
    found = ring.identify(text, address)
    return found if isinstance(found, Identity) else await found


async def certified(ring: KeyRing, name: str) -> Identity:
    found = ring.certified(name)
    return found if isinstance(found, Identity) else await found


async def refused(ring: KeyRing, key: ApiKey | str | None, address: str = "here") -> Any:
    with pytest.raises(DrafthouseError) as caught:
        await identify(ring, key, address)
    return caught.value


async def poll(ring: KeyRing) -> None:
    """Does what the watch does each second."""
    try:
        await ring._poll()
    except StoreError as error:
        ring._note_silence(error)
    else:
        ring._end_revoked()


async def test_a_key_is_asked_for_once_and_then_known_at_once(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    first = ring.identify(key.text, "here")
    assert isinstance(first, Awaitable)
    assert (await first).tenant.name == "acme"
    again = ring.identify(key.text, "here")
    assert isinstance(again, Identity)
    assert (again.tenant.name, again.key_id) == ("acme", key.id)


async def test_many_calls_of_a_new_key_ask_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, asked = bench.add_key(), list[str]()
    ring = await bench.ring()
    find = records.find_keys

    def find_keys(connection: Any, ids: Any) -> Any:
        asked.extend(ids)
        return find(connection, ids)

    monkeypatch.setattr(records, "find_keys", find_keys)
    found = await asyncio.gather(*(identify(ring, key) for _ in range(50)))
    assert {identity.tenant.name for identity in found} == {"acme"}
    assert asked == [key.id]
    assert not ring._pending


async def test_a_caller_that_leaves_takes_the_answer_from_nobody(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    first, second = (asyncio.create_task(identify(ring, key)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).key_id == key.id


async def test_what_is_no_key_or_is_not_there_is_refused(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring(n_bad_keys=0)
    wrong_secret = make_key().text
    body = wrong_secret.replace(wrong_secret.split("_")[1], key.id)[: keys._N_BODY]
    forged = body + keys._check_of(body)
    for text in (None, "", "garbage", key.text[:-1], key.text + "0", make_key().text, forged):
        assert isinstance(await refused(ring, text), Unauthenticated)
    await identify(ring, key)
    assert isinstance(await refused(ring, forged), Unauthenticated), "its id is known now"


async def test_garbage_and_unknown_ids_cost_the_store_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = await bench.ring(n_bad_keys=0)
    stranger, n_asked = make_key(), 0
    find = records.find_keys

    def find_keys(connection: Any, ids: Any) -> Any:
        nonlocal n_asked
        n_asked += 1
        return find(connection, ids)

    monkeypatch.setattr(records, "find_keys", find_keys)
    for text in ("garbage", stranger.text[:-1] + "!", "dh_" + "x" * 51):
        await refused(ring, text)
    assert n_asked == 0
    for _ in range(3):
        await refused(ring, stranger)
    assert n_asked == 1, "remembered as unknown"
    bench.add_key()
    await poll(ring)
    await refused(ring, stranger)
    assert n_asked == 3, "asked anew when the store has changed; once for what is known"


async def test_a_new_key_works_at_once(bench: Bench) -> None:
    ring = await bench.ring()
    for _ in range(3):
        assert (await identify(ring, bench.add_key("bob"))).tenant.name == "bob"


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
async def test_a_revoked_key_is_refused_whatever_the_clock_of_who_revokes_it_says(
    bench: Bench, ahead_s: int
) -> None:
    """Two hours ahead of the server's, the key worked on for two hours, and so did its calls."""
    key = bench.add_key()
    ring = await bench.ring()
    has_entered = asyncio.Event()

    async def call() -> None:
        with ring.hold(await identify(ring, key)):
            has_entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await has_entered.wait()
    at = WALL + ahead_s
    with bench.store.writing() as connection:
        records.revoke_key(connection, key.id, at, Change("test", at))
    await poll(ring)
    with pytest.raises(Unauthenticated, match="the API key was revoked"):
        await asyncio.wait_for(running, 100)
    for known in (ring, await bench.ring()):
        assert isinstance(await refused(known, key), Unauthenticated)
    with bench.store.writing() as connection, pytest.raises(StoreRefusal, match="already"):
        records.revoke_key(connection, key.id, at + 1, Change("test", at + 1))


async def test_a_revoked_key_is_refused_when_the_change_is_seen(bench: Bench) -> None:
    key, other = bench.add_key(), bench.add_key()
    ring = await bench.ring()
    await identify(ring, key)
    await identify(ring, other)
    bench.revoke(key)
    await poll(ring)
    assert isinstance(await refused(ring, key), Unauthenticated)
    assert (await identify(ring, other)).key_id == other.id


async def test_a_key_ends_when_its_time_has_come_without_a_change(bench: Bench) -> None:
    expires, rotated = bench.add_key(expires_at=WALL + 50), bench.add_key()
    bench.revoke(rotated, WALL + 50)
    ring = await bench.ring()
    for key in (expires, rotated):
        await identify(ring, key)
    bench.now += 49
    for key in (expires, rotated):
        await identify(ring, key)
    bench.now += 1
    for key in (expires, rotated):
        assert isinstance(await refused(ring, key, "there"), Unauthenticated)
    assert isinstance(await refused(await bench.ring(), expires), Unauthenticated)


@pytest.mark.parametrize("how", ["revoked", "later", "deleted"])
@pytest.mark.parametrize("ends_streams", [True, False])
async def test_running_calls_of_a_revoked_key_end_or_go_on(
    bench: Bench, how: str, ends_streams: bool
) -> None:
    key, other = bench.add_key(), bench.add_key("bob")
    ring = await bench.ring(ends_streams=ends_streams)
    may_end = asyncio.Event()

    async def call(key: ApiKey, has_entered: asyncio.Event) -> str:
        with ring.hold(await identify(ring, key)):
            has_entered.set()
            await may_end.wait()
        return "done"

    entries = [asyncio.Event() for _ in range(3)]
    callers = zip((key, key, other), entries, strict=True)
    calls = [asyncio.create_task(call(key, entry)) for key, entry in callers]
    for entry in entries:
        await entry.wait()
    if how == "deleted":
        with bench.store.writing() as connection:
            records.delete_tenant(connection, "acme", Change("test", WALL))
    else:
        bench.revoke(key, WALL + 10 * (how == "later"))
        if how == "later":
            await poll(ring)
            assert (await identify(ring, key)).key_id == key.id
            bench.now += 10
    await poll(ring)
    for _ in range(5):
        await asyncio.sleep(0)
    is_ended = ends_streams or how == "deleted"
    assert [task.done() for task in calls] == [is_ended, is_ended, False]
    may_end.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert ends[2] == "done"
    for end in ends[:2]:
        if is_ended:
            assert isinstance(end, Unauthenticated)
            what = "tenant was deleted" if how == "deleted" else "API key was revoked"
            assert end.message == f"the {what}"
        else:
            assert end == "done"
    assert not any(task.cancelling() for task in calls)


@pytest.mark.parametrize("is_told_before", [True, False])
async def test_running_calls_of_a_key_that_has_expired_go_on_until_it_is_revoked(
    bench: Bench, is_told_before: bool
) -> None:
    """As after `keys rotate --overlap`.

    Told before the expiry, any change of the store ended them as revoked; told after it, they went
    on until the store changed again.
    """
    key = bench.add_key(expires_at=WALL + 10)
    ring = await bench.ring()
    if is_told_before:
        bench.revoke(key, WALL + 50)
    identity = await identify(ring, key)

    async def call() -> None:
        with ring.hold(identity):
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await poll(ring)
    bench.now += 20
    if is_told_before:
        bench.add_key()
    else:
        bench.revoke(key, WALL + 50)
    await poll(ring)
    assert not running.done()
    assert isinstance(await refused(ring, key), Unauthenticated)
    bench.now += 30
    await poll(ring)
    with pytest.raises(Unauthenticated, match="the API key was revoked"):
        await asyncio.wait_for(running, 100)


async def test_a_revocation_that_was_told_before_comes_also_while_the_store_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.001)
    key = bench.add_key()
    ring = await bench.ring()
    identity = await identify(ring, key)
    bench.revoke(key, WALL + 10)
    await poll(ring)

    async def call() -> None:
        with ring.hold(identity):
            await asyncio.Event().wait()

    running = asyncio.create_task(call())
    await asyncio.sleep(0)
    bench.lose()
    ring._begin_watching()
    await eventually(lambda: ring.is_away)
    assert not running.done()
    bench.now += 10
    with pytest.raises(Unauthenticated, match="the API key was revoked"):
        await asyncio.wait_for(running, 100)
    assert isinstance(await refused(ring, key), Unauthenticated)
    bench.find()


async def test_a_store_that_lacks_a_key_ends_that_one_and_not_its_tenant(bench: Bench) -> None:
    """A replica that was behind took over: all calls of the tenant ended, as if it were deleted."""
    old, new = bench.add_key(), bench.add_key()
    ring = await bench.ring()
    deleted: list[str] = []
    ring.tenants.on_deleted = deleted.append
    may_end = asyncio.Event()

    async def call(identity: Identity) -> str:
        with ring.hold(identity):
            await may_end.wait()
        return "done"

    calls = [asyncio.create_task(call(await identify(ring, key))) for key in (old, new)]
    await asyncio.sleep(0)
    with bench.store.writing() as connection:
        connection.execute(sqlalchemy.delete(records.keys).where(records.keys.c.id == new.id))
    bench.limit("acme", weight=2.0)  # another version
    await poll(ring)
    may_end.set()
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert first == "done"
    assert isinstance(second, Unauthenticated)
    assert deleted == []
    assert (await identify(ring, old)).key_id == old.id
    await refused(ring, new)


async def test_of_too_many_keys_those_go_that_were_not_used_for_longest_and_have_no_calls(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "_N_KNOWN_MAX", 3)
    ring = await bench.ring()
    busy, used, idle, new, newer = (bench.add_key() for _ in range(5))
    with ring.hold(await identify(ring, busy)):
        for key in (used, idle, used, new):
            await identify(ring, key)
        assert set(ring._known) == {busy.id, used.id, new.id}
        await identify(ring, newer)
        assert set(ring._known) == {busy.id, new.id, newer.id}


async def test_a_call_that_its_client_leaves_is_not_called_revoked(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    identity = await identify(ring, key)

    async def call() -> None:
        with ring.hold(identity):
            await asyncio.sleep(1000)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ring._known[key.id].calls


async def test_limits_that_change_are_those_of_the_next_call(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    assert (await identify(ring, key)).tenant.n_active_max is None
    assert (await certified(ring, "acme")).tenant == Tenant("acme", n_waiting_max=9)
    bench.limit("acme", max_streams=3, models=["a"], weight=-1, wings=7)
    await poll(ring)
    for identity in (await identify(ring, key), await certified(ring, "acme")):
        tenant = identity.tenant
        assert (tenant.n_active_max, tenant.models) == (3, frozenset({"a"}))
        assert (tenant.weight, tenant.n_waiting_max) == (1.0, 9)
    assert "do not count: weight, wings" in caplog.text


async def test_a_tenant_that_only_a_certificate_names_has_the_stores_limits(bench: Bench) -> None:
    with bench.store.writing() as connection:
        records.add_tenant(connection, "acme", {"requests_per_s": 2.0}, Change("test", WALL))
    fixed = TenantRegistry({"k": Tenant("bob", weight=3)}, Tenant("default", n_prompt_max=5))
    ring = await bench.ring(fixed=fixed)
    identity = await certified(ring, "acme")
    assert (identity.tenant.requests_per_s, identity.key_id) == (2.0, "")
    assert isinstance(ring.certified("acme"), Identity), "the second time it is known"
    assert (await certified(ring, "bob")).tenant.weight == 3


async def test_a_certificate_of_a_tenant_that_the_store_does_not_have_is_refused(
    bench: Bench,
) -> None:
    bench.add_key()
    ring = await bench.ring(fixed=TenantRegistry({}, Tenant("default", n_prompt_max=5)))
    with pytest.raises(UnknownTenant) as caught:
        await certified(ring, "carl")
    assert "names tenant 'carl', which the store does not have" in caught.value.message
    assert "drafthouse tenants add carl" in caught.value.message
    assert (caught.value.code, caught.value.reason) == ("UNAUTHENTICATED", "INVALID_API_KEY")
    assert caught.value.metadata() == {"tenant": "carl"}
    with bench.store.writing() as connection:
        records.add_tenant(connection, "carl", {"weight": 2.0}, Change("test", WALL))
    await poll(ring)
    assert (await certified(ring, "carl")).tenant.weight == 2.0
    with bench.store.writing() as connection:
        records.delete_tenant(connection, "carl", Change("test", WALL))
    await poll(ring)
    with pytest.raises(UnknownTenant):
        await certified(ring, "carl")


async def test_certificates_without_the_store_go_on_as_keys_do(bench: Bench) -> None:
    bench.add_key()
    ring = await bench.ring(grace_s=100.0)
    assert (await certified(ring, "acme")).tenant.name == "acme"
    bench.lose()
    assert (await certified(ring, "acme")).tenant.name == "acme"
    with pytest.raises(StoreUnavailable):
        await certified(ring, "eve")
    bench.now += 101.0
    with pytest.raises(StoreUnavailable):
        await certified(ring, "acme")
    bench.find()
    await poll(ring)
    assert (await certified(ring, "acme")).tenant.name == "acme"
    with pytest.raises(UnknownTenant):  # now that somebody could be asked
        await certified(ring, "eve")


async def test_calls_of_a_certificate_end_with_its_tenant(bench: Bench) -> None:
    bench.add_key()
    ring = await bench.ring()
    identity = await certified(ring, "acme")

    async def call() -> None:
        with ring.hold(identity):
            await asyncio.sleep(100)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    with bench.store.writing() as connection:
        records.delete_tenant(connection, "acme", Change("test", WALL))
    await poll(ring)
    with pytest.raises(Unauthenticated):
        await task


async def test_without_the_store_known_keys_go_on_for_the_grace_and_no_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "drafthouse_server.tenancy.key_ring")
    known, unseen = bench.add_key(), bench.add_key()
    ring = await bench.ring(grace_s=100.0, retry_after_s=2.5)
    await identify(ring, known)
    bench.lose()
    error = await refused(ring, unseen)
    assert isinstance(error, StoreUnavailable)
    assert error.retry_after_s == 2.5
    bench.now += 100
    await poll(ring)
    assert (await identify(ring, known)).key_id == known.id
    for key in (unseen, make_key()):
        assert isinstance(await refused(ring, key), StoreUnavailable)
    assert isinstance(await refused(ring, "garbage"), Unauthenticated)
    bench.now += 1
    assert isinstance(await refused(ring, known), StoreUnavailable), "the grace is over"
    bench.find()
    await poll(ring)
    assert not ring.is_away
    for key in (known, unseen):
        assert (await identify(ring, key)).key_id == key.id
    told = logged(caplog)
    assert len(told) == 2, "once when it goes, once when it is back"
    assert "No such file" in told[0]
    assert told[1] == "the store answers again"


async def test_without_a_grace_an_ordinary_pause_between_two_looks_refuses_nobody(
    bench: Bench,
) -> None:
    key = bench.add_key()
    ring = await bench.ring(grace_s=0.0)
    await identify(ring, key)
    bench.now += 1.5
    await identify(ring, key)
    bench.now += 10
    assert isinstance(await refused(ring, key), StoreUnavailable)


async def test_a_key_that_was_not_seen_for_an_hour_is_forgotten_and_asked_for(
    bench: Bench,
) -> None:
    old, fresh = bench.add_key(), bench.add_key()
    ring = await bench.ring(grace_s=1e6)
    await identify(ring, old)
    bench.now += HOUR
    await identify(ring, fresh)
    await poll(ring)
    ring._prune()
    assert set(ring._known) == {old.id, fresh.id}
    bench.now += 1
    await poll(ring)
    bench.lose()
    bench.now += 20
    assert isinstance(await refused(ring, old), StoreUnavailable)
    await identify(ring, fresh)
    ring._prune()
    assert set(ring._known) == {fresh.id}


async def test_a_key_that_was_not_seen_for_an_hour_works_while_the_store_answers(
    bench: Bench,
) -> None:
    """It was refused until it was forgotten; with a call of it still open, until that one ended."""
    key = bench.add_key()
    ring = await bench.ring()
    with ring.hold(await identify(ring, key)):
        bench.now += 2 * HOUR
        await poll(ring)
        ring._prune()
        assert (await identify(ring, key)).key_id == key.id


async def test_keys_that_were_used_of_late_are_known_to_a_server_that_starts(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    await identify(ring, key)
    await ring._flush()
    second = await bench.ring()
    bench.lose()
    assert (await identify(second, key)).key_id == key.id


async def test_uses_are_written_in_groups(bench: Bench) -> None:
    made = [bench.add_key() for _ in range(3)]
    ring = await bench.ring()
    for _ in range(10):
        for key in made:
            await identify(ring, key)
    bench.now += 7
    await identify(ring, made[0])
    with bench.store.reading() as connection:
        assert {key.last_used_at for key in records.list_keys(connection)} == {None}
    bench.lose()
    await ring._flush()  # which fails, and loses nothing
    bench.find()
    await ring._flush()
    with bench.store.reading() as connection:
        used = {key.id: key.last_used_at for key in records.list_keys(connection)}
    assert used == {made[0].id: WALL + 7, made[1].id: WALL, made[2].id: WALL}


async def test_uses_of_many_keys_are_written_some_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL did not write 100,000 in 2 s: never, and every half a minute it was broken off."""
    monkeypatch.setattr(key_ring, "_N_FLUSH", 2)
    made = [bench.add_key() for _ in range(5)]
    ring = await bench.ring()
    for key in made:
        await identify(ring, key)
    assert await ring._flush() == 2
    with bench.store.reading() as connection:
        n_written = sum(key.last_used_at is not None for key in records.list_keys(connection))
    assert n_written == 2
    await ring.close()
    with bench.store.reading() as connection:
        assert {key.last_used_at for key in records.list_keys(connection)} == {WALL}


async def test_a_start_has_time_to_read_as_many_keys_as_it_may_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 take more than the 2 s of a question: no server of such a store started."""
    asked: dict[str, float] = {}
    run = StoreThread.run

    async def note(self: StoreThread, work: Any, timeout_s: float) -> Any:
        asked[getattr(work, "func", work).__name__] = timeout_s
        return await run(self, work, timeout_s)

    monkeypatch.setattr(StoreThread, "run", note)
    await bench.ring()
    assert asked["_read_recent"] >= 100_000 * 1e-3


async def test_a_fault_of_ours_does_not_end_the_watch_over_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(key_ring, "POLL_S", 0.001)
    ring = await bench.ring()
    poll, faults = ring._poll, [RuntimeError("a bug of ours")]

    async def poll_or_fail() -> None:
        if faults:
            raise faults.pop()
        await poll()

    monkeypatch.setattr(ring, "_poll", poll_or_fail)
    key = bench.add_key()
    await identify(ring, key)
    ring._begin_watching()
    bench.revoke(key)
    await eventually(lambda: key.id not in ring._known)
    assert not faults


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE keys SET expires_at = '2030-01-01' WHERE id = :id",
        "UPDATE keys SET revoked_at = 'soon' WHERE id = :id",
        "UPDATE keys SET last_used_at = 'yesterday', digest = 'text' WHERE id = :id",
        "UPDATE keys SET created_at = x'00ff' , expires_at = 1.5 WHERE id = :id",
        "UPDATE keys SET created_at = -9e17, expires_at = -900000000000000000 WHERE id = :id",
    ],
)
async def test_a_key_that_somebody_has_written_wrong_does_not_work_and_keeps_no_other_from_it(
    bench: Bench, damage: str
) -> None:
    """SQLite takes any value in any column."""
    good, bad, unseen = bench.add_key(), bench.add_key("bob"), bench.add_key("bob")
    ring = await bench.ring()
    await identify(ring, good)
    await identify(ring, bad)
    await ring._flush()
    with bench.store.writing() as connection:
        for key in (bad, unseen):
            connection.execute(sqlalchemy.text(damage), {"id": key.id})
    bench.add_key()  # a change that every server sees
    for asked in (ring, await bench.ring()):
        await poll(asked)
        assert not asked.is_away
        assert (await identify(asked, good)).key_id == good.id
        for key in (bad, unseen):
            assert isinstance(await refused(asked, key, "there"), Unauthenticated)
    with bench.store.reading() as connection:
        found = records.list_keys(connection)
    assert len([as_time(key.created_at) for key in found]) == 4


async def test_another_pepper_is_a_store_that_is_away(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring()
    with bench.store.writing() as connection:
        records._set_state(connection, "pepper_id", "another")
    await poll(ring)
    assert isinstance(await refused(ring, key), StoreUnavailable), "never called unknown"


async def test_keys_of_the_settings_work_beside_those_of_the_store(bench: Bench) -> None:
    key = bench.add_key()
    ring = await bench.ring(fixed=TenantRegistry({"plain": Tenant("bob")}))
    assert (await identify(ring, "plain")).tenant.name == "bob"
    assert (await identify(ring, key)).tenant.name == "acme"
    assert isinstance(await refused(ring, "other"), Unauthenticated)
    bench.lose()
    assert (await identify(ring, "plain")).tenant.name == "bob"


@pytest.mark.parametrize("is_in_store", [False, True])
async def test_a_key_of_the_settings_that_looks_like_one_of_the_store_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_in_store: bool
) -> None:
    """It was refused without a word: what has this form is looked for in the store alone."""
    key, url = make_key(), f"sqlite:///{tmp_path / 'store.db'}"
    config = Config(store=url, api_keys=(f"acme:{key.text}", "bob:plain"))
    if is_in_store:
        store = Store.open(url)
        digest = digest_of(key.text, read_pepper_of(config, store))
        record = KeyRecord(key.id, "carl", "", digest, WALL, None, None, None)
        with store.writing() as connection:
            records.add_key(connection, record, Change("test", WALL))
        store.close()
    backends = Backends(config)
    try:
        await backends.open_tenants()
        assert backends.key_ring is not None
        assert (await identify(backends.key_ring, "plain")).tenant.name == "bob"
        if is_in_store:
            assert (await identify(backends.key_ring, key)).tenant.name == "carl"
        else:
            assert isinstance(await refused(backends.key_ring, key), Unauthenticated)
    finally:
        await backends.close()
    (line,) = logged(caplog)
    assert f"key {key.id} of tenant acme in api_keys has the form of the store's keys" in line
    assert key.text not in caplog.text


async def test_an_address_with_many_wrong_keys_is_not_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, unseen = bench.add_key(), bench.add_key()
    ring = await bench.ring(n_bad_keys=3)
    await identify(ring, known)
    for text in ("garbage", make_key().text, make_key().text):
        assert isinstance(await refused(ring, text), Unauthenticated)
    monkeypatch.setattr(records, "find_keys", lambda *_: pytest.fail("was asked for"))
    error = await refused(ring, unseen)
    assert isinstance(error, TooManyBadKeys)
    assert error.retry_after_s == pytest.approx(20.0)
    monkeypatch.undo()
    assert (await identify(ring, known)).key_id == known.id, "others may share its address"
    assert (await identify(ring, unseen, "there")).key_id == unseen.id
    assert isinstance(await refused(ring, None), Unauthenticated), "no key is no guess"
    bench.now += error.retry_after_s
    await refused(ring, "garbage")
    assert isinstance(await refused(ring, "garbage"), TooManyBadKeys)


async def test_wrong_keys_that_come_at_once_are_looked_at_a_few_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of 1,000 were looked for, and as many again 2 s later: the count did not go on so far."""
    ring, asked, find = await bench.ring(n_bad_keys=5), list[str](), records.find_keys

    def find_keys(connection: sqlalchemy.Connection, ids: Sequence[str]) -> Any:
        asked.extend(ids)
        return find(connection, ids)

    monkeypatch.setattr(records, "find_keys", find_keys)
    unseen = [bench.add_key() for _ in range(50)]
    found = await asyncio.gather(*(identify(ring, key) for key in unseen))
    assert len(found) == 50, "good ones wait for their turn"
    asked.clear()
    errors = await asyncio.gather(*(refused(ring, make_key().text) for _ in range(300)))
    assert len(asked) <= 5 + 8
    assert {type(it) for it in errors} == {Unauthenticated, TooManyBadKeys}
    bench.now += errors[-1].retry_after_s
    await asyncio.gather(*(refused(ring, make_key().text) for _ in range(300)))
    assert len(asked) <= 5 + 2 * 8
    assert not ring._bad_keys.turns._turns


def wait_of(bad_keys: BadKeys, now: float) -> float:
    """Returns how long an address is told to wait, 0 where it is looked at."""
    try:
        bad_keys.check("a", now)
    except TooManyBadKeys as error:
        return error.retry_after_s
    return 0.0


@given(
    n_max=st.integers(1, 50),
    gaps=st.lists(st.floats(0, 30), min_size=1, max_size=200),
)
def test_wrong_keys_are_bounded_and_the_wait_suffices(n_max: int, gaps: list[float]) -> None:
    bad_keys, now, taken = BadKeys(n_max), 0.0, list[float]()
    for gap in gaps:
        now += gap
        wait_s = wait_of(bad_keys, now)
        if wait_s:
            assert not wait_of(bad_keys, now + wait_s + 1e-6)
        else:
            bad_keys.note("a", now)
            taken.append(now)
        bad_keys.check("b", now)
    for start in taken:
        assert len([at for at in taken if start <= at < start + 60]) <= 2 * n_max


def test_addresses_are_forgotten_when_there_are_too_many() -> None:
    bad_keys = BadKeys(1)
    for i in range(20_000):
        bad_keys.note(str(i), 0.0)
    assert len(bad_keys._debts) == 10_000
    bad_keys.check("0", 0.0)
    with pytest.raises(TooManyBadKeys):
        bad_keys.check("19999", 0.0)


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:10.0.0.7:52114", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:52114", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2:ffff::1]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::1%5D:1", "::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:1", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("unix:", "unix:"),
        ("", ""),
    ],
)
def test_the_source_of_a_call_is_what_one_user_has(peer: str, source: str) -> None:
    assert source_of(peer) == source


def test_what_keys_of_known_ids_add_has_a_bound() -> None:
    """A client that went on with an expired key locked its address out for days."""
    bad_keys = BadKeys(30)
    for _ in range(100_000):
        bad_keys.note("192.0.2.1", 0.0)
    with pytest.raises(TooManyBadKeys):
        bad_keys.check("192.0.2.1", 0.0)
    bad_keys.check("192.0.2.1", 60.0)
