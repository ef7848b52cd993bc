"""Loads the models and makes the contexts, or says in a sentence why not and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

from drafthouse_server.config import AUTOMATIC, SETTINGS, Config
from drafthouse_server.engine.threads import Threads, threads_of
from drafthouse_server.errors import ModelLoadError, StartupError
from drafthouse_server.host.engine import CoreFacts, DeviceFacts, EngineFacts
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, Size, Wish
from drafthouse_server.host.memory import read_memory
from drafthouse_server.host.needs import DeviceUse, ModelFacts, Needs, process_bytes
from drafthouse_server.host.size import choose_size
from drafthouse_server.setting import AS_FIT

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None

__all__ = ["Surveyor", "engine_facts", "engine_version", "load_engine", "sized"]

_log = logging.getLogger(__name__)

_N_CTX_SEQ_AUTOMATIC = 4096
"""Tokens of one request where none are set: few machines hold what models are trained with."""


def load_engine(
    config: Config,
    progress: Callable[[str, float], object] | None = None,
    target: drafthouse_engine.Model | None = None,
) -> tuple[drafthouse_engine.Engine, Threads]:
    """Loads the models of a configuration and makes the contexts. Thread: the engine thread.

    Args:
        config: The server's settings.
        progress: Called with a file and the share of it that is loaded, [0, 1].
        target: The target, where another engine here has it.

    Raises:
        ModelLoadError: a file is missing, broken, or does not fit; says which and what to do.
        StartupError: the extension is not built, or the process that probes cannot be started.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)
    _prepare_devices(config)
    if config.probe:
        _probe(config)
    with _fitted(config) as (config, survey):  # noqa: PLR1704  # as it fits from here on
        target = target or _load_model(config, progress, placed_by=survey)
    draft = _load_model(config, progress, is_draft=True) if config.model_draft else None
    if config.synth_rates:
        _log.warning(
            "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not"
            " the model's output"
        )
    threads = threads_of(config, target.size_bytes)
    return _make_engine(config, target, draft, threads), threads


def _n_layers(setting: int | str) -> int:
    return -1 if isinstance(setting, str) else setting


def _may_be_mtp(config: Config) -> bool:
    return config.draft_type in ("mtp", AUTOMATIC) and not config.model_draft


