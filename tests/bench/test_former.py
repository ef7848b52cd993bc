"""The former model in today's scheduler: it drafts where that pays, and never fails."""

from __future__ import annotations

import dataclasses
import subprocess
from statistics import mean

import pytest

from drafthouse_bench.demos import CHECKOUT
from drafthouse_bench.former import FormerDraft, make_former_scheduler
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.scheduling.sequence import FinishEvent, Request, Sequence
from drafthouse_server.step import SamplingOptions, StepPlan, StepTimings

N_STEPS = 600


def is_whole_clone() -> bool:
    """Returns whether git has the history here; archives and shallow clones have none."""
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--is-shallow-repository"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return found.stdout.strip() == "false"


def timings(plan: StepPlan) -> StepTimings:
    """Returns what a step takes whose decode is bound by memory."""
    n_tokens = sum(len(entry.tokens) + entry.n_draft for entry in plan.entries)
    draft_s = 0.001 * max([entry.n_draft for entry in plan.entries], default=0)
    decode_s, process_s = 0.01 + 0.0001 * n_tokens, 0.00005 * n_tokens
    return StepTimings(draft_s, decode_s, process_s, 0.0001, draft_s + decode_s + process_s)


@pytest.mark.skipif(not is_whole_clone(), reason="the former model is in git's history alone")
@pytest.mark.parametrize(("n_accepted", "low", "high"), [(4, 3.5, 4.0), (0, 0.0, 0.2)])
def test_it_drafts_where_drafts_are_accepted(n_accepted: int, low: float, high: float) -> None:
    engine = FakeEngine(acceptance=[n_accepted])
    scheduler = make_former_scheduler(engine, Config(prefix_cache=False))
    options = SamplingOptions(ignore_eos=True)

    def submit() -> None:
        request = Request("r", list(range(1, 90)), sampling=options, n_output_max=60)
        scheduler.submit(Sequence(request, engine.make_sampler(options)))

    for _ in range(3):
        submit()
    now, depths = 0.0, []
    for _ in range(N_STEPS):
        plan = scheduler.plan(now)
        result = dataclasses.replace(engine.step(plan), timings=timings(plan))
        now += result.timings.total_s + 0.0001
        depths += [entry.n_draft for entry in plan.entries if len(entry.tokens) == 1]
        for _, event in scheduler.commit(result, now):
            if isinstance(event, FinishEvent):
                submit()
    assert isinstance(scheduler.policy, FormerDraft)
    assert scheduler.counts.n_estimator_resets == 0
    assert scheduler.policy.n_changes > 0
    assert low <= mean(depths[len(depths) // 2 :]) <= high
