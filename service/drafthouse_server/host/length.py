"""How long requests may be where nobody has set it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import DeviceUse, Needs
from drafthouse_server.host.size import usable_bytes

__all__ = ["N_CTX_SEQ_AUTOMATIC", "Room", "is_ample", "longest_ample"]

N_CTX_SEQ_AUTOMATIC = 4096
"""Tokens of one request where none are set and memory is not ample for more."""

_N_CTX_SEQ_MOST = 1 << 20
_HOST_SHARE = 1 / 4
"""Share of the memory that contexts may take for the sake of length, where others use it, too."""
_DEVICE_SHARE = 1 / 2
"""The same of a GPU's own memory."""
_FREE_SHARE = 3 / 4
"""Share of what is free that a server may take for it."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a device, in bytes."""

    total_bytes: int
    """All of it; 0: it is not told."""
    free_bytes: int
    """What a server may take of it."""
    is_own: bool
    """Whether it is the device's alone, not the host's."""


def longest_ample(n_tokens: int, n_ctx_train: int, suffices: Callable[[int], bool]) -> int:
    """Returns the tokens of one request that memory is ample for.

    Twice as many, time and again, so that a little more or less memory changes nothing.

    Args:
        n_tokens: To begin with; whether memory is ample for them is not asked.
        n_ctx_train: The model's training context, in tokens: no more than these.
        suffices: Tells whether memory is ample for requests of so many tokens.
    """
    n_most = min(n_ctx_train, _N_CTX_SEQ_MOST)
    while n_tokens < n_most and suffices(n_longer := min(2 * n_tokens, n_most)):
        n_tokens = n_longer
    return n_tokens


def is_ample(needs: Needs, memory: HostMemory, rooms: Mapping[str, Room]) -> bool:
    """Returns whether a server is small beside the memory that there is.

    Args:
        needs: What it takes.
        memory: Of the host.
        rooms: Of the devices, by name.
    """
    n_free = usable_bytes(memory) * _FREE_SHARE
    is_small = _contexts_bytes(needs.host) <= memory.most_bytes * _HOST_SHARE
    return (
        is_small
        and needs.start_bytes + needs.host.mapped_bytes <= n_free
        and all(name in rooms and _is_small(use, rooms[name]) for name, use in needs.devices)
    )


def _is_small(use: DeviceUse, room: Room) -> bool:
    share = _DEVICE_SHARE if room.is_own else _HOST_SHARE
    is_small = _contexts_bytes(use) <= room.total_bytes * share
    return is_small and use.total_bytes <= room.free_bytes * _FREE_SHARE


def _contexts_bytes(use: DeviceUse) -> int:
    return use.total_bytes - use.weights_bytes
