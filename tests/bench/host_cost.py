"""What Python costs between two steps: each part of it, by the number of sequences.

    python -m tests.bench.host_cost [--sequences 1,8,32,64] [--drafts 0,3] [--steps 50] [--ngrams]

All sequences generate, one step after the other, without a model: the extension's part is answered
from a table. The best of several rounds counts: a busy machine only ever adds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np

import drafthouse_engine
from drafthouse_server.engine import LlamaEngine, _pack
from drafthouse_server.engine_thread import EngineThread, StepReport
from drafthouse_server.ngram import NgramDrafter
from drafthouse_server.scheduler import Scheduler
from drafthouse_server.sequence import Sequence
from drafthouse_server.speculation import FixedDraft
from drafthouse_server.step import EngineLimits, SequenceStatus, StepPlan, StepResult

PARTS = ("reap", "plan", "pack", "unpack", "commit", "hand over")
_N_ROUNDS = 40
_N_PERIOD = 61
_FLAG_GIVEN = int(drafthouse_engine.ResultFlag.GIVEN)


class _Answers(LlamaEngine):
    """The real engine's packing and unpacking around a table in place of the extension."""

    def __init__(self) -> None:
        self._with_logprobs = set()
        self._statuses = {int(drafthouse_engine.Status[s.name]): s for s in SequenceStatus}

    def answer(self, plan: StepPlan) -> SimpleNamespace:
        """Returns what the extension would: every draft accepted but the last token."""
        rows: list[tuple[int, ...]] = []
        tokens: list[int] = []
        for entry in plan.entries:
            n_tokens = max(1, entry.n_draft)
            n_past = entry.n_past + len(entry.tokens) + n_tokens - 1
            n_accepted = n_tokens - 1
            flags = _FLAG_GIVEN if entry.given else 0
            rows.append(
                (entry.seq_id, 0, n_past, len(tokens), n_tokens, entry.n_draft, n_accepted, flags)
            )
            # A text that repeats itself: n-gram lookup has something to find.
            tokens += [(n_past + i) % _N_PERIOD for i in range(1, 1 + n_tokens)]
        table = np.array(rows, dtype=np.int32)
        times = dict.fromkeys(("draft", "decode", "process", "sample", "total"), 5)
        return SimpleNamespace(
            entries=table.view(drafthouse_engine.RESULT_DTYPE)[:, 0],
            tokens=np.array(tokens, dtype=np.int32),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            n_batch_tokens=len(tokens),
            **{f"t_{name}_us": value for name, value in times.items()},
        )


class _Stopwatch:
    """Adds up the seconds of named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started


def measure(
    n_sequences: int, n_draft: int, n_steps: int, *, has_ngrams: bool = False
) -> dict[str, float]:
    """Returns the microseconds per step of each part."""
    n_ctx = 16 + n_steps * (n_draft + 1)
    limits = EngineLimits(
        "mtp", n_sequences, n_ctx * n_sequences, n_ctx, 8192, 8192, max(1, n_draft), 8192
    )
    ngrams = NgramDrafter(3, 4096) if has_ngrams else None
    scheduler = Scheduler(limits, FixedDraft(n_draft), ngrams=ngrams)
    for i in range(n_sequences):
        scheduler.submit(Sequence(str(i), [1, 2, 3], None))
    answers = _Answers()
    watch = _Stopwatch()
    reports: list[StepReport] = []
    thread = EngineThread(answers, scheduler, reports.append, time.monotonic)
    for i in range(n_steps):
        with watch.part("reap"):
            scheduler.reap(1.0)
        with watch.part("plan"):
            plan = scheduler.plan(1.0)
        with watch.part("pack"):
            _pack(plan.entries)
        raw = answers.answer(plan)
        with watch.part("unpack"):
            result = StepResult(answers._unpack(raw))  # type: ignore[arg-type]
        with watch.part("commit"):
            thread._report.events = scheduler.commit(result, 1.0)
        with watch.part("hand over"):
            thread._flush()
        if i == 0:
            watch.seconds.clear()  # the prompts
    return {name: seconds / (n_steps - 1) * 1e6 for name, seconds in watch.seconds.items()}


def best(measure_once: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Returns the smallest of several measurements, part by part."""
    rounds = [measure_once() for _ in range(_N_ROUNDS)]
    found = {name: min(round_[name] for round_ in rounds) for name in PARTS}
    return found | {"all": sum(found.values())}


def main() -> None:
    """Measures all cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", default="1,8,32,64")
    parser.add_argument("--drafts", default="0,3")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ngrams", action="store_true", help="look drafts up first")
    options = parser.parse_args()
    print("us per step        " + "".join(f"{name:>11}" for name in (*PARTS, "all")))
    for n_draft in map(int, options.drafts.split(",")):
        for n_sequences in map(int, options.sequences.split(",")):
            once = partial(measure, n_sequences, n_draft, options.steps, has_ngrams=options.ngrams)
            row = best(once)
            cells = "".join(f"{value:11.1f}" for value in row.values())
            print(f"{n_sequences:3} sequences, K {n_draft:2} {cells}", flush=True)


if __name__ == "__main__":
    main()
