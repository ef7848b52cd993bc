"""How long requests may be where nobody has set it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.host.fit import Size
from drafthouse_server.host.length import Room, is_ample, longest_ample
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import DeviceUse, Needs

GB = 10**9
HOST = HostMemory(100 * GB, 100 * GB)


def needs(host: DeviceUse, **devices: DeviceUse) -> Needs:
    return Needs(Size(8, 4096), "none", 8 * 4096, host, tuple(devices.items()), GB, 9 * GB)


@pytest.mark.parametrize(
    ("n_train", "n_most", "n_tokens"),
    [
        (40960, 4096, 4096),
        (40960, 8191, 4096),
        (40960, 8192, 8192),
        (40960, 40959, 32768),
        (40960, 10**6, 40960),
        (6000, 10**6, 6000),
        (4096, 10**6, 4096),
        (1024, 10**6, 4096),  # it began with what the model allows
    ],
)
def test_lengths_double_while_memory_is_ample(n_train: int, n_most: int, n_tokens: int) -> None:
    assert longest_ample(4096, n_train, lambda n: n <= n_most) == n_tokens


@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_lengths_stay_within_what_a_model_was_trained_for(n_train: int, n_most: int) -> None:
    n_asked = min(n_train, 4096)
    n_tokens = longest_ample(n_asked, n_train, lambda n: n <= n_most)
    assert n_asked <= n_tokens <= min(n_train, 1 << 20)
    assert n_tokens in (n_asked, n_train, 1 << 20) or n_tokens.bit_count() == 1


@pytest.mark.parametrize(
    ("host", "memory", "is_enough"),
    [
        (DeviceUse(GB, 0, 25 * GB), HOST, True),
        (DeviceUse(GB, 0, 25 * GB + 1), HOST, False),  # cells
        (DeviceUse(GB, 0, 20 * GB, 3 * GB, 3 * GB), HOST, False),  # with what goes with them
        (DeviceUse(45 * GB, 0, 25 * GB), HOST, True),  # weights are no part of the quarter
        (DeviceUse(50 * GB, 0, 25 * GB), HOST, False),  # but of what is free
        (DeviceUse(30 * GB, 20 * GB, 25 * GB), HOST, False),  # they may be read beside the file
        (DeviceUse(GB, 0, 10 * GB), HostMemory(100 * GB, 10 * GB), False),  # others have it
        (DeviceUse(GB, 0, 10 * GB), HostMemory(100 * GB, 90 * GB, 30 * GB, 30 * GB), False),
    ],
)
def test_a_host_is_ample_for_a_quarter(
    host: DeviceUse, memory: HostMemory, *, is_enough: bool
) -> None:
    assert is_ample(needs(host), memory, {}) == is_enough


@pytest.mark.parametrize(
    ("use", "room", "is_enough"),
    [
        (DeviceUse(GB, 0, 12 * GB), Room(24 * GB, 23 * GB, is_own=True), True),
        (DeviceUse(GB, 0, 12 * GB + 1), Room(24 * GB, 23 * GB, is_own=True), False),
        (DeviceUse(6 * GB, 0, 12 * GB), Room(24 * GB, 23 * GB, is_own=True), False),
        (DeviceUse(GB, 0, 12 * GB), Room(24 * GB, 12 * GB, is_own=True), False),
        (DeviceUse(GB, 0, 12 * GB), Room(24 * GB, 23 * GB, is_own=False), False),  # the host's
        (DeviceUse(GB, 0, 6 * GB), Room(24 * GB, 23 * GB, is_own=False), True),
        (DeviceUse(GB, 0, GB), Room(0, 0, is_own=True), False),  # not told
    ],
)
def test_a_device_is_ample_for_a_half(use: DeviceUse, room: Room, *, is_enough: bool) -> None:
    there = needs(DeviceUse(GB), GPU0=use)
    assert is_ample(there, HOST, {"GPU0": room}) == is_enough


def test_a_device_that_is_not_known_is_ample_for_nothing() -> None:
    assert not is_ample(needs(DeviceUse(GB), GPU1=DeviceUse(GB)), HOST, {})
