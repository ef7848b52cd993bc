"""What the store holds: its tables, and every question and change, as functions of a connection.

The tables are made by `migrations`. Times are whole seconds since 1970, UTC, in 64 bits: SQLite and
PostgreSQL agree on these. A limit is a row of its own, with its value as JSON, so that a new limit
needs no new column. Every change of keys, tenants and limits writes a row of the audit trail and a
new version, in its own transaction; servers poll the version.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    String,
    Table,
    Text,
    bindparam,
    case,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from drafthouse_server.errors import StoreRefusal

__all__ = [
    "METADATA",
    "Change",
    "KeyRecord",
    "TenantRecord",
    "Version",
    "add_key",
    "add_tenant",
    "add_usage",
    "delete_tenant",
    "encoding_problem",
    "find_keys",
    "find_usage",
    "list_keys",
    "list_tenants",
    "note_uses",
    "recently_used",
    "remember_pepper",
    "revoke_key",
    "set_limits",
    "sum_usage",
    "version",
]

METADATA = MetaData()
"""All tables."""

_CASCADE = "CASCADE"

state = Table(
    "state",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
"""Facts about the store: `version`, raised by every change of keys, tenants and limits, which
servers poll; `pepper_id`, the pepper that the keys were made with."""

tenants = Table(
    "tenants",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("created_at", BigInteger, nullable=False),
)
"""Customers."""

limits = Table(
    "limits",
    METADATA,
    Column("tenant", String(64), ForeignKey("tenants.name", ondelete=_CASCADE), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
"""What a tenant may, a row for each thing that is not the default."""

keys = Table(
    "keys",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("tenant", String(64), ForeignKey("tenants.name", ondelete=_CASCADE), nullable=False),
    Column("label", String(128), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("last_used_at", BigInteger),
    Index("keys_of_tenant", "tenant"),
    Index("keys_by_last_use", "last_used_at"),
)
"""Keys, as digests. A key works until `expires_at` and until `revoked_at`; without one never."""

audit = Table(
    "audit",
    METADATA,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("actor", String(128), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(128), nullable=False),
    Column("detail", Text, nullable=False),
    Index("audit_by_time", "at"),
)
"""Who changed what, and when. Rows are only added."""

usage = Table(
    "usage",
    METADATA,
    Column("record_id", String(32), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("end_user", String(64), nullable=False),
    Column("model", String(256), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("outcome", String(64), nullable=False),
    *(
        Column(name, BigInteger, nullable=False)
        for name in (
            "n_prompt",
            "n_reused",
            "n_output",
            "n_drafted",
            "n_accepted",
        )
    ),
    *(
        Column(name, Float(53), nullable=False)
        for name in ("queue_s", "prefill_s", "decode_s", "preempted_s", "started_at", "ended_at")
    ),
    Index("usage_of_tenant", "tenant", "ended_at", "record_id"),
    Index("usage_by_end", "ended_at", "record_id"),
)
"""What each accepted stream took, one row a stream. It names tenants and keys by text and has no
foreign key: a bill outlives both. `started_at`, `ended_at`: seconds since 1970, with fractions."""


_VERSION, _PEPPER_ID = "version", "pepper_id"
_N_IDS = 500
"""Ids of one statement; SQLite takes 999 parameters where it is old."""
SUM_MS = 300_000
"""Milliseconds that a database has to sum up the usage of a month."""
_CHANGE_LOCK = 0x6472_6167  # a number of ours for PostgreSQL's advisory locks


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as the store knows it."""

    id: str
    """Public part of the key."""
    tenant: str
    """Name of its tenant."""
    label: str
    """What its owner calls it; may be empty."""
    digest: bytes
    """HMAC of the whole key; empty once it is revoked, so that no text is this key any more."""
    created_at: int
    """Seconds since 1970."""
    expires_at: int | None
    """From when on it does not work; None: never."""
    revoked_at: int | None
    """From when on it does not work, as somebody has decided; may lie in the future."""
    last_used_at: int | None
    """When it was last used, to about a minute; None: never."""

    def __repr__(self) -> str:
        return f"KeyRecord(id={self.id!r}, tenant={self.tenant!r})"

    @property
    def is_revoked(self) -> bool:
        """Whether its life has ended whatever a clock says: those of servers may differ."""
        return self.revoked_at is not None and not self.digest

    def was_revoked(self, now: float) -> bool:
        """Returns whether it is revoked, and has not just expired, at a time."""
        return self.is_revoked or (self.revoked_at is not None and self.revoked_at <= now)

    def works_until(self) -> float:
        """Returns the end of its life, seconds since 1970; infinity when it has none."""
        if self.is_revoked:
            return float("-inf")
        ends = [end for end in (self.expires_at, self.revoked_at) if end is not None]
        return min(ends, default=float("inf"))


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant as the store knows it."""

    name: str
    """Unique name."""
    created_at: int
    """Seconds since 1970."""
    limits: Mapping[str, object]
    """What it may, where that is not the default: names of `tenants.LIMITS` and JSON values."""
    n_keys: int = 0
    """Keys of the tenant that are not revoked."""


@dataclass(frozen=True, slots=True)
class Version:
    """Which state of keys and tenants a store is in."""

    version: str
    """Another text after every change."""
    pepper_id: str
    """Name of the pepper that its keys were made with; empty before the first key."""


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes something, and when; every change is told so."""

    actor: str
    """Who, such as "cli:alice"."""
    at: int
    """When, seconds since 1970."""


