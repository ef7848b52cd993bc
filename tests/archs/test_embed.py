"""Embeddings are compared to the last bit, and encoders give theirs alone and at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models.archs import write_model
from models.archs_encoder import ENCODER_RECIPES
from tests.archs import embed
from tests.archs.embed import ALONE, AT_ONCE, CHANGED, PLAIN, TIE, compare, moved
from tests.archs.texts import SHORT
from tests.support.built import needs_extension

pytestmark = needs_extension()

RIGHT = [[3.0, 4.0], [0.0, -2.0]]


def test_equal_is_to_the_last_bit() -> None:
    assert compare(RIGHT, RIGHT).kind == "equal"
    near = [[3.0, float(np.nextafter(np.float32(4), np.float32(5)))], RIGHT[1]]
    verdict = compare(near, RIGHT)
    assert (verdict.kind, verdict.n_apart, verdict.n) == ("tie", 1, 2)
    assert 0 < verdict.gap < 1e-6


def test_a_difference_is_a_part_of_the_rows_length() -> None:
    assert compare([[3.0, 4.0 + 4 * TIE], RIGHT[1]], RIGHT).kind == "tie"  # of length 5
    assert compare([RIGHT[0], [0.0, -2.0 - 4 * TIE]], RIGHT).kind == "differs"  # of length 2


@pytest.mark.parametrize(
    "rows", [[[3.0, float("nan")], [0.0, -2.0]], [[3.0], [0.0]], [[3.0, 4.0]]], ids=str
)
def test_what_is_no_number_or_has_another_shape_differs(rows: list[list[float]]) -> None:
    assert compare(rows, RIGHT).kind == "differs"


def test_moved_is_that_of_the_row_that_moves_least() -> None:
    assert moved(RIGHT, [[3.0, 5.0], [1.0, -2.0]]) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ENCODER_RECIPES)
def test_an_encoder_gives_the_same_rows_at_once_as_alone(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / f"{name}.gguf", name)
    assert embed.is_asked(path)
    found = embed.run_poolings(path)
    assert set(found) == set(embed.POOLINGS)
    for pooling, rows in found.items():
        assert not isinstance(rows, str), f"{pooling}: {rows}"
        assert len(rows[ALONE]) == len(SHORT.prompts)
        for cell in (AT_ONCE, PLAIN):
            assert compare(rows[cell], rows[ALONE]).kind in ("equal", "tie"), f"{pooling}: {cell}"
        assert moved(rows[ALONE], rows[CHANGED]) > 2 * TIE, pooling


def test_models_that_generate_are_asked_by_name(tmp_path: Path) -> None:
    assert embed.is_asked(write_model(tmp_path / "llama.gguf", "llama"))
    assert not embed.is_asked(write_model(tmp_path / "gpt2.gguf", "gpt2"))
