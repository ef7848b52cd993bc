"""The former chooser of K, a model of costs and acceptance, at work in today's scheduler.

Until 1f6edb4 a model chose K: `policy.py`, `cost.py` and `acceptance.py` of `_COMMIT`. They are
taken out of git's history when the trial asks for them, and run as they are. Four names in
`policy.py` are rewritten, since today's sequences have a request and `epoch` is what was `n_turns`:

- `sequence.n_draft` and `sequence.tenant` are read from `sequence.request`;
- `n_turns` is `epoch`;
- what the model remembers of a sequence lies in its `ngram_memory`, as `draft_memory` is no more;
  so prompt lookup must be off.

The model gets what it got then, in the same order: for each choice the sequences, the room for
drafts and the tokens of prompts beside; after each step that can be compared its shape (a longest
draft, draft tokens asked for, whether any drafter is fed), the engine's times and the seconds with
the host's part; then the result. Which steps these are, `Estimators.learn` decides today by the
conditions of then.

What is not as it was:

- It chooses K alone. Prompts, snapshots and newcomers' steps are cut and weighed by today's cost
  model, where the model's own did that then. To teach both takes time on the former's account, 20
  to 50 us a step after a decode has had the caches; so today's learns from one in four of the steps
  without prompts here, as the former one does with steps that it knows.
- Newcomers' prompts may have a step of their own today, in which running streams sit out. The model
  is then asked for no K, as in any step without streams.
- The model learns what a step cost a little later in the same `commit`. Nothing asks it in between.
- If the guard catches it failing, the model and all that it remembers start over, as then. Then,
  however, the cost model alone might fail as well. The trial shows resets: there should be none.
- Engine, kernels and all else of the scheduler are today's, as for every arm.
"""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from drafthouse_bench.demos import CHECKOUT
from drafthouse_server.config import Config
from drafthouse_server.drafting.cost import CostModel, Splitting, StepCost, StepShape
from drafthouse_server.drafting.policy import Draftable, DraftPolicy
from drafthouse_server.engine.protocol import Engine
from drafthouse_server.scheduling.scheduler import Scheduler
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import EngineLimits, StepResult, StepTimings

__all__ = ["FormerDraft", "make_former_scheduler"]

_COMMIT = "e9399510cf9f4916d0b30ad94fc5f281aa11a483"
_FOLDER = "service/drafthouse_server/drafting"
_FILES = ("acceptance", "cost", "policy")
_PACKAGE = "drafthouse_former"
_REWRITTEN = (
    (rf"\bdrafthouse_server\.drafting\.(?={'|'.join(_FILES)})", f"{_PACKAGE}."),
    (r"\bsequence\.(?=(n_draft|tenant)\b)", "sequence.request."),
    (r"\bn_turns\b", "epoch"),
    (r"\bdraft_memory\b", "ngram_memory"),
)
_SPLITTINGS = {Splitting.NONE: "NONE", Splitting.EQUAL: "STREAMS", Splitting.GROUPS: "GROUPS"}
_THINNING = 4  # today's cost model learns from one in so many steps without prompts
_FLOOR_SHARE = 4  # one part in so many of a step's tokens is kept for prompts


def make_former_scheduler(engine: Engine, config: Config) -> Scheduler:
    """Returns the scheduler of a configuration in which the former model chooses K.

    Args:
        engine: It will run the steps.
        config: The settings; without prompt lookup.

    Raises:
        ValueError: prompt lookup is on, or the history is missing.
    """
    if config.prompt_lookup:
        raise ValueError("the former model keeps its memory where prompt lookup has its own")

    def estimators(splitting: Splitting) -> tuple[DraftPolicy, CostModel]:
        policy = FormerDraft(engine.limits.n_draft_max, splitting)
        return policy, policy.cost

    scheduler = make_scheduler(engine, config, estimators=estimators)
    cast("FormerDraft", scheduler.policy).scheduler = scheduler
    return scheduler