def encoding_problem(connection: Connection) -> str:
    """Returns why a database cannot hold every text; empty where it can.

    A record with the name of an end user that it cannot hold would keep back all records.
    """
    if connection.dialect.name != "postgresql":
        return ""
    found = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    advice = "make one with ENCODING 'UTF8' TEMPLATE template0"
    return "" if found == "UTF8" else f"its database has the encoding {found}; {advice}"


def version(connection: Connection) -> Version:
    """Returns the version of keys and tenants."""
    found = {row.name: row.value for row in connection.execute(select(state))}
    return Version(found.get(_VERSION, ""), found.get(_PEPPER_ID, ""))


def remember_pepper(connection: Connection, pepper_id: str) -> str:
    """Notes which pepper the keys are made with, unless one is noted, and returns that one.

    Of several that do so at once, the first counts: the others wait until it has committed.
    """
    row = _insert(connection, state).values(name=_PEPPER_ID, value=pepper_id)
    connection.execute(row.on_conflict_do_nothing())
    return version(connection).pepper_id


def _set_state(connection: Connection, name: str, value: str) -> None:
    row = _insert(connection, state).values(name=name, value=value)
    connection.execute(row.on_conflict_do_update(index_elements=["name"], set_={"value": value}))


def _insert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Returns an insertion that can say what happens where the row is there already."""
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    return make(table)


def _begin_change(connection: Connection) -> None:
    """Waits for the changes of others: what is read from now on nobody else changes.

    Without it two administrators read the same state, and one is told of the database's
    constraints, or a key is replaced twice. A writer of SQLite is alone from its begin.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_CHANGE_LOCK)))


def _note(connection: Connection, change: Change, action: str, subject: str, detail: str) -> None:
    """Writes a line of the audit trail, and a new version."""
    connection.execute(
        insert(audit).values(
            at=change.at, actor=change.actor[:128], action=action, subject=subject, detail=detail
        )
    )
    _set_state(connection, _VERSION, secrets.token_hex(8))


def add_tenant(
    connection: Connection, name: str, values: Mapping[str, object], change: Change
) -> None:
    """Adds a tenant.

    Args:
        connection: To write with.
        name: Its name.
        values: Its limits, by name.
        change: Who adds it.

    Raises:
        StoreRefusal: there is one of that name.
    """
    _begin_change(connection)
    if _has_tenant(connection, name):
        raise StoreRefusal(f"there is a tenant {name!r} already")
    connection.execute(insert(tenants).values(name=name, created_at=change.at))
    _write_limits(connection, name, values)
    _note(connection, change, "tenants.add", name, json.dumps(dict(values), sort_keys=True))


def set_limits(
    connection: Connection, name: str, values: Mapping[str, object], change: Change
) -> None:
    """Changes limits of a tenant; None as a value takes one back to its default.

    Raises:
        StoreRefusal: there is no such tenant.
    """
    _begin_change(connection)
    _need_tenant(connection, name)
    _write_limits(connection, name, values)
    _note(connection, change, "tenants.set", name, json.dumps(dict(values), sort_keys=True))


def _write_limits(connection: Connection, name: str, values: Mapping[str, object]) -> None:
    if values:
        is_old = (limits.c.tenant == name) & limits.c.name.in_(list(values))
        connection.execute(delete(limits).where(is_old))
    rows = [
        {"tenant": name, "name": limit, "value": json.dumps(value)}
        for limit, value in values.items()
        if value is not None
    ]
    if rows:
        connection.execute(insert(limits), rows)


