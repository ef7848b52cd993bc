"""F11: streams whose message never comes: headers only.

Bound: ended within 30 s.
"""

from __future__ import annotations

import time

from tests.attacks.common import GENERATION, arguments, is_alive, verdict
from tests.support.http2 import Connection

args = arguments(__doc__, connections=10, streams=100)
args.seconds = max(args.seconds, 35.0) * args.patience
connections = [Connection(args.target) for _ in range(min(args.connections, 50))]
n_open = 0
for connection in connections:
    connection.pump(0.1)
    for _ in range(min(args.streams, 380)):
        connection.open(GENERATION + "Generate", None)
        n_open += 1
end = time.monotonic() + args.seconds
n_held = n_open
while n_held and time.monotonic() < end:  # when none is left, none will be open
    for connection in connections:
        connection.pump(0.05)
    n_closed = sum(min(args.streams, 380) for c in connections if c.is_closed)
    n_held = n_open - n_closed - sum(len(c.ended) for c in connections if not c.is_closed)
waited_s = args.seconds - max(0.0, end - time.monotonic())
alive = is_alive(args.target)
for connection in connections:
    connection.close()
verdict(
    "a17_headers_only",
    n_held > 0,
    f"{n_held} of {n_open} streams without a message still open after {waited_s:.0f} s;"
    f" server answers: {alive}",
)
