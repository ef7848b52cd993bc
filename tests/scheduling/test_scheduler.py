"""Plans and commits, one rule at a time."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.cost import StepCost
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import ContextTooLong, Draining, EngineError
from drafthouse_server.scheduling.cells import check_context
from drafthouse_server.scheduling.placement import tag_of
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.scheduler import N_NO_ROOM_MAX, Scheduler
from drafthouse_server.scheduling.sequence import (
    ErrorEvent,
    Event,
    FinishEvent,
    FinishReason,
    ProgressEvent,
    Request,
    Sequence,
    SequenceState,
    TokensEvent,
)
from drafthouse_server.step import (
    EngineLimits,
    SamplingOptions,
    SequenceStatus,
    StepPlan,
    StepTimings,
)

LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=4,
    n_ctx=400,
    n_ctx_seq=100,
    n_batch=16,
    n_ubatch=16,
    n_draft_max=4,
    n_outputs_max=20,
)
GREEDY = SamplingOptions(temperature=0)


class Bench:
    """A scheduler and a fake engine, stepped by hand."""

    def __init__(
        self,
        limits: EngineLimits = LIMITS,
        n_draft: int = 0,
        scheduler: dict[str, Any] | None = None,
        policy: DraftPolicy | None = None,
        **fake: object,
    ) -> None:
        self.engine = FakeEngine(limits, **fake)  # type: ignore[arg-type]  # passed on
        options: dict[str, Any] = {"cost": UnknownCost()} | (scheduler or {})
        self.scheduler = Scheduler(limits, policy or FixedDraft(n_draft), **options)
        self.now = 0.0
        self.events: list[tuple[Sequence, Event]] = []
        self.plans: list[StepPlan] = []

    def add(
        self, request_id: str, n_prompt: int = 3, n_output_max: int = 5, **more: object
    ) -> Sequence:
        prompt = [ord(request_id[0])] * n_prompt
        sampler = self.engine.make_sampler(GREEDY)
        request = Request(request_id, prompt, n_output_max=n_output_max, **more)  # type: ignore[arg-type]  # passed on
        sequence = Sequence(request, sampler)
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> StepPlan:
        self.now += 1
        self.events += self.scheduler.reap(self.now)
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        try:
            result = self.engine.step(plan)
        except RuntimeError as error:
            self.events += self.scheduler.abandon(plan, error)
        else:
            self.events += self.scheduler.commit(result, self.now)
        return plan

    def run(self, n_steps_max: int = 200) -> None:
        """Steps until nothing is left to do."""
        for _ in range(n_steps_max):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def ends(self) -> dict[str, Event]:
        terminal = (e for e in self.events if isinstance(e[1], FinishEvent | ErrorEvent))
        return {sequence.request.request_id: event for sequence, event in terminal}


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Returns slot, tokens, K and is_output of each entry."""
    return [(e.seq_id, len(e.tokens), e.n_draft, e.is_output) for e in plan.entries]


def test_a_request_runs_from_prompt_to_limit() -> None:
    bench = Bench()
    sequence = bench.add("a", n_prompt=3, n_output_max=3)
    assert shape(bench.step()) == [(0, 3, 0, True)]
    assert shape(bench.step()) == [(0, 1, 0, True)]
    bench.run()
    end = bench.ends()["a"]
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.LENGTH
    assert len(sequence.output) == 3
    assert bench.engine.n_cells_used == 0
    assert bench.plans[-1].frees == [0]


def test_prompts_are_cut_to_the_budget_and_only_the_last_piece_gives_a_token() -> None:
    bench = Bench()
    bench.add("a", n_prompt=40)
    assert [shape(bench.step()) for _ in range(3)] == [
        [(0, 16, 0, False)],
        [(0, 16, 0, False)],
        [(0, 8, 0, True)],
    ]
    assert len(bench.events) == 1


def test_prompts_share_what_is_left_in_the_order_of_arrival() -> None:
    bench = Bench()
    bench.add("a", n_prompt=10)
    bench.add("b", n_prompt=10)
    bench.add("c", n_prompt=10)
    assert shape(bench.step()) == [(0, 10, 0, True), (1, 6, 0, False)]
    assert shape(bench.step()) == [(0, 1, 0, True), (1, 4, 0, True), (2, 10, 0, True)]


def test_sequences_carry_their_tenant_s_tag() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=2))
    for request_id, tenant in (("a", "one"), ("b", "two"), ("c", "one")):
        bench.add(request_id, tenant=tenant)
    bench.add("d", n_output_max=30, tenant="one")
    bench.run()
    tags = [start.tag for plan in bench.plans for start in plan.starts]
    assert len(tags) == 4
    assert len(set(tags)) == 2
    assert tags.count(tag_of("one")) == 3
    assert all(0 < tag < 2**64 for tag in tags)


