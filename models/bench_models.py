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
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

from models.vocabulary import add_vocabulary

__all__ = ["SHAPES", "BenchShape", "main", "write_bench_model"]

N_CONV = 4
SEED = 0
WEIGHT_STD = 0.02
CONV_STD = 0.3
STEP_BIAS = -3.0
DECAY = -1.0

QUANTS = {
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "Q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Dimensions of a benchmark model, named as llama.cpp names them."""

    arch: str
    """llama.cpp's architecture: `qwen3`, `llama`, `mimo2` or `qwen35`."""

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

    @property
    def n_blocks(self) -> int:
        """Layers and MTP blocks."""
        return self.n_layer + self.n_nextn

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
}
"""Benchmark models by name."""


class _WeightWriter:
    """Draws random weights straight into a GGUF."""

    def __init__(self, writer: GGUFWriter, quant: GGMLQuantizationType) -> None:
        self.writer = writer
        self._quant = quant
        self._rng = np.random.default_rng(SEED)

    def matrix(self, name: str, n_rows: int, n_columns: int) -> None:
        # Embeddings and head stay at 8 bits, as llama-quantize keeps a head above 4.
        is_fine = (
            name.startswith(("token_embd", "output.")) and self._quant == GGMLQuantizationType.Q4_0
        )
        quant = GGMLQuantizationType.Q8_0 if is_fine else self._quant
        values = self._normal(n_rows, n_columns, WEIGHT_STD)
        self.writer.add_tensor(name, quants.quantize(values, quant), raw_dtype=quant)

    def vector(self, name: str, n_values: int, value: float = 1.0) -> None:
        self.writer.add_tensor(name, np.full(n_values, value, np.float32))

    def convolution(self, name: str, n_channels: int) -> None:
        self.writer.add_tensor(name, self._normal(n_channels, N_CONV, CONV_STD))

    def _normal(self, n_rows: int, n_columns: int, std: float) -> npt.NDArray[np.float32]:
        return self._rng.standard_normal((n_rows, n_columns), np.float32) * np.float32(std)


def write_bench_model(
    path: Path, name: str, quant: str, tokenizer: Path, n_vocab: int = 32768
) -> None:
    """Writes one benchmark model; the same arguments give the same bytes.

    Args:
        path: File to write.
        name: One of `SHAPES`.
        quant: One of `F16`, `Q8_0`, `Q4_0`.
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
    add_vocabulary(writer, tokenizer, n_vocab)
    weights = _WeightWriter(writer, tensor_type)
    weights.matrix("token_embd.weight", n_vocab, shape.n_embd)
    weights.vector("output_norm.weight", shape.n_embd)
    if shape.arch == "mimo2":  # it has no tied head
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
    parser.add_argument("--vocab", type=int, default=32768, help="vocabulary to fill up to")
    parser.add_argument("--force", action="store_true", help="write files that are there again")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder")
    options = parser.parse_args()
    if unknown := set(options.names) - SHAPES.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or SHAPES:
        for quant in options.quants:
            _make(options.out / f"{name}-{quant}.gguf", name, quant, options)
    return 0


def _make(path: Path, name: str, quant: str, options: argparse.Namespace) -> None:
    """Writes a model unless it is there; half a file never takes its name."""
    started_s = time.monotonic()
    is_there = path.exists() and not options.force
    if not is_there:
        part = path.with_suffix(".part")
        tokenizer = Path(__file__).with_name("tokenizer.json")
        write_bench_model(part, name, quant, tokenizer, options.vocab)
        part.rename(path)
    how = "there" if is_there else f"made in {time.monotonic() - started_s:.0f} s"
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB, {how}", flush=True)


def _add_dimensions(writer: GGUFWriter, shape: BenchShape) -> None:
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_blocks)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
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


def _add_block(weights: _WeightWriter, shape: BenchShape, i: int) -> None:
    prefix, n_embd = f"blk.{i}.", shape.n_embd
    second = "post_attention_norm" if shape.arch == "qwen35" else "ffn_norm"
    weights.vector(f"{prefix}attn_norm.weight", n_embd)
    weights.vector(f"{prefix}{second}.weight", n_embd)
    if shape.is_recurrent(i):
        _add_delta_net(weights, shape, prefix)
    else:
        _add_attention(weights, shape, prefix)
    weights.matrix(f"{prefix}ffn_gate.weight", shape.n_ff, n_embd)
    weights.matrix(f"{prefix}ffn_up.weight", shape.n_ff, n_embd)
    weights.matrix(f"{prefix}ffn_down.weight", n_embd, shape.n_ff)
    if i >= shape.n_layer:
        _add_nextn(weights, shape, f"{prefix}nextn.")


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
    if shape.arch in {"qwen3", "qwen35"}:
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
