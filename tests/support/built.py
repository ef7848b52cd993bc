"""What `make dev` builds: missing under `make test` it is an error, elsewhere a reason to skip."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = ["built", "missing", "needs_extension"]

_MUST_BE_BUILT = bool(os.environ.get("DRAFTHOUSE_BUILT") or os.environ.get("CI"))
"""Set by the Makefile for `test` and `unit`, which build before."""


def built(program: str) -> Path:
    """Returns a program of build/bin; skips the test without it, or fails it under `make test`."""
    path = Path(__file__).resolve().parents[2] / "build" / "bin" / program
    if not path.exists():
        missing(f"build/bin/{program} is not built: `make dev`")
    return path


def missing(message: str) -> NoReturn:
    """Skips a test for which something is not built, or fails it under `make test`."""
    if _MUST_BE_BUILT:
        pytest.fail(message)
    pytest.skip(message)


def needs_extension() -> list[pytest.MarkDecorator]:
    """Returns the marks of a test that needs the extension; an error under `make test`."""
    is_built = importlib.util.find_spec("drafthouse_engine._spec") is not None
    if not is_built and _MUST_BE_BUILT:
        raise RuntimeError("the extension is not built: `make dev`")
    reason = "the extension is not built; run `make build`"
    return [pytest.mark.model, pytest.mark.skipif(not is_built, reason=reason)]
