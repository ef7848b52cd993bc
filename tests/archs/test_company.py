"""A sequence's logits do not depend on who shares its batch, without `exact` either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from models.archs import write_model
from tests.archs.texts import draw
from tests.support.built import needs_extension

from drafthouse_engine import (
    Engine,
    EngineParams,
    Model,
    Placement,
    Sampler,
    SamplingParams,
    build_facts,
)
from drafthouse_server.host.processor import read_processor

pytestmark = needs_extension()

N_SEQ, N_PROMPT, N_STEP = 6, 16, 8
TEXTS = [draw(seed, N_PROMPT + N_STEP) for seed in range(N_SEQ)]
FEATURES = {"AVX2", "FMA", "F16C"}
"""What our products of plain weights need (patch 0023): a row of llama.cpp's own has other sums
alone than in company."""


@pytest.fixture(params=["F16", "F32", "BF16"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    facts = build_facts()
    has_kernels = "0023" in facts["patches"] and facts["cpu"] not in ("portable v1", "portable v2")
    if not (has_kernels and read_processor().features >= FEATURES):
        pytest.skip("patch 0023 is for AVX2: llama.cpp's own products differ in company")
    name = "deepseek2"  # latent attention: weights in planes, one for each head; and a router
    path = write_model(tmp_path / f"{name}.gguf", name, GGMLQuantizationType[request.param])
    with Model(path, placement=Placement(devices=())) as model:
        params = EngineParams(
            draft_type="none",
            n_seq_max=N_SEQ,
            n_ctx_seq=64,
            n_batch=256,
            n_ubatch=256,
            n_threads=1,
        )
        with Engine(model, None, params) as made:
            yield made


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


def test_a_sequence_has_the_logits_of_alone(engine: Engine) -> None:
    together = logits(engine, range(N_SEQ))
    alone = np.concatenate([logits(engine, [seq_id]) for seq_id in range(N_SEQ)])
    differing = (together != alone).any(axis=2)
    assert differing.sum() == 0, f"{differing.sum()} of {differing.size} rows"
