"""Recipes of encoders, which make embeddings and keep no tokens in a cache.

Source: llama.cpp src/models/{bert,nomic-bert,jina-bert-v2,modern-bert,neo-bert,eurobert,
gemma-embedding}.cpp@b11549.
"""

from __future__ import annotations

from collections.abc import Mapping

from models.arch_parts import (
    MEAN,
    N_CTX,
    N_EMBD,
    N_FF,
    N_WINDOW,
    RMS,
    TWO_NORMS,
    Recipe,
    Shapes,
    Value,
    attention,
    gated,
    joined,
    norms,
    plain_ff,
)

__all__ = ["ENCODER_RECIPES"]

_KIND = "encoder: no cache"
_ALL: Mapping[str, Value] = {"attention.causal": False}
_TYPED: Mapping[str, Value] = {**MEAN, **_ALL, "/tokenizer.ggml.token_type_count": 2}
_TYPES: Shapes = {
    "token_types.weight": (N_EMBD, 2),
    **norms("token_embd_norm", has_bias=True),
}
_AFTER = norms("attn_output_norm", "layer_output_norm", has_bias=True)
"""Norms that stand behind what they belong to."""
_DOUBLE: Shapes = {"ffn_up.weight": (N_EMBD, 2 * N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
"""A gated feed-forward part whose first two matrices are one."""

ENCODER_RECIPES: Mapping[str, Recipe] = {
    "bert": Recipe(
        "bert",
        _KIND,
        [attention() | _AFTER | plain_ff(has_bias=True)] * 2,
        _TYPED,
        {**_TYPES, "position_embd.weight": (N_EMBD, N_CTX)},
        has_output=False,
        has_output_norm=False,
    ),
    "nomic-bert": Recipe(
        "nomic-bert",
        _KIND,
        [attention() | _AFTER | gated()] * 2,
        _TYPED,
        _TYPES,
        has_output=False,
        has_output_norm=False,
    ),
    "jina-bert-v2": Recipe(
        "jina-bert-v2",
        "encoder: no cache, ALiBi",
        [
            attention()
            | _AFTER
            | gated()
            | {"attn_output.bias": (N_EMBD,), "ffn_down.bias": (N_EMBD,)}
        ]
        * 2,
        _TYPED,
        _TYPES,
        has_output=False,
        has_output_norm=False,
    ),
    "modern-bert": Recipe(
        "modern-bert",
        "encoder: no cache, window on both sides",
        [
            (norms("attn_norm", "ffn_norm") if i else norms("ffn_norm")) | joined() | _DOUBLE
            for i in range(3)
        ],
        {
            **MEAN,
            **_ALL,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": 3,
        },
        norms("token_embd_norm"),
        has_output=False,
    ),
    "neo-bert": Recipe(
        "neo-bert",
        _KIND,
        [TWO_NORMS | joined() | _DOUBLE] * 2,
        {**RMS, **_ALL},
        norms("enc.output_norm"),
        has_output=False,
        has_output_norm=False,
    ),
    "eurobert": Recipe(
        "eurobert",
        _KIND,
        [TWO_NORMS | attention() | gated()] * 2,
        {**RMS, **_ALL},
        has_output=False,
    ),
    "gemma-embedding": Recipe(
        "gemma-embedding",
        "encoder: no cache, window on both sides",
        [
            norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            | attention(has_norm=True)
            | gated()
        ]
        * 2,
        {
            **RMS,
            **_ALL,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": 2,
        },
        has_output=False,
    ),
}
"""What can be written, by name."""
