"""The services of the protos. A method has four beats: check, delegate, map the error, fill.

The third is shared: methods raise `DrafthouseError`, and the interceptor TranslateErrors maps it.
`Generate` checks until it has a sequence and a ticket; the rest, a stream, is `_serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeAlias

import grpc

from drafthouse.v1 import generation_pb2, model_pb2
from drafthouse.v1.generation_pb2_grpc import GenerationServiceServicer
from drafthouse.v1.model_pb2_grpc import ModelServiceServicer
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.engine.text_jobs import TextJob
from drafthouse_server.errors import (
    DrafthouseError,
    Draining,
    EngineError,
    FieldViolation,
    InvalidRequest,
    NotFound,
    SlowReader,
    Unauthenticated,
)
from drafthouse_server.rpc.requests import to_generation, to_prompt
from drafthouse_server.rpc.responses import (
    Output,
    StreamWriter,
    mode_of,
    model_message,
    progress_message,
)
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    FinishReason,
    Request,
    Sequence,
)
from drafthouse_server.serving.accounting import Accounting
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.metrics import StreamTimer
from drafthouse_server.serving.outbox import Outbox
from drafthouse_server.serving.requests import (
    Generation,
    GenerationRequest,
    Prompt,
    Range,
    RequestRules,
    Violations,
    located,
)
from drafthouse_server.serving.text_workers import TextWorkers
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.admission import Ticket
from drafthouse_server.tenancy.tenants import Tenant

__all__ = ["CallInfo", "GenerationService", "ModelService", "ServiceContext"]

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # at run time it is not generic

_N_PAGE_MAX, _N_PAGE_DEFAULT = 1000, 100

_DEADLINE_SHARE, _DEADLINE_MARGIN_S = 0.05, 0.025
"""Part of its time, and most seconds of it, by which a stream ends before its deadline: later, its
client would not wait for the usage."""


class CallInfo(Protocol):
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

    @property
    def key_id(self) -> str:
        """Id of the API key; empty where there was none."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether it is ended because the client has taken no message in time."""
        ...

    @property
    def is_disowned(self) -> bool:
        """Whether it is ended because its key was revoked, or its tenant deleted."""
        ...

    def await_reader(self, now: float) -> None:
        """Notes that a message is written, which the client must take in time."""
        ...

    def go_on(self) -> None:
        """Notes that the client has taken it."""
        ...


