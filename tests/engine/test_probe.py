"""A model of an architecture that is not proven is decoded in a process of its own first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.archs import write_model
from tests.support.built import needs_extension
from tests.support.gguf_copy import Tensor, copied

import drafthouse_engine
from drafthouse_engine import DraftType, EngineParams, probe, probe_model, probe_worker
from drafthouse_engine.probe import _environment
from drafthouse_server.config import Config
from drafthouse_server.engine import loading
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.errors import ModelLoadError, StartupError

pytestmark = needs_extension()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def deadly(folder: Path) -> Path:
    """Returns a model that ends the process when it is computed; no loader refuses it."""
    sound = write_model(folder / "plamo2.gguf", "plamo2")
    return copied(sound, folder / "deadly.gguf", change=with_half_factors)


def with_half_factors(name: str, tensor: Tensor) -> Tensor:
    """Turns factors into a type that no graph on a CPU multiplies by."""
    if not name.endswith("post_attention_norm"):
        return tensor
    return tensor[0].astype(np.float16), GGMLQuantizationType.F16


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
        timeout=110,
    )
    assert run.returncode == 1
    assert "listening at" not in run.stdout + run.stderr
    *_, last = run.stderr.strip().splitlines()
    assert f"cannot load '{deadly}': llama.cpp ends its process by SIGABRT" in last
    assert "unsupported types" in last
    assert last.endswith("use another model")


def test_it_is_the_probe_that_refuses_it(deadly: Path) -> None:
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
    eagle3_config = config(harmless, model_draft=str(eagle3), draft_type="eagle3")
    loading._probe(eagle3_config)  # it computes nothing without its target


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


KILLED = """
import os, sys
sys.stdin.readline()
print('{"share": 0.0}', flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_the_system_ends_is_not_the_models_fault(
    harmless: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With rpc it holds all of the model, on a machine that the server needs a part of."""
    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    monkeypatch.setattr(probe, "_WORKER", ("-c", KILLED))
    with pytest.raises(drafthouse_engine.OutOfMemory, match="ended by SIGKILL"):
        probe_model(harmless)
    LlamaEngine.load(config(harmless)).close()
    (line,) = (it.message for it in caplog.records if "SIGKILL" in it.message)
    assert f"where memory is short, so {harmless} is served without having been" in line


@pytest.mark.parametrize(
    ("settings", "margin_bytes"),
    [
        ({}, 1 << 30),
        ({"gpu_layers": 3}, None),
        ({"gpu_layers": "all"}, None),
        ({"cpu_moe": True}, None),
        ({"fit": False}, None),
    ],
)
def test_as_many_layers_lie_on_devices_as_of_the_server(
    harmless: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    margin_bytes: int | None,
) -> None:
    """A model larger than the device was not decoded at all: all of it was to lie there."""
    told: list[object] = []

    def note(*_: object, **how: object) -> str:
        told.append(how["margin_bytes"])
        return ""

    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    monkeypatch.setattr(drafthouse_engine, "probe_model", note)
    loading._probe(config(harmless, **settings))
    assert told == [margin_bytes]


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
        assert process.wait(100) == 1


WAITS = """
import threading, time
from drafthouse_engine.probe_worker import watch_input
watch_input()
print("watches", flush=True)
time.sleep(60)
"""


def test_params_of_the_engine_reach_the_process(harmless: Path) -> None:
    assert probe_model(harmless, EngineParams(kv_unified=True, flash_attention=False)) == ""


def test_it_is_decoded_as_it_will_be_with_its_drafter(
    harmless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices, types of cells, windows, RoPE and the draft model are those of the server."""
    spy = "import sys; open(sys.argv[1], 'w').write(sys.stdin.readline()); print(sys.argv[2])"
    setup_path = harmless.parent / "setup.json"
    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_WORKER", ("-c", spy, str(setup_path), '{"problem": ""}'))
        loading._probe(
            config(
                harmless,
                draft_type="simple",
                model_draft=str(harmless),
                device=("none",),
                cache_type_k="q8_0",
                cache_type_v_draft="bf16",
                swa_full=False,
                rope_scale=2.0,
                load_mode="none",
                gpu_layers_draft=3,
            )
        )
    setup = json.loads(setup_path.read_text("utf-8"))
    assert setup["params"]["draft_type"] == "simple"
    assert setup["params"]["cache"]["type_k"] == "q8_0"
    assert setup["params"]["cache"]["type_v_draft"] == "bf16"
    assert not setup["params"]["cache"]["swa_full"]
    assert setup["params"]["rope"]["freq_scale"] == 0.5
    assert setup["target"]["path"] == setup["draft"]["path"] == str(harmless)
    assert setup["target"]["placement"]["devices"] == []
    assert setup["target"]["placement"]["load_mode"] == "none"
    assert setup["draft"]["n_gpu_layers"] == 3
    # And the process does what it is told.
    seen = probe_worker._params(setup)
    assert (seen.draft_type, seen.cache.type_k, seen.rope.freq_scale) == ("simple", "q8_0", 0.5)
    assert probe_worker._probe(setup) == ""


@pytest.mark.parametrize(
    ("name", "draft_type", "drafter"),
    [
        ("tiny-mimo2-f16", "mtp", "mtp"),
        ("tiny-mimo2-f16", "eagle3", "eagle3"),
        ("tiny-mimo2-f16", "ngram-mod", "ngram-simple"),
        ("tiny-draft-f16", "mtp", "ngram-simple"),  # it has no heads
    ],
)
def test_its_drafter_drafts_or_else_drafts_are_given(
    name: str, draft_type: DraftType, drafter: str
) -> None:
    folder = Path(__file__).resolve().parents[2] / "models"
    params = EngineParams(draft_type=draft_type, n_seq_max=3, n_ctx_seq=64, n_batch=64, n_ubatch=64)
    with (
        drafthouse_engine.Model(folder / f"{name}.gguf") as model,
        drafthouse_engine.Model(folder / "tiny-mimo2-eagle3-f16.gguf") as eagle3,
    ):
        draft = eagle3 if draft_type == "eagle3" else None
        engine, is_given = probe_worker._engine(model, draft, params)
        with engine:
            assert engine.params.draft_type == drafter
            assert is_given == (drafter == "ngram-simple")
            assert probe_worker._decode(engine, model, n_draft=2, is_given=is_given) == ""
            assert engine.draft_work.n_drafts > 0 or is_given


SAYS = """
import sys, time
setup = sys.stdin.readline()
for line in {lines!r}:
    print(line, flush=True)
    time.sleep({pause_s})
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("lines", "pause_s", "patience_s", "problem"),
    [
        ((), 0.0, 0.5, "did not get on with loading it for 0.5 s"),
        (('{"share": 0.1}',) * 8, 0.3, 2.0, "did not get on with loading it for 2 s"),
        (('{"loaded_s": 0.0}',), 0.0, 2.0, "came to no end within 2 s"),
        (('{"loaded_s": 0.3}',), 0.0, 2.0, "came to no end within 3 s"),
    ],
    ids=["silent", "slow, then silent", "loaded", "loaded slowly"],
)
def test_a_model_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    *,
    lines: tuple[str, ...],
    pause_s: float,
    patience_s: float,
    problem: str,
) -> None:
    """Else the server never listens, nor says why."""
    begins = time.monotonic()
    monkeypatch.setattr(probe, "_WORKER", ("-c", SAYS.format(lines=lines, pause_s=pause_s)))
    told = probe_model("any.gguf", patience_s=patience_s)
    assert told == f"its first decode, in a process of its own, {problem} (probe false: do without)"
    assert time.monotonic() - begins >= len(lines) * pause_s  # whoever gets on is waited for


def test_a_model_that_is_still_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 700 GB is mapped in ten minutes and more, in which llama.cpp tells nothing."""
    reads = iter(((5, 1), (9, 1), (9, 2), (9, 2)))
    monkeypatch.setattr(probe, "_read_by", lambda _: next(reads))
    monkeypatch.setattr(probe, "_WORKER", ("-c", SAYS.format(lines=(), pause_s=0.0)))
    assert "did not get on" in probe_model("any.gguf", patience_s=0.2)
    assert not list(reads)


def test_what_a_process_reads_is_zero_where_nobody_knows() -> None:
    n_bytes, n_pages = probe._read_by(os.getpid())
    assert n_bytes >= 0
    assert n_pages > 0
    assert probe._read_by(-1) == (0, 0)


def test_a_process_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk that hangs: the server waited with it, and never said why."""
    waits: dict[subprocess.Popen[bytes], float | None] = {}
    wait = subprocess.Popen.wait

    def never(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits[process] = timeout
        raise subprocess.TimeoutExpired("any", 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", never)
        patch.setattr(probe, "_WORKER", ("-c", SAYS.format(lines=(), pause_s=0.0)))
        told = probe_model("any.gguf", patience_s=0.2)
    assert "did not get on with loading it for 0.2 s (probe" in told
    [(process, timeout)] = waits.items()
    assert timeout is not None
    assert wait(process) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "raise ImportError('numpy is gone')",
            "exit code 1 before .* (ImportError: numpy is gone)",
        ),
        ("import os; os.close(0); os.kill(os.getpid(), 9)", "by SIGKILL before .* at the model;"),
    ],
    ids=["no package", "killed"],
)
def test_a_process_that_cannot_be_started_is_not_the_models_fault(
    harmless: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    monkeypatch.setattr(drafthouse_engine, "PROVEN", frozenset())
    monkeypatch.setattr(probe, "_WORKER", ("-c", code))
    pattern = problem.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(StartupError, match=rf"cannot be started: .*{pattern}") as caught:
        LlamaEngine.load(config(harmless))
    assert not isinstance(caught.value, ModelLoadError)


def test_a_process_that_closes_its_output_and_stays_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stays = "import os, time; os.close(1); os.close(2); time.sleep(60)"
    monkeypatch.setattr(probe, "_WORKER", ("-c", stays))
    told = probe_model("any.gguf", patience_s=0.5)
    assert "process of its own, did not get on with loading it for 0.5 s (probe" in told


def test_a_process_that_complains_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ERROR_BYTES_MAX", 100)
    complains = "import os\nwhile True: os.write(2, b'tile %d\\n' * 100)"
    monkeypatch.setattr(probe, "_WORKER", ("-c", complains))
    said: list[bytearray] = []
    make = probe._Talk.__init__

    def note(talk: probe._Talk, *arguments: Any) -> None:
        make(talk, *arguments)
        said.append(talk._error)

    monkeypatch.setattr(probe._Talk, "__init__", note)
    told = probe_model("any.gguf", patience_s=0.3)
    assert "did not get on with loading it for 0.3 s (probe" in told
    assert len(said[0]) <= 100


def test_what_a_driver_prints_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    says = (
        "import os; from drafthouse_engine import probe_worker as it;"
        "it._probe = lambda _: os.write(1, b'WARNING: not a conformant driver') and 'is told';"
        "it.main()"
    )
    monkeypatch.setattr(probe, "_WORKER", ("-c", says))
    assert probe_model("any.gguf") == "is told"
