"""What a process says, and how it ends, where llama.cpp gives up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.archs import write_model
from tests.support.built import needs_extension
from tests.support.demo import EAGLE3, MODELS, TARGETS
from tests.support.gguf_copy import Tensor, copied

from drafthouse_engine import InvalidArgument, on_abort

pytestmark = [*needs_extension(), pytest.mark.model, pytest.mark.timeout(300)]

ASSERTION = "binary_op: unsupported types: dst: f32, src0: f32, src1: f16"
DECODE = """
import sys
from drafthouse_engine import *
{words}
with Model(sys.argv[1]) as model, Engine(model, None, EngineParams(n_threads=2)) as engine:
    engine.seq_begin(0, Sampler(model, SamplingParams()))
    engine.decode([1, 2, 3], [0, 1, 2], [0, 0, 0], [False, False, True])
"""


def with_half_factors(name: str, tensor: Tensor) -> Tensor:
    """Turns factors into a type that no graph on a CPU multiplies by, and no loader refuses."""
    data, kind = tensor
    if not name.endswith(("altup_correct_scale.weight", "attn_norm_2.weight")):
        return tensor
    assert kind == GGMLQuantizationType.F32
    return data.astype(np.float16), GGMLQuantizationType.F16


@pytest.fixture(scope="module")
def unsound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which llama.cpp loads everything, and that ends the process that computes it."""
    folder = tmp_path_factory.mktemp("abort")
    sound = write_model(folder / "sound.gguf", "gemma3n")
    return copied(sound, folder / "unsound.gguf", change=with_half_factors)


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program that finds a debugger, which must not be started."""
    gdb = folder / "gdb"
    gdb.write_text("#!/bin/sh\necho a debugger\n")
    gdb.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key != "GGML_NO_BACKTRACE"}
    path = f"{folder}{os.pathsep}{kept['PATH']}"
    return subprocess.run(
        command,
        env=kept | {"PATH": path, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def decoded(unsound: Path, words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return ended([sys.executable, "-c", DECODE.format(words=words), str(unsound)], folder)


def test_two_threads_that_give_up_at_once_end_the_process(unsound: Path, tmp_path: Path) -> None:
    done = decoded(unsound, "", tmp_path)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert done.stderr.count(ASSERTION) == 1
    assert "a debugger" not in done.stdout + done.stderr


def test_it_says_the_last_words_and_ends_with_their_code(unsound: Path, tmp_path: Path) -> None:
    words = "on_abort('not these', 4)\non_abort('what to do', 3)"
    done = decoded(unsound, words, tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.rstrip().endswith(f"{ASSERTION}\nwhat to do")
    assert "not these" not in done.stderr


def test_without_a_code_it_is_sigabrt_as_ever(unsound: Path, tmp_path: Path) -> None:
    done = decoded(unsound, "on_abort('x' * 2000)", tmp_path)
    assert done.returncode == -signal.SIGABRT
    assert "x" * 1023 in done.stderr
    assert "x" * 1024 not in done.stderr


def test_a_reader_of_errors_who_is_stuck_does_not_keep_the_process(unsound: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        command = [sys.executable, "-c", DECODE.format(words="on_abort('x')"), str(unsound)]
        done = subprocess.run(command, stderr=writer, timeout=200, check=False)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == -signal.SIGABRT


def test_a_server_says_that_it_cannot_load_such_a_model(unsound: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", "0"]
    done = ended([*command, "--model", str(unsound)], tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.rstrip().splitlines()[-2:]
    assert last[0].endswith(ASSERTION)
    assert last[1] == (
        f"drafthouse: cannot load {str(unsound)!r}: llama.cpp gave up, as the line above says;"
        " use another model, or other settings"
    )


def test_a_server_says_that_it_may_be_the_draft_model(tmp_path: Path) -> None:
    draft = copied(MODELS / EAGLE3["dense"], tmp_path / "draft.gguf", change=with_half_factors)
    target = MODELS / TARGETS["dense"]
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", "0"]
    done = ended([*command, "--model", str(target), "--model-draft", str(draft)], tmp_path)
    assert done.returncode == 1, done.stderr
    last = done.stderr.rstrip().splitlines()[-2:]
    assert last[0].endswith(ASSERTION)
    assert last[1] == (
        f"drafthouse: cannot load {str(target)!r}: together with the draft model {str(draft)!r},"
        " llama.cpp gave up, as the line above says; do without that draft model, use another"
        " model, or other settings"
    )


def test_a_server_says_that_a_tokenizer_reads_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mixed.gguf"
    copied(MODELS / TARGETS["dense"], path, {"tokenizer.ggml.model": "llama"})
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", "0"]
    done = ended([*command, "--model", str(path)], tmp_path)
    assert done.returncode == 1, done.stderr
    assert "its tokenizer cannot read a text (" in done.stderr


FAULT = """
import os, signal
from drafthouse_engine import *
on_abort("what to do", 3)
{more}
os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_fault_while_a_model_is_loaded_says_the_words_too(name: str, tmp_path: Path) -> None:
    done = ended([sys.executable, "-c", FAULT.format(name=name, more="")], tmp_path)
    assert done.returncode == 3
    said, words = done.stderr.splitlines()
    assert said.startswith(f"{name}: ")
    assert words == "what to do"


OVERFLOW = """
import ctypes, threading
from drafthouse_engine import *

def load():
    on_abort("what to do", 3)
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(256), b"(" * 10_000_000, 1)

threading.Thread(target=load).start()
"""


def test_a_stack_that_overflows_while_a_model_is_loaded_says_them_too(tmp_path: Path) -> None:
    done = ended([sys.executable, "-c", OVERFLOW], tmp_path)
    assert done.returncode == 3
    said, words = done.stderr.splitlines()
    assert said.startswith("SIGSEGV: ")
    assert words == "what to do"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"])
def test_and_later_it_is_the_signal_s(name: str, tmp_path: Path) -> None:
    more = "on_abort('later', 4)\non_abort('later')"
    done = ended([sys.executable, "-c", FAULT.format(name=name, more=more)], tmp_path)
    assert done.returncode == -getattr(signal, name)
    assert done.stderr == ""


@pytest.mark.parametrize("exit_code", [-1, 256])
def test_a_code_out_of_range_is_refused(exit_code: int) -> None:
    with pytest.raises(InvalidArgument, match=f"exit_code is {exit_code}"):
        on_abort("x", exit_code)


def test_words_with_a_zero_byte_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="words"):
        on_abort("a\0b")
