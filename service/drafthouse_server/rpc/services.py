"""The services of the protos. Every method has four beats: check, delegate, map the error, fill.

The third is shared: methods raise `DrafthouseError`, and the interceptor TranslateErrors maps it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message

from drafthouse.v1 import generation_pb2, model_pb2
from drafthouse.v1.generation_pb2_grpc import GenerationServiceServicer
from drafthouse.v1.model_pb2_grpc import ModelServiceServicer
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import (
    DrafthouseError,
    Draining,
    EngineError,
    FieldViolation,
    InvalidRequest,
    NotFound,
)
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    ProgressEvent,
    TokensEvent,
)
from drafthouse_server.scheduling.sequence import Sequence as TokenSequence
from drafthouse_server.serving.detokenizer import Detokenizer
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.outbox import Outbox
from drafthouse_server.step import EngineLimits, ModelCard, SamplingOptions
from drafthouse_server.tenancy.tenants import Admission, Tenant

__all__ = ["Caller", "GenerationService", "ModelService", "Served"]

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # at run time it is not generic
_Mode: TypeAlias = model_pb2.SpeculationMode.ValueType

_BYTES_PER_TOKEN_MAX = 32
"""A text with more bytes per token of context than this is refused before it is tokenised."""

_N_MODEL_BYTES_MAX = 256
_N_GRAMMAR_BYTES_MAX = 65536
_N_LOGIT_BIAS_MAX = 1024
_N_BREAKERS_MAX, _N_BREAKER_BYTES_MAX = 32, 64
_N_STOPS_MAX, _N_STOP_BYTES_MAX, _N_STOP_TOKENS_MAX = 16, 256, 64
_N_PAGE_MAX, _N_PAGE_DEFAULT = 1000, 100
_LOGIT_BIAS_FORBIDS = -100.0
_DRY_MULTIPLIER_DEFAULT = 0.8

_MODES: dict[str, _Mode] = {
    "none": model_pb2.SPECULATION_MODE_OFF,
    "mtp": model_pb2.SPECULATION_MODE_MTP,
    "eagle3": model_pb2.SPECULATION_MODE_EAGLE3,
    "simple": model_pb2.SPECULATION_MODE_SIMPLE,
    "ngram-simple": model_pb2.SPECULATION_MODE_NGRAM,
    "ngram-map-k": model_pb2.SPECULATION_MODE_NGRAM,
    "ngram-map-k4v": model_pb2.SPECULATION_MODE_NGRAM,
    "ngram-mod": model_pb2.SPECULATION_MODE_NGRAM,
    "ngram-cache": model_pb2.SPECULATION_MODE_NGRAM,
    "dflash": model_pb2.SPECULATION_MODE_DFLASH,
    "dspark": model_pb2.SPECULATION_MODE_DSPARK,
}
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class Caller(Protocol):
    """What a service must know of the call that it serves."""

    @property
    def request_id(self) -> str:
        """Id of the call."""
        ...

    @property
    def received_at(self) -> float:
        """Monotonic time of its receipt, in seconds."""
        ...

    @property
    def tenant(self) -> Tenant:
        """Who calls."""
        ...


@dataclass(frozen=True, slots=True)
class _Range:
    """The numbers that a field may have."""

    low: float
    """Smallest one."""
    high: float = math.inf
    """Largest one; infinity itself is never allowed."""
    is_open: bool = False
    """Whether `low` itself is not allowed."""

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.low <= value <= self.high and not (self.is_open and value == self.low)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{'>' if self.is_open else '>='} {self.low:g}"
        return f"in {'(' if self.is_open else '['}{self.low:.10g}, {self.high:.10g}]"


_SAMPLING_RULES: tuple[tuple[str, str, _Range], ...] = (
    ("temperature", "temperature", _Range(0, 10)),
    ("top_k", "top_k", _Range(0)),
    ("top_p", "top_p", _Range(0, 1, is_open=True)),
    ("min_p", "min_p", _Range(0, 1)),
    ("typical_p", "typical_p", _Range(0, 1, is_open=True)),
    ("top_n_sigma", "top_n_sigma", _Range(0, is_open=True)),
    ("seed", "seed", _Range(0, 4294967294)),
    ("penalties.last_tokens", "penalty_last_n", _Range(-1, 65536)),
    ("penalties.repeat", "penalty_repeat", _Range(0, 10, is_open=True)),
    ("penalties.frequency", "penalty_frequency", _Range(-10, 10)),
    ("penalties.presence", "penalty_presence", _Range(-10, 10)),
    ("dry.multiplier", "dry_multiplier", _Range(0, 100)),
    ("dry.base", "dry_base", _Range(1, 10)),
    ("dry.allowed_tokens", "dry_allowed_length", _Range(0, 1024)),
    ("dry.last_tokens", "dry_penalty_last_n", _Range(-1, 65536)),
    ("xtc.probability", "xtc_probability", _Range(0, 1)),
    ("xtc.threshold", "xtc_threshold", _Range(0, 1)),
)
"""Path below `sampling`, name in `SamplingOptions`, rule."""


class _Fields:
    """Collects all fields of a request that break their rules: clients learn of them at once."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []

    def refuse(self, path: str, description: str) -> None:
        """Notes a violation."""
        self._violations.append(FieldViolation(path, description))

    def check(self, path: str, value: float, rule: _Range) -> bool:
        """Returns whether a number keeps its rule, and notes it otherwise."""
        if value in rule:
            return True
        self.refuse(path, f"must be {rule}, is {value:g}")
        return False

    def check_count(self, path: str, n: int, n_max: int) -> None:
        """Checks the length of a list."""
        if n > n_max:
            self.refuse(path, f"must have at most {n_max} entries, has {n}")

    def check_bytes(self, path: str, text: str, n_max: int, n_min: int = 0) -> None:
        """Checks the length of a text in UTF-8."""
        n = len(text.encode())
        if not n_min <= n <= n_max:
            self.refuse(path, f"must have {n_min} to {n_max} bytes, has {n}")

    def check_tokens(self, path: str, token_ids: Sequence[int], n_vocab: int) -> None:
        """Checks token ids; of several that are wrong the first one is named."""
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < n_vocab):
            return
        i = next(i for i, token in enumerate(token_ids) if not 0 <= token < n_vocab)
        self.refuse(f"{path}[{i}]", f"must be in [0, {n_vocab}), is {token_ids[i]}")

    def close(self) -> None:
        """Ends the check.

        Raises:
            InvalidRequest: a field breaks its rule (INVALID_FIELD).
        """
        if self._violations:
            raise InvalidRequest(self._violations)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A generation as a client wants it, checked."""

    sampling: SamplingOptions
    """How tokens are chosen."""
    stops: tuple[str, ...]
    """Texts that end it."""
    stop_token_ids: frozenset[int]
    """Tokens that end it."""
    n_output_max: int | None
    """Most tokens to generate; None is until the context is full."""
    mode: _Mode
    """How tokens are drafted."""
    n_draft: int | None
    """K; None is the server's default."""
    priority: int
    """Among the tenant's own."""
    has_progress: bool
    """Whether it wants to know how much of the prompt is computed."""


