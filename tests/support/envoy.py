"""Envoy with our configuration in front of servers, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.support.certificates import Authority
from tests.support.ports import free_ports

import drafthouse

__all__ = ["CANCELS", "KEY", "Front", "before", "front", "program"]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KEY = "k" * 20
_WAIT_S = 60.0
"""A guard against what never comes; how long it takes is no verdict."""

_PROGRAM = """
    import asyncio, dataclasses, logging, sys
    from pathlib import Path
    from drafthouse_server.config import Config
    from drafthouse_server.engine.fake import FakeEngine
    from drafthouse_server.rpc.server import Server

    port, name, certificate, key, api_key = sys.argv[1:]
    logging.basicConfig(filename=Path(certificate).with_name(name + ".log"), level=logging.INFO)
    config = Config(
        port=int(port), ssl_cert_file=certificate, ssl_key_file=key, api_keys=("acme:" + api_key,)
    )
    card = dataclasses.replace(FakeEngine().card, architecture=name)
    server = Server(config, lambda: FakeEngine(step_s=0.002, card=card))
    asyncio.run(server.serve(lambda server: print(server.target, flush=True)))
"""

CANCELS = """
    import asyncio, sys
    from pathlib import Path
    import grpc

    port, _, certificate, key, _ = sys.argv[1:]

    async def health(request, context):
        return bytes([8, 1])  # SERVING

    async def other(request, context):
        await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details):
            chosen = health if details.method.startswith("/grpc.health.") else other
            return grpc.unary_unary_rpc_method_handler(chosen)

    async def main():
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handlers(),))
        pair = Path(key).read_bytes(), Path(certificate).read_bytes()
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await server.wait_for_termination()

    asyncio.run(main())
"""
"""A server that answers as gRPC's core does for one that stops before it has seen a call."""


def program() -> str:
    """Returns the path of Envoy.

    Raises:
        FileNotFoundError: there is none.
    """
    found = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if found is None:
        raise FileNotFoundError(
            "there is no envoy; `make dev` installs one where there is a package for the CPU"
        )
    return found


def _program_of_test() -> str:
    """Returns the path of Envoy; without it the test is skipped, or fails where CI is set."""
    try:
        return program()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@dataclass
