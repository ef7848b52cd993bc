"""What the recipes of `models.archs` are made of: sizes, parts of blocks, and the recipe itself.

Shapes are in ggml's order, the inner width first, as llama.cpp's `create_tensor` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "CONV",
    "INNER",
    "LATENT",
    "MEAN",
    "MLA",
    "MOE",
    "N_CTX",
    "N_EMBD",
    "N_EXPERT",
    "N_FF",
    "N_HEAD",
    "N_HEAD_EMBD",
    "N_VOCAB",
    "N_WINDOW",
    "PLAIN",
    "RANK",
    "RMS",
    "ROTATED",
    "SSM",
    "STATE",
    "TWO_NORMS",
    "Longs",
    "Recipe",
    "Shape",
    "Shapes",
    "Value",
    "attention",
    "experts",
    "gated",
    "joined",
    "latent",
    "mamba2",
    "next_token",
    "norms",
    "plain_ff",
]

N_VOCAB = 128
N_CTX = 256
N_EMBD, N_HEAD, N_FF = 64, 2, 96
N_HEAD_EMBD = N_EMBD // N_HEAD
N_WINDOW = 24
N_EXPERT = 4
INNER, STATE, CONV, RANK = 2 * N_EMBD, 16, 4, 4
"""Of state-space models."""
LATENT, ROTATED, PLAIN = 32, 16, 16
"""Widths of latent attention (MLA): of the compressed row, and of a head's two parts."""


class Longs(tuple[int, ...]):
    """Numbers that a file keeps in 64 bits each."""

    __slots__ = ()


Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Value = bool | int | float | str | Longs | Sequence[int] | Sequence[float] | Sequence[bool]

RMS: Mapping[str, Value] = {"attention.layer_norm_rms_epsilon": 1e-5}
MEAN: Mapping[str, Value] = {"attention.layer_norm_epsilon": 1e-5}
MOE: Mapping[str, Value] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF,
}
MLA: Mapping[str, Value] = {
    "attention.q_lora_rank": LATENT,
    "attention.kv_lora_rank": LATENT,
    "attention.head_count_kv": 1,
    "attention.key_length": LATENT + ROTATED,
    "attention.value_length": LATENT,
    "attention.key_length_mla": PLAIN + ROTATED,
    "attention.value_length_mla": PLAIN,
    "rope.dimension_count": ROTATED,
}
SSM: Mapping[str, Value] = {
    "ssm.inner_size": INNER,
    "ssm.state_size": STATE,
    "ssm.conv_kernel": CONV,
    "ssm.time_step_rank": RANK,
}


def norms(*names: str, n: int = N_EMBD, has_bias: bool = False) -> Shapes:
    """Returns norms of these names."""
    weights: Shapes = {f"{name}.weight": (n,) for name in names}
    biases: Shapes = {f"{name}.bias": (n,) for name in names} if has_bias else {}
    return weights | biases


def attention(n_kv: int = N_HEAD, *, has_norm: bool = False) -> Shapes:
    """Returns ordinary attention, perhaps with norms of queries and keys."""
    n_query, n_key = N_HEAD * N_HEAD_EMBD, n_kv * N_HEAD_EMBD
    shapes = {
        "attn_q.weight": (N_EMBD, n_query),
        "attn_k.weight": (N_EMBD, n_key),
        "attn_v.weight": (N_EMBD, n_key),
        "attn_output.weight": (n_query, N_EMBD),
    }
    return shapes | (norms("attn_q_norm", "attn_k_norm", n=N_HEAD_EMBD) if has_norm else {})


def joined(*, has_bias: bool = False) -> Shapes:
    """Returns attention whose queries, keys and values come from one matrix."""
    shapes: Shapes = {
        "attn_qkv.weight": (N_EMBD, 3 * N_EMBD),
        "attn_output.weight": (N_EMBD, N_EMBD),
    }
    if has_bias:
        shapes |= {"attn_qkv.bias": (3 * N_EMBD,), "attn_output.bias": (N_EMBD,)}
    return shapes


