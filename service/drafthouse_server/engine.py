"""The engine as the step loop sees it, and its real implementation over `drafthouse_engine`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from drafthouse_server.config import Config
from drafthouse_server.errors import (
    EngineError,
    FieldViolation,
    InvalidRequest,
    ModelLoadError,
    StartupError,
)
from drafthouse_server.step import (
    EngineLimits,
    ModelCard,
    PlanEntry,
    ResultEntry,
    SamplingOptions,
    SequenceStatus,
    StepPlan,
    StepResult,
    StepTimings,
)

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None

__all__ = ["Engine", "EngineLimits", "LlamaEngine", "ModelCard", "engine_version"]

_log = logging.getLogger(__name__)


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

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Thread: engine thread only.

        Raises:
            EngineError: the plan contradicts the engine's state; nothing has changed
                (ENGINE_FAILURE).
        """
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


_N_CTX_SEQ_AUTOMATIC = 4096
"""Bound of `Config.n_ctx_seq` 0.

Models are trained with contexts that no small machine can hold.
"""

_US = 1e-6

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingOptions))

_PROTO_PATHS = {
    "penalty_last_n": "sampling.penalties.last_tokens",
    "penalty_repeat": "sampling.penalties.repeat",
    "penalty_frequency": "sampling.penalties.frequency",
    "penalty_presence": "sampling.penalties.presence",
    "dry_multiplier": "sampling.dry.multiplier",
    "dry_base": "sampling.dry.base",
    "dry_allowed_length": "sampling.dry.allowed_tokens",
    "dry_penalty_last_n": "sampling.dry.last_tokens",
    "dry_breakers": "sampling.dry.breakers",
    "xtc_probability": "sampling.xtc.probability",
    "xtc_threshold": "sampling.xtc.threshold",
    "ignore_eos": "stop.ignore_end_token",
    "logprobs": "output.log_probabilities",
}
"""Where sampling options stand in `GenerateRequest`, if not at "sampling.<name>"."""


