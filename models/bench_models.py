"""Random-weight models of realistic size, for benchmarks: `python -m models.bench_models`.

Their output is noise; what they are for is the cost of a step. Acceptance is then synthetic
(`synth_rates`; llama-server: `--spec-synth-rates`). A file that is there is kept.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    quants,
)

from models.architecture import DENSE
from models.vocabulary import add_vocabulary

__all__ = ["SHAPES", "BenchShape", "main", "write_bench_model"]

N_VOCAB = 32768
N_CONV = 4
SEED = 0
WEIGHT_STD = 0.02
CONV_STD = 0.3
STEP_BIAS = -3.0
DECAY = -1.0

NORMS = {
    "qwen35": ("attn_norm", "post_attention_norm"),
    "gpt-oss": ("attn_norm", "post_attention_norm"),
    "gemma3": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
}
"""Norms of a block, by architecture; of all others `attn_norm` and `ffn_norm`."""

QUANTS = {
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q4_1": (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "Q5_0": (GGMLQuantizationType.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "Q5_1": (GGMLQuantizationType.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "Q2_K": (GGMLQuantizationType.Q2_K, LlamaFileType.MOSTLY_Q2_K),
    "Q3_K": (GGMLQuantizationType.Q3_K, LlamaFileType.MOSTLY_Q3_K_M),
    "Q4_K": (GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K": (GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": (GGMLQuantizationType.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "IQ4_NL": (GGMLQuantizationType.IQ4_NL, LlamaFileType.MOSTLY_IQ4_NL),
    "IQ4_XS": (GGMLQuantizationType.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS),
    "IQ1_S": (GGMLQuantizationType.IQ1_S, LlamaFileType.MOSTLY_IQ1_S),
    "IQ1_M": (GGMLQuantizationType.IQ1_M, LlamaFileType.MOSTLY_IQ1_M),
    "IQ2_XXS": (GGMLQuantizationType.IQ2_XXS, LlamaFileType.MOSTLY_IQ2_XXS),
    "IQ2_XS": (GGMLQuantizationType.IQ2_XS, LlamaFileType.MOSTLY_IQ2_XS),
    "IQ2_S": (GGMLQuantizationType.IQ2_S, LlamaFileType.MOSTLY_IQ2_S),
    "IQ3_XXS": (GGMLQuantizationType.IQ3_XXS, LlamaFileType.MOSTLY_IQ3_XXS),
    "IQ3_S": (GGMLQuantizationType.IQ3_S, LlamaFileType.MOSTLY_IQ3_S),
    "MXFP4": (GGMLQuantizationType.MXFP4, LlamaFileType.MOSTLY_MXFP4_MOE),
}

SCALES = {
    GGMLQuantizationType.Q2_K: (80, 82, 1.5),
    GGMLQuantizationType.Q3_K: (108, None, 0.0),
    GGMLQuantizationType.Q4_K: (0, 2, 7.5),
    GGMLQuantizationType.Q5_K: (0, 2, 15.5),
    GGMLQuantizationType.Q6_K: (208, None, 0.0),
    GGMLQuantizationType.IQ4_NL: (0, None, 0.0),
    GGMLQuantizationType.IQ4_XS: (0, None, 0.0),
    GGMLQuantizationType.IQ1_S: (0, None, 0.0),
    GGMLQuantizationType.IQ1_M: (48, None, 0.0),
    GGMLQuantizationType.IQ2_XXS: (0, None, 0.0),
    GGMLQuantizationType.IQ2_XS: (0, None, 0.0),
    GGMLQuantizationType.IQ2_S: (0, None, 0.0),
    GGMLQuantizationType.IQ3_XXS: (0, None, 0.0),
    GGMLQuantizationType.IQ3_S: (0, None, 0.0),
}
"""Types that the `gguf` package reads but does not write: where a block's scale lies, where that of
its minima, and the middle of its quants. IQ1_M's lies there in four parts."""


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Dimensions of a benchmark model, named as llama.cpp names them."""

    arch: str
    """llama.cpp's architecture: of those in `SHAPES`."""

    n_embd: int
    """Width of the residual stream."""

    n_layer: int
    """Layers, without an MTP block."""

    n_head: int
    """Query heads."""

    n_head_kv: int
    """Key and value heads."""

    n_embd_head: int
    """Width of a head."""

    n_ff: int
    """Inner width of the feed-forward network."""

    rope_base: float
    """Base of the rotary frequencies."""

    n_ctx: int
    """Longest context in tokens."""

    n_rot: int | None = None
    """Rotated elements of a head; none: all."""

    n_delta_heads: int = 0
    """Key and value heads of a gated delta net; 0: a plain transformer."""

    n_delta_state: int = 128
    """Head width of a delta net."""

    full_attention_interval: int = 4
    """Every n-th layer of a hybrid is full attention."""

    n_nextn: int = 0
    """MTP blocks."""

    n_expert: int = 0
    """Experts of a layer; 0: a plain feed-forward network."""

    n_expert_used: int = 0
    """Experts that compute a token."""

    n_ff_expert: int = 0
    """Inner width of an expert, and of the shared one."""

    n_dense_lead: int = 0
    """Layers without experts, at the beginning."""

    n_latent: int = 0
    """Values of a cell that all heads share (MLA), without the rotated ones; 0: keys and values."""

    n_window: int = 0
    """Tokens that a layer with a sliding window looks back; 0: no layer has one. Which layers do is
    the architecture's: five of six in `gemma3`, every second one in `gpt-oss`."""

    @property
    def n_blocks(self) -> int:
        """Layers and MTP blocks."""
        return self.n_layer + self.n_nextn

    @property
    def n_plain(self) -> int:
        """Values of a head of keys that are not rotated; as many has one of values (MLA)."""
        return self.n_embd_head - (self.n_rot or 0)

    def has_experts(self, i: int) -> bool:
        """Tells whether block i has experts."""
        return self.n_expert > 0 and i >= self.n_dense_lead

    def is_recurrent(self, i: int) -> bool:
        """Tells whether block i mixes by a delta net."""
        is_hybrid, is_full = self.n_delta_heads > 0, (i + 1) % self.full_attention_interval == 0
        return is_hybrid and i < self.n_layer and not is_full


