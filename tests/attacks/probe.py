"""A victim: asks again and again for some seconds and prints its latencies as one JSON line.

Usage: probe.py HOST:PORT KIND SECONDS, the key in PROBE_KEY, and in PROBE_CA_FILE the authority of
a server with TLS. health: Health.Check. text, tokens, chat: time to the first message of a
generation of one token. stream: the gaps between the messages of long generations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

import grpc
from tests.attacks.common import metadata, opened

from drafthouse.v1 import generation_pb2, generation_pb2_grpc

TIMEOUT_S = 60.0


def request(kind: str, i: int) -> generation_pb2.GenerateRequest:
    asked = generation_pb2.GenerateRequest(max_output_tokens=1)
    asked.sampling.temperature = 0.0
    asked.stop.ignore_end_token = True
    if kind == "chat":
        asked.prompt.chat.messages.add(role="user", content=f"hello {i}")
    elif kind == "tokens":
        asked.prompt.tokens.ids.extend([5 + (i + j) % 90 for j in range(8)])
    else:
        asked.prompt.text = f"def parse_{i}("
    if kind == "stream":
        asked.max_output_tokens = 256
    return asked


def figures(spans: list[float]) -> dict[str, Any]:
    """Returns how many there are, quantiles in ms, and the number of the longest, from 1 on."""
    ordered, n = sorted(spans), len(spans)

    def at(share: float) -> float:
        return 1000 * ordered[min(n - 1, int(share * n))] if n else -1.0

    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    worst = 1 + spans.index(ordered[-1]) if n else 0
    return {"n": n, "worst": worst} | {name: at(share) for name, share in shares.items()}


def main() -> None:
    target, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    key = os.environ.get("PROBE_KEY") or None
    spans: list[float] = []
    errors: Counter[str] = Counter()
    with opened(target, os.environ.get("PROBE_CA_FILE", "")) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        # A client keeps its connection: how it is made under load is no time to first token.
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        end = time.monotonic() + seconds
        i = 0
        while time.monotonic() < end:
            i += 1
            started = time.monotonic()
            try:
                if kind == "health":
                    check(b"", timeout=TIMEOUT_S)
                    spans.append(time.monotonic() - started)
                    time.sleep(0.01)
                elif kind == "stream":
                    last = None
                    for _ in stub.Generate(
                        request(kind, i), timeout=TIMEOUT_S, metadata=metadata(key)
                    ):
                        now = time.monotonic()
                        if last is not None:
                            spans.append(now - last)
                        last = now
                        if now > end:
                            break
                else:
                    call = stub.Generate(
                        request(kind, i), timeout=TIMEOUT_S, metadata=metadata(key)
                    )
                    next(iter(call))
                    spans.append(time.monotonic() - started)
                    for _ in call:
                        pass
                    time.sleep(0.05)
            except (grpc.RpcError, StopIteration) as error:
                code = error.code().name if isinstance(error, grpc.RpcError) else "EMPTY"
                errors[code] += 1
                spans.append(time.monotonic() - started)
                time.sleep(0.1)
    print(json.dumps(figures(spans) | {"errors": errors}))


if __name__ == "__main__":
    main()
