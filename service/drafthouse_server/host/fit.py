"""Which slots and contexts fit into the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["N_CTX_SEQ_LEAST", "DeviceFit", "Size", "Wish", "largest_fit"]

N_CTX_SEQ_LEAST = 512
"""Tokens of one request below which a server is of little use."""

_CELLS = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""

_Needs = Callable[["Size"], int]


@dataclass(frozen=True, slots=True)
class Size:
    """What a server's contexts are made for."""

    parallel: int
    """Slots."""
    max_model_len: int
    """Tokens of one request."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the settings ask for, and what of it nobody has set."""

    size: Size
    """Slots and context as the settings say, or their defaults."""
    may_lower_parallel: bool
    """Whether fewer slots will do."""
    may_lower_len: bool
    """Whether shorter requests will do."""
    may_lower_prefixes: bool = False
    """Whether less memory for prefixes will do."""


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """What fits on the devices of what the settings ask for."""

    asked: Size
    """What the settings ask for."""
    size: Size
    """What of it fits; as asked for where nothing does."""
    n_layers: int | None
    """Layers on devices, −1 is all; None: the model fits there in no way that is known."""

    @property
    def is_less(self) -> bool:
        """Whether requests are shorter than asked for, or nothing fits."""
        return self.n_layers is None or self.size != self.asked


def largest_fit(wish: Wish, needs: _Needs, n_bytes: int) -> Size | None:
    """Returns what fits: all of the wish, or fewer slots, or one slot with shorter requests.

    Args:
        wish: What is asked for.
        needs: Returns the bytes that a size takes; more for a larger one.
        n_bytes: What there is.

    Returns:
        None where nothing fits that would do.
    """
    size = wish.size
    if needs(size) <= n_bytes:
        return size
    if wish.may_lower_parallel:
        slots = [Size(n, size.max_model_len) for n in range(1, size.parallel)]
        if (found := _last_fitting(slots, needs, n_bytes)) is not None:
            return found
        size = Size(1, size.max_model_len)
    if wish.may_lower_len:
        lengths = range(N_CTX_SEQ_LEAST, size.max_model_len, _CELLS)
        shorter = [Size(size.parallel, n) for n in lengths]
        return _last_fitting(shorter, needs, n_bytes)
    return None


def _last_fitting(sizes: list[Size], needs: _Needs, n_bytes: int) -> Size | None:
    """Returns the largest of sizes in rising order that fits, by halving."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if needs(sizes[middle]) <= n_bytes:
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None
