"""`make archs` itself: what is wrong ends it with 1, and no result outlives what it was found with.

Our process is a fake.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.archs import embed, run
from tests.archs.cells import CELLS, DRAFTS
from tests.archs.judge import Verdict
from tests.archs.peer import PeerFailed
from tests.archs.results import Stamp, digest_of, load, save
from tests.archs.table import Row, is_wrong, page, proven, summary
from tests.support.built import needs_extension

pytestmark = needs_extension()

NOW = Stamp("b1", "engine", "processor")


def row(*, simple: Verdict | None = None, **cells: Verdict) -> Row:
    """Returns a row in which all is equal, but for some cells without drafts, or all of simple."""
    plain = {name: Verdict("equal", n=8, n_reused=100) for name in CELLS}
    found = {draft_type: dict(plain) for draft_type in DRAFTS}
    found["none"] |= cells
    if simple:
        found["simple"] = dict.fromkeys(CELLS, simple)
    return Row("llama", "", 8, 1.0, found)


# --- what is wrong


def test_a_model_that_may_not_draft_for_itself_is_proven() -> None:
    rows = {"llama": row(simple=Verdict("refused", reason="it cannot"))}
    assert not is_wrong(rows["llama"])
    assert proven(rows) == ["llama"]


def test_a_model_that_ends_our_process_is_wrong_and_never_proven() -> None:
    rows = {"llama": row(simple=Verdict("died", reason="the process ends with -6"))}
    assert is_wrong(rows["llama"])
    assert proven(rows) == []
    text = page(rows, "")
    assert "`††††††††`" in text
    assert "| llama | simple | the process ends with -6 |" in text


@pytest.mark.parametrize("cell", ["slots", "host"])
def test_a_cell_that_has_reused_nothing_is_wrong(cell: str) -> None:
    idle = row(**{cell: Verdict("equal", n=8)})
    assert is_wrong(idle)
    assert f"nothing reused: {cell}" in summary(idle)
    assert f"(none: {cell})" in page({"llama": idle}, "")
    assert not is_wrong(row(**{cell: Verdict("refused", reason="it cannot")}))
    assert not is_wrong(row(cut=Verdict("equal", n=5)))  # what is recurrent cannot be cut


# --- our process


def fake_processes(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    fatal: set[tuple[str, ...]],
    *,
    absent: str = "",
) -> None:
    """Gives no answers in processes for some draft types, in the others an empty one."""

    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        drafts = tuple(command[command.index("--drafts") + 1 :])
        if drafts in fatal:
            error = "some line\n/a/ggml.c:1: GGML_ASSERT(x) failed\nanother\n"
            return subprocess.CompletedProcess(command, -6, "", error)
        found: Any = {kind: {name: [] for name in CELLS} for kind in drafts if kind != absent}
        (folder / "result.json").write_text(json.dumps(found), "utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(run, "FOLDER", folder)
    monkeypatch.setattr(subprocess, "run", start)


def test_the_draft_type_that_ends_our_process_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_processes(monkeypatch, tmp_path, {DRAFTS, ("simple",)})
    found = run.ask_engine(tmp_path / "model.gguf", DRAFTS)
    died = run.Died("the process ends with -6: GGML_ASSERT(x) failed")
    assert found["simple"] == dict.fromkeys(CELLS, died)
    assert found["none"] == {name: [] for name in CELLS}


def test_an_end_that_only_all_draft_types_together_bring_about_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_processes(monkeypatch, tmp_path, {DRAFTS})
    found = run.ask_engine(tmp_path / "model.gguf", DRAFTS)
    assert set(found) == set(DRAFTS)
    assert all(isinstance(cell, run.Died) for cells in found.values() for cell in cells.values())


def test_a_draft_type_that_there_is_none_of_is_left_out_alone_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drafts = ("none", "eagle3", "simple")
    fake_processes(monkeypatch, tmp_path, {drafts, ("simple",)}, absent="eagle3")
    assert set(run.ask_engine(tmp_path / "model.gguf", drafts)) == {"none", "simple"}


def test_embeddings_that_end_our_process_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -6, "", "GGML_ASSERT(y) failed\n")

    monkeypatch.setattr(subprocess, "run", start)
    found, _ = run.embeddings_of(tmp_path / "model.gguf")
    died = Verdict("died", reason="the process ends with -6: GGML_ASSERT(y) failed")
    assert found == {pooling: dict.fromkeys(embed.CELLS, died) for pooling in embed.POOLINGS}


def test_embeddings_that_are_refused_and_those_without_an_answer_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [[1.0, 2.0]]
    content = {"mean": "it cannot", "cls": dict.fromkeys((*embed.CELLS, embed.CHANGED), rows)}

    def start(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "rows.json").write_text(json.dumps(content), "utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    def fail(*_: object) -> NoReturn:
        raise PeerFailed("it does not start")

    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(run, "Peer", fail)
    found, moved = run.embeddings_of(tmp_path / "model.gguf")
    assert found["mean"] == dict.fromkeys(embed.CELLS, Verdict("refused", reason="it cannot"))
    unknown = Verdict("unknown", reason="it does not start")
    assert found["cls"] == dict.fromkeys(embed.CELLS, unknown)
    assert moved == 0


# --- what was found before


def test_what_was_found_is_known_as_long_as_nothing_has_changed(tmp_path: Path) -> None:
    model, path = tmp_path / "llama.gguf", tmp_path / "results.json"
    assert load(path, tmp_path, NOW) == {}
    model.write_bytes(b"weights")
    embeddings = {"mean": {"alone": Verdict("tie", 0.1, 1, 8, is_peer_same=True)}}
    rows = {"llama": dataclasses.replace(row(), digest=digest_of(model), embeddings=embeddings)}
    save(path, rows, NOW)
    assert load(path, tmp_path, NOW) == rows
    for field in dataclasses.fields(Stamp):
        another: dict[str, Any] = {field.name: "another"}
        assert load(path, tmp_path, dataclasses.replace(NOW, **another)) == {}
    model.write_bytes(b"others")
    assert load(path, tmp_path, NOW) == {}
    model.unlink()
    assert load(path, tmp_path, NOW) == {}


def test_what_has_no_stamp_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"llama": dataclasses.asdict(row())}), "utf-8")
    assert load(path, tmp_path, NOW) == {}


def test_models_of_another_llama_cpp_are_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, source = tmp_path / "models-1", tmp_path / "recipes.py"
    source.write_text("recipes", "utf-8")
    n_written = 0

    def start(_: object, **__: object) -> None:
        nonlocal n_written
        n_written += 1

    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "SOURCES", (source,))
    monkeypatch.setattr(run, "RECIPES", {})
    monkeypatch.setattr(run, "TARGETS", {})
    monkeypatch.setattr(subprocess, "run", start)
    for _ in range(2):
        run.write_models(folder, 1)
    assert n_written == 1
    (folder / "old.gguf").touch()
    monkeypatch.setattr("scripts.peers.version", lambda: "b99999")
    run.write_models(folder, 1)
    assert n_written == 2
    assert not (folder / "old.gguf").exists()
    source.write_text("other recipes", "utf-8")
    run.write_models(folder, 1)
    assert n_written == 3


def test_no_page_is_written_while_a_model_has_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would say of all the others that they are not proven."""
    (tmp_path / "models-1").mkdir()
    for name in ("llama", "gpt2"):
        (tmp_path / "models-1" / f"{name}.gguf").touch()
    written: list[set[str]] = []
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr("scripts.peers.make_peer", lambda: "there")
    monkeypatch.setattr("scripts.peers.make_program", lambda _: tmp_path)
    monkeypatch.setattr(run, "write_models", lambda *_: None)
    monkeypatch.setattr(run, "stamp", lambda: NOW)
    monkeypatch.setattr(
        run, "run_model", lambda path: dataclasses.replace(row(), digest=digest_of(path))
    )
    monkeypatch.setattr(run, "write", lambda rows, _: written.append(set(rows)))
    monkeypatch.setattr("sys.argv", ["run", "--only", "llama", "--write"])
    assert run.main() == 1
    assert not written
    assert "nothing is known yet of gpt2" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["run", "--write"])
    assert run.main() == 0
    assert written == [{"llama", "gpt2"}]
