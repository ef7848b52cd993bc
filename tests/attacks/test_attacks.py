"""The attacks whose verdict depends on no time: what is held, who is admitted, who survives."""

from __future__ import annotations

import pytest
from tests.attacks.run import attack, names

UNTIMED = ("a06", "a10", "a11", "a12", "a13", "a17", "a19", "a21")

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", names(",".join(UNTIMED)))
def test_the_server_holds(name: str) -> None:
    outcome = attack(name, seconds=6.0, patience=5.0)  # the machine may have others to serve
    assert outcome.is_alive, outcome.figures
    assert outcome.verdict == "ok", outcome.figures
    assert outcome.has_drained
