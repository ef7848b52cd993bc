"""Runs of steps inside the engine: the same tokens as step by step, and an end when one is due."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.support.hand import (
    DENSE,
    HYBRID,
    TEXTS,
    assert_same,
    emitted,
    engine,
    model,
    moved,
    plan,
    sampler,
    started,
    tokens_of,
)

from drafthouse_engine import (
    DRAFT_DTYPE,
    BadPlan,
    DraftType,
    Engine,
    Fault,
    InvalidArgument,
    ResultFlag,
    SamplingParams,
    Start,
    Status,
    StepResult,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, n_top_logprobs=2, logprobs=True)
SAMPLED = SamplingParams(temperature=1.0, top_k=20, penalty_repeat=1.2, seed=7, ignore_eos=True)
BOUND = SamplingParams(temperature=1.0, seed=3, grammar="root ::= [a-z ]{200,}")
ALL = (GREEDY, SAMPLED, BOUND)


@dataclass
class Crowd:
    """Sequences that generate, one a slot."""

    target: Engine
    outputs: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, target: Engine, name: str, samplings: tuple[SamplingParams, ...] = ALL) -> Crowd:
        """Returns them with their first tokens."""
        crowd = cls(target)
        prompts = [tokens_of(text) for text in TEXTS[: len(samplings)]]
        rows, tokens = [], list[int]()
        for seq_id, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            target.seq_begin(seq_id, sampler(sampling, name))
            rows.append((seq_id, 0, len(tokens), len(prompt), 0, 1))
            tokens += prompt
            crowd.outputs.append([])
            crowd.logprobs.append([])
        crowd.take(target.step(plan(*rows), tokens))
        return crowd

    def step(self, n_steps: int = 1, n_draft: int = 0) -> StepResult:
        """Runs steps of all of them and takes what they yield."""
        rows = [
            (seq_id, self.target.seq_n_past(seq_id), seq_id, 1, n_draft, 1)
            for seq_id in range(len(self.outputs))
        ]
        last = [output[-1] for output in self.outputs]
        return self.take(self.target.step(plan(*rows), last, n_steps=n_steps))

    def take(self, result: StepResult) -> StepResult:
        for seq_id in range(len(self.outputs)):
            self.outputs[seq_id] += emitted(result, seq_id)
            start = int(result.entries["token_offset"][seq_id])
            end = start + int(result.entries["n_tokens"][seq_id])
            self.logprobs[seq_id] += result.logprobs[start:end].tolist()
        return result


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", ["none", "mtp", "eagle3", "simple", "ngram-map-k"])
def test_a_run_is_its_steps(draft_type: DraftType, name: str) -> None:
    alone, run = (Crowd.of(engine(draft_type, name), name) for _ in range(2))
    for _ in range(12):
        alone.step()
    first, second = run.step(5), run.step(7)
    assert (first.n_steps, second.n_steps) == (5, 7)
    assert first.entries["n_tokens"].tolist() == [5, 5, 5]
    assert first.n_batch_tokens == 15
    assert run.outputs == alone.outputs
    np.testing.assert_array_equal(run.logprobs, alone.logprobs)
    # Drafters and samplers hold what they held: so the next drafts are the same, and their fate.
    for _ in range(3 if run.target.limits.n_draft_max else 0):
        expected, found = alone.step(n_draft=3), run.step(n_draft=3)
        both = found.entries.copy(), expected.entries.copy()
        for entries in both:
            entries["n_mask_work"] = 0  # what one has found of a grammar the other need not find
        np.testing.assert_array_equal(*both)
    assert run.outputs == alone.outputs
    alone.target.close()
    run.target.close()


def test_likeliest_tokens_stand_beside_their_tokens() -> None:
    alone, run = (Crowd.of(engine(), DENSE) for _ in range(2))
    steps = [alone.step() for _ in range(4)]
    result = run.step(4)
    assert result.top_tokens.shape == (12, 2)
    for seq_id in range(3):
        expected = [step.top_tokens[seq_id] for step in steps]
        np.testing.assert_array_equal(result.top_tokens[4 * seq_id :][:4], expected)
        expected = [step.top_logprobs[seq_id] for step in steps]
        np.testing.assert_array_equal(result.top_logprobs[4 * seq_id :][:4], expected)
    assert (result.top_tokens[:4, 0] == run.outputs[0][1:]).all(), "greedy takes the likeliest"
    alone.target.close()
    run.target.close()


def test_an_end_token_ends_the_run_for_all() -> None:
    ends = SamplingParams(temperature=0.0, grammar='root ::= "a" "b" "c" "d"')
    run = Crowd.of(engine(), DENSE, (GREEDY, ends))
    result = run.step(40)
    assert 1 < result.n_steps < 40
    assert [len(output) for output in run.outputs] == [result.n_steps + 1] * 2
    assert result.entries["flags"].tolist() == [0, ResultFlag.EOG]
    run.target.close()


def test_a_full_context_ends_the_run() -> None:
    run = Crowd.of(engine(n_ctx_seq=48), DENSE, (GREEDY,))
    n_past = run.target.seq_n_past(0)
    result = run.step(64)
    assert result.entries["status"].tolist() == [Status.OK]
    assert result.n_steps == run.target.limits.n_ctx_seq - n_past
    assert run.target.seq_n_past(0) == run.target.limits.n_ctx_seq
    run.target.close()


def test_no_room_ends_the_run_and_nobody() -> None:
    target = engine(kv_unified=True, n_ctx=256)
    run = Crowd.of(target, DENSE, (GREEDY,) * 3)  # cells lie elsewhere than alone: sums round
    while (result := run.step(60)).n_steps == 60:
        pass
    assert result.entries["status"].tolist() == [Status.OK] * 3
    n_past = [target.seq_n_past(i) for i in range(3)]
    assert result.entries["n_past"].tolist() == n_past
    assert 0 < sum(n_past) <= target.limits.n_ctx
    assert result.n_steps > 1
    target.seq_end(2)
    run.outputs.pop()
    alone = Crowd.of(engine(), DENSE, (GREEDY,) * 3)
    while len(alone.outputs[0]) < len(run.outputs[0]) + 2:
        alone.step()
    run.step(2)
    expected = [output[: len(run.outputs[0])] for output in alone.outputs[:2]]
    assert_same([tokens_of(text) for text in TEXTS[:2]], expected, run.outputs)
    alone.target.close()
    target.close()


def test_a_run_of_copies_in_one_pool_leaves_the_next_plan_its_cells() -> None:
    """Copies share cells; a plan counts each sequence's own, and a run went on beyond that."""
    target = engine(kv_unified=True, n_ctx=256)
    prompt = (tokens_of(TEXTS[1]) * 9)[:70]
    target.seq_begin(0, sampler(GREEDY))
    target.step(plan((0, 0, 0, 69, 0, 0)), prompt[:69])
    for slot in (1, 2):
        assert started(target, Start(slot, sampler(GREEDY), 69, source=0)) == 69
    rows = [(slot, 69, slot, 1, 0, 1) for slot in range(3)]
    result = target.step(plan(*rows), prompt[69:] * 3, n_steps=64)
    assert 1 < result.n_steps < 64
    assert sum(target.seq_n_past(slot) for slot in range(3)) <= target.limits.n_ctx
    assert moved(target, saves=[0]).snapshots, "before: BAD_PLAN, the plan needs 399 KV cells"
    target.close()


