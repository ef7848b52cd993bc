"""Workers that run tests on a GPU have cores of their own."""

from __future__ import annotations

from tests.support.on_gpu import share_of


def test_workers_share_the_cores_among_them() -> None:
    shares = [share_of(range(16), i, 6) for i in range(6)]
    assert sorted(core for share in shares for core in share) == list(range(16))
    assert {len(share) for share in shares} == {2, 3}


def test_a_worker_has_a_core_where_there_are_too_few() -> None:
    assert [share_of([4, 7], i, 3) for i in range(3)] == [{4}, {7}, {4}]
