"""The command `usage`: what was billed, from a store or a usage journal; no server is needed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from drafthouse_server.cli import settings
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, StoreError
from drafthouse_server.usage.record import UsageQuery, UsageRecord, UsageStoreFailed, cursor_of
from drafthouse_server.usage.stores import list_all

__all__ = ["add_usage"]

_COUNTS = ("n_prompt", "n_reused", "n_output", "n_drafted", "n_accepted", "n_rejected")
_TITLES = ("prompt", "reused", "output", "drafted", "accepted", "rejected")
_GROUPS = ("tenant", "key_id", "model")


def add_usage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `usage`."""
    parser = commands.add_parser(
        "usage",
        help="list what tenants have used",
        description="Adds up usage records, by tenant, key and model: those of the store, and those"
        " in the folder of a server's journal. It reads both itself, so that no server has to run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--usage-journal",
        metavar="FOLDER",
        help="folder of the journal; default: the setting usage_journal",
    )
    add("--store", metavar="URL", help="the store; default: the setting store")
    add("--config", metavar="FILE", help="TOML file with settings")
    add("--tenant", metavar="NAME", help="of one tenant")
    add("--key", dest="key_id", metavar="ID", help="of one API key")
    add("--model", metavar="NAME", help="of one model")
    add("--since", type=_time, metavar="TIME", help="ended at this time or later, as 2026-11-22")
    add("--until", type=_time, metavar="TIME", help="ended before, as 2026-11-22T09:30; UTC")
    add("--records", action="store_true", help="list single records instead of sums")
    add("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=_usage)


def _time(text: str) -> float:
    """Returns seconds since 1970; what names no zone is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; expected one such as 2026-11-22, or 2026-11-22T09:30"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _usage(arguments: argparse.Namespace, terminal: Terminal) -> int:
    given = {"usage_journal": arguments.usage_journal, "store": arguments.store}
    flags = {name: value for name, value in given.items() if value}
    try:
        config = settings.load(arguments.config, flags=flags, warn=terminal.warn)
    except ConfigError as error:
        terminal.error(str(error))
        return 2
    if not config.usage_journal and not config.store:
        terminal.error(
            "there is neither a usage journal nor a store; name one with --usage-journal or --store"
        )
        return 2
    if config.usage_journal and not os.path.isdir(config.usage_journal):  # never raises
        terminal.error(f"there is no folder {config.usage_journal!r}; a server makes it")
        return 1
    query = UsageQuery(
        tenant=arguments.tenant,
        key_id=arguments.key_id,
        model=arguments.model,
        since=arguments.since,
        until=arguments.until,
    )
    try:
        found = _find_records(config, query)
    except (UsageStoreFailed, StoreError) as error:
        terminal.error(f"usage cannot be read: {error}")
        return 1
    except ConfigError as error:
        terminal.error(str(error))
        return 2
    show = _show_records if arguments.records else _show_sums
    show(found, terminal, is_json=arguments.json)
    return 0


def _find_records(config: Config, query: UsageQuery) -> Sequence[UsageRecord]:
    """Returns the records of journal and store; what is in both counts once."""
    folder = config.usage_journal
    records = {r.record_id: r for r in list_all(Path(folder), query)} if folder else {}
    if config.store:
        # After the journal: what moved from there to here in between is in both.
        from drafthouse_server.tenancy.store import StoreUsage  # noqa: PLC0415  # 0.3 s to import

        opened = StoreUsage.open(config.store, may_make=False)
        with contextlib.closing(opened) as store:
            records.update((record.record_id, record) for record in store.find(query))
    return sorted(records.values(), key=cursor_of)


def _show_records(records: Sequence[UsageRecord], terminal: Terminal, *, is_json: bool) -> None:
    if is_json:
        for record in records:
            values = dataclasses.asdict(record) | {"n_rejected": record.n_rejected}
            terminal.line(json.dumps(values))
        return
    header = ("ended (UTC)", "tenant", "key", "model", *_TITLES, "outcome", "record")
    rows = [
        (
            datetime.fromtimestamp(record.ended_at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            *(record.tenant, record.key_id or "–", record.model),
            *(str(getattr(record, name)) for name in _COUNTS),
            *(record.outcome, record.record_id),
        )
        for record in records
    ]
    _show(header, rows, terminal)


def _show_sums(records: Sequence[UsageRecord], terminal: Terminal, *, is_json: bool) -> None:
    sums: dict[tuple[str, ...], list[int]] = {}
    for record in records:
        group = tuple(str(getattr(record, name)) for name in _GROUPS)
        counts = (1, *(getattr(record, name) for name in _COUNTS))
        known = sums.setdefault(group, [0] * len(counts))
        sums[group] = [a + b for a, b in zip(known, counts, strict=True)]
    if is_json:
        for group, known in sorted(sums.items()):
            names = (*_GROUPS, "n_streams", *_COUNTS)
            terminal.line(json.dumps(dict(zip(names, (*group, *known), strict=True))))
        return
    header = ("tenant", "key", "model", "streams", *_TITLES)
    rows = [
        (tenant, key or "–", model, *map(str, known))
        for (tenant, key, model), known in sorted(sums.items())
    ]
    _show(header, rows, terminal)


def _show(header: Sequence[str], rows: Sequence[Sequence[str]], terminal: Terminal) -> None:
    if not rows:
        terminal.note("no usage")
        return
    lines: Iterable[str] = format_table(header, rows)
    for line in lines:
        terminal.line(line)
