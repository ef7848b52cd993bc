"""Two floods of weights 1 and 3, and a flood beside a polite tenant, over gRPC.

    drafthouse-bench fair-shares [--rounds 3] [--seconds 20] [--streams 40] [--timeline FILE]
        [--model dense] [--n-prompt 16]

Two floods: each keeps so many streams open, whose prompts and outputs differ in length between the
tenants; service, prompt + 2 x output as it arrives, is to be 1 : 3 within 5 %. Without drafts:
their rejected tokens a client sees only at the end.

A flood beside a polite tenant: that one asks every two seconds for one token of a new prompt of
--n-prompt tokens, alone and beside a flood of the other one. The 95th percentile of its time to
first token is to be at most twice what it is alone. Clients of the floods are niced: on a real
network they have machines of their own. The server's defaults.

The bars are printed, and the exit code is 1 where one is missed; figures depend on the machine, so
this is a program and no test. The bounds without a clock: tests/scheduling/test_fairness.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import drafthouse
from drafthouse_bench.peers.case import find_target
from drafthouse_bench.process import ServerProcess
from drafthouse_bench.report import percentile
from drafthouse_server.config import Config

_KEYS = {name: f"{name}-0123456789abcdef" for name in ("light", "heavy", "polite")}
_WEIGHTS = {"light": 1, "heavy": 3, "polite": 1}
_LENGTHS = {"light": (64, 48), "heavy": (16, 96)}  # tokens of a prompt, mean of an output
_PAUSE_S = 2.0
_WARM_S = 3.0
_SHARE_BAR, _TTFT_BAR = 0.05, 2.0


@contextlib.asynccontextmanager
async def _serving(
    folder: Path, model: str, timeline: Path | None = None, **settings: object
) -> AsyncIterator[str]:
    path = folder / "drafthouse.toml"
    keys = ", ".join(f'"{name}:{key}"' for name, key in _KEYS.items())
    sections = "".join(f"[tenants.{n}]\nweight = {w}\n" for n, w in _WEIGHTS.items())
    path.write_text(f"api_keys = [{keys}]\n{sections}", encoding="utf-8")
    path.chmod(0o600)
    config = Config(model=str(find_target(model).path), **settings)  # type: ignore[arg-type]
    async with ServerProcess(config, ["--config", str(path)], timeline).run() as server:
        yield server.target


async def _flood(asked: argparse.Namespace) -> None:
    """Keeps streams open and prints the service that arrived after the warm-up."""
    target, tenant = asked.flood
    chance, service = random.Random(tenant), 0.0
    n_prompt, n_output = _LENGTHS[tenant]
    begin = time.monotonic() + asked.warm
    end = begin + asked.seconds

    async with drafthouse.AsyncClient(target, api_key=_KEYS[tenant]) as client:

        async def one() -> None:
            nonlocal service
            while time.monotonic() < end:
                prompt = [chance.randint(5, 1000) for _ in range(n_prompt)]
                n = chance.randint(n_output // 2, 3 * n_output // 2)
                is_first = True
                async with client.generate(
                    prompt, max_output_tokens=n, ignore_end_token=True
                ) as stream:
                    async for chunk in stream:
                        now = time.monotonic()
                        if now >= end:
                            return
                        got = 2.0 * len(chunk.token_ids) + is_first * n_prompt
                        is_first = False
                        service += got if now >= begin else 0.0

        await asyncio.gather(*(one() for _ in range(asked.streams)))
    print(json.dumps(service), flush=True)


@contextlib.contextmanager
def _flooding(
    target: str, tenant: str, n_streams: int, seconds: float, warm_s: float = _WARM_S
) -> Iterator[subprocess.Popen[str]]:
    command = ["nice", "-n", "10", sys.executable, "-m", "drafthouse_bench", "fair-shares"]
    command += ["--flood", target, tenant, "--streams", str(n_streams)]
    command += ["--seconds", str(seconds), "--warm", str(warm_s)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONUNBUFFERED="1")
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


async def _served(process: subprocess.Popen[str]) -> float:
    text, _ = await asyncio.to_thread(process.communicate)
    return float(json.loads(text))


async def _two_floods(folder: Path, model: str, n_streams: int, seconds: float) -> float:
    """Returns the heavy one's service over the light one's."""
    async with _serving(folder, model, draft_type="none") as target:
        with (
            _flooding(target, "light", n_streams, seconds) as light,
            _flooding(target, "heavy", n_streams, seconds) as heavy,
        ):
            got = await asyncio.gather(_served(light), _served(heavy))
    return got[1] / got[0]


async def _polite(target: str, n_prompt: int, seconds: float) -> list[float]:
    """Returns the times to first token of one request every two seconds, each a new prompt."""
    chance, found = random.Random(), []
    async with drafthouse.AsyncClient(target, api_key=_KEYS["polite"]) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            prompt = [chance.randint(5, 1000) for _ in range(n_prompt)]
            started = time.monotonic()
            async with client.generate(
                prompt, max_output_tokens=1, ignore_end_token=True
            ) as stream:
                await anext(aiter(stream))
                found.append(time.monotonic() - started)
            await asyncio.sleep(max(0.0, started + _PAUSE_S - time.monotonic()))
    return found


async def _beside_a_flood(
    folder: Path, asked: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Returns the polite tenant's times alone and beside the flood."""
    n_prompt, seconds = asked.n_prompt, asked.seconds
    async with _serving(folder, asked.model, asked.timeline) as target:
        await _polite(target, n_prompt, _PAUSE_S)
        alone = await _polite(target, n_prompt, seconds)
        with _flooding(target, "light", asked.streams, seconds + 60, 0.0):
            await asyncio.sleep(_WARM_S)
            beside = await _polite(target, n_prompt, seconds)
    return alone, beside


