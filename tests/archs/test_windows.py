"""Small caches for windows give the tokens of full ones, also where a reused prefix is refilled."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from models.archs import write_model
from tests.archs.cells import N_UBATCH_SMALL, run_cells, small
from tests.archs.driver import N_CTX_LONG, Answer, Driver, make_config
from tests.archs.judge import assert_same
from tests.archs.texts import LONG, draw
from tests.archs.windows import has_window, lengthened
from tests.support.built import needs_extension

pytestmark = [*needs_extension(), pytest.mark.timeout(300)]

MODELS = ("cohere2", "gpt-oss")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, name = tmp_path_factory.mktemp("windows"), str(request.param)
    return lengthened(write_model(folder / f"{name}.gguf", name), folder / "long.gguf")


def driver_of(model: Path, *, is_full: bool = False, **settings: object) -> Driver:
    """Returns a driver whose windows have small caches, or full ones."""
    sizes = {"ubatch_size": N_UBATCH_SMALL, "max_model_len": N_CTX_LONG}
    return Driver(make_config(model, "none", 1, swa_full=is_full, **sizes, **settings))


def test_a_long_copy_differs_in_one_number(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", "cohere2")
    before, copy = source.read_bytes(), lengthened(source, tmp_path / "long.gguf")
    after = copy.read_bytes()
    assert source.read_bytes() == before
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 2  # of 256 and 512
    assert GGUFReader(copy).fields["cohere2.context_length"].contents() == N_CTX_LONG


def test_a_window_is_told_by_the_file(tmp_path: Path) -> None:
    assert has_window(write_model(tmp_path / "c.gguf", "cohere2"))
    assert not has_window(write_model(tmp_path / "l.gguf", "llama"))


def test_where_no_layer_has_a_window_there_are_no_cells(tmp_path: Path) -> None:
    path = write_model(tmp_path / "llama.gguf", "llama")
    assert run_cells(lengthened(path, tmp_path / "long.gguf"), (small("none"),)) == {}


def test_small_caches_give_the_tokens_of_full_ones(model: Path) -> None:
    kinds = small("none"), small("ngram-simple")
    found = run_cells(model, kinds)
    assert set(found) == set(kinds)
    with driver_of(model, is_full=True) as driver:
        assert not driver.has_small_windows
        driver.renew(prefix_cache=False)
        right = [driver.ask([prompt])[0] for prompt in LONG.prompts]
    for kind in kinds:
        for cell in ("alone", "crowd"):
            answers = found[kind][cell]
            assert not isinstance(answers, str), answers
            assert_same(model, right, answers)


def test_a_reused_prefix_keeps_its_window_while_a_long_rest_is_placed(model: Path) -> None:
    """Patch 0020: later ubatches of a batch dropped cells that the first one still reads."""
    with driver_of(model) as driver:
        assert driver.has_small_windows
        wrapped = LONG.base[:260]  # with its answer more than the cells of a small cache
        rest = [LONG.base[:60] + draw(900 + n, n) for n in (260, 300, 340)]
        for prompt in rest:
            found = _after(driver, wrapped, prompt)
            assert found.n_reused == 60
            driver.renew(prefix_cache=False)
            assert_same(model, driver.ask([prompt]), [found])


def test_a_prefix_whose_window_is_lost_is_computed_again(model: Path) -> None:
    with driver_of(model) as driver:
        found = _after(driver, LONG.base, LONG.base[:60] + draw(910, 60))
        assert found.n_reused == 0
        found = _after(driver, LONG.base, LONG.base[:-5] + draw(911, 40))
        assert found.n_reused == len(LONG.base) - 5


def _after(driver: Driver, first: list[int], prompt: list[int]) -> Answer:
    """Answers a prompt in the slot that another has left."""
    driver.renew()
    driver.ask([first])
    return driver.ask([prompt])[0]
