"""How much a request holds, read off its bytes before protobuf makes objects of them.

An empty chat message is two bytes on the wire and a hundred in memory, and two million of them are
checked one by one. So every list of a request has a bound of its length, every text one of its
bytes, and a request that breaks one is refused at the first element too many: what is looked at
grows with the bounds, not with what was sent. A list that is a little too long (`Bound.n_spare`) is
left to the rules of requests, which tell all that is wrong at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor

from drafthouse_server.errors import FieldViolation, InvalidRequest
from drafthouse_server.serving.requests import Bound

__all__ = ["N_EXTRAS_MAX", "N_UNPACKED_MAX", "Scan", "Shape", "TooMany", "shapes_of"]

N_EXTRAS_MAX = 64
"""Elements of a request that no encoder needs: unknown fields, fields given twice."""

N_UNPACKED_MAX = 1024
"""Numbers of lists that stand one by one, where every encoder of proto3 packs them."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_N_VARINT_BYTES_MAX = 10
_SPARE_BYTES = 4096
"""Bytes for numbers, tags and lengths, which `Shape.n_bytes_max` does not count."""

_KINDS = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _BYTES,
    FieldDescriptor.TYPE_BYTES: _BYTES,
    FieldDescriptor.TYPE_MESSAGE: _BYTES,
}
_WIDTHS = {_FIXED32: 4, _FIXED64: 8}


class TooMany(InvalidRequest):
    """A list has more elements than its bound allows (INVALID_FIELD).

    Args:
        path: Of the list, as in `FieldViolation.field`.
        n_max: The bound.
        n: Elements that were counted.
        is_all: Whether there are no more.
    """

    def __init__(self, path: str, n_max: int, n: int, *, is_all: bool) -> None:
        self.path = path
        self.n_max = n_max
        self.n = n
        """Elements, at least."""
        has = str(n) if is_all else f"more than {n - 1}"
        super().__init__([FieldViolation(path, f"must have at most {n_max} entries, has {has}")])


@dataclass(frozen=True, slots=True)
class _Field:
    """What is known of a field."""

    path: str
    kind: int
    """Wire type of one element."""
    bound: Bound
    is_list: bool
    is_text: bool
    message: Mapping[int, _Field] | None
    """Fields of the message that it is."""


class Shape:
    """The bounds of one message type, field by field.

    Args:
        descriptor: Of the message. No message of it may hold itself.
        bounds: By the path of each field; every list must have one, texts without one are refused
            here, so that no new field is without bounds.
    """

    def __init__(self, descriptor: Descriptor, bounds: Mapping[str, Bound]) -> None:
        self.fields = _fields(descriptor, bounds, "")
        self.n_bytes_max = _n_bytes_max(descriptor, bounds, "") + _SPARE_BYTES
        """Bytes of the longest message that keeps all bounds."""


def _fields(
    descriptor: Descriptor, bounds: Mapping[str, Bound], prefix: str
) -> Mapping[int, _Field]:
    found = {}
    for field in descriptor.fields:
        path = prefix + field.name
        inner = field.message_type
        kind = _KINDS.get(field.type, _VARINT)
        is_text = kind == _BYTES and inner is None
        if (field.is_repeated or is_text) and path not in bounds:
            raise LookupError(f"{descriptor.full_name}: {path} has no bound")
        fields = None if inner is None else _fields(inner, bounds, f"{path}.")
        bound = bounds.get(path, Bound())
        found[field.number] = _Field(path, kind, bound, field.is_repeated, is_text, fields)
    return found


def _n_bytes_max(descriptor: Descriptor, bounds: Mapping[str, Bound], prefix: str) -> int:
    n_alone, n_of_choices = 0, Counter[str]()
    for field in descriptor.fields:
        path = prefix + field.name
        bound = bounds.get(path, Bound())
        if bound.n_bytes_in_all is not None:
            n = bound.n_bytes_in_all
        elif field.message_type is not None:
            n = bound.n_read * (_n_bytes_max(field.message_type, bounds, f"{path}.") + 8)
        else:
            n = bound.n_read * ((bound.n_bytes_max or 0) + _N_VARINT_BYTES_MAX)
        choice = field.containing_oneof
        if choice is None:
            n_alone += n
        else:  # only one of them is there
            n_of_choices[choice.name] = max(n, n_of_choices[choice.name])
    return n_alone + sum(n_of_choices.values())


