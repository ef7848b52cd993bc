"""Every architecture of llama.cpp beside llama-server, as a table: `make archs`.

    python -m tests.archs.run [--only REGEX] [--again] [--seed 1] [--seconds N] [--write]

Upstream's own test program writes tiny models with random weights, and `models.archs` those that it
leaves out; the demo models are trained. Each goes through all cells (`cells`), in a process of its
own, and llama-server says what the right answers are. What was found is kept in build/archs; it is
asked again with `--again`, and of another engine, llama.cpp, processor or model in any case. What
changed in Python alone is not seen there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFReader
from models.archs import RECIPES, write_model
from scripts import peers
from tests.archs import embed, peer
from tests.archs.cells import CELLS, DRAFTS, EAGLE3, MTP, small
from tests.archs.driver import N_OUTPUT, Answer
from tests.archs.judge import Judge, Verdict
from tests.archs.peer import FULL_WINDOWS, SMALL_WINDOWS, Peer, PeerFailed, Roundings, Setting
from tests.archs.results import digest_of, load, processor, save, stamp
from tests.archs.table import Row, is_wrong, page, proven, proven_module, summary
from tests.archs.texts import SHORT
from tests.archs.upstream_models import make_usable
from tests.archs.windows import has_window, lengthened
from tests.support.demo import MODELS, TARGETS

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "archs"
HISTORY = SHORT.prompts[4]
SEED = 1
_RECIPE_FILES = ("archs.py", "archs_encoder.py", "archs_mtp.py", "arch_parts.py")
SOURCES = (
    *(ROOT / "models" / name for name in _RECIPE_FILES),
    *(MODELS / name for name in TARGETS.values()),
    Path(__file__).with_name("upstream_models.py"),
)
"""Files that say what the models are, besides llama.cpp."""


@dataclass(frozen=True)
class Died:
    """Of a cell: our process has ended, which no model may do."""

    how: str
    """In a sentence."""


Found = list[Answer] | str | Died
"""Of a cell: the answers, or why the model was refused, or how our process ended."""


def write_models(folder: Path, seed: int) -> None:
    """Writes the models, unless those of this llama.cpp and these recipes are there.

    Raises:
        subprocess.CalledProcessError: upstream's program has failed.
    """
    state, mark = f"{peers.version()} {digest_of(*SOURCES)}\n", folder / "stamp"
    if mark.exists() and mark.read_text("utf-8") == state:
        return
    raw, part = FOLDER / "raw", folder.with_name("models.part")
    for path in (folder, part, raw):
        shutil.rmtree(path, ignore_errors=True)
    for path in (raw, part):
        path.mkdir(parents=True)
    say("writing the models of upstream's program …")
    command = [str(peers.program(peers.ARCHS)), "-o", str(raw), "-s", str(seed)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for path in sorted(raw.glob("*.gguf")):
        make_usable(path, part / path.name)
        path.unlink()
    for name in RECIPES:
        write_model(part / f"{name}.gguf", name)
    for name in TARGETS.values():
        shutil.copy(MODELS / name, part)
    (part / mark.name).write_text(state, "utf-8")
    part.rename(folder)


def run_model(path: Path) -> Row:
    """Runs all cells of a model, asks llama-server, and compares."""
    header = GGUFReader(path).fields
    arch: str = header["general.architecture"].contents()
    nextn = header.get(f"{arch}.nextn_predict_layers")
    has_nextn = nextn is not None and nextn.contents() > 0
    drafts = (*DRAFTS, MTP, EAGLE3) if has_nextn else (*DRAFTS, EAGLE3)
    row = Row(arch, "", 0, 0.0, {}, digest_of(path))
    found = ask_engine(path, drafts)
    is_computed = any(isinstance(cell, list) for cell in found["none"].values())
    if is_computed:
        with Judge(path) as judge:
            row.history = judge.history(HISTORY, (0, len(HISTORY) // 2))
    row.peer, row.n_peer_equal, row.cells = judged(path, found, Setting(), Setting())
    if is_computed and has_window(path):
        long = lengthened(path, FOLDER / path.name)
        found = ask_engine(long, tuple(small(draft_type) for draft_type in drafts))
        if small("none") in found:  # else what is refused says nothing of windows
            row.cells |= judged(long, found, SMALL_WINDOWS, FULL_WINDOWS)[2]
        long.unlink()
    if embed.is_asked(path):
        row.embeddings, row.moved = embeddings_of(path)
    return row


def judged(
    path: Path, found: Mapping[str, Mapping[str, Found]], setting: Setting, witness: Setting
) -> tuple[str, int, dict[str, dict[str, Verdict]]]:
    """Returns what became of llama-server, how many prompts it answers alike, and the verdicts.

    Args:
        path: The model.
        found: What the cells have given.
        setting: Of the llama-server whose answers are right.
        witness: Of those that are asked where two logits do not tie.
    """

    def ask_other(model: Path, prompt: Sequence[int]) -> list[int]:
        with Peer(peers.SERVER, model, setting) as other:
            return other.ask(prompt)

    with ExitStack() as stack:
        judge = stack.enter_context(Judge(path))
        try:
            server = stack.enter_context(Peer(peers.SERVER, path, setting))
            ways = stack.enter_context(Roundings(peers.SERVER, path, witness))
            n_equal = server.n_equal_at_once(SHORT.prompts)
            cells = _verdicts(
                found, lambda cell: judge.judge(cell, server.ask, ways.answers, ask_other)
            )
        except PeerFailed as error:
            return str(error), 0, _verdicts(found, lambda _: Verdict("unknown"))
    return "", n_equal, cells


def embeddings_of(path: Path) -> tuple[dict[str, dict[str, Verdict]], float]:
    """Returns the verdicts on a model's embeddings, and how far another token moves one at least.

    Args:
        path: The model.
    """
    result = FOLDER / "rows.json"
    run = _run_process("tests.archs.embed", path, result)
    if run.returncode:
        died = Verdict("died", reason=_how(run))
        return {pooling: dict.fromkeys(embed.CELLS, died) for pooling in embed.POOLINGS}, 0.0
    content: embed.Found = json.loads(result.read_text(encoding="utf-8"))
    verdicts: dict[str, dict[str, Verdict]] = {}
    shifts = []
    for pooling, rows in content.items():
        if isinstance(rows, str):
            verdicts[pooling] = dict.fromkeys(embed.CELLS, Verdict("refused", reason=rows))
            continue
        shifts.append(embed.moved(rows[embed.ALONE], rows[embed.CHANGED]))
        verdicts[pooling] = _beside_peer(path, pooling, rows)
    return verdicts, min(shifts, default=0.0)


def _beside_peer(path: Path, pooling: str, rows: Mapping[str, embed.Rows]) -> dict[str, Verdict]:
    try:
        with Peer(peers.SERVER, path, peer.embeddings(pooling)) as server:
            right = [server.embed(prompt) for prompt in SHORT.prompts]
            is_same = server.embed_at_once(SHORT.prompts) == right
        with Peer(peers.SERVER, path, peer.embeddings(pooling, "-fa", "off")) as server:
            plain = [server.embed(prompt) for prompt in SHORT.prompts]
    except PeerFailed as error:
        return dict.fromkeys(embed.CELLS, Verdict("unknown", reason=str(error)))
    at_once = embed.compare(rows[embed.AT_ONCE], right)
    return {
        embed.ALONE: embed.compare(rows[embed.ALONE], right),
        embed.PLAIN: embed.compare(rows[embed.PLAIN], plain),
        embed.AT_ONCE: dataclasses.replace(at_once, is_peer_same=is_same),
    }


def _verdicts(
    found: Mapping[str, Mapping[str, Found]], judged: Callable[[list[Answer]], Verdict]
) -> dict[str, dict[str, Verdict]]:
    return {
        draft_type: {name: _verdict(cell, judged) for name, cell in cells.items()}
        for draft_type, cells in found.items()
    }


def _verdict(cell: Found, judged: Callable[[list[Answer]], Verdict]) -> Verdict:
    match cell:
        case Died(how):
            return Verdict("died", reason=how)
        case str(why):
            return Verdict("refused", reason=why)
    return judged(cell)


def ask_engine(path: Path, drafts: tuple[str, ...]) -> dict[str, dict[str, Found]]:
    """Returns what each cell gives, by draft type, in a process of its own.

    Where that ends early, each draft type has one, which tells which it was. If none ends alone,
    none is known to be right. What there is none of is left out (`run_cells`).
    """
    result = FOLDER / "result.json"
    run = _run_process("tests.archs.cells", path, result, "--drafts", *drafts)
    if run.returncode:
        died = Died(_how(run))
        if len(drafts) == 1:
            return {drafts[0]: dict.fromkeys(CELLS, died)}
        alone: dict[str, dict[str, Found]] = {}
        for kind in drafts:
            alone |= ask_engine(path, (kind,))
        if any(isinstance(cell, Died) for cells in alone.values() for cell in cells.values()):
            return alone
        return {kind: dict.fromkeys(CELLS, died) for kind in drafts}
    content = json.loads(result.read_text(encoding="utf-8"))
    return {
        draft_type: {
            name: cell if isinstance(cell, str) else [Answer(**answer) for answer in cell]
            for name, cell in cells.items()
        }
        for draft_type, cells in content.items()
    }


def _run_process(
    module: str, path: Path, result: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, str(path), str(result), *flags]
    # A debugger that prints what llama.cpp was at takes seconds.
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _how(run: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    why = next((line for line in lines if "GGML_ASSERT" in line), lines[-1] if lines else "")
    return f"the process ends with {run.returncode}: {why[max(why.find('GGML_ASSERT'), 0) :]}"


def wanted(folder: Path, options: argparse.Namespace, known: Mapping[str, Row]) -> Iterator[Path]:
    """Yields the models that are to be run."""
    for path in sorted(folder.glob("*.gguf")):
        if re.search(options.only, path.stem) and (options.again or path.stem not in known):
            yield path


def write(rows: Mapping[str, Row], seed: int) -> None:
    """Writes the page, dated today, and the list of proven architectures."""
    today, version = datetime.datetime.now(datetime.UTC).date(), peers.version()
    head = (
        f"# Architectures, {today}\n\nEvery architecture of llama.cpp {version} that upstream's own"
        f" test program or `models/archs.py` writes, beside the stock llama-server of the same"
        f" version; {processor()}, a thread each. Weights are random (seed {seed}) but for those of"
        f" `tiny-…`, answers greedy and {N_OUTPUT} tokens long. Command: `make archs"
        f" ARGS=--write`; what the cells do stands in `tests/archs/cells.py`.\n"
    )
    (ROOT / "docs" / "results" / f"{today}-archs.md").write_text(page(rows, head), "utf-8")
    text = proven_module(proven(rows), version)
    (ROOT / "cext" / "drafthouse_engine" / "proven.py").write_text(text, "utf-8")


def say(line: str) -> None:
    """Tells the user."""
    print(line, flush=True)


def main() -> int:
    """Runs the models that the command line asks for; 1 where one is wrong (`is_wrong`)."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.run", description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of file names")
    parser.add_argument("--again", action="store_true", help="run what is known already, too")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random weights")
    parser.add_argument("--seconds", type=float, default=86400, help="begin no model after these")
    parser.add_argument(
        "--write", action="store_true", help="write the page and the list of proven architectures"
    )
    options = parser.parse_args()
    peers.make_peer()
    peers.make_program(peers.ARCHS)
    results, folder = FOLDER / f"results-{options.seed}.json", FOLDER / f"models-{options.seed}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_models(folder, options.seed)
    now = stamp()
    rows, started_s = load(results, folder, now), time.monotonic()
    for path in wanted(folder, options, rows):
        if time.monotonic() - started_s > options.seconds:
            break
        rows[path.stem] = run_model(path)
        say(f"{path.stem:24} {summary(rows[path.stem])}")
        save(results, rows, now)
    wrong = [name for name, row in sorted(rows.items()) if is_wrong(row)]
    if wrong:
        say(f"wrong: {', '.join(wrong)}")
    left = [path.stem for path in sorted(folder.glob("*.gguf")) if path.stem not in rows]
    if options.write and left:
        say(f"the page is not written: nothing is known yet of {', '.join(left)}")
        return 1
    if options.write:
        write(rows, options.seed)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
