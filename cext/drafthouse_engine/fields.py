"""Checks of dataclass fields; a refusal names the field, the value and the range."""

from __future__ import annotations

import math
import numbers
from typing import Final

from drafthouse_engine.errors import InvalidConfig

__all__ = [
    "FLOAT32_MAX",
    "INT32_MAX",
    "check_bool",
    "check_float",
    "check_int",
    "check_text",
    "has_text_problem",
    "refusal",
]

INT32_MAX: Final = 2**31 - 1
"""Greatest value of an int32_t."""
FLOAT32_MAX: Final = 3.4028234663852886e38
"""Greatest finite float."""


def refusal(owner: object, field: str, value: object, wanted: str) -> InvalidConfig:
    """Returns the error for a field whose value is not what was wanted."""
    name = f"{type(owner).__name__}.{field}"
    return InvalidConfig(f"{name} must be {wanted}, not {value!r}", field=field, value=value)


def check_int(owner: object, field: str, low: int, high: int = INT32_MAX) -> None:
    """Raises `InvalidConfig` unless the field is an integer in [low, high]."""
    value = getattr(owner, field)
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise refusal(owner, field, value, f"an integer in [{low}, {high}]")
    if not isinstance(value, int):
        object.__setattr__(owner, field, int(value))  # numpy's, in a frozen dataclass


def check_bool(owner: object, field: str) -> None:
    """Raises `InvalidConfig` unless the field is True or False."""
    value = getattr(owner, field)
    if not isinstance(value, bool):
        raise refusal(owner, field, value, "True or False")


def check_float(
    owner: object, field: str, low: float, high: float = FLOAT32_MAX, *, ends: str = "[]"
) -> None:
    """Raises `InvalidConfig` unless the field is a finite number in the interval."""
    value = getattr(owner, field)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not _is_within(value, low, high, ends):
        interval = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
        raise refusal(owner, field, value, f"a finite number in {interval}")
    if not isinstance(value, int | float):
        object.__setattr__(owner, field, float(value))  # numpy's, in a frozen dataclass


def check_text(owner: object, field: str, value: object) -> None:
    """Raises `InvalidConfig` unless the value is text that C can hold."""
    if not isinstance(value, str) or has_text_problem(value):
        raise refusal(owner, field, value, "text without NUL characters and lone surrogates")


def has_text_problem(text: str) -> bool:
    """Returns whether text has a NUL character, which C ends at, or a lone surrogate."""
    return "\0" in text or any("\ud800" <= c <= "\udfff" for c in text)


def _is_within(value: float, low: float, high: float, ends: str) -> bool:
    above = value > low if ends[0] == "(" else value >= low
    below = value < high if ends[1] == ")" else value <= high
    return above and below
