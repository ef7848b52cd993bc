"""What surrounds every call: observation, translation of its errors, authentication."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import random
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
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
    Draining,
    EngineError,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    TooManyBadKeys,
    Unauthenticated,
)
from drafthouse_server.operations.audit import OK, AuditTrail
from drafthouse_server.operations.calls import Call
from drafthouse_server.operations.peers import uid_of_peer
from drafthouse_server.rpc.tls import tenant_of
from drafthouse_server.serving.requests import N_VIOLATIONS_MAX
from drafthouse_server.tenancy.identity import Tenants, source_of
from drafthouse_server.tenancy.tenants import Identity

__all__ = [
    "DOMAIN",
    "USAGE_KEY",
    "Act",
    "Administer",
    "Answer",
    "Authenticate",
    "Behaviour",
    "Context",
    "Continuation",
    "Handler",
    "Observe",
    "TranslateErrors",
    "Wrap",
    "Wrapping",
    "current_act",
    "current_call",
    "is_ours",
    "pushback",
    "to_status",
    "wrapped",
]

_log = logging.getLogger(__name__)

DOMAIN = "drafthouse.dev"
"""Domain of `ErrorInfo`."""

REQUEST_ID_KEY = "x-request-id"

USAGE_KEY = "drafthouse-usage-bin"
"""Trailer with the usage of an accepted stream, a serialised `Usage`, however it ended."""

_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_NEVER = "-1"
_RETRIED = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_LONGEST_RETRY_S = 120.0
"""Who shall come back later than that is told so, and not kept waiting by its own transport."""

_OUR_METHODS = "/drafthouse."
_HEALTH_METHODS = "/grpc.health."
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

# Errors travel as HTTP/2 trailers, of which clients accept about 8 KiB.
_N_CHARACTERS_MAX = 160
_N_MESSAGE_CHARACTERS_MAX = 480


_READING = ("Get", "List")
"""How the names of methods begin that change nothing."""

_LEFT = "cancelled"
"""Outcome of a call whose client has left before its answer."""

_FAILED = "failed"
"""Outcome of a call that a fault of ours has ended."""

_current_call: ContextVar[Call] = ContextVar("drafthouse_call")

# In quotes: at run time grpc's classes are not generic.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Answer: TypeAlias = Message | None
"""None of a stream, which has written its answers."""
_Metadata: TypeAlias = tuple[tuple[str, str], ...]
Behaviour: TypeAlias = "Callable[[Any, Context], Awaitable[Answer]]"
Wrap: TypeAlias = "Callable[[Behaviour, Any, Context], Awaitable[Answer]]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


def current_call() -> Call:
    """Returns the call that this task serves."""
    return _current_call.get()


def is_ours(method: str) -> bool:
    """Returns whether a method needs a key, by its full name; health and reflection may not."""
    return method.startswith(_OUR_METHODS)


def wrapped(handler: Handler, wrap: Wrap, parse: Callable[[bytes], Any] | None = None) -> Handler:
    """Returns a handler that runs inside `wrap`, before any message is read.

    NOTE: streaming handlers of ours are coroutines that write, not generators: cancellation then
    reaches them where they wait, and one wrapper fits both kinds.

    Args:
        handler: What runs inside.
        wrap: Runs it.
        parse: Makes messages of bytes; None: `wrap` gets none, and reads bytes.
    """
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    # The types are those of blocking handlers.
    inner: Any = next(kind for kind in kinds if kind is not None)
    make: Any = (
        grpc.stream_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.stream_unary_rpc_method_handler
    )

    async def behaviour(request: object, context: Context) -> Answer:
        return await wrap(inner, request, context)

    found: Handler = make(behaviour, parse, handler.response_serializer)
    return found


async def _intercept(
    wrap: Wrap, continuation: Continuation, details: grpc.HandlerCallDetails
) -> Handler | None:
    """Returns the handler of a call inside `wrap`; None where there is no such method."""
    handler = await continuation(details)
    return None if handler is None else wrapped(handler, wrap, handler.request_deserializer)


class Wrapping(grpc.aio.ServerInterceptor):
    """Runs the handler of each call inside `_wrap`."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handler of a call."""
        return await _intercept(self._wrap, continuation, handler_call_details)

    @abstractmethod
    async def _wrap(self, inner: Behaviour, request: object, context: Context) -> Answer:
        """Answers a call by the handler `inner`."""


