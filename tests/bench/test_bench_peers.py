"""`bench-peers`: its reader of streams, its statistics, its cases; llama-server itself if built."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.programs import write_program

from drafthouse_bench import aiperf
from drafthouse_bench.command import main
from drafthouse_bench.peers import chats as bench_chats
from drafthouse_bench.peers import command as bench_command
from drafthouse_bench.peers import plot as bench_plot
from drafthouse_bench.peers.behind import BehindRow, behind_lines, run_behind
from drafthouse_bench.peers.case import PeerCase, PeerPlan, Target, find_target, parse_only
from drafthouse_bench.peers.chats import (
    ChatsRow,
    chats_lines,
    draw_chats,
    longest,
    run_chats,
)
from drafthouse_bench.peers.contender import (
    Running,
    default_peer_flags,
    peer_flags,
    require_peer,
    run_peer,
)
from drafthouse_bench.peers.defaults import draw_requests, prompt_bounds
from drafthouse_bench.peers.http import HttpClient, StreamParser
from drafthouse_bench.peers.scenario import agreement, run_closed, run_open, run_stall
from drafthouse_bench.peers.versus import (
    DefaultsRow,
    PeerRow,
    defaults_lines,
    peer_lines,
    ratio,
    write_peers_json,
)
from drafthouse_bench.process import BenchError, server_flags
from drafthouse_bench.report import Machine
from drafthouse_bench.trace import Figures, PeerLoad, Trace, figures, gaps_between, poisson_arrivals
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / "build" / "peers" / "cmake" / "bin" / "llama-server"
CASE = PeerCase("closed", "dense", "mtp", 8)
PLAN = PeerPlan(
    models=("dense", "hybrid"),
    drafts=("none", "mtp", "eagle3", "simple", "ngram"),
    streams=(1, 4, 8, 16, 32),
    loads=(0.4, 0.7),
    acceptances=(0.3, 0.9),
    scenarios=("closed", "open", "stall", "mixed"),
    stall_model="dense-50m-Q8_0",
    n_long=4096,
    only={},
    n_rounds=3,
    round_s=2.0,
    n_threads=1,
)
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Keep-Alive: timeout=5, max=100\r\n\r\n"
)


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def event(n_predicted: int, *, stop: bool = False, **more: object) -> bytes:
    values = {"content": "x", "tokens_predicted": n_predicted, "stop": stop} | more
    return b"data: " + json.dumps(values).encode() + b"\n\n"


TIMINGS = {"draft_n": 6, "draft_n_accepted": 3, "cache_n": 5}

# The second event comes in two chunks, the third shares a chunk with the end.
CANNED = (
    HEAD
    + chunk(event(1, tokens=[7]))
    + chunk(event(2, tokens=[8])[:17])
    + chunk(event(2, tokens=[8])[17:] + event(4, tokens=[9, 10]))
    + chunk(event(4, stop=True, tokens=[], timings=TIMINGS))
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("n_bytes", [1, 7, 64, 10_000])
def test_a_stream_reads_the_same_however_it_is_cut(n_bytes: int) -> None:
    parser = StreamParser(is_stream=True)
    events = []
    for i in range(0, len(CANNED), n_bytes):
        assert not parser.is_finished or i >= len(CANNED) - 2
        events += parser.feed(CANNED[i : i + n_bytes])
    assert parser.is_finished
    assert parser.status == 200
    assert [each["tokens_predicted"] for each in events] == [1, 2, 4, 4]
    assert [each["stop"] for each in events] == [False, False, False, True]


@pytest.mark.parametrize("n_bytes", [1, 1000])
def test_a_body_of_known_length_is_one_value(n_bytes: int) -> None:
    body = json.dumps({"tokens": [1, 2, 3]}).encode()
    whole = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    parser = StreamParser(is_stream=False)
    values = [v for i in range(0, len(whole), n_bytes) for v in parser.feed(whole[i : i + n_bytes])]
    assert values == [{"tokens": [1, 2, 3]}]


def test_a_refusal_is_one_sentence_with_the_servers_words() -> None:
    body = b'{"error":{"message":"the prompt is too long"}}'
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with pytest.raises(BenchError, match=r"answers 400: .*the prompt is too long"):
        StreamParser(is_stream=True).feed(head + body)
    with pytest.raises(BenchError, match="no HTTP"):
        StreamParser(is_stream=True).feed(b"hello\r\n\r\n")
    with pytest.raises(BenchError, match="refuses"):
        StreamParser(is_stream=True).feed(HEAD + chunk(b"error: no slot\n\n"))


async def test_the_client_counts_tokens_not_messages_and_survives_a_closed_connection() -> None:
    n_connections = 0
    closed = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_connections
        n_connections += 1
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client has left
        finally:
            writer.close()
            await writer.wait_closed()
            closed.release()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        assert request.items() >= {"cache_prompt": False, "ignore_eos": True, "top_k": 20}.items()
        assert "temperature" not in request
        writer.write(CANNED)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")  # of the next request, which is never answered

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(server.sockets[0].getsockname()[1], {"top_k": 20})
    try:
        for n_expected in (1, 2):
            trace = Trace(0.0)
            await client.stream([1, 2], 4, trace)
            assert n_connections == n_expected
            assert trace.n_output == 4
            assert trace.token_ids == [7, 8, 9, 10]
            assert (trace.n_drafted, trace.n_accepted, trace.n_reused) == (6, 3, 5)
            assert trace.is_finished
    finally:
        client.close()
        for _ in range(n_connections):
            await closed.acquire()
        server.close()
        await server.wait_closed()


def test_an_answer_that_is_shorter_than_asked_for_is_no_result() -> None:
    """It was compared with whole ones: a context too small for the load made either side faster."""
    trace = trace_of((1.0, 3))
    with pytest.raises(BenchError, match="llama-server answers with 3 tokens of 4"):
        trace.finish("llama-server", 4)
    assert not trace.is_finished
    trace.finish("llama-server", 3)
    assert trace.is_finished


async def test_a_stream_that_ends_early_fails() -> None:
    is_left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CANNED)
        await writer.drain()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        is_left.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(server.sockets[0].getsockname()[1], {})
    try:
        with pytest.raises(BenchError, match="4 tokens of 5"):
            await client.stream([1, 2], 5, Trace(0.0))
    finally:
        client.close()
        await is_left.wait()
        server.close()
        await server.wait_closed()


def trace_of(*arrivals: tuple[float, int], called_s: float = 0.0) -> Trace:
    trace = Trace(called_s)
    for now, n in arrivals:
        trace.add(now, n)
    return trace


def test_gaps_are_between_tokens_by_the_same_rule_for_all() -> None:
    """Three tokens in one message, or three messages at one time: the same gaps."""
    together = trace_of((1.0, 1), (2.0, 3), (4.0, 1))
    apart = trace_of((1.0, 1), (2.0, 1), (2.0, 1), (2.0, 1), (4.0, 1))
    assert sorted(gap for _, gap in together.token_gaps()) == [0.0, 0.0, 1.0, 2.0]
    assert together.token_gaps() == apart.token_gaps()
    assert together.n_output == apart.n_output == 5
    assert together.ttft_s == 1.0


def test_a_long_prompt_comes_beside_as_many_streams_as_are_asked_for() -> None:
    cases = dataclasses.replace(PLAN, scenarios=("stall",)).cases()
    assert [case.streams for case in cases] == [8, 8]
    cases = dataclasses.replace(PLAN, scenarios=("stall",), stall_streams=(16, 32)).cases()
    assert [(case.draft, case.streams) for case in cases] == [
        ("none", 16),
        ("mtp", 16),
        ("none", 32),
        ("mtp", 32),
    ]


def test_a_stall_that_outlasts_the_window_belongs_to_it() -> None:
    trace = trace_of((0.0, 1), (1.0, 1), (9.0, 1), (10.0, 1))
    assert gaps_between([trace], 2.0, 5.0) == [8.0]


def test_figures_of_a_load() -> None:
    traces = [trace_of((0.5, 1), (1.0, 3)), trace_of((1.5, 4), called_s=1.0)]
    traces[0].n_drafted, traces[0].n_accepted = 4, 3
    found = figures(PeerLoad(traces, 2.0, client_cpu_s=0.2, server_cpu_s=1.8))
    assert found.tokens_per_s == 4.0
    assert found.ttft_p50_s == 0.5
    assert found.acceptance_rate == 0.75
    assert found.tokens_per_message == pytest.approx(8 / 3)
    assert (found.server_cores, found.client_cores) == (0.9, 0.1)


def test_poisson_arrivals_are_those_of_the_seed() -> None:
    times = poisson_arrivals(50.0, 100.0, 7)
    assert times == poisson_arrivals(50.0, 100.0, 7)
    assert times != poisson_arrivals(50.0, 100.0, 8)
    assert list(times) == sorted(times)
    assert times[-1] < 100.0
    assert len(times) == pytest.approx(5000, rel=0.06)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.15)  # exponential: as large as the mean squared
    assert poisson_arrivals(0.001, 0.001, 1) == (0.0,)


def test_a_selection_chooses_cases() -> None:
    only = parse_only("draft=mtp+none,model=dense,streams=8,scenario=closed")
    cases = dataclasses.replace(PLAN, only=only).cases()
    assert [(case.draft, case.streams) for case in cases] == [("none", 8), ("mtp", 8)]
    loads = dataclasses.replace(PLAN, only=parse_only("load=0.7,model=hybrid")).cases()
    assert {case.scenario for case in loads} == {"open"}
    assert len(PLAN.cases()) == 2 * 5 * 5 + 2 * 2 * 2 + 2 + 2
    for wrong in ("draft", "colour=red", "draft="):
        with pytest.raises(argparse.ArgumentTypeError, match="KEY=VALUE"):
            parse_only(wrong)


def test_random_weights_are_measured_at_given_acceptances_only() -> None:
    cases = dataclasses.replace(PLAN, models=("dense-0.6b-Q4_0",), streams=(8,)).cases()
    closed = [(case.draft, case.acceptance) for case in cases if case.scenario == "closed"]
    assert closed == [("none", None), ("mtp", 0.3), ("mtp", 0.9), ("simple", 0.3), ("simple", 0.9)]


def test_both_get_the_same_settings() -> None:
    target = find_target("dense")
    config = PLAN.config(CASE, target)
    flags = peer_flags(config, 1234)
    given = dict(pairwise(flags))
    assert given["--parallel"] == str(config.parallel) == "8"
    assert int(given["--ctx-size"]) == config.parallel * config.max_model_len
    assert given["--batch-size"] == str(config.batch_size)
    assert given["--spec-draft-n-max"] == str(config.draft_default) == "3"
    assert given["--spec-type"] == "draft-mtp"
    assert "--no-kv-unified" in flags
    for flash in ("auto", "on", "off"):
        told = peer_flags(dataclasses.replace(config, flash_attn=flash), 1)
        assert dict(pairwise(told))["--flash-attn"] == flash
    # Nobody goes on from former prompts.
    assert dict(pairwise(server_flags(config)))["--prefix-cache"] == "false"
    assert "--no-cache-prompt" in flags
    assert (given["--cache-ram"], given["--ctx-checkpoints"]) == ("0", "0")
    plain = peer_flags(PLAN.config(dataclasses.replace(CASE, draft="none"), target), 1)
    assert "--spec-type" not in plain
    ngram = PLAN.config(dataclasses.replace(CASE, draft="ngram"), target)
    assert ngram.draft_default == 8
    assert "--spec-ngram-simple-size-m" in peer_flags(ngram, 1)
    rated = PLAN.config(dataclasses.replace(CASE, acceptance=0.5), target)
    assert rated.synth_rates == ("0.500000", "0.250000", "0.125000")
    assert "0.500000,0.250000,0.125000" in peer_flags(rated, 1)


def test_own_defaults_are_nothing_but_a_model() -> None:
    plan = dataclasses.replace(PLAN, scenarios=("defaults",))
    names = ["qwen3-0.6b-like-Q4_0", "dense", "hybrid"]
    assert [(case.model, case.streams) for case in plan.cases()] == [
        (name, streams) for name in names for streams in (1, 8)
    ]
    dense = plan.config(plan.cases()[2], find_target("dense"))
    assert dense == Config(model=str(find_target("dense").path))
    qwen = plan.config(plan.cases()[0], Target(names[0], Path("q.gguf"), {}, is_random=True))
    assert qwen == Config(model="q.gguf")
    other = dataclasses.replace(
        plan, defaults_models=("dense",), defaults_streams=(4,), n_prompts=(1000, 4000)
    )
    assert [case.name for case in other.cases()] == [
        "defaults dense own × 4 prompts of 1000",
        "defaults dense own × 4 prompts of 4000",
    ]
    once, case = dataclasses.replace(other, n_waves=1), other.cases()[1]
    assert once.estimate_s(case) < other.estimate_s(case)
    assert default_peer_flags(300, 40960) == []
    assert default_peer_flags(257, 1024) == ["--ctx-size", "4096"]


def test_the_turn_that_is_not_counted_has_no_long_prompts() -> None:
    assert prompt_bounds((16, 4000), i_round=-1) == (16, 256)
    assert prompt_bounds((4000, 4000), i_round=-1) == (256, 256)
    assert prompt_bounds((4000, 4000), i_round=0) == (4000, 4000)


def test_requests_are_drawn_alike_for_all_and_anew_for_each_round() -> None:
    texts = [[*range(1000)], [*range(5000, 5020)]]
    first = draw_requests(texts, (16, 48), 32, 400, 1)
    assert first == draw_requests(texts, (16, 48), 32, 400, 1)
    assert first != draw_requests(texts, (16, 48), 32, 400, 2)
    lengths = [length for _, length in first]
    assert (min(lengths), max(lengths)) == (8, 56)
    assert all(16 <= len(prompt) <= 48 or len(prompt) == 20 for prompt, _ in first)
    assert len({tuple(prompt[:16]) for prompt, _ in first}) > 150  # nothing for a prompt cache
    assert {n for _, n in draw_requests([[1]], (16, 48), 1, 20, 1)} == {1, 2}


@pytest.mark.parametrize("rates", [("0.5",), ("0.5", "0.6", "0.1", "0"), ("a",) * 4, ("2",) * 4])
def test_synthetic_rates_that_are_none(rates: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="synth_rates"):
        Config(draft_max=4, synth_rates=rates)


def test_a_model_that_is_not_made_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"make bench-models ARGS='dense-9b draft-30m .* Q4_0"):
        find_target("dense-9b-Q4_0")
    with pytest.raises(ValueError, match=r"no model 'mine': .* \.gguf, .*ARGS=…"):
        find_target("mine")


def test_a_file_of_ones_own_is_a_model_with_its_own_acceptance(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    with pytest.raises(ValueError, match="there is no model"):
        find_target(str(path))
    path.touch()
    assert find_target(str(path)) == Target(str(path), path, {}, is_random=False)
    cases = dataclasses.replace(PLAN, models=(str(path),), streams=(8,)).cases()
    drafts = [(case.draft, case.acceptance) for case in cases if case.scenario == "closed"]
    assert drafts == [(draft, None) for draft in PLAN.drafts]


def test_every_model_has_the_texts_in_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All got the token ids of the first one's vocabulary."""

    class Engine:
        def __init__(self, target: Target) -> None:
            self.n = len(target.name)

        def tokenize(self, text: str, **_: bool) -> list[int]:
            return [self.n]

    @contextlib.contextmanager
    def loaded(target: Target) -> Iterator[Engine]:
        yield Engine(target)

    monkeypatch.setattr(bench_command, "_loaded", loaded)
    bench = bench_command._BenchPeers.__new__(bench_command._BenchPeers)
    bench._texts = {}
    for name in ("a", "bcd", "a"):
        tokens = bench._tokens(Target(name, Path(name), {}, is_random=True))
        assert tokens[0] == [len(name)]