SHAPES = {
    "qwen3-0.6b-like": BenchShape("qwen3", 1024, 28, 16, 8, 128, 3072, 1e6, 40960),
    # Dense with an MTP block: the widths of Qwen3 0.6B and Llama 3.2 1B in the dense architecture
    # whose MTP block llama.cpp runs.
    "dense-0.6b": BenchShape("mimo2", 1024, 28, 16, 8, 128, 3072, 1e6, 8192, n_nextn=1),
    "dense-1.2b": BenchShape("mimo2", 2048, 16, 32, 8, 64, 8192, 5e5, 8192, n_nextn=1),
    # Small enough for a quick look on any machine, with room for a long prompt.
    "dense-50m": BenchShape("mimo2", 512, 8, 8, 4, 64, 1536, 1e6, 8192, n_nextn=1),
    # An ordinary draft model for the targets above.
    "draft-30m": BenchShape("qwen3", 512, 4, 8, 4, 64, 1536, 1e6, 8192),
    "llama-1b-like": BenchShape("llama", 2048, 16, 32, 8, 64, 8192, 5e5, 131072),
    "qwen35-0.8b-like": BenchShape(
        "qwen35", 1024, 24, 8, 2, 256, 3584, 1e7, 262144, n_rot=64, n_delta_heads=16, n_nextn=1
    ),
    # Experts, four heads of queries to one of keys: a small Qwen3 30B-A3B.
    "qwen3moe-1b-like": BenchShape(
        "qwen3moe",
        1024,
        24,
        16,
        4,
        128,
        3072,
        1e6,
        40960,
        n_expert=32,
        n_expert_used=4,
        n_ff_expert=384,
    ),
    # Latent attention, a shared expert: a small DeepSeek V2 Lite, known by its 27 layers.
    "deepseek2-1b-like": BenchShape(
        "deepseek2",
        1024,
        27,
        16,
        1,
        192,
        4096,
        1e4,
        40960,
        n_rot=64,
        n_expert=16,
        n_expert_used=4,
        n_ff_expert=512,
        n_dense_lead=1,
        n_latent=512,
    ),
    # Windows in five of six layers, wide heads, a gate of GELU: Gemma 3 1B, but for its vocabulary
    # of 262,144 (`--vocab`).
    "gemma3-1b-like": BenchShape("gemma3", 1152, 26, 4, 1, 256, 6912, 1e6, 32768, n_window=512),
    # Windows in every second layer, sinks, experts with biases: a small gpt-oss 20B.
    "gpt-oss-2b-like": BenchShape(
        "gpt-oss",
        1024,
        24,
        32,
        8,
        64,
        768,
        1.5e5,
        131072,
        n_expert=32,
        n_expert_used=4,
        n_ff_expert=768,
        n_window=128,
    ),
}
"""Benchmark models by name."""


