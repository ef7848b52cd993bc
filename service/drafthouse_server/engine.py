"""The engine as the step loop sees it, and its real implementation over `drafthouse_engine`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from drafthouse_server.config import AUTOMATIC, Config
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
    Start,
    StepPlan,
    StepResult,
    StepTimings,
)
from drafthouse_server.threads import Threads, choose_threads

# The fake engine, and all tests that use it, work without the extension.
try:
    import drafthouse_engine
except ImportError as error:
    _unbuilt: str | None = str(error)
else:
    _unbuilt = None
    # As plain numbers: an operation on an enum takes a microsecond.
    _FLAG_EOG = int(drafthouse_engine.ResultFlag.EOG)
    _FLAG_DRAFT_COLD = int(drafthouse_engine.ResultFlag.DRAFT_COLD)
    _FLAG_GIVEN = int(drafthouse_engine.ResultFlag.GIVEN)

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


_N_CTX_SEQ_AUTOMATIC = 4096
"""Bound of `Config.n_ctx_seq` 0.

Models are trained with contexts that no small machine can hold.
"""

_US = 1e-6

_LOST = (SequenceStatus.DECODE_FAILED, SequenceStatus.SAMPLING_FAILED)
"""After these a slot is idle."""

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
        threads: What it was made with.

    Thread:
        As `Engine` says: `load`, `step` and `close` on one thread, everything else on any.
    """

    def __init__(self, engine: drafthouse_engine.Engine, name: str, threads: Threads) -> None:
        self._engine = engine
        self._model = engine.target
        self._limits = _limits(engine)
        self._card = _card(engine.target, name)
        self._threads = threads
        self._eog = frozenset(self._model.eos_token_ids)
        self._token_bytes: dict[int, bytes] = {}
        self._with_logprobs: set[int] = set()
        self._in_use: set[int] = set()
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
        may_be_mtp = config.draft_type in ("mtp", AUTOMATIC) and not config.draft_model
        target = _load_model(config.model, config.n_gpu_layers, progress, load_mtp=may_be_mtp)
        draft = None
        if config.draft_model:
            draft = _load_model(config.draft_model, config.n_gpu_layers, progress)
        if config.synth_rates:
            _log.warning(
                "BENCHMARK: drafts are accepted at random (synth_rates); what is generated is not"
                " the model's output"
            )
        threads = _threads(config, target)
        engine = _make_engine(config, target, draft, threads)
        with _explained(config.model, config):
            if target.chat_template:
                target.start_chat()  # a process, which the first chat should not have to wait for
        return cls(engine, config.model_name, threads)

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
    def n_cells_used(self) -> int:
        """KV cells in use, over all slots. Thread: engine thread only."""
        return self._engine.n_cells_used

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `Engine.step`. Thread: engine thread only.

        Raises:
            EngineError: the plan contradicts the engine's state (ENGINE_FAILURE).
        """
        self._check_starts(plan)
        try:
            snapshots = self._save(plan.saves)
            samplers = {seq_id: self._engine.park(seq_id) for seq_id in plan.parks}
            for seq_id in plan.frees:
                self._engine.seq_end(seq_id)
            self._in_use.difference_update(plan.parks, plan.frees)
            kept_less = {start.seq_id for start in plan.starts if not self._start(start)}
            for seq_id in plan.let_go:
                if seq_id not in kept_less:
                    self._engine.seq_let_go(seq_id)
            for seq_id in plan.take_up:
                if seq_id not in kept_less:
                    self._engine.seq_take_up(seq_id)
            computed = [entry for entry in plan.entries if entry.seq_id not in kept_less]
            result = None
            if computed:
                n_steps = 1 if kept_less else plan.n_steps
                has_logprobs = bool(self._with_logprobs)
                result = self._engine.step_rows(
                    *_pack(computed), n_steps, has_logprobs=has_logprobs
                )
        except drafthouse_engine.EngineError as error:
            raise EngineError(_status_name(error), detail=str(error)) from error
        done = self._unpack(result) if result else []
        if kept_less:
            done = self._with_refused(plan.entries, done, kept_less)
        return StepResult(
            done,
            result.n_batch_tokens if result else 0,
            dict.fromkeys(kept_less, 0),
            snapshots,
            samplers,
            _timings(result) if result else StepTimings(),
            result.n_steps if result else 1,
        )

    def interrupt(self) -> None:
        """Ends the run of steps in flight, or else the next one, with the step that it is in."""
        self._engine.interrupt()

    def _save(self, seq_ids: Sequence[int]) -> dict[int, bytes]:
        """Returns snapshots of slots in use, without those that cannot be written."""
        snapshots = {}
        for seq_id in seq_ids:
            with suppress(
                drafthouse_engine.Unsupported, drafthouse_engine.OutOfMemory, MemoryError
            ):
                snapshots[seq_id] = self._engine.save(seq_id)
        return snapshots

    def _start(self, start: Start) -> bool:
        """Takes a slot into use. Returns whether it kept what it should."""
        sampler = start.sampler
        assert sampler is None or isinstance(sampler, drafthouse_engine.Sampler), "checked before"
        params = sampler.params if sampler else None
        # A sampler out of a snapshot does not say whether it tells log-probabilities: it may.
        if params is None or params.logprobs:
            self._with_logprobs.add(start.seq_id)
        else:
            self._with_logprobs.discard(start.seq_id)
        n_kept = self._engine.start(
            start.seq_id,
            sampler,
            start.n_kept,
            source=start.source,
            snapshot=start.snapshot,
            is_resumed=start.is_resumed,
        )
        is_kept = n_kept == start.n_kept
        if is_kept or sampler is not None:
            self._in_use.add(start.seq_id)
        else:
            self._in_use.discard(start.seq_id)
        return is_kept

    def _with_refused(
        self, entries: Sequence[PlanEntry], done: list[ResultEntry], refused: set[int]
    ) -> list[ResultEntry]:
        """Returns one result per entry of the plan, with those that were not computed."""
        by_slot = {entry.seq_id: entry for entry in done}
        for seq_id in refused:
            is_begun = seq_id in self._in_use
            status = SequenceStatus.OK if is_begun else SequenceStatus.DECODE_FAILED
            by_slot[seq_id] = ResultEntry(seq_id, status, 0)
        return [by_slot[entry.seq_id] for entry in entries]

    def _check_starts(self, plan: StepPlan) -> None:
        """Checks everything of a plan but its entries, before any of it is done.

        Raises:
            EngineError: what `step.py` says of saves, parks, frees and starts does not hold.
        """
        if not (plan.saves or plan.parks or plan.frees or plan.starts):
            return
        for seq_id in (*plan.saves, *plan.parks, *plan.frees):
            self._check_seq_id(seq_id)
        for seq_id in (*plan.saves, *plan.parks):
            _require(seq_id in self._in_use, "SEQ_IDLE", f"slot {seq_id}")
        _require(len(set(plan.parks)) == len(plan.parks), "SEQ_IDLE", "a slot parked twice")
        # What the slots will hold, if every start keeps what it should.
        n_held = {
            seq_id: self._engine.seq_n_past(seq_id)
            for seq_id in self._in_use.difference(plan.parks, plan.frees)
        }
        n_planned: dict[int, int] = {}
        samplers: list[object] = []
        for start in plan.starts:
            self._check_seq_id(start.seq_id)
            _require(start.seq_id not in n_planned, "BAD_PLAN", "a slot started twice")
            self._check_sampler(start, samplers)
            self._check_kept(start, n_held)
            n_held[start.seq_id] = n_planned[start.seq_id] = start.n_kept
        for entry in plan.entries:
            n_kept = n_planned.get(entry.seq_id, entry.n_past)
            _require(entry.n_past == n_kept, "BAD_PLAN", f"n_past {entry.n_past}, kept {n_kept}")
            _require(
                entry.seq_id in n_held or not 0 <= entry.seq_id < self._limits.n_seq_max,
                "SEQ_IDLE",
                f"slot {entry.seq_id}",
            )

    def _check_seq_id(self, seq_id: int) -> None:
        _require(0 <= seq_id < self._limits.n_seq_max, "BAD_SEQ_ID", f"{seq_id}")

    def _check_sampler(self, start: Start, others: list[object]) -> None:
        sampler = start.sampler
        if sampler is None:
            _require(start.snapshot is not None and start.is_resumed, "BAD_PLAN", "no sampler")
            return
        if not isinstance(sampler, drafthouse_engine.Sampler):
            raise EngineError("INVALID_ARGUMENT", detail="foreign sampler")
        is_used = sampler.is_used or any(sampler is other for other in others)
        _require(not is_used, "INVALID_ARGUMENT", "a sampler that an engine owns")
        is_ours = self._engine.accepts(sampler)
        _require(is_ours, "INVALID_ARGUMENT", "a sampler of another model")
        n_known = sampler.n_known
        _require(start.is_resumed or not n_known, "BAD_PLAN", "a sampler of another time")
        if sampler.has_chosen:
            _require(start.n_kept < n_known, "BAD_PLAN", f"n_kept {start.n_kept}, known {n_known}")
        others.append(sampler)

    def _check_kept(self, start: Start, n_held: Mapping[int, int]) -> None:
        n_ways = (start.source is not None) + (start.snapshot is not None)
        n_kept = start.n_kept
        _require(0 <= n_kept < self._limits.n_ctx_seq, "BAD_PLAN", f"n_kept {n_kept}")
        _require(n_ways <= 1, "BAD_PLAN", "a source and a snapshot")
        _require(n_kept > 0 or n_ways == 0, "BAD_PLAN", "nothing to keep of what is given")
        seq_id = start.seq_id
        if start.source is not None:
            seq_id = start.source
            self._check_seq_id(seq_id)
            _require(seq_id != start.seq_id, "BAD_PLAN", "a slot as its own source")
            _require(seq_id in n_held, "SEQ_IDLE", f"slot {seq_id}")
        if n_kept and start.snapshot is None:
            n = n_held.get(seq_id, 0)
            _require(n_kept <= n, "BAD_PLAN", f"n_kept {n_kept}, held {n}")

    def _unpack(self, result: drafthouse_engine.StepRows) -> list[ResultEntry]:
        tokens, logprobs = result.tokens, result.logprobs
        statuses, with_logprobs = self._statuses, self._with_logprobs
        entries = []
        for seq_id, status, n_past, start, n_tokens, n_drafted, n_accepted, flags in result.entries:
            end = start + n_tokens
            if self._statuses[status] in _LOST:
                self._in_use.discard(seq_id)
            entries.append(
                ResultEntry(
                    seq_id,
                    statuses[status],
                    n_past,
                    tokens[start:end],
                    _told(logprobs[start:end]) if seq_id in with_logprobs else (),
                    n_drafted,
                    n_accepted,
                    flags & _FLAG_EOG != 0,
                    flags & _FLAG_DRAFT_COLD != 0,
                    flags & _FLAG_GIVEN != 0,
                )
            )
        return entries

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
        """Returns the token ids of a text.

        Raises:
            InvalidRequest: the model's file has no tokenizer (INVALID_FIELD).
        """
        try:
            tokens: list[int] = self._model.tokenize(
                text, add_special=add_special, parse_special=parse_special
            ).tolist()
        except drafthouse_engine.Unsupported as error:
            raise _invalid("prompt.text", error) from error
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
    path: str,
    n_gpu_layers: int,
    progress: Callable[[str, float], object] | None,
    *,
    load_mtp: bool = False,
) -> drafthouse_engine.Model:
    with _explained(path):
        return drafthouse_engine.Model(
            path,
            n_gpu_layers=n_gpu_layers,
            load_mtp=load_mtp,
            # Returning None goes on; only False would stop the load.
            progress=None if progress is None else lambda share: progress(path, share),
        )


@contextmanager
def _explained(path: str, config: Config | None = None) -> Iterator[None]:
    """Turns the extension's errors into one sentence: which file, what is wrong, what to do.

    Args:
        path: The file that is loaded.
        config: The settings, where the models are there and the contexts are made.
    """
    try:
        yield
    except drafthouse_engine.EngineError as error:
        problem = error.message.removesuffix(".")
        if config is None:
            raise ModelLoadError(path, problem, _advice(error, _OF_LOADING)) from error
        if config.draft_model and _is_of_draft(error):
            path = config.draft_model
        advice = _OF_CONTEXTS if config.draft_type != "none" else _OF_CONTEXTS_WITHOUT_DRAFTS
        raise ModelLoadError(path, problem, _advice(error, advice)) from error


def _is_of_draft(error: drafthouse_engine.EngineError) -> bool:
    """Returns whether an error is about the draft model's file, not the target's."""
    kinds = ("NotEagle3", "NotDflash", "NotDspark", "IncompatibleDraft")
    return type(error).__name__ in kinds or error.message.startswith("the draft model")


def _advice(error: drafthouse_engine.EngineError, table: Mapping[str, str]) -> str:
    """Returns what the operator can do, by the name of the most specific class that is known."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((table[name] for name in names if name in table), "see the log")


