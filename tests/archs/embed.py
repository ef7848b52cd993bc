"""Embeddings of one model: our rows, one text after the other and all at once.

    python -m tests.archs.embed MODEL RESULT.json

The program is a process of its own, since llama.cpp ends the process of a model that it cannot
compute. Rows are not scaled, so that what is equal is so to the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from tests.archs.judge import Verdict
from tests.archs.texts import SHORT

from drafthouse_engine import Embedder, EmbedderParams, EngineError, Model, Pooling

__all__ = [
    "ALONE",
    "AT_ONCE",
    "CELLS",
    "CHANGED",
    "DECODERS",
    "PLAIN",
    "POOLINGS",
    "TIE",
    "Found",
    "compare",
    "is_asked",
    "moved",
    "run_poolings",
]

POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")
ALONE, PLAIN, AT_ONCE = CELLS = ("alone", "plain", "at once")
"""One after the other; so without flash attention; all in one call."""
CHANGED = "changed"
"""Alone, with another first token."""
DECODERS = ("llama", "qwen3-dense", "gemma3-dense", "tiny-mimo2-f16", "tiny-qwen35-f16")
"""Models that generate and are asked for embeddings all the same: of dense attention, with a
window, recurrent, trained."""
TIE = 2e-3
"""Rows tie whose greatest difference is at most this part of the row's length.

Widths of batches round otherwise, as other kernels do, and keys and values are float16; another
first token moves a row by more (`moved`).
"""

Rows = list[list[float]]
Found = dict[str, dict[str, Rows] | str]
"""By pooling: our rows by cell, and those of CHANGED; or why there are none."""


def is_asked(path: Path) -> bool:
    """Tells whether a model is asked for embeddings: all encoders, and some others."""
    fields = GGUFReader(path).fields
    causal = fields.get(f"{fields['general.architecture'].contents()}.attention.causal")
    return path.stem in DECODERS or (causal is not None and not causal.contents())


def run_poolings(path: Path) -> Found:
    """Returns the rows of a model's texts, for every pooling.

    Args:
        path: The model.
    """
    with Model(path) as model:
        return {pooling: _run(model, pooling) for pooling in POOLINGS}


def _run(model: Model, pooling: Pooling) -> dict[str, Rows] | str:
    params = EmbedderParams(pooling=pooling, is_normalised=False, n_batch=512, n_threads=1)
    plain = dataclasses.replace(params, flash_attention=False)
    texts, changed = SHORT.prompts, [[text[0] ^ 1, *text[1:]] for text in SHORT.prompts]
    try:
        with Embedder(model, params) as fused:
            rows = {
                ALONE: _encode(fused, texts),
                AT_ONCE: fused.encode(texts).tolist(),
                CHANGED: _encode(fused, changed),
            }
        with Embedder(model, plain) as embedder:
            return rows | {PLAIN: _encode(embedder, texts)}
    except EngineError as error:
        return str(error)


def _encode(embedder: Embedder, texts: Sequence[Sequence[int]]) -> Rows:
    return [embedder.encode([text])[0].tolist() for text in texts]


def compare(rows: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> Verdict:
    """Returns the verdict on rows of a cell.

    Args:
        rows: Ours.
        right: The right ones, in the same order.
    """
    ours, theirs = np.asarray(rows, np.float32), np.asarray(right, np.float32)
    if ours.shape != theirs.shape:
        return Verdict("differs", float("inf"), len(rows), len(rows))
    gaps = _gaps(ours, theirs)
    n_apart = int((ours != theirs).any(axis=1).sum())
    gap = float(gaps.max())
    kind = "equal" if not n_apart else "tie" if gap <= TIE else "differs"
    return Verdict(kind, gap, n_apart, len(rows))


def moved(rows: Sequence[Sequence[float]], changed: Sequence[Sequence[float]]) -> float:
    """Returns how far another first token moves a row at least, as a part of its length."""
    return float(_gaps(np.asarray(changed, np.float32), np.asarray(rows, np.float32)).min())


def _gaps(
    rows: npt.NDArray[np.float32], others: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Returns the greatest difference of each row, as a part of the other's length."""
    lengths = np.linalg.norm(others, axis=1)
    return np.asarray(np.abs(rows - others).max(axis=1) / lengths, np.float32)


def main() -> int:
    """Writes the rows of the model that the command line names; 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.archs.embed")
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    options.result.write_text(json.dumps(run_poolings(options.model)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
