"""Counts on a command line: flags of several benchmarks read them alike."""

from __future__ import annotations

__all__ = ["count", "counts"]


def count(text: str) -> int:
    """Returns a whole number from 1 on.

    Raises:
        ValueError: the text is something else; argparse says so.
    """
    n = int(text)
    if n < 1:
        raise ValueError(text)
    return n


def counts(text: str) -> tuple[int, ...]:
    """Returns whole numbers from 1 on, from "N,M,…". See `count`."""
    return tuple(map(count, text.split(",")))
