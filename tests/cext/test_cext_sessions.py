"""Sessions: the same tokens as the fused step; wrong orders are refused and harmless."""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.hand import (
    DENSE,
    EAGLE3,
    GREEDY,
    HYBRID,
    MODELS,
    SIMPLE,
    TEXTS,
    assert_same,
    driven,
    engine,
    exact_engine,
    fused,
    model,
    on_host,
    plan,
    sampler,
    verify,
)
from tests.support.hand import tokens_of as ids

from drafthouse_engine import (
    AcceptedTooMany,
    BadPlan,
    BadSeqId,
    Batch,
    Closed,
    DraftRequest,
    DraftType,
    Eagle3Session,
    Engine,
    EngineParams,
    IncompatibleDraft,
    InvalidArgument,
    InvalidConfig,
    Model,
    MtpSession,
    NgramSession,
    NoMtpHeads,
    NoPendingProposal,
    NotEagle3,
    NoTokenAllowed,
    PromptTooLong,
    ProposalPending,
    Sampler,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    SessionConfig,
    SimpleSession,
    SpeculativeSession,
)
from drafthouse_engine.sessions import NgramKind

pytestmark = pytest.mark.model

CONFIG = SessionConfig(n_seq=3, n_ctx_seq=256, n_batch=128, n_ubatch=64, n_threads=1)
SESSIONS: dict[str, Callable[[], SpeculativeSession]] = {
    "mtp": lambda: MtpSession(model(), CONFIG),
    "eagle3": lambda: Eagle3Session(model(), model(EAGLE3[DENSE]), CONFIG),
    "simple": lambda: SimpleSession(model(), model(SIMPLE), CONFIG),
    "ngram-simple": lambda: NgramSession(model(), CONFIG),
}
N_TOKENS = 48


@pytest.mark.parametrize("kind", SESSIONS)
def test_hand_driven_tokens_equal_the_fused_steps_and_no_speculation(kind: str) -> None:
    prompts = [ids(text) for text in TEXTS]
    with engine() as plain:
        expected = fused(plain, prompts, N_TOKENS)
    with engine(kind) as speculative:  # type: ignore[arg-type]  # a key of SESSIONS is a type
        assert_same(prompts, expected, fused(speculative, prompts, N_TOKENS))
    with SESSIONS[kind]() as session:
        assert_same(prompts, expected, driven(session, prompts, N_TOKENS))
        assert session.is_quiescent()


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_hybrid_target_driven_by_hand_goes_as_the_fused_step_goes(kind: str) -> None:
    prompts = [ids(TEXTS[0])]
    with engine(kind, HYBRID) as speculative:  # type: ignore[arg-type]  # a draft type
        expected = fused(speculative, prompts, 16)
    target = model(HYBRID)
    session = (
        MtpSession(target, CONFIG)
        if kind == "mtp"
        else Eagle3Session(target, model(EAGLE3[HYBRID]), CONFIG)
    )
    with session:
        assert_same(prompts, expected, driven(session, prompts, 16), HYBRID)


def test_a_long_prompt_is_read_in_pieces() -> None:
    prompt = ids("x = 1\n" * 40)
    assert len(prompt) > CONFIG.n_batch
    with MtpSession(model(), CONFIG) as session:
        session.begin(0, prompt, sampling=GREEDY)
        assert session.n_past(0) == len(prompt)
        in_pieces = session.sample(0)
    whole = SessionConfig(n_seq=1, n_ctx_seq=512, n_batch=512, n_ubatch=512, n_threads=1)
    with MtpSession(model(), whole) as session:
        session.begin(0, prompt, sampling=GREEDY)
        assert session.sample(0) == in_pieces


@pytest.fixture
def session() -> SpeculativeSession:
    session = MtpSession(model(), CONFIG)
    session.begin(0, ids(TEXTS[0]), sampling=GREEDY)
    return session


def test_second_draft_before_accept_is_refused(session: SpeculativeSession) -> None:
    token = session.sample(0)
    session.draft(0, session.n_past(0), token)
    assert session.has_pending_proposal(0)
    assert not session.is_quiescent()
    with pytest.raises(ProposalPending) as caught:
        session.draft(0, session.n_past(0), token)
    assert caught.value.seq_id == 0


