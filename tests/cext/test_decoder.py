"""Decoders on the demo models: rows, rollback, trees, hidden states, projection, refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from models.archs import write_model
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS, prompts

import drafthouse_engine
from drafthouse_engine import (
    BadPlan,
    BadSeqId,
    CacheRollback,
    Closed,
    Decoder,
    DecoderConfig,
    DecoderPool,
    DraftTree,
    EngineError,
    EngineParams,
    InvalidArgument,
    InvalidConfig,
    Model,
    NoRoom,
    ProposalPending,
    Sampler,
    SamplingParams,
    SeqBusy,
    TreeDecoder,
    Unsupported,
    WrongRoot,
    WrongThread,
)

pytestmark = pytest.mark.model

NAMES = {"dense": TARGETS["dense"], "hybrid": TARGETS["hybrid"], "draft": SIMPLE}
WIDTH_TOLERANCE = 0.2
"""By how much the logits, of size 10 to 20, of decodes of other widths may differ at most, through
rounding: 0.004 on a CPU, 0.055 with four times the rounding of a GPU. What is wrong differs by
more than 4."""
PROMPT = prompts((48,))[0]
DRAFTS = PROMPT[40:46]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Model]]:
    opened = {name: Model(MODELS / file) for name, file in NAMES.items()}
    yield opened
    for model in opened.values():
        model.close()


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(name: str, models: dict[str, Model]) -> Iterator[DecoderPool]:
    config = DecoderConfig(n_seq=3, n_ctx_seq=128, n_rs_seq=6, n_threads=1)
    with DecoderPool(models[name], config) as pool:
        yield pool


@pytest.fixture
def dense(models: dict[str, Model]) -> Iterator[DecoderPool]:
    config = DecoderConfig(n_seq=2, n_branch_max=8, n_outputs_max=24, n_ctx_seq=128, n_threads=1)
    with DecoderPool(models["dense"], config) as pool:
        yield pool


def gap(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def plain_logits(pool: DecoderPool, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Returns the logits after a history that was decoded without drafts, rollback or trees."""
    with pool.decoder() as decoder:
        decoder.observe(tokens)
        return decoder.next_logits().copy()


# Rows.


def test_rows_are_those_of_the_engine(pool: DecoderPool) -> None:
    model = pool.model
    params = EngineParams(n_ctx_seq=128, n_threads=1)
    with drafthouse_engine.Engine(model, None, params) as engine, pool.decoder() as decoder:
        engine.seq_begin(0, Sampler(model, SamplingParams(temperature=0.0)))
        n = len(PROMPT)
        engine.decode(PROMPT, range(n), [0] * n, [i == n - 1 for i in range(n)])
        decoder.observe(PROMPT)
        assert gap(decoder.next_logits(), engine.logits(n - 1)) <= WIDTH_TOLERANCE


def test_the_next_logits_are_computed_once(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT)
    first = decoder.next_logits()

    def refuse(*_args: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(decoder, "_score", refuse)
    assert np.shares_memory(decoder.next_logits(), first)
    assert not first.flags.writeable


def test_history_is_what_was_observed(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    assert decoder.history == ()
    decoder.observe(PROMPT[:5])
    decoder.observe([])
    decoder.observe(np.array(PROMPT[5:9], np.int32))
    assert decoder.history == PROMPT[:9]
    assert decoder.history_len == 9
    decoder.reset()
    assert decoder.history == ()
    decoder.observe(PROMPT)
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT)) == 0.0


def test_one_by_one_equals_at_once(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    for i, token in enumerate(PROMPT):
        decoder.observe([token])
        if i % 7 == 0:
            decoder.next_logits()
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT)) <= WIDTH_TOLERANCE


@pytest.mark.parametrize("is_scored_before", [False, True])
def test_batched_rows_equal_those_of_each_history(
    pool: DecoderPool, is_scored_before: bool
) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT[:40])
    if is_scored_before:
        decoder.next_logits()
    rows = decoder.batched_logits(DRAFTS)
    assert rows.shape == (len(DRAFTS) + 1, pool.model.n_vocab)
    assert decoder.history == PROMPT[:46]
    for i in range(len(rows)):
        assert gap(rows[i], plain_logits(pool, PROMPT[: 40 + i])) <= WIDTH_TOLERANCE
    assert np.array_equal(decoder.next_logits(), rows[-1])


