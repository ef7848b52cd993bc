"""The keys of a store, as a server knows them: whom a key is of, while the store answers and after.

A key that was seen within the hour is found in memory: a dict access and one HMAC. Any other is
asked of the store, off the event loop. The store's version is polled, so that a revoked key is
known as such within about a second; then its running calls end too, or go on, as
`revoked_streams` says.

When the store does not answer, keys seen within the hour before go on for `store_grace_s`. Then,
and for all others at once, the answer is StoreUnavailable: not looked for is not unknown.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from itertools import islice
from typing import Any, Never, TypeAlias

from sqlalchemy import Connection

from drafthouse_server.config import Config
from drafthouse_server.errors import StoreError, StoreUnavailable, Unauthenticated
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.identity import (
    BadKeys,
    KnownTenants,
    LastUses,
    RingRules,
    UnknownTenant,
)
from drafthouse_server.tenancy.keys import claimed_id, digest_of, id_of_key, pepper_id
from drafthouse_server.tenancy.records import KeyRecord, TenantRecord
from drafthouse_server.tenancy.store import Store, StoreThread, read_pepper_of
from drafthouse_server.tenancy.tenants import (
    Identity,
    Tenant,
    TenantRegistry,
    make_tenant,
    usable_limits,
)

__all__ = ["HeldCall", "KeyRing", "open_key_ring", "tenant_of_record"]

_log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two looks at the store's version."""
_TIMEOUT_S = 2.0
"""Seconds that the store has to answer."""
_SEEN_S = 3600.0
_FLUSH_S = 30.0
"""Seconds between two writings of last uses."""
_N_FLUSH = 2000
"""Last uses of one writing: more would not be written within the time that the store has."""
_READ_S = 1e-3  # more, for each key or tenant that is read
_N_KNOWN_MAX = 100_000
_N_UNKNOWN_MAX = 10_000
_UNKNOWN_S = 10.0
"""Seconds that an id is remembered as unknown, unless the store changes."""
_N_PENDING_MAX = 1000
"""Ids that the store is asked for at once."""
_N_NAMES_MAX = 500
"""Tenants that are asked for by name; above, all are read."""
_CERTIFIED = "certificate:"
"""Before a tenant's name: the id among the known keys of who shows a certificate. No key has it."""
_Found: TypeAlias = tuple[Sequence[KeyRecord], Sequence[TenantRecord]]


class _Known:
    """A key that the server has seen, and its running calls."""

    __slots__ = ("calls", "digest", "identity", "seen_at", "works_until")

    def __init__(self, key: KeyRecord, tenant: Tenant, seen_at: float) -> None:
        self.calls: set[HeldCall] = set()
        self.seen_at = seen_at
        self.update(key, tenant)

    def update(self, key: KeyRecord, tenant: Tenant) -> None:
        """Takes what the store says now."""
        self.digest = key.digest
        self.works_until = key.works_until()
        self.identity = Identity(tenant, "" if key.id.startswith(_CERTIFIED) else key.id)


class HeldCall:
    """A running call of a key: ended with UNAUTHENTICATED when the key is revoked.

    Args:
        calls: The running calls of the key, which have this one while its block runs.
        on_end: Called when it is about to be ended.
    """

    __slots__ = ("_calls", "_on_end", "_task", "_why")

    def __init__(self, calls: set[HeldCall], on_end: Callable[[], object]) -> None:
        self._calls = calls
        self._on_end = on_end
        self._task: asyncio.Task[Any] | None = None
        self._why = ""  # it was ended

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._calls.add(self)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._calls.discard(self)
        if self._why and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise Unauthenticated(self._why) from error

    def end(self, why: str) -> None:
        """Ends the call, whose client is told why."""
        if self._task is not None and not self._why:
            self._why = why
            self._on_end()
            self._task.cancel()


