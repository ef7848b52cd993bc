"""What surrounds every call: observation, translation of its errors, authentication."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Never, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from drafthouse_server.errors import (
    DrafthouseError,
    EngineError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
)
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

__all__ = [
    "DOMAIN",
    "Authenticate",
    "Call",
    "Observe",
    "TranslateErrors",
    "current_call",
    "to_status",
]

_log = logging.getLogger(__name__)

DOMAIN = "drafthouse.dev"
"""Domain of `ErrorInfo`."""

REQUEST_ID_KEY = "x-request-id"

_OUR_METHODS = "/drafthouse."  # health and reflection are open and silent
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

# Errors travel as HTTP/2 trailers, of which clients accept about 8 KiB.
_N_VIOLATIONS_MAX = 16
_N_CHARACTERS_MAX = 160
_N_MESSAGE_CHARACTERS_MAX = 480


@dataclass(slots=True)
class Call:
    """One call while it is served."""

    method: str
    """Full name, such as "/drafthouse.v1.GenerationService/Generate"."""
    request_id: str
    """As the client asked, or our own."""
    received_at: float
    """Monotonic time of its receipt, in seconds."""
    tenant: Tenant
    """Who calls; of no consequence before authentication."""
    reason: str = ""
    """Why it failed, an `ErrorReason` without its prefix; empty while it has not."""


_current_call: ContextVar[Call] = ContextVar("drafthouse_call")
_UNKNOWN = Tenant("")

# In quotes: at run time grpc's classes are not generic.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Answer: TypeAlias = Message | None
"""None of a stream, which has written its answers."""
_Behaviour: TypeAlias = "Callable[[Message, _Context], Awaitable[_Answer]]"
_Wrap: TypeAlias = "Callable[[_Behaviour, Message, _Context], Awaitable[_Answer]]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"


def current_call() -> Call:
    """Returns the call that this task serves."""
    return _current_call.get()


def _wrapped(handler: _Handler, wrap: _Wrap) -> _Handler:
    """Returns a handler that runs inside `wrap`.

    NOTE: streaming handlers of ours are coroutines that write, not generators: cancellation then
    reaches them where they wait, and one wrapper fits both kinds.
    """
    is_stream = handler.response_streaming
    # The types are those of blocking handlers.
    inner: Any = handler.unary_stream if is_stream else handler.unary_unary
    make: Any = (
        grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
    )

    async def behaviour(request: Message, context: _Context) -> _Answer:
        return await wrap(inner, request, context)

    wrapped: _Handler = make(behaviour, handler.request_deserializer, handler.response_serializer)
    return wrapped


async def _intercept(
    wrap: _Wrap, continuation: _Continuation, details: grpc.HandlerCallDetails
) -> _Handler | None:
    handler = await continuation(details)
    if handler is None or not details.method.startswith(_OUR_METHODS):
        return handler
    return _wrapped(handler, wrap)


class Observe(grpc.aio.ServerInterceptor):
    """Gives every call an id and a line in the log. The outermost one.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Wraps the handler of a call."""
        method = handler_call_details.method

        async def wrap(inner: _Behaviour, request: Message, context: _Context) -> _Answer:
            call = Call(method, _request_id(context), self._clock(), _UNKNOWN)
            _current_call.set(call)
            context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            outcome = ""
            try:
                response = await inner(request, context)
                outcome = "OK"
            except grpc.aio.AbortError:
                outcome = _code_name(context)
                raise
            finally:
                self._log(call, outcome or _code_of_gone(context))
            return response

        return await _intercept(wrap, continuation, handler_call_details)

    def _log(self, call: Call, outcome: str) -> None:
        _log.info(
            "call method=%s code=%s reason=%s tenant=%s request_id=%s seconds=%.6f",
            call.method,
            outcome,
            call.reason or "-",
            call.tenant.name or "-",
            call.request_id,
            self._clock() - call.received_at,
        )


class TranslateErrors(grpc.aio.ServerInterceptor):
    """Turns our exceptions into statuses; any other becomes ENGINE_FAILURE, its trace is logged.

    A call may end, by its deadline or because its client has left, while something is written to it
    or it is refused: grpc.aio then fails to send, which is no fault. Such a call is cancelled.
    """

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Wraps the handler of a call."""
        return await _intercept(self._wrap, continuation, handler_call_details)

    async def _wrap(self, inner: _Behaviour, request: Message, context: _Context) -> _Answer:
        try:
            return await self._translate(inner, request, context)
        except grpc.aio.InternalError as error:
            _log.debug("request %s had ended: %s", current_call().request_id, error)
            raise asyncio.CancelledError from error

    async def _translate(self, inner: _Behaviour, request: Message, context: _Context) -> _Answer:
        try:
            return await inner(request, context)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise  # already a status, or there is nobody left to tell
        except DrafthouseError as error:
            await _abort(error, context)
        except Exception:
            _log.exception("request %s failed", current_call().request_id)
            await _abort(EngineError("INTERNAL"), context)


