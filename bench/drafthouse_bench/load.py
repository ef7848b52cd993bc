"""The load of a benchmark: the same requests for every contender, kept up by so many streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import drafthouse

__all__ = ["Load", "LoadResult", "cut_prompts", "run_load"]

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly, however many one takes."""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: so many streams, each with a new request as soon as its last one has ended.

    All requests are greedy and go on past the model's end token, so that every contender generates
    exactly the same number of tokens.
    """

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of one request each, in the order in which streams take them."""
    n_output: int
    """Tokens that each request generates."""
    n_streams: int
    """Requests at once."""


def cut_prompts(
    texts: Sequence[Sequence[int]], n_prompts: int, n_least: int = 64, n_most: int = 256
) -> tuple[tuple[int, ...], ...]:
    """Returns prompts of mixed lengths; the same arguments give the same prompts.

    Args:
        texts: Token ids of long texts, taken in turn; used again when there are too few.
        n_prompts: How many to cut, >= 1.
        n_least: Tokens of the shortest.
        n_most: Tokens of the longest.
    """
    n_choices = n_most - n_least + 1
    lengths = [n_least + int(i * _GOLDEN % 1.0 * n_choices) for i in range(n_prompts)]
    return tuple(tuple(texts[i % len(texts)][:length]) for i, length in enumerate(lengths))


@dataclass(slots=True)
class LoadResult:
    """What the client of a load has seen."""

    elapsed_s: float = 0.0
    """From the first call to the last end."""
    n_output: int = 0
    """Tokens received."""
    n_messages: int = 0
    """Messages with tokens."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    first_tokens_s: list[float] = field(default_factory=list)
    """Seconds from the call to the first token, of each request."""
    gaps_s: list[float] = field(default_factory=list)
    """Between the messages of each request."""
    client_cpu_s: float = 0.0
    """CPU time of the client's process."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all streams."""
        return self.n_output / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def tokens_per_message(self) -> float:
        """Mean."""
        return self.n_output / self.n_messages if self.n_messages else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that were accepted; None when none was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None


async def run_load(client: drafthouse.AsyncClient, load: Load) -> LoadResult:
    """Puts a load on a server.

    Args:
        client: Connected to the server.
        load: What to send.

    Raises:
        drafthouse.DrafthouseError: a request failed.
    """
    result = LoadResult()
    queue = iter(load.prompts)
    cpu_s, started = time.process_time(), time.perf_counter()
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as streams:
            for _ in range(load.n_streams):
                streams.create_task(_run_stream(client, queue, load.n_output, result))
    except* drafthouse.DrafthouseError as errors:
        failed = errors.exceptions[0]  # raised here, Python 3.11.2 would put it into a group again
    if failed is not None:
        raise failed
    result.elapsed_s = time.perf_counter() - started
    result.client_cpu_s = time.process_time() - cpu_s
    return result


async def _run_stream(
    client: drafthouse.AsyncClient,
    queue: Iterator[tuple[int, ...]],
    n_output: int,
    result: LoadResult,
) -> None:
    for prompt in queue:
        stream = client.generate(
            prompt, max_output_tokens=n_output, temperature=0.0, ignore_end_token=True
        )
        await _watch(stream, result)


async def _watch(stream: drafthouse.AsyncGenerationStream, result: LoadResult) -> None:
    """Reads one generation and notes when its messages come."""
    last = time.perf_counter()
    is_first = True
    async for chunk in stream:
        if not chunk.token_ids:
            continue
        now = time.perf_counter()
        # The first one's predecessor is the call itself.
        (result.first_tokens_s if is_first else result.gaps_s).append(now - last)
        is_first, last = False, now
        result.n_messages += 1
        result.n_output += len(chunk.token_ids)
    counts = (await stream).speculation
    result.n_drafted += counts.n_drafted
    result.n_accepted += counts.n_accepted
