"""The command line: `drafthouse serve`, `generate`, `keys`, and the other commands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version

from drafthouse_server.cli.admin import add_drain, add_limits, add_status
from drafthouse_server.cli.console import add_chat, add_generate, add_models
from drafthouse_server.cli.serve import add_doctor, add_serve
from drafthouse_server.cli.settings import add_config, similar_flag
from drafthouse_server.cli.terminal import OutputFailed, Terminal
from drafthouse_server.cli.tune import add_tune
from drafthouse_server.cli.usage import add_usage

__all__ = ["main"]

_INTERRUPTED = 130
_BROKEN_PIPE = 141


_KEYS = "make, list, replace and revoke API keys"
_TENANTS = "add, list, limit and delete tenants"


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drafthouse",
        description="Serves GGUF models over gRPC, with speculative decoding where it pays.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("drafthouse-server"))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_serve, add_generate, add_chat, add_models):
        add(commands)
    _add_store_commands(commands, words)
    add_rest = (add_status, add_limits, add_drain, add_usage, add_doctor, add_tune, add_config)
    for add in add_rest:
        add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_store_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], words: Sequence[str]
) -> None:
    """Adds `keys` and `tenants`: whole where one is used, elsewhere as lines of the help.

    They need SQLAlchemy, which takes a third of a second to import.
    """
    if words[:1] not in (["keys"], ["tenants"]):
        commands.add_parser("keys", help=_KEYS)
        commands.add_parser("tenants", help=_TENANTS)
        return
    from drafthouse_server.cli.keys import add_key_commands  # noqa: PLC0415  # see above
    from drafthouse_server.cli.tenants import add_tenant_commands  # noqa: PLC0415  # see above

    add_key_commands(commands, _KEYS)
    add_tenant_commands(commands, _TENANTS)


def _bench(words: Sequence[str], terminal: Terminal) -> int:
    """Runs the command `bench` of former releases, of which `--tune` still works."""
    if "--tune" in words:
        terminal.warn(
            "`drafthouse bench --tune` is now `drafthouse tune`; the old name works until the next"
            " release"
        )
        return main(["tune", *(word for word in words if word != "--tune")], terminal)
    terminal.error("there is no command 'bench'; the benchmarks are `drafthouse-bench`")
    return 2


def _unknown(words: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Returns what is wrong with words that a command does not take.

    It shows no value: that may be a key.
    """
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    flag = flag if flag.startswith("--") else flag[:2]  # what follows one letter is its value
    advice = f"`{command.prog} --help` lists all flags"
    if not flag:
        return f"an argument belongs to no flag; {advice}"
    known = re.findall(r"--[a-z][a-z-]*", command.format_help())
    similar = similar_flag(flag)
    if similar not in known:
        similar = next(iter(difflib.get_close_matches(flag, known, n=1)), "")
    return f"unknown flag {flag!r}; {f'did you mean {similar!r}?' if similar else advice}"


def _parsed(words: Sequence[str], terminal: Terminal) -> tuple[argparse.Namespace, list[str]]:
    """Returns what words mean, and those that no flag takes.

    Raises:
        SystemExit: they are wrong (code 2), or asked for help, which is written (0).
        OutputFailed: it cannot be written: argparse itself would not say so.
        BrokenPipeError: whoever reads it has left.
    """
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            return _parser(words).parse_known_args(words)
    except SystemExit:
        terminal.write(told.getvalue())
        raise


def main(arguments: Sequence[str] | None = None, terminal: Terminal | None = None) -> int:
    """Runs a command.

    Args:
        arguments: What follows the program's name; `sys.argv` when not given.
        terminal: Where the command reads and writes.

    Returns:
        The exit code: 0 done, 1 failed and said why, 2 wrong settings, 70 the server's step loop
        or usage journal has failed, 130 stopped by Ctrl-C, 141 whoever read the output has left.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ask for help (0).
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    terminal = terminal or Terminal()
    if words[:1] == ["bench"]:
        return _bench(words[1:], terminal)
    try:
        parsed, unknown = _parsed(words, terminal)
        if unknown:
            terminal.error(_unknown(unknown, parsed.parser))
            return 2
        code: int = parsed.run(parsed, terminal)
    except (KeyboardInterrupt, RuntimeError) as error:
        if not _is_interrupted(error):
            raise
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough
        _drop_output()
        return _BROKEN_PIPE
    except OutputFailed as error:
        terminal.error(str(error))
        _drop_output()
        return 1
    return code


def _is_interrupted(error: BaseException | None) -> bool:
    """Returns whether an error is Ctrl-C, or came of it: it may leave a lock half released."""
    if error is None or isinstance(error, KeyboardInterrupt):
        return error is not None
    return _is_interrupted(error.__context__)


def _drop_output() -> None:
    """Lets Python, which writes what is left once more at its exit, write to nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may have no descriptor
        descriptor = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
