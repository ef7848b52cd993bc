"""Programs in JavaScript, with gRPC's own library for it, which shares no line with its core."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

__all__ = ["javascript"]

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = _ROOT / "build" / "javascript"
_PACKAGES = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1")
_INSTALL_S = 120


def javascript() -> tuple[list[str], dict[str, str]]:
    """Returns a command that runs a script, and its environment; installs packages the first time.

    Where Node is missing, or npm reaches no registry, the test is skipped, since nothing that we
    ship needs them; with CI set it fails.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        _skip_or_fail("Node is not installed: make test-deps")
    done = _FOLDER / "-".join(_PACKAGES).replace("/", "-")
    if not done.exists():
        where = ["--prefix", str(_FOLDER), "--no-save", "--no-package-lock", "--ignore-scripts"]
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        _FOLDER.mkdir(parents=True, exist_ok=True)
        found = subprocess.run(
            [npm, "install", *where, *quiet, *_PACKAGES],
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
        if found.returncode:
            _skip_or_fail(f"npm could not install {', '.join(_PACKAGES)}: {found.stderr[-300:]}")
        done.touch()
    return [node], os.environ | {"NODE_PATH": str(_FOLDER / "node_modules")}


def _skip_or_fail(problem: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(problem)
    pytest.skip(problem)
