"""How many tokens to draft for whom. Pure: no clock, no randomness.

`FixedDraft` does what requests ask. `AdaptiveDraft` chooses K for all sequences of a step together,
so that the step yields the most tokens per second that can be expected:

- What a draft yields is learnt by `Acceptance`, what it costs by `StepCost`.
- Drafts of one length share a physical batch, so one K for all is tried first; where sequences
  differ, drafts for some are tried too, and taken if they pay for their own physical batches.
- Where drafts often do not come, as n-grams', a step is what can be expected of it: whoever has a
  draft costs physical batches beside those that have none.
- A new choice must promise more than the old one by a margin: no flapping.
- What is not done is not learnt. So K is varied when a server has just started, and a little of the
  time goes to trials of another K for some steps in a row, rarer as they tell nothing new.
- Feeding the drafter (`process`) costs time even in steps without a draft. When steps without it
  promise more than the best drafts, sequences let their draft state go, and all that is left of
  speculation is a visit now and then: the drafters are fed again, some steps later drafts are
  tried, and what they yield decides. See `AdaptiveDraft.wants`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import getitem, mul, sub
from typing import Any, NamedTuple, Protocol

from drafthouse_server.drafting.acceptance import Acceptance, Track
from drafthouse_server.drafting.cost import (
    Splitting,
    StepCost,
    StepShape,
    count_ubatches,
    expect_ubatches,
)
from drafthouse_server.step import EngineLimits, StepResult

__all__ = ["AdaptiveDraft", "DraftPolicy", "Draftable", "FixedDraft", "fit", "level"]


class Draftable(Protocol):
    """What a policy may know of a sequence."""

    draft_memory: Any  # Track | None
    """What the policy remembers of it; nobody else's business."""
    is_draft_cold: bool
    """Whether the draft state was lost."""

    @property
    def seq_id(self) -> int:
        """Slot."""
        ...

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        ...

    @property
    def n_draft(self) -> int | None:
        """K asked for; None leaves it to the policy."""
        ...

    @property
    def n_computed(self) -> int:
        """Tokens in the KV cache."""
        ...

    @property
    def n_output_left(self) -> int:
        """Tokens that may still be generated."""
        ...

    @property
    def n_no_room(self) -> int:
        """Steps in a row that found no cell."""
        ...


class DraftPolicy(Protocol):
    """Chooses K and learns from what became of it. Pure: no clock, no randomness."""

    n_turns: int
    """How often the answers of `wants` have changed."""

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether a sequence's drafter shall be fed; if not, it gets no draft."""
        ...

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, n_room: int, n_prefill: int
    ) -> list[int]:
        """Returns K of the next step for each sequence, [0, limits.n_draft_max].

        Args:
            sequences: Those that are about to generate: only their last tokens are not computed.
            limits: What the engine can carry.
            n_room: Most draft tokens of all together, >= 0.
            n_prefill: Tokens of prompts that the step may carry besides.
        """
        ...

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns how the drafts of a step did; they are those that were chosen last.

        Args:
            result: The step's; without entries that say nothing of the drafter.
            streams_s: Seconds of the step without what its prompts took, the host's part included;
                0 is not known.
        """
        ...

    def reset(self) -> None:
        """Forgets all that was learnt.

        The sequences' `draft_memory` is no longer valid; whoever calls it sets it to None.
        """
        ...


class FixedDraft:
    """K as the request asks, or else the server's default.

    Args:
        n_draft_default: K for requests that do not ask, >= 0.
    """

    n_turns = 0

    def __init__(self, n_draft_default: int) -> None:
        self._n_draft_default = n_draft_default

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether it is one that gets drafts."""
        n_draft = sequence.n_draft
        return (self._n_draft_default if n_draft is None else n_draft) > 0

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, n_room: int, n_prefill: int
    ) -> list[int]:
        """Returns K for each sequence; where they are too many, the largest shrink first."""
        wishes = [self._choose(sequence, limits) for sequence in sequences]
        return wishes if sum(wishes) <= n_room else level(wishes, n_room)

    def _choose(self, sequence: Draftable, limits: EngineLimits) -> int:
        n_draft = sequence.n_draft
        if n_draft is None:
            n_draft = self._n_draft_default
        return fit(n_draft, sequence, limits) if n_draft > 0 else 0

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns nothing: K is fixed."""

    def reset(self) -> None:
        """Forgets nothing: nothing was learnt."""


_N_STEPS_KEPT = (8, 24)
"""A choice stands for so many steps, unless the number of sequences changes much.

