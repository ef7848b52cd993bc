"""The loads that `drafthouse-bench peers` puts on a contender; the same for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass

from drafthouse_bench.peers.contender import OURS, THEIRS, Client, Running
from drafthouse_bench.process import BenchError, cpu_s
from drafthouse_bench.report import percentile
from drafthouse_bench.trace import PeerLoad, Trace, gaps_between

__all__ = ["Prompts", "StallResult", "agreement", "run_closed", "run_open", "run_stall"]

Prompts = Sequence[Sequence[int]]
"""Token ids of one request each, in the order in which they are sent."""

_STALL_S = 300.0
"""A long prompt that takes longer is a failure."""


async def run_closed(
    running: Running, prompts: Prompts, n_output: int | Sequence[int], n_streams: int
) -> PeerLoad:
    """Keeps so many requests running until all prompts are done.

    Args:
        running: The contender.
        prompts: Taken in this order.
        n_output: Tokens of each output, or of all.
        n_streams: Requests at once.

    Raises:
        BenchError: a request failed.
        drafthouse.DrafthouseError: likewise.
    """
    lengths = [n_output] * len(prompts) if isinstance(n_output, int) else n_output
    queue = iter(zip(prompts, lengths, strict=True))
    traces: list[Trace] = []

    async def stream() -> None:
        for prompt, length in queue:
            trace = Trace(time.perf_counter())
            traces.append(trace)
            await running.client.stream(prompt, length, trace)

    async with _measured(running, traces) as load:
        await _together([stream() for _ in range(n_streams)])
    return load


async def run_open(
    running: Running, prompts: Prompts, n_output: int, arrivals_s: Sequence[float]
) -> PeerLoad:
    """Sends requests at given times, whatever became of those before.

    Latency counts from the time at which a request should have been sent, so a client that is late
    hides nothing.

    Args:
        running: The contender.
        prompts: At least as many as arrivals.
        n_output: Tokens of each request.
        arrivals_s: Seconds from the start, ascending.

    Raises:
        BenchError: a request failed.
        drafthouse.DrafthouseError: likewise.
    """
    traces: list[Trace] = []
    started = time.perf_counter()

    async def request(at_s: float, prompt: Sequence[int]) -> None:
        await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
        trace = Trace(started + at_s)
        traces.append(trace)
        await running.client.stream(prompt, n_output, trace)

    async with _measured(running, traces) as load:
        await _together(
            [request(at, prompt) for at, prompt in zip(arrivals_s, prompts, strict=False)]
        )
    return load


@dataclass(frozen=True, slots=True)
class StallResult:
    """What a long prompt of another tenant did to running streams, and they to it."""

    gap_p99_before_s: float
    """Gap between tokens of the streams before it came, 99th percentile."""
    gap_p99_during_s: float
    """Gap between tokens from the prompt's call to its first token, 99th percentile."""
    gap_max_during_s: float
    """The longest of these."""
    ttft_s: float
    """The long prompt's call to first token, with the streams."""
    ttft_alone_s: float
    """The long prompt's call to first token, without the streams."""
    n_gaps_before: int
    """Gaps behind the first number."""
    n_gaps_during: int
    """Gaps behind the second and third."""


