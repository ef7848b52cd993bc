"""Sequences that had to give their slot back: what is kept of them, and where; what that costs."""

from __future__ import annotations

from drafthouse_server.scheduling.sequence import Sequence

__all__ = ["ParkingLot", "SnapshotCost"]

_BYTES_PER_S = 1e9
"""Speed at which a snapshot is written, and read again: one core that copies and checks bytes."""

_FIXED_S = 1e-3
"""Time of a snapshot besides its bytes, written and read."""


class SnapshotCost:
    """Predicts size and time of a snapshot from those that were written."""

    def __init__(self) -> None:
        self._bytes_per_token = 0.0

    def observe(self, n_tokens: int, n_bytes: int) -> None:
        """Learns from a snapshot of so many tokens, at least one."""
        # Recurrent states make short ones dear; the dearest is the safe guess.
        self._bytes_per_token = max(self._bytes_per_token, n_bytes / n_tokens)

    def n_bytes(self, n_tokens: int) -> float:
        """Returns the size of a snapshot, rather too much; 0 until one was seen."""
        return self._bytes_per_token * n_tokens

    def write_s(self, n_tokens: int) -> float:
        """Returns the seconds that writing it takes; nothing else goes on meanwhile."""
        return self.n_bytes(n_tokens) / _BYTES_PER_S + _FIXED_S / 2

    def total_s(self, n_tokens: int) -> float:
        """Returns the seconds of writing it and reading it again."""
        return 2 * self.write_s(n_tokens)


class ParkingLot:
    """Decides how sequences are parked, and bounds the host memory that they take.

    A snapshot brings a sequence back bit by bit. Without one its tokens are computed again, in a
    batch of another width, which rounds differently: where two tokens tie, another may win.

    Args:
        n_bytes_max: Most bytes of snapshots; 0 is none.
        snapshots: Predicts what one costs; shared with whoever writes snapshots too.
    """

    def __init__(self, n_bytes_max: int, snapshots: SnapshotCost | None = None) -> None:
        self._n_bytes_max = n_bytes_max
        self._n_bytes = 0
        self._snapshots = snapshots or SnapshotCost()
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

    def is_worth_saving(
        self, n_computed: int, recompute_s: float | None, *, is_drawn: bool = False
    ) -> bool:
        """Returns whether to write a snapshot of a sequence that is about to be parked.

        One that draws tokens at random is saved while there is room, whatever that costs: each of
        its draws falls near a border of two tokens now and then, and other roundings would move it
        across. A greedy one parts only where two tokens tie.

        Args:
            n_computed: Tokens that the snapshot would hold.
            recompute_s: Predicted seconds of computing them again; None if that is unknown.
            is_drawn: Whether the sequence has drawn tokens at random.
        """
        if not n_computed or not self._n_bytes_max:
            return False
        if self._n_bytes + self._snapshots.n_bytes(n_computed) > self._n_bytes_max:
            return False
        return is_drawn or recompute_s is None or self._snapshots.total_s(n_computed) < recompute_s

    def put(self, sequence: Sequence, snapshot: bytes | None) -> None:
        """Keeps a parked sequence's snapshot, if there is one and room for it.

        Without one, nothing of it is computed any more.
        """
        if snapshot is not None:
            self._snapshots.observe(sequence.n_computed, len(snapshot))
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
