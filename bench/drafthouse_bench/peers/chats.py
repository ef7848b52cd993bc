"""Conversations, more of them than slots: how soon the next turn begins, and what is reused.

Each server with its own defaults. Every turn's prompt is all that was said before and a new
message, as chat clients send it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from drafthouse_bench.peers.case import PeerCase
from drafthouse_bench.peers.contender import Client, Running
from drafthouse_bench.report import percentile
from drafthouse_bench.trace import Trace
from drafthouse_server.cli.terminal import format_table

__all__ = ["Chat", "ChatsResult", "ChatsRow", "chats_lines", "draw_chats", "longest", "run_chats"]

_N_TURNS = 4
_MESSAGE = 16, 48
"""Tokens of a message after the first, at least and at most."""
_OUTPUT = 8, 56
_PAUSE_S = 0.5, 2.0
"""Seconds between an answer and the next message."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a client says in a conversation."""

    messages: tuple[list[int], ...]
    """Token ids of each turn's message; the first is the longest."""
    lengths: tuple[int, ...]
    """Tokens of each turn's answer."""
    pauses_s: tuple[float, ...]
    """Seconds before each turn."""


@dataclass(frozen=True, slots=True)
class ChatsResult:
    """One turn of a contender; times in seconds."""

    tokens_per_s: float
    """Of all conversations together."""
    first_p50_s: float
    """From the first message's call to its first token; median."""
    later_p50_s: float
    """The same of messages after the first."""
    later_p95_s: float
    """The same; 95th percentile."""
    gap_p99_s: float
    """Between two tokens of an answer; 99th percentile."""
    reused: float
    """Share of what earlier turns had computed that later ones did not compute again."""
    first_reused: float
    """Share of the first messages that was not computed, since others begin alike."""
    n_unnamed: int
    """Tokens of answers whose ids the stream left out, as llama-server's does inside a character:
    later turns lack them, and nothing behind them is reused."""


@dataclass(frozen=True, slots=True)
class ChatsRow:
    """A case of conversations."""

    case: PeerCase
    """What was measured; `n_prompt` is the first message's mean length."""
    ours: list[ChatsResult]
    """Our server, round by round."""
    theirs: list[ChatsResult]
    """llama-server."""


def draw_chats(
    n_known: int, n_first: int, n_chats: int, seed: int, n_shared: int = 0
) -> list[Chat]:
    """Returns conversations of random tokens, of which no cache knows one.

    Args:
        n_known: Token ids are below it.
        n_first: Mean length of first messages, which lie between half of it and half more.
        n_chats: How many.
        seed: The same gives the same.
        n_shared: Tokens that all begin with, besides: what a program tells a model each time.
    """
    chance = random.Random(seed)
    shared = [chance.randrange(n_known) for _ in range(n_shared)]

    def message(low: int, high: int) -> list[int]:
        return [chance.randrange(n_known) for _ in range(chance.randint(low, high))]

    return [
        Chat(
            (
                [*shared, *message(n_first // 2, n_first + n_first // 2)],
                *(message(*_MESSAGE) for _ in range(1, _N_TURNS)),
            ),
            tuple(chance.randint(*_OUTPUT) for _ in range(_N_TURNS)),
            tuple(chance.uniform(*_PAUSE_S) for _ in range(_N_TURNS)),
        )
        for _ in range(n_chats)
    ]


def longest(n_first: int) -> int:
    """Returns the tokens of the longest conversation that may be drawn, its answers included."""
    return n_first + n_first // 2 + (_N_TURNS - 1) * _MESSAGE[1] + _N_TURNS * _OUTPUT[1]


async def run_chats(running: Running, chats: Sequence[Chat]) -> ChatsResult:
    """Holds all conversations at once.

    Args:
        running: The contender.
        chats: The conversations.

    Raises:
        BenchError: a request failed.
        drafthouse.DrafthouseError: likewise.
    """
    started = time.perf_counter()
    held = await asyncio.gather(*(_hold(running.client, chat) for chat in chats))
    elapsed_s = time.perf_counter() - started
    first = [turns[0] for turns in held]
    later = [turn for turns in held for turn in turns[1:]]
    traces = [turn.trace for turn in (*first, *later)]
    waits = [turn.trace.ttft_s or 0.0 for turn in later]
    return ChatsResult(
        tokens_per_s=sum(trace.n_output for trace in traces) / elapsed_s,
        first_p50_s=percentile([turn.trace.ttft_s or 0.0 for turn in first], 0.5),
        later_p50_s=percentile(waits, 0.5),
        later_p95_s=percentile(waits, 0.95),
        gap_p99_s=percentile([gap for trace in traces for _, gap in trace.token_gaps()], 0.99),
        reused=sum(turn.trace.n_reused for turn in later) / sum(turn.n_before for turn in later),
        first_reused=sum(turn.trace.n_reused for turn in first)
        / sum(len(chat.messages[0]) for chat in chats),
        n_unnamed=sum(trace.n_output - len(trace.token_ids) for trace in traces),
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    trace: Trace
    n_before: int  # tokens of the turn's prompt that were computed for earlier turns


async def _hold(client: Client, chat: Chat) -> list[_Turn]:
    """Holds one conversation."""
    said: list[int] = []
    turns: list[_Turn] = []
    for message, length, pause_s in zip(chat.messages, chat.lengths, chat.pauses_s, strict=True):
        await asyncio.sleep(pause_s)
        n_before = len(said)
        said += message
        trace = Trace(time.perf_counter())
        await client.stream(said, length, trace)
        said += trace.token_ids
        turns.append(_Turn(trace, n_before))
    return turns


_HEADER = (
    "server", "chats", "first message", "tokens/s", "first p50 s", "later p50", "p95 s",
    "gap p99 ms", "reused", "of first",
)  # fmt: skip


def chats_lines(rows: Sequence[ChatsRow]) -> list[str]:
    """Returns the lines of a table: two rows per case, medians over rounds."""
    cells, notes = [], []
    for row in rows:
        for name, turns in (("drafthouse", row.ours), ("llama-server", row.theirs)):
            if n_unnamed := sum(turn.n_unnamed for turn in turns):
                notes.append(
                    f"{name} left out the ids of {n_unnamed} tokens in {row.case.name}: its later"
                    " turns lack them and compute what is behind them again"
                )
            middle = [
                statistics.median(getattr(turn, field) for turn in turns)
                for field in ChatsResult.__dataclass_fields__
            ]
            speed, first, later, late, gap, reused, of_first, _ = middle
            cells.append([
                name, str(row.case.streams), str(row.case.n_prompt), f"{speed:.1f}",
                f"{first:.2f}", f"{later:.2f}", f"{late:.2f}", f"{1000 * gap:.0f}", f"{reused:.0%}",
                f"{of_first:.0%}",
            ])  # fmt: skip
    return [*format_table(_HEADER, cells), *notes]
