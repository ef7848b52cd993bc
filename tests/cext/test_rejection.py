"""The acceptance rule: lossless for any draft, on distributions that are known exactly."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.four_tokens import DRAFTS, N_TRIALS, TARGET, TOTAL_VARIATION, total_variation

from drafthouse_engine import (
    InvalidArgument,
    adjusted_distribution,
    modified_rejection_step,
    sample_token,
    speculative_sample,
)


@pytest.mark.parametrize("name", DRAFTS)
def test_one_step_draws_from_the_target(name: str) -> None:
    p, q = np.array(TARGET), np.array(DRAFTS[name])
    rng = np.random.default_rng(11)
    counts = np.zeros(4, np.int64)
    n_accepted = 0
    for _ in range(N_TRIALS):
        is_accepted, token = modified_rejection_step(p, q, sample_token(q, rng), rng)
        counts[token] += 1
        n_accepted += is_accepted
    assert total_variation(counts, TARGET) <= TOTAL_VARIATION
    assert counts[3] == 0, "a token of probability 0 was emitted"
    expected = float(np.minimum(p, q).sum())  # 1 - total variation of p and q
    assert n_accepted / N_TRIALS == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_chain_draws_each_token_from_the_target(name: str) -> None:
    p, q = np.array(TARGET), np.array(DRAFTS[name])
    rng = np.random.default_rng(12)
    firsts, lasts = np.zeros(4, np.int64), np.zeros(4, np.int64)
    for _ in range(N_TRIALS):
        draft = [sample_token(q, rng) for _ in range(2)]
        n_accepted, token = speculative_sample([p, p, p], [q, q], draft, rng)
        emitted = [*draft[:n_accepted], token]
        assert 1 <= len(emitted) <= 3
        firsts[emitted[0]] += 1
        lasts[emitted[-1]] += len(emitted) == 3
    assert total_variation(firsts, TARGET) <= TOTAL_VARIATION
    assert firsts[3] == 0
    assert lasts[3] == 0
    if lasts.sum() > N_TRIALS / 4:
        assert total_variation(lasts, TARGET) <= 2 * TOTAL_VARIATION


def test_adjusted_distribution_is_what_the_target_has_left() -> None:
    found = adjusted_distribution(np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.5, 0.1, 0.3]))
    assert found == pytest.approx([0.8, 0.0, 0.2, 0.0])


def test_adjusted_distribution_of_equals_is_the_target() -> None:
    p = np.array(TARGET)
    assert adjusted_distribution(p, p) == pytest.approx(p)


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    rng = np.random.default_rng(13)
    p, q = np.array([0.0, 1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0])
    found = {modified_rejection_step(p, q, 0, rng) for _ in range(1000)}
    assert found == {(False, 1)}


def test_wrong_arguments_are_refused() -> None:
    rng = np.random.default_rng(14)
    p, q = np.array(TARGET), np.array(DRAFTS["opposite"])
    with pytest.raises(InvalidArgument, match="token 0 has no probability"):
        modified_rejection_step(p, q, 0, rng)
    with pytest.raises(InvalidArgument, match="token 4 has no probability"):
        modified_rejection_step(p, q, 4, rng)
    with pytest.raises(InvalidArgument, match="shapes"):
        adjusted_distribution(p, q[:3])
    with pytest.raises(InvalidArgument, match="1 tokens need 2 target distributions"):
        speculative_sample([p], [q], [1], rng)
    with pytest.raises(InvalidArgument, match="all 0"):
        sample_token(np.zeros(4), rng)
    with pytest.raises(InvalidArgument, match="not numbers"):
        sample_token(np.array([np.nan, 1.0]), rng)


def test_the_last_interval_is_not_overrun() -> None:
    class Edge(np.random.Generator):
        def random(self, *_args: object, **_settings: object) -> float:  # type: ignore[override]
            return 1.0  # beyond what a generator gives; rounding can lead there

    edge = Edge(np.random.PCG64(1))
    assert sample_token(np.array([0.3, 0.7, 0.0]), edge) == 1
