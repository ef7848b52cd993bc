"""Arguments of a chat template, such as `enable_thinking`: read as JSON, written as Jinja.

The engine renders a template with messages alone. So what a caller sets stands before the
template's own text, as assignments, and an assignment is all that an argument can become.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

__all__ = ["N_BYTES_MAX", "assignments", "read", "texts_of"]

N_BYTES_MAX = 4096
"""Most bytes of the arguments of one chat as JSON; as Jinja, too."""
_N_ARGUMENTS_MAX = 64
_DEPTH_MAX = 8
_INTEGER_MAX = 1 << 53
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")
_OF_THE_SERVER = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
_OF_THE_TEMPLATE = {"dict", "namespace", "raise_exception", "range", "strftime_now", "not"} | {
    word for value in ("false", "none", "true") for word in (value, value.title())
}
_ESCAPES = str.maketrans(
    {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
)


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
            raise ValueError(f"must have names of letters, digits and _, has {name[:64]!a}")
        if name in _OF_THE_SERVER | _OF_THE_TEMPLATE:
            raise ValueError(f"must not set {name}, which is the server's or the template's own")
        _check(name, value, 1)
    if len(assignments(values).encode()) > N_BYTES_MAX + 16 * _N_ARGUMENTS_MAX:
        raise ValueError(f"must have at most {N_BYTES_MAX} bytes with its numbers written out")
    return values


def assignments(values: Mapping[str, Any]) -> str:
    """Returns what stands before a template so that it finds arguments that were read."""
    tags = "".join(f"{{% set {name}={_literal(value)} %}}" for name, value in values.items())
    # A newline behind a tag is dropped, so that the template's first line stays a first line.
    return f"{tags}\n" if tags else ""


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
        if not math.isfinite(value) or "e" in repr(value):
            raise ValueError(
                f"must have fractions of 0 or in [0.0001, 1e16), positive or negative, {name} has"
                " another"
            )
    elif isinstance(value, int) and abs(value) > _INTEGER_MAX:
        raise ValueError(f"must have integers in [-2^53, 2^53], {name} has one beyond")


def _check_text(name: str, text: str) -> None:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"must not have NUL characters or lone surrogates, {name} has")


def _literal(value: object) -> str:
    """Returns a value that was checked as an expression of a template."""
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    if isinstance(value, dict):
        return f"{{{','.join(f'{_literal(k)}:{_literal(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)
