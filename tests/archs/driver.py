"""Engine and scheduler, step by step and without a server: what each request gets, and how.

Time is virtual: every token that is computed takes a tenth of a second, so that reuse, snapshots
and preemption always pay, as they do for a large model, and each run makes the same decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Self

from drafthouse_server.config import Config
from drafthouse_server.engine.llama import LlamaEngine
from drafthouse_server.errors import EngineError
from drafthouse_server.scheduling.sequence import ErrorEvent, Request, Sequence
from drafthouse_server.serving.compose import make_scheduler
from drafthouse_server.step import (
    PlanEntry,
    SamplingOptions,
    SchedulerCounts,
    SequenceStatus,
    Start,
    StepPlan,
    StepTimings,
)

__all__ = [
    "GREEDY",
    "N_CTX",
    "N_CTX_LONG",
    "N_OUTPUT",
    "Alone",
    "Answer",
    "Driver",
    "Half",
    "make_config",
]

GREEDY = SamplingOptions(temperature=0.0, ignore_eos=True)
N_OUTPUT = 24
"""Tokens of each answer."""
N_CTX = 256
"""Tokens of a slot: as many as the models' contexts have."""
N_CTX_LONG = 512
"""Tokens of a slot where windows have small caches, which are 256 cells long at least."""

_TOKEN_S = 0.1
_N_STEPS_MOST = 10_000


def make_config(path: Path, draft_type: str, n_slots: int = 8, **settings: object) -> Config:
    """Returns the settings of a server on a model; `simple` drafts with the model itself."""
    values: dict[str, object] = {
        "model": str(path),
        "model_draft": str(path) if draft_type == "simple" else "",
        "draft_type": draft_type,
        "draft_policy": "fixed",  # so that there are drafts
        "parallel": n_slots,
        "max_model_len": N_CTX,
        "threads": 1,
    }
    return Config(**values | settings)  # type: ignore[arg-type]  # checked by Config itself


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a prompt gave."""

    prompt: list[int]
    """Its tokens."""
    tokens: list[int]
    """The answer's."""
    n_drafted: int = 0
    """Drafted tokens that were verified."""
    n_accepted: int = 0
    """Of these, accepted."""
    n_reused: int = 0
    """Tokens of the prompt that were not computed again."""


class Driver:
    """Runs requests on one engine; a fresh scheduler for each, and no slot in use at the end.

    Raises:
        ModelLoadError: the models cannot be loaded; says why.
    """

    def __init__(self, config: Config) -> None:
        self.engine = LlamaEngine.load(config)
        self.config = config
        """The settings that it was made with."""
        self._now = 0.0
        self.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def renew(self, **settings: object) -> None:
        """Forgets everything that was computed, and goes on with other settings of its host."""
        config = dataclasses.replace(self.config, **settings)  # type: ignore[arg-type]  # checked by Config itself
        self.engine.step(StepPlan(frees=range(config.parallel)))
        self._scheduler = make_scheduler(self.engine, config)
        self._n = 0

    @property
    def has_small_windows(self) -> bool:
        """Whether some layers keep fewer tokens than a slot has, for all that is known.

        Of the caches of deepseek4 and dots3note the engine does not know how long they are.
        """
        engine = self.engine._engine
        return engine.limits.n_window > 0 and engine.setting("swa_full") != "true"

    @property
    def counts(self) -> SchedulerCounts:
        """What the scheduler has counted since it was renewed."""
        return self._scheduler.counts

    def submit(
        self, prompt: Tokens[int], *, n_output: int = N_OUTPUT, priority: int = 0
    ) -> Sequence:
        """Lets a request wait."""
        self._n += 1
        sequence = Sequence(
            Request(
                f"request {self._n}",
                list(prompt),
                priority=priority,
                sampling=GREEDY,
                n_output_max=n_output,
                received_at=self._now,
            ),
            self.engine.make_sampler(GREEDY),
        )
        self._scheduler.submit(sequence)
        return sequence

    def step(self) -> bool:
        """Runs one step; returns whether there was anything to do.

        Raises:
            EngineError: a request has failed.
        """
        self._scheduler.reap(self._now)
        plan = self._scheduler.plan(self._now)
        if plan.is_empty:
            return False
        if self.config.draft_type.startswith("ngram"):
            self._propose(plan)
        result = self.engine.step(plan)
        seconds = _TOKEN_S * max(1, result.n_batch_tokens)
        self._now += seconds
        timings = StepTimings(decode_s=seconds, total_s=seconds)
        result = dataclasses.replace(result, timings=timings)
        for _, event in self._scheduler.commit(result, self._now):
            if isinstance(event, ErrorEvent):
                raise event.error
        return True

    def _propose(self, plan: StepPlan) -> None:
        """Proposes what followed a sequence's last token before, or else how it began.

        llama.cpp's own n-gram drafters ask for four tokens that stood before, which random weights
        hardly give; of these drafts most are wrong, and have to be taken back.
        """
        for entry in plan.entries:
            if entry.n_draft:
                entry.external = looked_up(self._scheduler.running(entry.seq_id), entry.n_draft)

    def run(self) -> None:
        """Runs until every request has ended."""
        for _ in range(_N_STEPS_MOST):
            if not self.step():
                return
        raise AssertionError("the scheduler never comes to an end")

    def ask(self, prompts: Tokens[Tokens[int]], *, n_output: int = N_OUTPUT) -> list[Answer]:
        """Answers all prompts at once."""
        sequences = [self.submit(prompt, n_output=n_output) for prompt in prompts]
        self.run()
        return [answer_of(sequence) for sequence in sequences]


