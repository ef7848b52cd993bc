"""The devices of a machine, and the memory that an engine would take on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEVICE_KINDS", "Device", "DeviceKind", "Fit", "MemoryUse"]

DeviceKind = Literal["cpu", "gpu", "igpu", "accel", "other"]
"""What a device is: igpu shares the host's memory, accel works in it."""

DEVICE_KINDS: tuple[DeviceKind, ...] = ("cpu", "gpu", "igpu", "accel", "other")
"""The kinds, in the order of `spec.h`."""


@dataclass(frozen=True, slots=True)
class Device:
    """What llama.cpp can compute on."""

    name: str
    """Such as CPU or CUDA0."""
    description: str
    """Name of the device as its maker writes it."""
    kind: DeviceKind
    """What it is."""
    total_bytes: int
    """Memory of the device; 0 where it does not tell."""
    free_bytes: int
    """What of it is free."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that an engine takes on one device."""

    device: str
    """Name of the device; empty: the host's memory."""
    weights_bytes: int
    """Weights of the target and the draft model."""
    mapped_bytes: int
    """The part of them that is mapped from the files, and that the system can read again."""
    cells_bytes: int
    """KV cells and recurrent states of the target."""
    compute_bytes: int
    """Intermediate results and logits of the target."""
    draft_cells_bytes: int
    """KV cells of the drafter."""
    draft_compute_bytes: int
    """Intermediate results and logits of the drafter."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        contexts = self.cells_bytes + self.compute_bytes
        drafter = self.draft_cells_bytes + self.draft_compute_bytes
        return self.weights_bytes + contexts + drafter


@dataclass(frozen=True, slots=True)
class Fit:
    """What of an engine fits on the devices."""

    n_gpu_layers: int
    """Layers of the target on devices; −1: all."""
    n_ctx: int
    """KV cells of all sequences together."""