@pytest.mark.parametrize("is_scored_before", [False, True])
@pytest.mark.parametrize("n_kept", range(len(DRAFTS) + 1))
def test_rollback_then_continue_equals_a_plain_history(
    pool: DecoderPool, n_kept: int, is_scored_before: bool
) -> None:
    wrong = [(token + 1) % 2048 for token in DRAFTS[n_kept:]]
    decoder = pool.decoder()
    decoder.observe(PROMPT[:40])
    if is_scored_before:
        decoder.next_logits()
    rows = decoder.batched_logits([*DRAFTS[:n_kept], *wrong])
    decoder.rollback_to(40 + n_kept)
    assert decoder.history == PROMPT[: 40 + n_kept]
    assert np.array_equal(decoder.next_logits(), rows[n_kept])
    decoder.observe(PROMPT[40 + n_kept :])
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT)) <= WIDTH_TOLERANCE


def test_rollback_beyond_every_snapshot_decodes_again(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT)
    decoder.next_logits()
    decoder.rollback_to(30)
    decoder.rollback_to(20)
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT[:20])) <= WIDTH_TOLERANCE
    decoder.rollback_to(0)
    with pytest.raises(BadPlan, match="empty"):
        decoder.next_logits()
    decoder.observe(PROMPT[:10])
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT[:10])) <= WIDTH_TOLERANCE


def test_decoders_of_a_pool_do_not_disturb_one_another(pool: DecoderPool) -> None:
    histories = [PROMPT[:20], PROMPT[10:40]]
    decoders = [pool.decoder() for _ in histories]
    for decoder, history in zip(decoders, histories, strict=True):
        decoder.observe(history[:-1])
    for decoder, history in zip(decoders, histories, strict=True):
        decoder.observe(history[-1:])
        decoder.batched_logits([5, 6, 7])
    for decoder, history in zip(decoders, histories, strict=True):
        decoder.rollback_to(len(history))
        decoder.observe([9])
    for decoder, history in zip(decoders, histories, strict=True):
        assert gap(decoder.next_logits(), plain_logits(pool, [*history, 9])) <= WIDTH_TOLERANCE


# Hidden states, embedding, projection.


def test_the_projection_of_the_last_hidden_state_is_the_logits(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT)
    hidden = decoder.last_hidden_state()
    assert hidden.shape == (pool.limits.n_embd_out,)
    scores = decoder.apply_lm_head(hidden)
    assert scores.shape == (1, pool.model.n_vocab)
    assert gap(scores[0], decoder.next_logits()) <= 1e-3
    other = np.stack([hidden, 2 * hidden])
    assert gap(decoder.apply_lm_head(other)[1], 2 * scores[0]) <= 0.05


