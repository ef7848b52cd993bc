"""Sessions: speculative generation driven call by call.

One round of a sequence, once its prompt is in:

```
draft = session.draft(seq_id, session.n_past(seq_id), id_last)
batch = Batch.of(seq_id, session.n_past(seq_id), [id_last, *draft])
session.decode(batch)
session.process(batch)
… session.sample(seq_id, i) for i = 0, 1, …, as long as the token equals draft[i] …
session.accept(seq_id, n_accepted)
```

Rounds of several sequences may share `draft_many`, `decode` and `process`.

Between rounds `save` gives a sequence whole as bytes, and `load` takes it into use again, in this
or another session; the next round begins with `draft(seq_id, n_past(seq_id), id_last(seq_id))`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from drafthouse_engine._spec import Engine, Model, Sampler
from drafthouse_engine.batch import Batch
from drafthouse_engine.errors import (
    AcceptedTooMany,
    BadPlan,
    DecodeFailed,
    InvalidArgument,
    InvalidConfig,
    NoPendingProposal,
    PromptTooLong,
    ProposalPending,
    SamplingFailed,
)
from drafthouse_engine.fields import check_float, check_int
from drafthouse_engine.options import DraftType, EngineParams, SamplingParams

__all__ = [
    "DflashSession",
    "DraftRequest",
    "DsparkSession",
    "Eagle3Session",
    "MtpSession",
    "NgramSession",
    "SessionConfig",
    "SessionStats",
    "SimpleSession",
    "SpeculativeSession",
]

NgramKind = Literal["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"]
_Result = TypeVar("_Result")
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How a session is built; `dataclasses.replace` gives a changed copy.

    Raises:
        InvalidConfig: a field is out of its range.
    """

    n_seq: int = 1
    """Sequences at once, [1, 256]."""
    n_draft_max: int = 3
    """Most drafted tokens of one round, ≥ 1."""
    n_min: int = 0
    """Shorter drafts are dropped, [0, n_draft_max]; 0 drops none."""
    p_min: float = 0.0
    """Drafting stops below this probability, [0, 1)."""
    n_ctx_seq: int = 0
    """Most tokens of one sequence; 0 is the model's training context."""
    n_batch: int = 2048
    """Most tokens of one decode, ≥ 1."""
    n_ubatch: int = 512
    """Most tokens of one physical batch, [1, n_batch]."""
    n_threads: int = 0
    """Threads; 0 is all cores that the process may use (`find_cores`)."""

    def __post_init__(self) -> None:
        check_int(self, "n_seq", 1, 256)
        check_int(self, "n_draft_max", 1)
        check_int(self, "n_min", 0, self.n_draft_max)
        check_float(self, "p_min", 0, 1, ends="[)")
        check_int(self, "n_ctx_seq", 0)
        check_int(self, "n_batch", 1)
        check_int(self, "n_ubatch", 1, self.n_batch)
        check_int(self, "n_threads", 0)

    def engine_params(self, draft_type: DraftType) -> EngineParams:
        """Returns the parameters of the engine under the session."""
        return EngineParams(
            draft_type=draft_type,
            n_seq_max=self.n_seq,
            n_draft_max=self.n_draft_max,
            n_min=self.n_min,
            p_min=self.p_min,
            n_ctx_seq=self.n_ctx_seq,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_threads=self.n_threads,
        )


