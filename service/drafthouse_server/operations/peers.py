"""Which user of this machine is at the other end of a connection over loopback.

Linux tells the owner of each TCP socket in /proc/net/tcp and tcp6. The other end of a connection is
the entry whose own address is the one that we see as the peer's.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

__all__ = ["uid_of_peer"]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _UID = 1, 2, 7
"""Columns of the tables."""


def uid_of_peer(peer: str, port: int) -> int | None:
    """Returns the id of the user who has opened a connection to a port of ours.

    Args:
        peer: The other end, as gRPC names it: "ipv4:127.0.0.1:40000", "ipv6:%5B::1%5D:40000".
        port: Where we listen.

    Returns:
        The user's id; None where the system does not tell, as of a socket in the file system or of
        a connection from another machine.
    """
    scheme, _, place = unquote(peer).partition(":")
    host, _, number = place.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not number.isdigit():
        return None
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    wanted = {f"{text}:{int(number):04X}" for text in _spellings(address)}
    for table in _TABLES:
        try:
            lines = table.read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            cells = line.split()
            if cells[_LOCAL] in wanted and cells[_REMOTE].endswith(f":{port:04X}"):
                return int(cells[_UID])
    return None


def _spellings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> Iterator[str]:
    """Yields how the tables write an address: each 32 bits in the byte order of this machine."""
    if isinstance(address, ipaddress.IPv6Address):
        yield _hexadecimal(address.packed)
        mapped = address.ipv4_mapped
        if mapped is not None:
            yield _hexadecimal(mapped.packed)
    else:
        yield _hexadecimal(address.packed)
        yield _hexadecimal(ipaddress.IPv6Address(f"::ffff:{address}").packed)


def _hexadecimal(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{struct.unpack('=I', word)[0]:08X}" for word in words)
