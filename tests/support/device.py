"""A pytest plugin: every model of the run lies on a device whose memory the host cannot read.

`make test-device` runs tests that know nothing of devices with `-p tests.support.device`. An RPC
server of llama.cpp is started, its device becomes one of this process, and as models are loaded on
all devices, so it is used. It serves one process at a time, so the tests run one after the other.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.rpc_server import lasting_rpc_server

import drafthouse_engine

_NOT_HERE = {
    "test_type_of_target_is_kept": "Model is a function here",
    "test_exact_refuses_a_unified_cache": "exact is not asked for here",
}
"""Tests that are skipped, with the reason, by their names without parameters."""

_Model, _EngineParams = drafthouse_engine.Model, drafthouse_engine.EngineParams
_servers: list[str] = []
"""Buffers of the devices, as a model's setting names them."""
_placed: list[str] = []
_whole: list[str] = []
"""Models of a run of halves that lie on the device from their first layer on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds how much of each model lies on the device, and how the device rounds."""
    parser.addoption(
        "--on-device",
        choices=("whole", "half", "exact"),
        default="whole",
        help="layers on the device; exact: whole, on two that do not round by the batch",
    )
    parser.addoption("--rounding", type=float, help="as GPUs do (1), by the width of a batch")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the server before a test file is imported. It ends after all that lies on it."""
    folder = Path(tempfile.mkdtemp())
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    part = config.getoption("--on-device")
    rounding = 0.0 if part == "exact" else config.getoption("--rounding")
    servers = [lasting_rpc_server(folder, rounding) for _ in range(2 if part == "exact" else 1)]
    drafthouse_engine.add_rpc_servers(tuple(servers))
    _servers.extend(f"RPC0[{server}]" for server in servers)
    is_half = part == "half"

    def model(path: Any, **options: Any) -> drafthouse_engine.Model:
        if part == "exact":
            options.pop("placement", None)
        is_split = is_half and options.get("n_gpu_layers", -1) < 0
        if is_split:
            # A server's survey finds that all layers fit, and would have its way.
            options |= {"n_gpu_layers": _half(str(path)), "placed_by": None}
        loaded = _Model(path, **options)
        if not options.get("vocab_only"):
            _placed.append(loaded.setting("buffers"))
            if is_split and _begins_there(loaded):
                _whole.append(str(path))
        return loaded

    def inexact(**fields: Any) -> drafthouse_engine.EngineParams:
        return _EngineParams(**fields | {"exact": False})  # the engine refuses it with any device

    if part == "exact":
        # A function does in its place: nobody asks for its type.
        drafthouse_engine.EngineParams = inexact  # type: ignore[assignment,misc]  # as of Model
    drafthouse_engine.Model = model  # type: ignore[assignment,misc]  # in its place for the whole run


def _begins_there(model: drafthouse_engine.Model) -> bool:
    """Returns whether a model's first layer lies on the device, and so all of them."""
    with suppress(drafthouse_engine.EngineError):  # it has no such tensor
        return "RPC0" in model.setting("buffer:blk.0.attn_norm.weight")
    return False


@cache
def _half(path: str) -> int:
    """Returns half of a model's layers, one at least."""
    with _Model(path, vocab_only=True) as vocabulary:
        arch = vocabulary.meta("general.architecture")
        return max(1, int(vocabulary.meta(f"{arch}.block_count") or 1) // 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run here."""
    for item in items:
        if reason := _NOT_HERE.get(item.name.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run that would have shown nothing: no model lay on the device, or no half did."""
    if _placed and not any(all(it in buffers for it in _servers) for buffers in _placed):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("no model of this run lay on the device")
    if _whole:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("of a half, all layers lay on the device:", ", ".join(sorted(set(_whole))))
    return (yield)
