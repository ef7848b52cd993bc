"""The training loop: AdamW for a given time, on whatever the machine has."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from models.losses import Loss
from models.tokenizer import TokenStream

__all__ = ["Schedule", "train"]

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""On matrices only."""

GRADIENT_NORM_MAX = 1.0
RATE_FLOOR = 0.05
"""Share of the peak learning rate that is left at the end."""

LATE = 0.75
"""Progress from which `Schedule.n_tokens_late` holds."""

SEED = 1
REPORT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast a stage is trained."""

    seconds: float
    """Time budget in seconds, > 0; the learning rate falls over it as a cosine."""

    learning_rate: float
    """Peak learning rate."""

    n_batch: int
    """Sequences in a batch, at `n_tokens` each."""

    n_tokens: int = 256
    """Tokens in a sequence."""

    n_tokens_late: int | None = None
    """Tokens in a sequence in the last quarter, at the same tokens in a batch; none: no change."""

    n_warmup: int = 100
    """Batches over which the learning rate rises to its peak."""

    def batch_shape(self, progress: float) -> tuple[int, int]:
        """Returns sequences in a batch and tokens in a sequence, at a progress in [0, 1]."""
        if self.n_tokens_late is None or progress <= LATE:
            return self.n_batch, self.n_tokens
        return max(1, self.n_batch * self.n_tokens // self.n_tokens_late), self.n_tokens_late

    def rate(self, progress: float, n_steps: int) -> float:
        """Returns the learning rate.

        Args:
            progress: Share of the time that is over, in [0, 1].
            n_steps: Batches done.
        """
        warmup = min(1.0, (n_steps + 1) / self.n_warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * warmup * (RATE_FLOOR + (1 - RATE_FLOOR) * cosine)


def train(
    parameters: Iterable[nn.Parameter],
    loss: Loss,
    stream: TokenStream,
    schedule: Schedule,
    report: Callable[[str], None],
) -> None:
    """Trains until the time is over; at least one batch.

    Args:
        parameters: What is trained.
        loss: What is minimised.
        stream: Training text.
        schedule: Time, rate and batch.
        report: Takes a line about the progress, every half minute.
    """
    trained = list(parameters)
    optimizer, rng = _optimizer(trained), np.random.default_rng(SEED)
    start, n_steps, next_report = time.monotonic(), 0, 0.0
    while n_steps == 0 or time.monotonic() - start < schedule.seconds:
        elapsed = time.monotonic() - start
        progress = min(1.0, elapsed / schedule.seconds)
        _set_rate(optimizer, schedule.rate(progress, n_steps))
        value = loss(stream.batch(rng, *schedule.batch_shape(progress)), progress)
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, GRADIENT_NORM_MAX)
        optimizer.step()
        n_steps += 1
        if elapsed >= next_report:
            next_report = elapsed + REPORT_EVERY_S
            report(f"{elapsed:5.0f} s  batch {n_steps}  loss {value.item():.3f}")
    report(f"{time.monotonic() - start:5.0f} s  batch {n_steps}  done")


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
