"""How many threads decodes get when no setting says it."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from drafthouse_server.config import Config

# The fake engine, and all tests that use it, work without the extension.
with contextlib.suppress(ImportError):  # load_engine says so
    import drafthouse_engine

__all__ = ["Threads", "choose_threads", "threads_of"]

_N_LONG_BYTES = 16_000_000
"""Weights that a thread must have to read in a step, for the step to be long: about 2 ms."""

_N_WIDE_BYTES = 100_000_000
"""Weights times tokens that it must have to multiply: of many tokens, as long as reading is."""

_ENOUGH = 0.5
"""Cores' worth of time, beyond the engine's threads, that the rest of the server can live on."""

_N_BESIDE_DEVICES = 4
"""Threads where devices compute: they fetch rows of the embeddings, and choose tokens."""


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads of the engine's decodes."""

    n: int
    """Threads of a narrow decode, >= 1."""
    n_batch: int
    """Threads of a wide decode, >= 1."""
    n_wide: int = 2
    """A decode of so many tokens is wide, >= 2."""
    reason: str = ""
    """Why this number of threads was chosen, in a few words."""
    follows: bool = False
    """Whether fewer compute while other processes take the cores."""

    @property
    def n_most(self) -> int:
        """Threads of any decode, at most, >= 1."""
        return max(self.n, self.n_batch)


def choose_threads(n_cores: int, n_spare: float, n_bytes: int) -> Threads:
    """Returns the threads of a model's decodes: all cores, or all but one where they are short.

    Where devices compute, a few: threads that wait for each other beside a device keep cores busy,
    and hold up what feeds it.

    All threads of a decode wait for each other at every layer. With as many as there are cores,
    whatever else runs, as the event loop does for each message, holds up all of them. For a long
    step that is little beside the core that would stand idle; a step of a small model would take
    many times as long.

    No clock is asked, so a server always starts with the same number: sums over a context are cut
    by it, and another one may round otherwise. Only while other processes take the cores do fewer
    compute.

    Args:
        n_cores: Cores that the process may use, >= 1.
        n_spare: Cores' worth of time that it may use besides: hardware threads that share these
            cores, or the rest of a quota.
        n_bytes: Weights that the CPU computes with, which a step reads once; 0: devices have all.
    """
    if n_cores == 1:
        return Threads(1, 1, reason="the only core")
    if n_bytes == 0:
        n = min(_N_BESIDE_DEVICES, n_cores - 1)
        return Threads(n, n, reason="devices compute all layers")
    if n_spare >= _ENOUGH:
        return Threads(n_cores, n_cores, reason=f"{n_spare:g} more are left to the rest")
    if n_bytes >= n_cores * _N_LONG_BYTES:
        share = f"{n_bytes / n_cores / 1e6:.0f} MB of weights for each"
        return Threads(n_cores, n_cores, reason=f"steps are long: {share}")
    n_wide = max(2, -(-n_cores * _N_WIDE_BYTES // max(1, n_bytes)))
    reason = "steps are short: one core is left to the rest of the server"
    return Threads(n_cores - 1, n_cores, n_wide, reason=reason)


def threads_of(config: Config, n_bytes: int, n_host_bytes: int) -> Threads:
    """Returns what the settings say, and where they say nothing what suits model and machine.

    Args:
        config: The server's settings.
        n_bytes: The target's weights.
        n_host_bytes: Weights of target and draft model that the CPU computes with.
    """
    n, n_batch = config.threads, config.threads_batch
    n_bytes = min(n_bytes, n_host_bytes)
    if n:
        found = Threads(n, n_batch or n, reason="as set")
    else:
        cores = drafthouse_engine.find_cores()
        found = choose_threads(cores.n_cores, cores.n_spare, n_bytes)
        if n_batch:
            found = dataclasses.replace(found, n_batch=n_batch, n_wide=2)
    # Beside devices that compute all layers threads do little, and wait for them asleep.
    return dataclasses.replace(found, follows=n_bytes > 0 and found.n_most > 1)
