"""The composition root: puts the parts together, listens, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from drafthouse.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from drafthouse_server.config import Config, bare_host
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import ConfigError, ServerFailed
from drafthouse_server.rpc.interceptors import Authenticate, Observe, TranslateErrors, current_call
from drafthouse_server.rpc.services import GenerationService, ModelService, Served
from drafthouse_server.serving.exposition import MetricsEndpoint
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.tenancy.tenants import TenantRegistry

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_grpc_log = logging.getLogger("grpc._cython.cygrpc")

_FLUSH_S = 5.0
"""Seconds that handlers have to write their last messages when all generations have ended."""

_FORCED_FLUSH_S = 0.2

_LINGER_S = 0.2
"""Seconds for which calls that were on their way when the last generation ended are answered."""

_N_SPARE_STREAMS = 128
"""Streams of one connection beyond slots and queue: the queue's limit shall be met first."""

_MAX_RESPONSE_BYTES = 64 << 20  # Tokenize answers with several bytes per byte
_MIN_PING_INTERVAL_S = 10.0

_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
_HEALTH_NAMES = (health.OVERALL_HEALTH, *_SERVICES)


def _is_fault(record: logging.LogRecord) -> bool:
    """Returns whether a line of gRPC's log tells of a fault.

    gRPC itself sends the answer of a call without a stream, after the handler has returned. That
    the client was gone by then is logged as an error there, with its trace, and is none.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


class Server:
    """A server and its life: `serve` is `startup`, wait, `shutdown`.

    Args:
        config: All settings.
        make_engine: Loads the model; runs on the engine thread.
        tenants: Knows the keys; those of `config.api_keys` when not given.
    """

    def __init__(
        self,
        config: Config,
        make_engine: Callable[[], Engine],
        *,
        tenants: TenantRegistry | None = None,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._tenants = tenants or TenantRegistry.from_config(config)
        self._health = health.aio.HealthServicer()
        self._health_changes: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._failure: BaseException | None = None
        self._loop: StepLoop | None = None
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsEndpoint | None = None
        self._port = 0

    @property
    def loop(self) -> StepLoop:
        """The step loop; there is one from `startup` on."""
        assert self._loop is not None, "the server has not started"
        return self._loop

    @property
    def port(self) -> int:
        """Where it listens; 0 before `startup`."""
        return self._port

    @property
    def target(self) -> str:
        """Address for clients, "host:port"."""
        return _address(self._config.host, self._port)

    async def serve(self, on_ready: Callable[[Server], None] | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then lets requests finish; a second one ends them.

        Args:
            on_ready: Called when the server listens.

        Raises:
            StartupError: it cannot start.
            ServerFailed: the step loop has failed; every stream was told.
        """
        await self.startup()
        try:
            with self._signals():
                if on_ready is not None:
                    on_ready(self)
                await self._stop.wait()
                await self.shutdown()
        finally:
            try:
                await self.close()
            finally:
                # Whatever else fails on the way: this came first.
                if self._failure is not None:
                    raise ServerFailed(
                        "the step loop failed and the server has ended, see the log above;"
                        " start it again, and report the trace"
                    ) from self._failure

    def stop(self) -> None:
        """Makes `serve` end; at the second call without waiting for running requests."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Lets signals stop the server, for the time of a block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        _log.info("%s: %s", number.name, "ending now" if self._stop.is_set() else "draining")
        self.stop()

    async def startup(self) -> None:
        """Loads the model and listens.

        Raises:
            StartupError: a model cannot be loaded, or the address cannot be listened at.
        """
        _grpc_log.addFilter(_is_fault)
        self._loop = await StepLoop.open(
            self._make_engine,
            self._config,
            on_health=self._on_health,
            on_failure=self._on_failure,
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self._listen(self._loop)
            if self._config.metrics_port:
                self._metrics = MetricsEndpoint(self._loop.statistics)
                await self._metrics.open(self._config.host, self._config.metrics_port)
            undo.pop_all()
        _log.info("listening at %s", self.target)

    async def _listen(self, loop: StepLoop) -> None:
        config = self._config
        server = grpc.aio.server(
            interceptors=(Observe(), TranslateErrors(), Authenticate(self._tenants)),
            options=_options(config),
        )
        served = Served(
            loop,
            # Of an adaptive policy: the most that it will draft.
            n_draft_default=config.draft_default
            if config.draft_policy == "fixed"
            else config.draft_max,
            current_call=current_call,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(served), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(served), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self._port = _bind(server, config)
        await self._set_health(True)
        await server.start()
        self._server = server

    def _on_health(self, is_healthy: bool) -> None:
        """Takes the loop's word for its health; watchers are told in a task of its own."""
        change = asyncio.get_running_loop().create_task(self._set_health(is_healthy))
        self._health_changes.add(change)
        change.add_done_callback(self._health_changes.discard)

    def _on_failure(self, error: BaseException) -> None:
        """Ends the server: without its loop it would refuse everything for ever."""
        self._failure = error
        self.stop()

    async def _set_health(self, is_healthy: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if is_healthy else statuses.NOT_SERVING
        for name in _HEALTH_NAMES:
            await self._health.set(name, status)

    async def shutdown(self) -> None:
        """Lets running requests finish, within `drain_timeout_s`, and ends the server.

        In order: health says NOT_SERVING; new calls are refused; generations finish, or are ended
        when their time is over or `stop` was called twice; calls that are on their way are refused
        too; last messages are written; the port closes; the engine closes.
        """
        await self._health.enter_graceful_shutdown()
        n_ended = await self._drain()
        if n_ended:
            _log.warning("%d requests were ended early", n_ended)
        # gRPC would cancel a call whose handler has not begun: clients do not try that again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._force.wait(), _LINGER_S)
        if self._server is not None:
            await self._server.stop(_FORCED_FLUSH_S if self._force.is_set() else _FLUSH_S)
        await self.close()

    async def _drain(self) -> int:
        """Returns how many requests were ended early."""
        drain = asyncio.ensure_future(self.loop.drain(self._config.drain_timeout_s))
        force = asyncio.ensure_future(self._force.wait())
        await asyncio.wait((drain, force), return_when=asyncio.FIRST_COMPLETED)
        force.cancel()
        if not drain.done():
            drain.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drain
            return await self.loop.drain(0.0)
        return await drain

    async def close(self) -> None:
        """Ends everything now. Harmless when done twice."""
        if self._metrics is not None:
            self._metrics.close()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        if self._loop is not None:
            await self._loop.close()


def _bind(server: grpc.aio.Server, config: Config) -> int:
    try:
        return server.add_insecure_port(_address(config.host, config.port))
    except RuntimeError:
        if config.host.startswith("unix:"):
            expected = "a path at which we may listen, of 107 bytes at most"
            raise ConfigError("host", config.host, expected) from None
        expected = f"a port of {config.host} that is free and that we may listen at"
        raise ConfigError("port", config.port, expected) from None


def _address(host: str, port: int) -> str:
    if host.startswith("unix:"):
        return host
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(config: Config) -> Sequence[tuple[str, int]]:
    """Returns the channel arguments; names as in grpc's `channel_arg_names.h`."""
    n_streams = config.parallel + config.queue_size + _N_SPARE_STREAMS
    return (
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", _MAX_RESPONSE_BYTES),
        ("grpc.max_concurrent_streams", n_streams),
        ("grpc.keepalive_time_ms", int(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(_MIN_PING_INTERVAL_S * 1000)),
        ("grpc.so_reuseport", 0),  # a second server on the same port is a mistake: say so
    )
