"""F14: requests of rising priority, each of which preempts one of the tenant's own streams.

Needs two keys. Bound: the other tenant's gap <= 1.5 x that beside as many ordinary streams with
prompts as long, in the median.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
from tests.attacks.common import (
    Probe,
    arguments,
    baseline,
    connect,
    metadata,
    model,
    shown,
    verdict,
    worse,
)

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__)
card = model(args.target, args.key)


async def attack(seconds: float, is_polite: bool = False) -> int:
    """Attacks, or keeps as many ordinary streams open."""
    end, n_high = time.monotonic() + seconds, 0
    async with connect(args.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def low(i: int) -> None:
            rng = random.Random(i)
            while time.monotonic() < end:
                asked = generation_pb2.GenerateRequest(priority=-100)
                n_prompt = card.context_tokens // 2
                asked.prompt.tokens.ids.extend(rng.randrange(5, 90) for _ in range(n_prompt))
                asked.sampling.temperature = 1.0
                asked.stop.ignore_end_token = True
                try:
                    async for _ in stub.Generate(
                        asked, timeout=max(0.2, end - time.monotonic()), metadata=metadata(args.key)
                    ):
                        pass
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        async def high(i: int) -> None:
            nonlocal n_high
            await asyncio.sleep(1)
            while time.monotonic() < end:
                asked = generation_pb2.GenerateRequest(priority=100, max_output_tokens=1)
                asked.prompt.tokens.ids.extend([5 + i, 6, 7])
                try:
                    async for _ in stub.Generate(asked, timeout=10, metadata=metadata(args.key)):
                        pass
                    n_high += 1
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        lows = [low(i) for i in range(min(card.slot_count, 64))]
        await asyncio.gather(*lows, *(high(i) for i in range(0 if is_polite else 2)))
    return n_high


async def main(is_polite: bool) -> tuple[dict[str, Any], int]:
    task = asyncio.create_task(attack(args.seconds, is_polite))
    await asyncio.sleep(1)
    probe = Probe(args.target, args.victim, "stream", max(1.0, args.seconds - 2))
    n = await task
    return probe.result(), n


idle = baseline(args.target, args.victim, "stream")
before, _ = asyncio.run(main(is_polite=True))
during, n_high = asyncio.run(main(is_polite=False))
is_alone = args.victim == args.key
verdict(
    "a15_preempt_thrash",
    None if is_alone else worse(before, during, 1.5),
    f"{n_high} requests of high priority beside {card.slot_count} of low; the other's gap alone"
    f" {shown(idle)}, beside as many ordinary ones {shown(before)} -> {shown(during)}",
)
