"""Sliding windows: a sequence that is cut goes on as one computed anew, or is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.support.demo import TIE_LOGITS, prompts
from tests.support.hand import GREEDY, fused, started
from tests.support.windows import WAYS, Cutter, borders, model, windowed

from drafthouse_engine import (
    DecoderConfig,
    DecoderPool,
    DraftTree,
    DraftType,
    Engine,
    EngineParams,
    Model,
    Sampler,
    Start,
    Unsupported,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SIZES = [(64, 32, False), (64, 65, False), (64, 130, False), (500, 505, False), (64, 130, True)]
"""Window, tokens held, whether the pool of cells is shared."""


@pytest.fixture(
    scope="module", params=SIZES, ids=lambda size: f"{size[0]}-{size[1]}{'-shared' * size[2]}"
)
def cutter(request: pytest.FixtureRequest) -> Iterator[Cutter]:
    n_window, n_held, is_shared = request.param
    cutter = Cutter(n_window, n_held, is_shared=is_shared)
    yield cutter
    cutter.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_sequence_goes_on_as_if_computed_anew_or_is_refused(cutter: Cutter, way: str) -> None:
    n_held, n_window = len(cutter.held), cutter.engine.limits.n_window
    verdicts = {
        cut: cutter.verdict(WAYS[way], cut)
        for cut in borders(n_window, n_held)
        if not ("fork" in way and cut == n_held)  # a fork takes all but the last at most
    }
    assert "WRONG" not in verdicts.values(), verdicts
    refused = [cut for cut, verdict in verdicts.items() if verdict == "refused"]
    assert n_held not in refused, "a whole sequence needs nothing that is gone"
    if not cutter.is_shared:
        is_cut_short = way.startswith("snapshot") and n_held > n_window
        n_least = n_held - 1 if is_cut_short else 0
        assert refused == [cut for cut in verdicts if cut < n_least]


def test_limits_tell_the_window() -> None:
    for n_window in (64, 500):
        with Engine(model(n_window), None, EngineParams(n_ctx_seq=64, n_threads=1)) as engine:
            assert engine.limits.n_window == n_window


@pytest.mark.parametrize("draft_type", ["mtp", "simple", "ngram-simple"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_rejected_drafts_leave_the_window_whole(draft_type: DraftType, is_shared: bool) -> None:
    """Small ubatches: in a shared pool the later ones took cells that a rejected draft needs.

    Drafts are nearly as long as the window, so that they would take most of it.
    """
    crowd = [list(prompt) for prompt in prompts((200, 120, 90, 150, 60, 170, 80, 140))]
    target = model(16)
    params = EngineParams(
        draft_type=draft_type, n_seq_max=8, n_ctx=1460 if is_shared else 0, n_ctx_seq=256,
        n_batch=1024, n_ubatch=16, n_draft_max=13, n_threads=1, kv_unified=is_shared,
    )  # fmt: skip
    draft = model(100) if draft_type == "simple" else None  # windowed, and unlike the target
    with Engine(target, draft, params) as engine:
        found = fused(engine, crowd, 40, n_draft=13)
    plain = EngineParams(n_seq_max=1, n_ctx_seq=256, n_batch=256, n_ubatch=16, n_threads=1)
    with Engine(target, None, plain) as engine:
        for prompt, tokens in zip(crowd, found, strict=True):
            expected = fused(engine, [prompt], 40)[0]
            assert_same(engine, prompt, expected, tokens)


def assert_same(
    engine: Engine, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> None:
    """Equal tokens, or a first difference where two candidates tie."""
    pairs = enumerate(zip(expected, found, strict=True))
    i = next((i for i, (a, b) in pairs if a != b), None)
    if i is None:
        return
    history = [*prompt, *expected[:i]]
    n = len(history)
    engine.seq_begin(0, Sampler(engine.target, GREEDY))
    engine.decode(history, range(n), [0] * n, [k == n - 1 for k in range(n)])
    logits = engine.logits(n - 1)
    engine.seq_end(0)
    assert abs(logits[expected[i]] - logits[found[i]]) <= TIE_LOGITS


def test_a_drafter_that_lost_its_window_starts_anew() -> None:
    """A target without windows and a draft model with one: the target can be cut, the draft not."""
    prompt = list(prompts((200,))[0])
    params = EngineParams(
        draft_type="simple", n_seq_max=2, n_ctx_seq=400, n_batch=256, n_ubatch=64, n_threads=1
    )
    with Engine(model(1024), model(64), params) as engine:
        expected = fused(engine, [prompt], 30, n_draft=4)[0]
        engine.seq_begin(0, Sampler(engine.target, GREEDY))
        engine.decode(prompt, range(200), [0] * 200, [False] * 200)
        engine.process()
        snapshot = engine.save(0)
        engine.seq_end(0)
        start = Start(0, Sampler(engine.target, GREEDY), 150, snapshot=snapshot)
        assert started(engine, start) == 150
        assert engine.seq_is_cold(0)
        engine.decode(prompt[150:], range(150, 200), [0] * 50, [i == 49 for i in range(50)])
        engine.process()
        assert not engine.seq_is_cold(0)
        assert engine.sample(0, 49) == expected[0]


def test_a_decoder_goes_back_behind_its_window() -> None:
    """In a pool with trees the decoders share cells, so that others take what the window leaves."""
    text = list(prompts((300,))[0])
    config = DecoderConfig(n_seq=3, n_branch_max=4, n_ctx_seq=320, n_ubatch=64, n_threads=1)
    with DecoderPool(model(64), config) as pool:
        first, other = pool.decoder(), pool.decoder()
        for length in (236, 237, 238, 100, 65, 64, 63, 10):
            other.reset()
            other.observe(prompts((250,) * 2)[1])
            other.next_logits()
            first.reset()
            first.observe(text)
            first.next_logits()
            other.reset()
            other.observe(prompts((300,) * 3)[2])
            other.next_logits()
            first.rollback_to(length)
            found = first.next_logits().copy()
            with pool.decoder() as anew:
                anew.observe(text[:length])
                assert np.abs(anew.next_logits() - found).max() <= TIE_LOGITS, length


@pytest.mark.parametrize("n_path", [1, 2, 40, 99])
def test_a_tree_deeper_than_the_window_is_committed_in_part(n_path: int) -> None:
    text = list(prompts((200,))[0])
    config = DecoderConfig(
        n_seq=2, n_branch_max=4, n_outputs_max=128, n_ctx_seq=256, n_ubatch=128, n_threads=1
    )
    with DecoderPool(model(16), config) as pool:
        decoder = pool.tree_decoder()
        decoder.observe(text[:100])
        chain = text[99:199]
        decoder.tree_logits_keep_kv(DraftTree(tuple(chain[:20]), tuple(range(-1, 19))))
        for start in range(20, 100, 20):
            decoder.grow_tree(chain[start : start + 20], range(start - 1, start + 19))
        decoder.commit_tree_path(list(range(n_path + 1)))
        assert decoder.history == tuple(text[: 100 + n_path])
        decoder.observe(text[100 + n_path : 101 + n_path])
        found = decoder.next_logits().copy()
        with pool.decoder() as anew:
            anew.observe(text[: 101 + n_path])
            assert np.abs(anew.next_logits() - found).max() <= TIE_LOGITS


def test_by_hand_a_decode_that_verifies_drafts_is_one_ubatch_where_cells_are_shared() -> None:
    params = EngineParams(
        draft_type="ngram-simple", n_seq_max=4, n_ctx=600, n_ctx_seq=128, n_batch=128, n_ubatch=16,
        n_draft_max=8, n_threads=1, kv_unified=True,
    )  # fmt: skip
    words = [300, 301, 302, 303, 304, 305, 306, 307, 308, 309] * 4
    with Engine(model(64), None, params) as engine:
        for seq_id in range(3):
            engine.seq_begin(seq_id, Sampler(engine.target, GREEDY))
            engine.decode(words, range(40), [seq_id] * 40, [False] * 40)
        drafts = engine.draft_many([(seq_id, 40, 300, 8) for seq_id in range(3)])
        tokens = [token for draft in drafts for token in (300, *draft)]
        assert len(tokens) > 16
        places = [40 + i for draft in drafts for i in range(1 + len(draft))]
        ids = [seq_id for seq_id, draft in enumerate(drafts) for _ in range(1 + len(draft))]
        with pytest.raises(Unsupported, match="n_ubatch"):
            engine.decode(tokens, places, ids, [True] * len(tokens))


def test_a_refused_cut_changes_nothing() -> None:
    cutter = Cutter(64, 130)
    engine = cutter.engine
    whole = cutter.expected(130)
    cutter.clear()
    engine.load(1, cutter.saved())
    for cut in (1, 64, 100, 128):
        with pytest.raises(Unsupported, match="sliding window"):
            engine.rollback(1, cut)
        with pytest.raises(Unsupported, match="sliding window"):
            engine.fork(1, {2: cutter.sampler()}, cut)
    assert cutter.answer(1) == whole
    cutter.close()


def test_copies_of_the_model_differ_in_the_window_alone() -> None:
    assert [Model(windowed(n)).meta("mimo2.attention.sliding_window") for n in (64, 500)] == [
        "64",
        "500",
    ]


def test_chance_cuts_of_chance_lengths() -> None:
    """Any window, length and cut: none is wrong."""
    chance = random.Random(12)
    for _ in range(12):
        n_window, n_held = chance.choice((64, 100, 500)), chance.randrange(20, 560)
        cutter = Cutter(n_window, n_held)
        for _ in range(3):
            way, cut = chance.choice(list(WAYS)), chance.randrange(1, n_held + 1)
            assert cutter.verdict(WAYS[way], cut) != "WRONG", (n_window, n_held, way, cut)
        cutter.close()
