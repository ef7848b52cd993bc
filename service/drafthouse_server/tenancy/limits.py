"""What each tenant has used of its limits, and when there will be more; time is an argument.

Rates are counted by the generic cell rate algorithm: two numbers for each, an exact wait, no
windows at whose borders a rate doubles.

Who is refused is told a time of its own, so that not all come back at once, and is let in then.
One who is new may be let in in its stead: nothing is lost by connections that are gone.

Tokens are reserved when a request is let in, its output as long as it is likely to be; what it did
not use is given back when it ends, and what it used beyond is charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from drafthouse_server.errors import QuotaExceeded
from drafthouse_server.tenancy.tenants import Tenant

__all__ = [
    "END_USER",
    "INPUT",
    "KINDS",
    "OUTPUT",
    "REQUESTS",
    "Asked",
    "Limits",
    "Meter",
    "Month",
    "Place",
    "Rate",
    "Reserved",
    "Row",
    "Standing",
    "debt_s",
    "rate_exceeded",
    "rate_of",
]

REQUESTS, INPUT, OUTPUT = "requests_per_s", "input_tokens_per_min", "output_tokens_per_min"
"""The rates of a tenant, as its settings and its attributes name them."""
END_USER = "end_user_requests_per_s"
"""The rate of each of its end users."""
_MONTH = "tokens_per_month"
KINDS = {REQUESTS: "requests", INPUT: "input-tokens", OUTPUT: "output-tokens"}
"""What each of them counts, as clients are told."""
_NOUNS = {
    REQUESTS: "requests a second",
    INPUT: "input tokens a minute",
    OUTPUT: "output tokens a minute",
    END_USER: "requests a second of an end user",
}

_N_PLACES_MAX = 256
"""Places of one row that are remembered: 80 KB, and a tenth of a millisecond to look at."""
_SPREAD_S, _SPREAD_COSTS = 30.0, 3
"""Seconds that others delay one at most; or so many of the largest that waits, or a burst, if more:
with less for small ones than for large ones, these would keep the row full."""

_GRACE_S = 1.0
"""A place is held so many seconds after its time, or as long as its units take to come."""

_LATE_S = 0.5
"""Who comes so many seconds after its time is in time: the SDK's third retry comes 0.4 s after it.
Who comes in another's stead, whose owner may be on a new connection, may lack as many of the rate.
"""

_CREDIT_S = 2 * _LATE_S
"""Who comes in time may lack so many seconds of the rate: who stood in lacked one half, and who
came before it was late by the other. It may also lack what stood in, or its own cost."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, lie far from each other."""

_EARLY_S = 0.005
"""Who was told a time may come so many seconds early: clocks and timers are not exact."""

_ROUNDING_S = 1e-9
"""Units that are missing for so few seconds are there."""

_N_END_USERS_MAX = 4096
"""End users of one tenant whose rates are counted each; of more, the others share one rate."""

_SWEEP_S = 1.0
"""Seconds between two looks for end users that can be forgotten."""

_MONTH_WAIT_S_MAX = 3600.0
"""Clients are told to wait for the next month if it begins in so many seconds."""

_N_MONTHS = 12
"""Months of the calendar of which is known what was used."""

_N_MEMORY = 32
"""Requests over which the length of a tenant's outputs is averaged."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Units per second in the long run, and units that may be used at once."""

    per_s: float
    """Units a second, > 0."""
    burst: float
    """Units that may be used at once after a pause."""


