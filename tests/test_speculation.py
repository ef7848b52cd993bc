"""K per sequence: what is asked for, cut down to what is of use."""

from __future__ import annotations

import pytest

from drafthouse_server.sequence import Sequence
from drafthouse_server.speculation import FixedDraft
from drafthouse_server.step import EngineLimits

LIMITS = EngineLimits("mtp", 4, 400, 100, 64, 64, 5, 24)


def make(n_draft: int | None = None, n_output_max: int = 50, n_computed: int = 10) -> Sequence:
    sequence = Sequence("r", [1] * n_computed, object(), n_draft=n_draft, n_output_max=n_output_max)
    sequence.tokens.append(7)
    sequence.n_computed = n_computed
    return sequence


@pytest.mark.parametrize(("n_draft", "chosen"), [(None, 3), (0, 0), (1, 1), (5, 5), (64, 5)])
def test_the_request_decides_or_else_the_default(n_draft: int | None, chosen: int) -> None:
    assert FixedDraft(3).choose(make(n_draft), LIMITS) == chosen


@pytest.mark.parametrize(("n_left", "chosen"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_no_more_than_the_output_can_use(n_left: int, chosen: int) -> None:
    assert FixedDraft(3).choose(make(n_output_max=1 + n_left), LIMITS) == chosen


@pytest.mark.parametrize(("n_computed", "chosen"), [(95, 3), (97, 2), (98, 1), (99, 0), (100, 0)])
def test_no_more_than_the_context_holds(n_computed: int, chosen: int) -> None:
    assert FixedDraft(3).choose(make(n_computed=n_computed), LIMITS) == chosen


def test_none_when_the_draft_is_cold_or_cells_are_short() -> None:
    cold, short = make(), make()
    cold.is_draft_cold = True
    short.n_no_room = 1
    assert FixedDraft(3).choose(cold, LIMITS) == 0
    assert FixedDraft(3).choose(short, LIMITS) == 0


def test_none_when_the_engine_does_not_speculate() -> None:
    limits = EngineLimits("none", 4, 400, 100, 64, 64, 0, 4)
    assert FixedDraft(3).choose(make(n_draft=5), limits) == 0
