"""The exit codes of `drafthouse serve`, as docs/security.md lists them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from drafthouse_server.cli import serve
from drafthouse_server.cli.main import main
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
    with asyncio.Runner() as runner:
        assert serve._run_to_end(runner, Config(), Terminal()) == code
    assert error is None or str(error) in capsys.readouterr().err
    assert f"\n| {code} | " in PAGE.read_text("utf-8")
    assert f" {code} " in serve._EXIT_CODES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.default]\nfoo = 3", "unknown setting 'tenants.default.foo'"),
        ("[tenants.default]\nweight = 'x'", "setting 'tenants.default.weight' is 'x'"),
        ("[tenants.'a b']\nweight = 2", "names no tenant"),
        ("rate_counters_url = 'foo'", "rate_counters_url is no URL of a Redis"),
        ("store = 'mysql://x'", "store is a URL of 'mysql'"),
        ("store = 'sqlite://'", "store needs a file"),
        ("store = 'sqlite:///FOLDER/store.db'\n[tenants.default]\nfoo = 3", "unknown setting"),
    ],
)
def test_settings_of_what_is_outside_are_settings_too(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor starts nothing again whose settings are wrong; nor is anything opened."""
    path = tmp_path / "drafthouse.toml"
    path.write_text(text.replace("FOLDER", str(tmp_path)))
    assert main(["serve", "--config", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


LOADING = textwrap.dedent(
    """
    import sys
    import threading
    from drafthouse_server.cli import main, serve

    def load(*_):
        print("loading", flush=True)
        threading.Event().wait()

    serve.LlamaEngine.load = load
    sys.exit(main.main(["serve", "--port", "0"]))
    """
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_loads_its_model(number: signal.Signals) -> None:
    """The first process of a container, which has no init, is not ended by default.

    Ctrl-C waited for the model, without a word.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(100) == 0, "and not -15, which is what nobody handled"
            assert process.stderr is not None
            assert f"{number.name}: ending before" in process.stderr.read()
        finally:
            process.kill()
