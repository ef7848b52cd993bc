"""How gRPC servers listen: where, with which bounds, and how calls are taken up.

And the listener of AdminService, whole.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # untyped

from drafthouse.v1 import admin_pb2, admin_pb2_grpc
from drafthouse_server.access import bare_host, is_loopback
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError
from drafthouse_server.operations.audit import AuditTrail, note_renewal
from drafthouse_server.operations.calls import FrontMemory, OpenCalls
from drafthouse_server.operations.descriptors import DescriptorBudget
from drafthouse_server.operations.intake import Intake
from drafthouse_server.rpc.admin import ADMIN_BOUNDS, AdminService, Operated
from drafthouse_server.rpc.gate import Gate, Receive, StreamResets
from drafthouse_server.rpc.interceptors import Administer, Observe, TranslateErrors
from drafthouse_server.rpc.tls import Certificates, admin_certificates
from drafthouse_server.rpc.wire import shapes_of

__all__ = [
    "Acceptor",
    "AdminListener",
    "address",
    "bind",
    "channel_options",
    "has_reflection",
    "open_calls",
]

_log = logging.getLogger(__name__)

_N_SPARE_CALLS, _N_SPARE_TENANT_CALLS = 256, 128
"""Calls beyond slots and queue: the queue's limit shall be met first, and other methods work."""

_N_PROBES = 64
"""Health checks at once, beside those that watch."""

_MESSAGE_BYTES = 4 << 20
_METADATA_SHARE = 2  # what is refused at random, by size, and what always: grpc's own ratio
_MAX_RESPONSE_BYTES = 64 << 20  # Tokenize answers with several bytes per byte
_MIN_PING_INTERVAL_S = 5.0  # the libraries for Go and Java ping every 10 s at most; one may be late

_N_ACCEPTS = 16
"""Calls of each method that are asked for at once, besides grpc.aio's own one."""

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_N_ADMIN_CALLS = 256
"""Calls of AdminService that may be open at once, watchers among them."""
_N_ADMIN_STREAMS = 64
_FAREWELL_S = 0.2
_RATES_S = 1.0


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    certificates: Certificates | None,
    prefix: str = "",
) -> int:
    """Lets a server listen at an address, and returns the port.

    Args:
        server: It has not started.
        host: Address to listen at, or unix:PATH.
        port: Port; 0 is any that is free.
        certificates: For TLS; None is plain text.
        prefix: Of the names of the settings that say so.

    Raises:
        ConfigError: it cannot.
    """
    place = address(host, port)
    try:
        if certificates is None:
            return server.add_insecure_port(place)
        return server.add_secure_port(place, certificates.credentials())
    except RuntimeError:
        if host.startswith("unix:"):
            expected = "a path at which we may listen, of 107 bytes at most"
            raise ConfigError(f"{prefix}host", host, expected) from None
        expected = f"a port of {host} that is free and that we may listen at"
        raise ConfigError(f"{prefix}port", port, expected) from None


def address(host: str, port: int) -> str:
    """Returns an address as clients name it: "host:port", or unix:PATH."""
    if host.startswith("unix:"):
        return host
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_calls(config: Config) -> OpenCalls:
    """Returns the count of open calls, with the bounds of the settings."""
    n_max = config.max_calls or config.parallel + config.queue_size + _N_SPARE_CALLS
    n_tenant_max = config.tenant_max_calls or (
        config.parallel + config.tenant_queue_size + _N_SPARE_TENANT_CALLS
    )
    n_keyless_max = config.max_health_watchers + _N_PROBES
    memory = FrontMemory(config.front_mib << 20, config.outbox_kib << 10, config.retry_after_s)
    intake = Intake(config.tenant_read_mib_per_s << 20)
    return OpenCalls(
        n_max, n_tenant_max, n_keyless_max, config.retry_after_s, memory, intake=intake
    )


def has_reflection(config: Config) -> bool:
    """Returns whether clients without a key are told which services there are."""
    if config.reflection == "auto":
        return is_loopback(config.host)
    return config.reflection == "on"


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def channel_options(
    config: Config, n_bytes_max: int, n_connections: int
) -> Sequence[tuple[str, int]]:
    """Returns the channel arguments; names as in grpc's `channel_arg_names.h`.

    Args:
        config: All settings.
        n_bytes_max: Bytes of the longest request of any method.
        n_connections: Connections that may be open where the settings do not say.
    """
    n_streams = config.max_concurrent_streams or max(config.parallel, config.tenant_queue_size)
    n_message_bytes = config.max_message_bytes or max(_MESSAGE_BYTES, n_bytes_max)
    ages = (config.max_connection_idle_s, config.max_connection_age_s)
    idle_ms, age_ms = map(_milliseconds, ages)
    return (
        ("grpc.max_receive_message_length", n_message_bytes),
        ("grpc.max_send_message_length", _MAX_RESPONSE_BYTES),
        ("grpc.max_concurrent_streams", n_streams),
        ("grpc.http.overload_protection", 0),  # it counts calls that are over, until we free them
        ("grpc.max_allowed_incoming_connections", config.max_connections or n_connections),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_connection_age_grace_ms", _milliseconds(config.max_connection_age_grace_s)),
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", _METADATA_SHARE * config.max_metadata_bytes),
        *_ping_options(config),
        ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake: say so
    )


