"""What a caller may ask for, and its translation to requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from google.protobuf.message import Message

from drafthouse._enums import OpenEnum
from drafthouse._transport import named, put, put_all, wrong_type
from drafthouse.v1 import generation_pb2, model_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor

__all__ = [
    "ChatMessage",
    "Dry",
    "GenerateOptions",
    "Prompt",
    "SpeculationMode",
    "Xtc",
    "count_request",
    "detokenize_request",
    "generate_request",
    "model_request",
    "models_request",
    "tokenize_request",
]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """Who speaks, such as "system", "user" or "assistant"."""
    content: str
    """Text of the message."""


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text, token ids, or chat messages (`ChatMessage` or `{"role": …, "content": …}`)."""


class SpeculationMode(OpenEnum):
    """How draft tokens are proposed; a mode that this SDK does not know is "unknown-NUMBER"."""

    UNSPECIFIED = "unspecified"
    """In a request the server's default; in an answer never."""
    OFF = "off"
    """No speculation: every step yields one token."""
    MTP = "mtp"
    """The target model's own multi-token-prediction heads."""
    EAGLE3 = "eagle3"
    """An EAGLE-3 draft model."""
    SIMPLE = "simple"
    """An ordinary small model with the same vocabulary."""
    NGRAM = "ngram"
    """Repetition in the sequence's own tokens."""
    DFLASH = "dflash"
    """A DFlash draft model: a whole block of tokens in one pass."""
    DSPARK = "dspark"
    """A DSpark draft model: a block whose tokens depend on each other."""

    @classmethod
    def _proto(cls) -> EnumDescriptor:
        return model_pb2.DESCRIPTOR.enum_types_by_name["SpeculationMode"]


@dataclass(frozen=True, slots=True)
class Dry:
    """Don't-repeat-yourself sampling. None leaves the server's default."""

    multiplier: float | None = None
    """Strength, [0, 100]; 0 is off. Server's default: 0.8."""
    base: float | None = None
    """Growth with the length of the repetition, [1, 10]. Server's default: 1.75."""
    allowed_tokens: int | None = None
    """Repetitions up to this many tokens are free, [0, 1024]. Server's default: 2."""
    last_tokens: int | None = None
    """Tokens looked back, [-1, 65536]; -1 is the model's context. Server's default: -1."""
    breakers: str | Sequence[str] = ()
    """Texts at which a repetition ends; empty is newline, colon, quotation mark, asterisk."""


