"""F2: one message of 2.8 MB with 1.4 million empty chat messages.

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

args = arguments(__doc__, messages=1_400_000)
n = min(args.messages, 1_900_000)
MESSAGE = field(2, field(3, b"\x0a\x00" * n))


async def attack() -> tuple[str, float]:
    async with connect(args.target) as channel:
        started = time.monotonic()
        try:
            async for _ in raw_stream(channel, GENERATION + "Generate")(
                MESSAGE, timeout=60, metadata=metadata(args.key)
            ):
                pass
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        return code, time.monotonic() - started


before = baseline(args.target, args.victim, "health")
probe = Probe(args.target, args.victim, "health", 10)
time.sleep(2)
code, seconds = asyncio.run(attack())
during = probe.result()
verdict(
    "a01_chat_of_empty_messages",
    during["max"] > 100,
    f"{len(MESSAGE) / 1e6:.1f} MB, {code} after {seconds:.2f} s; health {shown(before)} ->"
    f" {shown(during)}",
)
