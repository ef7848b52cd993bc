"""DFlash and DSpark draft models with random weights, written in a second; nobody trained them.

They show that everything around such a model is right: what it is asked, what becomes of its
drafts. How good drafts of a trained one are they cannot show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter
from models.vocabulary import add_vocabulary

MODELS = Path(__file__).resolve().parents[2] / "models"
N_VOCAB, N_EMBD, N_HEAD, N_HEAD_KV, N_EMBD_HEAD, N_FF = 2048, 256, 4, 2, 64, 128
MASK = 3
"""The demo tokenizer's padding, which no text has."""
SELECTOR_TOP_K, SELECTOR_RANK, CONV_KERNEL, CONV_GROUP = 4, 16, 3, 64
"""DFlash 2: candidates of each place, width of their comparison, taps and groups of its
convolutions."""

Weights = dict[str, npt.NDArray[Any]]


def block_draft(
    path: Path,
    *,
    n_layer: int = 2,
    n_embd: int = N_EMBD,
    layers: tuple[int, ...] = (1, 3, 5),
    markov_rank: int = 0,
    has_confidence: bool = False,
    has_selector: bool = False,
    has_own_tables: bool = False,
    seed: int = 0,
    keys: dict[str, Any] | None = None,
    weights: Weights | None = None,
) -> Path:
    """Writes a draft model for the demo targets.

    Args:
        path: file to write.
        n_layer: its layers.
        n_embd: width of its rows; that of the target, if it shall fit.
        layers: layers of the target whose inputs it reads.
        markov_rank: > 0 makes it a DSpark model.
        has_confidence: a DSpark model with a confidence head.
        has_selector: a DFlash 2 model.
        has_own_tables: token table and output matrix of its own; else the target's.
        seed: of the random weights.
        keys: metadata that differs, without the prefix `dflash.`; None drops a key. The key `mask`
            is the mask token.
        weights: tensors that differ.

    Returns:
        The path.
    """
    rng = np.random.default_rng(seed)
    tensors = _trunk(rng, n_layer, n_embd, len(layers))
    if has_own_tables:
        tensors["token_embd.weight"] = _matrix(rng, N_VOCAB, n_embd)
        tensors["output.weight"] = _matrix(rng, N_VOCAB, n_embd)
    if markov_rank:
        tensors["markov_w1.weight"] = _matrix(rng, N_VOCAB, markov_rank)
        tensors["markov_w2.weight"] = _matrix(rng, N_VOCAB, markov_rank)
    if has_confidence:
        tensors["conf_proj.weight"] = _matrix(rng, 1, n_embd + markov_rank)
    if has_selector:
        tensors |= _selector(rng, n_layer, n_embd)
    metadata: dict[str, Any] = {"block_size": 8, "target_layers": list(layers), "mask": MASK}
    if has_selector:
        metadata |= {
            "selector_top_k": SELECTOR_TOP_K,
            "selector_rank": SELECTOR_RANK,
            "conv_kernel_size": CONV_KERNEL,
            "conv_group_size": CONV_GROUP,
        }
    _write(path, n_layer, n_embd, metadata | (keys or {}), tensors | (weights or {}))
    return path


def plain_target(path: Path) -> Path:
    """Writes a target of an architecture whose layers llama.cpp does not show; returns the path."""
    rng = np.random.default_rng(0)
    tensors = _trunk(rng, 6, N_EMBD, 1)
    for name in list(tensors):
        if name.startswith(("fc", "enc")) or ("_norm" in name and "attn_norm" not in name):
            del tensors[name]
    for i in range(6):
        tensors[f"blk.{i}.ffn_norm.weight"] = np.ones(N_EMBD, np.float32)
    tensors["output_norm.weight"] = np.ones(N_EMBD, np.float32)
    for name in ("token_embd", "output"):
        tensors[f"{name}.weight"] = _matrix(rng, N_VOCAB, N_EMBD)
    _write(path, 6, N_EMBD, {"mask": None}, tensors, arch="internlm2")
    return path


