"""Applies unified diffs to a folder, exactly: no fuzz, no other tool, the same on every machine.

A hunk goes where its line number says; where its lines stand elsewhere (the pin has moved, or the
checkout is another), it goes there only if that place is the one place where they stand. Whatever
does not fit is refused before a file is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
NO_FILE = b"/dev/null"


class PatchError(Exception):
    """Says in one sentence which patch does not fit, and where."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change: lines, and what they become."""

    line: int
    """Number of the first old line, from 1."""
    old: list[bytes]
    """What is there, context included."""
    new: list[bytes]
    """What takes its place."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """All hunks of one patch for one file."""

    path: str
    """Relative to the folder that is patched."""
    is_new: bool
    """Whether the patch makes the file."""
    hunks: list[Hunk] = field(default_factory=list)
    """In the order of their lines."""


def read_patch(patch: Path) -> list[FileChange]:
    """Reads a unified diff with `a/` and `b/` before its paths; text before it is a comment.

    Raises:
        PatchError: it is none, or uses what we have no use for (removed and renamed files, last
            lines without an end, hunks without context).
    """
    lines = [*patch.read_bytes().split(b"\n"), b""]
    changes: list[FileChange] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if line.startswith(b"--- ") and lines[i + 1].startswith(b"+++ "):
            if not lines[i + 1].startswith(b"+++ b/"):
                raise PatchError(f'{patch.name} line {i + 2}: expected "+++ b/" and a path.')
            path = lines[i + 1].removeprefix(b"+++ b/").split(b"\t")[0].decode()
            changes.append(FileChange(path, line.split(b"\t")[0].endswith(NO_FILE)))
            i += 2
        elif changes and line.startswith(b"@@"):
            hunk, at = _read_hunk(patch, lines, i)
            if not hunk.new or not (hunk.old or changes[-1].is_new):
                raise PatchError(f"{patch.name} line {i + 1}: the hunk has no context.")
            changes[-1].hunks.append(hunk)
            i = at
        elif changes and line:
            raise PatchError(f"{patch.name} line {i + 1} belongs to no hunk.")
        else:
            i += 1
    if not changes:
        raise PatchError(f"{patch.name} changes no file.")
    return changes


def _read_hunk(patch: Path, lines: list[bytes], i: int) -> tuple[Hunk, int]:
    """Reads the hunk whose head is line `i`; returns it and the line behind it."""
    head = HUNK.match(lines[i])
    if not head:
        raise PatchError(f"{patch.name} line {i + 1} is no head of a hunk.")
    n_old, n_new = (int(count) if count else 1 for count in (head[2], head[3]))
    hunk = Hunk(int(head[1]), [], [])
    while len(hunk.old) < n_old or len(hunk.new) < n_new:
        i += 1
        kind = lines[i][:1] if i < len(lines) else b""
        if kind not in (b" ", b"-", b"+"):
            raise PatchError(f"{patch.name} line {i + 1}: the hunk is shorter than its head says.")
        if kind != b"+":
            hunk.old.append(lines[i][1:])
        if kind != b"-":
            hunk.new.append(lines[i][1:])
    return hunk, i + 1


def find(lines: list[bytes], wanted: list[bytes], near: int, first: int) -> int:
    """Returns where the wanted lines stand, from `first` on.

    Raises:
        ValueError: nowhere, or not in one place alone.
    """

    def is_at(i: int) -> bool:
        return lines[i : i + len(wanted)] == wanted

    if near >= first and is_at(near):
        return near
    places = [i for i in range(first, len(lines)) if lines[i] == wanted[0] and is_at(i)]
    if len(places) == 1:
        return places[0]
    raise ValueError("its lines are not there" if not places else "its lines stand there twice")


def patched(text: bytes, change: FileChange, *, is_reverse: bool) -> bytes:
    """Returns a file's text with all hunks of a change applied, or taken back.

    Raises:
        ValueError: a hunk does not fit; the message names its line.
    """
    lines = text.split(b"\n")
    out: list[bytes] = []
    first = 0  # behind the last hunk
    shift = 0  # how far the last hunk was from where its number said
    grown = 0  # lines that hunks before this one add
    for hunk in change.hunks:
        old, new = (hunk.new, hunk.old) if is_reverse else (hunk.old, hunk.new)
        line = hunk.line - 1 + (grown if is_reverse else 0)
        try:
            at = find(lines, old, line + shift, first) if old else first
        except ValueError as error:
            raise ValueError(f"line {hunk.line}: {error}") from None
        shift = at - line
        out += lines[first:at] + new
        first = at + len(old)
        grown += len(hunk.new) - len(hunk.old)
    return b"\n".join(out + lines[first:])


def changes_of(
    folder: Path, patches: Sequence[Path], *, is_reverse: bool = False
) -> dict[str, bytes | None]:
    """Returns what the patches make of a folder's files, or what taking them back makes of them.

    Returns:
        texts by path; None is a file that goes. Nothing is written.

    Raises:
        PatchError: one of them does not fit.
    """
    texts: dict[str, bytes | None] = {}
    for patch in reversed(patches) if is_reverse else patches:
        for change in read_patch(patch):
            path = folder / change.path
            if change.path not in texts:
                texts[change.path] = path.read_bytes() if path.is_file() else None
            text = texts[change.path]
            is_there = not change.is_new or is_reverse
            if is_there != (text is not None):
                raise PatchError(
                    f"{patch.name} does not fit: {change.path} is "
                    f"{'missing' if is_there else 'there already'}."
                )
            try:
                after = patched(text or b"", change, is_reverse=is_reverse)
            except ValueError as error:
                raise PatchError(f"{patch.name} does not fit {change.path}, {error}.") from None
            texts[change.path] = None if change.is_new and is_reverse else after
    return texts


def apply(folder: Path, patches: Sequence[Path], *, is_reverse: bool = False) -> None:
    """Applies patches to a folder, or takes them back; all of them or none.

    Raises:
        PatchError: one of them does not fit; nothing has been written.
    """
    for name, text in changes_of(folder, patches, is_reverse=is_reverse).items():
        path = folder / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)


def is_applied(folder: Path, patches: Sequence[Path]) -> bool:
    """Tells whether a folder's files are as these patches leave them."""
    try:
        changes_of(folder, patches, is_reverse=True)
    except PatchError:
        return False
    return True
