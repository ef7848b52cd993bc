"""Compiles what is ours for machines and compilers that this machine is not: `make portability`.

The quick part checks syntax and types (no code is made): our C and C++ and every file of llama.cpp
that our patches change, for the levels of x86-64 and for ARM with and without SVE, with GCC and two
Clangs, one with libc++ too, and with and without the patches of the CPU kernels. `make test` runs
most of it, a test for each target (tests/scripts/test_portability.py): what we change outside the
kernels it compiles once, with the newest Clang and libc++. What passed is not done again until
something of it changes.

The full part builds llama.cpp for some of these targets and runs abi_test, attention_test,
rollback_test, rng_test and step_bench there, under qemu-user where this CPU is another. qemu 7.2
knows AVX2 and SVE, not AVX-512: that is run where this CPU has it. Where it has AVX2 alone, our
kernels for AVX-512 and VNNI are run with these instructions as functions. Tests of kernels are run
without qemu where this CPU can, and else in a shorter form.

`make test-deps` installs the compilers.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "portability"
CEXT = ROOT / "cext"
KERNELS = "ggml/src/ggml-cpu"
N_LINES = 30
sys.path.insert(0, str(CEXT))

import build_jobs  # noqa: E402  # the folder is on the path since the lines above
import fetch_llama_cpp as pinned  # noqa: E402  # the folder is on the path since the lines above
import patch_files  # noqa: E402  # the folder is on the path since the lines above

OWN = (
    *(f"cext/spec/{path.name}" for path in sorted((CEXT / "spec").glob("*.cpp"))),
    *("cext/abi_test.c", "cext/cpu_level.c", "cext/step_bench.c"),
    *(f"tests/kernels/{path.name}" for path in sorted((ROOT / "tests" / "kernels").glob("*.cpp"))),
)
HOST = {"x86_64": "x86-64"}.get(os.uname().machine, os.uname().machine)
"""This machine's architecture, as `LEVELS` has it."""
LEVELS = {
    "x86-64": {
        "v1": "-march=x86-64",
        "v2": "-march=x86-64-v2",
        "v3": "-march=x86-64-v3",
        "avx512f": "-march=x86-64-v3 -mavx512f",  # without DQ: ggml takes its AVX2 code
        "v4": "-march=x86-64-v4",
        "amx": "-march=sapphirerapids",  # the tiles of patch 0018
    },
    "aarch64": {"neon": "-march=armv8-a", "sve": "-march=armv8.2-a+sve"},
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """One way to compile for one architecture."""

    name: str
    """As the targets are called."""
    architecture: str
    """A key of LEVELS."""
    command: tuple[str, ...]
    """The C++ compiler; empty where it is not installed."""
    package: str
    """What `make test-deps` installs for it."""

    @property
    def c_command(self) -> list[str]:
        """The C compiler that belongs to it."""
        program = re.sub(r"clang\+\+", "clang", re.sub(r"\bg\+\+", "gcc", self.command[0]))
        return [program, *(flag for flag in self.command[1:] if flag != "-stdlib=libc++")]


@dataclass(frozen=True, slots=True)
class Target:
    """A compiler, a level of its architecture, and whether the CPU kernels are patched."""

    compiler: Compiler
    """What compiles."""
    level: str
    """A key of LEVELS of the architecture."""
    has_kernels: bool
    """With `patches/cpu_kernels`."""

    @property
    def name(self) -> str:
        """Names it in tests and on the command line."""
        kernels = "" if self.has_kernels else "-stock"
        return f"{self.compiler.name}-{self.compiler.architecture}-{self.level}{kernels}"

    @property
    def is_whole(self) -> bool:
        """Whether it also compiles what does not depend on the level: once for a compiler.

        But for this machine's own GCC: `make build` has compiled all that before.
        """
        is_own = self.compiler.name == "gcc" and self.compiler.architecture == HOST
        return self.has_kernels and self.level in ("v4", "neon") and not is_own

    @property
    def is_quick(self) -> bool:
        """Whether `make test` has it: every level once, every compiler with the widest vectors.

        The newest Clang once, with libc++: the same parser reads the same files, but for GCC's
        headers, of which it warns what GCC does not; that stays for `make portability`.
        """
        is_widest = self.has_kernels and self.level in ("v4", "sve")
        return self.compiler.name == "gcc" or (is_widest and self.compiler.name != "clang-new")


class PortabilityError(Exception):
    """Says which target fails, with the end of what the compiler said."""


def triple_of(command: str) -> str:
    """Returns what a compiler compiles for, nothing where it is not there."""
    if not shutil.which(command):
        return ""
    run = subprocess.run([command, "-dumpmachine"], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def first_for(architecture: str, *commands: str) -> tuple[str, ...]:
    """Returns the first of some compilers that compiles for an architecture."""
    triple = "x86_64" if architecture == "x86-64" else architecture
    return next(((name,) for name in commands if triple_of(name).startswith(triple)), ())


def newest_clang() -> str:
    """Returns the newest Clang on the path, by the number in its name."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    names = {path.name for folder in folders for path in folder.glob("clang++-[0-9]*")}
    return max(names, key=lambda name: int(name.rpartition("-")[2]), default="")


@functools.cache
def compilers() -> list[Compiler]:
    """Returns the compilers of the matrix, those that are missing too."""
    newest = newest_clang()
    has_cross = bool(first_for("aarch64", "aarch64-linux-gnu-g++", "g++"))  # brings its headers
    found = []
    for architecture, triple in (("x86-64", "x86_64"), ("aarch64", "aarch64")):
        package = "g++" if architecture == "x86-64" else "g++-aarch64-linux-gnu"
        gcc = first_for(architecture, "g++", f"{triple}-linux-gnu-g++")
        found.append(Compiler("gcc", architecture, gcc, package))
        target = f"--target={triple}-linux-gnu"
        is_there = architecture == "x86-64" or has_cross
        for name, program, more, package in (
            ("clang-14", "clang++-14", (), "clang-14"),
            ("clang-new", newest, (), "the newest clang"),
            ("libc++", newest, ("-stdlib=libc++",), "the newest libc++-dev"),
        ):
            command = (program, target, *more)
            can = is_there and shutil.which(program)
            found.append(Compiler(name, architecture, command if can else (), package))
    return found


def can_include(command: tuple[str, ...], header: str) -> bool:
    """Tells whether a compiler finds a header."""
    run = subprocess.run(
        [*command, "-fsyntax-only", "-x", "c++", "-"],
        input=f"#include <{header}>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode == 0


@functools.cache
def is_missing(compiler: Compiler) -> bool:
    """Tells whether a compiler, or the C++ library that it is asked to use, is not installed."""
    command = compiler.command
    if not command:
        return True
    return not can_include(command, "vector")


def targets() -> list[Target]:
    """Returns all targets of the quick part."""
    return [
        Target(compiler, level, has_kernels)
        for compiler in compilers()
        for level in LEVELS[compiler.architecture]
        for has_kernels in (True, False)
    ]


def patched_units() -> list[str]:
    """Returns the sources of llama.cpp that our patches change."""
    names = {
        change.path
        for patch in (*pinned.needed_patches(), *pinned.kernel_patches())
        for change in patch_files.read_patch(patch)
    }
    return sorted(name for name in names if name.endswith((".cpp", ".c")))


@contextmanager
def kernels_folder(source: Path, *, has_kernels: bool) -> Iterator[Path]:
    """Gives ggml's CPU folder with or without the kernels' patches, whatever the source has."""
    patches = pinned.kernel_patches()
    if patch_files.is_applied(source, patches) == has_kernels:
        yield source / KERNELS
        return
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(source / KERNELS, Path(scratch, KERNELS))
        patch_files.apply(Path(scratch), patches, is_reverse=not has_kernels)
        yield Path(scratch, KERNELS)


def python_headers() -> list[str]:
    """Returns flags for Python's headers, which cpu_level.c includes.

    Debian's pyconfig.h includes one by the target's architecture. This machine's stands in for
    that of others: all are of 64 bits.
    """
    headers = Path(sysconfig.get_path("include"))
    folder = FOLDER / "include"
    there = folder / "aarch64-linux-gnu" / headers.name
    there.mkdir(parents=True, exist_ok=True)
    mine = headers.parent / str(sysconfig.get_config_var("MULTIARCH")) / headers.name / "pyconfig.h"
    if mine.exists() and not (there / "pyconfig.h").exists():
        shutil.copy(mine, there / "pyconfig.h")
    return ["-isystem", str(headers), "-isystem", str(folder)]


def command_for(target: Target, source: Path, kernels: Path, unit: str) -> list[str]:
    """Returns the command that checks one file."""
    is_own = unit in OWN
    level = LEVELS[target.compiler.architecture][target.level]
    # As CMakeLists.txt has it for developers; llama.cpp's own warnings are its own affair.
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Werror"] if unit.startswith("cext") else []
    flags = [*shlex.split(level), *(warnings or (["-Wall", "-Werror"] if is_own else ["-w"]))]
    folders = ["common", "include", "ggml/include", "ggml/src", "", "src", "vendor"]
    include = [flag for folder in folders for flag in ("-isystem", str(source / folder))]
    include += python_headers()
    if unit.startswith(KERNELS):
        path = kernels / Path(unit).relative_to(KERNELS)
        include = [f"-I{kernels}", f"-I{source / 'ggml/src'}", f"-I{source / 'ggml/include'}"]
    else:
        path = ROOT / unit if is_own else source / unit
    if unit.endswith(".c"):
        language = [*target.compiler.c_command, "-std=c11", "-D_POSIX_C_SOURCE=200809L"]
    else:
        language = [*target.compiler.command, "-std=c++17", "-D_GNU_SOURCE"]
        language.append('-DDRAFTHOUSE_LLAMA_CPP_VERSION="b0"')
    return [*language, "-fsyntax-only", *flags, f"-I{CEXT}", *include, str(path)]


def units_of(target: Target, *, in_test: bool = False) -> list[str]:
    """Returns the files that a target checks: on every level those that know of it.

    Args:
        target: Which.
        in_test: As `make test` does: what we change outside the kernels, with libc++ alone; our own
            files with that and with the oldest Clang, which compiles them for another machine.
    """
    patched = patched_units()
    kernels = [unit for unit in patched if unit.startswith(KERNELS)]
    name = target.compiler.name
    if in_test and name != "libc++":
        is_away = name == "clang-14" and target.compiler.architecture != HOST
        return [*(OWN if is_away else ()), *kernels]
    return [*OWN, *patched] if target.is_whole else kernels


def inputs(source: Path) -> list[Path]:
    """Returns the files that decide whether a target passes."""
    folders = ((CEXT, "*.h"), (CEXT / "spec", "*.hpp"), (ROOT / "tests" / "kernels", "*.h"))
    headers = [path for folder, names in folders for path in sorted(folder.glob(names))]
    files = [*headers, Path(__file__), *(ROOT / unit for unit in OWN)]
    manifest = source / pinned.MANIFEST
    files += [manifest] if manifest.exists() else []
    return [*files, *pinned.needed_patches(), *pinned.kernel_patches()]


def inputs_digest(target: Target, source: Path) -> str:
    """Returns a hash of what decides whether a target passes."""
    version = subprocess.run(
        [*target.compiler.command, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest = hashlib.sha256(f"{target.compiler.command} {version} {source}".encode())
    for path in inputs(source):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check(target: Target, source: Path, *, in_test: bool = False) -> bool:
    """Checks all files of a target; returns whether there was anything to do.

    Args:
        target: Which.
        source: Of llama.cpp, patched.
        in_test: Whether it may be as few as `make test` checks.

    Raises:
        PortabilityError: one of them does not compile.
    """
    units = units_of(target, in_test=in_test)
    is_part = len(units) < len(units_of(target))
    stamp = FOLDER / f"{target.name}{'-part' if is_part else ''}.stamp"
    digest = inputs_digest(target, source)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == digest:
        return False
    with (
        kernels_folder(source, has_kernels=target.has_kernels) as kernels,
        ThreadPoolExecutor(build_jobs.jobs(is_gpu=False)) as pool,
    ):
        commands = [command_for(target, source, kernels, unit) for unit in units]
        runs = pool.map(
            lambda command: subprocess.run(command, capture_output=True, text=True, check=False),
            commands,
        )
        for command, run in zip(commands, runs, strict=True):
            if run.returncode:
                said = "\n".join(run.stderr.splitlines()[:N_LINES])
                raise PortabilityError(f"{target.name}: {shlex.join(command)}\n{said}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest, encoding="utf-8")
    return True


# --- the full part ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to build for and to run on."""

    name: str
    """As the command line calls it."""
    architecture: str
    """A key of LEVELS."""
    options: tuple[str, ...]
    """For CMake."""
    cpu: str
    """What qemu shall be; empty: this machine itself."""
    has_kernels: bool = True
    """With `patches/cpu_kernels`."""
    needs: str = ""
    """What this machine's CPU must have, as /proc/cpuinfo calls it."""
    emulated: tuple[str, ...] = ()
    """Instructions that it has as functions besides (tests/kernels/emulated_avx.h)."""
    part_of: str = ""
    """What makes a CPU one that runs it as well, as /proc/cpuinfo calls it. There the kernels are
    tested without qemu, in a minute in place of half an hour."""


ARM = "-DGGML_CPU_ARM_ARCH=armv8.2-a"
MACHINES = (
    Machine("v1", "x86-64", ("-DDRAFTHOUSE_PORTABLE=v1",), "qemu64", part_of="sse2"),
    Machine("v2", "x86-64", ("-DDRAFTHOUSE_PORTABLE=v2",), "Nehalem", part_of="sse4_2"),
    Machine(
        "v3",
        "x86-64",
        ("-DDRAFTHOUSE_PORTABLE=v3",),
        "Haswell",
        emulated=("AVX512", "AVX512VNNI", "AVXVNNI"),
        part_of="avx2",
    ),
    Machine(
        "v3-stock",
        "x86-64",
        ("-DDRAFTHOUSE_PORTABLE=v3",),
        "Haswell",
        has_kernels=False,
        part_of="avx2",
    ),
    Machine("v4", "x86-64", ("-DDRAFTHOUSE_PORTABLE=v4",), "", needs="avx512dq"),
    Machine("neon", "aarch64", ("-DDRAFTHOUSE_PORTABLE=ON",), "cortex-a57"),
    Machine("sve", "aarch64", (f"{ARM}+sve",), "max,sve-default-vector-length=32"),
    Machine(
        "sve-stock",
        "aarch64",
        (f"{ARM}+sve",),
        "max,sve-default-vector-length=32",
        has_kernels=False,
    ),
)
KERNEL_TESTS = ("attention_test", "rows_test")
STRIDE = "7"  # under qemu, of attention_test's checks
PROGRAMS = ("abi_test", "step_bench", "rollback_test", "rng_test", *KERNEL_TESTS)


def configure(machine: Machine, folder: Path) -> list[str]:
    """Returns the command that configures a machine's build."""
    compiler = next(
        it for it in compilers() if it.name == "gcc" and it.architecture == machine.architecture
    )
    if not compiler.command:
        raise PortabilityError(f"{compiler.package} is not installed: make test-deps")
    cmake = ["cmake", "-S", str(CEXT), "-B", str(folder), *machine.options]
    cmake += ["-DDRAFTHOUSE_EXTENSION=OFF", "-DDRAFTHOUSE_DEV=ON", "-DCMAKE_BUILD_TYPE=Release"]
    cmake += [f"-DDRAFTHOUSE_CPU_KERNELS={'ON' if machine.has_kernels else 'OFF'}"]
    cmake += [f"-DCMAKE_CXX_COMPILER={compiler.command[0]}"]
    cmake += [f"-DCMAKE_C_COMPILER={compiler.c_command[0]}", "-DGGML_NATIVE=OFF"]
    if machine.architecture == "aarch64" and not triple_of("g++").startswith("aarch64"):
        cmake += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    return [*cmake, "-G", "Ninja"] if shutil.which("ninja") else cmake


def emulator(machine: Machine) -> list[str]:
    """Returns the command that programs of a machine are started with."""
    if not machine.cpu:
        return []
    name = "qemu-x86_64" if machine.architecture == "x86-64" else "qemu-aarch64"
    if not shutil.which(name):
        raise PortabilityError("qemu-user is not installed: make test-deps")
    root = ["-L", "/usr/aarch64-linux-gnu"] if machine.architecture == "aarch64" else []
    return [name, "-cpu", machine.cpu, *root]


def invocations() -> list[list[str]]:
    """Returns what is run on every machine."""
    models = ROOT / "models"
    bench = ["--draft-type", "mtp", "--prompts", str(ROOT / "tests" / "fuzz" / "prompts.txt")]
    bench += ["--n-seq", "2", "--n-gen", "4", "--n-requests", "2", "--threads", "1"]
    return [
        ["rng_test", "write", "700"],
        ["abi_test", str(models / "tiny-mimo2-f16.gguf")],
        ["rollback_test", str(models / "tiny-qwen35-f16.gguf")],
        ["step_bench", "--model", str(models / "tiny-qwen35-f16.gguf"), *bench],
        ["attention_test"],
        ["rows_test"],
    ]


def run_step(command: list[str], what: str) -> None:
    """Runs a command of the full part.

    Raises:
        PortabilityError: it failed.
    """
    env = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": str(build_jobs.jobs(is_gpu=False))}
    env.pop("CMAKE_ARGS", None)
    env["PATH"] = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if run.returncode:
        said = "\n".join((run.stdout + run.stderr).splitlines()[-N_LINES:])
        raise PortabilityError(f"{what}: {shlex.join(command)}\n{said}")


def build_and_run(machine: Machine) -> None:
    """Builds for a machine and runs the programs on it.

    Raises:
        PortabilityError: something does not compile, or a program fails.
    """
    folder = FOLDER / machine.name
    started_s = time.monotonic()
    run_step(configure(machine, folder), machine.name)
    emulated = [f"{name}_{it}" for it in machine.emulated for name in KERNEL_TESTS]
    if emulated and not can_include(("g++",), "simde/simde-common.h"):
        raise PortabilityError("libsimde-dev is not installed: make test-deps")
    build = ["cmake", "--build", str(folder), "--target", *PROGRAMS, *emulated]
    run_step(build, machine.name)
    say(f"{machine.name}: built in {time.monotonic() - started_s:.0f} s")
    cpuinfo = build_jobs.read(Path("/proc/cpuinfo"))
    if machine.needs and machine.needs not in cpuinfo.split():
        say(f"{machine.name}: not run, this CPU has no {machine.needs}")
        return
    is_part = machine.architecture == HOST and machine.part_of in cpuinfo.split()
    for program, *arguments in invocations():
        started = [] if is_part and program in KERNEL_TESTS else emulator(machine)
        few = [STRIDE] if started and program == "attention_test" else []
        started_s = time.monotonic()
        run_step([*started, str(folder / "bin" / program), *arguments, *few], machine.name)
        say(f"{machine.name}: {program} passed in {time.monotonic() - started_s:.0f} s")
    if emulated and "avx2" not in cpuinfo.split():
        say(f"{machine.name}: {', '.join(emulated)} not run, this CPU has no avx2")
        return
    for program in emulated:  # many times as slow already: not under qemu
        started_s = time.monotonic()
        run_step([str(folder / "bin" / program)], machine.name)
        say(f"{machine.name}: {program} passed in {time.monotonic() - started_s:.0f} s")


def say(line: str) -> None:
    """Tells the user."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def check_all(wanted: Iterable[Target]) -> None:
    """Runs the quick part for some targets.

    Raises:
        PortabilityError: a compiler is missing, or something does not compile.
    """
    source = pinned.source_path()
    for target in wanted:
        if is_missing(target.compiler):
            raise PortabilityError(
                f"{target.name} needs {target.compiler.package}, which is not installed: "
                "make test-deps"
            )
        started_s = time.monotonic()
        was_checked = check(target, source)
        how = f"{time.monotonic() - started_s:.0f} s" if was_checked else "passed before"
        say(f"{target.name}: {how}")


def main() -> int:
    """Runs the matrix; 0, or 1 after what the first failing compiler or program said."""
    parser = argparse.ArgumentParser(description="compile for other machines, and run there")
    parser.add_argument("--list", action="store_true", help="list targets and machines")
    parser.add_argument("--syntax", action="store_true", help="the quick part alone")
    parser.add_argument("--only", metavar="NAME,…", help="these targets and machines alone")
    arguments = parser.parse_args()
    only = set(filter(None, (arguments.only or "").split(",")))
    wanted = [it for it in targets() if not only or it.name in only]
    machines = [it for it in MACHINES if not arguments.syntax and (not only or it.name in only)]
    if arguments.list:
        for name in (*(it.name for it in targets()), *(it.name for it in MACHINES)):
            say(name)
        return 0
    started_s = time.monotonic()
    try:
        check_all(wanted)
        for machine in machines:
            build_and_run(machine)
    except (PortabilityError, pinned.FetchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    n_s = time.monotonic() - started_s
    say(f"portability: {len(wanted)} targets, {len(machines)} machines passed in {n_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
