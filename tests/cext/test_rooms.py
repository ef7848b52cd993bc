"""Memory of snapshots: the next one gets the pages, and nobody the contents."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.built import built, needs_extension
from tests.support.demo import MODELS, TARGETS, prompts

from drafthouse_engine import PLAN_DTYPE, Engine, EngineParams, Model, Moves, Sampler, Start

pytestmark = needs_extension()

N_PROMPT = 400


def test_what_is_given_back_comes_back() -> None:
    run = subprocess.run(
        [str(built("room_test"))], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr


@pytest.fixture
def engine() -> Iterator[Engine]:
    params = EngineParams(n_ctx_seq=512, n_seq_max=2, n_threads=1)
    with Model(MODELS / TARGETS["dense"]) as model, Engine(model, None, params) as engine:
        texts = prompts((N_PROMPT, N_PROMPT))
        entries = np.zeros(2, PLAN_DTYPE)
        for seq_id, text in enumerate(texts):
            engine.seq_begin(seq_id, Sampler(model))
            entries[seq_id] = (seq_id, 0, seq_id * N_PROMPT, len(text), 0, 0)
        engine.step(entries, [token for text in texts for token in text])
        yield engine


def saved(engine: Engine, seq_id: int) -> memoryview:
    result = engine.step(np.zeros(0, PLAN_DTYPE), [], moves=Moves(saves=[seq_id]))
    assert result.moved is not None
    return result.moved.snapshots[seq_id]


def test_a_snapshot_is_read_only_and_stays_as_it_is_while_there_is_a_view_of_it(
    engine: Engine,
) -> None:
    first = saved(engine, 0)
    assert first.readonly
    assert len(first) > 1 << 20  # else its memory is the allocator's
    content, part = bytes(first), first[100:200]
    del first
    others = [saved(engine, 1) for _ in range(4)]
    assert bytes(part) == content[100:200]
    assert all(other == others[0] for other in others)
    assert bytes(others[0]) != content


def test_a_snapshot_in_pages_of_another_one_is_the_same_as_in_fresh_ones(engine: Engine) -> None:
    fresh = bytes(saved(engine, 0))
    for _ in range(3):
        del_me = saved(engine, 1)
        del del_me
        assert saved(engine, 0) == fresh
    engine.step(
        np.zeros(0, PLAN_DTYPE),
        [],
        moves=Moves(
            frees=[1],
            starts=[Start(1, Sampler(engine.target), N_PROMPT, snapshot=saved(engine, 0))],
        ),
    )
    assert engine.seq_n_past(1) == N_PROMPT
