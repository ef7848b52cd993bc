"""Drafts of an EAGLE-3 model change no token, and some of them are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from models.archs import write_model
from models.archs_eagle3 import layers_of, write_eagle3
from tests.archs.cells import EAGLE3, followers, run_cells
from tests.archs.driver import Answer
from tests.archs.judge import assert_same
from tests.support.built import needs_extension

pytestmark = needs_extension()

TARGETS = ("llama", "gpt-oss", "qwen3moe", "lfm2")
"""Dense; with a window; with experts; recurrent in part."""


def test_the_most_frequent_follower_is_drafted() -> None:
    assert followers([[1, 2, 1, 3, 1, 2], [2, 4]]) == {1: 2, 2: 1, 3: 1}
    assert followers([]) == {}


def test_the_first_the_middle_and_the_last_layer_are_read(tmp_path: Path) -> None:
    two = write_model(tmp_path / "llama.gguf", "llama")
    assert layers_of(two) == [0, 1, 1]
    assert layers_of(write_model(tmp_path / "m.gguf", "gemma3n")) == [0, 11, 21]
    with_block = write_model(tmp_path / "s.gguf", "step35")  # the MTP block is none of them
    assert layers_of(with_block) == [0, 1, 1]


def test_the_same_arguments_give_the_same_file(tmp_path: Path) -> None:
    target = write_model(tmp_path / "llama.gguf", "llama")
    paths = [write_eagle3(tmp_path / f"{i}.gguf", target, {1: 2}) for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    other = write_eagle3(tmp_path / "other.gguf", target, {1: 3})
    assert other.read_bytes() != paths[0].read_bytes()
    fields = GGUFReader(other).fields
    assert list(fields["eagle3.target_layers"].contents()) == [0, 1, 1]


@pytest.mark.parametrize("name", TARGETS)
def test_drafts_change_no_token_and_some_are_right(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / f"{name}.gguf", name)
    found = run_cells(path, ("none", EAGLE3))
    assert {*found} == {"none", EAGLE3}
    for cell in ("alone", "cut"):
        right, drafted = found["none"][cell], found[EAGLE3][cell]
        assert not isinstance(right, str)
        assert not isinstance(drafted, str), drafted
        assert_same(path, right, drafted)
        assert 0 < sum(it.n_accepted for it in drafted) < sum(it.n_drafted for it in drafted)


@pytest.mark.parametrize("name", ["gpt2", "qwen4exp-mtp"])
def test_an_architecture_whose_layers_are_not_shown_has_no_such_column(
    name: str, tmp_path: Path
) -> None:
    """qwen4exp marks rows that are too wide: an EAGLE-3 drafter ended the process."""
    assert run_cells(write_model(tmp_path / f"{name}.gguf", name), (EAGLE3,)) == {}


def test_a_target_that_cannot_be_loaded_refuses_every_cell(tmp_path: Path) -> None:
    found = run_cells(write_model(tmp_path / "bert.gguf", "bert"), (EAGLE3,))
    cells: list[list[Answer] | str] = list(found[EAGLE3].values())
    assert all("keeps no tokens in a cache" in str(cell) for cell in cells)
