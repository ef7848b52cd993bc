"""Sequences that share a prompt: forked where the target allows it, prefilled where not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, TIE_LOGITS, prompts

from drafthouse_engine import (
    PLAN_DTYPE,
    BadPlan,
    Closed,
    Engine,
    EngineParams,
    InvalidArgument,
    Model,
    Placement,
    Sampler,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    Unsupported,
    begin_many,
)

pytestmark = pytest.mark.model


GREEDY = SamplingParams(seed=1, temperature=0.0, logprobs=True, n_top_logprobs=2)
N_TOKENS = 24


def params(draft_type: Any, *, unified: bool = False, exact: bool = False) -> EngineParams:
    return EngineParams(
        draft_type=draft_type, n_seq_max=4, n_ctx_seq=256, n_batch=256, n_ubatch=256, n_threads=1,
        kv_unified=unified, exact=exact,
    )  # fmt: skip


def go_on(engine: Engine, last: dict[int, list[int]], k: int) -> dict[int, list[tuple[int, float]]]:
    """Generates from each sequence's last tokens; returns tokens with the margin of each."""
    emitted: dict[int, list[tuple[int, float]]] = {seq_id: [] for seq_id in last}
    while min(len(found) for found in emitted.values()) < N_TOKENS:
        rows, flat = [], list[int]()
        for seq_id, tokens in last.items():
            n_draft = k if emitted[seq_id] else 0
            rows.append((seq_id, engine.seq_n_past(seq_id), len(flat), len(tokens), n_draft, 1))
            flat += tokens
        result = engine.step(np.array(rows, PLAN_DTYPE), flat)
        assert not result.entries["status"].any()
        margins = result.top_logprobs[:, 0] - result.top_logprobs[:, 1]
        for entry in result.entries:
            assert not entry["flags"] & 2, "the draft went cold"
            span = slice(entry["token_offset"], entry["token_offset"] + entry["n_tokens"])
            pairs = zip(result.tokens[span].tolist(), margins[span].tolist(), strict=True)
            emitted[int(entry["seq_id"])] += list(pairs)
            last[int(entry["seq_id"])] = [int(result.tokens[span][-1])]
    return emitted


def assert_same(expected: list[tuple[int, float]], found: list[tuple[int, float]]) -> None:
    """Equal tokens, or a first difference where two candidates tie."""
    for (a, margin), (b, _) in zip(expected[:N_TOKENS], found[:N_TOKENS], strict=True):
        if a != b:
            assert margin <= TIE_LOGITS
            return


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("draft_type", ["none", "mtp", "eagle3", "simple", "ngram-simple"])
def test_forked_sequences_generate_what_prefilled_ones_do(draft_type: str, unified: bool) -> None:
    prompt = list(prompts((40,))[0])
    files = {"eagle3": EAGLE3["dense"], "simple": SIMPLE}
    draft = Model(MODELS / files[draft_type]) if draft_type in files else None
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, draft, params(draft_type, unified=unified)) as engine,
    ):
        k = 0 if draft_type == "none" else 3
        engine.seq_begin(0, Sampler(target, GREEDY))
        expected = go_on(engine, {0: prompt}, k)[0]
        engine.seq_end(0)
        samplers = {seq_id: Sampler(target, GREEDY) for seq_id in (2, 0, 3)}
        assert begin_many(engine, prompt, samplers)
        found = go_on(engine, dict.fromkeys(samplers, prompt[-1:]), k)
        for seq_id in samplers:
            assert_same(expected, found[seq_id])
            engine.seq_end(seq_id)
        assert engine.n_cells_used == 0
    if draft is not None:
        draft.close()


def feed(engine: Engine, seq_id: int, pieces: list[list[int]], *, has_output: bool = False) -> None:
    """Computes a prompt, piece by piece; the last piece chooses a token if has_output."""
    for i, piece in enumerate(pieces):
        is_output = has_output and i == len(pieces) - 1
        entry = (seq_id, engine.seq_n_past(seq_id), 0, len(piece), 0, is_output)
        engine.step(np.array([entry], PLAN_DTYPE), piece)


