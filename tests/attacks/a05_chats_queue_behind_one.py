"""F4: costly chats, which a template takes seconds for, beside another tenant's short ones.

Bound: the victim's chat median <= 2 x idle.
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
    model,
    raw_unary,
    shown,
    verdict,
    worse,
)

args = arguments(__doc__, parallel=24)
n_bytes = 32 * model(args.target, args.key).context_tokens
separators = (b"</think>" * (n_bytes // 8 + 1))[: n_bytes - 8]
one = field(2, field(3, field(1, field(1, b"user") + field(2, separators))))
tiny = field(1, field(1, b"a"))
many = field(2, field(3, tiny * min(n_bytes - 1, 3_900_000 // len(tiny))))


async def attack(seconds: float) -> tuple[int, float, str]:
    end, spans, codes = time.monotonic() + seconds, [], set()
    async with connect(args.target) as channel:
        call = raw_unary(channel, GENERATION + "CountTokens")

        async def worker(message: bytes) -> None:
            while time.monotonic() < end:
                started = time.monotonic()
                try:
                    await call(message, timeout=70, metadata=metadata(args.key))
                    codes.add("OK")
                except grpc.aio.AioRpcError as error:
                    codes.add(error.code().name)
                    await asyncio.sleep(0.02)
                spans.append(time.monotonic() - started)

        n = min(args.parallel, 64)
        tasks = [asyncio.create_task(worker(many if i % 2 else one)) for i in range(n)]
        await asyncio.wait(tasks, timeout=seconds + 5)
        for task in tasks:
            task.cancel()
    return len(spans), max(spans, default=0.0), ",".join(sorted(codes))


before, before_text = (
    baseline(args.target, args.victim, "chat"),
    baseline(args.target, args.victim, "text"),
)
probe = Probe(args.target, args.victim, "chat", args.seconds)
probe_text = Probe(args.target, args.victim, "text", args.seconds)
n, worst, codes = asyncio.run(attack(args.seconds))
during, during_text = probe.result(), probe_text.result()
verdict(
    "a05_chats_queue_behind_one",
    worse(before, during, 2) or worse(before_text, during_text, 2),
    f"{n} chats of {len(one)} and {len(many)} bytes ({codes}), slowest {worst:.1f} s;"
    f" TTFT of chat {shown(before)} -> {shown(during)}; of text {shown(before_text)} ->"
    f" {shown(during_text)}",
)
