"""Prints how many compilers may run side by side, as cores and memory allow, in containers too.

CMake asks it at configure time, so a plain `pip install` is bounded; `make` asks at every build.

Environment:
    CMAKE_BUILD_PARALLEL_LEVEL: the number to use instead.
"""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

JOB_BYTES = 1 << 30  # of one compiler; measured: 0.9 GB for the largest file of llama.cpp
GPU_JOB_BYTES = 4 << 30  # of one file of CUDA or HIP templates
GPU_OPTION = re.compile(r"-DGGML_(CUDA|HIP|MUSA|SYCL)(:\w+)?=(ON|1|TRUE|YES)\b", re.IGNORECASE)
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


def read(path: Path) -> str:
    """Returns the text of a file, nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Returns this process's cgroup of a controller and all above it, v2 or v1.

    Args:
        root: `/`, or a test's copy of it.
        controller: `cpu` or `memory`.
    """
    folders = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        # In a container the path may be the host's, where here is only the top.
        folder = top / path.strip("/")
        folders += [folder, *(up for up in folder.parents if up == top or top in up.parents)]
    return folders


def quota_cores(root: Path = Path("/")) -> float:
    """Returns how many cores' time the cgroups give, infinity where they do not bound it."""
    cores = math.inf
    for folder in cgroup_folders(root, "cpu"):
        words = read(folder / "cpu.max").split() or [
            read(folder / "cpu.cfs_quota_us").strip() or "max",
            read(folder / "cpu.cfs_period_us").strip() or "100000",
        ]
        if words[0] not in ("max", "-1"):
            cores = min(cores, int(words[0]) / int(words[1]))
    return cores


def memory_bytes(root: Path = Path("/")) -> float:
    """Returns the memory that this machine has to spare, at most what the cgroups give."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    limits: list[float] = [int(available[1]) * 1024] if available else []
    for folder in cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read(folder / name).strip()
            if text.isdigit() and int(text) < NO_LIMIT:
                limits.append(int(text))
    return min(limits, default=math.inf)


def jobs(*, is_gpu: bool, root: Path = Path("/")) -> int:
    """Returns how many compilers may run side by side, at least one.

    Args:
        is_gpu: whether kernels for GPUs are compiled, each of which takes gigabytes.
        root: `/`, or a test's copy of it.
    """
    own = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    if own.isdigit() and int(own) > 0:
        return int(own)
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    n_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    n_by_memory = memory_bytes(root) / (GPU_JOB_BYTES if is_gpu else JOB_BYTES)
    return max(1, int(min(n_cores, max(quota_cores(root), 1), n_by_memory)))


if __name__ == "__main__":
    options = " ".join([os.environ.get("CMAKE_ARGS", ""), *sys.argv[1:]])
    sys.stdout.write(f"{jobs(is_gpu=bool(GPU_OPTION.search(options)))}\n")
