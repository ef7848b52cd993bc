"""Snapshots of prefixes beside running streams: which are written, and how long others wait.

In virtual time. A step takes 10 ms and 1 ms a token, a snapshot 30 ms to write and 30 to read.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.support.clocked import LIMITS, MOVE_S, Clocked, n_copied, n_read, numbers

from drafthouse_server.scheduling import preemption
from drafthouse_server.scheduling.checkpoints import HitRates
from drafthouse_server.scheduling.preemption import SnapshotCost
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _slow_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_FIXED_S", 2 * MOVE_S)


@pytest.mark.parametrize(
    ("n_prompt", "is_streaming", "is_saved"),
    [
        (1400, True, False),  # a fiftieth of what it saves is less than it takes, and so is a step
        (1700, True, True),
        (1400, False, True),
        (40, False, False),  # computed again in less time
    ],
)
def test_a_prefix_is_saved_beside_streams_where_it_saves_fifty_times_what_they_wait(
    *, n_prompt: int, is_streaming: bool, is_saved: bool
) -> None:
    clocked = Clocked()
    if is_streaming:
        stream = clocked.add([1, 2, 3], n_output=4000, tenant="stream")
        for _ in range(5):
            clocked.step()
        assert stream.n_output > 0
    clocked.turn(numbers(n_prompt))
    saved = clocked.fill()
    assert bool(saved) is is_saved
    again = clocked.finish(clocked.add([*numbers(n_prompt), 9]))
    assert bool(again.n_reused) is is_saved


@pytest.mark.parametrize(("write_s", "is_saved"), [(0.018, True), (0.026, False)])
def test_streams_wait_two_steps_for_a_snapshot_that_saves_four_times_as_long(
    monkeypatch: pytest.MonkeyPatch, *, write_s: float, is_saved: bool
) -> None:
    """They would wait again and again beside the prompt that is computed once more."""
    monkeypatch.setattr(preemption, "_FIXED_S", 2 * write_s)
    clocked = Clocked()
    clocked.add([1, 2, 3], n_output=4000, tenant="stream")  # its steps take 11 ms
    for _ in range(5):
        clocked.step()
    clocked.turn(numbers(120))
    assert bool(clocked.fill()) is is_saved


def test_what_host_memory_has_already_is_not_what_a_snapshot_saves() -> None:
    """Else each turn of a long conversation would write all of it, however short the turn was."""
    clocked = Clocked()
    said = clocked.turn(numbers(2000))
    assert clocked.fill()
    said = clocked.turn([*said, *numbers(30)])
    assert not clocked.fill()  # 32 tokens more
    said = clocked.turn([*said, *numbers(200)])
    assert clocked.fill()
    last = clocked.finish(clocked.add([*said, 5]))
    assert last.n_reused >= len(said) - 1


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_hosted_tokens_are_those_that_a_sequence_can_go_on_from(*, is_recurrent: bool) -> None:
    prefixes = PrefixCache(can_cut=not is_recurrent, n_host_bytes_max=MIB)
    longer = prefixes.make(0, "a", numbers(100))
    assert prefixes.n_hosted(longer) == 0
    prefixes.store("a", numbers(50), b"x")
    assert prefixes.n_hosted(longer) == (50 if is_recurrent else 50 - 50 % BLOCK_SIZE)
    assert prefixes.n_hosted(prefixes.make(0, "b", numbers(100))) == 0
    shorter = prefixes.make(0, "a", numbers(40))
    assert prefixes.n_hosted(shorter) == (0 if is_recurrent else 40 - 40 % BLOCK_SIZE)
    other = prefixes.make(0, "a", [*numbers(48), *numbers(50, 3)])
    assert prefixes.n_hosted(other) == (0 if is_recurrent else 48)


def hosting(n_chats: int) -> tuple[Clocked, list[list[int]]]:
    """Returns conversations that are in host memory alone."""
    clocked = Clocked()
    chats = [clocked.turn(numbers(400, i)) for i in range(n_chats)]
    clocked.fill()
    clocked.now += 1  # else the last slot is kept for who has just left
    return clocked, chats


def test_who_comes_back_at_once_is_read_in_one_step_after_the_other_beside_a_stream() -> None:
    clocked, chats = hosting(4)
    clocked.add([1, 2, 3], n_output=4000, tenant="stream")
    for _ in range(20):
        clocked.step()
    back = [clocked.add([*chat, 9]) for chat in chats]
    n_before = len(clocked.plans)
    for sequence in back:
        assert clocked.finish(sequence).n_reused >= 400
    read = [n_read(plan) for plan in clocked.plans[n_before:]]
    assert sum(read) == len(chats)
    assert max(read) == 1


def test_with_nobody_generating_they_are_read_at_once() -> None:
    clocked, chats = hosting(3)
    for chat in chats:
        clocked.add([*chat, 9])
    assert n_read(clocked.step()) == 3


def test_a_tenants_snapshots_take_a_quarter_of_the_time_beside_others_streams() -> None:
    """Reused tokens are free: whoever goes round in conversations would stall all for nothing."""
    shares = {}
    for is_streaming in (True, False):
        clocked, chats = hosting(6)
        stream = clocked.add([1, 2, 3], n_output=4000 if is_streaming else 1, tenant="stream")
        for _ in range(20):
            clocked.step()
        started_s, clocked.moved_s = clocked.now, 0.0
        n_round = 40
        for i in range(n_round):
            again = clocked.finish(clocked.add([*chats[i % len(chats)], 9], n_output=1))
            assert again.n_reused >= 400
        shares[is_streaming] = clocked.moved_s / (clocked.now - started_s)
        assert (stream.terminal is None) is is_streaming
    assert shares[True] < 0.27
    assert shares[False] > 0.5


def copying(n_slots: int) -> Clocked:
    """Returns a scheduler of slots with cells of their own, and 0.1 ms for each that is copied."""
    limits = dataclasses.replace(
        LIMITS, n_seq_max=n_slots, n_outputs_max=n_slots, n_ctx=n_slots * LIMITS.n_ctx_seq
    )
    return Clocked(limits, copied_s=1e-4)


def alike(i: int) -> list[int]:
    """Returns prompts of 1,020 tokens of which the first 1,000 are the same."""
    return [*numbers(1000), i, *numbers(19, i)]


def test_a_tenants_copies_take_a_quarter_of_the_time_beside_others_streams() -> None:
    shares = {}
    for is_streaming in (True, False):
        clocked = copying(48)
        clocked.turn(alike(0))
        stream = clocked.add([1, 2, 3], n_output=4000 if is_streaming else 1, tenant="stream")
        for _ in range(20):
            clocked.step()
        started_s, clocked.moved_s = clocked.now, 0.0
        for i in range(40):  # conversations that begin alike, each with one short answer
            begun = clocked.finish(clocked.add(alike(1 + i), n_output=1))
            assert begun.n_reused >= 992
        shares[is_streaming] = clocked.moved_s / (clocked.now - started_s)
        assert (stream.terminal is None) is is_streaming
    assert shares[True] < 0.27
    assert shares[False] > 0.5


def test_streams_do_not_wait_for_the_copies_of_all_that_begin_alike() -> None:
    clocked = copying(9)
    clocked.add([1, 2, 3], n_output=4000)
    for i in range(3):  # the first is computed, the other two tell what a copy takes
        clocked.turn(alike(i))
    n_before = len(clocked.plans)
    begun = [clocked.add(alike(3 + i)) for i in range(5)]
    for sequence in begun:
        assert clocked.finish(sequence).n_reused >= 992
    copied = [n_copied(plan) for plan in clocked.plans[n_before:]]
    assert sum(copied) >= 5 * 992
    assert max(copied) < 2 * 1000


@pytest.mark.parametrize(("n_output", "slot"), [(2, 3), (400, 2)])
def test_a_prefix_is_copied_beside_others_where_its_answer_is_longer_than_the_copy(
    n_output: int, slot: int
) -> None:
    """A gap between slots is a physical batch more in each step; the copy takes 10 of them."""
    clocked = copying(4)
    streams = [clocked.add([1, i], 4000) for i in range(2)]
    short = clocked.add([5] * 20, 2)
    said = clocked.turn(numbers(1000))
    clocked.finish(short)
    for i in range(2):
        clocked.turn(alike(i))  # begins alike: it is copied, to slot 2
    sequence = clocked.add([*said, 9], n_output)
    while sequence.seq_id < 0:
        clocked.step()
    assert [stream.seq_id for stream in streams] == [0, 1]
    assert sequence.n_reused >= 1000
    assert sequence.seq_id == slot


def test_what_a_copy_takes_is_learnt_from_long_ones() -> None:
    cost = SnapshotCost()
    assert cost.copy_s(1000) == 0
    cost.observe_time(0, 0, 1.0, n_copied=10)
    cost.observe_time(0, 0, math.nan, n_copied=1000)
    assert cost.copy_s(1000) == 0
    for _ in range(40):
        cost.observe_time(0, 0, 0.1, n_copied=1000)
    assert cost.copy_s(10) == pytest.approx(0.001)
    for _ in range(40):
        cost.observe_time(0, 0, 0.2, n_copied=1000)
    assert cost.copy_s(1000) == pytest.approx(0.2, rel=0.01)


def test_a_machine_that_stood_still_says_little_of_copies_and_snapshots() -> None:
    """Whoever goes on from a prefix would wait for four times as long, again and again."""
    cost = SnapshotCost()
    cost.observe_time(0, 0, 60.0, n_copied=1000)
    assert cost.copy_s(1000) == 0
    cost.observe_time(0, 0, 0.1, n_copied=1000)
    assert cost.copy_s(1000) == pytest.approx(0.1)
    cost.observe_time(0, 0, 60.0, n_copied=1000)
    assert cost.copy_s(1000) < 0.2
    cost.observe(10, 100 * MIB)
    before_s, read_s = cost.write_s(10), cost.read_s(bytes(MIB))
    cost.observe_time(100 * MIB, 100 * MIB, 60.0)
    assert cost.write_s(10) < 2 * before_s
    assert cost.read_s(bytes(MIB)) < 2 * read_s


def test_a_tenant_does_not_wait_because_others_took_the_slots_of_its_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they held is saved, as it took long to compute; its next request had to pay for it."""
    for name in ("write_s", "read_s"):
        monkeypatch.setattr(SnapshotCost, name, lambda *_: MOVE_S)
    clocked = copying(16)
    for i in range(14):
        clocked.turn(numbers(3000, i))
    for i in range(14):
        clocked.add([100 + i] * 20, n_output=1000, tenant="flood")
    for _ in range(4):
        clocked.step()
    saves = [seq_id for plan in clocked.plans for seq_id in plan.saves]
    assert len(saves) > 5
    n_before = len(clocked.plans)
    clocked.finish(clocked.add([7] * 30, n_output=1))
    assert len(clocked.plans) - n_before < 4


