"""What `drafthouse-bench peers` reports: both contenders side by side, and their ratio."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from drafthouse_bench.peers.behind import BehindRow
from drafthouse_bench.peers.case import PeerCase
from drafthouse_bench.peers.chats import ChatsRow
from drafthouse_bench.peers.scenario import StallResult
from drafthouse_bench.report import Machine, Spread
from drafthouse_bench.trace import Figures
from drafthouse_server.cli.terminal import format_table

__all__ = [
    "DefaultsRow",
    "MixedRow",
    "PeerRow",
    "StallRow",
    "defaults_lines",
    "mixed_lines",
    "peer_lines",
    "ratio",
    "spread",
    "stall_lines",
    "write_peers_json",
]


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A case of the closed or open loop: one value of each contender per round."""

    case: PeerCase
    """What was measured."""
    ours: list[Figures]
    """Our server, round by round."""
    theirs: list[Figures]
    """llama-server."""
    agreement: list[int] | None
    """Equal greedy tokens from the start, for each prompt compared; None: not compared."""
    n_compared: int
    """Tokens of each of these prompts."""
    requests_per_s: float | None = None
    """Rate of arrivals of an open loop."""


@dataclass(frozen=True, slots=True)
class StallRow:
    """A case with a long prompt."""

    case: PeerCase
    """What was measured."""
    ours: list[StallResult]
    """Our server, round by round."""
    theirs: list[StallResult]
    """llama-server."""


@dataclass(frozen=True, slots=True)
class MixedRow:
    """Our server under a load of differing acceptance, with one policy of drafting."""

    case: PeerCase
    """What was measured."""
    policy: str
    """`K = 2`, `adaptive` or `llama-server, K = 3`."""
    figures: list[Figures]
    """Round by round."""
    ratios: list[float] = field(default_factory=list)
    """Tokens per second of the adaptive policy over this one's, round by round."""


