"""Snapshots: a restored sequence goes on as the saved one did; everything else is refused."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hand import (
    DENSE,
    EAGLE3,
    GREEDY,
    HYBRID,
    TEXTS,
    emitted,
    engine,
    model,
    moved,
    plan,
    sampler,
    started,
)
from tests.support.hand import tokens_of as ids
from tests.support.snapshots import sealed

from drafthouse_engine import (
    BadPlan,
    BadSeqId,
    Batch,
    Closed,
    DraftType,
    Engine,
    InvalidArgument,
    Moves,
    MtpSession,
    NoRoom,
    ProposalPending,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    SessionConfig,
    SnapshotError,
    SnapshotKind,
    Start,
)

pytestmark = pytest.mark.model

SAMPLED = SamplingParams(
    seed=7,
    temperature=0.9,
    penalty_repeat=1.1,
    penalty_frequency=0.1,
    dry_multiplier=0.5,
    dry_breakers=("\n", ":"),
    xtc_probability=0.5,
    xtc_threshold=0.1,
    logit_bias=((5, -2.0),),
    logprobs=True,
)
GRAMMAR = SamplingParams(
    seed=3, temperature=1.0, grammar='root ::= ([a-z]+ " = " [0-9]+ "\\n")+', logprobs=True
)
TYPES: tuple[DraftType, ...] = (
    "none",
    "mtp",
    "eagle3",
    "simple",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)
REPETITIVE = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1, 2, 3]\ny = [1, 2, 3]\nx = "


class Round(NamedTuple):
    """What one step did for a sequence."""

    tokens: tuple[int, ...]
    n_drafted: int
    n_accepted: int
    logprobs: tuple[float, ...]


def begin(target: Engine, seq_id: int, text: str, sampling: SamplingParams, name: str) -> None:
    prompt = ids(text)
    target.seq_begin(seq_id, sampler(sampling, name))
    result = target.step(plan((seq_id, 0, 0, len(prompt), 0, 1)), prompt)
    assert not result.entries["status"].any()


def begin_by_hand(target: Engine, seq_id: int) -> None:
    """Runs a step of a sequence that has chosen nothing yet, with a token of the caller's."""
    row = (seq_id, target.seq_n_past(seq_id), 0, 1, 0, 1)
    result = target.step(plan(row), [5])
    assert not result.entries["status"].any()
    assert len(emitted(result, 0)) == 1


def go_on(target: Engine, seq_id: int, n_rounds: int) -> list[Round]:
    """Runs rounds of one sequence from what the engine knows of it alone."""
    rounds = []
    for _ in range(n_rounds):
        id_last = target.seq_id_last(seq_id)
        assert id_last is not None
        row = (seq_id, target.seq_n_past(seq_id), 0, 1, target.limits.n_draft_max, 1)
        result = target.step(plan(row), [id_last])
        entry = result.entries[0]
        assert entry["status"] == 0
        rounds.append(
            Round(
                tuple(emitted(result, 0)),
                int(entry["n_drafted"]),
                int(entry["n_accepted"]),
                tuple(float(x) for x in result.logprobs),
            )
        )
    return rounds


def same(found: Sequence[Round], expected: Sequence[Round]) -> None:
    """Compares rounds exactly; log-probabilities within float rounding."""
    assert [r[:3] for r in found] == [r[:3] for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4, nan_ok=True)


def check_goes_on(
    draft_type: DraftType, name: str, sampling: SamplingParams, **fields: Any
) -> None:
    with engine(draft_type, name, **fields) as first, engine(draft_type, name, **fields) as second:
        begin(first, 0, REPETITIVE, sampling, name)
        begin(first, 1, TEXTS[1], GREEDY, name)
        assert first.seq_id_last(0) is not None
        said = [first.seq_id_last(0), *(t for r in go_on(first, 0, 6) for t in r.tokens)][:-1]
        go_on(first, 1, 2)
        snapshot = first.save(0)
        assert first.save(0) == snapshot, "saving changes nothing"
        expected = go_on(first, 0, 12)
        neighbour = first.save(1)

        begin(second, 0, TEXTS[2], sampling, name)  # another sequence has left its traces
        go_on(second, 0, 3)
        second.seq_end(0)
        begin(second, 1, TEXTS[2], GREEDY, name)
        second.load(2, snapshot)
        assert second.seq_tokens(2).tolist() == ids(REPETITIVE) + said
        same(go_on(second, 2, 12), expected)

        first.seq_end(0)
        first.load(0, snapshot)
        assert first.save(0) == snapshot, "a snapshot of the restored one is the same"
        same(go_on(first, 0, 12), expected)
        assert first.save(1) == neighbour, "the neighbour is as it was"
        if draft_type in ("mtp", "eagle3", "simple"):
            assert any(r.n_drafted for r in expected)
        if sampling is GREEDY and name == DENSE and draft_type not in ("none", "ngram-mod"):
            assert any(r.n_accepted for r in expected), "the test must see accepted drafts"


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", TYPES)
def test_greedy_sequence_goes_on_in_another_place(draft_type: DraftType, name: str) -> None:
    check_goes_on(draft_type, name, GREEDY)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", ["none", "mtp", "eagle3", "simple", "ngram-simple"])