def test_the_projection_needs_no_history(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    width = pool.limits.n_embd_out
    assert not decoder.apply_lm_head(np.zeros(width)).any()
    assert decoder.history == ()


def test_a_projection_that_is_not_the_models_is_refused(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT)
    plain = decoder._project
    monkeypatch.setattr(decoder, "_project", lambda rows: 0.9 * plain(rows))  # a scaled model
    with pytest.raises(Unsupported, match="does more than multiply"):
        decoder.apply_lm_head(decoder.last_hidden_state())


def test_hidden_states_of_layers(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT)
    before = decoder.next_logits().copy()
    layers = list(range(decoder.num_hidden_layers))
    hidden, rows = decoder.last_hidden_states_multi(layers)
    assert rows.shape == (len(layers), pool.limits.n_embd)
    assert np.array_equal(hidden, decoder.last_hidden_state())
    assert gap(decoder.next_logits(), before) <= WIDTH_TOLERANCE
    assert len({row.tobytes() for row in rows}) == len(layers)
    _, picked = decoder.last_hidden_states_multi([layers[-1], 0])
    assert np.array_equal(picked, rows[[-1, 0]])
    # After one more token the rows are others, and are kept without being asked for again.
    decoder.observe(DRAFTS[:1])
    _, moved = decoder.last_hidden_states_multi(layers)
    assert gap(moved, rows) > 0.01


def test_the_last_layer_is_where_it_is_said_to_be(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    last = decoder.num_hidden_layers - 1
    ratios = []
    for prompt in (PROMPT[:20], PROMPT[20:40]):
        decoder.reset()
        decoder.observe(prompt)
        hidden, rows = decoder.last_hidden_states_multi([last])
        if pool.limits.is_last_layer_normed:
            assert np.array_equal(rows[0], hidden)
        else:
            scale = np.sqrt((rows[0].astype(np.float64) ** 2).mean())
            ratios.append(hidden / (rows[0] / scale))  # the norm's weight, whatever the row
    if ratios:
        assert np.allclose(ratios[0], ratios[1], rtol=1e-3)


def test_embedding_rows(name: str, pool: DecoderPool) -> None:
    decoder = pool.decoder()
    rows = decoder.embed_tokens([5, 9, 5])
    assert rows.shape == (3, pool.limits.n_embd)
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
    if name == "draft":  # its embedding and its projection are one matrix
        scores = decoder.apply_lm_head(rows)
        assert scores[0, 9] == pytest.approx(float(rows[0] @ rows[1]), abs=0.02)


def test_tokenizer(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    text = "def f(x):\n    return x\n"
    ids = decoder.encode(text)
    assert all(isinstance(token, int) for token in ids)
    assert decoder.decode(ids) == text
    end = decoder.eos_token_ids[0]
    assert decoder.decode([*ids, end]) == text
    assert decoder.decode([*ids, end], skip_special=False) != text
    assert decoder.vocab_size == 2048


# Trees.


def tree_of(root: int) -> DraftTree:
    """Returns a tree of four paths, two of them right for a while."""
    return DraftTree.from_paths(
        root, [DRAFTS, [*DRAFTS[:2], 7, 8], [11, 12], [*DRAFTS[:4], 13], [14]]
    )


@pytest.mark.parametrize("is_scored_before", [False, True])
def test_each_node_sees_its_path_alone(dense: DecoderPool, is_scored_before: bool) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    if is_scored_before:
        decoder.next_logits()
    tree = tree_of(PROMPT[39])
    rows = decoder.tree_logits(tree)
    assert rows.shape == (len(tree), 2048)
    assert decoder.history == PROMPT[:40]
    assert np.array_equal(decoder.next_logits(), rows[0])
    with dense.decoder() as other:
        other.observe(PROMPT[:40])
        for leaf in tree.leaves:
            path = tree.path_to(leaf)
            expected = other.batched_logits([tree.tokens[node] for node in path[1:]])
            assert gap(rows[path], expected) <= WIDTH_TOLERANCE
            other.rollback_to(40)


def test_a_tree_leaves_history_and_cache_as_they_were(dense: DecoderPool) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    tree = tree_of(PROMPT[39])
    first = decoder.tree_logits(tree).copy()
    assert gap(decoder.tree_logits(tree), first) <= WIDTH_TOLERANCE
    assert dense._context.seq_n_past(0) == 40
    decoder.observe(PROMPT[40:])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


@pytest.mark.parametrize("is_scored_before", [False, True])
@pytest.mark.parametrize("n_kept", [0, 1, 4, len(DRAFTS)])
def test_a_committed_path_is_plain_history(
    dense: DecoderPool, n_kept: int, is_scored_before: bool
) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    if is_scored_before:
        decoder.next_logits()
    tree = tree_of(PROMPT[39])
    rows = decoder.tree_logits_keep_kv(tree)
    path = [0]
    for token in DRAFTS[:n_kept]:
        child = tree.child(path[-1], token)
        assert child is not None
        path.append(child)
    decoder.commit_tree_path(path)
    assert decoder.tree is None
    assert decoder.history == PROMPT[: 40 + n_kept]
    assert dense._context.seq_n_past(0) == 40 + n_kept, "the path was not kept in the cache"
    assert np.array_equal(decoder.next_logits(), rows[path[-1]])
    decoder.observe(PROMPT[40 + n_kept :])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


@pytest.mark.parametrize("is_scored_before", [False, True])
def test_a_tree_that_grows_scores_as_one_at_once(
    dense: DecoderPool, is_scored_before: bool
) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    if is_scored_before:
        decoder.next_logits()
    decoder.tree_logits_keep_kv(DraftTree((PROMPT[39],), (-1,)))
    decoder.grow_tree([DRAFTS[0], 7], [0, 0])
    decoder.grow_tree([DRAFTS[1], 8, 9], [1, 1, 2])
    rows = decoder.grow_tree([DRAFTS[2], 10, 11], [3, 3, 1])
    grown = decoder.tree
    assert grown is not None
    assert grown.path_to(6) == [0, 1, 3, 6]
    decoder.commit_tree_path([0, 1, 3, 6])
    with dense.tree_decoder() as other:
        other.observe(PROMPT[:40])
        assert gap(rows, other.tree_logits(grown)[-3:]) <= WIDTH_TOLERANCE
    decoder.observe(PROMPT[43:])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


@pytest.mark.parametrize("n_waiting", [1, 2, 5, 8, 12])
def test_tokens_that_wait_come_with_the_tree(dense: DecoderPool, n_waiting: int) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[: 40 - n_waiting])
    decoder.next_logits()
    for token in PROMPT[40 - n_waiting : 40]:
        decoder.observe([token])
    tree = tree_of(PROMPT[39])
    rows = decoder.tree_logits_keep_kv(tree)
    decoder.grow_tree([21], [0])
    decoder.commit_tree_path([0, 1, 2])
    assert dense._context.seq_n_past(0) == 42
    with dense.tree_decoder() as other:
        other.observe(PROMPT[:40])
        assert gap(rows, other.tree_logits(tree)) <= WIDTH_TOLERANCE
    decoder.observe(PROMPT[42:])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


def test_hidden_rows_follow_a_committed_path(dense: DecoderPool) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    decoder.last_hidden_states_multi([2])
    decoder.tree_logits_keep_kv(tree_of(PROMPT[39]))
    decoder.commit_tree_path([0, 1, 2])
    hidden, rows = decoder.last_hidden_states_multi([2])
    with dense.decoder() as other:
        other.observe(PROMPT[:42])
        expected, expected_rows = other.last_hidden_states_multi([2])
        assert gap(hidden, expected) <= 0.05
        assert gap(rows, expected_rows) <= 0.1


def test_tree_refusals_change_nothing(dense: DecoderPool) -> None:
    decoder = dense.tree_decoder()
    with pytest.raises(BadPlan, match="empty"):
        decoder.tree_logits(tree_of(1))
    decoder.observe(PROMPT[:40])
    with pytest.raises(WrongRoot) as error:
        decoder.tree_logits(tree_of(PROMPT[39] + 1))
    assert (error.value.root, error.value.last) == (PROMPT[39] + 1, PROMPT[39])
    root = PROMPT[39]
    wide = DraftTree.from_paths(root, [[i] for i in range(9)])
    with pytest.raises(InvalidArgument, match="needs 9 branches; this context has 8"):
        decoder.tree_logits(wide)
    with pytest.raises(InvalidArgument, match="31 nodes; at most 24"):
        decoder.tree_logits(DraftTree.chain(root, range(30)))
    with pytest.raises(InvalidArgument, match="token 2048"):
        decoder.tree_logits(DraftTree.chain(root, [2048]))
    with pytest.raises(BadPlan, match="no tree waits"):
        decoder.commit_tree_path([0])
    with pytest.raises(BadPlan, match="no tree waits"):
        decoder.grow_tree([1], [0])
    assert decoder.history == PROMPT[:40]
    decoder.observe(PROMPT[40:])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


def test_a_waiting_tree_is_committed_first(dense: DecoderPool) -> None:
    decoder, other = dense.tree_decoder(), dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    other.observe(PROMPT[:10])
    other.next_logits()
    decoder.tree_logits_keep_kv(tree_of(PROMPT[39]))
    calls: list[Callable[[], object]] = [
        lambda: decoder.observe([1]),
        lambda: decoder.batched_logits([1]),
        lambda: decoder.rollback_to(3),
        lambda: decoder.tree_logits(tree_of(PROMPT[39])),
    ]
    for call in calls:
        with pytest.raises(ProposalPending) as error:
            call()
        assert error.value.seq_id == 0
    with pytest.raises(BadPlan, match="a tree hangs on sequence 0"):
        other.tree_logits(tree_of(PROMPT[9]))
    for path in ([], [1], [0, 3], [0, 99]):
        with pytest.raises(InvalidArgument):
            decoder.commit_tree_path(path)
    decoder.commit_tree_path([0, 1])
    assert decoder.history == PROMPT[:41]
    other.tree_logits(tree_of(PROMPT[9]))
    decoder.tree_logits_keep_kv(tree_of(PROMPT[40]))
    decoder.reset()
    assert decoder.tree is None
    other.tree_logits(tree_of(PROMPT[9]))


def test_a_refused_growth_drops_the_tree(dense: DecoderPool) -> None:
    decoder = dense.tree_decoder()
    decoder.observe(PROMPT[:40])
    decoder.tree_logits_keep_kv(tree_of(PROMPT[39]))
    with pytest.raises(InvalidArgument, match="branches"):
        decoder.grow_tree(range(8), [0] * 8)
    assert decoder.tree is None
    decoder.observe(PROMPT[40:])
    assert gap(decoder.next_logits(), plain_logits(dense, PROMPT)) <= WIDTH_TOLERANCE


def test_a_full_context_refuses_deep_trees(dense: DecoderPool) -> None:
    decoder = dense.tree_decoder()
    decoder.observe([3] * 126)
    assert decoder.tree_logits(DraftTree.chain(3, [1, 2])).shape == (3, 2048)
    with pytest.raises(NoRoom, match="room for 128"):
        decoder.tree_logits(DraftTree.chain(3, [1, 2, 4]))
    decoder.observe([5, 6])
    assert decoder.next_logits().shape == (2048,)


def test_recurrent_models_have_no_trees(models: dict[str, Model]) -> None:
    config = DecoderConfig(n_ctx_seq=64, n_threads=1)
    with DecoderPool(models["hybrid"], config) as pool:
        assert pool.limits.n_branch_max == 0
        with pytest.raises(Unsupported, match="single state per sequence"):
            pool.tree_decoder()


# Refusals.


def test_wrong_tokens_and_lengths_change_nothing(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    decoder.observe(PROMPT[:20])
    with pytest.raises(InvalidArgument, match="token 2048 is not in"):
        decoder.observe([1, 2048])
    with pytest.raises(InvalidArgument, match="token -1 is not in"):
        decoder.batched_logits([-1])
    with pytest.raises(InvalidArgument, match="at most 63"):
        decoder.batched_logits([1] * 64)
    with pytest.raises(NoRoom, match="would have 129 tokens"):
        decoder.observe([1] * 109)
    for length in (-1, 21):
        with pytest.raises(CacheRollback) as error:
            decoder.rollback_to(length)
        assert (error.value.length, error.value.history_len) == (length, 20)
    with pytest.raises(InvalidArgument, match="no layers"):
        decoder.last_hidden_states_multi([])
    with pytest.raises(InvalidArgument, match="layer"):
        decoder.last_hidden_states_multi([decoder.num_hidden_layers])
    with pytest.raises(InvalidArgument, match="hidden must be"):
        decoder.apply_lm_head(np.zeros(3))
    with pytest.raises(InvalidArgument):
        decoder.embed_tokens([])
    with pytest.raises(InvalidArgument):
        decoder.embed_tokens([2048])
    assert decoder.history == PROMPT[:20]
    assert gap(decoder.next_logits(), plain_logits(pool, PROMPT[:20])) == 0.0


def test_a_history_may_fill_its_room(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    decoder.observe([3] * 120)
    assert decoder.batched_logits([4] * 8).shape[0] == 9
    with pytest.raises(NoRoom):
        decoder.batched_logits([4])
    assert decoder.next_logits().shape == (2048,)


def test_nothing_to_score(pool: DecoderPool) -> None:
    decoder = pool.decoder()
    calls: list[Callable[[], object]] = [
        decoder.next_logits,
        decoder.last_hidden_state,
        lambda: decoder.batched_logits([1]),
        lambda: decoder.last_hidden_states_multi([0]),
    ]
    for call in calls:
        with pytest.raises(BadPlan, match="empty"):
            call()


def test_sequences_of_a_pool_are_counted(pool: DecoderPool) -> None:
    decoders = [pool.decoder() for _ in range(3)]
    assert [decoder.seq_id for decoder in decoders] == [0, 1, 2]
    with pytest.raises(SeqBusy, match="all 3"):
        pool.decoder()
    with pytest.raises(SeqBusy) as busy:
        pool.decoder(1)
    assert busy.value.seq_id == 1
    with pytest.raises(BadSeqId) as wrong:
        pool.decoder(3)
    assert (wrong.value.seq_id, wrong.value.n_seq) == (3, 3)
    decoders[1].observe(PROMPT)
    decoders[1].next_logits()
    decoders[1].close()
    decoders[1].close()
    with pytest.raises(Closed):
        decoders[1].next_logits()
    again = pool.decoder()
    assert (again.seq_id, again.history) == (1, ())
    again.observe(PROMPT[:7])
    assert again.next_logits().shape == (2048,)


def test_a_closed_pool_refuses(models: dict[str, Model]) -> None:
    pool = DecoderPool(models["dense"], DecoderConfig(n_ctx_seq=64, n_threads=1))
    decoder = pool.decoder()
    decoder.observe(PROMPT[:4])
    pool.close()
    pool.close()
    with pytest.raises(Closed):
        decoder.next_logits()
    decoder.close()


def test_a_pool_left_open_at_exit_is_silent() -> None:
    script = f"""
from drafthouse_engine import DecoderConfig, DecoderPool, Model
pool = DecoderPool(Model({str(MODELS / NAMES["dense"])!r}), DecoderConfig(n_threads=1))
decoder = pool.tree_decoder()
decoder.observe([1, 2, 3])
print(decoder.next_logits().shape)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=110
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "(2048,)\n", "")


def test_another_thread_is_refused(dense: DecoderPool) -> None:
    decoder = dense.decoder()
    decoder.observe(PROMPT[:4])
    caught: list[BaseException] = []

    def call() -> None:
        try:
            decoder.next_logits()
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [WrongThread]
    assert decoder.next_logits().shape == (2048,)


def test_models_that_cannot_decode_alone_are_refused() -> None:
    with Model(MODELS / EAGLE3["dense"]) as model, pytest.raises(Unsupported, match="eagle3"):
        DecoderPool(model)
    with (
        Model(MODELS / SIMPLE, vocab_only=True) as model,
        pytest.raises(InvalidArgument, match="vocab_only"),
    ):
        DecoderPool(model)
    with pytest.raises(Closed):
        DecoderPool(model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_seq", 0),
        ("n_seq", 257),
        ("n_branch_max", 256),
        ("n_outputs_max", 513),
        ("n_batch", 0),
        ("n_ubatch", 4096),
        ("n_ctx_seq", -1),
        ("n_rs_seq", 65),
        ("n_threads", 513),
        ("flash_attention", 1),
    ],
)
def test_configurations_are_checked(field: str, value: int) -> None:
    with pytest.raises(InvalidConfig) as error:
        DecoderConfig(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert (error.value.field, error.value.value) == (field, value)


def test_the_defaults_are_those_of_the_c_boundary() -> None:
    assert drafthouse_engine._spec.default_decoder_config() == DecoderConfig()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(n_branch_max=255, n_outputs_max=1, n_ubatch=1, n_batch=1, n_ctx_seq=1),
        DecoderConfig(n_seq=200, n_branch_max=0, n_ubatch=4, n_batch=4, n_outputs_max=2),
        DecoderConfig(n_seq=2, n_ubatch=2, n_batch=2, n_outputs_max=2, n_ctx_seq=9, n_rs_seq=64),
    ],
    ids=["one", "many", "snapshots"],
)
def test_the_smallest_and_greatest_sizes_work(
    config: DecoderConfig, name: str, models: dict[str, Model]
) -> None:
    small = DecoderConfig(
        **{field: getattr(config, field) for field in DecoderConfig.__slots__}
        | {"n_threads": 1, "n_ctx_seq": config.n_ctx_seq or 12}
    )
    with DecoderPool(models[name], small) as pool:
        decoder: Decoder | TreeDecoder = pool.decoder()
        decoder.observe([1] * pool.limits.n_ctx_seq)
        assert np.isfinite(decoder.next_logits()).all()


@pytest.mark.parametrize("name", ["lfm2", "deepseek4-mtp", "qwen4exp-mtp"])
def test_models_without_hidden_rows_beside_logits_are_refused(name: str, tmp_path: Path) -> None:
    """Of lfm2 all logits were 0; the others ended the process at the first decode."""
    with (
        Model(write_model(tmp_path / "m.gguf", name)) as model,
        pytest.raises(Unsupported, match=rf"\({name.removesuffix('-mtp')}\).*hidden rows"),
    ):
        DecoderPool(model, DecoderConfig(n_ctx_seq=64, n_threads=1))
