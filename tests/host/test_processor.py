"""What the kernel tells of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafthouse_server.host.processor import read_processor

V2 = "sse2 cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 pni"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "level", "has", "lacks"),
    [
        ("sse2", 1, "", "SSSE3"),
        (V2, 2, "SSSE3", "AVX2"),
        (V3, 3, "AVX2", "AVX512"),
        (f"{V2} avx512f avx512bw avx512cd avx512dq avx512vl", 2, "AVX512", "AVX2"),
        (f"{V4} avx512_vnni", 4, "AVX512_VNNI", "AMX_INT8"),
        ("asimd sve", 0, "", "AVX"),
    ],
)
def test_levels_build_on_each_other(
    tmp_path: Path, flags: str, level: int, has: str, lacks: str
) -> None:
    (tmp_path / "proc").mkdir()
    one = f"processor : 0\nmodel name : A CPU\nflags : {flags}\n"
    (tmp_path / "proc/cpuinfo").write_text(f"{one}\n{one}")
    for i in range(2):
        (tmp_path / f"sys/devices/system/node/node{i}").mkdir(parents=True)
    found = read_processor(tmp_path)
    assert (found.name, found.level, found.n_nodes) == ("A CPU", level, 2)
    assert not has or has in found.features
    assert lacks not in found.features


def test_where_nothing_is_told_nothing_is_known(tmp_path: Path) -> None:
    found = read_processor(tmp_path)
    assert (found.name, found.level, found.features, found.n_nodes) == ("", 0, frozenset(), 1)
