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
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from models.arch_parts import (
    CONV,
    INNER,
    MEAN,
    MLA,
    MOE,
    N_CTX,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_HEAD,
    N_HEAD_EMBD,
    N_VOCAB,
    N_WINDOW,
    PLAIN,
    RANK,
    RMS,
    ROTATED,
    SSM,
    STATE,
    TWO_NORMS,
    Longs,
    Recipe,
    Shape,
    Shapes,
    Value,
    attention,
    experts,
    gated,
    joined,
    latent,
    mamba2,
    next_token,
    norms,
    plain_ff,
)
from models.archs_encoder import ENCODER_RECIPES
from models.archs_mtp import MTP_RECIPES

__all__ = [
    "KINDS",
    "N_CTX",
    "N_VOCAB",
    "RECIPES",
    "Shape",
    "add_byte_vocabulary",
    "main",
    "sized",
    "write_model",
]

GAIN, OUTPUT_GAIN = 1.5, 3.0
"""Standard deviation of what a matrix gives for inputs of 1; of token tables: of the logits."""

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
    is_decay = "ssm_a" in name and "ssm_alpha" not in name
    return sized(name, -np.abs(values) if is_decay else values)


TOKEN_GAIN, ROW_GAIN = 3.0, 0.05
"""What an MTP block that is a copy gets of the token's normed embedding: as much as the trunk does;
and the standard deviation of its weights for the hidden row."""


def _projection(name: str, shape: Shape) -> npt.NDArray[np.float32]:
    n_in, n_out = shape
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    values = chance.normal(0.0, ROW_GAIN, (n_out, n_in)).astype(np.float32)
    values[:, :n_out] = TOKEN_GAIN * np.eye(n_out, dtype=np.float32)
    return values


def _weights(recipe: Recipe, name: str, shape: Shape) -> npt.NDArray[np.float32]:
    if recipe.copies and name.endswith("nextn.eh_proj.weight"):
        return _projection(name, shape)
    origins = (
        other + name.removeprefix(start)
        for start, other in recipe.copies.items()
        if name.startswith(start)
    )
    origin = next(origins, name)
    factor = next((x for end, x in recipe.scale.items() if origin.endswith(end)), 1.0)
    return _draw(origin, shape) * np.float32(factor)


# --- recipes


_DENSE = TWO_NORMS | attention() | gated()
_BIASED = norms("attn_norm", "ffn_norm", has_bias=True)


def _mamba() -> Shapes:
    return {
        "ssm_in.weight": (N_EMBD, 2 * INNER),
        "ssm_conv1d.weight": (CONV, INNER),
        "ssm_conv1d.bias": (INNER,),
        "ssm_x.weight": (INNER, RANK + 2 * STATE),
        "ssm_dt.weight": (RANK, INNER),
        "ssm_dt.bias": (INNER,),
        "ssm_a": (STATE, INNER),
        "ssm_d": (INNER,),
        "ssm_out.weight": (INNER, N_EMBD),
    }


def _latent_of_plain_queries() -> Shapes:
    """Returns latent attention whose queries are not compressed."""
    shapes = {name: shape for name, shape in latent().items() if not name.startswith("attn_q")}
    return shapes | {"attn_q.weight": (N_EMBD, N_HEAD * (PLAIN + ROTATED))}


def _delta() -> Shapes:
    """Returns linear attention by the delta rule, with a decay for each number (KDA)."""
    shapes: Shapes = {
        "ssm_a": (1, N_HEAD),
        "ssm_dt.bias": (N_EMBD,),
        "ssm_beta.weight": (N_EMBD, N_HEAD),
        "ssm_norm.weight": (N_HEAD_EMBD,),
        "attn_output.weight": (N_EMBD, N_EMBD),
    }
    for name in ("q", "k", "v"):
        shapes[f"attn_{name}.weight"] = (N_EMBD, N_EMBD)
        shapes[f"ssm_conv1d_{name}.weight"] = (CONV, 1, N_EMBD)
    for name in ("f", "g"):
        shapes[f"ssm_{name}_a.weight"] = (N_EMBD, N_HEAD_EMBD)
        shapes[f"ssm_{name}_b.weight"] = (N_HEAD_EMBD, N_EMBD)
    return shapes


def _plamo2_mamba() -> Shapes:
    n_step = 64
    return {
        "ssm_in.weight": (N_EMBD, 2 * INNER),
        "ssm_conv1d.weight": (CONV, INNER),
        "ssm_x.weight": (INNER, n_step + 2 * STATE),
        "ssm_dt.weight": (n_step, RANK),
        "ssm_dt.bias": (RANK,),
        "ssm_a": (RANK,),
        "ssm_d": (RANK,),
        "ssm_out.weight": (INNER, N_EMBD),
        "ssm_dt_norm": (n_step,),
        "ssm_b_norm": (STATE,),
        "ssm_c_norm": (STATE,),
    }


