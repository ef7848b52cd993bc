"""Where two answers part and no tokens tie, one rounding may have tipped a choice; a fault is not.

The engine is a fake: its two ways of attention differ by a rounding, and where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader
from models.archs import write_model
from tests.archs import judge as judge_module
from tests.archs.driver import N_OUTPUT, Answer
from tests.archs.judge import TIE, Judge, Verdict
from tests.archs.tipped import N_AFTER, Steps, lag, shift_elsewhere, without_choice
from tests.support.built import needs_extension
from tests.support.demo import MODELS, TARGETS

pytestmark = needs_extension()

N_VOCAB = 16
HEIGHT, ROUNDING = 4.0, 0.003
PROMPT = [5, 3, 12, 9, 1, 7, 2, 15]
PLACE = 6
AT = len(PROMPT) - 1 + PLACE
"""Where the logits stand that choose output token PLACE."""

Places = Callable[[Sequence[int], int], bool]
"""Tells whether fused attention gives other logits for a text at a place."""


class FakeEngine:
    """Gives logits that depend on token and place; fused ones, where told to, of another token."""

    def __init__(self, is_other: Places, *, other: float = HEIGHT) -> None:
        self._is_other, self._other = is_other, other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, tokens: Sequence[int], is_fused: bool) -> npt.NDArray[np.float32]:
        rows = np.zeros((len(tokens), N_VOCAB), np.float32)
        for i, token in enumerate(tokens):
            rows[i, (5 * token + 3 * i) % N_VOCAB] = HEIGHT
            if is_fused and self._is_other(tokens, i):
                rows[i] = np.roll(rows[i], 1) * np.float32(self._other / HEIGHT)
        return rows + np.float32(ROUNDING * is_fused)

    def answer(self, prompt: Sequence[int], *, is_fused: bool) -> list[int]:
        """Returns the tokens with the greatest logits, one after the other."""
        tokens = list(prompt)
        for _ in range(N_OUTPUT):
            tokens.append(int(self(tokens, is_fused)[-1].argmax()))
        return tokens[len(prompt) :]


def is_ours(tokens: Sequence[int]) -> bool:
    return list(tokens[: len(PROMPT)]) == PROMPT


def tipped(tokens: Sequence[int], i: int) -> bool:
    """One place of one text: what a rounding does."""
    return is_ours(tokens) and i == AT


FAULTS: dict[str, Places] = {
    "many places": lambda _, i: i % 5 == AT % 5,
    "one more place before": lambda tokens, i: is_ours(tokens) and i in (2, AT),
    "one more place behind": lambda tokens, i: is_ours(tokens) and i in (AT, AT + 1),
    "from a length on": lambda _, i: i >= AT,
    "from the last token of the answer on": lambda _, i: i >= len(PROMPT) + N_OUTPUT - 2,
    "at one length of every text": lambda _, i: i == AT,
    "at one length, far behind": lambda tokens, i: tipped(tokens, i) or i == AT + N_AFTER,
}


def judged(
    monkeypatch: pytest.MonkeyPatch,
    engine: FakeEngine,
    of_all: FakeEngine | None = None,
    theirs: Sequence[int] | None = None,
    theirs_of_all: Sequence[int] = (),
) -> Verdict:
    """Judges our answer, with fused attention, beside the right one, without.

    Args:
        monkeypatch: pytest's.
        engine: On the model.
        of_all: On a copy of it that uses all experts; without, the model has none.
        theirs: What llama-server gives in place of that.
        theirs_of_all: What it gives of the copy.
    """

    class FakeReferee:
        def gap(self, *_: object) -> float:
            return HEIGHT

        def close(self) -> None:
            pass

    monkeypatch.setattr(judge_module, "Referee", lambda *_: FakeReferee())
    copy = Path("all.gguf") if of_all else None
    monkeypatch.setattr(judge_module, "without_choice", lambda *_: copy)
    monkeypatch.setattr(judge_module, "Steps", lambda path: of_all if path == copy else engine)
    ours = engine.answer(PROMPT, is_fused=True)
    with Judge(Path("model.gguf")) as judge:
        return judge.judge(
            [Answer(PROMPT, ours)],
            lambda prompt: theirs or engine.answer(prompt, is_fused=False),
            ask_other=lambda *_: theirs_of_all,
        )


def test_one_choice_that_a_rounding_tips_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = judged(monkeypatch, FakeEngine(tipped))
    assert (verdict.kind, verdict.gap, verdict.n_apart) == ("tie", HEIGHT, 1)
    assert verdict.reason == (
        "1 as our own without flash attention; elsewhere the logits differ by 0.003 at most"
    )


@pytest.mark.parametrize("is_other", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_attention_is_none(monkeypatch: pytest.MonkeyPatch, is_other: Places) -> None:
    verdict = judged(monkeypatch, FakeEngine(is_other))
    assert (verdict.kind, verdict.reason) == ("differs", "")


SEVERAL = FAULTS["one more place before"]


def test_several_choices_tip_where_none_does_with_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = judged(monkeypatch, FakeEngine(SEVERAL), FakeEngine(lambda *_: False))
    assert (verdict.kind, verdict.n_apart) == ("tie", 1)
    assert verdict.reason == (
        "1 as our own without flash attention; with all experts the logits differ by 0.003 at most"
    )


@pytest.mark.parametrize("is_other", [tipped, SEVERAL, lambda _, i: i == 0])
def test_a_fault_shows_with_all_experts_too(
    monkeypatch: pytest.MonkeyPatch, is_other: Places
) -> None:
    verdict = judged(monkeypatch, FakeEngine(SEVERAL), FakeEngine(is_other))
    assert (verdict.kind, verdict.reason) == ("differs", "")


NEVER = FakeEngine(lambda *_: False)


def test_a_choice_that_only_llama_server_tips_is_a_tie_if_it_is_right_without_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = NEVER.answer(PROMPT, is_fused=True)
    theirs = [*ours[:PLACE], ours[PLACE] ^ 1, *ours[PLACE + 1 :]]

    def verdict(engine: FakeEngine, of_all: FakeEngine, answer: Sequence[int]) -> Verdict:
        return judged(monkeypatch, engine, of_all, theirs, answer)

    found = verdict(NEVER, NEVER, ours)
    assert (found.kind, found.n_apart) == ("tie", 1)
    assert found.reason == (
        "1 as our own afresh; with all experts llama-server's tokens are ours, or lag 0.003"
        " behind at most"
    )
    assert verdict(NEVER, NEVER, theirs).kind == "differs", "they part with all experts, too"
    assert verdict(NEVER, NEVER, []).kind == "differs", "llama-server says nothing of the copy"
    assert verdict(NEVER, FakeEngine(SEVERAL), ours).kind == "differs"


def test_an_answer_that_the_engine_does_not_give_afresh_is_none_of_its_choices() -> None:
    ours = NEVER.answer(PROMPT, is_fused=True)
    assert lag(NEVER, PROMPT, ours) == 0
    assert lag(NEVER, PROMPT, [*ours[:-1], ours[-1] ^ 1]) == pytest.approx(HEIGHT)
    assert lag(NEVER, PROMPT, []) == np.inf
    with Judge(Path("model.gguf")) as judge, pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_module, "Steps", lambda _: NEVER)
        patch.setattr(judge_module, "without_choice", lambda *_: Path("all.gguf"))
        answers = {"afresh": ours, "of a cell with a fault": [*ours[:-1], ours[-1] ^ 1]}
        lags = {name: judge._lag(Answer(PROMPT, a), lambda *_: ours) for name, a in answers.items()}
    assert lags == {"afresh": pytest.approx(ROUNDING, 1e-3), "of a cell with a fault": np.inf}


def test_a_copy_uses_all_experts_and_is_none_where_there_are_none(tmp_path: Path) -> None:
    source = write_model(tmp_path / "gpt-oss.gguf", "gpt-oss")
    copy = without_choice(source, tmp_path / "all.gguf")
    assert copy is not None
    count, used = (
        GGUFReader(copy).fields[f"gpt-oss.expert_{key}"].contents()
        for key in ("count", "used_count")
    )
    assert count == used > GGUFReader(source).fields["gpt-oss.expert_used_count"].contents()
    assert without_choice(copy, tmp_path / "again.gguf") is None
    assert without_choice(write_model(tmp_path / "l.gguf", "llama"), tmp_path / "n.gguf") is None


def test_logits_that_are_no_numbers_are_none() -> None:
    engine = FakeEngine(lambda tokens, i: is_ours(tokens) and i in (1, AT))
    ours, right = engine.answer(PROMPT, is_fused=True), engine.answer(PROMPT, is_fused=False)

    def rows(tokens: Sequence[int], is_fused: bool) -> npt.NDArray[np.float32]:
        found = engine(tokens, is_fused)
        found[1] = np.nan
        return found

    assert not shift_elsewhere(rows, PROMPT, ours, right) <= TIE


def test_plain_attention_must_give_the_right_answer_and_fused_ours() -> None:
    engine = FakeEngine(tipped)
    ours, right = engine.answer(PROMPT, is_fused=True), engine.answer(PROMPT, is_fused=False)
    assert ours[:PLACE] == right[:PLACE]
    assert ours[PLACE] != right[PLACE]
    assert shift_elsewhere(engine, PROMPT, ours, right) == pytest.approx(ROUNDING, rel=1e-3)
    third = [*ours[:PLACE], ours[PLACE] ^ 1, *ours[PLACE + 1 :]]
    assert shift_elsewhere(engine, PROMPT, third, right) == np.inf
    assert shift_elsewhere(engine, PROMPT, ours, third) == np.inf
    assert shift_elsewhere(engine, PROMPT, right, right[:-1]) == np.inf
    later = [*right[:-1], right[-1] ^ 1]  # another choice of llama-server's, behind that token
    assert shift_elsewhere(engine, PROMPT, ours, later) == pytest.approx(ROUNDING, rel=1e-3)


def test_steps_of_the_engine_give_logits_in_both_ways() -> None:
    tokens = [40, 50, 60, 70]
    with Steps(MODELS / TARGETS["dense"]) as rows:
        fused, plain = rows(tokens, True), rows(tokens, False)
        assert np.array_equal(rows(tokens, True), fused)
    assert len(fused) == len(plain) == len(tokens)
    assert np.abs(fused - plain).max() < TIE
