"""What a step costs in seconds: three coefficients, enough to cut prompts by time. Pure.

    seconds = a x physical batches + b x tokens + c x pairs of a token and a cell before it

The coefficients minimise the squared relative error over the last steps; none is negative. Steps
with and without a prompt are forgotten separately, because there are many more of the one kind.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from drafthouse_server.drafting.guard import is_duration
from drafthouse_server.step import PlanEntry, ResultEntry, StepTimings

__all__ = ["CostModel", "Splitting", "StepCost", "StepShape", "count_ubatches", "shape_of"]

_FADING = 0.95  # share of a kind's earlier steps that is kept per step: the last 20 count
_LEAST_S = 1e-6  # seconds: clocks are no finer, and what is divided by it stays finite
_PRIOR = (0.5, 0.5, 1e-4)  # share of the first step's seconds: batches, tokens; a pair per token
_PRIOR_WEIGHT = 0.01  # steps that the prior is worth: it decides only what no step has told yet
_N_SWEEPS = 2  # passes over the coefficients per step; the next step's go on from there


class Splitting(enum.Enum):
    """How llama.cpp cuts one decode into physical batches."""

    NONE = enum.auto()
    """Sequences share one pool of cells: tokens fill physical batches in any mix."""
    EQUAL = enum.auto()
    """Cells of its own for each slot.

    A physical batch takes equally many tokens of slots that follow one another.
    """
    GROUPS = enum.auto()
    """A recurrent target.

    One decode for all without a draft, then one for each run of neighbours with equal drafts.
    """


class StepShape(NamedTuple):
    """What a step computes, as far as its cost depends on it."""

    n_tokens: int = 0
    """Tokens of the target's decode: last tokens, drafts and pieces of prompts."""
    n_outputs: int = 0
    """Sampled positions."""
    n_ubatches: int = 1
    """Physical batches of the target's decode."""
    n_pairs: float = 0.0
    """Pairs of a token and a cell before it: the work of attention."""


class CostModel(Protocol):
    """Predicts what steps take, and learns from each. Pure: no clock, no randomness."""

    @property
    def n_observed(self) -> int:
        """Steps learnt from."""
        ...

    def reset(self) -> None:
        """Forgets all that was learnt."""
        ...

    def predict(self, shape: StepShape) -> float:
        """Returns the seconds that a step takes, > 0."""
        ...

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns from a step that succeeded, its seconds with the host's part `wall_s`."""
        ...

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns how many tokens of a prompt fit into a step beside what it does already."""
        ...

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        """Returns the seconds of computing a prompt again, in steps of its own."""
        ...


def count_ubatches(
    seq_ids: Sequence[int], lengths: Sequence[int], splitting: Splitting, n_ubatch: int
) -> int:
    """Returns how many physical batches a decode is cut into.

    Args:
        seq_ids: Slots, ascending.
        lengths: Tokens of each, >= 1.
        splitting: The rule.
        n_ubatch: Most tokens of one physical batch.

    Source: llama-batch.cpp, split_equal and split_simple; make_groups in decode.cpp (b11549).
    """
    n_filled = -(-sum(lengths) // n_ubatch)
    if splitting is Splitting.NONE or not lengths:
        return max(1, n_filled)
    if seq_ids[-1] - seq_ids[0] == len(seq_ids) - 1 and len(set(lengths)) == 1:
        return max(1, n_filled)
    count = _count_equal_splits if splitting is Splitting.EQUAL else _count_groups
    return max(n_filled, count(seq_ids, lengths))


def _count_equal_splits(seq_ids: Sequence[int], lengths: Sequence[int]) -> int:
    """Counts splits of equal length: each takes as many tokens as its shortest slot has left."""
    n_splits = top = 0
    levels = [0]
    last_id = -2
    for seq_id, length in zip(seq_ids, lengths, strict=True):
        if seq_id != last_id + 1:
            levels, top = [0], 0
        last_id = seq_id
        if length == top:
            continue
        while top > length:
            levels.pop()
            top = levels[-1]
        if top < length:
            levels.append(length)
            top = length
            n_splits += 1
    return n_splits


def _count_groups(seq_ids: Sequence[int], lengths: Sequence[int]) -> int:
    """Counts runs of neighbours of one length; single tokens of all share a decode's first part."""
    n_groups = 0
    last_id, last_length = -2, -1
    for seq_id, length in zip(seq_ids, lengths, strict=True):
        if seq_id != last_id + 1 or length != last_length:
            n_groups += 1
        last_id, last_length = seq_id, length
    return n_groups


