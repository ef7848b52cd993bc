"""Devices of llama.cpp's own servers (`ggml-rpc-server`), asked before llama.cpp is.

llama.cpp ends the process where a server cannot be reached, does not answer, or speaks another
version of its protocol, so each is asked here first. What dies later ends the process all the same.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from drafthouse_engine._spec import add_rpc_server, rpc_version
from drafthouse_engine.errors import InvalidArgument, RpcUnreachable, Unsupported

__all__ = ["add_rpc_servers"]

# What the pinned source sends first and awaits: a command, the size of what follows, capabilities
# (none); the size, three numbers of the version, a byte, capabilities.
_HELLO = struct.pack("<BQ24x", 14, 24)
_N_ANSWER = 28
# A connection that is closed so is reset. A server that comes to one that we gave up, and writes
# its answer in two parts, would else be ended by the second (SIGPIPE).
_RESET = struct.pack("ii", 1, 0)
_ANSWER = struct.Struct(f"<Q3B{_N_ANSWER - 3}x")


def add_rpc_servers(endpoints: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
    """Makes the devices of RPC servers devices of this process, until it ends.

    The protocol has neither authentication nor encryption, and a server serves one process at a
    time. When it dies, llama.cpp ends this process (SIGABRT).

    Args:
        endpoints: `host:port` each, with a name or an IPv4 address; none is nothing to do.
        timeout_s: longest time that a server may take to answer.

    Raises:
        InvalidArgument: an endpoint is not of that form.
        RpcUnreachable: no server answers there, or one of another version.
        Unsupported: this build has no RPC backend, or the server has no device.
    """
    if endpoints and rpc_version() is None:
        raise Unsupported("this build has no RPC backend; build with -DDRAFTHOUSE_RPC=ON")
    with contextlib.ExitStack() as open_until_all_answered:
        for endpoint in endpoints:
            open_until_all_answered.enter_context(_ask(endpoint, timeout_s))
    for endpoint in endpoints:
        add_rpc_server(endpoint)


def _ask(endpoint: str, timeout_s: float) -> socket.socket:
    """Returns a connection on which a server of our version has answered.

    While it is open the server answers no other, as llama.cpp would find one that is given twice,
    under two names.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or ":" in host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidArgument(f"the RPC server {endpoint!r} is not of the form host:port")
    ends_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        try:
            connection = socket.create_connection((host, int(port)), timeout_s)
            undo.enter_context(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.sendall(_HELLO)
            answer = _read(connection, _ANSWER.size, ends_s)
        except TimeoutError:
            raise RpcUnreachable(
                f"the RPC server {endpoint} does not answer within {timeout_s:g} s; it serves one"
                " connection at a time: another process may have it, or it is given twice, under"
                " two names"
            ) from None
        except (OSError, UnicodeError) as error:  # a name that no domain name can be
            words = getattr(error, "strerror", None) or error
            raise RpcUnreachable(f"the RPC server {endpoint} cannot be reached: {words}") from None
        _check(endpoint, answer)
        undo.pop_all()
    return connection


def _read(connection: socket.socket, n: int, ends_s: float) -> bytes:
    """Returns n bytes, or fewer where the other side ends."""
    parts = b""
    while len(parts) < n:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(n - len(parts))
        if not part:
            break
        parts += part
    return parts


def _check(endpoint: str, answer: bytes) -> None:
    wanted = rpc_version()
    size, major, minor, _ = _ANSWER.unpack(answer) if len(answer) == _ANSWER.size else (0, 0, 0, 0)
    if size != _N_ANSWER:
        raise RpcUnreachable(f"what answers at {endpoint} is no RPC server of llama.cpp")
    if wanted is None or major != wanted[0] or minor > wanted[1]:
        raise RpcUnreachable(
            f"the RPC server {endpoint} speaks version {major}.{minor} of the protocol; expected"
            f" {wanted}: run the server of the llama.cpp that this was built with"
        )
