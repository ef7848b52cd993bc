"""F2: 3.9 MB of token ids, and of stop ids.

Bound: the event loop, asked for its health meanwhile, answers within 100 ms.
"""

from __future__ import annotations

import asyncio
import time

import grpc
from tests.attacks.common import (
    GENERATION,
    Probe,
    arguments,
    baseline,
    connect,
    field,
    metadata,
    raw_stream,
    shown,
    verdict,
)

args = arguments(__doc__, ids=3_900_000, requests=8)
n = min(args.ids, 4_000_000)
PROMPT = field(2, field(2, field(1, b"\x05" * n)))
STOPS = field(2, field(1, b"a")) + field(6, field(2, b"\x05" * n))


async def attack() -> str:
    codes = []
    async with connect(args.target) as channel:
        for i in range(min(args.requests, 32)):
            try:
                async for _ in raw_stream(channel, GENERATION + "Generate")(
                    STOPS if i % 2 else PROMPT, timeout=30, metadata=metadata(args.key)
                ):
                    pass
                codes.append("OK")
            except grpc.aio.AioRpcError as error:
                codes.append(error.code().name)
    return ",".join(sorted(set(codes)))


before = baseline(args.target, args.victim, "health")
probe = Probe(args.target, args.victim, "health", args.seconds)
time.sleep(1)
started = time.monotonic()
codes = asyncio.run(attack())
seconds = time.monotonic() - started
during = probe.result()
verdict(
    "a02_ids_before_the_limit",
    during["max"] > 100,
    f"{args.requests} x {len(PROMPT) / 1e6:.1f} MB in {seconds:.1f} s ({codes}); health"
    f" {shown(before)} -> {shown(during)}",
)
