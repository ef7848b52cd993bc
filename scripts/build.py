"""Makes everything that `make serve` and `make test` need, and only what is missing.

Runs on the system's Python with the standard library alone. Five steps: the tools of the machine, a
virtual environment, Python packages, the source of llama.cpp, the engine. What a step did before is
kept (stamps in .venv); a later run takes about a second, and after an edit in cext/spec only that
file is compiled.

The Python packages are installed editable: an edit of a .py file takes effect at the next start.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cext"))

import build_jobs  # noqa: E402  shared with CMake

BUILD = ROOT / "build"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = BUILD / "build.log"
N_STEPS = 5
N_LOG_LINES = 30
MIN_CMAKE = (3, 25)
MEGABYTE = 1_000_000
NINJA_PROGRESS = re.compile(r"\[(\d+)/(\d+)\]")
# Where the reason of a failed build starts: ninja's, the compilers', CMake's and pip's own words.
FAILURE = re.compile(
    r"^\s*(FAILED:|CMake Error|ERROR:)|: (fatal )?error:|^\s*error: (?!subprocess)"
)
# What changes how the engine is configured; a change of any of them configures it again.
ENVIRONMENT = (
    *("CMAKE_ARGS", "CMAKE_PREFIX_PATH", "CMAKE_TOOLCHAIN_FILE", "CMAKE_GENERATOR"),
    *("CMAKE_BUILD_TYPE", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "SOURCE_DATE_EPOCH"),
    *("CC", "CXX", "CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "PKG_CONFIG_PATH"),
    *("CUDACXX", "CUDAARCHS", "CUDAFLAGS", "CUDAHOSTCXX", "CUDA_PATH", "HIPCXX", "HIP_PATH"),
    *("ROCM_PATH", "VULKAN_SDK", "ONEAPI_ROOT"),
    *("DRAFTHOUSE_LLAMA_CPP", "DRAFTHOUSE_CPU_KERNELS"),
)
OLDEST = {"GCC": 11, "Clang": 14}
PACKAGES_STAMP = VENV / "drafthouse-packages.stamp"
ENGINE_STAMP = VENV / "drafthouse-engine.stamp"


class BuildError(Exception):
    """Says in one sentence what is missing or failed, and what to do."""


class Progress:
    """Shows one step: a line that counts seconds on a terminal, plain lines elsewhere."""

    def __init__(self, number: int, title: str) -> None:
        self.title = title
        self._title = f"[{number}/{N_STEPS}] {title}"
        self._started_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._shown_percent = 0
        self._is_started = False

    def start(self) -> None:
        """Says, where no line counts seconds, that there is something to wait for."""
        if not self._is_terminal and not self._is_started:
            self._is_started = True
            self._write(f"{self._title} …\n")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started_s

    def show(self, detail: str = "") -> None:
        """Rewrites the line, on a terminal."""
        if self._is_terminal:
            self._write(f"\r\033[K{self._title} … {detail} {self.elapsed_s:.0f} s")

    def show_part(self, n_done: int, n_all: int) -> None:
        """Shows how many of the files are compiled."""
        percent = 100 * n_done // max(n_all, 1)
        if self._is_terminal:
            filled = percent // 5
            self.show(f"[{'█' * filled}{'·' * (20 - filled)}] {n_done}/{n_all} files,")
        elif percent >= self._shown_percent + 20:
            self._shown_percent = percent
            self._write(f"      {n_done}/{n_all} files, {self.elapsed_s:.0f} s\n")

    def end(self, detail: str) -> None:
        """Ends the step's line with what came out of it."""
        start = "\r\033[K" if self._is_terminal else ""
        self._write(f"{start}{self._title}: {detail}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def run(command: list[str], progress: Progress, *, env: dict[str, str] | None = None) -> str:
    """Runs a command, shows its progress, appends its output to the log and returns the output.

    Raises:
        BuildError: it failed; the end of its output has been shown.
    """
    lines: list[str] = []
    progress.start()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it can be stopped with all that it has started
    )
    assert process.stdout is not None
    with LOG.open("a", buffering=1, encoding="utf-8") as log, process:
        try:
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                part = NINJA_PROGRESS.search(line)
                if part:
                    progress.show_part(int(part[1]), int(part[2]))
                else:
                    progress.show(line.strip()[:60])
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)  # compilers would go on for minutes
            raise
    if process.returncode:
        first = next((i for i, line in enumerate(lines) if FAILURE.search(line)), -N_LOG_LINES)
        sys.stderr.write("\n" + "".join(lines[first:][:N_LOG_LINES]))
        raise BuildError(f"{progress.title} failed; the whole log is in {LOG.relative_to(ROOT)}.")
    return "".join(lines)


