"""Reuse, copies, snapshots and preemption change nothing of what the demo models generate.

`test_engine_contract.py` shows the contract on every engine; here is what only real drafters and
samplers have: random states, penalties, grammars, acceptance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from tests.support.built import needs_extension
from tests.support.demo import Referee, config, exact_engine, prompts

from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.errors import EngineError
from drafthouse_server.step import PlanEntry, SamplingOptions, SequenceStatus, Start, StepPlan

pytestmark = needs_extension()

ENGINES = [
    ("dense", "mtp"),
    ("dense", "eagle3"),
    ("dense", "simple"),
    ("dense", "ngram-simple"),
    ("dense", "ngram-mod"),
    ("hybrid", "mtp"),
    ("hybrid", "eagle3"),
    ("hybrid", "ngram-simple"),
]
DENSE = [name for name in ENGINES if name[0] == "dense"]

OPTIONS = {
    "greedy": SamplingOptions(temperature=0, ignore_eos=True),
    "sampled": SamplingOptions(temperature=0.8, seed=5, ignore_eos=True),
    "penalties": SamplingOptions(
        temperature=0.7,
        seed=6,
        ignore_eos=True,
        penalty_repeat=1.3,
        penalty_frequency=0.2,
        dry_multiplier=0.8,
        xtc_probability=0.3,
    ),
    "grammar": SamplingOptions(
        temperature=0.8, seed=7, grammar='root ::= ("a" | "b" | "cd" | " ")+ "\\n"'
    ),
}

N_PROMPT = 60
N_OUTPUT = 32
N_BEFORE = 12
"""Tokens that a sequence has generated when it is taken out."""


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(make_config(*request.param))
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=DENSE, ids="-".join)
def dense(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(make_config(*request.param))
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def exact(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    target, draft_type = request.param
    engine = exact_engine(target, draft_type, n_seq_max=4, n_ctx_seq=256, n_draft_max=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=DENSE, ids="-".join)
def dense_exact(request: pytest.FixtureRequest) -> Iterator[LlamaEngine]:
    engine = exact_engine(*request.param, n_seq_max=4, n_ctx_seq=256, n_draft_max=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def referees() -> Iterator[dict[str, Referee]]:
    """By the names of targets."""
    found = {target: Referee(target) for target in ("dense", "hybrid")}
    yield found
    for referee in found.values():
        referee.close()


@pytest.fixture
def referee(referees: dict[str, Referee]) -> Referee:
    return referees["dense"]


@pytest.fixture
def own_referee(request: pytest.FixtureRequest, referees: dict[str, Referee]) -> Referee:
    """Of the target of `engine`."""
    target, _ = request.node.callspec.params["engine"]
    return referees[target]


def make_config(target: str, draft_type: str, **settings: object) -> Config:
    return config(target, draft_type, **{"parallel": 4, "max_model_len": 256} | settings)


@dataclasses.dataclass
class Stream:
    """One sequence, step by step."""

    engine: LlamaEngine
    seq_id: int
    prompt: list[int]
    output: list[int] = dataclasses.field(default_factory=list)
    n_past: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    is_over: bool = False

    def step(self, start: Start | None = None, n_draft: int = 3) -> None:
        known = [*self.prompt, *self.output]
        n_past = start.n_kept if start else self.n_past
        tokens = known[n_past:]
        k = n_draft if self.output and len(tokens) == 1 else 0
        entry = PlanEntry(self.seq_id, n_past, tokens, k, True)
        result = self.engine.step(StepPlan([entry], [start] if start else []))
        (done,) = result.entries
        assert done.status is SequenceStatus.OK
        self.n_past = done.n_past
        self.output += done.tokens
        self.n_drafted += done.n_drafted
        self.n_accepted += done.n_accepted
        self.is_over = done.is_eog

    def run(self, n_output: int, start: Start | None = None, n_draft: int = 3) -> list[int]:
        while len(self.output) < n_output and not self.is_over:
            self.step(start, n_draft)
            start = None
        return self.output[:n_output]


def begin(
    engine: LlamaEngine, seq_id: int, prompt: list[int], options: SamplingOptions, n: int
) -> Stream:
    stream = Stream(engine, seq_id, prompt)
    stream.run(n, Start(seq_id, engine.make_sampler(options)))
    return stream


def alone(engine: LlamaEngine, prompt: list[int], options: SamplingOptions) -> list[int]:
    """Returns what a prompt gives when nothing happens to it."""
    tokens = begin(engine, 3, prompt, options, N_OUTPUT).run(N_OUTPUT)
    engine.step(StepPlan(frees=[3]))
    return tokens


def a_prompt(i: int = 0, n: int = N_PROMPT) -> list[int]:
    return list(prompts((n,) * (i + 1))[i])


def preempted(engine: LlamaEngine, name: str, way: str) -> tuple[list[int], list[int], list[int]]:
    """Returns a prompt, what it gives alone, and what it gives when it is taken out and goes on.

    Another has its slot meanwhile, and it goes on in another one.
    """
    options, prompt = OPTIONS[name], a_prompt()
    expected = alone(engine, prompt, options)
    stream = begin(engine, 0, prompt, options, N_BEFORE)
    is_saved = way != "recompute"
    result = engine.step(StepPlan(swap_outs=[0], saves=[0] if is_saved else []))
    begin(engine, 0, a_prompt(1), OPTIONS["sampled"], 8)
    sampler = None if way == "own sampler" else result.samplers[0]
    stream.seq_id = 1
    n_kept = stream.n_past if is_saved else 0
    start = Start(1, sampler, n_kept, snapshot=result.snapshots.get(0), is_resumed=True)
    if not is_saved:  # computed again in pieces, up to the last token
        known = [*prompt, *stream.output]
        for i in range(0, stream.n_past, 25):
            piece = known[i : min(i + 25, stream.n_past)]
            plan = StepPlan([PlanEntry(1, i, piece, 0, False)], [start] if i == 0 else [])
            assert engine.step(plan).entries[0].n_past == i + len(piece)
    found = stream.run(N_OUTPUT, start if is_saved else None)
    engine.step(StepPlan(frees=[0, 1]))
    return prompt, expected, found


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", ["snapshot", "own sampler"])
def test_a_saved_sequence_loses_no_token(engine: LlamaEngine, name: str, way: str) -> None:
    """The same slot width throughout, so that even drawn tokens are the same ones."""
    _, expected, found = preempted(engine, name, way)
    assert found == expected


def test_a_sequence_computed_again_loses_no_token(
    engine: LlamaEngine, own_referee: Referee
) -> None:
    own_referee.compare(*preempted(engine, "greedy", "recompute"))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sequence_computed_again_draws_what_it_would_have_drawn(
    exact: LlamaEngine, name: str
) -> None:
    _, expected, found = preempted(exact, name, "recompute")
    assert found == expected


def preempted_often(engine: LlamaEngine, name: str) -> tuple[list[int], list[int], list[int]]:
    """Returns a prompt, what it gives alone, and what it gives when it is taken out six times."""
    options, prompt = OPTIONS[name], a_prompt(2)
    expected = alone(engine, prompt, options)
    stream = begin(engine, 0, prompt, options, 4)
    for n in (8, 14, 20):
        sampler = engine.step(StepPlan(swap_outs=[0])).samplers[0]
        # Preempted once more before it is computed whole.
        plan = StepPlan(
            [PlanEntry(0, 0, prompt[:30], 0, False)], [Start(0, sampler, 0, None, None, True)]
        )
        engine.step(plan)
        sampler = engine.step(StepPlan(swap_outs=[0])).samplers[0]
        plan = StepPlan(
            [PlanEntry(0, 0, [*prompt, *stream.output][: stream.n_past], 0, False)],
            [Start(0, sampler, 0, None, None, True)],
        )
        engine.step(plan)
        stream.run(n)
    found = stream.run(N_OUTPUT)
    engine.step(StepPlan(frees=[0]))
    return prompt, expected, found


def test_a_sequence_is_preempted_again_and_again(engine: LlamaEngine, own_referee: Referee) -> None:
    own_referee.compare(*preempted_often(engine, "greedy"))


def test_a_sequence_draws_on_as_often_as_it_is_preempted(exact: LlamaEngine) -> None:
    _, expected, found = preempted_often(exact, "penalties")
    assert found == expected


WAYS = ["in place", "copy", "snapshot"]


def reused(engine: LlamaEngine, name: str, way: str) -> tuple[list[int], list[int], list[int]]:
    """Returns a prompt, what it gives alone, and what it gives after a prefix of another's."""
    options = dataclasses.replace(OPTIONS[name], temperature=0.0, xtc_probability=0.0)
    prompt, n_kept = a_prompt(n=90), 70
    expected = alone(engine, prompt, options)
    old = begin(engine, 0, [*prompt[:n_kept], *a_prompt(1)[:9]], OPTIONS["sampled"], 6)
    sampler = engine.make_sampler(options)
    if way == "in place":
        stream, start = Stream(engine, 0, prompt), Start(0, sampler, n_kept)
    elif way == "copy":
        stream, start = Stream(engine, 2, prompt), Start(2, sampler, n_kept, source=0)
    else:
        snapshot = engine.step(StepPlan(saves=[0], frees=[0])).snapshots[0]
        stream, start = Stream(engine, 1, prompt), Start(1, sampler, n_kept, snapshot=snapshot)
    found = stream.run(N_OUTPUT, start)
    assert stream.n_past > n_kept
    if way == "copy":
        old.run(N_OUTPUT)
    engine.step(StepPlan(frees=range(4)))
    if way == "copy":
        assert old.output[:N_OUTPUT] == alone(engine, old.prompt, OPTIONS["sampled"])
    return prompt, expected, found


