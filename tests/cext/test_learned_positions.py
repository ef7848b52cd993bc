"""Models that have learned their positions one by one: llama.cpp ends the process beyond the last.

GPT-2, StarCoder, MPT, and encoders such as BERT, whose texts are often longer than its 512.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from models.archs import N_CTX, N_VOCAB, write_model
from tests.support.built import needs_extension
from tests.support.hand import plan

from drafthouse_engine import (
    BadPlan,
    DecoderConfig,
    DecoderPool,
    Embedder,
    EmbedderParams,
    Engine,
    EngineParams,
    IncompatibleDraft,
    InvalidArgument,
    Model,
    NoRoom,
    Sampler,
    SamplingParams,
    Status,
    generate,
)

pytestmark = needs_extension()
TEXT = [(7 * i + 33) % N_VOCAB for i in range(N_CTX + 40)]
LONG = EngineParams(n_ctx_seq=N_CTX + 40, n_batch=512, n_ubatch=512, n_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gpt2(folder: Path) -> Model:
    return Model(write_model(folder / "gpt2.gguf", "gpt2"))


def test_a_sequence_has_no_more_tokens_than_positions(
    gpt2: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Engine(gpt2, None, LONG) as engine:
        assert engine.limits.n_ctx_seq == N_CTX
        engine.seq_begin(0, Sampler(gpt2, SamplingParams(temperature=0.0)))
        with pytest.raises(BadPlan, match=f"room for {N_CTX}"):
            engine.step(plan((0, 0, 0, N_CTX + 1, 0, 1)), TEXT[: N_CTX + 1])
        result = engine.step(plan((0, 0, 0, N_CTX, 0, 1)), TEXT[:N_CTX])
        assert result.entries[0]["status"] == Status.OK
    assert "learned its positions" in caplog.text


def test_a_decoder_has_no_more_tokens_than_positions(gpt2: Model) -> None:
    with DecoderPool(gpt2, DecoderConfig(n_ctx_seq=N_CTX + 40, n_threads=1)) as pool:
        assert pool.limits.n_ctx_seq == N_CTX
        decoder = pool.decoder()
        with pytest.raises(NoRoom):
            decoder.observe(TEXT[: N_CTX + 1])
        decoder.observe(TEXT[:N_CTX])
        assert decoder.next_logits().shape == (N_VOCAB,)


def test_a_text_may_fill_the_context(gpt2: Model) -> None:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    found = [
        generate(gpt2, TEXT[: N_CTX - 8], method=method, n_tokens=8, sampling=sampling, n_threads=1)
        for method in ("autoregressive", "ngram")
    ]
    assert [len(generation.tokens) for generation in found] == [8, 8]


def test_a_drafter_has_the_positions_of_its_target(gpt2: Model, folder: Path) -> None:
    with Model(write_model(folder / "llama.gguf", "llama")) as llama:
        for n_ctx_seq in (N_CTX, N_CTX + 40):
            params = EngineParams(
                draft_type="simple", n_ctx_seq=n_ctx_seq, n_batch=512, n_threads=1
            )
            if n_ctx_seq > N_CTX:
                with pytest.raises(IncompatibleDraft, match=f"learned {N_CTX} positions"):
                    Engine(llama, gpt2, params)
            else:
                Engine(llama, gpt2, params).close()


def test_a_text_to_embed_has_no_more_tokens_than_positions(folder: Path) -> None:
    """The default n_batch is 2048: such a text ended the process."""
    with Model(write_model(folder / "bert.gguf", "bert")) as model:
        params = EmbedderParams(pooling="mean", n_threads=1)
        with Embedder(model, params) as embedder:
            assert embedder.limits.n_batch > N_CTX
            with pytest.raises(InvalidArgument, match=rf"expected \[1, {N_CTX}\]"):
                embedder.encode([TEXT[: N_CTX + 1]])
            assert embedder.encode([TEXT[:N_CTX], TEXT[:3]]).shape[0] == 2
