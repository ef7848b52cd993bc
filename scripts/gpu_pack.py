"""Packs what a machine with a GPU and without a network needs: `scripts/gpu_tables.sh --pack`.

Into build/gpu-pack, which `scripts/gpu_tables.sh` uses where it finds it: the patched source of
llama.cpp, without what no build of ours reads, and the wheels of our requirements for the Python
there. The repository travels beside it, so both together are held against the limit of what can
be taken along.

With `--built`, in place of the source, what `scripts/cuda.py --arch 90-real --portable v3 --server`
has built, run by a Python of the version there: where a machine is lent for a quarter of an hour,
compiling would take nine minutes of it.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "cext"), str(ROOT)]

from scripts import build, gpu_results  # noqa: E402  they are found since the lines above

import fetch_llama_cpp as pinned  # noqa: E402  the one module that knows the pinned source

FOLDER = ROOT / "build" / "gpu-pack"
SOURCE = "llama.cpp.tar.xz"
BUILT = "built.tar.xz"
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
"""A window in which engine and server lie, which hold the same kernels."""
CUDA = ROOT / "build" / "cuda"
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


def pack_built(folder: Path, wheels: Path, target: Path, python: str) -> None:
    """Writes the archive of an engine with all that is imported beside it, and of llama-server.

    Args:
        folder: Where `scripts/cuda.py` has put engine and server.
        wheels: Those of what is imported, which are installed by unpacking them.
        target: The archive.
        python: Version of the Python there.

    Raises:
        PackError: one of them is not built, or for another Python.
    """
    engine, server = folder / "site" / "drafthouse_engine", folder / "bin" / "llama-server"
    advice = f"run scripts/cuda.py --server by Python {python}"
    if not any(engine.glob(f"_spec.cpython-{python.replace('.', '')}-*")):
        raise PackError(f"{folder} has no engine for Python {python}; {advice}")
    if not server.exists():
        raise PackError(f"{folder} has no llama-server; {advice}")

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith("__pycache__") else member

    with (
        tempfile.TemporaryDirectory() as site,
        lzma.open(target, "w", filters=_FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in wheels.glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)  # noqa: S202  # as pip would, from where pip takes them
        archive.add(folder / "site", "site", filter=chosen)
        archive.add(server, "bin/llama-server")
        archive.add(site, "site")


def platforms() -> list[str]:
    """Returns pip's options for wheels of an x86-64 Linux."""
    names = [f"manylinux_{version}_x86_64" for version in GLIBC]
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
    """Removes the wheels of packages that are there already, named with their versions or not."""
    there = {re.sub(r"[-_.]+", "_", name.partition("==")[0]).lower() for name in names}
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


def pack(python: str, there: Sequence[str], built: Path | None = None) -> str:
    """Makes the pack. Returns what travels, in words.

    Args:
        python: Version of the Python there.
        there: Packages that it has.
        built: Where `scripts/cuda.py` has put what takes the source's place, if it does.

    Raises:
        PackError: something cannot be had, or it is too much.
        pinned.FetchError: the source cannot be had.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheels = FOLDER / "wheels"
    wheels.mkdir(parents=True)
    needed = build.packages([] if built else ["build"])
    # What comes along has to suit the versions that are there.
    fixed = [name for name in there if "==" in name]
    fetch_wheels([*needed, *gpu_results.packages(), *fixed], python, wheels)
    leave_out(wheels, there)
    if built:
        pack_built(built, wheels, FOLDER / BUILT, python)
        shutil.rmtree(wheels)
    else:
        pack_source(pinned.source_path(), FOLDER / SOURCE)
    return check_size(repository_bytes(), build.size_bytes(FOLDER))


def main() -> int:
    """Packs; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description="what a machine with a GPU needs, for a journey")
    parser.add_argument("--python", default="3.12", help="the Python there")
    parser.add_argument(
        "--there",
        default="numpy,cmake,ninja",
        help="packages that it has, with commas between, as grpcio==1.84.0 or numpy: no wheels"
        " of them, and of others those that suit these versions",
    )
    parser.add_argument("--built", action="store_true", help="what scripts/cuda.py has built")
    arguments = parser.parse_args()
    try:
        words = pack(
            arguments.python, arguments.there.split(","), CUDA if arguments.built else None
        )
    except (PackError, pinned.FetchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{FOLDER.relative_to(ROOT)}: {words}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
