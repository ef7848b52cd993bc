"""Each server with its own defaults, as whoever tries both would start them.

Nothing is set but the model and the port, and what one of them cannot serve without; the table says
which. Prompts and lengths of outputs are drawn anew for each round, the same for all, so prompt
caches are on and find nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import drafthouse
from drafthouse_bench.memory import bytes_per_step, read_bytes_per_s
from drafthouse_bench.peers.case import PeerCase, PeerPlan, Target
from drafthouse_bench.peers.contender import (
    GREEDY,
    OURS,
    THEIRS,
    GrpcClient,
    Running,
    default_peer_flags,
    run_peer_with,
)
from drafthouse_bench.peers.scenario import Prompts, run_closed
from drafthouse_bench.peers.versus import DefaultsRow
from drafthouse_bench.process import ServerProcess, server_flags
from drafthouse_bench.report import n_cores
from drafthouse_bench.trace import Figures, figures
from drafthouse_engine import list_devices
from drafthouse_server.config import Config

__all__ = ["draw_requests", "measure_defaults", "prompt_bounds"]

PLAIN = f"{OURS} without drafts"
"""Our server with draft_type none, the rest by default."""

_N_FIRST_PROMPT = 256
_N_LEAST = 4
_SEED = 20


def draw_requests(
    texts: Prompts, bounds: tuple[int, int], n_output: int, n_requests: int, seed: int
) -> list[tuple[list[int], int]]:
    """Returns prompts with the tokens that each generates; the same arguments give the same.

    Args:
        texts: Token ids of long texts; prompts begin anywhere in them.
        bounds: Tokens of the shortest and the longest prompt.
        n_output: Mean of the outputs, which lie between a quarter of it and seven quarters.
        n_requests: How many.
        seed: Another one for each round.
    """
    chance = random.Random(seed)
    requests = []
    for _ in range(n_requests):
        text = chance.choice(texts)
        length = chance.randint(*bounds)
        start = chance.randrange(max(1, len(text) - length))
        n = chance.randint(max(1, n_output // 4), max(1, 2 * n_output - n_output // 4))
        requests.append((list(text[start : start + length]), n))
    return requests


def prompt_bounds(bounds: tuple[int, int], i_round: int) -> tuple[int, int]:
    """Returns tokens of the shortest and the longest prompt of a round.

    The first, -1, is not counted: it teaches what drafts pay, and long prompts teach no more of it.
    """
    most = _N_FIRST_PROMPT if i_round < 0 else bounds[1]
    return min(bounds[0], most), min(bounds[1], most)


async def measure_defaults(
    plan: PeerPlan,
    case: PeerCase,
    target: Target,
    peer: Path,
    *,
    texts: Prompts,
    n_ctx_train: int,
    flags: tuple[Sequence[str], Sequence[str]] = ((), ()),
    fields: Mapping[str, Any] = GREEDY,
) -> DefaultsRow:
    """Measures a case, all contenders in turns.

    Args:
        plan: How long.
        case: What.
        target: The case's model.
        peer: llama-server.
        texts: As `draw_requests` wants them.
        n_ctx_train: The model's context.
        flags: More flags of ours and of llama-server, to see what another default would do.
        fields: Of each request, by the names that both have for them.

    Raises:
        BenchError: a contender does not start, or a request failed.
        drafthouse.DrafthouseError: a request failed.
    """
    config = plan.config(case, target)
    n_output, bounds = plan.n_output_of(target), plan.prompt_bounds(target)
    if case.n_prompt is not None:
        bounds = case.n_prompt, case.n_prompt
        texts = [_repeated(text, case.n_prompt) for text in texts]
    peer_flags = [*default_peer_flags(bounds[1] + 2 * n_output, n_ctx_train), *flags[1]]
    async with contextlib.AsyncExitStack() as stack:
        runs: list[Running] = []
        n_threads = []
        for name in (OURS, PLAIN):
            own = config if name == OURS else Config(model=config.model, draft_type="none")
            server = await stack.enter_async_context(_run_ours(name, own, flags[0], fields))
            runs.append(server[0])
            n_threads.append(server[1])
        theirs = await stack.enter_async_context(
            run_peer_with(peer, config.model, peer_flags, fields)
        )
        runs.append(theirs.running)

        async def turn(running: Running, n_requests: int, i_round: int) -> Figures:
            of_turn = prompt_bounds(bounds, i_round)
            drawn = draw_requests(texts, of_turn, n_output, n_requests, _SEED + i_round)
            prompts, lengths = zip(*drawn, strict=True)
            return figures(await run_closed(running, prompts, lengths, case.streams))

        turns = await _take_turns(plan, case, n_output, runs, turn)
    return DefaultsRow(
        case,
        turns[OURS],
        turns[PLAIN],
        turns[THEIRS],
        (n_threads[0], theirs.n_threads),
        (shlex.join([*_own_flags(config), *flags[0]]), shlex.join(peer_flags)),
        _memory_limit(case, target),
    )


def _memory_limit(case: PeerCase, target: Target) -> float | None:
    """Returns the tokens per second that the host's memory would allow; None with a device."""
    if any(it.kind in ("gpu", "igpu") for it in list_devices()):
        return None
    n_bytes = bytes_per_step(target.path, case.streams)
    return case.streams * read_bytes_per_s(n_cores()) / n_bytes


def _repeated(text: Sequence[int], n_tokens: int) -> list[int]:
    """Returns a text of twice as many tokens at least, so that prompts begin anywhere in it."""
    return [*text] * (1 + 2 * n_tokens // len(text))


async def _take_turns(
    plan: PeerPlan,
    case: PeerCase,
    n_output: int,
    runs: Sequence[Running],
    turn: Callable[[Running, int, int], Awaitable[Figures]],
) -> dict[str, list[Figures]]:
    """Lets all take turns, each first in one round after the other; returns theirs by name."""
    # What K pays is learnt once in a server's life: a turn of each is not counted.
    first = [await turn(running, 2 * case.streams, -1) for running in runs]
    slowest = min(each.tokens_per_s for each in first)
    n_requests = max(_N_LEAST, plan.n_waves * case.streams)
    if case.n_prompt is None:  # else the speed with short prompts tells nothing
        n_requests = max(n_requests, plan.n_requests(case.streams, n_output, slowest))
    turns: dict[str, list[Figures]] = {running.name: [] for running in runs}
    for i in range(plan.n_rounds):
        for k in range(len(runs)):
            running = runs[(i + k) % len(runs)]
            turns[running.name].append(await turn(running, n_requests, i))
    return turns


def _own_flags(config: Config) -> list[str]:
    """Returns what our server is told besides model and address."""
    return server_flags(dataclasses.replace(config, model=Config().model))[2:]


@contextlib.asynccontextmanager
async def _run_ours(
    name: str, config: Config, flags: Sequence[str], fields: Mapping[str, Any]
) -> AsyncIterator[tuple[Running, int]]:
    """Runs our server for the time of a block; yields it with the threads that it tells."""
    async with ServerProcess(config, flags).run() as server:
        found = re.search(r"^ *threads +(\d+)", "\n".join(server.start_lines), re.M)
        async with drafthouse.AsyncClient(server.target, retry=None) as client:
            grpc = GrpcClient(client, fields)
            yield Running(name, server.pid, grpc, grpc), int(found[1]) if found else 0
