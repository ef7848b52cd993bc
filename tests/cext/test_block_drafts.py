"""DFlash and DSpark: drafts of whole blocks, from models with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.block_draft import N_VOCAB, block_draft, following, plain_target, repeating
from tests.support.hand import (
    DENSE,
    EAGLE3,
    GREEDY,
    HYBRID,
    SIMPLE,
    TEXTS,
    assert_same,
    driven,
    emitted,
    engine,
    fused,
    model,
    on_host,
    params,
    plan,
    sampler,
    tokens_of,
    verify,
)

from drafthouse_engine import (
    BadModel,
    Batch,
    DecoderConfig,
    DecoderPool,
    DflashSession,
    DraftRequest,
    DsparkSession,
    Eagle3Session,
    Embedder,
    Engine,
    IncompatibleDraft,
    InvalidArgument,
    Model,
    NotDflash,
    NotDspark,
    NotEagle3,
    Placement,
    ResultFlag,
    Sampler,
    SamplingParams,
    SessionConfig,
    SimpleSession,
    SpeculativeSession,
    Unsupported,
)

pytestmark = pytest.mark.model

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash with tables": {"has_own_tables": True},
    "dflash 2": {"has_selector": True},
    "dspark": {"markov_rank": 32, "has_confidence": True},
    "dspark after the anchor": {"markov_rank": 32, "keys": {"sample_from_anchor": False}},
}
CONFIG = SessionConfig(n_seq=3, n_draft_max=4, n_ctx_seq=256, n_batch=128, n_ubatch=64, n_threads=1)
N_TOKENS = 24
PROCESS_FAILS = 3  # SPEC_FAULT_PROCESS
PROMPTS = [tokens_of(text) for text in TEXTS]


def type_of(kind: str) -> Any:
    return "dspark" if kind.startswith("dspark") else "dflash"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    folder = tmp_path_factory.mktemp("drafts")
    made = {kind: Model(block_draft(folder / f"{kind}.gguf", **KINDS[kind])) for kind in KINDS}
    yield made
    for draft in made.values():
        draft.close()


def session_of(kind: str, draft: Model, config: SessionConfig = CONFIG) -> SpeculativeSession:
    make = DsparkSession if type_of(kind) == "dspark" else DflashSession
    return make(model(), draft, config)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("kind", KINDS)
def test_block_drafts_change_no_token(kind: str, name: str, drafts: dict[str, Model]) -> None:
    with engine(name=name) as plain:
        expected = fused(plain, PROMPTS, N_TOKENS)
    for is_unified in (False, True):
        fields = params(type_of(kind), n_draft_max=4, kv_unified=is_unified)
        with Engine(model(name), drafts[kind], fields) as speculative:
            assert_same(PROMPTS, expected, fused(speculative, PROMPTS, N_TOKENS, 4), name)
            work = speculative.draft_work
            assert work.n_passes < work.n_drafts / 2  # three sequences share a pass
            assert speculative.n_cells_used == 0
    if name == DENSE:
        with session_of(kind, drafts[kind]) as session:
            assert_same(PROMPTS, expected, driven(session, PROMPTS, N_TOKENS))
            assert session.stats().n_drafted > 0
            assert session.is_quiescent()


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_answer_as_the_others_do(kind: str, drafts: dict[str, Model]) -> None:
    with session_of(kind, drafts[kind]) as session:
        assert (session.need_embd, session.need_embd_pre_norm) == (True, False)
        assert (session.n_seq, session.n_draft_max, session.config) == (3, 4, CONFIG)


def test_a_draft_that_is_right_is_accepted_whole(tmp_path: Path) -> None:
    """The target is biased to one token, and the draft drafts nothing else."""
    token = tokens_of(" return")[0]
    path = block_draft(tmp_path / "one.gguf", has_own_tables=True, weights=repeating(token))
    sampling = SamplingParams(temperature=0.0, logit_bias=((token, 1000.0),))
    with Model(path) as draft, DflashSession(model(), draft, CONFIG) as session:
        for seq_id, prompt in enumerate(PROMPTS):
            session.begin(seq_id, prompt, sampling=sampling)
            assert session.sample(seq_id) == token
        for _ in range(3):
            requests = [DraftRequest(i, session.n_past(i), token) for i in range(3)]
            blocks = session.draft_many(requests)
            assert blocks == [[token] * 4] * 3
            batches = [Batch.of(i, session.n_past(i), [token] * 5) for i in range(3)]
            session.decode(batches[0] + batches[1] + batches[2])
            session.process()
            for i in range(3):
                assert verify(session, i, blocks[i]) == [token] * 5
        assert session.stats().acceptance_rate == 1.0
        assert session.n_past(0) == len(PROMPTS[0]) + 15


def test_dspark_drafts_each_token_from_the_one_before(tmp_path: Path) -> None:
    """A Markov head that knows the target's text drafts it, in one pass for a block."""
    with engine() as plain:
        expected = fused(plain, PROMPTS[:1], 40)[0]
    successors = dict(zip(expected[-2::-1], expected[:0:-1], strict=True))  # the first one counts
    weights = following(successors) | {"output.weight": np.zeros((N_VOCAB, 256), np.float16)}
    path = block_draft(tmp_path / "m.gguf", markov_rank=N_VOCAB, has_own_tables=True,
                       weights=weights)  # fmt: skip
    with (
        Model(path) as draft,
        Engine(model(DENSE), draft, params("dspark", n_draft_max=6)) as target,
    ):
        assert_same(PROMPTS[:1], [expected], fused(target, PROMPTS[:1], 40, 6))
        assert target.draft_work.n_passes < 30  # 39 without one accepted draft


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_gets_its_own_draft_length(kind: str, drafts: dict[str, Model]) -> None:
    """K cuts what is verified; a block is one pass, whatever K."""
    with session_of(kind, drafts[kind]) as session:
        requests = []
        for seq_id, n_draft in enumerate((1, 2, 4)):
            session.begin(seq_id, PROMPTS[2], sampling=GREEDY)
            token = session.sample(seq_id)
            requests.append(DraftRequest(seq_id, session.n_past(seq_id), token, n_draft))
        found = session.draft_many(requests)
        assert [len(draft) for draft in found] == [1, 2, 4]
        assert (found[0], found[1]) == (found[2][:1], found[2][:2])
        assert session.stats().n_draft_passes == 1
        n_block = 4 if kind == "dspark" else 5
        assert session.stats().n_draft_positions == 3 * n_block


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_depends_on_the_text_that_it_reads(kind: str, drafts: dict[str, Model]) -> None:
    """Else the tests of rollbacks, snapshots and forks below would show nothing."""
    with session_of(kind, drafts[kind]) as session:
        for seq_id, prompt in enumerate(PROMPTS):
            session.begin(seq_id, prompt, sampling=GREEDY)
        found = session.draft_many([DraftRequest(i, session.n_past(i), 50) for i in range(3)])
        assert found[0] != found[1]
        assert found[1] != found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_rollback_snapshot_and_cancel_leave_drafts_as_they_were(
    kind: str, drafts: dict[str, Model]
) -> None:
    prompt = PROMPTS[2]
    with session_of(kind, drafts[kind]) as session:
        session.begin(0, prompt, sampling=GREEDY)
        expected = session.draft(0, len(prompt), 50)
        session.decode(Batch.of(0, len(prompt), [50, *expected]))
        session.process()
        session.accept(0, 0)
        session.rollback(0, len(prompt))  # and what it had read before goes on
        assert not session.is_cold(0)
        assert session.draft(0, len(prompt), 50) == expected
        session.rollback(0, len(prompt))
        blob = session.save(0)
        session.begin(1, PROMPTS[0], sampling=GREEDY)
        session.draft(1, session.n_past(1), 7)
        session.end(1)  # cancelled in the middle of a round
        session.load(1, blob)
        assert session.draft(1, len(prompt), 50) == expected
        session.end(0)
        session.begin(0, prompt, sampling=GREEDY)
        assert session.draft(0, len(prompt), 50) == expected


