"""Loads and decodes a model once in a process of its own, which has nothing to lose.

llama.cpp ends the process of a model that its graph cannot compute. Whoever serves a model of an
architecture that is not in `PROVEN` finds that out here first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any, Final

from drafthouse_engine.options import EngineParams

__all__ = ["probe_model"]

_TOLD_MAX: Final = 200
"""Most characters of what llama.cpp says at its end."""

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
    path: str | os.PathLike[str], params: EngineParams | None = None, *, n_gpu_layers: int = -1
) -> str:
    """Decodes a few tokens of several sequences in a process of its own, and returns what is wrong.

    The weights are loaded twice, one time after the other; the contexts are small.

    Args:
        path: The model, a GGUF file.
        params: How the engine will be built; of its draft type counts whether there is one.
        n_gpu_layers: Layers on an accelerator; −1 is all.

    Returns:
        What is wrong, as the end of a sentence about the model; empty where nothing is. What
        `Model` and `Engine` refuse with an error of their own is not told here.

    Raises:
        OSError: the process cannot be started.
    """
    params = params or EngineParams()
    setup = {
        "path": os.fsdecode(path),
        "n_gpu_layers": n_gpu_layers,
        "has_drafts": params.draft_type != "none",
        "kv_unified": params.kv_unified,
        "flash_attention": params.flash_attention,
        "flash_forced": params.flash_forced,
        "n_threads": params.n_threads,
    }
    # The process ends when this one does: it reads its standard input until there is an end.
    with subprocess.Popen(  # noqa: S603  # our own interpreter and module
        [sys.executable or "python3", "-P", "-m", "drafthouse_engine.probe_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    ) as process:
        told, error = _talk(process, setup)
    if process.returncode == 0:
        return str(json.loads(told)["problem"])
    return f"llama.cpp {_end_of(process.returncode)} when it computes it{_last_words(error)}"


def _talk(process: subprocess.Popen[bytes], setup: dict[str, Any]) -> tuple[bytes, bytes]:
    """Returns what the process writes; its input stays open until it has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(setup).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already
    stdin, process.stdin = process.stdin, None  # `communicate` would close it
    try:
        told, error = process.communicate()
        stdin.close()
    except BaseException:
        process.kill()
        raise
    return told, error


def _environment() -> dict[str, str]:
    """Returns those of our variables that decide how a model is computed, and where."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GGML_NO_BACKTRACE": "1",  # it would start a debugger
    }


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
