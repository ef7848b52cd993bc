"""The training corpus: the Python standard library of the running interpreter.

The standard library is on every machine that can run this recipe, so that nothing is downloaded;
its licence (PSF-2.0) allows derived works. One file in forty is held out by the hash of its path,
hence a file is on the same side in every Python version and no prompt was ever trained on.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SourceFile", "is_held_out", "read_corpus", "split_corpus", "standard_library"]

HELD_OUT_ONE_IN = 40
"""One file in this many is held out."""

N_CHARS_MIN = 200
"""Shorter files are package markers and say nothing."""

NON_ASCII_SHARE_MAX = 0.05
"""Above this share a file is a table of foreign text, not code."""

SKIPPED_FOLDERS = frozenset(
    # Third-party packages, bytecode, generated documentation, broken or Python 2 sources.
    {"site-packages", "__pycache__", "pydoc_data", "bad_coding", "lib2to3"}
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A Python file of the corpus."""

    path: str
    """Path relative to the standard library, with forward slashes."""

    text: str
    """The whole file."""


def standard_library() -> Path:
    """Returns the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(path: str) -> bool:
    """Tells whether a file is kept out of training.

    Args:
        path: Path relative to the standard library, with forward slashes.
    """
    return int(hashlib.sha1(path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0  # noqa: S324 - a stable shuffle, no security


def read_corpus(stdlib: Path) -> list[SourceFile]:
    """Reads every usable Python file below a standard library, in a fixed order.

    Args:
        stdlib: Folder of a standard library; its `test` folder is two thirds of the corpus.

    Raises:
        FileNotFoundError: `stdlib` holds no Python file.
    """
    files = [file for path in _python_files(stdlib) if (file := _read(stdlib, path)) is not None]
    if not files:
        raise FileNotFoundError(f"no Python files below {stdlib}")
    return files


def split_corpus(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Splits a corpus into the training files and the held-out files, order kept."""
    train = [file for file in files if not is_held_out(file.path)]
    held_out = [file for file in files if is_held_out(file.path)]
    return train, held_out


def _python_files(stdlib: Path) -> Iterator[Path]:
    # NOTE: the order (files of a folder, then its sub-folders) fixes the token streams; keep it.
    for folder, folders, names in os.walk(stdlib):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _read(stdlib: Path, file: Path) -> SourceFile | None:
    path = file.relative_to(stdlib).as_posix()
    if "unicode_codes" in path or "bad" in file.name:
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return SourceFile(path, text) if _is_code(text) else None


def _is_code(text: str) -> bool:
    n_non_ascii = sum(character > "\x7f" for character in text)
    return len(text) > N_CHARS_MIN and n_non_ascii < NON_ASCII_SHARE_MAX * len(text)
