"""Fixtures of what doctor looks at."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def ordinary_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, who may write everywhere, is asked for what the owner's bits allow instead."""
    if os.geteuid() == 0:
        monkeypatch.setattr(
            os, "access", lambda path, mode: os.stat(path).st_mode >> 6 & mode == mode
        )
