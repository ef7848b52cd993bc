"""Clocks that are set, or wrong: no call fails of it, and no record is senseless."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import drafthouse
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc import interceptors

if TYPE_CHECKING:
    from tests.conftest import ServerFactory


async def test_a_clock_that_is_set_back_ends_no_stream_before_it_began(
    start_server: ServerFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(FakeEngine())
    assert server._accounting is not None
    times = iter([2_000.0, 1_000.0])
    monkeypatch.setattr(server._accounting, "unix_clock", lambda: next(times))
    found: list[tuple[float, float]] = []
    server._accounting.on_end.append(lambda it: found.append((it.started_at, it.ended_at)))
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.generate("abc", max_output_tokens=1)
    ((started_at, ended_at),) = found
    assert ended_at == started_at > 1_900


@pytest.mark.parametrize("ns", [-1, -(10**18), 2**63 - 1, 10**25])
def test_a_request_has_an_id_whatever_the_clock_says(
    ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: ns)
    assert interceptors._SANE_REQUEST_ID.fullmatch(interceptors._new_id())