def test_accept_without_a_draft_is_refused(session: SpeculativeSession) -> None:
    with pytest.raises(NoPendingProposal) as caught:
        session.accept(0, 0)
    assert caught.value.seq_id == 0


def test_accepting_more_than_drafted_carries_both_numbers(session: SpeculativeSession) -> None:
    token = session.sample(0)
    draft = session.draft(0, session.n_past(0), token)
    session.decode(Batch.of(0, session.n_past(0), [token, *draft]))
    session.process()
    with pytest.raises(AcceptedTooMany) as caught:
        session.accept(0, len(draft) + 1)
    assert (caught.value.n_accepted, caught.value.n_drafted) == (len(draft) + 1, len(draft))
    session.accept(0, 0)  # the refused call left the round open
    assert session.n_past(0) == len(ids(TEXTS[0])) + 1


def test_accept_before_decode_is_refused_and_the_round_goes_on(session: SpeculativeSession) -> None:
    token = session.sample(0)
    draft = session.draft(0, session.n_past(0), token)
    with pytest.raises(BadPlan):
        session.accept(0, 0)
    session.decode(Batch.of(0, session.n_past(0), [token, *draft]))
    with pytest.raises(BadPlan):  # not processed
        session.accept(0, 0)
    session.process()
    session.accept(0, 0)
    assert session.is_quiescent()


def test_process_refuses_another_batch_and_a_second_time(session: SpeculativeSession) -> None:
    batch = Batch.of(0, session.n_past(0), [session.sample(0)])
    session.decode(batch)
    with pytest.raises(BadPlan):
        session.process(Batch.of(0, 0, [5]))
    session.process(batch)
    with pytest.raises(BadPlan):
        session.process(batch)


def test_decode_before_process_is_refused(session: SpeculativeSession) -> None:
    token = session.sample(0)
    session.decode(Batch.of(0, session.n_past(0), [token]))
    n_past = session.n_past(0)
    with pytest.raises(BadPlan):
        session.decode(Batch.of(0, n_past, [token]))
    assert session.n_past(0) == n_past


def test_draft_at_another_position_is_refused(session: SpeculativeSession) -> None:
    with pytest.raises(BadPlan):
        session.draft(0, session.n_past(0) + 1, 5)
    assert not session.has_pending_proposal(0)


def test_unknown_and_idle_sequences_are_told_apart(session: SpeculativeSession) -> None:
    with pytest.raises(BadSeqId) as caught:
        session.draft(3, 0, 5)
    assert (caught.value.seq_id, caught.value.n_seq) == (3, 3)
    with pytest.raises(SeqIdle):
        session.draft(1, 0, 5)
    with pytest.raises(SeqBusy) as busy:
        session.begin(0)
    assert busy.value.seq_id == 0


def test_sampling_where_nothing_was_decoded_is_refused(session: SpeculativeSession) -> None:
    with pytest.raises(InvalidArgument):
        session.sample(1)
    with pytest.raises(InvalidArgument):
        session.logits(0, 1)


def has_no_outputs(session: SpeculativeSession, seq_id: int) -> bool:
    for call in (session.sample, session.logits):
        with pytest.raises(InvalidArgument, match="has 0 outputs"):
            call(seq_id)
    return True


def test_a_sequence_has_no_outputs_of_the_former_one(session: SpeculativeSession) -> None:
    session.begin(1, ids(TEXTS[1]), sampling=GREEDY)
    saved = session.save(1)
    session.end(1)
    session.begin(1)
    assert has_no_outputs(session, 1)
    session.end(1)
    session.load(1, saved)
    assert has_no_outputs(session, 1)
    session.begin(2, ids(TEXTS[2]), sampling=GREEDY)  # a decode of its own
    assert has_no_outputs(session, 1)
    assert session.sample(2) >= 0


