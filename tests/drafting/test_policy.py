"""K per sequence: as asked for, or for the most tokens per second; never more than is of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft, level
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import EngineLimits

LIMITS = EngineLimits("mtp", 4, 400, 100, 64, 64, 5, 24)


def make(n_draft: int | None = None, n_output_max: int = 50, n_computed: int = 10) -> Sequence:
    request = Request("r", [1] * n_computed, n_draft=n_draft)
    sequence = Sequence(request, object(), n_output_max=n_output_max, seq_id=0)
    sequence.tokens.append(7)
    sequence.n_computed = n_computed
    return sequence


def choose(policy: DraftPolicy, sequence: Sequence, limits: EngineLimits = LIMITS) -> int:
    return policy.choose_all([sequence], limits, 100)[0]


# As asked for.


@pytest.mark.parametrize(("n_draft", "chosen"), [(None, 3), (0, 0), (1, 1), (5, 5), (64, 5)])
def test_the_request_decides_or_else_the_default(n_draft: int | None, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_draft)) == chosen


@pytest.mark.parametrize(("n_left", "chosen"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_no_more_than_the_output_can_use(n_left: int, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_output_max=1 + n_left)) == chosen


@pytest.mark.parametrize(("n_computed", "chosen"), [(95, 3), (97, 2), (98, 1), (99, 0), (100, 0)])
def test_no_more_than_the_context_holds(n_computed: int, chosen: int) -> None:
    assert choose(FixedDraft(3), make(n_computed=n_computed)) == chosen


def test_none_when_the_draft_is_cold_or_cells_are_short() -> None:
    cold, short = make(), make()
    cold.is_draft_cold = True
    short.n_no_room = 1
    for policy in (FixedDraft(3), AdaptiveDraft(5)):
        assert choose(policy, cold) == 0
        assert choose(policy, short) == 0


def test_none_when_the_engine_does_not_speculate() -> None:
    limits = EngineLimits("none", 4, 400, 100, 64, 64, 0, 4)
    assert choose(FixedDraft(3), make(n_draft=5), limits) == 0
    assert choose(AdaptiveDraft(0), make(), limits) == 0
    assert AdaptiveDraft(4).choose_all([], LIMITS, 10) == []


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 60))
def test_levelling_cuts_the_largest_and_uses_what_there_is(
    requested: list[int], n_left: int
) -> None:
    granted = level(requested, n_left)
    assert all(map(int.__le__, granted, requested))
    assert (
        sum(granted) == min(sum(requested), n_left)
        or max(granted) <= min(g for g, w in zip(granted, requested, strict=True) if g < w) + 1
    )