class Surveyor:
    """Tells what memory a server of these settings would take, without taking it.

    Args:
        config: The server's settings.

    Raises:
        ModelLoadError: a file is missing or broken, or no server can be made of these settings.
        StartupError: the extension is not built.

    Thread:
        Any, one at a time.
    """

    def __init__(self, config: Config) -> None:
        if _unbuilt is not None:
            raise StartupError(_unbuilt)
        self._config = config
        with _explained(config.model):
            self.survey = drafthouse_engine.Survey(
                config.model,
                config.model_draft or None,
                n_gpu_layers=_n_layers(config.gpu_layers),
                load_mtp=_may_be_mtp(config),
                placement=_placement(config),
                n_gpu_layers_draft=_n_layers(config.gpu_layers_draft),
                draft_placement=_draft_placement(config),
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self.survey.close)
            self._draft_type = self._find_draft_type()
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.survey.close()

    def _find_draft_type(self) -> str:
        """Returns the first draft type that these models have, as `load_engine` finds it."""
        arch = self.survey.draft_arch or None
        *others, last = _draft_types(self._config, arch)
        least = Size(1, N_CTX_SEQ_LEAST)
        for draft_type in others:
            with _explained(self._config.model, self._config), suppress(*_unfit()):
                self.survey.measure(self.params(least, draft_type))
                return draft_type
        return last

    @property
    def facts(self) -> ModelFacts:
        """What the target's file says."""
        survey = self.survey
        return ModelFacts(
            survey.path,
            survey.arch,
            survey.description,
            survey.n_params,
            survey.size_bytes,
            survey.n_ctx_train,
            survey.n_vocab,
        )

    @property
    def wish(self) -> Wish:
        """What the settings ask for, and what of it nobody has set."""
        config = self._config
        size = Size(config.parallel, _request_tokens(config, self.survey.n_ctx_train))
        is_default = config.parallel == SETTINGS["parallel"].default and not config.ctx_size
        return Wish(size, is_default, not (config.max_model_len or config.ctx_size))

    @property
    def most_slots(self) -> int:
        """Slots that a step has room for, whatever the memory."""
        n_draft = self._config.draft_max if self._draft_type != "none" else 0
        return min(_N_SLOTS_MAX, self._config.batch_size // (1 + n_draft))

    def params(self, size: Size, draft_type: str = "") -> drafthouse_engine.EngineParams:
        """Returns what an engine of a size is made with."""
        config = self._config
        if size != self.wish.size:
            config = sized(config, size)
        one = Threads(1, 1)
        n_ctx_train = self.survey.n_ctx_train
        return _engine_params(config, draft_type or self._draft_type, n_ctx_train, one)

    def needs(self, size: Size, n_bytes_max: int | None = None) -> Needs:
        """Returns what a server of a size takes.

        Args:
            size: Slots and tokens of one request.
            n_bytes_max: Memory that must not be taken to find out. Recurrent states are: where they
                would exceed this, what one slot takes is multiplied.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        if self.survey.is_recurrent and n_bytes_max is not None and size.parallel > 1:
            one = self.needs(Size(1, size.max_model_len))
            cells = one.host.cells_bytes * size.parallel
            if one.start_bytes + cells > n_bytes_max:
                host = dataclasses.replace(one.host, cells_bytes=cells)
                n_cells = one.n_cells * size.parallel
                return dataclasses.replace(one, size=size, n_cells=n_cells, host=host)
        params = self.params(size)
        with _explained(self._config.model, self._config):
            uses = self.survey.measure(params)
        config = self._config
        return Needs(
            size=size,
            draft_type=self._draft_type,
            n_cells=params.n_ctx or size.parallel * size.max_model_len,
            host=_use_of(uses[0]),
            devices=tuple((use.device, _use_of(use)) for use in uses[1:]),
            processes_bytes=process_bytes(config.text_workers, self.survey.n_vocab),
            caches_bytes=(config.prefix_cache_mib + config.preempted_mib) << 20,
        )


_N_SLOTS_MAX = 256
_GPU_MARGIN_BYTES = 1 << 30
"""Left free on each device, as llama-server leaves it."""


def _use_of(use: drafthouse_engine.MemoryUse) -> DeviceUse:
    return DeviceUse(
        use.weights_bytes,
        use.mapped_bytes,
        use.cells_bytes,
        use.compute_bytes,
        use.draft_cells_bytes + use.draft_compute_bytes,
    )


def sized(config: Config, size: Size) -> Config:
    """Returns the settings with other slots and tokens of one request."""
    return dataclasses.replace(config, parallel=size.parallel, max_model_len=size.max_model_len)


@contextmanager
def _fitted(config: Config) -> Iterator[tuple[Config, drafthouse_engine.Survey | None]]:
    """Gives the settings as they fit into memory, and who says where the weights go.

    Raises:
        ModelLoadError: what is set can never fit.
    """
    if not config.fit:
        yield config, None
        return
    with contextlib.ExitStack() as stack:
        surveyor = None
        # What is wrong with files and settings is told by those who load them.
        with suppress(ModelLoadError):
            surveyor = stack.enter_context(Surveyor(config))
            surveyor.needs(Size(1, N_CTX_SEQ_LEAST))
        if surveyor is None:
            yield config, None
            return
        config, is_placed = _fit_devices(config, surveyor)
        memory = read_memory()
        if memory.total_bytes:
            chosen = choose_size(surveyor, memory, config.model)
            _log.log(logging.WARNING if chosen.is_less else logging.INFO, "%s", chosen.sentence)
            if chosen.needs.size != surveyor.wish.size:
                config = sized(config, chosen.needs.size)
        yield config, surveyor.survey if is_placed else None


def _fit_devices(config: Config, surveyor: Surveyor) -> tuple[Config, bool]:
    """Returns the settings as they fit on the devices, and whether these have been asked."""
    has_device = any(it.kind in ("gpu", "igpu") for it in drafthouse_engine.list_devices())
    is_placed = any((config.tensor_split, config.override_tensor, config.cpu_moe, config.n_cpu_moe))
    if not has_device or config.gpu_layers not in AS_FIT or is_placed or config.device == ("none",):
        return config, False
    wish = surveyor.wish
    with _explained(config.model, config):
        fit = surveyor.survey.fit(
            surveyor.params(wish.size),
            is_ctx_fixed=not wish.may_lower_len,
            margin_bytes=_GPU_MARGIN_BYTES,
        )
    if fit is None:
        _log.warning(
            "fit: the model does not fit on the devices in any way that llama.cpp knows; it is"
            " loaded as set; lower parallel, max_model_len or gpu_layers"
        )
        return config, False
    n_each = min(wish.size.max_model_len, fit.n_ctx // wish.size.parallel)
    layers = "all" if fit.n_gpu_layers < 0 else str(fit.n_gpu_layers)
    _log.info(
        "fit: %s layers on devices, %d slots of %d tokens", layers, wish.size.parallel, n_each
    )
    if n_each < wish.size.max_model_len:
        config = sized(config, Size(wish.size.parallel, n_each))
    return config, True


def engine_version() -> str:
    """Returns the version of llama.cpp and how it was built.

    Raises:
        StartupError: the extension is not built.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)
    return drafthouse_engine.build_version()


