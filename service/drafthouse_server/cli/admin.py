"""`drafthouse status`, `limits` and `drain`: what operators ask of a server's AdminService."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

import drafthouse
from drafthouse_server.administration import ADMIN_PORT
from drafthouse_server.cli import settings
from drafthouse_server.cli.connection import NO_PAIR, exit_code, no_pair
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy.tenants import LIMITS

__all__ = ["FIELDS_OF_LIMITS", "add_drain", "add_limits", "add_status", "limit_key"]

NOT_SERVING = 3
"""Exit code of `status` where the server answers and takes no requests, or cannot record them."""

_Commands = argparse._SubParsersAction  # argparse has no public name for it
_Work = Callable[[drafthouse.AdminClient, argparse.Namespace, Terminal], int]
_POLL_S = 0.5
_INTERVAL_S_MIN = 0.1
_NO_METHOD = "Method not found!"
"""What a server of gRPC says of a method that it does not have."""
_OTHER_FIELDS = {
    "requests_per_s": "requests_per_second",
    "input_tokens_per_min": "input_tokens_per_minute",
    "output_tokens_per_min": "output_tokens_per_minute",
    "draft_max": "max_draft_tokens",
    "end_user_requests_per_s": "end_user_requests_per_second",
}
FIELDS_OF_LIMITS = {limit.key: _OTHER_FIELDS.get(limit.key, limit.key) for limit in LIMITS}
"""Fields of the protos' TenantLimits by the name of the limit in settings, which is the one that
commands show; they take both."""
_KEYS = {field: key for key, field in FIELDS_OF_LIMITS.items()}
_KINDS = {limit.key: limit.kind for limit in LIMITS}


def add_status(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `status`."""
    parser = _command(
        commands,
        "status",
        "show how a server does",
        _status,
        f"exit codes: 0 it takes requests; 1 no AdminService answers; 2 a flag is wrong;"
        f" {NOT_SERVING} it drains, its engine keeps failing, or it cannot write its usage journal",
    )
    parser.add_argument("--tenants", action="store_true", help="show the tenants' load instead")
    parser.add_argument(
        "--watch",
        type=_interval,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="show it again every so often, until Ctrl-C; default: 2",
    )