class ServiceContext:
    """Shared state of the services: the model, admission, the text workers and the step loop.

    Args:
        loop: Runs the model.
        texts: Reads what clients send as text.
        n_draft_default: K when the request does not say.
        current_call: Returns the call that the calling task serves.
        n_messages_max: Most messages of a chat.
        accounting: Has an account of each accepted stream; one without a journal when not given.
        hold: Takes so many bytes for the current call, or raises ServerOverloaded.
        clock: Monotonic time in seconds, the loop's own.
    """

    def __init__(
        self,
        loop: StepLoop,
        texts: TextWorkers,
        *,
        n_draft_default: int,
        current_call: Callable[[], CallInfo],
        hold: Callable[[int], None] = lambda _: None,
        n_messages_max: int = 1024,
        accounting: Accounting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = loop
        self.texts = texts
        self.accounting = accounting or Accounting(loop.metrics, loop.engine.card.name)
        self.clock = clock
        self.card = loop.engine.card
        self.limits = loop.engine.limits
        self.n_draft_default = min(n_draft_default, self.limits.n_draft_max)
        self.mode = mode_of(self.limits.draft_type)
        self.rules = RequestRules(
            self.card, self.limits, self.mode, self.n_draft_default, n_messages_max
        )
        self.current_call = current_call
        self._hold = hold
        self._pieces: dict[int, bytes] = {}  # at most the vocabulary

    @property
    def engine(self) -> Engine:
        """The engine; its thread rules apply."""
        return self.loop.engine

    @property
    def n_context(self) -> int:
        """Most tokens of one request, prompt and output together."""
        return min(self.limits.n_ctx_seq, self.limits.n_ctx)

    def check_model(self, model: str, tenant: Tenant) -> None:
        """Checks that a tenant may use this model; empty is the default one.

        Raises:
            InvalidRequest: no model has such a name (INVALID_FIELD).
            PermissionDenied: the tenant may not use it, if it exists or not (MODEL_NOT_ALLOWED).
            NotFound: it is not served here (MODEL_NOT_FOUND).
        """
        self.rules.check_model_name(model)
        tenant.check_model(model or self.card.name)
        if model and model != self.card.name:
            raise NotFound(model)

    def enter(self, model: str) -> None:
        """Checks what every call has to keep; all but those about models need a ticket besides.

        The name of the model is checked alone, before the other fields: whether the tenant may ask
        at all is known before its request is looked at.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
            InvalidRequest, PermissionDenied, NotFound: See `check_model`.
        """
        self.loop.admission.check_open()
        self.check_model(model, self.current_call().tenant)

    @contextlib.asynccontextmanager
    async def admitted(self, model: str, n_bytes: int) -> AsyncIterator[Tenant]:
        """Lets a call on a model in that generates nothing, for the time of a block.

        Args:
            model: Name of the model, as the client gave it.
            n_bytes: Size of the request.

        Yields:
            Whose call it is.

        Raises:
            InvalidRequest, PermissionDenied, NotFound: See `enter`.
            Draining, QuotaExceeded, QueueFull: See `let_in`.
        """
        self.enter(model)
        async with self.let_in(n_bytes) as tenant:
            yield tenant

    @contextlib.asynccontextmanager
    async def let_in(self, n_bytes: int) -> AsyncIterator[Tenant]:
        """Lets a call in that generates nothing, for the time of a block.

        Args:
            n_bytes: Size of the request.

        Yields:
            Whose call it is.

        Raises:
            Draining: the server is shutting down (SERVER_DRAINING).
            QuotaExceeded: a limit of the tenant is reached (TENANT_QUOTA_EXCEEDED).
            QueueFull: too many wait already (QUEUE_FULL).
        """
        tenant = self.current_call().tenant
        ticket = await self.loop.admission.enter(tenant, n_bytes)
        try:
            yield tenant
        finally:
            ticket.give_back()

    def piece(self, token: int) -> bytes:
        """Returns what a token adds to the text; nothing for control and end tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            is_text = not self.engine.is_eog(token)
            piece = self.engine.token_bytes(token, special=False) if is_text else b""
            self._pieces[token] = piece
        return piece

    async def tokenize(
        self, prompt: Prompt, tenant: Tenant, sampling: SamplingOptions | None = None
    ) -> list[int]:
        """Returns the tokens of a checked prompt; what is text is read by a text worker.

        Args:
            prompt: It keeps its rules.
            tenant: Whose it is.
            sampling: How tokens are going to be chosen; a text worker reads its texts, too, so that
                a sampler can be made.

        Raises:
            InvalidRequest: there are none, the chat template fails on it, or an option cannot be
                used (INVALID_FIELD).
        """
        if sampling is not None and not _has_texts(sampling):
            sampling = None
        tokens = None
        if prompt.tokens is not None:
            tokens = list(prompt.tokens)
            if sampling is None:
                return tokens
        messages = prompt.messages
        pairs = None if messages is None else [(m.role, m.content) for m in messages]
        job = TextJob(
            text=prompt.text,
            messages=pairs,
            chat_template_kwargs=prompt.chat_template_kwargs,
            sampling=sampling,
        )
        try:
            answer = await self.texts.run(job, tenant)
        except InvalidRequest as error:
            raise located(error) from error
        self._hold(answer.n_held_bytes)  # known only now: what was made of the texts
        tokens = tokens or answer.tokens
        if not tokens:
            raise InvalidRequest([FieldViolation("prompt", "has no tokens")])
        return tokens

    async def make_sampler(self, sampling: SamplingOptions, tenant: Tenant) -> object:
        """Makes a sampler, on another thread if it has texts, which a text worker has read before.

        All else takes less than the way to the other thread.

        Raises:
            InvalidRequest, ServerOverloaded: an option cannot be used, or calls hold too much.
        """
        self._hold(sampling.window_bytes(self.n_context))
        make = self.engine.make_sampler
        try:
            if _has_texts(sampling):
                return await self.texts.make(make, sampling, tenant)
            return make(sampling)
        except InvalidRequest as error:
            raise located(error) from error


def _has_texts(sampling: SamplingOptions) -> bool:
    """Returns whether a sampler is made of texts: a grammar is compiled, breakers are looked up."""
    return bool(sampling.grammar or sampling.dry_multiplier)


class GenerationService(GenerationServiceServicer):
    """Generates text and counts tokens. See generation.proto.

    Args:
        shared: What is offered.
    """

    def __init__(self, shared: ServiceContext) -> None:
        self._shared = shared

    async def Generate(  # type: ignore[override]  # a coroutine that writes, see interceptors._wrapped
        self, request: generation_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Generates tokens and streams them as they are verified."""
        shared = self._shared
        caller = shared.current_call()
        ticket: Ticket | None = None
        outcome = EngineError.reason  # as TranslateErrors calls whatever is no error of ours
        try:
            shared.enter(request.model)
            shared.rules.check_end_user(request.end_user)
            shared.accounting.check_open()
            ticket = await shared.loop.admission.enter(
                caller.tenant,
                request.ByteSize(),
                end_user=request.end_user,
                origin=context.peer(),
            )
            asked = to_generation(request)
            wanted = shared.rules.check(asked)
            sequence = await self._prepare(asked, wanted, ticket, caller, context)
            outbox = shared.loop.submit(sequence, ticket)
            outcome = ""
            del request, asked  # up to some MiB, of no use while it waits and runs
        except DrafthouseError as error:
            outcome = error.reason
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # It has left, or its time is over, before its submission.
            outcome = self._outcome_of_gone(caller, context)
            raise
        finally:
            if outcome:
                shared.accounting.refuse(outcome)
                if ticket is not None:
                    ticket.settle(0, 0)
                    ticket.give_back()
        await self._serve(outbox, sequence, wanted, ticket, context)

    async def _serve(
        self,
        outbox: Outbox,
        sequence: Sequence,
        wanted: Generation,
        ticket: Ticket,
        context: _Context,
    ) -> None:
        """Serves an accepted sequence; on every way out it is over, and so is its account."""
        shared = self._shared
        caller = shared.current_call()
        age_s = shared.clock() - caller.received_at
        account = shared.accounting.open(sequence, age_s=age_s, key_id=caller.key_id, ticket=ticket)
        writer = StreamWriter(account, caller, context, shared.clock)
        outcome = EngineError.reason
        try:
            await outbox.begun()
            if not math.isnan(sequence.clock.slot_at):  # else it ends without one
                await writer.begin(caller.request_id, ticket.standings())
            await self._stream(outbox, sequence, wanted, writer)
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the call has ended
            outcome = self._outcome_of_gone(caller, context)
            raise
        finally:
            shared.loop.cancel(sequence)  # of no effect when it has ended
            writer.end(outcome)  # nor this

    async def _prepare(
        self,
        asked: GenerationRequest,
        wanted: Generation,
        ticket: Ticket,
        caller: CallInfo,
        context: _Context,
    ) -> Sequence:
        """Returns the sequence of a request, whose tokens are reserved."""
        tenant = caller.tenant
        tokens = await self._shared.tokenize(asked.prompt, tenant, wanted.sampling)
        n_most = self._shared.loop.check(len(tokens), wanted.n_output_max)
        n_output_max = tenant.bound_output(wanted.n_output_max, n_most)
        await ticket.book(len(tokens), n_output_max)
        sampler = await self._shared.make_sampler(wanted.sampling, tenant)
        request = Request(
            request_id=caller.request_id,
            prompt=tokens,
            tenant=tenant.name,
            end_user=asked.end_user,
            weight=tenant.weight,
            priority=min(wanted.priority, tenant.priority_max),
            sampling=wanted.sampling,
            stop_token_ids=wanted.stop_token_ids,
            n_output_max=n_output_max,
            n_draft=tenant.bound_draft(wanted.n_draft),
            deadline=self._last_moment(context),
            has_progress=wanted.has_progress,
            received_at=caller.received_at,
        )
        return Sequence(request, sampler)

    def _deadline(self, context: _Context) -> float:
        """Returns the monotonic time after which the client does not wait."""
        remaining: float | None = context.time_remaining()
        return math.inf if remaining is None else self._shared.clock() + remaining

    def _last_moment(self, context: _Context) -> float:
        """Returns the monotonic time at which to end, so that its client still reads how."""
        deadline = self._deadline(context)
        if deadline == math.inf:
            return deadline
        remaining_s = deadline - self._shared.clock()
        return deadline - min(_DEADLINE_SHARE * remaining_s, _DEADLINE_MARGIN_S)

    def _outcome_of_gone(self, caller: CallInfo, context: _Context) -> str:
        """Returns the outcome of a request that ended while it was served."""
        if caller.is_disowned:
            return Unauthenticated.reason
        if caller.is_stuck:
            return SlowReader.reason
        is_late = self._deadline(context) <= self._shared.clock()
        return (FinishReason.DEADLINE if is_late else FinishReason.CANCELLED).name.lower()

    async def _stream(
        self,
        outbox: Outbox,
        sequence: Sequence,
        wanted: Generation,
        writer: StreamWriter,
    ) -> None:
        """Writes what the sequence yields. While one message is written, the next one collects."""
        output = Output(wanted, self._shared.piece)
        clock = self._shared.clock
        request = sequence.request
        times = StreamTimer(self._shared.loop.metrics, request.received_at, clock, request.tenant)
        end = None
        while end is None:
            events = await outbox.receive()
            if wanted.has_progress and (progress := progress_message(events)) is not None:
                await writer.write(progress)
            for part in writer.account.parts(events):
                response = output.take(part)
                if output.has_stopped:
                    self._shared.loop.finish(sequence)
                if response is not None:
                    await writer.write(response)
                    if n_tokens := len(response.chunk.token_ids):
                        times.note(n_tokens)
            if output.has_stopped:
                await self._wait_for_end(outbox, sequence)
            end = output.end(events[-1], sequence)
        if isinstance(end, ErrorEvent):
            await writer.settle(end.error.reason)
            if isinstance(end.error, Draining):
                end.error.has_begun = not math.isnan(sequence.clock.slot_at)
            raise end.error
        times.end()
        await writer.settle(end.reason.name.lower())
        await writer.finish(output.result(end, sequence, writer.account.usage), end)

    async def _wait_for_end(self, outbox: Outbox, sequence: Sequence) -> None:
        """Waits until a sequence whose stop text is complete has ended, in whatever way.

        Its client, told the end, finds the slot free. The step in flight may take longer than that
        client waits: what it is to be told is known without.
        """
        left_s = sequence.request.deadline - self._shared.clock()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if left_s == math.inf else left_s):
                while await outbox.receive():
                    pass

    async def CountTokens(
        self, request: generation_pb2.CountTokensRequest, context: _Context
    ) -> generation_pb2.CountTokensResponse:
        """Counts the tokens of a prompt as Generate would see it."""
        async with self._shared.admitted(request.model, request.ByteSize()) as tenant:
            prompt = to_prompt(request.prompt)
            self._shared.rules.check_prompt(prompt)
            tokens = await self._shared.tokenize(prompt, tenant)
        return generation_pb2.CountTokensResponse(
            prompt_tokens=len(tokens), context_tokens=self._shared.n_context
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: _Context
    ) -> generation_pb2.TokenizeResponse:
        """Turns text into token ids."""
        async with self._shared.admitted(request.model, request.ByteSize()) as tenant:
            self._shared.rules.check_text("text", request.text)
            job = TextJob(
                text=request.text,
                add_special=request.add_special,
                parse_special=request.parse_special,
            )
            answer = await self._shared.texts.run(job, tenant)
        return generation_pb2.TokenizeResponse(token_ids=answer.tokens)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: _Context
    ) -> generation_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        async with self._shared.admitted(request.model, request.ByteSize()) as tenant:
            rules = self._shared.rules
            rules.check_token_ids(request.token_ids)
            job = TextJob(
                tokens=request.token_ids,
                keep_special=request.keep_special,
                n_bytes_max=rules.n_text_bytes_max,
            )
            answer = await self._shared.texts.run(job, tenant)
        return generation_pb2.DetokenizeResponse(text=answer.text)


