"""Clients that leave, deadlines that pass: for as long as wanted, and nothing is an error.

40 streams at a time, a third of whose clients leave, a third with deadlines of 50 ms or less,
beside short calls that are given too little time as well. In the end every slot is free, every
request was counted once, and no line of the log is an error.

    python -m tests.proofs.soak --seconds 3600                 # the demo model
    python -m tests.proofs.soak --seconds 10 --engine fake
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.rpc.server import Server

__all__ = ["Soak", "main"]

N_STREAMS = 40
_DEADLINE_MAX_S = 0.05
_SETTLE_S = 100.0
_PAUSE_MAX_S = 0.1


class _Errors(logging.Handler):
    """Collects what is logged as an error, by whomever."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


class _Calls(logging.Filter):
    """Counts the generations that the server was asked for, by its line for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.n += "call method=/drafthouse.v1.GenerationService/Generate " in record.getMessage()
        return record.levelno >= logging.WARNING


@dataclass
class Soak:
    """A server and the clients that trouble it."""

    make_engine: Callable[[], Engine]
    """Makes the engine; called once."""
    seed: int = 1
    """Of everything that clients draw."""
    n_started: int = 0
    """Streams that were begun."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """How they ended, as their clients saw it."""
    errors: list[str] = field(default_factory=list)
    """What was logged as an error."""
    counted: dict[str, int] = field(default_factory=dict)
    """How they ended, as the server counted it."""
    n_calls: int = 0
    """Generations that the server was asked for; some clients' time is over before."""
    n_left: int = -1
    """Requests that the server still holds in the end."""

    async def run(self, seconds: float) -> None:
        """Lets the clients come and go for a time, and then waits until the server has settled."""
        handler, calls = _Errors(), _Calls()
        logging.getLogger().addHandler(handler)
        log = logging.getLogger("drafthouse_server.rpc.interceptors")
        level = log.level
        log.setLevel(logging.INFO)
        log.addFilter(calls)
        config = Config(port=0, parallel=4, queue_size=2 * N_STREAMS, draft_policy="adaptive")
        server = Server(config, self.make_engine)
        await server.startup()
        try:
            end = time.monotonic() + seconds
            async with drafthouse.AsyncClient(server.target, retry=None) as client:
                clients = [self._stream(client, i, end) for i in range(N_STREAMS)]
                await asyncio.gather(*clients, self._ask(client, end))
            await self._settle(server)
        finally:
            await server.close()
            await asyncio.sleep(0.1)  # what ends late may log
            logging.getLogger().removeHandler(handler)
            log.removeFilter(calls)
            log.setLevel(level)
            self.errors, self.n_calls = handler.lines, calls.n
            self.counted = dict(server.loop.statistics().n_requests)

    async def _settle(self, server: Server) -> None:
        give_up_at = time.monotonic() + _SETTLE_S
        while self.n_left and time.monotonic() < give_up_at:
            await asyncio.sleep(0.01)
            statistics = server.loop.statistics()
            self.n_left = statistics.n_running + statistics.n_waiting

    async def _stream(self, client: drafthouse.AsyncClient, i: int, end: float) -> None:
        """One client after another, each of which stays, leaves or has too little time."""
        draw = random.Random(self.seed * 1000 + i)
        while time.monotonic() < end:
            timeout = None
            if i % 3 == 1:
                timeout = draw.random() * _DEADLINE_MAX_S
            self.n_started += 1
            stream = client.generate(
                "def parse(" * draw.randrange(1, 20),
                max_output_tokens=draw.randrange(1, 60),
                temperature=0,
                timeout=timeout,
            )
            try:
                if i % 3 == 2:
                    await self._leave(stream, draw)
                else:
                    await stream
                    self.outcomes["finished"] += 1
            except drafthouse.DrafthouseError as error:
                self.outcomes[error.reason or error.code.name] += 1
            # gRPC refuses streams of clients that do nothing but reset theirs.
            await asyncio.sleep(draw.random() * _PAUSE_MAX_S)

    async def _leave(self, stream: drafthouse.AsyncGenerationStream, draw: random.Random) -> None:
        try:
            async with asyncio.timeout(draw.random() * 0.3):
                await stream
            self.outcomes["finished"] += 1
        except TimeoutError:
            self.outcomes["left"] += 1

    async def _ask(self, client: drafthouse.AsyncClient, end: float) -> None:
        """Short calls with too little time, and some that the server refuses."""
        draw = random.Random(self.seed)
        while time.monotonic() < end:
            timeout = draw.choice([0.002, 0.01, 0.05])
            with contextlib.suppress(drafthouse.DrafthouseError):
                await client.tokenize("x" * draw.randrange(1, 2000), timeout=timeout)
            with contextlib.suppress(drafthouse.DrafthouseError):
                await client.get_model("nobody serves this", timeout=timeout)
            with contextlib.suppress(drafthouse.DrafthouseError):
                await client.generate("x", temperature=99, timeout=timeout)
            await asyncio.sleep(draw.random() * _PAUSE_MAX_S)


def main() -> int:
    """Returns 0 if nothing was an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--engine", choices=("demo", "fake"), default="demo")
    arguments = parser.parse_args()
    logging.basicConfig(level="WARNING")
    config = Config(port=0, parallel=4)
    make: Callable[[], Engine] = FakeEngine
    if arguments.engine == "demo":
        make = partial(LlamaEngine.load, config)
    soak = Soak(make)
    asyncio.run(soak.run(arguments.seconds))
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{soak.n_started} streams; clients saw {dict(soak.outcomes)}")
    print(f"the server counted {soak.counted} of {soak.n_calls} calls; {soak.n_left} left")
    print(f"{len(soak.errors)} errors in the log; {rss_mib} MiB at most")
    is_once = sum(soak.counted.values()) == soak.n_calls
    return 0 if is_once and not soak.errors and soak.n_left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
