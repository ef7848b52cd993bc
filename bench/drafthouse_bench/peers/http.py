"""A light HTTP/1.1 client of llama-server's streams: it must cost no more than the gRPC one.

`StreamParser` takes the bytes as they come and knows nothing of sockets. A connection serves one
request at a time and is kept for the next; all events of one packet have arrived at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drafthouse_bench.process import BenchError
from drafthouse_bench.trace import Trace

__all__ = ["HttpClient", "StreamParser"]

_HOST = "127.0.0.1"

_N_PER_CONNECTION = 90
"""llama-server closes a connection after 100 requests."""

_IDLE_S = 3.0
"""Seconds after which an idle connection is opened anew; llama-server closes one after 5 s."""


class StreamParser:
    """Reads one response: its head, its body in chunks or by length, the events in the body.

    Args:
        is_stream: The body is a stream of server-sent events; else it is one JSON value.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._buffer = bytearray()
        self._body = bytearray()
        self._n_left: int | None = None  # of the body or the chunk; None: a chunk's size comes
        self._is_chunked = False
        self.status = 0
        """HTTP status; 0 before the head is complete."""
        self.is_finished = False
        """Whether the response is complete."""

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """Takes bytes and returns the JSON values that they completed.

        Raises:
            BenchError: it is no such response, or it reports an error.
        """
        self._buffer += received
        if not self.status and not self._read_head():
            return []
        while self._buffer and not self.is_finished and self._read_body():
            pass
        if not self.is_finished and self._n_left == 0 and not self._is_chunked:
            self.is_finished = True
        if self.status != 200:
            self._refuse()
            return []
        return self._events() if self._is_stream else self._whole()

    def _read_head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # late end of the former response
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        try:
            self.status = int(first.split()[1])
        except (IndexError, ValueError):
            raise BenchError(f"llama-server answers no HTTP: {first[:80]!r}") from None
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._is_chunked:
            self._n_left = int(headers.get("content-length", 0))
        return True

    def _read_body(self) -> bool:
        """Takes what the buffer holds of the body; False when more bytes must come first."""
        if self._n_left is None:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            self._n_left = int(self._buffer[:end].split(b";")[0], 16)
            del self._buffer[: end + 2]
            if self._n_left == 0:
                self.is_finished = True
                return False
        taken = self._buffer[: self._n_left]
        self._body += taken
        del self._buffer[: len(taken)]
        self._n_left -= len(taken)
        if self._n_left == 0 and self._is_chunked:
            if len(self._buffer) < 2:  # the line's end after a chunk's bytes
                return False
            del self._buffer[:2]
            self._n_left = None
        return True

    def _events(self) -> list[dict[str, Any]]:
        *whole, rest = self._body.split(b"\n\n")
        self._body = rest
        events = []
        for event in whole:
            kind, _, content = event.partition(b": ")
            if kind == b"error":
                raise BenchError(f"llama-server refuses: {content[:200].decode(errors='replace')}")
            if kind == b"data" and content != b"[DONE]":
                events.append(json.loads(content))
        return events

    def _whole(self) -> list[dict[str, Any]]:
        return [json.loads(self._body)] if self.is_finished else []

    def _refuse(self) -> None:
        if self.is_finished:
            text = self._body[:200].decode(errors="replace")
            raise BenchError(f"llama-server answers {self.status}: {text}")


class _StaleError(BenchError):
    """The server closed a kept connection before it could see the next request."""


