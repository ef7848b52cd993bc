"""Every sampler of llama.cpp, constraints and top log-probabilities, with and without drafts."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.demo import MODELS, SIMPLE, TARGETS, prompts

from drafthouse_engine import (
    PLAN_DTYPE,
    Engine,
    EngineParams,
    InvalidConfig,
    Model,
    Placement,
    Sampler,
    SamplingParams,
    Status,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)

pytestmark = pytest.mark.model

ON_CPU = Placement(devices=())


def params(draft_type: Any, *, exact: bool = False) -> EngineParams:
    return EngineParams(
        draft_type=draft_type, n_seq_max=4, n_ctx_seq=512, n_batch=512, n_threads=1,
        probabilistic=True, exact=exact,
    )  # fmt: skip


class Run:
    """What sequences emitted: tokens, status, and their top log-probabilities."""

    def __init__(self, n: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.tops: list[list[npt.NDArray[Any]]] = [[] for _ in range(n)]
        self.logprobs: list[list[float]] = [[] for _ in range(n)]
        self.status = [0] * n
        self.n_accepted = 0


def generate(
    engine: Engine, samplings: list[SamplingParams], n_tokens: int, k: int | Callable[[], int]
) -> Run:
    """Generates from different prompts side by side until an end token or n_tokens.

    k: Tokens to draft in each step; a function is asked anew for each sequence.
    """
    run = Run(len(samplings))
    texts = prompts((24, 31, 17, 40))[: len(samplings)]
    last = [list(text) for text in texts]
    n_past = [0] * len(samplings)
    for seq_id, sampling in enumerate(samplings):
        engine.seq_begin(seq_id, Sampler(engine.target, sampling))
    live = list(range(len(samplings)))
    while live:
        rows, flat = [], list[int]()
        for i in live:
            n_draft = 0 if not run.tokens[i] else k if isinstance(k, int) else k()
            rows.append((i, n_past[i], len(flat), len(last[i]), n_draft, 1))
            flat += last[i]
        result = engine.step(np.array(rows, PLAN_DTYPE), flat)
        for i, entry in zip(list(live), result.entries, strict=True):
            span = slice(entry["token_offset"], entry["token_offset"] + entry["n_tokens"])
            run.tokens[i] += result.tokens[span].tolist()
            run.logprobs[i] += result.logprobs[span].tolist()
            run.tops[i] += list(
                zip(result.top_tokens[span], result.top_logprobs[span], strict=True)  # type: ignore[arg-type]  # pairs
            )
            run.status[i] = int(entry["status"])
            run.n_accepted += int(entry["n_accepted"])
            n_past[i], last[i] = int(entry["n_past"]), run.tokens[i][-1:]
            if entry["status"] or entry["flags"] & 1 or len(run.tokens[i]) >= n_tokens:
                live.remove(i)
    for seq_id in range(len(samplings)):
        engine.seq_end(seq_id)
    return run


STATEFUL: list[dict[str, Any]] = [
    {"mirostat": 1, "temperature": 1.0},
    {"mirostat": 2, "temperature": 1.1, "mirostat_tau": 3.0},
    {"adaptive_target": 0.4, "temperature": 1.0},
    {"dynatemp_range": 0.5, "temperature": 0.9},
    {"samplers": ("temperature", "top_k", "min_p"), "temperature": 1.2, "min_keep": 2},
    {"samplers": (), "temperature": 0.0},
    {"samplers": ("top_k", "temperature", "infill"), "top_k": 20},
]


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
@pytest.mark.parametrize("options", STATEFUL, ids=lambda o: "-".join(map(str, o)))
def test_samplers_draw_the_same_tokens_with_drafts_as_without(
    target_name: str, options: dict[str, Any]
) -> None:
    is_stateful = "mirostat" in options or "adaptive_target" in options
    samplings = [SamplingParams(seed=seed, **options) for seed in range(1, 4)]
    runs = {}
    with Model(MODELS / TARGETS[target_name], placement=ON_CPU) as target:
        for draft_type in ("none", "mtp"):
            with Engine(target, None, params(draft_type, exact=True)) as engine:
                runs[draft_type] = generate(engine, samplings, 30, 0 if draft_type == "none" else 3)
    assert runs["mtp"].status == [0, 0, 0]
    assert runs["mtp"].n_accepted > 0
    if is_stateful:  # verified by match: the same seed draws the same
        for plain, drafted in zip(runs["none"].tokens, runs["mtp"].tokens, strict=True):
            assert drafted[: len(plain)] == plain


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
@pytest.mark.parametrize("draft_type", ["mtp", "simple"])
def test_a_seed_may_draw_the_same_tokens_whatever_is_drafted(
    target_name: str, draft_type: str
) -> None:
    """Drafts of these types are drawn themselves, and verified by rejection otherwise."""
    samplings = [
        SamplingParams(seed=seed, temperature=1.0, match_only=True, ignore_eos=True)
        for seed in range(4)
    ]
    lengths = random.Random(1)
    with (
        Model(MODELS / TARGETS[target_name], placement=ON_CPU) as target,
        Model(MODELS / SIMPLE, placement=ON_CPU) as simple,
    ):
        with Engine(target, None, params("none", exact=True)) as engine:
            expected = generate(engine, samplings, 40, 0).tokens
        draft = simple if draft_type == "simple" else None
        with Engine(target, draft, params(draft_type, exact=True)) as engine:
            for k in (1, 3, lambda: lengths.randrange(4)):
                run = generate(engine, samplings, 40, k)
                assert [tokens[:40] for tokens in run.tokens] == expected
                assert run.n_accepted > 0
            other = [dataclasses.replace(it, match_only=False) for it in samplings]
            assert [it[:40] for it in generate(engine, other, 40, 3).tokens] != expected


def test_forbidden_tokens_have_no_share_in_what_samplers_measure() -> None:
    """A logit of -inf is a probability of 0, whose logarithm is no number."""
    open_ = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    unlikely = [((1000, bias),) for bias in (-50.0, -np.inf)]
    with (
        Model(MODELS / TARGETS["dense"], placement=ON_CPU) as target,
        Engine(target, None, params("none", exact=True)) as engine,
    ):

        def draw(**options: Any) -> list[list[int]]:
            samplings = [SamplingParams(seed=seed, **(open_ | options)) for seed in range(4)]
            return generate(engine, samplings, 20, 0).tokens

        drawn, banned = (draw(typical_p=0.5, logit_bias=bias) for bias in unlikely)
        assert banned == drawn
        few = tuple((token, -np.inf) for token in range(60, target.n_vocab))
        first = draw(mirostat=1, temperature=3.0, logit_bias=few)
        greedy = draw(temperature=0.0, logit_bias=few)
        assert first != greedy
        least = draw(xtc_probability=1.0, xtc_threshold=0.0, logit_bias=few)
        assert all(tokens and max(tokens) < 60 for tokens in least)


@pytest.mark.parametrize("kind", [tuple, list])
def test_pairs_of_a_bias_may_be_lists(kind: Callable[[list[Any]], Any]) -> None:
    """A pair that was a list became two: a bias of its token's own number, and one of nobody."""
    with (
        Model(MODELS / TARGETS["dense"], placement=ON_CPU) as target,
        Engine(target, None, params("none")) as engine,
    ):
        (first, *_), *_ = generate(engine, [SamplingParams(temperature=0.0)], 1, 0).tokens
        bias = kind([kind([first, -100.0]), kind([1000, 1000.0])])
        sampling = SamplingParams(temperature=0.0, logit_bias=bias)
        assert generate(engine, [sampling], 1, 0).tokens[0][0] == 1000


