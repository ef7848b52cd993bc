"""Drafts that the caller gives the engine: no token changes, and the drafter goes on as before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.proofs.distribution import compare
from tests.support.hand import DENSE, HYBRID, TEXTS, emitted, engine, plan, sampler, tokens_of

from drafthouse_engine import (
    DRAFT_DTYPE,
    DraftType,
    Engine,
    EngineError,
    ResultFlag,
    SamplingParams,
    Status,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

N_OUTPUT = 24
K = 3
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Giver = Callable[[list[int]], Sequence[int]]  # output so far -> draft


def run(
    target: Engine,
    givers: Sequence[Giver | None],
    sampling: SamplingParams = GREEDY,
    n_draft: int = K,
    name: str = DENSE,
) -> tuple[list[list[int]], list[tuple[int, int, bool]]]:
    """Returns outputs of all texts and, of each draft: its length, accepted tokens, was it given.

    Every step has all sequences that are not done; one without a giver is the drafter's.
    """
    outputs: list[list[int]] = [[] for _ in givers]
    drafts = list[tuple[int, int, bool]]()
    pending = [tokens_of(TEXTS[i % len(TEXTS)]) for i in range(len(givers))]
    for seq_id in range(len(givers)):
        target.seq_end(seq_id)
        target.seq_begin(seq_id, sampler(sampling, name))
    while running := [i for i, output in enumerate(outputs) if len(output) < N_OUTPUT]:
        rows, given, tokens = [], [], list[int]()
        for i in running:
            k = n_draft if outputs[i] else 0
            rows.append((i, target.seq_n_past(i), len(tokens), len(pending[i]), k, 1))
            tokens += pending[i]
            giver = givers[i]
            draft = giver(outputs[i]) if giver and k else ()
            if draft:
                given.append((i, len(tokens), len(draft)))
                tokens += draft
        result = target.step(plan(*rows), tokens, np.array(given, DRAFT_DTYPE))
        assert not result.entries["status"].any()
        for place, i in enumerate(running):
            entry = result.entries[place]
            if entry["n_drafted"]:
                is_external = bool(entry["flags"] & ResultFlag.EXTERNAL)
                drafts.append((int(entry["n_drafted"]), int(entry["n_accepted"]), is_external))
            outputs[i] += emitted(result, place)
            pending[i] = outputs[i][-1:]
    return [output[:N_OUTPUT] for output in outputs], drafts


def prime(target: Engine, name: str) -> None:
    """Lets the drafter draft once in every slot: external drafts are verified from then on."""
    run(target, [None] * target.limits.n_seq_max, name=name)


@pytest.fixture(scope="module", params=[DENSE, HYBRID])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(name: str) -> Iterator[Callable[[SamplingParams], list[list[int]]]]:
    """Outputs without speculation."""
    with engine("none", name, exact=True) as target:
        yield lambda sampling: run(target, [None] * 3, sampling, 0, name)[0]


DRAFT_TYPES: tuple[DraftType, ...] = ("mtp", "eagle3", "simple", "ngram-map-k")


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
@pytest.mark.parametrize("n_rs_seq", [-1, 0], ids=["snapshots", "checkpoints"])
def test_no_given_draft_changes_a_token(
    name: str,
    plain: Callable[[SamplingParams], list[list[int]]],
    draft_type: DraftType,
    n_rs_seq: int,
) -> None:
    """Right ones, wrong ones, and the drafter's, side by side and in turns."""
    expected = plain(GREEDY)

    def right(i: int) -> Giver:
        return lambda output: expected[i][len(output) : len(output) + K]

    def broken(i: int) -> Giver:
        """One right token, then a wrong one; and every third step the drafter's."""

        def give(output: list[int]) -> list[int]:
            rest = expected[i][len(output) : len(output) + K]
            if len(output) % 3 == 0:
                return []
            return [*rest[:1], *((token + 1) % 2000 for token in rest[1:])]

        return give

    fields: dict[str, Any] = {"n_draft_max": K, "n_rs_seq": n_rs_seq, "exact": True}
    with engine(draft_type, name, **fields) as target:
        prime(target, name)
        outputs, drafts = run(target, [right(0), broken(1), None], name=name)
    assert outputs == expected
    given = [(n, n_accepted) for n, n_accepted, is_external in drafts if is_external]
    assert (K, K) in given
    assert (K, 1) in given
    assert draft_type == "ngram-map-k" or any(not is_external for _, _, is_external in drafts)


