"""Sampling with speculation draws from the target's own distribution, exactly.

The exact probabilities of the first three tokens are computed from the target's logits. Draws with
drafts, 24 sequences side by side among forks, rollbacks, cancels and snapshots, are counted
against them: see `tests/support/drawing.py`. `tests/proofs/distribution.py` draws the long table.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from tests.proofs.distribution import LOOP, compare
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, prompts, vocabulary
from tests.support.drawing import LENGTHS, Drawer, Path

from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams
from drafthouse_engine.options import DraftType

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_DRAWS = 800
TOP_K = 4
TIE = 0.002
"""Logits that are closer may change places where a batch of another width rounds otherwise."""
TEMPERATURE = 1.3
SETTINGS: dict[str, object] = {"temperature": TEMPERATURE, "top_k": TOP_K}


def probabilities(logits: npt.NDArray[np.float32]) -> dict[int, float]:
    """Returns the distribution after top-k and temperature."""
    best = np.argsort(logits)[::-1][:TOP_K]
    weights = np.exp((logits[best] - logits[best[0]]) / TEMPERATURE)
    shares = weights / weights.sum()
    return {int(token): float(p) for token, p in zip(best, shares, strict=True)}


def twin(logits: npt.NDArray[np.float32]) -> tuple[int, int] | None:
    """Returns the last token of the top k and the next, where rounding decides which is in."""
    last, following = np.argsort(logits)[::-1][TOP_K - 1 : TOP_K + 1]
    is_tie = logits[last] - logits[following] < TIE
    return (int(last), int(following)) if is_tie else None


def exact(target: Model, prompt: Sequence[int]) -> tuple[dict[Path, float], dict[Path, Path]]:
    """Returns the probability of every draw: of its length, times that of its tokens.

    And the draws that stand for another where rounding decides: those whose third token ties with
    the last of its top k.
    """
    params = EngineParams(draft_type="none", n_ctx_seq=256, n_batch=256, n_ubatch=256, n_threads=1)
    with Engine(target, None, params) as engine:

        def after(*tokens: int) -> dict[int, float]:
            history = [*prompt, *tokens]
            engine.seq_begin(0, Sampler(target, SamplingParams(temperature=0.0)))
            n = len(history)
            engine.decode(history, range(n), [0] * n, [i == n - 1 for i in range(n)])
            logits = without_end(target, engine.logits(n - 1))
            tie = twin(logits) if len(tokens) == 2 else None
            if tie is not None:
                twins[*tokens, tie[1]] = *tokens, tie[0]
            engine.seq_end(0)
            return probabilities(logits)

        share = {n: LENGTHS.count(n) / len(LENGTHS) for n in LENGTHS}
        found: dict[Path, float] = {}
        twins: dict[Path, Path] = {}
        for a, p in after().items():
            found[a,] = share[1] * p
            for b, q in after(a).items():
                found[a, b] = share[2] * p * q
                found |= {(a, b, c): share[3] * p * q * r for c, r in after(a, b).items()}
        return found, twins


def without_end(target: Model, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits[list(target.eos_token_ids)] = -np.inf
    return logits


def chi_square_z(counts: Counter[Path], expected: dict[Path, float]) -> float:
    """Returns how many standard deviations the statistic lies above its mean.

    Cells that expect fewer than 5 draws are merged. Source: Wilson and Hilferty 1931.
    """
    cells = {path: p * N_DRAWS for path, p in expected.items()}
    large = [(counts[path], n) for path, n in cells.items() if n >= 5]
    rest = N_DRAWS - sum(n for n, _ in large), N_DRAWS - sum(n for _, n in large)
    cells_used = [*large, rest] if rest[1] >= 5 else large
    statistic = sum((found - n) ** 2 / n for found, n in cells_used)
    k = len(cells_used) - len(set(LENGTHS))  # as many draws of each length as there must be
    return float(((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)))


@pytest.mark.parametrize(
    ("target_name", "draft_type", "is_probabilistic"),
    [
        ("dense", "mtp", True),
        ("dense", "mtp", False),
        ("dense", "simple", True),
        ("dense", "eagle3", False),
        ("dense", "ngram-simple", False),
        ("hybrid", "mtp", True),
        ("hybrid", "simple", True),
        ("hybrid", "eagle3", False),
    ],
)
def test_draws_with_drafts_follow_the_exact_distribution(
    target_name: str, draft_type: DraftType, is_probabilistic: bool
) -> None:
    is_ngram = draft_type == "ngram-simple"
    prompt = [int(token) for token in vocabulary().tokenize(LOOP)]
    prompt = prompt if is_ngram else list(prompts((9,))[0])
    files = {"eagle3": EAGLE3[target_name], "simple": SIMPLE}
    draft = Model(MODELS / files[draft_type]) if draft_type in files else None
    with Model(MODELS / TARGETS[target_name]) as target:
        expected, twins = exact(target, prompt)
        assert sum(expected.values()) == pytest.approx(1.0)
        drawer = Drawer(target, draft, draft_type, is_probabilistic=is_probabilistic)
        counts = drawer.draw(prompt, SETTINGS, N_DRAWS, 0)
        drawer.close()
    if draft is not None:
        draft.close()
    for path in twins.keys() & counts.keys():
        counts[twins[path]] += counts.pop(path)
    assert counts.total() == N_DRAWS
    assert set(counts) <= set(expected), "a token of probability zero was emitted"
    assert drawer.acceptance > 0.05, "too few drafts were accepted to prove anything"
    assert chi_square_z(counts, expected) < 4.0  # seeds are fixed; by chance 3 in 100,000
    distance = sum(abs(counts[path] / N_DRAWS - p) for path, p in expected.items()) / 2
    # Of as many draws without speculation, about sqrt(cells / (2 pi draws)).
    assert distance < 2 * math.sqrt(len(expected) / (2 * math.pi * N_DRAWS))


def test_the_table_tells_a_small_bias_from_noise() -> None:
    chance = random.Random(1)

    def sample(temperature: float) -> Counter[Path]:
        weights = [math.exp(-token / temperature) for token in range(8)]
        return Counter(
            tuple(chance.choices(range(8), weights, k=LENGTHS[i % len(LENGTHS)]))
            for i in range(20_000)
        )

    plain = sample(1.0)
    equal, other = compare(plain, sample(1.0)), compare(plain, sample(1.1))
    assert equal.z < 3
    assert equal.distance < 1.2 * equal.noise
    assert other.z > 4
    assert other.p < 1e-4