class KeyRing:
    """Finds the tenant of a key. Made and used on the event loop.

    Args:
        store: Where the keys are.
        pepper: That they were made with.
        make_tenant: Returns the tenant of a record.
        rules: How it decides.
        bad_keys: Counts wrong keys.
        fixed: Knows the keys of the settings, which work beside those of the store.
        clock: Monotonic time in seconds.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        pepper: bytes,
        make_tenant: Callable[[TenantRecord], Tenant],
        rules: RingRules,
        *,
        bad_keys: BadKeys,
        fixed: TenantRegistry,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pepper = pepper
        self._make_tenant = make_tenant
        self._rules = rules
        self._fixed = fixed
        self._clock = clock
        self._wall_clock = wall_clock
        self._store = store
        self._reader = StoreThread(store, is_writing=False)
        self._writer = StoreThread(store, is_writing=True)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._uses = LastUses()
        self.tenants = KnownTenants()
        """Tenants whose keys were seen."""
        self._revoked_at: dict[str, int] = {}  # of known keys that will be
        self._bad_keys = bad_keys
        self._version: str | None = None
        self.answered_at = -math.inf
        """When the store has answered last, by the clock."""
        self._watching: asyncio.Task[None] | None = None
        self.is_away = False
        """Whether the store has not answered when it was asked last."""

    async def open(self) -> None:
        """Reads the keys that were used of late, and watches the store from now on.

        Raises:
            StoreError: it does not answer, or its keys were made with another pepper.
        """
        await self._poll()
        since = int(self._wall_clock() - _SEEN_S)
        read = functools.partial(_read_recent, since=since)
        self._take(*await self._reader.run(read, _TIMEOUT_S + _N_KNOWN_MAX * _READ_S))
        self._begin_watching()

    def _begin_watching(self) -> None:
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._on_watch_end)

    def _on_watch_end(self, task: asyncio.Task[None]) -> None:
        """Watches again where a fault of ours has ended the watch.

        Without it revoked keys would work on, and then, `grace_s` later, no key at all.
        """
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the watch over the store has failed and begins anew", exc_info=error)
            self._begin_watching()

    async def close(self) -> None:
        """Writes the last uses, and ends."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        if self.is_away:
            self._store.interrupt()
        else:
            give_up_at = self._clock() + _TIMEOUT_S
            while await self._flush() and self._clock() < give_up_at:
                pass
        own = ThreadPoolExecutor(1)  # those that others share may all wait for a disk that hangs
        try:
            for thread in (self._reader, self._writer):
                await asyncio.get_running_loop().run_in_executor(own, thread.close, _TIMEOUT_S)
        finally:
            own.shutdown(wait=False)
        self._store.close()

    def identify(self, api_key: str | None, address: str) -> Identity | Awaitable[Identity]:
        """Returns whom a key is of: at once, or, where the store must be asked, as an awaitable.

        Args:
            api_key: As the client sent it, without a scheme; None if it sent none.
            address: Where it was sent from, without a port.

        Raises:
            Unauthenticated: the key is missing, unknown, expired or revoked (INVALID_API_KEY).
            TooManyBadKeys: the address has sent too many that were (TOO_MANY_BAD_KEYS).
            StoreUnavailable: it cannot be looked for (STORE_UNAVAILABLE).
        """
        known = self._known.get(claimed_id(api_key)) if api_key else None
        if known is not None and api_key:
            return self._identify_known(known, api_key, address)
        key_id = id_of_key(api_key) if api_key else None
        if not self._fixed.is_open and not key_id:
            return self._fixed.identify(api_key, address)
        if not api_key:
            raise Unauthenticated
        self._bad_keys.check(address, self._clock())
        if not key_id:
            self._refuse(address)
        return self._ask(key_id, api_key, address)

    def _identify_known(self, known: _Known, api_key: str, address: str) -> Identity:
        if not hmac.compare_digest(known.digest, digest_of(api_key, self._pepper)):
            self._refuse(address)
        identity, wall_now = self._use(known), self._wall_clock()
        if wall_now >= known.works_until:
            self._refuse(address)
        self._uses.pending[identity.key_id] = int(wall_now)
        return identity

    def _use(self, known: _Known) -> Identity:
        """Returns who it is, and notes that it was seen.

        Raises:
            StoreUnavailable: what is known is too old (STORE_UNAVAILABLE).
        """
        now = self._clock()
        self._check_store(known, now)
        known.seen_at = now
        self._known.move_to_end(_id_of(known.identity))
        return known.identity

    def _check_store(self, known: _Known, now: float) -> None:
        """Checks that what is known of a key is not too old: while the store answers, nothing is.

        Raises:
            StoreUnavailable: it is (STORE_UNAVAILABLE).
        """
        silent_s, pause_s = now - self.answered_at, _TIMEOUT_S + 2 * POLL_S
        is_seen = known.seen_at >= self.answered_at - _SEEN_S
        limit_s = max(self._rules.grace_s, pause_s) if is_seen else pause_s * (not self.is_away)
        if silent_s > limit_s:
            raise StoreUnavailable(self._rules.retry_after_s)

    def _refuse(self, address: str) -> Never:
        self._bad_keys.note(address, self._clock())
        raise Unauthenticated

    def certified(self, name: str) -> Identity | Awaitable[Identity]:
        """Returns the tenant that a certificate names.

        Its limits are those of the settings, where these have a key of it, else those of the store.

        Raises, here or when it is awaited:
            UnknownTenant: neither has it (INVALID_API_KEY).
            StoreUnavailable: the store cannot be asked (STORE_UNAVAILABLE).
        """
        if self._fixed.has_tenant(name):
            return self._fixed.certified(name)
        known = self._known.get(_CERTIFIED + name)
        return self._use(known) if known is not None else self._ask_certified(name)

    async def _ask_certified(self, name: str) -> Identity:
        """Asks the store for a tenant that the server has not seen."""
        await self._learn(_CERTIFIED + name)
        known = self._known.get(_CERTIFIED + name)
        if known is None:
            raise UnknownTenant(name)
        return self._use(known)

    def hold(
        self, identity: Identity, on_end: Callable[[], object] = lambda: None
    ) -> AbstractContextManager[None]:
        """Returns the block in which a call of a key runs; it ends when the key is revoked.

        Args:
            identity: Whose key it is.
            on_end: Called when the call is about to be ended for that.

        Raises, out of the block:
            Unauthenticated: the key was revoked meanwhile (INVALID_API_KEY).
        """
        known = self._known.get(_id_of(identity))
        return HeldCall(known.calls, on_end) if known is not None else nullcontext()

    async def _ask(self, key_id: str, api_key: str, address: str) -> Identity:
        """Asks the store for a key that the server has not seen."""
        async with self._bad_keys.turns.take(address):
            if key_id not in self._known:
                self._bad_keys.check(address, self._clock())
                await self._learn(key_id)
            if key_id not in self._known:
                self._refuse(address)
            return self._identify_known(self._known[key_id], api_key, address)

    async def _learn(self, key_id: str) -> None:
        """Has the store asked for what the server has not seen, unless it was just asked.

        Raises:
            StoreUnavailable: it cannot be asked (STORE_UNAVAILABLE).
        """
        if self._unknown.get(key_id, -math.inf) > self._clock():
            return
        asking = self._pending.get(key_id)
        if asking is None:
            # While the store is away only the watch asks it.
            if self.is_away or len(self._pending) >= _N_PENDING_MAX:
                raise StoreUnavailable(self._rules.retry_after_s)
            asking = self._pending[key_id] = asyncio.create_task(self._look_up(key_id))
            asking.add_done_callback(lambda _: self._pending.pop(key_id, None))
        try:
            await asyncio.shield(asking)
        except StoreError:
            raise StoreUnavailable(self._rules.retry_after_s) from None

    async def _look_up(self, key_id: str) -> None:
        """Learns a key, or that there is none of that id."""
        try:
            found = await self._reader.run(functools.partial(_read_keys, ids=[key_id]), _TIMEOUT_S)
        except StoreError as error:
            self._note_silence(error)
            raise
        self._take(*found)
        if key_id not in self._known:
            self._unknown[key_id] = self._clock() + _UNKNOWN_S
            while len(self._unknown) > _N_UNKNOWN_MAX:
                self._unknown.popitem(last=False)

    def _take(self, keys: Iterable[KeyRecord], tenants: Sequence[TenantRecord]) -> None:
        """Takes keys in that the store has just told."""
        self.tenants.note(tenants)
        by_name = {record.name: self._make_tenant(record) for record in tenants}
        self.tenants.tell(by_name.values())
        now, wall_now = self._clock(), self._wall_clock()
        for key in keys:
            tenant = by_name.get(key.tenant)
            if tenant is None:
                continue
            if key.id in self._known:
                # One that has expired, too: calls that began before go on until it is revoked.
                self._known[key.id].update(key, tenant)
            elif key.works_until() > wall_now:
                self._known[key.id] = _Known(key, tenant, now)
            else:
                continue
            if key.revoked_at is not None:
                self._revoked_at[key.id] = key.revoked_at
        idle = (key_id for key_id, known in self._known.items() if not known.calls)
        self._drop([*islice(idle, max(0, len(self._known) - _N_KNOWN_MAX))])

    async def _watch(self) -> None:
        """Follows the store's changes for ever."""
        flush_at = self._clock() + _FLUSH_S
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._poll()
            except StoreError as error:
                self._note_silence(error)
            self._end_revoked()
            if not self.is_away and self._clock() >= flush_at:
                self._prune()
                has_all = await self._flush() < _N_FLUSH  # else it goes on after the next look
                flush_at = self._clock() + _FLUSH_S * has_all

    async def _poll(self) -> None:
        """Looks whether something has changed, and reads what is known anew if it has.

        Raises:
            StoreError: the store does not answer, or is another one.
        """
        asked_at = self._clock()
        found = await self._reader.run(records.version, _TIMEOUT_S)
        if found.pepper_id not in ("", pepper_id(self._pepper)):
            raise StoreError(
                "the keys of this store were made with another pepper than that of"
                " key_pepper_file; restore the file that belongs to the store"
            )
        if found.version != self._version:
            await self._refresh()
            self._version = found.version
        self.answered_at = asked_at
        if self.is_away:
            self.is_away = False
            _log.info("the store answers again")

    async def _refresh(self) -> None:
        """Reads all known keys again; those that are gone, or revoked, are forgotten."""
        self._unknown.clear()
        ids, names = list(self._known), self.tenants.names
        read = functools.partial(_read_keys, ids=ids, names=names)
        timeout_s = _TIMEOUT_S + (len(ids) + len(names)) * _READ_S
        keys, tenants = await self._reader.run(read, timeout_s)
        wall_now = self._wall_clock()
        self._forget_deleted(ids, keys, names, tenants)
        for key_id in [key.id for key in keys if key.was_revoked(wall_now)]:
            self._forget(key_id)
        self._take(keys, tenants)

    def _forget_deleted(
        self,
        ids: list[str],
        keys: Iterable[KeyRecord],
        names: AbstractSet[str],
        tenants: Iterable[TenantRecord],
    ) -> None:
        """Forgets the tenants that were deleted, ends their calls, and has their data dropped.

        Of keys and of tenants: what was known when the store was asked, and what of it exists.
        """
        tenant_of = {i: k.identity.tenant.name for i, k in self._known.items()}
        lost = set(ids) - {key.id for key in keys}
        suspects = {tenant_of[key_id] for key_id in lost & tenant_of.keys()}
        # A database that is behind, as after a failover, lacks some keys of a tenant, not all.
        suspects -= {key.tenant for key in keys if not key.id.startswith(_CERTIFIED)}
        deleted = self.tenants.take_deleted(names, tenants, suspects)
        for key_id in lost:
            if tenant_of.get(key_id) not in deleted:
                self._forget(key_id)
        for key_id, name in tenant_of.items():
            if name in deleted:
                self._revoked_at.pop(key_id, None)
                for call in list(self._known.pop(key_id).calls):
                    call.end("the tenant was deleted")
        for name in sorted(deleted):
            _log.info("tenant %s was deleted", name)
            if self.tenants.on_deleted is not None and not self._fixed.has_tenant(name):
                self.tenants.on_deleted(name)

    def _forget(self, key_id: str) -> None:
        """Forgets a key that was revoked, and ends its calls where they shall end."""
        self._revoked_at.pop(key_id, None)
        known = self._known.pop(key_id, None)
        if known is None:
            return
        if known.identity.key_id:
            _log.info("key %s of tenant %s was revoked", key_id, known.identity.tenant.name)
        if self._rules.ends_streams:
            for call in list(known.calls):
                call.end("the API key was revoked")

    def _end_revoked(self) -> None:
        """Forgets the keys whose revocation, told before, has come."""
        wall_now = self._wall_clock()
        for key_id in [key_id for key_id, at in self._revoked_at.items() if at <= wall_now]:
            self._forget(key_id)
            self._unknown[key_id] = math.inf  # until the store tells of a change

    def _prune(self) -> None:
        """Forgets keys that were not seen for an hour; they are asked for again."""
        oldest = self._clock() - _SEEN_S
        known = self._known.items()
        self._drop([key_id for key_id, k in known if k.seen_at < oldest and not k.calls])

    def _drop(self, ids: Iterable[str]) -> None:
        for key_id in ids:
            del self._known[key_id]
            self._revoked_at.pop(key_id, None)

    async def _flush(self) -> int:
        """Writes when some keys were used, and returns of how many: none where that has failed."""
        uses = self._uses.take(_N_FLUSH)
        if not uses:
            return 0
        try:
            await self._writer.run(functools.partial(records.note_uses, uses=uses), _TIMEOUT_S)
        except StoreError as error:
            if self._uses.is_flushed:
                _log.warning("%s; when keys were used is written later", error)
            self._uses.put_back(uses)
            return 0
        self._uses.is_flushed = True
        return len(uses)

    def _note_silence(self, error: StoreError) -> None:
        if not self.is_away:
            self.is_away = True
            _log.warning(
                "%s; keys seen within the hour go on for %g s, others are refused",
                error,
                self._rules.grace_s,
            )


