"""`make bench-aiperf`: aiperf, a load generator that nobody here wrote, beside our own.

Both put the same prompts on the same server, one after the other: ours, aiperf, ours. aiperf talks
gRPC through the plugin in bench/aiperf_drafthouse. It lives in build/aiperf-venv, which is
made once (about 1.2 GB); neither is a dependency of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drafthouse
from drafthouse_bench.counts import count
from drafthouse_bench.peers.contender import GrpcClient, Running
from drafthouse_bench.peers.scenario import run_closed
from drafthouse_bench.process import BenchError, ServerProcess
from drafthouse_bench.report import describe_machine, n_cores, percentile
from drafthouse_bench.trace import PeerLoad
from drafthouse_server.cli.terminal import format_table
from drafthouse_server.config import Config
from drafthouse_server.engine.loading import engine_version

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "aiperf-venv"
WORK = ROOT / "build" / "aiperf"
PLUGIN = ROOT / "bench" / "aiperf_drafthouse"
SDK = ROOT / "clients" / "python"
N_CHARS = 400
AIPERF_S = 600


@dataclass(frozen=True, slots=True)
class Seen:
    """What a load generator has seen. Times in ms."""

    name: str
    """Which one."""
    tokens_per_s: float
    """Output tokens per second."""
    ttft_p50: float
    """Time to first token, median."""
    ttft_p95: float
    """Time to first token, 95th percentile."""
    tpot_p50: float
    """(Last token − first token) / (tokens − 1) of a request, median."""
    n_requests: int
    """Requests that ended well."""


def make_venv() -> Path:
    """Makes aiperf's virtual environment, or keeps the one that fits. Returns its program.

    Raises:
        BenchError: pip failed.
    """
    sources = [*sorted(PLUGIN.rglob("*.*")), *sorted((SDK / "drafthouse").rglob("*.py"))]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file()))
    stamp = VENV / "drafthouse.stamp"
    program = VENV / "bin" / "aiperf"
    if program.exists() and stamp.exists() and stamp.read_text() == state.hexdigest():
        return program
    sys.stderr.write(f"installing aiperf into {VENV.relative_to(ROOT)} (1.2 GB) …\n")
    if not (VENV / "bin" / "pip").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    again = ["--force-reinstall", "--no-deps"] if program.exists() else []
    run = subprocess.run([*pip, *again, str(SDK), str(PLUGIN)], check=False)
    if run.returncode or not program.exists():
        raise BenchError("aiperf cannot be installed; pip's words are above")
    stamp.write_text(state.hexdigest())
    return program


def write_inputs(prompts: list[str]) -> tuple[Path, Path]:
    """Writes the prompts and the tokenizer as aiperf reads them. Returns both paths."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
    tokenizer = WORK / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    tokenizer.joinpath("tokenizer.json").write_bytes(
        (ROOT / "models" / "tokenizer.json").read_bytes()
    )
    tokenizer.joinpath("tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return path, tokenizer


def run_aiperf(program: Path, address: str, options: argparse.Namespace, n_requests: int) -> Seen:
    """Runs aiperf against the server.

    Raises:
        BenchError: it fails, or leaves no result.
    """
    inputs, tokenizer = WORK / "prompts.jsonl", WORK / "tokenizer"
    artifacts = WORK / "artifacts"
    command = [str(program), "profile", "--model", "demo", "--url", f"http://{address}"]
    command += ["--transport", "drafthouse", "--endpoint-type", "completions", "--streaming"]
    command += ["--input-file", str(inputs), "--custom-dataset-type", "single_turn"]
    command += ["--output-tokens-mean", str(options.n_output), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0.0"]
    command += ["--concurrency", str(options.streams), "--request-count", str(n_requests)]
    command += ["--tokenizer", str(tokenizer), "--use-server-token-count", "--ui", "simple"]
    command += ["--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"]
    command += ["--record-processors", "1", "--artifact-dir", str(artifacts)]
    command += ["--dataset-sampling-strategy", "sequential"]
    environment = os.environ | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=AIPERF_S, check=False
    )
    (WORK / "aiperf.log").write_text(run.stdout + run.stderr)
    found = sorted(artifacts.rglob("profile_export_aiperf.json"), key=lambda p: p.stat().st_mtime)
    if run.returncode or not found:
        lines = (run.stdout + run.stderr).strip().splitlines()[-12:]
        raise BenchError("aiperf failed:\n" + "\n".join(lines))
    return read_aiperf(json.loads(found[-1].read_text()))


def read_aiperf(content: dict[str, Any]) -> Seen:
    """Returns what aiperf's own JSON says.

    Raises:
        BenchError: a metric is missing.
    """
    try:
        return Seen(
            "aiperf",
            float(content["output_token_throughput"]["avg"]),
            float(content["time_to_first_token"]["p50"]),
            float(content["time_to_first_token"]["p95"]),
            float(content["inter_token_latency"]["p50"]),
            int(content["request_count"]["avg"]),
        )
    except (KeyError, TypeError) as error:
        raise BenchError(f"aiperf's result lacks {error}") from None


def summarize(name: str, load: PeerLoad) -> Seen:
    """Returns what our own load generator has seen, by aiperf's definitions."""
    ttfts = [trace.ttft_s for trace in load.traces if trace.ttft_s is not None]
    tpots = [
        (trace.arrivals[-1][0] - trace.arrivals[0][0]) / (trace.n_output - 1)
        for trace in load.traces
        if trace.n_output > 1
    ]
    return Seen(
        name,
        sum(trace.n_output for trace in load.traces) / load.elapsed_s,
        percentile(ttfts, 0.5) * 1000,
        percentile(ttfts, 0.95) * 1000,
        percentile(tpots, 0.5) * 1000,
        sum(trace.is_finished for trace in load.traces),
    )


async def measure(program: Path, options: argparse.Namespace) -> list[Seen]:
    """Measures: ours, aiperf, ours."""
    texts = [
        p["text"] for p in json.loads((ROOT / "models" / "prompts.json").read_text())["prompts"]
    ]
    n_requests = options.streams * options.waves
    prompts = [texts[i % len(texts)][:N_CHARS] for i in range(n_requests)]
    write_inputs(prompts)
    config = Config(
        model=str(ROOT / "models" / "tiny-mimo2-f16.gguf"),
        name="demo",
        draft_type=options.draft,
        parallel=options.streams,
        threads=options.threads,
        prefix_cache=False,  # the same prompts are sent again: they must be computed again
        log_level="warning",
    )
    async with (
        ServerProcess(config, options.server_flags).run() as server,
        drafthouse.AsyncClient(server.target, retry=None) as client,
    ):
        tokens = [await client.tokenize(text, add_special=True) for text in prompts]
        running = Running("drafthouse", server.pid, GrpcClient(client), GrpcClient(client))
        await run_closed(running, tokens[: options.streams], 8, options.streams)

        async def own(name: str) -> Seen:
            return summarize(
                name, await run_closed(running, tokens, options.n_output, options.streams)
            )

        first = await own("ours, before")
        aiperf = await asyncio.to_thread(run_aiperf, program, server.target, options, n_requests)
        return [first, aiperf, await own("ours, after")]


def main() -> int:
    """Measures and prints the table; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(prog="make bench-aiperf", description=__doc__)
    parser.add_argument("--streams", type=count, default=8)
    parser.add_argument("--waves", type=count, default=10, help="requests of each stream")
    parser.add_argument("--n-output", type=count, default=96)
    parser.add_argument("--draft", default="mtp")
    parser.add_argument("--threads", type=count, default=max(1, n_cores() - 1))
    parser.add_argument("--server-flags", type=shlex.split, default=[])
    options = parser.parse_args()
    machine = describe_machine(options.threads, engine_version(), " ".join(sys.argv))
    try:
        seen = asyncio.run(measure(make_venv(), options))
    except (BenchError, drafthouse.DrafthouseError, subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(f"{machine.cpu}, {machine.n_cores} cores; load average {machine.load_average:.2f}")
    print(f"dense demo model, {options.draft}, {options.streams} streams, times in ms")
    header = ("load", "requests", "tokens/s", "TTFT p50", "p95", "TPOT p50")
    rows = [
        [
            each.name,
            str(each.n_requests),
            f"{each.tokens_per_s:.0f}",
            f"{each.ttft_p50:.1f}",
            f"{each.ttft_p95:.1f}",
            f"{each.tpot_p50:.2f}",
        ]
        for each in seen
    ]
    print("\n".join(format_table(header, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
