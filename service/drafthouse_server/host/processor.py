"""The processor: its name, what it can, and how its memory is divided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Processor", "read_processor"]

_LEVELS = (
    (1, {"sse2"}),
    (2, {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
    (3, {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    (4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)
"""What each level of x86-64 adds, as /proc/cpuinfo calls it."""

_OF_KERNELS = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
}
"""What ggml's kernels may be compiled for, with the word of /proc/cpuinfo."""


@dataclass(frozen=True, slots=True)
class Processor:
    """What the kernel tells of the processor."""

    name: str
    """Name of the processor as its maker writes it; empty where it is not told."""
    level: int
    """Level of x86-64, 1 to 4; 0: another architecture, or unknown."""
    features: frozenset[str]
    """What of ggml's kernels it can run, in ggml's words."""
    n_nodes: int
    """Nodes of memory (NUMA), at least 1."""


def read_processor(root: Path = Path("/")) -> Processor:
    """Returns what the kernel tells.

    Args:
        root: Where /proc and /sys lie; another folder in tests.
    """
    try:
        text = (root / "proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    first = {name.strip(): rest.strip() for name, _, rest in lines}
    flags = set(first.get("flags", "").split())
    level = 0
    for number, needed in _LEVELS:
        if level == number - 1 and needed <= flags:
            level = number
    features = frozenset(name for name, flag in _OF_KERNELS.items() if flag in flags)
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return Processor(first.get("model name", ""), level, features, max(1, len(nodes)))
