"""A rollback by hand takes back the cells of both contexts, or is refused."""

from __future__ import annotations

import pytest
from tests.support.demo import EAGLE3, MODELS, SIMPLE, TARGETS
from tests.support.hand import HYBRID, engine, model, plan, sampler, started, tokens_of

from drafthouse_engine import (
    DraftType,
    Engine,
    EngineParams,
    Model,
    ResultFlag,
    Sampler,
    SamplingParams,
    Start,
    Unsupported,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.mark.parametrize("draft_type", ["mtp", "eagle3", "simple"])
def test_a_rollback_frees_the_drafts_cells_too(draft_type: str) -> None:
    """EAGLE-3 and simple drafts kept theirs: the draft's cache then held a future of nobody."""
    file = {"eagle3": EAGLE3["dense"], "simple": SIMPLE}.get(draft_type)
    draft = Model(MODELS / file) if file else None
    with Model(MODELS / TARGETS["dense"]) as target:
        params = EngineParams(
            draft_type=draft_type,  # type: ignore[arg-type]  # parametrised by its names
            n_ctx_seq=64,
            n_batch=64,
            n_ubatch=64,
            n_threads=1,
        )
        with Engine(target, draft, params) as engine:
            engine.seq_begin(0, Sampler(target, SamplingParams(temperature=0.0)))
            tokens = list(range(300, 330))
            engine.decode(tokens, range(30), [0] * 30, [False] * 30)
            engine.process()
            engine.rollback(0, 10)
            assert engine.seq_n_past(0) == engine.n_cells_used == 10
            engine.decode(tokens[:5], range(10, 15), [0] * 5, [False] * 5)
            engine.process()
            assert engine.n_cells_used == 15


def logprobs_after(driven: Engine, seq_id: int, tokens: list[int], n_rest: int) -> list[float]:
    """Gives a sequence the rest of its tokens in one step; the best tokens that follow."""
    n_past = driven.seq_n_past(seq_id)
    assert n_past + n_rest == len(tokens)
    result = driven.step(plan((seq_id, n_past, 0, n_rest, 0, 1)), tokens[n_past:])
    assert not result.entries["status"].any()
    return [float(x) for x in result.top_logprobs[0]]


def decode(driven: Engine, seq_id: int, n_past: int, tokens: list[int]) -> None:
    """Gives a sequence tokens by hand, none of them an output."""
    n = len(tokens)
    driven.decode(tokens, range(n_past, n_past + n), [seq_id] * n, [False] * n)
    driven.process()


@pytest.mark.parametrize("pieces", [(9, 1, 1, 1), (9, 3), (9, 2, 1), (4, 8), (12,)])
@pytest.mark.parametrize("n_back", [1, 2, 3])
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_recurrent_target_goes_back_to_the_right_state_or_says_no(
    pieces: tuple[int, ...], n_back: int, has_neighbour: bool
) -> None:
    """There are states of the last decode's tokens only: a token further back was a stale one."""
    tokens = [300 + 7 * i % 90 for i in range(12)]
    sampling = SamplingParams(temperature=0.0, logprobs=True, n_top_logprobs=8)
    with engine("mtp", HYBRID, n_draft_max=4) as driven:
        for seq_id in range(3):
            driven.seq_begin(seq_id, Sampler(model(HYBRID), sampling))
        expected = logprobs_after(driven, 2, tokens, len(tokens))
        at = 0
        for n in pieces:
            decode(driven, 0, at, tokens[at : at + n])
            at += n
        if has_neighbour:
            decode(driven, 1, 0, tokens[:5])
        try:
            driven.rollback(0, at - n_back)
        except Unsupported:
            assert n_back >= pieces[-1] or has_neighbour, "the last decode has its states"
            driven.rollback(0, 0)
        n_rest = len(tokens) - driven.seq_n_past(0)
        assert logprobs_after(driven, 0, tokens, n_rest) == pytest.approx(expected, abs=0.03)


def test_a_step_keeps_states_for_its_drafts_alone() -> None:
    """Nobody goes back into a prompt: to keep its last states took a seventh of a step's time."""
    tokens = [300 + 7 * i % 90 for i in range(40)]
    with engine("mtp", HYBRID, n_draft_max=4) as driven:
        driven.seq_begin(0, Sampler(model(HYBRID), SamplingParams(temperature=0.0)))
        result = driven.step(plan((0, 0, 0, 40, 0, 1)), tokens)
        with pytest.raises(Unsupported, match="can go back 0 tokens"):
            driven.rollback(0, 39)
        # Drafts have theirs, whatever a neighbour's prompt in the same step has.
        driven.seq_begin(1, Sampler(model(HYBRID), SamplingParams(temperature=0.0)))
        last = result.tokens.tolist()
        n_rejected = 0
        for _ in range(12):
            n_past = driven.seq_n_past(0)
            result = driven.step(
                plan((0, n_past, 0, 1, 4, 1), (1, driven.seq_n_past(1), 1, 3, 0, 0)),
                [*last, *tokens[:3]],
            )
            entry = result.entries[0]
            assert not result.entries["status"].any()
            assert not entry["flags"] & ResultFlag.REPLAYED
            n_rejected += int(entry["n_drafted"]) - int(entry["n_accepted"])
            start, n = int(entry["token_offset"]), int(entry["n_tokens"])
            last = result.tokens[start : start + n].tolist()[-1:]
        assert n_rejected > 0


DRAFT_TYPES: tuple[DraftType, ...] = ("mtp", "eagle3", "simple")


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_a_snapshot_taken_after_a_rollback_loads(draft_type: DraftType) -> None:
    """EAGLE-3's last row stayed where the sequence no longer was, and its snapshot was refused."""
    with engine(draft_type) as driven:
        driven.seq_begin(0, sampler())
        decode(driven, 0, 0, list(range(300, 330)))
        driven.rollback(0, 10)
        blob = driven.save(0)
        driven.load(1, blob)
        assert driven.seq_n_past(1) == 10
        driven.seq_end(1)
        assert started(driven, Start(1, None, 10, snapshot=blob, is_resumed=True)) == 10


def drafts_after(
    driven: Engine, pieces: list[list[int]], n_kept: int, n_more: int
) -> list[list[int]]:
    """Verifies tokens piece by piece, keeps some of them, and drafts for both sequences.

    The second one, which only ever holds the prompt, drafts beside the first.
    """
    prompt = tokens_of("def parse(text):\n    return text.split()\n")
    for seq_id in (0, 1):
        driven.seq_begin(seq_id, sampler())
        decode(driven, seq_id, 0, prompt)
    n_past = len(prompt)
    driven.draft_many([(0, n_past, pieces[0][0], 3)])
    for piece in pieces:
        driven.decode(
            piece, range(n_past, n_past + len(piece)), [0] * len(piece), [True] * len(piece)
        )
        driven.process()
        n_past += len(piece)
    driven.accept(0, n_kept)
    for _ in range(n_more):
        n_past = driven.seq_n_past(0)
        driven.draft_many([(0, n_past, 7, 3)])
        decode(driven, 0, n_past, [7])
        driven.accept(0, 0)
    driven.seq_end(2)
    driven.load(2, driven.save(0))
    drafts = driven.draft_many([(1, len(prompt), 5, 3), (0, driven.seq_n_past(0), 7, 3)])
    for seq_id in range(3):
        driven.seq_end(seq_id)
    return drafts


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_a_draft_may_be_verified_in_several_decodes(draft_type: DraftType) -> None:
    """The drafter went on from a row of the last decode alone, whichever had the last token kept.

    With EAGLE-3 its position was another one as well, at which no sequence got a draft.
    """
    prompt = tokens_of("def parse(text):\n    return text.split()\n")
    with engine(draft_type) as driven:
        driven.seq_begin(0, sampler())
        decode(driven, 0, 0, prompt)
        (draft,) = driven.draft_many([(0, len(prompt), 5, 3)])
        assert len(draft) == 3
        driven.seq_end(0)
        for n_kept in range(4):
            whole = drafts_after(driven, [[5, *draft]], n_kept, 0)
            assert [len(tokens) for tokens in whole] == [3, 3]
            for n_first in (1, 2, 3):
                tokens = [5, *draft]
                pieces = [tokens[:n_first], tokens[n_first:]]
                beside, own = drafts_after(driven, pieces, n_kept, 0)
                assert beside == whole[0]
                if n_kept >= n_first:  # the last decode has the row
                    assert own == whole[1]
                # Else it goes on without: at the latest with the next tokens it drafts again.
                assert [len(x) for x in drafts_after(driven, pieces, n_kept, 1)] == [3, 3]


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
def test_what_is_decoded_behind_an_empty_draft_can_be_taken_back(draft_type: DraftType) -> None:
    with engine(draft_type, p_min=0.999) as driven:
        beside, _ = drafts_after(driven, [[5, 6, 7]], 0, 0)
        alone, _ = drafts_after(driven, [[5]], 0, 0)
        assert beside == alone


@pytest.mark.parametrize("counts", [(1, 3, 3), (1, 3), (2, 1)])
def test_a_shared_recurrent_pool_verifies_equally_many_tokens_of_each(
    counts: tuple[int, ...],
) -> None:
    """Two and four tokens passed for three sequences of two: the four could not be taken back."""
    prompt = tokens_of("def parse(text):\n")
    with engine("mtp", HYBRID, n_draft_max=3, n_rs_seq=3, kv_unified=True, n_ctx=1024) as driven:
        ids = (1, 0, 2)[: len(counts)]
        last = {}
        for seq_id in ids:
            driven.seq_begin(seq_id, sampler(name=HYBRID))
            rows = plan((seq_id, 0, 0, len(prompt), 0, 1))
            last[seq_id] = driven.step(rows, prompt).tokens.tolist()[0]
        n_past = len(prompt)
        drafts = driven.draft_many([(seq_id, n_past, last[seq_id], 3) for seq_id in ids])

        def verified(n_drafted: tuple[int, ...]) -> None:
            tokens, positions, seq_ids = list[int](), list[int](), list[int]()
            for seq_id, draft, n in zip(ids, drafts, n_drafted, strict=True):
                tokens += [last[seq_id], *draft[:n]]
                positions += range(n_past, n_past + 1 + n)
                seq_ids += [seq_id] * (1 + n)
            driven.decode(tokens, positions, seq_ids, [True] * len(tokens))
            driven.process()

        with pytest.raises(Unsupported, match="equally many tokens"):
            verified(counts)
        verified((3,) * len(counts))
        for seq_id in ids:
            driven.accept(seq_id, 0)
            assert driven.seq_n_past(seq_id) == n_past + 1


@pytest.mark.parametrize("pieces", [(1, 1), (1, 2), (2, 2)])
def test_a_recurrent_target_refuses_to_take_back_what_an_earlier_decode_brought(
    pieces: tuple[int, ...],
) -> None:
    """It has the states of its last decode alone: `accept` ended the sequence."""
    prompt = tokens_of("def parse(text):\n")
    with engine("mtp", HYBRID, n_draft_max=3, n_rs_seq=3) as driven:
        driven.seq_begin(0, sampler(name=HYBRID))
        last = driven.step(plan((0, 0, 0, len(prompt), 0, 1)), prompt).tokens.tolist()
        (draft,) = driven.draft_many([(0, len(prompt), last[0], 3)])
        for n in pieces:
            n_past = driven.seq_n_past(0)
            piece = [*last, *draft][n_past - len(prompt) :][:n]
            driven.decode(piece, range(n_past, n_past + n), [0] * n, [True] * n)
            driven.process()
        with pytest.raises(Unsupported, match="of this draft"):
            driven.accept(0, pieces[0] - 1)
        assert driven.seq_n_past(0) == len(prompt) + sum(pieces)
        driven.accept(0, sum(pieces) - 1)
        driven.seq_begin(1, sampler(name=HYBRID))
        tokens = [*prompt, *last, *draft[: sum(pieces) - 1]]
        n = len(tokens)
        driven.step(plan((1, 0, 0, n, 0, 0)), tokens)
        n_past = driven.seq_n_past(0)
        driven.decode([7], [n_past], [0], [True])
        found = driven.logits(0)
        driven.process()
        driven.decode([7], [n], [1], [True])
        assert found == pytest.approx(driven.logits(0), abs=0.03)
