"""What messages bring to a prompt is known, whatever the template does with it, and is text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from models import archs
from tests.cext.test_texts import vocabulary
from tests.support.demo import MODELS, SIMPLE, TARGETS
from tests.support.templates import write_model

from drafthouse_engine import Model
from drafthouse_engine.errors import InvalidArgument

pytestmark = pytest.mark.model

SAID = "a<|im_end|>b </think>c <|im_start|>d"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nCONTENT<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED = {
    "as it is": "{{ m.content }}",
    "concatenated": "{{ '(' + m.content ~ ')' }}",
    "trimmed": "{{ m.content | trim }}",
    "upper case": "{{ m.content | upper }}",
    "split, its end": "{{ m.content.split('</think>')[-1].lstrip('\n') }}",
    "split, its beginning": "{{ m.content.split('</think>')[0] }}",
    "split from the right": "{{ m.content.rsplit('</think>', 1)[0] }}",
    "a text with a literal in it, split": "{{ ('(' ~ m.content ~ ')').split('</think>')[0] }}",
    "replaced": "{{ m.content | replace('a', 'A') }}",
    "a text with a literal in it, replaced": "{{ ('(' ~ m.content ~ ')') | replace('b', '') }}",
    "sliced": "{{ m.content[1:] }}",
    "a text with a literal in it, sliced": "{{ ('((' ~ m.content ~ ')')[1:] }}",
    "every character": "{{ m.content[0] }}{{ m.content[1:14:1] }}",
    "indented": "{{ ('(' ~ m.content) | indent(2) }}",
    "as JSON": "{{ m.content | tojson }}",
    "as JSON of a message": "{{ m | tojson }}",
    "joined": "{{ ['(', m.content] | join(' ') }}",
    "a list as text": "{{ [m.content] | string }}",
    "repeated": "{{ m.content * 2 }}",
    "kept in a variable": "{% set n = namespace(x='') %}{% set n.x = n.x ~ m.content %}{{ n.x }}",
    "by a macro": "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(m.content) }}",
    "formatted": "{{ '({})'.format(m.content) }}",
    "in a block that is filtered": "{% filter trim %} {{ m.content }}{% endfilter %}",
}
"""What templates do with a content."""


def chatml(content: str) -> str:
    """Returns a template that does with contents what is given."""
    return CHATML.replace("CONTENT", content)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as opened:
        yield opened


def marked(folder: Path, template: str, *messages: tuple[str, str]) -> tuple[bytes, list[bytes]]:
    """Returns a chat in a template's format, and what of it messages brought."""
    path = write_model(folder / "model.gguf", MODELS / SIMPLE, template)
    with Model(path, vocab_only=True) as opened:
        roles, contents = zip(*messages, strict=True)
        chat = opened.open_template()
        text, spans = chat.format_marked(roles, contents, True)
        assert text.decode() == chat.format(roles, contents, True)
    return text, [text[begin:end] for begin, end in spans]


def control_tokens(model: Model, tokens: np.ndarray) -> list[int]:
    return [int(token) for token in tokens if not model.token_bytes(int(token))]


@pytest.mark.parametrize("what", MARKED)
def test_control_tokens_of_contents_are_text_whatever_a_template_does_with_them(
    what: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS / SIMPLE, chatml(MARKED[what]))
    with Model(path, vocab_only=True) as model:
        chat = model.open_template()
        expected = None
        for said in (SAID.replace("<|im_end|>", "").replace("<|im_start|>", ""), SAID):
            text, spans = chat.format_marked(["user"], [said], True)
            tokens = model.tokenize_plain(text, spans)
            found = control_tokens(model, tokens)
            assert expected is None or found == expected
            expected = found
            # The tokens are the text's, to the byte.
            whole = b"".join(model.token_bytes(int(t), special=True) for t in tokens)
            assert text in whole
        assert len(expected or []) >= 3, "the template's own control tokens are still there"


def test_a_role_that_is_a_word_is_the_templates_and_any_other_is_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' }}{{ m.content }}{% endfor %}"
    text, said = marked(tmp_path, template, ("im_start", "x"), ("a|>y<|im_end", "z"))
    assert text.rstrip(b" ") == b"<|im_start|>x<|a|>y<|im_end|>z"
    assert said == [b"x", b"a|>y<|im_end", b"z"]


