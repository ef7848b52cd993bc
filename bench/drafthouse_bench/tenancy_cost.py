"""What keys, limits and usage cost: processor time per request and token, with all and without.

    drafthouse-bench tenancy-cost [--rounds 20] [--streams 32] [--tokens 16,128] [--waves 2]
        [--engine MODEL] [--step-ms 10] [--starts 1]

Two servers, each a process of its own, are asked the same in turns: `bare` knows no tenants; `full`
has keys in a SQLite store, two tenants with every limit set, an end user with each request, usage
in a journal and in the store. The fake engine computes nothing, so what differs stands out; its
steps are so long that each token is a message of its own, with both. `--engine dense`, or another
model as `fair-shares` names them, has that one compute: the two per cent of the bar are of its
requests (with `OMP_WAIT_POLICY=passive`: threads that wait count as well). A server's time is that
of all its threads and of its text workers, in nanoseconds by the kernel's clock; its wake-ups are
the times that a thread of it had waited. Two processes with the same model differ by some percent,
by where its weights lie in memory: `--starts 4` begins with new ones so often, in another order
each time, and tells the ratio of each pair. One stream at a time has no luck in what is computed
together.

Differences and ratios are paired: of the two turns of a round. Told is their median, and the
interval that has 95 % of the medians of rounds drawn from them again and again (bootstrap). What
else goes on in the machine only adds: of each server the turn that took least says most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import drafthouse
from drafthouse_bench.demos import CHECKOUT
from drafthouse_bench.peers.case import find_target
from drafthouse_server.cli.main import main as run_command
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.rpc.server import Server

_PROMPTS = CHECKOUT / "models" / "prompts.json"
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
_FAKE = "fake"
_SETTLE_S = 1.2  # after a turn: the store has its records
_SWITCH_INTERVAL_S = 1e-4  # as `drafthouse serve` has it
_N_DRAWS = 2000


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


def _load(config: Config, engine: str, step_s: float) -> Engine:
    if engine != _FAKE:
        return LlamaEngine.load(config)
    limits = dataclasses.replace(
        FakeEngine().limits,
        n_seq_max=32,
        n_ctx=32 * 1024,
        n_batch=512,
        n_ubatch=512,
        n_outputs_max=160,
    )
    return FakeEngine(limits, step_s=step_s)


async def _serve(asked: argparse.Namespace) -> None:
    settings = json.loads(asked.serve)
    if asked.engine != _FAKE:
        settings["model"] = str(find_target(asked.engine).path)
    # Without a prefix cache: tenants and end users have their own, so that less is reused of each.
    # As long contexts for both: what fits depends on which of them is started first.
    settings |= {"max_model_len": 1024, "prefix_cache": False}
    config = Config(port=0, parallel=32, draft_policy="fixed", **settings)
    server = Server(config, lambda: _load(config, asked.engine, asked.step_ms / 1e3))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    await server.serve(lambda server: print(server.target, flush=True))


async def _ask(target: str, keys: list[str], n_streams: int, n_tokens: int) -> None:
    texts = [prompt["text"][:400] for prompt in json.loads(_PROMPTS.read_text("utf-8"))["prompts"]]
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


@dataclasses.dataclass(frozen=True)
class _Spent:
    """What a server has spent."""

    cpu_s: float
    """Processor seconds of its process and its children."""
    n_wakes: int
    """Times that a thread of its process has waited."""

    def since(self, before: _Spent, n_requests: int) -> _Spent:
        """Returns what was spent since then for each request."""
        return _Spent(
            (self.cpu_s - before.cpu_s) / n_requests,
            round((self.n_wakes - before.n_wakes) / n_requests),
        )


@dataclasses.dataclass
class _Contender:
    """A server that runs, and what it has spent."""

    name: str
    """bare or full."""
    process: subprocess.Popen[str]
    """The server's process."""
    target: str
    """host:port."""
    keys: list[str]
    """Keys with which the server is asked; an empty one: without a key."""

    def spent(self) -> _Spent:
        """Returns what it has spent so far."""
        cpu_s, n_wakes, children = _cpu_s(self.process.pid), 0, []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += (task / "children").read_text("utf-8").split()
                status = (task / "status").read_text("utf-8")
                n_wakes += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        cpu_s += sum(_cpu_s(int(child)) for child in children)
        stat = Path(f"/proc/{self.process.pid}/stat").read_text("utf-8")
        ended = stat.rpartition(")")[2].split()[13:15]  # children that have ended
        return _Spent(cpu_s + sum(map(int, ended)) / os.sysconf("SC_CLK_TCK"), n_wakes)


_Turns = dict[str, dict[int, list[_Spent]]]
"""What a request took in its turns: by the server's name, then by the tokens of a request."""


def _cpu_s(pid: int) -> float:
    """Returns the processor seconds of a process, by its clock (see clock_getcpuclockid)."""
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | 2) / 1e9
    return 0.0


