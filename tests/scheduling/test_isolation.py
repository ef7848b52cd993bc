"""Tenants apart: shares of host memory, what nobody can tell, and what is left of one deleted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import Unauthenticated
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import ErrorEvent, FinishReason, Request, Sequence
from drafthouse_server.step import EngineLimits, SamplingOptions, StepPlan

B = BLOCK_SIZE
LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=3,
    n_ctx=3 * 512,
    n_ctx_seq=512,
    n_batch=64,
    n_ubatch=64,
    n_draft_max=4,
    n_outputs_max=15,
)
DELETED = Unauthenticated("the tenant was deleted")


def text(number: int, n_tokens: int = 2 * B) -> list[int]:
    """Returns tokens that no text of another number begins with."""
    return [number + 1] * n_tokens


def hosted(cache: PrefixCache, tenant: str, numbers: SequenceOf[int]) -> list[int]:
    """Returns which of a tenant's texts are found in a cache that holds nothing in slots."""
    return [i for i in numbers if cache.find(tenant, [*text(i), 0]) is not None]


# --- shares of host memory


def test_a_tenant_that_is_alone_has_all_of_host_memory_and_gives_up_what_is_beyond_its_share() -> (
    None
):
    cache = PrefixCache(can_cut=True, n_host_bytes_max=100)
    for i in range(10):
        assert cache.store("a", text(i), bytes(10))
    assert hosted(cache, "a", range(10)) == list(range(10))
    for i in range(5):
        assert cache.store("b", text(i), bytes(10))
    assert hosted(cache, "a", range(10)) == list(range(5, 10)), "its least recently used went"
    assert cache.store("b", text(5), bytes(10))
    assert hosted(cache, "b", range(6)) == list(range(1, 6)), "b has its half, and its own go"
    assert hosted(cache, "a", range(10)) == list(range(5, 10))


def test_weights_decide_and_end_users_have_no_shares_of_their_own() -> None:
    cache = PrefixCache(can_cut=True, n_host_bytes_max=80)
    cache.set_weight("a", 3.0)
    cache.set_weight("b", 1.0)
    for i in range(20):
        cache.store(f"b\0user{i}", text(i), bytes(10))
    for i in range(20):
        cache.store("a", text(i), bytes(10))
    for i in range(20, 40):
        cache.store(f"b\0user{i}", text(i), bytes(10))
    assert len(hosted(cache, "a", range(20))) == 6
    held = [i for i in range(40) if cache.find(f"b\0user{i}", [*text(i), 0]) is not None]
    assert held == [38, 39]


def test_one_that_is_larger_than_its_tenants_share_takes_nothing_from_others() -> None:
    cache = PrefixCache(can_cut=True, n_host_bytes_max=100)
    assert cache.store("a", text(0), bytes(50))
    assert cache.store("b", text(0), bytes(50))
    assert not cache.store("b", text(1), bytes(60))
    assert not cache.store("c", text(0), bytes(60))
    assert hosted(cache, "a", [0]) == hosted(cache, "b", [0]) == [0]
    assert cache._shares.total == 100


STORES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.integers(1, 40)), max_size=60
)
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abcd"})


@settings(deadline=None)
@given(stores=STORES, weights=WEIGHTS)
def test_nobody_within_its_share_ever_loses_a_snapshot_to_another(
    stores: list[tuple[str, int, int]], weights: dict[str, float]
) -> None:
    n_max = 100
    cache = PrefixCache(can_cut=True, n_host_bytes_max=n_max)
    for tenant, weight in weights.items():
        cache.set_weight(tenant, weight)
    sizes: dict[tuple[str, int], int] = {}
    for tenant, number, n_bytes in stores:
        before = {name: hosted(cache, name, range(31)) for name in weights}
        bytes_before = {name: sum(sizes[name, i] for i in held) for name, held in before.items()}
        is_kept = cache.store(tenant, text(number), bytes(n_bytes))
        if is_kept:
            sizes[tenant, number] = n_bytes
        holders = [n for n in weights if before[n] or n == tenant]
        all_weights = sum(weights[name] for name in holders)
        for name in set(holders) - {tenant}:
            share = n_max * weights[name] / all_weights
            lost = set(before[name]) - set(hosted(cache, name, range(31)))
            # It was above its share before each that it has lost.
            left = bytes_before[name] - sum(sizes[name, i] for i in lost)
            assert not lost or left + max(sizes[name, i] for i in lost) > share - 1e-9
            assert not (lost and not is_kept)
        held = {name: hosted(cache, name, range(31)) for name in weights}
        total = sum(sizes[name, i] for name, found in held.items() for i in found)
        assert cache._shares.total == total <= n_max


# --- a scheduler by hand