def test_the_speed_of_snapshots_is_learnt_beside_copies_without_their_time() -> None:
    """Who gives up a slot for a copy is written in the same step."""
    alone, beside = SnapshotCost(), SnapshotCost()
    for _ in range(2):
        beside.observe_time(0, 0, 0.1, n_copied=1000)
    for _ in range(40):
        alone.observe_time(100 * MIB, 0, 0.4)
        beside.observe_time(100 * MIB, 0, 0.5, n_copied=1000)
    beside.observe_time(100 * MIB, 0, 0.05, n_copied=1000)  # less than the copy: says nothing
    for cost in (alone, beside):
        cost.observe(10, 100 * MIB)
    assert beside.write_s(10) == pytest.approx(alone.write_s(10))
    assert beside.copy_s(1000) == pytest.approx(0.1)


def test_the_size_of_a_snapshot_is_that_of_its_state_and_of_its_tokens() -> None:
    """By the dearest token seen a hybrid's 400 tokens were thought to take 500 MB: too long."""
    cost = SnapshotCost()
    assert cost.n_bytes(400) == 0
    state, each = 19 * MIB, 10_000
    cost.observe(16, state + 16 * each)
    assert cost.n_bytes(10) >= state
    assert cost.n_bytes(32) == 2 * (state + 16 * each)  # what of it are tokens nobody knows
    for n_tokens in (300, 20, 100, 300, 16):
        cost.observe(n_tokens, state + n_tokens * each)
        assert cost.n_bytes(400) == pytest.approx(state + 400 * each)
        assert cost.n_bytes(16) == pytest.approx(state + 16 * each)
    cost.observe(300, state + 300 * each + 500)  # that of one with a sampler
    assert cost.n_bytes(300) == pytest.approx(state + 300 * each + 500)


