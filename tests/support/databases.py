"""PostgreSQL and Redis for tests: this machine's packages, on loopback, in temporary folders."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.ports import free_port

__all__ = ["Daemon", "need", "postgresql", "redis_server"]

_START_S = 100.0


def need(program: str | None, package: str) -> str:
    """Returns a program's path; without it the test is skipped, and fails where CI is set."""
    if program is None:
        message = f"{package} is not installed: `make test-deps`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return program


def _server_program() -> str | None:
    """Returns the newest PostgreSQL of Debian, which is on no PATH, or another one that is."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return str(found[-1]) if found else shutil.which("postgres")


class Daemon:
    """A server program that a test starts, holds, continues and ends."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port

    def _begin(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self) -> None:
        """Starts the program and waits until it listens."""
        process = self._process = self._begin()
        give_up_at = time.monotonic() + _START_S
        while True:
            if process.poll() is not None:
                # PostgreSQL ends at once while a killed one's children still hold its memory.
                assert time.monotonic() < give_up_at, f"{self._command} has ended"
                process = self._process = self._begin()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert time.monotonic() < give_up_at, f"{self._command} does not listen"
            time.sleep(0.02)

    def _kill(self, number: int) -> None:
        """Sends a signal to the program and to all that it has started."""
        assert self._process is not None
        # PostgreSQL's have sessions of their own. Once it is killed they are nobody's, and until it
        # is held it starts more.
        children = {*_children(self._process.pid)}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for child in children | {*_children(self._process.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    def hold(self) -> None:
        """Stops it in the middle: connections stay open, and nothing answers."""
        self._kill(signal.SIGSTOP)

    def release(self) -> None:
        """Lets it go on."""
        self._kill(signal.SIGCONT)

    def revive(self) -> None:
        """Has it running again, whatever a test has done to it."""
        if self._process is None:
            self.start()
        else:
            self.release()

    def stop(self) -> None:
        """Ends it at once, as a crash does."""
        if self._process is not None:
            self._kill(signal.SIGKILL)
            self._process.wait()
            self._process = None


def _children(pid: int) -> list[int]:
    """Returns a process's children, as its main thread has started them."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _owner() -> str | None:
    """Returns the user that PostgreSQL runs as: it refuses to be root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


def _as_user(user: str | None) -> list[str]:
    """Returns the words before a command that make it run as a user.

    `Popen(user=…)` forks, and gRPC starts its threads anew in a fork: these end the child before it
    is another program, and read what clients of this process have sent.
    """
    if user is None:
        return []
    group = str(pwd.getpwnam(user).pw_gid)
    return [need(shutil.which("setpriv"), "util-linux"), "--reuid", user, "--regid", group,
            "--clear-groups", "--"]  # fmt: skip


@contextlib.contextmanager
def postgresql() -> Iterator[tuple[Daemon, str]]:
    """Gives a running PostgreSQL and the URL of its database, empty."""
    server = Path(need(_server_program(), "postgresql"))
    user, port = _owner(), free_port()
    with tempfile.TemporaryDirectory(prefix="drafthouse-pg-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        cluster = folder / "cluster"
        subprocess.run(
            [*_as_user(user), server.with_name("initdb"), "-D", cluster, "-A", "trust",
             "-U", "drafthouse", "--no-sync", "-E", "UTF8", "--locale=C"],
            cwd="/", check=True, capture_output=True,
        )  # fmt: skip
        settings = {
            "port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": folder,
            "fsync": "off", "shared_buffers": "16MB", "max_connections": 20,
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        daemon = Daemon([*_as_user(user), str(server), "-D", str(cluster), *options], port)
        url = f"postgresql://drafthouse@127.0.0.1:{port}/postgres"
        try:
            daemon.start()
            _wait_for_queries(server.with_name("psql"), url)
            yield daemon, url
        finally:
            daemon.stop()


def _wait_for_queries(psql: Path, url: str) -> None:
    """Waits until the server, which listens before it takes queries, takes them."""
    give_up_at = time.monotonic() + _START_S
    while subprocess.run(
        [psql, url, "-c", "select 1"], capture_output=True, check=False
    ).returncode:
        assert time.monotonic() < give_up_at, "PostgreSQL takes no queries"
        time.sleep(0.05)


@contextlib.contextmanager
def redis_server(password: str = "") -> Iterator[tuple[Daemon, str]]:
    """Gives a running Redis and its URL, empty; without a password it takes any."""
    server = need(shutil.which("redis-server"), "redis-server")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="drafthouse-redis-") as folder:
        command = [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--requirepass", password] if password else []
        daemon = Daemon([*command, "--save", "", "--appendonly", "no"], port)
        try:
            daemon.start()
            yield daemon, f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"
        finally:
            daemon.stop()