@dataclass(frozen=True, slots=True)
class SessionStats:
    """What a session has done since it was made."""

    n_drafts: int
    """Rounds that ended with `accept`."""
    n_drafted: int
    """Draft tokens of these rounds."""
    n_accepted: int
    """Draft tokens accepted."""
    n_drafted_at: tuple[int, ...]
    """Rounds whose draft reached each position. Shape: [n_draft_max]."""
    n_accepted_at: tuple[int, ...]
    """Rounds that accepted each position. Shape: [n_draft_max]."""
    draft_s: float
    """Time in `draft` and `draft_many`."""
    decode_s: float
    """Time in `decode`."""
    process_s: float
    """Time in `process`."""
    sample_s: float
    """Time in `sample`."""
    accept_s: float
    """Time in `accept`."""
    n_draft_positions: int
    """Tokens that the draft model computed for drafts; see `DraftWork`."""
    n_draft_passes: int
    """Decodes of the draft model for drafts; sequences that draft together share them."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 before the first."""
        return self.n_accepted / self.n_drafted if self.n_drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a round, the target's own included; 0 before the first round."""
        return 1 + self.n_accepted / self.n_drafts if self.n_drafts else 0.0

    def __str__(self) -> str:
        places = zip(self.n_accepted_at, self.n_drafted_at, strict=True)
        shares = [accepted / drafted if drafted else 0.0 for accepted, drafted in places]
        return (
            f"{self.n_drafts} rounds, {self.n_accepted} of {self.n_drafted} draft tokens accepted, "
            f"{self.mean_acceptance_length:.2f} tokens a round; "
            f"by position {', '.join(f'{share:.2f}' for share in shares)}; "
            f"draft {self.draft_s:.3f} s, decode {self.decode_s:.3f} s, "
            f"process {self.process_s:.3f} s, sample {self.sample_s:.3f} s, "
            f"accept {self.accept_s:.3f} s"
        )


class DraftRequest(NamedTuple):
    """One sequence's part of `draft_many`."""

    seq_id: int
    """The sequence."""
    n_past: int
    """Tokens of the sequence in the KV cache."""
    id_last: int
    """Last token chosen for the sequence, not yet decoded."""
    n_draft: int | None = None
    """Draft tokens wanted, [1, n_draft_max]; None is n_draft_max."""


