"""What a model must give alone, it must give in every other way too: one cell for each way.

    python -m tests.archs.cells MODEL RESULT.json [--drafts none …]

The program runs all cells of a model and writes what each gave. It is a process of its own, since
llama.cpp ends the process of a model that it cannot compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

from tests.archs.driver import N_OUTPUT, Answer, Driver, Half, answer_of, make_config

from drafthouse_server.errors import DrafthouseError, StartupError

__all__ = ["BASE", "CELLS", "DRAFTS", "MTP", "PROMPTS", "Cell", "run_cells"]

DRAFTS = ("none", "ngram-simple", "simple")
"""Draft types of every model; `simple` drafts with the model itself."""
MTP = "mtp"
"""The draft type of those that have next-token blocks besides."""

N_DRAFT = 3
N_SLOTS_SMALL = 2
_FIRST, _LAST = 33, 120
"""Tokens of prompts: plain characters."""

Prompt = list[int]


def _draw(seed: int, n: int) -> Prompt:
    chance = random.Random(seed)
    return [chance.randrange(_FIRST, _LAST) for _ in range(n)]


PROMPTS = [_draw(i, n) for i, n in enumerate((3, 9, 17, 24, 33, 48, 65, 90))]
"""Prompts of unlike lengths."""
BASE = _draw(100, 120)
CUTS = [BASE[:n] + _draw(200 + n, 12) for n in (110, 95, 75, 52, 36)]
"""Prompts that share ever less of their beginning: each cuts what the one before has left."""
DOCUMENTS = [_draw(300 + i, 80) for i in range(3)]
"""More than there are slots: all but the last ones go to host memory."""
LOW, HIGH = (_draw(400, 30), _draw(401, 41)), (_draw(402, 22), _draw(403, 50))
"""Two that run, and two that are more important and come later."""


def _turn(answer: Answer, seed: int) -> Prompt:
    """Returns the next turn of a conversation."""
    return [*answer.prompt, *answer.tokens, *_draw(seed, 10)]


def alone(driver: Driver) -> list[Answer]:
    """Asks one after the other, nothing is reused."""
    driver.renew(prefix_cache=False)
    return [driver.ask([prompt])[0] for prompt in PROMPTS]


def crowd(driver: Driver) -> list[Answer]:
    """Asks all at once."""
    driver.renew(prefix_cache=False)
    return driver.ask(PROMPTS)


def slots(driver: Driver) -> list[Answer]:
    """Goes on with conversations whose slots are retained."""
    driver.renew()
    first = driver.ask(PROMPTS[3:7])
    return driver.ask([_turn(answer, 500 + i) for i, answer in enumerate(first)])


def cut(driver: Driver) -> list[Answer]:
    """Asks prompts that share a part of what slots hold."""
    driver.renew()
    return [driver.ask([prompt])[0] for prompt in CUTS]


def host(driver: Driver) -> list[Answer]:
    """Goes on with conversations in host memory, and with parts of them."""
    driver.renew()
    first = [driver.ask([prompt])[0] for prompt in DOCUMENTS]
    turns = [driver.ask([_turn(answer, 600 + i)])[0] for i, answer in enumerate(first)]
    parts = [document[: 60 - 16 * i] + _draw(700 + i, 9) for i, document in enumerate(DOCUMENTS)]
    return turns + [driver.ask([prompt])[0] for prompt in parts]


def _preempt(driver: Driver, *, is_saved: bool) -> list[Answer]:
    driver.renew(prefix_cache=False, preempted_mib=1024 if is_saved else 0)
    low = [driver.submit(prompt) for prompt in LOW]
    while any(sequence.n_output < N_OUTPUT // 4 for sequence in low):
        driver.step()
    high = [driver.submit(prompt, priority=9) for prompt in HIGH]
    driver.run()
    assert all(sequence.swap.n_preemptions for sequence in low), "nothing was preempted"
    return [answer_of(sequence) for sequence in (*low, *high)]


def preempted(driver: Driver) -> list[Answer]:
    """Takes slots away from requests, whose state is written to host memory."""
    return _preempt(driver, is_saved=True)


def recomputed(driver: Driver) -> list[Answer]:
    """Takes slots away from requests, which are computed again."""
    return _preempt(driver, is_saved=False)


def saved(driver: Driver) -> list[Answer]:
    """Writes a sequence to bytes in the middle of its answer, and reads it in another engine."""
    answers = []
    config = driver.config
    n_draft = min(N_DRAFT, driver.engine.limits.n_draft_max)  # MTP blocks of one token each: fewer
    driver.renew()
    with Driver(config) as other:
        for prompt in PROMPTS[4:6]:
            half = Half(driver.engine, prompt, n_draft)
            half.run(N_OUTPUT // 2)
            half.run(N_OUTPUT, half.move(other.engine))
            answers.append(half.answer())
    return answers


@dataclasses.dataclass(frozen=True)
class Cell:
    """A way in which prompts are answered."""

    run: Callable[[Driver], list[Answer]]
    """Answers them."""
    n_slots: int = 8
    """Slots of its engine."""


CELLS = {
    "alone": Cell(alone),
    "crowd": Cell(crowd),
    "slots": Cell(slots),
    "cut": Cell(cut),
    "host": Cell(host, N_SLOTS_SMALL),
    "preempted": Cell(preempted, N_SLOTS_SMALL),
    "recomputed": Cell(recomputed, N_SLOTS_SMALL),
    "saved": Cell(saved, N_SLOTS_SMALL),
}
"""All ways, by name."""


Result = dict[str, dict[str, "list[Answer] | str"]]
"""By draft type and cell: the answers, or in a sentence why there are none."""


def run_cells(path: Path, drafts: tuple[str, ...] = DRAFTS) -> Result:
    """Runs all cells of a model.

    Args:
        path: The model.
        drafts: Draft types.
    """
    return {draft_type: _run_draft(path, draft_type) for draft_type in drafts}


def _run_draft(path: Path, draft_type: str) -> dict[str, list[Answer] | str]:
    found: dict[str, list[Answer] | str] = {}
    for n_slots in sorted({cell.n_slots for cell in CELLS.values()}, reverse=True):
        names = [name for name, cell in CELLS.items() if cell.n_slots == n_slots]
        try:
            with Driver(make_config(path, draft_type, n_slots)) as driver:
                for name in names:
                    found[name] = _run_cell(CELLS[name], driver)
        except (DrafthouseError, StartupError) as error:
            found |= {name: str(error) for name in names if name not in found}
    return found


def _run_cell(cell: Cell, driver: Driver) -> list[Answer] | str:
    try:
        return cell.run(driver)
    except (DrafthouseError, StartupError) as error:
        return str(error)


def main() -> int:
    """Runs the cells that the command line names; 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.cells")
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--drafts", nargs="+", choices=(*DRAFTS, MTP), default=DRAFTS)
    options = parser.parse_args()
    found = run_cells(options.model, tuple(options.drafts))
    text = json.dumps(found, default=dataclasses.asdict)
    options.result.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
