"""Who is served next: virtual counters of service, by tenant.

A tenant's counter grows by what it is given: tokens of prompts, of outputs, drafted tokens that
were rejected, and the work of its grammars and texts, each times its weight in service, divided by
the tenant's own weight. Of the tenants that wait, the one with the least counter goes first. So
tenants that always wait get service in proportion to their weights, whatever their prompts and
outputs are like.

Source:
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (arXiv:2401.00588),
    Algorithm 2, with weights. Slots that change hands are not in the paper: there a stream that
    runs keeps its place until its end.

`Turns` does the same for jobs that wait in lines, such as texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

from drafthouse_server.step import ResultEntry

__all__ = [
    "Budget",
    "Fairness",
    "ServedRequest",
    "ServedSequence",
    "ServiceWeights",
    "SharedBytes",
    "Turns",
    "VirtualCounters",
]

_Job = TypeVar("_Job")

_N_COMPARISONS = 1_000_000
"""Comparisons that `ServiceWeights.masks` is the weight of."""

_N_STALE_MIN = 64
"""Outdated entries of the heap that are left there before it is swept."""

_N_PAST_MIN = 1024
"""Tenants of which a counter is kept before those that need none are forgotten."""

_BURST_S = 0.1
"""What has a budget may be spent ahead of it for so long."""

_ROUNDING = 1e-9
"""By so much may a share of slots be missed."""

_AWAY_SHARE = 1 / 8
"""Part of the quantum by which a tenant that is away may be ahead of one that it would displace."""

_WEIGHT = 1.0
"""Weight of a tenant of which nothing else is known."""


class ServedRequest(Protocol):
    """A request, as far as its tenant's counter is concerned."""

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        ...


class ServedSequence(Protocol):
    """A sequence, as far as its tenant's counter is concerned."""

    @property
    def request(self) -> ServedRequest:
        """What was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceWeights:
    """What counts as service, in units of service for each of it. Fixed when the server starts."""

    prompt: float = 1.0
    """A token of a prompt that is computed."""
    output: float = 2.0
    """A token that is generated."""
    rejected: float = 1.0
    """A drafted token that was verified and rejected."""
    masks: float = 10.0
    """A million comparisons that a request's grammar takes."""


@dataclass(frozen=True, slots=True)
class Fairness:
    """How the server is shared among tenants, and a tenant's part among its requests."""

    weights: ServiceWeights = field(default_factory=ServiceWeights)
    """What counts as service."""
    quantum: float = 512.0
    """Units of service by which a waiting tenant may fall behind one that runs.

    Then it takes a slot. One with fewer slots than its share, from one with more, takes it at once.
    """
    aging_s: float = 10.0
    """Seconds of waiting that are worth a point of priority; 0: priorities do not age."""
    preempt_interval_s: float = 0.1
    """Seconds in which a sequence loses its slot to fairness or priority once at most."""
    save_bytes_per_s: float = float(64 << 20)
    """Bytes of snapshots a second that may be written so that one tenant gets slots."""


