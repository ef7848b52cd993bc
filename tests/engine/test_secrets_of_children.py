"""No process that a server starts gets a secret of its environment or its settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from models.archs import write_model
from tests.support.built import needs_extension
from tests.support.demo import config as demo_config

import drafthouse_engine
from drafthouse_engine import ChatProcess
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.rpc.server import Server

pytestmark = needs_extension()

MARK = "canary-0123456789-0123456789"
VARIABLES = {
    "DRAFTHOUSE_API_KEYS": f"acme:{MARK}",
    "DRAFTHOUSE_STORE": f"postgresql://me:{MARK}@127.0.0.1/none",
    "DRAFTHOUSE_RATE_COUNTERS_URL": f"redis://:{MARK}@127.0.0.1/0",
    "DRAFTHOUSE_KEY_PEPPER": MARK,
    "PGPASSWORD": MARK,
    "REDIS_PASSWORD": MARK,
    "DATABASE_URL": f"postgresql://me:{MARK}@127.0.0.1/none",
    "AWS_SECRET_ACCESS_KEY": MARK,
    "HF_TOKEN": MARK,
}
"""What operators keep in variables."""


class Started:
    """What each process was given that this one has started."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []
        self.environments: list[bytes] = []
        self.programs: set[str] = set()

    def note(self, process: subprocess.Popen[Any], words: Sequence[str]) -> None:
        proc = Path(f"/proc/{process.pid}")
        self.commands.append((proc / "cmdline").read_bytes())
        self.environments.append((proc / "environ").read_bytes())
        self.programs |= {word for word in map(str, words) if word.startswith("drafthouse")}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    found = Started()

    class Noted(subprocess.Popen[Any]):
        def __init__(self, words: Sequence[str], *arguments: Any, **options: Any) -> None:
            super().__init__(words, *arguments, **options)
            found.note(self, words)

    for name, text in VARIABLES.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield found
    assert found.environments
    for content in (*found.environments, *found.commands):
        assert MARK.encode() not in content
        assert b"canary" not in content


@pytest.mark.model
async def test_text_workers_of_a_server_get_none(started: Started, tmp_path: Path) -> None:
    pepper = tmp_path / "pepper"
    pepper.write_text(MARK * 3)
    settings = demo_config(
        "dense", "none", parallel=1, api_keys=(f"acme:{MARK}",), text_workers=2,
        key_pepper_file=str(pepper),
    )  # fmt: skip
    server = Server(settings, lambda: LlamaEngine.load(settings))
    await server.startup()
    try:
        assert started.programs == {"drafthouse_server.engine.text_worker"}
        assert len(started.environments) >= 2
        # What a worker is told beside: the model, and how much it may take.
        told = [worker._setup for worker in server.texts.workers]  # type: ignore[attr-defined]  # of TextProcess
        assert MARK not in str(told)
    finally:
        await server.close()


def test_the_process_that_formats_chats_gets_none(started: Started) -> None:
    chats = ChatProcess("{{ messages[0].content }}")
    assert chats.format([("user", "x")]) == "x"
    chats.close()
    assert started.programs == {"drafthouse_engine.chat_worker"}


def test_the_process_that_tries_a_model_gets_none(started: Started, tmp_path: Path) -> None:
    assert drafthouse_engine.probe_model(write_model(tmp_path / "llama.gguf", "llama")) == ""
    assert started.programs == {"drafthouse_engine.probe_worker"}


def test_what_a_model_is_computed_with_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is tried is not what is served."""
    for name in ("CUDA_VISIBLE_DEVICES", "GGML_CUDA_FORCE_MMQ", "OMP_NUM_THREADS", "LC_ALL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DRAFTHOUSE_CPU_LEVEL", "v3")
    given = drafthouse_engine.probe._environment()
    kept = {name for name in given if os.environ.get(name) == given[name]}
    assert {"CUDA_VISIBLE_DEVICES", "GGML_CUDA_FORCE_MMQ", "OMP_NUM_THREADS", "LC_ALL"} <= kept
    assert {"DRAFTHOUSE_CPU_LEVEL", "PATH"} <= kept
