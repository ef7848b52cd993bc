"""Scoring of draft trees: many drafts of one history in one forward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafthouse_engine.decoder import N_WAITING_MAX, Decoder
from drafthouse_engine.errors import (
    BadPlan,
    EngineError,
    InvalidArgument,
    ProposalPending,
    Unsupported,
    WrongRoot,
)
from drafthouse_engine.scores import Rows, Scores
from drafthouse_engine.tree import DraftTree

if TYPE_CHECKING:
    from drafthouse_engine.decoder_pool import DecoderPool

__all__ = ["TreeDecoder"]


class TreeDecoder(Decoder):
    """A decoder that scores draft trees: all nodes in one forward, each seeing its ancestors only.

    Every leaf takes a branch of the pool, a sequence id of its own that shares the cells of the
    history; one tree at a time hangs in a pool.

    Source:
        Miao et al., SpecInfer, arXiv:2305.09781, section 4.2 (tree attention).
    """

    def __init__(self, pool: DecoderPool, seq_id: int) -> None:
        super().__init__(pool, seq_id)
        self._tree: DraftTree | None = None
        self._tree_scores: Scores | None = None
        self._root = 0  # number of the root in the context's tree; −1 when its row was known

    @property
    def tree(self) -> DraftTree | None:
        """The tree that waits for `commit_tree_path`."""
        return self._tree

    def tree_logits(self, tree: DraftTree) -> Rows:
        """Scores a tree; history and KV stay as they were.

        Args:
            tree: its root is the last committed token.

        Shape:
            [n_nodes, n_vocab] float32; row 0 equals `next_logits()`; read-only.

        Raises:
            WrongRoot: the root is another token.
            InvalidArgument: more nodes than n_outputs_max, or more leaves than n_branch_max.
            NoRoom: the deepest node would lie beyond n_ctx_seq, or the KV cache is full.
            BadPlan: the history is empty, or a tree of another decoder waits.
            ProposalPending: a tree waits for its path.
        """
        logits = self.tree_logits_keep_kv(tree)
        self.commit_tree_path([0])
        return logits

    def tree_logits_keep_kv(self, tree: DraftTree) -> Rows:
        """Scores a tree and keeps its KV until `commit_tree_path`; see `tree_logits`."""
        self._refuse_pending()
        self._require_history()
        last = self._history[-1]
        if tree.tokens[0] != last:
            raise WrongRoot(
                f"the root is token {tree.tokens[0]}; the last committed one is {last}",
                root=tree.tokens[0],
                last=last,
            )
        self._check_size(len(tree))
        n = len(self._history)
        waiting: list[int] = []
        if self._is_scored():
            assert self._scores is not None
            self._root = -1
            self._tree_scores = self._scores.pick(n, [n - self._scores.start])
        else:
            waiting = self._bring(len(tree))
            self._root = len(waiting)
            self._tree_scores = None
        first = 1 if self._root < 0 else 0
        self._hang(tree.tokens[first:], tree.parents[first:], waiting)
        self._tree = tree
        assert self._tree_scores is not None
        return self._tree_scores.logits

    def _check_size(self, n_nodes: int) -> None:
        n_max = self._pool.limits.n_outputs_max
        if n_nodes > n_max:
            raise InvalidArgument(f"the tree has {n_nodes} nodes; at most {n_max} are scored")

    def _bring(self, n_nodes: int) -> list[int]:
        """Returns the tokens that go into the KV cache with the tree, before its root."""
        n = len(self._history)
        self._cut(n - 1)
        n_waiting = n - 1 - self._n_cached
        if n_waiting > min(N_WAITING_MAX, self._pool.limits.n_outputs_max - n_nodes):
            try:
                self._fill(n - 1)
            except EngineError:
                self._resync()
                raise
        return self._history[self._n_cached : n - 1]

    def grow_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Scores further nodes of the tree that waits.

        Args:
            tokens: of the new nodes, in order; they are numbered on from the tree's.
            parents: nodes that they follow.

        Shape:
            [n_new, n_vocab] float32; read-only.

        Raises:
            BadPlan: no tree waits.
            InvalidArgument: too many nodes, or a parent that is not before its child; the tree
                still waits. Too many leaves: the tree is dropped.
            NoRoom: a node would lie beyond n_ctx_seq, or the KV cache is full; it is dropped.
        """
        if self._tree is None:
            raise BadPlan("no tree waits for further nodes")
        grown = self._tree.grown(tokens, parents)
        self._check_size(len(grown))
        n_old = len(self._tree)
        self._hang(grown.tokens[n_old:], grown.parents[n_old:])
        self._tree = grown
        assert self._tree_scores is not None
        return self._tree_scores.logits[n_old:]

    def commit_tree_path(self, path: Sequence[int]) -> None:
        """Commits the tokens of a path without a second forward, and drops all other nodes.

        Args:
            path: nodes from the root on, each a child of the one before; [0] commits nothing new.

        Raises:
            BadPlan: no tree waits.
            InvalidArgument: it is no such path; the tree still waits.
        """
        self._use()
        if self._tree is None or self._tree_scores is None:
            raise BadPlan("no tree waits for its path")
        nodes = [int(node) for node in path]
        if not nodes or self._tree.path_to(nodes[-1]) != nodes:
            raise InvalidArgument(f"{nodes} is no path from the root of the tree")
        n = len(self._history)
        is_kept = True
        if self._has_nodes(self._tree):
            kept = [node + self._root for node in nodes if node + self._root >= 0]
            is_kept = self._commit([*range(self._root), *kept])
        if self._follower is not None:
            first = 0 if self._root >= 0 else 1  # node of the context's tree
            self._follower._keep_path(n - 1 + first, [node - first for node in nodes[first:]])
        self._history += [self._tree.tokens[node] for node in nodes[1:]]
        scores = self._tree_scores.pick(n, nodes)
        if is_kept:
            self._n_cached = n + len(nodes) - 1
            self._scores = scores
        else:
            self._resync()
        self._tree = self._tree_scores = None

    def _commit(self, path: list[int]) -> bool:
        """Takes a path of the context's tree into the cache.

        Returns:
            False where it cannot be taken: a tree deeper than the model's sliding window has lost
            its top. Then the tree is dropped, and the next forward decodes the path again.
        """
        try:
            self._context.tree_commit(self._seq_id, path)
        except Unsupported:
            self._context.tree_commit(self._seq_id, [])
            return False
        return True

    def reset(self) -> None:
        """Forgets the history, and the tree that waits."""
        self._use()
        if self._tree is not None:
            self.commit_tree_path([0])
        super().reset()

    def _has_nodes(self, tree: DraftTree) -> bool:
        """Whether the context holds a part of the tree."""
        return self._root >= 0 or len(tree) > 1

    def _hang(
        self, tokens: Sequence[int], parents: Sequence[int], waiting: Sequence[int] = ()
    ) -> None:
        """Scores nodes, behind a chain of tokens of the history that are not cached yet."""
        if not tokens:
            return
        chain = range(-1, len(waiting) - 1)
        places = [parent + self._root if parent >= 0 else self._root - 1 for parent in parents]
        try:
            self._context.tree(self._seq_id, [*waiting, *tokens], [*chain, *places])
            if self._follower is not None:
                is_new = self._tree is None
                self._follower._add_nodes(self._n_cached, len(waiting), is_new=is_new)
        except EngineError:
            self._drop_broken_tree()
            raise
        n = len(self._history)
        rows = Scores.read(self._context, self._pool._layers, n)
        rows = rows.pick(n, slice(len(waiting), None))
        self._tree_scores = rows if self._tree_scores is None else self._tree_scores.then(rows)

    def _drop_broken_tree(self) -> None:
        """After a refused tree: none waits, also where a growing one was refused."""
        with contextlib.suppress(BadPlan):  # where the failed decode took it away
            self._context.tree_commit(self._seq_id, [])
        self._tree = self._tree_scores = None

    def _refuse_pending(self) -> None:
        super()._refuse_pending()
        if self._tree is not None:
            raise ProposalPending(
                f"a tree of sequence {self._seq_id} waits for its path", seq_id=self._seq_id
            )
