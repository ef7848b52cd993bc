"""`drafthouse-bench matrix`: what arrives at gRPC clients, beside the bare step loop in C.

Each case, a draft type and a number of streams, has a server process of its own. Server and bare
loop take turns, with the same prompts, limits and threads, so that a machine that becomes slower
becomes so for both. The load comes from this process, through the asyncio client of the SDK.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import drafthouse
from drafthouse_bench.counts import count, counts
from drafthouse_bench.demos import CHECKOUT, DEMOS, MODELS, N_DRAFT, PROMPTS, draft_models
from drafthouse_bench.load import Load, cut_prompts, run_load
from drafthouse_bench.process import ServerProcess, cpu_s, run_bare
from drafthouse_bench.report import (
    Case,
    Machine,
    Round,
    Row,
    describe_machine,
    n_cores,
    require_writable,
    summarize,
    table_lines,
    write_json,
)
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.cli.tune import read_texts
from drafthouse_server.config import DRAFT_TYPES, Config
from drafthouse_server.engine.loading import engine_version

__all__ = ["Contenders", "Plan", "add_matrix"]

_STEP_BENCH = CHECKOUT / "build" / "bin" / "step_bench"
_N_PROMPT_MAX = 256
_N_REQUESTS_MIN = 8
"""One stream needs more requests than 2, or there is too little to measure."""

_N_WARM_UP_OUTPUT = 8
_QUIET = 0.5
"""Load average up to which a machine is quiet."""


@dataclass(frozen=True, slots=True)
class Contenders:
    """The models of a benchmark."""

    target: Path
    """The target."""
    drafts: dict[str, Path]
    """Draft models by draft type."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    contenders: tuple[Contenders, ...]
    """One table each."""
    draft_types: tuple[str, ...]
    """How drafts are made."""
    n_streams: tuple[int, ...]
    """Requests at once."""
    n_rounds: int
    """Turns of each contender."""
    n_requests_per_stream: int
    """Requests of a turn, times streams."""
    n_output: int
    """Tokens of each request."""
    n_threads: int
    """Threads of a decode."""
    prompts: Path
    """A prompt file, as `models/prompts.json`."""
    step_bench: Path | None
    """The bare step loop; None measures without it."""

    def config(self, contenders: Contenders, draft_type: str, n_streams: int) -> Config:
        """Returns the settings of a case, for both contenders.

        Raises:
            ConfigError: a draft model is missing.
        """
        return Config(
            model=str(contenders.target),
            draft_type=draft_type,
            model_draft=str(contenders.drafts.get(draft_type, "")),
            parallel=n_streams,
            max_model_len=_N_PROMPT_MAX + self.n_output + N_DRAFT + 1,
            threads=self.n_threads,
            draft_max=N_DRAFT,
            draft_policy="fixed",  # as the bare loop, which knows nothing else
            draft_default=N_DRAFT,
            prefix_cache=False,  # every prompt is computed, as by the bare loop
            log_level="warning",
        )

    def load(self, texts: Sequence[Sequence[int]], n_streams: int) -> Load:
        """Returns the load of a turn, of prompts cut from texts in token ids."""
        n_requests = max(_N_REQUESTS_MIN, self.n_requests_per_stream * n_streams)
        prompts = cut_prompts(texts, n_requests, n_most=_N_PROMPT_MAX)
        return Load(prompts, self.n_output, n_streams)


