"""Draws with speculation against draws without, for many sampler settings: a table.

    python -m tests.proofs.distribution [--draws 20000] [--only TEXT] [--file FILE]

For each target and sampler setting an engine without drafts draws a few tokens after one prompt
again and again; so do engines with drafts of every type, verified by rejection or by matching.
Twenty-four draws run side by side, among forks, rollbacks, cancels and snapshots: see
`drawing.py`. The counts of two engines are compared by a chi-square test of two samples and by
total variation.

The finished cases lie in the file; a second run goes on where the first was stopped. All cases of
one setting are compared with the same draws without drafts, so their z are not independent: the
verdict, by Bonferroni, allows for that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

from tests.support.block_draft import N_VOCAB, block_draft, following, repeating
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, prompts, vocabulary
from tests.support.drawing import Drawer, Path, TreeDrawer

from drafthouse_engine import Model
from drafthouse_engine.options import DraftType

DRAFTS: dict[str, tuple[DraftType, bool]] = {
    "mtp rejection": ("mtp", True),
    "mtp match": ("mtp", False),
    "simple rejection": ("simple", True),
    "simple match": ("simple", False),
    "eagle3 match": ("eagle3", False),
    "ngram match": ("ngram-simple", False),
    "dflash match": ("dflash", False),
    "dspark match": ("dspark", False),
}
"""Draft type, and whether drafts are sampled and verified by rejection."""
TREE = "tree match"
BLOCK_DRAFTS = FilePath("build/block-drafts")
"""Folder of the DFlash and DSpark models, which nobody trained; they are written at first use."""
LIKELY = (18, 1690)
"""The likeliest first token after the short prompt, and the likeliest after that, on both targets;
so that drafts of untrained models are accepted now and then."""

SETTINGS: dict[str, dict[str, object]] = {
    "t1.0": {"temperature": 1.0},
    "t0.7": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "penalty_repeat": 1.3, "penalty_presence": 0.5},
    "grammar": {"temperature": 1.0, "grammar": 'root ::= ([a-zA-Z ,.\\n] | "é")*'},
}
"""Sampler settings by name; all with top-k 8."""
OF_TREES = ("t1.0", "t0.7", "top-p", "min-p")
"""Settings that `generate_tree` knows; it needs a target without recurrent layers."""

LOOP = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = [1"
"""A prompt that repeats itself, so that n-grams are found; the others have a short one."""
ALPHA = 0.01
"""Chance of a false alarm over the whole table."""


@dataclass(frozen=True)
class Verdict:
    """How two samples compare."""

    z: float
    """Standard deviations of the chi-square statistic above its mean."""
    distance: float
    """Total variation between the samples."""
    noise: float
    """Total variation expected between two samples of one distribution."""

    @property
    def p(self) -> float:
        """Chance of such a z, or a greater one, when the distributions are equal."""
        return math.erfc(self.z / math.sqrt(2)) / 2


def compare(a: Counter[Path], b: Counter[Path]) -> Verdict:
    """Compares two samples with as many paths of each length.

    Paths of one length seen fewer than 10 times in both are merged.

    Source: two-sample chi-square; Wilson and Hilferty 1931 for its normal score.
    """
    n = a.total()
    assert n == b.total()
    statistic, n_free = 0.0, 0
    for length in {len(path) for path in a | b}:
        pairs = [(a[path], b[path]) for path in a | b if len(path) == length]
        assert sum(x - y for x, y in pairs) == 0, "lengths are fixed beforehand"
        large = [(x, y) for x, y in pairs if x + y >= 10]
        rest = sum(x for x, y in pairs if x + y < 10), sum(y for x, y in pairs if x + y < 10)
        cells = [*large, rest] if sum(rest) >= 10 else large
        statistic += sum((x - y) ** 2 / (x + y) for x, y in cells)
        n_free += max(len(cells) - 1, 0)
    k = max(n_free, 1)
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    pairs = [(a[path], b[path]) for path in a | b]
    distance = sum(abs(x - y) for x, y in pairs) / (2 * n)
    noise = sum(math.sqrt(2 * (x + y) / math.pi) for x, y in pairs) / (2 * n)
    return Verdict(z, distance, noise)


def block_model(draft_type: str) -> Model:
    """Returns a draft model of random weights but for its output: some drafts are accepted.

    DFlash drafts the likeliest first token again and again. DSpark does after any token but this,
    after which it drafts the likeliest second one.
    """
    BLOCK_DRAFTS.mkdir(parents=True, exist_ok=True)
    first, second = LIKELY
    path = BLOCK_DRAFTS / f"{draft_type}.gguf"
    if draft_type == "dflash":
        return Model(block_draft(path, has_own_tables=True, weights=repeating(first)))
    successors = dict.fromkeys(range(N_VOCAB), first) | {first: second}
    weights = following(successors)
    return Model(block_draft(path, markov_rank=N_VOCAB, has_own_tables=True, weights=weights))


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    target: str
    setting: str
    drafts: str

    @property
    def name(self) -> str:
        """Its three parts."""
        return f"{self.target} {self.setting} {self.drafts}"

    @property
    def prompt(self) -> list[int]:
        """The tokens that every draw follows."""
        if self.drafts.startswith("ngram"):
            return [int(token) for token in vocabulary().tokenize(LOOP)]
        return list(prompts((5,))[0])

    def make_drawer(self, target: Model) -> Drawer | TreeDrawer:
        """Returns what draws; close it."""
        if self.drafts == TREE:
            return TreeDrawer(target, Model(MODELS / SIMPLE))
        draft_type, is_probabilistic = DRAFTS[self.drafts]
        files = {"eagle3": EAGLE3[self.target], "simple": SIMPLE}
        draft = Model(MODELS / files[draft_type]) if draft_type in files else None
        if draft_type in ("dflash", "dspark"):
            draft = block_model(draft_type)
        return Drawer(target, draft, draft_type, is_probabilistic=is_probabilistic)


def cases() -> Iterator[Case]:
    """Yields all cases, those at temperature 1.0 first."""
    for setting in SETTINGS:
        for target in TARGETS:
            for drafts in DRAFTS:
                yield Case(target, setting, drafts)
            if target == "dense" and setting in OF_TREES:
                yield Case(target, setting, TREE)


class Table:
    """Finished cases and draws without drafts, in a file of one JSON object a line."""

    def __init__(self, path: FilePath, n_draws: int) -> None:
        self._path = path
        self._n_draws = n_draws
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        found = [entry for entry in found if entry["draws"] == n_draws]
        self.rows = {entry["case"]: entry for entry in found if "case" in entry}
        self._plain = {
            entry["plain"]: Counter({tuple(path): n for path, n in entry["counts"]})
            for entry in found
            if "plain" in entry
        }

    def _add(self, entry: dict[str, object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry | {"draws": self._n_draws}) + "\n")

    def run(self, case: Case, target: Model) -> dict[str, object]:
        """Draws a case and keeps its row."""
        start = time.perf_counter()
        expected = self._draws_without(case, target)
        drawer = case.make_drawer(target)
        # With matching, equal seeds give equal draws, which would prove too much.
        first_seed = self._n_draws * (1 + [*DRAFTS, TREE].index(case.drafts))
        found = drawer.draw(case.prompt, SETTINGS[case.setting], self._n_draws, first_seed)
        acceptance = drawer.acceptance
        drawer.close()
        verdict = compare(expected, found)
        row: dict[str, object] = {
            "case": case.name,
            **asdict(verdict),
            "p": verdict.p,
            "acceptance": acceptance,
            "seconds": time.perf_counter() - start,
        }
        self.rows[case.name] = row
        self._add(row)
        return row

    def _draws_without(self, case: Case, target: Model) -> Counter[Path]:
        name = f"{case.target} {case.setting} {len(case.prompt)}"
        if name not in self._plain:
            drawer = Drawer(target, None, "none", is_probabilistic=False)
            counts = drawer.draw(case.prompt, SETTINGS[case.setting], self._n_draws, 0)
            drawer.close()
            self._plain[name] = counts
            self._add({"plain": name, "counts": [[list(path), n] for path, n in counts.items()]})
        return self._plain[name]


def show(row: dict[str, object]) -> None:
    """Prints a row."""
    print(
        f"{row['case']:32} {row['z']:6.2f} {row['p']:7.4f}  {row['distance']:8.4f}"
        f"  {row['noise']:7.4f}  {row['acceptance']:8.2f}  {row['seconds']:7.0f}",
        flush=True,
    )


def main() -> None:
    """Prints the table, row by row, and what it proves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=20_000, help="draws of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--file", type=FilePath, default=FilePath("build/distribution.jsonl"))
    options = parser.parse_args()
    table = Table(options.file, options.draws)
    print(f"{options.draws} draws of one to three tokens, with drafts and without")
    print("case                                  z       p  distance    noise  accepted  seconds")
    models = {name: Model(MODELS / file) for name, file in TARGETS.items()}
    for case in cases():
        if options.only in case.name:
            show(table.rows.get(case.name) or table.run(case, models[case.target]))
    n, worst = len(table.rows), min(row["p"] for row in table.rows.values())
    is_equal = worst * n >= ALPHA
    print(
        f"{n} cases, smallest p {worst:.4f}, times their number {min(worst * n, 1.0):.2f}: "
        + ("no difference found" if is_equal else "SOME CASE DIFFERS")
    )
    raise SystemExit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
