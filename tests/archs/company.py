"""Do a sequence's logits depend on who shares its batch, in any architecture?

    python -m tests.archs.company [--type BF16] [--only REGEX]

The models of `make archs` and our own, as they are (F32) or made anew by llama.cpp's own program.
Of each the logits behind prompts and of steps are those of six sequences in one batch and of each
alone, to the last bit, without `exact`. Attention over cells in one stream's order is part of it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from models.archs import RECIPES, write_model
from scripts import peers
from tests.archs.quants import quantise
from tests.archs.run import FOLDER, SEED, say, write_models
from tests.archs.texts import draw

from drafthouse_engine import (
    Engine,
    EngineError,
    EngineParams,
    Model,
    Placement,
    Sampler,
    SamplingParams,
)

__all__ = ["N_SEQ", "N_STEP", "logits", "main", "n_differing"]

N_SEQ, N_PROMPT, N_STEP = 6, 16, 8
TEXTS = [draw(seed, N_PROMPT + N_STEP) for seed in range(N_SEQ)]


def n_differing(path: Path) -> int:
    """Returns how many rows of logits differ in company; of (1 + N_STEP) * N_SEQ.

    Raises:
        EngineError: The model is not served.
    """
    with Model(path, placement=Placement(devices=())) as model:
        params = EngineParams(
            draft_type="none",
            n_seq_max=N_SEQ,
            n_ctx_seq=64,
            n_batch=256,
            n_ubatch=256,
            n_threads=1,
        )
        with Engine(model, None, params) as engine:
            together = logits(engine, range(N_SEQ))
            alone = np.concatenate([logits(engine, [seq_id]) for seq_id in range(N_SEQ)])
            return int((together != alone).any(axis=2).sum())


def logits(engine: Engine, seq_ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Returns the logits of these sequences in one batch: behind the prompt, and of each step.

    Shape: [n_seq, 1 + N_STEP, n_vocab].
    """
    for seq_id in seq_ids:
        engine.seq_begin(seq_id, Sampler(engine.target, SamplingParams(temperature=0.0)))
    ends = [N_PROMPT + i for i in range(N_STEP + 1)]
    starts = [0, *ends[:-1]]
    found = [_decode(engine, seq_ids, *it) for it in zip(starts, ends, strict=True)]
    for seq_id in seq_ids:
        engine.seq_end(seq_id)
    return np.stack(found, axis=1)


def _decode(
    engine: Engine, seq_ids: Sequence[int], start: int, end: int
) -> npt.NDArray[np.float32]:
    rows = [(seq_id, position) for seq_id in seq_ids for position in range(start, end)]
    asked = [position == end - 1 for _, position in rows]
    tokens = [TEXTS[seq_id][position] for seq_id, position in rows]
    engine.decode(tokens, [it[1] for it in rows], [it[0] for it in rows], asked)
    engine.process()
    return np.array([engine.logits(i) for i, is_asked in enumerate(asked) if is_asked])


def _answer(path: str) -> int:
    """Says how many rows differ, in a process of its own: a model may end it."""
    try:
        print(n_differing(Path(path)))
    except EngineError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def _sources(only: str, folder: Path) -> list[Path]:
    """Returns the models: those of upstream's program, and our own, written into a folder."""
    models = FOLDER / f"models-{SEED}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_models(models, SEED)
    ours = [write_model(folder / f"ours-{name}.gguf", name) for name in RECIPES]
    return [it for it in [*sorted(models.glob("*.gguf")), *ours] if re.search(only, it.stem)]


def main() -> int:
    """Runs the models that the command line asks for; 1 where one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.company", description=__doc__)
    parser.add_argument("--type", default="F32", help="as llama-quantize calls it")
    parser.add_argument("--only", default="", help="regular expression of file names")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _answer(options.one)
    peers.make_peer()
    for name in (peers.ARCHS, "llama-quantize"):
        peers.make_program(name)
    n_right, wrong, refused = 0, [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for source in _sources(options.only, folder):
            path = folder / "model.gguf"
            try:
                quantise(source, path, options.type)
            except subprocess.CalledProcessError:
                refused.append(f"{source.stem} (llama-quantize)")
                continue
            command = [sys.executable, "-m", "tests.archs.company", "--one", str(path)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                refused.append(source.stem)
                said = (run.stderr.strip().splitlines() or [""])[-1]
                say(f"{source.stem:24} refused: {said[-140:]}")
            elif run.stdout.split()[-1] != "0":
                wrong.append(source.stem)
                say(f"{source.stem:24} {run.stdout.split()[-1]} of {(1 + N_STEP) * N_SEQ} differ")
            else:
                n_right += 1
    say(f"{options.type}: the same in company: {n_right}, not: {len(wrong)} {' '.join(wrong)}")
    say(f"not served or made: {len(refused)} {' '.join(refused)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