@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_changes_no_token(dense: LlamaEngine, referee: Referee, way: str) -> None:
    referee.compare(*reused(dense, "greedy", way))


@pytest.mark.parametrize("way", WAYS)
def test_penalties_see_the_tokens_of_a_prefix(dense_exact: LlamaEngine, way: str) -> None:
    """The referee knows no penalties."""
    _, expected, found = reused(dense_exact, "penalties", way)
    assert found == expected


def test_a_chain_of_copies_holds_what_its_first_held(dense: LlamaEngine, referee: Referee) -> None:
    """One plan may copy, load and copy again."""
    prompt, other = a_prompt(n=50), a_prompt(1, 50)
    expected = {
        0: alone(dense, other, OPTIONS["greedy"]),
        1: alone(dense, prompt, OPTIONS["greedy"]),
    }
    begin(dense, 3, other, OPTIONS["greedy"], 2)
    snapshot = dense.step(StepPlan(saves=[3], frees=[3])).snapshots[3]
    begin(dense, 0, prompt, OPTIONS["greedy"], 2)
    make = dense.make_sampler
    starts = [
        Start(1, make(OPTIONS["greedy"]), 40, source=0),
        Start(0, make(OPTIONS["greedy"]), 40, snapshot=snapshot),
        Start(2, make(OPTIONS["greedy"]), 30, source=1),
        Start(3, make(OPTIONS["greedy"]), 30, source=0),
    ]
    held = {0: (other, 40), 1: (prompt, 40), 2: (prompt, 30), 3: (other, 30)}
    dense.step(StepPlan(starts=starts))
    for seq_id, (tokens, n_kept) in held.items():
        stream = Stream(dense, seq_id, tokens, n_past=n_kept)
        found = stream.run(N_OUTPUT)
        referee.compare(tokens, expected[int(tokens is prompt)], found)
    dense.step(StepPlan(frees=range(4)))


