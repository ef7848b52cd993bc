"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from drafthouse._errors import Cancelled, DrafthouseError, map_grpc_errors
from drafthouse._events import Model, TokenCount, model_from
from drafthouse._options import (
    GenerateOptions,
    Prompt,
    count_request,
    detokenize_request,
    generate_request,
    model_request,
    models_request,
    tokenize_request,
)
from drafthouse._retry import Attempts, RetryBudget, RetryPolicy, checked_retry, checked_timeout
from drafthouse._stream import AsyncGenerationStream, cancelled_count
from drafthouse._tls import Tls, secured
from drafthouse._transport import (
    CHANNEL_OPTIONS,
    DEFAULT_TARGET,
    HEALTH_METHOD,
    NotCopied,
    call_metadata,
    checked_key,
)
from drafthouse.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc

__all__ = ["AsyncClient"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class AsyncClient(NotCopied):
    """Talks to a Drafthouse server. Close it, or use it in an `async with` block.

    Make it inside a running event loop.

    Args:
        target: address of the server, "host:port".
        api_key: the tenant's key; None where the server asks for none.
        tls: connect by TLS; a `Tls` says by which authority and certificate.
        credentials: gRPC's own, in place of `tls`.
        insecure_no_tls: send the key in plain text, even to another machine.
        retry: when failed calls are tried again; None is never.

    Raises:
        ValueError: the key would travel in plain text to another machine, or no header can carry
            it, a file of `tls` is not PEM, certificate and private key do not belong together, or
            the target is no address.
        TypeError: a setting is of the wrong type.
        OSError: a file of `tls` cannot be read.
        RuntimeError: no event loop runs; so do all methods in another loop than this one.

    Thread:
        that of the event loop only.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: bool | Tls = False,
        credentials: grpc.ChannelCredentials | None = None,
        insecure_no_tls: bool = False,
        retry: RetryPolicy | None = RetryPolicy(),  # noqa: B008  frozen
    ) -> None:
        credentials, more = secured(target, api_key, tls, credentials, insecure_no_tls)
        self._loop = _running_loop()
        options = (*CHANNEL_OPTIONS, *more)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._check_health = self._channel.unary_unary(
            HEALTH_METHOD,
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        self._api_key = checked_key(api_key)
        self._retry = checked_retry(retry)
        self._budget = RetryBudget(retry.budget if retry else 0)
        self._closed = asyncio.Event()
        # gRPC before 1.83 cancels those alone that a task waits for; none knows of what waits for
        # its next attempt.
        self._streams: weakref.WeakSet[AsyncGenerationStream] = weakref.WeakSet()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationStream:
        """Starts a generation.

        Args:
            prompt: text, token ids, or chat messages.
            timeout: seconds for the whole generation; None is no limit.
            request_id: your own id of the call, beside the server's in its log; 1 to 64 of
                [A-Za-z0-9._-]. Results and errors carry the server's, which is unique.
            **options: see `GenerateOptions`.

        Returns:
            The stream of its chunks. Errors of the server are raised when it is read.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            TypeError: an option is unknown, or it or the prompt is of the wrong type.
            ValueError: the timeout is not a number.
        """
        self._check_loop()
        request = generate_request(prompt, options)
        metadata = call_metadata(self._api_key, request_id)

        def start(
            timeout: float | None,
        ) -> grpc.aio.UnaryStreamCall[
            generation_pb2.GenerateRequest, generation_pb2.GenerateResponse
        ]:
            with map_grpc_errors():
                return self._generation.Generate(request, timeout=timeout, metadata=metadata)

        stream = AsyncGenerationStream(start, self._attempts(timeout))
        self._streams.add(stream)
        return stream

    async def count_tokens(
        self,
        prompt: Prompt,
        *,
        model: str | None = "",
        chat_template_kwargs: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> TokenCount:
        """Counts the tokens of a prompt as `generate` would see it.

        Args:
            prompt: text, token ids, or chat messages.
            model: name of the model; empty or None is the server's default.
            chat_template_kwargs: arguments of the chat's template, as for `generate`.
            timeout: seconds; None is no limit.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: the call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = count_request(prompt, model, chat_template_kwargs)
        response = await self._call(self._generation.CountTokens, request, timeout)
        return TokenCount(response.prompt_tokens, response.context_tokens)

    async def tokenize(
        self,
        text: str,
        *,
        model: str | None = "",
        add_special: bool = False,
        parse_special: bool = False,
        timeout: float | None = None,
    ) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: may be empty.
            model: name of the model; empty or None is the server's default.
            add_special: add the model's special start token where the model asks for it.
            parse_special: read control tokens written in the text as control tokens.
            timeout: seconds; None is no limit.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: the call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = tokenize_request(text, model, add_special, parse_special)
        return list((await self._call(self._generation.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = "",
        keep_special: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Returns the text of token ids; bytes that are no whole character become U+FFFD.

        Args:
            token_ids: ids in [0, Model.vocabulary_size).
            model: name of the model; empty or None is the server's default.
            keep_special: render control tokens as text too.
            timeout: seconds; None is no limit.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: the call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = detokenize_request(token_ids, model, keep_special)
        return (await self._call(self._generation.Detokenize, request, timeout)).text

    async def get_model(self, model: str | None = "", *, timeout: float | None = None) -> Model:
        """Returns one model; an empty name is the server's default model.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: the call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = model_request(model)
        return model_from((await self._call(self._models.GetModel, request, timeout)).model)

    async def list_models(self, *, page_size: int = 0, timeout: float | None = None) -> list[Model]:
        """Returns all models that the caller may use, by name.

        Args:
            page_size: models per call, [0, 1000]; 0 lets the server choose.
            timeout: seconds per call; None is no limit.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: a call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = models_request(page_size)
        models: list[Model] = []
        while True:
            page = await self._call(self._models.ListModels, request, timeout)
            models += map(model_from, page.models)
            if not page.next_page_token:
                return models
            request.page_token = page.next_page_token

    async def health(self, *, timeout: float | None = 5.0) -> bool:
        """Returns whether the server takes generations now. Is never tried again.

        Raises:
            Unavailable: no server answers.
            DrafthouseError: the call failed otherwise.
            TypeError: the timeout is of the wrong type.
            ValueError: it is not a number.
        """
        self._check_loop()
        response = await self._answer(
            self._check_health, health_pb2.HealthCheckRequest(), checked_timeout(timeout)
        )
        return response.status == health_pb2.HealthCheckResponse.SERVING

    async def aclose(self) -> None:
        """Closes the connection and cancels what still runs. Harmless when done twice."""
        self._closed.set()
        for stream in tuple(self._streams):
            await stream.aclose()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _check_loop(self) -> None:
        """Refuses to serve another event loop.

        Raises:
            RuntimeError: the client was made in another one.
        """
        if _running_loop() is not self._loop:
            raise RuntimeError(
                "this AsyncClient was made in another event loop, and works in that one alone; make"
                " one in each loop, or use a drafthouse.Client, which serves many threads"
            )

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, timeout)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        self._check_loop()
        attempts = self._attempts(timeout)
        while True:
            try:
                answer = await self._answer(method, request, attempts.remaining_s())
            except DrafthouseError as error:
                delay_s = attempts.delay_s(error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._closed.wait()
            else:
                attempts.succeed()
                return answer

    async def _answer(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        seconds: float | None,
    ) -> _Response:
        """Calls once.

        Raises:
            DrafthouseError: the call failed, or the client was closed before the answer.
        """
        metadata = call_metadata(self._api_key, None)
        n_cancelled = cancelled_count()
        try:
            with map_grpc_errors():
                return await method(request, timeout=seconds, metadata=metadata)
        except asyncio.CancelledError as error:
            if cancelled_count() > n_cancelled or not self._closed.is_set():
                raise
            # Not this task was cancelled but the call: another one has closed the client.
            raise Cancelled("the client was closed before the answer") from error


def _running_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop that runs.

    Raises:
        RuntimeError: none does.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError(
            "no event loop runs, and an AsyncClient is made and used inside one: in a coroutine,"
            " by `async with drafthouse.AsyncClient(...)`; elsewhere use a drafthouse.Client"
        ) from None
