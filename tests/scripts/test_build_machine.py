"""What the build asks of the machine: compilers, cores, memory, and options that make sense."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from scripts import build, test_deps  # isort: skip  puts cext on the path

import build_jobs

ROOT = Path(__file__).resolve().parents[2]
CEXT = ROOT / "cext"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CMAKE_BUILD_PARALLEL_LEVEL", "CMAKE_ARGS", "SOURCE_DATE_EPOCH", "CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def make_root(root: Path, files: dict[str, str], *, available_gib: int = 128) -> Path:
    text = {"proc/meminfo": f"MemAvailable: {available_gib * GIB // 1024} kB\n", **files}
    for name, content in text.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a\n"}


@pytest.mark.parametrize(
    ("files", "available_gib", "n_jobs"),
    [
        ({}, 128, 64),
        ({}, 5, 5),
        ({}, 0, 1),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 128, 2),
        ({**V2, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 128, 64),
        ({**V2, "sys/fs/cgroup/a/cpu.max": "800000 100000\n"}, 128, 8),  # of the one above
        ({**V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 128, 1),  # in a container: the top
        ({**V2, "sys/fs/cgroup/a/b/memory.max": f"{3 * GIB}\n"}, 128, 3),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "max\n"}, 128, 64),
        ({**V1, "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4 * GIB}\n"}, 128, 4),
        ({**V1, "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, 128, 64),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            128,
            3,
        ),
        ({**V1, "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, 128, 64),
    ],
)
def test_compilers_side_by_side_are_as_many_as_cores_and_memory_allow(
    files: dict[str, str], available_gib: int, n_jobs: int, tmp_path: Path
) -> None:
    root = make_root(tmp_path, files, available_gib=available_gib)
    assert build_jobs.jobs(is_gpu=False, root=root) == n_jobs


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert build_jobs.jobs(is_gpu=False, root=make_root(tmp_path, {})) == 2


def test_kernels_for_gpus_take_four_times_the_memory(tmp_path: Path) -> None:
    assert build_jobs.jobs(is_gpu=True, root=make_root(tmp_path, {}, available_gib=16)) == 4
    assert build_jobs.GPU_OPTION.search("-DGGML_CUDA=ON -DX=1")
    assert not build_jobs.GPU_OPTION.search("-DGGML_CUDA=OFF")


def test_the_number_that_the_user_gives_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "7")
    assert build_jobs.jobs(is_gpu=False, root=make_root(tmp_path, {}, available_gib=1)) == 7
    assert build.environment()["CMAKE_BUILD_PARALLEL_LEVEL"] == "7"


def fake_compiler(folder: Path, name: str, macros: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{macros}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("macros", "told"),
    [
        ("#define __GNUC__ 10", "is GCC 10; llama.cpp needs GCC 11"),
        ("#define __GNUC__ 4\n#define __clang_major__ 13", "is Clang 13; llama.cpp needs"),
    ],
)
def test_a_compiler_that_is_too_old_is_refused(
    macros: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"{fake_compiler(tmp_path, 'old++', macros)} -pipe")
    with pytest.raises(build.BuildError, match=re.escape(told)) as caught:
        build.check_machine()
    assert "old++" in str(caught.value)
    assert "set CXX" in str(caught.value)


@pytest.mark.parametrize(
    "macros",
    [
        "#define __GNUC__ 11",
        "#define __GNUC__ 4\n#define __clang_major__ 14",
        "#define __GNUC__ 4\n#define __clang_major__ 13\n#define __apple_build_version__ 13000029",
        "no macros at all",
    ],
)
def test_other_compilers_are_taken(
    macros: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "new++", macros))
    build.check_machine()


def test_no_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "not-there++")
    with pytest.raises(build.BuildError, match=r"No C\+\+ compiler"):
        build.check_machine()


def test_no_headers_of_python_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(build.BuildError, match=r"missing \(.*\): apt-get install python3-"):
        build.check_machine()


def test_what_a_bare_debian_needs_is_installed_where_ci_runs() -> None:
    """The build stopped for want of Python's headers, after `make test-deps` had installed g++."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = re.findall(r"A bare Debian 12 needs `apt-get install ([^`]+)`", text)
    assert len(named) == 1
    assert set(named[0].split()) - {"make"} <= set(test_deps.FIXED)  # make is what installs them


def test_node_is_installed_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_deps, "newest_clang", lambda: 19)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert {"nodejs", "npm"} <= set(test_deps.wanted())
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not {"nodejs", "npm"} & set(test_deps.wanted())


def test_the_machine_is_checked_before_anything_is_fetched() -> None:
    body = (ROOT / "scripts" / "build.py").read_text(encoding="utf-8").rpartition("def main")[2]
    assert body.index("check_machine()") < body.index("fetch_source()")


