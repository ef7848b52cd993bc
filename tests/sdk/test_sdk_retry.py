"""When the SDK tries again, against a server that does what a test has written down."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

import drafthouse
from drafthouse._retry import Attempts, RetryBudget
from drafthouse._transport import CHANNEL_OPTIONS
from drafthouse.v1 import generation_pb2

FAST = drafthouse.RetryPolicy(initial_delay_s=0.001)
PATIENT = drafthouse.RetryPolicy(initial_delay_s=0.001, max_retry_after_s=float("inf"))


def refusal(
    code: grpc.StatusCode, *, reason: str = "", retry_s: float | None = None, domain: str = ""
) -> tuple[grpc.StatusCode, Any]:
    """Returns a code and its trailers."""
    details = []
    if reason:
        details.append(packed(ErrorInfo(reason=reason, domain=domain or "drafthouse.dev")))
    if retry_s is not None:
        delay = Duration(seconds=int(retry_s), nanos=int(retry_s % 1 * 1e9))
        details.append(packed(RetryInfo(retry_delay=delay)))
    status = Status(code=code.value[0], message="refused", details=details)
    return code, (("grpc-status-details-bin", status.SerializeToString()),)


def packed(detail: Any) -> AnyMessage:
    message = AnyMessage()
    message.Pack(detail)
    return message


class Script:
    """Refuses calls as written down, then answers; may break off after the first message."""

    def __init__(self) -> None:
        self.refusals: list[tuple[grpc.StatusCode, Any]] = []
        self.break_off: tuple[grpc.StatusCode, Any] | None = None
        self.has_result = True
        self.accepts: Any = ()
        """Initial metadata that it sends before it refuses."""
        self.n_calls = 0
        self.target = ""

    async def refuse(self, context: Any) -> None:
        self.n_calls += 1
        if self.refusals:
            code, trailers = self.refusals.pop(0)
            if self.accepts:
                await context.send_initial_metadata(self.accepts)
                # grpc.aio's client forgets them where the status has come by the time it looks.
                await asyncio.sleep(0.1)
            await context.abort(code, "refused", trailers)

    async def tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        await self.refuse(context)
        return generation_pb2.TokenizeResponse(token_ids=[1])

    async def generate(self, request: Any, context: Any) -> None:
        await self.refuse(context)
        chunk = generation_pb2.Chunk(text="a", token_ids=[1])
        await context.write(generation_pb2.GenerateResponse(chunk=chunk))
        if self.break_off:
            await context.abort(self.break_off[0], "broken off", self.break_off[1])
        result = generation_pb2.GenerationResult()
        if self.has_result:
            await context.write(generation_pb2.GenerateResponse(result=result))


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Tokenize": grpc.unary_unary_rpc_method_handler(
            script.tokenize,
            generation_pb2.TokenizeRequest.FromString,
            generation_pb2.TokenizeResponse.SerializeToString,
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            script.generate,
            generation_pb2.GenerateRequest.FromString,
            generation_pb2.GenerateResponse.SerializeToString,
        ),
    }
    generic = grpc.method_handlers_generic_handler("drafthouse.v1.GenerationService", handlers)
    server.add_generic_rpc_handlers((generic,))
    script.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield script
    await server.stop(None)


RETRYABLE = [
    refusal(grpc.StatusCode.UNAVAILABLE),
    refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=0.001),
    refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="TENANT_QUOTA_EXCEEDED", retry_s=0.001),
]
FINAL = [
    refusal(grpc.StatusCode.RESOURCE_EXHAUSTED),
    refusal(grpc.StatusCode.INTERNAL, reason="ENGINE_FAILURE"),
    refusal(grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"),
    refusal(grpc.StatusCode.DEADLINE_EXCEEDED),
]


@pytest.mark.parametrize("kind", range(len(RETRYABLE)))
async def test_refused_calls_are_tried_again(script: Script, kind: int) -> None:
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        script.refusals = [RETRYABLE[kind]] * 2
        assert await client.tokenize("x") == [1]
        assert script.n_calls == 3
        script.refusals = [RETRYABLE[kind]] * 2
        assert await client.generate("x").text() == "a"
        assert script.n_calls == 6


@pytest.mark.parametrize("kind", range(len(RETRYABLE)))
async def test_the_blocking_client_tries_again_too(script: Script, kind: int) -> None:
    def use() -> None:
        with drafthouse.Client(script.target, retry=FAST) as client:
            script.refusals = [RETRYABLE[kind]] * 2
            assert client.tokenize("x") == [1]
            script.refusals = [RETRYABLE[kind]] * 2
            assert client.generate("x").text() == "a"

    await asyncio.to_thread(use)
    assert script.n_calls == 6


@pytest.mark.parametrize("kind", range(len(FINAL)))
async def test_other_failures_are_final(script: Script, kind: int) -> None:
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        script.refusals = [FINAL[kind]]
        with pytest.raises(drafthouse.DrafthouseError):
            await client.generate("x")
        assert script.n_calls == 1


async def test_a_server_that_drains_does_not_use_up_the_budget(script: Script) -> None:
    drains = refusal(grpc.StatusCode.UNAVAILABLE, reason="SERVER_DRAINING", retry_s=0.001)
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        script.refusals = [drains] * 24
        calls = [client.tokenize("x") for _ in range(24)]
        assert await asyncio.gather(*calls) == [[1]] * 24
        script.refusals = [drains] * 9
        with pytest.raises(drafthouse.ServerDraining):
            await client.tokenize("x")
    assert script.n_calls == 48 + 4, "the attempts of one call are bounded all the same"


async def test_attempts_are_bounded_and_may_be_switched_off(script: Script) -> None:
    for retry, n_calls in ((FAST, 4), (None, 1)):
        script.n_calls = 0
        script.refusals = [RETRYABLE[1]] * 9
        async with drafthouse.AsyncClient(script.target, retry=retry) as client:
            with pytest.raises(drafthouse.QueueFull) as caught:
                await client.tokenize("x")
        assert script.n_calls == n_calls
        assert caught.value.retry_after == 0.001


async def test_nothing_is_tried_again_after_the_first_message(script: Script) -> None:
    script.break_off = RETRYABLE[0]
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        chunks = aiter(client.generate("x"))
        assert str(await anext(chunks)) == "a"
        with pytest.raises(drafthouse.Unavailable):
            await anext(chunks)
    assert script.n_calls == 1


BEGUN = (("drafthouse-request-id", "req_1"),)
USAGE = generation_pb2.Usage(prompt_tokens=7).SerializeToString()


def handed_back(*, has_begun: bool) -> tuple[grpc.StatusCode, Any]:
    """Returns how a server ends an accepted stream when it drains."""
    info = ErrorInfo(reason="SERVER_DRAINING", domain="drafthouse.dev")
    if has_begun:
        info.metadata["hasBegun"] = "true"
    delay = RetryInfo(retry_delay=Duration(nanos=1000))
    status = Status(code=14, message="drains", details=[packed(info), packed(delay)])
    details = ("grpc-status-details-bin", status.SerializeToString())
    return grpc.StatusCode.UNAVAILABLE, (details, ("drafthouse-usage-bin", USAGE))


async def test_a_stream_that_has_begun_is_not_tried_again_when_its_connection_breaks(
    script: Script,
) -> None:
    """It was, and the tenant had two records for one call."""
    script.accepts = BEGUN
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE)]
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        with pytest.raises(drafthouse.Unavailable):
            await client.generate("x")
    assert script.n_calls == 1
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE)]

    def use() -> None:
        with (
            drafthouse.Client(script.target, retry=FAST) as client,
            pytest.raises(drafthouse.Unavailable),
        ):
            client.generate("x").text()

    await asyncio.to_thread(use)
    assert script.n_calls == 2


async def test_a_stream_that_was_handed_back_is_tried_again_and_one_that_had_begun_is_not(
    script: Script,
) -> None:
    def use() -> None:
        with drafthouse.Client(script.target, retry=FAST) as client:
            assert client.generate("x").text() == "a"

    script.accepts = BEGUN
    script.refusals = [handed_back(has_begun=False)]
    await asyncio.to_thread(use)
    script.refusals = [handed_back(has_begun=False)]
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        assert await client.generate("x").text() == "a"
        assert script.n_calls == 4
        script.refusals = [handed_back(has_begun=True)]
        with pytest.raises(drafthouse.ServerDraining) as caught:
            await client.generate("x")
    assert caught.value.usage == drafthouse.Usage(7, 0)
    assert script.n_calls == 5


async def test_a_wait_that_is_too_long_is_the_callers_to_decide(script: Script) -> None:
    """A refusal for the rest of a long minute, or of the month, put the caller to sleep."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=121)]
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(drafthouse.QueueFull) as caught:
            await client.tokenize("x")
    assert caught.value.retry_after == 121
    assert script.n_calls == 1


