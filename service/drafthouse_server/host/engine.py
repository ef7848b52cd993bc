"""What the engine tells of itself and of the machine, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CoreFacts", "DeviceFacts", "EngineFacts"]


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """The cores that this process may use."""

    n_cores: int
    """Threads that "all cores" means."""
    n_physical: int
    """Cores in the affinity mask."""
    n_logical: int
    """Hardware threads in the affinity mask."""
    quota: float
    """Cores' worth of time that the cgroups grant; 0: no limit."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What llama.cpp can compute on."""

    name: str
    """Such as CPU or CUDA0."""
    description: str
    """Name of the device as its maker writes it."""
    kind: str
    """cpu, gpu, igpu, accel or other."""
    total_bytes: int
    """Memory of the device; 0 where it does not tell."""
    free_bytes: int
    """Free part of that memory."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """How the engine was built, and what it finds."""

    build: Mapping[str, str]
    """By name: llama_cpp, compiler, target, cpu, kernels, patches, backends, build_type."""
    features: frozenset[str]
    """What its kernels were compiled for, in ggml's words: AVX2, FMA, …"""
    cores: CoreFacts
    """What the process may compute on."""
    devices: tuple[DeviceFacts, ...]
    """The CPU, and accelerators."""