class _WeightWriter:
    """Draws random weights straight into a GGUF."""

    def __init__(self, writer: GGUFWriter, quant: GGMLQuantizationType) -> None:
        self.writer = writer
        self._quant = quant
        self._rng = np.random.default_rng(SEED)

    def matrix(self, name: str, *shape: int) -> None:
        quant = GGMLQuantizationType.Q8_0 if self._is_fine(name, shape[-1]) else self._quant
        if quant in SCALES:
            values = self._blocks(quant, *shape)
        else:
            values = quants.quantize(self._normal(WEIGHT_STD, *shape), quant)
        self.writer.add_tensor(name, values, raw_dtype=quant)

    def _is_fine(self, name: str, n: int) -> bool:
        """Tells what stays at 8 bits.

        Embeddings and head, as llama-quantize keeps a head above 4; rows that are no blocks; in
        MXFP4 all but experts.
        """
        if self._quant is GGMLQuantizationType.MXFP4:
            return "_exps." not in name
        if self._quant.name in {"F16", "BF16", "Q8_0"}:
            return False
        is_end = name.startswith(("token_embd", "output."))
        return is_end or n % GGML_QUANT_SIZES[self._quant][0] != 0

    def vector(self, name: str, n_values: int, value: float = 1.0) -> None:
        self.writer.add_tensor(name, np.full(n_values, value, np.float32))

    def convolution(self, name: str, n_channels: int) -> None:
        self.writer.add_tensor(name, self._normal(CONV_STD, n_channels, N_CONV))

    def values(self, name: str, *shape: int) -> None:
        self.writer.add_tensor(name, self._normal(WEIGHT_STD, *shape))

    def _blocks(self, quant: GGMLQuantizationType, *shape: int) -> npt.NDArray[np.uint8]:
        """Returns blocks of any bytes, scaled to weights like the others."""
        (n_block, n_bytes), (at, at_minima, middle) = GGML_QUANT_SIZES[quant], SCALES[quant]
        n_blocks = int(np.prod(shape)) // n_block
        blocks = self._rng.integers(0, 256, (n_blocks, n_bytes), np.uint8)

        def scale(part: npt.NDArray[np.uint8], d: float) -> None:
            if quant is GGMLQuantizationType.IQ1_M:  # four bits above each of four times twelve
                fours = part[:, at:].view("<u2")
                half = int(np.array(d, np.float16).view(np.uint16))
                fours &= 0x0FFF
                fours |= np.array([half >> 4 * i << 12 & 0xF000 for i in range(4)], np.uint16)
                return
            for place, value in ((at, d), (at_minima, d * middle)):
                if place is not None:
                    part[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)

        sample = blocks[:64].copy()
        scale(sample, 1.0)
        scale(blocks, WEIGHT_STD / float(quants.dequantize(sample, quant).std()))
        return blocks.reshape(*shape[:-1], -1)

    def _normal(self, std: float, *shape: int) -> npt.NDArray[np.float32]:
        return self._rng.standard_normal(shape, np.float32) * np.float32(std)


