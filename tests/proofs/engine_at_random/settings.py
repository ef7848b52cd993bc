"""An engine drawn at random: target, drafter, cells, bounds."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.support.block_draft import block_draft
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS
from tests.support.windows import windowed

from drafthouse_engine import (
    DRAFT_TYPES,
    CacheParams,
    CacheType,
    DraftType,
    Engine,
    EngineParams,
    Model,
    Placement,
)

__all__ = ["NEEDS_PROCESS", "TARGET_KINDS", "Settings", "drawn_settings"]

TARGET_KINDS: Final = ("dense", "hybrid", "windowed")
NEEDS_PROCESS: Final = ("mtp", "eagle3", "simple", "dflash", "dspark")
"""Drafters that compute: decodes by hand are fed to them by `Engine.process`."""
N_UNIFIED = 4
"""One engine of so many has one pool of cells."""
_CELLS: Final[tuple[tuple[CacheType, CacheType], ...]] = (
    *((("f16", "f16"),) * 3),
    ("f32", "f32"),
    ("bf16", "f16"),
    ("q8_0", "q8_0"),
    ("q4_0", "q8_0"),
)
_folder = tempfile.TemporaryDirectory(prefix="drafthouse-drafts-")


@dataclass(frozen=True)
class Settings:
    """An engine, and how its answers are compared."""

    target: str
    """One of `TARGET_KINDS`."""
    n_window: int
    """Tokens that a windowed target looks back; 0 of the others."""
    params: EngineParams
    """Those of the engine."""

    @property
    def is_exact(self) -> bool:
        """Whether answers are equal to the last bit; else two tokens that are equally likely tie.

        Caches that keep a window alone, and attention without the fused kernel, take cells in
        another order after a snapshot: sums round otherwise.
        """
        params = self.params
        return params.exact and params.cache.swa_full and params.flash_attention

    def model(self) -> Model:
        """Returns the target, loaded once, in host memory whatever devices there are."""
        return _loaded(windowed(self.n_window) if self.n_window else MODELS / TARGETS[self.target])

    def engine(self) -> Engine:
        """Makes the engine."""
        return Engine(self.model(), self._draft(), self.params)

    def alone(self) -> Engine:
        """Makes an engine for one sequence, which drafts nothing and computes prompts at once."""
        one = replace(
            self.params,
            draft_type="none",
            n_draft_max=0,
            n_seq_max=1,
            n_ctx=0,
            n_batch=512,
            n_ubatch=512,
            n_rs_seq=-1,
            n_threads=1,
            p_min=0.0,
            kv_unified=False,
            probabilistic=False,
        )
        return Engine(self.model(), None, one)

    def _draft(self) -> Model | None:
        kind = self.params.draft_type
        if kind == "eagle3":
            return _loaded(MODELS / EAGLE3["hybrid" if self.target == "hybrid" else "dense"])
        if kind == "simple":
            return _loaded(MODELS / SIMPLE)
        if kind in {"dflash", "dspark"}:
            return _loaded(_block_draft(kind))
        return None


def drawn_settings(seed: int) -> Settings:
    """Draws an engine; 132 seeds in a row have every target with every drafter in both caches."""
    chance = random.Random(f"settings {seed}")
    target = TARGET_KINDS[seed % len(TARGET_KINDS)]
    draft_type = DRAFT_TYPES[seed % len(DRAFT_TYPES)]
    n_window = chance.choice((5, 16, 64)) if target == "windowed" else 0
    is_unified = seed % N_UNIFIED == N_UNIFIED - 1
    is_exact = not is_unified and chance.random() < 0.9
    params = EngineParams(
        draft_type=draft_type,
        n_threads=chance.choice((1, 1, 1, 2)),
        exact=is_exact,
        kv_unified=is_unified,
        probabilistic=draft_type in {"mtp", "simple"} and chance.random() < 0.5,
        p_min=chance.choice((0.0, 0.0, 0.3)),
        **_cells(chance, target, is_exact=is_exact),
        **_bounds(chance, draft_type, is_unified=is_unified),
    )
    return Settings(target, n_window, params)


def _cells(chance: random.Random, target: str, *, is_exact: bool) -> dict[str, Any]:
    """Draws what cells are; numbers of few bits only where a tie need not be told from a fault."""
    has_flash = chance.random() < 0.9
    swa_full = target != "windowed" or chance.random() < 0.6
    kinds = _CELLS if is_exact and has_flash and swa_full else _CELLS[:1]
    type_k, type_v = chance.choice(kinds)
    cache = CacheParams(type_k=type_k, type_v=type_v, swa_full=swa_full)
    return {"flash_attention": has_flash, "cache": cache}


def _bounds(chance: random.Random, draft_type: DraftType, *, is_unified: bool) -> dict[str, Any]:
    """Draws how many tokens and sequences there may be, within the engine's rules."""
    n_draft = 0 if draft_type == "none" else chance.choice((1, 2, 3, 5, 7))
    n_seq = chance.choice((1, 2, 3, 5, 8, 16, 64))
    n_rs_seq = chance.choice((-1, -1, 0, 1, 2))
    n_ctx_seq = chance.choice((48, 64, 100, 256, 300))
    n_ubatch = max(chance.choice((1, 7, 16, 33, 96)), 2 + max(n_draft, n_rs_seq))
    n_batch = max(chance.choice((1, 3, 7, 16, 33, 96, 256)), n_ubatch, n_seq * (1 + n_draft))
    n_ctx = chance.choice((1, 2, n_seq)) * n_ctx_seq if is_unified else 0
    return {
        "n_draft_max": n_draft,
        "n_seq_max": n_seq,
        "n_rs_seq": n_rs_seq,
        "n_ctx_seq": n_ctx_seq,
        "n_ctx": min(n_ctx, n_seq * n_ctx_seq),
        "n_ubatch": n_ubatch,
        "n_batch": n_batch,
    }


@cache
def _loaded(path: Path) -> Model:
    return Model(path, placement=Placement(devices=()))


@cache
def _block_draft(kind: str) -> Path:
    path = Path(_folder.name) / f"{kind}.gguf"
    if kind == "dspark":
        return block_draft(path, markov_rank=8, has_confidence=True)
    return block_draft(path)
