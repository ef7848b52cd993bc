"""Calls in whose midst memory runs out: they say so, and leave nothing behind."""

from __future__ import annotations

import subprocess

import pytest
from tests.support.built import built
from tests.support.hand import DENSE, MODELS

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def test_every_allocation_of_a_call_may_fail() -> None:
    """Steps, decodes, trees, snapshots, samplers: each allocation in turn, and all after it."""
    run = subprocess.run(
        [str(built("memory_test")), str(MODELS / DENSE)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stdout + run.stderr
