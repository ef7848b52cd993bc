"""An engine without a model.

Deterministic, scriptable, and strict about its plans. For tests, here and at users'.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from drafthouse_server.engine.fake_model import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    N_VOCAB,
    SPECIALS,
    CheckedPlan,
    FakeSampler,
    PlanCheck,
    Slot,
    split_specials,
)
from drafthouse_server.engine.protocol import TextWorker, TextWorkerLost
from drafthouse_server.engine.text_jobs import (
    TextAnswer,
    TextJob,
    TextModel,
    perform,
    read_answer,
    read_job,
    write_answer,
    write_job,
)
from drafthouse_server.engine.threads import Threads
from drafthouse_server.errors import EngineError, FieldViolation, InvalidRequest
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

__all__ = ["FakeEngine", "FakeSampler", "FakeTextWorker"]

_LIMITS = EngineLimits(
    draft_type="mtp",
    n_seq_max=4,
    n_ctx=4096,
    n_ctx_seq=1024,
    n_batch=64,
    n_ubatch=64,
    n_draft_max=4,
    n_outputs_max=20,
)
_CARD = ModelCard(
    name="fake",
    architecture="fake",
    description="a hash in place of a model",
    n_params=0,
    size_bytes=0,
    n_vocab=N_VOCAB,
    n_ctx_train=1024,
    is_recurrent=False,
    has_chat_template=True,
    token_eos=EOS,
)


@dataclass(slots=True)
class _Fault:
    """A failure to come."""

    status: SequenceStatus | Exception
    """Status that the slot reports, or exception that the step raises."""
    seq_id: int | None
    """Slot that fails; None: the whole step."""
    n_steps: int
    """Steps that still fail."""


class FakeEngine:
    """Implements `Engine` with a hash of the whole history as language model.

    Token t < 256 is byte t; four control tokens follow. The next token depends on every token
    before it, both in the cache and fed to the sampler, so a sequence that was given another's
    tokens, or its own twice, generates something else. How many drafted tokens are accepted is
    scripted and changes nothing but the speed, as it must be. Every plan is checked as `step.py`
    and `spec.h` say.

    Args:
        limits: Capacities; a small machine's by default.
        acceptance: Accepted tokens of a sequence's first, second, … draft; starts over at the end.
        eog_period: One token in so many ends a generation; 0 is never.
        step_s: Seconds that a step takes.
        card: What clients are told of the model.
        is_recurrent: Whether it behaves like a recurrent target, which cannot be cut nor copied: a
            start keeps all that a slot or a snapshot holds, or nothing.
    """

    def __init__(
        self,
        limits: EngineLimits = _LIMITS,
        *,
        acceptance: Sequence[int] = (2, 0, 3, 1),
        eog_period: int = 0,
        step_s: float = 0.0,
        card: ModelCard = _CARD,
        is_recurrent: bool = False,
    ) -> None:
        self._limits = limits
        self._card = dataclasses.replace(card, is_recurrent=is_recurrent or card.is_recurrent)
        self._acceptance = tuple(acceptance)
        self._eog_period = eog_period
        self._step_s = step_s
        self._check = PlanCheck(limits, is_recurrent=self._card.is_recurrent)
        self._slots: dict[int, Slot] = {}
        self._faults: list[_Fault] = []
        self._n_start_refusals = 0
        self._n_save_refusals = 0
        self._is_closed = False
        self._is_interrupted = False
        self.n_steps = 0
        """Steps asked for, failed ones too."""
        self.n_cells_max = 0
        """Most KV cells that were ever in use."""

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
        return Threads(1, 1, reason="a fake engine")

    @property
    def prefix_bytes_max(self) -> int:
        """Returns the host memory that there is for prefixes, whatever the settings allow."""
        return 1 << 40

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def n_cells_used(self) -> int:
        """KV cells in use, over all slots."""
        return sum(slot.n_past for slot in self._slots.values())

    def n_past(self, seq_id: int) -> int:
        """Returns the tokens of a slot in the cache; 0 when it is idle."""
        slot = self._slots.get(seq_id)
        return slot.n_past if slot else 0

    def inject(
        self, fault: SequenceStatus | Exception, *, seq_id: int | None = None, n_steps: int = 1
    ) -> None:
        """Makes the next steps fail.

        Args:
            fault: A status for the entry, or an exception that the whole step raises.
            seq_id: Slot whose entry fails; None is every entry.
            n_steps: How many steps that it applies to.
        """
        self._faults.append(_Fault(fault, seq_id, n_steps))

    def refuse(self, *, n_starts: int = 0, n_saves: int = 0) -> None:
        """Makes the next starts that would keep tokens keep none, and the next saves fail.

        Args:
            n_starts: How many starts; those that keep nothing anyway do not count.
            n_saves: How many saves.
        """
        self._n_start_refusals += n_starts
        self._n_save_refusals += n_saves

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. See `Engine.step`.

        Raises:
            EngineError: the plan is wrong; nothing has changed (ENGINE_FAILURE).
        """
        if self._is_closed:
            raise EngineError("CLOSED")
        self.n_steps += 1
        started = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        self._raise_fault()
        draft = self._check.check(plan, self._slots, self._n_start_refusals)
        self._commit(plan, draft)
        for slot in filter(None, map(self._slots.get, plan.drafts_off)):
            slot.is_cold, slot.is_warming_up = True, False
        for slot in filter(None, map(self._slots.get, plan.drafts_on)):
            slot.is_warming_up = slot.is_cold
        entries = [self._run(entry, draft) for entry in plan.entries]
        n_steps = 1
        while n_steps < plan.n_steps and self._may_go_on(entries):
            self._go_on(entries)
            n_steps += 1
        self._is_interrupted = False
        self.n_cells_max = max(self.n_cells_max, self.n_cells_used)
        computed = [entry for entry in plan.entries if entry.seq_id not in draft.refused]
        return StepResult(
            entries=entries,
            n_batch_tokens=sum(len(entry.tokens) + entry.n_draft for entry in computed)
            + (n_steps - 1) * len(computed),
            n_kept=dict.fromkeys(draft.refused, 0),
            snapshots=draft.snapshots,
            samplers=draft.samplers,
            timings=StepTimings(total_s=time.perf_counter() - started),
            n_steps=n_steps,
        )

    def interrupt(self) -> None:
        """Ends the run of steps in flight, or else the next one. See `Engine.interrupt`."""
        self._is_interrupted = True

    def _may_go_on(self, entries: list[ResultEntry]) -> bool:
        """Returns whether a run has another step; a fault waits for a step of its own."""
        n_cells = self.n_cells_used + len(entries)
        if self._is_interrupted or self._faults or n_cells > self._limits.n_ctx:
            return False
        return all(
            entry.tokens and not entry.is_eog and entry.n_past < self._limits.n_ctx_seq
            for entry in entries
        )

    def _go_on(self, entries: list[ResultEntry]) -> None:
        """Runs another step of a run."""
        self.n_steps += 1
        if self._step_s:
            time.sleep(self._step_s)
        for entry in entries:
            slot = self._slots[entry.seq_id]
            slot.compute(entry.tokens[-1:])
            tokens = [*entry.tokens, slot.sampler.choose(slot.digest, self._eog_period)]
            entry.tokens, entry.logprobs = tokens, self._logprobs(slot, tokens)
            entry.n_past, entry.is_eog = slot.n_past, tokens[-1] == EOS

    def _raise_fault(self) -> None:
        for fault in self._faults:
            if isinstance(fault.status, Exception):
                self._spend(fault)
                raise fault.status

    def _spend(self, fault: _Fault) -> None:
        fault.n_steps -= 1
        if fault.n_steps == 0:
            self._faults.remove(fault)

    def _commit(self, plan: StepPlan, draft: CheckedPlan) -> None:
        """Makes a checked plan's slots the engine's. Up to here, nothing has changed."""
        for sampler in draft.samplers_taken:
            sampler.is_owned = True
        draft.samplers = {
            seq_id: sampler.copy(is_owned=False) for seq_id, sampler in draft.samplers.items()
        }
        for seq_id in plan.saves[: self._n_save_refusals]:
            del draft.snapshots[seq_id]
        self._n_save_refusals = max(0, self._n_save_refusals - len(plan.saves))
        self._n_start_refusals = draft.n_start_refusals
        self._slots = draft.slots

    def _find_fault(self, seq_id: int) -> SequenceStatus:
        for fault in self._faults:
            if isinstance(fault.status, SequenceStatus) and fault.seq_id in (None, seq_id):
                self._spend(fault)
                return fault.status
        return SequenceStatus.OK

    def _run(self, entry: PlanEntry, draft: CheckedPlan) -> ResultEntry:
        """Runs one sequence's part."""
        if entry.seq_id in draft.refused:
            begun = self._slots.get(entry.seq_id)
            status = SequenceStatus.OK if begun else SequenceStatus.DECODE_FAILED
            is_cold = begun is not None and begun.is_cold
            return ResultEntry(entry.seq_id, status, 0, is_draft_cold=is_cold)
        slot = self._slots[entry.seq_id]
        status = self._find_fault(entry.seq_id)
        if status is SequenceStatus.NO_ROOM:
            return ResultEntry(entry.seq_id, status, slot.n_past)
        if status is not SequenceStatus.OK:
            del self._slots[entry.seq_id]
            return ResultEntry(entry.seq_id, status, 0)
        slot.compute(entry.tokens)
        if entry.is_output:
            done = self._generate(entry, slot)
        else:
            done = ResultEntry(entry.seq_id, status, slot.n_past)
        slot.is_cold, slot.is_warming_up = slot.is_cold and not slot.is_warming_up, False
        done.is_draft_cold = slot.is_cold
        return done

    def _generate(self, entry: PlanEntry, slot: Slot) -> ResultEntry:
        """Emits the accepted part of the draft and one token more; an end token is the last one."""
        tokens: list[int] = []
        given = list(itertools.takewhile(lambda token: not self.is_eog(token), entry.external))
        n_most = len(given) if given else self._count_accepted(entry, slot)
        for place in range(n_most + 1):
            slot.compute(tokens[-1:])
            tokens.append(slot.sampler.choose(slot.digest, self._eog_period))
            is_rejected = bool(given) and tokens[-1:] != given[place : place + 1]
            if tokens[-1] == EOS or is_rejected:
                break
        n_drafted = 0 if slot.is_cold else entry.n_draft
        return ResultEntry(
            seq_id=entry.seq_id,
            status=SequenceStatus.OK,
            n_past=slot.n_past,
            tokens=tokens,
            logprobs=self._logprobs(slot, tokens),
            n_drafted=len(given) or n_drafted,
            n_accepted=len(tokens) - 1,
            is_eog=tokens[-1] == EOS,
            is_external=bool(given),
        )

    def _count_accepted(self, entry: PlanEntry, slot: Slot) -> int:
        """Returns how many draft tokens the target accepts."""
        if not entry.n_draft or slot.is_cold:
            return 0
        n_accepted = self._acceptance[slot.n_drafts % len(self._acceptance)]
        slot.n_drafts += 1
        return min(n_accepted, entry.n_draft)

    def _logprobs(self, slot: Slot, tokens: list[int]) -> list[float]:
        """Returns a log-probability per token.

        Minus its id in thousandths, so that a test can tell them apart.
        """
        return [-token / 1000 for token in tokens] if slot.sampler.options.logprobs else []

    def make_sampler(self, options: SamplingOptions) -> object:
        """Makes a sampler; a grammar must have a rule "root".

        Raises:
            InvalidRequest: an option is out of its range, or the grammar has no root
                (INVALID_FIELD).
        """
        if not (math.isfinite(options.temperature) and options.temperature >= 0):
            raise _invalid("temperature", f"{options.temperature} is not in [0, 10]")
        if options.grammar and "root" not in options.grammar:
            raise _invalid("grammar", 'cannot be parsed: no rule "root"')
        return FakeSampler(options)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Returns one token per byte of the text."""
        tokens = [BOS] if add_special else []
        return tokens + (split_specials(text) if parse_special else list(text.encode()))

    def token_bytes(self, token: int, *, special: bool) -> bytes:
        """Returns the byte of a token; the name of a control token, if asked for."""
        if token < 256:
            return bytes([token])
        return SPECIALS[token].encode() if special else b""

    def is_eog(self, token: int) -> bool:
        """Returns whether the token ends a generation."""
        return token in (EOS, IM_END)

    def tokenize_chat(
        self, messages: Sequence[tuple[str, str]], chat_template_kwargs: str = ""
    ) -> list[int]:
        """Returns the messages as ChatML, behind the template's arguments; all of it is text."""
        tokens = [BOS, *chat_template_kwargs.encode()]
        for role, content in messages:
            tokens += [IM_START, *f"{role}\n{content}".encode(), IM_END, *b"\n"]
        return [*tokens, IM_START, *b"assistant\n"]

    def make_text_worker(self) -> TextWorker:
        """Makes a thread that does what a worker's process would."""
        return FakeTextWorker(self)

    def close(self) -> None:
        """Forgets everything. Harmless when done twice."""
        self._slots.clear()
        self._is_closed = True


