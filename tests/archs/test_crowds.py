"""Crowds of prompts that begin alike, on models of every architecture that we write ourselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.arch_parts import N_VOCAB
from models.archs import RECIPES, write_model
from tests.support.built import needs_extension
from tests.support.demo import exact_engine
from tests.support.exact_crowd import N_BATCH, N_SLOTS, check_crowd

from drafthouse_engine import DraftType, EngineError
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE

pytestmark = [*needs_extension(), pytest.mark.timeout(300)]

FEW = ("deepseek2", "jamba", "plamo2", "gemma4", "qwen35moe-mtp")
"""One of latent attention, two of states, one of windows, and one of heads that draft: the others
are tried by `make whole`."""

NOT_GENERATING = ("bert", "nomic-bert", "jina-bert-v2", "modern-bert", "neo-bert", "eurobert")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tries all architectures where the proof asks for them."""
    others = (*NOT_GENERATING, "gemma-embedding", "cogvlm")
    every = [name for name in RECIPES if name not in others]
    names = every if metafunc.config.getoption("--whole") else FEW
    metafunc.parametrize("engine", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaEngine]:
    name: str = request.param
    path = write_model(tmp_path_factory.mktemp("models") / f"{name}.gguf", name)
    made = drafting(path, "mtp" if name.endswith("-mtp") else "ngram-simple")
    yield made
    made.close()


def drafting(path: Path, draft_type: DraftType) -> LlamaEngine:
    sizes = {"n_seq_max": N_SLOTS, "n_ctx_seq": 240, "n_batch": N_BATCH, "n_ubatch": N_BATCH}
    try:
        return exact_engine("dense", draft_type, path, **sizes)
    except EngineError:
        return exact_engine("dense", "ngram-simple", path, **sizes)


@pytest.mark.parametrize("seed", [1])
def test_everybody_gets_the_tokens_of_alone(
    engine: LlamaEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_N_LED_MIN", BLOCK_SIZE)
    chance = random.Random(seed)
    check_crowd(engine, seed, [chance.choices(range(3, N_VOCAB), k=150) for _ in range(3)])
