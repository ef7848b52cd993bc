"""F11: messages of 3.8 MB without a key.

Bound: the victim's median TTFT <= 2 x idle.
"""

from __future__ import annotations

import asyncio
import collections
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
    worse,
)

args = arguments(__doc__, connections=8)
MESSAGE = field(2, field(3, b"\x0a\x00" * 1_900_000))  # parses to 1.9 M objects


async def attack(seconds: float) -> collections.Counter[str]:
    end = time.monotonic() + seconds
    codes: collections.Counter[str] = collections.Counter()

    async def one() -> None:
        async with connect(args.target) as channel:
            call = raw_stream(channel, GENERATION + "Generate")
            while time.monotonic() < end:
                try:
                    async for _ in call(MESSAGE, timeout=20, metadata=metadata("not-a-key")):
                        pass
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1

    await asyncio.gather(*(one() for _ in range(min(args.connections, 32))))
    return codes


before = baseline(args.target, args.victim, "tokens")
probe = Probe(args.target, args.victim, "tokens", args.seconds)
codes = asyncio.run(attack(args.seconds - 1))
during = probe.result()
verdict(
    "a16_unauthenticated_messages",
    worse(before, during, 2),
    f"{dict(codes)} of {len(MESSAGE) / 1e6:.1f} MB in {args.seconds:.0f} s; victim's TTFT"
    f" {shown(before)} -> {shown(during)}",
)
