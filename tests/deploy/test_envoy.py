"""deploy/envoy.yaml, run: TLS, streaming, gRPC-Web, health, and one of two servers that ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import signal
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from tests.support.envoy import CANCELS, KEY, Front, front
from tests.support.http2 import Connection

import drafthouse
from drafthouse.v1 import generation_pb2

pytestmark = pytest.mark.timeout(300)
_BOTH_S = 60.0
_BEGUN: list[AsyncIterator[drafthouse.Chunk]] = []
"""Kept: a stream whose iterator is gone is cancelled."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Front]:
    async with front(tmp_path) as started:
        yield started
    _BEGUN.clear()


def context_of(running: Front, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=running.authority.pem.decode())
    context.set_alpn_protocols(protocols)
    return context


async def servers_of(
    running: Front, n: int, retry: drafthouse.RetryPolicy | None = None
) -> Counter[str]:
    """Makes calls at once, all of which must succeed; returns how many each server has answered."""
    async with running.client(retry=retry) as client:
        models = await asyncio.gather(*(client.get_model() for _ in range(n)))
    return Counter(model.architecture for model in models)


async def on_both(
    running: Front, client: drafthouse.AsyncClient
) -> list[drafthouse.AsyncGenerationStream]:
    """Starts long streams until each server has one; returns them, begun."""
    streams: list[drafthouse.AsyncGenerationStream] = []
    # On a busy machine a server may miss a check, and is sent nothing until the next one; and how
    # many streams it takes is chance.
    await running.until(lambda: running.healthy() == {"one", "two"})
    async with asyncio.timeout(_BOTH_S):
        while await asyncio.to_thread(running.busy) != {"one", "two"}:
            streams.append(await begun(client))
    return streams


async def begun(client: drafthouse.AsyncClient) -> drafthouse.AsyncGenerationStream:
    """Returns a long stream of which a part has come."""
    stream = client.generate("x", max_output_tokens=900, temperature=0)
    chunks = aiter(stream)
    _BEGUN.append(chunks)
    assert (await anext(chunks)).token_ids
    return stream


async def test_calls_and_streams_pass_and_both_servers_get_some(running: Front) -> None:
    async with running.client() as client:
        assert await client.health()
        expected = await client.generate("x", max_output_tokens=30, temperature=0)
        text = ""
        async for chunk in client.generate("x", max_output_tokens=30, temperature=0):
            text += chunk.text
        assert text == expected.text
        # One that is far from its end is shown as it comes: nothing on the way waits for the whole.
        async for chunk in client.generate("x", max_output_tokens=900, temperature=0):
            assert chunk.token_ids
            break
        await running.until(lambda: not running.busy())  # who leaves is gone behind Envoy, too
    assert set(await servers_of(running, 40)) == {"one", "two"}
    async with running.client("wrong-" * 4) as stranger:
        with pytest.raises(drafthouse.InvalidApiKey) as caught:
            await stranger.get_model()
        assert caught.value.reason == "INVALID_API_KEY"  # details pass, too
    async with drafthouse.AsyncClient(running.target, retry=None) as plain:
        with pytest.raises(drafthouse.Unavailable):
            await plain.get_model()


async def test_what_is_not_ours_does_not_pass(running: Front) -> None:
    def status(path: str) -> int:
        connection = http.client.HTTPSConnection(
            "localhost", running.port, context=context_of(running, "http/1.1"), timeout=60
        )
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status

    for path in ("/", "/metrics", "/clusters", "/grpc.reflection.v1alpha.ServerReflection/x"):
        assert await asyncio.to_thread(status, path) == 404


def frames_of(body: bytes) -> list[tuple[int, bytes]]:
    """Returns the frames of a gRPC-Web body, each with its kind: 0 a message, 128 the trailers."""
    frames = []
    while body:
        kind, length = struct.unpack(">BI", body[:5])
        frames.append((kind, body[5 : 5 + length]))
        body = body[5 + length :]
    return frames


