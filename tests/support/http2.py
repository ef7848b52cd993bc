"""Clients that do what no gRPC library would: read nothing, say nothing, or know all that came.

A library's client drops messages that have arrived and were not read yet when a connection breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import selectors
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Iterable, Iterator

from drafthouse.v1 import generation_pb2

__all__ = ["Connection", "RawClient", "RawStream", "RudeClient", "connect", "field", "varint"]

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4
_WINDOW_MAX = 2**31 - 1
_CANCEL = 8
_N_FRAME_BYTES_MAX = 16384
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
    return head + payload


def _literal(name: str, value: str) -> bytes:
    """Returns a header field without Huffman and without indexing."""
    texts = [text.encode() for text in (name, value)]
    assert max(map(len, texts)) < 127, "longer ones need HPACK's continuation"
    return b"\0" + b"".join(bytes([len(text)]) + text for text in texts)


class _Streams:
    """One connection as frames; no I/O."""

    def __init__(self, window: int | None) -> None:
        settings = b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self.greeting = _PREFACE + _frame(_SETTINGS, 0, 0, settings)
        """What it begins with; of a window of 0 the server may send no byte."""
        self.next_stream = 1
        """Number of the stream that is opened next."""
        self.ended: set[int] = set()
        """Streams that the server has ended or reset."""
        self.has_goaway = False
        """Whether the server has said that it takes no more calls."""
        self.n_pongs = 0
        """Pings that the server has answered."""
        self._received = bytearray()

    def opening(self, path: str, message: bytes | None, key: str) -> bytes:
        """Returns what opens a stream; without a message, the headers alone and no end."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        fields += [("te", "trailers"), ("content-type", "application/grpc")]
        fields += [("authorization", f"Bearer {key}")] if key else []
        block = b"".join(_literal(*pair) for pair in fields)
        frames = _frame(_HEADERS, _END_HEADERS, stream, block)
        if message is not None:
            body = b"\0" + struct.pack(">I", len(message)) + message
            frames += _frame(_DATA, _END_STREAM, stream, body[:_N_FRAME_BYTES_MAX])
        return frames

    def take(self, data: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
        """Takes what has arrived; returns what is to be answered, and the messages' bytes."""
        self._received += data
        answers, contents = b"", list[tuple[int, bytes]]()
        for kind, flags, stream, payload in self._frames():
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                answers += _frame(kind, _ACK, 0, payload if kind == _PING else b"")
            elif kind == _PING:
                self.n_pongs += 1
            elif kind == _GOAWAY:
                self.has_goaway = True
            elif kind == _DATA:
                contents.append((stream, payload))
            if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self.ended.add(stream)
        return answers, contents

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        while len(self._received) >= 9:
            end = 9 + int.from_bytes(self._received[:3])
            if len(self._received) < end:
                return
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            payload = bytes(self._received[9:end])
            del self._received[:end]
            yield kind, flags, stream & _WINDOW_MAX, payload


class _Client:
    """What both kinds of connection have noted."""

    _streams: _Streams

    @property
    def ended(self) -> set[int]:
        """Streams that the server has ended or reset."""
        return self._streams.ended

    @property
    def has_goaway(self) -> bool:
        """Whether the server has said that it takes no more calls."""
        return self._streams.has_goaway

    @property
    def n_pongs(self) -> int:
        """Pings that the server has answered."""
        return self._streams.n_pongs


class RudeClient(_Client):
    """One connection for asyncio. Made by `connect`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int | None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._streams = _Streams(window)
        self.n_messages = 0
        """Messages that have come, where each is one frame."""
        writer.write(self._streams.greeting)

    def open(self, path: str, message: bytes | None, key: str = "") -> int:
        """Opens a stream; without a message, it sends the headers alone and no end."""
        self._writer.write(self._streams.opening(path, message, key))
        return self._streams.next_stream - 2

    def ping(self, n: int) -> None:
        """Sends pings."""
        self._writer.write(_frame(_PING, 0, 0, bytes(8)) * n)

    async def read(self) -> None:
        """Answers settings and pings, and notes what ends, until the server hangs up."""
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                answers, contents = self._streams.take(data)
                self.n_messages += len(contents)
                self._writer.write(answers)


@contextlib.asynccontextmanager
async def connect(target: str, *, window: int | None = None) -> AsyncIterator[RudeClient]:
    """Connects to "host:port" for the time of a block."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = RudeClient(reader, writer, window)
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


class Connection(_Client):
    """One connection over a socket; `pump` answers settings and pings, and notes what ends.

    Args:
        target: host:port.
        window: Bytes of each stream that may be sent to it; None leaves HTTP/2's.
        timeout: Seconds that a read or write may take.
        ca_file: Authorities of the server's certificate; "" is plain text.
    """

    def __init__(
        self, target: str, window: int | None = None, timeout: float = 10.0, ca_file: str = ""
    ) -> None:
        host, _, port = target.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout)
        if ca_file:
            self.socket = _secured(self.socket, host, ca_file)
        self._streams = _Streams(window)
        self._gathered: bytearray | None = None
        self.is_closed = False
        """Whether one of both sides has hung up."""
        self.socket.sendall(self._streams.greeting)

    def open(self, path: str, message: bytes | None, key: str | None = None) -> int:
        """Opens a stream; `message` None sends headers alone and no end."""
        self._send(self._streams.opening(path, message, key or ""))
        return self._streams.next_stream - 2

    def reset(self, stream: int) -> None:
        """Takes a stream back."""
        self._send(_frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))

    def ping(self) -> bool:
        """Waits until all that was sent has been read; returns False if that was hung up on."""
        n = self.n_pongs
        self._send(_frame(_PING, 0, 0, bytes(8)))
        while not self.is_closed and self.n_pongs == n:
            self._read()
        return not self.is_closed

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Sends what is sent in a block with one write, at its end."""
        self._gathered = bytearray()
        try:
            yield
        finally:
            data, self._gathered = bytes(self._gathered), None
            self._send(data)

    def _send(self, data: bytes) -> None:
        if self._gathered is not None:
            self._gathered += data
            return
        try:
            self.socket.sendall(data)
        except OSError:
            self.is_closed = True

    def pump(self, seconds: float) -> None:
        """Reads for some time."""
        end = time.monotonic() + seconds
        while not self.is_closed and (left := end - time.monotonic()) > 0:
            if not _is_readable(self.socket, left):
                return
            self._read()

    def _read(self) -> list[tuple[int, bytes]] | None:
        """Waits for something; returns the bytes of messages, by stream; None: nothing more."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return None
        answers, contents = self._streams.take(data)
        if answers:
            self._send(answers)
        return contents

    def close(self) -> None:
        """Closes the connection."""
        self.is_closed = True
        self.socket.close()