class VirtualCounters:
    """How much service each tenant has got, in units of service over the tenant's weight.

    A tenant that begins to wait starts at the least counter of those that wait, or, where nobody
    does, at that of the last one that did: who was away has saved nothing. What of that counter is
    for prompts that are not computed yet (`n_due`) is left out, up to the quantum. It goes
    before the one that it starts with, if that one was given something since it began to wait or
    was last gone before. No operation takes longer because more tenants wait, but for the logarithm
    of their number; `join` asks for `n_due`.

    Args:
        weights: What counts as service.
        quantum: Units of service by which a waiting tenant may fall behind one that runs.
    """

    def __init__(self, weights: ServiceWeights | None = None, quantum: float = 512.0) -> None:
        self.weights = weights or ServiceWeights()
        """What counts as service."""
        self.n_due: Callable[[str], int] = _none
        """Returns the tokens of a tenant's prompts that were counted and are not computed yet."""
        self._quantum = quantum
        self._counters: dict[str, float] = {}
        self._weights: dict[str, float] = {}  # of the tenants with a counter
        self._waiting: dict[str, int] = {}  # tenants that wait, with the number of their entry
        # Of these, the counter up to which nobody that comes later with as much goes before them.
        self._first_until: dict[str, float] = {}
        self._waiting_weight = 0.0
        # Counters only grow: the least entry is the least tenant, or out of date.
        self._heap: list[tuple[float, int, str]] = []
        self._n_entries = 0
        self._last = ""  # who was the last to wait no more
        self._n_past_max = _N_PAST_MIN
        self._base = 0.0  # nobody begins to wait with a counter below it

    def of(self, tenant: str) -> float:
        """Returns a tenant's counter."""
        return self._counters.get(tenant, self._base)

    def light(self, tenants: Collection[str], others: Collection[str]) -> set[str]:
        """Returns those tenants that are ahead of none of the others by the quantum.

        Args:
            tenants: Those asked about.
            others: At least one.
        """
        most = min(self.of(other) + self._quantum / self.weight(other) for other in others)
        return {tenant for tenant in tenants if self.of(tenant) < most}

    @property
    def n_waiting(self) -> int:
        """Tenants of which something waits."""
        return len(self._waiting)

    def weight(self, tenant: str) -> float:
        """Returns a tenant's weight."""
        return self._weights.get(tenant, _WEIGHT)

    def forget(self, tenant: str) -> None:
        """Forgets what a tenant was given, unless something of it waits."""
        if tenant not in self._waiting and tenant != self._last:
            self._counters.pop(tenant, None)
            self._weights.pop(tenant, None)

    def charge(self, tenant: str, amount: float) -> None:
        """Counts units of service that a tenant was given, or work that was done for it.

        Less than nothing where it gives back what it was charged and has not got.
        """
        before = self._counters.get(tenant, self._base)
        self._counters[tenant] = before + amount / self._weights.get(tenant, _WEIGHT)
        if amount < 0 and tenant in self._waiting:
            self._enter(tenant)  # it may be the first now

    def charge_aside(self, tenant: str, amount: float) -> None:
        """Counts units of service that a tenant was given beside the steps.

        That harms nobody while nobody waits: it puts the tenant behind the one that is served next
        by a quantum at most.
        """
        before = self.of(tenant)
        lead = self.first() if self._waiting else self._last
        weight = self._weights.get(tenant, _WEIGHT)
        most = max(self._base, self._counters.get(lead, self._base)) + self._quantum / weight
        after = before + amount / weight
        self._counters[tenant] = max(before, min(after, most))

    def charge_prompt(self, tenant: str, n_tokens: int) -> None:
        """Counts tokens of a prompt, all of them when its slot is taken."""
        self.charge(tenant, n_tokens * self.weights.prompt)

    def charge_step(
        self, entries: Collection[ResultEntry], running: Mapping[int, ServedSequence]
    ) -> None:
        """Counts what a step has yielded.

        Args:
            entries: The step's results.
            running: Sequences by slot, as they ran in it.
        """
        output, rejected = self.weights.output, self.weights.rejected
        comparison = self.weights.masks / _N_COMPARISONS
        amounts: dict[str, float] = {}
        for entry in entries:  # once per sequence and step
            amount = len(entry.tokens) * output
            if entry.n_drafted:
                amount += (entry.n_drafted - entry.n_accepted) * rejected
            if entry.n_mask_work:
                amount += entry.n_mask_work * comparison
            if amount:
                tenant = running[entry.seq_id].request.tenant
                if tenant in amounts:
                    amounts[tenant] += amount
                else:
                    amounts[tenant] = amount
        for tenant, amount in amounts.items():
            self.charge(tenant, amount)

    # --- those that wait

    def join(self, tenant: str, weight: float) -> None:
        """Notes that a tenant, which did not, has something that waits.

        Args:
            tenant: Name of the tenant.
            weight: Its share of the server relative to others' weights, > 0.
        """
        lead = self.first() if self._waiting else self._last
        self._base = max(self._base, self._counters.get(lead, self._base) - self._due(lead))
        self._counters[tenant] = max(self._counters.get(tenant, self._base), self._base)
        self._weights[tenant] = weight
        self._waiting_weight += weight
        self._enter(tenant)
        self._first_until[tenant] = counter = self._counters[tenant]
        if lead in self._waiting and counter == self._counters[lead] > self._first_until[lead]:
            # It has slots, or had, and the newcomer has none: a step later it would be behind.
            self._first_until[lead] = counter
            self._enter(lead)

    def _due(self, tenant: str) -> float:
        """Returns by how much a tenant's counter is ahead of what it has got, a quantum at most.

        Long prompts are counted as they get their slots. Who comes back each second for a few
        tokens would be ahead of such a tenant after one of them, until the next one gets a slot.
        """
        due = self.n_due(tenant) * self.weights.prompt
        return min(due, self._quantum) / self._weights.get(tenant, _WEIGHT)

    def _enter(self, tenant: str) -> None:
        """Puts a tenant that waits behind those with as much."""
        self._n_entries += 1
        self._waiting[tenant] = self._n_entries
        heappush(self._heap, (self._counters[tenant], self._n_entries, tenant))
        if len(self._heap) > 2 * len(self._waiting) + _N_STALE_MIN:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Notes that a tenant which waits has another share from now on, > 0.

        What it was given before counts as it did.
        """
        self._waiting_weight += weight - self._weights[tenant]
        self._weights[tenant] = weight

    def leave(self, tenant: str) -> None:
        """Notes that nothing of a tenant waits any more."""
        del self._waiting[tenant], self._first_until[tenant]
        self._waiting_weight -= self._weights[tenant]
        if not self._waiting:
            self._waiting_weight = 0.0  # sums of fractions leave something behind
        self._last = tenant
        if len(self._counters) > self._n_past_max:
            self._sweep()

    def first(self) -> str:
        """Returns the tenant with the least counter of those that wait.

        Of several the one that has waited longest.

        Raises:
            IndexError: none waits.
        """
        heap = self._heap
        while True:
            counter, number, tenant = heap[0]
            if self._waiting.get(tenant) != number:
                heappop(heap)
            elif counter < (now := self._counters[tenant]):
                # Behind those that have as much by now.
                self._n_entries += 1
                self._waiting[tenant] = self._n_entries
                heapreplace(heap, (now, self._n_entries, tenant))
            else:
                return tenant

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        return self._waiting.get(entry[2]) == entry[1]

    def _sweep(self) -> None:
        """Forgets tenants that would start no lower than they were left."""
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > self._base or tenant in self._waiting or tenant == self._last
        }
        # A tenant that runs may be among those that are forgotten: its weight counts all the same.
        self._weights = {
            t: w for t, w in self._weights.items() if t in self._counters or w != _WEIGHT
        }
        self._n_past_max = 2 * len(self._counters) + _N_PAST_MIN

    # --- slots that change hands

    def over_served(self, tenant: str, held: Mapping[str, int], n_slots: int) -> list[str]:
        """Returns the tenants that have to give a slot to one that waits, the most served first.

        One that has more than its share of the slots, where the waiting tenant has less than its
        own, and no higher counter; or one that is ahead of it by the quantum, in service at the
        waiting tenant's weight. Neither is true the other way round after the slot has changed
        hands, until as much service was given.

        Args:
            tenant: Waits for a slot.
            held: Slots by tenant, of those that have any.
            n_slots: Slots of all.
        """
        if not held.keys() - {tenant}:
            return []
        counter, n_held = self.of(tenant), held.get(tenant, 0)
        per_weight = self._slots_per_weight(tenant, held, n_slots)
        is_short = n_held + 1 <= per_weight * self.weight(tenant) + _ROUNDING
        found = []
        for other, n_other in held.items():
            ahead = self.of(other) - counter
            if other == tenant or ahead < 0:
                continue
            has_more = n_other - 1 >= per_weight * self.weight(other) - _ROUNDING
            if (is_short and has_more) or ahead * self.weight(tenant) >= self._quantum:
                found.append(other)
        return sorted(found, key=self.of, reverse=True)

    def would_take_back(
        self, other: str, tenant: str, held: Mapping[str, int], n_slots: int
    ) -> bool:
        """Returns whether a tenant that is away would soon take a slot more that one is given.

        Soon: its counter may be a little higher now, as it stands still while it is away.

        Args:
            other: Is away.
            tenant: Has slots, and waits for one more.
            held: Slots by tenant, of those that have any.
            n_slots: Slots of all.
        """
        ahead = (self.of(other) - self.of(tenant)) * self.weight(tenant)
        if ahead > self._quantum * _AWAY_SHARE:
            return False
        per_weight = self._slots_per_weight(other, held, n_slots)
        is_short = held.get(other, 0) + 1 <= per_weight * self.weight(other) + _ROUNDING
        return is_short and held[tenant] >= per_weight * self.weight(tenant) - _ROUNDING

    def _slots_per_weight(self, tenant: str, held: Mapping[str, int], n_slots: int) -> float:
        """Returns a share of the slots, of all tenants that wait or run and of one besides."""
        all_weights = self._waiting_weight
        for other in held:
            if other not in self._waiting:
                all_weights += self.weight(other)
        if tenant not in self._waiting and tenant not in held:
            all_weights += self.weight(tenant)
        return n_slots / all_weights


class SharedBytes:
    """Bytes that tenants hold of a memory that they share by weight.

    A tenant's share is that part of the memory which its weight is of all weights of those that
    hold some. Whoever is alone may have all of it; one within its share loses nothing to others.
    """

    def __init__(self) -> None:
        self.total = 0
        """Bytes held for all tenants."""
        self._held: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def of(self, tenant: str) -> int:
        """Returns the bytes that a tenant holds."""
        return self._held.get(tenant, 0)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Notes a tenant's share relative to others' weights, > 0."""
        self._weights[tenant] = weight
        if len(self._weights) > 2 * len(self._held) + _N_PAST_MIN:
            self._weights = {t: w for t, w in self._weights.items() if t in self._held}
            self._weights[tenant] = weight

    def add(self, tenant: str, n_bytes: int) -> None:
        """Notes that a tenant holds more bytes, or, where they are negative, fewer."""
        self.total += n_bytes
        self._held[tenant] = self.of(tenant) + n_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def share(self, tenant: str) -> float:
        """Returns a tenant's part of the memory, (0, 1], were it one of those that hold some."""
        weight = self._weights.get(tenant, 1.0)
        others = sum(self._weights.get(t, 1.0) for t in self._held if t != tenant)
        return weight / (weight + others)

    def giver(self, tenant: str, n_bytes: int, given: Mapping[str, int]) -> str:
        """Returns the tenant that has most for its weight: where bytes are too many, it gives some.

        Args:
            tenant: Is about to hold more.
            n_bytes: Bytes that it is about to hold besides.
            given: Bytes that tenants are about to give up.
        """

        def held_per_weight(other: str) -> float:
            held = self.of(other) - given.get(other, 0) + (n_bytes if other == tenant else 0)
            return held / self._weights.get(other, 1.0)

        return max(dict.fromkeys([*self._held, tenant]), key=held_per_weight)