class Served:
    """What the services offer: one model, to whom it is allowed, while the server is not draining.

    Args:
        loop: Runs the model.
        admission: Decides who may enter.
        n_draft_default: K when the request does not say.
        current_call: Returns the call that the calling task serves.
        clock: Monotonic time in seconds, the loop's own.
        retry_after_s: Advice to those who come while the server drains, seconds.
    """

    def __init__(
        self,
        loop: StepLoop,
        admission: Admission,
        *,
        n_draft_default: int,
        current_call: Callable[[], Caller],
        clock: Callable[[], float] = time.monotonic,
        retry_after_s: float = 1.0,
    ) -> None:
        self.loop = loop
        self.admission = admission
        self.clock = clock
        self.card = loop.engine.card
        self.limits = loop.engine.limits
        self.n_draft_default = min(n_draft_default, self.limits.n_draft_max)
        self._current_call = current_call
        self._retry_after_s = retry_after_s
        self._pieces: dict[int, bytes] = {}  # at most the vocabulary

    @property
    def engine(self) -> Engine:
        """The engine; its thread rules apply."""
        return self.loop.engine

    @property
    def n_context(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return min(self.limits.n_ctx_seq, self.limits.n_ctx)

    @property
    def mode(self) -> _Mode:
        """How this server drafts."""
        return _MODES[self.limits.draft_type]

    def enter(self) -> Caller:
        """Returns the caller, if the server takes calls.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
        """
        if self.loop.is_draining:
            raise Draining(self._retry_after_s, is_failed=self.loop.has_failed)
        return self._current_call()

    def enter_model(self, model: str) -> Caller:
        """Returns the caller, if it may use this model; empty is the default one.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
            InvalidRequest: no model has such a name (INVALID_FIELD).
            PermissionDenied: the tenant may not use it, if it exists or not (MODEL_NOT_ALLOWED).
            NotFound: it is not served here (MODEL_NOT_FOUND).
        """
        caller = self.enter()
        fields = _Fields()
        fields.check_bytes("model", model, _N_MODEL_BYTES_MAX)
        fields.close()
        caller.tenant.check_model(model or self.card.name)
        if model and model != self.card.name:
            raise NotFound(model)
        return caller

    def piece(self, token: int) -> bytes:
        """Returns what a token adds to the text; nothing for control and end tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            is_text = not self.engine.is_eog(token)
            piece = self.engine.token_bytes(token, special=False) if is_text else b""
            self._pieces[token] = piece
        return piece

    def check_prompt(self, fields: _Fields, prompt: generation_pb2.Prompt) -> None:
        """Checks a prompt as far as this goes without tokenising it."""
        kind = prompt.WhichOneof("content")
        if kind is None:
            fields.refuse("prompt", "is required: text, tokens or chat")
        elif kind == "tokens":
            if not prompt.tokens.ids:
                fields.refuse("prompt.tokens.ids", "must not be empty")
            fields.check_tokens("prompt.tokens.ids", prompt.tokens.ids, self.card.n_vocab)
        elif kind == "text":
            self._check_text(fields, "prompt.text", [prompt.text])
            if not prompt.text:
                fields.refuse("prompt.text", "must not be empty")
        else:
            self._check_chat(fields, prompt.chat)

    def _check_chat(self, fields: _Fields, chat: generation_pb2.ChatMessages) -> None:
        if not self.card.has_chat_template:
            fields.refuse("prompt.chat", "this model has no chat template")
        if not chat.messages:
            fields.refuse("prompt.chat.messages", "must not be empty")
        for i, message in enumerate(chat.messages):
            if not message.role:
                fields.refuse(f"prompt.chat.messages[{i}].role", "must not be empty")
        texts = [text for message in chat.messages for text in (message.role, message.content)]
        self._check_text(fields, "prompt.chat", texts)

    def _check_text(self, fields: _Fields, path: str, texts: Sequence[str]) -> None:
        n_bytes_max = _BYTES_PER_TOKEN_MAX * self.n_context
        n_bytes = sum(len(text.encode()) for text in texts)
        if n_bytes > n_bytes_max:
            fields.refuse(path, f"must have at most {n_bytes_max} bytes, has {n_bytes}")

    async def tokenize(self, prompt: generation_pb2.Prompt) -> list[int]:
        """Returns the tokens of a checked prompt; texts are tokenised on another thread.

        Raises:
            InvalidRequest: there are none, or the chat template fails on it (INVALID_FIELD).
        """
        if prompt.WhichOneof("content") == "tokens":
            return list(prompt.tokens.ids)
        tokens = await asyncio.to_thread(self._tokenize, prompt)
        if not tokens:
            raise InvalidRequest([FieldViolation("prompt", "has no tokens")])
        return tokens

    def _tokenize(self, prompt: generation_pb2.Prompt) -> list[int]:
        if prompt.WhichOneof("content") == "text":
            return self.engine.tokenize(prompt.text, add_special=True, parse_special=False)
        messages = [(message.role, message.content) for message in prompt.chat.messages]
        text = self.engine.format_chat(messages)
        tokens = self.engine.tokenize(text, add_special=True, parse_special=True)
        return tokens[1:] if self._starts_twice(tokens) else tokens

    def _starts_twice(self, tokens: Sequence[int]) -> bool:
        """Returns whether template and tokenizer have both written the start token."""
        return len(tokens) > 1 and tokens[0] == tokens[1] and not self.piece(tokens[0])


class GenerationService(GenerationServiceServicer):
    """Generates text and counts tokens. See generation.proto.

    Args:
        served: What is offered.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    async def Generate(  # type: ignore[override]  # a coroutine that writes, see interceptors._wrapped
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Generates tokens and streams them as they are verified."""
        outcome = EngineError.reason  # as TranslateErrors calls whatever is no error of ours
        try:
            caller = self._served.enter_model(request.model)
            wanted = _check_generate(request, self._served)
            sequence = await self._prepare(request.prompt, wanted, caller, context)
            self._admit(caller)
            outbox = self._served.loop.submit(sequence)
            outcome = ""
        except DrafthouseError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError:  # it has left, or its time is over, before its submission
            is_late = self._deadline(context) <= self._served.clock()
            outcome = (FinishReason.DEADLINE if is_late else FinishReason.CANCELLED).name.lower()
            raise
        finally:
            if outcome:
                self._served.loop.metrics.count_request(outcome, 0, 0)
        try:
            await self._stream(outbox, sequence, wanted, context)
        finally:
            self._served.loop.cancel(sequence)  # of no effect when it has ended

    async def _prepare(
        self,
        prompt: generation_pb2.Prompt,
        wanted: _Wanted,
        caller: Caller,
        context: _Context,
    ) -> TokenSequence:
        """Returns the sequence of a request."""
        tokens = await self._served.tokenize(prompt)
        self._served.loop.check(len(tokens), wanted.n_output_max)
        sampler = await self._make_sampler(wanted.sampling)
        return TokenSequence(
            request_id=caller.request_id,
            prompt=tokens,
            sampler=sampler,
            tenant=caller.tenant.name,
            priority=wanted.priority,
            sampling=wanted.sampling,
            stop_token_ids=wanted.stop_token_ids,
            n_output_max=wanted.n_output_max,
            n_draft=wanted.n_draft,
            deadline=self._deadline(context),
            has_progress=wanted.has_progress,
            received_at=caller.received_at,
        )

    async def _make_sampler(self, sampling: SamplingOptions) -> object:
        """Makes a sampler, on another thread if it may take long.

        A grammar is compiled, and DRY reads the whole vocabulary; all else takes less than the way
        to the other thread.
        """
        make = self._served.engine.make_sampler
        if sampling.grammar or sampling.dry_multiplier:
            return await asyncio.to_thread(make, sampling)
        return make(sampling)

    def _admit(self, caller: Caller) -> None:
        """Checks the caller's limits. NOTE: nothing may wait between this and the submission."""
        load = self._served.loop.load(caller.tenant.name)
        self._served.admission.admit(caller.tenant, load, self._served.clock())

    def _deadline(self, context: _Context) -> float:
        """Returns the monotonic time after which the client does not wait."""
        remaining: float | None = context.time_remaining()
        return math.inf if remaining is None else self._served.clock() + remaining

    async def _stream(
        self, outbox: Outbox, sequence: TokenSequence, wanted: _Wanted, context: _Context
    ) -> None:
        """Writes what the sequence yields. While one message is written, the next one collects."""
        output = _Output(wanted, self._served.piece)
        while True:
            events = await outbox.receive()
            if wanted.has_progress:
                await self._tell_progress(events, context)
            response = output.take(events)
            if output.has_stopped:
                self._served.loop.finish(sequence)
            if response is not None:
                await context.write(response)
            end = events[-1]
            if isinstance(end, FinishEvent | ErrorEvent):
                break
        if isinstance(end, ErrorEvent):
            raise end.error
        await self._finish(output.result(end, sequence), end, context)

    async def _tell_progress(self, events: Sequence[Event], context: _Context) -> None:
        """Writes how much of the prompt is computed: the last that is known, if anything is new."""
        for event in reversed(events):
            if isinstance(event, ProgressEvent):
                progress = generation_pb2.PromptProgress(
                    computed_tokens=event.n_computed, prompt_tokens=event.n_prompt
                )
                await context.write(generation_pb2.GenerateResponse(progress=progress))
                return

    async def _finish(
        self, result: generation_pb2.GenerationResult, end: FinishEvent, context: _Context
    ) -> None:
        if result.finish_reason:
            await context.write(generation_pb2.GenerateResponse(result=result))
        elif end.reason is FinishReason.DEADLINE:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        else:
            await context.abort(grpc.StatusCode.CANCELLED, "the request was cancelled")

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, context: _Context
    ) -> generation_pb2.CountTokensResponse:
        """Counts the tokens of a prompt as Generate would see it."""
        self._served.enter_model(request.model)
        fields = _Fields()
        self._served.check_prompt(fields, request.prompt)
        fields.close()
        tokens = await self._served.tokenize(request.prompt)
        return generation_pb2.CountTokensResponse(
            prompt_tokens=len(tokens), context_tokens=self._served.n_context
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: _Context
    ) -> generation_pb2.TokenizeResponse:
        """Turns text into token ids."""
        self._served.enter_model(request.model)
        tokens = await asyncio.to_thread(
            self._served.engine.tokenize,
            request.text,
            add_special=request.add_special,
            parse_special=request.parse_special,
        )
        return generation_pb2.TokenizeResponse(token_ids=tokens)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: _Context
    ) -> generation_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        self._served.enter_model(request.model)
        fields = _Fields()
        fields.check_tokens("token_ids", request.token_ids, self._served.card.n_vocab)
        fields.close()
        text = await asyncio.to_thread(self._detokenize, request.token_ids, request.keep_special)
        return generation_pb2.DetokenizeResponse(text=text)

    def _detokenize(self, tokens: Sequence[int], keep_special: bool) -> str:
        engine = self._served.engine
        pieces = [engine.token_bytes(token, special=keep_special) for token in tokens]
        return b"".join(pieces).decode("utf-8", errors="replace")


