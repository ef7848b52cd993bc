"""llama.cpp's RPC server on this machine: a device whose memory the host cannot read."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.built import built
from tests.support.ports import free_port

__all__ = ["RpcServer", "rpc_server"]

_START_S = 60.0


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
def rpc_server(folder: Path, port: int = 0, n_threads: int = 1) -> Iterator[RpcServer]:
    """Yields a server that listens, and ends it.

    Args:
        folder: Where its output is kept.
        port: Where it listens; 0: any free port.
        n_threads: Threads that it computes with.
    """
    port = port or free_port()
    output = folder / f"rpc-{port}.txt"
    command = [
        str(built("ggml-rpc-server")),
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
        "-t",
        str(n_threads),
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        _await(process, port, output)
        yield RpcServer(f"127.0.0.1:{port}", process, output)
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s:
        assert process.poll() is None, output.read_text("utf-8", "replace")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError("the RPC server does not listen")
