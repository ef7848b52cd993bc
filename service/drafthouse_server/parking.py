"""Sequences that had to give their slot back: what is kept of them, and where."""

from __future__ import annotations

from drafthouse_server.sequence import Sequence

__all__ = ["ParkingLot"]

_BYTES_PER_S = 1e9
"""Speed at which a snapshot is written, and read again: one core that copies and checks bytes."""

_FIXED_S = 1e-3
"""Time of a snapshot besides its bytes, written and read."""


class ParkingLot:
    """Decides how sequences are parked, and bounds the host memory that they take.

    A snapshot brings a sequence back bit by bit; without one its tokens are computed again.

    Args:
        n_bytes_max: Most bytes of snapshots; 0 is none.
    """

    def __init__(self, n_bytes_max: int) -> None:
        self._n_bytes_max = n_bytes_max
        self._n_bytes = 0
        self._bytes_per_token = 0.0
        self.n_preempted = 0
        """Times that a sequence was parked."""
        self.n_resumed = 0
        """Times that a sequence came back."""
        self.n_recomputed = 0
        """Tokens that had to be computed again for it."""

    @property
    def n_bytes(self) -> int:
        """Bytes of snapshots held."""
        return self._n_bytes

    def is_worth_saving(self, n_computed: int, recompute_s: float | None) -> bool:
        """Returns whether to write a snapshot of a sequence that is about to be parked.

        Args:
            n_computed: Tokens that the snapshot would hold.
            recompute_s: Predicted seconds of computing them again; None if that is unknown.
        """
        if not n_computed or not self._n_bytes_max:
            return False
        n_bytes = self._bytes_per_token * n_computed  # 0 until one was seen
        if self._n_bytes + n_bytes > self._n_bytes_max:
            return False
        return recompute_s is None or 2 * n_bytes / _BYTES_PER_S + _FIXED_S < recompute_s

    def put(self, sequence: Sequence, snapshot: bytes | None) -> None:
        """Keeps a parked sequence's snapshot, if there is one and room for it.

        Without one, nothing of it is computed any more.
        """
        if snapshot is not None:
            per_token = len(snapshot) / sequence.n_computed
            # Recurrent states make short ones dear; the dearest is the safe guess.
            self._bytes_per_token = max(self._bytes_per_token, per_token)
            if self._n_bytes + len(snapshot) > self._n_bytes_max:
                snapshot = None
        if snapshot is None:
            self.n_recomputed += sequence.n_computed
            sequence.n_computed = 0
        else:
            self._n_bytes += len(snapshot)
        sequence.snapshot = snapshot

    def take(self, sequence: Sequence) -> bytes | None:
        """Returns a sequence's snapshot, which is held no more."""
        snapshot, sequence.snapshot = sequence.snapshot, None
        if snapshot is not None:
            self._n_bytes -= len(snapshot)
        return snapshot
