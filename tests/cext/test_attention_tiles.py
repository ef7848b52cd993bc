"""Attention as our patches compute it: single rows (0009), pieces of prompts in tiles (0008)."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.built import built
from tests.support.demo import MODELS, TARGETS, prompts

from drafthouse_engine import CacheParams, Engine, EngineParams, Model, Sampler, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_BEFORE = 600
"""Cells before the piece: most of them are seen, so 16 rows make a tile."""
WIDTHS = (1, 15, 16, 17, 22, 33, 40, 63, 64, 65)
"""Around the least rows of a tile, around a full one, and those of two heads in one or in two."""


def logits_of_pieces(
    target: Model, tokens: Sequence[int], *, n_seq: int = 1, is_exact: bool = False, **more: Any
) -> list[npt.NDArray[np.float32]]:
    """Returns the logits of the last token of a piece of each width, after the same cells."""
    params = EngineParams(
        n_seq_max=n_seq,
        n_ctx_seq=768,
        n_batch=2048,
        n_ubatch=1024,
        exact=is_exact,
        **more,
    )
    found = []
    with Engine(target, None, params) as engine:

        def read(start: int, end: int) -> list[int]:
            """Reads a piece of every sequence, and returns the rows of its last tokens."""
            rows = [(seq_id, i) for seq_id in range(n_seq) for i in range(start, end)]
            engine.decode(
                # Every sequence reads the text from another place.
                [tokens[i + 7 * seq_id] for seq_id, i in rows],
                [i for _, i in rows],
                [seq_id for seq_id, _ in rows],
                [i == end - 1 for _, i in rows],
            )
            engine.process()
            return [i for i, (_, place) in enumerate(rows) if place == end - 1]

        for seq_id in range(n_seq):
            engine.seq_begin(seq_id, Sampler(target, SamplingParams(temperature=0.0)))
        read(0, N_BEFORE)
        before = [engine.save(seq_id) for seq_id in range(n_seq)]
        for width in WIDTHS:
            found += [engine.logits(i).copy() for i in read(N_BEFORE, N_BEFORE + width)]
            for seq_id, snapshot in enumerate(before):
                engine.seq_end(seq_id)
                engine.load(seq_id, snapshot)
    return found


@functools.cache
def logits_of_single_rows(target: Path, n_seq: int, **more: Any) -> list[npt.NDArray[np.float32]]:
    """Returns what `logits_of_pieces` does where every row is computed as if it were alone."""
    with Model(target) as model:
        return logits_of_pieces(model, prompts((720,))[0], n_seq=n_seq, is_exact=True, **more)


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
@pytest.mark.parametrize(
    "setup",
    [
        {"n_threads": 1},
        {"n_threads": 2},
        {"n_seq": 3, "n_threads": 2},
        {"n_seq": 3, "kv_unified": True, "n_ctx": 2304},
        {"n_seq": 3, "cache": CacheParams(type_k="q8_0", type_v="q4_1")},
    ],
    ids=["one", "two threads", "three streams", "one pool", "quantized cells"],
)
def test_a_piece_of_any_width_gives_the_logits_of_single_rows(
    target_name: str, setup: dict[str, Any]
) -> None:
    path = MODELS / TARGETS[target_name]
    cells = {"cache": setup["cache"]} if "cache" in setup else {}
    expected = logits_of_single_rows(path, setup.get("n_seq", 1), **cells)
    with Model(path) as target:
        found = logits_of_pieces(target, prompts((720,))[0], **setup)
    # Between likely tokens lie 0.1 and more; products of other orders differ by a hundredth, and by
    # more where it decides how a cell is rounded.
    tolerance = 0.5 if cells else 0.1
    for row, reference in zip(found, expected, strict=True):
        assert np.abs(row - reference).max() < tolerance
        assert cells or row.argmax() == reference.argmax()


def test_every_kind_of_attention_is_a_plain_sum(*, is_whole: bool) -> None:
    """Masks, biases by head, soft caps, sinks, types and shapes: no demo model has them all."""
    stride = "1" if is_whole else "3"  # of its checks
    done = subprocess.run(
        [str(built("attention_test")), stride],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: ")
