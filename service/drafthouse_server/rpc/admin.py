"""The service of operators and routers. See admin.proto; `listening` has its listener."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Never, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from drafthouse.v1 import admin_pb2, admin_pb2_grpc
from drafthouse_server.config import Config
from drafthouse_server.errors import (
    ConfigError,
    FieldViolation,
    InvalidRequest,
    ServerOverloaded,
    StoreError,
    StoreRefusal,
    StoreUnavailable,
    TenantNotFound,
)
from drafthouse_server.operations.rates import Counters, RecentRates
from drafthouse_server.rpc.gate import Gate
from drafthouse_server.rpc.interceptors import Context, current_act, current_call
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    BlocksStored,
    CacheEvent,
    CacheReset,
)
from drafthouse_server.serving.engine_thread import LoadReport
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.metrics import Statistics
from drafthouse_server.serving.requests import Bound, Range, Violations
from drafthouse_server.tenancy.tenants import LIMITS, Tenant, make_tenant
from drafthouse_server.usage.record import UsageRecord

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from drafthouse_server.tenancy.store import Store

__all__ = ["ADMIN_BOUNDS", "AdminService", "Operated"]

ADMIN_BOUNDS: Mapping[str, Bound] = {
    "tenant": Bound(n_bytes_max=64),
    "limits.models": Bound(1024, 256),
    "reset_fields": Bound(32, 64),
}
"""Bounds of the lists and texts of requests, by their paths."""

_log = logging.getLogger(__name__)

_N_TENANTS_MAX = 1000
_N_STORE_CALLS = 2  # at once; further ones wait
_N_WATCHERS_MAX = 192  # of 256 calls (listening.py)
_INTERVAL = Range(0.01, 60.0)
_INTERVAL_S = 0.1
_TIMEOUT = Range(0.0, 86400.0)
_FRESH_S = 0.005
"""Age up to which what the scheduler told of its load is given out again."""

_KEYS: Mapping[str, str] = {
    "weight": "weight",
    "requests_per_second": "requests_per_s",
    "input_tokens_per_minute": "input_tokens_per_min",
    "output_tokens_per_minute": "output_tokens_per_min",
    "tokens_per_month": "tokens_per_month",
    "max_streams": "max_streams",
    "queue_size": "queue_size",
    "max_prompt_tokens": "max_prompt_tokens",
    "max_output_tokens": "max_output_tokens",
    "models": "models",
    "max_priority": "max_priority",
    "max_draft_tokens": "draft_max",
    "end_user_requests_per_second": "end_user_requests_per_s",
    "end_user_max_streams": "end_user_max_streams",
}
"""Settings of a tenant by the field of TenantLimits."""

_ATTRIBUTES = {limit.key: limit.attribute for limit in LIMITS}


class Operated(Protocol):
    """A server, as far as it is administered."""

    @property
    def loop(self) -> StepLoop:
        """The step loop."""

    @property
    def gate(self) -> Gate:
        """What counts clients' calls."""

    @property
    def broken(self) -> str:
        """What of it does not work; "" where all does."""

    def statistics(self, *, has_tenants: bool = True) -> Statistics:
        """Returns what was counted so far; without what is counted by tenant if told so."""

    def drain(self, timeout_s: float | None = None) -> None:
        """Ends the server when running requests have ended, or their time is over."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Administers one server.

    Args:
        server: Which is administered.
        config: All settings.
    """

    def __init__(self, server: Operated, config: Config) -> None:
        self._server = server
        self._config = config
        self._started_at = time.monotonic()
        self._start_time = time.time()
        self._rates = RecentRates(self._counters())
        self._told = LoadReport()
        self._told_at = float("-inf")
        self._tokens: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._salt = secrets.token_bytes(32)
        self._n_watchers = 0
        self._threads = ThreadPoolExecutor(_N_STORE_CALLS, thread_name_prefix="admin-store")

    def close(self) -> None:
        """Asks the store nothing more; what was begun is done to its end."""
        self._threads.shutdown(wait=False)

    # --- what is counted

    def note_rates(self) -> None:
        """Takes the counters of now, for the rates of later."""
        self._rates.note(self._counters())

    def note_usage(self, record: UsageRecord) -> None:
        """Counts the tokens of a stream that has ended."""
        n_prompt, n_output = self._tokens.pop(record.tenant, (0, 0))
        self._tokens[record.tenant] = n_prompt + record.n_prompt, n_output + record.n_output
        if len(self._tokens) > _N_TENANTS_MAX:
            self._tokens.popitem(last=False)

    def _counters(self) -> Counters:
        found = self._server.statistics(has_tenants=False)
        return Counters(
            time.monotonic(),
            found.n_generated,
            found.n_drafted,
            found.n_accepted,
            found.scheduler.n_planned,
            found.scheduler.n_draft_planned,
        )

    async def _load(self) -> admin_pb2.Load:
        loop = self._server.loop
        if time.monotonic() - self._told_at > _FRESH_S:
            # Where the engine does not answer, what it told last is the newest that there is.
            self._told = await loop.load() or self._told
            self._told_at = time.monotonic()
        admission, limits = loop.admission, loop.engine.limits
        state = admin_pb2.SERVER_STATE_SERVING
        if loop.is_draining:
            state = admin_pb2.SERVER_STATE_DRAINING
        elif self._server.broken:
            state = admin_pb2.SERVER_STATE_UNHEALTHY
        elif loop.metrics.usage.is_failing and self._config.usage_on_full == "refuse":
            state = admin_pb2.SERVER_STATE_USAGE_UNAVAILABLE
        return admin_pb2.Load(
            state=state,
            running_requests=admission.n_running,
            waiting_requests=admission.n_waiting,
            free_slots=max(0, limits.n_seq_max - admission.n_running),
            free_kv_cells=max(0, limits.n_ctx - self._told.n_cells_running),
            prefill_backlog_tokens=self._told.n_backlog,
        )

    # --- methods

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Context
    ) -> admin_pb2.GetStatusResponse:
        """Returns how the server does."""
        self.note_rates()
        found = self._server.statistics(has_tenants=False)
        loop, rates = self._server.loop, self._rates
        backend = found.backends.get("store")
        store = admin_pb2.STORE_STATE_NONE
        if backend is not None:
            store = admin_pb2.STORE_STATE_UP if backend.is_up else admin_pb2.STORE_STATE_DOWN
        start = Timestamp()
        start.FromNanoseconds(round(self._start_time * 1e9))
        return admin_pb2.GetStatusResponse(
            version=version("drafthouse-server"),
            model=loop.engine.card.name,
            start_time=start,
            uptime=_duration(time.monotonic() - self._started_at),
            load=await self._load(),
            slots=loop.engine.limits.n_seq_max,
            kv_cells=loop.engine.limits.n_ctx,
            tokens_per_second=rates.tokens_per_s,
            acceptance_rate=rates.acceptance_rate,
            draft_tokens_per_step=rates.mean_n_draft,
            prefix_cache=admin_pb2.PrefixCacheStatus(
                lookup_tokens=found.scheduler.n_prefix_tokens,
                reused_tokens=found.scheduler.n_reused,
                retained_slots=found.scheduler.n_retained,
                host_bytes=found.scheduler.n_prefix_bytes,
            ),
            store=store,
            usage_journal_failing=found.usage.is_failing,
        )

    async def ListTenants(
        self, request: admin_pb2.ListTenantsRequest, context: Context
    ) -> admin_pb2.ListTenantsResponse:
        """Lists the tenants that have called of late."""
        calls, loop = self._server.gate.calls, self._server.loop
        tenants = dict(sorted(calls.tenants.items()))
        told = await loop.load(tenants)
        listed = []
        for name, tenant in tenants.items():
            load = loop.admission.load(name)
            n_prompt, n_output = self._tokens.get(name, (0, 0))
            listed.append(
                admin_pb2.TenantLoad(
                    tenant=name,
                    running_requests=load.n_active - load.n_waiting,
                    waiting_requests=load.n_waiting,
                    open_calls=calls.n_of(name),
                    prompt_tokens=n_prompt,
                    output_tokens=n_output,
                    virtual_counter=told.service[name] if told else None,
                    limits=_in_force(tenant),
                )
            )
        return admin_pb2.ListTenantsResponse(tenants=listed)

    async def GetLimits(
        self, request: admin_pb2.GetLimitsRequest, context: Context
    ) -> admin_pb2.GetLimitsResponse:
        """Returns the limits of a tenant that the store has."""
        current_act().target = f"tenant:{request.tenant}"
        found = await self._on_store(context, lambda store: _read_limits(store, request.tenant))
        return admin_pb2.GetLimitsResponse(limits=_stored(found))

    async def SetLimits(
        self, request: admin_pb2.SetLimitsRequest, context: Context
    ) -> admin_pb2.SetLimitsResponse:
        """Changes limits of a tenant in the store."""
        act, tenant = current_act(), request.tenant
        act.target = f"tenant:{tenant}"
        values = _changes(request)
        act.detail["limits"] = values

        def change(store: Store) -> Mapping[str, object]:
            from drafthouse_server.tenancy import records  # noqa: PLC0415  # see _on_store

            with store.writing() as connection:
                by = records.Change(f"admin:{act.actor}", int(time.time()))
                try:
                    records.set_limits(connection, tenant, values, by)
                except StoreRefusal:
                    raise TenantNotFound(tenant) from None
                return _limits_of(connection, tenant)

        found = await self._on_store(context, change)
        return admin_pb2.SetLimitsResponse(limits=_stored(found))

    async def _on_store(
        self, context: Context, work: Callable[[Store], Mapping[str, object]]
    ) -> Mapping[str, object]:
        """Works on the store, on a thread of its own: a store that hangs takes no other.

        Raises:
            StoreUnavailable: it does not answer (STORE_UNAVAILABLE).
        """
        if not self._config.store:
            await _abort_without_store(context)

        def run() -> Mapping[str, object]:
            # SQLAlchemy takes a third of a second to import, and many servers have no store.
            from drafthouse_server.tenancy.store import Store  # noqa: PLC0415  # see above

            with contextlib.closing(Store.open(self._config.store, may_make=False)) as store:
                return work(store)

        asked = self._threads.submit(run)
        working = asyncio.wrap_future(asked)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # The client has left. What was begun is done all the same, what waits for a thread is
            # not: done later, it could undo what was asked for since. The trail says which.
            is_done = False
            if not asked.cancel():
                await asyncio.wait({working})
                is_done = working.exception() is None
            current_act().detail["is_done"] = is_done
            raise
        except StoreError as error:
            _log.warning("%s", error)
            # Such as one that is read-only: it answers, and there is nothing to wait for.
            raise StoreUnavailable(self._config.retry_after_s, str(error)) from error

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        """Ends the server when running requests have ended, or their time is over."""
        timeout_s = _seconds(request, "timeout", _TIMEOUT)
        if timeout_s is not None:
            current_act().detail["timeout_s"] = timeout_s
        load = await self._load()
        load.state = admin_pb2.SERVER_STATE_DRAINING
        self._server.drain(timeout_s)
        return admin_pb2.DrainResponse(load=load)

    async def WatchLoad(  # type: ignore[override]  # a coroutine that writes, see interceptors.wrapped
        self, request: admin_pb2.WatchLoadRequest, context: Context
    ) -> None:
        """Writes the load, and again when it has changed: the newest one, however late."""
        interval_s = _seconds(request, "interval", _INTERVAL) or _INTERVAL_S
        told: admin_pb2.Load | None = None
        with self._watching():
            while True:
                load = await self._load()
                if load != told:
                    told = load
                    await self._write(admin_pb2.WatchLoadResponse(load=load), context)
                await asyncio.sleep(interval_s)

    async def WatchCache(  # type: ignore[override]  # as WatchLoad
        self, request: admin_pb2.WatchCacheRequest, context: Context
    ) -> None:
        """Writes which blocks of prompts are computed, and what changes."""
        reset = admin_pb2.CacheReset(block_tokens=BLOCK_SIZE)
        if request.tenant:
            current_act().target = f"tenant:{request.tenant}"
        with self._watching():
            await self._write(admin_pb2.WatchCacheResponse(reset=reset), context)
            async with self._server.loop.feeds.open() as feed:
                async for event in feed:
                    message = self._change(event, request.tenant)
                    if message is not None:
                        await self._write(message, context)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Counts a watcher: they must leave places to those who administer.

        Raises:
            ServerOverloaded: there are enough.
        """
        if self._n_watchers >= _N_WATCHERS_MAX:
            raise ServerOverloaded("calls watch", self._config.retry_after_s)
        self._n_watchers += 1
        try:
            yield
        finally:
            self._n_watchers -= 1

    async def _write(
        self,
        message: admin_pb2.WatchLoadResponse | admin_pb2.WatchCacheResponse,
        context: Context,
    ) -> None:
        """Writes a message, which its client must take in time."""
        await current_act().begin()
        call = current_call()
        call.await_reader(time.monotonic())
        await context.write(message)
        call.go_on()

    def _change(self, event: CacheEvent, wanted: str) -> admin_pb2.WatchCacheResponse | None:
        """Returns what a watcher is told of an event; None of another tenant's."""
        if isinstance(event, CacheReset):
            reset = admin_pb2.CacheReset(block_tokens=BLOCK_SIZE)
            return admin_pb2.WatchCacheResponse(reset=reset)
        tenant, _, end_user = event.tenant.partition("\0")
        if wanted not in ("", tenant):
            return None
        salt = hashlib.blake2b(tenant.encode(), digest_size=16, key=self._salt).digest()
        hashes = [_salted(block_hash, salt) for block_hash in event.hashes]
        if isinstance(event, BlocksStored):
            stored = admin_pb2.CacheBlocksStored(
                tenant=tenant,
                end_user=end_user,
                salt=salt,
                parent_hash=None if event.parent is None else _salted(event.parent, salt),
                hashes=hashes,
            )
            return admin_pb2.WatchCacheResponse(stored=stored)
        removed = admin_pb2.CacheBlocksRemoved(tenant=tenant, end_user=end_user, hashes=hashes)
        return admin_pb2.WatchCacheResponse(removed=removed)


