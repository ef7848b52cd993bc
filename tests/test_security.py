"""docs/security.md: every bound names settings, metrics and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from drafthouse_server.config import SETTINGS
from drafthouse_server.serving import exposition

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "security.md"
NONE = "–"


def rows() -> list[tuple[str, list[str], list[str], list[str]]]:
    """Returns resource, settings, metrics and tests of each row of the table of bounds."""
    table = PAGE.read_text("utf-8").partition("## Bounds")[2].partition("\n\n**")[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and cells[0] != "resource" and not line.startswith("|---"):
            assert len(cells) == 5, line
            resource, _, *named = cells
            settings, metrics, tests = (re.findall(r"`([^`]+)`", cell) for cell in named)
            for names, cell in zip((settings, metrics), named, strict=False):
                assert names or cell == NONE, f"{resource}: {cell!r}"
            found.append((resource, settings, metrics, tests))
    return found


ROWS = rows()


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_bound_names_what_exists(row: tuple[str, list[str], list[str], list[str]]) -> None:
    _, settings, metrics, tests = row
    assert set(settings) <= set(SETTINGS)
    assert set(metrics) <= set(re.findall(r"`(drafthouse_\w+)`", exposition.reference()))
    assert tests, "no test"
    for test in tests:
        path, _, name = test.partition("::")
        assert name in functions(ROOT / path), test


def test_every_bound_on_clients_is_in_the_table() -> None:
    named = {name for _, settings, _, _ in ROWS for name in settings}
    groups = {"Bounds on clients", "Health and metrics"}
    missing = {s.name for s in SETTINGS.values() if s.group in groups} - named
    assert not missing