class Bench:
    """A scheduler over a fake engine, with all that it may keep of a tenant."""

    def __init__(self, *, is_recurrent: bool = False) -> None:
        self.engine = FakeEngine(LIMITS)
        self.prefixes = PrefixCache(can_cut=not is_recurrent, n_host_bytes_max=1 << 20)
        self.ngrams = NgramDrafter(2, 1000)
        self.scheduler = Scheduler(
            LIMITS, FixedDraft(2), cost=UnknownCost(), prefixes=self.prefixes, ngrams=self.ngrams
        )
        self.plans: list[StepPlan] = []

    def add(
        self, tenant: str, prompt: list[int], n_output: int = 4, end_user: str = ""
    ) -> Sequence:
        sampler = self.engine.make_sampler(SamplingOptions(temperature=0))
        sequence = Sequence(
            Request(
                f"{tenant}-{len(prompt)}",
                prompt,
                n_output_max=n_output,
                tenant=tenant,
                end_user=end_user,
            ),
            sampler,
        )
        self.scheduler.submit(sequence)
        return sequence

    def step(self) -> StepPlan:
        self.scheduler.reap(0.0)
        plan = self.scheduler.plan(0.0)
        self.plans.append(plan)
        self.scheduler.commit(self.engine.step(plan), 0.0)
        return plan

    def run(self) -> None:
        for _ in range(500):
            if self.scheduler.is_idle:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


def work(plan: StepPlan) -> object:
    """Returns what of a plan takes time: moves, computed tokens, drafts; no token's value."""
    starts = [(s.seq_id, s.n_kept, s.source, s.snapshot is not None) for s in plan.starts]
    entries = [(e.seq_id, len(e.tokens), e.n_draft, e.is_output) for e in plan.entries]
    return starts, entries, plan.frees, plan.saves, plan.swap_outs, plan.n_steps


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([("a", ""), ("a", "x"), ("a", "y"), ("b", "")]),
        st.integers(B, 5 * B),
        st.integers(1, 6),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(
    requests=REQUESTS,
    probe=st.integers(B, 5 * B),
    prober=st.sampled_from([("c", ""), ("c", "x"), ("a", "z")]),
    is_recurrent=st.booleans(),
)
def test_the_work_for_a_prompt_does_not_tell_whether_others_have_computed_it(
    requests: list[tuple[tuple[str, str], int, int]],
    probe: int,
    prober: tuple[str, str],
    is_recurrent: bool,
) -> None:
    """Two worlds that differ in others' prompts alone: theirs is the probe's, or another one."""
    seen = []
    for others_text in (0, 1):
        bench = Bench(is_recurrent=is_recurrent)
        for (tenant, end_user), n_prompt, n_output in requests:
            bench.add(tenant, text(others_text, n_prompt), n_output, end_user)
        bench.run()
        n_before = len(bench.plans)
        sequence = bench.add(prober[0], text(0, probe), 1, prober[1])
        bench.run()
        assert sequence.n_reused == 0
        n_computed = sum(len(e.tokens) for plan in bench.plans[n_before:] for e in plan.entries)
        assert n_computed == probe
        seen.append([work(plan) for plan in bench.plans[n_before:]])
    assert seen[0] == seen[1]


# --- a tenant that is deleted


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_of_a_deleted_tenant_nothing_is_kept(is_recurrent: bool) -> None:
    bench = Bench(is_recurrent=is_recurrent)
    scheduler, prefixes = bench.scheduler, bench.prefixes
    for i, tenant in enumerate("abab"):
        bench.add(tenant, text(i, 4 * B), 8, end_user="u" if i > 1 else "")
        bench.run()
    for tenant in "ab":
        assert prefixes.store(tenant, text(9), b"snapshot")
        assert prefixes.store(f"{tenant}\0u", text(9), b"snapshot")
    running = [bench.add(tenant, text(20 + i), 100) for i, tenant in enumerate("aab")]
    bench.step()
    bench.step()
    waiting = [bench.add(tenant, text(30), 100) for tenant in "ab"]
    scheduler.mark(running[0], FinishReason.CANCELLED)  # else it would be retained

    lengths = scheduler._ledger.lengths._by_tenant
    assert lengths.keys() == {"a", "b"}
    scheduler.forget_tenant("a", DELETED)
    bench.step()
    assert lengths.keys() == {"b"}

    for sequence in (running[0], running[1], waiting[0]):
        assert isinstance(sequence.terminal, ErrorEvent)
        assert sequence.terminal.error is DELETED
    assert running[2].terminal is None
    owners = {p.tenant for p in (*prefixes._slots.values(), *prefixes._hosted)}
    assert owners <= {"b", "b\0u"}
    assert {p.tenant for p in prefixes._hosted} == {"b", "b\0u"}
    pool = bench.ngrams._pool
    assert pool is not None
    assert not pool.n_tokens("a")
    assert not pool.n_tokens("a\0u")
    assert all(owner.startswith("b") for owner, *_ in pool._due)
    bench.run()
    assert waiting[1].terminal is not None
    n_held = bench.engine.n_cells_used
    assert n_held == scheduler.n_cells_held == scheduler.counts.n_retained_cells
    anew = bench.add("a", text(0, 4 * B))
    bench.run()
    assert anew.n_reused == 0


def test_other_tenants_go_on_as_if_nothing_had_happened() -> None:
    outputs = []
    for is_deleted in (False, True):
        bench = Bench()
        bench.add("a", text(0, 3 * B), 40)
        other = bench.add("b", text(1, 3 * B), 40)
        for _ in range(6):
            bench.step()
        if is_deleted:
            bench.scheduler.forget_tenant("a", DELETED)
        bench.run()
        outputs.append(list(other.output))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 40


def test_forgetting_a_tenant_that_nobody_knows_is_harmless() -> None:
    bench = Bench()
    bench.scheduler.forget_tenant("nobody", DELETED)
    assert bench.scheduler.is_idle
    assert dataclasses.replace(bench.scheduler.counts).n_retained == 0
