"""Are two answers to one prompt the same, and where they part, do two tokens tie?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from tests.archs.driver import Answer
from tests.archs.tipped import Rows, Steps, lag, shift_elsewhere, shift_everywhere, without_choice
from tests.support.demo import Referee

from drafthouse_engine import EngineError

__all__ = ["TIE", "Judge", "Verdict", "Ways", "assert_same"]

TIE = 0.05
"""Two tokens whose logits differ by at most this tie.

Caches are float16, and sums in them are rounded otherwise where the batch has another width, or the
kernel is another. Logits have a standard deviation of 3; one early token that is another moves them
by about 1, and `Judge.history` says by how much.
"""


Ways = Callable[[list[list[int]]], Iterable[tuple[str, Sequence[Sequence[int]]]]]
"""Gives answers to all prompts of a cell, in several ways by name."""

AskOther = Callable[[Path, Sequence[int]], Sequence[int]]
"""Gives the right answer of another model to a prompt; an empty one where there is none."""


@dataclass(frozen=True)
class Verdict:
    """What became of a cell."""

    kind: str
    """`equal`, `tie`, `differs`, `refused`, `died` (our process has ended), or `unknown` (there is
    no answer of llama-server's)."""
    gap: float = 0.0
    """Of a tie, or where it differs: the greatest difference of the two candidates' logits."""
    n_apart: int = 0
    """Answers that are not equal."""
    n: int = 0
    """Answers."""
    n_drafted: int = 0
    """Drafted tokens."""
    n_accepted: int = 0
    """Of these, accepted."""
    n_reused: int = 0
    """Tokens that were not computed again."""
    reason: str = ""
    """Why it was refused, or how the process ended; of a tie of experts, what gives the same."""
    is_peer_same: bool = False
    """Of embeddings at once: llama-server gives the same bits at once as alone."""


def assert_same(model: Path, expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    """Asserts that answers to the same prompts are equal, but where logits tie.

    Args:
        model: The file.
        expected: Answers of one way to compute them.
        found: Of another, whose batches may be of other widths; at least one.
    """
    right = {tuple(answer.prompt): answer.tokens for answer in expected}
    with Judge(model) as judge:
        verdict = judge.judge(found, lambda prompt: right[tuple(prompt)])
    assert verdict.kind in {"equal", "tie"}, verdict


class Judge:
    """Compares answers of one model; computes logits where they part.

    Args:
        model: The file.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._referee: Referee | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._referee is not None:
            self._referee.close()

    def judge(
        self,
        answers: Sequence[Answer],
        right: Callable[[Sequence[int]], Sequence[int]],
        ways: Ways = lambda _: (),
        ask_other: AskOther = lambda *_: (),
    ) -> Verdict:
        """Returns the verdict on the answers of a cell.

        Args:
            answers: At least one.
            right: Gives the right answer to a prompt.
            ways: Gives the answers to all prompts in ways that round otherwise and are as right,
                with their names; asked where two logits do not tie, but perhaps two experts did.
                What none of them gives is computed with and without flash attention (`tipped`).
            ask_other: Asked about the model's copy that uses all experts, where neither gives the
                right answer.
        """
        gaps = {
            i: self._gap(answer, expected)
            for i, answer in enumerate(answers)
            if (expected := list(right(answer.prompt))) != answer.tokens
        }
        gap, reason = max(gaps.values(), default=0.0), ""
        kind = "tie" if gaps else "equal"
        far = {i for i, gap in gaps.items() if gap > TIE}
        for way, found in ways([answer.prompt for answer in answers]) if far else ():
            right_too = {i for i in far if found[i] == answers[i].tokens}
            reason += f"{len(right_too)} as llama-server {way}; " if right_too else ""
            far -= right_too
            if not far:
                break
        for where, shift in (("elsewhere", self._shift), ("with all experts", self._shift_of_all)):
            shifts = {i: shift(answers[i], right) for i in sorted(far)}
            tipped = {i: shift for i, shift in shifts.items() if shift <= TIE}
            if tipped:
                reason += f"{len(tipped)} as our own without flash attention; {where} the logits"
                reason += f" differ by {max(tipped.values()):.2g} at most; "
            far -= tipped.keys()
        shifts = {i: self._lag(answers[i], ask_other) for i in sorted(far)}
        tipped = {i: shift for i, shift in shifts.items() if shift <= TIE}
        if tipped:
            reason += f"{len(tipped)} as our own afresh; with all experts llama-server's tokens are"
            reason += f" ours, or lag {max(tipped.values()):.2g} behind at most"
        far -= tipped.keys()
        kind = "differs" if far else kind
        return Verdict(
            kind,
            gap,
            len(gaps),
            len(answers),
            sum(answer.n_drafted for answer in answers),
            sum(answer.n_accepted for answer in answers),
            sum(answer.n_reused for answer in answers),
            reason.removesuffix("; "),
        )

    def history(self, prompt: Sequence[int], others: Sequence[int]) -> float:
        """Returns how far a logit moves at most when an early token of a prompt is another.

        Args:
            prompt: Its tokens.
            others: Places of tokens, each of which is replaced.
        """
        logits = self._logits(prompt)
        changed = [self._logits([*prompt[:i], prompt[i] ^ 1, *prompt[i + 1 :]]) for i in others]
        return max(float(np.abs(found - logits).max()) for found in changed)

    def _logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return self._open().logits(tokens)

    def _open(self) -> Referee:
        if self._referee is None:
            self._referee = Referee("", self._model)
        return self._referee

    def _shift(self, answer: Answer, right: Callable[[Sequence[int]], Sequence[int]]) -> float:
        """Returns how far logits differ without flash attention, but for where an answer parts."""
        text = answer.prompt, answer.tokens
        return _measured(
            self._model, lambda rows: shift_elsewhere(rows, *text, right(answer.prompt))
        )

    def _shift_of_all(
        self, answer: Answer, right: Callable[[Sequence[int]], Sequence[int]]
    ) -> float:
        """Returns how far they differ at any place where the model uses all of its experts.

        Infinite where it does so as it is, or where without flash attention it is not right.
        """
        if not math.isfinite(self._shift(answer, right)):
            return math.inf
        text = answer.prompt, answer.tokens
        return self._of_all(lambda _, rows: shift_everywhere(rows, *text))

    def _lag(self, answer: Answer, ask_other: AskOther) -> float:
        """Returns how far our logits are from the right answer where all experts are used.

        Infinite where ours is not what the engine gives afresh: then no choice of the model's made
        it what it is. A fault of attention would show with all experts as well.
        """
        text = answer.prompt, answer.tokens
        if _measured(self._model, lambda rows: lag(rows, *text)) > TIE:
            return math.inf

        def measure(model: Path, rows: Rows) -> float:
            shift = shift_everywhere(rows, *text)
            return max(shift, lag(rows, answer.prompt, ask_other(model, answer.prompt)))

        return self._of_all(measure)

    def _of_all(self, measure: Callable[[Path, Rows], float]) -> float:
        """Returns what is measured of a copy that uses all experts and of its logits.

        Infinite where there is no such copy, or it cannot be computed.
        """
        with tempfile.TemporaryDirectory() as folder:
            model = without_choice(self._model, Path(folder) / "all.gguf")
            if model is None:
                return math.inf
            return _measured(model, lambda rows: measure(model, rows))

    def _gap(self, answer: Answer, expected: Sequence[int]) -> float:
        """Returns the difference of the two candidates' logits at the first difference."""
        pairs = zip(answer.tokens, expected, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:  # one is longer
            return math.inf
        history = [*answer.prompt, *answer.tokens[:place]]
        return self._open().gap(history, answer.tokens[place], expected[place])


def _measured(model: Path, measure: Callable[[Rows], float]) -> float:
    """Returns what is measured of a model's logits; infinity where they cannot be computed."""
    try:
        with Steps(model) as rows:
            return measure(rows)
    except EngineError:
        return math.inf