@pytest.mark.parametrize("seconds", [2**62, -5, 10**15])
async def test_a_senseless_wait_is_an_error_of_ours_all_the_same(
    script: Script, seconds: int
) -> None:
    """An OverflowError of `timedelta` came out instead."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=seconds)]
    async with drafthouse.AsyncClient(script.target, retry=None) as client:
        with pytest.raises(drafthouse.QueueFull) as caught:
            await client.tokenize("x")
    assert caught.value.retry_after == max(0, seconds)


@pytest.mark.parametrize("seconds", [float("inf"), 1e12, 1e300])
async def test_a_timeout_without_end_is_none(script: Script, seconds: float) -> None:
    """The calls failed at once: their deadline had passed."""
    async with drafthouse.AsyncClient(script.target) as client:
        assert await client.tokenize("x", timeout=seconds) == [1]
        assert await client.generate("x", timeout=seconds).text() == "a"


async def test_a_timeout_that_is_no_number_is_refused(script: Script) -> None:
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(ValueError, match="timeout is not a number"):
            client.generate("x", timeout=float("nan"))
    assert script.n_calls == 0


async def test_the_server_says_how_long_to_wait(script: Script) -> None:
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=0.15)]
    async with drafthouse.AsyncClient(script.target, retry=FAST) as client:
        started = time.monotonic()
        await client.tokenize("x")
        assert time.monotonic() - started >= 0.15


async def test_no_wait_beyond_the_deadline(script: Script) -> None:
    """It would wait for longer than this test may take."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=900)]
    async with drafthouse.AsyncClient(script.target, retry=PATIENT) as client:
        with pytest.raises(drafthouse.QueueFull):
            await client.tokenize("x", timeout=600)


