"""The layers that every model here is built of: projection, RMS norm, feed-forward network."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["INIT_STD", "FeedForward", "RMSNorm", "delay", "init_normal", "linear"]

INIT_STD = 0.02
"""Standard deviation of fresh projections."""


def linear(n_in: int, n_out: int) -> nn.Linear:
    """Returns a projection without bias; no model here has one."""
    return nn.Linear(n_in, n_out, bias=False)


def init_normal(module: nn.Module) -> None:
    """Draws every projection of a module from a normal distribution."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=INIT_STD)


def delay(rows: Tensor) -> Tensor:
    """Moves each row one position later, after a row of zeros, as llama.cpp does for a draft.

    Args:
        rows: Shape: `[n_batch, n_tokens, n_embd]`.
    """
    return functional.pad(rows, (0, 0, 1, 0))[:, :-1]


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale.

    Source: Zhang and Sennrich, arXiv:1910.07467, eq. 4.
    """

    def __init__(self, n_embd: int, eps: float) -> None:
        """Starts with scale one.

        Args:
            n_embd: Width of the last axis.
            eps: Added to the mean square.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axis; keeps the shape."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`.

    Source: Shazeer, arXiv:2002.05202, eq. 6.
    """

    def __init__(self, n_embd: int, n_ff: int) -> None:
        """Makes the three projections.

        Args:
            n_embd: Width outside.
            n_ff: Width inside.
        """
        super().__init__()
        self.gate = linear(n_embd, n_ff)
        self.up = linear(n_embd, n_ff)
        self.down = linear(n_ff, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Maps each row on its own; keeps the shape."""
        hidden: Tensor = functional.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)  # type: ignore[no-any-return]
