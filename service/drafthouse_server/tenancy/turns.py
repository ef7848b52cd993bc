"""Whose job is next: tenants in turn, by what each has cost and by its weight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Turns"]

_Job = TypeVar("_Job")


def _anybody(_: str) -> bool:
    return True


@dataclass(slots=True)
class _Line(Generic[_Job]):
    """The jobs of one tenant that wait, and what the tenant has cost."""

    weight: float = 1.0
    """Its share relative to other tenants' weights, > 0."""
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
        self._now = 0.0  # the what those who come now begin with
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
