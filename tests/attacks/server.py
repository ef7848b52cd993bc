"""A server of its own for each attack, with three tenants, and what it needs of models."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.gguf_copy import copied
from tests.support.ports import free_port

__all__ = ["KEYS", "Served", "ended_within", "serving"]

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("attacker-0123456789abcdef", "victim-0123456789abcdef", "third-0123456789abcdef")
"""Of three tenants: who attacks, who suffers, who comes third."""

_DENSE = ROOT / "models" / "tiny-mimo2-f16.gguf"
_HYBRID = ROOT / "models" / "tiny-qwen35-f16.gguf"
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


@contextlib.contextmanager
def serving(name: str, folder: Path, timeline: Path | None = None) -> Iterator[Served]:
    """Runs a server for an attack, until the block ends.

    Args:
        name: The attack's.
        folder: For its log, its keys and a model.
        timeline: A file for what it notes of each request (`drafthouse-bench timeline`).
    """
    keys = folder / "keys"
    keys.write_text("".join(f"{key.partition('-')[0]}:{key}\n" for key in KEYS), encoding="utf-8")
    keys.chmod(0o600)
    port, metrics_port = free_port(), free_port()
    log = folder / "server.log"
    program = ["drafthouse_bench", "timeline", str(timeline)] if timeline else ["drafthouse_server"]
    command = [sys.executable, "-m", *program, "serve", *_flags(name, folder)]
    command += ["--port", str(port), "--metrics-port", str(metrics_port)]
    command += ["--api-keys-file", str(keys)]
    environment = {key: value for key, value in os.environ.items() if "DRAFTHOUSE_" not in key}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
    try:
        _await_ready(process, log)
        yield Served(process, f"127.0.0.1:{port}", metrics_port, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if not ended_within(process, 40.0):
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _STARTUP_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        if b"listening at" in log.read_bytes():
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Returns whether a process ends in time."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
