"""Models whose output is no number: a request that meets it fails, alone, and no NaN is told."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.archs import write_model
from tests.support.built import needs_extension
from tests.support.gguf_copy import Tensor, copied
from tests.support.hand import DENSE, GREEDY, HYBRID, MODELS, params, plan
from tests.support.snapshots import sealed

from drafthouse_engine import (
    DraftType,
    Engine,
    Model,
    Sampler,
    SamplingFailed,
    SamplingParams,
    SnapshotError,
    SnapshotKind,
    Status,
    StepResult,
    build_facts,
)

pytestmark = needs_extension()

BAD = 77
"""The token whose weights are no numbers."""


def spoiled(path: Path, tensor: str, value: float) -> Path:
    """Writes a model in which one token's row of a table is no number."""

    def change(name: str, given: Tensor) -> Tensor:
        if name != tensor:
            return given
        rows = np.array(given[0], np.float32)
        rows[BAD] = value
        return rows, given[1]

    return copied(write_model(path.with_suffix(".whole"), "llama"), path, change=change)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=[math.nan, math.inf], ids=["nan", "inf"])
def speechless(request: pytest.FixtureRequest, folder: Path) -> Model:
    """Returns a model one of whose logits is never a number."""
    return Model(spoiled(folder / f"output-{request.param}.gguf", "output.weight", request.param))


@pytest.fixture(scope="module")
def allergic(folder: Path) -> Model:
    """Returns a model that breaks down at one token."""
    return Model(spoiled(folder / "embd.gguf", "token_embd.weight", math.nan))


SAMPLERS = {
    "greedy": GREEDY,
    "greedy with logprobs": SamplingParams(temperature=0.0, logprobs=True, n_top_logprobs=5),
    "few": SamplingParams(top_k=4, logprobs=True),
    "all": SamplingParams(top_k=0, top_p=1.0, min_p=0.0, seed=1, n_top_logprobs=32),
    "typical": SamplingParams(top_k=0, typical_p=0.5, seed=1),
    "sigma": SamplingParams(top_k=0, top_n_sigma=1.0, seed=1),
    "xtc": SamplingParams(top_k=0, xtc_probability=1.0, xtc_threshold=0.05, seed=1),
    "dry": SamplingParams(dry_multiplier=0.8, seed=1),
    "penalties": SamplingParams(penalty_repeat=1.3, penalty_frequency=-1.0, seed=1),
    "dynamic": SamplingParams(dynatemp_range=0.5, seed=1),
    "mirostat 1": SamplingParams(mirostat=1, seed=1),
    "mirostat 2": SamplingParams(mirostat=2, seed=1),
    "adaptive": SamplingParams(adaptive_target=0.5, seed=1),
    "biased": SamplingParams(logit_bias=((BAD, -math.inf), (80, 5.0)), seed=1),
    "grammar": SamplingParams(grammar="root ::= [a-z]+", seed=1),
    "greedy with a grammar": SamplingParams(temperature=0.0, grammar="root ::= [a-z]+"),
    "infill": SamplingParams(samplers=("top_k", "infill"), top_k=20, seed=1),
}


def status(result: StepResult, i: int = 0) -> Status:
    return Status(int(result.entries[i]["status"]))


def prompt(n: int, start: int = 33) -> list[int]:
    """Returns a prompt without the bad token."""
    tokens = [start + 5 * i % 90 for i in range(n)]
    return [token + (token == BAD) for token in tokens]


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_refuses_a_row_that_is_no_row(speechless: Model, name: str) -> None:
    with Engine(speechless, None, params()) as engine:
        for _ in range(2):  # the slot is free again
            engine.seq_begin(0, Sampler(speechless, SAMPLERS[name]))
            result = engine.step(plan((0, 0, 0, 5, 0, 1)), prompt(5))
            assert status(result) is Status.SAMPLING_FAILED
            assert result.tokens.size == result.logprobs.size == result.top_logprobs.size == 0
            assert engine.seq_n_past(0) == 0
        # One call at a time.
        engine.seq_begin(1, Sampler(speechless, SAMPLERS[name]))
        engine.decode(prompt(5), range(5), [1] * 5, [False] * 4 + [True])
        engine.process()
        with pytest.raises(SamplingFailed, match=r"output is not finite: [0-9]+ of 128 logits"):
            engine.sample(1, 4)
        assert engine.seq_n_past(1) == 0