def test_drafts_are_accepted_after_reuse_as_they_are_cold() -> None:
    """A hidden row that is missing costs little: most drafts after it stand as before."""
    for draft_type in ("mtp", "eagle3", "simple"):
        engine = LlamaEngine.load(make_config("dense", draft_type))
        n_accepted = {"cold": 0, "in place": 0, "copy": 0, "whole": 0}
        for i in range(4):
            prompt = a_prompt(i, 100)
            options = OPTIONS["greedy"]
            n_accepted["cold"] += begin(engine, 0, prompt, options, N_OUTPUT).n_accepted
            for way, n_kept in (("in place", 80), ("copy", 80), ("whole", 80)):
                held = prompt[:80] if way == "whole" else [*prompt[:80], *a_prompt(i + 4, 20)]
                old = begin(engine, 1, held, options, 1)
                assert old.n_past == len(held)
                source = None if way == "in place" else 1
                stream = Stream(engine, 1 if source is None else 2, prompt)
                sampler = engine.make_sampler(options)
                stream.run(N_OUTPUT, Start(stream.seq_id, sampler, n_kept, source=source))
                n_accepted[way] += stream.n_accepted
            engine.step(StepPlan(frees=range(4)))
        engine.close()
        assert n_accepted["cold"] > 0, draft_type
        for way, n in n_accepted.items():
            assert n >= 0.85 * n_accepted["cold"], f"{draft_type} {way}: {n_accepted}"