@dataclass(slots=True, eq=False)
class Place:
    """A time that was told to somebody who was refused."""

    origin: str
    """Peer that was told."""
    cost: float
    """Units that it asked for."""
    due_at: float
    """Monotonic time that it was told, seconds."""
    held_at: float = math.inf
    """Monotonic time from which its units are held, seconds; of each peer for the first place."""
    is_taken: bool = False
    """Whether somebody on another connection was let in in its stead."""


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
    """Those who were refused for one rate, and are likely to come back.

    Of each peer one place is held: in the order in which they were told, and the next one of a peer
    behind those of all others. At its time one who is new may be let in in its stead; its owner is,
    too, on credit, which is paid off before others are let in: in any t seconds at most a burst (or
    a longer request), what comes in t and one second, and one request.
    """

    __slots__ = ("_ends_at", "_held_until", "_lines", "_most", "_n_beyond", "_rate")

    def __init__(self) -> None:
        self._lines: dict[str, list[Place]] = {}  # of each peer, by their time
        self._rate = Rate(1.0, 1.0)  # the rate that was asked with last
        self._ends_at = math.inf  # when the first of those that are held ends
        self._held_until = -math.inf  # when all that is held would be paid off
        self._most = 0.0  # units of the largest place at which somebody stood in
        self._n_beyond = 0

    def find(self, asked: Asked) -> Place | None:
        """Returns a place whose time has come: the caller's own.

        Or else, where it has none at all, the first one: its owner may come on a new connection.
        """
        soon = asked.now + _EARLY_S
        line = self._lines.get(asked.origin)
        if line is None:
            due = [
                first
                for first in [line[0] for line in self._lines.values()]
                if first.held_at <= soon and not first.is_taken and asked.cost <= first.cost
            ]
            return min(due, key=lambda first: first.held_at, default=None)
        if line[0].held_at <= soon:
            return line[0]
        return next((place for place in line if place.due_at <= soon), None)

    def kept(self, place: Place | None, asked: Asked) -> float:
        """Returns the units that must be left to others; negative: so many may be missing.

        Args:
            place: Place of which the time has come, as found.
            asked: What is asked for.
        """
        origin, cost, rate, now = asked
        if place is not None and place.held_at <= now + _EARLY_S:
            if place.origin == origin and now <= place.held_at + _LATE_S:
                return -(max(cost, self._most) + _CREDIT_S * rate.per_s)
            return place.cost - cost - _LATE_S * rate.per_s
        due = soon = 0.0
        for first in [line[0] for line in self._lines.values()]:
            if first.held_at <= now + _EARLY_S:
                due += 0.0 if first.is_taken else first.cost
            else:
                wanted = min(first.cost, rate.burst) - (first.held_at - now) * rate.per_s
                soon = wanted if wanted > soon else soon  # no call: there may be hundreds
        return due + soon

    def let_in(self, place: Place | None, asked: Asked) -> None:
        """Takes note that one is let in, who had come for a place or for none."""
        if place is not None and place.origin != asked.origin:
            place.is_taken = True
            self._most = max(self._most, place.cost)
        elif place is not None:
            self._drop(place, asked.now)

    def refuse(self, place: Place | None, asked: Asked, wait_s: float) -> float:
        """Returns the seconds after which one who is refused shall come back.

        Args:
            place: Place of which the time has come, as found.
            asked: What is asked for.
            wait_s: Seconds after which it is there, if nobody else takes any; may be negative.
        """
        origin, cost, rate, now = asked
        held_s = debt_s(max(0.0, self._held_until - now), self._rate.per_s, rate.per_s)
        self._held_until, self._rate = now + held_s, rate
        line = self._lines.get(origin, [])
        if place in line:
            if place is line[0] and now <= place.held_at + _LATE_S:
                held_s = place.held_at - now
                wait_s = held_s if held_s > _EARLY_S else max(_EARLY_S, wait_s)
                place.due_at = place.held_at = now + wait_s
                return wait_s
            self._drop(place, now)
            line = self._lines.get(origin, [])
        behind_s = self._held_until - now + _lead_s(cost, rate)
        if line:
            behind_s = line[-1].due_at + len(self._lines) * cost / rate.per_s - now
        largest = max([cost, *[line[0].cost for line in self._lines.values()]])
        spread_s = max(_SPREAD_S, _SPREAD_COSTS * largest / rate.per_s, rate.burst / rate.per_s)
        if behind_s - wait_s > spread_s + (largest - cost) / rate.per_s:  # so small ones have room
            self._n_beyond += 1
            return max(_EARLY_S, wait_s + self._n_beyond * _GOLDEN % 1 * spread_s)
        wait_s = max(_EARLY_S, wait_s, behind_s)
        self._add(Place(origin, cost, now + wait_s))
        return wait_s

    def _add(self, place: Place) -> None:
        """Remembers a place; of those that are too many, the last one of who has the most."""
        line = self._lines.setdefault(place.origin, [])
        line.append(place)
        if len(line) == 1:
            self._hold(place, place.due_at - _lead_s(place.cost, self._rate))
        if sum(map(len, self._lines.values())) > _N_PLACES_MAX:
            longest = max(reversed(self._lines.values()), key=len)
            longest.pop()
            if not longest:
                del self._lines[place.origin]

    def _hold(self, place: Place, since: float) -> None:
        """Holds the units of a peer's first place, behind all that are held.

        `since` is the monotonic time at which what is taken now is paid off, in seconds.
        """
        lead_s = _lead_s(place.cost, self._rate)
        since = max(since, self._held_until)
        place.held_at = max(place.due_at, since + lead_s)
        self._held_until = since + place.cost / self._rate.per_s
        self._ends_at = min(self._ends_at, self._end_at(place))

    def _drop(self, place: Place, now: float) -> None:
        line = self._lines.get(place.origin, [])
        if place not in line:  # others may have come meanwhile, where Redis is asked
            return
        is_first = place is line[0]
        line.remove(place)
        if not line:
            del self._lines[place.origin]
        elif is_first:
            self._hold(line[0], now)

    def _end_at(self, place: Place) -> float:
        """Returns the time after which a place is forgotten."""
        since = place.due_at if place.held_at == math.inf else place.held_at
        return since + max(_GRACE_S, place.cost / self._rate.per_s)

    def is_empty(self, now: float) -> bool:
        """Whether nobody is likely to come back."""
        self.expire(now)
        return not self._lines

    def expire(self, now: float) -> None:
        """Forgets places for which nobody came."""
        if self._ends_at >= now:
            return
        ended = [it for line in self._lines.values() for it in line if self._end_at(it) < now]
        for place in reversed(ended):  # of each peer the first one last
            self._drop(place, now)
        held = (self._end_at(line[0]) for line in self._lines.values())
        self._ends_at = min(held, default=math.inf)


