"""Loads the models and makes the contexts, or says in a sentence why not and what to do."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from drafthouse_server.config import AUTOMATIC, Config
from drafthouse_server.engine.threads import Threads, choose_threads
from drafthouse_server.errors import ModelLoadError, StartupError
from drafthouse_server.step import EngineLimits, ModelCard

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None

__all__ = ["card_of", "engine_version", "limits_of", "load_engine"]

_log = logging.getLogger(__name__)

_N_CTX_SEQ_AUTOMATIC = 4096
"""Tokens of one request where neither `max_model_len` nor `ctx_size` is set.

Models are trained with contexts that no small machine can hold.
"""


def load_engine(
    config: Config, progress: Callable[[str, float], object] | None = None
) -> tuple[drafthouse_engine.Engine, Threads]:
    """Loads the models of a configuration and makes the contexts. Thread: the engine thread.

    Args:
        config: The server's settings.
        progress: Called with a file and the share of it that is loaded, [0, 1].

    Raises:
        ModelLoadError: a file is missing, broken, or does not fit; says which and what to do.
        StartupError: the extension is not built.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)
    may_be_mtp = config.draft_type in ("mtp", AUTOMATIC) and not config.model_draft
    n_gpu_layers = -1 if isinstance(config.gpu_layers, str) else config.gpu_layers
    target = _load_model(config.model, n_gpu_layers, progress, load_mtp=may_be_mtp)
    draft = None
    if config.model_draft:
        draft = _load_model(config.model_draft, n_gpu_layers, progress)
    if config.synth_rates:
        _log.warning(
            "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not"
            " the model's output"
        )
    threads = _threads(config, target)
    return _make_engine(config, target, draft, threads), threads


def engine_version() -> str:
    """Returns the version of llama.cpp and how it was built.

    Raises:
        StartupError: the extension is not built.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)
    return drafthouse_engine.build_version()


def _load_model(
    path: str,
    n_gpu_layers: int,
    progress: Callable[[str, float], object] | None,
    *,
    load_mtp: bool = False,
) -> drafthouse_engine.Model:
    with _explained(path):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=n_gpu_layers,
            load_mtp=load_mtp,
            # Returning None goes on; only False would stop the load.
            progress=None if progress is None else lambda share: progress(path, share),
        )


@contextmanager
def _explained(path: str, config: Config | None = None) -> Iterator[None]:
    """Turns the extension's errors into one sentence: which file, what is wrong, what to do.

    Args:
        path: The file that is loaded.
        config: The settings, where the models are there and the contexts are made.
    """
    try:
        yield
    except drafthouse_engine.EngineError as error:
        problem = _in_settings(error.message.removesuffix("."))
        if config is None:
            raise ModelLoadError(path, problem, _advice(error, _OF_LOADING)) from error
        if config.model_draft and _is_of_draft(error):
            path = config.model_draft
        advice = _OF_CONTEXTS if config.draft_type != "none" else _OF_CONTEXTS_WITHOUT_DRAFTS
        raise ModelLoadError(path, problem, _advice(error, advice)) from error


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
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((table[name] for name in names if name in table), "see the log")


_OF_LOADING = {
    "ModelNotFound": "check the path in the settings model and model_draft",
    "BadModel": "give a complete GGUF file; if this one was downloaded, download it again",
    "OutOfMemory": "use a smaller model, or free memory",
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
"""The same, where there is a drafter."""


def _threads(config: Config, target: drafthouse_engine.Model) -> Threads:
    """Returns what the settings say, and where they say nothing what suits model and machine."""
    n, n_batch = config.threads, config.threads_batch
    if n:
        return Threads(n, n_batch or n, reason="as set")
    cores = drafthouse_engine.find_cores()
    found = choose_threads(cores.n_cores, cores.n_spare, target.size_bytes)
    return dataclasses.replace(found, n_batch=n_batch, n_wide=2) if n_batch else found


def _engine_params(
    config: Config, draft_type: str, target: drafthouse_engine.Model, threads: Threads
) -> drafthouse_engine.EngineParams:
    return drafthouse_engine.EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # Config allows the same names only
        n_ctx=config.ctx_size,
        n_ctx_seq=_request_tokens(config, target.n_ctx_train),
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size,
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
    )


def _request_tokens(config: Config, n_ctx_train: int) -> int:
    """Returns the most tokens of one request: as set, or what its slot has cells for.

    As of llama-server, whose slots share `--ctx-size`.
    """
    if config.max_model_len:
        return config.max_model_len
    n_slot = config.ctx_size if config.kv_unified else config.ctx_size // config.parallel
    return min(n_ctx_train, n_slot or _N_CTX_SEQ_AUTOMATIC)


def _make_engine(
    config: Config,
    target: drafthouse_engine.Model,
    draft: drafthouse_engine.Model | None,
    threads: Threads,
) -> drafthouse_engine.Engine:
    """Makes the contexts, with the first drafter that fits where the setting leaves it open.

    Raises:
        ConfigError: a setting needs a drafter, and none fits.
        ModelLoadError: they cannot be made; says why and what to do.
    """
    *others, last = _draft_types(config, draft)
    for draft_type in others:
        params = _engine_params(config, draft_type, target, threads)
        with _explained(config.model, config), suppress(*_unfit()):
            return drafthouse_engine.Engine(target, draft, params)
    # Its rules hold for what was found, too: n-grams first, before nothing, is refused.
    config = dataclasses.replace(config, draft_type=last)
    with _explained(config.model, config):
        return drafthouse_engine.Engine(
            target, draft, _engine_params(config, last, target, threads)
        )


def _unfit() -> tuple[type[drafthouse_engine.EngineError], ...]:
    """Returns the errors of a draft type that is not these models'."""
    return (
        drafthouse_engine.NoMtpHeads,
        drafthouse_engine.NotDflash,
        drafthouse_engine.Unsupported,
    )


def _draft_types(config: Config, draft: drafthouse_engine.Model | None) -> tuple[str, ...]:
    """Returns the draft types to try, one after the other."""
    if config.draft_type != AUTOMATIC:
        return (config.draft_type,)
    if draft is None:
        return ("mtp", "none")
    by_architecture = {"eagle3": ("eagle3",), "dflash": ("dflash", "dspark")}
    return by_architecture.get(draft.arch, ("simple",))


def limits_of(engine: drafthouse_engine.Engine) -> EngineLimits:
    """Returns the capacities that a plan must respect."""
    limits = engine.limits
    names = (field.name for field in dataclasses.fields(EngineLimits))
    return EngineLimits(**{name: getattr(limits, name) for name in names})


def card_of(model: drafthouse_engine.Model, name: str) -> ModelCard:
    """Returns what a client may know of a model, which is served by this name."""
    return ModelCard(
        name=name,
        architecture=model.arch,
        description=model.description,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_vocab=model.n_vocab,
        n_ctx_train=model.n_ctx_train,
        is_recurrent=model.is_recurrent or model.is_hybrid,
        has_chat_template=bool(model.chat_template),
        token_eos=model.token_eos,
    )