class Observe(grpc.aio.ServerInterceptor):
    """Gives every call an id, and each of ours a line in the log. The outermost one.

    It keeps the handler of each method with all that surrounds it, so that interceptors are asked
    once for a method and not for every call: what they need of a call, they take from its context.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Wraps the handler of a call."""
        method = handler_call_details.method
        known = self._handlers.get(method)
        if known is not None:
            return known

        async def wrap(inner: Behaviour, request: object, context: Context) -> Answer:
            call = Call(method, _new_id(), time.monotonic(), _client_request_id(context))
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
                if is_ours(method):
                    self._log(call, outcome or _code_of_gone(context))
            return response

        handler = await _intercept(wrap, continuation, handler_call_details)
        if handler is not None:
            self._handlers[method] = handler
        return handler

    def _log(self, call: Call, outcome: str) -> None:
        _log.info(
            "call method=%s code=%s reason=%s tenant=%s request_id=%s client_request_id=%s"
            " seconds=%.6f",
            call.method,
            outcome,
            call.reason or "-",
            call.tenant.name or "-",
            call.request_id,
            call.client_request_id or "-",
            time.monotonic() - call.received_at,
        )


class TranslateErrors(Wrapping):
    """Turns our exceptions into statuses; any other becomes ENGINE_FAILURE, its trace is logged.

    A call may end, by its deadline or because its client has left, while something is written to it
    or it is refused: grpc.aio then fails to send, which is no fault. Such a call is cancelled.

    Of one that is cancelled grpc.aio sends no status. Should its client still be there, because
    something else has cancelled it, it would wait for ever: its stream is reset.
    """

    async def _wrap(self, inner: Behaviour, request: object, context: Context) -> Answer:
        call = current_call()
        try:
            return await self._translate(inner, request, context)
        except grpc.aio.InternalError as error:
            _log.debug("request %s had ended: %s", call.request_id, error)
            call.is_lost = True
            raise asyncio.CancelledError from error
        except asyncio.CancelledError:
            call.is_lost = True
            raise

    async def _translate(self, inner: Behaviour, request: object, context: Context) -> Answer:
        try:
            return await inner(request, context)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise  # already a status, or there is nobody left to tell
        except DrafthouseError as error:
            await _abort(error, context)
        except Exception:
            _log.exception("request %s failed", current_call().request_id)
            await _abort(EngineError("INTERNAL"), context)


class Authenticate(Wrapping):
    """Finds the tenant of a call by `authorization: Bearer KEY`, or by its client's certificate.

    That is done before its message is read.

    Args:
        tenants: Knows the keys.
        is_health_open: Whether health checks need no key.
        has_certificates: Whether clients show certificates, which may name a tenant.
        on_refused: Called with the error of each call that is refused.
    """

    def __init__(
        self,
        tenants: Tenants,
        *,
        is_health_open: bool,
        has_certificates: bool,
        on_refused: Callable[[DrafthouseError], object],
    ) -> None:
        self._tenants = tenants
        self._is_health_open = is_health_open
        self._has_certificates = has_certificates
        self._on_refused = on_refused

    async def _wrap(self, inner: Behaviour, request: object, context: Context) -> Answer:
        call = current_call()
        is_health = call.method.startswith(_HEALTH_METHODS)
        if not (is_ours(call.method) or (is_health and not self._is_health_open)):
            return await inner(request, context)
        try:
            identity = await self._identity(context)
        except DrafthouseError as error:
            self._on_refused(error)
            raise
        call.tenant, call.key_id = identity.tenant, identity.key_id
        with self._tenants.hold(identity, call.disown):
            return await inner(request, context)

    async def _identity(self, context: Context) -> Identity:
        """Returns who calls.

        Raises:
            Unauthenticated: neither key nor certificate says so, or they say two things
                (INVALID_API_KEY).
        """
        key = _api_key(context)
        name = tenant_of(context.auth_context()) if self._has_certificates else None
        if name is not None and key is None:
            return await _answer(self._tenants.certified(name))
        identity = await _answer(self._tenants.identify(key, source_of(context.peer())))
        if name is not None and identity.tenant.name != name:
            raise Unauthenticated("the API key and the client certificate are of two tenants")
        return identity


