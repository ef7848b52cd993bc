"""What a model must give alone, it must give in every other way too: one cell for each way.

    python -m tests.archs.cells MODEL RESULT.json [--drafts none …]

The program runs all cells of a model and writes what each gave. It is a process of its own, since
llama.cpp ends the process of a model that it cannot compute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from models.archs_eagle3 import write_eagle3
from tests.archs.driver import (
    N_CTX_LONG,
    N_OUTPUT,
    Answer,
    Driver,
    Half,
    answer_of,
    make_config,
)
from tests.archs.texts import LONG, SHORT, Prompt, Texts, draw
from tests.support.demo import EAGLE3 as DEMO_EAGLE3
from tests.support.demo import MODELS, TARGETS

from drafthouse_server.config import Config
from drafthouse_server.errors import DrafthouseError, StartupError

__all__ = [
    "CELLS",
    "DRAFTS",
    "EAGLE3",
    "MTP",
    "SMALL",
    "Cell",
    "followers",
    "is_small",
    "run_cells",
    "small",
]

DRAFTS = ("none", "ngram-simple", "simple")
"""Draft types of every model; `simple` drafts with the model itself."""
MTP = "mtp"
"""The draft type of those that have next-token blocks besides."""
EAGLE3 = "eagle3"
"""The draft type of those whose layers llama.cpp shows besides, with a drafter that is written."""
SMALL = "small "
"""Before a draft type: with small caches for windows (`swa_full` off), and long prompts."""

N_DRAFT = 3
N_SLOTS_SMALL = 2
N_OUTPUT_LONG = 4 * N_OUTPUT
"""Tokens that go on being generated while a second long prompt is computed, even with drafts."""
N_UBATCH_SMALL = 64
"""With more, caches of windows are as long as the others here: they hold window and ubatch."""
NOT_SHOWN = "which llama.cpp does not show of the architecture"
"""What the engine says of an EAGLE-3 drafter where llama.cpp does not give a layer's input."""


def small(draft_type: str) -> str:
    """Returns the name of a draft type with small caches for windows."""
    return SMALL + draft_type


def is_small(draft_type: str) -> bool:
    """Tells whether it is one with small caches for windows."""
    return draft_type.startswith(SMALL)


def _turn(answer: Answer, seed: int) -> Prompt:
    """Returns the next turn of a conversation."""
    return [*answer.prompt, *answer.tokens, *draw(seed, 10)]


def alone(driver: Driver, texts: Texts) -> list[Answer]:
    """Asks one after the other, nothing is reused."""
    driver.renew(prefix_cache=False)
    return [driver.ask([prompt])[0] for prompt in texts.prompts]


def crowd(driver: Driver, texts: Texts) -> list[Answer]:
    """Asks all at once."""
    driver.renew(prefix_cache=False)
    return driver.ask(texts.prompts)


def slots(driver: Driver, texts: Texts) -> list[Answer]:
    """Goes on with conversations whose slots are retained."""
    driver.renew()
    first = driver.ask(texts.prompts[3:7])
    return driver.ask([_turn(answer, 500 + i) for i, answer in enumerate(first)])


def cut(driver: Driver, texts: Texts) -> list[Answer]:
    """Asks prompts that share a part of what slots hold."""
    driver.renew()
    return [driver.ask([prompt])[0] for prompt in texts.cuts]


def host(driver: Driver, texts: Texts) -> list[Answer]:
    """Goes on with conversations in host memory, and with parts of them."""
    driver.renew()
    first = [driver.ask([prompt])[0] for prompt in texts.documents]
    turns = [driver.ask([_turn(answer, 600 + i)])[0] for i, answer in enumerate(first)]
    return turns + [driver.ask([prompt])[0] for prompt in texts.parts]


