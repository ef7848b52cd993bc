"""Generation of one text, with any way to draft.

| method | draft from | how drafts are verified | driven by |
|---|---|---|---|
| autoregressive | – | – | `Engine` |
| mtp, eagle3, ngram | MTP heads, an EAGLE-3 model, repetitions | sample and match | `Engine` |
| vanilla | an ordinary small model, sampled | rejection, Leviathan et al. | two `Decoder`s |
| tree | an ordinary small model, top-k tree | sample and match along it | two `TreeDecoder`s |
| tree | an EAGLE-3 model, top-k tree | the same | `TreeDecoder` and `Eagle3Drafter` |

Every method draws from the target's own distribution; at temperature 0 all write the same text, up
to ties of logits.

`generate` never drafts unless told to. A tree takes more tokens per forward of the target than a
chain, at the price of more nodes: on the dense demo model 4 × 4 levels with 12 nodes give 2.59
tokens, a chain of 4 gives 2.28; with as many nodes as the chain has tokens, the tree gives less.
So a tree pays where the target verifies further nodes nearly for free (large weights, few streams)
or where the draft is slow: 2 levels of 4 nodes reach what a chain reaches with 4 draft forwards.
On small models on a CPU, where each node costs, the chain is faster, with an EAGLE-3 model too
(3.6 tokens a forward by 4 × 4 levels with 16 nodes, 3.1 by a chain of 4). Measure your own models:
`python -m drafthouse_bench.tree`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import Engine, Model, Sampler, int32_array
from drafthouse_engine.decoder_config import DecoderConfig
from drafthouse_engine.decoder_pool import DecoderPool
from drafthouse_engine.distribution import (
    Probabilities,
    check_sampling,
    sample_token,
    token_distribution,
)
from drafthouse_engine.eagle3_drafter import Eagle3Drafter
from drafthouse_engine.errors import (
    BY_STATUS,
    IncompatibleDraft,
    InternalError,
    InvalidArgument,
    InvalidConfig,
)
from drafthouse_engine.fields import check_int, refusal
from drafthouse_engine.options import DraftType, EngineParams, SamplingParams
from drafthouse_engine.rejection import speculative_sample
from drafthouse_engine.step import PLAN_DTYPE, StepResult
from drafthouse_engine.tree import DraftTree
from drafthouse_engine.tree_decoder import TreeDecoder

__all__ = [
    "Generation",
    "GenerationMethod",
    "GenerationStats",
    "Scorer",
    "TreeDrafter",
    "TreeScorer",
    "TreeShape",
    "generate",
    "generate_autoregressive",
    "generate_tree",
    "generate_vanilla",
]

GenerationMethod: TypeAlias = Literal["autoregressive", "vanilla", "mtp", "eagle3", "ngram", "tree"]
"""How `generate` drafts."""

METHODS: Final[tuple[GenerationMethod, ...]] = get_args(GenerationMethod)
ENGINE_TYPES: Final[dict[GenerationMethod, DraftType]] = {
    "autoregressive": "none",
    "mtp": "mtp",
    "eagle3": "eagle3",
    "ngram": "ngram-simple",
}
WITH_DRAFT: Final = ("vanilla", "eagle3", "tree")
N_NGRAM_MIN: Final = 8
"""llama.cpp's simple n-gram drafter proposes nothing shorter than 4; it gets room for more."""

N_BRANCH_LIMIT: Final = 256

GREEDY: Final = SamplingParams(temperature=0.0)
Rows: TypeAlias = npt.NDArray[np.floating[Any]]


class Scorer(Protocol):
    """What the algorithms need of a decoder; see `Decoder`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation."""

    @property
    def history_len(self) -> int:
        """Number of committed tokens."""

    def observe(self, ids: Sequence[int]) -> None:
        """Appends tokens to the history."""

    def next_logits(self) -> Rows:
        """Returns the logits after the last committed token. Shape: [n_vocab]."""

    def batched_logits(self, drafts: Sequence[int]) -> Rows:
        """Scores the last token and drafts, which are committed. Shape: [n_drafts + 1, n_vocab]."""

    def rollback_to(self, length: int) -> None:
        """Cuts the history."""


