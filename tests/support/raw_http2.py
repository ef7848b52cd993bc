"""A gRPC client over a bare socket: it knows what arrived, also when the server is killed.

A library's client drops messages that have arrived and were not read yet when a connection breaks.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass, field

from drafthouse.v1 import generation_pb2

__all__ = ["RawClient", "RawStream"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_WINDOW_MAX = 2**31 - 1


@dataclass(slots=True)
class RawStream:
    """What has arrived of one stream."""

    content: bytearray = field(default_factory=bytearray)
    """Bytes of its messages that are not whole yet."""
    n_tokens: int = 0
    """Tokens in its whole messages."""
    result: generation_pb2.GenerationResult | None = None
    """Its last message, if that has come."""
    is_over: bool = False
    """Whether the server has ended it."""

    def take(self, content: bytes) -> None:
        """Takes what has arrived."""
        self.content += content
        while len(self.content) >= 5:
            n_bytes = int.from_bytes(self.content[1:5])
            if len(self.content) < 5 + n_bytes:
                return
            message = generation_pb2.GenerateResponse.FromString(
                bytes(self.content[5 : 5 + n_bytes])
            )
            del self.content[: 5 + n_bytes]
            self.n_tokens += len(message.chunk.token_ids)
            if message.HasField("result"):
                self.result = message.result


class RawClient:
    """One connection.

    Args:
        port: Of a server on loopback.
    """

    def __init__(self, port: int) -> None:
        self.streams: dict[int, RawStream] = {}
        self._next_id = 1
        self._received = bytearray()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        window = struct.pack(">HI", 4, _WINDOW_MAX)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, window))
        self._send(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW_MAX - 65535))

    def generate(self, key: str, request: generation_pb2.GenerateRequest) -> RawStream:
        """Starts a generation."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": "/drafthouse.v1.GenerationService/Generate",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            "authorization": f"Bearer {key}",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        body = request.SerializeToString()
        message = b"\0" + struct.pack(">I", len(body)) + body
        stream = self.streams[stream_id] = RawStream()
        self._send(_HEADERS, _END_HEADERS, stream_id, block)
        self._send(_DATA, _END_STREAM, stream_id, message)
        return stream

    @property
    def n_tokens(self) -> int:
        """Tokens that have arrived, of all streams."""
        return sum(stream.n_tokens for stream in self.streams.values())

    def receive(self) -> bool:
        """Takes what has arrived; returns whether more may come."""
        try:
            content = self._socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._received += content
        while len(self._received) >= 9:
            n_bytes = int.from_bytes(self._received[:3])
            if len(self._received) < 9 + n_bytes:
                break
            kind, flags = self._received[3], self._received[4]
            stream_id = int.from_bytes(self._received[5:9]) & _WINDOW_MAX
            payload = bytes(self._received[9 : 9 + n_bytes])
            del self._received[: 9 + n_bytes]
            self._take(kind, flags, stream_id, payload)
        return bool(content)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == _DATA:
            self.streams[stream_id].take(payload)
        if kind in {_DATA, _HEADERS}:
            self.streams[stream_id].is_over |= bool(flags & _END_STREAM)
        elif kind in {_SETTINGS, _PING} and not flags & _ACK:
            self._send(kind, _ACK, 0, payload if kind == _PING else b"")

    def _send(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was killed
            self._socket.sendall(_frame(kind, flags, stream_id, payload))

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload
    )


def _text(text: str) -> bytes:
    assert len(text) < 127, "longer ones need another encoding"
    return bytes([len(text)]) + text.encode()