def _preempt(driver: Driver, texts: Texts, *, is_saved: bool) -> list[Answer]:
    driver.renew(prefix_cache=False, preempted_mib=1024 if is_saved else 0)
    n_low = N_OUTPUT if texts is SHORT else N_OUTPUT_LONG
    low = [driver.submit(prompt, n_output=n_low) for prompt in texts.low]
    while any(sequence.n_output < N_OUTPUT // 4 for sequence in low):
        driver.step()
    high = [driver.submit(prompt, priority=9) for prompt in texts.high]
    driver.run()
    assert all(sequence.swap.n_preemptions for sequence in low), "nothing was preempted"
    answers = [answer_of(sequence) for sequence in (*low, *high)]
    return [dataclasses.replace(it, tokens=it.tokens[:N_OUTPUT]) for it in answers]


def preempted(driver: Driver, texts: Texts) -> list[Answer]:
    """Takes slots away from requests, whose state is written to host memory."""
    return _preempt(driver, texts, is_saved=True)


def recomputed(driver: Driver, texts: Texts) -> list[Answer]:
    """Takes slots away from requests, which are computed again."""
    return _preempt(driver, texts, is_saved=False)


def saved(driver: Driver, texts: Texts) -> list[Answer]:
    """Writes a sequence to bytes in the middle of its answer, and reads it in another engine."""
    answers = []
    config = driver.config
    n_draft = min(N_DRAFT, driver.engine.limits.n_draft_max)  # MTP blocks of one token each: fewer
    driver.renew()
    with Driver(config) as other:
        for prompt in texts.prompts[4:6]:
            half = Half(driver.engine, prompt, n_draft)
            half.run(N_OUTPUT // 2)
            half.run(N_OUTPUT, half.move(other.engine))
            answers.append(half.answer())
    return answers


@dataclasses.dataclass(frozen=True)
class Cell:
    """A way in which prompts are answered."""

    run: Callable[[Driver, Texts], list[Answer]]
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
    """Runs all cells of a model; draft types that there are none of are left out.

    Args:
        path: The model; with small caches one whose context is as long as `N_CTX_LONG`.
        drafts: Draft types.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: _run_draft(path, kind, Path(folder)) for kind in drafts}
    return {kind: cells for kind, cells in found.items() if cells}


def _run_draft(path: Path, kind: str, folder: Path) -> dict[str, list[Answer] | str]:
    found: dict[str, list[Answer] | str] = {}
    for n_slots in sorted({cell.n_slots for cell in CELLS.values()}, reverse=True):
        names = [name for name, cell in CELLS.items() if cell.n_slots == n_slots]
        try:
            with Driver(_config(path, kind, n_slots, folder)) as driver:
                if is_small(kind) and not driver.has_small_windows:
                    return {}
                for name in names:
                    found[name] = _run_cell(CELLS[name], driver, LONG if is_small(kind) else SHORT)
        except (DrafthouseError, StartupError) as error:
            if NOT_SHOWN in str(error):
                return {}
            found |= {name: str(error) for name in names if name not in found}
    return found


def _config(path: Path, kind: str, n_slots: int, folder: Path) -> Config:
    draft_type, settings = kind.removeprefix(SMALL), dict[str, object]()
    if is_small(kind):
        settings = {"swa_full": False, "ubatch_size": N_UBATCH_SMALL, "max_model_len": N_CTX_LONG}
    if draft_type == EAGLE3:
        settings["model_draft"] = str(_drafter(path, folder, LONG if is_small(kind) else SHORT))
    return make_config(path, draft_type, n_slots, **settings)


def _drafter(path: Path, folder: Path, texts: Texts) -> Path:
    """Returns an EAGLE-3 drafter: the demo model's own, or one that has seen the model's answers.

    Raises:
        ModelLoadError: the model cannot be loaded.
    """
    trained = {TARGETS[kind]: name for kind, name in DEMO_EAGLE3.items()}.get(path.name)
    if trained:
        return MODELS / trained
    drafter = folder / f"{path.stem}-eagle3.gguf"
    if not drafter.exists():
        with Driver(make_config(path, "none", max_model_len=N_CTX_LONG)) as driver:
            driver.renew(prefix_cache=False)
            answers = driver.ask(texts.all)
        write_eagle3(drafter, path, followers(answer.tokens for answer in answers))
    return drafter


def followers(texts: Iterable[Sequence[int]]) -> dict[int, int]:
    """Returns by token what follows it most often in texts."""
    pairs = Counter(pair for text in texts for pair in itertools.pairwise(text))
    return {token: after for (token, after), _ in reversed(pairs.most_common())}


def _run_cell(cell: Cell, driver: Driver, texts: Texts) -> list[Answer] | str:
    try:
        return cell.run(driver, texts)
    except (DrafthouseError, StartupError) as error:
        return str(error)


def main() -> int:
    """Runs the cells that the command line names; 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.cells")
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    options = parser.parse_args()
    found = run_cells(options.model, tuple(options.drafts))
    text = json.dumps(found, default=dataclasses.asdict)
    options.result.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
