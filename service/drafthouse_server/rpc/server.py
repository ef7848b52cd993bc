"""The composition root: puts the parts together, listens, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from drafthouse.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)
from drafthouse_server.config import Config
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.errors import ConfigError, EngineLost, ServerFailed
from drafthouse_server.operations.audit import AuditTrail, note_renewal
from drafthouse_server.operations.descriptors import DescriptorBudget, raise_descriptor_limit
from drafthouse_server.operations.threads import N_GRPC, require_threads
from drafthouse_server.rpc.gate import Gate, Receive, StreamResets, count_front
from drafthouse_server.rpc.health import OVERALL, HealthService
from drafthouse_server.rpc.interceptors import Authenticate, Observe, TranslateErrors, current_call
from drafthouse_server.rpc.listening import (
    Acceptor,
    AdminListener,
    address,
    bind,
    channel_options,
    has_reflection,
    open_calls,
)
from drafthouse_server.rpc.services import GenerationService, ModelService, ServiceContext
from drafthouse_server.rpc.tls import Certificates
from drafthouse_server.rpc.usage import UsageService
from drafthouse_server.rpc.wire import shapes_of
from drafthouse_server.serving.accounting import Accounting
from drafthouse_server.serving.exposition import MetricsEndpoint
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.metrics import Statistics
from drafthouse_server.serving.requests import field_bounds
from drafthouse_server.serving.text_workers import TextWorkers
from drafthouse_server.tenancy.backends import Backends
from drafthouse_server.tenancy.identity import Tenants

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_grpc_log = logging.getLogger("grpc._cython.cygrpc")

_FLUSH_S = 5.0
"""Seconds that handlers have to write their last messages when all generations have ended."""

_FORCED_FLUSH_S = 0.2

_LINGER_S = 0.2
"""Seconds for which calls that are on their way when a drain begins are told to come again.

gRPC says GOAWAY and cancels, in one, what has no handler yet (of 100 calls that were sent right
before, 99); clients do not try that again.
"""

_STEP_S = 10.0
"""Seconds that the step in flight may take to end when its sequences are to be ended."""

_CLOSE_S = 10.0
"""Seconds that gRPC may take to release calls that were cancelled."""

_RELEASE_S = 10.0
"""Seconds that a part of a server may take to end: one that hangs keeps none of the others.

Few, since what runs a server ends it by force soon after its drain (deploy/: 60 s in all).
"""

_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
_USAGE_SERVICE = usage_pb2.DESCRIPTOR.services_by_name["UsageService"]
_HEALTH_SERVICE: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _is_fault(record: logging.LogRecord) -> bool:
    """Returns whether a line of gRPC's log tells of a fault.

    gRPC itself sends the answer of a call without a stream, after the handler has returned. That
    the client was gone by then is logged as an error there, with its trace, and is none.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"


