"""Embeddings through a context of their own."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
from models.archs import write_model
from tests.support.demo import MODELS, TARGETS, prompts

from drafthouse_engine import (
    Closed,
    Embedder,
    EmbedderParams,
    InvalidArgument,
    InvalidConfig,
    Model,
    Unsupported,
    WrongThread,
)

pytestmark = pytest.mark.model
LENGTHS = (24, 3, 40, 17, 1, 33)
TOLERANCE = 0.02
"""Of rows of unit length: float16 weights, and batches of another width."""


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_batched_rows_equal_single_ones(target_name: str, pooling: str) -> None:
    texts = prompts(LENGTHS)
    params = EmbedderParams(pooling=pooling, n_batch=64, n_seq_max=4, n_threads=1)  # type: ignore[arg-type]
    with Model(MODELS / TARGETS[target_name]) as model, Embedder(model, params) as embedder:
        rows = embedder.encode(texts)
        assert rows.shape == (len(texts), embedder.limits.n_embd)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
        for text, row in zip(texts, rows, strict=True):
            np.testing.assert_allclose(embedder.encode([text])[0], row, atol=TOLERANCE)
        assert abs(float(rows[0] @ rows[2])) < 0.9999  # texts differ
        assert embedder.encode([]).shape == (0, embedder.limits.n_embd)


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
def test_pooled_rows_are_made_of_the_tokens_rows(target_name: str) -> None:
    texts = prompts((20, 9))
    with Model(MODELS / TARGETS[target_name]) as model:
        rows = {}
        for pooling in ("mean", "last", "cls"):
            params = EmbedderParams(pooling=pooling, is_normalised=False, n_batch=64, n_threads=1)
            with Embedder(model, params) as embedder:
                rows[pooling] = embedder.encode(texts)
        params = EmbedderParams(pooling="none", is_normalised=False, n_batch=64, n_threads=1)
        with Embedder(model, params) as embedder:
            hidden = embedder.encode_tokens(texts)
    assert [len(part) for part in hidden] == [20, 9]
    for i, part in enumerate(hidden):
        scale = float(np.abs(part).max())
        for pooling, expected in (("mean", part.mean(0)), ("last", part[-1]), ("cls", part[0])):
            np.testing.assert_allclose(rows[pooling][i], expected, atol=TOLERANCE * scale)


def test_wrong_calls_are_refused() -> None:
    with Model(MODELS / TARGETS["dense"]) as model:
        with pytest.raises(Unsupported, match="reranker"):
            Embedder(model, EmbedderParams(pooling="rank"))
        with pytest.raises(InvalidConfig, match="pooling"):
            EmbedderParams(pooling="max")  # type: ignore[arg-type]  # wrong on purpose
        params = EmbedderParams(pooling="mean", n_batch=32, n_threads=1)
        with Embedder(model, params) as embedder:
            wrong_texts: tuple[list[list[int]], ...]
            wrong_texts = ([[]], [[1] * 33], [[-1]], [[embedder.limits.n_vocab]])
            for wrong in wrong_texts:
                with pytest.raises(InvalidArgument):
                    embedder.encode(wrong)
            with pytest.raises(Unsupported, match="none"):
                embedder.encode_tokens([[1]])
        embedder.close()
        with pytest.raises(Closed):
            embedder.encode([[1]])
        with Embedder(model, EmbedderParams(n_batch=32)) as embedder:
            assert embedder.limits.pooling == "none"
            with pytest.raises(Unsupported, match="encode_tokens"):
                embedder.encode([[1]])


def test_draft_models_have_no_embeddings() -> None:
    with (
        Model(MODELS / "tiny-mimo2-eagle3-f16.gguf") as model,
        pytest.raises(Unsupported, match="draft model"),
    ):
        Embedder(model)


@pytest.mark.parametrize(
    ("n_batch", "n_seq_max"), [(1, 256), (8, 16), (8, 8), (16, 1), (100, 16), (257, 200)]
)
def test_any_sizes_work(n_batch: int, n_seq_max: int) -> None:
    """More texts than tokens in a decode ended the process, and tokens that are no multiple."""
    text = list(prompts((n_batch,))[0])
    params = EmbedderParams(pooling="mean", n_batch=n_batch, n_seq_max=n_seq_max, n_threads=1)
    with Model(MODELS / TARGETS["dense"]) as model, Embedder(model, params) as embedder:
        assert embedder.limits.n_seq_max == min(n_batch, n_seq_max)
        assert embedder.limits.n_batch == n_batch
        rows = embedder.encode([text, text[:1], text[:1]])
        assert rows.shape[0] == 3
        np.testing.assert_allclose(rows[1], rows[2], atol=TOLERANCE)


def test_nobody_closes_an_embedder_in_the_midst_of_a_call() -> None:
    text = list(prompts((60,))[0])
    params = EmbedderParams(pooling="mean", n_batch=64, n_threads=1)
    with Model(MODELS / TARGETS["dense"]) as model:
        for _ in range(10):
            embedder = Embedder(model, params)
            done: list[object] = []

            def encode(embedder: Embedder = embedder, done: list[object] = done) -> None:
                try:
                    done.append(embedder.encode([text] * 4).shape)
                except (Closed, WrongThread) as error:
                    done.append(error)

            thread = threading.Thread(target=encode)
            thread.start()
            while not embedder.is_closed:
                with contextlib.suppress(WrongThread):
                    embedder.close()
            thread.join()
            assert len(done) == 1


@pytest.mark.parametrize("name", ["deepseek4-mtp", "qwen4exp-mtp"])
def test_models_without_hidden_rows_are_refused(name: str, tmp_path: Path) -> None:
    """They ended the process at the first text."""
    with (
        Model(write_model(tmp_path / "m.gguf", name)) as model,
        pytest.raises(Unsupported, match="hidden rows"),
    ):
        Embedder(model)
    with (
        Model(write_model(tmp_path / "l.gguf", "lfm2")) as model,
        Embedder(model, EmbedderParams(pooling="mean", n_batch=32, n_threads=1)) as embedder,
    ):
        assert np.isfinite(embedder.encode([[5, 12, 19]])).all()