At first, and when it was found good again and again: to choose takes time as well.
"""
_CHANGE = 0.25
"""Of the number of sequences: much."""
_MARGIN = 0.01
"""By how much a new choice must be better."""
_N_GRADES_MIXED = 4
"""Sequences whose grades are so far apart may get drafts of different lengths."""
_MET_MIXED = 0.5
"""The same, of sequences whose drafts come so much more often."""
_N_STEPS_TRIAL = 4
"""Steps of a trial: the first one of another shape costs more, and tells less."""
_N_TIMES_CALIBRATED = 2
"""How often every K that is tried when a server starts has its turn."""
_N_CROWD = 8
"""More sequences are a crowd, which is calibrated with less."""
_TRIAL_SHARE = 0.01
"""Of the time, the most that trials may cost, and visits."""
_EARLY_SHARE = 0.03
"""The same, of a visit that is made because drafts should pay now."""
_N_STEPS_REST = 24
"""Steps between trials, at least."""
_GROWTH = 16
"""Trials that tell nothing new become rarer, down to one in so many times the least interval."""
_N_DRAFTS_TRIAL = 16
"""Drafts that a visit sees at least: few sequences draft in more steps."""
_N_STEPS_WARMING = 10
"""Steps of a visit in which drafters are fed and nothing is drafted: after them drafts are good."""
_SIGNIFICANCE = 2.5
"""Standard deviations by which trials must beat what was expected for the past to be over."""
_DISCOUNT = 0.2
"""What the past counts then."""
_FADING_SURPRISE = 0.8
"""What is left of earlier trials' surprises after one more."""
_N_SEARCHES_UNPAID = 2
"""Searches in a row that find steps without a drafter better, after which it is let go."""
_BENEFIT = 1.5
"""Standard deviations by which acceptance may be better than it looks: the benefit of the doubt."""
_PROCESS_SHARE = 0.01
"""Of a step's time: a drafter that takes less to feed is never let go."""
_EARLY_MARGIN = 0.05
"""What drafts must promise beyond steps without a drafter for an early visit."""


class _Crowd(NamedTuple):
    """Those that generate in a step; lists in the same order."""

    sequences: Sequence[Draftable]
    """The sequences."""
    tracks: list[Track]
    """What is remembered of them."""
    caps: list[int]
    """Largest K; where bound, the only one."""
    has_bound: bool
    """Whether K was asked for, by anyone."""

    def bounded(self, n_drafts: Iterable[int]) -> list[int]:
        """Returns K as far as it is possible now."""
        if self.has_bound:
            return [
                (n if n < cap else cap) if track.n_asked is None else cap
                for n, cap, track in zip(n_drafts, self.caps, self.tracks, strict=True)
            ]
        return [n if n < cap else cap for n, cap in zip(n_drafts, self.caps, strict=True)]

    def current(self) -> list[int]:
        """Returns what was chosen last, as far as it is possible now."""
        return self.bounded([track.n_draft for track in self.tracks])

    @property
    def is_mixed(self) -> bool:
        """Whether their drafts differ much in quality, or in how often they come."""
        grades = [track.grade for track in self.tracks]
        if max(grades) - min(grades) >= _N_GRADES_MIXED:
            return True
        met = [track.met for track in self.tracks]
        return max(met) - min(met) >= _MET_MIXED


class _Machine(NamedTuple):
    """What steps cost, and why."""

    cost: StepCost
    """The model of it."""
    splitting: Splitting
    """How a decode is cut."""
    n_ubatch: int
    """Most tokens of one physical batch."""


