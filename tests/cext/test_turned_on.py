"""Sequences are turned off from the drafter and turned on again where it is hardest.

Beside external drafts, between the calls of a round by hand, and before they are moved.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.cext.test_cext_snapshots import drafter_state_at
from tests.support.hand import (
    DENSE,
    GREEDY,
    HYBRID,
    TEXTS,
    emitted,
    engine,
    plan,
    sampler,
    started,
    tokens_of,
)

from drafthouse_engine import DRAFT_DTYPE, BadPlan, DraftType, Engine, SamplingParams, Start

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

K = 3
TOKENS = tokens_of(TEXTS[1])


def begin(target: Engine, seq_id: int = 0) -> list[int]:
    """Begins a sequence anew with a prompt; returns the token that it emitted."""
    target.seq_end(seq_id)
    target.seq_begin(seq_id, sampler(GREEDY))
    return emitted(target.step(plan((seq_id, 0, 0, len(TOKENS), 0, 1)), TOKENS), 0)


def go_on(target: Engine, output: list[int], n: int, k: int = K) -> int:
    """Extends an output to n tokens at least; returns how many tokens were drafted for it."""
    n_drafted = 0
    while len(output) < n:
        result = target.step(plan((0, target.seq_n_past(0), 0, 1, k, 1)), output[-1:])
        n_drafted += int(result.entries[0]["n_drafted"])
        output += emitted(result, 0)
    return n_drafted


@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple"])
@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_a_given_draft_is_taken_or_left_in_the_step_that_feeds_the_drafter_again(
    draft_type: DraftType, name: str
) -> None:
    """In a slot that never drafted llama.cpp ended the process once the draft was accepted."""
    with engine(draft_type, name, n_draft_max=K, exact=True) as target:
        target.seq_begin(0, sampler(GREEDY, name))
        target.seq_drafts_off(0)
        result = target.step(plan((0, 0, 0, len(TOKENS), 0, 1)), TOKENS)
        expected = emitted(result, 0)
        go_on(target, expected, 12)
        target.seq_end(0)
        target.seq_begin(0, sampler(GREEDY, name))
        target.seq_drafts_off(0)
        output = emitted(target.step(plan((0, 0, 0, len(TOKENS), 0, 1)), TOKENS), 0)
        target.seq_drafts_on(0)
        given = np.array([(0, 1, K)], DRAFT_DTYPE)
        result = target.step(plan((0, len(TOKENS), 0, 1, K, 1)), expected[: 1 + K], given)
        output += emitted(result, 0)
        assert not target.seq_is_cold(0)
        assert go_on(target, output, 12) > 0
        assert output[:12] == expected[:12]


@pytest.mark.parametrize("draft_type", ["ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"])
def test_an_ngram_drafter_is_turned_on(draft_type: DraftType) -> None:
    with engine(draft_type, n_draft_max=K) as target:
        output = begin(target)
        target.seq_drafts_off(0)
        assert go_on(target, output, 40) == 0
        target.seq_drafts_on(0)
        assert not target.seq_is_cold(0)
        assert go_on(target, output, 120) > 0


@pytest.mark.parametrize("how", ["kept", "copied", "forked", "saved"])
def test_a_sequence_is_moved_before_its_drafter_is_fed_again(how: str) -> None:
    """It is fed where the sequence goes on."""
    with engine("mtp", n_draft_max=K, exact=True) as target:
        begin(target, 1)
        target.seq_drafts_off(1)
        target.seq_drafts_on(1)
        if how == "kept":
            started(target, Start(1, sampler(GREEDY), 5))
        elif how == "copied":
            started(target, Start(0, sampler(GREEDY), 5, source=1))
        elif how == "forked":
            target.fork(1, {0: sampler(GREEDY)}, 5)
        else:
            target.load(0, target.save(1))
        seq_id = 1 if how == "kept" else 0
        assert target.seq_is_cold(seq_id)
        n_past = target.seq_n_past(seq_id)
        token = target.seq_id_last(0) if how == "saved" else 5
        target.step(plan((seq_id, n_past, 0, 1, 0, 1)), [token or 0])
        assert not target.seq_is_cold(seq_id)


def test_what_waits_for_process_is_not_for_a_drafter_that_is_turned_on() -> None:
    """After a rollback the batch lies beyond the end, up to which a draft model would read."""
    with engine("simple") as target:
        target.seq_begin(0, sampler(GREEDY))
        target.decode(TOKENS, range(len(TOKENS)), [0] * len(TOKENS), [False] * len(TOKENS))
        target.process()
        target.decode([5], [len(TOKENS)], [0], [False])
        target.rollback(0, 4)
        with pytest.raises(BadPlan, match="process"):
            target.seq_drafts_on(0)
        assert target.seq_n_past(0) == 4
        target.process()
        target.seq_drafts_on(0)
        target.decode([6], [4], [0], [False])
        target.process()
        assert not target.seq_is_cold(0)


def draws(blob: bytes) -> bytes:
    """Returns the end of the drafter's state in a snapshot: of its random numbers."""
    at = drafter_state_at(blob)
    return blob[at : at + int.from_bytes(blob[at - 8 : at], "little")][-1000:]


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_the_draws_of_a_drafter_go_on_where_they_were(name: str) -> None:
    """Begun anew from its seed it drew the same again: the output was the target's no more."""
    with engine("mtp", name, n_draft_max=K, probabilistic=True) as target:
        target.seq_begin(0, sampler(SamplingParams(temperature=1.0, seed=7), name))
        output = emitted(target.step(plan((0, 0, 0, len(TOKENS), 0, 1)), TOKENS), 0)
        first = draws(target.save(0))
        assert go_on(target, output, 12) > 0
        before = draws(target.save(0))
        assert before != first, "it has drawn, or the test says nothing"
        target.seq_drafts_off(0)
        go_on(target, output, len(output) + 1, 0)
        target.seq_drafts_on(0)
        go_on(target, output, len(output) + 1, 0)
        assert not target.seq_is_cold(0)
        assert draws(target.save(0)) == before
