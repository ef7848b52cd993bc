"""What a client is told stays as documented: reasons, codes, and values in message and metadata."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drafthouse_server.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineTooShort,
    DrafthouseError,
    Draining,
    EngineError,
    EngineUnhealthy,
    FieldViolation,
    GrammarTooCostly,
    InvalidRequest,
    ModelLoadError,
    NotFound,
    NoTokenAllowed,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    ServerOverloaded,
    SlowReader,
    SlowSender,
    StartupError,
    StoreUnavailable,
    TenantNotFound,
    TooManyBadKeys,
    Unauthenticated,
    UsageUnavailable,
)

PROTO = Path(__file__).resolve().parent.parent / "protos" / "drafthouse" / "v1" / "errors.proto"

SAMPLES: list[DrafthouseError] = [
    InvalidRequest([FieldViolation("a.b", "is 3"), FieldViolation("c", "is missing")]),
    ContextTooLong(900, 200, 1024),
    GrammarTooCostly(),
    NoTokenAllowed(),
    Unauthenticated(),
    PermissionDenied("big"),
    NotFound("small"),
    TenantNotFound("acme"),
    QuotaExceeded("acme", "waiting requests", 8, 0.5),
    QueueFull(256, 1.0),
    Draining(1.0),
    DeadlineTooShort(0.02, 0.5),
    StoreUnavailable(1.0),
    TooManyBadKeys(30, 2.0),
    UsageUnavailable(1.0),
    EngineError("DECODE_FAILED"),
    SlowSender(10.0),
    SlowReader(20.0),
    ServerOverloaded("calls are open", 1.0),
    EngineUnhealthy(1.0),
]


def documented() -> dict[str, str]:
    """Returns the code of every reason, as the proto's comments state it."""
    text = PROTO.read_text(encoding="utf-8")
    rows = re.findall(r"// ([A-Z_]+): [^\n]*\n(?:  //[^\n]*\n)*  ERROR_REASON_([A-Z_]+) =", text)
    return {reason: code for code, reason in rows}


def test_every_reason_of_the_proto_has_one_class_with_its_code() -> None:
    assert {error.reason: error.code for error in SAMPLES} == documented()
    assert len(documented()) == len(SAMPLES)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_metadata_has_camel_case_keys_and_values_that_the_message_carries(
    error: DrafthouseError,
) -> None:
    for key, value in error.metadata().items():
        assert re.fullmatch(r"[a-z][a-zA-Z]*", key)
        for part in value.split(","):
            assert part in str(error)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_numbers_of_the_message_are_in_the_metadata(error: DrafthouseError) -> None:
    if isinstance(error, InvalidRequest):
        return  # its values travel in BadRequest
    assert set(re.findall(r"\d+", str(error))) <= set(error.metadata().values())


def test_all_violations_are_told_at_once() -> None:
    error = SAMPLES[0]
    assert str(error) == "a.b: is 3; c: is missing"
    assert error.metadata() == {"fields": "a.b,c"}


def test_startup_errors_are_one_sentence_with_key_value_and_expectation() -> None:
    config = ConfigError("port", 70000, "a value in [0, 65535]", "server.toml")
    assert str(config) == "setting 'port' (server.toml) is 70000; expected a value in [0, 65535]"
    load = ModelLoadError("m.gguf", "the file is cut short", "download it again")
    assert str(load) == "cannot load 'm.gguf': the file is cut short; download it again"
    assert isinstance(config, StartupError)
    assert isinstance(load, StartupError)