_PLAMO2_NORMS: Shapes = TWO_NORMS | {"post_attention_norm": (N_EMBD,), "post_ffw_norm": (N_EMBD,)}
_PLAMO2_FF: Shapes = {"ffn_up.weight": (N_EMBD, 2 * N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
_N_PER_LAYER = 16


def _gemma(*, has_own_cells: bool = True) -> Shapes:
    shapes = attention(has_norm=True)
    if not has_own_cells:
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            del shapes[name]
    return (
        norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
        | shapes
        | gated()
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
_STEP = TWO_NORMS | attention(has_norm=True)
_GLM = norms("attn_norm", "post_attention_norm") | attention()
_GLM_EXPERTS = experts() | gated(last="_shexp") | {"exp_probs_b.bias": (N_EXPERT,)}

RECIPES: Mapping[str, Recipe] = {
    "llama": Recipe("llama", "dense", [_DENSE] * 2, RMS),
    "cohere2": Recipe(
        "cohere2",
        "sliding window",
        [norms("attn_norm") | attention(1) | gated()] * 4,
        {
            **MEAN,
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
        [_BIASED | joined(has_bias=True) | plain_ff(has_bias=True)] * 2,
        MEAN,
        {"position_embd.weight": (N_EMBD, N_CTX)},
        has_biases=True,
    ),
    "bloom": Recipe(
        "bloom",
        "ALiBi",
        [_BIASED | joined(has_bias=True) | plain_ff(has_bias=True)] * 2,
        {**MEAN, "attention.max_alibi_bias": 8.0},
        norms("token_embd_norm", has_bias=True),
        has_biases=True,
    ),
    "qwen3moe": Recipe(
        "qwen3moe",
        "experts",
        [TWO_NORMS | attention(has_norm=True) | experts()] * 2,
        {**RMS, **MOE},
    ),
    "gpt-oss": Recipe(
        "gpt-oss",
        "window with sinks, experts",
        [
            norms("attn_norm", "post_attention_norm")
            | attention()
            | {"attn_sinks.weight": (N_HEAD,), "attn_output.bias": (N_EMBD,)}
            | experts(has_bias=True)
        ]
        * 2,
        {**RMS, **MOE, "attention.sliding_window": N_WINDOW},
    ),
    "deepseek2": Recipe(
        "deepseek2",
        "latent attention (MLA), experts",
        [
            TWO_NORMS | latent() | gated(),
            TWO_NORMS | latent() | experts() | gated(last="_shexp"),
        ],
        {
            **RMS,
            **MOE,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 1,
            **MLA,
        },
    ),
    "mamba2": Recipe(
        "mamba2",
        "recurrent",
        [norms("attn_norm") | mamba2()] * 2,
        {**RMS, **SSM, "ssm.group_count": 1},
    ),
    "jamba": Recipe(
        "jamba",
        "hybrid: attention and a state-space model",
        [
            _DENSE,
            TWO_NORMS
            | _mamba()
            | norms("ssm_dt_norm", n=RANK)
            | norms("ssm_b_norm", "ssm_c_norm", n=STATE)
            | gated(),
        ],
        {**RMS, **SSM, "attention.head_count_kv": [N_HEAD, 0]},
    ),
    "lfm2": Recipe(
        "lfm2",
        "hybrid: attention and short convolutions",
        [
            TWO_NORMS | attention(has_norm=True) | gated(),
            TWO_NORMS
            | {
                "shortconv.in_proj.weight": (N_EMBD, 3 * N_EMBD),
                "shortconv.conv.weight": (3, N_EMBD),
                "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
            }
            | gated(),
        ],
        {**RMS, "shortconv.l_cache": 3, "attention.head_count_kv": [N_HEAD, 0]},
        norms("token_embd_norm"),
        has_output_norm=False,
    ),
    "minimax-01": Recipe(
        "minimax-01",
        "hybrid: attention and linear attention",
        [
            norms("attn_norm", "attn_norm_2", "ffn_norm")
            | joined()
            | {"attn_gate.weight": (N_EMBD, N_EMBD)}
            | experts(),
            TWO_NORMS | attention() | experts(),
        ],
        {**RMS, **MOE, "residual_scale": 1.5, "attention.recurrent_layers": [True, False]},
    ),
    "gemma4": Recipe(
        "gemma4",
        "layers that share cells, window",
        [
            _gemma(has_own_cells=i < 4) | _per_layer(_N_PER_LAYER)
            for i in range(len(_GEMMA4_WINDOWED))
        ],
        {
            **RMS,
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
    "kimi-linear": Recipe(
        "kimi-linear",
        "hybrid: latent attention and linear attention",
        [
            TWO_NORMS | _latent_of_plain_queries() | gated(),
            TWO_NORMS | _delta() | experts() | {"exp_probs_b.bias": (N_EXPERT,)},
        ],
        {
            **RMS,
            **MOE,
            **{key: value for key, value in MLA.items() if key != "attention.q_lora_rank"},
            "attention.head_count": [N_HEAD, N_HEAD],
            "attention.head_count_kv": [1, 0],
            "leading_dense_block_count": 1,
            "expert_shared_count": 0,
            "expert_gating_func": 2,
            "ssm.conv_kernel": CONV,
            "kda.head_dim": N_HEAD_EMBD,
        },
    ),
    # Those that upstream's program cannot write.
    "gemma3n": Recipe(
        "gemma3n",
        "layers that share cells, window, four streams",
        [_gemma() | _per_layer(_N_ALTUP_EMBD) | _ALTUP] * _N_GEMMA3N,
        {
            **RMS,
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
        [TWO_NORMS | attention(has_norm=True) | plain_ff(has_bias=False)] * 2,
        {
            **RMS,
            "/xielu.alpha_n": 0.8,
            "/xielu.alpha_p": 0.8,
            "/xielu.beta": 0.5,
            "/xielu.eps": -1e-6,
        },
    ),
    "step35": Recipe(
        "step35",
        "window, experts, next-token block",
        [_STEP | gated(), _STEP | experts(), _STEP | gated() | next_token()],
        {
            **RMS,
            **MOE,
            "attention.sliding_window": N_WINDOW,
            "attention.sliding_window_pattern": [True, False, False],
            "nextn_predict_layers": 1,
        },
    ),
    "glm4moe": Recipe(
        "glm4moe",
        "experts, next-token block",
        [_GLM | gated(), _GLM | _GLM_EXPERTS, _GLM | _GLM_EXPERTS | next_token()],
        {
            **RMS,
            **MOE,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 1,
        },
    ),
    # Whose graph gives the logits of other tokens than those asked for.
    "cogvlm": Recipe(
        "cogvlm",
        "dense",
        [
            TWO_NORMS
            | joined()
            | gated()
            | {
                "vis_attn_qkv.weight": (N_EMBD, 3 * N_EMBD),
                "vis_attn_output.weight": (N_EMBD, N_EMBD),
                "vis_gate.weight": (N_EMBD, N_FF),
                "vis_up.weight": (N_EMBD, N_FF),
                "vis_down.weight": (N_FF, N_EMBD),
            }
        ]
        * 2,
        RMS,
    ),
    "plamo2": Recipe(
        "plamo2",
        "hybrid",
        [
            _PLAMO2_NORMS
            | joined()
            | {
                "attn_q_norm.weight": (N_HEAD_EMBD, N_HEAD),
                "attn_k_norm.weight": (N_HEAD_EMBD, N_HEAD),
            }
            | _PLAMO2_FF,
            _PLAMO2_NORMS | _plamo2_mamba() | _PLAMO2_FF,
        ],
        {
            **RMS,
            **SSM,
            "ssm.group_count": 0,
            "attention.head_count": [N_HEAD, 0],
            "attention.head_count_kv": [N_HEAD, 0],
        },
    ),
    **ENCODER_RECIPES,
    **MTP_RECIPES,
}
"""What can be written, by name."""

KINDS = tuple(RECIPES)[:12]
"""One of each kind of memory."""


def write_model(
    path: Path, name: str, kind: GGMLQuantizationType = GGMLQuantizationType.F32
) -> Path:
    """Writes a model and returns its path; the same name gives the same bytes.

    Args:
        path: The file.
        name: Of `RECIPES`.
        kind: Of weights which llama.cpp makes so in a file of that kind: those of two dimensions
            and more, but for routers. The rest is in F32.

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
        weights = _weights(recipe, tensor, shape)
        if len(shape) > 1 and "ffn_gate_inp" not in tensor:
            writer.add_tensor(tensor, quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(recipe: Recipe) -> Shapes:
    shapes: Shapes = {"token_embd.weight": (N_EMBD, N_VOCAB)} | recipe.rest
    if recipe.has_output_norm:
        shapes |= norms("output_norm", has_bias=recipe.has_biases)
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
    elif isinstance(value, Longs):
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT64)
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