def test_the_speed_of_snapshots_is_learnt_from_large_ones() -> None:
    cost = SnapshotCost()
    cost.observe(10, 1000 * MIB)
    before_s = cost.write_s(10)
    cost.observe_time(1, 1, 50.0)  # a step has other costs
    cost.observe_time(100 * MIB, 100 * MIB, 0.0)  # nobody measured
    assert cost.write_s(10) == before_s
    for _ in range(40):
        cost.observe_time(100 * MIB, 0, 0.04)
        cost.observe_time(0, 100 * MIB, 0.01)
    for _ in range(20):
        cost.observe_time(100 * MIB, 100 * MIB, 0.05)  # both in a step, and nothing else to learn
    assert cost.write_s(10) - MOVE_S == pytest.approx(0.4, rel=0.01)
    assert cost.read_s(b"x" * MIB) - MOVE_S == pytest.approx(0.0001, rel=0.01)
    assert cost.total_s(10) - 2 * MOVE_S == pytest.approx(0.5, rel=0.01)
    cost.observe_time(100 * MIB, 0, 1e9)  # a machine that slept
    assert cost.write_s(10) < 100


def test_what_only_both_together_take_is_learnt_in_their_sum() -> None:
    cost = SnapshotCost()
    cost.observe(10, 1000 * MIB)
    for _ in range(60):
        cost.observe_time(100 * MIB, 50 * MIB, 0.03)
    n_read = cost.read_s(b"x" * 50 * MIB) - MOVE_S
    assert (cost.write_s(10) - MOVE_S) / 10 + n_read == pytest.approx(0.03, rel=0.01)


