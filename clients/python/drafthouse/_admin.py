"""The client of operators and routers, for a server's AdminService."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration

from drafthouse._enums import OpenEnum
from drafthouse._errors import map_grpc_errors
from drafthouse._retry import checked_timeout
from drafthouse._tls import Tls, is_local, secured
from drafthouse._transport import CHANNEL_OPTIONS, NotCopied, named, put, put_all, wrong_type
from drafthouse.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor

__all__ = [
    "AdminClient",
    "CacheBlocksRemoved",
    "CacheBlocksStored",
    "CacheReset",
    "Limit",
    "Load",
    "PrefixCacheStatus",
    "ServerState",
    "ServerStatus",
    "StoreState",
    "TenantLoad",
    "prefix_hashes",
]

ADMIN_TARGET = "127.0.0.1:50052"
_HASH_BYTES = 8

Limit: TypeAlias = float | int | tuple[str, ...]
"""A limit of a tenant: a number, or names of models."""


class ServerState(OpenEnum):
    """Whether a server takes requests; one that this SDK does not know is "unknown-NUMBER"."""

    UNSPECIFIED = "unspecified"
    """The server has told none; it always does."""
    SERVING = "serving"
    """The server takes requests."""
    DRAINING = "draining"
    """It takes none, and ends when those that run have ended or their time is over."""
    UNHEALTHY = "unhealthy"
    """The engine keeps failing."""
    USAGE_UNAVAILABLE = "usage-unavailable"
    """The usage journal cannot be written: streams are refused until it has room again."""

    @classmethod
    def _proto(cls) -> EnumDescriptor:
        return admin_pb2.DESCRIPTOR.enum_types_by_name["ServerState"]


class StoreState(OpenEnum):
    """Whether the store of tenants and keys answers; a newer word is "unknown-NUMBER"."""

    UNSPECIFIED = "unspecified"
    """The server has told none; it always does."""
    NONE = "none"
    """The server has no store."""
    UP = "up"
    """The store answered the last question."""
    DOWN = "down"
    """The store did not answer the last question."""

    @classmethod
    def _proto(cls) -> EnumDescriptor:
        return admin_pb2.DESCRIPTOR.enum_types_by_name["StoreState"]


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a server: slots, queue and cells in use."""

    state: ServerState
    """Whether it takes requests."""
    running_requests: int
    """Requests that have a slot."""
    waiting_requests: int
    """Requests that are prepared or wait for a slot."""
    free_slots: int
    """Slots without a request."""
    free_kv_cells: int
    """KV cells that no running request holds."""
    prefill_backlog_tokens: int
    """Prompt tokens of all requests that are not computed yet."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStatus:
    """Lookups and contents of a prefix cache; counts are since the start of the server."""

    lookup_tokens: int
    """Prompt tokens that were looked up."""
    reused_tokens: int
    """Prompt tokens that were not computed again."""
    retained_slots: int
    """Slots without a request that hold a prefix now."""
    host_bytes: int
    """Bytes of prefixes in host memory now."""


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """How a server does. Rates are of the last ten seconds."""

    version: str
    """Version of the server."""
    model: str
    """Name of the model."""
    started_at: datetime
    """When it began to listen, in UTC."""
    uptime: timedelta
    """Time since then."""
    load: Load
    """Slots, queue and cells in use."""
    slots: int
    """Requests that may run at once."""
    kv_cells: int
    """KV cells of all slots together."""
    tokens_per_second: float
    """Generated tokens a second."""
    acceptance_rate: float
    """Accepted share of the draft tokens, [0, 1]."""
    draft_tokens_per_step: float
    """Draft tokens chosen (K) in the mean per request and step."""
    prefix_cache: PrefixCacheStatus
    """Lookups and contents of its prefix cache."""
    store: StoreState
    """Whether the store of tenants and keys answers."""
    usage_journal_failing: bool
    """Whether the usage journal cannot be written now."""


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What one tenant does on a server."""

    tenant: str
    """Name of the tenant."""
    running_requests: int
    """Requests that have a slot."""
    waiting_requests: int
    """Requests that are prepared or wait for a slot."""
    open_calls: int
    """Calls that are open, of any method."""
    prompt_tokens: int
    """Prompt tokens of its streams that have ended since it was first seen."""
    output_tokens: int
    """Output tokens of its streams that have ended since it was first seen."""
    virtual_counter: float | None
    """Service that it was given over its weight; None: the engine has not answered in time."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Limits in force, by name; what is not there is not limited."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What was told of a cache before is void: what follows is all that there is."""

    block_tokens: int
    """Tokens of one block."""