@functools.cache
def _former() -> ModuleType:
    """Returns the former `policy.py`.

    Raises:
        ValueError: the history is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / _PACKAGE
        package.mkdir()
        (package / "__init__.py").touch()
        for name in _FILES:
            (package / f"{name}.py").write_text(_source(name), encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(f"{_PACKAGE}.policy")
        finally:
            sys.path.remove(folder)


def _source(name: str) -> str:
    path = f"{_COMMIT}:{_FOLDER}/{name}.py"
    command = ["git", "-C", str(CHECKOUT), "show", path]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(
            f"git has no {path} ({found.stderr.strip()}): the former model is in the history of a"
            " whole clone alone (git fetch --unshallow)"
        )
    source = found.stdout
    for pattern, name_today in _REWRITTEN:
        source = re.sub(pattern, name_today, source)
    return source


class _NotedCost(StepCost):
    """Today's cost model, which cuts prompts; it notes the last step for the former one."""

    step: tuple[StepShape, StepTimings, float] | None = None
    """Shape, the engine's times and the seconds with the host's part, until it is taken."""
    _n_alone = 0  # steps without prompts

    def observe(self, shape: StepShape, timings: StepTimings, wall_s: float = 0.0) -> None:
        """Notes a step that succeeded; learns from it, or from one in four of those alike."""
        self.step = shape, timings, wall_s
        self._n_alone += shape.n_tokens == shape.n_outputs
        if shape.n_tokens > shape.n_outputs or self._n_alone % _THINNING == 1:
            super().observe(shape, timings, wall_s)


class FormerDraft:
    """Chooses K as the model did.

    Args:
        n_draft_max: Of the engine's limits.
        splitting: How decodes are cut.
    """

    scheduler: Scheduler
    """Where it chooses; set before the first choice."""

    def __init__(self, n_draft_max: int, splitting: Splitting) -> None:
        former = _former()
        self._shape_of: Any = former.StepShape
        self._cost: Any = former.StepCost()
        cut = former.Splitting[_SPLITTINGS[splitting]]
        self._model: Any = former.AdaptiveDraft(n_draft_max, self._cost, cut)
        self.cost = _NotedCost()
        """Today's, for all that is not a choice of K."""
        self.epoch = self.n_changes = 0
        self._drafts: list[int] = []
        self._is_fed = True

    def wants(self, sequence: Draftable) -> bool:
        """Returns whether a sequence's drafter shall be fed."""
        return bool(self._model.wants(sequence))

    def choose_all(
        self, sequences: Sequence[Draftable], limits: EngineLimits, draft_budget: int
    ) -> list[int]:
        """Returns K for each sequence."""
        running: Sequence[Draftable] = sequences
        n_prefill = 0
        if self.scheduler.n_running > len(sequences):
            streams = self.scheduler.sequences()[: self.scheduler.n_running]
            # One token of each that generates is pending, and no prompt's.
            n_pending = sum([stream.n_pending for stream in streams]) - len(sequences)
            running, n_prefill = streams, min(n_pending, limits.n_batch // _FLOOR_SHARE)
        model = self._model
        self._drafts = model.choose_all(sequences, limits, draft_budget, n_prefill)
        self._is_fed = any(map(model.wants, running))
        self.epoch, self.n_changes = model.epoch, model.n_changes
        return self._drafts

    def observe(self, result: StepResult, streams_s: float = 0.0) -> None:
        """Learns what the step cost, if it was measured, and how its drafts did."""
        step, self.cost.step = self.cost.step, None
        if step is not None:
            shape, timings, wall_s = step
            self._cost.observe(self._former_shape(shape, result), timings, wall_s)
        self._model.observe(result, streams_s)

    def _former_shape(self, shape: StepShape, result: StepResult) -> Any:
        n_drafted = sum([entry.n_drafted for entry in result.entries])
        n_decodes = shape.n_outputs - n_drafted  # prompts that are done are among them
        n_depth, n_draft = max(self._drafts, default=0), sum(self._drafts)
        return self._shape_of(n_decodes, n_depth, n_draft, *shape, is_fed=self._is_fed)

    def reset(self) -> None:
        """Forgets all that was learnt, what steps cost and what sequences did included."""
        self._model.reset()
        self._cost.reset()
        self.epoch = self.n_changes = 0
        for stream in self.scheduler.sequences():
            stream.ngram_memory = None