class TreeScorer(Scorer, Protocol):
    """What tree drafting needs of a decoder; see `TreeDecoder`."""

    @property
    def history(self) -> tuple[int, ...]:
        """The committed tokens."""

    def tree_logits_keep_kv(self, tree: DraftTree) -> Rows:
        """Scores a tree and keeps it. Shape: [n_nodes, n_vocab]."""

    def grow_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Scores further nodes of the tree. Shape: [n_new, n_vocab]."""

    def commit_tree_path(self, path: Sequence[int]) -> None:
        """Commits a path of the tree and drops the rest."""


class TreeDrafter(Protocol):
    """What drafts a tree after the target's last token; see `Eagle3Drafter`."""

    def draft_root(self) -> Rows | None:
        """Begins a tree. Shape: [n_vocab]; None when there is nothing to draft from."""

    def draft_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Adds nodes, numbered from 1 on; 0 is the root. Shape: [n_nodes, n_vocab]."""

    def end_draft(self) -> None:
        """Drops the tree."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Size of a draft tree.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    depth: int = 4
    """Draft tokens on the longest path, ≥ 1; the draft model runs this often per tree."""
    width: int = 4
    """Nodes kept of each level, [1, 32]; each is drafted on with its `width` best tokens."""
    n_nodes: int = 12
    """Draft nodes that the target scores: the likeliest of all levels, ≥ 1."""

    def __post_init__(self) -> None:
        check_int(self, "depth", 1, 64)
        check_int(self, "width", 1, 32)
        check_int(self, "n_nodes", 1, 255)
        if self.depth * self.width >= N_BRANCH_LIMIT:
            raise refusal(
                self, "width", self.width, f"below {N_BRANCH_LIMIT} / depth: every leaf is a branch"
            )


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What a generation did."""

    n_prompt: int
    """Tokens of the prompt."""
    n_target_forwards: int
    """Forwards of the target after the prompt; the first token comes with the prompt's own unless
    it is drafted already."""
    n_draft_forwards: int
    """Forwards of the draft model; 0 where the engine drives it."""
    n_drafted: int
    """Draft tokens verified; of a tree, all its nodes."""
    n_accepted: int
    """Draft tokens accepted."""
    prompt_s: float
    """Time until the prompt was read."""
    total_s: float
    """The whole time."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text."""

    tokens: tuple[int, ...]
    """The new tokens; one that ends a generation is the last of them."""
    stats: GenerationStats
    """What it took."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, prompt not counted."""
        return len(self.tokens) / max(1e-9, self.stats.total_s - self.stats.prompt_s)


class _Run:
    """Tokens and counters of a generation under way."""

    def __init__(
        self,
        target: Scorer,
        prompt: Sequence[int],
        n_tokens: int,
        sampling: SamplingParams | None,
        rng: np.random.Generator | None,
    ) -> None:
        if len(prompt) == 0:
            raise InvalidArgument("the prompt has no tokens")
        if n_tokens < 1:
            raise InvalidArgument(f"n_tokens is {n_tokens}; expected at least 1")
        self.sampling: Final = sampling or GREEDY
        check_sampling(self.sampling)
        self.rng: Final = rng or np.random.default_rng(self.sampling.seed)
        self.ends: Final = frozenset(target.eos_token_ids)
        self.forbidden: Final = sorted(self.ends) if self.sampling.ignore_eos else []
        self.n_tokens: Final = n_tokens
        self.n_prompt: Final = len(prompt)
        self.tokens: list[int] = []
        self.n_target_forwards = 0
        self.n_draft_forwards = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self._start_s = time.perf_counter()
        self._prompt_s = 0.0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.n_tokens or (
            bool(self.tokens) and self.tokens[-1] in self.ends
        )

    @property
    def n_left(self) -> int:
        return self.n_tokens - len(self.tokens)

    def has_prompt(self) -> None:
        self._prompt_s = time.perf_counter() - self._start_s

    def distribution(self, logits: Rows) -> Probabilities:
        return token_distribution(logits, self.sampling, self.forbidden)

    def emit(self, tokens: Sequence[int]) -> int:
        """Takes tokens up to the first that ends the generation; returns how many."""
        n = 0
        while n < len(tokens) and not self.is_done:
            self.tokens.append(int(tokens[n]))
            n += 1
        return n

    def result(self) -> Generation:
        stats = GenerationStats(
            n_prompt=self.n_prompt,
            n_target_forwards=self.n_target_forwards,
            n_draft_forwards=self.n_draft_forwards,
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
            prompt_s=self._prompt_s,
            total_s=time.perf_counter() - self._start_s,
        )
        return Generation(tuple(self.tokens), stats)


