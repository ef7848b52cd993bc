"""Our C and C++, and what we patch, compile for other CPUs and with other compilers.

Syntax and types alone: `make portability` has more targets, and runs what it builds. `make
test-deps` installs the compilers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.built import built

from scripts import portability  # isort: skip  puts cext on the path

import fetch_llama_cpp as pinned

ROOT = Path(__file__).resolve().parents[2]
RNG_TEST = ROOT / "tests" / "kernels" / "rng_test.cpp"
PROGRAMS = ROOT / "build" / "bin"

pytestmark = pytest.mark.timeout(900)  # a compiler's time depends on the machine


def skip_or_fail(reason: str) -> None:
    """A compiler that is missing is an error in CI alone."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}: make test-deps")
    pytest.skip(f"{reason}: make test-deps")


@pytest.mark.parametrize(
    "target", [it for it in portability.targets() if it.is_quick], ids=lambda it: it.name
)
def test_target_compiles(target: portability.Target) -> None:
    if portability.is_missing(target.compiler):
        skip_or_fail(f"{target.compiler.package} is not installed")
    portability.check(target, pinned.source_path(), in_test=True)


def test_every_level_and_every_compiler_is_quick() -> None:
    quick = [it for it in portability.targets() if it.is_quick]
    for architecture, levels in portability.LEVELS.items():
        ours = [it for it in quick if it.compiler.architecture == architecture]
        assert {it.level for it in ours} == set(levels)
        assert {it.compiler.name for it in ours} == {"gcc", "clang-14", "libc++"}
        assert {(it.level, it.has_kernels) for it in ours} >= {(it, False) for it in levels}


def test_a_change_of_any_header_is_checked_again() -> None:
    included = {
        folder / name
        for unit in portability.OWN
        for folder in (portability.CEXT, (ROOT / unit).parent)
        for name in re.findall(r'#include "([^"]+)"', (ROOT / unit).read_text(encoding="utf-8"))
    }
    ours = {path for path in included if path.exists()}
    assert {portability.CEXT / "spec.h", portability.CEXT / "spec" / "internal.hpp"} <= ours
    assert ours <= set(portability.inputs(pinned.source_path()))


def test_every_file_that_we_change_is_compiled() -> None:
    units = portability.patched_units()
    assert "ggml/src/ggml-cpu/ops.cpp" in units
    assert "common/speculative.cpp" in units
    whole = [it for it in portability.targets() if it.is_whole]
    # This machine's own GCC compiles them in `make build`.
    assert {(it.compiler.name, it.compiler.architecture) for it in whole} == {
        (it.name, it.architecture) for it in portability.compilers()
    } - {("gcc", portability.HOST)}
    assert all(set(units) <= set(portability.units_of(it)) for it in whole)
    quick = {
        it: set(portability.units_of(it, in_test=True))
        for it in portability.targets()
        if it.is_quick
    }
    # Of our own files: GCC by `make build`, another Clang and another machine, another library.
    own = {it for it, found in quick.items() if set(portability.OWN) <= found}
    assert {it.compiler.name for it in own} == {"clang-14", "libc++"}
    assert {it.compiler.architecture for it in own} == set(portability.LEVELS)
    assert {it.compiler.name for it, found in quick.items() if set(units) <= found} == {"libc++"}
    paths = [*(ROOT / "cext").rglob("*"), *(ROOT / "tests" / "kernels").iterdir()]
    there = {str(path.relative_to(ROOT)) for path in paths if path.suffix in (".c", ".cpp")}
    assert there == set(portability.OWN)


# --- programs that are built anyway ------------------------------------------------------------


@pytest.fixture(scope="module")
def rng_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The generator's test, with this machine's library and with libc++."""
    folder = tmp_path_factory.mktemp("rng")
    include = f"-I{pinned.source_path() / 'src'}"
    programs = []
    for compiler in portability.compilers():
        if compiler.architecture != portability.HOST or compiler.name not in ("gcc", "libc++"):
            continue
        if portability.is_missing(compiler):
            skip_or_fail(f"{compiler.package} is not installed")
        program = folder / compiler.name
        command = [*compiler.command, "-std=c++17", include, str(RNG_TEST), "-o", str(program)]
        subprocess.run(command, check=True)
        programs.append(program)
    return programs


@pytest.mark.parametrize("n_drawn", [0, 1, 396, 397, 623, 624, 625, 1000, 1248, 3001])
def test_each_library_reads_the_generators_of_both(n_drawn: int, rng_programs: list[Path]) -> None:
    found = set()
    for writer in rng_programs:
        text = subprocess.run(
            [writer, "write", str(n_drawn)], capture_output=True, check=True
        ).stdout
        for reader in rng_programs:
            read = subprocess.run([reader, "read"], input=text, capture_output=True, check=True)
            found.add(read.stdout)
    assert len(rng_programs) == 2
    assert len(found) == 1
    assert found.pop().startswith(b"word ")


def test_a_damaged_generator_is_refused(rng_programs: list[Path]) -> None:
    words = ["7"] * 624
    for text in (
        " ".join(words[:-1]) + " word",  # one too few
        " ".join([*words[:-1], str(1 << 32)]) + " word",  # one too wide
        " ".join(words) + " 625 word",  # more used than there are
        "word",
        "",
    ):
        for program in rng_programs:
            read = subprocess.run(
                [program, "read"], input=text, capture_output=True, text=True, check=True
            )
            assert read.stdout == "refused\n", text[-20:]


@pytest.mark.model
def test_llama_cpp_refuses_rollbacks_without_a_state() -> None:
    program = built("rollback_test")
    model = ROOT / "models" / "tiny-qwen35-f16.gguf"
    done = subprocess.run([program, model], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n")


def test_what_the_full_part_builds_is_a_target_of_cmake() -> None:
    text = (ROOT / "cext" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert all(program in text for program in portability.PROGRAMS)
    emulated = [it for machine in portability.MACHINES for it in machine.emulated]
    header = (ROOT / "tests" / "kernels" / "emulated_avx.h").read_text(encoding="utf-8")
    assert len(emulated) == 3
    assert f"foreach(instructions {' '.join(emulated)})" in text
    assert all(f"EMULATED_{it}" in header for it in emulated)
    assert {machine.architecture for machine in portability.MACHINES} == set(portability.LEVELS)
    assert any(not machine.has_kernels for machine in portability.MACHINES)
    assert shutil.which("cmake") or (ROOT / ".venv" / "bin" / "cmake").exists()
