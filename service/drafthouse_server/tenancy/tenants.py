"""Who asks: keys, the tenants that they are of, and what these may use."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from drafthouse_server.access import is_tenant_name
from drafthouse_server.errors import ConfigError, PermissionDenied, QuotaExceeded, Unauthenticated
from drafthouse_server.setting import Rule, between

if TYPE_CHECKING:
    from drafthouse_server.tenancy.identity import BadKeys

__all__ = [
    "LIMITS",
    "Identity",
    "KeySettings",
    "Limit",
    "Tenant",
    "TenantRegistry",
    "make_tenant",
    "parse_limit",
    "usable_limits",
]

_DEFAULT_TENANT = "default"
_NO_HOLD = nullcontext()

_PRIORITY_MAX = 100


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer of the server; keys, limits and fairness are counted per tenant."""

    name: str
    """Unique name."""
    weight: float = 1.0
    """Share of the server relative to other tenants' weights, > 0."""
    n_waiting_max: int | None = None
    """Requests that may wait for a slot; None is unlimited."""
    n_active_max: int | None = None
    """Requests that may wait or run at once; None is unlimited."""
    models: frozenset[str] | None = None
    """Names of the models that it may use; None is all."""
    requests_per_s: float | None = None
    """Requests a second; None is unlimited."""
    input_tokens_per_min: int | None = None
    """Tokens of prompts a minute; None is unlimited."""
    output_tokens_per_min: int | None = None
    """Tokens of outputs a minute; None is unlimited."""
    tokens_per_month: int | None = None
    """Tokens of prompts and outputs in a month of the calendar, in UTC; None is unlimited."""
    n_prompt_max: int | None = None
    """Most tokens of one prompt; None: what fits the context."""
    n_output_max: int | None = None
    """Most tokens of one output; None: what fits the context."""
    priority_max: int = _PRIORITY_MAX
    """Highest priority of its requests, [-100, 100]; a higher one that is asked for becomes it."""
    n_draft_max: int | None = None
    """Most draft tokens (K) of one request and step; None: the server's."""
    end_user_requests_per_s: float | None = None
    """Requests a second of each of its end users; None is unlimited."""
    end_user_active_max: int | None = None
    """Requests of each of its end users that may wait or run at once; None is unlimited."""

    def check_model(self, model: str) -> None:
        """Checks that the tenant may use a model, whether or not the model exists.

        Raises:
            PermissionDenied: it may not (MODEL_NOT_ALLOWED).
        """
        if self.models is not None and model not in self.models:
            raise PermissionDenied(model)

    def bound_output(self, asked: int | None, n_most: int) -> int:
        """Returns the most tokens that a request of the tenant may generate.

        Args:
            asked: Tokens asked for; None: as many as may be.
            n_most: What the context has room for.

        Raises:
            QuotaExceeded: more were asked for than the tenant's requests may generate
                (TENANT_QUOTA_EXCEEDED).
        """
        limit = self.n_output_max
        if limit is None:
            return n_most
        if asked is not None and asked > limit:
            quota = "tokens of an output"
            raise QuotaExceeded(self.name, quota, limit, None, "max_output_tokens")
        return min(n_most, limit)

    def bound_draft(self, asked: int | None) -> int | None:
        """Returns K of a request of the tenant; None: the server's default."""
        limit = self.n_draft_max
        if limit is None:
            return asked
        return limit if asked is None else min(asked, limit)


@dataclass(frozen=True, slots=True)
class Limit:
    """One of a tenant's settings."""

    key: str
    """Name of the limit in settings."""
    attribute: str
    """Attribute of `Tenant` that holds it."""
    kind: type
    """Type of its value."""
    rule: Rule
    """Which values are allowed."""
    about: str
    """Help: what it does; without it there is no limit, unless that is said here."""


def _count(key: str, attribute: str, about: str) -> Limit:
    return Limit(key, attribute, int, between(1, 1 << 40), about)


LIMITS = (
    Limit(
        "weight",
        "weight",
        float,
        between(0.001, 1000),
        "Share of the server relative to other tenants'. Without it: 1.",
    ),
    Limit("requests_per_s", "requests_per_s", float, between(0.001, 1e6), "Requests a second."),
    _count("input_tokens_per_min", "input_tokens_per_min", "Tokens of prompts a minute."),
    _count(
        "output_tokens_per_min",
        "output_tokens_per_min",
        "Tokens of outputs a minute: reserved when a request is let in, settled at its end.",
    ),
    _count(
        "tokens_per_month",
        "tokens_per_month",
        "Tokens of prompts and outputs in a month of the calendar, in UTC; requests that run when"
        " it is used up go on to their end. Without a usage journal counted since the server's"
        " start.",
    ),
    _count("max_streams", "n_active_max", "Requests that may be prepared, wait or run at once."),
    _count(
        "queue_size",
        "n_waiting_max",
        "Requests that may wait for a slot. Without it: tenant_queue_size.",
    ),
    _count("max_prompt_tokens", "n_prompt_max", "Tokens of one prompt."),
    _count(
        "max_output_tokens",
        "n_output_max",
        "Tokens of one output. A request that asks for more is refused; one that does not say ends"
        " there.",
    ),
    Limit("models", "models", list, Rule("a list of names", bool), "Models that it may use."),
    Limit(
        "max_priority",
        "priority_max",
        int,
        between(-_PRIORITY_MAX, _PRIORITY_MAX),
        "Highest priority of its requests; a higher one that is asked for becomes it.",
    ),
    Limit(
        "draft_max",
        "n_draft_max",
        int,
        between(0, 64),
        "Draft tokens (K) of one request and step. Without it: the server's draft_max.",
    ),
    Limit(
        "end_user_requests_per_s",
        "end_user_requests_per_s",
        float,
        between(0.001, 1e6),
        "Requests a second of each end user (end_user of a request).",
    ),
    _count(
        "end_user_max_streams",
        "end_user_active_max",
        "Requests of each end user that may be prepared, wait or run at once.",
    ),
)
"""A tenant's settings, as they stand in a section [tenants.NAME] of the settings file, and in a
store."""