def generate_autoregressive(
    target: Scorer,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    sampling: SamplingParams | None = None,
    rng: np.random.Generator | None = None,
) -> Generation:
    """Generates one token per forward.

    Args:
        target: a decoder; its history goes on with the prompt and the new tokens, no others.
        prompt: tokens, at least one.
        n_tokens: most new tokens, ≥ 1.
        sampling: temperature, top_k, top_p, min_p, ignore_eos and seed; None is greedy.
        rng: where chance comes from; None makes one of the seed.

    Raises:
        InvalidArgument: the prompt is empty, or n_tokens is below 1.
        Unsupported: sampling asks for something else.
    """
    run = _Run(target, prompt, n_tokens, sampling, rng)
    target.observe(prompt)
    run.has_prompt()
    while not run.is_done:
        p = run.distribution(target.next_logits())
        run.n_target_forwards += 1
        token = sample_token(p, run.rng)
        run.emit([token])
        target.observe([token])
    return run.result()


def generate_vanilla(
    target: Scorer,
    draft: Scorer,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    n_draft: int = 4,
    sampling: SamplingParams | None = None,
    rng: np.random.Generator | None = None,
) -> Generation:
    """Generates with a chain of tokens sampled from a draft model.

    Args:
        target: a decoder; its history goes on with the prompt and the new tokens, no others.
        draft: a decoder of the draft model, with the same history and vocabulary.
        prompt: tokens, at least one.
        n_tokens: most new tokens, ≥ 1.
        n_draft: draft tokens of a round, ≥ 1.
        sampling: as for `generate_autoregressive`; the draft is sampled the same way.
        rng: where chance comes from; None makes one of the seed.

    Raises:
        InvalidArgument: the prompt is empty, or a number is below 1.
        Unsupported: sampling asks for something else.

    Source:
        Leviathan et al., arXiv:2211.17192, Alg. 1.
    """
    if n_draft < 1:
        raise InvalidArgument(f"n_draft is {n_draft}; expected at least 1")
    run = _Run(target, prompt, n_tokens, sampling, rng)
    target.observe(prompt)
    draft.observe(prompt)
    run.has_prompt()
    while not run.is_done:
        _vanilla_round(run, target, draft, min(n_draft, run.n_left - 1))
    return run.result()


def _vanilla_round(run: _Run, target: Scorer, draft: Scorer, n_draft: int) -> None:
    n_past = target.history_len
    tokens, q = _draft_chain(run, draft, n_draft)
    p = run.distribution(target.batched_logits(tokens))
    run.n_target_forwards += 1
    n_accepted, last = speculative_sample(list(p), q, tokens, run.rng)
    chosen = [*tokens[:n_accepted], last]
    chosen = chosen[: run.emit(chosen)]
    run.n_drafted += len(tokens)
    run.n_accepted += min(n_accepted, len(chosen))
    for decoder in (target, draft):
        n_known = min(n_accepted, decoder.history_len - n_past, len(chosen))
        decoder.rollback_to(n_past + n_known)
        decoder.observe(chosen[n_known:])


def _draft_chain(run: _Run, draft: Scorer, n_draft: int) -> tuple[list[int], list[Probabilities]]:
    tokens: list[int] = []
    q: list[Probabilities] = []
    while len(tokens) < n_draft and not (tokens and tokens[-1] in run.ends):
        if tokens:
            draft.observe(tokens[-1:])
        q.append(run.distribution(draft.next_logits()))
        run.n_draft_forwards += 1
        tokens.append(sample_token(q[-1], run.rng))
    return tokens, q