@contextlib.contextmanager
def _on_signals(act: Callable[[signal.Signals, int], None]) -> Iterator[None]:
    """Lets signals that stop a server call something, with their number, for the time of a block.

    Args:
        act: Called with the signal, and how many have come by then.
    """
    loop, counts = asyncio.get_running_loop(), itertools.count(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda number: act(number, next(counts)), number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _failed(part: str, error: BaseException | None = None) -> ServerFailed:
    failure = ServerFailed(
        f"the {part} failed and the server has ended, see the log above; start it again, and"
        " report the trace"
    )
    failure.__cause__ = error
    return failure


class _Outage:
    """The time in which a server does not work.

    Args:
        limit_s: Seconds after which that is too long; 0: never.
        on_limit: Called then.
    """

    def __init__(self, limit_s: float, on_limit: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_limit = on_limit
        self._timer: asyncio.TimerHandle | None = None

    def note(self, *, is_broken: bool) -> None:
        """Notes whether it works. What breaks besides gets no time of its own."""
        if self._timer is not None and not is_broken:
            self._timer.cancel()
            self._timer = None
        elif self._timer is None and is_broken and self._limit_s:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_s, self._on_limit)


class Server:
    """A server and its life: `serve` is `startup`, wait, `shutdown`.

    Args:
        config: All settings.
        make_engine: Loads the model; runs on the engine thread.
        tenants: Knows the keys; those of the store and of `config.api_keys` when not given.
    """

    def __init__(
        self,
        config: Config,
        make_engine: Callable[[], Engine],
        *,
        tenants: Tenants | None = None,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._tenants = tenants
        self.backends = Backends(config)
        """The store and what else is kept outside."""
        self._health = HealthService(
            (OVERALL, *(service.full_name for service in _services(config))),
            current_call=current_call,
            n_watchers_max=config.max_health_watchers,
            retry_after_s=config.retry_after_s,
        )
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._failure: ServerFailed | None = None
        self._lost = ""
        self._outage = _Outage(config.unhealthy_exit_s, self._on_lost)
        self._loop: StepLoop | None = None
        self._texts: TextWorkers | None = None
        self._server: grpc.aio.Server | None = None
        self._gate: Gate | None = None
        self._receive: Receive | None = None
        self._side = contextlib.AsyncExitStack()  # what listens and watches beside, to be closed
        self._audit = AuditTrail(config.audit_file)
        self._drain_timeout_s = config.drain_timeout_s
        self._accounting: Accounting | None = None
        self._port = 0

    @property
    def loop(self) -> StepLoop:
        """The step loop; there is one from `startup` on."""
        assert self._loop is not None, "the server has not started"
        return self._loop

    @property
    def gate(self) -> Gate:
        """What counts calls; there is one from `startup` on."""
        assert self._gate is not None, "the server has not started"
        return self._gate

    @property
    def receive(self) -> Receive:
        """What reads messages; there is one from `startup` on."""
        assert self._receive is not None, "the server has not started"
        return self._receive

    @property
    def texts(self) -> TextWorkers:
        """The text workers; they are there from `startup` on."""
        assert self._texts is not None, "the server has not started"
        return self._texts

    @property
    def port(self) -> int:
        """Where it listens; 0 before `startup`."""
        return self._port

    @property
    def target(self) -> str:
        """Address for clients, "host:port"."""
        return address(self._config.host, self._port)

    async def serve(self, on_ready: Callable[[Server], None]) -> None:
        """Serves until SIGTERM or SIGINT, then lets requests finish; a second one ends them.

        Args:
            on_ready: Called when the server listens.

        Raises:
            StartupError: it cannot start.
            ServerFailed: the step loop has failed; every stream was told. Or the usage journal has.
            EngineLost: the engine has not worked for `unhealthy_exit_s`, or a step does not end; so
                was every stream.
        """
        await self.startup()
        try:
            with _on_signals(self._on_signal):
                on_ready(self)
                await self._stop.wait()
                await self.shutdown()
        finally:
            try:
                await self.close()
            finally:
                # Whatever else fails on the way: this came first.
                if self._lost:
                    raise EngineLost(
                        f"{self._lost} and the server has ended, see the log above; start it again"
                    )
                if self._failure:
                    raise self._failure

    def stop(self) -> None:
        """Makes `serve` end; at the second call without waiting for running requests."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def drain(self, timeout_s: float | None = None) -> None:
        """Makes `serve` end as `stop` does; done again, it gives running requests another time.

        Args:
            timeout_s: Seconds that running requests may go on from now; None: `drain_timeout_s` at
                first, what it is when the server drains already. A longer time than before changes
                nothing then.
        """
        if not self._stop.is_set():
            if timeout_s is not None:
                self._drain_timeout_s = timeout_s
            self.stop()
        elif timeout_s is not None:
            task = asyncio.create_task(self.loop.drain(timeout_s))
            self._side.callback(task.cancel)

    def _on_signal(self, number: signal.Signals, n_signals: int = 1) -> None:
        _log.info("%s: %s", number.name, "ending now" if n_signals > 1 else "draining")
        # Its disk may hang: neither the streams nor the end wait for it.
        self._audit.note_aside(f"signal:{number.name}", "Drain", "server")
        # The first one after a drain that an operator has begun leaves that its time: whoever
        # supervises the server sends it, too.
        if n_signals > 1 or not self._stop.is_set():
            self.stop()

    async def startup(self) -> None:
        """Loads the model, starts the text workers, and listens.

        Raises:
            StartupError: certificates or a model cannot be loaded, the usage journal or the audit
                trail cannot be written, a text worker cannot start, or the address cannot be
                listened at.
        """
        _grpc_log.addFilter(_is_fault)
        raise_descriptor_limit()
        # First: a model may take minutes.
        if problem := await asyncio.to_thread(self._audit.check):  # its disk may hang
            raise ConfigError("audit_file", self._config.audit_file, problem=problem)
        certificates = Certificates(self._config) if self._config.ssl_cert_file else None
        async with contextlib.AsyncExitStack() as undo:
            journal = await self.backends.open_journal()
            if journal is not None:
                undo.push_async_callback(asyncio.to_thread, journal.close)
            undo.push_async_callback(self.close)
            tenants = self._tenants or await self.backends.open_tenants()
            self._loop = await StepLoop.open(
                self._make_engine,
                self._config,
                on_health=lambda _: self._on_health(),
                on_failure=self._on_failure,
            )
            if self.backends.key_ring is not None:
                self.backends.key_ring.tenants.on_deleted = self._forget_tenant
            self._accounting = Accounting(
                self._loop.metrics,
                self._loop.engine.card.name,
                journal=journal,
                is_open_unbilled=self._config.usage_on_full == "unbilled",
                retry_after_s=self._config.retry_after_s,
                on_change=self._health.note_open,
                on_failure=self._on_journal_failure,
            )
            await self._accounting.restore(self._loop.admission)
            await self.backends.share_rates(self._loop.admission)
            self._texts = texts = TextWorkers(
                self._loop.engine.make_text_worker,
                self._config.text_workers,
                metrics=self._loop.metrics,
                retry_after_s=self._config.retry_after_s,
                charge=self._charge_text,
                on_health=self._on_health,
            )
            await texts.open()
            await self._listen(self._loop, texts, tenants, self._accounting, certificates)
            if certificates is not None:
                certificates.on_renewal = functools.partial(note_renewal, self._audit)
                self._loop.metrics.certificate_expires_at = lambda: certificates.expires_at
                watch = asyncio.create_task(certificates.watch())
                self._side.callback(watch.cancel)
            if self._config.metrics_port:
                metrics = MetricsEndpoint(self.statistics)
                self._side.callback(metrics.close)
                await metrics.open(self._config.metrics_host, self._config.metrics_port)
            if self._config.has_admin:
                admin = AdminListener(self, self._config, self._audit)
                self._side.push_async_callback(admin.close)
                self._accounting.on_end.append(admin.service.note_usage)
                await admin.open()
            undo.pop_all()
        _log.info("listening at %s", self.target)

    def _charge_text(self, tenant: str, cpu_s: float) -> None:
        self.loop.charge(tenant, cpu_s * self._config.text_service_weight)

    def _forget_tenant(self, tenant: str) -> None:
        """Keeps nothing of a tenant that was deleted."""
        self.loop.forget_tenant(tenant)
        if self._gate is not None:
            self._gate.calls.forget(tenant)

    async def _listen(
        self,
        loop: StepLoop,
        texts: TextWorkers,
        tenants: Tenants,
        accounting: Accounting,
        certificates: Certificates | None,
    ) -> None:
        config, limits = self._config, loop.engine.limits
        n_context = min(limits.n_ctx_seq, limits.n_ctx)
        bounds = field_bounds(n_context, config.max_chat_messages)
        services = (*_services(config), _HEALTH_SERVICE)
        shapes = shapes_of(services, bounds)
        calls, resets = open_calls(config), StreamResets()
        resets.install(asyncio.get_running_loop())
        descriptors = DescriptorBudget(config.reserved_descriptors)
        descriptors.require()
        require_threads(N_GRPC)
        self._gate = Gate(
            calls,
            descriptors,
            retry_after_s=config.retry_after_s,
            first_message_s=config.first_message_timeout_s,
            slow_reader_s=config.slow_reader_timeout_s,
            resets=resets,
        )
        if self.backends.key_ring is not None:
            self.backends.key_ring.tenants.on_read = calls.renew
        self._receive = Receive(shapes, calls)
        interceptors = (
            Observe(),
            TranslateErrors(),
            self._gate,
            Authenticate(
                tenants,
                is_health_open=config.open_health,
                has_certificates=bool(config.ssl_client_ca_file),
                on_refused=calls.note_refused,
            ),
            self._receive,
        )
        server = grpc.aio.server(
            interceptors=interceptors,
            options=channel_options(
                config,
                max(shape.n_bytes_max for shape in shapes.values()),
                descriptors.n_connections(),
            ),
        )
        acceptor = Acceptor(server, interceptors)
        services_of: Any = acceptor  # what the stubs take for a server
        shared = ServiceContext(
            loop,
            texts,
            # Of an adaptive policy: the most that it will draft.
            n_draft_default=config.draft_default
            if config.draft_policy == "fixed"
            else config.draft_max,
            current_call=current_call,
            hold=lambda n_bytes: calls.hold(current_call(), n_bytes),
            n_messages_max=config.max_chat_messages,
            accounting=accounting,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationService(shared), services_of
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(shared), services_of)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services_of)
        if accounting.journal is not None:
            shipper = accounting.journal.shipper
            usage = UsageService(shared, shipper, retry_after_s=config.retry_after_s)
            self._side.callback(usage.close)
            usage_pb2_grpc.add_UsageServiceServicer_to_server(usage, services_of)
        if has_reflection(config):
            names = [service.full_name for service in services]
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        self._port = bind(server, config.host, config.port, certificates)
        self._health.set(is_serving=True)
        await server.start()
        acceptor.open()
        self._server = server

    def _on_health(self) -> None:
        """Takes the word of loop and text workers. What stays broken is for a new process."""
        self._health.set(is_serving=not self.broken)
        self._outage.note(is_broken=bool(self.broken))

    @property
    def broken(self) -> str:
        """What of the server does not work, as the beginning of a sentence; "" where all does."""
        return _broken(self._loop, self._texts)

    def _on_lost(self) -> None:
        self._lost = f"{self.broken} for {self._config.unhealthy_exit_s:g} seconds"
        _log.critical("%s: ending", self._lost)
        self.stop()

    def _on_failure(self, error: BaseException) -> None:
        """Ends the server: without its loop it would refuse everything for ever."""
        self._failure = _failed("step loop", error)
        self.stop()

    def _on_journal_failure(self) -> None:
        """Ends the server, which takes no stream any more; those that run have their time."""
        self._failure = self._failure or _failed("usage journal")
        self.drain()

    async def shutdown(self) -> None:
        """Lets running requests finish, within its time, and ends the server.

        In order, each within a time of its own, which a second `stop` ends: health says
        NOT_SERVING, new calls are refused, and so are those that wait and have no slot to come;
        connections are told to go away and the port closes; generations finish, or are ended; last
        messages are written; the engine closes.
        """
        self._health.end()
        if self.loop.is_hung:
            self._abandon()
        drain = asyncio.create_task(self._drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._force.wait()
        farewell = asyncio.create_task(self._say_goodbye())
        n_ended = await drain
        if n_ended:
            _log.warning("%d requests were ended early", n_ended)
        force = asyncio.create_task(self._force.wait())
        await asyncio.wait((farewell, force), timeout=_FLUSH_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (farewell, force):
            task.cancel()
        await asyncio.wait((farewell, force))
        await self.close()

    async def _say_goodbye(self) -> None:
        """Sends GOAWAY, and waits until the last call has ended."""
        if self._server is not None:
            await self._server.stop(self._drain_timeout_s + _FLUSH_S)

    async def _drain(self) -> int:
        """Returns how many requests were ended early."""
        drain = asyncio.ensure_future(self.loop.drain(self._drain_timeout_s))
        force = asyncio.ensure_future(self._force.wait())
        timeout_s = self._drain_timeout_s + _STEP_S
        await asyncio.wait((drain, force), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        force.cancel()
        if drain.done():
            return await drain
        drain.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drain
        try:
            async with asyncio.timeout(_STEP_S):
                return await self.loop.drain(0.0)
        except TimeoutError:
            return self._abandon()

    def _abandon(self) -> int:
        """Gives up an engine whose step does not end; returns how many streams were told."""
        self._lost = self._lost or "a step of the engine does not end"
        return self.loop.abandon()

    async def close(self) -> None:
        """Ends everything now. Harmless when done twice."""
        self._outage.note(is_broken=False)
        await _release("the listeners for administrators and metrics", self._side.aclose())
        if self._server is not None:
            server, self._server = self._server, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await server.stop(_FORCED_FLUSH_S if self._stop.is_set() else None)
        if self._texts is not None:
            await _release("the text workers", self._texts.close())
        if self._loop is not None and not self._loop.is_abandoned:
            await _release("the engine", self._loop.close())
        if self._accounting is not None:
            await _release("usage", self._accounting.close())
        await _release("keys and rates", self.backends.close())

    def statistics(self, *, has_tenants: bool = True) -> Statistics:
        """Returns what was counted so far, of requests, calls and, if wanted, each tenant."""
        front = count_front(self.gate, self.receive, self._health.n_watchers)
        return dataclasses.replace(
            self.loop.statistics(has_tenants=has_tenants),
            front=front,
            backends=self.backends.states(),
        )


def _broken(loop: StepLoop | None, texts: TextWorkers | None) -> str:
    """Returns what of a server does not work, of what there is."""
    if loop is not None and not loop.is_healthy:
        return "the engine has not worked"
    if texts is not None and not texts.is_healthy:
        return "no text worker could be started"
    return ""


async def _release(what: str, ending: Coroutine[object, object, None]) -> None:
    """Waits for the end of a part of the server, for a while; a fault of it is told."""
    limit_s, task = _RELEASE_S, asyncio.ensure_future(ending)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            _log.error("%s did not end within %g s: ending without", what, limit_s)
        elif not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed to end: ending without", what, exc_info=error)
    finally:
        task.cancel()


def _services(config: Config) -> tuple[ServiceDescriptor, ...]:
    """Returns which services of ours the server offers."""
    return (*_SERVICES, _USAGE_SERVICE) if config.usage_journal else _SERVICES
