"""Numbers on a command line: flags of several benchmarks read them alike."""

from __future__ import annotations

import math

__all__ = ["amount", "amounts", "count", "counts", "number"]


def count(text: str) -> int:
    """Returns a whole number from 1 on.

    Raises:
        ValueError: the text is something else; argparse says so.
    """
    n = int(text)
    if n < 1:
        raise ValueError(text)
    return n


def number(text: str) -> int:
    """Returns a whole number from 0 on.

    Raises:
        ValueError: the text is something else.
    """
    return count(text) if text.strip() != "0" else 0


def amount(text: str) -> float:
    """Returns a finite number above 0.

    Raises:
        ValueError: the text is something else.
    """
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def amounts(text: str) -> tuple[float, ...]:
    """Returns finite numbers above 0, from "A,B,…". See `amount`."""
    return tuple(map(amount, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """Returns whole numbers from 1 on, from "N,M,…". See `count`."""
    return tuple(map(count, text.split(",")))