def version_of(tool: str) -> tuple[int, ...]:
    """Returns the version that a tool of the system reports, empty when it is missing."""
    if not shutil.which(tool):
        return ()
    run_version = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+)\.(\d+)", run_version.stdout)
    return tuple(int(part) for part in found.groups()) if found else ()


def check_machine() -> None:
    """Refuses a machine on which a later step would fail.

    Raises:
        BuildError: no C++ compiler, an old Python, or a Python without venv.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  this script is what tells the user
        raise BuildError(
            f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Set PYTHON=…"
        )
    try:
        import ensurepip  # noqa: F401, PLC0415  Debian ships it apart
        import venv  # noqa: F401, PLC0415
    except ImportError:
        if not PYTHON.exists():
            raise BuildError("This Python has no venv: apt-get install python3-venv") from None
    for variable, names, package in (
        ("CC", ("cc", "gcc", "clang"), "gcc"),
        ("CXX", ("c++", "g++", "clang++"), "g++"),
    ):
        own = shlex.split(os.environ.get(variable, ""))
        found = own if own else [name for name in names if shutil.which(name)][:1]
        if not found or not shutil.which(found[0]):
            raise BuildError(
                f"No {'C++' if variable == 'CXX' else 'C'} compiler: apt-get install {package} "
                f"(or set {variable})."
            )
        check_compiler(found, variable)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        raise BuildError(f"Python's headers are missing ({header}): apt-get install python3-dev")


def compiler_version(command: list[str]) -> tuple[str, int]:
    """Returns which compiler a command is, GCC or Clang, and its major version.

    Any other name with a version of 0 where the compiler does not say: CMake knows more of them.
    """
    ask = [*command, "-dM", "-E", "-x", "c", os.devnull]
    try:
        macros = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown", 0
    found = dict(re.findall(r"^#define (__\w+__) (\d+)$", macros, re.MULTILINE))
    if "__apple_build_version__" in found:
        return "Apple Clang", 0
    if "__clang_major__" in found:
        return "Clang", int(found["__clang_major__"])
    if "__GNUC__" in found:
        return "GCC", int(found["__GNUC__"])
    return "unknown", 0


def check_compiler(command: list[str], variable: str) -> None:
    """Refuses a compiler with which llama.cpp would fail, after minutes.

    Raises:
        BuildError: it is too old.
    """
    name, version = compiler_version(command)
    if 0 < version < OLDEST.get(name, 0):
        raise BuildError(
            f"{shlex.join(command)} is {name} {version}; llama.cpp needs GCC {OLDEST['GCC']} or "
            f"Clang {OLDEST['Clang']} or newer (set {variable})."
        )


def digest(*parts: str) -> str:
    """Returns a short hash that names a state."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stamped(stamp: Path) -> set[str]:
    """Returns the lines of a stamp: what was done before."""
    return set(stamp.read_text().splitlines()) if stamp.is_file() else set()


def project(path: Path) -> dict[str, object]:
    """Returns the [project] table of a pyproject.toml."""
    import tomllib  # noqa: PLC0415  # an older Python has none, and is told of it in a sentence

    table = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    assert isinstance(table, dict)
    return table


def packages(extras: list[str]) -> list[str]:
    """Returns the requirements of server, SDK and extras, without our own two packages."""
    server, sdk = (
        project(ROOT / "pyproject.toml"),
        project(ROOT / "clients" / "python" / "pyproject.toml"),
    )
    groups = server["optional-dependencies"]
    assert isinstance(groups, dict)
    found = [*_strings(server["dependencies"]), *_strings(sdk["dependencies"])]
    for extra in extras:
        found += _strings(groups[extra])
    if version_of("cmake") < MIN_CMAKE:
        found.append("cmake>=3.25,<5")
    if not shutil.which("ninja"):
        found.append("ninja>=1.11,<2")
    return sorted({name for name in found if not name.startswith("drafthouse==")})


def _strings(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(item) for item in value]


