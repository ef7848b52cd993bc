"""What a call answers, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafthouse._enums import OpenEnum
from drafthouse._options import SpeculationMode
from drafthouse._usage import Usage, usage_from
from drafthouse.v1 import generation_pb2, model_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor

__all__ = [
    "Chunk",
    "Collected",
    "FinishReason",
    "Model",
    "PromptProgress",
    "Result",
    "SpeculationStatistics",
    "Timings",
    "TokenCount",
    "chunk_from",
    "model_from",
]


class FinishReason(OpenEnum):
    """Why a generation ended; a reason that this SDK does not know is "unknown-NUMBER"."""

    UNSPECIFIED = "unspecified"
    """The server has given none; it always does."""
    STOP = "stop"
    """The model chose its end token, or a stop text or stop token was reached."""
    LENGTH = "length"
    """`max_output_tokens` or the end of the context was reached."""

    @classmethod
    def _proto(cls) -> EnumDescriptor:
        return generation_pb2.DESCRIPTOR.enum_types_by_name["FinishReason"]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of the prompt is computed."""

    computed_tokens: int
    """Tokens of the prompt that are computed or were reused, [1, prompt_tokens]."""
    prompt_tokens: int
    """Tokens of the prompt as the model sees it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly generated text and tokens; `str(chunk)` is the text."""

    text: str
    """New text; empty while a character or a possible stop text is incomplete."""
    token_ids: tuple[int, ...] = ()
    """New token ids, in order; the ids of all chunks together are the whole output."""
    log_probabilities: tuple[float, ...] = ()
    """Natural log-probabilities, one per token id; empty unless they were asked for."""
    progress: PromptProgress | None = None
    """More of the prompt is computed, and nothing else is new; only if it was asked for."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, as the server measured it, in seconds."""

    queue_s: float
    """From the receipt of the request to its slot."""
    prefill_s: float
    """From the slot to the first generated token."""
    decode_s: float
    """From the first generated token to the last."""
    first_token_s: float
    """From the receipt to the first generated token."""
    preempted_s: float = 0.0
    """Without a slot after the first one, because others needed its memory more."""


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Drafts of one generation, and how many of their tokens were accepted."""

    mode: SpeculationMode
    """The mode that was used."""
    n_drafts: int
    """Steps that verified a draft."""
    n_drafted: int
    """Draft tokens verified."""
    n_accepted: int
    """Draft tokens accepted."""
    n_accepted_by_position: tuple[int, ...]
    """Accepted tokens by their place in the draft; index 0 is the first drafted token."""
    n_steps: int
    """Steps that generated tokens, with a draft or without."""

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted, [0, 1]; 0 when none was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation."""

    text: str
    """The whole text."""
    token_ids: tuple[int, ...]
    """All generated tokens."""
    log_probabilities: tuple[float, ...]
    """Natural log-probabilities, one per token id; empty unless they were asked for."""
    finish_reason: FinishReason
    """Why it ended."""
    stop_sequence: str
    """The stop text that ended it; empty when something else did."""
    usage: Usage
    """Tokens counted."""
    timings: Timings
    """Seconds by phase: queue, prompt, generation."""
    speculation: SpeculationStatistics
    """Drafts and what was accepted of them."""
    request_id: str
    """Id of the request, as in the server's log."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of a prompt, and how many there may be."""

    prompt_tokens: int
    """Tokens of the prompt as the model would see it."""
    context_tokens: int
    """Most tokens of a request, prompt and output together."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the server serves it."""

    name: str
    """Name that requests use."""
    architecture: str
    """Architecture as named in the GGUF file, such as "qwen35"."""
    description: str
    """One line: architecture, size, quantisation."""
    parameter_count: int
    """Number of weights."""
    size_bytes: int
    """Size of the weights."""
    vocabulary_size: int
    """Valid token ids are [0, vocabulary_size)."""
    context_tokens: int
    """Most tokens of a request, prompt and output together."""
    training_context_tokens: int
    """Context that the model was trained with."""
    recurrent: bool
    """Whether the model has recurrent layers."""
    chat_template: bool
    """Whether chat messages are accepted."""
    speculation_mode: SpeculationMode
    """Which drafter proposes tokens."""
    max_draft_tokens: int
    """Most tokens drafted in one step; 0 when the server does not speculate."""
    default_draft_tokens: int
    """Draft tokens per step when the request does not say."""
    slot_count: int
    """Requests that run at once."""
    end_token_id: int
    """Id of the token that ends a generation; -1 when there is none."""


class Collected:
    """All chunks of one generation so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._log_probabilities: list[float] = []

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return "".join(self._texts)

    def add(self, chunk: Chunk) -> None:
        """Takes the next chunk."""
        self._texts.append(chunk.text)
        self._token_ids += chunk.token_ids
        self._log_probabilities += chunk.log_probabilities

    def finish(self, end: generation_pb2.GenerationResult) -> Result:
        """Returns the finished generation."""
        return Result(
            text=self.text,
            token_ids=tuple(self._token_ids),
            log_probabilities=tuple(self._log_probabilities),
            finish_reason=FinishReason.of(end.finish_reason),
            stop_sequence=end.stop_sequence,
            usage=usage_from(end.usage),
            timings=Timings(
                queue_s=end.timings.queue_seconds,
                prefill_s=end.timings.prefill_seconds,
                decode_s=end.timings.decode_seconds,
                first_token_s=end.timings.first_token_seconds,
                preempted_s=end.timings.parked_seconds,
            ),
            speculation=_speculation(end.speculation),
            request_id=end.request_id,
        )


def chunk_from(message: generation_pb2.GenerateResponse) -> Chunk:
    """Returns the chunk of a message; that of an event of a newer server is empty."""
    if message.WhichOneof("event") == "progress":
        progress = message.progress
        return Chunk("", progress=PromptProgress(progress.computed_tokens, progress.prompt_tokens))
    chunk = message.chunk
    return Chunk(chunk.text, tuple(chunk.token_ids), tuple(chunk.log_probabilities))


def model_from(model: model_pb2.Model) -> Model:
    """Returns the model of a message."""
    values = {field.name: getattr(model, field.name) for field in model.DESCRIPTOR.fields}
    return Model(**values | {"speculation_mode": SpeculationMode.of(model.speculation_mode)})


def _speculation(statistics: generation_pb2.SpeculationStatistics) -> SpeculationStatistics:
    return SpeculationStatistics(
        mode=SpeculationMode.of(statistics.mode),
        n_drafts=statistics.draft_count,
        n_drafted=statistics.drafted_tokens,
        n_accepted=statistics.accepted_tokens,
        n_accepted_by_position=tuple(statistics.accepted_tokens_by_position),
        n_steps=statistics.step_count,
    )
