"""The generated pages of docs/ are current."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import reference


@pytest.mark.parametrize("path", reference.pages(), ids=lambda path: path.name)
def test_a_generated_page_is_current(path: Path) -> None:
    assert path.read_text("utf-8") == reference.pages()[path], "run `make docs`"