def test_the_engine_refuses_another_tenant_s_prefix_that_the_cache_has_found() -> None:
    """A slip of the cache fails closed: the plan is refused, and no tokens are gone on from."""
    prefixes = PrefixCache(can_cut=True)
    bench = Bench(scheduler={"prefixes": prefixes})
    bench.add("a", n_prompt=2 * BLOCK_SIZE, tenant="one")
    bench.run()
    bench.add("a", n_prompt=2 * BLOCK_SIZE, tenant="two")
    find = prefixes.find
    with mock.patch.object(prefixes, "find", lambda _, tokens, __: find("one", tokens)):
        plan = bench.scheduler.plan(bench.now)
    assert plan.starts[0].n_kept == 2 * BLOCK_SIZE - 1
    n_cells = bench.engine.n_cells_used
    with pytest.raises(EngineError, match="BAD_PLAN"):
        bench.engine.step(plan)
    assert bench.engine.n_cells_used == n_cells


def test_streams_go_on_while_a_long_prompt_is_computed() -> None:
    bench = Bench(n_draft=4)
    bench.add("a", n_output_max=50)
    bench.step()
    bench.add("b", n_prompt=90)
    plan = bench.step()
    assert shape(plan) == [(0, 1, 4, True), (1, 11, 0, False)]


def test_drafts_leave_prompts_a_floor() -> None:
    bench = Bench(n_draft=4)
    for name in "abc":
        bench.add(name, n_output_max=50)
    bench.step()
    bench.add("d", n_prompt=90)
    # 16 tokens: 3 last tokens, 4 kept for the prompt, 9 left for drafts.
    assert shape(bench.step()) == [
        (0, 1, 3, True), (1, 1, 3, True), (2, 1, 3, True), (3, 4, 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("requested", "n_batch", "n_outputs_max", "granted"),
    [
        ((4, 4, 4, 4), 20, 20, [4, 4, 4, 4]),
        ((4, 4, 4, 4), 16, 20, [3, 3, 3, 3]),
        ((4, 4, 4, 4), 20, 12, [2, 2, 2, 2]),
        ((0, 1, 4, 4), 10, 20, [0, 1, 2, 3]),
        ((4, 1, 4, 0), 12, 20, [3, 1, 4, 0]),
        ((4, 4, 4, 4), 4, 20, [0, 0, 0, 0]),
    ],
)
def test_too_many_drafts_shrink_from_the_top(
    requested: tuple[int, ...], n_batch: int, n_outputs_max: int, granted: list[int]
) -> None:
    limits = dataclasses.replace(LIMITS, n_batch=n_batch, n_outputs_max=n_outputs_max)
    bench = Bench(limits)
    for name, n_draft in zip("abcd", requested, strict=True):
        bench.add(name, n_prompt=1, n_output_max=50, n_draft=n_draft)
    bench.step()
    assert [entry.n_draft for entry in bench.step().entries] == granted


def test_a_freed_slot_serves_the_next_in_the_same_plan() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=1))
    bench.add("a", n_output_max=1)
    bench.add("b", n_output_max=1)
    bench.step()
    plan = bench.step()
    assert (plan.frees, [start.seq_id for start in plan.starts]) == ([0], [0])
    assert shape(plan) == [(0, 3, 0, True)]


def test_cells_are_reserved_and_nobody_overtakes() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_ctx=120))
    bench.add("a", n_prompt=20, n_output_max=20)  # 44 cells with the draft's headroom
    bench.add("b", n_prompt=60, n_output_max=40)  # 100: bounded by the context of a sequence
    bench.add("c", n_prompt=2, n_output_max=2)
    bench.step()
    assert bench.scheduler.n_running == 1
    assert bench.scheduler.n_waiting == 2
    assert bench.scheduler._ledger.n_reserved == 44
    bench.run()
    started = [s.request.request_id for s, e in bench.events if not isinstance(e, TokensEvent)]
    assert sorted(started) == ["a", "b", "c"]
    assert bench.scheduler._ledger.n_reserved == 0
    assert bench.engine.n_cells_max <= 120


def test_higher_priority_goes_first_and_arrival_decides_inside_one() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=1))
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1), ("e", 5)):
        bench.add(name, n_output_max=1, priority=priority)
    bench.run()
    assert list(bench.ends()) == ["c", "e", "a", "b", "d"]


def test_stop_tokens_inside_a_draft_cut_what_follows() -> None:
    plain = Bench()
    reference = plain.add("a", n_output_max=30)
    plain.run()
    stop = reference.output[12]
    n_kept = reference.output.index(stop) + 1
    bench = Bench(n_draft=4, acceptance=(4,))
    sequence = bench.add("a", n_output_max=30, stop_token_ids=frozenset([stop]))
    bench.run()
    assert sequence.output == reference.output[:n_kept]
    end = bench.ends()["a"]
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.STOP


def test_the_models_end_token_ends_the_sequence() -> None:
    bench = Bench(eog_period=4, n_draft=3)
    sequence = bench.add("a", n_output_max=90)
    bench.run()
    assert bench.engine.is_eog(sequence.output[-1])
    assert not any(bench.engine.is_eog(token) for token in sequence.output[:-1])
    end = bench.ends()["a"]
    assert isinstance(end, FinishEvent)
    assert end.reason is FinishReason.STOP


