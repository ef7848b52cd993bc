"""How many tokens to draft for whom. Pure: no clock, no randomness.

`FixedDraft` does what requests ask. `AdaptiveDraft` chooses K for all sequences of a step together,
so that the step yields the most tokens per second that can be expected:

- What a draft yields is learnt by `Acceptance`, what it costs by `StepCost`.
- Drafts of one length share a physical batch, so one K for all is tried first; where sequences
  differ, drafts for some are tried too, and taken if they pay for their own physical batches.
- A new choice must promise more than the old one by a margin: no flapping.
- While nothing is drafted nothing is learnt, so every now and then a short draft is tried: less and
  less often while it fails, more often when it did better than expected.
- When drafts have not paid for long, feeding the drafter (`process`), which costs time even in
  steps without a draft, is given up: see `AdaptiveDraft.is_warm`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import getitem, sub
from typing import NamedTuple, Protocol

from drafthouse_server.acceptance import Acceptance, Track
from drafthouse_server.step import EngineLimits, StepResult
from drafthouse_server.step_cost import Splitting, StepCost, StepShape, count_ubatches

__all__ = ["AdaptiveDraft", "DraftPolicy", "Draftable", "FixedDraft", "fit", "level"]


class Draftable(Protocol):
    """What a policy may know of a sequence."""

    draft_memory: Track | None
    """What the policy remembers of it; nobody else's business."""

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

    @property
    def is_draft_cold(self) -> bool:
        """Whether the draft state was lost."""
        ...


class DraftPolicy(Protocol):
    """Chooses K and learns from what became of it. Pure: no clock, no randomness."""

    @property
    def is_warm(self) -> bool:
        """Whether sequences that leave K to the policy shall have drafts in the future.

        If not, the drafter need not be fed for them: their draft state may be let go.
        """
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

    def observe(self, result: StepResult) -> None:
        """Learns how the drafts of a step did; they are those that were chosen last."""
        ...


class FixedDraft:
    """K as the request asks, or else the server's default.

    Args:
        n_draft_default: K for requests that do not ask, >= 0.
    """

    is_warm = True

    def __init__(self, n_draft_default: int) -> None:
        self._n_draft_default = n_draft_default

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

    def observe(self, result: StepResult) -> None:
        """Learns nothing: K is fixed."""


_N_STEPS_KEPT = 8
"""A choice stands for so many steps, unless the number of sequences changes much."""
_CHANGE = 0.25
"""Of the number of sequences: much."""
_MARGIN = 0.015
"""By how much a new choice must be better."""
_N_GRADES_MIXED = 4
"""Sequences whose grades are so far apart may get drafts of different lengths."""
_PROBE_SHARE = 0.005
"""Of the time, the most that probes may take in the long run."""
_N_STEPS_PROBE = 16
"""Steps between probes, at least."""
_N_STEPS_UNKNOWN = 4
"""The same, until enough drafts were seen."""
_N_DRAFTS_KNOWN = 128
"""Enough drafts."""
_PROBE_GROWTH = 8
"""Probes that disappoint become rarer, down to one in so many times the least interval."""
_SIGNIFICANCE = 2.5
"""Standard deviations by which probes must beat the expected before the past is discounted."""
_DISCOUNT = 0.2
"""What the past counts then."""
_N_STEPS_RECOVERY = 3
"""Steps to the next probe then."""
_N_STEPS_OTHER = (8, 128)
"""Steps between trials of another K than the one chosen: at first, and in the long run."""
_N_TRIALS = 6
"""Drafts of one token more than the choice, in a row."""
_N_STEPS_UNPAID = 256
"""Steps in a row that would be better off without a drafter, after which it is let go."""
_N_STEPS_COLD = (2048, 32768)
"""Steps without a drafter after which it is tried again, at least and at most."""
_PROCESS_SHARE = 0.01
"""Of a step's time: a drafter that takes less to feed is never let go."""
_WARM_MARGIN = 0.05
"""What drafts must promise beyond steps without a drafter before it is fed again."""


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
        """Whether their drafts differ much in quality."""
        grades = [track.grade for track in self.tracks]
        return max(grades) - min(grades) >= _N_GRADES_MIXED


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
        if n_prefill:
            # Prompts are not this choice's business: only what drafts cost beside them is.
            zeros = [0] * self._n
            alone_s = self.seconds(zeros)
            self._n_prefill = n_prefill
            self._base_s = alone_s - self.seconds(zeros)

    def equal(self, n_draft: int) -> list[int]:
        """Returns the same K for all, as far as each can."""
        return self._bounded([n_draft] * self._n)

    def all_equal(self) -> list[list[int]]:
        """Returns the same K for all, for every K."""
        return [self.equal(n_draft) for n_draft in range(max(self.caps) + 1)]

    def shape(self, n_drafts: list[int]) -> StepShape:
        """Returns the shape of the step."""
        n_draft = sum(n_drafts)
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

    def seconds(self, n_drafts: list[int]) -> float:
        """Returns what the step costs."""
        return self._base_s + self._cost.predict(self.shape(n_drafts))

    def rate(self, n_drafts: list[int]) -> float:
        """Returns the tokens per second to expect."""
        n_emitted = self._n + sum(map(getitem, self.yields, n_drafts))
        return n_emitted / self.seconds(n_drafts)

    def rate_undrafted(self) -> tuple[float, float]:
        """Returns tokens per second without a drafter, and the share of time that feeding takes."""
        shape = self.shape([0] * self._n)
        total_s, process_s = self._cost.predict(shape), self._cost.process_s(shape)
        return self._n / (total_s - process_s), process_s / total_s

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


