"""The command line, as a user types it; against the fake engine where that will do."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.cli.main import main
from drafthouse_server.cli.serve import LISTENS_AT, _describe
from drafthouse_server.cli.settings import example
from drafthouse_server.cli.terminal import LoadLines, Terminal, format_table
from drafthouse_server.config import SETTINGS, Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.host.address import try_address
from drafthouse_server.host.amounts import format_bytes, format_count
from drafthouse_server.rpc.server import Server

if TYPE_CHECKING:
    from tests.conftest import Eventually, ServerFactory

MODELS = Path(__file__).resolve().parents[2] / "models"
DENSE = MODELS / "tiny-mimo2-f16.gguf"
FOREIGN_EAGLE3 = MODELS / "tiny-qwen35-eagle3-f16.gguf"
COMMAND = (sys.executable, "-m", "drafthouse_server")
EVERY = "0.0.0.0"  # noqa: S104  # nothing listens there in these tests
GREEDY = ("--temperature", "0", "--max-tokens", "20")


class Screen(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclasses.dataclass
class Outcome:
    """What a command did."""

    code: int
    """Its exit code."""
    out: str
    """What it wrote to stdout."""
    err: str
    """What it wrote to stderr."""


def run(*arguments: str, source: str = "") -> Outcome:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = main(arguments, Terminal(out, err, io.StringIO(source)))
    return Outcome(code, out.getvalue(), err.getvalue())


async def ask(server: Server, *arguments: str, source: str = "") -> Outcome:
    """Runs a client command against a server of this event loop."""
    command = (*arguments, "--server", server.target)
    return await asyncio.to_thread(run, *command, source=source)


async def test_generate_streams_the_text_and_ends_with_figures(
    server: Server, client: drafthouse.AsyncClient
) -> None:
    expected = await client.generate("def parse(", temperature=0, max_output_tokens=20)
    outcome = await ask(server, "generate", "def parse(", *GREEDY)
    assert (outcome.code, outcome.out) == (0, expected.text + "\n")
    counts = expected.speculation
    assert re.fullmatch(
        r"20 tokens, [\d,]+ tokens/s, first token after [\d.,]+ ms, acceptance "
        rf"[\d.]+% \({counts.n_accepted} of {counts.n_drafted} drafted\)\n",
        outcome.err,
    )


async def test_generate_reads_the_prompt_from_a_pipe(server: Server) -> None:
    typed = await ask(server, "generate", "two\nlines", *GREEDY)
    piped = await ask(server, "generate", "-", *GREEDY, source="two\nlines")
    assert piped.out == typed.out
    other = await ask(server, "generate", "-", *GREEDY, source="two")
    assert other.out != typed.out


async def test_options_reach_the_server(server: Server, tmp_path: Path) -> None:
    plain = await ask(server, "generate", "x", *GREEDY)
    undrafted = await ask(server, "generate", "x", *GREEDY, "--no-draft")
    assert undrafted.out == plain.out
    assert undrafted.err.rstrip().endswith("nothing drafted")
    stop = plain.out[5:8]
    stopped = await ask(server, "generate", "x", *GREEDY, "--stop", stop, "--stop", "never")
    assert stopped.out.rstrip("\n") == plain.out.partition(stop)[0]
    seeds = [await ask(server, "generate", "x", "--max-tokens", "9", "--seed", s) for s in "112"]
    assert seeds[0].out == seeds[1].out != seeds[2].out
    grammar = tmp_path / "g.gbnf"
    grammar.write_text("nothing here", "utf-8")
    refused = await ask(server, "generate", "x", "--grammar", str(grammar))
    assert refused.code == 1
    assert "grammar" in refused.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", "99"), "sampling.temperature"),
        (("--model", "other"), "does not serve model 'other'"),
        (("--max-tokens", "100000"), "do not fit the context"),
        (("--draft-tokens", "50"), "speculation.max_draft_tokens"),
    ],
)
async def test_what_the_server_refuses_is_one_sentence(
    server: Server, arguments: tuple[str, ...], words: str
) -> None:
    outcome = await ask(server, "generate", "x", *arguments)
    assert_failed(outcome, 1, words)


def assert_failed(outcome: Outcome, code: int, words: str) -> None:
    """Checks that a command failed with one line, which tells the reason."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("drafthouse: ")
    assert words in lines[0]


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("models",)])
def test_no_server_is_told_with_what_to_do(command: tuple[str, ...], free_port: int) -> None:
    target = f"127.0.0.1:{free_port}"
    outcome = run(*command, "--server", target, source="hello\n")
    words = f"no server at {target}; start one with `drafthouse serve`"
    assert_failed(outcome, 1, words)