@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple"])
def test_the_drafter_follows_what_was_given(name: str, draft_type: DraftType) -> None:
    """After external drafts, partly rejected, it drafts what it drafts after steps without any."""
    tokens = tokens_of(TEXTS[1])
    drafted = []
    with (
        engine("none", name, exact=True) as nobody,
        engine(draft_type, name, n_draft_max=K, exact=True) as target,
    ):
        expected = run(nobody, [None, None], n_draft=0, name=name)[0][1]
        prime(target, name)
        for n_right in (None, 0, 1, 2):
            target.seq_end(0)
            target.seq_begin(0, sampler(GREEDY, name))
            result = target.step(plan((0, 0, 0, len(tokens), 0, 1)), tokens)
            output = emitted(result, 0)
            while len(output) < 9:
                row, last = (0, target.seq_n_past(0), 0, 1), output[-1:]
                if n_right is None:
                    result = target.step(plan((*row, 0, 1)), last)
                else:
                    n = min(n_right, 8 - len(output))
                    right = expected[len(output) : len(output) + n]
                    wrong = [(expected[len(output) + n] + 1) % 2000]
                    given = np.array([(0, 1, n + 1)], DRAFT_DTYPE)
                    result = target.step(plan((*row, n + 1, 1)), [*last, *right, *wrong], given)
                    assert result.entries["n_accepted"][0] == n
                output += emitted(result, 0)
            assert output == expected[:9]
            drafted.append(target.draft_many([(0, target.seq_n_past(0), output[-1], K)])[0])
            target.seq_end(0)
    assert len(drafted[0]) > 0
    assert drafted == [drafted[0]] * 4


@pytest.mark.parametrize("probabilistic", [False, True])
def test_a_seed_draws_what_it_draws_without_a_draft(
    name: str, plain: Callable[[SamplingParams], list[list[int]]], probabilistic: bool
) -> None:
    """Also where the drafter's own drafts would be sampled and verified by rejection."""
    sampling = SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
    expected = plain(sampling)

    def nearly(i: int) -> Giver:
        return lambda output: [*expected[i][len(output) : len(output) + 2], 7]

    with engine("mtp", name, n_draft_max=K, exact=True, probabilistic=probabilistic) as target:
        prime(target, name)
        outputs, drafts = run(target, [nearly(i) for i in range(3)], sampling, name=name)
    assert outputs == expected
    assert {is_external for _, _, is_external in drafts} == {True}
    assert (K, 2, True) in drafts


def until_it_fails(target: Engine, name: str, right: Sequence[int], k: int) -> list[int]:
    """Returns what is told before nothing is allowed any more: after the ";"."""
    ends = tuple((token, -math.inf) for token in target.target.eos_token_ids)
    sampling = SamplingParams(temperature=0.0, grammar='root ::= "1234;"', logit_bias=ends)
    target.seq_end(0)
    target.seq_begin(0, sampler(sampling, name))
    output, pending, status = list[int](), tokens_of("x"), Status.OK
    while status is Status.OK:
        draft = list(right[len(output) :][:k]) if output else []
        given = np.array([(0, len(pending), len(draft))], DRAFT_DTYPE) if draft else None
        row = (0, target.seq_n_past(0), 0, len(pending), len(draft), 1)
        result = target.step(plan(row), [*pending, *draft], given)
        status = Status(int(result.entries["status"][0]))
        output += emitted(result, 0)
        pending = output[-1:]
    assert status is Status.NO_TOKEN_ALLOWED
    return output


def test_what_fails_behind_a_draft_takes_nothing_of_what_came_before(name: str) -> None:
    with engine("mtp", name, n_draft_max=K, exact=True) as target:
        prime(target, name)
        right = until_it_fails(target, name, (), 0)
        assert b"".join(map(target.target.token_bytes, right)) == b"1234;"
        for k in range(1, K + 1):
            assert until_it_fails(target, name, right, k) == right


N_SIDE = 16
PROMPT = 300
LIKELY = (11, 267)


def draw(target: Engine, n: int, k: int) -> Counter[tuple[int, ...]]:
    """Returns the first three tokens of n draws after one prompt; a seed of its own for each.

    With drafts, what was drawn first decides who drafts, as looking drafts up does.
    """
    paths = Counter[tuple[int, ...]]()
    for first in range(0, n, N_SIDE):
        outputs: list[list[int]] = [[] for _ in range(N_SIDE)]
        for i in range(N_SIDE):
            target.seq_end(i)
            sampling = SamplingParams(temperature=1.2, top_k=4, seed=first + i, ignore_eos=True)
            target.seq_begin(i, sampler(sampling))
        while running := [i for i, output in enumerate(outputs) if len(output) < 3]:
            rows, given, tokens = [], [], list[int]()
            for i in running:
                output = outputs[i]
                rows.append((i, target.seq_n_past(i), len(tokens), 1, k if output else 0, 1))
                tokens.append(output[-1] if output else PROMPT)
                if k and output and output[0] % 2:
                    given.append((i, len(tokens), 2))
                    tokens += LIKELY
            result = target.step(plan(*rows), tokens, np.array(given, DRAFT_DTYPE))
            for place, i in enumerate(running):
                outputs[i] += emitted(result, place)
        paths.update(tuple(output[:3]) for output in outputs)
    return paths


