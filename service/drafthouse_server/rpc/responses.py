"""Plain values to protobuf: what clients read, and how a stream is written to them."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from drafthouse.v1 import generation_pb2, model_pb2
from drafthouse_server.rpc.interceptors import USAGE_KEY
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    ProgressEvent,
    Sequence,
    TokensEvent,
    Usage,
)
from drafthouse_server.serving.accounting import Account
from drafthouse_server.serving.detokenizer import Detokenizer
from drafthouse_server.serving.requests import MODE_OFF, Generation
from drafthouse_server.step import EngineLimits, ModelCard
from drafthouse_server.tenancy.limits import Standing

if TYPE_CHECKING:  # it needs this module
    from drafthouse_server.rpc.services import CallInfo

__all__ = [
    "MODES",
    "Output",
    "StreamWriter",
    "mode_of",
    "model_message",
    "progress_message",
    "rate_limit_headers",
    "usage_message",
]

_BEGUN_KEY = "drafthouse-request-id"
"""Initial metadata of a stream of which something is computed, with the call's id: it is billed."""

_HEADERS_S = 1.0
"""Seconds that gRPC may take to send initial metadata of a call that was cancelled meanwhile."""

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # at run time it is not generic
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


def progress_message(events: abc.Sequence[Event]) -> generation_pb2.GenerateResponse | None:
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

    def take(self, events: abc.Sequence[Event]) -> generation_pb2.GenerateResponse | None:
        """Returns a message of all new text and tokens; None when there is nothing new.

        Args:
            events: At least one.
        """
        tokens: abc.Sequence[int]
        logprobs: abc.Sequence[float]
        first, last = events[0], events[-1]
        if first is last and isinstance(first, TokensEvent):  # the usual case
            tokens, logprobs = first.tokens, first.logprobs
        else:
            news = [event for event in events if isinstance(event, TokensEvent)]
            tokens = [token for event in news for token in event.tokens]
            logprobs = [logprob for event in news for logprob in event.logprobs]
        new = self._detokenizer.feed(tokens)
        text, n_tokens = new.text, new.n_tokens
        if isinstance(last, FinishEvent | ErrorEvent):
            is_whole = isinstance(last, FinishEvent) and last.reason in _FINISH_REASONS
            text += self._detokenizer.finish(is_cut_off=not is_whole)
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

    def end(self, last: Event, sequence: Sequence) -> FinishEvent | ErrorEvent | None:
        """Returns how it ended, for its client: well, once a stop text is complete.

        What becomes of the sequence after that is of no concern to its client.

        Args:
            last: The last event that was taken; None is returned while it is not the terminal one.
            sequence: Its sequence.
        """
        if self.has_stopped:
            return FinishEvent(FinishReason.STOP, sequence.timings, sequence.tally.counts)
        return last if isinstance(last, FinishEvent | ErrorEvent) else None

    def result(
        self, end: FinishEvent, sequence: Sequence, usage: Usage
    ) -> generation_pb2.GenerationResult:
        """Returns the result of what ended so, as `end` says.

        Without a finish reason when the client is no longer there.
        """
        timings, counts = end.timings, end.speculation
        return generation_pb2.GenerationResult(
            finish_reason=_FINISH_REASONS.get(end.reason, generation_pb2.FINISH_REASON_UNSPECIFIED),
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
            request_id=sequence.request.request_id,
        )


class StreamWriter:
    """Writes the messages of one accepted stream, and tells its account of them.

    Args:
        account: Account of the stream.
        caller: The stream's call.
        context: grpc's context of that call.
        clock: Monotonic time in seconds, the caller's own.
    """

    def __init__(
        self, account: Account, caller: CallInfo, context: _Context, clock: Callable[[], float]
    ) -> None:
        self.account = account
        """Account of the stream."""
        self._caller = caller
        self._context = context
        self._clock = clock
        self._has_told = False

    async def begin(self, request_id: str, standings: Iterable[Standing]) -> None:
        """Tells the client that its stream has begun, so that it asks nobody else for it.

        Args:
            request_id: Id of the call.
            standings: How far the rates of its tenant are used.

        Cancellation:
            It is told all the same: without that, no status could be sent.
        """
        self._caller.await_reader(self._clock())
        begun = (_BEGUN_KEY, request_id)
        sending = asyncio.ensure_future(
            self._context.send_initial_metadata((begun, *rate_limit_headers(standings)))
        )
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            # Cut off, grpc.aio would send them again with the status, which then fails.
            sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
            await asyncio.wait([sending], timeout=_HEADERS_S)
            raise
        self._caller.go_on()

    async def write(self, response: generation_pb2.GenerateResponse) -> None:
        """Writes a message; its tokens count once the transport has taken it."""
        n_tokens = len(response.chunk.token_ids)
        if self.account.must_wait(n_tokens):
            await self.account.wait(n_tokens)
        self._caller.await_reader(self._clock())
        await self._context.write(response)
        self._caller.go_on()
        if n_tokens:
            self.account.sent(n_tokens)

    def end(self, outcome: str) -> None:
        """Ends the account, and lets the trailers tell of it. Of no effect when it has ended.

        Args:
            outcome: stop, length, cancelled, deadline, or an error's reason.
        """
        self.account.end(outcome)
        if not self._has_told:
            self._has_told = True
            trailer = (USAGE_KEY, usage_message(self.account.usage).SerializeToString())
            before = self._context.trailing_metadata() or ()
            self._context.set_trailing_metadata((*before, trailer))

    async def settle(self, outcome: str) -> None:
        """Ends the account, and waits until its record is written.

        Args:
            outcome: As of `end`.
        """
        self.end(outcome)
        if outcome != FinishReason.DEADLINE.name.lower():  # whose client does not wait for a disk
            await self.account.written()

    async def finish(self, result: generation_pb2.GenerationResult, end: FinishEvent) -> None:
        """Writes the result of a stream, or the status of one that ended without."""
        self._caller.await_reader(self._clock())
        if result.finish_reason:
            await self._context.write(generation_pb2.GenerateResponse(result=result))
        elif end.reason is FinishReason.DEADLINE:
            await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        else:
            await self._context.abort(grpc.StatusCode.CANCELLED, "the request was cancelled")


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