def test_what_conversations_begin_with_is_kept_where_the_second_one_parts_from_the_first() -> None:
    """A state cannot be cut: without that each would compute again what a program tells them all.

    Once: the third and all after it go on from there.
    """
    clocked = Clocked(is_recurrent=True)
    shared = numbers(300)
    reused = []
    for i in range(5):
        first = clocked.finish(clocked.add([*shared, *numbers(100, 3 + i)], n_output=3))
        reused.append(first.n_reused)
    n_branch = 300 - 300 % BLOCK_SIZE
    assert reused == [0, 0, n_branch, n_branch, n_branch]
    held = [p for p in clocked.prefixes._hosted if len(p.tokens) == n_branch]
    assert len(held) == 1
    other = clocked.finish(clocked.add([*shared, *numbers(100, 9)], tenant="b"))
    assert other.n_reused == 0


def test_those_that_come_together_have_what_they_begin_with_written_once() -> None:
    clocked = Clocked(is_recurrent=True)
    together = [clocked.add([*numbers(300), *numbers(100, 3 + i)]) for i in range(6)]
    for sequence in together:
        clocked.finish(sequence)
    n_branch = 300 - 300 % BLOCK_SIZE
    assert [sequence.n_reused for sequence in together] == [0, *[n_branch] * 5]
    held = [p for p in clocked.prefixes._hosted if len(p.tokens) == n_branch]
    assert len(held) == 1
    n_written = sum(len(plan.saves) for plan in clocked.plans)
    assert n_written <= 1 + len(together)  # that one once, besides the last of each