def _secured(plain: socket.socket, host: str, ca_file: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=ca_file)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname=host)


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    """Returns whether something can be read; descriptors beyond 1,024 too."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, seconds)))


@dataclasses.dataclass(slots=True)
class RawStream:
    """What has arrived of one generation."""

    content: bytearray = dataclasses.field(default_factory=bytearray)
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


class RawClient(Connection):
    """Generations over one connection; it knows what arrived, also when the server is killed.

    Args:
        port: Of a server on loopback.
    """

    def __init__(self, port: int) -> None:
        super().__init__(f"127.0.0.1:{port}", _WINDOW_MAX, 60.0)
        self.streams: dict[int, RawStream] = {}
        """By number."""
        self._send(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW_MAX - 65535)))

    def generate(self, key: str, request: generation_pb2.GenerateRequest) -> RawStream:
        """Starts a generation."""
        path = "/drafthouse.v1.GenerationService/Generate"
        number = self.open(path, request.SerializeToString(), key)
        stream = self.streams[number] = RawStream()
        return stream

    @property
    def n_tokens(self) -> int:
        """Tokens that have arrived, of all streams."""
        return sum(stream.n_tokens for stream in self.streams.values())

    def receive(self) -> bool:
        """Takes what has arrived; returns whether more may come."""
        contents = self._read()
        for number, content in contents or ():
            self.streams[number].take(content)
        for number in self.ended & self.streams.keys():
            self.streams[number].is_over = True
        return contents is not None


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
