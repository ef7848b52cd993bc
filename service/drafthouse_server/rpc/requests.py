"""Protobuf to plain values: translates, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message

from drafthouse.v1 import generation_pb2, model_pb2
from drafthouse_server.rpc.responses import MODES
from drafthouse_server.serving.requests import (
    KNOBS,
    ChatMessage,
    GenerationRequest,
    Prompt,
)

__all__ = ["to_generation", "to_prompt"]

_Part = TypeVar("_Part")
_Plain = TypeVar("_Plain")

_MODE_NAMES = {value: name for name, value in MODES.items()}


class _Lazy(Collection[_Plain]):
    """Parts of a message as plain values, each made when it is read: there is room for millions.

    Args:
        parts: As they came.
        make: Makes the plain value of one.
    """

    def __init__(self, parts: Collection[_Part], make: Callable[[_Part], _Plain]) -> None:
        self._n = len(parts)
        self._parts: Iterable[Any] = parts
        self._make: Callable[[Any], _Plain] = make

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[_Plain]:
        return map(self._make, self._parts)

    def __contains__(self, value: object) -> bool:
        return any(value == known for known in self)


def to_prompt(prompt: generation_pb2.Prompt) -> Prompt:
    """Returns a prompt as a plain value."""
    kind = prompt.WhichOneof("content")
    if kind == "tokens":
        return Prompt(tokens=prompt.tokens.ids)
    if kind == "text":
        return Prompt(text=prompt.text)
    if kind == "chat":
        chat = prompt.chat
        messages = _Lazy(chat.messages, _to_message)
        return Prompt(messages=messages, chat_template_kwargs=chat.chat_template_kwargs)
    return Prompt()


def _to_message(message: generation_pb2.ChatMessage) -> ChatMessage:
    return ChatMessage(message.role, message.content)


def _to_bias(entry: generation_pb2.LogitBias) -> tuple[int, float]:
    return entry.token_id, entry.bias


def to_generation(request: generation_pb2.GenerateRequest) -> GenerationRequest:
    """Returns a request as a plain value."""
    sampling, speculation = request.sampling, request.speculation
    stop, output = request.stop, request.output
    return GenerationRequest(
        prompt=to_prompt(request.prompt),
        knobs={knob.name: value for knob in KNOBS for value in _given(request, knob.path)},
        has_dry=sampling.HasField("dry"),
        dry_breakers=sampling.dry.breakers,
        logit_bias=_Lazy(sampling.logit_bias, _to_bias),
        grammar=sampling.grammar,
        ignore_eos=stop.ignore_end_token,
        has_logprobs=output.log_probabilities,
        has_progress=output.progress,
        stops=stop.sequences,
        stop_token_ids=stop.token_ids,
        n_output_max=request.max_output_tokens if request.HasField("max_output_tokens") else None,
        mode=_to_mode(speculation.mode),
        n_draft=speculation.max_draft_tokens if speculation.HasField("max_draft_tokens") else None,
        priority=request.priority,
        end_user=request.end_user,
    )


def _to_mode(mode: model_pb2.SpeculationMode.ValueType) -> str | None:
    """Returns a mode's name; an unknown number's is its digits, which no server drafts by."""
    if mode == model_pb2.SPECULATION_MODE_UNSPECIFIED:
        return None
    return _MODE_NAMES.get(mode, str(mode))


def _given(message: Message, path: str) -> Iterator[float]:
    """Yields the value at a dotted path if the client has given it."""
    outer, _, inner = path.partition(".")
    descriptor = message.DESCRIPTOR.fields_by_name[outer]
    if descriptor.has_presence and not message.HasField(outer):
        return
    value = getattr(message, outer)
    if inner:
        yield from _given(value, inner)
    else:
        yield value
