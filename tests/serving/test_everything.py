"""Requests of every kind at once, on servers of every kind, drawn at random: the demo models."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from tests.serving.test_crowd import all_given_back
from tests.support.demo import config, prompts, serving
from tests.support.windows import windowed

from drafthouse import (
    AsyncClient,
    DeadlineExceeded,
    DrafthouseError,
    Dry,
    GenerateOptions,
    NoTokenAllowed,
    Xtc,
)
from drafthouse_server.config import Config

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

N_REQUESTS = 150
SECONDS = 2.0
GRAMMARS = (
    'root ::= ("a" | "b" | "cd" | " ")+ "\\n"',
    'root ::= [a-z ]{1,40} "."',
    'root ::= "{" "\\"k\\"" ":" [0-9]+ "}"',
)
DRAFTS = {
    "dense": ("none", "mtp", "eagle3", "simple", "ngram-simple"),
    "hybrid": ("none", "mtp", "eagle3"),
    "windowed": ("none", "mtp"),
}


def drawn_config(chance: random.Random, target: str) -> Config:
    """Few slots, small caches, and shared cells that run out."""
    draft_type = chance.choice(DRAFTS[target])
    parallel, n_tokens = chance.choice([2, 3, 4, 8, 16]), chance.choice([256, 512, 1024])
    settings: dict[str, object] = {
        "parallel": parallel,
        "max_model_len": n_tokens,
        "draft_policy": chance.choice(["fixed", "adaptive"]),
        "prompt_lookup": draft_type != "none" and chance.random() < 0.4,
        "prefix_cache_mib": chance.choice([0, 1, 64]),
        "queue_size": 512,
        "tenant_queue_size": 512,
    }
    if chance.random() < 0.5:
        n_cells = max(n_tokens, parallel * n_tokens // chance.choice([1, 2, 4]))
        settings |= {"kv_unified": True, "ctx_size": n_cells}
    if target == "windowed":
        settings["model"] = str(windowed(chance.choice([24, 64])))
        if chance.random() < 0.5:
            settings["swa_full"] = False
    return config("dense" if target == "windowed" else target, draft_type, **settings)


def drawn_prompt(chance: random.Random, n_most: int) -> list[int]:
    """One of three texts, cut anywhere, and something of its own."""
    text = prompts((900,) * 3)[chance.randrange(3)]
    rest = chance.choices(range(40, 400), k=chance.randrange(1, 10))
    return [*text[: chance.randrange(1, min(n_most, 880))], *rest]


def drawn_options(
    chance: random.Random, n_output_most: int, *, has_drafter: bool
) -> GenerateOptions:
    options: GenerateOptions = {
        "max_output_tokens": chance.choice([None, *[chance.randrange(1, n_output_most)] * 9]),
        "temperature": chance.choice([0.0, 0.8, 1.5]),
        "priority": chance.choice([0, 0, 0, 5, -5]),
        "end_user": chance.choice(["", "", "somebody"]),
    }
    if chance.random() < 0.3:
        options["grammar"] = chance.choice(GRAMMARS)
    elif chance.random() < 0.3:
        options["ignore_end_token"] = True
    some: list[GenerateOptions] = [
        {"stop": [chance.choice(["e", "the", "."])]},
        {"log_probabilities": True},
        {"progress": True},
        {"repeat_penalty": 1.2},
        {"dry": Dry()},
        {"xtc": Xtc(probability=0.5)},
        {"logit_bias": {5: -100.0, 7: 3.0}},
        {"speculation": "off"},
        {"max_draft_tokens": chance.randrange(3) if has_drafter else 0},
    ]
    for more in some:
        if chance.random() < 0.15:
            options |= more
    return options


async def request(client: AsyncClient, chance: random.Random, settings: Config) -> str:
    """Sends one, and reads it, or some of it; returns how it ended."""
    await asyncio.sleep(chance.random() * SECONDS)
    n_tokens = settings.max_model_len
    prompt = drawn_prompt(chance, n_tokens - 60)
    options = drawn_options(
        chance, min(60, n_tokens - len(prompt)), has_drafter=settings.draft_type != "none"
    )
    timeout = chance.choice([None] * 6 + [chance.random() * 2])
    n_read = chance.choice([None] * 3 + [chance.randrange(5)])
    stream = client.generate(prompt, timeout=timeout, **options)
    try:
        if n_read == 0:
            await asyncio.sleep(chance.random() * 0.3)
            await stream.aclose()
            return "left"
        n = 0
        async for _ in stream:
            n += 1
            if n == n_read:
                await stream.aclose()
                return "left"
    except DrafthouseError as error:
        is_own = isinstance(error, NoTokenAllowed) and "logit_bias" in options
        if not is_own and not isinstance(error, DeadlineExceeded):
            raise AssertionError(f"{options} of {len(prompt)} tokens") from error
        return type(error).__name__
    return "whole"


@pytest.mark.parametrize(
    ("target", "seed"), [("dense", 1), ("dense", 2), ("hybrid", 3), ("windowed", 4)]
)
async def test_no_request_fails_by_what_others_ask_for_and_nothing_is_left(
    target: str, seed: int
) -> None:
    chance = random.Random(seed)
    settings = drawn_config(chance, target)
    async with serving(settings) as (client, loop):
        ends = await asyncio.gather(
            *(request(client, random.Random(f"{seed} {i}"), settings) for i in range(N_REQUESTS))
        )
        await all_given_back(loop)
        assert loop.is_healthy
    counts = Counter(ends)
    assert counts["whole"] > N_REQUESTS / 3
    assert counts["left"] > 0
