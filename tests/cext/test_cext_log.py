"""llama.cpp's log reaches Python's logging from warnings on, or a callback, and never stderr."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hand import DENSE, MODELS

from drafthouse_engine import BadGrammar, Model, Sampler, SamplingParams, set_log

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def default_log() -> Iterator[None]:
    yield
    set_log(logging.WARNING)


def bad_file(folder: Path) -> Path:
    path = folder / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    return path


ERRORS = """
import logging, sys
from drafthouse_engine import BadModel, Model

logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s", level=logging.DEBUG)
try:
    Model(sys.argv[1])
except BadModel:
    pass
"""


def test_errors_reach_the_logger(tmp_path: Path) -> None:
    """In a process of its own: complaints are limited, and the tests before may have used them."""
    command = [sys.executable, "-c", ERRORS, str(bad_file(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = set(done.stdout.splitlines())
    assert "drafthouse_engine.llama ERROR" in found
    assert found <= {f"drafthouse_engine.llama {level}" for level in ("WARNING", "ERROR")}


def test_loading_a_good_model_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    Model(MODELS / DENSE).close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_callback_takes_lines_from_its_level_on() -> None:
    lines: list[tuple[int, str]] = []
    set_log(logging.INFO, lambda level, line: lines.append((level, line)))
    Model(MODELS / DENSE).close()
    assert any("mimo2" in line for _, line in lines)
    assert all(level >= logging.INFO and "\n" not in line for level, line in lines)
    lines.clear()
    set_log(logging.CRITICAL, lambda level, line: lines.append((level, line)))
    Model(MODELS / DENSE).close()
    assert not lines


def test_callback_may_call_the_library() -> None:
    found: list[int] = []
    model = Model(MODELS / DENSE, vocab_only=True)
    set_log(logging.INFO, lambda *_: found.append(len(model.tokenize("x"))) if not found else None)
    Model(MODELS / DENSE, vocab_only=True).close()
    assert found


def test_callback_must_be_callable() -> None:
    with pytest.raises(TypeError):
        set_log(logging.INFO, "print")  # type: ignore[arg-type]  # wrong on purpose


def test_unconfigured_program_prints_nothing(tmp_path: Path) -> None:
    script = f"""
from drafthouse_engine import *
Engine(Model({str(MODELS / DENSE)!r}), None, EngineParams(n_ctx_seq=64))
try:
    Model({str(bad_file(tmp_path))!r})
except BadModel:
    pass
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_client_s_grammar_is_in_no_line(caplog: pytest.LogCaptureFixture) -> None:
    words = "\x07words of a client\n\n"
    grammars = [
        f'root ::= "a" )\n{words * 3000}',
        f"root ::= {'of-a-client-' * 3000}",
        'root ::= "' + words * 1000,
        f'root ::= root "{words.strip()}"',
    ]
    set_log(logging.DEBUG)
    with caplog.at_level(logging.DEBUG), Model(MODELS / DENSE, vocab_only=True) as model:
        caplog.clear()
        for grammar in grammars:
            with pytest.raises(BadGrammar) as caught:
                Sampler(model, SamplingParams(grammar=grammar))
            assert len(caught.value.message) < 250
            assert caught.value.message.isprintable()
    assert not [
        record for record in caplog.records if "a client" in record.getMessage().replace("-", " ")
    ]


FLOOD = """
import sys, time
from drafthouse_engine import BadModel, Model, set_log

lines = []
set_log(30, lambda level, line: lines.append(line))
started = time.monotonic()
for _ in range(400):
    try:
        Model(sys.argv[1])
    except BadModel:
        pass
n_allowed = 64 + 8 * (time.monotonic() - started + 1)
told = [line for line in lines if not line.endswith("lines were left out")]
assert 64 <= len(told) <= n_allowed, (len(told), n_allowed)
time.sleep(1)
told_before = len(told)
try:
    Model(sys.argv[1])
except BadModel:
    pass
left_out = [int(line.split()[0]) for line in lines if line.endswith("lines were left out")]
assert sum(left_out) + told_before >= 400, (left_out, told_before)
assert all(len(line) <= 400 and line.isprintable() for line in lines)
"""


def test_a_flood_of_complaints_is_cut_and_counted(tmp_path: Path) -> None:
    """64 lines at once and 8 a second; how many were left out is said with the next."""
    command = [sys.executable, "-c", FLOOD, str(bad_file(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
