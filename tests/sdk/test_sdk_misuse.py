"""What the SDK is given wrongly is told at once, by a class that the documentation names."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import re
from array import array
from typing import Any

import numpy as np
import pytest
from scripts import reference

import drafthouse
from drafthouse._options import _RULES, generate_request
from drafthouse._retry import Attempts, RetryBudget

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("key", ["0123456789abcdef\n", "schlüssel", "a\0b"])
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str, kind: str) -> None:
    """Calls failed as if the server were at fault, and one of asyncio by an error of grpc."""
    with pytest.raises(ValueError, match="no header can carry the key") as caught:
        getattr(drafthouse, kind)(NOBODY, api_key=key)
    assert key.strip() not in str(caught.value)


@pytest.mark.parametrize("request_id", ["a\n", "straße", "a b", "", "x" * 65, "a/b"])
async def test_a_request_id_that_the_log_does_not_take_is_refused(request_id: str) -> None:
    """It ended the call by an internal error, or the server left it out of its log."""
    with drafthouse.Client(NOBODY) as client:
        with pytest.raises(drafthouse.InvalidField, match="request_id") as caught:
            client.generate("x", request_id=request_id)
        assert [violation.field for violation in caught.value.violations] == ["request_id"]
    async with drafthouse.AsyncClient(NOBODY) as other:
        with pytest.raises(drafthouse.InvalidField, match="request_id"):
            other.generate("x", request_id=request_id)


def test_calls_of_a_closed_client_are_cancelled() -> None:
    """They ended in an error of grpc, which nothing of ours catches."""
    client = drafthouse.Client(NOBODY)
    client.close()
    for call in (client.tokenize, client.count_tokens, client.generate):
        with pytest.raises(drafthouse.Cancelled, match="closed"):
            call("x")
    with pytest.raises(drafthouse.Cancelled, match="closed"):
        client.health()


@pytest.mark.parametrize(
    "prompt", [b"def", bytearray(b"def"), memoryview(b"def"), {"role": "user", "content": "x"}]
)
def test_bytes_are_no_token_ids_and_a_message_is_no_list(prompt: Any) -> None:
    """Bytes are a sequence of integers: each was sent as a token id."""
    with drafthouse.Client(NOBODY) as client, pytest.raises(TypeError, match="a prompt is text"):
        client.generate(prompt)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model must be text, not int"),
    ({"model": b"x"}, "model must be text, not bytes"),
    ({"max_output_tokens": "5"}, "max_output_tokens must be an integer >= 1, not str"),
    ({"max_output_tokens": 5.5}, "max_output_tokens must be an integer >= 1, not float"),
    ({"temperature": "1"}, "temperature must be a number in [0, 10], not str"),
    ({"seed": [1]}, "seed must be an integer in [0, 4294967294], not list"),
    ({"grammar": 5}, "grammar must be text, not int"),
    ({"end_user": 5}, "end_user must be text, not int"),
    ({"ignore_end_token": "no"}, "ignore_end_token must be True or False, not str"),
    ({"stop": 5}, "stop must be text, or a sequence of texts, not int"),
    ({"stop": ["a", 5]}, "stop[1] must be text, not int"),
    ({"stop": ["a", None]}, "stop[1] must be text, not NoneType"),
    ({"stop": b"a"}, "stop must be text, or a sequence of texts, not bytes"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids, not int"),
    ({"stop_token_ids": "5"}, "stop_token_ids must be a sequence of token ids, not str"),
    (
        {"stop_token_ids": [1, "5"]},
        "stop_token_ids[1] must be a token id in [0, Model.vocabulary_size), not str",
    ),
    ({"dry": {"multiplier": 1}}, "dry must be a drafthouse.Dry, not dict"),
    ({"dry": True}, "dry must be a drafthouse.Dry, not bool"),
    (
        {"dry": drafthouse.Dry(base="1")},  # type: ignore[arg-type]  # wrong on purpose
        "dry.base must be a number in [1, 10], not str",
    ),
    (
        {"dry": drafthouse.Dry(breakers=5)},  # type: ignore[arg-type]  # wrong on purpose
        "dry.breakers must be text, or a sequence of texts, not int",
    ),
    ({"xtc": 0.5}, "xtc must be a drafthouse.Xtc, not float"),
    (
        {"xtc": drafthouse.Xtc(None)},  # type: ignore[arg-type]  # wrong on purpose
        "xtc.probability must be a number in [0, 1], not NoneType",
    ),
    ({"logit_bias": [(5, 1.0)]}, "logit_bias must be a mapping of token ids to numbers, not list"),
    (
        {"logit_bias": {"5": 1.0}},
        "a key of logit_bias must be a token id in [0, Model.vocabulary_size), not str",
    ),
    ({"logit_bias": {5: "1"}}, "logit_bias[5] must be a number in [-100, 100], not str"),
    (
        {"speculation": 5},
        "speculation must be one of off, mtp, eagle3, simple, ngram, dflash, dspark, not int",
    ),
    ({"timeout": "5"}, "timeout must be a number of seconds, or None, not str"),
    ({"request_id": 5}, "request_id must be text, not int"),
]


@pytest.mark.parametrize(("options", "told"), WRONG_TYPES, ids=[told for _, told in WRONG_TYPES])
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_an_option_of_the_wrong_type_is_named(
    options: dict[str, Any], told: str, kind: str
) -> None:
    """Some were AttributeErrors, and most TypeErrors that did not say of what."""
    client = getattr(drafthouse, kind)(NOBODY)
    with pytest.raises(TypeError) as caught:
        client.generate("x", **options)
    assert str(caught.value) == told


A_PROMPT = "a prompt is text, a sequence of token ids or one of chat messages, not "
WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, A_PROMPT + "NoneType"),
    (5, A_PROMPT + "int"),
    ({1, 2}, A_PROMPT + "set"),
    (iter([1]), A_PROMPT + "list_iterator"),
    (
        ["a", "b"],
        "prompt[0] must be a token id in [0, Model.vocabulary_size), or a chat message, not str",
    ),
    (
        [1, None],
        "prompt[1] must be a token id in [0, Model.vocabulary_size), or a chat message, not"
        " NoneType",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "prompt[0].content must be text, not list",
    ),
    (
        [drafthouse.ChatMessage("user", "x"), {"role": "assistant", "content": None}],
        "prompt[1].content must be text, not NoneType",
    ),
    ([{"role": None, "content": "x"}], "prompt[0].role must be text, not NoneType"),
    (
        [{"role": "user", "content": "x", "name": "eve"}],
        'prompt[0] must be a chat message, which is a ChatMessage or {"role": …, "content": …}'
        " with nothing else, not dict with ['content', 'name', 'role']",
    ),
]


WRONG_KWARGS: list[tuple[Any, Any, str]] = [
    ([], "x", "a mapping of names to values, not list"),
    ({"a": {1}}, [{"role": "user", "content": "x"}], "must have values as JSON has them: Object"),
    ({"a": float("nan")}, [{"role": "user", "content": "x"}], "values as JSON has them: Out of"),
    ({"a": 1}, "x", "is for a prompt of chat messages alone"),
    ({"a": 1}, [1, 2], "is for a prompt of chat messages alone"),
]


@pytest.mark.parametrize(("kwargs", "prompt", "told"), WRONG_KWARGS, ids=range(len(WRONG_KWARGS)))
def test_arguments_of_a_template_are_json_beside_a_chat(
    kwargs: Any, prompt: Any, told: str
) -> None:
    with drafthouse.Client(NOBODY) as client:
        for call in (client.generate, client.count_tokens):
            with pytest.raises(TypeError, match=f"^chat_template_kwargs .*{told}"):
                call(prompt, chat_template_kwargs=kwargs)


@pytest.mark.parametrize(("prompt", "told"), WRONG_PROMPTS, ids=range(len(WRONG_PROMPTS)))
def test_a_prompt_of_the_wrong_type_says_where(prompt: Any, told: str) -> None:
    """A message without a content was sent as an empty one."""
    with drafthouse.Client(NOBODY) as client:
        for call in (client.generate, client.count_tokens):
            with pytest.raises(TypeError) as caught:
                call(prompt)
            assert str(caught.value) == told


HUGE = 10**5000
"""More digits than Python would print."""
ID_RULE = "must be a token id in [0, Model.vocabulary_size), is 1099511627776"
UNSENDABLE: list[tuple[str, list[Any], dict[str, Any], str, str]] = [
    ("generate", ["x"], {"seed": 2**32}, "seed", "[0, 4294967294], is 4294967296"),
    ("generate", ["x"], {"priority": 2**40}, "priority", "[-100, 100], is 1099511627776"),
    ("generate", ["x"], {"temperature": HUGE}, "temperature", "[0, 10], is an integer of 16610 b"),
    (
        "generate",
        ["x"],
        {"speculation": "bogus"},
        "speculation",
        "one of off, mtp, eagle3, simple, ngram, dflash, dspark, is 'bogus'",
    ),
    ("generate", ["x"], {"stop_token_ids": [1, 2**40]}, "stop_token_ids[1]", ID_RULE),
    ("generate", ["x"], {"logit_bias": {2**40: 1.0}}, "a key of logit_bias", ID_RULE),
    (
        "generate",
        ["x"],
        {"dry": drafthouse.Dry(last_tokens=2**40)},
        "dry.last_tokens",
        "must be an integer in [-1, 65536], is 1099511627776",
    ),
    ("generate", ["a\ud800"], {}, "prompt", "its character 2 is a lone surrogate"),
    (
        "generate",
        [[1, 2**40]],
        {},
        "prompt[1]",
        "[0, Model.vocabulary_size), or a chat message, is",
    ),
    ("count_tokens", ["\ud800"], {}, "prompt", "its character 1 is a lone surrogate"),
    ("count_tokens", ["x"], {"model": "\ud800"}, "model", "lone surrogate"),
    ("tokenize", ["\ud800"], {}, "text", "lone surrogate"),
    ("tokenize", ["x"], {"model": "\ud800"}, "model", "lone surrogate"),
    ("detokenize", [[2**40]], {}, "token_ids[0]", ID_RULE),
    ("detokenize", [[1]], {"model": "\ud800"}, "model", "lone surrogate"),
    ("get_model", ["\ud800"], {}, "model", "lone surrogate"),
    ("list_models", [], {"page_size": 2**40}, "page_size", "[0, 1000], is 1099511627776"),
]


@pytest.mark.parametrize("case", UNSENDABLE, ids=lambda case: f"{case[0]}-{case[3]}")
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_what_cannot_be_sent_says_which_field_and_what_it_may_be(
    case: tuple[str, list[Any], dict[str, Any], str, str], kind: str
) -> None:
    """It was "Value out of range", or an error of Python that nothing of ours catches."""
    method, values, options, field, rule = case
    client = getattr(drafthouse, kind)(NOBODY, retry=None)
    with pytest.raises(drafthouse.InvalidField, match="cannot be sent") as caught:
        await getattr(client, method)(*values, **options)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert rule in violation.description
    assert str(caught.value).startswith(f"[INVALID_FIELD] {field} cannot be sent: it must be ")


@pytest.mark.parametrize("method", ["generate", "tokenize", "count_tokens"])
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_a_text_that_no_message_can_carry_is_named(method: str, kind: str) -> None:
    """Of 2 GiB gRPC for asyncio sent nothing, and the tokens of that came back: none."""
    client = getattr(drafthouse, kind)(NOBODY, retry=None)
    with pytest.raises(drafthouse.InvalidField, match="at most 67108864 bytes, has 67108865"):
        await getattr(client, method)("x" * (64 * 2**20 + 1))


@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        ("tokenize", None, "text must be text, not NoneType"),
        ("detokenize", 5, "token_ids must be a sequence of token ids, not int"),
        ("detokenize", "5", "token_ids must be a sequence of token ids, not str"),
        ("get_model", 5, "model must be text, not int"),
    ],
)
def test_other_methods_name_what_is_of_the_wrong_type(method: str, value: Any, told: str) -> None:
    """A text that is None was sent as an empty one."""
    with drafthouse.Client(NOBODY) as client, pytest.raises(TypeError) as caught:
        getattr(client, method)(value)
    assert str(caught.value) == told


def test_the_rules_that_errors_tell_are_the_documented_ones() -> None:
    """The page of the options is made of the same texts."""
    documented = dict(reference._fields("GenerateOptions"))
    for name, (_, rule) in _RULES.items():
        told = re.findall(r"[\[(]\S+, \S+[\])]|>=? \d+", rule)
        assert all(it in documented[name] for it in told), name


@pytest.mark.parametrize("number", [10**400, float("inf"), 1e300])
async def test_a_timeout_without_end_is_none(number: float) -> None:
    """It was a time that has passed to gRPC where it was told of it, as by `health`."""
    with drafthouse.Client(NOBODY, retry=None) as client:
        client.generate("x", timeout=number).close()
        with pytest.raises(drafthouse.Unavailable):
            client.health(timeout=number)
    async with drafthouse.AsyncClient(NOBODY) as other:
        with pytest.raises(drafthouse.Unavailable):
            await other.health(timeout=number)
    with drafthouse.AdminClient(NOBODY) as admin, pytest.raises(drafthouse.Unavailable):
        admin.status(timeout=number)


@pytest.mark.parametrize(
    ("seconds", "error", "told"),
    [
        ("5", TypeError, "timeout must be a number of seconds, or None, not str"),
        (float("nan"), ValueError, "timeout is not a number"),
    ],
)
async def test_a_timeout_that_is_none_is_told_by_every_method(
    seconds: Any, error: type[Exception], told: str
) -> None:
    """`health` and an AdminClient left it to grpc: DEADLINE_EXCEEDED, or an operand's type."""
    with drafthouse.Client(NOBODY) as client, drafthouse.AdminClient(NOBODY) as admin:
        for call in (
            functools.partial(client.generate, "x"),
            client.get_model,
            client.health,
            admin.status,
            admin.tenants,
            functools.partial(admin.limits, "acme"),
            functools.partial(admin.set_limits, "acme", {}),
            admin.drain,
        ):
            with pytest.raises(error, match=told):
                call(timeout=seconds)
    async with drafthouse.AsyncClient(NOBODY) as other:
        with pytest.raises(error, match=told):
            await other.health(timeout=seconds)


