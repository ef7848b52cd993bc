"""Windowed copies of the dense demo model, and every way to cut a sequence of theirs.

The demo model's own window is as long as its context, so that it changes nothing. A copy with a
short one is the same model otherwise; what it says after a cut is measured against the same copy
that computes all tokens anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tests.proofs.malformed import values
from tests.support.demo import MODELS, TARGETS, TIE_LOGITS, prompts
from tests.support.hand import emitted, moved, plan, started

from drafthouse_engine import (
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    Start,
    Unsupported,
)

__all__ = ["WAYS", "Cutter", "borders", "model", "windowed"]

KEY = "mimo2.attention.sliding_window"
GREEDY = SamplingParams(temperature=0.0, logprobs=True, n_top_logprobs=2, ignore_eos=True)
N_TAIL = 9
"""Tokens that follow a cut: more than one, as a prompt's rest is."""
N_OUTPUT = 8
N_BATCH = 256
N_UBATCH = 64
_folder = tempfile.TemporaryDirectory(prefix="drafthouse-windows-")

Answer = list[tuple[int, float, float]]
"""Tokens, each with its log-probability and its lead over the second."""


@cache
def windowed(n_window: int) -> Path:
    """Returns a copy of the dense demo model that looks back so many tokens in its second layer."""
    data = bytearray((MODELS / TARGETS["dense"]).read_bytes())
    value = next(value for value in values(bytes(data)) if value.key == KEY)
    data[value.at : value.at + value.width] = n_window.to_bytes(value.width, "little")
    path = Path(_folder.name) / f"window-{n_window}.gguf"
    path.write_bytes(data)
    return path


@cache
def model(n_window: int) -> Model:
    """Returns a windowed copy, loaded once; never close it."""
    return Model(windowed(n_window))


