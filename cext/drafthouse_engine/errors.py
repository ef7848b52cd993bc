"""Errors of the engine library: one class per status of `spec.h`, and those of the Python face.

```
EngineError
├── InvalidArgument (ValueError)
│   ├── InvalidConfig{field, value}
│   ├── BadGrammar
│   │   └── BadConstraint{where}
│   ├── BadTemplate
│   ├── BadSeqId{seq_id, n_seq}
│   ├── WrongRoot{root, last}
│   └── PromptTooLong{seq_id, n_prompt, n_ctx_seq}
├── ModelNotFound{path}
├── BadModel{path}
├── IncompatibleDraft
│   ├── NoMtpHeads
│   ├── NotDflash
│   ├── NotDspark
│   └── NotEagle3
├── RpcUnreachable
├── Unsupported
├── OutOfMemory
├── BadPlan
│   ├── CacheRollback{length, history_len}
│   ├── SeqBusy{seq_id}
│   ├── SeqIdle{seq_id}
│   ├── ProposalPending{seq_id}
│   ├── NoPendingProposal{seq_id}
│   └── AcceptedTooMany{seq_id, n_accepted, n_drafted}
├── NoRoom
├── DecodeFailed
├── SamplingFailed
│   ├── GrammarTooCostly
│   └── NoTokenAllowed
├── Cancelled
├── SnapshotError{kind}
├── WrongThread{owner, caller}
├── Closed
└── InternalError
```

Every class is built from its message alone, so that all of them survive `pickle`; values are
keyword arguments.
"""

from __future__ import annotations

import enum

__all__ = [
    "AcceptedTooMany",
    "BadConstraint",
    "BadGrammar",
    "BadModel",
    "BadPlan",
    "BadSeqId",
    "BadTemplate",
    "CacheRollback",
    "Cancelled",
    "Closed",
    "DecodeFailed",
    "EngineError",
    "GrammarTooCostly",
    "IncompatibleDraft",
    "InternalError",
    "InvalidArgument",
    "InvalidConfig",
    "ModelNotFound",
    "NoMtpHeads",
    "NoPendingProposal",
    "NoRoom",
    "NoTokenAllowed",
    "NotDflash",
    "NotDspark",
    "NotEagle3",
    "OutOfMemory",
    "PromptTooLong",
    "ProposalPending",
    "RpcUnreachable",
    "SamplingFailed",
    "SeqBusy",
    "SeqIdle",
    "SnapshotError",
    "SnapshotKind",
    "Status",
    "Unsupported",
    "WrongRoot",
    "WrongThread",
]


class Status(enum.IntEnum):
    """Status codes of `spec.h` (`SPEC_ERR_MAP`); compared with them at import."""

    OK = 0
    INVALID_ARGUMENT = -1
    NOT_FOUND = -2
    BAD_MODEL = -3
    NO_MTP_HEADS = -4
    NOT_EAGLE3 = -5
    INCOMPATIBLE_DRAFT = -6
    UNSUPPORTED = -7
    OUT_OF_MEMORY = -8
    BAD_GRAMMAR = -9
    BAD_SEQ_ID = -10
    BAD_PLAN = -11
    SEQ_BUSY = -12
    SEQ_IDLE = -13
    NO_ROOM = -14
    DECODE_FAILED = -15
    SAMPLING_FAILED = -16
    BUFFER_TOO_SMALL = -17
    BAD_TEMPLATE = -18
    CANCELLED = -19
    INTERNAL = -20
    NOT_DFLASH = -21
    NOT_DSPARK = -22
    GRAMMAR_TOO_COSTLY = -23
    NO_TOKEN_ALLOWED = -24
    SNAPSHOT_TRUNCATED = -31
    SNAPSHOT_CORRUPT = -32
    SNAPSHOT_VERSION = -33
    SNAPSHOT_OTHER_MODEL = -34
    SNAPSHOT_OTHER_CONFIG = -35


class SnapshotKind(enum.Enum):
    """Why a snapshot was refused."""

    TRUNCATED = Status.SNAPSHOT_TRUNCATED
    CORRUPT = Status.SNAPSHOT_CORRUPT
    VERSION = Status.SNAPSHOT_VERSION
    OTHER_MODEL = Status.SNAPSHOT_OTHER_MODEL
    OTHER_CONFIG = Status.SNAPSHOT_OTHER_CONFIG


