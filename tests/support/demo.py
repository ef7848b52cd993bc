"""The demo models behind a real server on loopback, and what their outputs are measured against."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import drafthouse_engine
from drafthouse import AsyncClient
from drafthouse_engine import DraftType, Placement
from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.engine.loading import Loaded
from drafthouse_server.engine.threads import Threads
from drafthouse_server.rpc.server import Server
from drafthouse_server.serving.loop import StepLoop

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGETS = {"dense": "tiny-mimo2-f16.gguf", "hybrid": "tiny-qwen35-f16.gguf"}
EAGLE3 = {"dense": "tiny-mimo2-eagle3-f16.gguf", "hybrid": "tiny-qwen35-eagle3-f16.gguf"}
SIMPLE = "tiny-draft-f16.gguf"

TIE_LOGITS = 0.05
"""Two candidates whose logits differ by at most this tie.

A batch of another width rounds sums in another order, and float16 weights and caches carry about
three digits of logits of size 10 to 20.
"""


@dataclass(frozen=True)
class Tie:
    """A place where two outputs of one prompt part because two tokens are equally likely."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the first differing token."""
    gap: float
    """Difference of the two candidates' logits."""


def config(target: str, draft_type: str, **settings: object) -> Config:
    """Returns the settings of a server on a demo model, on any free port."""
    files = {"eagle3": EAGLE3[target], "simple": SIMPLE}
    draft = files.get(draft_type)
    values: dict[str, object] = {
        "model": str(MODELS / TARGETS[target]),
        "model_draft": str(MODELS / draft) if draft else "",
        "draft_type": draft_type,
        "port": 0,
        "parallel": 32,
        "max_model_len": 1024,
        "threads": 1,
        "kv_unified": False,
        "draft_policy": "fixed",  # so that there are drafts to test
        "log_level": "error",
    }
    return Config(**values | settings)  # type: ignore[arg-type]  # checked by Config itself


def exact_engine(
    target: str, draft_type: DraftType, path: Path | None = None, **fields: Any
) -> LlamaEngine:
    """Returns an engine whose arithmetic depends on nothing but a sequence's own tokens.

    It is on the CPU wherever the tests run: no device promises that. Drawn tokens can be compared
    with nothing less: however little two logits differ, a draw may lie on the border between.

    Args:
        target: dense or hybrid.
        draft_type: Its drafter, with the demo draft model that it needs.
        path: Another file than the demo model.
        fields: Of `EngineParams`.
    """
    files = {"eagle3": EAGLE3[target], "simple": SIMPLE}
    here = Placement(devices=())
    model = drafthouse_engine.Model(path or MODELS / TARGETS[target], placement=here)
    file = files.get(draft_type)
    draft = drafthouse_engine.Model(MODELS / file, placement=here) if file else None
    params = drafthouse_engine.EngineParams(
        draft_type=draft_type, n_threads=1, exact=True, **fields
    )
    engine = drafthouse_engine.Engine(model, draft, params)
    return LlamaEngine(Loaded(engine, Threads(1, 1), prefix_bytes=1 << 30), "exact")


@asynccontextmanager
async def serving(
    settings: Config, api_key: str | None = None
) -> AsyncIterator[tuple[AsyncClient, StepLoop]]:
    """Runs a server in this process; yields a client and the server's loop."""
    server = Server(settings, lambda: LlamaEngine.load(settings))
    await server.startup()
    try:
        async with AsyncClient(server.target, api_key=api_key, retry=None) as client:
            yield client, server.loop
    finally:
        await server.close()


async def n_cells_used(loop: StepLoop) -> int:
    """Returns the KV cells in use, asked on the engine thread."""
    engine = loop.engine
    assert isinstance(engine, LlamaEngine)
    answer: Future[int] = Future()
    loop._thread.post(lambda: answer.set_result(engine.n_cells_used))
    return await asyncio.wrap_future(answer)


@cache
def vocabulary() -> drafthouse_engine.Model:
    """Returns the tokenizer that all demo models share."""
    return drafthouse_engine.Model(MODELS / TARGETS["dense"], vocab_only=True)


@cache
def prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns one held-out prompt per length, cut to exactly that many tokens."""
    content = json.loads((MODELS / "prompts.json").read_text(encoding="utf-8"))
    texts = [entry["text"] for entry in content["prompts"]]
    found = []
    for i, length in enumerate(lengths):
        tokens = vocabulary().tokenize(texts[i % len(texts)]).tolist()
        assert len(tokens) >= length, "prompts.json holds texts of more than 900 tokens"
        start = (i // len(texts)) * 7  # the same text again begins elsewhere
        found.append(tuple(tokens[start : start + length]))
    return tuple(found)


class Referee:
    """Decides whether two unlike outputs of one prompt are both right: only where logits tie.

    Holds an engine of its own without speculation, for one sequence; of a demo model, or of another
    file.
    """

    def __init__(self, target: str, path: Path | None = None) -> None:
        self._model = drafthouse_engine.Model(path or MODELS / TARGETS[target])
        params = drafthouse_engine.EngineParams(
            draft_type="none", n_seq_max=1, n_ctx_seq=1024, n_batch=1024, n_ubatch=512, n_threads=1
        )
        self._engine = drafthouse_engine.Engine(self._model, None, params)

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()
        self._model.close()

    def gap(self, tokens: Sequence[int], a: int, b: int) -> float:
        """Returns by how much the logits of two tokens differ after a history."""
        logits = self.logits(tokens)
        return abs(float(logits[a]) - float(logits[b]))

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Returns the logits after a history. Shape: [n_vocab] float32."""
        greedy = drafthouse_engine.SamplingParams(temperature=0.0)
        self._engine.seq_begin(0, drafthouse_engine.Sampler(self._model, greedy))
        n = len(tokens)
        outputs = [i == n - 1 for i in range(n)]
        self._engine.decode(tokens, range(n), [0] * n, outputs)
        logits = np.array(self._engine.logits(n - 1))
        self._engine.seq_end(0)
        return logits

    def compare(
        self, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], i: int = 0
    ) -> Tie | None:
        """Returns None for equal outputs, a tie where they may part.

        Raises:
            AssertionError: they part where the candidates do not tie.
        """
        if list(expected) == list(found):
            return None
        pairs = zip(expected, found, strict=False)
        position = next((k for k, (a, b) in enumerate(pairs) if a != b), -1)
        assert position >= 0, f"prompt {i}: {len(found)} tokens instead of {len(expected)}"
        a, b = expected[position], found[position]
        gap = self.gap([*prompt, *expected[:position]], a, b)
        assert gap <= TIE_LOGITS, (
            f"prompt {i}, token {position}: {b} instead of {a}, logits {gap:.4f} apart"
        )
        return Tie(i, position, gap)
