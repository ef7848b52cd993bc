"""Every row of the error table, as it arrives at a client: code, reason, and details."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (
    BadRequest,
    ErrorInfo,
    QuotaFailure,
    RequestInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status
from tests.support.logged import logged

import drafthouse
from drafthouse._errors import error_class
from drafthouse.v1 import errors_pb2, generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from drafthouse_server import errors
from drafthouse_server.engine.fake import FakeEngine
from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.rpc.interceptors import to_status
from drafthouse_server.rpc.server import Server
from drafthouse_server.step import SamplingOptions, SequenceStatus
from drafthouse_server.tenancy.tenants import Tenant, TenantRegistry

if TYPE_CHECKING:
    from tests.conftest import Eventually, GatedEngine, ServerFactory

    from drafthouse.v1.generation_pb2_grpc import GenerationServiceAsyncStub

PROTOS = Path(__file__).resolve().parents[2] / "protos" / "drafthouse" / "v1"
REASONS = [name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()[1:]]

Detail = TypeVar("Detail", bound=Message)


class Failure:
    """A failed call, taken apart."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details()
        trailers = dict(tuple(error.trailing_metadata() or ()))
        self.status = Status.FromString(trailers["grpc-status-details-bin"])
        self.info = self.find(ErrorInfo)
        assert self.info.domain == "drafthouse.dev"
        assert self.find(RequestInfo).request_id == trailers["x-request-id"]
        kinds = [detail.type_url for detail in self.status.details]
        assert len(kinds) == len(set(kinds)), "each kind of detail at most once"

    def find(self, kind: type[Detail]) -> Detail:
        found = kind()
        assert any(detail.Unpack(found) for detail in self.status.details), f"no {kind}"
        return found

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.find(BadRequest).field_violations]


async def fail(call: Any) -> Failure:
    """Awaits a call, or reads a stream, that must fail."""
    answer = read_all(call) if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return Failure(caught.value)


async def read_all(call: Any) -> None:
    async for _ in call:
        pass


@pytest.fixture
async def generation(server: Server) -> AsyncIterator[GenerationServiceAsyncStub]:
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    prompt = fields.pop("prompt", {"text": "x"})
    return generation_pb2.GenerateRequest(prompt=prompt, **{"max_output_tokens": 4} | fields)


