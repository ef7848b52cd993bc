"""What is asked: prompts of unlike lengths, and such as share their beginnings."""

from __future__ import annotations

import random

__all__ = ["LONG", "N_LEAD", "SHORT", "Prompt", "Texts", "draw"]

_FIRST, _LAST = 33, 120
"""Tokens of prompts: plain characters."""
_N_NAME = 3
"""First tokens by which a prompt gets its lead: those of the shortest."""

N_LEAD = 280
"""Tokens before each long prompt: more than a small cache for windows has cells (256)."""

DEEP = (150, 60)
"""Tokens of long prompts that some more share: behind them a small cache has lost the window."""

Prompt = list[int]


def draw(seed: int, n: int) -> Prompt:
    """Returns n tokens; the same seed gives the same, and of a shorter text the first ones."""
    chance = random.Random(seed)
    return [chance.randrange(_FIRST, _LAST) for _ in range(n)]


class Texts:
    """The prompts of all cells.

    Args:
        n_lead: Tokens before each; those that begin alike have the same.
    """

    def __init__(self, n_lead: int = 0) -> None:
        def led(prompt: Prompt) -> Prompt:
            chance = random.Random(str(prompt[:_N_NAME]))
            return [chance.randrange(_FIRST, _LAST) for _ in range(n_lead)] + prompt

        base, documents = draw(100, 120), [draw(300 + i, 80) for i in range(3)]
        self.prompts = [led(draw(i, n)) for i, n in enumerate((3, 9, 17, 24, 33, 48, 65, 90))]
        """Of unlike lengths."""
        self.base = led(base)
        self.cuts = [led(base[:n] + draw(200 + n, 12)) for n in (110, 95, 75, 52, 36)]
        """They share ever less of their beginning: each cuts what the one before has left."""
        self.documents = [led(document) for document in documents]
        """More than there are slots: all but the last ones go to host memory."""
        self.parts = [
            led(document[: 60 - 16 * i] + draw(700 + i, 9)) for i, document in enumerate(documents)
        ]
        """They begin as the documents do."""
        if n_lead:
            self.cuts[1:1] = [self.cuts[0][:n] + draw(800 + n, 200) for n in DEEP]
            self.parts += [
                text[: DEEP[0]] + draw(810 + i, 200) for i, text in enumerate(self.documents)
            ]
        self.low = led(draw(400, 30)), led(draw(401, 41))
        """Two that run."""
        self.high = led(draw(402, 22)), led(draw(403, 50))
        """Two that are more important and come later."""

    @property
    def all(self) -> list[Prompt]:
        """All of them."""
        groups = self.prompts, self.cuts, self.documents, self.parts, self.low, self.high
        return [prompt for group in groups for prompt in group]


SHORT = Texts()
LONG = Texts(N_LEAD)
"""What is asked of models whose windows have small caches."""
