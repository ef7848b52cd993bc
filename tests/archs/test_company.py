"""A sequence's logits do not depend on who shares its batch, without `exact` either."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from models.archs import write_model
from tests.archs.company import n_differing
from tests.support.built import needs_extension

from drafthouse_engine import build_facts
from drafthouse_server.host.processor import read_processor

pytestmark = needs_extension()

FEATURES = {"AVX2", "FMA", "F16C"}
"""What our products of plain weights need (patch 0023): a row of llama.cpp's own has other sums
alone than in company."""


@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
def test_a_sequence_has_the_logits_of_alone(kind: str, tmp_path: Path) -> None:
    facts = build_facts()
    has_kernels = "0023" in facts["patches"] and facts["cpu"] not in ("portable v1", "portable v2")
    if not (has_kernels and read_processor().features >= FEATURES):
        pytest.skip("patch 0023 is for AVX2: llama.cpp's own products differ in company")
    name = "deepseek2"  # latent attention: weights in planes, one for each head; and a router
    path = write_model(tmp_path / f"{name}.gguf", name, GGMLQuantizationType[kind])
    assert n_differing(path) == 0
