"""When readers are woken."""

from __future__ import annotations

import asyncio
from collections import Counter

from drafthouse_server.scheduling.sequence import ProgressEvent, TokensEvent
from drafthouse_server.serving.outbox import Outbox, WakeLimiter


class ManualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class PacedOutboxes:
    """Outboxes that a wake limiter holds, and the tokens that their readers would get."""

    def __init__(self, n: int) -> None:
        self.clock = ManualClock()
        self.pacer = WakeLimiter(self.clock)
        self.outboxes = [Outbox() for _ in range(n)]

    def step(self, seconds: float) -> list[int]:
        """Lets time pass, puts a token into each outbox, returns who was woken."""
        self.clock.now += seconds
        for outbox in self.outboxes:
            outbox.put(TokensEvent([1]))
            self.pacer.hold(outbox)
        self.pacer.wake(len(self.outboxes))
        return [i for i, outbox in enumerate(self.outboxes) if outbox._is_ready]

    async def read(self) -> list[int]:
        """Returns how many tokens each woken reader takes."""
        return [len(await outbox.receive()) for outbox in self.outboxes if outbox._is_ready]


async def test_what_nobody_reads_becomes_one_event_and_loses_nothing() -> None:
    outbox = Outbox(n_bytes_max=12 * 3000)
    outbox.put(ProgressEvent(1, 5))
    outbox.put(ProgressEvent(5, 5))
    for i in range(1000):
        assert outbox.put(TokensEvent([2 * i, 2 * i + 1], [-0.5, -0.25]))
        assert len(outbox._events) < 131
    outbox.wake()
    events = await outbox.receive()
    tokens = [token for e in events if isinstance(e, TokensEvent) for token in e.tokens]
    logprobs = [x for e in events if isinstance(e, TokensEvent) for x in e.logprobs]
    assert tokens == list(range(2000))
    assert logprobs == [-0.5, -0.25] * 1000
    assert [e for e in events if isinstance(e, ProgressEvent)] == [ProgressEvent(5, 5)]


def test_what_may_wait_is_bounded_in_bytes() -> None:
    outbox = Outbox(n_bytes_max=4 * 1000)
    within = [outbox.put(TokensEvent([1, 2])) for _ in range(1000)]
    assert all(within[:500])
    assert not all(within[500:700])


async def test_few_readers_of_ordinary_steps_are_woken_after_every_step() -> None:
    paced = PacedOutboxes(4)
    for _ in range(5):
        assert paced.step(0.005) == [0, 1, 2, 3]
        assert await paced.read() == [1, 1, 1, 1]


async def test_quick_steps_share_messages_even_for_one_reader() -> None:
    paced = PacedOutboxes(1)
    woken = [bool(paced.step(0.001)) and await paced.read() for _ in range(13)]
    assert [n_tokens for n_tokens in woken if n_tokens] == [[1], [4], [4], [4]]


async def test_many_readers_of_slow_steps_are_woken_after_every_step() -> None:
    paced = PacedOutboxes(64)
    for _ in range(5):
        assert len(paced.step(0.015)) == 64
        assert await paced.read() == [1] * 64


async def test_many_readers_of_quick_steps_take_turns() -> None:
    paced = PacedOutboxes(32)
    paced.step(0.0016)  # all at once: nothing was sent for long
    await paced.read()
    turns = []
    for _ in range(12):
        turns.append(paced.step(0.0016))
        n_tokens = await paced.read()
        assert max(n_tokens, default=0) <= 8
    # 1.6 ms are good for 8 messages, once 4 ms have passed since the last ones.
    assert [len(turn) for turn in turns[:2]] == [0, 0]
    assert max(map(len, turns)) <= 32
    assert sum(map(len, turns)) <= 12 * 8 + 1
    woken = Counter(i for turn in turns for i in turn)
    assert set(woken) == set(range(32))
    assert max(woken.values()) - min(woken.values()) <= 1


async def test_who_is_held_is_woken_though_no_step_follows() -> None:
    paced = PacedOutboxes(32)
    paced.step(0.001)
    await paced.read()
    paced.step(0.001)
    paced.clock.now += 1.0
    async with asyncio.timeout(100.0):
        await asyncio.gather(*(outbox.receive() for outbox in paced.outboxes))