@pytest.mark.parametrize("n_draft", [0, 1, 4])
def test_the_context_can_be_filled_to_the_last_token(n_draft: int) -> None:
    bench = Bench(n_draft=n_draft, acceptance=(4, 3))
    sequence = bench.add("a", n_prompt=80, n_output_max=20)
    bench.run()
    assert len(sequence.tokens) == LIMITS.n_ctx_seq
    assert isinstance(bench.ends()["a"], FinishEvent)


def test_without_a_limit_the_context_is_the_limit() -> None:
    bench = Bench()
    sequence = Sequence(Request("a", [1] * 90), bench.engine.make_sampler(GREEDY))
    bench.scheduler.submit(sequence)
    bench.run()
    assert sequence.n_output == 10


@pytest.mark.parametrize(("n_prompt", "n_output_max"), [(100, None), (101, 1), (90, 11), (1, 100)])
def test_what_does_not_fit_is_refused(n_prompt: int, n_output_max: int | None) -> None:
    bench = Bench()
    sequence = Sequence(Request("a", [1] * n_prompt, n_output_max=n_output_max), object())
    with pytest.raises(ContextTooLong) as caught:
        bench.scheduler.submit(sequence)
    assert caught.value.context_tokens == 100
    assert bench.scheduler.is_idle


def test_a_small_pool_bounds_the_context() -> None:
    limits = dataclasses.replace(LIMITS, n_ctx=50)
    bench = Bench(limits)
    assert check_context(limits, 40, None) == 10
    with pytest.raises(ContextTooLong):
        check_context(limits, 40, 11)
    bench.add("a", n_prompt=40, n_output_max=10)
    bench.run()


def test_cancelled_sequences_give_back_all_at_the_next_reap() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=1))
    running, waiting = bench.add("a", n_output_max=50), bench.add("b", n_output_max=50)
    bench.step()
    bench.scheduler.mark(running, FinishReason.CANCELLED)
    bench.scheduler.mark(waiting, FinishReason.CANCELLED)
    bench.step()
    assert bench.scheduler.is_idle
    assert bench.engine.n_cells_used == 0
    reasons = [e.reason for e in bench.ends().values() if isinstance(e, FinishEvent)]
    assert reasons == [FinishReason.CANCELLED] * 2


def test_the_first_mark_counts_and_late_marks_are_harmless() -> None:
    bench = Bench()
    sequence = bench.add("a", n_output_max=50)
    bench.step()
    bench.scheduler.mark(sequence, Draining(1.0))
    bench.scheduler.mark(sequence, FinishReason.CANCELLED)
    bench.run()
    end = bench.ends()["a"]
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, Draining)
    bench.scheduler.mark(sequence, FinishReason.CANCELLED)
    assert bench.scheduler.reap(99.0) == []


def test_a_sequence_that_ends_while_marked_ends_once() -> None:
    bench = Bench()
    sequence = bench.add("a", n_output_max=1)
    plan = bench.scheduler.plan(1.0)
    bench.scheduler.mark(sequence, FinishReason.CANCELLED)
    events = bench.scheduler.commit(bench.engine.step(plan), 1.0)
    assert len(events) == 2
    assert bench.scheduler.reap(2.0) == []


def test_deadlines_end_running_and_waiting_sequences() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=1))
    bench.add("a", n_output_max=50, deadline=3.0)
    bench.add("b", n_output_max=50, deadline=2.5)
    bench.add("c", n_output_max=2, deadline=100.0)
    bench.run()
    ends = bench.ends()
    reasons = {n: e.reason for n, e in ends.items() if isinstance(e, FinishEvent)}
    assert reasons == {
        "a": FinishReason.DEADLINE, "b": FinishReason.DEADLINE, "c": FinishReason.LENGTH,
    }  # fmt: skip
    assert bench.now < 8


def test_no_room_is_tried_again_without_a_draft() -> None:
    bench = Bench(n_draft=3)
    sequence = bench.add("a", n_output_max=20)
    bench.step()
    assert shape(bench.step())[0][2] == 3
    before = list(sequence.tokens)
    bench.engine.inject(SequenceStatus.NO_ROOM, n_steps=2)
    bench.step()
    assert sequence.tokens == before
    assert [shape(bench.step())[0][2] for _ in range(3)] == [0, 0, 3]
    bench.run()
    assert isinstance(bench.ends()["a"], FinishEvent)


def test_no_room_for_ever_is_an_error() -> None:
    bench = Bench()
    bench.add("a")
    bench.engine.inject(SequenceStatus.NO_ROOM, n_steps=N_NO_ROOM_MAX)
    bench.run()
    end = bench.ends()["a"]
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, EngineError)
    assert end.error.status == "NO_ROOM"
    assert bench.engine.n_steps == N_NO_ROOM_MAX + 1