async def test_api_key(start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start_server(api_keys=("acme:secret",))
    assert_failed(await ask(server, "generate", "x"), 1, "--api-key")
    given = await ask(server, "generate", "x", *GREEDY, "--api-key", "secret")
    monkeypatch.setenv("DRAFTHOUSE_API_KEY", "secret")
    found = await ask(server, "generate", "x", *GREEDY)
    assert given.code == found.code == 0
    assert given.out == found.out


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_grammar_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "g.gbnf"
    if content is not None:
        path.write_bytes(content)
    assert_failed(run("generate", "x", "--grammar", str(path)), 2, "cannot read the grammar")


async def test_chat_remembers_and_forgets(server: Server, client: drafthouse.AsyncClient) -> None:
    async def answer(*turns: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        return (await client.generate(messages, temperature=0, max_output_tokens=20)).text

    first = await answer("a")
    second = await answer("a", first, "b")
    source = "a\nb\n\n/unknown\n/reset\nb\n/quit\nnever sent\n"
    outcome = await ask(server, "chat", *GREEDY, source=source)
    assert outcome.code == 0
    assert outcome.out.splitlines() == [first, second, await answer("b")]
    assert outcome.err == "commands: /reset, /quit\n"


async def test_chat_sets_arguments_of_the_template(
    server: Server, client: drafthouse.AsyncClient
) -> None:
    flags = ("--chat-template-kwargs", '{"enable_thinking": false}')
    outcome = await ask(server, "chat", *GREEDY, *flags, source="a\n")
    chat, kwargs = [{"role": "user", "content": "a"}], {"enable_thinking": False}
    plain = await client.generate(chat, temperature=0, max_output_tokens=20)
    result = await client.generate(
        chat, temperature=0, max_output_tokens=20, chat_template_kwargs=kwargs
    )
    assert outcome.code == 0
    assert outcome.out.splitlines() == [result.text]
    assert result.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize(("text", "told"), [("{", "not JSON: "), ("[]", "not a JSON object")])
def test_arguments_of_a_template_are_a_json_object(
    text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("chat", "--chat-template-kwargs", text)
    assert f"argument --chat-template-kwargs: {told}" in capsys.readouterr().err


async def test_chat_beyond_the_context_says_how_to_go_on(start_server: ServerFactory) -> None:
    server = await start_server()
    outcome = await ask(server, "chat", "--max-tokens", "1000", source="x" * 500 + "\n")
    assert outcome.code == 1
    assert "/reset starts anew" in outcome.err


async def test_models_are_listed(server: Server) -> None:
    outcome = await ask(server, "models")
    assert outcome.code == 0
    header, _, row = outcome.out.splitlines()
    assert header.split()[:2] == ["name", "architecture"]
    assert row.split()[:2] == ["fake", "fake"]
    assert "mtp" in row


def test_a_screen_gets_no_control_characters() -> None:
    screen, pipe = Screen(), io.StringIO()
    for out in (screen, pipe):
        Terminal(out, io.StringIO(), io.StringIO()).write("a\x1b[2Jb\x9bc\n\td")
    assert screen.getvalue() == "a�[2Jb�c\n\td"
    assert pipe.getvalue() == "a\x1b[2Jb\x9bc\n\td"


def test_loading_is_a_bar_on_a_screen_and_a_line_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(bytes(1000))
    screen, pipe = Screen(), io.StringIO()
    for err in (screen, pipe):
        with Terminal(io.StringIO(), err, io.StringIO()).loading() as progress:
            for share in (0.0, 0.5, 1.0):
                progress(str(path), share)
    assert pipe.getvalue() == f"loading {path}\n"
    assert "loading big.gguf" in screen.getvalue()


def test_a_log_tells_how_far_loading_is() -> None:
    pipe, times_s = io.StringIO(), iter([0.0, 60.0, 61.0, 61.5, 120.0, 182.0])
    lines = LoadLines(Terminal(io.StringIO(), pipe, io.StringIO()), 60.0, lambda: next(times_s))
    lines.tell()
    lines("a.gguf", 0.0)
    lines("a.gguf", 0.5)
    lines("a.gguf", 0.5)
    lines.tell()
    lines.tell()
    assert pipe.getvalue().splitlines() == [
        "starting for 60 s: looking at files and devices, the same for 60 s",
        "loading a.gguf",
        "starting for 120 s: 50% of a.gguf is loaded",
        "starting for 182 s: 50% of a.gguf is loaded, the same for 120 s",
    ]


def test_a_log_tells_it_now_and_then_until_the_server_serves() -> None:
    told = threading.Event()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("starting for"):
                told.set()
            return super().write(text)

    pipe = Told()
    with LoadLines(Terminal(io.StringIO(), pipe, io.StringIO()), 1e-3):
        assert told.wait(10)
    n_lines = len(pipe.getvalue())
    time.sleep(0.02)
    assert len(pipe.getvalue()) == n_lines


def test_table_aligns_numbers_at_the_right() -> None:
    lines = format_table(("name", "n"), [("a", "1"), ("long", "22"), ("b", "–")])
    assert lines == ["name   n", "────  ──", "a      1", "long  22", "b      –"]


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (999, "999"), (1000, "1 k"), (5_313_024, "5.31 M"), (2e13, "20 T")]
)
def test_counts_have_three_figures(n: float, text: str) -> None:
    assert format_count(n) == text


def test_sizes_have_a_unit() -> None:
    assert [format_bytes(n) for n in (12, 1000, 10_635_264)] == ["12 B", "1 kB", "10.6 MB"]


@pytest.mark.parametrize("arguments", [(), ("dance",), ("generate",), ("config",)])
def test_wrong_usage_is_exit_code_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: drafthouse" in capsys.readouterr().err


def test_every_setting_is_a_documented_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("serve", "--help"))
    text = capsys.readouterr().out
    for setting in SETTINGS.values():
        assert setting.flag in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "x"), "'port'"),
        (("--parallel", "0"), "'parallel'"),
        (("--parralel", "3"), "unknown flag '--parralel'; did you mean '--parallel'?"),
        (("--nonsense",), "unknown flag '--nonsense'; `drafthouse serve --help` lists all flags"),
        (("--no-kv-unfied",), "did you mean '--kv-unified'?"),
        (("--alias", "a"), "did you mean '--name'?"),
        (("--zzzzz=hush",), "unknown flag '--zzzzz'; `drafthouse serve --help` lists all flags"),
        (("-zhush",), "unknown flag '-z'; `drafthouse serve --help` lists all flags"),
        (("--api-keys", "a:b", "c:hush"), "an argument belongs to no flag"),
        (("--draft-type", "magic"), "one of auto, none, mtp"),
        (("--draft-type", "eagle3"), "needs model_draft"),
        (("--config", "missing.toml"), "No such file"),
    ],
)
def test_a_wrong_setting_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    outcome = run("serve", *arguments)
    assert_failed(outcome, 2, words)
    assert "hush" not in outcome.err