class _Output:
    """Turns the events of one sequence into what its client reads; no I/O.

    Args:
        wanted: What the client asked for.
        piece: Returns the bytes of a token.
    """

    def __init__(self, wanted: _Wanted, piece: Callable[[int], bytes]) -> None:
        self._wanted = wanted
        self._n_output = 0
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
        self._n_output += n_tokens
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

    def result(self, end: FinishEvent, sequence: TokenSequence) -> generation_pb2.GenerationResult:
        """Returns how it ended; without a finish reason when the client is no longer there."""
        reason = FinishReason.STOP if self.has_stopped else end.reason
        timings, counts = end.timings, end.speculation
        return generation_pb2.GenerationResult(
            finish_reason=_FINISH_REASONS.get(reason, generation_pb2.FINISH_REASON_UNSPECIFIED),
            stop_sequence=self._detokenizer.matched_stop,
            usage=generation_pb2.Usage(
                prompt_tokens=end.usage.n_prompt,
                output_tokens=self._n_output,
                reused_prompt_tokens=end.usage.n_reused,
            ),
            timings=generation_pb2.Timings(
                queue_seconds=timings.queue_s,
                prefill_seconds=timings.prefill_s,
                decode_seconds=timings.decode_s,
                first_token_seconds=timings.first_token_s,
                parked_seconds=timings.parked_s,
            ),
            speculation=generation_pb2.SpeculationStatistics(
                mode=self._wanted.mode,
                draft_count=counts.n_drafts,
                drafted_tokens=counts.n_drafted,
                accepted_tokens=counts.n_accepted,
                accepted_tokens_by_position=counts.n_accepted_by_position,
                step_count=counts.n_steps,
            ),
            request_id=sequence.request_id,
        )


