"""N-gram drafters of llama.cpp read out of bounds or end the process on histories they dislike."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.demo import MODELS, TARGETS

import drafthouse_engine as engine_library
from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")


def make(target: Model, draft_type: str) -> Engine:
    params = EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # parametrised by its names
        n_ctx_seq=256,
        n_batch=256,
        n_ubatch=256,
        n_draft_max=8,
        n_threads=1,
    )
    engine = Engine(target, None, params)
    engine.seq_begin(0, Sampler(target, SamplingParams(temperature=0.0, ignore_eos=True)))
    return engine


@pytest.mark.parametrize("draft_type", NGRAM_TYPES)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_shorter_than_an_ngram_drafts_nothing(draft_type: str, length: int) -> None:
    """The n-gram cache read up to twelve bytes before the history's start."""
    with Model(MODELS / TARGETS["dense"]) as target, make(target, draft_type) as engine:
        rows = np.array([(0, 0, 0, length, 0, 1)], dtype=engine_library.PLAN_DTYPE)
        result = engine.step(rows, [400] * length)
        rows = np.array([(0, length, 0, 1, 8, 1)], dtype=engine_library.PLAN_DTYPE)
        result = engine.step(rows, result.tokens[-1:])
        assert result.entries["status"].tolist() == [0]
        if length < 3:
            assert result.entries["n_drafted"].tolist() == [0]


def round_by_hand(engine: Engine, last: int) -> list[int]:
    """Drafts, decodes, accepts nothing; returns the draft."""
    n = engine.seq_n_past(0)
    draft = engine.draft_many([(0, n, last, 8)])[0]
    tokens = [last, *draft]
    engine.decode(tokens, range(n, n + len(tokens)), [0] * len(tokens), [True] * len(tokens))
    engine.accept(0, 0)
    return draft


@pytest.mark.parametrize("draft_type", NGRAM_TYPES)
def test_a_rollback_takes_back_what_the_drafter_has_seen(draft_type: str) -> None:
    """N-gram maps aborted the process when the history had become shorter."""
    text = [400 + i % 7 for i in range(120)]
    with Model(MODELS / TARGETS["dense"]) as target, make(target, draft_type) as engine:
        engine.decode(text, range(120), [0] * 120, [False] * 120)
        expected = round_by_hand(engine, text[120 % 7])
        engine.rollback(0, 60)
        round_by_hand(engine, text[60 % 7])
        engine.rollback(0, 60)
        engine.decode(text[60:], range(60, 120), [0] * 60, [False] * 60)
        assert round_by_hand(engine, text[120 % 7]) == expected