_BY_KEY = {limit.key: limit for limit in LIMITS}


def make_tenant(name: str, settings: Mapping[str, object], *, n_waiting_max: int) -> Tenant:
    """Returns a tenant of its settings.

    Args:
        name: Its name.
        settings: Values by the names in `LIMITS`.
        n_waiting_max: Requests that may wait where the settings do not say.

    Raises:
        ConfigError: there is no such setting, or a value breaks its rule.
    """
    values: dict[str, Any] = {"n_waiting_max": n_waiting_max}
    for key, value in settings.items():
        full = f"tenants.{name}.{key}"
        limit = _BY_KEY.get(key)
        if limit is None:
            known = ", ".join(_BY_KEY)
            problem = f"unknown setting {full!r}; a tenant has: {known}"
            raise ConfigError(full, value, problem=problem)
        _check(full, limit, value)
        values[limit.attribute] = frozenset(value) if isinstance(value, list) else value
    return Tenant(name, **values)


def _check(full: str, limit: Limit, value: Any) -> None:  # noqa: ANN401  # as somebody has set it
    """Checks a value.

    Raises:
        ConfigError: it breaks its rule, which names the setting by `full`.
    """
    is_number = limit.kind is float and type(value) is int
    has_type = is_number or type(value) is limit.kind
    has_texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
    if not (has_type and has_texts and limit.rule.is_valid(value)):
        raise ConfigError(full, value, limit.rule.expected)


def parse_limit(key: str, text: str) -> object:
    """Returns the value of a setting that a text stands for, in the type that a store keeps.

    Args:
        key: One of the names in `LIMITS`.
        text: A number, or names with commas between; "none" takes the setting back to its default.

    Returns:
        The value; None: the default.

    Raises:
        ConfigError: there is no such setting, or the text breaks its rule.
    """
    limit = _BY_KEY.get(key)
    if limit is None:
        problem = f"{key!r} is no limit; expected LIMIT=VALUE, with one of {', '.join(_BY_KEY)}"
        raise ConfigError(key, text, problem=problem)
    if text.lower() == "none":
        return None
    value: object
    if limit.kind is list:
        value = sorted({part.strip() for part in text.split(",") if part.strip()})
    else:
        try:
            value = limit.kind(text)
        except ValueError:
            value = text  # of a type that breaks the rule
    _check(key, limit, value)
    return value


def usable_limits(settings: Mapping[str, object]) -> dict[str, object]:
    """Returns those of a store's settings of a tenant that this release knows and that are right.

    A newer release, or somebody by hand, may have written others; these must not keep the tenant's
    keys from working.
    """
    usable = {}
    for key, value in settings.items():
        limit = _BY_KEY.get(key)
        if limit is None:
            continue
        with suppress(ConfigError):
            _check(key, limit, value)
            usable[key] = value
    return usable


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls."""

    tenant: Tenant
    """The customer."""
    key_id: str = ""
    """Which of its keys: an id that may be logged; empty when no key is asked for."""


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode()).digest()


class KeySettings(Protocol):
    """The settings of `Config` that say whose keys are whose; they are documented there."""

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Keys and their tenants."""

    @property
    def tenants(self) -> Mapping[str, Mapping[str, object]]:
        """Weight and limits by tenant."""

    @property
    def tenant_queue_size(self) -> int:
        """Requests of one tenant that may wait for a slot."""

    @property
    def ssl_client_ca_file(self) -> str:
        """Path of the authorities of clients' certificates; empty when clients need none."""

    @property
    def store(self) -> str:
        """URL of the store of tenants and keys; empty without one."""