def _salted(block_hash: int, salt: bytes) -> int:
    digest = hashlib.blake2b(block_hash.to_bytes(8, "big"), digest_size=8, key=salt)
    return int.from_bytes(digest.digest(), "big")


async def _abort_without_store(context: Context) -> Never:
    await context.abort(
        grpc.StatusCode.UNIMPLEMENTED,
        "this server has no store of tenants; set `store`, or change the settings file and restart",
    )


def _read_limits(store: Store, tenant: str) -> Mapping[str, object]:
    with store.reading() as connection:
        return _limits_of(connection, tenant)


def _limits_of(connection: Connection, tenant: str) -> Mapping[str, object]:
    """Returns the limits of a tenant in the store, by the names of settings.

    Raises:
        TenantNotFound: there is no such tenant (TENANT_NOT_FOUND).
    """
    from drafthouse_server.tenancy import records  # noqa: PLC0415  # see _on_store

    found = records.list_tenants(connection, [tenant])
    if not found:
        raise TenantNotFound(tenant)
    return found[0].limits


def _stored(values: Mapping[str, object]) -> admin_pb2.TenantLimits:
    """Returns the message of limits that are not the default, by the names of settings."""
    message = admin_pb2.TenantLimits()
    for field, key in _KEYS.items():
        value: Any = values.get(key)
        if isinstance(value, list | tuple | frozenset):
            getattr(message, field).extend(sorted(value))
        elif value is not None:
            setattr(message, field, value)
    return message


