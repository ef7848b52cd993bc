"""Ports for servers that tests start in processes of their own, and that must know them before."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port", "free_ports"]

_LEAST, _MOST = 12_000, 32_000
"""Below those that Linux gives to outgoing connections (from 32,768): a port that is free now is
not taken by another test's client before its server listens."""


def free_port() -> int:
    """Returns a port of loopback that is free now.

    Raises:
        OSError: a hundred that were tried are taken.
    """
    chance = random.SystemRandom()  # processes that start alike must not try alike
    for _ in range(100):
        port = chance.randrange(_LEAST, _MOST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"of a hundred ports in [{_LEAST}, {_MOST}) none is free")


def free_ports(n: int) -> list[int]:
    """Returns so many different ports of loopback that are free now."""
    ports: set[int] = set()
    while len(ports) < n:
        ports.add(free_port())
    return list(ports)