def test_snapshots_and_samplers_of_another_model_keep_nothing() -> None:
    one = LlamaEngine.load(make_config("dense", "mtp"))
    other = LlamaEngine.load(make_config("hybrid", "mtp"))
    prompt = a_prompt()
    stream = begin(one, 0, prompt, OPTIONS["greedy"], 3)
    result = one.step(StepPlan(saves=[0], swap_outs=[0]))
    with pytest.raises(EngineError, match="INVALID_ARGUMENT"):
        other.step(StepPlan(starts=[Start(0, result.samplers[0], is_resumed=True)]))
    sampler = other.make_sampler(OPTIONS["greedy"])
    start = Start(0, sampler, stream.n_past, snapshot=result.snapshots[0])
    refused = other.step(StepPlan([PlanEntry(0, stream.n_past, [1], 0, True)], [start]))
    assert refused.n_kept == {0: 0}
    assert other.n_cells_used == 0
    expected = alone(other, prompt, OPTIONS["greedy"])
    assert Stream(other, 0, prompt).run(N_OUTPUT) == expected
    one.close()
    other.close()


@pytest.mark.parametrize("is_kv_unified", [False, True])
def test_damaged_snapshots_keep_nothing(referee: Referee, *, is_kv_unified: bool) -> None:
    engine = LlamaEngine.load(make_config("dense", "mtp", kv_unified=is_kv_unified))
    prompt, options = a_prompt(), OPTIONS["greedy"]
    expected = alone(engine, prompt, options)
    begin(engine, 0, prompt, options, 3)
    snapshot = bytes(engine.step(StepPlan(saves=[0])).snapshots[0])
    damaged = [snapshot[:-1], snapshot[:100], snapshot[:5000] + b"!" + snapshot[5001:], b""]
    for i, wrong in enumerate(damaged):
        slot = 1 + i % 3
        start = Start(slot, engine.make_sampler(options), 20, snapshot=wrong)
        result = engine.step(StepPlan([PlanEntry(slot, 20, [1], 0, True)], [start]))
        assert result.n_kept == {slot: 0}
        assert Stream(engine, slot, prompt).run(N_OUTPUT) == expected
        engine.step(StepPlan(frees=[slot]))
    copy = Stream(engine, 2, prompt)
    found = copy.run(N_OUTPUT, Start(2, engine.make_sampler(options), 50, source=0))
    engine.close()
    referee.compare(prompt, expected, found)
