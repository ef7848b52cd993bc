"""What a step costs: three coefficients that cut prompts by time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse_server.drafting.cost import (
    Splitting,
    StepCost,
    StepShape,
    count_ubatches,
    shape_of,
)
from drafthouse_server.step import PlanEntry, ResultEntry, SequenceStatus, StepTimings

BATCH_S, TOKEN_S, PAIR_S = 0.01, 0.0008, 2e-7


def alone(n: int, n_past: int = 200) -> StepShape:
    """A step of sequences that generate."""
    return StepShape(n, n, 1, n * n_past)


def loaded(n: int, n_prompt: int, n_past: int) -> StepShape:
    """The same with a piece of a prompt."""
    n_pairs = alone(n).n_pairs + n_prompt * (n_past + n_prompt / 2)
    return StepShape(n + n_prompt, n, 2, n_pairs)


def true_s(shape: StepShape) -> float:
    return BATCH_S * shape.n_ubatches + TOKEN_S * shape.n_tokens + PAIR_S * shape.n_pairs


def teach(cost: StepCost, n_steps: int, speed: float = 1.0, noise: float = 0.0) -> None:
    """Streams come and go; every fifth step carries a piece of a prompt."""
    draw = random.Random(1)
    for i in range(n_steps):
        n = 4 + i // 20 % 5
        piece = draw.choice([16, 48, 128]), draw.choice([0, 500, 3000])
        shape = loaded(n, *piece) if i % 5 == 0 else alone(n)
        factor = max(0.5, draw.gauss(1, noise)) * (8 if noise and draw.random() < 0.02 else 1)
        seconds = true_s(shape) * factor / speed
        cost.observe(shape, StepTimings(decode_s=seconds, total_s=seconds))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_coefficients_are_found_in_spite_of_noise_and_stalls(noise: float) -> None:
    cost = StepCost()
    teach(cost, 200, noise=noise)
    for shape in (alone(4), alone(8), loaded(6, 32, 1000), loaded(6, 100, 3000)):
        assert cost.predict(shape) == pytest.approx(true_s(shape), rel=0.25 if noise else 0.05)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    cost = StepCost()
    teach(cost, 200)
    teach(cost, 200, speed=0.5)
    for shape in (alone(6), loaded(6, 100, 500)):
        assert cost.predict(shape) == pytest.approx(2 * true_s(shape), rel=0.25)


def test_steps_without_prompts_do_not_wipe_out_what_prompts_take() -> None:
    cost = StepCost()
    teach(cost, 200)
    for _ in range(2000):
        cost.observe(alone(8), StepTimings(decode_s=true_s(alone(8)), total_s=true_s(alone(8))))
    assert cost.predict(loaded(8, 100, 500)) == pytest.approx(true_s(loaded(8, 100, 500)), rel=0.25)


def test_a_prompt_is_cut_to_the_time_there_is() -> None:
    cost = StepCost()
    teach(cost, 300)
    beside = alone(6)
    n_fit = cost.fit_prefill(beside, 0.1, 500, 4096)
    took_s = true_s(loaded(6, n_fit, 500))
    assert took_s == pytest.approx(0.1, rel=0.2)
    assert cost.fit_prefill(beside, 0.2, 500, 4096) > n_fit
    assert cost.fit_prefill(beside, 0.1, 500, 7) == 7
    assert cost.fit_prefill(beside, 0.001, 500, 4096) == 0
    assert cost.recompute_s(1000, 512) > cost.recompute_s(500, 512) > 0


def test_far_into_a_long_prompt_fewer_tokens_fit() -> None:
    cost = StepCost()
    teach(cost, 300)
    near, far = (cost.fit_prefill(alone(6), 0.1, n_past, 4096) for n_past in (0, 8000))
    assert near > 1.5 * far > 0


def test_the_first_step_sets_the_scale() -> None:
    cost = StepCost()
    assert cost.n_observed == 0
    cost.observe(alone(4), StepTimings(decode_s=1e-4, total_s=1e-4))
    assert cost.predict(alone(4)) == pytest.approx(1e-4, rel=0.1)
    assert 1e-4 < cost.predict(loaded(4, 100, 0)) < 1e-2
    assert cost.n_observed == 1
    cost.observe(alone(4), StepTimings())  # nothing measured, nothing learnt
    assert cost.n_observed == 1


seconds = st.one_of(st.sampled_from([5e-324, 1e-200, 1e-9, 86399.0]), st.floats(1e-6, 1.0))
told = st.lists(
    st.tuples(seconds, st.integers(1, 64), st.integers(0, 512), st.integers(0, 10_000)), max_size=30
)


@given(told, st.floats(0, 10), st.integers(0, 10_000), st.integers(0, 4096))
@settings(max_examples=200, deadline=None)
def test_more_work_never_costs_less_and_what_fits_is_predicted_to_fit(
    steps: list[tuple[float, int, int, int]], target_s: float, n_past: int, n_most: int
) -> None:
    cost = StepCost()
    for step_s, n, n_prompt, n_before in steps:
        shape = loaded(n, n_prompt, n_before) if n_prompt else alone(n, n_before)
        cost.observe(shape, StepTimings(total_s=step_s))
    assert 0 < cost.predict(alone(3)) <= cost.predict(alone(4)) < math.inf
    n_fit = cost.fit_prefill(alone(6), target_s, n_past, n_most)
    assert 0 <= n_fit <= n_most
    assert cost.predict(alone(6)) <= cost.predict(loaded(6, n_fit, n_past)) or not n_fit
    if n_fit:
        assert cost.predict(loaded(6, n_fit, n_past)) <= target_s * (1 + 1e-6) + 2e-6
    assert cost.fit_prefill(alone(6), target_s / 2, n_past, n_most) <= n_fit


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 86400.0])
def test_times_that_are_none_are_not_learnt(bad: float) -> None:
    cost = StepCost()
    cost.observe(alone(4), StepTimings(total_s=bad))
    cost.observe(alone(4)._replace(n_pairs=math.nan), StepTimings(total_s=0.1))
    cost.observe(StepShape(), StepTimings(total_s=0.1))
    assert cost.n_observed == 0


@pytest.mark.parametrize(
    ("splitting", "seq_ids", "lengths", "n_ubatches"),
    [
        (Splitting.NONE, [0, 2], [5, 1], 1),
        (Splitting.NONE, [0, 1], [30, 10], 2),
        (Splitting.EQUAL, [0, 1, 2], [4, 4, 4], 1),
        (Splitting.EQUAL, [0, 1, 2], [4, 1, 4], 3),
        (Splitting.EQUAL, [0, 1, 2], [4, 4, 1], 2),
        (Splitting.EQUAL, [0, 1, 3], [4, 4, 4], 2),
        (Splitting.EQUAL, [0, 1, 2, 3], [1, 2, 2, 3], 3),
        (Splitting.GROUPS, [0, 1, 2], [4, 1, 4], 3),
        (Splitting.GROUPS, [0, 1, 2], [4, 4, 4], 1),
        (Splitting.EQUAL, [0], [33], 2),
    ],
)
def test_physical_batches_as_llama_cpp_makes_them(
    splitting: Splitting, seq_ids: list[int], lengths: list[int], n_ubatches: int
) -> None:
    assert count_ubatches(seq_ids, lengths, splitting, 32) == n_ubatches


def test_the_shape_of_a_step_counts_what_was_verified() -> None:
    entries = [
        PlanEntry(2, 10, [7], 4, True),
        PlanEntry(0, 20, [7], 0, True),
        PlanEntry(1, 0, [1, 2, 3], 0, False),
    ]
    ok = SequenceStatus.OK
    results = [
        ResultEntry(2, ok, 12, [1, 2], n_drafted=3, n_accepted=1),
        ResultEntry(0, ok, 21, [1]),
        ResultEntry(1, ok, 3),
    ]
    assert shape_of(entries, results, Splitting.NONE, 64) == StepShape(8, 5, 1, 60)
