"""Models: tokenizer, metadata, chat format; bad files and bad text each their own error."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hand import DENSE, EAGLE3, HYBRID, MODELS, SIMPLE, model, params

from drafthouse_engine import (
    BadModel,
    BadTemplate,
    Closed,
    Engine,
    IncompatibleDraft,
    InvalidArgument,
    Model,
    ModelNotFound,
    NoMtpHeads,
    NotEagle3,
)

pytestmark = pytest.mark.model


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = model().tokenize(text, add_special=False)
    assert tokens.dtype == np.int32
    assert model().detokenize(tokens) == text.encode()


def test_nul_characters_are_text() -> None:
    assert model().detokenize(model().tokenize("a\0b", add_special=False)) == b"a\0b"


def test_facts_of_the_demo_models() -> None:
    dense, hybrid, eagle3 = model(DENSE), model(HYBRID), model(EAGLE3[DENSE])
    assert (dense.arch, dense.n_vocab, dense.n_ctx_train, dense.n_embd) == (
        "mimo2",
        2048,
        1024,
        256,
    )
    assert (dense.n_layer, dense.n_layer_nextn) == (6, 1)
    assert hybrid.is_hybrid
    assert not dense.is_hybrid
    assert eagle3.n_target_layers == 3
    assert dense.n_params > 4_000_000
    assert dense.size_bytes > dense.n_params
    assert dense.meta("general.architecture") == "mimo2"
    assert dense.meta("no.such.key") is None
    assert dense.token_eos in dense.eos_token_ids
    assert all(dense.is_eog(token) for token in dense.eos_token_ids)


def test_special_tokens_are_spelt_out_only_when_asked() -> None:
    eos = model().token_eos
    spelt = model().token_bytes(eos, special=True)
    assert spelt
    assert model().token_bytes(eos) == b""
    text = spelt.decode()
    assert model().tokenize(text, add_special=False, parse_special=True).tolist() == [eos]
    assert len(model().tokenize(text, add_special=False)) > 1


def test_chat_messages_take_the_models_format() -> None:
    text = model().format_chat([("user", "What is α?"), ("assistant", "A letter."), ("user", "x")])
    assert "What is α?" in text
    assert text.index("A letter.") > text.index("What is α?")
    longer = model().format_chat([("user", "y" * 200_000)])
    assert longer.count("y") >= 200_000


@pytest.mark.parametrize("messages", [[], [("user", "lone \udc80")], [("user", "nul\0")]])
def test_bad_chat_messages_are_refused(messages: list[tuple[str, str]]) -> None:
    with pytest.raises((InvalidArgument, BadTemplate)):
        model().format_chat(messages)


def test_lone_surrogates_are_refused_with_their_place() -> None:
    with pytest.raises(InvalidArgument, match="index 3"):
        model().tokenize("abc\ud800")


def test_text_must_be_text() -> None:
    with pytest.raises(TypeError, match="str"):
        model().tokenize(b"bytes")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("token", [-1, 2048, 2**31 - 1, 2**40])
def test_unknown_tokens_are_refused(token: int) -> None:
    with pytest.raises(InvalidArgument):
        model().token_bytes(token)
    with pytest.raises(InvalidArgument):
        model().is_eog(token)
    with pytest.raises(InvalidArgument):
        model().detokenize([5, token])


@pytest.mark.parametrize("token", [1.5, "1", None, True])
def test_tokens_must_be_integers(token: object) -> None:
    with pytest.raises(TypeError):
        model().token_bytes(token)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError):
        model().detokenize(np.array(["a"]))


def test_missing_file_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as caught:
        Model("no/such.gguf")
    assert caught.value.path == "no/such.gguf"


def test_path_with_nul_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="NUL"):
        Model("a\0b")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_truncated_file_is_a_bad_model(tmp_path: Path, share: float) -> None:
    whole = (MODELS / DENSE).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BadModel) as caught:
        Model(path)
    assert caught.value.path == str(path)


def test_text_file_and_folder_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("not a model\n" * 100)
    with pytest.raises(BadModel):
        Model(path)
    with pytest.raises((BadModel, ModelNotFound)):
        Model(tmp_path)


@pytest.mark.parametrize("offset", [4, 8, 16, 24, 60, 200, 5000])
def test_damaged_header_raises_and_never_aborts(tmp_path: Path, offset: int) -> None:
    damaged = bytearray((MODELS / SIMPLE).read_bytes())
    damaged[offset : offset + 8] = b"\xff" * 8
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(BadModel) as caught:  # an abort fails the whole run
        Model(path).close()
    assert caught.value.path == str(path)


def test_model_without_heads_cannot_draft_with_mtp() -> None:
    with pytest.raises(NoMtpHeads):
        Engine(model(SIMPLE), None, params("mtp"))


def test_ordinary_model_is_not_eagle3() -> None:
    with pytest.raises(NotEagle3):
        Engine(model(), model(SIMPLE), params("eagle3"))


def test_vocab_only_model_makes_no_engine() -> None:
    with Model(MODELS / DENSE, vocab_only=True) as vocabulary:
        assert vocabulary.tokenize("x").size
        with pytest.raises(InvalidArgument):
            Engine(vocabulary, None, params())


def test_missing_draft_model_is_refused() -> None:
    for draft_type in ("eagle3", "simple"):
        with pytest.raises((InvalidArgument, IncompatibleDraft)):
            Engine(model(), None, params(draft_type))


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    Model(MODELS / DENSE, progress=shares.append).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


class StopLoading(BaseException):
    """Raised in the progress callback, as KeyboardInterrupt would be."""


def test_exception_in_progress_stops_the_load_and_comes_out() -> None:
    calls: list[float] = []

    def stop(share: float) -> None:
        calls.append(share)
        raise StopLoading

    with pytest.raises(StopLoading):
        Model(MODELS / DENSE, progress=stop)
    assert len(calls) == 1


def test_closed_model_refuses_calls_and_closes_twice() -> None:
    closed = Model(MODELS / DENSE, vocab_only=True)
    closed.close()
    closed.close()
    assert closed.is_closed
    for call in (
        lambda: closed.tokenize("x"),
        lambda: closed.token_bytes(1),
        lambda: closed.format_chat([("user", "x")]),
        lambda: closed.meta("general.name"),
        lambda: Engine(closed),
    ):
        with pytest.raises(Closed):
            call()


def test_many_threads_tokenise_at_once() -> None:
    text = "def f(x):\n    return x * 2\n" * 200
    expected = model().tokenize(text).tolist()
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(model().tokenize(text).tolist()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
