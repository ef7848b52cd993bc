"""One model over one context, for several decoders."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from drafthouse_engine._spec import DecoderContext, Model
from drafthouse_engine.decoder import Decoder
from drafthouse_engine.decoder_config import DecoderConfig, DecoderLimits
from drafthouse_engine.errors import BadSeqId, SeqBusy, Unsupported
from drafthouse_engine.tree_decoder import TreeDecoder

__all__ = ["DecoderPool"]


class DecoderPool:
    """One model over one context, for several decoders.

    The pool holds its model; after `close` every call of its decoders raises `Closed`.

    Args:
        model: any model that decodes on its own, target or draft, dense or recurrent.
        config: sizes; None means the defaults.

    Raises:
        Unsupported: the model has an encoder or drafts from another model's hidden states, or
            llama.cpp gives no hidden states beside the logits of its architecture.
        InvalidArgument: the configuration does not fit the model.
        OutOfMemory: memory could not be allocated.

    Thread:
        The thread that made the pool only; calls from others raise `WrongThread`.
    """

    def __init__(self, model: Model, config: DecoderConfig | None = None) -> None:
        self._context: Final = DecoderContext(model, config)
        self._taken: set[int] = set()
        self._layers: set[int] = set()
        self._is_head_checked = False

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
    def model(self) -> Model:
        """The model."""
        return self._context.model

    @property
    def limits(self) -> DecoderLimits:
        """What the pool offers."""
        return self._context.limits

    def decoder(self, seq_id: int | None = None) -> Decoder:
        """Returns a decoder with an empty history.

        Args:
            seq_id: its sequence, [0, n_seq); None takes the first free one.

        Raises:
            BadSeqId: there is no such sequence.
            SeqBusy: it is taken, or all are.
        """
        return Decoder(self, self._take(seq_id))

    def tree_decoder(self, seq_id: int | None = None) -> TreeDecoder:
        """Returns a decoder that scores draft trees too.

        Args:
            seq_id: its sequence, [0, n_seq); None takes the first free one.

        Raises:
            Unsupported: the model is recurrent, or the pool was made without branches.
            BadSeqId: there is no such sequence.
            SeqBusy: it is taken, or all are.
        """
        if self.limits.n_branch_max == 0:
            raise Unsupported(
                "draft trees need a context with branches (n_branch_max > 0) and a model whose "
                "layers all attend: a recurrent one has a single state per sequence"
            )
        return TreeDecoder(self, self._take(seq_id))

    def close(self) -> None:
        """Frees the context. Harmless when done twice."""
        self._context.close()

    def _take(self, seq_id: int | None) -> int:
        n_seq = self.limits.n_seq
        free = [i for i in range(n_seq) if i not in self._taken]
        if seq_id is None and not free:
            raise SeqBusy(f"all {n_seq} sequences of the pool are taken")
        chosen = free[0] if seq_id is None else seq_id
        if not 0 <= chosen < n_seq:
            raise BadSeqId(
                f"sequence id {chosen} is not in [0, {n_seq})", seq_id=chosen, n_seq=n_seq
            )
        if chosen in self._taken:
            raise SeqBusy(f"sequence {chosen} has a decoder already", seq_id=chosen)
        self._context.rollback(chosen, 0)
        self._taken.add(chosen)
        return chosen

    def _keep_layers(self, layers: Sequence[int]) -> None:
        for layer in layers:
            if layer not in self._layers:
                self._context.set_layer(layer)
                self._layers.add(layer)

    def _release(self, seq_id: int) -> None:
        self._taken.discard(seq_id)