def test_a_turn_is_whole_waves_of_about_its_seconds() -> None:
    assert PLAN.n_requests(8, 100, 4000.0) == 80
    assert PLAN.n_requests(32, 100, 100.0) == 32
    assert PLAN.n_requests(1, 100, 1.0) == 4
    assert PLAN.estimate_s(CASE) < PLAN.estimate_s(PeerCase("closed", "dense-1b-Q8_0", "mtp", 32))


def turn(tokens_per_s: float) -> Figures:
    return Figures(tokens_per_s, 0.1, 0.2, 0.01, 0.05, 2.0, 0.8, 0.9, 0.1, 8, 800)


def row(*pairs: tuple[float, float], agreement: list[int] | None = None) -> PeerRow:
    return PeerRow(CASE, [turn(a) for a, _ in pairs], [turn(b) for _, b in pairs], agreement, 96)


def test_the_ratio_is_taken_round_by_round(tmp_path: Path) -> None:
    both = row((1000, 500), (100, 100), (300, 200), agreement=[96, 96, 40])
    found = ratio(both, lambda each: each.tokens_per_s)
    assert found is not None
    assert (found.median, found.low, found.high) == (1.5, 1.0, 2.0)
    header, _, cells = peer_lines([both])
    assert "1.00–2.00" in cells
    assert "2 of 3" in cells
    assert header.split()[0] == "draft"
    path = tmp_path / "deep" / "peers.json"
    from drafthouse_bench.report import describe_machine

    write_peers_json(path, describe_machine(1, "engine", "command"), [both])
    content = json.loads(path.read_text("utf-8"))
    assert content["rows"][0]["theirs"][1]["tokens_per_s"] == 100