def announced(
    stream: drafthouse.GenerationStream | drafthouse.AsyncGenerationStream,
    monkeypatch: pytest.MonkeyPatch,
) -> threading.Event:
    """Returns what is set as soon as a stream is about to wait for its next attempt."""
    waits = threading.Event()
    delay_s = stream._attempts.delay_s

    def told(error: drafthouse.DrafthouseError) -> float:
        waits.set()
        return delay_s(error)

    monkeypatch.setattr(stream._attempts, "delay_s", told)
    return waits


async def test_a_stream_that_is_closed_while_it_waits_begins_no_other_call(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It slept on, and then began a generation that nobody read."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=900)]
    ends: list[BaseException] = []

    def use() -> None:
        with drafthouse.Client(script.target, retry=PATIENT) as client:
            stream = client.generate("x")
            waits = announced(stream, monkeypatch)

            def read() -> None:
                try:
                    stream.text()
                except drafthouse.DrafthouseError as error:
                    ends.append(error)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            assert waits.wait(100)
            stream.close()
            reader.join(100)
            assert not reader.is_alive()

    await asyncio.to_thread(use)
    assert [type(error) for error in ends] == [drafthouse.Cancelled]
    assert script.n_calls == 1


@contextlib.asynccontextmanager
async def a_reader_who_waits(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[drafthouse.AsyncGenerationStream, asyncio.Task[str]]]:
    """Gives a stream that waits for its next attempt, and the task that reads it."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=900)]
    async with drafthouse.AsyncClient(script.target, retry=PATIENT) as client:
        stream = client.generate("x")
        waits = announced(stream, monkeypatch)
        reader = asyncio.create_task(stream.text())
        assert await asyncio.to_thread(waits.wait, 100)
        yield stream, reader


async def test_an_asyncio_stream_that_is_closed_while_it_waits_begins_no_other_call(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_reader_who_waits(script, monkeypatch) as (stream, reader):
        await stream.aclose()
        with pytest.raises(drafthouse.Cancelled):
            await asyncio.wait_for(reader, 100)
    assert script.n_calls == 1


@pytest.mark.parametrize("n_turns", range(5))
async def test_a_reader_that_is_cancelled_as_its_stream_is_closed_is_cancelled(
    script: Script, monkeypatch: pytest.MonkeyPatch, n_turns: int
) -> None:
    """Under Python 3.11 `asyncio.wait_for` lost that, and who had cancelled it saw it fail."""
    async with a_reader_who_waits(script, monkeypatch) as (stream, reader):
        await stream.aclose()
        for _ in range(n_turns):
            await asyncio.sleep(0)
        kind = asyncio.CancelledError if reader.cancel() else drafthouse.Cancelled
        with pytest.raises(kind):
            await reader


@pytest.fixture
def any_wait(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What is set as soon as any call is about to wait for its next attempt."""
    waits = threading.Event()
    delay_s = Attempts.delay_s

    def told(attempts: Attempts, error: drafthouse.DrafthouseError) -> float:
        waits.set()
        return delay_s(attempts, error)

    monkeypatch.setattr(Attempts, "delay_s", told)
    return waits


@pytest.mark.parametrize("retry_s", [900, 2**62])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_closing_the_client_ends_a_call_that_waits(
    script: Script, any_wait: threading.Event, is_stream: bool, retry_s: int
) -> None:
    """It slept on, for as long as the server had asked for; or had an OverflowError of Python."""
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=retry_s)]
    client = drafthouse.Client(script.target, retry=PATIENT)
    ends: list[BaseException] = []

    def call() -> None:
        try:
            if is_stream:
                client.generate("x").text()
            else:
                client.tokenize("x")
        except drafthouse.DrafthouseError as error:
            ends.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert await asyncio.to_thread(any_wait.wait, 100)
    client.close()
    await asyncio.to_thread(caller.join, 100)
    assert [type(error) for error in ends] == [drafthouse.Cancelled]
    assert script.n_calls == 1


