"""What may go wrong in a call, as exceptions.

DrafthouseError
├── InvalidArgument             INVALID_ARGUMENT     the request breaks a documented rule
│   ├── InvalidField            INVALID_FIELD        `violations` lists fields at fault
│   ├── ContextTooLong          CONTEXT_TOO_LONG     prompt and output do not fit the context
│   ├── GrammarTooCostly        GRAMMAR_TOO_COSTLY   the grammar takes too long for one token
│   └── NoTokenAllowed          NO_TOKEN_ALLOWED     grammar and biases leave no token
├── Unauthenticated             UNAUTHENTICATED
│   └── InvalidApiKey           INVALID_API_KEY      the key is missing or unknown
├── PermissionDenied            PERMISSION_DENIED
│   └── ModelNotAllowed         MODEL_NOT_ALLOWED    the tenant may not use this model
├── NotFound                    NOT_FOUND
│   ├── ModelNotFound           MODEL_NOT_FOUND      the server does not serve this model
│   └── TenantNotFound          TENANT_NOT_FOUND     the store has no tenant of this name
├── ResourceExhausted           RESOURCE_EXHAUSTED
│   ├── TenantQuotaExceeded     TENANT_QUOTA_EXCEEDED  your limit; `quota_violations`, `retry_after`
│   ├── SlowSender              SLOW_SENDER          the request did not come in time
│   ├── TooManyBadKeys          TOO_MANY_BAD_KEYS    your address has sent wrong keys; `retry_after`
│   └── SlowReader              SLOW_READER          the stream was not read in time
├── Unavailable                 UNAVAILABLE          also: no server answers at this address
│   ├── QueueFull               QUEUE_FULL           the server's limit; `retry_after`
│   ├── ServerDraining          SERVER_DRAINING      the server is shutting down; `retry_after`
│   ├── ServerOverloaded        SERVER_OVERLOADED    too many calls or connections; `retry_after`
│   ├── StoreUnavailable        STORE_UNAVAILABLE    the key cannot be looked up now; `retry_after`
│   ├── UsageUnavailable        USAGE_UNAVAILABLE    usage cannot be recorded, or listed, now
│   └── EngineUnhealthy         ENGINE_UNHEALTHY     its engine keeps failing; `retry_after`
├── InternalError               INTERNAL
│   └── EngineFailure           ENGINE_FAILURE       quote `request_id` when you report it
├── DeadlineExceeded            DEADLINE_EXCEEDED    `timeout` has passed
│   └── DeadlineTooShort        DEADLINE_TOO_SHORT   it would pass before the first token
└── Cancelled                   CANCELLED            the call was cancelled, here or there

A reason that this version of the SDK does not know yields the class of its status code, and a code
that has none yields `DrafthouseError` itself, so that `except` clauses outlive a newer server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status

from drafthouse._usage import Usage, usage_from
from drafthouse.v1 import generation_pb2

__all__ = [
    "Cancelled",
    "ContextTooLong",
    "DeadlineExceeded",
    "DeadlineTooShort",
    "DrafthouseError",
    "EngineFailure",
    "EngineUnhealthy",
    "FieldViolation",
    "GrammarTooCostly",
    "InternalError",
    "InvalidApiKey",
    "InvalidArgument",
    "InvalidField",
    "ModelNotAllowed",
    "ModelNotFound",
    "NoTokenAllowed",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "QuotaViolation",
    "ResourceExhausted",
    "ServerDraining",
    "ServerOverloaded",
    "SlowReader",
    "SlowSender",
    "StoreUnavailable",
    "TenantNotFound",
    "TenantQuotaExceeded",
    "TooManyBadKeys",
    "Unauthenticated",
    "Unavailable",
    "UsageUnavailable",
    "error_class",
    "map_grpc_errors",
]

DOMAIN = "drafthouse.dev"
_DETAILS_KEY = "grpc-status-details-bin"
_USAGE_KEY = "drafthouse-usage-bin"
_REQUEST_ID_KEY = "x-request-id"
_Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
_Detail = TypeVar("_Detail", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that breaks its rule."""

    field: str
    """Path of the field, such as "sampling.temperature"."""
    description: str
    """The rule, and what was sent."""


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One limit that was reached."""

    subject: str
    """Whose limit, such as "tenant:acme"."""
    description: str
    """Which limit, and its value."""


class DrafthouseError(Exception):
    """A call failed.

    Args:
        message: what happened, in English; for people, not for programs.
        code: gRPC status code; None takes the class's own.
        reason: an `ErrorReason` of `drafthouse.v1` without its prefix; empty when there is none.
        metadata: further facts, keys as in the documentation of the reason.
        request_id: id of the request as in the server's log; empty when the server was not reached.
        retry_after: seconds after which a retry may succeed; None when the server said nothing.
        violations: the fields at fault.
        quota_violations: the limits that were reached.
        usage: tokens counted until the call ended; None when no stream of it was accepted, or its
            end came from this side, as a deadline may.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    """gRPC status code."""
    default_reason: ClassVar[str] = ""
    """Reason that this class stands for; empty when it stands for a whole code."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
        request_id: str = "",
        retry_after: float | None = None,
        violations: Sequence[FieldViolation] = (),
        quota_violations: Sequence[QuotaViolation] = (),
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason: str = reason or self.default_reason
        self._metadata = dict(metadata)
        self.request_id = request_id
        self.retry_after = retry_after
        self.violations: tuple[FieldViolation, ...] = tuple(violations)
        self.quota_violations: tuple[QuotaViolation, ...] = tuple(quota_violations)
        self.usage = usage

    @property
    def metadata(self) -> Mapping[str, str]:
        """Further facts, which cannot be changed; keys as in the documentation of the reason."""
        return MappingProxyType(self._metadata)  # made here: as an attribute none could pickle it

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"[{self.reason or self.code.name}] {self.message}{request}"


class InvalidArgument(DrafthouseError):
    """The request breaks a documented rule; the same request will fail again."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidField(InvalidArgument):
    """One or more fields break their rule; `violations` lists those found at once, 16 at most."""

    default_reason = "INVALID_FIELD"


