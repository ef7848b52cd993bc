"""Greedy outputs with speculation against those without, token by token: a table.

    python -m tests.proofs.greedy [prompts] [tokens]

Every draft type on both targets, one prompt at a time and 16 at once. An output may part from the
plain one only where two tokens' logits tie (`Referee`); log-probabilities of equal
tokens are compared as well. The last rows use `exact`, where ties cannot happen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, Referee, prompts

import drafthouse_engine as engine_library
from drafthouse_engine import Engine, EngineParams, Model, Sampler, SamplingParams

N_AT_ONCE = 16
N_DRAFT = 4
DRAFT_TYPES = ("none", "mtp", "eagle3", "simple", "ngram-simple")


@dataclass
class Output:
    """What one prompt produced."""

    tokens: list[int] = field(default_factory=list)
    """Emitted tokens."""
    logprobs: list[float] = field(default_factory=list)
    """Their natural log-probabilities."""


@dataclass(frozen=True)
class Run:
    """All prompts on one engine."""

    outputs: list[Output]
    """One per prompt."""
    tokens_per_s: float
    """Emitted tokens a second, prompts included in the time."""
    acceptance: float
    """Share of the drafted tokens that were accepted; NaN without drafts."""


class Crowd:
    """Runs prompts on one engine, up to `n_seq` at once; a free place takes the next prompt."""

    def __init__(self, engine: Engine, pool: Sequence[Sequence[int]], n_output: int) -> None:
        self._engine = engine
        self._pool = pool
        self._n_output = n_output
        self._outputs = [Output() for _ in pool]
        self._seats: dict[int, int] = {}
        self._n_drafted = self._n_accepted = 0

    def run(self) -> Run:
        """Returns the outputs of all prompts."""
        todo = list(range(len(self._pool)))[::-1]
        start = time.perf_counter()
        while todo or self._seats:
            for seq_id in range(self._engine.limits.n_seq_max):
                if seq_id not in self._seats and todo:
                    self._sit(seq_id, todo.pop())
            self._step()
        elapsed = time.perf_counter() - start
        n = sum(len(output.tokens) for output in self._outputs)
        share = self._n_accepted / self._n_drafted if self._n_drafted else float("nan")
        return Run(self._outputs, n / elapsed, share)

    def _sit(self, seq_id: int, i: int) -> None:
        greedy = SamplingParams(temperature=0.0, logprobs=True, ignore_eos=True)
        self._engine.seq_begin(seq_id, Sampler(self._engine.target, greedy))
        self._seats[seq_id] = i

    def _step(self) -> None:
        rows, tokens = [], list[int]()
        for seq_id, i in self._seats.items():
            output = self._outputs[i].tokens
            piece = output[-1:] or list(self._pool[i])
            n_draft = min(self._engine.limits.n_draft_max, self._n_output - len(output) - 1)
            n_past = self._engine.seq_n_past(seq_id)
            n_draft = max(n_draft, 0) if output else 0
            rows.append((seq_id, n_past, len(tokens), len(piece), n_draft, 1))
            tokens += piece
        table = np.array(rows, dtype=engine_library.PLAN_DTYPE)
        result = self._engine.step(table, tokens)
        assert not result.entries["status"].any()
        for entry in result.entries:
            self._take(entry, result)

    def _take(self, entry: np.void, result: engine_library.StepResult) -> None:
        seq_id, start, n = int(entry["seq_id"]), int(entry["token_offset"]), int(entry["n_tokens"])
        output = self._outputs[self._seats[seq_id]]
        output.tokens += result.tokens[start : start + n].tolist()
        output.logprobs += result.logprobs[start : start + n].tolist()
        self._n_drafted += int(entry["n_drafted"])
        self._n_accepted += int(entry["n_accepted"])
        if len(output.tokens) >= self._n_output:
            self._engine.seq_end(seq_id)
            del self._seats[seq_id]


def run(
    target: Model,
    draft: Model | None,
    draft_type: str,
    pool: Sequence[Sequence[int]],
    n_output: int,
    *,
    n_seq: int,
    is_exact: bool,
) -> Run:
    """Returns the outputs of an engine of one kind."""
    params = EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # one of DRAFT_TYPES
        n_seq_max=n_seq,
        n_ctx_seq=256,
        n_batch=2048,
        n_ubatch=512,
        n_draft_max=N_DRAFT,
        n_threads=1,
        exact=is_exact,
    )
    with Engine(target, draft, params) as engine:
        return Crowd(engine, pool, n_output).run()


def compare(
    referee: Referee, pool: Sequence[Sequence[int]], plain: Run, found: Run
) -> tuple[int, float, float]:
    """Returns the ties, the largest gap of one, and the largest difference of log-probabilities."""
    ties = [
        referee.compare(pool[i], a.tokens, b.tokens, i)
        for i, (a, b) in enumerate(zip(plain.outputs, found.outputs, strict=True))
    ]
    difference = 0.0
    for a, b in zip(plain.outputs, found.outputs, strict=True):
        for x, y, p, q in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=False):
            if x != y:
                break
            difference = max(difference, abs(p - q))
    gaps = [tie.gap for tie in ties if tie is not None]
    return len(gaps), max(gaps, default=0.0), difference


def main() -> None:
    """Prints the table; an output that is wrong without a tie ends it with an AssertionError."""
    n_prompts = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    n_output = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    pool = prompts(tuple(8 + (7 * i) % 56 for i in range(n_prompts)))
    print(f"{n_prompts} prompts, {n_output} tokens each, K = {N_DRAFT}")
    print(
        "target  drafts        at once  exact  ties  largest gap  logprob diff  tokens/s  accepted"
    )
    for name in TARGETS:
        referee = Referee(name)
        drafts = {"eagle3": EAGLE3[name], "simple": SIMPLE}
        with Model(MODELS / TARGETS[name]) as target:
            for is_exact in (False, True):
                plain: Run | None = None
                for draft_type in DRAFT_TYPES:
                    for n_seq in (1, N_AT_ONCE):
                        file = drafts.get(draft_type)
                        draft = Model(MODELS / file) if file else None
                        found = run(
                            target,
                            draft,
                            draft_type,
                            pool,
                            n_output,
                            n_seq=n_seq,
                            is_exact=is_exact,
                        )
                        plain = plain or found
                        n_ties, gap, difference = compare(referee, pool, plain, found)
                        print(
                            f"{name:7} {draft_type:13} {n_seq:7}  {is_exact!s:5} {n_ties:5}"
                            f"  {gap:11.4f}  {difference:12.6f}  {found.tokens_per_s:8.0f}"
                            f"  {found.acceptance:8.2f}",
                            flush=True,
                        )
        referee.close()


if __name__ == "__main__":
    main()
