"""F10: streams of clients with a flow-control window of 0, which never take a byte.

Bound: ended streams are reset within 30 s, or no more of them are taken than slots and queue.
"""

from __future__ import annotations

import os
import time

from tests.attacks.common import (
    GENERATION,
    arguments,
    baseline,
    field,
    model,
    number,
    shown,
    verdict,
)
from tests.support.http2 import Connection

args = arguments(__doc__, streams=300, tokens=128, pid=0)
args.seconds = max(args.seconds, 40.0) * args.patience
card = model(args.target, args.key)
prompt = field(2, field(2, field(1, bytes(range(5, 13)))))
MESSAGE = prompt + number(3, min(args.tokens, 4096)) + field(6, number(3, 1))


def rss() -> int:
    if not args.pid or not os.path.exists(f"/proc/{args.pid}/status"):
        return 0
    with open(f"/proc/{args.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


before, rss_before = baseline(args.target, args.victim, "tokens"), rss()
connections: list[Connection] = []
end = time.monotonic() + args.seconds
n_open = 0
wave = card.slot_count + 32
while n_open < min(args.streams, 2000) and time.monotonic() < end - 10:
    connection = Connection(args.target, window=0)
    connections.append(connection)
    connection.pump(0.2)
    for _ in range(min(wave, args.streams - n_open)):
        connection.open(GENERATION + "Generate", MESSAGE, args.key)
        n_open += 1
    connection.pump(1.0)
bound = card.slot_count + 128
n_held = n_open
while n_held > bound and time.monotonic() < end:  # none is opened any more: it only falls
    for connection in connections:
        connection.pump(0.05)
    n_held = n_open - sum(len(connection.ended) for connection in connections)
waited_s = args.seconds - max(0.0, end - time.monotonic())
after = baseline(args.target, args.victim, "tokens")
grown = rss() - rss_before
for connection in connections:
    connection.close()
verdict(
    "a10_zero_window_readers",
    n_held > bound,
    f"{n_open} streams opened over {len(connections)} connections, {n_held} still held after"
    f" {waited_s:.0f} s"
    f" ({card.slot_count} slots), memory +{grown >> 10} MiB; others' TTFT {shown(before)} ->"
    f" {shown(after)}",
)
