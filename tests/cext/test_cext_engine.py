"""The engine: bad plans change nothing, failures stay with their sequence, resources come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.archs import write_model
from tests.support.hand import (
    DENSE,
    EAGLE3,
    GREEDY,
    HYBRID,
    MODELS,
    TEXTS,
    assert_same,
    emitted,
    engine,
    fused,
    model,
    params,
    plan,
    sampler,
    tokens_of,
)

from drafthouse_engine import (
    DRAFT_TYPES,
    PLAN_DTYPE,
    BadGrammar,
    BadPlan,
    BadSeqId,
    Closed,
    DecodeFailed,
    DraftType,
    Engine,
    EngineError,
    EngineParams,
    Fault,
    IncompatibleDraft,
    InvalidArgument,
    Model,
    NoRoom,
    ResultFlag,
    Sampler,
    SamplingParams,
    SeqBusy,
    SeqIdle,
    Status,
)

pytestmark = pytest.mark.model

PROMPT = tokens_of(TEXTS[0])
MAX = 2**31 - 1


@dataclass
class Bench:
    """An engine with sequence 0 generating, sequence 1 begun and empty, sequence 2 idle."""

    engine: Engine
    last: int

    @property
    def n(self) -> int:
        return len(PROMPT)

    def state(self) -> tuple[int, ...]:
        return (*[self.engine.seq_n_past(i) for i in range(3)], self.engine.n_cells_used)

    def generate(self) -> list[int]:
        """Returns the next eight tokens of sequence 0."""
        tokens = [self.last]
        while len(tokens) < 9:
            n_past = self.engine.seq_n_past(0)
            result = self.engine.step(plan((0, n_past, 0, 1, 3, 1)), tokens[-1:])
            tokens += emitted(result, 0)
        return tokens[1:9]


def begun() -> Bench:
    target = engine("mtp")
    target.seq_begin(0, sampler())
    result = target.step(plan((0, 0, 0, len(PROMPT), 0, 1)), PROMPT)
    target.seq_begin(1, sampler())
    return Bench(target, emitted(result, 0)[0])


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = begun()
    yield bench
    bench.engine.close()


N = len(PROMPT)
BAD_PLANS: dict[str, tuple[type[EngineError], list[tuple[int, ...]], list[int]]] = {
    "sequence below": (BadSeqId, [(-1, 0, 0, 1, 0, 0)], [5]),
    "sequence above": (BadSeqId, [(3, 0, 0, 1, 0, 0)], [5]),
    "sequence absurd": (BadSeqId, [(MAX, 0, 0, 1, 0, 0)], [5]),
    "second entry's sequence": (BadSeqId, [(1, 0, 0, 1, 0, 0), (9, 0, 0, 1, 0, 0)], [5]),
    "idle sequence": (SeqIdle, [(2, 0, 0, 1, 0, 0)], [5]),
    "twice in a plan": (BadPlan, [(1, 0, 0, 1, 0, 0), (1, 0, 0, 1, 0, 0)], [5]),
    "n_past too small": (BadPlan, [(0, N - 1, 0, 1, 0, 1)], [5]),
    "n_past too great": (BadPlan, [(0, N + 1, 0, 1, 0, 1)], [5]),
    "n_past negative": (BadPlan, [(1, -1, 0, 1, 0, 0)], [5]),
    "no tokens": (EngineError, [(1, 0, 0, 0, 0, 0)], [5]),
    "tokens negative": (EngineError, [(1, 0, 0, -4, 0, 0)], [5]),
    "tokens beyond the array": (EngineError, [(1, 0, 0, 2, 0, 0)], [5]),
    "offset negative": (EngineError, [(1, 0, -1, 1, 0, 0)], [5]),
    "offset beyond the array": (EngineError, [(1, 0, 1, 1, 0, 0)], [5]),
    "offset overflows": (EngineError, [(1, 0, MAX, MAX, 0, 0)], [5]),
    "token negative": (EngineError, [(1, 0, 0, 1, 0, 0)], [-1]),
    "token beyond the vocabulary": (EngineError, [(1, 0, 0, 2, 0, 0)], [5, 2048]),
    "draft negative": (EngineError, [(0, N, 0, 1, -1, 1)], [5]),
    "draft beyond the maximum": (EngineError, [(0, N, 0, 1, 4, 1)], [5]),
    "draft absurd": (EngineError, [(0, N, 0, 1, MAX, 1)], [5]),
    "draft without output": (BadPlan, [(1, 0, 0, 1, 3, 0)], [5]),
    "draft at a prompt piece": (BadPlan, [(1, 0, 0, 2, 3, 1)], [5, 6]),
    "output neither 0 nor 1": (EngineError, [(1, 0, 0, 1, 0, 7)], [5]),
    "longer than the context": (BadPlan, [(1, 0, 0, 257, 0, 0)], [5] * 257),
    "longer than a batch": (BadPlan, [(1, 0, 0, 129, 0, 0)], [5] * 129),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plan_is_refused_and_changes_nothing(bench: Bench, name: str) -> None:
    error, rows, tokens = BAD_PLANS[name]
    before = bench.state()
    with pytest.raises(error):
        bench.engine.step(np.array(rows, PLAN_DTYPE), tokens)
    assert bench.state() == before
    untouched = begun()
    assert bench.generate() == untouched.generate()
    untouched.engine.close()


def test_bad_sequence_id_carries_its_values(bench: Bench) -> None:
    with pytest.raises(BadSeqId) as caught:
        bench.engine.step(plan((7, 0, 0, 1, 0, 0)), [5])
    assert (caught.value.seq_id, caught.value.n_seq) == (7, 3)


def test_plan_and_tokens_of_other_types_are_refused(bench: Bench) -> None:
    rows: Any
    for rows in ([(0, 0, 0, 1, 0, 0)], np.zeros((1, 6), np.int32), np.zeros((1, 1), PLAN_DTYPE)):
        with pytest.raises(TypeError):
            bench.engine.step(rows, [5])
    with pytest.raises(TypeError):
        bench.engine.step(plan((1, 0, 0, 1, 0, 0)), np.array([5.0]))
    with pytest.raises(InvalidArgument):
        bench.engine.step(plan((1, 0, 0, 1, 0, 0)), [2**40])


def test_strided_plan_and_wide_tokens_are_read_right(bench: Bench) -> None:
    rows = np.repeat(plan((1, 0, 0, len(PROMPT), 0, 1)), 2)[::2]
    tokens = np.repeat(np.array(PROMPT, np.int64), 2)[::2]
    assert emitted(bench.engine.step(rows, tokens), 0) == [bench.last]


def test_empty_plan_is_harmless(bench: Bench) -> None:
    before = bench.state()
    result = bench.engine.step(np.zeros(0, PLAN_DTYPE), [])
    assert (len(result.entries), len(result.tokens), result.n_batch_tokens) == (0, 0, 0)
    assert bench.state() == before


near = st.integers(-2, 12) | st.sampled_from([-MAX - 1, MAX, 128, 256, 2048])


class Walk:
    """Random steps of three sequences, some of them damaged."""

    def __init__(self, draft_type: DraftType) -> None:
        self.engine = engine(draft_type)
        self.last: list[int | None] = [None] * 3
        self.n_run = self.n_refused = 0

    def restart(self, seq_id: int) -> None:
        self.engine.seq_end(seq_id)
        self.engine.seq_begin(seq_id, sampler())
        self.last[seq_id] = None

    def state(self) -> list[int]:
        return [*[self.engine.seq_n_past(i) for i in range(3)], self.engine.n_cells_used]

    def rows(self, data: st.DataObject) -> tuple[list[list[int]], list[int]]:
        """Draws a right plan."""
        rows, tokens = list[list[int]](), list[int]()
        for seq_id in data.draw(st.lists(st.integers(0, 2), unique=True)):
            n_past, last = self.engine.seq_n_past(seq_id), self.last[seq_id]
            n = 1 if last is not None else data.draw(st.integers(1, 9))
            k = data.draw(st.integers(0, self.engine.limits.n_draft_max)) if last is not None else 0
            is_output = 1 if last is not None else data.draw(st.integers(0, 1))
            rows.append([seq_id, n_past, len(tokens), n, k, is_output])
            tokens += [last] if last is not None else PROMPT[:1] * n
        return rows, tokens

    def step(self, data: st.DataObject) -> None:
        rows, tokens = self.rows(data)
        for _ in range(data.draw(st.integers(0, 2))):
            if rows:
                row = data.draw(st.integers(0, len(rows) - 1))
                rows[row][data.draw(st.integers(0, 5))] = data.draw(near)
        if tokens and data.draw(st.integers(0, 9)) == 0:
            tokens[data.draw(st.integers(0, len(tokens) - 1))] = data.draw(near)
        self.run(plan(*[(r[0], r[1], r[2], r[3], r[4], r[5]) for r in rows]), tokens)

    def run(self, rows: npt.NDArray[Any], tokens: list[int]) -> None:
        before = self.state()
        try:
            result = self.engine.step(rows, tokens)
        except EngineError:
            assert self.state() == before
            self.n_refused += 1
            return
        self.n_run += 1
        assert result.entries["seq_id"].tolist() == rows["seq_id"].tolist()
        for i, entry in enumerate(result.entries):
            self.follow(int(entry["seq_id"]), int(entry["n_past"]), emitted(result, i))

    def follow(self, seq_id: int, n_past: int, tokens: list[int]) -> None:
        assert n_past == self.engine.seq_n_past(seq_id)
        self.last[seq_id] = tokens[-1] if tokens else None
        if n_past > 60:
            self.restart(seq_id)


@pytest.mark.parametrize("draft_type", ["none", "mtp", "eagle3"])
def test_random_plans_run_or_change_nothing(draft_type: DraftType) -> None:
    walk = Walk(draft_type)

    @settings(
        max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        for seq_id in range(3):
            walk.restart(seq_id)
        for _ in range(data.draw(st.integers(1, 12))):
            walk.step(data)

    run()
    assert walk.n_run > 20
    assert walk.n_refused > 20
    walk.engine.close()


# Whose drafts are blocks: test_block_drafts.py.
@pytest.mark.parametrize("name", [DENSE, HYBRID])
@pytest.mark.parametrize("draft_type", [t for t in DRAFT_TYPES if t not in {"dflash", "dspark"}])
def test_every_draft_type_gives_the_greedy_tokens(draft_type: DraftType, name: str) -> None:
    prompts = [tokens_of(text) for text in TEXTS]
    with engine("none", name) as plain:
        alone = [fused(plain, [prompt], 32)[0] for prompt in prompts]
    with engine(draft_type, name) as target:
        together = fused(target, prompts, 32)
        assert target.n_cells_used == 0
        again = fused(target, prompts, 32)
    assert again == together  # nothing of the former sequences is left
    assert_same(prompts, alone, together, name)


def test_prompt_in_pieces_beside_generation_gives_the_same_tokens(bench: Bench) -> None:
    prompt = tokens_of(TEXTS[2])
    with engine() as plain:
        expected = fused(plain, [prompt], 8)[0]
    last, start = bench.last, 0
    tokens = list[int]()
    while start < len(prompt):
        piece = prompt[start : start + 3]
        is_end = start + 3 >= len(prompt)
        rows = plan(
            (0, bench.engine.seq_n_past(0), 0, 1, 3, 1), (1, start, 1, len(piece), 0, int(is_end))
        )
        result = bench.engine.step(rows, [last, *piece])
        last = emitted(result, 0)[-1]
        tokens += emitted(result, 1)
        start += len(piece)
    while len(tokens) < 8:
        result = bench.engine.step(plan((1, bench.engine.seq_n_past(1), 0, 1, 3, 1)), tokens[-1:])
        tokens += emitted(result, 0)
    assert_same([prompt], [expected], [tokens[:8]])


def test_log_probabilities_are_those_of_the_logits() -> None:
    sampling = replace(GREEDY, logprobs=True)
    with engine("mtp") as target:
        target.seq_begin(0, sampler(sampling))
        tokens, logprobs = list[int](), list[float]()
        pending = PROMPT
        while len(tokens) < 24:
            rows = plan((0, target.seq_n_past(0), 0, len(pending), 3 if tokens else 0, 1))
            result = target.step(rows, pending)
            tokens += emitted(result, 0)
            logprobs += [float(value) for value in result.logprobs]
            pending = tokens[-1:]
    with engine(n_seq_max=32) as plain:  # as many outputs as sequences
        plain.seq_begin(0, sampler())
        history = PROMPT + tokens[:-1]
        n = len(history)
        plain.decode(history, range(n), [0] * n, [i >= len(PROMPT) - 1 for i in range(n)])
        for i, token in enumerate(tokens):
            logits = plain.logits(len(PROMPT) - 1 + i).astype(np.float64)
            expected = logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert logprobs[i] == pytest.approx(expected, abs=0.02)


def test_log_probabilities_not_asked_for_are_nan(bench: Bench) -> None:
    result = bench.engine.step(plan((0, bench.n, 0, 1, 0, 1)), [bench.last])
    assert np.isnan(result.logprobs).all()


def test_result_stays_valid_and_read_only(bench: Bench) -> None:
    result = bench.engine.step(plan((0, bench.n, 0, 1, 0, 1)), [bench.last])
    tokens, entries = result.tokens.tolist(), result.entries.tolist()
    bench.last = tokens[-1]
    bench.generate()
    bench.engine.close()
    assert (result.tokens.tolist(), result.entries.tolist()) == (tokens, entries)
    with pytest.raises(ValueError, match="read-only"):
        result.tokens[0] = 1
    assert 0 < result.t_decode_us <= result.t_total_us


def test_no_room_leaves_the_sequences_as_they_were(bench: Bench) -> None:
    before = bench.state()
    bench.engine.inject_fault(Fault.DECODE_NO_ROOM)
    result = bench.engine.step(plan((0, bench.n, 0, 1, 0, 1)), [bench.last])
    assert result.entries["status"].tolist() == [Status.NO_ROOM]
    assert bench.state() == before
    untouched = begun()
    assert bench.generate() == untouched.generate()
    untouched.engine.close()


@pytest.mark.parametrize("fault", [Fault.DECODE_FATAL, Fault.THROW, Fault.DECODE_THROW])
def test_failed_decode_ends_its_sequences_and_no_other(bench: Bench, fault: Fault) -> None:
    bench.engine.step(plan((1, 0, 0, 1, 0, 0)), [5])
    bench.engine.inject_fault(fault)
    result = bench.engine.step(plan((1, 1, 0, 1, 0, 0)), [6])
    assert result.entries["status"].tolist() == [Status.DECODE_FAILED]
    assert bench.state() == (bench.n, 0, 0, bench.n)
    with pytest.raises(SeqIdle):
        bench.engine.step(plan((1, 0, 0, 1, 0, 0)), [5])
    untouched = begun()
    assert bench.generate() == untouched.generate()
    untouched.engine.close()
    bench.engine.seq_begin(1, sampler())
    bench.engine.step(plan((1, 0, 0, 1, 0, 0)), [5])


def test_failed_process_costs_speculation_and_no_token(bench: Bench) -> None:
    untouched = begun()
    expected = untouched.generate()
    untouched.engine.close()
    bench.engine.inject_fault(Fault.PROCESS)
    result = bench.engine.step(plan((0, bench.n, 0, 1, 0, 1)), [bench.last])
    assert result.entries["status"].tolist() == [Status.OK]
    assert ResultFlag.DRAFT_COLD in ResultFlag(int(result.entries["flags"][0]))
    bench.last = emitted(result, 0)[0]
    assert [bench.last, *bench.generate()][:8] == expected


def test_failed_decode_by_hand_clears_the_batch(bench: Bench) -> None:
    bench.engine.inject_fault(Fault.DECODE_NO_ROOM)
    with pytest.raises(NoRoom):
        bench.engine.decode([5], [0], [1], [True])
    assert bench.engine.seq_n_past(1) == 0
    for fault in (Fault.DECODE_FATAL, Fault.DECODE_THROW):
        bench.engine.seq_end(1)
        bench.engine.seq_begin(1, sampler())
        bench.engine.inject_fault(fault)
        with pytest.raises(DecodeFailed):
            bench.engine.decode([5], [0], [1], [True])
        assert bench.engine.n_cells_used == bench.n
    assert bench.state() == (bench.n, 0, 0, bench.n)


@pytest.mark.parametrize("fault", [-1, 7, 2**31 - 1])
def test_unknown_fault_is_refused(bench: Bench, fault: int) -> None:
    with pytest.raises(InvalidArgument):
        bench.engine.inject_fault(fault)


@pytest.mark.parametrize("draft_type", ["mtp", "simple", "eagle3", "ngram-simple"])
def test_a_drafter_that_throws_leaves_no_orders(draft_type: DraftType) -> None:
    """An order that was left drafted for a sequence that was gone, or ended the process."""
    texts = [tokens_of(text) for text in TEXTS[:2]]
    with engine(draft_type) as target:
        expected = fused(target, texts, 24)
        last = []
        for seq_id, text in enumerate(texts):
            target.seq_begin(seq_id, sampler())
            result = target.step(plan((seq_id, 0, 0, len(text), 0, 1)), text)
            last.append(emitted(result, 0)[0])
        target.inject_fault(Fault.DRAFT)
        rows = [(seq_id, len(text), seq_id, 1, 3, 1) for seq_id, text in enumerate(texts)]
        result = target.step(plan(*rows), last)
        assert result.entries["status"].tolist() == [Status.DECODE_FAILED] * 2
        assert_same(texts[:1], expected[:1], fused(target, texts[:1], 24))
        assert fused(target, texts, 24) == expected


def test_cells_come_back() -> None:
    with engine("mtp") as target:
        fused(target, [tokens_of(text) for text in TEXTS], 16)
        assert target.n_cells_used == 0
        target.seq_begin(0, sampler())
        target.step(plan((0, 0, 0, len(PROMPT), 0, 1)), PROMPT)
        assert target.n_cells_used == len(PROMPT)
        target.seq_end(0)
        target.seq_end(0)
        assert target.n_cells_used == 0
        with pytest.raises(BadSeqId):
            target.seq_end(3)


def test_rollback_goes_back_and_on(bench: Bench) -> None:
    expected = bench.generate()
    bench.engine.rollback(0, bench.n)
    assert bench.state()[0] == bench.n
    result = bench.engine.step(plan((0, bench.n, 0, 1, 0, 1)), [bench.last])
    assert emitted(result, 0) == expected[:1]
    with pytest.raises(BadPlan):
        bench.engine.rollback(0, bench.n + 99)
    with pytest.raises(SeqIdle):
        bench.engine.rollback(2, 0)


def test_limits_are_what_was_asked_for() -> None:
    with engine("mtp") as target:
        limits = target.limits
    assert (limits.draft_type, limits.n_seq_max, limits.n_ctx_seq) == ("mtp", 3, 256)
    assert (limits.n_batch, limits.n_ubatch, limits.n_draft_max) == (128, 64, 3)
    assert limits.n_vocab == 2048
    assert limits.n_outputs_max >= 3 * 4


def test_eagle3_that_reads_a_layer_the_target_lacks_is_refused(tmp_path: Path) -> None:
    content = bytearray((MODELS / EAGLE3[DENSE]).read_bytes())
    key = b"eagle3.target_layers"
    last = (
        content.index(key) + len(key) + 4 + 4 + 8 + 2 * 4
    )  # type, element type, count, two layers
    assert content[last] == 5
    content[last] = 99
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with Model(path) as draft, pytest.raises(IncompatibleDraft, match="99"):
        Engine(model(), draft, params("eagle3"))


def test_busy_sequence_and_used_sampler_are_refused(bench: Bench) -> None:
    used = sampler()
    with pytest.raises(SeqBusy) as busy:
        bench.engine.seq_begin(0, used)
    assert busy.value.seq_id == 0
    assert used.is_used
    with pytest.raises(Closed):
        bench.engine.seq_begin(2, used)
    kept = sampler()
    with pytest.raises(BadSeqId):
        bench.engine.seq_begin(3, kept)
    assert not kept.is_used
    bench.engine.seq_begin(2, kept)


def test_sampler_of_another_model_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="another model"):
        bench.engine.seq_begin(2, sampler(name=HYBRID))


@pytest.mark.parametrize("grammar", ["root ::= (", 'x ::= "a"', "root ::= missing", "root"])
def test_bad_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(BadGrammar):
        sampler(SamplingParams(grammar=grammar))


def test_grammar_binds_drafted_tokens_too() -> None:
    sampling = replace(GREEDY, grammar='root ::= "yes" | "no"')
    with engine("mtp") as target:
        target.seq_begin(0, sampler(sampling))
        tokens, pending, flags = list[int](), PROMPT, 0
        while len(tokens) < 16 and not flags & ResultFlag.EOG:
            rows = plan((0, target.seq_n_past(0), 0, len(pending), 3 if tokens else 0, 1))
            result = target.step(rows, pending)
            tokens += emitted(result, 0)
            flags = int(result.entries["flags"][0])
            pending = tokens[-1:]
    assert model().detokenize(tokens) in {b"yes", b"no"}


def test_logit_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        sampler(SamplingParams(logit_bias=((2048, 1.0),)))


def test_forbidden_token_is_never_chosen(bench: Bench) -> None:
    forbidden = replace(GREEDY, logit_bias=((bench.last, -np.inf),))
    bench.engine.seq_begin(2, sampler(forbidden))
    result = bench.engine.step(plan((2, 0, 0, len(PROMPT), 0, 1)), PROMPT)
    assert emitted(result, 0) != [bench.last]


def test_same_seed_gives_the_same_tokens() -> None:
    def sample(seed: int) -> list[int]:
        with engine() as target:
            target.seq_begin(0, sampler(SamplingParams(seed=seed, temperature=2.0)))
            pending, tokens = PROMPT, list[int]()
            for _ in range(12):
                rows = plan((0, target.seq_n_past(0), 0, len(pending), 0, 1))
                tokens += emitted(target.step(rows, pending), 0)
                pending = tokens[-1:]
        return tokens

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_arguments_of_other_types_are_refused(bench: Bench) -> None:
    value: Any
    for value in (None, "0", 1.0, True):
        with pytest.raises(TypeError):
            bench.engine.seq_n_past(value)
    with pytest.raises(TypeError):
        bench.engine.seq_begin(2, None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError):
        Engine("model.gguf")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError):
        Sampler(model(), {"temperature": 1})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidArgument):
        bench.engine.draft_many([(0, 1, 2)])  # type: ignore[list-item]  # wrong on purpose
    with pytest.raises(InvalidArgument, match="same length"):
        bench.engine.decode([5, 6], [0], [1], [True])


def test_logits_are_a_writable_copy(bench: Bench) -> None:
    bench.engine.decode([5], [0], [1], [True])
    logits: npt.NDArray[np.float32] = bench.engine.logits(0)
    assert (logits.shape, logits.dtype) == ((2048,), np.dtype(np.float32))
    logits[:] = 0
    assert bench.engine.logits(0).any()


def test_type_of_target_is_kept(bench: Bench) -> None:
    assert isinstance(bench.engine.target, Model)
    assert bench.engine.draft is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n_ctx_seq": 2**31 - 1}, r"n_ctx_seq \* n_seq_max is 2147483647 cells"),
        ({"n_ctx_seq": 2**31 - 255}, r"n_ctx_seq \* n_seq_max is 2147483393 cells"),
        ({"n_ctx": 2**31 - 1, "kv_unified": True}, "n_ctx is 2147483647 cells"),
    ],
)
def test_cells_that_do_not_fit_into_32_bits_are_refused(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Rounded up by llama.cpp they made negative limits, where no memory forbade them."""
    with (
        Model(write_model(tmp_path / "m.gguf", "mamba2")) as recurrent,
        pytest.raises(InvalidArgument, match=text),
    ):
        Engine(recurrent, None, EngineParams(n_threads=1, **fields))


