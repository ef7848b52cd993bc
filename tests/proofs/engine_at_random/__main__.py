"""Calls at random on the native engine, for as long as wanted: see drive.py for what is checked.

python -m tests.proofs.engine_at_random --seconds 600 --seed 1000
python -m tests.proofs.engine_at_random --runs 1 --seed 17      # one seed, as a test names it
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import time
from collections import Counter

from tests.proofs.engine_at_random.drive import N_OPERATIONS, drive
from tests.proofs.engine_at_random.settings import drawn_settings


def main() -> int:
    """Returns 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="no engine is begun after them")
    parser.add_argument("--runs", type=int, help="so many engines, however long they take")
    parser.add_argument("--operations", type=int, default=N_OPERATIONS, help="calls on each engine")
    arguments = parser.parse_args()
    faulthandler.enable()
    ends_s = time.monotonic() + arguments.seconds
    counts, n_wrong = Counter[str](), 0
    seeds = itertools.count(arguments.seed)
    for n_runs, seed in enumerate(seeds):
        if n_runs == arguments.runs or (not arguments.runs and time.monotonic() > ends_s):
            break
        settings = drawn_settings(seed)
        print(f"seed {seed}: {settings.target}, {settings.params.draft_type}", flush=True)
        outcome = drive(seed, arguments.operations)
        counts.update(outcome.counts, engines=1)
        if outcome.fault:
            n_wrong += 1
            print(outcome.fault, flush=True)
    print(", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    print(f"{n_wrong} engines were wrong")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
