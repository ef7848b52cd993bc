"""Models with RoPE factors for short contexts and for long ones: a sequence's length chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from models.archs import write_model
from tests.support.built import needs_extension
from tests.support.gguf_copy import copied

from drafthouse_engine import DecoderConfig, DecoderPool, Engine, EngineParams, Model, Sampler
from drafthouse_engine import SamplingParams as Sampling

pytestmark = [*needs_extension(), pytest.mark.model]

N_ORIGINAL = 256
TOKENS = [5 + 7 * i % 100 for i in range(21)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("factors")
    plain = write_model(folder / "plain.gguf", "llama")
    with Model(plain) as model:
        n = int(model.meta("llama.attention.key_length") or 0) // 2
    factors = {"long": np.geomspace(1, 40, n), "short": np.geomspace(1, 2, n)}
    return copied(
        plain,
        folder / "factors.gguf",
        {
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": N_ORIGINAL,
            "llama.context_length": 4 * N_ORIGINAL,
        },
        added={
            f"rope_factors_{name}.weight": values.astype(np.float32)
            for name, values in factors.items()
        },
    )


def logits(model: Model, **settings: Any) -> npt.NDArray[np.float32]:
    params = EngineParams(n_batch=96, n_ubatch=96, n_threads=1, **settings)
    n = len(TOKENS)
    with Engine(model, None, params) as engine:
        engine.seq_begin(0, Sampler(model, Sampling(temperature=0)))
        engine.decode(TOKENS, range(n), [0] * n, [i == n - 1 for i in range(n)])
        return np.array(engine.logits(n - 1))


def test_it_is_not_the_cells_that_all_share(path: Path) -> None:
    with Model(path) as model:
        short = logits(model, n_ctx_seq=96)
        long = logits(model, n_ctx_seq=2 * N_ORIGINAL)
        assert np.abs(long - short).max() > 0.01
        for n_seq_max in (1, 8):
            shared = logits(model, n_ctx_seq=96, n_seq_max=n_seq_max, kv_unified=True)
            np.testing.assert_allclose(shared, short, atol=1e-4)
        shared = logits(model, n_ctx_seq=2 * N_ORIGINAL, n_seq_max=4, kv_unified=True)
        np.testing.assert_allclose(shared, long, atol=1e-4)


@pytest.mark.parametrize("n_branch_max", [0, 32])
def test_branches_of_a_decoder_choose_as_it_does_without(path: Path, n_branch_max: int) -> None:
    config = DecoderConfig(
        n_ctx_seq=N_ORIGINAL, n_branch_max=n_branch_max, n_threads=1, n_ubatch=128, n_batch=128
    )
    with Model(path) as model:
        decoder = DecoderPool(model, config).decoder()
        decoder.observe(TOKENS)
        short = logits(model, n_ctx_seq=N_ORIGINAL)
        np.testing.assert_allclose(np.array(decoder.next_logits()), short, atol=1e-4)
