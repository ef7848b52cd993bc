"""One model of each kind of memory gives the same tokens, whatever way it is asked.

The right ones are those that it gives alone and without drafts. `make archs` does the same for all
architectures, beside llama-server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.archs import KINDS, RECIPES, write_model
from tests.archs.cells import CELLS, run_cells
from tests.archs.driver import N_OUTPUT, Alone, Answer, Driver, make_config
from tests.archs.judge import TIE, Judge
from tests.archs.texts import SHORT
from tests.support.built import needs_extension

from drafthouse_engine import PROVEN

pytestmark = [*needs_extension(), pytest.mark.timeout(300)]

RECURRENT = {"mamba2", "jamba", "lfm2", "minimax-01"}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return write_model(tmp_path_factory.mktemp("archs") / f"{name}.gguf", name)


@pytest.fixture(scope="module")
def judge(model: Path) -> Iterator[Judge]:
    with Judge(model) as judge:
        yield judge


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Alone]:
    with Driver(make_config(model, "none", n_slots=1)) as driver:
        yield Alone(driver)


def test_an_early_token_matters(judge: Judge) -> None:
    """Else a cache that loses a token would not be noticed: upstream's own models are like that."""
    assert judge.history(SHORT.prompts[4], (0, len(SHORT.prompts[4]) // 2)) > 10 * TIE


@pytest.mark.parametrize("draft_type", ["none", "ngram-simple"])
def test_every_way_gives_the_tokens_of_one_alone(
    model: Path, judge: Judge, alone: Alone, draft_type: str
) -> None:
    found = run_cells(model, (draft_type,))[draft_type]
    assert set(found) == set(CELLS)
    for name, answers in found.items():
        assert not isinstance(answers, str), f"{name}: {answers}"
        verdict = judge.judge(answers, alone)
        assert verdict.kind in ("equal", "tie"), f"{name}: {verdict}"
        # More than a few would be a fault that happens to stay small.
        assert verdict.n_apart <= 2, f"{name}: {verdict}"
        if name != "saved":  # drafted by the engine alone
            assert (verdict.n_drafted > 0) == (draft_type != "none"), name
    assert total(found["slots"]) > 0
    # What is recurrent cannot be cut: it goes on from a whole prefix only.
    assert (total(found["cut"]) > 0) == (model.stem not in RECURRENT)
    assert total(found["host"]) > 0


def total(answers: list[Answer] | str) -> int:
    """Returns the tokens that were not computed again."""
    assert not isinstance(answers, str)
    return sum(answer.n_reused for answer in answers)


def test_a_model_may_draft_for_itself_unless_it_is_recurrent(
    model: Path, judge: Judge, alone: Alone
) -> None:
    found = run_cells(model, ("simple",))["simple"]
    if model.stem in RECURRENT:
        assert all("recurrent layers" in str(answers) for answers in found.values())
        return
    for name in ("alone", "crowd", "cut", "preempted"):
        answers = found[name]
        assert not isinstance(answers, str), f"{name}: {answers}"
        assert judge.judge(answers, alone).kind in ("equal", "tie"), name


def test_there_is_one_of_each_kind() -> None:
    assert len(KINDS) == len({RECIPES[name].kind for name in KINDS}) == 12


def test_what_is_wrong_is_noticed(model: Path, judge: Judge, alone: Alone) -> None:
    prompt = SHORT.base[:40]
    right = alone(prompt)
    changed = (alone([*prompt[:i], prompt[i] ^ 1, *prompt[i + 1 :]]) for i in range(10, 40))
    other = next((answer for answer in changed if answer != right), right)
    assert other != right, "no token of the prompt changes the answer"
    assert judge.judge([Answer(prompt, other)], alone).kind == "differs"


def test_the_shipped_list_is_that_of_the_last_page() -> None:
    pages = (Path(__file__).resolve().parents[2] / "docs" / "results").glob("*-archs.md")
    *_, text = (page.read_text("utf-8") for page in sorted(pages))
    proven = text.partition("## Proven")[2].partition("## Refused")[0]
    assert set(re.findall(r"`([\w.-]+)`", proven)) - {"probe"} == PROVEN
    assert {"mimo2", "qwen35", "qwen3"} <= PROVEN  # the demo models are served at once


@pytest.mark.parametrize("n_slots", [3, 5])
def test_slots_of_any_number(n_slots: int, tmp_path: Path) -> None:
    """Graphs are reserved before a step (patch 0032): rows had to be a multiple of the streams."""
    path = write_model(tmp_path / "kimi-linear.gguf", "kimi-linear")
    with Driver(make_config(path, "none", n_slots=n_slots)) as driver:
        assert all(len(it.tokens) == N_OUTPUT for it in driver.ask(SHORT.prompts[:n_slots]))
