"""How good a model is on held-out text: loss of a trunk, acceptance of a draft head."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.losses import DraftHead, NextTokenLoss
from models.tokenizer import TokenStream
from models.trunk import Trunk

__all__ = ["Chain", "held_out_acceptance", "held_out_loss"]

N_TOKENS_BATCH = 4096
"""Tokens in a batch."""

N_TOKENS_DRAFT = 512
"""Tokens in a sequence where acceptance is measured."""

N_WINDOWS_DRAFT = 48
"""Sequences there."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Outcome of one draft step at every position."""

    is_alive: Tensor
    """Whether all earlier steps of the draft were right. Shape: `[n_batch, n_tokens]` bool."""

    is_right: Tensor
    """Whether this step was reached and right too. Shape: `[n_batch, n_tokens]` bool."""


def held_out_loss(trunk: Trunk, stream: TokenStream) -> float:
    """Measures next-token cross-entropy in nats, over the whole stream cut into contexts."""
    n_tokens, loss = trunk.arch.n_ctx, NextTokenLoss(trunk)
    batches = torch.split(stream.windows(n_tokens), N_TOKENS_BATCH // n_tokens)
    with torch.no_grad():
        total = sum(loss(ids).item() * len(ids) for ids in batches)
    return total / sum(len(ids) for ids in batches)


def held_out_acceptance(
    trunk: Trunk, head: DraftHead, stream: TokenStream, n_steps: int = 3
) -> list[float]:
    """Measures the conditional acceptance of each draft step under greedy choice.

    The text is the corpus, not the target's own; so only positions where it follows the target's
    choice count.

    Returns:
        Step 0 … n_steps - 1: of the drafts that were right so far, the share that is right at this
        step too, in [0, 1].
    """
    windows = stream.windows(N_TOKENS_DRAFT, N_WINDOWS_DRAFT)
    with torch.no_grad():
        rates = [
            _step_rates(trunk, head, ids[:, :-1], n_steps)
            for ids in torch.split(windows, N_TOKENS_BATCH // N_TOKENS_DRAFT)
        ]
    return [float(rate) for rate in np.mean(rates, axis=0)]


def _step_rates(trunk: Trunk, head: DraftHead, ids: Tensor, n_steps: int) -> list[float]:
    output = trunk(ids)
    choice = output.logits.argmax(-1)
    follows = functional.pad(choice[:, :-1] == ids[:, 1:], (1, 0))
    chain, rates = None, []
    for step, logits in enumerate(head.unroll(trunk, ids, output, n_steps)):
        chain = _extend(chain, logits.argmax(-1) == choice, follows)
        n_alive = int(chain.is_alive[:, step + 1 :].sum())
        rates.append(int(chain.is_right[:, step + 1 :].sum()) / max(1, n_alive))
    return rates


def _extend(chain: Chain | None, is_right: Tensor, follows: Tensor) -> Chain:
    if chain is None:
        return Chain(torch.ones_like(is_right), is_right)
    is_alive = functional.pad(chain.is_right[:, :-1], (1, 0)) & follows
    return Chain(is_alive, is_right & is_alive)
