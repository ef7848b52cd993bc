"""Damaged numbers in a model's header are refused before llama.cpp ends the process over them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.bench.malformed import values
from tests.demo import EAGLE3, MODELS, SIMPLE, TARGETS

from drafthouse_engine import Model
from drafthouse_engine.errors import BadModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]


FILES = {
    "mimo2": TARGETS["dense"],
    "qwen35": TARGETS["hybrid"],
    "qwen3": SIMPLE,
    "eagle3": EAGLE3["dense"],
}


def bits(number: float) -> int:
    """Returns the bits of a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("mimo2.nextn_predict_layers", 7),
        ("mimo2.attention.layer_norm_rms_epsilon", bits(-1.0)),
        ("mimo2.attention.layer_norm_rms_epsilon", bits(float("nan"))),
        ("mimo2.rope.freq_base", bits(0.0)),
        ("mimo2.rope.freq_base", bits(float("inf"))),
        ("mimo2.rope.freq_base_swa", bits(-2.0)),
        ("qwen3.rope.dimension_count", 32),
        ("qwen3.attention.value_length", 32),
        ("qwen35.ssm.inner_size", 100),
        ("qwen35.ssm.inner_size", 0),
        ("qwen35.ssm.state_size", 0),
        ("qwen35.ssm.time_step_rank", 3),
        ("qwen35.ssm.group_count", 0),
        ("qwen35.ssm.group_count", 3),
        ("qwen35.ssm.conv_kernel", 0),
        ("qwen35.ssm.conv_kernel", 65535),
        ("qwen35.attention.value_length", 32),
        ("eagle3.block_count", 2),
        ("eagle3.attention.value_length", 32),
        ("mimo2.block_count", 0),
        ("mimo2.block_count", 513),
        ("mimo2.block_count", 2**31),
        ("mimo2.nextn_predict_layers", 32768),
        ("mimo2.rope.dimension_count", 7),
        ("mimo2.rope.dimension_count", 1000),
    ],
)
def test_a_number_that_would_abort_the_loader_is_refused(
    key: str, number: int, tmp_path: Path
) -> None:
    data = bytearray((MODELS / FILES[key.split(".", maxsplit=1)[0]]).read_bytes())
    value = next(v for v in values(bytes(data)) if v.key == key)
    data[value.at : value.at + value.width] = number.to_bytes(value.width, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(BadModel, match=key.split(".", 1)[1]):
        Model(path)
