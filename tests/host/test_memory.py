"""What of the host's memory a process may use, by what the kernel writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafthouse_server.host.memory import HostMemory, read_memory

GIB = 1 << 30


def host(root: Path, files: dict[str, str]) -> HostMemory:
    meminfo = f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_memory(root)


def test_without_cgroups_it_is_the_machine_s(tmp_path: Path) -> None:
    memory = host(tmp_path, {})
    assert memory == HostMemory(8 * GIB, 6 * GIB)
    assert (memory.most_bytes, memory.free_bytes) == (8 * GIB, 6 * GIB)


@pytest.mark.parametrize("mount", ["", "unified/"])
def test_the_least_limit_of_the_groups_around_counts(tmp_path: Path, mount: str) -> None:
    top = f"sys/fs/cgroup/{mount}"
    memory = host(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            f"{top}pod/memory.max": f"{2 * GIB}\n",
            f"{top}pod/memory.current": f"{GIB}\n",
            f"{top}pod/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
            f"{top}pod/box/memory.max": "max\n",
        },
    )
    assert (memory.limit_bytes, memory.limit_free_bytes) == (2 * GIB, 3 * GIB // 2)
    assert (memory.most_bytes, memory.free_bytes) == (2 * GIB, 3 * GIB // 2)


def test_version_one_has_a_mount_and_an_absurd_number_for_no_limit(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "3:cpu:/\n4:memory:/box\n",
        f"{top}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{top}/box/memory.limit_in_bytes": f"{GIB}\n",
        f"{top}/box/memory.usage_in_bytes": f"{GIB // 4}\n",
    }
    memory = host(tmp_path, files)
    assert (memory.limit_bytes, memory.free_bytes) == (GIB, 3 * GIB // 4)


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_were_read_twice_are_free_as_well(tmp_path: Path, version: int) -> None:
    """A server that is started again in its container finds its model's pages among them."""
    top, total = ("memory/box", "total_") if version == 1 else ("box", "")
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    files = {
        "proc/self/cgroup": "4:memory:/box\n" if version == 1 else "0::/box\n",
        f"sys/fs/cgroup/{top}/memory.{names[0]}": f"{4 * GIB}\n",
        f"sys/fs/cgroup/{top}/memory.{names[1]}": f"{3 * GIB}\n",
        f"sys/fs/cgroup/{top}/memory.stat": f"inactive_file 1\nactive_file 1\n"
        f"{total}inactive_file {GIB // 2}\n{total}active_file {2 * GIB}\n",
    }
    assert host(tmp_path, files).limit_free_bytes == 7 * GIB // 2


@pytest.mark.parametrize(
    ("most", "high", "limit"),
    [("max", "max", 0), ("max", 2 * GIB, 2), (3 * GIB, 2 * GIB, 2), (2 * GIB, 3 * GIB, 2)],
)
def test_the_memory_beyond_which_the_kernel_slows_a_group_down_is_a_limit(
    tmp_path: Path, most: object, high: object, limit: int
) -> None:
    files = {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{most}\n",
        "sys/fs/cgroup/box/memory.high": f"{high}\n",
        "sys/fs/cgroup/box/memory.current": f"{GIB}\n",
    }
    memory = host(tmp_path, files)
    assert memory.limit_bytes == limit * GIB
    assert memory.free_bytes == (GIB if limit else 6 * GIB)


def test_a_container_finds_its_own_group_at_the_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/what/only/the/host/sees\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
    }
    assert host(tmp_path, files).most_bytes == GIB


def test_a_limit_above_the_machine_limits_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{99 * GIB}\n"}
    memory = host(tmp_path, files)
    assert (memory.most_bytes, memory.free_bytes) == (8 * GIB, 6 * GIB)


def test_where_nothing_is_told_nothing_is_known(tmp_path: Path) -> None:
    assert read_memory(tmp_path) == HostMemory(0, 0)


def test_this_machine_tells() -> None:
    memory = read_memory()
    assert 0 < memory.free_bytes <= memory.most_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("files", "has_huge_pages"),
    [({}, False)]
    + [
        ({"sys/kernel/mm/transparent_hugepage/enabled": text}, is_so)
        for text, is_so in (
            ("[always] madvise never\n", True),
            ("always [madvise] never\n", True),
            ("always madvise [never]\n", False),
        )
    ],
)
def test_huge_pages_are_those_that_the_kernel_gives(
    tmp_path: Path, files: dict[str, str], *, has_huge_pages: bool
) -> None:
    assert host(tmp_path, files).has_huge_pages == has_huge_pages
