"""Damaged numbers in a model's header are refused before llama.cpp ends the process over them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.malformed import values
from tests.demo import MODELS, TARGETS

from drafthouse_engine import Model
from drafthouse_engine.errors import BadModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("key", "number"),
    [
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
    data = bytearray((MODELS / TARGETS["dense"]).read_bytes())
    value = next(v for v in values(bytes(data)) if v.key == key)
    data[value.at : value.at + value.width] = number.to_bytes(value.width, "little")
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(BadModel, match=key.split(".", 1)[1]):
        Model(path)
