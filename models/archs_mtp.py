"""Recipes of models with MTP (next-token) blocks: one for each architecture that has them.

Of hy_v3 there is one with two blocks besides, which draft one after the other.

Each has a first block whose output is small, a second one, and an MTP block that is a copy of the
second: so some of its drafts are right, and others wrong.

Source: llama.cpp src/models/*.cpp@b11549.
"""

from __future__ import annotations

from collections.abc import Mapping

from models.arch_parts import (
    CONV,
    LATENT,
    MEAN,
    MLA,
    MOE,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD,
    N_HEAD_EMBD,
    N_VOCAB,
    N_WINDOW,
    PLAIN,
    RMS,
    ROTATED,
    SSM,
    TWO_NORMS,
    Longs,
    Recipe,
    Shapes,
    Value,
    attention,
    experts,
    gated,
    latent,
    mamba2,
    next_token,
    norms,
)

__all__ = ["MTP_RECIPES"]

_NEXT: Mapping[str, Value] = {"nextn_predict_layers": 1}
_TOKEN, _MIXER, _FEED = 8.0, 0.6, 0.1
"""Factors of the token table and of what the first block adds: the more of the sum is the token,
the more drafts are right."""
_QUERY, _READ = 0.4, 10.0
"""Factors of the second block's attention: it reads many tokens, and what it reads matters."""
_SCALE: Mapping[str, float] = {
    "token_embd.weight": _TOKEN,
    "blk.0.attn_output.weight": _MIXER,
    "blk.0.ssm_out.weight": _MIXER,
    "blk.0.ffn_down.weight": _FEED,
    "blk.0.ffn_down_exps.weight": _FEED,
    "blk.0.ffn_down_shexp.weight": _FEED,
    "blk.1.attn_q.weight": _QUERY,
    "blk.1.attn_q_b.weight": _QUERY,
    "blk.1.attn_output.weight": _READ,
}


def _copies(mtp: int, last: int) -> dict[str, str]:
    return {
        f"blk.{mtp}.nextn.shared_head_norm.": "output_norm.",
        f"blk.{mtp}.": f"blk.{last}.",
    }


# --- latent attention: DeepSeek 2 to 3.2, GLM 5

_BIAS: Shapes = {"exp_probs_b.bias": (N_EXPERT,)}
_SHARED = experts() | gated(last="_shexp")
_LATENT_MOE = TWO_NORMS | latent() | _SHARED | _BIAS
_ONE_DENSE: Mapping[str, Value] = {
    **MOE,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 2,
}
_MLA_NEXT: Mapping[str, Value] = {
    **RMS,
    **_ONE_DENSE,
    **_NEXT,
    **MLA,
}
_N_INDEXER, _INDEXER = 16, 64
"""Heads of an indexer, and their width. With few heads many tokens score 0, and who of them is
read depends on where they lie."""
_N_READ = 64
"""Tokens that an indexer chooses: fewer than the longest prompts have."""
_INDEXED: Mapping[str, Value] = {
    "attention.indexer.head_count": _N_INDEXER,
    "attention.indexer.key_length": _INDEXER,
    "attention.indexer.top_k": _N_READ,
}


def _indexer() -> Shapes:
    return {
        **norms("indexer.k_norm", n=_INDEXER, has_bias=True),
        "indexer.proj.weight": (N_EMBD, _N_INDEXER),
        "indexer.attn_k.weight": (N_EMBD, _INDEXER),
        "indexer.attn_q_b.weight": (LATENT, _N_INDEXER * _INDEXER),
    }


def _sparse(arch: str, name: str) -> Recipe:
    dense, moe = TWO_NORMS | latent() | gated(), _LATENT_MOE
    return Recipe(
        arch,
        f"{name}: latent attention with an indexer, experts, next-token block",
        [dense | _indexer(), moe | _indexer(), moe | _indexer() | next_token()],
        {**_MLA_NEXT, **_INDEXED},
        copies=_copies(2, 1),
        scale=_SCALE,
    )


# --- gated delta nets: Qwen3-Next, Qwen3.5, Qwen4

