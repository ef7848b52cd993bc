"""The SDK's enums are the protos', and what a newer server knows besides is told by its number."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import typing
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

import drafthouse
from drafthouse._enums import OpenEnum
from drafthouse._options import generate_request
from drafthouse.v1 import (
    admin_pb2,
    errors_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from drafthouse_server.config import DRAFT_TYPES
from drafthouse_server.engine.fake import FakeEngine

if TYPE_CHECKING:
    from tests.conftest import ServerFactory

FILES = (admin_pb2, errors_pb2, generation_pb2, model_pb2)
REASON_CLASSES = [
    kind for code in drafthouse.DrafthouseError.__subclasses__() for kind in code.__subclasses__()
]
NEWER = 99
"""A value that no enum has yet."""


def nested(message: Descriptor) -> Iterator[EnumDescriptor]:
    yield from message.enum_types
    for inner in message.nested_types:
        yield from nested(inner)


def all_enums() -> list[EnumDescriptor]:
    """Returns every enum of the protos, those inside messages too."""
    found: list[EnumDescriptor] = []
    for file in FILES:
        found += file.DESCRIPTOR.enum_types_by_name.values()
        for message in file.DESCRIPTOR.message_types_by_name.values():
            found += nested(message)
    return found


def members(enum: EnumDescriptor) -> set[str]:
    """Returns the names of an enum's values, without the enum's own."""
    names = [value.name for value in enum.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    assert all(name.startswith(prefix) for name in names)
    return {name.removeprefix(prefix) for name in names}


@pytest.mark.parametrize("enum", all_enums(), ids=lambda enum: enum.name)
def test_the_sdk_knows_every_value_of_every_enum(enum: EnumDescriptor) -> None:
    if enum.name == "ErrorReason":  # each is a class
        known = {kind.default_reason for kind in REASON_CLASSES} | {"UNSPECIFIED"}
    else:
        known = set(getattr(drafthouse, enum.name).__members__)
    assert known == members(enum)


def test_the_enums_of_the_protos_were_found() -> None:
    assert {enum.name for enum in all_enums()} == {
        "ErrorReason",
        "FinishReason",
        "ServerState",
        "SpeculationMode",
        "StoreState",
    }


def test_every_mode_can_be_asked_for_by_its_word() -> None:
    hints = typing.get_type_hints(drafthouse.GenerateOptions)["speculation"]
    words = {word for kind in typing.get_args(hints) for word in typing.get_args(kind)}
    assert words == set(drafthouse.SpeculationMode) - {"unspecified"}


def test_a_model_has_every_field_of_the_proto() -> None:
    fields = {field.name for field in dataclasses.fields(drafthouse.Model)}
    assert fields == set(model_pb2.Model.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("draft_type", DRAFT_TYPES)
async def test_the_mode_of_every_draft_type_is_told(
    start_server: ServerFactory, draft_type: str
) -> None:
    n_draft_max = 0 if draft_type == "none" else 4
    limits = dataclasses.replace(
        FakeEngine().limits, draft_type=draft_type, n_draft_max=n_draft_max
    )
    server = await start_server(FakeEngine(limits))
    word = "ngram" if draft_type.startswith("ngram") else draft_type
    mode = drafthouse.SpeculationMode("off" if draft_type == "none" else word)
    async with drafthouse.AsyncClient(server.target) as client:
        result = await client.generate("x", max_output_tokens=4, speculation=mode)
        model = await client.get_model()
        assert await client.list_models() == [model]
    assert result.speculation.mode is mode
    assert model.speculation_mode is mode


class NewerGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with an event and with values that this SDK does not know."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # the stub is not typed for asyncio
        unknown = generation_pb2.GenerateResponse()
        unknown.MergeFromString(bytes([0xFA, 0x07, 0x01, 0x00]))  # field 127, of one byte
        await context.write(unknown)
        chunk = generation_pb2.Chunk(text="a", token_ids=[97])
        await context.write(generation_pb2.GenerateResponse(chunk=chunk))
        result = generation_pb2.GenerationResult(
            finish_reason=NEWER,  # type: ignore[arg-type]  # a number of a newer server
            speculation=generation_pb2.SpeculationStatistics(mode=NEWER),  # type: ignore[arg-type]  # a number of a newer server
        )
        await context.write(generation_pb2.GenerateResponse(result=result))


class NewerModels(model_pb2_grpc.ModelServiceServicer):
    """Serves a model that drafts as none does yet."""

    model = model_pb2.Model(name="m", speculation_mode=NEWER)  # type: ignore[arg-type]  # a number of a newer server

    async def GetModel(self, request: Any, context: Any) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=self.model)

    async def ListModels(self, request: Any, context: Any) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self.model])


@pytest.fixture
async def newer_server() -> AsyncIterator[str]:
    server = grpc.aio.server()
    service = NewerGeneration()  # type: ignore[abstract]  # nothing else is called
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(NewerModels(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def check(result: drafthouse.Result, models: list[drafthouse.Model]) -> None:
    assert (result.text, result.token_ids) == ("a", (97,))
    assert (result.finish_reason, result.finish_reason.number) == (f"unknown-{NEWER}", NEWER)
    assert result.speculation.mode.number == NEWER
    for model in models:
        assert model.name == "m"
        assert model.speculation_mode is result.speculation.mode


OPEN = (drafthouse.FinishReason, drafthouse.SpeculationMode)


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("number", [99, -1, 2**31 - 1, -(2**31)])
def test_a_value_that_is_not_known_keeps_its_number(kind: type[OpenEnum], number: int) -> None:
    value = kind.of(number)
    assert (str(value), value.number) == (f"unknown-{number}", number)
    assert value is kind.of(number) is kind(f"unknown-{number}")
    assert value is copy.deepcopy(value) is pickle.loads(pickle.dumps(value))  # noqa: S301  # ours
    assert isinstance(value, kind)
    assert value not in list(kind)


@pytest.mark.parametrize("kind", OPEN)
def test_a_value_that_is_known_is_its_member(kind: type[OpenEnum]) -> None:
    for member in kind:
        assert kind.of(member.number) is kind(f"unknown-{member.number}") is member
    for text in ("unknown", "unknown-", "unknown-01", "unknown-x", "99"):
        with pytest.raises(ValueError, match="is not a valid"):
            kind(text)


def test_a_mode_that_is_not_known_is_sent_as_its_number() -> None:
    mode = drafthouse.SpeculationMode.of(NEWER)
    assert generate_request("x", {"speculation": mode}).speculation.mode == NEWER


async def test_what_a_newer_server_says_never_raises(newer_server: str) -> None:
    async with drafthouse.AsyncClient(newer_server) as client:
        models = [await client.get_model(), *await client.list_models()]
        check(await client.generate("x"), models)


async def test_nor_does_it_in_the_blocking_client(newer_server: str) -> None:
    def use() -> None:
        with drafthouse.Client(newer_server) as client:
            models = [client.get_model(), *client.list_models()]
            check(client.generate("x").result(), models)

    await asyncio.to_thread(use)
