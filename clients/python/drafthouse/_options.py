"""What a caller may ask for, and its translation to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from drafthouse._enums import OpenEnum
from drafthouse._errors import FieldViolation, InvalidField
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
    "generate_request",
    "prompt_message",
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

    model: str
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
    """Seed, [0, 4294967294]; None is random."""
    grammar: str
    """GBNF grammar with a rule "root" that the output must follow; empty is no constraint."""
    stop: str | Sequence[str]
    """Texts that end the generation, at most 16 of 1 to 256 bytes; not part of the output."""
    stop_token_ids: Sequence[int]
    """Token ids that end the generation, at most 64; not part of the text."""
    ignore_end_token: bool
    """Go on past the model's end token."""
    log_probabilities: bool
    """Send the log-probability of every token."""
    progress: bool
    """Send how much of the prompt is computed: chunks without text, see `Chunk.progress`."""
    speculation: (
        SpeculationMode
        | Literal["off", "mtp", "eagle3", "simple", "ngram", "dflash", "dspark"]
        | None
    )
    """How tokens are drafted; None is the server's default. Changes the speed, never the output."""
    max_draft_tokens: int | None
    """Draft tokens per step, [0, Model.max_draft_tokens]; None is the server's default."""
    priority: int
    """Priority among the tenant's own requests, [-100, 100]; higher runs first."""
    end_user: str
    """For whom it is: an opaque name of at most 64 bytes, such as a hash of a user's id."""


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "seed",
    "grammar",
)
_PENALTIES = {
    "repeat_penalty": "repeat",
    "frequency_penalty": "frequency",
    "presence_penalty": "presence",
    "penalty_last_tokens": "last_tokens",
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Builds the request of a generation.

    Raises:
        InvalidField: a value cannot be sent at all, such as an integer beyond 32 bits.
        TypeError: an option is unknown or of the wrong type.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"generate() has no option {', '.join(unknown)}")
    request = generation_pb2.GenerateRequest(prompt=prompt_message(prompt))
    for name, value in options.items():
        if value is not None:
            with _naming(name):
                _set(request, name, value)
    return request


def prompt_message(prompt: Prompt) -> generation_pb2.Prompt:
    """Builds the prompt of a request.

    Raises:
        InvalidField: a value cannot be sent at all (INVALID_FIELD).
        TypeError: the prompt is neither text nor token ids nor messages.
    """
    with _naming("prompt"):
        if isinstance(prompt, str):
            return generation_pb2.Prompt(text=prompt)
        if isinstance(prompt, bytes | bytearray | memoryview | Mapping):  # also of numbers
            raise TypeError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}")
        if prompt and isinstance(prompt[0], ChatMessage | Mapping):
            messages = [_chat_message(message) for message in prompt]
            return generation_pb2.Prompt(chat=generation_pb2.ChatMessages(messages=messages))
        ids = generation_pb2.TokenIds()
        ids.ids.extend(prompt)  # type: ignore[arg-type]  # protobuf raises TypeError on anything else
        return generation_pb2.Prompt(tokens=ids)


def _chat_message(message: object) -> generation_pb2.ChatMessage:
    if isinstance(message, ChatMessage):
        return generation_pb2.ChatMessage(role=message.role, content=message.content)
    if isinstance(message, Mapping) and message.keys() == {"role", "content"}:
        return generation_pb2.ChatMessage(role=message["role"], content=message["content"])
    raise TypeError('a chat message is a ChatMessage or {"role": …, "content": …}')


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the option whose value protobuf cannot carry."""
    try:
        yield
    except ValueError as error:  # out of the integer's range, or text that is not Unicode
        violation = FieldViolation(name, str(error))
        raise InvalidField(f"{name} cannot be sent: {error}", violations=[violation]) from error


def _set(request: generation_pb2.GenerateRequest, name: str, value: object) -> None:
    """Writes one option, which is not None, into the request."""
    if name in _SAMPLING:
        setattr(request.sampling, name, value)
    elif name in _PENALTIES:
        setattr(request.sampling.penalties, _PENALTIES[name], value)
    elif name in _SETTERS:
        _SETTERS[name](request, value)
    else:
        setattr(request, name, value)  # model, max_output_tokens, priority, end_user


def _set_dry(request: generation_pb2.GenerateRequest, dry: Dry) -> None:
    target = request.sampling.dry
    target.SetInParent()  # all defaults still turns it on
    for name in ("multiplier", "base", "allowed_tokens", "last_tokens"):
        if getattr(dry, name) is not None:
            setattr(target, name, getattr(dry, name))
    target.breakers.extend([dry.breakers] if isinstance(dry.breakers, str) else dry.breakers)


def _set_xtc(request: generation_pb2.GenerateRequest, xtc: Xtc) -> None:
    request.sampling.xtc.probability = xtc.probability
    if xtc.threshold is not None:
        request.sampling.xtc.threshold = xtc.threshold


def _set_logit_bias(request: generation_pb2.GenerateRequest, bias: Mapping[int, float]) -> None:
    for token_id, value in bias.items():
        request.sampling.logit_bias.add(token_id=token_id, bias=value)


def _set_stop(request: generation_pb2.GenerateRequest, stop: str | Sequence[str]) -> None:
    request.stop.sequences.extend([stop] if isinstance(stop, str) else stop)


def _set_stop_token_ids(request: generation_pb2.GenerateRequest, ids: Sequence[int]) -> None:
    request.stop.token_ids.extend(ids)


def _set_ignore_end_token(request: generation_pb2.GenerateRequest, value: bool) -> None:
    request.stop.ignore_end_token = value


def _set_log_probabilities(request: generation_pb2.GenerateRequest, value: bool) -> None:
    request.output.log_probabilities = value


def _set_progress(request: generation_pb2.GenerateRequest, value: bool) -> None:
    request.output.progress = value


def _set_speculation(request: generation_pb2.GenerateRequest, mode: str) -> None:
    number = SpeculationMode(mode).number
    request.speculation.mode = model_pb2.SpeculationMode.ValueType(number)


def _set_max_draft_tokens(request: generation_pb2.GenerateRequest, value: int) -> None:
    request.speculation.max_draft_tokens = value


_SETTERS: dict[str, Callable[..., None]] = {
    "dry": _set_dry,
    "xtc": _set_xtc,
    "logit_bias": _set_logit_bias,
    "stop": _set_stop,
    "stop_token_ids": _set_stop_token_ids,
    "ignore_end_token": _set_ignore_end_token,
    "log_probabilities": _set_log_probabilities,
    "progress": _set_progress,
    "speculation": _set_speculation,
    "max_draft_tokens": _set_max_draft_tokens,
}
