"""How soon a server that has just started is as quick as one that has run for long.

    drafthouse-bench fresh [--models dense,hybrid,qwen3-0.6b-like-Q4_0] [--streams 1,8]
        [--rounds 5] [--steps 200]

Each round has a new engine and scheduler, with all their estimators empty, beside one that has run
for --settle seconds; both serve the same streams with the server's defaults, in this process, and
take turns of a tenth of the steps, so that both see the same machine. Printed is, in the median of
the rounds, the new one's tokens per second in each tenth as a share of the other's; prompts are
computed before. The bar: 0.95 in the last tenth.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from drafthouse_bench.adaptive_k import Contender
from drafthouse_bench.counts import amount, count, counts
from drafthouse_bench.peers.case import find_target
from drafthouse_server.config import Config

_N_PARTS = 10
_BAR = 0.95


def _started(name: str, n_streams: int) -> Contender:
    """Returns a new server whose streams have all computed their prompts."""
    target = find_target(name)
    config: dict[str, Any] = {
        "model": str(target.path),
        "parallel": n_streams,
        "max_model_len": 512,
        "prefix_cache": False,
    }
    contender = Contender("", Config(**config), n_streams, n_prompt=24 if target.is_random else 64)
    while not all(sequence.tally.n_steps for sequence in contender.scheduler.sequences()):
        contender.run_steps(1)
    return contender


def _shares(name: str, n_streams: int, n_steps: int, settled: Contender) -> list[float]:
    new = _started(name, n_streams)
    n_part, shares = max(1, n_steps // _N_PARTS), []
    try:
        for _ in range(_N_PARTS):
            before = settled.run_steps(n_part)
            rate = new.run_steps(n_part)
            after = settled.run_steps(n_part)
            shares.append(rate / ((before + after) / 2))
    finally:
        new.engine.close()
    return shares


def main() -> None:
    """Measures and prints a line for each model and number of streams."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--models", default="dense,hybrid,qwen3-0.6b-like-Q4_0")
    add("--streams", type=counts, default=(1, 8))
    add("--rounds", type=count, default=5)
    add("--steps", type=count, default=200, help="that a new server has")
    add("--settle", type=amount, default=10.0, help="seconds that the other one runs before")
    options = parser.parse_args()
    for name in options.models.split(","):
        for n_streams in options.streams:
            settled = _started(name, n_streams)
            settled.run(options.settle)
            rounds = [
                _shares(name, n_streams, options.steps, settled) for _ in range(options.rounds)
            ]
            settled.engine.close()
            parts = [statistics.median(part) for part in zip(*rounds, strict=True)]
            shown = " ".join(f"{part:.2f}" for part in parts)
            verdict = "holds" if parts[-1] >= _BAR else "missed"
            print(f"{name} × {n_streams}: {shown}  {_BAR} in the last tenth: {verdict}", flush=True)


if __name__ == "__main__":
    main()
