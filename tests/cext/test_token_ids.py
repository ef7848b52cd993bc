"""Tokens that are no token ids are refused wherever they are given, and never made into others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.hand import GREEDY, engine, model, sampler

from drafthouse_engine import (
    DecoderConfig,
    DecoderPool,
    DraftTree,
    InvalidArgument,
    MtpSession,
    SessionConfig,
    begin_many,
    generate,
)

pytestmark = pytest.mark.model

WRONG = {
    "beyond 32 bits": np.array([2**32 + 5, 6, 7]),
    "beyond 64 bits": [2**70, 6, 7],
    "fractions": [5.9, 6.0, 7.0],
    "fractions in an array": np.array([5.9, 6.0, 7.0]),
    "truths": [True, False, True],
    "digits": ["5", "6", "7"],
    "bytes": b"def",
    "rows": np.array([[5], [6], [7]]),
}


def begin_several(tokens: Any) -> None:
    with engine() as made:
        try:
            begin_many(made, tokens, {0: sampler()})
        except (InvalidArgument, TypeError):
            assert made.n_cells_used == 0
            raise


def begin_session(tokens: Any) -> None:
    with MtpSession(model(), SessionConfig(n_ctx_seq=64, n_threads=1)) as session:
        try:
            session.begin(0, tokens, sampling=GREEDY)
        except (InvalidArgument, TypeError):
            assert session.n_past(0) == 0
            raise


def observe(tokens: Any) -> None:
    with DecoderPool(model(), DecoderConfig(n_ctx_seq=64, n_threads=1)) as pool:
        decoder = pool.decoder()
        try:
            decoder.observe(tokens)
        except (InvalidArgument, TypeError):
            assert decoder.history == ()
            raise


CALLS: dict[str, Callable[[Any], object]] = {
    "begin_many": begin_several,
    "session": begin_session,
    "decoder": observe,
    "generate": lambda tokens: generate(model(), tokens, n_tokens=1, n_threads=1),
    "a tree's chain": lambda tokens: DraftTree.chain(1, tokens),
    "a tree's paths": lambda tokens: DraftTree.from_paths(1, [tokens]),
    "a tree that grows": lambda tokens: DraftTree((1,), (-1,)).grown(tokens, (0, 0, 0)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_token_is_refused(call: str, wrong: str) -> None:
    with pytest.raises((InvalidArgument, TypeError)):
        CALLS[call](WRONG[wrong])


@pytest.mark.parametrize("call", CALLS)
def test_all_kinds_of_integers_are_tokens(call: str) -> None:
    for tokens in ([5, 6, 7], (5, 6, 7), range(5, 8), np.arange(5, 8, dtype=np.uint8)):
        CALLS[call](tokens)
