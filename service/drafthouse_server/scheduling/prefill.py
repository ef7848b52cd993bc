"""How many prompt tokens a step may carry beside running streams, and whose.

A prompt is cut by time, not by a number of tokens: a step that carries a piece of one may take as
long as a gap between tokens may be. What a step takes is predicted by a model of its cost, and how
far steps fall behind the prediction is measured, for steps with prompts and for those without.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from drafthouse_server.scheduling.sequence import Sequence as TokenSequence
from drafthouse_server.scheduling.waiting import rank

__all__ = [
    "GAP_FACTOR",
    "N_PAST_LONG",
    "N_PIECE",
    "N_QUANTUM",
    "N_ROWS_ALONE",
    "STEP_FREE_S",
    "PrefillPacer",
    "PrefillTurns",
]

GAP_FACTOR = 2.0
"""With prompts, a gap may be so many times the unloaded 99th percentile."""

STEP_FREE_S = 0.04
"""Steps up to so long are nobody's loss: 25 tokens a second are more than anybody reads.

Where steps are shorter, cutting prompts finer for twice their time would cost prompts dearly: small
pieces are slow to compute, and few streams would hold up many: those whose prompts wait.
"""

N_PIECE = 24
"""Tokens of the smallest piece of a prompt with thousands of cells before it.

On a processor attention converts every cell once for all rows of a piece, if they are 16 or more.
A prompt of 4,096 tokens beside eight streams takes about 1.6 times as long as alone in pieces of 24
or 32, and twice as long in pieces of 16; at 32 gaps are a quarter longer.
"""

N_ROWS_ALONE = 8
"""Rows that take about as long, computed one by one, because they are too few for that."""

N_PAST_LONG = 512
"""Cells from which that decides what a piece takes."""

N_QUANTUM = N_PIECE + 1
"""Tokens of one prompt that are worth a place in a step, if so many are left.

One is computed together with the running streams' next tokens.
"""

_N_RATIOS = 256
"""Steps that a quantile is taken over."""

_N_RATIOS_MIN = 16
"""Steps from which on a quantile means something."""

_QUANTILE = 0.99
_RATIO_PRIOR = 1.25
"""Of a step's 99th percentile to its prediction, before it is known."""
_RATIO_MAX = 4.0
"""Beyond that the machine is to blame and smaller pieces would not help."""


