"""How much of the engine's time the server wastes: share of the ideal rate, over gRPC.

    drafthouse-bench loop-overhead [--streams 1,32] [--step-ms 0.4,1.5] [--seconds 1]
        [--rounds 5] [--drafts 0] [--busy]

The engine is a clock: a step takes exactly so long, without the GIL, as a decode in C would. So the
ideal rate is known, and what is missing was lost between steps. The client is another process, as
the machine's other load is; on two cores it takes its part as it does in `drafthouse-bench matrix`.
`--busy` computes instead of sleeping, so that the engine's core is taken. With `--drafts` the
engine speculates, drafts cost nothing and half of each is accepted, so that the server does all
that it does for a draft model: it chooses K, learns what drafts yield, and learns what steps cost.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import drafthouse
from drafthouse_bench.load import Load, LoadResult, run_load
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import (
    EngineLimits,
    ResultEntry,
    SequenceStatus,
    StepPlan,
    StepResult,
    StepTimings,
)

_SWITCH_INTERVAL_S = 1e-4
_CLOCK_MONOTONIC, _TIMER_ABSTIME, _PR_SET_TIMERSLACK = 1, 1, 29


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class PacedEngine(FakeEngine):
    """A fake engine whose steps take exactly their time, without the GIL, and little else.

    Args:
        n_seq: Slots.
        step_s: Seconds of a step.
        is_busy: Computes for so long instead of sleeping.
        n_draft: Longest draft; 0 does not speculate.
    """

    def __init__(self, n_seq: int, step_s: float, *, is_busy: bool, n_draft: int = 0) -> None:
        draft_type = "mtp" if n_draft else "none"
        super().__init__(
            EngineLimits(draft_type, n_seq, 8192 * n_seq, 8192, 8192, 8192, n_draft, 8192)
        )
        self._timings = StepTimings(decode_s=step_s, total_s=step_s)
        self._pace_s = step_s
        self._libc = ctypes.CDLL(None)  # its calls are made without the GIL
        self._libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._lengths: dict[int, int] = {}
        self._block = bytes(1 << 20)
        self._is_busy = is_busy
        self._blocks_per_s = self._calibrate() if is_busy else 0.0

    def _calibrate(self) -> float:
        started = time.perf_counter()
        for _ in range(20):
            self._libc.memchr(self._block, 1, len(self._block))
        return 20 * len(self._block) / (time.perf_counter() - started)

    def _work(self) -> None:
        if self._is_busy:
            left = int(self._pace_s * self._blocks_per_s)
            while left > 0:
                self._libc.memchr(self._block, 1, min(left, len(self._block)))
                left -= len(self._block)
            return
        end = time.clock_gettime_ns(_CLOCK_MONOTONIC) + int(self._pace_s * 1e9)
        until = _TimeSpec(end // 1_000_000_000, end % 1_000_000_000)
        self._libc.clock_nanosleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(until), None)

    def ideal_s(self) -> float:
        """Returns the seconds that a step really takes here, on average, with nothing around it."""
        started = time.perf_counter()
        for _ in range(200):
            self._work()
        return (time.perf_counter() - started) / 200

    def step(self, plan: StepPlan) -> StepResult:
        """Waits, and emits one token per entry, and half of its draft."""
        self.n_steps += 1
        for start in plan.starts:
            self._lengths[start.seq_id] = 0
        self._work()
        results = []
        lengths = self._lengths
        for entry in plan.entries:
            seq_id, n_draft = entry.seq_id, entry.n_draft
            n_accepted = (n_draft + self.n_steps % 2) // 2
            lengths[seq_id] += len(entry.tokens) + n_accepted
            n_past = lengths[seq_id]
            tokens = [97 + n_past % 26] * (1 + n_accepted) if entry.is_output else []
            results.append(
                ResultEntry(
                    seq_id,
                    SequenceStatus.OK,
                    n_past,
                    tokens,
                    n_drafted=n_draft,
                    n_accepted=n_accepted,
                )
            )
        return StepResult(results, len(plan.entries), timings=self._timings)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    n_streams: int
    """Requests at once."""
    step_s: float
    """Seconds of a step."""
    seconds: float
    """About how long the load lasts."""
    is_busy: bool
    """Whether the engine computes."""
    n_rounds: int
    """Loads; the best one counts, because a busy machine only ever takes."""
    n_draft: int
    """Longest draft."""


def _client(target: str, load: Load, pipe: Connection) -> None:
    """Runs the load whenever it is told to, until it is told to stop."""

    async def run() -> None:
        async with drafthouse.AsyncClient(target, retry=None) as client:
            await run_load(client, Load(load.prompts, 8, load.n_streams))
            pipe.send("warm")
            while pipe.recv() == "go":
                pipe.send(await run_load(client, load))

    asyncio.run(run())


@dataclass(frozen=True)
class Round:
    """One load."""

    load: LoadResult
    """What its client saw."""
    n_steps: int
    """Steps that it took."""
    host_s: float
    """Seconds between steps."""
    fan_out_s: float
    """Seconds of fan-out."""
    cpu_s: float
    """CPU time of the server's process."""


