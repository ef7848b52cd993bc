"""Calls drawn at random on an engine that is drawn at random, all by one seed.

Sequences are computed in pieces and in crowds, drafted for, preempted, saved, copied, forked,
loaded elsewhere, driven by hand, failed on purpose; drafters are turned off and on. Each sequence
must give the tokens, log-probabilities and likeliest tokens that it gives alone, on an engine
without drafts. The engine must hold what the calls have made of it, and nothing in the end.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from tests.proofs.engine_at_random.by_hand import drive_by_hand
from tests.proofs.engine_at_random.calls import fork, refuse, roll_back, save_and_load
from tests.proofs.engine_at_random.ledger import Ledger, agreed
from tests.proofs.engine_at_random.plan import drawn_plan
from tests.proofs.engine_at_random.request import Alone, Request, drawn_sampling
from tests.proofs.engine_at_random.settings import Settings, drawn_settings
from tests.proofs.engine_at_random.step import carry_out
from tests.support.demo import prompts

from drafthouse_engine import PLAN_DTYPE, EngineError, Sampler, SamplingParams

__all__ = ["N_OPERATIONS", "Drive", "Outcome", "drive"]

COMMAND = "python -m tests.proofs.engine_at_random --runs 1"
N_OPERATIONS = 100
N_OUTPUT_MAX = 40
N_TEXT = 320
LAST = SamplingParams(temperature=0.0, logprobs=True, n_top_logprobs=4)


@dataclass
class Outcome:
    """What came of one seed."""

    settings: Settings
    counts: Counter[str] = field(default_factory=Counter)
    """How often what was done."""
    fault: str = ""
    """What was wrong, the last operations, the settings, how to repeat it; empty: nothing."""


class Drive:
    """One engine, and all that is done with it.

    Args:
        seed: Of everything that is drawn.
        ledger: Of the engine.
        alone: What its sequences give alone.
    """

    def __init__(self, seed: int, ledger: Ledger, alone: Alone) -> None:
        self._chance = random.Random(seed)
        self._is_by_hand = self._chance.random() < 0.3  # most of it: steps move, and hardly compute
        self._is_exact = ledger.settings.is_exact
        self._alone = alone
        self._heads = [list(text) for text in prompts((N_TEXT,) * 3)]
        self.ledger = ledger

    def run(self, n_operations: int) -> None:
        """Does so many operations, ends what is left, and begins once more.

        Raises:
            Wrong: the engine does not do what it must.
            EngineError: it refuses what is legal.
        """
        chance, ledger = self._chance, self.ledger
        operations: list[tuple[Callable[[], None], float]] = [
            (self._step, 12),
            (lambda: drive_by_hand(chance, ledger), 12 if self._is_by_hand else 3),
            (lambda: save_and_load(chance, ledger), 0.7),
            (lambda: fork(chance, ledger, self._forked), 0.5),
            (lambda: roll_back(chance, ledger), 0.4),
            (lambda: refuse(chance, ledger), 0.3),
        ]
        ledger.waiting += [self._new_request() for _ in range(chance.choice((1, 3, 10)))]
        for _ in range(n_operations):
            chance.choices([it for it, _ in operations], [it for _, it in operations])[0]()
            self._finish_done()
            ledger.check()
        self._end()

    def _step(self) -> None:
        skipped = 0.95 if self._is_by_hand else self._chance.choice((0.0, 0.0, 0.2, 0.6, 1.0))
        plan = drawn_plan(self._chance, self.ledger, self._new_request, skipped)
        carry_out(self._chance, self.ledger, plan)

    def _finish_done(self) -> None:
        """Ends sequences that have given all; some slots keep their tokens."""
        ledger = self.ledger
        for slot, request in list(ledger.live.items()):
            if request.is_done:
                held = ledger.held(slot)
                ledger.counts["finished"] += 1
                if self._chance.random() < 0.5:
                    ledger.leave(request)
                    ledger.retained[slot] = held
                else:
                    ledger.drop(request)

    def _end(self) -> None:
        ledger = self.ledger
        for slot in (*ledger.live, *ledger.retained):
            ledger.engine.seq_end(slot)
        ledger.live.clear()
        ledger.retained.clear()
        agreed("cells in the end", ledger.engine.n_cells_used, 0)
        for slot in sorted({0, ledger.limits.n_seq_max - 1}):
            self._generate_plainly(slot)
        agreed("cells after the end", ledger.engine.n_cells_used, 0)

    def _generate_plainly(self, slot: int) -> None:
        """Has a new sequence give what it gives alone, after all that was done with its slot."""
        engine, ledger = self.ledger.engine, self.ledger
        ledger.say(f"a new sequence in {slot}")
        request = self._request(self._heads[0][:7], LAST, 0, 12)
        engine.seq_begin(slot, Sampler(engine.target, LAST))
        ledger.place(request, slot)
        while not request.is_done:
            n_past = engine.seq_n_past(slot)
            rest = request.tokens[n_past:]
            n = min(len(rest), ledger.limits.n_batch)
            row = (slot, n_past, 0, n, 0, int(n == len(rest)))
            result = engine.step(np.array([row], PLAN_DTYPE), rest[:n])
            agreed("status", int(result.entries["status"][0]), 0)
            if not ledger.judge(request, result.tokens.tolist()):
                break
        ledger.drop(request)

    def _new_request(self) -> Request:
        """Draws a request that begins as a text, or as another one, and goes on at random."""
        chance, n_ctx = self._chance, self.ledger.limits.n_ctx_seq
        lengths = (1, 2, 3, chance.randrange(1, 30), chance.randrange(1, n_ctx), n_ctx, n_ctx - 1)
        n = chance.choice(lengths)
        n_head = chance.randrange(n + 1) if chance.random() < 0.5 else n
        text = chance.choice(self._heads)
        if chance.random() < 0.3:  # what n-grams draft from
            text = text[: chance.randrange(4, 25)] * len(text)
        prompt = text[:n_head]
        tag = chance.choice((0, 0, 1, 2))
        ledger = self.ledger
        slots = [slot for slot in (*ledger.live, *ledger.retained) if ledger.held(slot).tokens]
        if slots and chance.random() < 0.4:
            held = ledger.held(chance.choice(slots))
            prompt = held.tokens[: chance.randrange(1, len(held.tokens) + 1)]
            n = min(len(prompt) + chance.randrange(9), n_ctx)
            tag = held.tag if chance.random() < 0.8 else tag
        prompt = prompt + chance.choices(self._heads[0], k=n - len(prompt))
        return self._request(
            prompt, self._sampling(), tag, chance.choice((1, 3, N_OUTPUT_MAX, N_OUTPUT_MAX))
        )

    def _forked(self, prompt: list[int], tag: int) -> Request:
        return self._request(prompt, self._sampling(), tag, N_OUTPUT_MAX)

    def _sampling(self) -> SamplingParams:
        return drawn_sampling(self._chance, is_exact=self._is_exact)

    def _request(
        self, prompt: list[int], sampling: SamplingParams, tag: int, n_output: int
    ) -> Request:
        return Request(prompt, sampling, self._alone.answer(prompt, sampling, n_output), tag)


def drive(seed: int, n_operations: int = N_OPERATIONS) -> Outcome:
    """Does what a seed says, and returns what came of it."""
    outcome = Outcome(drawn_settings(seed))
    settings = outcome.settings
    with settings.engine() as engine, closing(Alone(settings)) as alone:
        ledger = Ledger(settings, engine)
        outcome.counts = ledger.counts
        try:
            Drive(seed, ledger, alone).run(n_operations)
        except (AssertionError, EngineError, LookupError):
            outcome.fault = (
                f"{traceback.format_exc()}\nlast operations:\n{ledger.told()}\n\n{settings}\n"
                f"repeat: {COMMAND} --seed {seed} --operations {n_operations}"
            )
    return outcome