def delete_tenant(connection: Connection, name: str, change: Change) -> int:
    """Deletes a tenant with its keys and limits, and returns how many keys it had.

    Its usage stays: it may have to be billed.

    Raises:
        StoreRefusal: there is no such tenant.
    """
    _begin_change(connection)
    _need_tenant(connection, name)
    n_keys = connection.execute(delete(keys).where(keys.c.tenant == name)).rowcount
    connection.execute(delete(limits).where(limits.c.tenant == name))
    connection.execute(delete(tenants).where(tenants.c.name == name))
    _note(connection, change, "tenants.delete", name, f"{n_keys} keys")
    return n_keys


def _has_tenant(connection: Connection, name: str) -> bool:
    return connection.scalar(select(tenants.c.name).where(tenants.c.name == name)) is not None


def _need_tenant(connection: Connection, name: str) -> None:
    if not _has_tenant(connection, name):
        raise StoreRefusal(
            f"there is no tenant {name!r}; `drafthouse tenants list` shows all of them"
        )


def list_tenants(connection: Connection, names: Iterable[str] | None = None) -> list[TenantRecord]:
    """Returns tenants by name: all of them, or those that are asked for and exist."""
    found = select(tenants).order_by(tenants.c.name)
    of_limits, of_keys = select(limits), select(keys.c.tenant).where(keys.c.revoked_at.is_(None))
    if names is not None:
        wanted = list(names)
        found = found.where(tenants.c.name.in_(wanted))
        of_limits = of_limits.where(limits.c.tenant.in_(wanted))
        of_keys = of_keys.where(keys.c.tenant.in_(wanted))
    values: dict[str, dict[str, object]] = {}
    for row in connection.execute(of_limits):
        values.setdefault(row.tenant, {})[row.name] = _value_of(row.value)
    n_keys: dict[str, int] = {}
    for name in connection.scalars(of_keys):
        n_keys[name] = n_keys.get(name, 0) + 1
    return [
        TenantRecord(
            row.name,
            _as_time(row.created_at) or 0,
            MappingProxyType(values.get(row.name, {})),
            n_keys.get(row.name, 0),
        )
        for row in connection.execute(found)
    ]


