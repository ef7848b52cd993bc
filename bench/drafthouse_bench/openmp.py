"""Compares OpenMP's threads with ggml's own pool, in the bare step loop: no server, no Python.

    make dev; drafthouse-bench openmp [--threads 1,2] [--streams 1,8,32] [--rounds 3]
        [--draft-type mtp] [--model models/tiny-qwen35-f16.gguf]

The engine is built with OpenMP, whose threads spin between two pieces of work. Here ggml-cpu is
compiled a second time without it, into build/ggml-pool (two minutes, once; with the options of
CMAKE_ARGS), and step_bench is linked with that. All variants run in turns, and the median counts:

- openmp: as it is built;
- passive: the same, its threads sleep while they wait (OMP_WAIT_POLICY=passive);
- bound: the same, each thread stays on its core (OMP_PROC_BIND=true);
- pool: ggml's own threads, which poll for a while before they sleep; they outlive a step
  (`attach_pool` in cext/spec/engine.cpp).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
POOL = BUILD / "ggml-pool"
OPENMP_BENCH = BUILD / "bin" / "step_bench"
POOL_BENCH = BUILD / "bin" / "step_bench_pool"
LIBRARY = "ggml/src/libggml-cpu.a"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_POSITION_INDEPENDENT_CODE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_COMMON=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
VARIANTS: tuple[tuple[str, Path, dict[str, str]], ...] = (
    ("openmp", OPENMP_BENCH, {}),
    ("passive", OPENMP_BENCH, {"OMP_WAIT_POLICY": "passive"}),
    ("bound", OPENMP_BENCH, {"OMP_PROC_BIND": "true"}),
    ("pool", POOL_BENCH, {}),
)
N_PROMPT = 24
N_SPARE = 40  # cells for drafts


def command_output(*command: str) -> str:
    """Returns what a command prints; exits with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout.strip()


def build_pool() -> None:
    """Compiles ggml-cpu without OpenMP; repeated, only what changed."""
    for tool in ("cmake", "ninja"):
        if not shutil.which(tool):
            sys.exit(f"There is no {tool}: apt-get install cmake ninja-build.")
    source = command_output(sys.executable, str(ROOT / "cext" / "fetch_llama_cpp.py"))
    extra = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    print("building ggml-cpu without OpenMP …", file=sys.stderr)
    command_output("cmake", "-G", "Ninja", "-S", source, "-B", str(POOL), *extra, *OPTIONS)
    n_jobs = str(os.cpu_count() or 1)
    command_output("cmake", "--build", str(POOL), "--target", "ggml-cpu", "--parallel", n_jobs)


def link_pool(folder: Path) -> None:
    """Links step_bench as the engine's build does, but with the other ggml-cpu.

    Args:
        folder: Of the engine's build.
    """
    # A dry run: it tells the commands and writes nothing.
    listing = command_output("ninja", "-n", "-C", str(folder), "-t", "commands", "step_bench")
    link = shlex.split(listing.splitlines()[-1])
    is_ours = [part.endswith(LIBRARY) for part in link]
    if not any(is_ours):
        sys.exit("The engine's build has no static ggml-cpu: is it a build of another kind?")
    link = [
        str(POOL / LIBRARY) if other else part for part, other in zip(link, is_ours, strict=True)
    ]
    link[link.index("-o") + 1] = str(POOL_BENCH)
    # CMake writes ": && the command && :".
    words = [part for part in link if part not in (":", "&&")]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"step_bench cannot be linked:\n{done.stderr[-2000:]}")


def measure(program: Path, environment: dict[str, str], flags: list[str]) -> float:
    """Returns the tokens per second of one run."""
    done = command_output(
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        str(program),
        *flags,
    )
    found: float = json.loads(done.splitlines()[-1])["tokens_per_s"]
    return found


def compare(options: argparse.Namespace, prompts: str) -> None:
    """Runs all variants in turns and prints their medians."""
    names = "".join(f"{name:>10}" for name, _, _ in VARIANTS)
    print(f"tokens/s: {options.model.name}, drafts: {options.draft_type}")
    print(f"threads  streams {names}")
    for n_threads in map(int, options.threads.split(",")):
        for n_streams in map(int, options.streams.split(",")):
            flags = ["--model", str(options.model), "--draft-type", options.draft_type]
            flags += ["--prompts", prompts, "--ignore-eos", "1", "--threads", str(n_threads)]
            flags += ["--n-seq", str(n_streams), "--n-requests", str(2 * n_streams)]
            flags += ["--n-gen", str(options.tokens)]
            flags += ["--n-ctx-seq", str(N_PROMPT + options.tokens + N_SPARE)]
            found: dict[str, list[float]] = {name: [] for name, _, _ in VARIANTS}
            for _ in range(options.rounds):
                for name, program, environment in VARIANTS:
                    found[name].append(measure(program, environment, flags))
            row = "".join(f"{statistics.median(rates):10.0f}" for rates in found.values())
            print(f"{n_threads:7} {n_streams:8} {row}", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Builds what is missing, then compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--draft-type", default="mtp")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-qwen35-f16.gguf")
    parser.add_argument("--build-dir", type=Path, help="of the engine; found when not given")
    options = parser.parse_args()
    folder = options.build_dir or next((p.parent for p in BUILD.glob("cp*/build.ninja")), None)
    if folder is None:
        sys.exit("The engine is not built: make dev.")
    build_pool()
    link_pool(folder)
    chance = random.Random(1)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        for _ in range(64):
            file.write(" ".join(str(chance.randrange(10, 200)) for _ in range(N_PROMPT)) + "\n")
        file.flush()
        compare(options, file.name)


if __name__ == "__main__":
    main()
