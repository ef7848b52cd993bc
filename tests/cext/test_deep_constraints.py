"""Deep patterns and schemas become grammars by little work, or are refused."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from drafthouse_engine import (
    BadConstraint,
    BadGrammar,
    grammar_accepts,
    json_schema_grammar,
    regex_grammar,
)

N_CALLS_MAX = 1_000_000
"""Some 0.3 s; what grew with each level twice as much took thousands of times as many."""


class TooMuch(BaseException):
    """More calls than are little work."""


@contextlib.contextmanager
def little_work(n_most: int = N_CALLS_MAX) -> Iterator[None]:
    """Ends a block that takes many calls of Python and C, on any machine as many."""
    n_calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")
        if n_calls > n_most:
            sys.setprofile(None)
            raise TooMuch

    before: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 40 + "a?" + ")*" * 40,
        "(" * 40 + "a?" + ")+" * 40,
        "(" * 40 + "a?" + "b?)*" * 40,
        "(" * 40 + "a?" + "){0,3}" * 40,
        "(" * 64 + "a" + "b)*" * 64,
        "(" * 64 + "a|" + "b)?" * 64,
    ],
    ids=range(6),
)
def test_nested_repetitions_take_little_work(pattern: str) -> None:
    with little_work(), contextlib.suppress(BadGrammar):
        regex_grammar(pattern)


def test_many_times_many_is_many() -> None:
    grammar = regex_grammar("(" * 40 + "a?" + ")*" * 40)
    assert [text for text in ("", "a", "aaaa", "b") if grammar_accepts(grammar, text)] == [
        "",
        "a",
        "aaaa",
    ]
    grammar = regex_grammar("(((ab)+)+)+")
    assert [text for text in ("", "ab", "abab") if grammar_accepts(grammar, text)] == ["ab", "abab"]


def in_lists(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def in_other_members(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "additionalProperties": schema}
    return schema


def in_both(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth // 2):
        schema = {"type": "array", "items": {"type": "object", "properties": {"a": schema}}}
    return schema


def in_objects(depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def in_choices(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for i in range(depth):
        schema = {"anyOf": [schema, {"const": i}]}
    return schema


def referred(n: int) -> dict[str, Any]:
    defs: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(n)
    }
    return {"$defs": defs | {f"a{n}": {"type": "null"}}, "$ref": "#/$defs/a0"}


DEEP_PATTERN = {"type": "string", "pattern": "^" + "(a|" * 63 + "b" + ")" * 63 + "$"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (in_lists(63), "[" * 63 + "null" + "]" * 63),
        (in_other_members(63), '{"x":' * 63 + "null" + "}" * 63),
        (in_both(62), '[{"a":' * 31 + "null" + "}]" * 31),
        (in_objects(63, {"type": "null"}), '{"a":' * 63 + "null" + "}" * 63),
        (in_choices(62), "null"),
        (referred(200), "[" * 200 + "null" + "]" * 200),
        (
            {"type": "object", "properties": {"x" * 127: {}}, "additionalProperties": True},
            '{"' + "x" * 127 + '": 1, "' + "x" * 126 + '": 2}',
        ),
        (in_objects(60, DEEP_PATTERN), '{"a":' * 60 + '"b"' + "}" * 60),
    ],
    ids=["lists", "others", "both", "objects", "choices", "references", "name", "pattern"],
)
def test_deep_schemas_take_little_work(schema: dict[str, Any], text: str) -> None:
    with little_work():
        grammar = json_schema_grammar(schema)
    assert grammar_accepts(grammar, text)
    assert not grammar_accepts(grammar, text[:-1])


def referred_at_once(n: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}
    return {"$defs": defs | {f"{n}": {"type": "null"}}, "$ref": "#/$defs/0"}


def referred_back(n: int) -> dict[str, Any]:
    """Each needs the one before it, and leads to the next."""

    def one(i: int) -> dict[str, Any]:
        back = {"b": {"$ref": f"#/$defs/{i - 1}"}} if i > 0 else {}
        further = {"f": {"$ref": f"#/$defs/{i + 1}"}} if i < n else {}
        return {"properties": back | further, "required": list(back)}

    return {"$defs": {f"{i}": one(i) for i in range(n + 1)}, "$ref": "#/$defs/0"}


def test_long_chains_of_references_take_little_work() -> None:
    with little_work(500_000):
        grammar = json_schema_grammar(referred_at_once(1500))
    assert grammar_accepts(grammar, "null")
    with little_work(500_000):
        grammar = json_schema_grammar(referred_back(200))
    assert grammar_accepts(grammar, '{"f":{"b":{},"f":{"b":{"b":{}}}}}')
    assert not grammar_accepts(grammar, '{"f":{"f":{"b":{"b":{}}}}}')


def test_names_that_no_grammar_holds_are_refused_at_once() -> None:
    names = [chr(97 + i % 60) * 120 for i in range(60)]
    schema = {"properties": {name: {} for name in names}, "additionalProperties": True}
    with (
        little_work(),
        pytest.raises(BadConstraint, match="too many or too long") as caught,
    ):
        json_schema_grammar(schema)
    assert caught.value.where == "#"


def test_equal_parts_of_a_schema_are_written_once() -> None:
    part = {"properties": {"x": {"type": "array", "items": {"type": "string"}}, "y": {}}}
    one = {"properties": {"p0": part}}
    many = {"properties": {f"p{i}": part | {"title": f"{i}"} for i in range(20)}}
    sizes = [len(json_schema_grammar(schema)) for schema in (one, many)]
    assert sizes[1] < sizes[0] + 20 * 150


def test_what_nests_beyond_the_stack_is_refused() -> None:
    def descend(n: int) -> None:
        if n > 0:
            descend(n - 1)
            return
        with pytest.raises(BadConstraint, match="too deep"):
            regex_grammar("(" * 64 + "a" + ")" * 64)
        with pytest.raises(BadConstraint):
            json_schema_grammar(in_choices(60))

    n_frames = len(inspect.stack(0))
    descend(sys.getrecursionlimit() - n_frames - 150)
