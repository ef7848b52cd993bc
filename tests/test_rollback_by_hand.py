"""A rollback by hand takes back the cells of both contexts."""

from __future__ import annotations

import pytest
from tests.demo import EAGLE3, MODELS, SIMPLE, TARGETS

from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(60)]


@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple"])
def test_a_rollback_frees_the_drafts_cells_too(draft_type: str) -> None:
    """EAGLE-3 and simple drafts kept theirs: the draft's cache then held a future of nobody."""
    file = {"eagle3": EAGLE3["dense"], "simple": SIMPLE}.get(draft_type)
    draft = Model(MODELS / file) if file else None
    with Model(MODELS / TARGETS["dense"]) as target:
        params = EngineParams(
            draft_type=draft_type,  # type: ignore[arg-type]  # parametrised by its names
            n_ctx_seq=64,
            n_batch=64,
            n_ubatch=64,
            n_threads=1,
        )
        with Engine(target, draft, params) as engine:
            engine.seq_begin(0, Sampler(target, SamplingParams(temperature=0.0)))
            tokens = list(range(300, 330))
            engine.decode(tokens, range(30), [0] * 30, [False] * 30)
            engine.process()
            engine.rollback(0, 10)
            assert engine.seq_n_past(0) == engine.n_cells_used == 10
            engine.decode(tokens[:5], range(10, 15), [0] * 5, [False] * 5)
            engine.process()
            assert engine.n_cells_used == 15
