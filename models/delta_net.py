"""The gated delta net: the recurrent token mixer of the hybrid target."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.architecture import Architecture
from models.layers import RMSNorm, linear
from models.rope import Rotation

__all__ = ["DeltaNet", "gated_delta_rule"]

N_CONV = 4
"""Tokens that the causal convolution spans."""

N_CHUNK = 64
"""Tokens that the recurrence solves at once."""

STEP_INIT = 0.05
"""Time step at the start of training."""


class DeltaNet(nn.Module):
    """A linear-attention layer whose state forgets by a gate and overwrites by the delta rule.

    Source: Yang et al., arXiv:2412.06464; layout of llama.cpp src/models/qwen35.cpp@b11549.
    """

    def __init__(self, arch: Architecture) -> None:
        """Makes projections, convolution and the decay's parameters.

        Args:
            arch: Dimensions; the `n_delta_*` fields.
        """
        super().__init__()
        self.arch = arch
        n_key = arch.n_delta_key_heads * arch.n_delta_state
        n_value = arch.n_delta_value_heads * arch.n_delta_state
        n_mixed, n_head = 2 * n_key + n_value, arch.n_delta_value_heads
        self.qkv = linear(arch.n_embd, n_mixed)
        self.gate = linear(arch.n_embd, n_value)
        self.beta = linear(arch.n_embd, n_head)
        self.alpha = linear(arch.n_embd, n_head)
        self.out = linear(n_value, arch.n_embd)
        self.conv = nn.Parameter(torch.randn(n_mixed, N_CONV) * 0.3)
        self.norm = RMSNorm(arch.n_delta_state, arch.norm_eps)
        self.log_decay = nn.Parameter(torch.log(torch.linspace(1, 8, n_head)))
        self.step_bias = nn.Parameter(torch.full((n_head,), math.log(math.expm1(STEP_INIT))))

    def forward(self, x: Tensor, turn: Rotation, mask: Tensor) -> Tensor:
        """Mixes a whole sequence from an empty state.

        Args:
            x: Shape: `[n_batch, n_tokens, n_embd]`.
            turn: Not used: a recurrence knows the order by itself.
            mask: Not used: a recurrence sees only the past.
        """
        query, key, value = self._query_key_value(x)
        beta = torch.sigmoid(self.beta(x))
        log_keep = -self.log_decay.exp() * functional.softplus(self.alpha(x) + self.step_bias)
        scaled = query * self.arch.n_delta_state**-0.5
        mixed = self.norm(gated_delta_rule(scaled, key, value, log_keep, beta))
        gate = self.gate(x).view(*x.shape[:2], self.arch.n_delta_value_heads, -1)
        return self.out((mixed * functional.silu(gate)).flatten(2))  # type: ignore[no-any-return]

    def _query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch, n_tokens = self.arch, x.shape[1]
        padded = functional.pad(self.qkv(x).transpose(1, 2), (N_CONV - 1, 0))
        mixed = functional.conv1d(padded, self.conv[:, None], groups=self.conv.shape[0])
        rows = functional.silu(mixed).transpose(1, 2)
        heads = rows.reshape(len(x), n_tokens, -1, arch.n_delta_state)
        n_key = arch.n_delta_key_heads
        query, key, value = (
            heads[:, :, :n_key],
            heads[:, :, n_key : 2 * n_key],
            heads[:, :, 2 * n_key :],
        )
        # NOTE: tiled, not interleaved: value head i uses key head i % n_delta_key_heads.
        n_tile = arch.n_delta_value_heads // arch.n_delta_key_heads
        return (
            self._unit(query).repeat(1, 1, n_tile, 1),
            self._unit(key).repeat(1, 1, n_tile, 1),
            value,
        )

    def _unit(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.arch.norm_eps)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_keep: Tensor, beta: Tensor
) -> Tensor:
    """Runs the recurrence S ← keep · S + k ⊗ beta (v - keep · S k), o = S q, a chunk at a time.

    Source: Yang et al., arXiv:2412.06464, section 3.3 (the chunked form).

    Args:
        query: Scaled. Shape: `[n_batch, n_tokens, n_head, n_state]`.
        key: Of unit length. Shape: as `query`.
        value: Shape: as `query`.
        log_keep: Logarithm of what the state keeps at each token, ≤ 0. Shape: `[n_batch, n_tokens,
            n_head]`.
        beta: Strength of each write, in [0, 1]. Shape: `[n_batch, n_tokens, n_head]`.

    Returns:
        Shape: as `query`.
    """
    n_tokens = query.shape[1]
    query, key, value = _chunks(query), _chunks(key), _chunks(value)
    log_sum = _chunks(log_keep[..., None])[..., 0].cumsum(-1)
    beta = _chunks(beta[..., None])
    writes, reads, scores = _within_chunks(query, key, value, log_sum, beta)
    keep, last = log_sum.exp()[..., None], log_sum[..., -1:]
    kept_query, kept_key = query * keep, key * (last - log_sum).exp()[..., None]
    state = torch.zeros(*query.shape[1:3], query.shape[-1], query.shape[-1])
    outputs = []
    for i in range(len(query)):
        fresh = writes[i] - reads[i] @ state
        outputs.append(kept_query[i] @ state + scores[i] @ fresh)
        state = state * last[i].exp()[..., None] + kept_key[i].transpose(-1, -2) @ fresh
    return torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :n_tokens]


def _chunks(x: Tensor) -> Tensor:
    """Cuts the token axis into padded chunks. Shape: `[n_chunks, n_batch, n_head, N_CHUNK, …]`."""
    n_pad = -x.shape[1] % N_CHUNK
    padded = functional.pad(x, (0, 0, 0, 0, 0, n_pad))
    return padded.view(len(x), -1, N_CHUNK, *x.shape[2:]).permute(1, 0, 3, 2, 4)


def _within_chunks(
    query: Tensor, key: Tensor, value: Tensor, log_sum: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Solves every chunk on its own.

    Returns the values that it writes, the keys by which those depend on the state before it, and
    the scores of its queries.
    """
    is_past = torch.ones(N_CHUNK, N_CHUNK, dtype=torch.bool).tril()
    decay = (log_sum[..., :, None] - log_sum[..., None, :]).masked_fill(~is_past, -torch.inf).exp()
    strong_key = key * beta
    system = (strong_key @ key.transpose(-1, -2) * decay).tril(-1) + torch.eye(N_CHUNK)
    right = torch.cat([value * beta, strong_key * log_sum.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, reads = solved.chunk(2, dim=-1)
    return writes, reads, query @ key.transpose(-1, -2) * decay
