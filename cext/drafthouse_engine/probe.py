"""Loads and decodes a model once in a process of its own, which has nothing to lose.

llama.cpp ends the process of a model that its graph cannot compute. Whoever serves a model of an
architecture that is not in `PROVEN` finds that out here first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from drafthouse_engine.devices import Placement
from drafthouse_engine.errors import OutOfMemory
from drafthouse_engine.options import EngineParams

__all__ = ["PATIENCE_S", "probe_model"]

PATIENCE_S: Final = 300.0
"""Longest time in which nothing is heard of the process, and in which it reads nothing."""

_END_S: Final = 10.0
"""Longest time that the end of a process is waited for that was killed."""

_PER_LOAD: Final = 10.0
"""Times as long as loading takes that the first decodes may take."""

_WORKER: Final = ("-m", "drafthouse_engine.probe_worker")

_TOLD_MAX: Final = 200
"""Most characters of what llama.cpp says at its end."""

_ERROR_BYTES_MAX: Final = 1 << 20
"""Most bytes that are kept of what llama.cpp says, the last ones."""

_KEPT: Final = frozenset(
    {
        *("HOME", "LANG", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TMPDIR", "XDG_CACHE_HOME"),
        *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
        *("DRAFTHOUSE_CPU_LEVEL", "GLIBC_TUNABLES"),
    }
)
_KEPT_PREFIXES: Final = (
    *("GGML_", "LC_", "LLAMA_", "MALLOC_"),
    *("BLIS_", "GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_"),
    *("CUDA_", "GPU_", "HIP_", "HSA_", "NVIDIA_", "ONEAPI_", "ROCR_", "SYCL_", "VK_", "ZE_"),
)
"""Variables that the process is given, by name and by how the name begins; no other one, since
keys, passwords and addresses that hold them may be among them."""


def probe_model(
    path: str | os.PathLike[str],
    params: EngineParams | None = None,
    *,
    n_gpu_layers: int = -1,
    placement: Placement | None = None,
    path_draft: str | os.PathLike[str] | None = None,
    n_gpu_layers_draft: int = -1,
    placement_draft: Placement | None = None,
    margin_bytes: int | None = None,
    rpc: tuple[str, ...] = (),
    patience_s: float = PATIENCE_S,
) -> str:
    """Decodes a few tokens of several sequences in a process of its own, and returns what is wrong.

    The weights are loaded twice, one time after the other; the contexts are small.

    Args:
        path: The model, a GGUF file.
        params: How the engine will be built. Of its sizes counts alone whether it has more than one
            sequence; its synthetic rates do not. Where its draft type is none of these models',
            drafts are given.
        n_gpu_layers: Layers on an accelerator; −1 is all.
        placement: Where the weights lie; None is whole layers over all devices.
        path_draft: The draft model, where the draft type has one.
        n_gpu_layers_draft: The same of the draft model.
        placement_draft: The same of the draft model.
        margin_bytes: Left free on each device; layers of the model that do not fit there stay with
            the CPU, as `Survey.fit` finds. None: they lie as the arguments say, fit or not.
        rpc: RPC servers, whose devices are that process's, too. Each serves one process at a time:
            nothing of this one may lie there.
        patience_s: Longest time in which nothing is heard of that process. While it loads, it tells
            how far it is; from then on it has ten times as long as loading took, and no less than
            this. As long as it reads files, its time begins anew.

    Returns:
        What is wrong, as the end of a sentence about the model; empty where nothing is. What
        `Model` and `Engine` refuse with an error of their own is not told here.

    Raises:
        OSError: the process cannot be started, or ends before it looks at the model.
        OutOfMemory: SIGKILL has ended the process, as the system does where memory is short; what
            is wrong with the model, if anything, is not known.
    """
    params = dataclasses.replace(params or EngineParams(), synth_rates=())
    setup = {
        "params": dataclasses.asdict(params),
        "target": _part(path, n_gpu_layers, placement),
        "draft": path_draft and _part(path_draft, n_gpu_layers_draft, placement_draft),
        "margin_bytes": margin_bytes,
        "rpc": rpc,
    }
    # The process ends when this one does: it reads its standard input until there is an end.
    process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [sys.executable or "python3", "-P", *_WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    )
    talk = _Talk(process, patience_s)
    try:
        told, error = talk.run(setup)
    except subprocess.TimeoutExpired as late:
        return f"its first decode, in a process of its own, {late.cmd} (probe false: do without)"
    finally:
        _end(process)
    if process.returncode == 0 and told is not None:
        return told
    end, words = _end_of(process.returncode), _last_words(error)
    if not talk.is_heard:
        raise ChildProcessError(f"Python {end} before it looks at the model{words}")
    if process.returncode == -signal.SIGKILL:  # which no library sends to its own process
        raise OutOfMemory(
            "the process that decodes the model first was ended by SIGKILL, as the system ends"
            " processes where memory is short"
        )
    return f"llama.cpp {end} when it computes it{words}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and waits for that, but not for ever.

    One that waits for a disk or a driver that hangs ends when these answer.
    """
    process.kill()  # harmless on one that has ended
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what it has not read
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _part(
    path: str | os.PathLike[str], n_gpu_layers: int, placement: Placement | None
) -> dict[str, Any]:
    """Returns a model and where its weights lie, as JSON can say it."""
    places = dataclasses.asdict(placement or Placement())
    return {"path": os.fsdecode(path), "n_gpu_layers": n_gpu_layers, "placement": places}


