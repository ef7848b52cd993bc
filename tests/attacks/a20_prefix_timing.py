"""Isolation: can a tenant tell, by time or usage, that another has computed a prompt?

For each of some prompts: the first tenant computes it; then the second asks for it, and for one
that nobody computed. Needs two keys. Bound: no reused tokens, medians within 10 %.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import grpc
from tests.attacks.common import OPTIONS, arguments, metadata, model, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, prompts=15)
card = model(args.target, args.key)
n_tokens = min(600, card.context_tokens // 2)


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, min(card.vocabulary_size, 2000)) for _ in range(n_tokens)]


def ask(stub: Any, key: str | None, ids: list[int]) -> tuple[float, int]:
    asked = generation_pb2.GenerateRequest(max_output_tokens=1)
    asked.prompt.tokens.ids.extend(ids)
    asked.sampling.temperature = 0.0
    asked.stop.ignore_end_token = True
    started, first, reused = time.monotonic(), 0.0, 0
    for message in stub.Generate(asked, timeout=60, metadata=metadata(key)):
        first = first or time.monotonic() - started
        reused = message.result.usage.reused_prompt_tokens or reused
    return 1000 * first, reused


own, hit, miss, n_reused = [], [], [], 0
seed = int(time.time())
with grpc.insecure_channel(args.target, OPTIONS) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    end = time.monotonic() + args.seconds
    for i in range(min(args.prompts, 100)):
        if time.monotonic() > end:
            break
        secret = prompt(seed + 2 * i)
        ask(stub, args.key, secret)
        own.append(ask(stub, args.key, secret)[0])
        miliseconds, reused = ask(stub, args.victim, secret)
        hit.append(miliseconds)
        n_reused += reused
        miss.append(ask(stub, args.victim, prompt(seed + 2 * i + 1))[0])
is_alone = args.victim == args.key
a, b, c = (statistics.median(times) for times in (own, hit, miss))
verdict(
    "a20_prefix_timing",
    None if is_alone else n_reused > 0 or abs(b - c) > 0.1 * c + 2,
    f"{len(own)} prompts of {n_tokens} tokens; median TTFT: the owner again {a:.1f}, the other"
    f" {b:.1f}, one that nobody computed {c:.1f} ms;"
    f" reused by the other: {n_reused}",
)
