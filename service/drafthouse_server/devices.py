"""Settings of devices: what computes, where weights lie, what cells are, how positions are turned.

Part of `config.Config`; docs/operations.md tells of RPC servers.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from drafthouse_server.access import is_loopback
from drafthouse_server.errors import ConfigError
from drafthouse_server.setting import ALL, ANY, Rule, between, declare, layers, one_of

__all__ = [
    "CACHE_TYPES",
    "LOAD_MODES",
    "NUMA_STRATEGIES",
    "ROPE_SCALINGS",
    "SPLIT_MODES",
    "DeviceSettings",
    "check_cells",
    "check_devices",
]

CACHE_TYPES = ("f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""What cells can be kept as."""
_WHOLE_TYPES = ("f16", "f32", "bf16")
SPLIT_MODES = ("layer", "none", "row", "tensor")
"""How a model can be split over devices."""
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
"""How a file can get into memory."""
NUMA_STRATEGIES = ("off", "distribute", "isolate", "numactl")
"""Where threads can run on a machine with several memory nodes."""
ROPE_SCALINGS = ("model", "none", "linear", "yarn")
"""How positions beyond the training context can be turned."""

_N_DEVICES_MAX = 16
_ENDPOINT = re.compile(r"[^:,\s]+:([0-9]{1,5})")


def _are_endpoints(texts: tuple[str, ...]) -> bool:
    found = [_ENDPOINT.fullmatch(text) for text in texts]
    return len(set(texts)) == len(texts) and all(it and 0 < int(it[1]) < 1 << 16 for it in found)


def _are_shares(texts: tuple[str, ...]) -> bool:
    try:
        shares = [float(text) for text in texts]
    except ValueError:
        return False
    return len(shares) <= _N_DEVICES_MAX and all(0 <= share <= 1e6 for share in shares)


def _are_overrides(texts: tuple[str, ...]) -> bool:
    return all(0 < text.find("=") < len(text) - 1 for text in texts)


_ENDPOINTS = Rule("addresses of the form host:port, each once", _are_endpoints)
_SHARES = Rule(f"at most {_N_DEVICES_MAX} numbers in [0, 1e6]", _are_shares)
_OVERRIDES = Rule("entries of the form PATTERN=BUFFER TYPE", _are_overrides)
_OR_MODEL = Rule("a value in [0, 1e6], or -1", lambda value: value == -1 or (0 <= value <= 1e6))
_SCALE = Rule(
    "a value in [0.001, 1000], or 0", lambda value: value == 0 or (0.001 <= value <= 1000)
)
_BASE = Rule("a value in [0, 1e12]", lambda value: 0 <= value <= 1e12)

_devices = functools.partial(declare, "Devices and memory")
_rope = functools.partial(declare, "Positions beyond the training context")