_N_KEYS, _N_VALUES, _DELTA = 2, 4, 16
_DELTA_KEYS, _DELTA_VALUES = _N_KEYS * _DELTA, _N_VALUES * _DELTA
_DELTA_NET: Mapping[str, Value] = {
    **RMS,
    **MOE,
    **_NEXT,
    "expert_shared_feed_forward_length": N_FF,
    "full_attention_interval": 2,
    "ssm.conv_kernel": CONV,
    "ssm.inner_size": _DELTA_VALUES,
    "ssm.state_size": _DELTA,
    "ssm.time_step_rank": _N_VALUES,
    "ssm.group_count": _N_KEYS,
}
_SECTIONS: Mapping[str, Value] = {"rope.dimension_sections": [8, 4, 4, 0]}
_QWEN_MOE = _SHARED | {"ffn_gate_inp_shexp.weight": (N_EMBD,)}
_QWEN_NORMS = norms("attn_norm", "post_attention_norm")


def _delta_net(*, is_joined: bool) -> Shapes:
    n_conv = 2 * _DELTA_KEYS + _DELTA_VALUES
    rates: Shapes = {
        "ssm_alpha.weight": (N_EMBD, _N_VALUES),
        "ssm_beta.weight": (N_EMBD, _N_VALUES),
    }
    return {
        "attn_qkv.weight": (N_EMBD, n_conv),
        "attn_gate.weight": (N_EMBD, _DELTA_VALUES),
        "ssm_conv1d.weight": (CONV, n_conv),
        "ssm_dt.bias": (_N_VALUES,),
        "ssm_a": (_N_VALUES,),
        **({"ssm_ba.weight": (N_EMBD, 2 * _N_VALUES)} if is_joined else rates),
        "ssm_norm.weight": (_DELTA,),
        "ssm_out.weight": (_DELTA_VALUES, N_EMBD),
    }


def _gated_attention() -> Shapes:
    return attention(has_norm=True) | {"attn_q.weight": (N_EMBD, 2 * N_HEAD * N_HEAD_EMBD)}


def _qwen(arch: str, *, is_joined: bool) -> Recipe:
    full = _QWEN_NORMS | _gated_attention() | _QWEN_MOE
    return Recipe(
        arch,
        "hybrid: attention and gated delta nets, experts, next-token block",
        [
            _QWEN_NORMS | _delta_net(is_joined=is_joined) | _QWEN_MOE,
            full,
            full | next_token(),
        ],
        {**_DELTA_NET, **({} if is_joined else _SECTIONS)},
        copies=_copies(2, 1),
        scale=_SCALE,
    )


# --- delta attention of Kimi: Ling 3, GLM 5.3

_KDA_HEAD = 32
_KDA = N_HEAD * _KDA_HEAD
_KDA_VALUES: Mapping[str, Value] = {
    "ssm.conv_kernel": CONV,
    "kda.head_dim": _KDA_HEAD,
    "kda.gate_lower_bound": -5.0,
}


def _kimi_delta() -> Shapes:
    return {
        **{f"ssm_conv1d_{which}.weight": (CONV, 1, _KDA) for which in "qkv"},
        **{f"attn_{which}.weight": (N_EMBD, _KDA) for which in "qkv"},
        "ssm_beta.weight": (N_EMBD, N_HEAD),
        "ssm_dt.bias": (_KDA,),
        "ssm_norm.weight": (_KDA_HEAD,),
        "attn_output.weight": (_KDA, N_EMBD),
    }


_LING_DELTA: Shapes = {
    "ssm_f_a.weight": (N_EMBD, _KDA),
    "ssm_g_a.weight": (N_EMBD, _KDA),
    "ssm_a": (1, N_HEAD),
}
_LING = _LATENT_MOE | {"attn_gate.weight": (N_EMBD, N_HEAD)}
_GLM_DELTA: Shapes = {
    "ssm_f_a.weight": (N_EMBD, _KDA_HEAD),
    "ssm_f_b.weight": (_KDA_HEAD, _KDA),
    "ssm_g_a.weight": (N_EMBD, _KDA_HEAD),
    "ssm_g_b.weight": (_KDA_HEAD, _KDA),
    "ssm_a": (N_HEAD,),
}
_N_POOLED = 4
_GLM_INDEXER: Shapes = {
    **_indexer(),
    "indexer_compressor_gate.weight": (N_EMBD, _INDEXER),
    "indexer_compressor_ape.weight": (_INDEXER, _N_POOLED),
}

