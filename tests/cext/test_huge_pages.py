"""Large buffers of the CPU ask for huge pages (patch 0021)."""

from __future__ import annotations

import subprocess

import pytest
from tests.support.built import built

_SKIPPED = 77


def test_large_buffers_ask_for_huge_pages() -> None:
    done = subprocess.run(
        [str(built("huge_pages_test"))], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == _SKIPPED:  # not Linux, or a kernel that tells no flags: nothing to read
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("ok: ")