def test_a_timeout_of_numpy_is_as_long_as_it_says() -> None:
    """Added to the clock's time as a float32, it was rounded to many seconds, or passed at once."""
    float32: Any = np.float32(3.0)
    deadline = Attempts(None, RetryBudget(0), float32).remaining_s()
    assert type(deadline) is float


@pytest.mark.parametrize("kind", ["Client", "AsyncClient", "AdminClient"])
async def test_a_client_is_neither_copied_nor_pickled(kind: str) -> None:
    client = getattr(drafthouse, kind)(NOBODY)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=f"a drafthouse.{kind} cannot be copied or pickled; make"
        ):
            copied(client)


async def test_a_stream_is_neither_copied_nor_pickled() -> None:
    """A copy that was collected ended the generation of the other."""
    with drafthouse.Client(NOBODY) as client, client.generate("x") as stream:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                TypeError, match="GenerationStream cannot be copied or pickled; send"
            ):
                copied(stream)
    async with drafthouse.AsyncClient(NOBODY) as other, other.generate("x") as waiting:
        with pytest.raises(TypeError, match="AsyncGenerationStream cannot be copied or pickled"):
            copy.copy(waiting)


def test_an_asyncio_client_belongs_to_one_event_loop() -> None:
    """Calls ended in "Event loop is closed", or in a future of a different loop."""
    with pytest.raises(RuntimeError, match="no event loop runs"):
        drafthouse.AsyncClient(NOBODY)

    async def make() -> tuple[drafthouse.AsyncClient, drafthouse.AsyncGenerationStream]:
        client = drafthouse.AsyncClient(NOBODY)
        return client, client.generate("x")

    async def use(client: drafthouse.AsyncClient, stream: drafthouse.AsyncGenerationStream) -> None:
        with pytest.raises(RuntimeError, match="made in another event loop"):
            client.generate("x")
        for call in (client.health, client.get_model, client.list_models):
            with pytest.raises(RuntimeError, match="made in another event loop"):
                await call()
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await stream

    asyncio.run(use(*asyncio.run(make())))


