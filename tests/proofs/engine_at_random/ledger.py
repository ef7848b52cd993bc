"""What the engine must hold, and the verdict on what it gives."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tests.proofs.engine_at_random.request import Request, Snapshot
from tests.proofs.engine_at_random.settings import Settings
from tests.support.demo import TIE_LOGITS

from drafthouse_engine import Engine, SeqIdle, StepResult

__all__ = ["Held", "Ledger", "Saved", "Told", "Wrong", "agreed"]

N_LINES = 6
"""Operations that are told when something is wrong."""
N_RESTARTS_MAX = 6
LINE_MAX = 1500


class Wrong(AssertionError):
    """The engine did, or told, something else than it must."""


class Held(NamedTuple):
    """Tokens that a slot, or a snapshot, holds."""

    tokens: list[int]
    tag: int
    """Whose they are."""


class Saved(NamedTuple):
    """A snapshot for others that begin alike."""

    held: Held
    snapshot: Snapshot


class Ledger:
    """Which request is in which slot, which slots keep tokens of a former one, and who waits.

    Args:
        settings: Of the engine.
        engine: The engine that is tried.
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.limits = engine.limits
        self.live: dict[int, Request] = {}
        self.retained: dict[int, Held] = {}
        self.waiting: list[Request] = []
        self.saved: list[Saved] = []
        self.counts: Counter[str] = Counter()
        self._lines: deque[str] = deque(maxlen=N_LINES)

    def say(self, line: str) -> None:
        """Notes an operation before it is done."""
        self._lines.append(line[:LINE_MAX])

    def told(self) -> str:
        """Returns the last operations, one a line."""
        return "\n".join(self._lines)

    def held(self, slot: int) -> Held:
        """Returns what a slot in use holds."""
        if slot in self.retained:
            return self.retained[slot]
        request = self.live[slot]
        return Held(request.tokens[: request.n_past], request.tag)

    def free_slots(self) -> list[int]:
        """Returns the slots that hold nothing."""
        every = range(self.limits.n_seq_max)
        return [slot for slot in every if slot not in self.live and slot not in self.retained]

    def n_cells(self) -> int:
        """Returns how many tokens all slots hold."""
        return sum(len(self.held(slot).tokens) for slot in (*self.live, *self.retained))

    def has_room(self, n: int) -> bool:
        """Returns whether so many more tokens have cells."""
        return not self.limits.kv_unified or self.n_cells() + n <= self.limits.n_ctx

    def place(self, request: Request, slot: int) -> None:
        """Notes that a slot is a request's."""
        self.retained.pop(slot, None)
        request.slot = slot
        self.live[slot] = request

    def leave(self, request: Request) -> None:
        """Notes that a request has left its slot."""
        assert request.slot is not None
        del self.live[request.slot]
        request.slot = None

    def drop(self, request: Request) -> None:
        """Ends a request's sequence, for good."""
        assert request.slot is not None
        self.engine.seq_end(request.slot)
        self.leave(request)

    def clear(self, request: Request) -> None:
        """Notes that the engine has cleared a request's sequence: it begins again."""
        assert request.slot is not None
        self.check_idle(request.slot)
        self.leave(request)
        request.begin_again()
        if request.n_restarts < N_RESTARTS_MAX:
            self.waiting.append(request)

    def fail(self, request: Request, status: int, *, is_alike: bool = True) -> None:
        """Notes that no token could be chosen: it must be so alone, too, and at this place.

        Args:
            request: Whose sequence the engine has cleared.
            status: What the engine says of it.
            is_alike: Whether it went on as alone until then.
        """
        assert request.slot is not None
        found, answer = len(request.output), request.answer
        is_as_alone = (status, found) == (answer.status, len(answer.tokens))
        if is_alike and not request.is_done and not is_as_alone:  # done: a run went on beyond that
            raise Wrong(
                f"slot {request.slot} has status {status} at output {found}, alone "
                f"{answer.status} at {len(answer.tokens)}: {request.sampling}"
            )
        self.counts["failed as alone"] += is_as_alone
        self.check_idle(request.slot)
        self.leave(request)

    def judge(self, request: Request, tokens: Sequence[int], at: Told | None = None) -> bool:
        """Takes tokens that the engine gave, which must be those of alone.

        Args:
            request: Whose tokens they are.
            tokens: What was chosen.
            at: What was told with them.

        Returns:
            Whether the sequence still goes on as alone; not where two tokens were equally likely.

        Raises:
            Wrong: it is another token, or something else is told of it.
        """
        answer = request.answer
        for i, token in enumerate(tokens):
            n = len(request.output)
            if n < len(answer.tokens):
                if token != answer.tokens[n]:
                    return self._judge_other(request, token)
                if at is not None:
                    self._judge_told(request, at, i)
                self.counts["tokens"] += 1
            elif answer.status:
                raise Wrong(f"slot {request.slot} gives a token where alone it has {answer.status}")
            request.output.append(token)
        return True

    def _judge_other(self, request: Request, token: int) -> bool:
        answer, n = request.answer, len(request.output)
        found, logprobs = answer.tops[n]
        gap = logprobs[0] - logprobs[found.index(token)] if token in found else np.inf
        if not self.settings.is_exact and gap <= TIE_LOGITS:
            self.counts["ties"] += 1
            return False
        raise Wrong(
            f"slot {request.slot} gives {token} at output {n}, alone {answer.tokens[n]} "
            f"(likeliest: {answer.tops[n]}); prompt of {len(request.prompt)} tokens, restarted "
            f"{request.n_restarts} times, {request.sampling}"
        )

    def _judge_told(self, request: Request, told: Told, i: int) -> None:
        answer, n = request.answer, len(request.output)
        if request.sampling.logprobs:
            pair = told.logprobs[i], answer.logprobs[n]
            is_same = pair[0] == pair[1] or not self.settings.is_exact
            if not is_same or abs(pair[0] - pair[1]) > TIE_LOGITS:
                raise Wrong(
                    f"slot {request.slot}, output {n}: log-probability {pair[0]}, alone {pair[1]}"
                )
        n_top = request.sampling.n_top_logprobs
        if n_top and self.settings.is_exact:
            tops = told.tops[i][0][:n_top], told.tops[i][1][:n_top]
            if tops != answer.tops[n]:
                raise Wrong(
                    f"slot {request.slot}, output {n}: likeliest {tops}, alone {answer.tops[n]}"
                )

    def check(self) -> None:
        """Compares all that the engine holds with what it must.

        Raises:
            Wrong: it holds something else.
        """
        for slot, request in self.live.items():
            if request.output and request.has_stepped:
                agreed("last token", self.engine.seq_id_last(slot), request.output[-1])
        for slot in (*self.live, *self.retained):
            tokens = self.held(slot).tokens
            agreed(f"n_past of {slot}", self.engine.seq_n_past(slot), len(tokens))
            agreed(f"tokens of {slot}", self.engine.seq_tokens(slot).tolist(), tokens)
        for slot in self.free_slots()[:3]:
            self.check_idle(slot)
        if not self.limits.kv_unified and self.settings.target != "hybrid":
            agreed("cells", self.engine.n_cells_used, self.n_cells())

    def check_idle(self, slot: int) -> None:
        """Has nothing in a slot.

        Raises:
            Wrong: there is something.
        """
        try:
            tokens = self.engine.seq_tokens(slot)
        except SeqIdle:
            return
        raise Wrong(f"slot {slot} is not idle: it holds {len(tokens)} tokens")


class Told(NamedTuple):
    """What a step told with the tokens of one entry."""

    logprobs: list[float]
    tops: list[tuple[list[int], list[float]]]

    @classmethod
    def of(cls, result: StepResult, first: int, n: int) -> Told:
        """Returns what a result has of so many tokens from a first one on."""
        rows = range(first, first + n)
        tops = [(result.top_tokens[i].tolist(), result.top_logprobs[i].tolist()) for i in rows]
        return cls([float(result.logprobs[i]) for i in rows], tops)


def agreed(what: str, found: object, expected: object) -> None:
    """Raises `Wrong` where two things are not equal."""
    if found != expected:
        raise Wrong(f"{what}: {found}, expected {expected}")