def test_options_change_what_is_drawn() -> None:
    plain = SamplingParams(seed=5, temperature=1.0)
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params("none")) as engine,
    ):
        expected = generate(engine, [plain], 40, 0).tokens
        for options in STATEFUL:
            changed = generate(engine, [SamplingParams(**{"seed": 5, **options})], 40, 0).tokens
            assert changed != expected, options


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"samplers": ("top_k", "top_k")}, "samplers"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"samplers": ("topk",)}, "samplers"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat": 2, "adaptive_target": 0.5}, "adaptive_target"),
        ({"adaptive_decay": 1.0}, "adaptive_decay"),
        ({"dynatemp_range": -0.1}, "dynatemp_range"),
        ({"min_keep": -1}, "min_keep"),
        ({"n_top_logprobs": 33}, "n_top_logprobs"),
        ({"mirostat_tau": float("nan")}, "mirostat_tau"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        SamplingParams(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options",
    [{"adaptive_target": 0.4, "adaptive_decay": 0.99}, {"penalty_repeat": 1e-6}, {"top_p": 1e-30}],
    ids=str,
)
def test_bounds_are_those_that_are_told(options: dict[str, Any]) -> None:
    """The engine's numbers have 32 bits, in which 0.99 is a little more than 0.99."""
    with Model(MODELS / TARGETS["dense"], vocab_only=True) as vocabulary:
        Sampler(vocabulary, SamplingParams(**options)).close()


def test_infill_is_refused_where_it_would_hang_or_abort() -> None:
    with Model(MODELS / TARGETS["dense"]) as target:
        for options in (
            {"samplers": ("infill",)},
            {"samplers": ("infill", "top_k")},
            {"samplers": ("top_k", "infill"), "top_k": 2000},
            {"samplers": ("top_k", "infill"), "grammar": 'root ::= "a"'},
        ):
            with pytest.raises(ValueError, match="infill needs"):
                Sampler(target, SamplingParams(**options))


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
def test_top_logprobs_with_drafts_equal_those_without(target_name: str) -> None:
    samplings = [
        SamplingParams(temperature=0.0, logprobs=True, n_top_logprobs=n) for n in (5, 0, 3)
    ]
    runs = {}
    with Model(MODELS / TARGETS[target_name], placement=ON_CPU) as target:
        for draft_type in ("none", "mtp"):
            with Engine(target, None, params(draft_type, exact=True)) as engine:
                runs[draft_type] = generate(engine, samplings, 40, 0 if draft_type == "none" else 3)
    assert runs["mtp"].n_accepted > 0
    for i, n in enumerate((5, 0, 3)):
        compare_tops(runs["none"], runs["mtp"], i, n)


def compare_tops(plain: Run, drafted: Run, i: int, n: int) -> None:
    assert drafted.tokens[i][: len(plain.tokens[i])] == plain.tokens[i]
    for token, row, other_row, logprob in zip(
        plain.tokens[i], plain.tops[i], drafted.tops[i], drafted.logprobs[i], strict=False
    ):
        ids, values = other_row
        assert len(ids) >= n  # the greatest of the plan
        assert (ids[n:] == -1).all()
        assert np.isnan(values[n:]).all()
        np.testing.assert_array_equal(row[1][:n], values[:n])
        assert (np.diff(values[:n]) <= 0).all()
        if n:
            assert (ids[0], values[0]) == (token, pytest.approx(logprob))  # greedy
            assert np.exp(values[:n].astype(np.float64)).sum() <= 1 + 1e-5


def test_nothing_is_told_that_was_not_asked_for() -> None:
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params("none")) as engine,
    ):
        run = generate(engine, [SamplingParams(temperature=0.0)], 3, 0)
    assert all(len(ids) == 0 for ids, _ in run.tops[0])


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -3, "maximum": 120},
        "s": {"type": "string", "maxLength": 6},
        "k": {"enum": ["x", "y", None]},
    },
    "required": ["n", "k"],
}
PATTERN = r"(def|class) [a-z_]{1,8}\((self(, [a-z]{1,3}){0,2})?\):"
WORDS = ["alpha", "alphabet", "beta", "gamma ray"]


