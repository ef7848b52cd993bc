"""What the step loop needs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drafthouse_server.engine.threads import Threads
from drafthouse_server.step import EngineLimits, ModelCard, SamplingOptions, StepPlan, StepResult

__all__ = ["Engine"]


class Engine(Protocol):
    """What the step loop needs of an engine.

    Thread:
        `step` and `close` run on the engine thread only; every other method may run on any thread,
        several at once.
    """

    @property
    def limits(self) -> EngineLimits:
        """Returns the capacities that a plan must respect."""
        ...

    @property
    def card(self) -> ModelCard:
        """Returns what a client may know of the model."""
        ...

    @property
    def threads(self) -> Threads:
        """Returns how many threads it computes with."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Thread: engine thread only.

        Raises:
            EngineError: the plan contradicts the engine's state; nothing has changed
                (ENGINE_FAILURE).
        """
        ...

    def interrupt(self) -> None:
        """Has the run of steps in flight end with the step that it is in, or else the next one."""
        ...

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler for one sequence and compiles its grammar.

        Raises:
            InvalidRequest: an option is out of its range, or the grammar cannot be parsed
                (INVALID_FIELD).
        """
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text."""
        ...

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of one token; not always whole characters."""
        ...

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        ...

    def format_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Returns messages (role, content) in the model's chat format, ready for the answer.

        Raises:
            InvalidRequest: the model has no template, or it fails on these messages
                (INVALID_FIELD).
        """
        ...

    def close(self) -> None:
        """Frees the contexts and the models. Harmless when done twice."""
        ...
