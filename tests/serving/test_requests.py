"""The rules of requests, on plain values; and that all who name sampling options name the same."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tracemalloc
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.built import needs_extension

import drafthouse
from drafthouse import _options as drafthouse_options
from drafthouse.v1 import generation_pb2
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.rpc.requests import to_generation, to_prompt
from drafthouse_server.serving.requests import (
    KNOBS,
    MODE_OFF,
    N_VIOLATIONS_MAX,
    ChatMessage,
    GenerationRequest,
    Prompt,
    Range,
    RequestRules,
    located,
)
from drafthouse_server.step import SamplingOptions

ENGINE = FakeEngine()
RULES = RequestRules(ENGINE.card, ENGINE.limits, "mtp", 3)
TEXT = Prompt(text="x")


def violations(request: GenerationRequest) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        RULES.check(request)
    return {violation.field: violation.description for violation in caught.value.violations}


def numbers(descriptor: Any, path: str) -> Iterator[str]:
    """Yields the paths of all optional numbers below a message; lists and texts are no knobs."""
    for field in descriptor.fields:
        inner = f"{path}.{field.name}"
        if field.is_repeated or field.type == field.TYPE_STRING:
            continue
        if field.message_type is not None:
            yield from numbers(field.message_type, inner)
        else:
            yield inner


def test_the_protos_are_the_one_list_of_sampling_options() -> None:
    descriptor = generation_pb2.SamplingOptions.DESCRIPTOR
    assert {knob.path for knob in KNOBS} == set(numbers(descriptor, "sampling"))
    names = {knob.name for knob in KNOBS}
    others = {"grammar", "logit_bias", "dry_breakers", "ignore_eos", "logprobs"}
    assert {field.name for field in dataclasses.fields(SamplingOptions)} == names | others


class TestWithTheExtension:
    pytestmark = needs_extension()

    def test_the_engine_names_the_same_options(self) -> None:
        import drafthouse_engine

        parameters = set(inspect.signature(drafthouse_engine.SamplingParams).parameters)
        assert {field.name for field in dataclasses.fields(SamplingOptions)} <= parameters


def test_the_sdk_can_give_every_option() -> None:
    options: Any = dict.fromkeys(drafthouse_options.GenerateOptions.__annotations__, 1)
    options |= {
        "model": "m",
        "dry": drafthouse.Dry(1, 1, 1, 1, ["x"]),
        "xtc": drafthouse.Xtc(1, 1),
        "logit_bias": {1: 2.0},
        "grammar": "root ::= [a]",
        "stop": "y",
        "stop_token_ids": [7],
        "ignore_end_token": True,
        "log_probabilities": True,
        "progress": True,
        "speculation": "mtp",
        "chat_template_kwargs": {"a": 1},
        "end_user": "u",
    }
    chat = [drafthouse.ChatMessage("user", "x")]
    asked = to_generation(drafthouse_options.generate_request(chat, options))
    assert asked.prompt.chat_template_kwargs == '{"a": 1}'
    assert set(asked.knobs) == {knob.name for knob in KNOBS}
    for field in dataclasses.fields(GenerationRequest):
        assert getattr(asked, field.name), field.name


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.path)
def test_a_number_outside_its_rule_is_named_by_its_path(knob: Any) -> None:
    for value in (math.nan, math.inf, -math.inf, -11.0):
        found = violations(GenerationRequest(TEXT, {knob.name: value}))
        assert list(found) == [knob.path]
        assert str(knob.rule) in found[knob.path]


def test_edges_belong_to_their_rules() -> None:
    for knob in KNOBS:
        ends = [knob.rule.high] if math.isfinite(knob.rule.high) else []
        for value in [*ends, *([] if knob.rule.is_open else [knob.rule.low])]:
            wanted = RULES.check(GenerationRequest(TEXT, {knob.name: value}))
            assert getattr(wanted.sampling, knob.name) == value


@pytest.mark.parametrize(("asked", "taken"), [(1e-45, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (0, 0.0)])
def test_a_temperature_that_logits_cannot_be_divided_by_is_none(asked: float, taken: float) -> None:
    wanted = RULES.check(GenerationRequest(TEXT, {"temperature": asked}))
    assert wanted.sampling.temperature == taken


def test_all_violations_are_told_at_once() -> None:
    request = GenerationRequest(
        Prompt(messages=[ChatMessage("", "x"), ChatMessage("user", "x")]),
        {"temperature": -1, "top_p": 0},
        has_dry=True,
        dry_breakers=["x" * 65],
        logit_bias=[(10**6, 0.0), (0, 101.0)],
        grammar="x" * 65537,
        stops=["", "y" * 257],
        stop_token_ids=[-1],
        n_output_max=0,
        mode="eagle3",
        n_draft=99,
        priority=101,
    )
    assert set(violations(request)) == {
        "prompt.chat.messages[0].role",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.dry.breakers[0]",
        "sampling.logit_bias[0].token_id",
        "sampling.logit_bias[1].bias",
        "sampling.grammar",
        "stop.sequences[0]",
        "stop.sequences[1]",
        "stop.token_ids[0]",
        "max_output_tokens",
        "speculation.mode",
        "speculation.max_draft_tokens",
        "priority",
    }


@pytest.mark.parametrize(
    ("request_", "field", "description"),
    [
        (
            GenerationRequest(TEXT, {"seed": 4294967295}),
            "sampling.seed",
            "must be in [0, 4294967294], is 4294967295",
        ),
        (
            GenerationRequest(TEXT, {"top_k": -2147483648}),
            "sampling.top_k",
            "must be >= 0, is -2147483648",
        ),
        (
            GenerationRequest(TEXT, {"temperature": 10.000000953674316}),
            "sampling.temperature",
            "must be in [0, 10], is 10.000001",
        ),
        (GenerationRequest(TEXT, {"top_p": 1.5}), "sampling.top_p", "must be in (0, 1], is 1.5"),
        (
            GenerationRequest(TEXT, has_dry=True, dry_breakers=["x", ""]),
            "sampling.dry.breakers[1]",
            "must have 1 to 64 bytes, has 0",
        ),
        (
            GenerationRequest(TEXT, has_dry=True, dry_breakers=["x\0"]),
            "sampling.dry.breakers[0]",
            "must not have a NUL character, has one at byte 1",
        ),
        (
            GenerationRequest(TEXT, grammar='root ::= "é\0"'),
            "sampling.grammar",
            "must not have a NUL character, has one at byte 12",
        ),
        (
            GenerationRequest(Prompt(messages=[ChatMessage("a", "b"), ChatMessage("a", "b\0")])),
            "prompt.chat.messages[1].content",
            "must not have a NUL character, has one at byte 1",
        ),
        (
            GenerationRequest(Prompt(messages=[ChatMessage("a\0", "b")])),
            "prompt.chat.messages[0].role",
            "must not have a NUL character, has one at byte 1",
        ),
        (
            GenerationRequest(TEXT, mode="eagle3"),
            "speculation.mode",
            "must be mtp or off on this server, is eagle3",
        ),
        (
            GenerationRequest(TEXT, grammar='root ::= "x"', ignore_eos=True),
            "stop.ignore_end_token",
            "must not be set with a grammar, whose end allows the end token alone",
        ),
    ],
    ids=range(11),
)
def test_a_violation_names_its_field_its_rule_and_its_value(
    request_: GenerationRequest, field: str, description: str
) -> None:
    assert violations(request_) == {field: description}


def test_a_server_that_drafts_nothing_offers_one_mode() -> None:
    rules = RequestRules(ENGINE.card, ENGINE.limits, MODE_OFF, 0)
    with pytest.raises(InvalidRequest, match="must be off on this server, is mtp"):
        rules.check(GenerationRequest(TEXT, mode="mtp"))


def test_of_token_ids_all_that_are_wrong_are_told() -> None:
    n_vocab = ENGINE.card.n_vocab
    request = GenerationRequest(Prompt(tokens=[-1, 0, n_vocab]), stop_token_ids=[-2, n_vocab - 1])
    assert set(violations(request)) == {
        "prompt.tokens.ids[0]",
        "prompt.tokens.ids[2]",
        "stop.token_ids[0]",
    }
    with pytest.raises(InvalidRequest) as caught:
        RULES.check_token_ids([-5, 1, 99_999, *[-1] * 99])
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["token_ids[0]", *(f"token_ids[{i}]" for i in range(2, 17))]
    assert len(fields) == N_VIOLATIONS_MAX


def test_a_list_that_is_too_long_is_told_with_all_else() -> None:
    many = GenerationRequest(
        TEXT,
        {"temperature": -1},
        has_dry=True,
        dry_breakers=["x"] * 33,
        stops=["a"] * 17,
        stop_token_ids=[1] * 65,
    )
    found = violations(many)
    assert found["stop.sequences"] == "must have at most 16 entries, has 17"
    assert found["stop.token_ids"] == "must have at most 64 entries, has 65"
    assert found["sampling.dry.breakers"] == "must have at most 32 entries, has 33"
    assert "sampling.temperature" in found


def test_lists_are_read_as_far_as_they_may_be_long() -> None:
    request = GenerationRequest(TEXT, stops=["x" * 300] * 1000)
    assert len(violations(request)) == N_VIOLATIONS_MAX == 16  # and no more are looked for


def test_a_chat_of_empty_messages_is_looked_at_until_sixteen_are_told() -> None:
    looked_at = [0]

    class Counted(Collection[ChatMessage]):
        def __len__(self) -> int:
            return 1000

        def __contains__(self, _: object) -> bool:
            return False

        def __iter__(self) -> Iterator[ChatMessage]:
            for _ in range(1000):
                looked_at[0] += 1
                yield ChatMessage("", "")

    request = GenerationRequest(Prompt(messages=Counted()))
    assert len(violations(request)) == N_VIOLATIONS_MAX
    assert looked_at[0] <= N_VIOLATIONS_MAX + 1


def test_biases_beyond_those_allowed_cost_nothing_but_their_message() -> None:
    """An empty one has two bytes in a message: whoever reads them all holds up every stream."""
    asked = generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(text="x"))
    asked.sampling.logit_bias.extend([generation_pb2.LogitBias()] * 100_000)
    tracemalloc.start()
    try:
        found = violations(to_generation(asked))
        _, n_bytes_max = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {"sampling.logit_bias": "must have at most 1024 entries, has 100000"}
    assert n_bytes_max < 1 << 20


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt(), "prompt"),
        (Prompt(text=""), "prompt.text"),
        (Prompt(tokens=[]), "prompt.tokens.ids"),
        (Prompt(tokens=[1, 2, -5]), "prompt.tokens.ids[2]"),
        (Prompt(messages=[]), "prompt.chat.messages"),
        (Prompt(text="x" * 10**7), "prompt.text"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RULES.check_prompt(prompt)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_of_more_messages_than_the_context_has_tokens_none_is_read() -> None:
    chat = generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage()] * 50_000)
    prompt = to_prompt(generation_pb2.Prompt(chat=chat))
    assert prompt.messages is not None
    read = iter(prompt.messages)
    with pytest.raises(InvalidRequest) as caught:
        RULES.check_prompt(prompt)
    [violation] = caught.value.violations
    assert violation.field == "prompt.chat.messages"
    assert "at most 1024 entries, has 50000" in violation.description
    assert next(read) == ChatMessage("", "")  # they are made when they are asked for


def test_what_is_not_given_is_left_to_the_server() -> None:
    wanted = RULES.check(GenerationRequest(TEXT))
    assert wanted.sampling == SamplingOptions()
    assert (wanted.mode, wanted.n_draft, wanted.n_output_max) == ("mtp", None, None)


@pytest.mark.parametrize(
    ("mode", "n_draft", "expected"),
    [
        (MODE_OFF, None, (MODE_OFF, 0)),
        (MODE_OFF, 3, (MODE_OFF, 0)),
        (MODE_OFF, 99, (MODE_OFF, 0)),
        ("mtp", 2, ("mtp", 2)),
        (None, 0, (MODE_OFF, 0)),
    ],
)
def test_drafts_can_be_turned_off(
    mode: str | None, n_draft: int | None, expected: tuple[str, int]
) -> None:
    wanted = RULES.check(GenerationRequest(TEXT, mode=mode, n_draft=n_draft))
    assert (wanted.mode, wanted.n_draft) == expected


@given(value=st.floats(), low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6), is_open=st.booleans())
def test_a_range_holds_what_it_says(value: float, low: float, span: float, is_open: bool) -> None:
    rule = Range(low, low + span, is_open=is_open)
    is_inside = low < value <= low + span or (not is_open and value == low)
    assert (value in rule) == (is_inside and math.isfinite(value))


def test_errors_of_the_engine_get_the_paths_of_requests() -> None:
    given = [FieldViolation(name, "no") for name in ("penalty_repeat", "grammar", "text", "odd")]
    found = [violation.field for violation in located(InvalidRequest(given)).violations]
    assert found == ["sampling.penalties.repeat", "sampling.grammar", "prompt.text", "odd"]