def _lead_s(cost: float, rate: Rate) -> float:
    """Returns the seconds, 0 or less, by which units are there before all is paid off."""
    return (cost - max(rate.burst, cost)) / rate.per_s


class Meter:
    """One rate of one tenant.

    Source:
        The generic cell rate algorithm as a virtual schedule (ITU-T I.371). The row is ours.
    """

    __slots__ = ("_paid_at", "_per_s", "_row")

    def __init__(self) -> None:
        self._paid_at = -math.inf  # when all that was taken is paid off at the rate
        self._per_s = 0.0  # the rate that was asked with last
        self._row = Row()

    def take(self, cost: float, rate: Rate, now: float, origin: str = "") -> float:
        """Takes units, if they are there and are not left to those who were told a time.

        Args:
            cost: Units. More than the burst is taken as soon as the whole burst is there.
            rate: Of this meter.
            now: Monotonic time in seconds.
            origin: Who asks, as well as can be told.

        Returns:
            0 where they were taken; otherwise the seconds after which the caller shall come back.
        """
        self._paid_at = now + debt_s(self.reset_s(now), self._per_s, rate.per_s)
        self._per_s = rate.per_s
        self._row.expire(now)
        asked = Asked(origin, cost, rate, now)
        place = self._row.find(asked)
        wait_s = self.reset_s(now) + _lead_s(cost, rate)
        kept = self._row.kept(place, asked)
        if wait_s + kept / rate.per_s > _ROUNDING_S:
            return self._row.refuse(place, asked, wait_s)
        self._row.let_in(place, asked)
        self._paid_at = max(self._paid_at, now) + cost / rate.per_s
        return 0.0

    def settle(self, surplus: float, rate: Rate, now: float) -> None:
        """Charges units that were used beyond those taken; gives back a negative number of them.

        Where the rate was raised meanwhile, they count at the higher one.
        """
        since = max(self._paid_at, now) if surplus > 0 else self._paid_at
        self._paid_at = since + surplus / max(rate.per_s, self._per_s)

    def n_left(self, rate: Rate, now: float) -> float:
        """Returns the units that may be used at once."""
        return max(0.0, rate.burst - self.reset_s(now) * rate.per_s)

    def reset_s(self, now: float) -> float:
        """Returns the seconds after which the whole burst is there, if nothing is used."""
        return max(0.0, self._paid_at - now)

    def is_idle(self, now: float) -> bool:
        """Whether it has nothing to remember."""
        return self._paid_at <= now and self._row.is_empty(now)


@dataclass(frozen=True, slots=True)
class Month:
    """A month of the calendar, in UTC."""

    name: str
    """Such as "2026-11"."""
    left_s: float
    """Seconds until its end."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Tokens that one request was let in with."""

    n_prompt: int
    """Tokens of the prompt."""
    n_output: int
    """Tokens of the output, as long as it is likely to be."""
    month: str
    """Month whose budget they are of."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a rate is used."""

    kind: str
    """What is counted: "requests", "input-tokens" or "output-tokens"."""
    limit: int
    """Units that may be used at once after a pause."""
    n_left: int
    """Units left now."""
    reset_s: float
    """Seconds after which all are there again, if nothing is used."""