def add_limits(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `limits`."""
    parser = _command(
        commands,
        "limits",
        "show or set the limits of tenants",
        _limits,
        "Without a tenant: the limits in force of those that have called of late. With one: those"
        " that the server's store has, after they were set.",
    )
    parser.add_argument("tenant", nargs="?", metavar="TENANT")
    parser.add_argument(
        "values",
        nargs="*",
        type=_limit,
        metavar="LIMIT=VALUE",
        help=f"one of {', '.join(FIELDS_OF_LIMITS)}; none takes it back to its default; names of"
        " models are separated by commas",
    )


def add_drain(commands: _Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `drain`."""
    parser = _command(
        commands,
        "drain",
        "end a server when its running requests have ended",
        _drain,
        "As SIGTERM: new requests are refused at once. Done again, it shortens the time.",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long running requests may go on; default: the setting drain_timeout_s",
    )
    parser.add_argument("--wait", action="store_true", help="return when the server has ended")


def _command(
    commands: _Commands[argparse.ArgumentParser], name: str, about: str, work: _Work, epilog: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}, by its AdminService (--admin-port of the"
        " server).",
        epilog=epilog,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--server",
        metavar="HOST:PORT",
        help="address of AdminService; default: admin_host and admin_port of the settings, or"
        f" 127.0.0.1:{ADMIN_PORT}",
    )
    add("--config", metavar="FILE", help="the server's TOML file, which may say the address")
    add("--ca-file", metavar="FILE", help="authorities of the server's certificate (PEM)")
    add("--cert-file", metavar="FILE", help="certificate of an administrator (PEM)")
    add("--key-file", metavar="FILE", help="private key of --cert-file (PEM)")
    add("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_run(work))
    return parser


def _run(work: _Work) -> Callable[[argparse.Namespace, Terminal], int]:
    """Returns a command that connects, works, and says in one sentence what went wrong."""

    def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
        try:
            target = _target(arguments, terminal)
            client = _connected(arguments, target)
        except ConfigError as error:
            terminal.error(str(error))
            return 2
        with client:
            try:
                return work(client, arguments, terminal)
            except drafthouse.DrafthouseError as error:
                terminal.error(_explain(error, target, has_tls=bool(_files(arguments))))
                return exit_code(error)
            except ValueError as error:  # it cannot be sent
                terminal.error(str(error))
                return 2

    return run


def _target(arguments: argparse.Namespace, terminal: Terminal) -> str:
    """Returns the address of AdminService.

    Raises:
        ConfigError: the settings are wrong.
    """
    if arguments.server is not None:
        return str(arguments.server)
    config = settings.load(arguments.config, flags={}, warn=terminal.warn)
    if config.admin_host.startswith("unix:"):
        return config.admin_host
    host = config.admin_host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{config.admin_port or ADMIN_PORT}"


def _connected(arguments: argparse.Namespace, target: str) -> drafthouse.AdminClient:
    files = _files(arguments)
    try:
        return drafthouse.AdminClient(target, tls=drafthouse.Tls(**files) if files else False)
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}; check path and permissions"
        raise ConfigError("server", target, problem=problem) from None
    except ValueError as error:
        if NO_PAIR in str(error):
            raise no_pair(arguments) from None
        problem = str(error)
        if "takes TLS alone" in problem:
            problem = (
                f"{target!r} is not this machine, and AdminService takes TLS alone there; give"
                " --ca-file, --cert-file and --key-file"
            )
        raise ConfigError("server", target, problem=problem) from None


def _files(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the files of TLS that flags name; without any the connection is plain text."""
    names = ("ca_file", "cert_file", "key_file")
    return {name: path for name in names if (path := getattr(arguments, name))}


def _explain(error: drafthouse.DrafthouseError, target: str, *, has_tls: bool) -> str:
    if isinstance(error, drafthouse.Unavailable) and not error.reason:
        if has_tls:
            return (
                f"no AdminService at {target} that speaks TLS with a certificate of this name from"
                " an authority of --ca-file and takes the certificate of --cert-file, which one of"
                " its admin_client_ca_file must have signed"
            )
        return (
            f"no AdminService at {target}; start the server with --admin-port {ADMIN_PORT}, name"
            " another address with --server, or, if it takes TLS, give --ca-file, and the"
            " certificate of an administrator with --cert-file and --key-file"
        )
    if error.code.name == "UNIMPLEMENTED" and error.message == _NO_METHOD:
        return (
            f"what answers at {target} is no AdminService, or one of another version; name"
            " admin_host and admin_port of the server with --server"
        )
    return error.message


# --- status


def _status(
    client: drafthouse.AdminClient, arguments: argparse.Namespace, terminal: Terminal
) -> int:
    show = _show_tenants if arguments.tenants else _show_status
    if arguments.watch is None:
        return show(client, arguments, terminal)
    while True:
        if terminal.is_interactive and not arguments.json:
            terminal.clear()
        show(client, arguments, terminal)
        time.sleep(arguments.watch)


def _show_status(
    client: drafthouse.AdminClient, arguments: argparse.Namespace, terminal: Terminal
) -> int:
    status = client.status()
    load = status.load
    if arguments.json:
        terminal.line(json.dumps(dataclasses.asdict(status), default=_as_json))
    else:
        cache = status.prefix_cache
        share = cache.reused_tokens / cache.lookup_tokens if cache.lookup_tokens else 0.0
        rows = [
            ("state", str(load.state)),
            ("version", status.version),
            ("model", status.model),
            ("uptime", str(timedelta(seconds=round(status.uptime.total_seconds())))),
            ("running", f"{load.running_requests} of {status.slots} slots"),
            ("waiting", f"{load.waiting_requests} requests"),
            ("to prefill", f"{load.prefill_backlog_tokens} tokens"),
            ("speed", f"{status.tokens_per_second:.1f} tokens/s"),
            ("drafts", f"{status.draft_tokens_per_step:.2f} tokens a step (K)"),
            ("accepted", f"{status.acceptance_rate:.0%} of draft tokens"),
            ("KV cells", f"{load.free_kv_cells} of {status.kv_cells} free"),
            ("prefixes", f"{share:.0%} of prompt tokens reused, {cache.host_bytes} bytes"),
            ("store", str(status.store)),
        ]
        if status.usage_journal_failing:
            rows.append(("usage", "the journal cannot be written"))
        for line in format_table(("what", "now"), rows):
            terminal.line(line)
    is_well = load.state is drafthouse.ServerState.SERVING and not status.usage_journal_failing
    return 0 if is_well else NOT_SERVING


def _show_tenants(
    client: drafthouse.AdminClient, arguments: argparse.Namespace, terminal: Terminal
) -> int:
    tenants = client.tenants()
    if arguments.json:
        rows_of = [
            dataclasses.asdict(tenant) | {"limits": _by_key(tenant.limits)} for tenant in tenants
        ]
        terminal.line(json.dumps(rows_of))
        return 0
    header = ("tenant", "running", "waiting", "calls", "prompt", "output", "service", "weight")
    rows = [
        (
            tenant.tenant,
            *map(str, (tenant.running_requests, tenant.waiting_requests, tenant.open_calls)),
            *map(str, (tenant.prompt_tokens, tenant.output_tokens)),
            "–" if tenant.virtual_counter is None else f"{tenant.virtual_counter:.0f}",
            f"{tenant.limits.get('weight', 1.0):g}",
        )
        for tenant in tenants
    ]
    for line in format_table(header, rows):
        terminal.line(line)
    return 0


def _as_json(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    assert isinstance(value, datetime)
    return value.isoformat()


# --- limits


def limit_key(name: str) -> str:
    """Returns the name in settings of a limit that is named so or as a field of TenantLimits."""
    return _KEYS.get(name, name)


def _limit(text: str) -> tuple[str, drafthouse.Limit | None]:
    """Returns a field of TenantLimits and its value."""
    name, _, value = text.partition("=")
    key = limit_key(name)
    if key not in FIELDS_OF_LIMITS:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no limit; expected LIMIT=VALUE, with one of {', '.join(FIELDS_OF_LIMITS)}"
        )
    field, kind = FIELDS_OF_LIMITS[key], _KINDS[key]
    if value.lower() == "none":
        return field, None
    if kind is list:
        return field, tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        return field, kind(value)
    except ValueError:
        expected = "a number" if kind is float else "a whole number"
        problem = f"{name} is {value!r}; expected {expected}, or none"
        raise argparse.ArgumentTypeError(problem) from None


def _limits(
    client: drafthouse.AdminClient, arguments: argparse.Namespace, terminal: Terminal
) -> int:
    if arguments.tenant is None:
        found = {tenant.tenant: tenant.limits for tenant in client.tenants()}
    elif arguments.values:
        values = dict(arguments.values)
        limits = {name: value for name, value in values.items() if value is not None}
        reset = values.keys() - limits.keys()
        found = {arguments.tenant: client.set_limits(arguments.tenant, limits, reset=reset)}
    else:
        found = {arguments.tenant: client.limits(arguments.tenant)}
    shown = {tenant: _by_key(limits) for tenant, limits in found.items()}
    if arguments.json:
        terminal.line(json.dumps(shown))
        return 0
    rows = [(tenant, _listed(limits)) for tenant, limits in shown.items()]
    for line in format_table(("tenant", "limits"), rows):
        terminal.line(line)
    return 0


def _by_key(limits: Mapping[str, drafthouse.Limit]) -> Mapping[str, drafthouse.Limit]:
    return {limit_key(field): value for field, value in limits.items()}


def _listed(limits: Mapping[str, drafthouse.Limit]) -> str:
    shown = (
        f"{name}={','.join(value) if isinstance(value, tuple) else format(value, 'g')}"
        if not isinstance(value, int)
        else f"{name}={value}"
        for name, value in limits.items()
    )
    return " ".join(shown) or "–"


# --- drain


def _drain(
    client: drafthouse.AdminClient, arguments: argparse.Namespace, terminal: Terminal
) -> int:
    load = client.drain(arguments.timeout)
    if arguments.json:
        terminal.line(json.dumps(dataclasses.asdict(load)))
    else:
        terminal.note(
            f"the server drains: {load.running_requests} requests run, {load.waiting_requests} wait"
        )
    if arguments.wait:
        with contextlib.suppress(drafthouse.Unavailable, drafthouse.Cancelled):
            for load in client.watch_load(_POLL_S):
                terminal.note(f"{load.running_requests} run, {load.waiting_requests} wait")
        terminal.note("the server has ended")
    return 0


def _interval(text: str) -> float:
    seconds = _seconds(text)
    if seconds < _INTERVAL_S_MIN:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too often; expected seconds in [{_INTERVAL_S_MIN}, 86400]"
        )
    return seconds


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; expected seconds in [0, 86400]")
    return seconds
