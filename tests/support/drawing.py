"""Draws of a few tokens each, 24 sequences at a time, among sequences that come and go.

No draw may be favoured by what happens to it, or the counts prove nothing. So each draw's length is
fixed by its number before it begins, and it is cancelled as soon as it has that many tokens, in
whatever state it is then: cancelling by chance at each step would keep more of the paths that take
few steps, that is, of the drafts that were accepted. How many tokens are drafted, and whether a
draw is rolled back, moved by a snapshot, or loses its drafter for some steps, is decided by chance
alone, not by its tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

import drafthouse_engine as engine_library
from drafthouse_engine import (
    DecoderConfig,
    DecoderPool,
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    TreeShape,
    generate_tree,
)
from drafthouse_engine.options import DraftType

N_SEQ = 24
"""Draws side by side."""
N_DISTURBERS = 2
N_DRAFT = 3
LENGTHS: Final = (1, 2, 3, 3, 3, 3, 3, 3)
"""Tokens of a draw, by its number modulo eight."""
FORKED, ROLLED_BACK, MOVED, TURNED = 0.9, 0.04, 0.03, 0.15
"""Share of the draws that begin as a fork, where forks are possible; chance per step that a draw is
rolled back and computed again; or saved, ended and loaded; or its drafter turned off and on."""
PLAIN: Final[dict[str, object]] = {"top_k": 8, "top_p": 1.0, "min_p": 0.0}
"""Counts would be too thin without a top-k."""
Path: TypeAlias = tuple[int, ...]


def sampling(settings: dict[str, object], seed: int) -> SamplingParams:
    """Returns the parameters of one draw."""
    values = PLAIN | settings | {"seed": seed * 7919 + 1}
    values |= {} if "grammar" in settings else {"ignore_eos": True}
    return SamplingParams(**values)  # type: ignore[arg-type]  # a table gives them by name


class Drawer:
    """One engine that draws, with other sequences coming and going between the draws."""

    def __init__(
        self, target: Model, draft: Model | None, draft_type: DraftType, *, is_probabilistic: bool
    ) -> None:
        params = EngineParams(
            draft_type=draft_type,
            n_seq_max=N_SEQ + N_DISTURBERS + 1,
            n_ctx_seq=128,
            n_batch=1024,  # a prompt of 34 tokens in every slot
            n_ubatch=256,
            # The simple n-gram drafter proposes nothing shorter than 4.
            n_draft_max=8 if draft_type == "ngram-simple" else N_DRAFT,
            probabilistic=is_probabilistic,
            n_threads=1,
        )
        self.engine: Final = Engine(target, draft, params)
        self._target = target
        self._can_fork = not (target.is_recurrent or target.is_hybrid)
        self._chance = random.Random(3)
        self._n_drafted = self._n_accepted = 0
        for seq_id in range(N_SEQ, N_SEQ + N_DISTURBERS):
            self._begin(seq_id, {"temperature": 1.0}, 1)

    def close(self) -> None:
        """Frees the engine."""
        self.engine.close()

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self._n_accepted / max(self._n_drafted, 1)

    def draw(
        self, prompt: Sequence[int], settings: dict[str, object], n_draws: int, first_seed: int
    ) -> Counter[Path]:
        """Returns how often each row of tokens came; draw i has the seed first_seed + i."""
        self._prompt = list(prompt)
        self._prefill_parent()
        counts: Counter[Path] = Counter()
        numbers = iter(range(n_draws))
        outputs: dict[int, list[int]] = {}
        lengths: dict[int, int] = {}
        n_open = n_draws
        while n_open:
            begun = dict(self._next(numbers, outputs))
            self._begin_all({i: (settings, first_seed + number) for i, number in begun.items()})
            lengths |= {i: LENGTHS[number % len(LENGTHS)] for i, number in begun.items()}
            outputs |= {i: [] for i in begun}
            self._step(outputs)
            for seq_id, tokens in list(outputs.items()):
                if len(tokens) >= (n := lengths[seq_id]):
                    counts[tuple(tokens[:n])] += 1
                    self.engine.seq_end(seq_id)
                    del outputs[seq_id]
                    n_open -= 1
        return counts

    def _next(
        self, numbers: Iterator[int], outputs: dict[int, list[int]]
    ) -> Iterator[tuple[int, int]]:
        """Yields a slot and the number of its draw; not all at once, so that ages differ."""
        for seq_id in set(range(N_SEQ)) - outputs.keys():
            if self._chance.random() < 0.7 and (number := next(numbers, None)) is not None:
                yield seq_id, number

    def _prefill_parent(self) -> None:
        if not self._can_fork:
            return
        self._parent = N_SEQ + N_DISTURBERS
        self.engine.seq_end(self._parent)
        self._begin(self._parent, {"temperature": 1.0}, 1)
        row = (self._parent, 0, 0, len(self._prompt), 0, 0)
        self.engine.step(np.array([row], dtype=engine_library.PLAN_DTYPE), self._prompt)

    def _begin(self, seq_id: int, settings: dict[str, object], seed: int) -> None:
        self.engine.seq_begin(seq_id, Sampler(self._target, sampling(settings, seed)))

    def _begin_all(self, draws: dict[int, tuple[dict[str, object], int]]) -> None:
        forks: dict[int, Sampler] = {}
        for seq_id, (settings, seed) in draws.items():
            if self._can_fork and self._chance.random() < FORKED:
                forks[seq_id] = Sampler(self._target, sampling(settings, seed))
            else:
                self._begin(seq_id, settings, seed)
        if forks:
            self.engine.fork(self._parent, forks)

    def _step(self, outputs: dict[int, list[int]]) -> None:
        rows, tokens = list[tuple[int, ...]](), list[int]()
        for seq_id, found in outputs.items():
            is_back = bool(found) and self._disturb_draw(seq_id)
            history = self._prompt + found
            n_past = self.engine.seq_n_past(seq_id)
            n_max = self.engine.limits.n_draft_max if found and not is_back else 0
            n_draft = self._chance.randrange(n_max + 1)
            rows.append((seq_id, n_past, len(tokens), len(history) - n_past, n_draft, 1))
            tokens += history[n_past:]
        self._disturb(rows, tokens)
        if not rows:
            return
        result = self.engine.step(np.array(rows, dtype=engine_library.PLAN_DTYPE), tokens)
        assert not result.entries["status"].any()
        for entry in result.entries:
            if (seq_id := int(entry["seq_id"])) in outputs:
                start, n = int(entry["token_offset"]), int(entry["n_tokens"])
                outputs[seq_id] += result.tokens[start : start + n].tolist()
                self._n_drafted += int(entry["n_drafted"])
                self._n_accepted += int(entry["n_accepted"])
                if self._target.is_eog(outputs[seq_id][-1]):
                    outputs[seq_id] += [-1] * max(LENGTHS)

    def _disturb_draw(self, seq_id: int) -> bool:
        """Sometimes rolls a counted draw back, or moves it; returns whether it went back."""
        luck = self._chance.random()
        n_past = self.engine.seq_n_past(seq_id)
        if luck < ROLLED_BACK:
            # The sampler keeps its place: the same tokens are computed again.
            self._roll_back(seq_id, n_past - self._chance.randrange(1, 3))
            return True
        if luck < ROLLED_BACK + MOVED:
            snapshot = self.engine.save(seq_id)
            self.engine.seq_end(seq_id)
            self.engine.load(seq_id, snapshot)
        elif luck < ROLLED_BACK + MOVED + TURNED:
            self._turn(seq_id)
        return False

    def _turn(self, seq_id: int) -> None:
        """Turns a draw's drafter off, for this step or until the next turn, or on again."""
        if not self.engine.seq_is_cold(seq_id):
            self.engine.seq_drafts_off(seq_id)
            if self._chance.random() < 0.2:
                return
        self.engine.seq_drafts_on(seq_id)

    def _disturb(self, rows: list[tuple[int, ...]], tokens: list[int]) -> None:
        """Others prefill pieces, leave in the middle, are rolled back."""
        for seq_id in range(N_SEQ, N_SEQ + N_DISTURBERS):
            luck = self._chance.random()
            n_past = self.engine.seq_n_past(seq_id)
            if luck < 0.2 or n_past > 90:
                self.engine.seq_end(seq_id)
                self._begin(seq_id, {"temperature": 1.0}, 1)
            elif luck < 0.5:
                n = self._chance.randrange(1, 6)
                rows.append((seq_id, n_past, len(tokens), n, 0, 0))
                tokens += [self._chance.randrange(300, 900) for _ in range(n)]
            elif luck < 0.6 and n_past > 1:
                self._roll_back(seq_id, n_past - 1)

    def _roll_back(self, seq_id: int, n_past: int) -> None:
        try:
            self.engine.rollback(seq_id, n_past)
        except engine_library.Unsupported:  # a recurrent target, right after a prompt piece
            self.engine.rollback(seq_id, 0)