class SpeculativeSession:
    """Speculative generation over one target; base of the sessions of each draft type.

    The session holds its models and contexts; after `close` every call raises `Closed`.

    Args:
        target: the model whose tokens are generated.
        draft: the draft model, where the type has one.
        draft_type: how drafts are made.
        config: sizes; None means the defaults.

    Raises:
        NoMtpHeads, NotEagle3, NotDflash, NotDspark, IncompatibleDraft: the models do not fit the
            draft type.
        Unsupported: llama.cpp cannot draft for this target.
        OutOfMemory: memory could not be allocated.

    Thread:
        The thread that made the session only; calls from others raise `WrongThread`.
    """

    need_embd: ClassVar[bool] = False
    """Whether the target must give the hidden states of inner layers."""
    need_embd_pre_norm: ClassVar[bool] = False
    """Whether the target must give its last hidden state for the MTP heads."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        draft_type: DraftType,
        config: SessionConfig | None = None,
    ) -> None:
        self._config: Final = config or SessionConfig()
        self._engine: Final = Engine(target, draft, self._config.engine_params(draft_type))
        self._batch: Batch | None = None
        self._is_processed = True
        self._without_outputs: set[int] = set()  # begun, cut or ended since the last decode
        self._proposed: dict[int, int] = {}
        self._drafted_at = [0] * self.n_draft_max
        self._accepted_at = [0] * self.n_draft_max
        self._n_drafts = 0
        self._seconds = dict.fromkeys(("draft", "decode", "process", "sample", "accept"), 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def config(self) -> SessionConfig:
        """The configuration that the session was made with."""
        return self._config

    @property
    def n_seq(self) -> int:
        """Sequences at once; ids are [0, n_seq)."""
        return self._engine.limits.n_seq_max

    @property
    def n_draft_max(self) -> int:
        """Most drafted tokens of one round."""
        return self._engine.limits.n_draft_max

    @property
    def n_min(self) -> int:
        """Shorter drafts are dropped."""
        return self._config.n_min

    @property
    def p_min(self) -> float:
        """Drafting stops below this probability."""
        return self._config.p_min

    def n_past(self, seq_id: int) -> int:
        """Returns the number of tokens that the sequence has in the KV cache."""
        return self._engine.seq_n_past(seq_id)

    def has_pending_proposal(self, seq_id: int) -> bool:
        """Returns whether a draft of the sequence waits for `accept`."""
        self.n_past(seq_id)
        return seq_id in self._proposed

    def is_quiescent(self, seq_id: int | None = None) -> bool:
        """Returns whether no draft waits for `accept` and no batch for `process`.

        Args:
            seq_id: [0, n_seq), the question is about this sequence alone; None: about all.

        Raises:
            BadSeqId: there is no such sequence.
        """
        if seq_id is None:
            return self._is_processed and not self._proposed
        is_unprocessed = not self._is_processed and bool(self._batch) and seq_id in self._seq_ids()
        return not self.has_pending_proposal(seq_id) and not is_unprocessed

    def _seq_ids(self) -> set[int]:
        return set(self._batch.seq_ids.tolist()) if self._batch is not None else set()

    def is_cold(self, seq_id: int) -> bool:
        """Returns whether the draft of the sequence failed: it goes on, and drafts are empty.

        Args:
            seq_id: [0, n_seq).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        return self._engine.seq_is_cold(seq_id)

    def stats(self) -> SessionStats:
        """Returns what the session has done since it was made."""
        work = self._engine.draft_work
        return SessionStats(
            n_drafts=self._n_drafts,
            n_drafted=sum(self._drafted_at),
            n_accepted=sum(self._accepted_at),
            n_drafted_at=tuple(self._drafted_at),
            n_accepted_at=tuple(self._accepted_at),
            draft_s=self._seconds["draft"],
            decode_s=self._seconds["decode"],
            process_s=self._seconds["process"],
            sample_s=self._seconds["sample"],
            accept_s=self._seconds["accept"],
            n_draft_positions=work.n_positions,
            n_draft_passes=work.n_passes,
        )

    def print_stats(self) -> None:
        """Logs `stats` as one line, level INFO of the logger `drafthouse_engine.sessions`."""
        _log.info("%s: %s", type(self).__name__, self.stats())

    def begin(
        self,
        seq_id: int,
        prompt: Sequence[int] | npt.NDArray[np.int32] = (),
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Takes a free sequence into use and reads its prompt; `sample` then chooses a token.

        Args:
            seq_id: [0, n_seq).
            prompt: tokens; when empty, the caller decodes the prompt.
            sampling: how `sample` chooses; None means the defaults.

        Raises:
            BadSeqId: there is no such sequence.
            SeqBusy: the sequence has begun already.
            PromptTooLong: the prompt does not fit a sequence; nothing has changed.
            NoRoom: the prompt does not fit the KV cache; the sequence is free again.
        """
        self._check_length(seq_id, len(prompt))
        self._engine.seq_begin(seq_id, Sampler(self._engine.target, sampling))
        self._forget(seq_id)
        try:
            self._read(seq_id, prompt)
        except Exception:
            self._engine.seq_end(seq_id)
            raise

    def _forget(self, seq_id: int) -> None:
        """Drops what a sequence has left here: its pending draft, its outputs."""
        self._proposed.pop(seq_id, None)
        self._without_outputs.add(seq_id)

    def _check_length(self, seq_id: int, n_prompt: int) -> None:
        self.n_past(seq_id)
        n_max = self._engine.limits.n_ctx_seq
        if n_prompt > n_max:
            raise PromptTooLong(
                f"the prompt of sequence {seq_id} has {n_prompt} tokens; a sequence holds {n_max}",
                seq_id=seq_id,
                n_prompt=n_prompt,
                n_ctx_seq=n_max,
            )

    def _read(self, seq_id: int, prompt: Sequence[int] | npt.NDArray[np.int32]) -> None:
        n_batch = self._engine.limits.n_batch
        for start in range(0, len(prompt), n_batch):
            piece = prompt[start : start + n_batch]
            is_last = start + n_batch >= len(prompt)
            self.decode(Batch.of(seq_id, start, piece, outputs="last" if is_last else "none"))
            self.process()

    def decode(self, batch: Batch) -> None:
        """Runs one decode of the target.

        Args:
            batch: at most n_batch tokens, each sequence from its n_past on.

        Raises:
            BadPlan: the batch contradicts the state of a sequence, or the last one was not
                processed; nothing has changed.
            NoRoom: no KV cells are free; nothing has changed.
            DecodeFailed: the decode failed; the sequences of the batch must begin again.
        """
        try:
            self._timed(
                "decode",
                lambda: self._engine.decode(
                    batch.tokens, batch.positions, batch.seq_ids, batch.is_output
                ),
            )
        except DecodeFailed:
            for seq_id in batch.seq_ids.tolist():
                self._proposed.pop(seq_id, None)
            raise
        self._batch = batch
        self._without_outputs.clear()
        self._is_processed = False

    def process(self, batch: Batch | None = None) -> None:
        """Feeds the last decoded batch to the draft; after every decode.

        Args:
            batch: the batch just decoded, as a check; None skips the check.

        Raises:
            BadPlan: it is another batch, or it was processed already; nothing has changed.
        """
        if batch is not None and batch is not self._batch:
            raise BadPlan("process was given another batch than the one just decoded")
        self._timed("process", self._engine.process)
        self._is_processed = True

    def logits(self, seq_id: int, i: int = -1) -> npt.NDArray[np.float32]:
        """Returns the logits at an output of the last decode.

        Args:
            seq_id: [0, n_seq).
            i: which of the sequence's outputs; −1 is the last.

        Shape:
            [n_vocab] float32, a copy.

        Raises:
            InvalidArgument: the last decode has no such output, or the sequence was begun, loaded,
                cut or ended since.
        """
        return self._engine.logits(self._output(seq_id, i))

    def sample(self, seq_id: int, i: int = -1) -> int:
        """Chooses a token at an output of the last decode, and feeds it to the sequence's sampler.

        Args:
            seq_id: [0, n_seq).
            i: which of the sequence's outputs; −1 is the last.

        Raises:
            InvalidArgument: the last decode has no such output, or the sequence was begun, loaded,
                cut or ended since.
            SeqIdle: the sequence has not begun.
            SamplingFailed: no token is allowed here; the sequence must begin again.
        """
        output = self._output(seq_id, i)
        try:
            return self._timed("sample", lambda: self._engine.sample(seq_id, output))
        except SamplingFailed:
            self._proposed.pop(seq_id, None)
            raise

    def _output(self, seq_id: int, i: int) -> int:
        self.n_past(seq_id)
        is_silent = seq_id in self._without_outputs
        outputs = [] if self._batch is None or is_silent else self._batch.outputs_of(seq_id)
        if not -len(outputs) <= i < len(outputs):
            raise InvalidArgument(
                f"sequence {seq_id} has {len(outputs)} outputs in the last decode, no number {i}"
            )
        return outputs[i]

    def draft(self, seq_id: int, n_past: int, id_last: int) -> list[int]:
        """Drafts the tokens after id_last.

        Args:
            seq_id: [0, n_seq).
            n_past: tokens of the sequence in the KV cache.
            id_last: last chosen token, not yet decoded.

        Returns:
            At most n_draft_max tokens; a round begins even when there are none.

        Raises:
            ProposalPending: the former draft was not accepted.
            BadPlan: the call contradicts the state of the sequence, or the last batch was not
                processed.
        """
        return self.draft_many([DraftRequest(seq_id, n_past, id_last)])[0]

    def draft_many(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for several sequences in one batched call; see `draft`.

        Args:
            requests: one per sequence.

        Returns:
            One draft per request.
        """
        for request in requests:
            self._refuse_pending(request.seq_id)
        rows = [(r.seq_id, r.n_past, r.id_last, self._n_draft(r)) for r in requests]
        drafts = self._timed("draft", lambda: self._engine.draft_many(rows))
        self._proposed.update(
            {request.seq_id: len(draft) for request, draft in zip(requests, drafts, strict=True)}
        )
        return drafts

    def _n_draft(self, request: DraftRequest) -> int:
        return self.n_draft_max if request.n_draft is None else request.n_draft

    def _refuse_pending(self, seq_id: int) -> None:
        if self.has_pending_proposal(seq_id):
            raise ProposalPending(f"a draft of sequence {seq_id} is pending", seq_id=seq_id)

    def accept(self, seq_id: int, n_accepted: int) -> None:
        """Ends a round: accepted draft tokens stay, the rest is rolled back in both contexts.

        Args:
            seq_id: [0, n_seq).
            n_accepted: [0, drafted].

        Raises:
            NoPendingProposal: there is no draft.
            AcceptedTooMany: the draft was shorter.
            BadPlan: the draft was not decoded and processed.
            Unsupported: the draft was verified in several decodes, and a recurrent target cannot
                take back what those before the last brought; nothing has changed.
            DecodeFailed: the rest could not be taken back; the sequence must begin again.
        """
        if not self.has_pending_proposal(seq_id):
            raise NoPendingProposal(f"no draft of sequence {seq_id} is pending", seq_id=seq_id)
        n_drafted = self._proposed[seq_id]
        if n_accepted > n_drafted:
            raise AcceptedTooMany(
                f"{n_accepted} tokens of sequence {seq_id} accepted, {n_drafted} drafted",
                seq_id=seq_id,
                n_accepted=n_accepted,
                n_drafted=n_drafted,
            )
        try:
            self._timed("accept", lambda: self._engine.accept(seq_id, n_accepted))
        except DecodeFailed:
            del self._proposed[seq_id]
            raise
        del self._proposed[seq_id]
        self._count(n_drafted, n_accepted)

    def _count(self, n_drafted: int, n_accepted: int) -> None:
        self._n_drafts += 1
        for i in range(n_drafted):
            self._drafted_at[i] += 1
            self._accepted_at[i] += i < n_accepted

    def rollback(self, seq_id: int, n_past: int) -> None:
        """Cuts a sequence to its first n_past tokens and drops its pending draft.

        A sequence that is cut has no outputs until the next decode.

        The sampler keeps what it has heard. A sequence with a draft model is cold from then on,
        except with dflash and dspark, whose whole state is cut with their cache.

        Args:
            seq_id: [0, n_seq).
            n_past: [0, tokens in the KV cache].

        Raises:
            SeqIdle: the sequence has not begun.
            Unsupported: a recurrent target cannot go back so far.
            BadPlan: the sequence is shorter.
        """
        is_cut = n_past < self.n_past(seq_id)
        self._engine.rollback(seq_id, n_past)
        self._proposed.pop(seq_id, None)
        if is_cut:
            self._without_outputs.add(seq_id)

    def tokens(self, seq_id: int) -> npt.NDArray[np.int32]:
        """Returns the tokens that the sequence has in the KV cache.

        Args:
            seq_id: [0, n_seq).

        Shape:
            [n_past] int32.

        Raises:
            SeqIdle: the sequence has not begun.
        """
        return self._engine.seq_tokens(seq_id)

    def id_last(self, seq_id: int) -> int | None:
        """Returns the token that `sample` chose last for the sequence; None before the first.

        Args:
            seq_id: [0, n_seq).

        Raises:
            SeqIdle: the sequence has not begun.
        """
        return self._engine.seq_id_last(seq_id)

    def save(self, seq_id: int) -> bytes:
        """Returns a snapshot of a sequence: tokens, cells, draft state, sampler; see `Engine.save`.

        Other sequences may hold open proposals.

        Args:
            seq_id: [0, n_seq).

        Raises:
            SeqIdle: the sequence has not begun.
            ProposalPending: its own draft was not accepted.
            BadPlan: its last batch was not processed.
        """
        self._refuse_pending(seq_id)
        return self._engine.save(seq_id)

    def load(self, seq_id: int, snapshot: bytes) -> None:
        """Takes a free sequence into use as a snapshot left it; go on with `draft`.

        Args:
            seq_id: [0, n_seq).
            snapshot: what `save` returned, of a session of this class, configuration and models.

        Raises:
            SnapshotError: it is damaged or belongs elsewhere; nothing has changed.
            SeqBusy: the sequence has begun already.
            NoRoom: no KV cells are free; nothing has changed.
        """
        self._engine.load(seq_id, snapshot)
        self._forget(seq_id)

    def end(self, seq_id: int) -> None:
        """Frees a sequence and drops its pending draft. Harmless when it has not begun."""
        self._engine.seq_end(seq_id)
        self._forget(seq_id)

    def close(self) -> None:
        """Frees the contexts. Harmless when done twice."""
        self._engine.close()

    def _timed(self, what: str, call: Callable[[], _Result]) -> _Result:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self._seconds[what] += time.perf_counter() - start


class MtpSession(SpeculativeSession):
    """Drafts come from the target's own MTP (NextN) heads.

    Args:
        target: a model with MTP heads.
        config: sizes; None means the defaults.

    Raises:
        NoMtpHeads: the model has none.
    """

    need_embd_pre_norm = True

    def __init__(self, target: Model, config: SessionConfig | None = None) -> None:
        super().__init__(target, None, "mtp", config)


class Eagle3Session(SpeculativeSession):
    """Drafts come from an EAGLE-3 model that reads the target's inner layers.

    Args:
        target: the model whose tokens are generated.
        draft: an EAGLE-3 model made for it.
        config: sizes; None means the defaults.

    Raises:
        NotEagle3: the draft model is of another kind.
        IncompatibleDraft: it was made for another target.
    """

    need_embd = True

    def __init__(self, target: Model, draft: Model, config: SessionConfig | None = None) -> None:
        super().__init__(target, draft, "eagle3", config)


class DflashSession(SpeculativeSession):
    """Drafts are blocks that a DFlash model fills in one pass, reading the target's inner layers.

    A block costs one pass whatever K: K cuts what is verified. `n_draft_max` is at most the model's
    block size less one.

    Args:
        target: the model whose tokens are generated.
        draft: a DFlash model made for it.
        config: sizes; None means the defaults.

    Raises:
        NotDflash: the draft model is of another kind.
        IncompatibleDraft: it was made for another target.
        BadModel: its metadata contradicts itself: block size, mask token, layers.
        Unsupported: llama.cpp does not show this target's layers.
    """

    need_embd = True

    def __init__(self, target: Model, draft: Model, config: SessionConfig | None = None) -> None:
        super().__init__(target, draft, "dflash", config)


class DsparkSession(SpeculativeSession):
    """Drafts are blocks of a DSpark model: DFlash with a head that makes tokens depend on another.

    As `DflashSession`; `n_draft_max` is at most the model's block size, or one less where the model
    says so (`dflash.sample_from_anchor`). `p_min` is compared with the model's confidence head.

    Args:
        target: the model whose tokens are generated.
        draft: a DSpark model made for it.
        config: sizes; None means the defaults.

    Raises:
        NotDspark: the draft model is of another kind.
        InvalidArgument: `p_min` is above 0 and the model has no confidence head.
        IncompatibleDraft: it was made for another target.
        BadModel: its metadata contradicts itself: block size, mask token, layers.
        Unsupported: llama.cpp does not show this target's layers.
    """

    need_embd = True

    def __init__(self, target: Model, draft: Model, config: SessionConfig | None = None) -> None:
        super().__init__(target, draft, "dspark", config)


class SimpleSession(SpeculativeSession):
    """Drafts come from an ordinary small model with the same vocabulary.

    Args:
        target: the model whose tokens are generated.
        draft: the small model.
        config: sizes; None means the defaults.

    Raises:
        IncompatibleDraft: the vocabularies differ.
    """

    def __init__(self, target: Model, draft: Model, config: SessionConfig | None = None) -> None:
        super().__init__(target, draft, "simple", config)


class NgramSession(SpeculativeSession):
    """Drafts come from repetitions in the text.

    Args:
        target: the model whose tokens are generated.
        config: sizes; None means the defaults.
        kind: which n-gram method.

    Raises:
        InvalidConfig: there is no such method.
    """

    def __init__(
        self,
        target: Model,
        config: SessionConfig | None = None,
        *,
        kind: NgramKind = "ngram-simple",
    ) -> None:
        if not str(kind).startswith("ngram-"):
            raise InvalidConfig(
                f"kind must be an n-gram method, not {kind!r}", field="kind", value=kind
            )
        super().__init__(target, None, kind, config)
