"""The target gives the drafter's hidden rows only while somebody is fed, which no draft can tell.

What a sequence drafts after it is turned on again is compared, to the token, with an engine in
which another sequence, in steps of its own, has kept the rows on all the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.hand import DENSE, HYBRID, TEXTS, emitted, engine, plan, sampler, tokens_of

from drafthouse_engine import BadPlan, DraftType, Engine

N_UNFED = 8
"""Decodes in a row that feed nobody before the rows are turned off."""
K = 3
KEEPER, FOLLOWER = 0, 1

Record = list[tuple[int, int, list[int]]]
"""Per step: drafted, accepted, emitted."""

CASES: dict[str, tuple[DraftType, str]] = {
    "dense-mtp": ("mtp", DENSE),
    "dense-eagle3": ("eagle3", DENSE),
    "hybrid-mtp": ("mtp", HYBRID),
    "hybrid-eagle3": ("eagle3", HYBRID),
}

pytestmark = pytest.mark.model


def make(case: str, **fields: int) -> Engine:
    draft_type, name = CASES[case]
    return engine(draft_type, name, n_draft_max=K, **fields)


@pytest.fixture(params=list(CASES))
def target(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make(request.param) as made:
        yield made


class Stream:
    """A sequence that steps alone."""

    def __init__(self, target: Engine, seq_id: int, text: str, *, is_fed: bool = True) -> None:
        self.target, self.seq_id = target, seq_id
        target.seq_begin(seq_id, sampler(name=HYBRID if "qwen35" in target.target.path else DENSE))
        if not is_fed:
            target.seq_drafts_off(seq_id)
        prompt = tokens_of(text)
        result = target.step(plan((seq_id, 0, 0, len(prompt), 0, 1)), prompt)
        self.n_past, self.last = len(prompt), emitted(result, 0)[-1]

    @classmethod
    def at(cls, target: Engine, seq_id: int, n_past: int, last: int) -> Stream:
        """Returns a stream over a sequence that is there."""
        stream = object.__new__(cls)
        stream.target, stream.seq_id, stream.n_past, stream.last = target, seq_id, n_past, last
        return stream

    def run(self, n_steps: int, n_draft: int) -> Record:
        record: Record = []
        for _ in range(n_steps):
            result = self.target.step(
                plan((self.seq_id, self.n_past, 0, 1, n_draft, 1)), [self.last]
            )
            entry, tokens = result.entries[0], emitted(result, 0)
            record.append((int(entry["n_drafted"]), int(entry["n_accepted"]), tokens))
            self.n_past, self.last = int(entry["n_past"]), tokens[-1]
        return record


def n_accepted(record: Record) -> int:
    return sum(accepted for _, accepted, _ in record)


@pytest.mark.parametrize("case", list(CASES))
def test_drafts_after_a_drafts_on_are_those_of_an_engine_whose_rows_stayed_on(case: str) -> None:
    records = []
    for is_kept in (True, False):
        with make(case) as target:
            keeper = Stream(target, KEEPER, TEXTS[2])
            follower = Stream(target, FOLLOWER, TEXTS[1])
            record = []
            for _ in range(2):  # off and on again, twice
                target.seq_drafts_off(FOLLOWER)
                for _ in range(N_UNFED + 4):
                    record += follower.run(1, 0)
                    if is_kept:
                        keeper.run(1, 0)
                target.seq_drafts_on(FOLLOWER)
                record += follower.run(8, 0)  # of the shape of the steps before: their graph
                record += follower.run(16, K)
            records.append(record)
    assert records[0] == records[1]
    assert n_accepted(records[1]) > 12, "drafts are accepted"


def test_rows_come_back_with_the_next_decode_that_feeds_somebody(target: Engine) -> None:
    """By hand, right before they go off and right after."""
    for n_before in (N_UNFED - 2, N_UNFED - 1, N_UNFED):
        stream = Stream(target, FOLLOWER, TEXTS[0])
        target.seq_drafts_off(FOLLOWER)
        stream.run(n_before, 0)
        target.decode([stream.last], [stream.n_past], [FOLLOWER], [True])
        with pytest.raises(BadPlan, match="has not been processed"):
            target.seq_drafts_on(FOLLOWER)  # that batch may have no rows for it
        target.process()
        assert target.seq_is_cold(FOLLOWER)
        target.seq_drafts_on(FOLLOWER)
        target.decode([target.sample(FOLLOWER, 0)], [stream.n_past + 1], [FOLLOWER], [True])
        target.process()
        assert not target.seq_is_cold(FOLLOWER), "fed again from the next tokens on"
        target.seq_end(FOLLOWER)


def test_a_sequence_that_begins_where_nobody_was_fed_drafts_as_in_a_new_engine(
    target: Engine,
) -> None:
    expected = Stream(target, FOLLOWER, TEXTS[1]).run(24, K)
    target.seq_end(FOLLOWER)
    Stream(target, KEEPER, TEXTS[2], is_fed=False).run(N_UNFED + 4, 0)
    assert Stream(target, FOLLOWER, TEXTS[1]).run(24, K) == expected
    assert n_accepted(expected) > 8


def test_prompts_of_sequences_that_are_turned_off_are_computed_without_rows_to_the_same_tokens(
    target: Engine,
) -> None:
    outputs = []
    for is_fed in (True, False):
        record: Record = []
        for _ in range(3):  # the third prompt of unfed ones finds the rows off
            stream = Stream(target, FOLLOWER, TEXTS[1], is_fed=is_fed)
            record = stream.run(N_UNFED, 0)
            target.seq_end(FOLLOWER)
        outputs.append([tokens for _, _, tokens in record])
    assert outputs[0] == outputs[1]


def test_a_snapshot_of_a_sequence_without_drafts_is_turned_on_as_the_sequence_is(
    target: Engine,
) -> None:
    """Saved while the rows are off, and loaded while they are."""
    stream = Stream(target, FOLLOWER, TEXTS[1])
    target.seq_drafts_off(FOLLOWER)
    stream.run(N_UNFED + 4, 0)
    snapshot = target.save(FOLLOWER)
    copy = Stream.at(target, FOLLOWER, stream.n_past, stream.last)
    target.seq_drafts_on(FOLLOWER)
    expected = stream.run(24, K)
    target.seq_end(FOLLOWER)
    Stream(target, KEEPER, TEXTS[2], is_fed=False).run(N_UNFED + 4, 0)
    target.load(FOLLOWER, snapshot)
    target.seq_drafts_on(FOLLOWER)
    assert copy.run(24, K) == expected
    assert n_accepted(expected) > 4


@pytest.mark.parametrize("is_fed", [True, False], ids=["fed", "turned off"])
@pytest.mark.parametrize("case", ["dense-mtp", "dense-eagle3"])  # the others cannot be copied
def test_a_fork_of_a_prompt_drafts_the_same_whether_the_rows_went_off_or_not(
    case: str, is_fed: bool
) -> None:
    """Of a fed one: MTP goes on from the prompt's hidden row, kept while it was there."""
    prompt = tokens_of(TEXTS[1])
    n_kept = len(prompt) - 1
    records = []
    for is_off in (False, True):
        with make(case) as target:
            target.seq_begin(FOLLOWER, sampler())
            if not is_fed:
                target.seq_drafts_off(FOLLOWER)
            target.step(plan((FOLLOWER, 0, 0, len(prompt), 0, 0)), prompt)
            if is_off:
                Stream(target, KEEPER, TEXTS[2], is_fed=False).run(N_UNFED + 4, 0)
            target.fork(FOLLOWER, {2: sampler()}, n_kept)
            assert target.seq_is_cold(2) != is_fed
            target.seq_drafts_on(2)
            result = target.step(plan((2, n_kept, 0, 1, 0, 1)), prompt[-1:])
            fork = Stream.at(target, 2, len(prompt), emitted(result, 0)[0])
            records.append(fork.run(24, K))
    assert records[0] == records[1]
    assert n_accepted(records[0]) > 8


@pytest.mark.parametrize("case", ["dense-mtp", "dense-eagle3"])  # the others cannot be copied
def test_cells_that_are_copied_while_the_rows_are_off_change_no_draft(case: str) -> None:
    """llama.cpp reserves its graphs anew then: without room for rows that come later."""
    prompt = tokens_of(TEXTS[2])
    records = []
    for is_copied in (False, True):
        with make(case) as target:
            stream = Stream(target, FOLLOWER, TEXTS[1])
            target.seq_drafts_off(FOLLOWER)
            stream.run(2, 0)
            if is_copied:
                Stream(target, KEEPER, TEXTS[2], is_fed=False).run(N_UNFED + 4, 0)
                target.fork(KEEPER, {2: sampler()}, len(prompt) - 1)
                target.step(plan((2, len(prompt) - 1, 0, 1, 0, 1)), prompt[-1:])
            target.seq_drafts_on(FOLLOWER)
            records.append(stream.run(24, K))
    assert records[0] == records[1]
    assert n_accepted(records[0]) > 8
