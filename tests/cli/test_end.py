"""The end of a server whose threads hang in a disk, or a store: bounded, and told."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from drafthouse_server.cli.serve import end_threads

WAIT_S = 100.0


def test_the_end_waits_for_no_thread_that_hangs_and_names_it() -> None:
    """An audit file, or a list of usage, on a disk that hung kept the process for ever."""
    told: list[str] = []
    may_end, is_stuck = threading.Event(), threading.Event()
    before, runner = frozenset(threading.enumerate()), asyncio.Runner()

    def hang() -> None:
        is_stuck.set()
        assert may_end.wait(WAIT_S)

    async def serve() -> None:
        asyncio.get_running_loop().run_in_executor(None, hang)
        assert await asyncio.to_thread(is_stuck.wait, WAIT_S)

    def leave(why: str) -> None:
        told.append(why)
        may_end.set()

    runner.run(serve())
    end_threads(runner, before, leave, 0.2)
    (why,) = told
    assert why.startswith("a disk, or a store, has not answered for 0.2 s (")
    assert "asyncio_0" in why


@pytest.mark.parametrize("has_pool", [False, True], ids=["alone", "beside idle threads"])
def test_the_end_waits_for_no_task_that_does_not_end(has_pool: bool) -> None:
    """One that loses its cancellation kept the process for ever."""
    told: list[str] = []
    may_end = threading.Event()
    before, runner = frozenset(threading.enumerate()), asyncio.Runner()

    async def go_on() -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def serve() -> asyncio.Task[None]:
        if has_pool:
            await asyncio.to_thread(int)
        task = asyncio.create_task(go_on())
        await asyncio.sleep(0)
        return task

    def leave(why: str) -> None:
        told.append(why)
        may_end.set()

    task = runner.run(serve())
    end_threads(runner, before, leave, 0.2)
    assert told == ["a task of the event loop has not ended within 0.2 s"]
    assert task.done()


def test_a_server_whose_threads_end_ends_without_a_word() -> None:
    told: list[str] = []
    before, runner = frozenset(threading.enumerate()), asyncio.Runner()

    async def serve() -> None:
        await asyncio.to_thread(int)

    runner.run(serve())
    end_threads(runner, before, told.append, WAIT_S)
    assert not told