def test_none_is_the_default_of_every_option() -> None:
    """As the documentation says; a program with types may write it (mypy reads this one)."""
    with drafthouse.Client(NOBODY, retry=None) as client:
        client.generate(
            "x",
            timeout=None,
            request_id=None,
            model=None,
            max_output_tokens=None,
            temperature=None,
            top_k=None,
            top_p=None,
            min_p=None,
            typical_p=None,
            top_n_sigma=None,
            repeat_penalty=None,
            frequency_penalty=None,
            presence_penalty=None,
            penalty_last_tokens=None,
            dry=None,
            xtc=None,
            logit_bias=None,
            seed=None,
            grammar=None,
            stop=None,
            stop_token_ids=None,
            ignore_end_token=None,
            log_probabilities=None,
            progress=None,
            speculation=None,
            max_draft_tokens=None,
            priority=None,
            chat_template_kwargs=None,
            end_user=None,
        ).close()
    options: drafthouse.GenerateOptions = dict.fromkeys(  # type: ignore[assignment]  # names are text
        drafthouse.GenerateOptions.__annotations__
    )
    assert generate_request("x", options) == generate_request("x", {})


def test_numbers_and_lists_of_other_libraries_are_taken() -> None:
    request = generate_request(
        array("i", [1, 2]),
        {"stop": ("a" for _ in range(2)), "stop_token_ids": range(3)},  # type: ignore[typeddict-item]  # any iterable will do
    )
    assert list(request.prompt.tokens.ids) == [1, 2]
    assert list(request.stop.sequences) == ["a", "a"]
    assert list(request.stop.token_ids) == [0, 1, 2]
    assert generate_request([], {}).prompt.WhichOneof("content") == "tokens"


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_streams": "5"}, "limits.max_streams must be an integer >= 1, of 63 bits at most, n"),
        ({"weight": "5"}, "limits.weight must be a number >= 0.001, not str"),
        ({"models": "gpt"}, "limits.models must be a tuple of names of models, not str"),
        ({"models": (5,)}, "limits.models[0] must be text, not int"),
    ],
)
def test_a_limit_of_the_wrong_type_is_named(limits: dict[str, Any], told: str) -> None:
    with drafthouse.AdminClient(NOBODY) as client, pytest.raises(TypeError) as caught:
        client.set_limits("acme", limits)
    assert str(caught.value).startswith(told)