@dataclass(frozen=True, kw_only=True)  # no slots: `Config` has several bases
class DeviceSettings:
    """The settings of devices, weights, cells and positions."""

    device: tuple[str, ...] = _devices(
        (),
        ANY,
        "Devices that layers are kept on, by name, such as CUDA0,CUDA1 or RPC0; none: the CPU"
        " alone. Empty: all. What there is, the log says at the start.",
    )
    """Names of devices; empty: all."""
    device_draft: tuple[str, ...] = _devices(
        (),
        ANY,
        "Devices that the layers of model_draft are kept on, by name, whole layers by their free"
        " memory; none: the CPU alone. Empty: placed as the model is.",
        peers=("spec_draft_device",),
    )
    """Names of the drafter's devices; empty: as the target's."""
    gpu_layers_draft: int | str = _devices(
        ALL,
        layers(10000),
        "Layers of model_draft kept on an accelerator, if there is one: a number, or all;"
        " auto is all, too.",
        peers=("n_gpu_layers_draft", "spec_draft_ngl"),
    )
    """The drafter's layers on an accelerator: a number, "all" or "auto" (or -1)."""
    split_mode: str = _devices(
        "layer",
        one_of(*SPLIT_MODES),
        "How a model is split over several devices. layer: whole layers and their cells; none: one"
        " device, main_gpu; row: rows of matrices, where the devices can; tensor: weights and"
        " cells, experimental in llama.cpp.",
    )
    """How a model is split over devices."""
    tensor_split: tuple[str, ...] = _devices(
        (),
        _SHARES,
        "Shares of the model for each device, in their order, such as 3,1. Empty: by their free"
        " memory.",
    )
    """Shares of the devices; empty: by free memory."""
    main_gpu: int = _devices(
        0,
        between(0, _N_DEVICES_MAX - 1),
        "With split_mode none: which of the devices is used, from 0.",
    )
    """Which device is used alone."""
    cpu_moe: bool = _devices(
        False,
        ANY,
        "Keep the weights of all experts (mixture of experts) with the CPU, and the rest of each"
        " layer on its device. Of model_draft: cpu_moe_draft.",
    )
    """Whether experts stay with the CPU."""
    n_cpu_moe: int = _devices(
        0,
        between(0, 10000),
        "Keep the weights of the experts of the first N layers with the CPU. Of model_draft:"
        " n_cpu_moe_draft.",
    )
    """Layers whose experts stay with the CPU."""
    cpu_moe_draft: bool = _devices(
        False,
        ANY,
        "Keep the weights of all experts of model_draft with the CPU, and the rest of each layer on"
        " its device.",
        peers=("spec_draft_cpu_moe",),
    )
    """Whether the drafter's experts stay with the CPU."""
    n_cpu_moe_draft: int = _devices(
        0,
        between(0, 10000),
        "Keep the weights of the experts of the first N layers of model_draft with the CPU.",
        peers=("spec_draft_n_cpu_moe", "spec_draft_ncmoe"),
    )
    """Layers whose experts of the drafter stay with the CPU."""
    override_tensor: tuple[str, ...] = _devices(
        (),
        _OVERRIDES,
        "Memory of single tensors, each as PATTERN=BUFFER TYPE: those whose name holds the regular"
        " expression lie there, such as ffn_down=CPU. Not of model_draft. Empty: none.",
    )
    """Memory of single tensors."""
    load_mode: str = _devices(
        "auto",
        one_of(*LOAD_MODES),
        "How the model's file gets into memory. auto: read where Linux has huge pages and, with"
        " fit, all that the server may grow to is free and the file has room beside it, else"
        " mapped, unless a device cannot; none: read; mmap: mapped; mlock: read, and kept out of"
        " swap, as far as the limit of locked memory allows; mmap+mlock: both; dio: read past the"
        " page cache.",
        peers=("mmap", "no_mmap", "mlock"),
    )
    """How the file gets into memory."""
    numa: str = _devices(
        "off",
        one_of(*NUMA_STRATEGIES),
        "Where threads run on a machine with several memory nodes. distribute: spread over all;"
        " isolate: on the node that the server starts on; numactl: as numactl says.",
    )
    """Where threads run."""
    rpc: tuple[str, ...] = _devices(
        (),
        _ENDPOINTS,
        "Addresses of llama.cpp's RPC servers (ggml-rpc-server), each as host:port; their memory is"
        " that of further devices, RPC0 and so on. The protocol has neither keys nor encryption,"
        " and when such a server dies this one ends: docs/fatal_paths.md. Empty: none.",
    )
    """Addresses of RPC servers; empty: none."""
    insecure_rpc: bool = _devices(
        False,
        ANY,
        "Use RPC servers beyond loopback: whoever is on the way reads and changes weights, prompts"
        " and outputs.",
    )
    """Whether RPC servers may be on other machines."""
    cache_type_k: str = _devices("f16", one_of(*CACHE_TYPES), "Type of the keys in the KV cache.")
    """Type of keys."""
    cache_type_v: str = _devices(
        "f16",
        one_of(*CACHE_TYPES),
        "Type of the values in the KV cache; a quantised one needs flash_attn.",
    )
    """Type of values."""
    cache_type_k_draft: str = _devices(
        "f16",
        one_of(*CACHE_TYPES),
        "Type of the keys in the drafter's KV cache.",
        peers=("spec_draft_type_k",),
    )
    """Type of the drafter's keys."""
    cache_type_v_draft: str = _devices(
        "f16",
        one_of(*CACHE_TYPES),
        "Type of the values in the drafter's KV cache; a quantised one needs flash_attn.",
        peers=("spec_draft_type_v",),
    )
    """Type of the drafter's values."""
    swa_full: bool = _devices(
        True,
        ANY,
        "Layers with a sliding window keep all tokens of a slot, so that prefixes of any length are"
        " reused. Without it they keep the window alone, in less memory (llama-server's default);"
        " so they do with fit, too, where not all would fit else.",
    )
    """Whether layers with a window keep all tokens."""
    rope_scaling: str = _rope(
        "model",
        one_of(*ROPE_SCALINGS),
        "How positions beyond the training context are turned (RoPE). model: as its file says.",
    )
    """How positions are turned."""
    rope_scale: float = _rope(
        0.0,
        _SCALE,
        "Factor by which the context is stretched. 0: the model's.",
    )
    """Factor of the context; 0 is the model's."""
    rope_freq_base: float = _rope(0.0, _BASE, "Base frequency of RoPE. 0: the model's.")
    """Base frequency; 0 is the model's."""
    yarn_orig_ctx: int = _rope(
        0,
        between(0, 1 << 28),
        "YaRN: context in tokens that the model was trained with. 0: the model's.",
    )
    """Training context of YaRN; 0 is the model's."""
    yarn_ext_factor: float = _rope(
        -1.0, _OR_MODEL, "YaRN: mix of extrapolation; 0: interpolation alone. -1: the model's."
    )
    """Mix of extrapolation; -1 is the model's."""
    yarn_attn_factor: float = _rope(
        -1.0, _OR_MODEL, "YaRN: factor of attention's magnitude. -1: the model's."
    )
    """Factor of attention; -1 is the model's."""
    yarn_beta_slow: float = _rope(
        -1.0, _OR_MODEL, "YaRN: high correction dimension. -1: the model's."
    )
    """High correction dimension; -1 is the model's."""
    yarn_beta_fast: float = _rope(
        -1.0, _OR_MODEL, "YaRN: low correction dimension. -1: the model's."
    )
    """Low correction dimension; -1 is the model's."""