def _read_keys(
    connection: Connection, ids: Sequence[str], names: AbstractSet[str] = frozenset()
) -> _Found:
    keys = records.find_keys(connection, [i for i in ids if not i.startswith(_CERTIFIED)])
    certified = [i.removeprefix(_CERTIFIED) for i in ids if i.startswith(_CERTIFIED)]
    return _with_tenants(connection, keys + [_certificate_of(name) for name in certified], names)


def _id_of(identity: Identity) -> str:
    return identity.key_id or _CERTIFIED + identity.tenant.name


def _certificate_of(name: str) -> KeyRecord:
    """Returns what stands for a tenant's certificate among the keys: it never ends by itself."""
    return KeyRecord(_CERTIFIED + name, name, "", b"", 0, None, None, None)


def _read_recent(connection: Connection, since: int) -> _Found:
    return _with_tenants(connection, records.recently_used(connection, since, _N_KNOWN_MAX))


def _with_tenants(
    connection: Connection, keys: Sequence[KeyRecord], more: AbstractSet[str] = frozenset()
) -> _Found:
    names = {key.tenant for key in keys} | more
    if not names:
        return keys, []
    return keys, records.list_tenants(connection, names if len(names) <= _N_NAMES_MAX else None)


def tenant_of_record(record: TenantRecord, *, n_waiting_max: int) -> Tenant:
    """Returns the tenant that a store tells of, with the limits that this release knows.

    Args:
        record: What the store tells.
        n_waiting_max: Requests that may wait where the store does not say.
    """
    limits = usable_limits(record.limits)
    if left := sorted(record.limits.keys() - limits.keys()):
        _log.warning(
            "limits of tenant %s in the store are unknown to this release, or wrong, and do not"
            " count: %s",
            record.name,
            ", ".join(left),
        )
    return make_tenant(record.name, limits, n_waiting_max=n_waiting_max)


async def open_key_ring(config: Config, fixed: TenantRegistry, bad_keys: BadKeys) -> KeyRing:
    """Opens the store of the settings, and returns its keys.

    Args:
        config: All settings; `store` is not empty.
        fixed: Knows the keys of the settings.
        bad_keys: Counts wrong keys.

    Raises:
        ConfigError: `store` or `key_pepper_file` is wrong.
        StoreError: the store cannot be used.
    """
    store = await asyncio.to_thread(Store.open, config.store)
    async with AsyncExitStack() as undo:
        undo.callback(store.close)
        pepper = await asyncio.to_thread(read_pepper_of, config, store)
        rules = RingRules(
            config.store_grace_s, config.revoked_streams == "end", config.retry_after_s
        )
        make = functools.partial(tenant_of_record, n_waiting_max=config.tenant_queue_size)
        ring = KeyRing(store, pepper, make, rules, bad_keys=bad_keys, fixed=fixed)
        undo.push_async_callback(ring.close)
        await ring.open()
        undo.pop_all()
    return ring