def test_the_table_of_own_defaults_names_the_machine_and_both_sides_threads(
    tmp_path: Path,
) -> None:
    case = PeerCase("defaults", "dense", "own", 8)
    ours, plain, theirs = [turn(300), turn(200)], [turn(150), turn(90)], [turn(100), turn(100)]
    found = DefaultsRow(case, ours, plain, theirs, (1, 0), ("", "--ctx-size 4096"), 240.0)
    machine = Machine("A Processor", 2, 0.1, 1, "engine", "command")
    caption, header, _, cells = defaults_lines(machine, [found])
    assert "A Processor, 2 cores" in caption
    assert "ours nothing, theirs --ctx-size 4096" in caption
    assert header.split()[0] == "streams"
    assert cells.split()[:8] == ["8", "250", "120", "100", "2.50", "2.00–3.00", "1.20", "50%"]
    assert cells.split()[-2:] == ["1", "?"]
    write_peers_json(tmp_path / "peers.json", machine, [found])
    assert json.loads((tmp_path / "peers.json").read_text("utf-8"))["rows"][0]["threads"] == [1, 0]
    on_device = dataclasses.replace(found, memory_limit=None)
    assert defaults_lines(machine, [on_device])[3].split()[7] == "–"


def test_plots_are_drawn_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BenchError, match="pip install matplotlib"):
        bench_plot.draw(tmp_path / "a.svg", [row((2, 1))])