def test_a_sequence_that_was_cut_has_no_outputs_until_the_next_decode(
    session: SpeculativeSession,
) -> None:
    n_past = session.n_past(0)
    session.rollback(0, n_past)  # cuts nothing
    assert session.logits(0).shape
    last = int(session.tokens(0)[-1])
    session.rollback(0, n_past - 1)
    assert has_no_outputs(session, 0)
    session.decode(Batch.of(0, n_past - 1, [last]))
    session.process()
    assert session.sample(0) >= 0


def test_end_drops_the_draft_and_frees_the_sequence(session: SpeculativeSession) -> None:
    session.draft(0, session.n_past(0), session.sample(0))
    session.end(0)
    session.end(0)
    assert session.is_quiescent()
    session.begin(0, ids(TEXTS[1]), sampling=GREEDY)
    assert session.n_past(0) == len(ids(TEXTS[1]))


def test_a_prompt_that_fails_leaves_the_sequence_free() -> None:
    with MtpSession(model(), CONFIG) as session:
        with pytest.raises(InvalidArgument):
            session.begin(0, [5, 10**6])
        with pytest.raises(PromptTooLong) as caught:
            session.begin(0, [5] * 300)
        error = caught.value
        assert (error.seq_id, error.n_prompt, error.n_ctx_seq) == (0, 300, 256)
        assert "300" in str(error)
        session.begin(0, [5])
        assert session.n_past(0) == 1


def test_each_sequence_may_ask_for_its_own_draft_length() -> None:
    with MtpSession(model(), CONFIG) as session:
        requests = []
        for seq_id, n_draft in enumerate((1, 2, 3)):
            session.begin(seq_id, ids(TEXTS[2]), sampling=GREEDY)
            token = session.sample(seq_id)
            requests.append(DraftRequest(seq_id, session.n_past(seq_id), token, n_draft))
        drafts = session.draft_many(requests)
        assert [len(draft) for draft in drafts] == [1, 2, 3]
        assert drafts[2][:1] == drafts[0]
        assert drafts[2][:2] == drafts[1]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "simple"])
def test_a_small_draft_saves_drafting_and_not_only_verification(kind: str) -> None:
    """K = 1 beside K = 3: the draft model computes 1 + 3 tokens in 3 passes, not 3 + 3."""
    with SESSIONS[kind]() as session:
        requests = []
        for seq_id, n_draft in ((0, 1), (2, 3)):
            session.begin(seq_id, ids(TEXTS[2]), sampling=GREEDY)
            token = session.sample(seq_id)
            requests.append(DraftRequest(seq_id, session.n_past(seq_id), token, n_draft))
        assert [len(draft) for draft in session.draft_many(requests)] == [1, 3]
        stats = session.stats()
        assert (stats.n_draft_positions, stats.n_draft_passes) == (1 + 3, 3)


def test_a_plan_with_one_small_draft_saves_drafting_too() -> None:
    with engine("mtp") as target:
        prompt, last = ids(TEXTS[2]), -1
        for seq_id in (0, 1):
            target.seq_begin(seq_id, sampler())
            last = int(target.step(plan((seq_id, 0, 0, len(prompt), 0, 1)), prompt).tokens[0])
        n = len(prompt)
        target.step(plan((0, n, 0, 1, 1, 1), (1, n, 1, 1, 3, 1)), [last, last])
        assert dataclasses.astuple(target.draft_work) == (2, 1 + 3, 3)


def test_a_choice_that_fails_clears_its_sequence_and_no_other() -> None:
    forbidden = tuple((token, float("-inf")) for token in range(model().n_vocab))
    nothing = SamplingParams(temperature=0.0, logit_bias=forbidden)
    with MtpSession(model(), CONFIG) as session:
        session.begin(0, ids(TEXTS[0]), sampling=nothing)
        session.begin(1, ids(TEXTS[1]), sampling=GREEDY)
        expected = session.sample(1)
        draft = session.draft(0, session.n_past(0), 5)
        session.decode(
            Batch.of(0, session.n_past(0), [5, *draft]) + Batch.of(1, session.n_past(1), [expected])
        )
        session.process()
        with pytest.raises(NoTokenAllowed, match="sequence was cleared"):
            session.sample(0, 0)
        assert session.is_quiescent()
        assert session.n_past(0) == 0
        with pytest.raises(SeqIdle):
            session.tokens(0)
        session.sample(1)
        session.begin(0, ids(TEXTS[0]), sampling=GREEDY)
        assert session.draft(0, session.n_past(0), session.sample(0)) != []


