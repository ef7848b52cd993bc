"""What is typed, read, sent and shown by accident or on purpose: a sentence, never a trace."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

import drafthouse
from drafthouse_server.cli import settings
from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal, format_table
from drafthouse_server.config import SETTINGS
from drafthouse_server.errors import ConfigError, StartupError
from drafthouse_server.host.address import try_address

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

TEXTS = (
    *("", " ", "0", "-1", "nan", "inf", "1e999", "9" * 5000, "\0", "a\0b", "\udcff", "\x1b[2J"),
    *("a" * 5000, "unix:", "[::1", "://", "sqlite:///", "a b", "true", "\n"),
)
VALUES = (
    *('"\\u0000"', '"a\\u0000b"', '["\\u0000"]', "nan", "inf", "-inf", "[1]", "{a = 1}", "-0.0"),
    *("1" + "0" * 400, "1" + "0" * 5000, "[" * 5000, "1979-05-27", "true"),
)


def run(*words: str, source: TextIO | None = None) -> tuple[int, str, str]:
    """Returns exit code and output of a command, whose streams are those of a shell in UTF-8."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        code = main(words, Terminal(out, err, source or io.StringIO()))
    except SystemExit as end:
        code = int(str(end.code))
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return code, texts[0], texts[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_taken_or_refused_whatever_it_is(name: str, tmp_path: Path) -> None:
    """NUL in a path, numbers of 5,000 digits and nesting without end ended in traces."""
    file = tmp_path / "settings.toml"
    for text in TEXTS:
        with contextlib.suppress(ConfigError):
            settings.load(None, {}, {name: text})
        with contextlib.suppress(ConfigError):
            settings.load(None, {SETTINGS[name].variable: text}, {})
    for value in VALUES:
        file.write_text(f"{name} = {value}\n")
        with contextlib.suppress(ConfigError):
            settings.load(str(file), {}, {})


@pytest.mark.parametrize("name", ["model", "ssl_cert_file", "audit_file", "usage_journal", "store"])
def test_no_text_has_the_character_0(name: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'{name} = "a\\u0000b"\n')
    with pytest.raises(ConfigError, match="expected a text without the character 0"):
        settings.load(str(file), {}, {})


TEXT_SETTINGS = [name for name, it in SETTINGS.items() if isinstance(it.default, str | tuple)]


@pytest.mark.parametrize("name", TEXT_SETTINGS)
def test_every_text_is_utf_8(name: str, tmp_path: Path) -> None:
    """A name that was none could be sent to nobody: `models` failed with a trace."""
    setting, text, expected = SETTINGS[name], "a\udcffb", "expected a text in UTF-8"
    with pytest.raises(ConfigError, match=expected) as by_flag:
        settings.load(None, {}, {name: text})
    with pytest.raises(ConfigError, match=expected):
        settings.load(None, {setting.variable: text}, {})
    assert ("udcff" in str(by_flag.value)) != setting.is_secret
    file = tmp_path / "settings.toml"
    for value in (b'"a\xffb"', b'"a\\udcffb"'):
        file.write_bytes(b"%s = %s\n" % (name.encode(), value))
        with pytest.raises(ConfigError, match="are no valid TOML"):
            settings.load(str(file), {}, {})


def test_a_text_that_is_not_utf_8_is_a_sentence_and_the_code_of_a_wrong_setting() -> None:
    code, out, err = run("serve", "--model", "/nowhere", "--name", "\udcff")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "expected a text in UTF-8" in err
    assert settings.load(None, {}, {"name": "模型 é"}).name == "模型 é"


def test_a_file_without_end_is_not_read_to_its_end() -> None:
    """A device, or the model by mistake, was read until memory was full."""
    with pytest.raises(ConfigError, match="/dev/zero"):
        settings.load("/dev/zero", {}, {})
    with pytest.raises(ConfigError, match="/dev/zero"):
        settings.load(None, {}, {"api_keys_file": "/dev/zero"})


@pytest.mark.parametrize("name", ["audit_file", "usage_journal"])
def test_doctor_tells_of_a_name_that_is_too_long(name: str) -> None:
    flag = SETTINGS[name].flag
    code, out, _ = run("doctor", "--port", "0", flag, "a" * 300, "--json")
    problems = [it["problem"] for it in json.loads(out)["problems"]]
    assert code == 1
    assert any("cannot be looked at: file name too long" in problem for problem in problems)


def test_usage_of_a_folder_with_a_name_that_is_too_long() -> None:
    code, _, err = run("usage", "--usage-journal", "a" * 300)
    assert (code, "there is no folder" in err) == (1, True)


@pytest.mark.parametrize("host", ["a..b", "a" * 70, "\udcff"])
def test_a_host_that_is_no_name_is_one_sentence(host: str) -> None:
    """The codec of names has an error of its own."""
    with pytest.raises(StartupError, match="cannot listen at"):
        try_address(host, 0)


@pytest.mark.parametrize("text", ["tomorrow", "", "2026-13-01"])
def test_a_time_that_is_none_is_told_in_words(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("usage", "--usage-journal", ".", "--since", text)[0] == 2
    err = capsys.readouterr().err
    assert f"{text!r} is no time; expected one such as 2026-11-22" in err
    assert "_time" not in err


@pytest.mark.parametrize("text", ["0", "0.01", "-1"])
def test_a_server_is_not_asked_without_a_pause(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status", "--watch", text)[0] == 2
    assert "expected seconds in" in capsys.readouterr().err


def test_cells_cannot_move_the_cursor_nor_break_the_table() -> None:
    rows = [["\x1b[2J\x1b]0;x\x07", "a\nb\tc", "\u202egnp.exe", "\u2028"], ["é", "漢", "x", "y"]]
    lines = format_table(("1", "2", "3", "4"), rows)
    assert len(lines) == 4
    assert not set("".join(lines)) & set("\x1b\x07\n\t\u202e\u2028")
    assert "é" in lines[3]
    assert "漢" in lines[3]


def test_errors_cannot_move_the_cursor() -> None:
    err = io.StringIO()
    Terminal(io.StringIO(), err).error("the server says \x1b[2J\u202eno")
    assert err.getvalue() == "drafthouse: the server says �[2J�no\n"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A file on a disk without room, in place of the output."""
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs /dev/full, which Linux alone has")
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # without a descriptor
    file = path.open("w")
    yield file
    with contextlib.suppress(OSError):
        file.close()


def test_output_that_cannot_be_written_is_told(tmp_path: Path, full: TextIO) -> None:
    """A new key that nobody has seen ended in a trace; now it is known which key to revoke."""
    err = io.StringIO()
    store = f"sqlite:///{tmp_path / 'store.db'}"
    code = main(["keys", "add", "--tenant", "acme", "--store", store], Terminal(full, err))
    assert code == 1
    assert "the output cannot be written: No space left on device" in err.getvalue()
    assert "of tenant acme, works: until it is revoked" in err.getvalue()


@pytest.mark.parametrize("words", [["serve", "--help"], ["--version"]])
def test_help_that_cannot_be_written_is_told(words: list[str], full: TextIO) -> None:
    """It was lost without a word, with exit code 0."""
    err = io.StringIO()
    code = main(words, Terminal(full, err))
    assert code == 1
    assert err.getvalue() == "drafthouse: the output cannot be written: No space left on device\n"


def test_output_is_escaped_where_its_encoding_lacks_a_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    Terminal().line("─ é \udcff")
    out.flush()
    assert out.buffer.getvalue() == b"\\u2500 \\xe9 \\udcff\n"


def test_output_that_the_shell_has_closed_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    terminal = Terminal()
    terminal.line("x")
    terminal.error("y")
    assert terminal.read_all() == ""
    terminal._out.close()
    terminal._err.close()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("command", [("generate", "-"), ("chat",)])
async def test_what_is_piped_in_and_is_no_text_is_one_sentence(
    command: tuple[str, ...], errors: str, start_server: ServerFactory
) -> None:
    """As of a binary file; Python reads it with escapes where the locale is C."""
    server = await start_server()
    piped = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8", errors=errors)
    words = (*command, "--server", server.target)
    code, out, err = await asyncio.to_thread(run, *words, source=piped)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"drafthouse: .*\b(UTF-8 text|cannot be sent: .*)\n", err)


async def test_a_port_of_something_else_is_told(start_server: ServerFactory) -> None:
    """Both ways round it was "Method not found!"."""
    server = await start_server()
    code, _, err = await asyncio.to_thread(run, "status", "--server", server.target)
    assert code == 1
    assert "is no AdminService, or one of another version" in err


@pytest.mark.parametrize("change", ["max_streams=99999999999999999999", "models="])
async def test_a_limit_that_cannot_be_sent_is_one_sentence(change: str, free_port: int) -> None:
    code, _, err = run("limits", "acme", change, "--server", f"127.0.0.1:{free_port}")
    assert code in (1, 2)
    assert len(err.strip().splitlines()) == 1
    assert change.partition("=")[0] in err


def test_a_key_that_no_header_can_carry_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to travel in plain text."""
    monkeypatch.setenv("DRAFTHOUSE_API_KEY", "dh_secret\n")
    code, _, err = run("models", "--server", "127.0.0.1:1")
    assert code == 2
    assert "is not printable ASCII" in err
    assert "plain text" not in err
    assert "dh_secret" not in err


async def test_health_is_asked_with_the_key(start_server: ServerFactory) -> None:
    """Servers with `open_health` off refused every command, whatever its key."""
    server = await start_server(api_keys=("acme:a-key-of-acme",), open_health=False)
    async with drafthouse.AsyncClient(server.target, api_key="a-key-of-acme") as client:
        assert await client.health()
    async with drafthouse.AsyncClient(server.target) as client:
        with pytest.raises(drafthouse.InvalidApiKey):
            await client.health()

    def ask() -> bool:
        with drafthouse.Client(server.target, api_key="a-key-of-acme") as client:
            return client.health()

    assert await asyncio.to_thread(ask)
