"""Counts add up."""

from __future__ import annotations

import dataclasses

import pytest

from drafthouse_server.serving.metrics import DraftCounts, Metrics, StreamTimer
from drafthouse_server.step import (
    ResultEntry,
    SchedulerCounts,
    SequenceStatus,
    StepResult,
    StepTimings,
)


def test_steps_add_up() -> None:
    metrics = Metrics()
    entries = [
        ResultEntry(0, SequenceStatus.OK, 5, [1, 2, 3], n_drafted=4, n_accepted=2),
        ResultEntry(1, SequenceStatus.OK, 5, [1]),
    ]
    timings = StepTimings(draft_s=1.0, decode_s=2.0, process_s=3.0, sample_s=4.0, total_s=10.5)
    for _ in range(2):
        metrics.count_step(StepResult(entries, n_batch_tokens=7, timings=timings))
    statistics = metrics.statistics()
    assert (statistics.n_steps, statistics.n_batch_tokens) == (2, 14)
    assert (statistics.n_drafts, statistics.n_drafted, statistics.n_accepted) == (2, 8, 4)
    assert {phase: times.sum_s for phase, times in statistics.steps.items()} == {
        "draft": 2.0, "decode": 4.0, "process": 6.0, "sample": 8.0, "other": 1.0,
    }  # fmt: skip


def test_drafts_are_told_apart_by_who_proposed_them() -> None:
    metrics = Metrics(scheduler=SchedulerCounts(n_planned=8, n_draft_planned=20))
    entries = [
        ResultEntry(0, SequenceStatus.OK, 5, [1, 2, 3], n_drafted=4, n_accepted=2),
        ResultEntry(1, SequenceStatus.OK, 5, [1] * 9, n_drafted=8, n_accepted=8, is_external=True),
        ResultEntry(2, SequenceStatus.OK, 5, [1] * 3, n_drafted=6, n_accepted=2, is_external=True),
    ]
    metrics.count_step(StepResult(entries))
    statistics = metrics.statistics()
    assert statistics.by_source == {
        "drafter": DraftCounts(1, 4, 2),
        "ngram": DraftCounts(2, 14, 10),
    }
    assert statistics.by_source["drafter"].acceptance_rate == 0.5
    assert statistics.mean_n_draft == 2.5
    empty = Metrics().statistics()
    assert (empty.mean_n_draft, empty.by_source["drafter"].acceptance_rate) == (0, 0)


def test_requests_are_counted_by_outcome() -> None:
    metrics = Metrics()
    metrics.count_request("stop")
    metrics.count_request("stop")
    metrics.count_request("QUEUE_FULL")
    metrics.count_tokens(10, 5)
    metrics.count_tokens(20, 6)
    statistics = metrics.statistics()
    assert statistics.n_requests == {"stop": 2, "QUEUE_FULL": 1}
    assert (statistics.n_prompt_tokens, statistics.n_output_tokens) == (30, 11)


def test_a_snapshot_does_not_change() -> None:
    metrics = Metrics()
    before = metrics.statistics()
    metrics.count_request("stop")
    assert before.n_requests == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.n_steps = 3  # type: ignore[misc]  # frozen on purpose


def test_a_stream_is_timed_by_its_messages() -> None:
    metrics = Metrics()
    times = iter((10.0, 10.5, 12.5))
    timer = StreamTimer(metrics, 7.0, lambda: next(times))
    for n_tokens in (3, 1, 2):
        timer.note(n_tokens)
    timer.end()
    times_of = metrics.statistics().tenants[""]
    assert (times_of.first_token.n, times_of.first_token.sum_s) == (1, 3.0)
    assert (times_of.message_gap.n, times_of.message_gap.sum_s) == (2, 2.5)
    assert (times_of.output_token.n, times_of.output_token.sum_s) == (1, 0.5)


@pytest.mark.parametrize("n_messages", [0, 1])
def test_a_stream_of_one_message_has_no_time_per_token(n_messages: int) -> None:
    metrics = Metrics()
    timer = StreamTimer(metrics, 0.0, lambda: 1.0)
    for _ in range(n_messages):
        timer.note(5)
    timer.end()
    found = metrics.statistics().tenants[""]
    assert found.first_token.n == n_messages
    assert found.output_token.n == found.message_gap.n == 0


def test_times_and_drafts_are_counted_by_tenant_too() -> None:
    metrics = Metrics(model="m")
    times = iter((10.0, 10.5, 12.5))
    timer = StreamTimer(metrics, 7.0, lambda: next(times), "acme")
    for n_tokens in (3, 1, 2):
        timer.note(n_tokens)
    timer.end()
    metrics.tenants.of("acme").note_drafts(3, 10, [1, 0, 2])
    metrics.tenants.of("beta").note_drafts(0, 0, [])
    found = metrics.statistics().tenants
    acme, beta = found["acme"], found["beta"]
    assert (acme.first_token.n, acme.message_gap.n, acme.output_token.n) == (1, 2, 1)
    assert acme.n_draft.n == 1
    assert acme.n_draft.sum_s == pytest.approx(10 / 3)
    assert (acme.n_accepted.n, acme.n_accepted.sum_s) == (3, 4)
    assert (beta.first_token.n, beta.n_draft.n, beta.n_accepted.n) == (0, 0, 0)


def test_steps_of_a_run_are_counted_each() -> None:
    metrics = Metrics()
    timings = StepTimings(draft_s=0.0, decode_s=0.4, process_s=0.0, sample_s=0.04, total_s=0.48)
    metrics.count_step(StepResult([], n_steps=4, timings=timings))
    steps = metrics.statistics().steps
    assert {phase: found.n for phase, found in steps.items()} == dict.fromkeys(steps, 4)
    assert steps["decode"].sum_s == pytest.approx(0.4)
    bucket = steps["decode"].bounds_s.index(0.1)  # each took 0.1 s
    assert steps["decode"].counts[bucket] == 4


def test_ten_thousand_tenants_do_not_make_ten_thousand_series() -> None:
    metrics = Metrics()
    metrics.tenants.n_max = 20
    for i in range(10_000):
        timer = StreamTimer(metrics, 0.0, lambda: 1.0, f"tenant-{i}")
        timer.note(1)
        metrics.tenants.of(f"tenant-{i}").queue.observe(0.5)
    found = metrics.statistics().tenants
    assert set(found) == {*(f"tenant-{i}" for i in range(20)), "other"}
    assert found["tenant-7"].queue.n == 1
    assert found["other"].first_token.n == found["other"].queue.n == 9980
    assert sum(counts.first_token.n for counts in found.values()) == 10_000


def test_no_tenant_is_named_where_none_is_to_be() -> None:
    metrics = Metrics()
    metrics.tenants.n_max = 0
    metrics.tenants.of("acme").queue.observe(1.0)
    assert set(metrics.statistics().tenants) == {"other"}
