"""What Python costs between two steps: each part of it, by the number of sequences.

    drafthouse-bench host-cost [--sequences 1,8,32,64] [--steps 400] [--rounds 5]
        [--policy adaptive|fixed] [--drafts 3] [--ngrams] [--profile]

All sequences generate, one step after the other, without a model: the extension's part is answered
from a table, in which every sequence's drafts fail as often as its place in the crowd says. The
scheduler is the one that `serve` makes by default: adaptive drafts, a cost model that learns, the
prefix cache, metrics. Steps before the models of cost and acceptance know enough are not counted.

The engine waits for all parts but the fan-out, which the event loop does while the next step runs.
The mean over the steps counts, and of several rounds the best: a busy machine only ever adds.
`--profile` prints where the time of 32 sequences goes, by function.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.crowd import Machine

import drafthouse_engine
from drafthouse_bench.counts import count, counts
from drafthouse_server.drafting.adaptive import AdaptiveDraft
from drafthouse_server.drafting.cost import Splitting, StepCost, shape_of
from drafthouse_server.drafting.ngram import NgramDrafter
from drafthouse_server.drafting.policy import DraftPolicy, FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine, _pack, _timings
from drafthouse_server.scheduling.prefix_cache import PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.serving.loop import StepLoop
from drafthouse_server.serving.outbox import WakeLimiter
from drafthouse_server.step import EngineLimits, ResultEntry, SequenceStatus, StepPlan, StepResult

__all__ = ["PARTS", "Bench"]

PARTS = ("reap", "plan", "pack", "unpack", "commit", "hand over", "fan out")
"""The step's host work, in order."""
N_WARM = 500
"""Steps after which the averages of cost and acceptance have settled."""

_N_PERIOD = 61
_FLAG_EXTERNAL = int(drafthouse_engine.ResultFlag.EXTERNAL)
_N_DRAFT_MAX = 4
_MACHINE = Machine(
    ubatch_s=0.004,
    draft_pass_s=0.0003,
    draft_token_s=0.00001,
    token_s=0.00002,
    wide_token_s=0.00002,
    process_token_s=0.000005,
    sample_s=0.000005,
)
"""A small model on a processor; drafts pay."""


