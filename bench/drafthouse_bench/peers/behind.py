"""Short prompts behind long ones, while nobody generates: how long they wait.

Each server with its own defaults; ours has two tenants besides, and the short prompts are the other
one's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from drafthouse_bench.peers.case import PeerCase
from drafthouse_bench.peers.contender import Client, Running
from drafthouse_bench.peers.scenario import Prompts
from drafthouse_bench.report import percentile
from drafthouse_bench.trace import Trace
from drafthouse_server.cli.terminal import format_table

__all__ = ["BehindResult", "BehindRow", "behind_lines", "draw_prompts", "run_behind"]

N_SHORT = 8
"""Tokens of a short prompt."""

_N_LONG = 3
"""Long prompts of a turn, one after the other."""
_N_ALONE = 5
_PAUSE_S = 0.3, 1.0
"""Seconds between two short prompts, at least and at most."""


@dataclass(frozen=True, slots=True)
class BehindResult:
    """One turn; times to first token in seconds."""

    short_alone_s: float
    """A short prompt's, alone; median."""
    short_p50_s: float
    """A short prompt's, while long ones are computed; median."""
    short_p95_s: float
    """The same; 95th percentile."""
    long_alone_s: float
    """A long prompt's, alone."""
    long_s: float
    """A long prompt's beside the short ones; median."""
    n_short: int
    """Short prompts behind the second and third number."""


@dataclass(frozen=True, slots=True)
class BehindRow:
    """A case of short prompts behind long ones."""

    case: PeerCase
    """What was measured; `n_prompt` is the long prompts' length."""
    ours: list[BehindResult]
    """Our server, round by round."""
    theirs: list[BehindResult]
    """llama-server."""


def draw_prompts(n_known: int, n_tokens: int, n_prompts: int, seed: int) -> list[list[int]]:
    """Returns prompts of random tokens, of which no cache knows one.

    Args:
        n_known: Token ids are below it.
        n_tokens: Of each.
        n_prompts: How many.
        seed: The same gives the same.
    """
    chance = random.Random(seed)
    return [[chance.randrange(n_known) for _ in range(n_tokens)] for _ in range(n_prompts)]


async def run_behind(running: Running, n_known: int, n_long: int, seed: int) -> BehindResult:
    """Sends long prompts one after the other, and meanwhile another tenant's short ones.

    Args:
        running: The contender.
        n_known: Token ids are below it.
        n_long: Tokens of a long prompt.
        seed: Another one for each round.

    Raises:
        BenchError: a request failed.
        drafthouse.DrafthouseError: likewise.
    """
    longs = draw_prompts(n_known, n_long, 1 + _N_LONG, seed)
    pauses = random.Random(seed)
    short_alone = await _in_turn(running.other, draw_prompts(n_known, N_SHORT, _N_ALONE, seed + 1))
    (long_alone,) = await _in_turn(running.client, longs[:1])
    behind: list[float] = []

    async def short_ones() -> None:
        for i in itertools.count():
            await asyncio.sleep(pauses.uniform(*_PAUSE_S))
            prompt = draw_prompts(n_known, N_SHORT, 1, seed + 1000 + i)[0]
            behind.append(await _ttft_s(running.other, prompt))

    task = asyncio.create_task(short_ones())
    try:
        long = await _in_turn(running.client, longs[1:])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
    return BehindResult(
        short_alone_s=statistics.median(short_alone),
        short_p50_s=percentile(behind, 0.5),
        short_p95_s=percentile(behind, 0.95),
        long_alone_s=long_alone,
        long_s=statistics.median(long),
        n_short=len(behind),
    )


async def _in_turn(client: Client, prompts: Prompts) -> list[float]:
    return [await _ttft_s(client, prompt) for prompt in prompts]


async def _ttft_s(client: Client, prompt: Sequence[int]) -> float:
    trace = Trace(time.perf_counter())
    await client.stream(prompt, 1, trace)
    return trace.ttft_s or 0.0


_HEADER = (
    "server", "long prompts of", "short alone", "p50 ms", "p95 ms", "long alone", "beside s", "n",
)  # fmt: skip


def behind_lines(rows: Sequence[BehindRow]) -> list[str]:
    """Returns the lines of a table: two rows per case, medians over rounds."""
    cells = []
    for row in rows:
        for name, turns in (("drafthouse", row.ours), ("llama-server", row.theirs)):
            short = [
                f"{1000 * statistics.median(values):.0f}"
                for values in (
                    [turn.short_alone_s for turn in turns],
                    [turn.short_p50_s for turn in turns],
                    [turn.short_p95_s for turn in turns],
                )
            ]
            long = [
                f"{statistics.median(values):.1f}"
                for values in (
                    [turn.long_alone_s for turn in turns],
                    [turn.long_s for turn in turns],
                )
            ]
            n = sum(turn.n_short for turn in turns)
            cells.append([name, str(row.case.n_prompt), *short, *long, str(n)])
    return format_table(_HEADER, cells)
