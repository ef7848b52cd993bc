"""Tiny models of many architectures with random weights, for tests: `python -m models.archs DIR`.

One of each kind of memory, and those that llama.cpp's own test program cannot write. Shapes are in
ggml's order, the inner width first, as llama.cpp's `create_tensor` has them. Their weights are as
large as trained ones: what stands early in a prompt moves a logit by about as much as the logits
are wide, so that a cache that loses a token is noticed.

Source: llama.cpp src/models/*.cpp@b11549.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

__all__ = ["KINDS", "RECIPES", "Recipe", "add_byte_vocabulary", "main", "sized", "write_model"]

N_VOCAB = 128
N_CTX = 256
N_EMBD, N_HEAD, N_FF = 64, 2, 96
N_HEAD_EMBD = N_EMBD // N_HEAD
N_WINDOW = 24
N_EXPERT = 4

GAIN, OUTPUT_GAIN = 1.5, 3.0
"""Standard deviation of what a matrix gives for inputs of 1; of token tables: of the logits."""

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[bool]

# --- vocabulary

_FIRST_PLAIN, _LAST_PLAIN = 33, 126
_NORMAL, _CONTROL, _UNUSED = 1, 3, 4
_BEGIN, _END = 0, 1


def add_byte_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """Adds tokens that are bytes, and one that is a pair; the rest has names of its own.

    Args:
        writer: Of a model.
        n_vocab: Tokens of the model, at least 128.
    """
    tokens = [f"<{i}>" for i in range(n_vocab)]
    for i in range(_FIRST_PLAIN, _LAST_PLAIN + 1):
        tokens[i] = chr(i)
    tokens[10], tokens[32], tokens[127] = "Ċ", "Ġ", "th"
    types = [_NORMAL] * n_vocab
    for i in (*range(2, 10), *range(11, 32)):
        types[i] = _UNUSED
    types[_BEGIN] = types[_END] = _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(_BEGIN)
    writer.add_eos_token_id(_END)
    writer.add_add_bos_token(False)


# --- weights


def sized(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns random weights as large as trained ones are.

    Args:
        name: The tensor's; norms and scales are near 1; biases and states stay.
        values: Drawn with any standard deviation; of norms and scales with a small one.
    """
    if any(part in name for part in ("ssm_a", "ssm_d", ".bias", "_sinks", "_coef")):
        return values
    if "norm" in name or "scale" in name or name.startswith("rope_f"):
        return values + np.float32(1)
    std = float(values.std())
    if values.ndim == 1 or std == 0.0:
        return values
    # Some have one table for both. Small inputs leave more of the sum to what the layers add.
    gain = OUTPUT_GAIN if name in ("output.weight", "token_embd.weight") else GAIN
    return values * np.float32(gain / (std * math.sqrt(values.shape[-1])))


def _draw(name: str, shape: Shape) -> npt.NDArray[np.float32]:
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    values = chance.normal(0.0, 0.1, shape[::-1]).astype(np.float32)
    return sized(name, -np.abs(values) if "ssm_a" in name else values)


# --- parts of blocks


def _norms(*names: str, n: int = N_EMBD, has_bias: bool = False) -> Shapes:
    weights: Shapes = {f"{name}.weight": (n,) for name in names}
    biases: Shapes = {f"{name}.bias": (n,) for name in names} if has_bias else {}
    return weights | biases


def _attention(n_kv: int = N_HEAD, *, has_norm: bool = False) -> Shapes:
    n_query, n_key = N_HEAD * N_HEAD_EMBD, n_kv * N_HEAD_EMBD
    shapes = {
        "attn_q.weight": (N_EMBD, n_query),
        "attn_k.weight": (N_EMBD, n_key),
        "attn_v.weight": (N_EMBD, n_key),
        "attn_output.weight": (n_query, N_EMBD),
    }
    return shapes | (_norms("attn_q_norm", "attn_k_norm", n=N_HEAD_EMBD) if has_norm else {})


def _joined(*, has_bias: bool = False) -> Shapes:
    shapes: Shapes = {
        "attn_qkv.weight": (N_EMBD, 3 * N_EMBD),
        "attn_output.weight": (N_EMBD, N_EMBD),
    }
    if has_bias:
        shapes |= {"attn_qkv.bias": (3 * N_EMBD,), "attn_output.bias": (N_EMBD,)}
    return shapes