class _Answers(LlamaEngine):
    """The real engine's packing and unpacking around a table in place of the extension."""

    def __init__(self, limits: EngineLimits) -> None:
        self._with_logprobs = frozenset()
        self._statuses = {int(drafthouse_engine.Status[s.name]): s for s in SequenceStatus}
        self._limits = limits
        self._card = FakeEngine().card
        self._random = random.Random(1)
        self.n_drafts = 0
        self._outcomes: list[list[int]] = []
        for i in range(limits.n_seq_max):
            share = 0.5 + 0.45 * i / limits.n_seq_max
            self._outcomes.append([self._n_accepted(share) for _ in range(499)])

    def interrupt(self) -> None:
        """No run is in flight: every step is answered at once."""

    def _n_accepted(self, share: float) -> int:
        n = 0
        while n < _N_DRAFT_MAX and self._random.random() < share:
            n += 1
        return n

    def answer(self, plan: StepPlan, i_step: int) -> drafthouse_engine.StepRows:
        """Returns what the extension would; some of each draft is accepted."""
        rows: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        tokens: list[int] = []
        for entry in plan.entries:
            self.n_drafts += entry.n_draft
            outcomes = self._outcomes[entry.seq_id]
            n_accepted = min(entry.n_draft, outcomes[i_step % len(outcomes)])
            n_past = entry.n_past + len(entry.tokens) + n_accepted
            n_tokens = n_accepted + 1
            flags = _FLAG_EXTERNAL if entry.external else 0
            rows.append(
                (
                    *(entry.seq_id, 0, n_past, len(tokens), n_tokens),
                    *(entry.n_draft, n_accepted, flags, 0),
                )
            )
            # A text that repeats itself: n-gram lookup has something to find.
            tokens += [(n_past + i) % _N_PERIOD for i in range(1, 1 + n_tokens)]
        results = [ResultEntry(0, SequenceStatus.OK, 0, n_drafted=row[5]) for row in rows]
        shape = shape_of(plan.entries, results, Splitting.EQUAL, 512)
        timings = _MACHINE.timings(shape, [entry.n_draft for entry in plan.entries])
        times = {
            name: int(getattr(timings, f"{name}_s") * 1e6)
            for name in ("draft", "decode", "process", "sample", "total")
        }
        return drafthouse_engine.StepRows(
            entries=rows,
            tokens=tokens,
            logprobs=[],
            n_batch_tokens=int(shape.n_tokens),
            n_steps=1,
            moved=None,
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


class Bench:
    """One scheduler with its step loop, past its first steps.

    Args:
        n_sequences: Sequences, all of which generate.
        n_steps: Steps that will be run after the first `N_WARM`.
        n_draft: K of all; None chooses it as `serve` does.
        has_ngrams: Whether drafts are looked up first.

    Thread:
        A running event loop's.
    """

    def __init__(
        self,
        n_sequences: int,
        n_steps: int,
        n_draft: int | None = None,
        *,
        has_ngrams: bool = False,
    ) -> None:
        n_ctx = 64 + (N_WARM + n_steps) * (_N_DRAFT_MAX + 1)
        limits = EngineLimits(
            "mtp", n_sequences, n_ctx * n_sequences, n_ctx, 8192, 512, _N_DRAFT_MAX, 8192
        )
        policy: DraftPolicy = AdaptiveDraft(_N_DRAFT_MAX)
        if n_draft is not None:
            policy = FixedDraft(n_draft)
        prefixes = PrefixCache(can_cut=True, n_host_bytes_max=1 << 28)
        ngrams = NgramDrafter(3, 4096) if has_ngrams else None
        scheduler = Scheduler(limits, policy, cost=StepCost(), prefixes=prefixes, ngrams=ngrams)
        self.watch = _Stopwatch()
        self._answers = _Answers(limits)
        self._loop = StepLoop(self._answers, scheduler)
        self._scheduler, self._thread = scheduler, self._loop._thread
        self._now = 0.0
        # Time flies: the readers of every step are woken, as they are when steps take longer.
        self._loop._limiter = WakeLimiter(lambda: self._now * 1e3)
        # The event loop is called by hand, so nobody need be woken.
        self._loop._bell.ring = lambda: None  # type: ignore[method-assign]  # nobody is to be woken
        for i in range(n_sequences):
            prompt = [random.Random(i).randrange(1000) for _ in range(24)]
            outbox = self._loop.submit(Sequence(Request(str(i), prompt, tenant=f"t{i % 4}"), None))
            outbox.is_new = False
        while not self._thread._inbox.empty():
            function, arguments = self._thread._inbox.get()
            function(*arguments)
        for i_step in range(N_WARM):
            self.step(i_step)
        gc.collect()
        gc.freeze()  # as `serve` does before its first request
        self.watch.seconds.clear()
        self._answers.n_drafts = 0

    @property
    def n_drafts(self) -> int:
        """Draft tokens since the first steps."""
        return self._answers.n_drafts

    def step(self, i_step: int) -> None:
        """Runs one step."""
        watch, scheduler, thread = self.watch, self._scheduler, self._thread
        with watch.part("reap"):
            scheduler.reap(self._now)
        with watch.part("plan"):
            plan = scheduler.plan(self._now)
        with watch.part("pack"):
            _pack(plan.entries)
        raw = self._answers.answer(plan, i_step)
        self._now += raw.t_total_us * 1e-6
        with watch.part("unpack"):
            entries = self._answers._unpack(raw)
            timings = _timings(raw)
            result = StepResult(entries, raw.n_batch_tokens, timings=timings)
        with watch.part("commit"):
            thread._report.result = result
            thread._report.events = scheduler.commit(result, self._now)
        with watch.part("hand over"):
            thread._flush()
        with watch.part("fan out"):
            self._loop._take_reports()
        for outbox in self._loop._outboxes.values():
            outbox._events.clear()  # as a reader does


def measure(
    n_sequences: int, n_steps: int, n_rounds: int, n_draft: int | None, *, has_ngrams: bool
) -> tuple[dict[str, float], float]:
    """Returns the microseconds per step of each part, of the best round, and the mean K."""
    bench = Bench(n_sequences, n_steps * n_rounds, n_draft, has_ngrams=has_ngrams)
    rounds = []
    for i_round in range(n_rounds):
        for i_step in range(n_steps):
            bench.step(i_round * n_steps + i_step)
        rounds.append({name: bench.watch.seconds[name] / n_steps * 1e6 for name in PARTS})
        bench.watch.seconds.clear()
    mean = bench.n_drafts / (n_sequences * n_steps * n_rounds)
    return min(rounds, key=lambda found: sum(found.values())), mean


def profile(n_sequences: int, n_steps: int, n_draft: int | None) -> None:
    """Prints where the time goes. The profiler makes small functions look larger than they are."""
    bench = Bench(n_sequences, n_steps, n_draft)
    profiler = cProfile.Profile()
    profiler.enable()
    for i_step in range(n_steps):
        bench.step(i_step)
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(35)


async def _run(options: argparse.Namespace) -> None:
    n_draft = options.drafts if options.policy == "fixed" else None
    if options.profile:
        profile(32, options.steps, n_draft)
        return
    print(
        "us per step    " + "".join(f"{name:>10}" for name in (*PARTS, "between", "all", "mean K"))
    )
    for n_sequences in options.sequences:
        row, mean = measure(
            n_sequences, options.steps, options.rounds, n_draft, has_ngrams=options.ngrams
        )
        total = sum(row.values())
        cells = (*row.values(), total - row["fan out"], total)
        line = "".join(f"{value:10.1f}" for value in cells)
        print(f"{n_sequences:4} sequences {line}{mean:10.2f}", flush=True)


def main() -> None:
    """Measures all cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=counts, default=(1, 8, 32, 64))
    parser.add_argument("--policy", choices=("adaptive", "fixed"), default="adaptive")
    parser.add_argument("--drafts", type=int, default=3, help="K, where it is fixed")
    parser.add_argument("--steps", type=count, default=400)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--ngrams", action="store_true", help="look drafts up first")
    parser.add_argument("--profile", action="store_true")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
