"""Where weights lie, what cells are, and how positions are turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from drafthouse_engine.fields import check_bool, check_float, check_int, check_text, refusal

__all__ = [
    "CACHE_TYPES",
    "DEVICES_MAX",
    "LOAD_MODES",
    "NUMA_STRATEGIES",
    "ROPE_SCALINGS",
    "SPLIT_MODES",
    "CacheParams",
    "CacheType",
    "LoadMode",
    "NumaStrategy",
    "Placement",
    "RopeParams",
    "RopeScaling",
    "SplitMode",
]

DEVICES_MAX: Final = 16
"""Most devices that one model lies on (`SPEC_DEVICES_MAX`)."""

SplitMode: TypeAlias = Literal["layer", "none", "row", "tensor"]
"""How a model is split over several devices: by layers, not at all (one device), by rows of
matrices where devices can, or by weights and cells, which is experimental in llama.cpp."""

SPLIT_MODES: Final[tuple[SplitMode, ...]] = get_args(SplitMode)
"""All modes; the place of one is its `spec_split_mode`."""

LoadMode: TypeAlias = Literal["default", "auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
"""How a file gets into memory, in the words of llama-server: `auto` maps it unless a device cannot,
`none` reads it, `mlock` keeps it out of swap, `dio` reads past the page cache. `default` is `auto`,
or `none` with use_mmap=False."""

LOAD_MODES: Final[tuple[LoadMode, ...]] = get_args(LoadMode)
"""All modes; the place of one is its `spec_load_mode`."""

NumaStrategy: TypeAlias = Literal["off", "distribute", "isolate", "numactl"]
"""Where threads run on a machine with several memory nodes: wherever the system puts them, spread
over all nodes, on the node that the process is on, or as `numactl` says."""

NUMA_STRATEGIES: Final[tuple[NumaStrategy, ...]] = get_args(NumaStrategy)
"""All strategies; the place of one is its `spec_numa`."""

CacheType: TypeAlias = Literal[
    "f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
"""What a cell's numbers are kept as."""

CACHE_TYPES: Final[tuple[CacheType, ...]] = get_args(CacheType)
"""All types; the place of one is its `spec_cache_type`."""

RopeScaling: TypeAlias = Literal["model", "none", "linear", "yarn"]
"""How positions beyond the training context are turned; `model` as the file says."""

ROPE_SCALINGS: Final[tuple[RopeScaling, ...]] = get_args(RopeScaling)
"""All ways; the place of one is its `spec_rope_scaling`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of a model lie; the defaults: whole layers over all devices.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    devices: tuple[str, ...] | None = None
    """Names of devices (`list_devices`); empty is the CPU alone, None all devices."""
    split_mode: SplitMode = "layer"
    """How the model is split over several devices."""
    main_gpu: int = 0
    """With split_mode none: which of the devices, from 0."""
    tensor_split: tuple[float, ...] = ()
    """Shares of the devices, in their order, ≥ 0; empty is by their free memory."""
    override_tensor: str = ""
    """`PATTERN=BUFFER TYPE`, commas between: tensors whose name holds the regular expression lie in
    that memory, such as `CPU`."""
    n_cpu_moe: int = 0
    """The experts of the first so many layers stay with the CPU; −1 is of all."""
    load_mode: LoadMode = "default"
    """How the file gets into memory."""

    def __post_init__(self) -> None:
        for name in self.devices or ():
            check_text(self, "devices", name)
            if not name or "," in name:
                raise refusal(self, "devices", name, "names of devices")
        if self.split_mode not in SPLIT_MODES:
            wanted = f"one of {', '.join(SPLIT_MODES)}"
            raise refusal(self, "split_mode", self.split_mode, wanted)
        if self.load_mode not in LOAD_MODES:
            raise refusal(self, "load_mode", self.load_mode, f"one of {', '.join(LOAD_MODES)}")
        check_int(self, "main_gpu", 0, DEVICES_MAX - 1)
        check_int(self, "n_cpu_moe", -1, 10000)
        check_text(self, "override_tensor", self.override_tensor)
        shares = self.tensor_split
        if len(shares) > DEVICES_MAX or not all(0 <= share <= 1e6 for share in shares):
            raise refusal(self, "tensor_split", shares, "at most 16 shares in [0, 1e6]")


@dataclass(frozen=True, slots=True)
class CacheParams:
    """What the cells of an engine are.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    type_k: CacheType = "f16"
    """Type of the target's keys."""
    type_v: CacheType = "f16"
    """Type of the target's values; a quantised one needs flash_attention."""
    type_k_draft: CacheType = "f16"
    """Type of the drafter's keys."""
    type_v_draft: CacheType = "f16"
    """Type of the drafter's values."""
    swa_full: bool = True
    """Layers with a sliding window keep all tokens. Without it they keep the window and n_ubatch
    more, in less memory; then tokens behind the window can be neither cut to nor copied."""

    def __post_init__(self) -> None:
        for field in ("type_k", "type_v", "type_k_draft", "type_v_draft"):
            if getattr(self, field) not in CACHE_TYPES:
                wanted = f"one of {', '.join(CACHE_TYPES)}"
                raise refusal(self, field, getattr(self, field), wanted)
        check_bool(self, "swa_full")


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How positions are turned (RoPE), of target and drafter; the defaults are the model's own.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    scaling: RopeScaling = "model"
    """How positions beyond the training context are turned."""
    freq_base: float = 0.0
    """Base frequency, ≥ 0; 0 is the model's."""
    freq_scale: float = 0.0
    """Factor of frequencies, ≥ 10⁻⁶; 1/N stretches the context N times; 0 is the model's."""
    yarn_orig_ctx: int = 0
    """YaRN: tokens that the model was trained with; 0 is the model's."""
    yarn_ext_factor: float = -1.0
    """YaRN: mix of extrapolation, ≥ 0, 0 is interpolation alone; −1 is the model's."""
    yarn_attn_factor: float = -1.0
    """YaRN: factor of attention, ≥ 0; −1 is the model's."""
    yarn_beta_slow: float = -1.0
    """YaRN: high correction dimension, ≥ 0; −1 is the model's."""
    yarn_beta_fast: float = -1.0
    """YaRN: low correction dimension, ≥ 0; −1 is the model's."""

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise refusal(self, "scaling", self.scaling, f"one of {', '.join(ROPE_SCALINGS)}")
        check_float(self, "freq_base", 0, 1e12)
        if self.freq_scale != 0:
            check_float(self, "freq_scale", 1e-6, 1e6)
        check_int(self, "yarn_orig_ctx", 0, 1 << 28)
        for field in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"):
            if getattr(self, field) != -1:
                check_float(self, field, 0, 1e6)
