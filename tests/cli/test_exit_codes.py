"""The exit codes of `drafthouse serve`, as docs/security.md lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafthouse_server.cli import serve
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, EngineLost, ServerFailed

ENDS = [
    (None, 0),
    (ConfigError("port", 1, "another"), 1),
    (ServerFailed("the step loop failed"), 70),
    (EngineLost("a step does not end"), 71),
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"


@pytest.mark.parametrize(("error", "code"), ENDS, ids=[str(code) for _, code in ENDS])
def test_each_end_has_its_code_and_says_why(
    error: Exception | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run(*_: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(serve, "_run", run)
    assert serve._run_to_end(Config(), Terminal()) == code
    assert error is None or str(error) in capsys.readouterr().err
    assert f"\n| {code} | " in PAGE.read_text("utf-8")
    assert f" {code} " in serve._EXIT_CODES
