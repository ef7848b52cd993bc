"""The process in which a model is decoded for the first time; `probe.py` starts it.

It reads a JSON object in one line of its standard input, and writes some, a line each: how far
loading is, that it is done, and what is wrong. When its input ends it ends too: whoever has started
it is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import Engine, Model, Sampler, Survey, list_devices
from drafthouse_engine.devices import CacheParams, Placement, RopeParams
from drafthouse_engine.errors import EngineError, Status
from drafthouse_engine.moves import Moves, Start
from drafthouse_engine.options import DraftType, EngineParams, SamplingParams
from drafthouse_engine.rpc import add_rpc_servers
from drafthouse_engine.step import DRAFT_DTYPE, PLAN_DTYPE, StepResult

__all__ = ["main", "watch_input"]

N_SEQS: Final = 3
"""Sequences at once, where the server has more than one."""
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


def _decode(engine: Engine, model: Model, *, n_draft: int, is_given: bool) -> str:
    """Computes prompts of unlike lengths, tokens of all sequences at once, and of one alone.

    Graphs differ by how many sequences and tokens they have, with drafts and without.
    """
    greedy, n_seqs = SamplingParams(temperature=0.0), engine.limits.n_seq_max
    starts = [Start(i, Sampler(model, greedy)) for i in range(n_seqs)]
    n_past = [N_PROMPT + i for i in range(n_seqs)]
    tokens = [(7 * i + 1) % model.n_vocab for i in range(N_PROMPT + n_seqs)]
    rows = [(i, 0, 0, n, 0, 1) for i, n in enumerate(n_past)]
    result = engine.step(_plan(rows, PLAN_DTYPE), tokens, moves=Moves(starts=starts))
    rounds = [*[(n_seqs, n_draft)] * N_ROUNDS, (n_seqs, 0), (1, n_draft), (1, 0)]
    for n_rows, n_drafted in rounds:
        if problem := _wrong(result):
            return problem
        n_past = [int(entry["n_past"]) for entry in result.entries]
        last = [int(result.tokens[e["token_offset"] + e["n_tokens"] - 1]) for e in result.entries]
        rows = [(i, n_past[i], i, 1, n_drafted, 1) for i in range(n_rows)]
        is_drafted = is_given and n_drafted > 0
        drafts = [(i, len(last), n_drafted) for i in range(n_rows)] if is_drafted else []
        result = engine.step(
            _plan(rows, PLAN_DTYPE), [*last, *tokens[:N_DRAFT]], _plan(drafts, DRAFT_DTYPE)
        )
    return _wrong(result)


def _params(setup: dict[str, Any]) -> EngineParams:
    """Returns the parameters that the engine will have, but for its sizes."""
    given = dict(setup["params"])
    given["cache"] = CacheParams(**given["cache"])
    given["rope"] = RopeParams(**given["rope"])
    given["synth_rates"] = ()
    has_drafts = given["draft_type"] != "none"
    n_seqs = 1 if given["n_seq_max"] == 1 else N_SEQS
    small = {
        "n_ctx": N_CTX * n_seqs if given["kv_unified"] else 0,
        "n_ctx_seq": N_CTX,
        "n_batch": N_CTX,
        "n_ubatch": N_CTX,
        "n_seq_max": n_seqs,
        "n_draft_max": N_DRAFT,
        "n_rs_seq": -1,
        "n_min": min(given["n_min"], N_DRAFT) if has_drafts else 0,
        "p_min": 0.0,
    }
    return EngineParams(**given | small)


def _placement(part: dict[str, Any]) -> Placement:
    places: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in part["placement"].items()
    }
    return Placement(**places)


def _survey(setup: dict[str, Any], params: EngineParams) -> Survey | None:
    """Returns a survey that has found which layers fit on the devices; None: as the setup says."""
    margin_bytes = setup["margin_bytes"]
    has_device = any(it.kind in ("gpu", "igpu") for it in list_devices())
    if margin_bytes is None or not has_device:
        return None
    target, draft = setup["target"], setup["draft"]
    survey = Survey(
        target["path"],
        draft["path"] if draft else None,
        n_gpu_layers=target["n_gpu_layers"],
        load_mtp=params.draft_type == "mtp",
        placement=_placement(target),
        n_gpu_layers_draft=draft["n_gpu_layers"] if draft else None,
        draft_placement=_placement(draft) if draft else None,
    )
    without = dataclasses.replace(params, draft_type="ngram-simple")
    for tried in (params, without):  # the drafter may be none of these models'
        with contextlib.suppress(EngineError):
            found = survey.fit(tried, is_ctx_fixed=True, margin_bytes=margin_bytes)
            return None if found is None else survey
    return None


def _load(part: dict[str, Any], *, load_mtp: bool, placed_by: Survey | None = None) -> Model:
    told = 0.0

    def tell(share: float) -> None:
        nonlocal told
        if share >= told + 0.01 or share >= 1:
            told = share
            _tell(share=share)

    return Model(
        part["path"],
        n_gpu_layers=part["n_gpu_layers"],
        load_mtp=load_mtp,
        placed_by=placed_by,
        placement=_placement(part),
        progress=tell,
    )


def _tell(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _engine(model: Model, draft: Model | None, params: EngineParams) -> tuple[Engine, bool]:
    """Makes the engine with its drafter, or else with drafts that are given; tells which."""
    is_ngram = params.draft_type.startswith("ngram") or params.draft_type == "none"
    if not is_ngram:
        with contextlib.suppress(EngineError):
            return Engine(model, draft, params), False
    draft_type: DraftType = "none" if params.draft_type == "none" else "ngram-simple"
    return Engine(model, None, dataclasses.replace(params, draft_type=draft_type)), True


def _probe(setup: dict[str, Any]) -> str:
    """Returns what is wrong with a model; empty where nothing is, or its own loading tells it."""
    params = _params(setup)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            add_rpc_servers(tuple(setup["rpc"]))
            survey = _survey(setup, params)
            load_mtp = params.draft_type == "mtp"
            model = _load(setup["target"], load_mtp=load_mtp, placed_by=survey)
            stack.callback(model.close)
            draft = None
            if setup["draft"]:
                draft = _load(setup["draft"], load_mtp=False)
                stack.callback(draft.close)
            _tell(loaded_s=time.monotonic() - began_s)
            engine, is_given = _engine(model, draft, params)
            stack.callback(engine.close)
        except EngineError:
            return ""
        n_draft = 0 if engine.params.draft_type == "none" else engine.limits.n_draft_max
        is_given = is_given and n_draft > 0
        return _decode(engine, model, n_draft=min(n_draft, N_DRAFT), is_given=is_given)


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
    # What a device's driver prints is none of our lines.
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _tell(share=0.0)  # it works: what ends it from here on is the model
    problem = _probe(setup)
    _tell(problem=problem)
    # Not the interpreter's own end: the thread above may hold a lock of standard input.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
