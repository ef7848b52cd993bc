"""Everything that can go wrong on purpose.

What a client is told; each class fixes its `reason` (an `ErrorReason` of the protos without the
prefix) and its gRPC `code`:

    DrafthouseError
    ├── InvalidRequest        INVALID_ARGUMENT    INVALID_FIELD
    ├── ContextTooLong        INVALID_ARGUMENT    CONTEXT_TOO_LONG
    ├── GrammarTooCostly      INVALID_ARGUMENT    GRAMMAR_TOO_COSTLY
    ├── NoTokenAllowed        INVALID_ARGUMENT    NO_TOKEN_ALLOWED
    ├── Unauthenticated       UNAUTHENTICATED     INVALID_API_KEY
    ├── PermissionDenied      PERMISSION_DENIED   MODEL_NOT_ALLOWED
    ├── NotFound              NOT_FOUND           MODEL_NOT_FOUND
    ├── TenantNotFound        NOT_FOUND           TENANT_NOT_FOUND
    ├── QuotaExceeded         RESOURCE_EXHAUSTED  TENANT_QUOTA_EXCEEDED
    ├── SlowSender            RESOURCE_EXHAUSTED  SLOW_SENDER
    ├── TooManyBadKeys        RESOURCE_EXHAUSTED  TOO_MANY_BAD_KEYS
    ├── SlowReader            RESOURCE_EXHAUSTED  SLOW_READER
    ├── Overloaded            UNAVAILABLE
    │   ├── QueueFull                             QUEUE_FULL
    │   ├── Draining                              SERVER_DRAINING
    │   ├── ServerOverloaded                      SERVER_OVERLOADED
    │   ├── StoreUnavailable                      STORE_UNAVAILABLE
    │   ├── UsageUnavailable                      USAGE_UNAVAILABLE
    │   └── EngineUnhealthy                       ENGINE_UNHEALTHY
    ├── DeadlineTooShort      DEADLINE_EXCEEDED   DEADLINE_TOO_SHORT
    └── EngineError           INTERNAL            ENGINE_FAILURE

What the operator is told before the server serves; one clear sentence each:

    StartupError
    ├── ConfigError
    │   └── UnknownSetting
    ├── ModelLoadError
    └── StoreError

And when it had to end by itself: ServerFailed, EngineLost.
And what a change of the store contradicts: StoreRefusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "ConfigError",
    "ContextTooLong",
    "DeadlineTooShort",
    "DrafthouseError",
    "Draining",
    "EngineError",
    "EngineLost",
    "EngineUnhealthy",
    "FieldViolation",
    "GrammarTooCostly",
    "InvalidRequest",
    "ModelLoadError",
    "NoTokenAllowed",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "QueueFull",
    "QuotaExceeded",
    "ServerFailed",
    "ServerOverloaded",
    "SlowReader",
    "SlowSender",
    "StartupError",
    "StoreError",
    "StoreRefusal",
    "StoreUnavailable",
    "TenantNotFound",
    "TooManyBadKeys",
    "Unauthenticated",
    "UnknownSetting",
    "UsageUnavailable",
]


class DrafthouseError(Exception):
    """Ends a request with a documented reason.

    Args:
        message: One sentence for the client; every value in it also stands in `metadata()`.
    """

    reason: ClassVar[str]
    """`ErrorReason` without its `ERROR_REASON_` prefix."""
    code: ClassVar[str]
    """Name of the gRPC status code."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def metadata(self) -> dict[str, str]:
        """Returns the values of the message; lowerCamelCase keys, the unit in the key."""
        return {}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that breaks its documented rule."""

    field: str
    """Path in the request's proto, such as "sampling.temperature"."""
    description: str
    """What was given and what is expected."""


class InvalidRequest(DrafthouseError):
    """One or more fields break their documented rule.

    Args:
        violations: All of them, at least one.
    """

    reason = "INVALID_FIELD"
    code = "INVALID_ARGUMENT"

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        assert violations, "an invalid request has at least one violation"
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in self.violations))

    def metadata(self) -> dict[str, str]:
        """Returns the paths of the fields."""
        return {"fields": ",".join(violation.field for violation in self.violations)}


