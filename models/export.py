"""Writes trained models as GGUF files that llama.cpp loads, and reads their weights back."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter, LlamaFileType
from torch import Tensor

from models.architecture import EAGLE3_LAYERS, Architecture
from models.eagle3 import Eagle3Head
from models.mtp import MTPHead
from models.tensors import eagle3_names, mtp_names, trunk_names, write_weights
from models.trunk import Trunk
from models.vocabulary import add_vocabulary

__all__ = ["export_eagle3", "export_trunk", "read_tensors"]

LICENSE = "psf-2.0"
"""SPDX identifier, lower case as GGUF wants it: the weights derive from the standard library's
text."""

FLOAT32_NAMES = ("ssm_conv1d.weight",)
"""Matrices that llama.cpp wants in float32 although they are not vectors."""


def export_trunk(
    path: Path, trunk: Trunk, mtp: MTPHead | None, tokenizer: Path, is_half: bool = True
) -> None:
    """Writes a target with its MTP block, or an ordinary draft.

    Args:
        path: File to write; its stem without the type suffix becomes the model's name.
        trunk: The trained trunk.
        mtp: Its MTP head; none for a draft.
        tokenizer: `tokenizer.json`.
        is_half: Stores matrices as float16; else as float32, for numerical checks.
    """
    arch, n_blocks = trunk.arch, trunk.arch.n_layer + (mtp is not None)
    writer = _writer(path, arch.name, arch, n_blocks, is_half)
    if mtp is not None:
        writer.add_nextn_predict_layers(1)
    _add_sliding_window(writer, arch, n_blocks)
    _add_delta_net(writer, arch, n_blocks)
    weights = write_weights(trunk, trunk_names(trunk))
    if mtp is not None:
        weights |= write_weights(mtp, mtp_names(mtp))
    _finish(writer, weights, tokenizer, arch.n_vocab, is_half)


def export_eagle3(path: Path, head: Eagle3Head, tokenizer: Path, is_half: bool = True) -> None:
    """Writes an EAGLE-3 draft.

    Args:
        path: File to write; its stem without the type suffix becomes the model's name.
        head: The trained head.
        tokenizer: `tokenizer.json`.
        is_half: Stores matrices as float16; else as float32, for numerical checks.
    """
    writer = _writer(path, "eagle3", head.arch, 1, is_half)
    writer.add_array("eagle3.target_layers", list(EAGLE3_LAYERS))
    writer.add_uint32("eagle3.target_hidden_size", head.arch.n_embd)
    # Widths and layers of another target may fit all the same; the name tells them apart. The
    # engine compares it with the target's general.name.
    writer.add_string("drafthouse.draft.target_name", path.stem.rpartition("-eagle3")[0])
    _finish(writer, write_weights(head, eagle3_names()), tokenizer, head.arch.n_vocab, is_half)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the weights of a float16 or float32 GGUF as float32, by name."""
    return {
        tensor.name: torch.from_numpy(np.array(tensor.data, dtype=np.float32))
        for tensor in GGUFReader(path).tensors
    }


def _writer(path: Path, name: str, arch: Architecture, n_blocks: int, is_half: bool) -> GGUFWriter:
    writer = GGUFWriter(path, name)
    writer.add_name(path.stem.rpartition("-")[0])
    writer.add_license(LICENSE)
    writer.add_context_length(arch.n_ctx)
    writer.add_embedding_length(arch.n_embd)
    writer.add_block_count(n_blocks)
    writer.add_feed_forward_length(arch.n_ff)
    writer.add_head_count(arch.n_head)
    writer.add_head_count_kv(arch.n_head_kv)
    writer.add_key_length(arch.n_embd_head)
    writer.add_value_length(arch.n_embd_head)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_rope_freq_base(arch.rope_base)
    writer.add_rope_dimension_count(arch.n_embd_head)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if is_half else LlamaFileType.ALL_F32)
    return writer


def _add_sliding_window(writer: GGUFWriter, arch: Architecture, n_blocks: int) -> None:
    if not arch.sliding_layers:
        return
    # llama.cpp reads this key of `mimo2` even where no layer has experts.
    writer.add_expert_feed_forward_length(0)
    writer.add_sliding_window(arch.n_window)
    writer.add_rope_freq_base_swa(arch.rope_base)
    # NOTE: one entry for the MTP block too, else the file is refused.
    writer.add_sliding_window_pattern([i in arch.sliding_layers for i in range(n_blocks)])


def _add_delta_net(writer: GGUFWriter, arch: Architecture, n_blocks: int) -> None:
    if arch.name != "qwen35":
        return
    # Text has one position for each of the rotary sections, so that they turn as one.
    n_pairs = arch.n_embd_head // 2
    sections = [(n_pairs + 2) // 3, (n_pairs + 1) // 3, n_pairs // 3, 0]
    writer.add_rope_dimension_sections(sections)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(arch.n_delta_value_heads * arch.n_delta_state)
    writer.add_ssm_state_size(arch.n_delta_state)
    writer.add_ssm_time_step_rank(arch.n_delta_value_heads)
    writer.add_ssm_group_count(arch.n_delta_key_heads)
    is_recurrent = [i in arch.recurrent_layers for i in range(n_blocks)]
    writer.add_array("qwen35.attention.recurrent_layers", is_recurrent)


def _finish(
    writer: GGUFWriter, weights: dict[str, Tensor], tokenizer: Path, n_vocab: int, is_half: bool
) -> None:
    add_vocabulary(writer, tokenizer, n_vocab)
    for name, tensor in weights.items():
        is_small = tensor.ndim == 1 or name.endswith(FLOAT32_NAMES)
        kind = torch.float16 if is_half and not is_small else torch.float32
        writer.add_tensor(name, np.ascontiguousarray(tensor.to(kind).numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
