"""What the clients have in common below their methods: channels, headers, values of messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from drafthouse._errors import FieldViolation, InvalidField

__all__ = [
    "CHANNEL_OPTIONS",
    "DEFAULT_TARGET",
    "HEALTH_METHOD",
    "NotCopied",
    "call_metadata",
    "checked_key",
    "has_begun",
    "named",
    "put",
    "put_all",
    "wrong_type",
]

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where `drafthouse serve` listens when it is not told otherwise."""

HEALTH_METHOD = "/grpc.health.v1.Health/Check"

_N_BYTES_MAX = 64 * 1024 * 1024
"""Of a message."""

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", _N_BYTES_MAX),
    ("grpc.max_receive_message_length", _N_BYTES_MAX),
    # A stream whose peer has vanished without a word fails within 80 s instead of never.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Behind a long outage gRPC would look for the server once in two minutes, and fail all calls
    # until then.
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Nor would it look up a name again within half a minute, behind which another server may be.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
)

_BEGUN_KEY = "drafthouse-request-id"
"""Key of the initial metadata by which a server says that it has begun a generation."""

_SENDABLE = re.compile(r"[\x20-\x7e]*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""As the server has it: another id it would leave out of its log."""

_N_BITS_SHOWN = 128


class NotCopied:
    """What holds a connection, or a call of one: a copy would close it for the other."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        hint = "send its result" if kind.endswith("Stream") else "make one in each process"
        raise TypeError(f"a drafthouse.{kind} cannot be copied or pickled; {hint}")


def checked_key(api_key: str | None) -> str | None:
    """Returns an API key that a header can carry.

    Raises:
        TypeError: it is no text.
        ValueError: it has a character that none can, such as the newline of a file.
    """
    if not isinstance(api_key, str | None):
        raise wrong_type("api_key", "text", api_key)
    found = None if api_key is None else _SENDABLE.match(api_key)
    if found is not None and found.end() < len(found.string):
        raise ValueError(
            f"character {found.end() + 1} of {len(found.string)} of the API key is not printable"
            " ASCII, so that no header can carry the key; was it read from a file with a newline"
            " at its end?"
        )
    return api_key


def has_begun(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Returns whether a server has said that it has begun a generation, which it bills then."""
    return any(key == _BEGUN_KEY for key, _ in initial_metadata or ())


def call_metadata(api_key: str | None, request_id: str | None) -> tuple[tuple[str, str], ...]:
    """Returns what accompanies a call.

    Raises:
        InvalidField: the request id is none (INVALID_FIELD).
        TypeError: it is no text.
    """
    if not isinstance(request_id, str | None):
        raise wrong_type("request_id", "text", request_id)
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        description = f"must be 1 to 64 of [A-Za-z0-9._-], is {_shown(request_id)}"
        raise _invalid("request_id", f"request_id {description}", description)
    entries = (
        ("authorization", f"Bearer {api_key}" if api_key is not None else None),
        ("x-request-id", request_id),
    )
    return tuple((key, value) for key, value in entries if value is not None)


def put(message: Message, path: str, name: str, rule: str, value: object) -> None:
    """Writes a value into a message.

    Args:
        message: to write into.
        path: of the field, such as "sampling.seed".
        name: by which the caller knows the value.
        rule: what it may be, such as "an integer in [-100, 100]".
        value: that the caller has given.

    Raises:
        InvalidField: no message can carry the value (INVALID_FIELD).
        TypeError: the value is of the wrong type.
    """
    *outer, field = path.split(".")
    for part in outer:
        message = getattr(message, part)
    with named(name, rule, value):
        if message.DESCRIPTOR.fields_by_name[field].type == FieldDescriptor.TYPE_STRING:
            _check_text(name, value)
        setattr(message, field, value)


def put_all(
    values: MutableSequence[Any], name: str, rule: str, item_rule: str, given: object, *, kind: type
) -> None:
    """Writes a list into a message.

    Args:
        values: the list of the message.
        name: by which the caller knows it.
        rule: what it may be, such as "a sequence of token ids".
        item_rule: what each of it may be.
        given: by the caller.
        kind: of each of it, `str` or `int`.

    Raises:
        InvalidField: no message can carry one of them (INVALID_FIELD).
        TypeError: there is no list, or something in it is of the wrong type.
    """
    if not isinstance(given, Iterable) or isinstance(given, _NO_LISTS):
        raise wrong_type(name, rule, given)
    items = list(given)
    if kind is int:
        with suppress(TypeError, ValueError, OverflowError):
            values.extend(items)  # there may be a hundred thousand, and hardly ever a wrong one
            return
    for i, item in enumerate(items):
        with named(f"{name}[{i}]", item_rule, item):
            if kind is str:
                _check_text(f"{name}[{i}]", item)
            values.append(item)


_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
"""What can be iterated over, and is no list of what it yields."""


@contextmanager
def named(name: str, rule: str, value: object) -> Iterator[None]:
    """Says of a value that protobuf refuses what it is, and what it may be.

    Raises:
        InvalidField: no message can carry the value (INVALID_FIELD).
        TypeError: it is of the wrong type.
    """
    try:
        yield
    except TypeError as error:
        raise wrong_type(name, rule, value) from error
    except UnicodeEncodeError as error:  # says where: the text itself may be a secret
        description = f"must be Unicode, but its character {error.start + 1} is a lone surrogate"
        raise _invalid(name, f"{name} cannot be sent: it {description}", description) from error
    except (ValueError, OverflowError) as error:
        description = f"must be {rule}, is {_shown(value)}"
        raise _invalid(name, f"{name} cannot be sent: it {description}", description) from error


def wrong_type(name: str, rule: str, value: object) -> TypeError:
    """Returns the error of a value of the wrong type."""
    return TypeError(f"{name} must be {rule}, not {type(value).__name__}")


def _invalid(field: str, message: str, description: str) -> InvalidField:
    return InvalidField(message, violations=[FieldViolation(field, description)])


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):  # protobuf takes bytes as well, and nothing where None is given
        raise TypeError("no text")
    if len(value) > _N_BYTES_MAX:  # of 2 GiB and more gRPC for asyncio sends none, without a word
        description = f"must have at most {_N_BYTES_MAX} bytes, has {len(value)} or more"
        raise _invalid(name, f"{name} cannot be sent: it {description}", description)


def _shown(value: object) -> str:
    """Returns a value as an error shows it, which is not the whole of a long one."""
    if isinstance(value, int) and value.bit_length() > _N_BITS_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)
