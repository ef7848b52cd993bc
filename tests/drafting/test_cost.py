"""The cost model of a step: it finds what steps cost, in spite of noise."""

from __future__ import annotations

import dataclasses
import itertools
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
    expect_ubatches,
    shape_of,
)
from drafthouse_server.step import PlanEntry, ResultEntry, SequenceStatus, StepTimings


def shape(n: int, k: int, n_ubatches: int = 1) -> StepShape:
    return StepShape(n, k, n * k, n * (1 + k), n * (1 + k), n_ubatches, n * (1 + k) * 100.0)


def true_timings(s: StepShape) -> StepTimings:
    """A machine that reads weights once per physical batch and computes beyond eight tokens."""
    width = s.n_tokens / s.n_ubatches
    draft_s = 0.002 * s.n_depth + 0.0001 * s.n_draft
    decode_s = s.n_ubatches * (0.01 + 0.0003 * min(width, 8) + 0.001 * max(0.0, width - 8))
    process_s = 0.0005 + 0.00005 * s.n_tokens
    sample_s = 0.0001 * s.n_outputs
    total_s = draft_s + decode_s + process_s + sample_s + 0.0002
    return StepTimings(draft_s, decode_s, process_s, sample_s, total_s)


def slower(timings: StepTimings, factor: float) -> StepTimings:
    return StepTimings(
        timings.draft_s * factor,
        timings.decode_s * factor,
        timings.process_s * factor,
        timings.sample_s * factor,
        timings.total_s * factor,
    )


def learn(cost: StepCost, n_steps: int, seed: int = 1, noise: float = 0.0) -> None:
    draw = random.Random(seed)
    for _ in range(n_steps):
        s = shape(draw.choice([1, 2, 4, 8, 16, 32]), draw.randrange(5))
        factor = draw.gauss(1, noise) * (10 if noise and draw.random() < 0.03 else 1)
        cost.observe(s, slower(true_timings(s), max(0.5, factor)))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_are_found_within_a_few_dozen_steps_in_spite_of_outliers(noise: float) -> None:
    cost = StepCost()
    learn(cost, 150, noise=noise)
    for n in (1, 3, 8, 24, 32):
        for k in range(5):
            expected = true_timings(shape(n, k)).total_s
            assert cost.predict(shape(n, k)) == pytest.approx(expected, rel=0.15), (n, k)


def test_the_first_step_sets_the_scale() -> None:
    cost = StepCost()
    cost.observe(shape(4, 0), slower(true_timings(shape(4, 0)), 0.01))
    assert 0 < cost.predict(shape(4, 0)) < 0.001
    assert cost.predict(shape(4, 2)) < 4 * cost.predict(shape(4, 0)), "drafts have the scale too"


def test_one_kind_of_step_for_long_does_not_wipe_out_what_was_learnt_of_others() -> None:
    cost = StepCost()
    learn(cost, 300)
    before = cost.predict(shape(32, 4))
    for _ in range(2000):
        cost.observe(shape(8, 0), true_timings(shape(8, 0)))
    assert cost.predict(shape(32, 4)) == pytest.approx(before, rel=0.15)


def test_a_machine_that_becomes_slower_is_noticed() -> None:
    cost = StepCost()
    learn(cost, 300)
    for factor in [1] * 40 + [2] * 300:
        cost.observe(shape(8, 3), slower(true_timings(shape(8, 3)), factor))
    for n, k in ((8, 3), (32, 1)):
        expected = 2 * true_timings(shape(n, k)).total_s
        assert cost.predict(shape(n, k)) == pytest.approx(expected, rel=0.2)