def size_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def environment() -> dict[str, str]:
    """Returns the environment of the build tools: the virtual environment first on the path."""
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    is_gpu = bool(build_jobs.GPU_OPTION.search(os.environ.get("CMAKE_ARGS", "")))
    return os.environ | {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(build_jobs.jobs(is_gpu=is_gpu)),
        "PATH": path,
        "VIRTUAL_ENV": str(VENV),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def make_venv() -> None:
    """Step 2: the virtual environment."""
    progress = Progress(2, "virtual environment .venv")
    if PYTHON.with_name("pip").exists():  # its last file: a making that was stopped starts again
        progress.end("there")
        return
    run([sys.executable, "-m", "venv", "--clear", str(VENV)], progress)
    progress.end(f"made, Python {sys.version.split()[0]}, {progress.elapsed_s:.0f} s")


def install_packages(extras: list[str]) -> None:
    """Step 3: third-party packages, then our pure ones (editable)."""
    progress = Progress(3, "Python packages")
    wanted = packages(extras)
    # The benchmarks are for who develops; a server has none.
    own = ["clients/python", *(["bench"] if "dev" in extras else [])]
    state = {*wanted, *(digest((ROOT / path / "pyproject.toml").read_text()) for path in own)}
    # A subset: what `make test` installed serves `make serve` too.
    if state <= stamped(PACKAGES_STAMP):
        progress.end("there")
        return
    pip = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off"]
    run([*pip, *wanted], progress, env=environment())
    run(
        [*pip, "--no-deps", "--no-build-isolation", *(f"--editable={path}" for path in own)],
        progress,
        env=environment(),
    )
    PACKAGES_STAMP.write_text("\n".join(sorted(state | stamped(PACKAGES_STAMP))))
    site = next(VENV.glob("lib/python*/site-packages"))
    progress.end(f"installed, {size_bytes(site) // MEGABYTE} MB, {progress.elapsed_s:.0f} s")


def fetch_source() -> str:
    """Step 4: the source of llama.cpp. Returns its folder."""
    progress = Progress(4, "source of llama.cpp")
    # Its own lines (what it fetches, size, seconds) go straight to the terminal.
    fetch = subprocess.run(
        [str(PYTHON), "cext/fetch_llama_cpp.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if fetch.returncode:
        raise BuildError("The engine cannot be built without the source of llama.cpp.")
    progress.end(fetch.stdout.strip())
    return fetch.stdout.strip()


def python_files() -> Iterator[Path]:
    """Yields the Python files that the editable install of the server knows."""
    for package in ("cext/drafthouse_engine", "service/drafthouse_server"):
        yield from (ROOT / package).rglob("*.py")


def build_engine(source: str) -> None:
    """Step 5: the engine; all of it through pip, later what changed through ninja."""
    progress = Progress(5, "engine")
    import tomllib  # noqa: PLC0415  # see `project`

    python_version = sys.version.split()[0]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own = [pyproject["build-system"], pyproject["project"], pyproject["tool"]["scikit-build"]]
    settings = [f"{name}={os.environ.get(name, '')}" for name in ENVIRONMENT]
    # The editable install knows each file by name: one that is new, or has moved, is a new state.
    names = sorted(str(path.relative_to(ROOT)) for path in python_files())
    state = digest(source, python_version, *settings, *map(repr, own), *names)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-*"
    folder = next((path.parent for path in BUILD.glob(f"{tag}/build.ninja")), None)
    if folder and stamped(ENGINE_STAMP) == {state}:
        rebuild(folder, progress)
    else:
        if folder:  # an option that is no longer given must not live on in CMake's cache
            (folder / "CMakeCache.txt").unlink(missing_ok=True)
        command = [
            str(PYTHON),
            "-m",
            "pip",
            "install",
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "--editable",
            ".",
        ]
        command += ["--config-settings", "cmake.define.DRAFTHOUSE_DEV=ON"]
        run(command, progress, env=environment())
        ENGINE_STAMP.write_text(state)
    progress.end(f"ready, {progress.elapsed_s:.0f} s")


def rebuild(folder: Path, progress: Progress) -> None:
    """Compiles what changed and puts the extension where the editable install looks for it."""
    cmake = shutil.which("cmake", path=environment()["PATH"]) or "cmake"
    run([cmake, "--build", str(folder)], progress, env=environment())
    site = next(VENV.glob("lib/python*/site-packages"))
    install = [
        cmake,
        "--install",
        str(folder),
        "--component",
        "drafthouse_engine",
        "--prefix",
        str(site),
    ]
    run(install, progress, env=environment())


@contextmanager
def exclusive() -> Iterator[None]:
    """Lets one build at a time into the tree; the second waits."""
    import fcntl  # noqa: PLC0415  POSIX, as the engine is

    with (BUILD / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("waiting for another build of this tree to end …\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stop_on_signals() -> None:
    """Lets SIGTERM and a closed terminal stop a build as Ctrl-C does: all that it has started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it goes on
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def main() -> int:
    """Builds; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description="make what `make serve` and `make test` need")
    parser.add_argument(
        "--dev", action="store_true", help="with the tools of `make test` and `make verify`"
    )
    parser.add_argument("--models", action="store_true", help="with the packages of `make models`")
    arguments = parser.parse_args()
    extras = ["build"] + ["dev"] * arguments.dev + ["models"] * arguments.models
    BUILD.mkdir(exist_ok=True)
    stop_on_signals()
    try:
        with exclusive():
            LOG.unlink(missing_ok=True)
            progress = Progress(1, "tools of this machine")
            check_machine()
            progress.end(f"compiler and Python {sys.version.split()[0]} there")
            make_venv()
            install_packages(extras)
            build_engine(fetch_source())
    except BuildError as error:
        sys.stderr.write(f"\nerror: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what is done is kept.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
