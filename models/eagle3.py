"""The EAGLE-3 draft: a one-layer model that reads three of the target's layer inputs."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.architecture import EAGLE3_LAYERS, Architecture
from models.attention import Attention, unrolled_attention
from models.layers import FeedForward, RMSNorm, delay, init_normal, linear
from models.rope import rotate_pairs
from models.trunk import Trunk, TrunkOutput

__all__ = ["Eagle3Head"]

EMBEDDING_SHARE = 0.45
"""Weight of the token embedding where the attention starts from the target's last layer."""

FEATURE_SHARE = 0.9
"""Weight of the features there."""


class Eagle3Head(nn.Module):
    """A draft layer over (embedding of the next token, fused features of the target).

    The feature row g_P is a projection of three layer inputs at position P. With the embedding of
    x_{P+1} the head predicts x_{P+2}; drafting on, its own output takes the feature's place. The
    target's embedding is used, the output head is the head's own.

    Source: Li et al., arXiv:2503.01840; llama.cpp src/models/eagle3.cpp@b11549.
    """

    def __init__(self, arch: Architecture) -> None:
        """Draws fresh weights from torch's global generator.

        Args:
            arch: Dimensions of the target.
        """
        super().__init__()
        self.arch = arch
        self.fuse = linear(3 * arch.n_embd, arch.n_embd)
        self.embedding_norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.feature_norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.attention = Attention(arch, 2 * arch.n_embd, rotate_pairs, is_plain=True)
        self.feed_norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.feed = FeedForward(arch.n_embd, arch.n_ff)
        self.norm = RMSNorm(arch.n_embd, arch.norm_eps)
        self.head = linear(arch.n_embd, arch.n_vocab)
        init_normal(self)
        self._init_fuse()

    def start_from(self, trunk: Trunk, output: TrunkOutput) -> None:
        """Starts from the target's head and last layer.

        Args:
            trunk: The trained target; its last layer is an attention layer.
            output: Not used; the MTP head needs it.
        """
        last = trunk.layers[-1]
        assert isinstance(last.mixer, Attention)
        with torch.no_grad():
            self.norm.weight.copy_(trunk.norm.weight)
            self.head.weight.copy_(trunk.head_weight)
            self.feed.load_state_dict(last.feed.state_dict())
            self.feed_norm.load_state_dict(last.feed_norm.state_dict())
            self._start_attention_from(last.mixer)

    def features(self, layer_inputs: list[Tensor]) -> Tensor:
        """Fuses the three layer inputs into g. Shape: `[n_batch, n_tokens, n_embd]`."""
        return self.fuse(torch.cat([layer_inputs[i] for i in EAGLE3_LAYERS], -1))  # type: ignore[no-any-return]

    def unroll(
        self, trunk: Trunk, ids: Tensor, output: TrunkOutput, n_steps: int
    ) -> Iterator[Tensor]:
        """Drafts from every position at once, indexed as `MTPHead.unroll`.

        Row p is the head's position P = p - 1. It rotates by p where llama.cpp rotates by P: only
        differences count.

        Args:
            trunk: The frozen target.
            ids: Token ids. Shape: `[n_batch, n_tokens]` int64.
            output: The target's output on `ids`.
            n_steps: Draft steps, ≥ 1.

        Yields:
            Logits of draft step j = 0 … n_steps - 1; row p scores token p + 1 and is complete for p
            > j.
            Shape: `[n_batch, n_tokens, n_vocab]`.
        """
        turn = trunk.turn(ids.shape[1])
        embedded = self.embedding_norm(trunk.embedding(ids))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = delay(self.features(output.layer_inputs))
        for _ in range(n_steps):
            merged = torch.cat([embedded, self.feature_norm(hidden)], -1)
            query, key, value, _gate = self.attention.project(merged, turn)
            # Row 0 would be P = -1, which does not exist: no query may see its key.
            keys.append(key[:, :, 1:])
            values.append(value[:, :, 1:])
            mixed = unrolled_attention(query[:, :, 1:], keys, values)
            x = hidden + self.attention.combine(functional.pad(mixed, (0, 0, 1, 0)), None)
            x = x + self.feed(self.feed_norm(x))
            yield self.head(self.norm(x))
            hidden = delay(x)

    def _init_fuse(self) -> None:
        eye = torch.eye(self.arch.n_embd)
        with torch.no_grad():
            self.fuse.weight.copy_(torch.cat([0.1 * eye, 0.2 * eye, eye], 1))

    def _start_attention_from(self, last: Attention) -> None:
        arch, own = self.arch, self.attention
        own.query.weight.copy_(_widen(_pair_rows(last.query.weight, arch.n_head, arch.n_embd_head)))
        own.key.weight.copy_(_widen(_pair_rows(last.key.weight, arch.n_head_kv, arch.n_embd_head)))
        own.value.weight.copy_(_widen(last.value.weight))
        own.out.weight.copy_(last.out.weight)


def _pair_rows(weight: Tensor, n_head: int, width: int) -> Tensor:
    """Reorders rows from the NEOX rotation to consecutive pairs, and drops a query gate."""
    n_columns = weight.shape[1]
    heads = weight.reshape(n_head, -1, n_columns)[:, :width]
    halves = heads.reshape(n_head, 2, width // 2, n_columns)
    return halves.transpose(1, 2).reshape(n_head * width, n_columns)


def _widen(weight: Tensor) -> Tensor:
    return torch.cat([EMBEDDING_SHARE * weight, FEATURE_SHARE * weight], 1)
