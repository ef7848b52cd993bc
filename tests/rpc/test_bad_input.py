"""Bad input against the real engine over gRPC: its documented error, and the server goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.demo import config, prompts, serving, vocabulary

import drafthouse
from drafthouse import AsyncClient

pytestmark = pytest.mark.model

N_CONTEXT = 1024
PROMPT = "def parse("


@pytest.fixture(params=["mtp", "eagle3"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncClient]:
    async with serving(config("dense", request.param, parallel=4)) as (client, _):
        yield client


def call(prompt: Any = PROMPT, **options: Any) -> tuple[Any, dict[str, Any]]:
    return prompt, options


BAD_FIELDS: dict[str, tuple[tuple[Any, dict[str, Any]], str]] = {
    "empty text": (call(""), "prompt"),
    "no tokens": (call([]), "prompt"),
    "token id too large": (call([1, 2, 99_999]), "prompt.tokens.ids[2]"),
    "negative token id": (call([1, -1]), "prompt.tokens.ids[1]"),
    "NaN temperature": (call(temperature=float("nan")), "sampling.temperature"),
    "infinite temperature": (call(temperature=float("inf")), "sampling.temperature"),
    "negative temperature": (call(temperature=-0.5), "sampling.temperature"),
    "top-p of zero": (call(top_p=0.0), "sampling.top_p"),
    "NaN bias": (call(logit_bias={5: float("nan")}), "sampling.logit_bias[0].bias"),
    "bias on no token": (call(logit_bias={99_999: 1.0}), "sampling.logit_bias[0].token_id"),
    "grammar that does not parse": (call(grammar="root ::= ("), "sampling.grammar"),
    "grammar without a root": (call(grammar='a ::= "a"'), "sampling.grammar"),
    "left-recursive grammar": (call(grammar='root ::= root "a"'), "sampling.grammar"),
    "grammar nested without end": (call(grammar="root ::= " + "(" * 60_000), "sampling.grammar"),
    "grammar with a NUL": (call(grammar='root ::= "a\0"'), "sampling.grammar"),
    "breaker of nothing": (call(dry=drafthouse.Dry(breakers=[""])), "sampling.dry.breakers[0]"),
    "message with a NUL": (
        call([{"role": "user", "content": "a"}, {"role": "user", "content": "b\0"}]),
        "prompt.chat.messages[1].content",
    ),
    "more drafts than the server makes": (call(max_draft_tokens=999), "speculation"),
    "another draft type": (call(speculation="simple"), "speculation.mode"),
    "no output": (call(max_output_tokens=0), "max_output_tokens"),
}


async def works(client: AsyncClient) -> None:
    result = await client.generate(PROMPT, max_output_tokens=8, temperature=0.0)
    assert 1 <= len(result.token_ids) <= 8


@pytest.mark.parametrize("name", BAD_FIELDS)
async def test_a_bad_field_is_named_and_the_server_goes_on(client: AsyncClient, name: str) -> None:
    (prompt, options), field = BAD_FIELDS[name]
    with pytest.raises(drafthouse.InvalidField) as caught:
        await client.generate(prompt, **options)
    assert caught.value.reason == "INVALID_FIELD"
    assert any(violation.field.startswith(field) for violation in caught.value.violations)
    await works(client)


@pytest.mark.parametrize("n_tokens", [N_CONTEXT, N_CONTEXT + 1, 20_000])
async def test_a_prompt_beyond_the_context(client: AsyncClient, n_tokens: int) -> None:
    with pytest.raises(drafthouse.ContextTooLong) as caught:
        await client.generate([5] * n_tokens)
    assert caught.value.metadata["promptTokens"] == str(n_tokens)
    assert caught.value.metadata["contextTokens"] == str(N_CONTEXT)
    await works(client)


async def test_prompt_and_output_beyond_the_context(client: AsyncClient) -> None:
    with pytest.raises(drafthouse.ContextTooLong):
        await client.generate(prompts((900,))[0], max_output_tokens=200)
    result = await client.generate(
        prompts((900,))[0], temperature=0.0, ignore_end_token=True, timeout=100
    )
    assert result.finish_reason is drafthouse.FinishReason.LENGTH
    assert result.usage.prompt_tokens + result.usage.output_tokens == N_CONTEXT


async def test_a_megabyte_of_text_is_refused_before_it_is_tokenised(client: AsyncClient) -> None:
    with pytest.raises(drafthouse.InvalidArgument):
        await client.generate("a" * 1_000_000)
    await works(client)


async def test_a_grammar_holds_for_drafted_tokens_too(client: AsyncClient) -> None:
    grammar = "root ::= [0-9]+"
    result = await client.generate(PROMPT, grammar=grammar, max_output_tokens=24, seed=3)
    end = vocabulary().eos_token_ids
    assert all(c.isdigit() for c in result.text)
    assert result.text or result.token_ids[-1] in end
    assert result.speculation.n_drafted > 0
