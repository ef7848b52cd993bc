"""Measures the shape of the code: lines, longest file, class and function, attributes, imports.

    python scripts/shape.py [REVISION ...]

A revision is anything that git knows; without one it is HEAD. Files are read from git, so that
before and after stand side by side: `python scripts/shape.py 62cdf71 HEAD`. Generated files are
left out. Attributes are the names that a class's methods assign on `self`. Depth is the longest
chain of imports inside a package, layers are the lines of its import contract.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

PYTHON = {
    "service": "service/drafthouse_server/",
    "engine library": "cext/drafthouse_engine/",
    "SDK": "clients/python/drafthouse/",
    "bench": "bench/drafthouse_bench/",
    "tests": "tests/",
}
NATIVE = {
    "C and C++": ("cext/", (".c", ".cpp", ".h", ".hpp")),
    "Cython": ("cext/", (".pyx", ".pxi")),
}


@dataclass
class Shape:
    """What is counted of one package."""

    n_files: int = 0
    n_lines: int = 0
    n_lines_of_file: list[int] = field(default_factory=list)
    longest_file: tuple[int, str] = (0, "")
    n_lines_of_function: list[int] = field(default_factory=list)
    longest_function: tuple[int, str] = (0, "")
    longest_class: tuple[int, str] = (0, "")
    most_attributes: tuple[int, str] = (0, "")
    depth: int = 0
    longest_chain: tuple[str, ...] = ()


def git(*arguments: str) -> str:
    """Returns what git prints."""
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"shape: git {' '.join(arguments)}: {run.stderr.strip()}")
    return run.stdout


def files(revision: str, folder: str, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields path and text of a folder's files."""
    for path in git("ls-tree", "-r", "--name-only", revision, "--", folder).splitlines():
        if path.endswith(suffixes) and "_pb2" not in path:
            yield path, git("show", f"{revision}:{path}")


def attributes(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class's methods assign on `self`."""
    found = set()
    for part in ast.walk(node):
        if not isinstance(part, ast.Attribute) or not isinstance(part.ctx, ast.Store):
            continue
        if isinstance(part.value, ast.Name) and part.value.id == "self":
            found.add(part.attr)
    return found


def note_code(shape: Shape, path: str, tree: ast.Module) -> None:
    """Counts the classes and functions of a file."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        named = n_lines, f"{node.name} ({path.rsplit('/', 1)[-1]})"
        if isinstance(node, ast.ClassDef):
            shape.longest_class = max(shape.longest_class, named)
            shape.most_attributes = max(shape.most_attributes, (len(attributes(node)), named[1]))
        else:
            shape.n_lines_of_function.append(n_lines)
            shape.longest_function = max(shape.longest_function, named)


def imported(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a file imports at its top, and the names imported from them."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def longest_chain(edges: dict[str, set[str]]) -> tuple[str, ...]:
    """Returns the longest path of a graph without cycles."""

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(name) for name in edges[module]), key=len, default=()))

    return max((chain(module) for module in edges), key=len, default=())


def measure(revision: str, folder: str) -> Shape:
    """Returns the shape of a Python package."""
    shape, trees = Shape(), {}
    for path, text in files(revision, folder, (".py",)):
        note_file(shape, path, text)
        tree = ast.parse(text, filename=path)
        note_code(shape, path, tree)
        name = path.removesuffix(".py").removesuffix("/__init__").split("/")
        trees[".".join(name[folder.count("/") - 1 :])] = tree
    edges = {
        module: {name for name in imported(tree) if name in trees and name != module}
        for module, tree in trees.items()
        if module.count(".") != 0
    }
    edges = {module: names & edges.keys() for module, names in edges.items()}
    shape.longest_chain = longest_chain(edges)
    shape.depth = len(shape.longest_chain)
    return shape


def note_file(shape: Shape, path: str, text: str) -> None:
    """Counts a file's lines."""
    n_lines = text.count("\n")
    shape.n_files += 1
    shape.n_lines += n_lines
    shape.n_lines_of_file.append(n_lines)
    shape.longest_file = max(shape.longest_file, (n_lines, path.rsplit("/", 1)[-1]))


def n_layers(revision: str) -> int:
    """Returns the number of layers in the service's import contract."""
    settings = tomllib.loads(git("show", f"{revision}:pyproject.toml"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return max((len(contract.get("layers", ())) for contract in contracts), default=0)


def named(value: tuple[int, str]) -> str:
    """Returns a number and whose it is."""
    return f"{value[0]:,} {value[1]}" if value[0] else "–"


def table(revision: str) -> Iterator[str]:
    """Yields the lines of a revision's table, in Markdown."""
    yield f"**{revision}** ({git('log', '-1', '--format=%h, %cs', revision).strip()})"
    yield ""
    yield (
        "| package | files, lines | file: median, longest | longest class | most attributes |"
        " function: median, longest | import depth |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, folder in PYTHON.items():
        shape = measure(revision, folder)
        if not shape.n_files:
            continue
        median = round(statistics.median(shape.n_lines_of_file))
        function = round(statistics.median(shape.n_lines_of_function or [0]))
        yield (
            f"| {name} | {shape.n_files}, {shape.n_lines:,} | {median},"
            f" {named(shape.longest_file)} | {named(shape.longest_class)} |"
            f" {named(shape.most_attributes)} | {function}, {named(shape.longest_function)} |"
            f" {shape.depth} |"
        )
    for name, (folder, suffixes) in NATIVE.items():
        shape = Shape()
        for path, text in files(revision, folder, suffixes):
            note_file(shape, path, text)
        median = round(statistics.median(shape.n_lines_of_file))
        yield (
            f"| {name} | {shape.n_files}, {shape.n_lines:,} | {median},"
            f" {named(shape.longest_file)} | | | | |"
        )
    service = measure(revision, PYTHON["service"])
    yield ""
    chain = [re.sub(r"^drafthouse_server\.", "", module) for module in service.longest_chain]
    yield f"Layers of the service's contract: {n_layers(revision)}. Its longest chain of imports:"
    yield f"{' → '.join(chain)}."
    yield ""


def main() -> None:
    """Prints a table for each revision."""
    for revision in sys.argv[1:] or ["HEAD"]:
        print("\n".join(table(revision)))


if __name__ == "__main__":
    main()