@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_drafts_what_its_source_drafts(
    kind: str, is_unified: bool, drafts: dict[str, Model]
) -> None:
    prompt = PROMPTS[2]
    fields = params(type_of(kind), n_draft_max=4, kv_unified=is_unified)
    with Engine(model(DENSE), drafts[kind], fields) as target:
        target.seq_begin(0, sampler())
        by_hand(target, 0, prompt[:-1])
        target.fork(0, {2: sampler()})
        by_hand(target, 2, prompt[-2:])
        by_hand(target, 0, prompt[-1:])
        n = len(prompt)
        first, second = target.draft_many([(0, n, 50, 4), (2, n, 50, 4)])
        assert first == second


def by_hand(target: Engine, seq_id: int, tokens: list[int]) -> None:
    n_past, n = target.seq_n_past(seq_id), len(tokens)
    target.decode(tokens, range(n_past, n_past + n), [seq_id] * n, [False] * n)
    target.process()


@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_sequence_takes_no_drafts_from_others(
    kind: str, is_unified: bool, drafts: dict[str, Model]
) -> None:
    """The block of a sequence near its end has no room in the target, and must have it here."""
    fields = params(type_of(kind), n_draft_max=7, n_ctx_seq=256, kv_unified=is_unified)
    with Engine(model(DENSE), drafts[kind], fields) as target:
        prompt = (PROMPTS[2] * 20)[:254]
        for seq_id, tokens in enumerate((prompt, PROMPTS[0])):
            target.seq_begin(seq_id, sampler())
            for start in range(0, len(tokens), 100):
                by_hand(target, seq_id, tokens[start : start + 100])
        found = target.draft_many([(0, 254, 50, 1), (1, len(PROMPTS[0]), 50, 7)])
        assert [len(draft) for draft in found] == [1, 7]