def test_a_plot_holds_both_contenders(tmp_path: Path) -> None:
    path = tmp_path / "peers.svg"
    assert bench_plot.draw(path, [row((2, 1))])
    assert "<svg" in path.read_text("utf-8")
    lines = bench_plot.curves([row((2, 1), (4, 3))])["dense"]
    assert lines["mtp", "drafthouse"] == [(8, 3.0, 50.0)]
    assert lines["mtp", "llama-server"] == [(8, 2.0, 50.0)]
    open_row = dataclasses.replace(row((2, 1)), case=dataclasses.replace(CASE, scenario="open"))
    assert not bench_plot.draw(path, [open_row])


class SlowClient:
    """Sends a token each `gap_s`; the first of a long prompt comes late and holds the others."""

    def __init__(self, gap_s: float = 0.01) -> None:
        self._gap_s = gap_s
        self._is_free = asyncio.Event()
        self._is_free.set()
        self.n_now = self.n_most = 0

    async def stream(self, prompt: Sequence[int], n_output: int, trace: Trace) -> None:
        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        try:
            if len(prompt) > 100:
                self._is_free.clear()
                await asyncio.sleep(0.2)
                self._is_free.set()
            for _ in range(n_output):
                await asyncio.sleep(self._gap_s)
                await self._is_free.wait()
                trace.add(asyncio.get_running_loop().time(), 1)
            trace.is_finished = True
        finally:
            self.n_now -= 1

    async def whole(self, prompt: Sequence[int], n_output: int) -> list[int]:
        return [*range(n_output)] if prompt[0] else [0] * n_output


