"""The Python SDK of Drafthouse, the gRPC text-generation server.

    import drafthouse

    with drafthouse.Client() as client:
        for chunk in client.generate("def parse(", max_output_tokens=100):
            print(chunk, end="", flush=True)

`AsyncClient` is the same for asyncio. The generated messages and stubs are in `drafthouse.v1`.
"""

from __future__ import annotations

from drafthouse._admin import (
    AdminClient,
    CacheBlocksRemoved,
    CacheBlocksStored,
    CacheReset,
    Limit,
    Load,
    PrefixCacheStatus,
    ServerState,
    ServerStatus,
    StoreState,
    TenantLoad,
    prefix_hashes,
)
from drafthouse._aio import AsyncClient
from drafthouse._client import Client
from drafthouse._errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    DeadlineTooShort,
    DrafthouseError,
    EngineFailure,
    EngineUnhealthy,
    FieldViolation,
    GrammarTooCostly,
    InternalError,
    InvalidApiKey,
    InvalidArgument,
    InvalidField,
    ModelNotAllowed,
    ModelNotFound,
    NotFound,
    NoTokenAllowed,
    PermissionDenied,
    QueueFull,
    QuotaViolation,
    ResourceExhausted,
    ServerDraining,
    ServerOverloaded,
    SlowReader,
    SlowSender,
    StoreUnavailable,
    TenantNotFound,
    TenantQuotaExceeded,
    TooManyBadKeys,
    Unauthenticated,
    Unavailable,
    UsageUnavailable,
)
from drafthouse._events import (
    Chunk,
    FinishReason,
    Model,
    PromptProgress,
    Result,
    SpeculationStatistics,
    Timings,
    TokenCount,
)
from drafthouse._options import ChatMessage, Dry, GenerateOptions, Prompt, SpeculationMode, Xtc
from drafthouse._retry import RetryPolicy
from drafthouse._stream import AsyncGenerationStream, GenerationStream
from drafthouse._tls import Tls
from drafthouse._usage import Usage

__all__ = [
    "AdminClient",
    "AsyncClient",
    "AsyncGenerationStream",
    "CacheBlocksRemoved",
    "CacheBlocksStored",
    "CacheReset",
    "Cancelled",
    "ChatMessage",
    "Chunk",
    "Client",
    "ContextTooLong",
    "DeadlineExceeded",
    "DeadlineTooShort",
    "DrafthouseError",
    "Dry",
    "EngineFailure",
    "EngineUnhealthy",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "GenerationStream",
    "GrammarTooCostly",
    "InternalError",
    "InvalidApiKey",
    "InvalidArgument",
    "InvalidField",
    "Limit",
    "Load",
    "Model",
    "ModelNotAllowed",
    "ModelNotFound",
    "NoTokenAllowed",
    "NotFound",
    "PermissionDenied",
    "PrefixCacheStatus",
    "Prompt",
    "PromptProgress",
    "QueueFull",
    "QuotaViolation",
    "ResourceExhausted",
    "Result",
    "RetryPolicy",
    "ServerDraining",
    "ServerOverloaded",
    "ServerState",
    "ServerStatus",
    "SlowReader",
    "SlowSender",
    "SpeculationMode",
    "SpeculationStatistics",
    "StoreState",
    "StoreUnavailable",
    "TenantLoad",
    "TenantNotFound",
    "TenantQuotaExceeded",
    "Timings",
    "Tls",
    "TokenCount",
    "TooManyBadKeys",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "UsageUnavailable",
    "Xtc",
    "prefix_hashes",
]