@contextlib.contextmanager
def _running(
    name: str, settings: dict[str, Any], keys: list[str], asked: argparse.Namespace
) -> Iterator[_Contender]:
    command = [sys.executable, "-m", "drafthouse_bench", "tenancy-cost", "--engine", asked.engine]
    command += ["--step-ms", str(asked.step_ms), "--serve", json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines: IO[str] | None = process.stdout
        assert lines is not None
        target = lines.readline().strip()
        if not target:
            raise RuntimeError("a server did not start, see above")
        yield _Contender(name, process, target, keys)
    finally:
        process.terminate()
        process.wait(60)


async def _turn(contender: _Contender, n_tokens: int, asked: argparse.Namespace) -> _Spent:
    before = contender.spent()
    for _ in range(asked.waves):
        await _ask(contender.target, contender.keys, asked.streams, n_tokens)
    await asyncio.sleep(_SETTLE_S)
    return contender.spent().since(before, asked.streams * asked.waves)


async def _measure(asked: argparse.Namespace) -> None:
    lengths = [int(part) for part in asked.tokens.split(",")]
    turns: _Turns = {name: {n_tokens: [] for n_tokens in lengths} for name in ("bare", "full")}
    for start in range(asked.starts):
        await _measure_start(asked, lengths, turns, is_bare_first=start % 2 == 0)
        if asked.starts > 1:
            since = start * asked.rounds
            for n_tokens in lengths:
                found = _ratios(*(turns[name][n_tokens][since:] for name in ("bare", "full")))
                print(f"start {start + 1}, {n_tokens} tokens: full / bare {_told(found, '.4f')}")
    for n_tokens in lengths:
        _print_length(n_tokens, turns["bare"][n_tokens], turns["full"][n_tokens])
    for short, long in itertools.pairwise(lengths):
        extra = [
            [(b.cpu_s - a.cpu_s) / (long - short) * 1e6 for a, b in zip(*both, strict=True)]
            for both in ((found[short], found[long]) for found in turns.values())
        ]
        found = [b - a for a, b in zip(*extra, strict=True)]
        print(
            f"each token from {short} to {long}: bare {statistics.median(extra[0]):.2f} µs,"
            f" full - bare {_told(found, '+.2f')} µs"
        )


async def _measure_start(
    asked: argparse.Namespace, lengths: list[int], turns: _Turns, *, is_bare_first: bool
) -> None:
    """Starts both servers, gives them their rounds in turns, and ends them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings, keys = _prepare(Path(folder))
        open_settings = {"insecure_no_auth": True}
        # As many connections: what they cost is not the tenants' doing.
        cases = {"bare": (open_settings, [""] * len(keys)), "full": (settings, keys)}
        names = list(cases) if is_bare_first else list(reversed(cases))
        servers = {name: stack.enter_context(_running(name, *cases[name], asked)) for name in names}
        bare, full = servers["bare"], servers["full"]
        for number in range(asked.rounds + 1):
            for n_tokens in lengths:
                for contender in (bare, full) if number % 2 else (full, bare):
                    spent = await _turn(contender, n_tokens, asked)
                    if number:  # the first round warms up
                        turns[contender.name][n_tokens].append(spent)


def _ratios(bare: list[_Spent], full: list[_Spent]) -> list[float]:
    return [b.cpu_s / a.cpu_s for a, b in zip(bare, full, strict=True)]


def _print_length(n_tokens: int, bare: list[_Spent], full: list[_Spent]) -> None:
    print(f"a request of {n_tokens} tokens:")
    for name, turns in (("bare", bare), ("full", full)):
        found_s = statistics.median(each.cpu_s for each in turns)
        n_wakes = statistics.median(each.n_wakes for each in turns)
        print(f"  {name}  {found_s * 1e3:.3f} ms of processor time, {n_wakes:.0f} wake-ups")
    pairs = list(zip(bare, full, strict=True))
    least_s = [min(each.cpu_s for each in turns) for turns in (bare, full)]
    print(f"  full - bare: {_told([(b.cpu_s - a.cpu_s) * 1e3 for a, b in pairs], '+.3f')} ms")
    print(f"  of the least turns: {(least_s[1] - least_s[0]) * 1e3:+.3f} ms")
    print(f"  full / bare: {_told(_ratios(bare, full), '.4f')}", flush=True)


def _told(values: list[float], form: str) -> str:
    """Returns the median of values, and the interval of 95 % of it by the bootstrap."""
    chance = random.Random(1)
    medians = sorted(
        statistics.median(chance.choices(values, k=len(values))) for _ in range(_N_DRAWS)
    )
    low, high = medians[_N_DRAWS // 40], medians[-1 - _N_DRAWS // 40]
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Measures, or is a server of a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--tokens", default="16,128", help="of a request: one length or several")
    parser.add_argument("--waves", type=int, default=2, help="of streams in a turn")
    parser.add_argument(
        "--starts", type=int, default=1, help="of both servers, with so many rounds each"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the fake engine")
    parser.add_argument("--engine", default=_FAKE, help="fake, a demo model, or one of build/bench")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve(asked))
    else:
        asyncio.run(_measure(asked))


if __name__ == "__main__":
    main()
