"""What drafts can be expected to yield: learnt by position, tenant and sequence. Pure.

The share of drafts that fail at each position is learnt for the model as a whole. How much more or
less often than that the drafts of a tenant, and of a sequence, fail is one number each, whose prior
is 1, and the tenant's. So a new sequence starts from what is known, a few drafts tell it apart,
and positions that it has never reached follow from those that it has. All averages are exponential.

Some drafters often have nothing to propose, n-grams above all. How often a draft comes where one is
asked for is learnt too, for the model and for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["Acceptance", "Track"]

_STEP = 1.15
"""Factors of sequences are rounded to powers of this: one table of yields for each."""
_LOG_STEP = math.log(_STEP)
_FADING_SEQUENCE = 0.99
"""What is left of a sequence's past after each of its drafts."""
_FADING_TENANT = 0.998
"""The same, of a tenant."""
_FADING_MODEL = 0.998
"""The same, of a position, after each draft that reached it."""
_WEIGHT_SEQUENCE = 4.0
"""Of the tenant's factor as a prior of the sequence's, in expected failures."""
_WEIGHT_TENANT = 4.0
"""Of 1 as a prior of a tenant's factor, in expected failures."""
_WEIGHT_POSITION = 10.0
"""Of a position's prior, which is the position before, in drafts."""
_FAILURE_PRIOR = 0.3
"""Share of first draft tokens that are rejected, before anything is known."""
_FAILURE_MIN = 0.002
"""Least share, and least factor: nothing is certain."""
_FADING_WISHES = 0.95
"""What is left of a sequence's past after each draft that it asks for."""
_WEIGHT_WISHES = 8.0
"""Of the prior of how often drafts come, in drafts: of the model's, which is 1; a sequence's."""
_GRAIN_MET = 8
"""A sequence's share is rounded to one in so many: one table of yields for each."""
_N_TENANTS_MAX = 1024
"""Tenants remembered; the oldest is forgotten."""


class _Record:
    """How often drafts failed, beside how often the model's usually would have."""

    __slots__ = ("n_expected", "n_failed")

    def __init__(self) -> None:
        self.n_failed = 0.0
        self.n_expected = 0.0

    def add_all(self, n_failed: int, n_expected: float, n: int) -> None:
        fading: float = _FADING_TENANT**n
        self.n_failed = self.n_failed * fading + n_failed
        self.n_expected = self.n_expected * fading + n_expected

    def discount(self, share: float) -> None:
        self.n_failed *= share
        self.n_expected *= share

    def factor(self, prior: float, weight: float) -> float:
        """Returns failures over expected ones, shrunk towards a prior."""
        return (self.n_failed + weight * prior) / (self.n_expected + weight)


class _Wishes:
    """How often drafts come where they are asked for."""

    __slots__ = ("_n_met", "_n_wanted")

    def __init__(self) -> None:
        self._n_wanted = self._n_met = 0.0

    def add(self, n_wanted: int, n_met: int, fading: float) -> None:
        self._n_wanted = self._n_wanted * fading + n_wanted
        self._n_met = self._n_met * fading + n_met

    def share(self, prior: float) -> float:
        """Returns the share of them, shrunk towards a prior."""
        n_wanted = self._n_wanted + _WEIGHT_WISHES
        return (self._n_met + _WEIGHT_WISHES * prior) / n_wanted


class Track:
    """What is remembered of one sequence. Made by `Acceptance.track`."""

    __slots__ = (
        "grade",
        "met",
        "n_asked",
        "n_computed_free",
        "n_draft",
        "record",
        "tenant",
        "wishes",
    )

    def __init__(self, tenant: _Record, n_asked: int | None) -> None:
        self.tenant = tenant
        """Its tenant's record; `Acceptance` alone reads it."""
        self.record = _Record()
        """Its own; `Acceptance` alone writes it, and `regrade` draws the conclusion."""
        self.wishes = _Wishes()
        """For drafts; `Acceptance` alone reads and writes it."""
        self.met = 1.0
        """Share of the drafts asked for that come, (0, 1]."""
        self.n_asked = n_asked
        """K asked for."""
        self.n_computed_free = -1
        """Computed tokens up to which neither output nor context bounds K."""
        self.n_draft = 0
        """K chosen last."""
        self.grade = 0
        """Of its drafts: 0 is as usual, lower is better; see `Acceptance.yields`."""
        self.regrade()

    def discount(self, share: float) -> None:
        """Lets the past count less."""
        self.record.discount(share)

    def regrade(self) -> None:
        """Brings the grade up to date."""
        tenant = self.tenant.factor(1.0, _WEIGHT_TENANT)
        factor = self.record.factor(tenant, _WEIGHT_SEQUENCE)
        self.grade = round(math.log(max(factor, _FAILURE_MIN)) / _LOG_STEP)


