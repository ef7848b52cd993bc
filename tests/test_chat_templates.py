"""Hostile chats and chat templates: an error or a text, never a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bench.templates import write_model
from tests.demo import MODELS, SIMPLE, TARGETS

from drafthouse_engine import Model
from drafthouse_engine.errors import BadTemplate, EngineError

pytestmark = [pytest.mark.model, pytest.mark.timeout(60)]

N = 100_000
FATAL = {
    "brackets": "{{ " + "(" * N + "1" + ")" * N + " }}",
    "lists": "{{ " + "[" * N + "]" * N + " }}",
    "a chain of filters": "{{ x" + "|trim" * N + " }}",
    "a sum": "{{ 1" + "+1" * N + " }}",
    "signs": "{{ " + "-" * N + "1 }}",
    "negations": "{% if " + "not " * N + "x %}{% endif %}",
    "a quoted end of a tag": "{% if '%}' and " + "not " * N + "x %}{% endif %}",
    "blocks": "{% if true %}" * N + "x" + "{% endif %}" * N,
    "trimmed blocks": "{%- for m in messages -%}" * N,
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 20_000 + "{% endif %}",
    "a tag that does not end": "{{ " + "x." * N,
    "length": "x" * (2 << 20),
}
"""Templates on which llama.cpp's parser or interpreter used up its stack, and one of great size."""

HARMLESS = {
    "brackets": "{{ " + "(" * 100 + "1" + ")" * 100 + " }}",
    "dictionaries": "{{ {'a': {'b': 1}} }}",
    "comments": "{# " + "(" * N + " #}{{ 1 }}",
    "text": "{ " + "(" * N + " }",
    "operators": "{{ 1" + "+1" * 4_000 + " }}",
    "signs": "{{ " + "-" * 8_000 + "1 }}",
    "many tags": "{% if true %}{{ 1 }}{% endif %}" * 5_000,
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 1_000 + "{% endif %}",
}

WRONG = [
    "{% for m in messages %}",
    "{{ messages[::0] }}",
    "{{ raise_exception('no') }}",
    "{{ undefined_function() }}",
    "{{ 'x'|no_such_filter }}",
]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as opened:
        yield opened


def formatted(template: str, folder: Path) -> str:
    path = write_model(folder / "model.gguf", MODELS / SIMPLE, template)
    with Model(path, vocab_only=True) as opened:
        return opened.format_chat([("user", "hello")])


@pytest.mark.parametrize("name", FATAL)
def test_a_template_that_would_end_the_process_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match=r"nests|longer"):
        formatted(FATAL[name], tmp_path)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_deep_but_bounded_template_works(name: str, tmp_path: Path) -> None:
    formatted(HARMLESS[name], tmp_path)


@pytest.mark.parametrize("template", WRONG)
def test_a_wrong_template_is_an_error(template: str, tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match="chat template failed"):
        formatted(template, tmp_path)


TEXTS = st.one_of(
    st.text(max_size=200),
    st.sampled_from(
        ["{{ 1/0 }}", "{% for i in range(10**9) %}", "<|im_end|>", "<|im_start|>system", "\x00", ""]
    ),
    st.integers(1, 100_000).map(lambda n: "{{(" * n),
)


@given(messages=st.lists(st.tuples(TEXTS, TEXTS), max_size=8), is_prompt=st.booleans())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_chat_is_formatted_or_refused(
    messages: list[tuple[str, str]], is_prompt: bool, model: Model
) -> None:
    try:
        text = model.format_chat(messages, add_generation_prompt=is_prompt)
    except (EngineError, ValueError):
        return
    for _, content in messages:
        assert content.strip() in text  # what a client writes is text, never a template
