"""What a step costs in seconds: a model of it, fitted online to what steps did and took. Pure.

A step is drafting, one decode of the target, feeding the drafter, and sampling. Each part is a sum
of non-negative coefficients times counts of the step's `StepShape`:

- draft: per drafting pass (as many as the longest draft is long), per draft token;
- decode: per physical batch, per token (less or more as the batch widens: weights are read once per
  batch, so few tokens cost little more than one), per sampled position, per pair of token and cell,
  and for a shape other than the last step's: llama.cpp then builds its graph anew;
- process: per physical batch, per token. It is paid in steps without drafts too;
- sample: per step, per sampled position;
- the rest, host included: per step, per sequence.

The fit is least squares of the relative error, with weights that keep outliers from counting, and
forgets per kind of step: a kind that was not seen for long keeps what was learnt of it.

No such sum fits a machine everywhere. So what steps of one draft length and about as many sequences
took, beside what the sum says, is learnt too, and corrects it: it is these that compete.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from operator import add, mul
from typing import NamedTuple, Protocol

from drafthouse_server.step import PlanEntry, ResultEntry, StepTimings

__all__ = [
    "CostModel",
    "Splitting",
    "StepCost",
    "StepShape",
    "count_ubatches",
    "expect_ubatches",
    "shape_of",
]


class Splitting(enum.Enum):
    """How llama.cpp cuts one decode into physical batches."""

    NONE = enum.auto()
    """Sequences share one pool of cells: tokens fill physical batches in any mix."""
    STREAMS = enum.auto()
    """Cells of its own for each slot.

    A physical batch takes equally many tokens of slots that follow one another.
    """
    GROUPS = enum.auto()
    """A recurrent target.

    One decode for all without a draft, then one for each run of neighbours with equal drafts.
    """


class StepShape(NamedTuple):
    """What a step computes, as far as its cost depends on it."""

    n_decodes: int = 0
    """Sequences that generate."""
    n_depth: int = 0
    """Longest draft; the drafter runs as many passes."""
    n_draft: int = 0
    """Draft tokens, over all sequences."""
    n_tokens: float = 0
    """Tokens of the target's decode: last tokens, drafts and pieces of prompts.

    Of a step that may come out in several ways this, and what follows, is what can be expected.
    """
    n_outputs: float = 0
    """Sampled positions."""
    n_ubatches: float = 1
    """Physical batches of the target's decode."""
    n_pairs: float = 0.0
    """Pairs of a token and a cell before it: the work of attention."""
    is_fed: bool = True
    """Whether anybody's drafter is fed: what that takes is left out where nobody's is."""
    n_rebuilt: float = 0.0
    """Physical batches whose graphs are built anew, where steps are known to vary."""


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
    count = _count_strokes if splitting is Splitting.STREAMS else _count_groups
    return max(n_filled, count(seq_ids, lengths))


