"""Settings as the extension has them, and its errors in the words of settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drafthouse_server.config import AUTOMATIC, SETTINGS, Config
from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import ModelLoadError, StartupError
from drafthouse_server.host.length import N_CTX_SEQ_AUTOMATIC

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None

__all__ = [
    "GAVE_UP",
    "cache_params",
    "check_built",
    "draft_placement_of",
    "draft_types",
    "engine_params",
    "explained",
    "least_cells",
    "may_be_mtp",
    "n_layers_of",
    "placement_of",
    "request_tokens",
    "rope_params",
    "step_tokens",
    "unfit_errors",
]

GAVE_UP = "llama.cpp gave up, as the line above says"
"""What is told of an end that nothing can catch, behind llama.cpp's own line."""


def check_built() -> None:
    """Checks that the extension is there.

    Raises:
        StartupError: it is not built.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)


def n_layers_of(setting: int | str) -> int:
    """Returns how many layers lie on an accelerator; −1 is all, or as many as fit."""
    return -1 if isinstance(setting, str) else setting


def may_be_mtp(config: Config) -> bool:
    """Returns whether the target's own heads may draft."""
    return config.draft_type in ("mtp", AUTOMATIC) and not config.model_draft


def request_tokens(config: Config, n_ctx_train: int) -> int:
    """Returns the most tokens of one request: as set, or what its slot has cells for.

    As of llama-server, whose slots share `--ctx-size`.
    """
    n_slot = config.ctx_size if config.kv_unified else config.ctx_size // config.parallel
    if config.max_model_len:
        # llama.cpp rounds cells up, which must not make more of a slot than is documented.
        return min(config.max_model_len, n_slot) if config.ctx_size else config.max_model_len
    return min(n_ctx_train, n_slot if config.ctx_size else N_CTX_SEQ_AUTOMATIC)


def least_cells(config: Config) -> int:
    """Returns the KV cells that a server has at least, whatever fits: those that are set."""
    if config.ctx_size:
        return config.ctx_size
    may_lower = config.fit and config.parallel == SETTINGS["parallel"].default
    return config.max_model_len * (1 if may_lower else config.parallel)


def step_tokens(config: Config, draft_type: str) -> int:
    """Returns the most tokens of one step: as set, or at least what drafts of all slots take."""
    if config.batch_size != SETTINGS["batch_size"].default:
        return config.batch_size
    n_drafted = config.draft_max if draft_type != "none" else 0
    return max(config.batch_size, config.parallel * (1 + n_drafted))


def placement_of(config: Config) -> drafthouse_engine.Placement:
    """Returns where the target's weights lie."""
    return drafthouse_engine.Placement(
        devices=() if config.device == ("none",) else config.device or None,
        split_mode=config.split_mode,  # type: ignore[arg-type]  # Config allows the same names only
        main_gpu=config.main_gpu,
        tensor_split=tuple(map(float, config.tensor_split)),
        override_tensor=",".join(config.override_tensor),
        n_cpu_moe=-1 if config.cpu_moe else config.n_cpu_moe,
        load_mode=config.load_mode,  # type: ignore[arg-type]  # as above
    )


def draft_placement_of(config: Config) -> drafthouse_engine.Placement:
    """Returns where the draft model's weights lie."""
    n_cpu_moe = -1 if config.cpu_moe_draft else config.n_cpu_moe_draft
    placed = dataclasses.replace(placement_of(config), override_tensor="", n_cpu_moe=n_cpu_moe)
    if not config.device_draft:
        return placed
    # Shares and the main device are those of the target's devices.
    own = () if config.device_draft == ("none",) else config.device_draft
    return drafthouse_engine.Placement(devices=own, n_cpu_moe=n_cpu_moe, load_mode=placed.load_mode)


def engine_params(
    config: Config, draft_type: str, n_ctx_train: int, threads: Threads
) -> drafthouse_engine.EngineParams:
    """Returns what an engine is made with."""
    n_batch = step_tokens(config, draft_type)
    return drafthouse_engine.EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # Config allows the same names only
        n_ctx=config.ctx_size,
        n_ctx_seq=request_tokens(config, n_ctx_train),
        n_batch=n_batch,
        n_ubatch=min(config.ubatch_size, n_batch),
        n_seq_max=config.parallel,
        n_draft_max=config.draft_max,
        n_threads=threads.n,
        n_threads_batch=threads.n_batch,
        n_wide=threads.n_wide,
        p_min=config.draft_p_min,
        probabilistic=config.draft_sampling == "probabilistic",
        kv_unified=config.kv_unified,
        flash_attention=config.flash_attn != "off",
        flash_forced=config.flash_attn == "on",
        synth_rates=tuple(map(float, config.synth_rates)),
        cache=cache_params(config),
        rope=rope_params(config),
    )


def cache_params(config: Config) -> drafthouse_engine.CacheParams:
    """Returns what cells are kept as."""
    types: dict[str, Any] = {  # Config allows the same names only
        name: getattr(config, f"cache_{name}")
        for name in ("type_k", "type_v", "type_k_draft", "type_v_draft")
    }
    return drafthouse_engine.CacheParams(**types, swa_full=config.swa_full)


def rope_params(config: Config) -> drafthouse_engine.RopeParams:
    """Returns how positions are turned."""
    return drafthouse_engine.RopeParams(
        scaling=config.rope_scaling,  # type: ignore[arg-type]  # Config allows the same names only
        freq_base=config.rope_freq_base,
        freq_scale=1 / config.rope_scale if config.rope_scale else 0.0,
        **{name: getattr(config, name) for name in SETTINGS if name.startswith("yarn_")},
    )


