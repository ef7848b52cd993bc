"""Masks of grammars are bounded in comparisons, counted, and told for each sequence."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.built import built
from tests.support.demo import MODELS, TARGETS, vocabulary

from drafthouse_engine import (
    PLAN_DTYPE,
    Engine,
    EngineParams,
    GrammarTooCostly,
    Model,
    Sampler,
    SamplingFailed,
    SamplingParams,
    grammar_accepts,
)
from drafthouse_engine.errors import BadGrammar, Status

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


SAME = " | ".join(['"a"'] * 900)
CHEAP_AT_FIRST = f'root ::= "b"+ | "c" ( {SAME} )*'
"""A probe follows the b; behind the c each token is read in 900 ways, each of them in 900 more."""

JSON = r"""root ::= "{" string ":" string "}"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
"""


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"]) as model:
        yield model


def engine_of(model: Model) -> Engine:
    params = EngineParams(n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1, n_seq_max=2)
    return Engine(model, None, params)


def forced(model: Model, text: str) -> tuple[tuple[int, float], ...]:
    """Returns a bias that makes a token the first choice, whatever the model thinks."""
    return ((int(model.tokenize(text)[-1]), 100.0),)


@pytest.mark.parametrize("program", ["mask_test", "place_test"])
def test_masks_are_what_the_grammars_take(program: str) -> None:
    run = subprocess.run(
        [str(built(program)), str(MODELS / TARGETS["dense"])],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr


def test_a_grammar_beyond_its_budget_ends_its_sequence_and_no_other(target: Model) -> None:
    with engine_of(target) as engine:
        greedy = SamplingParams(temperature=0.0)
        engine.seq_begin(1, Sampler(target, greedy))
        alone = engine.step(np.array([(1, 0, 0, 1, 0, 1)], PLAN_DTYPE), [400]).tokens.tolist()
        engine.seq_end(1)
        costly = SamplingParams(
            temperature=0.0, grammar=CHEAP_AT_FIRST, logit_bias=forced(target, "x")
        )
        engine.seq_begin(0, Sampler(target, costly))
        engine.seq_begin(1, Sampler(target, greedy))
        rows = np.array([(0, 0, 0, 1, 0, 1), (1, 0, 1, 1, 0, 1)], PLAN_DTYPE)
        result = engine.step(rows, [300, 400])
        assert result.entries["status"].tolist() == [Status.GRAMMAR_TOO_COSTLY, Status.OK]
        assert result.entries["n_mask_work"][0] > 2**22
        assert result.entries["n_mask_work"][1] == 0
        assert result.tokens.tolist() == alone
        assert engine.seq_n_past(0) == 0
        assert engine.n_cells_used == 1


WIDE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


@pytest.mark.parametrize(
    ("options", "n_each"),
    [
        ({}, 0),
        ({"temperature": 0.0}, 0),
        ({"top_k": 1024, "typical_p": 0.9}, 0),
        ({"top_k": 0, "top_p": 0.95}, 0),
        (WIDE, 0),
        (WIDE | {"typical_p": 0.9}, 16),
        (WIDE | {"xtc_probability": 0.5}, 8),
        (WIDE | {"top_k": 2000}, 8 * 2000 / 2048),
        (WIDE | {"top_k": 2000, "typical_p": 0.9}, 16 * 2000 / 2048),
        (WIDE | {"typical_p": 0.9, "logit_bias": ((7, 1.0),)}, 16),
    ],
)
def test_samplers_that_sort_the_vocabulary_are_counted(
    target: Model, options: dict[str, Any], n_each: float
) -> None:
    with engine_of(target) as engine:
        engine.seq_begin(0, Sampler(target, SamplingParams(**options)))
        result = engine.step(np.array([(0, 0, 0, 1, 0, 1)], PLAN_DTYPE), [300])
        assert result.entries["n_mask_work"][0] == n_each * 2048
        again = engine.step(np.array([(0, 1, 0, 1, 0, 1)], PLAN_DTYPE), result.tokens.tolist())
        assert again.entries["n_mask_work"][0] == n_each * 2048


def test_by_hand_it_is_told_as_a_failed_choice_of_its_own(target: Model) -> None:
    with engine_of(target) as engine:
        costly = SamplingParams(
            temperature=0.0, grammar=CHEAP_AT_FIRST, logit_bias=forced(target, "x")
        )
        engine.seq_begin(0, Sampler(target, costly))
        engine.decode([300], [0], [0], [True])
        engine.process()
        with pytest.raises(GrammarTooCostly, match="more comparisons for one token"):
            engine.sample(0, 0)
        assert issubclass(GrammarTooCostly, SamplingFailed)
        assert engine.n_cells_used == 0


def test_what_one_sequence_found_of_a_grammar_another_need_not_find() -> None:
    with Model(MODELS / TARGETS["dense"]) as model, engine_of(model) as engine:
        work, tokens = [], []
        for seq_id in range(2):
            # The likeliest tokens do not fit, so that masks are needed.
            params = SamplingParams(temperature=0.0, grammar=JSON, logit_bias=forced(model, "x"))
            engine.seq_begin(seq_id, Sampler(model, params))
            result = engine.step(np.array([(seq_id, 0, 0, 1, 0, 1)], PLAN_DTYPE), [300])
            row = np.array([(seq_id, 1, 0, 1, 0, 1)], PLAN_DTYPE)
            run = engine.step(row, result.tokens.tolist(), n_steps=5)
            assert run.n_steps == 5
            work.append(int(result.entries["n_mask_work"][0]) + int(run.entries["n_mask_work"][0]))
            tokens.append([*result.tokens.tolist(), *run.tokens.tolist()])
            engine.seq_end(seq_id)
        assert tokens[0] == tokens[1]
        assert 0 < 20 * work[1] < work[0]


def test_what_a_mask_takes_does_not_grow_with_how_a_class_is_written(target: Model) -> None:
    counts = []
    for letters in ("a", "a" * 60_000, "".join(chr(0x4E00 + 2 * i) for i in range(10_000))):
        with engine_of(target) as engine:
            params = SamplingParams(
                temperature=0.0, grammar=f"root ::= [{letters}a]*", logit_bias=forced(target, "x")
            )
            engine.seq_begin(0, Sampler(target, params))
            result = engine.step(np.array([(0, 0, 0, 1, 0, 1)], PLAN_DTYPE), [300])
            counts.append(int(result.entries["n_mask_work"][0]))
            assert result.entries["status"][0] == Status.OK
    once, doubled, wide = counts
    assert doubled == once
    assert wide < 2048 * 10_000 // 4  # read once for each stack, not for each of 2,048 tokens


def test_a_grammar_that_one_character_of_takes_too_long_is_refused() -> None:
    with pytest.raises(BadGrammar, match="ambiguous"):
        Sampler(vocabulary(), SamplingParams(grammar=f"root ::= ( {SAME} )*"))


CHARS = st.characters(min_codepoint=0x21, max_codepoint=0x200, exclude_characters="[]\\-^")


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.tuples(CHARS, CHARS) | st.tuples(CHARS), min_size=1, max_size=12),
    is_negated=st.booleans(),
    char=CHARS,
)
def test_a_class_takes_the_characters_that_it_names(
    parts: list[tuple[str, ...]], is_negated: bool, char: str
) -> None:
    ranges = [tuple(sorted(part)) for part in parts]
    inner = "".join("-".join(part) for part in ranges)
    named = any(part[0] <= char <= part[-1] for part in ranges)
    grammar = f"root ::= [{'^' if is_negated else ''}{inner}]"
    assert grammar_accepts(grammar, char) == (named != is_negated)