BIG = 3.0e38

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": {}}, "prompt"),
    ({"prompt": {"text": ""}}, "prompt.text"),
    ({"prompt": {"tokens": {}}}, "prompt.tokens.ids"),
    ({"prompt": {"tokens": {"ids": [1, 260]}}}, "prompt.tokens.ids[1]"),
    ({"prompt": {"tokens": {"ids": [-1]}}}, "prompt.tokens.ids[0]"),
    ({"prompt": {"text": "x" * (32 * 1024 + 1)}}, "prompt.text"),
    ({"prompt": {"chat": {}}}, "prompt.chat.messages"),
    (
        {"prompt": {"chat": {"messages": [{"role": "", "content": "x"}]}}},
        "prompt.chat.messages[0].role",
    ),
    (
        {"prompt": {"chat": {"messages": [{"role": "u", "content": "x" * (32 * 1024)}]}}},
        "prompt.chat",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": -5}, "max_output_tokens"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
    ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
    ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
    ({"sampling": {"temperature": 10.1}}, "sampling.temperature"),
    ({"sampling": {"top_k": -1}}, "sampling.top_k"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p"),
    ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
    ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
    ({"sampling": {"typical_p": 0.0}}, "sampling.typical_p"),
    ({"sampling": {"top_n_sigma": 0.0}}, "sampling.top_n_sigma"),
    ({"sampling": {"top_n_sigma": math.inf}}, "sampling.top_n_sigma"),
    ({"sampling": {"seed": 4294967295}}, "sampling.seed"),
    ({"sampling": {"penalties": {"last_tokens": -2}}}, "sampling.penalties.last_tokens"),
    ({"sampling": {"penalties": {"repeat": 0.0}}}, "sampling.penalties.repeat"),
    ({"sampling": {"penalties": {"repeat": 0.0009}}}, "sampling.penalties.repeat"),
    ({"sampling": {"penalties": {"frequency": -BIG}}}, "sampling.penalties.frequency"),
    ({"sampling": {"penalties": {"presence": 11}}}, "sampling.penalties.presence"),
    ({"sampling": {"dry": {"multiplier": 101}}}, "sampling.dry.multiplier"),
    ({"sampling": {"dry": {"base": 0.9}}}, "sampling.dry.base"),
    ({"sampling": {"dry": {"allowed_tokens": 1025}}}, "sampling.dry.allowed_tokens"),
    ({"sampling": {"dry": {"last_tokens": 65537}}}, "sampling.dry.last_tokens"),
    ({"sampling": {"dry": {"breakers": ["x"] * 33}}}, "sampling.dry.breakers"),
    ({"sampling": {"dry": {"breakers": ["x" * 65]}}}, "sampling.dry.breakers[0]"),
    ({"sampling": {"xtc": {"probability": 1.1}}}, "sampling.xtc.probability"),
    ({"sampling": {"xtc": {"threshold": math.nan}}}, "sampling.xtc.threshold"),
    ({"sampling": {"logit_bias": [{}] * 1025}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": [{"token_id": 260}]}}, "sampling.logit_bias[0].token_id"),
    ({"sampling": {"logit_bias": [{}, {"bias": 101}]}}, "sampling.logit_bias[1].bias"),
    ({"sampling": {"logit_bias": [{"bias": math.nan}]}}, "sampling.logit_bias[0].bias"),
    ({"sampling": {"grammar": "x" * 65537}}, "sampling.grammar"),
    ({"sampling": {"grammar": "no rule of that name"}}, "sampling.grammar"),
    ({"speculation": {"mode": model_pb2.SPECULATION_MODE_EAGLE3}}, "speculation.mode"),
    ({"speculation": {"mode": 77}}, "speculation.mode"),
    ({"speculation": {"max_draft_tokens": 5}}, "speculation.max_draft_tokens"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
    ({"stop": {"sequences": ["x"] * 17}}, "stop.sequences"),
    ({"stop": {"sequences": ["ok", ""]}}, "stop.sequences[1]"),
    ({"stop": {"sequences": ["x" * 257]}}, "stop.sequences[0]"),
    ({"stop": {"token_ids": [1] * 65}}, "stop.token_ids"),
    ({"stop": {"token_ids": [260]}}, "stop.token_ids[0]"),
    ({"model": "x" * 257}, "model"),
]


@pytest.mark.parametrize(
    ("fields", "path"), BAD_FIELDS, ids=[f"{i}-{path}" for i, (_, path) in enumerate(BAD_FIELDS)]
)
async def test_bad_field_is_named(
    generation: GenerationServiceAsyncStub, fields: dict[str, Any], path: str
) -> None:
    failure = await fail(generation.Generate(request(**fields)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.info.reason == "INVALID_FIELD"
    assert failure.fields == [path]
    assert failure.find(BadRequest).field_violations[0].description


GOOD_FIELDS: list[dict[str, Any]] = [
    {"sampling": {"temperature": 10, "top_k": 0, "top_p": 1, "min_p": 1, "typical_p": 1}},
    {"sampling": {"seed": 4294967294, "top_n_sigma": 0.01, "xtc": {"threshold": 1}}},
    {"sampling": {"penalties": {"last_tokens": -1, "repeat": 10, "frequency": -10}}},
    {"sampling": {"penalties": {"repeat": 0.001}}},
    {"sampling": {"dry": {"base": 1, "allowed_tokens": 0, "breakers": ["x" * 64] * 32}}},
    {"sampling": {"logit_bias": [{"token_id": 259, "bias": -100}] * 1024}},
    {"stop": {"sequences": ["\0" * 256] * 16, "token_ids": [259] * 64}},
    {"speculation": {"mode": model_pb2.SPECULATION_MODE_MTP, "max_draft_tokens": 4}},
    {"speculation": {"mode": model_pb2.SPECULATION_MODE_OFF}},
    {"priority": 100},
    {"priority": -100},
    {"max_output_tokens": 1},
    {"model": "fake"},
]


@pytest.mark.parametrize("fields", GOOD_FIELDS, ids=range(len(GOOD_FIELDS)))
async def test_bounds_themselves_are_allowed(
    generation: GenerationServiceAsyncStub, fields: dict[str, Any]
) -> None:
    messages = [message async for message in generation.Generate(request(**fields))]
    assert messages[-1].HasField("result")


async def test_all_bad_fields_are_named_at_once(generation: GenerationServiceAsyncStub) -> None:
    bad = request(
        prompt={"text": ""},
        sampling={"temperature": math.nan, "top_p": 2},
        stop={"sequences": [""]},
        priority=1000,
        max_output_tokens=0,
    )
    failure = await fail(generation.Generate(bad))
    assert failure.fields == [
        "prompt.text", "sampling.temperature", "sampling.top_p", "stop.sequences[0]", "priority",
        "max_output_tokens",
    ]  # fmt: skip
    assert failure.info.metadata["fields"].startswith("prompt.text,sampling.temperature")


async def test_a_list_that_is_too_long_is_named_with_all_else(
    generation: GenerationServiceAsyncStub,
) -> None:
    bad = request(sampling={"temperature": -1}, stop={"sequences": ["a"] * 17})
    failure = await fail(generation.Generate(bad))
    assert failure.fields == ["sampling.temperature", "stop.sequences"]
    violation = failure.find(BadRequest).field_violations[1]
    assert violation.description == "must have at most 16 entries, has 17"
    far_beyond = request(stop={"sequences": ["a"] * 5000})
    failure = await fail(generation.Generate(far_beyond))
    assert failure.fields == ["stop.sequences"]
    assert "has more than " in failure.find(BadRequest).field_violations[0].description


async def test_an_error_of_a_thousand_fields_still_arrives(
    generation: GenerationServiceAsyncStub,
) -> None:
    biases = [{"token_id": 999, "bias": 999}] * 1024
    failure = await fail(generation.Generate(request(sampling={"logit_bias": biases})))
    assert failure.info.reason == "INVALID_FIELD"
    assert len(failure.fields) == 16


async def test_an_error_in_a_foreign_script_still_arrives() -> None:
    violations = [FieldViolation("я" * 500, "я" * 9000)] * 99
    assert len(to_status(InvalidRequest(violations), "id").SerializeToString()) < 16_000


async def test_context_too_long(generation: GenerationServiceAsyncStub) -> None:
    cases = [({"ids": [1] * 1024}, 1), ({"ids": [1] * 1000}, 25)]
    for tokens, n_output in cases:
        failure = await fail(
            generation.Generate(request(prompt={"tokens": tokens}, max_output_tokens=n_output))
        )
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.info.reason == "CONTEXT_TOO_LONG"
        assert failure.info.metadata == {
            "promptTokens": str(len(tokens["ids"])),
            "maxOutputTokens": str(n_output),
            "contextTokens": "1024",
        }


async def test_a_prompt_that_fills_the_context_is_too_long_without_a_limit_too(
    generation: GenerationServiceAsyncStub,
) -> None:
    prompt = {"tokens": {"ids": [1] * 1024}}
    bad = generation_pb2.GenerateRequest(prompt=generation_pb2.Prompt(**prompt))  # type: ignore[arg-type]  # whatever kind of prompt
    assert (await fail(generation.Generate(bad))).info.reason == "CONTEXT_TOO_LONG"


@pytest.mark.parametrize("key", [None, "wrong", ""])
async def test_invalid_api_key(start_server: ServerFactory, key: str | None) -> None:
    server = await start_server(api_keys=("acme:secret",))
    metadata = (("authorization", f"Bearer {key}"),) if key is not None else ()
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        models = model_pb2_grpc.ModelServiceStub(channel)
        for call in (
            generation.Generate(request(), metadata=metadata),
            generation.Tokenize(generation_pb2.TokenizeRequest(), metadata=metadata),
            models.ListModels(model_pb2.ListModelsRequest(), metadata=metadata),
        ):
            failure = await fail(call)
            assert failure.code is grpc.StatusCode.UNAUTHENTICATED
            assert failure.info.reason == "INVALID_API_KEY"
            assert "secret" not in str(failure.status)


async def test_a_known_key_opens(start_server: ServerFactory) -> None:
    server = await start_server(api_keys=("acme:secret",))
    async with drafthouse.AsyncClient(server.target, api_key="secret") as client:
        assert (await client.generate("x", max_output_tokens=2)).usage.output_tokens == 2


async def test_model_not_found(generation: GenerationServiceAsyncStub) -> None:
    failure = await fail(generation.Generate(request(model="gpt")))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert failure.info.reason == "MODEL_NOT_FOUND"
    assert failure.info.metadata == {"model": "gpt"}


async def test_model_not_allowed_is_checked_before_existence(start_server: ServerFactory) -> None:
    tenants = TenantRegistry({"k": Tenant("acme", models=frozenset({"mine"}))})
    server = await start_server(tenants=tenants)
    metadata = (("authorization", "Bearer k"),)
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        for model in ("fake", "no-such-model", ""):
            failure = await fail(generation.Generate(request(model=model), metadata=metadata))
            assert failure.code is grpc.StatusCode.PERMISSION_DENIED
            assert failure.info.reason == "MODEL_NOT_ALLOWED"
        failure = await fail(generation.Generate(request(model="mine"), metadata=metadata))
        assert failure.info.reason == "MODEL_NOT_FOUND"


async def test_tenant_quota_exceeded(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    tenants = TenantRegistry({"k": Tenant("acme", n_active_max=1)})
    server = await start_server(gated_engine, tenants=tenants, retry_after_s=2.5)
    metadata = (("authorization", "Bearer k"),)
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        gated_engine.hold()
        first = generation.Generate(request(), metadata=metadata)
        await eventually(lambda: server.loop.statistics().n_running == 1)
        failure = await fail(generation.Generate(request(), metadata=metadata))
        gated_engine.release()
        assert [message async for message in first][-1].HasField("result")
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.info.reason == "TENANT_QUOTA_EXCEEDED"
    assert failure.find(QuotaFailure).violations[0].subject == "tenant:acme"
    assert failure.find(RetryInfo).retry_delay.ToTimedelta().total_seconds() == 2.5
    assert server.loop.statistics().n_requests["TENANT_QUOTA_EXCEEDED"] == 1


async def test_queue_full(
    start_server: ServerFactory, gated_engine: GatedEngine, eventually: Eventually
) -> None:
    server = await start_server(gated_engine, queue_size=1)
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        gated_engine.hold()  # what comes during a step waits for its end
        first = generation.Generate(request())
        await eventually(lambda: server.loop.statistics().n_running == 1)
        second = generation.Generate(request())
        await eventually(lambda: server.loop.statistics().n_waiting == 1)
        failure = await fail(generation.Generate(request()))
        gated_engine.release()
        for stream in (first, second):
            assert [message async for message in stream][-1].HasField("result")
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.info.reason == "QUEUE_FULL"
    assert failure.info.metadata == {"waitingRequests": "1"}
    assert failure.find(RetryInfo).retry_delay.seconds == 1


@pytest.mark.parametrize("status", ["DECODE_FAILED", "SAMPLING_FAILED"])
async def test_engine_failure_ends_one_stream_and_no_other(
    start_server: ServerFactory, status: str
) -> None:
    engine = FakeEngine(step_s=0.001)
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        other = generation.Generate(request(max_output_tokens=100))
        messages = aiter(other)
        await anext(messages)
        engine.inject(SequenceStatus[status], seq_id=1)
        failure = await fail(generation.Generate(request(max_output_tokens=100)))
        *_, last = [message async for message in messages]
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.info.reason == "ENGINE_FAILURE"
    assert failure.info.metadata == {"status": status}
    assert last.result.usage.output_tokens == 100


@pytest.mark.parametrize("reason", ["GRAMMAR_TOO_COSTLY", "NO_TOKEN_ALLOWED"])
async def test_options_with_which_nothing_can_be_chosen_are_the_clients_fault(
    start_server: ServerFactory, reason: str
) -> None:
    engine = FakeEngine(step_s=0.001)
    server = await start_server(engine)
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        engine.inject(SequenceStatus(reason), seq_id=0)
        failure = await fail(generation.Generate(request(max_output_tokens=100)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.info.reason == reason
    assert server.loop.statistics().n_requests == {reason: 1}


class BrokenEngine(FakeEngine):
    """Fails where nobody expects it."""

    def make_sampler(self, options: SamplingOptions) -> object:
        raise ZeroDivisionError("the secret of the house")


async def test_an_unforeseen_error_shows_its_trace_to_the_log_alone(
    start_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(BrokenEngine())
    async with grpc.aio.insecure_channel(server.target) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        prompt = generation_pb2.Prompt(text="x")
        failure = await fail(generation.Generate(request()))
        count = await generation.CountTokens(generation_pb2.CountTokensRequest(prompt=prompt))
    assert count.prompt_tokens == 2, "the server lives on"
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.info.reason == "ENGINE_FAILURE"
    assert "secret" not in f"{failure.message}{failure.status}"
    assert "ZeroDivisionError: the secret of the house" in caplog.text
    assert failure.find(RequestInfo).request_id in caplog.text
    assert server.loop.statistics().n_requests == {"ENGINE_FAILURE": 1}


async def test_every_call_leaves_a_line_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    caplog.set_level(logging.INFO, "drafthouse_server.rpc.interceptors")
    async with drafthouse.AsyncClient(server.target) as client:
        await client.tokenize("x")
        with pytest.raises(drafthouse.ModelNotFound):
            await client.generate("x", model="gpt", request_id="mine")
    # A call's line is written once its client has its answer.
    await eventually(lambda: len(logged(caplog)) >= 2)
    lines = logged(caplog)
    assert re.search(r"method=\S+/Tokenize code=OK reason=- tenant=default", lines[0])
    assert "code=NOT_FOUND reason=MODEL_NOT_FOUND" in lines[1]
    assert " client_request_id=mine " in lines[1]


async def test_other_calls_check_their_fields_too(
    server: Server, generation: GenerationServiceAsyncStub
) -> None:
    count = generation_pb2.CountTokensRequest()
    detokenize = generation_pb2.DetokenizeRequest(token_ids=[0, 260])
    assert (await fail(generation.CountTokens(count))).fields == ["prompt"]
    assert (await fail(generation.Detokenize(detokenize))).fields == ["token_ids[1]"]
    async with grpc.aio.insecure_channel(server.target) as channel:
        models = model_pb2_grpc.ModelServiceStub(channel)
        bad = model_pb2.ListModelsRequest(page_size=1001, page_token="?")  # noqa: S106  # no secret: wrong on purpose
        assert (await fail(models.ListModels(bad))).fields == ["page_size", "page_token"]
        missing = await fail(models.GetModel(model_pb2.GetModelRequest(model="gpt")))
        assert missing.info.reason == "MODEL_NOT_FOUND"


async def test_garbage_on_the_wire_is_refused_and_survived(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/drafthouse.v1.GenerationService/Tokenize"
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await raw(b"\xff\xff\xff")
    async with drafthouse.AsyncClient(server.target) as client:
        assert await client.tokenize("a") == [97]


def server_classes() -> dict[str, type[errors.DrafthouseError]]:
    found = {}
    pending = errors.DrafthouseError.__subclasses__()
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if hasattr(cls, "reason"):
            found[cls.reason] = cls
    return found


def test_every_reason_is_mapped_in_the_server() -> None:
    assert sorted(server_classes()) == sorted(REASONS)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_typed_in_the_sdk_with_the_servers_code(reason: str) -> None:
    code = grpc.StatusCode[server_classes()[reason].code]
    cls = error_class(code, reason)
    assert cls.default_reason == reason
    assert cls.code is code
    assert getattr(drafthouse, cls.__name__) is cls


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_documented_with_its_code(reason: str) -> None:
    text = (PROTOS / "errors.proto").read_text()
    comment = re.search(rf"// (.*)\n(?:  // .*\n)*  ERROR_REASON_{reason} =", text)
    assert comment is not None
    assert comment.group(1).startswith(f"{server_classes()[reason].code}: ")
    assert reason in (drafthouse._errors.__doc__ or "")


async def test_a_place_is_given_back_whatever_ends_its_preparation(
    start_server: ServerFactory, eventually: Eventually
) -> None:
    """Wrong fields, a prompt that is too long, a grammar that cannot be compiled, a clean end."""
    server = await start_server()
    admission = server.loop.admission
    async with drafthouse.AsyncClient(server.target, retry=None) as client:
        for wrong in ({"temperature": -1.0}, {"max_output_tokens": 10**6}, {"grammar": "x"}):
            with pytest.raises(drafthouse.DrafthouseError):
                await client.generate("x", **wrong)
            assert (admission.n_active, admission.n_waiting) == (0, 0)
        await client.generate("x", max_output_tokens=3)
        await eventually(lambda: admission.n_active == 0)
