"""What a benchmark reports: medians over rounds, and the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drafthouse_bench.load import LoadResult
from drafthouse_bench.process import BareResult
from drafthouse_server.cli.terminal import format_table

__all__ = [
    "Case",
    "Machine",
    "Round",
    "Row",
    "Spread",
    "describe_machine",
    "n_cores",
    "percentile",
    "require_writable",
    "summarize",
    "table_lines",
    "write_json",
]


@dataclass(frozen=True, slots=True)
class Case:
    """What was measured."""

    model: str
    """Name of the target."""
    draft_type: str
    """How drafts are made."""
    n_streams: int
    """Requests at once."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of each contender."""

    served: LoadResult
    """What the gRPC client has seen."""
    server_cpu_s: float | None
    """CPU time of the server's process in this turn; None where it cannot be read."""
    bare: BareResult | None
    """What the bare step loop did; None without one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over rounds."""

    median: float
    """Median of the rounds."""
    low: float
    """Smallest value of the rounds."""
    high: float
    """Largest value of the rounds."""


@dataclass(frozen=True, slots=True)
class Row:
    """A case with its numbers. None: could not be measured, or there is nothing to measure."""

    case: Case
    """What was measured."""
    n_rounds: int
    """Rounds behind each number."""
    tokens_per_s: Spread
    """Tokens per second at the client, over all streams."""
    ttft_p50_s: Spread
    """Call to first token, median over requests."""
    ttft_p95_s: Spread
    """Call to first token, 95th percentile."""
    gap_p50_s: Spread
    """Gap between the messages of a stream, median."""
    gap_p99_s: Spread
    """Gap between the messages of a stream, 99th percentile."""
    tokens_per_message: Spread
    """Mean."""
    acceptance_rate: Spread | None
    """Share of the drafted tokens that were accepted."""
    bare_tokens_per_s: Spread | None
    """Tokens per second of the bare step loop in C."""
    share_of_bare: Spread | None
    """The client's tokens per second over the bare loop's, round by round."""
    server_cores: Spread | None
    """CPU time of the server per second."""
    client_cores: Spread | None
    """CPU time of the load generator per second; near 1 it is the bottleneck itself."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and how it was measured."""

    cpu: str
    """Model of the processor."""
    n_cores: int
    """Cores that this process may use."""
    load_average: float
    """Load of the last minute before the first measurement; above 0.5 the machine was busy."""
    n_threads: int
    """Threads of a decode, both contenders."""
    engine: str
    """Version and build of llama.cpp."""
    command: str
    """What was run."""


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the value below which a share of the values lies, interpolated; 0 of no values.

    Args:
        values: In any order.
        share: [0, 1].
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    i = int(place)
    after = ordered[min(i + 1, len(ordered) - 1)]
    return ordered[i] + (place - i) * (after - ordered[i])


def _spread(values: Iterable[float | None]) -> Spread | None:
    """Returns the spread of the values that there are; None of no values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known))


def summarize(case: Case, rounds: Sequence[Round]) -> Row:
    """Returns the numbers of a case.

    Args:
        case: What was measured.
        rounds: At least one.
    """
    assert rounds, "a case without rounds"

    def over(measure: Callable[[Round], float | None]) -> Spread | None:
        return _spread(map(measure, rounds))

    def served(measure: Callable[[LoadResult], float]) -> Spread:
        spread = over(lambda each: measure(each.served))
        assert spread is not None, "every round was served"
        return spread

    return Row(
        case=case,
        n_rounds=len(rounds),
        tokens_per_s=served(lambda load: load.tokens_per_s),
        ttft_p50_s=served(lambda load: percentile(load.first_tokens_s, 0.5)),
        ttft_p95_s=served(lambda load: percentile(load.first_tokens_s, 0.95)),
        gap_p50_s=served(lambda load: percentile(load.gaps_s, 0.5)),
        gap_p99_s=served(lambda load: percentile(load.gaps_s, 0.99)),
        tokens_per_message=served(lambda load: load.tokens_per_message),
        acceptance_rate=over(lambda each: each.served.acceptance_rate),
        bare_tokens_per_s=over(lambda each: each.bare.tokens_per_s if each.bare else None),
        share_of_bare=over(_share_of_bare),
        server_cores=over(_server_cores),
        client_cores=served(lambda load: load.client_cpu_s / load.elapsed_s),
    )


def _share_of_bare(turn: Round) -> float | None:
    if turn.bare is None or not turn.bare.tokens_per_s:
        return None
    return turn.served.tokens_per_s / turn.bare.tokens_per_s


def _server_cores(turn: Round) -> float | None:
    return None if turn.server_cpu_s is None else turn.server_cpu_s / turn.served.elapsed_s


_HEADER = (
    "draft",
    "streams",
    "tokens/s",
    "min–max",
    "TTFT p50",
    "p95 ms",
    "gap p50",
    "p99 ms",
    "tok/msg",
    "accepted",
    "bare tokens/s",
    "share",
    "min–max",
    "server",
    "client cores",
)


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table: a row per case, times in ms, medians over rounds."""
    return format_table(_HEADER, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    return [
        row.case.draft_type,
        str(row.case.n_streams),
        f"{row.tokens_per_s.median:.0f}",
        f"{row.tokens_per_s.low:.0f}–{row.tokens_per_s.high:.0f}",
        _ms(row.ttft_p50_s),
        _ms(row.ttft_p95_s),
        _ms(row.gap_p50_s),
        _ms(row.gap_p99_s),
        f"{row.tokens_per_message.median:.2f}",
        _cell(row.acceptance_rate, lambda spread: f"{spread.median:.1%}"),
        _cell(row.bare_tokens_per_s, lambda spread: f"{spread.median:.0f}"),
        _cell(row.share_of_bare, lambda spread: f"{spread.median:.0%}"),
        _cell(row.share_of_bare, lambda spread: f"{spread.low:.0%}–{spread.high:.0%}"),
        _cell(row.server_cores, lambda spread: f"{spread.median:.2f}"),
        _cell(row.client_cores, lambda spread: f"{spread.median:.2f}"),
    ]


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1000:.1f}"


def _cell(spread: Spread | None, text: Callable[[Spread], str]) -> str:
    return "–" if spread is None else text(spread)


def describe_machine(n_threads: int, engine: str, command: str) -> Machine:
    """Returns where this process runs.

    Args:
        n_threads: Threads of a decode.
        engine: Version and build of llama.cpp.
        command: What was run.
    """
    return Machine(
        cpu=_cpu(),
        n_cores=n_cores(),
        load_average=os.getloadavg()[0],
        n_threads=n_threads,
        engine=engine,
        command=command,
    )


def n_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def require_writable(path: Path) -> None:
    """Makes a file's folder and sees, before anything is measured, that the file can be written.

    Raises:
        OSError: it cannot.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink()


def write_json(path: Path, machine: Machine, rows: Sequence[Row]) -> None:
    """Writes everything as JSON; times in seconds.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"machine": asdict(machine), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
