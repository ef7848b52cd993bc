"""A decoder over four tokens whose distributions are known: what the algorithms are proven with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from drafthouse_engine import DraftTree, SamplingParams

Row = npt.NDArray[np.float64]
Rule = Callable[[int], Sequence[float]]

N_TRIALS = 20_000
TOTAL_VARIATION = 0.015
"""Greatest distance of 20,000 draws from the exact distribution; 0.005 is usual by chance."""
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

TARGET = (0.5, 0.3, 0.2, 0.0)
DRAFTS: dict[str, tuple[float, ...]] = {
    "equal": TARGET,
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "opposite": (0.0, 0.1, 0.2, 0.7),
}


def total_variation(counts: npt.NDArray[np.int64], exact: Sequence[float]) -> float:
    """Returns half the sum of the absolute differences."""
    return float(np.abs(counts / counts.sum() - np.asarray(exact)).sum() / 2)


class FourTokens:
    """A `TreeScorer`: the next token depends on the last one alone, by a rule."""

    def __init__(self, rule: Rule, eos_token_ids: tuple[int, ...] = ()) -> None:
        with np.errstate(divide="ignore"):
            self._logits = np.log(np.array([rule(token) for token in range(4)]))
        self._history: list[int] = []
        self._tree: DraftTree | None = None
        self.eos_token_ids = eos_token_ids
        self.n_forwards = 0

    @property
    def history(self) -> tuple[int, ...]:
        return tuple(self._history)

    @property
    def history_len(self) -> int:
        return len(self._history)

    def observe(self, ids: Sequence[int]) -> None:
        assert self._tree is None
        self._history += [int(token) for token in ids]

    def next_logits(self) -> Row:
        self.n_forwards += 1
        row: Row = self._logits[self._history[-1]]
        return row

    def batched_logits(self, drafts: Sequence[int]) -> Row:
        self.n_forwards += 1
        rows: Row = self._logits[[self._history[-1], *drafts]]
        self.observe(drafts)
        return rows

    def rollback_to(self, length: int) -> None:
        assert 0 <= length <= len(self._history)
        del self._history[length:]

    def tree_logits_keep_kv(self, tree: DraftTree) -> Row:
        assert self._tree is None
        assert tree.tokens[0] == self._history[-1]
        self.n_forwards += 1
        self._tree = tree
        rows: Row = self._logits[list(tree.tokens)]
        return rows

    def grow_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Row:
        assert self._tree is not None
        self.n_forwards += 1
        self._tree = self._tree.grown(tokens, parents)
        rows: Row = self._logits[list(tokens)]
        return rows

    def commit_tree_path(self, path: Sequence[int]) -> None:
        assert self._tree is not None
        assert self._tree.path_to(path[-1]) == list(path)
        tokens, self._tree = [self._tree.tokens[node] for node in path[1:]], None
        self.observe(tokens)


def constant(probabilities: Sequence[float]) -> Rule:
    """Returns the rule of one distribution for all tokens."""
    return lambda _last: probabilities


def turning(probabilities: Sequence[float]) -> Rule:
    """Returns the rule of a distribution that is shifted by the last token."""
    return lambda last: [probabilities[(i - last) % 4] for i in range(4)]
