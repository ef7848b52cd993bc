"""Parameters and capacities of an embedder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from drafthouse_engine.fields import check_bool, check_int, refusal

__all__ = ["POOLINGS", "EmbedderLimits", "EmbedderParams", "Pooling"]

Pooling: TypeAlias = Literal["model", "none", "mean", "cls", "last", "rank"]
"""How the rows of a text's tokens become one: as the model was trained (`model`), not at all, their
mean, the first, the last, or the scores of a reranker's head."""

POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)
"""All poolings; the place of one is its `spec_pooling`."""


@dataclass(frozen=True, slots=True)
class EmbedderParams:
    """How an embedder is built.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    pooling: Pooling = "model"
    """How the rows of a text become one."""
    is_normalised: bool = True
    """Rows are scaled to unit length (L2); scores of `rank` never are."""
    n_batch: int = 2048
    """Most tokens of one decode, and so of one text, [1, 65536].

    Of a model with RoPE factors for short and for long texts (Phi-3, MiniCPM3) it chooses which:
    for long ones where it is above the model's original context, however short a text is.
    """
    n_seq_max: int = 16
    """Most texts of one decode, [1, 256]."""
    n_threads: int = 0
    """Threads; 0 is all cores that the process may use (`find_cores`)."""
    flash_attention: bool = True
    """Attention is computed by the fused kernel."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise refusal(self, "pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        check_bool(self, "is_normalised")
        check_int(self, "n_batch", 1, 65536)
        check_int(self, "n_seq_max", 1, 256)
        check_int(self, "n_threads", 0, 512)
        check_bool(self, "flash_attention")


@dataclass(frozen=True, slots=True)
class EmbedderLimits:
    """What an embedder offers."""

    pooling: Pooling
    """How rows become one; never `model`."""
    n_batch: int
    """Most tokens of one text."""
    n_seq_max: int
    """Most texts of one decode; more are batched."""
    n_vocab: int
    """Token ids are [0, n_vocab)."""
    n_embd: int
    """Width of a row."""
