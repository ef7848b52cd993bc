"""The benchmark: its statistics, its contenders, and one small run of all of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.programs import write_program

import drafthouse
from drafthouse_bench.command import main
from drafthouse_bench.load import Load, LoadResult, cut_prompts, run_load
from drafthouse_bench.process import (
    BareResult,
    BenchError,
    ServerProcess,
    bare_flags,
    busy_processes,
    cpu_s,
    parse_bare,
    run_bare,
    server_flags,
)
from drafthouse_bench.report import (
    Case,
    Round,
    Spread,
    describe_machine,
    percentile,
    require_writable,
    summarize,
    table_lines,
    write_json,
)
from drafthouse_server.cli.settings import load
from drafthouse_server.cli.terminal import Terminal
from drafthouse_server.cli.tune import read_texts
from drafthouse_server.config import Config
from drafthouse_server.engine.fake import FakeEngine

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
CASE = Case("tiny", "mtp", 4)
LOAD = Load(((1, 2), (3, 4, 5)), n_output=7, n_streams=2)


def served(n_output: int, elapsed_s: float, client_cpu_s: float = 0.1) -> LoadResult:
    return LoadResult(
        elapsed_s=elapsed_s,
        n_output=n_output,
        n_messages=n_output // 2,
        n_drafted=100,
        n_accepted=60,
        first_tokens_s=[0.01, 0.03],
        gaps_s=[0.001, 0.002, 0.003],
        client_cpu_s=client_cpu_s,
    )


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([7.0], 0.99, 7.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([float(i) for i in range(101)], 0.95, 95.0),
        ([1.0, 2.0, 3.0], 0.0, 1.0),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
    ],
)
def test_percentile_interpolates(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_a_row_has_medians_and_bounds_over_rounds() -> None:
    bare = BareResult(n_output=1000, n_drafted=100, n_accepted=60, elapsed_s=1.0)
    rounds = [
        Round(served(n_output, 1.0), server_cpu_s=0.8, bare=bare) for n_output in (900, 400, 800)
    ]
    row = summarize(CASE, rounds)
    assert row.n_rounds == 3
    assert row.tokens_per_s == Spread(800.0, 400.0, 900.0)
    assert row.share_of_bare == Spread(0.8, 0.4, 0.9)
    assert row.acceptance_rate == Spread(0.6, 0.6, 0.6)
    assert row.tokens_per_message.median == 2.0
    assert row.ttft_p50_s.median == pytest.approx(0.02)
    assert row.gap_p50_s.median == pytest.approx(0.002)
    assert row.server_cores == Spread(0.8, 0.8, 0.8)
    assert row.client_cores == Spread(0.1, 0.1, 0.1)


def test_the_share_is_taken_round_by_round() -> None:
    """A machine that becomes half as fast for both contenders leaves the share as it is."""
    rounds = [
        Round(served(900, 1.0), 0.8, BareResult(1000, 0, 0, 1.0)),
        Round(served(900, 2.0), 0.8, BareResult(1000, 0, 0, 2.0)),
    ]
    share = summarize(CASE, rounds).share_of_bare
    assert share is not None
    assert share.low == pytest.approx(0.9)
    assert share.high == pytest.approx(0.9)


def test_what_was_not_measured_is_a_dash() -> None:
    result = served(100, 1.0)
    result.n_drafted = result.n_accepted = 0
    row = summarize(CASE, [Round(result, server_cpu_s=None, bare=None)])
    assert row.acceptance_rate is None
    assert row.bare_tokens_per_s is None
    assert row.share_of_bare is None
    assert row.server_cores is None
    header, _, cells = table_lines([row])
    assert cells.split().count("–") == 5
    assert header.split()[:3] == ["draft", "streams", "tokens/s"]
    assert cells.split()[:3] == ["mtp", "4", "100"]


def test_json_holds_every_number(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    row = summarize(CASE, [Round(served(100, 1.0), 0.5, None)])
    write_json(path, describe_machine(1, "engine", "command"), [row])
    content = json.loads(path.read_text("utf-8"))
    assert content["machine"]["n_threads"] == 1
    assert content["machine"]["n_cores"] >= 1
    assert content["machine"]["cpu"]
    assert content["rows"][0]["case"] == dataclasses.asdict(CASE)
    assert content["rows"][0]["tokens_per_s"] == {"median": 100.0, "low": 100.0, "high": 100.0}


def test_prompts_are_of_mixed_lengths_and_always_the_same() -> None:
    texts = [list(range(i, i + 300)) for i in range(5)]
    prompts = cut_prompts(texts, 200, 64, 256)
    assert prompts == cut_prompts(texts, 200, 64, 256)
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) <= 66
    assert max(lengths) >= 254
    assert min(lengths) >= 64
    assert max(lengths) <= 256
    assert sum(lengths) / len(lengths) == pytest.approx(160, abs=3)
    assert all(prompt[0] == i % 5 for i, prompt in enumerate(prompts))


@pytest.mark.parametrize("content", ["[]", "{}", '{"prompts": [1]}', "no JSON"])
def test_a_file_that_holds_no_prompts_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ValueError, match="not a file of prompts"):
        read_texts(path)


def test_server_flags_say_the_same_as_the_settings() -> None:
    config = Config(
        model="a.gguf",
        draft_type="simple",
        model_draft="b.gguf",
        parallel=32,
        kv_unified=not Config().kv_unified,
        port=1234,
        log_level="warning",
    )
    flags = server_flags(config)
    given = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    assert load(environment={}, flags=given) == dataclasses.replace(config, port=0)


def test_bare_flags_are_the_settings_of_the_server() -> None:
    config = Config(
        draft_type="mtp",
        parallel=2,
        max_model_len=300,
        threads=1,
        draft_policy="fixed",
        draft_default=2,
    )
    flags = bare_flags(config, LOAD, "file")
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given["--n-seq"] == given["--n-requests"] == "2"
    assert (given["--n-gen"], given["--n-draft"], given["--threads"]) == ("7", "2", "1")
    assert given["--kv-unified"] == str(int(config.kv_unified))
    assert "--draft-model" not in given


def test_the_bare_result_is_the_last_line() -> None:
    line = b'{"tokens": 10, "seconds": 0.5, "n_drafted": 8, "n_accepted": 6, "more": 1}\n'
    result = parse_bare(b"noise\n" + line)
    assert result == BareResult(10, 8, 6, 0.5)
    assert result.tokens_per_s == 20.0


@pytest.mark.parametrize("out", [b"", b"noise\n", b"[]\n", b'{"tokens": 1}\n'])
def test_a_bare_result_that_cannot_be_read(out: bytes) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        parse_bare(out)


async def test_the_bare_loop_gets_the_prompts(tmp_path: Path) -> None:
    code = """\