@pytest.mark.parametrize("kind", ["application/grpc-web+proto", "application/grpc-web-text"])
async def test_a_browser_s_grpc_web(running: Front, kind: str) -> None:
    request = generation_pb2.GenerateRequest(max_output_tokens=20)
    request.prompt.text = "x"
    request.sampling.temperature = 0
    message = request.SerializeToString()
    is_text = kind.endswith("-text")

    def call() -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", running.port, context=context_of(running, "http/1.1"), timeout=60
        )
        body = struct.pack(">BI", 0, len(message)) + message
        headers = {
            "content-type": kind,
            "accept": kind,
            "authorization": f"Bearer {KEY}",
            "x-grpc-web": "1",
            "origin": "https://app.example.org",
        }
        path = "/drafthouse.v1.GenerationService/Generate"
        connection.request("POST", path, base64.b64encode(body) if is_text else body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, content

    status, headers, content = await asyncio.to_thread(call)
    assert status == 200
    assert headers["access-control-allow-origin"] == "https://app.example.org"
    if is_text:  # encoded piece by piece, each with its own padding
        quads = (content[i : i + 4] for i in range(0, len(content), 4))
        content = b"".join(map(base64.b64decode, quads))
    *messages, (last, trailers) = frames_of(content)
    assert last == 128
    assert b"grpc-status:0" in trailers
    chunks = [generation_pb2.GenerateResponse.FromString(piece) for _, piece in messages]
    async with running.client() as client:
        expected = await client.generate("x", max_output_tokens=20, temperature=0)
    assert "".join(chunk.chunk.text for chunk in chunks) == expected.text


async def test_one_of_two_servers_is_killed_and_comes_back(running: Front) -> None:
    """Its streams end with an error; no other stream notices, and new calls get through.

    Those that were on their way to it at that moment are tried again, by the SDK and not by Envoy.
    """
    async with running.client() as client:
        expected = await client.generate("x", max_output_tokens=900, temperature=0)
        streams = await on_both(running, client)
        running.end_server("one")
        retry = drafthouse.RetryPolicy(budget=1000)
        assert await servers_of(running, 30, retry) == {"two": 30}
        results = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
    whole = [result for result in results if isinstance(result, drafthouse.Result)]
    # Envoy cannot say UNAVAILABLE any more where an answer has begun: it resets the stream.
    told = (drafthouse.InternalError, drafthouse.Unavailable)
    cut = [result for result in results if isinstance(result, told)]
    assert len(whole) + len(cut) == len(streams), results
    assert whole
    assert cut
    assert {result.text for result in whole} == {expected.text}
    await running.until(lambda: running.healthy() == {"two"})
    assert await servers_of(running, 10) == {"two": 10}
    await asyncio.to_thread(running.start_server, "one")
    await running.until(lambda: running.healthy() == {"one", "two"})
    assert set(await servers_of(running, 40)) == {"one", "two"}


async def test_a_server_that_drains_finishes_its_streams_and_gets_no_calls(running: Front) -> None:
    async with running.client() as client:
        streams = await on_both(running, client)
        running.end_server("one", signal.SIGTERM)
        assert sum((await servers_of(running, 30)).values()) == 30
        for result in await asyncio.gather(*(stream.result() for stream in streams)):
            assert result.usage.output_tokens == 900
        assert await asyncio.to_thread(running.servers["one"].wait, 60) == 0
    assert await servers_of(running, 10) == {"two": 10}


async def test_a_call_that_a_server_cancels_unseen_goes_to_the_other_one(running: Front) -> None:
    running.end_server("one")
    await asyncio.to_thread(running.start_server, "one", CANCELS)
    await running.until(lambda: running.healthy() == {"one", "two"})
    async with running.client() as client:
        models = [await client.get_model() for _ in range(20)]
    assert {model.architecture for model in models} == {"two"}


async def test_without_any_server_a_call_is_told_at_once(running: Front) -> None:
    for name in running.ports:
        running.end_server(name)
    await running.until(lambda: not running.healthy())
    async with running.client() as client:
        with pytest.raises(drafthouse.Unavailable):
            await client.get_model()


async def test_the_limits_that_a_client_is_told(running: Front) -> None:
    """Streams of a connection and the window of each, as they stand in the first frame."""

    def settings() -> dict[int, int]:
        context = context_of(running, "h2")
        with (
            socket.create_connection(("127.0.0.1", running.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            file = secure.makefile("rb")
            head = file.read(9)
            assert head[3] == 4
            body = file.read(int.from_bytes(head[:3], "big"))
        return dict(struct.unpack(">HI", body[i : i + 6]) for i in range(0, len(body), 6))

    found = await asyncio.to_thread(settings)
    assert found[3] == 100
    assert found.get(4, 65535) <= 65536


_N_PREMATURE_MAX = 50
"""Resets of a connection's first hundred streams: half of `premature_reset_total_stream_count`."""


def reset_at_once(connection: Connection, n: int) -> None:
    """Opens and resets streams, all in one record of TLS: no answer comes between."""
    request = generation_pb2.GenerateRequest(max_output_tokens=900)
    request.prompt.text = "x"
    path = "/drafthouse.v1.GenerationService/Generate"
    with connection.gathered():
        for _ in range(n):
            connection.reset(connection.open(path, request.SerializeToString(), KEY))


def connected(running: Front) -> Connection:
    """Connects and waits until Envoy answers."""
    connection = Connection(running.target, ca_file=str(running.ca_file))
    if not connection.ping():
        connection.close()
        pytest.fail("Envoy hangs up")
    return connection


async def test_a_connection_that_resets_its_streams_is_closed(running: Front) -> None:
    """One at a time, so that Envoy takes each: at the fiftieth it hangs up, and on nobody else."""

    def until_closed() -> int:
        with contextlib.closing(connected(running)) as connection:
            for n in range(1, 4 * _N_PREMATURE_MAX):
                reset_at_once(connection, 1)
                if not connection.ping():
                    return n
        pytest.fail("it goes on for ever")

    async with running.client() as client:
        stream = await begun(client)
        assert await asyncio.to_thread(until_closed) == _N_PREMATURE_MAX
        assert (await stream.result()).usage.output_tokens == 900
        again = await client.generate("x", max_output_tokens=30, temperature=0)
        assert again.usage.output_tokens == 30
    await running.until(lambda: not running.busy())
    assert running.n_calls("Generate") <= 2 + _N_PREMATURE_MAX


async def test_of_a_burst_of_resets_the_servers_hear_little(running: Front) -> None:
    """Envoy takes one stream at a time, and those that are reset by then go no further."""

    def burst() -> None:
        with contextlib.closing(connected(running)) as connection:
            reset_at_once(connection, 40)
            assert connection.ping()

    async with running.client() as client:
        stream = await begun(client)
        await asyncio.to_thread(burst)
        assert (await stream.result()).usage.output_tokens == 900
    await running.until(lambda: not running.busy())
    assert running.n_calls("Generate") <= 3


async def test_connections_are_bounded_and_places_are_given_back(tmp_path: Path) -> None:
    few = {"max_active_downstream_connections: 10000": "max_active_downstream_connections: 3"}

    def is_taken(running: Front) -> bool:
        try:
            with contextlib.closing(
                Connection(running.target, ca_file=str(running.ca_file))
            ) as one:
                return one.ping()
        except OSError:
            return False

    async with front(tmp_path, few) as running, running.client() as client:
        stream = await begun(client)
        with contextlib.closing(await asyncio.to_thread(connected, running)):
            with contextlib.closing(await asyncio.to_thread(connected, running)):
                assert not await asyncio.to_thread(is_taken, running)
            assert (await stream.result()).usage.output_tokens == 900
            await running.until(lambda: is_taken(running))


async def test_its_certificate_is_replaced_while_a_stream_runs(running: Front) -> None:
    def serial() -> int:
        context = context_of(running, "h2")
        with (
            socket.create_connection(("127.0.0.1", running.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            shown = secure.getpeercert(binary_form=True)
            assert shown is not None
            return x509.load_der_x509_certificate(shown).serial_number

    new = running.authority.issue()
    async with running.client() as client:
        stream = await begun(client)
        new.write(running.folder / "tls", "tls")
        await running.until(lambda: serial() == new.serial)
        assert (await stream.result()).usage.output_tokens == 900