def expect_ubatches(
    seq_ids: Sequence[int],
    lengths: Sequence[int],
    shares: Sequence[float],
    splitting: Splitting,
    n_ubatch: int,
) -> float:
    """Returns how many physical batches to expect where drafts come with a probability.

    Where each draft is as long as the others, or none comes, it is exact for the rule.

    Args:
        seq_ids: Slots, ascending.
        lengths: Tokens of each if its draft comes, >= 1; else it has one.
        shares: Probability of each one's draft, [0, 1].
        splitting: The rule.
        n_ubatch: Most tokens of one physical batch.
    """
    n_sequences = len(lengths)
    n_drafted = sum([(n - 1) * share for n, share in zip(lengths, shares, strict=True)])
    n_filled = -(-(n_sequences + n_drafted) // n_ubatch)
    if splitting is Splitting.NONE:
        return max(1.0, n_filled)
    n_alone = count_ubatches(seq_ids, [1] * n_sequences, splitting, n_ubatch)
    if not n_drafted:
        return n_alone
    comes = [share if n > 1 else 0.0 for n, share in zip(lengths, shares, strict=True)]
    n_more = _count_borders(seq_ids, comes, splitting)
    # What lengths that differ cost when all drafts come, beside none or one length.
    certain = [1.0 if n > 1 else 0.0 for n in lengths]
    n_all = count_ubatches(seq_ids, lengths, splitting, n_ubatch)
    n_unequal = n_all - n_alone - _count_borders(seq_ids, certain, splitting)
    share = sum(comes) / sum(certain)
    return max(n_filled, n_alone + n_more + share * n_unequal)


def _count_borders(seq_ids: Sequence[int], shares: Sequence[float], splitting: Splitting) -> float:
    """Returns the batches to expect beyond those of single tokens, with drafts of one length."""
    is_grouped = splitting is Splitting.GROUPS
    n_borders, last_id, last, all_come = 0.0, -2, 0.0, 0.0
    for seq_id, share in zip(seq_ids, shares, strict=True):
        if seq_id != last_id + 1:
            # Where the drafts of all neighbours come, they need no batch of their own.
            n_borders += (0.0 if is_grouped else share) - all_come
            all_come = 0.0 if is_grouped else share
        else:
            n_borders += share * (1 - last) + (last * (1 - share) if is_grouped else 0.0)
            all_come *= share
        last_id, last = seq_id, share
    return n_borders - all_come


def _count_strokes(seq_ids: Sequence[int], lengths: Sequence[int]) -> int:
    """Counts the level strokes that paint a skyline: each takes as much as its shortest allows."""
    n_strokes = top = 0
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
            n_strokes += 1
    return n_strokes


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
    *,
    is_fed: bool = True,
) -> StepShape:
    """Returns the shape of a step that was run.

    Drafting is counted as it was planned, verification as it came out: a drafter may propose less.

    Args:
        entries: The plan's.
        results: The engine's, in the same order.
        splitting: How the target's decode is cut.
        n_ubatch: Most tokens of one physical batch.
        is_fed: Whether anybody's drafter was to be fed.
    """
    # One loop over all of it takes twice as long, and this runs after every step.
    drafted = [result.n_drafted for result in results]
    lengths = [len(entry.tokens) + n for entry, n in zip(entries, drafted, strict=True)]
    n_pairs = sum([n * entry.n_past for entry, n in zip(entries, lengths, strict=True)])
    # A given draft costs no drafting.
    wanted = [
        0 if result.is_given else entry.n_draft
        for entry, result in zip(entries, results, strict=True)
        if entry.is_output
    ]
    n_decodes = len(wanted)
    # Only outputs have drafts.
    n_outputs = n_decodes + sum(drafted)
    seq_ids = [entry.seq_id for entry in entries]
    if seq_ids != sorted(seq_ids):
        parts = sorted(zip(seq_ids, lengths, strict=True))
        seq_ids = [seq_id for seq_id, _ in parts]
        lengths = [length for _, length in parts]
    n_ubatches = count_ubatches(seq_ids, lengths, splitting, n_ubatch)
    n_depth = max(wanted, default=0)
    n_draft, n_tokens = sum(wanted), sum(lengths)
    return StepShape(n_decodes, n_depth, n_draft, n_tokens, n_outputs, n_ubatches, n_pairs, is_fed)


_KNOTS = (2, 8, 32, 128)
"""Widths of a physical batch at which a token's cost may change."""

_RESOLUTION_S = 1e-6
"""Seconds below which a difference tells nothing: a part of a step may take no time at all."""

_UNIT_S = 0.01
"""Seconds of the target's decode of one token, before anything is known."""

# Costs before anything is known, as shares of the unit.
_PRIOR_DRAFT = (0.15, 0.01)
_PRIOR_DECODE = (1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 1e-5, 0.05)
_PRIOR_PROCESS = (0.05, 0.005)
_PRIOR_SAMPLE = (0.01, 0.01)
_PRIOR_REST = (0.02, 0.002)
_NOTHING = (0.0, 0.0)
"""Coefficients of feeding, where nobody's drafter is fed."""
_SLOPES = range(1, 6)
"""Places of the slopes among the decode's coefficients."""

