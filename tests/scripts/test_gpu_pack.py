"""What travels to a machine with a GPU: all that a build reads, and no more than may."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.built import missing

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pack", ROOT / "scripts" / "gpu_pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpu_pack = load()

KEPT = ("CMakeLists.txt", "LICENSE", "include/llama.h", "src/llama.cpp", "common/.hidden/a.h")
LEFT = ("docs/a.md", "models/vocab.gguf", "tests/a.cpp", "examples/a/main.cpp", ".github/ci.yml")


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_source_travels_without_what_is_not_built(tmp_path: Path) -> None:
    # As the cache holds it: with the list of what is in it.
    source = files(tmp_path / "b1", *KEPT, *LEFT, gpu_pack.pinned.MANIFEST)
    archive = tmp_path / gpu_pack.SOURCE
    gpu_pack.pack_source(source, archive)
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Debian 12's Python has none
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(tmp_path / "there")  # noqa: S202  # made above
    there = tmp_path / "there" / "llama.cpp"
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {*KEPT, gpu_pack.pinned.MANIFEST}
    # It is built as it is: its patches are in it, and no network and no cache is asked for.
    done = subprocess.run(
        [sys.executable, ROOT / "cext" / "fetch_llama_cpp.py"],
        env=os.environ | {"DRAFTHOUSE_LLAMA_CPP": str(there), "DRAFTHOUSE_CACHE": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(there)


@pytest.mark.model
def test_whatever_the_engine_is_built_from_is_in_the_pack() -> None:
    folder = next(iter((ROOT / "build").glob("cp3*-linux_*")), None)
    if folder is None or not (folder / ".ninja_deps").exists():
        missing("the engine is not built here: `make build`")
    ninja = subprocess.run(
        ["ninja", "-C", str(folder), "-t", "deps"], capture_output=True, text=True, check=True
    )
    source = gpu_pack.pinned.source_path()
    read = {
        Path(line.strip()).relative_to(source).as_posix()
        for line in ninja.stdout.splitlines()
        if line.startswith(f"    {source}/")
    }
    assert len(read) > 200
    assert not {name for name in read if not gpu_pack.is_built(name)}


def test_wheels_of_what_is_there_stay_here(tmp_path: Path) -> None:
    wheels = ("numpy-2.4-cp312.whl", "pytest_asyncio-1.3-py3.whl", "ninja-1.11-py3.whl")
    files(tmp_path, *wheels)
    gpu_pack.leave_out(tmp_path, ["numpy==2.5.2", "pytest.asyncio"])
    assert [path.name for path in tmp_path.iterdir()] == ["ninja-1.11-py3.whl"]


def test_what_is_built_travels_with_what_it_imports_and_once(tmp_path: Path) -> None:
    kernels = os.urandom(1 << 20)
    built = files(tmp_path / "cuda", "site/drafthouse_engine/__pycache__/a.pyc")
    engine = built / "site" / "drafthouse_engine" / "_spec.cpython-312-x86_64-linux-gnu.so"
    engine.write_bytes(kernels)
    with pytest.raises(gpu_pack.PackError, match=r"no engine for Python 3\.13; run"):
        gpu_pack.pack_built(built, tmp_path, tmp_path / "built.tar.xz", "3.13")
    with pytest.raises(gpu_pack.PackError, match="no llama-server; run"):
        gpu_pack.pack_built(built, tmp_path, tmp_path / "built.tar.xz", "3.12")
    (built / "bin").mkdir()
    (built / "bin" / "llama-server").write_bytes(kernels)
    with zipfile.ZipFile(tmp_path / "rich-15-py3-none-any.whl", "w") as wheel:
        wheel.writestr("rich/__init__.py", "")
    gpu_pack.pack_built(built, tmp_path, tmp_path / "built.tar.xz", "3.12")
    assert (tmp_path / "built.tar.xz").stat().st_size < 1.1 * len(kernels)
    with tarfile.open(tmp_path / "built.tar.xz") as archive:
        found = {member.name for member in archive if member.isfile()}
    assert found == {
        f"site/drafthouse_engine/{engine.name}",
        "site/rich/__init__.py",
        "bin/llama-server",
    }


def test_more_than_may_travel_is_refused_with_the_sizes() -> None:
    said = gpu_pack.check_size(35_000_000, 20_000_000, 64 << 20)
    assert said == "20.0 MB in the pack, 35.0 MB in the repository: 55.0 of 67.1 MB"
    with pytest.raises(gpu_pack.PackError, match=r"70\.0 of 67\.1 MB; leave out more"):
        gpu_pack.check_size(50_000_000, 20_000_000, 64 << 20)


def test_what_git_does_not_ignore_counts() -> None:
    n_models = sum(path.stat().st_size for path in (ROOT / "models").glob("*.gguf"))
    assert n_models < gpu_pack.repository_bytes() < gpu_pack.LIMIT_BYTES
