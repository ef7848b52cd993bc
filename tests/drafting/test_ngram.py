"""N-gram drafts: found where they are, right as often as measured, and never another tenant's."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as Tokens
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scheduling.test_scheduler import LIMITS, Bench
from tests.support.unknown_cost import UnknownCost

from drafthouse_server.drafting.ngram import (
    N_CHUNK,
    N_INDEXED_MAX,
    NgramDrafter,
    NgramIndex,
    NgramPool,
    NgramTrack,
)
from drafthouse_server.drafting.policy import FixedDraft
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.scheduling.sequence import FinishReason, Request, Sequence
from drafthouse_server.step import (
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    StepResult,
)

GREEDY = SamplingOptions(temperature=0)
texts = st.lists(st.integers(0, 3), max_size=60)


def last_place(tokens: list[int], size: int) -> int:
    """Returns where the last tokens stood last before, by looking everywhere."""
    if len(tokens) < size:
        return -1
    ends = range(size, len(tokens))
    return max((end for end in ends if tokens[end - size : end] == tokens[-size:]), default=-1)


@given(texts, st.integers(1, 4), st.lists(st.integers(1, 7), max_size=20))
def test_the_index_finds_the_last_place_however_it_was_fed(
    text: list[int], size: int, pieces: list[int]
) -> None:
    tokens: list[int] = []
    index = NgramIndex(tokens, size)
    for piece in [*pieces, 60]:
        tokens += text[len(tokens) : len(tokens) + piece]
        index.index(100)
        assert index.find() == last_place(tokens, size)


@given(texts, st.integers(1, 4), st.integers(1, 9))
def test_an_index_that_lags_finds_nothing_wrong(text: list[int], size: int, n_most: int) -> None:
    index = NgramIndex(text, size)
    for _ in range(len(text) // n_most + 2):
        end = index.find()
        assert end == -1 or (end < len(text) and text[end - size : end] == text[-size:])
        before = index.n_indexed
        index.index(n_most)
        assert index.n_indexed - before <= n_most
    assert index.find() == last_place(text, size)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), texts), max_size=12),
    texts,
    st.integers(1, 200),
    st.integers(1, 3),
)
def test_a_pool_is_bounded_and_every_tenants_own(
    added: list[tuple[str, list[int]]], tokens: list[int], n_max: int, size: int
) -> None:
    with mock.patch("drafthouse_server.drafting.ngram.N_CHUNK", 7):
        pool = NgramPool(n_max, size)
        said: dict[str, list[list[int]]] = {"a": [], "b": []}
        for tenant, text in added:
            pool.add(tenant, text)
            said[tenant].append(text)
            for _ in text:
                pool.index()
                assert pool.n_tokens(tenant) <= max(n_max, 7)
    for tenant, own in said.items():
        found = pool.find(tenant, tokens)
        if found is not None:
            text, end = found
            assert any(text is other for other in own)
            assert text[end - size : end] == tokens[-size:]
            assert end < len(text)
        elif sum(map(len, own)) <= n_max and len(tokens) >= size:
            ends = ((text, end) for text in own for end in range(size, len(text)))
            assert all(text[end - size : end] != tokens[-size:] for text, end in ends)
    assert pool.find("c", tokens) is None


def test_what_a_pool_forgets_is_gone_and_what_came_later_stays() -> None:
    pool = NgramPool(2 * N_CHUNK, 2)
    old, young = list(range(N_CHUNK)), list(range(1000, 1000 + 2 * N_CHUNK))
    pool.add("a", old)
    pool.index()
    assert pool.find("a", [3, 4]) == (old, 5)
    pool.add("a", young)
    for _ in range(2):  # young is of two chunks
        pool.index()
    assert pool.find("a", [3, 4]) is None
    assert pool.find("a", [1003, 1004]) == (young, 5)
    assert pool.n_tokens("a") == 2 * N_CHUNK


def test_a_tenants_end_users_take_no_other_tenants_pool() -> None:
    pool = NgramPool(2 * N_CHUNK, 2)
    text = list(range(N_CHUNK))
    for owner in ("a", "b\0ann", *(f"c\0{i}" for i in range(1000))):
        pool.add(owner, text)
        pool.index()
    assert pool.find("a", [3, 4]) == pool.find("b\0ann", [3, 4]) == (text, 5)
    kept = [i for i in range(1000) if pool.find(f"c\0{i}", [3, 4])]
    assert kept == list(range(746, 1000)), "254 of 256, those of last"


def test_a_pool_forgets_no_younger_text_with_the_same_words() -> None:
    pool = NgramPool(2 * N_CHUNK, 2)
    young = [3, 4, *range(1000, 1000 + N_CHUNK - 2)]
    for text in (list(range(N_CHUNK)), young, list(range(2000, 2000 + N_CHUNK))):
        pool.add("a", text)
        pool.index()
    assert pool.find("a", [5, 6]) is None
    assert pool.find("a", [3, 4]) == (young, 2)


def sequence_of(
    tokens: Tokens[int],
    n_prompt: int | None = None,
    *,
    n_draft: int | None = None,
    n_output_max: int = 1000,
) -> Sequence:
    """Returns a running sequence that has these tokens."""
    n_prompt = len(tokens) - 1 if n_prompt is None else n_prompt
    request = Request("r", tokens[:n_prompt], sampling=GREEDY, n_draft=n_draft)
    sequence = Sequence(request, object(), n_output_max=n_output_max)
    sequence.tokens += tokens[n_prompt:]
    sequence.seq_id, sequence.n_computed = 0, len(sequence.tokens) - 1
    return sequence


def entry_of(sequence: Sequence, n_draft: int) -> PlanEntry:
    return PlanEntry(sequence.seq_id, sequence.n_computed, sequence.tokens[-1:], n_draft, True)


def say(drafter: NgramDrafter, sequence: Sequence, entry: PlanEntry, text: Tokens[int]) -> None:
    """Answers an entry as an engine would whose target says a text."""
    start = len(sequence.tokens)
    draft = list(entry.external)
    n = 0
    while n < len(draft) and text[start + n] == draft[n]:
        n += 1
    tokens = list(text[start : start + n + 1])
    result = ResultEntry(
        0, SequenceStatus.OK, 0, tokens, (), entry.n_draft, n, is_external=bool(draft)
    )
    drafter.observe(sequence, result)
    sequence.tokens += tokens
    sequence.n_computed = len(sequence.tokens) - 1


LARGE = dataclasses.replace(LIMITS, n_ctx=4000, n_ctx_seq=1000)


def follow(text: list[int], n_prompt: int) -> list[tuple[int, int]]:
    """Lets a sequence say a text and returns, of each step, the tokens given and yielded."""
    drafter = NgramDrafter(3)
    sequence = sequence_of(text[: n_prompt + 1], n_prompt)
    steps = []
    while len(sequence.tokens) + 4 < len(text):
        entry = drafter.fill([sequence], [entry_of(sequence, 4)], LARGE, 4)[0]
        before = len(sequence.tokens)
        say(drafter, sequence, entry, text)
        steps.append((len(entry.external), len(sequence.tokens) - before))
    return steps


def test_an_edit_is_drafted_from_what_is_edited() -> None:
    chance = random.Random(1)
    code = [chance.randrange(50) for _ in range(200)]
    edited = [*code[:90], 77, 78, *code[92:]]
    steps = follow([*code, 99, *edited], 202)
    n_external = sum(given for given, _ in steps)
    n_yielded = sum(n for _, n in steps)
    assert n_yielded / len(steps) > 4  # of at most 5
    assert n_external >= 4 * (len(steps) - 10)


def test_what_does_not_repeat_is_left_to_the_drafter() -> None:
    chance = random.Random(2)
    steps = follow([chance.randrange(100_000) for _ in range(300)], 100)
    assert not any(given for given, _ in steps)


def test_a_loop_is_followed_beyond_its_end() -> None:
    steps = follow([7, 8] * 100, 20)
    assert (4, 5) in steps
    assert all(n == 5 for given, n in steps if given)


@given(st.integers(0, 1 << 30), st.integers(2, 30), st.integers(0, 4), st.booleans())
def test_drafts_are_as_long_as_asked_and_continue_what_was_said(
    seed: int, n_words: int, n_draft: int, has_pool: bool
) -> None:
    chance = random.Random(seed)
    words = [[chance.randrange(20) for _ in range(chance.randrange(1, 6))] for _ in range(n_words)]
    text = [token for _ in range(60) for token in chance.choice(words)]
    drafter = NgramDrafter(2, 100 if has_pool else 0)
    earlier = sequence_of(text[:80], 10)
    drafter.forget(earlier, is_finished=True)
    sequence = sequence_of(text[:20], 10)
    known = [tuple(earlier.tokens), tuple(text)]
    for _ in range(30):
        if len(sequence.tokens) + 5 >= len(text):
            break
        entry = drafter.fill([sequence], [entry_of(sequence, n_draft)], LARGE, 4)[0]
        assert len(entry.external) <= n_draft == entry.n_draft
        assert 2 * len(entry.external) >= n_draft or not entry.external
        if entry.external:
            last = sequence.tokens[-2:]
            assert any(
                list(said[i : i + 2]) == last and said[i + 2] == entry.external[0]
                for said in [*known, tuple(sequence.tokens)]
                for i in range(len(said) - 2)
            )
        say(drafter, sequence, entry, text)


def test_proposals_that_are_wrong_yield_to_the_drafter_and_come_back_when_right() -> None:
    """Also while they are not used: what they would have been is compared with what came."""
    drafter = NgramDrafter(2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    sequence = sequence_of([*tokens, 1, 2])
    use = []
    for step in range(60):
        entry = drafter.fill([sequence], [entry_of(sequence, 3)], LARGE, 4)[0]
        use.append(bool(entry.external))
        is_right = step >= 30
        last = sequence.tokens[-1]
        said = [last % 8 + 1] if is_right else [100 + step, 1, 2]
        n_accepted = 0 if entry.external else 2  # the drafter's: two of three
        drafter.observe(
            sequence,
            ResultEntry(
                0, SequenceStatus.OK, 0, said, (), 3, n_accepted, is_external=bool(entry.external)
            ),
        )
        sequence.tokens += said
        sequence.n_computed = len(sequence.tokens) - 1
    assert not any(use[10:30])
    assert all(use[50:])


def test_the_end_of_an_earlier_text_is_not_the_end_of_lookup() -> None:
    drafter = NgramDrafter(2, 100)
    earlier = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    drafter.forget(earlier, is_finished=True)
    text = [50, 2, 3, 4, 5, 6, 7, 8, 9, 10, *[11, 12, 13] * 10]
    sequence = sequence_of(text[:4])
    n_yielded = []
    while len(sequence.tokens) + 4 < len(text):
        before = len(sequence.tokens)
        entry = drafter.fill([sequence], [entry_of(sequence, 3)], LARGE, 3)[0]
        say(drafter, sequence, entry, text)
        n_yielded.append(len(sequence.tokens) - before)
    assert max(n_yielded[:4]) == 4
    assert n_yielded[-2:] == [4, 4]


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    drafter = NgramDrafter(3)
    prompt = [random.Random(i).randrange(1000) for i in range(4 * N_INDEXED_MAX)]
    sequence = sequence_of([*prompt, *prompt[:5]])
    limits = dataclasses.replace(LARGE, n_ctx=10_000, n_ctx_seq=10_000)
    found = []
    for _ in range(6):
        sequence.tokens.append(prompt[len(sequence.tokens) - len(prompt)])
        entry = drafter.fill([sequence], [entry_of(sequence, 4)], limits, 4)[0]
        assert isinstance(sequence.ngram_memory, NgramTrack)
        found.append(sequence.ngram_memory.index.n_indexed)
        drafter.observe(sequence, ResultEntry(0, SequenceStatus.OK, 0, [1 << 20]))
        assert entry.n_draft == 4
    assert [n // N_INDEXED_MAX for n in found] == [1, 2, 3, 4, 4, 4]


# In the scheduler.


def bench_of(**fake: Any) -> Bench:
    return Bench(LARGE, 3, {"ngrams": NgramDrafter(3, 1000)}, **fake)


def ask(bench: Bench, tenant: str, **more: object) -> Sequence:
    """Runs one more request to its end."""
    options = more.pop("options", GREEDY)
    assert isinstance(options, SamplingOptions)
    sequence = Sequence(
        Request(
            f"{tenant}{len(bench.plans)}",
            list(b"hello"),
            tenant=tenant,
            sampling=options,
            n_output_max=60,
            **more,  # type: ignore[arg-type]  # passed on
        ),
        bench.engine.make_sampler(options),
    )
    bench.scheduler.submit(sequence)
    bench.run()
    return sequence


def n_external(bench: Bench, sequence: Sequence) -> int:
    """Returns how many drafts were given while a sequence ran; it ran alone, and last."""
    return sum(
        bool(e.external)
        for plan in bench.plans[-sequence.tally.n_steps - 2 :]
        for e in plan.entries
    )


def test_a_tenant_drafts_from_its_own_and_no_other_does() -> None:
    bench = bench_of(acceptance=[0])
    first = ask(bench, "a")
    other = ask(bench, "b")
    again = ask(bench, "a")
    assert first.output == other.output == again.output
    assert n_external(bench, again) > 5
    assert again.tally.n_steps < first.tally.n_steps / 2
    # b's own came after a's; nothing of a's was drafted for it.
    assert other.tally.n_accepted == 0
    assert other.tally.n_steps == first.tally.n_steps


@pytest.mark.parametrize("end", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_what_was_cut_off_is_nobodys_draft(end: FinishReason) -> None:
    bench = bench_of(acceptance=[0])
    sequence = bench.add("h", n_output_max=60, tenant="a")
    for _ in range(30):
        bench.step()
    bench.scheduler.mark(sequence, end)
    bench.run()
    again = bench.add("h", n_output_max=60, tenant="a")
    bench.run()
    assert again.tally.n_accepted == 0


def test_a_seed_is_not_led_by_what_others_drew() -> None:
    bench = bench_of(acceptance=[0])
    options = SamplingOptions(temperature=1.0, seed=3)
    for _ in range(2):
        seeded = ask(bench, "a", options=options)
        assert seeded.tally.n_accepted == 0
    free = SamplingOptions(temperature=1.0)  # the fake engine draws the same without a seed
    ask(bench, "a", options=free)
    assert ask(bench, "a", options=free).tally.n_accepted > 0


def test_a_request_without_drafts_gets_none() -> None:
    bench = bench_of(acceptance=[0])
    ask(bench, "a")
    again = ask(bench, "a", n_draft=0)
    assert again.tally.n_drafts == 0


def test_statistics_tell_who_drafted() -> None:
    bench = bench_of(acceptance=[0])
    for _ in range(2):
        ask(bench, "a")
    counts = bench.scheduler.counts
    assert counts.n_planned == sum(len(plan.entries) for plan in bench.plans if plan.entries) - 2
    assert 0 < counts.n_draft_planned <= 3 * counts.n_planned


def test_the_policy_learns_of_its_drafters_drafts_only() -> None:
    policy = FixedDraft(3)
    scheduler = Scheduler(LARGE, policy, cost=UnknownCost(), ngrams=NgramDrafter(3, 1000))
    bench = Bench(LARGE)
    bench.scheduler, bench.engine = scheduler, FakeEngine(LARGE, acceptance=[0])
    ask(bench, "a")
    with mock.patch.object(policy, "observe", wraps=policy.observe) as observe:
        again = ask(bench, "a")
    seen: list[StepResult] = [call.args[0] for call in observe.call_args_list]
    assert sum(e.n_accepted for result in seen for e in result.entries) == 0
    assert again.tally.n_accepted > 0


def test_nearly_certain_drafts_are_longer_than_the_policy_chose_where_that_pays() -> None:
    text = [1, 2, 3, 4, 5] * 60
    for seconds_per_token, is_longer in ((0.0, True), (1.0, False)):
        drafter = NgramDrafter(2, can_lengthen=True)
        sequence = sequence_of(text[:50])
        lengths = []
        for _ in range(20):
            entry = drafter.fill(
                [sequence],
                [entry_of(sequence, 0)],
                LARGE,
                4,
                lambda entries, per=seconds_per_token: (
                    0.01  # type: ignore[misc]  # its default has no type
                    + per * sum(e.n_draft for e in entries)
                ),
            )[0]
            assert len(entry.external) == entry.n_draft
            lengths.append(entry.n_draft)
            say(drafter, sequence, entry, text)
        assert (lengths[-1] == 4) == is_longer
        assert lengths[0] == 0


def test_longer_drafts_keep_to_the_room_the_output_and_the_request() -> None:
    text = [1, 2, 3, 4, 5] * 60

    def lengths(n_room: int = 4, **more: int) -> set[int]:
        drafter = NgramDrafter(2, can_lengthen=True)
        sequence = sequence_of(text[:50], None, **more)
        found = set()
        for _ in range(12):
            entry = entry_of(sequence, 0)
            entry = drafter.fill([sequence], [entry], LARGE, n_room, lambda entries: 0.01)[0]
            found.add(entry.n_draft)
            say(drafter, sequence, entry, text)
        return found

    assert lengths() == {0, 4}
    assert lengths(n_room=3) == {0}
    assert lengths(n_draft=0) == {0}
    assert max(lengths(n_output_max=30)) == 4
    assert lengths(n_output_max=4) <= {0, 1, 2}
