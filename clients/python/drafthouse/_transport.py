"""What the sync and the asyncio client have in common below their methods."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CHANNEL_OPTIONS", "DEFAULT_TARGET", "HEALTH_METHOD", "call_metadata"]

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


def call_metadata(api_key: str | None, request_id: str | None) -> tuple[tuple[str, str], ...]:
    """Returns what accompanies a call."""
    entries = (
        ("authorization", f"Bearer {api_key}" if api_key is not None else None),
        ("x-request-id", request_id),
    )
    return tuple((key, value) for key, value in entries if value is not None)