def test_sampled_sequence_goes_on_with_its_random_state(draft_type: DraftType, name: str) -> None:
    check_goes_on(draft_type, name, SAMPLED)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", ["mtp", "simple"])
def test_sampled_drafts_go_on_with_the_drafters_random_state(
    draft_type: DraftType, name: str
) -> None:
    check_goes_on(draft_type, name, SAMPLED, probabilistic=True)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_one_pool_of_cells_for_all(name: str) -> None:
    check_goes_on("mtp", name, SAMPLED, kv_unified=True)


def test_target_that_goes_back_through_checkpoints() -> None:
    check_goes_on("mtp", HYBRID, GREEDY, n_rs_seq=1)


@pytest.mark.parametrize("draft_type", ["none", "mtp"])
def test_grammar_goes_on_where_it_was(draft_type: DraftType) -> None:
    check_goes_on(draft_type, DENSE, GRAMMAR)


def test_sequence_of_which_nothing_is_read_yet() -> None:
    with engine("mtp") as target:
        target.seq_begin(0, sampler(SAMPLED))
        target.load(1, target.save(0))
        assert target.seq_id_last(1) is None
        assert target.seq_tokens(1).tolist() == []
        prompt = ids(TEXTS[0])
        n = len(prompt)
        result = target.step(plan((0, 0, 0, n, 0, 1), (1, 0, n, n, 0, 1)), prompt * 2)
        assert emitted(result, 0) == emitted(result, 1)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_sequence_in_the_middle_of_its_prompt(name: str) -> None:
    prompt = ids(REPETITIVE)
    with engine("mtp", name) as target:
        target.seq_begin(0, sampler(SAMPLED, name))
        target.step(plan((0, 0, 0, 20, 0, 0)), prompt[:20])
        target.load(1, target.save(0))
        rest = prompt[20:]
        n = len(rest)
        for seq_id in (0, 1):
            target.step(plan((seq_id, 20, 0, n, 0, 1)), rest)
        same(go_on(target, 0, 8), go_on(target, 1, 8))


def test_cold_sequence_stays_cold() -> None:
    with engine("mtp") as target:
        begin(target, 0, REPETITIVE, GREEDY, DENSE)
        target.inject_fault(3)
        go_on(target, 0, 1)
        target.load(1, target.save(0))
        same(go_on(target, 1, 4), go_on(target, 0, 4))
        assert not any(r.n_drafted for r in go_on(target, 1, 2))


CONFIG = SessionConfig(n_seq=3, n_ctx_seq=256, n_batch=128, n_ubatch=64, n_threads=1)


@pytest.mark.parametrize("name", [DENSE, HYBRID])
def test_saved_and_loaded_while_others_hold_open_proposals(name: str) -> None:
    def play(*, is_moved: bool) -> tuple[list[int], list[int]]:
        with MtpSession(model(name), CONFIG) as session:
            said = {}
            for i in (0, 1):
                session.begin(i, ids(TEXTS[i]), sampling=SAMPLED)
                said[i] = [session.sample(i)]
            snapshot = b""
            for _ in range(8):
                draft = session.draft(1, session.n_past(1), said[1][-1])
                if is_moved:  # sequence 1 has a proposal that is not decoded yet
                    snapshot = session.save(0)
                    session.end(0)
                    assert session.has_pending_proposal(1)
                session.decode(Batch.of(1, session.n_past(1), [said[1][-1], *draft]))
                if is_moved:  # and now one that is decoded and not processed
                    session.load(0, snapshot)
                    assert session.id_last(0) == said[0][-1]
                session.process()
                said[1] += _verify(session, 1, draft)
                draft = session.draft(0, session.n_past(0), said[0][-1])
                session.decode(Batch.of(0, session.n_past(0), [said[0][-1], *draft]))
                session.process()
                said[0] += _verify(session, 0, draft)
            return said[0], said[1]

    assert play(is_moved=True) == play(is_moved=False)


