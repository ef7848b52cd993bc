"""The process in which a model is decoded for the first time; `probe.py` starts it.

It reads a JSON object in one line of its standard input, and writes one. When its input ends it
ends too: whoever has started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import Engine, Model, Sampler
from drafthouse_engine.errors import EngineError, Status
from drafthouse_engine.moves import Moves, Start
from drafthouse_engine.options import EngineParams, SamplingParams
from drafthouse_engine.step import DRAFT_DTYPE, PLAN_DTYPE, StepResult

__all__ = ["main", "watch_input"]

N_SEQS: Final = 3
N_CTX: Final = 64
N_PROMPT: Final = 5
N_DRAFT: Final = 2
N_ROUNDS: Final = 2


def _plan(rows: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.array(rows, dtype)


def _wrong(result: StepResult) -> str:
    """Returns what is wrong with a step; empty where nothing is."""
    for entry in result.entries:
        status = Status(int(entry["status"]))
        if status is not Status.OK:
            return f"its decode fails ({status.name})"
    return ""


def _decode(engine: Engine, model: Model, *, has_drafts: bool) -> str:
    """Computes prompts of unlike lengths, then tokens of all sequences at once, with drafts."""
    greedy = SamplingParams(temperature=0.0)
    starts = [Start(i, Sampler(model, greedy)) for i in range(N_SEQS)]
    n_past = [N_PROMPT + i for i in range(N_SEQS)]
    tokens = [(7 * i + 1) % model.n_vocab for i in range(N_PROMPT + N_SEQS)]
    rows = [(i, 0, 0, n, 0, 1) for i, n in enumerate(n_past)]
    result = engine.step(_plan(rows, PLAN_DTYPE), tokens, moves=Moves(starts=starts))
    for _ in range(N_ROUNDS):
        if problem := _wrong(result):
            return problem
        n_past = [int(entry["n_past"]) for entry in result.entries]
        last = [int(result.tokens[e["token_offset"] + e["n_tokens"] - 1]) for e in result.entries]
        n_draft = N_DRAFT if has_drafts else 0
        rows = [(i, n_past[i], i, 1, n_draft, 1) for i in range(N_SEQS)]
        drafts = [(i, N_SEQS, N_DRAFT) for i in range(N_SEQS)] if has_drafts else []
        result = engine.step(
            _plan(rows, PLAN_DTYPE), [*last, *tokens[:N_DRAFT]], _plan(drafts, DRAFT_DTYPE)
        )
    return _wrong(result)


def _params(setup: dict[str, Any], *, has_drafts: bool) -> EngineParams:
    return EngineParams(
        draft_type="ngram-simple" if has_drafts else "none",
        n_ctx_seq=N_CTX,
        n_batch=N_CTX,
        n_ubatch=N_CTX,
        n_seq_max=N_SEQS,
        n_draft_max=N_DRAFT,
        n_threads=setup["n_threads"],
        kv_unified=setup["kv_unified"],
        flash_attention=setup["flash_attention"],
        flash_forced=setup["flash_forced"],
    )


def _probe(setup: dict[str, Any]) -> str:
    """Returns what is wrong with a model; empty where nothing is, or its own loading tells it."""
    with contextlib.ExitStack() as stack:
        try:
            model = Model(setup["path"], n_gpu_layers=setup["n_gpu_layers"], load_mtp=False)
            stack.callback(model.close)
            params = _params(setup, has_drafts=setup["has_drafts"])
            engine = Engine(model, None, params)
            stack.callback(engine.close)
        except EngineError:
            return ""
        return _decode(engine, model, has_drafts=setup["has_drafts"])


def watch_input() -> None:
    """Ends the process as soon as its standard input does."""
    threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> int:
    """Probes the model that standard input names; 0."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    watch_input()
    problem = _probe(setup)
    sys.stdout.write(json.dumps({"problem": problem}))
    sys.stdout.flush()
    # Not the interpreter's own end: the thread above may hold a lock of standard input.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
