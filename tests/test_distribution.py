"""Sampling with speculation draws from the target's own distribution, exactly.

The exact probabilities of the first three tokens are computed from the target's logits; many draws
with drafts, sequences of many seeds side by side, are counted against them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from tests.demo import EAGLE3, MODELS, SIMPLE, TARGETS, prompts

import drafthouse_engine as engine_library
from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

N_SEQ = 16
N_DRAWS = 3200
N_TOKENS = 3
TOP_K = 4
TEMPERATURE = 1.3
Path3 = tuple[int, int, int]


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, min_p=0.0, seed=seed, ignore_eos=True
    )


def step(engine: Engine, rows: Sequence[tuple[int, int, list[int], int]]) -> list[list[int]]:
    """Runs one step; every row (seq_id, n_past, tokens, K) asks for an output."""
    entries, tokens = [], list[int]()
    for seq_id, n_past, piece, n_draft in rows:
        entries.append((seq_id, n_past, len(tokens), len(piece), n_draft, 1))
        tokens += piece
    table = np.array(entries, dtype=engine_library.PLAN_DTYPE)
    result = engine.step(table, np.array(tokens, dtype=np.int32))
    assert not result.entries["status"].any()
    starts, counts = result.entries["token_offset"], result.entries["n_tokens"]
    return [result.tokens[a : a + n].tolist() for a, n in zip(starts, counts, strict=True)]


def probabilities(logits: npt.NDArray[np.float32]) -> dict[int, float]:
    """Returns the distribution after top-k and temperature."""
    best = np.argsort(logits)[::-1][:TOP_K]
    weights = np.exp((logits[best] - logits[best[0]]) / TEMPERATURE)
    shares = weights / weights.sum()
    return {int(token): float(p) for token, p in zip(best, shares, strict=True)}


def exact(target: Model, prompt: Sequence[int]) -> dict[Path3, float]:
    """Returns the probability of every sequence of three tokens."""
    params = EngineParams(draft_type="none", n_ctx_seq=256, n_batch=256, n_ubatch=256, n_threads=1)
    with Engine(target, None, params) as engine:

        def after(*tokens: int) -> dict[int, float]:
            history = [*prompt, *tokens]
            engine.seq_begin(0, Sampler(target, sampling(1)))
            n = len(history)
            engine.decode(history, range(n), [0] * n, [i == n - 1 for i in range(n)])
            found = probabilities(without_end(target, engine.logits(n - 1)))
            engine.seq_end(0)
            return found

        return {
            (a, b, c): p * q * r
            for a, p in after().items()
            for b, q in after(a).items()
            for c, r in after(a, b).items()
        }


def without_end(target: Model, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits[list(target.eos_token_ids)] = -np.inf
    return logits


def draw(engine: Engine, target: Model, prompt: Sequence[int]) -> tuple[Counter[Path3], float]:
    """Returns how often each three tokens came, and the acceptance rate."""
    counts: Counter[Path3] = Counter()
    n_extra = n_steps = 0
    for first in range(1, N_DRAWS + 1, N_SEQ):
        seeds = range(first, first + N_SEQ)
        for seq_id, seed in enumerate(seeds):
            engine.seq_begin(seq_id, Sampler(target, sampling(seed)))
        n = len(prompt)
        outputs = step(engine, [(i, 0, list(prompt), 0) for i in range(len(seeds))])
        while rows := [
            (i, n + len(out) - 1, out[-1:], 3) for i, out in enumerate(outputs) if len(out) < 3
        ]:
            for row, found in zip(rows, step(engine, rows), strict=True):
                outputs[row[0]] += found
                n_extra += len(found) - 1
                n_steps += 1
        counts.update((out[0], out[1], out[2]) for out in outputs)
        for seq_id in range(len(seeds)):
            engine.seq_end(seq_id)
    return counts, n_extra / (3 * n_steps)


def chi_square_z(counts: Counter[Path3], expected: dict[Path3, float]) -> float:
    """Returns how many standard deviations the statistic lies above its mean.

    Cells that expect fewer than 5 draws are merged. Source: Wilson and Hilferty 1931.
    """
    cells = {path: p * N_DRAWS for path, p in expected.items()}
    large = [(counts[path], n) for path, n in cells.items() if n >= 5]
    rest = N_DRAWS - sum(n for n, _ in large), N_DRAWS - sum(n for _, n in large)
    cells_used = [*large, rest] if rest[1] >= 5 else large
    statistic = sum((found - n) ** 2 / n for found, n in cells_used)
    k = len(cells_used) - 1
    return float(((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)))


@pytest.mark.parametrize(
    ("target_name", "draft_type", "is_probabilistic"),
    [
        ("dense", "mtp", True),
        ("dense", "mtp", False),
        ("dense", "simple", True),
        ("dense", "eagle3", False),
        ("hybrid", "mtp", True),
    ],
)
def test_draws_with_drafts_follow_the_exact_distribution(
    target_name: str, draft_type: str, is_probabilistic: bool
) -> None:
    prompt = prompts((24,))[0]
    files = {"eagle3": EAGLE3[target_name], "simple": SIMPLE}
    draft = Model(MODELS / files[draft_type]) if draft_type in files else None
    with Model(MODELS / TARGETS[target_name]) as target:
        expected = exact(target, prompt)
        assert sum(expected.values()) == pytest.approx(1.0)
        params = EngineParams(
            draft_type=draft_type,  # type: ignore[arg-type]  # parametrised by its names
            n_seq_max=N_SEQ,
            n_ctx_seq=256,
            n_batch=512,
            n_ubatch=512,
            probabilistic=is_probabilistic,
            n_threads=1,
        )
        with Engine(target, draft, params) as engine:
            counts, acceptance = draw(engine, target, prompt)
    if draft is not None:
        draft.close()
    assert set(counts) <= set(expected), "a token of probability zero was emitted"
    assert acceptance > 0.05, "too few drafts were accepted to prove anything"
    assert chi_square_z(counts, expected) < 4.0  # seeds are fixed; by chance 3 in 100,000
    distance = sum(abs(counts[path] / N_DRAWS - p) for path, p in expected.items()) / 2
    # Of as many draws without speculation, about sqrt(cells / (2 pi draws)).
    assert distance < 2 * math.sqrt(TOP_K**N_TOKENS / (2 * math.pi * N_DRAWS))