@pytest.mark.parametrize("status", [SequenceStatus.DECODE_FAILED, SequenceStatus.SAMPLING_FAILED])
def test_a_failure_ends_one_sequence_and_no_other(status: SequenceStatus) -> None:
    alone = Bench()
    reference = alone.add("b", n_output_max=10)
    alone.run()
    bench = Bench()
    bench.add("a", n_output_max=10)
    other = bench.add("b", n_output_max=10)
    bench.step()
    bench.engine.inject(status, seq_id=0)
    bench.run()
    ends = bench.ends()
    assert isinstance(ends["a"], ErrorEvent)
    assert isinstance(ends["a"].error, EngineError)
    assert ends["a"].error.status == status.value
    assert isinstance(ends["b"], FinishEvent)
    assert other.output == reference.output


def test_a_lost_step_ends_its_sequences_and_frees_their_slots() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=2))
    for name in "abc":
        bench.add(name, n_output_max=5)
    bench.step()
    bench.engine.inject(RuntimeError("boom"))
    bench.step()
    ends = bench.ends()
    assert sorted(ends) == ["a", "b"]
    assert all(isinstance(end, ErrorEvent) for end in ends.values())
    plan = bench.step()
    assert sorted(plan.frees) == [0, 1]
    bench.run()
    assert isinstance(bench.ends()["c"], FinishEvent)
    assert bench.engine.n_cells_used == 0


def test_what_a_lost_plan_gave_back_is_given_back_again() -> None:
    bench = Bench()
    bench.add("a", n_output_max=1)
    bench.step()
    bench.engine.inject(RuntimeError("boom"))
    assert bench.step().frees == [0]
    assert bench.engine.n_cells_used == 3
    assert bench.step().frees == [0]
    assert bench.engine.n_cells_used == 0
    assert bench.scheduler.is_idle


def test_a_cold_draft_stays_off() -> None:
    bench = Bench(n_draft=3)
    bench.add("a", n_output_max=20)
    bench.step()
    bench.engine.step(StepPlan(drafts_off=[0]))  # it is lost
    bench.run()
    depths = [entry.n_draft for plan in bench.plans[1:] for entry in plan.entries]
    assert depths[0] == 3, "nobody can know yet"
    assert set(depths[1:]) == {0}


def test_a_drafter_is_fed_for_those_alone_who_get_drafts() -> None:
    bench = Bench(n_draft=3)
    bench.add("a", n_output_max=20)
    bench.add("none", n_output_max=20, n_draft=0)
    plan = bench.step()
    assert (plan.drafts_off, plan.drafts_on) == ([1], [0])
    bench.run()
    assert 3 in {e.n_draft for p in bench.plans[1:] for e in p.entries if e.seq_id == 0}
    assert not any(plan.drafts_off or plan.drafts_on for plan in bench.plans[1:]), "once is enough"


def test_drafters_are_turned_off_and_turned_on_as_the_policy_turns() -> None:
    bench = Bench(n_draft=3)
    sequence = bench.add("a", n_output_max=60)
    bench.step()
    bench.step()
    policy = bench.scheduler.policy
    with mock.patch.object(policy, "wants", return_value=False):
        policy.epoch += 1
        assert bench.step().drafts_off == [0]
        assert sequence.is_draft_cold
        assert [entry.n_draft for entry in bench.step().entries] == [0]
    policy.epoch += 1
    plan = bench.step()
    assert plan.drafts_on == [0]
    assert [entry.n_draft for entry in plan.entries] == [0], "it is not fed yet"
    assert [entry.n_draft for entry in bench.step().entries] == [3]


def test_an_engine_that_miscounts_is_an_error_and_not_a_wrong_stream() -> None:
    bench = Bench()
    bench.add("a", n_output_max=20)
    result = bench.engine.step(bench.scheduler.plan(1.0))
    wrong = [dataclasses.replace(entry, n_past=entry.n_past + 1) for entry in result.entries]
    events = bench.scheduler.commit(dataclasses.replace(result, entries=wrong), 1.0)
    end = events[-1][1]
    assert isinstance(end, ErrorEvent)
    assert isinstance(end.error, EngineError)
    assert end.error.status == "BAD_RESULT"


@pytest.mark.parametrize("change", [{"n_batch": 3}, {"n_outputs_max": 3}])
def test_a_budget_below_one_token_per_slot_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="n_seq_max"):
        Scheduler(dataclasses.replace(LIMITS, **change), FixedDraft(0), cost=UnknownCost())  # type: ignore[arg-type]  # checked by what is called


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert Bench().scheduler.plan(0.0).is_empty


SHARED = dataclasses.replace(LIMITS, n_ctx=240, n_ctx_seq=140, n_batch=64)


def test_progress_is_told_once_per_step_that_computed_more() -> None:
    bench = Bench()
    bench.add("a", n_prompt=40, has_progress=True)
    bench.add("b", n_prompt=5)
    bench.engine.inject(SequenceStatus.NO_ROOM, seq_id=0)
    bench.run()
    told = [(s.request.request_id, e) for s, e in bench.events if isinstance(e, ProgressEvent)]
    assert told == [("a", ProgressEvent(n, 40)) for n in (16, 32, 40)]
    kinds = [type(e) for s, e in bench.events if s.request.request_id == "a"]
    assert kinds[:4] == [ProgressEvent, ProgressEvent, ProgressEvent, TokensEvent]