def test_rollback_to_where_it_is_drops_a_pending_draft(session: SpeculativeSession) -> None:
    token = session.sample(0)
    n_past = session.n_past(0)
    session.draft(0, n_past, token)
    session.rollback(0, n_past)
    assert session.is_quiescent(0)
    session.draft(0, n_past, token)


def test_stats_count_rounds_and_positions() -> None:
    with MtpSession(model(), CONFIG) as session:
        driven(session, [ids(text) for text in TEXTS], N_TOKENS)
        stats = session.stats()
    assert stats.n_drafted == sum(stats.n_drafted_at) >= stats.n_accepted > 0
    assert stats.n_accepted == sum(stats.n_accepted_at)
    assert stats.n_accepted_at[0] >= stats.n_accepted_at[1] >= stats.n_accepted_at[2]
    assert 0 < stats.acceptance_rate <= 1
    parts_s = (stats.draft_s, stats.process_s, stats.sample_s, stats.accept_s)
    assert stats.decode_s > 0
    assert all(part_s >= 0 for part_s in parts_s)  # of a quick machine less than a microsecond
    assert stats.mean_acceptance_length == 1 + stats.n_accepted / stats.n_drafts


def test_stats_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with MtpSession(model(), CONFIG) as session, caplog.at_level(logging.INFO):
        session.print_stats()
        driven(session, [ids(TEXTS[0])], 8)
        session.print_stats()
        stats = session.stats()
    before, after = (r for r in caplog.records if r.name == "drafthouse_engine.sessions")
    assert before.getMessage().startswith("MtpSession: 0 rounds, 0 of 0 draft tokens accepted")
    wanted = f"{stats.n_drafts} rounds, {stats.n_accepted} of {stats.n_drafted} draft tokens"
    assert wanted in after.getMessage()


def test_closed_session_refuses_everything() -> None:
    session = MtpSession(model(), CONFIG)
    session.begin(0, [5])
    session.close()
    session.close()
    calls: list[Callable[[], object]] = [
        lambda: session.begin(1, [5]),
        lambda: session.decode(Batch.of(0, 1, [5])),
        session.process,
        lambda: session.draft(0, 1, 5),
        lambda: session.accept(0, 0),
        lambda: session.sample(0),
        lambda: session.logits(0),
        lambda: session.n_past(0),
        lambda: session.end(0),
    ]
    for call in calls:
        with pytest.raises(Closed):
            call()


def test_sessions_answer_which_hidden_states_they_need() -> None:
    answers = {kind: make() for kind, make in SESSIONS.items()}
    assert {kind for kind, session in answers.items() if session.need_embd} == {"eagle3"}
    assert {kind for kind, session in answers.items() if session.need_embd_pre_norm} == {"mtp"}
    assert all(session.n_seq == 3 for session in answers.values())
    assert all(session.config == CONFIG for session in answers.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_seq", 0), ("n_seq", 257), ("n_draft_max", 0), ("p_min", 1.0), ("p_min", float("nan")),
     ("n_min", -1), ("n_min", 4), ("n_batch", 0), ("n_ubatch", 4096), ("n_threads", -1),
     ("n_ctx_seq", 1.5)],
)  # fmt: skip
def test_config_names_the_refused_field(field: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=field) as caught:
        SessionConfig(**{field: value})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == field
    assert caught.value.value is value


def test_quiescence_is_told_per_sequence() -> None:
    with MtpSession(model(), CONFIG) as session:
        for seq_id in (0, 1):
            session.begin(seq_id, ids(TEXTS[seq_id]), sampling=GREEDY)
        token = session.sample(1)
        draft = session.draft(1, session.n_past(1), token)
        assert (session.is_quiescent(0), session.is_quiescent(1)) == (True, False)
        assert not session.is_quiescent()
        session.decode(Batch.of(0, session.n_past(0), [5]))
        assert (session.is_quiescent(0), session.is_quiescent(1)) == (False, False)
        session.process()
        assert session.is_quiescent(0)
        session.decode(Batch.of(1, session.n_past(1), [token, *draft]))
        session.process()
        session.accept(1, 0)
        assert session.is_quiescent()
        with pytest.raises(BadSeqId):
            session.is_quiescent(3)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "simple", "ngram-simple"])
