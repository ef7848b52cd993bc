"""On a GPU: models lie there, and write there what the CPU writes, but for ties of logits.

`scripts/gpu_tables.sh tests` runs these beside the tests of `make test-device`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, Referee
from tests.support.gpu import gpu_or_skip, why_none
from tests.support.hand import TEXTS, fused

from drafthouse_engine import Device, DraftType, Engine, EngineParams, Model, Placement

pytestmark = pytest.mark.model

CPU = Placement(devices=())
N_TOKENS = 48


@pytest.fixture(scope="module")
def gpu() -> Device:
    return gpu_or_skip()


@pytest.fixture(params=sorted(TARGETS))
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def generated(
    target: str, kind: DraftType, places: tuple[Placement | None, Placement | None]
) -> list[list[int]]:
    """Returns what a target writes after the demo texts, its drafter placed as the second says."""
    drafts = {"eagle3": EAGLE3[target], "simple": SIMPLE}
    params = EngineParams(draft_type=kind, n_seq_max=3, n_ctx_seq=256, n_batch=128, n_ubatch=64)
    with Model(MODELS / TARGETS[target], placement=places[0]) as model:
        draft = Model(MODELS / drafts[kind], placement=places[1]) if kind in drafts else None
        with Engine(model, draft, params) as engine:
            found = fused(engine, [model.tokenize(text).tolist() for text in TEXTS], N_TOKENS)
        if draft is not None:
            draft.close()
    return found


@pytest.fixture(scope="module")
def written() -> Iterator[dict[str, tuple[list[list[int]], Referee]]]:
    """What the CPU writes without drafts, and who decides where another may differ."""
    found = {
        name: (generated(name, "none", (CPU, None)), Referee(name)) for name in sorted(TARGETS)
    }
    yield found
    for _, referee in found.values():
        referee.close()


@pytest.mark.gpu
def test_a_model_lies_on_the_gpu_unless_it_is_told_otherwise(gpu: Device, target: str) -> None:
    path = MODELS / TARGETS[target]
    with (
        Model(path) as whole,
        Model(path, n_gpu_layers=2) as part,
        Model(path, placement=CPU) as no,
    ):
        assert gpu.name in whole.setting("device").split(",")
        assert gpu.name in whole.setting("buffers")
        assert part.setting("gpu_layers") == "2"
        assert no.setting("device") == ""
        assert gpu.name not in no.setting("buffers")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("none", None), ("mtp", None)]
    + [(kind, place) for kind in ("eagle3", "simple") for place in (None, CPU)],
    ids=["none", "mtp", "eagle3", "eagle3 on the CPU", "simple", "simple on the CPU"],
)
def test_the_gpu_writes_what_the_cpu_writes(
    gpu: Device,
    target: str,
    kind: DraftType,
    drafter: Placement | None,
    written: dict[str, tuple[list[list[int]], Referee]],
) -> None:
    expected, referee = written[target]
    found = generated(target, kind, (Placement(devices=(gpu.name,)), drafter))
    with Model(MODELS / TARGETS[target], vocab_only=True) as vocabulary:
        prompts = [vocabulary.tokenize(text).tolist() for text in TEXTS]
    for i, prompt in enumerate(prompts):
        referee.compare(prompt, expected[i], found[i], i)


@pytest.mark.parametrize(
    ("backends", "kinds", "words"),
    [
        ("RPC OPENMP", ["cpu"], "built without a GPU's backend (RPC OPENMP)"),
        ("CUDA RPC", ["cpu"], "built for CUDA, which finds no GPU or no driver"),
        ("CUDA", ["cpu", "gpu"], ""),
        ("VULKAN", ["igpu", "cpu"], ""),
    ],
)
def test_a_skipped_test_says_what_is_missing(backends: str, kinds: list[str], words: str) -> None:
    found = why_none(backends, kinds)
    assert words in found
    assert bool(words) == bool(found)
