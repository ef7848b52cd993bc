"""The demo models in the engine itself, and generations driven by hand through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.support.demo import Referee

from drafthouse_engine import (
    PLAN_DTYPE,
    Batch,
    DraftRequest,
    DraftType,
    Engine,
    EngineParams,
    Model,
    Moved,
    Moves,
    Placement,
    Sampler,
    SamplingParams,
    SpeculativeSession,
    Start,
    StepResult,
)

MODELS = Path(__file__).resolve().parents[2] / "models"
DENSE = "tiny-mimo2-f16.gguf"
HYBRID = "tiny-qwen35-f16.gguf"
EAGLE3 = {DENSE: "tiny-mimo2-eagle3-f16.gguf", HYBRID: "tiny-qwen35-eagle3-f16.gguf"}
SIMPLE = "tiny-draft-f16.gguf"
TEXTS = (
    "def parse(text):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
)
GREEDY = SamplingParams(temperature=0.0)


@cache
def model(name: str = DENSE) -> Model:
    """Returns a demo model, loaded once; never close it."""
    return Model(MODELS / name)


@cache
def on_host() -> Model:
    """Returns the dense demo model, loaded once, in host memory whatever devices there are."""
    return Model(MODELS / DENSE, placement=Placement(devices=()))


def tokens_of(text: str) -> list[int]:
    return [int(token) for token in model().tokenize(text)]


def params(draft_type: DraftType = "none", **fields: Any) -> EngineParams:
    """Returns parameters for small contexts on one thread."""
    small: dict[str, Any] = {"n_seq_max": 3, "n_ctx_seq": 256, "n_batch": 128, "n_ubatch": 64}
    return EngineParams(draft_type=draft_type, **{"n_threads": 1} | small | fields)


def engine(draft_type: DraftType = "none", name: str = DENSE, **fields: Any) -> Engine:
    """Returns an engine over a demo model with the draft model that the type needs."""
    drafts = {"eagle3": EAGLE3[name], "simple": SIMPLE}
    draft = model(drafts[draft_type]) if draft_type in drafts else None
    return Engine(model(name), draft, params(draft_type, **fields))


def exact_engine(draft_type: DraftType = "none") -> Engine:
    """Returns an exact engine over `on_host`, with drafts of its own at most."""
    return Engine(on_host(), None, params(draft_type, exact=True))


def sampler(sampling: SamplingParams = GREEDY, name: str = DENSE) -> Sampler:
    return Sampler(model(name), sampling)


def plan(*rows: tuple[int, int, int, int, int, int]) -> npt.NDArray[Any]:
    """Returns a plan of rows (seq_id, n_past, token_offset, n_tokens, n_draft, is_output)."""
    return np.array(list(rows), PLAN_DTYPE)


def moved(target: Engine, **moves: Any) -> Moved:
    """Makes moves in a plan of their own."""
    result = target.step(np.empty(0, PLAN_DTYPE), [], moves=Moves(**moves))
    assert result.moved is not None
    return result.moved


def started(target: Engine, start: Start) -> int:
    """Starts a sequence in a plan of its own; returns how many tokens it kept."""
    return moved(target, starts=[start]).n_kept[0]


def emitted(result: StepResult, i: int) -> list[int]:
    """Returns the tokens that entry i of a result emitted."""
    entry = result.entries[i]
    start = int(entry["token_offset"])
    return [int(token) for token in result.tokens[start : start + int(entry["n_tokens"])]]


def fused(
    target: Engine, prompts: Sequence[Sequence[int]], n: int, n_draft: int = 3
) -> list[list[int]]:
    """Returns n greedy tokens of each prompt, generated together by `step`; frees the sequences."""
    n_draft = min(n_draft, target.limits.n_draft_max)
    outputs: list[list[int]] = [[] for _ in prompts]
    pending = [list(prompt) for prompt in prompts]
    for seq_id in range(len(prompts)):
        target.seq_begin(seq_id, Sampler(target.target, GREEDY))
    while running := [i for i, output in enumerate(outputs) if len(output) < n]:
        rows, tokens = [], list[int]()
        for i in running:
            k = n_draft if outputs[i] else 0
            rows.append((i, target.seq_n_past(i), len(tokens), len(pending[i]), k, 1))
            tokens += pending[i]
        result = target.step(plan(*rows), tokens)
        assert not result.entries["status"].any()
        for place, i in enumerate(running):
            outputs[i] += emitted(result, place)
            pending[i] = outputs[i][-1:]
    for seq_id in range(len(prompts)):
        target.seq_end(seq_id)
    return [output[:n] for output in outputs]


def assert_same(
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    name: str = DENSE,
) -> None:
    """Asserts that greedy outputs are equal, but where two candidates' logits tie.

    A batch of another width may round otherwise, on any device; only `exact` promises bits.

    Args:
        prompts: What each output follows.
        expected: Outputs of one way to compute them.
        found: Outputs of another.
        name: The model's file.
    """
    assert len(found) == len(expected) == len(prompts)
    if list(map(list, found)) == list(map(list, expected)):
        return
    with closing(Referee(name, MODELS / name)) as referee:
        for i, prompt in enumerate(prompts):
            referee.compare(prompt, expected[i], found[i], i)


def verify(session: SpeculativeSession, seq_id: int, draft: Sequence[int]) -> list[int]:
    """Returns the tokens of a round: the accepted draft, then the target's own; ends the round."""
    tokens = list[int]()
    for i in range(len(draft) + 1):
        tokens.append(session.sample(seq_id, i))
        if i == len(draft) or tokens[-1] != draft[i]:
            break
    session.accept(seq_id, len(tokens) - 1)
    return tokens


def driven(
    session: SpeculativeSession, prompts: Sequence[Sequence[int]], n: int
) -> list[list[int]]:
    """Returns n greedy tokens of each prompt, driven call by call; frees the sequences."""
    outputs = list[list[int]]()
    for seq_id, prompt in enumerate(prompts):
        session.begin(seq_id, prompt, sampling=GREEDY)
        outputs.append([session.sample(seq_id)])
    while running := [i for i, output in enumerate(outputs) if len(output) < n]:
        drafts = session.draft_many(
            [DraftRequest(i, session.n_past(i), outputs[i][-1]) for i in running]
        )
        batches = [
            Batch.of(i, session.n_past(i), [outputs[i][-1], *draft])
            for i, draft in zip(running, drafts, strict=True)
        ]
        batch = sum(batches[1:], batches[0])
        session.decode(batch)
        session.process(batch)
        for i, draft in zip(running, drafts, strict=True):
            outputs[i] += verify(session, i, draft)
    for seq_id in range(len(prompts)):
        session.end(seq_id)
    return [output[:n] for output in outputs]
