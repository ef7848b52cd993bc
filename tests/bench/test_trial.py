"""The trial of the choice of K: what its table says of rounds that are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from drafthouse_bench import trial

CELL = trial.Cell("dense", 1)


def arms(**speeds: float) -> dict[str, Any]:
    """Returns a round with these speeds; `K1` stands for `K=1`."""
    return {
        name.replace("K", "K="): {"tokens_per_s": speed, "n_cores": 2.0, "changes_per_s": 0.0}
        for name, speed in speeds.items()
    }


def table(
    rounds: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    store = trial.Store(tmp_path / "trial.json")
    for found in rounds:
        store.add(CELL, 1.0, 0, found)
    with pytest.MonkeyPatch.context() as patch:
        only = f"cell={CELL.model},streams={CELL.n_streams}"
        patch.setattr(
            sys,
            "argv",
            ["trial", "--table", "--only", only, "--json", str(tmp_path / "trial.json")],
        )
        trial.main()
    return capsys.readouterr().out.splitlines()


def test_a_k_far_behind_in_the_first_round_is_let_go_and_none_never() -> None:
    first = arms(adaptive=100, none=40, K1=100, K2=81, K3=79)
    assert trial._dropped(first, 0.8) == {"K=3"}
    assert trial._dropped(first, 0.0) == set()


def test_a_round_is_compared_with_the_best_arm_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = arms(adaptive=98, none=100, K1=90, K2=50, K3=50)
    lucky = arms(adaptive=98, none=100, K1=140, K2=50, K3=50)
    lines = table([common] * 4 + [lucky], tmp_path, capsys)
    assert lines[2].split()[0] == "0.980"


def test_an_arm_that_was_let_go_is_shown_and_is_not_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        arms(adaptive=95, none=100, K1=70, K2=120, K3=50),
        arms(adaptive=95, none=100, K1=70),
        arms(adaptive=95, none=100, K1=70),
    ]
    lines = table(rounds, tmp_path, capsys)
    assert "K=2 120.0 (120.0-120.0) once" in lines[1]
    assert "best none" in lines[1]
    assert lines[2].split()[0] == "0.950"
    assert "does not hold" in lines[3]


def test_a_cell_below_its_bar_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [arms(adaptive=90, none=100, K1=70, K2=60, K3=50)] * 3
    assert "below 0.93 in dense x1" in table(rounds, tmp_path, capsys)[-1]
    rounds = [arms(adaptive=99, none=100, K1=70, K2=60, K3=50)] * 3
    (tmp_path / "trial.json").unlink()
    assert table(rounds, tmp_path, capsys)[-1].endswith(": holds")
