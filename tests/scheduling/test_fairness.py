"""Tenants share the server by weight, however few slots there are and whatever they ask for."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from tests.support.clocked import LIMITS, Clocked, numbers
from tests.support.crowd import Machine
from tests.support.simulate import Simulation, Stream, quantile
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import FinishEvent, Request, Sequence
from drafthouse_server.step import EngineLimits, SamplingOptions
from drafthouse_server.tenancy.fairness import Fairness, ServiceWeights

GREEDY = SamplingOptions(temperature=0, ignore_eos=True)
SLOW = Machine()
"""Some ten milliseconds a step: seconds of it are some hundred steps."""

N_CTX_SEQ = 40
N_PROMPT_MAX = 24


class Trace:
    """Tenants that come and go at random, few slots, and the service that each has got."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        chance = self.random
        self.n_draft = chance.choice((0, 0, 3))
        n_slots = chance.choice((2, 3))
        self.limits = EngineLimits(
            "mtp", n_slots, n_slots * N_CTX_SEQ, N_CTX_SEQ, 64, 64, 4, n_slots * 5
        )
        self.weights = ServiceWeights()
        self.engine = FakeEngine(self.limits, acceptance=(2, 0, 3, 1))
        fairness = Fairness(self.weights, quantum=chance.choice((0.0, 32.0, 512.0)))
        self.scheduler = Scheduler(
            self.limits, FixedDraft(self.n_draft), cost=UnknownCost(), fairness=fairness
        )
        names = "abc"[: chance.choice((2, 3))]
        self.tenants = {name: chance.choice((1.0, 1.0, 2.0, 3.0)) for name in names}
        # Unlike: who sends short prompts and long outputs beside who does the contrary.
        self.asks = {
            name: (chance.randint(1, N_PROMPT_MAX), chance.randint(1, N_CTX_SEQ - N_PROMPT_MAX))
            for name in names
        }
        self.service = dict.fromkeys(names, 0.0)
        self.live: Counter[str] = Counter()
        self.slots: dict[int, Sequence] = {}
        self.n = 0

    def submit(self, tenant: str) -> None:
        n_prompt, n_output = self.asks[tenant]
        n_prompt = max(1, n_prompt - self.random.randrange(n_prompt))
        prompt = [self.random.randrange(32, 127) for _ in range(n_prompt)]
        sampler = self.engine.make_sampler(GREEDY)
        self.n += 1
        self.scheduler.submit(
            Sequence(
                Request(
                    f"r{self.n}",
                    prompt,
                    tenant=tenant,
                    weight=self.tenants[tenant],
                    n_output_max=n_output,
                ),
                sampler,
            )
        )
        self.live[tenant] += 1

    def step(self, now: float) -> None:
        plan = self.scheduler.plan(now)
        for start in plan.starts:
            self.slots[start.seq_id] = self.scheduler.running(start.seq_id)
        self.engine.interrupt()
        result = self.engine.step(plan)
        for part, entry in zip(plan.entries, result.entries, strict=True):
            sequence = self.slots[entry.seq_id]
            amount = len(entry.tokens) * self.weights.output
            amount += (entry.n_drafted - entry.n_accepted) * self.weights.rejected
            if part.n_past < sequence.n_prompt and not sequence.swap.n_preemptions:
                amount += len(part.tokens) * self.weights.prompt
            self.service[sequence.request.tenant] += amount / sequence.request.weight
        for sequence, event in self.scheduler.commit(result, now):
            if isinstance(event, FinishEvent):
                self.live[sequence.request.tenant] -= 1

    def backlogged(self) -> set[str]:
        return {s.request.tenant for s in self.scheduler.sequences() if s.seq_id < 0}

    @property
    def bound(self) -> float:
        """The paper's: twice max(w_p times the longest input, w_q times a full batch).

        A token of output may come with rejected drafts, which count besides.
        """
        weights, least = self.weights, min(self.tenants.values())
        output = weights.output + self.n_draft * weights.rejected
        return 2 * max(weights.prompt * N_PROMPT_MAX, output * self.limits.n_ctx) / least


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_random_traces_keep_the_bound_of_the_paper(part: int, is_whole: bool) -> None:
    """With `--whole` a thousand of them."""
    n_tight = 0
    for seed in range(part * 250, part * 250 + (250 if is_whole else 60)):
        trace = Trace(seed)
        chance = trace.random
        ups = dict.fromkeys(trace.tenants, 0)  # who keeps sending, until when
        # Of each pair: the least and greatest difference while both have waited all the time.
        spans: dict[tuple[str, str], tuple[float, float]] = {}
        for i in range(140):
            for tenant, until in ups.items():
                if until <= i and chance.random() < 0.1:
                    ups[tenant] = i + chance.randint(10, 100)
                while ups[tenant] > i and trace.live[tenant] < 6:
                    trace.submit(tenant)
            before = trace.backlogged()
            trace.step(float(i))
            waiting = before & trace.backlogged()
            pairs = {(a, b) for a in waiting for b in waiting if a < b}
            spans = {pair: span for pair, span in spans.items() if pair in pairs}
            for a, b in pairs:
                ahead = trace.service[a] - trace.service[b]
                low, high = spans.get((a, b), (ahead, ahead))
                spans[a, b] = low, high = min(low, ahead), max(high, ahead)
                assert high - low <= trace.bound, f"seed {seed}, step {i}: {a} and {b}"
                n_tight += high - low > trace.bound / 16
    assert n_tight > 100, "traces in which nothing could go wrong prove nothing"