def write_bench_model(
    path: Path, name: str, quant: str, tokenizer: Path, n_vocab: int = N_VOCAB
) -> None:
    """Writes one benchmark model; the same arguments give the same bytes.

    Args:
        path: File to write.
        name: One of `SHAPES`.
        quant: One of `QUANTS`.
        tokenizer: `tokenizer.json`.
        n_vocab: Vocabulary, filled up with unused tokens: the output head's cost depends on it.

    Raises:
        KeyError: No such shape or type.
    """
    shape, (tensor_type, file_type) = SHAPES[name], QUANTS[quant]
    writer = GGUFWriter(path, shape.arch)
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_vocab_size(n_vocab)
    _add_dimensions(writer, shape)
    if shape.n_delta_heads:
        _add_hybrid_dimensions(writer, shape)
    if shape.arch == "mimo2":
        _add_sliding_window(writer, shape)
    if shape.n_window:
        writer.add_sliding_window(shape.n_window)
    if shape.n_expert:
        _add_expert_dimensions(writer, shape)
    add_vocabulary(writer, tokenizer, n_vocab)
    weights = _WeightWriter(writer, tensor_type)
    weights.matrix("token_embd.weight", n_vocab, shape.n_embd)
    weights.vector("output_norm.weight", shape.n_embd)
    if shape.arch in {"mimo2", "gpt-oss"}:  # they have no tied head
        weights.matrix("output.weight", n_vocab, shape.n_embd)
    for i in range(shape.n_blocks):
        _add_block(weights, shape, i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Writes the models that the command line names.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m models.bench_models", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--quants", nargs="+", choices=QUANTS, default=["Q8_0", "Q4_0"])
    parser.add_argument(
        "--vocab", type=int, help=f"vocabulary to fill up to; default: {N_VOCAB}, or the file's"
    )
    parser.add_argument("--force", action="store_true", help="write files that are there again")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder")
    options = parser.parse_args()
    if unknown := set(options.names) - SHAPES.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    if options.vocab is not None and options.vocab < DENSE.n_vocab:
        parser.error(f"--vocab {options.vocab}: the tokenizer has {DENSE.n_vocab} tokens")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or SHAPES:
        for quant in options.quants:
            _make(options.out / f"{name}-{quant}.gguf", name, quant, options)
    return 0


def _make(path: Path, name: str, quant: str, options: argparse.Namespace) -> None:
    """Writes a model unless it is there; half a file never takes its name."""
    started_s = time.monotonic()
    is_there = path.exists() and not options.force
    if is_there:
        _require_vocabulary(path, options.vocab)
    else:
        part = path.with_suffix(".part")
        tokenizer = Path(__file__).with_name("tokenizer.json")
        write_bench_model(part, name, quant, tokenizer, options.vocab or N_VOCAB)
        part.rename(path)
    how = "there" if is_there else f"made in {time.monotonic() - started_s:.0f} s"
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB, {how}", flush=True)


def _require_vocabulary(path: Path, n_vocab: int | None) -> None:
    """Sees that a file that is kept is what was asked for: its name does not tell."""
    if n_vocab is None:
        return
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    n_has = reader.fields[f"{arch}.vocab_size"].contents()
    if n_has != n_vocab:
        sys.exit(f"{path} is there with a vocabulary of {n_has}; --force writes it again")


