"""Integers between two bounds, as a language of decimal digits."""

from __future__ import annotations

from typing import Final

from drafthouse_engine.gbnf import Alt, Node, Repeat, Seq, chars_of, literal

__all__ = ["integer_range"]

N_DIGITS_MAX: Final = 16


def integer_range(low: int | None, high: int | None) -> Node:
    """Returns the integers of an interval, without leading zeros.

    Args:
        low: least integer; None is without bound, which means 16 digits.
        high: greatest integer; None likewise. low ≤ high.
    """
    low = -(10**N_DIGITS_MAX) + 1 if low is None else low
    high = 10**N_DIGITS_MAX - 1 if high is None else high
    branches: list[Node] = []
    if low < 0:
        minus = _naturals(max(1, -high), -low)
        branches.append(Seq((literal("-"), Alt(tuple(minus)))))
    if high >= 0:
        branches += _naturals(max(0, low), high)
    return Alt(tuple(branches))


def _naturals(low: int, high: int) -> list[Node]:
    """The numbers of an interval, by their number of digits."""
    branches = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        branches.append(_same_length(str(low), str(last)))
        low = last + 1
    return branches


def _same_length(low: str, high: str) -> Node:
    """The numbers between two of equally many digits."""
    if not low:
        return Seq(())
    n = len(low) - 1
    if low[1:] == "0" * n and high[1:] == "9" * n:
        return Seq((_digit(low[0], high[0]), Repeat(_digit("0", "9"), n, n)))
    if low[0] == high[0]:
        return Seq((literal(low[0]), _same_length(low[1:], high[1:])))
    branches = [Seq((literal(low[0]), _same_length(low[1:], "9" * n)))]
    middle = chr(ord(low[0]) + 1), chr(ord(high[0]) - 1)
    if middle[0] <= middle[1]:
        branches.append(Seq((_digit(*middle), Repeat(_digit("0", "9"), n, n))))
    branches.append(Seq((literal(high[0]), _same_length("0" * n, high[1:]))))
    return Alt(tuple(branches))


def _digit(low: str, high: str) -> Node:
    return chars_of([(ord(low), ord(high))])
