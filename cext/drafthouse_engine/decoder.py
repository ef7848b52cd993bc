"""Scoring of tokens by one model: committed history, drafts, hidden states.

A `Decoder` keeps the tokens of one sequence. The last few of them enter the KV cache with the next
forward, so that the last token and its drafts are scored together.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from drafthouse_engine import _spec
from drafthouse_engine.errors import (
    BadPlan,
    CacheRollback,
    Closed,
    EngineError,
    InvalidArgument,
    NoRoom,
    Unsupported,
)
from drafthouse_engine.scores import Rows, Scores

if TYPE_CHECKING:
    from drafthouse_engine.decoder_pool import DecoderPool
    from drafthouse_engine.eagle3_drafter import Eagle3Drafter

__all__ = ["N_WAITING_MAX", "Decoder"]

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

N_WAITING_MAX: Final = 8
"""Committed tokens that wait for the next forward; scoring them costs less than a decode of their
own."""
HEAD_TOLERANCE: Final = 0.02
"""Share of the greatest logit by which the vocabulary projection may differ from the model's own;
quantised matrices round another batch width another way."""


class Decoder:
    """One sequence of a `DecoderPool`, which makes it.

    Thread:
        The thread that made the pool only; calls from others raise `WrongThread`.
    """

    def __init__(self, pool: DecoderPool, seq_id: int) -> None:
        self._pool: Final = pool
        self._context: Final = pool._context
        self._seq_id: Final = seq_id
        self._history: list[int] = []
        self._n_cached = 0
        self._scores: Scores | None = None
        self._follower: Eagle3Drafter | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pool(self) -> DecoderPool:
        """The pool that it belongs to."""
        return self._pool

    @property
    def seq_id(self) -> int:
        """Slot of the pool that the decoder owns."""
        return self._seq_id

    @property
    def vocab_size(self) -> int:
        """Token ids are [0, vocab_size)."""
        return self._pool.model.n_vocab

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return self._pool.model.eos_token_ids

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the trunk."""
        return self._pool.limits.n_layer

    @property
    def history(self) -> tuple[int, ...]:
        """The committed tokens."""
        return tuple(self._history)

    @property
    def history_len(self) -> int:
        """Number of committed tokens."""
        return len(self._history)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: any text.
            add_special: add the tokens that begin (and end) a text, where the model wants them.
        """
        tokens = self._pool.model.tokenize(text, add_special=add_special)
        return [int(token) for token in tokens]

    def decode(self, ids: Tokens, skip_special: bool = True) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: [0, vocab_size).
            skip_special: leave control tokens out instead of spelling them.

        Raises:
            InvalidArgument: there is no such token.
        """
        return self._pool.model.detokenize(ids, special=not skip_special).decode("utf-8", "replace")

    def reset(self) -> None:
        """Forgets the history."""
        self._use()
        self._history.clear()
        self._n_cached = 0
        self._scores = None
        self._context.rollback(self._seq_id, 0)

    def close(self) -> None:
        """Gives the sequence back to the pool. Harmless when done twice."""
        if self._is_closed:
            return
        if not self._context.is_closed:
            self.reset()
        self._is_closed = True
        self._pool._release(self._seq_id)

    def observe(self, ids: Tokens) -> None:
        """Appends tokens to the history; all but the last few enter the KV cache at once.

        Args:
            ids: [0, vocab_size).

        Raises:
            InvalidArgument: there is no such token; nothing has changed.
            NoRoom: the history would be longer than n_ctx_seq; nothing has changed.
            ProposalPending: a tree waits for its path.
        """
        self._refuse_pending()
        tokens = self._checked(ids)
        self._history += tokens
        if len(self._history) - self._n_cached > N_WAITING_MAX:
            try:
                self._fill(len(self._history) - 1)
            except EngineError:
                del self._history[len(self._history) - len(tokens) :]
                self._resync()
                raise

    def next_logits(self) -> Rows:
        """Returns the logits after the last committed token, computed once.

        Shape:
            [n_vocab] float32; read-only.

        Raises:
            BadPlan: the history is empty.
        """
        scores = self._at_end()
        row: Rows = scores.logits[len(self._history) - scores.start]
        return row

    def batched_logits(self, drafts: Tokens) -> Rows:
        """Scores the last committed token and drafts in one forward, and commits the drafts.

        `rollback_to` takes them back. On a recurrent model that is free for n_rs_seq tokens when
        the last committed token was not scored before, else the history is decoded again.

        Args:
            drafts: [0, vocab_size); at most n_outputs_max − 1.

        Shape:
            [n_drafts + 1, n_vocab] float32: row i is that after i drafts; read-only.

        Raises:
            InvalidArgument: there is no such token, or there are too many; nothing has changed.
            NoRoom: the history would be longer than n_ctx_seq; nothing has changed.
            BadPlan: the history is empty.
        """
        self._refuse_pending()
        self._require_history()
        tokens = self._checked(drafts)
        n_max = self._pool.limits.n_outputs_max - 1
        if len(tokens) > n_max:
            raise InvalidArgument(f"{len(tokens)} drafts; one forward scores at most {n_max}")
        n = len(self._history)
        if not tokens:
            self._at_end()
        elif self._is_scored():
            self._score_more(tokens)
        else:
            self._score(tokens)
        self._history += tokens
        assert self._scores is not None
        return self._scores.logits[n - self._scores.start :]

    def rollback_to(self, length: int) -> None:
        """Cuts the history.

        On a recurrent model, going back more than n_rs_seq tokens, twice in a row, or over all
        tokens of the last forward makes the next forward decode the history again.

        Args:
            length: tokens that stay, [0, history_len].

        Raises:
            CacheRollback: the history is shorter.
            ProposalPending: a tree waits for its path.
        """
        self._refuse_pending()
        if not 0 <= length <= len(self._history):
            raise CacheRollback(
                f"cannot go back to {length} tokens; the history has {len(self._history)}",
                length=length,
                history_len=len(self._history),
            )
        self._use()
        self._cut(length)
        del self._history[length:]
        if self._scores is not None:
            self._scores = self._scores.cut(length)

    def last_hidden_state(self) -> Rows:
        """Returns the hidden state of the last committed token, after the final norm.

        It is what the vocabulary projection reads: `apply_lm_head` of it gives `next_logits()`.

        Shape:
            [n_embd_out] float32; read-only.

        Raises:
            BadPlan: the history is empty.
        """
        scores = self._at_end()
        row: Rows = scores.hidden[len(self._history) - scores.start]
        return row

    def last_hidden_states_multi(self, layers: Sequence[int]) -> tuple[Rows, Rows]:
        """Returns the last hidden state and the residual stream after some layers.

        The row after layer k is what layer k + 1 reads; EAGLE-3 files number the same row k + 1.
        After the last layer it is the residual stream before the final norm, except where
        `limits.is_last_layer_normed`: there llama.cpp shows it after the norm only.

        The first call for a layer scores the last token again; from then on each forward keeps it.

        Args:
            layers: [0, num_hidden_layers), in any order.

        Shape:
            ([n_embd_out], [n_layers, n_embd]) float32.

        Raises:
            Unsupported: llama.cpp does not show the layers of this architecture.
            InvalidArgument: there is no such layer, or none was named.
            BadPlan: the history is empty.
        """
        if len(layers) == 0:
            raise InvalidArgument("no layers were named")
        self._require_history()
        self._pool._keep_layers(layers)
        scores = self._at_end()
        if any(layer not in scores.layers for layer in layers):
            self._refuse_pending()
            self._scores = None
            scores = self._at_end()
        i = len(self._history) - scores.start
        return scores.hidden[i], np.stack([scores.layers[layer][i] for layer in layers])

    def embed_tokens(self, ids: Tokens) -> Rows:
        """Returns rows of the token embedding table, before any scale of the architecture.

        Args:
            ids: [0, vocab_size).

        Shape:
            [n_ids, n_embd] float32.

        Raises:
            InvalidArgument: there is no such token, or there are none.
            Unsupported: the model has no such table.
        """
        self._use()
        return _spec.embed_tokens(self._pool.model, ids)

    def apply_lm_head(self, hidden: npt.NDArray[np.floating[Any]]) -> Rows:
        """Projects hidden states to logits with the model's output matrix, tied or not.

        The first call of a pool checks the projection against the model's own logits.

        Args:
            hidden: rows after the final norm, [n_embd_out] or [n_rows, n_embd_out].

        Shape:
            [n_rows, n_vocab] float32; one row for a vector.

        Raises:
            InvalidArgument: the rows have another width.
            Unsupported: the architecture does more than a product: it scales or caps its logits,
                or adds a bias.
        """
        self._use()
        self._check_head()
        return self._project(np.atleast_2d(np.asarray(hidden, np.float32)))

    def _project(self, rows: Rows) -> Rows:
        return _spec.apply_lm_head(self._pool.model, rows, self._pool.limits.n_embd_out)

    def _check_head(self) -> None:
        if self._pool._is_head_checked:
            return
        is_empty = not self._history
        if is_empty:
            self.observe([0])
        try:
            own, product = self.next_logits(), self._project(self.last_hidden_state()[None])[0]
        finally:
            if is_empty:
                self.reset()
        gap = float(np.abs(own - product).max())
        if not gap <= HEAD_TOLERANCE * float(np.abs(own).max()):
            raise Unsupported(
                f"the architecture {self._pool.model.arch!r} does more than multiply by its "
                f"output matrix: the logits differ by {gap:.3g}"
            )
        self._pool._is_head_checked = True

    def _use(self) -> None:
        if self._is_closed:
            raise Closed("the decoder is closed")

    def _refuse_pending(self) -> None:
        self._use()

    def _require_history(self) -> None:
        self._use()
        if not self._history:
            raise BadPlan("the history is empty: there is nothing to score")

    def _checked(self, ids: Tokens) -> list[int]:
        tokens: list[int] = _spec.int32_array(ids, "tokens").tolist()
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(f"token {token} is not in [0, {self.vocab_size})")
        n, n_max = len(self._history) + len(tokens), self._pool.limits.n_ctx_seq
        if n > n_max:
            raise NoRoom(f"the history would have {n} tokens; there is room for {n_max}")
        return tokens

    def _is_scored(self) -> bool:
        """Whether the last token is in the KV cache and its row is known."""
        n = len(self._history)
        return self._n_cached == n and self._scores is not None and self._scores.has(n)

    def _at_end(self) -> Scores:
        self._require_history()
        if self._scores is None or not self._scores.has(len(self._history)):
            self._refuse_pending()
            self._score([])
        assert self._scores is not None
        return self._scores

    def _cut(self, length: int) -> None:
        """Cuts the KV cache; where the model cannot go back, all of it."""
        if length >= self._n_cached:
            return
        try:
            self._context.rollback(self._seq_id, length)
            self._n_cached = length
        except Unsupported:
            self._context.rollback(self._seq_id, 0)
            self._n_cached = 0

    def _fill(self, length: int) -> None:
        """Brings the first `length` tokens of the history into the KV cache, unscored."""
        n_batch = self._pool.limits.n_batch
        while self._n_cached < length:
            piece = self._history[self._n_cached : min(length, self._n_cached + n_batch)]
            self._context.decode(self._seq_id, piece, False)
            if self._follower is not None:
                self._follower._keep(self._n_cached, self._follower._encode())
            self._n_cached += len(piece)

    def _score(self, drafts: list[int]) -> None:
        """Scores the last token, those that wait with it, and drafts."""
        n = len(self._history)
        self._cut(n - 1)
        n_scored = n - self._n_cached + len(drafts)
        n_most = min(self._pool.limits.n_outputs_max, N_WAITING_MAX + len(drafts))
        try:
            if n_scored > n_most:
                self._fill(n - 1)
            start = self._n_cached
            self._context.decode(self._seq_id, [*self._history[start:], *drafts], True)
        except EngineError:
            self._resync()
            raise
        self._n_cached = n + len(drafts)
        self._scores = self._read(start + 1)

    def _score_more(self, drafts: list[int]) -> None:
        """Scores drafts alone: the row before them is known."""
        n = len(self._history)
        assert self._scores is not None
        try:
            self._context.decode(self._seq_id, drafts, True)
        except EngineError:
            self._resync()
            raise
        self._n_cached = n + len(drafts)
        last = self._scores.pick(n, [n - self._scores.start])
        self._scores = last.then(self._read(n + 1))

    def _read(self, start: int) -> Scores:
        if self._follower is not None:
            self._follower._keep(start - 1, self._follower._encode())
        return Scores.read(self._context, self._pool._layers, start)

    def _follow(self, follower: Eagle3Drafter) -> None:
        """Makes a drafter see each forward from now on; what is cached is decoded again."""
        self._refuse_pending()
        self._cut(0)
        self._scores = None
        self._follower = follower

    def _resync(self) -> None:
        """After a failed decode: what the KV cache holds is asked of the context."""
        if not self._context.is_closed:
            self._n_cached = self._context.seq_n_past(self._seq_id)
        self._scores = None