def _keyless(name: str, config: KeySettings) -> str:
    """Returns what is wrong with a section of a tenant that no key of the settings is of."""
    if not is_tenant_name(name):
        return (
            f"the section [tenants.{name!r}] names no tenant; expected 1 to 64 of A-Z a-z 0-9"
            " . _ -, no mark first"
        )
    problem = f"tenant {name!r} has settings and no key"
    command = f"`drafthouse tenants set {name} {_as_words(config.tenants[name])}`"
    if config.store:
        return (
            f"{problem} in api_keys, and the store's tenants have their limits in it; remove the"
            f" section and run {command} (add in place of set for a new tenant)"
        )
    if config.ssl_client_ca_file:
        return (
            f"{problem} in api_keys, and without a store a certificate's tenant has the"
            f" limits of tenant {_DEFAULT_TENANT!r}; add a key {name}:KEY, or set store,"
            f" remove the section and run {command.replace(' set ', ' add ', 1)}"
        )
    if config.api_keys:
        return f"{problem}; add a key {name}:KEY, or remove it"
    return (
        f"tenant {name!r} has settings, and without api_keys every client is tenant"
        f" {_DEFAULT_TENANT!r}; set api_keys, or name the section so"
    )


def _as_words(section: Mapping[str, object]) -> str:
    """Returns limits as the command line takes them; those that are none are left out."""
    words = []
    for key, value in usable_limits(section).items():
        text = ",".join(value) if isinstance(value, list) else f"{value:.12g}"
        words.append(shlex.quote(f"{key}={text}"))
    return " ".join(words) or "LIMIT=VALUE"


class TenantRegistry:
    """Finds the tenant of an API key, or of a certificate; asked for neither, it lets everybody in.

    Args:
        tenants: Tenants by API key.
        open_tenant: The tenant of every call when nobody must show who it is; a tenant that only
            certificates name has its limits.
        has_certificates: Whether clients show certificates; then one that names no tenant, and has
            no key, is refused.
        bad_keys: Counts wrong keys; nobody does when not given.
        clock: Time in seconds, for that.
    """

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        open_tenant: Tenant | None = None,
        *,
        bad_keys: BadKeys | None = None,
        has_certificates: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        # Looked up by digest, so that the time of a lookup tells nothing of a key.
        self._identities: dict[bytes, Identity] = {}
        for api_key, tenant in tenants.items():
            digest = _digest(api_key)
            self._identities[digest] = Identity(tenant, digest.hex()[:12])
        self._by_name = {tenant.name: tenant for tenant in tenants.values()}
        self._has_certificates = has_certificates
        self._open = Identity(open_tenant or Tenant(_DEFAULT_TENANT))
        self._bad_keys = bad_keys
        self._clock = clock

    @classmethod
    def from_config(
        cls,
        config: KeySettings,
        *,
        bad_keys: BadKeys | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> TenantRegistry:
        """Returns the registry of `Config.api_keys`, with the limits of `Config.tenants`.

        Raises:
            ConfigError: a tenant's settings are wrong, or nobody has a key of it.
        """
        names = {entry.partition(":")[0] for entry in config.api_keys} or {_DEFAULT_TENANT}
        for name in config.tenants:
            if name not in names:
                raise ConfigError("tenants", name, problem=_keyless(name, config))
        made = {
            name: make_tenant(
                name, config.tenants.get(name, {}), n_waiting_max=config.tenant_queue_size
            )
            for name in names
        }
        tenants = {}
        for entry in config.api_keys:
            name, _, api_key = entry.partition(":")
            tenants[api_key] = made[name]
        return cls(
            tenants,
            made.get(_DEFAULT_TENANT)
            or make_tenant(_DEFAULT_TENANT, {}, n_waiting_max=config.tenant_queue_size),
            bad_keys=bad_keys,
            has_certificates=bool(config.ssl_client_ca_file),
            clock=clock,
        )

    @property
    def is_open(self) -> bool:
        """Whether calls need neither key nor certificate."""
        return not (self._identities or self._has_certificates)

    def identify(self, api_key: str | None, address: str) -> Identity:
        """Returns whom a key is of.

        A right key is always taken: behind a proxy all clients may have one address.

        Args:
            api_key: As the client sent it, without a scheme; None if it sent none.
            address: Where it was sent from, as `source_of` returns it.

        Raises:
            Unauthenticated: the key is missing or unknown (INVALID_API_KEY).
            TooManyBadKeys: the address has sent too many that are (TOO_MANY_BAD_KEYS).
        """
        if self.is_open:
            return self._open
        identity = self._identities.get(_digest(api_key)) if api_key else None
        if identity is not None:
            return identity
        if self._bad_keys is not None and api_key:
            self._bad_keys.check(address, self._clock())
            self._bad_keys.note(address, self._clock())
        raise Unauthenticated

    def hold(
        self, identity: Identity, on_end: Callable[[], object] = lambda: None
    ) -> AbstractContextManager[None]:
        """Returns a block that never ends a call: keys of the settings are not revoked."""
        del identity, on_end
        return _NO_HOLD

    def has_tenant(self, name: str) -> bool:
        """Returns whether the settings have a key of a tenant."""
        return name in self._by_name

    def certified(self, name: str) -> Identity:
        """Returns the tenant that a client's certificate names; what has no settings has no limits.

        Args:
            name: The tenant's.
        """
        known = self._by_name.get(name)
        return Identity(known or dataclasses.replace(self._open.tenant, name=name))
