"""The digest of a snapshot, computed a second time: tests that forge one set it right again."""

from __future__ import annotations

import struct

MASK = 2**64 - 1
N_LANES = 8
"""How many words the digest mixes side by side."""


def digest(source: bytes) -> int:
    """The digest of `cext/spec/error.cpp`."""

    def mix(x: int) -> int:
        x = (x ^ x >> 32) * 0x9E3779B97F4A7C15 & MASK
        x = (x ^ x >> 29) * 0xD6E8FEB86659FD93 & MASK
        return x ^ x >> 32

    h = mix(len(source))
    n_words = len(source) // 8
    words = struct.unpack(f"<{n_words}Q", source[: 8 * n_words])
    n_whole = n_words // N_LANES * N_LANES
    if n_whole:
        lanes = [mix(h + i & MASK) for i in range(N_LANES)]
        for i in range(n_whole):
            lanes[i % N_LANES] = mix(lanes[i % N_LANES] ^ words[i])
        for lane in lanes:
            h = mix(h ^ lane)
    for word in words[n_whole:]:
        h = mix(h ^ word)
    return mix(h ^ int.from_bytes(source[8 * n_words :], "little"))


def sealed(body: bytes) -> bytes:
    """Returns a snapshot with this body and the digest that belongs to it."""
    return body + struct.pack("<Q", digest(body))
