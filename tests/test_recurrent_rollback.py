"""Recurrent targets: sequences of unlike shapes in one step do not disturb each other's rollback.

llama.cpp keeps the snapshots that a rollback needs beside the cell of a sequence, and moves cells
without them when a later part of the same decode gathers other sequences. So a step must not decode
anything between the verification of a sequence and its rollback.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import drafthouse_engine as engine_library
import numpy as np
import pytest
from tests.demo import EAGLE3, MODELS, TARGETS, Referee, prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

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


@pytest.mark.parametrize("n_rs_seq", [-1, 1])
@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple", "ngram-simple"])
def test_unlike_sequences_in_one_step_keep_their_own_state(draft_type: str, n_rs_seq: int) -> None:
    chance = random.Random(11)
    pool = prompts(LENGTHS)
    expected = [generate_alone(prompt) for prompt in pool]
    referee = Referee("hybrid")
    driver = Driver(draft_type, n_rs_seq)
    seats: dict[int, int] = {}  # seq_id -> index of its prompt
    todo = [i % N_SEQ for i in range(3 * N_SEQ)]
    n_finished = n_left = 0
    while todo or seats:
        step: Step = []
        for seq_id in range(N_SEQ):
            if seq_id not in seats and todo and chance.random() < 0.3:
                seats[seq_id] = todo.pop()
                driver.begin(seq_id)
            if seq_id not in seats or chance.random() < 0.2:  # not everybody in every step
                continue
            prompt, past = pool[seats[seq_id]], driver.past[seq_id]
            if past < len(prompt):
                n = min(chance.randrange(1, 40), len(prompt) - past)
                step.append((seq_id, past, list(prompt[past : past + n]), 0, past + n == len(prompt)))
            else:
                step.append((seq_id, past, driver.output[seq_id][-1:], chance.randrange(5), True))
        if step:
            driver.step(step)
        for seq_id, i in list(seats.items()):
            if chance.random() < 0.004:  # leaves in the middle
                driver.engine.seq_end(seq_id)
                del seats[seq_id]
                n_left += 1
            elif len(driver.output[seq_id]) >= N_OUTPUT:
                found = driver.output[seq_id][:N_OUTPUT]
                referee.compare(pool[i], expected[i], found, i)
                del seats[seq_id]
                n_finished += 1
    assert n_finished + n_left == 3 * N_SEQ
    assert n_finished > 2 * N_SEQ
    for seq_id in range(N_SEQ):
        driver.engine.seq_end(seq_id)
    assert driver.engine.n_cells_used == 0
    driver.close()
    referee.close()
