"""`drafthouse serve`: from flags to a server that listens; `doctor`: or to what is in its way."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from importlib.metadata import version
from pathlib import Path

from drafthouse_server.cli import CHECKOUT, settings
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.loading import engine_version
from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import ConfigError, EngineLost, ServerFailed, StartupError
from drafthouse_server.host.address import try_address
from drafthouse_server.host.amounts import format_bytes, format_count
from drafthouse_server.operations.threads import N_SERVER, require_threads
from drafthouse_server.rpc.server import Server
from drafthouse_server.tenancy.backends import check_backends

__all__ = ["FAILED", "LISTENS_AT", "LOST", "add_doctor", "add_serve", "end_threads"]

_log = logging.getLogger(__name__)

LISTENS_AT = "listening at "
"""How the line starts that tells the address, "host:port", when the server takes calls."""

FAILED = 70
"""Exit code of a server whose step loop or usage journal has failed: EX_SOFTWARE of sysexits.h."""

LOST = 71
"""Exit code of a server whose engine does not work any more: EX_OSERR of sysexits.h."""

_LEAVE_S = 5.0
"""Seconds that threads have to end when the server has: they may wait for a disk that hangs."""

_EXIT_CODES = (
    "exit codes: 0 ended by SIGTERM or SIGINT; 1 cannot start, and says why; 2 a setting is wrong;"
    f" {FAILED} the step loop or the usage journal has failed: start it again;"
    f" {LOST} the engine has not worked for unhealthy_exit_s, or no text worker could be started:"
    " start it again"
)

_SWITCH_INTERVAL_S = 1e-4
"""How long the event loop may keep the interpreter from the engine thread, which waits for it
before and after each step. Python's 5 ms are the length of ten steps of a small model."""


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `serve`."""
    parser = commands.add_parser(
        "serve",
        help="serve a model; without flags, the demo model",
        description="Serves a GGUF model over gRPC. Flags win over DRAFTHOUSE_* variables, these"
        " over the file of --config.",
        usage="drafthouse serve [--config FILE] [--SETTING VALUE ...]",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings; `drafthouse config --example` prints one",
    )
    settings.add_flags(parser)
    parser.set_defaults(run=_serve)


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="tell what this machine can serve, and what is wrong with it or the settings",
        description="Tells how the server was built, what the machine has, what a model needs and"
        " what fits, and checks settings, address, certificates, store, Redis, RPC servers and disk"
        " as `drafthouse serve` with these flags would find them. Nothing is loaded, made or"
        " changed.",
        usage="drafthouse doctor [MODEL] [--json] [--config FILE] [--SETTING VALUE ...]",
        epilog="exit codes: 0 nothing stands in the way of a server; 1 something does; 2 a setting"
        " is wrong",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model_path", metavar="MODEL", nargs="?", help="the model, in place of --model"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings, as of serve")
    settings.add_flags(parser)
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace, terminal: Terminal) -> int:
    from drafthouse_server.doctor.examine import examine  # noqa: PLC0415  # of use here alone
    from drafthouse_server.doctor.report import Problem  # noqa: PLC0415  # only `doctor` needs it

    flags = settings.external_flags(arguments)
    if arguments.model_path is not None:
        flags["model"] = arguments.model_path
    problems: list[Problem] = []
    config, code = None, 0
    try:
        config = _with_demo_model(
            settings.load(
                arguments.config,
                flags=flags,
                warn=lambda line: problems.append(Problem("settings", line, "warning")),
            )
        )
        check_backends(config)
    except ConfigError as error:
        code = 2
        if config is None:  # else the checks of tenants, store and Redis tell
            problems.append(Problem("settings", str(error)))
    report = examine(config, problems)
    if arguments.json:
        terminal.line(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        for line in report.lines():
            terminal.line(line)
    return code or (0 if report.is_well else 1)


def _serve(arguments: argparse.Namespace, terminal: Terminal) -> int:
    with terminal.queued():
        flags = settings.external_flags(arguments)
        try:
            config = settings.load(arguments.config, flags=flags, warn=terminal.warn)
            check_backends(config)
        except ConfigError as error:
            terminal.error(str(error))
            return 2
        with terminal.logging(config.log_level):
            return _serve_with(config, terminal)


def _serve_with(config: Config, terminal: Terminal) -> int:
    """Serves, and returns the exit code, or ends the process though some of its threads do not."""
    before, runner = frozenset(threading.enumerate()), asyncio.Runner()

    def leave(why: str) -> None:
        if why:
            _log.critical("%s: ending without it", why)
        terminal.end_queues()
        os._exit(code)

    with contextlib.ExitStack() as undo:
        undo.callback(runner.close)
        code = _run_to_end(runner, config, terminal)
        undo.pop_all()
    if code == LOST:
        leave("")  # its thread may hang in a step for ever, and Python would wait for it
    end_threads(runner, before, leave)
    return code


def end_threads(
    runner: asyncio.Runner,
    before: AbstractSet[threading.Thread],
    leave: Callable[[str], object],
    timeout_s: float = _LEAVE_S,
) -> None:
    """Waits for the tasks and threads of a server that has ended, as Python does, but not longer.

    Args:
        runner: Of its event loop; it is closed.
        before: Threads that are not the server's.
        leave: Called with what waits still, where something does.
        timeout_s: Seconds that they have.
    """
    give_up_at, is_closed = time.monotonic() + timeout_s, threading.Event()
    loop = runner.get_loop()

    def theirs() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if not (t.daemon or t in before or t is timer)]

    def tell() -> None:
        # While tasks are left, the loop's threads may be there with nothing to do.
        is_open = not is_closed.is_set()
        has_tasks = is_open and any(task.cancelling() for task in asyncio.all_tasks(loop))
        names = "" if has_tasks else ", ".join(sorted(thread.name for thread in theirs()))
        if names:
            leave(f"a disk, or a store, has not answered for {timeout_s:g} s ({names})")
        elif is_open:
            leave(f"a task of the event loop has not ended within {timeout_s:g} s")

    timer = threading.Timer(timeout_s, tell)
    timer.daemon = True
    timer.start()
    runner.close()
    is_closed.set()
    for thread in theirs():
        thread.join(max(0.0, give_up_at - time.monotonic()))
    timer.cancel()
    tell()


def _run_to_end(runner: asyncio.Runner, config: Config, terminal: Terminal) -> int:
    """Serves, and returns the exit code. What is wrong is the last line, behind the log's."""
    try:
        runner.run(_run(_with_demo_model(config), terminal))
    except (StartupError, EngineLost, ServerFailed) as error:
        terminal.error(str(error))
        if isinstance(error, EngineLost):
            return LOST
        return FAILED if isinstance(error, ServerFailed) else 1
    return 0


