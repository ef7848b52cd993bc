"""A client that does what no gRPC library would: it reads nothing, or says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterable

__all__ = ["RudeClient", "connect", "field", "varint"]

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def _literal(name: str, value: str) -> bytes:
    """Returns a header field without Huffman and without indexing; both below 127 bytes."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class RudeClient:
    """One connection. Made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1
        self.ended: set[int] = set()
        """Streams that the server has ended or reset."""
        self.has_goaway = False
        """Whether the server has said that it takes no more calls."""

    def open(self, path: str, message: bytes | None, key: str = "") -> int:
        """Opens a stream; without a message, it sends the headers alone and no end."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        fields += [("authorization", f"Bearer {key}")] if key else []
        block = b"".join(_literal(*field) for field in fields)
        self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, block))
        if message is not None:
            body = b"\0" + struct.pack(">I", len(message)) + message
            self._writer.write(_frame(_DATA, _END_STREAM, stream, body))
        return stream

    async def read(self) -> None:
        """Answers settings and pings, and notes what ends, until the server hangs up."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._writer.write(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            self.has_goaway = True
        elif kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.ended.add(stream)

    def greet(self, window: int | None) -> None:
        """Sends what a connection begins with; of a window of 0 the server may send no byte."""
        settings = b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))


@contextlib.asynccontextmanager
async def connect(target: str, *, window: int | None = None) -> AsyncIterator[RudeClient]:
    """Connects to "host:port" for the time of a block."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = RudeClient(reader, writer)
    client.greet(window)
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def field(number: int, payload: bytes) -> bytes:
    """Returns a length-delimited field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def varint(n: int) -> bytes:
    """Returns a number as protobuf writes it."""
    groups = list(_groups(n))
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def _groups(n: int) -> Iterable[int]:
    while n > 127:
        yield n & 127
        n >>= 7
    yield n
