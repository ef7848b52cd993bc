"""K as chosen beside no drafts and K = 1, 2, 3: what speculation must hold on every machine.

    drafthouse-bench trial [--rounds 5] [--seconds 15] [--only cell=0.6b@0.8,streams=1+8]
        [--minutes 30] [--threads 0] [--drop 0.8] [--json build/trial.json] [--lock FILE] [--table]

A cell is a model, an acceptance and a number of streams. In each of its rounds every arm has one
turn, in an order that rotates, cut into slices of --slice seconds that alternate: a machine whose
speed drifts by a tenth from minute to minute does so for all arms alike. Arms run in this process,
without the network, each with an engine and a scheduler of its own, whose streams wait while others
have their turn: that leaves out the noise of sockets, of a second process and of the event loop,
and what a chooser has learnt stays. All have the target's weights in common: where weights lie in
memory is worth some percent from one load to the next, and would be taken for the choice.
Models of 0.6 B and 1.2 B have random weights (`make bench-models ARGS="dense-0.6b dense-1.2b
--quants Q4_0"`) and an MTP block; their drafts are accepted at random (`synth_rates`), each
position with the cell's acceptance if those before it were. The demo models' drafts are verified.

Each turn notes how many cores the process had, since a machine that others use as well tells
nothing of choosers: rounds in which these numbers differ are to be measured again. With
--threads 1 they are 1 on a quiet machine.

With --drop a fixed K that reached less than this part of the best arm's speed in a cell's first
round is measured no more there: it cannot be the best one, and the others' rounds stand closer.

With --lock each turn holds that file's lock (flock), so that other work on the machine can wait
for the turn's end: `flock -s FILE make test`.

The file is written after every round; the same command goes on from it. `--table` measures
nothing. A ratio is taken inside each round, to the arm without a chooser that is the best one in
the median of the cell's other rounds: the best of four medians is too good by luck where arms are
equal but for noise (by 2 % where their medians vary by 2 %), and a round that names the best and is
compared with it, too, counts that luck against the chooser. The table has that ratio beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafthouse_bench.adaptive_k import Contender
from drafthouse_bench.peers.case import find_target
from drafthouse_server.config import Config

CHOSEN = "adaptive"
FIXED = ("none", "K=1", "K=2", "K=3")
_N_DRAFT_MAX = 3
_MODELS = {
    "0.6b@0.4": ("dense-0.6b-Q4_0", 0.4),
    "0.6b@0.6": ("dense-0.6b-Q4_0", 0.6),
    "0.6b@0.8": ("dense-0.6b-Q4_0", 0.8),
    "1.2b@0.6": ("dense-1.2b-Q4_0", 0.6),
    "dense": ("dense", None),
    "hybrid": ("hybrid", None),
}
_STREAMS = (1, 4, 8, 32)
_LEARNING_S = 10.0  # in which a chooser may try more: `drafthouse-bench fresh` tells of them
_N_WARM_UP = 60  # steps before the first round: each K is tried when a server starts

# The bars.
_MEDIAN_LEAST = 0.98  # of the ratios of all cells
_CELL_LEAST = 0.93  # of a cell's ratio; a miss counts where its upper quartile is below, too
_CHANGES_MOST = 1.0  # changes of K a second


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured at once."""

    model: str
    """A key of `_MODELS`."""
    n_streams: int
    """Requests at once."""

    @property
    def name(self) -> str:
        """Both in a word."""
        return f"{self.model} x{self.n_streams}"


class Store:
    """The rounds that were measured, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_text(encoding="utf-8") if path.exists() else "[]"
        self.rounds: list[dict[str, Any]] = json.loads(content)

    def of(self, cell: Cell) -> list[dict[str, Any]]:
        """Returns a cell's rounds."""
        return [found for found in self.rounds if found["cell"] == cell.name]

    def add(self, cell: Cell, seconds: float, n_threads: int, arms: dict[str, Any]) -> None:
        """Adds a round and writes the file, whole or not at all."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        self.rounds.append(
            {
                "cell": cell.name,
                "when": when,
                "seconds": seconds,
                "n_threads": n_threads,
                "arms": arms,
            }
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.rounds, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)


def _arms(cell: Cell, n_threads: int) -> list[Contender]:
    name, acceptance = _MODELS[cell.model]
    target = find_target(name)
    n_prompt = 24 if target.is_random else 64
    common: dict[str, Any] = {
        "model": str(target.path),
        "parallel": cell.n_streams,
        "max_model_len": 320,
        "threads": n_threads,
        "prefix_cache": False,
    }
    drafted: dict[str, Any] = {"draft_type": "mtp", "draft_max": _N_DRAFT_MAX}
    if acceptance is not None:
        rates = [acceptance**k for k in range(1, _N_DRAFT_MAX + 1)]
        drafted["synth_rates"] = tuple(f"{rate:.6f}" for rate in rates)
    cases: dict[str, dict[str, Any]] = {CHOSEN: drafted, "none": {"draft_type": "none"}}
    for k in range(1, _N_DRAFT_MAX + 1):
        cases[f"K={k}"] = drafted | {"draft_policy": "fixed", "draft_default": k}
    arms: list[Contender] = []
    for name, case in cases.items():
        target_of = arms[0].engine if arms else None
        arms.append(
            Contender(
                name,
                Config(**common | case),
                cell.n_streams,
                n_prompt=n_prompt,
                target_of=target_of,
            )
        )
    return arms


def _dropped(first_round: dict[str, Any], part: float) -> set[str]:
    """Returns the fixed K that the first round shows far behind the best arm without a chooser."""
    speeds = {name: first_round[name]["tokens_per_s"] for name in FIXED}
    return {name for name in FIXED[1:] if speeds[name] < part * max(speeds.values())}


def _n_changes(arm: Contender) -> int:
    return int(getattr(arm.scheduler.policy, "n_changes", 0))


def _warm_up(arm: Contender, seconds: float) -> None:
    """Runs until every stream generates and a chooser's first probes are over, and then some."""
    arm.run(0.0)
    while not all(sequence.tally.n_steps for sequence in arm.scheduler.sequences()):
        arm.run(0.2)
    arm.run(seconds)
    # All arms alike, or the streams of some would be younger, and their attention quicker.
    while arm.scheduler.counts.n_planned < _N_WARM_UP * arm.n_streams:
        arm.run(0.2)