class Budget:
    """Bounds what is spent on each tenant a second; time is an argument.

    That is bytes, or seconds, of snapshots: while one is written or read nobody's stream goes on.

    Args:
        per_s: What may be spent on one tenant a second; 0 is nothing.
    """

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._free_at: dict[str, float] = {}  # when what was spent so far is paid off

    def is_free(self, tenant: str, now: float) -> bool:
        """Returns whether something may be spent on a tenant.

        However much it is: the next one waits the longer.
        """
        return self._per_s > 0 and self._free_at.get(tenant, now) <= now + _BURST_S

    def spend(self, tenant: str, amount: float, now: float) -> None:
        """Notes what is about to be spent, or was."""
        if self._per_s > 0:
            free_at = max(self._free_at.get(tenant, now), now)
            self._free_at = {t: at for t, at in self._free_at.items() if at > now}
            self._free_at[tenant] = free_at + amount / self._per_s


def _anybody(_: str) -> bool:
    return True


def _none(_: str) -> int:
    return 0


@dataclass(slots=True)
class _Line(Generic[_Job]):
    """The jobs of one tenant that wait, and what the tenant has cost."""

    weight: float = 1.0
    """The tenant's share relative to other tenants' weights, > 0."""
    used: float = 0.0
    """Cost of all that it was given, over its weight; a tenant that returns begins with the least
    of those that wait."""
    jobs: deque[tuple[float, _Job]] = field(default_factory=deque)
    """Cost and job, first come, first served."""