def slow() -> tuple[Running, SlowClient]:
    client = SlowClient()
    return Running("slow", os.getpid(), client, client), client


async def test_a_closed_loop_keeps_so_many_requests_running() -> None:
    running, client = slow()
    load = await run_closed(running, [[1]] * 7, 3, 2)
    assert client.n_most == 2
    assert len(load.traces) == 7
    assert all(trace.is_finished for trace in load.traces)
    assert load.elapsed_s > 0


async def test_outputs_of_a_closed_loop_may_differ() -> None:
    load = await run_closed(slow()[0], [[1]] * 3, [2, 5, 1], 2)
    assert sorted(trace.n_output for trace in load.traces) == [1, 2, 5]


async def test_an_open_loop_waits_for_nobody() -> None:
    running, client = slow()
    load = await run_open(running, [[1]] * 5, 10, (0.0, 0.01, 0.02, 0.03, 0.04))
    assert client.n_most == 5
    called = sorted(trace.called_s for trace in load.traces)
    assert called[-1] - called[0] == pytest.approx(0.04)


async def test_a_stall_is_seen_in_the_gaps_of_the_streams() -> None:
    running, client = slow()
    found = await run_stall(running, [[1]] * 2, [1] * 200, 1000, 0.1)
    assert found.n_gaps_before > 0
    assert found.gap_p99_during_s >= 0.15
    assert found.gap_max_during_s >= found.gap_p99_during_s
    assert found.ttft_s >= 0.2
    assert found.ttft_alone_s >= 0.2
    assert client.n_now == 0  # nothing is left behind


