"""A draft model with other tokens at the end of its vocabulary, as llama.cpp allows up to 128.

Such pairs are common: Qwen 2.5 has 151,936 tokens as a small model and 152,064 as a large one.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from models import archs
from tests.support.built import needs_extension
from tests.support.hand import emitted, plan

from drafthouse_engine import (
    DecoderConfig,
    DecoderPool,
    DraftRequest,
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    SessionConfig,
    SimpleSession,
    Status,
)

pytestmark = needs_extension()
N_SMALL, N_LARGE = 128, 160
N_SEQ = 24
KNOWN = tuple((token, -math.inf) for token in range(N_SMALL, N_LARGE))
"""Biases that keep the greater model from what the smaller one lacks."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias=KNOWN)
TOP_K = 8
N_DRAWS = 4800
TOTAL_VARIATION = 0.04
"""Greatest distance of some thousand draws from the exact distribution; 0.015 is usual by chance,
and twice as much is what a draft that is cut by its value gives here."""


def written(path: Path, n_vocab: int, twin: int | None = None) -> Model:
    """Returns a model with so many tokens.

    With a twin it is surer of itself, and likes its token 128 as much as the twin.
    """
    draw = archs._draw

    def drawn(name: str, shape: archs.Shape) -> npt.NDArray[np.float32]:
        weights = draw(name, shape)
        if twin is not None and name == "output.weight":
            weights = weights * np.float32(3)
            weights[N_SMALL] = weights[twin]
        return weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archs, "N_VOCAB", n_vocab)
        patch.setattr(archs, "_draw", drawn)
        return Model(archs.write_model(path, "llama"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return written(tmp_path_factory.mktemp("small") / "model.gguf", N_SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return written(tmp_path_factory.mktemp("large") / "model.gguf", N_LARGE)


def params(**fields: object) -> EngineParams:
    sizes = {"n_seq_max": 3, "n_ctx_seq": 64, "n_batch": 256, "n_ubatch": 64, "n_threads": 1}
    return EngineParams(draft_type="simple", n_draft_max=2, **sizes | fields)  # type: ignore[arg-type]  # sizes


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, top_k=TOP_K, top_p=1.0, min_p=0.0, ignore_eos=True, seed=seed
    )


def forced(token: int) -> SamplingParams:
    """Returns parameters that choose one token, whatever the model says."""
    return SamplingParams(temperature=0.0, logit_bias=((token, 1e6),))


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_token_that_the_draft_lacks_costs_its_own_sequence_its_drafts(
    large: Model, small: Model, is_chosen: bool
) -> None:
    """In the prompt of one sequence, or chosen for it, it ended the process."""
    unknown = N_SMALL + 5
    prompts = [[42, 43, 44], [50, 51, 52 if is_chosen else unknown], [86, 87, 88]]
    with Engine(large, small, params()) as engine:
        for i in range(3):
            sampling = forced(unknown) if is_chosen and i == 1 else GREEDY
            engine.seq_begin(i, Sampler(large, sampling))
        rows = [(i, 0, 3 * i, 3, 0, 1) for i in range(3)]
        result = engine.step(plan(*rows), [token for prompt in prompts for token in prompt])
        drafted = Counter[int]()
        for _ in range(8):
            last = [emitted(result, i)[-1] for i in range(3)]
            rows = [(i, engine.seq_n_past(i), i, 1, 2, 1) for i in range(3)]
            result = engine.step(plan(*rows), last)
            assert all(entry["status"] == Status.OK for entry in result.entries)
            for i in range(3):
                drafted[i] += int(result.entries[i]["n_drafted"])
        assert [engine.seq_is_cold(i) for i in range(3)] == [False, True, False]
        assert drafted[0] > 0
        assert drafted[2] > 0
        assert drafted[1] == 0


def test_by_hand_too(large: Model, small: Model) -> None:
    with SimpleSession(large, small, SessionConfig(n_seq=2, n_ctx_seq=64, n_threads=1)) as session:
        for seq_id in range(2):
            session.begin(seq_id, [42, 43, 44], sampling=GREEDY)
        last = session.sample(1)
        requests = [DraftRequest(0, 3, N_SMALL + 5), DraftRequest(1, 3, last)]
        unknown, known = session.draft_many(requests)
        assert unknown == []
        assert known


def test_a_draft_model_that_is_turned_on_again_reads_what_it_can(
    large: Model, small: Model
) -> None:
    with Engine(large, small, params()) as engine:
        engine.seq_begin(0, Sampler(large, GREEDY))
        engine.step(plan((0, 0, 0, 4, 0, 0)), [40, N_SMALL + 5, 86, 87])
        assert engine.seq_is_cold(0)
        engine.seq_drafts_on(0)
        result = engine.step(plan((0, 4, 0, 1, 0, 1)), [88])
        assert not engine.seq_is_cold(0)
        result = engine.step(plan((0, 5, 0, 1, 2, 1)), emitted(result, 0))
        assert result.entries[0]["n_drafted"] > 0


def shares(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    weights[archs._END] = 0.0
    found: npt.NDArray[np.float64] = weights / weights.sum()
    return found


def after(model: Model, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Returns the distribution of what follows tokens."""
    config = DecoderConfig(n_ctx_seq=64, n_threads=1)
    with DecoderPool(model, config) as pool, pool.decoder() as decoder:
        decoder.observe(tokens)
        return shares(decoder.next_logits())


def test_a_sampled_draft_is_not_cut_by_its_value(small: Model, tmp_path: Path) -> None:
    """A drafted token that the target does not have is a rejected one."""
    prompt = [86, 87, 88]
    first = int(np.argmax(after(small, prompt)))
    exact = after(small, [*prompt, first])
    exact[np.argsort(exact)[:-TOP_K]] = 0.0
    exact /= exact.sum()
    draft = written(tmp_path / "draft.gguf", N_LARGE, int(np.argmax(exact)))
    q = after(draft, [*prompt, first])
    missing, common = q[N_SMALL:].sum(), np.minimum(q[:N_SMALL], exact)
    rejected = (1 - missing - common.sum()) / (1 - common.sum())
    cut = common + rejected * (exact - common) + missing * exact
    assert np.abs(cut - exact).sum() / 2 > 2 * TOTAL_VARIATION, "else this test shows nothing"
    counts = np.zeros(N_SMALL)
    sizes = {"n_seq_max": N_SEQ, "probabilistic": True}
    with Engine(small, draft, params(**sizes)) as engine:
        for round_ in range(N_DRAWS // N_SEQ):
            for i in range(N_SEQ):
                engine.seq_begin(i, Sampler(small, sampled(1 + round_ * N_SEQ + i)))
            rows = [(i, 0, 0, 3, 0, 1) for i in range(N_SEQ)]
            result = engine.step(plan(*rows), prompt)
            chosen = [emitted(result, i)[0] for i in range(N_SEQ)]
            rows = [(i, 3, i, 1, 1, 1) for i in range(N_SEQ)]
            result = engine.step(plan(*rows), chosen)
            for i in range(N_SEQ):
                if chosen[i] == first:
                    counts[emitted(result, i)[0]] += 1
                engine.seq_end(i)
    assert counts.sum() > N_DRAWS / 2
    assert np.abs(counts / counts.sum() - exact).sum() / 2 < TOTAL_VARIATION
