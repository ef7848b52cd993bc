"""Chooses slots and tokens of one request such that a server fits into the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drafthouse_server.errors import ModelLoadError
from drafthouse_server.host.amounts import format_bytes
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, Size, Wish, largest_fit
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import Needs

__all__ = ["Chosen", "Measures", "choose_size", "usable_bytes"]

_SHARE = 0.95
"""Share of the free memory that sizes are chosen for."""

_ADVICE = "lower parallel, max_model_len or ctx_size"


class Measures(Protocol):
    """Knows what a server of each size takes."""

    @property
    def wish(self) -> Wish:
        """What the settings ask for, and what of it nobody has set."""
        ...

    def needs(self, size: Size, n_bytes_max: int | None = None) -> Needs:
        """Returns what a server of a size takes, without taking more than `n_bytes_max`."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A size, and what it takes of the host's memory."""

    needs: Needs
    """The size, and what it takes."""
    is_less: bool
    """Whether it is less than the settings ask for, or may not fit."""
    sentence: str
    """What was chosen and why, for the log."""


def usable_bytes(memory: HostMemory) -> int:
    """Returns what sizes are chosen for: a little less than what is free."""
    return int(memory.free_bytes * _SHARE)


def choose_size(measures: Measures, memory: HostMemory, path: str) -> Chosen:
    """Chooses what fits: what the settings ask for, or less of what nobody has set.

    Args:
        measures: Of the models and settings.
        memory: Of the host.
        path: The model's file, for the error.

    Raises:
        ModelLoadError: what is set can never fit.
    """
    asked = measures.wish.size
    n_usable = usable_bytes(memory)
    size = largest_fit(measures.wish, lambda it: measures.needs(it, n_usable).start_bytes, n_usable)
    if size is None:
        return _unfitting(measures, memory, path)
    needs = measures.needs(size, n_usable)
    of = f"{_words(needs)} of host memory; {format_bytes(memory.free_bytes)} are free"
    if size == asked:
        return Chosen(needs, False, f"fit: {of}")
    wanted = format_bytes(measures.needs(asked, n_usable).start_bytes)
    sentence = (
        f"fit: {of}; {asked.parallel} slots of {asked.max_model_len} tokens would take {wanted}."
        " Set parallel or max_model_len to choose otherwise"
    )
    return Chosen(needs, True, sentence)


def _words(needs: Needs) -> str:
    size = needs.size
    taken = format_bytes(needs.start_bytes)
    return f"{size.parallel} slots of {size.max_model_len} tokens take {taken}"


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
    needs = measures.needs(least, usable_bytes(memory))
    parts = f"{_words(needs)} of host memory ({_parts(needs)})"
    if needs.fixed_bytes > memory.most_bytes:
        limit = "its cgroup's limit" if memory.limit_bytes else "all there is"
        raise ModelLoadError(
            path,
            f"{parts}, and this process may have {format_bytes(memory.most_bytes)}, {limit}",
            f"{_ADVICE}, use a smaller model, or allow more memory",
        )
    sentence = (
        f"fit: {parts}, and only {format_bytes(memory.free_bytes)} are free: the server may become"
        f" slow or be ended; free memory, or {_ADVICE}"
    )
    return Chosen(needs, True, sentence)