async def test_a_short_prompt_behind_a_long_one_is_seen_to_wait() -> None:
    running, client = slow()
    found = await run_behind(running, 100, 200, 1)
    assert found.long_alone_s >= 0.2
    assert found.long_s >= 0.2
    assert found.n_short >= 1
    assert found.short_alone_s < 0.2
    assert found.short_p95_s >= found.short_p50_s > 0
    assert client.n_now == 0
    row = BehindRow(PeerCase("behind", "x", "own", 1, n_prompt=200), [found], [found])
    assert len(behind_lines([row])) == 4


class ChattyClient(SlowClient):
    """Has computed half of what a prompt begins with; remembers the prompts."""

    def __init__(self) -> None:
        super().__init__(gap_s=0.001)
        self.prompts: list[list[int]] = []

    async def stream(self, prompt: Sequence[int], n_output: int, trace: Trace) -> None:
        self.prompts.append(list(prompt))
        is_new = 1000 not in prompt  # no answer is in it
        await super().stream(prompt, n_output, trace)
        trace.token_ids += range(1000, 1000 + n_output)
        trace.n_reused = 0 if is_new else len(prompt) // 2


async def test_each_turn_of_a_chat_says_all_that_was_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_chats, "_PAUSE_S", (0.0, 0.01))
    client = ChattyClient()
    chats = draw_chats(100, 60, 2, 1)
    assert chats == draw_chats(100, 60, 2, 1) != draw_chats(100, 60, 2, 2)
    found = await run_chats(Running("chatty", os.getpid(), client, client), chats)
    assert len(client.prompts) == 8
    assert client.n_most == 2
    for chat in chats:
        said: list[int] = []
        for message, length in zip(chat.messages, chat.lengths, strict=True):
            said += message
            assert said in client.prompts
            said += range(1000, 1000 + length)
        assert len(said) <= longest(60)
    assert 0.5 < found.reused < 1
    assert found.first_reused == 0
    assert found.tokens_per_s > 0
    assert found.later_p95_s >= found.later_p50_s > 0
    assert found.n_unnamed == 0
    row = ChatsRow(PeerCase("chats", "x", "own", 2, n_prompt=60), [found], [found])
    assert len(chats_lines([row])) == 4
    row.theirs.append(dataclasses.replace(found, n_unnamed=3))
    assert "llama-server left out the ids of 3 tokens" in chats_lines([row])[4]


def test_chats_may_begin_alike() -> None:
    firsts = [chat.messages[0] for chat in draw_chats(100, 60, 3, 1, n_shared=20)]
    assert firsts[0][:20] == firsts[1][:20] == firsts[2][:20]
    assert len({tuple(first[20:]) for first in firsts}) == 3
    assert all(20 + 30 <= len(first) <= 20 + 90 for first in firsts)


