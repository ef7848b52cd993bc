"""How the commands that talk to a server reach it, and what they say when they cannot."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import drafthouse
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.errors import ConfigError

__all__ = ["NO_PAIR", "add_connection", "connected", "exit_code", "explain", "no_pair", "tell"]

NO_PAIR = "is not the private key of"
"""What the SDK says of two files that do not belong together."""

_DEFAULT_SERVER = "127.0.0.1:50051"
_API_KEY_VARIABLE = "DRAFTHOUSE_API_KEY"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say where the server is, and how to reach it."""
    add = parser.add_argument
    add(
        "--server",
        metavar="HOST:PORT",
        default=_DEFAULT_SERVER,
        help=f"address of the server; default: {_DEFAULT_SERVER}",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="key of the tenant; every user of this machine can see it here, so prefer"
        f" --api-key-file or the variable {_API_KEY_VARIABLE}, which is the default",
    )
    add("--api-key-file", metavar="FILE", help="file that holds the key of the tenant alone")
    add("--tls", action="store_true", help="connect by TLS; the flags of files below imply it")
    add("--ca-file", metavar="FILE", help="authorities of the server's certificate (PEM)")
    add("--cert-file", metavar="FILE", help="certificate to show to the server (PEM)")
    add("--key-file", metavar="FILE", help="private key of --cert-file (PEM)")
    add(
        "--insecure-no-tls",
        action="store_true",
        help="send the key to another machine in plain text, where it can be read on its way",
    )


@contextlib.contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[drafthouse.Client]:
    """Connects for the time of a block.

    Raises:
        ConfigError: a flag is wrong, or a file cannot be read.
        drafthouse.DrafthouseError: no server answers.
    """
    api_key, tls = _api_key(arguments), _tls(arguments)
    try:
        client = drafthouse.Client(
            arguments.server,
            api_key=api_key,
            tls=tls,
            insecure_no_tls=arguments.insecure_no_tls,
            retry=None,  # a person sees at once what is wrong
        )
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}; check path and permissions"
        raise ConfigError("server", arguments.server, problem=problem) from None
    except ValueError as error:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key", "(hidden)", problem=str(error)) from None
        if NO_PAIR in str(error):
            raise no_pair(arguments) from None
        problem = str(error)
        if "in plain text" in problem:
            problem = (
                f"the API key would travel in plain text to {arguments.server!r}, which is not this"
                " machine; give --tls, or --ca-file FILE for an authority of your own;"
                " --insecure-no-tls sends it all the same"
            )
        raise ConfigError("server", arguments.server, problem=problem) from None
    with client:
        client.health()  # connected before a clock runs
        yield client


def no_pair(arguments: argparse.Namespace) -> ConfigError:
    """Returns the error of a certificate that was given with the private key of another."""
    problem = (
        f"--key-file {arguments.key_file} is not the private key of --cert-file"
        f" {arguments.cert_file}; give two files that belong together"
    )
    return ConfigError("key_file", arguments.key_file, problem=problem)


def _tls(arguments: argparse.Namespace) -> bool | drafthouse.Tls:
    files = (arguments.ca_file, arguments.cert_file, arguments.key_file)
    if not any(files):
        return bool(arguments.tls)
    if bool(arguments.cert_file) != bool(arguments.key_file):
        problem = "--cert-file and --key-file belong together: give both, or none"
        raise ConfigError("cert_file", arguments.cert_file, problem=problem)
    return drafthouse.Tls(*files)


def _api_key(arguments: argparse.Namespace) -> str | None:
    if arguments.api_key_file is None:
        key: str | None = arguments.api_key
        return key or os.environ.get(_API_KEY_VARIABLE)

    def refuse(problem: str) -> ConfigError:
        told = f"--api-key-file {arguments.api_key_file} {problem}"
        return ConfigError("api_key_file", arguments.api_key_file, problem=told)

    if arguments.api_key:
        raise refuse("and --api-key are both given; give one of them")
    try:
        key = Path(arguments.api_key_file).read_text("utf-8").strip()
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}; check path and permissions") from None
    except UnicodeDecodeError:
        key = ""
    if not (key.isascii() and key.isprintable()) or not key or " " in key:
        raise refuse("does not hold one key and nothing else")
    return key


def exit_code(error: drafthouse.DrafthouseError) -> int:
    """Returns the exit code of a failed call: 2 where a value could not be sent, else 1."""
    return 2 if isinstance(error, drafthouse.InvalidField) and not error.request_id else 1


def tell(
    error: drafthouse.DrafthouseError | ConfigError,
    arguments: argparse.Namespace,
    terminal: Terminal,
) -> int:
    """Tells why a command failed in one sentence; returns its exit code."""
    if isinstance(error, ConfigError):
        terminal.error(str(error))
        return 2
    terminal.error(explain(error, arguments))
    return exit_code(error)


def explain(error: drafthouse.DrafthouseError, arguments: argparse.Namespace) -> str:
    """Returns one sentence for a failed call."""
    if isinstance(error, drafthouse.Unavailable) and not error.reason:
        return _unavailable(arguments)
    if isinstance(error, drafthouse.Unauthenticated):
        return f"{error.message}; give one with --api-key-file or {_API_KEY_VARIABLE}"
    if error.code.name == "UNIMPLEMENTED":
        return (
            f"what answers at {arguments.server} is no Drafthouse for clients ({error.message});"
            " name host and port of the server with --server, not those of its AdminService"
        )
    if error.retry_after is not None:
        return f"{error.message}; try again in {_duration(error.retry_after)}"
    return error.message


def _duration(seconds: float) -> str:
    """Returns a time for people, rounded up."""
    for unit, length_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds > 2 * length_s:
            return f"{math.ceil(seconds / length_s)} {unit}"
    return f"{max(1, math.ceil(seconds))} s"


def _unavailable(arguments: argparse.Namespace) -> str:
    """Returns what may be wrong; of a server that is away and one that hangs up the code is one."""
    server = arguments.server
    if not _tls(arguments):
        return (
            f"no server at {server}; start one with `drafthouse serve`, or, if one there speaks"
            " TLS, give --tls, or --ca-file FILE for an authority of your own"
        )
    told = f"no server at {server} that speaks TLS with a certificate of this name from a known"
    if arguments.cert_file:
        return (
            f"{told} authority and takes the certificate of --cert-file; --ca-file FILE names an"
            " authority of your own"
        )
    return (
        f"{told} authority; --ca-file FILE names an authority of your own, and where the server"
        " asks clients for a certificate, --cert-file and --key-file show one"
    )