class LlamaEngine:
    """The real engine: llama.cpp behind `drafthouse_engine`.

    Args:
        engine: Made on the thread that will call `step` and `close`.
        name: Name that requests use.

    Thread:
        As `Engine` says: `load`, `step` and `close` on one thread, everything else on any.
    """

    def __init__(self, engine: drafthouse_engine.Engine, name: str) -> None:
        self._engine = engine
        self._model = engine.target
        self._limits = _limits(engine)
        self._card = _card(engine.target, name)
        self._eog = frozenset(self._model.eos_token_ids)
        self._token_bytes: dict[int, bytes] = {}
        self._with_logprobs: set[int] = set()
        self._statuses = {
            int(drafthouse_engine.Status[status.name]): status for status in SequenceStatus
        }

    @classmethod
    def load(
        cls, config: Config, progress: Callable[[str, float], object] | None = None
    ) -> LlamaEngine:
        """Loads the models of a configuration and makes the contexts. Thread: the engine thread.

        Args:
            config: The server's settings.
            progress: Called with a file and the share of it that is loaded, [0, 1].

        Raises:
            ModelLoadError: a file is missing, broken, or does not fit; says which and what to do.
            StartupError: the extension is not built.
        """
        if _unbuilt is not None:
            raise StartupError(_unbuilt)
        target = _load_model(config.model, config.n_gpu_layers, progress)
        draft = None
        if config.draft_model:
            draft = _load_model(config.draft_model, config.n_gpu_layers, progress)
        if config.synth_rates:
            _log.warning(
                "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not"
                " the model's output"
            )
        with _explained(config.draft_model or config.model):
            engine = drafthouse_engine.Engine(target, draft, _engine_params(config, target))
        return cls(engine, config.model_name)

    @property
    def limits(self) -> EngineLimits:
        """Returns the capacities that a plan must respect."""
        return self._limits

    @property
    def card(self) -> ModelCard:
        """Returns what a client may know of the model."""
        return self._card

    @property
    def n_cells_used(self) -> int:
        """KV cells in use, over all slots. Thread: engine thread only."""
        return self._engine.n_cells_used

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `Engine.step`. Thread: engine thread only.

        Raises:
            EngineError: the plan contradicts the engine's state (ENGINE_FAILURE).
        """
        try:
            for seq_id in plan.frees:
                self._engine.seq_end(seq_id)
            for start in plan.starts:
                self._start(start.seq_id, start.sampler)
            if not plan.entries:
                return StepResult()
            result = self._engine.step(*_pack(plan.entries))
        except drafthouse_engine.EngineError as error:
            raise EngineError(_status_name(error), detail=str(error)) from error
        return self._unpack(result)

    def _start(self, seq_id: int, sampler: object) -> None:
        assert isinstance(sampler, drafthouse_engine.Sampler), "make_sampler made it"
        if sampler.params.logprobs:
            self._with_logprobs.add(seq_id)
        else:
            self._with_logprobs.discard(seq_id)
        self._engine.seq_begin(seq_id, sampler)

    def _unpack(self, result: drafthouse_engine.StepResult) -> StepResult:
        tokens: list[int] = result.tokens.tolist()
        logprobs: list[float] = result.logprobs.tolist() if self._with_logprobs else []
        entries = []
        for (
            seq_id,
            status,
            n_past,
            start,
            n_tokens,
            n_drafted,
            n_accepted,
            flags,
        ) in result.entries.tolist():
            end = start + n_tokens
            entries.append(
                ResultEntry(
                    seq_id,
                    self._statuses[status],
                    n_past,
                    tokens[start:end],
                    logprobs[start:end] if seq_id in self._with_logprobs else (),
                    n_drafted,
                    n_accepted,
                    bool(flags & drafthouse_engine.ResultFlag.EOG),
                    bool(flags & drafthouse_engine.ResultFlag.DRAFT_COLD),
                )
            )
        return StepResult(entries, result.n_batch_tokens, timings=_timings(result))

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler for one sequence and compiles its grammar.

        Raises:
            InvalidRequest: an option is out of its range, or the grammar cannot be parsed
                (INVALID_FIELD).
        """
        values = {name: getattr(options, name) for name in _SAMPLING_FIELDS}
        try:
            params = drafthouse_engine.SamplingParams(**values)
            return drafthouse_engine.Sampler(self._model, params)
        except drafthouse_engine.BadGrammar as error:
            raise _invalid("sampling.grammar", error) from error
        except drafthouse_engine.InvalidConfig as error:
            path = _PROTO_PATHS.get(error.field, f"sampling.{error.field}")
            raise _invalid(path, error) from error
        except drafthouse_engine.InvalidArgument as error:
            raise _invalid("sampling", error) from error

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns the token ids of a text."""
        tokens: list[int] = self._model.tokenize(
            text, add_special=add_special, parse_special=parse_special
        ).tolist()
        return tokens

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the bytes of one token; not always whole characters."""
        if special:
            return self._model.token_bytes(token, special=True)
        piece = self._token_bytes.get(token)
        if piece is None:
            piece = self._token_bytes[token] = self._model.token_bytes(token)
        return piece

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        return token in self._eog

    def format_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """Returns the messages (role, content) in the model's chat format.

        Raises:
            InvalidRequest: the model has no template, or it fails on these messages
                (INVALID_FIELD).
        """
        try:
            return self._model.format_chat(messages)
        except (
            drafthouse_engine.BadTemplate,
            drafthouse_engine.InvalidArgument,
            drafthouse_engine.Unsupported,
        ) as error:
            raise _invalid("prompt.chat", error) from error

    def close(self) -> None:
        """Frees the contexts and the models.

        Harmless when done twice. Thread: engine thread only.
        """
        draft = self._engine.draft
        self._engine.close()
        self._model.close()
        if draft is not None:
            draft.close()


def engine_version() -> str:
    """Returns the version of llama.cpp and how it was built.

    Raises:
        StartupError: the extension is not built.
    """
    if _unbuilt is not None:
        raise StartupError(_unbuilt)
    return drafthouse_engine.build_version()