@pytest.mark.parametrize(
    "name",
    [
        "CUDACXX",
        "CUDAARCHS",
        "LDFLAGS",
        "CMAKE_PREFIX_PATH",
        "VULKAN_SDK",
        "DRAFTHOUSE_CPU_KERNELS",
    ],
)
def test_what_changes_the_build_configures_it_again(name: str) -> None:
    assert name in build.ENVIRONMENT


# --- CMake -------------------------------------------------------------------------------------

# With CI set nothing is skipped: the build has brought CMake, and a test without it fails.
needs_cmake = pytest.mark.skipif(
    not (shutil.which("cmake") or os.environ.get("CI")), reason="cmake is not on the path"
)


@needs_cmake
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "option", ["BUILD_SHARED_LIBS", "GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS"]
)
def test_an_option_that_cannot_work_is_refused_before_anything_is_fetched(
    option: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    done = subprocess.run(
        ["cmake", "-S", str(CEXT), "-B", str(tmp_path / "build"), f"-D{option}=ON"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DRAFTHOUSE_CACHE": str(cache), "DRAFTHOUSE_LLAMA_CPP": ""},
    )
    assert done.returncode != 0
    assert f"{option} is not supported" in done.stderr
    assert not cache.exists()


PROBE = """
include("{cext}/portable.cmake")
foreach(name NATIVE SSE42 AVX AVX2 BMI2 FMA F16C AVX512)
  if(GGML_${{name}})
    message(NOTICE "on ${{name}}")
  elseif(DEFINED GGML_${{name}})
    message(NOTICE "off ${{name}}")
  endif()
endforeach()
"""
V3 = ["SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"]


def portable(folder: Path, *options: str, **environment: str) -> tuple[list[str], str]:
    """Returns what is turned on, and all that CMake says."""
    probe = folder / "probe.cmake"
    probe.write_text(PROBE.format(cext=CEXT))
    defaults = ["-DCMAKE_SYSTEM_PROCESSOR=x86_64", "-DDRAFTHOUSE_PORTABLE=OFF"]
    command = ["cmake", *defaults, *options, "-P", str(probe)]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    said = done.stdout + done.stderr
    return re.findall(r"^on (\w+)$", said, re.MULTILINE), " ".join(said.split())


@needs_cmake
@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("v1", []),
        ("v2", V3[:1]),
        ("v3", V3),
        ("ON", V3),
        ("v4", [*V3, "AVX512"]),
    ],
)
def test_a_portable_build_is_one_for_a_level(level: str, wanted: list[str], tmp_path: Path) -> None:
    found, said = portable(tmp_path, f"-DDRAFTHOUSE_PORTABLE={level}")
    assert found == wanted
    assert "off NATIVE" in said
    assert f"x86-64-{'v3' if level == 'ON' else level}" in said


@needs_cmake
def test_a_portable_build_is_off_unless_asked_for(tmp_path: Path) -> None:
    assert portable(tmp_path) == ([], "")


@needs_cmake
def test_a_reproducible_build_is_no_build_for_the_oldest_cpu(tmp_path: Path) -> None:
    for option in ([], ["-DGGML_NATIVE=OFF"]):
        found, said = portable(tmp_path, *option, SOURCE_DATE_EPOCH="1")
        assert found == V3
        assert "SOURCE_DATE_EPOCH is set" in said
    found, said = portable(tmp_path, "-DGGML_NATIVE=ON", SOURCE_DATE_EPOCH="1")
    assert (found, said) == (["NATIVE"], "on NATIVE")


@needs_cmake
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-DDRAFTHOUSE_PORTABLE=v5"], "expected OFF, ON, v1, v2, v3 or v4"),
        (["-DDRAFTHOUSE_PORTABLE=v3", "-DGGML_NATIVE=ON"], "remove its CMakeCache.txt"),
        (["-DDRAFTHOUSE_PORTABLE=v3", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"], "is a level of x86-64"),
    ],
)
def test_a_portable_build_that_means_nothing_is_refused(
    options: list[str], told: str, tmp_path: Path
) -> None:
    found, said = portable(tmp_path, *options)
    assert told in said
    assert not found


def test_warnings_are_errors_for_developers_alone() -> None:
    text = (CEXT / "CMakeLists.txt").read_text(encoding="utf-8")
    before, _, after = text.partition("if(DRAFTHOUSE_DEV) # a user's compiler")
    assert "-Werror" not in before
    assert after.index("-Werror") < after.index("endif()")
    assert after.index("# --- for development") < after.index("-Wextra -Werror")