def crowded(n_bytes_max: int = 1 << 20, **more: object) -> tuple[Bench, list[Sequence]]:
    """Three sequences of 108 tokens on 240 cells: all begin, as 64 of output seem likely."""
    bench = Bench(SHARED, scheduler={"n_preempted_bytes_max": n_bytes_max}, **more)  # type: ignore[arg-type]  # checked by what is called
    sequences = [bench.add(name, n_prompt=8, n_output_max=100) for name in "abc"]
    return bench, sequences


@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.parametrize("n_bytes_max", [1 << 20, 0])
def test_when_cells_run_out_the_youngest_is_preempted_and_loses_nothing(
    n_bytes_max: int, n_draft: int
) -> None:
    bench, sequences = crowded(n_bytes_max, n_draft=n_draft)
    for _ in range(300):
        if bench.plans and bench.plans[-1].swap_outs:
            break
        bench.step()
    preempted = [s for s in sequences if s.state is SequenceState.PREEMPTED]
    assert [s.request.request_id for s in preempted] == ["c"]  # one is enough
    assert bench.plans[-1].saves == (bench.plans[-1].swap_outs if n_bytes_max else [])
    n_before = preempted[0].n_output
    assert n_before > 0
    bench.run(500)
    counts = bench.scheduler.counts
    assert counts.n_preempted == counts.n_resumed >= 1
    assert (counts.n_recomputed == 0) == (n_bytes_max > 0)
    for sequence in sequences:
        reference = Bench()
        expected = reference.add(sequence.request.request_id, n_prompt=8, n_output_max=90)
        reference.run()
        assert sequence.output[:90] == expected.output
        assert isinstance(bench.ends()[sequence.request.request_id], FinishEvent)
    assert bench.engine.n_cells_max <= SHARED.n_ctx


def test_a_snapshot_that_failed_is_computed_again() -> None:
    bench, sequences = crowded()
    bench.engine.refuse(n_saves=1)
    bench.run(500)
    assert bench.scheduler.counts.n_recomputed > 0
    assert all(s.n_output == 100 for s in sequences)


def test_preempted_time_is_told_apart_from_queueing() -> None:
    bench, sequences = crowded()
    bench.run(500)
    preempted = next(s for s in sequences if s.swap.n_preemptions)
    end = bench.ends()[preempted.request.request_id]
    assert isinstance(end, FinishEvent)
    assert end.timings.queue_s == preempted.clock.slot_at
    assert 0 < end.timings.preempted_s < end.timings.decode_s