def test_a_limit_that_cannot_be_sent_says_what_it_may_be() -> None:
    with drafthouse.AdminClient(NOBODY) as client:
        with pytest.raises(drafthouse.InvalidField) as caught:
            client.set_limits("acme", {"max_priority": 2**40})
        assert caught.value.violations[0].field == "limits.max_priority"
        assert "[-100, 100]" in str(caught.value)


@pytest.mark.parametrize("tenant", [5, None, b"acme"])
def test_a_tenant_that_is_no_text_is_named(tenant: Any) -> None:
    """Words of protobuf: "bad argument type for built-in operation"; None watched everybody."""
    told = f"tenant must be text, not {type(tenant).__name__}"
    with drafthouse.AdminClient(NOBODY) as client:
        for call in (client.limits, lambda name: client.set_limits(name, {})):
            with pytest.raises(TypeError, match=told):
                call(tenant)
        with pytest.raises(TypeError, match=told):
            next(client.watch_cache(tenant))
        with pytest.raises(drafthouse.InvalidField, match="tenant cannot be sent"):
            client.limits("\ud800")


@pytest.mark.parametrize(
    ("limits", "reset", "told"),
    [
        ([1], (), "limits must be a mapping of names to limits, not list"),
        (None, (), "limits must be a mapping of names to limits, not NoneType"),
        ({}, "max_priority", "reset must be a set of names, not str"),
        ({}, None, "reset must be a set of names, not NoneType"),
        ({}, [5], r"reset\[0\] must be text, not int"),
    ],
)
def test_limits_that_are_no_mapping_are_named(limits: Any, reset: Any, told: str) -> None:
    """One name as `reset` was sent as its letters, each of which was told to be no limit."""
    with drafthouse.AdminClient(NOBODY) as client, pytest.raises(TypeError, match=told):
        client.set_limits("acme", limits, reset=reset)


