"""Counts and sizes, as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_count"]


def format_count(n: float) -> str:
    """Returns a count in three figures: 5.31 M."""
    for unit in ("", " k", " M", " G"):
        if n < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g} T"


def format_bytes(n_bytes: int) -> str:
    """Returns a size in three figures: 10.6 MB."""
    return f"{format_count(n_bytes)}B" if n_bytes >= 1000 else f"{n_bytes} B"
