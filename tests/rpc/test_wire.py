"""What a request holds is read off its bytes, up to its bounds and no further."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st
from tests.support.http2 import field, varint

from drafthouse.v1 import generation_pb2, model_pb2, usage_pb2
from drafthouse_server.errors import InvalidRequest
from drafthouse_server.rpc.wire import N_EXTRAS_MAX, N_UNPACKED_MAX, Scan, Shape, TooMany, shapes_of
from drafthouse_server.serving.requests import Bound, field_bounds

N_CONTEXT, N_MESSAGES = 2048, 300
BOUNDS = field_bounds(N_CONTEXT, N_MESSAGES)
SERVICES: list[Any] = [
    *generation_pb2.DESCRIPTOR.services_by_name.values(),
    *model_pb2.DESCRIPTOR.services_by_name.values(),
    *usage_pb2.DESCRIPTOR.services_by_name.values(),
    *health_pb2.DESCRIPTOR.services_by_name.values(),
]
SHAPES = shapes_of(SERVICES, BOUNDS)
GENERATE = SHAPES["/drafthouse.v1.GenerationService/Generate"]
METHODS = {f"/{s.full_name}/{m.name}": m.input_type for s in SERVICES for m in s.methods}


def fields_of(descriptor: Descriptor, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Yields every field of a message and of the messages in it, by its path."""
    for part in descriptor.fields:
        yield prefix + part.name, part
        if part.message_type is not None:
            yield from fields_of(part.message_type, f"{prefix}{part.name}.")


BOUNDED = [
    (method, path)
    for method, descriptor in METHODS.items()
    for path, _ in fields_of(descriptor)
    if path in BOUNDS
]
LISTS = [
    (method, path) for method, path in BOUNDED if dict(fields_of(METHODS[method]))[path].is_repeated
]


def filled(descriptor: Descriptor, path: str, n: int | None = None) -> Message:
    """Returns a message in which one field holds as much as its bound allows, or `n` elements."""
    message: Any = GetMessageClass(descriptor)()
    *outer, name = path.split(".")
    inner = message
    for part in outer:
        inner = getattr(inner, part)
        if hasattr(inner, "add"):  # a text of an element
            inner = inner.add()
    bound = BOUNDS[path]
    n_max = bound.n_max if n is None else n
    text = "x" * (bound.n_bytes_max or 0)
    value = getattr(inner, name)
    if isinstance(value, str):
        setattr(inner, name, text)
    elif inner.DESCRIPTOR.fields_by_name[name].message_type is not None:
        for _ in range(n_max):
            value.add().SetInParent()
    else:
        value.extend([text or 1] * n_max)
    return message  # type: ignore[no-any-return]  # of a class found by name


def scanned(shape: Shape, data: bytes) -> tuple[int, InvalidRequest | None]:
    """Returns how many elements were looked at, and what was wrong."""
    scan = Scan(shape)
    try:
        scan.check(data)
    except InvalidRequest as error:
        return scan.n_elements, error
    return scan.n_elements, None


@pytest.mark.parametrize(("method", "path"), BOUNDED, ids=lambda part: part.split("/")[-1])
def test_a_field_at_its_bound_passes(method: str, path: str) -> None:
    data = filled(METHODS[method], path).SerializeToString()
    assert scanned(SHAPES[method], data)[1] is None


@pytest.mark.parametrize(("method", "path"), LISTS, ids=lambda part: part.split("/")[-1])
def test_a_list_beyond_its_bound_is_refused_at_the_first_element_too_many(
    method: str, path: str
) -> None:
    bound, descriptor = BOUNDS[path], METHODS[method]
    n_read = bound.n_read
    data = filled(descriptor, path, 50 * n_read).SerializeToString()
    n, error = scanned(SHAPES[method], data)
    assert isinstance(error, TooMany)
    assert (error.path, error.n > n_read) == (path, True)
    assert n <= n_read + 1 + path.count(".")
    assert f"must have at most {bound.n_max} entries, has " in error.message
    assert f"has {50 * n_read}" in error.message or f"has more than {n_read}" in error.message


@pytest.mark.parametrize(("method", "path"), LISTS, ids=lambda part: part.split("/")[-1])
def test_a_list_a_little_beyond_its_bound_is_left_to_the_rules(method: str, path: str) -> None:
    """They tell its length, and all else that is wrong with the request."""
    bound, descriptor = BOUNDS[path], METHODS[method]
    data = filled(descriptor, path, bound.n_read).SerializeToString()
    assert scanned(SHAPES[method], data)[1] is None
    is_ids_of_prompt = path in {"prompt.tokens.ids", "token_ids"}
    assert (bound.n_spare > 0) != is_ids_of_prompt  # counted at once, whatever their number


