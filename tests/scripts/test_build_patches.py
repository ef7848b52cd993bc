"""Our patches of llama.cpp: applied exactly, in every combination, and by other tools alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cext"))

import fetch_llama_cpp as pinned  # noqa: E402
import patch_files  # noqa: E402

NEEDED, KERNELS = pinned.needed_patches(), pinned.kernel_patches()
N_CONTEXT = 5

FILE = "".join(f"line {i}\n" for i in range(1, 31))
PATCH = """\
Why.

--- a/file.txt
+++ b/file.txt
@@ -8,5 +8,6 @@
 line 8
 line 9
-line 10
+line ten
+line ten and a half
 line 11
 line 12
"""
NEW_FILE = """\
--- /dev/null
+++ b/new/file.txt
@@ -0,0 +1,2 @@
+one
+two
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file.txt").write_text(FILE)
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    path = folder.parent / name
    path.write_text(text)
    return path


# --- how patches are applied -------------------------------------------------------------------


def test_a_patch_is_applied_and_taken_back(folder: Path) -> None:
    patches = [write(folder, "1.patch", PATCH), write(folder, "2.patch", NEW_FILE)]
    assert not patch_files.is_applied(folder, patches)
    patch_files.apply(folder, patches)
    assert patch_files.is_applied(folder, patches)
    text = (folder / "file.txt").read_text()
    assert text == FILE.replace("line 10\n", "line ten\nline ten and a half\n")
    assert (folder / "new" / "file.txt").read_text() == "one\ntwo\n"
    patch_files.apply(folder, patches, is_reverse=True)
    assert (folder / "file.txt").read_text() == FILE
    assert not (folder / "new" / "file.txt").exists()


def test_a_hunk_whose_lines_have_moved_goes_with_them(folder: Path) -> None:
    (folder / "file.txt").write_text("a\nb\nc\n" + FILE)
    patch_files.apply(folder, [write(folder, "1.patch", PATCH)])
    assert "line 9\nline ten\n" in (folder / "file.txt").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FILE.replace("line 12", "line twelve"), "line 8: its lines are not there"),  # no fuzz
        ("x\n" + FILE + FILE, "line 8: its lines stand there twice"),
        ("", "line 8: its lines are not there"),
    ],
)
def test_a_hunk_that_does_not_fit_exactly_is_refused(folder: Path, text: str, reason: str) -> None:
    (folder / "file.txt").write_text(text)
    patches = [write(folder, "1.patch", NEW_FILE), write(folder, "2.patch", PATCH)]
    with pytest.raises(patch_files.PatchError, match=f"2.patch does not fit file.txt, {reason}"):
        patch_files.apply(folder, patches)
    assert (folder / "file.txt").read_text() == text
    assert not (folder / "new").exists(), "the first patch was applied without the second"


def test_a_missing_file_and_one_too_many_are_refused(folder: Path) -> None:
    (folder / "file.txt").unlink()
    with pytest.raises(patch_files.PatchError, match=r"file\.txt is missing"):
        patch_files.apply(folder, [write(folder, "1.patch", PATCH)])
    patch = write(folder, "2.patch", NEW_FILE)
    patch_files.apply(folder, [patch])
    with pytest.raises(patch_files.PatchError, match=r"new/file\.txt is there already"):
        patch_files.apply(folder, [patch])


@pytest.mark.parametrize(
    "text",
    [
        "no patch\n",
        "--- ",
        PATCH.replace(" line 12\n", ""),
        PATCH + "trailing words\n",
        PATCH[:-9] + "x\n",
        "--- a/other.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n" + PATCH,  # was passed over
        "--- a/file.txt\n+++ b/file.txt\n@@ -20,0 +21 @@\n+anywhere\n",  # went to the first line
    ],
)
def test_a_damaged_patch_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(patch_files.PatchError, match=r"1\.patch"):
        patch_files.apply(folder, [write(folder, "1.patch", text)])
    assert (folder / "file.txt").read_text() == FILE


# --- our own patches ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that we patch, as upstream has them: our patches taken back."""
    source = pinned.source_path()
    folder = tmp_path_factory.mktemp("upstream")
    there = [group for group in (NEEDED, KERNELS) if patch_files.is_applied(source, group)]
    assert NEEDED in there
    for patch in (*NEEDED, *KERNELS):
        for change in patch_files.read_patch(patch):
            target = folder / change.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / change.path, target)
    patch_files.apply(folder, [patch for group in there for patch in group], is_reverse=True)
    return folder


def patched(upstream: Path, folder: Path, patches: list[Path]) -> dict[str, bytes]:
    shutil.copytree(upstream, folder)
    patch_files.apply(folder, patches)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def lines(text: bytes | None) -> list[str]:
    return (text or b"").decode().splitlines()


