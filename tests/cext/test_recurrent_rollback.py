"""Recurrent targets: sequences of unlike shapes in one step do not disturb each other's rollback.

llama.cpp keeps the snapshots that a rollback needs beside the cell of a sequence, and moves cells
without them when a later part of the same decode gathers other sequences. So a step must not decode
anything between the verification of a sequence and its rollback.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.demo import EAGLE3, MODELS, TARGETS, Referee, prompts

import drafthouse_engine as engine_library

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_SEQ = 12
N_OUTPUT = 48
LENGTHS = tuple(6 + 5 * i for i in range(N_SEQ))
Step = list[tuple[int, int, list[int], int, bool]]  # seq_id, n_past, tokens, K, is_output


class Driver:
    """Runs steps on an engine and collects what each sequence emits."""

    def __init__(self, draft_type: str, n_rs_seq: int = -1) -> None:
        draft = {"eagle3": EAGLE3["hybrid"], "simple": "tiny-draft-f16.gguf"}.get(draft_type)
        self.target = engine_library.Model(MODELS / TARGETS["hybrid"])
        self.draft = engine_library.Model(MODELS / draft) if draft else None
        params = engine_library.EngineParams(
            draft_type=draft_type,  # type: ignore[arg-type]  # parametrised by its names
            n_seq_max=N_SEQ,
            n_ctx_seq=512,
            n_batch=512,
            n_ubatch=256,
            n_draft_max=4,
            n_rs_seq=n_rs_seq,
            n_threads=1,
        )
        self.engine = engine_library.Engine(self.target, self.draft, params)
        self.past = [0] * N_SEQ
        self.output: list[list[int]] = [[] for _ in range(N_SEQ)]

    def begin(self, seq_id: int) -> None:
        self.engine.seq_end(seq_id)
        greedy = engine_library.SamplingParams(temperature=0.0)
        self.engine.seq_begin(seq_id, engine_library.Sampler(self.target, greedy))
        self.past[seq_id] = 0
        self.output[seq_id] = []

    def step(self, step: Step) -> None:
        tokens: list[int] = []
        rows = []
        for seq_id, n_past, piece, n_draft, is_output in step:
            rows.append((seq_id, n_past, len(tokens), len(piece), n_draft, is_output))
            tokens += piece
        table = np.array(rows, dtype=engine_library.PLAN_DTYPE)
        result = self.engine.step(table, np.array(tokens, dtype=np.int32))
        for entry in result.entries:
            assert entry["status"] == 0
            start, n = entry["token_offset"], entry["n_tokens"]
            self.output[entry["seq_id"]] += result.tokens[start : start + n].tolist()
            self.past[entry["seq_id"]] = int(entry["n_past"])

    def close(self) -> None:
        self.engine.close()
        self.target.close()
        if self.draft is not None:
            self.draft.close()


def generate_alone(prompt: Sequence[int]) -> list[int]:
    driver = Driver("none")
    driver.begin(0)
    driver.step([(0, 0, list(prompt), 0, True)])
    while len(driver.output[0]) < N_OUTPUT:
        driver.step([(0, driver.past[0], driver.output[0][-1:], 0, True)])
    driver.close()
    return driver.output[0][:N_OUTPUT]


class Rush:
    """Sequences that come, pause, leave and finish at random, all on one engine."""

    def __init__(
        self, driver: Driver, pool: Sequence[Sequence[int]], chance: random.Random
    ) -> None:
        self.driver = driver
        self.pool = pool
        self.chance = chance
        self.seats: dict[int, int] = {}  # seq_id -> index of its prompt
        self.todo = [i % len(pool) for i in range(3 * len(pool))]
        self.finished: list[tuple[int, list[int]]] = []
        self.n_left = 0

    def run(self) -> None:
        while self.todo or self.seats:
            self._seat()
            # Not everybody takes part in every step: gaps between the ids matter.
            step = [self._entry(seq_id) for seq_id in self.seats if self.chance.random() < 0.8]
            if step:
                self.driver.step(step)
            self._unseat()

    def _seat(self) -> None:
        for seq_id in range(N_SEQ):
            if seq_id not in self.seats and self.todo and self.chance.random() < 0.3:
                self.seats[seq_id] = self.todo.pop()
                self.driver.begin(seq_id)

    def _entry(self, seq_id: int) -> tuple[int, int, list[int], int, bool]:
        prompt, past = self.pool[self.seats[seq_id]], self.driver.past[seq_id]
        if past >= len(prompt):
            last = self.driver.output[seq_id][-1:]
            return seq_id, past, last, self.chance.randrange(5), True
        n = min(self.chance.randrange(1, 40), len(prompt) - past)
        return seq_id, past, list(prompt[past : past + n]), 0, past + n == len(prompt)

    def _unseat(self) -> None:
        for seq_id, i in list(self.seats.items()):
            output = self.driver.output[seq_id]
            if len(output) >= N_OUTPUT:
                self.finished.append((i, output[:N_OUTPUT]))
            elif self.chance.random() < 0.004:  # leaves in the middle
                self.n_left += 1
            else:
                continue
            self.driver.engine.seq_end(seq_id)
            del self.seats[seq_id]


@pytest.mark.parametrize("n_rs_seq", [-1, 1])
@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple", "ngram-simple"])
def test_unlike_sequences_in_one_step_keep_their_own_state(draft_type: str, n_rs_seq: int) -> None:
    pool = prompts(LENGTHS)
    expected = [generate_alone(prompt) for prompt in pool]
    referee = Referee("hybrid")
    driver = Driver(draft_type, n_rs_seq)
    rush = Rush(driver, pool, random.Random(11))
    rush.run()
    for i, found in rush.finished:
        referee.compare(pool[i], expected[i], found, i)
    assert len(rush.finished) + rush.n_left == 3 * N_SEQ
    assert len(rush.finished) > 2 * N_SEQ
    assert driver.engine.n_cells_used == 0
    driver.close()
    referee.close()
