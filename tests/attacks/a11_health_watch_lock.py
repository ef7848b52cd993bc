"""F9: a watcher of Health with a flow-control window of 0, without a key.

With --sigterm PID the server is asked to drain besides, and has 45 s. Bound: another watcher is
answered within 1 s.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import grpc
from tests.attacks.common import OPTIONS, arguments, verdict
from tests.support.http2 import Connection

args = arguments(__doc__, sigterm=0)


def first_answer(seconds: float) -> float | None:
    with grpc.insecure_channel(args.target, OPTIONS) as channel:
        started = time.monotonic()
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        call = watch(b"", timeout=seconds)
        try:
            next(iter(call))
            return time.monotonic() - started
        except grpc.RpcError:
            return None
        finally:
            call.cancel()


def is_running(pid: int) -> bool:
    """Returns whether a process runs; one that has ended may wait for its parent to look."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


before = first_answer(5 * args.patience)
attacker = Connection(args.target, window=0)
attacker.pump(0.2)
attacker.open("/grpc.health.v1.Health/Watch", b"")
attacker.pump(0.5)
during = first_answer(5 * args.patience)
drained = ""
if args.sigterm:
    os.kill(args.sigterm, signal.SIGTERM)
    end = time.monotonic() + 45
    while time.monotonic() < end and is_running(args.sigterm):
        attacker.pump(0.5)
    drained = f"; SIGTERM: {'STILL RUNNING after 45 s' if is_running(args.sigterm) else 'ended'}"
attacker.close()
shown = "never" if during is None else f"{1000 * during:.0f} ms"
verdict(
    "a11_health_watch_lock",
    during is None or during > 1.0 * args.patience,
    f"another watcher's first answer:"
    f" {'never' if before is None else f'{1000 * before:.0f} ms'} -> {shown}{drained}",
)
