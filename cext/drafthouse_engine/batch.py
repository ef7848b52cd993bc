"""Tokens that go into one decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import int32_array

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of sequences; those of one stand together. Batches are joined with `+`."""

    seq_ids: npt.NDArray[np.int32]
    """Sequence of each token. Shape: [n_tokens] int32."""
    positions: npt.NDArray[np.int32]
    """Position of each token, contiguous in a sequence. Shape: [n_tokens] int32."""
    tokens: npt.NDArray[np.int32]
    """Token ids. Shape: [n_tokens] int32."""
    is_output: npt.NDArray[np.bool]
    """Whether logits are wanted after the token. Shape: [n_tokens] bool."""

    @classmethod
    def of(
        cls,
        seq_id: int,
        n_past: int,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        outputs: Literal["all", "last", "none"] = "all",
    ) -> Self:
        """Returns the batch of one sequence.

        Args:
            seq_id: the sequence.
            n_past: position of the first token.
            tokens: token ids, in order.
            outputs: after which tokens logits are wanted: all of them to verify a draft, the last
                one at the end of a prompt, none inside a prompt.

        Raises:
            InvalidArgument: a token does not fit 32 bits.
        """
        ids = int32_array(tokens, "tokens")
        n = len(ids)
        is_output = np.full(n, outputs == "all")
        if outputs == "last" and n > 0:
            is_output[-1] = True
        positions = np.arange(n_past, n_past + n, dtype=np.int32)
        return cls(np.full(n, seq_id, np.int32), positions, ids, is_output)

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, other: Batch) -> Batch:
        return Batch(
            np.concatenate((self.seq_ids, other.seq_ids)),
            np.concatenate((self.positions, other.positions)),
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.is_output, other.is_output)),
        )

    def outputs_of(self, seq_id: int) -> list[int]:
        """Returns the indices of a sequence's outputs, in order."""
        return [int(i) for i in np.flatnonzero((self.seq_ids == seq_id) & self.is_output)]