class ContextTooLong(DrafthouseError):
    """Prompt and requested output do not fit the context.

    Args:
        prompt_tokens: Tokens of the prompt.
        max_output_tokens: Tokens asked for.
        context_tokens: Most tokens of one request, prompt and output together.
    """

    reason = "CONTEXT_TOO_LONG"
    code = "INVALID_ARGUMENT"

    def __init__(self, prompt_tokens: int, max_output_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.context_tokens = context_tokens
        super().__init__(
            f"{prompt_tokens} prompt tokens and {max_output_tokens} output tokens do not fit"
            f" the context of {context_tokens} tokens"
        )

    def metadata(self) -> dict[str, str]:
        """Returns the three counts."""
        return {
            "promptTokens": str(self.prompt_tokens),
            "maxOutputTokens": str(self.max_output_tokens),
            "contextTokens": str(self.context_tokens),
        }


class GrammarTooCostly(DrafthouseError):
    """The request's grammar takes more comparisons for one token than a sequence may have.

    The stream ends there: what came before it is good.
    """

    reason = "GRAMMAR_TOO_COSTLY"
    code = "INVALID_ARGUMENT"

    def __init__(self) -> None:
        super().__init__(
            "the grammar takes too many comparisons for one token; give it fewer alternatives and"
            " smaller classes of characters"
        )


class NoTokenAllowed(DrafthouseError):
    """The request's options leave no token to go on with.

    The stream ends there: what came before it is good.
    """

    reason = "NO_TOKEN_ALLOWED"
    code = "INVALID_ARGUMENT"

    def __init__(self) -> None:
        super().__init__(
            "the grammar, logit_bias and temperature leave no token to go on with; forbid none"
            " that the grammar needs"
        )


class Unauthenticated(DrafthouseError):
    """The API key is missing or unknown."""

    reason = "INVALID_API_KEY"
    code = "UNAUTHENTICATED"

    def __init__(self, message: str = "the API key is missing or unknown") -> None:
        super().__init__(message)


class PermissionDenied(DrafthouseError):
    """The tenant may not use this model. Checked before the model's existence.

    Args:
        model: Name in the request.
    """

    reason = "MODEL_NOT_ALLOWED"
    code = "PERMISSION_DENIED"

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"this API key may not use model {model!r}")

    def metadata(self) -> dict[str, str]:
        """Returns the model's name."""
        return {"model": self.model}


class NotFound(DrafthouseError):
    """The server does not serve this model.

    Args:
        model: Name in the request.
    """

    reason = "MODEL_NOT_FOUND"
    code = "NOT_FOUND"

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(f"this server does not serve model {model!r}")

    def metadata(self) -> dict[str, str]:
        """Returns the model's name."""
        return {"model": self.model}


class TenantNotFound(DrafthouseError):
    """The store has no tenant of this name.

    Args:
        tenant: Name in the request.
    """

    reason = "TENANT_NOT_FOUND"
    code = "NOT_FOUND"

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        super().__init__(f"the store has no tenant {tenant!r}")

    def metadata(self) -> dict[str, str]:
        """Returns the tenant's name."""
        return {"tenant": self.tenant}


class QuotaExceeded(DrafthouseError):
    """The tenant has reached a limit of its own.

    Args:
        tenant: Name of the tenant.
        quota: What is limited, as a plural noun: "waiting requests", "requests at once".
        limit: The limit.
        retry_after_s: When another attempt may succeed, seconds from now; None: never, as it is.
        metric: Name of the limit in the tenant's settings.
    """

    reason = "TENANT_QUOTA_EXCEEDED"
    code = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        tenant: str,
        quota: str,
        limit: float,
        retry_after_s: float | None,
        metric: str = "",
    ) -> None:
        self.tenant = tenant
        self.quota = quota
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.metric = metric
        super().__init__(f"tenant {tenant!r} has reached its limit of {limit:.15g} {quota}")

    def metadata(self) -> dict[str, str]:
        """Returns tenant, quota and limit."""
        return {"tenant": self.tenant, "quota": self.quota, "limit": f"{self.limit:.15g}"}