@dataclass(slots=True)
class _Turn:
    """What an arm did in its turn, slice by slice."""

    arm: Contender
    """The arm."""
    n_changes: int
    """Changes of K before it."""
    lengths: Counter[int] = field(default_factory=Counter)
    """How often which K was planned."""
    n_tokens: float = 0.0
    """Tokens generated."""
    wall_s: float = 0.0
    """Seconds of its slices."""
    cpu_s: float = 0.0
    """Processor seconds in them."""

    def run(self, seconds: float) -> None:
        """Runs one slice."""
        self.arm.lengths.clear()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self.arm.run(seconds)
        wall_s = time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s
        self.wall_s += wall_s
        self.n_tokens += self.arm.rates[-1] * wall_s
        self.lengths += self.arm.lengths

    def result(self) -> dict[str, Any]:
        """Returns it for the file."""
        n_all = max(1, sum(self.lengths.values()))
        n_changes = max(0, _n_changes(self.arm) - self.n_changes)
        return {
            "tokens_per_s": round(self.n_tokens / self.wall_s, 3),
            "n_cores": round(self.cpu_s / self.wall_s, 3),  # fewer than threads: others had some
            "changes_per_s": round(n_changes / self.wall_s, 3),
            "chosen": {str(k): round(n / n_all, 3) for k, n in sorted(self.lengths.items())},
            "n_resets": self.arm.scheduler.counts.n_estimator_resets,
        }


@contextlib.contextmanager
def _quiet(path: Path | None) -> Iterator[None]:
    """Holds a file's lock while something is measured; those that wait have a chance before."""
    if path is None:
        yield
        return
    time.sleep(0.3)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _measure(cell: Cell, store: Store, options: argparse.Namespace, stop_at: float) -> None:
    n_done = len(store.of(cell))
    if n_done >= options.rounds:
        return
    with contextlib.ExitStack() as stack:
        arms = _arms(cell, options.threads)
        for arm in arms:
            stack.callback(arm.engine.close)
        if n_done:
            arms = _kept(arms, store.of(cell)[0]["arms"], options.drop)
        for arm in arms:
            with _quiet(options.lock):
                _warm_up(arm, max(options.warm_up, _LEARNING_S * (arm.name == CHOSEN)))
        for i in range(n_done, options.rounds):
            if time.monotonic() + options.seconds * len(arms) > stop_at:
                return
            first = i % len(arms)
            found = _round(arms[first:] + arms[:first], options)
            store.add(cell, options.seconds, options.threads, found)
            speeds = "  ".join(f"{name} {arm['tokens_per_s']:.1f}" for name, arm in found.items())
            print(f"{cell.name}  round {i + 1}: {speeds}", flush=True)
            if i == 0:
                arms = _kept(arms, found, options.drop)


def _kept(arms: Sequence[Contender], first_round: dict[str, Any], part: float) -> list[Contender]:
    gone = _dropped(first_round, part)
    return [arm for arm in arms if arm.name not in gone]


def _round(arms: list[Contender], options: argparse.Namespace) -> dict[str, Any]:
    """Gives each arm its turn, cut into slices that alternate."""
    turns = [_Turn(arm, _n_changes(arm)) for arm in arms]
    n_slices = max(1, round(options.seconds / options.slice))
    for _ in range(n_slices):
        with _quiet(options.lock):
            for turn in turns:
                turn.run(options.seconds / n_slices)
    return {turn.arm.name: turn.result() for turn in turns}


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _best(speeds: dict[str, list[float]], but: int | None = None) -> str:
    """Returns the fixed arm with the best median, of all rounds or of all but one."""
    n_rounds = len(speeds[CHOSEN])
    if n_rounds < 2:
        but = None

    def median(arm: str) -> float:
        return statistics.median(v for i, v in enumerate(speeds[arm]) if i != but)

    return max((arm for arm in FIXED if len(speeds[arm]) == n_rounds), key=median)


