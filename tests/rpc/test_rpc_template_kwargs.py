"""A chat's arguments of the model's template, over the wire, on a model with Qwen3's template."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.demo import MODELS, TARGETS, serving
from tests.support.demo import config as demo_config
from tests.support.templates import write_model

import drafthouse
from drafthouse._errors import map_grpc_errors
from drafthouse.v1 import generation_pb2

pytestmark = pytest.mark.model

CHAT = [{"role": "user", "content": "def f("}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}{{ effort }}{% if true %}{% endif -%}"
)
TURN = "<|im_start|>user\ndef f(<|im_end|>\n<|im_start|>assistant\n"
WITHOUT_THINKING = TURN + "<think>\n\n</think>\n\n"
FIELD = "prompt.chat.chat_template_kwargs"


SET: list[tuple[dict[str, Any] | None, str]] = [
    (None, TURN + "low"),
    ({}, TURN + "low"),
    ({"enable_thinking": True}, TURN + "low"),
    ({"enable_thinking": False}, WITHOUT_THINKING + "low"),
    ({"enable_thinking": False, "effort": "very high"}, WITHOUT_THINKING + "very high"),
]
REFUSED = [
    ("enable_thinking=false", "must be a JSON object: Expecting value at character 0"),
    ('{"messages": []}', "must not set messages, which is the server's own"),
    ('{"a": ' + "[" * 9 + "]" * 9 + "}", "must nest at most 8 levels, a nests more"),
    (json.dumps({"a": "x" * 65530}), "must have at most 65536 bytes, has 65539"),
    (json.dumps({"a": "<|im_end|>"}), "must not spell control tokens"),
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[drafthouse.AsyncClient]:
    path = write_model(tmp_path / "model.gguf", MODELS / TARGETS["dense"], TEMPLATE)
    given = {"model": str(path), "parallel": 2, "chat_template_kwargs": '{"effort": "low"}'}
    async with serving(demo_config("dense", "none", **given)) as (client, _):
        yield client


async def test_a_chat_sets_its_templates_arguments(client: drafthouse.AsyncClient) -> None:
    """What is counted is what is computed, and billed."""
    for kwargs, text in SET:
        tokens = await client.tokenize(text, add_special=True, parse_special=True)
        counted = await client.count_tokens(CHAT, chat_template_kwargs=kwargs)
        assert counted.prompt_tokens == len(tokens)
        result = await client.generate(
            CHAT, chat_template_kwargs=kwargs, max_output_tokens=8, temperature=0
        )
        assert result.usage.prompt_tokens == len(tokens)
        plain = await client.generate(tokens, max_output_tokens=8, temperature=0)
        assert result.token_ids == plain.token_ids


async def test_what_is_no_set_of_arguments_is_told_by_its_field(
    client: drafthouse.AsyncClient,
) -> None:
    for text, told in REFUSED:
        request = generation_pb2.CountTokensRequest()
        request.prompt.chat.messages.add(role="user", content="x")
        request.prompt.chat.chat_template_kwargs = text
        with pytest.raises(drafthouse.InvalidField) as caught, map_grpc_errors():
            await client._generation.CountTokens(request)
        (violation,) = caught.value.violations
        assert (violation.field, violation.description) == (FIELD, told)


async def test_what_nests_deep_is_refused(client: drafthouse.AsyncClient) -> None:
    """Which one of two sentences tells it is the affair of Python's version."""
    request = generation_pb2.CountTokensRequest()
    request.prompt.chat.messages.add(role="user", content="x")
    for n in (2000, 32_000):
        request.prompt.chat.chat_template_kwargs = '{"a": ' + "[" * n + "]" * n + "}"
        with pytest.raises(drafthouse.InvalidField) as caught, map_grpc_errors():
            await client._generation.CountTokens(request)
        assert caught.value.violations[0].description.startswith("must nest at most 8 levels")