def test_who_finds_no_room_within_a_run_has_still_no_draft_state() -> None:
    target = engine("mtp", kv_unified=True, n_ctx=256)
    run = Crowd.of(target, DENSE)
    target.seq_drafts_off(1)
    while (result := run.step(60)).n_steps == 60:
        pass
    assert result.entries["flags"].tolist() == [0, ResultFlag.DRAFT_COLD, 0]
    target.close()


def test_a_failure_within_a_run_ends_its_own_sequence() -> None:
    ids = range(model().n_vocab)
    banned = tuple((i, -math.inf) for i in ids if model().token_bytes(i).startswith(b"Q"))
    dead_end = SamplingParams(temperature=0.0, grammar='root ::= "abcabcQ"', logit_bias=banned)
    run, alone = Crowd.of(engine(), DENSE, (GREEDY, dead_end)), Crowd.of(engine(), DENSE, (GREEDY,))
    result = run.step(20)
    statuses = [Status(status) for status in result.entries["status"]]
    assert statuses == [Status.OK, Status.NO_TOKEN_ALLOWED]
    assert 1 < result.n_steps < 20
    assert len(run.outputs[1]) > 1, "what it had emitted before is told"
    alone.step(result.n_steps)
    assert run.outputs[0] == alone.outputs[0]
    run.target.close()
    alone.target.close()


def test_a_fault_in_the_first_step_is_told_as_of_one_step() -> None:
    run = Crowd.of(engine(), DENSE)
    run.target.inject_fault(Fault.DECODE_NO_ROOM)
    result = run.step(8)
    assert result.n_steps == 1
    assert result.entries["status"].tolist() == [Status.NO_ROOM] * 3
    run.target.close()


def test_interrupt_ends_one_run() -> None:
    run = Crowd.of(engine(), DENSE)
    run.target.interrupt()
    assert run.step(8).n_steps == 1, "asked for before it began"
    assert run.step(8).n_steps == 8
    run.target.close()
    run.target.interrupt()  # harmless


def test_interrupt_reaches_a_run_in_flight() -> None:
    """At random moments, until one falls into a run: where it falls is the machine's business."""
    chance = random.Random(1)
    run = Crowd.of(engine(n_ctx_seq=512), DENSE, (GREEDY,))
    before, n_first = time.perf_counter(), run.step(32).n_steps
    step_s = (time.perf_counter() - before) / n_first
    is_over = threading.Event()

    def interrupt() -> None:
        while not is_over.wait(step_s * chance.uniform(1, 16)):
            run.target.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    while not 1 < run.step(32).n_steps < 32:
        if run.target.seq_n_past(0) > 400:
            run.target.seq_end(0)
            run = Crowd.of(run.target, DENSE, (GREEDY,))
    is_over.set()
    thread.join()
    run.target.close()