def repeating(token: int) -> Weights:
    """Returns weights of a draft with own tables whose every draft is one token again and again."""
    table = np.zeros((N_VOCAB, N_EMBD), np.float32)
    table[MASK] = 1.0  # what a masked place holds …
    output = np.zeros((N_VOCAB, N_EMBD), np.float32)
    output[token] = 1.0  # … points at the token
    still = {
        f"blk.{i}.{name}.weight": np.zeros(shape, np.float32)
        for i in range(2)
        for name, shape in (
            ("attn_output", (N_EMBD, N_HEAD * N_EMBD_HEAD)),
            ("ffn_down", (N_EMBD, N_FF)),
        )
    }
    return still | {"token_embd.weight": table, "output.weight": output}


def following(successors: dict[int, int]) -> Weights:
    """Returns weights of a DSpark draft, rank N_VOCAB, that drafts each token's given successor."""
    after = np.zeros((N_VOCAB, N_VOCAB), np.float16)
    for token, successor in successors.items():
        after[successor, token] = 1000.0
    return {"markov_w1.weight": np.eye(N_VOCAB, dtype=np.float16), "markov_w2.weight": after}


def _matrix(rng: np.random.Generator, n_rows: int, n_columns: int) -> npt.NDArray[np.float16]:
    scale = np.sqrt(n_columns)
    return np.asarray(rng.standard_normal((n_rows, n_columns)) / scale, np.float16)


def _trunk(rng: np.random.Generator, n_layer: int, n_embd: int, n_read: int) -> Weights:
    n_query, n_kv = N_HEAD * N_EMBD_HEAD, N_HEAD_KV * N_EMBD_HEAD
    tensors: Weights = {
        "fc.weight": _matrix(rng, n_embd, n_read * n_embd),
        "enc.output_norm.weight": np.ones(n_embd, np.float32),
        "output_norm.weight": np.ones(n_embd, np.float32),
    }
    shapes = {
        "attn_q": (n_query, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_query), "ffn_gate": (N_FF, n_embd), "ffn_up": (N_FF, n_embd),
        "ffn_down": (n_embd, N_FF),
    }  # fmt: skip
    widths = {"attn_norm": n_embd, "ffn_norm": n_embd, "attn_q_norm": 64, "attn_k_norm": 64}
    for i in range(n_layer):
        for name, (n_rows, n_columns) in shapes.items():
            # Attention outweighs the row itself, so that a draft depends on what it reads.
            share = 4 if name == "attn_output" else 1
            tensors[f"blk.{i}.{name}.weight"] = share * _matrix(rng, n_rows, n_columns)
        for name, width in widths.items():
            tensors[f"blk.{i}.{name}.weight"] = np.ones(width, np.float32)
    return tensors


def _selector(rng: np.random.Generator, n_layer: int, n_embd: int) -> Weights:
    tensors: Weights = {
        "selector_predecessor.weight": _matrix(rng, N_VOCAB, SELECTOR_RANK),
        "selector_successor.weight": _matrix(rng, N_VOCAB, SELECTOR_RANK),
        "selector_hidden.weight": _matrix(rng, SELECTOR_RANK, n_embd),
    }
    n_projected = 2 * CONV_KERNEL * (n_embd // CONV_GROUP)
    for i in range(n_layer):
        for part in ("attn", "ffn"):
            base = np.zeros((2, CONV_KERNEL, n_embd), np.float32)
            base[:, 0] = 1.0
            tensors[f"blk.{i}.{part}_conv_base"] = base
            tensors[f"blk.{i}.{part}_conv_proj.weight"] = _matrix(rng, n_projected, n_embd) / 8
    return tensors


def _write(
    path: Path,
    n_layer: int,
    n_embd: int,
    metadata: dict[str, Any],
    tensors: Weights,
    *,
    arch: str = "dflash",
) -> None:
    writer = GGUFWriter(path, arch)
    writer.add_name("block draft")
    writer.add_context_length(1024)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(N_EMBD_HEAD)
    writer.add_value_length(metadata.pop("value_length", N_EMBD_HEAD))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(N_EMBD_HEAD)
    add_vocabulary(writer, MODELS / "tokenizer.json", N_VOCAB)
    if (mask := metadata.pop("mask")) is not None:
        writer.add_mask_token_id(mask)
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(f"dflash.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"dflash.{name}", value)
        elif isinstance(value, list):
            writer.add_array(f"dflash.{name}", value)
        elif value is not None:
            writer.add_string(f"dflash.{name}", value)
    for name, tensor in tensors.items():
        if tensor is not None:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
