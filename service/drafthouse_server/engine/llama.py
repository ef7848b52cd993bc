"""The engine over `drafthouse_engine`: plans to rows of numbers, rows to results."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from typing import cast

from drafthouse_server.config import Config
from drafthouse_server.engine.llama_text import LlamaText
from drafthouse_server.engine.loading import Loaded, load_engine
from drafthouse_server.engine.protocol import TextWorker
from drafthouse_server.engine.text_process import ModelFile, TextProcess
from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import EngineError, ModelLoadError
from drafthouse_server.host.cores import CoreTimes, FreeCores, read_core_times
from drafthouse_server.step import (
    EngineLimits,
    ModelCard,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    Start,
    StepPlan,
    StepResult,
    StepTimings,
)

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError:
    pass  # load_engine says so
else:
    # As plain numbers: an operation on an enum takes a microsecond.
    _FLAG_EOG = int(drafthouse_engine.ResultFlag.EOG)
    _FLAG_DRAFT_COLD = int(drafthouse_engine.ResultFlag.DRAFT_COLD)
    _FLAG_EXTERNAL = int(drafthouse_engine.ResultFlag.EXTERNAL)

__all__ = ["LlamaEngine"]

_log = logging.getLogger(__name__)

_US = 1e-6

_TELL_AGAIN_S = 600.0
"""Seconds between two lines of the log about other processes."""


class LlamaEngine:
    """The real engine: llama.cpp behind `drafthouse_engine`.

    Args:
        loaded: Made on the thread that will call `step` and `close`.
        name: Name that requests use.
        chat_template_kwargs: Arguments of the chat template where a chat does not set them, a JSON
            object; empty is none.
        file: The target's, which text workers read; without it, what its path names then.

    Thread:
        As `Engine` says: `load`, `step` and `close` on one thread, everything else on any.
    """

    def __init__(
        self,
        loaded: Loaded,
        name: str,
        chat_template_kwargs: str = "",
        file: ModelFile | None = None,
    ) -> None:
        engine = loaded.engine
        self._engine = engine
        self._model = engine.target
        self._file = file
        self._limits = _limits_of(engine)
        self._card = _card_of(engine.target, name)
        self._threads = loaded.threads
        self._free_cores = _free_cores(loaded.threads)
        self._n_threads = loaded.threads.n_most
        self._told_s = -math.inf
        self._steps_s = 0.0
        self._prefix_bytes = loaded.prefix_bytes
        self._text = LlamaText(engine.target)
        self._chat_template_kwargs = chat_template_kwargs
        self._with_logprobs: AbstractSet[int] = frozenset()
        self._statuses = {
            int(drafthouse_engine.Status[status.name]): status for status in SequenceStatus
        }

    @classmethod
    def load(
        cls,
        config: Config,
        progress: Callable[[str, float], object] | None = None,
        target_of: LlamaEngine | None = None,
    ) -> LlamaEngine:
        """Loads the models of a configuration and makes the contexts. Thread: the engine thread.

        Args:
            config: The server's settings.
            progress: Called with a file and the share of it that is loaded, [0, 1].
            target_of: An engine of the same target, whose weights it shares; both are closed
                together.

        Raises:
            ModelLoadError: a file is missing, broken, or does not fit; says which and what to do.
            StartupError: the extension is not built.
        """
        target = None if target_of is None else target_of._model
        file = None
        with ExitStack() as undo:
            with suppress(OSError):  # what is wrong with it is told by those who load it
                file = ModelFile(config.model)
                undo.callback(file.close)
            loaded = load_engine(config, progress, target)
            engine = cls(loaded, config.model_name, config.chat_template_kwargs, file)
            undo.pop_all()
        if file is not None and not file.is_as_it_was:
            engine.close()
            problem = "it was replaced, or written to, while it was read"
            raise ModelLoadError(config.model, problem, "start again when it is whole")
        return engine

    @property
    def limits(self) -> EngineLimits:
        """Returns the capacities that a plan must respect."""
        return self._limits

    @property
    def card(self) -> ModelCard:
        """Returns what a client may know of the model."""
        return self._card

    @property
    def threads(self) -> Threads:
        """Returns how many threads it computes with."""
        return self._threads

    @property
    def prefix_bytes_max(self) -> int:
        """Returns the host memory that there is for prefixes."""
        return self._prefix_bytes

    @property
    def n_cells_used(self) -> int:
        """KV cells in use, over all slots. Thread: engine thread only."""
        return self._engine.n_cells_used

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `Engine.step`. Thread: engine thread only.

        Raises:
            EngineError: the plan contradicts the engine's state (ENGINE_FAILURE).
        """
        if self._free_cores is not None and self._free_cores.look(self._steps_s):
            self._take_threads(self._free_cores.n_threads)
        with_logprobs, begun_s = self._with_logprobs, time.perf_counter()
        if plan.starts:
            with_logprobs = _with_logprobs_after(plan.starts, with_logprobs)
        try:
            result = self._engine.step_rows(
                *_pack(plan.entries),
                plan.n_steps,
                moves=_moves_of(plan),
                has_logprobs=bool(with_logprobs),
            )
        except drafthouse_engine.EngineError as error:
            raise EngineError(_status_name(error)) from error
        self._with_logprobs = with_logprobs
        spent_s = time.perf_counter() - begun_s
        self._steps_s += spent_s
        moved_s = spent_s - result.t_total_us * _US
        moved = result.moved or drafthouse_engine.Moved()
        n_kept = zip(plan.starts, moved.n_kept, strict=False)
        return StepResult(
            self._unpack(result),
            result.n_batch_tokens,
            {start.seq_id: n for start, n in n_kept if n < start.n_kept},
            moved.snapshots,
            moved.samplers,
            _timings(result, moved_s if plan.starts or plan.saves else 0.0),
            result.n_steps,
            self._n_threads,
        )

    def _take_threads(self, n: int) -> None:
        """Computes with so many threads at most, as other processes have the other cores."""
        n_before, self._n_threads = self._n_threads, n
        self._engine.set_threads(min(self._threads.n, n), min(self._threads.n_batch, n))
        now = time.monotonic()
        if n < n_before and now >= self._told_s + _TELL_AGAIN_S:
            self._told_s = now
            _log.info(
                "computing with %d of %d threads, because other processes take the cores, or fewer"
                " are granted; drafthouse_threads tells how many, this line comes once in ten"
                " minutes",
                n,
                self._threads.n_most,
            )

    def interrupt(self) -> None:
        """Ends the run of steps in flight, or else the next one, with the step that it is in."""
        self._engine.interrupt()

    def _unpack(self, result: drafthouse_engine.StepRows) -> list[ResultEntry]:
        tokens, logprobs = result.tokens, result.logprobs
        statuses, with_logprobs = self._statuses, self._with_logprobs
        entries = []
        for row in result.entries:
            seq_id, status, n_past, start, n_tokens, n_drafted, n_accepted, flags, n_mask_work = row
            end = start + n_tokens
            entries.append(
                ResultEntry(
                    seq_id,
                    statuses[status],
                    n_past,
                    tokens[start:end],
                    _known_logprobs(logprobs[start:end]) if seq_id in with_logprobs else (),
                    n_drafted,
                    n_accepted,
                    flags & _FLAG_EOG != 0,
                    flags & _FLAG_DRAFT_COLD != 0,
                    flags & _FLAG_EXTERNAL != 0,
                    n_mask_work,
                )
            )
        return entries

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler for one sequence and compiles its grammar.

        Raises:
            InvalidRequest: an option is out of its range, or the grammar cannot be parsed
                (INVALID_FIELD).
        """
        return self._text.make_sampler(options)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text; of clients, a text worker's job.

        Raises:
            InvalidRequest: the model's file has no tokenizer (INVALID_FIELD).
        """
        return self._text.tokenize(text, add_special=add_special, parse_special=parse_special)

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of one token; not always whole characters."""
        return self._text.token_bytes(token, special=special)

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        return self._text.is_eog(token)

    def make_text_worker(self) -> TextWorker:
        """Makes a process that works on texts for this model, which has not started yet."""
        kwargs = self._chat_template_kwargs
        if self._file is None:
            return TextProcess(self._model.path, chat_template_kwargs=kwargs)
        n_files = int(self._model.meta("split.count") or 1)
        name, descriptors = self._file.names(is_split=n_files > 1)
        return TextProcess(name, descriptors=descriptors, chat_template_kwargs=kwargs)

    def close(self) -> None:
        """Frees the contexts and the models.

        Harmless when done twice. Thread: engine thread only.
        """
        draft = self._engine.draft
        self._engine.close()
        self._model.close()
        if draft is not None:
            draft.close()
        if self._file is not None:
            self._file.close()


def _free_cores(threads: Threads) -> FreeCores | None:
    """Returns what tells how many threads find a core each; None: nobody needs to know."""
    if not threads.follows:
        return None

    def read() -> CoreTimes | None:
        return read_core_times(os.sched_getaffinity(0), time.monotonic)

    return FreeCores(threads.n_most, read, time.monotonic)


def _pack(entries: Sequence[PlanEntry]) -> tuple[list[int], list[int], list[int]]:
    """Returns a plan as the extension's rows of entries, tokens, and rows of external drafts."""
    rows: list[int] = []
    tokens: list[int] = []
    drafts: list[int] = []
    for entry in entries:
        rows += (
            entry.seq_id,
            entry.n_past,
            len(tokens),
            len(entry.tokens),
            entry.n_draft,
            entry.is_output,
        )
        tokens += entry.tokens
        if entry.external:
            drafts += (entry.seq_id, len(tokens), len(entry.external))
            tokens += entry.external
    return rows, tokens, drafts


