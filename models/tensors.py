"""The names of the weights in a GGUF, and the way from a module to them and back.

Each table maps a GGUF name to the parameters that it holds, one below the other; the order is the
order in the file.
"""

import torch
from torch import Tensor, nn

from models.mtp import MTPHead
from models.trunk import Block, Trunk

__all__ = [
    "TensorNames",
    "eagle3_names",
    "mtp_names",
    "read_weights",
    "trunk_names",
    "write_weights",
]

TensorNames = dict[str, tuple[str, ...]]
"""GGUF tensor name → names of the module's parameters, stacked by rows."""

FEED = {
    "ffn_gate.weight": "feed.gate.weight",
    "ffn_up.weight": "feed.up.weight",
    "ffn_down.weight": "feed.down.weight",
}

DELTA_NET = {
    "attn_qkv.weight": "mixer.qkv.weight",
    "attn_gate.weight": "mixer.gate.weight",
    "ssm_conv1d.weight": "mixer.conv",
    "ssm_dt.bias": "mixer.step_bias",
    "ssm_a": "mixer.log_decay",
    "ssm_beta.weight": "mixer.beta.weight",
    "ssm_alpha.weight": "mixer.alpha.weight",
    "ssm_norm.weight": "mixer.norm.weight",
    "ssm_out.weight": "mixer.out.weight",
}

ATTENTION = {
    "attn_q.weight": "query.weight",
    "attn_k.weight": "key.weight",
    "attn_v.weight": "value.weight",
    "attn_output.weight": "out.weight",
}

MTP = {
    "eh_proj.weight": "merge.weight",
    "enorm.weight": "embedding_norm.weight",
    "hnorm.weight": "hidden_norm.weight",
    "shared_head_norm.weight": "norm.weight",
}

EAGLE3 = {
    "fc.weight": "fuse.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    "blk.0.attn_norm.weight": "embedding_norm.weight",
    "blk.0.attn_norm_2.weight": "feature_norm.weight",
    **{f"blk.0.{name}": f"attention.{parameter}" for name, parameter in ATTENTION.items()},
    "blk.0.ffn_norm.weight": "feed_norm.weight",
    **{f"blk.0.{name}": parameter for name, parameter in FEED.items()},
}


def trunk_names(trunk: Trunk) -> TensorNames:
    """Names the tensors of a target or an ordinary draft."""
    names: TensorNames = {
        "token_embd.weight": ("embedding.weight",),
        "output_norm.weight": ("norm.weight",),
    }
    if trunk.head is not None:
        names["output.weight"] = ("head.weight",)
    for i, block in enumerate(trunk.layers):
        names |= _prefixed(f"blk.{i}.", f"blocks.{i}.", _block_names(trunk.arch.name, block))
    return names


def mtp_names(head: MTPHead) -> TensorNames:
    """Names the tensors of an MTP block, which follows the trunk's last layer in the same file."""
    prefix = f"blk.{head.arch.n_layer}."
    block = _prefixed(prefix, "block.", _block_names(head.arch.name, head.block))
    return block | _prefixed(f"{prefix}nextn.", "", _single(MTP))


def eagle3_names() -> TensorNames:
    """Names the tensors of an EAGLE-3 draft."""
    return _single(EAGLE3)


def write_weights(module: nn.Module, names: TensorNames) -> dict[str, Tensor]:
    """Returns a module's weights under their GGUF names, as float32."""
    parameters = dict(module.named_parameters())
    return {
        name: _to_gguf(name, torch.cat([parameters[part].detach().float() for part in parts]))
        for name, parts in names.items()
    }


def read_weights(module: nn.Module, names: TensorNames, weights: dict[str, Tensor]) -> None:
    """Sets a module's weights from a GGUF's tensors.

    Args:
        module: Module to change.
        names: Its table.
        weights: GGUF name → float32 tensor; others may be among them.

    Raises:
        KeyError: A tensor is missing.
        RuntimeError: A shape does not fit.
    """
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, parts in names.items():
            start, rows = 0, _from_gguf(name, weights[name])
            for part in parts:
                end = start + len(parameters[part])
                parameters[part].copy_(rows[start:end])
                start = end


def _block_names(arch_name: str, block: Block) -> TensorNames:
    second = "post_attention_norm.weight" if arch_name == "qwen35" else "ffn_norm.weight"
    names = _single({"attn_norm.weight": "mixer_norm.weight", second: "feed_norm.weight"})
    return names | _mixer_names(arch_name, block) | _single(FEED)


def _mixer_names(arch_name: str, block: Block) -> TensorNames:
    parameters = dict(block.named_parameters())
    if "mixer.conv" in parameters:
        return _single(DELTA_NET)
    names = _prefixed("", "mixer.", _single(ATTENTION))
    if arch_name == "mimo2":
        fused = names.pop("attn_q.weight") + names.pop("attn_k.weight") + names.pop("attn_v.weight")
        names = {"attn_qkv.weight": fused} | names
    if "mixer.query_norm.weight" in parameters:
        names["attn_q_norm.weight"] = ("mixer.query_norm.weight",)
        names["attn_k_norm.weight"] = ("mixer.key_norm.weight",)
    return names


def _single(names: dict[str, str]) -> TensorNames:
    return {name: (parameter,) for name, parameter in names.items()}


def _prefixed(gguf: str, module: str, names: TensorNames) -> TensorNames:
    return {gguf + name: tuple(module + part for part in parts) for name, parts in names.items()}


def _to_gguf(name: str, tensor: Tensor) -> Tensor:
    # llama.cpp holds the decay itself, training its logarithm: so it stays negative.
    return -tensor.exp() if name.endswith("ssm_a") else tensor


def _from_gguf(name: str, tensor: Tensor) -> Tensor:
    return torch.log(-tensor) if name.endswith("ssm_a") else tensor
