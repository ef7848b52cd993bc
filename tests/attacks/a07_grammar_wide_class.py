"""F3: a character class of 65,000 elements, in a grammar that a mask compares all tokens with.

Bound: the victim's gap <= 1.5 x idle, in the median.
"""

from __future__ import annotations

import time

import grpc
from tests.attacks.common import (
    OPTIONS,
    Probe,
    arguments,
    baseline,
    metadata,
    shown,
    verdict,
    worse,
)

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, elements=65_000, streams=1)
request = generation_pb2.GenerateRequest(max_output_tokens=64)
request.prompt.text = "x"
request.sampling.temperature = 10.0
request.sampling.top_k = 0
request.sampling.top_p = 1.0
request.sampling.min_p = 0.0
request.sampling.grammar = "root ::= [" + "~" * min(args.elements, 65_500) + "]+"

before = baseline(args.target, args.victim, "stream")
probe = Probe(args.target, args.victim, "stream", args.seconds)
time.sleep(1.5)
n_tokens, code = 0, "OK"
started = time.monotonic()
with grpc.insecure_channel(args.target, OPTIONS) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    calls = [
        stub.Generate(request, timeout=args.seconds - 2, metadata=metadata(args.key))
        for _ in range(min(args.streams, 8))
    ]
    for call in calls:
        try:
            for message in call:
                n_tokens += len(message.chunk.token_ids)
        except grpc.RpcError as error:
            code = error.code().name
seconds = time.monotonic() - started
during = probe.result()
verdict(
    "a07_grammar_wide_class",
    worse(before, during, 1.5),
    f"{n_tokens} tokens in {seconds:.1f} s ({code}); victim's gap {shown(before)} ->"
    f" {shown(during)}",
)
