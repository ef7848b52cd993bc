"""What a setting is: its declaration, which `config` writes and `cli.settings` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = [
    "ALL",
    "ANY",
    "AS_FIT",
    "AUTO",
    "Rule",
    "Setting",
    "between",
    "declare",
    "layers",
    "one_of",
]

AUTO, ALL = "auto", "all"
"""The words that a count of layers may be given as: as many as fit, and every layer."""

AS_FIT = (AUTO, -1)
"""Counts of layers that mean as many as fit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a setting may have."""

    expected: str
    """The rule in words; empty where anything is allowed."""
    is_valid: Callable[[Any], bool]
    """The rule."""
    choices: tuple[str, ...] = ()
    """The allowed texts, where these are few."""


ANY = Rule("", lambda _: True)
"""Anything is allowed, or what is allowed is checked beside other settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting."""

    name: str
    """TOML key and attribute; with `--` and hyphens the flag, with `DRAFTHOUSE_` the variable."""
    default: object
    """Value when no source gives one; its type is the setting's type."""
    group: str
    """Heading of the help under which it stands."""
    rule: Rule
    """Which values are allowed."""
    about: str
    """Help: what it does, with the unit, and what 0 means where that is special."""
    old: str
    """Name until 0.1, which works with a warning; empty when that was the same."""
    old_values: Mapping[str, str]
    """New texts of values, by the texts that the old name took."""
    peers: tuple[str, ...]
    """Other names that llama-server or vLLM has for the same."""
    is_secret: bool
    """Whether its value must never be shown."""

    @property
    def flag(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"DRAFTHOUSE_{self.name.upper()}"

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return isinstance(self.default, bool)

    @property
    def may_be_number(self) -> bool:
        """Whether it is a word or a whole number, as gpu_layers."""
        return self.rule.choices[-1:] == ("N",)

    def shown(self, value: object) -> object:
        """Returns a value of it as a message may show it."""
        return "(hidden)" if self.is_secret else value


def between(low: float, high: float) -> Rule:
    """Returns the rule of a number in a range."""
    return Rule(f"a value in [{low}, {high}]", lambda value: low <= value <= high)


def one_of(*choices: str) -> Rule:
    """Returns the rule of a word out of a few."""
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices, choices)


def layers(high: int) -> Rule:
    """Returns the rule of a count of layers, as llama-server takes it: -1 is "auto", too."""
    expected = f"{AUTO} (or -1), {ALL}, or a whole number in [0, {high}]"

    def is_valid(value: int | str) -> bool:
        return value in (AUTO, ALL) if isinstance(value, str) else -1 <= value <= high

    return Rule(expected, is_valid, (AUTO, ALL, "N"))


_NO_VALUES: Mapping[str, str] = MappingProxyType({})


def declare(
    group: str,
    default: object,
    rule: Rule,
    about: str,
    *,
    old: str = "",
    old_values: Mapping[str, str] = _NO_VALUES,
    peers: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:  # noqa: ANN401  # as `field` does
    """Returns a dataclass field that carries its declaration; `Setting` says what each is."""
    declared = Setting("", default, group, rule, about, old, old_values, peers, is_secret)
    return dataclasses.field(default=default, metadata={"declared": declared}, repr=not is_secret)