def engine_facts(rpc: tuple[str, ...] = ()) -> EngineFacts:
    """Returns how the engine was built, and what it can compute on.

    Args:
        rpc: RPC servers, whose devices are devices of this process from now on.

    Raises:
        StartupError: the extension is not built, or an RPC server does not answer as it should.
    """
    text = engine_version().partition(";")[2]
    features = frozenset(re.findall(r"(\w+) = 1\b", text.partition("CPU :")[2]))
    cores = drafthouse_engine.find_cores()
    try:
        drafthouse_engine.add_rpc_servers(rpc)
    except drafthouse_engine.EngineError as error:
        raise StartupError(error.message) from error
    devices = tuple(
        DeviceFacts(it.name, it.description, it.kind, it.total_bytes, it.free_bytes)
        for it in drafthouse_engine.list_devices()
    )
    return EngineFacts(
        drafthouse_engine.build_facts(),
        features,
        CoreFacts(cores.n_cores, cores.n_physical, cores.n_logical, cores.quota),
        devices,
    )


def _prepare_devices(config: Config) -> None:
    """Makes RPC servers' devices, and says what there is.

    Raises:
        StartupError: an RPC server does not answer, or speaks another version.
    """
    try:
        numa: Any = config.numa  # Config allows the same names only
        if numa != "off" and not drafthouse_engine.set_numa(numa):
            _log.warning("numa %s changes nothing: there is one memory node", config.numa)
        drafthouse_engine.add_rpc_servers(config.rpc)
    except drafthouse_engine.EngineError as error:
        raise StartupError(error.message) from error
    for device in drafthouse_engine.list_devices():
        if device.kind != "cpu":
            n_free, n_total = device.free_bytes >> 20, device.total_bytes >> 20
            name = f"{device.name} ({device.description})"
            _log.info("device %s: %d of %d MiB are free", name, n_free, n_total)


def _placement(config: Config) -> drafthouse_engine.Placement:
    return drafthouse_engine.Placement(
        devices=() if config.device == ("none",) else config.device or None,
        split_mode=config.split_mode,  # type: ignore[arg-type]  # Config allows the same names only
        main_gpu=config.main_gpu,
        tensor_split=tuple(map(float, config.tensor_split)),
        override_tensor=",".join(config.override_tensor),
        n_cpu_moe=-1 if config.cpu_moe else config.n_cpu_moe,
        load_mode=config.load_mode,  # type: ignore[arg-type]  # as above
    )


def _draft_placement(config: Config) -> drafthouse_engine.Placement:
    placed = dataclasses.replace(_placement(config), override_tensor="", n_cpu_moe=0)
    if not config.device_draft:
        return placed
    # Shares and the main device are those of the target's devices.
    own = () if config.device_draft == ("none",) else config.device_draft
    return drafthouse_engine.Placement(devices=own, load_mode=placed.load_mode)


def _probe(config: Config) -> None:
    """Has unproven models decoded elsewhere first: a draft alone, the target with its drafter.

    Raises:
        ModelLoadError: that process died of it, or its decode failed or came to no end.
        StartupError: that process cannot be started.
    """
    arch, draft_arch = _arch_of(config.model), None
    own: dict[str, Any] = {"n_gpu_layers": _n_layers(config.gpu_layers)}
    drafts: dict[str, Any] = {"n_gpu_layers": _n_layers(config.gpu_layers_draft)}
    if not config.rpc:  # their servers serve this process alone; there it is the CPU
        own["placement"], drafts["placement"] = _placement(config), _draft_placement(config)
    if config.model_draft:
        draft_arch = _arch_of(config.model_draft)
        of_draft = {"path": config.model_draft} | drafts
        own |= {f"{name}_draft": value for name, value in of_draft.items()}
    draft_type = _draft_types(config, draft_arch)[0]
    params = _engine_params(config, draft_type, _N_CTX_SEQ_AUTOMATIC, Threads(config.threads, 0))
    if draft_arch and draft_arch not in drafthouse_engine.PROVEN | {"eagle3", "dflash"}:
        cache = params.cache
        cache = dataclasses.replace(cache, type_k=cache.type_k_draft, type_v=cache.type_v_draft)
        alone = dataclasses.replace(params, draft_type="ngram-simple", cache=cache)
        _probe_one(config.model_draft, draft_arch, alone, drafts)
    if arch not in drafthouse_engine.PROVEN:
        _probe_one(config.model, arch, params, own)


