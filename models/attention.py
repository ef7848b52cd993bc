"""Grouped-query attention, and the attention of a draft head that is unrolled on its own output."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.architecture import Architecture
from models.layers import RMSNorm, linear
from models.rope import Rotate, Rotation, rotate_halves

__all__ = ["Attention", "Projections", "unrolled_attention"]


class Projections(NamedTuple):
    """What attention computes of its input."""

    query: Tensor
    """Shape: `[n_batch, n_head, n_tokens, n_embd_head]`, rotated."""

    key: Tensor
    """Shape: `[n_batch, n_head_kv, n_tokens, n_embd_head]`, rotated."""

    value: Tensor
    """Shape: `[n_batch, n_head_kv, n_tokens, n_embd_head]`."""

    gate: Tensor | None
    """Output gate after the sigmoid, where the architecture has one. Shape: `[n_batch, n_tokens,
    n_head * n_embd_head]`."""


class Attention(nn.Module):
    """Grouped-query attention, with query gate and query/key norm where the architecture has them.

    Source: Ainslie et al., arXiv:2305.13245; the gate is Qwen3.5's (llama.cpp
    src/models/qwen35.cpp@b11549).
    """

    def __init__(
        self,
        arch: Architecture,
        n_in: int | None = None,
        rotate: Rotate = rotate_halves,
        is_plain: bool = False,
    ) -> None:
        """Makes the projections.

        Args:
            arch: Dimensions.
            n_in: Width of the input; the residual stream's by default, twice that in EAGLE-3.
            rotate: Layout of the rotary embedding.
            is_plain: Leaves gate and norms out, whatever the architecture says (EAGLE-3).
        """
        super().__init__()
        n_in = n_in or arch.n_embd
        self.arch = arch
        self.rotate = rotate
        self.is_gated = arch.is_gated and not is_plain
        n_query = arch.n_head * arch.n_embd_head
        self.query = linear(n_in, n_query * (2 if self.is_gated else 1))
        self.key = linear(n_in, arch.n_head_kv * arch.n_embd_head)
        self.value = linear(n_in, arch.n_head_kv * arch.n_embd_head)
        self.out = linear(n_query, arch.n_embd)
        has_norm = arch.has_qk_norm and not is_plain
        self.query_norm = RMSNorm(arch.n_embd_head, arch.norm_eps) if has_norm else None
        self.key_norm = RMSNorm(arch.n_embd_head, arch.norm_eps) if has_norm else None

    def project(self, x: Tensor, turn: Rotation) -> Projections:
        """Computes rotated queries and keys, values, and the gate.

        Args:
            x: Shape: `[n_batch, n_tokens, n_in]`.
            turn: Angles of these tokens' positions.
        """
        query, gate = self._query(x)
        key = self._heads(self.key(x), self.arch.n_head_kv)
        value = self._heads(self.value(x), self.arch.n_head_kv)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return Projections(
            self.rotate(query.transpose(1, 2), turn).to(value.dtype),
            self.rotate(key.transpose(1, 2), turn).to(value.dtype),
            value.transpose(1, 2),
            gate,
        )

    def combine(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """Gates the heads' outputs and projects them back to the residual stream.

        Args:
            mixed: Shape: `[n_batch, n_head, n_tokens, n_embd_head]`.
            gate: As `Projections.gate`.
        """
        flat = mixed.transpose(1, 2).flatten(2)
        return self.out(flat if gate is None else flat * gate)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, turn: Rotation, mask: Tensor) -> Tensor:
        """Attends over a whole sequence.

        Written out, because in bfloat16 on a CPU it is three times as fast as torch's fused call at
        256 tokens.

        Args:
            x: Shape: `[n_batch, n_tokens, n_embd]`.
            turn: Angles of positions 0 … n_tokens - 1.
            mask: 0 where a row may look, -inf elsewhere. Shape: `[n_tokens, n_tokens]`.
        """
        query, key, value, gate = self.project(x, turn)
        scores = _scores(query, key) + mask.to(query.dtype)
        return self.combine(_weigh(scores.softmax(-1), value), gate)

    def _query(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        query = self._heads(self.query(x), self.arch.n_head)
        if not self.is_gated:
            return query, None
        # Per head: the query, then its gate.
        query, gate = query.chunk(2, dim=-1)
        return query, torch.sigmoid(gate).flatten(2)

    @staticmethod
    def _heads(x: Tensor, n_head: int) -> Tensor:
        return x.view(*x.shape[:2], n_head, -1)


def unrolled_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attends as a draft head does at its j-th own step, for all positions at once.

    While drafting, the cache holds rows that were made from the target's hidden rows up to where
    the draft began, and after them the head's own rows. Hence the query at position p and step j
    sees step-0 keys at positions ≤ p - j and, for i = 1 … j, the one step-i key at position p - j +
    i.

    Source: EAGLE-3's training-time test, Li et al., arXiv:2503.01840, section 3.2.

    Args:
        query: Queries of step j. Shape: `[n_batch, n_head, n_tokens, n_embd_head]`.
        keys: Keys of steps 0 … j. Shape: each `[n_batch, n_head_kv, n_tokens, n_embd_head]`.
        values: Values of the same steps and shape.

    Returns:
        Shape: as `query`. The first j rows have no complete history; a loss must leave them out.
    """
    n_head, n_tokens = query.shape[1:3]
    step, n_group = len(keys) - 1, n_head // keys[0].shape[1]
    scores = _scores(query, keys[0]) + _history_mask(n_tokens, step, query.dtype)
    own_keys = [_own_rows(keys[i], step - i, n_group) for i in range(1, step + 1)]
    scaled = query * query.shape[-1] ** -0.5
    own_scores = [(scaled * key).sum(-1, keepdim=True) for key in own_keys]
    weights = torch.cat([scores, *own_scores], -1).softmax(-1)
    mixed = _weigh(weights[..., :n_tokens], values[0])
    for i in range(1, step + 1):
        column = n_tokens + i - 1
        own = _own_rows(values[i], step - i, n_group)
        mixed = mixed + weights[..., column : column + 1] * own
    return mixed