def _verify(session: MtpSession, seq_id: int, draft: list[int]) -> list[int]:
    tokens = [session.sample(seq_id, 0)]
    while len(tokens) <= len(draft) and tokens[-1] == draft[len(tokens) - 1]:
        tokens.append(session.sample(seq_id, len(tokens)))
    session.accept(seq_id, len(tokens) - 1)
    return tokens


def test_pending_proposal_and_unprocessed_batch_are_not_saved() -> None:
    with MtpSession(model(), CONFIG) as session:
        session.begin(0, ids(TEXTS[0]), sampling=GREEDY)
        token = session.sample(0)
        session.draft(0, session.n_past(0), token)
        with pytest.raises(ProposalPending) as pending:
            session.save(0)
        assert pending.value.seq_id == 0
        session.end(0)
        session.begin(0, sampling=GREEDY)
        session.decode(Batch.of(0, 0, ids(TEXTS[0]), outputs="last"))
        with pytest.raises(BadPlan, match="not been processed"):
            session.save(0)
        session.process()
        snapshot = session.save(0)
        session.decode(Batch.of(0, session.n_past(0), [token]))
        session.end(0)
        with pytest.raises(BadPlan, match="has not been processed"):
            session.load(0, snapshot)
        session.process()
        session.load(0, snapshot)


def test_wrong_orders() -> None:
    with engine("mtp") as target:
        with pytest.raises(SeqIdle) as idle:
            target.save(1)
        assert idle.value.seq_id == 1
        begin(target, 1, TEXTS[0], GREEDY, DENSE)
        snapshot = target.save(1)
        with pytest.raises(SeqBusy) as busy:
            target.load(1, snapshot)
        assert busy.value.seq_id == 1
        for wrong in (-1, 3):
            with pytest.raises(BadSeqId):
                target.save(wrong)
            with pytest.raises(BadSeqId):
                target.load(wrong, snapshot)
        with pytest.raises(TypeError):
            target.load(0, "text")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(Closed):
        target.load(0, snapshot)


# What is refused, and changes nothing.


@cache
def taken(draft_type: DraftType = "mtp", name: str = DENSE) -> bytes:
    """A snapshot of a sequence in the middle of its generation, with a grammar."""
    with engine(draft_type, name) as source:
        begin(source, 0, TEXTS[0], GRAMMAR, name)
        go_on(source, 0, 4)
        return source.save(0)


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    """An engine with a sequence 1 that must not notice anything."""
    with engine("mtp") as made:
        begin(made, 1, TEXTS[1], GREEDY, DENSE)
        yield made


def refused(target: Engine, blob: bytes) -> SnapshotError:
    before, n_cells = target.save(1), target.n_cells_used
    with pytest.raises(SnapshotError) as caught:
        target.load(0, blob)
    assert (target.save(1), target.n_cells_used) == (before, n_cells)
    with pytest.raises(SeqIdle):
        target.save(0)
    assert caught.value.message
    return caught.value


