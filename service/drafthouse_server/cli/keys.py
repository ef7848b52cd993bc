"""`drafthouse keys`: keys of a store, made, listed, revoked and replaced, with or without a server.

What is printed on stdout is the result alone: a new key, once, or a table, or JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from sqlalchemy import Connection

from drafthouse_server.access import is_tenant_name
from drafthouse_server.cli import settings
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, StoreError, StoreRefusal
from drafthouse_server.operations.audit import OK, AuditTrail, local_actor
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.keys import ApiKey, digest_of, id_of_key, make_key
from drafthouse_server.tenancy.records import Change, KeyRecord
from drafthouse_server.tenancy.store import Store, read_pepper_of

__all__ = [
    "Desk",
    "add_group",
    "add_key_commands",
    "add_part",
    "as_time",
    "change_now",
    "tenant_name",
]

_Commands = argparse._SubParsersAction  # argparse has no public name for it
_Result = TypeVar("_Result")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NEVER = -1
"""Life of a key that does not expire."""
_N_LABEL_MAX = 128
_N_ID_MAX = 12
_LAST_S = int(datetime(9999, 12, 31, 23, 59, tzinfo=UTC).timestamp())
"""The last minute that a `datetime` can tell."""


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """Where a command works: an opened store and the settings that name it."""

    store: Store
    """The store."""
    config: Config
    """All settings."""
    audit: dict[str, str] = dataclasses.field(default_factory=dict)
    """What the audit trail is told of the act besides its arguments, by name; never a secret."""


def add_group(
    commands: _Commands[argparse.ArgumentParser], name: str, about: str
) -> _Commands[argparse.ArgumentParser]:
    """Adds a command that works on the store; returns where its parts go."""
    parser = commands.add_parser(
        name,
        help=about,
        description="Works on the store, whether or not a server runs; one that runs sees a change"
        " within a second or two.",
        allow_abbrev=False,
    )
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_part(
    parts: _Commands[argparse.ArgumentParser],
    name: str,
    about: str,
    work: Callable[[Desk, argparse.Namespace, Terminal], None],
    *,
    may_make: bool = False,
) -> argparse.ArgumentParser:
    """Adds a part of such a command, with the flags by which it finds the store.

    Args:
        parts: Where to.
        name: Its own.
        about: A line for the list of parts.
        work: What it does.
        may_make: Whether a store that is missing is made.
    """
    parser = parts.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="FILE", help="the server's TOML file, which may name the store"
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER@HOST/DATABASE; default: DRAFTHOUSE_STORE, or"
        " `store` in the file of --config",
    )
    parser.add_argument(
        "--key-pepper-file", metavar="FILE", help="as of the server; default: as the store's"
    )
    parser.set_defaults(run=_run_on_store(work, may_make=may_make), parser=parser)
    return parser


def add_key_commands(commands: _Commands[argparse.ArgumentParser], about: str) -> None:
    """Adds the command `keys`, with a line for the list of commands."""
    parts = add_group(commands, "keys", about)
    add = add_part(
        parts, "add", "make a key, and print it: it is shown this once", _add, may_make=True
    )
    add.add_argument("--tenant", required=True, type=tenant_name, metavar="NAME")
    _add_life_flags(add, "never")
    listed = add_part(parts, "list", "list keys, without their secrets", _list)
    listed.add_argument("--tenant", type=tenant_name, metavar="NAME", help="of one tenant")
    listed.add_argument("--json", action="store_true", help="for programs")
    revoke = add_part(parts, "revoke", "end a key's life now", _revoke)
    revoke.add_argument(
        "key_id", type=_key_id, metavar="ID", help="the part between dh_ and the second _"
    )
    rotate = add_part(parts, "rotate", "make a key in place of another, and print it", _rotate)
    rotate.add_argument("key_id", type=_key_id, metavar="ID", help="the key that is replaced")
    rotate.add_argument(
        "--overlap",
        type=_duration,
        default=0,
        metavar="TIME",
        help="how long the old key works on, such as 24h; default: not at all",
    )
    _add_life_flags(rotate, "as long as the old key was made for")


def _key_id(text: str) -> str:
    """Returns the id that was given, by itself or in a whole key.

    Nothing else gets any further: what is told of a command that failed, on the screen and in the
    audit trail, shall hold no secret.
    """
    key_id = id_of_key(text) or text
    if not (key_id.isascii() and key_id.isalnum() and len(key_id) <= _N_ID_MAX):
        raise argparse.ArgumentTypeError("must be the part of a key between dh_ and the second _")
    return key_id


def _add_life_flags(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--label", default="", metavar="TEXT", help="what the key is for")
    parser.add_argument(
        "--expires",
        type=_life,
        metavar="TIME",
        help=f"how long it works, such as 90d or 12h, or never; default: {default}",
    )


def _run_on_store(
    work: Callable[[Desk, argparse.Namespace, Terminal], None], *, may_make: bool
) -> Callable[[argparse.Namespace, Terminal], int]:
    """Returns a command that opens the store, works, and says in one sentence what went wrong."""

    def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
        try:
            config = _settings(arguments, terminal)
            store = Store.open(config.store, may_make=may_make)
        except ConfigError as error:
            terminal.error(str(error))
            return 2
        except StoreError as error:
            terminal.error(str(error))
            return 1
        desk, outcome = Desk(store, config), "failed"
        try:
            work(desk, arguments, terminal)
            outcome = OK
        except ConfigError as error:
            terminal.error(str(error))
            return 2
        except (StoreError, StoreRefusal) as error:
            terminal.error(str(error))
            return 1
        finally:
            store.close()
            _audit(desk, arguments, outcome)
        return 0

    return run


def _audit(desk: Desk, arguments: argparse.Namespace, outcome: str) -> None:
    """Writes a line of the audit trail, unless nothing was to be changed."""
    _, *words = arguments.parser.prog.split()
    if words[-1] == "list":
        return
    name = getattr(arguments, "name", None) or getattr(arguments, "tenant", None)
    target = f"tenant:{name}" if name else f"key:{arguments.key_id}"
    detail: dict[str, object] = dict(desk.audit)
    if limits := getattr(arguments, "limits", None):
        detail["limits"] = dict(limits)
    trail = AuditTrail(desk.config.audit_file)
    trail.note(local_actor(), ".".join(words), target, outcome, detail)


def _settings(arguments: argparse.Namespace, terminal: Terminal) -> Config:
    names = ("store", "key_pepper_file")
    flags = {name: text for name in names if (text := getattr(arguments, name)) is not None}
    config = settings.load(arguments.config, flags=flags, warn=terminal.warn)
    if not config.store:
        problem = (
            "no store is set; give one with --store, DRAFTHOUSE_STORE or --config, such as"
            " sqlite:///drafthouse.db"
        )
        raise ConfigError("store", "", problem=problem)
    return config


def change_now() -> Change:
    """Returns who works here, for the audit trail, and the time."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # as in a container, where a number has no name
        user = str(os.geteuid())
    return Change(f"cli:{user}", int(time.time()))


