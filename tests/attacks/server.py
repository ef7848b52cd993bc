"""A server of its own for each attack, with three tenants, and what it needs: models, Envoy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.envoy import Front, before, program
from tests.support.gguf_copy import copied
from tests.support.ports import free_port

__all__ = ["KEYS", "Served", "ended_within", "is_behind_envoy", "serving"]

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("attacker-0123456789abcdef", "victim-0123456789abcdef", "third-0123456789abcdef")
"""Of three tenants: who attacks, who suffers, who comes third."""

_DENSE = ROOT / "models" / "tiny-mimo2-f16.gguf"
_HYBRID = ROOT / "models" / "tiny-qwen35-f16.gguf"
_BEHIND_ENVOY = ("a18",)
"""Attacks that the server alone cannot bound: deploy/envoy.yaml does."""
_STARTUP_S = 110.0


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    process: subprocess.Popen[bytes]
    """It."""
    target: str
    """host:port."""
    metrics_port: int
    """Where its metrics are."""
    log: Path
    """What it writes."""
    ca_file: str = ""
    """The authority of the certificate that clients see; "" is plain text."""


def _flags(name: str, folder: Path) -> list[str]:
    """Returns what an attack needs of its server besides the defaults."""
    model = _HYBRID if name.startswith("a09") else _DENSE
    if name.startswith("a06"):
        model = folder / "gpt-4o.gguf"
        copied(_DENSE, model, {"tokenizer.ggml.pre": "gpt-4o"})
    flags = ["--model", str(model)]
    if name[:3] in ("a02", "a03", "a04", "a06"):
        flags += ["--max-model-len", "16384", "--parallel", "2"]
    return flags


def is_behind_envoy(name: str) -> bool:
    """Returns whether an attack is tried through Envoy."""
    return name.startswith(_BEHIND_ENVOY)


@contextlib.contextmanager
def serving(
    name: str, folder: Path, timeline: Path | None = None, *, is_bare: bool = False
) -> Iterator[Served]:
    """Runs a server for an attack, until the block ends; behind Envoy where it needs that.

    Args:
        name: The attack's.
        folder: For its log, its keys and a model.
        timeline: A file for what it notes of each request (`drafthouse-bench timeline`).
        is_bare: Without Envoy in any case.

    Raises:
        FileNotFoundError: there is no Envoy.
    """
    with contextlib.ExitStack() as stack:
        port = free_port()
        if is_bare or not is_behind_envoy(name):
            yield stack.enter_context(_alone(name, folder, timeline, port))
            return
        front = stack.enter_context(before(program(), folder, {"one": port, "two": port}))
        served = stack.enter_context(_alone(name, folder, timeline, port, front))
        _await(front.is_ready, "Envoy gives the server no calls")
        yield dataclasses.replace(served, target=front.target, ca_file=str(front.ca_file))


@contextlib.contextmanager
def _alone(
    name: str, folder: Path, timeline: Path | None, port: int, front: Front | None = None
) -> Iterator[Served]:
    """Runs the server itself; with the certificate that Envoy asks for, where one is in front."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key.partition('-')[0]}:{key}\n" for key in KEYS), encoding="utf-8")
    keys.chmod(0o600)
    metrics_port = free_port()
    log = folder / "server.log"
    program = ["drafthouse_bench", "timeline", str(timeline)] if timeline else ["drafthouse_server"]
    command = [sys.executable, "-m", *program, "serve", *_flags(name, folder)]
    command += ["--port", str(port), "--metrics-port", str(metrics_port)]
    command += ["--api-keys-file", str(keys)]
    if front:
        command += ["--ssl-cert-file", str(front.folder / "server.crt")]
        command += ["--ssl-key-file", str(front.folder / "server.key")]
    environment = {key: value for key, value in os.environ.items() if "DRAFTHOUSE_" not in key}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
    try:
        _await(lambda: _has_started(process, log), "the server says nothing")
        yield Served(process, f"127.0.0.1:{port}", metrics_port, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if not ended_within(process, 40.0):
                process.kill()
                process.wait()


def _has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    text = log.read_text(errors="replace")
    if process.poll() is not None:
        raise RuntimeError(f"the server did not start: {text[-2000:]}")
    return "listening at" in text


def _await(condition: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + _STARTUP_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{problem}, after {_STARTUP_S:.0f} s")
        time.sleep(0.05)


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Returns whether a process ends in time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
