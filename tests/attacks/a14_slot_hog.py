"""F13: a tenant holds all slots with outputs as long as the context; then another one asks.

Needs two keys. Bound: the other's TTFT <= 2 x idle (median).
"""

from __future__ import annotations

import asyncio
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
before = baseline(args.target, args.victim, "tokens")


async def hog(seconds: float) -> int:
    end, n_tokens = time.monotonic() + seconds, 0
    async with connect(args.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def one(i: int) -> None:
            nonlocal n_tokens
            while time.monotonic() < end:
                asked = generation_pb2.GenerateRequest()  # no limit: until the context is full
                asked.prompt.tokens.ids.extend([5 + (i + j) % 90 for j in range(8)])
                asked.stop.ignore_end_token = True
                try:
                    async with asyncio.timeout_at(
                        asyncio.get_running_loop().time() + max(0.1, end - time.monotonic())
                    ):
                        async for message in stub.Generate(asked, metadata=metadata(args.key)):
                            n_tokens += len(message.chunk.token_ids)
                except (grpc.aio.AioRpcError, TimeoutError):
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(one(i) for i in range(min(2 * card.slot_count, 120))))
    return n_tokens


async def main() -> tuple[dict[str, Any], int]:
    task = asyncio.create_task(hog(args.seconds))
    await asyncio.sleep(2)
    probe = Probe(args.target, args.victim, "tokens", args.seconds - 3)
    n_tokens = await task
    return probe.result(), n_tokens


during, n_tokens = asyncio.run(main())
is_alone = args.victim == args.key
verdict(
    "a14_slot_hog",
    None if is_alone else worse(before, during, 2),
    f"{2 * card.slot_count} streams on {card.slot_count} slots, {n_tokens} tokens; the other's"
    f" TTFT {shown(before)} -> {shown(during)}",
)