class ModelService(ModelServiceServicer):
    """Tells which models a server serves and how. See model.proto.

    Args:
        shared: What is offered.
    """

    def __init__(self, shared: ServiceContext) -> None:
        self._shared = shared

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: _Context
    ) -> model_pb2.GetModelResponse:
        """Returns one model."""
        self._shared.enter(request.model)
        return model_pb2.GetModelResponse(model=self._model())

    async def ListModels(
        self, request: model_pb2.ListModelsRequest, context: _Context
    ) -> model_pb2.ListModelsResponse:
        """Lists the models that the caller may use, ordered by name."""
        self._shared.loop.admission.check_open()
        tenant = self._shared.current_call().tenant
        names = [self._shared.card.name]
        violations = Violations()
        violations.check("page_size", request.page_size, Range(0, _N_PAGE_MAX))
        if request.page_token and request.page_token not in names:
            violations.refuse("page_token", "must be the next_page_token of the page before")
        violations.close()
        allowed = [name for name in names if tenant.models is None or name in tenant.models]
        page = [name for name in allowed if name > request.page_token]
        page = page[: request.page_size or _N_PAGE_DEFAULT]
        return model_pb2.ListModelsResponse(models=[self._model() for _ in page])

    def _model(self) -> model_pb2.Model:
        shared = self._shared
        return model_message(shared.card, shared.limits, shared.mode, shared.n_draft_default)
