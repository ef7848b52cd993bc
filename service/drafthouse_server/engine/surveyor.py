"""Tells what memory a server of these models and settings would take, and what fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from drafthouse_server.config import SETTINGS, Config
from drafthouse_server.engine.parameters import (
    check_built,
    draft_placement_of,
    draft_types,
    engine_params,
    explained,
    least_cells,
    may_be_mtp,
    n_layers_of,
    placement_of,
    request_tokens,
    step_tokens,
    unfit_errors,
)
from drafthouse_server.engine.threads import Threads
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, DeviceFit, Size, Wish
from drafthouse_server.host.length import Room, is_ample, longest_ample
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import CELL_BYTES, DeviceUse, ModelFacts, Needs, process_bytes
from drafthouse_server.host.size import check_books, check_cells, usable_bytes
from drafthouse_server.setting import AS_FIT

# The fake engine, and all tests that use it, work without the extension.
with suppress(ImportError):  # `check_built` says so
    import drafthouse_engine

__all__ = ["GPU_MARGIN_BYTES", "N_SLOTS_MAX", "WINDOWS_SPARED", "Surveyor", "is_fitted", "sized"]

WINDOWS_SPARED = "layers with a sliding window keep the window alone: not all would fit else"
"""What `Surveyor.spare_windows` has done, in words."""

GPU_MARGIN_BYTES = 1 << 30
"""Left free on each device, as llama-server leaves it."""

N_SLOTS_MAX = 256
"""Slots that llama.cpp can have."""

_N_CELLS_AT_ONCE = 1 << 20
"""KV cells that are surveyed without asking whether half of them would fit."""

_N_TOKENS_AT_ONCE = 4096
"""The same of a physical batch's tokens, with which llama.cpp's graphs may grow."""


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
        check_built()
        self._set = self._config = config
        self._devices: DeviceFit | None = None
        self._n_free = 0
        self._uses: dict[drafthouse_engine.EngineParams, list[tuple[str, DeviceUse]]] = {}
        self.survey = self._open(load_mtp=may_be_mtp(config))
        self._as_set = Size(config.parallel, request_tokens(config, self.survey.n_ctx_train))
        self._asked = self._as_set
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._draft_type = self._find_draft_type()
            if may_be_mtp(config) and self._draft_type != "mtp":  # nor is their memory needed
                self.survey.close()
                self.survey = self._open(load_mtp=False)
            undo.pop_all()

    def _open(self, *, load_mtp: bool) -> drafthouse_engine.Survey:
        config = self._config
        with explained(config.model, config):
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
        few = dataclasses.replace(self._config, ctx_size=0)
        for draft_type in others:
            with (
                explained(self._config.model, self._config, is_loaded=True),
                suppress(*unfit_errors()),
            ):
                self.survey.measure(self._params_of(sized(few, _LEAST), draft_type))
                return draft_type
        return last

    def _check_draft(self) -> None:
        """Checks what no survey of a draft model tells, in the words of the engine.

        Raises:
            ModelLoadError: it keeps recurrent states, and what was drafted could not be taken back.
        """
        config = self._config
        with explained(config.model_draft, config):
            survey = drafthouse_engine.Survey(config.model_draft)
        with contextlib.closing(survey), explained(config.model, config, is_loaded=True):
            if survey.is_recurrent:
                raise drafthouse_engine.Unsupported(_RECURRENT_DRAFT)

    def check(self, memory: HostMemory) -> None:
        """Checks what no survey of the whole server tells, or not before it takes all memory.

        That is whether a draft model can draft, and whether cells that are set can fit: llama.cpp
        keeps its books of all cells of a survey, too.

        Raises:
            ModelLoadError: they can never fit, or no engine can be made with these settings.
        """
        if self._draft_type == "simple":
            self._check_draft()
        self._n_free = memory.free_bytes
        config, n_cells = self._config, least_cells(self._config)
        n_contexts = 1 if self._draft_type == "none" or "ngram" in self._draft_type else 2
        check_books(n_cells, n_contexts, memory, config.model)
        slot_bytes = self._asked.max_model_len * n_contexts * CELL_BYTES
        n_slots = max(1, memory.free_bytes // max(1, slot_bytes))
        if memory.total_bytes and self.wish.may_lower_parallel and n_slots < self._asked.parallel:
            self._asked = Size(n_slots, self._asked.max_model_len)
        # Few cells first, then twice as many: what does not fit is told while books are small.
        n_few = _N_CELLS_AT_ONCE
        while n_few < n_cells and memory.total_bytes:
            few = dataclasses.replace(config, ctx_size=n_few)
            check_cells(n_cells, self._measured(few, self._as_set), memory, config.model)
            n_few *= 2

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

    def lengthen(self, memory: HostMemory) -> None:
        """Asks for longer requests where nobody has set how long, and memory is ample for them.

        From then on the wish is such a server.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        n_parallel = self._asked.parallel
        if not self._config.fit or not self.wish.may_lower_len or not memory.total_bytes:
            return
        rooms = {
            it.name: Room(it.total_bytes, it.free_bytes - GPU_MARGIN_BYTES, it.kind == "gpu")
            for it in self._devices_there()
        }
        n_tokens = longest_ample(
            self._asked.max_model_len,
            self.survey.n_ctx_train,
            lambda n: is_ample(self.needs(Size(n_parallel, n)), memory, rooms),
        )
        self._asked = Size(n_parallel, n_tokens)

    def fit_devices(self) -> None:
        """Finds what fits on the devices, where fit is on and nobody has set what lies there.

        From then on the wish is what fits there, and the needs are those of layers that lie so.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        has_device = any(it.kind in ("gpu", "igpu") for it in self._devices_there())
        if not has_device or not is_fitted(self._config):
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

    def _devices_there(self) -> Sequence[drafthouse_engine.Device]:
        with explained(self._config.model, self._config, is_loaded=True):
            return drafthouse_engine.list_devices()

    def _fits(self, size: Size, n_layers: int | None, memory: HostMemory) -> bool:
        """Tells whether a size fits, with so many layers on devices; −1 is all."""
        n_usable = usable_bytes(memory) if memory.total_bytes else math.inf
        return n_layers == -1 and self.needs(size).start_bytes <= n_usable

    def _can_spare(self, size: Size) -> bool:
        """Tells whether windows may be kept alone, and cells of a size would take less so."""
        config = self._config
        if not config.fit or config.kv_unified or not config.swa_full:
            return False
        n_full = self.needs(size).cell_bytes
        self._config = _spared(config)
        n_spared = self.needs(size).cell_bytes
        self._config = config
        return n_spared < n_full

    def place_for(self, size: Size, memory: HostMemory) -> int | None:
        """Places layers as a server of a size does that fits them; needs are those from then on.

        It has cells for that size, whatever ctx_size is.

        Returns:
            Layers on devices, −1 is all. None where layers lie as the settings say: `fit_devices`
            has asked none, or no placement fits.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        # What is not set follows ctx_size: the lengths of the size that is asked for, too.
        self._config = sized(dataclasses.replace(self._set, ctx_size=0), self._as_set)
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
        params = self._params_of(self.sized(size), self._draft_type)
        self._uses.clear()  # layers lie elsewhere from now on
        with explained(self._config.model, self._config, is_loaded=True):
            return self.survey.fit(params, is_ctx_fixed=is_ctx_fixed, margin_bytes=GPU_MARGIN_BYTES)

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
        config = self._config
        if config.batch_size == SETTINGS["batch_size"].default:
            config = dataclasses.replace(config, parallel=N_SLOTS_MAX)
        n_draft = config.draft_max if self._draft_type != "none" else 0
        return min(N_SLOTS_MAX, step_tokens(config, self._draft_type) // (1 + n_draft))

    def sized(self, size: Size) -> Config:
        """Returns the settings, with other slots and tokens of one request where they ask so."""
        return self._config if size == self._as_set else sized(self._config, size)

    def _params_of(self, config: Config, draft_type: str) -> drafthouse_engine.EngineParams:
        if draft_type == "none":  # where they go with no drafter, others say so
            config = dataclasses.replace(config, synth_rates=())
        return engine_params(config, draft_type, self.survey.n_ctx_train, Threads(1, 1))

    def needs(self, size: Size) -> Needs:
        """Returns what a server of a size takes; where that is more than is free, maybe less.

        Raises:
            ModelLoadError: no engine can be made with these settings.
        """
        return self._measured(self.sized(size), size)

    def _measured(self, config: Config, size: Size) -> Needs:
        params = self._params_of(config, self._draft_type)
        return self._needs_of(size, params, self._measure(params))

    def _measure(self, params: drafthouse_engine.EngineParams) -> list[tuple[str, DeviceUse]]:
        """Returns what is used, by device; asked once: books of all cells are made for it.

        Graphs are made for it, too: what does not fit is told while physical batches are small.
        """
        n_half = params.n_ubatch // 2
        if n_half >= _N_TOKENS_AT_ONCE and self._n_free:
            fewer = self._measure(dataclasses.replace(params, n_ubatch=n_half))
            if fewer[0][1].total_bytes > self._n_free:
                return fewer
        if params not in self._uses:
            with explained(self._config.model, self._config, is_loaded=True):
                uses = self.survey.measure(params)
            self._uses[params] = [(use.device, _use_of(use)) for use in uses]
        return self._uses[params]

    def _needs_of(
        self,
        size: Size,
        params: drafthouse_engine.EngineParams,
        uses: list[tuple[str, DeviceUse]],
    ) -> Needs:
        config = self._config
        n_prefix_mib = config.prefix_cache_mib * config.prefix_cache
        return Needs(
            size=size,
            draft_type=self._draft_type,
            n_cells=params.n_ctx or size.parallel * size.max_model_len,
            host=uses[0][1],
            devices=tuple(uses[1:]),
            processes_bytes=process_bytes(config.text_workers, self.survey.n_vocab),
            caches_bytes=(n_prefix_mib + config.preempted_mib) << 20,
            prefix_bytes=n_prefix_mib << 20,
        )


_LEAST = Size(1, N_CTX_SEQ_LEAST)
_RECURRENT_DRAFT = (
    "the draft model has recurrent layers; drafts need a model whose cache can be cut anywhere"
)


def _spared(config: Config) -> Config:
    return dataclasses.replace(config, swa_full=False)


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


def is_fitted(config: Config) -> bool:
    """Returns whether as many layers lie on devices as fit there."""
    is_placed = any((config.tensor_split, config.override_tensor, config.cpu_moe, config.n_cpu_moe))
    return (
        config.fit and config.gpu_layers in AS_FIT and not is_placed and config.device != ("none",)
    )
