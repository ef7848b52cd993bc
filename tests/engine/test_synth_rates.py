"""Synthetic acceptance: drafts accepted at random at given rates, for benchmarks only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafthouse_engine import (
    PLAN_DTYPE,
    Engine,
    EngineParams,
    InvalidConfig,
    Model,
    Sampler,
    SamplingParams,
)

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-mimo2-f16.gguf"
N_SEQ, K = 4, 3


def accepted(rates: tuple[float, ...], n_steps: int) -> list[int]:
    """Returns how many drafted tokens each sequence and step accepted."""
    params = EngineParams(
        draft_type="mtp",
        n_seq_max=N_SEQ,
        n_ctx_seq=512,
        n_batch=128,
        n_ubatch=128,
        n_draft_max=K,
        n_threads=1,
        synth_rates=rates,
    )
    with Model(str(MODEL)) as model, Engine(model, None, params) as engine:
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        for seq_id in range(N_SEQ):
            engine.seq_begin(seq_id, Sampler(model, greedy))
        last, n_past, counts = [50 + i for i in range(N_SEQ)], [0] * N_SEQ, []
        for step in range(n_steps + 1):
            n_draft = K if step else 0
            rows = [(i, n_past[i], i, 1, n_draft, 1) for i in range(N_SEQ)]
            plan = np.array(rows, dtype=np.int32).reshape(-1).view(PLAN_DTYPE)
            result = engine.step(plan, np.array(last, dtype=np.int32))
            for seq_id, _, past, start, n, n_drafted, n_accepted, *_ in result.entries.tolist():
                last[seq_id] = int(result.tokens[start + n - 1])
                n_past[seq_id] = past
                assert n_drafted == n_draft
                assert n == n_accepted + 1
                counts += [n_accepted] * (step > 0)
        return counts


@pytest.mark.model
def test_certain_rates_are_certain() -> None:
    assert set(accepted((1.0, 1.0, 1.0), 10)) == {3}
    assert set(accepted((0.0, 0.0, 0.0), 10)) == {0}
    assert set(accepted((1.0, 0.0, 0.0), 10)) == {1}


@pytest.mark.model
def test_rates_are_unconditional_per_position_and_the_same_every_time() -> None:
    rates = (0.8, 0.4, 0.3)
    counts = accepted(rates, 100)
    assert counts[:40] == accepted(rates, 10)
    for i, rate in enumerate(rates):
        share = sum(n > i for n in counts) / len(counts)
        assert share == pytest.approx(rate, abs=0.09)  # 3.6 standard errors of 400 draws


@pytest.mark.parametrize("rates", [(0.5,), (0.5, 0.6, 0.1), (1.1, 0.0, 0.0), ("x", 0, 0)])
def test_rates_that_are_none_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(InvalidConfig, match="synth_rates"):
        EngineParams(draft_type="mtp", n_draft_max=3, synth_rates=rates)
    with pytest.raises(InvalidConfig, match="synth_rates"):
        EngineParams(draft_type="none", synth_rates=(0.5, 0.2, 0.1))


@pytest.mark.model
def test_the_log_says_that_the_output_is_not_the_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from drafthouse_server.config import Config
    from drafthouse_server.engine.llama import LlamaEngine

    config = Config(model=str(MODEL), parallel=1, max_model_len=64, synth_rates=("0.5",) * 4)
    LlamaEngine.load(config).close()
    assert "not the model's output" in caplog.text