@given(st.integers(1, 64), st.integers(0, 7), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_more_work_never_costs_less(n: int, k: int, seed: int) -> None:
    cost, last = StepCost(), StepShape()
    draw = random.Random(seed)
    for i in range(40):
        # Never twice the same: what steps in a row take corrects predictions of their kind alone.
        s = shape(draw.randrange(1, 64), draw.randrange(8), 1 + i % 2)
        assert s != last
        last = s
        cost.observe(s, slower(true_timings(s), draw.uniform(0.1, 10)))
    assert min(sum(cost.coefficients().values(), ())) >= 0
    assert cost.predict(shape(n, k)) <= cost.predict(shape(n, k + 1))
    assert cost.predict(shape(n, k)) <= cost.predict(shape(n + 1, k))


def test_host_time_counts_and_an_engine_with_a_total_alone_is_one_decode() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(shape(4, 0), StepTimings(total_s=0.01), wall_s=0.015)
    assert cost.predict(shape(4, 0)) == pytest.approx(0.015, rel=0.05)
    StepCost().observe(shape(4, 0), StepTimings())  # nothing measured, nothing learnt


@pytest.mark.parametrize("seed", [11030, 14846, 23511])
def test_a_part_of_the_step_that_takes_next_to_no_time_is_learnt(seed: int) -> None:
    """In these rows of steps what is expected of it falls to where its square is zero."""
    draw = random.Random(seed)
    cost = StepCost()
    for _ in range(25):
        if draw.random() < 0.7:
            s = shape(draw.choice([1, 2, 4, 8]), 0)
        else:
            s = StepShape(0, 0, 0, draw.choice([20, 32, 100]), 0, 1, 100.0)
        process_s = draw.choice([0.0] * 9 + [1e-6])
        cost.observe(s, dataclasses.replace(true_timings(s), process_s=process_s, sample_s=0.0))
    assert 0 < cost.predict(shape(4, 0)) < 1


def test_steps_as_short_as_a_float_can_be_are_learnt() -> None:
    cost = StepCost()
    for seconds in (5e-324, 1e-200, 0.01, 1e-170, 1e-300):
        cost.observe(shape(4, 2), StepTimings(seconds, seconds, seconds, seconds, seconds))
        assert math.isfinite(cost.predict(shape(4, 2)))


def test_prefill_is_cut_by_time() -> None:
    cost = StepCost()
    learn(cost, 200)
    beside = shape(4, 2)
    n_fit = cost.fit_prefill(beside, 0.05, n_past=100, n_most=4096)
    assert 5 < n_fit < 100
    assert cost.fit_prefill(beside, 0.1, n_past=100, n_most=4096) > n_fit
    assert cost.fit_prefill(beside, 0.001, n_past=100, n_most=4096) == 0
    assert cost.fit_prefill(StepShape(), 10.0, n_past=0, n_most=7) == 7
    assert cost.recompute_s(1000, 512) > cost.recompute_s(500, 512) > 0


@pytest.mark.parametrize(
    ("splitting", "seq_ids", "lengths", "n_ubatches"),
    [
        (Splitting.NONE, [0, 2], [5, 1], 1),
        (Splitting.NONE, [0, 1], [30, 10], 2),
        (Splitting.STREAMS, [0, 1, 2], [4, 4, 4], 1),
        (Splitting.STREAMS, [0, 1, 2], [4, 1, 4], 3),
        (Splitting.STREAMS, [0, 1, 2], [4, 4, 1], 2),
        (Splitting.STREAMS, [0, 1, 3], [4, 4, 4], 2),
        (Splitting.STREAMS, [0, 1, 2, 3], [1, 2, 2, 3], 3),
        (Splitting.GROUPS, [0, 1, 2], [4, 1, 4], 3),
        (Splitting.GROUPS, [0, 1, 2], [4, 4, 4], 1),
        (Splitting.STREAMS, [0], [33], 2),
    ],
)
def test_physical_batches_as_llama_cpp_makes_them(
    splitting: Splitting, seq_ids: list[int], lengths: list[int], n_ubatches: int
) -> None:
    assert count_ubatches(seq_ids, lengths, splitting, 32) == n_ubatches


slots = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True).map(sorted)


@given(slots, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_physical_batches_to_expect_are_the_mean_over_the_drafts_that_come(
    seq_ids: list[int], k: int, data: st.DataObject
) -> None:
    n = len(seq_ids)
    asked = data.draw(st.lists(st.sampled_from([0, k]), min_size=n, max_size=n))
    shares = data.draw(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=n, max_size=n))
    for splitting in Splitting:
        mean = 0.0
        for comes in itertools.product((False, True), repeat=n):
            probability = 1.0
            for is_there, share in zip(comes, shares, strict=True):
                probability *= share if is_there else 1 - share
            lengths = [1 + wish * is_there for wish, is_there in zip(asked, comes, strict=True)]
            mean += probability * count_ubatches(seq_ids, lengths, splitting, 512)
        lengths = [1 + wish for wish in asked]
        found = expect_ubatches(seq_ids, lengths, shares, splitting, 512)
        assert found == pytest.approx(mean)


@given(slots, st.data())
def test_physical_batches_to_expect_are_those_there_are_where_all_drafts_come(
    seq_ids: list[int], data: st.DataObject
) -> None:
    n = len(seq_ids)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    for splitting in Splitting:
        found = expect_ubatches(seq_ids, lengths, [1.0] * n, splitting, 16)
        assert found == count_ubatches(seq_ids, lengths, splitting, 16)


def test_the_shape_of_a_step_counts_what_was_drafted_and_what_was_verified() -> None:
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
    assert shape_of(entries, results, Splitting.NONE, 64) == StepShape(2, 4, 4, 8, 5, 1, 60)


@pytest.mark.parametrize("seed", range(4))
def test_kinds_that_are_not_seen_keep_their_cost_while_a_machine_changes_speed(seed: int) -> None:
    """The speed of a machine is learnt twice, as speed and as costs: it must not add up."""
    chance, cost = random.Random(seed), StepCost()
    prompt, decodes = StepShape(0, 0, 0, 94, 0, 1, 94 * 47.0), shape(4, 0)
    for _ in range(30):
        cost.observe(prompt, true_timings(prompt))
        cost.observe(decodes, true_timings(decodes))
    true_s, found_s = true_timings(prompt).total_s, []
    for _ in range(150):
        timings = slower(true_timings(decodes), chance.choice([1, 3, 10, 30]))
        for _ in range(40):
            cost.observe(decodes, timings)
        found_s.append(cost.predict(prompt))
    assert true_s / 15 < min(found_s)
    assert max(found_s) < 15 * true_s
