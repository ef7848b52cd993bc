"""`drafthouse-bench peers`: our server and llama-server of the same source, in turns.

Both servers of a case run at once and idle in turns: A B, B A, A B, …, so that a machine that
becomes slower becomes so for both, and ratios are taken round by round. The load comes from this
process, over loopback: gRPC through the SDK to ours, HTTP with server-sent events to llama-server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drafthouse_bench.counts import amount, amounts, count, counts, number
from drafthouse_bench.demos import CHECKOUT, PROMPTS
from drafthouse_bench.load import cut_prompts
from drafthouse_bench.peers import plot as bench_plot
from drafthouse_bench.peers.behind import BehindResult, BehindRow, behind_lines, run_behind
from drafthouse_bench.peers.case import (
    NGRAM,
    OWN_DEFAULTS,
    SCENARIOS,
    PeerCase,
    PeerPlan,
    Target,
    describe_estimate,
    find_target,
    parse_only,
)
from drafthouse_bench.peers.chats import (
    ChatsResult,
    ChatsRow,
    chats_lines,
    draw_chats,
    longest,
    run_chats,
)
from drafthouse_bench.peers.contender import (
    GREEDY,
    Running,
    default_peer_flags,
    require_peer,
    run_ours,
    run_peer,
    run_peer_with,
)
from drafthouse_bench.peers.defaults import measure_defaults
from drafthouse_bench.peers.scenario import (
    Prompts,
    StallResult,
    agreement,
    run_closed,
    run_open,
    run_stall,
)
from drafthouse_bench.peers.versus import (
    DefaultsRow,
    MixedRow,
    PeerRow,
    StallRow,
    defaults_lines,
    mixed_lines,
    peer_lines,
    stall_lines,
    write_peers_json,
)
from drafthouse_bench.process import busy_processes
from drafthouse_bench.report import Machine, describe_machine, n_cores, require_writable
from drafthouse_bench.trace import Figures, figures, poisson_arrivals
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.cli.tune import read_texts
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.loading import engine_version
from drafthouse_server.errors import ConfigError

__all__ = ["add_peers"]

_PEER = CHECKOUT / "build" / "peers" / "cmake" / "bin" / "llama-server"
_PROSE = CHECKOUT / "ARCHITECTURE.md"
_N_WARM_UP_OUTPUT = 16
_N_COMPARED = 8
"""Prompts whose greedy tokens are compared."""

_N_DRAFT_MIXED = 4
"""Largest K of the mixed load."""

_N_WAVES_FIRST = 2
_N_WAVES_MIXED = 3
"""Requests per stream of a mixed load: before it is measured, and at least while it is.

