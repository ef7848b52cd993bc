"""Prompts that come together and begin alike: one computes that, the others wait for it.

In virtual time. A step takes 10 ms and 1 ms a token.
"""

from __future__ import annotations

import dataclasses
from hashlib import blake2b

import pytest
from tests.support.clocked import LIMITS, Clocked, numbers

from drafthouse_server.scheduling import placement
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE
from drafthouse_server.scheduling.sequence import (
    FinishEvent,
    FinishReason,
    Request,
    Sequence,
    SequenceState,
)
from drafthouse_server.step import SamplingOptions
from drafthouse_server.tenancy.fairness import Fairness

EIGHT = dataclasses.replace(LIMITS, n_seq_max=8, n_ctx=8 * 4096, n_outputs_max=8)
SHARED = numbers(600)
KINDS = pytest.mark.parametrize("is_recurrent", [False, True], ids=["dense", "recurrent"])


def prompts(n: int, n_rest: int = 50) -> list[list[int]]:
    """Returns prompts that begin alike and part from one another with their next token."""
    return [[*SHARED, i, *numbers(n_rest, 3 + i)] for i in range(n)]


def finish(clocked: Clocked, together: list[Sequence]) -> None:
    for sequence in together:
        clocked.finish(sequence)


def alone(prompt: list[int], n_output: int = 2) -> list[int]:
    clocked = Clocked(EIGHT)
    return clocked.finish(clocked.add(prompt, n_output)).output


def check_idle(clocked: Clocked) -> None:
    """Nobody waits for anything, and nobody has a slot."""
    clocked.step()
    assert clocked.scheduler.is_idle
    assert not clocked.scheduler._slots.leads


@KINDS
@pytest.mark.parametrize("n", [2, 8, 20])
def test_what_all_begin_with_is_computed_once(n: int, *, is_recurrent: bool) -> None:
    """More than there are slots, too: those that come later find it, as ever."""
    clocked = Clocked(EIGHT, is_recurrent=is_recurrent)
    together = [clocked.add(prompt) for prompt in prompts(n)]
    finish(clocked, together)
    n_shared = 600 if not is_recurrent else 600 - 600 % BLOCK_SIZE
    assert [sequence.n_reused for sequence in together] == [0, *[n_shared] * (n - 1)]
    assert clocked.n_computed == 651 + (n - 1) * (651 - n_shared) + n  # each computed one output
    assert [s.output for s in together] == [alone(prompt) for prompt in prompts(n)]
    counts = clocked.scheduler.counts
    assert counts.n_prefix_lookups == n
    assert counts.n_reused == n_shared * (n - 1)
    check_idle(clocked)