def test_an_unknown_flag_of_any_command_is_one_sentence() -> None:
    outcome = run("generate", "x", "--max-tokns", "5")
    assert_failed(outcome, 2, "unknown flag '--max-tokns'; did you mean '--max-tokens'?")


def test_the_example_of_the_settings_is_printed() -> None:
    outcome = run("config", "--example")
    assert (outcome.code, outcome.out, outcome.err) == (0, example(), "")


def test_the_old_form_of_tune_works_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def tune(config: Config, *_: object) -> None:
        ran.append(config.model)

    monkeypatch.setattr("drafthouse_server.cli.tune.tune", tune)
    outcome = run("bench", "--tune", "--model", "m.gguf")
    assert (outcome.code, ran) == (0, ["m.gguf"])
    assert "`drafthouse tune`" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert_failed(run("bench", "--quick"), 2, "drafthouse-bench")


def test_beyond_loopback_without_keys_is_one_sentence() -> None:
    outcome = run("serve", "--host", EVERY, "--model", "never-looked-at.gguf")
    assert_failed(outcome, 2, "insecure_no_auth")


def test_two_listeners_at_one_port_are_one_sentence() -> None:
    ports = ("--port", "9000", "--metrics-port", "9000")
    outcome = run("serve", *ports, "--model", "never-looked-at.gguf")
    assert_failed(outcome, 2, "port and metrics_port are both 9000")


async def test_what_a_server_lacks_stands_in_its_first_lines_and_is_a_warning(
    start_server: ServerFactory,
) -> None:
    server = await start_server()  # on loopback: only what it says is tested
    keys, tls = ("acme:" + "k" * 20,), {"ssl_cert_file": "c", "ssl_key_file": "k"}
    for config, is_open, is_plain in (
        (Config(host=EVERY, insecure_no_auth=True, insecure_no_tls=True), True, True),
        (Config(host=EVERY, insecure_no_auth=True, **tls), True, False),  # type: ignore[arg-type]  # by name
        (Config(host=EVERY, api_keys=keys, insecure_no_tls=True), False, True),
        (Config(host=EVERY, api_keys=keys, **tls), False, False),  # type: ignore[arg-type]  # by name
        (Config(insecure_no_auth=True, insecure_no_tls=True), False, False),
    ):
        out, err = io.StringIO(), io.StringIO()
        _describe(server, config, Terminal(out, err, io.StringIO()))
        assert ("OPEN to everybody" in out.getvalue()) is is_open
        assert ("insecure_no_auth" in err.getvalue()) is is_open
        assert ("PLAIN TEXT" in out.getvalue()) is is_plain
        assert ("insecure_no_tls" in err.getvalue()) is is_plain
        assert ("certificate c" in out.getvalue()) is bool(config.ssl_cert_file)


