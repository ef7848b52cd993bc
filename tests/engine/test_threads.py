"""How many threads a decode gets: what the machine has, and what the server makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafthouse_server.engine.threads import choose_threads

DEMO = 10_600_000
DENSE_50M = 53_000_000
QWEN_600M_Q4 = 350_000_000
EIGHT_B_Q4 = 4_700_000_000


@pytest.mark.parametrize(
    ("n_cores", "n_bytes", "n"),
    [
        (1, DEMO, 1),
        (1, EIGHT_B_Q4, 1),
        (2, DEMO, 1),
        (2, DENSE_50M, 2),
        (2, QWEN_600M_Q4, 2),
        (4, DEMO, 3),
        (4, DENSE_50M, 3),
        (4, QWEN_600M_Q4, 4),
        (64, DEMO, 63),
        (64, QWEN_600M_Q4, 63),
        (64, EIGHT_B_Q4, 64),
    ],
)
def test_long_steps_take_all_cores_and_short_ones_leave_one(
    n_cores: int, n_bytes: int, n: int
) -> None:
    assert choose_threads(n_cores, 0, n_bytes).n == n


@pytest.mark.parametrize(
    ("n_cores", "n_spare", "n"),
    [
        (1, 0.5, 1),  # a quota of 1.5
        (2, 0.25, 1),  # of 2.25: too little to live on
        (4, 0.7, 4),
        (32, 32, 32),  # two hardware threads a core
    ],
)
def test_short_steps_leave_no_core_where_the_host_has_something_else(
    n_cores: int, n_spare: float, n: int
) -> None:
    assert choose_threads(n_cores, n_spare, DEMO).n == n


@pytest.mark.parametrize(("n_cores", "n"), [(1, 1), (2, 1), (4, 3), (5, 4), (64, 4)])
def test_beside_devices_a_few_threads_suffice(n_cores: int, n: int) -> None:
    found = choose_threads(n_cores, 0, 0)
    assert (found.n, found.n_batch) == (n, n)


def test_a_reason_is_told() -> None:
    assert choose_threads(1, 0, DEMO).reason == "the only core"
    assert choose_threads(2, 0, DEMO).reason.startswith("steps are short")
    assert choose_threads(2, 0, QWEN_600M_Q4).reason.endswith("175 MB of weights for each")
    assert choose_threads(4, 0.7, DEMO).reason.startswith("0.7 more")
    assert choose_threads(4, 0.7, 0).reason == "devices compute all layers"


@pytest.mark.parametrize(
    ("n_cores", "n_bytes", "n_batch", "n_wide"),
    [
        (1, DEMO, 1, 2),
        (2, DEMO, 2, 19),
        (4, DEMO, 4, 38),
        (4, DENSE_50M, 4, 8),
        (2, DENSE_50M, 2, 2),
    ],
)
def test_prompts_and_crowds_take_all_cores(
    n_cores: int, n_bytes: int, n_batch: int, n_wide: int
) -> None:
    found = choose_threads(n_cores, 0, n_bytes)
    assert (found.n_batch, found.n_wide) == (n_batch, n_wide)


def test_a_larger_model_or_a_larger_machine_never_gets_fewer_threads() -> None:
    for n_cores in range(1, 130):
        found = [choose_threads(n_cores, 0, int(1e6 * 2**i)).n for i in range(18)]
        assert found == sorted(found)
    for n_bytes in (DEMO, DENSE_50M, QWEN_600M_Q4, EIGHT_B_Q4):
        found = [choose_threads(n_cores, 0, n_bytes).n for n_cores in range(1, 130)]
        assert found == sorted(found)
        assert all(n >= max(1, n_cores - 1) for n_cores, n in enumerate(found, 1))


# What the engine finds, on machines made of files.


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    return root


V2_GROUP = {"proc/self/cgroup": "0::/pod/box"}
V1_GROUP = {"proc/self/cgroup": "9:memory:/x\n4:cpu,cpuacct:/docker/abc\n0::/"}
NO_GROUP = {"proc/self/cgroup": "0::/"}


@pytest.mark.parametrize(
    ("files", "quota", "n_cores"),
    [
        ({}, 0, 8),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "max 100000"}, 0, 8),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5, 1),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4, 4),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "1600000 100000"}, 16, 8),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "nonsense"}, 0, 8),
        (NO_GROUP | {"sys/fs/cgroup/cpu.max": "100000 0"}, 0, 8),
        # The least of a group and those around it.
        (
            V2_GROUP
            | {
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/cpu.max": "250000 100000",
            },
            2.5,
            2,
        ),
        # A container's own group may be mounted at the top, whatever its path.
        (V2_GROUP | {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3, 3),
        (V2_GROUP | {"sys/fs/cgroup/unified/pod/box/cpu.max": "300000 100000"}, 3, 3),
        # Version 1.
        (
            V1_GROUP
            | {
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "350000",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
            },
            3.5,
            3,
        ),
        (
            V1_GROUP
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
            },
            4,
            4,
        ),
        (
            V1_GROUP
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0,
            8,
        ),
    ],
)
def test_a_quota_bounds_the_threads(
    files: dict[str, str], quota: float, n_cores: int, tmp_path: Path
) -> None:
    from drafthouse_engine import find_cores

    cores = find_cores(root=write(tmp_path, files), cpus="0-7")
    assert (cores.quota, cores.n_cores) == (quota, n_cores)
    assert (cores.n_physical, cores.n_logical) == (8, 8)


def siblings(*groups: str) -> dict[str, str]:
    """Returns the files of cores by the hardware threads of each: "0,4"."""
    return {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": group
        for group in groups
        for i in group.split(",")
    }


@pytest.mark.parametrize(
    ("cpus", "files", "n_physical", "n_logical"),
    [
        ("0", {}, 1, 1),
        ("0-1", {}, 2, 2),
        ("0-1", siblings("0", "1"), 2, 2),
        ("0-3", siblings("0,2", "1,3"), 2, 4),
        ("0,1", siblings("0,1"), 1, 2),
        ("0,1", siblings("0,2", "1,3"), 2, 2),  # one thread of each core
        ("0-63", siblings(*(f"{i},{i + 32}" for i in range(32))), 32, 64),
        ("0-5", siblings("0,1", "2", "3") | {"sys/devices/cpu_core/cpus": "0-1"}, 1, 6),
        ("2-5", {"sys/devices/cpu_core/cpus": "0-1"}, 4, 4),  # kept to the slow ones
        ("0-1,4,1023", {}, 4, 4),
    ],
)
def test_hardware_threads_of_one_core_count_once(
    cpus: str, files: dict[str, str], n_physical: int, n_logical: int, tmp_path: Path
) -> None:
    from drafthouse_engine import find_cores

    cores = find_cores(root=write(tmp_path, files), cpus=cpus)
    assert (cores.n_physical, cores.n_logical) == (n_physical, n_logical)
    assert cores.n_cores == n_physical


@pytest.mark.parametrize("cpus", ["x", "3-1", "-1", "1-", "0-99999999999", "0;1"])
def test_a_list_that_is_none_is_no_limit(cpus: str) -> None:
    from drafthouse_engine import find_cores

    cores = find_cores(root="/nowhere", cpus=cpus)
    assert 1 <= cores.n_cores <= cores.n_physical <= cores.n_logical


def test_the_affinity_mask_bounds_the_threads() -> None:
    """Of the calling thread, which is what the engine's threads inherit."""
    import os

    from drafthouse_engine import find_cores

    before = os.sched_getaffinity(0)
    assert find_cores().n_logical == len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert find_cores().n_logical == find_cores().n_cores == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("quota", "cpus", "n"), [(1.5, "0-3", 1), (2.25, "0-3", 1), (3.75, "0-7", 3), (0, "0-3", 3)]
)
def test_a_demo_model_in_a_container(quota: float, cpus: str, n: int, tmp_path: Path) -> None:
    from drafthouse_engine import find_cores

    limit = f"{int(quota * 1e5)} 100000" if quota else "max 100000"
    root = write(tmp_path, NO_GROUP | {"sys/fs/cgroup/cpu.max": limit})
    cores = find_cores(root=root, cpus=cpus)
    assert choose_threads(cores.n_cores, cores.n_spare, DEMO).n == n


@pytest.mark.model
def test_threads_by_width_change_no_bit_where_the_arithmetic_is_exact() -> None:
    """A prompt is wide, the steps after it are narrow; a pool of two threads serves both."""
    from tests.support.hand import TEXTS, engine, fused, tokens_of

    prompts = [tokens_of(text) for text in TEXTS]
    outputs = []
    wide: dict[str, Any] = {"n_threads_batch": 2, "n_wide": 6}
    narrow: dict[str, Any] = {"n_threads": 2, "n_threads_batch": 1}
    for threads in ({}, wide, narrow):
        with engine("mtp", exact=True, **threads) as target:
            outputs.append(fused(target, prompts, 24, 3))
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_width_below_two_is_refused() -> None:
    from drafthouse_engine import EngineParams, InvalidConfig

    with pytest.raises(InvalidConfig, match="n_wide"):
        EngineParams(n_wide=1)
