"""Long messages are parsed one at a time, the tenants in turn, with rests between them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from drafthouse_server.operations import parsing
from drafthouse_server.operations.parsing import ParsingTurns
from drafthouse_server.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from tests.conftest import Eventually

A, B = Tenant("a"), Tenant("b")


class Parser:
    """Parses when it is told to, and notes in which order."""

    def __init__(self) -> None:
        self.turns = ParsingTurns(clock=lambda: 0.0)
        self.done: list[str] = []
        self.may = asyncio.Semaphore(0)
        self.n_inside = 0

    async def parse(self, name: str, tenant: Tenant, n_bytes: int = 5000) -> None:
        async with self.turns.turn(tenant, n_bytes):
            assert not self.n_inside
            self.n_inside += 1
            try:
                await self.may.acquire()
                self.done.append(name)
            finally:
                self.n_inside -= 1

    async def begin(self, name: str, tenant: Tenant, n_bytes: int = 5000) -> asyncio.Task[None]:
        task = asyncio.create_task(self.parse(name, tenant, n_bytes))
        await asyncio.sleep(0)
        return task

    def go_on(self, n: int) -> None:
        for _ in range(n):
            self.may.release()


async def test_one_at_a_time_and_the_tenants_in_turn() -> None:
    parser = Parser()
    tasks = [await parser.begin(f"a{i}", A) for i in range(4)]
    tasks += [await parser.begin(f"b{i}", B) for i in range(2)]
    assert (parser.n_inside, len(parser.turns)) == (1, 5)
    parser.go_on(6)
    await asyncio.gather(*tasks)
    assert parser.done[0] == "a0"
    assert parser.done.index("b1") < parser.done.index("a3")
    assert sorted(parser.done) == ["a0", "a1", "a2", "a3", "b0", "b1"]


async def test_the_loop_has_a_rest_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    turns, rests = ParsingTurns(clock=lambda: now), []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda rest_s, _: rests.append(rest_s))
    async with turns.turn(A, 5000):
        now += 0.01
    assert rests == [pytest.approx(0.01 * parsing._REST)]
    waits = asyncio.create_task(turns.turn(B, 5000).__aenter__())
    await asyncio.sleep(0)
    assert len(turns) == 1, "the rest is everybody's"
    waits.cancel()


async def test_one_that_fails_or_leaves_gives_its_turn_on(eventually: Eventually) -> None:
    parser = Parser()
    inside = await parser.begin("inside", A)
    leaves, leaves_too, stays = [await parser.begin(name, A) for name in ("x", "y", "z")]
    leaves.cancel()
    await asyncio.sleep(0)
    assert len(parser.turns) == 2
    inside.cancel()  # as one does that fails
    leaves_too.cancel()
    parser.go_on(1)
    await stays
    assert parser.done == ["z"]
    await eventually(lambda: not parser.turns._is_taken)


@pytest.mark.parametrize("n_passes", range(6))
async def test_one_that_leaves_as_its_turn_comes_gives_it_on(n_passes: int) -> None:
    parser = Parser()
    first = await parser.begin("first", A)
    leaves = await parser.begin("leaves", A)
    stays = await parser.begin("stays", B, n_bytes=50_000)
    parser.go_on(1)
    await first
    for _ in range(n_passes):
        await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    parser.go_on(1)
    await stays
    assert parser.done == ["first", "stays"]
