"""Quantised weights of every architecture: are our logits as near to the unrounded ones as ggml's?

    python -m tests.archs.quants [--type Q4_K_M] [--only REGEX]

The models of `make archs` are quantised by llama.cpp's own program. What they give is compared with
the same weights in float32: the error of our kernels, with repacked weights and rows that share
what is unpacked, is to be that of ggml's reference kernels, which sum a row alone (on the device of
`rounding_server`). Tokens cannot be compared: activations are rounded to eight bits, so that the
least difference before may move a logit by a tenth.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scripts import peers
from tests.archs.run import FOLDER, SEED, say, write_models
from tests.support.rpc_server import rpc_server

from drafthouse_engine import (
    Engine,
    EngineError,
    EngineParams,
    Model,
    Placement,
    Sampler,
    SamplingParams,
    add_rpc_servers,
)

__all__ = ["RATIO_MAX", "errors", "is_worse", "main", "quantise"]

RATIO_MAX = 1.25
"""Of the rows' median errors: one row more or less whose router takes another expert is chance."""

N_SEQS, N_PROMPT = 8, 8
N_CTX = 128
WAYS = ("ours", "reference", "unrounded")

Rows = npt.NDArray[np.float64]


def errors(found: Rows, right: Rows) -> Rows:
    """Returns the root mean square error of each row's logits. Shape: [n_rows]."""
    root: Rows = np.sqrt(np.square(found - right).mean(axis=1))
    return root


def is_worse(ours: Rows, reference: Rows, right: Rows) -> bool:
    """Tells whether our rows are further from the right ones than those of reference kernels."""
    if not np.isfinite(ours).all():
        return True
    mine, theirs = (float(np.median(errors(it, right))) for it in (ours, reference))
    return mine > RATIO_MAX * theirs + 1e-3 * float(right.std())


def logits(path: Path, way: str, endpoint: str) -> dict[str, Rows]:
    """Returns logits by how many rows were computed together.

    Args:
        path: The model.
        way: One of `WAYS`.
        endpoint: Of the device whose kernels are the reference.
    """
    if way == "reference":
        add_rpc_servers((endpoint,))
    devices = ("RPC0",) if way == "reference" else ()
    rng = np.random.default_rng(1)
    found: dict[str, list[npt.NDArray[np.float32]]] = {}
    with Model(path, placement=Placement(devices=devices)) as model:
        params = EngineParams(
            draft_type="ngram-simple", n_draft_max=N_PROMPT - 1,  # for so many outputs
            n_seq_max=N_SEQS, n_ctx_seq=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX,
            n_threads=1, exact=way == "unrounded",
        )  # fmt: skip
        tokens = rng.integers(3, min(model.n_vocab, 256), (N_SEQS, N_CTX))
        with Engine(model, None, params) as engine:
            for seq_id in range(N_SEQS):
                engine.seq_begin(seq_id, Sampler(model, SamplingParams(temperature=0.0)))
            for rows in _batches():
                seq_ids, positions = zip(*rows, strict=True)
                batch = [int(tokens[row]) for row in rows]
                engine.decode(batch, positions, seq_ids, [True] * len(rows))
                engine.process()
                kept = found.setdefault(str(len(rows)), [])
                kept += [engine.logits(i).copy() for i in range(len(rows))]
    return {width: np.array(rows, np.float64) for width, rows in found.items()}


def _batches() -> list[list[tuple[int, int]]]:
    """Returns batches of (sequence, position): 64 rows, then eight, three, one and 20 at a time."""
    every, n = range(N_SEQS), N_PROMPT
    return [
        [(seq_id, position) for seq_id in every for position in range(n)],
        *([(seq_id, n + i) for seq_id in every] for i in range(2)),
        *([(seq_id, n + 2 + i) for seq_id in every[:3]] for i in range(4)),
        *([(3, n + 2 + i)] for i in range(12)),
        [(4, n + 2 + i) for i in range(20)],
    ]


def compare(path: Path, folder: Path, endpoint: str) -> tuple[str, bool]:
    """Returns what is found of a model, and whether it is wrong."""
    found: dict[str, dict[str, Rows]] = {}
    for way in WAYS:
        file = folder / f"{'float' if way == 'unrounded' else 'quantised'}.gguf"
        result = folder / f"{way}.npz"
        command = [sys.executable, "-m", "tests.archs.quants", "--way", way, str(file)]
        run = subprocess.run(
            [*command, str(result), endpoint],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"},
        )
        if run.returncode:
            said = (run.stderr.strip().splitlines() or [""])[-1]
            return f"{path.stem:24} {way}: {said[-140:]}", False
        with np.load(result) as content:
            found[way] = dict(content)
    ours, reference, right = (found[way] for way in WAYS)
    words = [
        f"{width}: {np.median(errors(ours[width], right[width])):.4f}"
        f" / {np.median(errors(reference[width], right[width])):.4f}"
        for width in right
    ]
    is_wrong = any(is_worse(ours[it], reference[it], right[it]) for it in right)
    told = f"{path.stem:24} {'WRONG ' if is_wrong else ''}{' | '.join(words)}"
    return told, is_wrong


def quantise(source: Path, path: Path, kind: str) -> None:
    """Writes a model with its weights in another type, as llama-quantize calls it.

    Raises:
        subprocess.CalledProcessError: That program will not.
    """
    command = [str(peers.program("llama-quantize")), "--allow-requantize", str(source), str(path)]
    subprocess.run([*command, kind, "1"], check=True, capture_output=True)


def _answer(way: str, path: str, result: str, endpoint: str) -> int:
    try:
        arrays: Mapping[str, Rows] = logits(Path(path), way, endpoint)
    except EngineError as error:
        print(error.message, file=sys.stderr)
        return 1
    np.savez(result, **arrays)  # type: ignore[arg-type]  # its stub wants no names but its own
    return 0


def main() -> int:
    """Runs the models that the command line asks for; 1 where one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.quants", description=__doc__)
    parser.add_argument("--type", default="Q4_K_M", help="as llama-quantize calls it")
    parser.add_argument("--only", default="", help="regular expression of file names")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return _answer(*options.way)
    peers.make_peer()
    for name in (peers.ARCHS, "llama-quantize"):
        peers.make_program(name)
    models = FOLDER / f"models-{SEED}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_models(models, SEED)
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for path in sorted(models.glob("*.gguf")):
            if re.search(options.only, path.stem):
                quantise(path, folder / "quantised.gguf", options.type)
                quantise(folder / "quantised.gguf", folder / "float.gguf", "F32")
                # A model that ends our process may end the device's: each has one of its own.
                with rpc_server(folder, rounding=0.0) as server:
                    told, is_wrong = compare(path, folder, server.endpoint)
                say(told)
                wrong += [path.stem] * is_wrong
    if wrong:
        say(f"wrong: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
