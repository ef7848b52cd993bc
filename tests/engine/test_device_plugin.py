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


def test_models_that_tests_left_behind_are_freed_on_their_device(tmp_path: Path) -> None:
    built("ggml-rpc-server")
    (tmp_path / "test_left.py").write_text(LEFT.format(path=str(MODELS / DENSE)))
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.support.device"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, *plugins, "test_left.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr  # llama.cpp ends a process whose server has gone
