"""Times that are told to those who are refused for a rate; time is an argument.

A row spreads the times at which those who were refused come back, so that they do not all come at
once, and others leave them the units that come until then. From its time on a place is anybody's
who comes: nothing is kept for connections that are gone.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from drafthouse_server.tenancy.limits import Rate

__all__ = ["Asked", "Place", "Row"]

_N_MAX = 512
"""Places of one row that are remembered."""

_SPREAD_S = 30.0
"""Seconds by which a time is later than that of the next units because others wait, at most."""

_SPREAD_COSTS = 3
"""The same in costs of the one who asks, where this is longer, as is the time of a whole burst."""

_LEAST_S = 0.01
"""Seconds that are told at least."""

_GRACE_S = 1.0
"""A place may be taken so many seconds after its time, or as long as its units take to come."""

_RESERVE_S = 0.5
"""Seconds of the rate, at most, that are there at a time beyond what was asked for: for those whose
place another has taken a little before them."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, lie far from each other."""


@dataclass(slots=True, eq=False)
class Place:
    """A time that was told to somebody who was refused."""

    origin: str
    """Peer that was told."""
    cost: float
    """Units that it asked for."""
    due_at: float
    """Monotonic time that it was told, seconds."""
    ends_at: float
    """Monotonic time after which it is forgotten, seconds."""
    is_taken: bool = False
    """Whether somebody else came first, after its time."""


class Asked(NamedTuple):
    """What somebody asks for."""

    origin: str
    """Peer that asks, as well as can be told."""
    cost: float
    """Units that it asks for."""
    rate: Rate
    """From which they are taken."""
    now: float
    """Monotonic time in seconds."""


class Row:
    """Those who were refused for one rate, and are likely to come back."""

    __slots__ = ("_n_beyond", "_n_claims", "_places")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._n_beyond = 0
        self._n_claims = 0

    def find(self, asked: Asked) -> Place | None:
        """Returns a place whose time has come: the caller's own, or else the first one.

        The one who was told may come back on a new connection, or not at all. What it asked for
        must suffice for whoever comes instead.
        """
        origin, cost, _, now = asked
        found = [
            place
            for place in self._places
            if place.due_at <= now
            and (place.origin == origin or (cost <= place.cost and not place.is_taken))
        ]
        return min(found, key=lambda place: _rank(place, origin), default=None)

    def let_in(self, place: Place | None, origin: str) -> None:
        """Takes note that one is let in, who had come for a place or for none."""
        if place is not None and place.origin != origin:
            place.is_taken = True
        elif place is not None:
            self._drop(place)

    def kept(self, place: Place | None, asked: Asked) -> float:
        """Returns the units that must be left to others by one who comes.

        Who comes for another's place leaves something for its owner every other time only: it may
        be that one, on a new connection.

        Args:
            place: Place of which the time has come, as found.
            asked: What is asked for.
        """
        origin, cost, rate, now = asked
        total = _reserve_s(cost, rate) * rate.per_s
        if place is not None and place.origin == origin:
            if not place.is_taken:
                return 0.0
            total = 0.0
        elif place is not None:
            self._n_claims += 1
            if self._n_claims % 2 == 0:
                return 0.0
            total = min(total, place.cost)
        most = 0.0
        for other in sorted(self._places, key=lambda other: other.due_at):
            if other is not place and not other.is_taken:
                total += other.cost
                most = max(most, total - max(0.0, other.due_at - now) * rate.per_s)
        return most if place is None else min(most, max(0.0, rate.burst - cost))

    def refuse(self, place: Place | None, asked: Asked, wait_s: float) -> float:
        """Returns the seconds after which one who is refused shall come back.

        Who has come for its place waits only for the units.

        Args:
            place: Place of which the time has come, as found.
            asked: What is asked for.
            wait_s: Seconds after which it is there, if nobody else takes any; may be negative.
        """
        origin, cost, rate, now = asked
        if place is not None and (place.origin == origin or wait_s > 0):
            self._drop(place)
            if not place.is_taken and wait_s > 0:
                self._add(asked, now + wait_s)
                return wait_s
        ahead_s, units_s = self._ahead(origin) / rate.per_s, cost / rate.per_s
        wait_s += _reserve_s(cost, rate) if ahead_s else 0.0
        spread_s = max(_SPREAD_S, _SPREAD_COSTS * units_s, rate.burst / rate.per_s)
        if ahead_s <= spread_s and len(self._places) < _N_MAX:
            wait_s = max(_LEAST_S, wait_s + ahead_s)
            self._add(asked, now + wait_s)
            return wait_s
        self._n_beyond += 1
        return max(_LEAST_S, wait_s + self._n_beyond * _GOLDEN % 1 * min(ahead_s, spread_s))

    def _add(self, asked: Asked, due_at: float) -> None:
        ends_at = due_at + max(_GRACE_S, asked.cost / asked.rate.per_s)
        self._places.append(Place(asked.origin, asked.cost, due_at, ends_at))

    def _drop(self, place: Place) -> None:
        if place in self._places:  # others may have come meanwhile, where Redis is asked
            self._places.remove(place)

    def _ahead(self, origin: str) -> float:
        """Returns the units of the places before a new one of a peer.

        A connection with many places delays another as if it had one more than that one.
        """
        places = [place for place in self._places if not place.is_taken]
        n_of = Counter(place.origin for place in places)
        n_most, units = n_of[origin] + 1, 0.0
        n_of.clear()
        for place in places:
            n_of[place.origin] += 1
            if n_of[place.origin] <= n_most:
                units += place.cost
        return units

    def is_empty(self, now: float) -> bool:
        """Whether nobody is likely to come back."""
        self.expire(now)
        return not self._places

    def expire(self, now: float) -> None:
        """Forgets places for which nobody came."""
        if any(place.ends_at < now for place in self._places):
            self._places = [place for place in self._places if place.ends_at >= now]


def _rank(place: Place, origin: str) -> tuple[bool, bool, float]:
    """Returns what orders the places that one may take."""
    return place.origin != origin, place.is_taken, place.due_at


def _reserve_s(cost: float, rate: Rate) -> float:
    return max(0.0, min(_RESERVE_S, (rate.burst - cost) / 2 / rate.per_s))
