"""The bytes of the usage journal: entries with length and checksum, in files that only grow.

A file is a magic word and then frames. A frame is a mark of two bytes, the length of its body, a
CRC-32 of length and body, and the body, all little-endian; the body is a byte for the kind and what
is told. A crash may tear the last frame, a bad disk any. Reading skips what is no frame and goes on
with the next that is one.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from drafthouse_server.usage.record import UsageRecord

__all__ = [
    "FILE_MAGIC",
    "FILE_MAGIC_ANY",
    "N_FRAME_BYTES_MAX",
    "Entry",
    "Frame",
    "Gap",
    "Mark",
    "decode",
    "encode",
    "frames",
]

FILE_MAGIC = b"drafthouse usage 1\n"
"""First bytes of every file; the number is the format's version."""

FILE_MAGIC_ANY = b"drafthouse usage "
"""What the first bytes of every version begin with."""

_FRAME_MAGIC = b"\xd7\xf5"
"""No UTF-8 text has these bytes, so that no name in a record looks like a frame."""

_HEAD = struct.Struct("<2sII")  # magic, length of the body, checksum
_N_BODY_BYTES_MAX = 1 << 16
N_FRAME_BYTES_MAX = _HEAD.size + _N_BODY_BYTES_MAX
"""Most bytes of a frame."""

_MARK = struct.Struct("<c26sdIIII")
_START, _MARKED, _END = b"S", b"M", b"E"
_FIELDS = tuple(field.name for field in dataclasses.fields(UsageRecord))
_values_of = operator.attrgetter(*_FIELDS)


# Not frozen: one is made per 40 tokens, and a frozen one takes three times as long.
@dataclass(slots=True)
class Mark:
    """How far a stream was. It bills no more than this if nothing else is known of its end."""

    record_id: str
    """Id of the stream's record."""
    at: float
    """When: seconds since 1970."""
    n_output: int
    """Tokens in the messages that the transport has taken."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""


Entry: TypeAlias = UsageRecord | Mark
"""What a frame tells: a record without an outcome is a stream's start, with one its end."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame of a file."""

    body: bytes
    """Kind and content; `decode` reads it."""
    end: int
    """Byte of the file behind it."""

    @property
    def is_end(self) -> bool:
        """Whether it tells how a stream ended."""
        return self.body[:1] == _END


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes of a file that are no frame."""

    start: int
    """First byte of it."""
    end: int
    """Byte of the file behind it."""
    is_tail: bool
    """Whether no frame follows: what a crash has torn looks so."""


def encode(entry: Entry) -> bytes:
    """Returns the frame of an entry."""
    if isinstance(entry, Mark):
        body = _MARK.pack(
            _MARKED,
            entry.record_id.encode(),
            entry.at,
            entry.n_output,
            entry.n_reused,
            entry.n_drafted,
            entry.n_accepted,
        )
    else:
        body = (_END if entry.outcome else _START) + json.dumps(_values_of(entry)).encode()
    assert len(body) <= _N_BODY_BYTES_MAX, "names are bounded before they come here"
    return _HEAD.pack(_FRAME_MAGIC, len(body), _checksum(body)) + body


def decode(body: bytes) -> Entry:
    """Returns what a frame tells.

    Raises:
        ValueError: it is none of this version.
    """
    kind = body[:1]
    if kind == _MARKED:
        _, record_id, *rest = _unpack(body)
        return Mark(record_id.decode(), *rest)
    if kind not in {_START, _END}:
        raise ValueError(f"entries of kind {kind!r} are of a newer version")
    values = json.loads(body[1:])
    return UsageRecord(**dict(zip(_FIELDS, values, strict=False)))


def _unpack(body: bytes) -> tuple[Any, ...]:
    try:
        return _MARK.unpack(body)
    except struct.error as error:
        raise ValueError("a mark of another version") from error


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, len(body))


def frames(content: bytes, start: int = 0) -> Iterator[Frame | Gap]:
    """Yields what a part of a file has, in order.

    Args:
        content: The file's bytes from `start` on.
        start: First byte of them in the file.
    """
    position = 0
    while position < len(content):
        frame_end = _frame_end(content, position)
        if frame_end:
            body = content[position + _HEAD.size : frame_end]
            yield Frame(body, start + frame_end)
            position = frame_end
        else:
            found = _next_frame(content, position + 1)
            yield Gap(start + position, start + found, is_tail=found == len(content))
            position = found


def _frame_end(content: bytes, position: int) -> int:
    """Returns the byte behind the frame that begins here; 0 where none does."""
    if len(content) - position < _HEAD.size:
        return 0
    magic, n_bytes, checksum = _HEAD.unpack_from(content, position)
    end = position + _HEAD.size + n_bytes
    if magic != _FRAME_MAGIC or not 0 < n_bytes <= _N_BODY_BYTES_MAX or end > len(content):
        return 0
    return end if _checksum(content[position + _HEAD.size : end]) == checksum else 0


def _next_frame(content: bytes, position: int) -> int:
    """Returns where the next frame begins; the end of the content where there is none."""
    while (position := content.find(_FRAME_MAGIC, position)) >= 0:
        if _frame_end(content, position):
            return position
        position += 1
    return len(content)
