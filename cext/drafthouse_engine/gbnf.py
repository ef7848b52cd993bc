"""Languages as trees, and their GBNF: what regular expressions, choices and JSON schemas share."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from drafthouse_engine._spec import check_grammar
from drafthouse_engine.errors import BadConstraint, BadGrammar

__all__ = [
    "CODE_POINT_MAX",
    "EMPTY",
    "GRAMMAR_BYTES_MAX",
    "REPEAT_MAX",
    "Alt",
    "Chars",
    "Node",
    "Ref",
    "Repeat",
    "Rules",
    "Seq",
    "chars_of",
    "complement",
    "is_finite",
    "literal",
    "optional",
    "to_gbnf",
]

CODE_POINT_MAX: Final = 0x10FFFF
REPEAT_MAX: Final = 2000  # llama.cpp writes repetitions out, and reads more as "no bound"
GRAMMAR_BYTES_MAX: Final = 65536
SURROGATES: Final = (0xD800, 0xDFFF)  # no characters: UTF-8 cannot hold them

Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: tuple[Range, ...]
    """Code points, inclusive; sorted, disjoint, at least one."""


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; without items, the empty text."""

    items: tuple[Node, ...]
    """What follows one another."""


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    items: tuple[Node, ...]
    """The alternatives, at least one."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One thing several times."""

    item: Node
    """What is repeated."""
    n_min: int
    """Fewest times, ≥ 0."""
    n_max: int | None
    """Most times; None is without bound."""


@dataclass(frozen=True, slots=True)
class Ref:
    """What a named rule stands for: the way to recursion."""

    name: str
    """A name in the rules that are given to `to_gbnf`."""


Node: TypeAlias = Chars | Seq | Alt | Repeat | Ref
Rules: TypeAlias = dict[str, Node]

EMPTY: Final = Seq(())