def generate_tree(
    target: TreeScorer,
    draft: TreeScorer | Eagle3Drafter,
    prompt: Sequence[int],
    n_tokens: int,
    *,
    shape: TreeShape | None = None,
    sampling: SamplingParams | None = None,
    rng: np.random.Generator | None = None,
) -> Generation:
    """Generates with a tree of the draft model's likeliest continuations.

    The target chooses a token at each node by its own distribution and goes on where the tree has
    it, so the text is distributed as without a draft.

    Args:
        target: a tree decoder; its history goes on with the prompt and the new tokens, no others.
        draft: a tree decoder of the draft model, with the same history and vocabulary, or an
            EAGLE-3 drafter of the target.
        prompt: tokens, at least one.
        n_tokens: most new tokens, ≥ 1.
        shape: size of the trees; None means the defaults.
        sampling: as for `generate_autoregressive`; the tree does not depend on it.
        rng: where chance comes from; None makes one of the seed.

    Raises:
        InvalidArgument: the prompt is empty, or n_tokens is below 1.
        Unsupported: sampling asks for something else.

    Source:
        Li et al., EAGLE-2, arXiv:2406.16858, section 4: expansion by level, reranking of all nodes.
    """
    run = _Run(target, prompt, n_tokens, sampling, rng)
    drafter: TreeDrafter = draft if isinstance(draft, Eagle3Drafter) else _ModelDrafter(draft)
    target.observe(prompt)
    if isinstance(drafter, _ModelDrafter):
        drafter.model.observe(prompt)
    run.has_prompt()
    while not run.is_done:
        _tree_round(run, target, drafter, shape or TreeShape())
    return run.result()


class _ModelDrafter:
    """An ordinary model as drafter: its nodes that are committed stay in its cache."""

    def __init__(self, model: TreeScorer) -> None:
        self.model: Final = model

    def draft_root(self) -> Rows:
        root = self.model.history[-1]
        row: Rows = self.model.tree_logits_keep_kv(DraftTree((root,), (-1,)))[0]
        return row

    def draft_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        return self.model.grow_tree(tokens, parents)

    def end_draft(self) -> None:
        self.model.commit_tree_path([0])

    def commit(self, path: Sequence[int], rest: Sequence[int]) -> None:
        """Commits a path of the tree, and tokens that it does not have."""
        self.model.commit_tree_path(path)
        self.model.observe(rest)


def _tree_round(run: _Run, target: TreeScorer, drafter: TreeDrafter, shape: TreeShape) -> None:
    root = target.history[-1]
    tree, draft_nodes = _draft_tree(run, root, drafter, shape)
    logits = target.tree_logits_keep_kv(tree)
    run.n_target_forwards += 1
    path, last = _walk(run, tree, logits)
    chosen = [*(tree.tokens[node] for node in path[1:]), last]
    chosen = chosen[: run.emit(chosen)]
    path = path[: len(chosen) + 1]
    run.n_drafted += len(tree) - 1
    run.n_accepted += len(path) - 1
    target.commit_tree_path(path)
    target.observe(chosen[len(path) - 1 :])
    if isinstance(drafter, _ModelDrafter):
        known = [node for node in (draft_nodes[node] for node in path) if node is not None]
        drafter.commit(known, chosen[len(known) - 1 :])
    else:
        drafter.end_draft()


def _walk(run: _Run, tree: DraftTree, logits: Rows) -> tuple[list[int], int]:
    """Chooses a token at each node, from the root on, as long as the tree has it."""
    path = [0]
    while True:
        token = sample_token(run.distribution(logits[path[-1]]), run.rng)
        child = tree.child(path[-1], token)
        if child is None or token in run.ends:
            return path, token
        path.append(child)


@dataclass(slots=True)
class _Candidate:
    """A node of a tree that is being drafted."""

    token: int
    parent: int
    score: float
    node: int | None = None


def _draft_tree(
    run: _Run, root: int, drafter: TreeDrafter, shape: TreeShape
) -> tuple[DraftTree, list[int | None]]:
    """Drafts a tree; returns it and, for each of its nodes, that of the drafter's tree."""
    row = drafter.draft_root()
    if row is None:
        return DraftTree((root,), (-1,)), [0]
    rows = row[None]
    found = [_Candidate(root, -1, 0.0, node=0)]
    frontier = [0]
    n_drafted = 1
    for level in range(min(shape.depth, max(1, run.n_left - 1))):
        if level > 0:
            parents = [found[found[i].parent].node for i in frontier]
            tokens = [found[i].token for i in frontier]
            rows = drafter.draft_nodes(tokens, [node for node in parents if node is not None])
            for i in frontier:
                found[i].node = n_drafted
                n_drafted += 1
        run.n_draft_forwards += 1
        first = len(found)
        for i, row in zip(frontier, rows, strict=True):
            found += _best_children(i, found[i].score, row, shape.width)
        frontier = _likeliest(found, range(first, len(found)), shape.width)
    return _pruned(found, shape.n_nodes)