class Scan:
    """One walk over the bytes of one message.

    Args:
        shape: Bounds of its type.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._data = b""
        self._n_of_lists: Counter[str] = Counter()
        self._n_extras = 0
        self._n_unpacked = 0
        self.n_elements = 0
        """Elements that were looked at so far, one by one; a packed list is one."""

    @property
    def n_listed(self) -> int:
        """Elements of all lists, those of packed lists one by one."""
        return self._n_of_lists.total()

    def check(self, data: bytes) -> None:
        """Reads a message and stops at the first bound that it breaks.

        Raises:
            TooMany: a list is too long (INVALID_FIELD).
            InvalidRequest: a text is too long, or this is no such message (INVALID_FIELD).
        """
        self._data = data
        self._walk(0, len(data), self._shape.fields)
        if len(data) > self._shape.n_bytes_max:
            raise _refused(
                "request",
                f"must have at most {self._shape.n_bytes_max} bytes, has {len(data)}",
            )

    def _walk(self, at: int, end: int, fields: Mapping[int, _Field]) -> None:
        seen = 0
        while at < end:
            self.n_elements += 1
            tag, at = self._varint(at, end)
            kind = tag & 7
            start, stop = self._value(kind, at, end)
            if stop > end:
                raise _broken()
            at = stop
            field = fields.get(tag >> 3)
            if field is None:
                self._count_extra()
            elif field.is_list:
                self._check_list(field, kind, start, stop)
            else:
                bit = 1 << (tag >> 3)
                if seen & bit:
                    self._count_extra()
                seen |= bit
                self._check_one(field, kind, start, stop)

    def _value(self, kind: int, at: int, end: int) -> tuple[int, int]:
        """Returns where a value begins and ends, which may be beyond the message."""
        if kind == _BYTES:
            n, at = self._varint(at, end)
            return at, at + n
        if kind == _VARINT:
            return at, self._varint(at, end)[1]
        width = _WIDTHS.get(kind)
        if width is None:  # groups, which proto3 does not have
            raise _broken()
        return at, at + width

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Returns a number and where the next one begins."""
        value, shift = 0, 0
        for i in range(at, min(end, at + _N_VARINT_BYTES_MAX)):
            byte = self._data[i]
            value |= (byte & 127) << shift
            if byte < 128:  # the bit that says that more follow
                return value, i + 1
            shift += 7
        raise _broken()

    def _check_list(self, field: _Field, kind: int, start: int, stop: int) -> None:
        path, n_max, n_read = field.path, field.bound.n_max, field.bound.n_read
        if kind == _BYTES and field.kind != _BYTES:
            # A packed list is one element of the walk; that it comes in pieces is allowed, and odd.
            n_more, is_extra = self._count_packed(field.kind, start, stop), path in self._n_of_lists
            self._n_of_lists[path] += n_more
            if is_extra:
                self._count_extra()
            if self._n_of_lists[path] > n_read:
                raise TooMany(path, n_max, self._n_of_lists[path], is_all=True)
            return
        n = self._n_of_lists[path]
        if n >= n_read:
            raise TooMany(path, n_max, n + 1, is_all=False)
        self._n_of_lists[path] = n + 1
        if field.kind != _BYTES:
            self._n_unpacked += 1
            if self._n_unpacked > N_UNPACKED_MAX:
                raise _refused(path, f"must be packed: beyond {N_UNPACKED_MAX} numbers one by one")
        self._check_one(field, kind, start, stop, f"[{n}]")

    def _count_packed(self, kind: int, start: int, stop: int) -> int:
        if kind in _WIDTHS:
            return -(-(stop - start) // _WIDTHS[kind])
        # Every number has one byte without the bit that says that more follow.
        packed = np.frombuffer(self._data, np.uint8, stop - start, start)
        return int(np.count_nonzero(packed < 128))

    def _check_one(self, field: _Field, kind: int, start: int, stop: int, index: str = "") -> None:
        if field.message is not None and kind == _BYTES:
            self._walk(start, stop, field.message)
        elif field.is_text:
            n_bytes_max = field.bound.n_bytes_max
            if n_bytes_max is not None and stop - start > n_bytes_max:
                n_min = field.bound.n_bytes_min
                allowed = f"{n_min} to {n_bytes_max}" if n_min else f"at most {n_bytes_max}"
                rule = f"must have {allowed} bytes, has {stop - start}"
                raise _refused(field.path + index, rule)

    def _count_extra(self) -> None:
        self._n_extras += 1
        if self._n_extras > N_EXTRAS_MAX:
            raise _refused(
                "request", f"has more than {N_EXTRAS_MAX} fields that are unknown or given twice"
            )


def _refused(path: str, rule: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, rule)])


def _broken() -> InvalidRequest:
    return _refused("request", "is no message of this method's type: its bytes cannot be read")


def shapes_of(
    services: Iterable[ServiceDescriptor], bounds: Mapping[str, Bound]
) -> Mapping[str, Shape]:
    """Returns what the request of each method may hold, by the method's full name.

    Raises:
        LookupError: a list or a text of a request has no bound.
    """
    return {
        f"/{service.full_name}/{method.name}": Shape(method.input_type, bounds)
        for service in services
        for method in service.methods
    }
