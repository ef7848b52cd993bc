"""Models of every architecture with an MTP block draft for themselves, and give the same tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from models import archs
from models.archs import RECIPES, write_model
from models.archs_mtp import MTP_RECIPES
from tests.archs.cells import MTP
from tests.archs.driver import Answer, Driver, make_config
from tests.archs.judge import assert_same
from tests.archs.texts import SHORT
from tests.support.built import needs_extension

from drafthouse_server.errors import ModelLoadError

pytestmark = needs_extension()

ASKED = (SHORT.prompts[1], SHORT.prompts[4])
N_OUTPUT = 32


@pytest.mark.parametrize("name", MTP_RECIPES)
def test_drafts_of_an_mtp_block_change_no_token(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / f"{name}.gguf", name)
    right, found = answers(path, "none"), answers(path, MTP)
    assert_same(path, right, found)
    n_drafted = sum(answer.n_drafted for answer in found)
    assert 0 < sum(answer.n_accepted for answer in found) < n_drafted


def test_several_heads_are_refused_where_llama_cpp_would_end_the_process(tmp_path: Path) -> None:
    one = RECIPES["deepseek2-mtp"]
    two = dataclasses.replace(
        one,
        blocks=[*one.blocks, one.blocks[-1]],
        values={**one.values, "nextn_predict_layers": 2},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archs, "RECIPES", {"two": two})
        path = write_model(tmp_path / "two.gguf", "two")
    with pytest.raises(ModelLoadError, match="has 2 MTP"):
        Driver(make_config(path, MTP, n_slots=1))
    with Driver(make_config(path, "auto", n_slots=1)) as driver:  # it drafts nothing
        assert driver.engine.limits.draft_type == "none"


def answers(path: Path, draft_type: str) -> list[Answer]:
    """Asks one after the other."""
    with Driver(make_config(path, draft_type, n_slots=1)) as driver:
        driver.renew(prefix_cache=False)
        return [driver.ask([prompt], n_output=N_OUTPUT)[0] for prompt in ASKED]