class Acceptance:
    """Learns what becomes of drafts.

    Args:
        n_draft_max: Longest draft.
    """

    def __init__(self, n_draft_max: int) -> None:
        self.n_drafts = 0
        """Drafts learnt from."""
        self._n_tried = [0.0] * n_draft_max
        self._n_failed = [0.0] * n_draft_max
        self._failures = [_FAILURE_PRIOR] * n_draft_max
        self._n_expected = [0.0]  # failures of a draft that reaches so many positions
        self._tenants: dict[str, _Record] = {}
        self._yields: dict[int, tuple[float, ...]] = {}
        self._yields_asked: dict[tuple[int, float], tuple[float, ...]] = {}
        self._n_positions = n_draft_max
        self._outcomes: dict[tuple[_Record, int, int, bool], int] = {}
        self._wishes = _Wishes()
        self._n_came = self._n_missing = 0  # since the last call of refresh
        self._is_sure = True  # no draft was missing so far
        self.refresh(())

    @property
    def n_seen(self) -> float:
        """Drafts that the first position's share rests on."""
        return self._n_tried[0]

    def track(self, tenant: str, n_asked: int | None) -> Track:
        """Returns the memory of a new sequence.

        Args:
            tenant: Name of its tenant.
            n_asked: K asked for.
        """
        record = self._tenants.get(tenant)
        if record is None:
            if len(self._tenants) >= _N_TENANTS_MAX:
                del self._tenants[next(iter(self._tenants))]
            record = self._tenants[tenant] = _Record()
        return Track(record, n_asked)

    def add(self, track: Track, n_drafted: int, n_accepted: int) -> None:
        """Learns from one verified draft; `refresh` draws the conclusions."""
        self.n_drafts += 1
        self._n_came += 1
        if not self._is_sure:
            track.wishes.add(1, 1, _FADING_WISHES)
        is_failed = n_accepted < n_drafted
        n_reached = min(n_accepted + is_failed, self._n_positions)
        record = track.record
        record.n_failed = record.n_failed * _FADING_SEQUENCE + is_failed
        record.n_expected = record.n_expected * _FADING_SEQUENCE + self._n_expected[n_reached]
        key = track.tenant, track.grade, n_reached, is_failed
        self._outcomes[key] = self._outcomes.get(key, 0) + 1

    def add_missing(self, track: Track) -> None:
        """Learns that a draft was asked for and none came."""
        self._is_sure = False
        self._n_missing += 1
        track.wishes.add(1, 0, _FADING_WISHES)

    def forget_differences(self, tracks: Iterable[Track]) -> None:
        """Lets sequences and their tenants be as any other."""
        self.refresh(())
        for track in tracks:
            track.discount(0.0)
            track.tenant.discount(0.0)

    def discount_all(self, share: float) -> None:
        """Lets the past of all tenants and positions count less: it may be over."""
        for record in self._tenants.values():
            record.discount(share)
        self._n_tried = [n * share for n in self._n_tried]
        self._n_failed = [n * share for n in self._n_failed]

    def refresh(self, tracks: Iterable[Track]) -> None:
        """Brings yields and grades up to date with what was learnt since the last call."""
        for (tenant, grade, n_reached, is_failed), n in self._outcomes.items():
            self._add_outcome(grade, n_reached, n, n if is_failed else 0)
            tenant.add_all(n if is_failed else 0, n * self._n_expected[n_reached], n)
        self._outcomes.clear()
        before = _FAILURE_PRIOR
        self._n_expected = [0.0]
        for position, n_tried in enumerate(self._n_tried):
            n_failed = self._n_failed[position] + _WEIGHT_POSITION * before
            share = n_failed / (n_tried + _WEIGHT_POSITION)
            before = self._failures[position] = min(1.0, max(_FAILURE_MIN, share))
            self._n_expected.append(self._n_expected[-1] + before)
        self._yields.clear()
        self._yields_asked.clear()
        n_wanted = self._n_came + self._n_missing
        self._wishes.add(n_wanted, self._n_came, _FADING_MODEL**n_wanted)
        self._n_came = self._n_missing = 0
        met = self._wishes.share(1.0)
        for track in tracks:
            track.regrade()
            if not self._is_sure:
                n_parts = round(_GRAIN_MET * track.wishes.share(met))
                track.met = max(n_parts, 0.5) / _GRAIN_MET

    def _add_outcome(self, grade: int, n_reached: int, n: int, n_failed: int) -> None:
        fading = _FADING_MODEL**n
        # A bad sequence's failure tells less against the position.
        weight = _STEP**grade * n
        for position in range(n_reached):
            self._n_tried[position] = self._n_tried[position] * fading + weight
            self._n_failed[position] *= fading
        if n_reached:
            self._n_failed[n_reached - 1] += n_failed

    def yields(self, grade: int) -> tuple[float, ...]:
        """Returns the accepted tokens to expect of drafts of 0, 1, … tokens, at a grade."""
        found = self._yields.get(grade)
        if found is None:
            factor = _STEP**grade
            n_accepted, still = 0.0, 1.0
            values = [0.0]
            for failure in self._failures:
                still *= 1 - min(1.0, factor * failure)
                n_accepted += still
                values.append(n_accepted)
            found = self._yields[grade] = tuple(values)
        return found

    def yields_asked(self, track: Track) -> tuple[float, ...]:
        """Returns the same for a sequence's drafts as they are asked for: they may not come."""
        met = track.met
        if met == 1.0:
            return self.yields(track.grade)
        found = self._yields_asked.get((track.grade, met))
        if found is None:
            found = tuple([met * n_accepted for n_accepted in self.yields(track.grade)])
            self._yields_asked[track.grade, met] = found
        return found