@pytest.mark.parametrize("is_stream", [True, False])
async def test_closing_the_asyncio_client_ends_a_call_that_waits(
    script: Script, any_wait: threading.Event, is_stream: bool
) -> None:
    script.refusals = [refusal(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_s=900)]
    client = drafthouse.AsyncClient(script.target, retry=PATIENT)

    async def call() -> None:
        await (client.generate("x") if is_stream else client.tokenize("x"))

    caller = asyncio.create_task(call())
    assert await asyncio.to_thread(any_wait.wait, 100)
    await client.aclose()
    with pytest.raises(drafthouse.Cancelled):
        await asyncio.wait_for(caller, 100)
    assert script.n_calls == 1


async def test_a_stream_without_a_result_is_an_error(script: Script) -> None:
    script.has_result = False
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(drafthouse.InternalError, match="without a result"):
            await client.generate("x")


async def test_who_reads_a_stream_that_has_failed_is_told_why(script: Script) -> None:
    """They were told that it was left, and what had happened was lost with the first reader."""
    script.refusals = [refusal(grpc.StatusCode.INTERNAL, reason="ENGINE_FAILURE")] * 2
    told = r"failed before: \[ENGINE_FAILURE\] refused"
    async with drafthouse.AsyncClient(script.target) as client:
        stream = client.generate("x")
        for error, words in ((drafthouse.EngineFailure, "refused"), (drafthouse.Cancelled, told)):
            with pytest.raises(error, match=words):
                await stream
    with drafthouse.Client(script.target) as blocking:
        left = blocking.generate("x")
        for error, words in ((drafthouse.EngineFailure, "refused"), (drafthouse.Cancelled, told)):
            with pytest.raises(error, match=words):
                await asyncio.to_thread(left.text)


async def test_a_newer_servers_reason_yields_the_class_of_its_code(script: Script) -> None:
    script.refusals = [refusal(grpc.StatusCode.NOT_FOUND, reason="ADAPTER_NOT_FOUND")]
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(drafthouse.NotFound) as caught:
            await client.tokenize("x")
    assert type(caught.value) is drafthouse.NotFound
    assert caught.value.reason == "ADAPTER_NOT_FOUND"