class _Probes:
    """When to try a draft though none is chosen, and what its outcome says."""

    def __init__(self) -> None:
        self._n_idle = 0
        self._interval = _N_STEPS_PROBE
        self._interval_min = _N_STEPS_PROBE
        self._surplus = 0.0  # accepted tokens beyond what was expected
        self._variance = 0.0
        self._has_probed = False

    def reset(self) -> None:
        """Starts over: something pays."""
        self._n_idle = 0
        self._interval = _N_STEPS_PROBE
        self._surplus = self._variance = 0.0

    def is_due(self) -> bool:
        """Counts a step without drafts, and returns whether to try one in it."""
        self._n_idle += 1
        return self._n_idle >= self._interval

    def begin(self, extra_share: float, *, is_known: bool) -> None:
        """Notes that a probe is made.

        Args:
            extra_share: Seconds that it costs, in steps without it.
            is_known: Whether enough drafts were seen to do without more.
        """
        self._n_idle = 0
        self._has_probed = True
        if not is_known:
            self._interval = self._interval_min = _N_STEPS_UNKNOWN
            return
        self._interval_min = max(_N_STEPS_PROBE, math.ceil(extra_share / _PROBE_SHARE))
        longest = _PROBE_GROWTH * self._interval_min
        self._interval = min(longest, max(self._interval_min, 2 * self._interval))
        self._surplus *= 0.8
        self._variance *= 0.64

    def observe(self, n_expected: float, is_accepted: bool) -> None:
        """Learns of one sequence's first draft token."""
        self._surplus += is_accepted - n_expected
        self._variance += n_expected * (1 - n_expected)

    def has_recovered(self) -> bool:
        """Returns whether probes do much better than the past lets expect; then starts over."""
        if not self._has_probed:
            return False
        self._has_probed = False
        if self._surplus > 0:
            self._interval = max(self._interval_min, self._interval // 2)
        if self._surplus <= _SIGNIFICANCE * math.sqrt(self._variance):
            return False
        self._surplus = self._variance = 0.0
        self._interval = _N_STEPS_RECOVERY
        return True


class _Feeding:
    """Whether the drafter is fed: it costs time in every step, with a draft or without."""

    def __init__(self) -> None:
        self.is_warm = True
        self._n_unpaid = 0
        self._n_cold = 0
        self._interval = _N_STEPS_COLD[0]

    def weigh(self, n_steps: int, drafted: float, undrafted: float, process_share: float) -> None:
        """Decides once more.

        Args:
            n_steps: Steps since the last time.
            drafted: Tokens per second with a drafter, were all sequences fed.
            undrafted: Tokens per second without.
            process_share: Share of a step's time that feeding takes.
        """
        if self.is_warm:
            if process_share < _PROCESS_SHARE or undrafted <= drafted * (1 + _MARGIN):
                self._n_unpaid = 0
                return
            self._n_unpaid += n_steps
            self.is_warm = self._n_unpaid < _N_STEPS_UNPAID
            return
        self._n_cold += n_steps
        is_better = drafted > undrafted * (1 + _WARM_MARGIN)
        if is_better or self._n_cold >= self._interval:
            self._interval = _N_STEPS_COLD[0] if is_better else self._longer()
            self.is_warm, self._n_cold, self._n_unpaid = True, 0, 0

    def _longer(self) -> int:
        return min(2 * self._interval, _N_STEPS_COLD[1])


class AdaptiveDraft:
    """K for the most tokens per second, 0 included; what a request asks for is honoured.

    Args:
        n_draft_max: Of the engine's limits.
        cost: What steps cost; whoever runs steps teaches it.
        splitting: How a decode of the target is cut into physical batches.
        can_let_go: Whether sequences can give up their draft state.
    """

    def __init__(
        self,
        n_draft_max: int,
        cost: StepCost,
        splitting: Splitting = Splitting.STREAMS,
        *,
        can_let_go: bool = True,
    ) -> None:
        self.n_changes = 0
        """How often the choice changed."""
        self._n_draft_max = n_draft_max
        self._machine = _Machine(cost, splitting, 1 << 30)
        self._can_let_go = can_let_go
        self._acceptance = Acceptance(n_draft_max)
        self._feeding = _Feeding()
        self._probes = _Probes()
        self._n_kept = 0  # steps since the last search
        self._n_searched = 0  # sequences of the last search
        self._n_common: int | None = None  # K of sequences that are new
        self._n_same = 0  # steps since another K than the chosen was tried
        self._n_other_interval = _N_STEPS_OTHER[0]
        self._n_others = 0  # trials
        self._n_more = 0  # steps that the trial goes on
        self._probed: list[Track] = []
        self._by_slot: dict[int, Track] = {}  # of the last choice

    @property
    def is_warm(self) -> bool:
        """Whether sequences that leave K to the policy shall have drafts in the future.

        Once steps without a drafter have been the better ones for long, sequences let theirs go,
        for good: what it misses cannot be fed to it later. New sequences are fed again as soon as
        drafts should pay for as many as there are then, and now and then to see whether acceptance
        has changed.
        """
        return self._feeding.is_warm

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, n_room: int, n_prefill: int
    ) -> list[int]:
        """Returns K for each sequence."""
        n_most = limits.n_draft_max
        if not n_most or not sequences:
            return [0] * len(sequences)
        if self._machine.n_ubatch != limits.n_ubatch:
            self._machine = self._machine._replace(n_ubatch=limits.n_ubatch)
        crowd = self._crowd(sequences, limits)
        if self._is_due(len(sequences)):
            self._search(crowd, n_room, n_prefill)
        seq_ids = [sequence.seq_id for sequence in sequences]
        self._by_slot = dict(zip(seq_ids, crowd.tracks, strict=True))
        n_drafts = self._explore(crowd, crowd.current(), n_room)
        return n_drafts if sum(n_drafts) <= n_room else level(n_drafts, n_room)

    def _crowd(self, sequences: Sequence[Draftable], limits: EngineLimits) -> _Crowd:
        n_most = limits.n_draft_max
        tracks = [sequence.draft_memory or self._track(sequence, limits) for sequence in sequences]
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
        is_changed = abs(n - self._n_searched) > _CHANGE * self._n_searched
        return is_changed or self._n_kept >= _N_STEPS_KEPT

    def _search(self, crowd: _Crowd, n_room: int, n_prefill: int) -> None:
        """Chooses K for all, and sets it in their tracks."""
        self._acceptance.refresh(crowd.tracks)
        yields = self._yields(crowd)
        situation = _Situation(crowd, yields, self._machine, n_prefill)
        candidates = _candidates(situation, crowd)
        self._weigh_feeding(crowd, situation, max(candidates)[0])
        self._n_kept, self._n_searched = 0, len(crowd.caps)
        now = crowd.current()
        fitting = [found for found in candidates if sum(found[1]) <= n_room]
        best_rate, best = max(fitting, default=(0.0, now))
        if self._n_common is None:
            self._take(crowd, best)
        elif best != now and best_rate > situation.rate(now) * (1 + _MARGIN):
            self.n_changes += 1
            self._n_other_interval = min(self._n_other_interval, 8 * _N_STEPS_OTHER[0])
            self._take(crowd, best)

    @property
    def _is_known(self) -> bool:
        return self._acceptance.n_drafts >= _N_DRAFTS_KNOWN

    def _yields(self, crowd: _Crowd) -> list[tuple[float, ...]]:
        return [self._acceptance.yields(track.grade) for track in crowd.tracks]

    def _weigh_feeding(self, crowd: _Crowd, situation: _Situation, drafted: float) -> None:
        """Decides whether the drafter is fed.

        Args:
            crowd: Those that generate.
            situation: Theirs.
            drafted: The most tokens per second.
        """
        if not (self._can_let_go and self._is_known):
            return
        if any(sequence.is_draft_cold for sequence in crowd.sequences):
            as_fed = crowd._replace(caps=[self._n_draft_max] * len(crowd.caps))
            imagined = _Situation(as_fed, situation.yields, self._machine)
            drafted = max(_candidates(imagined, as_fed))[0]
        self._feeding.weigh(self._n_kept, drafted, *situation.rate_undrafted())

    def _take(self, crowd: _Crowd, n_drafts: list[int]) -> None:
        n_longest = max(n_drafts)
        for track, n_draft, cap in zip(crowd.tracks, n_drafts, crowd.caps, strict=True):
            # One that is at its bound today may be free tomorrow.
            track.n_draft = n_draft if n_draft < cap else n_longest
        self._n_common = sorted(n_drafts)[len(n_drafts) // 2]

    def _explore(self, crowd: _Crowd, n_drafts: list[int], n_room: int) -> list[int]:
        """Returns the choice, or now and then a longer one, to learn what it would yield."""
        n_longest = max(n_drafts)
        if n_longest:
            self._probes.reset()
            return self._other(crowd, n_drafts) if self._other_is_due() else n_drafts
        bounds = crowd.caps
        if crowd.has_bound:
            zipped = zip(bounds, crowd.tracks, strict=True)
            bounds = [cap if track.n_asked is None else 0 for cap, track in zipped]
        if not any(bounds) or not self._probes.is_due():
            return n_drafts
        n_probe = 2 if len(bounds) <= 2 else 1
        probe = [min(n_probe, bound) for bound in bounds]
        if sum(probe) > n_room:
            return n_drafts
        situation = _Situation(crowd, self._yields(crowd), self._machine)
        without_s, with_s = situation.seconds(n_drafts), situation.seconds(probe)
        n_gained = sum(map(getitem, situation.yields, probe)) / len(probe)
        extra_share = max(0.0, with_s / without_s - 1 - n_gained)
        self._probes.begin(extra_share, is_known=self._is_known)
        self._probed = [track for track, n in zip(crowd.tracks, probe, strict=True) if n]
        return probe

    def _other_is_due(self) -> bool:
        """Returns whether to do without the choice for a step; less and less often."""
        if self._n_more > 0:
            self._n_more -= 1
            return True
        self._n_same += 1
        if self._n_same < self._n_other_interval:
            return False
        self._n_same = 0
        self._n_other_interval = min(2 * self._n_other_interval, _N_STEPS_OTHER[1])
        self._n_others += 1
        return True

    def _other(self, crowd: _Crowd, n_drafts: list[int]) -> list[int]:
        """Returns one token more than the choice, or one less, or none, in turns.

        One more tells what another position would yield, and few sequences try it several times.
        The others tell what of the cost belongs to the step, and what to its tokens.
        """
        change = (1, -max(n_drafts), 1, -1)[self._n_others % 4]
        if change == 1 and self._n_same == 0:
            self._n_same = 1
            self._n_more = _N_TRIALS // len(n_drafts)
        return crowd.bounded([max(0, n + change) for n in n_drafts])

    def observe(self, result: StepResult) -> None:
        """Learns how the drafts of a step did."""
        tracks, acceptance = self._by_slot, self._acceptance
        has_probed, add = bool(self._probed), acceptance.add
        for entry in result.entries:
            n_drafted = entry.n_drafted
            if n_drafted:
                track = tracks[entry.seq_id]
                if has_probed:
                    n_expected = acceptance.yields(track.grade)[1]
                    self._probes.observe(n_expected, entry.n_accepted > 0)
                add(track, n_drafted, entry.n_accepted)
        if self._probed:
            if self._probes.has_recovered():
                acceptance.discount(self._probed, _DISCOUNT)
            self._probed = []
            self._n_kept = _N_STEPS_KEPT


def _candidates(situation: _Situation, crowd: _Crowd) -> list[tuple[float, list[int]]]:
    """Returns choices worth a look, each with its tokens per second."""
    candidates = [(situation.rate(found), found) for found in situation.all_equal()]
    if max(crowd.caps) and crowd.is_mixed:
        unequal = situation.unequal(max(candidates)[1])
        candidates += [(situation.rate(found), found) for found in unequal]
    return candidates


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