def test_one_text_at_which_repetitions_end_is_one() -> None:
    """Its letters were."""
    request = generate_request("x", {"dry": drafthouse.Dry(breakers="END")})
    assert list(request.sampling.dry.breakers) == ["END"]
    request = generate_request("x", {"dry": drafthouse.Dry(breakers=("a", "b"))})
    assert list(request.sampling.dry.breakers) == ["a", "b"]


def test_a_list_without_names_is_no_limit() -> None:
    """On the wire it is no change: the tenant could use all models as before."""
    with drafthouse.AdminClient(NOBODY) as client, pytest.raises(ValueError, match="reset="):
        client.set_limits("acme", {"models": ()})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"target": None}, "target must be text, such as 'host:port', not NoneType"),
        ({"target": 50051}, "target must be text, such as 'host:port', not int"),
        ({"tls": "authority.crt"}, "tls must be True, False or a drafthouse.Tls, not str"),
        ({"retry": True}, "retry must be a drafthouse.RetryPolicy or None, not bool"),
        ({"retry": 5}, "retry must be a drafthouse.RetryPolicy or None, not int"),
    ],
)
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
async def test_a_client_that_is_made_wrongly_says_what_is_wrong(
    settings: dict[str, Any], told: str, kind: str
) -> None:
    """A file's name as `tls` was TLS by the public authorities; the others failed within ours."""
    with pytest.raises(TypeError) as caught:
        getattr(drafthouse, kind)(**settings)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    "target",
    [
        "",
        "http://127.0.0.1:50051",
        "HTTPS://example.org:443",
        "grpc://127.0.0.1:50051",
        "grpcs://example.org:443",
        "a\0b:1",
        "unix:\ud800",
        "127.0.0.1:50051\n",
        " example.org:443",
    ],
)
@pytest.mark.parametrize("kind", ["Client", "AsyncClient", "AdminClient"])
@pytest.mark.parametrize("tls", [True, False])
async def test_a_target_that_is_none_says_how_one_looks(target: str, kind: str, tls: bool) -> None:
    """Calls ended in UNKNOWN, or in UNAVAILABLE after four attempts, by words of gRPC."""
    told = re.escape(f"target {target!r} must be an address, such as")
    key = {} if kind == "AdminClient" else {"api_key": "dh_test"}
    with pytest.raises(ValueError, match=told):
        getattr(drafthouse, kind)(target, tls=tls, **key)


