"""The command line: `drafthouse-bench matrix | peers | …`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType

import drafthouse
from drafthouse_bench.demos import CHECKOUT
from drafthouse_bench.matrix import add_matrix
from drafthouse_bench.peers.command import add_peers
from drafthouse_bench.process import BenchError
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.errors import ConfigError, StartupError

__all__ = ["main"]

_INTERRUPTED = 130
_BY_SIGNAL = 128

_PROGRAMS = {
    "adaptive-k": "which K is chosen, beside none and every fixed K, on the real engine",
    "aiperf": "aiperf through our gRPC, beside our own load",
    "fair-shares": "two floods of weights 1 and 3, and a flood beside a polite tenant",
    "fresh": "how soon a server that has just started is as quick as one that has run for long",
    "host-cost": "what a step costs Python",
    "kernels": "our kernels of attention on the CPU, beside a build without them",
    "loop-overhead": "what the event loop adds to a step, over an engine that only waits",
    "openmp": "OpenMP beside ggml's own thread pool",
    "quoting": "prompt lookup on texts that repeat what they were given",
    "tenancy-cost": "what keys, limits and usage cost",
    "timeline": "where the time to first token goes, in a server that notes it",
    "tree": "draft trees beside single drafts, as a library",
    "trial": "K as chosen beside no drafts and K = 1, 2, 3",
}
"""Programs with flags of their own, and what they measure."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drafthouse-bench", description="Measures Drafthouse.", allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_matrix(commands)
    add_peers(commands)
    for name, text in _PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _run_program(name: str, arguments: Sequence[str]) -> int:
    """Runs a program of `_PROGRAMS` as `python -m` does."""
    sys.argv = [f"drafthouse-bench {name}", *arguments]
    sys.path.insert(0, str(CHECKOUT))  # host-cost drives the crowd of tests/support
    code: int | None = import_module(f"drafthouse_bench.{name.replace('-', '_')}").main()
    return code or 0


@contextlib.contextmanager
def _ends_what_it_started() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP where it is not ignored (nohup), leave a block as Ctrl-C does.

    So no server of a benchmark outlives it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_BY_SIGNAL + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # no other thread may set a handler
        return
    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None, terminal: Terminal | None = None) -> int:
    """Runs a benchmark.

    Args:
        arguments: What follows the program's name; `sys.argv` when not given.
        terminal: Where the command reads and writes.

    Returns:
        The exit code: 0 done, 1 failed and said why, 2 wrong settings, 130 stopped by Ctrl-C.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ask for help (0); or SIGTERM (143) or
            SIGHUP (129) came.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with _ends_what_it_started():
        return _run(given, terminal or Terminal())


def _run(given: list[str], terminal: Terminal) -> int:
    try:
        if given and given[0] in _PROGRAMS:
            return _run_program(given[0], given[1:])
        parsed = _parser().parse_args(given)
        code: int = parsed.run(parsed, terminal)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ConfigError as error:
        terminal.error(str(error))
        return 2
    except (BenchError, OSError, StartupError, ValueError, drafthouse.DrafthouseError) as error:
        terminal.error(str(error))
        return 1
    return code