BAD: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "negative": ([(0, 0, 0, 1, 0, 1)], -1),
    "too many": ([(0, 0, 0, 1, 0, 1)], 65),
    "with a draft": ([(0, 0, 0, 1, 2, 1), (1, 0, 1, 1, 0, 1)], 2),
    "with a piece of a prompt": ([(0, 0, 0, 1, 0, 1), (2, 0, 1, 1, 0, 0)], 2),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_runs_are_refused_and_change_nothing(case: str) -> None:
    run = Crowd.of(engine("mtp"), DENSE, (GREEDY, GREEDY))
    rows, n_steps = BAD[case]
    run.target.seq_begin(2, sampler())
    n_past = [run.target.seq_n_past(i) for i in range(3)]
    entries: list[Any] = [(row[0], n_past[row[0]], *row[2:]) for row in rows]
    last = [output[-1] for output in run.outputs]
    with pytest.raises(BadPlan, match=r"run|n_steps"):
        run.target.step(plan(*entries), last, n_steps=n_steps)
    assert [run.target.seq_n_past(i) for i in range(3)] == n_past
    run.target.close()


def test_rows_of_numbers_are_the_arrays() -> None:
    arrays, rows = (Crowd.of(engine("mtp"), DENSE) for _ in range(2))
    for n_draft, n_steps in ((3, 1), (0, 4), (2, 1)):
        last = [output[-1] for output in rows.outputs]
        entries = [(i, rows.target.seq_n_past(i), i, 1, n_draft, 1) for i in range(3)]
        given = [0, 3, 1] if n_draft else []
        expected = arrays.target.step(
            plan(*entries), [*last, 5], np.array([given][: bool(given)], np.int32).reshape(-1, 3)
            .view(DRAFT_DTYPE)[:, 0], n_steps,
        )  # fmt: skip
        flat = [number for entry in entries for number in entry]
        found = rows.target.step_rows(flat, [*last, 5], given, n_steps, has_logprobs=True)
        assert found.entries == [tuple(map(int, entry)) for entry in expected.entries]
        assert found.tokens == expected.tokens.tolist()
        np.testing.assert_array_equal(found.logprobs, expected.logprobs)
        assert (found.n_steps, found.n_batch_tokens) == (n_steps, expected.n_batch_tokens)
        assert found.t_total_us > 0
        arrays.take(expected)
        for seq_id, _, _, start, n, *_ in found.entries:
            rows.outputs[seq_id] += found.tokens[start : start + n]
    assert rows.outputs == arrays.outputs
    arrays.target.close()
    rows.target.close()


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        (([0, 0, 0, 1, 0], [5], []), InvalidArgument),  # five numbers
        (([0, 0, 0, 1, 0, 0], [5], [1, 2]), InvalidArgument),
        (([0, 0, 0, 1, 0, 0], [2**31], []), InvalidArgument),
        (([0, -(2**70), 0, 1, 0, 0], [5], []), InvalidArgument),
        (([0, 0, 0, 1, 0, 0], ["5"], []), TypeError),
        (([0, 0, 0, 1.5, 0, 0], [5], []), TypeError),
        (((0, 0, 0, 1, 0, 0), [5], []), TypeError),
        (([0, 0, 1, 1, 0, 0], [5], []), BadPlan),  # beyond the tokens
        (([], [], [0, 0, 1]), BadPlan),  # a draft for nobody
    ],
)
def test_bad_rows_are_refused_and_change_nothing(
    numbers: tuple[Any, Any, Any], error: type[Exception]
) -> None:
    target = engine()
    target.seq_begin(0, sampler())
    with pytest.raises(error):
        target.step_rows(*numbers)
    assert target.seq_n_past(0) == 0
    assert target.step_rows([0, 0, 0, 1, 0, 0], [5], []).entries[0][2] == 1
    target.close()


def test_rows_that_grow_while_they_are_read_write_nothing_beyond() -> None:
    tokens = [5]

    class Growing:
        def __index__(self) -> int:
            tokens.extend([7] * 10_000)
            return 0

    class Shrinking:
        def __index__(self) -> int:
            tokens.clear()
            return 0

    target = engine()
    target.seq_begin(0, sampler())
    entries: list[Any] = [Growing(), 0, 0, 1, 0, 0]
    assert target.step_rows(entries, tokens, []).entries[0][2] == 1
    entries = [Shrinking(), 1, 0, 1, 0, 0]
    with pytest.raises(IndexError):
        target.step_rows(entries, tokens, [])
    assert target.seq_n_past(0) == 1
    target.close()
