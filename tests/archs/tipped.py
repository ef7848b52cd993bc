"""Has a rounding tipped a choice of the model's at one place, and changed nothing elsewhere?

Some models choose: experts for each token, or the earlier tokens that an indexer lets a layer read.
Where two candidates of such a choice tie, a rounding in the last digits of attention decides, and
the logits of that one place move by more than a tie of tokens does. The engine's two ways of
computing attention, fused (flash attention) and plain, round otherwise; a fault of one of them is
not at one place only. In a long text more than one choice is tipped: there a copy of the model that
uses all of its experts tells, since it chooses none, and a fault would show in it as well. Where
neither of our two ways gives llama-server's answer, that copy must give what llama-server gives.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

__all__ = [
    "N_AFTER",
    "Rows",
    "Steps",
    "lag",
    "shift_elsewhere",
    "shift_everywhere",
    "without_choice",
]

N_AFTER = 32
"""Tokens behind an answer that are looked at, too: it may part at its last one."""

N_CTX = 512

Rows = Callable[[Sequence[int], bool], npt.NDArray[np.float32]]
"""Gives the logits after each token of a text, computed one by one, with fused attention or plain.
Shape: [n_tokens, n_vocab] float32."""


def shift_elsewhere(
    rows: Rows, prompt: Sequence[int], ours: Sequence[int], right: Sequence[int]
) -> float:
    """Returns how far plain attention moves a logit at most, but for where two answers part.

    Elsewhere is all else of our text, N_AFTER tokens behind it, and all of it read backwards: as
    many other tokens, among which a fault that depends on the length alone shows once more.

    Args:
        rows: Of our engine.
        prompt: Its tokens.
        ours: Our answer.
        right: The right one.

    Returns:
        Infinity where plain attention does not give the right token there, or fused attention not
        ours: then it is not between them that the two part. What llama-server goes on with behind
        that token is not asked: there another choice may have tipped. NaN where a logit is no
        number.
    """
    pairs = zip(ours, right, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:  # one is longer
        return math.inf
    last = len(prompt) - 1
    plain = rows([*prompt, *right[: place + 1]], False)
    if plain[last + place].argmax() != right[place]:
        return math.inf
    text = [*prompt, *ours]
    text += text[:N_AFTER]
    fused = rows(text, True)
    if fused[last + place].argmax() != ours[place]:
        return math.inf
    forwards = np.delete(np.abs(fused - rows(text, False)).max(axis=1), last + place)
    return float(np.concatenate((forwards, _shifts(rows, text[::-1]))).max())


def shift_everywhere(rows: Rows, prompt: Sequence[int], ours: Sequence[int]) -> float:
    """Returns how far plain attention moves a logit of the same texts at most, at any place.

    Args:
        rows: Of our engine, on a model that chooses nothing.
        prompt: Its tokens.
        ours: Our answer.
    """
    text = [*prompt, *ours]
    text += text[:N_AFTER]
    return float(np.concatenate((_shifts(rows, text), _shifts(rows, text[::-1]))).max())


def lag(rows: Rows, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns by how much the logit of an answer's token is below the greatest, at most.

    0 where each is our own next token behind those before it; infinity for an empty answer.

    Args:
        rows: Of our engine, of which fused attention is asked.
        prompt: Its tokens.
        answer: Of whomever.
    """
    if not answer:
        return math.inf
    chosen = rows([*prompt, *answer[:-1]], True)[len(prompt) - 1 :]
    return float((chosen.max(axis=1) - chosen[np.arange(len(answer)), answer]).max())


def _shifts(rows: Rows, text: Sequence[int]) -> npt.NDArray[np.float32]:
    shifts: npt.NDArray[np.float32] = np.abs(rows(text, True) - rows(text, False)).max(axis=1)
    return shifts


def without_choice(source: Path, path: Path) -> Path | None:
    """Writes a copy of a model that uses all of its experts, and returns its path.

    None where there is nothing to choose from.

    Args:
        source: The model.
        path: Where the copy goes.
    """
    fields = GGUFReader(source).fields
    arch = fields["general.architecture"].contents()
    used, n = f"{arch}.expert_used_count", fields.get(f"{arch}.expert_count")
    if n is None or used not in fields or fields[used].contents() >= n.contents():
        return None
    shutil.copy(source, path)
    reader = GGUFReader(path, "r+")
    field = reader.fields[used]
    field.parts[field.data[0]][0] = n.contents()
    reader.data.flush()
    return path


class Steps:
    """Our engine on one model, one token after the other: a `Rows`.

    Args:
        path: The model.
    """

    def __init__(self, path: Path) -> None:
        self._model = Model(path)
        self._engines: dict[bool, Engine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines.values():
            engine.close()
        self._model.close()

    def __call__(self, tokens: Sequence[int], is_fused: bool) -> npt.NDArray[np.float32]:
        """Returns the logits after each token. Shape: [n_tokens, n_vocab] float32.

        Raises:
            drafthouse_engine.EngineError: the model cannot be computed in this way.
        """
        engine = self._open(is_fused)
        engine.seq_begin(0, Sampler(self._model, SamplingParams(temperature=0.0)))
        rows = []
        for i, token in enumerate(tokens):
            engine.decode([token], [i], [0], [True])
            rows.append(np.array(engine.logits(0)))
        engine.seq_end(0)
        return np.stack(rows)

    def _open(self, is_fused: bool) -> Engine:
        if is_fused not in self._engines:
            params = EngineParams(
                draft_type="none",
                n_draft_max=0,
                n_ctx_seq=N_CTX,
                n_batch=N_CTX,
                n_ubatch=N_CTX,
                n_threads=1,
                flash_attention=is_fused,
            )
            self._engines[is_fused] = Engine(self._model, None, params)
        return self._engines[is_fused]
