"""Engines that share a target's weights: a benchmark's arms differ by their choice alone."""

from __future__ import annotations

import pytest
from tests.support.built import needs_extension
from tests.support.demo import config, prompts
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import SamplingOptions

pytestmark = needs_extension()

N_OUTPUT = 24
GREEDY = SamplingOptions(temperature=0, ignore_eos=True)


def answer(engine: LlamaEngine, n_draft: int) -> list[int]:
    """Returns what an engine writes after a prompt."""
    scheduler = Scheduler(engine.limits, FixedDraft(n_draft), cost=UnknownCost())
    sampler = engine.make_sampler(GREEDY)
    sequence = Sequence(Request("r", prompts((60,))[0], n_output_max=N_OUTPUT), sampler)
    scheduler.submit(sequence)
    for _ in range(100):
        if scheduler.is_idle:
            break
        scheduler.commit(engine.step(scheduler.plan(0.0)), 0.0)
    return list(sequence.tokens[sequence.n_prompt :])


@pytest.mark.model
@pytest.mark.parametrize("target", ["dense", "hybrid"])
def test_engines_that_share_weights_write_what_each_writes_alone(target: str) -> None:
    settings = {"parallel": 2, "max_model_len": 256}
    drafted = LlamaEngine.load(config(target, "mtp", **settings))
    plain = LlamaEngine.load(config(target, "none", **settings), target_of=drafted)
    assert plain._model is drafted._model
    together = [answer(plain, 0), answer(drafted, 3), answer(plain, 0)]
    for engine in (drafted, plain):
        engine.close()
    alone = LlamaEngine.load(config(target, "none", **settings))
    expected = answer(alone, 0)
    alone.close()
    assert len(expected) == N_OUTPUT
    assert together == [expected] * 3
