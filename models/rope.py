"""Rotary position embeddings, in llama.cpp's two layouts.

Source: Su et al., arXiv:2104.09864, eq. 34; llama.cpp ggml_rope@b11549, modes NEOX and NORM.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Rotate", "Rotation", "rotate_halves", "rotate_pairs", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine. Shape: each `[n_tokens, n_embd_head / 2]` float32."""

Rotate = Callable[[Tensor, Rotation], Tensor]
"""Turns `[n_batch, n_head, n_tokens, n_embd_head]` by the token's position."""


def rotation(n_embd_head: int, base: float, n_ctx: int) -> Rotation:
    """Tabulates the angles of every position.

    Args:
        n_embd_head: Width of a head; even.
        base: Base of the frequencies.
        n_ctx: Positions to tabulate, from 0.
    """
    exponents = torch.arange(0, n_embd_head, 2, dtype=torch.float64) / n_embd_head
    angles = torch.arange(n_ctx, dtype=torch.float64)[:, None] * base**-exponents
    return angles.cos().float(), angles.sin().float()


def rotate_halves(x: Tensor, turn: Rotation) -> Tensor:
    """Rotates element i with element i + width/2 (NEOX; `mimo2`, `qwen3`, `qwen35`)."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate_pairs(x: Tensor, turn: Rotation) -> Tensor:
    """Rotates element 2i with element 2i + 1 (NORM; `llama`, `eagle3`)."""
    cos, sin = turn
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
