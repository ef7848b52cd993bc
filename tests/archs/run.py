"""Every architecture of llama.cpp beside llama-server, as a table: `make archs`.

    python -m tests.archs.run [--only REGEX] [--seed 1] [--table FILE]

Upstream's own test program writes tiny models with random weights, and `models.archs` those that it
leaves out; the demo models are trained. Each goes through all cells (`cells`), in a process of its
own, and llama-server says what the right answers are. What was found is kept in build/archs, and
asked again only with `--again`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from gguf import GGUFReader
from models.archs import RECIPES, write_model
from scripts import peers
from tests.archs.cells import CELLS, DRAFTS, MTP, PROMPTS
from tests.archs.driver import N_OUTPUT, Answer
from tests.archs.judge import Judge, Verdict
from tests.archs.peer import Peer, PeerFailed, Roundings
from tests.archs.table import Row, is_wrong, page, proven, proven_module, summary
from tests.archs.upstream_models import make_usable
from tests.support.demo import MODELS, TARGETS

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "archs"
HISTORY = PROMPTS[4]
SEED = 1


def write_models(folder: Path, seed: int) -> None:
    """Writes the models that are missing.

    Raises:
        subprocess.CalledProcessError: upstream's program has failed.
    """
    if folder.exists():
        for name in RECIPES:
            if not (folder / f"{name}.gguf").exists():
                write_model(folder / f"{name}.gguf", name)
        return
    raw, part = FOLDER / "raw", folder.with_name("models.part")
    for path in (raw, part):
        path.mkdir(parents=True, exist_ok=True)
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
    part.rename(folder)


def run_model(path: Path) -> Row:
    """Runs all cells of a model, asks llama-server, and compares."""
    header = GGUFReader(path).fields
    arch: str = header["general.architecture"].contents()
    nextn = header.get(f"{arch}.nextn_predict_layers")
    has_nextn = nextn is not None and nextn.contents() > 0
    found = _answers(path, (*DRAFTS, MTP) if has_nextn else DRAFTS)
    is_computed = any(not isinstance(cell, str) for cell in found["none"].values())
    history = 0.0
    with ExitStack() as stack:
        judge = stack.enter_context(Judge(path))
        if is_computed:
            history = judge.history(HISTORY, (0, len(HISTORY) // 2))
        try:
            peer = stack.enter_context(Peer(peers.SERVER, path))
            ways = stack.enter_context(Roundings(peers.SERVER, path))
            n_equal = peer.n_equal_at_once(PROMPTS)
            cells = {
                draft_type: {
                    name: _verdict(judge, peer, ways, cell) for name, cell in of_type.items()
                }
                for draft_type, of_type in found.items()
            }
        except PeerFailed as error:
            cells = {
                draft_type: {name: _unjudged(cell) for name, cell in of_type.items()}
                for draft_type, of_type in found.items()
            }
            return Row(arch, str(error), 0, history, cells)
    return Row(arch, "", n_equal, history, cells)


def _verdict(judge: Judge, peer: Peer, ways: Roundings, cell: list[Answer] | str) -> Verdict:
    if isinstance(cell, str):
        return Verdict("refused", reason=cell)
    return judge.judge(cell, peer.ask, ways.answers)


def _unjudged(cell: list[Answer] | str) -> Verdict:
    return Verdict("refused" if isinstance(cell, str) else "unknown", reason=str(cell))


def _answers(path: Path, drafts: tuple[str, ...]) -> dict[str, dict[str, list[Answer] | str]]:
    """Returns the answers of all cells by draft type, or why there are none."""
    result = FOLDER / "result.json"
    command = [sys.executable, "-m", "tests.archs.cells", str(path), str(result)]
    command += ["--drafts", *drafts]
    # A debugger that prints what llama.cpp was at takes seconds.
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode and len(drafts) > 1:  # each in a process of its own
        return {kind: cells for one in drafts for kind, cells in _answers(path, (one,)).items()}
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        why = next((line for line in lines if "GGML_ASSERT" in line), lines[-1] if lines else "")
        why = f"the process ends with {run.returncode}: {why[why.find('GGML_ASSERT') :]}"
        return {drafts[0]: dict.fromkeys(CELLS, why)}
    content = json.loads(result.read_text(encoding="utf-8"))
    return {
        draft_type: {
            name: cell if isinstance(cell, str) else [Answer(**answer) for answer in cell]
            for name, cell in cells.items()
        }
        for draft_type, cells in content.items()
    }


def load(path: Path) -> dict[str, Row]:
    """Reads what was found so far."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for row in content.values():
        row["cells"] = {
            draft_type: {name: Verdict(**cell) for name, cell in cells.items()}
            for draft_type, cells in row["cells"].items()
        }
    return {name: Row(**row) for name, row in content.items()}


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
        f" version; {_machine()}, a thread each. Weights are random (seed {seed}) but for those of"
        f" `tiny-…`, answers greedy and {N_OUTPUT} tokens long. Command: `make archs"
        f" ARGS=--write`; what the cells do stands in `tests/archs/cells.py`.\n"
    )
    (ROOT / "docs" / "results" / f"{today}-archs.md").write_text(page(rows, head), "utf-8")
    text = proven_module(proven(rows), version)
    (ROOT / "cext" / "drafthouse_engine" / "proven.py").write_text(text, "utf-8")


def _machine() -> str:
    """Returns the name of the processor."""
    path = Path("/proc/cpuinfo")
    text = path.read_text("utf-8") if path.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def say(line: str) -> None:
    """Tells the user."""
    print(line, flush=True)


def main() -> int:
    """Runs the models that the command line asks for; 1 where a cell differs."""
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
    rows, started_s = load(results), time.monotonic()
    for path in wanted(folder, options, rows):
        if time.monotonic() - started_s > options.seconds:
            break
        rows[path.stem] = run_model(path)
        say(f"{path.stem:24} {summary(rows[path.stem])}")
        content = {name: dataclasses.asdict(row) for name, row in rows.items()}
        results.write_text(json.dumps(content, indent=1), encoding="utf-8")
    if options.write:
        write(rows, options.seed)
    return int(any(is_wrong(row) for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
