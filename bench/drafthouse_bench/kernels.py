"""What our patches of ggml's CPU kernels gain: steps at long contexts, with them and without.

    git clone . ../plain; cd ../plain; DRAFTHOUSE_CPU_KERNELS=OFF make dev; cd -
    drafthouse-bench kernels --plain ../plain [--models qwen3-0.6b-like-Q4_0,llama-1b-like-Q4_0]
        [--contexts 512,4096] [--streams 1,8] [--short 0] [--turns 7] [--steps 12]

Each build has a process of its own. Both load a model, compute a context once, copy it to the other
streams as the prefix cache does, and then take turns of some steps without drafts, in which nothing
but the last token of each stream is computed. `--short 8` adds eight streams of 32 tokens: where
contexts differ, threads must share the longest. Both checkouts are of one commit. Printed is the
median of the turns' ratios. The bar: 1.10 in the median of the cells, 0.98 in each.

`make bench-models ARGS="qwen3-0.6b-like llama-1b-like --quants Q4_0 Q8_0"` writes the models.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from drafthouse_bench.counts import counts
from drafthouse_bench.demos import CHECKOUT
from drafthouse_bench.peers.case import find_target
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import SamplingOptions

_ROOM = 256  # cells of a stream beside its context
_N_SHORT = 32  # tokens of the contexts beside
_MEDIAN_BAR, _CELL_BAR = 1.10, 0.98


def _work(model: str, n_context: int, n_streams: int, n_short: int) -> None:
    """Computes the contexts, then answers each line, a number of steps, with seconds a step."""
    config = Config(
        model=model,
        draft_type="none",
        parallel=n_streams + n_short,
        max_model_len=n_context + _ROOM,
        prompt_lookup=False,
    )
    engine = LlamaEngine.load(config)
    scheduler = make_scheduler(engine, config)
    chance = random.Random(1)
    prompt = [chance.randrange(1000) for _ in range(n_context)]

    def step() -> int:
        now = time.monotonic()
        scheduler.reap(now)
        result = engine.step(scheduler.plan(now))
        list(scheduler.commit(result, time.monotonic()))
        return result.n_steps

    def submit(name: str, prompt: list[int]) -> Sequence:
        options = SamplingOptions(temperature=0.0, ignore_eos=True)
        request = Request(name, list(prompt), sampling=options, n_output_max=_ROOM - 1)
        sequence = Sequence(request, engine.make_sampler(options))
        scheduler.submit(sequence)
        return sequence

    running = [submit("0", prompt)]
    while not running[0].tally.n_steps:
        step()
    running += [submit(str(i), prompt) for i in range(1, n_streams)]
    others = [[chance.randrange(1000) for _ in range(_N_SHORT)] for _ in range(n_short)]
    running += [submit(f"short {i}", other) for i, other in enumerate(others)]
    while not all(sequence.tally.n_steps for sequence in running):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        n_done, started = 0, time.perf_counter()
        while n_done < int(line):
            n_done += step()
        print((time.perf_counter() - started) / n_done, flush=True)
    engine.close()


class _Worker:
    """A build's process."""

    def __init__(self, checkout: Path, model: Path, *sizes: int) -> None:
        python = checkout / ".venv" / "bin" / "python"
        arguments = [str(model), *map(str, sizes)]
        self._process = subprocess.Popen(
            [str(python), "-m", "drafthouse_bench", "kernels", "--work", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        """Waits until its context is computed."""
        line = self._stdout.readline()
        if line.strip() != "ready":
            raise RuntimeError("a build does not start, see above")

    def step_s(self, n_steps: int) -> float:
        """Returns the seconds of a step."""
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        stdin.write(f"{n_steps}\n")
        stdin.flush()
        return float(self._stdout.readline())

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None, "it is a pipe"
        return self._process.stdout

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait(30)


def _cell(
    options: argparse.Namespace, model: Path, n_context: int, n_streams: int
) -> tuple[float, float, float]:
    """Returns the median seconds of a step with and without the patches, and the ratio's."""
    workers = []
    try:
        for checkout in (CHECKOUT, options.plain):
            workers.append(_Worker(checkout, model, n_context, n_streams, options.short))
            workers[-1].wait()
        for worker in workers:
            worker.step_s(2)
        turns = []
        for i in range(options.turns):
            order = workers if i % 2 else workers[::-1]
            found = {id(worker): worker.step_s(options.steps) for worker in order}
            turns.append([found[id(worker)] for worker in workers])
    finally:
        for worker in workers:
            worker.close()
    ours, plain = (statistics.median(each) for each in zip(*turns, strict=True))
    return ours, plain, statistics.median(b / a for a, b in turns)


def main() -> None:
    """Measures, or is a build's process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--plain", type=Path, help="a checkout that was built with DRAFTHOUSE_CPU_KERNELS=OFF")
    add("--models", default="qwen3-0.6b-like-Q4_0,llama-1b-like-Q4_0")
    add("--contexts", type=counts, default=(512, 4096), help="tokens")
    add("--streams", type=counts, default=(1, 8))
    add("--short", type=int, default=0, help=f"streams of {_N_SHORT} tokens beside them")
    add("--turns", type=int, default=7)
    add("--steps", type=int, default=12, help="of a turn")
    add("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(options.work[0], *map(int, options.work[1:]))
        return
    if options.plain is None:
        parser.error("--plain CHECKOUT is missing: a build without the patches")
    if (options.turns + 1) * options.steps > _ROOM - 8:
        parser.error(f"--turns x --steps: at most {_ROOM - 8 - options.steps} steps")
    ratios = []
    beside = f" beside {options.short} of {_N_SHORT}" if options.short else ""
    for name in options.models.split(","):
        for n_context in options.contexts:
            for n_streams in options.streams:
                path = find_target(name).path
                ours, plain, ratio = _cell(options, path, n_context, n_streams)
                ratios.append(ratio)
                print(
                    f"{name}, {n_context} tokens × {n_streams}{beside}: {ours * 1e3:.1f} ms a step,"
                    f" without {plain * 1e3:.1f}: {ratio:.3f}",
                    flush=True,
                )
    median = statistics.median(ratios)
    holds = median >= _MEDIAN_BAR and min(ratios) >= _CELL_BAR
    print(
        f"median of {len(ratios)} cells {median:.3f}, least {min(ratios):.3f}:"
        f" {'holds' if holds else 'missed'}"
    )


if __name__ == "__main__":
    main()