@pytest.mark.parametrize("end", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_a_preempted_sequence_can_leave(end: FinishReason) -> None:
    bench, sequences = crowded()
    for _ in range(200):
        if any(s.state is SequenceState.PREEMPTED for s in sequences):
            break
        bench.step()
    preempted = next(s for s in sequences if s.state is SequenceState.PREEMPTED)
    assert bench.scheduler.counts.n_preempted_bytes > 0
    bench.scheduler.mark(preempted, end)
    bench.step()
    event = bench.ends()[preempted.request.request_id]
    assert isinstance(event, FinishEvent)
    assert event.reason is end
    assert event.timings.preempted_s == 1.0
    assert bench.scheduler.counts.n_preempted_bytes == 0
    bench.run(500)


def test_a_lost_step_ends_who_was_about_to_be_preempted_and_no_other() -> None:
    bench, sequences = crowded()
    plan = bench.scheduler.plan(0.0)
    for _ in range(300):
        if plan.swap_outs:
            break
        bench.events += bench.scheduler.commit(bench.engine.step(plan), bench.now)
        plan = bench.scheduler.plan(bench.now)
    n_running = bench.scheduler.n_running
    bench.events += bench.scheduler.abandon(plan, RuntimeError("boom"))
    assert len(bench.ends()) == n_running + 1
    bench.run(500)
    assert bench.engine.n_cells_used == 0
    assert len(bench.ends()) == len(sequences)


def test_higher_priority_takes_a_slot_of_its_own_tenant_only() -> None:
    bench = Bench(dataclasses.replace(LIMITS, n_seq_max=2))
    low = bench.add("a", n_output_max=40, tenant="one")
    other = bench.add("b", n_output_max=40, tenant="two", priority=-50)
    bench.step()
    high = bench.add("c", n_output_max=5, tenant="one", priority=1)
    plan = bench.step()
    assert list(plan.swap_outs) == [0]
    assert (low.state, other.state) == (SequenceState.PREEMPTED, SequenceState.RUNNING)
    bench.run()
    assert high.clock.last_token_at < low.clock.last_token_at
    assert (low.n_output, low.swap.n_preemptions, other.swap.n_preemptions) == (40, 1, 0)


def test_no_room_preempts_others_and_ends_nobody() -> None:
    bench, sequences = crowded()
    bench.step()
    bench.engine.inject(SequenceStatus.NO_ROOM, n_steps=12)
    bench.run(600)
    assert bench.scheduler.counts.n_preempted >= 1
    assert all(isinstance(end, FinishEvent) for end in bench.ends().values())
    assert all(s.n_output == 100 for s in sequences)


def paced(bench: Bench, *, has_prompt: bool) -> list[float]:
    """Runs steps whose time is known, and returns how long those took that carried a stream."""
    spans = []
    for _ in range(60):
        plan = bench.scheduler.plan(bench.now)
        result = bench.engine.step(plan)
        took_s = 0.020 + 0.002 * result.n_batch_tokens
        bench.now += took_s
        result = dataclasses.replace(result, timings=StepTimings(decode_s=took_s, total_s=took_s))
        bench.scheduler.commit(result, bench.now)
        if has_prompt and len(plan.entries) == 1:
            break
        spans.append(took_s)
    return spans


def test_a_long_prompt_is_cut_so_that_running_streams_keep_their_gap() -> None:
    limits = dataclasses.replace(LIMITS, n_ctx=8000, n_ctx_seq=2000, n_batch=512, n_ubatch=512)
    bench = Bench(limits, scheduler={"cost": StepCost()})
    bench.add("a", n_prompt=4, n_output_max=1500)
    bench.add("x", n_prompt=300, n_output_max=1)  # from which the model learns what prompts cost
    unloaded = max(paced(bench, has_prompt=False)[-40:])
    prompt = bench.add("b", n_prompt=500, n_output_max=1)
    spans = paced(bench, has_prompt=True)
    assert prompt.n_output == 1
    assert max(spans) <= 2.6 * unloaded  # twice the 99th percentile, which is not known so well
    assert max(spans) >= 1.3 * unloaded  # what is allowed is used


def test_without_streams_a_prompt_gets_the_whole_budget() -> None:
    bench = Bench(scheduler={"cost": StepCost(), "gap_s": 1e-6})
    bench.add("a", n_prompt=40)
    assert [len(bench.step().entries[0].tokens) for _ in range(3)] == [16, 16, 8]


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_the_next_turn_of_a_conversation_goes_on_from_the_slot(*, is_recurrent: bool) -> None:
    prefixes = PrefixCache(can_cut=not is_recurrent)
    bench = Bench(scheduler={"prefixes": prefixes}, is_recurrent=is_recurrent)
    first = bench.add("a", n_prompt=30, n_output_max=8)
    bench.run()
    assert bench.scheduler.counts.n_retained == 1
    bench.scheduler.submit(
        second := Sequence(Request("b", [*first.tokens, 1, 2]), bench.engine.make_sampler(GREEDY))
    )
    plan = bench.step()
    assert [(s.seq_id, s.n_kept) for s in plan.starts] == [(0, 37)]
    assert shape(plan) == [(0, 3, 0, True)]
    bench.run()
    assert second.n_reused == 37
    alone = Bench()
    alone.scheduler.submit(
        reference := Sequence(
            Request("b", second.request.prompt), alone.engine.make_sampler(GREEDY)
        )
    )
    alone.run()
    assert second.output == reference.output


def test_a_start_that_kept_nothing_is_computed_and_counted_as_such() -> None:
    bench = Bench(scheduler={"prefixes": PrefixCache(can_cut=True)})
    bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    bench.engine.refuse(n_starts=1)
    again = bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    assert again.n_reused == 0
    assert isinstance(again.terminal, FinishEvent)


def test_retained_slots_give_way_to_other_tenants() -> None:
    bench = Bench(scheduler={"prefixes": PrefixCache(can_cut=True)})
    for name in "abcd":
        bench.add(name, n_prompt=30, n_output_max=2)
    bench.run()
    assert bench.scheduler.counts.n_retained == 4
    found = [bench.add(name, n_prompt=30, n_output_max=2, tenant="other") for name in "abcd"]
    bench.run()
    assert [s.n_reused for s in found] == [0] * 4
    assert bench.scheduler.counts.n_prefix_hits == 0


def test_a_start_that_kept_nothing_in_a_step_without_room_for_it_is_noted() -> None:
    limits = dataclasses.replace(LIMITS, n_ctx_seq=100, n_batch=16)
    bench = Bench(limits, scheduler={"prefixes": PrefixCache(can_cut=True)})
    bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    bench.engine.refuse(n_starts=1)
    bench.add("b", n_prompt=90, n_output_max=1, priority=1)  # takes the whole budget
    again = bench.add("a", n_prompt=40, n_output_max=2)
    assert len(bench.step().entries) == 1
    assert again.n_computed == 0
    bench.run()
    assert isinstance(again.terminal, FinishEvent)


ROOMY = dataclasses.replace(LIMITS, n_ctx=8 * 400, n_ctx_seq=400, n_seq_max=8, n_batch=64)


def follow_up(bench: Bench, before: Sequence, more: list[int], **options: object) -> Sequence:
    """Submits the next turn of a conversation."""
    sampler = bench.engine.make_sampler(GREEDY)
    sequence = Sequence(Request("next", [*before.tokens, *more], **options), sampler)  # type: ignore[arg-type]  # checked by what is called
    bench.scheduler.submit(sequence)
    return sequence


def test_a_prefix_beside_nobody_is_copied_to_where_the_others_run() -> None:
    """A gap between running slots would cost a physical batch in every step."""
    bench = Bench(ROOMY, scheduler={"prefixes": PrefixCache(can_cut=True)})
    ended = [bench.add(name, n_prompt=40, n_output_max=2) for name in "abcdefgh"]
    bench.run()
    assert bench.scheduler.counts.n_retained == 8
    bench.add("x", n_prompt=20, n_output_max=90, tenant="other")
    bench.step()
    assert [s.seq_id for s in bench.scheduler.sequences()] == [0]  # not used for longest
    again = follow_up(bench, ended[5], [7] * 3, n_output_max=20)
    (start,) = bench.step().starts
    assert (start.seq_id, start.source, start.n_kept) == (1, 5, 41)
    assert again.n_reused == 41
    near = follow_up(bench, ended[2], [7] * 3, n_output_max=20)
    (start,) = bench.step().starts
    assert (start.seq_id, start.source) == (2, None)  # where it is, it is well placed
    bench.run()
    assert again.n_reused == near.n_reused == 41
    assert bench.scheduler.counts.n_prefix_hits == 2


def test_a_short_prefix_is_not_worth_a_copy() -> None:
    bench = Bench(ROOMY, scheduler={"prefixes": PrefixCache(can_cut=True)})
    bench.add("a", n_prompt=40, n_output_max=50)
    for _ in range(3):
        bench.step()
    assert bench.add("a", n_prompt=16) in bench.scheduler.sequences()  # 15 tokens of it
    (start,) = bench.step().starts
    assert (start.source, start.n_kept) == (None, 0)
    bench.add("a", n_prompt=60)  # 40
    (start,) = bench.step().starts
    assert (start.source, start.n_kept) == (0, 40)


def test_running_slots_stay_together_while_retained_ones_are_given_up() -> None:
    bench = Bench(ROOMY, scheduler={"prefixes": PrefixCache(can_cut=True)})
    n_runs = n_plans = n_added = 0
    for _ in range(600):
        while len(bench.scheduler.sequences()) < 4:
            n_added += 1
            prompt = chr(n_added)
            bench.add(prompt, n_prompt=20, n_output_max=10 + n_added * 37 % 60)
        slots = sorted(entry.seq_id for entry in bench.step().entries)
        n_runs += sum(i - 1 not in slots for i in slots)
        n_plans += 1
    assert bench.scheduler.counts.n_retained >= 4
    assert n_runs / n_plans < 1.3  # with the least recently used slot it is above 2


def test_a_start_that_kept_nothing_is_no_hit() -> None:
    bench = Bench(scheduler={"prefixes": PrefixCache(can_cut=True)})
    bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    bench.engine.refuse(n_starts=1)
    bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    counts = bench.scheduler.counts
    assert (counts.n_prefix_lookups, counts.n_prefix_hits, counts.n_reused) == (2, 0, 0)
    bench.add("a", n_prompt=40, n_output_max=2)
    bench.run()
    counts = bench.scheduler.counts
    assert (counts.n_prefix_lookups, counts.n_prefix_hits) == (3, 1)
    assert (counts.n_reused, counts.n_prefix_tokens) == (39, 120)


def recurrent(**scheduler: object) -> Bench:
    prefixes = PrefixCache(can_cut=False, n_host_bytes_max=1 << 20)
    return Bench(ROOMY, scheduler={"prefixes": prefixes, **scheduler}, is_recurrent=True)


def test_a_recurrent_conversation_goes_on_from_its_last_prompt_whatever_became_of_the_answer() -> (
    None
):
    bench = recurrent()
    first = bench.add("a", n_prompt=120, n_output_max=8)
    plans = [bench.step() for _ in range(3)]
    # Cut where the checkpoint is taken: a block before the end.
    assert [shape(plan)[0][1] for plan in plans] == [64, 40, 16]
    assert [list(plan.saves) for plan in plans] == [[], [], [0]]
    bench.run()
    sampler = bench.engine.make_sampler(GREEDY)
    again = Sequence(Request("b", [*first.request.prompt, 1, 2, 3], n_output_max=4), sampler)
    bench.scheduler.submit(again)
    bench.run()
    assert again.n_reused == 120 - BLOCK_SIZE
    same = Sequence(
        Request("c", first.request.prompt, n_output_max=8), bench.engine.make_sampler(GREEDY)
    )
    bench.scheduler.submit(same)
    bench.run()
    assert same.n_reused == 120 - BLOCK_SIZE
    assert same.output == first.output
    assert bench.scheduler.counts.n_prefix_bytes > 0


@pytest.mark.parametrize("n_prompt", [64, 79])
def test_a_checkpoint_that_saves_little_is_not_taken(n_prompt: int) -> None:
    bench = recurrent()
    bench.add("a", n_prompt=n_prompt, n_output_max=4)
    bench.run()
    assert not any(plan.saves for plan in bench.plans)


def test_snapshots_of_prefixes_must_promise_more_than_they_cost() -> None:
    """Nobody comes back to what is stored: soon it is not worth the time any more."""
    limits = dataclasses.replace(LIMITS, n_seq_max=1, n_ctx=100)
    prefixes = PrefixCache(can_cut=True, n_host_bytes_max=1 << 20)
    bench = Bench(limits, scheduler={"prefixes": prefixes, "cost": StepCost()})
    saves = []
    for n in range(60):
        sequence = bench.add(chr(n), n_prompt=40, n_output_max=2)
        while sequence.terminal is None:
            plan = bench.scheduler.plan(bench.now)
            saves += [n] * len(plan.saves)
            result = bench.engine.step(plan)
            # Its tokens take five times as long as a snapshot.
            timings = StepTimings(total_s=1.25e-4 * result.n_batch_tokens)
            result = dataclasses.replace(result, timings=timings)
            bench.scheduler.commit(result, bench.now + timings.total_s)
    assert 8 <= len(saves) < 30
    assert sum(n >= 40 for n in saves) <= 3  # now and then: what was long ago counts less
    rates = bench.scheduler._checkpoints.hit_rates
    assert rates.of("default") == pytest.approx(0.2, abs=0.05)
    assert rates.of("another") == 0.5


def test_a_sequence_that_draws_is_preempted_by_snapshot_even_where_computing_again_is_cheaper() -> (
    None
):
    lot_first = [True, False]
    for is_drawn in (True, False):
        cost = StepCost()
        limits = dataclasses.replace(LIMITS, n_seq_max=1, n_ctx=100)
        bench = Bench(limits, scheduler={"cost": cost})
        sampling = SamplingOptions(temperature=0.8 if is_drawn else 0.0, seed=1)
        sampler = bench.engine.make_sampler(sampling)
        low = Sequence(Request("low", [1] * 9, sampling=sampling, n_output_max=40), sampler)
        bench.scheduler.submit(low)
        for _ in range(12):
            bench.now += 1
            plan = bench.scheduler.plan(bench.now)
            result = bench.engine.step(plan)
            result = dataclasses.replace(result, timings=StepTimings(total_s=1e-7))
            bench.scheduler.commit(result, bench.now)
        bench.add("high", priority=1)
        plan = bench.step()
        assert plan.swap_outs == [0]
        assert bool(plan.saves) is lot_first[not is_drawn]
        bench.run()
        assert low.n_output == 40


def empty(prefixes: PrefixCache) -> None:
    """Has everything leave slots and host memory."""
    for seq_id in list(prefixes._slots):
        prefixes.drop(seq_id)
    for prefix in list(prefixes._hosted):
        prefixes._forget_hosted(prefix)


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_thousands_of_requests_leave_nothing_behind(*, is_recurrent: bool) -> None:
    n_bytes_max = 20_000
    prefixes = PrefixCache(can_cut=not is_recurrent, n_host_bytes_max=n_bytes_max)
    bench = Bench(
        ROOMY, scheduler={"prefixes": prefixes, "n_checkpoint_min": 16}, is_recurrent=is_recurrent
    )
    ended: list[Sequence] = []
    live: list[Sequence] = []
    n_done = n_bytes = 0
    for n in range(3000):
        while len(live) < 10 and n < 2900:
            k = n_done + len(live)
            tenant = f"tenant {k % 3}"
            if ended and k % 2:
                before = ended.pop()
                sequence = follow_up(
                    bench, before, [k % 256, 1], n_output_max=3, tenant=before.request.tenant
                )
            else:
                sequence = bench.add(
                    chr(k % 250), n_prompt=17 + k * 7 % 60, n_output_max=4, tenant=tenant
                )
            live.append(sequence)
        if n % 5 == 0 and live:
            bench.scheduler.mark(live[n % len(live)], FinishReason.CANCELLED)
        bench.step()
        bench.plans.clear()
        bench.events.clear()
        over = [sequence for sequence in live if sequence.terminal is not None]
        ended = [*ended, *(s for s in over if s.n_output and len(s.tokens) < 300)][-20:]
        live = [sequence for sequence in live if sequence.terminal is None]
        n_done += len(over)
        assert prefixes._shares.total == sum(len(p.snapshot) for p in prefixes._hosted)
        assert prefixes._shares.total <= n_bytes_max
        n_bytes = max(n_bytes, prefixes._shares.total)
    counts = bench.scheduler.counts
    assert n_done > 2000
    assert counts.n_prefix_hits > n_done / 10
    assert counts.n_prefix_evicted > 500
    assert n_bytes > n_bytes_max * 0.8  # the bound was reached
    # What tables hold is what slots and host memory hold; nothing of what was.
    held = {h for p in (*prefixes._slots.values(), *prefixes._hosted) for h in p.hashes}
    assert prefixes._holders.keys() == held
    assert bench.engine.n_cells_used == counts.n_retained_cells == bench.scheduler.n_cells_held
    assert not bench.scheduler._in_flight.preempted
    assert not bench.scheduler._checkpoints._due
    empty(prefixes)
    assert (prefixes._holders, prefixes._ends, prefixes._shares.total) == ({}, {}, 0)
