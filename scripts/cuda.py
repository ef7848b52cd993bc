"""Builds the engine with CUDA for one architecture into build/cuda: `make cuda ARGS="--arch 90"`.

The build of `make dev` is left alone. Neither a GPU nor a driver is needed, only nvcc; without one
NVIDIA's packages of PyPI are taken, as for cuBLAS, which some toolkits lack. The extension lies in
build/cuda/site then, where `tests/cext/test_cuda_import.py` imports it. More than an hour on two
cores; a build that was stopped goes on where it stopped.

For another machine: `--portable v3` for its CPU, run by a Python of its version, whose extension it
is, and `--arch 90-real`, which is half as large as 90. `--server` adds llama-server of the same
objects, into build/cuda/bin. `scripts/gpu_tables.sh --pack --built` packs both.

`--print-args` prints the options for CMAKE_ARGS instead, for a build of the whole server:
`CMAKE_ARGS="$(python3 scripts/cuda.py --print-args)" make serve`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "cuda"
N_LINES = 30
TOOLKIT = (
    "nvidia-cuda-nvcc>=13.0,<13.1",
    "nvidia-cuda-crt>=13.0,<13.1",
    "nvidia-nvvm>=13.0,<13.1",
    "nvidia-cuda-runtime>=13.0,<13.1",
    "nvidia-cuda-cccl>=13.0,<13.1",
)
"""What compiles and links, of one version of CUDA; half a gigabyte unpacked."""
CUBLAS = {12: "nvidia-cublas-cu12>=12.4,<13", 13: "nvidia-cublas>=13.0,<13.1.1"}
"""cuBLAS by the toolkit's major version: 13.1.0 is of CUDA 13.0."""

