"""Memory stays flat while sequences begin, generate, are cancelled, saved, loaded and end."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tests.support.hand import engine, plan, sampler
from tests.support.hand import tokens_of as ids

from drafthouse_engine import Engine, SamplingParams

pytestmark = pytest.mark.model

N_SLOTS = 8
WARM_UP = 500
GRAMMARS = tuple(
    SamplingParams(seed=i, temperature=0.8, grammar=f'root ::= [a-z]+ " = " [0-9]{{1,{i + 1}}}')
    for i in range(4)
)
PLAIN = SamplingParams(
    seed=1, temperature=0.8, penalty_repeat=1.1, dry_multiplier=0.5, dry_breakers=("\n",)
)


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Life:
    """Runs sequences in all slots; a third is cancelled, half has a grammar."""

    def __init__(self, target: Engine, seed: int) -> None:
        self._engine = target
        self._random = random.Random(seed)
        self._prompt = ids("def parse(text):\n    return text.")
        self._left = [0] * N_SLOTS
        self.n_ended = 0
        self.n_cancelled = 0

    def _begin(self, seq_id: int) -> None:
        has_grammar = self._random.random() < 0.5
        sampling = self._random.choice(GRAMMARS) if has_grammar else PLAIN
        self._engine.seq_begin(seq_id, sampler(sampling))
        self._left[seq_id] = self._random.randint(2, 4)

    def _end(self, seq_id: int) -> None:
        self._engine.seq_end(seq_id)
        self._left[seq_id] = 0
        self.n_ended += 1

    def round(self) -> None:
        for seq_id in range(N_SLOTS):
            if self._left[seq_id] == 0:
                self._begin(seq_id)
        self._step()
        for seq_id in range(N_SLOTS):
            self._left[seq_id] -= 1
            if self._left[seq_id] == 0:
                self._end(seq_id)
            elif self._random.random() < 0.18:  # 1 / 3 of all, over their rounds
                self.n_cancelled += 1
                self._end(seq_id)
            elif self._random.random() < 0.02:
                snapshot = self._engine.save(seq_id)
                self._engine.seq_end(seq_id)
                self._engine.load(seq_id, snapshot)

    def _step(self) -> None:
        rows, tokens = [], list[int]()
        for seq_id in range(N_SLOTS):
            last = self._engine.seq_id_last(seq_id)
            new = self._prompt if last is None else [last]
            n_draft = 0 if last is None else self._random.randint(0, 3)
            n_past = self._engine.seq_n_past(seq_id)
            rows.append((seq_id, n_past, len(tokens), len(new), n_draft, 1))
            tokens += new
        result = self._engine.step(plan(*rows), tokens)
        assert not result.entries["status"].any()


def slope_bytes(n_sequences: int, every: int, trace: Path | None = None) -> tuple[float, Life]:
    """Returns the growth of the resident set in bytes per 1,000 sequences, after a warm-up."""
    with engine("mtp", n_seq_max=N_SLOTS, n_ctx_seq=256) as target:
        life = Life(target, seed=11)
        while life.n_ended < WARM_UP:
            life.round()
        points: list[tuple[int, int]] = []
        while life.n_ended < WARM_UP + n_sequences:
            life.round()
            if life.n_ended >= WARM_UP + every * len(points):
                points.append((life.n_ended, rss_bytes()))
        if trace:
            trace.write_text("".join(f"{n} {size}\n" for n, size in points))
        x, y = np.array(points, np.float64).T
        return float(np.polyfit(x, y, 1)[0]) * 1000, life


@pytest.mark.timeout(600)
def test_memory_stays_flat_over_three_thousand_sequences() -> None:
    slope, life = slope_bytes(3_000, every=100)
    assert 0.2 < life.n_cancelled / life.n_ended < 0.45
    # A leaked sequence alone costs more: its sampler with a random state has over 5 kB.
    assert slope < 500_000, f"{slope:.0f} bytes per 1,000 sequences"


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_memory_stays_flat_over_a_hundred_thousand_sequences(
    tmp_path: Path,
) -> None:
    slope, life = slope_bytes(100_000, every=1_000, trace=tmp_path / "rss.txt")
    print(
        f"{life.n_ended} sequences, {life.n_cancelled} cancelled: "
        f"{slope:.0f} bytes per 1,000 sequences"
    )
    assert slope < 20_000