class Authenticate(grpc.aio.ServerInterceptor):
    """Finds the tenant of a call by `authorization: Bearer KEY`.

    Args:
        tenants: Knows the keys.
    """

    def __init__(self, tenants: TenantRegistry) -> None:
        self._tenants = tenants

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Wraps the handler of a call."""
        return await _intercept(self._wrap, continuation, handler_call_details)

    async def _wrap(self, inner: _Behaviour, request: Message, context: _Context) -> _Answer:
        current_call().tenant = self._tenants.authenticate(_api_key(context))
        return await inner(request, context)


def _metadata(context: _Context, wanted: str) -> str | None:
    """Returns the first value of a key that the client has sent."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted and isinstance(value, str):
            return value
    return None


def _request_id(context: _Context) -> str:
    asked = _metadata(context, REQUEST_ID_KEY)
    if asked is not None and _SANE_REQUEST_ID.fullmatch(asked):
        return asked
    return uuid.uuid4().hex


def _api_key(context: _Context) -> str | None:
    scheme, _, key = (_metadata(context, "authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _code_of_gone(context: _Context) -> str:
    """Returns the status code's name of a call that ended while it was served."""
    remaining: float | None = context.time_remaining()
    is_late = remaining is not None and remaining <= 0
    return "DEADLINE_EXCEEDED" if is_late else "CANCELLED"


def _code_name(context: _Context) -> str:
    """Returns the name of the status code that the call was given; grpc.aio may tell a number."""
    code: object = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {member.value[0]: member.name for member in grpc.StatusCode}
    return names.get(code, "UNKNOWN") if isinstance(code, int) else "UNKNOWN"


async def _abort(error: DrafthouseError, context: _Context) -> Never:
    """Ends the call with an error.

    Source:
        `abort_with_status` is missing in grpc.aio's interface (grpc/grpc#42733), hence `abort`.
    """
    call = current_call()
    call.reason = error.reason
    status = rpc_status.to_status(to_status(error, call.request_id))
    metadata = (*status.trailing_metadata, (REQUEST_ID_KEY, call.request_id))
    await context.abort(status.code, status.details, metadata)


def to_status(error: DrafthouseError, request_id: str) -> Status:
    """Returns an error as clients see it: code, message, and details in the classes of google.rpc.

    Args:
        error: What happened.
        request_id: Of the call.
    """
    code, _ = grpc.StatusCode[error.code].value
    status = Status(code=code, message=_cut(error.message, _N_MESSAGE_CHARACTERS_MAX))
    for detail in _details(error, request_id):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _details(error: DrafthouseError, request_id: str) -> Iterable[Message]:
    metadata = {key: _cut(value) for key, value in error.metadata().items()}
    yield ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    yield RequestInfo(request_id=request_id)
    if isinstance(error, InvalidRequest):
        yield _bad_request(error)
    if isinstance(error, QuotaExceeded):
        violation = QuotaFailure.Violation(
            subject=f"tenant:{error.tenant}",
            description=_cut(error.message),
            quota_metric=error.metric,
            quota_value=int(error.limit),
        )
        yield QuotaFailure(violations=[violation])
    if isinstance(error, QuotaExceeded | Overloaded) and error.retry_after_s is not None:
        yield _retry_info(error.retry_after_s)


def _bad_request(error: InvalidRequest) -> BadRequest:
    violations = [
        BadRequest.FieldViolation(field=_cut(item.field), description=_cut(item.description))
        for item in error.violations[:_N_VIOLATIONS_MAX]
    ]
    return BadRequest(field_violations=violations)


def _retry_info(retry_after_s: float) -> RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    return RetryInfo(retry_delay=delay)


def _cut(text: str, n_max: int = _N_CHARACTERS_MAX) -> str:
    return text if len(text) <= n_max else text[: n_max - 1] + "…"