_FORGETTING = 0.95
"""What is left of a kind's past at each of its steps: the last 20 count."""
_PRIOR_WEIGHT = 0.003
"""Of the prior, in observations."""
_SMOOTHNESS = 0.03
"""How strongly neighbouring slopes pull each other, where nothing else is known."""
_N_KNOWN = 60
"""Steps of a kind that are all learnt from."""
_THINNING = 4
"""Of further ones, one in so many is: learning takes time as well."""
_N_RATIOS = 15
"""Well known steps whose median tells whether the machine has changed."""
_SPEED_TOLERANCE = 0.15
"""How far off that median may be."""
_SPEED_MAX = 10.0
"""So many times slower, or quicker, the machine may be than when it was learnt: the costs of steps
that are seen are learnt anew meanwhile, those of the others would drift away without end."""
_UNFED = -1
"""Draft length, as a kind of step, where nobody's drafter is fed."""
_N_CORRECTION = 25
"""Steps that a correction rests on, at most."""
_N_CORRECTION_KNOWN = 7
"""The same, at least, for it to be known."""
_WEIGHT_CORRECTION = 2.0
"""Of the correction of all draft lengths as a prior of one's, in steps."""
_HUBER = 3.0
"""Deviations beyond which an observation counts less."""
_DEVIATION_MIN = 0.02
"""Least typical deviation, relative: timers are no better."""
_DEVIATION_GROWTH = 1.25
"""How fast the typical deviation may grow: so many times per observation."""


class _Fit:
    """Non-negative weighted least squares of one part of a step.

    Args:
        prior: Coefficients before anything is known, in units.
        slopes: Places of coefficients that pull each other.
    """

    def __init__(self, prior: Sequence[float], slopes: range = range(0)) -> None:
        self._prior = tuple(prior)
        self._slopes = slopes
        self._kinds: dict[int, tuple[list[float], list[float]]] = {}
        self._deviation = 0.3
        self.n_observed = 0
        self.coefficients = [0.0] * len(self._prior)
        self.rescale(_UNIT_S)

    def rescale(self, unit_s: float) -> None:
        """Starts over from the prior, for a machine and a model on which the unit takes so long."""
        self.unit_s = unit_s = max(unit_s, _RESOLUTION_S)
        scaled = [share * unit_s for share in self._prior]
        n = len(scaled)
        self.coefficients = scaled
        self._moments = [0.0] * n**2  # row after row
        self._targets = [0.0] * n
        for i, value in enumerate(scaled):
            weight = _PRIOR_WEIGHT / value**2
            self._moments[i * n + i] = weight
            self._targets[i] = weight * value
        for i in self._slopes[:-1]:
            weight = _SMOOTHNESS / scaled[i] ** 2
            for row, column, sign in ((i, i, 1), (i + 1, i + 1, 1), (i, i + 1, -1), (i + 1, i, -1)):
                self._moments[row * n + column] += sign * weight

    def predict(self, counts: Sequence[float]) -> float:
        """Returns the seconds that counts stand for."""
        return float(sum(map(mul, self.coefficients, counts)))

    def observe(self, counts: Sequence[float], seconds: float, kind: int) -> None:
        """Learns from one step.

        Args:
            counts: Of the step, one per coefficient.
            seconds: What it took, >= 0.
            kind: Of steps that are forgotten together.
        """
        if not any(counts):
            return
        expected = self.predict(counts)
        if self.n_observed == 0 and seconds > 0:
            self.rescale(seconds / sum(map(mul, self._prior, counts)))
            expected = self.predict(counts)
        self.n_observed += 1
        weight = self._weigh(seconds, expected)
        self._add([count * weight for count in counts], counts, seconds, kind)
        self._solve()

    def _weigh(self, seconds: float, expected: float) -> float:
        """Returns an observation's weight: less when it is far off, for how far is usual."""
        # The smaller of both as scale would let one slow step weigh like hundreds.
        scale = max(seconds, expected, _RESOLUTION_S)
        off = abs(seconds - expected) / scale
        bound = _HUBER * self._deviation
        usual = min(off, self._deviation * _DEVIATION_GROWTH * 2)
        self._deviation = max(_DEVIATION_MIN, self._deviation + 0.05 * (usual - self._deviation))
        weight = 1 / scale**2
        return weight if off <= bound else weight * bound / off

    def _add(
        self, weighted: Sequence[float], counts: Sequence[float], seconds: float, kind: int
    ) -> None:
        """Adds an observation to its kind, whose past fades."""
        n = len(counts)
        past, targets = self._kinds.get(kind) or ([0.0] * n**2, [0.0] * n)
        fading = 1 - _FORGETTING
        # One row after the other, in one list: a list for each takes twice as long.
        products = [factor * count for factor in weighted for count in counts]
        changes = [new - fading * old for new, old in zip(products, past, strict=True)]
        target_changes = [
            factor * seconds - fading * old for factor, old in zip(weighted, targets, strict=True)
        ]
        self._kinds[kind] = list(map(add, past, changes)), list(map(add, targets, target_changes))
        self._moments = list(map(add, self._moments, changes))
        self._targets = list(map(add, self._targets, target_changes))

    def _solve(self) -> None:
        """One sweep over the coefficients; the next observation goes on from there."""
        coefficients, moments, n = self.coefficients, self._moments, len(self.coefficients)
        for i, target in enumerate(self._targets):
            row = moments[i * n : (i + 1) * n]
            rest = target - sum(map(mul, row, coefficients))
            coefficients[i] = max(0.0, coefficients[i] + rest / row[i])


