"""How much of the engine's time the server wastes: share of the ideal rate, over gRPC.

    python -m tests.bench.loop_overhead [--streams 1,32] [--step-ms 0.4,1.5] [--seconds 3] [--busy]

The engine is a clock: a step takes exactly so long, without the GIL, as a decode in C would. So the
ideal rate is known, and what is missing was lost between steps. The client is another process, as
the machine's other load is; on two cores it takes its part as it does in `drafthouse bench`.
`--busy` computes instead of sleeping, so that the engine's core is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import drafthouse
from drafthouse_server.bench_load import Load, LoadResult, run_load
from drafthouse_server.config import Config
from drafthouse_server.fake import FakeEngine
from drafthouse_server.server import Server
from drafthouse_server.step import EngineLimits, ResultEntry, SequenceStatus, StepPlan, StepResult

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
    """

    def __init__(self, n_seq: int, step_s: float, *, is_busy: bool) -> None:
        super().__init__(EngineLimits("none", n_seq, 4096 * n_seq, 4096, 8192, 8192, 0, 8192))
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

    def step(self, plan: StepPlan) -> StepResult:
        """Waits, and emits one token per entry."""
        self.n_steps += 1
        for start in plan.starts:
            self._lengths[start.seq_id] = 0
        self._work()
        results = []
        lengths = self._lengths
        for entry in plan.entries:
            lengths[entry.seq_id] += len(entry.tokens)
            n_past = lengths[entry.seq_id]
            tokens = [97 + n_past % 26] if entry.is_output else []
            results.append(ResultEntry(entry.seq_id, SequenceStatus.OK, n_past, tokens))
        return StepResult(results, len(plan.entries))


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


def _client(target: str, load: Load, answer: multiprocessing.connection.Connection) -> None:
    async def run() -> LoadResult:
        async with drafthouse.AsyncClient(target, retry=None) as client:
            await run_load(client, Load(load.prompts[: load.n_streams], 8, load.n_streams))
            answer.send("warm")
            answer.recv()
            return await run_load(client, load)

    answer.send(asyncio.run(run()))


async def measure(case: Case) -> str:
    """Runs one case and returns its line."""
    engine = PacedEngine(case.n_streams, case.step_s, is_busy=case.is_busy)
    config = Config(port=0, n_seq_max=case.n_streams, n_draft_default=0, log_level="error")
    server = Server(config, lambda: engine)
    await server.startup()
    n_output = min(4000, max(8, int(case.seconds / case.step_s)))
    load = Load(((65, 66, 67),) * case.n_streams, n_output, case.n_streams)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_client, args=(server.target, load, theirs))
    process.start()
    await asyncio.to_thread(ours.recv)
    before, cpu_s = server.loop.statistics(), time.process_time()
    ours.send("go")
    result: LoadResult = await asyncio.to_thread(ours.recv)
    cpu_s = time.process_time() - cpu_s
    after = server.loop.statistics()
    process.join()
    await server.close()
    n_steps = after.n_steps - before.n_steps
    host_us = (after.host_s - before.host_s) / n_steps * 1e6
    fan_out_us = 1e6 * (
        (getattr(after, "fan_out_s", 0.0) - getattr(before, "fan_out_s", 0.0)) / n_steps
    )
    share = result.tokens_per_s * case.step_s / case.n_streams
    gaps = sorted(result.gaps_s)
    return (
        f"{case.n_streams:4} streams, {case.step_s * 1e3:.2f} ms: share {share:.3f},"
        f" lost {(result.elapsed_s / n_steps - case.step_s) * 1e6:5.0f} us/step,"
        f" host {host_us:4.0f} us, fan-out {fan_out_us:4.0f} us,"
        f" tokens/message {result.tokens_per_message:.2f},"
        f" gap p50 {gaps[len(gaps) // 2] * 1e3:.2f} p99 {gaps[len(gaps) * 99 // 100] * 1e3:.2f} ms,"
        f" first {sorted(result.first_tokens_s)[len(result.first_tokens_s) // 2] * 1e3:.1f} ms,"
        f" server cpu {cpu_s / result.elapsed_s:.2f}, client {result.client_cpu_s / result.elapsed_s:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--step-ms", default="0.4,1.5")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    streams = [int(n) for n in options.streams.split(",")]
    steps = [float(ms) / 1e3 for ms in options.step_ms.split(",")]
    for n_streams, step_s in zip(streams, steps, strict=True):
        case = Case(n_streams, step_s, options.seconds, options.busy)
        print(asyncio.run(measure(case)), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