class SlowSender(DrafthouseError):
    """The message of a call did not come in time.

    Args:
        timeout_s: How long it was waited for, seconds.
    """

    reason = "SLOW_SENDER"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(f"the request did not come within {timeout_s:g} seconds")

    def metadata(self) -> dict[str, str]:
        """Returns the time."""
        return {"timeoutSeconds": f"{self.timeout_s:g}"}


class SlowReader(DrafthouseError):
    """The client does not read what it asked for.

    Args:
        limit: How long it may take to take a message, seconds; how much may wait for it, bytes.
        unit: Of the limit: "seconds" or "bytes".
    """

    reason = "SLOW_READER"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, limit: float, unit: str = "seconds") -> None:
        self.limit = limit
        self.unit = unit
        what = "took no message for" if unit == "seconds" else "left unread more than"
        super().__init__(f"the client {what} {limit:g} {unit}")

    def metadata(self) -> dict[str, str]:
        """Returns the limit."""
        return {f"limit{self.unit.title()}": f"{self.limit:g}"}


class TooManyBadKeys(DrafthouseError):
    """The client's address has sent too many keys that are none; what it sends is not looked at.

    Args:
        limit: Keys of an address that may be wrong, per minute.
        retry_after_s: When its next key will be looked at, seconds from now.
    """

    reason = "TOO_MANY_BAD_KEYS"
    code = "RESOURCE_EXHAUSTED"

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(f"this address has sent more than {limit} wrong API keys within a minute")

    def metadata(self) -> dict[str, str]:
        """Returns the limit."""
        return {"limit": str(self.limit)}


class Overloaded(DrafthouseError):
    """The server cannot take the request now; another attempt may succeed.

    Args:
        message: One sentence for the client.
        retry_after_s: When another attempt may succeed, seconds from now.
    """

    code = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class QueueFull(Overloaded):
    """The server's queue is full.

    Args:
        n_waiting: Requests that wait; it is told rounded up to a power of two.
        retry_after_s: When another attempt may succeed, seconds from now.
    """

    reason = "QUEUE_FULL"

    def __init__(self, n_waiting: int, retry_after_s: float) -> None:
        # Rounded up to a power of two: how busy others are is nobody's business to the digit.
        self.n_waiting = 1 << max(0, n_waiting - 1).bit_length()
        message = f"the queue is full: up to {self.n_waiting} requests are waiting"
        super().__init__(message, retry_after_s)

    def metadata(self) -> dict[str, str]:
        """Returns the number of waiting requests."""
        return {"waitingRequests": str(self.n_waiting)}


class Draining(Overloaded):
    """The server is shutting down.

    Args:
        retry_after_s: When another attempt, then at another server, may succeed, seconds from now.
        is_failed: Whether it shuts down because its step loop has failed.
    """

    reason = "SERVER_DRAINING"
    has_begun = False  # whether something of the generation that it ends was computed

    def __init__(self, retry_after_s: float, *, is_failed: bool = False) -> None:
        because = ": its step loop has failed" if is_failed else ""
        super().__init__(f"the server is shutting down{because}", retry_after_s)

    def metadata(self) -> dict[str, str]:  # noqa: D102  # as `DrafthouseError` says
        return {"hasBegun": "true"} if self.has_begun else {}


class DeadlineTooShort(DrafthouseError):
    """The request cannot have its first token before its deadline, however soon it gets a slot.

    Args:
        left_s: Seconds until the deadline.
        needed_s: Seconds that computing its prompt takes at the least.
    """

    reason = "DEADLINE_TOO_SHORT"
    code = "DEADLINE_EXCEEDED"

    def __init__(self, left_s: float, needed_s: float) -> None:
        self.left_ms = max(0, round(left_s * 1000))
        self.needed_ms = math.ceil(needed_s * 1000)
        super().__init__(
            f"the deadline is {self.left_ms} ms away, and the prompt takes {self.needed_ms} ms at"
            " the least"
        )

    def metadata(self) -> dict[str, str]:
        """Returns both times."""
        return {"leftMs": str(self.left_ms), "neededMs": str(self.needed_ms)}


class ServerOverloaded(Overloaded):
    """The server has no room for another call.

    Args:
        what: What there is too much of, as a clause: "calls are open".
        retry_after_s: When another attempt may succeed, seconds from now.
    """

    reason = "SERVER_OVERLOADED"

    def __init__(self, what: str, retry_after_s: float) -> None:
        super().__init__(f"too many {what} on this server", retry_after_s)


