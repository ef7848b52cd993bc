"""Secrets stay where they belong: keys and prompts are in no text that the server shows."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.demo import config as demo_config
from tests.support.demo import serving

import drafthouse
from drafthouse_server.cli.settings import example, load, reference
from drafthouse_server.config import SETTINGS, Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy.tenants import TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

KEY = "canary-of-a-key-0123456789"
PROMPT = "canary of a prompt"
ENTRY = f"acme:{KEY}"
EVERY = "0.0.0.0"  # noqa: S104  # nothing listens there in these tests
BEYOND = {"host": EVERY, "insecure_no_tls": "true"}


def key_file(folder: Path, mode: int, text: str = ENTRY) -> Path:
    path = folder / "keys"
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


# Where keys come from.


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_file_that_others_cannot_read_is_taken_in_silence(mode: int, tmp_path: Path) -> None:
    warnings: list[str] = []
    flags = {"api_keys_file": str(key_file(tmp_path, mode))}
    for more in ({}, BEYOND):
        assert load(None, {}, flags | more, warnings.append).api_keys == (ENTRY,)
    assert warnings == []


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666, 0o660, 0o602])
def test_a_file_that_others_can_reach_is_told_and_beyond_loopback_refused(
    mode: int, tmp_path: Path
) -> None:
    path = key_file(tmp_path, mode)
    flags = {"api_keys_file": str(path)}
    warnings: list[str] = []
    load(None, {}, flags, warnings.append)
    assert len(warnings) == 1
    with pytest.raises(ConfigError) as caught:
        load(None, {}, flags | BEYOND)
    for text in (warnings[0], str(caught.value)):
        assert f"{path} holds keys and has mode {mode:03o}" in text
        assert "chmod 640" in text
        assert KEY not in text


def test_the_mode_of_every_file_with_a_key_is_looked_at(tmp_path: Path) -> None:
    settings = key_file(tmp_path, 0o644, f"api_keys = ['{ENTRY}']")
    warnings: list[str] = []
    load(str(settings), {}, {}, warnings.append)
    assert f"config {settings} holds keys" in warnings[0]
    private = tmp_path / "server.key"
    private.write_text(KEY)
    private.chmod(0o644)
    flags = {"ssl_cert_file": "server.crt", "ssl_key_file": str(private)}
    load(None, {}, flags, warnings.append)
    assert f"ssl_key_file {private} holds keys" in warnings[1]
    without = key_file(tmp_path, 0o644, "parallel = 4")
    load(str(without), {}, {}, warnings.append)
    assert len(warnings) == 2


def test_keys_on_a_command_line_are_told_and_beyond_loopback_refused() -> None:
    warnings: list[str] = []
    assert load(None, {}, {"api_keys": ENTRY}, warnings.append).api_keys == (ENTRY,)
    assert len(warnings) == 1
    with pytest.raises(ConfigError) as caught:
        load(None, {}, {"api_keys": ENTRY} | BEYOND)
    for text in (warnings[0], str(caught.value)):
        assert "flag --api-keys shows keys to every user of this machine" in text
        assert KEY not in text
    assert load(None, {"DRAFTHOUSE_API_KEYS": ENTRY}, BEYOND).api_keys == (ENTRY,)


# What is shown.


def test_no_text_of_the_settings_shows_a_key(tmp_path: Path) -> None:
    config = Config(api_keys=(ENTRY,))
    registry = TenantRegistry.from_config(config)
    shown = [repr(config), str(config), repr(registry), str(vars(registry)), example(), reference()]
    assert not [text for text in shown if KEY in text]
    # Whatever else is wrong, in whichever source.
    for name, setting in SETTINGS.items():
        wrong = f"{KEY} \0" if setting.is_secret else "wrong \0"
        for path in (None, str(key_file(tmp_path, 0o600, f"api_keys = ['{ENTRY}']\n"))):
            for environment, flags in (
                ({f"DRAFTHOUSE_{name.upper()}": wrong, "DRAFTHOUSE_NONSENSE": "x"}, {}),
                ({"DRAFTHOUSE_API_KEYS": ENTRY}, {name: wrong, "port": "70000"}),
            ):
                with pytest.raises(ConfigError) as caught:
                    load(path, environment, flags)
                assert KEY not in str(caught.value) + repr(caught.value)


def texts_of(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> str:
    """Returns all that was logged, traces included, and printed."""
    formatter = logging.Formatter()
    lines = [formatter.format(record) for record in caplog.records]
    return "\n".join([*lines, *capfd.readouterr()])


async def provoke(client: drafthouse.AsyncClient) -> None:
    """Calls in every way that may be logged: what works, what is refused, what fails."""
    chat = [{"role": "user", "content": PROMPT}]
    await client.generate(PROMPT, max_output_tokens=3)
    await client.generate(chat, max_output_tokens=3, stop=[PROMPT])
    await client.tokenize(PROMPT)
    await client.count_tokens(PROMPT)
    wrong: list[dict[str, Any]] = [
        {"prompt": PROMPT, "grammar": f"root ::= ({PROMPT}"},
        {"prompt": PROMPT, "temperature": 1e9},
        {"prompt": PROMPT, "stop": [PROMPT] * 100},
        {"prompt": PROMPT, "model": PROMPT},
        {"prompt": PROMPT * 10_000},
        {"prompt": [{"role": PROMPT * 100, "content": PROMPT}]},
    ]
    for request in wrong:
        # The engine of tests takes some of them.
        with contextlib.suppress(drafthouse.DrafthouseError):
            await client.generate(max_output_tokens=3, **request)
    async for _ in client.generate(PROMPT):
        break  # leaves in the middle
    with pytest.raises(drafthouse.DeadlineExceeded):
        await client.generate(PROMPT, timeout=0.001)


async def test_the_log_at_debug_level_shows_no_key_and_no_prompt(
    start_server: ServerFactory,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    eventually: Eventually,
) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine(step_s=0.001)
    server = await start_server(engine, api_keys=(ENTRY,), log_level="debug")
    async with drafthouse.AsyncClient(server.target, api_key=KEY, retry=None) as client:
        await provoke(client)
        await eventually(lambda: not server.loop.admission.n_active)
        # Two: a step that only gives a slot back may come first.
        engine.inject(RuntimeError("device lost"), n_steps=2)
        with pytest.raises(drafthouse.EngineFailure):
            await client.generate(PROMPT)
    wrong = f"{KEY}-and-more"
    async with drafthouse.AsyncClient(server.target, api_key=wrong, retry=None) as stranger:
        with pytest.raises(drafthouse.InvalidApiKey) as caught:
            await stranger.tokenize(PROMPT)
    assert KEY not in str(caught.value)
    # A refusal is with its client before its line is in the log.
    await eventually(lambda: "reason=INVALID_API_KEY" in caplog.text)
    await server.close()
    shown = texts_of(caplog, capfd)
    assert "device lost" in shown  # what is to be seen, is
    assert "reason=INVALID_API_KEY" in shown
    assert KEY not in shown
    assert PROMPT not in shown


@pytest.mark.model
async def test_nor_does_the_log_with_the_real_engine(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], eventually: Eventually
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = demo_config("dense", "mtp", parallel=2, api_keys=(ENTRY,), log_level="debug")
    async with serving(settings, KEY) as (client, _):
        await provoke(client)
        await eventually(lambda: "code=INVALID_ARGUMENT" in caplog.text)
    shown = texts_of(caplog, capfd)
    assert "code=INVALID_ARGUMENT" in shown
    assert KEY not in shown
    assert PROMPT not in shown
