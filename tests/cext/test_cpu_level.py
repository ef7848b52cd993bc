"""Which of a wheel's libraries is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.built import needs_extension

import drafthouse_engine
from drafthouse_engine.cpu_level import CPU_LEVEL, cpu_level, level_folder
from drafthouse_server.host.processor import read_processor

pytestmark = needs_extension()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("v2", "v3", "v4"):
        (tmp_path / "levels" / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("n_cpu", "name"), [(2, "v2"), (3, "v3"), (4, "v4"), (5, "v4")])
def test_the_highest_that_the_cpu_has(package: Path, n_cpu: int, name: str) -> None:
    assert level_folder(package, n_cpu, {}) == package / "levels" / name


def test_a_variable_names_a_lower_one(package: Path) -> None:
    assert level_folder(package, 4, {CPU_LEVEL: "v2"}) == package / "levels" / "v2"
    with pytest.raises(ImportError, match="'v9', and drafthouse_engine has the levels v2, v3, v4"):
        level_folder(package, 4, {CPU_LEVEL: "v9"})
    with pytest.raises(
        ImportError, match="built for x86-64-v4 and newer, and this CPU is x86-64-v3"
    ):
        level_folder(package, 3, {CPU_LEVEL: "v4"})


def test_a_cpu_below_all_levels_is_told_so(package: Path) -> None:
    with pytest.raises(ImportError, match="x86-64-v2 and newer, and this CPU is x86-64-v1; build"):
        level_folder(package, 1, {})


def test_what_was_built_for_one_machine_has_no_levels(tmp_path: Path) -> None:
    assert level_folder(tmp_path, 0, {CPU_LEVEL: "v3"}) is None
    assert level_folder(Path(drafthouse_engine.__file__).parent) is None


def test_the_cpu_says_itself_what_the_kernel_says_of_it() -> None:
    assert cpu_level() == read_processor().level
