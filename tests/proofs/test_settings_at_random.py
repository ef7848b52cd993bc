"""Servers whose settings are drawn at random within their rules: each serves, or says why not.

None dies, hangs or answers a request with a fault of its own, and tokens are those of a server
without settings.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.built import needs_extension
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, TIE_LOGITS, Referee
from tests.support.ports import free_port
from tests.support.rpc_server import rpc_server

import drafthouse
from drafthouse_server.config import SETTINGS
from drafthouse_server.setting import Setting

pytestmark = [*needs_extension(), pytest.mark.timeout(3000)]

FEW, MANY = 2, 60
START_S = 120.0
N_OUTPUT = 16
PROMPTS = (
    "def parse(text):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    " + "x = 1\n    " * 12,
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
)

NUMBERS = (0, 0.01, 0.5, 1, 2, 3, 5, 16, 17, 64, 100, 400, 513, 4096, 20_000, 10**6, 1 << 26)
MOST = {
    "parallel": 200, "ctx_size": 40_000, "max_model_len": 20_000, "batch_size": 8192,
    "ubatch_size": 8192, "draft_max": 64, "text_workers": 4, "threads": 8, "threads_batch": 8,
    "prefix_cache_mib": 1000, "preempted_mib": 1000, "outbox_kib": 4096, "front_mib": 4096,
    "drain_timeout_s": 5,
}  # fmt: skip
"""What a machine of tests has room for."""
LEAST = {
    "max_model_len": 200, "ctx_size": 2000, "front_mib": 64, "max_message_bytes": 4096,
    "max_concurrent_streams": 32, "first_message_timeout_s": 1, "slow_reader_timeout_s": 5,
    "max_connection_age_s": 100, "max_connection_age_grace_s": 100, "drain_timeout_s": 1,
}  # fmt: skip
"""Below, gRPC itself refuses or ends calls, or what is measured is the speed of the machine."""

OTHERS = ("rope_", "yarn_", "cache_type_", "flash_", "port", "metrics_port", "admin_port", "synth_")
"""Settings that change what a model computes, or that say where a server is found."""


def test_each_serves_or_says_why_not(tmp_path: Path, *, is_whole: bool) -> None:
    for seed in range(MANY if is_whole else FEW):
        check(seed, [], tmp_path)


def test_on_devices_too(tmp_path: Path, *, is_whole: bool) -> None:
    """Of RPC servers: the settings that place a model mean something there."""
    with rpc_server(tmp_path) as one, rpc_server(tmp_path) as other:
        for seed in range(1000, 1000 + (MANY if is_whole else FEW)):
            places = [f"{one.endpoint},{other.endpoint}", one.endpoint][seed % 2]
            check(seed, ["--rpc", places], tmp_path)


def check(seed: int, flags: Sequence[str], folder: Path) -> None:
    """Starts a server with drawn settings, has it generate, and ends it."""
    chance = random.Random(seed)
    target, models = drawn_models(chance)
    drawn = [*models, *flags, *drawn_flags(chance, many=not flags)]
    if flags:
        drawn += drawn_places(chance)
    port, log = free_port(), folder / f"{seed}.log"
    command = [sys.executable, "-m", "drafthouse_server", "serve", "--port", str(port), *drawn]
    environment = os.environ | {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    told = f"seed {seed}: {' '.join(drawn)}"
    try:
        if listens(process, log, told):
            judge(target, asyncio.run(answers(f"127.0.0.1:{port}")), told)
            assert process.poll() is None, f"{told}\n{log.read_text()}"
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0, f"{told}\n{log.read_text()}"
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text(), f"{told}\n{log.read_text()}"


def drawn_models(chance: random.Random) -> tuple[str, list[str]]:
    target = chance.choice(["dense", "hybrid"])
    kinds = ["none", "auto", "mtp", "ngram-simple", "ngram-mod", "eagle3"]
    kind = chance.choice([*kinds, "simple"] if target == "dense" else kinds)
    drafts = {"eagle3": EAGLE3[target], "simple": SIMPLE}
    flags = ["--model", str(MODELS / TARGETS[target]), "--draft-type", kind]
    if kind in drafts:
        flags += ["--model-draft", str(MODELS / drafts[kind])]
    return target, flags


def drawn_flags(chance: random.Random, *, many: bool) -> list[str]:
    drawable = [it for it in SETTINGS.values() if not it.name.startswith(OTHERS)]
    n_drawn = chance.randrange(3, 30) if many else chance.randrange(5)
    flags = []
    for setting in chance.sample(drawable, n_drawn):
        if values := [*allowed(setting)]:
            value = chance.choice(values)
            name = setting.flag if value is not False else f"--no-{setting.flag[2:]}"
            flags += [name] if setting.is_switch else [name, str(value)]
    return flags


def allowed(setting: Setting) -> Iterator[object]:
    """Yields the values that are drawn of a setting; none of texts such as names and files."""
    default = setting.default
    if setting.is_switch:
        yield from (True, False)
    elif setting.may_be_number:
        yield from ("auto", "all", 0, 2)
    elif setting.rule.choices:
        yield from setting.rule.choices
    elif isinstance(default, int | float):
        least, most = LEAST.get(setting.name, 0), MOST.get(setting.name, max(NUMBERS))
        for number in NUMBERS:
            value = type(default)(number)
            if setting.rule.is_valid(value) and (least <= value <= most or value == default):
                yield value


def drawn_places(chance: random.Random) -> list[str]:
    """Draws where a model lies; `split_mode` tensor often, in which llama.cpp may end a process."""
    flags = ["--split-mode", chance.choice(["layer", "none", "row", "tensor", "tensor"])]
    if chance.random() < 0.5:
        flags += ["--gpu-layers", chance.choice(["all", "1", "4", "99"])]
    if chance.random() < 0.3:
        flags += ["--device", chance.choice(["RPC0", "RPC1,RPC0", "none"])]
    if chance.random() < 0.3:
        flags += ["--tensor-split", chance.choice(["3,1", "0,1", "1"])]
    if chance.random() < 0.3:
        flags += ["--override-tensor", chance.choice(["ffn=CPU", "blk.[0-2]=CPU", "output=CPU"])]
    return flags


def listens(process: subprocess.Popen[bytes], log: Path, told: str) -> bool:
    """Waits until a server listens, or has ended with a sentence."""
    ends_s = time.monotonic() + START_S
    while process.poll() is None:
        if "listening at" in log.read_text():
            return True
        assert time.monotonic() < ends_s, f"{told}\n{log.read_text()}"
        time.sleep(0.05)
    assert process.returncode in (1, 2), f"{told}\n{log.read_text()}"
    assert "\ndrafthouse: " in f"\n{log.read_text()}", f"{told}\n{log.read_text()}"
    return False


async def answers(target: str) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns prompts with their greedy answers; none where a limit that was drawn refuses one.

    Others are sampled and left beside them.

    Raises:
        DrafthouseError: a fault that is none of the client's, nor of a limit.
    """
    found = set()
    async with drafthouse.AsyncClient(target, retry=None) as client:

        async def one(prompt: str, *, is_greedy: bool, is_left: bool = False) -> None:
            try:
                stream = client.generate(
                    prompt,
                    temperature=0.0 if is_greedy else 0.9,
                    seed=1,
                    max_output_tokens=N_OUTPUT,
                )
                tokens: list[int] = []
                async for chunk in stream:
                    tokens += chunk.token_ids
                    if is_left:
                        return await stream.aclose()
                if is_greedy:
                    found.add((tuple(await client.tokenize(prompt)), tuple(tokens)))
            except drafthouse.DrafthouseError as error:
                faults = (drafthouse.InternalError, drafthouse.EngineUnhealthy)
                if isinstance(error, faults) or not error.reason:  # the server is there and says it
                    raise

        async with asyncio.timeout(START_S):
            for _ in range(2):
                await asyncio.gather(
                    *(one(prompt, is_greedy=True) for prompt in PROMPTS),
                    *(one(prompt * 2, is_greedy=False) for prompt in PROMPTS),
                    *(one(prompt, is_greedy=False, is_left=True) for prompt in PROMPTS),
                )
    return found


def judge(target: str, found: set[tuple[tuple[int, ...], tuple[int, ...]]], told: str) -> None:
    """Sees that each greedy answer is the model's own, token by token."""
    referee = Referee(target)
    try:
        for prompt, tokens in found:
            for i, token in enumerate(tokens):
                logits = referee.logits([*prompt, *tokens[:i]])
                gap = float(logits.max() - logits[token])
                assert gap <= TIE_LOGITS, f"{told}\ntoken {i} is {gap} below the best"
    finally:
        referee.close()