def _add(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    pepper, key, change = read_pepper_of(desk.config, desk.store), make_key(), change_now()
    record = _record(
        key,
        arguments.tenant,
        label=arguments.label,
        life_s=None if arguments.expires == _NEVER else arguments.expires,
        pepper=pepper,
        change=change,
    )
    with desk.store.writing() as connection:
        is_new = records.add_key(connection, record, change)
        _show(key, record, terminal)  # one that nobody has seen must not work
    desk.audit["new_key"] = key.id
    if is_new:
        terminal.note(f"tenant {record.tenant} is new, and was added")


def _rotate(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    pepper, key, change = read_pepper_of(desk.config, desk.store), make_key(), change_now()
    with desk.store.writing() as connection:
        end = change.at + arguments.overlap
        old = records.revoke_key(connection, arguments.key_id, end, change)
        record = _record(
            key,
            old.tenant,
            label=arguments.label or old.label,
            life_s=_life_of_next(old, arguments.expires),
            pepper=pepper,
            change=change,
        )
        records.add_key(connection, record, change)
        _show(key, record, terminal)  # else the old one stays
    desk.audit["new_key"] = key.id
    end = min(end, old.expires_at or end)
    until = f"works until {as_time(end)}" if arguments.overlap else "is revoked"
    terminal.note(f"key {old.id} {until}")


def _life_of_next(old: KeyRecord, asked: int | None) -> int | None:
    """Returns how long a key in place of another works, seconds; None: until it is revoked."""
    if asked is not None:
        return None if asked == _NEVER else asked
    return None if old.expires_at is None else old.expires_at - old.created_at


def _record(
    key: ApiKey, tenant: str, *, label: str, life_s: int | None, pepper: bytes, change: Change
) -> KeyRecord:
    return KeyRecord(
        id=key.id,
        tenant=tenant,
        label=label[:_N_LABEL_MAX],
        digest=digest_of(key.text, pepper),
        created_at=change.at,
        expires_at=None if life_s is None else change.at + life_s,
        revoked_at=None,
        last_used_at=None,
    )


def _show(key: ApiKey, record: KeyRecord, terminal: Terminal) -> None:
    until = "until it is revoked" if record.expires_at is None else as_time(record.expires_at)
    terminal.note(f"key {key.id} of tenant {record.tenant}, works: {until}; it is shown this once:")
    terminal.line(key.text)


def _revoke(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    change = change_now()
    with desk.store.writing() as connection:
        key = records.revoke_key(connection, arguments.key_id, change.at, change)
    terminal.note(f"key {key.id} of tenant {key.tenant} is revoked")


def _list(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    found = _read(desk, lambda connection: records.list_keys(connection, arguments.tenant))
    now = int(time.time())
    if arguments.json:
        terminal.line(json.dumps([_as_json(key, now) for key in found], indent=2))
        return
    header = ("id", "tenant", "label", "state", "made", "expires", "last used")
    rows = [
        (
            key.id,
            key.tenant,
            key.label or "–",
            _state(key, now),
            as_time(key.created_at),
            as_time(key.expires_at),
            as_time(key.last_used_at),
        )
        for key in found
    ]
    for line in format_table(header, rows):
        terminal.line(line)


def _read(desk: Desk, question: Callable[[Connection], Sequence[_Result]]) -> Sequence[_Result]:
    with desk.store.reading() as connection:
        return question(connection)


def _state(key: KeyRecord, now: int) -> str:
    if key.was_revoked(now):
        return "revoked"
    if key.works_until() <= now:
        return "expired"
    return "works" if key.revoked_at is None else f"works until {as_time(int(key.works_until()))}"


def _as_json(key: KeyRecord, now: int) -> dict[str, object]:
    values = dataclasses.asdict(key)
    del values["digest"]
    return values | {"works": key.works_until() > now}


def as_time(seconds: int | None) -> str:
    """Returns a time for people, in UTC; of later ones the last minute of the year 9999."""
    if seconds is None:
        return "–"
    return datetime.fromtimestamp(min(seconds, _LAST_S), UTC).strftime("%Y-%m-%d %H:%M")


def tenant_name(text: str) -> str:
    """Returns a checked name of a tenant, for argparse."""
    if not is_tenant_name(text):
        raise argparse.ArgumentTypeError(
            f'{text!r} is no name of a tenant; expected 64 letters, digits, ".", "_", "-" at most'
        )
    return text


def _life(text: str) -> int:
    life_s = _NEVER if text == "never" else _duration(text)
    if not life_s:
        raise argparse.ArgumentTypeError(f"{text!r} is no life; the key would never work")
    return life_s


def _duration(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected one such as 12h or 90d")
    return int(match[1]) * _UNITS[match[2]]
