"""One token stream: what counts, when it ends, and that it ends once."""

from __future__ import annotations

import pytest

from drafthouse_server.errors import EngineError
from drafthouse_server.scheduling.sequence import FinishReason, Request, Sequence, SequenceState
from drafthouse_server.step import ResultEntry, SequenceStatus


def make(n_output_max: int = 100, stop_token_ids: frozenset[int] = frozenset()) -> Sequence:
    request = Request("r1", [1, 2, 3], stop_token_ids=stop_token_ids, received_at=10.0)
    return Sequence(request, object(), n_output_max=n_output_max)


def answer(
    *tokens: int, n_drafted: int = 0, n_accepted: int = 0, is_eog: bool = False
) -> ResultEntry:
    return ResultEntry(
        0,
        SequenceStatus.OK,
        0,
        tokens,
        tuple(-token / 10 for token in tokens),
        n_drafted,
        n_accepted,
        is_eog,
    )


@pytest.mark.parametrize(
    ("n_output_max", "stops", "is_eog", "kept", "reason"),
    [
        (100, (), False, (7, 8, 9), None),
        (100, (), True, (7, 8, 9), FinishReason.STOP),
        (100, (8,), False, (7, 8), FinishReason.STOP),
        (100, (9, 7), False, (7,), FinishReason.STOP),
        (3, (), False, (7, 8, 9), FinishReason.LENGTH),
        (3, (), True, (7, 8, 9), FinishReason.STOP),
        (2, (), True, (7, 8), FinishReason.LENGTH),
        (2, (9,), False, (7, 8), FinishReason.LENGTH),
        (2, (8,), False, (7, 8), FinishReason.STOP),
    ],
)
def test_tokens_after_the_end_are_dropped(
    n_output_max: int,
    stops: tuple[int, ...],
    is_eog: bool,
    kept: tuple[int, ...],
    reason: FinishReason | None,
) -> None:
    sequence = make(n_output_max, frozenset(stops))
    event, found = sequence.extend(answer(7, 8, 9, is_eog=is_eog), now=1.0)
    assert tuple(event.tokens) == kept
    assert tuple(event.logprobs) == tuple(-token / 10 for token in kept)
    assert found is reason
    assert sequence.output == list(kept)
    assert sequence.tokens == [1, 2, 3, *kept]


def test_counts_are_one_subtraction() -> None:
    sequence = make()
    assert (sequence.n_target, sequence.n_pending, sequence.n_output) == (3, 3, 0)
    sequence.n_computed = 3
    sequence.extend(answer(7, 8), now=1.0)
    assert (sequence.n_target, sequence.n_pending, sequence.n_output) == (5, 2, 2)
    assert sequence.n_output_left == 98


def test_speculation_is_counted_by_position() -> None:
    sequence = make()
    sequence.extend(answer(1), now=1.0)
    sequence.extend(answer(1, 2, 3, n_drafted=3, n_accepted=2), now=1.0)
    sequence.extend(answer(1, n_drafted=1, n_accepted=0), now=1.0)
    sequence.extend(answer(1, 2, n_drafted=4, n_accepted=1), now=1.0)
    counts = sequence.tally.counts
    assert (counts.n_steps, counts.n_drafts, counts.n_drafted, counts.n_accepted) == (4, 3, 8, 3)
    assert counts.n_accepted_by_position == (2, 1, 0, 0)


def test_timings_follow_the_request() -> None:
    sequence = make()
    assert sequence.timings.first_token_s == 0.0
    sequence.clock.slot_at = 11.0
    sequence.extend(answer(1), now=13.0)
    sequence.extend(answer(1), now=17.5)
    timings = sequence.timings
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 2.0, 4.5)
    assert timings.first_token_s == 3.0


def test_state_is_derived() -> None:
    waiting, running, preempted, finished = make(), make(), make(), make()
    preempted.swap.is_preempted = True
    running.seq_id = 0
    finished.seq_id = 0
    event = finished.finish(FinishReason.STOP)
    assert [sequence.state for sequence in (waiting, running, preempted, finished)] == list(
        SequenceState
    )
    assert finished.terminal is event
    assert event.reason is FinishReason.STOP


def test_a_second_end_is_a_bug() -> None:
    sequence = make()
    error = EngineError("DECODE_FAILED")
    assert sequence.fail(error).error is error
    with pytest.raises(AssertionError):
        sequence.finish(FinishReason.STOP)
    with pytest.raises(AssertionError):
        sequence.fail(error)
