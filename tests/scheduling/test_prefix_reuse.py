"""Conversations on the demo models go on from what was computed before: the same tokens as anew."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Iterator

import pytest
from tests.support.demo import Referee, prompts
from tests.support.demo import config as demo_config
from tests.support.unknown_cost import UnknownCost
from tests.support.windows import windowed

from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.scheduling.cells import Windows
from drafthouse_server.scheduling.prefix_cache import BLOCK_SIZE, PrefixCache
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import Request, Sequence
from drafthouse_server.step import SamplingOptions, StepPlan, StepResult

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GREEDY = SamplingOptions(temperature=0)
N_OUTPUT = 30
N_SLOTS = 2


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def target(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["own-cells", "shared-cells"])
def engine(request: pytest.FixtureRequest, target: str) -> Iterator[LlamaEngine]:
    n_ctx = 512 if request.param else 0
    settings = demo_config(
        target, "mtp", parallel=N_SLOTS, kv_unified=request.param, ctx_size=n_ctx, max_model_len=400
    )
    engine = LlamaEngine.load(settings)
    yield engine
    engine.close()


def ask(
    engine: LlamaEngine, scheduler: Scheduler, prompt: abc.Sequence[int], tenant: str = "a"
) -> Sequence:
    """Runs one request to its end."""
    return ask_all(engine, scheduler, [prompt], tenant)[0]


def ask_all(
    engine: LlamaEngine,
    scheduler: Scheduler,
    prompts: abc.Sequence[abc.Sequence[int]],
    tenant: str = "a",
) -> list[Sequence]:
    """Runs requests that come at once to their end."""
    sequences = []
    for prompt in prompts:
        request = Request("r", prompt, n_output_max=N_OUTPUT, tenant=tenant)
        sequences.append(Sequence(request, engine.make_sampler(GREEDY)))
        scheduler.submit(sequences[-1])
    for _ in range(500):
        if scheduler.is_idle:
            break
        scheduler.commit(engine.step(scheduler.plan(0.0)), 0.0)
    return sequences


def test_turns_go_on_from_slots_and_from_host_memory(target: str, engine: LlamaEngine) -> None:
    prefixes = PrefixCache(can_cut=target == "dense", n_host_bytes_max=1 << 28)
    scheduler = Scheduler(engine.limits, FixedDraft(3), cost=UnknownCost(), prefixes=prefixes)
    opening, *others = prompts((60, 70, 50))
    first = ask(engine, scheduler, opening)
    second = ask(engine, scheduler, [*first.tokens, 5, 6, 7])
    for prompt in others:  # they need all slots
        assert ask(engine, scheduler, prompt, tenant="b").n_reused == 0
    third = ask(engine, scheduler, [*second.tokens, 9, 8])
    # All but the last token of an answer are computed, and so is that of the turn before.
    assert second.n_reused == len(first.tokens) - 1
    assert third.n_reused == len(second.tokens) - 1
    assert scheduler.counts.n_prefix_hits == 2
    assert engine.n_cells_used == scheduler.n_cells_held
    stranger = ask(engine, scheduler, third.request.prompt, tenant="c")
    assert stranger.n_reused == 0
    referee = Referee(target)
    try:
        anew = Scheduler(engine.limits, FixedDraft(3), cost=UnknownCost())
        for sequence in (second, third):
            expected = ask(engine, anew, sequence.request.prompt)
            referee.compare(sequence.request.prompt, expected.output, sequence.output)
            assert sequence.tally.n_accepted >= 0.5 * expected.tally.n_accepted
    finally:
        referee.close()


def beginning_alike(n: int) -> list[list[int]]:
    opening, *rest = prompts((150, *[20 + 3 * i for i in range(n)]))
    return [[*opening, *tail] for tail in rest]


def compare_with_anew(
    engine: LlamaEngine, referee: Referee, found: list[Sequence], n_draft: int
) -> None:
    """Sees that sequences have the tokens that each gets alone, with nothing kept, but for ties."""
    anew = Scheduler(engine.limits, FixedDraft(n_draft), cost=UnknownCost())
    for sequence in found:
        expected = ask(engine, anew, sequence.request.prompt)
        referee.compare(sequence.request.prompt, expected.output, sequence.output)


def test_prompts_that_come_together_and_begin_alike_get_the_tokens_of_each_alone(
    target: str, engine: LlamaEngine
) -> None:
    prefixes = PrefixCache(can_cut=target == "dense", n_host_bytes_max=1 << 28)
    scheduler = Scheduler(engine.limits, FixedDraft(3), cost=UnknownCost(), prefixes=prefixes)
    together = ask_all(engine, scheduler, beginning_alike(4))
    n_shared = 150 if target == "dense" else 150 - 150 % BLOCK_SIZE
    assert together[0].n_reused == 0
    assert min(sequence.n_reused for sequence in together[1:]) >= n_shared
    assert engine.n_cells_used == scheduler.n_cells_held
    referee = Referee(target)
    try:
        compare_with_anew(engine, referee, together, n_draft=3)
    finally:
        referee.close()


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "small"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own-cells", "shared-cells"])
def test_with_sliding_windows_they_get_them_too(*, is_shared: bool, is_full: bool) -> None:
    """Where slots keep the window alone, from the first one's checkpoint."""
    path = windowed(64)
    settings = demo_config(
        "dense", "none", model=str(path), parallel=4, ctx_size=1200 if is_shared else 0,
        max_model_len=512, kv_unified=is_shared, ubatch_size=64, swa_full=is_full,
    )  # fmt: skip
    engine, referee = LlamaEngine.load(settings), Referee("dense", path)
    try:
        windows = Windows(64, engine.limits.n_window_cells)
        assert (windows.n_cells == 0) == is_full
        prefixes = PrefixCache(can_cut=True, windows=windows, n_host_bytes_max=1 << 28)
        scheduler = Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost(), prefixes=prefixes)
        together = ask_all(engine, scheduler, beginning_alike(6))
        assert [s.n_reused >= 144 for s in together] == [False, *[True] * 5]
        compare_with_anew(engine, referee, together, n_draft=0)
    finally:
        referee.close()
        engine.close()


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "small"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["own-cells", "shared-cells"])
@pytest.mark.parametrize("n_window", [64, 500])
def test_documents_asked_for_in_turn_get_the_answers_of_a_cache_that_is_off(
    n_window: int, is_shared: bool, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More documents than slots: they go to host memory, which holds a window of each.

    Where slots keep the window alone, too, they are asked for nothing that they have lost.
    """
    documents = prompts((300, 350, 400, 450))
    chance = random.Random(5)
    asked: list[tuple[int, ...]] = []
    for share in (0.95, 0.7, 0.3):
        asked += documents
        asked += [
            (*text[: round(share * len(text))], *(chance.randrange(33, 120) for _ in range(9)))
            for text in documents
        ]
    path = windowed(n_window)
    n_ctx = 1200 if is_shared else 0
    settings = demo_config(
        "dense", "none", model=str(path), parallel=2, ctx_size=n_ctx, max_model_len=512,
        kv_unified=is_shared, ubatch_size=128, swa_full=is_full,
    )  # fmt: skip
    engine, referee = LlamaEngine.load(settings), Referee("dense", path)
    try:
        has_small = engine.limits.n_window_cells > 0
        assert has_small == (not is_full and n_window == 64)
        with_cache, without = (
            Scheduler(
                engine.limits,
                FixedDraft(0),
                cost=UnknownCost(),
                prefixes=PrefixCache(
                    can_cut=True,
                    windows=Windows(engine.limits.n_window, engine.limits.n_window_cells),
                    n_host_bytes_max=1 << 28,
                )
                if has_cache
                else None,
            )
            for has_cache in (True, False)
        )
        refused = _refused(engine, monkeypatch)
        found = [ask(engine, with_cache, prompt) for prompt in asked]
        assert not refused
        n_reused = [sequence.n_reused for sequence in found]
        assert engine.limits.n_window == n_window
        assert sum(n > 0 for n in n_reused) >= len(asked) / 4, n_reused
        for seq_id in range(2):
            engine.step(StepPlan(frees=[seq_id]))
        ties = []
        for prompt, sequence in zip(asked, found, strict=True):
            expected = ask(engine, without, prompt)
            ties.append(referee.compare(prompt, expected.output, sequence.output))
        assert sum(tie is not None for tie in ties) <= 2
    finally:
        referee.close()
        engine.close()


@pytest.mark.parametrize("is_shared", [False, True], ids=["own-cells", "shared-cells"])
def test_slots_that_keep_the_window_alone_are_cut_to_what_they_hold(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (text,) = windowed(64), prompts((400,))
    settings = demo_config(
        "dense", "none", model=str(path), parallel=2, ctx_size=1200 if is_shared else 0,
        max_model_len=512, kv_unified=is_shared, ubatch_size=64, swa_full=False,
    )  # fmt: skip
    engine, referee = LlamaEngine.load(settings), Referee("dense", path)
    try:
        n_cells = engine.limits.n_window_cells
        assert n_cells == (64 if is_shared else 256)
        prefixes = PrefixCache(can_cut=True, windows=Windows(64, n_cells))
        scheduler = Scheduler(engine.limits, FixedDraft(0), cost=UnknownCost(), prefixes=prefixes)
        refused = _refused(engine, monkeypatch)
        chance = random.Random(7)
        cut = [
            (*text[:n_alike], *(chance.randrange(33, 120) for _ in range(9)))
            for n_alike in (390, 100, 60)
        ]
        asked = [text, *cut, (*text, *text[:20])]
        found = [ask(engine, scheduler, prompt) for prompt in asked]
        assert not refused
        n_reused = [sequence.n_reused for sequence in found]
        assert n_reused == ([0] * 5 if is_shared else [0, 390, 0, 60, 100])
        compare_with_anew(engine, referee, found, n_draft=0)
    finally:
        referee.close()
        engine.close()


def _refused(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the slots, as time goes on, that kept less than a start asked for."""
    refused, step = list[int](), engine.step

    def noting(plan: StepPlan) -> StepResult:
        result = step(plan)
        refused.extend(result.n_kept)
        return result

    monkeypatch.setattr(engine, "step", noting)
    return refused