class _Situation:
    """One choice to be made: what is fixed of it, and how many tokens per second K would give.

    Args:
        crowd: Those that generate.
        yields: Accepted tokens to expect by K, of each.
        machine: What steps cost.
        n_prefill: Tokens of prompts in the same step.
    """

    def __init__(
        self,
        crowd: _Crowd,
        yields: list[tuple[float, ...]],
        machine: _Machine,
        n_prefill: int = 0,
    ) -> None:
        self.caps = crowd.caps
        self.yields = yields
        self._n = len(self.caps)
        self._met = [track.met for track in crowd.tracks]
        self._is_sure = min(self._met) == 1.0  # all drafts that are asked for come
        self._bounded = crowd.bounded
        self._cost, self._splitting, self._n_ubatch = machine
        seq_ids = [sequence.seq_id for sequence in crowd.sequences]
        self._seq_ids = sorted(seq_ids)
        self._order: list[int] | None = None  # of the sequences by slot, where it is another one
        if seq_ids != self._seq_ids:
            self._order = sorted(range(self._n), key=seq_ids.__getitem__)
        self._n_cells = sum([sequence.n_computed for sequence in crowd.sequences]) / self._n
        self._n_prefill = 0
        self._base_s = 0.0
        zeros = [0] * self._n
        self._alone = self.shape(zeros)
        if n_prefill:
            # Prompts are not this choice's business: only what drafts cost beside them is.
            alone_s = self._cost.predict(self._alone)
            self._n_prefill = n_prefill
            self._base_s = alone_s - self.seconds(zeros)

    def equal(self, n_draft: int) -> list[int]:
        """Returns the same K for all, as far as each can."""
        return self._bounded([n_draft] * self._n)

    def all_equal(self) -> list[list[int]]:
        """Returns the same K for all, for every K."""
        return [self.equal(n_draft) for n_draft in range(max(self.caps) + 1)]

    def shape(self, n_drafts: list[int]) -> StepShape:
        """Returns the shape of the step; where drafts may not come, what can be expected."""
        n_draft = sum(n_drafts)
        if n_draft and not self._is_sure:
            return self._shape_expected(n_drafts)
        n_tokens = self._n + n_draft
        if self._order is None:
            lengths = [1 + n for n in n_drafts]
        else:
            lengths = [1 + n_drafts[i] for i in self._order]
        n_ubatches = count_ubatches(self._seq_ids, lengths, self._splitting, self._n_ubatch)
        n_prefill = self._n_prefill
        return StepShape(
            self._n,
            max(n_drafts),
            n_draft,
            n_tokens + n_prefill,
            n_tokens,
            n_ubatches + 1 if n_prefill else n_ubatches,
            n_tokens * self._n_cells,
        )

    def _shape_expected(self, n_drafts: list[int]) -> StepShape:
        order = range(self._n) if self._order is None else self._order
        lengths = [1 + n_drafts[i] for i in order]
        met = [self._met[i] for i in order]
        n_ubatches = expect_ubatches(self._seq_ids, lengths, met, self._splitting, self._n_ubatch)
        n_tokens = self._n + sum(map(mul, n_drafts, self._met))
        none_comes = math.prod([1 - share for n, share in zip(lengths, met, strict=True) if n > 1])
        is_prefill = self._n_prefill > 0
        return StepShape(
            self._n,
            max(n_drafts),
            sum(n_drafts),
            n_tokens + self._n_prefill,
            n_tokens,
            n_ubatches + is_prefill,
            n_tokens * self._n_cells,
            # The next step is alike only if nothing comes again.
            n_rebuilt=n_ubatches * (1 - none_comes**2),
        )

    def seconds(self, n_drafts: list[int]) -> float:
        """Returns what the step costs."""
        return self._base_s + self._cost.predict(self.shape(n_drafts))

    def rate(self, n_drafts: list[int]) -> float:
        """Returns the tokens per second to expect."""
        n_emitted = self._n + sum(map(getitem, self.yields, n_drafts))
        return n_emitted / self.seconds(n_drafts)

    def rate_unfed(self) -> tuple[float, float]:
        """Returns tokens per second without a drafter, and the share of time that feeding takes.

        Of a step without prompts, as the rates with drafts are.
        """
        shape = self._alone
        process_share = self._cost.process_s(shape) / self._cost.predict(shape)
        return self._n / self._cost.predict(shape._replace(is_fed=False)), process_share

    def unequal(self, equal: list[int]) -> Iterator[list[int]]:
        """Yields choices that give more to sequences whose drafts are better.

        Args:
            equal: The best K for all.
        """
        n_common = max(equal)
        neighbour = self.equal(n_common + 1 if n_common < max(self.caps) else n_common - 1)
        n_more = sum(neighbour) - sum(equal)
        if not n_more:
            return
        # What a draft token must yield to pay: what its time would give otherwise.
        price = self.rate(equal) * (self.seconds(neighbour) - self.seconds(equal)) / n_more
        # Tables have numbers: looking one up by its contents for every sequence takes long.
        numbers: dict[tuple[float, ...], int] = {}
        kinds = [numbers.setdefault(table, len(numbers)) for table in self.yields]
        tables = list(numbers)
        costs = [price * n for n in range(len(tables[0]))]
        gains = [list(map(sub, table, costs)) for table in tables]
        wishes = [gain.index(max(gain)) for gain in gains]
        yield self._bounded([wishes[kind] for kind in kinds])
        for n_draft in set(wishes):
            for n_other in {0, n_common} - {n_draft}:
                least = price * (n_draft - n_other)
                n_drafts = [
                    n_draft if table[n_draft] - table[n_other] > least else n_other
                    for table in tables
                ]
                yield self._bounded([n_drafts[kind] for kind in kinds])


