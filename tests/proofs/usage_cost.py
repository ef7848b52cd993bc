"""What usage records cost: processor time per stream and token, with a journal and without.

    python -m tests.proofs.usage_cost [--rounds 10] [--streams 32] [--tokens 128] [--engine fake]

Both servers serve the demo model in this process, in turns; clients are a process of their own. All
threads of the server count, the engine's too: their noise is many times what is looked for, so that
`--engine fake`, which computes nothing, tells the difference and the demo model what it is part of.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from models.prompts import PATH

import drafthouse
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.rpc.server import Server

__all__ = ["main"]


async def _client(target: str, n_streams: int, n_tokens: int) -> None:
    texts = [prompt["text"] for prompt in json.loads(PATH.read_text("utf-8"))["prompts"]]
    texts = [text[:400] for text in texts]
    async with drafthouse.AsyncClient(target) as client:
        results = await asyncio.gather(
            *(
                client.generate(
                    texts[i % len(texts)], max_output_tokens=n_tokens, ignore_end_token=True
                )
                for i in range(n_streams)
            )
        )
    assert all(len(result.token_ids) == n_tokens for result in results)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _burn(server: Server, n_streams: int, n_tokens: int) -> float:
    """Returns seconds of processor time that a crowd costs the server."""
    arguments = ["--client", server.target, "--streams", str(n_streams), "--tokens", str(n_tokens)]
    before = _cpu_s()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.proofs.usage_cost", *arguments
    )
    assert await process.wait() == 0
    await asyncio.sleep(0.5)  # the store has its records
    return _cpu_s() - before


def _load(config: Config, engine: str) -> Engine:
    if engine == "demo":
        return LlamaEngine.load(config)
    limits = FakeEngine().limits
    return FakeEngine(
        dataclasses.replace(
            limits, n_seq_max=32, n_ctx=32 * 1024, n_batch=512, n_ubatch=512, n_outputs_max=160
        ),
        step_s=0.002,
    )


async def _measure(n_rounds: int, n_streams: int, n_tokens: int, engine: str) -> None:
    spent: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        servers = {}
        for name, journal in (("without", ""), ("with", str(Path(folder) / "usage"))):
            config = Config(port=0, parallel=32, usage_journal=journal, draft_policy="fixed")
            servers[name] = Server(config, functools.partial(_load, config, engine))
            await servers[name].startup()
        for number in range(n_rounds + 1):
            names = list(servers)[:: 1 if number % 2 else -1]
            for name in names:
                cost_s = await _burn(servers[name], n_streams, n_tokens)
                if number:  # the first round warms up
                    spent[name].append(cost_s)
        for server in servers.values():
            await server.close()
    for name, values in spent.items():
        print(f"{name:8} {statistics.median(values) * 1e3:9.1f} ms in the median of {n_rounds}")
    ratios = [a / b for a, b in zip(spent["with"], spent["without"], strict=True)]
    more_s = statistics.median(spent["with"]) - statistics.median(spent["without"])
    print(
        f"with / without: {statistics.median(ratios):.4f} in the median"
        f" ({min(ratios):.4f} to {max(ratios):.4f});"
        f" {more_s / n_streams * 1e6:.0f} µs a stream of {n_tokens} tokens"
    )


def main() -> None:
    """Measures, or is the client of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engine", choices=["demo", "fake"], default="demo")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        asyncio.run(_client(asked.client, asked.streams, asked.tokens))
    else:
        asyncio.run(_measure(asked.rounds, asked.streams, asked.tokens, asked.engine))


if __name__ == "__main__":
    main()