class _Talk:
    """What is said to the process, and heard from it, as long as it is heard."""

    def __init__(self, process: subprocess.Popen[bytes], patience_s: float) -> None:
        self._process = process
        self._patience_s = patience_s
        self._limit_s = patience_s
        self._is_loaded = False
        self._problem: str | None = None
        self._error = bytearray()
        self._read = (0, 0)
        self.is_heard = False
        """Whether it has said anything: it does before it looks at the model."""

    def run(self, setup: dict[str, Any]) -> tuple[str | None, bytes]:
        """Returns the problem that the process tells, if it tells one, and what llama.cpp says.

        Raises:
            subprocess.TimeoutExpired: it is heard of no more; `cmd` is the end of a sentence.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(json.dumps(setup).encode() + b"\n")
            process.stdin.flush()
        lines = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, lines)
            selector.register(process.stderr, selectors.EVENT_READ, self._error)
            heard_s = time.monotonic()
            while selector.get_map():
                ready = selector.select(heard_s + self._limit_s - time.monotonic())
                for key, _ in ready:
                    part = os.read(key.fd, 65536)
                    key.data.extend(part)
                    if not part:
                        selector.unregister(key.fileobj)
                while b"\n" in lines:
                    line, _, rest = bytes(lines).partition(b"\n")
                    lines[:] = rest
                    self._hear(json.loads(line))
                    heard_s = time.monotonic()
                # What it complains of without end is no answer, and nobody reads all of it.
                del self._error[:-_ERROR_BYTES_MAX]
                if time.monotonic() >= heard_s + self._limit_s:
                    if not self._has_read():
                        raise subprocess.TimeoutExpired(self._too_late(), self._limit_s)
                    heard_s = time.monotonic()
        # What closes its pipes has ended, or is about to.
        try:
            process.wait(self._patience_s)
        except subprocess.TimeoutExpired as late:
            raise subprocess.TimeoutExpired(self._too_late(), self._limit_s) from late
        return self._problem, bytes(self._error)

    def _has_read(self) -> bool:
        """Returns whether it has read from a disk since it was heard or asked last.

        llama.cpp maps a file by reading the whole of it, and tells nothing meanwhile.
        """
        before, self._read = self._read, _read_by(self._process.pid)
        return self._read[0] > before[0] or self._read[1] > before[1]

    def _hear(self, told: dict[str, Any]) -> None:
        self.is_heard = True
        self._read = _read_by(self._process.pid)
        if "loaded_s" in told:
            self._is_loaded = True
            self._limit_s = max(self._patience_s, _PER_LOAD * float(told["loaded_s"]))
        if "problem" in told:
            self._problem = str(told["problem"])

    def _too_late(self) -> str:
        if self._is_loaded:
            return f"came to no end within {self._limit_s:g} s"
        return f"did not get on with loading it for {self._limit_s:g} s"


def _read_by(pid: int) -> tuple[int, int]:
    """Returns how much a process has read; zeros where the system does not tell.

    Bytes from block devices, which grow while a file is larger than memory, too; and pages that are
    in memory, which grow whatever the file system.
    """
    folder = Path(f"/proc/{pid}")
    return _number(folder / "io", r"read_bytes: (\d+)"), _number(folder / "statm", r"\d+ (\d+)")


def _number(path: Path, pattern: str) -> int:
    try:
        match = re.search(pattern, path.read_text("ascii"))
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _environment() -> dict[str, str]:
    """Returns those of our variables that decide how a model is computed, and where."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _end_of(code: int) -> str:
    if code > 0:
        return f"ends its process with exit code {code}"
    try:
        return f"ends its process by {signal.Signals(-code).name}"
    except ValueError:
        return f"ends its process by signal {-code}"


def _last_words(error: bytes) -> str:
    """Returns what llama.cpp has asserted, or else the last line that there is, in brackets."""
    lines = [line.strip() for line in error.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    asserted = [line for line in lines if "GGML_ASSERT(" in line or "GGML_ABORT" in line]
    if not lines:
        return ""
    text = (asserted or lines)[-1]
    text = text[text.find("GGML_ASSERT(") :] if "GGML_ASSERT(" in text else text
    return f" ({text[:_TOLD_MAX]})"
