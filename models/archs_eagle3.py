"""A tiny EAGLE-3 drafter for any target, with random weights, and right now and then.

A drafter that was not trained is never right, and then nothing is taken back or kept in its cache.
So this one knows by heart which token follows which: its attention is sharp, so that the row of the
last token is mostly that token's embedding, and its head has a direction for each pair. All else is
random and small: what it reads of the target moves its logits a little.

Source: llama.cpp src/models/eagle3.cpp@b11549.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter

from models.archs import add_byte_vocabulary, sized

__all__ = ["layers_of", "write_eagle3"]

N_CTX = 1024
SHARPNESS = 2.0
"""Gain of queries and keys: a token's key is their own square above all others."""
FEATURE_SHARE = 0.1
"""Length of the target's row in a token's row of length 1, and of the random rest."""
HEIGHT = 10.0
"""Logit of a pair that is known."""

Rows = npt.NDArray[np.float32]


def write_eagle3(path: Path, target: Path, following: Mapping[int, int]) -> Path:
    """Writes a drafter for a target and returns its path; the same arguments give the same bytes.

    Args:
        path: The file.
        target: A model whose tokens are those of `add_byte_vocabulary`.
        following: By token, the token that is drafted after it; after others any token.
    """
    header = GGUFReader(target).fields
    arch = header["general.architecture"].contents()
    n_embd = int(header[f"{arch}.embedding_length"].contents())
    n_vocab = len(header["tokenizer.ggml.tokens"].data)
    writer = GGUFWriter(path, "eagle3")
    add_byte_vocabulary(writer, n_vocab)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(n_embd)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(n_embd)
    writer.add_value_length(n_embd)
    writer.add_rope_dimension_count(n_embd)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.target_layers", layers_of(target))
    writer.add_uint32("eagle3.target_hidden_size", n_embd)
    writer.add_bool("eagle3.norm_before_residual", True)
    for name, values in _weights(n_embd, n_vocab, following).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layers_of(target: Path) -> list[int]:
    """Returns the three layers of a target whose inputs are read: first, middle, last."""
    header = GGUFReader(target).fields
    arch = header["general.architecture"].contents()
    nextn = header.get(f"{arch}.nextn_predict_layers")
    n_layer = int(header[f"{arch}.block_count"].contents())
    n_layer -= int(nextn.contents()) if nextn is not None else 0
    return [0, n_layer // 2, n_layer - 1]


def _weights(n_embd: int, n_vocab: int, following: Mapping[int, int]) -> dict[str, Rows]:
    tokens = _draw("token_embd.weight", n_vocab, n_embd)
    tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))  # as the norm before attention does
    one, blank = np.eye(n_embd, dtype=np.float32), np.zeros((n_embd, n_embd), np.float32)
    sharp, ones = SHARPNESS * np.hstack([one, blank]), np.ones(n_embd, np.float32)
    feed = {name: sized(name, _draw(name, n_embd, n_embd)) for name in ("ffn_gate", "ffn_up")}
    feed["ffn_down"] = FEATURE_SHARE * sized("ffn_down", _draw("ffn_down", n_embd, n_embd))
    return {
        "token_embd.weight": tokens,
        "fc.weight": sized("fc.weight", _draw("fc.weight", n_embd, 3 * n_embd)),
        "blk.0.attn_norm.weight": ones,
        "blk.0.attn_norm_2.weight": FEATURE_SHARE * ones,
        "blk.0.attn_q.weight": sharp,
        "blk.0.attn_k.weight": sharp,
        "blk.0.attn_v.weight": np.hstack([one, _draw("attn_v", n_embd, n_embd)]),
        "blk.0.attn_output.weight": one,
        "blk.0.ffn_norm.weight": ones,
        **{f"blk.0.{name}.weight": values for name, values in feed.items()},
        "output_norm.weight": ones,
        "output.weight": _head(tokens, following),
    }


def _head(tokens: Rows, following: Mapping[int, int]) -> Rows:
    n_vocab, n_embd = tokens.shape
    others = random.Random(n_vocab).choices(range(n_vocab), k=n_vocab)
    head = np.zeros_like(tokens)
    for token in range(n_vocab):
        head[following.get(token, others[token])] += tokens[token]
    return head * np.float32(HEIGHT / n_embd)


def _draw(name: str, n_rows: int, n_columns: int) -> Rows:
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    return chance.normal(0.0, 0.1, (n_rows, n_columns)).astype(np.float32)
