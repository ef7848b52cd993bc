"""llama.cpp's RPC server on this machine: a device whose memory the host cannot read."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.built import built
from tests.support.ports import free_port

__all__ = ["RpcServer", "lasting_rpc_server", "rpc_server"]

_START_S = 100.0


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A running server."""

    endpoint: str
    """Its address, host:port."""
    process: subprocess.Popen[bytes]
    """The server."""
    output: Path
    """What it has printed."""

    @property
    def n_accepted(self) -> int:
        """Connections that it has taken."""
        return self.output.read_text("utf-8", "replace").count("Accepted client connection")


@contextmanager
def rpc_server(folder: Path, port: int = 0, rounding: float | None = None) -> Iterator[RpcServer]:
    """Yields a server that listens, and ends it.

    Args:
        folder: Where its output is kept.
        port: Where it listens; 0: any free port.
        rounding: As of `lasting_rpc_server`.
    """
    port = port or free_port()
    output = folder / f"rpc-{port}.txt"
    command = _command(port) if rounding is None else _rounding(port, rounding)
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        _await(process, port, output)
        yield RpcServer(f"127.0.0.1:{port}", process, output)
    finally:
        process.kill()
        process.wait()


def lasting_rpc_server(folder: Path, rounding: float | None = None) -> str:
    """Starts a server that outlives all objects of this process, and ends with it.

    What the interpreter frees last may lie on it, and llama.cpp ends a process whose server died.

    Args:
        folder: Where its output is kept.
        rounding: By how much its numbers depend on the width of a batch; 1: about as on a GPU;
            0: not at all; None: as ours do.

    Returns:
        Its address, host:port.
    """
    port = free_port()
    output = folder / f"rpc-{port}.txt"
    # The other end of its standard input closes when this process is no more, however it ended.
    watch = ["sh", "-c", '"$@" & read _; kill -9 $!', "sh"]
    watch += _command(port) if rounding is None else _rounding(port, rounding)
    theirs, _ = os.pipe()
    os.posix_spawn(
        "/bin/sh",
        watch,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(output), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    os.close(theirs)
    _await(None, port, output)
    return f"127.0.0.1:{port}"


def _command(port: int) -> list[str]:
    where = ["-H", "127.0.0.1", "-p", str(port)]
    return [str(built("ggml-rpc-server")), *where, "-t", "1"]


def _rounding(port: int, scale: float) -> list[str]:
    return [str(built("rounding_server")), str(port), str(scale)]


def _await(process: subprocess.Popen[bytes] | None, port: int, output: Path) -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s:
        assert process is None or process.poll() is None, output.read_text("utf-8", "replace")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError("the RPC server does not listen")