def _add_dimensions(writer: GGUFWriter, shape: BenchShape) -> None:
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_blocks)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    if shape.n_latent:
        writer.add_kv_lora_rank(shape.n_latent)
        writer.add_key_length(shape.n_latent + (shape.n_rot or 0))
        writer.add_value_length(shape.n_latent)
        writer.add_key_length_mla(shape.n_embd_head)
        writer.add_value_length_mla(shape.n_plain)
    else:
        writer.add_key_length(shape.n_embd_head)
        writer.add_value_length(shape.n_embd_head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_rot or shape.n_embd_head)


def _add_sliding_window(writer: GGUFWriter, shape: BenchShape) -> None:
    # llama.cpp refuses a `mimo2` without a windowed layer; this window is the whole context.
    writer.add_expert_feed_forward_length(0)
    writer.add_sliding_window(shape.n_ctx)
    writer.add_rope_freq_base_swa(shape.rope_base)
    writer.add_sliding_window_pattern([i == 1 for i in range(shape.n_blocks)])
    writer.add_nextn_predict_layers(shape.n_nextn)


def _add_hybrid_dimensions(writer: GGUFWriter, shape: BenchShape) -> None:
    n_pairs = (shape.n_rot or shape.n_embd_head) // 2
    sections = [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0]
    writer.add_rope_dimension_sections(sections)
    writer.add_ssm_conv_kernel(N_CONV)
    writer.add_ssm_inner_size(shape.n_delta_heads * shape.n_delta_state)
    writer.add_ssm_state_size(shape.n_delta_state)
    writer.add_ssm_time_step_rank(shape.n_delta_heads)
    writer.add_ssm_group_count(shape.n_delta_heads)
    writer.add_full_attention_interval(shape.full_attention_interval)
    writer.add_nextn_predict_layers(shape.n_nextn)


def _add_expert_dimensions(writer: GGUFWriter, shape: BenchShape) -> None:
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_expert)
    if shape.arch == "deepseek2":
        writer.add_leading_dense_block_count(shape.n_dense_lead)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_gating_func(ExpertGatingFuncType.SOFTMAX)


def _add_block(weights: _WeightWriter, shape: BenchShape, i: int) -> None:
    prefix, n_embd = f"blk.{i}.", shape.n_embd
    for norm in NORMS.get(shape.arch, ("attn_norm", "ffn_norm")):
        weights.vector(f"{prefix}{norm}.weight", n_embd)
    if shape.is_recurrent(i):
        _add_delta_net(weights, shape, prefix)
    elif shape.n_latent:
        _add_latent_attention(weights, shape, prefix)
    else:
        _add_attention(weights, shape, prefix)
    if shape.has_experts(i):
        weights.values(f"{prefix}ffn_gate_inp.weight", shape.n_expert, n_embd)
        _add_gated(
            weights, f"{prefix}ffn_{{}}_exps.weight", n_embd, shape.n_ff_expert, shape.n_expert
        )
        if shape.arch == "deepseek2":
            _add_gated(weights, f"{prefix}ffn_{{}}_shexp.weight", n_embd, shape.n_ff_expert)
        if shape.arch == "gpt-oss":
            _add_biases(weights, shape, prefix)
    else:
        _add_gated(weights, f"{prefix}ffn_{{}}.weight", n_embd, shape.n_ff)
    if i >= shape.n_layer:
        _add_nextn(weights, shape, f"{prefix}nextn.")


def _add_gated(weights: _WeightWriter, name: str, n_embd: int, n_ff: int, *n_expert: int) -> None:
    for part in ("gate", "up"):
        weights.matrix(name.format(part), *n_expert, n_ff, n_embd)
    weights.matrix(name.format("down"), *n_expert, n_embd, n_ff)