@pytest.mark.parametrize(
    ("n_shared", "n_rest", "n_saved"),
    [
        (40, 100, [124, 124, 124]),  # what they share is too short
        (300, 10, [294]),  # the first one's, before its end, serves all
        (300, 0, [284]),
        (300, 70, [354, 288, 354, 354]),  # and with more before the end, as always
    ],
)
def test_no_checkpoint_is_taken_for_few_tokens_or_twice(
    monkeypatch: pytest.MonkeyPatch, n_shared: int, n_rest: int, n_saved: list[int]
) -> None:
    monkeypatch.setattr(preemption, "_FIXED_S", 0.002)  # else these are too dear
    clocked = Clocked(is_recurrent=True)
    stored: list[int] = []
    store = clocked.prefixes.store

    def noting(tenant: str, tokens: list[int], snapshot: bytes) -> bool:
        stored.append(len(tokens))
        return store(tenant, tokens, snapshot)

    monkeypatch.setattr(clocked.prefixes, "store", noting)
    for i in range(3):
        clocked.finish(clocked.add([*numbers(n_shared), *numbers(n_rest, 3 + i)], n_output=3))
    assert stored == n_saved


@pytest.mark.parametrize("n_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own-cells", "shared-cells"])
def test_a_conversation_that_begins_like_another_takes_nothing_from_it(
    n_slots: int, *, is_shared: bool
) -> None:
    """After the same instructions: in a slot of its own, or the other one's tokens are saved."""
    limits = dataclasses.replace(
        LIMITS, n_seq_max=n_slots, n_outputs_max=n_slots, n_ctx=n_slots * 4096 - 1000 * is_shared
    )
    clocked = Clocked(limits)
    said = [clocked.turn([*numbers(300), i, *numbers(200, i)]) for i in range(5)]
    for text in said:
        later = clocked.finish(clocked.add([*text, 9, 9]))
        assert later.n_reused == len(text) - 1


def one_off(clocked: Clocked, first: int) -> int:
    """Sends 100 prompts that nobody sends again; returns how many snapshots are written."""
    n_before = len(clocked.plans)
    for i in range(first, first + 100):
        clocked.finish(clocked.add([i % 251, i // 251, *numbers(98, i)], tenant="batch"))
    return sum(len(plan.saves) for plan in clocked.plans[n_before:])


def n_reused_later(clocked: Clocked) -> list[int]:
    """Returns what the later turns of a conversation reuse whose slot is taken in between."""
    said, n_reused = clocked.turn(numbers(150, 5), tenant="chat"), []
    for i in range(4):
        clocked.fill("others")
        sequence = clocked.finish(clocked.add([*said, *numbers(40, i)], tenant="chat"))
        said = [*sequence.request.prompt, *sequence.output]
        n_reused.append(sequence.n_reused)
    return n_reused


def test_prompts_that_nobody_sends_again_take_the_cache_from_no_other_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preemption, "_FIXED_S", 0.02)  # a fifth of what 100 tokens take
    clocked = Clocked()
    assert one_off(clocked, 0) >= 8
    assert one_off(clocked, 100) <= 10
    assert min(n_reused_later(clocked)) >= 150


def test_what_was_of_no_use_long_ago_counts_less() -> None:
    rates = HitRates()
    for _ in range(100):
        rates.count("a", is_hit=False)
        rates.count_stored("a")
    assert rates.of("a") < 0.06
    for _ in range(600):
        rates.count("a", is_hit=False)
    assert rates.of("a") > 0.25
    assert rates.of("b") == 0.5
    for _ in range(100):
        rates.count("b", is_hit=True)
        rates.count_stored("b")
    assert rates.of("b") > 0.9
    rates.forget("b")
    assert rates.of("b") == 0.5
