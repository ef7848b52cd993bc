"""F18: a grammar of 64 KB in short lines, which cannot be parsed.

--log names the log of the server. Bound: 2 KB of log a request.
"""

from __future__ import annotations

import os
import time

import grpc
from tests.attacks.common import OPTIONS, Probe, arguments, baseline, metadata, shown, verdict

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

args = arguments(__doc__, requests=10, log=None)
request = generation_pb2.GenerateRequest(max_output_tokens=1)
request.prompt.tokens.ids.extend([5, 6, 7])
request.sampling.grammar = 'root ::= "a"\n' + "b\n" * 32_500


def size() -> int:
    """Returns the bytes of the log, without those of the victim's calls."""
    if not args.log or not os.path.exists(args.log):
        return 0
    victim = f" tenant={(args.victim or '').partition('-')[0]} ".encode()
    with open(args.log, "rb") as file:
        return sum(len(line) for line in file if victim not in line)


before, size_before = baseline(args.target, args.victim, "tokens"), size()
probe = Probe(args.target, args.victim, "tokens", args.seconds)
n, spent, end = 0, 0.0, time.monotonic() + args.seconds - 2
with grpc.insecure_channel(args.target, OPTIONS) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    while n < min(args.requests, 200) and time.monotonic() < end:
        started = time.monotonic()
        try:
            for _ in stub.Generate(request, timeout=20, metadata=metadata(args.key)):
                pass
        except grpc.RpcError:
            pass
        spent += time.monotonic() - started
        n += 1
during, grown = probe.result(), size() - size_before
each = grown / max(n, 1)
verdict(
    "a21_log_amplification",
    each > 2048 if args.log else during["p99"] > max(2 * before["p99"], 100),
    f"{n} bad grammars, {1000 * spent / max(n, 1):.0f} ms each, log +{each / 1000:.0f} KB each;"
    f" victim's TTFT {shown(before)} -> {shown(during)}",
)