async def _answer(found: Identity | Awaitable[Identity]) -> Identity:
    return found if isinstance(found, Identity) else await found


@dataclass(slots=True)
class Act:
    """What a call of AdminService does, for the audit trail."""

    actor: str
    """User or certificate that calls."""
    target: str = "server"
    """What was changed or asked for."""
    detail: dict[str, object] = field(default_factory=dict)
    """What else is of use; never a secret."""
    on_begin: Callable[[], Awaitable[None]] | None = None
    """Notes a stream; None: the call is none, or was noted."""

    async def begin(self) -> None:
        """Has a stream noted, once: what was asked for is good."""
        note, self.on_begin = self.on_begin, None
        if note is not None:
            await note()


_current_act: ContextVar[Act] = ContextVar("drafthouse_act")


def current_act() -> Act:
    """Returns what the call of AdminService that this task serves does."""
    return _current_act.get()


class Administer(Wrapping):
    """Finds out who administers, and has the audit trail told what became of it.

    What only reads (Get…, List…) has a line where it fails alone: a status that is asked for each
    second says nothing, and what it says would hide the rest. Streams have their line with their
    first message, since they end with whoever reads them.

    Args:
        trail: Is told.
        port: Returns where the server listens.
    """

    def __init__(self, trail: AuditTrail, port: Callable[[], int]) -> None:
        self._trail = trail
        self._port = port
        # Those that others share may do other work: a disk that hangs would take them all.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="audit")

    def close(self) -> None:
        """Lets its thread end when it has written what it was told."""
        self._thread.shutdown(wait=False)

    async def _wrap(self, inner: Behaviour, request: object, context: Context) -> Answer:
        action = current_call().method.rpartition("/")[2]
        actor = await asyncio.to_thread(_actor, context, self._port())
        act, outcome = Act(actor), _FAILED
        _current_act.set(act)
        is_stream = action.startswith("Watch")
        if is_stream:
            act.on_begin = partial(self._note, action, act, OK)
        try:
            answer = await inner(request, context)
            outcome = OK
        except DrafthouseError as error:
            outcome = error.reason
            raise
        except grpc.aio.AbortError:
            outcome = "refused"
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the call has ended
            outcome = _LEFT
            raise
        finally:
            is_told = is_stream and act.on_begin is None
            is_read = outcome in (OK, _LEFT) and action.startswith(_READING)
            if not (is_told or is_read):
                await asyncio.shield(self._note(action, act, outcome))
        return answer

    async def _note(self, action: str, act: Act, outcome: str) -> None:
        told = (act.actor, action, act.target, outcome, act.detail)
        try:
            noting = self._thread.submit(self._trail.note, *told)
        except RuntimeError:  # it is closed, and this call ends after all others
            self._trail.note_aside(*told)
        else:
            await asyncio.wrap_future(noting)


def _actor(context: Context, port: int) -> str:
    """Returns who calls: the first name of a certificate, or a user of this machine."""
    properties: Mapping[str, Any] = context.auth_context()
    for kind in ("peer_uri", "peer_dns", "peer_email", "peer_ip"):
        for name in properties.get(kind, ()):
            return f"san:{name.decode('utf-8', 'replace')}"
    for pem in properties.get("x509_pem_cert", ()):
        return f"certificate:{hashlib.sha256(pem).hexdigest()[:16]}"
    peer: str = context.peer()
    uid = uid_of_peer(peer, port)
    if uid is not None:
        return f"uid:{uid}"
    return "unix" if peer.startswith("unix:") else "unknown"


