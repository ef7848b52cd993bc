"""F11: 1,500 idle connections from one address, without a key.

Bound: a newcomer is served within 1 s, or the flood is cut off.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import grpc
from tests.attacks.common import OPTIONS, arguments, verdict
from tests.support.http2 import Connection

args = arguments(__doc__, connections=1500)
n_wanted = min(args.connections, 8000)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, n_wanted + 256), hard))


def newcomer() -> float | None:
    with grpc.insecure_channel(args.target, OPTIONS) as channel:
        started = time.monotonic()
        try:
            call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            call(b"", timeout=5 * args.patience)
            return time.monotonic() - started
        except grpc.RpcError:
            return None


before = newcomer()
held: list[Connection] = []
end = time.monotonic() + args.seconds
while len(held) < n_wanted and time.monotonic() < end:
    try:
        held.append(Connection(args.target, timeout=2.0))
    except OSError:
        break
    if len(held) % 100 == 0:
        for connection in held[-100:]:
            connection.pump(0.001)
time.sleep(1)
for connection in held:
    connection.pump(0.001)
n_open = sum(not connection.is_closed for connection in held)
during = newcomer()
for connection in held:
    connection.close()


def told(seconds: float | None) -> str:
    return "not served" if seconds is None else f"{1000 * seconds:.0f} ms"


verdict(
    "a12_connection_flood",
    during is None or during > 1.0 * args.patience,
    f"{n_open} of {len(held)} idle connections held; a newcomer's check {told(before)} ->"
    f" {told(during)}",
)