def unfit_errors() -> tuple[type[drafthouse_engine.EngineError], ...]:
    """Returns the errors of a draft type that is not these models'."""
    return (
        drafthouse_engine.NoMtpHeads,
        drafthouse_engine.NotDflash,
        drafthouse_engine.Unsupported,
    )


def draft_types(config: Config, draft_arch: str | None) -> tuple[str, ...]:
    """Returns the draft types to try, one after the other."""
    if config.draft_type != AUTOMATIC:
        return (config.draft_type,)
    if draft_arch is None:
        return ("mtp", "none")
    by_architecture = {"eagle3": ("eagle3",), "dflash": ("dflash", "dspark")}
    return by_architecture.get(draft_arch, ("simple",))


@contextmanager
def explained(path: str, config: Config, *, is_loaded: bool = False) -> Iterator[None]:
    """Turns the extension's errors into one sentence: which file, what is wrong, what to do.

    An assertion of llama.cpp, and a fault over a damaged file, end the process with one, too.

    Args:
        path: The file that is loaded.
        config: The settings.
        is_loaded: Whether the models are there, and contexts are made or used.
    """
    drafthouse_engine.on_abort(f"drafthouse: {_gave_up(path, config, is_loaded=is_loaded)}", 1)
    try:
        yield
    except drafthouse_engine.EngineError as error:
        problem = _in_settings(error.message.removesuffix("."))
        if not is_loaded:
            raise ModelLoadError(path, problem, _advice(error, _OF_LOADING)) from error
        if config.model_draft and _is_of_draft(error):
            path = config.model_draft
        advice = _OF_CONTEXTS if config.draft_type != "none" else _OF_CONTEXTS_WITHOUT_DRAFTS
        raise ModelLoadError(path, problem, _advice(error, advice)) from error
    finally:
        drafthouse_engine.on_abort("")


def _gave_up(path: str, config: Config, *, is_loaded: bool) -> ModelLoadError:
    """Returns what is said where llama.cpp ends the process."""
    problem, advice = GAVE_UP, "use another model, or other settings"
    if is_loaded and config.model_draft:
        problem = f"together with the draft model {config.model_draft!r}, {GAVE_UP}"
        advice = "do without that draft model, use another model, or other settings"
    if config.rpc:
        advice = f"start the RPC server again, where that died; else {advice}"
    return ModelLoadError(path, problem, advice)


_SETTINGS = {
    "n_batch": "batch_size",
    "n_ctx": "ctx_size",
    "n_ctx_seq": "max_model_len",
    "n_draft_max": "draft_max",
    "n_seq_max": "parallel",
    "n_threads": "threads",
    "n_threads_batch": "threads_batch",
    "n_ubatch": "ubatch_size",
    "p_min": "draft_p_min",
}
"""The settings, by the names that the extension has for them."""


def _in_settings(text: str) -> str:
    """Returns an error of the extension in the names of settings."""
    return re.sub(r"\w+", lambda word: _SETTINGS.get(word[0], word[0]), text)


def _is_of_draft(error: drafthouse_engine.EngineError) -> bool:
    """Returns whether an error is about the draft model's file, not the target's."""
    kinds = ("NotEagle3", "NotDflash", "NotDspark", "IncompatibleDraft")
    return type(error).__name__ in kinds or error.message.startswith("the draft model")


def _advice(error: drafthouse_engine.EngineError, table: Mapping[str, str]) -> str:
    """Returns what the operator can do, by the name of the most specific class that is known."""
    if any(words in error.message for words in _OF_WHOLE_FILES):
        return "use another file: this one is whole, and no model that this version can load"
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((table[name] for name in names if name in table), "see the log")


_OF_WHOLE_FILES = (
    "unknown model architecture",
    "key not found in model",
    "CLIP cannot be used as main model",
    "mismatch between the host and model endianness",
    "GGUFv1 is no longer supported",
    "this software only supports up to version",
)
"""What llama.cpp says of files that are as they were made: adapters, projectors, newer models."""

_OF_LOADING = {
    "ModelNotFound": "check the path in the settings model and model_draft",
    "BadModel": "give a complete GGUF file; if this one was downloaded, download it again",
    "OutOfMemory": "free memory, keep fewer layers on devices (gpu_layers), or use a smaller model",
    "Unsupported": "use another file",
    "InvalidArgument": "change this setting",
}
"""What to do when a file cannot be loaded, by the name of the error's class."""

_OF_CONTEXTS_WITHOUT_DRAFTS = {
    "BadModel": _OF_LOADING["BadModel"],
    "OutOfMemory": "lower parallel, max_model_len or ctx_size, or use a smaller model",
    "Unsupported": "use another model",
    "InvalidArgument": "change this setting",
}
"""What to do when the contexts cannot be made."""

_OF_CONTEXTS = _OF_CONTEXTS_WITHOUT_DRAFTS | {
    "NoMtpHeads": "use a model with MTP heads, or set draft_type to none, eagle3, simple, …",
    "NotEagle3": "give an EAGLE-3 model as model_draft, or set draft_type to simple",
    "NotDflash": "give a DFlash model as model_draft, or another draft_type",
    "NotDspark": "give a DSpark model as model_draft, or another draft_type",
    "IncompatibleDraft": "give a draft model that was made for this target, or set draft_type to"
    " none",
    "Unsupported": "use another model; if the drafter is at fault, set draft_type to none",
}
"""What to do when the contexts of target and drafter cannot be made."""