class ModelService(ModelServiceServicer):
    """Tells which models a server serves and how. See model.proto.

    Args:
        served: What is offered.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: _Context
    ) -> model_pb2.GetModelResponse:
        """Returns one model."""
        self._served.enter_model(request.model)
        return model_pb2.GetModelResponse(model=_model_message(self._served))

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """Lists the models that the caller may use, ordered by name."""
        tenant = self._served.enter().tenant
        names = [self._served.card.name]
        fields = _Fields()
        fields.check("page_size", request.page_size, _Range(0, _N_PAGE_MAX))
        if request.page_token and request.page_token not in names:
            fields.refuse("page_token", "must be the next_page_token of the page before")
        fields.close()
        allowed = [name for name in names if tenant.models is None or name in tenant.models]
        page = [name for name in allowed if name > request.page_token]
        page = page[: request.page_size or _N_PAGE_DEFAULT]
        return model_pb2.ListModelsResponse(models=[_model_message(self._served) for _ in page])


def _model_message(served: Served) -> model_pb2.Model:
    card, limits = served.card, served.limits
    is_speculating = served.mode != model_pb2.SPECULATION_MODE_OFF
    return model_pb2.Model(
        name=card.name,
        architecture=card.architecture,
        description=card.description,
        parameter_count=card.n_params,
        size_bytes=card.size_bytes,
        vocabulary_size=card.n_vocab,
        context_tokens=served.n_context,
        training_context_tokens=card.n_ctx_train,
        recurrent=card.is_recurrent,
        chat_template=card.has_chat_template,
        speculation_mode=served.mode,
        max_draft_tokens=limits.n_draft_max if is_speculating else 0,
        default_draft_tokens=served.n_draft_default if is_speculating else 0,
        slot_count=limits.n_seq_max,
        end_token_id=card.token_eos,
    )


def _check_generate(request: generation_pb2.GenerateRequest, served: Served) -> _Wanted:
    """Checks every field of a request but the number of its tokens.

    Raises:
        InvalidRequest: names all fields that break their rules (INVALID_FIELD).
    """
    fields = _Fields()
    served.check_prompt(fields, request.prompt)
    sampling = _check_sampling(fields, request, served.card)
    mode, n_draft = _check_speculation(fields, request.speculation, served)
    _check_stop(fields, request.stop, served.card)
    fields.check("priority", request.priority, _Range(-100, 100))
    n_output_max = request.max_output_tokens if request.HasField("max_output_tokens") else None
    if n_output_max is not None:
        fields.check("max_output_tokens", n_output_max, _Range(1))
    fields.close()
    return _Wanted(
        sampling=sampling,
        stops=tuple(request.stop.sequences),
        stop_token_ids=frozenset(request.stop.token_ids),
        n_output_max=n_output_max,
        mode=mode,
        n_draft=n_draft,
        priority=request.priority,
        has_progress=request.output.progress,
    )


def _check_sampling(
    fields: _Fields, request: generation_pb2.GenerateRequest, card: ModelCard
) -> SamplingOptions:
    sampling = request.sampling
    options: dict[str, Any] = {}
    for path, name, rule in _SAMPLING_RULES:
        for value in _given(sampling, path):
            fields.check(f"sampling.{path}", value, rule)
            options[name] = value
    if sampling.HasField("dry"):
        options.setdefault("dry_multiplier", _DRY_MULTIPLIER_DEFAULT)
        options["dry_breakers"] = _check_breakers(fields, sampling.dry.breakers)
    fields.check_bytes("sampling.grammar", sampling.grammar, _N_GRAMMAR_BYTES_MAX)
    return SamplingOptions(
        **options,
        logit_bias=_check_logit_bias(fields, sampling.logit_bias, card),
        grammar=sampling.grammar,
        ignore_eos=request.stop.ignore_end_token,
        logprobs=request.output.log_probabilities,
    )


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


def _check_breakers(fields: _Fields, breakers: Sequence[str]) -> tuple[str, ...] | None:
    fields.check_count("sampling.dry.breakers", len(breakers), _N_BREAKERS_MAX)
    for i, breaker in enumerate(breakers[:_N_BREAKERS_MAX]):
        fields.check_bytes(f"sampling.dry.breakers[{i}]", breaker, _N_BREAKER_BYTES_MAX)
    return tuple(breakers) or None


def _check_logit_bias(
    fields: _Fields, biases: Sequence[generation_pb2.LogitBias], card: ModelCard
) -> tuple[tuple[int, float], ...]:
    fields.check_count("sampling.logit_bias", len(biases), _N_LOGIT_BIAS_MAX)
    pairs = []
    for i, entry in enumerate(biases[:_N_LOGIT_BIAS_MAX]):
        path = f"sampling.logit_bias[{i}]"
        fields.check(f"{path}.token_id", entry.token_id, _Range(0, card.n_vocab - 1))
        fields.check(f"{path}.bias", entry.bias, _Range(-100, 100))
        is_forbidden = entry.bias == _LOGIT_BIAS_FORBIDS
        pairs.append((entry.token_id, -math.inf if is_forbidden else entry.bias))
    return tuple(pairs)


def _check_speculation(
    fields: _Fields, speculation: generation_pb2.SpeculationOptions, served: Served
) -> tuple[_Mode, int | None]:
    """Returns the mode and K; None is the server's default."""
    limits: EngineLimits = served.limits
    off, unspecified = model_pb2.SPECULATION_MODE_OFF, model_pb2.SPECULATION_MODE_UNSPECIFIED
    if speculation.mode not in (unspecified, off, served.mode):
        name = model_pb2.SpeculationMode.Name(served.mode)
        fields.refuse("speculation.mode", f"must be {name} or SPECULATION_MODE_OFF on this server")
    n_draft = None
    if speculation.HasField("max_draft_tokens"):
        n_draft = speculation.max_draft_tokens
        fields.check("speculation.max_draft_tokens", n_draft, _Range(0, limits.n_draft_max))
    if speculation.mode == off:
        n_draft = 0
    is_off = (served.n_draft_default if n_draft is None else n_draft) == 0
    return (off if is_off else served.mode), n_draft


def _check_stop(fields: _Fields, stop: generation_pb2.StopOptions, card: ModelCard) -> None:
    fields.check_count("stop.sequences", len(stop.sequences), _N_STOPS_MAX)
    for i, text in enumerate(stop.sequences[:_N_STOPS_MAX]):
        fields.check_bytes(f"stop.sequences[{i}]", text, _N_STOP_BYTES_MAX, n_min=1)
    fields.check_count("stop.token_ids", len(stop.token_ids), _N_STOP_TOKENS_MAX)
    fields.check_tokens("stop.token_ids", stop.token_ids, card.n_vocab)
