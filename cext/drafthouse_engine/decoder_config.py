"""Sizes of the context that decoders share, as asked for and as made."""

from __future__ import annotations

from dataclasses import dataclass

from drafthouse_engine.fields import check_bool, check_int

__all__ = ["DecoderConfig", "DecoderLimits"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """How a `DecoderPool` is built.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    n_seq: int = 1
    """Decoders at once, [1, 256]."""
    n_branch_max: int = 32
    """Most leaves of a draft tree, [0, 256 − n_seq]; 0 makes a context without trees, as on
    recurrent models, which have none."""
    n_outputs_max: int = 64
    """Most scored tokens of one forward, 1 + drafts or the nodes of a tree, [1, n_ubatch]."""
    n_ctx_seq: int = 0
    """Most tokens of one sequence; 0 is the model's training context."""
    n_batch: int = 2048
    """Most tokens of one decode, ≥ 1."""
    n_ubatch: int = 512
    """Most tokens of one physical batch, [1, n_batch]."""
    n_rs_seq: int = 8
    """Recurrent-state snapshots per sequence, [0, 64]: how far a recurrent model goes back without
    decoding again."""
    n_threads: int = 0
    """Threads, [0, 512]; 0 is all cores that the process may use (`find_cores`)."""
    flash_attention: bool = True
    """Attention is computed by the fused kernel."""

    def __post_init__(self) -> None:
        check_int(self, "n_seq", 1, 256)
        check_int(self, "n_branch_max", 0, 256 - self.n_seq)
        check_int(self, "n_batch", 1, 1 << 20)
        check_int(self, "n_ubatch", 1, self.n_batch)
        check_int(self, "n_outputs_max", 1, self.n_ubatch)
        check_int(self, "n_ctx_seq", 0, 1 << 24)
        check_int(self, "n_rs_seq", 0, 64)
        check_int(self, "n_threads", 0, 512)
        check_bool(self, "flash_attention")


@dataclass(frozen=True, slots=True)
class DecoderLimits:
    """What a context of decoders offers."""

    n_ctx_seq: int
    """Most tokens of one sequence."""
    n_batch: int
    """Most tokens of one decode; those of one physical batch on a recurrent model."""
    n_seq: int
    """Decoders at once."""
    n_branch_max: int
    """Most leaves of a draft tree; 0 is no trees."""
    n_outputs_max: int
    """Most scored tokens of one forward."""
    n_rs_seq: int | None
    """Tokens that a recurrent model can go back without decoding again; None where any rollback is
    free."""
    n_vocab: int
    """Token ids are [0, n_vocab)."""
    n_embd: int
    """Width of a layer's row."""
    n_embd_out: int
    """Width of the last hidden row."""
    n_layer: int
    """Layers of the trunk."""
    has_layers: bool
    """Whether llama.cpp shows the hidden states of this architecture's inner layers."""
    is_last_layer_normed: bool
    """Whether the row "after the last layer" has passed the final norm already: llama.cpp shows no
    other on this architecture."""
