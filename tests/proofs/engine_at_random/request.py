"""A request, and what its sequence gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from tests.proofs.engine_at_random.settings import Settings
from tests.support.demo import vocabulary

from drafthouse_engine import PLAN_DTYPE, Sampler, SamplingParams

__all__ = ["Alone", "Answer", "Request", "Snapshot", "drawn_sampling"]

Snapshot = bytes | memoryview

N_TOP_OF_TIES = 4
"""Tokens told with each of an engine that is not exact: one of them may stand in its place."""
_GRAMMARS = (
    'root ::= [a-z ]+ ("\\n" [a-z ]*)*',
    'root ::= "{" [^}]* "}" root?',
    'root ::= (" "? [0-9a-f]){1,30}',
    "root ::= [^\\x00]{0,12}",
)
_KNOBS: dict[str, tuple[object, ...]] = {
    "top_k": (0, 1, 7),
    "top_p": (0.3, 1.0),
    "min_p": (0.0, 0.3),
    "penalty_repeat": (0.7, 1.4),
    "penalty_last_n": (0, -1, 5),
    "dry_multiplier": (0.8,),
    "xtc_probability": (0.6,),
    "xtc_threshold": (0.05,),
    "mirostat": (1, 2),
    "typical_p": (0.4,),
    "top_n_sigma": (1.0,),
    "dynatemp_range": (0.5,),
    "adaptive_target": (0.4,),
    "logit_bias": (((5, 3.0), (9, float("-inf"))),),
    "grammar": _GRAMMARS,
}


_DEAD_END = 'root ::= [a-z ]{1,9} "Q"'


@cache
def _without(letter: str) -> tuple[tuple[int, float], ...]:
    """Returns biases that forbid all tokens that begin with a letter."""
    model = vocabulary()
    ids = range(model.n_vocab)
    return tuple((i, -np.inf) for i in ids if model.token_bytes(i).startswith(letter.encode()))


class Answer(NamedTuple):
    """What a sequence gives alone."""

    tokens: list[int]
    """Until as many as asked for, an end token, or a full context."""
    logprobs: list[float]
    """Of these tokens; NaN where not asked for."""
    tops: list[tuple[list[int], list[float]]]
    """With each of them the likeliest tokens and their log-probabilities."""
    status: int
    """Why there are no more: a status of the engine, 0 without a failure."""


@dataclass(eq=False)
class Request:
    """A request, and how far its sequence is."""

    prompt: list[int]
    sampling: SamplingParams
    answer: Answer
    """What it must give."""
    tag: int
    """Whose it is."""
    output: list[int] = field(default_factory=list)
    n_past: int = 0
    """Tokens that the engine holds; where it waits, those of its snapshot."""
    slot: int | None = None
    """None: it waits."""
    sampler: Sampler | None = None
    """Its own, where it was preempted."""
    snapshot: Snapshot | None = None
    """Written when it was preempted; without `sampler`, with the sampler in it."""
    has_stepped: bool = False
    """Whether a step has chosen a token of it: only then a step drafts for it."""
    n_restarts: int = 0

    @property
    def tokens(self) -> list[int]:
        """Its prompt and all that it has given."""
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        """Whether it has given all that it gives alone."""
        return len(self.output) >= len(self.answer.tokens) and not self.answer.status

    @property
    def is_generating(self) -> bool:
        """Whether all is computed but its last token."""
        return bool(self.output) and 0 < self.n_past == len(self.tokens) - 1

    def copy(self) -> Request:
        """Returns one that is as far, in no slot yet, and without a sampler."""
        return replace(self, output=list(self.output), slot=None, sampler=None)

    def begin_again(self) -> None:
        """Forgets all but what is asked for."""
        self.output = []
        self.n_past = 0
        self.slot = self.sampler = self.snapshot = None
        self.has_stepped = False
        self.n_restarts += 1


class Alone:
    """An engine that computes one sequence at a time, and remembers what came of it."""

    def __init__(self, settings: Settings) -> None:
        self._engine = settings.alone()
        self._known: dict[tuple[tuple[int, ...], SamplingParams, int], Answer] = {}

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()

    def answer(self, prompt: list[int], sampling: SamplingParams, n_output: int) -> Answer:
        """Returns what a sequence gives."""
        key = (tuple(prompt), sampling, n_output)
        if key not in self._known:
            self._known[key] = self._generated(prompt, sampling, n_output)
        return self._known[key]

    def _generated(self, prompt: list[int], sampling: SamplingParams, n_output: int) -> Answer:
        engine = self._engine
        found = Answer([], [], [], 0)
        pending = list(prompt)
        engine.seq_begin(0, Sampler(engine.target, sampling))
        while len(found.tokens) < n_output:
            n_past = engine.seq_n_past(0)
            if n_past + len(pending) > engine.limits.n_ctx_seq:
                break
            row = (0, n_past, 0, len(pending), 0, 1)
            result = engine.step(np.array([row], PLAN_DTYPE), pending)
            if status := int(result.entries["status"][0]):
                found = found._replace(status=status)
                break
            pending = [int(result.tokens[0])]
            found.tokens.extend(pending)
            found.logprobs.append(float(result.logprobs[0]))
            found.tops.append((result.top_tokens[0].tolist(), result.top_logprobs[0].tolist()))
            if engine.target.is_eog(pending[0]):
                break
        engine.seq_end(0)
        return found


def drawn_sampling(chance: random.Random, *, is_exact: bool) -> SamplingParams:
    """Draws how tokens are chosen: greedily, where arithmetic is not exact."""
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": chance.random() < 0.6,
        "logprobs": not is_exact or chance.random() < 0.4,
        "n_top_logprobs": chance.choice((0, 0, 0, 2, 5)) if is_exact else N_TOP_OF_TIES,
    }
    if is_exact and chance.random() < 0.6:
        fields |= {"temperature": chance.choice((0.3, 0.8, 1.5)), "seed": chance.randrange(5)}
        if chance.random() < 0.4:  # what a token that is heard twice, or not at all, changes
            fields |= {"penalty_frequency": 2.0, "penalty_last_n": -1}
        for name, values in _KNOBS.items():
            if chance.random() < 0.15:
                fields[name] = chance.choice(values)
        if chance.random() < 0.15:
            fields |= {"grammar": _DEAD_END, "logit_bias": _without("Q")}
        if "mirostat" in fields:
            fields.pop("adaptive_target", None)
        fields["ignore_eos"] = fields["ignore_eos"] and "grammar" not in fields
    return SamplingParams(match_only=fields["temperature"] > 0, **fields)
