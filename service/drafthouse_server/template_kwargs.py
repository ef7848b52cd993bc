"""Arguments of a chat template, such as `enable_thinking`: a JSON object, bounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["N_BYTES_MAX", "read", "texts_of", "values_of"]

N_BYTES_MAX = 64 << 10
"""Most bytes of the arguments of one chat: some templates take documents."""
_N_ARGUMENTS_MAX = 64
_DEPTH_MAX = 8
_INTEGER_MAX = 1 << 53
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_OF_THE_SERVER = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


def read(text: str) -> Mapping[str, Any]:
    """Returns arguments by their names.

    Args:
        text: A JSON object; empty is none.

    Raises:
        ValueError: it is something else, too much, or sets what is not a caller's; says what is
            expected, as a sentence without its subject.
    """
    if not text:
        return {}
    n = len(text.encode())
    if n > N_BYTES_MAX:
        raise ValueError(f"must have at most {N_BYTES_MAX} bytes, has {n}")
    values = _parse(text)
    if len(values) > _N_ARGUMENTS_MAX:
        raise ValueError(f"must have at most {_N_ARGUMENTS_MAX} arguments, has {len(values)}")
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            rule = "1 to 64 letters, digits and _, the first no digit"
            raise ValueError(f"must have names of {rule}, has {name[:65]!a}")
        if name in _OF_THE_SERVER:
            raise ValueError(f"must not set {name}, which is the server's own")
        if name == "enable_thinking" and not isinstance(value, bool):
            raise ValueError("must have true or false for enable_thinking")
        _check(name, value, 1)
    return values


def values_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns arguments that were read as JSON texts by their names."""
    return {name: json.dumps(value) for name, value in arguments.items()}


def texts_of(value: object) -> Iterator[str]:
    """Yields all texts in a value, names among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def _parse(text: str) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError where a text is none."""
    try:
        values = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at character {error.pos}"
        raise ValueError(f"must be a JSON object: {where}") from error
    except RecursionError as error:
        raise ValueError(f"must nest at most {_DEPTH_MAX} levels") from error
    if not isinstance(values, dict):
        raise ValueError('must be a JSON object, such as {"enable_thinking": false}')
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("must not have a name twice in one object")
    return values


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"must not have {word}, which is no number of JSON")


def _check(name: str, value: object, depth: int) -> None:
    """Raises ValueError where a template could not be given a value."""
    if depth > _DEPTH_MAX:
        raise ValueError(f"must nest at most {_DEPTH_MAX} levels, {name} nests more")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_text(name, key)
            _check(name, inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(name, inner, depth + 1)
    elif isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"must have numbers that a double holds, {name} has one beyond")
    elif isinstance(value, int) and abs(value) > _INTEGER_MAX:
        raise ValueError(f"must have integers in [-2^53, 2^53], {name} has one beyond")


def _check_text(name: str, text: str) -> None:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"must not have NUL characters or lone surrogates, {name} has")