async def run_stall(
    running: Running,
    prompts: Prompts,
    long_prompt: Sequence[int],
    n_output: int,
    lead_s: float,
) -> StallResult:
    """Lets streams run, then sends a long prompt of another tenant.

    Args:
        running: The contender.
        prompts: One short prompt a stream; a stream that ends starts again.
        long_prompt: The other tenant's.
        n_output: Tokens of each stream's request.
        lead_s: How long the streams run before it comes.

    Raises:
        BenchError: a request failed.
        drafthouse.DrafthouseError: likewise.
    """
    alone = await _long(running.other, long_prompt)
    traces: list[Trace] = []

    async def stream(prompt: Sequence[int]) -> None:
        while True:
            trace = Trace(time.perf_counter())
            traces.append(trace)
            await running.client.stream(prompt, n_output, trace)

    streams = [asyncio.create_task(stream(prompt)) for prompt in prompts]
    try:
        await _until_started(traces, len(prompts), streams)
        begun_s = time.perf_counter()
        await asyncio.sleep(lead_s)
        called_s = time.perf_counter()
        long = await _long(running.other, long_prompt)
        first_s = called_s + (long.ttft_s or 0.0)
        # The gap that was open when the long prompt was done must be seen to its end.
        await asyncio.sleep(0.2)
        _raise_failed(streams)
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    before = [
        gap
        for trace in traces
        for ended, gap in trace.token_gaps()
        if begun_s <= ended - gap and ended <= called_s
    ]
    during = gaps_between(traces, called_s, first_s)
    return StallResult(
        gap_p99_before_s=percentile(before, 0.99),
        gap_p99_during_s=percentile(during, 0.99),
        gap_max_during_s=max(during, default=0.0),
        ttft_s=long.ttft_s or 0.0,
        ttft_alone_s=alone.ttft_s or 0.0,
        n_gaps_before=len(before),
        n_gaps_during=len(during),
    )


async def agreement(
    ours: Client,
    theirs: Client,
    prompts: Prompts,
    n_output: int,
    report: Callable[[str], None] = lambda _: None,
) -> list[int]:
    """Returns for each prompt how many greedy tokens agree from the start; n_output: all.

    Where they differ the candidates may tie: `tests/serving/test_crowd.py` shows when ours do.

    Args:
        ours: Our server.
        theirs: llama-server.
        prompts: All asked at once, of both.
        n_output: Tokens of an answer.
        report: Told in a sentence where answers part, and whose is another one when asked alone.
    """

    async def ask(prompt: Sequence[int]) -> tuple[list[int], list[int]]:
        return await asyncio.gather(ours.whole(prompt, n_output), theirs.whole(prompt, n_output))

    found = []
    for i, (mine, other) in enumerate(await asyncio.gather(*map(ask, prompts))):
        pairs = enumerate(zip(mine, other, strict=False))
        n_common = next((k for k, (a, b) in pairs if a != b), min(len(mine), len(other)))
        found.append(n_common)
        if mine != other:
            changed = []
            for name, client, before in ((OURS, ours, mine), (THEIRS, theirs, other)):
                if await client.whole(prompts[i], n_output) != before:
                    changed.append(name)
            whose = " and ".join(changed) or "nobody"
            report(f"prompt {i} parts after {n_common} tokens; asked alone, {whose} changes it")
    return found


@contextlib.asynccontextmanager
async def _measured(running: Running, traces: list[Trace]) -> AsyncIterator[PeerLoad]:
    """Fills the load's times when its block has ended."""
    load = PeerLoad(traces, 0.0, 0.0, None)
    before = cpu_s(running.pid)
    client_s, started = time.process_time(), time.perf_counter()
    yield load
    load.elapsed_s = time.perf_counter() - started
    load.client_cpu_s = time.process_time() - client_s
    after = cpu_s(running.pid)
    load.server_cpu_s = None if before is None or after is None else after - before


async def _together(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs coroutines at once; the first failure ends all of them and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _long(client: Client, prompt: Sequence[int]) -> Trace:
    trace = Trace(time.perf_counter())
    try:
        async with asyncio.timeout(_STALL_S):
            await client.stream(prompt, 1, trace)
    except TimeoutError:
        raise BenchError(f"a prompt of {len(prompt)} tokens takes over {_STALL_S:.0f} s") from None
    return trace


async def _until_started(
    traces: list[Trace], n_streams: int, streams: Sequence[asyncio.Task[None]]
) -> None:
    until_s = time.perf_counter() + _STALL_S
    while sum(bool(trace.arrivals) for trace in traces) < n_streams:
        _raise_failed(streams)
        if time.perf_counter() > until_s:
            raise BenchError("the streams do not start")
        await asyncio.sleep(0.01)


def _raise_failed(streams: Sequence[asyncio.Task[None]]) -> None:
    for task in streams:
        if task.done():
            task.result()