def _moves_of(plan: StepPlan) -> drafthouse_engine.Moves | None:
    """Returns what a plan does before its entries, as the extension wants it."""
    is_any = (
        plan.saves
        or plan.swap_outs
        or plan.frees
        or plan.starts
        or plan.drafts_off
        or plan.drafts_on
    )
    if not is_any:
        return None
    starts = [_start_of(start) for start in plan.starts]
    return drafthouse_engine.Moves(
        plan.saves, plan.swap_outs, plan.frees, starts, plan.drafts_off, plan.drafts_on
    )


def _start_of(start: Start) -> drafthouse_engine.Start:
    sampler = cast("drafthouse_engine.Sampler | None", start.sampler)  # the extension checks it
    return drafthouse_engine.Start(
        start.seq_id,
        sampler,
        start.n_kept,
        start.source,
        start.snapshot,
        start.is_resumed,
        start.tag,
    )


def _with_logprobs_after(starts: Sequence[Start], before: AbstractSet[int]) -> AbstractSet[int]:
    """Returns the slots whose samplers may tell log-probabilities once these have started."""
    after = set(before)
    for start in starts:
        params = getattr(start.sampler, "params", None)
        # A sampler out of a snapshot does not say whether it tells log-probabilities: it may.
        if params is None or params.logprobs:
            after.add(start.seq_id)
        else:
            after.discard(start.seq_id)
    return after


