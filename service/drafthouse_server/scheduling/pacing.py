"""How long steps may be: with a piece of a prompt beside running streams, and in a row. Pure.

A prompt is cut by time, not by a number of tokens: a step that carries a piece of one may take as
long as a gap between tokens may be. What a step takes is predicted by a model of its cost, and how
far steps fall behind the prediction is measured, for steps with prompts and for those without.

Between two steps the engine waits for the host: a tenth of a millisecond or two, and more where the
interpreter has to be waited for. Beside a small model's step that is much. So where nothing is to
be decided (no prompt, no draft, no request comes or goes) the engine goes on by itself for a
while; a request that comes then interrupts it. Steps of ordinary models are as long as a run may
be, and are never run in a row.

A step ends with the masks of grammars, and all wait for each. So beside other tenants' streams
those whose masks take long sit out most steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping

from drafthouse_server.drafting.guard import Guard
from drafthouse_server.scheduling.cells import CellLedger
from drafthouse_server.scheduling.sequence import Sequence
from drafthouse_server.step import SamplingOptions, StepResult
from drafthouse_server.tenancy.fairness import VirtualCounters

__all__ = [
    "GAP_FACTOR",
    "N_ALONE",
    "N_MASK_FREE",
    "N_PAST_LONG",
    "N_PIECE",
    "N_ROWS_ALONE",
    "N_STEPS_MAX",
    "RUN_S",
    "STEP_FREE_S",
    "ChunkSizer",
    "MaskTurns",
    "RunLength",
]

GAP_FACTOR = 2.0
"""Longest gap with prompts, as a multiple of the 99th percentile without."""

STEP_FREE_S = 0.04
"""Steps up to this long (s) hurt no reader: 25 tokens a second are more than people read.

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

N_ALONE = 64
"""Tokens of the smallest step of prompts while nobody generates.

On a processor a prompt takes as long in steps of 64 as in steps of 512, and a seventh longer in
steps of 32: as many rows share what is unpacked of weights and converted of cells.
"""

RUN_S = 0.010
"""Seconds that a run may take: no reader needs a hundred messages a second."""

N_STEPS_MAX = 16
"""Most steps of a run: a machine that has become slow is noticed after so many."""

N_MASK_FREE = 1 << 18
"""Comparisons to choose a token of a sequence that are on no account: some milliseconds.

More are costly. A string of a JSON schema takes some thousands, and up to half a million where a
text comes to a place of the schema for the first time (131,072 tokens).
"""

_COMPARISON_S = 1e-8
"""Seconds of one comparison, at most: with what a place in a grammar takes to be made."""

_N_TOP_K_FREE = 1024
"""A top-k up to this one leaves little to sort."""

_MASK_REST = 3.0
"""Seconds of steps without them for each second that a tenant's costly masks took."""

_MASK_MEMORY_S = 5.0
"""Seconds of steps in which it is remembered that a tenant's masks were costly."""

_N_RATIOS = 256
"""Steps that a quantile is taken over."""

_N_RATIOS_MIN = 16
"""Steps from which on a quantile means something."""

_QUANTILE = 0.99
_RATIO_PRIOR = 1.25
"""Assumed ratio of a step's 99th percentile to its prediction, before it is known."""
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
        """The 99th percentile, at least 1; of few steps the last but one, not the worst."""
        n = len(self._ordered)
        if n < _N_RATIOS_MIN:
            return _RATIO_PRIOR
        return min(max(self._ordered[int(_QUANTILE * (n - 1))], 1.0), _RATIO_MAX)


class ChunkSizer:
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

    def align(self, n_tokens: int, n_wanted: int, n_past: int, n_beside: int) -> int:
        """Returns a number of prompt tokens that attention computes together.

        No fewer than make a piece, unless a target was set that it would miss. What is left at the
        end, and makes none, goes in pieces that take no longer than one.

        Args:
            n_tokens: As many as the target allows, >= 0.
            n_wanted: As many as are left.
            n_past: Tokens of the prompt that are computed.
            n_beside: Tokens of a piece that are computed together with those of running streams.
        """
        n_tokens = min(n_tokens, n_wanted)
        n_least = n_beside + N_PIECE
        if n_past < N_PAST_LONG or n_tokens >= n_least or self._gap_s:
            return n_tokens
        return n_least if n_wanted >= n_least else min(n_wanted, n_beside + N_ROWS_ALONE)

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