def _table(store: Store, cells: Sequence[Cell]) -> None:
    """Prints a line for each cell, and whether the choice holds its bars."""
    print(
        f"medians of tokens/s; then {CHOSEN} ÷ the best of the arms without a chooser by the other"
        " rounds, with quartiles, and ÷ the best by all rounds"
    )
    ratios: list[float] = []
    lucky: list[float] = []
    misses: list[str] = []
    changes_most = 0.0
    for cell in cells:
        rounds = [found["arms"] for found in store.of(cell)]
        if not rounds:
            continue
        if any(CHOSEN not in arms for arms in rounds):
            sys.exit(f"{cell.name} has rounds without the arm {CHOSEN}: they are another trial's")
        speeds = {
            arm: [arms[arm]["tokens_per_s"] for arms in rounds if arm in arms]
            for arm in (CHOSEN, *FIXED)
        }
        best = _best(speeds)
        parts = []
        for arm, found in speeds.items():
            low, middle, high = _quartiles(found)
            once = " once" * (len(found) == 1 < len(rounds))
            parts.append(f"{arm} {middle:.1f} ({low:.1f}-{high:.1f}){once}")
        cores = [arm["n_cores"] for arms in rounds for arm in arms.values()]
        busy = f"cores {min(cores):.2f}-{max(cores):.2f}"
        print(f"{cell.name:14} {len(rounds)} rounds  {'  '.join(parts)}  best {best}  {busy}")
        found = speeds[CHOSEN]
        low, ratio, high = _quartiles(
            [speed / speeds[_best(speeds, but=i)][i] for i, speed in enumerate(found)]
        )
        lucky.append(statistics.median(a / b for a, b in zip(found, speeds[best], strict=True)))
        per_s = statistics.mean(arms[CHOSEN]["changes_per_s"] for arms in rounds)
        ratios.append(ratio)
        changes_most = max(changes_most, per_s)
        if ratio < _CELL_LEAST and high < _CELL_LEAST:
            misses.append(cell.name)
        print(f"    {ratio:.3f} ({low:.3f}-{high:.3f}), {lucky[-1]:.3f}, {per_s:.2f} changes/s")
    if not ratios:
        return
    median = statistics.median(ratios)
    holds = median >= _MEDIAN_LEAST and not misses and changes_most <= _CHANGES_MOST
    print(
        f"median of {len(ratios)} cells {median:.3f} ({statistics.median(lucky):.3f} by all"
        f" rounds), worst {min(ratios):.3f} ({min(lucky):.3f}), below"
        f" {_CELL_LEAST} in {', '.join(misses) or 'none'}, at most {changes_most:.2f} changes/s:"
        f" {'holds' if holds else 'does not hold'}"
    )


def _selected(only: str) -> Iterator[Cell]:
    """Yields the cells that a selection names, such as `cell=dense+hybrid,streams=1`."""
    chosen = {part.partition("=")[0]: part.partition("=")[2] for part in only.split(",") if part}
    if not set(chosen) <= {"cell", "streams"}:
        raise ValueError(f"--only {only!r}: expected cell=NAME+NAME and streams=N+N")
    models = chosen.get("cell", "+".join(_MODELS)).split("+")
    streams = [int(n) for n in chosen.get("streams", "+".join(map(str, _STREAMS))).split("+")]
    for model in models:
        if model not in _MODELS:
            raise ValueError(f"there is no cell {model!r}; there are {', '.join(_MODELS)}")
        for n_streams in streams:
            yield Cell(model, n_streams)


def main() -> None:
    """Measures the cells that are not yet complete, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="of each cell, those of earlier sittings included")
    add("--seconds", type=float, default=15.0, help="of an arm's turn")
    add("--slice", type=float, default=1.5, help="seconds after which the next arm goes on")
    add("--warm-up", type=float, default=5.0, help="seconds of each arm before the first round")
    add("--minutes", type=float, default=1e6, help="no round begins that would end later")
    add("--threads", type=int, default=0, help="of a decode; 0 is the server's default")
    add("--drop", type=float, default=0.0, help="part of the best below which a K is let go")
    add("--only", default="", help="cell=NAME+NAME,streams=N+N")
    add("--json", type=Path, default=Path("build/trial.json"))
    add("--lock", type=Path, help="a file whose lock is held while something is measured")
    add("--table", action="store_true", help="measure nothing, print the table of the file")
    options = parser.parse_args()
    stop_at = time.monotonic() + 60 * options.minutes
    try:
        cells = list(_selected(options.only))
    except ValueError as error:
        sys.exit(str(error))
    store = Store(options.json)
    if not options.table:
        for cell in cells:
            _measure(cell, store, options, stop_at)
    _table(store, cells)


if __name__ == "__main__":
    main()
