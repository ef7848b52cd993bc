"""Whether a server may listen at an address."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from drafthouse_server.access import bare_host
from drafthouse_server.errors import StartupError

__all__ = ["try_address"]

_PROBE_S = 1.0
"""How long a socket may take to answer whether somebody listens at it."""


def try_address(host: str, port: int, prefix: str = "") -> None:
    """Finds out whether we may listen there before a large model is loaded for nothing.

    Args:
        host: Address to listen at, or unix:PATH.
        port: Port; 0 is any that is free.
        prefix: Of the names of the flags that say so, such as "admin-".

    Raises:
        StartupError: we may not, or somebody else does.
    """
    is_unix = host.startswith("unix:")
    try:
        if is_unix:
            _try_socket(Path(host.removeprefix("unix:")))
        else:
            _try_port(bare_host(host), port)
    except (OSError, UnicodeError) as error:  # the latter of what may be no name at all
        flag = f"--{prefix}host"
        place, flags = (host, flag) if is_unix else (f"{host}:{port}", f"--{prefix}port or {flag}")
        raise StartupError(
            f"cannot listen at {place}: {(getattr(error, 'strerror', '') or str(error)).lower()};"
            f" choose another {flags}, or stop what listens there"
        ) from error


def _try_port(host: str, port: int) -> None:
    """Raises OSError where we may not listen, or somebody else does."""
    places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in places[:1]:
        with socket.socket(family, kind, protocol) as probe:
            # As grpc does: what an ended server leaves behind does not hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Without it two sockets that both allow reuse may bind, and only listening fails.
            probe.listen(1)


def _try_socket(path: Path) -> None:
    """Raises OSError where we may not listen, or somebody else does.

    grpc takes the place of any socket, so that a server that is running would lose its own.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        if path.is_socket():
            probe.settimeout(_PROBE_S)
            code = probe.connect_ex(str(path))
            if code != errno.ECONNREFUSED:  # as what an ended server leaves behind does
                code = code or errno.EADDRINUSE
                raise OSError(code, os.strerror(code))
        else:
            probe.bind(str(path))
            path.unlink()
