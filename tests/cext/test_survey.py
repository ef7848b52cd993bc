"""What memory an engine would take, asked before it is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.built import needs_extension

import drafthouse_engine
from drafthouse_engine import (
    Closed,
    Device,
    EngineParams,
    Fit,
    InvalidArgument,
    Model,
    ModelNotFound,
    NoMtpHeads,
    Survey,
    build_facts,
    list_devices,
)

pytestmark = needs_extension()

MODELS = Path(__file__).resolve().parents[2] / "models"
DENSE = MODELS / "tiny-mimo2-f16.gguf"
HYBRID = MODELS / "tiny-qwen35-f16.gguf"
EAGLE3 = MODELS / "tiny-mimo2-eagle3-f16.gguf"
SIMPLE = MODELS / "tiny-draft-f16.gguf"


def params(draft_type: str = "none", n_seq_max: int = 2, n_ctx_seq: int = 512) -> EngineParams:
    return EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # one of the known
        n_ctx_seq=n_ctx_seq,
        n_seq_max=n_seq_max,
        n_batch=64,
        n_ubatch=64,
    )


@pytest.mark.parametrize("path", [DENSE, HYBRID], ids=lambda path: path.stem)
def test_it_tells_what_the_model_tells(path: Path) -> None:
    with Survey(path) as survey, Model(path) as model:
        assert (survey.arch, survey.description) == (model.arch, model.description)
        assert (survey.n_params, survey.size_bytes) == (model.n_params, model.size_bytes)
        assert (survey.n_ctx_train, survey.n_vocab) == (model.n_ctx_train, model.n_vocab)
        assert survey.is_recurrent == (model.is_recurrent or model.is_hybrid)
        assert (survey.path, survey.draft_path, survey.draft_arch) == (str(path), "", "")
        (host,) = survey.measure(params())
        # Of a hybrid some small tensors are padded.
        assert model.size_bytes <= host.weights_bytes < 1.1 * model.size_bytes + 4096
        assert host.mapped_bytes == host.weights_bytes
        assert host.device == ""


@pytest.mark.parametrize("path", [DENSE, HYBRID], ids=lambda path: path.stem)
def test_cells_grow_with_slots_and_lengths(path: Path) -> None:
    with Survey(path) as survey:
        (one,) = survey.measure(params(n_seq_max=1))
        (two,) = survey.measure(params(n_seq_max=2))
        (long,) = survey.measure(params(n_seq_max=1, n_ctx_seq=1024))
        assert two.cells_bytes == 2 * one.cells_bytes
        assert one.cells_bytes < long.cells_bytes <= two.cells_bytes
        assert one.weights_bytes == two.weights_bytes
        assert one.total_bytes < two.total_bytes
        assert one.draft_cells_bytes == one.draft_compute_bytes == 0


@pytest.mark.parametrize(
    ("draft_type", "draft", "arch"),
    [("mtp", None, ""), ("eagle3", EAGLE3, "eagle3"), ("simple", SIMPLE, None)],
)
def test_a_drafter_is_counted(draft_type: str, draft: Path | None, arch: str | None) -> None:
    with Survey(DENSE, draft) as survey, Survey(DENSE) as alone:
        (host,) = survey.measure(params(draft_type))
        (without,) = alone.measure(params())
        assert host.draft_cells_bytes > 0
        assert host.draft_compute_bytes > 0
        assert (host.weights_bytes > without.weights_bytes) == (draft is not None)
        assert arch is None or survey.draft_arch == arch


def test_logits_of_many_slots_are_counted() -> None:
    with Survey(DENSE) as survey:
        (few,) = survey.measure(params(n_seq_max=1))
        (many,) = survey.measure(params(n_seq_max=33))
        assert many.compute_bytes - few.compute_bytes >= 32 * 4 * survey.n_vocab


_ENGINE = """
import sys
from drafthouse_engine import Engine, EngineParams, Model