def add_matrix(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `matrix`."""
    parser = commands.add_parser(
        "matrix",
        help="measure tokens per second, latencies and acceptance",
        description="Measures what arrives at gRPC clients beside the bare step loop in C, which"
        " `make build` builds. Starts servers of its own on free ports of loopback.",
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_how(parser)
    parser.set_defaults(run=_bench)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        action="append",
        metavar="dense|hybrid|FILE",
        help="target: a demo model or a GGUF file; repeatable; default: dense",
    )
    add("--all", action="store_true", help="both demo models")
    add("--eagle3", type=Path, metavar="FILE", help="EAGLE-3 model of a target of your own")
    add("--simple", type=Path, metavar="FILE", help="small draft model of a target of your own")
    add(
        "--draft-types",
        type=_draft_types,
        default=("none", "mtp", "eagle3", "simple"),
        metavar="A,B,…",
        help="default: none,mtp,eagle3,simple; also ngram-simple and the other n-gram kinds",
    )
    add("--streams", type=counts, metavar="N,M,…", help="default: 1,4,8,16,32")


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=count, metavar="N", help="turns of each contender; default: 3")
    add(
        "--n-output",
        type=count,
        default=96,
        metavar="N",
        help="tokens per request; default: %(default)s",
    )
    add("--threads", type=count, metavar="N", help="threads of a decode; default: all cores but 1")
    add("--quick", action="store_true", help="1, 8 and 32 streams, one round: half a minute")
    add("--prompts", type=Path, default=PROMPTS, metavar="FILE", help="prompts")
    add("--step-bench", type=Path, metavar="FILE", help="the bare step loop's program")
    add("--json", type=Path, metavar="FILE", help="also write everything as JSON")


def _draft_types(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(DRAFT_TYPES):
        raise argparse.ArgumentTypeError(f"{text!r}; known are {', '.join(DRAFT_TYPES)}")
    return names


def _plan(arguments: argparse.Namespace) -> Plan:
    quick = arguments.quick
    models = ["dense", "hybrid"] if arguments.all else arguments.model or ["dense"]
    step_bench = arguments.step_bench or (_STEP_BENCH if _STEP_BENCH.exists() else None)
    return Plan(
        contenders=tuple(_contenders(name, arguments) for name in models),
        draft_types=arguments.draft_types,
        n_streams=arguments.streams or ((1, 8, 32) if quick else (1, 4, 8, 16, 32)),
        n_rounds=arguments.rounds or (1 if quick else 3),
        n_requests_per_stream=1 if quick else 2,
        n_output=arguments.n_output,
        n_threads=arguments.threads or max(1, n_cores() - 1),
        prompts=arguments.prompts,
        step_bench=step_bench,
    )


def _contenders(name: str, arguments: argparse.Namespace) -> Contenders:
    if name not in DEMOS:
        given = {"eagle3": arguments.eagle3, "simple": arguments.simple}
        return Contenders(Path(name), {kind: path for kind, path in given.items() if path})
    return Contenders(MODELS / DEMOS[name][0], draft_models(name))


def _bench(arguments: argparse.Namespace, terminal: Terminal) -> int:
    plan = _plan(arguments)
    if arguments.json:
        require_writable(arguments.json)
    command = shlex.join(["drafthouse-bench", *sys.argv[1:]])
    machine = describe_machine(plan.n_threads, engine_version(), command)
    _describe(machine, plan, terminal)
    rows = asyncio.run(_Bench(plan, terminal).run())
    if arguments.json:
        write_json(arguments.json, machine, rows)
    return 0


def _describe(machine: Machine, plan: Plan, terminal: Terminal) -> None:
    terminal.line(f"$ {machine.command}")
    terminal.line(
        f"{machine.cpu}, {machine.n_cores} cores; load average {machine.load_average:.2f}"
    )
    terminal.line(f"{machine.engine.strip(' |')}")
    terminal.line(
        f"threads per decode: {plan.n_threads}; K = {N_DRAFT}; greedy;"
        f" prompts of 64 to {_N_PROMPT_MAX} tokens, {plan.n_output} tokens per request,"
        f" {plan.n_requests_per_stream} x streams requests (at least {_N_REQUESTS_MIN});"
        f" medians over rounds: {plan.n_rounds}"
    )
    terminal.line("client: this process, drafthouse.AsyncClient, one connection")
    if machine.load_average > _QUIET:
        terminal.note("the machine is busy: numbers will be too low; see the load average")
    if plan.step_bench is None:
        terminal.note("the bare step loop is not built, so no share of it; `make build` builds it")


class _Bench:
    """One run.

    Args:
        plan: What to measure.
        terminal: Takes the tables.
    """

    def __init__(self, plan: Plan, terminal: Terminal) -> None:
        self._plan = plan
        self._terminal = terminal
        self._texts = read_texts(plan.prompts)

    async def run(self) -> list[Row]:
        """Measures all cases; a table follows each model."""
        rows: list[Row] = []
        for contenders in self._plan.contenders:
            table = [await self._measure(contenders, *case) for case in self._cases()]
            self._terminal.line(f"\n{contenders.target.stem}")
            for line in table_lines(table):
                self._terminal.line(line)
            rows += table
        return rows

    def _cases(self) -> Iterator[tuple[str, int]]:
        for draft_type in self._plan.draft_types:
            for n_streams in self._plan.n_streams:
                yield draft_type, n_streams

    async def _measure(self, contenders: Contenders, draft_type: str, n_streams: int) -> Row:
        config = self._plan.config(contenders, draft_type, n_streams)
        case = Case(contenders.target.stem, draft_type, n_streams)
        async with (
            ServerProcess(config).run() as server,
            drafthouse.AsyncClient(server.target, retry=None) as client,
        ):
            # Of the target's own vocabulary.
            tokens = [await client.tokenize(text, add_special=True) for text in self._texts]
            load = self._plan.load(tokens, n_streams)
            await run_load(client, Load(load.prompts[:n_streams], _N_WARM_UP_OUTPUT, n_streams))
            rounds = [
                await self._round(server, client, config, load) for _ in range(self._plan.n_rounds)
            ]
        row = summarize(case, rounds)
        self._terminal.note(
            f"{case.model} {case.draft_type} × {n_streams}: {row.tokens_per_s.median:.0f} tokens/s"
        )
        return row

    async def _round(
        self, server: ServerProcess, client: drafthouse.AsyncClient, config: Config, load: Load
    ) -> Round:
        before = cpu_s(server.pid)
        served = await run_load(client, load)
        after = cpu_s(server.pid)
        bare = None
        if self._plan.step_bench is not None:
            bare = await run_bare(self._plan.step_bench, config, load)
        used = None if before is None or after is None else after - before
        return Round(served, used, bare)
