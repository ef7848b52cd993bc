"""What is minimised: next-token cross-entropy, and a draft head's distance from its target."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from models.trunk import Trunk, TrunkOutput

__all__ = ["DraftHead", "DraftLoss", "Loss", "NextTokenLoss", "autocast"]

STEP_DISCOUNT = 0.8
"""Weight of a draft step against the one before it: a later step counts only where the earlier ones
were right."""

N_DRAFT_STEPS = 3
"""Draft steps that the heads are trained on."""

RAMP = (0.4, 0.65)
"""Progress at which the second and the third draft step join."""


class Loss(Protocol):
    """A trainable objective."""

    def __call__(self, ids: Tensor, progress: float) -> Tensor:
        """Returns a scalar for a batch.

        Args:
            ids: Token ids. Shape: `[n_batch, n_tokens + 1]` int64.
            progress: Share of the training that is over, in [0, 1].
        """


class DraftHead(Protocol):
    """What MTP and EAGLE-3 heads have in common."""

    def unroll(
        self, trunk: Trunk, ids: Tensor, output: TrunkOutput, n_steps: int
    ) -> Iterator[Tensor]:
        """Yields the logits of each draft step from every position; see `MTPHead.unroll`."""


def autocast() -> torch.autocast:
    """Computes in bfloat16 where that is safe; master weights stay float32."""
    return torch.autocast("cpu", torch.bfloat16)


class NextTokenLoss:
    """Cross-entropy of the next token, in nats."""

    def __init__(self, trunk: nn.Module) -> None:
        """Args: trunk: The model that is trained."""
        self._trunk = trunk

    def __call__(self, ids: Tensor, progress: float = 1.0) -> Tensor:
        """Averages over all positions; progress does not matter."""
        with autocast():
            logits = self._trunk(ids[:, :-1]).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class DraftLoss:
    """Cross-entropy of a head's draft steps against the frozen target's whole distribution.

    The head is unrolled on its own output, as it will be used. Source: Li et al., arXiv:2503.01840,
    section 3.2.
    """

    def __init__(self, trunk: Trunk, head: DraftHead) -> None:
        """Args: trunk: The frozen target. head: The head that is trained."""
        self._trunk = trunk
        self._head = head

    def __call__(self, ids: Tensor, progress: float = 1.0) -> Tensor:
        """Averages over positions with a complete history, then over steps by `STEP_DISCOUNT`."""
        ids = ids[:, :-1]
        n_steps = min(N_DRAFT_STEPS, 1 + sum(progress > start for start in RAMP))
        with autocast():
            with torch.no_grad():
                output = self._trunk(ids)
                expected = output.logits.float().softmax(-1)
            losses = [
                _soft_cross_entropy(logits, expected)[:, step + 1 :].mean()
                for step, logits in enumerate(
                    self._head.unroll(self._trunk, ids, _in_float32(output), n_steps)
                )
            ]
        weights = torch.tensor([STEP_DISCOUNT**step for step in range(n_steps)])
        return (torch.stack(losses) * weights).sum() / weights.sum()


def _in_float32(output: TrunkOutput) -> TrunkOutput:
    inputs = [rows.float() for rows in output.layer_inputs]
    return TrunkOutput(output.logits, inputs, output.hidden.float())


def _soft_cross_entropy(logits: Tensor, expected: Tensor) -> Tensor:
    """Cross-entropy of each row. Shape: `[n_batch, n_tokens]`."""
    loss: Tensor = _SoftCrossEntropy.apply(logits, expected)  # type: ignore[no-untyped-call]
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy with few passes over the vocabulary: memory traffic is what costs here."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, expected: Tensor) -> Tensor:
        logits = logits.float()
        total = logits.logsumexp(-1, keepdim=True)
        loss = total[..., 0] - torch.einsum("btv,btv->bt", expected, logits)
        ctx.save_for_backward(((logits - total).exp_() - expected).bfloat16())
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return slope * gradients[0][..., None].bfloat16(), None