def plain_ff(*, has_bias: bool) -> Shapes:
    """Returns a feed-forward part without a gate."""
    shapes: Shapes = {"ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
    return shapes | ({"ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)} if has_bias else {})


def gated(last: str = "") -> Shapes:
    """Returns a gated feed-forward part; `last` ends the names, as that of a shared expert."""
    return {
        f"ffn_gate{last}.weight": (N_EMBD, N_FF),
        f"ffn_up{last}.weight": (N_EMBD, N_FF),
        f"ffn_down{last}.weight": (N_FF, N_EMBD),
    }


def experts(*, has_bias: bool = False) -> Shapes:
    """Returns a router and its gated experts."""
    shapes: Shapes = {
        "ffn_gate_inp.weight": (N_EMBD, N_EXPERT),
        "ffn_gate_exps.weight": (N_EMBD, N_FF, N_EXPERT),
        "ffn_up_exps.weight": (N_EMBD, N_FF, N_EXPERT),
        "ffn_down_exps.weight": (N_FF, N_EMBD, N_EXPERT),
    }
    if has_bias:
        shapes |= {
            "ffn_gate_inp.bias": (N_EXPERT,),
            "ffn_gate_exps.bias": (N_FF, N_EXPERT),
            "ffn_up_exps.bias": (N_FF, N_EXPERT),
            "ffn_down_exps.bias": (N_EMBD, N_EXPERT),
        }
    return shapes


def next_token() -> Shapes:
    """Returns what an MTP block has besides an ordinary one."""
    return {
        "nextn.eh_proj.weight": (2 * N_EMBD, N_EMBD),
        **norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    }


TWO_NORMS = norms("attn_norm", "ffn_norm")


def mamba2() -> Shapes:
    """Returns a Mamba-2 layer with one group."""
    n_conv = INNER + 2 * STATE
    return {
        "ssm_in.weight": (N_EMBD, 2 * INNER + 2 * STATE + RANK),
        "ssm_conv1d.weight": (CONV, n_conv),
        "ssm_conv1d.bias": (n_conv,),
        "ssm_dt.bias": (RANK,),
        "ssm_a": (1, RANK),
        "ssm_d": (1, RANK),
        "ssm_norm.weight": (INNER, 1),
        "ssm_out.weight": (INNER, N_EMBD),
    }


def latent() -> Shapes:
    """Returns attention over one compressed row for all heads (MLA)."""
    return {
        "attn_q_a.weight": (N_EMBD, LATENT),
        "attn_q_a_norm.weight": (LATENT,),
        "attn_q_b.weight": (LATENT, N_HEAD * (PLAIN + ROTATED)),
        "attn_kv_a_mqa.weight": (N_EMBD, LATENT + ROTATED),
        "attn_kv_a_norm.weight": (LATENT,),
        "attn_k_b.weight": (PLAIN, LATENT, N_HEAD),
        "attn_v_b.weight": (LATENT, PLAIN, N_HEAD),
        "attn_output.weight": (N_HEAD * PLAIN, N_EMBD),
    }


@dataclass(frozen=True)
class Recipe:
    """What a model is made of."""

    arch: str
    """llama.cpp's name of the architecture."""

    kind: str
    """What is special about its memory, in a few words."""

    blocks: Sequence[Shapes]
    """Tensors of each block, by the name behind its number."""

    values: Mapping[str, Value] = field(default_factory=dict)
    """Metadata besides the sizes, by the name behind the architecture's; "/" begins a whole one."""

    rest: Shapes = field(default_factory=dict)
    """Tensors outside blocks, besides token table, last norm and head."""

    has_output: bool = True
    """Whether the head is a tensor of its own."""

    has_output_norm: bool = True
    """Whether there is a last norm of the usual name."""

    has_biases: bool = False
    """Whether that norm has a bias: it subtracts the mean too."""

    scale: Mapping[str, float] = field(default_factory=dict)
    """Factors of tensors by the end of their names: many layers must not amplify roundings."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """By how the names of an MTP block's tensors begin: how those begin that it is a copy of, so
    that some of its drafts are right. Its projection then goes on mostly from the token."""
