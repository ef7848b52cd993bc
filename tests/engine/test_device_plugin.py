"""`make test-device`: its server outlives every model that tests left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.built import built
from tests.support.hand import DENSE, MODELS

ROOT = Path(__file__).resolve().parents[2]
N_LAYERS = 6
"""Of the model, without its MTP head."""

pytestmark = pytest.mark.model

LEFT = """
import gc
from functools import cache
import drafthouse_engine

@cache  # freed with its module, when the interpreter ends
def kept():
    return drafthouse_engine.Model({path!r})

def test_models_that_are_left():
    gc.disable()  # this one is found when pytest looks for what was left, after the last test
    cycle = [drafthouse_engine.Model({path!r})]
    cycle.append(cycle)
    assert "RPC0" in cycle[0].setting("buffers")
    assert "RPC0" in kept().setting("buffers")
"""


HALVES = """
import drafthouse_engine
import tests.support.device as plugin
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine

def where(model, layer):
    return "RPC0" in model.setting(f"buffer:blk.{{layer}}.attn_norm.weight")

def test_a_model():
    with drafthouse_engine.Model({path!r}) as model:
        assert (where(model, 0), where(model, {last})) == (False, True)

def test_that_of_a_server_which_fits_it_itself():
    engine = LlamaEngine.load(Config(model={path!r}, threads=1, parallel=1, max_model_len=256))
    try:
        assert (where(engine._model, 0), where(engine._model, {last})) == (False, True)
    finally:
        engine.close()
"""

WHOLE = """
import drafthouse_engine
import tests.support.device as plugin

def test_a_model(monkeypatch):
    monkeypatch.setattr(plugin, "_half", lambda path: 99)
    drafthouse_engine.Model({path!r}).close()
"""


EXACT = """
import drafthouse_engine
from drafthouse_engine import Engine, Placement
from tests.cext.test_exact import N_SEQ, n_different, one_by_one, params, together
from tests.support.demo import prompts

def test_rows_alone_and_together():
    pool = prompts((100, *(1,) * (N_SEQ - 1)))  # one is long enough for attention by tiles
    here = Placement(devices=())
    with drafthouse_engine.Model({path!r}, placement=here) as model:
        assert model.setting("buffers").count("RPC0[") == 2
        with Engine(model, None, params(is_exact=True)) as engine:
            assert n_different(one_by_one(engine, pool), together(engine, pool, 90))[0] == 0
"""


def run(folder: Path, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs tests with their models on a device."""
    built("ggml-rpc-server")
    (folder / "test_on_device.py").write_text(code)
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.support.device"]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *plugins, *flags]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "GGML_NO_BACKTRACE": "1"}
    return subprocess.run(
        [*command, "test_on_device.py"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_models_that_tests_left_behind_are_freed_on_their_device(tmp_path: Path) -> None:
    done = run(tmp_path, LEFT.format(path=str(MODELS / DENSE)))
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr  # llama.cpp ends a process whose server has gone


def test_a_half_is_half_of_a_server_s_model_too(tmp_path: Path) -> None:
    """What its fit found was all layers, and all of them lay on the device."""
    code = HALVES.format(path=str(MODELS / DENSE), last=N_LAYERS - 1)
    done = run(tmp_path, code, "--on-device", "half")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_a_run_of_halves_fails_where_one_is_whole(tmp_path: Path) -> None:
    done = run(tmp_path, WHOLE.format(path=str(MODELS / DENSE)), "--on-device", "half")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "of a half, all layers lay on the device" in done.stdout
    assert done.returncode == 1


def test_two_exact_devices_give_the_bits_of_alone(tmp_path: Path) -> None:
    """The engine refuses `exact` with a device, and is not asked for it there."""
    built("rounding_server")
    done = run(tmp_path, EXACT.format(path=str(MODELS / DENSE)), "--on-device", "exact")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