def _in_force(tenant: Tenant) -> admin_pb2.TenantLimits:
    return _stored({key: getattr(tenant, _ATTRIBUTES[key]) for key in _KEYS.values()})


def _changes(request: admin_pb2.SetLimitsRequest) -> dict[str, object]:
    """Returns the limits that a request changes, by the names of settings; None: the default.

    Raises:
        InvalidRequest: one or more break their rule, or there are none (INVALID_FIELD).
    """
    violations = Violations()
    if not request.tenant:
        violations.refuse("tenant", "must be the name of a tenant")
    values: dict[str, object] = {}
    for descriptor, value in request.limits.ListFields():
        key = _KEYS[descriptor.name]
        values[key] = list(value) if descriptor.is_repeated else value
        try:
            make_tenant(request.tenant, {key: values[key]}, n_waiting_max=1)
        except ConfigError as error:
            violations.refuse(f"limits.{descriptor.name}", f"must be {error.expected}")
    for i, name in enumerate(request.limits.models):
        if not name:
            violations.refuse(f"limits.models[{i}]", "must not be empty")
    for field in dict.fromkeys(request.reset_fields):
        if field not in _KEYS:
            violations.refuse("reset_fields", "must hold names of fields of TenantLimits")
        elif _KEYS[field] in values:
            violations.refuse("reset_fields", f"must not hold {field}, which is set")
        else:
            values[_KEYS[field]] = None
    if not (request.limits.ListFields() or request.reset_fields):
        violations.refuse("limits", "must set a limit, or reset_fields must name one")
    violations.close()
    return values


def _seconds(
    request: admin_pb2.DrainRequest | admin_pb2.WatchLoadRequest, field: str, rule: Range
) -> float | None:
    """Returns a duration of a request, in seconds; None where it is not set.

    Raises:
        InvalidRequest: it breaks its rule (INVALID_FIELD).
    """
    if not request.HasField(field):  # type: ignore[arg-type]  # of either message
        return None
    found: Duration = getattr(request, field)
    seconds = found.seconds + found.nanos / 1e9
    if seconds not in rule:
        raise InvalidRequest([FieldViolation(field, f"must be {rule} seconds, is {seconds:.12g}")])
    return seconds


def _duration(seconds: float) -> Duration:
    found = Duration()
    found.FromNanoseconds(round(max(0.0, seconds) * 1e9))
    return found
