"""What the step loop needs of an engine."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol

from drafthouse_server.engine.text_jobs import TextAnswer, TextJob
from drafthouse_server.engine.threads import Threads
from drafthouse_server.step import EngineLimits, ModelCard, SamplingOptions, StepPlan, StepResult

__all__ = ["Engine", "TextWorker", "TextWorkerLost"]


class TextWorkerLost(Exception):
    """Ended a text worker before its answer. It never leaves the server.

    Args:
        cause: One of the class's constants.
    """

    LATE: ClassVar[str] = "late"
    """The worker was ended because its job took too long."""
    CRASHED: ClassVar[str] = "crashed"
    """The worker's process died of its job."""
    ENDED: ClassVar[str] = "ended"
    """Something else has ended it, such as the system or an operator."""

    _WORDS: ClassVar[dict[str, str]] = {
        LATE: "its text took too long",
        CRASHED: "it died of its text",
        ENDED: "by something else, such as the system for lack of memory",
    }

    def __init__(self, cause: str) -> None:
        self.cause = cause
        super().__init__(f"a text worker was lost: {cause} ({self._WORDS[cause]})")


class TextWorker(Protocol):
    """Works on texts of clients, one job at a time, where they can harm nobody else.

    Thread:
        Event loop only.
    """

    @property
    def not_dropped(self) -> str:
        """Rights that it could not be deprived of, in a few words; empty when there are none."""
        ...

    @property
    def chat_problem(self) -> str:
        """Why a chat of one user's message is refused; empty where no template does so."""
        ...

    async def start(self) -> None:
        """Makes it ready to work.

        Raises:
            StartupError: it cannot be started; says why.
        """
        ...

    def ask(self, job: TextJob, cpu_s: float) -> asyncio.Future[TextAnswer]:
        """Gives it a job, when it has none.

        The answer comes in any case. Instead of one there may be TextWorkerLost; the worker is of
        no use then.

        Args:
            job: What is asked for.
            cpu_s: Most processor time that it may take, seconds; the worker ends itself then.
        """
        ...

    def kill(self, *, is_late: bool = False) -> None:
        """Ends it now; a job that it does is lost. Harmless when done twice.

        Args:
            is_late: Whether because of its job, which takes too long.
        """
        ...

    async def wait(self) -> None:
        """Returns when it has ended, by itself or killed."""
        ...

    async def end(self) -> None:
        """Ends it and gives back all that it had. Harmless when done twice."""
        ...


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

    @property
    def prefix_bytes_max(self) -> int:
        """Returns the host memory that there is for prefixes, whatever the settings allow."""
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

    def make_text_worker(self) -> TextWorker:
        """Makes a worker on texts for this model, which has not started yet."""
        ...

    def close(self) -> None:
        """Frees the contexts and the models. Harmless when done twice."""
        ...