@dataclass(frozen=True, slots=True)
class Xtc:
    """Exclude-top-choices sampling."""

    probability: float
    """How often it acts, [0, 1]; 0 is off."""
    threshold: float | None = None
    """Tokens above this probability may be dropped, [0, 1]. Server's default: 0.1."""


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`. What is absent or None takes the server's default."""

    model: str | None
    """Name of the model; empty is the server's default model."""
    max_output_tokens: int | None
    """Most tokens to generate, >= 1; None is until the context is full."""
    temperature: float | None
    """Randomness, [0, 10]; below 0.00001 always the likeliest token. Server's default: 0.8."""
    top_k: int | None
    """Keep the k likeliest tokens, >= 0; 0 is off. Server's default: 40."""
    top_p: float | None
    """Keep the likeliest tokens that together reach this, (0, 1]. Server's default: 0.95."""
    min_p: float | None
    """Drop tokens below this share of the likeliest one, [0, 1]. Server's default: 0.05."""
    typical_p: float | None
    """Locally typical sampling, (0, 1]; 1 is off. Server's default: 1."""
    top_n_sigma: float | None
    """Drop tokens further than n standard deviations below the largest logit, > 0; None is off."""
    repeat_penalty: float | None
    """Divides the logit of tokens that occurred, [0.001, 10]; 1 is off. Server's default: 1."""
    frequency_penalty: float | None
    """Subtracted per occurrence, [-10, 10]; 0 is off. Server's default: 0."""
    presence_penalty: float | None
    """Subtracted once for tokens that occurred, [-10, 10]; 0 is off. Server's default: 0."""
    penalty_last_tokens: int | None
    """Tokens that the three penalties look back, [-1, 65536]. Server's default: 64."""
    dry: Dry | None
    """Penalty on continuing a repetition; None is off."""
    xtc: Xtc | None
    """Now and then drop the likeliest tokens; None is off."""
    logit_bias: Mapping[int, float] | None
    """Token id to what its logit gains, [-100, 100]; -100 forbids it. At most 1024 entries."""
    seed: int | None
    """Seed, [0, 4294967294]: the same request gives the same tokens, whatever is drafted, up to
    rounding; None is random."""
    grammar: str | None
    """GBNF grammar with a rule "root" that the output must follow; empty is no constraint."""
    stop: str | Sequence[str] | None
    """Texts that end the generation, at most 16 of 1 to 256 bytes; not part of the output."""
    stop_token_ids: Sequence[int] | None
    """Token ids that end the generation, at most 64; not part of the text."""
    ignore_end_token: bool | None
    """Go on past the model's end token; not with a grammar."""
    log_probabilities: bool | None
    """Send the log-probability of every token."""
    progress: bool | None
    """Send how much of the prompt is computed: chunks without text, see `Chunk.progress`."""
    speculation: (
        SpeculationMode
        | Literal["off", "mtp", "eagle3", "simple", "ngram", "dflash", "dspark"]
        | None
    )
    """How tokens are drafted; None is the server's default. Changes the speed, never the output."""
    max_draft_tokens: int | None
    """Draft tokens per step, [0, Model.max_draft_tokens]; None is the server's default."""
    priority: int | None
    """Priority among the tenant's own requests, [-100, 100]; higher runs first."""
    chat_template_kwargs: Mapping[str, object] | None
    """With chat messages: arguments of the model's template, such as `{"enable_thinking": False}`:
    values as JSON has them, at most 65536 bytes. They go before the server's own."""
    end_user: str | None
    """For whom it is: an opaque name of at most 64 bytes, such as a hash of a user's id."""


_ID = "a token id in [0, Model.vocabulary_size)"
_FLAG = "True or False"

_RULES = {
    "model": ("model", "text"),
    "max_output_tokens": ("max_output_tokens", "an integer >= 1"),
    "temperature": ("sampling.temperature", "a number in [0, 10]"),
    "top_k": ("sampling.top_k", "an integer >= 0"),
    "top_p": ("sampling.top_p", "a number in (0, 1]"),
    "min_p": ("sampling.min_p", "a number in [0, 1]"),
    "typical_p": ("sampling.typical_p", "a number in (0, 1]"),
    "top_n_sigma": ("sampling.top_n_sigma", "a number > 0"),
    "repeat_penalty": ("sampling.penalties.repeat", "a number in [0.001, 10]"),
    "frequency_penalty": ("sampling.penalties.frequency", "a number in [-10, 10]"),
    "presence_penalty": ("sampling.penalties.presence", "a number in [-10, 10]"),
    "penalty_last_tokens": ("sampling.penalties.last_tokens", "an integer in [-1, 65536]"),
    "seed": ("sampling.seed", "an integer in [0, 4294967294]"),
    "grammar": ("sampling.grammar", "text"),
    "ignore_end_token": ("stop.ignore_end_token", _FLAG),
    "log_probabilities": ("output.log_probabilities", _FLAG),
    "progress": ("output.progress", _FLAG),
    "max_draft_tokens": (
        "speculation.max_draft_tokens",
        "an integer in [0, Model.max_draft_tokens]",
    ),
    "priority": ("priority", "an integer in [-100, 100]"),
    "end_user": ("end_user", "text"),
}
"""Where an option that is one value stands in a request, and what it may be."""

_DRY_RULES = {
    "multiplier": "a number in [0, 100]",
    "base": "a number in [1, 10]",
    "allowed_tokens": "an integer in [0, 1024]",
    "last_tokens": "an integer in [-1, 65536]",
}


_KWARGS = "chat_template_kwargs"


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Builds the request of a generation.

    Raises:
        InvalidField: a value cannot be sent at all, such as an integer beyond 32 bits.
        TypeError: an option is unknown or of the wrong type.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"generate() has no option {', '.join(unknown)}")
    request = generation_pb2.GenerateRequest(prompt=_prompt_message(prompt))
    for name, value in options.items():
        if value is None:
            continue
        if name in _RULES:
            path, rule = _RULES[name]
            put(request, path, name, rule, value)
        else:
            _SETTERS[name](request, value)
    return request


def count_request(
    prompt: Prompt, model: str | None, chat_template_kwargs: Mapping[str, object] | None
) -> generation_pb2.CountTokensRequest:
    """Builds the request for the number of tokens of a prompt; raises as `generate_request`."""
    request = generation_pb2.CountTokensRequest(prompt=_prompt_message(prompt))
    if chat_template_kwargs is not None:
        _set_template_kwargs(request, chat_template_kwargs)
    _put_given(request, "text", model=model)
    return request


def tokenize_request(
    text: str, model: str | None, add_special: bool, parse_special: bool
) -> generation_pb2.TokenizeRequest:
    """Builds the request for the token ids of a text; raises as `generate_request`."""
    request = generation_pb2.TokenizeRequest()
    put(request, "text", "text", "text", text)
    _put_given(request, "text", model=model)
    _put_given(request, _FLAG, add_special=add_special, parse_special=parse_special)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, keep_special: bool
) -> generation_pb2.DetokenizeRequest:
    """Builds the request for the text of token ids; raises as `generate_request`."""
    request = generation_pb2.DetokenizeRequest()
    rule = "a sequence of token ids"
    put_all(request.token_ids, "token_ids", rule, _ID, token_ids, kind=int)
    _put_given(request, "text", model=model)
    _put_given(request, _FLAG, keep_special=keep_special)
    return request


def model_request(model: str | None) -> model_pb2.GetModelRequest:
    """Builds the request for a model; raises as `generate_request`."""
    request = model_pb2.GetModelRequest()
    _put_given(request, "text", model=model)
    return request


def models_request(page_size: int) -> model_pb2.ListModelsRequest:
    """Builds the request for the first page of models; raises as `generate_request`."""
    request = model_pb2.ListModelsRequest()
    _put_given(request, "an integer in [0, 1000]", page_size=page_size)
    return request


def _put_given(request: Message, rule: str, **values: object) -> None:
    """Writes those values that are not None, which is the default."""
    for name, value in values.items():
        if value is not None:
            put(request, name, name, rule, value)


def _prompt_message(prompt: Prompt) -> generation_pb2.Prompt:
    """Builds the prompt of a request; raises as `generate_request`."""
    message = generation_pb2.Prompt()
    if isinstance(prompt, str):
        put(message, "text", "prompt", "text", prompt)
        return message
    is_list = isinstance(prompt, Collection) and not isinstance(prompt, _NO_PROMPTS)
    if not is_list:
        raise TypeError(
            "a prompt is text, a sequence of token ids or one of chat messages, not"
            f" {type(prompt).__name__}"
        )
    items: list[object] = list(prompt)
    if items and isinstance(items[0], ChatMessage | Mapping):
        for i, item in enumerate(items):
            _add_message(message.chat, f"prompt[{i}]", item)
    else:
        message.tokens.SetInParent()
        rule = f"{_ID}, or a chat message"
        put_all(message.tokens.ids, "prompt", "text", rule, items, kind=int)
    return message


_NO_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""Collections that are no sequence of tokens or messages, or not meant as one."""


def _add_message(chat: generation_pb2.ChatMessages, name: str, message: object) -> None:
    if isinstance(message, ChatMessage):
        role, content = message.role, message.content
    elif isinstance(message, Mapping) and message.keys() == {"role", "content"}:
        role, content = message["role"], message["content"]
    else:
        raise TypeError(
            f'{name} must be a chat message, which is a ChatMessage or {{"role": …, "content": …}}'
            f" with nothing else, not {_kind(message)}"
        )
    added = chat.messages.add()
    put(added, "role", f"{name}.role", "text", role)
    put(added, "content", f"{name}.content", "text", content)


def _kind(message: object) -> str:
    """Returns what an error calls that which is no chat message."""
    kind = type(message).__name__
    return f"{kind} with {sorted(map(str, message))}" if isinstance(message, Mapping) else kind


def _set_dry(request: generation_pb2.GenerateRequest, dry: object) -> None:
    if not isinstance(dry, Dry):
        raise wrong_type("dry", "a drafthouse.Dry", dry)
    target = request.sampling.dry
    target.SetInParent()  # all defaults still turns it on
    for name, rule in _DRY_RULES.items():
        value = getattr(dry, name)
        if value is not None:
            put(target, name, f"dry.{name}", rule, value)
    _put_texts(target.breakers, "dry.breakers", dry.breakers)


def _set_xtc(request: generation_pb2.GenerateRequest, xtc: object) -> None:
    if not isinstance(xtc, Xtc):
        raise wrong_type("xtc", "a drafthouse.Xtc", xtc)
    target, rule = request.sampling.xtc, "a number in [0, 1]"
    put(target, "probability", "xtc.probability", rule, xtc.probability)
    if xtc.threshold is not None:
        put(target, "threshold", "xtc.threshold", rule, xtc.threshold)


def _set_logit_bias(request: generation_pb2.GenerateRequest, bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise wrong_type("logit_bias", "a mapping of token ids to numbers", bias)
    for token_id, value in bias.items():
        entry = request.sampling.logit_bias.add()
        put(entry, "token_id", "a key of logit_bias", _ID, token_id)
        put(entry, "bias", f"logit_bias[{token_id}]", "a number in [-100, 100]", value)


def _set_stop(request: generation_pb2.GenerateRequest, stop: object) -> None:
    _put_texts(request.stop.sequences, "stop", stop)


def _set_stop_token_ids(request: generation_pb2.GenerateRequest, ids: object) -> None:
    rule = "a sequence of token ids"
    put_all(request.stop.token_ids, "stop_token_ids", rule, _ID, ids, kind=int)


def _set_speculation(request: generation_pb2.GenerateRequest, mode: object) -> None:
    known = [str(it) for it in SpeculationMode if it is not SpeculationMode.UNSPECIFIED]
    rule = f"one of {', '.join(known)}"
    if not isinstance(mode, str):
        raise wrong_type("speculation", rule, mode)
    with named("speculation", rule, mode):
        number = SpeculationMode(mode).number
        request.speculation.mode = model_pb2.SpeculationMode.ValueType(number)


def _set_template_kwargs(
    request: generation_pb2.GenerateRequest | generation_pb2.CountTokensRequest, kwargs: object
) -> None:
    """Writes the arguments of a chat template, behind the messages."""
    if not isinstance(kwargs, Mapping):
        raise wrong_type(_KWARGS, "a mapping of names to values", kwargs)
    if not request.prompt.HasField("chat"):
        raise TypeError(f"{_KWARGS} is for a prompt of chat messages alone")
    try:
        text = json.dumps(dict(kwargs), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{_KWARGS} must have values as JSON has them: {error}") from error
    put(request, f"prompt.chat.{_KWARGS}", _KWARGS, "text", text)


def _put_texts(values: MutableSequence[str], name: str, given: object) -> None:
    """Writes texts, of which one may stand alone."""
    given = [given] if isinstance(given, str) else given
    put_all(values, name, "text, or a sequence of texts", "text", given, kind=str)


_SETTERS: dict[str, Callable[[generation_pb2.GenerateRequest, object], None]] = {
    "dry": _set_dry,
    "xtc": _set_xtc,
    "logit_bias": _set_logit_bias,
    "stop": _set_stop,
    "stop_token_ids": _set_stop_token_ids,
    "speculation": _set_speculation,
    _KWARGS: _set_template_kwargs,
}
"""How the other options are written."""
