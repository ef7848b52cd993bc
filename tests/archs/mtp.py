"""Every model with an MTP block against itself alone and without drafts, as a table.

    python -m tests.archs.mtp [NAME …]

It needs no llama-server; `make archs` has the same models beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from models.archs import RECIPES, write_model
from tests.archs.cells import CELLS, DRAFTS, MTP, run_cells
from tests.archs.driver import Alone, Answer, Driver, make_config
from tests.archs.judge import Judge, Verdict
from tests.archs.table import MARKS
from tests.archs.texts import SHORT

__all__ = ["main"]

TYPES = (*DRAFTS, MTP)
NAMES = [name for name, recipe in RECIPES.items() if "nextn_predict_layers" in recipe.values]
HISTORY = SHORT.prompts[4]


def row(path: Path) -> tuple[str, bool]:
    """Returns a model's line of the table, and whether every answer is right."""
    with Judge(path) as judge, Driver(make_config(path, "none", n_slots=1)) as driver:
        right = Alone(driver)
        history = judge.history(HISTORY, (0, len(HISTORY) // 2))
        found = {
            kind: {name: _verdict(judge, right, cell) for name, cell in cells.items()}
            for kind, cells in run_cells(path, TYPES).items()
        }
    marks = " | ".join(f"`{''.join(MARKS[v.kind] for v in _all(found[kind]))}`" for kind in TYPES)
    drafts = ", ".join(f"{v.n_accepted}/{v.n_drafted}" for v in _all(found[MTP]))
    n_reused = sum(v.n_reused for v in _all(found[MTP]))
    is_right = all(v.kind in ("equal", "tie") for kind in ("none", MTP) for v in _all(found[kind]))
    return f"| {path.stem} | {marks} | {drafts} | {n_reused} | {history:.2g} |", is_right


def _verdict(judge: Judge, right: Alone, cell: list[Answer] | str) -> Verdict:
    return Verdict("refused", reason=cell) if isinstance(cell, str) else judge.judge(cell, right)


def _all(cells: Mapping[str, Verdict]) -> list[Verdict]:
    return [cells[name] for name in CELLS]


def main() -> int:
    """Prints the table of the models that the command line names; 1 where a token is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.mtp", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    print("| model | none | n-gram | itself | MTP | MTP: accepted/drafted | reused | history |")
    print("|---|---|---|---|---|---|---:|---:|")
    n_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            line, is_right = row(write_model(Path(folder) / f"{name}.gguf", name))
            print(line, flush=True)
            n_wrong += not is_right
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
