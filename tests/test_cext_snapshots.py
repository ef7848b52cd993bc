"""Snapshots: a restored sequence goes on as the saved one did; everything else is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hand import DENSE, EAGLE3, GREEDY, HYBRID, TEXTS, emitted, engine, model, plan, sampler
from tests.hand import tokens_of as ids

from drafthouse_engine import (
    BadPlan,
    BadSeqId,
    Batch,
    Closed,
    DraftRequest,
    DraftType,
    Engine,
    MtpSession,
    NoRoom,
    ProposalPending,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    SessionConfig,
    SnapshotError,
    SnapshotKind,
)

pytestmark = pytest.mark.model

SAMPLED = SamplingParams(
    seed=7,
    temperature=0.9,
    penalty_repeat=1.1,
    penalty_frequency=0.1,
    dry_multiplier=0.5,
    dry_breakers=("\n", ":"),
    xtc_probability=0.5,
    xtc_threshold=0.1,
    logit_bias=((5, -2.0),),
    logprobs=True,
)
GRAMMAR = SamplingParams(
    seed=3, temperature=1.0, grammar='root ::= ([a-z]+ " = " [0-9]+ "\\n")+', logprobs=True
)
TYPES: tuple[DraftType, ...] = (
    "none",
    "mtp",
    "eagle3",
    "simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
REPETITIVE = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = [1, 2, 3]\nx = "


class Round(NamedTuple):
    """What one step did for a sequence."""

    tokens: tuple[int, ...]
    n_drafted: int
    n_accepted: int
    logprobs: tuple[float, ...]


def begin(target: Engine, seq_id: int, text: str, sampling: SamplingParams, name: str) -> None:
    prompt = ids(text)
    target.seq_begin(seq_id, sampler(sampling, name))
    result = target.step(plan((seq_id, 0, 0, len(prompt), 0, 1)), prompt)
    assert not result.entries["status"].any()


def go_on(target: Engine, seq_id: int, n_rounds: int) -> list[Round]:
    """Runs rounds of one sequence from what the engine knows of it alone."""
    rounds = []
    for _ in range(n_rounds):
        id_last = target.seq_id_last(seq_id)
        assert id_last is not None
        row = (seq_id, target.seq_n_past(seq_id), 0, 1, target.limits.n_draft_max, 1)
        result = target.step(plan(row), [id_last])
        entry = result.entries[0]
        assert entry["status"] == 0
        rounds.append(
            Round(
                tuple(emitted(result, 0)),
                int(entry["n_drafted"]),
                int(entry["n_accepted"]),
                tuple(float(x) for x in result.logprobs),
            )
        )
    return rounds


def same(found: Sequence[Round], expected: Sequence[Round]) -> None:
    """Compares rounds exactly; log-probabilities within float rounding."""
    assert [r[:3] for r in found] == [r[:3] for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4, nan_ok=True)


def check_goes_on(draft_type: DraftType, name: str, sampling: SamplingParams, **fields: object) -> None:
    with engine(draft_type, name, **fields) as first, engine(draft_type, name, **fields) as second:
        begin(first, 0, REPETITIVE, sampling, name)
        begin(first, 1, TEXTS[1], GREEDY, name)
        assert first.seq_id_last(0) is not None
        said = [first.seq_id_last(0), *(t for r in go_on(first, 0, 6) for t in r.tokens)][:-1]
        go_on(first, 1, 2)
        snapshot = first.save(0)
        assert first.save(0) == snapshot, "saving changes nothing"
        expected = go_on(first, 0, 12)
        neighbour = first.save(1)

        begin(second, 0, TEXTS[2], sampling, name)  # another sequence has left its traces
        go_on(second, 0, 3)
        second.seq_end(0)
        begin(second, 1, TEXTS[2], GREEDY, name)
        second.load(2, snapshot)
        assert second.seq_tokens(2).tolist() == ids(REPETITIVE) + said
        same(go_on(second, 2, 12), expected)

        first.seq_end(0)
        first.load(0, snapshot)
        assert first.save(0) == snapshot, "a snapshot of the restored one is the same"
        same(go_on(first, 0, 12), expected)
        assert first.save(1) == neighbour, "the neighbour is as it was"
        if draft_type in ("mtp", "eagle3", "simple"):
            assert any(r.n_drafted for r in expected)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", TYPES)
def test_greedy_sequence_goes_on_in_another_place(draft_type: DraftType, name: str) -> None:
    check_goes_on(draft_type, name, GREEDY)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", ["none", "mtp", "eagle3", "simple", "ngram-simple"])
def test_sampled_sequence_goes_on_with_its_random_state(draft_type: DraftType, name: str) -> None:
    check_goes_on(draft_type, name, SAMPLED)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", ["mtp", "simple"])
def test_sampled_drafts_go_on_with_the_drafters_random_state(
    draft_type: DraftType, name: str
) -> None:
    check_goes_on(draft_type, name, SAMPLED, probabilistic=True)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_one_pool_of_cells_for_all(name: str) -> None:
    check_goes_on("mtp", name, SAMPLED, kv_unified=True)


def test_checkpointed_rollbacks(name: str = HYBRID) -> None:
    check_goes_on("mtp", name, GREEDY, n_rs_seq=1)