def test_a_port_in_use_is_one_sentence_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        outcome = run("serve", "--port", port, "--model", "never-looked-at.gguf")
        beside = run("serve", "--port", "0", "--admin-port", port, "--model", "never.gguf")
    assert_failed(outcome, 1, f"cannot listen at 127.0.0.1:{port}: address already in use")
    assert_failed(beside, 1, "choose another --admin-port or --admin-host")


def test_a_socket_in_use_is_one_sentence_and_stays_with_its_server(tmp_path: Path) -> None:
    """Otherwise gRPC takes its place, and the server that is running is never asked again."""
    path = tmp_path / "d.sock"
    command = ("serve", "--host", f"unix:{path}", "--model", "never-looked-at.gguf")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        holder.listen(1)
        assert_failed(run(*command), 1, f"cannot listen at unix:{path}: address already in use")
        assert path.is_socket()
        # That of AdminService, too: `drafthouse drain` would end another server.
        admin = ("serve", "--port", "0", "--admin-host", f"unix:{path}", "--model", "never.gguf")
        assert_failed(run(*admin), 1, f"cannot listen at unix:{path}: address already in use")
        assert path.is_socket()
    try_address(f"unix:{path}", 0)  # what an ended server has left behind is no hindrance


@pytest.mark.parametrize(
    ("name", "words"),
    [("no/folder/d.sock", "no such file"), ("x" * 108, "too long"), ("file", "already in use")],
)
def test_a_path_at_which_no_socket_can_be_is_one_sentence(
    tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "file").write_text("kept")
    outcome = run("serve", "--host", f"unix:{tmp_path / name}", "--model", "never-looked-at.gguf")
    assert_failed(outcome, 1, words)
    assert "choose another --host" in outcome.err
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with files that are no models."""
    (tmp_path / "text.gguf").write_text("this is not a model\n" * 100, "utf-8")
    (tmp_path / "cut.gguf").write_bytes(DENSE.read_bytes()[:1_000_000])
    (tmp_path / "empty.gguf").write_bytes(b"")
    return tmp_path


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("missing.gguf", (), "check the path"),
        ("text.gguf", (), "GGUF"),
        ("cut.gguf", (), "GGUF"),
        ("empty.gguf", (), "GGUF"),
        (".", (), "GGUF"),
        (str(MODELS / "tiny-draft-f16.gguf"), ("--draft-type", "mtp"), "MTP"),
        (str(DENSE), ("--draft-type", "eagle3", "--model-draft", "missing.gguf"), "missing.gguf"),
        (
            str(DENSE),
            ("--draft-type", "eagle3", "--model-draft", str(MODELS / "tiny-draft-f16.gguf")),
            "EAGLE-3",
        ),
        (
            str(DENSE),
            ("--draft-type", "eagle3", "--model-draft", str(FOREIGN_EAGLE3)),
            "made for this target",
        ),
    ],
    ids=[
        "missing",
        "text",
        "cut",
        "empty",
        "folder",
        "no-heads",
        "missing-draft",
        "not-eagle3",
        "foreign-eagle3",
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence(
    broken: Path, model: str, arguments: tuple[str, ...], words: str
) -> None:
    """In a process of its own: what the engine and llama.cpp write counts too."""
    command = (*COMMAND, "serve", "--port", "0", "--model", model, "--log-level", "error")
    ended = subprocess.run(
        (*command, *arguments), cwd=broken, capture_output=True, text=True, check=False, timeout=100
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    # The log is written by a thread of its own, and may come before it or after.
    (sentence,) = (it for it in ended.stderr.splitlines() if it.startswith("drafthouse: "))
    assert sentence.startswith("drafthouse: cannot load ")
    assert words in sentence
    assert "Traceback" not in ended.stderr


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Runs `drafthouse serve` on the demo model; yields the process and its address."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTHOUSE_")}
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "serve", "--port", "0", "--threads", "1", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        cwd="/",  # the demo model is found from anywhere
    )
    assert process.stdout is not None
    try:
        lines = []
        async for line in process.stdout:
            lines.append(line.decode())
            if lines[-1].startswith(LISTENS_AT):
                break
        text = "".join(lines)
        assert "tiny-mimo2-f16" in text
        assert "draft    mtp, " in text
        assert "at most 4" in text
        yield process, text.rpartition(LISTENS_AT)[2].strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.model
async def test_sigterm_lets_a_running_stream_finish_and_exits_with_0() -> None:
    async with running() as (process, target), drafthouse.AsyncClient(target, retry=None) as client:
        stream = client.generate("x", max_output_tokens=900, temperature=0, ignore_end_token=True)
        n_before = 0
        async for chunk in stream:
            n_before += len(chunk.token_ids)
            if n_before >= 20 and process.returncode is None:
                process.send_signal(signal.SIGTERM)
                n_before = -(10**6)  # once
        result = await stream
        assert result.usage.output_tokens == 900
        assert await asyncio.wait_for(process.wait(), 100) == 0
        with pytest.raises(drafthouse.Unavailable):
            await client.generate("x")
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert "SIGTERM: draining" in log
        assert "Traceback" not in log


@pytest.mark.model
async def test_generate_against_the_served_demo_model() -> None:
    async with running() as (_, target):
        outcome = await asyncio.to_thread(
            run, "generate", "def parse(", "--server", target, "--max-tokens", "24"
        )
    assert outcome.code == 0
    assert outcome.out.strip()
    assert re.search(r"\d+ tokens, .*acceptance [\d.]+%", outcome.err)


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_stops_a_generation_and_shows_the_figures(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    server = await start_server(FakeEngine(step_s=0.02))
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "generate", "x", "--max-tokens", "900", "--server", server.target),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 130, err.decode()
    assert re.fullmatch(r"\d+ tokens?, \d+ tokens/s, first token after [\d.]+ ms\n", err.decode())
    await eventually(lambda: server.loop.statistics().n_running == 0)
    assert server.loop.statistics().n_requests == {"cancelled": 1}


INTERRUPTED_AT_THE_LOCK = """
import os, signal, sys, threading

