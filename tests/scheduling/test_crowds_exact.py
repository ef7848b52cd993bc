"""Crowds of prompts that begin alike, on the real engine: everybody's tokens are those of alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.built import needs_extension
from tests.support.demo import exact_engine, prompts
from tests.support.exact_crowd import N_BATCH, N_SLOTS, check_crowd
from tests.support.windows import windowed

from drafthouse_engine import DraftType
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE

pytestmark = [*needs_extension(), pytest.mark.timeout(300)]

N_HEAD = 250
KINDS: tuple[tuple[str, DraftType], ...] = (
    ("dense", "none"),
    ("dense", "mtp"),
    ("hybrid", "none"),
    ("windowed", "mtp"),
)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    target, draft_type = request.param
    path = windowed(64) if target == "windowed" else None
    made = exact_engine(
        "dense" if path else target,
        draft_type,
        path,
        n_seq_max=N_SLOTS,
        n_ctx_seq=400,
        n_batch=N_BATCH,
        n_ubatch=N_BATCH,
        probabilistic=True,
    )
    yield made
    made.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_everybody_gets_the_tokens_of_alone(
    engine: LlamaEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)
    check_crowd(engine, seed, [text[:N_HEAD] for text in prompts((900,) * 3)])
