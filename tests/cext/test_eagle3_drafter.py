"""Trees of an EAGLE-3 model: the drafts of llama.cpp's own chain, after any history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.support.demo import prompts
from tests.support.hand import DENSE, EAGLE3, HYBRID, SIMPLE, model, sampler, verify

from drafthouse_engine import (
    BadPlan,
    Batch,
    Closed,
    DecoderConfig,
    DecoderPool,
    DraftTree,
    Eagle3Drafter,
    Eagle3Session,
    IncompatibleDraft,
    InvalidArgument,
    NotEagle3,
    ProposalPending,
    SessionConfig,
    TreeDecoder,
)

pytestmark = pytest.mark.model

N_CTX = 128


@pytest.fixture
def target() -> Iterator[TreeDecoder]:
    config = DecoderConfig(n_ctx_seq=N_CTX, n_branch_max=16, n_threads=1)
    with DecoderPool(model(), config) as pool:
        yield pool.tree_decoder()


@pytest.fixture
def drafter(target: TreeDecoder) -> Iterator[Eagle3Drafter]:
    with Eagle3Drafter(target, model(EAGLE3[DENSE])) as made:
        yield made


def chain(drafter: Eagle3Drafter, n: int) -> list[int]:
    """Returns the likeliest chain."""
    row = drafter.draft_root()
    assert row is not None
    tokens = [int(row.argmax())]
    while len(tokens) < n:
        row = drafter.draft_nodes(tokens[-1:], [len(tokens) - 1])[0]
        tokens.append(int(row.argmax()))
    drafter.end_draft()
    return tokens


def root_row(history: Sequence[int]) -> np.ndarray:
    """Returns the first row of a draft after a history that was read at once."""
    config = DecoderConfig(n_ctx_seq=N_CTX, n_branch_max=16, n_threads=1)
    with DecoderPool(model(), config) as pool:
        decoder = pool.tree_decoder()
        with Eagle3Drafter(decoder, model(EAGLE3[DENSE])) as fresh:
            decoder.observe(history)
            row = fresh.draft_root()
    assert row is not None
    return row


def test_a_chain_is_that_of_llama_cpp(target: TreeDecoder, drafter: Eagle3Drafter) -> None:
    prompt = list(prompts((50,))[0])
    settings = SessionConfig(n_seq=1, n_ctx_seq=N_CTX, n_draft_max=3, n_threads=1)
    with Eagle3Session(model(), model(EAGLE3[DENSE]), settings) as session:
        session.begin(0, prompt, sampling=sampler().params)
        target.observe(prompt)
        last = session.sample(0)
        n_equal = 0
        for _ in range(8):
            target.observe([last])
            theirs = session.draft(0, session.n_past(0), last)
            n_equal += chain(drafter, len(theirs)) == theirs
            batch = Batch.of(0, session.n_past(0), [last, *theirs])
            session.decode(batch)
            session.process(batch)
            tokens = verify(session, 0, theirs)
            target.observe(tokens[:-1])
            last = tokens[-1]
    assert n_equal >= 7  # a tie of two drafts may fall either way


@pytest.mark.parametrize("is_scored_before", [False, True])
def test_states_follow_a_committed_path(
    is_scored_before: bool, target: TreeDecoder, drafter: Eagle3Drafter
) -> None:
    prompt = list(prompts((20,))[0])
    target.observe(prompt)
    if is_scored_before:
        target.next_logits()
    tree = DraftTree.from_paths(prompt[-1], [[5, 6, 7], [5, 9], [11]])
    target.tree_logits_keep_kv(tree)
    target.grow_tree([13], [tree.child(tree.child(0, 5) or 0, 9) or 0])
    target.commit_tree_path([0, 1, 4, 6])
    assert target.history[-3:] == (5, 9, 13)
    target.observe([21])
    row = drafter.draft_root()
    assert row is not None
    expected = root_row([*prompt, 5, 9, 13, 21])
    assert float(np.abs(row - expected).max()) < 0.05
    assert float(np.abs(root_row([*prompt, 5, 6, 13, 21]) - expected).max()) > 0.5


@pytest.mark.parametrize("n_back", [1, 3, 12])
def test_a_history_that_was_cut_drafts_as_a_new_one(
    n_back: int, target: TreeDecoder, drafter: Eagle3Drafter
) -> None:
    prompt = list(prompts((20,))[0])
    target.observe([*prompt, 3, 4, 5])
    assert drafter.draft_root() is not None
    drafter.draft_nodes([1, 2], [0, 0])
    drafter.end_draft()
    target.rollback_to(len(prompt) + 3 - n_back)
    target.observe([7, 8])
    row = drafter.draft_root()
    assert row is not None
    expected = root_row([*[*prompt, 3, 4, 5][: len(prompt) + 3 - n_back], 7, 8])
    assert float(np.abs(row - expected).max()) < 0.05


def test_each_node_sees_its_path_alone(target: TreeDecoder, drafter: Eagle3Drafter) -> None:
    target.observe(list(prompts((20,))[0]))

    def rows(tokens: list[int], parents: list[int]) -> np.ndarray:
        assert drafter.draft_root() is not None
        found = drafter.draft_nodes(tokens, parents)
        drafter.end_draft()
        return found

    both = rows([5, 9], [0, 0])
    assert float(np.abs(both[0] - rows([5], [0])[0]).max()) < 0.05
    assert float(np.abs(both[1] - rows([9], [0])[0]).max()) < 0.05


def test_one_token_has_nothing_to_draft_from(target: TreeDecoder, drafter: Eagle3Drafter) -> None:
    with pytest.raises(BadPlan, match="history is empty"):
        drafter.draft_root()
    target.observe([5])
    assert drafter.draft_root() is None
    target.observe([6])
    assert drafter.draft_root() is not None


def test_wrong_orders_and_nodes_are_refused(target: TreeDecoder, drafter: Eagle3Drafter) -> None:
    target.observe([5, 6, 7])
    with pytest.raises(BadPlan, match="no tree was begun"):
        drafter.draft_nodes([1], [0])
    drafter.draft_root()
    with pytest.raises(ProposalPending):
        drafter.draft_root()
    for parents in ([1], [-1]):
        with pytest.raises(InvalidArgument, match="parents"):
            drafter.draft_nodes([1], parents)
    with pytest.raises(InvalidArgument, match="branches"):
        drafter.draft_nodes(list(range(64)), [0] * 64)
    assert len(drafter.draft_nodes([1], [0])) == 1
    drafter.end_draft()
    drafter.end_draft()
    context = drafter._context
    with pytest.raises(BadPlan, match="states for 0 tokens"):
        context.decode(0, [1], True)
    with pytest.raises(InvalidArgument, match="states must be"):
        context.set_states(np.zeros((1, 3), np.float32))
    with pytest.raises(IncompatibleDraft):
        Eagle3Drafter(target, model(EAGLE3[HYBRID]))
    with pytest.raises(NotEagle3):
        Eagle3Drafter(target, model(SIMPLE))


def test_a_closed_target_or_drafter_refuses(target: TreeDecoder, drafter: Eagle3Drafter) -> None:
    target.observe([5, 6, 7])
    target.pool.close()
    with pytest.raises(Closed):
        drafter.draft_root()
    drafter.close()
    drafter.close()


def test_a_target_goes_on_without_its_drafter(target: TreeDecoder) -> None:
    target.observe([5, 6, 7])
    before = target.next_logits()
    with Eagle3Drafter(target, model(EAGLE3[DENSE])) as made:
        assert made.draft_root() is not None
    target.rollback_to(2)
    target.observe([7])
    assert float(np.abs(target.next_logits() - before).max()) < 0.05
