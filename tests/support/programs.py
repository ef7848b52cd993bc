"""Programs in Python that tests put in another's place."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["write_program"]


def write_program(path: Path, code: str) -> Path:
    """Writes a program that this interpreter runs, and returns its path.

    A line "#!" would do, but for a path of the interpreter with a blank, or a long one.
    """
    source = path.with_suffix(".py")
    source.write_text(code, "utf-8")
    command = shlex.join([sys.executable, str(source)])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', "utf-8")
    path.chmod(0o755)
    return path
