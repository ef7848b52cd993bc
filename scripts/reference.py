"""Writes the lists in docs/ of what the code declares. `make docs` calls it.

A page is prose up to the marker, and generated after it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from grpc import StatusCode

from drafthouse._errors import error_class
from drafthouse_server.cli import settings
from drafthouse_server.serving import exposition

__all__ = ["MARKER", "pages"]

MARKER = "<!-- What follows is written by `make docs`. -->\n"
"""The line up to which a page is written by hand."""

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = _ROOT / "docs"
_ERRORS = _ROOT / "protos" / "drafthouse" / "v1" / "errors.proto"
_OPTIONS = _ROOT / "clients" / "python" / "drafthouse" / "_options.py"


def _reasons() -> Iterator[tuple[str, str, str]]:
    """Yields each reason of the protos with its gRPC code and what its comment says of it."""
    text = _ERRORS.read_text("utf-8")
    for comment, name in re.findall(r"((?:  //[^\n]*\n)+)  ERROR_REASON_(\w+) = [1-9]", text):
        code, _, meaning = " ".join(re.findall(r"// ?(.*)", comment)).partition(": ")
        yield name, code, meaning


def errors() -> str:
    """Returns a table of the errors that a client may get."""
    rows = [
        f"| `{name}` | `{code}` | `{error_class(StatusCode[code], name).__name__}` | {meaning} |"
        for name, code, meaning in _reasons()
    ]
    head = [
        "| reason | gRPC code | Python | what it means, what comes with it |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _fields(name: str) -> Iterator[tuple[str, str]]:
    """Yields each field of a class of the SDK's options with the text below it."""
    module = ast.parse(_OPTIONS.read_text("utf-8"))
    found = next(it for it in module.body if isinstance(it, ast.ClassDef) and it.name == name)
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(field.target), " ".join(ast.literal_eval(text.value).split())


def options() -> str:
    """Returns tables of what a generation may be asked for in Python."""
    lines = []
    for name, head in (
        (
            "GenerateOptions",
            "`generate` takes these, by name; what is absent or None is the default.",
        ),
        ("Dry", "`drafthouse.Dry`:"),
        ("Xtc", "`drafthouse.Xtc`:"),
    ):
        rows = [f"| `{field}` | {text} |" for field, text in _fields(name)]
        lines += [head, "", "| option | what it is |", "|---|---|", *rows, ""]
    return "\n".join(lines[:-1]) + "\n"


_LISTS = {
    "configuration.md": settings.reference,
    "errors.md": errors,
    "metrics.md": exposition.reference,
    "python_sdk.md": options,
}


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