@pytest.mark.parametrize("target", ["127.0.0.1:99999", "ipv4:127.0.0.1:1,127.0.0.1:65536"])
def test_a_port_that_is_none_is_told(target: str) -> None:
    """Another one would be dialled, 34463 for 99999, and be told the key."""
    with pytest.raises(ValueError, match="must have a port of at most 65535"):
        drafthouse.Client(target, api_key="dh_test")
    drafthouse.Client("unix:/run/drafthouse:99999").close()


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("max_attempts", 0, ValueError),
        ("max_attempts", 1.5, TypeError),
        ("initial_delay_s", -0.1, ValueError),
        ("max_delay_s", float("nan"), ValueError),
        ("budget", "10", TypeError),
        ("max_retry_after_s", None, TypeError),
        ("max_retry_after_s", -1, ValueError),
    ],
)
def test_a_policy_of_retries_that_is_wrong_is_refused_when_it_is_made(
    field: str, value: Any, error: type[Exception]
) -> None:
    """It took the place of the first error that a server sent."""
    with pytest.raises(error, match=field):
        drafthouse.RetryPolicy(**{field: value})


def test_a_policy_of_retries_may_have_no_end_and_none() -> None:
    drafthouse.RetryPolicy(1, 0, 0.0, 0, float("inf"))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "5", 10**400])
def test_a_time_that_no_message_can_carry_is_named(seconds: Any) -> None:
    error = TypeError if isinstance(seconds, str) else drafthouse.InvalidField
    with drafthouse.AdminClient(NOBODY) as client:
        with pytest.raises(error, match="running_timeout"):
            client.drain(seconds)
        with pytest.raises(error, match="interval"):
            next(client.watch_load(seconds))
