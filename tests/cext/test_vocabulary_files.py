"""Vocabularies on which llama.cpp ends the process are refused, whatever their kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.proofs.vocabularies import Vocabulary, drawn, outcome, write

from drafthouse_engine import Model
from drafthouse_engine.errors import BadModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def vocabulary_of(kind: str) -> Vocabulary:
    """Returns a vocabulary of a kind, as it should be."""
    found = drawn(random.Random(0), kind)
    found.values |= {"unknown_token_id": 0}
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5", "rwkv"])
def test_two_tokens_of_one_text_are_refused(tmp_path: Path, kind: str) -> None:
    vocabulary = vocabulary_of(kind)
    write(tmp_path / "whole.gguf", vocabulary)
    with Model(tmp_path / "whole.gguf", vocab_only=True) as model:
        assert model.n_vocab == len(vocabulary.texts)
    vocabulary.texts[270] = vocabulary.texts[265]
    write(tmp_path / "twice.gguf", vocabulary)
    with pytest.raises(BadModel, match="tokens 265 and 270 have the same text"):
        Model(tmp_path / "twice.gguf", vocab_only=True)


def test_tokens_without_text_are_not_alike(tmp_path: Path) -> None:
    """llama.cpp names them by their ids."""
    vocabulary = vocabulary_of("llama")
    vocabulary.texts[265] = vocabulary.texts[270] = b""
    write(tmp_path / "empty.gguf", vocabulary)
    with Model(tmp_path / "empty.gguf", vocab_only=True) as model:
        assert model.n_vocab == len(vocabulary.texts)
    vocabulary.texts[280] = b"[EMPTY_270]"
    write(tmp_path / "named.gguf", vocabulary)
    with pytest.raises(BadModel, match="tokens 270 and 280 have the same text"):
        Model(tmp_path / "named.gguf", vocab_only=True)


def test_a_byte_of_a_wordpiece_vocabulary_is_refused(tmp_path: Path) -> None:
    vocabulary = vocabulary_of("bert")
    vocabulary.types[265] = 6
    write(tmp_path / "byte.gguf", vocabulary)
    with pytest.raises(BadModel, match="token 265 is a byte"):
        Model(tmp_path / "byte.gguf", vocab_only=True)


def test_tokens_of_a_model_without_tokenizer_may_be_alike(tmp_path: Path) -> None:
    vocabulary = vocabulary_of("none")
    vocabulary.texts[270] = vocabulary.texts[265]
    write(tmp_path / "none.gguf", vocabulary)
    with Model(tmp_path / "none.gguf", vocab_only=True):
        pass


@pytest.mark.parametrize("seed", range(20))
def test_a_vocabulary_at_random_is_used_or_refused(tmp_path: Path, seed: int) -> None:
    """More of them: `python -m tests.proofs.vocabularies`."""
    what, found = outcome(seed, tmp_path / "vocabulary.gguf")
    assert found.startswith(("used", "refused")), f"{what}: {found}"
