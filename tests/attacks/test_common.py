"""What counts as worse for a victim."""

from __future__ import annotations

from typing import Any

import pytest
from tests.attacks.common import worse


def times(median: float, tail: float, **errors: int) -> dict[str, Any]:
    return {"p50": median, "p95": tail, "errors": errors}


@pytest.mark.parametrize(
    ("before", "during", "is_worse"),
    [
        (times(7, 8), times(14, 39), False),  # a step under way explains it
        (times(7, 8), times(15, 16), True),  # twice the median
        (times(4, 5), times(9, 12), False),  # clocks on a busy machine tell no more
        (times(7, 8), times(8, 41), True),  # a tail that no step explains
        (times(30, 45), times(50, 89), False),
        (times(7, 8), times(7, 8, UNAVAILABLE=1), True),
        (times(7, 8, UNAVAILABLE=2), times(7, 8, UNAVAILABLE=1), False),
        (times(7, 8), times(-1, -1), True),  # not served at all
    ],
)
def test_a_victim_fares_worse_beyond_twice(
    before: dict[str, Any], during: dict[str, Any], is_worse: bool
) -> None:
    assert worse(before, during, 2) is is_worse


def test_a_victim_that_was_never_served_tells_nothing() -> None:
    with pytest.raises(SystemExit, match="not served before"):
        worse(times(-1, -1), times(7, 8), 2)