def _load_model(
    path: str, n_gpu_layers: int, progress: Callable[[str, float], object] | None
) -> drafthouse_engine.Model:
    with _explained(path):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=n_gpu_layers,
            # Returning None goes on; only False would stop the load.
            progress=None if progress is None else lambda share: progress(path, share),
        )


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turns the extension's errors into one sentence: which file, what is wrong, what to do."""
    try:
        yield
    except drafthouse_engine.EngineError as error:
        problem = error.message.removesuffix(".")
        raise ModelLoadError(path, problem, _advice(error)) from error


def _advice(error: drafthouse_engine.EngineError) -> str:
    """Returns what the operator can do about a failed load; the most specific class first."""
    table: list[tuple[type[Exception], str]] = [
        (drafthouse_engine.ModelNotFound, "check the path in the settings model and draft_model"),
        (
            drafthouse_engine.BadModel,
            "give a complete GGUF file; if this one was downloaded, download it again",
        ),
        (
            drafthouse_engine.NoMtpHeads,
            "use a model with MTP heads, or set draft_type to none, eagle3, simple, …",
        ),
        (
            drafthouse_engine.NotEagle3,
            "give an EAGLE-3 model as draft_model, or set draft_type to simple",
        ),
        (
            drafthouse_engine.IncompatibleDraft,
            "give a draft model that was made for this target, or set draft_type to none",
        ),
        (
            drafthouse_engine.OutOfMemory,
            "lower n_seq_max, n_ctx_seq or n_ctx, or use a smaller model",
        ),
        (drafthouse_engine.Unsupported, "set draft_type to none, or use another model"),
        (drafthouse_engine.InvalidArgument, "change this setting"),
    ]
    return next((text for kind, text in table if isinstance(error, kind)), "see the log")


def _engine_params(
    config: Config, target: drafthouse_engine.Model
) -> drafthouse_engine.EngineParams:
    n_ctx_seq = config.n_ctx_seq or min(target.n_ctx_train, _N_CTX_SEQ_AUTOMATIC)
    return drafthouse_engine.EngineParams(
        draft_type=config.draft_type,  # type: ignore[arg-type]  # Config allows the same names only
        n_ctx=config.n_ctx,
        n_ctx_seq=n_ctx_seq,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        n_seq_max=config.n_seq_max,
        n_draft_max=config.n_draft_max,
        n_threads=config.n_threads or _spare_one_core(),
        n_threads_batch=config.n_threads_batch,
        p_min=config.p_min,
        probabilistic=config.is_probabilistic,
        kv_unified=config.is_kv_unified,
        flash_attention=config.has_flash_attention,
        synth_rates=tuple(map(float, config.synth_rates)),
    )


def _spare_one_core() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _limits(engine: drafthouse_engine.Engine) -> EngineLimits:
    limits = engine.limits
    names = (field.name for field in dataclasses.fields(EngineLimits))
    return EngineLimits(**{name: getattr(limits, name) for name in names})


def _card(model: drafthouse_engine.Model, name: str) -> ModelCard:
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


def _pack(entries: Sequence[PlanEntry]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
    """Returns a plan as the extension's arrays. Shape: [n_entries] PLAN_DTYPE, [n_tokens] int32."""
    # One flat list of numbers turns into an array three times faster than a list of tuples.
    rows: list[int] = []
    tokens: list[int] = []
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
    table = np.array(rows, dtype=np.int32).view(drafthouse_engine.PLAN_DTYPE)
    return table, np.array(tokens, dtype=np.int32)


def _timings(result: drafthouse_engine.StepResult) -> StepTimings:
    return StepTimings(
        draft_s=result.t_draft_us * _US,
        decode_s=result.t_decode_us * _US,
        process_s=result.t_process_us * _US,
        sample_s=result.t_sample_us * _US,
        total_s=result.t_total_us * _US,
    )


def _status_name(error: drafthouse_engine.EngineError) -> str:
    """Returns the name of a failure: the class's, in the style of the statuses of `spec.h`."""
    name = type(error).__name__
    return "".join(f"_{c}" if c.isupper() else c.upper() for c in name).lstrip("_")


def _invalid(path: str, error: drafthouse_engine.EngineError) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, error.message)])