def _best_children(parent: int, score: float, logits: Rows, width: int) -> list[_Candidate]:
    shifted = np.asarray(logits, np.float64) - logits.max()
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-logs, min(width, len(logs)) - 1)[:width]
    # An EAGLE-3 model may know a part of the vocabulary only; the rest has no probability.
    known = best[np.isfinite(logs[best])]
    return [_Candidate(int(token), parent, score + float(logs[token])) for token in known]


def _likeliest(found: Sequence[_Candidate], among: Sequence[int], n: int) -> list[int]:
    best = sorted(among, key=lambda i: (-found[i].score, i))[:n]
    return sorted(best)


def _pruned(found: Sequence[_Candidate], n_nodes: int) -> tuple[DraftTree, list[int | None]]:
    """Keeps the likeliest nodes. None is likelier than its parent, so every parent is kept."""
    kept = [0, *_likeliest(found, range(1, len(found)), n_nodes)]
    place = {i: node for node, i in enumerate(kept)}
    parents = [-1, *(place[found[i].parent] for i in kept[1:])]
    tree = DraftTree(tuple(found[i].token for i in kept), tuple(parents))
    return tree, [found[i].node for i in kept]


def generate(
    target: Model,
    prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    method: GenerationMethod = "autoregressive",
    draft: Model | None = None,
    n_tokens: int = 128,
    n_draft: int = 4,
    shape: TreeShape | None = None,
    sampling: SamplingParams | None = None,
    n_threads: int = 0,
) -> Generation:
    """Generates a text and makes all that it needs for that.

    Args:
        target: the model.
        prompt: a text, or tokens.
        method: how to draft.
        draft: the draft model of the methods vanilla, eagle3 and tree; a tree is drafted by an
            ordinary model or by an EAGLE-3 model.
        n_tokens: most new tokens, ≥ 1; fewer when a token ends the generation.
        n_draft: most draft tokens of a round, ≥ 1; trees have their `shape`.
        shape: size of the trees of the method tree; None means the defaults.
        sampling: how tokens are chosen; None is greedy. The methods vanilla and tree know
            temperature, top_k, top_p, min_p, ignore_eos and seed.
        n_threads: 0 is all cores that the process may use (`find_cores`).

    Raises:
        InvalidConfig: there is no such method.
        InvalidArgument: the prompt is empty, prompt and new tokens exceed the model's context, or
            a draft model is missing or was given to a method without one.
        NoMtpHeads, NotEagle3, IncompatibleDraft: the models do not fit the method.
        Unsupported: the method tree on a recurrent model, or sampling that a method does not know.

    Example:
        >>> found = generate(model, "def add(a, b):", method="mtp")
        >>> model.detokenize(found.tokens).decode()
    """
    _check_method(method, draft)
    tokens = _prompt_tokens(target, prompt)
    n_ctx = len(tokens) + n_tokens
    if n_tokens < 1 or n_draft < 1:
        raise InvalidArgument("n_tokens and n_draft must be at least 1")
    if n_ctx > target.n_ctx_train:
        raise InvalidArgument(
            f"prompt and new tokens are {n_ctx}; the model's context has {target.n_ctx_train}"
        )
    if method in ENGINE_TYPES:
        n_draft = max(n_draft, N_NGRAM_MIN) if method == "ngram" else n_draft
        params = EngineParams(
            draft_type=ENGINE_TYPES[method],
            n_ctx_seq=n_ctx + n_draft,
            n_draft_max=n_draft,
            n_threads=n_threads,
        )
        with Engine(target, draft, params) as engine:
            return _EngineRun(engine, sampling or GREEDY).generate(tokens, n_tokens)
    assert draft is not None  # _check_method
    if draft.n_vocab != target.n_vocab:
        raise IncompatibleDraft(
            f"the draft model has {draft.n_vocab} tokens, the target {target.n_vocab}"
        )
    if method == "vanilla":
        config = _pool_config(n_ctx, n_draft + 1, 0, n_threads)
        with DecoderPool(target, config) as pool, DecoderPool(draft, config) as drafts:
            return generate_vanilla(
                pool.decoder(),
                drafts.decoder(),
                tokens,
                n_tokens,
                n_draft=n_draft,
                sampling=sampling,
            )
    size = shape or TreeShape()
    n_draft_nodes = 1 + size.depth * size.width
    config = _pool_config(n_ctx, size.n_nodes + 1, size.n_nodes, n_threads)
    draft_config = _pool_config(config.n_ctx_seq, n_draft_nodes, n_draft_nodes, n_threads)
    with ExitStack() as stack:
        scorer = stack.enter_context(DecoderPool(target, config)).tree_decoder()
        drafter: TreeDecoder | Eagle3Drafter
        if draft.n_target_layers > 0:
            drafter = stack.enter_context(Eagle3Drafter(scorer, draft, draft_config))
        else:
            drafter = stack.enter_context(DecoderPool(draft, draft_config)).tree_decoder()
        return generate_tree(scorer, drafter, tokens, n_tokens, shape=size, sampling=sampling)