def test_chats_are_held_with_models_that_have_room() -> None:
    plan = dataclasses.replace(PLAN, scenarios=("chats",), chats_streams=(4, 9))
    assert [(case.model, case.streams, case.n_prompt) for case in plan.cases()] == [
        ("qwen3-0.6b-like-Q4_0", 4, 300),
        ("qwen3-0.6b-like-Q4_0", 9, 300),
    ]
    assert all(plan.estimate_s(case) > 0 for case in plan.cases())


def test_long_prompts_are_asked_of_models_that_have_room() -> None:
    plan = dataclasses.replace(PLAN, scenarios=("behind",))
    assert [(case.model, case.n_prompt) for case in plan.cases()] == [
        ("qwen3-0.6b-like-Q4_0", 2000)
    ]
    plan = dataclasses.replace(plan, n_prompts=(500, 4000), defaults_models=("dense", "big"))
    assert [(case.model, case.n_prompt) for case in plan.cases()] == [("big", 500), ("big", 4000)]
    assert all(plan.estimate_s(case) > 0 for case in plan.cases())


class TellingClient(SlowClient):
    """Gives these answers, one after the other."""

    def __init__(self, *answers: list[int]) -> None:
        super().__init__()
        self._answers = iter(answers)

    async def whole(self, prompt: Sequence[int], n_output: int) -> list[int]:
        return next(self._answers)


async def test_agreement_counts_the_common_start() -> None:
    assert await agreement(SlowClient(), SlowClient(), [[1], [2]], 5) == [5, 5]
    wrong = [0, 1, 9, 3, 4]
    assert await agreement(SlowClient(), TellingClient(wrong, wrong), [[1]], 5) == [2]


async def test_where_answers_part_whoever_answers_otherwise_alone_is_named() -> None:
    said: list[str] = []
    other = TellingClient([0, 1, 9, 3, 4], [0, 1, 2, 3, 4])
    assert await agreement(SlowClient(), other, [[1]], 5, said.append) == [2]
    assert said == ["prompt 0 parts after 2 tokens; asked alone, llama-server changes it"]
    other = TellingClient([0, 7], [0, 7])
    await agreement(SlowClient(), other, [[1]], 5, said.append)
    assert said[1:] == ["prompt 0 parts after 1 tokens; asked alone, nobody changes it"]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(("peers", *arguments), Terminal(out, err, io.StringIO()))
    return code, out.getvalue(), err.getvalue()


def test_without_a_peer_one_sentence_says_what_builds_it(tmp_path: Path) -> None:
    code, out, err = run("--quick", "--peer", str(tmp_path / "llama-server"))
    assert code == 1
    assert "`make peers` builds it" in err
    assert "min on a small machine" in out
    with pytest.raises(BenchError, match="make peers"):
        require_peer(tmp_path)


def test_a_list_measures_nothing_and_an_empty_selection_is_refused() -> None:
    code, out, _ = run("--list", "--only", "scenario=closed,streams=4,draft=mtp")
    assert code == 0
    assert out.count("closed") == 2
    code, _, err = run("--list", "--only", "streams=5")
    assert code == 1
    assert "no case is selected" in err


@pytest.mark.parametrize(
    "flag",
    [
        "--scenarios=closed,nosuch",
        *("--round-s=-1", "--round-s=0", "--round-s=inf", "--round-s=nan"),
        *("--n-output=-5", "--busy=-1", "--n-shared=-4", "--acceptances=0.5,1.5", "--loads=inf"),
    ],
)
def test_values_that_mean_nothing_are_wrong_usage(flag: str) -> None:
    """Some were taken as they were, others for the default; a scenario's name ended with 1."""
    with pytest.raises(SystemExit) as error:
        run("--list", flag)
    assert error.value.code == 2


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    flag: str, tmp_path: Path
) -> None:
    peer = write_program(tmp_path / "llama-server", "")
    code, out, err = run("--quick", "--peer", str(peer), flag, str(tmp_path))
    assert code == 1
    assert "Is a directory" in err
    assert "threads per decode" not in out


@pytest.mark.parametrize("flags", [("--sampled",), ("--grammar", __file__)])
def test_answers_that_are_compared_are_neither_sampled_nor_bound(flags: tuple[str, ...]) -> None:
    assert run("--list", "--scenarios", "defaults,chats,behind", *flags)[0] == 0
    code, _, err = run("--list", "--scenarios", "defaults,closed", *flags)
    assert code == 1
    assert "are for behind, chats, defaults alone" in err