_OF_LOADING = {
    "ModelNotFound": "check the path in the settings model and draft_model",
    "BadModel": "give a complete GGUF file; if this one was downloaded, download it again",
    "OutOfMemory": "use a smaller model, or free memory",
    "Unsupported": "use another file",
    "InvalidArgument": "change this setting",
}
"""What to do when a file cannot be loaded, by the name of the error's class."""

_OF_CONTEXTS_WITHOUT_DRAFTS = {
    "BadModel": _OF_LOADING["BadModel"],
    "OutOfMemory": "lower n_seq_max, n_ctx_seq or n_ctx, or use a smaller model",
    "Unsupported": "use another model",
    "InvalidArgument": "change this setting",
}
"""What to do when the contexts cannot be made."""

_OF_CONTEXTS = _OF_CONTEXTS_WITHOUT_DRAFTS | {
    "NoMtpHeads": "use a model with MTP heads, or set draft_type to none, eagle3, simple, …",
    "NotEagle3": "give an EAGLE-3 model as draft_model, or set draft_type to simple",
    "NotDflash": "give a DFlash model as draft_model, or another draft_type",
    "NotDspark": "give a DSpark model as draft_model, or another draft_type",
    "IncompatibleDraft": "give a draft model that was made for this target, or set draft_type to"
    " none",
    "Unsupported": "use another model; if the drafter is at fault, set draft_type to none",
}
"""The same, where there is a drafter."""