@dataclass(frozen=True, slots=True)
class DefaultsRow:
    """A case of own defaults: one value of each contender per round."""

    case: PeerCase
    """What was measured."""
    ours: list[Figures]
    """Our server, round by round."""
    plain: list[Figures]
    """Our server without drafts, round by round; `ours` where the default drafts nothing."""
    theirs: list[Figures]
    """llama-server."""
    threads: tuple[int, int]
    """Threads of a decode, ours and theirs; 0 is not known."""
    flags: tuple[str, str]
    """Flags that both were started with, besides model and address."""
    memory_limit: float | None
    """Tokens per second that reading the weights once a step would allow; None on a device, whose
    memory nobody has measured."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns median and bounds of the values that there are; None of no values."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def ratio(row: PeerRow | StallRow, measure: Callable[[Figures], float | None]) -> Spread | None:
    """Returns ours over theirs, round by round; None where there is nothing to divide by."""
    if isinstance(row, StallRow):
        return None
    pairs = zip(map(measure, row.ours), map(measure, row.theirs), strict=True)
    return spread([a / b for a, b in pairs if a is not None and b])


_PEER_HEADER = (
    "draft", "streams", "load", "accept", "tokens/s", "llama", "ratio", "min–max",
    "TTFT p50", "llama", "p95 ms", "llama", "gap p50", "llama", "p99 ms", "llama",
    "accepted", "llama", "tok/msg", "server", "llama", "client", "llama", "same",
)  # fmt: skip


def peer_lines(rows: Sequence[PeerRow]) -> list[str]:
    """Returns the lines of a table: a row per case, medians over rounds, times in ms."""
    return format_table(_PEER_HEADER, [_peer_cells(row) for row in rows])


def _peer_cells(row: PeerRow) -> list[str]:
    speed = ratio(row, lambda each: each.tokens_per_s)
    case = row.case
    cells = [case.draft, str(case.streams)]
    cells += ["–" if row.requests_per_s is None else f"{row.requests_per_s:.2f}/s"]
    cells += ["own" if case.acceptance is None else f"{case.acceptance:g}"]
    cells += _pair(row, lambda each: each.tokens_per_s, "{:.0f}")
    cells += ["–", "–"] if speed is None else [f"{speed.median:.2f}", _bounds(speed)]
    for name in ("ttft_p50_s", "ttft_p95_s", "gap_p50_s", "gap_p99_s"):
        cells += _pair(row, lambda each, name=name: getattr(each, name) * 1000, "{:.1f}")  # type: ignore[misc]
    cells += _pair(row, lambda each: each.acceptance_rate, "{:.1%}")
    cells += _pair(row, lambda each: each.tokens_per_message, "{:.2f}")[:1]
    cells += _pair(row, lambda each: each.server_cores, "{:.2f}")
    cells += _pair(row, lambda each: each.client_cores, "{:.2f}")
    return [*cells, _agreed(row)]


def _pair(row: PeerRow, measure: Callable[[Figures], float | None], form: str) -> list[str]:
    return [_median(map(measure, each), form) for each in (row.ours, row.theirs)]


def _median(values: Iterable[float | None], form: str) -> str:
    found = spread(values)
    return "–" if found is None else form.format(found.median)


def _bounds(found: Spread) -> str:
    return f"{found.low:.2f}–{found.high:.2f}"


def _agreed(row: PeerRow) -> str:
    """Returns how many of the compared prompts gave the same greedy tokens throughout."""
    if row.agreement is None:
        return "–"
    return f"{sum(n == row.n_compared for n in row.agreement)} of {len(row.agreement)}"


_STALL_HEADER = (
    "server", "draft", "streams", "p99 before", "p99 during", "ratio", "min–max", "longest ms",
    "TTFT alone", "TTFT ms", "ratio", "min–max",
)  # fmt: skip


def stall_lines(rows: Sequence[StallRow]) -> list[str]:
    """Returns the lines of a table: two rows per case, medians over rounds, times in ms."""
    cells = []
    for row in rows:
        cells.append(_stall_cells("drafthouse", row.case, row.ours))
        cells.append(_stall_cells("llama-server", row.case, row.theirs))
    return format_table(_STALL_HEADER, cells)


def _stall_cells(name: str, case: PeerCase, turns: Sequence[StallResult]) -> list[str]:
    def ms(measure: Callable[[StallResult], float]) -> str:
        return _median([measure(each) * 1000 for each in turns], "{:.1f}")

    def share(measure: Callable[[StallResult], tuple[float, float]]) -> list[str]:
        found = spread([a / b for a, b in map(measure, turns) if b])
        return ["–", "–"] if found is None else [f"{found.median:.2f}", _bounds(found)]

    return [
        *(name, case.draft, str(case.streams)),
        *(ms(lambda each: each.gap_p99_before_s), ms(lambda each: each.gap_p99_during_s)),
        *share(lambda each: (each.gap_p99_during_s, each.gap_p99_before_s)),
        ms(lambda each: each.gap_max_during_s),
        *(ms(lambda each: each.ttft_alone_s), ms(lambda each: each.ttft_s)),
        *share(lambda each: (each.ttft_s, each.ttft_alone_s)),
    ]


_MIXED_HEADER = (
    "streams", "policy", "tokens/s", "min–max", "gap p99 ms", "accepted", "adaptive / it", "min–max"
)  # fmt: skip


def mixed_lines(rows: Sequence[MixedRow]) -> list[str]:
    """Returns the lines of a table: a row per policy."""
    return format_table(_MIXED_HEADER, [_mixed_cells(row) for row in rows])


def _mixed_cells(row: MixedRow) -> list[str]:
    speed = spread([each.tokens_per_s for each in row.figures])
    share = spread(row.ratios)
    assert speed is not None, "every row has a round"
    return [
        str(row.case.streams),
        row.policy,
        f"{speed.median:.0f}",
        f"{speed.low:.0f}–{speed.high:.0f}",
        _median([each.gap_p99_s * 1000 for each in row.figures], "{:.1f}"),
        _median([each.acceptance_rate for each in row.figures], "{:.1%}"),
        *(["–", "–"] if share is None else [f"{share.median:.2f}", _bounds(share)]),
    ]


_DEFAULTS_HEADER = (
    "streams", "tokens/s", "no drafts", "llama", "ratio", "min–max", "no drafts", "memory",
    "TTFT p50", "llama", "p95 ms", "llama", "gap p50", "llama", "p99 ms", "llama",
    "cores", "llama", "threads", "llama",
)  # fmt: skip


def defaults_lines(machine: Machine, rows: Sequence[DefaultsRow]) -> list[str]:
    """Returns the lines of a model's table: a row per case, medians over rounds, times in ms.

    Its column "memory" is our speed without drafts as a share of what reading the weights allows,
    where they lie in the host's memory.
    """
    ours, theirs = rows[0].flags
    return [
        f"{rows[0].case.model}, each with its own defaults, on {machine.cpu}, {machine.n_cores}"
        f" cores; set besides model and address: ours {ours or 'nothing'},"
        f" theirs {theirs or 'nothing'}",
        *format_table(_DEFAULTS_HEADER, [_defaults_cells(row) for row in rows]),
    ]


def _defaults_cells(row: DefaultsRow) -> list[str]:
    speeds = [_middle(each, "tokens_per_s") for each in (row.ours, row.plain, row.theirs)]
    share, plain = _speed_ratio(row.ours, row.theirs), _speed_ratio(row.plain, row.theirs)
    n_prompt = row.case.n_prompt
    name = str(row.case.streams) + (f" × {n_prompt}" if n_prompt else "")
    cells = [name, *(f"{speed:.0f}" for speed in speeds)]
    cells += [f"{share.median:.2f}", f"{share.low:.2f}–{share.high:.2f}", f"{plain.median:.2f}"]
    cells += [f"{speeds[1] / row.memory_limit:.0%}" if row.memory_limit else "–"]
    for name in ("ttft_p50_s", "ttft_p95_s", "gap_p50_s", "gap_p99_s"):
        cells += [f"{_middle(each, name) * 1000:.1f}" for each in (row.ours, row.theirs)]
    cells += [f"{_middle(each, 'server_cores'):.2f}" for each in (row.ours, row.theirs)]
    return cells + [str(n) if n else "?" for n in row.threads]


def _middle(turns: Sequence[Figures], name: str) -> float:
    found = spread(getattr(each, name) for each in turns)
    return found.median if found else 0.0


def _speed_ratio(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Spread:
    """Returns the ratio of tokens per second, round by round."""
    pairs = zip(ours, theirs, strict=True)
    found = spread(a.tokens_per_s / b.tokens_per_s for a, b in pairs if b.tokens_per_s)
    assert found is not None, "there is a round, and tokens in it"
    return found


def write_peers_json(
    path: Path,
    machine: Machine,
    rows: Sequence[PeerRow | StallRow | MixedRow | DefaultsRow | BehindRow | ChatsRow],
) -> None:
    """Writes everything as JSON; times in seconds, every round.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
