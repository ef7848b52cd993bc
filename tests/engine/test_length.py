"""Requests are as long as memory is ample for, where nobody has set how long."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.proofs.malformed import values
from tests.support.built import needs_extension
from tests.support.demo import MODELS, TARGETS

from drafthouse_server.config import Config
from drafthouse_server.doctor.model import examine_model
from drafthouse_server.engine import loading
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.surveyor import Surveyor
from drafthouse_server.host.fit import Size
from drafthouse_server.host.memory import HostMemory

pytestmark = needs_extension()
N_TRAIN = 10_000


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the dense demo model that says it was trained for longer texts."""
    data = bytearray((MODELS / TARGETS["dense"]).read_bytes())
    value = next(it for it in values(bytes(data)) if it.key == "mimo2.context_length")
    data[value.at : value.at + value.width] = N_TRAIN.to_bytes(value.width, "little")
    path = tmp_path_factory.mktemp("long") / "long.gguf"
    path.write_bytes(data)
    return path


def config(model: Path, **settings: Any) -> Config:
    return Config(model=str(model), threads=1, **settings)


def host_of_four_times(settings: Config, size: Size) -> HostMemory:
    """Returns a host a quarter of which is what the contexts of a server take."""
    with Surveyor(settings) as surveyor:
        host = surveyor.needs(size).host
    return HostMemory(4 * (host.total_bytes - host.weights_bytes), 10**12)


def length(
    settings: Config, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Returns slots and tokens of one request of a server on such a host."""
    monkeypatch.setattr(loading, "read_memory", lambda: memory)
    engine = LlamaEngine.load(settings)
    try:
        return engine.limits.n_seq_max, engine.limits.n_ctx_seq
    finally:
        engine.close()


@pytest.mark.parametrize("n_tokens", [4096, 8192, N_TRAIN])
def test_contexts_take_a_quarter_of_the_host(
    long_model: Path, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(long_model)
    memory = host_of_four_times(settings, Size(8, n_tokens))
    assert length(settings, memory, monkeypatch) == (8, n_tokens)
    less = dataclasses.replace(memory, total_bytes=memory.total_bytes - 4)
    n_less = {4096: 4096, 8192: 4096, N_TRAIN: 8192}[n_tokens]
    assert length(settings, less, monkeypatch) == (8, n_less)
    sections, _ = examine_model(settings, less, {})
    (fits,) = (it for it in sections if it.name == "fits")
    assert ("served", f"8 x {n_less}") in [(it.key, it.value) for it in fits.facts]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, (8, N_TRAIN)),
        ({"parallel": 2}, (2, N_TRAIN)),
        ({"draft_type": "none", "kv_unified": True}, (8, N_TRAIN)),
        ({"max_model_len": 5000}, (8, 5000)),
        ({"ctx_size": 8 * 4096}, (8, 4096)),
        ({"fit": False}, (8, 4096)),
    ],
)
def test_what_is_set_stays(
    long_model: Path,
    settings: dict[str, Any],
    found: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = HostMemory(10**12, 10**12)
    assert length(config(long_model, **settings), memory, monkeypatch) == found


def test_where_nothing_is_known_of_the_memory_lengths_stay(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert length(config(long_model), HostMemory(0, 0), monkeypatch) == (8, 4096)