class Front:
    """Envoy and what is behind it.

    Several names may have one port: the server behind it then stands for all of them.
    """

    folder: Path
    authority: Authority
    port: int
    admin_port: int
    ports: dict[str, int]
    """Of the servers, by name."""
    servers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    """Envoy, once it has been started."""

    @property
    def target(self) -> str:
        """Where clients connect."""
        return f"localhost:{self.port}"

    @property
    def tls(self) -> drafthouse.Tls:
        """How clients connect."""
        return drafthouse.Tls(ca_file=self.ca_file)

    @property
    def ca_file(self) -> Path:
        """The authority of the certificate that it shows."""
        return self.folder / "ca.crt"

    def client(
        self, key: str | None = KEY, retry: drafthouse.RetryPolicy | None = None
    ) -> drafthouse.AsyncClient:
        """Returns a client that does not try again unless told so: what fails is seen."""
        return drafthouse.AsyncClient(self.target, api_key=key, tls=self.tls, retry=retry)

    def start_server(self, name: str, program: str = _PROGRAM) -> None:
        """Starts a server, and waits until it listens."""
        if name in self.servers:
            self._bury(self.servers[name])
        pair = (str(self.folder / f"server.{end}") for end in ("crt", "key"))
        command = [sys.executable, "-c", textwrap.dedent(program)]
        server = subprocess.Popen(
            [*command, str(self.ports[name]), name, *pair, KEY], stdout=subprocess.PIPE, text=True
        )
        self.servers[name] = server
        assert server.stdout is not None
        assert server.stdout.readline().strip().endswith(str(self.ports[name]))

    def close(self) -> None:
        """Ends all servers."""
        for server in self.servers.values():
            self._bury(server)

    @staticmethod
    def _bury(server: subprocess.Popen[str]) -> None:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()

    def n_calls(self, method: str) -> int:
        """Returns how many calls of a method have ended at the servers, by their logs."""
        logs = [self.folder / f"{name}.log" for name in self.servers]
        return sum(log.read_text("utf-8").count(f"/{method} code=") for log in logs)

    def end_server(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a server."""
        self.servers[name].send_signal(number)

    def healthy(self) -> set[str]:
        """Returns the names of the servers that Envoy gives calls to; none while it starts."""
        found = set()
        for name, status in self._hosts().items():
            health = status["health_status"]
            is_out = health.get("failed_active_health_check") or health.get("failed_outlier_check")
            if health["eds_health_status"] == "HEALTHY" and not is_out:
                found.add(name)
        return found

    def is_ready(self) -> bool:
        """Returns whether all servers get calls; raises an AssertionError if Envoy has ended."""
        log = self.folder / "envoy.log"
        assert self.process is not None
        assert self.process.poll() is None, f"Envoy ended: {log.read_text('utf-8')[-2000:]}"
        return {self.ports[name] for name in self.healthy()} == set(self.ports.values())

    def busy(self) -> set[str]:
        """Returns the names of the servers that serve a call for Envoy."""
        return {
            name
            for name, status in self._hosts().items()
            if any(s["name"] == "rq_active" and int(s.get("value", 0)) for s in status["stats"])
        }

    def _hosts(self) -> dict[str, dict[str, Any]]:
        """Returns what Envoy tells of each server, by name; nothing while it starts."""
        url = f"http://127.0.0.1:{self.admin_port}/clusters?format=json"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # our own
                clusters = json.load(answer).get("cluster_statuses", [])
        except OSError:
            return {}
        names = {port: name for name, port in self.ports.items()}
        hosts = [h for c in clusters if c["name"] == "servers" for h in c.get("host_statuses", [])]
        return {names[host["address"]["socket_address"]["port_value"]]: host for host in hosts}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds."""
        async with asyncio.timeout(_WAIT_S):
            # Envoy can only be asked, it tells nobody.
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110  # of another process
                await asyncio.sleep(0.02)


def _configure(front: Front, changed: dict[str, str]) -> Path:
    """Writes the configuration for this machine's ports and paths; returns its path."""
    folder, (one, two) = front.folder, front.ports.values()
    replaced = (
        ("address: 0.0.0.0, port_value: 8443", f"address: 127.0.0.1, port_value: {front.port}"),
        ("port_value: 9901", f"port_value: {front.admin_port}"),
        ("address: server-1, port_value: 50051", f"address: 127.0.0.1, port_value: {one}"),
        ("address: server-2, port_value: 50051", f"address: 127.0.0.1, port_value: {two}"),
        ("/etc/drafthouse", str(folder)),
        *changed.items(),
    )
    for name in ("envoy.yaml", "envoy_certificate.yaml"):
        text = (DEPLOY / name).read_text("utf-8")
        for old, new in replaced:
            assert name != "envoy.yaml" or old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        (folder / name).write_text(text, "utf-8")
    return folder / "envoy.yaml"


@contextmanager
def before(
    path: str, folder: Path, ports: dict[str, int], changed: dict[str, str] | None = None
) -> Iterator[Front]:
    """Runs Envoy in front of servers that the caller starts.

    Args:
        path: Of Envoy, as `program` returns it.
        folder: For its configuration and log. Afterwards it has the certificate that the servers
            have to show, too: server.crt and server.key.
        ports: Where the servers will listen: those of "one" and "two", which may be the same.
        changed: Texts of the configuration, and what stands in their places.
    """
    authority = Authority()
    taken = ports.values()
    port, admin = [each for each in free_ports(2 + len(ports)) if each not in taken][:2]
    running = Front(folder, authority, port, admin, ports)
    authority.write(folder)
    authority.issue(x509.DNSName("server")).write(folder)
    (folder / "tls").mkdir()
    authority.issue().write(folder / "tls", "tls")
    command = [path, "-c", str(_configure(running, changed or {})), "--concurrency", "1"]
    command += ["--disable-hot-restart", "--log-level", "warning"]
    with (folder / "envoy.log").open("wb") as log:
        running.process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


@asynccontextmanager
async def front(folder: Path, changed: dict[str, str] | None = None) -> AsyncIterator[Front]:
    """Runs Envoy and two servers, "one" and "two"; `changed` as for `before`."""
    one, two = free_ports(2)
    ports = {"one": one, "two": two}
    with before(_program_of_test(), folder, ports, changed) as running:
        try:
            for name in running.ports:
                await asyncio.to_thread(running.start_server, name)
            await running.until(running.is_ready)
            yield running
        finally:
            running.close()