def shape_of(
    entries: Sequence[PlanEntry],
    results: Sequence[ResultEntry],
    splitting: Splitting,
    n_ubatch: int,
) -> StepShape:
    """Returns the shape of a step that was run, with drafts as long as they came out.

    Args:
        entries: The plan's.
        results: The engine's, in the same order.
        splitting: How the target's decode is cut.
        n_ubatch: Most tokens of one physical batch.
    """
    # One loop over all of it takes twice as long, and this runs after every step.
    drafted = [result.n_drafted for result in results]
    lengths = [len(entry.tokens) + n for entry, n in zip(entries, drafted, strict=True)]
    n_pairs = sum([n * entry.n_past for entry, n in zip(entries, lengths, strict=True)])
    # Only outputs have drafts.
    n_outputs = sum([entry.is_output for entry in entries]) + sum(drafted)
    seq_ids = [entry.seq_id for entry in entries]
    if seq_ids != sorted(seq_ids):
        parts = sorted(zip(seq_ids, lengths, strict=True))
        seq_ids = [seq_id for seq_id, _ in parts]
        lengths = [length for _, length in parts]
    n_ubatches = count_ubatches(seq_ids, lengths, splitting, n_ubatch)
    return StepShape(sum(lengths), n_outputs, n_ubatches, n_pairs)


def _counts(shape: StepShape) -> tuple[float, float, float]:
    return max(1, shape.n_ubatches), shape.n_tokens, shape.n_pairs


class StepCost:
    """Predicts what a step takes, and learns from each."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all that was learnt."""
        self.n_observed = 0
        """Steps learnt from."""
        self._coefficients = [_LEAST_S, _LEAST_S, 0.0]
        self._prior = [_LEAST_S] * 3
        # By kind: sums of products of two counts over squared seconds, and of one over seconds.
        self._squares = {kind: [[0.0] * 3 for _ in range(3)] for kind in (False, True)}
        self._targets = {kind: [0.0] * 3 for kind in (False, True)}

    def predict(self, shape: StepShape) -> float:
        """Returns the seconds that a step takes, > 0."""
        a, b, c = self._coefficients
        n_batches, n_tokens, n_pairs = _counts(shape)
        return max(_LEAST_S, a * n_batches + b * n_tokens + c * n_pairs)

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns from a step that succeeded.

        Args:
            shape: What it computed.
            timings: What it took in the engine; without a total it is ignored.
            wall_s: Seconds with the host's part; 0 is not known.
        """
        seconds = max(timings.total_s, wall_s)
        counts = _counts(shape)
        if not (timings.total_s > 0 and is_duration(seconds) and all(map(math.isfinite, counts))):
            return
        if not shape.n_tokens:
            return
        if not self.n_observed:
            per_token = seconds * _PRIOR[1] / counts[1]
            self._prior = [seconds * _PRIOR[0] / counts[0], per_token, per_token * _PRIOR[2]]
            self._prior = [max(value, _LEAST_S**2) for value in self._prior]
            self._coefficients = list(self._prior)
        self.n_observed += 1
        # The smaller of both as scale would let one step that was too short weigh like hundreds.
        scale = max(seconds, self.predict(shape))
        kind = shape.n_tokens > shape.n_outputs
        squares, targets = self._squares[kind], self._targets[kind]
        scaled = [count / scale for count in counts]
        for i in range(3):
            targets[i] = targets[i] * _FADING + scaled[i] * seconds / scale
            for j in range(3):
                squares[i][j] = squares[i][j] * _FADING + scaled[i] * scaled[j]
        self._solve()

    def _solve(self) -> None:
        found, (some, others) = self._coefficients, self._squares.values()
        rows = [
            [x + y for x, y in zip(*pair, strict=True)] for pair in zip(some, others, strict=True)
        ]
        targets = [x + y for x, y in zip(*self._targets.values(), strict=True)]
        for _ in range(_N_SWEEPS):
            for i, (row, prior) in enumerate(zip(rows, self._prior, strict=True)):
                weight = _PRIOR_WEIGHT / prior**2
                rest = row[0] * found[0] + row[1] * found[1] + row[2] * found[2] - row[i] * found[i]
                found[i] = max(0.0, (targets[i] + weight * prior - rest) / (row[i] + weight))

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns how many tokens of a prompt fit into a step beside what it does already.

        Args:
            shape: The step without them.
            seconds: What the whole step may take.
            n_past: Tokens of the prompt that are computed.
            n_most: Most tokens, >= 0.
        """
        a, b, c = self._coefficients
        left_s = seconds - self.predict(shape) - (a if shape.n_tokens else 0.0)
        if not left_s > 0:
            return 0
        # c / 2 n² + (b + c n_past) n = left_s, solved so that it holds for c = 0, too.
        slope = b + c * n_past
        n = 2 * left_s / max(slope + math.sqrt(slope**2 + 2 * c * left_s), _LEAST_S**2)
        return int(min(n, n_most))

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        """Returns the seconds of computing a prompt again, at most `n_batch` tokens a step."""
        n_steps = -(-n_tokens // n_batch)
        a, b, c = self._coefficients
        return a * n_steps + b * n_tokens + c * n_tokens**2 / 2