In one wave prompts come first, all of them, and then none: no load is like that.
"""

_SEED = 1
_QUIET = 0.5
_T = TypeVar("_T")
_Row = TypeVar("_Row", StallRow, BehindRow, ChatsRow, MixedRow)


def add_peers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `peers`."""
    parser = commands.add_parser(
        "peers",
        help="measure beside llama-server, which `make peers` builds",
        description="Measures our server and llama-server of the same source, with the same model"
        " and settings, in turns. Starts both on free ports of loopback.",
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_how(parser)
    parser.set_defaults(run=_bench_peers)


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=_names, metavar="A,B", help="default: dense,hybrid; else of build/bench,"
        " or paths that end in .gguf")  # fmt: skip
    add("--drafts", type=_names, metavar="A,B", help="default: none,mtp,eagle3,simple,ngram")
    add("--streams", type=counts, metavar="N,M", help="default: 1,4,8,16,32; 1,8 with own"
        " defaults, 8 beside a long prompt, 16 conversations")  # fmt: skip
    add("--loads", type=amounts, metavar="A,B", help="open loop: shares of what the slower"
        " contender manages; default: 0.4,0.7,0.9")  # fmt: skip
    add("--acceptances", type=_rates, metavar="A,B", help="synthetic, for random weights;"
        " default: 0.3,0.6,0.9")  # fmt: skip
    add("--scenarios", type=_scenarios, metavar="A,B", help=f"default: {','.join(SCENARIOS)}")
    add("--only", type=parse_only, default={}, metavar="KEY=A+B,…", help="cases to measure, as"
        " draft=mtp,model=dense,streams=8; keys: scenario, model, draft, streams, load,"
        " acceptance, n_prompt")  # fmt: skip
    add("--stall-model", default="dense-50m-Q8_0", metavar="NAME", help="default: %(default)s")
    add("--n-prompts", type=counts, metavar="N,M", help="tokens of the prompts of own defaults,"
        " and of long ones; default: lengths that vary, and 2000")  # fmt: skip
    add("--n-waves", type=count, metavar="N", help="requests of each stream in a turn of own"
        " defaults, at least; default: 3")  # fmt: skip
    add("--n-shared", type=number, default=0, metavar="N", help="tokens that all conversations"
        " begin with, besides; default: 0")  # fmt: skip
    add("--n-long", type=count, metavar="N", help="tokens of the long prompt; default: 4096")
    add("--sampled", action="store_true", help="with own defaults: answers are sampled, as both do"
        " where a request says nothing (temperature 0.8, top-k 40, top-p 0.95, min-p 0.05); else"
        " greedy")  # fmt: skip
    add("--grammar", type=Path, metavar="FILE", help="with own defaults: answers follow this GBNF"
        " grammar, which must have no end")  # fmt: skip


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="a few cases of every scenario, one short round")
    add("--rounds", type=count, metavar="N", help="turns of each; default: 3")
    add("--round-s", type=amount, metavar="S", help="seconds of a turn, about; default: 2")
    add("--n-output", type=number, default=0, metavar="N", help="tokens per request; 0: by model")
    add("--threads", type=count, metavar="N", help="of a decode; default: all cores but 1")
    add("--busy", type=number, default=0, metavar="N", help="other processes that compute"
        " meanwhile, a core each; default: 0")  # fmt: skip
    add("--server-flags", type=shlex.split, default=[], metavar="FLAGS", help="more, of ours")
    add("--peer-flags", type=shlex.split, default=[], metavar="FLAGS", help="of llama-server")
    add("--adaptive-flags", type=shlex.split, default="--draft-policy adaptive", metavar="FLAGS",
        help="flags with which our server chooses K itself; default: %(default)s")  # fmt: skip
    add("--fixed-flags", type=shlex.split, default="--draft-policy fixed", metavar="FLAGS",
        help="those with which it does not; default: %(default)s")  # fmt: skip
    add("--peer", type=Path, default=_PEER, metavar="FILE", help="llama-server")
    add("--json", type=Path, metavar="FILE", help="also write every round as JSON")
    add("--plot", type=Path, metavar="FILE", help="also draw, SVG or PNG; needs matplotlib")
    add("--list", action="store_true", help="show the cases and about how long they take")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _scenarios(text: str) -> tuple[str, ...]:
    names = _names(text)
    if unknown := set(names) - set(SCENARIOS):
        raise argparse.ArgumentTypeError(f"no such scenario: {', '.join(sorted(unknown))}")
    return names


def _rates(text: str) -> tuple[float, ...]:
    values = amounts(text)
    if max(values) > 1:
        raise ValueError(text)
    return values


def _plan(arguments: argparse.Namespace) -> PeerPlan:
    quick = arguments.quick
    plan = PeerPlan(
        models=arguments.models or (("dense",) if quick else ("dense", "hybrid")),
        drafts=arguments.drafts
        or (("none", "mtp") if quick else ("none", "mtp", "eagle3", "simple", "ngram")),
        streams=arguments.streams or ((1, 8) if quick else (1, 4, 8, 16, 32)),
        loads=arguments.loads or ((0.7,) if quick else (0.4, 0.7, 0.9)),
        acceptances=arguments.acceptances or (0.3, 0.6, 0.9),
        scenarios=arguments.scenarios or SCENARIOS,
        stall_model=arguments.stall_model,
        n_long=arguments.n_long or (1024 if quick else 4096),
        only=arguments.only,
        n_rounds=arguments.rounds or (1 if quick else 3),
        round_s=arguments.round_s or (1.0 if quick else 2.0),
        n_threads=arguments.threads or max(1, n_cores() - 1),
        n_output=arguments.n_output,
        **_of_defaults(arguments),
    )
    if not plan.cases():
        raise ValueError("no case is selected; --list shows those that there are")
    return plan


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what requests of the scenarios with own defaults say, by names that both know.

    Raises:
        OSError: the grammar cannot be read.
        ValueError: another scenario is selected: those compare greedy answers.
    """
    fields = {} if arguments.sampled else dict(GREEDY)
    if arguments.grammar:
        fields["grammar"] = arguments.grammar.read_text("utf-8")
    others = set(arguments.scenarios or SCENARIOS) - set(OWN_DEFAULTS)
    if fields != GREEDY and others:
        raise ValueError(
            f"--sampled and --grammar are for {', '.join(OWN_DEFAULTS)} alone; choose with"
            f" --scenarios"
        )
    return fields


def _of_defaults(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what differs from the scenario's own models, streams and prompts."""
    given = {
        "defaults_models": arguments.models,
        "defaults_streams": arguments.streams,
        "stall_streams": arguments.streams,
        "chats_streams": arguments.streams,
        "n_prompts": arguments.n_prompts,
        "n_waves": arguments.n_waves,
    }
    return {name: value for name, value in given.items() if value}


