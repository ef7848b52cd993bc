"""Draft trees from an EAGLE-3 model, which reads the hidden states of its target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np

from drafthouse_engine._spec import DecoderContext, Model
from drafthouse_engine.decoder_config import DecoderConfig
from drafthouse_engine.errors import (
    BadPlan,
    DecodeFailed,
    EngineError,
    InvalidArgument,
    NoRoom,
    ProposalPending,
)
from drafthouse_engine.scores import Rows
from drafthouse_engine.tree_decoder import TreeDecoder

__all__ = ["Eagle3Drafter"]

N_SCORED_MAX: Final = 8
"""Committed tokens that are scored along with the last one instead of decoded before it."""


class Eagle3Drafter:
    """Drafts trees for one tree decoder with an EAGLE-3 model.

    It follows the decoder: each of the decoder's forwards leaves the hidden states of three layers,
    which the EAGLE-3 encoder joins to one state for each token. What was committed is read from
    the decoder; nothing needs to be told. The states of n_ctx_seq tokens are kept, 4 · n_embd bytes
    each. What the decoder had in its cache is decoded again, once.

    Args:
        target: a tree decoder of the model that the draft was trained for.
        draft: an EAGLE-3 model; it is held.
        config: sizes; one sequence, and n_ctx_seq at least the target's. None means the target's
            n_ctx_seq and defaults.

    Raises:
        NotEagle3, IncompatibleDraft: the model does not draft for this target.
        Unsupported: llama.cpp does not show the target's layers.
        InvalidArgument: the sizes do not fit.
        ProposalPending: a tree waits in the target.
        OutOfMemory: memory could not be allocated.

    Thread:
        The thread that made the target's pool only; calls from others raise `WrongThread`.

    Source:
        Li et al., EAGLE-3, arXiv:2503.01840, section 3.
    """

    def __init__(
        self, target: TreeDecoder, draft: Model, config: DecoderConfig | None = None
    ) -> None:
        n_ctx_seq = target.pool.limits.n_ctx_seq
        sizes = config or DecoderConfig(n_ctx_seq=n_ctx_seq)
        if 0 < sizes.n_ctx_seq < n_ctx_seq:
            raise InvalidArgument(
                f"n_ctx_seq is {sizes.n_ctx_seq}; the target's sequences have {n_ctx_seq}"
            )
        self._target: Final = target
        self._context: Final = DecoderContext(draft, sizes, target._context)
        self._rows: Final = np.empty((n_ctx_seq, self._context.limits.n_embd), np.float32)
        self._nodes: Rows = self._rows[:0]  # states of the target's tree, until its path is kept
        self._read: list[int] = []  # history in the draft's cache; token i stands at position i − 1
        self._hidden: Rows | None = None  # rows of the draft's nodes; row 0 is the root's
        try:
            target._follow(self)
        except BaseException:
            self._context.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the context; the target goes on without it. Harmless when done twice."""
        if self._target._follower is self:
            self._target._follower = None
        self._context.close()

    @property
    def target(self) -> TreeDecoder:
        """The decoder that it drafts for."""
        return self._target

    @property
    def model(self) -> Model:
        """The EAGLE-3 model."""
        return self._context.model

    def draft_root(self) -> Rows | None:
        """Begins a tree at the last committed token.

        Shape:
            [n_vocab] float32: logits of what follows the root; −inf for tokens that the draft does
            not know. None after a single token, which has no state before it to draft from.

        Raises:
            BadPlan: the history is empty.
            ProposalPending: a tree was begun.
        """
        if self._hidden is not None:
            raise ProposalPending("a drafted tree waits for its end", seq_id=0)
        history = self._target.history
        if not history:
            raise BadPlan("the history is empty: there is nothing to draft from")
        if len(history) == 1:
            return None
        self._forward_target(len(history) - 1)
        self._catch_up(history)
        self._hidden = self._context.hidden()[-1:]
        row: Rows = self._context.logits()[-1]
        return row

    def draft_nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        """Adds nodes to the tree.

        Args:
            tokens: of the new nodes, which are numbered on; the first ever is node 1.
            parents: earlier nodes that they follow; 0 is the root.

        Shape:
            [n_nodes, n_vocab] float32: logits of what follows each.

        Raises:
            BadPlan: no tree was begun.
            InvalidArgument: there is no such parent, or there are too many nodes or leaves.
            NoRoom, DecodeFailed: the tree is dropped.
        """
        if self._hidden is None:
            raise BadPlan("no tree was begun")
        if not tokens or any(not 0 <= parent < len(self._hidden) for parent in parents):
            raise InvalidArgument(f"parents must be nodes in [0, {len(self._hidden)})")
        self._context.set_states(self._hidden[list(parents)])
        try:
            self._context.tree(0, tokens, [parent - 1 for parent in parents])
        except (NoRoom, DecodeFailed):
            self.end_draft()
            raise
        self._hidden = np.concatenate((self._hidden, self._context.hidden()))
        return self._context.logits()

    def end_draft(self) -> None:
        """Drops the tree. Harmless without one.

        Its nodes were computed from the draft's own rows, not from the target's states, so what is
        committed of them is decoded again.
        """
        self._hidden = None
        with contextlib.suppress(BadPlan):  # where no node was added, or a failure took it away
            self._context.tree_commit(0, [])

    def _forward_target(self, length: int) -> None:
        """Makes the target compute the states of the first tokens that still wait for a forward."""
        if self._target._n_cached >= length:
            return
        self._target._refuse_pending()
        try:
            self._target._fill(length)
        except EngineError:
            self._target._resync()
            raise

    def _catch_up(self, history: Sequence[int]) -> None:
        """Brings all tokens but the first into the draft's cache and scores the last."""
        wanted = list(history[1:])
        n = max(0, min(_n_common(self._read, history), len(wanted)) - 1)
        self._context.rollback(0, n)
        self._read = list(history[: n + 1])
        n_scored = min(N_SCORED_MAX, self._context.limits.n_outputs_max)
        n_batch = self._context.limits.n_batch
        while n < len(wanted):
            n_left = len(wanted) - n
            is_last = n_left <= n_scored
            n_piece = n_left if is_last else min(n_left - 1, n_batch)
            self._decode(wanted[n : n + n_piece], n, is_output=is_last)
            n += n_piece

    def _decode(self, tokens: list[int], start: int, *, is_output: bool) -> None:
        self._context.set_states(self._rows[start : start + len(tokens)])
        try:
            self._context.decode(0, tokens, is_output)
        except DecodeFailed:
            self._read.clear()
            raise
        self._read += tokens

    def _encode(self) -> Rows:
        """Returns the states of the tokens of the target's last forward."""
        return self._context.encode()

    def _keep(self, position: int, rows: Rows) -> None:
        """Keeps the states of tokens that stand at a position of the history."""
        self._rows[position : position + len(rows)] = rows

    def _add_nodes(self, position: int, n_waiting: int, *, is_new: bool) -> None:
        """Keeps the states of a tree's nodes, and of the tokens that came before its root."""
        rows = self._encode()
        self._keep(position, rows[:n_waiting])
        nodes = rows[n_waiting:]
        self._nodes = nodes if is_new else np.concatenate((self._nodes, nodes))

    def _keep_path(self, position: int, nodes: Sequence[int]) -> None:
        """Keeps the states of a committed path of the tree."""
        self._keep(position, self._nodes[list(nodes)])


def _n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two histories begin with alike."""
    n = min(len(first), len(second))
    a, b = np.asarray(first[:n], np.int64), np.asarray(second[:n], np.int64)
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else n