class EngineUnhealthy(Overloaded):
    """The last steps were all lost, or one does not end: no more requests are taken till one works.

    Args:
        retry_after_s: When another attempt, then at another server, may succeed, seconds from now.
        problem: What does not work, as a sentence without its dot.
    """

    reason = "ENGINE_UNHEALTHY"

    def __init__(self, retry_after_s: float, problem: str = "the engine keeps failing") -> None:
        super().__init__(problem, retry_after_s)


class StoreUnavailable(Overloaded):
    """The store of keys does not answer, so nobody knows whether the key is one.

    Args:
        retry_after_s: When another attempt may succeed, seconds from now.
        problem: What is wrong with it, for administrators.
    """

    reason = "STORE_UNAVAILABLE"

    def __init__(self, retry_after_s: float, problem: str = "") -> None:
        super().__init__(problem or "the store of API keys does not answer", retry_after_s)


class UsageUnavailable(Overloaded):
    """Usage cannot be recorded or listed now.

    Args:
        retry_after_s: When another attempt may succeed, seconds from now.
        action: What is impossible, as a participle.
    """

    reason = "USAGE_UNAVAILABLE"

    def __init__(self, retry_after_s: float, action: str = "recorded") -> None:
        super().__init__(f"usage cannot be {action} now", retry_after_s)


class EngineError(DrafthouseError):
    """The engine failed on this request.

    Args:
        status: Name of the failure, such as "DECODE_FAILED".
    """

    reason = "ENGINE_FAILURE"
    code = "INTERNAL"

    def __init__(self, status: str) -> None:
        self.status = status
        super().__init__(f"the engine failed: {status}")

    def metadata(self) -> dict[str, str]:
        """Returns the status."""
        return {"status": self.status}


class StartupError(Exception):
    """Keeps the server from starting. Its text is one sentence that says what to do."""


class ServerFailed(Exception):
    """Ended a server that was serving. Its text is one sentence that says what to do."""


class EngineLost(ServerFailed):
    """Ended a server whose engine does not work any more: a new process may have better luck."""


class ConfigError(StartupError):
    """A setting is wrong.

    Args:
        key: Name of the setting.
        value: What was given; never a secret.
        expected: What is allowed.
        source: Where it was given, such as a file or an environment variable.
        problem: The whole sentence, where "is …; expected …" does not say it.
    """

    def __init__(
        self, key: str, value: object, expected: str = "", source: str = "", *, problem: str = ""
    ) -> None:
        self.key = key
        self.value = value
        self.expected = expected
        origin = f" ({source})" if source else ""
        super().__init__(problem or f"setting {key!r}{origin} is {value!r}; expected {expected}")


class UnknownSetting(ConfigError):
    """A setting is given that does not exist.

    Args:
        name: As it was written.
        similar: The setting that was meant, perhaps; empty when none is like it.
        source: Where it was given: a file, or "the environment".
    """

    def __init__(self, name: str, similar: str, source: str) -> None:
        advice = (
            f"did you mean {similar!r}?"
            if similar
            else "remove it; `drafthouse config --example` lists all settings"
        )
        problem = f"unknown setting {name!r} in {source}; {advice}"
        super().__init__(name, "given", source=source, problem=problem)


class ModelLoadError(StartupError):
    """A model cannot be loaded.

    Args:
        path: The file.
        problem: What is wrong with it.
        advice: What to do.
    """

    def __init__(self, path: str, problem: str, advice: str) -> None:
        self.path = path
        self.advice = advice
        super().__init__(f"cannot load {path!r}: {problem}; {advice}")


class StoreError(StartupError):
    """The store of tenants and keys cannot be used.

    Args:
        problem: What is wrong, and what to do, where that is known.
        is_away: Whether the store itself is at fault, and not what it was asked.
    """

    def __init__(self, problem: str, *, is_away: bool = True) -> None:
        self.is_away = is_away
        super().__init__(problem)


class StoreRefusal(Exception):
    """A change contradicts what the store holds. Its text is one sentence that says what to do."""