def _arch_of(path: str) -> str:
    with _explained(path), drafthouse_engine.Model(path, vocab_only=True) as header:
        return header.arch


def _probe_one(
    path: str, arch: str, params: drafthouse_engine.EngineParams, places: dict[str, Any]
) -> None:
    unproven = "the architecture %r is not among those that were compared with llama-server: %s is"
    _log.info(unproven + " decoded once in a process of its own (probe)", arch, path)
    try:
        problem = drafthouse_engine.probe_model(path, params, **places)
    except OSError as error:
        what = f"the process that decodes {path!r} first cannot be started: {error}"
        raise StartupError(f"{what}; repair that, or do without it (probe false)") from error
    if problem:
        raise ModelLoadError(path, problem, "use another model")


def _load_model(
    config: Config,
    progress: Callable[[str, float], object] | None,
    *,
    is_draft: bool = False,
    placed_by: drafthouse_engine.Survey | None = None,
) -> drafthouse_engine.Model:
    path = config.model_draft if is_draft else config.model
    with _explained(path):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=_n_layers(config.gpu_layers_draft if is_draft else config.gpu_layers),
            load_mtp=not is_draft and _may_be_mtp(config),
            placed_by=placed_by,
            placement=_draft_placement(config) if is_draft else _placement(config),
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
"""What to do when the contexts of target and drafter cannot be made."""


def _engine_params(
    config: Config, draft_type: str, n_ctx_train: int, threads: Threads
) -> drafthouse_engine.EngineParams:
    return drafthouse_engine.EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # Config allows the same names only
        n_ctx=config.ctx_size,
        n_ctx_seq=_request_tokens(config, n_ctx_train),
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
        cache=_cache_params(config),
        rope=_rope_params(config),
    )


def _cache_params(config: Config) -> drafthouse_engine.CacheParams:
    types: dict[str, Any] = {  # Config allows the same names only
        name: getattr(config, f"cache_{name}")
        for name in ("type_k", "type_v", "type_k_draft", "type_v_draft")
    }
    return drafthouse_engine.CacheParams(**types, swa_full=config.swa_full)


def _rope_params(config: Config) -> drafthouse_engine.RopeParams:
    return drafthouse_engine.RopeParams(
        scaling=config.rope_scaling,  # type: ignore[arg-type]  # Config allows the same names only
        freq_base=config.rope_freq_base,
        freq_scale=1 / config.rope_scale if config.rope_scale else 0.0,
        **{name: getattr(config, name) for name in SETTINGS if name.startswith("yarn_")},
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
    with _explained(config.model):
        target.token_bytes(0)  # a server answers with texts
    *others, last = _draft_types(config, None if draft is None else draft.arch)
    for draft_type in others:
        params = _engine_params(config, draft_type, target.n_ctx_train, threads)
        with _explained(config.model, config), suppress(*_unfit()):
            return drafthouse_engine.Engine(target, draft, params)
    # Its rules hold for what was found, too: n-grams first, before nothing, is refused.
    config = dataclasses.replace(config, draft_type=last)
    with _explained(config.model, config):
        return drafthouse_engine.Engine(
            target, draft, _engine_params(config, last, target.n_ctx_train, threads)
        )


def _unfit() -> tuple[type[drafthouse_engine.EngineError], ...]:
    """Returns the errors of a draft type that is not these models'."""
    return (
        drafthouse_engine.NoMtpHeads,
        drafthouse_engine.NotDflash,
        drafthouse_engine.Unsupported,
    )


def _draft_types(config: Config, draft_arch: str | None) -> tuple[str, ...]:
    """Returns the draft types to try, one after the other."""
    if config.draft_type != AUTOMATIC:
        return (config.draft_type,)
    if draft_arch is None:
        return ("mtp", "none")
    by_architecture = {"eagle3": ("eagle3",), "dflash": ("dflash", "dspark")}
    return by_architecture.get(draft_arch, ("simple",))
