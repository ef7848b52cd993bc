"""What keys, limits and usage cost: processor time per request and token, with all and without.

    python -m tests.proofs.tenancy_cost [--rounds 10] [--streams 32] [--tokens 128] [--waves 4]
        [--engine demo]

Two servers, each a process of its own, are asked the same in turns: `bare` knows no tenants; `full`
has keys in a SQLite store, two tenants with every limit set, an end user with each request, usage
in a journal and in the store. The fake engine computes nothing, so what differs stands out;
`--engine demo` has the demo model compute, which is what the two per cent of the bar are part of.
A server's time is that of all its threads and of its text workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from models.prompts import PATH

import drafthouse
from drafthouse_server.cli.main import main as run_command
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.rpc.server import Server

_TENANTS = ("acme", "zenith")
_LIMITS = (
    "weight=2",
    "requests_per_s=100000",
    "input_tokens_per_min=1000000000",
    "output_tokens_per_min=1000000000",
    "tokens_per_month=1000000000000",
    "max_streams=1000",
    "queue_size=1000",
    "end_user_requests_per_s=100000",
    "end_user_max_streams=1000",
)
_SETTLE_S = 1.5  # after a turn: the store has its records


def _command(*words: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    if run_command([*words], Terminal(out, err)):
        raise RuntimeError(f"drafthouse {' '.join(words)}: {err.getvalue()}")
    return out.getvalue().strip()


def _prepare(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of the full server, and its tenants' keys."""
    store, pepper = f"sqlite:///{folder / 'store.db'}", str(folder / "pepper")
    flags = ["--store", store, "--key-pepper-file", pepper]
    keys = []
    for tenant in _TENANTS:
        keys.append(_command("keys", "add", "--tenant", tenant, *flags))
        _command("tenants", "set", tenant, *_LIMITS, *flags)
    settings = {"store": store, "key_pepper_file": pepper, "usage_journal": str(folder / "usage")}
    return settings, keys


def _load(config: Config, engine: str) -> Engine:
    if engine == "demo":
        return LlamaEngine.load(config)
    limits = dataclasses.replace(
        FakeEngine().limits,
        n_seq_max=32,
        n_ctx=32 * 1024,
        n_batch=512,
        n_ubatch=512,
        n_outputs_max=160,
    )
    return FakeEngine(limits, step_s=0.002)


async def _serve(settings: str, engine: str) -> None:
    config = Config(port=0, parallel=32, draft_policy="fixed", **json.loads(settings))
    server = Server(config, lambda: _load(config, engine))
    await server.serve(lambda server: print(server.target, flush=True))


async def _ask(target: str, keys: list[str], n_streams: int, n_tokens: int) -> None:
    texts = [prompt["text"][:400] for prompt in json.loads(PATH.read_text("utf-8"))["prompts"]]
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(drafthouse.AsyncClient(target, api_key=key or None))
            for key in keys
        ]
        results = await asyncio.gather(
            *(
                clients[i % len(clients)].generate(
                    texts[i % len(texts)],
                    max_output_tokens=n_tokens,
                    ignore_end_token=True,
                    end_user=f"user {i % 7}" if keys[0] else "",
                )
                for i in range(n_streams)
            )
        )
    assert all(len(result.token_ids) == n_tokens for result in results)


@dataclasses.dataclass
class _Contender:
    """A server that runs, and what it has spent."""

    process: subprocess.Popen[str]
    """It."""
    target: str
    """host:port."""
    keys: list[str]
    """With which it is asked; one that is empty: without."""
    spent: list[float] = dataclasses.field(default_factory=list)
    """Processor seconds of its turns."""

    def cpu_s(self) -> float:
        """Returns the processor seconds of its process and its children."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
        # A thread's children are told with that thread.
        for task in Path(f"/proc/{pid}/task").iterdir():
            if task.name != str(pid):
                with contextlib.suppress(OSError):
                    children += (task / "children").read_text("utf-8").split()
        return sum(map(_cpu_s, [str(pid), *children]))


def _cpu_s(pid: str) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _running(settings: dict[str, Any], keys: list[str], engine: str) -> Iterator[_Contender]:
    command = [sys.executable, "-m", "tests.proofs.tenancy_cost", "--engine", engine]
    process = subprocess.Popen(
        [*command, "--serve", json.dumps(settings)], stdout=subprocess.PIPE, text=True
    )
    try:
        lines: IO[str] | None = process.stdout
        assert lines is not None
        target = lines.readline().strip()
        if not target:
            raise RuntimeError("a server did not start, see above")
        yield _Contender(process, target, keys)
    finally:
        process.terminate()
        process.wait(60)


async def _turn(contender: _Contender, asked: argparse.Namespace) -> float:
    before = contender.cpu_s()
    command = [sys.executable, "-m", "tests.proofs.tenancy_cost", "--ask", contender.target]
    command += ["--keys", ",".join(contender.keys), "--tokens", str(asked.tokens)]
    command += ["--streams", str(asked.streams), "--waves", str(asked.waves)]
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise RuntimeError("the client failed, see above")
    await asyncio.sleep(_SETTLE_S)
    return contender.cpu_s() - before


async def _measure(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings, keys = _prepare(Path(folder))
        bare = stack.enter_context(_running({"insecure_no_auth": True}, [""], asked.engine))
        full = stack.enter_context(_running(settings, keys, asked.engine))
        for number in range(asked.rounds + 1):
            for contender in (bare, full) if number % 2 else (full, bare):
                cost_s = await _turn(contender, asked)
                if number:  # the first round warms up
                    contender.spent.append(cost_s)
    n_requests = asked.streams * asked.waves
    for name, each in (("bare", bare), ("full", full)):
        found_s = statistics.median(each.spent)
        print(
            f"{name}  {found_s / n_requests * 1e3:7.3f} ms of processor time a request of"
            f" {asked.tokens} tokens, {found_s / n_requests / asked.tokens * 1e6:6.1f} µs a token"
        )
    ratios = [b / a for a, b in zip(bare.spent, full.spent, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"full / bare: {middle:.4f} in the median of {len(ratios)} ({low:.4f} to {high:.4f})")


async def _waves(asked: argparse.Namespace) -> None:
    for _ in range(asked.waves):
        await _ask(asked.ask, asked.keys.split(","), asked.streams, asked.tokens)


def main() -> None:
    """Measures, or is a server or a client of a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--tokens", type=int, default=128, help="of a request")
    parser.add_argument("--waves", type=int, default=4, help="of streams in a turn")
    parser.add_argument("--engine", choices=["fake", "demo"], default="fake")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--keys", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve(asked.serve, asked.engine))
    elif asked.ask:
        asyncio.run(_waves(asked))
    else:
        asyncio.run(_measure(asked))


if __name__ == "__main__":
    main()