def _metadata(context: Context, wanted: str) -> str | None:
    """Returns the first value of a key that the client has sent."""
    for key, value in context.invocation_metadata() or ():
        if key == wanted and isinstance(value, str):
            return value
    return None


def _client_request_id(context: Context) -> str:
    asked = _metadata(context, REQUEST_ID_KEY)
    return asked if asked is not None and _SANE_REQUEST_ID.fullmatch(asked) else ""


def _new_id() -> str:
    """Returns an id that nobody guesses and no other call has; later ones sort behind."""
    milliseconds = time.time_ns() // 1_000_000 % (1 << 48)  # of a clock that is wrong, too
    number = milliseconds.to_bytes(6, "big") + secrets.token_bytes(10)
    return "req_" + base64.b32hexencode(number).decode().rstrip("=").lower()


def _api_key(context: Context) -> str | None:
    scheme, _, key = (_metadata(context, "authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _code_of_gone(context: Context) -> str:
    """Returns the status code's name of a call that ended while it was served."""
    remaining: float | None = context.time_remaining()
    is_late = remaining is not None and remaining <= 0
    return "DEADLINE_EXCEEDED" if is_late else "CANCELLED"


def _code_name(context: Context) -> str:
    """Returns the name of the status code that the call was given; grpc.aio may tell a number."""
    code: object = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    names = {member.value[0]: member.name for member in grpc.StatusCode}
    return names.get(code, "UNKNOWN") if isinstance(code, int) else "UNKNOWN"


async def _abort(error: DrafthouseError, context: Context) -> Never:
    """Ends the call with an error.

    Source:
        `abort_with_status` is missing in grpc.aio's interface (grpc/grpc#42733), hence `abort`.
    """
    call = current_call()
    call.reason = error.reason
    status = rpc_status.to_status(to_status(error, call.request_id))
    # With what the call's trailers have already: the request's id, a stream's usage.
    told = context.trailing_metadata() or ()
    metadata = (*status.trailing_metadata, *told, *pushback(error, told))
    await context.abort(status.code, status.details, metadata)


def pushback(error: DrafthouseError, told: Iterable[tuple[str, object]]) -> _Metadata:
    """Returns what gRPC's own retries shall do: wait so long, up to a quarter more, or give up.

    Clients have them by a service config, as that beside our protos, and look at codes alone.

    Args:
        error: With which the call ends.
        told: What its trailers have already.

    Source:
        gRPC proposal A6, "Pushback".
    """
    if error.code not in _RETRIED:
        return ()
    wait_s = _retry_after_s(error)
    if isinstance(error, Draining):  # by which is handed back what has not begun
        is_billed = error.has_begun
    else:
        is_billed = any(key == USAGE_KEY for key, _ in told)
    if wait_s is None or wait_s > _LONGEST_RETRY_S or is_billed:
        return ((_PUSHBACK_KEY, _NEVER),)
    spread = 1.0 + random.random() / 4  # noqa: S311  not a secret
    return ((_PUSHBACK_KEY, str(math.ceil(wait_s * spread * 1000.0))),)


def _retry_after_s(error: DrafthouseError) -> float | None:
    if isinstance(error, QuotaExceeded | TooManyBadKeys | Overloaded):
        return error.retry_after_s
    return None


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
    wait_s = _retry_after_s(error)
    if wait_s is not None:
        yield _retry_info(wait_s)


def _bad_request(error: InvalidRequest) -> BadRequest:
    violations = [
        BadRequest.FieldViolation(field=_cut(item.field), description=_cut(item.description))
        for item in error.violations[:N_VIOLATIONS_MAX]
    ]
    return BadRequest(field_violations=violations)


def _retry_info(retry_after_s: float) -> RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(int(retry_after_s * 1e9))
    return RetryInfo(retry_delay=delay)


def _cut(text: str, n_max: int = _N_CHARACTERS_MAX) -> str:
    return text if len(text) <= n_max else text[: n_max - 1] + "…"