def test_shorter_drafts_than_n_min_are_dropped(kind: DraftType) -> None:
    def lengths(n_min: int) -> set[int]:
        with engine(kind, n_min=n_min, p_min=0.9) as target:
            target.seq_begin(0, sampler())
            prompt = ids(TEXTS[1])
            result = target.step(plan((0, 0, 0, len(prompt), 0, 1)), prompt)
            found = set()
            for _ in range(24):
                last = [int(result.tokens[-1])]
                result = target.step(plan((0, target.seq_n_past(0), 0, 1, 3, 1)), last)
                found.add(int(result.entries["n_drafted"][0]))
            return found

    assert lengths(3) <= {0, 3}
    if kind != "ngram-simple":  # it drafts three or none
        assert lengths(0) & {1, 2}


def test_n_min_with_sampled_drafts_is_refused_where_it_would_not_be_lossless() -> None:
    with pytest.raises(InvalidConfig, match=r"\[0, 1\]") as caught:
        EngineParams(draft_type="mtp", probabilistic=True, n_min=2)
    assert (caught.value.field, caught.value.value) == ("n_min", 2)
    EngineParams(draft_type="mtp", probabilistic=True, n_min=1)
    with MtpSession(model(), dataclasses.replace(CONFIG, n_min=2, p_min=0.25)) as session:
        assert (session.n_min, session.p_min) == (2, 0.25)


@pytest.mark.parametrize(
    "kind", ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"]
)
def test_ngram_sessions_go_back_and_draft_again(kind: NgramKind) -> None:
    prompt = ids("x = [1, 2]\ny = [1, 2]\n" * 6)
    with NgramSession(model(), CONFIG, kind=kind) as session:
        session.begin(0, prompt, sampling=GREEDY)
        token = session.sample(0)
        for _ in range(3):
            draft = session.draft(0, session.n_past(0), token)
            session.decode(Batch.of(0, session.n_past(0), [token, *draft]))
            session.process()
            token = session.sample(0, 0)
            session.accept(0, 0)
        session.draft(0, session.n_past(0), token)
        session.rollback(0, 20)  # the drafter has indexed what is taken back
        assert session.is_quiescent(0)
        assert session.tokens(0).tolist() == prompt[:20]
        draft = session.draft(0, 20, prompt[20])
        session.decode(Batch.of(0, 20, [prompt[20], *draft]))
        session.process()
        session.accept(0, 0)


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "simple"])
def test_rollback_makes_its_sequence_cold_and_no_other(kind: str) -> None:
    with SESSIONS[kind]() as session:
        for seq_id in (0, 1):
            session.begin(seq_id, ids(TEXTS[seq_id]), sampling=GREEDY)
        token = session.sample(1)
        assert not session.is_cold(0)
        session.rollback(0, 4)
        session.decode(
            Batch.of(0, 4, [5, 6]) + Batch.of(1, session.n_past(1), [token], outputs="last")
        )
        session.process()
        assert (session.is_cold(0), session.is_cold(1)) == (True, False)
        assert session.draft(0, session.n_past(0), 7) == []
        assert session.draft(1, session.n_past(1), session.sample(1)) != []
        with pytest.raises(SeqIdle):
            session.is_cold(2)


def test_last_token_and_tokens_are_told() -> None:
    with MtpSession(model(), CONFIG) as session:
        prompt = ids(TEXTS[0])
        session.begin(0, prompt, sampling=GREEDY)
        assert session.id_last(0) is None
        token = session.sample(0)
        assert session.id_last(0) == token
        assert session.tokens(0).tolist() == prompt
        with pytest.raises(SeqIdle):
            session.tokens(1)