async def test_a_foreign_domains_reason_is_not_ours(script: Script) -> None:
    code = grpc.StatusCode.PERMISSION_DENIED
    script.refusals = [refusal(code, reason="MODEL_NOT_ALLOWED", domain="proxy.example")]
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(drafthouse.PermissionDenied) as caught:
            await client.tokenize("x")
    assert type(caught.value) is drafthouse.PermissionDenied


async def test_mangled_details_still_yield_the_class_of_the_code(script: Script) -> None:
    trailers = (("grpc-status-details-bin", b"\xff\xff"),)
    script.refusals = [(grpc.StatusCode.ABORTED, trailers), (grpc.StatusCode.INTERNAL, trailers)]
    async with drafthouse.AsyncClient(script.target) as client:
        with pytest.raises(drafthouse.DrafthouseError) as caught:
            await client.tokenize("x")
        assert caught.value.code is grpc.StatusCode.ABORTED
        with pytest.raises(drafthouse.InternalError):
            await client.tokenize("x")


async def test_a_mangled_detail_is_none(script: Script) -> None:
    mangled = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    status = Status(code=14, message="refused", details=[mangled])
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    script.refusals = [(grpc.StatusCode.UNAVAILABLE, trailers)]
    async with drafthouse.AsyncClient(script.target, retry=None) as client:
        with pytest.raises(drafthouse.Unavailable) as caught:
            await client.tokenize("x")
    assert caught.value.reason == ""


def test_the_budget_stops_retries_of_a_failing_server_until_successes_come() -> None:
    assert not RetryBudget(0).fail(), "no token, no retry"
    budget = RetryBudget(4)
    assert [budget.fail() for _ in range(3)] == [True, True, False]
    for _ in range(20):
        budget.succeed()
    assert budget.fail()


def test_waits_grow_and_are_bounded() -> None:
    policy = drafthouse.RetryPolicy(max_attempts=99, initial_delay_s=1.0, max_delay_s=5.0)
    assert [policy.backoff_s(n) for n in (1, 2, 3, 4, 5, 5000)] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    for _ in range(50):
        attempts = Attempts(policy, RetryBudget(100), None)
        assert 0.0 <= attempts.delay_s(drafthouse.Unavailable("")) <= 1.0
        assert 7.0 <= attempts.delay_s(drafthouse.QueueFull("", retry_after=7.0)) <= 9.0


def test_settings_by_position_mean_what_they_meant() -> None:
    policy = drafthouse.RetryPolicy(4, 0.1, 5.0, 7)
    assert (policy.budget, policy.max_retry_after_s) == (7, 120.0)


@pytest.mark.parametrize(("message", "is_tried_again"), [("CANCELLED", True), ("left", False)])
def test_a_call_that_a_transport_cancelled_unseen_is_tried_again(
    message: str, is_tried_again: bool
) -> None:
    """So ends what arrives while a server stops; a caller's own cancellation says more."""
    attempts = Attempts(FAST, RetryBudget(10), None)
    error = drafthouse.Cancelled(message)
    if is_tried_again:
        assert attempts.delay_s(error) >= 0.0
    else:
        with pytest.raises(drafthouse.Cancelled):
            attempts.delay_s(error)


def test_calls_that_a_stopping_server_has_not_seen_do_not_use_up_the_budget() -> None:
    """Of a crowd of callers, on a busy machine, all but five were told that they had cancelled."""
    budget = RetryBudget(10)
    for _ in range(30):
        assert Attempts(FAST, budget, None).delay_s(drafthouse.Cancelled("CANCELLED")) >= 0.0
    assert Attempts(FAST, budget, None).delay_s(drafthouse.Unavailable("gone")) >= 0.0


def test_a_server_is_looked_for_as_often_as_calls_are_tried_again() -> None:
    """Behind a long outage all calls failed for up to two minutes after the server was back."""
    options, within_ms = dict(CHANNEL_OPTIONS), drafthouse.RetryPolicy().max_delay_s * 1000
    assert options["grpc.max_reconnect_backoff_ms"] == within_ms
    assert options["grpc.dns_min_time_between_resolutions_ms"] == within_ms