def test_a_block_is_hashed_once_for_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is looked for, noted and kept: a long prompt has thousands of blocks."""
    n_hashed = 0

    def counted(data: bytes, *, digest_size: int) -> object:
        nonlocal n_hashed
        n_hashed += 1
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr("drafthouse_server.scheduling.sequence.blake2b", counted)
    clocked = Clocked(EIGHT)
    for i in range(4):  # the same prompt as before, and the first 300 tokens of it
        clocked.finish(clocked.add([*SHARED, 5] if i % 2 else [*SHARED[:300], 7], 20))
    assert clocked.scheduler.counts.n_prefix_hits
    n_blocks = [(n + 20) // BLOCK_SIZE for n in (301, 601, 301, 601)]
    assert n_hashed <= sum(n_blocks) + 4  # and each one's owner
    check_idle(clocked)


@KINDS
def test_the_same_prompt_many_times_is_computed_once(*, is_recurrent: bool) -> None:
    clocked = Clocked(EIGHT, is_recurrent=is_recurrent)
    together = [clocked.add(SHARED, 3) for _ in range(8)]
    finish(clocked, together)
    n_reused = 599 if not is_recurrent else 600 - BLOCK_SIZE
    assert [sequence.n_reused for sequence in together[1:]] == [n_reused] * 7
    assert {tuple(sequence.output) for sequence in together} == {tuple(alone(SHARED, 3))}


def test_those_that_share_more_wait_for_one_another() -> None:
    """Questions on two documents, after the same instructions."""
    clocked = Clocked(EIGHT)
    texts = [[*SHARED, 7 + i % 2, *numbers(400, i % 2), i, 1, 2, 3] for i in range(6)]
    together = [clocked.add(text) for text in texts]
    finish(clocked, together)
    assert [sequence.n_reused for sequence in together] == [0, 600, 1001, 1001, 1001, 1001]
    assert [s.output for s in together] == [alone(text) for text in texts]


def test_the_first_token_of_all_comes_sooner() -> None:
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt) for prompt in prompts(8)]
    finish(clocked, together)
    last_s = max(sequence.timings.first_token_s for sequence in together)
    assert last_s < 1.2 * (0.651 + 7 * 0.051)  # without: 8 x 651 ms


@pytest.mark.parametrize(
    ("prompt", "tenant", "end_user", "priority"),
    [
        ([*SHARED, 3, 4], "b", "", 0),
        ([*SHARED, 3, 4], "a", "eve", 0),
        ([*SHARED, 3, 4], "a", "", 1),
        ([4, *SHARED], "a", "", 0),
    ],
    ids=["another tenant's", "another end user's", "one that it goes before", "another beginning"],
)
def test_nobody_waits_for(prompt: list[int], tenant: str, end_user: str, priority: int) -> None:
    clocked = Clocked(EIGHT)
    clocked.add([*SHARED, 1, 2])
    clocked.step()
    clocked.add(prompt, tenant=tenant, end_user=end_user, priority=priority)
    assert len(clocked.step().starts) == 1


def test_a_short_beginning_is_not_worth_a_step() -> None:
    clocked = Clocked(dataclasses.replace(EIGHT, n_ctx_seq=1024))
    for i in range(4):
        clocked.add([*numbers(63), i, 6])
    assert len(clocked.step().starts) == 4


@KINDS
@pytest.mark.parametrize("n_steps", [0, 1, 2, 3])
def test_who_waits_goes_on_when_the_one_that_goes_before_is_cancelled(
    n_steps: int, *, is_recurrent: bool
) -> None:
    clocked = Clocked(EIGHT, is_recurrent=is_recurrent)
    together = [clocked.add(prompt, 20) for prompt in prompts(6)]
    for _ in range(n_steps):
        clocked.step()
    clocked.scheduler.mark(together[0], FinishReason.CANCELLED)
    finish(clocked, together)
    assert [s.output for s in together[1:]] == [alone(prompt, 20) for prompt in prompts(6)[1:]]
    assert all(sequence.n_reused >= 592 for sequence in together[2:])
    check_idle(clocked)


def test_long_prompts_begin_a_few_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked up once more when it begins; all others' streams wait for that."""
    monkeypatch.setattr(placement, "_N_LOOKED_UP", 700)
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt, 20) for prompt in prompts(8)]
    finish(clocked, together)
    n_begun = [len(plan.starts) for plan in clocked.plans if plan.starts]
    assert n_begun == [1, 2, 2, 2, 1]
    assert [sequence.n_reused for sequence in together[1:]] == [600] * 7


@pytest.mark.parametrize("n_other", [15, 16, 17, 40, 599, 600, 601, 700])
def test_what_prompts_have_in_common_is_found_to_the_block(n_other: int) -> None:
    clocked = Clocked(EIGHT)
    for i, n in enumerate((600, n_other, 300, n_other)):
        clocked.scheduler._slots.running[i] = clocked.add([*numbers(900)[:n], 250, 250, i, i])
    mine = clocked.add(numbers(650))
    found = {id(other): n for other, n in clocked.scheduler._slots.alike(mine)}
    for other in clocked.scheduler._slots.running.values():
        pairs = zip(other.tokens, mine.tokens[:-1], strict=False)
        n_alike = next((k for k, (a, b) in enumerate(pairs) if a != b), 649)
        assert found.get(id(other), 0) == n_alike - n_alike % BLOCK_SIZE