def first_draft(engine: Engine, token: int) -> list[int]:
    """Decodes the last token of sequence 1's prompt by hand; returns the draft and rejects it."""
    n_past = engine.seq_n_past(1)
    engine.decode([token], [n_past], [1], [False])
    engine.process()
    draft = engine.draft_many([(1, n_past + 1, token, 3)])[0]
    engine.decode([token], [n_past + 1], [1], [False])
    engine.process()
    engine.accept(1, 0)
    return draft


@pytest.mark.parametrize("has_emitted", [False, True])
@pytest.mark.parametrize("n_last", [1, 2, 9])
def test_first_drafts_of_a_fork_are_those_of_a_prefilled_sequence(
    n_last: int, has_emitted: bool
) -> None:
    """MTP pairs a fork's first token with the hidden row before it, which is carried over.

    With arithmetic that does not depend on the batch, even the draft's cells are equal bit for bit.
    """
    drafts, snapshots = [], []
    with (
        Model(MODELS / TARGETS["dense"], placement=Placement(devices=())) as target,  # for exact
        Engine(target, None, params("mtp", exact=True)) as engine,
    ):
        for prompt in (list(text) for text in prompts((3, 9, 30, 40))):
            head, last = prompt[:-n_last], prompt[-n_last:]
            engine.seq_begin(0, Sampler(target, GREEDY))
            feed(engine, 0, [piece for piece in (head, last) if piece], has_output=has_emitted)
            engine.fork(0, {1: Sampler(target, GREEDY)}, len(prompt) - 1)
            drafts.append([first_draft(engine, prompt[-1])])
            snapshots.append([engine.save(1)])
            engine.seq_end(1)
            engine.seq_begin(1, Sampler(target, GREEDY))
            feed(engine, 1, [piece for piece in (head, last[:-1]) if piece])
            drafts[-1].append(first_draft(engine, prompt[-1]))
            snapshots[-1].append(engine.save(1))
            engine.seq_end(1)
            engine.seq_end(0)
    assert all(fork == prefilled for fork, prefilled in drafts)
    assert all(fork == prefilled for fork, prefilled in snapshots)


def test_a_fork_from_a_running_sequence_leaves_it_undisturbed() -> None:
    prompt = list(prompts((30,))[0])
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params("mtp")) as engine,
    ):
        engine.seq_begin(0, Sampler(target, GREEDY))
        first = go_on(engine, {0: prompt}, 3)[0]
        last = {0: [first[-1][0]]}
        held = engine.seq_n_past(0)
        engine.fork(0, {1: Sampler(target, GREEDY)}, len(prompt) - 1)
        assert engine.seq_n_past(0) == held
        assert engine.seq_n_past(1) == len(prompt) - 1
        found = go_on(engine, last | {1: prompt[-1:]}, 3)
        assert_same(first, found[1])
        engine.seq_end(1)
        engine.seq_end(0)
        engine.seq_begin(0, Sampler(target, GREEDY))
        whole = go_on(engine, {0: prompt}, 3)[0]
        assert_same(first, whole)


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_a_fork_of_a_fork_that_has_ended_holds_the_prompt(
    draft_type: Any, flash_attention: bool
) -> None:
    """Each copy is made before the next one begins, through one that then needs no cells, too."""
    prompt, other = (list(text) for text in prompts((60, 9)))
    made = dataclasses.replace(params(draft_type), flash_attention=flash_attention)
    k = 0 if draft_type == "none" else 3
    with Model(MODELS / TARGETS["dense"]) as target, Engine(target, None, made) as engine:
        engine.seq_begin(3, Sampler(target, GREEDY))
        expected = go_on(engine, {3: prompt}, k)[3]
        engine.seq_begin(0, Sampler(target, GREEDY))
        feed(engine, 0, [prompt])
        engine.fork(0, {1: Sampler(target, GREEDY)}, len(prompt) - 1)
        engine.fork(1, {2: Sampler(target, GREEDY)}, len(prompt) - 2)
        engine.seq_end(1)
        engine.seq_begin(1, Sampler(target, GREEDY))
        feed(engine, 1, [other])
        assert_same(expected, go_on(engine, {2: prompt[-2:]}, k)[2])


