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
    """Its maker's name of it."""
    kind: DeviceKind
    """What it is."""
    total_bytes: int
    """Its memory; 0 where it does not tell."""
    free_bytes: int
    """What of it is free."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that an engine takes on one device."""

    device: str
    """Its name; empty: the host's memory."""
    weights_bytes: int
    """Of the target and the draft model."""
    mapped_bytes: int
    """The part of them that is mapped from the files, and that the system can read again."""
    cells_bytes: int
    """Of the target: KV cells and recurrent states."""
    compute_bytes: int
    """Of the target: intermediate results and logits."""
    draft_cells_bytes: int
    """Of the drafter: KV cells."""
    draft_compute_bytes: int
    """Of the drafter: intermediate results and logits."""

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