@dataclass(slots=True)
class _Used:
    """What one tenant has used."""

    meters: dict[str, Meter] = field(default_factory=dict)
    """By the name of the limit."""
    end_users: dict[str, Meter] = field(default_factory=dict)
    """Requests of each."""
    swept_at: float = -math.inf
    """When those with nothing to remember were forgotten last."""
    n_of_months: dict[str, int] = field(default_factory=dict)
    """Tokens used by month, those reserved included: of the last few, for a clock that goes back
    must not give a budget a second time."""
    n_outputs: int = 0
    """Requests that the mean is of."""
    mean_output: float = 0.0
    """Tokens of an output."""


class Limits:
    """Counts what tenants use, and refuses what is beyond their limits."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Used] = {}
        self.has_rates = True
        """Whether rates are counted here, and not where several servers share them."""

    def enter(self, tenant: Tenant, end_user: str, now: float, origin: str = "") -> None:
        """Counts a request.

        Args:
            tenant: Who asks.
            end_user: For whom, if the tenant tells.
            now: Monotonic time in seconds.
            origin: Where the request comes from, such as a connection.

        Raises:
            QuotaExceeded: too many came lately (TENANT_QUOTA_EXCEEDED).
        """
        self._take(tenant, REQUESTS, 1, now, origin)
        rate = rate_of(tenant, END_USER)
        if rate is None or not (end_user and self.has_rates):
            return
        wait_s = _of_end_user(self._used(tenant), end_user, now).take(1, rate, now, origin)
        if wait_s > 0:
            self._settle(tenant, REQUESTS, -1, now)
            raise rate_exceeded(tenant, END_USER, wait_s)

    def reserve(
        self,
        tenant: Tenant,
        n_prompt: int,
        n_output_max: int,
        now: float,
        month: Month,
        *,
        origin: str = "",
    ) -> Reserved:
        """Takes the tokens of a request out of what its tenant may use.

        Args:
            tenant: Who asks.
            n_prompt: Tokens of the prompt.
            n_output_max: Most tokens of the output; as many are reserved as the tenant's outputs
                have on average, if these are fewer.
            now: Monotonic time in seconds.
            month: Of the calendar.
            origin: Where the request comes from.

        Raises:
            QuotaExceeded: there are too few left, or it is longer than the tenant's requests may be
                (TENANT_QUOTA_EXCEEDED).
        """
        used = self._used(tenant)
        if tenant.n_prompt_max is not None and n_prompt > tenant.n_prompt_max:
            limit = tenant.n_prompt_max
            raise QuotaExceeded(tenant.name, "tokens of a prompt", limit, None, "max_prompt_tokens")
        n_output = (
            min(n_output_max, math.ceil(used.mean_output)) if used.n_outputs else n_output_max
        )
        self._check_month(tenant, used, n_prompt + n_output, month)
        self._take(tenant, INPUT, n_prompt, now, origin)
        try:
            self._take(tenant, OUTPUT, n_output, now, origin)
        except QuotaExceeded:
            self._settle(tenant, INPUT, -n_prompt, now)
            raise
        _count_month(used, month.name, n_prompt + n_output)
        return Reserved(n_prompt, n_output, month.name)

    def settle(
        self, tenant: Tenant, reserved: Reserved, n_prompt: int, n_output: int, now: float
    ) -> None:
        """Corrects what was reserved, at a request's end, however it ended.

        Args:
            tenant: Who has asked.
            reserved: What `reserve` has returned.
            n_prompt: Tokens of the prompt that count; 0 where it was never begun.
            n_output: Tokens of the output.
            now: Monotonic time in seconds.
        """
        used = self._used(tenant)
        surplus_in, surplus_out = n_prompt - reserved.n_prompt, n_output - reserved.n_output
        self._settle(tenant, INPUT, surplus_in, now)
        self._settle(tenant, OUTPUT, surplus_out, now)
        if reserved.month in used.n_of_months:
            used.n_of_months[reserved.month] += surplus_in + surplus_out
        if n_prompt:
            used.n_outputs = min(used.n_outputs + 1, _N_MEMORY)
            used.mean_output += (n_output - used.mean_output) / used.n_outputs

    def standings(self, tenant: Tenant, now: float) -> Iterator[Standing]:
        """Yields how far the rates of a tenant are used, those that are limited."""
        meters = self._used(tenant).meters
        for metric, kind in KINDS.items():
            rate, meter = rate_of(tenant, metric), meters.get(metric)
            if rate is not None and self.has_rates:
                n_left = rate.burst if meter is None else meter.n_left(rate, now)
                reset_s = 0.0 if meter is None else meter.reset_s(now)
                yield Standing(kind, int(rate.burst), int(n_left), reset_s)

    def restore(self, tenant: str, n_tokens: int, month: Month) -> None:
        """Counts tokens that a tenant has used in a month before this server began to count.

        Args:
            tenant: Name of the tenant.
            n_tokens: Tokens of prompts and outputs.
            month: Of the calendar.
        """
        _count_month(self._tenants.setdefault(tenant, _Used()), month.name, n_tokens)

    def _used(self, tenant: Tenant) -> _Used:
        used = self._tenants.get(tenant.name)
        if used is None:
            used = self._tenants[tenant.name] = _Used()
        return used

    def _take(self, tenant: Tenant, metric: str, cost: float, now: float, origin: str) -> None:
        rate = rate_of(tenant, metric)
        if rate is None or not self.has_rates:
            return
        meter = self._used(tenant).meters.setdefault(metric, Meter())
        wait_s = meter.take(cost, rate, now, origin)
        if wait_s > 0:
            raise rate_exceeded(tenant, metric, wait_s)

    def _settle(self, tenant: Tenant, metric: str, surplus: float, now: float) -> None:
        rate, meter = rate_of(tenant, metric), self._used(tenant).meters.get(metric)
        if rate is not None and meter is not None and surplus:
            meter.settle(surplus, rate, now)

    def _check_month(self, tenant: Tenant, used: _Used, n_tokens: int, month: Month) -> None:
        budget = tenant.tokens_per_month
        if budget is None or used.n_of_months.get(month.name, 0) + n_tokens <= budget:
            return
        # A client must not sleep for weeks.
        retry_after_s = month.left_s if month.left_s <= _MONTH_WAIT_S_MAX else None
        raise QuotaExceeded(tenant.name, "tokens a month", budget, retry_after_s, _MONTH)


def debt_s(seconds: float, was_per_s: float, per_s: float) -> float:
    """Returns the seconds in which a debt is paid off at the rate of now.

    A rate that was raised pays it sooner; one that was lowered makes nobody wait longer for what
    was taken before.

    Args:
        seconds: In which it would be paid off at the rate of before.
        was_per_s: That rate, units a second.
        per_s: The rate of now, units a second.
    """
    return seconds * min(1.0, was_per_s / per_s)


def _count_month(used: _Used, month: str, n_tokens: int) -> None:
    months = used.n_of_months
    months[month] = months.pop(month, 0) + n_tokens  # the last one is the one that is used
    if len(months) > _N_MONTHS:
        del months[next(iter(months))]


def rate_exceeded(tenant: Tenant, metric: str, wait_s: float) -> QuotaExceeded:
    """Returns the refusal of who has used up a rate, for the seconds until there is more."""
    limit = getattr(tenant, metric)
    return QuotaExceeded(tenant.name, _NOUNS[metric], limit, wait_s, metric)


def rate_of(tenant: Tenant, metric: str) -> Rate | None:
    """Returns a rate of a tenant: `REQUESTS`, `INPUT`, `OUTPUT`, `END_USER`; None: not limited."""
    limit: float | None = getattr(tenant, metric)
    if limit is None:
        return None
    is_of_a_second = metric in (REQUESTS, END_USER)
    return Rate(limit, max(1.0, limit)) if is_of_a_second else Rate(limit / 60, limit)


def _of_end_user(used: _Used, end_user: str, now: float) -> Meter:
    """Returns the meter of an end user; those that are too many share one."""
    meter = used.end_users.get(end_user)
    if meter is None:
        if len(used.end_users) >= _N_END_USERS_MAX and now >= used.swept_at + _SWEEP_S:
            used.swept_at = now
            used.end_users = {n: m for n, m in used.end_users.items() if not m.is_idle(now)}
        if len(used.end_users) >= _N_END_USERS_MAX:
            end_user = ""
        meter = used.end_users.setdefault(end_user, Meter())
    return meter