CALM = SamplingParams(temperature=0.0, logit_bias=((BAD, -math.inf),))
"""Never chooses the bad token itself, which a rounding of another processor might."""


def generated(engine: Engine, seq_id: int, first: Sequence[int], n: int) -> list[int]:
    """Returns the tokens that follow those, of one sequence alone."""
    model = engine.target
    engine.seq_end(seq_id)
    engine.seq_begin(seq_id, Sampler(model, CALM))
    result = engine.step(plan((seq_id, 0, 0, len(first), 0, 1)), first)
    found: list[int] = []
    for _ in range(n):
        assert status(result) is Status.OK
        found += result.tokens.tolist()
        result = engine.step(plan((seq_id, engine.seq_n_past(seq_id), 0, 1, 0, 1)), [found[-1]])
    return found


@pytest.mark.parametrize("n_prompt", [3, 40, 100])
def test_who_meets_it_fails_alone(allergic: Model, n_prompt: int) -> None:
    """Nor does it leave in its cells what ends those who come after it.

    A prompt of 70 tokens is computed in tiles of 64 cells, and of 100 the last was no number.
    """
    if n_prompt >= 64 and "0008" not in build_facts()["patches"]:
        pytest.skip("built without patches/cpu_kernels: llama.cpp's own tiles")
    good, bad = prompt(n_prompt), [*prompt(n_prompt - 1, 40), BAD]
    with Engine(allergic, None, params(n_batch=256, n_ubatch=256)) as engine:
        wanted = {n: generated(engine, 0, prompt(n), 6) for n in (3, 20, 70, n_prompt)}
    with Engine(allergic, None, params(n_batch=256, n_ubatch=256)) as engine:
        for seq_id in (0, 1):
            engine.seq_begin(seq_id, Sampler(allergic, CALM))
        rows = plan((0, 0, 0, n_prompt, 0, 1), (1, 0, n_prompt, n_prompt, 0, 1))
        result = engine.step(rows, [*good, *bad])
        assert [status(result, i) for i in (0, 1)] == [Status.OK, Status.SAMPLING_FAILED]
        found = result.tokens.tolist()
        while len(found) < 6:
            result = engine.step(plan((0, engine.seq_n_past(0), 0, 1, 0, 1)), found[-1:])
            found += result.tokens.tolist()
        assert found == wanted[n_prompt]
        for n in (3, 20, 70, n_prompt):
            assert generated(engine, 1, prompt(n), 6) == wanted[n]


