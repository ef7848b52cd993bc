"""A minimal HTTP/2 client over a socket, for what a well-behaved gRPC client would never do."""

from __future__ import annotations

import selectors
import socket
import struct
import time

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def literal(name: str, value: str) -> bytes:
    """Returns a header field without Huffman and without indexing; HPACK integers below 127."""
    n, v = name.encode(), value.encode()
    assert max(len(n), len(v)) < 127, "longer ones need HPACK's continuation"
    return b"\x00" + bytes([len(n)]) + n + bytes([len(v)]) + v


def readable(sock: socket.socket, seconds: float) -> bool:
    """Returns whether something can be read; descriptors beyond 1,024 too."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, seconds)))


class Connection:
    """One connection; `pump` answers settings and pings, and notes what the server ends."""

    def __init__(self, target: str, window: int | None = None, timeout: float = 10.0) -> None:
        host, _, port = target.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout)
        settings = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self.next_stream = 1
        self.ended: set[int] = set()
        self.has_goaway = False
        self.is_closed = False
        self._buffer = b""

    def open(
        self, path: str, message: bytes | None, key: str | None = None, *, end: bool = True
    ) -> int:
        """Opens a stream; `message` None sends headers alone and no end."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        if key:
            fields.append(("authorization", f"Bearer {key}"))
        block = b"".join(literal(*pair) for pair in fields)
        self.send(frame(HEADERS, END_HEADERS, stream, block))
        if message is not None:
            body = b"\0" + struct.pack(">I", len(message)) + message
            self.send(frame(DATA, END_STREAM if end else 0, stream, body[:16384]))
        return stream

    def reset(self, stream: int) -> None:
        self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_closed = True

    def pump(self, seconds: float) -> None:
        """Reads for some time."""
        end = time.monotonic() + seconds
        while not self.is_closed and (left := end - time.monotonic()) > 0:
            if not readable(self.socket, left):
                return
            self._read()

    def _read(self) -> None:
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return
        self._buffer += data
        while len(self._buffer) >= 9:
            n = int.from_bytes(self._buffer[:3])
            if len(self._buffer) < 9 + n:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9]) & 0x7FFFFFFF
            payload, self._buffer = self._buffer[9 : 9 + n], self._buffer[9 + n :]
            if kind == SETTINGS and not flags & ACK:
                self.send(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))
            elif kind == GOAWAY:
                self.has_goaway = True
            elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream)

    def close(self) -> None:
        self.is_closed = True
        self.socket.close()
