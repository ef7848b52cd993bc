"""Capacities of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from drafthouse_engine.options import DraftType

__all__ = ["BreakerStats", "DraftWork", "EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine offers; llama.cpp may have made it other than `EngineParams` asked."""

    draft_type: DraftType
    """How drafts are made."""
    n_ctx: int
    """KV cells of all sequences together."""
    n_ctx_seq: int
    """Most tokens of one sequence."""
    n_batch: int
    """Most tokens of one step, drafts included."""
    n_ubatch: int
    """Most tokens of one physical batch."""
    n_seq_max: int
    """Sequences at once; ids are [0, n_seq_max)."""
    n_draft_max: int
    """Most drafted tokens of one sequence and step; 0 without speculation."""
    n_outputs_max: int
    """Most sampled positions of one step: the sum of 1 + n_draft over its outputs."""
    n_rs_seq: int
    """Tokens that a recurrent target can go back; 0 is none, or the target is not recurrent."""
    n_vocab: int
    """Token ids are [0, n_vocab)."""
    kv_unified: bool
    """Whether all sequences share one pool of cells."""
    has_checkpoints: bool
    """Whether rollbacks beyond n_rs_seq restore a checkpoint and decode again."""
    n_window: int
    """Tokens that the target's sliding windows look back; 0: it has none. Of a snapshot with more
    tokens a start keeps all, or all but the last."""
    n_window_cells: int
    """Cells that a sequence has in such layers, which keep its last tokens alone (`swa_full` off);
    0: as many as in others. One pool of all sequences promises the window alone."""


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """What finding the DRY breakers of samplers has cost a model; those used last are kept."""

    n_searched: int
    """Texts that the vocabulary was searched for."""
    n_bytes: int
    """Bytes that the kept ones take, at most 32 MiB."""
    n_held: int
    """Texts that are kept, at most 256."""


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What drafting has cost since an engine was made, as its draft context shows it.

    All 0 for engines without a draft context: none, and the n-gram kinds.
    """

    n_drafts: int
    """Drafts asked for, over all sequences."""
    n_positions: int
    """Tokens that the draft model computed for them. A draft of K tokens costs K with mtp, eagle3
    and simple; with dflash and dspark it costs the block, whatever K."""
    n_passes: int
    """Decodes of the draft model; sequences that draft together share them, so that it is their
    greatest K, or 1 with dflash and dspark."""
