"""Rows that one forward gave: logits and hidden states by length of the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import DecoderContext

__all__ = ["Rows", "Scores"]

Rows: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Rows of one forward; row i is that after the first `start + i` tokens of the history."""

    start: int
    """Length of the history after which row 0 is."""
    logits: Rows
    """Shape: [n_rows, n_vocab]."""
    hidden: Rows
    """Rows after the final norm. Shape: [n_rows, n_embd_out]."""
    layers: Mapping[int, Rows]
    """Rows after each layer that was kept. Shape: [n_rows, n_embd] each."""

    def __post_init__(self) -> None:
        for rows in (self.logits, self.hidden, *self.layers.values()):
            rows.flags.writeable = False

    @classmethod
    def read(cls, context: DecoderContext, layers: Iterable[int], start: int) -> Self:
        """Returns all rows of a context's last scored decode.

        Args:
            context: the context.
            layers: those that it keeps.
            start: length of the history after which row 0 is.
        """
        return cls(start, context.logits(), context.hidden(), {i: context.layer(i) for i in layers})

    def has(self, length: int) -> bool:
        """Returns whether there is a row after so many tokens of the history."""
        return self.start <= length < self.start + len(self.logits)

    def cut(self, length: int) -> Scores | None:
        """Returns the rows up to a length of the history, None where there are none."""
        n = length + 1 - self.start
        return self.pick(self.start, slice(n)) if n > 0 else None

    def pick(self, start: int, rows: Sequence[int] | slice) -> Scores:
        """Returns some rows.

        Args:
            start: length of the history after which the first of them is.
            rows: which.
        """
        layers = {layer: values[rows] for layer, values in self.layers.items()}
        return Scores(start, self.logits[rows], self.hidden[rows], layers)

    def then(self, other: Scores) -> Scores:
        """Returns these rows and those of a forward that went on from them."""
        layers = {
            layer: np.concatenate((rows, other.layers[layer]))
            for layer, rows in self.layers.items()
            if layer in other.layers
        }
        logits = np.concatenate((self.logits, other.logits))
        return Scores(self.start, logits, np.concatenate((self.hidden, other.hidden)), layers)