def _history_mask(n_tokens: int, step: int, dtype: torch.dtype) -> Tensor:
    column = torch.arange(n_tokens)
    row = column[:, None]
    # Rows without history see position 0, so that their softmax stays finite.
    is_seen = (column <= row - step) | ((row < step) & (column == 0))
    return torch.zeros(n_tokens, n_tokens, dtype=dtype).masked_fill(~is_seen, -torch.inf)


def _own_rows(rows: Tensor, n_back: int, n_group: int) -> Tensor:
    n_tokens = rows.shape[2]
    return functional.pad(rows, (0, 0, n_back, 0))[:, :, :n_tokens].repeat_interleave(n_group, 1)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Returns each query head's dot products with its key head.

    Shape: `[n_batch, n_head, n_tokens, n_tokens]`.
    """
    n_batch, n_head, n_tokens, width = query.shape
    n_pairs = n_batch * key.shape[1]
    grouped = (query * width**-0.5).reshape(n_pairs, -1, width)
    products = torch.bmm(grouped, key.reshape(n_pairs, n_tokens, width).transpose(1, 2))
    return products.view(n_batch, n_head, n_tokens, n_tokens)


def _weigh(weights: Tensor, value: Tensor) -> Tensor:
    """Sums each head's values by weight. Shape: `[n_batch, n_head, n_tokens, n_embd_head]`."""
    n_batch, n_head, n_tokens, _ = weights.shape
    n_pairs = n_batch * value.shape[1]
    grouped = weights.reshape(n_pairs, -1, n_tokens)
    return torch.bmm(grouped, value.reshape(n_pairs, n_tokens, -1)).view(
        n_batch, n_head, n_tokens, -1
    )