class Turns(Generic[_Job]):
    """Jobs that wait, a line for each tenant; the next one is of the tenant that has cost least.

    Between two tenants that both wait, what they are given differs by no more than the costliest
    job of each, over their weights, whatever they ask for and however many jobs they have. Who was
    away has saved nothing up.

    Source:
        Goyal, Vin, Cheng: Start-time Fair Queuing (SIGCOMM 1996).
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[_Job]] = {}
        self._now = 0.0  # what those who come now begin with
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def put(self, tenant: str, job: _Job, cost: float, weight: float = 1.0) -> None:
        """Adds a job to the end of its tenant's line.

        Args:
            tenant: Name of the tenant.
            job: Told apart by identity.
            cost: What it is going to cost, > 0, in any unit that all jobs share.
            weight: Share of the tenant from now on, relative to other tenants' weights, > 0.
        """
        line = self._lines.setdefault(tenant, _Line())
        line.weight = weight
        if not line.jobs:
            line.used = max(line.used, self._now)
        line.jobs.append((cost, job))
        self._n += 1

    def take(self, may: Callable[[str], bool] = _anybody) -> tuple[str, _Job] | None:
        """Removes the next job and charges its tenant for it; None when nobody has one.

        Args:
            may: Returns whether a tenant may be served now; others keep their jobs and their place.
        """
        waiting = [(line.used, tenant) for tenant, line in self._lines.items() if line.jobs]
        allowed = [place for place in waiting if may(place[1])]
        if not allowed:
            return None
        _, tenant = min(allowed)
        self._now = max(self._now, min(waiting)[0])
        line = self._lines[tenant]
        cost, job = line.jobs.popleft()
        line.used += cost / line.weight
        self._n -= 1
        self._forget()
        return tenant, job

    def charge(self, tenant: str, cost: float) -> None:
        """Notes that a tenant has cost more than its job was thought to.

        Args:
            tenant: Name of the tenant.
            cost: In the unit of `put`.
        """
        line = self._lines.setdefault(tenant, _Line(used=self._now))
        line.used += cost / line.weight

    def remove(self, tenant: str, job: _Job) -> bool:
        """Removes a job that is not wanted any more; its tenant is not charged.

        Returns:
            Whether it was still there.
        """
        line = self._lines.get(tenant)
        place = next((p for p in line.jobs if p[1] is job), None) if line is not None else None
        if line is None or place is None:
            return False
        line.jobs.remove(place)
        self._n -= 1
        self._forget()
        return True

    def rest(self) -> None:
        """Has all begin anew, where nobody waits and nobody is served.

        What anybody had until now has harmed nobody.
        """
        if not self._n:
            self._lines.clear()
            self._now = 0.0

    def _forget(self) -> None:
        """Drops tenants that would begin anew anyway, or those of the past would add up."""
        idle = [
            tenant
            for tenant, line in self._lines.items()
            if not line.jobs and line.used <= self._now
        ]
        for tenant in idle:
            del self._lines[tenant]
