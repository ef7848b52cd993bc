"""The demo models, and what benchmarks take of them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKOUT", "DEMOS", "MODELS", "N_DRAFT", "PROMPTS", "draft_models"]

CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the repository."""

MODELS = CHECKOUT / "models"
"""Folder of the demo models."""

PROMPTS = MODELS / "prompts.json"
"""Held-out prompts, by kind."""

DEMOS = {
    "dense": ("tiny-mimo2-f16.gguf", "tiny-mimo2-eagle3-f16.gguf"),
    "hybrid": ("tiny-qwen35-f16.gguf", "tiny-qwen35-eagle3-f16.gguf"),
}
"""File names of target and EAGLE-3 model, by the target's short name."""

N_DRAFT = 3
"""K where it is fixed."""

_SIMPLE = "tiny-draft-f16.gguf"


def draft_models(name: str) -> dict[str, Path]:
    """Returns the draft models of a demo model, by draft type."""
    return {"eagle3": MODELS / DEMOS[name][1], "simple": MODELS / _SIMPLE}
