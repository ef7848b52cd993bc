"""Chooses slots and tokens of one request such that a server fits into the host's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from drafthouse_server.errors import ModelLoadError
from drafthouse_server.host.amounts import format_bytes
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, DeviceFit, Size, Wish, largest_fit
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import CELL_BYTES, Needs, process_bytes

__all__ = [
    "Chosen",
    "Measures",
    "check_books",
    "check_cells",
    "check_processes",
    "choose_size",
    "fit_prefixes",
    "is_better_read",
    "layers_in_words",
    "on_devices",
    "usable_bytes",
]

_SHARE = 0.95
"""Share of the free memory that sizes are chosen for."""

HUGE_BYTES = 64 << 20
"""Weights from which on huge pages gain: patch 0021 asks for them from so many bytes on."""

_MIB = 1 << 20
_LOWER = "parallel, max_model_len or ctx_size"
_ADVICE = f"lower {_LOWER}"
_UNFIT = ", use a smaller model, or allow more memory"


class Measures(Protocol):
    """Knows what a server of each size takes."""

    @property
    def wish(self) -> Wish:
        """What the settings ask for, as it fits on the devices, and what of it nobody has set."""
        ...

    @property
    def devices(self) -> DeviceFit | None:
        """What fits on the devices; None where they were not asked."""
        ...

    def needs(self, size: Size) -> Needs:
        """Returns what a server of a size takes, without taking it."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A size, and what it takes of the host's memory."""

    needs: Needs
    """The size, and what it takes."""
    is_less: bool
    """Whether it is less than the settings ask for, or may not fit, now or once caches are full."""
    sentence: str
    """What was chosen and why, for the log."""


def usable_bytes(memory: HostMemory) -> int:
    """Returns what sizes are chosen for: a little less than what is free."""
    return int(memory.free_bytes * _SHARE)