@pytest.mark.parametrize("is_unified", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_many_sequences_are_not_cut(
    kind: str, is_unified: bool, drafts: dict[str, Model]
) -> None:
    """More tokens of blocks than a physical batch: llama.cpp would end the process."""
    fields = params(
        type_of(kind), n_draft_max=7, n_seq_max=12, n_batch=128, n_ubatch=16, kv_unified=is_unified
    )
    prompts = [PROMPTS[i % 3][:8] for i in range(12)]
    with engine(n_seq_max=12, n_ubatch=16, kv_unified=is_unified) as plain:
        expected = fused(plain, prompts, 8)
    with Engine(model(DENSE), drafts[kind], fields) as target:
        assert_same(prompts, expected, fused(target, prompts, 8, 7))
        assert target.draft_work.n_passes < target.draft_work.n_drafts / 6


@pytest.mark.parametrize("kind", KINDS)
def test_more_drafts_than_a_block_holds_are_not_offered(
    kind: str, drafts: dict[str, Model]
) -> None:
    config = dataclasses.replace(CONFIG, n_draft_max=16)
    with session_of(kind, drafts[kind], config) as session:
        assert session.n_draft_max == (8 if kind == "dspark" else 7)
        session.begin(0, PROMPTS[0], sampling=GREEDY)
        assert len(session.draft(0, session.n_past(0), 50)) == session.n_draft_max


def test_a_failed_drafter_leaves_its_sequences_cold(drafts: dict[str, Model]) -> None:
    with Engine(model(DENSE), drafts["dflash"], params("dflash")) as target:
        target.seq_begin(0, sampler())
        target.inject_fault(PROCESS_FAILS)
        prompt = PROMPTS[0]
        result = target.step(plan((0, 0, 0, len(prompt), 0, 1)), prompt)
        assert result.entries["flags"][0] & ResultFlag.DRAFT_COLD
        last = emitted(result, 0)
        result = target.step(plan((0, len(prompt), 0, 1, 3, 1)), last)
        assert (result.entries["status"][0], result.entries["n_drafted"][0]) == (0, 0)


def test_p_min_is_compared_with_the_confidence_head(
    drafts: dict[str, Model], tmp_path: Path
) -> None:
    def n_drafted(p_min: float) -> int:
        config = dataclasses.replace(CONFIG, p_min=p_min)
        with DsparkSession(model(), drafts["dspark"], config) as session:
            session.begin(0, PROMPTS[0], sampling=GREEDY)
            return len(session.draft(0, session.n_past(0), 50))

    assert (n_drafted(0.0), n_drafted(0.999)) == (4, 0)
    for fields in ({}, {"has_confidence": True, "keys": {"has_confidence_head": False}}):
        path = block_draft(tmp_path / "silent.gguf", markov_rank=8, **fields)  # type: ignore[arg-type]
        with Model(path) as silent:
            with pytest.raises(InvalidArgument, match="no confidence head"):
                DsparkSession(model(), silent, dataclasses.replace(CONFIG, p_min=0.5))
            DsparkSession(model(), silent, CONFIG).close()


def test_a_reduced_vocabulary_names_tokens_of_the_target(tmp_path: Path) -> None:
    known = np.arange(100, 356, dtype=np.int64)
    weights = {"output.weight": np.random.default_rng(1).standard_normal((256, 256)).astype("f4")}

    def session(ids: Any) -> SpeculativeSession:
        path = block_draft(
            tmp_path / "few.gguf", has_own_tables=True, weights=weights | {"d2t": ids}
        )
        with Model(path) as draft:
            return DflashSession(model(), draft, CONFIG)

    with session(known) as few:
        few.begin(0, PROMPTS[0], sampling=GREEDY)
        assert set(few.draft(0, few.n_past(0), 50)) <= set(known.tolist())
    with pytest.raises(IncompatibleDraft, match="token 2048"):
        session(known + (N_VOCAB - 355))
    with pytest.raises(IncompatibleDraft, match="token -1"):
        session(known - 101)
    with pytest.raises(BadModel, match="64-bit"):
        session(known.astype(np.int32))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no block": ({"keys": {"block_size": 1}}, BadModel, r"block_size is 1; expected \[2, 1024\]"),
    "empty block": ({"keys": {"block_size": 0}}, BadModel, "block_size is 0"),
    "huge block": ({"keys": {"block_size": 2**32 - 1}}, BadModel, "block_size is 4294967295"),
    "dspark without block": (
        {"markov_rank": 8, "keys": {"block_size": None}}, BadModel, "block_size is missing",
    ),
    "no mask": ({"keys": {"mask": None}}, BadModel, "mask_token_id"),
    "reads nothing": ({"layers": ()}, BadModel, "target_layers"),
    "reads too deep": ({"layers": (1, 3, 7)}, IncompatibleDraft, r"reads layer 7.* has 6"),
    "reads before": ({"keys": {"target_layers": [1, 3, -1]}}, IncompatibleDraft, "layer -1"),
    "other width": ({"n_embd": 128}, IncompatibleDraft, r"width 128; this target's have 256"),
    "two widths": (
        {"n_layer": 1, "keys": {"value_length": 32},
         "weights": {"blk.0.attn_v.weight": np.zeros((64, 256), np.float16)}},
        BadModel, "value_length is not attention.key_length",
    ),
    "selector unnamed": ({"keys": {"selector_top_k": 4}}, BadModel, "has no selector"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_each_requirement_that_a_block_draft_fails_is_named(case: str, tmp_path: Path) -> None:
    fields, error, text = WRONG[case]
    path = block_draft(tmp_path / "wrong.gguf", **fields)
    make = DsparkSession if "markov_rank" in fields else DflashSession
    with pytest.raises(error, match=text), Model(path) as draft:
        make(model(), draft, CONFIG)


def test_other_kinds_of_models_are_told_apart(drafts: dict[str, Model]) -> None:
    with pytest.raises(NotDflash, match=r"has a Markov head.*draft type dspark"):
        DflashSession(model(), drafts["dspark"], CONFIG)
    with pytest.raises(NotDspark, match=r"no Markov head.*draft type dflash"):
        DsparkSession(model(), drafts["dflash"], CONFIG)
    with pytest.raises(NotDflash, match='architecture "qwen3"'):
        DflashSession(model(), model(SIMPLE), CONFIG)
    with pytest.raises(NotDspark, match='architecture "eagle3"'):
        DsparkSession(model(), model(EAGLE3[DENSE]), CONFIG)
    with pytest.raises(NotEagle3, match='architecture "dflash"'):
        Eagle3Session(model(), drafts["dflash"], CONFIG)
    with pytest.raises(IncompatibleDraft, match="hidden states"):
        SimpleSession(model(), drafts["dflash"], CONFIG)
    with pytest.raises(InvalidArgument, match="needs a draft model"):
        Engine(model(DENSE), None, params("dflash"))


OTHER_USES: dict[str, Callable[[Model], object]] = {
    "target": lambda draft: Engine(draft, None, params()),
    "decoder": DecoderPool,
    "embedder": Embedder,
}


@pytest.mark.parametrize("use", OTHER_USES)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_draft_is_nothing_else(kind: str, use: str, drafts: dict[str, Model]) -> None:
    with pytest.raises(Unsupported, match="draft"):
        OTHER_USES[use](drafts[kind])


def test_targets_whose_layers_are_not_shown_are_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process at the target's next graph."""
    with (
        Model(plain_target(tmp_path / "t.gguf")) as target,
        Model(block_draft(tmp_path / "d.gguf")) as draft,
    ):
        for make, given in ((DflashSession, draft), (Eagle3Session, model(EAGLE3[DENSE]))):
            with pytest.raises(Unsupported, match='of the architecture "internlm2"'):
                make(target, given, CONFIG)
        SpeculativeSession(target, None, "ngram-simple", CONFIG).close()
        with DecoderPool(target, DecoderConfig(n_ctx_seq=64, n_threads=1)) as pool:
            decoder = pool.decoder()
            decoder.observe([1, 2])
            with pytest.raises(Unsupported, match='of the architecture "internlm2"'):
                decoder.last_hidden_states_multi([0])


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize(("n_before", "n_past"), [(0, 10), (20, 25), (20, 20), (20, 10), (20, 0)])
def test_a_rollback_before_process_leaves_the_drafts_as_they_are(
    kind: str, n_before: int, n_past: int, tmp_path: Path
) -> None:
    """The drafter was given what had been taken back, and a neighbour in its decode went cold.

    In host memory: a GPU rounds by the width of a batch, and drafts of random weights tie.
    """
    file = block_draft(tmp_path / "draft.gguf", **KINDS[kind])
    tokens = list(range(300, 330))

    def give(driven: Engine, seq_id: int, at: int, n: int) -> None:
        driven.decode(tokens[at : at + n], range(at, at + n), [seq_id] * n, [False] * n)

    with (
        Model(file, placement=Placement(devices=())) as draft,
        Engine(on_host(), draft, params(type_of(kind), n_draft_max=4)) as driven,
    ):
        for seq_id in (0, 1):
            driven.seq_begin(seq_id, Sampler(driven.target, GREEDY))
        give(driven, 1, 0, 12)
        driven.process()
        if n_before > 0:
            give(driven, 0, 0, n_before)
            driven.process()
        n = len(tokens) - n_before
        driven.decode(
            [*tokens[n_before:], *tokens[12:15]],
            [*range(n_before, len(tokens)), *range(12, 15)],
            [0] * n + [1] * 3,
            [False] * (n + 3),
        )
        driven.rollback(0, n_past)
        driven.process()
        assert driven.n_cells_used == n_past + 15
        if n_past > 0:
            driven.load(2, driven.save(0))
            assert driven.n_cells_used == 2 * n_past + 15
            driven.seq_end(2)
        give(driven, 0, n_past, 5)
        driven.process()
        assert [driven.seq_is_cold(seq_id) for seq_id in (0, 1)] == [False, False]
        found = driven.draft_many([(0, n_past + 5, 5, 4), (1, 15, 6, 4)])
        driven.seq_begin(2, Sampler(driven.target, GREEDY))
        give(driven, 2, 0, n_past + 5)
        driven.process()
        assert driven.draft_many([(2, n_past + 5, 5, 4)]) == found[:1]
        assert len(found[1]) == 4