def chars_of(ranges: Iterable[Range]) -> Chars:
    """Returns a set of characters from ranges in any order, overlapping or not."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def complement(chars: Chars) -> Chars:
    """Returns all characters that are not in a set; surrogates are none."""
    ranges = chars_of((*chars.ranges, SURROGATES)).ranges
    edges = [-1, *(edge for pair in ranges for edge in pair), CODE_POINT_MAX + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return Chars(tuple((a + 1, b - 1) for a, b in gaps if a + 1 <= b - 1))


def literal(text: str) -> Node:
    """Returns the language of one text."""
    return Seq(tuple(Chars(((ord(c), ord(c)),)) for c in text))


def optional(node: Node) -> Node:
    """Returns a language and the empty text."""
    return Repeat(node, 0, 1)


class _Emptiness:
    """Answers about the empty text, each node once: a node may stand in a tree at many places."""

    def __init__(self) -> None:
        # The nodes are held, so that no other one gets the identity of one that has gone.
        self._nullable: dict[int, tuple[Node, bool]] = {}
        self._non_empty: dict[int, tuple[Node, Node | None]] = {}

    def is_nullable(self, node: Node) -> bool:
        """Returns whether the empty text is among a language; a reference counts as not."""
        if id(node) not in self._nullable:
            self._nullable[id(node)] = node, self._find_nullable(node)
        return self._nullable[id(node)][1]

    def _find_nullable(self, node: Node) -> bool:
        match node:
            case Seq(items):
                return all(self.is_nullable(item) for item in items)
            case Alt(items):
                return any(self.is_nullable(item) for item in items)
            case Repeat(item, n_min, n_max):
                return n_min == 0 or n_max == 0 or self.is_nullable(item)
        return False

    def non_empty(self, node: Node) -> Node | None:
        """Returns a language without the empty text; None when nothing is left.

        GBNF cannot repeat without bound what may be empty.
        """
        if id(node) not in self._non_empty:
            self._non_empty[id(node)] = node, self._find_non_empty(node)
        return self._non_empty[id(node)][1]

    def _find_non_empty(self, node: Node) -> Node | None:
        if not self.is_nullable(node):
            return node
        match node:
            case Seq(items):
                return self._non_empty_seq(items)
            case Alt(items):
                left = tuple(found for item in items if (found := self.non_empty(item)) is not None)
                return Alt(left) if left else None
            case Repeat(item, _, n_max):
                first = self.non_empty(item)
                return None if first is None or n_max == 0 else Repeat(first, 1, n_max)
        return node

    def _non_empty_seq(self, items: tuple[Node, ...]) -> Node | None:
        """The first item that is not empty may be any one."""
        starts = [
            Seq((first, *items[i + 1 :]))
            for i, item in enumerate(items)
            if (first := self.non_empty(item)) is not None
        ]
        return Alt(tuple(starts)) if starts else None


def to_gbnf(root: Node, rules: Rules | None = None, *, where: int | str = "") -> str:
    """Returns the GBNF of a language, compiled once to see that llama.cpp takes it.

    Args:
        root: the language.
        rules: what its references stand for.
        where: the place of the whole, for the error.

    Raises:
        BadConstraint: the grammar is too large or too ambiguous.
    """
    try:
        text = _text(root, rules or {})
        check_grammar(text)
    except BadGrammar as error:
        raise BadConstraint(str(error), where=where) from None
    return text


def _text(root: Node, named: Rules) -> str:
    writer = _Writer()
    for name in _inner_first(root, named):
        writer.define_rule(name, named[name])
    writer.define("root", root)
    return "\n".join(f"{name} ::= {body}" for name, body in writer.rules.items())


def is_finite(root: Node, rules: Rules) -> bool:
    """Returns whether each rule that a tree refers to has a text that ends."""
    names = _inner_first(root, rules)
    ended: set[str] = set()
    followers: dict[str, list[str]] = {}  # who is asked again when a rule is found to end
    waiting = names[::-1]
    while waiting:
        name = waiting.pop()
        needed = [] if name in ended else _needed(rules[name], ended)
        for other in needed:
            followers.setdefault(other, []).append(name)
        if not needed:
            ended.add(name)
            waiting += followers.pop(name, [])
    return len(ended) == len(names)


def _needed(node: Node, ended: set[str]) -> list[str]:
    """Returns rules without one of which a text of a language cannot end; none: one can."""
    found: list[str] = []
    match node:
        case Ref(name):
            return [] if name in ended else [name]
        case Seq(items):
            return next((needed for item in items if (needed := _needed(item, ended))), [])
        case Alt(items):
            for item in items:
                needed = _needed(item, ended)
                if not needed:
                    return []
                found += needed
        case Repeat(item, n_min, _):
            return _needed(item, ended) if n_min > 0 else []
    return found


def _inner_first(root: Node, rules: Rules) -> list[str]:
    """Returns the rules that a tree refers to; each behind those that it is made of itself."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    walked: set[int] = set()
    waiting = [(name, False) for name in _references(root, walked)]
    while waiting:
        name, is_open = waiting.pop()
        if is_open:
            found[name] = None
        elif name not in seen:
            seen.add(name)
            waiting.append((name, True))
            waiting += [(inner, False) for inner in _references(rules[name], walked)]
    return list(found)


def _references(root: Node, walked: set[int]) -> list[str]:
    """Returns the names in a tree, but for parts that were walked in another tree."""
    found: dict[str, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Ref):
            found[node.name] = None
        if id(node) in walked:
            continue
        walked.add(id(node))
        if isinstance(node, Seq | Alt):
            waiting += node.items
        elif isinstance(node, Repeat):
            waiting.append(node.item)
    return list(found)


