"""Speculative decoding of many sequences over llama.cpp, as a library.

`Model` loads a GGUF file, `Engine` runs batched steps over several sequences, and the sessions
(`MtpSession`, `Eagle3Session`, `SimpleSession`, `NgramSession`) drive one generation call by call.
"""

from __future__ import annotations

import logging

try:
    from drafthouse_engine._spec import (
        Engine,
        Model,
        Sampler,
        abi_version,
        build_version,
        set_log,
    )
except ImportError as error:
    raise ImportError(
        f"the compiled part of drafthouse_engine cannot be imported ({error}); "
        "run `make build` in the source tree, or install the package with pip"
    ) from error

from drafthouse_engine.batch import Batch
from drafthouse_engine.errors import (
    AcceptedTooMany,
    BadGrammar,
    BadModel,
    BadPlan,
    BadSeqId,
    BadTemplate,
    Cancelled,
    Closed,
    DecodeFailed,
    EngineError,
    IncompatibleDraft,
    InternalError,
    InvalidArgument,
    InvalidConfig,
    ModelNotFound,
    NoMtpHeads,
    NoPendingProposal,
    NoRoom,
    NotEagle3,
    OutOfMemory,
    PromptTooLong,
    ProposalPending,
    SamplingFailed,
    SeqBusy,
    SeqIdle,
    SnapshotError,
    SnapshotKind,
    Status,
    Unsupported,
    WrongThread,
)
from drafthouse_engine.limits import EngineLimits
from drafthouse_engine.options import DRAFT_TYPES, DraftType, EngineParams, SamplingParams
from drafthouse_engine.sessions import (
    DraftRequest,
    Eagle3Session,
    MtpSession,
    NgramSession,
    SessionConfig,
    SessionStats,
    SimpleSession,
    SpeculativeSession,
)
from drafthouse_engine.step import PLAN_DTYPE, RESULT_DTYPE, Fault, ResultFlag, StepResult

# As libraries do: warnings of llama.cpp reach those who configure logging, not everybody's stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "DRAFT_TYPES",
    "PLAN_DTYPE",
    "RESULT_DTYPE",
    "AcceptedTooMany",
    "BadGrammar",
    "BadModel",
    "BadPlan",
    "BadSeqId",
    "BadTemplate",
    "Batch",
    "Cancelled",
    "Closed",
    "DecodeFailed",
    "DraftRequest",
    "DraftType",
    "Eagle3Session",
    "Engine",
    "EngineError",
    "EngineLimits",
    "EngineParams",
    "Fault",
    "IncompatibleDraft",
    "InternalError",
    "InvalidArgument",
    "InvalidConfig",
    "Model",
    "ModelNotFound",
    "MtpSession",
    "NgramSession",
    "NoMtpHeads",
    "NoPendingProposal",
    "NoRoom",
    "NotEagle3",
    "OutOfMemory",
    "PromptTooLong",
    "ProposalPending",
    "ResultFlag",
    "Sampler",
    "SamplingFailed",
    "SamplingParams",
    "SeqBusy",
    "SeqIdle",
    "SessionConfig",
    "SessionStats",
    "SimpleSession",
    "SnapshotError",
    "SnapshotKind",
    "SpeculativeSession",
    "Status",
    "StepResult",
    "Unsupported",
    "WrongThread",
    "abi_version",
    "build_version",
    "set_log",
]