def _threads(config: Config, target: drafthouse_engine.Model) -> Threads:
    """Returns what the settings say, and where they say nothing what suits model and machine."""
    n, n_batch = config.n_threads, config.n_threads_batch
    if n:
        return Threads(n, n_batch or n, reason="as set")
    cores = drafthouse_engine.find_cores()
    found = choose_threads(cores.n_cores, cores.n_spare, target.size_bytes)
    return dataclasses.replace(found, n_batch=n_batch, n_wide=2) if n_batch else found


def _engine_params(
    config: Config, draft_type: str, target: drafthouse_engine.Model, threads: Threads
) -> drafthouse_engine.EngineParams:
    n_ctx_seq = config.n_ctx_seq or min(target.n_ctx_train, _N_CTX_SEQ_AUTOMATIC)
    return drafthouse_engine.EngineParams(
        draft_type=draft_type,  # type: ignore[arg-type]  # Config allows the same names only
        n_ctx=config.n_ctx,
        n_ctx_seq=n_ctx_seq,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        n_seq_max=config.n_seq_max,
        n_draft_max=config.n_draft_max,
        n_threads=threads.n,
        n_threads_batch=threads.n_batch,
        n_wide=threads.n_wide,
        p_min=config.p_min,
        probabilistic=config.is_probabilistic,
        kv_unified=config.is_kv_unified,
        flash_attention=config.has_flash_attention,
        synth_rates=tuple(map(float, config.synth_rates)),
    )


