"""Grammars that would hang, bloat or end the process: each costs bounded time and memory."""

from __future__ import annotations

import pickle
from contextlib import suppress

import numpy as np
import pytest
from tests.support.demo import MODELS, TARGETS, vocabulary

import drafthouse_engine as engine_library
from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams, check_grammar
from drafthouse_engine.errors import BadGrammar

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NO_TOKEN_ALLOWED = -24


def chain(n: int, body: str) -> str:
    """Returns n rules, each made of the next one."""
    rules = [f"a{i} ::= {body.format(f'a{i + 1}')}" for i in range(n)]
    return "\n".join(["root ::= a0", *rules, f'a{n} ::= "z"'])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a"{2,1}', "maximum"),
        (chain(20, '{0} "x" | {0} "y"'), "too ambiguous|more than 1024 ways"),
        ('root ::= "' + "a" * 60_000 + '"{2000}', "repetitions expand"),
        ("root ::= " + '"abcdefghijklmnopqrst"{2000} ' * 200, "repetitions expand"),
        ('root ::= root "a"', "left recursion"),
        ("root ::= " + "(" * 1000 + '"a"' + ")" * 1000, "nests parentheses"),
        ("root ::= <[99999999999999999999999]>", "grammar"),
        ('root ::= "a"{99999999999999999999999}', "at most 2000"),
        # What stands behind a comment, or in a token, is where llama.cpp has it.
        ("# (\rroot ::= " + "(" * 32_000 + '"a"' + ")" * 32_000, "nests parentheses"),
        ('root ::= <"#{[> ' + "(" * 1000 + '"a"' + ")" * 1000, "nests parentheses"),
        ('root ::= ("a"{#}\r3000})', "at most 2000"),
    ],
    ids=[
        "max-below-min",
        "ambiguous",
        "long",
        "many",
        "left-recursive",
        "deep",
        "huge-token",
        "huge-count",
        "deep-behind-a-comment",
        "deep-behind-a-token",
        "count-behind-a-comment",
    ],
)
def test_a_grammar_that_costs_too_much_is_refused_at_once(grammar: str, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason):
        Sampler(vocabulary(), SamplingParams(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        ("nonsense", "expecting ::= at the end of the grammar)"),
        ('root ::= "a"{3,1}', "not below the minimum at the end of the grammar)"),
        ('root ::= "a"{3,1} "b"', 'not below the minimum at "b")'),
        ("root ::= (", "expecting ')' at the end of the grammar)"),
        ('root ::= "a" | | )', "expecting newline or end at ))"),
        ("root ::= ) look at", "expecting newline or end at ) look at)"),
    ],
)
def test_a_grammar_that_cannot_be_parsed_is_told_with_its_place(grammar: str, place: str) -> None:
    """llama.cpp names a place by the text that follows, which is none at the end."""
    with pytest.raises(BadGrammar) as caught:
        check_grammar(grammar)
    assert caught.value.message.endswith(place)
    assert str(caught.value) == caught.value.message
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message  # noqa: S301  # ours


def test_deep_rules_are_checked_in_linear_time() -> None:
    """Every rule names the next one twice; without memory that is 2^40 visits: no end."""
    for body in ('{0} "x" | "w" {0}', "{0} | {0}"):
        with suppress(BadGrammar):  # too ambiguous, and found so in time
            Sampler(vocabulary(), SamplingParams(grammar=chain(40, body))).close()


FORBID_ALL = tuple((token, -np.inf) for token in range(2048))


@pytest.mark.parametrize(
    "settings",
    [{"grammar": "root ::= <[100000]>"}, {"logit_bias": FORBID_ALL}],
    ids=["grammar", "biases"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_allowed_nothing_is_emitted(
    settings: dict[str, object], temperature: float
) -> None:
    """llama.cpp chooses a forbidden token then; the end of text among them aborted the process."""
    with Model(MODELS / TARGETS["dense"]) as target:
        params = EngineParams(n_ctx_seq=64, n_batch=64, n_ubatch=64, n_threads=1, n_seq_max=2)
        with Engine(target, None, params) as engine:
            for seed in range(300):
                filters: dict[str, object] = {
                    "seed": seed,
                    "temperature": temperature,
                    "top_k": (0, 5, 40)[seed % 3],
                    "xtc_probability": float(seed % 5 == 0),
                }
                engine.seq_begin(0, Sampler(target, SamplingParams(**filters | settings)))  # type: ignore[arg-type]  # by name
                engine.seq_begin(1, Sampler(target, SamplingParams(temperature=0.0)))
                rows = [(0, 0, 0, 1, 0, 1), (1, 0, 1, 1, 0, 1)]
                table = np.array(rows, dtype=engine_library.PLAN_DTYPE)
                result = engine.step(table, [300 + seed % 50, 400])
                assert result.entries["status"].tolist() == [NO_TOKEN_ALLOWED, 0]
                assert engine.seq_n_past(0) == 0
                engine.seq_end(1)
