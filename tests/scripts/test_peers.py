"""The peer's source: stock, but for what it cannot run without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cext"))

from scripts import peers  # noqa: E402

import fetch_llama_cpp as pinned  # noqa: E402
import patch_files  # noqa: E402

STOCK = "".join(f"line {i}\n" for i in range(1, 31))
OURS = """\
--- a/file.txt
+++ b/file.txt
@@ -{before},3 +{before},3 @@
 line {before}
-line {line}
+our line {line}
 line {after}
"""


def change(folder: Path, name: str, line: int) -> Path:
    """Writes a patch that changes a line."""
    path = folder / name
    path.write_text(OURS.format(before=line - 1, line=line, after=line + 1))
    return path


def test_the_peer_has_no_patch_of_ours_but_those_it_cannot_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file.txt").write_text(STOCK)
    (kept,) = peers.KEPT
    patches = [
        change(tmp_path, "0001-ours.patch", 5),
        change(tmp_path, kept, 12),
        change(tmp_path, "0099-ours.patch", 20),
    ]
    patch_files.apply(source, patches)
    monkeypatch.setattr(peers, "SOURCE", tmp_path / "peer")
    peers.make_stock(source, patches)
    peer = (tmp_path / "peer" / "file.txt").read_text()
    assert peer == STOCK.replace("line 12\n", "our line 12\n")
    assert (source / "file.txt").read_text().count("our line") == 3


def test_the_patches_that_are_kept_are_there() -> None:
    assert set(peers.KEPT) <= {patch.name for patch in pinned.needed_patches()}