def test_every_list_and_text_needs_a_bound() -> None:
    with pytest.raises(LookupError, match="has no bound"):
        shapes_of(SERVICES, {path: Bound() for path in BOUNDS if path != "stop.token_ids"})


def test_millions_of_empty_messages_cost_the_bound() -> None:
    data = field(2, field(3, b"\x0a\x00" * 1_400_000))
    n, error = scanned(GENERATE, data)
    assert isinstance(error, TooMany)
    assert error.path == "prompt.chat.messages"
    assert n == 2 + N_MESSAGES + BOUNDS["prompt.chat.messages"].n_spare + 1


def test_millions_of_ids_are_one_element_and_counted() -> None:
    n, error = scanned(GENERATE, field(2, field(2, field(1, b"\x05" * 3_900_000))))
    assert isinstance(error, TooMany)
    assert (error.path, error.n, n) == ("prompt.tokens.ids", 3_900_000, 3)


def test_ids_of_several_bytes_count_once() -> None:
    ids = b"".join(varint(token) for token in range(0, 200 * N_CONTEXT, 200)[:N_CONTEXT])
    assert scanned(GENERATE, field(2, field(2, field(1, ids))))[1] is None


def test_a_list_in_pieces_is_one_list() -> None:
    pieces = field(1, b"\x05" * N_CONTEXT) + field(1, b"\x05")
    _, error = scanned(GENERATE, field(2, field(2, pieces)))
    assert isinstance(error, TooMany)
    whole_in_two_prompts = 2 * field(2, field(2, field(1, b"\x05" * N_CONTEXT)))
    _, error = scanned(GENERATE, whole_in_two_prompts)
    assert isinstance(error, TooMany)


@pytest.mark.parametrize(
    "odd",
    [
        b"\x78\x00",  # an unknown number
        field(15, b""),  # an unknown message
        field(2, b""),  # a prompt, again
        b"\x40\x00",  # the priority, again
        field(2, field(2, field(1, b""))),  # a packed list of nothing
    ],
    ids=["number", "unknown", "prompt", "priority", "list"],
)
def test_what_no_encoder_writes_is_allowed_a_few_times(odd: bytes) -> None:
    assert scanned(GENERATE, odd * 8)[1] is None
    n, error = scanned(GENERATE, odd * 1_000_000)
    assert error is not None
    assert n <= 4 * (N_EXTRAS_MAX + 2)


def test_numbers_one_by_one_are_few() -> None:
    def prompt(n: int) -> bytes:
        return field(2, field(2, b"\x08\x05" * n))

    assert scanned(GENERATE, prompt(N_UNPACKED_MAX))[1] is None
    n, error = scanned(GENERATE, prompt(N_UNPACKED_MAX + 1))
    assert error is not None
    assert "packed" in error.message
    assert n <= N_UNPACKED_MAX + 3


def test_a_message_that_keeps_every_other_bound_has_a_size() -> None:
    chat = b"".join(field(1, field(2, b"x" * 32_000)) for _ in range(N_MESSAGES))
    n, error = scanned(GENERATE, field(2, field(3, chat)))
    assert error is not None
    assert error.violations[0].field == "request"
    assert n == 2 + 2 * N_MESSAGES


BROKEN = {
    "an end too early": field(2, b"abc")[:-1],
    "a tag without a value": b"\x08",
    "a number without end": b"\x08" + b"\xff" * 20,
    "a group": b"\x0b\x0c",
    "half of four bytes": field(4, b"\x0d\x00\x00"),
    "an inner length beyond the outer one": field(2, b"\x0a\x7fabc"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_are_no_message_are_refused(name: str) -> None:
    _, error = scanned(GENERATE, BROKEN[name])
    assert error is not None
    assert error.violations[0].field == "request"


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused_and_none_is_looked_at_twice(data: bytes) -> None:
    n, error = scanned(GENERATE, data)
    assert n <= len(data)
    if error is None:
        with contextlib.suppress(DecodeError):  # it leaves texts and the number 0 to the parser
            generation_pb2.GenerateRequest.FromString(data)


@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.lists(st.tuples(st.text(max_size=5), st.text(max_size=20)), max_size=10),
    st.integers(-100, 100),
)
def test_what_an_encoder_writes_passes(
    ids: list[int], messages: list[tuple[str, str]], priority: int
) -> None:
    request = generation_pb2.GenerateRequest(priority=priority)
    request.stop.token_ids.extend(ids)
    for role, content in messages:
        request.prompt.chat.messages.add(role=role, content=content)
    request.sampling.temperature = 0.5
    n, error = scanned(GENERATE, request.SerializeToString())
    assert error is None
    assert n <= 10 + 3 * len(messages)
