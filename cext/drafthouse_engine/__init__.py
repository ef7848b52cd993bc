"""Speculative decoding of many sequences over llama.cpp, as a library.

`Model` loads a GGUF file, `Engine` runs batched steps over several sequences, and the sessions
(`MtpSession`, `Eagle3Session`, `DflashSession`, …) drive one generation call by call.
`Decoder` and `TreeDecoder` score tokens and draft trees of one model, without a sampler; `generate`
writes a text with any of these ways to draft.
"""

from __future__ import annotations

import logging

from drafthouse_engine import cpu_level as _cpu_level

# Where the wheel has a library for each level of CPU, the folder of this CPU's stands first.
__path__[:0] = _cpu_level.level_folders()

try:
    from drafthouse_engine._spec import (
        Embedder,
        Engine,
        Model,
        Sampler,
        Survey,
        abi_version,
        build_facts,
        build_version,
        check_grammar,
        find_cores,
        grammar_accepts,
        list_devices,
        on_abort,
        set_log,
        set_numa,
    )
except ImportError as error:
    raise ImportError(
        f"the compiled part of drafthouse_engine cannot be imported ({error}); "
        "run `make build` in the source tree, or install the package with pip"
    ) from error

from drafthouse_engine.batch import Batch
from drafthouse_engine.chat_process import ChatProcess
from drafthouse_engine.choice import choice_grammar
from drafthouse_engine.cores import Cores
from drafthouse_engine.decoder import Decoder
from drafthouse_engine.decoder_config import DecoderConfig, DecoderLimits
from drafthouse_engine.decoder_pool import DecoderPool
from drafthouse_engine.devices import (
    CACHE_TYPES,
    LOAD_MODES,
    NUMA_STRATEGIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
    CacheParams,
    CacheType,
    LoadMode,
    NumaStrategy,
    Placement,
    RopeParams,
    RopeScaling,
    SplitMode,
)
from drafthouse_engine.distribution import sample_token, token_distribution
from drafthouse_engine.eagle3_drafter import Eagle3Drafter
from drafthouse_engine.embedding import POOLINGS, EmbedderLimits, EmbedderParams, Pooling
from drafthouse_engine.errors import (
    AcceptedTooMany,
    BadConstraint,
    BadGrammar,
    BadModel,
    BadPlan,
    BadSeqId,
    BadTemplate,
    CacheRollback,
    Cancelled,
    Closed,
    DecodeFailed,
    EngineError,
    GrammarTooCostly,
    IncompatibleDraft,
    InternalError,
    InvalidArgument,
    InvalidConfig,
    ModelNotFound,
    NoMtpHeads,
    NoPendingProposal,
    NoRoom,
    NotDflash,
    NotDspark,
    NotEagle3,
    NoTokenAllowed,
    OutOfMemory,
    PromptTooLong,
    ProposalPending,
    RpcUnreachable,
    SamplingFailed,
    SeqBusy,
    SeqIdle,
    SnapshotError,
    SnapshotKind,
    Status,
    Unsupported,
    WrongRoot,
    WrongThread,
)
from drafthouse_engine.fork import begin_many
from drafthouse_engine.generate import (
    Generation,
    GenerationMethod,
    GenerationStats,
    Scorer,
    TreeDrafter,
    TreeScorer,
    TreeShape,
    generate,
    generate_autoregressive,
    generate_tree,
    generate_vanilla,
)
from drafthouse_engine.json_schema import json_schema_grammar
from drafthouse_engine.limits import BreakerStats, DraftWork, EngineLimits
from drafthouse_engine.machine import DEVICE_KINDS, Device, DeviceKind, Fit, MemoryUse
from drafthouse_engine.moves import Moved, Moves, Start
from drafthouse_engine.options import (
    DRAFT_TYPES,
    SAMPLERS,
    DraftType,
    EngineParams,
    SamplerKind,
    SamplingParams,
)
from drafthouse_engine.probe import probe_model
from drafthouse_engine.proven import PROVEN
from drafthouse_engine.regex import regex_grammar
from drafthouse_engine.rejection import (
    adjusted_distribution,
    modified_rejection_step,
    speculative_sample,
)
from drafthouse_engine.rpc import add_rpc_servers
from drafthouse_engine.sessions import (
    DflashSession,
    DraftRequest,
    DsparkSession,
    Eagle3Session,
    MtpSession,
    NgramSession,
    SessionConfig,
    SessionStats,
    SimpleSession,
    SpeculativeSession,
)
from drafthouse_engine.step import (
    DRAFT_DTYPE,
    PLAN_DTYPE,
    RESULT_DTYPE,
    Fault,
    ResultFlag,
    StepResult,
    StepRows,
)
from drafthouse_engine.tree import DraftTree
from drafthouse_engine.tree_decoder import TreeDecoder