def _bench_peers(arguments: argparse.Namespace, terminal: Terminal) -> int:
    plan, fields = _plan(arguments), _fields(arguments)
    terminal.line(describe_estimate(plan, plan.cases()))
    if arguments.list:
        for case in plan.cases():
            terminal.line(f"  {case.name}: {plan.estimate_s(case):.0f} s")
        return 0
    require_peer(arguments.peer)
    if arguments.plot:
        bench_plot.require_matplotlib()
    for path in filter(None, (arguments.json, arguments.plot)):
        require_writable(path)
    command = shlex.join(["drafthouse-bench", *sys.argv[1:]])
    machine = describe_machine(plan.n_threads, engine_version(), command)
    _describe(machine, plan, fields, terminal)
    with busy_processes(arguments.busy):
        asyncio.run(_BenchPeers(plan, arguments, machine, terminal).run())
    return 0


def _describe(
    machine: Machine, plan: PeerPlan, fields: Mapping[str, Any], terminal: Terminal
) -> None:
    asked = "greedy" if "temperature" in fields else "sampled as both do by default"
    if "grammar" in fields:
        asked += ", within a grammar"
    terminal.line(f"$ {machine.command}")
    terminal.line(
        f"{machine.cpu}, {machine.n_cores} cores; load average {machine.load_average:.2f}"
    )
    terminal.line(machine.engine.strip(" |"))
    terminal.line(
        f"threads per decode: {plan.n_threads}; {asked}; K = 3 (n-gram: {NGRAM}, 8); prompt caches"
        f" off, but of own defaults; gaps are between tokens, those of one message have a gap of 0"
    )
    terminal.line("client of both: this process; ours by drafthouse.AsyncClient, theirs by raw SSE")
    if machine.load_average > _QUIET:
        terminal.note("the machine is busy: numbers will be too low; see the load average")


