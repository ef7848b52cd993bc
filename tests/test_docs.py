"""What the documents point to is there, and the names that they use are the code's."""

from __future__ import annotations

import functools
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


COMMANDS = [ROOT / "Makefile", ROOT / ".ci" / "run", *ROOT.glob("scripts/*.sh"), *PAGES]


@pytest.mark.parametrize("page", COMMANDS, ids=name)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    """A command that runs a test which was renamed fails at its end only, after minutes."""
    text = page.read_text("utf-8")
    paths = re.findall(r"\btests/[\w/]+\.(?:py|sh|cpp|[ch])\b", text)
    names = re.findall(r"`(test_\w+)`", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [found for found in names if found not in defined_tests()]
    assert not missing


@functools.cache
def defined_tests() -> set[str]:
    """Returns the names of files and functions of tests, the C ones with them."""
    found = set[str]()
    for path in [
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("cext/*_test.c"),
        *ROOT.glob("tests/**/*.cpp"),
    ]:
        found.add(path.stem)
        found.update(
            re.findall(r"^(?:async )?(?:def|static void) (test_\w+)", path.read_text("utf-8"), re.M)
        )
    return found


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
