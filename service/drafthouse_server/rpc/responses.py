"""Plain values to protobuf: what clients read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from drafthouse.v1 import generation_pb2, model_pb2
from drafthouse_server.scheduling.sequence import (
    Event,
    FinishEvent,
    FinishReason,
    ProgressEvent,
    TokensEvent,
    Usage,
)
from drafthouse_server.scheduling.sequence import Sequence as TokenSequence
from drafthouse_server.serving.detokenizer import Detokenizer
from drafthouse_server.serving.requests import MODE_OFF, Generation
from drafthouse_server.step import EngineLimits, ModelCard
from drafthouse_server.tenancy.limits import Standing

__all__ = [
    "MODES",
    "Output",
    "mode_of",
    "model_message",
    "progress_message",
    "rate_limit_headers",
    "usage_message",
]

_Mode: TypeAlias = model_pb2.SpeculationMode.ValueType

MODES: dict[str, _Mode] = {
    MODE_OFF: model_pb2.SPECULATION_MODE_OFF,
    "mtp": model_pb2.SPECULATION_MODE_MTP,
    "eagle3": model_pb2.SPECULATION_MODE_EAGLE3,
    "simple": model_pb2.SPECULATION_MODE_SIMPLE,
    "ngram": model_pb2.SPECULATION_MODE_NGRAM,
    "dflash": model_pb2.SPECULATION_MODE_DFLASH,
    "dspark": model_pb2.SPECULATION_MODE_DSPARK,
}
"""Enum values by the names of plain values."""

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def mode_of(draft_type: str) -> str:
    """Returns the mode of a server that drafts so; its several n-gram kinds are one."""
    if draft_type == "none":
        return MODE_OFF
    return "ngram" if draft_type.startswith("ngram") else draft_type


def progress_message(events: Sequence[Event]) -> generation_pb2.GenerateResponse | None:
    """Returns how much of the prompt is computed: the last that is known, if anything is new."""
    for event in reversed(events):
        if isinstance(event, ProgressEvent):
            progress = generation_pb2.PromptProgress(
                computed_tokens=event.n_computed, prompt_tokens=event.n_prompt
            )
            return generation_pb2.GenerateResponse(progress=progress)
    return None


def usage_message(usage: Usage) -> generation_pb2.Usage:
    """Returns counted tokens as clients read them, in a result and in trailers."""
    return generation_pb2.Usage(
        prompt_tokens=usage.n_prompt,
        output_tokens=usage.n_output,
        reused_prompt_tokens=usage.n_reused,
    )


class Output:
    """Turns the events of one sequence into what its client reads; no I/O.

    Args:
        wanted: What the client asked for.
        piece: Returns the bytes of a token.
    """

    def __init__(self, wanted: Generation, piece: Callable[[int], bytes]) -> None:
        self._wanted = wanted
        stops = wanted.stop_token_ids

        def visible(token: int) -> bytes:
            return b"" if token in stops else piece(token)

        self._detokenizer = Detokenizer(visible if stops else piece, wanted.stops)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop text is complete; what comes after it is dropped."""
        return bool(self._detokenizer.matched_stop)

    def take(self, events: Sequence[Event]) -> generation_pb2.GenerateResponse | None:
        """Returns a message of all new text and tokens; None when there is nothing new.

        Args:
            events: At least one.
        """
        tokens: Sequence[int]
        logprobs: Sequence[float]
        first, last = events[0], events[-1]
        if first is last and isinstance(first, TokensEvent):  # the usual case
            tokens, logprobs = first.tokens, first.logprobs
        else:
            news = [event for event in events if isinstance(event, TokensEvent)]
            tokens = [token for event in news for token in event.tokens]
            logprobs = [logprob for event in news for logprob in event.logprobs]
        new = self._detokenizer.feed(tokens)
        text, n_tokens = new.text, new.n_tokens
        if isinstance(last, FinishEvent):
            text += self._detokenizer.finish()
        if not (n_tokens or text):
            return None
        if n_tokens < len(tokens):
            tokens, logprobs = tokens[:n_tokens], logprobs[:n_tokens]
        # Filled in place: nested constructors take more than twice as long.
        response = generation_pb2.GenerateResponse()
        chunk = response.chunk
        chunk.text = text
        chunk.token_ids.extend(tokens)
        if logprobs:
            chunk.log_probabilities.extend(logprobs)
        return response

    def reason(self, end: FinishEvent) -> FinishReason:
        """Returns why it ended, for its client."""
        return FinishReason.STOP if self.has_stopped else end.reason

    def result(
        self, end: FinishEvent, sequence: TokenSequence, usage: Usage
    ) -> generation_pb2.GenerationResult:
        """Returns how it ended; without a finish reason when the client is no longer there."""
        timings, counts = end.timings, end.speculation
        return generation_pb2.GenerationResult(
            finish_reason=_FINISH_REASONS.get(
                self.reason(end), generation_pb2.FINISH_REASON_UNSPECIFIED
            ),
            stop_sequence=self._detokenizer.matched_stop,
            usage=usage_message(usage),
            timings=generation_pb2.Timings(
                queue_seconds=timings.queue_s,
                prefill_seconds=timings.prefill_s,
                decode_seconds=timings.decode_s,
                first_token_seconds=timings.first_token_s,
                parked_seconds=timings.preempted_s,
            ),
            speculation=generation_pb2.SpeculationStatistics(
                mode=MODES[self._wanted.mode],
                draft_count=counts.n_drafts,
                drafted_tokens=counts.n_drafted,
                accepted_tokens=counts.n_accepted,
                accepted_tokens_by_position=counts.n_accepted_by_position,
                step_count=counts.n_steps,
            ),
            request_id=sequence.request_id,
        )


def rate_limit_headers(standings: Iterable[Standing]) -> tuple[tuple[str, str], ...]:
    """Returns metadata that tells a client how far its tenant's rates are used.

    `-tokens` is the nearer of input and output tokens to its limit.
    """
    by_kind = {standing.kind: standing for standing in standings}
    tokens = [standing for kind, standing in by_kind.items() if kind.endswith("tokens")]
    if tokens:
        by_kind["tokens"] = min(tokens, key=lambda standing: standing.n_left / standing.limit)
    return tuple(
        (f"x-ratelimit-{name}-{kind}", value)
        for kind, standing in by_kind.items()
        for name, value in (
            ("limit", str(standing.limit)),
            ("remaining", str(standing.n_left)),
            ("reset", f"{standing.reset_s:.3f}"),
        )
    )


def model_message(
    card: ModelCard, limits: EngineLimits, mode: str, n_draft_default: int
) -> model_pb2.Model:
    """Returns what clients may know of a model."""
    is_speculating = mode != MODE_OFF
    return model_pb2.Model(
        name=card.name,
        architecture=card.architecture,
        description=card.description,
        parameter_count=card.n_params,
        size_bytes=card.size_bytes,
        vocabulary_size=card.n_vocab,
        context_tokens=min(limits.n_ctx_seq, limits.n_ctx),
        training_context_tokens=card.n_ctx_train,
        recurrent=card.is_recurrent,
        chat_template=card.has_chat_template,
        speculation_mode=MODES[mode],
        max_draft_tokens=limits.n_draft_max if is_speculating else 0,
        default_draft_tokens=n_draft_default if is_speculating else 0,
        slot_count=limits.n_seq_max,
        end_token_id=card.token_eos,
    )