STAND_IN = """
import asyncio, json, sys

print("system_info: n_threads = 7 (n_threads_batch = 7) / 8", file=sys.stderr, flush=True)


async def serve(reader, writer):
    while head := await reader.readline():
        length = 0
        while (line := await reader.readline()).strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: ")
        if b"/health" in head:
            text = b'{"status": "ok"}'
        else:
            assert json.loads(body)["cache_prompt"] is True
            n = json.loads(body)["n_predict"]
            text = json.dumps({"tokens_predicted": n, "stop": True}).encode()
            text = b"data: " + text + b"\\n\\n"
        writer.write(b"%d\\r\\n\\r\\n" % len(text) + text)
        await writer.drain()


async def main():
    port = int(sys.argv[sys.argv.index("--port") + 1])
    assert sys.argv[-2:] == ["--ctx-size", "4096"], sys.argv
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


asyncio.run(main())
"""


@pytest.mark.model
@pytest.mark.timeout(600)
def test_own_defaults_are_measured_beside_a_stand_in(tmp_path: Path) -> None:
    """Our server twice, with and without drafts, and a program in llama-server's place."""
    peer = write_program(tmp_path / "llama-server", STAND_IN)
    path = tmp_path / "peers.json"
    code, out, err = run(
        *("--scenarios", "defaults", "--only", "model=dense,streams=1", "--rounds", "1"),
        *("--round-s", "0.1", "--peer", str(peer), "--json", str(path)),
    )
    assert code == 0, err
    assert "dense, each with its own defaults" in out
    [found] = json.loads(path.read_text("utf-8"))["rows"]
    assert found["threads"][0] >= 1
    assert found["threads"][1] == 7
    assert found["flags"] == ["", "--ctx-size 4096"]
    assert found["memory_limit"] > 0
    n_tokens = {name: found[name][0]["n_output"] for name in ("ours", "plain", "theirs")}
    assert len(set(n_tokens.values())) == 1, "the same requests for all"


async def test_a_peer_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    peer = write_program(tmp_path / "llama-server", 'raise SystemExit("no such model")')
    with pytest.raises(BenchError, match=r"llama-server does not start: .*no such model"):
        async with run_peer(peer, Config(model="missing.gguf", max_model_len=64, threads=1)):
            pytest.fail("it runs")


@pytest.mark.bench
@pytest.mark.model
@pytest.mark.skipif(not PEER.exists(), reason="no llama-server: `make peers` builds it")
@pytest.mark.timeout(240)
def test_a_small_run_beside_llama_server(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    code, out, err = run(
        *("--quick", "--scenarios", "closed,open", "--only", "draft=mtp", "--streams", "4"),
        *("--n-output", "16", "--threads", "1", "--json", str(path)),
        "--server-flags=--draft-policy fixed",  # adaptive may find that no draft pays here
    )
    assert code == 0, err
    assert "closed loop" in out
    for each in json.loads(path.read_text("utf-8"))["rows"]:
        for name in ("ours", "theirs"):
            assert each[name][0]["tokens_per_s"] > 0
            assert 0.2 < each[name][0]["acceptance_rate"] < 1
        if each["case"]["scenario"] == "closed":
            assert each["ours"][0]["n_output"] == each["theirs"][0]["n_output"]


def test_aiperfs_result_is_read_or_refused() -> None:
    content = {
        "output_token_throughput": {"avg": 1000.0},
        "time_to_first_token": {"p50": 10.0, "p95": 20.0},
        "inter_token_latency": {"p50": 1.5},
        "request_count": {"avg": 80.0},
    }
    seen = aiperf.read_aiperf(content)
    assert (seen.tokens_per_s, seen.ttft_p95, seen.tpot_p50, seen.n_requests) == (1000, 20, 1.5, 80)
    with pytest.raises(BenchError, match="lacks 'request_count'"):
        aiperf.read_aiperf({k: v for k, v in content.items() if k != "request_count"})
    load = PeerLoad([trace_of((1.0, 1), (3.0, 4))], 4.0, 0.0, None)
    own = aiperf.summarize("ours", load)
    assert (own.tokens_per_s, own.ttft_p50, own.tpot_p50) == (1.25, 1000.0, 500.0)
