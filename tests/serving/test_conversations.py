"""Conversations on the demo models behind a server: later turns go on from what is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.support.demo import Referee, n_cells_used, prompts, serving
from tests.support.demo import config as demo_config

from drafthouse import AsyncClient, ChatMessage, Result
from drafthouse_server.config import Config
from drafthouse_server.scheduling.checkpoints import Checkpoints

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_TALKS = 3
N_TURNS = 3
N_FIRST = 120
"""Tokens of the first prompt of a conversation."""
N_MORE = 45
"""Tokens that the user adds before each later turn."""
N_OUTPUT = 32
ACCEPTANCE_SHARE = 0.9
"""Of the drafts accepted without reuse: the first ones after it are as good."""

CASES = [("dense", "none"), ("dense", "mtp"), ("hybrid", "none"), ("hybrid", "mtp")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def referee(case: tuple[str, str]) -> Iterator[Referee]:
    found = Referee(case[0])
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _snapshots_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast this machine is at this moment must not decide what a test sees."""
    monkeypatch.setattr(Checkpoints, "_is_cheap", lambda *_: True)


def settings(case: tuple[str, str], **more: object) -> Config:
    # Two slots for three conversations: some of what they had must come back from host memory.
    target, draft_type = case
    return demo_config(target, draft_type, parallel=2, max_model_len=512, **more)


async def ask(client: AsyncClient, prompt: list[int]) -> Result:
    return await client.generate(
        tuple(prompt), max_output_tokens=N_OUTPUT, temperature=0.0, ignore_end_token=True
    )


async def talk(
    client: AsyncClient, i: int, *, is_rewritten: bool = False
) -> list[tuple[list[int], Result]]:
    """Holds a conversation; returns its turns.

    Args:
        client: Of the server.
        i: Which conversation.
        is_rewritten: The answers come back otherwise than they were generated, as they do where
            a client strips them or a template cuts thoughts out.
    """
    texts = prompts((N_FIRST,) * N_TALKS + (N_MORE,) * N_TURNS)
    prompt, turns = list(texts[i]), []
    for turn in range(N_TURNS):
        result = await ask(client, prompt)
        turns.append((prompt, result))
        answer = list(result.token_ids[3:] if is_rewritten else result.token_ids)
        prompt = [*prompt, *answer, *texts[N_TALKS + turn]]
    return turns


def accepted(talks: list[list[tuple[list[int], Result]]]) -> float:
    """Returns the accepted share of the drafts in all turns but the first."""
    counts = [result.speculation for turns in talks for _, result in turns[1:]]
    return sum(c.n_accepted for c in counts) / sum(c.n_drafted for c in counts)


@pytest.mark.parametrize("is_rewritten", [False, True], ids=["as generated", "rewritten"])
async def test_three_turns_reuse_what_was_computed_and_change_nothing(
    case: tuple[str, str], referee: Referee, *, is_rewritten: bool
) -> None:
    async with serving(settings(case)) as (client, loop):
        talks = [await talk(client, i, is_rewritten=is_rewritten) for i in range(N_TALKS)]
        counts = loop.statistics().scheduler
        assert await n_cells_used(loop) == counts.n_retained_cells
    async with serving(settings(case, prefix_cache=False)) as (client, _):
        plain = [[(prompt, await ask(client, prompt)) for prompt, _ in turns] for turns in talks]
    n_ties = 0
    for turns, plain_turns in zip(talks, plain, strict=True):
        for turn, ((prompt, found), (_, expected)) in enumerate(
            zip(turns, plain_turns, strict=True)
        ):
            n_ties += referee.compare(prompt, expected.token_ids, found.token_ids) is not None
            n_reused = found.usage.reused_prompt_tokens
            assert expected.usage.reused_prompt_tokens == 0
            if turn == 0:
                assert n_reused == 0
            elif is_rewritten and case[0] == "hybrid":
                # From the checkpoint near the end of the last prompt, whatever came after.
                assert n_reused == len(turns[turn - 1][0]) - 16
            else:
                n_same = len(turns[turn - 1][0]) + (0 if is_rewritten else N_OUTPUT - 1)
                assert n_reused >= n_same
    # A prompt computed in other pieces rounds otherwise: two logits 0.0001 apart change places.
    assert n_ties <= 1
    n_reused = sum(r.usage.reused_prompt_tokens for turns in talks for _, r in turns)
    assert counts.n_reused == n_reused
    assert counts.n_prefix_hits == N_TALKS * (N_TURNS - 1)
    assert counts.n_prefix_lookups == N_TALKS * N_TURNS
    assert counts.n_reused > 0.4 * counts.n_prefix_tokens
    if case[1] != "none":
        assert accepted(talks) >= ACCEPTANCE_SHARE * accepted(plain)


async def test_conversations_at_once_share_slots_and_host_memory(
    case: tuple[str, str], referee: Referee
) -> None:
    async with serving(settings(case)) as (client, loop):
        talks = await asyncio.gather(*(talk(client, i) for i in range(N_TALKS)))
        counts = loop.statistics().scheduler
    assert counts.n_prefix_hits >= N_TALKS  # of twice as many: they take turns in the slots
    async with serving(settings(case, prefix_cache=False)) as (client, _):
        for turns in talks:
            for prompt, found in turns:
                expected = await ask(client, prompt)
                referee.compare(prompt, expected.token_ids, found.token_ids)


async def test_another_tenant_never_goes_on_from_what_it_has_not_sent(
    case: tuple[str, str], free_port: int
) -> None:
    shared = settings(case, api_keys=("one:key-one", "two:key-two"), port=free_port)
    async with serving(shared, "key-one") as (one, loop):
        (_, first), *_ = await talk(one, 0)
        async with AsyncClient(f"127.0.0.1:{free_port}", api_key="key-two", retry=None) as two:
            turns = await talk(two, 0)
            assert turns[0][1].usage.reused_prompt_tokens == 0
            assert turns[0][1].token_ids == first.token_ids
            assert turns[1][1].usage.reused_prompt_tokens > 0  # its own
        assert loop.statistics().scheduler.n_prefix_hits == 2 * (N_TURNS - 1)


async def test_a_chat_of_three_turns_reuses_its_history(case: tuple[str, str]) -> None:
    """Text goes out and comes back: what is the same in tokens is not computed again."""
    async with serving(settings(case)) as (client, _):
        texts = prompts((N_FIRST, N_MORE, N_MORE))
        messages: list[ChatMessage] = []
        for turn, tokens in enumerate(texts):
            messages.append(ChatMessage("user", await client.detokenize(tokens)))
            result = await client.generate(messages, max_output_tokens=N_OUTPUT, temperature=0.0)
            messages.append(ChatMessage("assistant", result.text))
            assert (result.usage.reused_prompt_tokens > N_FIRST / 2) is (turn > 0)
