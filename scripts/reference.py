"""Writes the lists in docs/ of what the code declares. `make docs` calls it.

A page is prose up to the marker, and generated after it.
"""

from __future__ import annotations

from pathlib import Path

from drafthouse_server.cli import settings
from drafthouse_server.serving import exposition

__all__ = ["MARKER", "pages"]

MARKER = "<!-- What follows is written by `make docs`. -->\n"
"""The line up to which a page is written by hand."""

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_LISTS = {"configuration.md": settings.reference, "metrics.md": exposition.reference}


def pages() -> dict[Path, str]:
    """Returns the text that each page should have, by its path."""
    found = {}
    for name, make in _LISTS.items():
        path = _DOCS / name
        prose, marker, _ = path.read_text("utf-8").partition(MARKER)
        assert marker, f"{path} lacks the line {MARKER!r}"
        found[path] = f"{prose}{MARKER}\n{make()}"
    return found


def main() -> None:
    """Writes the pages."""
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