class RunLength:
    """Decides how long runs are.

    Args:
        gap_s: Target of the gap between tokens, seconds; 0 is none.
    """

    def __init__(self, gap_s: float = 0.0) -> None:
        self._run_s = min(RUN_S, gap_s or RUN_S)

    def n_steps(self, sequences: Iterable[Sequence], step_s: float, n_steps_free: int) -> int:
        """Returns the steps of the next run, >= 1.

        Args:
            sequences: All that the step has; each generates, none with a draft.
            step_s: What one of their steps takes, seconds; 0 is not known.
            n_steps_free: Steps for which cells are free.
        """
        if not 0 < 2 * step_s <= self._run_s:
            return 1
        # Multiplied first: a step that takes next to no time would make the quotient infinite.
        is_long = N_STEPS_MAX * step_s <= self._run_s
        n_steps = min(n_steps_free, N_STEPS_MAX if is_long else int(self._run_s / step_s))
        for sequence in sequences:
            if sequence.request.stop_token_ids:
                return 1  # the engine does not know them
            n_steps = min(n_steps, sequence.n_output_left)
        return max(1, n_steps)

    def ask(
        self, guard: Guard, sequences: Iterable[Sequence], step_s: float, n_steps_free: int
    ) -> int:
        """Returns the same, or 1 where it cannot be told."""

        def count() -> int:
            n_steps = self.n_steps(sequences, step_s, n_steps_free)
            if not 1 <= n_steps <= n_steps_free:
                raise ValueError(f"a run of {n_steps} steps, cells for {n_steps_free}")
            return n_steps

        return guard.ask("pacing", count, lambda: 1)


