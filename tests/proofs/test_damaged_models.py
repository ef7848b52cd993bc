"""Servers of damaged models: each serves, or says why not, and none dies without a word or hangs.

Numbers of the header and tensors (missing, of another type, of another shape) are changed at
random, in the demo models; by `--whole` also in those of `make archs`, where they are.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, quants
from tests.support.built import needs_extension
from tests.support.demo import MODELS, TARGETS
from tests.support.gguf_copy import Tensor, copied
from tests.support.ports import free_port

import drafthouse

pytestmark = [*needs_extension(), pytest.mark.timeout(3000)]

FEW, MANY = 6, 200
START_S = 120.0
ARCHS = Path(__file__).resolve().parents[2] / "build" / "archs" / "models-1"

KINDS = ("header", "header", "header", "missing", "type", "shape", "both")
TYPES = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")]
WHOLE = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
SHAPES: tuple[Callable[[Any], Any], ...] = (
    lambda data: data[: max(1, len(data) // 2)],
    lambda data: np.concatenate([data, data]),
    lambda data: data.T,
    lambda data: data[..., : max(1, data.shape[-1] - 32)],
)
UNSIGNED_MAX = 2**32 - 1


def test_each_serves_or_says_why_not(tmp_path: Path, *, is_whole: bool) -> None:
    files = [MODELS / name for name in TARGETS.values()]
    if is_whole:
        files = files * 20 + sorted(ARCHS.glob("*.gguf"))
    for seed in range(MANY if is_whole else FEW):
        chance = random.Random(seed)
        source, path = chance.choice(files), tmp_path / "damaged.gguf"
        check(path, f"seed {seed}: {source.stem}, {damage(chance, source, path)}", tmp_path)


def damage(chance: random.Random, source: Path, path: Path) -> str:
    """Writes a damaged copy; returns what is wrong with it."""
    reader, kind, told = GGUFReader(source), chance.choice(KINDS), list[str]()
    values = drawn_values(chance, reader) if kind in ("header", "both") else {}
    hit = chance.choice([tensor.name for tensor in reader.tensors])
    how = chance.choice(["missing", "type", "shape"]) if kind == "both" else kind
    to_type, reshaped = chance.choice(TYPES), chance.choice(SHAPES)

    def change(name: str, tensor: Tensor) -> Tensor | None:
        data, old = tensor
        if name != hit or how == "header":
            return tensor
        told.append(f"{name} {how} {to_type.name if how == 'type' else ''}")
        if how == "missing":
            return None
        if old not in WHOLE:
            return tensor
        if how == "shape":
            return np.ascontiguousarray(reshaped(data)), old
        is_fit = data.shape[-1] % 32 == 0 or to_type in WHOLE
        return (quants.quantize(data.astype(np.float32), to_type), to_type) if is_fit else tensor

    copied(source, path, values, change=change)
    return f"{values} {told}"


def drawn_values(chance: random.Random, reader: GGUFReader) -> dict[str, bool | float | str | None]:
    """Draws one or two numbers, words or switches of the header that something depends on."""
    kinds: dict[GGUFValueType, Callable[[Any], Any]] = {
        GGUFValueType.UINT32: lambda old: chance.choice(
            [0, 1, 2, 3, 7, old // 2, 10**6, max(0, old - 1), UNSIGNED_MAX]
            + [n for n in (old + 1, old * 2) if n <= UNSIGNED_MAX]
        ),
        GGUFValueType.FLOAT32: lambda old: chance.choice(
            [0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf"), old * 2]
        ),
        GGUFValueType.BOOL: lambda old: not old,
        GGUFValueType.STRING: lambda old: chance.choice(["", "x", "gpt2", "llama", "none"]),
    }
    fields = [
        field
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "general.")) and field.types[0] in kinds
    ]
    drawn = chance.sample(fields, chance.choice([1, 1, 2]))
    return {field.name: kinds[field.types[0]](field.contents()) for field in drawn}


def check(path: Path, told: str, folder: Path) -> None:
    """Starts a server of a damaged model, has it generate where it serves, and ends it."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", str(port)]
    command += ["--model", str(path), "--parallel", "2", "--draft-type", "auto"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | {"OMP_WAIT_POLICY": "passive"}
        )
    try:
        ends_s = time.monotonic() + START_S
        while process.poll() is None and "listening at" not in log.read_text(errors="replace"):
            assert time.monotonic() < ends_s, f"{told}: it neither serves nor ends"
            time.sleep(0.05)
        if process.poll() is None:
            generate(f"127.0.0.1:{port}", told)
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0, told
        else:
            assert process.returncode in (1, 2), f"{told}: {process.returncode}"
            *_, last = log.read_text(errors="replace").splitlines()
            assert last.startswith("drafthouse: "), f"{told}: {last}"
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(errors="replace"), told


def generate(target: str, told: str) -> None:
    """Has some tokens generated; a context of three tokens may be too short for that."""
    with (
        drafthouse.Client(target, retry=None) as client,
        contextlib.suppress(drafthouse.InvalidArgument),
    ):
        result = client.generate("def parse(text):\n", max_output_tokens=8).result()
        assert result.token_ids, told