def _value_of(text: str) -> object:
    """Returns the value of a limit; the text itself where somebody has written what is no JSON.

    No limit is a text, so that such a one does not count. It must not keep keys from working.
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found


def add_key(connection: Connection, key: KeyRecord, change: Change) -> bool:
    """Adds a key; returns whether its tenant is new and was added too."""
    _begin_change(connection)
    is_new = not _has_tenant(connection, key.tenant)
    if is_new:
        add_tenant(connection, key.tenant, {}, change)
    connection.execute(insert(keys).values(**{name: getattr(key, name) for name in _KEY_FIELDS}))
    _note(connection, change, "keys.add", key.id, f"tenant {key.tenant}")
    return is_new


def revoke_key(connection: Connection, key_id: str, revoked_at: int, change: Change) -> KeyRecord:
    """Ends the life of a key, and returns it as it was.

    Args:
        connection: To write with.
        key_id: Its id.
        revoked_at: From when on it does not work, seconds since 1970. Where that is not after the
            change, the key loses its digest: then no clock is asked, of this machine or of servers.
        change: Who revokes it.

    Raises:
        StoreRefusal: there is no such key, or it was revoked before.
    """
    _begin_change(connection)
    found = find_keys(connection, [key_id])
    if not found:
        raise StoreRefusal(f"there is no key {key_id!r}; `drafthouse keys list` shows all of them")
    key = found[0]
    ends_now = revoked_at <= change.at
    ends_before = key.revoked_at is not None and key.revoked_at <= revoked_at
    if key.is_revoked or (ends_before and not ends_now):
        raise StoreRefusal(f"key {key_id!r} is revoked already")
    values: dict[str, object] = {"revoked_at": revoked_at}
    if ends_now:
        values["digest"] = b""
    connection.execute(update(keys).where(keys.c.id == key_id).values(**values))
    _note(connection, change, "keys.revoke", key_id, f"tenant {key.tenant}, from {revoked_at} on")
    return key


def find_keys(connection: Connection, ids: Sequence[str]) -> list[KeyRecord]:
    """Returns the keys of some ids, those that exist."""
    found: list[KeyRecord] = []
    for start in range(0, len(ids), _N_IDS):
        wanted = select(keys).where(keys.c.id.in_(ids[start : start + _N_IDS]))
        found += map(_to_key, connection.execute(wanted))
    return found


def list_keys(connection: Connection, tenant: str | None = None) -> list[KeyRecord]:
    """Returns all keys, or those of one tenant, the oldest first."""
    wanted = select(keys).order_by(keys.c.created_at, keys.c.id)
    if tenant is not None:
        _need_tenant(connection, tenant)
        wanted = wanted.where(keys.c.tenant == tenant)
    return [_to_key(row) for row in connection.execute(wanted)]


def recently_used(connection: Connection, since: int, n_max: int) -> list[KeyRecord]:
    """Returns the keys that were used since a time, the last used first, `n_max` at most."""
    latest = keys.c.last_used_at.desc()
    wanted = select(keys).where(keys.c.last_used_at >= since).order_by(latest).limit(n_max)
    return [_to_key(row) for row in connection.execute(wanted)]


def note_uses(connection: Connection, uses: Mapping[str, int]) -> None:
    """Writes when keys were last used, seconds since 1970 by id. No new version: nobody waits."""
    used_at: BindParameter[int] = bindparam("used_at")
    last = keys.c.last_used_at
    is_later = last.is_(None) | (last < used_at)  # another server may have noted a later one
    change = update(keys).where((keys.c.id == bindparam("key_id")) & is_later)
    change = change.values(last_used_at=used_at)
    # In one order on all servers: each locks the rows, and would wait for the other's.
    rows = [{"key_id": key_id, "used_at": uses[key_id]} for key_id in sorted(uses)]
    connection.execute(change, rows)


_KEY_FIELDS = tuple(column.name for column in keys.columns)
_TIMES = ("created_at", "expires_at", "revoked_at", "last_used_at")


def _to_key(row: Row[tuple[object, ...]]) -> KeyRecord:
    """Returns a key; one that somebody has written wrong by hand works no more.

    SQLite takes any value in any column, and one row must not keep other keys from working.
    """
    values = dict(row._mapping)
    for name in _TIMES:
        values[name] = _as_time(values[name])
    if isinstance(values["digest"], bytes):
        values["digest"] = bytes(values["digest"])
    else:
        values |= {"digest": b"", "revoked_at": 0}
    return KeyRecord(**values)


def _as_time(value: object) -> int | None:
    """Returns a time in seconds since 1970; what is none has long passed."""
    return value if value is None else max(0, value) if isinstance(value, int) else 0


def add_usage(connection: Connection, records: Sequence[Mapping[str, object]]) -> None:
    """Adds records of usage; one whose `record_id` is there already changes nothing.

    Args:
        connection: To write with.
        records: Values by the names of the table's columns, all of them.
    """
    if records:
        change = _insert(connection, usage).on_conflict_do_nothing()
        connection.execute(change, [dict(row) for row in records])


def find_usage(
    connection: Connection,
    *,
    tenant: str | None = None,
    key_id: str | None = None,
    model: str | None = None,
    since: float | None = None,
    until: float | None = None,
    after: tuple[float, str] | None = None,
    n_max: int | None = None,
) -> list[Mapping[str, object]]:
    """Returns records of usage by their end, and where that is the same, by their id.

    Args:
        connection: To read with.
        tenant: Name of the tenant; None, here and below: any.
        key_id: Id of the key.
        model: Name of the model.
        since: Earliest end, seconds since 1970.
        until: End before which all of them ended, seconds since 1970.
        after: End and id of the last record of the page before.
        n_max: Most records.
    """
    wanted = select(usage).order_by(usage.c.ended_at, usage.c.record_id).limit(n_max)
    for column, value in (
        (usage.c.tenant, tenant),
        (usage.c.key_id, key_id),
        (usage.c.model, model),
    ):
        if value is not None:
            wanted = wanted.where(column == value)
    if since is not None:
        wanted = wanted.where(usage.c.ended_at >= since)
    if until is not None:
        wanted = wanted.where(usage.c.ended_at < until)
    if after is not None:
        wanted = wanted.where(tuple_(usage.c.ended_at, usage.c.record_id) > tuple_(*after))
    return [dict(row._mapping) for row in connection.execute(wanted)]


def sum_usage(connection: Connection, since: float) -> dict[str, int]:
    """Returns the tokens of prompts and outputs of streams that began since a time, by tenant.

    As `UsageRecord.n_limited` counts them: not prompts that never got a slot.

    Args:
        connection: To read with.
        since: Earliest start, seconds since 1970.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {SUM_MS}")
    has_begun = (usage.c.queue_s > 0) | (usage.c.n_output > 0)
    n_tokens = func.sum(usage.c.n_output + case((has_begun, usage.c.n_prompt), else_=0))
    # No stream ends before it begins: by its end, which has an index, it is found.
    is_late = (usage.c.ended_at >= since) & (usage.c.started_at >= since)
    wanted = select(usage.c.tenant, n_tokens).where(is_late).group_by(usage.c.tenant)
    return {tenant: int(n) for tenant, n in connection.execute(wanted)}
