"""Loads the models and makes the contexts, or says in a sentence why not and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from drafthouse_server.config import AUTOMATIC, SETTINGS, Config
from drafthouse_server.engine.parameters import (
    N_CTX_SEQ_AUTOMATIC,
    draft_placement_of,
    draft_types,
    engine_params,
    explained,
    may_be_mtp,
    n_layers_of,
    placement_of,
    request_tokens,
    unfit_errors,
)
from drafthouse_server.engine.threads import Threads, threads_of
from drafthouse_server.errors import ModelLoadError, StartupError
from drafthouse_server.host.engine import CoreFacts, DeviceFacts, EngineFacts
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, DeviceFit, Size, Wish
from drafthouse_server.host.memory import HostMemory, read_memory
from drafthouse_server.host.needs import DeviceUse, ModelFacts, Needs, process_bytes
from drafthouse_server.host.size import choose_size, is_better_read, on_devices, usable_bytes
from drafthouse_server.setting import AS_FIT

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None

__all__ = [
    "WINDOWS_SPARED",
    "Loaded",
    "Surveyor",
    "engine_facts",
    "engine_version",
    "load_engine",
    "sized",
]

_log = logging.getLogger(__name__)

WINDOWS_SPARED = "layers with a sliding window keep the window alone: not all would fit else"
"""What `Surveyor.spare_windows` has done, in words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what was chosen for it."""

    engine: drafthouse_engine.Engine
    """Its contexts are made."""
    threads: Threads
    """What it computes with."""
    prefix_bytes: int
    """Host memory that prefixes may take."""


def load_engine(
    config: Config,
    progress: Callable[[str, float], object] | None = None,
    target: drafthouse_engine.Model | None = None,
) -> Loaded:
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
    loaded = [target] if draft is None else [target, draft]
    n_host_bytes = sum(int(model.setting("host_bytes")) for model in loaded)
    threads = threads_of(config, target.size_bytes, n_host_bytes)
    engine = _make_engine(config, target, draft, threads)
    return Loaded(engine, threads, config.prefix_cache_mib << 20)


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
        self._set = self._config = config
        self._devices: DeviceFit | None = None
        self.survey = self._open(load_mtp=may_be_mtp(config))
        self._asked = Size(config.parallel, request_tokens(config, self.survey.n_ctx_train))
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._draft_type = self._find_draft_type()
            if may_be_mtp(config) and self._draft_type != "mtp":  # nor is their memory needed
                self.survey.close()
                self.survey = self._open(load_mtp=False)
            undo.pop_all()

    def _open(self, *, load_mtp: bool) -> drafthouse_engine.Survey:
        config = self._config
        with explained(config.model):
            return drafthouse_engine.Survey(
                config.model,
                config.model_draft or None,
                n_gpu_layers=n_layers_of(config.gpu_layers),
                load_mtp=load_mtp,
                placement=placement_of(config),
                n_gpu_layers_draft=n_layers_of(config.gpu_layers_draft),
                draft_placement=draft_placement_of(config),
            )

    def close(self) -> None:
        """Frees what was read of the files."""
        self.survey.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_draft_type(self) -> str:
        """Returns the first draft type that these models have, as `load_engine` finds it."""
        arch = self.survey.draft_arch or None
        *others, last = draft_types(self._config, arch)
        least = Size(1, N_CTX_SEQ_LEAST)
        for draft_type in others:
            with explained(self._config.model, self._config), suppress(*unfit_errors()):
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

    def fit_devices(self) -> None:
        """Finds what fits on the devices, where fit is on and nobody has set what lies there.

        From then on the wish is what fits there, and the needs are those of layers that lie so.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        has_device = any(it.kind in ("gpu", "igpu") for it in drafthouse_engine.list_devices())
        if not has_device or not _is_fitted(self._config):
            return
        wish = self.wish
        fit = self._fit(wish.size, is_ctx_fixed=not wish.may_lower_len)
        if fit is None:
            self._devices = DeviceFit(wish.size, wish.size, None)
            return
        fitting = wish.size
        if wish.may_lower_len:  # else the cells are as asked, also where all slots share them
            n_each = min(fitting.max_model_len, fit.n_ctx // fitting.parallel)
            fitting = Size(fitting.parallel, n_each)
        self._devices = DeviceFit(wish.size, fitting, fit.n_gpu_layers)

    def spare_windows(self, memory: HostMemory) -> bool:
        """Has layers with a window keep that alone, where nobody has set it and not all fits else.

        From then on the wish and the needs are those of such a server. Returns whether they do.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        found = self._devices
        n_layers = -1 if found is None else None if found.is_less else found.n_layers
        if self._fits(self._asked, n_layers, memory) or not self._can_spare(self._asked):
            return False
        self._config, self._devices = _spared(self._config), None
        if found is not None:
            self.fit_devices()
        return True

    def _fits(self, size: Size, n_layers: int | None, memory: HostMemory) -> bool:
        """Tells whether a size fits, with so many layers on devices; −1 is all."""
        n_usable = usable_bytes(memory) if memory.total_bytes else math.inf
        return n_layers == -1 and self.needs(size, usable_bytes(memory)).start_bytes <= n_usable

    def _can_spare(self, size: Size) -> bool:
        """Tells whether windows may be kept alone, and cells of a size would take less so."""
        config = self._config
        if not config.fit or config.kv_unified or not config.swa_full:
            return False
        n_full = self.needs(size, 0).cell_bytes
        self._config = _spared(config)
        n_spared = self.needs(size, 0).cell_bytes
        self._config = config
        return n_spared < n_full

    def place_for(self, size: Size, memory: HostMemory) -> int | None:
        """Places layers as a server of a size does that fits them; needs are those from then on.

        Returns:
            Layers on devices, −1 is all. None where layers lie as the settings say: `fit_devices`
            has asked none, or no placement fits.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        self._config = self._set
        n_layers = self._layers_for(size)
        n_there = -1 if self._devices is None else n_layers
        if self._fits(size, n_there, memory) or not self._can_spare(size):
            return n_layers
        self._config = _spared(self._config)
        return self._layers_for(size)

    def _layers_for(self, size: Size) -> int | None:
        if self._devices is None:
            return None
        fit = self._fit(size, is_ctx_fixed=True)
        return None if fit is None else fit.n_gpu_layers

    def _fit(self, size: Size, *, is_ctx_fixed: bool) -> drafthouse_engine.Fit | None:
        params = self.params(size)
        with explained(self._config.model, self._config):
            return self.survey.fit(
                params, is_ctx_fixed=is_ctx_fixed, margin_bytes=_GPU_MARGIN_BYTES
            )

    @property
    def draft_type(self) -> str:
        """How drafts are made: as set, or as found for these models."""
        return self._draft_type

    @property
    def devices(self) -> DeviceFit | None:
        """What fits on the devices; None before `fit_devices`, and where it asked none."""
        return self._devices

    @property
    def wish(self) -> Wish:
        """What the settings ask for, as it fits on the devices, and what of it nobody has set."""
        config = self._config
        size = self._asked if self._devices is None else self._devices.size
        is_default = config.parallel == SETTINGS["parallel"].default and not config.ctx_size
        return Wish(
            size,
            is_default,
            not (config.max_model_len or config.ctx_size),
            config.prefix_cache_mib == SETTINGS["prefix_cache_mib"].default,
        )

    @property
    def most_slots(self) -> int:
        """Slots that a step has room for, whatever the memory."""
        n_draft = self._config.draft_max if self._draft_type != "none" else 0
        return min(_N_SLOTS_MAX, self._config.batch_size // (1 + n_draft))

    def sized(self, size: Size) -> Config:
        """Returns the settings, with other slots and tokens of one request where they ask so."""
        return self._config if size == self._asked else sized(self._config, size)

    def params(self, size: Size, draft_type: str = "") -> drafthouse_engine.EngineParams:
        """Returns what an engine of a size is made with."""
        config = self.sized(size)
        one = Threads(1, 1)
        n_ctx_train = self.survey.n_ctx_train
        return engine_params(config, draft_type or self._draft_type, n_ctx_train, one)

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
        with explained(self._config.model, self._config):
            uses = self.survey.measure(params)
        config = self._config
        n_prefix_mib = config.prefix_cache_mib * config.prefix_cache
        return Needs(
            size=size,
            draft_type=self._draft_type,
            n_cells=params.n_ctx or size.parallel * size.max_model_len,
            host=_use_of(uses[0]),
            devices=tuple((use.device, _use_of(use)) for use in uses[1:]),
            processes_bytes=process_bytes(config.text_workers, self.survey.n_vocab),
            caches_bytes=(n_prefix_mib + config.preempted_mib) << 20,
            prefix_bytes=n_prefix_mib << 20,
        )


def _spared(config: Config) -> Config:
    return dataclasses.replace(config, swa_full=False)


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

    Where heads of the model's own might draft (`may_be_mtp`), and will not, they say so, too.

    Raises:
        ConfigError: a setting needs a drafter, and none was found.
        ModelLoadError: what is set can never fit.
    """
    if not config.fit and (config.draft_type != AUTOMATIC or config.model_draft):
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
        fitted = config
        if config.fit:
            memory = read_memory()
            surveyor.fit_devices()
            if surveyor.spare_windows(memory):
                _log.info("swa_full: %s", WINDOWS_SPARED)
            fitted = _choose(surveyor, config, memory)
        if surveyor.draft_type == "none":
            fitted = dataclasses.replace(fitted, draft_type="none")
        devices = surveyor.devices
        is_placed = devices is not None and devices.n_layers is not None
        yield fitted, surveyor.survey if is_placed else None


def _choose(surveyor: Surveyor, config: Config, memory: HostMemory) -> Config:
    """Returns the settings with what fits into memory, and tells what was chosen.

    That are slots and lengths, in one line, and how files get there, where this is left open.

    Raises:
        ModelLoadError: what is set can never fit.
    """
    if memory.total_bytes:
        chosen = choose_size(surveyor, memory, config.model)
        _log.log(logging.WARNING if chosen.is_less else logging.INFO, "%s", chosen.sentence)
        n_prefix_mib = chosen.needs.prefix_bytes >> 20
        fitted = dataclasses.replace(
            surveyor.sized(chosen.needs.size), prefix_cache_mib=n_prefix_mib
        )
        if config.load_mode == AUTOMATIC and is_better_read(chosen.needs, memory):
            _log.info("load_mode: weights are read, not mapped: there is room, and huge pages")
            return dataclasses.replace(fitted, load_mode="none")
        return fitted
    size, devices = surveyor.wish.size, surveyor.devices
    if devices is not None:
        words = on_devices(devices, surveyor.needs(size))
        slots = f"{size.parallel} slots of {size.max_model_len} tokens"
        _log.log(logging.WARNING if devices.is_less else logging.INFO, "fit: %s%s", words, slots)
    return surveyor.sized(size)


def _is_fitted(config: Config) -> bool:
    """Returns whether as many layers lie on devices as fit there."""
    is_placed = any((config.tensor_split, config.override_tensor, config.cpu_moe, config.n_cpu_moe))
    return (
        config.fit and config.gpu_layers in AS_FIT and not is_placed and config.device != ("none",)
    )


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


def _probe(config: Config) -> None:
    """Has unproven models decoded elsewhere first: a draft alone, the target with its drafter.

    Before this process builds anything of them, a survey included, which may end it. So it is that
    process that finds which layers fit on the devices; those of RPC servers are none of its own.

    One that the system ends for the memory that it takes has told nothing of the model, and with
    rpc the server itself may take far less of this machine's. The server goes on with a warning.

    Raises:
        ModelLoadError: that process died of it, or its decode failed or came to no end.
        StartupError: that process cannot be started.
    """
    arch, draft_arch = _arch_of(config.model), None
    own: dict[str, Any] = {"n_gpu_layers": n_layers_of(config.gpu_layers)}
    own["margin_bytes"] = _GPU_MARGIN_BYTES if _is_fitted(config) else None
    drafts: dict[str, Any] = {"n_gpu_layers": n_layers_of(config.gpu_layers_draft)}
    if not config.rpc:  # their servers serve this process alone; there it is the CPU
        own["placement"], drafts["placement"] = placement_of(config), draft_placement_of(config)
    if config.model_draft:
        draft_arch = _arch_of(config.model_draft)
        of_draft = {"path": config.model_draft} | drafts
        own |= {f"{name}_draft": value for name, value in of_draft.items()}
    draft_type = draft_types(config, draft_arch)[0]
    params = engine_params(config, draft_type, N_CTX_SEQ_AUTOMATIC, Threads(config.threads, 0))
    if draft_arch and draft_arch not in drafthouse_engine.PROVEN | {"eagle3", "dflash"}:
        cache = params.cache
        cache = dataclasses.replace(cache, type_k=cache.type_k_draft, type_v=cache.type_v_draft)
        alone = dataclasses.replace(params, draft_type="ngram-simple", cache=cache)
        _probe_one(config.model_draft, draft_arch, alone, drafts)
    if arch not in drafthouse_engine.PROVEN:
        _probe_one(config.model, arch, params, own)


def _arch_of(path: str) -> str:
    with explained(path), drafthouse_engine.Model(path, vocab_only=True) as header:
        return header.arch


def _probe_one(
    path: str, arch: str, params: drafthouse_engine.EngineParams, places: dict[str, Any]
) -> None:
    unproven = "the architecture %r is not among those that were compared with llama-server: %s is"
    _log.info(unproven + " decoded once in a process of its own (probe)", arch, path)
    try:
        problem = drafthouse_engine.probe_model(path, params, **places)
    except drafthouse_engine.OutOfMemory as error:
        _log.warning("%s, so %s is served without having been decoded first", error.message, path)
        return
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
    with explained(path):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=n_layers_of(config.gpu_layers_draft if is_draft else config.gpu_layers),
            load_mtp=not is_draft and may_be_mtp(config),
            placed_by=placed_by,
            placement=draft_placement_of(config) if is_draft else placement_of(config),
            # Returning None goes on; only False would stop the load.
            progress=None if progress is None else lambda share: progress(path, share),
        )


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
    with explained(config.model):
        target.token_bytes(0)  # a server answers with texts
    *others, last = draft_types(config, None if draft is None else draft.arch)
    for draft_type in others:
        params = engine_params(config, draft_type, target.n_ctx_train, threads)
        with explained(config.model, config), suppress(*unfit_errors()):
            return drafthouse_engine.Engine(target, draft, params)
    # Its rules hold for what was found, too: n-grams first, before nothing, is refused.
    config = dataclasses.replace(config, draft_type=last)
    with explained(config.model, config):
        return drafthouse_engine.Engine(
            target, draft, engine_params(config, last, target.n_ctx_train, threads)
        )