def test_the_kernels_are_independent_of_the_patches_that_are_needed(
    upstream: Path, tmp_path: Path
) -> None:
    both = patched(upstream, tmp_path / "both", [*NEEDED, *KERNELS])
    assert patched(upstream, tmp_path / "turned", [*KERNELS, *NEEDED]) == both
    needed = patched(upstream, tmp_path / "needed", NEEDED)
    kernels = patched(upstream, tmp_path / "kernels", KERNELS)
    plain = patched(upstream, tmp_path / "plain", [])
    # Either changes files that the other leaves alone, but for a condition far from any kernel.
    shared = {"ggml/src/ggml-cpu/ops.cpp": "if (i0 == n_offs && n_dims > 0) {"}
    for name, text in both.items():
        if name in shared:
            (line,) = set(lines(needed[name])) - set(lines(plain[name]))
            assert line.strip() == shared[name]
            continue
        assert text in (needed.get(name), kernels.get(name))
        assert plain.get(name) in (needed.get(name), kernels.get(name))
    assert all(
        name.startswith("ggml/src/ggml-cpu/") for name in both if needed.get(name) != both[name]
    )


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize("patches", [NEEDED, [*NEEDED, *KERNELS]], ids=["needed", "all"])
def test_other_tools_apply_them_alike_without_fuzz_or_offset(
    tool: str, patches: list[Path], upstream: Path, tmp_path: Path
) -> None:
    if not shutil.which(tool):
        assert not os.environ.get("CI"), f"{tool} is missing: make test-deps"
        pytest.skip(f"{tool} is not installed: make test-deps")
    folder = tmp_path / "tree"
    shutil.copytree(upstream, folder)
    commands = {
        "patch": ["patch", "-p1", "--batch", "--fuzz=0", "--no-backup-if-mismatch", "--input"],
        "git": ["git", "apply", "-p1", "--verbose"],
    }
    for patch in patches:
        command = [*commands[tool], str(patch)]
        env = {"GIT_CEILING_DIRECTORIES": str(tmp_path), "PATH": "/usr/bin:/bin", "LC_ALL": "C"}
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, env=env
        )
        said = (done.stdout + done.stderr).lower()
        assert "offset" not in said, said
        assert "fuzz" not in said, said
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert found == patched(upstream, tmp_path / "ours", patches)


@pytest.mark.parametrize("patch", [*NEEDED, *KERNELS], ids=lambda patch: patch.stem)
def test_every_hunk_has_five_lines_of_context(patch: Path, upstream: Path, tmp_path: Path) -> None:
    series = [*NEEDED, *KERNELS]
    patched(upstream, tmp_path / "before", series[: series.index(patch)])
    for change in patch_files.read_patch(patch):
        if change.is_new:
            continue
        n_lines = len((tmp_path / "before" / change.path).read_bytes().splitlines())
        for hunk in change.hunks:
            same_before = next(
                (i for i, (a, b) in enumerate(zip(hunk.old, hunk.new, strict=False)) if a != b),
                min(len(hunk.old), len(hunk.new)),
            )
            backwards = zip(reversed(hunk.old), reversed(hunk.new), strict=False)
            same_after = next(
                (i for i, (a, b) in enumerate(backwards) if a != b),
                min(len(hunk.old), len(hunk.new)),
            )
            last = hunk.line + len(hunk.old) - 1
            assert same_before >= min(N_CONTEXT, max(hunk.line - 1, 0)), f"line {hunk.line}"
            assert same_after >= min(N_CONTEXT, n_lines - last), f"line {hunk.line}"


def test_every_patch_has_its_section_in_the_page() -> None:
    page = (ROOT / "docs" / "internals" / "patches.md").read_text(encoding="utf-8")
    for patch in (*NEEDED, *KERNELS):
        assert f"## {patch.stem}\n" in page, f"no section {patch.stem}"
        assert patch.read_text(encoding="utf-8").partition("\n--- ")[0].strip(), "no head"


def test_a_plain_checkout_of_the_pin_is_patched_in_a_copy(
    upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(upstream, checkout)
    (checkout / "include").mkdir(exist_ok=True)
    (checkout / "include" / "llama.h").touch()
    (checkout / "CMakeLists.txt").touch()
    monkeypatch.setenv("DRAFTHOUSE_LLAMA_CPP", str(checkout))
    monkeypatch.setenv("DRAFTHOUSE_CACHE", str(tmp_path / "cache"))
    copy = pinned.source_path()
    assert patch_files.is_applied(copy, pinned.patches())
    assert not patch_files.is_applied(checkout, NEEDED)