class _BenchPeers:
    """One run.

    Args:
        plan: What to measure.
        arguments: Of the command line: flags, files.
        machine: Where.
        terminal: Takes the tables.
    """

    def __init__(
        self,
        plan: PeerPlan,
        arguments: argparse.Namespace,
        machine: Machine,
        terminal: Terminal,
    ) -> None:
        self._plan = plan
        self._arguments = arguments
        self._machine = machine
        self._terminal = terminal
        self._fields = _fields(arguments)
        self._texts: dict[tuple[Path, Path], list[list[int]]] = {}
        self._rows: list[PeerRow | StallRow | MixedRow | DefaultsRow | BehindRow | ChatsRow] = []

    async def run(self) -> None:
        """Measures all cases; tables, files and plot at the end, the files after each case too."""
        cases = self._plan.cases()
        started_s = time.monotonic()
        for i, case in enumerate(cases, 1):
            try:
                target = find_target(case.model)
                self._plan.config(case, target)
            except (ConfigError, ValueError) as error:
                if self._plan.only or len(cases) == 1:
                    raise
                self._terminal.note(f"{case.name}: left out: {error}")
                continue
            self._rows += await self._measure(case, target)
            elapsed_s = time.monotonic() - started_s
            self._terminal.note(f"[{i}/{len(cases)}, {elapsed_s:.0f} s] {self._said(case)}")
            if self._arguments.json:
                write_peers_json(self._arguments.json, self._machine, self._rows)
        self._show()

    def _said(self, case: PeerCase) -> str:
        row = self._rows[-1]
        if isinstance(row, PeerRow | DefaultsRow):
            ours, theirs = row.ours[-1].tokens_per_s, row.theirs[-1].tokens_per_s
            return f"{case.name}: {ours:.0f} and {theirs:.0f} tokens/s"
        return case.name

    def _show(self) -> None:
        line = self._terminal.line
        closed_and_open = [row for row in self._rows if isinstance(row, PeerRow)]
        for key in dict.fromkeys((row.case.model, row.case.scenario) for row in closed_and_open):
            rows = [row for row in closed_and_open if (row.case.model, row.case.scenario) == key]
            line(f"\n{key[0]}, {key[1]} loop: drafthouse beside llama-server")
            for text in peer_lines(rows):
                line(text)
        stall = f"another tenant's prompt of {self._plan.n_long} tokens"
        self._show_table(StallRow, stall, stall_lines)
        self._show_table(BehindRow, "short prompts behind another tenant's long ones", behind_lines)
        self._show_table(ChatsRow, "conversations of four turns", chats_lines)
        self._show_table(MixedRow, "code, prose and random tokens mixed", mixed_lines)
        defaults = [row for row in self._rows if isinstance(row, DefaultsRow)]
        for model in dict.fromkeys(row.case.model for row in defaults):
            line("")
            of_model = [row for row in defaults if row.case.model == model]
            for text in defaults_lines(self._machine, of_model):
                line(text)
        if self._arguments.plot and bench_plot.draw(self._arguments.plot, closed_and_open):
            self._terminal.note(f"plots: {self._arguments.plot}")

    def _show_table(
        self, kind: type[_Row], title: str, lines: Callable[[Sequence[_Row]], list[str]]
    ) -> None:
        rows = [row for row in self._rows if isinstance(row, kind)]
        if rows:
            self._terminal.line(f"\n{rows[0].case.model}: {title}")
            for text in lines(rows):
                self._terminal.line(text)

    async def _measure(
        self, case: PeerCase, target: Target
    ) -> Sequence[PeerRow | StallRow | MixedRow | DefaultsRow | BehindRow | ChatsRow]:
        if case.scenario == "mixed":
            return await self._mixed(case, target)
        if case.scenario == "defaults":
            texts = self._tokens(target)
            row = await measure_defaults(
                self._plan,
                case,
                target,
                self._arguments.peer,
                texts=texts,
                n_ctx_train=self._n_ctx_train(target),
                flags=(self._arguments.server_flags, self._arguments.peer_flags),
                fields=self._fields,
            )
            return [row]
        if case.scenario == "behind":
            return [await self._behind(case, target)]
        if case.scenario == "chats":
            return [await self._chats(case, target)]
        config = self._plan.config(case, target)
        peer_flags = self._arguments.peer_flags
        async with (
            run_ours(config, self._arguments.server_flags) as ours,
            run_peer(self._arguments.peer, config, peer_flags) as theirs,
        ):
            both = (ours, theirs)
            if case.scenario == "stall":
                return [await self._stall(case, target, both)]
            return [await self._turns(case, target, both)]

    async def _turns(
        self, case: PeerCase, target: Target, both: tuple[Running, Running]
    ) -> PeerRow:
        n_output = self._plan.n_output_of(target)
        speed = await self._warm_up(case, target, both)
        compared = None
        if not target.is_random:
            prompts = self._prompts(target, _N_COMPARED)
            clients = both[0].client, both[1].client
            compared = await agreement(*clients, prompts, n_output, self._terminal.note)
        if case.scenario == "closed":
            n_requests = self._plan.n_requests(case.streams, n_output, speed)
            prompts = self._prompts(target, n_requests)

            async def turn(running: Running, _: int) -> Figures:
                return figures(await run_closed(running, prompts, n_output, case.streams))

            ours, theirs = await self._rounds(both, turn)
            return PeerRow(case, ours, theirs, compared, n_output)
        assert case.load is not None, "an open loop has a load"
        rate = case.load * speed / n_output
        duration_s = max(4 * self._plan.round_s, 8 / rate)

        async def open_turn(running: Running, i_round: int) -> Figures:
            arrivals = poisson_arrivals(rate, duration_s, _SEED + i_round)
            prompts = self._prompts(target, len(arrivals))
            return figures(await run_open(running, prompts, n_output, arrivals))

        ours, theirs = await self._rounds(both, open_turn)
        return PeerRow(case, ours, theirs, compared, n_output, requests_per_s=rate)

    async def _rounds(
        self,
        both: tuple[Running, Running],
        turn: Callable[[Running, int], Awaitable[_T]],
    ) -> tuple[list[_T], list[_T]]:
        """Lets both take turns, each first in every other round."""
        ours, theirs = both
        results: dict[str, list[_T]] = {ours.name: [], theirs.name: []}
        for i in range(self._plan.n_rounds):
            for running in (ours, theirs) if i % 2 == 0 else (theirs, ours):
                results[running.name].append(await turn(running, i))
        return results[ours.name], results[theirs.name]

    async def _warm_up(self, case: PeerCase, target: Target, both: Sequence[Running]) -> float:
        """Returns the tokens per second of the slower one."""
        n_output = min(self._plan.n_output_of(target), _N_WARM_UP_OUTPUT)
        prompts = self._prompts(target, case.streams)
        speeds = []
        for running in both:
            await run_closed(running, prompts, 2, case.streams)
            load = await run_closed(running, prompts, n_output, case.streams)
            speeds.append(figures(load).tokens_per_s)
        return min(speeds)

    async def _stall(
        self, case: PeerCase, target: Target, both: tuple[Running, Running]
    ) -> StallRow:
        prompts = self._prompts(target, case.streams)
        # Another text each time, so that no prefix is known.
        texts = self._tokens(target)
        n_long, lead_s = self._plan.n_long, 2 * self._plan.round_s

        async def turn(running: Running, i_round: int) -> StallResult:
            flat = [token for text in texts[i_round:] + texts[:i_round] for token in text]
            long_prompt = (flat * (1 + n_long // len(flat)))[:n_long]
            return await run_stall(running, prompts, long_prompt, n_long, lead_s)

        return StallRow(case, *await self._rounds(both, turn))

    async def _behind(self, case: PeerCase, target: Target) -> BehindRow:
        assert case.n_prompt is not None, "the long prompts have a length"
        n_long = case.n_prompt
        n_known = max(map(max, self._tokens(target))) + 1

        async def turn(running: Running, i_round: int) -> BehindResult:
            return await run_behind(running, n_known, n_long, _SEED + 10_000 * i_round)

        return BehindRow(case, *await self._with_defaults(case, target, n_long + 1, turn))

    async def _chats(self, case: PeerCase, target: Target) -> ChatsRow:
        assert case.n_prompt is not None, "first messages have a length"
        n_first, n_shared = case.n_prompt, self._arguments.n_shared
        n_known = max(map(max, self._tokens(target))) + 1

        async def turn(running: Running, i_round: int) -> ChatsResult:
            seed = _SEED + i_round
            chats = draw_chats(n_known, n_first, case.streams, seed, n_shared)
            return await run_chats(running, chats)

        n_longest = n_shared + longest(n_first)
        return ChatsRow(case, *await self._with_defaults(case, target, n_longest, turn))

    async def _with_defaults(
        self,
        case: PeerCase,
        target: Target,
        n_longest: int,
        turn: Callable[[Running, int], Awaitable[_T]],
    ) -> tuple[list[_T], list[_T]]:
        """Lets both take turns with own defaults; requests have `n_longest` tokens at most."""
        config = self._plan.config(case, target)
        flags = default_peer_flags(n_longest, self._n_ctx_train(target))
        flags += self._arguments.peer_flags
        async with (
            run_ours(config, self._arguments.server_flags, self._fields) as ours,
            run_peer_with(self._arguments.peer, config.model, flags, self._fields) as theirs,
        ):
            both = (ours, theirs.running)
            for running in both:  # what a step takes is learnt once in a server's life
                await run_closed(running, self._prompts(target, 2), _N_WARM_UP_OUTPUT, 1)
            return await self._rounds(both, turn)

    async def _mixed(self, case: PeerCase, target: Target) -> list[MixedRow]:
        """Our server with each K and with its adaptive policy, and llama-server, in turns."""
        base = self._plan.config(case, target)
        base = dataclasses.replace(base, draft_max=_N_DRAFT_MIXED)
        flags, adaptive = self._arguments.server_flags, self._arguments.adaptive_flags
        fixed = [*flags, *self._arguments.fixed_flags]
        runs: dict[str, tuple[Config, list[str]]] = {
            f"K = {k}": (dataclasses.replace(base, draft_default=k), fixed)
            for k in range(_N_DRAFT_MIXED + 1)
        }
        if adaptive:
            runs["adaptive"] = base, [*flags, *adaptive]
        else:
            self._terminal.note("no adaptive policy to compare; --adaptive-flags names it")
        turns: dict[str, list[Figures]] = {name: [] for name in runs}
        peer = f"llama-server, K = {base.draft_default}"
        turns[peer] = []
        n_output = self._plan.n_output_of(target)
        n_requests = 0
        for i in range(self._plan.n_rounds):
            order = list(turns) if i % 2 == 0 else list(reversed(turns))
            for name in order:
                starting = (
                    run_ours(*runs[name])
                    if name in runs
                    else run_peer(self._arguments.peer, base, self._arguments.peer_flags)
                )
                async with starting as running:
                    speed = await self._warm_up(case, target, [running])
                    n_requests = n_requests or self._plan.n_requests(case.streams, n_output, speed)
                    # What K pays is learnt once in a server's life: that is not counted.
                    n_first = _N_WAVES_FIRST * case.streams
                    n_counted = max(n_requests, _N_WAVES_MIXED * case.streams)
                    prompts = self._mixed_prompts(target, n_first + n_counted)
                    await run_closed(running, prompts[:n_first], n_output, case.streams)
                    load = await run_closed(running, prompts[n_first:], n_output, case.streams)
                    turns[name].append(figures(load))
        best = turns.get("adaptive", [])
        return [
            MixedRow(
                case,
                name,
                each,
                [a.tokens_per_s / b.tokens_per_s for a, b in zip(best, each, strict=False)],
            )
            for name, each in turns.items()
        ]

    def _prompts(self, target: Target, n_prompts: int) -> Prompts:
        low, high = self._plan.prompt_bounds(target)
        return cut_prompts(self._tokens(target), n_prompts, low, high)

    def _mixed_prompts(self, target: Target, n_prompts: int) -> Prompts:
        """Returns prompts of code, prose and random tokens in turn."""
        low, high = self._plan.prompt_bounds(target)
        generator = random.Random(_SEED)
        n_known = max(map(max, self._tokens(target))) + 1
        noise = [[generator.randrange(n_known) for _ in range(high)] for _ in range(8)]
        prose = self._tokens(target, _PROSE)[0]
        pieces = [prose[i : i + high] for i in range(0, len(prose) - high, high)]
        kinds = [self._tokens(target), pieces, noise]
        cut = [cut_prompts(texts, n_prompts, low, high) for texts in kinds]
        return [cut[i % 3][i] for i in range(n_prompts)]

    def _tokens(self, target: Target, path: Path = PROMPTS) -> list[list[int]]:
        """Returns texts in token ids of the model's own vocabulary."""
        key = target.path, path
        if key not in self._texts:
            texts = read_texts(path) if path.suffix == ".json" else [path.read_text("utf-8")]
            with _loaded(target) as engine:
                self._texts[key] = [
                    engine.tokenize(text, add_special=True, parse_special=False) for text in texts
                ]
        return self._texts[key]

    def _n_ctx_train(self, target: Target) -> int:
        with _loaded(target) as engine:
            return engine.card.n_ctx_train


@contextlib.contextmanager
def _loaded(target: Target) -> Iterator[LlamaEngine]:
    """Loads a model, to be asked things, for the time of a block."""
    config = Config(model=str(target.path), draft_type="none", parallel=1, max_model_len=64)
    engine = LlamaEngine.load(config)
    try:
        yield engine
    finally:
        engine.close()