@cache
def _text(i: int, n: int) -> tuple[int, ...]:
    """Returns tokens of a held-out text, as many as wanted: short ones are repeated."""
    text = prompts((900,) * (i + 1))[i]
    return (text * (1 + n // len(text)))[:n]


def borders(n_window: int, n_held: int) -> list[int]:
    """Returns the cuts around each border: of the window at both ends, of a ubatch, and the end."""
    places = (n_window, n_held - n_window, N_UBATCH, n_held)
    cuts = {place + d for place in set(places) for d in range(-2, 3)}
    return sorted(cut for cut in cuts if 1 <= cut <= n_held)


class Cutter:
    """Cuts sequences of one windowed model, and tells what became of each.

    Args:
        n_window: Tokens that the model looks back.
        n_held: Tokens of the sequence before it is cut.
        is_shared: Whether sequences share a pool of cells; then another one takes those that lie
            behind the window, before the cut.
    """

    def __init__(self, n_window: int, n_held: int, *, is_shared: bool = False) -> None:
        self.model = model(n_window)
        self.held = list(_text(0, n_held))
        self._tail = list(_text(1, N_TAIL))
        self.is_shared = is_shared
        n_ctx_seq = max(1024, n_held + 64)
        self._n_other = 200
        self._params = EngineParams(
            draft_type="none",
            n_seq_max=4,
            n_ctx=n_held + 3 * self._n_other if is_shared else 0,
            n_ctx_seq=n_ctx_seq,
            n_batch=N_BATCH,
            n_ubatch=N_UBATCH,
            n_threads=1,
            kv_unified=is_shared,
        )
        self.engine = Engine(self.model, None, self._params)
        self._expected: dict[int, Answer] = {}

    def close(self) -> None:
        """Frees the engine."""
        self.engine.close()

    def sampler(self) -> Sampler:
        """Returns a greedy sampler."""
        return Sampler(self.model, GREEDY)

    def feed(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Computes tokens of a sequence, as many in a step as it takes."""
        for i in range(0, len(tokens), N_BATCH):
            piece = list(tokens[i : i + N_BATCH])
            entry = (seq_id, self.engine.seq_n_past(seq_id), 0, len(piece), 0, 0)
            assert not self.engine.step(plan(entry), piece).entries["status"].any()

    def hold(self, seq_id: int = 0) -> None:
        """Begins a sequence with all its tokens; in a shared pool others take what they can."""
        if self.is_shared:
            self.engine.seq_begin(3, self.sampler())
            self.feed(3, _text(2, self._n_other))
        self.engine.seq_begin(seq_id, self.sampler())
        self.feed(seq_id, self.held)
        if self.is_shared:
            self.engine.seq_end(3)
            self.engine.seq_begin(3, self.sampler())
            self.feed(3, _text(2, 2 * self._n_other))
            self.engine.seq_end(3)

    def saved(self) -> bytes:
        """Returns a snapshot of the sequence, which has ended."""
        self.hold()
        snapshot = self.engine.save(0)
        self.engine.seq_end(0)
        return snapshot

    def answer(self, seq_id: int) -> Answer:
        """Goes on with a sequence: the tail, then greedy tokens."""
        found: Answer = []
        tokens = self._tail
        while len(found) < N_OUTPUT:
            entry = (seq_id, self.engine.seq_n_past(seq_id), 0, len(tokens), 0, 1)
            result = self.engine.step(plan(entry), tokens)
            assert not result.entries["status"].any()
            best, second = (float(x) for x in result.top_logprobs[0])
            tokens = emitted(result, 0)
            found.append((tokens[0], best, best - second))
        return found

    def expected(self, cut: int) -> Answer:
        """Returns what follows the first tokens when they are computed anew."""
        if cut not in self._expected:
            self.clear()
            self.engine.seq_begin(0, self.sampler())
            self.feed(0, self.held[:cut])
            self._expected[cut] = self.answer(0)
        return self._expected[cut]

    def clear(self) -> None:
        """Ends all sequences."""
        for seq_id in range(4):
            self.engine.seq_end(seq_id)

    def verdict(self, way: Way, cut: int) -> str:
        """Returns "equal", "tie" (two tokens are equally likely), "refused" or "WRONG"."""
        expected = self.expected(cut)
        self.clear()
        try:
            found = way(self, cut)
        except Unsupported:
            return "refused"
        finally:
            self.clear()
        if found is None:
            return "refused"
        if abs(expected[0][1] - found[0][1]) > TIE_LOGITS:
            return "WRONG"
        for (a, _, lead), (b, _, _) in zip(expected, found, strict=True):
            if a != b:
                return "tie" if lead <= TIE_LOGITS else "WRONG"
        return "equal"


Way = Callable[[Cutter, int], Answer | None]
"""Makes a sequence with the first tokens out of one with all, and goes on; None: it began empty."""


def _kept(cutter: Cutter, start: Start) -> Answer | None:
    seq_id, cut = start.seq_id, start.n_kept
    n_kept = started(cutter.engine, start)
    assert n_kept in (0, cut)
    return cutter.answer(seq_id) if n_kept else None


def in_place(cutter: Cutter, cut: int) -> Answer | None:
    cutter.hold()
    return _kept(cutter, Start(0, cutter.sampler(), cut))


def copied(cutter: Cutter, cut: int) -> Answer | None:
    cutter.hold()
    return _kept(cutter, Start(1, cutter.sampler(), cut, source=0))


def snapshot(cutter: Cutter, cut: int) -> Answer | None:
    snapshot = cutter.saved()
    return _kept(cutter, Start(1, cutter.sampler(), cut, snapshot=snapshot))


def _whole(cutter: Cutter) -> None:
    """Slot 1 comes out of a snapshot, with all tokens."""
    n, snapshot = len(cutter.held), cutter.saved()
    assert started(cutter.engine, Start(1, cutter.sampler(), n, snapshot=snapshot)) == n


def snapshot_then_in_place(cutter: Cutter, cut: int) -> Answer | None:
    _whole(cutter)
    return _kept(cutter, Start(1, cutter.sampler(), cut))


def snapshot_then_copied(cutter: Cutter, cut: int) -> Answer | None:
    _whole(cutter)
    return _kept(cutter, Start(2, cutter.sampler(), cut, source=1))


def forked(cutter: Cutter, cut: int) -> Answer | None:
    cutter.hold()
    if cut == len(cutter.held):
        return None  # a fork takes all but the last token at most
    cutter.engine.fork(0, {1: cutter.sampler()}, cut)
    return cutter.answer(1)


def snapshot_then_forked(cutter: Cutter, cut: int) -> Answer | None:
    snapshot = cutter.saved()
    if cut == len(cutter.held):
        return None
    cutter.engine.load(1, snapshot)
    cutter.engine.fork(1, {2: cutter.sampler()}, cut)
    return cutter.answer(2)


def rolled_back(cutter: Cutter, cut: int) -> Answer | None:
    cutter.hold()
    cutter.engine.rollback(0, cut)
    return cutter.answer(0)


def snapshot_then_rolled_back(cutter: Cutter, cut: int) -> Answer | None:
    cutter.engine.load(1, cutter.saved())
    cutter.engine.rollback(1, cut)
    return cutter.answer(1)


def preempted(cutter: Cutter, cut: int) -> Answer | None:
    """Preempted with the first tokens only, and resumed whole."""
    cutter.held, all_held = cutter.held[:cut], cutter.held
    try:
        cutter.hold()
        snapshot = cutter.engine.save(0)
        sampler = moved(cutter.engine, swap_outs=[0]).samplers[0]
        start = Start(1, sampler, cut, snapshot=snapshot, is_resumed=True)
        n_kept = started(cutter.engine, start)
        return cutter.answer(1) if n_kept else None
    finally:
        cutter.held = all_held


WAYS: dict[str, Way] = {
    "slot, in place": in_place,
    "slot, copied": copied,
    "snapshot": snapshot,
    "snapshot, then in place": snapshot_then_in_place,
    "snapshot, then copied": snapshot_then_copied,
    "fork": forked,
    "snapshot, then fork": snapshot_then_forked,
    "rollback": rolled_back,
    "snapshot, then rollback": snapshot_then_rolled_back,
    "preempted and resumed": preempted,
}