def test_hybrid_targets_are_prefilled_and_refuse_forks() -> None:
    prompt = list(prompts((30,))[0])
    with (
        Model(MODELS / TARGETS["hybrid"]) as target,
        Engine(target, None, params("mtp")) as engine,
    ):
        samplers = {seq_id: Sampler(target, GREEDY) for seq_id in (0, 1)}
        assert not begin_many(engine, prompt, samplers)
        found = go_on(engine, {0: prompt[-1:], 1: prompt[-1:]}, 3)
        assert_same(found[0], found[1])
        spare = Sampler(target, GREEDY)
        with pytest.raises(Unsupported, match="recurrent"):
            engine.fork(0, {2: spare}, 5)
        assert not spare.is_used


def test_wrong_forks_are_refused_and_change_nothing() -> None:
    prompt = list(prompts((20,))[0])
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params("mtp")) as engine,
    ):
        spare = Sampler(target, GREEDY)
        with pytest.raises(SeqIdle):
            engine.fork(0, {1: spare})
        begin_many(engine, prompt, {0: Sampler(target, GREEDY)})
        for n_past in (0, -2, len(prompt) - 1, 100):
            with pytest.raises(BadPlan, match="n_past"):
                engine.fork(0, {1: spare}, n_past)
        with pytest.raises(SeqBusy):
            engine.fork(0, {1: spare, 0: Sampler(target, GREEDY)})
        with pytest.raises(InvalidArgument, match="twice"):
            engine.fork(0, {1: spare, 2: spare})
        assert engine.seq_n_past(1) == 0
        engine.fork(0, {1: spare})
        assert engine.seq_n_past(1) == len(prompt) - 2
        with pytest.raises(Closed):
            engine.fork(0, {2: spare})
        with pytest.raises(InvalidArgument, match="no tokens"):
            begin_many(engine, [], {})


def test_a_fork_is_saved_before_and_after_it_has_decoded() -> None:
    """Between separate caches llama.cpp puts the copying of cells off; a snapshot does not wait."""
    prompt = list(prompts((30,))[0])
    with (
        Model(MODELS / TARGETS["dense"]) as target,
        Engine(target, None, params("mtp")) as engine,
    ):
        engine.seq_begin(0, Sampler(target, GREEDY))
        expected = go_on(engine, {0: prompt}, 3)[0]
        engine.fork(0, {1: Sampler(target, GREEDY)}, len(prompt) - 1)
        early = engine.save(1)
        engine.seq_end(0)
        engine.load(2, early)
        engine.seq_end(1)
        assert_same(expected, go_on(engine, {2: prompt[-1:]}, 3)[2])


class Growing(dict[int, Sampler]):
    """Another thread adds a sampler once the ids have been read."""

    def __init__(self, samplers: dict[int, Sampler], later: dict[int, Sampler]) -> None:
        super().__init__(samplers)
        self._later = later

    def __iter__(self) -> Iterator[int]:
        ids = list(super().__iter__())
        self.update(self._later)
        return iter(ids)


def test_samplers_that_are_added_meanwhile_are_none_of_the_fork() -> None:
    with Model(MODELS / TARGETS["dense"]) as target, Engine(target, None, params("none")) as engine:
        engine.seq_begin(0, Sampler(target, GREEDY))
        engine.step(np.array([(0, 0, 0, 4, 0, 0)], PLAN_DTYPE), [300, 301, 302, 303])
        late = Sampler(target, GREEDY)
        engine.fork(0, Growing({1: Sampler(target, GREEDY)}, {2: late}))
        assert [engine.seq_n_past(i) for i in range(4)] == [4, 3, 0, 0]
        assert not late.is_used


class Requests(list[tuple[int, int, int, int]]):
    """Another thread adds a request whenever they are read for a second time."""

    n_read = 0

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        self.n_read += 1
        if self.n_read > 1:
            self.append(self[0])
        return super().__iter__()


def test_requests_that_are_added_meanwhile_are_not_drafted() -> None:
    with Model(MODELS / TARGETS["dense"]) as target, Engine(target, None, params("mtp")) as engine:
        engine.seq_begin(0, Sampler(target, GREEDY))
        engine.step(np.array([(0, 0, 0, 4, 0, 0)], PLAN_DTYPE), [300, 301, 302, 303])
        assert len(engine.draft_many(Requests([(0, 4, 304, 2)]))) == 1