def test_drafts_given_beside_sampled_ones_keep_the_distribution() -> None:
    """Verified by rejection where the drafter drafted, by matching where the caller did."""
    n = 640
    fields: dict[str, Any] = {"n_seq_max": N_SIDE, "n_ctx_seq": 64, "probabilistic": True}
    with (
        engine("none", n_seq_max=N_SIDE, n_ctx_seq=64) as nobody,
        engine("mtp", n_draft_max=K, **fields) as target,
    ):
        draw(target, N_SIDE, K)  # each slot's first draft is the drafter's
        plain, drafted = draw(nobody, n, 0), draw(target, n, K)
    assert compare(plain, drafted).z < 3.5


def test_given_drafts_need_no_draft_state() -> None:
    with engine("mtp", n_draft_max=K, exact=True) as target:
        expected = run(target, [None])[0][0]
        tokens = tokens_of(TEXTS[0])
        target.seq_end(0)
        target.seq_begin(0, sampler(GREEDY))
        target.seq_drafts_off(0)
        target.step(plan((0, 0, 0, len(tokens), 0, 1)), tokens)
        given = np.array([(0, 1, K)], DRAFT_DTYPE)
        result = target.step(plan((0, len(tokens), 0, 1, K, 1)), expected[: 1 + K], given)
        entry = result.entries[0]
        assert (entry["n_drafted"], entry["n_accepted"]) == (K, K)
        assert entry["flags"] == ResultFlag.EXTERNAL | ResultFlag.DRAFT_COLD
        assert emitted(result, 0) == expected[1 : 2 + K]


def test_a_given_draft_ends_before_an_end_token_and_yields_to_the_drafter_when_empty() -> None:
    with engine("mtp", n_draft_max=K, exact=True) as target:
        prime(target, DENSE)
        end = target.target.token_eos
        expected = run(target, [None])[0][0]

        def cut(output: list[int]) -> list[int]:
            return [*expected[len(output) : len(output) + 1], end, 5][:K]

        outputs, drafts = run(target, [cut])
        assert outputs == [expected]
        assert {draft for draft in drafts if draft[2]} == {(1, 1, True)}
        outputs, drafts = run(target, [lambda output: [end, 5]])
        assert outputs == [expected]
        assert drafts
        assert not any(is_external for _, _, is_external in drafts)


def test_a_slots_first_draft_is_the_drafters() -> None:
    """llama.cpp ends the process when told of a draft where it never made one."""
    with engine("mtp", n_draft_max=K, exact=True) as target:
        outputs, drafts = run(target, [lambda output: [5, 6]])
        assert [is_external for _, _, is_external in drafts][:2] == [False, True]
        assert outputs == run(target, [None])[0]


BAD: dict[str, list[tuple[int, int, int]]] = {
    "no such sequence": [(9, 1, 1)],
    "a negative one": [(-1, 1, 1)],
    "not in the plan": [(1, 1, 1)],
    "no tokens": [(0, 1, 0)],
    "a negative count": [(0, 1, -1)],
    "more than n_draft": [(0, 1, 3)],
    "twice": [(0, 1, 1), (0, 1, 1)],
    "beyond the tokens": [(0, 3, 2)],
    "offset negative": [(0, -1, 1)],
    "offset overflows": [(0, 2**31 - 1, 2)],
    "token beyond the vocabulary": [(0, 4, 1)],
}


@pytest.fixture(scope="module")
def going() -> Iterator[Engine]:
    with engine("mtp", n_draft_max=K) as target:
        target.seq_begin(0, sampler(GREEDY))
        target.step(plan((0, 0, 0, 2, 0, 1)), [5, 6])
        yield target


@pytest.mark.parametrize("case", BAD)
def test_bad_given_drafts_are_refused_and_change_nothing(going: Engine, case: str) -> None:
    last = list(going.seq_tokens(0))
    tokens = [going.seq_id_last(0) or 0, 5, 6, 7, 1 << 20]
    with pytest.raises(EngineError, match="draft"):
        going.step(plan((0, 2, 0, 1, 2, 1)), tokens, np.array(BAD[case], DRAFT_DTYPE))
    assert list(going.seq_tokens(0)) == last
    with pytest.raises(TypeError, match="DRAFT_DTYPE"):
        going.step(plan((0, 2, 0, 1, 2, 1)), tokens, np.zeros((1, 3), np.int32))
