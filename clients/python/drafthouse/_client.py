"""The client for ordinary, blocking code."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from drafthouse._errors import DrafthouseError, map_grpc_errors
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
from drafthouse._stream import GenerationStream
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

__all__ = ["Client"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class Client(NotCopied):
    """Talks to a Drafthouse server. Close it, or use it in a `with` block.

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

    Thread:
        any; one client serves many threads.
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
        options = (*CHANNEL_OPTIONS, *more)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
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
        self._closed = threading.Event()
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        self._adding = threading.RLock()  # a handler of a signal may close the client

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationStream:
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
        request = generate_request(prompt, options)
        metadata = call_metadata(self._api_key, request_id)

        def start(timeout: float | None) -> grpc._CallIterator[generation_pb2.GenerateResponse]:
            with map_grpc_errors():
                return self._generation.Generate(request, timeout=timeout, metadata=metadata)

        stream = GenerationStream(start, self._attempts(timeout))
        with self._adding:
            self._streams.add(stream)
        if self._closed.is_set():  # by another thread, which did not see the stream
            stream.close()
        return stream

    def count_tokens(
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
        response = self._call(self._generation.CountTokens, request, timeout)
        return TokenCount(response.prompt_tokens, response.context_tokens)

    def tokenize(
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
        return list(self._call(self._generation.Tokenize, request, timeout).token_ids)

    def detokenize(
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
        return self._call(self._generation.Detokenize, request, timeout).text

    def get_model(self, model: str | None = "", *, timeout: float | None = None) -> Model:
        """Returns one model; an empty name is the server's default model.

        Raises:
            InvalidField: a value cannot be sent at all (INVALID_FIELD).
            DrafthouseError: the call failed otherwise.
            TypeError: a value is of the wrong type.
        """
        request = model_request(model)
        return model_from(self._call(self._models.GetModel, request, timeout).model)

    def list_models(self, *, page_size: int = 0, timeout: float | None = None) -> list[Model]:
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
            page = self._call(self._models.ListModels, request, timeout)
            models += map(model_from, page.models)
            if not page.next_page_token:
                return models
            request.page_token = page.next_page_token

    def health(self, *, timeout: float | None = 5.0) -> bool:
        """Returns whether the server takes generations now. Is never tried again.

        Raises:
            Unavailable: no server answers.
            DrafthouseError: the call failed otherwise.
            TypeError: the timeout is of the wrong type.
            ValueError: it is not a number.
        """
        metadata = call_metadata(self._api_key, None)  # a server may ask for it: open_health
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            response = self._check_health(
                health_pb2.HealthCheckRequest(), timeout=seconds, metadata=metadata
            )
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def close(self) -> None:
        """Closes the connection and cancels what still runs. Harmless when done twice."""
        self._closed.set()
        with self._adding:
            streams = tuple(self._streams)
        for stream in streams:  # one may wait for its next attempt, of which gRPC knows nothing
            stream.close()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, self._budget, timeout)

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        attempts = self._attempts(timeout)
        metadata = call_metadata(self._api_key, None)
        while True:
            try:
                with map_grpc_errors():
                    answer = method(request, timeout=attempts.remaining_s(), metadata=metadata)
            except DrafthouseError as error:
                self._closed.wait(attempts.delay_s(error))
            else:
                attempts.succeed()
                return answer