def test_batch_of_an_ended_sequence_leaves_nothing_behind() -> None:
    with MtpSession(model(), CONFIG) as session:
        session.begin(0)
        session.decode(Batch.of(0, 0, ids(TEXTS[0]), outputs="last"))
        session.end(0)
        with pytest.raises(BadPlan, match="former sequence has not been processed"):
            session.begin(0)
        session.process()
        session.begin(0, ids(TEXTS[1]), sampling=GREEDY)
        draft = session.draft(0, session.n_past(0), session.sample(0))
        assert not session.is_cold(0)
        assert draft != []


def test_step_refuses_while_a_batch_by_hand_is_unprocessed() -> None:
    with engine("mtp") as target:
        prompt = ids(TEXTS[0])
        n = len(prompt)
        for seq_id in (0, 1):
            target.seq_begin(seq_id, sampler())
        target.decode(prompt, range(n), [0] * n, [False] * n)
        row = plan((1, 0, 0, n, 0, 1))
        with pytest.raises(BadPlan, match="not been processed"):
            target.step(row, prompt)
        target.process()
        assert not target.step(row, prompt).entries["status"].any()


def patched(path: Path, name: str, key: bytes, skip: int, content: bytes) -> Path:
    """Writes a demo model with some bytes behind a key changed."""
    data = bytearray((MODELS / name).read_bytes())
    start = data.index(key) + len(key) + skip
    data[start : start + len(content)] = content
    path.write_bytes(data)
    return path


def test_each_requirement_that_a_draft_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoMtpHeads, match="has no MTP"):
        MtpSession(model(SIMPLE), CONFIG)
    with pytest.raises(NotEagle3, match=r'architecture "qwen3".* exactly 3'):
        Eagle3Session(model(), model(SIMPLE), CONFIG)
    with pytest.raises(IncompatibleDraft, match='trained for the target "tiny-qwen35"'):
        Eagle3Session(model(), model(EAGLE3[HYBRID]), CONFIG)
    with pytest.raises(IncompatibleDraft, match="drafts from the target's hidden states"):
        SimpleSession(model(), model(EAGLE3[DENSE]), CONFIG)
    with pytest.raises(IncompatibleDraft, match="reads layer"):
        Eagle3Session(model(SIMPLE), model(EAGLE3[DENSE]), CONFIG)
    first_layers = struct.pack("<3I", 0, 1, 1)
    key = b"eagle3.target_layers"  # type, element type and count follow
    path = patched(tmp_path / "low.gguf", EAGLE3[DENSE], key, 16, first_layers)
    with Model(path) as low, pytest.raises(IncompatibleDraft, match=r"width 256.* have 128"):
        Eagle3Session(model(SIMPLE), low, CONFIG)
    path = patched(tmp_path / "words.gguf", SIMPLE, b"\xc4\xa0retur", 0, b"N")
    with Model(path) as other, pytest.raises(IncompatibleDraft, match="vocabulary differs"):
        SimpleSession(model(), other, CONFIG)


def stepped(target: Engine, prompt: list[int], sampling: SamplingParams, n: int) -> list[int]:
    """Returns the tokens that steps give."""
    target.seq_begin(0, Sampler(target.target, sampling))
    outputs, given = list[int](), prompt
    while len(outputs) < n:
        rows = plan((0, target.seq_n_past(0), 0, len(given), 0, 1))
        outputs += target.step(rows, given).tokens.tolist()
        given = outputs[-1:]
    target.seq_end(0)
    return outputs


def given_back(target: Engine, prompt: list[int], sampling: SamplingParams, n: int) -> list[int]:
    """Returns the tokens that calls by hand give, each decoded as an output."""
    target.seq_begin(0, Sampler(target.target, sampling))
    outputs, given = list[int](), prompt
    while len(outputs) < n:
        at, n_given = target.seq_n_past(0), len(given)
        is_output = [False] * (n_given - 1) + [True]
        target.decode(given, range(at, at + n_given), [0] * n_given, is_output)
        if target.limits.n_draft_max > 0:
            target.process()
        outputs.append(target.sample(0, n_given - 1))
        given = outputs[-1:]
        if len(outputs) == 2:  # a snapshot knows what has been heard
            blob = target.save(0)
            target.seq_end(0)
            target.load(0, blob)
    target.seq_end(0)
    return outputs