@pytest.mark.parametrize("n_slots", [2, 4, 8])
@pytest.mark.parametrize(
    "asked",
    [((16, 32), (16, 32)), ((8, 200), (64, 24)), ((120, 8), (12, 300))],
    ids=["alike", "long outputs beside short", "long prompts beside short"],
)
def test_two_floods_get_service_by_their_weights(
    n_slots: int, asked: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    (n_prompt_d, n_output_d), (n_prompt_e, n_output_e) = asked
    streams = (
        Stream("d", 40, n_prompt=n_prompt_d, n_output=n_output_d, weight=1.0),
        Stream("e", 120, n_prompt=n_prompt_e, n_output=n_output_e, weight=3.0),
    )
    found = Simulation(n_slots, SLOW).run_streams(streams, 60)
    assert set(found.n_refused) == {"d", "e"}, "both always wait"
    assert found.service["e"] == pytest.approx(3 * found.service["d"], rel=0.05)


@pytest.mark.parametrize("n_slots", [2, 4, 8])
def test_a_flood_of_long_streams_leaves_a_polite_tenants_first_token_alone(n_slots: int) -> None:
    polite = Stream("p", 0.5, n_prompt=24, n_output=16, is_regular=True)
    flood = Stream("f", 5, n_prompt=16, n_output=300)
    seconds = 60
    idle = Simulation(n_slots, SLOW).run_streams((polite,), seconds)
    flooded = Simulation(n_slots, SLOW).run_streams((polite, flood), seconds)
    assert flooded.n_refused["f"] > 0, "more than there is"
    assert not flooded.n_refused["p"]
    waits = flooded.waits_steps["p"]
    assert len(waits) == len(idle.waits_steps["p"]) > 15
    assert quantile(waits, 0.95) <= 2 * quantile(idle.waits_steps["p"], 0.95)
    # The flood pays with some of its streams' places, once for each polite request at most.
    assert 0 < flooded.n_preempted["f"] <= len(waits)
    assert not flooded.n_preempted["p"]


def test_preempted_streams_end_with_the_tokens_that_they_have_alone() -> None:
    def outputs(*, has_polite: bool) -> dict[str, list[int]]:
        simulation = Simulation(2, SLOW, fairness=Fairness(quantum=16.0, preempt_interval_s=0.0))
        made = []
        submit = simulation.scheduler.submit

        def note(sequence: Sequence) -> None:
            made.append(sequence)
            submit(sequence)

        simulation.scheduler.submit = note  # type: ignore[method-assign]  # notes what is asked
        for _ in range(4):
            simulation.submit("f", 12, 80)
        for i in range(400):
            if has_polite and i % 25 == 10:
                simulation.submit("p", 8, 6)
            simulation.step()
        assert bool(simulation.summary.n_preempted["f"]) is has_polite
        assert all(isinstance(sequence.terminal, FinishEvent) for sequence in made)
        prompts = {tuple(s.request.prompt): s.output for s in made if s.request.tenant == "f"}
        return {str(prompt): output for prompt, output in prompts.items()}

    assert outputs(has_polite=True) == outputs(has_polite=False)


def test_three_floods_on_two_slots_take_turns_by_the_quantum() -> None:
    fairness = Fairness(quantum=64.0, preempt_interval_s=0.0)
    simulation = Simulation(2, SLOW, fairness=fairness)
    for _ in range(3):
        for tenant in "abc":
            simulation.submit(tenant, 4, 480)
    for _ in range(600):
        simulation.step()
    served = simulation.summary.service
    assert max(served.values()) - min(served.values()) <= 64 + 2 * 5 * 2
    # Not more often than the quantum says: between two changes of hands so much service is given
    # to those that run, which are two.
    n_changes = simulation.summary.n_preempted.total()
    assert 10 < n_changes <= 2 * sum(served.values()) / 64


def order_of_service(*, text: float = 0.0, n_mask_work: int = 0) -> str:
    """Returns whose requests got the one slot, in order, while two tenants waited.

    Each has four requests, of 4 tokens in and 4 tokens out: 12 units of service.

    Args:
        text: Units of service of the text work of tenant a.
        n_mask_work: Comparisons of the grammar of a's requests, in each step with an output.
    """
    limits = EngineLimits("mtp", 1, N_CTX_SEQ, N_CTX_SEQ, 64, 64, 4, 5)
    engine, scheduler = FakeEngine(limits), Scheduler(limits, FixedDraft(0), cost=UnknownCost())
    for i in range(8):
        sampler = engine.make_sampler(GREEDY)
        tenant = "ab"[i % 2]
        scheduler.submit(
            Sequence(Request(f"r{i}", [65, 66, 67, 68], tenant=tenant, n_output_max=4), sampler)
        )
    if text:
        scheduler.charge("a", text)
    order, now = "", 0.0
    while not (plan := scheduler.plan(now)).is_empty:
        order += "".join(scheduler.running(start.seq_id).request.tenant for start in plan.starts)
        engine.interrupt()
        result = engine.step(plan)
        for entry in result.entries:
            is_costly = entry.tokens and scheduler.running(entry.seq_id).request.tenant == "a"
            entry.n_mask_work = n_mask_work if is_costly else 0
        scheduler.commit(result, now)
        scheduler.reap(now)
        now += 1.0
    return order


def test_the_work_of_texts_and_grammars_decides_who_is_next() -> None:
    assert order_of_service() == "abababab"
    # 30 units are two and a half requests.
    assert order_of_service(text=30.0) == "bbbabaaa"
    assert order_of_service(text=1e6) == "bbbbaaaa"
    # A request with as much work of its grammar as all else counts twice.
    assert order_of_service(n_mask_work=300_000) == "abbabbaa"


def test_who_comes_back_for_a_few_tokens_does_not_wait_for_anothers_long_prompts() -> None:
    """These are counted when they get their slots, long before they are computed."""
    limits = dataclasses.replace(LIMITS, n_seq_max=8, n_outputs_max=8, n_ctx=8 * 4096)
    clocked, waited = Clocked(limits), list[int]()
    for i in range(8):
        n_long = sum(it.request.tenant == "long" for it in clocked.scheduler.sequences())
        for j in range(n_long, 16):
            clocked.add(numbers(3000, 16 * i + j), n_output=1, tenant="long")
        clocked.step()
        short = clocked.add([250 - i] * 20, n_output=2, tenant="short")
        n_before = len(clocked.plans)
        while short.seq_id < 0:
            clocked.step()
        waited.append(len(clocked.plans) - n_before)
        clocked.finish(short)
    assert waited == [1] * 8
