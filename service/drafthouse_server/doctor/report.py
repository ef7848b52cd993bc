"""A report: facts in sections, and what is wrong, as a table for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Fact", "Problem", "Report", "Section", "Severity"]

Severity = Literal["error", "warning"]
"""error: the server would not start, or not work; warning: it would, and could do better."""

_Value = str | int | float | bool | list[str] | None


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact."""

    key: str
    """Name of the fact in JSON; sizes end in _bytes."""
    value: _Value
    """In JSON."""
    shown: str = ""
    """For people; empty: the value as it is."""

    @property
    def title(self) -> str:
        """Name of the fact for people."""
        return self.key.removesuffix("_bytes").replace("_", " ")

    @property
    def text(self) -> str:
        """What people read."""
        if self.shown:
            return self.shown
        if isinstance(self.value, list):
            return ", ".join(self.value) or "none"
        return str(self.value)


@dataclass(slots=True)
class Section:
    """Facts on one subject."""

    name: str
    """The subject, and its name in JSON."""
    facts: list[Fact] = field(default_factory=list)
    """In the order in which they are shown."""

    def add(self, key: str, value: _Value, shown: str = "") -> None:
        """Adds a fact."""
        self.facts.append(Fact(key, value, shown))


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and what to do."""

    check: str
    """What was looked at: cpu, memory, model, settings, address, tls, store, journal, …"""
    sentence: str
    """What is wrong; what to do."""
    severity: Severity = "error"
    """Whether the server starts all the same ("warning") or does not ("error")."""


@dataclass(slots=True)
class Report:
    """Everything that was found."""

    sections: list[Section] = field(default_factory=list)
    """Facts by subject."""
    problems: list[Problem] = field(default_factory=list)
    """Problems that the checks have found."""
    passed: list[str] = field(default_factory=list)
    """Checks that found nothing wrong."""
    left_out: list[str] = field(default_factory=list)
    """Checks of what the settings do not ask for."""

    @property
    def is_well(self) -> bool:
        """Whether a server would start and work."""
        return all(problem.severity != "error" for problem in self.problems)

    def as_json(self) -> dict[str, object]:
        """Returns it as what `json` writes."""
        found: dict[str, object] = {
            section.name: {fact.key: fact.value for fact in section.facts}
            for section in self.sections
        }
        found["problems"] = [
            {"check": it.check, "severity": it.severity, "problem": it.sentence}
            for it in self.problems
        ]
        found["passed"] = list(self.passed)
        found["left_out"] = list(self.left_out)
        found["ok"] = self.is_well
        return found

    def lines(self) -> Iterator[str]:
        """Yields the lines that people read."""
        for section in self.sections:
            yield section.name
            width = max((len(fact.title) for fact in section.facts), default=0)
            for fact in section.facts:
                yield f"  {fact.title:<{width}}  {fact.text}"
            yield ""
        if self.passed:
            yield f"checked  {', '.join(self.passed)}: nothing wrong"
        if self.left_out:
            yield f"not set up  {', '.join(self.left_out)}: not checked"
        for problem in self.problems:
            yield f"{problem.severity}  {problem.check}: {problem.sentence}"
        n_errors = sum(it.severity == "error" for it in self.problems)
        n_warnings = len(self.problems) - n_errors
        yield f"{_counted(n_errors, 'error')}, {_counted(n_warnings, 'warning')}"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
