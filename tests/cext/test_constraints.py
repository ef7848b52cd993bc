"""Regular expressions, choices and JSON schemas become grammars that accept just their texts."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import string
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from drafthouse_engine import (
    BadConstraint,
    BadGrammar,
    check_grammar,
    choice_grammar,
    grammar_accepts,
    json_schema_grammar,
    regex_grammar,
)
from drafthouse_engine.gbnf import Chars, Seq
from drafthouse_engine.regex import Regex

SAMPLES = {
    "a": "a", "b": "b", "ab": "ab", ".": "x", "[ab]": "b", "[^a]": "z", "[b-d]": "c", r"\d": "7",
    r"\w": "_", r"\s": " ", r"\.": ".", "x?": "x", "é": "é", "[]a]": "]",
}  # fmt: skip
"""Atoms, and a text of each."""

COUNTS = {
    "": (1, 1), "*": (0, 3), "+": (1, 3), "?": (0, 1), "{2}": (2, 2), "{1,3}": (1, 3),
    "{0,2}": (0, 2), "{1,}": (1, 3), "*?": (0, 3),
}  # fmt: skip
"""Quantifiers, and how often a text may have what stands before."""

TEXTS = st.text(alphabet="abcdx.1_ é\n]", max_size=6)


@dataclass(frozen=True)
class Item:
    """An atom, or a group of branches, with its quantifier."""

    branches: tuple[Item | str, ...]
    quantifier: str

    def __str__(self) -> str:
        is_atom = isinstance(self.branches[0], str)
        inner = "|".join(map(str, self.branches))
        return f"(?:{inner}){self.quantifier}" if is_atom else f"({inner}){self.quantifier}"

    def text(self, data: st.DataObject) -> str:
        """Draws a text that it matches."""
        found = ""
        for _ in range(data.draw(st.integers(*COUNTS[self.quantifier]))):
            branch = data.draw(st.sampled_from(self.branches))
            found += SAMPLES[branch] if isinstance(branch, str) else branch.text(data)
        return found


QUANTIFIERS = st.sampled_from([*COUNTS, ""])
ITEMS = st.recursive(
    st.builds(Item, st.tuples(st.sampled_from([*SAMPLES])), QUANTIFIERS),
    lambda inner: st.builds(Item, st.lists(inner, min_size=1, max_size=3).map(tuple), QUANTIFIERS),
    max_leaves=3,
)
PATTERNS = st.lists(ITEMS, max_size=3)


@settings(max_examples=200, deadline=None)
@given(items=PATTERNS, texts=st.lists(TEXTS, min_size=5, max_size=10))
def test_a_pattern_accepts_what_re_matches_as_a_whole(items: list[Item], texts: list[str]) -> None:
    pattern = "".join(map(str, items))
    grammar = regex_grammar(pattern)
    for text in texts:
        is_match = re.fullmatch(pattern, text, re.ASCII) is not None
        assert grammar_accepts(grammar, text) == is_match, (pattern, text)


@settings(max_examples=200, deadline=None)
@given(items=PATTERNS, data=st.data())
def test_a_pattern_accepts_texts_made_for_it(items: list[Item], data: st.DataObject) -> None:
    """Longer texts than above: `re` would take 2^n steps for nested repetitions."""
    pattern = "".join(map(str, items))
    text = "".join(item.text(data) for item in items)
    assume(len(text) <= 16)
    assert grammar_accepts(regex_grammar(pattern), text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"^\d{4}-\d{2}$", ["2026-11"], ["2026-1", "2026-111"]),
        (r"(?P<word>\w+)@[a-z.]+", ["a_1@b.c"], ["@b.c", "a@"]),
        (r"[\x41-\x43\u00e9\U0001F600]", ["A", "é", "😀"], ["D", "AB"]),
        (r"[^\n\"\\]*", ["ab c"], ['a"b', "a\\b", "a\nb"]),
        (r"(a|b|)*c", ["c", "abbac"], ["ab", "d"]),
        (r"x{,2}\{1,a}", ["xx{1,a}", "{1,a}"], ["xxx{1,a}"]),
        (r"a{2", ["a{2"], ["aa"]),
        (r"[a\]b-]+", ["a]-b"], ["c"]),
        ("", [""], ["a"]),
        (r"(?:(?:a?){3}b?)+", ["", "aaab", "bbb"], ["c"]),
        ("\\A\\Z", [""], ["x"]),
    ],
)
def test_constructs(pattern: str, yes: list[str], no: list[str]) -> None:
    grammar = regex_grammar(pattern)
    assert [grammar_accepts(grammar, text) for text in yes] == [True] * len(yes)
    assert [grammar_accepts(grammar, text) for text in no] == [False] * len(no)


@pytest.mark.parametrize(
    ("pattern", "what", "where"),
    [
        ("ab(?=c)", "group (?=", 2),
        ("(?P<ab)", "group (?P<", 0),
        ("a(?i)b", "group (?i)", 1),
        (r"a\1", r"escape \1", 1),
        (r"a\bc", r"escape \b", 1),
        ("a^b", "anchor ^", 1),
        ("a$b", "anchor $", 1),
        ("(a$|b)", "anchor $", 2),
        ("*a", "nothing to repeat", 0),
        ("{2}a", "nothing to repeat", 0),
        ("(|{0,1})", "nothing to repeat", 2),
        ("^{2}", "nothing to repeat", 1),
        ("ab**", "quantifier of a quantifier", 3),
        ("a++", "possessive", 1),
        ("(ab", "group without its end", 0),
        ("ab)", "unbalanced )", 2),
        ("x[ab", "class without its end", 1),
        ("x[b-a]", "wrong range", 1),
        (r"[^\s\S]", "no character", 0),
        ("a{3,2}", "reversed", 1),
        ("ab{2001}", "more than 2,000 times", 2),
        ("ab{0,2001}", "more than 2,000 times", 2),
        ("(a{0,2000}){0,2000}", "more than 1024 ways", 0),
        (f"[{''.join(chr(0x10000 + 2 * i) for i in range(8000))}]", "65536 bytes", 0),
        (r"\xZZ", "hexadecimal", 0),
        (r"\01", "octal", 0),
        ("a\\", "escape \\", 1),
        ("(" * 65 + ")" * 65, "64 deep", 64),
    ],
)
def test_what_no_grammar_can_say_is_refused_with_its_place(
    pattern: str, what: str, where: int
) -> None:
    with pytest.raises(BadConstraint, match=re.escape(what)) as caught:
        regex_grammar(pattern)
    assert caught.value.where == where


def test_patterns_are_bounded_in_size_and_time() -> None:
    for pattern in (
        "a" * 8193,
        "x{2001}",
        "((((a?){60}){60}){60}){60}",
        "(" + "ab|" * 2000 + "c)*",
    ):
        with contextlib.suppress(BadGrammar):
            grammar_accepts(regex_grammar(pattern), "a" * 200)


@pytest.mark.parametrize("pattern", [".", "[^a]", r"\W", r"[\x00-\uffff]", r"[^\ud7ff-\ue000]"])
def test_no_class_of_characters_has_surrogates(pattern: str) -> None:
    """Byte tokens could spell them, and the text would be no UTF-8."""
    node = Regex(pattern).parse()
    assert isinstance(node, Seq)
    (chars,) = node.items
    assert isinstance(chars, Chars)
    assert not [r for r in chars.ranges if r[0] <= 0xDFFF and r[1] >= 0xD800]


@pytest.mark.parametrize("pattern", [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S"])
def test_a_class_of_a_schemas_pattern_holds_as_ecma_and_as_python_reads_it(pattern: str) -> None:
    ecma_space = " \t\n\v\f\r\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff\u2000-\u200a"
    ecma = {"d": "0-9", "w": "A-Za-z0-9_", "s": ecma_space}
    for is_negated, form in enumerate((pattern, f"[{pattern}]", f"[^{pattern}]")):
        node = Regex(form, is_ecma=True).parse()
        assert isinstance(node, Seq)
        (chars,) = node.items
        assert isinstance(chars, Chars)
        text = "".join(chr(c) for low, high in chars.ranges for c in range(low, high + 1))
        assert re.fullmatch(f"{form}+", text), form
        is_other = pattern[1].isupper() != (is_negated == 2)
        inside = f"[{'^' if is_other else ''}{ecma[pattern[1].lower()]}]"
        assert re.fullmatch(f"{inside}+", text), form


@settings(max_examples=100, deadline=None)
@given(
    choices=st.lists(st.text(alphabet='ab"\\é ', max_size=6), min_size=1, max_size=12),
    text=st.text(alphabet='ab"\\é ', max_size=6),
)
def test_a_choice_accepts_its_members_alone(choices: list[str], text: str) -> None:
    grammar = choice_grammar(choices)
    assert all(grammar_accepts(grammar, choice) for choice in choices)
    assert grammar_accepts(grammar, text) == (text in choices)


def test_choices_are_bounded() -> None:
    words = [f"word-{i:05d}" for i in range(2000)]
    grammar = choice_grammar(words)
    assert grammar_accepts(grammar, "word-01999")
    assert not grammar_accepts(grammar, "word-02000")
    assert grammar_accepts(choice_grammar(["a" * i for i in range(1, 200)]), "a" * 199)
    for wrong in ([], ["a"] * 4097, ["a" * 70000], ["a\0"], [1]):
        with pytest.raises(BadConstraint):
            choice_grammar(wrong)  # type: ignore[arg-type]  # wrong on purpose
    for before in ("", "x"):
        firsts = [f"{before}{chr(0x4E00 + i)}{i}" for i in range(1025)]
        assert grammar_accepts(choice_grammar(firsts[1:]), firsts[-1])
        with pytest.raises(BadConstraint, match="1025 different characters follow one beginning"):
            choice_grammar(firsts)


PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1},
        "born": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": '^[A-Z]{2}"\\\\?$'},
        "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [
        ({"name": "Ada", "age": 36}, True),
        ({"name": 'q"\\\n', "age": 129, "tags": ["a", 3, None]}, True),
        ({"name": "é😀", "age": 0, "born": "2026-11-21", "code": 'XY"\\'}, True),
        ({"name": "Ada", "age": 1, "boss": {"name": "B", "age": 2, "boss": None}}, True),
        ({"name": "", "age": 1}, False),
        ({"name": "longer", "age": 1}, False),
        ({"name": "Ada", "age": 130}, False),
        ({"name": "Ada", "age": -1}, False),
        ({"name": "Ada", "age": 1.5}, False),
        ({"name": "Ada"}, False),
        ({"name": "Ada", "age": 1, "tags": []}, False),
        ({"name": "Ada", "age": 1, "tags": ["c"]}, False),
        ({"name": "Ada", "age": 1, "born": "2026-13-21"}, False),
        ({"name": "Ada", "age": 1, "code": "XYZ"}, False),
        ({"name": "Ada", "age": 1, "boss": {"name": "B"}}, False),
        ({"name": "Ada", "age": 1, "other": 1}, False),
        ([], False),
    ],
)
def test_a_schema_accepts_valid_values_alone(value: object, is_valid: bool) -> None:
    grammar = json_schema_grammar(PERSON)
    for indent in (None, 2):
        assert grammar_accepts(grammar, json.dumps(value, ensure_ascii=False, indent=indent)) == (
            is_valid
        )


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (True, [1, "x", {"a": [None, {}]}, [], 1.5e-7], []),
        ({"type": ["integer", "null"]}, [1, -12, None], ["1", 1.5]),
        ({"const": {"a": [1, "é"]}}, [{"a": [1, "é"]}], [{"a": [1]}]),
        ({"type": "array", "prefixItems": [{"type": "null"}, {}]}, [[None, 4]], [[None], [1, 2]]),
        ({"type": "array", "maxItems": 2}, [[], [1], [1, 2]], [[1, 2, 3]]),
        ({"type": "array", "items": False}, [[]], [[1]]),
        ({"type": "string", "pattern": ""}, ["", "a"], [1]),
        (
            {"properties": {"a": False, "b": {}}, "additionalProperties": True},
            [{}, {"b": 1}, {"b": 1, "c": 2}, {"ab": 1}],
            [{"a": 1}, {"b": 1, "a": 2}],
        ),
        ({"type": "string", "pattern": "^.$"}, ["a", "\x85"], ["\n", "\r", "\u2028", "\u2029"]),
        (
            {"type": "string", "pattern": r"^\S$"},
            ["a", "é"],
            [" ", "\t", "\xa0", "\ufeff", "\u2028", "\u2029", "\u3000", "\u1680"],
        ),
        ({"type": "string", "pattern": r"^[\S]$"}, ["a"], ["\xa0", " "]),
        ({"type": "string", "pattern": r"^\s$"}, [" ", "\t"], ["\xa0", "a"]),
        ({"type": "string", "pattern": r"^[^\s]$"}, ["a"], ["\xa0", " "]),
        ({"type": "string", "pattern": r"^[^\S]$"}, [" ", "\t"], ["\xa0", "a"]),
        ({"type": "string", "pattern": r"^\S$"}, ["é"], ["\x1c", "\x85"]),
        ({"type": "string", "pattern": r"^\D$"}, ["a", "é", "日"], ["1", "٣", "𞥐"]),
        ({"type": "string", "pattern": r"^\W$"}, ["-", "—", "€", "😀"], ["a", "é", "日", "_"]),
        ({"type": "string", "pattern": r"^[^\w]$"}, ["-", "—"], ["a", "é", "日"]),
        ({"type": "string", "pattern": r"^(?<year>\d{4})$"}, ["2026"], ["26"]),
        ({"pattern": "b+"}, ["b", "abc", "bb"], ["ac", ""]),
        ({"minLength": 1}, ["b"], ["", 1, None]),
        ({"minimum": 1}, [1, 2], [0, 1.5, "b", None]),
        ({"const": "a\0"}, ["a\0"], ["a"]),
        ({"type": "string"}, ["a\x01"], ["a\0"]),
        ({"type": "array", "maxItems": 2000}, [[1] * 2000], [[1] * 2001]),
        ({"type": "object"}, [{}, {"x": {"y": 1}}], [[]]),
        (
            {"properties": {"a": {}, "ab": {}}, "additionalProperties": {"type": "null"}},
            [{}, {"a": 1}, {"b": None}, {"a": 1, "ab": 2, "abc": None, "": None}],
            [{"b": 1}, {"c": None, "d": 2}],
        ),
        ({"type": "object", "required": ["z"]}, [{"z": 1}, {"z": 1, "y": 2}], [{}, {"y": 1}]),
        ({"allOf": [{"type": "boolean"}]}, [True, False], [0]),
        ({"type": "string", "anyOf": [{"maxLength": 1}, {}]}, ["a", "ab"], [7, None]),
        ({"type": "integer", "anyOf": [{"type": ["number", "null"]}]}, [1], [1.5, None]),
        ({"type": "number", "anyOf": [{"type": ["integer", "null"]}]}, [1], [1.5, None]),
        (
            {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [[], {}],
        ),
        (
            {"$defs": {"a": {"type": "string"}}, "type": ["string", "null"], "$ref": "#/$defs/a"},
            ["x"],
            [None, 1],
        ),
        (
            {"$defs": {"a/b": {"type": "string"}}, "$ref": "#/$defs/a~1b"},
            ["x"],
            [1],
        ),
        ({"enum": ["a", 1, 2.0], "type": "integer"}, [1, 2.0], ["a"]),
        (
            {
                "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["a"],
            },
            [{"a": None}, {"a": {"a": None}}],
            [{}, {"a": {}}],
        ),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1]]),
        (
            {
                "$id": "https://example.com/root",
                "$defs": {
                    "a": {"$id": "a", "type": "null"},
                    "b": {"$id": "#b", "$ref": "#/$defs/a"},
                },
                "items": {"$ref": "#/$defs/b"},
            },
            [[], [None]],
            [[1]],
        ),
    ],
)
def test_keywords(schema: Any, yes: list[object], no: list[object]) -> None:
    grammar = json_schema_grammar(schema)
    assert [v for v in yes if not grammar_accepts(grammar, json.dumps(v, ensure_ascii=False))] == []
    assert [v for v in no if grammar_accepts(grammar, json.dumps(v, ensure_ascii=False))] == []


@settings(max_examples=150, deadline=None)
@given(
    bounds=st.tuples(*[st.integers(-12000, 12000)] * 2).map(sorted),
    open_end=st.sampled_from(["", "low", "high"]),
    numbers=st.lists(st.integers(-13000, 13000), min_size=20, max_size=20),
)
def test_integer_bounds(bounds: list[int], open_end: str, numbers: list[int]) -> None:
    low, high = bounds
    schema: dict[str, object] = {"type": "integer"}
    schema |= {} if open_end == "low" else {"minimum": low}
    schema |= {} if open_end == "high" else {"maximum": high}
    grammar = json_schema_grammar(schema)
    for n in [*numbers, low, high, low - 1, high + 1, 0]:
        is_valid = (open_end == "low" or n >= low) and (open_end == "high" or n <= high)
        assert grammar_accepts(grammar, str(n)) == is_valid, (schema, n)
    assert not grammar_accepts(grammar, f"0{max(high, 1)}")


FORMATS = {
    name: json_schema_grammar({"type": "string", "format": name})
    for name in ("date", "time", "date-time", "uuid", "email")
}


def is_of_format(name: str, text: str) -> bool:
    return grammar_accepts(FORMATS[name], json.dumps(text))


def is_date(year: int, month: int, day: int) -> bool:
    try:
        # The year 0000, which Python does not know, is one of RFC 3339, and as long as 2000.
        datetime.date(year or 2000, month, day)
    except ValueError:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(year=st.integers(0, 9999), month=st.integers(0, 13), day=st.integers(0, 32))
def test_dates_are_those_of_the_calendar(year: int, month: int, day: int) -> None:
    text = f"{year:04d}-{month:02d}-{day:02d}"
    assert is_of_format("date", text) == is_date(year, month, day)
    assert is_of_format("date-time", f"{text}T23:59:59Z") == is_date(year, month, day)


def test_february_has_a_29th_in_leap_years_alone() -> None:
    """All ends of centuries, and all years of three of them."""
    for year in (*range(0, 10_000, 100), *range(105), *range(1896, 2105)):
        for day in (28, 29, 30):
            text = f"{year:04d}-02-{day}"
            assert is_of_format("date", text) == is_date(year, 2, day), text


def test_a_grammar_of_dates_generates_every_end_of_a_month() -> None:
    for month in range(1, 13):
        for day in (0, 1, 28, 29, 30, 31, 32):
            text = f"2023-{month:02d}-{day:02d}"
            assert is_of_format("date", text) == is_date(2023, month, day), text
    assert len(FORMATS["date"]) < 600
    for odd in ("2024-1-31", "24-01-31", "12024-01-31", "2024-01-311", "2024-01-31Z", "-024-01-31"):
        assert not is_of_format("date", odd)


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        (
            "time",
            ["00:00:00Z", "23:59:59.1+23:59", "12:00:00.123456789-00:00"],
            ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00", "12:00:00.Z", "12:00:00+24:00"],
        ),
        ("date-time", ["2024-02-29T00:00:00.5Z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
        (
            "uuid",
            ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
            ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638g"],
        ),
        ("email", ["a@b.c", "no address"], []),  # an annotation
    ],
)
def test_formats(name: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not is_of_format(name, text)] == []
    assert [text for text in no if is_of_format(name, text)] == []


def test_one_of_is_read_as_any_of() -> None:
    overlapping = [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]
    grammars = [json_schema_grammar({keyword: overlapping}) for keyword in ("oneOf", "anyOf")]
    assert grammars[0] == grammars[1]
    assert grammar_accepts(grammars[0], "5")  # valid under both


@pytest.mark.parametrize(
    ("schema", "what", "where"),
    [
        ("{", "no JSON", "#"),
        ("[1]", "a schema is an object", "#"),
        ({"type": "number", "minimum": 1}, '"minimum"', "#"),
        ({"type": ["integer", "number"], "minimum": 0}, '"minimum"', "#"),
        ({"type": "integer", "multipleOf": 2}, '"multipleOf"', "#"),
        ({"type": "string", "anyOf": [{"type": "null"}]}, "excludes what stands", "#"),
        ({"$defs": {"a": {}}, "type": "string", "$ref": "#/$defs/a"}, '"type" beside', "#"),
        (
            {"$defs": {"a": {"type": ["string", "null"]}}, "type": "null", "$ref": "#/$defs/a"},
            "excludes what stands",
            "#",
        ),
        ({"type": [["string"]]}, '"type" must be', "#"),
        ({"type": "string", "format": ["date"]}, '"format" must be', "#"),
        ({"type": "object", "required": [["a"]]}, '"required"', "#"),
        ({"properties": {"a": {"not": {}}}}, '"not"', "#/properties/a"),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"', "#"),
        ({"$ref": "https://example.com/x.json"}, "same document", "#"),
        ({"$ref": "#/$defs/none"}, "points to nothing", "#"),
        (
            {
                "properties": {
                    "a": {
                        "$id": "item",
                        "properties": {"b": {"items": {"$ref": "#/$defs/x"}}},
                        "$defs": {"x": {"type": "null"}},
                    }
                },
                "$defs": {"x": {"type": "integer"}},
            },
            'its own "$id"',
            "#/properties/a/properties/b/items",
        ),
        (
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            "leads back",
            "#",
        ),
        ({"$ref": "#"}, "leads back", "#"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leads back to itself", "#"),
        ({"anyOf": [{"$ref": "#"}]}, "never ends", "#"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "never ends", "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "never ends", "#"),
        (
            {
                "$defs": {"a": {"prefixItems": [{"$ref": "#/$defs/a"}]}},
                "properties": {"a": {"$ref": "#/$defs/a"}},
            },
            "never ends",
            "#",
        ),
        ({"type": "string", "pattern": r"\Aa\Z"}, r"escape \A", "#"),
        ({"type": "string", "pattern": r"^a\Z"}, r"escape \Z", "#"),
        ({"type": "string", "pattern": r"\a"}, r"escape \a", "#"),
        ({"type": "string", "pattern": r"\U00000041"}, r"escape \U", "#"),
        ({"type": "string", "pattern": "a{,2}"}, "least count", "#"),
        ({"type": "string", "pattern": "[]a]"}, "begins with ]", "#"),
        ({"type": "string", "pattern": "[^]a]"}, "begins with ]", "#"),
        ({"anyOf": [{"type": "null"}], "properties": {}}, '"anyOf" beside', "#"),
        ({"allOf": [{}, {}]}, '"allOf"', "#"),
        ({"type": "text"}, '"type" must be', "#"),
        ({"type": "string", "minLength": -1}, '"minLength"', "#"),
        ({"type": "string", "maxLength": 5000}, '"maxLength" must be at most 2000', "#"),
        ({"properties": {"a": {"minItems": 2001}}}, '"minItems" must be', "#/properties/a"),
        ({"type": "string", "pattern": "ab{3000}"}, "2,000 times at index 2", "#"),
        ({"type": "string", "pattern": "(a{0,2000}){0,2000}"}, "more than 1024 ways", "#"),
        ({"enum": [f"{i:05}" for i in range(7000)]}, "grammar has more than 65536 bytes", "#"),
        ({"prefixItems": [{"$ref": "#/prefixItems/" + "9" * 5000}]}, "points to nothing", "#/pre"),
        ({"prefixItems": [{}, {"$ref": "#/prefixItems/00"}]}, "points to nothing", "#/prefix"),
        ({"type": "string", "pattern": "(?=a)"}, '"pattern"', "#"),
        ({"type": "string", "pattern": "^a|b$"}, "anchor beside", "#"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "length beside", "#"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer", "#"),
        ({"enum": []}, '"enum"', "#"),
        ({"enum": ["a"], "type": "integer"}, "no value", "#"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no value", "#/pro"),
        ({"type": "array", "items": False, "minItems": 1}, '"minItems"', "#"),
        ({"type": "string", "pattern": None}, '"pattern" must be text', "#"),
        ({"properties": {"a": False}, "required": ["a"]}, "no value is allowed", "#/properties/a"),
        (r'{"properties": {"a": {"const": "\ud800"}}}', "lone surrogate", "#/properties/a"),
        (r'{"enum": [1, {"x": ["a\udfffb"]}]}', "lone surrogate", "#"),
        (r'{"properties": {"\ud800": {}}}', "lone surrogate", r"#/properties/\ud800"),
        (r'{"type": "object", "required": ["\udc00"]}', "lone surrogate", "#/properties"),
        (r'{"type": "array", "\ud800": 1}', r'"\ud800" is not supported', "#"),
        (False, "nothing is valid", "#"),
        ({"const": 1e999}, "no JSON", "#"),
        ('{"const": 1e999}', "too large", "#"),
        ("[" * 200, "nests more than", "#"),
        ('{"description": "' + "x" * 70000 + '"}', "bytes", "#"),
    ],
)
def test_schemas_that_a_grammar_cannot_hold_are_refused(schema: Any, what: str, where: str) -> None:
    with pytest.raises(BadConstraint, match=re.escape(what)) as caught:
        json_schema_grammar(schema)
    assert str(caught.value.where).startswith(where)
    assert ("$ref" in str(caught.value)) <= ("$ref" in str(schema))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": ["object", "null"], "properties": {"a": schema, "b": schema}}
    return schema


def test_a_schema_that_nests_beyond_json_is_told_so() -> None:
    with pytest.raises(BadConstraint, match="nests too deep; at most 128 levels"):
        json_schema_grammar({"properties": in_a_line(5000)})


def in_a_line(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"a": schema}
    return schema


def test_schemas_are_bounded_in_size_and_time() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(100)}}
    grammar = json_schema_grammar(many)
    assert grammar_accepts(grammar, json.dumps({f"p{i}": None for i in range(0, 100, 7)}))
    for schema in (nested(8), {"anyOf": [{"type": "integer"}] * 3000}):
        with contextlib.suppress(BadGrammar):
            json_schema_grammar(schema)


TOWER = "\n".join(
    ["root ::= r0", *(f'r{i} ::= r{i + 1} "a" | r{i + 1} "b"' for i in range(60)), 'r60 ::= "x"']
)


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        ("root ::= x", "Undefined"),
        ('rule ::= "a"', "root"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= x\nx ::= "a"? y\ny ::= x "b"', "left recursion"),
        ('root ::= "a"{3000}', "repetition"),
        (f"root ::= [{string.ascii_letters * 20}]{{2000}}", "expand"),
        (TOWER, "ways"),
        ('root ::= s\ns ::= "a" s "b" | "a" s "c" | "d"', "ambiguous"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "parentheses"),
        ("x" * 70000, "bytes"),
        ("%llguidance", "llguidance"),
    ],
    ids=range(11),
)
def test_grammars_that_would_hang_or_kill_are_refused(grammar: str, what: str) -> None:
    with pytest.raises(BadGrammar, match=what):
        check_grammar(grammar)


@pytest.mark.parametrize(
    "symbol",
    [
        r"[\uD800-\uDFFF]",
        r'"a\uD83D\uDE00"',
        r"[\x00]",
        r'"\x00"',
        r"[\U00110000-\U00120000]",
        "[z-a]",
        r"[^\x01-\U0010FFFF]",
        r"[^\uE000-\U0010FFFF\x00-\uD7FF]",
        r"([z-ay-b]{2} | [a])*",
    ],
)
def test_characters_that_no_text_has_are_refused(symbol: str) -> None:
    """Else a stream ends there, and what came before is billed."""
    with pytest.raises(BadGrammar, match=r"the rule word(_\d)? has .* that no text has"):
        check_grammar(f'root ::= "x" word\nword ::= {symbol}')


@pytest.mark.parametrize(
    "symbol",
    [
        r"[\uD7FF-\uE000]",
        r"[^\uD800-\uDFFF]",
        r"[\x00-\x01]",
        r"[\uDFFF-\uE000]",
        r"[\U0010FFFF-\U00110000]",
        r"[^\x02-\U0010FFFF]",
        r"[^\x01-\U0010FFFE]",
        r"[^\uE000-\U0010FFFF\x00-\uD7FE]",
        "[z-ab]",
        "[]",
        ".",
    ],
)
def test_classes_of_which_texts_have_one_are_taken(symbol: str) -> None:
    check_grammar(f"root ::= {symbol}")


def test_grammars_are_checked_from_any_text() -> None:
    with pytest.raises(TypeError):
        check_grammar(1)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="NUL"):
        check_grammar("root ::= \0")
    with pytest.raises(ValueError, match="64 KiB"):
        grammar_accepts('root ::= "a"*', "a" * 70000)
    assert grammar_accepts('root ::= "é"+', "éé")


@settings(max_examples=200, deadline=None)
@given(grammar=st.text(alphabet='root:=ab "[](){}|*+?^-1,\\\n.<>!', max_size=60))
def test_no_grammar_crashes(grammar: str) -> None:
    for text in (grammar, f"root ::= {grammar}"):
        with contextlib.suppress(BadGrammar):
            grammar_accepts(text, "ab")
