"""The page of `make archs`: EAGLE-3, small caches for windows and embeddings have their places."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.archs.cells import CELLS, EAGLE3, MTP, small
from tests.archs.embed import CELLS as EMBED_CELLS
from tests.archs.embed import POOLINGS
from tests.archs.judge import Verdict
from tests.archs.table import Row, is_wrong, page, proven, summary
from tests.archs.test_run import row
from tests.support.built import needs_extension

pytestmark = needs_extension()

EQUAL = Verdict("equal", n=8, n_drafted=5, n_accepted=2)


def with_cells(**kinds: Verdict) -> Row:
    """Returns a row in which all is equal, with other draft types, all cells of each alike."""
    found = row()
    more = {kind.replace("_", " "): dict.fromkeys(CELLS, cell) for kind, cell in kinds.items()}
    return dataclasses.replace(found, cells=found.cells | more)


def embedded(kind: str, **values: Any) -> Row:
    """Returns a row whose embeddings have one verdict in all cells."""
    verdict = Verdict(kind, **values)
    cells = {str(pooling): dict.fromkeys(EMBED_CELLS, verdict) for pooling in POOLINGS}
    return dataclasses.replace(row(), embeddings=cells, moved=0.5)


def columns(found: Row) -> list[str]:
    """Returns the columns of the only model's line."""
    (line,) = (line for line in page({"m": found}, "").splitlines() if line.startswith("| m | `"))
    return [column.strip() for column in line.split("|")[1:-1]]


def test_a_column_for_each_draft_type_and_a_dash_where_there_is_none() -> None:
    equal = f"`{'=' * len(CELLS)}`"
    _, *marks, windows, drafts, _reused, _history, _peer = columns(with_cells(eagle3=EQUAL))
    assert marks == [equal, equal, equal, "–", equal]
    assert windows == "–"
    assert drafts == f"0/0, 0/0, –, {2 * len(CELLS)}/{5 * len(CELLS)}"


def test_small_caches_have_a_column_in_the_order_of_the_others() -> None:
    tie, refused = Verdict("tie", 0.01, 1, 8), Verdict("refused", reason="it cannot")
    found = with_cells(small_simple=refused, small_none=tie, eagle3=EQUAL)
    assert columns(found)[6] == "`~~~~~~~~` `rrrrrrrr`"
    head = next(line for line in page({"m": found}, "").splitlines() if line.startswith("| model"))
    assert len(columns(found)) == len(head.split("|")) - 2
    assert "small none ~~~~~~~~ gap 0.01" in summary(found)


@pytest.mark.parametrize("kind", [EAGLE3, MTP, small("none"), small(EAGLE3)])
def test_a_cell_of_any_draft_type_that_differs_is_wrong(kind: str) -> None:
    differs = with_cells(**{kind.replace(" ", "_"): Verdict("differs", 1.0, 1, 8)})
    assert is_wrong(differs)
    assert proven({"m": differs}) == []
    refused = with_cells(**{kind.replace(" ", "_"): Verdict("refused", reason="it cannot")})
    assert not is_wrong(refused)
    assert proven({"m": refused}) == []  # no word of it without every draft type


def test_a_model_that_may_not_draft_for_itself_is_proven_with_small_caches_too() -> None:
    found = with_cells(small_none=EQUAL, small_simple=Verdict("refused", reason="it cannot"))
    assert proven({"m": found}) == ["llama"]


def test_what_small_caches_cannot_reuse_is_not_wrong() -> None:
    assert not is_wrong(with_cells(small_none=Verdict("equal", n=8)))


@pytest.mark.parametrize("kind", ["tie", "refused"])
def test_embeddings_have_a_table_of_their_own(kind: str) -> None:
    found = embedded(kind, gap=0.25, reason="why", is_peer_same=True)
    mark = {"tie": "~", "refused": "r"}[kind] * len(EMBED_CELLS)
    text = page({"m": found}, "")
    assert f"| m | `{mark}` | `{mark}` | `{mark}` | 0.25 | 0.5 | {', '.join(POOLINGS)} |" in text
    assert f"m, {POOLINGS[0]}: why." in text
    assert not is_wrong(found)
    assert f"embeddings {POOLINGS[0]} {mark}" in summary(found)


@pytest.mark.parametrize("kind", ["differs", "died"])
def test_embeddings_that_differ_are_wrong(kind: str) -> None:
    assert is_wrong(embedded(kind))


def test_no_table_of_embeddings_where_no_model_was_asked() -> None:
    assert "## Embeddings" not in page({"m": row()}, "")
