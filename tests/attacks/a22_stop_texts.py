"""F21: 16 stop texts of 256 bytes that nearly match.

Bound: tokens/s of eight streams >= 0.9 x without.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import grpc
from tests.attacks.common import arguments, connect, metadata, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, streams=8, windows=6)


async def rate(has_stops: bool, seconds: float) -> float:
    async with connect(args.target) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        end, n_tokens = time.monotonic() + seconds, 0

        async def one(i: int) -> None:
            nonlocal n_tokens
            while time.monotonic() < end:
                asked = generation_pb2.GenerateRequest(max_output_tokens=200)
                asked.prompt.tokens.ids.extend([5 + (i + j) % 90 for j in range(8)])
                asked.stop.ignore_end_token = True
                if has_stops:
                    asked.stop.sequences.extend(("e " * 127)[:254] + chr(97 + j) for j in range(16))
                try:
                    async for message in stub.Generate(
                        asked, timeout=20, metadata=metadata(args.key)
                    ):
                        n_tokens += len(message.chunk.token_ids)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)

        started = time.monotonic()
        await asyncio.gather(*(one(i) for i in range(min(args.streams, 64))))
        return n_tokens / (time.monotonic() - started)


async def main() -> None:
    # In turns, since a machine's speed drifts, and each long enough for its streams to begin and
    # end a few times: windows of a second tell 0.86 and 1.1 of the same server.
    seconds = max(3.0, args.seconds / args.windows)
    rates = [await rate(bool(i % 2), seconds) for i in range(args.windows)]
    without, with_stops = statistics.median(rates[::2]), statistics.median(rates[1::2])
    verdict(
        "a22_stop_texts",
        with_stops < 0.9 * without,
        f"{args.streams} streams: {without:.0f} tokens/s without, {with_stops:.0f} with 16 stop"
        " texts of 255 bytes",
    )


asyncio.run(main())