async def measure(case: Case) -> str:
    """Runs one case and returns its line, of the round that was disturbed the least."""
    engine = PacedEngine(case.n_streams, case.step_s, is_busy=case.is_busy, n_draft=case.n_draft)
    config = Config(port=0, parallel=case.n_streams, draft_default=0, log_level="error")
    ideal_s = min(engine.ideal_s() for _ in range(3))
    server = Server(config, lambda: engine)
    await server.startup()
    n_output = int(case.seconds / case.step_s * (1 + case.n_draft / 2))
    n_output = min(8000 if case.n_draft else 4000, max(8, n_output))
    load = Load(((65, 66, 67),) * case.n_streams, n_output, case.n_streams)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_client, args=(server.target, load, theirs))
    process.start()
    try:
        await asyncio.to_thread(ours.recv)
        rounds = [await _round(server, ours) for _ in range(case.n_rounds)]
    finally:
        ours.send("stop")
        await asyncio.to_thread(process.join)
        await server.close()
    return _line(case, ideal_s, max(rounds, key=lambda r: r.n_steps / r.load.elapsed_s))


async def _round(server: Server, client: Connection) -> Round:
    before, cpu_s = server.loop.statistics(), time.process_time()
    client.send("go")
    load: LoadResult = await asyncio.to_thread(client.recv)
    after = server.loop.statistics()
    return Round(
        load,
        after.n_steps - before.n_steps,
        after.host_s - before.host_s,
        after.fan_out_s - before.fan_out_s,
        time.process_time() - cpu_s,
    )


def _line(case: Case, ideal_s: float, found: Round) -> str:
    load, n_steps = found.load, found.n_steps
    gaps, firsts = sorted(load.gaps_s), sorted(load.first_tokens_s)
    return (
        f"{case.n_streams:4} streams, {ideal_s * 1e3:.2f} ms a step:"
        f" share {n_steps * ideal_s / load.elapsed_s:.3f},"
        f" tokens/step {load.tokens_per_s * load.elapsed_s / n_steps / case.n_streams:.2f},"
        f" lost {(load.elapsed_s / n_steps - ideal_s) * 1e6:4.0f} us a step,"
        f" host {found.host_s / n_steps * 1e6:4.0f} us,"
        f" fan-out {found.fan_out_s / n_steps * 1e6:3.0f} us,"
        f" tokens/message {load.tokens_per_message:.2f},"
        f" gap p50 {gaps[len(gaps) // 2] * 1e3:.2f} p99 {gaps[len(gaps) * 99 // 100] * 1e3:.2f} ms,"
        f" first token {firsts[len(firsts) // 2] * 1e3:.1f} ms,"
        f" CPU: server {found.cpu_s / load.elapsed_s:.2f}"
        f" ({found.cpu_s / load.n_messages * 1e6:.0f} us a message),"
        f" client {load.client_cpu_s / load.elapsed_s:.2f}"
    )


def main() -> None:
    """Measures all cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--step-ms", default="0.4,1.5")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=0, help="longest draft")
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    streams = [int(n) for n in options.streams.split(",")]
    steps = [float(ms) / 1e3 for ms in options.step_ms.split(",")]
    for n_streams, step_s in zip(streams, steps, strict=True):
        case = Case(
            n_streams, step_s, options.seconds, options.busy, options.rounds, options.drafts
        )
        print(asyncio.run(measure(case)), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
