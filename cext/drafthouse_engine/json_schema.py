r"""JSON schemas as grammars.

A text that the grammar generates is JSON and valid under the schema, but for two keywords: where
branches of `oneOf` overlap, which is read as `anyOf`, it may be valid under several; and a `format`
that is not understood is an annotation, as the draft has it. Annotations are passed over; all else
that the grammar cannot hold is refused. Narrower than the schema, on purpose: members come in the
order of `properties`; an object with `properties` and no `additionalProperties` has no others; a
list has each of its `prefixItems` and no others; a schema without `type` has values of the first
type that knows all its keywords, strings where they are `minLength`; the numbers have at most 16
digits on each side of the point, their exponents two; strings have no NUL but where `const`, `enum`
or `pattern` have it; times have no leap second, at most nine digits after a second's point, and T
and Z in upper case; in a `pattern`, a character is allowed where it is as ECMA-262 and as Python
reads it (see `regex`); white space is what a printer makes of it, constants are written in one way.

Understood: `type` (also a list), `properties`, `required`, `additionalProperties`, `items`,
`prefixItems`, `minItems`, `maxItems`, `minLength`, `maxLength` (each at most 2,000), `pattern`,
`format` (`date`, `time`, `date-time`, `uuid`; not `email` and others), `minimum`, `maximum`,
`exclusiveMinimum` and `exclusiveMaximum` of integers, `enum`, `const`, `anyOf`, `oneOf`, `allOf`
with one member, `$ref` within the document, recursive ones too (not in a part with its own `$id`,
which is a document of its own), `true` and `{}`.

Source: JSON Schema, draft 2020-12; dates and times: RFC 3339, years 0000 to 9999.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from drafthouse_engine.digits import integer_range
from drafthouse_engine.errors import BadConstraint
from drafthouse_engine.fields import has_text_problem
from drafthouse_engine.gbnf import (
    EMPTY,
    REPEAT_MAX,
    Alt,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    is_finite,
    literal,
    optional,
    to_gbnf,
)
from drafthouse_engine.json_text import (
    CHAR,
    COLON,
    COMMA,
    INTEGER,
    NUMBER,
    listed,
    mapped,
    other_than,
    quoted,
    separated,
    words,
)
from drafthouse_engine.regex import Regex

__all__ = ["json_schema_grammar"]

Schema: TypeAlias = Mapping[str, Any] | bool

N_BYTES_MAX: Final = 65536
DEPTH_MAX: Final = 64
N_NODES_MAX: Final = 4096
NAME_CHARS_MAX: Final = 128

_ANNOTATIONS: Final = frozenset(
    [
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "$anchor",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "discriminator",
    ]
)
_KEYWORDS: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format")),
    "number": frozenset(("format",)),
    "boolean": frozenset(),
    "null": frozenset(),
}
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_LEAP_YEAR: Final = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_FORMATS: Final = {
    "date": r"(\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|"
    rf"02-(0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+\-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[\da-fA-F]{8}-([\da-fA-F]{4}-){3}[\da-fA-F]{12}",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


def json_schema_grammar(schema: str | Schema) -> str:
    """Returns the grammar (GBNF) of the JSON texts that are valid under a schema.

    Args:
        schema: the schema, or its JSON text; at most 64 KiB, 64 levels deep. See the module for
            what is understood.

    Raises:
        BadConstraint: the schema is wrong, too large, refers to another document, or has a keyword
            that the grammar cannot hold; `where` points into the schema.

    Thread:
        Any; takes milliseconds, so call it where requests are read, not between two steps.
    """
    try:
        builder = _Builder(_document(schema))
        root = builder.root()
        if not is_finite(root, builder.rules):
            what = 'leave it out of "required" or "minItems", or allow null beside it'
            raise BadConstraint(f'a value with "$ref" to itself never ends; {what}', where="#")
        return to_gbnf(root, builder.rules, where="#")
    except RecursionError:
        raise BadConstraint("the schema nests too deep", where="#") from None
    except BadConstraint as error:
        if "left recursion" not in str(error):
            raise
        what = 'a "$ref" leads back to itself through "anyOf", "oneOf" or "allOf"'
        raise BadConstraint(f"the schema has no grammar; {what}", where="#") from None


def _document(schema: str | Schema) -> Schema:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if len(text.encode("utf-8", "replace")) > N_BYTES_MAX:
            raise BadConstraint(f"the schema has more than {N_BYTES_MAX} bytes", where="#")
        _check_depth(text)
        document = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        limit = f"at most {2 * DEPTH_MAX} levels are read"
        raise BadConstraint(f"the schema nests too deep; {limit}", where="#") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, BadConstraint):
            raise
        raise BadConstraint(f"the schema is no JSON: {error}", where="#") from None
    if not isinstance(document, dict | bool):
        raise BadConstraint("a schema is an object, true or false", where="#")
    return document


def _refuse_constant(name: str) -> None:
    raise BadConstraint(f"{name} is no JSON", where="#")


def _check_depth(text: str) -> None:
    """Counts brackets before a parser recurses into them; those in strings count too."""
    depth = 0
    for c in text:
        depth += (c in "[{") - (c in "]}")
        if depth > 2 * DEPTH_MAX:
            raise BadConstraint(f"the schema nests more than {2 * DEPTH_MAX} levels", where="#")


_Maker: TypeAlias = Callable[[], Node]


class _Builder:
    """Turns one schema into a language.

    Objects, lists, patterns and what is referred to are rules, made one after the other and not
    inside one another, so that trees and calls stay shallow.
    """

    def __init__(self, document: Schema) -> None:
        self.rules: Rules = {}
        self._document = document
        self._refs: dict[str, Ref] = {}
        self._ending: set[str] = set()  # references that are known to come to something
        self._waiting: list[tuple[str, int, bool, _Maker]] = []
        self._n_nodes = 0
        self._depth = 0
        self._is_other = False  # within a part that its own "$id" makes a document

    def root(self) -> Node:
        node = self._build(self._document, "#")
        while self._waiting:
            name, self._depth, self._is_other, maker = self._waiting.pop()
            self.rules[name] = maker()
        return node

    def _later(self, letter: str, depth: int, maker: _Maker) -> Ref:
        """Returns a reference to what is made once the parts around it are."""
        ref = self._rule(letter, EMPTY)
        self._waiting.append((ref.name, depth, self._is_other, maker))
        return ref

    def _rule(self, letter: str, node: Node) -> Ref:
        ref = Ref(f"{letter}{len(self.rules)}")
        self.rules[ref.name] = node
        return ref

    def _build(self, schema: object, at: str) -> Node:
        self._n_nodes += 1
        self._depth += 1
        if self._n_nodes > N_NODES_MAX or self._depth > DEPTH_MAX:
            limit = f"{N_NODES_MAX} parts, {DEPTH_MAX} levels"
            raise self._error(f"the schema is larger than {limit}", at)
        outer, self._is_other = self._is_other, self._is_other or _is_document(schema, at)
        node = self._any() if schema is True else self._object_of(schema, at)
        self._is_other = outer
        self._depth -= 1
        return node

    def _object_of(self, schema: object, at: str) -> Node:
        if not isinstance(schema, dict):
            raise self._error("a schema that nothing is valid under", at, schema is False)
        found: dict[str, Any] = {k: v for k, v in schema.items() if k not in _ANNOTATIONS}
        if not found:
            return self._any()
        for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
            if keyword in found:
                self._check_alone(found, keyword, at)
                return self._combined(keyword, found, at)
        if "enum" in found or "const" in found:
            return self._constants(found, at)
        return self._typed(found, at)

    def _error(self, what: str, at: str, is_plain: bool = True) -> BadConstraint:
        text = what if is_plain else "a schema is an object, true or false"
        place, text = (t.encode("utf-8", "backslashreplace").decode() for t in (at, text))
        return BadConstraint(f"{place}: {text}", where=place)

    def _check_alone(self, found: dict[str, Any], keyword: str, at: str) -> None:
        others = sorted(set(found) - {keyword, "type"})
        if others:
            raise self._error(f'"{keyword}" beside "{others[0]}" is not supported', at)

    def _combined(self, keyword: str, found: dict[str, Any], at: str) -> Node:
        value = found[keyword]
        kinds = self._types(found, at) if "type" in found else None
        if keyword == "$ref":
            self._narrowed({"$ref": value}, kinds, at)
            return self._ref(value, at)
        if not isinstance(value, list) or not value:
            raise self._error(f'"{keyword}" must be a list of schemas', at)
        if keyword == "allOf" and len(value) > 1:
            raise self._error('"allOf" with several members is not supported', at)
        branches = [
            self._build(self._narrowed(item, kinds, at), f"{at}/{keyword}/{i}")
            for i, item in enumerate(value)
        ]
        return Alt(tuple(branches))

    def _narrowed(self, schema: object, kinds: list[str] | None, at: str) -> object:
        """Returns a schema beside whose place a "type" stands, with that; None is no type."""
        if kinds is not None and schema is True:
            return {"type": kinds}
        if kinds is None or not isinstance(schema, dict):
            return schema  # what is wrong is refused where it is built
        if not schema.keys() & {"type", "$ref"}:
            return schema | {"type": kinds}
        ref = schema.get("$ref")
        own = schema if ref is None else self._resolve(ref, at) if isinstance(ref, str) else None
        if not isinstance(own, dict) or "type" not in own:
            raise self._error('"type" beside a "$ref" to what has none is not supported', at)
        both = _both(self._types(own, at), kinds)
        if not both or (ref is not None and both != self._types(own, at)):
            raise self._error('the "type" excludes what stands beside it', at)
        return schema if ref is not None else schema | {"type": both}

    # References.

    def _ref(self, value: object, at: str) -> Node:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise self._error('"$ref" must point into the same document: "#/…"', at)
        if self._is_other:
            raise self._error('"$ref" within a part that has its own "$id" is not supported', at)
        target = self._resolve(value, at)
        if value not in self._refs:
            self._check_ends(value, at)
            self._refs[value] = self._later("ref", 0, lambda: self._build(target, value))
        return self._refs[value]

    def _check_ends(self, ref: str, at: str) -> None:
        """References to references must come to something at last."""
        seen: set[str] = set()
        while isinstance(ref, str) and ref not in self._ending:
            if ref in seen:
                raise self._error(f'"$ref" {ref} leads back to itself', at)
            seen.add(ref)
            target = self._resolve(ref, at)
            ref = target.get("$ref") if isinstance(target, dict) else None  # type: ignore[assignment]
        self._ending |= seen

    def _resolve(self, ref: str, at: str) -> object:
        target: Any = self._document
        for part in ref.split("/")[1:] if isinstance(ref, str) else ():
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and _is_index(key, len(target)):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                raise self._error(f'"$ref" {ref} points to nothing', at)
        return target

    # Values.

    def _any(self) -> Node:
        """Any JSON value."""
        if "value" not in self.rules:
            member = Seq((Ref("string"), COLON, Ref("value")))
            kinds = (
                Ref("object"),
                Ref("array"),
                Ref("string"),
                NUMBER,
                *words("true false null"),
            )
            self.rules |= {
                "value": Alt(kinds),
                "object": listed([optional(separated(member, 0, None))], "{", "}"),
                "array": listed([optional(separated(Ref("value"), 0, None))], "[", "]"),
                "string": quoted(Repeat(CHAR, 0, None)),
            }
        return Ref("value")

    def _constants(self, found: dict[str, Any], at: str) -> Node:
        others = sorted(set(found) - {"enum", "const", "type"})
        values = [found["const"]] if "const" in found else found["enum"]
        if others or {"enum", "const"} <= set(found):
            raise self._error(f'"enum" beside "{(others or ["const"])[0]}" is not supported', at)
        if not isinstance(values, list) or not values:
            raise self._error('"enum" must be a list of values', at)
        kinds = self._types(found, at)
        fitting = [value for value in values if any(_is_of(value, kind) for kind in kinds)]
        if not fitting:
            raise self._error('no value of "enum" has the "type"', at)
        texts = [self._written(value, at) for value in fitting]
        return Alt(tuple(literal(text) for text in dict.fromkeys(texts)))

    def _types(self, found: dict[str, Any], at: str) -> list[str]:
        wanted = found.get("type", list(_KEYWORDS))
        kinds = [wanted] if isinstance(wanted, str) else wanted
        is_list = isinstance(kinds, list) and bool(kinds)
        if not is_list or any(type(kind) is not str or kind not in _KEYWORDS for kind in kinds):
            raise self._error(f'"type" must be of {", ".join(_KEYWORDS)}', at)
        return list(dict.fromkeys(kinds))

    def _typed(self, found: dict[str, Any], at: str) -> Node:
        kinds = self._types(found, at)
        keywords = set(found) - {"type"}
        if "type" not in found:
            kinds = [kind for kind in kinds if keywords <= _KEYWORDS[kind]][:1]
        allowed = frozenset[str]().union(*(_KEYWORDS[kind] for kind in kinds))
        if "number" in kinds:  # of other numbers than integers no bound can be held
            allowed -= _KEYWORDS["integer"] - _KEYWORDS["number"]
        if not isinstance(found.get("format", ""), str):
            raise self._error('"format" must be text', at)
        if not kinds or keywords - allowed:
            name = min(keywords - allowed or keywords)
            raise self._error(f'the keyword "{name}" is not supported here', at)
        return Alt(tuple(self._kind(kind, found, at) for kind in kinds))

    def _kind(self, kind: str, found: dict[str, Any], at: str) -> Node:
        makers: dict[str, Callable[[dict[str, Any], str], Node]] = {
            "object": self._object,
            "array": self._array,
            "string": self._text,
        }
        if kind == "integer":
            return self._integer(found, at)
        if kind in makers:
            return self._later(kind[0], self._depth, lambda: makers[kind](found, at))
        return {
            "number": NUMBER,
            "boolean": Alt(words("true false")),
            "null": literal("null"),
        }[kind]

    def _count(self, found: dict[str, Any], keyword: str, at: str) -> int | None:
        value = found.get(keyword)
        if keyword in found and (type(value) is not int or value < 0):
            raise self._error(f'"{keyword}" must be an integer ≥ 0', at)
        if value is not None and value > REPEAT_MAX:
            raise self._error(f'"{keyword}" must be at most {REPEAT_MAX}', at)
        return value

    def _bounds(self, found: dict[str, Any], what: str, at: str) -> tuple[int, int | None]:
        n_min = self._count(found, f"min{what}", at) or 0
        n_max = self._count(found, f"max{what}", at)
        if n_max is not None and n_max < n_min:
            raise self._error(f'"max{what}" is below "min{what}"', at)
        return n_min, n_max

    def _text(self, found: dict[str, Any], at: str) -> Node:
        n_min, n_max = self._bounds(found, "Length", at)
        is_bounded = "minLength" in found or "maxLength" in found
        pattern = found.get("pattern")
        if "pattern" in found and not isinstance(pattern, str):
            raise self._error('"pattern" must be text', at)
        form = _FORMATS.get(found.get("format", ""))
        if (pattern is not None or form) and is_bounded:
            raise self._error('a length beside "pattern" or "format" is not supported', at)
        if pattern is not None and form:
            raise self._error('"format" beside "pattern" is not supported', at)
        if pattern is not None:
            return quoted(self._pattern(pattern, at))
        return quoted(mapped(Regex(form).parse()) if form else Repeat(CHAR, n_min, n_max))

    def _pattern(self, pattern: str, at: str) -> Node:
        """A pattern is searched in the text, unless its anchors say otherwise."""
        try:
            regex = Regex(pattern, is_ecma=True)
            node = regex.parse()
            if isinstance(node, Alt) and (regex.is_anchored_start or regex.is_anchored_end):
                raise BadConstraint("an anchor beside | binds one side only: write ^(a|b)$")
            around = Repeat(CHAR, 0, None)
            before = () if regex.is_anchored_start else (around,)
            return Seq((*before, mapped(node), *(() if regex.is_anchored_end else (around,))))
        except BadConstraint as error:
            raise self._error(f'"pattern": {error}', at) from None

    def _integer(self, found: dict[str, Any], at: str) -> Node:
        low, high = self._limit(found, "inimum", 1, at), self._limit(found, "aximum", -1, at)
        if low is None and high is None:
            return INTEGER
        if low is not None and high is not None and low > high:
            raise self._error("no integer lies within the bounds", at)
        return integer_range(low, high)

    def _limit(self, found: dict[str, Any], name: str, step: int, at: str) -> int | None:
        """The bound of integers that both forms of a keyword set."""
        plain = "M" if name == "aximum" else "m"
        letter = {"M": "maximum", "m": "minimum"}[plain]
        bounds = []
        for keyword, shift in ((letter, 0), (f"exclusive{letter.capitalize()}", step)):
            value = found.get(keyword)
            if keyword in found and (type(value) is not int or abs(value) > 10**15):
                raise self._error(f'"{keyword}" must be an integer of at most 15 digits', at)
            if value is not None:
                bounds.append(value + shift)
        return None if not bounds else max(bounds) if step > 0 else min(bounds)

    def _array(self, found: dict[str, Any], at: str) -> Node:
        n_min, n_max = self._bounds(found, "Items", at)
        if "prefixItems" in found:
            return self._tuple(found, n_min, n_max, at)
        if found.get("items") is False:
            if n_min > 0:
                raise self._error('"minItems" asks for items, "items" allows none', at)
            n_max = 0
        if n_max == 0:
            return listed([], "[", "]")
        item = self._part("i", found.get("items", True), f"{at}/items")
        inner = separated(item, max(0, n_min - 1), None if n_max is None else n_max - 1)
        return listed([inner if n_min > 0 else optional(inner)], "[", "]")

    def _tuple(self, found: dict[str, Any], n_min: int, n_max: int | None, at: str) -> Node:
        """A list of exactly these items; more, where `items` allows them, are not generated."""
        parts = found["prefixItems"]
        if not isinstance(parts, list) or not parts:
            raise self._error('"prefixItems" must be a list of schemas', at)
        if n_min > len(parts) or (n_max is not None and n_max < len(parts)):
            raise self._error('"minItems" and "maxItems" do not allow the "prefixItems"', at)
        nodes: list[Node] = []
        for i, part in enumerate(parts):
            nodes += [COMMA] if i else []
            nodes.append(self._build(part, f"{at}/prefixItems/{i}"))
        return listed(nodes, "[", "]")

    # Objects.

    def _object(self, found: dict[str, Any], at: str) -> Node:
        properties = found.get("properties", {})
        required = found.get("required", [])
        is_named = isinstance(required, list) and all(isinstance(name, str) for name in required)
        if not isinstance(properties, dict) or not is_named:
            raise self._error('"properties" must be an object, "required" a list of names', at)
        wanted = set(required)
        others = found.get("additionalProperties", not properties)
        names = list(properties) + [name for name in required if name not in properties]
        members = {
            name: self._member(name, properties.get(name, others), f"{at}/properties/{name}")
            for name in names
            if name in wanted or properties[name] is not False
        }
        extra = None if others is False else self._other_member(names, others, at)
        return listed([self._members(members, wanted, extra)], "{", "}")

    def _part(self, letter: str, schema: object, at: str) -> Ref:
        """A part that stands in its tree several times."""
        node = self._build(schema, at)
        return node if isinstance(node, Ref) else self._rule(letter, node)

    def _member(self, name: str, schema: object, at: str) -> Node:
        if schema is False:
            raise self._error("a required member that no value is allowed for", at)
        key = self._written(name, at)
        return self._rule("m", Seq((literal(key), COLON, self._build(schema, at))))

    def _written(self, value: object, at: str) -> str:
        """The JSON text of a constant or a name."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise self._error("a number is too large", at) from None
        if has_text_problem(text):
            raise self._error("a text with a lone surrogate, which UTF-8 cannot hold", at)
        return text

    def _other_member(self, names: list[str], schema: object, at: str) -> Node:
        if any(len(name) > NAME_CHARS_MAX for name in names):
            limit = f"names of at most {NAME_CHARS_MAX} characters"
            raise self._error(f'"additionalProperties" needs {limit}', at)
        value = self._build(schema, f"{at}/additionalProperties")
        try:
            other = other_than(names, self.rules)
        except BadConstraint as error:
            raise self._error(f"{error}", at) from None
        return self._rule("m", Seq((quoted(other), COLON, value)))

    def _members(self, members: dict[str, Node], required: set[str], extra: Node | None) -> Node:
        """Members in their order; `after` has commas before each, `first` before all but one.

        Built from the end, each tail a rule of its own, so that the size grows with the number of
        members.
        """
        after: Node = EMPTY if extra is None else Repeat(Seq((COMMA, extra)), 0, None)
        first: Node = EMPTY if extra is None else optional(separated(extra, 0, None))
        for name, member in reversed(members.items()):
            after_ref, first_ref = self._tail(after), self._tail(first)
            here = Seq((member, after_ref))
            if name in required:
                after, first = Seq((COMMA, here)), here
            else:
                after = Seq((optional(Seq((COMMA, member))), after_ref))
                first = Alt((here, first_ref))
        return first

    def _tail(self, node: Node) -> Node:
        return node if node == EMPTY else self._rule("t", node)


def _both(first: list[str], second: list[str]) -> list[str]:
    """The types of the first list that the second allows; an integer is a number."""
    numbers = {"integer", "number"}
    is_number = bool(numbers & set(second))
    found = [
        kind if kind in second else "integer"
        for kind in first
        if kind in second or (is_number and kind in numbers)
    ]
    return list(dict.fromkeys(found))


def _is_index(text: str, n: int) -> bool:
    """Whether a text is the index of one of n items, as JSON pointers write it (RFC 6901)."""
    is_digits = text.isascii() and text.isdecimal() and len(text) <= len(str(n))
    return is_digits and str(int(text)) == text and int(text) < n


def _is_document(schema: object, at: str) -> bool:
    """Whether a part's own `$id` makes it a document, which its references begin at."""
    own = schema.get("$id") if isinstance(schema, dict) and at != "#" else None
    return isinstance(own, str) and not own.startswith("#")


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])