def _gated(n_ff: int = N_FF, last: str = "") -> Shapes:
    return {
        f"ffn_gate{last}.weight": (N_EMBD, n_ff),
        f"ffn_up{last}.weight": (N_EMBD, n_ff),
        f"ffn_down{last}.weight": (n_ff, N_EMBD),
    }


def _plain_ff(*, has_bias: bool) -> Shapes:
    shapes: Shapes = {"ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
    return shapes | ({"ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)} if has_bias else {})


def _experts(*, has_bias: bool = False) -> Shapes:
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


def _next_token() -> Shapes:
    return {
        "nextn.eh_proj.weight": (2 * N_EMBD, N_EMBD),
        **_norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    }


# --- recipes


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


_RMS: Mapping[str, Value] = {"attention.layer_norm_rms_epsilon": 1e-5}
_MEAN: Mapping[str, Value] = {"attention.layer_norm_epsilon": 1e-5}
_MOE: Mapping[str, Value] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF,
}

_TWO_NORMS = _norms("attn_norm", "ffn_norm")
_DENSE = _TWO_NORMS | _attention() | _gated()
_BIASED = _norms("attn_norm", "ffn_norm", has_bias=True)
_INNER, _STATE, _CONV, _RANK = 2 * N_EMBD, 16, 4, 4
_SSM: Mapping[str, Value] = {
    "ssm.inner_size": _INNER,
    "ssm.state_size": _STATE,
    "ssm.conv_kernel": _CONV,
    "ssm.time_step_rank": _RANK,
}


def _mamba() -> Shapes:
    return {
        "ssm_in.weight": (N_EMBD, 2 * _INNER),
        "ssm_conv1d.weight": (_CONV, _INNER),
        "ssm_conv1d.bias": (_INNER,),
        "ssm_x.weight": (_INNER, _RANK + 2 * _STATE),
        "ssm_dt.weight": (_RANK, _INNER),
        "ssm_dt.bias": (_INNER,),
        "ssm_a": (_STATE, _INNER),
        "ssm_d": (_INNER,),
        "ssm_out.weight": (_INNER, N_EMBD),
    }


def _mamba2() -> Shapes:
    n_conv = _INNER + 2 * _STATE
    return {
        "ssm_in.weight": (N_EMBD, 2 * _INNER + 2 * _STATE + _RANK),
        "ssm_conv1d.weight": (_CONV, n_conv),
        "ssm_conv1d.bias": (n_conv,),
        "ssm_dt.bias": (_RANK,),
        "ssm_a": (1, _RANK),
        "ssm_d": (1, _RANK),
        "ssm_norm.weight": (_INNER, 1),
        "ssm_out.weight": (_INNER, N_EMBD),
    }


def _plamo2_mamba() -> Shapes:
    n_step = 64
    return {
        "ssm_in.weight": (N_EMBD, 2 * _INNER),
        "ssm_conv1d.weight": (_CONV, _INNER),
        "ssm_x.weight": (_INNER, n_step + 2 * _STATE),
        "ssm_dt.weight": (n_step, _RANK),
        "ssm_dt.bias": (_RANK,),
        "ssm_a": (_RANK,),
        "ssm_d": (_RANK,),
        "ssm_out.weight": (_INNER, N_EMBD),
        "ssm_dt_norm": (n_step,),
        "ssm_b_norm": (_STATE,),
        "ssm_c_norm": (_STATE,),
    }


_PLAMO2_NORMS: Shapes = _TWO_NORMS | {"post_attention_norm": (N_EMBD,), "post_ffw_norm": (N_EMBD,)}
_PLAMO2_FF: Shapes = {"ffn_up.weight": (N_EMBD, 2 * N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
_LATENT, _ROTATED, _PLAIN = 32, 16, 16


def _latent() -> Shapes:
    """Attention over one compressed row for all heads (MLA)."""
    return {
        "attn_q_a.weight": (N_EMBD, _LATENT),
        "attn_q_a_norm.weight": (_LATENT,),
        "attn_q_b.weight": (_LATENT, N_HEAD * (_PLAIN + _ROTATED)),
        "attn_kv_a_mqa.weight": (N_EMBD, _LATENT + _ROTATED),
        "attn_kv_a_norm.weight": (_LATENT,),
        "attn_k_b.weight": (_PLAIN, _LATENT, N_HEAD),
        "attn_v_b.weight": (_LATENT, _PLAIN, N_HEAD),
        "attn_output.weight": (N_HEAD * _PLAIN, N_EMBD),
    }


_N_PER_LAYER = 16


def _gemma(*, has_own_cells: bool = True) -> Shapes:
    attention = _attention(has_norm=True)
    if not has_own_cells:
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            del attention[name]
    return (
        _norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        | attention
        | _gated()
    )


def _per_layer(n: int) -> Shapes:
    return {"inp_gate.weight": (N_EMBD, n), "proj.weight": (n, N_EMBD)}


def _per_layer_tables(n: int, n_layer: int) -> Shapes:
    return {
        "per_layer_token_embd.weight": (n * n_layer, N_VOCAB),
        "per_layer_model_proj.weight": (N_EMBD, n * n_layer),
        "per_layer_proj_norm.weight": (n,),
    }


_GEMMA4_WINDOWED = (True, True, True, False, True, False)
_N_ALTUP, _N_LAUREL, _N_ALTUP_EMBD, _N_GEMMA3N = 4, 64, 256, 22
_ALTUP: Shapes = {
    "altup_correct_coef.weight": (_N_ALTUP, _N_ALTUP),
    "altup_correct_scale.weight": (N_EMBD,),
    "altup_predict_coef.weight": (_N_ALTUP, _N_ALTUP**2),
    "altup_router.weight": (N_EMBD, _N_ALTUP),
    "altup_router_norm.weight": (N_EMBD,),
    "laurel_l.weight": (N_EMBD, _N_LAUREL),
    "laurel_r.weight": (_N_LAUREL, N_EMBD),
    "laurel_post_norm.weight": (N_EMBD,),
}
_STEP = _TWO_NORMS | _attention(has_norm=True)
_GLM = _norms("attn_norm", "post_attention_norm") | _attention()
_GLM_EXPERTS = _experts() | _gated(last="_shexp") | {"exp_probs_b.bias": (N_EXPERT,)}

RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe("llama", "dense", [_DENSE] * 2, _RMS),
    "cohere2": Recipe(
        "cohere2",
        "sliding window",
        [_norms("attn_norm") | _attention(1) | _gated()] * 4,
        {
            **_MEAN,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": [True, True, True, False],
            "attention.head_count_kv": 1,
            "logit_scale": 1.0,
        },
        has_output=False,
    ),
    "gpt2": Recipe(
        "gpt2",
        "learned positions",
        [_BIASED | _joined(has_bias=True) | _plain_ff(has_bias=True)] * 2,
        _MEAN,
        {"position_embd.weight": (N_EMBD, N_CTX)},
        has_biases=True,
    ),
    "bloom": Recipe(
        "bloom",
        "ALiBi",
        [_BIASED | _joined(has_bias=True) | _plain_ff(has_bias=True)] * 2,
        {**_MEAN, "attention.max_alibi_bias": 8.0},
        _norms("token_embd_norm", has_bias=True),
        has_biases=True,
    ),
    "qwen3moe": Recipe(
        "qwen3moe",
        "experts",
        [_TWO_NORMS | _attention(has_norm=True) | _experts()] * 2,
        {**_RMS, **_MOE},
    ),
    "gpt-oss": Recipe(
        "gpt-oss",
        "window with sinks, experts",
        [
            _norms("attn_norm", "post_attention_norm")
            | _attention()
            | {"attn_sinks.weight": (N_HEAD,), "attn_output.bias": (N_EMBD,)}
            | _experts(has_bias=True)
        ]
        * 2,
        {**_RMS, **_MOE, "attention.sliding_window": N_WINDOW},
    ),
    "deepseek2": Recipe(
        "deepseek2",
        "latent attention (MLA), experts",
        [
            _TWO_NORMS | _latent() | _gated(),
            _TWO_NORMS | _latent() | _experts() | _gated(last="_shexp"),
        ],
        {
            **_RMS,
            **_MOE,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 1,
            "attention.q_lora_rank": _LATENT,
            "attention.kv_lora_rank": _LATENT,
            "attention.head_count_kv": 1,
            "attention.key_length": _LATENT + _ROTATED,
            "attention.value_length": _LATENT,
            "attention.key_length_mla": _PLAIN + _ROTATED,
            "attention.value_length_mla": _PLAIN,
            "rope.dimension_count": _ROTATED,
        },
    ),
    "mamba2": Recipe(
        "mamba2",
        "recurrent",
        [_norms("attn_norm") | _mamba2()] * 2,
        {**_RMS, **_SSM, "ssm.group_count": 1},
    ),
    "jamba": Recipe(
        "jamba",
        "hybrid: attention and a state-space model",
        [
            _DENSE,
            _TWO_NORMS
            | _mamba()
            | _norms("ssm_dt_norm", n=_RANK)
            | _norms("ssm_b_norm", "ssm_c_norm", n=_STATE)
            | _gated(),
        ],
        {**_RMS, **_SSM, "attention.head_count_kv": [N_HEAD, 0]},
    ),
    "lfm2": Recipe(
        "lfm2",
        "hybrid: attention and short convolutions",
        [
            _TWO_NORMS | _attention(has_norm=True) | _gated(),
            _TWO_NORMS
            | {
                "shortconv.in_proj.weight": (N_EMBD, 3 * N_EMBD),
                "shortconv.conv.weight": (3, N_EMBD),
                "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
            }
            | _gated(),
        ],
        {**_RMS, "shortconv.l_cache": 3, "attention.head_count_kv": [N_HEAD, 0]},
        _norms("token_embd_norm"),
        has_output_norm=False,
    ),
    "minimax-01": Recipe(
        "minimax-01",
        "hybrid: attention and linear attention",
        [
            _norms("attn_norm", "attn_norm_2", "ffn_norm")
            | _joined()
            | {"attn_gate.weight": (N_EMBD, N_EMBD)}
            | _experts(),
            _TWO_NORMS | _attention() | _experts(),
        ],
        {**_RMS, **_MOE, "residual_scale": 1.5, "attention.recurrent_layers": [True, False]},
    ),
    "gemma4": Recipe(
        "gemma4",
        "layers that share cells, window",
        [
            _gemma(has_own_cells=i < 4) | _per_layer(_N_PER_LAYER)
            for i in range(len(_GEMMA4_WINDOWED))
        ],
        {
            **_RMS,
            "attention.shared_kv_layers": 2,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": list(_GEMMA4_WINDOWED),
            "attention.key_length_swa": N_HEAD_EMBD,
            "attention.value_length_swa": N_HEAD_EMBD,
            "embedding_length_per_layer_input": _N_PER_LAYER,
            "rope.freq_base_swa": 10000.0,
        },
        {
            **_per_layer_tables(_N_PER_LAYER, len(_GEMMA4_WINDOWED)),
            "rope_freqs.weight": (N_HEAD_EMBD // 2,),
        },
        has_output=False,
    ),
    # Those that upstream's program cannot write.
    "gemma3n": Recipe(
        "gemma3n",
        "layers that share cells, window, four streams",
        [_gemma() | _per_layer(_N_ALTUP_EMBD) | _ALTUP] * _N_GEMMA3N,
        {
            **_RMS,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": 5,
            "embedding_length_per_layer_input": _N_ALTUP_EMBD,
            "rope.freq_base_swa": 10000.0,
        },
        {
            **_per_layer_tables(_N_ALTUP_EMBD, _N_GEMMA3N),
            "altup_proj.weight": (N_EMBD, N_EMBD, _N_ALTUP - 1),
            "altup_unembd_proj.weight": (N_EMBD, N_EMBD, _N_ALTUP - 1),
        },
        has_output=False,
        scale={"attn_q_norm.weight": 0.2, "post_attention_norm.weight": 0.3},
    ),
    "apertus": Recipe(
        "apertus",
        "dense",
        [_TWO_NORMS | _attention(has_norm=True) | _plain_ff(has_bias=False)] * 2,
        {
            **_RMS,
            "/xielu.alpha_n": 0.8,
            "/xielu.alpha_p": 0.8,
            "/xielu.beta": 0.5,
            "/xielu.eps": -1e-6,
        },
    ),
    "step35": Recipe(
        "step35",
        "window, experts, next-token block",
        [_STEP | _gated(), _STEP | _experts(), _STEP | _gated() | _next_token()],
        {
            **_RMS,
            **_MOE,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": [True, False, False],
            "nextn_predict_layers": 1,
        },
    ),
    "glm4moe": Recipe(
        "glm4moe",
        "experts, next-token block",
        [_GLM | _gated(), _GLM | _GLM_EXPERTS, _GLM | _GLM_EXPERTS | _next_token()],
        {
            **_RMS,
            **_MOE,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 1,
        },
    ),
    "bert": Recipe(
        "bert",
        "encoder: no cache",
        [
            _attention()
            | _norms("attn_output_norm", "layer_output_norm", has_bias=True)
            | _plain_ff(has_bias=True)
        ]
        * 2,
        {**_MEAN, "attention.causal": False, "/tokenizer.ggml.token_type_count": 2},
        {
            "token_types.weight": (N_EMBD, 2),
            "position_embd.weight": (N_EMBD, N_CTX),
            **_norms("token_embd_norm", has_bias=True),
        },
        has_output=False,
        has_output_norm=False,
    ),
    # Whose graph gives the logits of other tokens than those asked for.
    "cogvlm": Recipe(
        "cogvlm",
        "dense",
        [
            _TWO_NORMS
            | _joined()
            | _gated()
            | {
                "vis_attn_qkv.weight": (N_EMBD, 3 * N_EMBD),
                "vis_attn_output.weight": (N_EMBD, N_EMBD),
                "vis_gate.weight": (N_EMBD, N_FF),
                "vis_up.weight": (N_EMBD, N_FF),
                "vis_down.weight": (N_FF, N_EMBD),
            }
        ]
        * 2,
        _RMS,
    ),
    # Whose graph is wrong for several sequences in one batch: llama.cpp ends the process.
    "plamo2": Recipe(
        "plamo2",
        "hybrid",
        [
            _PLAMO2_NORMS
            | _joined()
            | {
                "attn_q_norm.weight": (N_HEAD_EMBD, N_HEAD),
                "attn_k_norm.weight": (N_HEAD_EMBD, N_HEAD),
            }
            | _PLAMO2_FF,
            _PLAMO2_NORMS | _plamo2_mamba() | _PLAMO2_FF,
        ],
        {
            **_RMS,
            **_SSM,
            "ssm.group_count": 0,
            "attention.head_count": [N_HEAD, 0],
            "attention.head_count_kv": [N_HEAD, 0],
        },
    ),
}
"""What can be written, by name."""

KINDS = tuple(RECIPES)[:12]
"""One of each kind of memory."""


def write_model(path: Path, name: str) -> Path:
    """Writes a model and returns its path; the same name gives the same bytes.

    Args:
        path: The file.
        name: Of `RECIPES`.

    Raises:
        KeyError: No such recipe.
    """
    recipe = RECIPES[name]
    writer = GGUFWriter(path, recipe.arch)
    add_byte_vocabulary(writer, N_VOCAB)
    values: dict[str, Value] = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "block_count": len(recipe.blocks),
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "attention.key_length": N_HEAD_EMBD,
        "attention.value_length": N_HEAD_EMBD,
        "rope.freq_base": 10000.0,
    }
    for key, value in (values | dict(recipe.values)).items():
        _add(writer, key[1:] if key.startswith("/") else f"{recipe.arch}.{key}", value)
    for tensor, shape in _shapes(recipe).items():
        factor = next((x for end, x in recipe.scale.items() if tensor.endswith(end)), 1.0)
        writer.add_tensor(tensor, _draw(tensor, shape) * np.float32(factor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(recipe: Recipe) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (N_EMBD, N_VOCAB)} | recipe.rest
    if recipe.has_output_norm:
        shapes |= _norms("output_norm", has_bias=recipe.has_biases)
    if recipe.has_output:
        shapes["output.weight"] = (N_EMBD, N_VOCAB)
    for i, block in enumerate(recipe.blocks):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def main() -> int:
    """Writes the models that the command line names; 0."""
    parser = argparse.ArgumentParser(prog="python -m models.archs", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or RECIPES:
        path = write_model(options.folder / f"{name}.gguf", name)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