def test_snapshot_cut_at_any_length_is_refused(target: Engine) -> None:
    whole = taken()
    lengths = {0, 1, 7, 8, 15, 16, 119, 120, 121, 127, 128, 129, len(whole) - 1, len(whole) - 8}
    lengths |= set(range(130, 400, 7)) | set(range(400, len(whole), len(whole) // 101))
    for n in sorted(lengths):
        assert refused(target, whole[:n]).kind is SnapshotKind.TRUNCATED, n


def test_snapshot_with_more_behind_it_is_refused(target: Engine) -> None:
    assert refused(target, taken() + b"\0").kind is SnapshotKind.CORRUPT


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_refused(target: Engine, data: st.DataObject) -> None:
    blob = bytearray(taken())
    n_head = data.draw(st.sampled_from([120, 2000, len(blob)]))  # also the small parts in front
    bit = data.draw(st.integers(0, 8 * min(n_head, len(blob)) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    refused(target, bytes(blob))
    target.load(0, taken())  # still fine
    target.seq_end(0)


@pytest.mark.parametrize("junk", [bytes(500), b"GGUF" * 500, b"DRAFTSE" * 90])
def test_bytes_that_are_no_snapshot_are_refused(target: Engine, junk: bytes) -> None:
    assert refused(target, junk).kind is SnapshotKind.CORRUPT


HAS_SAMPLER_AT = 128
"""Place in a snapshot of the word that says whether it has one."""
COSTLY = SamplingParams(
    grammar='root ::= "the secret of the request" | [a-z ]*',
    dry_multiplier=0.5,
    dry_breakers=("breaker of the request",),
    logit_bias=((5, -2.0),),
)


@pytest.mark.parametrize("draft_type", ["mtp", "ngram-cache", "none"])
def test_a_snapshot_without_sampler_holds_nothing_of_the_request(draft_type: DraftType) -> None:
    with engine(draft_type) as owner:
        begin(owner, 0, TEXTS[0], COSTLY, DENSE)
        go_on(owner, 0, 4)
        whole, bare = owner.save(0), owner.save(0, with_sampler=False)
        assert b"secret of the request" in whole
        assert b"breaker of the request" in whole
        assert b"of the request" not in bare
        tokens, n_cells = owner.seq_tokens(0).tolist(), owner.n_cells_used
        owner.seq_end(0)
        with pytest.raises(InvalidArgument, match="holds no sampler"):
            owner.load(0, bare)
        assert owner.n_cells_used == 0
        wants_its_own = Start(1, None, len(tokens), snapshot=bare, is_resumed=True)
        assert started(owner, wants_its_own) == 0
        assert owner.n_cells_used == 0
        with pytest.raises(SeqIdle):
            owner.save(1)
        start = Start(1, sampler(GREEDY), len(tokens), snapshot=bare)
        assert started(owner, start) == len(tokens)
        assert owner.seq_tokens(1).tolist() == tokens
        assert owner.n_cells_used == n_cells
        begin_by_hand(owner, 1)


@pytest.mark.parametrize("draft_type", ["mtp", "simple"])
def test_a_snapshot_without_sampler_tells_no_seed(draft_type: DraftType) -> None:
    """The drafter samples too, with the temperature and the seed of the request."""
    sampling = SamplingParams(seed=0x5EED1234, temperature=0.875)
    secret = struct.pack("<fI", 0.875, 0x5EED1234)
    with engine(draft_type, probabilistic=True) as owner:
        begin(owner, 0, TEXTS[0], sampling, DENSE)
        go_on(owner, 0, 3)
        assert secret in owner.save(0)
        assert secret not in owner.save(0, with_sampler=False)


@pytest.mark.parametrize("draft_type", ["mtp", "ngram-cache"])
def test_the_sampler_of_a_snapshot_is_made_only_where_it_goes_on(draft_type: DraftType) -> None:
    """Bytes that no sampler can be made of hurt only the one who wants it."""
    with engine(draft_type) as owner:
        begin(owner, 0, TEXTS[0], COSTLY, DENSE)
        go_on(owner, 0, 3)
        n_past, blob = owner.seq_n_past(0), owner.save(0)
        owner.seq_end(0)
        body = blob[:-8].replace(b"root ::=", b"no rule ")
        broken = sealed(body)
        with pytest.raises(SnapshotError, match="grammar"):
            owner.load(0, broken)
        own = Start(0, None, n_past, snapshot=broken, is_resumed=True)
        assert started(owner, own) == 0
        assert started(owner, Start(0, sampler(GREEDY), n_past, snapshot=broken)) == n_past
        begin_by_hand(owner, 0)


@pytest.mark.parametrize("draft_type", ["mtp", "simple", "ngram-cache", "ngram-mod"])
def test_a_preempted_sampler_goes_on_from_a_snapshot_without(draft_type: DraftType) -> None:
    """Tokens are what they would have been; only an n-gram drafter has to learn anew."""
    with engine(draft_type) as owner:
        begin(owner, 0, REPETITIVE, GREEDY, DENSE)
        go_on(owner, 0, 3)
        bare, whole = owner.save(0, with_sampler=False), owner.save(0)
        n_past = owner.seq_n_past(0)
        preempted = moved(owner, swap_outs=[0]).samplers[0]
        owner.load(1, whole)
        start = Start(0, preempted, n_past, snapshot=bare, is_resumed=True)
        assert started(owner, start) == n_past
        found, wanted = (
            [token for done in go_on(owner, seq_id, 8) for token in done.tokens]
            for seq_id in (0, 1)
        )
        n = min(len(found), len(wanted))
        assert n >= 8
        assert found[:n] == wanted[:n]


@pytest.mark.parametrize("draft_type", ["none", "mtp", "ngram-cache"])
def test_a_prompt_that_is_preempted_twice_before_its_end_goes_on(draft_type: DraftType) -> None:
    """Its second snapshot was refused: it held fewer known tokens than its sampler had heard."""
    prompt = (ids(" ".join(TEXTS)) * 60)[:60]
    with engine(draft_type) as owner:
        owner.seq_begin(1, sampler(GREEDY))
        wanted = emitted(owner.step(plan((1, 0, 0, 60, 0, 1)), prompt), 0)
        owner.seq_begin(0, sampler(GREEDY))
        for first, n in ((0, 20), (20, 15)):
            owner.step(plan((0, first, 0, n, 0, 0)), prompt[first : first + n])
            snapshot = owner.save(0)
            preempted = moved(owner, swap_outs=[0]).samplers[0]
            start = Start(0, preempted, first + n, snapshot=snapshot, is_resumed=True)
            assert started(owner, start) == first + n
        whole = owner.save(0)
        owner.load(2, whole)
        for seq_id in (0, 2):
            result = owner.step(plan((seq_id, 35, 0, 25, 0, 1)), prompt[35:])
            assert emitted(result, 0)[:1] == wanted[:1]


@pytest.mark.parametrize("has_sampler", [0, 2, 2**64 - 1])
def test_a_snapshot_that_lies_about_its_sampler_is_refused(has_sampler: int) -> None:
    """The bytes of a sampler that it does not tell of are no cells of it."""
    blob = taken("none")
    body = blob[:HAS_SAMPLER_AT] + struct.pack("<Q", has_sampler) + blob[HAS_SAMPLER_AT + 8 : -8]
    lie = sealed(body)
    assert struct.unpack_from("<Q", blob, HAS_SAMPLER_AT) == (1,)
    with forged_target() as target:
        with pytest.raises(SnapshotError) as caught:
            target.load(0, lie)
        assert caught.value.kind is SnapshotKind.CORRUPT
        assert started(target, Start(0, sampler(), 4, snapshot=lie)) == 0
        assert target.n_cells_used == 0


def test_other_format_is_told_apart_from_damage(target: Engine) -> None:
    blob = bytearray(taken())
    blob[8:16] = struct.pack("<Q", 99)
    error = refused(target, bytes(blob))
    assert error.kind is SnapshotKind.VERSION
    assert "99" in error.message


def test_snapshot_of_other_models_is_refused(target: Engine) -> None:
    assert refused(target, taken("mtp", HYBRID)).kind is SnapshotKind.OTHER_MODEL
    hybrid_draft = taken("eagle3", DENSE)
    with engine("eagle3", HYBRID) as other, pytest.raises(SnapshotError) as caught:
        other.load(0, hybrid_draft)
    assert caught.value.kind is SnapshotKind.OTHER_MODEL
    assert EAGLE3[DENSE] != EAGLE3[HYBRID]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n_ctx_seq", {"n_ctx_seq": 512}),
        ("n_draft_max", {"n_draft_max": 2}),
        ("p_min", {"p_min": 0.5}),
        ("n_min", {"n_min": 1}),
        ("probabilistic", {"probabilistic": True}),
        ("flash_attention", {"flash_attention": False}),
        ("KV caches", {"kv_unified": True}),
        ("KV caches", {"n_seq_max": 2}),
    ],
)
def test_snapshot_of_another_configuration_is_refused_with_the_field(
    field: str, fields: dict[str, Any]
) -> None:
    with engine("mtp", **fields) as other, pytest.raises(SnapshotError, match=field) as caught:
        other.load(0, taken())
    assert caught.value.kind is SnapshotKind.OTHER_CONFIG


def test_snapshot_of_another_draft_type_is_refused(target: Engine) -> None:
    error = refused(target, taken("none"))
    assert error.kind is SnapshotKind.OTHER_CONFIG
    assert "draft_type" in error.message


def test_no_room_for_the_cells() -> None:
    with engine("mtp", kv_unified=True, n_ctx=256) as target:
        prompt = ids(TEXTS[1]) * 20
        for i in (0, 1):
            target.seq_begin(i, sampler())
            target.step(plan((i, 0, 0, 100, 0, 1)), prompt[:100])
        snapshot = target.save(0)
        with pytest.raises(NoRoom):
            target.load(2, snapshot)
        with pytest.raises(SeqIdle):
            target.save(2)
        target.seq_end(1)
        target.load(2, snapshot)
        same(go_on(target, 2, 4), go_on(target, 0, 4))


@pytest.mark.parametrize("is_start", [False, True])
def test_a_snapshot_that_another_thread_writes_to_is_read_once(
    target: Engine, is_start: bool
) -> None:
    """Bytes that had been checked were read again where the caller writes, so may have changed."""
    blob = taken()
    shared = bytearray(blob)
    at = ctypes.addressof(ctypes.c_char.from_buffer(shared, 64))
    has_ended = threading.Event()

    def write() -> None:  # copies without the interpreter's lock
        while not has_ended.is_set():
            for content in (b"\x15" * 400, blob[64:464]):
                ctypes.memmove(at, content, 400)
                time.sleep(0)

    def load() -> None:
        if is_start:
            start = Start(0, sampler(), 1, snapshot=shared)
            target.step_rows([], [], [], moves=Moves(starts=[start]))
        else:
            target.load(0, shared)

    thread = threading.Thread(target=write)
    thread.start()
    refusals = set()
    try:
        for _ in range(2000):
            try:
                load()
            except SnapshotError as error:
                refusals.add(error.message)
            target.seq_end(0)
    finally:
        has_ended.set()
        thread.join()
    assert refusals <= {"the snapshot's checksum or size is wrong"}


# Forged ones: the checksum is right, what it covers is not.


def forged(blob: bytes, at: int, byte: int) -> bytes:
    body = blob[:at] + bytes([byte]) + blob[at + 1 : -8]
    return sealed(body)


def test_our_digest_is_theirs() -> None:
    blob = taken("none")
    assert sealed(blob[:-8]) == blob


@settings(max_examples=60, deadline=None)
@given(at=st.integers(120, 900), byte=st.integers(0, 255))
def test_forged_parts_are_refused_or_harmless(at: int, byte: int) -> None:
    with forged_target() as target:
        try:
            target.load(0, forged(taken("none"), at, byte))
        except (SnapshotError, InvalidArgument):
            with pytest.raises(SeqIdle):
                target.save(0)
            return
        go_on(target, 0, 2)


def forged_target() -> Engine:
    return engine("none")


def word_at(blob: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", blob, at)[0])


def drafter_state_at(blob: bytes) -> int:
    """Returns where the drafter's state begins: [n][state][m][cells][k][cells][checksum]."""
    end = len(blob) - 8
    for cells in range(128, end - 16):
        n_target = word_at(blob, cells)
        draft = cells + 8 + n_target
        if n_target > 0 and draft + 8 < end and draft + 8 + word_at(blob, draft) == end:
            return next(at for at in range(cells - 4, 8, -1) if word_at(blob, at - 8) == cells - at)
    raise AssertionError("a snapshot has cells")


@pytest.mark.parametrize(
    ("draft_type", "offset", "value"),
    [
        ("mtp", 0, struct.pack("<f", float("nan"))),
        ("eagle3", 4, struct.pack("<f", float("inf"))),
        ("eagle3", 0, struct.pack("<i", 200)),
        ("eagle3", 0, struct.pack("<i", -2)),
    ],
)
def test_forged_row_of_a_drafter_is_refused(
    draft_type: DraftType, offset: int, value: bytes
) -> None:
    blob = taken(draft_type)
    at = drafter_state_at(blob) + offset
    body = blob[:at] + value + blob[at + len(value) : -8]
    with engine(draft_type) as target:
        begin(target, 1, TEXTS[1], GREEDY, DENSE)
        error = refused(target, sealed(body))
        assert error.kind is SnapshotKind.CORRUPT
        target.load(0, blob)
