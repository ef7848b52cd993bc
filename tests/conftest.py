"""Fixtures of several test files: servers in this process, an engine that a test can hold."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from tests.support import alarm, ports
from tests.support.closed_loops import is_of_open_loop

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import StepPlan, StepResult
from drafthouse_server.tenancy.tenants import TenantRegistry

HELD_MAX_S = 100.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--whole`."""
    parser.addoption(
        "--whole", action="store_true", help="as many requests and traces as the proofs ask for"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Has a test that takes too long fail alone, and `no_cover` be heeded in workers of xdist, too.

    There pytest-cov 7.1 starts to count twice, first as if there were no workers. Whenever the
    second stops for a test, the first would go on.
    """
    config.pluginmanager.register(alarm)
    logging.getLogger("asyncio").addFilter(is_of_open_loop)
    cov = config.pluginmanager.getplugin("_cov")
    if hasattr(config, "workerinput") and cov is not None and cov.cov_controller is not None:
        cov.cov_controller.cov.stop()


# How long an example takes is no verdict.
settings.register_profile("drafthouse", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("drafthouse")


_FIRST = (
    "tests/scripts/test_portability.py",
    "tests/attacks/test_attacks.py",
    "tests/serving/test_crowd.py",
    "tests/cext/test_texts.py",
    "tests/rpc/test_usage_sums.py",
    "tests/scheduling/test_fairness.py",
)
"""Files that take a minute and more: begun last, each would keep one core busy and leave the others
idle (`--no-loadscope-reorder` keeps this order)."""


_WITHOUT_SERVICE = (
    *(f"tests/{it}/" for it in ("archs", "bench", "cext", "fuzz", "kernels", "models", "scripts")),
    "tests/test_architecture.py",
)
"""Where hardly a line of the service runs, which is what is counted."""

_UNTRACED = frozenset(
    {
        "tests/drafting/test_adaptive.py",
        "tests/drafting/test_guard.py",
        "tests/proofs/test_engine_at_random.py",
        "tests/proofs/test_servers_at_random.py",
        "tests/rpc/test_tenants_at_random.py",
        "tests/rpc/test_usage_sums.py",
        "tests/scheduling/test_crowds.py",
        "tests/scheduling/test_crowds_exact.py",
        "tests/scheduling/test_fairness.py",
        "tests/scheduling/test_leads.py",
        "tests/scheduling/test_preemption.py",
        "tests/scheduling/test_prefix_reuse.py",
        "tests/scheduling/test_scheduler_properties.py",
        "tests/scheduling/test_simulation.py",
        "tests/serving/test_accounting.py",
        "tests/serving/test_conversations.py",
        "tests/serving/test_crowd.py",
        "tests/serving/test_everything.py",
        "tests/serving/test_tickets.py",
    }
)
"""Files that run the same lines some ten thousand times: counting these lines, which other tests
run as well, takes up to five times as long as to run them."""


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long files first, and counts no lines in some."""
    ranks = {name: rank for rank, name in enumerate(_FIRST)}
    items.sort(key=lambda item: ranks.get(_file_of(item), len(ranks)))
    for item in items:
        file = _file_of(item)
        if file in _UNTRACED or file.startswith(_WITHOUT_SERVICE):
            item.add_marker("no_cover")


@pytest.fixture
def is_whole(pytestconfig: pytest.Config) -> bool:
    """Whether a test shall do all that its proof asks for: minutes (`make whole`)."""
    return bool(pytestconfig.getoption("--whole"))


class GatedEngine(FakeEngine):
    """A fake engine whose steps wait while a test holds it."""

    def __init__(self) -> None:
        super().__init__(step_s=0.001)  # a long generation is not over before a test can hold it
        self._may_step = threading.Event()
        self._may_step.set()
        self.plans: list[StepPlan] = []
        self.is_stuck = False
        """Whether a step waits now."""

    def hold(self) -> None:
        self._may_step.clear()

    def release(self) -> None:
        self._may_step.set()

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.is_stuck = not self._may_step.is_set()
        assert self._may_step.wait(HELD_MAX_S), "the test never released the engine"
        self.is_stuck = False
        return super().step(plan)


class ServerFactory(Protocol):
    """Starts a server on a free port; it is closed when the test ends."""

    def __call__(
        self,
        engine: Engine | None = None,
        *,
        tenants: TenantRegistry | None = None,
        **settings: Any,
    ) -> Coroutine[Any, Any, Server]: ...


class Eventually(Protocol):
    """Waits until a condition holds; a test that waits in vain fails."""

    def __call__(self, condition: Callable[[], bool]) -> Coroutine[Any, Any, None]: ...


@pytest.fixture
async def start_server() -> AsyncIterator[ServerFactory]:
    servers: list[Server] = []

    async def start(
        engine: Engine | None = None,
        *,
        tenants: TenantRegistry | None = None,
        **settings: Any,
    ) -> Server:
        defaults: dict[str, Any] = {"port": 0, "drain_timeout_s": 60.0, "draft_policy": "fixed"}
        config = Config(**defaults | settings)
        server = Server(config, lambda: engine or FakeEngine(), tenants=tenants)
        await server.startup()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
def gated_engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
async def server(start_server: ServerFactory) -> Server:
    return await start_server()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[drafthouse.AsyncClient]:
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        yield client


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell may have started us with Ctrl-C ignored, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens."""
    return ports.free_port()


@pytest.fixture
def eventually() -> Eventually:
    async def wait(condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 100.0  # a guard: pytest's timeout would not say where
        while not condition():
            assert time.monotonic() < give_up_at, "never came true"
            await asyncio.sleep(0.001)

    return wait