async def _measure(asked: argparse.Namespace) -> bool:
    ratios, alone, beside = [], list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(asked.rounds):
            if asked.timeline is None:
                ratios.append(await _two_floods(folder, asked.model, asked.streams, asked.seconds))
            times = await _beside_a_flood(folder, asked)
            alone += times[0]
            beside += times[1]
    has_shares = True
    if ratios:
        ratio = statistics.median(ratios)
        has_shares = abs(ratio / 3 - 1) <= _SHARE_BAR
        shown = ", ".join(f"{each:.2f}" for each in ratios)
        print(f"two floods of weights 1 and 3: 1 : {ratio:.2f} ({shown}): {_said(has_shares)}")
    times_ms = [
        [percentile(times, share) * 1e3 for share in (0.5, 0.95)] for times in (alone, beside)
    ]
    is_quick = times_ms[1][1] <= _TTFT_BAR * times_ms[0][1]
    print(
        f"a flood beside one request every {_PAUSE_S:g} s: first token alone"
        f" {times_ms[0][0]:.1f} ms (p95 {times_ms[0][1]:.1f}), beside {times_ms[1][0]:.1f} ms"
        f" (p95 {times_ms[1][1]:.1f}, {times_ms[1][1] / times_ms[0][1]:.2f} x) of {len(alone)}:"
        f" {_said(is_quick)}"
    )
    return has_shares and is_quick


def _said(is_met: bool) -> str:
    return "holds" if is_met else "missed"


def main() -> int:
    """Measures, or is a flood; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=40, help="of each flood")
    parser.add_argument("--model", default="dense", help="a demo model, or one of build/bench")
    parser.add_argument("--n-prompt", type=int, default=16, help="tokens of the polite prompts")
    parser.add_argument(
        "--timeline",
        type=Path,
        help="a file for what the server of the last flood notes of each request"
        " (`drafthouse-bench timeline` prints it); without the two floods",
    )
    parser.add_argument("--flood", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=float, default=_WARM_S, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.flood:
        asyncio.run(_flood(asked))
        return 0
    is_met = asyncio.run(_measure(asked))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