class MaskTurns:
    """Decides which streams sit a step out, because it takes long to choose their tokens.

    That is so of masks of some grammars, and of samplers that sort a large vocabulary: typical, XTC
    and a large top-k without a cut before them. Both are called masks here.

    Each tenant's costly masks take a quarter of the time at most while another's streams generate:
    one of its costly streams has its part in a step, in turn, and none has until steps without
    masks have taken three times as long. For a while a stream of the tenant that may be so, and has
    no token yet, counts as costly, too. Steps that streams sit out count as service of their
    tenant, as much as of who got most in them: it takes no slot because it falls behind.

    While nobody else is here, and somebody was of late, a step has as many costly masks as fit into
    `STEP_FREE_S`: who comes back waits for its end.

    Args:
        counters: How much service each tenant has got.
        ledger: Whether slots share KV cells: prompts then may find none.
    """

    def __init__(self, counters: VirtualCounters, ledger: CellLedger) -> None:
        self._counters = counters
        self._is_shared = ledger.is_shared
        self._alone_s = _MASK_MEMORY_S  # seconds of steps since two tenants were here
        self._unit_s = _COMPARISON_S  # of a comparison, as last measured
        self._n_last = 0  # comparisons of the last costly mask
        self._owed: dict[str, float] = {}  # seconds of steps that come first, by tenant
        self._costly: dict[Sequence, int] = {}  # comparisons of those in their last step
        self._out = set[str]()  # tenants with streams that sit the step out
        self._before: dict[str, float] = {}  # counters of all that have a part in it
        self._is_on = False  # whether any was costly of late
        self.is_costly = False
        """Whether the step that was chosen has a costly mask: it is no run of steps."""

    def choose(
        self, decodes: list[Sequence], prefills: list[Sequence]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Returns those that have their part in the next step; of any that generate, some.

        Args:
            decodes: The sequences that generate.
            prefills: Those with tokens to compute first.
        """
        self._out.clear()
        self.is_costly = False
        if not self._is_on:
            return decodes, prefills
        self._costly = {s: n for s, n in self._costly.items() if s.terminal is None}
        everyone = [*decodes, *prefills]
        tenants = {sequence.request.tenant for sequence in everyone}
        lines: dict[str, list[Sequence]] = {}
        for sequence in everyone:
            if self._is_costly(sequence):
                lines.setdefault(sequence.request.tenant, []).append(sequence)
        self._is_on = bool(self._costly or self._owed)
        self.is_costly = bool(lines)
        if len(tenants) > 1:
            self._alone_s = 0.0
        if not lines or self._alone_s >= _MASK_MEMORY_S:
            return decodes, prefills
        costly = {sequence for line in lines.values() for sequence in line}
        if len(tenants) > 1:
            turns = [min(line, key=_last_served) for line in lines.values()]
            if not costly.issuperset(decodes if self._is_shared else everyone):
                # Else there may be no other work in the step.
                turns = [s for s in turns if self._owed.get(s.request.tenant, 0.0) <= 0.0]
        else:
            turns = self._fitting(*lines.values())
        self.is_costly = bool(turns)
        out = costly.difference(turns)
        self._out = {sequence.request.tenant for sequence in out}
        self._before = {tenant: self._counters.of(tenant) for tenant in tenants}
        return [s for s in decodes if s not in out], [s for s in prefills if s not in out]

    def _fitting(self, line: list[Sequence]) -> list[Sequence]:
        """Returns as many as fit into a step that nobody minds to wait for, and one at least."""
        turns, left_s = list[Sequence](), STEP_FREE_S
        for sequence in sorted(line, key=_last_served):
            left_s -= self._costly.get(sequence, self._n_last) * self._unit_s
            if turns and left_s < 0:
                break
            turns.append(sequence)
        return turns

    def _is_costly(self, sequence: Sequence) -> bool:
        if sequence.tally.n_steps:
            return sequence in self._costly
        request = sequence.request
        return request.tenant in self._owed and _may_cost(request.sampling)

    def observe(self, result: StepResult, running: Mapping[int, Sequence]) -> None:
        """Notes what the masks of a step took, when its service is counted.

        Args:
            result: The engine's answer.
            running: Sequences by slot, as they ran in it.
        """
        entries, n_free = result.entries, N_MASK_FREE * result.n_steps
        # A list, because this runs once per sequence and step.
        if not self._is_on and max([entry.n_mask_work for entry in entries], default=0) <= n_free:
            return
        self._is_on = True
        if self._out:
            self._even_out()
        n_work = sum([entry.n_mask_work for entry in entries])
        masks_s = min(n_work * _COMPARISON_S, result.timings.sample_s)
        self._alone_s += result.timings.total_s
        rest_s = max(result.timings.total_s - masks_s, 0.0)
        left_s = {tenant: owed_s - rest_s for tenant, owed_s in self._owed.items()}
        self._owed = {t: owed_s for t, owed_s in left_s.items() if owed_s > -_MASK_MEMORY_S}
        for entry in entries:
            sequence = running[entry.seq_id]
            if entry.n_mask_work <= n_free:
                self._costly.pop(sequence, None)
            else:
                self._n_last = self._costly[sequence] = entry.n_mask_work // result.n_steps
                self._unit_s = masks_s / n_work
                tenant = sequence.request.tenant
                owed_s = _MASK_REST * masks_s * entry.n_mask_work / n_work
                self._owed[tenant] = max(self._owed.get(tenant, 0.0), 0.0) + owed_s

    def _even_out(self) -> None:
        """Counts a step as service of those with streams that sat it out."""
        counters = self._counters
        grown = {tenant: counters.of(tenant) - before for tenant, before in self._before.items()}
        most = max(grown.values())
        for tenant in self._out:
            counters.charge(tenant, (most - grown[tenant]) * counters.weight(tenant))


def _may_cost(sampling: SamplingOptions) -> bool:
    """Returns whether masks, or samplers that sort, may be costly."""
    is_wide = not 0 < sampling.top_k <= _N_TOP_K_FREE
    has_sort = sampling.typical_p < 1 or sampling.xtc_probability > 0 or sampling.top_k > 0
    return bool(sampling.grammar) or (is_wide and has_sort)


def _last_served(sequence: Sequence) -> float:
    """Returns when a sequence had its last token, 0 where it has none."""
    return sequence.clock.last_token_at if sequence.tally.n_steps else 0.0
