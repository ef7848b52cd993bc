"""Generation: distribution and counts on decoders of four tokens, the same text on real models."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, Referee, prompts
from tests.support.four_tokens import (
    DRAFTS,
    N_TRIALS,
    PLAIN,
    TARGET,
    TOTAL_VARIATION,
    FourTokens,
    constant,
    total_variation,
    turning,
)

from drafthouse_engine import (
    DecoderConfig,
    DecoderPool,
    DraftTree,
    Eagle3Drafter,
    EngineError,
    Generation,
    GenerationMethod,
    InvalidArgument,
    InvalidConfig,
    Model,
    NoMtpHeads,
    SamplingParams,
    TreeDecoder,
    TreeShape,
    Unsupported,
    generate,
    generate_autoregressive,
    generate_tree,
    generate_vanilla,
    token_distribution,
)

Way = Callable[[FourTokens, FourTokens, int, np.random.Generator], Generation]


def vanilla(
    target: FourTokens, draft: FourTokens, n_tokens: int, rng: np.random.Generator
) -> Generation:
    return generate_vanilla(target, draft, [0], n_tokens, n_draft=2, sampling=PLAIN, rng=rng)


def tree(
    target: FourTokens, draft: FourTokens, n_tokens: int, rng: np.random.Generator
) -> Generation:
    shape = TreeShape(depth=2, width=2, n_nodes=4)
    return generate_tree(target, draft, [0], n_tokens, shape=shape, sampling=PLAIN, rng=rng)


WAYS: dict[str, Way] = {"vanilla": vanilla, "tree": tree}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("way", WAYS)
def test_each_token_is_drawn_from_the_target(way: str, draft: str) -> None:
    rng = np.random.default_rng(21)
    n_tokens = 4
    n_texts = N_TRIALS // n_tokens  # 20,000 tokens, each by a rule that its forerunner shifts
    target, drafter = FourTokens(turning(TARGET)), FourTokens(turning(DRAFTS[draft]))
    counts = np.zeros(4, np.int64)
    for _ in range(n_texts):
        target.rollback_to(0)
        drafter.rollback_to(0)
        found = WAYS[way](target, drafter, n_tokens, rng)
        text = (0, *found.tokens)
        assert len(text) == n_tokens + 1
        for last, token in itertools.pairwise(text):
            counts[(token - last) % 4] += 1
    assert total_variation(counts, TARGET) <= TOTAL_VARIATION
    assert counts[3] == 0, "a token of probability 0 was emitted"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 20])
def test_exactly_as_many_tokens_as_asked_for(way: str, n_tokens: int) -> None:
    target, draft = FourTokens(turning(TARGET)), FourTokens(constant(DRAFTS["uniform"]))
    found = WAYS[way](target, draft, n_tokens, np.random.default_rng(22))
    assert len(found.tokens) == n_tokens
    stats = found.stats
    assert 0 <= stats.n_accepted <= stats.n_drafted
    assert stats.n_target_forwards <= n_tokens <= stats.n_target_forwards + stats.n_accepted
    assert target.history == draft.history == (0, *found.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_an_equal_draft_is_accepted_whole(way: str) -> None:
    certain = turning((0.0, 1.0, 0.0, 0.0))
    found = WAYS[way](FourTokens(certain), FourTokens(certain), 9, np.random.default_rng(23))
    assert found.tokens == (1, 2, 3, 0, 1, 2, 3, 0, 1)
    assert found.stats.n_target_forwards == 3
    assert found.stats.n_accepted == 6


@pytest.mark.parametrize("end", [2, 3])
@pytest.mark.parametrize("way", [*WAYS, "autoregressive"])
def test_a_text_and_the_histories_end_with_its_ending_token(way: str, end: int) -> None:
    certain = turning((0.0, 1.0, 0.0, 0.0))
    target, draft = FourTokens(certain, (end,)), FourTokens(certain, (end,))
    rng = np.random.default_rng(24)
    if way == "autoregressive":
        found = generate_autoregressive(target, [0], 9, sampling=PLAIN, rng=rng)
    else:
        found = WAYS[way](target, draft, 9, rng)
        assert draft.history == (0, *found.tokens)
    assert found.tokens == (1, 2, 3)[:end]
    assert target.history == (0, *found.tokens)


def test_a_forbidden_ending_is_not_chosen() -> None:
    ends = FourTokens(constant((0.2, 0.2, 0.0, 0.6)), (3,))
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    rng = np.random.default_rng(25)
    found = generate_autoregressive(ends, [0], 50, sampling=sampling, rng=rng)
    assert set(found.tokens) == {0, 1}


def test_wrong_numbers_are_refused() -> None:
    one = FourTokens(constant(TARGET))
    with pytest.raises(InvalidArgument, match="no tokens"):
        generate_autoregressive(one, [], 3)
    with pytest.raises(InvalidArgument, match="n_tokens is 0"):
        generate_autoregressive(one, [0], 0)
    with pytest.raises(InvalidArgument, match="n_draft is 0"):
        generate_vanilla(one, one, [0], 3, n_draft=0)
    sampling = SamplingParams(penalty_repeat=1.2, grammar='root ::= "a"')
    with pytest.raises(Unsupported, match="penalty_repeat, grammar"):
        generate_autoregressive(one, [0], 3, sampling=sampling)
    with pytest.raises(InvalidConfig, match="depth"):
        TreeShape(depth=0)
    with pytest.raises(InvalidConfig, match="every leaf is a branch"):
        TreeShape(depth=32, width=8)


def test_distribution_filters_in_order() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])

    def found(**settings: float) -> list[float]:
        base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        sampling = SamplingParams(**base | settings)  # type: ignore[arg-type]  # numbers alone
        return [float(x) for x in token_distribution(logits, sampling)]

    assert found() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert found(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]
    assert found(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    assert found(top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    assert found(min_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    assert found(temperature=0.5) == pytest.approx(np.array([16, 9, 4, 1]) / 30)


# On the demo models.

N_PROMPTS = 3
N_TOKENS = 24


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    names = {*TARGETS.values(), *EAGLE3.values(), SIMPLE}
    opened = {name: Model(MODELS / name) for name in names}
    yield opened
    for model in opened.values():
        model.close()


def as_method(way: str) -> GenerationMethod:
    return "tree" if way == "eagle3-tree" else way  # type: ignore[return-value]  # a literal


METHODS: dict[str, GenerationMethod] = {
    "vanilla": "vanilla",
    "mtp": "mtp",
    "eagle3": "eagle3",
    "ngram": "ngram",
    "tree": "tree",
    "eagle3 tree": "tree",
}


def draft_of(way: str, target: str, models: dict[str, Model]) -> Model | None:
    names = {"vanilla": SIMPLE, "tree": SIMPLE}
    name = EAGLE3[target] if way.startswith("eagle3") else names.get(way)
    return models[name] if name else None


@pytest.mark.model
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", METHODS)
def test_greedy_text_is_the_same_with_any_draft(
    way: str, target: str, models: dict[str, Model]
) -> None:
    if METHODS[way] == "tree" and target == "hybrid":
        pytest.skip("a recurrent model has no trees: test_a_tree_needs_a_model_that_attends")
    model = models[TARGETS[target]]
    referee = Referee(target)
    n_forwards = n_accepted = 0
    for i, prompt in enumerate(prompts((90,) * N_PROMPTS)):
        plain = generate(model, prompt, n_tokens=N_TOKENS, n_threads=1)
        drafted = generate(
            model,
            prompt,
            method=METHODS[way],
            draft=draft_of(way, target, models),
            n_tokens=N_TOKENS,
            n_draft=3,
            n_threads=1,
        )
        assert len(plain.tokens) == N_TOKENS
        referee.compare(prompt, plain.tokens, drafted.tokens, i)
        stats = drafted.stats
        assert stats.n_prompt == 90
        assert 0 <= stats.n_accepted <= stats.n_drafted
        assert plain.stats.n_target_forwards == N_TOKENS
        n_forwards += stats.n_target_forwards
        n_accepted += stats.n_accepted
    assert n_accepted > 0
    assert n_forwards < N_PROMPTS * N_TOKENS
    referee.close()


@pytest.mark.model
@pytest.mark.parametrize("way", ["vanilla", "tree", "eagle3 tree"])
def test_a_seed_repeats_a_sampled_text(way: str, models: dict[str, Model]) -> None:
    model = models[TARGETS["dense"]]
    prompt = prompts((40,))[0]

    def tokens(seed: int) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return generate(
            model,
            prompt,
            method=METHODS[way],
            draft=draft_of(way, "dense", models),
            n_tokens=16,
            sampling=sampling,
            n_threads=1,
        ).tokens

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.model
def test_a_text_prompt_is_tokenised(models: dict[str, Model]) -> None:
    model = models[TARGETS["dense"]]
    found = generate(model, "import os\n", n_tokens=4, n_threads=1)
    ids = model.tokenize("import os\n")
    assert found.tokens == generate(model, ids, n_tokens=4, n_threads=1).tokens
    assert found.stats.n_prompt == len(ids)


@pytest.mark.model
def test_a_tree_needs_a_model_that_attends(models: dict[str, Model]) -> None:
    hybrid = models[TARGETS["hybrid"]]
    for draft in (models[SIMPLE], models[EAGLE3["hybrid"]]):
        with pytest.raises(Unsupported, match="single state per sequence"):
            generate(hybrid, [1, 2], method="tree", draft=draft, n_threads=1)


@pytest.mark.model
def test_what_does_not_fit_is_refused(models: dict[str, Model]) -> None:
    dense, simple = models[TARGETS["dense"]], models[SIMPLE]

    def refused(kind: type[EngineError], match: str, **settings: object) -> None:
        with pytest.raises(kind, match=match):
            generate(dense, **({"prompt": [1]} | settings))  # type: ignore[arg-type]  # on purpose

    refused(InvalidConfig, "method must be one of", method="magic")
    refused(InvalidArgument, "needs a draft model", method="vanilla")
    refused(InvalidArgument, "has no draft model", method="mtp", draft=simple)
    refused(InvalidArgument, "no tokens", prompt=[])
    refused(InvalidArgument, "no tokens", prompt="")
    refused(InvalidArgument, "the model's context has 1024", n_tokens=1024)
    refused(InvalidArgument, "at least 1", n_tokens=0)
    with pytest.raises(NoMtpHeads):
        generate(simple, [1], method="mtp")


N_DRAWS = 600
CHI_SQUARE_15 = 44.3
"""15 degrees of freedom, p = 0.0001."""


@pytest.mark.model
@pytest.mark.parametrize("way", ["vanilla", "tree", "eagle3 tree"])
def test_sampled_pairs_are_distributed_as_the_target_says(
    way: str, models: dict[str, Model]
) -> None:
    prompt = list(prompts((30,))[0])
    sampling = SamplingParams(temperature=1.3, top_k=4, top_p=1.0, min_p=0.0)
    config = DecoderConfig(n_ctx_seq=64, n_branch_max=16, n_threads=1)
    rng = np.random.default_rng(31)
    with (
        DecoderPool(models[TARGETS["dense"]], config) as pool,
        DecoderPool(models[SIMPLE], config) as drafts,
    ):
        target, draft = pool.tree_decoder(), drafts.tree_decoder()
        exact = exact_pairs(target, prompt, sampling)
        counts = dict.fromkeys(exact, 0)
        with contextlib.ExitStack() as stack:
            drafter: TreeDecoder | Eagle3Drafter = draft
            if way == "eagle3 tree":
                heads = models[EAGLE3["dense"]]
                drafter = stack.enter_context(Eagle3Drafter(target, heads, config))
            target.observe(prompt[:-1])
            draft.observe(prompt[:-1])
            for _ in range(N_DRAWS):
                target.rollback_to(len(prompt) - 1)
                draft.rollback_to(len(prompt) - 1)
                if METHODS[way] == "tree":
                    shape = TreeShape(depth=1, width=3, n_nodes=3)
                    found = generate_tree(
                        target, drafter, prompt[-1:], 2, shape=shape, sampling=sampling, rng=rng
                    )
                else:
                    found = generate_vanilla(
                        target, draft, prompt[-1:], 2, n_draft=1, sampling=sampling, rng=rng
                    )
                first, second = found.tokens
                counts[first, second] += 1  # a KeyError: a token of probability 0
    gaps = [(counts[pair] - N_DRAWS * p) ** 2 / (N_DRAWS * p) for pair, p in exact.items()]
    assert len(gaps) == 16
    assert sum(gaps) < CHI_SQUARE_15


def exact_pairs(
    target: TreeDecoder, prompt: list[int], sampling: SamplingParams
) -> dict[tuple[int, int], float]:
    """Returns the probability of every pair of tokens after a prompt."""
    target.observe(prompt)
    p = token_distribution(target.next_logits(), sampling)
    firsts = [int(token) for token in np.flatnonzero(p)]
    rows = target.tree_logits(DraftTree.from_paths(prompt[-1], [[token] for token in firsts]))
    target.reset()
    return {
        (first, int(second)): float(p[first] * q[second])
        for first, q in zip(firsts, token_distribution(rows[1:], sampling), strict=True)
        for second in np.flatnonzero(q)
    }