def _with_demo_model(config: Config) -> Config:
    """Returns the settings with the demo model's path, wherever the command was started."""
    demo = CHECKOUT / config.model
    if config.model == Config().model and not Path(config.model).exists() and demo.exists():
        return dataclasses.replace(config, model=str(demo))
    return config


async def _run(config: Config, terminal: Terminal) -> None:
    require_threads(N_SERVER)
    try_address(config.host, config.port)
    if config.has_admin:
        try_address(config.admin_host, config.admin_port, "admin-")
    if config.metrics_port:
        try_address(config.metrics_host, config.metrics_port, "metrics-")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.ExitStack() as loading:
        progress = loading.enter_context(terminal.loading())
        # Until the server serves, and drains: by default nothing ends the first process of a
        # container.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(
                number, _end_early, number, loading, terminal
            )

        def announce(server: Server) -> None:
            loading.close()
            # What is here stays: no reason to look through it again and again while all wait.
            gc.freeze()
            _describe(server, config, terminal)

        await Server(config, lambda: LlamaEngine.load(config, progress)).serve(announce)


def _end_early(number: signal.Signals, loading: contextlib.ExitStack, terminal: Terminal) -> None:
    """Ends a server that serves nobody yet, whatever its engine thread loads."""
    loading.close()
    terminal.note(f"{number.name}: ending before the model is loaded")
    terminal.end_queues()
    os._exit(0)


def _describe(server: Server, config: Config, terminal: Terminal) -> None:
    """Tells what is served, and where."""
    card, limits = server.loop.engine.card, server.loop.engine.limits
    drafts = (
        f"{'prompt lookup, else ' if config.prompt_lookup else ''}{limits.draft_type},"
        f" {_how_many(config)},"
        f" at most {limits.n_draft_max}"
        if limits.n_draft_max
        else "none"
    )
    terminal.line(
        f"drafthouse {version('drafthouse-server')}, {engine_version().partition(';')[0]}"
    )
    terminal.line(
        f"  model    {card.name}: {card.architecture}, {format_count(card.n_params)} parameters,"
        f" {format_bytes(card.size_bytes)}"
    )
    terminal.line(
        f"  draft    {drafts}" + (f" ({config.model_draft})" if config.model_draft else "")
    )
    terminal.line(
        f"  slots    {limits.n_seq_max} of {limits.n_ctx_seq} tokens,"
        f" {limits.n_ctx} KV cells together"
    )
    terminal.line(f"  threads  {_how_many_threads(server.loop.engine.threads)}")
    _describe_access(config, terminal)
    terminal.line(f"{LISTENS_AT}{server.target}")


def _describe_access(config: Config, terminal: Terminal) -> None:
    """Tells how clients' identity and texts are kept; what is missing is a warning, too."""
    if config.is_open:
        terminal.line("  keys     none: OPEN to everybody who reaches this port (insecure_no_auth)")
        terminal.warn("insecure_no_auth: everybody who reaches this port may use the server")
    if config.is_plain:
        terminal.line("  tls      none: keys and texts travel in PLAIN TEXT (insecure_no_tls)")
        terminal.warn("insecure_no_tls: keys and texts can be read on their way to this port")
    if config.ssl_cert_file:
        clients = "; clients need one, too" if config.ssl_client_ca_file else ""
        terminal.line(f"  tls      certificate {config.ssl_cert_file}{clients}")


def _how_many_threads(threads: Threads) -> str:
    wide = f", {threads.n_batch} for {threads.n_wide} tokens and more"
    return f"{threads.n}{wide if threads.n_batch != threads.n else ''} ({threads.reason})"


def _how_many(config: Config) -> str:
    if config.draft_policy == "fixed":
        return f"{config.draft_default} tokens per step by default"
    return "as many tokens per step as pay"
