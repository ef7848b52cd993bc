"""What the engine does not ask of llama.cpp's samplers changes nothing of what they would choose.

Greedy requests take the greatest logit, others give the chain its likeliest candidates only, what
a first top-p or min-p leaves is found without it, and several threads share the sequences. A bias
of 0 on one token switches the shortcuts off: that is the slow path, llama.cpp's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.built import needs_extension
from tests.support.demo import EAGLE3, MODELS, TARGETS, prompts

pytestmark = needs_extension()

Generated = tuple[list[list[int]], list[list[float]]]

N_OUTPUT = 16
NEUTRAL = ((7, 0.0),)

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy without end": {"temperature": 0.0, "ignore_eos": True},
    "greedy with bans": {"temperature": 0.0, "logit_bias": ((30, -np.inf), (200, -np.inf))},
    "greedy, top-n-sigma": {"temperature": 0.0, "top_n_sigma": 1.5},
    "defaults": {},
    "hot": {"temperature": 2.0, "top_p": 1.0, "min_p": 0.0, "top_k": 200},
    "one": {"top_k": 1},
    "penalties": {"penalty_repeat": 1.4, "penalty_frequency": 0.3, "penalty_presence": 0.2},
    "greedy, penalties": {"temperature": 0.0, "penalty_repeat": 1.4},
    "reward": {"penalty_repeat": 0.8},
    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    "typical": {"typical_p": 0.7},
    "greedy, typical": {"temperature": 0.0, "typical_p": 0.7},
    "dry": {"dry_multiplier": 0.8, "top_k": 20},
    "all": {"top_k": 0, "top_p": 0.9},
    "half": {"top_k": 0, "top_p": 0.5, "min_p": 0.0},
    "nearly all": {"top_k": 0, "top_p": 0.9999, "min_p": 0.0},
    "all, least": {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
    "all, first one": {"top_k": 0, "top_p": 1e-6},
    "all, without end": {"top_k": 0, "ignore_eos": True},
    "all, bans": {"top_k": 0, "logit_bias": ((30, -np.inf), (200, -np.inf))},
    "all, least, bans": {"top_k": 0, "top_p": 1.0, "logit_bias": ((32, -np.inf),)},
    "all, xtc": {"top_k": 0, "xtc_probability": 0.7, "xtc_threshold": 0.05},
    "all, five at least": {"top_k": 0, "top_p": 0.1, "min_keep": 5},
    "all, penalties": {"top_k": 0, "penalty_repeat": 1.4},
    "all, least first": {"top_k": 0, "samplers": ("min_p", "temperature", "top_p")},
    "without end": {"ignore_eos": True},
    "dynamic": {"dynatemp_range": 0.5},
    "mirostat": {"mirostat": 2},
    "grammar": {"grammar": 'root ::= ("a" | "b" | " ")+'},
    "grammar, greedy": {"temperature": 0.0, "grammar": 'root ::= ([^a-z] | "e" [a-m] "r")+'},
    "grammar, one left": {"temperature": 0.0, "grammar": 'root ::= ("a" "b" "c" "d" "e" "f")+'},
    "grammar, all": {"top_k": 0, "top_p": 0.9, "grammar": "root ::= [ -~\\n]+"},
    "grammar, penalties": {"penalty_repeat": 1.4, "grammar": "root ::= [a-m ]+"},
    "grammar, bans": {"grammar": "root ::= [a-m ]+", "logit_bias": ((32, -np.inf),)},
    "grammar, mirostat": {"mirostat": 2, "grammar": "root ::= [a-z ]+"},
    "bare": {"samplers": ("temperature",)},
    "temperature first": {"samplers": ("temperature", "top_k", "top_p")},
}


def generate(
    draft_type: Any, samplings: list[dict[str, Any]], *, n_threads: int = 1, n_draft: int = 0
) -> Generated:
    """Returns the tokens and log-probabilities of a crowd, one sequence for each sampling."""
    import drafthouse_engine as eng

    with eng.Model(MODELS / TARGETS["dense"]) as target:
        draft = eng.Model(MODELS / EAGLE3["dense"]) if draft_type == "eagle3" else None
        params = eng.EngineParams(
            draft_type=draft_type,  # names given below
            n_seq_max=len(samplings),
            n_ctx_seq=256,
            n_batch=1024,
            n_ubatch=512,
            n_threads=n_threads,
        )
        with eng.Engine(target, draft, params) as engine:
            tokens: list[list[int]] = [[] for _ in samplings]
            logprobs: list[list[float]] = [[] for _ in samplings]
            given = [list(prompt) for prompt in prompts((40,) * len(samplings))]
            n_past = [0] * len(samplings)
            for i, sampling in enumerate(samplings):
                options = eng.SamplingParams(**{"seed": 100 + i, "logprobs": i % 2 == 0} | sampling)
                engine.seq_begin(i, eng.Sampler(target, options))
            live = set(range(len(samplings)))
            while live:
                rows: list[tuple[int, ...]] = []
                flat: list[int] = []
                for i in sorted(live):
                    k = n_draft if tokens[i] else 0
                    rows.append((i, n_past[i], len(flat), len(given[i]), k, 1))
                    flat += given[i]
                plan = np.array(rows, eng.PLAN_DTYPE)
                result = engine.step(plan, np.array(flat, np.int32))
                for row in result.entries:
                    i = int(row["seq_id"])
                    assert row["status"] == 0
                    part = slice(row["token_offset"], row["token_offset"] + row["n_tokens"])
                    tokens[i] += result.tokens[part].tolist()
                    logprobs[i] += result.logprobs[part].tolist()
                    n_past[i], given[i] = int(row["n_past"]), tokens[i][-1:]
                    if row["flags"] & eng.ResultFlag.EOG or len(tokens[i]) >= N_OUTPUT:
                        live.discard(i)
        if draft is not None:
            draft.close()
    return [row[:N_OUTPUT] for row in tokens], [row[:N_OUTPUT] for row in logprobs]


def slow(sampling: dict[str, Any]) -> dict[str, Any]:
    bias = (*sampling.get("logit_bias", ()), *NEUTRAL)
    return sampling | {"logit_bias": bias}


def assert_same(one: Generated, other: Generated) -> None:
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(a, b)  # NaN where not asked for


@pytest.mark.parametrize("name", OPTIONS)
def test_the_short_way_chooses_what_the_long_way_chooses(name: str) -> None:
    short = [OPTIONS[name]] * 3
    assert_same(generate("none", short), generate("none", [slow(sampling) for sampling in short]))


@pytest.mark.parametrize("name", ["defaults", "one", "all", "half", "all, least", "all, bans"])
def test_drafts_are_verified_the_short_way_as_the_long_way(name: str) -> None:
    """By rejection: what a token is weighed with is the same, and so is what is drawn instead."""
    short = [OPTIONS[name]] * 3
    long = [slow(sampling) for sampling in short]
    assert_same(generate("mtp", short, n_draft=3), generate("mtp", long, n_draft=3))


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_threads_choose_the_same_tokens(draft_type: str) -> None:
    """The arithmetic of one thread, and each sequence's own draws, whoever takes it."""
    names = ["greedy", "defaults", "penalties", "grammar", "dry", "mirostat"]
    crowd = [OPTIONS[name] for name in names] * 3  # enough for threads to pay
    n_draft = 0 if draft_type == "none" else 3
    one = generate(draft_type, crowd, n_draft=n_draft)
    assert_same(generate(draft_type, crowd, n_draft=n_draft, n_threads=2), one)
