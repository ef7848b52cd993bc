"""Packs what a machine with a GPU and without a network needs: `scripts/gpu_tables.sh --pack`.

Into build/gpu-pack, which `scripts/gpu_tables.sh` uses where it finds it: the patched source of
llama.cpp, without what no build of ours reads, and the wheels of our requirements for the Python
there. The repository travels beside it, so both together are held against the limit of what can
be taken along.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "cext"), str(ROOT)]

from scripts import build, gpu_results  # noqa: E402  they are found since the lines above

import fetch_llama_cpp as pinned  # noqa: E402  the one module that knows the pinned source

FOLDER = ROOT / "build" / "gpu-pack"
SOURCE = "llama.cpp.tar.xz"
LIMIT_BYTES = 64 << 20
"""Of repository and pack together, where one machine lends another."""
MEGABYTE = 1_000_000

NOT_BUILT = (
    *("benches", "ci", "conversion", "docs", "examples", "gguf-py", "grammars", "media", "models"),
    *("pocs", "requirements", "scripts", "skills", "tests"),
)
"""Folders of llama.cpp that neither the engine nor llama-server is built from."""

GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35")
"""Versions of the C library that wheels are named for; pip matches each by name."""


class PackError(Exception):
    """Says in a sentence what is missing or too large."""


def is_built(name: str) -> bool:
    """Tells whether a file of llama.cpp's source belongs into the pack.

    Args:
        name: Its path below the source, with slashes.
    """
    first = name.partition("/")[0]
    return first not in NOT_BUILT and (not first.startswith(".") or "/" not in name)


def pack_source(source: Path, target: Path) -> None:
    """Writes the archive of a source; its top folder is llama.cpp.

    Args:
        source: As `cext/fetch_llama_cpp.py` left it, patched, with the list of its files.
        target: The archive.
    """

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = member.name.partition("/")[2]
        return member if not name or is_built(name) else None

    with tarfile.open(target, "w:xz") as archive:
        archive.add(source, "llama.cpp", filter=chosen)


def platforms(glibc: Sequence[str] = GLIBC) -> list[str]:
    """Returns pip's options for wheels of an x86-64 Linux."""
    names = [f"manylinux_{version}_x86_64" for version in glibc]
    names += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    return [f"--platform={name}" for name in names]


def fetch_wheels(packages: Iterable[str], python: str, folder: Path) -> None:
    """Fetches wheels, and those that they need.

    Raises:
        PackError: one cannot be had.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms()]
    done = subprocess.run(
        [*command, f"--dest={folder}", *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PackError(f"wheels cannot be fetched: {done.stderr.strip().splitlines()[-1]}")


def leave_out(folder: Path, names: Iterable[str]) -> None:
    """Removes the wheels of packages that are there already."""
    there = {re.sub(r"[-_.]+", "_", name).lower() for name in names}
    for wheel in folder.glob("*.whl"):
        if re.sub(r"[-_.]+", "_", wheel.name.split("-")[0]).lower() in there:
            wheel.unlink()


def check_size(n_repository: int, n_pack: int, limit: int = LIMIT_BYTES) -> str:
    """Returns what travels, in words.

    Raises:
        PackError: it is too much.
    """
    total = n_repository + n_pack
    words = (
        f"{n_pack / MEGABYTE:.1f} MB in the pack, {n_repository / MEGABYTE:.1f} MB in the"
        f" repository: {total / MEGABYTE:.1f} of {limit / MEGABYTE:.1f} MB"
    )
    if total > limit:
        raise PackError(f"{words}; leave out more of what is there (--there)")
    return words


def repository_bytes() -> int:
    """Returns the size of what git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in set(listed.split("\0")) if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def pack(python: str, there: Sequence[str]) -> str:
    """Makes the pack. Returns what travels, in words.

    Raises:
        PackError: something cannot be had, or it is too much.
        pinned.FetchError: the source cannot be had.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels = FOLDER / "wheels"
    wheels.mkdir(parents=True)
    pack_source(pinned.source_path(), FOLDER / SOURCE)
    fetch_wheels([*build.packages(["build"]), *gpu_results.packages()], python, wheels)
    leave_out(wheels, there)
    return check_size(repository_bytes(), build.size_bytes(FOLDER))


def main() -> int:
    """Packs; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description="what a machine with a GPU needs, for a journey")
    parser.add_argument("--python", default="3.12", help="the Python there")
    parser.add_argument(
        "--there",
        default="numpy,cmake,ninja",
        help="packages that it has, with commas between: no wheels of them",
    )
    arguments = parser.parse_args()
    try:
        words = pack(arguments.python, arguments.there.split(","))
    except (PackError, pinned.FetchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{FOLDER.relative_to(ROOT)}: {words}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
