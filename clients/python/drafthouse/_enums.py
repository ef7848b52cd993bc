"""Enums of the protos as words, with room for the values of a newer server."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from google.protobuf.descriptor import EnumDescriptor

__all__ = ["OpenEnum"]

_UNKNOWN = re.compile(r"unknown-(0|-?[1-9][0-9]*)")


class OpenEnum(enum.StrEnum):
    """An enum of the protos; its members are all that this SDK knows.

    A value of a newer server is none of them and is not lost: its text is "unknown-NUMBER", its
    `number` the one that the server has sent, and in a request it is sent as that.
    """

    @classmethod
    def _proto(cls) -> EnumDescriptor:
        """Returns the enum of the protos; subclasses say it: an enum has no abstract methods."""
        raise NotImplementedError

    @classmethod
    def _prefix(cls) -> str:
        """Returns how the names of the protos' values begin."""
        return cls._proto().values[0].name.removesuffix("UNSPECIFIED")

    @property
    def number(self) -> int:
        """The value's number in the protos."""
        found = _UNKNOWN.fullmatch(self.value)
        if found:
            return int(found[1])
        return self._proto().values_by_name[self._prefix() + self.name].number

    def __reduce_ex__(self, protocol: object) -> tuple[type[Self], tuple[str]]:
        """Copies and pickles by the value; Python 3.11.3 and older would look for the name."""
        return self.__class__, (self.value,)

    @classmethod
    def of(cls, number: int) -> Self:
        """Returns the value of a number, whether this SDK knows it or not."""
        return cls(f"unknown-{number}")

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """Returns the value of a number: its member, or else one that is made for it."""
        found = _UNKNOWN.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return None
        known = cls._proto().values_by_number.get(int(found[1]))
        name = known.name.removeprefix(cls._prefix()) if known else ""
        if name in cls.__members__:
            return cls[name]
        member = str.__new__(cls, found[0])
        member._name_, member._value_ = f"UNKNOWN_{found[1]}", found[0]
        made: Self = cls._value2member_map_.setdefault(found[0], member)  # type: ignore[assignment]  # made by it
        return made
