"""What the client of a benchmark notes of a request, and when requests come: by one rule for all.

A server may send one token per message or several; messages may come in one packet. So gaps are
counted between *tokens*: those that arrive together have gaps of zero between them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from drafthouse_bench.process import BenchError
from drafthouse_bench.report import percentile

__all__ = ["Figures", "PeerLoad", "Trace", "figures", "gaps_between", "poisson_arrivals"]


@dataclass(slots=True)
class Trace:
    """One request as its client sees it. Times of one clock."""

    called_s: float
    """When it was called; under an open load when it should have been."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Arrival time and number of tokens of each message with tokens."""
    n_drafted: int = 0
    """Draft tokens verified."""
    n_accepted: int = 0
    """Draft tokens accepted."""
    is_finished: bool = False
    """Whether its end was seen."""
    n_output: int = 0
    """Tokens received."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens received, where the client keeps them."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""

    def add(self, now_s: float, n_tokens: int) -> None:
        """Notes a message with tokens."""
        self.arrivals.append((now_s, n_tokens))
        self.n_output += n_tokens

    def finish(self, server: str, n_asked: int) -> None:
        """Notes the end of the answer.

        Args:
            server: Who answered.
            n_asked: Tokens that were asked for, past any end token.

        Raises:
            BenchError: it has another number of tokens, which would be compared with a whole one.
        """
        if self.n_output != n_asked:
            raise BenchError(f"{server} answers with {self.n_output} tokens of {n_asked}")
        self.is_finished = True

    @property
    def ttft_s(self) -> float | None:
        """From the call to the first token; None before it."""
        return self.arrivals[0][0] - self.called_s if self.arrivals else None

    def token_gaps(self) -> list[tuple[float, float]]:
        """Returns the gap before each token but the first, with the time at which it ended."""
        gaps: list[tuple[float, float]] = []
        last = None
        for now, n in self.arrivals:
            if last is not None:
                gaps.append((now, now - last))
            gaps += [(now, 0.0)] * (n - 1)
            last = now
        return gaps


@dataclass(slots=True)
class PeerLoad:
    """One turn of one contender."""

    traces: list[Trace]
    """All requests."""
    elapsed_s: float
    """From the first call to the last end."""
    client_cpu_s: float
    """CPU time of the client's process."""
    server_cpu_s: float | None
    """CPU time of the server's process; None where it cannot be read."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of one turn of one contender. None: nothing to measure."""

    tokens_per_s: float
    """Tokens per second at the client, over all streams."""
    ttft_p50_s: float
    """Call to first token, median over requests."""
    ttft_p95_s: float
    """Call to first token, 95th percentile."""
    gap_p50_s: float
    """Gap between tokens of a stream, median."""
    gap_p99_s: float
    """Gap between tokens of a stream, 99th percentile."""
    tokens_per_message: float
    """Mean."""
    acceptance_rate: float | None
    """Share of the drafted tokens that were accepted."""
    server_cores: float | None
    """CPU time of the server per second."""
    client_cores: float
    """CPU time of the client's process per second; near 1 it is the bottleneck itself."""
    n_requests: int
    """Requests of the turn."""
    n_output: int
    """Tokens received."""


def figures(load: PeerLoad) -> Figures:
    """Returns the numbers of a turn."""
    n_output = sum(trace.n_output for trace in load.traces)
    n_messages = sum(len(trace.arrivals) for trace in load.traces)
    n_drafted = sum(trace.n_drafted for trace in load.traces)
    n_accepted = sum(trace.n_accepted for trace in load.traces)
    ttfts = [trace.ttft_s for trace in load.traces if trace.ttft_s is not None]
    gaps = [gap for trace in load.traces for _, gap in trace.token_gaps()]
    elapsed_s = max(load.elapsed_s, 1e-9)
    return Figures(
        tokens_per_s=n_output / elapsed_s,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        gap_p50_s=percentile(gaps, 0.5),
        gap_p99_s=percentile(gaps, 0.99),
        tokens_per_message=n_output / n_messages if n_messages else 0.0,
        acceptance_rate=n_accepted / n_drafted if n_drafted else None,
        server_cores=None if load.server_cpu_s is None else load.server_cpu_s / elapsed_s,
        client_cores=load.client_cpu_s / elapsed_s,
        n_requests=len(load.traces),
        n_output=n_output,
    )


def gaps_between(traces: Iterable[Trace], start_s: float, end_s: float) -> list[float]:
    """Returns the gaps between tokens that overlap a window of time, whole.

    A stall that began before the window's end and outlasts it belongs to it.
    """
    return [
        gap
        for trace in traces
        for ended, gap in trace.token_gaps()
        if ended >= start_s and ended - gap <= end_s
    ]


def poisson_arrivals(rate: float, duration_s: float, seed: int) -> tuple[float, ...]:
    """Returns the times of a Poisson process; the same arguments give the same times.

    Args:
        rate: Mean arrivals per second, > 0.
        duration_s: Times lie in [0, duration_s); at least one is returned.
        seed: Of the generator.
    """
    generator = random.Random(seed)
    times: list[float] = []
    now = generator.expovariate(rate)
    while now < duration_s:
        times.append(now)
        now += generator.expovariate(rate)
    return tuple(times) or (0.0,)