def is_valid_object(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) <= {"n", "s", "k"}
        and type(value["n"]) is int
        and -3 <= value["n"] <= 120
        and value["k"] in ("x", "y", None)
        and len(value.get("s", "")) <= 6
    )


CONSTRAINTS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "regex": (regex_grammar(PATTERN), lambda text: bool(re.fullmatch(PATTERN, text))),
    "schema": (json_schema_grammar(SCHEMA), is_valid_object),
    "choice": (choice_grammar(WORDS), lambda text: text in WORDS),
}


@pytest.mark.parametrize("target_name", ["dense", "hybrid"])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_generated_texts_obey_their_constraint(target_name: str, name: str) -> None:
    grammar, is_valid = CONSTRAINTS[name]
    with (
        Model(MODELS / TARGETS[target_name]) as target,
        Engine(target, None, params("mtp")) as engine,
    ):
        n_ended = 0
        for first in range(0, 12, 4):
            seeds = range(first, first + 4)
            samplings = [
                SamplingParams(seed=seed, temperature=1.5, top_k=0, top_p=1.0, grammar=grammar)
                for seed in seeds
            ]
            run = generate(engine, samplings, 120, 3)
            assert run.status == [0] * 4
            for tokens in run.tokens:
                if target.is_eog(tokens[-1]):
                    n_ended += 1
                    text = target.detokenize(tokens[:-1]).decode()
                    assert is_valid(text), text
        assert n_ended >= 10  # others ran into the limit of tokens


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_leads_nowhere_ends_its_sequence_alone(
    draft_type: str, temperature: float
) -> None:
    nowhere = SamplingParams(seed=1, temperature=temperature, grammar="root ::= [ab] <[999999]>")
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params(draft_type)) as engine,
    ):
        k = 0 if draft_type == "none" else 2
        run = generate(engine, [nowhere, SamplingParams(temperature=0.0)], 8, k)
    assert run.status == [Status.NO_TOKEN_ALLOWED, 0]
    assert len(run.tokens[1]) >= 8