def fit_prefixes(needs: Needs, memory: HostMemory) -> Needs:
    """Returns the needs with as much memory for prefixes as may be left to them.

    That is half of what is free beside all else that the server may grow to, whole MiB: what others
    on the machine will want is not known. Pages of the weights' file count as taken, too.

    Args:
        needs: What the server takes; of prefixes, what it may take at most.
        memory: Of the host.
    """
    others = needs.full_bytes - needs.prefix_bytes + needs.host.mapped_bytes
    left = max(0, usable_bytes(memory) - others)
    n_bytes = min(needs.prefix_bytes, left // 2 & -_MIB)
    n_caches = needs.caches_bytes - needs.prefix_bytes + n_bytes
    return replace(needs, caches_bytes=n_caches, prefix_bytes=n_bytes)


def is_better_read(needs: Needs, memory: HostMemory) -> bool:
    """Returns whether files are better read into memory than mapped: weights then have huge pages.

    A page of a mapped file is a small one, and a step that waits for memory looks up each of them.
    What is read the system cannot drop, so all that the server may grow to must be free, and room
    for the file's pages as well: they are there while it is read, and another server may map them.

    Args:
        needs: What the server takes.
        memory: Of the host.
    """
    is_large = needs.host.mapped_bytes >= HUGE_BYTES and not needs.devices
    n_bytes = needs.full_bytes + needs.host.mapped_bytes
    return memory.has_huge_pages and is_large and n_bytes <= usable_bytes(memory)


def choose_size(measures: Measures, memory: HostMemory, path: str) -> Chosen:
    """Chooses what fits: what the settings ask for, or less of what nobody has set.

    Slots and lengths are chosen for what a server takes when it starts. What its caches may grow to
    lowers nothing; where that is more than is free, the sentence says so, and prefixes get less
    where nobody has set how much.

    Args:
        measures: Of the models and settings.
        memory: Of the host.
        path: The model's file, for the error.

    Raises:
        ModelLoadError: what is set can never fit.
    """
    asked, devices = measures.wish.size, measures.devices
    n_usable = usable_bytes(memory)
    size = largest_fit(measures.wish, lambda it: measures.needs(it).start_bytes, n_usable)
    if size is None:
        return _unfitting(measures, memory, path)
    needs = measures.needs(size)
    if measures.wish.may_lower_prefixes:
        needs = fit_prefixes(needs, memory)
    of = f"{_words(needs)} of host memory; {format_bytes(memory.free_bytes)} are free"
    parts = [f"fit: {on_devices(devices, needs)}{of}"]
    if size != asked:
        wanted = format_bytes(measures.needs(asked).start_bytes)
        parts.append(f"{asked.parallel} slots of {asked.max_model_len} tokens would take {wanted}")
    if needs.prefix_bytes:
        parts.append(f"prefixes may take {format_bytes(needs.prefix_bytes)}")
    is_full = needs.full_bytes > memory.free_bytes
    if is_full:
        parts.append(
            f"with its caches full the server takes {format_bytes(needs.full_bytes)}: lower"
            " prefix_cache_mib, preempted_mib, parallel or max_model_len"
        )
    sentence = "; ".join(parts)
    is_shorter = devices is not None and devices.size != devices.asked
    if size != asked or is_shorter:
        sentence += ". Set parallel or max_model_len to choose otherwise"
    is_less = size != asked or is_full or (devices is not None and devices.is_less)
    return Chosen(needs, is_less, sentence)


def check_books(n_cells: int, n_contexts: int, memory: HostMemory, path: str) -> None:
    """Checks that there is memory for the books of cells, which a survey needs, too.

    Args:
        n_cells: Cells of a context that nothing can lower.
        n_contexts: Contexts that have as many: the target's, and the drafter's.
        memory: Of the host.
        path: The model's file, for the error.

    Raises:
        ModelLoadError: there is not.
    """
    n_bytes = n_cells * n_contexts * CELL_BYTES
    if memory.total_bytes and n_bytes > memory.free_bytes:
        free = f"; {format_bytes(memory.free_bytes)} are free"
        raise ModelLoadError(
            path,
            f"{n_cells} KV cells take {format_bytes(n_bytes)} of host memory for llama.cpp's books"
            f" alone, and {_most(memory)}{free}",
            _ADVICE + _UNFIT,
        )


def check_processes(n_text_workers: int, memory: HostMemory, path: str) -> None:
    """Checks that there may ever be memory for a server's processes, which a survey needs, too.

    Args:
        n_text_workers: As set.
        memory: Of the host.
        path: The model's file, for the error.

    Raises:
        ModelLoadError: there may not.
    """
    n_bytes = process_bytes(n_text_workers, 0)
    if memory.total_bytes and n_bytes > memory.most_bytes:
        taken = f"a server takes {format_bytes(n_bytes)} of host memory beside its models"
        raise ModelLoadError(path, f"{taken}, and {_most(memory)}", "allow more memory")


def check_cells(n_cells: int, needs: Needs, memory: HostMemory, path: str) -> None:
    """Checks that fewer cells than are wanted could fit.

    Args:
        n_cells: Cells that are wanted, and that nothing can lower.
        needs: What a server with fewer takes.
        memory: Of the host.
        path: The model's file, for the error.

    Raises:
        ModelLoadError: not even these can ever fit.
    """
    if memory.total_bytes and needs.fixed_bytes > memory.most_bytes:
        n_bytes = format_bytes(needs.start_bytes)
        taken = f"{needs.n_cells} of them take {n_bytes} of host memory ({_parts(needs)})"
        raise ModelLoadError(
            path,
            f"{n_cells} KV cells are set, {taken}, and {_most(memory)}",
            _advice(needs) + _UNFIT,
        )


def layers_in_words(n_layers: int) -> str:
    """Returns how many layers lie on devices, in words; −1 is all."""
    if n_layers < 0:
        return "all layers"
    return "1 layer" if n_layers == 1 else f"{n_layers} layers"


def on_devices(devices: DeviceFit | None, needs: Needs) -> str:
    """Returns what lies on devices, as the beginning of a sentence; empty where none was asked.

    Args:
        devices: What fits there.
        needs: What the server takes.
    """
    if devices is None:
        return ""
    if devices.n_layers is None:
        return (
            "the model does not fit on the devices in any way that llama.cpp knows, and is loaded"
            " as set (lower parallel, max_model_len or gpu_layers); "
        )
    words = f"{layers_in_words(devices.n_layers)} on devices"
    if devices.n_layers >= 0:
        there = format_bytes(sum(use.weights_bytes for _, use in needs.devices))
        here = format_bytes(needs.host.weights_bytes)
        words += f" ({there} of weights there, {here} here)"
    if devices.size != devices.asked:
        asked = devices.asked
        words += f", where {asked.parallel} slots of {asked.max_model_len} tokens have no room"
    return f"{words}; "


def _words(needs: Needs) -> str:
    size = needs.size
    taken = format_bytes(needs.start_bytes)
    return f"{size.parallel} slots of {size.max_model_len} tokens take {taken}"


def _most(memory: HostMemory) -> str:
    is_limited = memory.most_bytes < memory.total_bytes
    limit = "its cgroup's limit" if is_limited else "all there is"
    return f"this process may have {format_bytes(memory.most_bytes)}, {limit}"


def _parts(needs: Needs) -> str:
    """Returns what it consists of: their sum is what is taken."""
    host = needs.host
    sizes = {
        "weights": host.weights_bytes,
        "cells": host.cells_bytes,
        "compute": host.compute_bytes,
        "drafter": host.draft_bytes,
        "processes": needs.processes_bytes,
    }
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)


def _advice(needs: Needs) -> str:
    """Returns what to lower: the ubatch first where its graphs take most of the memory."""
    host = needs.host
    others = host.weights_bytes + host.cells_bytes + needs.processes_bytes
    return f"lower ubatch_size, {_LOWER}" if host.compute_bytes > others else _ADVICE


def _unfitting(measures: Measures, memory: HostMemory, path: str) -> Chosen:
    """Returns the least of what was asked for, where even that is more than is free.

    Raises:
        ModelLoadError: it can never fit.
    """
    wish = measures.wish
    n_tokens = wish.size.max_model_len
    least = Size(
        1 if wish.may_lower_parallel else wish.size.parallel,
        min(N_CTX_SEQ_LEAST, n_tokens) if wish.may_lower_len else n_tokens,
    )
    needs = measures.needs(least)
    parts = f"{_words(needs)} of host memory ({_parts(needs)})"
    there = on_devices(measures.devices, needs)
    if needs.fixed_bytes > memory.most_bytes:
        raise ModelLoadError(path, f"{there}{parts}, and {_most(memory)}", _advice(needs) + _UNFIT)
    n_free = format_bytes(memory.free_bytes)
    sentence = (
        f"fit: {there}{parts}, and only {n_free} are free, of which 5 % should stay so: the server"
        f" may become slow or be ended; free memory, or {_advice(needs)}"
    )
    return Chosen(needs, True, sentence)
