"""What becomes of a sequence that is cut where windows slide: cut positions × paths, as a table.

    python -m tests.proofs.windows [--all]

Copies of the dense demo model with windows of 64 and 500 tokens, in caches of their own and in a
shared pool. A cell says what the sequence generates after the cut, beside one computed anew: "="
the same tokens, "~" the same but for two that are equally likely, "-" refused (the slot begins
empty, or `Unsupported`), "X" wrong. With `--all` longer sequences too, up to twice the model's
context; that takes half an hour.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.support.windows import WAYS, Cutter, borders

SHORT = [(64, (32, 63, 64, 65, 130)), (500, (250, 505))]
LONG = [(64, (300, 1000, 2048)), (500, (499, 500, 501, 1000, 2048))]
LETTERS = {"equal": "=", "tie": "~", "refused": "-", "WRONG": "X"}


def table(n_window: int, n_held: int, *, is_shared: bool) -> Counter[str]:
    """Prints one table and returns how often each verdict was found."""
    cutter = Cutter(n_window, n_held, is_shared=is_shared)
    cuts = borders(n_window, n_held)
    cells = "a shared pool of cells" if is_shared else "cells of its own"
    print(f"\nwindow {n_window}, {n_held} tokens held, {cells}; cut to:")
    print(f"{'':26}", *(f"{cut:5}" for cut in cuts))
    found: Counter[str] = Counter()
    for name, way in WAYS.items():
        verdicts = [cutter.verdict(way, cut) for cut in cuts]
        found.update(verdicts)
        print(f"{name:26}", *(f"{LETTERS[verdict]:>5}" for verdict in verdicts), flush=True)
    cutter.close()
    return found


def main() -> int:
    """Prints all tables and returns the exit status: 1 where any cell is wrong."""
    found: Counter[str] = Counter()
    for n_window, lengths in SHORT + LONG * ("--all" in sys.argv[1:]):
        for n_held in lengths:
            for is_shared in (False, True):
                found.update(table(n_window, n_held, is_shared=is_shared))
    print("\nall:", ", ".join(f"{found[verdict]} {verdict}" for verdict in LETTERS))
    return 1 if found["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