class ContextTooLong(InvalidArgument):
    """Prompt and output do not fit; metadata: promptTokens, maxOutputTokens, contextTokens."""

    default_reason = "CONTEXT_TOO_LONG"


class GrammarTooCostly(InvalidArgument):
    """The grammar takes too many comparisons for one token; what came before it is good."""

    default_reason = "GRAMMAR_TOO_COSTLY"


class NoTokenAllowed(InvalidArgument):
    """Grammar, biases and temperature leave no token to go on with; what came before is good."""

    default_reason = "NO_TOKEN_ALLOWED"


class Unauthenticated(DrafthouseError):
    """The server does not know who calls."""

    code = grpc.StatusCode.UNAUTHENTICATED


class InvalidApiKey(Unauthenticated):
    """The API key is missing or unknown."""

    default_reason = "INVALID_API_KEY"


class PermissionDenied(DrafthouseError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ModelNotAllowed(PermissionDenied):
    """The tenant may not use this model; metadata: model."""

    default_reason = "MODEL_NOT_ALLOWED"


class NotFound(DrafthouseError):
    """What was asked for does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class ModelNotFound(NotFound):
    """The server does not serve this model; metadata: model."""

    default_reason = "MODEL_NOT_FOUND"


class TenantNotFound(NotFound):
    """The server's store has no tenant of this name (TENANT_NOT_FOUND)."""

    default_reason = "TENANT_NOT_FOUND"


class ResourceExhausted(DrafthouseError):
    """The caller's own limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class TenantQuotaExceeded(ResourceExhausted):
    """The tenant's own limit is reached; see `quota_violations` and `retry_after`."""

    default_reason = "TENANT_QUOTA_EXCEEDED"


class SlowSender(ResourceExhausted):
    """The message of the call did not come in time; metadata: timeoutSeconds."""

    default_reason = "SLOW_SENDER"


class SlowReader(ResourceExhausted):
    """The stream was not read for too long; metadata: limitSeconds or limitBytes."""

    default_reason = "SLOW_READER"


class TooManyBadKeys(ResourceExhausted):
    """The client's address has sent too many wrong keys; see `retry_after`. Metadata: limit."""

    default_reason = "TOO_MANY_BAD_KEYS"


class Unavailable(DrafthouseError):
    """The server cannot take the call now, or cannot be reached."""

    code = grpc.StatusCode.UNAVAILABLE


class QueueFull(Unavailable):
    """The server's queue is full; metadata: waitingRequests."""

    default_reason = "QUEUE_FULL"


class ServerDraining(Unavailable):
    """The server is shutting down."""

    default_reason = "SERVER_DRAINING"


class ServerOverloaded(Unavailable):
    """Too many calls or connections are open on the server."""

    default_reason = "SERVER_OVERLOADED"


class EngineUnhealthy(Unavailable):
    """The server's engine keeps failing, or nothing can be started there that reads texts."""

    default_reason = "ENGINE_UNHEALTHY"


class StoreUnavailable(Unavailable):
    """The server's store of API keys does not answer; the key may be right."""

    default_reason = "STORE_UNAVAILABLE"


class UsageUnavailable(Unavailable):
    """The server cannot record usage now, and takes no stream without; or it cannot list it."""

    default_reason = "USAGE_UNAVAILABLE"


class InternalError(DrafthouseError):
    """The server failed."""

    code = grpc.StatusCode.INTERNAL


class EngineFailure(InternalError):
    """The engine failed on this request; metadata: status."""

    default_reason = "ENGINE_FAILURE"


class DeadlineExceeded(DrafthouseError):
    """The call's `timeout` has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class DeadlineTooShort(DeadlineExceeded):
    """`timeout` would pass before the first token; metadata: leftMs, neededMs."""

    default_reason = "DEADLINE_TOO_SHORT"


class Cancelled(DrafthouseError):
    """The call was cancelled: its stream was left, the client was closed, or the server gave up."""

    code = grpc.StatusCode.CANCELLED


_BY_CODE = {cls.code: cls for cls in DrafthouseError.__subclasses__()}
_BY_REASON = {sub.default_reason: sub for cls in _BY_CODE.values() for sub in cls.__subclasses__()}


def error_class(code: grpc.StatusCode, reason: str) -> type[DrafthouseError]:
    """Returns the most specific class for a code and a reason."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code, DrafthouseError)


@contextmanager
def map_grpc_errors() -> Iterator[None]:
    """Turns the transport's exceptions into ours; the original is the `__cause__`.

    Raises:
        DrafthouseError: the call failed.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _from_rpc_error(error) from error
    except grpc.aio.UsageError as error:  # what grpc.aio raises on a closed channel
        raise Cancelled("the client is closed") from error
    except ValueError as error:  # what grpc raises on a closed channel, among others
        if not str(error).startswith("Cannot invoke RPC"):
            raise
        raise Cancelled("the client is closed") from error


class _FailedCall(Protocol):
    """What sync and asyncio errors of grpc have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> _Metadata | None: ...


def _from_rpc_error(error: grpc.RpcError) -> DrafthouseError:
    call: _FailedCall = error  # type: ignore[assignment]  # every RpcError of a call is also a Call
    code = call.code()
    trailers = call.trailing_metadata() or ()
    status = _status(trailers)
    found = _find(status, ErrorInfo)
    retry = _find(status, RetryInfo)
    is_ours = found.domain == DOMAIN
    reason = found.reason if is_ours else ""
    return error_class(code, reason)(
        call.details() or code.name,
        code=code,
        reason=reason,
        metadata=found.metadata if is_ours else _NO_METADATA,
        request_id=_find(status, RequestInfo).request_id or _request_id(trailers),
        retry_after=_seconds(retry.retry_delay) if retry.ByteSize() else None,
        violations=_violations(status),
        quota_violations=_quota_violations(status),
        usage=_usage(trailers),
    )


def _status(metadata: _Metadata) -> Status:
    """Returns the rich status of a call; empty when there is none or a proxy has mangled it."""
    return _parsed(metadata, _DETAILS_KEY, Status) or Status()


def _request_id(metadata: _Metadata) -> str:
    """Returns the server's id of a call that the trailers tell, also where there is no status."""
    for key, value in metadata:
        if key == _REQUEST_ID_KEY and isinstance(value, str):
            return value
    return ""


def _usage(metadata: _Metadata) -> Usage | None:
    """Returns the usage that the trailers tell."""
    found = _parsed(metadata, _USAGE_KEY, generation_pb2.Usage)
    return None if found is None else usage_from(found)


def _parsed(metadata: _Metadata, wanted: str, kind: type[_Detail]) -> _Detail | None:
    """Returns a message of the trailers; None when there is none or a proxy has mangled it."""
    for key, value in metadata:
        if key == wanted and isinstance(value, bytes):
            with suppress(DecodeError):
                return kind.FromString(value)
    return None


def _find(status: Status, kind: type[_Detail]) -> _Detail:
    """Returns the detail of this kind, empty when the status has none or it is mangled."""
    found = kind()
    for detail in status.details:
        with suppress(DecodeError):
            if detail.Unpack(found):
                return found
    return kind()


def _seconds(delay: Duration) -> float:
    """Returns a duration in seconds, whatever it is: a `timedelta` would have bounds."""
    return max(0.0, delay.seconds + delay.nanos / 1e9)


def _violations(status: Status) -> tuple[FieldViolation, ...]:
    bad = _find(status, BadRequest)
    return tuple(FieldViolation(item.field, item.description) for item in bad.field_violations)


def _quota_violations(status: Status) -> tuple[QuotaViolation, ...]:
    failure = _find(status, QuotaFailure)
    return tuple(QuotaViolation(item.subject, item.description) for item in failure.violations)
