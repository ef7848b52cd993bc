"""What a chat sets of its template's arguments: read as JSON, rendered by the engine, bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.demo import MODELS, SIMPLE
from tests.support.templates import write_model

from drafthouse_server.engine.llama_text import LlamaText
from drafthouse_server.engine.text_jobs import TextJob, perform
from drafthouse_server.errors import InvalidRequest
from drafthouse_server.serving.requests import located
from drafthouse_server.template_kwargs import read

pytestmark = pytest.mark.model

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""What Qwen3's template does of thinking."""
TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_THINKING = TURN + "<think>\n\n</think>\n\n"
OFF, ON = '{"enable_thinking": false}', '{"enable_thinking": true}'

NAMED = "must have names of 1 to 64 letters, digits and _, the first no digit, has "
REFUSED = {
    "{": "must be a JSON object: Expecting property name enclosed in double quotes at character 1",
    "[1]": 'must be a JSON object, such as {"enable_thinking": false}',
    "null": 'must be a JSON object, such as {"enable_thinking": false}',
    '{"a": 1, "a": 2}': "must not have a name twice in one object",
    '{"a": {"b": 1, "b": 2}}': "must not have a name twice in one object",
    '{"a": NaN}': "must not have NaN, which is no number of JSON",
    '{"a": -Infinity}': "must not have -Infinity, which is no number of JSON",
    '{"a": 1e999}': "must have numbers that a double holds, a has one beyond",
    '{"a": 9007199254740993}': "must have integers in [-2^53, 2^53], a has one beyond",
    '{"a": "\\u0000"}': "must not have NUL characters or lone surrogates, a has",
    '{"a": ["\\ud800"]}': "must not have NUL characters or lone surrogates, a has",
    '{"a b": 1}': NAMED + "'a b'",
    '{"": 1}': NAMED + "''",
    '{"a=1 %}{{ x }}{% set b": 1}': NAMED + "'a=1 %}{{ x }}{% set b'",
    '{"é": 1}': NAMED + "'\\xe9'",
    '{"1a": 1}': NAMED + "'1a'",
    '{"' + "a" * 65 + '": 1}': NAMED + repr("a" * 65),
    '{"a": [[[[[[[[1]]]]]]]]}': "must nest at most 8 levels, a nests more",
    '{"a": ' + "[" * 4000 + "}": "must nest at most 8 levels",
    '{"a": "' + "x" * 65536 + '"}': "must have at most 65536 bytes, has 65545",
    json.dumps({f"a{i}": 1 for i in range(65)}): "must have at most 64 arguments, has 65",
    '{"enable_thinking": "false"}': "must have true or false for enable_thinking",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_set_of_arguments_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(REFUSED[text])}$"):
        read(text)


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"],
)
def test_nothing_is_set_that_is_not_the_callers(name: str) -> None:
    with pytest.raises(ValueError, match=rf"must not set {name}, which is the server's own"):
        read(json.dumps({name: 1}))


def text_model(folder: Path, template: str, defaults: str = "") -> Any:
    template += "{% if true %}{% endif -%}"  # drops the blanks that the file is filled up with
    path = write_model(folder / "model.gguf", MODELS / SIMPLE, template)
    return LlamaText.open(str(path), chat_template_kwargs=defaults)


def prompt(model: Any, kwargs: str = "", content: str = "hi") -> str:
    answer = perform(TextJob(messages=[("user", content)], chat_template_kwargs=kwargs), model)
    assert answer.problems == ()
    return b"".join(model.token_bytes(t, special=True) for t in answer.tokens or ()).decode()


def refusal(model: Any, kwargs: str) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        model.tokenize_chat([("user", "hi")], kwargs)
    (violation,) = located(caught.value).violations
    return violation.field, violation.description


def test_a_chat_turns_thinking_off(tmp_path: Path) -> None:
    model = text_model(tmp_path, QWEN3)
    assert prompt(model) == prompt(model, ON) == TURN
    assert prompt(model, OFF) == WITHOUT_THINKING
    assert prompt(model, '{"unknown": 1}') == TURN
    assert prompt(model) == TURN, "it is of that chat alone"


def test_what_a_chat_does_not_set_the_server_does(tmp_path: Path) -> None:
    template = QWEN3 + "{{ effort }}"
    model = text_model(tmp_path, template, '{"enable_thinking": false, "effort": "low"}')
    assert prompt(model) == WITHOUT_THINKING + "low"
    assert prompt(model, ON) == TURN + "low"
    assert prompt(model, '{"effort": "high"}') == WITHOUT_THINKING + "high"


def test_arguments_spell_no_control_tokens(tmp_path: Path) -> None:
    model = text_model(tmp_path, "{{ messages[0].content }}{{ a }}")
    told = "prompt.chat.chat_template_kwargs", "must not spell control tokens"
    for value in ("x<|im_end|>", [{"b": "<|im_end|>"}], {"<|im_end|>": 1}):
        assert refusal(model, json.dumps({"a": value})) == told
    assert refusal(model, "{") == (
        told[0],
        "must be a JSON object: Expecting property name enclosed in double quotes at character 1",
    )


def test_control_tokens_in_contents_are_text_beside_arguments(tmp_path: Path) -> None:
    model = text_model(tmp_path, QWEN3)
    said = [("user", "<|im_end|>")]
    n_own = len(model.tokenize_chat(said)) + len(
        model.tokenize("<think>\n\n</think>\n\n", add_special=False, parse_special=True)
    )
    assert len(model.tokenize_chat(said, OFF)) == n_own


def test_what_a_template_says_of_an_argument_reaches_the_caller(tmp_path: Path) -> None:
    template = "{% if effort == 'no' %}{{ raise_exception('low or high') }}{% endif %}x"
    field, description = refusal(text_model(tmp_path, template), '{"effort": "no"}')
    assert field == "prompt.chat"
    assert "low or high" in description


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose template writes an argument as JSON between two letters."""
    return text_model(tmp_path_factory.mktemp("writer"), "a{{ value|tojson }}z")


_CHARACTERS = st.characters(exclude_characters="\0<", exclude_categories=["Cs"])
_TEXTS = st.one_of(
    st.text(_CHARACTERS, max_size=12),
    st.sampled_from(["%}", "{{ x }}", "{#", "\\", '"', "'", "\r\n"]),
)
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 53), 1 << 53),
        st.integers(-9999, 9999).map(lambda n: n + 0.5),
        _TEXTS,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)
    ),
    max_leaves=4,  # so that it nests less than it may
)


@settings(max_examples=200)
@given(value=_VALUES)
def test_a_template_is_given_the_value_that_was_sent(value: Any, writer: Any) -> None:
    kwargs = json.dumps({"value": value})
    assert json.loads(prompt(writer, kwargs)[1:-1]) == value


def test_two_arguments_together_spell_no_control_token(tmp_path: Path) -> None:
    """What a template makes of them is text, as contents are."""
    model = text_model(tmp_path, "{{ messages[0].content }}{{ a + b }}{{ c|join }}")
    pair = {"a": "<|im_", "b": "end|>", "c": ["<|im_", "end|>"]}
    tokens = model.tokenize_chat([("user", "hi")], json.dumps(pair))
    (end,) = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert end not in tokens
    assert prompt(model, json.dumps(pair)) == "hi" + 2 * "<|im_end|>"


def test_a_template_s_line_is_told_as_it_stands(tmp_path: Path) -> None:
    model = text_model(tmp_path, "x\n{{ raise_exception(effort) }}")
    assert "line 2" in refusal(model, '{"effort": "no"}')[1]
