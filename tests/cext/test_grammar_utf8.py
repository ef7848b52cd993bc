"""What a grammar generates is UTF-8, whatever bytes the tokens of a vocabulary have."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.demo import MODELS, TARGETS

from drafthouse_engine import (
    PLAN_DTYPE,
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

STRING = json_schema_grammar({"type": "string", "minLength": 1, "maxLength": 1})


@pytest.fixture(scope="module")
def target() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"]) as model:
        yield model


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with a token of a space and the first byte of "é"."""
    content = (MODELS / TARGETS["dense"]).read_bytes()
    old, new = (struct.pack("<Q", 4) + text.encode() for text in ("Ġex", "ĠÃ"))
    assert content.count(old) == 1
    path = tmp_path_factory.mktemp("models") / "joined.gguf"
    path.write_bytes(content.replace(old, new))
    with Model(path) as model:
        yield model


def generated(model: Model, grammar: str, wanted: list[bytes]) -> bytes:
    """Returns a text of a grammar in which earlier ones of the wanted tokens are likelier.

    Behind them all comes the end of the text, and behind that every other token.
    """
    tokens = {model.token_bytes(token): token for token in range(model.n_vocab)}
    bias = {tokens[piece]: 100.0 - 10 * i for i, piece in enumerate(wanted)}
    bias[model.eos_token_ids[0]] = 50.0
    params = SamplingParams(temperature=0.0, grammar=grammar, logit_bias=tuple(bias.items()))
    with Engine(model, None, EngineParams(n_seq_max=1, n_ctx_seq=64, n_threads=1)) as engine:
        engine.seq_begin(0, Sampler(model, params))
        last = model.tokenize("x").tolist()
        found: list[int] = []
        while len(found) < 12 and not (found and model.is_eog(found[-1])):
            row = np.array([(0, engine.seq_n_past(0), 0, len(last), 0, 1)], PLAN_DTYPE)
            result = engine.step(row, last)
            assert result.entries["status"][0] == 0
            last = result.tokens.tolist()
            found += last
        assert model.is_eog(found[-1])
        return model.detokenize(found)


def pieces(text: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in text]


@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        (STRING, b'"\xe0\x84'),  # two bytes would do
        (STRING, b'"\xf0\x81\x82'),  # three would do
        (STRING, b'"\xed\xa0'),  # a surrogate
        (STRING, b'"\xf4\x90'),  # beyond the last character
        (STRING, b'"\xc0\x80'),
        (STRING, b'"\xf5\x80'),
        (regex_grammar("."), b"\xed\xa0\x80"),
        (regex_grammar("[^a]"), b"\xed\xbf"),
        ("root ::= .", b"\xe0\x80"),
        ("root ::= [^a]", b"\xf0\x80"),
        (choice_grammar(["Āx"]), b"\xe0\x84\x80"),
        ("root ::= . <[300]>?", b"\xed\xa0"),  # llama.cpp's masks
        ("root ::= !<[300]>", b"\x80"),
    ],
)
def test_a_grammar_takes_no_bytes_that_are_no_character(
    grammar: str, wanted: bytes, target: Model
) -> None:
    text = generated(target, grammar, pieces(wanted))
    assert text.decode()  # else it raises


@pytest.mark.parametrize(
    "text",
    [
        b"\xc2\x80",
        b"\xe0\xa0\xa0",
        b"\xed\x9f\x9f",
        b"\xee\x80\x80",
        b"\xf0\x90\x90\x90",
        b"\xf4\x8f\x8f\x8f",
    ],
)
def test_a_grammar_takes_every_character_byte_by_byte(text: bytes, target: Model) -> None:
    for grammar in (regex_grammar("."), "root ::= [^a]", "root ::= . <[300]>?"):
        assert generated(target, grammar, pieces(text)) == text
    assert json.loads(generated(target, STRING, pieces(b'"' + text))) == text.decode()


@pytest.mark.parametrize(
    "grammar",
    [
        choice_grammar([" ", " é"]),
        regex_grammar(" .?"),
        regex_grammar(".{0,3}"),
        "root ::= (<[300]> | .){0,3}",
    ],
)
def test_a_text_does_not_end_within_a_character(grammar: str, joined: Model) -> None:
    text = generated(joined, grammar, [b" \xc3"])
    assert text.startswith(b" \xc3")
    assert text.decode()