@dataclass(frozen=True, slots=True)
class CacheBlocksStored:
    """Blocks of prompts that are computed now."""

    tenant: str
    """Name of the tenant that they are of."""
    end_user: str
    """For whom the tenant has asked; may be empty."""
    salt: bytes
    """Salt of the tenant's hashes."""
    parent_hash: int | None
    """Hash of the block before the first; None at the start of a prompt."""
    hashes: tuple[int, ...]
    """Hashes of the blocks, in order."""


@dataclass(frozen=True, slots=True)
class CacheBlocksRemoved:
    """Blocks of prompts that are not there any more."""

    tenant: str
    """Name of the tenant that they were of."""
    end_user: str
    """For whom the tenant had asked; may be empty."""
    hashes: tuple[int, ...]
    """Hashes of the blocks."""


class AdminClient(NotCopied):
    """Talks to the AdminService of a server. Close it, or use it in a `with` block.

    Failed calls are not tried again.

    Args:
        target: address of AdminService, "host:port".
        tls: connect by TLS; a `Tls` has the administrator's certificate.

    Raises:
        ValueError: the target is no address, or is not this machine, and there is no TLS, or a file
            of it is not PEM, or its certificate and private key do not belong together.
        TypeError: the target or `tls` is of the wrong type.
        OSError: a file of `tls` cannot be read.

    Thread:
        any; one client serves many threads.
    """

    def __init__(self, target: str = ADMIN_TARGET, *, tls: bool | Tls = False) -> None:
        credentials, more = secured(target, None, tls, None, False)
        if not tls and not is_local(target):
            raise ValueError(
                f"{target!r} is not this machine, and AdminService takes TLS alone there; pass"
                " tls=drafthouse.Tls(...) with the certificate of an administrator"
            )
        options = (*CHANNEL_OPTIONS, *more)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)

    def status(self, *, timeout: float | None = 5.0) -> ServerStatus:
        """Returns how the server does.

        Raises:
            Unavailable: no AdminService answers.
            DrafthouseError: the call failed otherwise.
        """
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            found = self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=seconds)
        cache = found.prefix_cache
        return ServerStatus(
            version=found.version,
            model=found.model,
            started_at=found.start_time.ToDatetime(UTC),
            uptime=found.uptime.ToTimedelta(),
            load=_load(found.load),
            slots=found.slots,
            kv_cells=found.kv_cells,
            tokens_per_second=found.tokens_per_second,
            acceptance_rate=found.acceptance_rate,
            draft_tokens_per_step=found.draft_tokens_per_step,
            prefix_cache=PrefixCacheStatus(
                cache.lookup_tokens, cache.reused_tokens, cache.retained_slots, cache.host_bytes
            ),
            store=StoreState.of(found.store),
            usage_journal_failing=found.usage_journal_failing,
        )

    def tenants(self, *, timeout: float | None = 5.0) -> list[TenantLoad]:
        """Returns the tenants that have called of late, by name.

        Raises:
            DrafthouseError: the call failed.
        """
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            found = self._stub.ListTenants(admin_pb2.ListTenantsRequest(), timeout=seconds)
        return [
            TenantLoad(
                tenant.tenant,
                tenant.running_requests,
                tenant.waiting_requests,
                tenant.open_calls,
                tenant.prompt_tokens,
                tenant.output_tokens,
                tenant.virtual_counter if tenant.HasField("virtual_counter") else None,
                _limits(tenant.limits),
            )
            for tenant in found.tenants
        ]

    def limits(self, tenant: str, *, timeout: float | None = 5.0) -> Mapping[str, Limit]:
        """Returns the limits of a tenant that the server's store has, by name.

        Raises:
            TenantNotFound: the store has no such tenant (TENANT_NOT_FOUND).
            DrafthouseError: the call failed otherwise, or the server has no store.
            TypeError: the name is no text.
        """
        request = admin_pb2.GetLimitsRequest()
        put(request, "tenant", "tenant", "text", tenant)
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            return _limits(self._stub.GetLimits(request, timeout=seconds).limits)

    def set_limits(
        self,
        tenant: str,
        limits: Mapping[str, Limit],
        *,
        reset: Collection[str] = (),
        timeout: float | None = 5.0,
    ) -> Mapping[str, Limit]:
        """Changes limits of a tenant in the server's store, and returns all that it has then.

        Args:
            tenant: name of the tenant.
            limits: new limits by name, as in the protos' TenantLimits.
            reset: names of limits that go back to their default.
            timeout: seconds; None is no limit.

        Raises:
            InvalidField: a limit breaks its rule, and nothing has changed (INVALID_FIELD).
            TenantNotFound: the store has no such tenant (TENANT_NOT_FOUND).
            DrafthouseError: the call failed otherwise, or the server has no store.
            TypeError: a name or a limit is of the wrong type.
            ValueError: there is no limit of such a name, or a list of names is empty.
        """
        if not isinstance(limits, Mapping):
            raise wrong_type("limits", "a mapping of names to limits", limits)
        request = admin_pb2.SetLimitsRequest()
        put(request, "tenant", "tenant", "text", tenant)
        put_all(request.reset_fields, "reset", "a set of names", "text", reset, kind=str)
        for name, value in limits.items():
            if name not in admin_pb2.TenantLimits.DESCRIPTOR.fields_by_name:
                raise ValueError(f"there is no limit {name!r}")
            _set_limit(request.limits, name, value)
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            return _limits(self._stub.SetLimits(request, timeout=seconds).limits)

    def drain(self, running_timeout: float | None = None, *, timeout: float | None = 5.0) -> Load:
        """Ends the server as SIGTERM does, and returns its load as it began to drain.

        Args:
            running_timeout: seconds that running requests may go on; None: the server's setting.
            timeout: seconds for this call; None is no limit.

        Raises:
            DrafthouseError: the call failed.
        """
        request = admin_pb2.DrainRequest()
        if running_timeout is not None:
            rule = "seconds in [0, 86400]"
            request.timeout.CopyFrom(_duration("running_timeout", rule, running_timeout))
        seconds = checked_timeout(timeout)
        with map_grpc_errors():
            return _load(self._stub.Drain(request, timeout=seconds).load)

    def watch_load(self, interval: float = 0.1) -> Iterator[Load]:
        """Yields the server's load: at once, and then the newest one whenever it has changed.

        Args:
            interval: least seconds between two, [0.01, 60].

        Raises:
            Unavailable: the server has ended, or cannot be reached.
            DrafthouseError: the call failed otherwise.
        """
        least = _duration("interval", "seconds in [0.01, 60]", interval)
        request = admin_pb2.WatchLoadRequest(interval=least)
        with map_grpc_errors():
            for response in self._stub.WatchLoad(request):
                yield _load(response.load)

    def watch_cache(
        self, tenant: str = ""
    ) -> Iterator[CacheReset | CacheBlocksStored | CacheBlocksRemoved]:
        """Yields which prefixes the server has computed: a reset, all that it has, what changes.

        Args:
            tenant: whose; empty is everybody's.

        Raises:
            Unavailable: the server has ended, or cannot be reached.
            DrafthouseError: the call failed otherwise.
        """
        request = admin_pb2.WatchCacheRequest()
        put(request, "tenant", "tenant", "text", tenant)
        with map_grpc_errors():
            for response in self._stub.WatchCache(request):
                change = _change(response)
                if change is not None:  # of a newer server
                    yield change

    def close(self) -> None:
        """Closes the connection and cancels what still runs. Harmless when done twice."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def prefix_hashes(
    token_ids: Sequence[int],
    salt: bytes,
    tenant: str,
    *,
    end_user: str = "",
    block_tokens: int = 16,
) -> list[int]:
    """Returns the hashes of a prompt's whole blocks, as `AdminClient.watch_cache` tells them.

    A server has the first n blocks computed where it has told the n-th hash and not taken it back.

    Args:
        token_ids: of the prompt, each in [0, 2^31).
        salt: of the tenant, as the server told it.
        tenant: name of the tenant whose prompt it is.
        end_user: for whom the tenant asks.
        block_tokens: as the server told it.
    """
    owner = f"{tenant}\0{end_user}" if end_user else tenant
    digest = blake2b(owner.encode(), digest_size=_HASH_BYTES).digest()
    found = []
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        block = struct.pack(f"<{block_tokens}i", *token_ids[end - block_tokens : end])
        digest = blake2b(digest + block, digest_size=_HASH_BYTES).digest()
        salted = blake2b(digest, digest_size=_HASH_BYTES, key=salt).digest()
        found.append(int.from_bytes(salted, "big"))
    return found


_RULES = {"max_priority": "an integer in [-100, 100]", "max_draft_tokens": "an integer in [0, 64]"}
_DOUBLE_RULE, _INTEGER_RULE = "a number >= 0.001", "an integer >= 1, of 63 bits at most"


def _set_limit(message: admin_pb2.TenantLimits, limit: str, value: object) -> None:
    name, field = f"limits.{limit}", message.DESCRIPTOR.fields_by_name[limit]
    if field.is_repeated:
        if value == ():  # on the wire no names are no change
            raise ValueError(f"{limit} has no names; reset={{{limit!r}}} takes the limit away")
        rule = "a tuple of names of models"
        put_all(getattr(message, limit), name, rule, "text", value, kind=str)
    else:
        is_double = field.cpp_type == field.CPPTYPE_DOUBLE
        rule = _RULES.get(limit, _DOUBLE_RULE if is_double else _INTEGER_RULE)
        put(message, limit, name, rule, value)


def _duration(name: str, rule: str, seconds: float) -> Duration:
    """Returns a time as messages have it.

    Raises:
        InvalidField: no message can carry it (INVALID_FIELD).
        TypeError: it is of the wrong type.
    """
    found = Duration()
    with named(name, rule, seconds):
        found.FromNanoseconds(round(seconds * 1e9))
    return found


def _load(message: admin_pb2.Load) -> Load:
    return Load(
        ServerState.of(message.state),
        message.running_requests,
        message.waiting_requests,
        message.free_slots,
        message.free_kv_cells,
        message.prefill_backlog_tokens,
    )


def _limits(message: admin_pb2.TenantLimits) -> Mapping[str, Limit]:
    return {
        descriptor.name: tuple(value) if descriptor.is_repeated else value
        for descriptor, value in message.ListFields()
    }


def _change(
    response: admin_pb2.WatchCacheResponse,
) -> CacheReset | CacheBlocksStored | CacheBlocksRemoved | None:
    kind = response.WhichOneof("change")
    if kind == "reset":
        return CacheReset(response.reset.block_tokens)
    if kind == "stored":
        stored = response.stored
        parent = stored.parent_hash if stored.HasField("parent_hash") else None
        return CacheBlocksStored(
            stored.tenant, stored.end_user, stored.salt, parent, tuple(stored.hashes)
        )
    if kind == "removed":
        removed = response.removed
        return CacheBlocksRemoved(removed.tenant, removed.end_user, tuple(removed.hashes))
    return None