def _add_biases(weights: _WeightWriter, shape: BenchShape, prefix: str) -> None:
    n_query, n_key = shape.n_head * shape.n_embd_head, shape.n_head_kv * shape.n_embd_head
    weights.values(f"{prefix}attn_sinks.weight", shape.n_head)
    for name, n in (("q", n_query), ("k", n_key), ("v", n_key), ("output", shape.n_embd)):
        weights.values(f"{prefix}attn_{name}.bias", n)
    weights.values(f"{prefix}ffn_gate_inp.bias", shape.n_expert)
    for name, n in (("gate", shape.n_ff_expert), ("up", shape.n_ff_expert), ("down", shape.n_embd)):
        weights.values(f"{prefix}ffn_{name}_exps.bias", shape.n_expert, n)


def _add_latent_attention(weights: _WeightWriter, shape: BenchShape, prefix: str) -> None:
    n_head, n_plain, n_latent, n_embd = shape.n_head, shape.n_plain, shape.n_latent, shape.n_embd
    weights.matrix(f"{prefix}attn_q.weight", n_head * shape.n_embd_head, n_embd)
    weights.matrix(f"{prefix}attn_kv_a_mqa.weight", n_latent + (shape.n_rot or 0), n_embd)
    weights.vector(f"{prefix}attn_kv_a_norm.weight", n_latent)
    weights.matrix(f"{prefix}attn_k_b.weight", n_head, n_latent, n_plain)
    weights.matrix(f"{prefix}attn_v_b.weight", n_head, n_plain, n_latent)
    weights.matrix(f"{prefix}attn_output.weight", n_embd, n_head * n_plain)


def _add_attention(weights: _WeightWriter, shape: BenchShape, prefix: str) -> None:
    n_query, n_key = shape.n_head * shape.n_embd_head, shape.n_head_kv * shape.n_embd_head
    n_gated = n_query * (2 if shape.arch == "qwen35" else 1)
    if shape.arch == "mimo2":
        weights.matrix(f"{prefix}attn_qkv.weight", n_query + 2 * n_key, shape.n_embd)
    else:
        weights.matrix(f"{prefix}attn_q.weight", n_gated, shape.n_embd)
        weights.matrix(f"{prefix}attn_k.weight", n_key, shape.n_embd)
        weights.matrix(f"{prefix}attn_v.weight", n_key, shape.n_embd)
    weights.matrix(f"{prefix}attn_output.weight", shape.n_embd, n_query)
    if shape.arch in {"qwen3", "qwen3moe", "qwen35", "gemma3"}:
        weights.vector(f"{prefix}attn_q_norm.weight", shape.n_embd_head)
        weights.vector(f"{prefix}attn_k_norm.weight", shape.n_embd_head)


def _add_delta_net(weights: _WeightWriter, shape: BenchShape, prefix: str) -> None:
    n_head, n_embd = shape.n_delta_heads, shape.n_embd
    n_inner = n_head * shape.n_delta_state
    weights.matrix(f"{prefix}attn_qkv.weight", 3 * n_inner, n_embd)
    weights.matrix(f"{prefix}attn_gate.weight", n_inner, n_embd)
    weights.matrix(f"{prefix}ssm_out.weight", n_embd, n_inner)
    weights.matrix(f"{prefix}ssm_beta.weight", n_head, n_embd)
    weights.matrix(f"{prefix}ssm_alpha.weight", n_head, n_embd)
    weights.convolution(f"{prefix}ssm_conv1d.weight", 3 * n_inner)
    weights.vector(f"{prefix}ssm_dt.bias", n_head, STEP_BIAS)
    weights.vector(f"{prefix}ssm_a", n_head, DECAY)
    weights.vector(f"{prefix}ssm_norm.weight", shape.n_delta_state)


def _add_nextn(weights: _WeightWriter, shape: BenchShape, prefix: str) -> None:
    weights.matrix(f"{prefix}eh_proj.weight", shape.n_embd, 2 * shape.n_embd)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        weights.vector(f"{prefix}{norm}.weight", shape.n_embd)


if __name__ == "__main__":
    sys.exit(main())