PENALTIES = {
    "presence": SamplingParams(temperature=0.0, penalty_last_n=64, penalty_presence=100.0),
    "frequency": SamplingParams(temperature=0.0, penalty_last_n=64, penalty_frequency=0.6),
    "dry": SamplingParams(
        temperature=0.0, dry_multiplier=2.0, dry_allowed_length=1, dry_penalty_last_n=64
    ),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_each_token_reaches_the_sampler_once(penalty: str) -> None:
    """A prompt's last token never did, by hand."""
    sampling = PENALTIES[penalty]
    prompts = [ids(TEXTS[0])[:n] for n in (1, 2, 5)] + [[1275], ids("x = 1\nx = 1\nx =")]
    with exact_engine() as plain:
        expected = [stepped(plain, prompt, sampling, 16) for prompt in prompts]
        found = [given_back(plain, prompt, sampling, 16) for prompt in prompts]
    assert found == expected
    with MtpSession(on_host(), CONFIG) as session:
        for prompt, outputs in zip(prompts, expected, strict=True):
            session.begin(0, prompt, sampling=sampling)
            tokens = [session.sample(0)]
            while len(tokens) < 16:
                draft = session.draft(0, session.n_past(0), tokens[-1])
                batch = Batch.of(0, session.n_past(0), [tokens[-1], *draft])
                session.decode(batch)
                session.process(batch)
                tokens += verify(session, 0, draft)
            session.end(0)
            assert tokens[:16] == outputs


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_prompts_last_token_that_begins_a_round_reaches_the_sampler(penalty: str) -> None:
    """All but the last is read first, and that one decoded with its draft: it was never heard."""
    sampling = PENALTIES[penalty]
    prompts = [ids(text)[:12] for text in TEXTS]
    with exact_engine() as plain:
        expected = [stepped(plain, prompt, sampling, 16) for prompt in prompts]
    found = list[list[int]]()
    with exact_engine("mtp") as target:
        for prompt in prompts:
            target.seq_begin(0, Sampler(target.target, sampling))
            n = len(prompt) - 1
            target.decode(prompt[:-1], range(n), [0] * n, [False] * n)
            target.process()
            outputs = list[int]()
            while len(outputs) < 16:
                n_past = target.seq_n_past(0)
                last = (prompt + outputs)[-1]
                (draft,) = target.draft_many([(0, n_past, last, 3)])
                n = 1 + len(draft)
                target.decode([last, *draft], range(n_past, n_past + n), [0] * n, [True] * n)
                target.process()
                round_ = [target.sample(0, 0)]
                while len(round_) < n and round_[-1] == draft[len(round_) - 1]:
                    round_.append(target.sample(0, len(round_)))
                target.accept(0, len(round_) - 1)
                outputs += round_
            target.seq_end(0)
            found.append(outputs[:16])
    assert found == expected


def test_a_token_that_was_not_the_samplers_choice_reaches_it() -> None:
    """Whoever goes on with another token than was chosen has that one penalised, too."""
    bias = ((9, 60.0), (7, 50.0))
    with engine() as target:
        target.seq_begin(0, sampler(dataclasses.replace(PENALTIES["presence"], logit_bias=bias)))
        target.decode([1275], [0], [0], [True])
        assert target.sample(0, 0) == 9
        target.decode([7], [1], [0], [True])
        assert target.sample(0, 0) not in (1275, 9, 7)


def test_steps_go_on_from_a_choice_by_hand() -> None:
    """A token that was sampled by hand was fed once more by the step that computed it."""
    sampling = PENALTIES["frequency"]
    prompt = ids(TEXTS[0])
    with exact_engine() as target:
        expected = stepped(target, prompt, sampling, 12)
        target.seq_begin(0, Sampler(target.target, sampling))
        n = len(prompt)
        target.decode(prompt, range(n), [0] * n, [False] * (n - 1) + [True])
        outputs = [target.sample(0, n - 1)]
        while len(outputs) < 12:
            rows = plan((0, target.seq_n_past(0), 0, 1, 0, 1))
            outputs += target.step(rows, outputs[-1:]).tokens.tolist()
    assert outputs == expected
