"""F4: 32 callers tokenise texts of 3 MB beside another tenant's prompts.

Prompts of ids pass no text worker: their latency tells how much is starvation and how much are
stolen cores. Bound: median <= 2 x idle.
"""

from __future__ import annotations

import asyncio
import random
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
    raw_unary,
    shown,
    verdict,
    worse,
)

args = arguments(__doc__, parallel=32, megabytes=3.0)
rng = random.Random(7)
words = [
    "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_0123456789", k=rng.randint(2, 14)))
    for _ in range(5000)
]
size = int(min(args.megabytes, 3.9) * 1e6)
text = ""
while len(text) < size:
    text += " ".join(rng.choices(words, k=2000)) + "\n"
MESSAGE = field(2, text[:size].encode())


async def attack(seconds: float) -> int:
    end, done = time.monotonic() + seconds, 0
    async with connect(args.target) as channel:
        call = raw_unary(channel, GENERATION + "Tokenize")

        async def worker() -> None:
            nonlocal done
            while time.monotonic() < end:
                try:
                    await call(
                        MESSAGE,
                        timeout=max(0.1, end - time.monotonic()),
                        metadata=metadata(args.key),
                    )
                    done += 1
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(worker() for _ in range(min(args.parallel, 64))))
    return done


before = baseline(args.target, args.victim, "text")
before_ids = baseline(args.target, args.victim, "tokens")
probe = Probe(args.target, args.victim, "text", args.seconds)
probe_ids = Probe(args.target, args.victim, "tokens", args.seconds)
done = asyncio.run(attack(args.seconds))
during, during_ids = probe.result(), probe_ids.result()
verdict(
    "a04_tokenize_starves_prompts",
    worse(before, during, 2) or worse(before_ids, during_ids, 2),
    f"{done} x {size / 1e6:.1f} MB; TTFT of text {shown(before)} -> {shown(during)}; of ids"
    f" {shown(before_ids)} -> {shown(during_ids)}",
)
