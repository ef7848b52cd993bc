"""Starts of a quick model under load from the first moment: none may lose a stream.

What a server guesses in its first steps, when nothing is known, decides whether it lives. So each
start is a new server: engine, contexts, scheduler, estimators, port; a few streams come at the
moment it listens, and then again, until each client has had its prompts. Most starts share this
process, which takes a tenth of a second or two; one in `--every` is a whole `drafthouse serve`.

    python -m tests.proofs.soak_starts --starts 1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import drafthouse
from drafthouse_server.cli import CHECKOUT
from drafthouse_server.cli.serve import LISTENS_AT
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.rpc.server import Server

__all__ = ["Starts", "main"]

_MODELS = ("tiny-draft-f16.gguf", "tiny-mimo2-f16.gguf")
_N_CLIENTS = 3
_N_PROMPTS = 2
_LIMIT_S = 60.0


@dataclass
class Starts:
    """Starts of servers, and what became of their streams."""

    seed: int = 1
    """Of prompts and lengths."""
    n_passed: int = 0
    """Starts whose streams all came to their ends."""
    failures: list[str] = field(default_factory=list)
    """What went wrong with the others."""

    async def start(self, i: int, *, is_process: bool) -> None:
        """Starts one server, puts load on it, and ends it."""
        draw = random.Random(self.seed * 100_000 + i)
        model = str(CHECKOUT / "models" / _MODELS[i % len(_MODELS)])
        try:
            async with asyncio.timeout(_LIMIT_S):
                async with (_process if is_process else _server)(model) as target:
                    await _load(target, draw)
        except (drafthouse.DrafthouseError, OSError, RuntimeError, TimeoutError) as error:
            kind = "process" if is_process else "server"
            self.failures.append(f"start {i} ({kind}, {model}): {type(error).__name__}: {error}")
        else:
            self.n_passed += 1


@contextlib.asynccontextmanager
async def _server(model: str) -> AsyncIterator[str]:
    """Runs a server in this process."""
    config = Config(
        model=model, draft_type="none", port=0, parallel=2, max_model_len=512, threads=1
    )
    server = Server(config, lambda: LlamaEngine.load(config))
    await server.startup()
    try:
        yield server.target
        if not server.loop.is_healthy or server.loop.statistics().n_steps_failed:
            raise RuntimeError("the loop has failed or lost a step")
        n_resets = server.loop.statistics().scheduler.n_estimator_resets
        if n_resets:
            raise RuntimeError(f"{n_resets} resets of estimators")
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def _process(model: str) -> AsyncIterator[str]:
    """Runs `drafthouse serve`, which must end well."""
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--model", model]
    flags = ["--draft-type", "none", "--port", "0", "--parallel", "2", "--max-model-len", "512"]
    process = await asyncio.create_subprocess_exec(
        *command, *flags, "--threads", "1", "--log-level", "error",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: text for name, text in os.environ.items() if "DRAFTHOUSE_" not in name},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.decode().startswith(LISTENS_AT):
                yield line.decode().removeprefix(LISTENS_AT).strip()
                break
        process.terminate()
        _, log = await process.communicate()
        # A step that is lost and an estimator that starts over are errors in the log.
        if process.returncode or b" ERROR " in log:
            raise RuntimeError(f"exit code {process.returncode}: {log.decode()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _load(target: str, draw: random.Random) -> None:
    """A few clients at once, each with a few prompts one after the other."""
    async with drafthouse.AsyncClient(target, retry=None) as client:

        async def ask() -> None:
            for _ in range(_N_PROMPTS):
                n_output = draw.randrange(1, 40)
                result = await client.generate(
                    "def parse(" * draw.randrange(1, 12),
                    max_output_tokens=n_output,
                    temperature=0,
                    ignore_end_token=True,
                )
                if len(result.token_ids) != n_output:
                    raise RuntimeError(f"{len(result.token_ids)} tokens of {n_output}")

        await asyncio.gather(*(ask() for _ in range(_N_CLIENTS)))


async def _run(n_starts: int, every: int) -> Starts:
    starts, began = Starts(), time.monotonic()
    for i in range(n_starts):
        n_failed = len(starts.failures)
        await starts.start(i, is_process=bool(every) and i % every == every - 1)
        for failure in starts.failures[n_failed:]:
            print(failure, flush=True)
        if (i + 1) % 50 == 0:
            seconds = time.monotonic() - began
            print(f"{i + 1} starts, {len(starts.failures)} failed, {seconds:.0f} s", flush=True)
    return starts


def main() -> int:
    """Returns 0 if no start has lost a stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="one start in so many is a process")
    arguments = parser.parse_args()
    logging.basicConfig(level="ERROR")
    starts = asyncio.run(_run(arguments.starts, arguments.every))
    print(f"{starts.n_passed} passed, {len(starts.failures)} failed")
    return 0 if not starts.failures else 1


if __name__ == "__main__":
    sys.exit(main())
