"""The SDK's clients against a server in this process: what they return, how a stream is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

import drafthouse
from drafthouse._retry import RetryBudget
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory


@pytest.fixture
async def slow_server(start_server: ServerFactory) -> Server:
    """A server whose generations would take many seconds to end by themselves."""
    return await start_server(FakeEngine(step_s=0.02))


@pytest.fixture
async def slow_client(slow_server: Server) -> AsyncIterator[drafthouse.AsyncClient]:
    async with drafthouse.AsyncClient(slow_server.target) as client:
        yield client


def is_free(server: Server) -> Callable[[], bool]:
    def condition() -> bool:
        statistics = server.loop.statistics()
        return statistics.n_running == 0 and statistics.n_requests.get("cancelled") == 1

    return condition


async def test_every_call_of_the_blocking_client(server: Server) -> None:
    def use() -> None:
        with drafthouse.Client(server.target) as client:
            assert client.health()
            assert client.tokenize("ab", add_special=True) == [256, 97, 98]
            assert client.detokenize([97, 98]) == "ab"
            assert client.count_tokens("ab") == drafthouse.TokenCount(3, 1024)
            assert [model.name for model in client.list_models(page_size=1)] == ["fake"]
            assert client.get_model().slot_count == 4
            chunks = list(client.generate("x", temperature=0, max_output_tokens=20))
            result = client.generate("x", temperature=0, max_output_tokens=20).result()
            text = client.generate("x", temperature=0, max_output_tokens=20).text()
            assert result.text == text == "".join(map(str, chunks))
            assert sum((chunk.token_ids for chunk in chunks), ()) == result.token_ids

    await asyncio.to_thread(use)


async def test_result_after_a_loop_holds_all_of_it(client: drafthouse.AsyncClient) -> None:
    stream = client.generate("x", temperature=0, max_output_tokens=20, log_probabilities=True)
    text = ""
    async for chunk in stream:
        text += chunk.text
    result = await stream.result()
    assert result.text == text == await stream.text()
    assert len(result.token_ids) == len(result.log_probabilities) == 20
    assert [chunk async for chunk in stream] == []


async def test_all_options_reach_the_server(client: drafthouse.AsyncClient) -> None:
    result = await client.generate(
        "x",
        model="fake",
        max_output_tokens=3,
        temperature=0.5,
        top_k=10,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.9,
        top_n_sigma=2.0,
        repeat_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        penalty_last_tokens=32,
        dry=drafthouse.Dry(breakers=["\n"], last_tokens=10),
        xtc=drafthouse.Xtc(0.1, threshold=0.2),
        logit_bias={65: 1.0},
        seed=1,
        stop="never",
        stop_token_ids=[0],
        ignore_end_token=True,
        log_probabilities=True,
        speculation="mtp",
        max_draft_tokens=2,
        priority=5,
        timeout=100.0,
        request_id="r1",
    )
    assert result.usage.output_tokens == 3
    assert result.request_id.startswith("req_")
    result = await client.generate("x", grammar='root ::= "a"', max_output_tokens=3)
    assert result.usage.output_tokens == 3


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 11}, "sampling.temperature"),
    ({"repeat_penalty": 0}, "sampling.penalties.repeat"),
    ({"frequency_penalty": 11}, "sampling.penalties.frequency"),
    ({"presence_penalty": 11}, "sampling.penalties.presence"),
    ({"penalty_last_tokens": -2}, "sampling.penalties.last_tokens"),
    ({"dry": drafthouse.Dry(base=0)}, "sampling.dry.base"),
    ({"xtc": drafthouse.Xtc(2.0)}, "sampling.xtc.probability"),
    ({"logit_bias": {65: 101.0}}, "sampling.logit_bias[0].bias"),
    ({"stop": ["a", ""]}, "stop.sequences[1]"),
    ({"stop_token_ids": [-1]}, "stop.token_ids[0]"),
    ({"ignore_end_token": True, "grammar": 'root ::= "a"'}, "stop.ignore_end_token"),
    ({"speculation": "eagle3"}, "speculation.mode"),
    ({"max_draft_tokens": 99}, "speculation.max_draft_tokens"),
    ({"priority": 101}, "priority"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"model": "x" * 300}, "model"),
]


@pytest.mark.parametrize(("options", "field"), BAD_OPTIONS, ids=[f for _, f in BAD_OPTIONS])
async def test_each_option_lands_in_its_field(
    client: drafthouse.AsyncClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(drafthouse.InvalidField) as caught:
        await client.generate("x", **options)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([2**31], {}),
        ("\ud800", {}),
        ("x", {"max_output_tokens": 2**40}),
        ("x", {"seed": -1}),
        ("x", {"speculation": "magic"}),
    ],
)
async def test_what_cannot_be_sent_is_an_invalid_field_too(
    client: drafthouse.AsyncClient, prompt: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(drafthouse.InvalidField) as caught:
        client.generate(prompt, **options)
    assert len(caught.value.violations) == 1
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_misspelt_option_is_a_type_error(client: drafthouse.AsyncClient) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("x", temprature=1)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(TypeError, match="chat message"):
        client.generate([{"role": "user"}])


async def test_break_frees_the_slot(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    stream = slow_client.generate("x")
    async for _ in stream:
        break
    await eventually(is_free(slow_server))
    with pytest.raises(drafthouse.Cancelled):
        await stream.result()


async def test_an_exception_in_the_loop_frees_the_slot(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    stream = slow_client.generate("x")

    async def consume() -> None:
        async for _ in stream:
            raise LookupError

    with pytest.raises(LookupError):
        await consume()
    await eventually(is_free(slow_server))


async def test_a_cancelled_task_frees_the_slot(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    task = asyncio.create_task(slow_client.generate("x").result())
    await eventually(lambda: slow_server.loop.statistics().n_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(is_free(slow_server))


async def test_leaving_the_block_frees_the_slot(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    async with slow_client.generate("x") as stream:
        chunks = aiter(stream)
        await anext(chunks)
    await eventually(is_free(slow_server))


async def test_a_forgotten_stream_frees_the_slot(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    stream = slow_client.generate("x")
    await eventually(lambda: slow_server.loop.statistics().n_running == 1)
    del stream
    gc.collect()
    await eventually(is_free(slow_server))


async def test_another_task_closes_the_stream_under_a_reader(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    stream = slow_client.generate("x")
    reader = asyncio.create_task(stream.result())
    await eventually(lambda: slow_server.loop.statistics().n_running == 1)
    await stream.aclose()
    with pytest.raises(drafthouse.Cancelled):
        await reader
    await eventually(is_free(slow_server))


async def test_a_finished_stream_is_left_without_a_cancellation(
    client: drafthouse.AsyncClient, server: Server
) -> None:
    async with client.generate("x", max_output_tokens=2) as stream:
        await stream
    assert server.loop.statistics().n_requests == {"length": 1}


def leave_by_break(client: drafthouse.Client) -> None:
    stream = client.generate("x")
    for _ in stream:
        break
    with pytest.raises(drafthouse.Cancelled):
        stream.result()


def leave_by_exception(client: drafthouse.Client) -> None:
    stream = client.generate("x")

    def consume() -> None:
        for _ in stream:
            raise LookupError

    with pytest.raises(LookupError):
        consume()


def leave_by_block(client: drafthouse.Client) -> None:
    with client.generate("x") as stream:
        next(iter(stream))


def leave_by_forgetting(client: drafthouse.Client) -> None:
    iter(client.generate("x"))


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_exception, leave_by_block, leave_by_forgetting]
)
async def test_leaving_a_blocking_stream_frees_the_slot(
    slow_server: Server, eventually: Eventually, leave: Callable[[drafthouse.Client], None]
) -> None:
    client = drafthouse.Client(slow_server.target)
    try:
        await asyncio.to_thread(leave, client)
        statistics = slow_server.loop.statistics
        await eventually(lambda: statistics().n_running == statistics().n_waiting == 0)
        assert statistics().n_requests.get("length") is None
    finally:
        client.close()


async def test_closing_the_blocking_client_ends_its_streams(
    slow_server: Server, eventually: Eventually
) -> None:
    client = drafthouse.Client(slow_server.target, retry=None)
    stream = client.generate("x")
    chunks: Iterator[drafthouse.Chunk] = iter(stream)
    await asyncio.to_thread(next, chunks)
    client.close()
    with pytest.raises(drafthouse.Cancelled):
        await asyncio.to_thread(list, chunks)
    await eventually(is_free(slow_server))


class Interrupted(weakref.WeakSet[Any]):
    """Streams of a client which is closed by the handler of a signal as one of them is added."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self.close = close

    def add(self, item: Any) -> None:
        self.close()
        super().add(item)


