"""The engine over `drafthouse_engine`: plans to rows of numbers, rows to results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from drafthouse_server.config import Config
from drafthouse_server.engine.loading import card_of, limits_of, load_engine
from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import EngineError, FieldViolation, InvalidRequest
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
    _FLAG_GIVEN = int(drafthouse_engine.ResultFlag.GIVEN)

__all__ = ["LlamaEngine"]

_US = 1e-6

_LOST = (SequenceStatus.DECODE_FAILED, SequenceStatus.SAMPLING_FAILED)
"""After these a slot is idle."""

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingOptions))


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
        self._limits = limits_of(engine)
        self._card = card_of(engine.target, name)
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
        engine, threads = load_engine(config, progress)
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
            raise _invalid("grammar", error) from error
        except drafthouse_engine.InvalidConfig as error:
            raise _invalid(error.field, error) from error
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
            raise _invalid("text", error) from error
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
            raise _invalid("messages", error) from error

    def close(self) -> None:
        """Frees the contexts and the models.

        Harmless when done twice. Thread: engine thread only.
        """
        draft = self._engine.draft
        self._engine.close()
        self._model.close()
        if draft is not None:
            draft.close()


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
