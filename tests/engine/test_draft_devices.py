"""The drafter on devices of its own: where its weights lie, what it drafts there, what is refused.

One side is llama.cpp's RPC server. Engines are made in a process of their own, from settings as the
server has them: what a process has of an RPC server it has until it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.block_draft import block_draft
from tests.support.hand import DENSE, MODELS
from tests.support.rpc_server import RpcServer, rpc_server

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def rpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcServer]:
    with rpc_server(tmp_path_factory.mktemp("rpc")) as server:
        yield server


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if "DRAFTHOUSE_" not in key}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=kept | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


EVERYWHERE = """
import sys
from tests.support.hand import fused
from drafthouse_server.config import Config
from drafthouse_server.engine.loading import load_engine
from drafthouse_server.engine.surveyor import Surveyor
from drafthouse_server.host.fit import Size

endpoint, kind, model, draft = sys.argv[1:]
TEXTS = ("def parse(text):\\n", "class Stack:\\n    def __init__(self):\\n")

def config(**settings):
    return Config(model=model, model_draft=draft, draft_type=kind, parallel=2, max_model_len=128,
                  threads=1, threads_batch=1, **settings)

def on_device(loaded):
    parts = dict(part.rsplit("=", 1) for part in loaded.setting("buffers").split(","))
    return sum(int(n) for name, n in parts.items() if name.startswith("RPC0"))

def generated(settings):
    engine = load_engine(settings).engine
    with engine:
        prompts = [engine.target.tokenize(text) for text in TEXTS]
        tokens = fused(engine, prompts, 24)
        told = {name: engine.setting(name) for name in ("cache_type_k_draft", "cache_type_v_draft")}
        told |= {"device": engine.target.setting("device"),
                 "device_draft": engine.draft.setting("device"),
                 "gpu_layers_draft": engine.draft.setting("gpu_layers")}
        assert engine.draft_work.n_drafts > 0
        n_bytes = on_device(engine.target), on_device(engine.draft)
    return tokens, told, n_bytes

wanted, told, n_bytes = generated(config())
assert (told["device"], told["device_draft"], n_bytes) == ("", "", (0, 0)), (told, n_bytes)
rpc = {"rpc": (endpoint,)}
CELLS = {"cache_type_k_draft": "q8_0", "cache_type_v_draft": "bf16"}
ROWS = [
    ({}, {"device": "RPC0", "device_draft": "RPC0"}, (True, True)),
    ({"device": ("none",)}, {"device": "", "device_draft": ""}, (False, False)),
    ({"device": ("none",), "device_draft": ("RPC0",)}, {"device": "", "device_draft": "RPC0"},
     (False, True)),
    ({"device_draft": ("none",)}, {"device": "RPC0", "device_draft": ""}, (True, False)),
    ({"gpu_layers_draft": 0}, {"device_draft": "RPC0", "gpu_layers_draft": "0"}, (True, False)),
    ({"gpu_layers": 0, "gpu_layers_draft": 1}, {"gpu_layers_draft": "1"}, (False, True)),
    ({"device": ("none",), "device_draft": ("RPC0",), **CELLS}, CELLS, (False, True)),
    ({"device_draft": ("none",), **CELLS}, CELLS, (True, False)),
    ({"override_tensor": (".*=CPU",)}, {"device_draft": "RPC0"}, (False, True)),
    ({"device_draft": ("RPC0",), "tensor_split": ("2",), "split_mode": "none"}, {}, (True, True)),
]
for settings, setting, is_there in ROWS:
    full = config(**rpc, **settings)
    tokens, told, n_bytes = generated(full)
    assert setting.items() <= told.items(), (settings, told)
    assert tuple(map(bool, n_bytes)) == is_there, (settings, n_bytes)
    assert tokens == wanted, settings
    with Surveyor(full) as surveyor:
        found = dict(surveyor.needs(Size(2, 128)).devices)
    assert sum(use.weights_bytes for use in found.values()) == sum(n_bytes), (settings, found)
"""


@pytest.mark.parametrize(
    ("kind", "draft"), [("simple", "tiny-draft-f16.gguf"), ("eagle3", "tiny-mimo2-eagle3-f16.gguf")]
)
def test_settings_place_the_drafter_and_change_no_token(
    rpc: RpcServer, kind: str, draft: str
) -> None:
    done = run("-c", EVERYWHERE, rpc.endpoint, kind, str(MODELS / DENSE), str(MODELS / draft))
    assert done.returncode == 0, done.stderr


def test_a_drafter_must_be_where_the_tables_are_that_it_takes(
    rpc: RpcServer, tmp_path: Path
) -> None:
    """llama.cpp ends the process that computes with a tensor of a device that it does not have."""
    draft = block_draft(tmp_path / "dflash.gguf")
    flags = ["--model", str(MODELS / DENSE), "--model-draft", str(draft), "--draft-type", "dflash"]
    flags += ["--port", "0", "--rpc", rpc.endpoint, "--device-draft", "none"]
    done = run("-m", "drafthouse_server", "serve", *flags)
    assert done.returncode == 1, done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert f"cannot load '{draft}'" in last
    assert 'no "output.weight" of its own and takes the target\'s, which lies on RPC0' in last
    assert "Traceback" not in done.stderr