class _Writer:
    """Writes trees as rules; a tree that is not one symbol becomes a rule of its own."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._symbols: dict[str, str] = {}
        self._terms: dict[int, tuple[Node, str]] = {}
        self._emptiness = _Emptiness()
        self._n_bytes = 0

    def define_rule(self, name: str, node: Node) -> None:
        """Writes what a reference stands for; equal rules are written once."""
        body = self._body(node)
        is_used = name in self._symbols  # a rule that it is made of refers to it
        if not is_used and (body in self._names or isinstance(node, Ref)):
            self._symbols[name] = self._names.get(body, body)
            return
        symbol = self._symbols.setdefault(name, f"u-{name}")
        self._names.setdefault(body, symbol)
        self._add(symbol, body)

    def define(self, name: str, node: Node) -> None:
        self._add(name, self._body(node))

    def _add(self, name: str, body: str) -> None:
        self._n_bytes += len(name) + len(body) + 6
        if self._n_bytes > GRAMMAR_BYTES_MAX:
            raise BadConstraint(
                f"the grammar has more than {GRAMMAR_BYTES_MAX} bytes; write it shorter"
            )
        self.rules[name] = body

    def _body(self, node: Node) -> str:
        items = node.items if isinstance(node, Alt) else (node,)
        return " | ".join(dict.fromkeys(self._sequence(item) for item in items))

    def _sequence(self, node: Node) -> str:
        if not isinstance(node, Seq):
            return self._term(node)
        return " ".join(_joined(self._term(item) for item in node.items)) or '""'

    def _term(self, node: Node) -> str:
        if id(node) not in self._terms:
            self._terms[id(node)] = node, self._written(node)
        return self._terms[id(node)][1]

    def _written(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return _chars(ranges)
            case Repeat(item, n_min, n_max):
                return self._repeat(item, n_min, n_max)
            case Ref(name):
                return self._symbols.setdefault(name, f"u-{name}")
            case Seq(items) if not items:
                return '""'
            case Seq(items) | Alt(items) if len(items) == 1:
                return self._term(items[0])
        return self._rule(self._body(node))

    def _rule(self, body: str) -> str:
        """Returns the name of the rule with this body; equal bodies share a rule."""
        if body not in self._names:
            self._names[body] = f"r{len(self._names)}"
            self._add(self._names[body], body)
        return self._names[body]

    def _repeat(self, item: Node, n_min: int, n_max: int | None) -> str:
        most = n_min if n_max is None else n_max
        if most > REPEAT_MAX:
            raise BadConstraint(f"something is repeated {most} times; at most {REPEAT_MAX} can be")
        if n_max == 0:
            return '""'
        if n_max is None and n_min <= 1:
            item, n_min = _unnested(item, n_min)
        if n_max is None and self._emptiness.is_nullable(item):
            found = self._emptiness.non_empty(item)
            return '""' if found is None else self._repeat(found, 0, None)
        symbol = self._term(item)
        if symbol == '""':
            return symbol
        if symbol[-1] in "*+?}":
            symbol = self._rule(symbol)
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        if (n_min, n_max) == (1, 1):
            return symbol
        return symbol + short.get((n_min, n_max), f"{{{n_min},{'' if n_max is None else n_max}}}")


def _unnested(item: Node, n_min: int) -> tuple[Node, int]:
    """Returns what many times many are once many: (x+)* is x*."""
    while True:
        match item:
            case Seq((only,)) | Alt((only,)):
                item = only
            case Repeat(inner, 0 | 1 as least, None):
                item, n_min = inner, min(least, n_min)
            case _:
                return item, n_min


def _joined(terms: Iterable[str]) -> Iterator[str]:
    """Joins neighbouring literals."""
    held = ""
    for term in terms:
        if term.startswith('"') and term.endswith('"'):
            held += term[1:-1]
            continue
        if held:
            yield f'"{held}"'
            held = ""
        yield term
    if held:
        yield f'"{held}"'


@functools.lru_cache(maxsize=1024)
def _chars(ranges: tuple[Range, ...]) -> str:
    if not ranges:
        raise BadConstraint("a set of characters is empty: nothing can match it")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f'"{_escaped(ranges[0][0])}"'
    spans = (
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
        for low, high in ranges
    )
    return f"[{''.join(spans)}]"


def _escaped(code_point: int) -> str:
    char = chr(code_point)
    if char.isascii() and (char.isalnum() or char in " _.,:;/{}()=+'"):
        return char
    if code_point <= 0xFF:
        return f"\\x{code_point:02X}"
    return f"\\u{code_point:04X}" if code_point <= 0xFFFF else f"\\U{code_point:08X}"
