"""The trunk: the transformer of a target or of an ordinary draft, dense or hybrid."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.architecture import Architecture
from models.attention import Attention
from models.delta_net import DeltaNet
from models.layers import INIT_STD, FeedForward, RMSNorm, linear
from models.rope import Rotation, rotation

__all__ = ["Block", "Trunk", "TrunkOutput"]


class Block(nn.Module):
    """One pre-norm layer: token mixer, then feed-forward network, each added to the stream."""

    def __init__(self, arch: Architecture, is_recurrent: bool = False) -> None:
        """Makes the layer.

        Args:
            arch: Dimensions.
            is_recurrent: Mixes by a gated delta net in place of attention.
        """
        super().__init__()
        self.mixer_norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.feed_norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.feed = FeedForward(arch.n_embd, arch.n_ff)
        self.mixer: Attention | DeltaNet = DeltaNet(arch) if is_recurrent else Attention(arch)

    def forward(self, x: Tensor, turn: Rotation, mask: Tensor) -> Tensor:
        """Maps layer input to layer output. Shape: `[n_batch, n_tokens, n_embd]`, kept."""
        x = x + self.mixer(self.mixer_norm(x), turn, mask)
        return x + self.feed(self.feed_norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class TrunkOutput:
    """What a trunk computes of a batch of sequences."""

    logits: Tensor
    """Shape: `[n_batch, n_tokens, n_vocab]`; row p scores token p + 1."""

    layer_inputs: list[Tensor]
    """Input of every layer, then the last layer's output: `n_layer + 1` of `[n_batch, n_tokens,
    n_embd]`."""

    hidden: Tensor
    """The rows that the MTP block continues from. Shape: `[n_batch, n_tokens, n_embd]`."""


class Trunk(nn.Module):
    """A decoder-only transformer.

    Source: the graphs of llama.cpp src/models/{mimo2,qwen35,qwen3}.cpp@b11549.
    """

    def __init__(self, arch: Architecture) -> None:
        """Draws fresh weights from torch's global generator.

        Args:
            arch: Dimensions.
        """
        super().__init__()
        self.arch = arch
        self.embedding = nn.Embedding(arch.n_vocab, arch.n_embd)
        self.blocks = nn.ModuleList(
            Block(arch, i in arch.recurrent_layers) for i in range(arch.n_layer)
        )
        self.norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.head = None if arch.is_tied else linear(arch.n_embd, arch.n_vocab)
        self._cos, self._sin = rotation(arch.n_embd_head, arch.rope_base, arch.n_ctx)
        self._init_weights()

    @property
    def head_weight(self) -> Tensor:
        """The output head. Shape: `[n_vocab, n_embd]`."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def layers(self) -> list[Block]:
        """The blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def turn(self, n_tokens: int) -> Rotation:
        """Returns the angles of positions 0 … n_tokens - 1."""
        return self._cos[:n_tokens], self._sin[:n_tokens]

    def forward(self, ids: Tensor) -> TrunkOutput:
        """Runs whole sequences from an empty cache.

        Args:
            ids: Token ids. Shape: `[n_batch, n_tokens]` int64, n_tokens ≤ n_ctx.
        """
        n_tokens = ids.shape[1]
        turn, (full, sliding) = self.turn(n_tokens), self._masks(n_tokens)
        layer_inputs = [self.embedding(ids)]
        for i, block in enumerate(self.layers):
            mask = sliding if i in self.arch.sliding_layers else full
            layer_inputs.append(block(layer_inputs[-1], turn, mask))
        normed = self.norm(layer_inputs[-1])
        hidden = normed if self.arch.is_hidden_normed else layer_inputs[-1]
        return TrunkOutput(functional.linear(normed, self.head_weight), layer_inputs, hidden)

    def _masks(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        column = torch.arange(n_tokens)
        row = column[:, None]
        full = torch.zeros(n_tokens, n_tokens).masked_fill(column > row, -torch.inf)
        return full, full.masked_fill(row - column >= self.arch.n_window, -torch.inf)

    def _init_weights(self) -> None:
        # Projections into the residual stream start smaller, so that depth does not inflate it.
        into_stream_std = INIT_STD / math.sqrt(2 * self.arch.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith("conv"):
                is_into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=into_stream_std if is_into_stream else INIT_STD)
