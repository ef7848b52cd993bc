"""Which slots and contexts are chosen for a memory."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.errors import ModelLoadError
from drafthouse_server.host.amounts import format_bytes
from drafthouse_server.host.fit import N_CTX_SEQ_LEAST, DeviceFit, Size, Wish, largest_fit
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import DeviceUse, Needs, process_bytes
from drafthouse_server.host.size import check_processes, choose_size, fit_prefixes

FIXED = 1000
MIB = 1 << 20


def needs(size: Size) -> int:
    return FIXED + size.parallel * size.max_model_len


@pytest.mark.parametrize(
    ("may_slots", "may_len", "n_bytes", "found"),
    [
        (True, True, FIXED + 8 * 4096, Size(8, 4096)),
        (True, True, FIXED + 8 * 4096 - 1, Size(7, 4096)),
        (True, True, FIXED + 4096, Size(1, 4096)),
        (True, True, FIXED + 4095, Size(1, 3840)),
        (True, True, FIXED + N_CTX_SEQ_LEAST, Size(1, N_CTX_SEQ_LEAST)),
        (True, True, FIXED + N_CTX_SEQ_LEAST - 1, None),
        (False, True, FIXED + 8 * 1024, Size(8, 1024)),
        (True, False, FIXED + 4095, None),
        (False, False, FIXED + 8 * 4096 - 1, None),
    ],
)
def test_slots_go_first_then_lengths_and_never_what_is_set(
    *, may_slots: bool, may_len: bool, n_bytes: int, found: Size | None
) -> None:
    assert largest_fit(Wish(Size(8, 4096), may_slots, may_len), needs, n_bytes) == found


@given(
    st.integers(1, 64), st.integers(1, 5000), st.booleans(), st.booleans(), st.integers(0, 400_000)
)
def test_what_is_chosen_fits_and_is_no_more_than_the_wish(
    parallel: int, n_tokens: int, may_slots: bool, may_len: bool, n_bytes: int
) -> None:
    wish = Wish(Size(parallel, n_tokens), may_slots, may_len)
    found = largest_fit(wish, needs, n_bytes)
    if found is None:
        assert needs(wish.size) > n_bytes
        return
    assert needs(found) <= n_bytes
    assert found.parallel <= parallel
    assert found.max_model_len <= n_tokens
    assert may_slots or found.parallel == parallel
    assert may_len or found.max_model_len == n_tokens


class Scales:
    """A model whose weights, cells and caches take what it says."""

    def __init__(
        self,
        wish: Wish,
        *,
        weights: int = 0,
        mapped: int = 0,
        caches: int = 0,
        prefixes: int = 0,
        devices: DeviceFit | None = None,
    ) -> None:
        self._use = DeviceUse(weights + mapped, mapped, 0, 0, 0)
        self._caches, self._prefixes = caches + prefixes, prefixes
        self.wish = wish
        self.devices = devices

    def needs(self, size: Size) -> Needs:
        n_cells = size.parallel * size.max_model_len
        use = DeviceUse(self._use.weights_bytes, self._use.mapped_bytes, n_cells, 0, 0)
        there = (("GPU0", DeviceUse(weights_bytes=3000)),) if self.devices else ()
        return Needs(
            size, "none", n_cells, use, there, 100, self._caches, prefix_bytes=self._prefixes
        )


WISH = Wish(Size(8, 4096), True, True)


@pytest.mark.parametrize(
    ("compute", "advice"),
    [(5099, "lower parallel, max_model_len or ctx_size, use"), (5612, "lower ubatch_size, par")],
)
def test_graphs_that_take_most_of_the_memory_are_told_with_what_makes_them_large(
    compute: int, advice: str
) -> None:
    """A physical batch of 32k on a hybrid model: no setting that was named could help."""
    use = DeviceUse(weights_bytes=5000, cells_bytes=N_CTX_SEQ_LEAST, compute_bytes=compute)
    least = Needs(Size(1, N_CTX_SEQ_LEAST), "none", N_CTX_SEQ_LEAST, use, (), 0, 0)

    class Wide(Scales):
        def needs(self, _: Size) -> Needs:
            return least

    with pytest.raises(ModelLoadError, match=advice):
        choose_size(Wide(WISH), HostMemory(10_000, 10_000), "m.gguf")
    sentence = choose_size(Wide(WISH), HostMemory(10**6, 10_000), "m.gguf").sentence
    assert f"free memory, or {advice.partition(', use')[0]}" in sentence


def test_a_limit_below_what_a_server_takes_beside_models_is_told_before_it_is_reached() -> None:
    """`doctor` in a cgroup of 100 MiB was ended without a word."""
    least = process_bytes(2, 0)
    check_processes(2, HostMemory(10**12, 10**12, least, least), "m.gguf")
    check_processes(2, HostMemory(0, 0), "m.gguf")  # it is not known
    told = "187 MB of host memory beside its models, and this process may have 105 MB, its cgroup's"
    with pytest.raises(ModelLoadError, match=told):
        check_processes(2, HostMemory(10**12, 10**12, 105 * 10**6, 10**6), "m.gguf")


def test_all_that_was_asked_for_is_one_quiet_line() -> None:
    chosen = choose_size(Scales(WISH), HostMemory(10**6, 10**6), "m.gguf")
    assert (chosen.needs.size, chosen.is_less) == (Size(8, 4096), False)
    assert chosen.sentence == (
        "fit: 8 slots of 4096 tokens take 32.9 kB of host memory; 1 MB are free"
    )


def test_less_says_what_it_would_have_been() -> None:
    chosen = choose_size(Scales(WISH), HostMemory(10**6, 20_000), "m.gguf")
    assert (chosen.needs.size, chosen.is_less) == (Size(4, 4096), True)
    assert "8 slots of 4096 tokens would take 32.9 kB" in chosen.sentence


@pytest.mark.parametrize(("caches", "is_less"), [(67_132, False), (67_133, True)])
def test_caches_that_have_no_room_lower_nothing_and_are_warned_of(
    *, caches: int, is_less: bool
) -> None:
    """The server fits when it starts, and is ended once they are full."""
    chosen = choose_size(Scales(WISH, caches=caches), HostMemory(10**6, 100_000), "m.gguf")
    assert (chosen.needs.size, chosen.is_less) == (Size(8, 4096), is_less)
    words = "; with its caches full the server takes 100 kB: lower prefix_cache_mib"
    assert (words in chosen.sentence) is is_less


@pytest.mark.parametrize(
    ("free_mib", "prefix_mib"),
    [(0, 0), (400, 0), (500, 0), (1000, 225), (5000, 2125), (16800, 7730), (10**6, 8192)],
)
def test_prefixes_get_half_of_what_is_left_where_nobody_has_set_how_much(
    free_mib: int, prefix_mib: int
) -> None:
    """Beside 300 MiB of weights, pages of their file (100 of them), and 100 MiB of preempted."""
    use = DeviceUse(weights_bytes=300 * MIB, mapped_bytes=100 * MIB)
    caches = (8192 + 100) * MIB
    asked = Needs(Size(8, 4096), "none", 1, use, (), 0, caches, prefix_bytes=8192 * MIB)
    memory = HostMemory(10**13, free_mib * MIB)
    found = fit_prefixes(asked, memory)
    assert found.prefix_bytes == prefix_mib * MIB
    assert found.caches_bytes == (prefix_mib + 100) * MIB
    assert found == dataclasses.replace(
        asked, caches_bytes=found.caches_bytes, prefix_bytes=found.prefix_bytes
    )


@pytest.mark.parametrize(("may_lower", "n_bytes"), [(True, 2**21), (False, 2**23)])
def test_what_prefixes_may_take_is_lowered_and_told(*, may_lower: bool, n_bytes: int) -> None:
    wish = dataclasses.replace(WISH, may_lower_prefixes=may_lower)
    memory = HostMemory(10**9, 2 * 10**6 + 2 * 2**21)
    chosen = choose_size(Scales(wish, prefixes=2**23), memory, "m.gguf")
    assert chosen.needs.prefix_bytes == n_bytes
    assert f"; prefixes may take {format_bytes(n_bytes)}" in chosen.sentence
    assert chosen.is_less is not may_lower  # what is set stays, and is warned of
    assert ("with its caches full" in chosen.sentence) is chosen.is_less


@pytest.mark.parametrize(
    ("n_layers", "n_tokens", "words", "is_less"),
    [
        (-1, 4096, "all layers on devices", False),
        (1, 4096, "1 layer on devices (3 kB of weights there, 500 B here)", False),
        (7, 4096, "7 layers on devices (3 kB of weights there, 500 B here)", False),
        (
            -1,
            1000,
            "all layers on devices, where 8 slots of 4096 tokens have no room",
            True,
        ),
        (None, 4096, "the model does not fit on the devices in any way", True),
    ],
)
def test_what_fits_on_devices_is_part_of_the_one_sentence(
    n_layers: int | None, n_tokens: int, words: str, *, is_less: bool
) -> None:
    devices = DeviceFit(Size(8, 4096), Size(8, n_tokens), n_layers)
    wish = Wish(devices.size, True, True)
    scales = Scales(wish, weights=500, devices=devices)
    chosen = choose_size(scales, HostMemory(10**6, 10**6), "m.gguf")
    assert (chosen.needs.size, chosen.is_less) == (devices.size, is_less)
    assert chosen.sentence.startswith(f"fit: {words}")
    assert f"; 8 slots of {n_tokens} tokens take" in chosen.sentence
    # And what the host has no room for is taken from what fits on the devices.
    fewer = choose_size(scales, HostMemory(10**6, 600 + 4 * n_tokens), "m.gguf")
    assert (fewer.needs.size, fewer.is_less) == (Size(3, n_tokens), True)
    assert fewer.sentence.startswith(f"fit: {words}")
    assert f"8 slots of {n_tokens} tokens would take" in fewer.sentence


def test_what_can_never_fit_is_refused_with_figures() -> None:
    scales = Scales(Wish(Size(8, 4096), False, False))
    with pytest.raises(ModelLoadError, match=r"may have 20 kB, its cgroup's limit; lower parallel"):
        choose_size(scales, HostMemory(10**6, 10**6, 20_000, 20_000), "m.gguf")
    with pytest.raises(ModelLoadError, match=r"8 slots of 4096 tokens take 32.9 kB.*all there is"):
        choose_size(scales, HostMemory(20_000, 20_000), "m.gguf")
    with pytest.raises(ModelLoadError, match=r"may have 20 kB, all there is; lower parallel"):
        choose_size(scales, HostMemory(20_000, 20_000, 10**6, 10**6), "m.gguf")


def test_what_does_not_fit_now_and_weights_that_can_be_read_again_are_warned_of() -> None:
    scales = Scales(Wish(Size(8, 4096), False, False))
    chosen = choose_size(scales, HostMemory(10**6, 20_000), "m.gguf")
    assert (chosen.needs.size, chosen.is_less) == (Size(8, 4096), True)
    assert "only 20 kB are free" in chosen.sentence
    mapped = choose_size(Scales(WISH, mapped=10**6), HostMemory(10**5, 10**5), "m.gguf")
    assert (mapped.needs.size, mapped.is_less) == (Size(1, N_CTX_SEQ_LEAST), True)
    with pytest.raises(ModelLoadError):
        choose_size(Scales(WISH, weights=10**6), HostMemory(10**5, 10**5), "m.gguf")


def test_a_server_s_processes_hold_the_vocabulary_each() -> None:
    assert (
        process_bytes(2, 1000) - process_bytes(2, 0)
        == 4 * (process_bytes(0, 1000) - process_bytes(0, 0)) // 2
    )
