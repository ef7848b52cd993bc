"""Prompts share the beginnings that cells are about, and fit their slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.archs.driver import N_CTX, N_CTX_LONG, N_OUTPUT
from tests.archs.texts import DEEP, LONG, N_LEAD, SHORT, Texts
from tests.support.built import needs_extension

pytestmark = needs_extension()

N_SMALL = 256
"""Cells of a small cache for windows, at least."""


def n_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two prompts share at their beginnings."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize(("texts", "n_lead"), [(SHORT, 0), (LONG, N_LEAD)])
def test_prompts_share_what_they_are_made_to_share(texts: Texts, n_lead: int) -> None:
    cuts = [cut for cut in texts.cuts if n_shared(cut, texts.base) > n_lead]
    assert [n_shared(cut, texts.base) - n_lead for cut in cuts] == [110, 95, 75, 52, 36]
    shared = [n_shared(part, texts.documents[i]) for i, part in enumerate(texts.parts[:3])]
    assert shared == [n_lead + 60, n_lead + 44, n_lead + 28]
    firsts = {tuple(prompt[:3]) for prompt in texts.prompts}
    assert len(firsts) == len(texts.prompts)  # nothing is shared by the others


def test_long_prompts_outgrow_small_caches_and_fit_their_slots() -> None:
    n_turn = 2 * N_OUTPUT + 10
    assert max(map(len, SHORT.all)) + n_turn <= N_CTX
    assert max(map(len, LONG.all)) + n_turn <= N_CTX_LONG
    assert min(map(len, LONG.all)) > N_SMALL


def test_some_long_prompts_share_what_a_small_cache_has_lost() -> None:
    deep = [n_shared(cut, LONG.base) for cut in LONG.cuts]
    assert [n for n in deep if n < N_LEAD] == list(DEEP)
    assert len(LONG.cuts[0]) - N_SMALL > DEEP[-1]
    assert all(
        n_shared(*pair) == DEEP[0] for pair in zip(LONG.parts[3:], LONG.documents, strict=True)
    )
    assert len(SHORT.cuts) == len(LONG.cuts) - len(DEEP)
