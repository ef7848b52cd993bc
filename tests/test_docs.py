"""What the documents point to is there, and the names that they use are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import drafthouse
from drafthouse_server.config import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "models" / "README.md"]
    if path.name != "CHANGELOG.md" and "results" not in path.parts  # these tell what was
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_of_the_sdk_are_its_own(page: Path) -> None:
    named = re.findall(r"`drafthouse\.([A-Z]\w+)", page.read_text("utf-8"))
    assert not [found for found in named if not hasattr(drafthouse, found)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_defaults_that_are_told_are_the_settings(page: Path) -> None:
    """Where a page has a number in brackets behind a setting, as in `drain_timeout_s` (20)."""
    told = re.findall(r"`([a-z]\w+)` \((\d+(?:\.\d+)?)\)", page.read_text("utf-8"))
    wrong = [
        (setting, number)
        for setting, number in told
        if setting in SETTINGS and float(number) != SETTINGS[setting].default
    ]
    assert not wrong


def test_performance_is_short_and_architecture_can_be_read_once() -> None:
    for page, n_lines_max in (("docs/performance.md", 150), ("ARCHITECTURE.md", 180)):
        assert len((ROOT / page).read_text("utf-8").splitlines()) <= n_lines_max, page
