"""Settings of devices, set as a flag sets them, and read back from llama.cpp.

Devices are two of llama.cpp's RPC servers; a machine of two memory nodes is pretended to ggml.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models.archs import write_model
from tests.support.built import missing
from tests.support.hand import DENSE, MODELS
from tests.support.rpc_server import rpc_server

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests" / "support" / "numa_shim.c"

pytestmark = pytest.mark.model

LOADED = """
import argparse
import sys
from tests.support.hand import fused
from drafthouse_server.cli import settings
from drafthouse_server.engine.loading import load_engine

def engine_of(*flags):
    sizes = ("--parallel", "1", "--max-model-len", "256", "--threads", "2", "--threads-batch", "2")
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    given = settings.external_flags(parser.parse_args([*flags, *sizes]))
    return load_engine(settings.load(None, {}, given)).engine
"""

TABLE = """
endpoints, dense, experts = sys.argv[1:]

def place_of(buffer):
    # Each RPC server calls the first device of its own RPC0.
    if not buffer.startswith("RPC"):
        return buffer
    endpoint = buffer.partition("[")[2].partition("]")[0]
    return f"RPC{endpoints.split(',').index(endpoint)}"

def devices_of(model):
    parts = (part.rsplit("=", 1)[0] for part in model.setting("buffers").split(","))
    return {place_of(part) for part in parts if part.startswith("RPC")}

def device_of(model, tensor):
    return place_of(model.setting(f"buffer:{tensor}.weight"))

def layers_on(model, device, n):
    return sum(device_of(model, f"blk.{i}.attn_norm") == device for i in range(n))

def experts_here(model):
    assert device_of(model, "blk.0.attn_norm").startswith("RPC")
    return [i for i in (0, 1) if all(
        not device_of(model, f"blk.{i}.ffn_{part}_exps").startswith("RPC")
        for part in ("up", "down", "gate"))]

def main_gpu(engine):
    return engine.target.setting("device"), devices_of(engine.target)

def tensor_split(engine):
    n_first, n_second = (layers_on(engine.target, f"RPC{i}", 6) for i in (0, 1))
    return engine.target.setting("tensor_split"), n_first > n_second, n_first + n_second

def moe(engine):
    return experts_here(engine.target), engine.draft and experts_here(engine.draft)

ONE = ("--split-mode", "none")
BOTH = ("--model-draft", experts, "--draft-type", "simple")
ROWS = [
    (dense, ONE, main_gpu, ("RPC0", {"RPC0"})),
    (dense, (*ONE, "--main-gpu", "1"), main_gpu, ("RPC1", {"RPC1"})),
    (dense, ("--tensor-split", "3,1"), tensor_split, ("3,1", True, 6)),
    (dense, ("--tensor-split", "1,3"), tensor_split, ("1,3", False, 6)),
    (experts, (), moe, ([], None)),
    (experts, ("--n-cpu-moe", "1"), moe, ([0], None)),
    (experts, ("--cpu-moe", "true"), moe, ([0, 1], None)),
    (experts, (*BOTH, "--n-cpu-moe", "1"), moe, ([0], [])),
    (experts, (*BOTH, "--n-cpu-moe-draft", "1"), moe, ([], [0])),
    (experts, (*BOTH, "--cpu-moe-draft", "true"), moe, ([], [0, 1])),
    (experts, (*BOTH, "--device-draft", "RPC1", "--n-cpu-moe-draft", "1"), moe, ([], [0])),
]

def generated(model, flags, read, wanted):  # its models leave the servers before the next come
    with engine_of("--model", model, "--rpc", endpoints, "--probe", "false", *flags) as engine:
        found = read(engine)
        assert found == wanted, (flags, found)
        return fused(engine, [list(range(1, 20))], 8)

outputs = {}
for model, flags, *reading in ROWS:
    tokens = generated(model, flags, *reading)
    assert outputs.setdefault(model, tokens) == tokens, flags
"""

NUMA = """
numa, dense = sys.argv[1:]
with engine_of("--model", dense, "--numa", numa) as engine:
    fused(engine, [engine.target.tokenize("def parse(text):")], 4)
"""


def run(code: str, *arguments: str, **variables: str) -> None:
    """Runs a program over the service's engine in a process of its own, and fails where it does."""
    kept = {key: value for key, value in os.environ.items() if "DRAFTHOUSE_" not in key}
    done = subprocess.run(
        [sys.executable, "-c", LOADED + code, *arguments],
        cwd=ROOT,
        env=kept | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"} | variables,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_devices_and_experts_are_where_flags_say(tmp_path: Path) -> None:
    experts = write_model(tmp_path / "experts.gguf", "qwen3moe")
    with rpc_server(tmp_path) as first, rpc_server(tmp_path) as second:
        endpoints = f"{first.endpoint},{second.endpoint}"
        run(TABLE, endpoints, str(MODELS / DENSE), str(experts))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that pretends two memory nodes, and writes down where threads are put."""
    path = tmp_path_factory.mktemp("numa") / "numa_shim.so"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", str(path), str(SHIM)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        missing("there is no C compiler to make what pretends memory nodes")
    return path


@pytest.mark.parametrize(
    ("numa", "wanted"),
    [
        ("off", set()),
        ("distribute", {0b01, 0b10, 0b11}),
        ("isolate", {0b10, 0b11}),
        ("numactl", {0b01, 0b11}),
    ],
)
def test_threads_are_put_on_the_memory_nodes_that_a_flag_says(
    tmp_path: Path, shim: Path, numa: str, wanted: set[int]
) -> None:
    """After each step ggml puts the thread that began it back on all CPUs."""
    log = tmp_path / "put.txt"
    log.touch()
    run(NUMA, numa, str(MODELS / DENSE), LD_PRELOAD=str(shim), NUMA_SHIM_LOG=str(log))
    assert {int(line, 16) for line in log.read_text().split()} == wanted