import json, sys
path = sys.argv[sys.argv.index("--prompts") + 1]
n = sum(len(line.split()) for line in open(path))
print(json.dumps({"tokens": n, "seconds": 1, "n_drafted": 0, "n_accepted": 0}))"""
    result = await run_bare(write_program(tmp_path / "bare", code), Config(), LOAD)
    assert result.n_output == 5  # all token ids of the prompts


async def test_a_bare_loop_that_fails_is_one_sentence(tmp_path: Path) -> None:
    code = "import sys; print('first', file=sys.stderr); sys.exit('the reason')"
    with pytest.raises(BenchError, match="the bare step loop failed: the reason"):
        await run_bare(write_program(tmp_path / "bare", code), Config(), LOAD)


async def test_a_server_that_does_not_start_is_one_sentence() -> None:
    with pytest.raises(BenchError, match=r"the server does not start: .*missing\.gguf"):
        async with ServerProcess(Config(model="missing.gguf")).run():
            pytest.fail("it runs")


async def test_a_load_sees_every_token_and_message(start_server: ServerFactory) -> None:
    server = await start_server(FakeEngine(step_s=0.004))
    load = Load(tuple((65 + i,) for i in range(10)), n_output=20, n_streams=3)
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        result = await run_load(client, load)
    assert result.n_output == 200
    assert len(result.first_tokens_s) == 10
    assert len(result.gaps_s) == result.n_messages - 10
    assert result.tokens_per_message >= 1
    counted = server.loop.statistics()
    assert counted.n_output_tokens == 200
    assert (result.n_drafted, result.n_accepted) == (counted.n_drafted, counted.n_accepted)
    assert result.elapsed_s >= max(result.first_tokens_s)
    assert result.client_cpu_s > 0


async def test_a_closed_loop_keeps_its_streams_busy_and_no_more(
    start_server: ServerFactory,
) -> None:
    server = await start_server(FakeEngine(step_s=0.001))
    seen: set[int] = set()

    async def watch() -> None:
        while True:
            counted = server.loop.statistics()
            seen.add(counted.n_running + counted.n_waiting)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        await run_load(client, Load(((65, 66),) * 12, n_output=15, n_streams=3))
    watching.cancel()
    assert max(seen) == 3


async def test_a_request_that_fails_ends_the_load(client: drafthouse.AsyncClient) -> None:
    with pytest.raises(drafthouse.ContextTooLong):
        await run_load(client, Load(((65,), (66,)), n_output=100_000, n_streams=2))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_cpu_time_of_a_process_grows_as_it_works() -> None:
    before = cpu_s(os.getpid())
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    after = cpu_s(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before >= 0.03
    assert cpu_s(2**30) is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_busy_processes_compute_and_end() -> None:
    with busy_processes(2) as pids:
        while any(not cpu_s(pid) for pid in pids):
            time.sleep(0.01)
    assert [cpu_s(pid) for pid in pids] == [None, None]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(("matrix", *arguments), Terminal(out, err, io.StringIO()))
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "arguments", [("--draft-types", "none,magic"), ("--streams", "0"), ("--rounds", "x")]
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert error.value.code == 2


@pytest.mark.model
def test_a_missing_draft_model_is_one_sentence() -> None:
    code, _, err = run("--model", str(MODELS / "tiny-mimo2-f16.gguf"), "--draft-types", "eagle3")
    assert code == 2
    assert "model_draft" in err.splitlines()[-1]


def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    """It was told after all had been measured, which was lost."""
    code, out, err = run("--json", str(tmp_path))
    assert (code, out) == (1, "")
    assert "Is a directory" in err


def test_the_folder_of_a_result_is_made_and_what_was_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    require_writable(path)
    assert path.parent.is_dir()
    assert not path.exists()
    path.write_text("before", "utf-8")
    require_writable(path)
    assert path.read_text("utf-8") == "before"


@pytest.mark.parametrize("program", ["fresh", "fair-shares", "quoting"])
def test_a_program_without_its_model_says_so_in_one_sentence(program: str) -> None:
    """It ended with a traceback."""
    err = io.StringIO()
    flag = "--models" if program == "fresh" else "--model"
    code = main((program, flag, "nosuch"), Terminal(io.StringIO(), err, io.StringIO()))
    assert code == 1
    assert len(err.getvalue().splitlines()) == 1
    assert "nosuch" in err.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("fresh", "--rounds", "0"),
        ("host-cost", "--sequences", "0"),
        ("quoting", "--loads", "edits"),
        ("aiperf", "--streams", "0"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_wrong_usage_of_a_program_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """Divisions by zero, figures of another load, and an installation of 1.2 GB before them."""
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_a_selection_of_a_trial_that_is_none_says_how_one_is_written() -> None:
    with pytest.raises(SystemExit, match="expected cell=NAME"):
        main(("trial", "--only", "dense"))


@pytest.mark.model
def test_a_small_run_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    code, out, err = run(
        *("--quick", "--streams", "2", "--draft-types", "none,mtp", "--n-output", "8"),
        *("--threads", "1", "--json", str(path)),
    )
    assert code == 0, err
    lines = out.splitlines()
    assert any("load average" in line for line in lines)
    assert [line.split()[:2] for line in lines[-2:]] == [["none", "2"], ["mtp", "2"]]
    plain, drafted = json.loads(path.read_text("utf-8"))["rows"]
    assert plain["acceptance_rate"] is None
    assert 0.2 < drafted["acceptance_rate"]["median"] < 1
    # Quick steps share messages: how many tokens one carries says little about drafts.
    assert min(row["tokens_per_message"]["median"] for row in (plain, drafted)) >= 1
    assert plain["tokens_per_s"]["median"] > 0
    if (ROOT / "build" / "bin" / "step_bench").exists():
        assert plain["share_of_bare"]["median"] > 0


@pytest.mark.model
@pytest.mark.parametrize(
    "arguments",
    [
        ("host-cost", "--sequences", "2", "--steps", "20", "--rounds", "1"),
        ("fresh", "--models", "dense", "--streams", "1", "--rounds", "1", "--settle", "0.1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_program_runs(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """What a benchmark reaches into changes; one that is not run in a test breaks unseen."""
    assert main(arguments) == 0
    assert capsys.readouterr().out


def members(group: int) -> list[int]:
    """Returns the processes of a process group that run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, pgrp = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state != "Z":
                    found.append(int(folder.name))
    return found


UNIGNORED = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
runpy.run_module("drafthouse_bench", run_name="__main__", alter_sys=True)
"""
"""The benchmark as a terminal starts it: whoever runs the tests may ignore SIGHUP (nohup)."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_with_its_servers(number: int) -> None:
    """They went on, with the memory of a model each."""
    command = [sys.executable, "-c", UNIGNORED, "tenancy-cost", "--engine", "fake"]
    with subprocess.Popen(
        [*command, "--rounds", "1000"], start_new_session=True, stdout=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(1200):
                if len(members(process.pid)) >= 3:  # itself and both servers
                    break
                time.sleep(0.05)
            assert len(members(process.pid)) >= 3
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            for _ in range(600):  # processes of the servers' own end with them
                if not members(process.pid):
                    break
                time.sleep(0.05)
            assert members(process.pid) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