class Lock:
    "An RLock; the first one released for a wait, once text is out, meets Ctrl-C before the wait."
    has_text = is_pressed = False

    def __init__(self):
        self._lock = lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self.locked = getattr(self._lock, "locked", None)  # from Python 3.14 on
        self._acquire_restore, self._is_owned = self._lock._acquire_restore, self._lock._is_owned

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)

    def _release_save(self):
        saved = self._lock._release_save()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and Lock.has_text and not Lock.is_pressed:
            Lock.is_pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        return saved

lock, threading.RLock = threading.RLock, Lock
from drafthouse_server.cli.main import main
from drafthouse_server.cli.terminal import Terminal

class Noting(Terminal):
    def write(self, text):
        super().write(text)
        Lock.has_text = True

sys.exit(main(sys.argv[1:], Noting()))
"""


INTERRUPTED_WHILE_IMPORTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from drafthouse_server.__main__ import main
sys.exit(main())
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("module", ["drafthouse_server.cli.main", "grpc", "drafthouse_engine"])
def test_ctrl_c_while_the_program_is_imported_ends_it_without_a_trace(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTED, module],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_stops_a_generation_also_where_a_lock_is_just_let_go(
    start_server: ServerFactory,
) -> None:
    server = await start_server(FakeEngine(step_s=0.02))
    arguments = ("generate", "x", "--max-tokens", "900", "--server", server.target)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", INTERRUPTED_AT_THE_LOCK, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()  # it hung, as it did before Ctrl-C was told to a thread
    assert process.returncode == 130, err.decode()
    assert re.fullmatch(r"\d+ tokens?, \d+ tokens/s, first token after [\d.]+ ms\n", err.decode())


async def test_ctrl_c_as_a_command_closes_its_connection_ends_it_without_a_trace(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits there lets Ctrl-C between two instructions of its wait out as this error."""

    def close(client: drafthouse.Client) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("cannot release un-acquired lock")

    monkeypatch.setattr(drafthouse.Client, "close", close)
    assert (await ask(server, "generate", "x", *GREEDY)).code == 130


async def test_a_reader_who_has_enough_is_no_error(start_server: ServerFactory) -> None:
    server = await start_server(FakeEngine(step_s=0.01))
    command = [*COMMAND, "generate", "x", "--max-tokens", "900", "--server", server.target]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.read(4)
    process.stdout._transport.close()  # type: ignore[attr-defined]  # as `head` does
    _, code = await asyncio.gather(process.stderr.read(), process.wait())  # type: ignore[union-attr]  # it is a pipe
    assert code == 141
