"""Leaks: thousands of generations cancelled in every phase.

--pid reads the memory of the server, --metrics-port what its prefix cache holds of it, which is
bounded by a setting. Bound: TTFT afterwards <= 1.5 x before; memory that is not the cache's back
within 20 MiB of what it was after a first, shorter storm.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.request

import grpc
from tests.attacks.common import arguments, baseline, connect, metadata, shown, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, requests=5000, pid=0, metrics_port=0)


def held() -> int:
    """Returns the KiB of the server's memory that are not its prefix cache's."""
    if not args.pid or not os.path.exists(f"/proc/{args.pid}/status"):
        return 0
    with open(f"/proc/{args.pid}/status") as file:
        all_kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    return all_kib - cached()


def cached() -> int:
    if not args.metrics_port:
        return 0
    with urllib.request.urlopen(f"http://127.0.0.1:{args.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(int(float(x.split()[1])) >> 10 for x in lines if x.startswith("drafthouse_prefix_b"))


async def storm(seconds: float) -> tuple[int, int]:
    end, n, n_refused = time.monotonic() + seconds, 0, 0
    rng = random.Random(1)
    async with connect(args.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def one() -> None:
            nonlocal n, n_refused
            while n < args.requests and time.monotonic() < end:
                n += 1
                asked = generation_pb2.GenerateRequest(max_output_tokens=100)
                if n % 3:
                    asked.prompt.text = "def f(" * rng.randint(1, 30)
                else:
                    asked.prompt.tokens.ids.extend(
                        rng.randrange(5, 90) for _ in range(rng.randint(1, 400))
                    )
                if n % 11 == 0:
                    asked.sampling.grammar = "root ::= [0-9]+"
                call = stub.Generate(
                    asked, timeout=rng.uniform(0.001, 5), metadata=metadata(args.key)
                )
                try:
                    async with asyncio.timeout(rng.choice((0.0, 0.002, 0.01, 0.05, 0.2))):
                        async for _ in call:
                            pass
                except TimeoutError:
                    call.cancel()
                except grpc.aio.AioRpcError as error:
                    n_refused += error.code() in (
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        grpc.StatusCode.UNAVAILABLE,
                    )
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(one() for _ in range(64)))
    return n, n_refused


asyncio.run(storm(args.seconds / 4))
time.sleep(2)
before, held_before = baseline(args.target, args.victim, "text"), held()
n, n_refused = asyncio.run(storm(args.seconds))
time.sleep(2)
after, grown = baseline(args.target, args.victim, "text"), held() - held_before
verdict(
    "a23_cancel_storm",
    after["p99"] > max(1.5 * before["p99"], 50) or grown > 20 << 10,
    f"{n} calls, {n_refused} refused; TTFT {shown(before)} -> {shown(after)}; memory"
    f" {grown >> 10:+d} MiB",
)