def _known_logprobs(logprobs: list[float]) -> Sequence[float]:
    """Returns log-probabilities; nothing where the sequence has not asked for them (NaN)."""
    return () if logprobs and math.isnan(logprobs[0]) else logprobs


def _timings(result: drafthouse_engine.StepRows, moves_s: float = 0.0) -> StepTimings:
    return StepTimings(
        draft_s=result.t_draft_us * _US,
        decode_s=result.t_decode_us * _US,
        process_s=result.t_process_us * _US,
        sample_s=result.t_sample_us * _US,
        total_s=result.t_total_us * _US,
        moves_s=moves_s,
    )


def _status_name(error: drafthouse_engine.EngineError) -> str:
    """Returns the name of a failure: the class's, in the style of the statuses of `spec.h`."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() else c.upper() for c in name).lstrip("_")


def _limits_of(engine: drafthouse_engine.Engine) -> EngineLimits:
    """Returns the capacities that a plan must respect."""
    limits = engine.limits
    names = (field.name for field in dataclasses.fields(EngineLimits))
    return EngineLimits(**{name: getattr(limits, name) for name in names})


def _card_of(model: drafthouse_engine.Model, name: str) -> ModelCard:
    """Returns what a client may know of a model, which is served by this name."""
    return ModelCard(
        name=name,
        architecture=model.arch,
        description=model.description,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        n_vocab=model.n_vocab,
        n_ctx_train=model.n_ctx_train,
        is_recurrent=model.is_recurrent or model.is_hybrid,
        has_chat_template=bool(model.chat_template),
        token_eos=model.token_eos,
    )