class EngineError(Exception):
    """Base of every error that this library raises on purpose.

    Args:
        message: what went wrong, in one sentence.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(EngineError, ValueError):
    """An argument is out of its range."""


class InvalidConfig(InvalidArgument):
    """A field of a parameter object is out of its range.

    Args:
        message: names the field, the value and the range.
        field: name of the field.
        value: the refused value.
    """

    def __init__(self, message: str, *, field: str = "", value: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.value = value


class BadGrammar(InvalidArgument):
    """The grammar cannot be parsed.

    Args:
        message: names the reason and, where llama.cpp tells it, the text before which it stands.
    """

    def __init__(self, message: str) -> None:
        # llama.cpp ends its reason with the text that follows the place: at the end there is none.
        if message.endswith(" at)") and " at " not in message:
            message = f"{message[:-1]} the end of the grammar)"
        super().__init__(message)


class BadConstraint(BadGrammar):
    """A regular expression, JSON schema or choice that cannot become a grammar.

    Args:
        message: names the construct and its place.
        where: index in the pattern, or pointer into the schema, such as `#/properties/name`.
    """

    def __init__(self, message: str, *, where: int | str = "") -> None:
        super().__init__(message)
        self.where = where


class BadTemplate(InvalidArgument):
    """The chat template failed on these messages."""


class BadSeqId(InvalidArgument):
    """A sequence id is out of range.

    Args:
        message: names both values.
        seq_id: the refused id.
        n_seq: number of sequences; valid ids are [0, n_seq).
    """

    def __init__(self, message: str, *, seq_id: int = -1, n_seq: int = 0) -> None:
        super().__init__(message)
        self.seq_id = seq_id
        self.n_seq = n_seq


class WrongRoot(InvalidArgument):
    """The root of a draft tree is not the last committed token.

    Args:
        message: names both tokens.
        root: token of the tree's root.
        last: last committed token.
    """

    def __init__(self, message: str, *, root: int = -1, last: int = -1) -> None:
        super().__init__(message)
        self.root = root
        self.last = last


class PromptTooLong(InvalidArgument):
    """A prompt does not fit a sequence; nothing has changed.

    Args:
        message: names the values.
        seq_id: the sequence.
        n_prompt: tokens of the prompt.
        n_ctx_seq: most tokens of a sequence.
    """

    def __init__(
        self, message: str, *, seq_id: int = -1, n_prompt: int = 0, n_ctx_seq: int = 0
    ) -> None:
        super().__init__(message)
        self.seq_id = seq_id
        self.n_prompt = n_prompt
        self.n_ctx_seq = n_ctx_seq


class _FileError(EngineError):
    """An error about a model file.

    Args:
        message: what is wrong with it.
        path: the file.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class ModelNotFound(_FileError):
    """The model file does not exist or cannot be read; `path` names it."""


class BadModel(_FileError):
    """The file is not a usable GGUF model; `path` names it."""


class IncompatibleDraft(EngineError):
    """The draft model does not fit the target."""


class NoMtpHeads(IncompatibleDraft):
    """The target has no MTP (NextN) heads."""


class NotEagle3(IncompatibleDraft):
    """The draft model is not an EAGLE-3 model."""


class NotDflash(IncompatibleDraft):
    """The draft model is not a DFlash model."""


class NotDspark(IncompatibleDraft):
    """The draft model is not a DSpark model."""


class RpcUnreachable(EngineError):
    """No RPC server of the right version answers at an address."""


class Unsupported(EngineError):
    """The model or the build does not support the request."""


class OutOfMemory(EngineError):
    """Memory could not be allocated."""


class BadPlan(EngineError):
    """The call contradicts the engine's state; nothing has changed."""


class CacheRollback(BadPlan):
    """A decoder was asked to go back to a length that its history never had.

    Args:
        message: names both lengths.
        length: the refused length.
        history_len: tokens of the history; valid lengths are [0, history_len].
    """

    def __init__(self, message: str, *, length: int = -1, history_len: int = 0) -> None:
        super().__init__(message)
        self.length = length
        self.history_len = history_len


