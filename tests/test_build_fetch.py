"""Fetching llama.cpp: from a local index with real pip, so no test needs the network."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "cext" / "fetch_llama_cpp.py"

if TYPE_CHECKING:
    import fetch_llama_cpp as build_fetch
else:
    _SPEC = importlib.util.spec_from_file_location("fetch_llama_cpp", SCRIPT)
    build_fetch = importlib.util.module_from_spec(_SPEC)
    sys.modules["fetch_llama_cpp"] = build_fetch
    _SPEC.loader.exec_module(build_fetch)

TOP = "packaged-1.0"
PATCH = """\
--- a/include/llama.h
+++ b/include/llama.h
@@ -1 +1 @@
-original
+patched
"""


def add(tar: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    tar.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder that pip takes for an index; the setup.py in its archive leaves a trace."""
    folder = tmp_path / "index"
    folder.mkdir()
    trace = tmp_path / "archive-code-ran"
    with tarfile.open(folder / f"{TOP}.tar.gz", "w:gz") as tar:
        backend = (
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        )
        add(tar, f"{TOP}/pyproject.toml", backend)
        add(tar, f"{TOP}/setup.py", f"open({str(trace)!r}, 'w').close()\n")
        add(tar, f"{TOP}/PKG-INFO", "Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
        add(tar, f"{TOP}/thirdparty/llama.cpp/CMakeLists.txt", "project(llama.cpp)\n")
        add(tar, f"{TOP}/thirdparty/llama.cpp/include/llama.h", "original\n")
        add(tar, f"{TOP}/thirdparty/llama.cpp/../escaped.txt", "outside\n")
    return folder


@pytest.fixture
def lock(index: Path) -> build_fetch.Lock:
    archive = index / f"{TOP}.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    size_bytes = archive.stat().st_size
    return build_fetch.Lock("b1", "packaged", "1.0", digest, size_bytes, "thirdparty/llama.cpp")


@pytest.fixture(autouse=True)
def local_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("DRAFTHOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTHOUSE_LLAMA_CPP", raising=False)


def test_fetch_unpacks_only_llama_cpp_and_runs_no_code(
    lock: build_fetch.Lock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = build_fetch.cache_path(lock, [])
    build_fetch.fetch(lock, target, [])
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "include/llama.h"}
    assert not (tmp_path / "archive-code-ran").exists()
    assert [path.name for path in target.parent.iterdir()] == [target.name], "scratch left behind"
    output = capfd.readouterr()
    assert output.out == ""
    assert "MB" in output.err
    assert str(target) in output.err


def test_fetch_keeps_what_another_build_put_there_first(lock: build_fetch.Lock) -> None:
    target = build_fetch.cache_path(lock, [])
    build_fetch.fetch(lock, target, [])
    (target / "marker").touch()
    build_fetch.fetch(lock, target, [])
    assert (target / "marker").exists()


def test_fetch_refuses_an_archive_with_another_hash(lock: build_fetch.Lock) -> None:
    pinned = build_fetch.Lock("b1", "packaged", "1.0", "0" * 64, 1, lock.folder)
    target = build_fetch.cache_path(pinned, [])
    with pytest.raises(build_fetch.FetchError, match="sha256"):
        build_fetch.fetch(pinned, target, [])
    assert not target.exists()


def test_verify_does_not_rely_on_pip(lock: build_fetch.Lock, index: Path) -> None:
    archive = index / lock.archive_name
    build_fetch.verify(lock, archive)
    with archive.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(build_fetch.FetchError, match="refusing to build"):
        build_fetch.verify(lock, archive)


def test_fetch_without_an_index_says_what_to_do(
    lock: build_fetch.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(build_fetch.FetchError, match="DRAFTHOUSE_LLAMA_CPP") as caught:
        build_fetch.fetch(lock, build_fetch.cache_path(lock, []), [])
    assert "Traceback" not in str(caught.value)


def test_fetch_refuses_a_disk_that_is_too_small(
    lock: build_fetch.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(build_fetch.FetchError, match="only 1 MB are free"):
        build_fetch.fetch(lock, build_fetch.cache_path(lock, []), [])


def test_fetch_refuses_an_archive_without_llama_cpp(lock: build_fetch.Lock) -> None:
    moved = build_fetch.Lock("b1", "packaged", "1.0", lock.sha256, 1, "elsewhere")
    with pytest.raises(build_fetch.FetchError, match=r"holds no llama\.cpp in elsewhere"):
        build_fetch.fetch(moved, build_fetch.cache_path(moved, []), [])


@pytest.mark.parametrize("tool", ["patch", "git"])
def test_patches_are_applied_and_name_the_cache(
    tool: str, lock: build_fetch.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    if tool == "git":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    patch = tmp_path / "0001-change.patch"
    patch.write_text(PATCH)
    target = build_fetch.cache_path(lock, [patch])
    assert target != build_fetch.cache_path(lock, [])
    build_fetch.fetch(lock, target, [patch])
    assert (target / "include" / "llama.h").read_text() == "patched\n"


def test_a_patch_that_does_not_apply_leaves_nothing(lock: build_fetch.Lock, tmp_path: Path) -> None:
    patch = tmp_path / "0001-stale.patch"
    patch.write_text(PATCH.replace("original", "something else"))
    target = build_fetch.cache_path(lock, [patch])
    with pytest.raises(build_fetch.FetchError, match=r"0001-stale\.patch does not apply"):
        build_fetch.fetch(lock, target, [patch])
    assert not target.exists()


def test_own_checkout_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "include").mkdir(parents=True)
    (checkout / "include" / "llama.h").touch()
    (checkout / "CMakeLists.txt").touch()
    monkeypatch.setenv("DRAFTHOUSE_LLAMA_CPP", str(checkout))
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout == f"{checkout}\n"


def test_a_folder_that_is_no_checkout_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTHOUSE_LLAMA_CPP", str(tmp_path))
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "is not a checkout of llama.cpp" in run.stderr


def test_lock_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama_cpp.lock"
    path.write_text('version = "b1"\nunknown = 1\n')
    with pytest.raises(build_fetch.FetchError, match="not a valid lock file"):
        build_fetch.read_lock(path)


def test_lock_of_the_repository_is_readable() -> None:
    lock = build_fetch.read_lock()
    assert lock.version.removeprefix("b").isdigit()
    assert len(lock.sha256) == 64