# As libraries do: warnings of llama.cpp reach those who configure logging, not everybody's stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "CACHE_TYPES",
    "DEVICE_KINDS",
    "DRAFT_DTYPE",
    "DRAFT_TYPES",
    "LOAD_MODES",
    "NUMA_STRATEGIES",
    "PLAN_DTYPE",
    "POOLINGS",
    "PROVEN",
    "RESULT_DTYPE",
    "ROPE_SCALINGS",
    "SAMPLERS",
    "SPLIT_MODES",
    "AcceptedTooMany",
    "BadConstraint",
    "BadGrammar",
    "BadModel",
    "BadPlan",
    "BadSeqId",
    "BadTemplate",
    "Batch",
    "BreakerStats",
    "CacheParams",
    "CacheRollback",
    "CacheType",
    "Cancelled",
    "ChatProcess",
    "Closed",
    "Cores",
    "DecodeFailed",
    "Decoder",
    "DecoderConfig",
    "DecoderLimits",
    "DecoderPool",
    "Device",
    "DeviceKind",
    "DflashSession",
    "DraftRequest",
    "DraftTree",
    "DraftType",
    "DraftWork",
    "DsparkSession",
    "Eagle3Drafter",
    "Eagle3Session",
    "Embedder",
    "EmbedderLimits",
    "EmbedderParams",
    "Engine",
    "EngineError",
    "EngineLimits",
    "EngineParams",
    "Fault",
    "Fit",
    "Generation",
    "GenerationMethod",
    "GenerationStats",
    "GrammarTooCostly",
    "IncompatibleDraft",
    "InternalError",
    "InvalidArgument",
    "InvalidConfig",
    "LoadMode",
    "MemoryUse",
    "Model",
    "ModelNotFound",
    "Moved",
    "Moves",
    "MtpSession",
    "NgramSession",
    "NoMtpHeads",
    "NoPendingProposal",
    "NoRoom",
    "NoTokenAllowed",
    "NotDflash",
    "NotDspark",
    "NotEagle3",
    "NumaStrategy",
    "OutOfMemory",
    "Placement",
    "Pooling",
    "PromptTooLong",
    "ProposalPending",
    "ResultFlag",
    "RopeParams",
    "RopeScaling",
    "RpcUnreachable",
    "Sampler",
    "SamplerKind",
    "SamplingFailed",
    "SamplingParams",
    "Scorer",
    "SeqBusy",
    "SeqIdle",
    "SessionConfig",
    "SessionStats",
    "SimpleSession",
    "SnapshotError",
    "SnapshotKind",
    "SpeculativeSession",
    "SplitMode",
    "Start",
    "Status",
    "StepResult",
    "StepRows",
    "Survey",
    "TreeDecoder",
    "TreeDrafter",
    "TreeScorer",
    "TreeShape",
    "Unsupported",
    "WrongRoot",
    "WrongThread",
    "abi_version",
    "add_rpc_servers",
    "adjusted_distribution",
    "begin_many",
    "build_facts",
    "build_version",
    "check_grammar",
    "choice_grammar",
    "find_cores",
    "generate",
    "generate_autoregressive",
    "generate_tree",
    "generate_vanilla",
    "grammar_accepts",
    "json_schema_grammar",
    "list_devices",
    "modified_rejection_step",
    "on_abort",
    "probe_model",
    "regex_grammar",
    "sample_token",
    "set_log",
    "set_numa",
    "speculative_sample",
    "token_distribution",
]
