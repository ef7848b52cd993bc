"""Facts on the models: what they need of the memory, and what fits."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator, Mapping

from drafthouse_server.config import Config
from drafthouse_server.doctor.report import Problem, Section
from drafthouse_server.engine.loading import check_texts
from drafthouse_server.engine.parameters import least_cells
from drafthouse_server.engine.surveyor import N_SLOTS_MAX, WINDOWS_SPARED, Surveyor
from drafthouse_server.engine.threads import threads_of
from drafthouse_server.errors import ConfigError, ModelLoadError
from drafthouse_server.host.amounts import format_bytes, format_count
from drafthouse_server.host.fit import Size, Wish, largest_fit
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import Needs
from drafthouse_server.host.size import (
    Chosen,
    check_books,
    check_processes,
    choose_size,
    fit_prefixes,
    layers_in_words,
    usable_bytes,
)

__all__ = ["examine_model"]

_LENGTHS = (1024, 4096, 16384, 65536, 131072)
"""Tokens of one request, for which is told how many slots fit."""


_Room = Mapping[str, int]


def examine_model(
    config: Config, memory: HostMemory, room: _Room
) -> tuple[list[Section], list[Problem]]:
    """Returns what the models need and what fits, and what is wrong with that.

    Args:
        config: The settings.
        memory: Of the host.
        room: Free bytes of each other device, by its name; those of RPC servers among them.

    Raises:
        StartupError: the extension is not built.
    """
    try:
        check_processes(config.text_workers, memory, config.model)
    except ModelLoadError as error:
        return [], [Problem("memory", str(error))]
    try:
        check_books(least_cells(config), 1, memory, config.model)
        with Surveyor(config) as surveyor:
            odd = check_texts(config)
            surveyor.check(memory)
            surveyor.lengthen(memory)  # as the server does
            surveyor.fit_devices()
            is_spared = surveyor.spare_windows(memory)
            sections, problems = _examine(config, surveyor, memory, room)
            problems += _draft_problems(config, surveyor.draft_type)
            problems += [Problem("model", problem, "warning") for problem in odd]
            if is_spared:
                sections[0].add("swa_full", "false", f"false: {WINDOWS_SPARED}")
            return sections, problems
    except ModelLoadError as error:
        return [], [Problem("model", str(error))]


def _examine(
    config: Config, surveyor: Surveyor, memory: HostMemory, room: _Room
) -> tuple[list[Section], list[Problem]]:
    wished = surveyor.needs(surveyor.wish.size)
    if config.fit and memory.total_bytes and surveyor.wish.may_lower_prefixes:
        wished = fit_prefixes(wished, memory)
    sections = [_model(config, surveyor, wished), _needs(wished)]
    if not memory.total_bytes:  # `serve` chooses no sizes then
        unknown = Problem(
            "memory",
            "this machine does not tell how much memory it has (/proc/meminfo), so what fits is not"
            " known, and a server takes what the settings ask for; set parallel and max_model_len",
            "warning",
        )
        return sections, [unknown, *_lock_problems(config, wished), *_device_problems(wished, room)]
    try:
        chosen = choose_size(surveyor, memory, config.model)
    except ModelLoadError as error:
        return [*sections, _fits(surveyor, memory, room)], [Problem("memory", str(error))]
    fits = _fits(surveyor, memory, room)
    taken = chosen.needs if config.fit else wished
    size = taken.size
    fits.add(
        "served",
        f"{size.parallel} x {size.max_model_len}",
        f"{size.parallel} slots of {size.max_model_len} tokens",
    )
    problems = [
        *_problems(config, chosen, taken),
        *_device_problems(taken, room),
    ]
    return [*sections, fits], problems


def _model(config: Config, surveyor: Surveyor, needs: Needs) -> Section:
    facts = surveyor.facts
    section = Section("model")
    section.add("file", facts.path)
    section.add("architecture", facts.architecture)
    # llama.cpp knows the sizes of published models alone.
    described = facts.description.replace("?B", format_count(facts.n_params))
    section.add("description", described)
    section.add("parameters", facts.n_params, format_count(facts.n_params))
    section.add("training_context", facts.n_ctx_train, f"{facts.n_ctx_train} tokens")
    section.add("vocabulary", facts.n_vocab, f"{facts.n_vocab} tokens")
    section.add("draft_type", needs.draft_type)
    if config.model_draft:
        section.add("draft_model", config.model_draft)
    threads = threads_of(config, facts.size_bytes, surveyor.survey.host_bytes)
    section.add("threads", threads.n, f"{threads.n} ({threads.reason})")
    return section


def _needs(needs: Needs) -> Section:
    size = needs.size
    section = Section("needs")
    asked = f"{size.parallel} slots of {size.max_model_len} tokens"
    section.add("for", f"{size.parallel} x {size.max_model_len}", asked)
    section.add("each_token_bytes", round(needs.cell_bytes), format_bytes(round(needs.cell_bytes)))
    for place, use in (("host", needs.host), *needs.devices):
        for name, n_bytes in (
            ("weights", use.weights_bytes),
            ("cells", use.cells_bytes),
            ("compute", use.compute_bytes),
            ("drafter", use.draft_bytes),
        ):
            section.add(f"{place}_{name}_bytes", n_bytes, format_bytes(n_bytes))
    for name, n_bytes in (
        ("processes", needs.processes_bytes),
        ("host_total", needs.start_bytes),
        ("caches_at_most", needs.caches_bytes),
        ("host_at_most", needs.full_bytes),
    ):
        section.add(f"{name}_bytes", n_bytes, format_bytes(n_bytes))
    return section


def _fits(surveyor: Surveyor, memory: HostMemory, room: _Room) -> Section:
    """Returns how many slots of each length fit, their layers placed as a server does for it.

    It is placed for as many slots as are asked for; from then on needs are those of the last.
    """
    section = Section("fits")
    n_usable = usable_bytes(memory)
    n_asked = surveyor.wish.size.parallel

    def needed(size: Size) -> int:
        needs = surveyor.needs(size)
        return n_usable + 1 if any(_overfull(needs, room)) else needs.start_bytes

    n_train = surveyor.facts.n_ctx_train or surveyor.wish.size.max_model_len  # some name none
    lengths = sorted({n for n in _LENGTHS if n < n_train} | {min(n_train, _LENGTHS[-1])})
    for n_tokens in lengths:
        n_layers = surveyor.place_for(Size(n_asked, n_tokens), memory)
        wish = Wish(
            Size(surveyor.most_slots, n_tokens), may_lower_parallel=True, may_lower_len=False
        )
        found = largest_fit(wish, needed, n_usable)
        n_slots = found.parallel if found else 0
        bound = ""
        if n_slots == surveyor.most_slots:
            is_most = n_slots == N_SLOTS_MAX
            bound = f", as many as {'llama.cpp' if is_most else 'batch_size'} allows"
        places = "" if n_layers is None else f", {layers_in_words(n_layers)} on devices"
        section.add(str(n_tokens), n_slots, f"{n_slots} slots of {n_tokens} tokens{bound}{places}")
    return section


def _overfull(needs: Needs, room: _Room) -> Iterator[tuple[str, int]]:
    """Yields the devices that have less room than is needed there, and how much is."""
    for name, use in needs.devices:
        if use.total_bytes > room.get(name, use.total_bytes):
            yield name, use.total_bytes


def _device_problems(needs: Needs, room: _Room) -> Iterator[Problem]:
    for name, n_bytes in _overfull(needs, room):
        yield Problem(
            "memory",
            f"device {name} has {format_bytes(room[name])} free, and what would lie there takes"
            f" {format_bytes(n_bytes)}; lower parallel, max_model_len or gpu_layers (with fit, and"
            " gpu_layers auto, the server chooses at its start)",
            "warning",
        )


def _problems(config: Config, chosen: Chosen, taken: Needs) -> Iterator[Problem]:
    if chosen.is_less:
        yield Problem("memory", chosen.sentence, "warning")
    yield from _lock_problems(config, taken)


def _draft_problems(config: Config, found: str) -> Iterator[Problem]:
    """Yields what of the settings cannot go with the draft type that was found."""
    try:
        dataclasses.replace(config, draft_type=found)
    except ConfigError as error:
        yield Problem("model", str(error))


def _lock_problems(config: Config, needs: Needs) -> Iterator[Problem]:
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_locked = "mlock" in config.load_mode
    if is_locked and hard != resource.RLIM_INFINITY and hard < needs.host.weights_bytes:
        yield Problem(
            "locked_memory",
            f"load_mode is {config.load_mode}, and this process may lock {format_bytes(hard)} of"
            f" the {format_bytes(needs.host.weights_bytes)} of weights; raise the limit (`ulimit"
            " -l`, LimitMEMLOCK), or leave mlock out of load_mode",
            "warning",
        )
