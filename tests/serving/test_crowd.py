"""Many streams at once on the demo models: the same tokens and the same acceptance as alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.support.demo import Referee, Tie, n_cells_used, prompts, serving
from tests.support.demo import config as demo_config
from tests.support.windows import windowed

from drafthouse import AsyncClient, NoTokenAllowed, Result
from drafthouse_server.serving.loop import StepLoop

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_STREAMS = 32
N_OUTPUT = 60
LENGTHS = tuple(8 + round(i * (900 - 8) / (N_STREAMS - 1)) for i in range(N_STREAMS))
DRAFT_TYPES = ("none", "mtp", "eagle3", "simple")
ACCEPTANCE_POINTS = 0.03
LEAST_ACCEPTANCE = {"mtp": 0.5, "eagle3": 0.5, "simple": 0.2}

_references: dict[str, list[Result]] = {}


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def referee(target: str) -> Iterator[Referee]:
    found = Referee(target)
    yield found
    found.close()


async def generate(client: AsyncClient, prompt: Sequence[int], n_output: int = N_OUTPUT) -> Result:
    return await client.generate(prompt, max_output_tokens=n_output, temperature=0.0)


async def alone(client: AsyncClient, crowd: Sequence[Sequence[int]]) -> list[Result]:
    return [await generate(client, prompt) for prompt in crowd]


async def reference(target: str) -> list[Result]:
    """Returns what each prompt yields alone and without speculation."""
    if target not in _references:
        async with serving(demo_config(target, "none")) as (client, _):
            _references[target] = await alone(client, prompts(LENGTHS))
    return _references[target]


def acceptance(results: Sequence[Result]) -> float:
    drafted = sum(result.speculation.n_drafted for result in results)
    return sum(result.speculation.n_accepted for result in results) / drafted


def compare(referee: Referee, expected: Sequence[Result], found: Sequence[Result]) -> list[Tie]:
    """Returns the ties; fails where outputs part without one."""
    ties = []
    for i, (prompt, a, b) in enumerate(zip(prompts(LENGTHS), expected, found, strict=True)):
        tie = referee.compare(prompt, a.token_ids, b.token_ids, i)
        ties += [tie] if tie else []
    return ties


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
async def test_a_crowd_of_32_gets_the_tokens_and_the_acceptance_of_each_alone(
    target: str, draft_type: str, referee: Referee, record_property: Callable[[str, object], None]
) -> None:
    expected = await reference(target)
    crowd = prompts(LENGTHS)
    async with serving(demo_config(target, draft_type)) as (client, loop):
        found = await asyncio.gather(*(generate(client, prompt) for prompt in crowd))
        singles = await alone(client, crowd) if draft_type != "none" else expected
        assert await n_cells_used(loop) == loop.statistics().scheduler.n_retained_cells
    assert [result.usage.prompt_tokens for result in found] == list(LENGTHS)
    ties = compare(referee, expected, found) + compare(referee, expected, singles)
    record_property("ties", [f"{tie.prompt}:{tie.position} ({tie.gap:.4f})" for tie in ties])
    # Ties are rare: more than a few would be a fault that happens to stay small.
    assert len({tie.prompt for tie in ties}) <= 3
    if draft_type != "none":
        rate, rate_alone = acceptance(found), acceptance(singles)
        record_property("acceptance", f"{rate:.3f} in the crowd, {rate_alone:.3f} alone")
        assert rate == pytest.approx(rate_alone, abs=ACCEPTANCE_POINTS)
        assert rate > LEAST_ACCEPTANCE[draft_type]


@pytest.mark.parametrize(
    ("target", "draft_policy"), [("dense", "adaptive"), ("hybrid", "fixed")], indirect=["target"]
)
async def test_drafts_that_were_looked_up_change_no_token_of_a_crowd(
    target: str, draft_policy: str, referee: Referee
) -> None:
    expected = await reference(target)
    crowd = prompts(LENGTHS)
    settings = demo_config(
        target, "mtp", prompt_lookup=True, prompt_lookup_pool=8192, draft_policy=draft_policy
    )
    ties = []
    async with serving(settings) as (client, loop):
        for _ in range(2):  # the second time from what was said the first time
            found = await asyncio.gather(*(generate(client, prompt) for prompt in crowd))
            ties += compare(referee, expected, found)
        sources = loop.statistics().by_source
        assert await n_cells_used(loop) == loop.statistics().scheduler.n_retained_cells
    assert len({tie.prompt for tie in ties}) <= 3
    if draft_policy == "fixed":  # adaptive K goes by what steps take here and now
        assert sources["ngram"].n_accepted > 100


N_POOL = 48
POOL_LENGTHS = tuple(8 + (i * 37) % 120 for i in range(N_POOL))
N_POOL_OUTPUT = 24


@pytest.mark.parametrize(
    ("target", "draft_type", "n_whole"),
    [("dense", "mtp", 2000), ("hybrid", "eagle3", 400)],
    indirect=["target"],
)
async def test_clients_who_leave_at_random_give_everything_back_and_disturb_nobody(
    target: str, draft_type: str, n_whole: int, referee: Referee, is_whole: bool
) -> None:
    n_requests = n_whole if is_whole else min(n_whole, 800)
    pool = prompts(POOL_LENGTHS)
    async with serving(demo_config(target, "none")) as (client, _):
        expected = [await generate(client, prompt, N_POOL_OUTPUT) for prompt in pool]
    chance = random.Random(2)
    leavers = {
        number: (chance.random() * 0.05, chance.randrange(6))
        for number in range(n_requests)
        if chance.random() < 1 / 3
    }
    settings = demo_config(target, draft_type, queue_size=512, tenant_queue_size=512)
    found: list[tuple[int, Result]] = []

    async def stay(client: AsyncClient, i: int) -> None:
        found.append((i, await generate(client, pool[i], N_POOL_OUTPUT)))

    async def leave(client: AsyncClient, i: int, after_s: float, n_chunks: int) -> None:
        stream = client.generate(pool[i], max_output_tokens=900 - len(pool[i]), temperature=0.0)
        if n_chunks == 0:  # while it waits, or during its prompt
            await asyncio.sleep(after_s)
            await stream.aclose()
            return
        async for _ in stream:
            n_chunks -= 1
            if n_chunks == 0:
                break

    async with serving(settings) as (client, loop):
        gate = asyncio.Semaphore(64)  # twice the slots: some wait

        async def request(number: int) -> None:
            i = number % N_POOL
            async with gate:
                if number in leavers:
                    await leave(client, i, *leavers[number])
                else:
                    await stay(client, i)

        await asyncio.gather(*(request(number) for number in range(n_requests)))
        await all_given_back(loop)
    assert len(found) == n_requests - len(leavers)
    for i, result in found:
        referee.compare(pool[i], expected[i].token_ids, result.token_ids, i)


async def all_given_back(loop: StepLoop) -> None:
    """Waits until the last clients' slots and cells are free; the test's timeout bounds it."""
    while True:
        statistics = loop.statistics()
        is_idle = statistics.n_running == statistics.n_waiting == 0
        if is_idle and await n_cells_used(loop) == statistics.scheduler.n_retained_cells:
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_kv_unified", [False, True])
async def test_a_crowd_on_a_windowed_model_gets_the_tokens_of_each_alone(
    is_kv_unified: bool,
) -> None:
    """Documents that begin alike: with drafts, from one another's cells and from host memory."""
    path = windowed(64)
    heads = prompts((400, 300, 200))
    crowd = [(*heads[i % 3][: 60 + 25 * i], *range(33, 40 + i)) for i in range(12)]
    settings = {"model": str(path), "parallel": 4, "max_model_len": 512}
    async with serving(demo_config("dense", "none", **settings, prefix_cache=False)) as plain:
        expected = await alone(plain[0], crowd)
    async with serving(
        demo_config(
            "dense", "mtp", **settings, kv_unified=is_kv_unified, ctx_size=1800 * is_kv_unified
        )
    ) as (client, loop):
        found = await asyncio.gather(*(generate(client, prompt) for prompt in crowd * 2))
        assert loop.statistics().scheduler.n_reused > 0
        await all_given_back(loop)
    referee = Referee("dense", path)
    ties = [
        referee.compare(prompt, a.token_ids, b.token_ids)
        for prompt, a, b in zip(crowd * 2, expected * 2, found, strict=True)
    ]
    referee.close()
    assert sum(tie is not None for tie in ties) <= 4


async def test_what_options_forbid_ends_one_stream_with_a_sentence_and_no_other() -> None:
    """A ban on all that a grammar needs; the engine is not to blame, and nobody is told so."""
    async with serving(demo_config("dense", "mtp", parallel=2)) as (client, loop):
        other = client.generate(prompts((40,))[0], max_output_tokens=40, temperature=0.0)
        banned = dict.fromkeys(range(300), -100.0)
        with pytest.raises(NoTokenAllowed, match="forbid none that the grammar needs"):
            await client.generate("a", grammar='root ::= "b"', logit_bias=banned, temperature=0.0)
        assert (await other).usage.output_tokens == 40
        assert loop.statistics().n_requests["NO_TOKEN_ALLOWED"] == 1
        await all_given_back(loop)