def taken():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

model = Model(sys.argv[1])
params = EngineParams(
    draft_type=sys.argv[2], n_ctx_seq=1024, n_seq_max=4, n_batch=4096, n_ubatch=4096
)
before = taken()
engine = Engine(model, None, params)
print(taken() - before)
"""


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
@pytest.mark.parametrize("path", [DENSE, HYBRID], ids=lambda path: path.stem)
def test_an_engine_takes_no_more_than_was_told(path: Path, draft_type: str) -> None:
    """Of a hybrid each token of a physical batch has nodes of a graph: 40 in 430 bytes each."""
    told = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(path), draft_type],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    asked = replace(params(draft_type, 4, 1024), n_batch=4096, n_ubatch=4096)
    with Survey(path) as survey:
        (host,) = survey.measure(asked)
    assert int(told) <= host.total_bytes - host.mapped_bytes


def test_what_no_engine_can_be_made_of_is_refused() -> None:
    with Survey(SIMPLE) as survey, pytest.raises(NoMtpHeads):
        survey.measure(params("mtp"))
    with Survey(DENSE) as survey, pytest.raises(InvalidArgument):
        survey.measure(params("simple"))
    with pytest.raises(ModelNotFound):
        Survey(MODELS / "none.gguf")
    with pytest.raises(ModelNotFound):
        Survey(DENSE, MODELS / "none.gguf")
    survey = Survey(DENSE)
    survey.close()
    survey.close()
    with pytest.raises(Closed):
        survey.measure(params())


@pytest.mark.parametrize(
    ("draft_type", "draft"), [("none", None), ("mtp", None), ("simple", SIMPLE)]
)
def test_what_fits_on_the_devices_is_llama_cpp_s_own_search(
    draft_type: str, draft: Path | None
) -> None:
    if len(list_devices()) > 1:
        pytest.skip("a build with devices; this is about those without")
    with Survey(DENSE, draft) as survey:
        asked = params(draft_type, n_ctx_seq=4096, n_seq_max=8)
        assert survey.fit(asked, margin_bytes=0) == Fit(-1, 8 * 4096)
        # Without a device it looks at the host's memory: a margin of nearly all leaves too little.
        (cpu,) = list_devices()
        (whole,) = survey.measure(asked)
        margin = cpu.total_bytes - whole.total_bytes // 2
        smaller = survey.fit(asked, margin_bytes=margin)
        assert smaller is not None
        assert 8 * 1024 <= smaller.n_ctx < 8 * 4096
        assert survey.fit(asked, is_ctx_fixed=True, margin_bytes=margin) is None
        assert survey.fit(asked, margin_bytes=cpu.total_bytes) is None


def test_a_model_is_loaded_where_the_survey_says() -> None:
    with Survey(DENSE) as survey:
        with pytest.raises(InvalidArgument, match="has found no fit"):
            Model(DENSE, placed_by=survey)
        assert survey.fit(params(), margin_bytes=0) is not None
        with Model(DENSE, placed_by=survey) as model:
            found = drafthouse_engine.generate(model, "def add(", n_tokens=2, n_threads=1)
            assert len(found.tokens) == 2


def test_a_closed_survey_places_nothing() -> None:
    """The model was loaded as if there were none."""
    survey = Survey(DENSE)
    survey.close()
    with pytest.raises(Closed):
        Model(DENSE, placed_by=survey)


def test_the_machine_and_the_build_are_told() -> None:
    facts = build_facts()
    assert set(facts) == {
        "llama_cpp", "compiler", "target", "cpu", "kernels", "patches", "backends", "build_type",
    }  # fmt: skip
    assert facts["patches"].split()[0] == "0001"
    cpu = next(device for device in list_devices() if device.kind == "cpu")
    assert isinstance(cpu, Device)
    assert cpu.name == "CPU"
    assert cpu.total_bytes > 0
