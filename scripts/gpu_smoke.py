"""Generates with the demo model on this machine's GPU, and says where it lay, in seconds.

The first piece of `scripts/gpu_tables.sh` after the build: where this fails, all others would.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from drafthouse_engine import (
    PLAN_DTYPE,
    Engine,
    EngineParams,
    Model,
    Sampler,
    SamplingParams,
    list_devices,
)

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-mimo2-f16.gguf"
PROMPT = "def fibonacci(n):\n"
N_TOKENS = 48


def say(line: str) -> None:
    """Tells the user, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def generated(model: Model) -> str:
    """Returns what the model writes after the prompt, with its MTP drafts."""
    last, found = model.tokenize(PROMPT).tolist(), list[int]()
    with Engine(model, None, EngineParams(draft_type="mtp", n_seq_max=1, n_ctx_seq=256)) as engine:
        engine.seq_begin(0, Sampler(model, SamplingParams(temperature=0.0)))
        while len(found) < N_TOKENS:
            plan = [(0, engine.seq_n_past(0), 0, len(last), 3 if found else 0, 1)]
            found += engine.step(np.array(plan, PLAN_DTYPE), last).tokens.tolist()
            last = found[-1:]
            if model.is_eog(last[0]):
                break
    return model.detokenize(found).decode("utf-8", "replace")


def main() -> int:
    """Prints devices, where the weights lie, and a text; 1 where no GPU held them."""
    devices = list_devices()
    for it in devices:
        say(f"{it.name}: {it.kind}, {it.description}, {it.free_bytes >> 20} MiB free")
    gpus = [it.name for it in devices if it.kind in ("gpu", "igpu")]
    if not gpus:
        sys.stderr.write("error: the engine finds no GPU here\n")
        return 1
    started_s = time.monotonic()
    with Model(MODEL) as model:
        places = model.setting("buffers")
        say(f"weights: {places}")
        say(PROMPT + generated(model))
    say(f"load and {N_TOKENS} tokens: {time.monotonic() - started_s:.2f} s")
    if not any(name in places for name in gpus):
        sys.stderr.write(f"error: no weights lie on {', '.join(gpus)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