@KINDS
def test_one_that_leaves_costs_one_comparison_however_many_wait(
    monkeypatch: pytest.MonkeyPatch, *, is_recurrent: bool
) -> None:
    clocked = Clocked(EIGHT, is_recurrent=is_recurrent)
    together = [clocked.add(prompt, 20) for prompt in prompts(8)]
    clocked.step()
    slots, compared = clocked.scheduler._slots, list[Sequence]()
    alike = slots.alike

    def noting(sequence: Sequence) -> list[tuple[Sequence, int]]:
        compared.append(sequence)
        return alike(sequence)

    monkeypatch.setattr(slots, "alike", noting)
    for i in range(3):
        clocked.scheduler.mark(together[i], FinishReason.CANCELLED)
        clocked.step()
        assert compared == together[1 : i + 2]
        assert {id(lead.sequence) for lead in slots.leads.values()} == {id(together[i + 1])}
    finish(clocked, together)
    assert [s.output for s in together[3:]] == [alone(prompt, 20) for prompt in prompts(8)[3:]]
    assert all(sequence.n_reused >= 592 for sequence in together[4:])
    counters = clocked.scheduler.counters
    n_computed = sum(sequence.n_prompt - sequence.n_reused for sequence in together)
    n_output = sum(sequence.n_output for sequence in together)
    served = n_computed * counters.weights.prompt + n_output * counters.weights.output
    assert counters.of("a") == pytest.approx(served)
    check_idle(clocked)


@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_who_waits_can_be_cancelled(n_steps: int) -> None:
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt, 20) for prompt in prompts(8)]
    for _ in range(n_steps):
        clocked.step()
    for sequence in together[1:7]:
        clocked.scheduler.mark(sequence, FinishReason.CANCELLED)
    finish(clocked, together)
    assert together[7].output == alone(prompts(8)[7], 20)
    assert together[7].n_reused == 600
    check_idle(clocked)


def test_a_slot_of_one_that_waits_is_given_up_first() -> None:
    """It loses nothing: the engine has never heard of it, and it is not counted as preempted."""
    clocked = Clocked(EIGHT, fairness=Fairness(quantum=1.0))
    together = [clocked.add(prompt, 20) for prompt in prompts(8)]
    clocked.step()
    assert len(clocked.scheduler._slots.leads) == 7
    others = [clocked.add([9, 9, i, *numbers(40)], 20, tenant="b") for i in range(3)]
    plan = clocked.step()
    assert [clocked.scheduler.running(start.seq_id) for start in plan.starts] == others[:1]
    assert not plan.swap_outs
    assert clocked.scheduler.counts.n_preempted_now == 0
    assert together[7].state is SequenceState.WAITING
    finish(clocked, [*together, *others])
    assert [s.output for s in together] == [alone(prompt, 20) for prompt in prompts(8)]
    assert [sequence.n_reused for sequence in together[1:]] == [600] * 7
    check_idle(clocked)


def test_those_that_wait_are_charged_like_those_that_compute() -> None:
    """Slots go in turn: a tenant whose prompts begin alike does not take all that are free."""
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt, 20) for prompt in prompts(8, 600)]
    others = [clocked.add([i, *numbers(1200)], 20, tenant="b") for i in range(8)]
    clocked.step()
    held = clocked.scheduler._slots.held()
    assert held == {"a": 5, "b": 3}
    counters = clocked.scheduler.counters
    finish(clocked, [*together, *others])
    served = counters.of("a") - counters.of("b")
    n_computed = 1201 + 7 * 601 - 8 * 1201
    assert served == pytest.approx(n_computed * counters.weights.prompt, abs=1)


def test_a_lost_step_ends_the_one_that_computes_and_nobody_who_waits() -> None:
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt, 20) for prompt in prompts(6)]
    clocked.scheduler.abandon(clocked.scheduler.plan(0.0), RuntimeError("lost"))
    assert together[0].terminal is not None
    finish(clocked, together)
    assert [s.output for s in together[1:]] == [alone(prompt, 20) for prompt in prompts(6)[1:]]
    check_idle(clocked)


def test_a_long_prompt_under_way_lends_what_it_has_computed() -> None:
    """One that comes late waits for no more than is missing, and one that goes first for nothing.

    It goes on from what is there.
    """
    long = [*SHARED, *numbers(3000, 5)]
    clocked = Clocked(EIGHT)
    first = clocked.add(long)
    while first.n_computed < 500:
        clocked.step()
    n_computed = first.n_computed
    urgent = clocked.add([*long[:1500], 1], priority=5)
    clocked.step()
    assert urgent.n_reused == n_computed
    later = clocked.add([*long[:1400], 3, 4, 5])
    finish(clocked, [first, urgent, later])
    assert later.n_reused == 1400
    assert urgent.output == alone([*long[:1500], 1])
    assert later.output == alone([*long[:1400], 3, 4, 5])