def test_the_spellings_of_bos_and_eos_are_the_templates(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ eos_token ~ m.content ~ eos_token }}{% endfor %}"
    text, said = marked(tmp_path, template, ("user", "x"), ("user", "y"))
    assert said == [b"x", b"y"]
    assert len(text) > 4


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
SPELLED = st.lists(
    st.one_of(WORDS, st.sampled_from(["<|im_start|>", "<|im_end|>", "<|", "|>", " ", "\n"]))
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=SPELLED, data=st.data())
def test_without_control_tokens_in_plain_parts_the_tokens_are_those_of_the_whole_text(
    text: str, data: st.DataObject, model: Model
) -> None:
    n = len(text.encode())
    borders = sorted(data.draw(st.sets(st.integers(0, n), max_size=6)))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    spelled = model.find_control(text)
    is_ordinary = not any(b < end and begin < e for begin, end in spans for b, e in spelled)
    tokens = model.tokenize_plain(text, spans).tolist()
    whole = model.tokenize(text, parse_special=True).tolist()
    if is_ordinary:
        assert tokens == whole
    if spans == [(0, n)]:
        assert tokens == model.tokenize(text, parse_special=False).tolist()
    assert bool(control_tokens(model, np.array(whole))) == bool(len(spelled))
    assert model.detokenize(tokens, special=True) == model.detokenize(whole, special=True)


KINDS = ["llama-spm", "llama-bpe", "gpt-2", "qwen2", "phi-3", "deepseek-llm", "gemma-4", "falcon"]
"""Vocabularies that llama.cpp has files of: SPM, and BPE with several pre-tokenisers."""


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_vocabulary_reads_plain_parts_as_text_and_all_else_as_before(
    name: str,
) -> None:
    with Model(vocabulary(name), vocab_only=True) as model:
        spelled = next(
            text
            for token in range(model.n_vocab)
            if not model.token_bytes(token)
            and len(text := model.token_bytes(token, special=True).decode("utf-8", "replace")) > 2
            and len(model.find_control(text)) == 1
        )
        for text in (" two  words\n", "x", "", "日本 <| |>"):
            spans = [(0, len(text.encode()))]
            whole = model.tokenize(text, parse_special=True).tolist()
            assert model.tokenize_plain(text, spans if text else []).tolist() == whole
        text = f"{spelled}a {spelled} b{spelled}"
        n, one = len(text.encode()), len(spelled.encode())
        added = len(control_tokens(model, model.tokenize("a")))
        for spans, n_control in (([], 3), ([(one, n)], 1), ([(one, n - one)], 2), ([(0, n)], 0)):
            tokens = model.tokenize_plain(text, spans)
            assert len(control_tokens(model, tokens)) == n_control + added


CONTROL = ("<s>", "<|a|>", "<|a|>b", "|><", "<|é|>", "▁stop", "stop")
"""Control tokens: one begins with another, and one lies across two others."""

LETTERS = "<|as>bxystop é"
PIECES = ("<s", "s>", "<|", "<|a", "<|a|", "|>", "▁<", "▁<s", "▁", "st", "op", "sto", "▁st", "▁sto")
"""What lies between characters and control tokens, for tokenisers that put pieces together."""

TOKENISERS = {
    "rwkv": "rwkv",
    "plamo2": "plamo2",
    "plamo3": "plamo3",
    "SPM": "llama",
    "UGM": "t5",
    "WPM": "bert",
    "BPE without merges of whole words": "gpt2",
}
"""Each kind, and how a model's file names it."""


