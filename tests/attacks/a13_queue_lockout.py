"""F13: two tenants ask for more than the queue holds; then a third one asks.

Needs three keys. Bound: the third is taken.
"""

from __future__ import annotations

import asyncio
import collections
import time

import grpc
from tests.attacks.common import arguments, connect, metadata, model, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, streams=600)
card = model(args.target, args.key)
keys = [args.key, args.other_key or args.key]


def request(seed: int, n: int) -> generation_pb2.GenerateRequest:
    asked = generation_pb2.GenerateRequest(max_output_tokens=n)
    asked.prompt.tokens.ids.extend([5 + (seed + j) % 90 for j in range(8)])
    asked.stop.ignore_end_token = True
    return asked


async def main() -> None:
    n_long = max(1, card.context_tokens - 16)
    async with (
        connect(args.target) as flood,
        connect(args.target) as flood2,
        connect(args.target) as calm,
    ):
        stubs = [generation_pb2_grpc.GenerationServiceStub(c) for c in (flood, flood2)]
        calls = [
            stubs[i % 2].Generate(request(i, n_long), metadata=metadata(keys[i % 2]))
            for i in range(min(args.streams, 1000))
        ]
        await asyncio.sleep(2)
        refused: collections.Counter[str] = collections.Counter()
        for call in calls:
            if call.done():
                refused[(await call.code()).name] += 1
        stub = generation_pb2_grpc.GenerationServiceStub(calm)
        started, outcome = time.monotonic(), "taken"
        try:
            async with asyncio.timeout(args.seconds * args.patience):
                async for _ in stub.Generate(request(7, 1), metadata=metadata(args.victim)):
                    break
        except grpc.aio.AioRpcError as error:
            outcome = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            outcome = f"no token in {args.seconds * args.patience:.0f} s"
        seconds = time.monotonic() - started
        for call in calls:
            call.cancel()
    is_alone = args.victim in keys
    verdict(
        "a13_queue_lockout",
        None if is_alone else outcome != "taken",
        f"{len(calls)} asked for by {1 + (keys[0] != keys[1])} tenants, refused"
        f" {dict(refused)}; the"
        f" {'same' if is_alone else 'third'} tenant: {outcome} after {seconds:.2f} s",
    )


asyncio.run(main())
