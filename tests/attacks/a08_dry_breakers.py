"""F7: DRY with 32 breakers, each of which has the vocabulary read once.

On the demo vocabulary that is little; with 150,000 tokens it is seconds. Bound: one request takes
at most 20 ms more than without DRY.
"""

from __future__ import annotations

import asyncio
import string
import time
from typing import Any

import grpc
from tests.attacks.common import (
    Probe,
    arguments,
    baseline,
    connect,
    metadata,
    shown,
    verdict,
    worse,
)

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, parallel=16)


def request(has_dry: bool) -> generation_pb2.GenerateRequest:
    asked = generation_pb2.GenerateRequest(max_output_tokens=1)
    asked.prompt.tokens.ids.extend([5, 6, 7, 8])
    if has_dry:
        letters = (string.ascii_lowercase + string.punctuation)[:32]
        asked.sampling.dry.multiplier = 0.8
        asked.sampling.dry.breakers.extend((c + "qzjxkvwybf" * 4)[:40] for c in letters)
    return asked


async def timed(stub: Any, has_dry: bool) -> float:
    started = time.monotonic()
    try:
        async for _ in stub.Generate(request(has_dry), timeout=60, metadata=metadata(args.key)):
            pass
    except grpc.aio.AioRpcError:
        pass
    return time.monotonic() - started


async def attack(seconds: float) -> tuple[float, float, int]:
    async with connect(args.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        plain = min([await timed(stub, False) for _ in range(5)])
        dry = min([await timed(stub, True) for _ in range(3)])
        end, done = time.monotonic() + seconds, 0

        async def worker() -> None:
            nonlocal done
            while time.monotonic() < end:
                await timed(stub, True)
                done += 1

        await asyncio.gather(*(worker() for _ in range(min(args.parallel, 64))))
        return plain, dry, done


before = baseline(args.target, args.victim, "text")
probe = Probe(args.target, args.victim, "text", args.seconds)
plain, dry, done = asyncio.run(attack(args.seconds - 3))
during = probe.result()
verdict(
    "a08_dry_breakers",
    dry - plain > 0.02 or worse(before, during, 2),
    f"one request {1000 * plain:.1f} ms, with DRY {1000 * dry:.1f} ms; {done} done; victim's"
    f" TTFT {shown(before)} -> {shown(during)}",
)
