"""The verdict on quantised weights: what it lets pass, and what not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tests.archs.quants import RATIO_MAX, errors, is_worse

N_ROWS, N_VOCAB = 64, 300


def rows(scale: float, seed: int) -> npt.NDArray[np.float64]:
    return scale * np.random.default_rng(seed).standard_normal((N_ROWS, N_VOCAB))


def test_an_error_is_of_a_row() -> None:
    right = np.zeros((2, 4))
    found = np.array([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    assert errors(found, right).tolist() == [1.0, 0.0]


def test_errors_of_the_same_size_are_as_good() -> None:
    right = rows(3.0, 0)
    assert not is_worse(right + rows(0.1, 1), right + rows(0.1, 2), right)
    assert not is_worse(right, right, right)


def test_one_row_whose_expert_is_another_is_chance() -> None:
    right = rows(3.0, 0)
    ours = right + rows(0.1, 1)
    ours[7] += rows(1.0, 3)[7]
    assert not is_worse(ours, right + rows(0.1, 2), right)


def test_larger_errors_and_no_numbers_are_wrong() -> None:
    right, reference = rows(3.0, 0), rows(3.0, 0) + rows(0.1, 2)
    assert is_worse(right + rows(0.1 * RATIO_MAX * 1.2, 1), reference, right)
    ours = right.copy()
    ours[0, 0] = np.nan
    assert is_worse(ours, reference, right)