async def test_a_handler_of_a_signal_may_close_the_client_at_any_time(
    slow_server: Server, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the lock that its own thread held; and the stream was none of those closed."""
    client = drafthouse.Client(slow_server.target, retry=None)
    with monkeypatch.context() as patched:
        patched.setattr(client, "_channel", Mock())  # whose end would end the stream, too
        patched.setattr(client, "_streams", Interrupted(client.close))
        ends = list[drafthouse.GenerationStream]()
        caller = threading.Thread(target=lambda: ends.append(client.generate("x")), daemon=True)
        caller.start()
        await asyncio.to_thread(caller.join, 60)
    with pytest.raises(drafthouse.Cancelled):
        ends[0].result()
    client.close()
    statistics = slow_server.loop.statistics
    await eventually(lambda: statistics().n_running == statistics().n_waiting == 0)


def test_a_handler_of_a_signal_may_call_while_a_call_is_counted() -> None:
    budget = RetryBudget(10)
    done = threading.Event()

    def call() -> None:
        with budget._lock:  # as it is counted
            budget.succeed()
            budget.fail()
        done.set()

    threading.Thread(target=call, daemon=True).start()
    assert done.wait(60)


async def test_closing_the_client_ends_its_streams_and_later_calls(
    slow_server: Server, eventually: Eventually
) -> None:
    client = drafthouse.AsyncClient(slow_server.target, retry=None)
    chunks = aiter(client.generate("x"))
    await anext(chunks)
    await client.aclose()
    with pytest.raises(drafthouse.Cancelled):
        await anext(chunks)
    with pytest.raises(drafthouse.Cancelled):
        await client.tokenize("x")
    await eventually(is_free(slow_server))


async def test_closing_the_client_ends_streams_of_which_its_channel_knows_nothing(
    slow_server: Server, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gRPC before 1.83 a stream that no task waited for ran on to its last token."""
    client = drafthouse.AsyncClient(slow_server.target, retry=None)
    chunks = aiter(client.generate("x"))
    await anext(chunks)
    with monkeypatch.context() as patched:
        patched.setattr(client, "_channel", AsyncMock())
        await client.aclose()
    with pytest.raises(drafthouse.Cancelled):
        await anext(chunks)
    await eventually(is_free(slow_server))
    await client.aclose()


async def test_timeout_is_the_deadline_of_the_whole_call(
    slow_client: drafthouse.AsyncClient, slow_server: Server
) -> None:
    started = time.monotonic()
    with pytest.raises(drafthouse.DeadlineExceeded):
        await slow_client.generate("x", timeout=0.2)
    assert time.monotonic() - started > 0.15

    def block() -> None:
        with (
            drafthouse.Client(slow_server.target) as client,
            pytest.raises(drafthouse.DeadlineExceeded),
        ):
            client.generate("x", timeout=0.2).result()

    await asyncio.to_thread(block)


async def test_no_server_is_unavailable(free_port: int) -> None:
    async with drafthouse.AsyncClient(f"127.0.0.1:{free_port}", retry=None) as client:
        for call in (client.tokenize("x"), client.generate("x").result(), client.health()):
            with pytest.raises(drafthouse.Unavailable) as caught:
                await call
            assert caught.value.reason == ""
            assert isinstance(caught.value.__cause__, grpc.RpcError)


async def test_errors_carry_what_the_server_said(client: drafthouse.AsyncClient) -> None:
    with pytest.raises(drafthouse.ContextTooLong) as caught:
        await client.generate([1] * 1000, max_output_tokens=25, request_id="r9")
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "CONTEXT_TOO_LONG"
    assert error.metadata["contextTokens"] == "1024"
    assert error.request_id.startswith("req_")
    assert str(error).startswith("[CONTEXT_TOO_LONG] 1000 prompt tokens")
    assert str(error).endswith(f"(request {error.request_id})")


async def cancelled_before() -> None:
    """Leaves a task as one is left that has outlived a cancellation.

    Under Python 3.11 and 3.12 a `TaskGroup` leaves it so, one of whose tasks has failed.
    """
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert task.cancelling() == 1


async def test_a_task_that_was_cancelled_before_is_not_when_its_stream_is_closed(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    stream = slow_client.generate("x")

    async def read() -> None:
        await cancelled_before()
        await stream

    reader = asyncio.create_task(read())
    await eventually(lambda: slow_server.loop.statistics().n_running == 1)
    await stream.aclose()
    with pytest.raises(drafthouse.Cancelled):
        await reader


async def test_a_task_that_cancels_itself_is_cancelled(
    slow_client: drafthouse.AsyncClient, slow_server: Server, eventually: Eventually
) -> None:
    async def read() -> None:
        chunks = aiter(slow_client.generate("x"))
        await anext(chunks)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anext(chunks)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(read())
    await eventually(is_free(slow_server))


@pytest.mark.parametrize("method", ["tokenize", "health"])
@pytest.mark.parametrize("prepare", [cancelled_before, AsyncMock()])
async def test_a_call_whose_client_is_closed_is_cancelled_and_not_its_task(
    method: str, prepare: Callable[[], Awaitable[None]]
) -> None:
    """A bare CancelledError: in a group of tasks the one that called vanished without a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = drafthouse.AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}", retry=None)

        async def call() -> None:
            await prepare()
            await (client.tokenize("x") if method == "tokenize" else client.health(timeout=None))

        calling = asyncio.create_task(call())
        await asyncio.sleep(0.1)
        await client.aclose()
        async with asyncio.timeout(60):
            with pytest.raises(drafthouse.Cancelled):
                await calling
        assert not calling.cancelled()