def test_nothing_is_heard_behind_an_accepted_end_token() -> None:
    """Whoever goes on after one had a token penalised, and random numbers drawn, of nobody."""
    *prompt, newline = tokens_of("def parse(text):\ndel textwrap\ndeclminate\n")
    end = model().eos_token_ids[0]
    sampling = SamplingParams(
        temperature=1.0,
        top_k=1,
        penalty_presence=100.0,
        penalty_last_n=2,
        logit_bias=((newline, 40.0), (end, 20.0)),
    )

    def generated(driven: Engine, seed: int) -> list[int]:
        driven.seq_begin(0, sampler(replace(sampling, seed=seed)))
        tokens = list(prompt)
        pending = prompt
        for _ in range(5):
            n_draft = min(driven.limits.n_draft_max, int(len(pending) == 1))
            rows = plan((0, driven.seq_n_past(0), 0, len(pending), n_draft, 1))
            tokens += emitted(driven.step(rows, pending), 0)
            pending = tokens[-1:]
        driven.seq_end(0)
        return tokens[len(prompt) :][:5]

    with engine("none") as plain:
        expected = generated(plain, 0)
    assert expected[:2] == [newline, end]
    with engine("mtp", probabilistic=True) as driven:
        found = [generated(driven, seed) for seed in range(60)]  # four draft the end token
    assert found == [expected] * 60
