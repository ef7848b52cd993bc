"""How fast this machine reads memory, and how much of a model a step reads: a bound on tokens/s.

A step reads every weight once, whatever the number of its streams; so with n streams no server can
give more than n x bytes per second / bytes of the weights. Attention's cells come on top.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gguf import GGUFReader

__all__ = ["bytes_per_step", "read_bytes_per_s"]

_N_BYTES = 256 << 20  # of each thread: no cache holds it
_N_TRIES = 5


def read_bytes_per_s(n_threads: int) -> float:
    """Returns the bytes per second that so many threads read together, the best of five tries."""
    blocks = [np.ones(_N_BYTES // 8, np.int64) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(_N_TRIES):
            started = time.perf_counter()
            # Its reduction is vectorised and lets other threads run.
            list(threads.map(np.bitwise_or.reduce, blocks))
            best = max(best, n_threads * _N_BYTES / (time.perf_counter() - started))
    return best


def bytes_per_step(path: Path, n_streams: int = 1) -> int:
    """Returns the bytes of a model's weights that a step without drafts reads, on average.

    All but the rows of a table of embeddings that is not the head as well, and the blocks that only
    predict drafts. Of experts those that some stream chooses, if each is chosen as often.

    Args:
        path: The GGUF file.
        n_streams: Tokens of the step.
    """
    reader = GGUFReader(path)
    arch = str(reader.fields["general.architecture"].contents())
    n_blocks = int(reader.fields[f"{arch}.block_count"].contents())
    nextn = reader.fields.get(f"{arch}.nextn_predict_layers")
    n_main = n_blocks - (int(nextn.contents()) if nextn else 0)
    has_head = any(tensor.name == "output.weight" for tensor in reader.tensors)
    n_experts = [
        int(found.contents()) if (found := reader.fields.get(f"{arch}.{key}")) else 0
        for key in ("expert_used_count", "expert_count")
    ]
    share = 1 - (1 - n_experts[0] / n_experts[1]) ** n_streams if n_experts[1] else 1.0
    total = 0.0
    for tensor in reader.tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        is_draft = block is not None and int(block[1]) >= n_main
        if not is_draft and not (has_head and tensor.name == "token_embd.weight"):
            total += int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1.0)
    return round(total)