SERVER = {
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
"""What gives a tree the target llama-server, which nothing builds unasked."""

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it says, on both streams; empty where it cannot be run."""


class CudaError(Exception):
    """Says in a sentence what is missing or failed."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA compiler and what lies beside it."""

    nvcc: str
    """The compiler, as a command."""
    version: tuple[int, int]
    """Of CUDA."""
    folder: Path
    """Where its headers and libraries are."""

    @property
    def has_cublas(self) -> bool:
        """Whether it comes with cuBLAS, header and library to link with."""
        return _has(self.folder, "cublas_v2.h") and _has(self.folder, "libcublas.so")


def _has(folder: Path, name: str) -> bool:
    """Tells whether a header or a library of this name is where a toolkit has them."""
    places = ("include", "lib", "lib64", "targets/*/include", "targets/*/lib")
    return any(any(folder.glob(f"{place}/{name}")) for place in places)


def say(line: str) -> None:
    """Tells the user, on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def run(command: Sequence[str]) -> str:
    """Runs a command, as `Run` says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr


def read_toolkit(nvcc: str, ask: Run = run) -> Toolkit | None:
    """Returns the toolkit of a compiler; None where it cannot be run.

    Args:
        nvcc: The compiler; it may be a script that calls another one.
        ask: Runs it.
    """
    release = re.search(r"release (\d+)\.(\d+)", ask([nvcc, "--version"]))
    top = re.search(r"^#\$ TOP=(.*)$", ask([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.M)
    if release is None or top is None:
        return None
    return Toolkit(nvcc, (int(release[1]), int(release[2])), Path(top[1]).resolve())


def _install(packages: Sequence[str], folder: Path, what: str) -> None:
    """Puts packages of PyPI into a folder, once.

    Raises:
        CudaError: they cannot be had.
    """
    stamp = folder / "packages.txt"
    if stamp.exists() and stamp.read_text().split() == list(packages):
        return
    say(f"{what}: fetched from PyPI …")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(folder), *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CudaError(f"{what} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    link_libraries(folder)
    stamp.write_text("\n".join(packages))


def link_libraries(folder: Path) -> None:
    """Gives libraries the names that a linker looks for, which wheels lack: libX.so, in lib64."""
    for libraries in sorted(folder.rglob("lib")):
        link = libraries.with_name("lib64")
        if not link.exists():
            link.symlink_to(libraries.name)
    for library in sorted(folder.rglob("lib*.so.*")):
        link = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not link.exists():
            link.symlink_to(library.name)


def find_toolkit() -> Toolkit:
    """Returns the toolkit of CUDACXX or of the path, or PyPI's.

    Raises:
        CudaError: there is none, and none can be fetched.
    """
    found = read_toolkit(os.environ.get("CUDACXX", "nvcc"))
    if found is None and "CUDACXX" in os.environ:
        raise CudaError(f"CUDACXX is {os.environ['CUDACXX']!r}, which is no nvcc that runs")
    if found is None:
        _install(TOOLKIT, FOLDER / "toolkit", "CUDA's compiler")
        nvcc = next((FOLDER / "toolkit").rglob("bin/nvcc"), None)
        found = read_toolkit(str(nvcc)) if nvcc else None
    if found is None:
        raise CudaError("there is no nvcc, and PyPI's cannot be run here; set CUDACXX")
    return found


def installed_cublas(major: int, paths: Sequence[str]) -> Path | None:
    """Returns where PyPI's cuBLAS of a major version is installed already; None where it is not.

    Args:
        major: Of CUDA.
        paths: Where Python looks for packages.
    """
    for path in paths:
        for name in (f"cu{major}", "cublas"):
            folder = Path(path or ".") / "nvidia" / name
            libraries = [folder / "lib" / f"lib{it}.so.{major}" for it in ("cublas", "cublasLt")]
            if all(it.exists() for it in (folder / "include" / "cublas_v2.h", *libraries)):
                return folder
    return None


def cublas_of(toolkit: Toolkit, folder: Path = FOLDER) -> Path | None:
    """Returns a folder with PyPI's cuBLAS; None where the toolkit has its own.

    Raises:
        CudaError: it cannot be had.
    """
    if toolkit.has_cublas:
        return None
    if installed := installed_cublas(toolkit.version[0], sys.path):
        return installed
    package = CUBLAS.get(toolkit.version[0])
    if package is None:
        raise CudaError(
            f"CUDA {toolkit.version[0]} has no cuBLAS beside its nvcc; install it with the toolkit"
        )
    _install([package], folder / "cublas", "cuBLAS")
    return folder / "cublas"


def options(
    toolkit: Toolkit,
    arch: str,
    cublas: Path | None,
    *,
    portable: str = "",
    has_server: bool = False,
) -> dict[str, str]:
    """Returns the options of CMake.

    Args:
        toolkit: The compiler.
        arch: Compute capability without its dot, as 90, or several with ";" between.
        cublas: Folder of PyPI's cuBLAS, if the toolkit has none.
        portable: Level of x86-64; this CPU's own instructions without one.
        has_server: Whether llama-server can be built of it.

    Raises:
        CudaError: that folder has no cuBLAS.
    """
    found = {
        "GGML_CUDA": "ON",
        # Its driver API would be linked, and an import would need a driver.
        "GGML_CUDA_NO_VMM": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "CMAKE_CUDA_ARCHITECTURES": arch,
        "CMAKE_CUDA_COMPILER": shutil.which(toolkit.nvcc) or toolkit.nvcc,
        "CUDAToolkit_ROOT": str(toolkit.folder),
        # Libraries of CUDA outside of the system's folders are found where they were linked.
        "CMAKE_INSTALL_RPATH_USE_LINK_PATH": "ON",
    }
    if portable:
        found["DRAFTHOUSE_PORTABLE"] = portable
    if has_server:
        found |= SERVER
    if cublas is None:
        return found
    header = next(cublas.rglob("cublas_v2.h"), None)
    names = ("cublas", "cublasLt")
    library, lt = (next(iter(sorted(cublas.rglob(f"lib{name}.so*"))), None) for name in names)
    if header is None or library is None or lt is None:
        raise CudaError(f"{cublas} has no cuBLAS")
    return found | {
        "CUDA_cublas_LIBRARY": str(library),
        "CUDA_cublasLt_LIBRARY": str(lt),
        "CMAKE_CUDA_FLAGS": f"-I{header.parent}",
        "CMAKE_CXX_FLAGS": f"-I{header.parent}",
    }


def arch_of(smi: str) -> str | None:
    """Returns the architectures of this machine's GPUs; None without one.

    Args:
        smi: What `nvidia-smi --query-gpu=compute_cap --format=csv,noheader` says.
    """
    found = sorted(set(re.findall(r"^(\d+)\.(\d+)\s*$", smi, re.MULTILINE)))
    return ";".join(f"{major}{minor}" for major, minor in found) or None


def this_arch() -> str:
    """Returns the architectures of this machine's GPUs, or 90 without one."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    return arch_of(run(command)) or "90"


def build(defines: Mapping[str, str]) -> Path:
    """Builds the wheel and unpacks it. Returns where its packages lie.

    Raises:
        CudaError: it cannot be built; the end of the log is in the message.
    """
    log, out, site = FOLDER / "build.log", FOLDER / "out", FOLDER / "site"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "-v", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(out)]
    command += ["-C", f"build-dir={FOLDER / 'cmake'}"]
    for name, value in defines.items():
        command += ["-C", f"cmake.define.{name}={value}"]
    env = {name: text for name, text in os.environ.items() if name != "CMAKE_ARGS"}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            ["nice", *command], stdout=file, stderr=subprocess.STDOUT, env=env, check=False
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-N_LINES:])
        raise CudaError(f"the build failed; the end of {log.relative_to(ROOT)}:\n{end}")
    shutil.rmtree(site, ignore_errors=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site


def build_server() -> Path:
    """Builds llama-server in the tree of the engine. Returns it.

    Raises:
        CudaError: it cannot be built; the end of the log is in the message.
    """
    log = FOLDER / "server.log"
    command = ["nice", "cmake", "--build", str(FOLDER / "cmake"), "--target", "llama-server"]
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-N_LINES:])
        raise CudaError(f"llama-server failed; the end of {log.relative_to(ROOT)}:\n{end}")
    server = FOLDER / "bin" / "llama-server"
    server.parent.mkdir(exist_ok=True)
    shutil.copy2(FOLDER / "cmake" / "bin" / "llama-server", server)
    return server


def main() -> int:
    """Builds, or prints options; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description="the engine with CUDA, into build/cuda")
    parser.add_argument(
        "--arch", help="compute capability without its dot; default: this machine's GPU, or 90"
    )
    parser.add_argument("--portable", default="", help="level of x86-64 of the machine: v2, v3, v4")
    parser.add_argument("--server", action="store_true", help="llama-server, too")
    parser.add_argument("--print-args", action="store_true", help="print options for CMAKE_ARGS")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        toolkit = find_toolkit()
        defines = options(
            toolkit,
            arguments.arch or this_arch(),
            cublas_of(toolkit),
            portable=arguments.portable,
            has_server=arguments.server,
        )
        if arguments.print_args:
            sys.stdout.write(" ".join(f"-D{name}={value}" for name, value in defines.items()))
            return 0
        version = ".".join(map(str, toolkit.version))
        say(f"CUDA {version}, architecture {defines['CMAKE_CUDA_ARCHITECTURES']}: building …")
        site = build(defines)
        if arguments.server:
            say(f"llama-server is {build_server().relative_to(ROOT)}")
    except CudaError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; what is compiled is kept.")
        return 130
    n_min = (time.monotonic() - started_s) / 60
    say(f"the engine with CUDA is in {site.relative_to(ROOT)}, built in {n_min:.0f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
