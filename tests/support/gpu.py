"""The GPU of this machine, or why tests of it do not run."""

from __future__ import annotations

import pytest

import drafthouse_engine

__all__ = ["gpu_or_skip", "why_none"]

_OF_GPUS = ("CUDA", "HIP", "VULKAN", "SYCL", "METAL")


def why_none(backends: str, kinds: list[str]) -> str:
    """Returns why there is no GPU to test on; nothing where there is one.

    Args:
        backends: Those of the build, as `build_facts` tells them.
        kinds: Of the devices that llama.cpp finds here, without those of RPC servers.
    """
    if "gpu" in kinds or "igpu" in kinds:
        return ""
    built = [name for name in _OF_GPUS if name in backends.split()]
    if not built:
        return f"the engine is built without a GPU's backend ({backends}): -DGGML_CUDA=ON"
    words = f"the engine is built for {', '.join(built)}, which finds no GPU or no driver here"
    return words + " (`make test` hides them; `scripts/gpu_tables.sh tests` does not)"


def gpu_or_skip() -> drafthouse_engine.Device:
    """Returns the first GPU; skips the test without one, and says why."""
    found = [it for it in drafthouse_engine.list_devices() if not it.name.startswith("RPC")]
    reason = why_none(drafthouse_engine.build_facts()["backends"], [it.kind for it in found])
    if reason:
        pytest.skip(reason)
    return next(it for it in found if it.kind in ("gpu", "igpu"))
