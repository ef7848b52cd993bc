"""The option `exact`: a token's logits do not depend on the width of its batch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.demo import MODELS, TARGETS, prompts

from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams
from drafthouse_engine.errors import InvalidArgument

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_SEQ = 16
N_DRAFT = 7
LENGTHS = tuple(5 + 9 * i for i in range(N_SEQ))
Rows = dict[tuple[int, int], npt.NDArray[np.float32]]  # (sequence, position): logits


def params(*, is_exact: bool, n_threads: int = 1) -> EngineParams:
    return EngineParams(
        draft_type="mtp",  # only for the outputs of 1 + n_draft_max a sequence
        n_seq_max=N_SEQ,
        n_ctx_seq=768,
        n_batch=2048,
        n_ubatch=512,
        n_draft_max=N_DRAFT,
        n_threads=n_threads,
        exact=is_exact,
    )


def decode(engine: Engine, rows: Sequence[tuple[int, int, int]], n_output: int) -> Rows:
    """Decodes rows of (sequence, position, token); returns the logits of each sequence's last."""
    last = {seq_id: position for seq_id, position, _ in rows}
    outputs = [position > last[seq_id] - n_output for seq_id, position, _ in rows]
    seq_ids, positions, tokens = zip(*rows, strict=True)
    engine.decode(tokens, positions, seq_ids, outputs)
    engine.process()
    found = {
        (seq_id, position): engine.logits(i)
        for i, (seq_id, position, _) in enumerate(rows)
        if outputs[i]
    }
    return {key: logits.copy() for key, logits in found.items()}


def begin(engine: Engine) -> None:
    for seq_id in range(N_SEQ):
        engine.seq_end(seq_id)
        greedy = SamplingParams(temperature=0.0)
        engine.seq_begin(seq_id, Sampler(engine.target, greedy))


def one_by_one(engine: Engine, pool: Sequence[Sequence[int]]) -> Rows:
    """Every prompt alone, one token a decode."""
    begin(engine)
    found: Rows = {}
    for seq_id, prompt in enumerate(pool):
        for position, token in enumerate(prompt):
            found |= decode(engine, [(seq_id, position, token)], 1)
    return found


def together(engine: Engine, pool: Sequence[Sequence[int]], width: int) -> Rows:
    """All prompts at once, `width` tokens of each in a decode."""
    begin(engine)
    found: Rows = {}
    for start in range(0, max(map(len, pool)), width):
        rows = [
            (seq_id, position, token)
            for seq_id, prompt in enumerate(pool)
            for position, token in list(enumerate(prompt))[start : start + width]
        ]
        found |= decode(engine, rows, 1)
    return found


def n_different(a: Rows, b: Rows) -> tuple[int, int]:
    keys = a.keys() & b.keys()
    assert len(keys) >= N_SEQ
    return sum(not np.array_equal(a[key], b[key]) for key in keys), len(keys)


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
def test_logits_are_equal_bit_for_bit_at_every_width(
    target_name: str, record_property: Callable[[str, object], None]
) -> None:
    pool = prompts(LENGTHS)
    with Model(MODELS / TARGETS[target_name]) as target:
        with Engine(target, None, params(is_exact=True)) as engine:
            alone = one_by_one(engine, pool)
            for width in (1, 2, 4, 8, 16, 32, 64):
                assert n_different(alone, together(engine, pool, width))[0] == 0, width
        with Engine(target, None, params(is_exact=True, n_threads=2)) as engine:
            assert n_different(alone, together(engine, pool, 3))[0] == 0
        with Engine(target, None, params(is_exact=False)) as engine:
            # Where kernels give the same without the option, it has nothing to do: no fault.
            record_property("different without", n_different(alone, together(engine, pool, 2))[0])


def test_exact_refuses_a_unified_cache() -> None:
    with Model(MODELS / TARGETS["dense"]) as target, pytest.raises(InvalidArgument, match="exact"):
        Engine(target, None, EngineParams(n_ctx_seq=64, exact=True, kv_unified=True))