def test_who_waits_for_one_that_went_on_from_an_ended_one_goes_on_from_that_one() -> None:
    """The second takes over the first one's slot, and with it what the third waits for."""
    clocked = Clocked(EIGHT)
    together = [clocked.add(prompt, n) for prompt, n in zip(prompts(3), (1, 20, 20), strict=True)]
    finish(clocked, together)
    assert [sequence.n_reused for sequence in together] == [0, 600, 600]


def test_a_slot_that_another_goes_on_from_is_given_to_one_that_waits_after_that() -> None:
    """The last slot: its ended sequence's beginning is copied out of it in the same step."""
    clocked = Clocked()
    ended = clocked.add([*numbers(300, 7), *numbers(300, 9)], 2)
    clocked.finish(ended)
    first = clocked.add([*SHARED, *numbers(2000, 5)], 20)
    clocked.step()
    copying = clocked.add([*numbers(300, 7), 1, 2, 3], 20)
    waiting = clocked.add([*SHARED, 4, 5], 20)
    plan = clocked.step()
    assert clocked.scheduler._slots.leads.keys() == {waiting.seq_id}
    assert [start.source for start in plan.starts] == [waiting.seq_id]
    finish(clocked, [first, copying, waiting])
    assert copying.n_reused == 300
    assert waiting.n_reused == 600
    check_idle(clocked)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("quantum", [1.0, Fairness().quantum])
@pytest.mark.parametrize("n_slots", [3, 4, 8])
def test_tenants_whose_prompts_wait_do_not_take_each_others_slots_in_turn(
    quantum: float, n_slots: int
) -> None:
    """Each gives its charge back as it leaves; so it was its turn again, for ever, in one plan."""
    limits = dataclasses.replace(
        EIGHT, n_seq_max=n_slots, n_ctx=n_slots * 8192, n_ctx_seq=8192, n_outputs_max=n_slots
    )
    clocked = Clocked(limits, fairness=Fairness(quantum=quantum))
    heads = {tenant: numbers(700, i) for i, tenant in enumerate("ab", 3)}
    together = []
    for i in range(6):
        for tenant, head in heads.items():
            together.append(clocked.add([*head, i, *numbers(5000, 7 + i)], 2, tenant))
        clocked.step()
    finish(clocked, together)
    check_idle(clocked)


@pytest.mark.parametrize("is_leader_gone", [False, True], ids=["computed", "gone"])
def test_cells_that_streams_have_grown_into_are_not_given_to_one_that_waited(
    *, is_leader_gone: bool
) -> None:
    """With shared cells the step had more than there are, and ended everybody's streams."""
    n_ctx = 2560
    limits = dataclasses.replace(EIGHT, n_ctx=n_ctx, n_ctx_seq=2048, n_batch=32)
    clocked = Clocked(limits)
    for i in range(6):
        clocked.finish(clocked.add([250, i], 2))  # so answers are thought to be short
    streams = [clocked.add([249, 5, i], 1900, tenant="b") for i in range(6)]
    clocked.step()
    clocked.step()
    head = numbers(1200)
    leader, follower = clocked.add([*head, 1, 2, 3], 2), clocked.add([*head, 4, 5, 6], 2)
    while follower.seq_id < 0:
        clocked.step()
    assert clocked.scheduler._slots.leads
    while is_leader_gone and sum(it.n_computed for it in streams) < n_ctx - 1100:
        clocked.step()
    if is_leader_gone:
        clocked.scheduler.mark(leader, FinishReason.CANCELLED)
    finish(clocked, [leader, follower, *streams])
    assert follower.output == alone([*head, 4, 5, 6])
    check_idle(clocked)


def test_a_deadline_is_met_by_what_another_one_has_computed() -> None:
    """It was ended as too short: 3,000 tokens take longer, but 2,900 of them are there."""
    clocked = Clocked(dataclasses.replace(EIGHT, n_batch=64))
    head = numbers(3000)
    leader = clocked.add([*head, 1, 2])
    while leader.n_computed < 2900:
        clocked.step()
    sampler = clocked.engine.make_sampler(SamplingOptions(temperature=0, ignore_eos=True))
    deadline = clocked.now + 0.5
    request = Request("late", [*head, 3, 4], tenant="a", n_output_max=2, deadline=deadline)
    late = Sequence(request, sampler)
    clocked.scheduler.submit(late)
    clocked.finish(late)
    assert isinstance(late.terminal, FinishEvent)
    assert late.terminal.reason is FinishReason.LENGTH
    assert late.clock.first_token_at < deadline