class _SeqError(BadPlan):
    """A call that contradicts the state of one sequence.

    Args:
        message: what is wrong.
        seq_id: the sequence; -1 when the call named several.
    """

    def __init__(self, message: str, *, seq_id: int = -1) -> None:
        super().__init__(message)
        self.seq_id = seq_id


class SeqBusy(_SeqError):
    """The sequence `seq_id` has begun already."""


class SeqIdle(_SeqError):
    """The sequence `seq_id` has not begun."""


class ProposalPending(_SeqError):
    """A draft of the sequence `seq_id` waits to be accepted."""


class NoPendingProposal(_SeqError):
    """No draft of the sequence `seq_id` waits to be accepted."""


class AcceptedTooMany(_SeqError):
    """More tokens were accepted than drafted.

    Args:
        message: names the values.
        seq_id: the sequence.
        n_accepted: accepted tokens, as given.
        n_drafted: tokens of the pending draft.
    """

    def __init__(
        self, message: str, *, seq_id: int = -1, n_accepted: int = 0, n_drafted: int = 0
    ) -> None:
        super().__init__(message, seq_id=seq_id)
        self.n_accepted = n_accepted
        self.n_drafted = n_drafted


class NoRoom(EngineError):
    """No room in the KV cache; the sequences are as they were before the call."""


class DecodeFailed(EngineError):
    """The decode failed; the sequences of the batch were cleared and must begin again."""


class SamplingFailed(EngineError):
    """No token could be chosen; the sequence was cleared and must begin again."""


class GrammarTooCostly(SamplingFailed):
    """The grammar takes too many comparisons for one token; the sequence must begin again."""


class NoTokenAllowed(SamplingFailed):
    """The grammar and the biases allow no token; the sequence must begin again."""


class Cancelled(EngineError):
    """The load was stopped."""


class SnapshotError(EngineError):
    """A snapshot was refused; nothing has changed.

    Args:
        message: what is wrong with it; of another configuration, the parameter and both values.
        kind: which of the reasons.
    """

    def __init__(self, message: str, *, kind: SnapshotKind = SnapshotKind.CORRUPT) -> None:
        super().__init__(message)
        self.kind = kind


class WrongThread(EngineError):
    """An engine was called from a thread that does not own it, or while a call was in flight.

    Args:
        message: what was called.
        owner: identifier (`threading.get_ident`) of the owning thread.
        caller: identifier of the calling thread.
    """

    def __init__(self, message: str, *, owner: int = 0, caller: int = 0) -> None:
        super().__init__(message)
        self.owner = owner
        self.caller = caller


class Closed(EngineError):
    """The object was closed, or a sampler was handed over already."""


class InternalError(EngineError):
    """An unexpected failure inside the engine: a bug of ours or of llama.cpp."""


BY_STATUS: dict[int, type[EngineError]] = {
    Status.INVALID_ARGUMENT: InvalidArgument,
    Status.NOT_FOUND: ModelNotFound,
    Status.BAD_MODEL: BadModel,
    Status.NO_MTP_HEADS: NoMtpHeads,
    Status.NOT_EAGLE3: NotEagle3,
    Status.INCOMPATIBLE_DRAFT: IncompatibleDraft,
    Status.UNSUPPORTED: Unsupported,
    Status.OUT_OF_MEMORY: OutOfMemory,
    Status.BAD_GRAMMAR: BadGrammar,
    Status.BAD_SEQ_ID: BadSeqId,
    Status.BAD_PLAN: BadPlan,
    Status.SEQ_BUSY: SeqBusy,
    Status.SEQ_IDLE: SeqIdle,
    Status.NO_ROOM: NoRoom,
    Status.DECODE_FAILED: DecodeFailed,
    Status.SAMPLING_FAILED: SamplingFailed,
    Status.BUFFER_TOO_SMALL: InternalError,
    Status.BAD_TEMPLATE: BadTemplate,
    Status.CANCELLED: Cancelled,
    Status.INTERNAL: InternalError,
    Status.NOT_DFLASH: NotDflash,
    Status.NOT_DSPARK: NotDspark,
    Status.GRAMMAR_TOO_COSTLY: GrammarTooCostly,
    Status.NO_TOKEN_ALLOWED: NoTokenAllowed,
    **dict.fromkeys((kind.value for kind in SnapshotKind), SnapshotError),
}
"""The one map from a status to its exception."""
