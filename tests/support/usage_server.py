"""A server over the fake engine that records usage, as a process of its own, to be killed.

    python -m tests.support.usage_server FOLDER KEYS

It writes its port. SIGUSR1 fills the disk: no file may grow any more. SIGUSR2 makes room again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import signal
import sys

from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.rpc.server import Server

_FULL_BYTES = 16


def _limit_files(n_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


async def _main(folder: str, keys: str) -> None:
    limits = dataclasses.replace(
        FakeEngine().limits, n_seq_max=16, n_ctx=16384, n_batch=128, n_outputs_max=80
    )
    config = Config(
        port=0,
        parallel=16,
        usage_journal=folder,
        api_keys=tuple(keys.split(",")),
        draft_policy="fixed",
    )
    server = Server(config, lambda: FakeEngine(limits, step_s=0.0005))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _limit_files, _FULL_BYTES)
    loop.add_signal_handler(signal.SIGUSR2, _limit_files, resource.RLIM_INFINITY)
    await server.serve(lambda server: print(server.port, flush=True))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
