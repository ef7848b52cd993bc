"""F5: a prompt with a costly sampler leaves a snapshot that the bare prompt goes on from.

If the snapshot held the sampler, it would be built again on the engine thread at each hit. Bound:
the victim's longest gap <= 2 x that of the control.
"""

from __future__ import annotations

import random
import time
from typing import Any

import grpc
from tests.attacks.common import OPTIONS, Probe, arguments, metadata, model, shown, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, hits=20, tokens=200)
card = model(args.target, args.key)
n_tokens = min(args.tokens, card.context_tokens // 2)


def request(seed: int, is_costly: bool) -> generation_pb2.GenerateRequest:
    rng = random.Random(seed)
    asked = generation_pb2.GenerateRequest(max_output_tokens=2)
    asked.prompt.tokens.ids.extend(
        rng.randrange(5, min(card.vocabulary_size, 2000)) for _ in range(n_tokens)
    )
    if is_costly:
        asked.sampling.dry.multiplier = 0.8
        asked.sampling.dry.breakers.extend(chr(97 + i % 26) * 30 + str(i) for i in range(32))
        asked.sampling.grammar = f'root ::= [^~]* "{"~" * 490}"{{0,2000}}'  # 980,000 elements
    return asked


def run(stub: Any, asked: Any) -> int:
    reused = 0
    try:
        for message in stub.Generate(asked, timeout=30, metadata=metadata(args.key)):
            reused = message.result.usage.reused_prompt_tokens or reused
    except grpc.RpcError:
        return -1
    return reused


def displace(stub: Any) -> None:
    """Takes every retained slot, so that the snapshot is what is found."""
    for _ in range(0 if card.recurrent else card.slot_count + 1):
        run(stub, request(random.randrange(1 << 30), False))


def series(stub: Any, seed: int, is_costly: bool) -> tuple[int, dict[str, Any]]:
    run(stub, request(seed, is_costly))
    displace(stub)
    probe = Probe(args.target, args.victim, "stream", args.seconds)
    time.sleep(1.5)
    end, hits = time.monotonic() + args.seconds - 3, 0
    for _ in range(min(args.hits, 200)):
        if time.monotonic() > end:
            break
        hits += run(stub, request(seed, False)) > 0
        displace(stub)
    return hits, probe.result()


with grpc.insecure_channel(args.target, OPTIONS) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    n_control, control = series(stub, 11, False)
    n_poisoned, poisoned = series(stub, 22, True)
verdict(
    "a09_poisoned_snapshot",
    None if n_poisoned == 0 else poisoned["max"] > max(2 * control["max"], 100),
    f"hits {n_control} / {n_poisoned}; victim's gap, control {shown(control)}, poisoned"
    f" {shown(poisoned)}",
)
