"""What the sync and the asyncio client have in common below their methods."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from drafthouse._errors import FieldViolation, InvalidField

__all__ = [
    "CHANNEL_OPTIONS",
    "DEFAULT_TARGET",
    "HEALTH_METHOD",
    "call_metadata",
    "checked_key",
    "has_begun",
]

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where `drafthouse serve` listens when it is not told otherwise."""

HEALTH_METHOD = "/grpc.health.v1.Health/Check"

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # A stream whose peer has vanished without a word fails within 80 s instead of never.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

_BEGUN_KEY = "drafthouse-request-id"
"""Key of the initial metadata by which a server says that it has begun a generation."""

_SENDABLE = re.compile(r"[\x20-\x7e]*")


def checked_key(api_key: str | None) -> str | None:
    """Returns an API key that a header can carry.

    Raises:
        ValueError: it has a character that none can, such as the newline of a file.
    """
    found = None if api_key is None else _SENDABLE.match(api_key)
    if found is not None and found.end() < len(found.string):
        raise ValueError(
            f"character {found.end() + 1} of {len(found.string)} of the API key is not printable"
            " ASCII, so that no header can carry the key; was it read from a file with a newline"
            " at its end?"
        )
    return api_key


def has_begun(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Returns whether a server has said that it has begun a generation, which it bills then."""
    return any(key == _BEGUN_KEY for key, _ in initial_metadata or ())


def call_metadata(api_key: str | None, request_id: str | None) -> tuple[tuple[str, str], ...]:
    """Returns what accompanies a call.

    Raises:
        InvalidField: no header can carry the request id (INVALID_FIELD).
    """
    if request_id is not None and not _SENDABLE.fullmatch(request_id):
        rule = f"must be 1 to 64 of [A-Za-z0-9._-], not {request_id!r}"
        violation = FieldViolation("request_id", rule)
        raise InvalidField(f"request_id {rule}", violations=[violation])
    entries = (
        ("authorization", f"Bearer {api_key}" if api_key is not None else None),
        ("x-request-id", request_id),
    )
    return tuple((key, value) for key, value in entries if value is not None)
