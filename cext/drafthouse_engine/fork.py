"""Several sequences with one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import Engine, Sampler
from drafthouse_engine.errors import BY_STATUS, InvalidArgument
from drafthouse_engine.step import PLAN_DTYPE

__all__ = ["begin_many"]

Tokens = Sequence[int] | npt.NDArray[np.int32]


def begin_many(engine: Engine, prompt: Tokens, samplers: Mapping[int, Sampler]) -> bool:
    """Begins sequences that go on from one prompt: n completions of one request.

    The prompt is computed once and its cache copied, where the target allows it; on a target with
    recurrent layers it is computed for each sequence. Then every sequence holds all of the prompt
    but its last token: the next step gives each that token, with `is_output`.

    Args:
        engine: an engine; the sequences are idle.
        prompt: token ids, ≥ 1.
        samplers: the sampler of each sequence, by its id; the engine takes them over.

    Returns:
        Whether the cache was copied.

    Raises:
        InvalidArgument: the prompt is empty.
        SeqBusy: a sequence has begun already.
        NoRoom, DecodeFailed: the prompt could not be computed; the sequences are ended.

    Thread:
        The engine's.
    """
    if len(prompt) < 1:
        raise InvalidArgument("the prompt has no tokens")
    ids = list(samplers)
    begun: list[int] = []
    can_fork = not (engine.target.is_recurrent or engine.target.is_hybrid)
    can_fork = can_fork and len(prompt) > 2 and len(ids) > 1  # a fork keeps one
    try:
        for seq_id in ids[:1] if can_fork else ids:
            engine.seq_begin(seq_id, samplers[seq_id])
            begun.append(seq_id)
            _prefill(engine, seq_id, 0, prompt[:-1])
        if can_fork:
            n_shared = len(prompt) - 2
            engine.fork(ids[0], {seq_id: samplers[seq_id] for seq_id in ids[1:]}, n_shared)
            begun += ids[1:]
            for seq_id in ids[1:]:
                _prefill(engine, seq_id, n_shared, prompt[n_shared:-1])
    except BaseException:
        for seq_id in begun:
            engine.seq_end(seq_id)
        raise
    return can_fork


def _prefill(engine: Engine, seq_id: int, n_past: int, tokens: Tokens) -> None:
    """Computes tokens of a prompt, as many in a step as it takes."""
    n_batch = engine.limits.n_batch
    for i in range(0, len(tokens), n_batch):
        piece = tokens[i : i + n_batch]
        entry = np.array([(seq_id, n_past + i, 0, len(piece), 0, 0)], PLAN_DTYPE)
        status = int(engine.step(entry, piece).entries["status"][0])
        if status:
            raise BY_STATUS[status](f"sequence {seq_id}: the prompt could not be computed")