class FakeTextWorker:
    """Implements `TextWorker` with a thread. Jobs and answers pass as the bytes that they are.

    Nothing bounds what a job takes. Killed, it loses its job at once; the thread ends with it.

    Args:
        model: What reads the texts.
    """

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text-worker")
        self._answer: asyncio.Future[TextAnswer] | None = None
        self._ended: asyncio.Future[None] | None = None

    @property
    def not_dropped(self) -> str:
        """Nothing that anybody should be told: it is for tests."""
        return ""

    @property
    def chat_problem(self) -> str:
        """None: there is no template."""
        return ""

    async def start(self) -> None:
        """See `TextWorker.start`."""
        self._ended = asyncio.get_running_loop().create_future()

    def ask(self, job: TextJob, cpu_s: float) -> asyncio.Future[TextAnswer]:
        """Gives it a job. See `TextWorker.ask`."""
        loop = asyncio.get_running_loop()
        assert self._answer is None, "it does one job at a time"
        assert self._ended is not None, "it has not started"
        self._answer = answer = loop.create_future()
        if self._ended.done():
            self._lose(TextWorkerLost.ENDED)
            return answer
        work = loop.run_in_executor(self._thread, self._work, write_job(job, cpu_s))
        work.add_done_callback(self._take)
        return answer

    def _work(self, content: bytes) -> bytes:
        job, _ = read_job(content)
        return write_answer(perform(job, self._model))

    def _take(self, work: asyncio.Future[bytes]) -> None:
        answer, self._answer = self._answer, None
        if answer is None or work.cancelled():
            return
        error = work.exception()
        if error is not None:
            answer.set_exception(error)
            return
        answer.set_result(read_answer(work.result()))

    def _lose(self, cause: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_exception(TextWorkerLost(cause))

    def kill(self, *, is_late: bool = False) -> None:
        """Ends it now. See `TextWorker.kill`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        self._lose(TextWorkerLost.LATE if is_late else TextWorkerLost.ENDED)

    async def wait(self) -> None:
        """Returns when it was killed."""
        assert self._ended is not None, "it has not started"
        await asyncio.shield(self._ended)

    async def end(self) -> None:
        """Ends it. Harmless when done twice."""
        self.kill()


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])