def _make_engine(
    config: Config,
    target: drafthouse_engine.Model,
    draft: drafthouse_engine.Model | None,
    threads: Threads,
) -> drafthouse_engine.Engine:
    """Makes the contexts, with the first drafter that fits where the setting leaves it open.

    Raises:
        ConfigError: a setting needs a drafter, and none fits.
        ModelLoadError: they cannot be made; says why and what to do.
    """
    *others, last = _draft_types(config, draft)
    for draft_type in others:
        params = _engine_params(config, draft_type, target, threads)
        with _explained(config.model, config), suppress(*_unfit()):
            return drafthouse_engine.Engine(target, draft, params)
    # Its rules hold for what was found, too: n-grams first, before nothing, is refused.
    config = dataclasses.replace(config, draft_type=last)
    with _explained(config.model, config):
        return drafthouse_engine.Engine(
            target, draft, _engine_params(config, last, target, threads)
        )


def _unfit() -> tuple[type[drafthouse_engine.EngineError], ...]:
    """Returns the errors of a draft type that is not these models'."""
    return (
        drafthouse_engine.NoMtpHeads,
        drafthouse_engine.NotDflash,
        drafthouse_engine.Unsupported,
    )


def _draft_types(config: Config, draft: drafthouse_engine.Model | None) -> tuple[str, ...]:
    """Returns the draft types to try, one after the other."""
    if config.draft_type != AUTOMATIC:
        return (config.draft_type,)
    if draft is None:
        return ("mtp", "none")
    by_architecture = {"eagle3": ("eagle3",), "dflash": ("dflash", "dspark")}
    return by_architecture.get(draft.arch, ("simple",))


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


def _pack(entries: Sequence[PlanEntry]) -> tuple[list[int], list[int], list[int]]:
    """Returns a plan as the extension's rows of entries, tokens, and rows of given drafts."""
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
        if entry.given:
            drafts += (entry.seq_id, len(tokens), len(entry.given))
            tokens += entry.given
    return rows, tokens, drafts


def _told(logprobs: list[float]) -> Sequence[float]:
    """Returns log-probabilities; nothing where the sequence has not asked for them (NaN)."""
    return () if logprobs and math.isnan(logprobs[0]) else logprobs


def _require(condition: bool, status: str, detail: str) -> None:
    if not condition:
        raise EngineError(status, detail=detail)


def _timings(result: drafthouse_engine.StepRows) -> StepTimings:
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