class _Correction:
    """What steps took over what they should have taken: the median of the last ones."""

    __slots__ = ("_median", "_ratios")

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_N_CORRECTION)
        self._median = 1.0

    @property
    def is_known(self) -> bool:
        """Whether there were enough."""
        return len(self._ratios) >= _N_CORRECTION_KNOWN

    def add(self, ratio: float) -> None:
        """Learns from a step."""
        self._ratios.append(ratio)
        self._median = sorted(self._ratios)[len(self._ratios) // 2]

    def value(self, prior: float) -> float:
        """Returns the factor to correct with."""
        n = len(self._ratios)
        return (n * self._median + _WEIGHT_CORRECTION * prior) / (n + _WEIGHT_CORRECTION)


class StepCost:
    """Predicts how long a step takes, and learns from each how long it took.

    Before it has seen a step it answers from a prior that has the right proportions for a small
    model on a processor; the first step sets the scale.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all steps: it answers from its prior again."""
        self._draft = _Fit(_PRIOR_DRAFT)
        self._decode = _Fit(_PRIOR_DECODE, _SLOPES)
        self._process = _Fit(_PRIOR_PROCESS)
        self._sample = _Fit(_PRIOR_SAMPLE)
        self._rest = _Fit(_PRIOR_REST)
        self._fits = (self._draft, self._decode, self._process, self._sample, self._rest)
        self._n_by_kind: dict[tuple[int, int], int] = {}
        self._speed = 1.0  # what a second of the fits is now, in seconds
        self._ratios: list[tuple[tuple[int, int], float]] = []
        self._last_shape: StepShape | None = None
        # By sequences, as a power of two, and draft length; and by sequences alone.
        self._corrections: dict[tuple[int, int], _Correction] = {}
        self._corrections_all: dict[int, _Correction] = {}
        self._correction_overall = _Correction()

    @property
    def n_observed(self) -> int:
        """Steps learnt from."""
        return self._decode.n_observed

    def coefficients(self) -> dict[str, tuple[float, ...]]:
        """Returns what was learnt, in seconds, by part of a step; the module tells the order."""
        names = ("draft", "decode", "process", "sample", "rest")
        return {name: tuple(fit.coefficients) for name, fit in zip(names, self._fits, strict=True)}

    def predict(self, shape: StepShape) -> float:
        """Returns how long a step will take, in seconds, the host's part included.

        It is one in a row of its kind: what a change of shape costs is not in it.
        """
        seconds = self._sum(shape)
        if shape.n_tokens == shape.n_outputs:
            kind = shape.n_depth if shape.is_fed else _UNFED
            seconds *= self._correction(shape.n_decodes.bit_length(), kind)
        return seconds

    def _correction(self, n_bits: int, n_depth: int) -> float:
        prior = self._correction_overall.value(1.0)
        alike = self._corrections_all.get(n_bits)
        if alike is None:
            return prior
        prior = alike.value(prior)
        found = self._corrections.get((n_bits, n_depth))
        return found.value(prior) if found else prior

    def _correct(self, kind: tuple[int, int], ratio: float) -> None:
        """Learns what a step of nothing but decodes took, beside what the sum says.

        Args:
            kind: Sequences as a power of two, and draft length.
            ratio: Of the two.
        """
        if kind not in self._corrections:
            self._corrections[kind] = _Correction()
            self._corrections_all.setdefault(kind[0], _Correction())
        self._corrections[kind].add(ratio)
        self._corrections_all[kind[0]].add(ratio)
        self._correction_overall.add(ratio)

    def _sum(self, shape: StepShape) -> float:
        n_decodes, n_depth, n_draft, n_tokens, n_outputs, n_ubatches, _, is_fed, _ = shape
        draft = self._draft.coefficients
        process = self._process.coefficients if is_fed else _NOTHING
        sample = self._sample.coefficients
        rest = self._rest.coefficients
        return self._speed * (
            draft[0] * n_depth
            + draft[1] * n_draft
            + self._decode.predict(_decode_counts(shape))
            + process[0] * n_ubatches
            + process[1] * n_tokens
            + sample[0]
            + sample[1] * n_outputs
            + rest[0]
            + rest[1] * n_decodes
        )

    def process_s(self, shape: StepShape) -> float:
        """Returns what feeding the drafter takes of such a step, in seconds, if it is fed."""
        per_batch, per_token = self._process.coefficients
        return self._speed * (per_batch * shape.n_ubatches + per_token * shape.n_tokens)

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Learns from a step that succeeded.

        Args:
            shape: What it computed; see `shape_of`.
            timings: What it took; without a total it is ignored.
            wall_s: Seconds from its plan to its result, the host's part included; 0 is not known.
        """
        if timings.total_s <= 0 or not shape.n_tokens:
            return
        width_kind = int(shape.n_tokens // shape.n_ubatches).bit_length()
        last, self._last_shape = self._last_shape, shape
        is_same = last is not None and last[:6] == shape[:6]
        n_known = self._n_by_kind.get((shape.n_depth, width_kind), 0)
        self._n_by_kind[shape.n_depth, width_kind] = n_known + 1
        if is_same and shape.n_tokens == shape.n_outputs and self.n_observed:
            seconds = max(timings.total_s, wall_s, _RESOLUTION_S)
            ratio = seconds / max(self._sum(shape), _RESOLUTION_S)
            kind = shape.n_decodes.bit_length(), shape.n_depth if shape.is_fed else _UNFED
            found = self._corrections.get(kind)
            if found is not None and found.is_known:
                self._follow_speed(kind, ratio)
            else:
                self._correct(kind, ratio)
        if n_known > _N_KNOWN and n_known % _THINNING:
            return
        is_first = self._decode.n_observed == 0
        seconds = max(timings.total_s, wall_s)
        self._learn(shape, timings, seconds, width_kind, is_same=is_same)
        if is_first:
            for fit in self._fits:
                if fit is not self._decode:
                    fit.rescale(self._decode.unit_s)

    def _follow_speed(self, kind: tuple[int, int], ratio: float) -> None:
        """Notices when steps that are well known take another time: the machine has changed."""
        self._ratios.append((kind, ratio))
        if len(self._ratios) < _N_RATIOS:
            return
        found = sorted([past / self._correction(*then) for then, past in self._ratios])
        median = found[_N_RATIOS // 2]
        if abs(median - 1) <= _SPEED_TOLERANCE:
            median = 1.0
        self._speed = min(max(self._speed * median, 1 / _SPEED_MAX), _SPEED_MAX)
        for then, past in self._ratios:
            self._correct(then, past / median)
        self._ratios.clear()

    def _learn(
        self,
        shape: StepShape,
        timings: StepTimings,
        seconds: float,
        width_kind: int,
        *,
        is_same: bool,
    ) -> None:
        n_decodes, n_depth, n_draft, n_tokens, n_outputs, n_ubatches = shape[:6]
        parts_s = timings.draft_s + timings.decode_s + timings.process_s + timings.sample_s
        # An engine that tells the total only is one whose decode is everything.
        decode_s = timings.decode_s or max(0.0, timings.total_s - parts_s)
        rest_s = max(0.0, seconds - (parts_s - timings.decode_s + decode_s))
        speed = self._speed
        counts = _decode_counts(shape._replace(n_rebuilt=0 if is_same else n_ubatches))
        self._decode.observe(counts, decode_s / speed, width_kind)
        if n_depth:
            self._draft.observe((n_depth, n_draft), timings.draft_s / speed, n_depth)
        if shape.is_fed:  # others tell nothing about what feeding costs
            self._process.observe((n_ubatches, n_tokens), timings.process_s / speed, width_kind)
        if n_outputs:
            self._sample.observe((1.0, n_outputs), timings.sample_s / speed, width_kind)
        self._rest.observe((1.0, n_decodes), rest_s / speed, n_decodes.bit_length())

    def fit_prefill(self, shape: StepShape, seconds: float, n_past: int, n_most: int) -> int:
        """Returns how many tokens of a prompt fit into a step beside what it does already.

        Args:
            shape: The step without them; `StepShape()` is one that does nothing else.
            seconds: What the whole step may take.
            n_past: Tokens of the prompt that are computed.
            n_most: Most tokens, >= 0.

        Returns:
            [0, n_most]; 0 when the step is too long already.
        """
        low, high = 0, n_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.predict(_with_prefill(shape, middle, n_past)) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def recompute_s(self, n_tokens: int, n_batch: int) -> float:
        """Returns how long it takes to compute a prompt again, in steps of its own.

        Args:
            n_tokens: Tokens to compute.
            n_batch: Most tokens of one step.
        """
        total_s = 0.0
        for start in range(0, n_tokens, n_batch):
            n_piece = min(n_batch, n_tokens - start)
            total_s += self.predict(_with_prefill(StepShape(n_ubatches=0), n_piece, start))
        return total_s


def _with_prefill(shape: StepShape, n_tokens: int, n_past: int) -> StepShape:
    """Returns a step with a piece of a prompt in it.

    Prompts make a physical batch of their own beside decodes.
    """
    n_before, n_ubatches = shape.n_tokens, shape.n_ubatches
    if n_tokens:
        n_ubatches = n_ubatches + 1 if n_before else 1
    return shape._replace(
        n_tokens=n_before + n_tokens,
        n_ubatches=max(1, n_ubatches),
        n_pairs=shape.n_pairs + n_tokens * (n_past + n_tokens / 2),
    )


def _decode_counts(shape: StepShape) -> tuple[float, ...]:
    """Returns what the decode's coefficients are multiplied with."""
    n_ubatches = shape.n_ubatches
    width = shape.n_tokens / n_ubatches
    n = n_ubatches
    a, b, c, d = _KNOTS
    # Written out: a loop takes twice as long, and this runs for every choice of K.
    return (
        n,
        n * (width if width < a else a),
        0.0 if width <= a else n * ((width if width < b else b) - a),
        0.0 if width <= b else n * ((width if width < c else c) - b),
        0.0 if width <= c else n * ((width if width < d else d) - c),
        0.0 if width <= d else n * (width - d),
        shape.n_outputs,
        shape.n_pairs,
        shape.n_rebuilt,
    )
