"""Plan and result of one engine step, as flat arrays."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from drafthouse_engine.moves import Moved

__all__ = [
    "DRAFT_DTYPE",
    "PLAN_DTYPE",
    "RESULT_DTYPE",
    "Fault",
    "ResultFlag",
    "StepResult",
    "StepRows",
]

PLAN_DTYPE: Final = np.dtype(
    [
        ("seq_id", np.int32),
        ("n_past", np.int32),
        ("token_offset", np.int32),
        ("n_tokens", np.int32),
        ("n_draft", np.int32),
        ("is_output", np.int32),
    ]
)
"""One sequence's part of a step: `spec_plan_entry` of `spec.h`, where the fields are explained."""

DRAFT_DTYPE: Final = np.dtype(
    [("seq_id", np.int32), ("token_offset", np.int32), ("n_tokens", np.int32)]
)
"""A draft that the caller proposes: `spec_external_draft` of `spec.h`, which has the fields."""

RESULT_DTYPE: Final = np.dtype(
    [
        ("seq_id", np.int32),
        ("status", np.int32),
        ("n_past", np.int32),
        ("token_offset", np.int32),
        ("n_tokens", np.int32),
        ("n_drafted", np.int32),
        ("n_accepted", np.int32),
        ("flags", np.int32),
        ("n_mask_work", np.int32),
    ]
)
"""What became of one sequence: `spec_result_entry` of `spec.h`, where the fields are explained."""


class StepRows(NamedTuple):
    """What one step did, or a run of steps, in plain numbers; see `StepResult`."""

    entries: list[tuple[int, int, int, int, int, int, int, int, int]]
    """One per plan entry, in the plan's order: the fields of RESULT_DTYPE."""
    tokens: list[int]
    """Emitted tokens of all entries."""
    logprobs: list[float]
    """Log-probabilities of `tokens`; empty when not asked for."""
    n_batch_tokens: int
    """Tokens of the target's decodes."""
    n_steps: int
    """Steps that were run."""
    t_draft_us: int
    """Drafting for all sequences."""
    t_decode_us: int
    """The target's decodes."""
    t_process_us: int
    """Feeding the decoded batches to the draft."""
    t_sample_us: int
    """Verification, log-probabilities and rollback."""
    t_total_us: int
    """All of it, but for the moves."""
    moved: Moved | None = None
    """What came of the moves; None where none were given."""


class ResultFlag(enum.IntFlag):
    """Bits of the field `flags` of `RESULT_DTYPE`."""

    EOG = 1
    DRAFT_COLD = 2
    REPLAYED = 4
    EXTERNAL = 8


class Fault(enum.IntEnum):
    """Failures that `Engine.inject_fault` can provoke."""

    NONE = 0
    DECODE_NO_ROOM = 1
    DECODE_FATAL = 2
    PROCESS = 3
    THROW = 4
    DRAFT = 5
    DECODE_THROW = 6


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step did, or a run of steps. The arrays are read-only copies, valid for ever."""

    entries: npt.NDArray[Any]
    """One per plan entry, in the plan's order. Shape: [n_entries] RESULT_DTYPE."""
    tokens: npt.NDArray[np.int32]
    """Emitted tokens of all entries; entry i has tokens[token_offset:token_offset + n_tokens].
    Shape: [n_tokens] int32."""
    logprobs: npt.NDArray[np.float32]
    """Natural log-probabilities of `tokens` under the target's unmodified distribution; NaN where
    not asked for.
    Shape: [n_tokens] float32."""
    n_batch_tokens: int
    """Tokens of the target's decode."""
    t_draft_us: int
    """Drafting for all sequences."""
    t_decode_us: int
    """The target's decode."""
    t_process_us: int
    """Feeding the decoded batch to the draft."""
    t_sample_us: int
    """Verification, log-probabilities and rollback."""
    t_total_us: int
    """The whole step, but for the moves."""
    top_tokens: npt.NDArray[np.int32]
    """The likeliest tokens with each of `tokens`, likeliest first, as many as the greatest
    `n_top_logprobs` of the plan's sequences; −1 where not asked for.
    Shape: [n_tokens, n_top] int32."""
    top_logprobs: npt.NDArray[np.float32]
    """Natural log-probabilities of `top_tokens` under the target's unmodified distribution; NaN
    where not asked for.
    Shape: [n_tokens, n_top] float32."""
    n_steps: int = 1
    """Steps that were run; counts and times are their sums."""
    moved: Moved | None = None
    """What came of the moves; None where none were given."""