def looked_up(sequence: Sequence, n_draft: int) -> list[int]:
    """Returns tokens that followed the last one when it stood before; else the first ones."""
    *before, last = sequence.tokens
    places = [i for i, token in enumerate(before) if token == last]
    start = places[-1] + 1 if places else 0
    return sequence.tokens[start : start + n_draft]


def answer_of(sequence: Sequence) -> Answer:
    """Returns what an ended request got."""
    assert sequence.terminal is not None, f"{sequence.request.request_id} has not ended"
    return Answer(
        list(sequence.request.prompt),
        sequence.output,
        sequence.tally.n_drafted,
        sequence.tally.n_accepted,
        sequence.n_reused,
    )


class Alone:
    """What a model answers to a prompt alone, computed when it is asked for.

    Args:
        driver: Without drafts.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._known: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, prompt: Tokens[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            self._driver.renew(prefix_cache=False)
            self._known[key] = self._driver.ask([prompt])[0].tokens
        return self._known[key]


class Half:
    """One sequence by hand, in slot 0: computed in part, written to bytes, and read elsewhere."""

    def __init__(self, engine: LlamaEngine, prompt: Tokens[int], n_draft: int) -> None:
        self._engine, self._n_draft = engine, n_draft
        self._prompt = list(prompt)
        self._n_past = 0
        self._n_drafted = self._n_accepted = 0
        self._output: list[int] = []

    def run(self, n_output: int, start: Start | None = None) -> None:
        """Generates until there are so many tokens.

        Raises:
            EngineError: the step has failed.
        """
        start = start or (None if self._output else Start(0, self._engine.make_sampler(GREEDY)))
        while len(self._output) < n_output:
            tokens = [*self._prompt, *self._output][self._n_past :]
            n_draft = self._n_draft if self._output else 0
            plan = StepPlan(
                [PlanEntry(0, self._n_past, tokens, n_draft, True)], [start] if start else []
            )
            start = None
            (entry,) = self._engine.step(plan).entries
            if entry.status is not SequenceStatus.OK or not entry.tokens:
                raise EngineError(entry.status.value)
            self._n_past = entry.n_past
            self._output += entry.tokens
            self._n_drafted += entry.n_drafted
            self._n_accepted += entry.n_accepted

    def move(self, engine: LlamaEngine) -> Start:
        """Writes it to bytes, and returns how it goes on in another engine."""
        result = self._engine.step(StepPlan(saves=[0], swap_outs=[0]))
        self._engine = engine
        return Start(0, None, n_kept=self._n_past, snapshot=result.snapshots[0], is_resumed=True)

    def answer(self) -> Answer:
        """Returns what it has got, and gives its slot back."""
        self._engine.step(StepPlan(frees=[0]))
        return Answer(
            self._prompt,
            self._output[:N_OUTPUT],
            self._n_drafted,
            self._n_accepted,
            n_reused=self._n_past,
        )