@pytest.mark.parametrize("n_prompt", [10, 40, 100])
def test_who_shares_a_pool_and_a_batch_with_it_goes_on(allergic: Model, n_prompt: int) -> None:
    """A tile holds rows of both; those behind do not see its cells, which were multiplied by 0."""
    if "0008" not in build_facts()["patches"]:
        pytest.skip("built without patches/cpu_kernels: llama.cpp's own tiles")
    fields: dict[str, Any] = {"n_batch": 256, "n_ubatch": 256, "kv_unified": True}
    with Engine(allergic, None, params(**fields)) as engine:
        wanted = generated(engine, 1, prompt(n_prompt), 6)
        for seq_id in (0, 1):
            engine.seq_end(seq_id)
            engine.seq_begin(seq_id, Sampler(allergic, CALM))
        rows = plan((0, 0, 0, n_prompt, 0, 1), (1, 0, n_prompt, n_prompt, 0, 1))
        result = engine.step(rows, [*prompt(n_prompt - 1, 40), BAD, *prompt(n_prompt)])
        assert [status(result, i) for i in (0, 1)] == [Status.SAMPLING_FAILED, Status.OK]
        found = result.tokens.tolist()
        while len(found) < 6:
            result = engine.step(plan((1, engine.seq_n_past(1), 0, 1, 0, 1)), found[-1:])
            found += result.tokens.tolist()
        assert found == wanted


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_a_recurrent_state_without_numbers_ends_nobody_else(
    folder: Path, draft_type: DraftType
) -> None:
    """Whoever begins has a state that was cleared: by writing zeros, not by multiplying with 0."""

    def change(name: str, given: Tensor) -> Tensor:
        rows = np.array(given[0])
        if name == "token_embd.weight":
            rows[BAD] = math.nan
        return rows, given[1]

    path = copied(MODELS / HYBRID, folder / f"hybrid-{draft_type}.gguf", change=change)
    good, bad = list(range(300, 320)), [300, 301, BAD]
    with Model(path) as model, Engine(model, None, params(draft_type)) as engine:
        wanted = generated(engine, 1, good, 6)
        for seq_id in (0, 1):
            engine.seq_end(seq_id)
            engine.seq_begin(seq_id, Sampler(model, CALM))
        result = engine.step(plan((0, 0, 0, 20, 0, 1), (1, 0, 20, 3, 0, 1)), [*good, *bad])
        assert [status(result, i) for i in (0, 1)] == [Status.OK, Status.SAMPLING_FAILED]
        for seq_id in (1, 0):
            assert generated(engine, seq_id, good, 6) == wanted


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("probabilistic", [False, True])
def test_a_drafter_without_numbers_costs_drafts_alone(
    folder: Path, sampling: SamplingParams, *, probabilistic: bool
) -> None:
    path = folder / "heads.gguf"

    def change(name: str, given: Tensor) -> Tensor:
        if "nextn.eh_proj" not in name:
            return given
        return np.full_like(given[0], math.nan), given[1]

    if not path.exists():
        copied(MODELS / DENSE, path, change=change)
    found = []
    with Model(path) as model:
        for fields in ({}, {"draft_type": "mtp", "probabilistic": probabilistic}):
            with Engine(model, None, params(**fields)) as engine:  # type: ignore[arg-type]  # a literal
                n_draft = 3 if fields else 0
                n_weighed = 0
                engine.seq_begin(0, Sampler(model, sampling))
                result = engine.step(plan((0, 0, 0, 8, 0, 1)), list(range(300, 308)))
                tokens = result.tokens.tolist()
                while len(tokens) < 20:
                    n_past = engine.seq_n_past(0)
                    result = engine.step(plan((0, n_past, 0, 1, n_draft, 1)), tokens[-1:])
                    assert status(result) is Status.OK
                    tokens += result.tokens.tolist()
                    n_weighed += int(result.entries[0]["n_drafted"])
                found.append(tokens[:20])
                if probabilistic and sampling != GREEDY:
                    assert n_weighed == 0, "rejecting them would take tokens from the target's own"
    if sampling == GREEDY:
        assert found[0] == found[1]
    assert all(0 <= token < 1 << 20 for tokens in found for token in tokens)


def test_a_snapshot_with_a_draft_of_too_short_a_history_is_refused() -> None:
    """llama.cpp's n-gram cache would read before the history's start; only a forged one has it."""
    fields: dict[str, Any] = {"n_draft_max": 4}
    with Model(MODELS / DENSE) as model, Engine(model, None, params("ngram-cache", **fields)) as it:
        it.seq_begin(0, Sampler(model, GREEDY))
        result = it.step(plan((0, 0, 0, 12, 0, 1)), [301, 302, 303] * 4)
        last = result.tokens.tolist()
        it.step(plan((0, 12, 0, 1, 4, 1)), last)
        whole = it.save(0)
        event = struct.pack("<Qiii", 1, 12, last[0], 4)  # one; after 12 tokens, of 4 at most
        at = whole.index(event)
        assert whole.count(event) == 1
        forged = whole[: at + 8] + struct.pack("<iiii", 2, last[0], 4, -1) + whole[at + 24 : -8]
        it.seq_end(0)
        with pytest.raises(SnapshotError) as caught:
            it.load(0, sealed(forged))
        assert caught.value.kind is SnapshotKind.CORRUPT
        assert "a draft is out of range" in str(caught.value)
        it.load(0, whole)
        assert sealed(whole[:-8]) == whole