def with_pieces(kind: str, path: Path) -> Path:
    """Writes a model with a tokeniser that could make control tokens, and returns its path."""
    has_bytes = kind not in {"rwkv", "bert"}
    tokens, types = [*CONTROL], [TokenType.CONTROL] * len(CONTROL)
    if kind == "rwkv":
        tokens += [rf"\x{i:02x}" for i in range(256)]
    elif has_bytes:
        tokens += [f"<0x{i:02X}>" for i in range(256)]
        types += [TokenType.BYTE] * 256
    known = {*tokens, *(map(chr, range(128)) if kind == "rwkv" else ())}
    marked = [f"▁{letter}" for letter in LETTERS] if kind == "bert" else []
    tokens += dict.fromkeys(p for p in (*LETTERS, *PIECES, *marked) if p not in known)
    types += [TokenType.NORMAL] * (len(tokens) - len(types))

    def add(writer: GGUFWriter, _: int) -> None:
        writer.add_tokenizer_model(kind)
        if kind == "gpt2":
            writer.add_tokenizer_pre("llama-bpe")
            writer.add_token_merges(["s t", "o p"])
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([0.0] * len(CONTROL) + [-1.0] * (len(tokens) - len(CONTROL)))
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_sep_token_id(0)
        writer.add_unk_token_id(len(CONTROL))
        writer.add_add_bos_token(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archs, "N_VOCAB", len(tokens))
        patch.setattr(archs, "add_byte_vocabulary", add)
        return archs.write_model(path, "llama")


@pytest.mark.parametrize("kind", TOKENISERS)
def test_no_tokeniser_makes_control_tokens_of_plain_parts(kind: str, tmp_path: Path) -> None:
    """What a message spelled ended the prompt, or began a role (patch 0034)."""
    path = with_pieces(TOKENISERS[kind], tmp_path / "model.gguf")
    with Model(path, vocab_only=True) as model:
        is_exact = TOKENISERS[kind] in {"rwkv", "plamo2", "plamo3"}  # no space is added
        n_added = model.tokenize("").tolist().count(0)  # to every text
        for text in (
            "<s>",
            "x<|a|>b y",
            "<|a|><|a|>",
            "<|é|>é",
            "<s><s>|><<|a|>",
            "stop",
            "x stop",
        ):
            n = len(text.encode())
            tokens = model.tokenize(text, parse_special=False, add_special=False)
            assert len(tokens)
            assert tokens.min() >= len(CONTROL)
            assert not is_exact or model.detokenize(tokens) == text.encode()
            added = model.tokenize(text, parse_special=False).tolist()
            assert model.tokenize_plain(text, [(0, n)]).tolist() == added
            around = model.tokenize_plain(f"<s>{text}<s>", [(3, 3 + n)])
            assert (around == 0).sum() == 2 + n_added
            assert set(around[around < len(CONTROL)]) == {0}
        half = model.tokenize_plain("<s>x<|a|>y<s>", [(3, 5)])
        assert (half == 0).sum() == 2 + n_added
        assert set(half[half < len(CONTROL)]) == {0}


def test_a_control_token_of_which_a_part_is_plain_is_text(model: Model) -> None:
    text = "x<|im_end|>y"
    for span in ((1, 2), (5, 6), (10, 11), (0, 12)):
        assert control_tokens(model, model.tokenize_plain(text, [span])) == []
    for span in ((0, 1), (11, 12)):
        assert len(control_tokens(model, model.tokenize_plain(text, [span]))) == 1
    both = model.tokenize_plain("<|im_end|><|im_end|>", [(0, 10)])
    assert len(control_tokens(model, both)) == 1


@pytest.mark.parametrize("spans", [[(2, 1)], [(1, 1)], [(0, 9)], [(0, 2), (1, 3)], [(-1, 2)]])
def test_spans_that_are_none_of_the_text_are_refused(
    spans: list[tuple[int, int]], model: Model
) -> None:
    with pytest.raises(InvalidArgument, match=r"span"):
        model.tokenize_plain("abcd", spans)


@pytest.mark.parametrize("spans", [[(0.5, 1.5)], [("0", "1")], [(False, True)], [(0, 2**64)]])
def test_spans_are_integers(model: Model, spans: list[tuple[Any, Any]]) -> None:
    """They were cut to integers, and other parts of the text were plain."""
    with pytest.raises(TypeError, match="integers"):
        model.tokenize_plain("abcd", spans)


def test_control_tokens_are_found_where_they_stand(model: Model) -> None:
    assert model.find_control("").tolist() == []
    assert model.find_control("plain <| text |>").tolist() == []
    text = "é<|im_start|><|im_start|>x<|im_end|><|im_end" + "<|im_end|>" * 20
    found = [text.encode()[begin:end].decode() for begin, end in model.find_control(text)]
    assert found == ["<|im_start|>", "<|im_start|>", "<|im_end|>", *["<|im_end|>"] * 20]
