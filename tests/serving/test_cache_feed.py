"""What routers are told of the prefix cache: everything, in order, and nobody waits for them."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import Eventually, ServerFactory

import drafthouse
from drafthouse_server.scheduling.prefix_cache import (
    BLOCK_SIZE,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheReset,
    PrefixCache,
)
from drafthouse_server.serving.cache_feed import CacheFeed

B = BLOCK_SIZE


class Router:
    """Follows a feed as a router would: which blocks are there, and whose."""

    def __init__(self) -> None:
        self.blocks: dict[int, str] = {}
        self.n_resets = 0

    def take(self, event: CacheEvent) -> None:
        if isinstance(event, CacheReset):
            self.blocks.clear()
            self.n_resets += 1
        elif isinstance(event, BlocksStored):
            assert event.parent is None or event.parent in self.blocks
            self.blocks |= dict.fromkeys(event.hashes, event.tenant)
        else:
            for block_hash in event.hashes:
                assert self.blocks.pop(block_hash) == event.tenant

    async def follow(self, feed: CacheFeed) -> None:
        async for event in feed:
            self.take(event)


def stored(i: int) -> BlocksStored:
    return BlocksStored("a", (i,), None)


async def test_a_feed_begins_with_a_reset_and_ends_when_it_is_closed() -> None:
    feed = CacheFeed(lambda: None)
    feed.put([stored(1)])  # of before: meant for another reader
    feed.put([CacheReset(), stored(2)])
    assert [await feed.receive() for _ in range(2)] == [CacheReset(), stored(2)]
    waiting = asyncio.ensure_future(feed.receive())
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None


async def test_a_reader_who_falls_behind_loses_the_queue_and_is_told_everything_again() -> None:
    n_asked = 0

    def restate() -> None:
        nonlocal n_asked
        n_asked += 1

    feed = CacheFeed(restate, n_events_max=10)
    feed.put([CacheReset(), *map(stored, range(5))])
    for i in range(100):
        feed.put([stored(100 + i)])
        assert len(feed._events) <= 16
    assert n_asked == 0  # while nobody reads
    waiting = asyncio.ensure_future(feed.receive())
    await asyncio.sleep(0)
    assert n_asked == 1
    feed.put([stored(999)])  # on its way before the reset
    feed.put([CacheReset(), stored(7)])
    assert await waiting == CacheReset()
    assert await feed.receive() == stored(7)


def test_what_is_held_is_told_again_without_doublets() -> None:
    cache = PrefixCache(can_cut=True, n_host_bytes_max=1000)
    cache.hold(0, "a", list(range(3 * B)), is_running=True)
    cache.hold(1, "a", [*range(2 * B), *range(900, 900 + B)], is_running=False)
    cache.store("b", list(range(2 * B)), b"x")
    assert cache.take_events() == []  # nobody has asked
    cache.tell(is_told=True)
    router = Router()
    events = cache.take_events()
    for event in events:
        router.take(event)
    assert sorted(router.blocks.values()) == ["a"] * 4 + ["b"] * 2
    assert sum(len(e.hashes) for e in events if isinstance(e, BlocksStored)) == 6
    cache.drop(0)
    (removed,) = cache.take_events()
    assert isinstance(removed, BlocksRemoved)
    router.take(removed)
    assert len(router.blocks) == 5
    cache.tell(is_told=False)
    cache.drop(1)
    assert cache.take_events() == []


@pytest.mark.parametrize("n_events_max", [4096, 1])
async def test_a_router_knows_what_a_server_holds(
    start_server: ServerFactory, eventually: Eventually, n_events_max: int
) -> None:
    server = await start_server(parallel=2, prefix_cache_mib=0)
    loop, router = server.loop, Router()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:

        async def ask(text: str) -> int:
            result = await client.generate(text, max_output_tokens=4)
            return result.usage.reused_prompt_tokens

        assert await ask("Once upon a time in the west, ") == 0
        async with loop.feeds.open(n_events_max) as feed:
            following = asyncio.create_task(router.follow(feed))
            await eventually(lambda: len(router.blocks) == 2)  # what was there before it listened
            for i in range(12):
                assert await ask(f"{i} bottles of beer are standing on the wall, ") == 0
            cells = loop.statistics().scheduler.n_retained_cells
            await eventually(lambda: len(router.blocks) == cells // B)
            assert set(router.blocks.values()) == {"default"}
            assert router.n_resets >= 1
        await following  # the feed is closed
    assert feed.is_closed


async def test_a_server_without_readers_tells_nothing(start_server: ServerFactory) -> None:
    server = await start_server()
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await client.generate("Once upon a time in the west, ", max_output_tokens=4)
    assert server.loop._thread._scheduler.prefixes.take_events() == []