def _ping_options(config: Config) -> Sequence[tuple[str, int]]:
    """Returns when clients are pinged, and how often they may ping.

    gRPC's own bounds, two pings in five minutes without a message and in two hours without a call,
    would end a client's watch in which nothing changes, and its connection between two calls.
    """
    return (
        ("grpc.keepalive_time_ms", _milliseconds(config.keepalive_time_s)),
        ("grpc.keepalive_timeout_ms", _milliseconds(config.keepalive_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(_MIN_PING_INTERVAL_S)),
        ("grpc.keepalive_permit_without_calls", 1),
    )


class Acceptor:
    """Takes up calls as they come. It stands for the server where services are added to it.

    grpc.aio asks its core for one call of a method, and for the next one some turns of the event
    loop later. When the loop is busy, a call waits that long for each of those that came before it,
    whosever they are: twenty milliseconds behind sixteen. So more are asked for beside that one.
    grpc.aio has no public names for what this takes; with a version that has other ones, calls are
    taken up by grpc.aio alone, which the log says.

    Args:
        server: It has not started.
        interceptors: The server's own.
    """

    def __init__(
        self, server: grpc.aio.Server, interceptors: Sequence[grpc.aio.ServerInterceptor]
    ) -> None:
        self._server = server
        self._interceptors = tuple(interceptors)
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Adds the handlers of a service, as `grpc.aio.Server` does."""
        self._handlers += handlers
        self._server.add_generic_rpc_handlers(tuple(handlers))

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Adds methods that the core knows by name, as `grpc.aio.Server` does."""
        self._methods += [f"/{service}/{method}" for method in handlers]
        server: Any = self._server  # its types do not have it
        server.add_registered_method_handlers(service, handlers)

    def open(self) -> bool:
        """Asks for calls until the server stops. Returns whether it can; the server has started."""
        core: Any = getattr(self._server, "_server", None)
        if not _is_known(core):
            _log.warning("gRPC %s takes up one call at a time", grpc.__version__)
            return False
        resolver = cygrpc._MethodResolver(self._handlers, {})
        for method in self._methods:
            for _ in range(_N_ACCEPTS):
                self._begin(self._accept(core, resolver, method))
        return True

    async def _accept(self, core: Any, resolver: object, method: str) -> None:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        while True:
            try:
                state = await core._request_registered_call(method.encode())
            except cygrpc._RequestCallError:
                if core.is_running():
                    continue
                return  # the server stops
            call = cygrpc._handle_rpc(method, resolver, self._interceptors, state, loop, False)
            self._begin(cygrpc._schedule_rpc_coro(call, state, loop, method))
            del call, state  # a stream is reset once nobody holds it

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # or nobody would hold it
        task.add_done_callback(self._tasks.discard)


_KNOWN = {
    "_handle_rpc": (
        "method_name", "method_resolver", "interceptors", "rpc_state", "loop",
        "concurrency_exceeded",
    ),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}  # fmt: skip
"""What `Acceptor` takes of grpc.aio, and its arguments."""


def _is_known(core: object) -> bool:
    """Returns whether this version of gRPC takes up calls as `Acceptor` does."""
    has_names = hasattr(cygrpc, "_MethodResolver") and hasattr(cygrpc, "_RequestCallError")
    return (
        has_names
        and hasattr(core, "_request_registered_call")
        and all(_arguments(name) == arguments for name, arguments in _KNOWN.items())
    )


def _arguments(name: str) -> tuple[str, ...]:
    code = getattr(getattr(cygrpc, name, None), "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


class AdminListener:
    """Listens for operators and routers until it is closed.

    Args:
        server: Which is administered.
        config: All settings.
        trail: Is told of every call.
    """

    def __init__(self, server: Operated, config: Config, trail: AuditTrail) -> None:
        self._config = config
        self._trail = trail
        self._administer = Administer(trail, lambda: self._port)
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._port = 0
        self.service = AdminService(server, config)
        """What answers."""

    async def open(self) -> None:
        """Listens.

        Raises:
            ConfigError: the address cannot be listened at, or a file cannot be used.
        """
        config = self._config
        calls, resets = (
            OpenCalls(_N_ADMIN_CALLS, 2 * _N_ADMIN_CALLS, 0, config.retry_after_s),  # of no tenants
            StreamResets(),
        )
        resets.install(asyncio.get_running_loop())
        gate = Gate(
            calls,
            DescriptorBudget(0),
            retry_after_s=config.retry_after_s,
            first_message_s=config.first_message_timeout_s,
            slow_reader_s=config.slow_reader_timeout_s,
            resets=resets,
        )
        shapes = shapes_of((_ADMIN,), ADMIN_BOUNDS)
        server = grpc.aio.server(
            interceptors=(
                Observe(),
                TranslateErrors(),
                gate,
                self._administer,
                Receive(shapes, calls),
            ),
            options=(
                ("grpc.max_receive_message_length", 1 << 20),
                ("grpc.max_concurrent_streams", _N_ADMIN_STREAMS),
                *_ping_options(config),
                ("grpc.so_reuseport", 0),
            ),
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.service, server)
        certificates = self._certificates()
        self._port = bind(server, config.admin_host, config.admin_port, certificates, "admin_")
        await server.start()
        self._server = server
        self._tasks = [asyncio.create_task(self._note_rates())]
        if certificates is not None:
            self._tasks.append(asyncio.create_task(certificates.watch()))

    def _certificates(self) -> Certificates | None:
        """Returns those that the listener shows and asks for; None without administrators' own."""
        found = admin_certificates(self._config)
        if found is not None:
            found.on_renewal = functools.partial(note_renewal, self._trail)
        return found

    async def _note_rates(self) -> None:
        while True:
            await asyncio.sleep(_RATES_S)
            self.service.note_rates()

    async def close(self) -> None:
        """Ends its calls and listens no more. Harmless when done twice."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(_FAREWELL_S)
        self.service.close()
        self._administer.close()
