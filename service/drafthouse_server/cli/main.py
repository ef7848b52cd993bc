"""The command line: `drafthouse serve | generate | chat | models | tune`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from drafthouse_server.cli.console import add_chat, add_generate, add_models
from drafthouse_server.cli.serve import add_serve
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.cli.tune import add_tune

__all__ = ["main"]

_INTERRUPTED = 130
_BROKEN_PIPE = 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drafthouse",
        description="Serves GGUF models over gRPC, with speculative decoding that pays under load.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("drafthouse-server"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_serve, add_generate, add_chat, add_models, add_tune):
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None, terminal: Terminal | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows the program's name; `sys.argv` when not given.
        terminal: Where the command reads and writes.

    Returns:
        The exit code: 0 done, 1 failed and said why, 2 wrong settings, 70 the server's step loop
        has failed, 130 stopped by Ctrl-C, 141 whoever read the output has left.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ask for help (0).
    """
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed, terminal or Terminal())
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough. Python flushes once more at its exit: to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return code