def _check_method(method: str, draft: Model | None) -> None:
    if method not in METHODS:
        raise InvalidConfig(
            f"method must be one of {', '.join(METHODS)}, not {method!r}",
            field="method",
            value=method,
        )
    if (draft is not None) != (method in WITH_DRAFT):
        needs = "needs a draft model" if draft is None else "has no draft model"
        raise InvalidArgument(f"the method {method} {needs}")


def _prompt_tokens(
    model: Model, prompt: str | Sequence[int] | npt.NDArray[np.integer[Any]]
) -> list[int]:
    ids = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    tokens: list[int] = int32_array(ids, "prompt").tolist()
    if not tokens:
        raise InvalidArgument("the prompt has no tokens")
    return tokens


def _pool_config(n_ctx: int, n_scored: int, n_branches: int, n_threads: int) -> DecoderConfig:
    n_outputs = max(n_scored, 16)
    return DecoderConfig(
        # A draft may reach beyond the last token that is wanted.
        n_ctx_seq=n_ctx + n_scored,
        n_branch_max=min(n_branches, 255),
        n_outputs_max=n_outputs,
        n_ubatch=max(512, n_outputs),
        n_rs_seq=min(max(1, n_scored - 1), 64),
        n_threads=n_threads,
    )


class _EngineRun:
    """A generation that `Engine.step` drives, one sequence alone."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._engine = engine
        engine.seq_begin(0, Sampler(engine.target, sampling))
        self._n_forwards = 0
        self._n_drafted = 0
        self._n_accepted = 0

    def generate(self, prompt: list[int], n_tokens: int) -> Generation:
        start_s = time.perf_counter()
        tokens = self._read(prompt)
        prompt_s = time.perf_counter() - start_s
        ends = set(self._engine.target.eos_token_ids)
        while len(tokens) < n_tokens and tokens[-1] not in ends:
            n_draft = min(self._engine.limits.n_draft_max, n_tokens - len(tokens) - 1)
            tokens += self._step(tokens[-1:], n_draft, is_output=True)
        stats = GenerationStats(
            n_prompt=len(prompt),
            n_target_forwards=self._n_forwards,
            n_draft_forwards=0,
            n_drafted=self._n_drafted,
            n_accepted=self._n_accepted,
            prompt_s=prompt_s,
            total_s=time.perf_counter() - start_s,
        )
        return Generation(tuple(tokens), stats)

    def _read(self, prompt: list[int]) -> list[int]:
        n_batch = self._engine.limits.n_batch
        tokens: list[int] = []
        for start in range(0, len(prompt), n_batch):
            is_last = start + n_batch >= len(prompt)
            tokens = self._step(prompt[start : start + n_batch], 0, is_output=is_last)
        self._n_forwards = 1  # the forward that gave the first token
        return tokens

    def _step(self, tokens: list[int], n_draft: int, *, is_output: bool) -> list[int]:
        n_past = self._engine.seq_n_past(0)
        entry = (0, n_past, 0, len(tokens), n_draft, is_output)
        result = self._engine.step(np.array([entry], PLAN_DTYPE), np.array(tokens, np.int32))
        self._count(result)
        return [int(token) for token in result.tokens]

    def _count(self, result: StepResult) -> None:
        entry = result.entries[0]
        if entry["status"] != 0:
            kind: Callable[[str], Exception] = BY_STATUS.get(int(entry["status"]), InternalError)
            raise kind("the step failed; the sequence was given up")
        self._n_forwards += 1
        self._n_drafted += int(entry["n_drafted"])
        self._n_accepted += int(entry["n_accepted"])