class _Connection(asyncio.Protocol):
    """One TCP connection; hands every packet to the parser of the request that runs."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: StreamParser | None = None
        self._trace: Trace | None = None
        self._values: list[dict[str, Any]] = []
        self._ended: asyncio.Future[None] | None = None
        self.n_requests = 0
        self.idle_since_s = time.perf_counter()

    @property
    def is_usable(self) -> bool:
        """Whether the next request may use it."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self.n_requests < _N_PER_CONNECTION
            and time.perf_counter() - self.idle_since_s < _IDLE_S
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._parser is None or self._ended is None or self._ended.done():
            return
        try:
            values = self._parser.feed(data)
            self._values = values[-1:] or self._values
            if self._trace is not None:
                _note(self._trace, values, now)
        except (BenchError, ValueError) as error:
            self._ended.set_exception(
                error if isinstance(error, BenchError) else BenchError(f"no JSON: {error}")
            )
            return
        if self._parser.is_finished:
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        assert self._parser is not None, "a request runs"
        is_stale = self.n_requests > 1 and not self._parser.status
        kind = _StaleError if is_stale else BenchError
        self._ended.set_exception(kind("llama-server closed the connection"))

    async def request(self, message: bytes, trace: Trace | None) -> dict[str, Any]:
        """Sends a request and returns the last JSON value of its response."""
        assert self._transport is not None, "connected"
        self.n_requests += 1
        self._parser = StreamParser(is_stream=trace is not None)
        self._trace, self._values = trace, []
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._ended
        self.idle_since_s = time.perf_counter()
        return self._values[-1] if self._values else {}

    def close(self) -> None:
        """Closes it; a request that runs ends on the server too."""
        if self._transport is not None:
            self._transport.abort()


def _note(trace: Trace, events: Sequence[dict[str, Any]], now: float) -> None:
    """Notes the tokens of events that came in one packet."""
    for event in events:
        if event.get("error"):
            raise BenchError(f"llama-server refuses: {event['error']}")
        # A token that ends inside a character comes with a later one's message: so no counting of
        # messages, but the server's own count.
        n_new = event.get("tokens_predicted", 0) - trace.n_output
        if n_new > 0:
            trace.add(now, n_new)
        trace.token_ids += event.get("tokens", ())
        if event.get("stop"):
            timings = event.get("timings", {})
            trace.n_drafted = timings.get("draft_n", 0)
            trace.n_accepted = timings.get("draft_n_accepted", 0)
            trace.n_reused = timings.get("cache_n", 0)


class HttpClient:
    """llama-server's `/completion`, past end tokens unless a grammar says where the end is.

    Args:
        port: Port.
        fields: Of each request's body, such as `temperature`.
        has_cache: Whether prompts may go on from former ones, as llama-server does by default.
    """

    def __init__(self, port: int, fields: Mapping[str, Any], *, has_cache: bool = False) -> None:
        self._port = port
        self._fields = fields
        self._has_cache = has_cache
        self._idle: list[_Connection] = []

    async def stream(self, prompt: Sequence[int], n_output: int, trace: Trace) -> None:
        """Generates and notes in the trace when tokens come.

        Raises:
            BenchError: the server refuses or leaves, or tokens are missing.
        """
        await self._request(self._message(prompt, n_output, is_stream=True), trace)
        trace.finish("llama-server", n_output)

    async def whole(self, prompt: Sequence[int], n_output: int) -> list[int]:
        """Generates and returns the token ids.

        Raises:
            BenchError: the server refuses or leaves.
        """
        answer = await self._request(self._message(prompt, n_output, is_stream=False), None)
        tokens: list[int] = answer["tokens"]
        return tokens

    async def is_ready(self) -> bool:
        """Returns whether the model is loaded."""
        message = f"GET /health HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode()
        try:
            return bool((await self._request(message, None)).get("status") == "ok")
        except (BenchError, OSError):
            return False

    def close(self) -> None:
        """Closes the connections that are kept."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _message(self, prompt: Sequence[int], n_output: int, *, is_stream: bool) -> bytes:
        body = json.dumps(
            {
                "prompt": list(prompt),
                **self._fields,
                "n_predict": n_output,
                "ignore_eos": "grammar" not in self._fields,
                "cache_prompt": self._has_cache,
                "stream": is_stream,
                "return_tokens": not is_stream,
            }
        ).encode()
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {_HOST}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _request(self, message: bytes, trace: Trace | None) -> dict[str, Any]:
        try:
            return await self._send(self._kept() or await self._connect(), message, trace)
        except _StaleError:
            return await self._send(await self._connect(), message, trace)

    async def _send(
        self, connection: _Connection, message: bytes, trace: Trace | None
    ) -> dict[str, Any]:
        is_reusable = False
        try:
            answer = await connection.request(message, trace)
            is_reusable = True
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:  # failed or cancelled: the server stops when the connection is gone
                connection.close()
        return answer

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, _HOST, self._port)
        return connection
