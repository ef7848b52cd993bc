"""Fetching llama.cpp: from a local index with real pip, so no test needs the network."""

from __future__ import annotations

import hashlib
import io
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cext" / "fetch_llama_cpp.py"
sys.path.insert(0, str(SCRIPT.parent))

import fetch_llama_cpp as build_fetch  # noqa: E402

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
    for name in ("DRAFTHOUSE_LLAMA_CPP", "DRAFTHOUSE_CPU_KERNELS", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)


def test_fetch_unpacks_only_llama_cpp_and_runs_no_code(
    lock: build_fetch.Lock, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = build_fetch.cache_path(lock, [])
    build_fetch.fetch(lock, target, [])
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {"CMakeLists.txt", "include/llama.h", build_fetch.MANIFEST}
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


def test_patches_are_applied_and_name_the_cache(lock: build_fetch.Lock, tmp_path: Path) -> None:
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
    with pytest.raises(build_fetch.FetchError, match=r"0001-stale\.patch does not fit"):
        build_fetch.fetch(lock, target, [patch])
    assert not target.exists()


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


def run_script(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


# --- the cache ---------------------------------------------------------------------------------


@pytest.fixture
def pinned(
    lock: build_fetch.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> build_fetch.Lock:
    """The small archive is the pin, and there is one patch of each kind."""
    folder = tmp_path / "patches"
    (folder / "cpu_kernels").mkdir(parents=True)
    (folder / "0001-change.patch").write_text(PATCH)
    kernels = PATCH.replace("include/llama.h", "CMakeLists.txt")
    kernels = kernels.replace("original", "project(llama.cpp)").replace("patched", "kernels")
    (folder / "cpu_kernels" / "0002-faster.patch").write_text(kernels)
    monkeypatch.setattr(build_fetch, "PATCHES_PATH", folder)
    monkeypatch.setattr(build_fetch, "read_lock", lambda: lock)
    return lock


def test_sources_with_and_without_the_kernels_lie_side_by_side(
    pinned: build_fetch.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels = build_fetch.source_path()
    monkeypatch.setenv("DRAFTHOUSE_CPU_KERNELS", "off")
    without = build_fetch.source_path()
    assert with_kernels != without
    assert (with_kernels / "CMakeLists.txt").read_text() == "kernels\n"
    assert (without / "CMakeLists.txt").read_text() == "project(llama.cpp)\n"
    assert (without / "include" / "llama.h").read_text() == "patched\n"
    assert build_fetch.changed_file(with_kernels) is None
    assert build_fetch.changed_file(without) is None


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, True),
        ({"DRAFTHOUSE_CPU_KERNELS": "ON"}, True),
        ({"DRAFTHOUSE_CPU_KERNELS": "0"}, False),
        ({"CMAKE_ARGS": "-DGGML_CUDA=ON -DDRAFTHOUSE_CPU_KERNELS=OFF"}, False),
        (
            {"CMAKE_ARGS": "-DDRAFTHOUSE_CPU_KERNELS:BOOL=false", "DRAFTHOUSE_CPU_KERNELS": "ON"},
            False,
        ),
        ({"CMAKE_ARGS": "-DDRAFTHOUSE_CPU_KERNELS=ON", "DRAFTHOUSE_CPU_KERNELS": "OFF"}, True),
    ],
)
def test_kernels_are_chosen_by_variable_or_by_option(
    environment: dict[str, str], wanted: bool
) -> None:
    assert build_fetch.wants_cpu_kernels(environment) is wanted


@pytest.mark.parametrize("value", ["", "maybe"])
def test_an_unknown_choice_of_kernels_is_refused(value: str) -> None:
    with pytest.raises(build_fetch.FetchError, match="expected ON or OFF"):
        build_fetch.wants_cpu_kernels({"DRAFTHOUSE_CPU_KERNELS": value})


def test_a_source_has_another_name_if_a_patch_does_something_else(
    lock: build_fetch.Lock, tmp_path: Path
) -> None:
    patch = tmp_path / "0001-change.patch"
    names = []
    for text in (f"Why.\n\n{PATCH}", f"Why indeed.\n\n{PATCH}", f"Why.\n\n{PATCH}".upper()):
        patch.write_text(text)
        names.append(build_fetch.cache_path(lock, [patch]))
    assert names[0] == names[1], "its words are no reason to compile everything again"
    assert names[0] != names[2]


@pytest.mark.parametrize("damage", ["edited", "deleted", "no manifest"])
def test_a_changed_cache_is_seen_and_left_alone(
    damage: str, pinned: build_fetch.Lock, capfd: pytest.CaptureFixture[str]
) -> None:
    first = build_fetch.source_path()
    header = first / "include" / "llama.h"
    if damage == "edited":
        header.write_text("by hand\n")
    elif damage == "deleted":
        header.unlink()
    else:
        (first / build_fetch.MANIFEST).unlink()
    second = build_fetch.source_path()
    assert second != first
    assert (second / "include" / "llama.h").read_text() == "patched\n"
    assert damage != "edited" or header.read_text() == "by hand\n"
    changed = build_fetch.MANIFEST if damage == "no manifest" else "include/llama.h"
    assert f"{first} is left alone: {changed} is not what was unpacked" in capfd.readouterr().err
    assert build_fetch.source_path() == second


def test_sha256sum_reads_the_manifest(pinned: build_fetch.Lock) -> None:
    source = build_fetch.source_path()
    command = ["sha256sum", "--check", "--quiet", build_fetch.MANIFEST]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_source_that_nobody_builds_is_removed_after_a_month(pinned: build_fetch.Lock) -> None:
    used, unused = (
        build_fetch.cache_path(pinned, []).with_name(f"llama.cpp-b0-{name}")
        for name in ("used", "unused")
    )
    for folder, age_days in ((used, 29), (unused, 31)):
        folder.mkdir(parents=True)
        stamp = folder / build_fetch.MANIFEST
        stamp.touch()
        then = time.time() - 86400 * age_days
        os.utime(stamp, (then, then))
    build_fetch.source_path()
    assert used.exists()
    assert not unused.exists()


def test_an_edited_source_stays_however_old_it_is(pinned: build_fetch.Lock) -> None:
    first = build_fetch.source_path()
    (first / "include" / "llama.h").write_text("by hand\n")
    os.utime(first / build_fetch.MANIFEST, (0, 0))
    assert build_fetch.source_path() != first  # made anew, which removes what is unused
    assert (first / "include" / "llama.h").read_text() == "by hand\n"


def test_what_a_killed_build_left_is_removed_after_a_month(pinned: build_fetch.Lock) -> None:
    root = build_fetch.cache_root()
    for name, age_days in ((".fetch-new", 0), (".fetch-old", 31)):
        (root / name / "source").mkdir(parents=True)
        then = time.time() - 86400 * age_days
        os.utime(root / name, (then, then))
    build_fetch.source_path()
    assert sorted(path.name for path in root.glob(".fetch-*")) == [".fetch-new"]


def test_a_cache_of_another_user_is_built_from(
    pinned: build_fetch.Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_fetch.source_path()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)  # may be read alone
    assert build_fetch.source_path() == source


def test_a_build_marks_its_source_as_used(pinned: build_fetch.Lock) -> None:
    stamp = build_fetch.source_path() / build_fetch.MANIFEST
    os.utime(stamp, (0, 0))
    build_fetch.source_path()
    assert time.time() - stamp.stat().st_mtime < 3600


def test_no_home_folder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(*_: Any) -> Any:
        raise KeyError

    for name in ("HOME", "DRAFTHOUSE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(build_fetch.FetchError, match="set DRAFTHOUSE_CACHE"):
        build_fetch.cache_root()


def test_pip_unpacks_on_the_disk_that_was_checked(
    lock: build_fetch.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not-there"))  # pip would fail in it
    build_fetch.download(lock, tmp_path)
    assert (tmp_path / lock.archive_name).is_file()


# --- a checkout of one's own -------------------------------------------------------------------


@pytest.fixture
def checkout(pinned: build_fetch.Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plain checkout, as upstream has it."""
    folder = tmp_path / "checkout"
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "llama.h").write_text("original\n")
    (folder / "CMakeLists.txt").write_text("project(llama.cpp)\n")
    (folder / "build").mkdir()
    (folder / "build" / "object.o").touch()
    monkeypatch.setenv("DRAFTHOUSE_LLAMA_CPP", str(folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_plain_checkout_is_patched_in_a_copy(checkout: Path) -> None:
    before = contents(checkout)
    source = build_fetch.source_path()
    assert contents(checkout) == before
    assert source.is_relative_to(build_fetch.cache_root())
    found = contents(source)
    assert found.pop(build_fetch.MANIFEST)
    assert found == {"CMakeLists.txt": b"kernels\n", "include/llama.h": b"patched\n"}


def test_a_copy_is_kept_until_the_checkout_changes(checkout: Path) -> None:
    first = build_fetch.source_path()
    number = (first / "include" / "llama.h").stat().st_ino
    assert build_fetch.source_path() == first
    assert (first / "include" / "llama.h").stat().st_ino == number, "copied again"
    (checkout / "new.cpp").touch()
    assert build_fetch.source_path() != first


def test_a_checkout_in_git_is_copied_without_what_git_ignores(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("*.gguf\n")
    (checkout / "large.gguf").touch()
    subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
    found = contents(build_fetch.source_path())
    assert "large.gguf" not in found
    assert "include/llama.h" in found


def test_a_patched_checkout_is_built_as_it_is(checkout: Path) -> None:
    (checkout / "include" / "llama.h").write_text("patched\n")
    (checkout / "CMakeLists.txt").write_text("kernels\n")
    assert build_fetch.source_path() == checkout


def test_a_checkout_gets_the_patches_that_it_lacks(checkout: Path) -> None:
    (checkout / "include" / "llama.h").write_text("patched\n")
    source = build_fetch.source_path()
    assert (source / "CMakeLists.txt").read_text() == "kernels\n"
    assert (source / "include" / "llama.h").read_text() == "patched\n"


def test_an_edited_copy_of_the_cache_is_built_as_it_is(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTHOUSE_LLAMA_CPP")
    copy = tmp_path / "copy"
    shutil.copytree(build_fetch.source_path(), copy)
    (copy / "include" / "llama.h").write_text("an experiment\n")
    monkeypatch.setenv("DRAFTHOUSE_LLAMA_CPP", str(copy))
    os.utime(copy / build_fetch.MANIFEST, (0, 0))
    assert build_fetch.source_path() == copy
    assert (copy / build_fetch.MANIFEST).stat().st_mtime > 0, "it may lie in the cache"


def test_a_checkout_that_cannot_be_patched_is_one_sentence(checkout: Path) -> None:
    (checkout / "include" / "llama.h").write_text("of another year\n")
    with pytest.raises(build_fetch.FetchError) as caught:
        build_fetch.source_path()
    assert "0001-change.patch does not fit include/llama.h, line 1" in str(caught.value)
    assert not list(build_fetch.cache_root().glob("*"))


def test_the_script_prints_one_path_or_one_sentence(tmp_path: Path) -> None:
    done = run_script("--cpu-kernels=never", DRAFTHOUSE_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'error: DRAFTHOUSE_CPU_KERNELS is "never"; expected ON or OFF.\n'