# --- several residual streams: GLM 5.3, DeepSeek 4, Qwen4

_N_STREAMS = 4
_STREAMS = _N_STREAMS * N_EMBD
_MIXED = (2 + _N_STREAMS) * _N_STREAMS
_STREAM_VALUES: Mapping[str, Value] = {
    "hyper_connection.count": _N_STREAMS,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}


def _streams() -> Shapes:
    return {
        f"hc_{part}_{name}.weight": shape
        for part in ("attn", "ffn")
        for name, shape in (
            ("fn", (_STREAMS, _MIXED)),
            ("base", (_MIXED,)),
            ("scale", (3,)),
        )
    }


def _glm_latent() -> Shapes:
    """Returns latent attention of which nothing is rotated."""
    return latent() | {
        "attn_kv_a_mqa.weight": (N_EMBD, LATENT),
        "attn_k_b.weight": (PLAIN + ROTATED, LATENT, N_HEAD),
    }


# --- DeepSeek 4

_N_GROUPS, _OUT = 2, 16


def _deepseek4(ratio: int = 0) -> Shapes:
    shapes: Shapes = {
        **TWO_NORMS,
        **_SHARED,
        **_BIAS,
        **_streams(),
        **norms("attn_q_a_norm", n=LATENT),
        **norms("attn_kv_a_norm", n=N_HEAD_EMBD),
        "attn_sinks.weight": (N_HEAD,),
        "attn_q_a.weight": (N_EMBD, LATENT),
        "attn_q_b.weight": (LATENT, N_HEAD * N_HEAD_EMBD),
        "attn_kv.weight": (N_EMBD, N_HEAD_EMBD),
        "attn_output_a.weight": (N_HEAD * N_HEAD_EMBD // _N_GROUPS, _N_GROUPS * _OUT),
        "attn_output_b.weight": (_N_GROUPS * _OUT, N_EMBD),
    }
    if not ratio:
        return shapes
    is_indexed = ratio == _N_POOLED
    n = (2 if is_indexed else 1) * N_HEAD_EMBD
    shapes |= {
        "attn_compressor_kv.weight": (N_EMBD, n),
        "attn_compressor_gate.weight": (N_EMBD, n),
        "attn_compressor_ape.weight": (n, ratio),
        **norms("attn_compressor_norm", n=N_HEAD_EMBD),
    }
    if is_indexed:
        shapes |= {
            "indexer.proj.weight": (N_EMBD, _N_INDEXER),
            "indexer.attn_q_b.weight": (LATENT, _N_INDEXER * _INDEXER),
            "indexer_compressor_kv.weight": (N_EMBD, 2 * _INDEXER),
            "indexer_compressor_gate.weight": (N_EMBD, 2 * _INDEXER),
            "indexer_compressor_ape.weight": (2 * _INDEXER, ratio),
            **norms("indexer_compressor_norm", n=_INDEXER),
        }
    return shapes


# --- Qwen4

_N_LOW, _N_GRAM, _N_GRAM_HEADS = 8, 3, 2
_N_TABLES = (_N_GRAM - 1) * _N_GRAM_HEADS


def _low_rank(name: str) -> Shapes:
    return {
        f"{name}_norm.weight": (_STREAMS,),
        f"{name}_down.weight": (_STREAMS, _N_LOW),
        f"{name}_up.weight": (_N_LOW, _STREAMS),
    }


def _qwen4(mixer: Shapes) -> Shapes:
    return {
        **_low_rank("hc_attn"),
        **_low_rank("hc_ffn"),
        "hc_attn_inject.weight": (_STREAMS, _N_STREAMS),
        "hc_ffn_inject.weight": (_STREAMS, _N_STREAMS),
        **mixer,
        **_QWEN_MOE,
    }


_QWEN4_FULL = _qwen4(
    {
        **_gated_attention(),
        "indexer.q_proj.weight": (N_EMBD, _N_INDEXER * _INDEXER),
        "indexer.k_proj.weight": (N_EMBD, _INDEXER),
        **norms("indexer.q_norm", "indexer.k_norm", n=_INDEXER),
    }
)
_QWEN4_GRAMS: Shapes = {
    "ple_key.weight": (N_EMBD, _STREAMS),
    "ple_value.weight": (N_EMBD, N_EMBD),
    **norms("ple_norm_key", "ple_norm_query", "ple_norm_conv", n=_STREAMS),
    "ple_conv1d.weight": (CONV, _STREAMS),
}
_QWEN4_NEXT: Shapes = {
    "nextn.eh_proj.weight": (2 * N_EMBD, N_EMBD),
    **norms("nextn.enorm"),
    **norms("nextn.hnorm", n=_STREAMS),
    **_low_rank("nextn.hc_head"),
}

# --- others

_HY = TWO_NORMS | attention(has_norm=True)
_HY_MOE = _HY | _SHARED | {"exp_probs_b": (N_EXPERT,)}


def _hy(n_heads: int) -> Recipe:
    """Returns a model of which each MTP block drafts one token more."""
    return Recipe(
        "hy_v3",
        "experts, next-token blocks",
        [_HY | gated(), _HY_MOE, *[_HY_MOE | next_token()] * n_heads],
        {
            **RMS,
            **MOE,
            "nextn_predict_layers": n_heads,
            "expert_shared_feed_forward_length": N_FF,
        },
        copies={start: other for i in range(n_heads) for start, other in _copies(2 + i, 1).items()},
        scale=_SCALE,
    )


_COHERE = norms("attn_norm") | attention()
_NEMOTRON_MOE: Shapes = {
    name: shape for name, shape in (_SHARED | _BIAS).items() if "gate_exps" not in name
}
del _NEMOTRON_MOE["ffn_gate_shexp.weight"]

MTP_RECIPES: Mapping[str, Recipe] = {
    "deepseek2-mtp": Recipe(
        "deepseek2",
        "latent attention (MLA), experts, next-token block",
        [TWO_NORMS | latent() | gated(), _LATENT_MOE, _LATENT_MOE | next_token()],
        _MLA_NEXT,
        copies=_copies(2, 1),
        scale=_SCALE,
    ),
    "qwen3next-mtp": _qwen("qwen3next", is_joined=True),
    "qwen35moe-mtp": _qwen("qwen35moe", is_joined=False),
    "glm-dsa-mtp": _sparse("glm-dsa", "GLM 5"),
    "deepseek32-mtp": _sparse("deepseek32", "DeepSeek 3.2"),
    "hy_v3-mtp": _hy(1),
    "hy_v3-mtp2": _hy(2),
    "bailingmoe3-mtp": Recipe(
        "bailingmoe3",
        "hybrid: latent attention and delta attention, experts, next-token block",
        [
            TWO_NORMS | _kimi_delta() | _LING_DELTA | gated(),
            _LING,
            _LING
            | {
                name.replace("nextn.shared_head_norm", "layer_output_norm"): shape
                for name, shape in next_token().items()
            },
        ],
        {**_MLA_NEXT, **_KDA_VALUES, "attention.head_count_kv": [0, 1, 1]},
        copies={"blk.2.layer_output_norm.": "output_norm."} | _copies(2, 1),
        scale=_SCALE,
    ),
    "nemotron_h_moe-mtp": Recipe(
        "nemotron_h_moe",
        "hybrid: attention and a state-space model, experts, next-token block",
        [
            norms("attn_norm") | mamba2(),
            norms("attn_norm") | attention(),
            norms("attn_norm") | _NEMOTRON_MOE,
            norms("attn_norm", "post_attention_norm") | attention() | _NEMOTRON_MOE | next_token(),
        ],
        {
            **RMS,
            **MEAN,
            **MOE,
            **SSM,
            **_NEXT,
            "ssm.group_count": 1,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": N_FF,
            "feed_forward_length": [0, 0, N_FF, N_FF],
            "attention.head_count_kv": [0, N_HEAD, 0, N_HEAD],
        },
        copies={
            "blk.3.nextn.shared_head_norm.": "output_norm.",
            "blk.3.post_attention_norm.": "blk.2.attn_norm.",
            "blk.3.attn": "blk.1.attn",
            "blk.3.": "blk.2.",
        },
        scale=_SCALE,
    ),
    "cohere2moe-mtp": Recipe(
        "cohere2moe",
        "sliding window, experts, next-token block",
        [_COHERE | gated(), _COHERE | _SHARED, _COHERE | _SHARED | next_token()],
        {
            **MEAN,
            **_ONE_DENSE,
            **_NEXT,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": [True, False, False],
            "logit_scale": 1.0,
        },
        copies=_copies(2, 1),
        scale=_SCALE,
    ),
    "glm5-next-mtp": Recipe(
        "glm5-next",
        "hybrid: latent attention with an indexer and delta attention, four streams, experts,"
        " next-token block",
        [
            TWO_NORMS | _kimi_delta() | _GLM_DELTA | _streams() | gated(),
            _LATENT_MOE | _glm_latent() | _GLM_INDEXER | _streams(),
            _LATENT_MOE | _glm_latent() | _GLM_INDEXER | next_token(),
        ],
        {
            **_MLA_NEXT,
            **_INDEXED,
            **_KDA_VALUES,
            **_STREAM_VALUES,
            "attention.head_count_kv": [0, 1, 1],
            "attention.key_length": LATENT,
            "attention.indexer.kpool": _N_POOLED,
            "attention.indexer.kpool_select_tail": True,
            "rope.dimension_count": 0,
        },
        copies=_copies(2, 1),
        scale=_SCALE,
    ),
    "deepseek4-mtp": Recipe(
        "deepseek4",
        "compressed attention, window, four streams, experts, next-token block",
        [_deepseek4(128), _deepseek4(_N_POOLED), _deepseek4(), _deepseek4() | next_token()],
        {
            **RMS,
            **_ONE_DENSE,
            **_NEXT,
            **_INDEXED,
            **_STREAM_VALUES,
            "expert_weights_norm": True,
            "expert_gating_func": 4,
            "swiglu_clamp_exp": 10.0,
            "hash_layer_count": 0,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": LATENT,
            "attention.sliding_window": N_WINDOW,
            "attention.output_group_count": _N_GROUPS,
            "attention.output_lora_rank": _OUT,
            "attention.compress_ratios": [128, _N_POOLED, 0, 0],
            "attention.compress_rope_freq_base": 160000.0,
            "rope.dimension_count": ROTATED,
        },
        {
            "output_hc_fn.weight": (_STREAMS, _N_STREAMS),
            "output_hc_base.weight": (_N_STREAMS,),
            "output_hc_scale.weight": (1,),
        },
        copies=_copies(3, 2),
        scale={
            "token_embd.weight": _TOKEN,
            "blk.0.attn_output_b.weight": _MIXER,
            "blk.1.attn_output_b.weight": _MIXER,
            "blk.2.attn_q_b.weight": _QUERY,
            "blk.2.attn_output_b.weight": _READ,
            **{
                f"blk.{i}.ffn_down_{which}.weight": _FEED
                for i in (0, 1)
                for which in ("exps", "shexp")
            },
        },
    ),
    "qwen4exp-mtp": Recipe(
        "qwen4exp",
        "hybrid: attention with an indexer and gated delta nets, four streams, n-gram tables,"
        " experts, next-token block",
        [
            _qwen4(_delta_net(is_joined=False)) | _QWEN4_GRAMS,
            _QWEN4_FULL,
            _QWEN4_FULL | _QWEN4_NEXT,
        ],
        {
            **_DELTA_NET,
            **_SECTIONS,
            **_INDEXED,
            "hyper_connection.count": _N_STREAMS,
            "hyper_connection.low_rank": _N_LOW,
            "attention.compress_ratios": [_N_POOLED] * 3,
            "embedding_length_per_layer_input": N_EMBD // _N_TABLES,
            "ple.layers": [0],
            "ple.ngram_size": _N_GRAM,
            "ple.heads_per_ngram": _N_GRAM_HEADS,
            "ple.conv_kernel": CONV,
            "ple.eos_token_id": 0,
            "ple.layer_multipliers": Longs((1, 3, 5)),
            "ple.head_offsets": Longs(range(0, _N_TABLES * N_VOCAB, N_VOCAB)),
            "ple.head_vocab_sizes": Longs([N_VOCAB] * _N_TABLES),
        },
        {
            **_low_rank("output_hc"),
            "per_layer_token_embd.weight": (N_EMBD // _N_TABLES, _N_TABLES * N_VOCAB),
        },
        has_output_norm=False,
        copies={"blk.2.nextn.hc_head_": "output_hc_"} | _copies(2, 1),
        scale=_SCALE,
    ),
}
"""What can be written, by name."""
