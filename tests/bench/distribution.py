"""Draws with speculation against draws without, for many sampler settings: a table.

    python -m tests.bench.distribution [draws] [filter]

Two engines, with drafts and without, draw three tokens after one prompt again and again, eight
sequences interleaved, every draw with a seed of its own; in between, sequences with other prompts
come, leave in the middle and are rolled back. The counts of both engines are compared by a
chi-square test of two samples and by total variation. A filter chooses cases whose name contains
it.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from tests.demo import EAGLE3, MODELS, SIMPLE, TARGETS, prompts

import drafthouse_engine as engine_library
from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

N_SEQ = 8
N_DISTURBERS = 2
N_TOKENS = 3
N_DRAFT = 3
Path = tuple[int, ...]

DRAFTS = (
    ("mtp", True),
    ("mtp", False),
    ("simple", True),
    ("eagle3", False),
    ("ngram-simple", False),
)
"""Draft type, and whether drafts are sampled and verified by rejection."""

SETTINGS: dict[str, dict[str, object]] = {
    "t0.7": {"temperature": 0.7},
    "t1.0": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "penalty_repeat": 1.3, "penalty_presence": 0.5},
    "grammar": {"temperature": 1.0, "grammar": 'root ::= ([a-zA-Z ,.\\n] | "é")*'},
}
"""Sampler settings by name; all with top-k 8, so that counts are not too thin."""

PLAIN = {"top_k": 8, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class Verdict:
    """How two samples compare."""

    z: float
    """Standard deviations of the chi-square statistic above its mean."""
    distance: float
    """Total variation between the samples."""
    noise: float
    """Total variation expected between two samples of one distribution."""


def compare(a: Counter[Path], b: Counter[Path]) -> Verdict:
    """Compares two samples of equal size; paths seen fewer than 10 times in both are merged.

    Source: two-sample chi-square; Wilson and Hilferty 1931 for its normal score.
    """
    n = a.total()
    assert n == b.total()
    pairs = [(a[path], b[path]) for path in a.keys() | b.keys()]
    large = [(x, y) for x, y in pairs if x + y >= 10]
    rest = n - sum(x for x, _ in large), n - sum(y for _, y in large)
    cells = [*large, rest] if sum(rest) >= 10 else large
    statistic = sum((x - y) ** 2 / (x + y) for x, y in cells)
    k = max(len(cells) - 1, 1)
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    distance = sum(abs(x - y) for x, y in pairs) / (2 * n)
    noise = sum(math.sqrt(2 * (x + y) / math.pi) for x, y in pairs) / (2 * n)
    return Verdict(z, distance, noise)


class Drawer:
    """One engine that draws, with other sequences coming and going between the draws."""

    def __init__(
        self, target: Model, draft: Model | None, draft_type: str, *, is_probabilistic: bool
    ) -> None:
        params = EngineParams(
            draft_type=draft_type,  # type: ignore[arg-type]  # one of DRAFTS
            n_seq_max=N_SEQ + N_DISTURBERS,
            n_ctx_seq=128,
            n_batch=512,
            n_ubatch=256,
            n_draft_max=N_DRAFT if draft_type != "ngram-simple" else 8,
            probabilistic=is_probabilistic,
            n_threads=1,
        )
        self.engine = Engine(target, draft, params)
        self._target = target
        self._chance = random.Random(3)
        self._n_drafted = self._n_accepted = 0
        for seq_id in range(N_SEQ, N_SEQ + N_DISTURBERS):
            self._begin(seq_id, {"temperature": 1.0}, 1)

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self._n_accepted / max(self._n_drafted, 1)

    def draw(self, prompt: list[int], settings: dict[str, object], n_draws: int) -> Counter[Path]:
        """Returns how often each row of tokens came."""
        counts: Counter[Path] = Counter()
        # With matching, equal seeds would give equal draws, and the test would prove too much.
        first = 0 if self.engine.limits.draft_type == "none" else n_draws
        outputs: dict[int, list[int]] = {}
        seeds = iter(range(first, first + n_draws))
        n_open = n_draws
        while n_open:
            for seq_id in set(range(N_SEQ)) - outputs.keys():
                # Not all at once: sequences of unlike age share the steps.
                if self._chance.random() < 0.7 and (seed := next(seeds, None)) is not None:
                    self._begin(seq_id, settings, seed)
                    outputs[seq_id] = []
            self._step(prompt, outputs)
            for seq_id, tokens in list(outputs.items()):
                if len(tokens) >= N_TOKENS:
                    counts[tuple(tokens[:N_TOKENS])] += 1
                    self.engine.seq_end(seq_id)
                    del outputs[seq_id]
                    n_open -= 1
        return counts

    def _begin(self, seq_id: int, settings: dict[str, object], seed: int) -> None:
        values = PLAIN | settings | {"seed": seed * 7919 + 1}
        values |= {} if "grammar" in settings else {"ignore_eos": True}
        sampling = SamplingParams(**values)  # type: ignore[arg-type]  # by their names
        self.engine.seq_begin(seq_id, Sampler(self._target, sampling))

    def _step(self, prompt: list[int], outputs: dict[int, list[int]]) -> None:
        rows, tokens = list[tuple[int, ...]](), list[int]()
        n_draft_max = self.engine.limits.n_draft_max
        for seq_id, found in outputs.items():
            piece = found[-1:] or prompt
            n_past = self.engine.seq_n_past(seq_id)
            n_draft = self._chance.randrange(n_draft_max + 1) if found and n_draft_max else 0
            rows.append((seq_id, n_past, len(tokens), len(piece), n_draft, 1))
            tokens += piece
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
                    outputs[seq_id] += [-1] * N_TOKENS

    def _disturb(self, rows: list[tuple[int, ...]], tokens: list[int]) -> None:
        """Others prefill pieces, leave in the middle, are rolled back."""
        for seq_id in range(N_SEQ, N_SEQ + N_DISTURBERS):
            luck = self._chance.random()
            n_past = self.engine.seq_n_past(seq_id)
            if luck < 0.2 or n_past > 90:
                self.engine.seq_end(seq_id)
                self._begin(seq_id, {"temperature": 1.0}, 1)
                n_past = 0
            elif luck < 0.6 or (n_past == 0 and luck < 0.9):
                n = self._chance.randrange(1, 9)
                rows.append((seq_id, n_past, len(tokens), n, 0, 0))
                tokens += [self._chance.randrange(300, 900) for _ in range(n)]
            elif luck < 0.7 and n_past > 1:
                self._roll_back(seq_id, n_past)

    def _roll_back(self, seq_id: int, n_past: int) -> None:
        try:
            self.engine.rollback(seq_id, n_past - 1)
        except engine_library.Unsupported:  # a recurrent target, right after a prompt piece
            self.engine.rollback(seq_id, 0)


def main() -> None:
    """Prints the table."""
    n_draws = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    prompt = list(prompts((5,))[0])
    print(f"{n_draws} draws of {N_TOKENS} tokens each, with drafts and without")
    print("case                                     z    distance   noise  accepted  seconds")
    for name in TARGETS:
        files = {"eagle3": EAGLE3[name], "simple": SIMPLE}
        with Model(MODELS / TARGETS[name]) as target:
            plain = Drawer(target, None, "none", is_probabilistic=False)
            for setting, settings in SETTINGS.items():
                expected: Counter[Path] | None = None
                for draft_type, is_sampled in DRAFTS:
                    how = "rejection" if is_sampled else "match"
                    case = f"{name} {setting} {draft_type} {how}"
                    if wanted not in case:
                        continue
                    start = time.perf_counter()
                    expected = expected or plain.draw(prompt, settings, n_draws)
                    file = files.get(draft_type)
                    draft = Model(MODELS / file) if file else None
                    drawer = Drawer(target, draft, draft_type, is_probabilistic=is_sampled)
                    found = drawer.draw(prompt, settings, n_draws)
                    v = compare(expected, found)
                    drawer.engine.close()
                    print(
                        f"{case:38} {v.z:5.2f}  {v.distance:8.4f}  {v.noise:7.4f}"
                        f"  {drawer.acceptance:8.2f}  {time.perf_counter() - start:7.0f}",
                        flush=True,
                    )
            plain.engine.close()


if __name__ == "__main__":
    main()
