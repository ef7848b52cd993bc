"""A model of an architecture that is not proven is decoded in a process of its own first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from models.archs import write_model
from tests.support.built import needs_extension

import drafthouse_engine
from drafthouse_engine import EngineParams, probe_model
from drafthouse_engine.probe import _environment
from drafthouse_server.config import Config
from drafthouse_server.engine import loading
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.errors import ModelLoadError

pytestmark = needs_extension()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def deadly(folder: Path) -> Path:
    """Returns a model that ends the process when two sequences are in one batch."""
    return write_model(folder / "plamo2.gguf", "plamo2")


@pytest.fixture(scope="module")
def harmless(folder: Path) -> Path:
    return write_model(folder / "llama.gguf", "llama")


def config(path: Path, **settings: object) -> Config:
    values: dict[str, object] = {"max_model_len": 64, "parallel": 2, "threads": 1}
    return Config(model=str(path), **values | settings)  # type: ignore[arg-type]  # checked by what is called


def test_the_death_of_a_model_is_one_sentence_and_exit_code_1(deadly: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "drafthouse_server", "serve", "--model", deadly, "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 1
    assert "listening at" not in run.stdout + run.stderr
    *_, last = run.stderr.strip().splitlines()
    assert f"cannot load '{deadly}': llama.cpp ends its process by SIGABRT" in last
    assert "GGML_ASSERT(" in last
    assert last.endswith("use another model")


def test_without_the_probe_the_server_would_load_it(deadly: Path) -> None:
    LlamaEngine.load(config(deadly, probe=False)).close()
    with pytest.raises(ModelLoadError, match="ends its process"):
        LlamaEngine.load(config(deadly))


@pytest.mark.parametrize("draft_type", ["none", "ngram-simple"])
def test_what_can_be_computed_is_served(
    harmless: Path, monkeypatch: pytest.MonkeyPatch, draft_type: str
) -> None:
    told = []

    def probe(*arguments: object, **options: object) -> str:
        told.append(probe_model(*arguments, **options))  # type: ignore[arg-type]  # checked by what is called
        return told[-1]

    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    monkeypatch.setattr(drafthouse_engine, "probe_model", probe)
    LlamaEngine.load(config(harmless, draft_type=draft_type)).close()
    assert told == [""]


def test_the_folder_that_a_server_is_started_in_brings_no_code(
    harmless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` imports from it first: whoever can write there ran code as the server."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert probe_model(harmless) == ""


def test_what_is_proven_is_not_probed(harmless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise AssertionError("probed")

    monkeypatch.setattr(drafthouse_engine, "probe_model", fail)
    LlamaEngine.load(config(harmless)).close()
    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    with pytest.raises(AssertionError, match="probed"):
        LlamaEngine.load(config(harmless))


def test_the_draft_model_is_probed_too(
    harmless: Path, deadly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        LlamaEngine.load(config(harmless, model_draft=str(deadly), draft_type="simple"))
    assert str(deadly) in str(caught.value)
    eagle3 = Path(__file__).resolve().parents[2] / "models" / "tiny-mimo2-eagle3-f16.gguf"
    monkeypatch.setattr(drafthouse_engine, "probe_model", lambda *_, **__: "probed")
    loading._probe(str(eagle3), config(harmless), "all")  # it computes nothing without its target


def test_what_loading_refuses_with_a_sentence_of_its_own_the_probe_leaves_to_it(
    folder: Path,
) -> None:
    encoder = write_model(folder / "bert.gguf", "bert")
    assert probe_model(encoder) == ""
    assert probe_model(folder / "nowhere.gguf") == ""
    with pytest.raises(ModelLoadError, match="keeps no tokens in a cache"):
        LlamaEngine.load(config(encoder))


def test_cogvlm_is_refused_with_what_is_true(folder: Path) -> None:
    """A prompt gets the logits of its first token, as those of other tokens do not change them."""
    model = write_model(folder / "cogvlm.gguf", "cogvlm")
    with pytest.raises(ModelLoadError, match="logits of a batch's first tokens"):
        LlamaEngine.load(config(model))


def test_a_decode_that_fails_is_told(deadly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "its decode fails (DECODE_FAILED)"
    monkeypatch.setattr(drafthouse_engine, "probe_model", lambda *_, **__: problem)
    with pytest.raises(ModelLoadError, match=r"its decode fails \(DECODE_FAILED\); use another"):
        LlamaEngine.load(config(deadly))


def test_the_process_gets_none_of_our_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHOUSE_API_KEYS", "acme:canary")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = _environment()
    assert not [name for name in environment if name.startswith("DRAFTHOUSE_")]
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_process_ends_when_whoever_started_it_is_gone() -> None:
    """Else a server that is killed while it starts would leave one behind that loads weights."""
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "watches\n"
        process.stdin.close()
        assert process.wait(30) == 1


WAITS = """
import threading, time
from drafthouse_engine.probe_worker import watch_input
watch_input()
print("watches", flush=True)
time.sleep(60)
"""


def test_params_of_the_engine_reach_the_process(harmless: Path) -> None:
    assert probe_model(harmless, EngineParams(kv_unified=True, flash_attention=False)) == ""