def check_cells(settings: DeviceSettings, flash_attn: str) -> None:
    """Checks that attention can read the cells, before a model is loaded for it.

    Raises:
        ConfigError: values are quantised, and flash attention is off.
    """
    for name in ("cache_type_v", "cache_type_v_draft"):
        value = getattr(settings, name)
        if flash_attn == "off" and value not in _WHOLE_TYPES:
            problem = (
                f"{name} is {value}, and quantised values need flash attention; set it to f16, or"
                " flash_attn to auto"
            )
            raise ConfigError(name, value, problem=problem)


def check_devices(settings: DeviceSettings) -> None:
    """Checks that settings of devices go together.

    Raises:
        ConfigError: an RPC server is beyond loopback, and nobody said that this is meant; or one
            setting makes another mean nothing.
    """
    for endpoint in settings.rpc:
        if not (settings.insecure_rpc or is_loopback(endpoint.rpartition(":")[0])):
            problem = (
                f"the RPC server {endpoint} is on another machine, and its protocol has neither"
                " keys nor encryption: whoever is on the way reads and changes weights, prompts and"
                " outputs; set insecure_rpc where only you can reach that network, or tunnel it to"
                " 127.0.0.1"
            )
            raise ConfigError("rpc", endpoint, problem=problem)
    for every, some in (("cpu_moe", "n_cpu_moe"), ("cpu_moe_draft", "n_cpu_moe_draft")):
        n_layers = getattr(settings, some)
        if getattr(settings, every) and n_layers:
            problem = f"{every} keeps the experts of all layers with the CPU; remove {some}"
            raise ConfigError(some, n_layers, problem=problem)
    if settings.rope_scaling == "none" and settings.rope_scale not in (0, 1):
        problem = (
            "with rope_scaling none llama.cpp stretches nothing; remove rope_scale, or set"
            " rope_scaling to linear or yarn"
        )
        raise ConfigError("rope_scale", settings.rope_scale, problem=problem)