class _Ratios:
    """The last steps' times, as multiples of what was predicted."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def observe(self, ratio: float) -> None:
        """Takes one more, and forgets the oldest."""
        self._recent.append(ratio)
        insort(self._ordered, ratio)
        if len(self._recent) > _N_RATIOS:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]

    @property
    def high(self) -> float:
        """The 99th percentile, at least 1."""
        n = len(self._ordered)
        if n < _N_RATIOS_MIN:
            return _RATIO_PRIOR
        return min(max(self._ordered[min(n - 1, int(_QUANTILE * n))], 1.0), _RATIO_MAX)


class PrefillPacer:
    """Tells how long a step with a piece of a prompt may take, as the cost model counts.

    Args:
        gap_s: Target of the gap between tokens, seconds; 0 is twice the unloaded 99th percentile,
            but no less than `STEP_FREE_S`.
    """

    def __init__(self, gap_s: float = 0.0) -> None:
        self._gap_s = gap_s
        self.reset()

    def reset(self) -> None:
        """Forgets how far steps have fallen behind their predictions."""
        self._unloaded = _Ratios()
        self._loaded = _Ratios()

    def target_s(self, decode_s: float) -> float:
        """Returns the gap between tokens that is held, seconds.

        Args:
            decode_s: Predicted seconds of the step without prompts.
        """
        if self._gap_s:
            return self._gap_s
        return max(GAP_FACTOR * decode_s * self._unloaded.high, STEP_FREE_S)

    def step_s(self, decode_s: float) -> float:
        """Returns what a step may be predicted to take, so that nearly all hold the target.

        Args:
            decode_s: Predicted seconds of the step without prompts.
        """
        seconds = self.target_s(decode_s) / self._loaded.high
        return seconds if self._gap_s else max(seconds, STEP_FREE_S)

    def align(self, n_tokens: int, n_wanted: int, n_past: int, n_lead: int) -> int:
        """Returns a number of prompt tokens that attention computes together.

        No fewer than make a piece, unless a target was set that it would miss. What is left at the
        end, and makes none, goes in pieces that take no longer than one.

        Args:
            n_tokens: As many as the target allows, >= 0.
            n_wanted: As many as are left.
            n_past: Tokens of the prompt that are computed.
            n_lead: Tokens of a piece that are computed together with those of running streams.
        """
        n_tokens = min(n_tokens, n_wanted)
        n_least = n_lead + N_PIECE
        if n_past < N_PAST_LONG or n_tokens >= n_least or self._gap_s:
            return n_tokens
        return n_least if n_wanted >= n_least else min(n_wanted, n_lead + N_ROWS_ALONE)

    def observe(self, predicted_s: float, step_s: float, *, has_prefill: bool) -> None:
        """Learns from a step in which streams went on.

        Args:
            predicted_s: What the model gives for what the step did.
            step_s: What it took.
            has_prefill: Whether it carried a piece of a prompt.
        """
        if predicted_s <= 0:
            return
        (self._loaded if has_prefill else self._unloaded).observe(step_s / predicted_s)


class PrefillTurns:
    """Shares a step's prompt tokens: the tenants in turn, inside a tenant by rank.

    A tenant's turn comes earlier the fewer tokens it got while others had prompts too.
    """

    def __init__(self) -> None:
        self._n_served: dict[str, int] = {}  # tokens, of tenants with prompts now

    def share(
        self, prefills: Iterable[tuple[TokenSequence, int]], n_tokens: int
    ) -> list[tuple[TokenSequence, int]]:
        """Returns how many tokens each sequence gets, those with none left out.

        Every tenant gets an equal part, or, where that would be too little to be worth a place in
        the step, its turn. What one does not need, the others get.

        Args:
            prefills: Sequences, and the tokens that each has to compute, > 0.
            n_tokens: Tokens to share, >= 0.
        """
        lines: dict[str, list[tuple[TokenSequence, int]]] = {}
        for part in prefills:
            lines.setdefault(part[0].tenant, []).append(part)
        for line in lines.values():
            line.sort(key=_part_rank)
        if len(lines) == 1:
            return _share_line(next(iter(lines.values())), n_tokens)
        return self._share_lines(lines, n_tokens)

    def _share_lines(
        self, lines: dict[str, list[tuple[TokenSequence, int]]], n_left: int
    ) -> list[tuple[TokenSequence, int]]:
        # Who comes new has neither a debt nor a claim.
        before = self._n_served
        n_least = min((before[tenant] for tenant in lines if tenant in before), default=0)
        served = self._n_served = {tenant: before.get(tenant, n_least) for tenant in lines}
        tenants = sorted(lines, key=served.__getitem__)
        wanted = {tenant: sum(n for _, n in lines[tenant]) for tenant in tenants}
        granted = dict.fromkeys(tenants, 0)
        n_open = len(tenants)
        while n_left > 0 and n_open:
            n_open = 0
            n_still = sum(wanted[tenant] > granted[tenant] for tenant in tenants)
            for tenant in tenants:
                n_more = wanted[tenant] - granted[tenant]
                if not n_more or not n_left:
                    continue
                n = min(n_more, n_left, max(n_left // n_still, N_QUANTUM))
                granted[tenant] += n
                n_left -= n
                n_still -= 1
                n_open += n < n_more
        for tenant in tenants:
            served[tenant] += granted[tenant]
        return [part for t in tenants for part in _share_line(lines[t], granted[t])]


def _part_rank(part: tuple[TokenSequence, int]) -> tuple[int, int]:
    return rank(part[0])


def _share_line(
    line: Sequence[tuple[TokenSequence, int]], n_left: int
) -> list[tuple[TokenSequence, int]]:
    """Returns what each of one tenant's sequences gets, the first in rank first."""
    shares = []
    for sequence, n_wanted in line:
        n = min(n_wanted, n_left)
        if n <= 0:
            break
        shares.append((sequence, n))
        n_left -= n
    return shares
