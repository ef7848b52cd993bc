"""F8: a million ids of the longest token become an answer many times the request.

Bound: refused, or an answer of at most 8 times the request.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from tests.attacks.common import (
    GENERATION,
    Probe,
    arguments,
    connect,
    field,
    metadata,
    model,
    raw_unary,
    shown,
    varint,
    verdict,
)

args = arguments(__doc__, ids=300_000, parallel=4)
n_ids = min(args.ids, 1_000_000)


async def length(call: Any, token: int) -> int:
    try:
        answer = await call(
            field(2, varint(token)) + b"\x18\x01", timeout=10, metadata=metadata(args.key)
        )
    except grpc.aio.AioRpcError:
        return 0
    return len(answer)


async def attack() -> tuple[int, int, int, str]:
    async with connect(args.target) as channel:
        call = raw_unary(channel, GENERATION + "Detokenize")
        n_vocab = model(args.target, args.key).vocabulary_size
        tokens = range(0, n_vocab, max(1, n_vocab // 1000))
        lengths = await asyncio.gather(*(length(call, token) for token in tokens))
        token = max(zip(lengths, tokens, strict=True))[1]
        request = field(2, varint(token) * n_ids) + b"\x18\x01"

        async def once() -> tuple[int, str]:
            try:
                return len(await call(request, timeout=60, metadata=metadata(args.key))), "OK"
            except grpc.aio.AioRpcError as error:
                return 0, error.code().name

        answers = await asyncio.gather(*(once() for _ in range(min(args.parallel, 8))))
        return token, len(request), max(n for n, _ in answers), answers[0][1]


probe = Probe(args.target, args.victim, "health", args.seconds)
started = time.monotonic()
token, n_request, n_answer, code = asyncio.run(attack())
seconds = time.monotonic() - started
during = probe.result()
factor = n_answer / n_request
verdict(
    "a03_detokenize_amplifies",
    factor > 8 or during["max"] > 100,
    f"token {token}: {n_request} -> {n_answer} bytes ({factor:.0f} x, {code}), {args.parallel}"
    f" at once in {seconds:.1f} s;"
    f" health {shown(during)}",
)
