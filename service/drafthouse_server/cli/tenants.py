"""`drafthouse tenants`: customers of a store and what they may, with or without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from drafthouse_server.cli.admin import limit_key
from drafthouse_server.cli.keys import (
    Desk,
    add_group,
    add_part,
    as_time,
    change_now,
    tenant_name,
)
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy import records
from drafthouse_server.tenancy.tenants import LIMITS, parse_limit

__all__ = ["add_tenant_commands"]

_Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_tenant_commands(commands: _Commands[argparse.ArgumentParser], about: str) -> None:
    """Adds the command `tenants`, with a line for the list of commands."""
    parts = add_group(commands, "tenants", about)
    add = add_part(parts, "add", "add a tenant", _add, may_make=True)
    _add_name(add)
    _add_limits(add)
    listed = add_part(parts, "list", "list tenants and their limits", _list)
    listed.add_argument("--json", action="store_true", help="for programs")
    change = add_part(parts, "set", "change limits of a tenant", _set)
    _add_name(change)
    _add_limits(change)
    delete = add_part(parts, "delete", "delete a tenant and its keys; its usage stays", _delete)
    _add_name(delete)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=tenant_name, metavar="NAME")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "limits",
        nargs="*",
        type=_limit,
        metavar="LIMIT=VALUE",
        help=f"one of {', '.join(limit.key for limit in LIMITS)}; none takes it back to its"
        " default; names are separated by commas",
    )


def _limit(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    key = limit_key(name)
    try:
        return key, parse_limit(key, value)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    with desk.store.writing() as connection:
        records.add_tenant(connection, arguments.name, dict(arguments.limits), change_now())
    terminal.note(f"tenant {arguments.name} was added")


def _set(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    with desk.store.writing() as connection:
        records.set_limits(connection, arguments.name, dict(arguments.limits), change_now())
    terminal.note(f"{len(arguments.limits)} limits of tenant {arguments.name} were set")


def _delete(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    with desk.store.writing() as connection:
        n_keys = records.delete_tenant(connection, arguments.name, change_now())
    terminal.note(f"tenant {arguments.name} was deleted, with {n_keys} keys")


def _list(desk: Desk, arguments: argparse.Namespace, terminal: Terminal) -> None:
    with desk.store.reading() as connection:
        found = records.list_tenants(connection)
    if arguments.json:
        rows = [
            {
                "name": tenant.name,
                "created_at": tenant.created_at,
                "keys": tenant.n_keys,
                "limits": dict(tenant.limits),
            }
            for tenant in found
        ]
        terminal.line(json.dumps(rows, indent=2))
        return
    cells: Sequence[Sequence[str]] = [
        (
            tenant.name,
            str(tenant.n_keys),
            as_time(tenant.created_at),
            ", ".join(f"{name}={_shown(value)}" for name, value in sorted(tenant.limits.items()))
            or "–",
        )
        for tenant in found
    ]
    for line in format_table(("name", "keys", "added", "limits"), cells):
        terminal.line(line)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
