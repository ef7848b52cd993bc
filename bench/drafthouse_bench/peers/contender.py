"""The contenders of `drafthouse-bench peers`: our server and llama-server, with the same settings.

Each is a process of its own on a free port of loopback; this process is the client of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import drafthouse
from drafthouse_bench.peers.http import HttpClient
from drafthouse_bench.process import BenchError, ServerProcess, end_process, last_line
from drafthouse_bench.trace import Trace
from drafthouse_server.config import Config

__all__ = [
    "GREEDY",
    "OURS",
    "THEIRS",
    "Client",
    "DefaultPeer",
    "GrpcClient",
    "Running",
    "default_peer_flags",
    "peer_flags",
    "require_peer",
    "run_ours",
    "run_peer",
    "run_peer_with",
]

OURS = "drafthouse"
THEIRS = "llama-server"
_STARTUP_S = 180.0
_TENANTS = ("one:key-of-one", "two:key-of-two")
_N_HTTP_THREADS = 128
"""A kept connection holds a thread of llama-server; its default would make clients wait."""

_N_PEER_SLOTS = 4
"""Slots of llama-server where no flag says how many."""

_PEER_TYPES = {"mtp": "draft-mtp", "eagle3": "draft-eagle3", "simple": "draft-simple"}
_NGRAM_SIZES = {"ngram-simple": 4, "ngram-map-k": 4, "ngram-map-k4v": 4}
"""Tokens that an n-gram drafter looks up, as `fill_spec_params` sets them."""


GREEDY: Mapping[str, Any] = {"temperature": 0.0}
"""Fields of a request that takes the likeliest token; both servers name theirs alike."""


class Client(Protocol):
    """What a load needs of a contender. Past end tokens, unless a grammar says where the end is."""

    async def stream(self, prompt: Sequence[int], n_output: int, trace: Trace) -> None:
        """Generates and notes in the trace when tokens come."""
        ...

    async def whole(self, prompt: Sequence[int], n_output: int) -> list[int]:
        """Generates and returns the token ids."""
        ...


class GrpcClient:
    """Our server through the SDK.

    Args:
        client: Connected.
        fields: Of each request, by their names in `drafthouse.GenerateOptions`.
    """

    def __init__(self, client: drafthouse.AsyncClient, fields: Mapping[str, Any] = GREEDY) -> None:
        self._client = client
        self._fields = fields

    async def stream(self, prompt: Sequence[int], n_output: int, trace: Trace) -> None:
        """Generates and notes in the trace when tokens come.

        Raises:
            BenchError: tokens are missing.
            drafthouse.DrafthouseError: the request failed.
        """
        stream = self._start(prompt, n_output)
        async for chunk in stream:
            if chunk.token_ids:
                trace.add(time.perf_counter(), len(chunk.token_ids))
                trace.token_ids += chunk.token_ids
        answer = await stream
        counts = answer.speculation
        trace.n_drafted, trace.n_accepted = counts.n_drafted, counts.n_accepted
        trace.n_reused = answer.usage.reused_prompt_tokens
        trace.finish(OURS, n_output)

    async def whole(self, prompt: Sequence[int], n_output: int) -> list[int]:
        """Generates and returns the token ids.

        Raises:
            drafthouse.DrafthouseError: the request failed.
        """
        return [token async for chunk in self._start(prompt, n_output) for token in chunk.token_ids]

    def _start(self, prompt: Sequence[int], n_output: int) -> drafthouse.AsyncGenerationStream:
        return self._client.generate(
            tuple(prompt),
            max_output_tokens=n_output,
            ignore_end_token="grammar" not in self._fields,  # that alone says where an answer ends
            **self._fields,
        )


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that takes requests."""

    name: str
    """`drafthouse` or `llama-server`."""
    pid: int
    """Process id of the server."""
    client: Client
    """Client of the tenant that loads the server."""
    other: Client
    """Client of another tenant; llama-server knows one only."""


@contextlib.asynccontextmanager
async def run_ours(
    config: Config, flags: Sequence[str] = (), fields: Mapping[str, Any] = GREEDY
) -> AsyncIterator[Running]:
    """Runs our server for the time of a block, with two tenants.

    Args:
        config: Settings.
        flags: More flags of `drafthouse serve`.
        fields: Of each request.

    Raises:
        BenchError: it does not start.
    """
    config = dataclasses.replace(config, api_keys=_TENANTS)
    keys = [entry.partition(":")[2] for entry in _TENANTS]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(ServerProcess(config, flags).run())
        one, two = [
            await stack.enter_async_context(
                drafthouse.AsyncClient(server.target, api_key=key, retry=None)
            )
            for key in keys
        ]
        clients = GrpcClient(one, fields), GrpcClient(two, fields)
        yield Running(OURS, server.pid, *clients)


def require_peer(program: Path) -> None:
    """Sees that llama-server is built.

    Raises:
        BenchError: it is not.
    """
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise BenchError(f"llama-server is not built ({program}); `make peers` builds it")