class TreeDrawer:
    """Draws by `generate_tree`, one after the other."""

    def __init__(self, target: Model, draft: Model) -> None:
        config = DecoderConfig(n_ctx_seq=128, n_batch=128, n_ubatch=128, n_threads=1)
        self._pools = DecoderPool(target, config), DecoderPool(draft, config)
        self._decoders = [pool.tree_decoder() for pool in self._pools]
        self._n_drafted = self._n_accepted = 0

    def close(self) -> None:
        """Frees the contexts."""
        for pool in self._pools:
            pool.close()

    @property
    def acceptance(self) -> float:
        """Share of the drafted nodes that were accepted."""
        return self._n_accepted / max(self._n_drafted, 1)

    def draw(
        self, prompt: Sequence[int], settings: dict[str, object], n_draws: int, first_seed: int
    ) -> Counter[Path]:
        """Returns how often each row of tokens came; draw i has the seed first_seed + i."""
        counts: Counter[Path] = Counter()
        target, draft = self._decoders
        for decoder in self._decoders:
            decoder.rollback_to(0)
            decoder.observe(prompt[:-1])
        for number in range(n_draws):
            n = LENGTHS[number % len(LENGTHS)]
            found = generate_tree(
                target,
                draft,
                prompt[-1:],
                n,
                shape=TreeShape(depth=2, width=3, n_nodes=5),
                sampling=sampling(settings, first_seed + number),
            )
            counts[found.tokens] += 1
            self._n_drafted += found.stats.n_drafted
            self._n_accepted += found.stats.n_accepted
            for decoder in self._decoders:
                decoder.rollback_to(len(prompt) - 1)
        return counts
