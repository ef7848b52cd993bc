"""What memory a server takes, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from drafthouse_server.host.fit import Size

__all__ = ["CELL_BYTES", "DeviceUse", "ModelFacts", "Needs", "process_bytes"]

CELL_BYTES = 100
"""Host memory that llama.cpp keeps its books in for each cell of a context, measured."""

_MIB = 1 << 20
_SERVER_BYTES = 100 * _MIB
"""Memory of the server's process without its engine, measured."""
_WORKER_BYTES = 26 * _MIB
"""Memory of a text worker without the vocabulary, measured."""
_TOKEN_BYTES = 500
"""Memory of a vocabulary for each token: 190, and 160 for each of its merges, measured. There are
up to two of these for a token (Llama 3, Gemma 4)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's file says."""

    path: str
    """The file."""
    architecture: str
    """Architecture as the file names it."""
    description: str
    """One line: architecture, size, quantisation."""
    n_params: int
    """Number of weights."""
    size_bytes: int
    """Bytes of the weights in the file."""
    n_ctx_train: int
    """Context length that it was trained with, in tokens."""
    n_vocab: int
    """Tokens of its vocabulary."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes on one device, or in the host's memory."""

    weights_bytes: int = 0
    """Bytes of the weights of target and draft model."""
    mapped_bytes: int = 0
    """The part of them that the system can drop and read again from the file."""
    cells_bytes: int = 0
    """KV cells and recurrent states of the target."""
    compute_bytes: int = 0
    """Intermediate results and logits of the target."""
    draft_bytes: int = 0
    """KV cells, intermediate results and logits of the drafter."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        contexts = self.cells_bytes + self.compute_bytes + self.draft_bytes
        return self.weights_bytes + contexts


@dataclass(frozen=True, slots=True)
class Needs:
    """What a server of one size takes."""

    size: Size
    """Slots and tokens of one request."""
    draft_type: str
    """How drafts are made, as set or as found for the models."""
    n_cells: int
    """KV cells of all slots together."""
    host: DeviceUse
    """In the host's memory."""
    devices: tuple[tuple[str, DeviceUse], ...]
    """On each device in use, by its name."""
    processes_bytes: int
    """Bytes of the server's process and its text workers, beside models and contexts."""
    caches_bytes: int
    """What prefix_cache_mib and preempted_mib may grow to."""
    prefix_bytes: int = 0
    """The part of them that prefixes have."""

    @property
    def start_bytes(self) -> int:
        """In the host's memory, as soon as the server runs."""
        return self.host.total_bytes + self.processes_bytes

    @property
    def fixed_bytes(self) -> int:
        """The part of them that the system cannot drop and read again."""
        return self.start_bytes - self.host.mapped_bytes

    @property
    def full_bytes(self) -> int:
        """In the host's memory, when its caches are full, too."""
        return self.start_bytes + self.caches_bytes

    @property
    def cell_bytes(self) -> float:
        """Bytes of one token in the target's cells, recurrent states counted in."""
        everything = (self.host, *(use for _, use in self.devices))
        return sum(use.cells_bytes for use in everything) / max(1, self.n_cells)


def process_bytes(n_text_workers: int, n_vocab: int) -> int:
    """Returns what a server's processes take beside models and contexts.

    Args:
        n_text_workers: As set; one more is kept ready.
        n_vocab: Tokens of the target's vocabulary, which each process holds.
    """
    vocabulary = n_vocab * _TOKEN_BYTES
    return _SERVER_BYTES + vocabulary + (n_text_workers + 1) * (_WORKER_BYTES + vocabulary)