@contextlib.asynccontextmanager
async def run_peer(
    program: Path, config: Config, flags: Sequence[str] = ()
) -> AsyncIterator[Running]:
    """Runs llama-server for the time of a block, with the settings of ours.

    Args:
        program: llama-server.
        config: Settings of our server.
        flags: More flags of llama-server; they win.

    Raises:
        BenchError: it is not built, or does not start.
    """
    port = _free_port()
    client = HttpClient(port, GREEDY)
    async with _run_program(program, [*peer_flags(config, port), *flags], client) as (pid, _):
        yield Running(THEIRS, pid, client, client)


@dataclass(frozen=True, slots=True)
class DefaultPeer:
    """llama-server with its own defaults."""

    running: Running
    """The running server."""
    n_threads: int
    """Threads of a decode, as it tells; 0: it does not."""


@contextlib.asynccontextmanager
async def run_peer_with(
    program: Path, model: str, flags: Sequence[str], fields: Mapping[str, Any] = GREEDY
) -> AsyncIterator[DefaultPeer]:
    """Runs llama-server with its own defaults for the time of a block.

    Args:
        program: llama-server.
        model: The model's path.
        flags: Besides model and address.
        fields: Of each request.

    Raises:
        BenchError: it is not built, or does not start.
    """
    port = _free_port()
    client = HttpClient(port, fields, has_cache=True)
    where = ["--model", model, "--host", "127.0.0.1", "--port", str(port)]
    async with _run_program(program, [*where, *flags], client) as (pid, log):
        log.seek(0)
        found = re.search(rb"n_threads = (\d+)", log.read())
        running = Running(THEIRS, pid, client, client)
        yield DefaultPeer(running, int(found[1]) if found else 0)


@contextlib.asynccontextmanager
async def _run_program(
    program: Path, flags: Sequence[str], client: HttpClient
) -> AsyncIterator[tuple[int, IO[bytes]]]:
    """Runs llama-server until the block ends; yields its process and its log."""
    require_peer(program)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            str(program),
            *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={k: v for k, v in os.environ.items() if not k.startswith("LLAMA_")},
        )
        try:
            await _until_ready(process, client, log)
            yield process.pid, log
        finally:
            client.close()
            await end_process(process)


def peer_flags(config: Config, port: int) -> list[str]:
    """Returns the flags with which llama-server does what our settings say.

    Its prompt cache and checkpoints are off, as a cold run wants. EAGLE-3 samples its drafts on the
    CPU: with its default several sequences draft wrongly at the pinned version.
    """
    n_threads = str(config.threads)
    flags = ["--model", config.model, "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--parallel", str(config.parallel)]
    flags += ["--ctx-size", str(config.ctx_size or config.parallel * config.max_model_len)]
    flags += ["--batch-size", str(config.batch_size), "--ubatch-size", str(config.ubatch_size)]
    flags += ["--threads", n_threads, "--threads-batch", str(config.threads_batch or n_threads)]
    flags += ["--kv-unified" if config.kv_unified else "--no-kv-unified", "--swa-full"]
    flags += ["--flash-attn", config.flash_attn]
    flags += ["--gpu-layers", str(config.gpu_layers)]
    flags += ["--no-cache-prompt", "--cache-ram", "0", "--ctx-checkpoints", "0"]
    flags += ["--threads-http", str(_N_HTTP_THREADS), "--fit", "off", "--offline", "--no-ui"]
    flags += ["--log-verbosity", "1"]
    return flags + _draft_flags(config)


def default_peer_flags(n_longest: int, n_ctx_train: int) -> list[str]:
    """Returns what llama-server must be told beside its defaults to serve the load at all.

    Its four slots share as many cells as the model was trained with. Where four requests do not fit
    into them it gets as many for each slot.

    Args:
        n_longest: Tokens of the longest request.
        n_ctx_train: The model's context.
    """
    has_room = _N_PEER_SLOTS * n_longest <= n_ctx_train
    return [] if has_room else ["--ctx-size", str(_N_PEER_SLOTS * n_ctx_train)]


def _draft_flags(config: Config) -> list[str]:
    kind, n_draft = config.draft_type, str(config.draft_default)
    if kind == "none" or not config.draft_default:
        return []
    flags = ["--spec-type", _PEER_TYPES.get(kind, kind)]
    if kind in _NGRAM_SIZES:
        flags += [f"--spec-{kind}-size-n", str(_NGRAM_SIZES[kind])]
        flags += [f"--spec-{kind}-size-m", n_draft, f"--spec-{kind}-min-hits", "1"]
        return flags
    flags += ["--spec-draft-n-max", n_draft, "--spec-draft-n-min", "0"]
    flags += ["--spec-draft-p-min", str(config.draft_p_min)]
    if config.model_draft:
        flags += ["--spec-draft-model", config.model_draft]
    if kind == "eagle3":
        flags += ["--no-spec-draft-backend-sampling"]
    if config.synth_rates:
        flags += ["--spec-synth-rates", ",".join(config.synth_rates)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _until_ready(
    process: asyncio.subprocess.Process, client: HttpClient, log: IO[bytes]
) -> None:
    until_s = time.monotonic() + _STARTUP_S
    while time.monotonic() < until_s and process.returncode is None:
        if await client.is_ready():
            return
        await asyncio.sleep(0.05)
    raise BenchError(f"llama-server does not start: {last_line(log)}")