def _n_steps_visit(n: int) -> int:
    """Returns the steps with drafts in a visit of so many sequences."""
    return max(_N_STEPS_TRIAL, -(-_N_DRAFTS_TRIAL // n))


class _Surprise:
    """Whether trials do much better than the past lets expect."""

    def __init__(self) -> None:
        self._surplus = 0.0  # accepted first tokens beyond what was expected
        self._variance = 0.0

    def add(self, n_expected: float, *, is_accepted: bool) -> None:
        """Learns of one sequence's first draft token."""
        self._surplus += is_accepted - n_expected
        self._variance += n_expected * (1 - n_expected)

    def conclude(self) -> bool:
        """Returns whether they do; called after a trial."""
        is_great = self._surplus > _SIGNIFICANCE * math.sqrt(self._variance)
        keeps = 0.0 if is_great else _FADING_SURPRISE
        self._surplus *= keeps
        self._variance *= keeps**2
        return is_great


class _Trials:
    """What is tried instead of the choice, and when. Times are seconds that steps took."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._is_first = False
        self.is_new = True
        self.is_visit = False
        self._n_trials = 0
        self._due_s = 0.0
        self._interval = float(_N_STEPS_REST)

    def next(self, n: int) -> int | None:
        """Returns K of the next step of the trial; None when there is none.

        Args:
            n: Sequences.
        """
        if self._is_first and n > _N_CROWD:
            self._steps = [k for k in self._steps if k <= 1]
        if self._steps:
            return self._steps.pop()
        self._is_first = False
        return None

    def calibrate(self, n: int, n_draft_max: int) -> None:
        """Begins what tells costs and acceptance when nothing is known. Once.

        The most and the least first: what lies between follows from them. A crowd does without the
        most: it would wait for it, and learns the rest soon enough.

        Args:
            n: Sequences.
            n_draft_max: Longest draft.
        """
        self.is_new = False
        self._is_first = True
        depths = dict.fromkeys((n_draft_max, 0, 1, n_draft_max // 2))
        self._steps = [k for k in depths for _ in range(_N_STEPS_TRIAL)]
        self._steps *= 1 if n > _N_CROWD else _N_TIMES_CALIBRATED
        self._steps.reverse()

    @property
    def is_running(self) -> bool:
        """Whether steps of a trial are left."""
        return bool(self._steps)

    def is_due(self, now_s: float) -> bool:
        """Returns whether it is time for another."""
        return now_s >= self._due_s

    def visit(self, n: int) -> None:
        """Begins a visit: the least that tells whether drafts pay.

        One token tells most of what there is to know of drafts, and costs least.

        Args:
            n: Sequences.
        """
        self._steps = [*[1] * _n_steps_visit(n), *[0] * _N_STEPS_WARMING]
        self.is_visit = True

    def begin(self, n: int, n_draft: int, n_draft_max: int) -> int:
        """Begins a trial of another K than the choice, and returns it.

        Beside none it is one, which costs least and tells whether anything has changed. One more
        tells what another position would yield; one less, or none, what of the cost belongs to the
        step and what to its tokens.
        """
        other = (n_draft + 1, 0, n_draft + 1, n_draft - 1)[self._n_trials % 4] if n_draft else 1
        if other > n_draft_max:
            other = n_draft - 1
        self._n_trials += 1
        n_steps = _N_STEPS_TRIAL if other < n_draft else max(_N_STEPS_TRIAL, 8 // n)
        self._steps = [other] * n_steps
        return other

    def rest(self, now_s: float, cost_s: float, step_s: float) -> None:
        """Notes the end of a trial.

        Args:
            now_s: Time.
            cost_s: What it costs, beside steps of the best kind.
            step_s: What a usual step takes.
        """
        least_s = max(0.0, cost_s) / _TRIAL_SHARE
        self._due_s = now_s + max(least_s, self._interval * step_s)
        self._interval = min(2 * self._interval, _GROWTH * _N_STEPS_REST)

    def refresh(self) -> None:
        """Has the next trials come sooner: something has changed."""
        self._interval = float(_N_STEPS_REST)


class AdaptiveDraft:
    """K for the most tokens per second, 0 included; what a request asks for is honoured.

    Args:
        n_draft_max: Of the engine's limits.
        cost: What steps cost; whoever runs steps teaches it.
        splitting: How a decode of the target is cut into physical batches.
        can_let_go: Whether sequences can give up their draft state, and be fed again.
    """

    def __init__(
        self,
        n_draft_max: int,
        cost: StepCost,
        splitting: Splitting = Splitting.STREAMS,
        *,
        can_let_go: bool = True,
    ) -> None:
        self._n_draft_max = n_draft_max
        self._machine = _Machine(cost, splitting, 1 << 30)
        self._can_let_go = can_let_go
        self.reset()

    def reset(self) -> None:
        """Forgets what drafts yield and what was tried, but not what steps cost."""
        self.n_changes = 0
        """How often the choice changed."""
        self.n_turns = 0
        self.is_warm = True
        """Whether sequences that leave K to the policy are fed to their drafters."""
        self._acceptance = Acceptance(self._n_draft_max)
        self._trials = _Trials()
        self._surprise = _Surprise()
        self._is_trial = False  # whether a trial was among the steps since the last search
        self._trial_cost_s = self._step_s = 0.0  # of the last trial, and of usual steps
        self._now_s = 0.0  # steps so far took
        self._n_unpaid = 0  # searches in a row
        self._n_drafts_warm = 0  # since drafters were fed again
        self._visited_s = 0.0  # when the last visit began, and then when it ended
        self._n_visited = 0.0  # tokens emitted since
        self._early_s = 0.0  # when a visit may be made early
        self._n_kept = 0  # steps since the last search
        self._n_keep = _N_STEPS_KEPT[0]
        self._n_searched = 0  # sequences of the last search
        self._n_common: int | None = None  # K of sequences that are new
        self._by_slot: dict[int, Track] = {}  # of the last choice
        self._wanted: dict[int, int] = {}  # K by slot, where it asked for any draft

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether a sequence's drafter shall be fed.

        Those that ask for drafts are; the others while drafts pay, or are tried.
        """
        return self.is_warm if sequence.n_draft is None else sequence.n_draft > 0

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, n_room: int, n_prefill: int
    ) -> list[int]:
        """Returns K for each sequence."""
        n_most = limits.n_draft_max
        if not n_most or not sequences:
            self._wanted = {}
            return [0] * len(sequences)
        if self._machine.n_ubatch != limits.n_ubatch:
            self._machine = self._machine._replace(n_ubatch=limits.n_ubatch)
        crowd = self._crowd(sequences, limits)
        if self._trials.is_new:
            self._trials.calibrate(len(sequences), self._n_draft_max)
        elif self._is_due(len(sequences)):
            self._search(crowd, n_room, n_prefill)
        seq_ids = [sequence.seq_id for sequence in sequences]
        self._by_slot = dict(zip(seq_ids, crowd.tracks, strict=True))
        n_tried = self._trials.next(len(sequences))
        if n_tried is not None:
            self._is_trial = True
            n_drafts = crowd.bounded([n_tried] * len(crowd.caps))
        else:
            n_drafts = crowd.current()
        n_draft = sum(n_drafts)
        if n_draft > n_room:
            n_drafts = level(n_drafts, n_room)
        self._wanted = dict(zip(seq_ids, n_drafts, strict=True)) if n_draft else {}
        return n_drafts

    def _crowd(self, sequences: Sequence[Draftable], limits: EngineLimits) -> _Crowd:
        n_most = limits.n_draft_max
        tracks: list[Track] = [
            sequence.draft_memory or self._track(sequence, limits) for sequence in sequences
        ]
        caps = [
            n_most
            if sequence.n_computed <= track.n_computed_free
            and not sequence.is_draft_cold
            and not sequence.n_no_room
            else fit(n_most, sequence, limits)
            for sequence, track in zip(sequences, tracks, strict=True)
        ]
        asked = [track.n_asked for track in tracks]
        has_bound = asked.count(None) < len(asked)
        if has_bound:
            caps = [cap if n is None else min(cap, n) for cap, n in zip(caps, asked, strict=True)]
        return _Crowd(sequences, tracks, caps, has_bound)

    def _track(self, sequence: Draftable, limits: EngineLimits) -> Track:
        track = self._acceptance.track(sequence.tenant, sequence.n_draft)
        n_computed = sequence.n_computed
        n_useful = min(sequence.n_output_left - 1, limits.n_ctx_seq - n_computed - 1)
        track.n_computed_free = n_computed + n_useful - limits.n_draft_max
        track.n_draft = self._n_common or 0
        sequence.draft_memory = track
        return track

    def _is_due(self, n: int) -> bool:
        """Returns whether it is time for another search."""
        self._n_kept += 1
        if self._trials.is_running:
            return False
        is_changed = abs(n - self._n_searched) > _CHANGE * self._n_searched
        return is_changed or self._n_kept >= self._n_keep

    def _search(self, crowd: _Crowd, n_room: int, n_prefill: int) -> None:
        """Chooses K for all and sets it in their tracks, or begins a trial."""
        if self._is_trial:
            self._end_trial(crowd.tracks)
        self._acceptance.refresh(crowd.tracks)
        fed = crowd if self.is_warm else self._as_fed(crowd)
        yields = [self._acceptance.yields_asked(track) for track in crowd.tracks]
        situation = _Situation(fed, yields, self._machine, n_prefill)
        doubt = self._doubt(yields)
        candidates = _candidates(situation, fed, 1 + doubt)
        best_rate, _ = max(candidates)
        self._n_kept, self._n_searched = 0, len(crowd.caps)
        self._n_keep = min(self._n_keep + 2, _N_STEPS_KEPT[1])
        unfed_rate, process_share = situation.rate_unfed()
        if not self._can_let_go or process_share < _PROCESS_SHARE:
            unfed_rate = 0.0
        if not self.is_warm:
            self._consider_visit(len(crowd.caps), best_rate, unfed_rate)
            return
        is_visit, self._trials.is_visit = self._trials.is_visit, False
        if is_visit:
            self._end_visit(unfed_rate)
        if unfed_rate > best_rate * (1 + _MARGIN):
            self._n_unpaid += 1
            if is_visit or self._n_unpaid >= _N_SEARCHES_UNPAID:
                self._let_go(crowd, situation, unfed_rate, is_visit=is_visit)
                return
        else:
            self._n_unpaid = 0
        self._choose(crowd, situation, candidates, n_room, 1 + doubt)

    def _doubt(self, yields: list[tuple[float, ...]]) -> float:
        """Returns by how much steps with drafts may be better than they seem, as a share.

        What few drafts tell is not sure, and to learn more costs little where it is close.
        """
        n_accepted = sum([table[1] for table in yields]) / len(yields)
        n_seen = self._acceptance.n_seen + self._n_drafts_warm
        deviation = math.sqrt(n_accepted * (1 - n_accepted) / max(1.0, n_seen))
        return _BENEFIT * deviation / (1 + n_accepted)

    def _as_fed(self, crowd: _Crowd) -> _Crowd:
        """Returns a crowd as it would be if drafts were possible for all."""
        zipped = zip(crowd.caps, crowd.tracks, strict=True)
        caps = [self._n_draft_max if track.n_asked is None else cap for cap, track in zipped]
        return crowd._replace(caps=caps)

    def _end_trial(self, tracks: list[Track]) -> None:
        """Draws the conclusion of a trial or a visit."""
        self._is_trial = False
        self._n_keep = _N_STEPS_KEPT[0]
        if not self._n_searched:
            # What sequences did beside a prior that was far off says nothing about them.
            self._acceptance.forget_differences(tracks)
        if self._surprise.conclude():
            self._acceptance.discount_all(_DISCOUNT)
            self._trials.refresh()
        if not self._trials.is_visit:
            self._trials.rest(self._now_s, self._trial_cost_s, self._step_s)

    def _choose(
        self,
        crowd: _Crowd,
        situation: _Situation,
        candidates: list[tuple[float, list[int]]],
        n_room: int,
        benefit: float,
    ) -> None:
        now = crowd.current()
        now_rate = situation.rate(now) * (benefit if any(now) else 1)
        fitting = [found for found in candidates if sum(found[1]) <= n_room]
        best_rate, best = max(fitting, default=(0.0, now))
        if self._n_common is None:
            self._take(crowd, best)
        elif best != now and best_rate > now_rate * (1 + _MARGIN):
            self.n_changes += 1
            self._n_keep = _N_STEPS_KEPT[0]
            self._trials.refresh()
            self._take(crowd, best)
        elif self._trials.is_due(self._now_s) and not crowd.has_bound:
            self._try(crowd, situation, now, best_rate)

    def _try(self, crowd: _Crowd, situation: _Situation, now: list[int], best_rate: float) -> None:
        """Begins a trial of another K."""
        n = len(now)
        other = self._trials.begin(n, max(now), self._n_draft_max)
        n_drafts = situation.equal(other)
        step_s, other_s = situation.seconds(now), situation.seconds(n_drafts)
        loss_s = other_s * (1 - situation.rate(n_drafts) / best_rate)
        self._trial_cost_s, self._step_s = _N_STEPS_TRIAL * loss_s, step_s

    def _let_go(
        self, crowd: _Crowd, situation: _Situation, unfed_rate: float, *, is_visit: bool
    ) -> None:
        """Has sequences give up their draft state."""
        if not is_visit:
            n = len(crowd.caps)
            fed_s, tried_s = situation.seconds([0] * n), situation.seconds(situation.equal(1))
            cost_s = _N_STEPS_WARMING * (fed_s - n / unfed_rate)
            cost_s += _n_steps_visit(n) * (tried_s - n / unfed_rate)
            self._rest_from_visits(cost_s, fed_s)
        self.is_warm = False
        self.n_turns += 1
        self.n_changes += 1
        self._n_unpaid = 0
        self._take(crowd, [0] * len(crowd.caps))

    def _consider_visit(self, n: int, best_rate: float, unfed_rate: float) -> None:
        """Sees whether it is time to try drafts again."""
        is_promising = best_rate > unfed_rate * (1 + _EARLY_MARGIN)
        if self._trials.is_due(self._now_s) or (is_promising and self._now_s >= self._early_s):
            self.is_warm = True
            self.n_turns += 1
            self._visited_s, self._n_visited = self._now_s, 0.0
            self._n_drafts_warm = 0
            self._trials.visit(n)

    def _end_visit(self, unfed_rate: float) -> None:
        """Reckons what a visit has cost, and so when the next one may be made."""
        took_s = self._now_s - self._visited_s
        cost_s = took_s - self._n_visited / unfed_rate if unfed_rate else 0.0
        self._rest_from_visits(cost_s, took_s / _N_STEPS_WARMING)

    def _rest_from_visits(self, cost_s: float, step_s: float) -> None:
        self._trials.rest(self._now_s, cost_s, step_s)
        self._early_s = self._now_s + max(cost_s, 0.0) / _EARLY_SHARE

    def _take(self, crowd: _Crowd, n_drafts: list[int]) -> None:
        n_longest = max(n_drafts)
        for track, n_draft, cap in zip(crowd.tracks, n_drafts, crowd.caps, strict=True):
            # One that is at its bound today may be free tomorrow.
            track.n_draft = n_draft if n_draft < cap else n_longest
        self._n_common = sorted(n_drafts)[len(n_drafts) // 2]

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns how the drafts of a step did; `StepCost` learns what it took."""
        self._now_s += result.timings.total_s
        tracks, wanted, acceptance = self._by_slot, self._wanted, self._acceptance
        n_emitted = n_drafts = 0
        is_trial, add = self._is_trial, acceptance.add
        for entry in result.entries:
            n_emitted += len(entry.tokens)
            n_drafted = entry.n_drafted
            if n_drafted:
                n_drafts += 1
                track = tracks[entry.seq_id]
                if is_trial:
                    n_expected = acceptance.yields(track.grade)[1]
                    self._surprise.add(n_expected, is_accepted=entry.n_accepted > 0)
                add(track, n_drafted, entry.n_accepted)
            elif wanted.get(entry.seq_id) and entry.tokens:
                acceptance.add_missing(tracks[entry.seq_id])
        self._n_drafts_warm += n_drafts
        self._n_visited += n_emitted


def _candidates(
    situation: _Situation, crowd: _Crowd, benefit: float
) -> list[tuple[float, list[int]]]:
    """Returns choices worth a look, each with its tokens per second.

    Args:
        situation: What the crowd is in.
        crowd: Those that generate.
        benefit: Factor for choices with drafts, because of what is not known of them.
    """
    candidates = [(situation.rate(found), found) for found in situation.all_equal()]
    if max(crowd.caps) and crowd.is_mixed:
        unequal = situation.unequal(max(candidates)[1])
        candidates += [(situation.rate(found), found) for found in unequal]
    return [(rate * benefit if any(found) else rate, found) for rate, found in candidates]


def fit(n_draft: int, sequence: Draftable, limits: EngineLimits) -> int:
    """Returns the largest K up to `n_draft` that is of use to a sequence.

    A step yields up to K + 1 tokens, so more than the remaining output less one would be thrown
    away. It takes K + 1 cells, which must fit the sequence's context. A sequence whose draft state
    is lost, or which found no room, gets none.
    """
    if sequence.is_draft_cold or sequence.n_no_room:
        return 0
    n_cells_left = limits.n_ctx_seq - sequence.n_computed - 1
    return max(0, min(n_draft, limits.n_draft_max, sequence.n_output_left - 1, n_cells_left))


def level(wishes: list[int], n_left: int) -> list[int]:
    """Cuts the largest wishes down to a common level, so that their sum is at most `n_left`."""
    granted = [0] * len(wishes)
    open_wishes = sorted(range(len(wishes)), key=wishes.__getitem__)
    for n_done, i in enumerate(open_wishes):
        granted[i] = min(wishes[i], n_left // (len(wishes) - n_done))
        n_left -= granted[i]
    return granted
